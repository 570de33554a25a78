//! What the commands need from the system, by Debian package names.

use crate::progress::Stage;
use anyhow::{Context, Result, bail, ensure};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Something that must be installed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Need {
    /// The Debian package that has it.
    pub package: &'static str,
    /// A program by which it is recognised, or any file with its whole path.
    pub program: &'static str,
    /// What it is wanted for, to be shown where it cannot be installed.
    pub why: &'static str,
}

/// The C compiler driver, which rustc links with and the guests are assembled with.
pub const GCC: Need = Need {
    package: "gcc",
    program: "gcc",
    why: "links Rust programs and builds the test guests",
};
/// The C++ compiler, for libFuzzer's sources.
pub const GXX: Need = Need {
    package: "g++",
    program: "g++",
    why: "builds libFuzzer",
};
/// objcopy and as.
pub const BINUTILS: Need = Need {
    package: "binutils",
    program: "objcopy",
    why: "builds the test guests",
};
/// The other emulator that results are compared with.
pub const QEMU: Need = Need {
    package: "qemu-system-x86",
    program: "qemu-system-x86_64",
    why: "boots the same guests for comparison",
};

/// The same emulator for programs, which shows minivmm another host CPU.
pub const QEMU_USER: Need = Need {
    package: "qemu-user",
    program: "qemu-x86_64",
    why: "runs minivmm on the CPUs of other vendors",
};

/// Python with its environments, for what tests take from PyPI.
pub const PYTHON: Need = Need {
    package: "python3-venv",
    program: "python3",
    why: "reads exported traces by other programs' schemas",
};

/// What a host with kvm-intel is emulated with: Bochs in parts, and what makes a CD that it boots from.
pub const BOCHS_NEEDS: [Need; 7] = [
    Need {
        package: "bochs",
        program: "bochs-bin",
        why: "is the machine of the lab with kvm-intel",
    },
    Need {
        package: "bochs-term",
        program: "/usr/lib/x86_64-linux-gnu/bochs/plugins/libbx_term_gui.so",
        why: "lets Bochs run without a window",
    },
    Need {
        package: "bochsbios",
        program: "/usr/share/bochs/BIOS-bochs-latest",
        why: "is the BIOS of Bochs",
    },
    Need {
        package: "vgabios",
        program: "/usr/share/vgabios/vgabios.bin",
        why: "is the video BIOS of Bochs",
    },
    Need {
        package: "isolinux",
        program: "/usr/lib/ISOLINUX/isolinux.bin",
        why: "boots the lab's kernel from a CD",
    },
    Need {
        package: "syslinux-common",
        program: "/usr/lib/syslinux/modules/bios/ldlinux.c32",
        why: "is what isolinux loads first",
    },
    Need {
        package: "xorriso",
        program: "xorriso",
        why: "writes the CD",
    },
];

/// What makes disk images in other formats.
pub const QEMU_IMG: Need = Need {
    package: "qemu-utils",
    program: "qemu-img",
    why: "makes and checks qcow2 images",
};

/// What makes a Debian from packages.
pub const DEBOOTSTRAP: Need = Need {
    package: "debootstrap",
    program: "debootstrap",
    why: "installs the Debian that is booted from a disk",
};

/// The other end of a guest's network.
pub const PASST: Need = Need {
    package: "passt",
    program: "passt",
    why: "is the network of guests, with --net user",
};

/// What copies trees of files.
pub const RSYNC: Need = Need {
    package: "rsync",
    program: "rsync",
    why: "copies trees in guests, over shared directories",
};

/// What draws a machine's packages, cores, threads and caches.
pub const HWLOC: Need = Need {
    package: "hwloc-nox",
    program: "lstopo-no-graphics",
    why: "shows how a guest sees its CPUs",
};

/// What stresses a CPU, and checks what it computes.
pub const STRESS_NG: Need = Need {
    package: "stress-ng",
    program: "stress-ng",
    why: "checks vector instructions in guests",
};

/// NumPy with its tests, and what runs these.
pub const NUMPY_NEEDS: [Need; 3] = [
    Need {
        package: "python3-numpy",
        program: "/usr/lib/python3/dist-packages/numpy/core/tests/test_simd.py",
        why: "has tests of its vector code, which guests run",
    },
    Need {
        package: "python3-pytest",
        program: "pytest-3",
        why: "runs NumPy's tests",
    },
    Need {
        package: "python3-hypothesis",
        program: "/usr/lib/python3/dist-packages/hypothesis/__init__.py",
        why: "is loaded by NumPy's tests",
    },
];

/// Intel's decoder of Intel PT, by its header.
pub const LIBIPT: Need = Need {
    package: "libipt-dev",
    program: "/usr/include/intel-pt.h",
    why: "decodes traces for comparison",
};

