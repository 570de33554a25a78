//! Where members of the kernel's structures are. Format: Documentation/bpf/btf.rst of Linux.

use std::cell::Cell;

/// A kernel's types are some five megabytes.
pub const LIMIT: u64 = 64 << 20;
const MAGIC: u32 = 0xeb9f;
/// Structures in structures, and names of names.
const DEEPEST: u32 = 32;
/// Members that are looked at, for all questions: those of nameless members are, each time.
const MOST_MEMBERS: u64 = 1 << 22;
/// Structures that somebody asks for.
const WANTED: [&str; 14] = [
    "module",
    "mod_kallsyms",
    "module_memory",
    "task_struct",
    "mm_struct",
    "pcpu_hot",
    "vm_area_struct",
    "maple_range_64",
    "maple_arange_64",
    "file",
    "backing_file",
    "dentry",
    "mount",
    "vdso_image",
];

/// The types of a kernel.
#[derive(Debug)]
pub struct Btf {
    bytes: Vec<u8>,
    strings: usize,
    /// Where each type is described, from 1 on.
    types: Vec<u32>,
    /// The first structure of each of these names.
    structures: [Option<u32>; WANTED.len()],
    /// Members that may be looked at yet.
    left: Cell<u64>,
}

const ARRAY: u32 = 3;
const STRUCT: u32 = 4;
const UNION: u32 = 5;

impl Btf {
    /// Reads the section; `None` if it is not one.
    pub fn parse(bytes: Vec<u8>) -> Option<Btf> {
        let word = |at: usize| Some(u32::from_le_bytes(bytes.get(at..at + 4)?.try_into().ok()?));
        if word(0)? & 0xffff != MAGIC {
            return None;
        }
        let header = word(4)? as usize;
        let section = |at: usize| Some((header.checked_add(word(at)? as usize)?, word(at + 4)? as usize));
        let ((types, len), (strings, _)) = (section(8)?, section(16)?);
        let end = types.checked_add(len).filter(|end| *end <= bytes.len())?;
        let (mut at, mut all) = (types, vec![0]);
        while at < end {
            all.push(at as u32);
            let info = word(at + 4)?;
            let count = (info & 0xffff) as usize;
            // What follows a type, by btf.rst, 2.2 "Type Encoding".
            at += 12
                + match info >> 24 & 31 {
                    1 | 14 | 17 => 4,
                    ARRAY => 12,
                    STRUCT | UNION | 15 | 19 => 12 * count,
                    6 | 13 => 8 * count,
                    2 | 7..=12 | 16 | 18 => 0,
                    _ => return None,
                };
        }
        let mut btf = Btf {
            types: all,
            strings,
            structures: [None; WANTED.len()],
            left: Cell::new(MOST_MEMBERS),
            bytes,
        };
        for id in 1..btf.types.len() as u32 {
            if btf.kind(id) == Some(STRUCT) {
                let at = btf.field(id, 0)?;
                for (n, name) in WANTED.iter().enumerate() {
                    if btf.structures[n].is_none() && btf.is_named(at, name.as_bytes())? {
                        btf.structures[n] = Some(id);
                    }
                }
            }
        }
        Some(btf)
    }

    fn word(&self, at: usize) -> Option<u32> {
        Some(u32::from_le_bytes(self.bytes.get(at..at + 4)?.try_into().ok()?))
    }

    fn field(&self, id: u32, at: usize) -> Option<u32> {
        self.word(*self.types.get(id as usize).filter(|_| id != 0)? as usize + at)
    }

    fn kind(&self, id: u32) -> Option<u32> {
        Some(self.field(id, 4)? >> 24 & 31)
    }

    /// Whether the string there is this one; `None`: there is none.
    fn is_named(&self, offset: u32, name: &[u8]) -> Option<bool> {
        let text = self.bytes.get(self.strings.checked_add(offset as usize)?..)?;
        Some(text.strip_prefix(name).is_some_and(|rest| rest.first() == Some(&0)))
    }

    fn structure(&self, name: &str) -> Option<u32> {
        self.structures[WANTED.iter().position(|wanted| *wanted == name)?]
    }

    /// The type without typedefs and qualifiers.
    fn plain(&self, mut id: u32) -> Option<u32> {
        for _ in 0..DEEPEST {
            match self.kind(id)? {
                8..=11 | 18 => id = self.field(id, 8)?,
                _ => return Some(id),
            }
        }
        None
    }

    /// The size in bytes of a structure.
    pub fn size(&self, structure: &str) -> Option<u64> {
        Some(self.field(self.structure(structure)?, 8)?.into())
    }

    /// The offset in bytes of a member, as `core_layout.base`, and of members of nameless members.
    pub fn offset(&self, structure: &str, path: &str) -> Option<u64> {
        let mut id = self.structure(structure)?;
        let mut offset = 0;
        for name in path.split('.') {
            let (at, of) = self.member(id, name.as_bytes(), 0)?;
            offset += at;
            id = of;
        }
        Some(offset)
    }

    fn member(&self, id: u32, name: &[u8], depth: u32) -> Option<(u64, u32)> {
        let id = self.plain(id)?;
        if !matches!(self.kind(id)?, STRUCT | UNION) || depth > DEEPEST {
            return None;
        }
        let info = self.field(id, 4)?;
        for n in 0..(info & 0xffff) as usize {
            self.left.set(self.left.get().checked_sub(1)?);
            let at = 12 + n * 12;
            let (found, of, bits) = (self.field(id, at)?, self.field(id, at + 4)?, self.field(id, at + 8)?);
            // With the flag the upper eight bits are a bit field's size.
            let bits = if info >> 31 != 0 { bits & 0xff_ffff } else { bits };
            let here = u64::from(bits / 8);
            if self.is_named(found, name)? {
                return Some((here, of));
            }
            if self.is_named(found, b"")?
                && let Some((inner, of)) = self.member(of, name, depth + 1)
            {
                return Some((here + inner, of));
            }
        }
        None
    }
}
