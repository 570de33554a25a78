//! `cargo xtask demo`: from a clean clone to a booted guest's shell, and a trace made in it.

use crate::guest::{self, Guest};
use crate::packages;
use crate::progress::Stage;
use crate::tree;
use anyhow::{Context, Result, bail, ensure};
use std::io::{BufRead, BufReader, IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};

/// The command line of the guest's kernel.
const CMDLINE: &str = "console=ttyS0";

/// The script that traces a program, shown before the shell.
const TRACE_SCRIPT: &str = "trace";

#[derive(clap::Args)]
pub struct DemoOptions {
    /// Run a short script in the guest instead of a shell, as is done where there is no terminal
    #[arg(long)]
    non_interactive: bool,
    /// Install nothing: list what is missing and stop
    #[arg(long)]
    no_install: bool,
}

/// `cargo xtask demo`.
pub fn run(options: &DemoOptions) -> Result<ExitCode> {
    let stage = Stage::start("packages");
    packages::ensure_installed(&stage, &[packages::GCC], !options.no_install)?;
    stage.end("ok");
    let stage = Stage::start("guest");
    let guest = guest::prepare(&stage)?;
    let guest = guest::with_tools(&stage, &guest)?;
    stage.end("ok");
    let program = build_release()?;
    let terminal = std::io::stdin().is_terminal() && std::io::stdout().is_terminal();
    if terminal && !options.non_interactive {
        eprintln!("booting Linux; `poweroff` in its shell ends it, Ctrl-A x ends minivmm\n");
        let cmdline = format!("{CMDLINE} minivmm.show={TRACE_SCRIPT}");
        let status = boot(&program, &guest, &cmdline)
            .status()
            .context("cannot run minivmm")?;
        ensure!(status.success(), "minivmm ended with {status}");
        eprintln!("the guest is off");
    } else {
        script(&program, &guest)?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Builds minivmm as it ships and gives its file.
pub fn build_release() -> Result<PathBuf> {
    let stage = Stage::start("release build");
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    stage.must(
        command
            .current_dir(tree::root())
            .args(["build", "--release", "-p", "minivmm"]),
    )?;
    stage.end("ok");
    Ok(tree::target().join("release/minivmm"))
}

/// The command that boots the guest on a CPU with Intel PT.
pub fn boot(program: &Path, guest: &Guest, cmdline: &str) -> Command {
    let mut command = Command::new(program);
    command
        .arg("--kernel")
        .arg(&guest.kernel)
        .arg("--initrd")
        .arg(&guest.initrd)
        .args(["--cmdline", cmdline])
        .arg("--pt");
    command
}

/// Boots the guest with the demo's script, shows what it prints, and checks that the script held.
fn script(program: &Path, guest: &Guest) -> Result<()> {
    let name = guest::DEMO_SCRIPT;
    eprintln!("booting Linux to run the script `{name}` in it");
    let mut child = boot(program, guest, &format!("{CMDLINE} minivmm.script={name}"))
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .context("cannot run minivmm")?;
    let stdout = child.stdout.take().context("minivmm has no output")?;
    let mut ended = None;
    for line in BufReader::new(stdout).split(b'\n') {
        let line = line.context("cannot read the console")?;
        let text = String::from_utf8_lossy(&line);
        writeln!(std::io::stdout(), "{}", text.trim_end_matches('\r'))?;
        ended = ended.or_else(|| script_status(&text, name));
    }
    let status = child.wait().context("cannot wait for minivmm")?;
    ensure!(status.success(), "minivmm ended with {status}");
    match ended {
        Some(0) => {
            eprintln!("Linux booted, traced a program with its own perf, and powered off");
            Ok(())
        }
        Some(status) => bail!("the script ended with status {status}"),
        None => bail!("the guest went off before its script ended"),
    }
}

/// What the guest's /init says of a script that ended.
fn script_status(line: &str, name: &str) -> Option<u8> {
    let (_, status) = line
        .trim()
        .split_once(&format!("minivmm-guest: script {name} ended with status "))?;
    status.parse().ok()
}

#[cfg(test)]
#[path = "demo_test.rs"]
mod tests;
