//! Where a machine's CPUs are, for the line that says why a run was ended: a guest that hangs is found by it.

use std::time::{Duration, Instant};

use trace::{linux::Kernel, symbols::SymbolFile};

use crate::{recording::GuestMemory, vm::Vm};

/// How long a kernel is looked for: the run has ended, and whoever ended it waits.
const LONGEST: Duration = Duration::from_secs(1);

/// Each CPU's linear address, and what is there if `--symbols`, the kernel's file or a Linux guest's memory tells.
pub fn describe(vm: &mut Vm) -> String {
    let addresses: Vec<u64> = (0..vm.cpu_count())
        .filter_map(|cpu| vm.cpu_state(cpu))
        .map(|state| state.linear_rip())
        .collect();
    let file = vm.symbols().unwrap_or(vm.kernel());
    let file = SymbolFile::read(file).ok().map(|file| file.symbols);
    let guest = match file {
        None => Kernel::find(&mut GuestMemory::new(vm.machine().memory()).until(Some(Instant::now() + LONGEST))),
        Some(_) => None,
    };
    let symbols = file.as_ref().or(guest.as_ref().map(Kernel::symbols));
    let places: Vec<String> = addresses
        .iter()
        .enumerate()
        .map(|(cpu, address)| match symbols {
            Some(symbols) => format!("CPU {cpu} at {}", symbols.describe(*address)),
            None => format!("CPU {cpu} at {address:#x}"),
        })
        .collect();
    places.join(", ")
}
