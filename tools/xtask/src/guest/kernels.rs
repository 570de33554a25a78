//! Debian's other kernels, older and newer than the guest's, for tests of what is seen of a Linux: from the suites that the mirror has
//! besides the system's own.
//!
//! apt gets them as it gets all else, with a configuration and lists of its own beside the fetched packages, from the mirror that the
//! system's apt uses for its own suite, and believes what Debian's keys have signed. Nothing of the system changes.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};

use super::debian::{self, Apt};
use crate::progress::Stage;

/// Debian's suites by their age.
const SUITES: [&str; 7] = [
    "bullseye",
    "bookworm",
    "bookworm-backports",
    "trixie",
    "trixie-backports",
    "forky",
    "sid",
];
/// Suites with kernels for 32-bit CPUs.
const WITH_I386: [&str; 3] = ["bullseye", "bookworm", "bookworm-backports"];
/// Debian's keys, of its package debian-archive-keyring.
const KEYRING: &str = "/usr/share/keyrings/debian-archive-keyring.gpg";
/// Modules that every configuration has, and that need no other.
const MODULES: [&str; 2] = ["msr", "cpuid"];

/// Which kernels are wanted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Which {
    /// The oldest and the newest cloud kernel, and the oldest for 32-bit CPUs.
    Ends,
    /// The newest of each series in the flavours `cloud-amd64` and `686-pae`, and the newest of the others for 64-bit CPUs.
    All,
}

/// A kernel by its package's name: `linux-image-6.12.95+deb12-cloud-amd64`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Kernel {
    /// 6, 12, 95, 12: by these, kernels are older and newer.
    numbers: Vec<u32>,
    flavour: String,
    release: String,
}

impl Kernel {
    fn parse(package: &str) -> Option<Kernel> {
        const FLAVOURS: [&str; 4] = ["-cloud-amd64", "-rt-amd64", "-686-pae", "-amd64"];
        let release = package.strip_prefix("linux-image-")?;
        let flavour = FLAVOURS.iter().find(|flavour| release.ends_with(**flavour))?;
        let version = release.strip_suffix(flavour)?;
        // `-rt-686-pae` is another one.
        if version.ends_with("-rt") {
            return None;
        }
        let words = version
            .split(|c: char| !c.is_ascii_digit())
            .filter(|word| !word.is_empty());
        let numbers: Option<Vec<u32>> = words.map(|word| word.parse().ok()).collect();
        // `linux-image-6.12-amd64` depends on the newest of its series, and is none itself.
        let numbers = numbers.filter(|numbers| numbers.len() > 2)?;
        Some(Kernel {
            numbers,
            flavour: flavour[1..].into(),
            release: release.into(),
        })
    }

    fn series(&self) -> (&[u32], &str) {
        (&self.numbers[..2], &self.flavour)
    }

    fn architecture(&self) -> &'static str {
        if self.flavour.contains("686") { ":i386" } else { "" }
    }
}

/// Those that are wanted, among the words of apt-cache's answer.
fn choose(text: &str, which: Which) -> Vec<Kernel> {
    let mut all: Vec<Kernel> = text.split_whitespace().filter_map(Kernel::parse).collect();
    all.sort();
    all.dedup();
    match which {
        Which::Ends => {
            // Of the oldest series the newest, here and there.
            let pae: Vec<&Kernel> = all.iter().filter(|kernel| kernel.flavour == "686-pae").collect();
            let pae = pae.iter().rev().find(|kernel| kernel.series() == pae[0].series());
            let pae = pae.map(|kernel| (*kernel).clone());
            let mut cloud = all.into_iter().filter(|kernel| kernel.flavour == "cloud-amd64");
            let Some(first) = cloud.next() else { return Vec::new() };
            let rest: Vec<Kernel> = cloud.collect();
            let oldest = rest.iter().rev().find(|kernel| kernel.series() == first.series());
            let oldest = oldest.cloned().unwrap_or(first);
            let newest = rest.last().filter(|newest| **newest != oldest).cloned();
            [Some(oldest), newest, pae].into_iter().flatten().collect()
        }
        Which::All => {
            let newest = |kernel: &&Kernel| {
                let each = ["cloud-amd64", "686-pae"].contains(&kernel.flavour.as_str());
                let same =
                    |other: &Kernel| other.flavour == kernel.flavour && (!each || other.series() == kernel.series());
                !all.iter().any(|other| same(other) && other.numbers > kernel.numbers)
            };
            all.iter().filter(newest).cloned().collect()
        }
    }
}

