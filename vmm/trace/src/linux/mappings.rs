//! What a process has mapped at an address: `struct vm_area_struct`, and the path of its file.
//!
//! Up to Linux 6.0 a process's mappings are in a red-black tree (lib/rbtree.c), since 6.1 in a maple tree (lib/maple_tree.c). The path of a file is
//! put together as `d_path` of fs/d_path.c does it: from the name of the entry up to the root of its file system, and on from
//! where that is mounted.

use x86::paging::{Mode, Paging};

use super::{
    budget::{Budget, Look},
    kernel::Kernel,
    map_layout::{MapLayout, Tree},
    memory::Memory,
    paging::KernelTables,
    text::build_id,
};

/// A mapping with its path, and what is read of page tables on the way to them.
const ONE: Budget = Budget {
    bytes: 256 << 10,
    steps: 4096,
};
/// The longest path: `PATH_MAX` of include/uapi/linux/limits.h.
const LONGEST_PATH: usize = 4096;
/// The longest name of a file: `NAME_MAX`.
const LONGEST_NAME: u32 = 255;
/// Names in a path, and mounts on the way.
const DEEPEST: usize = 256;
/// A red-black tree of all pages that there can be is not higher.
const HIGHEST: usize = 128;
/// The kernel's code in user mode has two or three pages; with its tables it is somewhat longer.
const LONGEST_VDSO: u64 = 64 << 10;
/// `FMODE_BACKING` of include/linux/fs.h: the file that a stacked file system has mapped stands in `struct backing_file`.
const BACKING: u32 = 1 << 25;

/// A mapping of a process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mapping {
    /// The first address.
    pub start: u64,
    /// The one behind the last.
    pub end: u64,
    /// Where in the file `start` is.
    pub offset: u64,
    /// The file's path, `[vdso]`, or nothing for memory without a file.
    pub path: String,
    /// The file's build ID, where it can be read of the process's memory.
    pub build_id: Option<String>,
    /// The kernel's image of the vdso, if it is that: where it is, and how many bytes.
    pub vdso: Option<(u64, u64)>,
}

impl Kernel {
    /// What the process has mapped at an address of user mode that a CPU runs with page table `cr3`; `None` if it cannot be read. CPUs by
    /// Linux's numbers.
    pub fn mapping(&self, memory: &mut dyn Memory, cpu: usize, cr3: u64, address: u64) -> Option<Mapping> {
        let memory = &mut Look::new(memory, ONE);
        let (layout, tasks) = (self.types.maps.as_ref()?, self.types.tasks.as_ref()?);
        let task = self.current_address(memory, cpu)?;
        let mm = self.word(memory, task.wrapping_add(tasks.mm)).filter(|mm| *mm != 0)?;
        let pgd = self.word(memory, mm.wrapping_add(tasks.pgd))?;
        let (table, _) = self.paging.translate(memory, pgd)?;
        // Another process's mappings would be worse than none.
        if table != cr3 & !0xfff && table != cr3 & !0x1fff {
            return None;
        }
        let area = match &layout.tree {
            Tree::RedBlack { .. } => self.in_red_black(memory, layout, mm, address),
            Tree::Maple { .. } => self.in_maple(memory, layout, mm, address),
        }?;
        let field = |memory: &mut Look<'_>, at: u64| self.word(memory, area.wrapping_add(at));
        let (start, end) = (field(memory, layout.start)?, field(memory, layout.end)?);
        if !(start..end).contains(&address) || (start | end) & 0xfff != 0 {
            return None;
        }
        let mut mapping = Mapping {
            start,
            end,
            offset: 0,
            path: String::new(),
            build_id: None,
            vdso: None,
        };
        let file = field(memory, layout.file)?;
        if file != 0 {
            mapping.offset = field(memory, layout.pgoff)?.checked_mul(0x1000)?;
            mapping.path = self.path(memory, layout, file)?;
            mapping.build_id = self.build_id_of_process(memory, cr3, start.wrapping_sub(mapping.offset));
        } else if let Some(vdso) = &layout.vdso
            && self.word(memory, mm.wrapping_add(vdso.address)) == Some(start)
        {
            mapping.path = "[vdso]".into();
            mapping.build_id = self.build_id_of_process(memory, cr3, start);
            let image = self.word(memory, mm.wrapping_add(vdso.image))?;
            let data = self.word(memory, image.wrapping_add(vdso.data))?;
            let size = self.word(memory, image.wrapping_add(vdso.size))?;
            mapping.vdso = (size <= LONGEST_VDSO).then_some((data, size));
        }
        Some(mapping)
    }

