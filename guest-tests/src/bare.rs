//! The guest tests of `guest-tests/guests`, as images and as runs of them.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use minivmm::matrix::tap::Report;

use crate::{Outcome, in_minivmm_on_kvm, in_qemu, minivmm, root, run};

/// The folder of the images.
pub fn folder() -> &'static Path {
    Path::new(env!("GUEST_BARE"))
}

/// What `cargo xtask matrix` compares with.
pub fn expected() -> PathBuf {
    root().join("resources/matrix-expected.txt")
}

/// All guests on all models, as `cargo xtask matrix` runs them on the software engine.
pub fn matrix() -> Command {
    let mut command = Command::new(minivmm());
    command.current_dir(root());
    command.arg("matrix").arg("--guests").arg(folder());
    command.args([
        "--model",
        "all",
        "skylake-server,+rtm",
        "core2,-lm,-dtes64",
        "guest-tests/guests/prescott.toml",
        "--max-instructions",
        INSTRUCTIONS,
    ]);
    command
}

/// The image of a guest test.
pub fn image(name: &str) -> PathBuf {
    folder().join(format!("{name}.elf"))
}

/// The image of the guest tests of VMX, which want two CPUs.
pub fn vmx() -> PathBuf {
    Path::new(env!("GUEST_APART")).join("vmx.elf")
}

/// The guest tests of VMX on these models, as the matrix runs them.
pub fn vmx_matrix(models: &[&str]) -> Command {
    let mut command = Command::new(minivmm());
    command.arg("matrix").arg("--kernel").arg(vmx()).arg("--model");
    command.args(models);
    // Two CPUs: one sends the other INIT, and posts interrupts.
    command.args(["--cpus", "2", "--max-instructions", INSTRUCTIONS]);
    command
}

/// A guest that runs for longer hangs.
const INSTRUCTIONS: &str = "2000000000";
const LIMIT: Duration = Duration::from_secs(120);

/// Runs an image on this host's KVM, with these options besides.
///
/// # Errors
/// That it hung, died or left no report, with what it said.
pub fn on_kvm(name: &str, model: &str, options: &[&str]) -> Result<Report, String> {
    judge(
        in_minivmm_on_kvm(image(name))
            .args(["--cpu-model", model])
            .args(options),
    )
}

/// Runs an image in QEMU's software CPU.
///
/// # Errors
/// That it hung, died or left no report, with what it said.
pub fn on_qemu(name: &str) -> Result<Report, String> {
    let mut command = in_qemu(image(name));
    // Time by instructions, so that a loaded host does not change what the guest measures.
    command.args(["-icount", "shift=1,sleep=off"]);
    if name == "smp" {
        command.args(["-smp", "3"]);
    }
    judge(&mut command)
}

fn judge(command: &mut Command) -> Result<Report, String> {
    let outcome = run(command, LIMIT);
    let said = |why: String, outcome: &Outcome| format!("{why}\n{}\n{}", outcome.console, outcome.errors);
    let report = Report::read(&outcome.console).ok_or_else(|| said("no TAP".into(), &outcome))?;
    if let Some(why) = &report.broken {
        return Err(said(why.clone(), &outcome));
    }
    // The debug-exit value is 0 or 1, which makes 1 or 3 of it.
    let expected = if report.failed().is_empty() { 1 } else { 3 };
    if outcome.status != Some(expected) {
        return Err(said(format!("exit status {:?}", outcome.status), &outcome));
    }
    Ok(report)
}
