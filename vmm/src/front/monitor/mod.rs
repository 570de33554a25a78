//! The monitor: commands in words, for gdb's `monitor` and for the control socket.
//!
//! Each command is a row of [`COMMANDS`] and a plain function over a [`Scene`]: the machine between two steps, and the CPU that
//! is looked at. Commands that read change nothing in the guest, not so much as an accessed bit of a page table; registers whose
//! reading does something are read in copies of their units. Those that write say so in their help.

mod arguments;
mod branches;
mod counters;
mod error;
mod interrupts;
mod machine;
mod memory;
mod past;
mod recording;
mod registers;
mod resources;
mod scene;
mod snapshots;
mod stops;
#[cfg(test)]
#[path = "monitor_test.rs"]
mod tests;
mod trace;
mod virtualization;

use std::fmt::Write;

pub use self::error::MonitorError;
use self::{arguments::Answer, scene::Scene};
use crate::front::controls::Controls;
use kvm::units::{UNITS, Unit};

/// A command.
#[derive(Clone, Copy, Debug)]
pub struct Command {
    /// Its name.
    pub name: &'static str,
    /// What it takes; `[]` around what may be left out.
    pub arguments: &'static str,
    /// What it does.
    pub help: &'static str,
    run: fn(&mut Scene<'_, '_>, &[&str]) -> Answer,
}

const fn row(
    name: &'static str,
    arguments: &'static str,
    help: &'static str,
    run: fn(&mut Scene<'_, '_>, &[&str]) -> Answer,
) -> Command {
    Command {
        name,
        arguments,
        help,
        run,
    }
}

/// The command that shows a unit.
const fn unit(unit: Unit, run: fn(&mut Scene<'_, '_>, &[&str]) -> Answer) -> Command {
    let about = &UNITS[unit as usize];
    row(about.name, about.monitor_arguments, about.monitor, run)
}

/// All commands, in the order of their help.
pub const COMMANDS: &[Command] = &[
    row("help", "[COMMAND]", "This list, or one command of it", help),
    row(
        "info",
        "",
        "The machine: steps, time, and where each CPU is",
        machine::info,
    ),
    row(
        "hash",
        "",
        "A hash of the whole machine: memory, CPUs, units, devices. Equal for equal runs at the same step",
        machine::hash,
    ),
    row(
        "kaslr",
        "",
        "The Linux kernel in memory: version, where KASLR has put it, and gdb's line for its symbols",
        machine::kaslr,
    ),
    unit(Unit::Dr, registers::debug),
    row("debugctl", "", "IA32_DEBUGCTL, bit by bit", registers::debugctl),
    unit(Unit::Lbr, branches::lbr),
    unit(Unit::Bts, branches::bts),
    unit(Unit::Pebs, counters::pebs),
    unit(Unit::Pmu, counters::pmu),
    unit(Unit::Pt, trace::pt),
    unit(Unit::Tsc, registers::tsc),
    unit(Unit::Rdt, resources::rdt),
    row(
        "msr",
        "read MSR | write MSR VALUE",
        "Reads or writes an MSR, by its number or its manual name; writing is as WRMSR in the guest",
        registers::msr,
    ),
    row(
        "cpuid",
        "LEAF [SUBLEAF]",
        "What CPUID shows here and now",
        registers::cpuid,
    ),
    row(
        "gva2gpa",
        "ADDRESS",
        "The physical address of a linear one",
        memory::gva2gpa,
    ),
    row(
        "pagewalk",
        "ADDRESS",
        "Every page-table entry on the way to a linear address",
        memory::pagewalk,
    ),
    row(
        "vmcs",
        "[FIELD]",
        "VMX operation: root or non-root, and the current VMCS field by field, or those whose names have this in them",
        virtualization::vmcs,
    ),
    row(
        "catch",
        "[VECTOR | vmexit [REASON] | none]",
        "Stops for gdb once an exception or interrupt of this vector (14, or a name as PF) has been delivered, or a VM exit made (by its reason: 48, or a part of its name as EPT); lists what is caught",
        stops::catch,
    ),
    row(
        "run-to",
        "[STEP]",
        "Goes to a step, forwards or with `--reverse` backwards, and stands there; says how far back it can go",
        past::run_to,
    ),
    row(
        "snapshot",
        "[save NAME | load NAME | drop NAME | list]",
        "Keeps the machine's state in memory under a name, or takes on one that was kept",
        snapshots::snapshot,
    ),
    row(
        "trace",
        "[start [DIR [OPTION...]] | stop]",
        "Begins a recording in a new directory, with the options of `--trace`, and ends it; begins or stops what `--trace` records; says whether it records",
        recording::trace,
    ),
    row(
        "irq",
        "",
        "Interrupt controllers: local APIC, I/O APIC, 8259 pair",
        interrupts::irq,
    ),
];

