//! Debian's gdb debugs guests on this host's KVM: in the software engine as long as it has something to stop for that KVM does
//! not deliver, else in KVM.
//! Where there is no KVM the tests say so and skip.

use guest_tests::bare::image;
use guest_tests::{Folder, Outcome, Running, in_minivmm_on_kvm, kvm_is_missing, run, start};
use minivmm::kvm::Host;
use minivmm::matrix::tap::{Point, Report};
use minivmm::{Console, MachineConfig, Run, SerialTarget};
use std::collections::BTreeSet;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

const LIMIT: Duration = Duration::from_secs(120);

/// A guest on KVM that gdb can connect to.
struct Guest {
    folder: Folder,
    running: Running,
}

impl Guest {
    /// Of 32-bit code at 100020H.
    fn code(code: &[u8], options: &[&str]) -> Guest {
        let flags = 1u32 << 16;
        let checksum = 0u32.wrapping_sub(0x1bad_b002).wrapping_sub(flags);
        let words = [0x1bad_b002, flags, checksum, 0x10_0000, 0x10_0000, 0, 0, 0x10_0020];
        let mut bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        bytes.extend(code);
        let folder = Folder::new("gdb-kvm");
        let kernel = folder.join("kernel");
        std::fs::write(&kernel, bytes).unwrap();
        Self::start(folder, &kernel, options)
    }

    fn start(folder: Folder, kernel: &Path, options: &[&str]) -> Guest {
        let mut command = in_minivmm_on_kvm(kernel);
        let socket = folder.join("gdb");
        command.arg("--gdb").arg(format!("unix:{}", socket.display()));
        let running = start(command.arg("--stats").args(options), LIMIT);
        let end = Instant::now() + LIMIT;
        while !socket.exists() {
            assert!(Instant::now() < end, "no socket");
            std::thread::sleep(Duration::from_millis(5));
        }
        Guest { folder, running }
    }

    fn command(&self, script: &str) -> Command {
        let mut gdb = Command::new("gdb");
        gdb.args(["-nx", "-batch", "-ex", "set pagination off", "-ex", "set confirm off"]);
        gdb.arg("-ex")
            .arg(format!("target remote {}", self.folder.join("gdb").display()));
        let file = self.folder.join("script");
        std::fs::write(&file, script).unwrap();
        gdb.arg("-x").arg(file);
        gdb
    }

    fn gdb(&self, script: &str) -> String {
        let outcome = run(&mut self.command(script), LIMIT);
        outcome.console + &outcome.errors
    }

    fn finish(self) -> Outcome {
        self.running.finish()
    }
}

/// Each in what follows the one before.
#[track_caller]
fn says(text: &str, parts: &[&str]) {
    let mut rest = text;
    for part in parts {
        match rest.find(part) {
            Some(at) => rest = &rest[at + part.len()..],
            None => panic!("{part:?} is not in what follows:\n{rest}\nof\n{text}"),
        }
    }
}

// covers: gdb/kvm
#[test]
fn on_kvm_it_stops_steps_and_watches_to_the_instruction() {
    if kvm_is_missing("gdb on KVM") {
        return;
    }
    // mov ecx, 4; again: inc edx; mov [200000H], edx; mov ebx, [200008H]; loop again; out F4H, al
    let code = [
        0xb9, 4, 0, 0, 0, 0x42, 0x89, 0x15, 0, 0, 0x20, 0, 0x8b, 0x1d, 8, 0, 0x20, 0, 0xe2, 0xf1, 0xe6, 0xf4,
    ];
    let guest = Guest::code(&code, &["--paused", "--serial", "null"]);
    let said = guest.gdb(
        "print/x $rip\nstepi\nprint $rcx\n\
         hbreak *0x100025\ncontinue\nprint $rcx\ndelete\n\
         watch *(int *)0x200000\ncontinue\nprint/x $rip\ndelete\n\
         rwatch *(int *)0x200008\ncontinue\nprint/x $rip\ndelete\n\
         set $rdx = 0x41\nset {int}0x200008 = 0x1234\nset $rcx = 2\nstepi\nstepi\nstepi\nstepi\nprint/x $rbx\n\
         print $rdx\nhbreak *0x100034\ncontinue\ndelete\nset $eax = 9\ncontinue\n",
    );
    says(
        &said,
        &[
            "$1 = 0x100020",
            "$2 = 4",
            "Breakpoint 1, 0x0000000000100025",
            "$3 = ",
            "Hardware watchpoint 2: *(int *)0x200000",
            "Old value",
            "$4 = 0x10002c",
            "Hardware read watchpoint 3: *(int *)0x200008",
            "$5 = 0x100032",
            "$6 = 0x1234",
            "$7 = 66",
            "Breakpoint 4, 0x0000000000100034",
            "exited with code 023",
        ],
    );
    assert_eq!(guest.finish().status, Some(19));
}

