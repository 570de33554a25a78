//! Mappings of a process whose structures are made by hand: as Linux has them, and as a guest may have made them.

use super::{
    Kernel,
    hostile_test::{HEAP, MAP, Member, Ram, btf, guest_with, structures},
};

const PER_CPU: usize = 0x100_5000;
const CURRENT: usize = 0x100_6000;
/// In the heap: the process, its `mm_struct`, its page tables.
const TASK: usize = HEAP + 0x8000;
const MM: usize = HEAP + 0x9000;
const TABLE: u64 = HEAP as u64 + 0xa000;
const NODE: usize = HEAP + 0x1_1000;
const AREA: usize = HEAP + 0x1_2000;
const FILE: usize = HEAP + 0x1_3000;
const MOUNT: usize = HEAP + 0x1_4000;
const ENTRY: usize = HEAP + 0x1_5000;
const FOLDER: usize = HEAP + 0x1_5100;
const ROOT: usize = HEAP + 0x1_5200;
const NAMES: usize = HEAP + 0x1_6000;
const VDSO: usize = HEAP + 0x1_7000;
/// What points to a leaf of a maple tree and to nodes of ranges, as in a tree's root; and what tells another node from a root.
const LEAF: u64 = 1 << 3 | 2;
const RANGE: u64 = 2 << 3 | 2;
const RANGE_WITH_GAPS: u64 = 3 << 3 | 2;
const BELOW: u64 = 2 ^ 4;

fn at(physical: usize) -> u64 {
    MAP + physical as u64
}

/// The structures of mappings, in a maple tree or in a red-black one. They are numbered behind the integer and those that are there.
fn types(maple: bool) -> Vec<(&'static str, Vec<Member<'static>>)> {
    let mut types = structures();
    let first = types.len() as u32 + 2;
    let tree = if maple {
        ("mm_mt", first, 16)
    } else {
        ("mm_rb", first + 1, 16)
    };
    let mm = types.iter_mut().find(|(name, _)| *name == "mm_struct").unwrap();
    mm.1.extend([tree, ("context", first + 2, 32)]);
    types.extend([
        ("maple_tree", vec![("ma_root", 1, 0)]),
        ("rb_root", vec![("rb_node", 1, 0)]),
        ("", vec![("vdso", 1, 0), ("vdso_image", 1, 8)]),
        (
            "vm_area_struct",
            vec![
                ("vm_start", 1, 0),
                ("vm_end", 1, 8),
                ("vm_pgoff", 1, 16),
                ("vm_file", 1, 24),
                ("vm_rb", first + 4, 32),
            ],
        ),
        ("rb_node", vec![("rb_right", 1, 8), ("rb_left", 1, 16)]),
        ("maple_range_64", vec![("pivot", 1, 8), ("slot", 1, 128)]),
        ("maple_arange_64", vec![("pivot", 1, 8), ("slot", 1, 80)]),
        ("file", vec![("f_mode", 1, 0), ("f_path", first + 8, 16)]),
        ("path", vec![("mnt", 1, 0), ("dentry", 1, 8)]),
        ("dentry", vec![("d_parent", 1, 0), ("d_name", first + 10, 8)]),
        ("qstr", vec![("len", 1, 4), ("name", 1, 8)]),
        (
            "mount",
            vec![("mnt_parent", 1, 0), ("mnt_mountpoint", 1, 8), ("mnt", first + 12, 16)],
        ),
        ("vfsmount", vec![("mnt_root", 1, 0)]),
        ("vdso_image", vec![("data", 1, 0), ("size", 1, 8)]),
    ]);
    types
}

fn area(ram: &mut Ram, place: usize, [start, end, page, file]: [u64; 4]) {
    for (n, value) in [start, end, page, file].into_iter().enumerate() {
        ram.word(place + 8 * n, value);
    }
}

fn entry(ram: &mut Ram, place: usize, parent: usize, name: &str) {
    let text = NAMES + (place - ENTRY);
    ram.put(text, name.as_bytes());
    ram.word(place, at(parent));
    ram.word(place + 8, (name.len() as u64) << 32);
    ram.word(place + 16, at(text));
}

