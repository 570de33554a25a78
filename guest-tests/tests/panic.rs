//! A Linux guest that panics: the run's status, and `--on-panic`.

use guest_tests::{Folder, full, in_minivmm, linux, minivmm, run, start, target};
use std::fs;
use std::path::Path;
use std::process::{Command, Output};
use std::time::{Duration, Instant};

const LIMIT: Duration = Duration::from_secs(300);
const SAYS: &str = "Kernel panic - not syncing: VFS: Unable to mount root fs";

/// The guest's kernel, which finds no root file system.
fn boot(cmdline: &str) -> Command {
    let mut command = in_minivmm(&linux().kernel);
    command.args(["--cmdline", &format!("console=ttyS0 quiet {cmdline}")]);
    command
}

// covers: panic/status
#[test]
fn a_panic_that_resets_the_machine_has_a_status_of_its_own() {
    let guest = run(&mut boot("panic=-1"), LIMIT).must_end_with(10);
    assert!(guest.console.contains(SAYS), "{}", guest.console);
    assert_eq!(guest.errors, "minivmm: the guest's Linux has panicked, on CPU 0\n");
    // A limit that ends a guest that has panicked says so, too.
    let limited = run(boot("panic=0").args(["--max-instructions", "2500000000"]), LIMIT).must_end_with(10);
    assert!(
        limited
            .errors
            .contains("the guest's Linux has panicked, on CPU 0; --max-instructions 2500000000: reached"),
        "{}",
        limited.errors
    );
    // And one that has not yet has its own.
    let early = run(boot("panic=0").args(["--max-instructions", "1000000000"]), LIMIT).must_end_with(8);
    assert!(!early.errors.contains("panicked"), "{}", early.errors);
}

// covers: panic/exit
#[test]
fn a_panic_that_would_stand_for_ever_ends_the_run_once_its_message_is_out() {
    let guest = run(boot("panic=0").args(["--on-panic", "exit"]), LIMIT).must_end_with(10);
    assert!(guest.console.contains(SAYS), "{}", guest.console);
    assert!(guest.console.contains("---[ end Kernel panic"), "{}", guest.console);
    assert_eq!(guest.errors, "minivmm: the guest's Linux has panicked, on CPU 0\n");
}

// covers: panic/stop
#[test]
fn a_guest_that_panics_is_held_where_panic_begins() {
    let folder = Folder::new("on-panic");
    let socket = folder.join("control");
    let mut command = boot("panic=-1");
    command
        .args(["--on-panic", "stop", "--control"])
        .arg(format!("unix:{}", socket.display()));
    let guest = start(&mut command, LIMIT);
    let ctl = |line: &str| -> Output {
        Command::new(minivmm())
            .arg("ctl")
            .arg(&socket)
            .arg(line)
            .output()
            .unwrap()
    };
    let begin = Instant::now();
    loop {
        let status = ctl("status");
        if String::from_utf8_lossy(&status.stdout).contains("\"paused\"") {
            break;
        }
        if begin.elapsed() > LIMIT / 2 {
            ctl("quit");
            let guest = guest.finish();
            panic!("it does not panic: {status:?}\n{}{}", guest.errors, guest.console);
        }
        std::thread::sleep(Duration::from_millis(200));
    }
    let info = String::from_utf8(ctl("monitor info").stdout).unwrap();
    assert!(info.contains(" panic, CPL 0"), "{info}");
    ctl("quit");
    let guest = guest.finish();
    assert!(!guest.console.contains("Kernel panic"), "{}", guest.console);
    assert!(
        guest
            .errors
            .contains("minivmm: the guest's Linux panics: it is held where `panic` begins"),
        "{}",
        guest.errors
    );
}

/// A guest whose kernel is told to crash, with the driver of the panic device or without.
fn crash(folder: &Folder, driver: bool, cmdline: &str) -> Command {
    let inject = folder.join("inject");
    fs::create_dir(&inject).unwrap();
    let mut load = String::new();
    for module in ["pvpanic.ko", "pvpanic-mmio.ko"] {
        fs::copy(target().join("guest/modules").join(module), inject.join(module)).unwrap();
        load += &format!("insmod {module} || exit 1\n");
    }
    let script = "cat /sys/bus/acpi/devices/QEMU0001:00/path; [ -e /sys/bus/platform/drivers/pvpanic-mmio/QEMU0001:00 ] && echo bound\n\
                  echo 'about to crash'; echo c >/proc/sysrq-trigger\n";
    folder.script("inject/run", &format!("{}{script}", if driver { &load } else { "" }));
    let mut command = in_minivmm(&linux().kernel);
    command.arg("--initrd").arg(&linux().initrd).arg("--inject").arg(inject);
    command.args(["--cmdline", &format!("console=ttyS0 quiet {cmdline}")]);
    command
}

