//! Boots a guest and prints its first thousand branches: `cargo run --release --example branches -- KERNEL`.

use std::{error::Error, ffi::OsString, sync::mpsc};

use minivmm::{Console, MachineConfig, Run, SerialTarget};
use x86::watch::{BranchRecord, Effects, Flow, Interest, Processor, Recorded, Watch};

struct Branches(mpsc::Sender<BranchRecord>);

impl Watch for Branches {
    fn interest(&mut self, _: &mut dyn Processor) -> Interest {
        let (branches, branch_room) = (Recorded::All, 1000);
        Interest {
            branches,
            branch_room,
            ..Interest::NOTHING
        }
    }

    fn branches(&mut self, records: &[BranchRecord], _: &mut dyn Processor) -> Effects {
        records
            .iter()
            .for_each(|record| self.0.send(*record).unwrap_or_default());
        Effects::NONE
    }
}

/// The first branches of the boot CPU, fewer if the guest ends before.
pub fn first(kernel: OsString, count: usize) -> Result<Vec<BranchRecord>, Box<dyn Error>> {
    let mut vm = Run::new(&MachineConfig::new(kernel))?;
    let mut console = Console::open(&SerialTarget::Buffer, &[], vm.line())?;
    let (send, records) = mpsc::channel();
    vm.machine().observe(0, Some(Box::new(Branches(send))));
    let mut branches = Vec::new();
    while branches.len() < count && vm.run_for(&mut console, 1000)?.is_none() {
        branches.extend(records.try_iter());
    }
    branches.extend(records.try_iter());
    Ok(branches.into_iter().take(count).collect())
}

#[allow(dead_code, reason = "a test takes the rest of this file as a module")]
fn main() -> Result<(), Box<dyn Error>> {
    for branch in first(std::env::args_os().nth(1).ok_or("which kernel?")?, 1000)? {
        let flow = Flow::from_code(branch.flow).ok_or("no branch")?;
        println!(
            "{:12} {:#018x} -> {:#018x}  {flow:?}",
            branch.step, branch.from, branch.to
        );
    }
    Ok(())
}
