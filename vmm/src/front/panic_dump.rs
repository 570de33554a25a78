//! `--on-panic dump=FILE`: the core file of a guest that has panicked.
//!
//! The file is made before the process is jailed, since none can be made after. It stays empty until the dump is written, and its first
//! bytes are written last, so that what a kill or a full disk leaves is no core file to anybody; and it goes where no dump came of it.

use std::{
    fs::{self, File},
    io::{self, Write},
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
};

use machine::vmcore::VmcoreError;
use trace::linux::Kernel;

use crate::{dump, error::Error, recording::GuestMemory, timeline::run::Run};

const OPTION: &str = "--on-panic dump";

/// The file, and what came of it.
#[derive(Debug)]
pub struct PanicDump {
    path: PathBuf,
    file: File,
    /// The attempt, of which there is one.
    written: Option<Result<(), VmcoreError>>,
}

impl PanicDump {
    /// Makes the file, for its owner alone: it will hold the guest's memory.
    ///
    /// # Errors
    /// It exists, or cannot be made.
    pub fn new(path: &Path) -> Result<PanicDump, Error> {
        let mut options = File::options();
        let file = options.write(true).create_new(true).mode(0o600).open(path);
        let failed = |source: io::Error| Error::File {
            option: OPTION,
            path: path.into(),
            source: match source.kind() {
                io::ErrorKind::AlreadyExists => io::Error::other("exists already: give a new file"),
                _ => source,
            },
        };
        Ok(PanicDump {
            path: path.into(),
            file: file.map_err(failed)?,
            written: None,
        })
    }

    /// Writes the machine as it is, unless that has been done. `kernel`: its Linux, if that is known.
    pub fn write(&mut self, run: &mut Run, kernel: Option<&Kernel>) {
        if self.written.is_some() {
            return;
        }
        let found = match kernel {
            Some(_) => None,
            None => Kernel::find(&mut GuestMemory::new(run.machine().memory())),
        };
        let steps = run.steps();
        let written = dump::write(run, kernel.or(found.as_ref()), None, &self.file);
        if let Ok(dumped) = &written {
            let path = self.path.display();
            // A closed stderr is no reason to fail.
            let _ = writeln!(io::stderr(), "minivmm: {OPTION}={path}: step {steps}: {dumped}");
        }
        self.written = Some(written.map(drop));
    }

    /// The run is over.
    ///
    /// # Errors
    /// The dump was to be written, and could not be.
    pub fn end(mut self) -> Result<(), Error> {
        let path = self.path.clone();
        let failed = self.written.take_if(|written| written.is_err());
        failed
            .unwrap_or(Ok(()))
            .map_err(|source| Error::PanicDump { path, source })
    }
}

impl Drop for PanicDump {
    fn drop(&mut self) {
        if !matches!(self.written, Some(Ok(()))) {
            // It was new, and holds nothing.
            let _ = fs::remove_file(&self.path);
        }
    }
}