/// A core file of a guest that was told to crash.
struct Core {
    bytes: Vec<u8>,
}

impl Core {
    fn of(path: &Path) -> Core {
        let bytes = fs::read(path).unwrap();
        fs::remove_file(path).unwrap();
        assert_eq!(bytes[..6], *b"\x7fELF\x02\x01");
        Core { bytes }
    }

    fn has(&self, text: &str) -> bool {
        memchr(&self.bytes, text.as_bytes())
    }

    fn word(&self, at: usize) -> u64 {
        u64::from_le_bytes(self.bytes[at..at + 8].try_into().unwrap())
    }

    /// What VMCOREINFO, a note of the first segment, says of a symbol.
    fn symbol(&self, name: &str) -> u64 {
        let (at, len) = (self.word(64 + 8) as usize, self.word(64 + 32) as usize);
        let notes = String::from_utf8_lossy(&self.bytes[at..at + len]).into_owned();
        let key = format!("SYMBOL({name})=");
        let value = notes.lines().find_map(|line| line.strip_prefix(&key));
        u64::from_str_radix(value.unwrap_or_else(|| panic!("no {key}")), 16).unwrap()
    }

    /// RIP of the first CPU: NT_PRSTATUS is the first note, its name is CORE, and RIP is the 17th register behind 112 bytes.
    fn rip(&self) -> u64 {
        self.word(self.word(64 + 8) as usize + 12 + 8 + 112 + 16 * 8)
    }
}

fn memchr(bytes: &[u8], text: &[u8]) -> bool {
    bytes.windows(text.len()).any(|window| window == text)
}

// covers: panic/dump, panic/pvpanic
#[test]
fn a_panic_leaves_a_core_file_with_the_driver_of_the_device_and_without() {
    for (driver, cmdline, where_it_is) in [
        (true, "panic=0", "where the kernel says that it has panicked"),
        (true, "panic=-1", "where the kernel says that it has panicked"),
        (false, "panic=0", "once the message is out"),
        (false, "panic=-1", "where it resets the machine"),
    ] {
        let what = format!("driver {driver}, {cmdline}: {where_it_is}");
        let folder = Folder::new("panic-dump");
        let core = folder.join("core");
        let mut command = crash(&folder, driver, cmdline);
        command.arg("--on-panic").arg(format!("dump={}", core.display()));
        let guest = run(&mut command, LIMIT).must_end_with(10);
        assert!(
            guest
                .console
                .contains("Kernel panic - not syncing: sysrq triggered crash"),
            "{what}\n{}",
            guest.console
        );
        assert!(guest.console.contains("\\_SB_.PEVT\n"), "{what}\n{}", guest.console);
        assert_eq!(guest.console.contains("\nbound\n"), driver, "{what}\n{}", guest.console);
        let lines: Vec<&str> = guest.errors.lines().collect();
        assert_eq!(lines.len(), 2, "{what}: {}", guest.errors);
        assert!(
            lines[0].starts_with(&format!("minivmm: --on-panic dump={}: step ", core.display())),
            "{}",
            lines[0]
        );
        assert!(lines[0].contains("with VMCOREINFO of Linux 6.1."), "{}", lines[0]);
        assert_eq!(lines[1], "minivmm: the guest's Linux has panicked, on CPU 0");
        let core = Core::of(&core);
        // The console's driver has the message in the log, of which memory has one copy or more.
        assert!(core.has("sysrq triggered crash"), "{what}");
        let (rip, text) = (core.rip(), core.symbol("_stext"));
        assert!(
            (text..text + (32 << 20)).contains(&rip),
            "{what}: {rip:#x} is not in the kernel at {text:#x}"
        );
        // Linux prints this line last, where it does not reset the machine: by then the driver has long said what it had to say.
        let last = core.has("---[ end Kernel panic - not syncing: sysrq");
        assert_eq!(last, !driver && cmdline == "panic=0", "{what}");
    }
}

