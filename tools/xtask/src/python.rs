//! Programs and libraries from PyPI that tests judge our files by, each in an environment of its own below `target/host`.

use crate::progress::Stage;
use crate::tree;
use anyhow::{Context, Result};
use std::fs;
use std::process::Command;

/// Perfetto's published schema: `perfetto.protos`.
pub const PERFETTO: Environment = Environment {
    name: "perfetto",
    packages: &["perfetto==0.59.1"],
    has: "bin/python",
};

/// drgn, which reads a guest's memory. `--qemu` came with 0.2.0.
pub const DRGN: Environment = Environment {
    name: "drgn",
    packages: &["drgn==0.3.0"],
    has: "bin/drgn",
};

/// A Python environment.
#[derive(Clone, Copy, Debug)]
pub struct Environment {
    /// Its folder's name.
    pub name: &'static str,
    /// What is in it, by exact versions.
    pub packages: &'static [&'static str],
    /// A file in it that is there once it is whole.
    pub has: &'static str,
}

/// Makes an environment, or finds it.
pub fn ensure(stage: &Stage, environment: &Environment) -> Result<()> {
    let folder = tree::target().join("host").join(environment.name);
    // What is not whole has no such file.
    let whole = folder.join("whole");
    if whole.is_file() && folder.join(environment.has).is_file() {
        return Ok(());
    }
    stage.say(&format!("fetching {} from PyPI", environment.packages.join(" ")));
    stage
        .must(Command::new("python3").args(["-m", "venv", "--clear"]).arg(&folder))
        .context("a Python environment cannot be made: apt-get install python3-venv")?;
    stage.must(
        Command::new(folder.join("bin/pip"))
            .args(["install", "--quiet", "--disable-pip-version-check"])
            .args(environment.packages),
    )?;
    fs::write(&whole, "").with_context(|| format!("cannot write {}", whole.display()))
}