/// Carries out a line and gives what it has to say, which ends with a line end. What is wrong with a line is said the same way.
pub fn run(controls: &mut Controls<'_>, cpu: usize, line: &str) -> String {
    text_of(answer(controls, cpu, line))
}

/// The same for whoever may not write files of this host.
pub fn run_without_files(controls: &mut Controls<'_>, cpu: usize, line: &str) -> String {
    text_of(carry_out(controls, cpu, line, false))
}

/// A text without what a terminal would obey: names and banners are the guest's, names of snapshots a client's.
fn printable(text: &str) -> String {
    text.replace(|c: char| c.is_control() && c != '\n' && c != '\t', "?")
}

fn text_of(answer: Answer) -> String {
    let mut text = answer.unwrap_or_else(|why| printable(&why.to_string()));
    if !text.ends_with('\n') {
        text.push('\n');
    }
    text
}

/// The same, with errors distinguished from answers.
///
/// # Errors
/// One line: no such command or CPU, what is wrong with an argument, why it cannot be done.
pub fn answer(controls: &mut Controls<'_>, cpu: usize, line: &str) -> Answer {
    carry_out(controls, cpu, line, true)
}

fn carry_out(controls: &mut Controls<'_>, cpu: usize, line: &str, files: bool) -> Answer {
    let mut words = line.split_ascii_whitespace();
    let name = words.next().unwrap_or("help");
    let arguments: Vec<&str> = words.collect();
    let command = find(name)?;
    let mut scene = Scene::new(controls, cpu, files).ok_or(MonitorError::NoCpu(cpu))?;
    (command.run)(&mut scene, &arguments).map(|text| printable(&text))
}

/// A command by its name, or by as much of it as tells it from others.
fn find(name: &str) -> Result<&'static Command, MonitorError> {
    if let Some(command) = COMMANDS.iter().find(|command| command.name == name) {
        return Ok(command);
    }
    let like: Vec<&Command> = COMMANDS
        .iter()
        .filter(|command| command.name.starts_with(name))
        .collect();
    match like[..] {
        [one] => Ok(one),
        [] => Err(MonitorError::NoCommand(name.into())),
        _ => {
            let names: Vec<&str> = like.iter().map(|command| command.name).collect();
            Err(MonitorError::Ambiguous(name.into(), names.join(", ")))
        }
    }
}

fn help(_: &mut Scene<'_, '_>, arguments: &[&str]) -> Answer {
    let rows: Vec<&Command> = match arguments {
        [] => COMMANDS.iter().collect(),
        [name] => vec![find(name)?],
        _ => return Err(MonitorError::Usage("help takes one command")),
    };
    let usage = |command: &Command| format!("{} {}", command.name, command.arguments).trim_end().to_string();
    let width = rows.iter().map(|command| usage(command).len()).max().unwrap_or(0);
    let mut text = String::new();
    for command in rows {
        let _ = writeln!(text, "{:width$}  {}", usage(command), command.help);
    }
    Ok(text)
}
