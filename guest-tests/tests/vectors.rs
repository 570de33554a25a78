//! Programs with code for AVX-512 that they choose by the CPU they find, on the models with it: what GCC compiles for parts by name, and
//! programs of Debian's that check what they compute.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use guest_tests::{Folder, full, linux, linux_in_minivmm, minivmm, run, skipped};

const LIMIT: Duration = Duration::from_secs(300);

/// The ways in which vector instructions are executed: the host's as far as it has them, and by tables what is beyond SSE2's halves; in the
/// full form by tables alone too.
fn ways() -> Vec<&'static [&'static str]> {
    let mut ways: Vec<&[&str]> = vec![&[], &["--vector", "portable"]];
    if full() {
        ways.push(&["--vector", "tables"]);
    }
    ways
}

/// The models that show AVX-512.
const PARTS: [&str; 3] = ["skylake-server", "icelake-server", "sapphirerapids"];

// covers: cpu/avx512-clones
#[test]
fn code_for_server_parts_runs_on_their_models() {
    let folder = Folder::new("vectors");
    let inject = folder.join("inject");
    fs::create_dir(&inject).unwrap();
    let program = inject.join("vectors");
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/vectors.c");
    let made = Command::new("gcc")
        .args(["-O3", "-static", "-fwrapv", "-ffp-contract=off", "-o"])
        .arg(&program)
        .args([source, "-lm"])
        .status();
    assert!(made.expect("gcc (Debian: gcc)").success());
    let output = Command::new(&program).output().unwrap();
    let native = String::from_utf8(output.stdout).unwrap();
    let results = native.lines().next().unwrap();
    folder.script("inject/run", "#!/bin/sh\n/inject/vectors || echo FAILED $?\n");
    for part in PARTS {
        let mut boot = linux_in_minivmm("console=ttyS0 quiet panic=-1");
        boot.args(["--cpu-model", part, "--inject"]).arg(&inject);
        let guest = run(&mut boot, LIMIT).must_end_with(0);
        let console = &guest.console;
        assert!(console.contains(results), "{part}: {results}\n{console}");
        // GCC's name of the part: that is how the code was chosen.
        let name = part.replace("skylake-server", "skylake-avx512");
        let line = console.lines().find(|line| line.starts_with("part:"));
        assert!(line.is_some_and(|line| line.contains(&name)), "{part}\n{console}");
    }
}

/// What a command of the host's says in a guest of a model. Whatever else it says, it must end with status 0.
#[track_caller]
fn says(part: &str, options: &[&str], command: &[&str]) -> String {
    let folder = Folder::new("vectors-run");
    let mut minivmm = Command::new(minivmm());
    minivmm
        .args(["run", "--cpu-model", part, "--memory", "2G", "--kernel"])
        .arg(&linux().kernel)
        .args(options)
        .arg("--")
        .args(command)
        .current_dir(&*folder)
        .stdin(Stdio::null());
    let output = minivmm.output().unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let said = text(&output.stdout) + &text(&output.stderr);
    assert!(output.status.success(), "{part} {options:?}: {}\n{said}", output.status);
    said
}

/// The stressors of vectors do the same work in several ways, and compare what comes out.
// covers: cpu/avx512-stress
#[test]
fn stress_ng_finds_its_vectors_right() {
    const STRESSORS: [&str; 4] = ["vecfp", "vecmath", "vecshuf", "vecwide"];
    if !Path::new("/usr/bin/stress-ng").is_file() {
        return skipped("stress_ng_finds_its_vectors_right", "there is no stress-ng here");
    }
    let rounds = if full() { "2000" } else { "50" };
    let mut command = vec!["stress-ng".to_string(), "--verify".into(), "--metrics-brief".into()];
    for stressor in STRESSORS {
        command.extend([
            format!("--{stressor}"),
            "1".into(),
            format!("--{stressor}-ops"),
            rounds.into(),
        ]);
    }
    let command: Vec<&str> = command.iter().map(String::as_str).collect();
    for part in PARTS {
        for options in ways() {
            let said = says(part, options, &command);
            assert!(said.contains("successful run completed"), "{part} {options:?}\n{said}");
            for stressor in STRESSORS {
                // A row of what each has done: its name, and a number of operations that is not 0.
                let row = said
                    .lines()
                    .find_map(|line| line.split("] ").nth(1)?.strip_prefix(stressor));
                let done = row.and_then(|row| row.split_whitespace().next()?.parse::<u64>().ok());
                assert!(done.is_some_and(|done| done >= 50), "{part}: {stressor}\n{said}");
            }
        }
    }
}

