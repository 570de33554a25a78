//! Whatever is wrong with the command line or its files: one clear line on stderr, exit status 2, nothing overwritten.

use crate::common;
use std::{
    fs,
    io::Read,
    os::unix::{fs::PermissionsExt, process::CommandExt},
    path::Path,
    process::{Command, Stdio},
    time::Duration,
};

use common::*;

/// A bzImage as far as its headers go: 2 MiB of memory from 16 MiB on.
fn bzimage() -> Vec<u8> {
    let mut image = vec![0; 5 * 512 + 4096];
    let mut put = |at: usize, bytes: &[u8]| image[at..at + bytes.len()].copy_from_slice(bytes);
    put(0x1f1, &[4]);
    put(0x1f4, &256u32.to_le_bytes());
    put(0x1fe, &[0x55, 0xaa, 0xeb, 0x6a]);
    put(0x202, b"HdrS");
    put(0x206, &0x20fu16.to_le_bytes());
    put(0x211, &[1]);
    put(0x22c, &0x7fff_ffffu32.to_le_bytes());
    put(0x236, &1u16.to_le_bytes());
    put(0x238, &2047u32.to_le_bytes());
    put(0x258, &0x100_0000u64.to_le_bytes());
    put(0x260, &0x20_0000u32.to_le_bytes());
    image
}

/// The files that the rows speak of.
fn files(folder: &Folder) {
    folder.file("good", hello());
    folder.file("empty", b"");
    folder.file("text", "#!/bin/sh\necho not a kernel\n");
    folder.file("bzimage", bzimage());
    folder.file("cut-bzimage", &bzimage()[..5000]);
    folder.file("cut-good", &hello()[..20]);
    folder.file("elf64", fs::read(env!("CARGO_BIN_EXE_minivmm")).unwrap());
    folder.file("big", vec![0x41; 8 << 20]);
    folder.file("cut-cpio", b"070701000000000000");
    folder.file("precious", "do not lose this");
    fs::create_dir(folder.path().join("folder")).unwrap();
}

