//! Questions to a session of Debian's kernel that ended in a panic, against an observer that has seen every write.

use std::path::Path;
use std::process::Command;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use guest_tests::{Folder, linux_in_minivmm, minivmm, run};
use minivmm::recording::GuestMemory;
use minivmm::{Console, MachineConfig, Run, StopReason, cli, replay_command};
use trace::linux::Kernel;
use x86::watch::{Access, AccessKind, Effects, Interest, Processor, Range, Watch};

const LIMIT: Duration = Duration::from_secs(600);

/// Words of the kernel's: one that each tick writes, one that `panic` writes once, and a string that is never written.
const WORDS: [(&str, u64); 3] = [("jiffies", 8), ("panic_cpu", 4), ("linux_banner", 8)];

/// A write to one of them, or `None` for a call of `panic`: CPU, steps with the instruction, and the instruction.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Seen {
    word: Option<usize>,
    cpu: usize,
    step: u64,
    ip: u64,
}

/// Sees everything that is done to the words. Nothing of the debugger's is in it, nothing stops and nothing goes back.
struct Witness {
    cpu: usize,
    ranges: Vec<Range>,
    panic: [u64; 1],
    seen: Arc<Mutex<Vec<Seen>>>,
}

impl Watch for Witness {
    fn interest(&mut self, _: &mut dyn Processor) -> Interest {
        Interest {
            ranges: true,
            ..Interest::NOTHING
        }
    }

    fn ranges(&self) -> &[Range] {
        &self.ranges
    }

    fn boundaries(&self) -> &[u64] {
        &self.panic
    }

    fn generation(&self) -> u64 {
        1
    }

    fn before(&mut self, address: u64, cpu: &mut dyn Processor) -> Effects {
        if address == self.panic[0] {
            self.saw(None, cpu.step(), address);
        }
        Effects::NONE
    }

    fn access(&mut self, access: &Access, cpu: &mut dyn Processor) -> Effects {
        let last = access.address + u64::from(access.size) - 1;
        let met = |range: &Range| access.address <= range.last && last >= range.first;
        if access.kind != AccessKind::Read
            && let Some(word) = self.ranges.iter().position(met)
        {
            self.saw(Some(word), cpu.step(), access.ip);
        }
        Effects::NONE
    }
}

impl Witness {
    fn saw(&self, word: Option<usize>, step: u64, ip: u64) {
        let cpu = self.cpu;
        self.seen.lock().unwrap().push(Seen { word, cpu, step, ip });
    }
}

fn replayed(session: &Path) -> (Run, Console) {
    let words = ["minivmm", "replay", session.to_str().unwrap(), "--serial", "null"];
    let cli::Job::Replay(options) = cli::parse(words.map(std::ffi::OsString::from)).unwrap() else {
        panic!("no replay")
    };
    let config: MachineConfig = replay_command::prepare(&options).unwrap();
    let run = Run::new(&config).unwrap();
    let console = Console::open(&config.serial, &[], run.line()).unwrap();
    (run, console)
}

fn to_the_end(run: &mut Run, console: &mut Console) {
    let reason = run.run(console).unwrap();
    let StopReason::Ended(end) = reason else {
        panic!("{reason:?}")
    };
    assert!(end.is_the_guests(), "{end:?}");
}

/// What is true: the addresses of the words, and everything that was done to them.
fn witnessed(session: &Path) -> (Vec<u64>, Vec<Seen>) {
    let (mut run, mut console) = replayed(session);
    to_the_end(&mut run, &mut console);
    let kernel = Kernel::find(&mut GuestMemory::new(run.machine().memory())).expect("a kernel");
    let address = |name: &str| kernel.symbols().address(name).unwrap_or_else(|| panic!("no {name}"));
    let words: Vec<u64> = WORDS.iter().map(|(name, _)| address(name)).collect();
    let panic = [address("panic")];
    drop(run);
    let (mut run, mut console) = replayed(session);
    let seen = Arc::new(Mutex::new(Vec::new()));
    for cpu in 0..run.cpu_count() {
        let range = |(first, (_, len)): (&u64, &(&str, u64))| Range {
            first: *first,
            last: first + len - 1,
            ports: false,
            reads: false,
            writes: true,
        };
        let witness = Witness {
            cpu,
            ranges: words.iter().zip(&WORDS).map(range).collect(),
            panic,
            seen: Arc::clone(&seen),
        };
        run.machine().observe(cpu, Some(Box::new(witness)));
    }
    to_the_end(&mut run, &mut console);
    drop(run);
    let seen = Arc::into_inner(seen).unwrap().into_inner().unwrap();
    (words, seen)
}