    /// The bytes of the kernel's image of the vdso.
    pub fn vdso(&self, memory: &mut dyn Memory, (at, size): (u64, u64)) -> Option<Vec<u8>> {
        let mut bytes = vec![0; usize::try_from(size.min(LONGEST_VDSO)).ok()?];
        self.read(memory, at, &mut bytes).then_some(bytes)
    }

    fn in_red_black(&self, memory: &mut Look<'_>, layout: &MapLayout, mm: u64, address: u64) -> Option<u64> {
        let Tree::RedBlack {
            root,
            node,
            left,
            right,
        } = layout.tree
        else {
            return None;
        };
        let mut at = self.word(memory, mm.wrapping_add(root))?;
        for _ in 0..HIGHEST {
            if at == 0 {
                return None;
            }
            let area = at.wrapping_sub(node);
            let next = if address < self.word(memory, area.wrapping_add(layout.start))? {
                left
            } else if address >= self.word(memory, area.wrapping_add(layout.end))? {
                right
            } else {
                return Some(area);
            };
            at = self.word(memory, area.wrapping_add(next))?;
        }
        None
    }

    /// As `mtree_lookup_walk` of lib/maple_tree.c. Nodes are aligned to 256 bytes, and the lowest bits of what points to one say of
    /// which kind it is (include/linux/maple_tree.h).
    fn in_maple(&self, memory: &mut Look<'_>, layout: &MapLayout, mm: u64, address: u64) -> Option<u64> {
        const LEAF: u64 = 1;
        const RANGE: u64 = 2;
        const RANGE_WITH_GAPS: u64 = 3;
        let Tree::Maple { root, range, gaps } = layout.tree else {
            return None;
        };
        let mut entry = self.word(memory, mm.wrapping_add(root))?;
        // The root's two lowest bits say that it is a node. A single mapping is none: that would be one for all addresses, as no process has it.
        if entry & 3 != 2 {
            return None;
        }
        for _ in 0..HIGHEST {
            if entry <= 4096 {
                return None;
            }
            let kind = entry >> 3 & 15;
            let node = match kind {
                LEAF | RANGE => range,
                RANGE_WITH_GAPS => gaps,
                _ => return None,
            };
            let at = entry & !0xff;
            let mut bytes = [0; 256];
            if !self.read_within(memory, at, &mut bytes) {
                return None;
            }
            let word = |at: u64| {
                let bytes = bytes.get(at as usize..)?.first_chunk()?;
                Some(u64::from_le_bytes(*bytes))
            };
            let pivots = node.slots.checked_sub(node.pivots)? / 8;
            let mut slot = pivots;
            for n in 0..pivots {
                let pivot = word(node.pivots + 8 * n)?;
                // Behind the last limit that is used there are zeros; what it leads to ends where the node does.
                if pivot >= address || (pivot == 0 && n > 0) {
                    slot = n;
                    break;
                }
            }
            entry = word(node.slots + 8 * slot)?;
            if kind == LEAF {
                return Some(entry).filter(|entry| *entry != 0 && entry & 3 == 0);
            }
        }
        None
    }

