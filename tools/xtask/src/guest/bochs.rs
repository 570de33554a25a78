//! Bochs of a newer Debian than the system's, whose CPU has half precision (AVX512_FP16): Debian 12's has not.
//!
//! It comes with the C library that it was made for. All its other libraries are the system's, which has them with its own Bochs.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::process::Command;

use anyhow::{Context, Result};

use super::{debian, kernels};
use crate::packages::find_program;
use crate::progress::Stage;
use crate::tree;

/// The suite that has it.
const SUITE: &str = "trixie";
const PACKAGES: [&str; 4] = ["bochs", "bochs-term", "bochsbios", "libc6"];
/// The part that only the newer one has.
const PART: &str = "sapphire_rapids";

/// What starts it. Libraries of the system may be unpacked beside it ([`crate::packages`]).
const LAUNCHER: &str = r#"#!/bin/sh
root=$(dirname "$(readlink -f "$0")")
own="$root/usr/lib/x86_64-linux-gnu"
host="$root/../../host/root"
export LTDL_LIBRARY_PATH="$own/bochs/plugins" BXSHARE="$root/usr/share/bochs"
exec "$own/ld-linux-x86-64.so.2" --library-path "$own:$host/usr/lib/x86_64-linux-gnu:$host/lib/x86_64-linux-gnu" \
    "$root/usr/bin/bochs-bin" "$@"
"#;

/// Whether the system's own Bochs is new enough.
fn system_has_it() -> bool {
    find_program("bochs-bin").is_some_and(|program| {
        let output = Command::new(program).args(["--help", "cpu"]).output();
        output.is_ok_and(|output| {
            let text = [output.stdout, output.stderr].concat();
            String::from_utf8_lossy(&text).contains(PART)
        })
    })
}

/// Puts it into target/guest/bochs, where `bochs-bin` starts it, or finds it there. Nothing is fetched where the system's own will do.
pub fn prepare(stage: &Stage) -> Result<()> {
    let root = tree::target().join("guest/bochs");
    if root.is_dir() || system_has_it() {
        return Ok(());
    }
    let apt = kernels::suites(stage)?;
    stage.say("fetching Bochs of a newer Debian");
    let packages = PACKAGES
        .iter()
        .map(|package| apt.package_file(stage, &format!("{package}/{SUITE}")))
        .collect::<Result<Vec<_>>>()?;
    debian::unpacked(stage, &packages, &root, |unpacked| {
        let part = root.with_extension(format!("new-{}", std::process::id()));
        fs::create_dir_all(&part).with_context(|| format!("cannot make {}", part.display()))?;
        fs::rename(unpacked.join("usr"), part.join("usr")).context("cannot move the unpacked packages")?;
        let launcher = part.join("bochs-bin");
        fs::write(&launcher, LAUNCHER).with_context(|| format!("cannot write {}", launcher.display()))?;
        fs::set_permissions(&launcher, fs::Permissions::from_mode(0o755))?;
        fs::rename(&part, &root).with_context(|| format!("cannot make {}", root.display()))
    })?;
    // The guests' programs come with the C library of the system's own suite, which is looked for among the same files.
    packages
        .iter()
        .try_for_each(|file| fs::remove_file(file).with_context(|| format!("cannot remove {}", file.display())))
}
