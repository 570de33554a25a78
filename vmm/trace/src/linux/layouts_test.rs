//! Kernels whose symbol tables are laid out as each version of scripts/kallsyms.c has them, made by hand: with pointers of 64 and of 32 bits,
//! with and without symbols of data.

use std::ops::Range;

use super::{Kernel, Memory, NotFound};

/// Where the image lies, physically, and where its parts are in it.
const AT: u64 = 0x240_0000;
const BANNER: u64 = 0x20_0000;
const PHYS_BASE: u64 = 0x20_1000;
const POINTERS: u64 = 0x10_1000;
const ETEXT: u64 = 0x10_0000;
const TABLES: u64 = 0x22_0000;
const END: u64 = 0x30_0000;
/// Functions, and the bytes of each.
const FUNCTIONS: u64 = 2000;
const LENGTH: u64 = 64;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Layout {
    /// Up to 4.20: markers as long as pointers.
    LongMarkers,
    /// Up to 6.1.
    Before,
    /// 6.2 and 6.3: the order of names before the tokens.
    BeforeWithOrder,
    /// 6.4 to 7.2.
    Behind,
    /// 7.3: offsets from their own places.
    Places,
}

struct Ram(Vec<u8>);

impl Memory for Ram {
    fn read_physical(&mut self, gpa: u64, bytes: &mut [u8]) -> bool {
        let from = usize::try_from(gpa)
            .ok()
            .and_then(|at| self.0.get(at..)?.get(..bytes.len()));
        from.map(|from| bytes.copy_from_slice(from)).is_some()
    }

    fn ram(&self) -> Vec<Range<u64>> {
        std::iter::once(0..self.0.len() as u64).collect()
    }
}

impl Ram {
    fn put(&mut self, at: u64, bytes: &[u8]) {
        self.0[at as usize..at as usize + bytes.len()].copy_from_slice(bytes);
    }
}

fn padded(mut bytes: Vec<u8>, width: usize) -> Vec<u8> {
    bytes.resize(bytes.len().next_multiple_of(width), 0);
    bytes
}

/// A kernel: its symbols as offsets in the image, and its virtual beginning.
struct Image {
    layout: Layout,
    width: usize,
    start: u64,
    symbols: Vec<(u64, String)>,
}

impl Image {
    fn new(layout: Layout, width: usize, with_data: bool) -> Image {
        let mut symbols = vec![(0, "T_text".to_string())];
        if width == 8 {
            symbols.push((0, "Tstartup_64".into()));
        }
        symbols.extend((1..FUNCTIONS).map(|n| (n * LENGTH, format!("tfunction_{n}"))));
        symbols.push((ETEXT, "T_etext".into()));
        if with_data {
            symbols.push((ETEXT, "R__start_rodata".into()));
            symbols.push((BANNER, "Dlinux_banner".into()));
            if width == 8 {
                symbols.push((PHYS_BASE, "Dphys_base".into()));
            }
            symbols.push((END, "R__end_rodata".into()));
        }
        // With KASLR's slide.
        let start = match width {
            8 => 0xffff_ffff_8100_0000 + 0x1280_0000,
            _ => 0xc000_0000 + AT,
        };
        Image {
            layout,
            width,
            start,
            symbols,
        }
    }

    fn pointer(&self, value: u64) -> Vec<u8> {
        value.to_le_bytes()[..self.width].to_vec()
    }

    /// The tables, of which the token index ends at a physical address that they tell by.
    fn tables(&self, at: u64) -> Vec<u8> {
        let (mut names, mut markers) = (Vec::new(), Vec::new());
        for (n, (_, name)) in self.symbols.iter().enumerate() {
            if n % 256 == 0 {
                let mark = names.len() as u64;
                let size = if self.layout == Layout::LongMarkers {
                    self.width
                } else {
                    4
                };
                markers.extend_from_slice(&mark.to_le_bytes()[..size]);
            }
            names.push(name.len() as u8);
            names.extend_from_slice(name.as_bytes());
        }
        let order: Vec<u8> = (0..self.symbols.len() as u32)
            .rev()
            .flat_map(|n| n.to_be_bytes()[1..].to_vec())
            .collect();
        let (mut table, mut index) = (Vec::new(), Vec::new());
        for n in 0..=255u8 {
            index.extend_from_slice(&(table.len() as u16).to_le_bytes());
            table.push(if n.is_ascii_graphic() { n } else { b'?' });
            table.push(0);
        }
        // Since 7.3 nothing is aligned to more than four bytes.
        let align = if self.layout == Layout::Places { 4 } else { self.width };
        let pad = |bytes: Vec<u8>| padded(bytes, align);
        let count = (self.symbols.len() as u64).to_le_bytes()[..align].to_vec();
        let mut middle = [count, pad(names), pad(markers)].concat();
        if self.layout == Layout::BeforeWithOrder {
            middle.extend(pad(order.clone()));
        }
        middle.extend(pad(table));
        middle.extend(index);
        let base: Vec<u8> = pad(self
            .symbols
            .iter()
            .flat_map(|(place, _)| (*place as u32).to_le_bytes())
            .collect());
        match self.layout {
            Layout::LongMarkers | Layout::Before | Layout::BeforeWithOrder => {
                [base, self.pointer(self.start), middle].concat()
            }
            Layout::Behind => [middle, base, self.pointer(self.start), order].concat(),
            Layout::Places => {
                let here = at + middle.len() as u64;
                let places = self.symbols.iter().enumerate();
                let offsets = places.flat_map(|(n, (place, _))| {
                    let distance = (AT + place) as i64 - (here + 4 * n as u64) as i64;
                    (distance as i32).to_le_bytes()
                });
                [middle, pad(offsets.collect()), order].concat()
            }
        }
    }

