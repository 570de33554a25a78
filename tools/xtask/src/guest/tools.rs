//! What people look into a machine with, for the guest: Debian's own perf, gdb, msr-tools, turbostat, cpupower and pqos, fetched but not installed, with
//! the libraries that they load and no more; and small programs to look at.

use super::{TOOL_MODULES, debian, newc};
use crate::progress::Stage;
use crate::tree;
use anyhow::{Context, Result, ensure};
use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Debian's packages. gdb-minimal is gdb without Python, whose modules would be more than all the rest.
const PACKAGES: [&str; 5] = [
    "linux-perf",
    "gdb-minimal",
    "msr-tools",
    "linux-cpupower",
    "intel-cmt-cat",
];

/// The programs that are taken from them, by the names that are looked for and the folder they get in the guest.
const PROGRAMS: [(&str, &str); 7] = [
    ("perf", "usr/bin"),
    ("gdb", "usr/bin"),
    ("rdmsr", "usr/sbin"),
    ("wrmsr", "usr/sbin"),
    ("turbostat", "usr/sbin"),
    ("cpupower", "usr/bin"),
    ("pqos", "usr/sbin"),
];

/// Where Debian has libraries, before and after the folders below / and /usr became one, and where some packages still have theirs.
pub(super) const LIBRARY_FOLDERS: [&str; 3] = ["usr/lib/x86_64-linux-gnu", "lib/x86_64-linux-gnu", "usr/lib"];

/// What the C library needs for the one conversion of characters that gdb asks for, and where it looks for it.
const CONVERSIONS: [&str; 2] = ["gconv/gconv-modules", "gconv/UTF-32.so"];

/// The dynamic linker, which programs name by this path.
pub(super) const LINKER: &str = "lib64/ld-linux-x86-64.so.2";

/// The sources of the programs to look at, below the workspace's root.
const SOURCES: &str = "guest-tests/linux/programs";

/// The scripts that use the tools, below the workspace's root.
const SCRIPTS: &str = "guest-tests/linux/tools";

/// The archive of all of it. `folder` is where the guest's files are made.
pub fn archive(stage: &Stage, folder: &Path) -> Result<Vec<u8>> {
    let packages = debian::with_libraries(stage, &PACKAGES)?;
    let root = folder.join("tools");
    // Which packages the folder is made of: newer ones make a new folder.
    let names: Vec<_> = packages.iter().filter_map(|file| file.file_name()?.to_str()).collect();
    let stamp = format!("layout 3\n{}", names.join("\n"));
    if fs::read_to_string(root.join("packages")).is_ok_and(|there| there == stamp) {
        stage.say("the tools are there");
    } else {
        stage.say("unpacking the tools");
        debian::unpacked(stage, &packages, &root, |unpacked| {
            let part = folder.join(format!("tools.new-{}", std::process::id()));
            take(unpacked, &part)?;
            fs::write(part.join("packages"), &stamp).context("cannot write the list of packages")?;
            if root.exists() {
                fs::remove_dir_all(&root).with_context(|| format!("cannot remove {}", root.display()))?;
            }
            fs::rename(&part, &root).with_context(|| format!("cannot make {}", root.display()))
        })?;
    }
    let programs = compile(stage, &tree::root().join(SOURCES), &folder.join("programs"))?;
    stage.say("packing the tools");
    let scripts = files_of(&tree::root().join(SCRIPTS))?;
    pack(&root, &folder.join("modules"), &programs, &scripts)
}

/// The files of a folder, in the order of names.
pub(super) fn files_of(folder: &Path) -> Result<Vec<PathBuf>> {
    let entries = fs::read_dir(folder).with_context(|| format!("cannot read {}", folder.display()))?;
    let mut files: Vec<PathBuf> = entries.filter_map(|entry| Some(entry.ok()?.path())).collect();
    files.sort();
    Ok(files)
}

/// Takes the programs, the dynamic linker and the libraries that they load out of the unpacked packages.
fn take(unpacked: &Path, to: &Path) -> Result<()> {
    let copy = |from: &Path, name: &str| -> Result<()> {
        let to = to.join(name);
        fs::create_dir_all(to.parent().unwrap_or(&to)).with_context(|| format!("cannot make {}", to.display()))?;
        // fs::copy follows links, of which a library has some.
        fs::copy(from, &to).with_context(|| format!("cannot copy {}", from.display()))?;
        Ok(())
    };
    let find = |folders: &[&str], name: &str| find(unpacked, folders, name);
    let linker = find(&LIBRARY_FOLDERS, "ld-linux-x86-64.so.2")?;
    copy(&linker, LINKER)?;
    for name in CONVERSIONS {
        copy(
            &find(&LIBRARY_FOLDERS, name)?,
            &format!("{}/{name}", LIBRARY_FOLDERS[0]),
        )?;
    }
    let mut libraries = BTreeSet::new();
    for (name, folder) in PROGRAMS {
        let program = find(&["usr/bin", "usr/sbin", "bin", "sbin"], name)?;
        copy(&program, &format!("{folder}/{name}"))?;
        libraries.extend(loaded(unpacked, &linker, &program)?);
    }
    for library in libraries {
        let name = library
            .file_name()
            .and_then(OsStr::to_str)
            .context("a library's name")?;
        copy(&library, &format!("{}/{name}", LIBRARY_FOLDERS[0]))?;
    }
    Ok(())
}