    /// The path of a `struct file` as `/proc/PID/maps` has it.
    fn path(&self, memory: &mut Look<'_>, layout: &MapLayout, file: u64) -> Option<String> {
        let mut of = [layout.dentry, layout.mnt];
        if let Some(path) = layout.user_path
            && self.half(memory, file.wrapping_add(layout.mode))? & BACKING != 0
        {
            // `struct path` is the mount, then the entry.
            let order = layout.dentry.wrapping_sub(layout.mnt);
            of = [path.wrapping_add(order), path];
        }
        let mut dentry = self.word(memory, file.wrapping_add(of[0]))?;
        let mnt = self.word(memory, file.wrapping_add(of[1]))?;
        let mut mount = mnt.wrapping_sub(layout.mount);
        let mut names: Vec<Vec<u8>> = Vec::new();
        let mut len = 0;
        for _ in 0..DEEPEST {
            let parent = self.word(memory, dentry.wrapping_add(layout.parent))?;
            if dentry == self.word(memory, mount.wrapping_add(layout.mount_root))? {
                let above = self.word(memory, mount.wrapping_add(layout.mount_parent))?;
                if above == mount {
                    return Some(joined(&names));
                }
                dentry = self.word(memory, mount.wrapping_add(layout.mount_point))?;
                mount = above;
                continue;
            }
            let name = self.word(memory, dentry.wrapping_add(layout.name))?;
            let count = self.half(memory, dentry.wrapping_add(layout.len))?.min(LONGEST_NAME);
            let mut bytes = vec![0; count as usize];
            len += bytes.len() + 1;
            if len > LONGEST_PATH || !memory.spend(16) || !self.read_within(memory, name, &mut bytes) {
                return None;
            }
            names.push(bytes);
            // A file without a folder, as of memfd_create.
            if parent == dentry {
                return Some(joined(&names));
            }
            dentry = parent;
        }
        None
    }

    /// The build ID of an ELF file of which a process has mapped the beginning there, if that page is in memory.
    fn build_id_of_process(&self, memory: &mut Look<'_>, cr3: u64, base: u64) -> Option<String> {
        let KernelTables::Tables(Paging {
            mode: mode @ Mode::Long(_),
            ..
        }) = self.paging
        else {
            return None;
        };
        let tables = KernelTables::Tables(Paging {
            mode,
            top: cr3 & 0x000f_ffff_ffff_f000,
        });
        let mut page = vec![0; 4096];
        if base & 0xfff != 0 || !tables.read(memory, base, &mut page) {
            return None;
        }
        notes(&page).find_map(|(at, len)| {
            let mut bytes = vec![0; len.min(4096) as usize];
            let read = tables.read(memory, base.wrapping_add(at), &mut bytes);
            build_id(&bytes).filter(|_| read)
        })
    }
}

/// The offsets and lengths of an ELF file's notes (program headers of type PT_NOTE), as its first page tells them.
fn notes(page: &[u8]) -> impl Iterator<Item = (u64, u64)> {
    const NOTE: u64 = 4;
    let number = |at: usize, len: usize| {
        let bytes = page.get(at..at.checked_add(len)?)?;
        Some(bytes.iter().rev().fold(0, |value, byte| value << 8 | u64::from(*byte)))
    };
    // Of ELF64 or ELF32: where headers are, the size of one, how many; and in one the offset, its size, the length.
    let wide = page.get(4) == Some(&2);
    let elf = page.starts_with(b"\x7fELF");
    let (table, size, count) = if wide { (0x20, 0x36, 0x38) } else { (0x1c, 0x2a, 0x2c) };
    let word = if wide { 8 } else { 4 };
    let (offset, len) = if wide { (8, 0x20) } else { (4, 0x10) };
    let head = move || Some((number(table, word)?, number(size, 2)?, number(count, 2)?));
    let (table, size, count) = head().filter(|_| elf).unwrap_or_default();
    (0..count.min(64)).filter_map(move |n| {
        let at = usize::try_from(table.checked_add(n * size)?).ok()?;
        let note = number(at, 4)? == NOTE;
        note.then_some((number(at + offset, word)?, number(at + len, word)?))
    })
}

/// The names of folders and of a file, the last first, as a path.
fn joined(names: &[Vec<u8>]) -> String {
    let mut path = String::new();
    for name in names.iter().rev() {
        path.push('/');
        // A line of text has it.
        path += &String::from_utf8_lossy(name).replace(char::is_control, "?");
    }
    path
}
