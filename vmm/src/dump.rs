//! A core file of a running machine: memory, registers, and what a Linux guest tells debuggers of itself.
//!
//! # VMCOREINFO
//! crash and drgn want Linux's own note of that name (Documentation/admin-guide/kdump/vmcoreinfo.rst): with it they know where KASLR
//! has put the kernel. The kernel keeps its text in a page of its own, to which `vmcoreinfo_data` points. Where no symbols of
//! the kernel are known, the page is looked for: it is the one that begins with the first of its lines.

use std::{fs::File, ops::Range};

use machine::{
    memory::Memory,
    vmcore::{self, VmcoreError},
};
use trace::linux::Kernel;

use crate::{recording::GuestMemory, vm::Vm};

/// The text's first line begins like this, and these are among the others: Linux, kernel/crash_core.c, `crash_save_vmcoreinfo_init`.
const BEGINS: &[u8] = b"OSRELEASE=";
const HAS: [&[u8]; 2] = [b"\nPAGESIZE=", b"\nSYMBOL(init_uts_ns)="];
/// The kernel has one page for it.
const PAGE: usize = 4096;

/// What was written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Dumped {
    /// The file's size in bytes, holes included.
    pub bytes: u64,
    /// The release of the Linux whose VMCOREINFO is in it, such as `6.1.0-48-cloud-amd64`.
    pub release: Option<String>,
}

impl std::fmt::Display for Dumped {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} bytes, ", self.bytes)?;
        match &self.release {
            Some(release) => write!(f, "with VMCOREINFO of Linux {release}"),
            None => f.write_str("without VMCOREINFO, as no Linux with one is in memory"),
        }
    }
}

/// Writes a core file of a machine between two steps, in place of what `file` holds: all of RAM, or what of it is in `part`. `kernel`
/// is the Linux that is known to be in memory.
///
/// # Errors
/// `file` is no regular file, the disk is full, or `part` begins beyond RAM. The file is empty then.
pub fn write(
    vm: &mut Vm,
    kernel: Option<&Kernel>,
    part: Option<Range<u64>>,
    file: &File,
) -> Result<Dumped, VmcoreError> {
    let cpus: Vec<_> = (0..vm.cpu_count()).filter_map(|cpu| vm.cpu_state(cpu)).collect();
    let memory = vm.machine().memory();
    let info = kernel
        .and_then(|kernel| by_symbol(memory, kernel))
        .or_else(|| by_its_text(memory));
    let bytes = vmcore::write(memory, &cpus, info.as_deref(), part, file)?;
    let release = info.and_then(|text| {
        let line = text.strip_prefix(BEGINS)?.split(|byte| *byte == b'\n').next()?;
        Some(String::from_utf8_lossy(line).replace(char::is_control, "?"))
    });
    Ok(Dumped { bytes, release })
}

/// The text, if these bytes are it.
fn text_of(bytes: &[u8]) -> Option<Vec<u8>> {
    let text = bytes.split(|byte| *byte == 0).next()?;
    let has = |part: &&[u8]| text.windows(part.len()).any(|window| window == *part);
    (text.starts_with(BEGINS) && HAS.iter().all(has)).then(|| text.to_vec())
}

fn by_symbol(memory: &Memory, kernel: &Kernel) -> Option<Vec<u8>> {
    let memory = &mut GuestMemory::new(memory);
    let mut word = [0; 8];
    let pointer = kernel.symbols().address("vmcoreinfo_data")?;
    let mut page = vec![0; PAGE];
    let read = kernel.read(memory, pointer, &mut word) && kernel.read(memory, u64::from_le_bytes(word), &mut page);
    text_of(read.then_some(&page)?)
}

fn by_its_text(memory: &Memory) -> Option<Vec<u8>> {
    let pages = memory.touched().into_iter().flat_map(|range| range.step_by(PAGE));
    let mut page = vec![0; PAGE];
    pages.into_iter().find_map(|gpa| {
        let mut begins = [0; BEGINS.len()];
        memory.read(gpa, &mut begins).ok()?;
        (begins == *BEGINS).then_some(())?;
        memory.read(gpa, &mut page).ok()?;
        text_of(&page)
    })
}

#[cfg(test)]
#[path = "dump_test.rs"]
mod tests;
