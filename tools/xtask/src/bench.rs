//! `cargo xtask bench`: what the figures are measured with is `guest-tests/benches/speed.rs`; this prepares and runs it.

use crate::progress::Stage;
use crate::{demo, guest, packages, tree};
use anyhow::{Context, Result};
use std::process::{Command, ExitCode, Stdio};

#[derive(clap::Args)]
pub struct Options {
    /// Runs of each subject; the subjects take turns
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// Measure only the boot or only the loops
    #[arg(long, value_parser = ["boot", "loops"])]
    only: Option<String>,
    /// Install nothing: list what is missing and stop
    #[arg(long)]
    no_install: bool,
}

/// `cargo xtask bench`.
pub fn run(options: &Options) -> Result<ExitCode> {
    let stage = Stage::start("packages");
    let needs = [packages::GCC, packages::BINUTILS, packages::QEMU, packages::LIBIPT];
    packages::ensure_installed(&stage, &needs, !options.no_install)?;
    stage.end("ok");
    let stage = Stage::start("guest");
    guest::prepare(&stage)?;
    stage.end("ok");
    let program = demo::build_release()?;
    let status = speed(options)
        .env("MINIVMM", program)
        .current_dir(tree::root())
        .stdin(Stdio::null())
        .status()
        .context("cannot run cargo")?;
    Ok(if status.success() {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

/// The command that measures.
fn speed(options: &Options) -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.args(["bench", "--quiet", "-p", "guest-tests", "--bench", "speed", "--"]);
    command.args(["--rounds", &options.rounds.to_string()]);
    if let Some(only) = &options.only {
        command.args(["--only", only]);
    }
    command
}

#[cfg(test)]
mod tests {
    use super::*;

    // covers: 2/setup-bench
    #[test]
    fn the_options_reach_what_measures() {
        let options = Options {
            rounds: 7,
            only: Some("loops".into()),
            no_install: true,
        };
        let command = speed(&options);
        let words: Vec<_> = command.get_args().map(|word| word.to_str().unwrap()).collect();
        assert!(
            words.ends_with(&["--bench", "speed", "--", "--rounds", "7", "--only", "loops"]),
            "{words:?}"
        );
    }
}
