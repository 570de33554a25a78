//! What a machine is made of, for the files that its state is written to.

use std::{ffi::OsString, path::PathBuf};

use super::session::{DiskWas, disks};
use crate::{config::MachineConfig, error::Error};

/// What a machine is made of.
#[derive(Clone, Debug, Default)]
pub(crate) struct Origin {
    /// The directory that the files of the arguments are below.
    pub directory: PathBuf,
    /// The command line without the program's name.
    pub arguments: Vec<OsString>,
    /// The disks as they were.
    pub disks: Vec<DiskWas>,
}

impl Origin {
    /// Of a machine that is about to be made.
    ///
    /// # Errors
    /// A disk cannot be looked at.
    pub fn of(config: &MachineConfig) -> Result<Self, Error> {
        Ok(Origin {
            directory: std::env::current_dir().unwrap_or_default(),
            arguments: config.arguments.clone(),
            disks: disks(config)?,
        })
    }
}