/// A process that has mapped two pages of `/lib/prog` at 400000H, and the vdso at 600000H.
fn process(maple: bool) -> Ram {
    let symbols = [(PER_CPU, "D__per_cpu_offset"), (CURRENT, "Dcurrent_task")];
    let mut ram = guest_with(&btf(&types(maple)), &symbols);
    ram.word(CURRENT, at(TASK));
    area(&mut ram, AREA, [0x40_0000, 0x40_2000, 3, at(FILE)]);
    area(&mut ram, AREA + 0x100, [0x60_0000, 0x60_1000, 0, 0]);
    area(&mut ram, AREA + 0x200, [0x70_0000, 0x70_1000, 0, 0]);
    if maple {
        ram.word(MM + 16, at(NODE) | LEAF);
        let limits = [0x3f_ffff, 0x40_1fff, 0x5f_ffff, 0x60_0fff, 0x6f_ffff];
        let areas = [0, at(AREA), 0, at(AREA + 0x100), 0, at(AREA + 0x200)];
        limits
            .iter()
            .enumerate()
            .for_each(|(n, limit)| ram.word(NODE + 8 + 8 * n, *limit));
        areas
            .iter()
            .enumerate()
            .for_each(|(n, area)| ram.word(NODE + 128 + 8 * n, *area));
    } else {
        // The middle one is the root.
        ram.word(MM + 16, at(AREA + 0x100 + 32));
        ram.word(AREA + 0x100 + 32 + 16, at(AREA + 32));
        ram.word(AREA + 0x100 + 32 + 8, at(AREA + 0x200 + 32));
    }
    ram.word(FILE + 16, at(MOUNT + 16));
    ram.word(FILE + 24, at(ENTRY));
    entry(&mut ram, ENTRY, FOLDER, "prog");
    entry(&mut ram, FOLDER, ROOT, "lib");
    entry(&mut ram, ROOT, ROOT, "/");
    ram.word(MOUNT, at(MOUNT));
    ram.word(MOUNT + 16, at(ROOT));
    ram.word(MM + 32, 0x60_0000);
    ram.word(MM + 40, at(VDSO));
    ram.word(VDSO, at(VDSO + 0x100));
    ram.word(VDSO + 8, 4);
    ram.put(VDSO + 0x100, b"vdso");
    ram
}

// covers: trace/mappings
#[test]
fn mappings_are_found_in_maple_trees_and_in_red_black_ones() {
    for maple in [true, false] {
        let mut ram = process(maple);
        let kernel = Kernel::find(&mut ram).unwrap();
        let mut of = |cr3, address| kernel.mapping(&mut ram, 0, cr3, address);
        for (address, range, path) in [
            (0x3f_ffff, None, ""),
            (0x40_0000, Some((0x40_0000, 0x40_2000)), "/lib/prog"),
            (0x40_1fff, Some((0x40_0000, 0x40_2000)), "/lib/prog"),
            (0x40_2000, None, ""),
            (0x60_0000, Some((0x60_0000, 0x60_1000)), "[vdso]"),
            (0x70_0fff, Some((0x70_0000, 0x70_1000)), ""),
            (0x70_1000, None, ""),
        ] {
            let found = of(TABLE, address);
            assert_eq!(
                found.as_ref().map(|found| (found.start, found.end)),
                range,
                "{maple} {address:x}"
            );
            assert_eq!(
                found.map_or(String::new(), |found| found.path),
                path,
                "{maple} {address:x}"
            );
        }
        assert_eq!(of(TABLE, 0x40_0000).unwrap().offset, 0x3000);
        // The table of user mode is the one behind; others are other processes'.
        assert!(of(TABLE + 0x1000, 0x40_0000).is_some());
        assert!(of(TABLE + 0x2000, 0x40_0000).is_none());
        let vdso = of(TABLE, 0x60_0000).unwrap().vdso.unwrap();
        assert_eq!(kernel.vdso(&mut ram, vdso).unwrap(), b"vdso");
    }
}

// covers: trace/mappings
#[test]
fn a_tree_of_two_levels_is_gone_down() {
    for (root, slots) in [(RANGE, 128), (RANGE_WITH_GAPS, 80)] {
        let mut ram = process(true);
        let (top, empty) = (NODE + 0x100, NODE + 0x200);
        ram.word(MM + 16, at(top) | root);
        // Nothing up to 3FFFFFH, what there was up to 6FFFFFH, nothing behind.
        ram.word(top + 8, 0x3f_ffff);
        ram.word(top + 16, 0x6f_ffff);
        for (n, node) in [empty, NODE, empty].into_iter().enumerate() {
            ram.word(top + slots + 8 * n, (at(node) | LEAF) ^ BELOW);
        }
        let kernel = Kernel::find(&mut ram).unwrap();
        let mut path = |address| kernel.mapping(&mut ram, 0, TABLE, address).map(|found| found.path);
        assert_eq!(path(0x40_0000).as_deref(), Some("/lib/prog"));
        assert_eq!(path(0x60_0000).as_deref(), Some("[vdso]"));
        assert_eq!((path(0x3f_0000), path(0x70_0000)), (None, None));
    }
}