// covers: exit-status/2
// covers: bad-input/missing
// covers: bad-input/empty-kernel
// covers: bad-input/empty-initrd
// covers: bad-input/truncated-kernel
// covers: bad-input/truncated-initrd
// covers: bad-input/foreign-kernel
// covers: bad-input/foreign-initrd
// covers: bad-input/kernel-does-not-fit
// covers: bad-input/initrd-does-not-fit
// covers: bad-input/nonsense-size
// covers: bad-input/unknown-model
// covers: bad-input/model
// covers: bad-input/unknown-engine
#[test]
fn each_is_one_line_that_names_the_option_and_the_file() {
    let folder = Folder::new();
    files(&folder);
    for (arguments, says) in [
        ("--kernel missing", &["--kernel missing", "no such file"][..]),
        ("--kernel good --initrd missing", &["--initrd missing", "no such file"]),
        ("--kernel folder", &["--kernel folder", "directory"]),
        ("--kernel /dev/zero", &["--kernel /dev/zero", "not a regular file"]),
        ("--kernel empty", &["--kernel empty", "empty"]),
        ("--kernel good --initrd empty", &["--initrd empty", "empty"]),
        ("--kernel cut-bzimage", &["--kernel cut-bzimage", "truncated"]),
        ("--kernel cut-good", &["--kernel cut-good"]),
        (
            "--kernel bzimage --initrd cut-cpio",
            &["--initrd cut-cpio", "truncated"],
        ),
        ("--kernel text", &["--kernel text", "not a kernel"]),
        ("--kernel elf64", &["--kernel elf64", "not a kernel"]),
        (
            "--kernel bzimage --initrd text",
            &["--initrd text", "not an initial RAM disk"],
        ),
        ("--kernel bzimage -m 8M", &["--kernel bzimage", "--memory"]),
        ("--kernel bzimage -m 19M --initrd big", &["--initrd big"]),
        ("--kernel good -m 4M --initrd big", &["--initrd big", "--memory"]),
        ("--kernel big -m 4M", &["--kernel big", "--memory"]),
        ("--kernel good -m 12Q", &["--memory", "12Q"]),
        ("--kernel good -m 0", &["--memory"]),
        ("--kernel good -m 512", &["--memory", "512M"]),
        ("--kernel good -m 1", &["--memory", "a machine has 2M", "write 2M"]),
        ("--kernel good -m 100T", &["--memory 100T"]),
        ("--kernel good --gdb 1234", &["--gdb", "write tcp:1234"]),
        (
            "--kernel good --gdb localhost:1234",
            &["--gdb", "write tcp:localhost:1234"],
        ),
        ("--kernel good --gdb /tmp/s", &["--gdb", "write unix:/tmp/s"]),
        (
            "--kernel good --gdb unix:no/such/s",
            &["--gdb unix:no/such/s", "there is no folder no"],
        ),
        (
            "--kernel good --trace folder/none/x",
            &["--trace folder/none/x", "there is no folder folder/none"],
        ),
        (
            "--kernel good --trace /proc/x",
            &["--trace /proc/x", "no directory can be made there"],
        ),
        (
            "--kernel good --symbols text",
            &["--symbols text", "neither an ELF file nor a list of symbols"],
        ),
        (
            "--kernel good --on-panic reboot",
            &["--on-panic", "not exit, stop or dump=FILE"],
        ),
        (
            "--kernel good --on-panic dump=",
            &["--on-panic", "not exit, stop or dump=FILE"],
        ),
        (
            "--kernel good --on-panic stop",
            &["--on-panic stop", "--gdb or --control"],
        ),
        ("good", &["good: a kernel is given as --kernel good"]),
        ("--kernal good", &["--kernal", "'--kernel'"]),
        (
            "-kernel missing -smp 2 -nographic",
            &["--kernel missing", "no such file"],
        ),
        ("-kernel good -drive file=x", &["-drive", "--disk FILE"]),
        ("matrix", &["--guests <DIR>|--kernel <FILE>"]),
        ("--kernel good -m 5000000T", &["--memory"]),
        ("--kernel good -m 8T", &["--memory", "40 bits"]),
        ("--kernel good --cpu-model z80", &["--cpu-model z80", "westmere"]),
        (
            "--kernel good --cpu-model haswell,+sse5",
            &["--cpu-model haswell,+sse5", "unknown feature"],
        ),
        ("--kernel bzimage --cpu-model p6", &["--cpu-model p6", "64-bit mode"]),
        ("--kernel good --engine bochs", &["--engine", "bochs"]),
        (
            "--kernel good --engine kvm --max-instructions 5",
            &["--engine kvm", "--max-instructions"],
        ),
        (
            "--kernel good --engine kvm --trace new-trace",
            &["--engine kvm", "--trace"],
        ),
        ("--kernel good --serial tcp:5555", &["--serial", "tcp:5555"]),
        (
            "--kernel good --serial file:no/such/folder/log",
            &["--serial file:no/such/folder/log", "no such file"],
        ),
        (
            "--kernel good --serial file:folder",
            &["--serial file:folder", "directory"],
        ),
        ("--kernel good --serial file:good", &["--serial file:good", "same file"]),
        (
            "--kernel good --initrd text --serial file:text",
            &["--serial file:text", "same file"],
        ),
        ("--kernel good --clock sundial", &["--clock", "sundial"]),
        ("--kernel good --seed many", &["--seed", "many"]),
        ("--kernel good --rtc-base yesterday", &["--rtc-base", "yesterday"]),
        ("--kernel good --max-instructions some", &["--max-instructions", "some"]),
        ("--kernel good --timeout -1", &["--timeout", "-1"]),
        ("--kernel", &["--kernel"]),
        ("", &["--kernel"]),
        ("--frobnicate", &["--frobnicate"]),
        // What comes first is checked first, and what is wrong elsewhere does not cost a file.
        ("--kernel missing --serial file:precious", &["--kernel missing"]),
        ("--kernel text --serial file:precious", &["--kernel text"]),
        (
            "--kernel bzimage --initrd cut-cpio --serial file:precious",
            &["--initrd cut-cpio"],
        ),
        (
            "--kernel good --engine kvm --max-instructions 5 --serial file:precious",
            &["--engine kvm"],
        ),
        ("--kernel missing --serial file:new", &["--kernel missing"]),
    ] {
        let mut command = minivmm();
        let result = run(command.current_dir(folder.path()).args(arguments.split_whitespace()));
        eprintln!("{arguments}: {}", String::from_utf8_lossy(&result.stderr));
        assert_refused(&result, 2, says);
        assert!(result.stdout.is_empty(), "{arguments}");
    }
    let read = |name: &str| fs::read(folder.path().join(name)).unwrap();
    assert_eq!(read("precious"), b"do not lose this");
    assert_eq!(read("good"), hello());
    assert_eq!(read("text"), b"#!/bin/sh\necho not a kernel\n");
    assert!(!folder.path().join("new").exists());
}

