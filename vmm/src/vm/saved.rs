//! A machine's state as bytes, for a file: everything but RAM, which its pages are beside.
//!
//! What CPUs remember of page tables is not in it, as in [`super::stored`]: a machine that is put into such a state walks to its
//! translations anew, as after a CPU's own choice to forget them.

use std::io;

use engine::Translations;
use machine::memory::NotRam;
use serde::{Deserialize, Serialize};

use super::{
    parts::Vm,
    save::SnapshotError,
    soft::SoftState,
    stored::{self, Stored},
};

/// What is written.
#[derive(Debug, Serialize, Deserialize)]
struct Saved {
    state: Stored,
    /// See [`Vm::closed_to_input`].
    closed_to_input: Option<u64>,
    /// What has been written to each disk that has an overlay.
    disks: Vec<Vec<(u64, Vec<u8>)>>,
}

/// What is written of a machine that is to go on to the bit.
#[derive(Debug, Serialize, Deserialize)]
struct Exact {
    saved: Saved,
    /// What each CPU remembers of page tables.
    translations: Vec<Translations>,
}

/// Why a machine does not take on a state from a file.
#[derive(Debug, thiserror::Error)]
pub enum SavedError {
    /// The bytes are no state.
    #[error("its state is damaged")]
    Damaged,
    /// Of another form.
    #[error("its state is in form {0}, this program's in form {format}", format = stored::FORMAT)]
    Form(u32),
    /// Of a machine with other parts.
    #[error(transparent)]
    State(#[from] SnapshotError),
    /// Of a machine with other disks.
    #[error("it has what was written to {state} disks, the machine {machine} that are overlays")]
    Disks {
        /// Overlays of the state.
        state: usize,
        /// Overlays of the machine.
        machine: usize,
    },
    /// The overlay of a disk cannot be written.
    #[error("a disk's overlay: {}", machine::plain(.0))]
    Disk(#[source] io::Error),
}

impl Vm {
    /// The state beside RAM.
    ///
    /// # Errors
    /// The overlay of a disk cannot be read.
    pub(crate) fn saved_beside_ram(&self) -> io::Result<Vec<u8>> {
        postcard::to_allocvec(&self.saved()?).map_err(io::Error::other)
    }

    fn saved(&self) -> io::Result<Saved> {
        let disks = self.overlays.iter().map(machine::disk::Overlay::blocks);
        Ok(Saved {
            state: self.stored(),
            closed_to_input: self.closed_to_input,
            disks: disks.collect::<io::Result<_>>()?,
        })
    }

    /// The state beside RAM with what CPUs remember of page tables, so that a machine that takes it on goes on to the bit as this one:
    /// a walk that this one does not make may set an accessed bit that a guest looks for.
    ///
    /// # Errors
    /// As [`Vm::saved_beside_ram`].
    pub(crate) fn exact_beside_ram(&mut self) -> io::Result<Vec<u8>> {
        let translations = self.soft.state(&mut self.machine).translations;
        let mut saved = self.saved()?;
        if self.is_debugged() {
            // Whoever goes on from here stops at what is here.
            saved.state.cpus.iter_mut().for_each(|cpu| cpu.observed = None);
        }
        postcard::to_allocvec(&Exact { saved, translations }).map_err(io::Error::other)
    }

    /// A hash of the machine without RAM that does not depend on where a debugger has stopped.
    pub(crate) fn hash_unobserved(&mut self) -> u64 {
        let mut stored = self.stored();
        stored.cpus.iter_mut().for_each(|cpu| cpu.observed = None);
        stored.hash().value()
    }

    /// Takes on what [`Vm::exact_beside_ram`] gave, in a machine that has not run.
    ///
    /// # Errors
    /// See [`SavedError`]. The machine may have taken on part of it.
    pub(crate) fn take_exact(&mut self, bytes: &[u8]) -> Result<(), SavedError> {
        let Exact { saved, translations } = postcard::from_bytes(bytes).map_err(|_| SavedError::Damaged)?;
        self.take(saved, Some(translations))
    }

    /// Takes on a state beside RAM in a machine that has not run.
    ///
    /// # Errors
    /// See [`SavedError`]. The machine may have taken on part of it.
    pub(crate) fn take_saved(&mut self, bytes: &[u8]) -> Result<(), SavedError> {
        let saved: Saved = postcard::from_bytes(bytes).map_err(|_| SavedError::Damaged)?;
        self.take(saved, None)
    }

    fn take(&mut self, saved: Saved, translations: Option<Vec<Translations>>) -> Result<(), SavedError> {
        let Stored {
            format,
            cpus,
            steps,
            turn,
            machine,
            ..
        } = saved.state;
        if format != stored::FORMAT {
            return Err(SavedError::Form(format));
        }
        if self.machine.platform().irqchip_is_external() {
            return Err(SnapshotError::Irqchip.into());
        }
        let (state, overlays) = (saved.disks.len(), self.overlays.len());
        if state != overlays {
            let machine = overlays;
            return Err(SavedError::Disks { state, machine });
        }
        self.machine.set_state(&machine).map_err(SnapshotError::from)?;
        let soft = SoftState {
            translations: translations.unwrap_or_else(|| vec![Translations::default(); cpus.len()]),
            cpus,
            steps,
            turn,
        };
        self.soft.set_state(&soft).map_err(SnapshotError::from)?;
        for (overlay, blocks) in self.overlays.iter().zip(&saved.disks) {
            overlay.set_blocks(blocks).map_err(SavedError::Disk)?;
        }
        self.closed_to_input = saved.closed_to_input;
        // A CPU that is halted wakes before it runs, and its units hear of that if they have said that they want to.
        self.ask_watchers();
        Ok(())
    }

    /// Has RAM hold these bytes, in a machine that takes on a state.
    ///
    /// # Errors
    /// Not all of it is RAM.
    pub(crate) fn load(&mut self, gpa: u64, bytes: &[u8]) -> Result<(), NotRam> {
        self.machine.memory().write(gpa, bytes)?;
        self.soft.written(gpa, bytes.len() as u64);
        Ok(())
    }
}
