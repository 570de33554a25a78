//! Runs are the same whether blocks are translated or not: steps, and a hash of memory and of every register of every CPU and unit.

use engine::{Activity, CpuState};
use guest_tests::bare::{folder, image};
use guest_tests::flat::{self, CODE, DATA};
use guest_tests::{Outcome, in_minivmm, linux_in_minivmm, run};
use iced_x86::IcedError;
use iced_x86::code_asm::*;
use minivmm::MachineConfig;
use std::process::Command;
use std::time::Duration;
use x86::model::SKYLAKE_SERVER;

const LIMIT: Duration = Duration::from_secs(600);

/// What must be alike of two runs: the console, and what `--stats` says of the guest.
fn left(outcome: &Outcome) -> (String, Vec<String>) {
    let kept = |line: &&str| {
        ["state hash:", "accesses:", "delivered:"]
            .iter()
            .any(|head| line.starts_with(head))
    };
    let mut lines: Vec<String> = outcome.errors.lines().filter(kept).map(str::to_string).collect();
    let steps = outcome.errors.lines().find_map(|line| line.strip_prefix("steps:"));
    // The speed comes behind the numbers.
    lines.extend(steps.and_then(|line| line.split(')').next()).map(str::to_string));
    assert_eq!(lines.len(), 4, "{}", outcome.errors);
    (outcome.console.clone(), lines)
}

/// Runs a guest with the translator off, as it is by itself, and with whatever has run once translated.
fn same_however_translated(what: &str, command: impl Fn() -> Command) {
    let run_with = |how: &str| run(command().args(["--stats", "--translate", how]), LIMIT);
    let off = run_with("off");
    assert!(!off.errors.contains("translated:"), "{}", off.errors);
    for how in ["on", "after=1"] {
        let on = run_with(how);
        assert!(on.errors.contains("translated:"), "{}", on.errors);
        assert_eq!(left(&on), left(&off), "{what}, --translate {how}");
        assert_eq!(on.status, off.status, "{what}, --translate {how}");
    }
}

/// Guests of each kind by default, all of them on all 64-bit models in the full form.
// covers: translate/guests
#[test]
fn guest_tests_leave_the_same_state() {
    const MODELS: [&str; 6] = [
        "haswell",
        "skylake-server",
        "sapphirerapids",
        "westmere",
        "snowridge",
        "alderlake",
    ];
    const SOME: [(&str, &str); 6] = [
        ("dr", "haswell"),
        ("lbr", "skylake-server"),
        ("pebs", "icelake-server"),
        ("pt_packets", "sapphirerapids"),
        ("pmu", "alderlake"),
        ("bts", "westmere"),
    ];
    let of = |name: &str, model: &str| {
        let kernel = image(name);
        same_however_translated(&format!("{name} on {model}"), || {
            let mut command = in_minivmm(&kernel);
            command.args(["--engine", "soft", "--cpu-model", model]);
            command
        });
    };
    if !guest_tests::full() {
        println!("left out: all guests on six models, which the full form runs");
        return SOME.iter().for_each(|(name, model)| of(name, model));
    }
    let mut names: Vec<String> = std::fs::read_dir(folder())
        .unwrap()
        .filter_map(|entry| Some(entry.ok()?.path()))
        .filter(|path| path.extension().is_some_and(|extension| extension == "elf"))
        .filter_map(|path| Some(path.file_stem()?.to_str()?.to_string()))
        // Those wait for CPUs that are not there.
        .filter(|name| !name.contains("smp"))
        .collect();
    names.sort();
    assert!(names.len() > 10, "{names:?}");
    for name in names {
        MODELS.iter().for_each(|model| of(&name, model));
    }
}

/// Two CPUs, whose turns end at steps.
// covers: translate/smp
#[test]
fn several_cpus_leave_the_same_state() {
    let kernel = image("smp");
    same_however_translated("smp", || {
        let mut command = in_minivmm(&kernel);
        command.args(["--engine", "soft", "--cpu-model", "skylake-server", "--cpus", "3"]);
        command
    });
}

/// Where the second CPU begins, a flag of the first one's, and a routine, ADD EBX, imm32 and RET.
const SECOND: u64 = CODE + 0x1000;
const ASKED: u64 = DATA;
const ROUTINE: u64 = DATA + 0x1000;