/// The debugger that reads the symbols of a traced kernel.
pub const GDB: Need = Need {
    package: "gdb",
    program: "gdb",
    why: "reads exported symbols, for comparison",
};

/// perf, which reads exported traces.
pub const PERF: Need = Need {
    package: "linux-perf",
    program: "perf",
    why: "reads exported traces, for comparison",
};

/// The kernel's debugger, which reads dumps.
pub const CRASH: Need = Need {
    package: "crash",
    program: "crash",
    why: "reads dumps of a guest, for comparison",
};

/// callgrind_annotate.
pub const VALGRIND: Need = Need {
    package: "valgrind",
    program: "callgrind_annotate",
    why: "reads exported profiles, for comparison",
};

/// The program's file, looked for as the shell does and in the system's own folders; or the file, where `name` is a whole path.
pub fn find_program(name: &str) -> Option<PathBuf> {
    if let Some(below) = name.strip_prefix('/') {
        return [PathBuf::from(name), beside().join("root").join(below)]
            .into_iter()
            .find(|file| file.is_file());
    }
    let path = std::env::var_os("PATH").unwrap_or_default();
    let own = ["/usr/sbin", "/sbin", "/usr/bin", "/bin"].map(PathBuf::from);
    std::env::split_paths(&path)
        .chain(own)
        .chain([beside().join("bin")])
        .map(|folder| folder.join(name))
        .find(|file| file.is_file())
}

/// Whether this is Debian, whose package names and kernels the project uses. `os_release` is /etc/os-release's text.
fn is_debian(os_release: &str) -> bool {
    os_release
        .lines()
        .any(|line| matches!(line.trim(), "ID=debian" | "ID=\"debian\""))
}

/// Whether packages can be fetched here with Debian's own tools.
pub fn on_debian() -> bool {
    is_debian(&fs::read_to_string("/etc/os-release").unwrap_or_default()) && find_program("apt-get").is_some()
}

/// Installs what is missing of `needs`, or says what to install by hand.
pub fn ensure_installed(stage: &Stage, needs: &[Need], install: bool) -> Result<()> {
    let missing: Vec<Need> = needs
        .iter()
        .copied()
        .filter(|need| find_program(need.program).is_none())
        .collect();
    if missing.is_empty() {
        return Ok(());
    }
    if !install || !on_debian() {
        bail!("{}", list(&missing, on_debian()));
    }
    let names: Vec<&str> = missing.iter().map(|need| need.package).collect();
    stage.say(&format!("installing {}", names.join(", ")));
    // A fresh machine has no package lists yet, an old one stale ones: fetch them only where the first try fails.
    if !apt_install(stage, &names)? {
        stage.must(&mut as_root(stage, "apt-get", &["update"])?)?;
        if !apt_install(stage, &names)? {
            // One that is in the way of another is no reason to go without the rest.
            let refused = each(&names, |name| apt_install(stage, &[name]))?;
            if !refused.is_empty() {
                stage.say("other packages are in the way: unpacking beside the system instead");
                unpack_beside(stage, &refused)?;
            }
        }
    }
    for need in missing {
        ensure!(
            find_program(need.program).is_some(),
            "{} cannot be installed without taking other packages away: install it by hand",
            need.package
        );
    }
    Ok(())
}

/// Installs packages, all or none. What the user has stays: without --no-remove, -y would agree to take other packages away.
fn apt_install(stage: &Stage, names: &[&str]) -> Result<bool> {
    let mut arguments = vec!["install", "-y", "--no-remove", "--no-install-recommends"];
    arguments.extend(names);
    Ok(stage
        .run(&mut as_root(stage, "apt-get", &arguments)?, None, |_| {})?
        .success())
}

/// Installs one package after the other and gives those that would not go in.
fn each<'a>(names: &[&'a str], mut install: impl FnMut(&str) -> Result<bool>) -> Result<Vec<&'a str>> {
    let mut refused = Vec::new();
    for name in names {
        if !install(name)? {
            refused.push(*name);
        }
    }
    Ok(refused)
}

/// Where programs are unpacked that cannot be installed.
fn beside() -> PathBuf {
    crate::tree::target().join("host")
}