/// The engine runs the host's vector instructions from memory of its own. Without it they are computed by tables, unless the host's are
/// asked for.
#[test]
fn a_limit_that_leaves_no_executable_memory_is_told_before_the_guest_runs() {
    let folder = Folder::new();
    files(&folder);
    let limited = |options: &str| {
        let mut command = Command::new("sh");
        let program = env!("CARGO_BIN_EXE_minivmm");
        let script = format!("ulimit -f 100; exec {program} --kernel good {options}");
        run(command.current_dir(folder.path()).args(["-c", &script]))
    };
    let refused = limited("--vector host");
    assert_refused(&refused, 2, &["--cpu-model westmere", "executable memory", "ulimit -f"]);
    let portable = limited("-v");
    let errors = String::from_utf8_lossy(&portable.stderr);
    assert_eq!(portable.status.code(), Some(0), "{errors}");
    assert!(
        errors.contains("--vector tables") && errors.contains("executable memory"),
        "{errors}"
    );
}

/// However little memory there is, a run ends by itself, with a line that says so.
// covers: exit-status/6
// covers: bad-input/memory
#[test]
fn without_memory_a_run_ends_with_a_line_and_no_signal() {
    let folder = Folder::new();
    files(&folder);
    folder.file("grows", spinner());
    let command = |limit: u64, arguments: &str| {
        let mut command = Command::new("sh");
        let program = env!("CARGO_BIN_EXE_minivmm");
        let script = format!("ulimit -v {limit}; exec {program} {arguments}");
        run(command.current_dir(folder.path()).args(["-c", &script]))
    };
    let (mut limit, mut without, mut heap) = (16 << 10, 0, 0);
    // Less than the program's own pages, and the system does not start it.
    while command(limit, "--version").status.code() != Some(0) {
        limit += limit / 32;
    }
    loop {
        let result = command(
            limit,
            "--kernel good -m 64M --serial null --gdb unix:gdb --control unix:control",
        );
        let errors = String::from_utf8_lossy(&result.stderr).into_owned();
        match result.status.code() {
            Some(0) => break,
            Some(2) => {}
            Some(6) => heap += u32::from(errors.contains("out of memory")),
            other => panic!("ulimit -v {limit}: {other:?}: {errors}"),
        }
        assert_eq!(errors.lines().count(), 1, "ulimit -v {limit}: {errors}");
        assert!(errors.starts_with("minivmm: "), "ulimit -v {limit}: {errors}");
        without += 1;
        let _ = fs::remove_file(folder.path().join("gdb"));
        let _ = fs::remove_file(folder.path().join("control"));
        limit += limit / 100;
    }
    assert!(
        without > 10 && heap > 0,
        "{without} without memory, {heap} of them on the heap"
    );
}

#[test]
fn a_name_with_control_characters_is_still_one_line() {
    for name in ["a\nb", "\x1b[31mred", "tab\there"] {
        assert_refused(&run(minivmm().args(["--kernel", name])), 2, &["--kernel "]);
    }
    assert_refused(
        &run(minivmm().args(["--kernel", "x", "--cpu", "a\nb"])),
        2,
        &["--cpu-model a?b"],
    );
}