/// The beginning of the answer that says this write.
fn says(seen: &Seen) -> (String, String) {
    // The step is that at which the instruction is still to be executed.
    let head = format!("step {}, ", seen.step - 1);
    (head, format!(", CPU {}", seen.cpu))
}

// covers: query/panic
#[test]
fn who_wrote_jiffies_last_before_a_panic_is_one_command() {
    let folder = Folder::new("query");
    let scripts = folder.join("scripts");
    std::fs::create_dir(&scripts).unwrap();
    folder.script("scripts/run", "#!/bin/sh\nsleep 1\necho c >/proc/sysrq-trigger\n");
    let session = folder.join("session");
    let mut record = linux_in_minivmm("console=ttyS0 quiet panic=-1");
    record
        .args(["--memory", "256M", "--cpus", "2", "--inject"])
        .arg(&scripts);
    let recorded = run(record.arg("--record").arg(&session), LIMIT).must_end_with(10);
    assert!(
        recorded
            .console
            .contains("Kernel panic - not syncing: sysrq triggered crash"),
        "{}",
        recorded.console
    );

    let (words, seen) = witnessed(&session);
    let panic = *seen.iter().rfind(|seen| seen.word.is_none()).expect("panic was called");
    let last = |word: usize, before: u64| {
        let of = |seen: &&Seen| seen.word == Some(word) && seen.step <= before;
        seen.iter().rfind(of).copied()
    };
    let count = |word: usize| seen.iter().filter(|seen| seen.word == Some(word)).count();
    // One is hot, one is written once, and one never.
    assert!(count(0) > 100, "{}", count(0));
    assert_eq!((count(1), count(2)), (1, 0), "{seen:?}");

    let ask = |arguments: &[&str]| {
        let mut query = Command::new(minivmm());
        let outcome = run(query.arg("query").arg(&session).args(arguments), LIMIT).must_end_with(0);
        println!("{arguments:?}, {:?}: {}", outcome.time, outcome.console);
        assert_eq!(outcome.console.lines().count(), 1, "{}", outcome.console);
        outcome.console
    };
    let is = |said: &str, seen: &Seen, from: u64, to: u64, width: usize| {
        let (head, cpu) = says(seen);
        assert!(said.starts_with(&head) && said.contains(&cpu), "{said}: {seen:?}");
        assert!(said.contains(&format!(": {:#x} ", seen.ip)), "{said}: {seen:?}");
        let change = format!(": {from:#0width$x} -> {to:#0width$x}\n");
        assert!(said.ends_with(&change), "{said}: {change}");
    };

    // The one command.
    let said = ask(&["last-writer", "jiffies", "--before", "panic"]);
    let (mut vm, mut console) = replayed(&session);
    let before = last(0, panic.step).unwrap();
    let value = |vm: &Run, word: usize| {
        let mut bytes = [0; 8];
        vm.read_linear(before.cpu, words[word], &mut bytes).unwrap();
        u64::from_le_bytes(bytes)
    };
    assert!(vm.run_for(&mut console, before.step - 1).unwrap().is_none());
    let from = value(&vm, 0);
    assert!(vm.run_for(&mut console, 1).unwrap().is_none());
    let to = value(&vm, 0);
    assert!(to > from, "{from:#x} {to:#x}");
    is(&said, &before, from, to, 18);
    drop(vm);
    // At the end it is another one: the clock ticks on while the kernel waits to reset the machine.
    let end = last(0, u64::MAX).unwrap();
    let said = ask(&["last-writer", "jiffies"]);
    assert!(said.starts_with(&says(&end).0), "{said}: {end:?}");

    // Written once, and by `panic` itself.
    let once = last(1, u64::MAX).unwrap();
    is(
        &ask(&["last-writer", "panic_cpu", "--len", "4"]),
        &once,
        0xffff_ffff,
        once.cpu as u64,
        10,
    );
    let said = ask(&["last-writer", "panic_cpu", "--len", "4", "--before", "panic"]);
    let nobody = format!("nobody wrote to panic_cpu from step 0 to step {}\n", panic.step);
    assert_eq!(said, nobody);
    let never = ask(&["last-writer", "linux_banner"]);
    assert!(
        never.starts_with("nobody wrote to linux_banner from step 0 to step "),
        "{never}"
    );
}
