//! rr for the guest, Debian's own, and a program that it records: a folder that `--inject` takes.

use super::{
    debian,
    tools::{self, LIBRARY_FOLDERS},
};
use crate::progress::Stage;
use crate::tree;
use anyhow::{Context, Result};
use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

const PACKAGE: &str = "rr";
/// Where rr has what it loads into the programs that it records, and what it tells gdb.
const FOLDERS: [&str; 2] = ["usr/lib/rr", "usr/share/rr"];
/// The program's source, below the workspace's root.
const SOURCE: &str = "guest-tests/linux/rr/recorded.c";
/// In the folder when all of it is.
const STAMP: &str = "packages";

/// Makes target/guest/rr, or finds it made of the same packages.
pub fn prepare(stage: &Stage) -> Result<PathBuf> {
    let root = tree::target().join("guest/rr");
    let packages = debian::with_libraries(stage, &[PACKAGE])?;
    let names: Vec<_> = packages.iter().filter_map(|file| file.file_name()?.to_str()).collect();
    let stamp = format!("layout 1\n{}", names.join("\n"));
    if !fs::read_to_string(root.join(STAMP)).is_ok_and(|there| there == stamp) {
        stage.say("unpacking rr");
        debian::unpacked(stage, &packages, &root, |unpacked| {
            let part = root.with_extension(format!("new-{}", std::process::id()));
            take(unpacked, &part)?;
            fs::write(part.join(STAMP), &stamp).context("cannot write the list of packages")?;
            if root.exists() {
                fs::remove_dir_all(&root).with_context(|| format!("cannot remove {}", root.display()))?;
            }
            fs::rename(&part, &root).with_context(|| format!("cannot make {}", root.display()))
        })?;
    }
    // Static, so that the guest's C library may be another than this system's.
    let program = root.join("recorded");
    let part = program.with_extension(format!("new-{}", std::process::id()));
    let mut gcc = Command::new("gcc");
    gcc.args(["-O1", "-g", "-Wall", "-Wextra", "-Werror", "-static", "-pthread"]);
    gcc.arg(format!("-ffile-prefix-map={}=.", tree::root().display()));
    stage.must(gcc.arg("-o").arg(&part).arg(tree::root().join(SOURCE)))?;
    fs::rename(&part, &program).with_context(|| format!("cannot write {}", program.display()))?;
    Ok(root)
}

/// Copies rr, its folders and the libraries that it loads out of the unpacked packages.
fn take(unpacked: &Path, to: &Path) -> Result<()> {
    let copy = |from: &Path, folder: &str| -> Result<()> {
        let name = from.file_name().context("a file has a name")?;
        let folder = to.join(folder);
        fs::create_dir_all(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
        fs::copy(from, folder.join(name)).with_context(|| format!("cannot copy {}", from.display()))?;
        Ok(())
    };
    let program = unpacked.join("usr/bin/rr");
    copy(&program, "usr/bin")?;
    for folder in FOLDERS {
        for file in tools::files_of(&unpacked.join(folder))?
            .iter()
            .filter(|file| file.is_file())
        {
            copy(file, folder)?;
        }
    }
    let linker = tools::find(unpacked, &LIBRARY_FOLDERS, "ld-linux-x86-64.so.2")?;
    for library in tools::loaded(unpacked, &linker, &program)? {
        // The C library is the initramfs's own, which its dynamic linker goes with.
        let name = library.file_name().and_then(OsStr::to_str).unwrap_or_default();
        if !["libc.so.6", "libm.so.6"].contains(&name) {
            copy(&library, "lib")?;
        }
    }
    Ok(())
}
