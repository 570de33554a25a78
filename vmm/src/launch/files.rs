//! The files that a machine starts with, into its memory.

use std::{
    io::{self, Read},
    os::unix::ffi::OsStrExt,
    path::Path,
};

use crate::{config::MachineConfig, error::Error};
use machine::{
    acpi, inject,
    loader::{self, Boot, Input, Module},
    memory::Memory,
};
use trace::regular;

/// Reads and loads the kernel and the initial RAM disk.
pub(super) fn load(memory: &Memory, config: &MachineConfig) -> Result<loader::Entry, Error> {
    let kernel = read_file("--kernel", &config.kernel, memory.low_end())?;
    let mut parts = Vec::new();
    for part in &config.initrd {
        parts.push(read_file("--initrd", &part.path, memory.low_end())?);
    }
    let mut cmdline = config.cmdline.clone();
    if let Some(folder) = &config.inject {
        let unfit = |text| Error::File {
            option: "--inject",
            path: folder.clone(),
            source: io::Error::other(text),
        };
        if !loader::linux::is_bzimage(&kernel) && loader::multiboot::find_header(&kernel).is_some() {
            return Err(unfit(
                "needs a Linux kernel; give a multiboot kernel its module with --initrd",
            ));
        }
        if parts.iter().any(|part| loader::initrd::is_file_system(part)) {
            return Err(unfit(
                "needs an initial RAM disk that is an archive; this one is a file system",
            ));
        }
        let injection = inject::pack(folder, memory.low_end())?;
        cmdline = inject::hooked(cmdline, injection.hook);
        parts.push(injection.archive);
    }
    parts.extend(config.packed.iter().map(|packed| packed.to_vec()));
    let name = |path: &Path| path.as_os_str().as_bytes().to_vec();
    let names: Vec<Vec<u8>> = config.initrd.iter().map(|part| name(&part.path)).collect();
    let modules: Vec<Module<'_>> = parts
        .iter()
        .enumerate()
        .map(|(n, bytes)| Module {
            bytes,
            name: names.get(n).map_or(&[], Vec::as_slice),
            words: config.initrd.get(n).map_or(&[], |part| part.words.as_slice()),
        })
        .collect();
    let request = Boot {
        kernel: &kernel,
        kernel_name: &name(&config.kernel),
        modules: &modules,
        cmdline: cmdline.as_deref(),
        rsdp: acpi::RSDP,
    };
    loader::load(memory, &request).map_err(|(input, source)| {
        let image = |option, path: &Path| Error::Image {
            option,
            path: path.into(),
            source: source.clone(),
        };
        match input {
            Input::Kernel => image("--kernel", &config.kernel),
            Input::Cmdline => Error::Cmdline(source.clone()),
            // What has no file among the parts is what was injected.
            Input::Module(n) => match (config.initrd.get(n), &config.inject) {
                (Some(part), _) => image("--initrd", &part.path),
                (None, Some(folder)) => image("--inject", folder),
                (None, None) => image("--kernel", &config.kernel),
            },
        }
    })
}

/// Reads a whole file of at most `limit` bytes: a larger one cannot fit into memory.
fn read_file(option: &'static str, path: &Path, limit: u64) -> Result<Vec<u8>, Error> {
    let failed = |source| Error::File {
        option,
        path: path.into(),
        source,
    };
    let too_big = |len| {
        let what = if option == "--initrd" {
            "the initial RAM disk"
        } else {
            "the kernel"
        };
        let source = loader::too_big_file(what, len, limit);
        Error::Image {
            option,
            path: path.into(),
            source,
        }
    };
    let file = regular::open(path).map_err(failed)?;
    let metadata = file.metadata().map_err(failed)?;
    if metadata.len() > limit {
        return Err(too_big(Some(metadata.len())));
    }
    let mut bytes = Vec::new();
    file.take(limit + 1).read_to_end(&mut bytes).map_err(failed)?;
    if bytes.len() as u64 > limit {
        return Err(too_big(None));
    }
    Ok(bytes)
}