// covers: trace/mappings
#[test]
fn a_file_on_another_file_system_has_the_path_of_where_that_is_mounted() {
    let mut ram = process(true);
    // `lib` is the root of a file system that is mounted on `mnt` of the first one.
    ram.word(MOUNT + 16, at(FOLDER));
    ram.word(MOUNT, at(MOUNT + 0x100));
    ram.word(MOUNT + 8, at(ENTRY + 0x300));
    entry(&mut ram, ENTRY + 0x300, ROOT, "mnt");
    ram.word(MOUNT + 0x100, at(MOUNT + 0x100));
    ram.word(MOUNT + 0x110, at(ROOT));
    let kernel = Kernel::find(&mut ram).unwrap();
    assert_eq!(kernel.mapping(&mut ram, 0, TABLE, 0x40_0000).unwrap().path, "/mnt/prog");
}

// covers: trace/mappings, trace/hostile-linux
#[test]
fn trees_and_paths_that_do_not_end_are_followed_within_a_budget() {
    type Change = (&'static str, bool, fn(&mut Ram));
    let changes: [Change; 9] = [
        ("a node in itself", true, |ram| {
            ram.word(MM + 16, at(NODE) | RANGE);
            ram.word(NODE + 128 + 8, at(NODE) | RANGE);
        }),
        ("a node of no kind", true, |ram| {
            ram.word(MM + 16, at(NODE) | 15 << 3 | 2)
        }),
        ("a node nowhere", true, |ram| {
            ram.word(MM + 16, 0xffff_0000_0000_0000 | LEAF)
        }),
        ("no tree", true, |ram| ram.word(MM + 16, at(AREA))),
        ("a tree in itself", false, |ram| {
            ram.word(MM + 16, at(AREA + 32));
            ram.word(AREA, 0x50_0000);
            ram.word(AREA + 32 + 16, at(AREA + 32));
        }),
        ("a folder in itself under another name", true, |ram| {
            ram.word(FOLDER, at(ENTRY));
        }),
        ("a mount on itself", true, |ram| {
            ram.word(MOUNT, at(MOUNT + 0x100));
            ram.word(MOUNT + 8, at(ROOT));
            ram.word(MOUNT + 0x100, at(MOUNT));
            ram.word(MOUNT + 0x108, at(ROOT));
            ram.word(MOUNT + 0x110, at(ROOT));
        }),
        ("a name nowhere", true, |ram| ram.word(ENTRY + 16, 0x1234)),
        ("an end before its beginning", true, |ram| ram.word(AREA + 8, 0x1000)),
    ];
    for (what, maple, change) in changes {
        let mut ram = process(maple);
        let kernel = Kernel::find(&mut ram).unwrap();
        change(&mut ram);
        ram.read = 0;
        assert_eq!(kernel.mapping(&mut ram, 0, TABLE, 0x40_0000), None, "{what}");
        assert!(ram.read <= 300 << 10, "{what}: {} bytes", ram.read);
    }
    // A name of the longest kind, with what no line of text can hold.
    let mut ram = process(true);
    let kernel = Kernel::find(&mut ram).unwrap();
    ram.word(ENTRY + 8, u64::MAX);
    ram.bytes[NAMES..NAMES + 300].fill(b'\n');
    ram.put(NAMES + 0x100, b"lib");
    let path = kernel.mapping(&mut ram, 0, TABLE, 0x40_0000).unwrap().path;
    assert!(path.len() < 270 && path.starts_with("/lib/??"), "{path}");
    // A vdso of any length.
    ram.word(VDSO + 8, u64::MAX);
    assert_eq!(kernel.mapping(&mut ram, 0, TABLE, 0x60_0000).unwrap().vdso, None);
    assert!(
        kernel
            .vdso(&mut ram, (at(VDSO), u64::MAX))
            .is_some_and(|bytes| bytes.len() == 64 << 10)
    );
}