// covers: panic/dump-bad
#[test]
fn a_dump_that_cannot_be_is_a_line_and_leaves_no_file() {
    let folder = Folder::new("panic-dump-bad");
    let core = folder.join("core");
    let dump = format!("dump={}", core.display());
    // No panic, no file.
    let fine = run(
        boot("panic=-1").args(["--on-panic", &dump, "--max-instructions", "1000000"]),
        LIMIT,
    );
    assert_eq!((fine.status, core.exists()), (Some(8), false), "{}", fine.errors);
    // A file system of the test's own, with less room than the dump takes.
    let small = folder.join("small");
    fs::create_dir(&small).unwrap();
    let alone = |script: &str| {
        let mut command = Command::new("unshare");
        command.args(["--user", "--map-root-user", "--mount", "sh", "-c", script]);
        command.arg(&small);
        command
    };
    let mount = "mount -t tmpfs -o size=1m none \"$0\"";
    if alone(mount).output().is_ok_and(|output| output.status.success()) {
        let program = boot("panic=-1");
        let mut command = alone(&format!("{mount} && \"$@\"; status=$?; ls \"$0\"; exit $status"));
        command
            .arg(program.get_program())
            .args(program.get_args())
            .args(["--serial", "null"]);
        let dump = format!("dump={}", small.join("core").display());
        let full = run(command.args(["--on-panic", &dump]), LIMIT).must_end_with(2);
        assert_eq!(
            full.errors,
            format!(
                "minivmm: --on-panic {dump}: the guest has panicked, and no dump is left of it: no space left on device\n"
            )
        );
        assert_eq!(full.console, "", "nothing is left");
    } else {
        println!("left out: this host lets nobody mount a file system of his own");
    }
    fs::write(&core, "mine").unwrap();
    let there = run(boot("").args(["--on-panic", &dump]), LIMIT).must_end_with(2);
    assert_eq!(
        there.errors,
        format!(
            "minivmm: --on-panic dump {}: exists already: give a new file\n",
            core.display()
        )
    );
    assert_eq!(fs::read(&core).unwrap(), b"mine");
    let nowhere = format!("dump={}", folder.join("none/core").display());
    let nowhere = run(boot("").args(["--on-panic", &nowhere]), LIMIT).must_end_with(2);
    assert!(
        nowhere.errors.contains("no such file") || nowhere.errors.contains("there is no folder"),
        "{}",
        nowhere.errors
    );
}

// covers: panic/dump-recorded
#[test]
fn a_recorded_panic_is_dumped_again_in_a_replay() {
    let folder = Folder::new("panic-recorded");
    let (first, again) = (folder.join("first"), folder.join("again"));
    let dump = |path: &Path| format!("dump={}", path.display());
    let session = folder.join("session");
    let mut command = crash(&folder, true, "panic=-1");
    command.args(["--record", session.to_str().unwrap(), "--on-panic", &dump(&first)]);
    let recorded = run(&mut command, LIMIT).must_end_with(10);
    let replay = |options: &[&str]| {
        let mut command = Command::new(minivmm());
        command
            .arg("replay")
            .arg(&session)
            .args(options)
            .args(["--serial", "null"]);
        run(&mut command, LIMIT)
    };
    let replayed = replay(&["--on-panic", &dump(&again)]);
    let step = |errors: &str| {
        errors
            .split(": step ")
            .nth(1)
            .map(|rest| rest.split(':').next().unwrap().to_string())
    };
    assert_eq!(step(&recorded.errors), step(&replayed.errors), "{}", replayed.errors);
    assert!(step(&replayed.errors).is_some(), "{}", recorded.errors);
    assert!(
        fs::read(&first).unwrap() == fs::read(&again).unwrap(),
        "the two core files differ"
    );
    // A replay that is asked for nothing leaves the session's own file alone.
    let plain = replay(&[]);
    assert!(!plain.errors.contains("dump"), "{}", plain.errors);
}

/// What drgn says of the thread that panicked.
const CRASHED: &str = "thread = prog.crashed_thread()\nprint(thread.object.comm.string_().decode())\n\
    for frame in thread.stack_trace(): print(frame.name)\n";

// covers: panic/drgn
#[test]
fn drgn_has_the_stack_of_the_thread_that_panicked() {
    if !full() {
        println!("left out: drgn, which the full form fetches with Debian's vmlinux");
        return;
    }
    let folder = Folder::new("panic-drgn");
    let mut command = crash(&folder, true, "panic=-1");
    command
        .current_dir(&*folder)
        .args(["--on-panic", "dump=core", "--cpus", "2"]);
    let guest = run(&mut command, LIMIT).must_end_with(10);
    let release = guest.errors.split("of Linux ").nth(1).unwrap().lines().next().unwrap();
    fs::write(folder.join("crashed.py"), CRASHED).unwrap();
    let mut drgn = Command::new(target().join("host/drgn/bin/drgn"));
    drgn.current_dir(&*folder).args(["-c", "core", "--main-symbols", "-s"]);
    drgn.arg(target().join("guest/debug").join(release).join("vmlinux"))
        .arg("crashed.py");
    let said = run(&mut drgn, LIMIT).must_end_with(0).console;
    let lines: Vec<&str> = said.lines().collect();
    // The script by its own name, or the shell by one of its names.
    assert!(["run", "sh", "ash"].contains(&lines[0]), "{said}");
    for name in ["panic", "sysrq_handle_crash", "write_sysrq_trigger", "vfs_write"] {
        assert!(lines.contains(&name), "{name}: {said}");
    }
}
