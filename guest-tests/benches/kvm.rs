//! What this program adds to KVM: an exit that one of its units serves over a bare one, a handover to the software engine and
//! back in bare exits, and single steps over a handover. Medians of alternated runs, on this host's KVM.
//!
//! `cargo xtask bench --only kvm`; the figures go to target/bench-kvm.json too. Where there is no KVM it says so.

use guest_tests::measure::{alternate, median, ratio, rounds};
use guest_tests::target;
use minivmm::StopReason;
use minivmm::config::{EngineChoice, KvmDefects};
use minivmm::kvm::units::{Unit, UnitRequest, UnitRequests};
use minivmm::kvm::{Host, Limit};
use minivmm::{Console, End, MachineConfig, Run, SerialTarget};
use std::process::ExitCode;
use std::time::{Duration, Instant};
use x86::model::SAPPHIRERAPIDS;

/// Exits, handovers or steps of a run.
const COUNT: u32 = 2000;

fn main() -> ExitCode {
    let host = match Host::open() {
        Ok(host) => host,
        Err(why) => {
            println!("nothing to measure: {why}");
            return ExitCode::SUCCESS;
        }
    };
    match rounds(5).and_then(|rounds| measure(&host, rounds)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => wrong(&error),
    }
}

fn wrong(message: &str) -> ExitCode {
    eprintln!("bench: {message}");
    ExitCode::FAILURE
}

/// A machine on KVM whose guest is this 32-bit code, at its first instruction.
fn machine(code: &[u8]) -> Result<(Run, Console), String> {
    let flags = 1u32 << 16;
    let checksum = 0u32.wrapping_sub(0x1bad_b002).wrapping_sub(flags);
    let words = [0x1bad_b002, flags, checksum, 0x10_0000, 0x10_0000, 0, 0, 0x10_0020];
    let image = words
        .iter()
        .flat_map(|word| word.to_le_bytes())
        .chain(code.iter().copied());
    let path = std::env::temp_dir().join(format!("minivmm-bench-kvm-{}", std::process::id()));
    std::fs::write(&path, image.collect::<Vec<u8>>()).map_err(|error| error.to_string())?;
    let config = MachineConfig {
        memory: 4 << 20,
        engine: EngineChoice::Kvm,
        kvm_defects: KvmDefects::Accept,
        model: &SAPPHIRERAPIDS,
        units: UnitRequests::default().with(Unit::Pt, Some(UnitRequest::Emulated)),
        ..MachineConfig::new(&path)
    };
    let vm = Run::new(&config);
    let _ = std::fs::remove_file(&path);
    let vm = vm.map_err(|error| error.to_string())?;
    let console = Console::open(&SerialTarget::Buffer, &[], vm.line()).map_err(|error| error.to_string())?;
    Ok((vm, console))
}

/// [`COUNT`] WRMSRs of a register of Intel PT, in a loop as a bare exit has it; then the end.
fn served() -> Result<Duration, String> {
    // xor eax, eax; xor edx, edx; mov ecx, 560H; mov esi, COUNT; again: wrmsr; dec esi; jnz again; out F4H, al
    let mut code = vec![0x31, 0xc0, 0x31, 0xd2, 0xb9, 0x60, 0x05, 0, 0, 0xbe];
    code.extend(COUNT.to_le_bytes());
    code.extend([0x0f, 0x30, 0x4e, 0x75, 0xfb, 0xe6, 0xf4]);
    let (mut vm, mut console) = machine(&code)?;
    let started = Instant::now();
    match vm.run(&mut console) {
        Ok(StopReason::Ended(End::DebugExit(0))) => Ok(started.elapsed()),
        end => Err(format!("the guest that writes MSRs: {end:?}")),
    }
}

/// A guest that never ends: again: inc eax; jmp again
const FOREVER: [u8; 3] = [0x40, 0xeb, 0xfd];

/// A tenth of [`COUNT`] times an instruction that KVM cannot execute, in a loop: PXOR with memory that is none; then the end.
fn handovers() -> Result<Duration, String> {
    // mov eax, cr4; or eax, 200H; mov cr4, eax; mov esi, COUNT; again: pxor xmm0, [D0000000H]; dec esi; jnz again; out F4H, al
    let mut code = vec![0x0f, 0x20, 0xe0, 0x0d, 0, 2, 0, 0, 0x0f, 0x22, 0xe0, 0xbe];
    code.extend((COUNT / 10).to_le_bytes());
    code.extend([
        0x66, 0x0f, 0xef, 0x05, 0, 0, 0, 0xd0, 0x4e, 0x75, 0xf5, 0x31, 0xc0, 0xe6, 0xf4,
    ]);
    let (mut vm, mut console) = machine(&code)?;
    let started = Instant::now();
    match vm.run(&mut console) {
        Ok(StopReason::Ended(End::DebugExit(0))) => Ok(started.elapsed()),
        end => Err(format!("the guest that is handed over: {end:?}")),
    }
}

/// So many instructions by single steps in KVM, and by one handover to the engine.
fn steps(by_handover: bool) -> Result<Duration, String> {
    let (mut vm, mut console) = machine(&FOREVER)?;
    let started = Instant::now();
    let mut ends = vec![vm.run_native(&mut console, Limit::Steps(if by_handover { 1 } else { COUNT.into() }))];
    if by_handover {
        ends.push(vm.run_for(&mut console, COUNT.into()));
    }
    match ends.iter().all(|end| matches!(end, Ok(None))) {
        true => Ok(started.elapsed()),
        false => Err(format!("the guest that is stepped: {ends:?}")),
    }
}

fn measure(host: &Host, rounds: usize) -> Result<(), String> {
    let times = alternate(
        rounds,
        &mut [
            &mut || host.bare_exits(COUNT as u16).map_err(|why| why.to_string()),
            &mut served,
            &mut handovers,
            &mut || steps(false),
            &mut || steps(true),
        ],
    )?;
    let each = |row: usize, count: u32| median(&times[row]) / count;
    let (bare, served, handover) = (each(0, COUNT), each(1, COUNT), each(2, COUNT / 10));
    let (stepped, handed) = (median(&times[3]), median(&times[4]));
    let micros = |time: Duration| time.as_secs_f64() * 1e6;
    println!("on this host's KVM, {rounds} rounds each\n");
    let mut json = Vec::new();
    let mut row = |name: &str, time: Duration, figure: f64, target: &str| {
        println!("{name:<44}{:>10.1} us{figure:>10.2}  {target}", micros(time));
        json.push(format!(
            "\"{name}\": {{\"us\": {:.2}, \"ratio\": {figure:.3}}}",
            micros(time)
        ));
    };
    row("a bare MSR exit", bare, 1.0, "");
    row(
        "one that a unit serves, over a bare one",
        served,
        ratio(served, bare),
        "1.3",
    );
    row(
        "a handover there and back, in bare exits",
        handover,
        ratio(handover, bare),
        "10",
    );
    let name = format!("{COUNT} single steps in KVM, over a handover");
    row(&name, stepped, ratio(stepped, handed), "");
    let path = target().join("bench-kvm.json");
    let text = format!("{{\n  \"rounds\": {rounds},\n  {}\n}}\n", json.join(",\n  "));
    std::fs::write(&path, text).map_err(|error| format!("cannot write {}: {error}", path.display()))?;
    println!("\nwritten to {}", path.display());
    Ok(())
}
