use super::*;
use crate::linux::TaskSeen;

fn of(comm: &str, page_table: Option<u64>, steps: u64) -> TaskSeen {
    let task = Task {
        pid: 1,
        tgid: 1,
        comm: comm.into(),
        page_table,
    };
    TaskSeen { steps, task }
}

/// Linux's decompressor and its first instructions run in ring 0 at low addresses (Documentation/arch/x86/boot.rst).
// covers: symbols/boot
#[test]
fn low_code_before_the_first_process_is_no_users() {
    let recorded = Recorded {
        banner: "Linux version 6.1".into(),
        tasks: vec![of("kthreadd", None, 500), of("init", Some(0x4000), 1000)],
        ..Recorded::default()
    };
    let names = Names::new(SymbolTable::new(), recorded);
    let named = |ip, cr3, step| {
        let (function, start, end) = names.function(ip, names.process(Some(cr3)), Some(step));
        assert!(function == Function::UNKNOWN || (start..end).contains(&ip));
        names.name(function).to_string()
    };
    assert_eq!(named(0x20_0000, 0x9000, 7), "[boot]");
    assert_eq!(named(0x20_0000, 0x9000, 999), "[boot]");
    assert_eq!(named(0x40_1000, 0x4000, 1000), "[user]");
    assert_eq!(named(0xffff_ffff_8100_0000, 0x9000, 7), "[unknown]");
}
