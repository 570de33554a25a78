//! What processes of Linux have mapped where they executed code: records 9 to 11 of the sideband.

use std::collections::HashMap;

use super::image::{MappedFile, Next, Side};
use super::trace::Trace;
use crate::directory::format::Record;
use crate::directory::packets::Damage;

/// Mappings that are kept.
const MOST: usize = 1 << 22;
/// Files that are kept, and the bytes of all their paths.
const MOST_FILES: usize = 1 << 20;
const MOST_TEXT: usize = 256 << 20;

/// A mapping of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mapping {
    /// Since which step of the machine it is known.
    pub step: u64,
    /// The VMCS pointer of the guest of a hypervisor whose process it is.
    pub vmcs: Option<u64>,
    /// The address space: CR3 without bits 11:0.
    pub cr3: u64,
    /// The first address.
    pub start: u64,
    /// The one behind the last.
    pub end: u64,
    /// Where in the file `start` is.
    pub offset: u64,
    /// The file, by its number in [`Mappings::files`]; `None`: memory without a file.
    pub file: Option<usize>,
}

/// All that a trace has of them.
#[derive(Debug, Default)]
pub struct Mappings {
    /// The files.
    pub files: Vec<MappedFile>,
    /// The mappings, by their steps.
    pub all: Vec<Mapping>,
}

impl Trace {
    /// What the processes have mapped, as far as the trace says.
    pub fn mappings(&self) -> Mappings {
        let mut found = Mappings::default();
        let mut known: HashMap<MappedFile, usize> = HashMap::new();
        let mut text = 0;
        for cpu in 0..self.cpus() {
            // By the numbers of the segment.
            let mut numbers: Vec<Option<usize>> = Vec::new();
            let damage = Damage::default();
            let mut side = Side::new(self.folder(), cpu, self.segments(cpu));
            while let Some(next) = side.next(&damage) {
                match next {
                    Next::Segment(_) => numbers.clear(),
                    Next::File(file) => {
                        text += file.path.len();
                        if found.files.len() >= MOST_FILES || numbers.len() >= MOST_FILES || text > MOST_TEXT {
                            break;
                        }
                        let number = (!file.path.is_empty()).then(|| {
                            *known.entry(file).or_insert_with_key(|file| {
                                found.files.push(file.clone());
                                found.files.len() - 1
                            })
                        });
                        numbers.push(number);
                    }
                    Next::Record(
                        Record::Mapping {
                            step,
                            vmcs,
                            space,
                            page,
                            pages,
                            first,
                            file,
                            ..
                        },
                        _,
                    ) => {
                        if found.all.len() >= MOST {
                            break;
                        }
                        let number = |file: u64| numbers.get(usize::try_from(file).ok()?).copied().flatten();
                        // Whatever a directory says, there are no more addresses than these.
                        let (page, pages) = (page.min(1 << 50), pages.min(1 << 50));
                        found.all.push(Mapping {
                            step,
                            vmcs,
                            cr3: space.wrapping_sub(1) << 5 & !0xfff,
                            start: page << 12,
                            end: (page + pages) << 12,
                            offset: first << 12,
                            file: file.and_then(number),
                        });
                    }
                    _ => {}
                }
            }
        }
        found.all.sort_by_key(|mapping| mapping.step);
        found
    }
}