// covers: bad-input/disk-missing
// covers: bad-input/disk-directory
// covers: bad-input/disk-size
// covers: bad-input/disk-in-use
// covers: bad-input/disk-too-many
// covers: bad-input/inject
// covers: bad-input/collect-folder
#[test]
fn disks_and_folders_that_cannot_be_used_are_one_line() {
    let folder = Folder::new();
    files(&folder);
    folder.file("disk", [7; 1024]);
    folder.file("odd", [7; 1000]);
    assert!(
        Command::new("mkfifo")
            .arg(folder.path().join("fifo"))
            .status()
            .unwrap()
            .success()
    );
    let many = "--disk disk,overlay ".repeat(64);
    for (arguments, says) in [
        ("--disk missing", &["--disk missing", "no such file"][..]),
        ("--disk missing,overlay", &["--disk missing", "no such file"]),
        ("--disk folder", &["--disk folder", "is a directory"]),
        ("--disk folder,readonly", &["--disk folder", "is a directory"]),
        (
            "--disk /dev/zero",
            &["--disk /dev/zero", "neither a regular file nor a block device"],
        ),
        (
            "--disk fifo",
            &["--disk fifo", "neither a regular file nor a block device"],
        ),
        ("--disk empty", &["--disk empty", "is empty", "truncate"]),
        ("--disk odd", &["--disk odd", "1000 bytes", "multiple of 512"]),
        ("--disk disk --disk disk", &["--disk disk", "in use"]),
        ("--disk disk --disk disk,readonly", &["--disk disk", "in use"]),
        ("--disk ,overlay", &["--disk", "needs a file"]),
        (many.trim(), &["--disk disk", "one device too many"]),
        ("--disk disk --serial file:disk", &["--serial file:disk", "same file"]),
        ("--inject missing", &["--inject missing", "Linux kernel"]),
        ("--collect text", &["--collect text", "is not a directory"]),
        (
            "--collect no/such/folder",
            &["--collect no/such/folder", "no such file"],
        ),
        // The last of two kernels does not count: an option is given once.
        ("--inject folder --inject folder", &["--inject"]),
    ] {
        let mut command = minivmm();
        command.args(["--kernel", "good"]).args(arguments.split_whitespace());
        let result = run(command.current_dir(folder.path()));
        assert_refused(&result, 2, says);
        assert!(result.stdout.is_empty(), "{arguments}");
    }
    for (arguments, says) in [
        ("--inject missing", &["--inject missing", "no such file"][..]),
        ("--inject text", &["--inject text", "is not a directory"]),
        ("--inject folder --initrd cut-cpio", &["--initrd cut-cpio", "truncated"]),
        ("--inject folder --initrd empty", &["--initrd empty", "empty"]),
    ] {
        let mut command = minivmm();
        command.args(["--kernel", "bzimage"]).args(arguments.split_whitespace());
        assert_refused(&run(command.current_dir(folder.path())), 2, says);
    }
    assert_eq!(fs::read(folder.path().join("disk")).unwrap(), [7; 1024]);
}

