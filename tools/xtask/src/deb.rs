//! `cargo xtask deb`: the Debian package, by cargo-deb from what vmm/Cargo.toml says of it.

use crate::packages::find_program;
use crate::progress::Stage;
use crate::tree;
use anyhow::{Context, Result, ensure};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

/// The version that is installed where there is none.
const CARGO_DEB: &str = "3.8.0";
/// The shells, and what each looks for by itself.
const SHELLS: [(&str, &str); 3] = [("bash", "minivmm"), ("zsh", "_minivmm"), ("fish", "minivmm.fish")];

#[derive(clap::Args)]
pub struct DebOptions {
    /// The profile that the program is built with; what is given away is built with `release`
    #[arg(long, default_value = "release")]
    profile: String,
}

/// `cargo xtask deb`: makes the package and says where it is.
pub fn run(options: &DebOptions) -> Result<ExitCode> {
    let stage = Stage::start("deb");
    let file = package(&stage, &options.profile)?;
    stage.end("ok");
    println!("{}", file.display());
    Ok(ExitCode::SUCCESS)
}

fn cargo() -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.current_dir(tree::root()).env("CARGO_INCREMENTAL", "0");
    command
}

/// cargo-deb: the system's, or one below target/host, which is built for that where it is missing.
fn cargo_deb(stage: &Stage) -> Result<PathBuf> {
    let root = tree::target().join("host/cargo-deb");
    let own = root.join("bin/cargo-deb");
    if let Some(program) = find_program("cargo-deb").or_else(|| own.is_file().then(|| own.clone())) {
        return Ok(program);
    }
    stage.say("building cargo-deb");
    stage
        .must(
            cargo()
                .args(["install", "--locked", "--quiet", "--version", CARGO_DEB, "--root"])
                .arg(&root)
                .arg("cargo-deb"),
        )
        .context("cargo-deb cannot be had")?;
    Ok(own)
}

fn package(stage: &Stage, profile: &str) -> Result<PathBuf> {
    let program = tree::target().join(match profile {
        "dev" => "debug",
        other => other,
    });
    let program = program.join("minivmm");
    stage.say("building minivmm");
    stage.must(cargo().args(["build", "--locked", "-p", "minivmm", "--profile", profile]))?;
    let folder = tree::root().join("target/deb");
    let _ = fs::remove_dir_all(&folder);
    pages(stage, &program, &folder)?;
    let deb = cargo_deb(stage)?;
    stage.say("packing");
    let mut command = Command::new(deb);
    command.current_dir(tree::root());
    command
        .args(["-p", "minivmm", "--no-build", "--profile", profile, "--output"])
        .arg(&folder);
    stage.must(&mut command)?;
    let files = fs::read_dir(&folder)?.filter_map(|entry| Some(entry.ok()?.path()));
    let made = files
        .into_iter()
        .find(|file| file.extension().is_some_and(|end| end == "deb"));
    made.context("cargo-deb has left no package")
}

/// Writes what the program tells of itself: manual pages and completions.
fn pages(stage: &Stage, program: &Path, folder: &Path) -> Result<()> {
    stage.say("writing manual pages and completions");
    stage.must(Command::new(program).arg("man").arg(folder.join("man")))?;
    let completions = folder.join("completions");
    fs::create_dir_all(&completions).with_context(|| format!("cannot make {}", completions.display()))?;
    for (shell, name) in SHELLS {
        let output = Command::new(program).args(["completions", shell]).output();
        let output = output.with_context(|| format!("cannot run {}", program.display()))?;
        ensure!(output.status.success(), "completions for {shell}: {}", output.status);
        let file = completions.join(name);
        fs::write(&file, output.stdout).with_context(|| format!("cannot write {}", file.display()))?;
    }
    Ok(())
}
