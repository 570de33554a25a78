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

#[inline(never)]
extern "C" fn a_function_of_the_names_test() {}

/// This test's own mapping of a function's code, by /proc/self/maps: whose process it is said to be is the test's to choose.
fn mapped(vmcs: Option<u64>, files: &mut Vec<MappedFile>) -> Mapping {
    let address = a_function_of_the_names_test as *const () as u64;
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let hex = |text| u64::from_str_radix(text, 16).unwrap();
    let line = maps.lines().find(|line| {
        let (start, end) = line.split(' ').next().unwrap().split_once('-').unwrap();
        (hex(start)..hex(end)).contains(&address)
    });
    let words: Vec<&str> = line.unwrap().split_whitespace().collect();
    let (start, end) = words[0].split_once('-').unwrap();
    files.push(MappedFile {
        path: words[5].into(),
        build_id: String::new(),
    });
    Mapping {
        step: 100,
        vmcs,
        cr3: 0x4000,
        start: hex(start),
        end: hex(end),
        offset: hex(words[2]),
        file: Some(files.len() - 1),
    }
}

/// A process of the machine's Linux and one of its guest's, with the same page table by number and the same addresses: a file of each without
/// functions, and one with them at the second level alone.
// covers: symbols/guests-programs
#[test]
fn programs_of_a_guest_are_not_those_of_the_machine() {
    const VMCS: u64 = 0x8000;
    let recorded = |comm: &str| Recorded {
        banner: "Linux version 6.1".into(),
        tasks: vec![of(comm, Some(0x4000), 1)],
        ..Recorded::default()
    };
    let mut files: Vec<MappedFile> = ["/bin/below", "/bin/above"]
        .map(|path| MappedFile {
            path: path.into(),
            build_id: String::new(),
        })
        .into();
    let nameless = |vmcs, file| Mapping {
        step: 100,
        vmcs,
        cr3: 0x4000,
        start: 0x1000,
        end: 0x2000,
        offset: 0,
        file: Some(file),
    };
    let with_functions = mapped(Some(VMCS), &mut files);
    let mut all = vec![nameless(None, 0), nameless(Some(VMCS), 1), with_functions];
    // Of a guest that nobody knows.
    all.push(nameless(Some(0x9000), 1));
    let guests = RecordedGuests {
        guests: vec![recorded("guest")],
        seen: vec![VmcsSeen {
            steps: 10,
            pointer: VMCS,
            guest: Some(0),
        }],
    };
    let mut places = GuestFiles::default().with_root(std::path::Path::new("/"));
    let names = Names::new(SymbolTable::new(), recorded("machine"))
        .with_guests(guests, SymbolTable::new())
        .with_mappings(Mappings { files, all }, &mut places);
    let guest = names.guest(Some(VMCS), Some(200));
    let at = |of: &Names, ip| of.function(ip, of.process(Some(0x4000)), Some(200)).0;
    assert_eq!(names.name(at(&names, 0x1800)), "[below]");
    assert_eq!(names.name(at(guest, 0x1800)), "[above]", "by the names of all");
    assert_eq!(guest.name(at(guest, 0x1800)), "[above]", "by its own");
    assert_eq!(guest.process_name(guest.process(Some(0x4000)), Some(200)), "guest");
    let address = a_function_of_the_names_test as *const () as u64;
    let function = at(guest, address);
    assert!(
        names.name(function).contains("a_function_of_the_names_test"),
        "{}",
        names.name(function)
    );
    assert!(names.is_guests(function));
    assert_eq!(
        names.name(at(&names, address)),
        "[user]",
        "the machine's process has not mapped it"
    );
    let unknown = names.guest(Some(0x9000), Some(200));
    assert_eq!(names.name(at(unknown, 0x1800)), "[unknown]");
}