/// A file in the first of some folders of the unpacked packages that has it.
pub(super) fn find(unpacked: &Path, folders: &[&str], name: &str) -> Result<PathBuf> {
    let mut files = folders.iter().map(|folder| unpacked.join(folder).join(name));
    let file = files.find(|file| file.is_file());
    file.with_context(|| format!("the packages hold no {name}"))
}

/// The libraries that a program loads, as the packages' own dynamic linker finds them among the packages' own.
pub(super) fn loaded(unpacked: &Path, linker: &Path, program: &Path) -> Result<Vec<PathBuf>> {
    let folders = LIBRARY_FOLDERS.map(|folder| unpacked.join(folder).display().to_string());
    let output = Command::new(linker)
        .args(["--inhibit-cache", "--library-path", &folders.join(":"), "--list"])
        .arg(program)
        .output()
        .with_context(|| format!("cannot run {}", linker.display()))?;
    ensure!(
        output.status.success(),
        "{} cannot be loaded: {}",
        program.display(),
        String::from_utf8_lossy(&output.stderr)
    );
    let files = library_files(&String::from_utf8_lossy(&output.stdout));
    for file in &files {
        ensure!(
            file.starts_with(unpacked),
            "{} is of this system: the packages lack it",
            file.display()
        );
    }
    Ok(files)
}

/// The files in what the dynamic linker lists: `libm.so.6 => /lib/libm.so.6 (0x7f…)`. The linker itself and the kernel's own
/// have no arrow.
fn library_files(text: &str) -> Vec<PathBuf> {
    let file = |line: &str| {
        let (_, rest) = line.split_once(" => ")?;
        Some(PathBuf::from(rest.rsplit_once(" (")?.0.trim()))
    };
    text.lines()
        .filter_map(file)
        .filter(|file| file.file_name() != Path::new(LINKER).file_name())
        .collect()
}

/// Compiles the programs to look at: without a C library, so that every instruction that they execute is in their source.
fn compile(stage: &Stage, sources: &Path, to: &Path) -> Result<Vec<PathBuf>> {
    stage.say("compiling the programs");
    fs::create_dir_all(to).with_context(|| format!("cannot make {}", to.display()))?;
    let mut programs = Vec::new();
    for source in files_of(sources)? {
        if !source.extension().is_some_and(|kind| kind == "c" || kind == "S") {
            continue;
        }
        let program = to.join(source.file_stem().context("a source without a name")?);
        let part = program.with_extension(format!("new-{}", std::process::id()));
        stage.must(
            Command::new("gcc")
                .args([
                    "-O1",
                    "-g",
                    "-Wall",
                    "-Wextra",
                    "-Werror",
                    "-ffreestanding",
                    "-fno-pic",
                    "-no-pie",
                ])
                .args([
                    "-fno-stack-protector",
                    "-fcf-protection=none",
                    "-fno-optimize-sibling-calls",
                ])
                // Debug information with paths of this machine would differ from clone to clone.
                .arg(format!("-ffile-prefix-map={}=.", tree::root().display()))
                .args([
                    "-static",
                    "-nostdlib",
                    "-Wl,--build-id=sha1,-z,noexecstack,-z,noseparate-code",
                    "-o",
                ])
                .arg(&part)
                .arg(&source),
        )?;
        fs::rename(&part, &program).with_context(|| format!("cannot write {}", program.display()))?;
        programs.push(program);
    }
    Ok(programs)
}

/// Packs the folder of tools, the modules, the programs and the scripts.
fn pack(root: &Path, modules: &Path, programs: &[PathBuf], scripts: &[PathBuf]) -> Result<Vec<u8>> {
    let read = |file: &Path| fs::read(file).with_context(|| format!("cannot read {}", file.display()));
    let mut archive = newc::Archive::default();
    let conversions = format!("{}/gconv", LIBRARY_FOLDERS[0]);
    for folder in [
        "lib64",
        "usr",
        "usr/lib",
        LIBRARY_FOLDERS[0],
        &conversions,
        "usr/bin",
        "usr/sbin",
    ] {
        archive.folder(folder);
        for file in files_of(&root.join(folder))?.iter().filter(|file| file.is_file()) {
            let name = file.file_name().unwrap_or_default().to_string_lossy();
            archive.file(format!("{folder}/{name}"), 0o755, &read(file)?);
        }
    }
    for (name, _) in TOOL_MODULES {
        archive.file(format!("modules/{name}"), 0o644, &read(&modules.join(name))?);
    }
    for (folder, files) in [("usr/bin", programs), ("scripts", scripts)] {
        for file in files {
            let name = file.file_name().unwrap_or_default().to_string_lossy();
            archive.file(format!("{folder}/{name}"), 0o755, &read(file)?);
        }
    }
    Ok(archive.finish())
}

#[cfg(test)]
#[path = "tools_test.rs"]
mod tests;
