//! Prints a Linux guest's system calls, by process: `cargo run --release --example system_calls -- KERNEL INITRD CMDLINE`.

use std::{collections::BTreeMap, error::Error};

use minivmm::observe::{Observer, Place, SystemCall, Wanted};
use minivmm::{Console, MachineConfig, Run, trace::linux::Task};

/// Calls, and the process that each CPU runs.
#[derive(Default)]
pub struct Calls(pub Vec<String>, BTreeMap<usize, String>);

impl Observer for Calls {
    fn wanted(&self) -> Wanted {
        let (system_calls, process_switches, others) = (true, true, Wanted::default());
        Wanted {
            system_calls,
            process_switches,
            ..others
        }
    }

    fn process_switch(&mut self, place: &Place, task: Option<&Task>) {
        let name = task.map(|task| format!("{} {}", task.comm, task.tgid));
        self.1
            .insert(place.cpu, name.unwrap_or(format!("cr3 {:#x}", place.cr3)));
    }

    fn system_call(&mut self, place: &Place, call: &SystemCall) {
        let (process, [a, b, c, ..]) = (self.1.get(&place.cpu).map_or("?", String::as_str), call.arguments);
        let line = format!("{} {process}: {}({a:#x}, {b:#x}, {c:#x})", place.step, call.number);
        self.0.push(line);
    }
}

/// All that a guest calls until it has ended.
pub fn calls(config: &MachineConfig) -> Result<Vec<String>, Box<dyn Error>> {
    let mut run = Run::new(config)?;
    let observed = run.observe(Calls::default());
    run.run(&mut Console::open(&config.serial, &[], run.line())?)?;
    Ok(std::mem::take(&mut observed.get().0))
}

fn main() -> Result<(), Box<dyn Error>> {
    let words: Vec<String> = std::env::args().collect();
    let mut config = MachineConfig::new(&words[1]);
    (config.initrd, config.cmdline) = (vec![words[2].clone().into()], Some(words[3].clone().into()));
    calls(&config)?.iter().for_each(|line| println!("{line}"));
    Ok(())
}
