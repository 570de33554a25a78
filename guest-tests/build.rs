//! Builds the guests: those in C and assembly with the C compiler that rustc links with, and objcopy; the guest tests with
//! cargo, as one library for the host's own target, of which each image takes its table of tests.

use std::path::{Path, PathBuf};
use std::process::Command;

fn main() {
    let out = PathBuf::from(std::env::var_os("OUT_DIR").expect("cargo gives an output folder"));
    let guests = Path::new(env!("CARGO_MANIFEST_DIR")).join("guests");
    println!("cargo::rerun-if-changed={}", guests.display());
    println!("cargo::rerun-if-env-changed=CC");
    let source = |name: &str| guests.join(name).into_os_string();

    let bare = [
        "-ffreestanding",
        "-fno-pic",
        "-fno-stack-protector",
        "-fno-asynchronous-unwind-tables",
        "-fcf-protection=none",
    ];
    let link = [
        "-nostdlib",
        "-static",
        "-Wl,--build-id=none,-z,noexecstack,-z,max-page-size=4096",
        "-no-pie",
        "-T",
    ];

    guest_tests(&out, &guests.join("bare.ld"));

    let assembled = |name: &str| {
        let image = out.join(format!("{name}.elf"));
        cc().args(["-m32"])
            .args(link)
            .arg(source("guest.ld"))
            .arg(source(&format!("{name}.S")))
            .arg("-o")
            .arg(&image)
            .must();
        image
    };
    let (hello, patches) = (assembled("hello"), assembled("patches"));
    let info = out.join("info.elf");
    let mut command = cc();
    command
        .args(["-m32", "-march=i686", "-O2", "-Wall", "-Wextra", "-Werror"])
        .args(bare)
        .args(link)
        .arg(source("guest.ld"));
    command
        .args([source("info_entry.S"), source("info.c")])
        .arg("-o")
        .arg(&info)
        .must();

    let smp = out.join("smp.elf");
    let mut command = cc();
    command
        .args(["-m32", "-march=i686", "-mgeneral-regs-only", "-O2"])
        .args(["-Wall", "-Wextra", "-Werror"])
        .args(bare)
        .args(link)
        .arg(source("guest.ld"));
    command
        .args([source("smp_entry.S"), source("smp.c")])
        .arg("-o")
        .arg(&smp)
        .must();

    // A program for a Linux guest without libraries.
    let transactions = out.join("transactions");
    let mut command = cc();
    command
        .args(["-m64", "-O2", "-static", "-pthread", "-mrtm"])
        .args(["-Wall", "-Wextra", "-Werror"])
        .arg(source("transactions.c"));
    command.arg("-o").arg(&transactions).must();

    // The first process of a 32-bit one, without libraries.
    let netburst = out.join("netburst-events");
    let mut command = cc();
    command
        .args(["-m32", "-march=i686", "-O2", "-static", "-nostdlib", "-no-pie"])
        .args(["-Wall", "-Wextra", "-Werror"])
        .args(bare)
        .arg("-Wl,--build-id=none,-z,noexecstack")
        .arg(source("netburst_events.c"));
    command.arg("-o").arg(&netburst).must();

    // One that asks a file system what it has told it.
    let fsx = out.join("fsx");
    let mut command = cc();
    command
        .args(["-m64", "-O2", "-static", "-Wall", "-Wextra", "-Werror"])
        .arg(source("fsx.c"));
    command.arg("-o").arg(&fsx).must();

    // Another, which writes code.
    println!("cargo::rerun-if-changed=linux/programs/start.h");
    let jit = out.join("jit");
    let mut command = cc();
    command
        .args(["-m64", "-O1", "-Wall", "-Wextra", "-Werror"])
        .args(bare)
        .args(["-nostdlib", "-static", "-no-pie", "-Wl,--build-id=none,-z,noexecstack"])
        .arg(source("jit.c"));
    command.arg("-o").arg(&jit).must();

    // One object file for the guest and for the host, so that both run the same instructions.
    let object = out.join("loops.o");
    let mut command = cc();
    command
        .args([
            "-c",
            "-m64",
            "-O2",
            "-Wall",
            "-Wextra",
            "-Werror",
            "-mgeneral-regs-only",
            "-mno-red-zone",
        ])
        .args(bare);
    command.arg(source("loops.c")).arg("-o").arg(&object).must();
    let wide = out.join("loops.elf64");
    let mut command = cc();
    command
        .args([
            "-m64",
            "-O2",
            "-Wall",
            "-Wextra",
            "-Werror",
            "-mgeneral-regs-only",
            "-mno-red-zone",
        ])
        .args(bare)
        .args(link);
    command
        .arg(source("guest.ld"))
        .args([source("long_entry.S"), source("loops_guest.c")])
        .arg(&object);
    command.arg("-o").arg(&wide).must();
    // Multiboot wants a 32-bit file around the 64-bit code.
    let loops = out.join("loops.elf");
    Command::new("objcopy")
        .args(["-I", "elf64-x86-64", "-O", "elf32-i386"])
        .args([&wide, &loops])
        .must();
    let native = out.join("loops-native");
    cc().args(["-O2", "-no-pie"])
        .arg(source("loops_native.c"))
        .arg(&object)
        .arg("-o")
        .arg(&native)
        .must();

    let vmx_loop = out.join("vmx_loop.elf64");
    let mut command = cc();
    command
        .args(["-m64", "-O2", "-Wall", "-Wextra", "-Werror"])
        .args(["-mgeneral-regs-only", "-mno-red-zone"])
        .args(bare)
        .args(link);
    command
        .arg(source("guest.ld"))
        .args([source("long_entry.S"), source("vmx_loop.c")]);
    command.arg("-o").arg(&vmx_loop).must();
    let exits = out.join("vmx_loop.elf");
    Command::new("objcopy")
        .args(["-I", "elf64-x86-64", "-O", "elf32-i386"])
        .args([&vmx_loop, &exits])
        .must();

    // For gdb, which takes the symbols from the file of 64 bits.
    let wide_walk = out.join("walk.elf64");
    let mut command = cc();
    command
        .args([
            "-m64",
            "-g",
            "-O0",
            "-Wall",
            "-Wextra",
            "-Werror",
            "-mgeneral-regs-only",
        ])
        .args(["-mno-red-zone", "-fno-omit-frame-pointer", "-fcf-protection=none"])
        .args(bare)
        .args(link)
        .arg(source("guest.ld"))
        .args([source("long_entry.S"), source("walk.c")]);
    command.arg("-o").arg(&wide_walk).must();
    let walk = out.join("walk.elf");
    Command::new("objcopy")
        .args(["-I", "elf64-x86-64", "-O", "elf32-i386", "--strip-debug"])
        .args([&wide_walk, &walk])
        .must();
    let crash = out.join("crash");
    let mut command = cc();
    command
        .args([
            "-m64",
            "-g",
            "-O1",
            "-Wall",
            "-Wextra",
            "-Werror",
            "-static",
            "-nostdlib",
            "-no-pie",
        ])
        .args(["-fno-pie", "-ffreestanding", "-fcf-protection=none"])
        .arg(source("crash.c"));
    command.arg("-o").arg(&crash).must();

    let debug = out.join("host-debug");
    cc().args(["-O2", "-Wall", "-Wextra", "-Werror"])
        .arg(source("host_debug.c"))
        .arg("-o")
        .arg(&debug)
        .must();

    for (name, path) in [
        ("HOST_DEBUG", debug),
        ("HELLO", hello),
        ("PATCHES", patches),
        ("INFO", info),
        ("SMP", smp),
        ("LOOPS", loops),
        ("LOOPS_NATIVE", native),
        ("VMX_LOOP", exits),
        ("TRANSACTIONS", transactions),
        ("NETBURST_EVENTS", netburst),
        ("FSX", fsx),
        ("JIT", jit),
        ("WALK", walk),
        ("WALK_SYMBOLS", wide_walk),
        ("CRASH", crash),
    ] {
        println!("cargo::rustc-env=GUEST_{name}={}", path.display());
    }
}