/// Calls the routine three hundred times, a hundred times over; `asks`: in between it asks the other CPU to change it, and waits.
fn calls(a: &mut CodeAssembler, asks: bool) -> Result<(), IcedError> {
    let (mut again, mut round) = (a.create_label(), a.create_label());
    a.mov(rdi, ROUTINE)?;
    a.mov(rsi, ASKED)?;
    a.xor(ebx, ebx)?;
    a.mov(edx, 100)?;
    a.set_label(&mut again)?;
    a.mov(ecx, 300)?;
    a.set_label(&mut round)?;
    a.call(rdi)?;
    a.dec(ecx)?;
    a.jne(round)?;
    if asks {
        let mut wait = a.create_label();
        a.mov(dword_ptr(rsi), 1)?;
        a.set_label(&mut wait)?;
        a.pause()?;
        a.cmp(dword_ptr(rsi), 0)?;
        a.jne(wait)?;
    }
    a.dec(edx)?;
    a.jne(again)?;
    a.hlt()
}

/// Changes what the routine adds: when it is asked to, or all the time.
fn changes(a: &mut CodeAssembler, asks: bool) -> Result<(), IcedError> {
    let mut again = a.create_label();
    a.mov(rdi, ROUTINE)?;
    a.mov(rsi, ASKED)?;
    a.set_label(&mut again)?;
    if asks {
        a.pause()?;
        a.cmp(dword_ptr(rsi), 1)?;
        a.jne(again)?;
    }
    a.inc(byte_ptr(rdi + 2))?;
    a.mov(dword_ptr(rsi), 0)?;
    a.jmp(again)
}

/// A machine with both: its hashes as it runs, and the first CPU at last.
fn called_and_changed(asks: bool, translate_after: Option<u32>) -> (Vec<u64>, CpuState) {
    let config = MachineConfig {
        cpus: 2,
        translate_after,
        ..flat::config(&SKYLAKE_SERVER)
    };
    let (mut vm, mut console) = flat::whole_of(&config, 0, &[], |a| calls(a, asks));
    let mut a = CodeAssembler::new(64).unwrap();
    changes(&mut a, asks).unwrap();
    let memory = vm.machine().memory();
    memory.write(SECOND, &a.assemble(SECOND).unwrap()).unwrap();
    memory.write(ROUTINE, &[0x81, 0xc3, 0, 0, 0, 0, 0xc3]).unwrap();
    let mut state = vm.save();
    let first = state.soft.cpus[0].clone();
    state.soft.cpus[1] = CpuState {
        rip: SECOND,
        activity: Activity::Running,
        ..first
    };
    vm.set_state(&state).unwrap();
    let mut hashes = Vec::new();
    for _ in 0..40 {
        assert!(vm.run_for(&mut console, 12_345).unwrap().is_none());
        hashes.push(vm.digest());
    }
    let made = vm.stats().translated.map_or(0, |made| made.blocks);
    assert_eq!(made > 3, translate_after.is_some(), "{made}");
    (hashes, vm.cpu_state(0).unwrap())
}

/// One CPU runs a routine that another one changes: when it is asked to, and whenever it likes.
// covers: translate/other-cpu
#[test]
fn code_that_another_cpu_writes_runs_as_it_was_written() {
    for asks in [true, false] {
        let (ours, theirs) = (called_and_changed(asks, Some(1)), called_and_changed(asks, None));
        assert_eq!(ours, theirs, "asks: {asks}");
        let first = ours.1;
        assert_eq!(first.activity, Activity::Halted, "asks: {asks}");
        if asks {
            // Three hundred times each of 0 to 99.
            assert_eq!(first.gpr[3], 300 * 99 * 100 / 2);
        } else {
            assert_ne!(first.gpr[3], 0);
        }
    }
}

/// A whole boot; on every 64-bit model in the full form.
// covers: translate/boot
#[test]
fn a_boot_of_linux_leaves_the_same_state() {
    let models: &[&str] = match guest_tests::full() {
        true => &[
            "core2",
            "westmere",
            "sandybridge",
            "haswell",
            "skylake-server",
            "icelake-server",
            "snowridge",
            "alderlake",
        ],
        false => &["sapphirerapids"],
    };
    for model in models {
        same_however_translated(model, || {
            let mut command = linux_in_minivmm("console=ttyS0 panic=-1 quiet minivmm.script=nothing");
            command.args(["--engine", "soft", "--cpu-model", model]);
            command
        });
    }
}