/// A FIFO would wait for whoever writes it, a device may never end.
// covers: bad-input/special-file
#[test]
fn files_that_are_no_regular_ones_are_refused_by_name() {
    let folder = Folder::new();
    files(&folder);
    let fifo = Command::new("mkfifo").arg(folder.path().join("fifo")).status();
    assert!(fifo.unwrap().success());
    let _socket = std::os::unix::net::UnixListener::bind(folder.path().join("socket")).unwrap();
    std::os::unix::fs::symlink("/dev/zero", folder.path().join("zero")).unwrap();
    let trace = folder.path().join("trace");
    let made = run(minivmm()
        .arg("--kernel")
        .arg(folder.path().join("good"))
        .arg("--trace")
        .arg(&trace));
    assert_eq!(made.status.code(), Some(0));
    for (name, what) in [
        ("fifo", "is a FIFO"),
        ("socket", "is a socket"),
        ("zero", "is a device"),
    ] {
        // Names with a dot in them are a model's file, an expected table, a report.
        for extension in ["toml", "xml"] {
            let link = folder.path().join(format!("{name}.{extension}"));
            std::os::unix::fs::symlink(name, link).unwrap();
        }
        for (arguments, option) in [
            ("--kernel NAME", "--kernel NAME"),
            ("--kernel good --initrd NAME", "--initrd NAME"),
            ("--kernel good --cpu-model ./NAME.toml", "--cpu-model ./NAME.toml"),
            (
                "--kernel good --trace new --symbols NAME --trace-start main",
                "--symbols NAME",
            ),
            ("trace decode trace --symbols NAME", "--symbols NAME"),
            ("trace decode trace --symbols-user NAME", "--symbols-user NAME"),
            ("matrix --kernel NAME --model westmere", "--kernel NAME"),
            (
                "matrix --kernel good --model westmere --expected NAME",
                "--expected NAME",
            ),
            ("matrix merge NAME.xml", "matrix merge NAME.xml"),
        ] {
            let of = |text: &str| text.replace("NAME", name);
            let mut command = minivmm();
            command.current_dir(folder.path());
            let result = run(command.args(of(arguments).split_whitespace()));
            eprintln!("{}: {}", of(arguments), String::from_utf8_lossy(&result.stderr));
            assert_refused(&result, 2, &[&of(option), what]);
        }
    }
    assert!(!folder.path().join("new").exists());
    // A disk is looked at before the session that it is part of.
    let mut command = minivmm();
    command.args(["--kernel", "good", "--disk", "fifo", "--record", "session"]);
    assert_refused(&run(command.current_dir(folder.path())), 2, &["--disk fifo"]);
}

// covers: bad-input/disk-in-use
#[test]
fn a_disk_of_a_running_minivmm_is_in_use() {
    let folder = Folder::new();
    let kernel = folder.file("kernel", spinner());
    let disk = folder.file("disk", [7; 1024]);
    let start = || {
        let mut command = minivmm();
        command.arg("--kernel").arg(&kernel).arg("--disk").arg(&disk);
        command
    };
    let mut first = Watched::new(start().stdin(Stdio::null()).stdout(Stdio::piped()).spawn().unwrap());
    // It holds the disk when its guest runs: one that starts earlier might take the disk first.
    let mut said = [0; 8];
    first.child.stdout.as_mut().unwrap().read_exact(&mut said).unwrap();
    assert_eq!(&said, b"spinning");
    let second = run(start().args(["--serial", "null", "--max-instructions", "1"]));
    assert_refused(&second, 2, &["--disk", "in use"]);
    assert!(first.child.try_wait().unwrap().is_none());
    kill(&first.child, "KILL");
    first.wait();
    // The lock is gone with the process, however it ended.
    let result = run(start().args(["--serial", "null", "--max-instructions", "1"]));
    assert_eq!(result.status.code(), Some(8));
}

/// True if this process may do everything.
fn is_root(folder: &Path) -> bool {
    let probe = folder.join("probe");
    fs::write(&probe, "").unwrap();
    fs::set_permissions(&probe, fs::Permissions::from_mode(0o000)).unwrap();
    fs::File::open(probe).is_ok()
}

// covers: bad-input/permission
// covers: bad-input/disk-permission
#[test]
fn files_that_may_not_be_touched_are_not() {
    const NOBODY: u32 = 65534;
    let folder = Folder::new();
    fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o755)).unwrap();
    // Root may do everything, so there the program runs as nobody, from where nobody can reach it.
    let program = folder.path().join("minivmm");
    fs::copy(env!("CARGO_BIN_EXE_minivmm"), &program).unwrap();
    let root = is_root(folder.path());
    let kernel = folder.file("kernel", hello());
    let secret = folder.file("secret", hello());
    let locked = folder.file("locked", "do not lose this");
    fs::set_permissions(&secret, fs::Permissions::from_mode(0o000)).unwrap();
    fs::set_permissions(&locked, fs::Permissions::from_mode(0o444)).unwrap();
    fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o555)).unwrap();
    let refused = |arguments: &[&str], says: &[&str]| {
        let mut command = Command::new(&program);
        if root {
            command.uid(NOBODY).gid(NOBODY);
        }
        assert_refused(&run(command.current_dir(folder.path()).args(arguments)), 2, says);
    };
    refused(&["--kernel", "secret"], &["--kernel secret", "permission denied"]);
    refused(
        &["--kernel", "kernel", "--initrd", "secret"],
        &["--initrd secret", "permission denied"],
    );
    refused(
        &["--kernel", "kernel", "--serial", "file:locked"],
        &["--serial file:locked", "permission denied"],
    );
    refused(
        &["--kernel", "kernel", "--serial", "file:new"],
        &["--serial file:new", "permission denied"],
    );
    refused(
        &["--kernel", "kernel", "--disk", "secret,readonly"],
        &["--disk secret", "permission denied"],
    );
    refused(
        &["--kernel", "kernel", "--disk", "locked"],
        &["--disk locked", "permission denied", ",readonly or ,overlay"],
    );
    refused(
        &["--kernel", "kernel", "--collect", "new"],
        &["--collect new", "permission denied"],
    );
    fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o755)).unwrap();
    assert_eq!(fs::read(&locked).unwrap(), b"do not lose this");
    assert!(kernel.exists() && !folder.path().join("new").exists());
}

