//! Debian's Xen: a multiboot kernel that takes a kernel and its initial RAM disk as modules.

use super::debian;
use crate::progress::Stage;
use crate::tree;
use anyhow::{Context, Result, ensure};
use std::fs;
use std::path::Path;
use std::process::Command;

/// What the package is called on every Debian, before the rest of Xen's version.
const PACKAGE: &str = "xen-hypervisor-4.";
/// The kernel with everything that Debian builds.
const KERNEL: &str = "linux-image-6.1.0-";

/// Puts Xen into target/guest/xen and a Linux that can be its first domain (the cloud kernel cannot) into
/// target/guest/vmlinuz-dom0, or finds them there.
pub fn prepare(stage: &Stage) -> Result<()> {
    let folder = tree::target().join("guest");
    let (xen, linux) = (folder.join("xen"), folder.join("vmlinuz-dom0"));
    if !xen.is_file() {
        let package = debian::highest_package_file(stage, PACKAGE, "-amd64")?;
        debian::unpacked_only(stage, &package, "./boot/xen-*.gz", &folder.join("xen-new"), |root| {
            let packed = only_file(&root.join("boot"))?;
            let unpacked = Command::new("gzip")
                .arg("-dc")
                .arg(&packed)
                .output()
                .context("cannot run gzip")?;
            ensure!(unpacked.status.success(), "cannot unpack {}", packed.display());
            fs::write(&xen, unpacked.stdout).with_context(|| format!("cannot write {}", xen.display()))
        })?;
    }
    if !linux.is_file() {
        let package = debian::highest_package_file(stage, KERNEL, "-amd64")?;
        debian::unpacked_only(stage, &package, "./boot/vmlinuz-*", &folder.join("dom0-new"), |root| {
            debian::place(&only_file(&root.join("boot"))?, &linux)
        })?;
    }
    Ok(())
}

/// The file of a folder that has one.
fn only_file(folder: &Path) -> Result<std::path::PathBuf> {
    let first = fs::read_dir(folder)?
        .next()
        .with_context(|| format!("nothing in {}", folder.display()))?;
    Ok(first?.path())
}
