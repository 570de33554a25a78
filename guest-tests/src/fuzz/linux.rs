//! Memory of a guest that says that it is Linux, and what is found of it.

use std::collections::BTreeMap;
use std::ops::Range;

use trace::linux::{Kernel, Memory, Recording};

/// RAM of the guest.
const RAM: u64 = 48 << 20;
/// Bytes of an extent's head: where it is, its length.
const HEAD: usize = 6;
/// What a look may read of the guest's memory: all of it a few times, and what its budgets allow.
const MOST: u64 = 2 * RAM + (1 << 30) + (2 << 28);

/// Memory of extents, zero in between, that counts what is read of it.
struct Extents {
    pages: BTreeMap<u64, Box<[u8; 4096]>>,
    read: u64,
}

impl Extents {
    fn new(mut bytes: &[u8]) -> Extents {
        let mut pages: BTreeMap<u64, Box<[u8; 4096]>> = BTreeMap::new();
        while let Some((head, rest)) = bytes.split_at_checked(HEAD) {
            let at = u64::from(u32::from_le_bytes([head[0], head[1], head[2], head[3]])) % RAM;
            let len = usize::from(u16::from_le_bytes([head[4], head[5]])).min(rest.len());
            let (content, next) = rest.split_at(len);
            for (byte, at) in content.iter().zip(at..RAM) {
                let page = pages.entry(at >> 12).or_insert_with(|| Box::new([0; 4096]));
                page[at as usize & 0xfff] = *byte;
            }
            bytes = next;
        }
        Extents { pages, read: 0 }
    }
}

impl Memory for Extents {
    fn read_physical(&mut self, gpa: u64, bytes: &mut [u8]) -> bool {
        if gpa.checked_add(bytes.len() as u64).is_none_or(|end| end > RAM) {
            return false;
        }
        self.read += bytes.len() as u64;
        let (mut at, mut rest) = (gpa, bytes);
        while !rest.is_empty() {
            let offset = at as usize & 0xfff;
            let (part, behind) = rest.split_at_mut(rest.len().min(4096 - offset));
            match self.pages.get(&(at >> 12)) {
                Some(page) => part.copy_from_slice(&page[offset..offset + part.len()]),
                None => part.fill(0),
            }
            at += part.len() as u64;
            rest = behind;
        }
        true
    }

    fn ram(&self) -> Vec<Range<u64>> {
        // What nobody has written to is left out.
        self.pages.keys().map(|page| page << 12..(page + 1) << 12).collect()
    }
}

/// The bytes as extents of a guest's memory, in which a kernel, its modules and its processes are looked for.
pub fn linux(bytes: &[u8]) {
    let mut memory = Extents::new(bytes);
    if let Some(kernel) = Kernel::find(&mut memory) {
        assert!(!kernel.banner().is_empty());
        let modules = kernel.modules(&mut memory);
        let tasks = kernel.tasks(&mut memory);
        for comm in tasks.iter().map(|task| &task.comm) {
            assert!(comm.len() <= 60 && comm.chars().count() <= 15, "{comm:?}");
        }
        assert!(modules.len() <= 4096 && tasks.len() <= 1 << 18);
        kernel.current(&mut memory, 0);
        let mut recording = Recording::default();
        recording.look(&mut memory, 1);
        recording.switched(&mut memory, 0, 0x1000, 2);
    }
    assert!(memory.read <= MOST, "{} bytes are read", memory.read);
}

/// A kernel with a module and a process in it, which the unit tests of the search write.
pub fn kernels() -> Vec<Vec<u8>> {
    vec![include_bytes!("../../../resources/fuzz/linux/honest").to_vec()]
}