/// The names of `images` without those whose file is in a package of its own while the mirror has lost that of their modules.
fn whole(images: &str, binaries: &str, modules: &str) -> String {
    let has = |list: &str, name: String| list.lines().any(|line| line.split(' ').next() == Some(name.as_str()));
    let whole = |image: &&str| {
        image.strip_prefix("linux-image-").is_some_and(|release| {
            !has(binaries, format!("linux-binary-{release}")) || has(modules, format!("linux-modules-{release}"))
        })
    };
    images.split_whitespace().filter(whole).collect::<Vec<_>>().join("\n")
}

/// Puts kernels into a folder: `vmlinuz-RELEASE`, and in `modules-RELEASE` some of their modules; and gives the kernels' files. What is
/// there stays, so that nothing is asked of apt a second time.
pub fn prepare(stage: &Stage, folder: &Path, which: Which) -> Result<Vec<PathBuf>> {
    fs::create_dir_all(folder).with_context(|| format!("cannot make {}", folder.display()))?;
    let complete = folder.join(match which {
        Which::Ends => "ends",
        Which::All => "all",
    });
    if !complete.is_file() {
        let apt = suites(stage)?;
        let known = apt.cache(&["pkgnames", "linux-image-"]);
        let binaries = apt.cache(&["pkgnames", "linux-binary-"]);
        // Not pkgnames, which gives the names of packages that others depend on, too.
        let modules = apt.cache(&["search", "--names-only", "^linux-modules-"]);
        let kernels = choose(&whole(&known, &binaries, &modules), which);
        ensure!(
            kernels.len() >= 2,
            "the mirror has no older and newer kernels: {SUITES:?}"
        );
        for kernel in kernels {
            let there = folder.join(format!("vmlinuz-{}", kernel.release)).is_file();
            if !there {
                let split = binaries
                    .lines()
                    .any(|name| name == format!("linux-binary-{}", kernel.release));
                one(stage, &apt, folder, &kernel, split)?;
            }
        }
        if which == Which::All {
            busybox(stage, &apt, folder)?;
        }
        fs::write(&complete, "").with_context(|| format!("cannot write {}", complete.display()))?;
    }
    let files = fs::read_dir(folder).with_context(|| format!("cannot read {}", folder.display()))?;
    let files = files.filter_map(|entry| Some(entry.ok()?.path()));
    let name = |file: &PathBuf| {
        file.file_name()
            .is_some_and(|name| name.as_encoded_bytes().starts_with(b"vmlinuz-"))
    };
    let mut files: Vec<PathBuf> = files.filter(name).collect();
    files.sort();
    Ok(files)
}

/// apt with all suites, its lists fetched.
pub(super) fn suites(stage: &Stage) -> Result<Apt> {
    let own = debian::apt_output(
        "apt-get",
        &[
            "indextargets",
            "--format",
            "$(REPO_URI) $(SUITE) $(ORIGIN)",
            "Created-By: Packages",
        ],
    );
    // The archive itself, neither security nor anybody else's.
    let own = own.lines().find_map(|line| {
        let words: Vec<&str> = line.split_whitespace().collect();
        match words[..] {
            [uri, suite, "Debian"] if !suite.contains('-') => Some(uri.to_string()),
            _ => None,
        }
    });
    let uri = own.context("apt has no lists of a Debian suite: run apt-get update")?;
    let lines: Vec<String> = SUITES
        .iter()
        .map(|suite| {
            let architectures = if WITH_I386.contains(suite) {
                "amd64,i386"
            } else {
                "amd64"
            };
            format!("deb [signed-by={KEYRING} arch={architectures}] {uri} {suite} main\n")
        })
        .collect();
    let apt = Apt::beside_the_system(&lines.concat())?;
    stage.say("fetching the lists of Debian's other suites");
    // A suite that the mirror does not have is left out.
    apt.update(stage)?;
    Ok(apt)
}

