use std::ffi::OsString;

use crate::{
    cli::{self, Job},
    config::{EngineChoice, MachineConfig, SerialTarget},
};

fn run(line: &[&str]) -> Result<MachineConfig, String> {
    let line: Vec<OsString> = line.iter().map(OsString::from).collect();
    match cli::parse([OsString::from("minivmm")].into_iter().chain(line)) {
        Ok(Job::Run { config, .. }) => Ok(*config),
        Ok(other) => Err(format!("{other:?}")),
        Err(error) => Err(error.to_string()),
    }
}

/// A command line out of QEMU's manual means the same here.
// covers: cli/qemu
#[test]
fn options_of_qemu_are_understood() {
    let config = run(&[
        "-kernel",
        "k",
        "-initrd",
        "i",
        "-append",
        "-x -hda",
        "-smp",
        "2,sockets=2,maxcpus=4",
        "-m",
        "1G",
        "-nographic",
        "-no-reboot",
        "-hda",
        "d.img",
        "-serial",
        "mon:stdio",
        "-cpu",
        "Haswell",
        "-accel",
        "tcg,thread=multi",
        "-s",
        "-S",
    ])
    .unwrap();
    assert_eq!(config.kernel, std::path::PathBuf::from("k"));
    assert_eq!(config.initrd.len(), 1);
    assert_eq!(config.cmdline.as_deref(), Some(&b"-x -hda"[..]));
    assert_eq!((config.cpus, config.memory), (2, 1 << 30));
    assert_eq!(config.topology().to_string(), "2,cores=1,threads=1");
    assert_eq!(config.disks[0].path, std::path::PathBuf::from("d.img"));
    assert_eq!(config.serial, SerialTarget::Stdio);
    assert_eq!(config.model.name, "haswell");
    assert_eq!(config.engine, EngineChoice::Soft);
    assert!(config.gdb.is_some() && config.paused);
    assert_eq!(run(&["-kernel", "k", "-enable-kvm"]).unwrap().engine, EngineChoice::Kvm);
    assert_eq!(
        run(&["-kernel", "k", "-gdb", "tcp::4321"])
            .unwrap()
            .gdb
            .unwrap()
            .to_string(),
        "tcp:127.0.0.1:4321"
    );
    // What is a value is none of these.
    assert_eq!(
        run(&["--kernel", "k", "--append", "-smp"]).unwrap().cmdline.as_deref(),
        Some(&b"-smp"[..])
    );
}

// covers: cli/qemu
#[test]
fn what_there_is_not_is_answered_with_our_name_for_it() {
    for (line, says) in [
        (
            &["-kernel", "k", "-drive", "file=x"][..],
            "-drive: a disk is --disk FILE",
        ),
        (&["-machine", "q35"], "-machine: there is one machine"),
        (&["-accel", "hvf"], "-accel hvf: not known here; see --engine"),
        (&["-nic", "user"], "-nic: "),
        (&["-bios", "b"], "there is no firmware: --kernel FILE"),
        (&["-kernel"], "a value is required for '--kernel <FILE>'"),
    ] {
        let error = run(line).unwrap_err();
        assert!(error.contains(says), "{line:?}: {error}");
    }
}

// covers: cli/suggestions
#[test]
fn what_was_meant_is_suggested() {
    for (line, says) in [
        (&["vmlinuz"][..], "vmlinuz: a kernel is given as --kernel vmlinuz"),
        (&["/boot/vmlinuz-6.1.0"], "given as --kernel /boot/vmlinuz-6.1.0"),
        (&["Cargo.toml"], "given as --kernel Cargo.toml"),
        (&["-m", "1G", "bzImage"], "given as --kernel bzImage"),
        (&["--kernal", "k"], "'--kernel'"),
        (&["--kernel", "k", "--serail", "null"], "'--serial'"),
        (&["--kernel", "k", "--pt=hots"], "'host'"),
        (&["trcae"], "'trace'"),
        (&[], "no kernel is given: minivmm --kernel FILE"),
    ] {
        let error = run(line).unwrap_err();
        assert!(error.contains(says), "{line:?}: {error}");
        assert!(!error.contains('\n') && !error.contains("use '--"), "{error}");
    }
}

// covers: cli/help
#[test]
fn help_tells_of_subcommands() {
    for (line, says) in [
        (&["help"][..], "--kernel <FILE>"),
        (&["help", "trace"], "decode"),
        (&["help", "trace", "export"], "--flamegraph"),
        (&["trace", "help", "decode"], "--calls"),
        (&["help", "matrix"], "--guests"),
    ] {
        let text = run(line).unwrap_err();
        assert!(text.contains(says) && text.starts_with("Print"), "{line:?}: {text}");
    }
    assert!(run(&["help", "bogus"]).unwrap_err().contains("bogus"));
}

// covers: cli/completions
#[test]
fn shells_complete_and_manual_pages_are_written() {
    for (shell, says) in [
        ("bash", "complete -F _minivmm"),
        ("zsh", "#compdef minivmm"),
        ("fish", "complete -c minivmm"),
    ] {
        let text = run(&["completions", shell]).unwrap_err();
        for word in [says, "cpu-model", "flamegraph"] {
            assert!(text.contains(word), "{shell}: no {word}");
        }
    }
    assert!(
        run(&["completions", "cmd"])
            .unwrap_err()
            .contains("[possible values: bash")
    );
    let dir = std::env::temp_dir().join(format!("minivmm-man-{}", std::process::id()));
    cli::write_manual(&dir).unwrap();
    for (page, says) in [
        ("minivmm.1", "\\fB\\-\\-kernel\\fR"),
        ("minivmm-trace-export.1", "\\-\\-flamegraph"),
        ("minivmm-matrix.1", "\\-\\-guests"),
    ] {
        let text = std::fs::read_to_string(dir.join(page)).unwrap();
        assert!(text.contains(".TH ") && text.contains(says), "{page}: {text}");
    }
    std::fs::remove_dir_all(dir).unwrap();
}

/// Each unit can be asked for by its name alone.
// covers: cli/units
#[test]
fn a_unit_alone_asks_for_ours() {
    use kvm::units::{UNITS, UnitRequest};
    for row in &UNITS {
        let config = run(&["--kernel", "k", &format!("--{}", row.name)]).unwrap();
        assert_eq!(config.units[row.unit], Some(UnitRequest::Emulated), "{}", row.name);
    }
}

/// Whatever is typed behind an option, what is wrong with it is one line.
// covers: cli/qemu
#[test]
fn what_is_wrong_is_one_line() {
    for line in [
        ["-cpu", "a\nb\n"],
        ["-machine", "\u{1b}[2J\n"],
        ["-device", "x\ny"],
        ["-vga", "\n"],
        ["Image\n\n", "k"],
    ] {
        let error = run(&line).unwrap_err();
        assert!(!error.contains(char::is_control), "{error:?}");
    }
}
