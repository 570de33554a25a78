//! Which mappings of user code a vCPU's sideband has already.

use std::collections::HashMap;

/// Mappings that are remembered of an address space, and files: more are reported again.
const MAPPINGS: usize = 1 << 12;
const FILES: usize = 1 << 14;

/// An address space: the VMCS of the guest of a hypervisor whose it is, and the space as the sideband has it.
pub(super) type Space = (Option<u64>, u64);

/// A mapping.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Mapped {
    /// Its first page.
    pub first: u64,
    /// The page behind its last one.
    pub end: u64,
    /// Which page of the file the first one is.
    pub at: u64,
    /// The file, by its number in the segment.
    pub file: Option<u64>,
}

/// What was reported in this segment.
#[derive(Debug, Default)]
pub(super) struct ReportedMappings {
    spaces: HashMap<Space, Vec<Mapped>>,
    files: HashMap<(String, Option<String>), u64>,
    count: u64,
}

impl ReportedMappings {
    /// Whether a space's mapping of a page is to be reported; after that it is reported.
    pub fn add(&mut self, space: Space, page: u64, mapped: Mapped) -> bool {
        let known = self.spaces.entry(space).or_default();
        // What was reported last of a page is what holds.
        let last = known.iter().rfind(|other| (other.first..other.end).contains(&page));
        if last == Some(&mapped) {
            return false;
        }
        if known.len() >= MAPPINGS {
            known.clear();
        }
        known.push(mapped);
        true
    }

    /// The number of a file; if it was not reported, its path and build ID, which are to be reported now.
    pub fn file(&mut self, path: String, build_id: Option<String>) -> (u64, Option<(String, Vec<u8>)>) {
        let file = (path, build_id);
        if let Some(number) = self.files.get(&file) {
            return (*number, None);
        }
        let id = file.1.as_deref().unwrap_or_default();
        let id: Vec<u8> = (0..id.len() / 2)
            .filter_map(|n| u8::from_str_radix(id.get(2 * n..2 * n + 2)?, 16).ok())
            .collect();
        if self.files.len() >= FILES {
            self.files.clear();
        }
        let number = self.count;
        self.count += 1;
        let path = file.0.clone();
        self.files.insert(file, number);
        (number, Some((path, id)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // covers: trace/mappings
    #[test]
    fn a_mapping_is_reported_once_until_another_one_has_the_page() {
        let mut reported = ReportedMappings::default();
        let mapped = |first, end, file| Mapped {
            first,
            end,
            at: 0,
            file: Some(file),
        };
        for (space, page, mapping, new, why) in [
            ((None, 1), 5, mapped(0, 10, 0), true, "the first"),
            ((None, 1), 6, mapped(0, 10, 0), false, "another page of it"),
            ((None, 2), 6, mapped(0, 10, 0), true, "another process"),
            ((None, 1), 5, mapped(5, 6, 1), true, "another file"),
            ((None, 1), 7, mapped(0, 10, 0), false, "where the first one still is"),
            ((None, 1), 5, mapped(0, 10, 0), true, "where it is again"),
            ((None, 1), 11, mapped(0, 12, 0), true, "longer"),
            ((Some(0x8000), 1), 5, mapped(0, 10, 0), true, "a process of a guest"),
            ((Some(0x9000), 1), 5, mapped(0, 10, 0), true, "of another guest"),
            ((Some(0x8000), 1), 6, mapped(0, 10, 0), false, "another page of it"),
        ] {
            assert_eq!(reported.add(space, page, mapping), new, "{why}");
        }
    }
}