/// Fetches a kernel. Since 7.0 the file and the modules are in packages of their own.
fn one(stage: &Stage, apt: &Apt, folder: &Path, kernel: &Kernel, split: bool) -> Result<()> {
    let Kernel { release, .. } = kernel;
    let packages = match split {
        true => vec![format!("linux-binary-{release}"), format!("linux-modules-{release}")],
        false => vec![format!("linux-image-{release}{}", kernel.architecture())],
    };
    stage.say(&format!("fetching Linux {release}"));
    let modules = folder.join(format!("modules-{release}"));
    fs::create_dir_all(&modules).with_context(|| format!("cannot make {}", modules.display()))?;
    let mut image = None;
    for package in packages {
        let file = apt.package_file(stage, &package)?;
        let wanted = |path: &str| {
            let name = path.rsplit('/').next().unwrap_or_default();
            let module = name.split(".ko").next().filter(|module| *module != name);
            name.starts_with("vmlinuz") || module.is_some_and(|module| MODULES.contains(&module))
        };
        let found = debian::unpacked_some(stage, &file, wanted, &folder.join("new"), |root| {
            let mut kernel = None;
            for file in files_below(root)? {
                let name = file.file_name().and_then(|name| name.to_str()).unwrap_or_default();
                if name.starts_with("vmlinuz") {
                    let new = folder.join(format!("new-{release}"));
                    debian::place(&file, &new)?;
                    kernel = Some(new);
                } else {
                    debian::place(&file, &modules.join(name))?;
                }
            }
            Ok(kernel)
        })?;
        image = image.or(found);
        // They are large, and not asked for again.
        fs::remove_file(&file).with_context(|| format!("cannot remove {}", file.display()))?;
    }
    let image = image.with_context(|| format!("the packages of {release} have no kernel"))?;
    let to = folder.join(format!("vmlinuz-{release}"));
    fs::rename(image, &to).with_context(|| format!("cannot write {}", to.display()))
}

/// busybox for 32-bit kernels, as an archive that comes behind the guest's own.
fn busybox(stage: &Stage, apt: &Apt, folder: &Path) -> Result<()> {
    let file = apt.package_file(stage, "busybox-static:i386")?;
    let program = debian::unpacked_some(
        stage,
        &file,
        |path| path.ends_with("/bin/busybox"),
        &folder.join("new"),
        |root| {
            let found = files_below(root)?
                .into_iter()
                .next()
                .context("no busybox in its package")?;
            fs::read(&found).with_context(|| format!("cannot read {}", found.display()))
        },
    )?;
    let mut archive = super::newc::Archive::default();
    archive.folder("bin");
    archive.file("bin/busybox", 0o755, &program);
    let to = folder.join("busybox-i386.cpio");
    super::write_changed(&to, &archive.finish())
}

fn files_below(folder: &Path) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    let mut left = vec![folder.to_path_buf()];
    while let Some(folder) = left.pop() {
        for entry in fs::read_dir(&folder).with_context(|| format!("cannot read {}", folder.display()))? {
            let entry = entry?;
            if entry.file_type()?.is_dir() {
                left.push(entry.path());
            } else {
                found.push(entry.path());
            }
        }
    }
    Ok(found)
}

#[cfg(test)]
#[path = "kernels_test.rs"]
mod tests;
