//! Figures about a run.

use std::time::Duration;

use engine::translate::Why;
use machine::Accesses;
use machine::exits::Exits;

/// What a machine on KVM did there.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Native {
    /// Why CPUs came out of the guest; `budget` counts kicks.
    pub exits: Exits,
    /// Instructions that the software engine executed since KVM cannot.
    pub emulated: u64,
    /// How often the machine moved to the software engine for a unit that has to see instructions, or the debugger.
    pub watched: u64,
    /// Wall time in the software engine.
    pub in_engine: Duration,
}

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
    /// On KVM: what was done there. Steps and exits are those of the software engine.
    pub native: Option<Native>,
    /// What the guest reached for.
    pub accesses: Accesses,
    /// Wall time.
    pub wall: Duration,
    /// Virtual time.
    pub virtual_time: Duration,
    /// Guest RAM that was touched, which is what of it was hashed, and all of it. In bytes.
    pub touched: (u64, u64),
    /// What the software engine has translated, if it does.
    pub translated: Option<engine::translate::Statistics>,
    /// What the interpreter did in blocks that are translated, and how often: what it did most comes first.
    pub not_translated: Vec<(String, Why, u64)>,
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
        if let Some(native) = &self.native {
            let exits = &native.exits;
            writeln!(
                f,
                "KVM exits:    {}: {} kick, {} device or MSR, {} window, {} halt, {} debug; {} interrupts, {} NMIs",
                exits.all(),
                exits.budget,
                exits.bus,
                exits.window,
                exits.halt,
                exits.debug,
                exits.interrupts,
                exits.nmis
            )?;
            writeln!(
                f,
                "handovers:    {} for an instruction, {} for a unit or the debugger; {:.3} s in the engine",
                native.emulated,
                native.watched,
                native.in_engine.as_secs_f64()
            )?;
        }
        writeln!(f, "wall time:    {wall:.3} s")?;
        writeln!(f, "virtual time: {:.9} s", self.virtual_time.as_secs_f64())?;
        let (touched, size) = self.touched;
        writeln!(
            f,
            "memory:       {} KiB touched and hashed of {} KiB",
            touched >> 10,
            size >> 10
        )?;
        if let Some(translated) = &self.translated {
            let ops = translated.ops + translated.called;
            let share = 100.0 * translated.ops as f64 / (ops.max(1)) as f64;
            write!(
                f,
                "translated:   {} blocks, {} KiB of host code; {share:.1} % of their operations, the others are called; {} blocks left",
                translated.blocks,
                translated.bytes >> 10,
                translated.left
            )?;
            if translated.forgotten > 0 {
                write!(
                    f,
                    "; all were forgotten {} times, for lack of room",
                    translated.forgotten
                )?;
            }
            writeln!(f)?;
        }
        if !self.not_translated.is_empty() {
            let most = self.not_translated.iter().take(10).map(|(name, why, times)| match why {
                Why::Instruction => format!("{times} {name}"),
                Why::Operands => format!("{times} {name} (operands)"),
                Why::Leaves => format!("{times} {name} (ends its block)"),
            });
            writeln!(f, "interpreted:  {}", most.collect::<Vec<_>>().join(", "))?;
        }
        write!(f, "state hash:   {:016x}", self.digest)
    }
}