/// The guest tests' images: `<name>.elf` in this folder.
fn guest_tests(out: &Path, linker_script: &Path) {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    for source in ["rt", "guests"] {
        println!("cargo::rerun-if-changed={}/guest-tests/{source}", root.display());
    }
    for source in ["devices/x86", "devices/pt-packet", "Cargo.lock", "Cargo.toml"] {
        println!("cargo::rerun-if-changed={}", root.join(source).display());
    }
    // One folder for all profiles, beside theirs: OUT_DIR is <target>/<profile>/build/<package>/out.
    let target = out.ancestors().nth(4).expect("cargo's layout").join("bare");
    // No red zone in our code, and addresses below 2 GiB. Only the host's own target is installed; it is named so that the
    // flags are not those of build scripts and macros.
    let triple = "x86_64-unknown-linux-gnu";
    let flags = [
        "-Cno-redzone=yes",
        "-Crelocation-model=static",
        "-Ccode-model=small",
        "-Cforce-unwind-tables=no",
        "-Cforce-frame-pointers=no",
    ];
    let mut cargo = Command::new(std::env::var_os("CARGO").expect("cargo names itself"));
    cargo
        .current_dir(&root)
        .args([
            "rustc",
            "--quiet",
            "--locked",
            "--package",
            "guests",
            "--features",
            "bare",
        ])
        .args(["--profile", "guest", "--target", triple, "--crate-type", "staticlib"])
        .arg("--target-dir")
        .arg(&target)
        // What the outer cargo checks or measures is not this build's.
        .env_remove("RUSTC_WORKSPACE_WRAPPER")
        .env_remove("RUSTFLAGS")
        .env("CARGO_ENCODED_RUSTFLAGS", flags.join("\x1f"));
    cargo.must();
    let library = target.join(triple).join("guest/libguests.a");
    // Where people, and `minivmm matrix --guests`, find them: the same images whichever profile is built.
    let images = target.join("images");
    std::fs::create_dir_all(&images).expect("cargo's output folder can be written");
    let known = |name: &str| {
        GUESTS
            .iter()
            .chain(GUESTS32)
            .any(|guest| name.split('.').next() == Some(guest))
    };
    for entry in std::fs::read_dir(&images).expect("it was just made").flatten() {
        if !known(&entry.file_name().to_string_lossy()) {
            // Of a guest that there is no more; another build may be faster.
            let _ = std::fs::remove_file(entry.path());
        }
    }
    let apart = target.join("apart");
    std::fs::create_dir_all(&apart).expect("cargo's output folder can be written");
    for name in GUESTS.iter().chain(GUESTS32).chain(APART) {
        let images = if APART.contains(name) { &apart } else { &images };
        // An image has a table of the one kind or of the other.
        let (table, table32) = match GUESTS32.contains(name) {
            true => ("tests_none".to_string(), format!("tests32_{name}")),
            false => (format!("tests_{name}"), "0".to_string()),
        };
        let wide = out.join(format!("{name}.elf64"));
        cc().args(["-m64", "-nostdlib", "-static", "-no-pie", "-T"])
            .arg(linker_script)
            .arg("-Wl,--build-id=none,-z,noexecstack,-z,max-page-size=4096,--gc-sections,--no-warn-rwx-segments")
            .arg(format!(
                "-Wl,--defsym=guest_tests={table},--defsym=guest_tests32={table32},--defsym=rust_eh_personality=0,--defsym=_Unwind_Resume=0"
            ))
            .arg(&library)
            .arg("-o")
            .arg(&wide)
            .must();
        Command::new("objcopy")
            .args(["-I", "elf64-x86-64", "-O", "elf32-i386", "--strip-debug"])
            .args([&wide, &out.join(format!("{name}.elf"))])
            .must();
        let settings = root.join("guest-tests/guests").join(format!("{name}.toml"));
        for (file, from) in [
            (format!("{name}.elf"), out.join(format!("{name}.elf"))),
            (format!("{name}.toml"), settings),
        ] {
            if from.is_file() {
                // In one step: somebody may be running it.
                let draft = images.join(format!(".{file}.{}", std::process::id()));
                std::fs::copy(&from, &draft).expect("cargo's output folder can be written");
                std::fs::rename(&draft, images.join(file)).expect("cargo's output folder can be written");
            }
        }
    }
    println!("cargo::rustc-env=GUEST_BARE={}", images.display());
    println!("cargo::rustc-env=GUEST_APART={}", apart.display());
}

/// The guest tests, by their modules' names.
const GUESTS: &[&str] = &[
    "dr",
    "dr_delivery",
    "debugctl",
    "lbr",
    "arch_lbr",
    "bts",
    "pebs",
    "pmu",
    "pt_packets",
    "pt_filters",
    "pt_topa",
    "tsc",
    "rdt",
    "cpuid_msrs",
    "apic",
    "smm",
    "smp",
];

/// Those that run on some parts alone and with CPUs of their own number: they are in a folder of their own.
const APART: &[&str] = &["vmx"];

/// Those whose tests are the 32-bit monitor's.
const GUESTS32: &[&str] = &["task_switch", "legacy"];

/// The C compiler driver.
fn cc() -> Command {
    Command::new(std::env::var_os("CC").unwrap_or_else(|| "gcc".into()))
}

trait Must {
    /// Runs a command that has to succeed.
    fn must(&mut self);
}

impl Must for Command {
    fn must(&mut self) {
        let program = self.get_program().to_string_lossy().into_owned();
        match self.status() {
            Ok(status) if status.success() => {}
            Ok(status) => panic!("{self:?}: {status}"),
            Err(error) => panic!("cannot run {program} (Debian packages gcc, binutils): {error}"),
        }
    }
}