/// Fetches packages with what they need and the system lacks, and unpacks them below target/host. The programs find their
/// libraries, modules and data there through a script of their name in target/host/bin.
fn unpack_beside(stage: &Stage, names: &[&str]) -> Result<()> {
    let (archives, root, bin) = (beside().join("archives"), beside().join("root"), beside().join("bin"));
    for folder in [&archives.join("partial"), &root, &bin] {
        fs::create_dir_all(folder).with_context(|| format!("cannot make {}", folder.display()))?;
    }
    let into = format!("Dir::Cache::archives={}/", archives.display());
    let mut arguments = vec![
        "install",
        "--download-only",
        "-y",
        "--no-install-recommends",
        "-o",
        &into,
    ];
    arguments.extend(names);
    stage.must(&mut as_root(stage, "apt-get", &arguments)?)?;
    for entry in fs::read_dir(&archives)? {
        let file = entry?.path();
        if file.extension().is_some_and(|extension| extension == "deb") {
            stage.must(Command::new("dpkg-deb").arg("-x").arg(&file).arg(&root))?;
        }
    }
    let programs = root.join("usr/bin");
    // Some packages are data alone.
    let programs = if programs.is_dir() {
        fs::read_dir(&programs)?.collect()
    } else {
        Vec::new()
    };
    for entry in programs {
        let name = entry?.file_name();
        let script = bin.join(&name);
        fs::write(&script, launcher(&name.to_string_lossy()))?;
        fs::set_permissions(&script, std::os::unix::fs::PermissionsExt::from_mode(0o755))?;
    }
    Ok(())
}

/// The script that starts an unpacked program.
fn launcher(program: &str) -> String {
    let data = if program.starts_with("qemu-system") {
        r#" -L "$root/usr/share/qemu" -L "$root/usr/share/seabios""#
    } else {
        ""
    };
    format!(
        r#"#!/bin/sh
root=$(dirname "$(readlink -f "$0")")/../root
# Packages of before the merge of /lib and /usr/lib have their libraries in the former.
export LD_LIBRARY_PATH="$root/usr/lib/x86_64-linux-gnu:$root/lib/x86_64-linux-gnu"
export QEMU_MODULE_DIR="$root/usr/lib/x86_64-linux-gnu/qemu"
export LTDL_LIBRARY_PATH="$root/usr/lib/x86_64-linux-gnu/bochs/plugins" BXSHARE="$root/usr/share/bochs"
exec "$root/usr/bin/{program}"{data} "$@"
"#
    )
}

/// The sentence for a machine on which nothing is installed by us.
fn list(missing: &[Need], debian: bool) -> String {
    let names: Vec<&str> = missing.iter().map(|need| need.package).collect();
    let mut text = if debian {
        format!(
            "missing packages: install them with `apt-get install {}`\n",
            names.join(" ")
        )
    } else {
        "this is not Debian: install by hand what is missing (Debian's package names) and run this again\n".to_string()
    };
    for need in missing {
        text += &format!("  {:<18} has {:<20} {}\n", need.package, need.program, need.why);
    }
    text.trim_end().to_string()
}

/// A command with root's rights: as it is for root, through sudo for others.
pub fn as_root(stage: &Stage, program: &str, arguments: &[&str]) -> Result<Command> {
    let root = fs::metadata("/proc/self").is_ok_and(|data| std::os::unix::fs::MetadataExt::uid(&data) == 0);
    let mut command = if root {
        Command::new(program)
    } else {
        ensure!(
            find_program("sudo").is_some(),
            "this needs root and there is no sudo: run as root: {program} {}",
            arguments.join(" ")
        );
        // The password is asked for here, where the progress does not write over the question.
        let asked = stage
            .aside(|| Command::new("sudo").arg("-v").status())
            .context("cannot run sudo")?;
        ensure!(asked.success(), "sudo does not let this user run {program}");
        let mut command = Command::new("sudo");
        command.arg("-n").arg(program);
        command
    };
    command
        .args(arguments)
        .env("DEBIAN_FRONTEND", "noninteractive")
        .env("LC_ALL", "C");
    Ok(command)
}

/// Whether a file is a 64-bit ELF program that needs no dynamic linker.
pub fn is_static_program(path: &Path) -> bool {
    fs::read(path).is_ok_and(|bytes| has_no_interpreter(&bytes))
}

/// Reads an ELF64 little-endian image's program headers; true where it has some and none is PT_INTERP (3).
fn has_no_interpreter(image: &[u8]) -> bool {
    let field = |at: usize, size: usize| -> Option<usize> {
        let bytes = image.get(at..at.checked_add(size)?)?;
        Some(
            bytes
                .iter()
                .rev()
                .fold(0, |value, byte| value << 8 | usize::from(*byte)),
        )
    };
    if !image.starts_with(b"\x7fELF\x02\x01") {
        return false;
    }
    let headers = || -> Option<Vec<usize>> {
        let (start, size, count) = (field(0x20, 8)?, field(0x36, 2)?, field(0x38, 2)?);
        (0..count)
            .map(|index| field(start.checked_add(index * size)?, 4))
            .collect()
    };
    headers().is_some_and(|types| !types.is_empty() && !types.contains(&3))
}

#[cfg(test)]
#[path = "packages_test.rs"]
mod tests;
