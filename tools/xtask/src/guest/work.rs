//! Ordinary programs for the guest, which the workloads of `cargo xtask bench --only work` run: a C compiler and an assembler with a
//! real C file, Python with its standard library, SQLite, xz, gzip and OpenSSL; and stress-ng, which checks what it computes. All are
//! Debian's own, fetched but not installed.

use super::tools::{self, LIBRARY_FOLDERS, LINKER};
use super::{debian, newc};
use crate::progress::Stage;
use crate::tree;
use anyhow::{Context, Result};
use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Packages whose names change with each release of Debian, by what stands before and behind the highest number.
const NUMBERED: [(&str, &str); 4] = [
    ("cpp-", ""),
    ("libgcc-", "-dev"),
    ("python3.", "-minimal"),
    ("libpython3.", "-stdlib"),
];
const PACKAGES: [&str; 9] = [
    "binutils-x86-64-linux-gnu",
    "libc6-dev",
    "libstb-dev",
    "linux-libc-dev",
    "sqlite3",
    "xz-utils",
    "gzip",
    "openssl",
    "stress-ng",
];

/// Programs by their names in the packages, and by those that they have in the guest.
const PROGRAMS: [(&str, &str); 6] = [
    ("x86_64-linux-gnu-as", "as"),
    ("sqlite3", "sqlite3"),
    ("xz", "xz"),
    ("gzip", "gzip"),
    ("openssl", "openssl"),
    ("stress-ng", "stress-ng"),
];

/// The C file that is compiled: one of some thousand lines which is a whole library.
const HEADER: &str = "stb_image.h";

/// The scripts, below the workspace's root.
const SCRIPTS: &str = "guest-tests/linux/work";

/// The archive of all of it. `folder` is where the guest's files are made.
pub fn archive(stage: &Stage, folder: &Path) -> Result<Vec<u8>> {
    let mut names = Vec::new();
    for (prefix, suffix) in NUMBERED {
        let file = debian::highest_package_file(stage, prefix, suffix)?;
        let name = file.file_name().and_then(OsStr::to_str).context("a package's name")?;
        names.push(name.split('_').next().unwrap_or(name).to_string());
    }
    let mut roots: Vec<&str> = names.iter().map(String::as_str).collect();
    roots.extend(PACKAGES);
    let packages = debian::with_libraries(stage, &roots)?;
    let root = folder.join("work");
    let names: Vec<_> = packages.iter().filter_map(|file| file.file_name()?.to_str()).collect();
    let stamp = format!("layout 2\n{}", names.join("\n"));
    if fs::read_to_string(root.join("packages")).is_ok_and(|there| there == stamp) {
        stage.say("the programs are there");
    } else {
        stage.say("unpacking the programs");
        debian::unpacked(stage, &packages, &root, |unpacked| {
            let part = folder.join(format!("work.new-{}", std::process::id()));
            take(stage, unpacked, &part)?;
            fs::write(part.join("packages"), &stamp).context("cannot write the list of packages")?;
            if root.exists() {
                fs::remove_dir_all(&root).with_context(|| format!("cannot remove {}", root.display()))?;
            }
            fs::rename(&part, &root).with_context(|| format!("cannot make {}", root.display()))
        })?;
    }
    stage.say("packing the programs");
    let mut archive = newc::Archive::default();
    for folder in ["usr", "usr/lib", LIBRARY_FOLDERS[0], "lib64", "usr/bin"] {
        archive.folder(folder);
    }
    add(&mut archive, &root.join("root"), "")?;
    archive.folder("scripts");
    for file in tools::files_of(&tree::root().join(SCRIPTS))? {
        let name = file.file_name().unwrap_or_default().to_string_lossy();
        let text = fs::read(&file).with_context(|| format!("cannot read {}", file.display()))?;
        archive.file(format!("scripts/{name}"), 0o755, &text);
    }
    Ok(archive.finish())
}

/// Adds what a folder holds under a name.
fn add(archive: &mut newc::Archive, folder: &Path, name: &str) -> Result<()> {
    for entry in tools::files_of(folder)? {
        let file = entry.file_name().unwrap_or_default().to_string_lossy();
        let name = if name.is_empty() {
            file.into_owned()
        } else {
            format!("{name}/{file}")
        };
        if entry.is_dir() {
            archive.folder(&name);
            add(archive, &entry, &name)?;
        } else {
            let bytes = fs::read(&entry).with_context(|| format!("cannot read {}", entry.display()))?;
            archive.file(name, 0o755, &bytes);
        }
    }
    Ok(())
}

