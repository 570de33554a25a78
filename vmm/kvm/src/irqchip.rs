//! Whose interrupt controllers a machine on KVM has: this program's, or KVM's own.
//!
//! KVM's stay in the kernel, and an interrupt, an IPI or HLT takes no exit to this program there. But what is in the kernel does
//! not come along to the software engine: a machine that moves there while the guest runs has this program's.

use serde::Serialize;

use crate::error::KvmError;
use crate::units::{Backend, Backends, Unit};

/// Why counters of KVM's need controllers of KVM's.
const COUNTERS: &str = "--pmu=host: the counters' interrupts are for KVM's own local APICs";

/// Why the interrupt controllers that were asked for cannot be had. Each is one line.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum IrqchipError {
    /// Something moves the guest to the software engine while it runs.
    #[error(
        "{option} {does}, and KVM's interrupt controllers do not come along: leave one of the two out, or use --irqchip minivmm"
    )]
    Moves {
        /// The option that has it do so.
        option: String,
        /// What it does.
        does: &'static str,
    },
    /// This host's KVM has none that would do.
    #[error("this host's KVM has no {0}: use --irqchip minivmm")]
    Lacks(&'static str),
    /// KVM's counters, and something that moves the guest to the software engine.
    #[error("{COUNTERS}, which {option} excludes: it {does}")]
    CountersExcluded {
        /// The option that has it do so.
        option: String,
        /// What it does.
        does: &'static str,
    },
    /// KVM's counters, and a KVM whose controllers will not do.
    #[error("{COUNTERS}, and this host's KVM has no {0}")]
    CountersLack(&'static str),
    /// KVM's counters, and `--irqchip minivmm`.
    #[error("{COUNTERS}: leave --irqchip minivmm out")]
    CountersOption,
    /// A guest that KVM does not run.
    #[error("the software engine runs this guest, and KVM has no part in it: use --engine kvm")]
    Software,
}

/// Whose interrupt controllers and interval timer a machine has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Irqchip {
    /// This program's.
    Minivmm,
    /// KVM's, in the kernel.
    Kvm,
}

impl Irqchip {
    /// As `--irqchip` takes it.
    pub fn name(self) -> &'static str {
        match self {
            Irqchip::Minivmm => "minivmm",
            Irqchip::Kvm => "kvm",
        }
    }
}

/// What of a run's configuration the choice hangs on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Wanted {
    /// `--irqchip`.
    pub irqchip: Option<Irqchip>,
    /// A debugger may stop the guest.
    pub debugged: bool,
    /// Somebody may look at the machine through the monitor.
    pub monitored: bool,
}

/// What has been chosen, and why.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Choice {
    /// Whose they are.
    pub irqchip: Irqchip,
    /// Why.
    pub why: String,
}

/// What of a configuration moves the machine to the software engine while the guest runs: the option, and what it does.
fn moves(config: &Wanted, units: &Backends) -> Option<(String, &'static str)> {
    let unit = units.each().find(|(_, backend)| *backend == Backend::Emulated);
    if let Some((row, _)) = unit {
        let option = format!("--{}=emulated", row.name);
        return Some((
            option,
            "has the guest run in the software engine while it uses the unit",
        ));
    }
    if units[Unit::Pt] == Backend::Host {
        let does = "has its interrupts from this program's";
        return Some(("--pt=host".into(), does));
    }
    let debugged = config.debugged;
    let does = "has the guest run in the software engine while there is something to stop for";
    debugged.then(|| ("--gdb".to_string(), does))
}

/// Whose a machine on KVM has. `lacks`: what of KVM's are missing on this host; `speed`: how it executes a guest, as an error if
/// it interprets.
///
/// # Errors
/// One line: KVM's are asked for and cannot be had, and why.
pub fn choose(
    config: &Wanted,
    units: &Backends,
    lacks: Option<&'static str>,
    speed: impl FnOnce() -> Result<String, KvmError>,
) -> Result<Choice, IrqchipError> {
    let chosen = |irqchip, why: String| Ok(Choice { irqchip, why });
    let moves = moves(config, units);
    if units[Unit::Pmu] == Backend::Host {
        return counters(config, moves, lacks).map(|why| Choice {
            irqchip: Irqchip::Kvm,
            why,
        });
    }
    match config.irqchip {
        Some(Irqchip::Minivmm) => chosen(Irqchip::Minivmm, "as --irqchip says".into()),
        Some(Irqchip::Kvm) => match (moves, lacks) {
            (Some((option, does)), _) => Err(IrqchipError::Moves { option, does }),
            (None, Some(name)) => Err(IrqchipError::Lacks(name)),
            (None, None) => chosen(Irqchip::Kvm, "as --irqchip says".into()),
        },
        None => {
            if let Some((option, does)) = moves {
                return chosen(Irqchip::Minivmm, format!("{option} {does}"));
            }
            if config.monitored {
                let why = "the monitor behind --control shows the machine's own";
                return chosen(Irqchip::Minivmm, why.into());
            }
            let (irqchip, why) = of_host(lacks, speed());
            chosen(irqchip, why)
        }
    }
}

/// Why a machine with KVM's counters has KVM's.
///
/// # Errors
/// One line: they cannot be had.
fn counters(
    config: &Wanted,
    moves: Option<(String, &'static str)>,
    lacks: Option<&'static str>,
) -> Result<String, IrqchipError> {
    match (moves, lacks, config.irqchip) {
        (Some((option, does)), ..) => Err(IrqchipError::CountersExcluded { option, does }),
        (_, Some(name), _) => Err(IrqchipError::CountersLack(name)),
        (_, _, Some(Irqchip::Minivmm)) => Err(IrqchipError::CountersOption),
        _ => Ok(COUNTERS.into()),
    }
}

/// Whose a machine has that nothing else is known of.
pub fn of_host(lacks: Option<&'static str>, speed: Result<String, KvmError>) -> (Irqchip, String) {
    match (lacks, speed) {
        (Some(name), _) => (Irqchip::Minivmm, format!("this host's KVM has no {name}")),
        (None, Err(why)) => (
            Irqchip::Minivmm,
            format!("{why}, so that some instructions are the software engine's"),
        ),
        // This program's can be looked at, and come along should the machine have to leave KVM.
        (None, Ok(_)) => (
            Irqchip::Minivmm,
            "--irqchip kvm has KVM's own, for a guest that need not leave KVM".into(),
        ),
    }
}

/// Why a machine in the software engine has none of KVM's, if they are asked for.
///
/// # Errors
/// One line: they are.
pub fn check_soft(config: &Wanted) -> Result<(), IrqchipError> {
    match config.irqchip {
        Some(Irqchip::Kvm) => Err(IrqchipError::Software),
        _ => Ok(()),
    }
}

#[cfg(test)]
#[path = "irqchip_test.rs"]
mod tests;
