//! Taking a machine's state out and putting it back.

use std::collections::BTreeSet;

use machine::{StateError, memory::Memory};

use super::{
    parts::Vm,
    snapshot::{PAGE, Pages, Snapshot},
};

/// The addresses of the pages of RAM.
fn all_pages(memory: &Memory) -> impl Iterator<Item = u64> + use<> {
    let high = memory.high().unwrap_or(0..0);
    (0..memory.low_end()).step_by(PAGE).chain(high.step_by(PAGE))
}

/// Why a machine does not take on a state.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SnapshotError {
    /// Part of the state is in KVM.
    #[error("the interrupt controllers are KVM's, and a state has none of theirs: use --irqchip minivmm")]
    Irqchip,
    /// It is one of another model, or of another size.
    #[error("the state is of model {} with {} bytes of RAM, the machine of {} with {}", state.0, state.1, machine.0, machine.1)]
    Model {
        /// Model and bytes of RAM of the state.
        state: (&'static str, u64),
        /// Those of the machine.
        machine: (&'static str, u64),
    },
    /// It is one of a machine with other parts.
    #[error(transparent)]
    Parts(#[from] StateError),
}

impl Vm {
    /// The whole state. The first time all of RAM is read, and later what has been written since.
    pub fn save(&mut self) -> Snapshot {
        let soft = self.soft.state(&mut self.machine);
        let pages = self.pages();
        Snapshot {
            model: self.machine.model().name,
            soft,
            machine: self.machine.state(),
            memory: self.machine.memory().size(),
            pages,
        }
    }

    /// Takes on a state that a machine of the same model, size and devices gave. Observers stay, and hear nothing of it.
    ///
    /// # Errors
    /// One line: the state is of another machine. Nothing has changed then.
    pub fn set_state(&mut self, state: &Snapshot) -> Result<(), SnapshotError> {
        if self.machine.platform().irqchip_is_external() {
            return Err(SnapshotError::Irqchip);
        }
        let (model, memory) = (self.machine.model().name, self.machine.memory().size());
        if (state.model, state.memory) != (model, memory) {
            return Err(SnapshotError::Model {
                state: (state.model, state.memory),
                machine: (model, memory),
            });
        }
        let before = self.machine.state();
        self.machine.set_state(&state.machine)?;
        // Before RAM, so that a transaction that was open writes nothing back.
        if let Err(error) = self.soft.set_state(&state.soft) {
            // It came from this machine.
            let _ = self.machine.set_state(&before);
            return Err(error.into());
        }
        let present = self.pages();
        for gpa in present.apart(&state.pages) {
            let page = state.pages.get(gpa).unwrap_or(&[0; PAGE]);
            if self.machine.memory().write(gpa, page).is_ok() {
                self.soft.written(gpa, PAGE as u64);
            }
        }
        if let Some(debugger) = &mut self.debugger {
            debugger.moved();
        }
        self.forget_stops();
        // It is what RAM holds now.
        self.take_dirty();
        self.kept = Some(state.pages.clone());
        Ok(())
    }

    /// The pages that have been written since this was asked last.
    fn take_dirty(&mut self) -> Vec<u64> {
        for (gpa, len) in self.machine.take_written() {
            self.soft.written(gpa, len);
        }
        let dirty = self.soft.take_dirty();
        if let Some(written) = &mut self.written {
            written.extend(&dirty);
        }
        dirty
    }

    /// The pages that may have been written since this was asked last; `None` the first time.
    pub(crate) fn take_written(&mut self) -> Option<BTreeSet<u64>> {
        // Whoever asks for a snapshot reads what has been written, too.
        match self.kept.is_some() {
            true => drop(self.pages()),
            false => drop(self.take_dirty()),
        }
        self.written.replace(BTreeSet::new())
    }

    /// Has [`Vm::take_written`] give these pages, too, when it is asked next.
    pub(crate) fn give_back_written(&mut self, pages: impl IntoIterator<Item = u64>) {
        if let Some(written) = &mut self.written {
            written.extend(pages);
        }
    }

    /// What RAM holds, of which those pages are read that have been written since this was asked last.
    fn pages(&mut self) -> Pages {
        let dirty = self.take_dirty();
        let memory = self.machine.memory();
        let (mut pages, mut page) = (self.kept.take(), [0; PAGE]);
        let known = pages.is_some();
        let kept = pages.get_or_insert_default();
        let mut read = |gpa| {
            if memory.read(gpa, &mut page).is_ok() {
                kept.set(gpa, &page);
            }
        };
        if known {
            dirty.into_iter().for_each(&mut read);
        } else {
            all_pages(memory).for_each(&mut read);
        }
        self.kept.clone_from(&pages);
        pages.unwrap_or_default()
    }
}
