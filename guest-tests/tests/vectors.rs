//! Programs that GCC compiles for AVX-512 and that choose their code by family and model, on the models with these.

use std::fs;
use std::process::Command;
use std::time::Duration;

use guest_tests::{Folder, linux_in_minivmm, run};

const LIMIT: Duration = Duration::from_secs(300);

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
    for part in ["skylake-server", "icelake-server", "sapphirerapids"] {
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
