//! Memory of guests that want the look at it to take long, or to take much.

use std::{cell::Cell, ops::Range};

use super::{Kernel, Memory, Recording};

/// Where the kernel's image is linked to, and where this one lies: at the beginning of RAM.
pub(super) const MAP: u64 = 0xffff_ffff_8000_0000;
const RAM: usize = 48 << 20;
/// Places in the image, physically.
const TABLES_END: usize = 0x180_0000;
const PAGE_TABLES: usize = 0x101_0000;
const BANNER: usize = 0x100_1000;
const PHYS_BASE: usize = 0x100_2000;
const MODULES: usize = 0x100_3000;
const INIT_TASK: usize = 0x100_4000;
const BTF: usize = 0x190_0000;
/// Structures and what they point to.
pub(super) const HEAP: usize = 0x200_0000;

/// RAM from 0 on that counts what is read of it.
pub(super) struct Ram {
    pub bytes: Vec<u8>,
    pub read: u64,
    /// How often it was asked whether somebody still waits, and when nobody does any more.
    asked: Cell<u64>,
    patience: u64,
}

impl Memory for Ram {
    fn read_physical(&mut self, gpa: u64, bytes: &mut [u8]) -> bool {
        let Some(from) = usize::try_from(gpa)
            .ok()
            .and_then(|at| self.bytes.get(at..)?.get(..bytes.len()))
        else {
            return false;
        };
        bytes.copy_from_slice(from);
        self.read += bytes.len() as u64;
        true
    }

    fn ram(&self) -> Vec<Range<u64>> {
        std::iter::once(0..self.bytes.len() as u64).collect()
    }

    fn is_awaited(&self) -> bool {
        self.asked.set(self.asked.get() + 1);
        self.asked.get() <= self.patience
    }
}

impl Ram {
    fn new(len: usize) -> Ram {
        Ram {
            bytes: vec![0; len],
            read: 0,
            asked: Cell::new(0),
            patience: u64::MAX,
        }
    }

    pub fn put(&mut self, at: usize, bytes: &[u8]) {
        self.bytes[at..at + bytes.len()].copy_from_slice(bytes);
    }

    pub fn word(&mut self, at: usize, value: u64) {
        self.put(at, &value.to_le_bytes());
    }
}

fn padded(mut bytes: Vec<u8>) -> Vec<u8> {
    bytes.resize(bytes.len().next_multiple_of(8), 0);
    bytes
}

/// 256 tokens and their index: a character for itself, and `long` for the token 1.
fn tokens(long: &str) -> (Vec<u8>, Vec<u8>) {
    let (mut table, mut index) = (Vec::new(), Vec::new());
    for n in 0..=255u8 {
        index.extend_from_slice(&(table.len() as u16).to_le_bytes());
        match n {
            1 => table.extend_from_slice(long.as_bytes()),
            n if n.is_ascii_graphic() => table.push(n),
            _ => table.push(b'?'),
        }
        table.push(0);
    }
    (padded(table), index)
}

/// The tables of scripts/kallsyms.c, `write_src`, up to where they end.
fn kallsyms(symbols: &[(u64, Vec<u8>)], long: &str) -> Vec<u8> {
    let (mut offsets, mut names, mut markers) = (Vec::new(), Vec::new(), Vec::new());
    for (n, (address, name)) in symbols.iter().enumerate() {
        offsets.extend_from_slice(&((address - MAP) as u32).to_le_bytes());
        if n % 256 == 0 {
            markers.extend_from_slice(&(names.len() as u32).to_le_bytes());
        }
        if name.len() < 0x80 {
            names.push(name.len() as u8);
        } else {
            names.extend_from_slice(&[name.len() as u8 | 0x80, (name.len() >> 7) as u8]);
        }
        names.extend_from_slice(name);
    }
    let (table, index) = tokens(long);
    [
        padded(offsets),
        MAP.to_le_bytes().to_vec(),
        (symbols.len() as u64).to_le_bytes().to_vec(),
        padded(names),
        padded(markers),
        table,
        index,
    ]
    .concat()
}

const INT: u32 = 1;
const STRUCT: u32 = 4;

/// A member of a structure: its name, its type, its offset in bytes.
pub(super) type Member<'a> = (&'a str, u32, u32);

