//! What a debugger costs, what it costs to be able to go back, and how long going back takes, over a whole Linux boot.
//!
//! `cargo xtask bench --only debug [--rounds N]`; the figures go to target/bench-reverse.json too. The ratio is of times of CPUs, user
//! and system together, since a machine that others use makes seconds lie; how long somebody waits is in seconds.

use std::fs;
use std::io::{Read, Write};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use guest_tests::gdb::Guest;
use guest_tests::measure::{cpu_seconds_of_children, middle, rounds};
use guest_tests::{linux, linux_in_minivmm, run, target};
use minivmm::front::gdb::packets::frame;
use minivmm::recording::GuestMemory;
use minivmm::{Back, Console, MachineConfig, Run};
use trace::linux::Kernel;

const LIMIT: Duration = Duration::from_secs(600);
const CMDLINE: &str = "console=ttyS0 panic=-1 quiet minivmm.script=nothing";
/// The same with the kernel where it was linked.
const QUIET: &str = "console=ttyS0 panic=-1 quiet nokaslr minivmm.script=nothing";

fn main() -> ExitCode {
    match rounds(3).and_then(measure) {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => {
            eprintln!("bench: {message}");
            ExitCode::FAILURE
        }
    }
}

/// How long something takes, in seconds.
fn seconds<T>(work: impl FnOnce() -> T) -> (f64, T) {
    let start = Instant::now();
    let result = work();
    (start.elapsed().as_secs_f64(), result)
}

/// Symbols of the kernel without KASLR: a function that is not called, and a variable that is not written.
fn symbols() -> Result<[u64; 2], String> {
    let config = MachineConfig {
        initrd: vec![linux().initrd.clone().into()],
        cmdline: Some(QUIET.into()),
        ..MachineConfig::new(&linux().kernel)
    };
    let failed = |error: minivmm::Error| error.to_string();
    let mut vm = Run::new(&config).map_err(failed)?;
    let mut console = Console::open(&config.serial, &[], vm.line()).map_err(failed)?;
    loop {
        if vm.run_for(&mut console, 50_000_000).map_err(failed)?.is_some() {
            return Err("no kernel is found in memory".into());
        }
        if let Some(kernel) = Kernel::find(&mut GuestMemory::new(vm.machine().memory())) {
            let found = ["panic", "panic_cpu"].map(|name| kernel.symbols().address(name));
            return match found {
                [Some(function), Some(variable)] => Ok([function, variable]),
                _ => Err("the kernel's symbols are not found".into()),
            };
        }
    }
}

/// CPU seconds of a boot with a debugger that has set this, and which lets it run.
fn debugged(packet: Option<&str>) -> Result<f64, String> {
    let before = cpu_seconds_of_children();
    let failed = |error: std::io::Error| error.to_string();
    let initrd = linux().initrd.display().to_string();
    let options = ["--initrd", &initrd, "--cmdline", QUIET];
    match packet {
        None => {
            let mut command = guest_tests::in_minivmm(&linux().kernel);
            let outcome = run(command.args(options), LIMIT);
            if outcome.status != Some(0) {
                return Err(outcome.errors);
            }
        }
        Some(packet) => {
            let guest = Guest::start(&linux().kernel, &[&options[..], &["--paused"]].concat());
            let mut client = guest.client();
            client.set_read_timeout(Some(LIMIT)).map_err(failed)?;
            for body in ["qSupported:swbreak+", packet, "vCont;c"] {
                client.write_all(&frame(body.as_bytes())).map_err(failed)?;
            }
            let (mut said, mut part) = (String::new(), [0; 4096]);
            while !said.contains("$W") {
                match client.read(&mut part).map_err(failed)? {
                    0 => return Err(format!("the guest was not debugged to its end: {said}")),
                    count => said += &String::from_utf8_lossy(&part[..count]),
                }
            }
            if said.contains("$T") || !said.contains("$OK") {
                return Err(format!("it stopped on the way, or was not set: {said}"));
            }
            guest.finish();
        }
    }
    Ok(cpu_seconds_of_children() - before)
}

/// What a breakpoint and a watchpoint cost that are not met: ratios to a boot without a debugger.
fn stops(rounds: usize) -> Result<[f64; 2], String> {
    let [function, variable] = symbols()?;
    let (breakpoint, watchpoint) = (format!("Z1,{function:x},1"), format!("Z2,{variable:x},8"));
    let mut times = [const { Vec::new() }; 3];
    for _ in 0..rounds {
        for (times, packet) in times.iter_mut().zip([None, Some(&breakpoint[..]), Some(&watchpoint)]) {
            times.push(debugged(packet)?);
        }
    }
    let [plain, breakpoint, watchpoint] = times.map(middle);
    println!("boot of Debian's cloud kernel under a debugger, medians of {rounds}, seconds of CPUs");
    println!("  without        {plain:>7.2}");
    for (what, seconds) in [("a breakpoint", breakpoint), ("a watchpoint", watchpoint)] {
        println!("  {what:<14} {seconds:>7.2}, ratio {:.2}", seconds / plain);
    }
    Ok([breakpoint / plain, watchpoint / plain])
}

