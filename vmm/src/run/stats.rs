//! Figures about a run.

use std::time::Duration;

use crate::{machine::Accesses, vcpu::Exits};

/// What `--stats` prints.
#[derive(Clone, Debug)]
pub struct Stats {
    /// Instructions and REP iterations.
    pub steps: u64,
    /// Instructions, each REP once.
    pub instructions: u64,
    /// Steps of each CPU.
    pub cpus: Vec<u64>,
    /// Why the CPU stopped.
    pub exits: Exits,
    /// What the guest reached for.
    pub accesses: Accesses,
    /// Wall time.
    pub wall: Duration,
    /// Virtual time.
    pub virtual_time: Duration,
    /// A hash of memory and registers.
    pub digest: u64,
}

impl std::fmt::Display for Stats {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let wall = self.wall.as_secs_f64();
        let mips = if wall > 0.0 {
            self.steps as f64 / wall / 1e6
        } else {
            0.0
        };
        let (exits, accesses) = (&self.exits, &self.accesses);
        let all = exits.all();
        writeln!(
            f,
            "steps:        {} ({} instructions), {mips:.1} MIPS",
            self.steps, self.instructions
        )?;
        if self.cpus.len() > 1 {
            let each: Vec<String> = self.cpus.iter().map(u64::to_string).collect();
            writeln!(f, "by CPU:       {}", each.join(" "))?;
        }
        write!(
            f,
            "exits:        {all}: {} timer or slice, {} device, {} window, {} halt",
            exits.budget, exits.bus, exits.window, exits.halt
        )?;
        if self.cpus.len() > 1 {
            write!(f, ", {} pause", exits.pause)?;
        }
        writeln!(f)?;
        writeln!(
            f,
            "accesses:     {} port, {} memory-mapped, {} MSR",
            accesses.ports, accesses.mmio, accesses.msrs
        )?;
        writeln!(f, "delivered:    {} interrupts, {} NMIs", exits.interrupts, exits.nmis)?;
        writeln!(f, "wall time:    {wall:.3} s")?;
        writeln!(f, "virtual time: {:.9} s", self.virtual_time.as_secs_f64())?;
        write!(f, "state hash:   {:016x}", self.digest)
    }
}