    /// The image in memory: functions that call each other, pointers to them, the banner, the tables.
    fn ram(&self) -> Ram {
        let mut ram = Ram(vec![0; 64 << 20]);
        for n in 0..FUNCTIONS {
            let target = (n * 7 + 3) % FUNCTIONS;
            let distance = (target * LENGTH) as i64 - (n * LENGTH + 9) as i64;
            let code = [
                &[0x55, 0x48, 0x89, 0xe5, 0xe8][..],
                &(distance as i32).to_le_bytes(),
                &[0x5d, 0xc3],
            ]
            .concat();
            ram.put(AT + n * LENGTH, &code);
            let pointer = self.pointer(self.start + target * LENGTH);
            ram.put(AT + POINTERS + n * self.width as u64, &pointer);
        }
        ram.put(AT + BANNER, b"Linux version 6.99.0 (made by hand) #1\n\0");
        let delta = AT.wrapping_sub(self.start);
        ram.put(AT + PHYS_BASE, &delta.wrapping_add(0xffff_ffff_8000_0000).to_le_bytes());
        ram.put(AT + TABLES, &self.tables(AT + TABLES));
        ram
    }
}

const LAYOUTS: [Layout; 5] = [
    Layout::LongMarkers,
    Layout::Before,
    Layout::BeforeWithOrder,
    Layout::Behind,
    Layout::Places,
];

// covers: linux-guest/layouts
#[test]
fn every_layout_is_read_with_and_without_symbols_of_data() {
    for layout in LAYOUTS {
        for (width, with_data) in [(8, true), (8, false), (4, true), (4, false)] {
            let what = format!("{layout:?}, {width} bytes, data: {with_data}");
            let image = Image::new(layout, width, with_data);
            let mut ram = image.ram();
            let kernel = Kernel::look_for(&mut ram).unwrap_or_else(|why| panic!("{what}: {why}"));
            assert_eq!(kernel.banner(), "Linux version 6.99.0 (made by hand) #1", "{what}");
            assert_eq!(kernel.physical_base(), AT, "{what}");
            let linked = if width == 8 { 0xffff_ffff_8100_0000 } else { 0xc100_0000 };
            assert_eq!(kernel.slide(), image.start - linked, "{what}");
            let found: Vec<_> = kernel
                .symbols()
                .iter()
                .map(|symbol| (symbol.address, symbol.name))
                .collect();
            let made: Vec<_> = image
                .symbols
                .iter()
                .map(|(place, name)| (image.start + place, &name[1..]))
                .collect();
            assert_eq!(found, made, "{what}");
            assert!(kernel.is_there(&mut ram), "{what}");
            ram.0.fill(0);
            assert!(!kernel.is_there(&mut ram), "{what}");
        }
    }
}

/// Before its relocations are applied, an image tells addresses at which it will not be.
// covers: linux-guest/layouts
#[test]
fn an_image_that_is_not_where_it_will_be_is_not_taken_for_one_that_is() {
    let image = Image::new(Layout::Places, 8, true);
    let mut ram = image.ram();
    ram.put(AT + PHYS_BASE, &[0; 8]);
    assert!(Kernel::find(&mut ram).is_none());
}

// covers: linux-guest/unknown
#[test]
fn a_linux_with_tables_of_another_kind_is_named() {
    let image = Image::new(Layout::Behind, 8, true);
    let mut ram = image.ram();
    let says = |ram: &mut Ram| Kernel::look_for(ram).unwrap_err();
    // Without offsets and order the names alone say nothing.
    let end = ram.0.len();
    let tokens = AT + TABLES;
    let tables = image.tables(tokens);
    ram.put(tokens + tables.len() as u64 - 4000, &[0; 4000]);
    let unknown = NotFound::UnknownTable {
        banner: "Linux version 6.99.0".into(),
    };
    assert_eq!(says(&mut ram), unknown);
    assert!(unknown.to_string().contains("Linux version 6.99.0") && unknown.to_string().contains("--symbols"));
    // Not even tokens.
    ram.put(tokens, &vec![0; tables.len()]);
    assert_eq!(says(&mut ram), unknown);
    ram.0.clear();
    ram.0.resize(end, 0);
    assert_eq!(says(&mut ram), NotFound::Nothing);
}