/// Types by btf.rst: the integer is number 1, structures follow.
pub(super) fn btf(structures: &[(&str, Vec<Member<'_>>)]) -> Vec<u8> {
    let (mut types, mut strings) = (Vec::new(), vec![0]);
    let mut text = |name: &str| {
        if name.is_empty() {
            return 0;
        }
        strings.extend_from_slice(name.as_bytes());
        strings.push(0);
        (strings.len() - name.len() - 1) as u32
    };
    let mut words = |words: &[u32]| {
        words
            .iter()
            .for_each(|word| types.extend_from_slice(&word.to_le_bytes()))
    };
    words(&[text("int"), INT << 24, 4, 32]);
    for (name, members) in structures {
        words(&[text(name), STRUCT << 24 | members.len() as u32, 4096]);
        for (name, of, at) in members {
            words(&[text(name), *of, at * 8]);
        }
    }
    let head = [
        0x1_eb9f,
        24,
        0,
        types.len() as u32,
        types.len() as u32,
        strings.len() as u32,
    ];
    let head = head.iter().flat_map(|word| word.to_le_bytes()).collect();
    [head, types, strings].concat()
}

/// Where members are: state 0, list 8, name 24, and so on.
pub(super) fn structures() -> Vec<(&'static str, Vec<Member<'static>>)> {
    vec![
        ("layout", vec![("base", 1, 0), ("size", 1, 8)]),
        (
            "module",
            vec![
                ("state", 1, 0),
                ("list", 1, 8),
                ("name", 1, 24),
                ("core_layout", 2, 80),
                ("init_layout", 2, 96),
                ("kallsyms", 1, 112),
            ],
        ),
        (
            "mod_kallsyms",
            vec![
                ("symtab", 1, 0),
                ("num_symtab", 1, 8),
                ("strtab", 1, 16),
                ("typetab", 1, 24),
            ],
        ),
        (
            "task_struct",
            vec![
                ("tasks", 1, 0),
                ("pid", 1, 16),
                ("tgid", 1, 20),
                ("comm", 1, 24),
                ("mm", 1, 64),
            ],
        ),
        ("mm_struct", vec![("pgd", 1, 0)]),
    ]
}

/// A guest with a kernel in it that has one module and one process.
pub(super) fn guest(types: &[u8]) -> Ram {
    guest_with(types, &[])
}

/// The same with more symbols, by their places in the image.
pub(super) fn guest_with(types: &[u8], more: &[(usize, &'static str)]) -> Ram {
    let mut ram = Ram::new(RAM);
    let at = |physical: usize| MAP + physical as u64;
    let mut symbols = vec![
        (0x100_0000, "T_text"),
        (BANNER, "Dlinux_banner"),
        (PHYS_BASE, "Dphys_base"),
        (MODULES, "dmodules"),
        (INIT_TASK, "Dinit_task"),
        (PAGE_TABLES, "Dinit_top_pgt"),
        (0x140_0000, "R__start_rodata"),
        (BTF, "D__start_BTF"),
        (BTF + types.len(), "D__stop_BTF"),
        (HEAP, "R__end_rodata"),
    ];
    symbols.extend(more);
    symbols.sort_by_key(|(place, _)| *place);
    let symbols: Vec<_> = symbols
        .iter()
        .map(|(place, name)| (at(*place), name.as_bytes().to_vec()))
        .collect();
    let tables = kallsyms(&symbols, "?");
    ram.put(TABLES_END - tables.len(), &tables);
    ram.put(BANNER, b"Linux version 6.1.0-test (x) #1\n\0");
    ram.put(BTF, types);
    // All of RAM at MAP, in pages of 2 MByte.
    ram.word(PAGE_TABLES + 511 * 8, PAGE_TABLES as u64 + 0x1003);
    ram.word(PAGE_TABLES + 0x1000 + 510 * 8, PAGE_TABLES as u64 + 0x2003);
    for n in 0..512 {
        ram.word(PAGE_TABLES + 0x2000 + n * 8, (n as u64) << 21 | 0x83);
    }
    // A module, its symbol table and its names.
    ram.word(MODULES, at(HEAP + 8));
    ram.word(HEAP + 8, at(MODULES));
    ram.put(HEAP + 24, b"fine\0");
    ram.word(HEAP + 80, 0xffff_ffff_c000_0000);
    ram.word(HEAP + 88, 4096);
    ram.word(HEAP + 112, at(HEAP + 0x1000));
    ram.word(HEAP + 0x1000, at(HEAP + 0x2000));
    ram.word(HEAP + 0x1008, 1);
    ram.word(HEAP + 0x1010, at(HEAP + 0x3000));
    ram.word(HEAP + 0x1018, at(HEAP + 0x4000));
    ram.word(HEAP + 0x2000, 1);
    ram.word(HEAP + 0x2008, 0xffff_ffff_c000_0010);
    ram.put(HEAP + 0x3000, b"\0entry\0");
    ram.put(HEAP + 0x4000, b"t");
    // A process.
    ram.word(INIT_TASK, at(HEAP + 0x8000));
    ram.word(HEAP + 0x8000, at(INIT_TASK));
    ram.put(HEAP + 0x8010, &[7, 0, 0, 0, 7, 0, 0, 0]);
    ram.put(HEAP + 0x8018, b"init\0");
    ram.word(HEAP + 0x8040, at(HEAP + 0x9000));
    ram.word(HEAP + 0x9000, at(HEAP + 0xa000));
    ram
}

/// What a look through memory of this size may read.
fn bound(len: usize) -> u64 {
    2 * len as u64 + (1 << 30)
}

// covers: trace/hostile-linux
#[test]
fn an_honest_kernel_is_found() {
    let mut ram = guest(&btf(&structures()));
    let kernel = Kernel::find(&mut ram).unwrap();
    assert_eq!(kernel.banner(), "Linux version 6.1.0-test (x) #1");
    let modules = kernel.modules(&mut ram);
    assert_eq!(modules.len(), 1);
    assert_eq!(
        (modules[0].name.as_str(), &modules[0].symbols[..]),
        ("fine", &[(0xffff_ffff_c000_0010, b't', "entry".to_string())][..])
    );
    let tasks = kernel.tasks(&mut ram);
    assert_eq!((tasks.len(), tasks[0].comm.as_str(), tasks[0].pid), (1, "init", 7));
    assert_eq!(tasks[0].page_table, Some(HEAP as u64 + 0xa000));
}

/// `resources/fuzz/linux/honest`: that guest as the fuzz target takes it, extents of what is not zero, each with its address and length.
/// `UPDATE=1` writes it.
// covers: fuzz/linux
#[test]
fn the_honest_kernel_is_the_one_that_fuzzing_starts_from() {
    let ram = guest(&btf(&structures()));
    let mut extents = Vec::new();
    for (at, piece) in (0u32..).step_by(64).zip(ram.bytes.chunks(64)) {
        if piece.iter().any(|byte| *byte != 0) {
            extents.extend_from_slice(&at.to_le_bytes());
            extents.extend_from_slice(&(piece.len() as u16).to_le_bytes());
            extents.extend_from_slice(piece);
        }
    }
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../resources/fuzz/linux/honest");
    if std::env::var_os("UPDATE").is_some() {
        std::fs::write(path, &extents).unwrap();
    }
    assert!(std::fs::read(path).unwrap() == extents, "UPDATE=1 writes {path}");
}

// covers: trace/hostile-linux
#[test]
fn places_that_look_like_a_symbol_table_are_not_all_followed() {
    let mut ram = Ram::new(RAM);
    // Before each table index as many seeming beginnings as there is room for; each has names of no length up to the index.
    let (table, index) = tokens("?");
    let head = [MAP.to_le_bytes(), (1u64 << 20).to_le_bytes()].concat();
    for at in (0..RAM - (4 << 20)).step_by(512) {
        ram.put(at, &head);
    }
    let end = RAM - (1 << 16);
    ram.put(end - table.len(), &table);
    ram.put(end, &index);
    assert!(Kernel::find(&mut ram).is_none());
    assert!(ram.read < bound(RAM), "{} bytes", ram.read);
    // Whoever waits for it can end it meanwhile.
    let asked = ram.asked.take();
    assert!(asked > 64, "asked {asked} times");
    (ram.read, ram.patience) = (0, 3);
    assert!(Kernel::find(&mut ram).is_none());
    assert!(ram.read < 16 << 20, "{} bytes, and nobody waits", ram.read);
}

// covers: trace/hostile-linux
#[test]
fn token_indexes_everywhere_are_not_all_followed() {
    let mut ram = Ram::new(RAM);
    let (table, index) = tokens("?");
    let both = [table, index].concat();
    for at in (0..RAM - both.len()).step_by(both.len()) {
        ram.put(at, &both);
    }
    assert!(Kernel::find(&mut ram).is_none());
    assert!(ram.read < bound(RAM), "{} bytes", ram.read);
}

// covers: trace/hostile-linux
#[test]
fn names_are_as_long_as_names_can_be() {
    // Each name is 16000 tokens of 6000 characters: 96 megabytes.
    let found = |long: &str, tokens: usize| {
        let mut ram = guest(&[]);
        let name = [&b"T"[..], &vec![1; tokens]].concat();
        let tables = kallsyms(&vec![(MAP + 0x100_0000, name); 300], long);
        let mut alone = Ram::new(RAM);
        alone.put(TABLES_END - tables.len(), &tables);
        std::mem::swap(&mut ram.bytes, &mut alone.bytes);
        let budget = super::kallsyms::budget(&ram.ram());
        let look = &mut super::budget::Look::new(&mut ram, budget);
        super::kallsyms::find(look, |_, tables| Some(tables.symbols.len())).ok()
    };
    assert_eq!(found("x", 500), Some(300));
    assert_eq!(found("x", 600), None);
    assert_eq!(found(&"x".repeat(6000), 16000), None);
}

// covers: trace/hostile-linux
#[test]
fn lists_that_do_not_close_end() {
    let types = btf(&structures());
    // A module that is being made, in a circle that does not lead to the head.
    let mut ram = guest(&types);
    let kernel = Kernel::find(&mut ram).unwrap();
    ram.word(HEAP, 9);
    ram.word(HEAP + 8, MAP + HEAP as u64 + 8);
    ram.read = 0;
    assert_eq!(kernel.modules(&mut ram), []);
    assert!(ram.read < 1 << 20, "{} bytes", ram.read);
    // A loaded one, with as many symbols as it likes, in a table of names without an end.
    ram.word(HEAP, 0);
    ram.word(HEAP + 0x1008, 1 << 20);
    ram.bytes[HEAP + 0x3000..].fill(b'x');
    ram.bytes[HEAP + 0x2000..HEAP + 0x3000].fill(0);
    ram.read = 0;
    let modules = kernel.modules(&mut ram);
    let symbols: usize = modules.iter().map(|module| module.symbols.len()).sum();
    assert!(
        modules.len() <= 4096 && symbols <= 1 << 20,
        "{} modules, {symbols} symbols",
        modules.len()
    );
    assert!(ram.read <= 256 << 20, "{} bytes", ram.read);
    // A process that follows itself.
    ram.word(HEAP + 0x8000, MAP + HEAP as u64 + 0x8000);
    ram.read = 0;
    let tasks = kernel.tasks(&mut ram);
    assert!(tasks.len() <= 1 << 18, "{} processes", tasks.len());
    assert!(ram.read <= 256 << 20, "{} bytes", ram.read);
}

// covers: trace/hostile-linux
#[test]
fn a_name_of_a_process_has_at_most_15_bytes_and_many_are_not_kept_for_ever() {
    let mut ram = guest(&btf(&structures()));
    ram.bytes[HEAP + 0x8018..HEAP + 0x8040].fill(b'y');
    let mut recording = Recording::default();
    assert!(recording.look(&mut ram, 1));
    let kernel = recording.kernel().unwrap();
    assert_eq!(kernel.tasks(&mut ram)[0].comm, "y".repeat(15));
    // Modules of ever new names, each with 100 thousand symbols.
    ram.word(HEAP + 0x1008, 100_000);
    ram.bytes[HEAP + 0x3000..HEAP + 0x3010].copy_from_slice(b"aaaaaaaaaaaaaaa\0");
    ram.word(HEAP + 0x1010, MAP + HEAP as u64 + 0x3000);
    ram.word(HEAP + 0x1000, MAP + HEAP as u64 + 0x10_0000);
    for n in 0..60 {
        ram.put(HEAP + 24, format!("new{n}\0").as_bytes());
        recording.look(&mut ram, 2 + n);
    }
    let dir = std::env::temp_dir().join(format!("minivmm-hostile-{}", std::process::id()));
    recording.write(&dir).unwrap();
    let recorded = super::Recorded::read(&dir).unwrap().unwrap();
    std::fs::remove_dir_all(&dir).unwrap();
    assert!(recorded.cut);
    assert!(
        (2..50).contains(&recorded.modules.len()),
        "{} modules",
        recorded.modules.len()
    );
}

// covers: trace/hostile-linux
#[test]
fn types_in_types_are_not_all_followed() {
    // Each structure has eight nameless members of the next one: 8^24 ways to a name that is not there.
    let mut types = structures();
    let first = types.len() as u32 + 2;
    let task = types.iter().position(|(name, _)| *name == "task_struct").unwrap();
    types[task].1 = vec![("", first, 0)];
    for n in 0..24 {
        types.push(("", vec![("", first + n + 1, 0); 8]));
    }
    types.push(("", vec![("none", 1, 0)]));
    let mut ram = guest(&btf(&types));
    let kernel = Kernel::find(&mut ram).unwrap();
    assert_eq!(kernel.tasks(&mut ram), []);
    // A structure in itself, and a name without an end.
    types[task].1 = vec![("", task as u32 + 2, 0); 8];
    let mut bytes = btf(&types);
    let end = bytes.len();
    bytes[end - 1] = b'x';
    let mut ram = guest(&bytes);
    assert_eq!(Kernel::find(&mut ram).unwrap().tasks(&mut ram), []);
}