// covers: bad-input/permission
#[test]
fn output_that_cannot_be_written_ends_the_run() {
    let result = run_guest(&spinner(), &["--serial", "file:/dev/full"]);
    assert_refused(&result, 2, &["--serial file:/dev/full", "no space left"]);
}

// covers: bad-input/stdin
#[test]
fn a_closed_standard_input_is_refused_where_it_is_needed() {
    let folder = Folder::new();
    let kernel = folder.file("kernel", hello());
    let start = |options: &[&str]| {
        // Only a shell starts a program without a standard input.
        let mut command = Command::new("sh");
        command.args(["-c", "exec \"$@\" <&-", "sh", env!("CARGO_BIN_EXE_minivmm"), "--kernel"]);
        run(command.arg(&kernel).args(options))
    };
    assert_refused(&start(&[]), 2, &["--serial stdio", "standard input is closed"]);
    assert_eq!(start(&["--serial", "null"]).status.code(), Some(0));
    let result = run(minivmm().arg("--kernel").arg(&kernel));
    assert_eq!(result.status.code(), Some(0), "at its end, but not closed");
}

// covers: bad-input/signals
#[test]
fn signals_end_the_run_in_good_order() {
    let folder = Folder::new();
    let busy = folder.file("busy", spinner());
    let idle = folder.file("idle", interrupt_echo());
    for (kernel, ready) in [(&busy, "spinning\n"), (&idle, "ready\n")] {
        for signal in ["INT", "TERM", "HUP", "QUIT"] {
            for clock in ["paced", "virtual"] {
                let mut command = minivmm();
                command.arg("--kernel").arg(kernel).args(["--clock", clock]);
                command
                    .stdin(Stdio::piped())
                    .stdout(Stdio::piped())
                    .stderr(Stdio::piped());
                let mut child = Watched::new(command.spawn().unwrap());
                let _stdin = child.child.stdin.take();
                let mut stdout = child.child.stdout.take().unwrap();
                let mut bytes = vec![0; ready.len()];
                Read::read_exact(&mut stdout, &mut bytes).unwrap();
                assert_eq!(bytes, ready.as_bytes());
                std::thread::sleep(Duration::from_millis(20));
                kill(&child.child, signal);
                assert_refused(&child.output(), 2, &[&format!("SIG{signal}")]);
            }
        }
    }
}

// covers: bad-input/signals
#[test]
fn a_signal_gets_through_while_nobody_reads_the_output() {
    let folder = Folder::new();
    let chatter = folder.file(
        "kernel",
        guest(|a| {
            let mut again = a.create_label();
            a.set_label(&mut again).unwrap();
            print(a, "and so on ");
            a.jmp(again).unwrap();
        }),
    );
    let mut command = minivmm();
    command
        .arg("--kernel")
        .arg(chatter)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let mut child = Watched::new(command.spawn().unwrap());
    let stdout = child.child.stdout.take();
    // Long enough to fill a pipe.
    std::thread::sleep(Duration::from_millis(500));
    kill(&child.child, "TERM");
    assert_refused(&child.output(), 2, &["SIGTERM"]);
    drop(stdout);
}
