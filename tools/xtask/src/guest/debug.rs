//! What a kernel developer has beside the guest's kernel: Debian's vmlinux with everything that debuggers want, and the scripts
//! for gdb from the kernel's source.

use super::debian;
use crate::progress::Stage;
use crate::tree;
use anyhow::{Context, Result, ensure};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// What is made of the C preprocessor's answer begins behind this line.
const HEADERS_END: &str = "<!-- end-c-headers -->";

/// The release that a bzImage says it is: `6.1.0-56-cloud-amd64`. Linux, Documentation/x86/boot.rst, kernel_version.
fn release(kernel: &[u8]) -> Option<String> {
    let at = kernel.get(0x20e..0x210)?;
    let at = usize::from(u16::from_le_bytes([at[0], at[1]])) + 0x200;
    let text = kernel.get(at..)?.split(|byte| *byte == b' ').next()?;
    let text = String::from_utf8(text.to_vec()).ok()?;
    text.starts_with("6.1.").then_some(text)
}

/// The C preprocessor's command for the scripts' constants, which are macros of the kernel's own headers.
fn preprocess(common: &Path, own: &Path, source: &Path) -> Command {
    let mut command = Command::new("gcc");
    command.args(["-E", "-P", "-nostdinc", "-D__KERNEL__", "-x", "c"]);
    for kind in ["include", "include/uapi"] {
        let generated = kind.replacen("include", "include/generated", 1);
        command.arg("-I").arg(common.join("arch/x86").join(kind));
        command.arg("-I").arg(own.join("arch/x86").join(generated));
        command.arg("-I").arg(common.join(kind));
        command.arg("-I").arg(own.join(kind));
    }
    command.arg("-I").arg(own.join("include/generated/uapi"));
    for first in ["compiler-version.h", "kconfig.h"] {
        command.arg("-include").arg(common.join("include/linux").join(first));
    }
    command.arg(source.join("scripts/gdb/linux/constants.py.in"));
    command
}

/// Where all that is of a kernel of this release.
fn folder(release: &str) -> PathBuf {
    tree::target().join("guest/debug").join(release)
}

/// The scripts' constants, which are made last.
fn constants(folder: &Path) -> PathBuf {
    folder.join("scripts/gdb/linux/constants.py")
}

/// Whether this kernel's debug symbols are at hand or can be had: Debian drops those of a kernel sooner than the kernel.
pub fn can_be_had(stage: &Stage, kernel: &Path) -> Result<bool> {
    let release = release_of(kernel)?;
    Ok(constants(&folder(&release)).is_file() || debian::can_be_had(stage, &format!("linux-image-{release}-dbg"))?)
}

fn release_of(kernel: &Path) -> Result<String> {
    let bytes = fs::read(kernel).with_context(|| format!("cannot read {}", kernel.display()))?;
    release(&bytes).with_context(|| format!("{} is no kernel of 6.1", kernel.display()))
}

/// Puts vmlinux, `vmlinux-gdb.py` and its modules into a folder named after the kernel's release below target/guest/debug, or
/// finds them there, and gives the folder. 440 MB are fetched and 600 MB kept.
pub fn prepare(stage: &Stage, kernel: &Path) -> Result<PathBuf> {
    let release = release_of(kernel)?;
    let folder = folder(&release);
    let constants = constants(&folder);
    if constants.is_file() {
        return Ok(folder);
    }
    fs::create_dir_all(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
    let near = folder.join("new");
    let abi = release.strip_suffix("-cloud-amd64").context("not a cloud kernel")?;
    let package = |name: String| debian::package_file(stage, &format!("{name}_"), &name, || Some(name.clone()));
    stage.say("fetching the kernel's debug symbols and the scripts of its source");
    let symbols = package(format!("linux-image-{release}-dbg"))?;
    debian::unpacked_only(stage, &symbols, "*/boot/vmlinux-*", &near, |root| {
        debian::place(
            &root.join(format!("usr/lib/debug/boot/vmlinux-{release}")),
            &folder.join("vmlinux"),
        )
    })?;
    let source = package("linux-source-6.1".into())?;
    let headers = [
        package(format!("linux-headers-{release}"))?,
        package(format!("linux-headers-{abi}-common"))?,
    ];
    debian::unpacked_only(stage, &source, "*.tar.xz", &near, |root| {
        let archive = root.join("usr/src/linux-source-6.1.tar.xz");
        let mut tar = Command::new("tar");
        tar.arg("-xf")
            .arg(archive)
            .arg("-C")
            .arg(root)
            .args(["--wildcards", "*/scripts/gdb/*"]);
        stage.must(&mut tar)?;
        let source = root.join("linux-source-6.1");
        let scripts = source.join("scripts/gdb");
        let modules = folder.join("scripts/gdb/linux");
        fs::create_dir_all(&modules).with_context(|| format!("cannot make {}", modules.display()))?;
        debian::place(&scripts.join("vmlinux-gdb.py"), &folder.join("vmlinux-gdb.py"))?;
        for entry in fs::read_dir(scripts.join("linux"))? {
            let file = entry?.path();
            let name = file.file_name().context("a file has a name")?;
            if file.extension().is_some_and(|extension| extension == "py") {
                debian::place(&file, &modules.join(name))?;
            }
        }
        debian::unpacked(stage, &headers, &near.with_extension("headers"), |headers| {
            let place = |name: String| headers.join("usr/src").join(name);
            let (common, own) = (
                place(format!("linux-headers-{abi}-common")),
                place(format!("linux-headers-{release}")),
            );
            let output = preprocess(&common, &own, &source).output().context("cannot run gcc")?;
            ensure!(
                output.status.success(),
                "the constants of the kernel's scripts: {}",
                String::from_utf8_lossy(&output.stderr).trim()
            );
            let text = String::from_utf8_lossy(&output.stdout);
            let (_, text) = text.split_once(HEADERS_END).context("no end of the headers")?;
            let text = text.split_once('\n').map_or("", |(_, text)| text);
            fs::write(&constants, text).with_context(|| format!("cannot write {}", constants.display()))
        })
    })?;
    Ok(folder)
}

#[cfg(test)]
#[path = "debug_test.rs"]
mod tests;
