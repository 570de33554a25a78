//! Recordings of a hundred machines that boot Linux: models, numbers of CPUs, sizes of memory, kernels, seeds. None has a gap, and
//! each is what retired.

use std::ops::Range;
use std::path::PathBuf;
use std::time::{SystemTime, UNIX_EPOCH};

use guest_tests::traced::Random;
use guest_tests::{full, linux, linux_kernels};
use minivmm::MachineConfig;

use crate::recorded::follow;

/// The models that run 64-bit kernels. The witness reads code as a supervisor does, so they come without SMAP.
const MODELS: [&str; 10] = [
    "core2",
    "westmere",
    "sandybridge",
    "haswell",
    "broadwell,-smap",
    "skylake-server,-smap",
    "icelake-server,-smap",
    "snowridge,-smap",
    "sapphirerapids,-smap",
    "alderlake,-smap",
];
/// Machines of a sweep.
const MACHINES: u64 = 100;
/// Parts of them, which are tests of their own, so that they run beside each other.
const PARTS: u64 = 4;
/// Of each part the short form takes so many, others every day.
const HANDFUL: u64 = 2;
/// Steps of a boot that the short form records, from a place of its own in each machine on.
const WINDOW: u64 = 4_000_000;
/// And the long form, which begins and ends many recordings amid code that was translated before.
const LATE_WINDOW: u64 = 40_000_000;
/// And so many of some machines: a decoder has to come through hundreds of PSBs and of changes of the code, up to the first programs.
const LONG_WINDOW: u64 = 250_000_000;
/// The first step of a recording that does not begin with the machine is below this.
const BOOT: u64 = 120_000_000;
const SECONDS_A_DAY: u64 = 86_400;

/// One of the machines.
fn machine(number: u64, kernels: &[PathBuf]) -> (String, MachineConfig) {
    let mut random = Random((number + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15));
    let model = MODELS[(number % MODELS.len() as u64) as usize];
    let cpus = 1 + random.below(4) as u8;
    let memory = [192, 256, 512, 1024][random.below(4) as usize];
    // Each kernel with each of the models.
    let kernel = &kernels[(number / MODELS.len() as u64 + number) as usize % kernels.len()];
    let seed = random.draw();
    let name = format!(
        "machine {number}: {model}, {cpus} CPUs, {memory} MiB, seed {seed}, {}",
        kernel.display()
    );
    let config = MachineConfig {
        initrd: vec![linux().initrd.clone().into()],
        cmdline: Some(b"console=ttyS0 panic=-1 quiet minivmm.script=nothing".to_vec()),
        memory: memory << 20,
        cpus,
        seed,
        model: minivmm::model::find(model).expect("a model"),
        ..MachineConfig::new(kernel)
    };
    (name, config)
}

/// The steps of a machine's recording. In the long form ten machines, one of each model, are recorded from their first step on (where most of
/// the steps are the kernel's decompressor, which is the same each time), ten more, again one of each model with other kernels, for as
/// long from a place of their own, and the rest, which differ in CPUs, memory and seed, for a shorter while.
fn window(number: u64) -> Range<u64> {
    let models = MODELS.len() as u64;
    let from = Random(number + 1).below(BOOT);
    match full() {
        true if number < models => 0..LONG_WINDOW,
        true if number < 2 * models => from..from + LONG_WINDOW,
        true => from..from + LATE_WINDOW,
        false => from..from + WINDOW,
    }
}

/// A machine of one number alone, wherever it comes in a sweep: `MINIVMM_SWEEP=NUMBER`.
fn wanted(number: u64) -> bool {
    std::env::var("MINIVMM_SWEEP").map_or(true, |wanted| wanted == number.to_string())
}

/// Records the machines of a part, and compares.
fn sweep(part: u64) {
    let mut kernels = linux_kernels();
    // The programs of the initial RAM disk are for 64-bit kernels.
    kernels.retain(|kernel| !kernel.to_string_lossy().contains("-686"));
    let today = SystemTime::now().duration_since(UNIX_EPOCH).expect("a clock").as_secs() / SECONDS_A_DAY;
    let all = MACHINES / PARTS;
    let numbers: Vec<u64> = if full() {
        (0..all).collect()
    } else {
        (0..HANDFUL).map(|n| (today * HANDFUL + n) % all).collect()
    };
    for number in numbers.into_iter().map(|n| n * PARTS + part).filter(|n| wanted(*n)) {
        let (name, config) = machine(number, &kernels);
        println!("{name}");
        let steps = window(number);
        let config = MachineConfig {
            max_instructions: Some(steps.end),
            ..config
        };
        follow(&name, &config, steps.start);
    }
}

// covers: trace/sweep
#[test]
fn recordings_of_many_machines_have_no_gap_0() {
    sweep(0);
}

// covers: trace/sweep
#[test]
fn recordings_of_many_machines_have_no_gap_1() {
    sweep(1);
}

// covers: trace/sweep
#[test]
fn recordings_of_many_machines_have_no_gap_2() {
    sweep(2);
}

// covers: trace/sweep
#[test]
fn recordings_of_many_machines_have_no_gap_3() {
    sweep(3);
}