// covers: gdb/kvm, kvm/points, linux-guest/debug-probe
#[test]
fn four_breakpoints_are_kvms_and_a_fifth_is_the_engines() {
    if kvm_is_missing("breakpoints in KVM") {
        return;
    }
    let kinds = Host::open().and_then(|host| host.guest_debug()).unwrap();
    // mov ecx, 50000; again: inc edx; loop again; inc ebx, five times; mov al, 9; out F4H, al
    let code = [
        0xb9, 0x50, 0xc3, 0, 0, 0x42, 0xe2, 0xfd, 0x43, 0x43, 0x43, 0x43, 0x43, 0xb0, 9, 0xe6, 0xf4,
    ];
    let guest = Guest::code(&code, &["--paused", "--serial", "null"]);
    let said = guest.gdb(
        "set breakpoint always-inserted on\nhbreak *0x100028\nbreak *0x100029\nmonitor info\n\
         continue\nprint $edx\ncontinue\nprint $ebx & 15\n\
         hbreak *0x10002a\nhbreak *0x10002b\nhbreak *0x10002c\nmonitor info\n\
         continue\ncontinue\ndelete\ncontinue\n",
    );
    let (two, five) = match kinds.serves_breakpoints() {
        true => (
            "; 2 of 4 debug registers in use",
            "there are more than the processor's four",
        ),
        false => ("the software engine has the guest", "the software engine has the guest"),
    };
    says(
        &said,
        &[
            "Breakpoint 1, 0x0000000000100028",
            "= 50000",
            "Breakpoint 2, 0x0000000000100029",
            "= 1",
            "Breakpoint 3, 0x000000000010002a",
            "Breakpoint 4, 0x000000000010002b",
            "exited with code 023",
        ],
    );
    // gdb has it on its standard error.
    says(
        &said,
        &["debugger: KVM delivers ", two, "debugger: KVM delivers ", five],
    );
    let outcome = guest.finish();
    let steps = outcome.errors.lines().find_map(|line| line.strip_prefix("steps:"));
    let steps: u64 = steps
        .and_then(|line| line.split_whitespace().next()?.parse().ok())
        .unwrap_or_else(|| panic!("{outcome:?}"));
    assert_eq!(steps < 1000, kinds.serves_breakpoints(), "{steps} steps in the engine");
}

// covers: gdb/kvm
#[test]
fn it_interrupts_a_guest_that_runs_in_kvm_and_lets_it_go_on_there() {
    if kvm_is_missing("interrupting on KVM") {
        return;
    }
    // again: inc dword [200000H]; inc edx; mov [200008H], edx; jmp again
    let code = [0xff, 0x05, 0, 0, 0x20, 0, 0x42, 0x89, 0x15, 8, 0, 0x20, 0, 0xeb, 0xf1];
    let guest = Guest::code(&code, &["--serial", "null"]);
    // It runs before anybody comes, and goes on after he has gone.
    let mut counts = Vec::new();
    for _ in 0..2 {
        let said = guest.gdb(
            "python print('count', int(gdb.parse_and_eval('*(unsigned *)0x200000')), \
             int(gdb.parse_and_eval('$rdx')) & 0xffffffff, hex(int(gdb.parse_and_eval('$rip'))))\ndetach\n",
        );
        let line = said.lines().find(|line| line.starts_with("count ")).expect(&said);
        let words: Vec<&str> = line.split(' ').collect();
        let (count, edx): (u64, u64) = (words[1].parse().unwrap(), words[2].parse().unwrap());
        assert!(count == edx || count == edx + 1, "{said}");
        assert!(words[3].starts_with("0x10002"), "{said}");
        counts.push(count);
        std::thread::sleep(Duration::from_millis(300));
    }
    assert!(counts[0] < counts[1], "{counts:?}");
    let mut gdb = guest.command("echo ready\\n\ncontinue\nprint/x $rip\nstepi\nstepi\nprint/x $rip\nkill\n");
    let mut gdb = start(&mut gdb, LIMIT);
    assert!(gdb.wait_for("ready").is_some());
    let pid = gdb.id().to_string();
    let interrupter = std::thread::spawn(move || {
        let mut there = true;
        while there {
            std::thread::sleep(Duration::from_secs(1));
            let killed = Command::new("kill").args(["-INT", &pid]).stderr(Stdio::null()).status();
            there = killed.unwrap().success();
        }
    });
    let outcome = gdb.finish();
    interrupter.join().unwrap();
    says(&outcome.console, &["SIGINT", "$1 = 0x10002", "$2 = 0x10002"]);
    let outcome = guest.finish();
    assert_eq!(outcome.status, Some(0), "gdb's kill ends the machine");
    // A second and more of spinning, and the engine has had some milliseconds of it.
    let line = outcome.errors.lines().find(|line| line.starts_with("handovers:"));
    let line = line.expect(&outcome.errors);
    let ms: f64 = line
        .split_whitespace()
        .rev()
        .nth(4)
        .and_then(|word| word.parse().ok())
        .unwrap_or_else(|| panic!("{line}"));
    assert!(ms < 0.5, "{line}");
}

