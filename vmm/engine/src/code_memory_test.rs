//! Code that is put into executable memory runs, and its mappings have the rights that they should have.

use super::*;

/// The rights of this process's mappings of a memory file.
fn rights(name: &str) -> Vec<String> {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let named = maps.lines().filter(|line| line.contains(name));
    named
        .map(|line| line.split_whitespace().nth(1).unwrap().into())
        .collect()
}

// covers: engine/code-memory
#[test]
fn code_runs_where_it_cannot_be_written() {
    let mut memory = CodeMemory::map(c"engine-test-code", 0x1000).expect("executable memory");
    assert_eq!(rights("engine-test-code").len(), 2);
    // mov eax, n; ret
    let code = |n: u8| [0xb8, n, 0, 0, 0, 0xc3];
    let first = memory.put(&code(1)).unwrap();
    let second = memory.put(&code(2)).unwrap();
    for (at, n) in [(first, 1), (second, 2)] {
        assert_eq!(at as usize % ALIGN, 0);
        // SAFETY: It is a whole function that takes nothing and touches EAX alone.
        let f = unsafe { core::mem::transmute::<*const u8, extern "sysv64" fn() -> u32>(at) };
        assert_eq!(f(), n);
    }
    for rights in rights("engine-test-code") {
        assert!(!(rights.contains('w') && rights.contains('x')), "{rights}");
    }
    drop(memory);
    assert!(rights("engine-test-code").is_empty(), "both mappings are gone");
}

// covers: engine/code-memory
#[test]
fn what_has_no_room_is_refused_and_changes_nothing() {
    let mut memory = CodeMemory::map(c"engine-test-room", 0x1000).expect("executable memory");
    let most = memory.put(&[0x90; 0x1000 - 32]).expect("it fits");
    assert!(memory.put(&[0x90; 33]).is_none());
    let last = memory
        .put(&[0xc3; 17])
        .expect("it fits exactly, with what aligns the next");
    assert_eq!(last as usize - most as usize, 0x1000 - 32);
    assert!(memory.put(&[0xc3]).is_none());
    assert!(CodeMemory::map(c"engine-test-room", usize::MAX & !0xfff).is_none());
}
