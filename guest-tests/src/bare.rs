//! The guest tests of `guest-tests/guests`, as images and as runs of them.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use crate::tap::Report;
use crate::{Outcome, in_minivmm, in_qemu, run};

/// The images by name.
pub fn names() -> impl Iterator<Item = &'static str> {
    env!("GUEST_BARE_NAMES").split(' ')
}

/// The image of a guest test.
pub fn image(name: &str) -> PathBuf {
    Path::new(env!("GUEST_BARE")).join(format!("{name}.elf"))
}

/// A guest that runs for longer hangs.
const INSTRUCTIONS: &str = "2000000000";
const LIMIT: Duration = Duration::from_secs(120);

/// Runs an image on the software engine.
///
/// # Errors
/// That it hung, died or left no report, with what it said.
pub fn on_soft(name: &str, model: &str) -> Result<Report, String> {
    let mut command = in_minivmm(image(name));
    command.args([
        "--engine",
        "soft",
        "--cpu-model",
        model,
        "--max-instructions",
        INSTRUCTIONS,
    ]);
    judge(&mut command)
}

/// Runs an image in QEMU's software CPU.
///
/// # Errors
/// As [`on_soft`].
pub fn on_qemu(name: &str) -> Result<Report, String> {
    judge(&mut in_qemu(image(name)))
}

fn judge(command: &mut Command) -> Result<Report, String> {
    let outcome = run(command, LIMIT);
    let said = |why: String, outcome: &Outcome| format!("{why}\n{}\n{}", outcome.console, outcome.errors);
    let report = Report::read(&outcome.console).map_err(|why| said(why, &outcome))?;
    // The debug-exit value is 0 or 1, which makes 1 or 3 of it.
    let expected = if report.failed().is_empty() { 1 } else { 3 };
    if outcome.status != Some(expected) {
        return Err(said(format!("exit status {:?}", outcome.status), &outcome));
    }
    Ok(report)
}
