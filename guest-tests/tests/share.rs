//! Shared directories in a booted Linux, and commands that `minivmm run` runs in one.

use guest_tests::{linux, linux_in_minivmm, minivmm, on_host_cpu, run, target};
use std::fs;
use std::io::Write;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

const LIMIT: Duration = Duration::from_secs(500);

/// A folder of a test's own, removed with all that is in it.
struct Folder(PathBuf);

impl Folder {
    fn new() -> Self {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let path = std::env::temp_dir().join(format!("minivmm-share-test-{}-{count}", std::process::id()));
        fs::create_dir_all(path.join("shared")).unwrap();
        Folder(path.canonicalize().unwrap())
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    /// `minivmm run` in the shared folder, with these options and this command.
    fn command(&self, options: &[&str], command: &[&str]) -> Command {
        linux();
        let mut run = Command::new(minivmm());
        run.arg("run").arg("--kernel").arg(&linux().kernel);
        run.args(options).arg("--").args(command);
        run.current_dir(self.path("shared")).stdin(Stdio::null());
        run
    }

    fn run(&self, options: &[&str], command: &[&str]) -> Output {
        self.command(options, command).output().unwrap()
    }

    /// A script by the shell.
    fn shell(&self, options: &[&str], script: &str) -> Output {
        self.run(options, &["sh", "-c", script])
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Bytes that do not repeat.
fn pattern(len: usize, seed: u64) -> Vec<u8> {
    let mut state = seed;
    let word = |_| {
        state = state
            .wrapping_mul(0x5851_f42d_4c95_7f2d)
            .wrapping_add(0x1405_7b7e_f767_814f);
        (state ^ state >> 29).to_le_bytes()
    };
    (0..len.div_ceil(8)).flat_map(word).take(len).collect()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// What a command has said on standard output and standard error, and its exit status.
#[track_caller]
fn said(output: &Output) -> (String, String, i32) {
    (
        text(&output.stdout),
        text(&output.stderr),
        output.status.code().unwrap(),
    )
}

// covers: share/linux, share/confined, cli/share
#[test]
fn linux_mounts_a_shared_directory_and_does_with_it_what_it_does_with_others() {
    let folder = Folder::new();
    let big = pattern(3_000_001, 1);
    fs::write(folder.path("shared/big"), &big).unwrap();
    fs::write(folder.path("secret"), "secret").unwrap();
    symlink("../secret", folder.path("shared/out")).unwrap();
    fs::create_dir(folder.path("inject")).unwrap();
    fs::create_dir(folder.path("read")).unwrap();
    fs::write(folder.path("read/file"), "text").unwrap();
    for module in ["fuse.ko", "virtiofs.ko"] {
        let from = target().join("guest/modules").join(module);
        fs::copy(from, folder.path("inject").join(module)).unwrap();
    }
    let script = r#"#!/bin/sh
        fail() { echo "FAILED: $*"; exit 1; }
        load-modules; insmod fuse.ko && insmod virtiofs.ko || fail modules
        mkdir -p /a/b /r && mount -t virtiofs both /a/b && mount -t virtiofs read /r || fail mount
        cd /a/b
        cp big copy && cmp big copy || fail copy
        cat out && fail "a link has led out"
        echo 1 >one && mv one two && echo 2 >>two && [ "$(cat two)" = "1
2" ] || fail append
        mkdir d && ln two d/hard && [ "$(stat -c %h two)" = 2 ] || fail hard
        exec 3<>gone && rm gone && echo x >&3 && [ "$(cat /proc/self/fd/3)" = x ] || fail "removed while open"
        exec 3>&-
        mknod null c 1 3 && fail "a device was made"
        chmod 6711 two && [ "$(stat -c %a two)" = 711 ] || fail mode
        chown 4711 two && fail "given away"
        touch -d '2001-02-03 04:05:06' two && [ "$(stat -c %Y two)" = 981173106 ] || fail time
        truncate -s 1000000 copy && [ "$(stat -c %s copy)" = 1000000 ] || fail truncate
        mkfifo fifo && (echo through >fifo &) && [ "$(cat fifo)" = through ] || fail fifo
        for i in $(seq 300); do : >d/$i; done; [ "$(ls d | wc -l)" = 301 ] || fail list
        rm -r d fifo || fail remove
        cat /r/file; echo x >/r/file && fail "written to what is for reading"
        cd / && umount /a/b && mount -t virtiofs both /a/b && cmp -n 1000000 /a/b/big /a/b/copy || fail again
        echo; echo all holds
"#;
    let path = folder.path("inject/run");
    fs::write(&path, script).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    let mut command = linux_in_minivmm("console=ttyS0 panic=-1 quiet");
    command
        .args([
            "--inject",
            "inject",
            "--share",
            "both=shared",
            "--share",
            "read=read,ro",
        ])
        .current_dir(&folder.0);
    let guest = run(&mut command, LIMIT).must_end_with(0);
    assert!(
        guest.console.contains("\nall holds\n"),
        "{}\n{}",
        guest.console,
        guest.errors
    );
    assert!(!guest.console.contains("secret\n"), "{}", guest.console);
    for word in ["I/O error", "Oops", "BUG:", "WARNING:", "Call Trace"] {
        assert!(!guest.console.contains(word), "{word}\n{}", guest.console);
    }
    assert!(fs::read(folder.path("shared/big")).unwrap() == big);
    assert!(fs::read(folder.path("shared/copy")).unwrap() == big[..1_000_000]);
    assert_eq!(fs::read_to_string(folder.path("shared/two")).unwrap(), "1\n2\n");
    let two = fs::metadata(folder.path("shared/two")).unwrap();
    assert_eq!((two.mode() & 0o7777, two.mtime()), (0o711, 981_173_106));
    assert_eq!(fs::read_to_string(folder.path("read/file")).unwrap(), "text");
}

// covers: run/streams, run/status, run/kernel-messages
#[test]
fn a_command_has_its_streams_arguments_environment_and_status() {
    let folder = Folder::new();
    let mut command = folder.command(
        &[],
        &[
            "sh",
            "-c",
            "echo \"$1 $VALUE\"; pwd; echo bad >&2; exit 7",
            "sh",
            "an argument",
        ],
    );
    let output = command.env("VALUE", "of the environment").output().unwrap();
    let here = folder.path("shared").display().to_string();
    let out = format!("an argument of the environment\n{here}\n");
    assert_eq!(said(&output), (out, "bad\n".into(), 7));

    // Every byte, both ways, and the end.
    let mut bytes: Vec<u8> = (0..=255).collect();
    bytes.extend(pattern(100_000, 2));
    bytes.extend([0x7d, 0x7d, b'E', 0x7d]);
    let mut child = folder
        .command(&[], &["cat"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut input = child.stdin.take().unwrap();
    let sent = bytes.clone();
    let writer = std::thread::spawn(move || input.write_all(&sent).unwrap());
    let output = child.wait_with_output().unwrap();
    writer.join().unwrap();
    assert!(output.stdout == bytes, "{} bytes came back", output.stdout.len());
    assert!(output.status.success());

    // One that does not read what it is sent ends all the same, and one that is killed says so.
    let mut child = folder.command(&[], &["sh", "-c", "kill -9 $$"]);
    let child = child
        .stdin(Stdio::from(fs::File::open("/dev/zero").unwrap()))
        .output()
        .unwrap();
    assert_eq!(said(&child), (String::new(), String::new(), 137));

    // The kernel's messages are there for who asks.
    let (out, errors, status) = said(&folder.run(&["-v"], &["uname", "-a"]));
    assert!(out.starts_with("Linux minivmm 6.1."), "{out}");
    assert_eq!((out.lines().count(), status), (1, 0));
    assert!(errors.contains("] Linux version 6.1."), "{errors}");
}

// covers: run/bus
#[test]
fn a_commands_devices_are_where_its_kernel_has_drivers() {
    let folder = Folder::new();
    let input = pattern(3 << 20, 3);
    fs::write(folder.path("input"), &input).unwrap();
    // The modules of a kernel that has neither virtio-pci nor virtio-console.
    let few = folder.path("few/kernel");
    fs::create_dir_all(&few).unwrap();
    let release = minivmm::run::release(&linux().kernel).unwrap();
    let all = target().join("guest/lib/modules").join(release);
    let find = Command::new("find")
        .arg(&all)
        .args(["-name", "*.ko*"])
        .output()
        .unwrap();
    for path in text(&find.stdout).lines().map(PathBuf::from) {
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        if !name.starts_with("virtio_pci") && !name.starts_with("virtio_console") {
            symlink(&path, few.join(name)).unwrap();
        }
    }
    let few = folder.path("few").display().to_string();
    // Nobody says what is built in, so that the guest finds out.
    let (_, errors, status) = said(&folder.run(&["--modules", &few, "--bus", "pci"], &["true"]));
    assert!(
        errors.contains("finds no virtio device: it takes one with CONFIG_VIRTIO_PCI, or --bus mmio"),
        "{errors}"
    );
    assert_eq!(status, 125);
    fs::write(folder.path("few/modules.builtin"), "").unwrap();
    let script = "ls /sys/bus/pci/drivers/virtio-pci 2>/dev/null | grep -c 0000:; ls /sys/bus/acpi/devices | grep -c LNRO0005; \
                  echo $(cat /sys/class/virtio-ports/*/name 2>/dev/null); md5sum; cat input | md5sum";
    let has = |options: &[&str], expected: [&str; 3]| {
        let mut command = folder.command(options, &["sh", "-c", script]);
        command.current_dir(&folder.0);
        let output = command.stdin(fs::File::open(folder.path("input")).unwrap()).output();
        let (out, errors, status) = said(&output.unwrap());
        let lines: Vec<&str> = out.lines().collect();
        let [pci, acpi, port, sent, read] = lines[..] else {
            panic!("{options:?}: {out}{errors}")
        };
        // Entropy, the root, the current directory and the one for output; a console.
        assert_eq!([pci, acpi, port], expected, "{options:?}: {out}{errors}");
        assert_eq!((sent, status), (read, 0), "{options:?}: {out}{errors}");
    };
    has(&[], ["5", "0", "input"]);
    has(&["--bus", "mmio"], ["0", "5", "input"]);
    has(&["--modules", &few], ["0", "4", ""]);
    let (_, errors, status) = said(&folder.run(&["--modules", &few, "--bus", "pci"], &["true"]));
    assert!(errors.contains("there is no module virtio_pci"), "{errors}");
    assert!(errors.contains("CONFIG_VIRTIO_PCI"), "{errors}");
    assert_eq!((errors.lines().count(), status), (1, 125));
}

// covers: run/failures
#[test]
fn what_is_not_the_commands_doing_has_a_status_and_a_line_of_its_own() {
    let folder = Folder::new();
    let line = |options: &[&str], command: &[&str]| {
        let (out, errors, status) = said(&folder.run(options, command));
        assert_eq!(out, "");
        (errors, status)
    };
    assert_eq!(
        line(&[], &["nosuch"]),
        ("minivmm: run: nosuch: no such file or directory\n".into(), 127)
    );
    assert_eq!(
        line(&[], &["/etc/passwd"]),
        ("minivmm: run: /etc/passwd: permission denied\n".into(), 126)
    );
    let (errors, status) = line(&["--root", "/nowhere"], &["true"]);
    assert_eq!(
        (errors.as_str(), status),
        ("minivmm: --root /nowhere: no such file or directory\n", 125)
    );
    let (errors, status) = line(&["--modules", "."], &["true"]);
    assert!(
        errors.starts_with("minivmm: --modules .: has no kernel modules for Linux 6.1."),
        "{errors}"
    );
    assert_eq!((errors.lines().count(), status), (1, 125));
    // A kernel without its modules: the option that it lacks is named.
    fs::copy(&linux().kernel, folder.path("vmlinuz")).unwrap();
    let mut command = Command::new(minivmm());
    command
        .args(["run", "--kernel", "../vmlinuz", "true"])
        .current_dir(folder.path("shared"));
    let (out, errors, status) = said(&command.stdin(Stdio::null()).output().unwrap());
    assert_eq!((out.as_str(), status), ("", 125), "{errors}");
    assert!(
        errors.contains("has no virtiofs: it takes one with CONFIG_VIRTIO_FS"),
        "{errors}"
    );
    // A kernel that panics is shown with its last words.
    let (errors, status) = line(&["--append", "init=/nowhere rdinit=/nowhere"], &["true"]);
    assert!(errors.contains("the guest ended before the command did"), "{errors}");
    assert!(errors.contains("Kernel panic"), "{errors}");
    assert_eq!(status, 125);
    let (errors, status) = line(&["--timeout", "1"], &["sh", "-c", "while :; do :; done"]);
    assert!(errors.starts_with("minivmm: --timeout 1: reached"), "{errors}");
    assert_eq!(status, 125);
}

// covers: run/files
#[test]
fn a_command_writes_where_it_is_and_nowhere_else() {
    let folder = Folder::new();
    for name in ["rw", "ro", "other"] {
        fs::create_dir(folder.path(name)).unwrap();
        fs::write(folder.path(name).join("file"), name).unwrap();
    }
    let [rw, ro, other] = ["rw", "ro", "other"].map(|name| folder.path(name).display().to_string());
    let script = format!(
        "umask 027; echo made >here; echo made >{rw}/made && echo made >{other}/made && cat {other}/made {other}/file; \
         (echo made >{ro}/made) 2>/dev/null || cat {ro}/file; touch /usr/bin/made && echo \"in the guest alone\"; \
         exec >>log; echo logged"
    );
    let output = folder.shell(&["--rw", &rw, "--ro", &ro], &script);
    let (out, errors, status) = said(&output);
    assert_eq!(out, "made\notherroin the guest alone\n", "{errors}");
    assert_eq!(status, 0);
    assert_eq!(fs::read(folder.path("shared/here")).unwrap(), b"made\n");
    assert_eq!(fs::read(folder.path("shared/log")).unwrap(), b"logged\n");
    assert_eq!(fs::metadata(folder.path("shared/here")).unwrap().mode() & 0o777, 0o640);
    assert_eq!(fs::read(folder.path("rw/made")).unwrap(), b"made\n");
    assert!(!folder.path("ro/made").exists() && !folder.path("other/made").exists());
    assert!(!PathBuf::from("/usr/bin/made").exists());
}

// covers: run/perf
#[test]
fn perf_in_the_guest_leaves_its_data_in_the_current_directory() {
    let folder = Folder::new();
    let program = target().join("guest/programs/collatz").display().to_string();
    let command = ["perf", "record", "-e", "intel_pt//u", &program];
    let (_, errors, status) = said(&folder.run(&["--pt"], &command));
    assert_eq!(status, 0, "{errors}");
    assert!(errors.contains("[ perf record: Captured and wrote "), "{errors}");
    let script = Command::new("perf")
        .args(["script", "--call-trace", "-i", "perf.data"])
        .current_dir(folder.path("shared"))
        .output()
        .unwrap();
    let calls = text(&script.stdout);
    for name in ["main", "steps", "even", "odd"] {
        let has = |line: &str| line.trim_end().ends_with(name);
        assert!(calls.lines().any(has), "{name}\n{calls}\n{}", text(&script.stderr));
    }
}

// covers: run/terminal
#[test]
fn a_command_on_a_terminal_has_one_of_its_size() {
    let folder = Folder::new();
    let run = folder.command(&[], &["sh", "-c", "tty; stty size; test -t 2 && exit 3"]);
    let words = std::iter::once(run.get_program()).chain(run.get_args());
    let words: Vec<String> = words.map(|word| format!("'{}'", word.to_str().unwrap())).collect();
    let line = format!("stty rows 33 cols 99; {}", words.join(" "));
    let output = Command::new("script")
        .args(["-qec", &line, "/dev/null"])
        .current_dir(folder.path("shared"))
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let (out, _, status) = said(&output);
    assert!(out.contains("/dev/pts/0") && out.contains("33 99"), "{out}");
    assert_eq!(status, 3);
}

// covers: share/repeats
#[test]
fn a_run_repeats_while_the_files_are_as_they_were() {
    let folder = Folder::new();
    fs::write(folder.path("shared/file"), pattern(500_000, 3)).unwrap();
    fs::create_dir(folder.path("inject")).unwrap();
    for module in ["fuse.ko", "virtiofs.ko"] {
        let from = target().join("guest/modules").join(module);
        fs::copy(from, folder.path("inject").join(module)).unwrap();
    }
    let script = "#!/bin/sh\nload-modules; insmod fuse.ko && insmod virtiofs.ko\nmkdir /s && mount -t virtiofs s /s\n\
                  md5sum /s/file; ls -lai /s\n";
    let path = folder.path("inject/run");
    fs::write(&path, script).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    let hash = || {
        let mut command = linux_in_minivmm("console=ttyS0 panic=-1 quiet");
        command
            .args(["--inject", "inject", "--share", "s=shared,ro", "--stats"])
            .current_dir(&folder.0);
        let guest = run(&mut command, LIMIT).must_end_with(0);
        let line = guest.errors.lines().find(|line| line.starts_with("state hash:"));
        (guest.console.clone(), line.expect("--stats says it").to_string())
    };
    assert_eq!(hash(), hash());
}

// covers: share/recorded, share/overlay
#[test]
fn a_recorded_session_with_a_share_is_replayed_to_the_bit_without_the_files() {
    let folder = Folder::new();
    fs::write(folder.path("shared/file"), pattern(300_000, 4)).unwrap();
    fs::create_dir(folder.path("inject")).unwrap();
    for module in ["fuse.ko", "virtiofs.ko"] {
        let from = target().join("guest/modules").join(module);
        fs::copy(from, folder.path("inject").join(module)).unwrap();
    }
    let script = "#!/bin/sh\nload-modules; insmod fuse.ko && insmod virtiofs.ko\nmkdir /s && mount -t virtiofs s /s\n\
                  md5sum /s/file; ls -la /s; echo changed >/s/file; mkdir /s/new && mv /s/file /s/new && cat /s/new/file\n\
                  dd if=/sample of=/s/written bs=1000 count=99 2>/dev/null && rm -r /s/new && md5sum /s/written && ls -la /s; sync\n";
    let path = folder.path("inject/run");
    fs::write(&path, script).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    let mut command = linux_in_minivmm("console=ttyS0 panic=-1 quiet");
    command
        .args([
            "--inject", "inject", "--share", "s=shared", "--record", "session", "--stats",
        ])
        .current_dir(&folder.0);
    let hash = |errors: &str| {
        let line = errors.lines().find(|line| line.starts_with("state hash:"));
        line.unwrap_or_else(|| panic!("{errors}")).to_string()
    };
    let recorded = run(&mut command, LIMIT).must_end_with(0);
    assert!(
        recorded.console.contains("changed\n"),
        "{}\n{}",
        recorded.console,
        recorded.errors
    );
    // The host's file is as it was.
    assert!(fs::read(folder.path("shared/file")).unwrap() == pattern(300_000, 4));
    assert!(!folder.path("shared/written").exists());
    // Each piece that was read is kept once, and little else.
    let kept = fs::metadata(folder.path("session/shares")).unwrap().len();
    assert!((300_000..310_000).contains(&kept), "{kept}");

    fs::remove_dir_all(folder.path("shared")).unwrap();
    let mut replay = Command::new(minivmm());
    replay.args(["replay", "session", "--stats"]).current_dir(&folder.0);
    let replayed = run(&mut replay, LIMIT).must_end_with(0);
    assert_eq!(replayed.console, recorded.console);
    assert_eq!(hash(&replayed.errors), hash(&recorded.errors));
}

// covers: run/recorded
#[test]
fn a_recorded_command_is_replayed_and_has_written_nothing_here() {
    let folder = Folder::new();
    let session = folder.path("session").display().to_string();
    let script = "echo made >made; cat made /etc/passwd; ls -la . /usr/bin | md5sum; echo bad >&2";
    let options = ["--record", &session, "--stats"];
    let recorded = said(&folder.shell(&options, script));
    assert_eq!(recorded.2, 0, "{}", recorded.1);
    assert!(recorded.0.starts_with("made\nroot:"), "{}", recorded.0);
    assert!(!folder.path("shared/made").exists());
    let replay = Command::new(minivmm())
        .args(["replay", "--serial", "null", "--stats", &session])
        .current_dir(&folder.0)
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let replayed = said(&replay);
    assert_eq!(replayed.0, recorded.0, "{}", replayed.1);
    let hash = |errors: &str| {
        errors
            .lines()
            .find(|line| line.starts_with("state hash:"))
            .map(str::to_string)
    };
    assert_eq!(hash(&replayed.1), hash(&recorded.1));
    assert!(hash(&replayed.1).is_some(), "{}", replayed.1);
}

/// Without `--cpu-model` the model depends on what the host has. The session goes to a host that has less, and to one that has other things: it
/// begins there as it was recorded, which a machine of another model would not. QEMU's user-mode emulation is slow, and no part: a million steps.
// covers: run/recorded-choices
#[test]
fn a_command_recorded_without_a_model_is_replayed_on_hosts_of_other_cpus() {
    let folder = Folder::new();
    let session = folder.path("session").display().to_string();
    let recorded = said(&folder.shell(&["--record", &session], "true"));
    assert_eq!(recorded.2, 0, "{}", recorded.1);
    // No AVX2, so that minivmm's own choice is westmere; and all that QEMU emulates.
    for cpu in ["Nehalem", "max"] {
        let mut replay = Command::new(minivmm());
        replay.args(["replay", "--serial", "null", "--max-instructions", "1000000", &session]);
        let mut replay = on_host_cpu(cpu, &replay);
        replay.current_dir(&folder.0);
        run(&mut replay, LIMIT).must_end_with(8);
    }
}

// covers: run/matrix
#[test]
fn a_command_runs_on_several_models_with_one_table() {
    let folder = Folder::new();
    linux();
    let output = Command::new(minivmm())
        .args(["matrix", "--run", "--kernel"])
        .arg(&linux().kernel)
        .args([
            "--model",
            "p6",
            "westmere",
            "haswell",
            "--",
            "grep",
            "-q",
            "avx2",
            "/proc/cpuinfo",
        ])
        .current_dir(folder.path("shared"))
        .output()
        .unwrap();
    let (out, errors, status) = said(&output);
    let rows: Vec<&str> = out
        .lines()
        .find(|line| line.starts_with("grep"))
        .unwrap_or_default()
        .split_whitespace()
        .collect();
    assert_eq!(rows, ["grep", "-", "FAIL", "ok"], "{out}\n{errors}");
    assert!(out.contains("the command's exit status is 1"), "{out}");
    assert_eq!(status, 1);
}