// covers: gdb/kvm
#[test]
fn a_triple_fault_on_kvm_is_shown_before_it_ends_the_machine() {
    if kvm_is_missing("a triple fault on KVM") {
        return;
    }
    // mov eax, 7; ud2
    let code = [0xb8, 7, 0, 0, 0, 0x0f, 0x0b];
    let guest = Guest::code(&code, &["--paused", "--serial", "null"]);
    let said = guest.gdb("continue\nprint $rax\ncontinue\n");
    says(&said, &["SIGABRT", "= 7", "exited with code 04"]);
    guest.finish().must_end_with(4);
}

// covers: gdb/kvm
#[test]
fn the_guests_own_breakpoints_are_kept() {
    if kvm_is_missing("the guest's own breakpoints on KVM") {
        return;
    }
    let kernel = image("dr");
    let mut command = in_minivmm_on_kvm(&kernel);
    let plain = passed(&run(&mut command, LIMIT));
    assert!(plain.len() > 12, "{plain:?}");
    // More than the processor's four, and fewer.
    for points in [6, 3] {
        let debugged = debugged(&kernel, points);
        let lost: Vec<_> = plain.difference(&debugged).collect();
        assert!(lost.is_empty(), "{points}: {lost:?}");
    }
}

/// Which of a guest's tests pass.
fn passed(outcome: &Outcome) -> BTreeSet<String> {
    let report = Report::read(&outcome.console).unwrap_or_else(|| panic!("{outcome:?}"));
    let passed = report.points.iter().filter(|(_, point)| *point == Point::Passed);
    passed.map(|(name, _)| name.clone()).collect()
}

/// The same where gdb stops it a few times.
fn debugged(kernel: &Path, points: usize) -> BTreeSet<String> {
    // Places that its tests come to, found by letting it run in the engine.
    let config = MachineConfig {
        memory: 64 << 20,
        ..MachineConfig::new(kernel)
    };
    let mut vm = Run::new(&config).unwrap();
    let mut console = Console::open(&SerialTarget::Buffer, &[], vm.line()).unwrap();
    let mut places = BTreeSet::new();
    while vm.run_for(&mut console, 9973).unwrap().is_none() {
        places.insert(vm.cpu_state(0).unwrap().rip);
    }
    let mut script = String::new();
    for place in places.iter().step_by(places.len().div_ceil(points)) {
        script += &format!("thbreak *{place:#x}\n");
    }
    let stops = points - points / 3;
    script += &format!("set $n = 0\nwhile $n < {stops}\n");
    script += "continue\nset $n = $n + 1\nend\nstepi\ndelete\ndetach\n";
    let guest = Guest::start(
        Folder::new("gdb-kvm"),
        kernel,
        &["--paused", "--serial", "stdio", "--memory", "64M"],
    );
    let said = guest.gdb(&script);
    assert!(said.matches("\nTemporary breakpoint ").count() >= stops, "{said}");
    passed(&guest.finish())
}
