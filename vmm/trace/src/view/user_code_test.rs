//! This process itself: `/proc/self/maps` says what is mapped, and the dynamic linker where functions are.

use std::{fs, os::unix::fs::FileExt, path::Path};

use super::*;

const CR3: u64 = 0x1234_5000;

/// What this process has mapped to be executed.
fn maps() -> Mappings {
    let mut mappings = Mappings::default();
    for line in fs::read_to_string("/proc/self/maps").unwrap().lines() {
        let mut words = line.split_ascii_whitespace();
        let mut word = || words.next().unwrap_or_default();
        let (range, rights, offset) = (word(), word(), word());
        let path = line.split_ascii_whitespace().nth(5).unwrap_or_default();
        if !rights.contains('x') || path == "[vsyscall]" {
            continue;
        }
        let hex = |text| u64::from_str_radix(text, 16).unwrap();
        let (start, end) = range.split_once('-').unwrap();
        let known = mappings.files.iter().position(|file| file.path == path);
        let file = known.unwrap_or_else(|| {
            mappings.files.push(MappedFile {
                path: path.into(),
                build_id: String::new(),
            });
            mappings.files.len() - 1
        });
        mappings.all.push(Mapping {
            step: 100,
            vmcs: None,
            cr3: CR3,
            start: hex(start),
            end: hex(end),
            offset: hex(offset),
            file: (!path.is_empty()).then_some(file),
        });
    }
    mappings
}

fn code(mappings: Mappings, vdsos: &[Vec<u8>], places: &mut GuestFiles) -> UserCode {
    UserCode::new(mappings, &mut |cr3| Some(cr3), &|_, _| Some(77), vdsos, places)
}

#[inline(never)]
extern "C" fn a_function_of_this_test() {}

// covers: symbols/mapped
#[test]
fn functions_of_this_process_its_libraries_and_the_vdso_are_found() {
    let mappings = maps();
    let vdso = mappings.files.iter().position(|file| file.path == "[vdso]");
    let vdso = vdso.and_then(|file| mappings.all.iter().find(|mapping| mapping.file == Some(file)).copied());
    let vdso = vdso.expect("a vdso");
    let mut bytes = vec![0; (vdso.end - vdso.start) as usize];
    let memory = fs::File::open("/proc/self/mem").unwrap();
    memory.read_exact_at(&mut bytes, vdso.start).unwrap();
    let mut places = GuestFiles::default().with_root(Path::new("/"));
    let code = code(mappings, &[bytes], &mut places);
    assert_eq!(places.complaints, [] as [String; 0]);
    let name = |at: u64| {
        let place = code.place(CR3, at, 100)?;
        let module = place.symbol.module.unwrap_or_default().to_string();
        Some((place.symbol.name.to_string(), module, place.offset))
    };
    let own = a_function_of_this_test as extern "C" fn() as usize as u64;
    let (found, _, offset) = name(own).unwrap();
    assert!(
        found.contains("a_function_of_this_test") && offset == 0,
        "{found}+{offset}"
    );
    let getppid = libc::getppid as unsafe extern "C" fn() -> i32 as usize as u64;
    let (found, module, offset) = name(getppid).unwrap();
    assert!(
        found.ends_with("getppid") && module.starts_with("libc") && offset == 0,
        "{found} {module}"
    );
    let of_vdso = code.address("__vdso_clock_gettime").unwrap();
    assert!((vdso.start..vdso.end).contains(&of_vdso));
    let (found, module, _) = name(of_vdso).unwrap();
    assert!(found.ends_with("clock_gettime") && module == "vdso", "{found} {module}");
    // Of another process nothing is known.
    assert_eq!(code.find(CR3 + 0x1000, own, 100), None);
}

fn mapping(step: u64, start: u64, file: Option<usize>) -> Mapping {
    Mapping {
        step,
        vmcs: None,
        cr3: CR3,
        start,
        end: start + 0x2000,
        offset: 0,
        file,
    }
}

// covers: symbols/mapped
#[test]
fn what_was_mapped_last_holds_and_the_first_one_before_it_was_known() {
    let file = |path: &str| MappedFile {
        path: path.into(),
        build_id: String::new(),
    };
    let mappings = Mappings {
        files: vec![file("/nowhere/a"), file("/nowhere/b")],
        all: vec![
            mapping(100, 0x40_0000, Some(0)),
            mapping(200, 0x40_1000, Some(1)),
            mapping(300, 0x40_0000, None),
        ],
    };
    let code = code(mappings, &[], &mut GuestFiles::default());
    let at = |ip, step| code.find(CR3, ip, step).and_then(|place| code.file_name(place.file));
    for (ip, step, name, why) in [
        (0x40_0000, 0, Some("[a]"), "before it was seen"),
        (0x40_0fff, 250, Some("[a]"), "the part that stays"),
        (0x40_1000, 199, Some("[a]"), "before the second"),
        (0x40_1000, 200, Some("[b]"), "the second"),
        (0x40_2fff, 0, Some("[b]"), "the second alone"),
        (0x40_2fff, 1000, Some("[b]"), "behind the third"),
        (0x40_0000, 300, None, "no file any more"),
        (0x40_3000, 300, None, "behind all"),
        (0x3f_ffff, 300, None, "before all"),
    ] {
        assert_eq!(at(ip, step), name, "{why}");
    }
}

// covers: symbols/mapped
#[test]
fn compiled_code_has_the_names_of_its_map() {
    let dir = std::env::temp_dir().join(format!("minivmm-jit-{}", std::process::id()));
    fs::create_dir_all(dir.join("tmp")).unwrap();
    let text = "400010 20 first of all\nnonsense\n400030 zz\n0x400040 8 second\n";
    fs::write(dir.join("tmp/perf-77.map"), text).unwrap();
    let mappings = Mappings {
        files: Vec::new(),
        all: vec![mapping(1, 0x40_0000, None)],
    };
    let code = code(mappings, &[], &mut GuestFiles::default().with_root(&dir));
    fs::remove_dir_all(&dir).unwrap();
    let name = |ip| code.place(CR3, ip, 1).map(|place| place.to_string());
    assert_eq!(name(0x40_0012).as_deref(), Some("first of all+0x2 [perf-77.map]"));
    assert_eq!(name(0x40_0040).as_deref(), Some("second [perf-77.map]"));
    assert_eq!(name(0x40_0048), None);
    assert_eq!(code.address("second"), Some(0x40_0040));
}

// covers: symbols/mapped
#[test]
fn mappings_that_overlap_in_every_way_take_bounded_memory() {
    let all = (0..20_000).map(|n| Mapping {
        end: (40_000 - n) << 12,
        ..mapping(n, n << 12, None)
    });
    let mappings = Mappings {
        files: Vec::new(),
        all: all.collect(),
    };
    let code = code(mappings, &[], &mut GuestFiles::default());
    let kept: usize = code.spaces.values().flat_map(|space| &space.pieces).map(Vec::len).sum();
    assert!(kept <= MOST, "{kept}");
}
