//! What a VM exit and the VM entry after it cost on the software engine: a bare VMM whose guest executes CPUID for ever. The time of a
//! run with few exits is taken off, so that start and end of the machine do not count.
//!
//! `cargo xtask bench --only vmx`; the figures go to target/bench-vmx.json too.

use std::process::ExitCode;
use std::time::{Duration, Instant};

use guest_tests::measure::{alternate, median, rounds};
use guest_tests::{VMX_LOOP, target};
use minivmm::{Console, End, MachineConfig, Run, SerialTarget, StopReason};
use x86::model::HASWELL;

const FEW: u64 = 1_000;
const MANY: u64 = 501_000;
/// What a round trip may cost, in nanoseconds.
const TARGET: f64 = 3_000.0;

fn main() -> ExitCode {
    match rounds(5).and_then(measure) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("bench: {error}");
            ExitCode::FAILURE
        }
    }
}

/// A machine that makes so many VM exits: how long it runs, and how many steps.
fn exits(count: u64) -> Result<(Duration, u64), String> {
    let config = MachineConfig {
        memory: 64 << 20,
        model: &HASWELL,
        cmdline: Some(count.to_string().into_bytes()),
        ..MachineConfig::new(VMX_LOOP)
    };
    let mut vm = Run::new(&config).map_err(|error| error.to_string())?;
    let mut console = Console::open(&SerialTarget::Buffer, &[], vm.line()).map_err(|error| error.to_string())?;
    let started = Instant::now();
    match vm.run(&mut console) {
        Ok(StopReason::Ended(End::DebugExit(0))) => Ok((started.elapsed(), vm.steps())),
        end => Err(format!("the VMM with {count} exits: {end:?}")),
    }
}

fn measure(rounds: usize) -> Result<(), String> {
    let steps = (exits(MANY)?.1 - exits(FEW)?.1) as f64 / (MANY - FEW) as f64;
    let times = alternate(
        rounds,
        &mut [&mut || exits(FEW).map(|run| run.0), &mut || {
            exits(MANY).map(|run| run.0)
        }],
    )?;
    let taken = median(&times[1]).saturating_sub(median(&times[0]));
    let each = taken.as_secs_f64() * 1e9 / (MANY - FEW) as f64;
    println!("{rounds} rounds each\n");
    println!("a VM exit and the VM entry after it{each:>10.0} ns, {steps:.1} steps; target {TARGET:.0} ns");
    let path = target().join("bench-vmx.json");
    let text =
        format!("{{\n  \"rounds\": {rounds},\n  \"round trip\": {{\"ns\": {each:.1}, \"steps\": {steps:.2}}}\n}}\n");
    std::fs::write(&path, text).map_err(|error| format!("cannot write {}: {error}", path.display()))?;
    println!("\nwritten to {}", path.display());
    Ok(())
}