/// The newest of the folders `prefix`N below a folder.
fn newest(folder: &Path, prefix: &str) -> Result<PathBuf> {
    let number = |path: &PathBuf| -> Option<(u32, u32)> {
        let rest = path.file_name()?.to_str()?.strip_prefix(prefix)?;
        let (major, minor) = rest.split_once('.').unwrap_or((rest, "0"));
        Some((major.parse().ok()?, minor.parse().ok()?))
    };
    tools::files_of(folder)?
        .into_iter()
        .filter_map(|path| Some((number(&path)?, path)))
        .max()
        .map(|(_, path)| path)
        .with_context(|| format!("no {prefix}N in {}", folder.display()))
}

/// Takes the programs, their libraries, Python's standard library and the C file, preprocessed, out of the unpacked packages.
fn take(stage: &Stage, unpacked: &Path, to: &Path) -> Result<()> {
    let root = to.join("root");
    let copy = |from: &Path, name: &str| -> Result<()> {
        let to = root.join(name);
        fs::create_dir_all(to.parent().unwrap_or(&to)).with_context(|| format!("cannot make {}", to.display()))?;
        // fs::copy follows links, of which a library has some.
        fs::copy(from, &to).with_context(|| format!("cannot copy {}", from.display()))?;
        Ok(())
    };
    let linker = tools::find(unpacked, &LIBRARY_FOLDERS, "ld-linux-x86-64.so.2")?;
    copy(&linker, LINKER)?;
    let mut libraries = BTreeSet::new();
    let mut programs = Vec::new();
    for (name, guest) in PROGRAMS {
        programs.push((tools::find(unpacked, &["usr/bin", "bin"], name)?, guest));
    }
    let compiler = newest(&unpacked.join("usr/lib/gcc/x86_64-linux-gnu"), "")?.join("cc1");
    programs.push((compiler.clone(), "cc1"));
    let library = newest(&unpacked.join("usr/lib"), "python3.")?;
    let version = library.file_name().unwrap_or_default().to_string_lossy().into_owned();
    programs.push((unpacked.join("usr/bin").join(&version), "python3"));
    for (program, name) in &programs {
        copy(program, &format!("usr/bin/{name}"))?;
        libraries.extend(tools::loaded(unpacked, &linker, program)?);
    }
    // Modules of Python in C load libraries of their own.
    for module in tools::files_of(&library.join("lib-dynload"))? {
        libraries.extend(tools::loaded(unpacked, &linker, &module)?);
    }
    for library in libraries {
        let name = library
            .file_name()
            .and_then(OsStr::to_str)
            .context("a library's name")?;
        copy(&library, &format!("{}/{name}", LIBRARY_FOLDERS[0]))?;
    }
    copy_tree(&library, &root.join("usr/lib").join(&version))?;
    let folders = LIBRARY_FOLDERS.map(|folder| unpacked.join(folder).display().to_string());
    let run = |program: &Path| {
        let mut command = Command::new(&linker);
        command
            .args(["--inhibit-cache", "--library-path", &folders.join(":")])
            .arg(program);
        command
    };
    // The compiler's own preprocessor makes one file of the header and those of the C library.
    let source = to.join("image.c");
    fs::write(
        &source,
        format!("#define STB_IMAGE_IMPLEMENTATION\n#include \"{HEADER}\"\n"),
    )
    .with_context(|| format!("cannot write {}", source.display()))?;
    fs::create_dir_all(root.join("work")).context("cannot make the folder of what is worked on")?;
    let mut preprocess = run(&compiler);
    preprocess.args(["-E", "-quiet", "-nostdinc", "-P"]);
    for folder in ["usr/include/stb", "usr/include", "usr/include/x86_64-linux-gnu"] {
        preprocess.arg("-I").arg(unpacked.join(folder));
    }
    for folder in tools::files_of(&unpacked.join("usr/lib/gcc/x86_64-linux-gnu"))? {
        preprocess.arg("-I").arg(folder.join("include"));
    }
    stage.must(preprocess.arg("-o").arg(root.join("work/image.i")).arg(&source))?;
    let mut key = run(&unpacked.join("usr/bin/openssl"));
    key.args(["genrsa", "-out"]).arg(root.join("work/key.pem")).arg("4096");
    stage.must(key.env("OPENSSL_CONF", "/dev/null"))
}

/// Copies a folder without tests and what is compiled.
fn copy_tree(from: &Path, to: &Path) -> Result<()> {
    fs::create_dir_all(to).with_context(|| format!("cannot make {}", to.display()))?;
    for entry in tools::files_of(from)? {
        let name = entry.file_name().unwrap_or_default();
        if entry.is_dir() {
            if name != "__pycache__" && name != "test" {
                copy_tree(&entry, &to.join(name))?;
            }
        } else if entry.is_file() {
            fs::copy(&entry, to.join(name)).with_context(|| format!("cannot copy {}", entry.display()))?;
        }
    }
    Ok(())
}