/// NumPy's own tests of the vector code that it chooses by the CPU, each operation on each of its sets of instructions against plain Python.
// covers: cpu/avx512-library
#[test]
fn numpys_tests_of_its_vector_code_pass() {
    const TESTS: &str = "/usr/lib/python3/dist-packages/numpy/core/tests/test_simd.py";
    const SETS: &str = "from numpy.core._simd import targets; print([k for k, v in targets.items() if v])";
    if !full() {
        println!("left out: NumPy's tests on the three models, in the full form");
        return;
    }
    if ![TESTS, "/usr/bin/pytest-3"]
        .into_iter()
        .all(|file| Path::new(file).is_file())
    {
        let why = "python3-numpy, python3-pytest and python3-hypothesis are not installed here";
        return skipped("numpys_tests_of_its_vector_code_pass", why);
    }
    let pytest = ["/usr/bin/python3", "-m", "pytest", "-q", "-p", "no:cacheprovider"];
    for part in PARTS {
        for options in ways() {
            let sets = says(part, options, &["/usr/bin/python3", "-c", SETS]);
            assert!(
                sets.contains("AVX512_SKX") && sets.contains("AVX512F"),
                "{part}: {sets}"
            );
            let said = says(
                part,
                options,
                &[&pytest[..], &["--pyargs", "numpy.core.tests.test_simd"]].concat(),
            );
            let last = said.lines().rfind(|line| line.contains(" passed")).unwrap_or_default();
            let passed: Option<u64> = last.split(' ').next().and_then(|number| number.parse().ok());
            assert!(passed.is_some_and(|passed| passed > 3000), "{part} {options:?}\n{said}");
            assert!(
                !last.contains("failed") && !last.contains("skipped"),
                "{part} {options:?}: {last}"
            );
        }
    }
}

/// Half precision as GCC's own functions have it, which know nothing of AVX512_FP16, on the host.
// covers: cpu/avx512-half-programs
#[test]
fn half_precision_is_what_gcc_computes_without_it() {
    let folder = Folder::new("half");
    let inject = folder.join("inject");
    fs::create_dir(&inject).unwrap();
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/half.c");
    let make = |program: &Path, options: &[&str]| {
        let made = Command::new("gcc")
            .args(["-static", "-Wall", "-Werror", "-ffp-contract=off"])
            .args(options)
            .arg("-o")
            .arg(program)
            .args([source, "-lm"])
            .status();
        assert!(made.expect("gcc (Debian: gcc)").success());
    };
    let (soft, hard) = (folder.join("soft"), inject.join("hard"));
    make(&soft, &["-O2", "-fexcess-precision=16"]);
    make(&hard, &["-O3", "-march=sapphirerapids"]);
    // The latter is made of the instructions that are meant.
    let output = Command::new("objdump").arg("-d").arg(&hard).output();
    let listing = String::from_utf8(output.expect("objdump (Debian: binutils)").stdout).unwrap();
    for mnemonic in [
        "vaddph",
        "vmulph",
        "vdivph",
        "vfmadd132ph",
        "vcvtw2ph",
        "vcvttph2w",
        "vcvtss2sh",
        "vcvtsi2sh",
    ] {
        assert!(listing.contains(mnemonic), "GCC made no {mnemonic}");
    }
    let output = Command::new(&soft).output().unwrap();
    let expected = String::from_utf8(output.stdout).unwrap();
    folder.script("inject/run", "#!/bin/sh\n/inject/hard || echo FAILED $?\n");
    let mut boot = linux_in_minivmm("console=ttyS0 quiet panic=-1");
    boot.args(["--cpu-model", "sapphirerapids", "--inject"]).arg(&inject);
    let guest = run(&mut boot, LIMIT).must_end_with(0);
    let console: Vec<&str> = guest.console.lines().map(str::trim_end).collect();
    for line in expected.lines() {
        assert!(console.contains(&line), "{line}\n{}", guest.console);
    }
}