fn measure(rounds: usize) -> Result<(), String> {
    let [breakpoint, watchpoint] = stops(rounds)?;
    let boot = |keeps: bool| {
        let mut command = linux_in_minivmm(CMDLINE);
        if keeps {
            command.arg("--reverse");
        }
        let before = cpu_seconds_of_children();
        let outcome = run(&mut command, LIMIT);
        match outcome.status {
            Some(0) => Ok(cpu_seconds_of_children() - before),
            _ => Err(outcome.errors),
        }
    };
    let (mut plain, mut keeping) = (Vec::new(), Vec::new());
    for _ in 0..rounds {
        plain.push(boot(false)?);
        keeping.push(boot(true)?);
    }
    let (plain, keeping) = (middle(plain), middle(keeping));

    let config = MachineConfig {
        initrd: vec![linux().initrd.clone().into()],
        cmdline: Some(CMDLINE.into()),
        reverse: Some(minivmm::config::ReverseOptions::default()),
        ..MachineConfig::new(&linux().kernel)
    };
    let failed = |error: minivmm::Error| error.to_string();
    let mut vm = Run::new(&config).map_err(failed)?;
    let mut console = Console::open(&config.serial, &[], vm.line()).map_err(failed)?;
    vm.run(&mut console).map_err(failed)?;
    let extent = vm.extent().ok_or("the machine keeps no past")?;
    let (end, points, bytes) = (vm.steps(), extent.points, extent.bytes);

    let (mut far, mut near, mut over) = (Vec::new(), Vec::new(), Vec::new());
    let mut state = 7u64;
    for _ in 0..10 * rounds {
        state = state
            .wrapping_mul(0x5851_f42d_4c95_7f2d)
            .wrapping_add(0x1405_7b7e_f767_814f);
        let step = 2_000_000 + (state >> 20) % (end - 2_000_000);
        // There from one of the points that the boot has left, forwards: what is near is what the boot has left, too.
        let spacing = minivmm::config::ReverseOptions::default().spacing;
        vm.seek(&mut console, step - step % spacing).map_err(failed)?;
        vm.seek(&mut console, step).map_err(failed)?;
        let (time, back) = seconds(|| vm.step_back(&mut console, 0));
        back.map_err(failed)?;
        far.push(time);
        for _ in 0..20 {
            let (time, back) = seconds(|| vm.step_back(&mut console, 0));
            back.map_err(failed)?;
            near.push(time);
        }
        // Back over a million instructions, to a breakpoint that is met on the way there once.
        let here = vm.steps();
        let to = here.saturating_sub(1_000_000);
        vm.seek(&mut console, to).map_err(failed)?;
        let rip = vm.cpu_state(0).map_or(0, |cpu| cpu.rip);
        vm.seek(&mut console, here).map_err(failed)?;
        vm.debugger().add_breakpoint(rip);
        let (time, back) = seconds(|| vm.back(&mut console));
        if !matches!(back.map_err(failed)?, Back::Stopped(_)) {
            return Err("a breakpoint that was passed is not met on the way back".into());
        }
        over.push(time);
        vm.debugger().remove_breakpoint(rip);
    }
    let most = |values: Vec<f64>| {
        let longest = values.iter().copied().fold(0.0, f64::max);
        (middle(values), longest)
    };
    let (far, near, over) = (most(far), most(near), most(over));
    println!("boot of Debian's cloud kernel, medians of {rounds}, seconds of CPUs");
    println!(
        "  plain          {plain:>7.2}\n  --reverse      {keeping:>7.2}\n  ratio          {:>7.2}",
        keeping / plain
    );
    println!(
        "going back in its {:.0} M steps, over {points} points of {} MiB; median and longest, in ms",
        end as f64 / 1e6,
        bytes >> 20
    );
    for (what, (median, longest)) in [("a step", far), ("the next ones", near), ("a million", over)] {
        println!("  {what:<14} {:>7.2} {:>7.2}", median * 1e3, longest * 1e3);
    }
    let json = format!(
        "{{\"rounds\": {rounds}, \"breakpoint\": {breakpoint:.3}, \"watchpoint\": {watchpoint:.3}, \"boot_s\": {plain:.2}, \"reverse_s\": {keeping:.2}, \"ratio\": {:.3}, \"steps\": {end}, \"points\": {points}, \"bytes\": {bytes}, \"anywhere_s\": [{:.4}, {:.4}], \"near_s\": [{:.4}, {:.4}], \"stop_s\": [{:.4}, {:.4}]}}\n",
        keeping / plain,
        far.0,
        far.1,
        near.0,
        near.1,
        over.0,
        over.1,
    );
    let path = target().join("bench-reverse.json");
    fs::write(&path, json).map_err(|error| format!("cannot write {}: {error}", path.display()))
}
