//! Debian's gdb records branches of a Linux guest, kernel and user code, in both formats, with symbols of the kernel where
//! KASLR has put it.

use std::path::Path;
use std::process::Command;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use guest_tests::gdb::Guest;
use guest_tests::retired::{Each, idle_loops};
use guest_tests::{Folder, SMP, in_minivmm, linux, run, start};
use iced_x86::{Decoder, DecoderOptions};
use minivmm::debug::StopCause;
use minivmm::recording::GuestMemory;
use minivmm::{Console, MachineConfig, Run, SerialTarget, StopReason};
use trace::linux::Kernel;
use trace::symbols::{SymbolTable, write_elf};

const LIMIT: Duration = Duration::from_secs(150);
const CMDLINE: &str = "console=ttyS0 panic=-1 quiet";

/// The same Linux here, with the symbols that it has in memory as soon as it has any.
fn boot() -> (Run, Console, SymbolTable, Option<String>) {
    let config = MachineConfig {
        initrd: vec![linux().initrd.clone().into()],
        cmdline: Some(CMDLINE.into()),
        memory: 256 << 20,
        ..MachineConfig::new(&linux().kernel)
    };
    let mut vm = Run::new(&config).unwrap();
    let mut console = Console::open(&SerialTarget::Buffer, &[], vm.line()).unwrap();
    loop {
        assert!(vm.run_for(&mut console, 50_000_000).unwrap().is_none());
        let memory = &mut GuestMemory::new(vm.machine().memory());
        if let Some(kernel) = Kernel::find(memory) {
            let (symbols, id) = (kernel.symbols().clone(), kernel.build_id().map(String::from));
            return (vm, console, symbols, id);
        }
    }
}

/// Runs up to the instruction at an address.
fn run_to(vm: &mut Run, console: &mut Console, address: u64) {
    vm.debugger().add_breakpoint(address);
    let end = vm.run(console).unwrap();
    assert!(
        matches!(&end, StopReason::Debugger(stop) if stop.why == StopCause::Breakpoint(address)),
        "{end:?}"
    );
    vm.debugger().remove_breakpoint(address);
}

/// The address behind a function's first two instructions. gdb 13.1 cannot go back from the first one when packets end with its
/// call ("bfcache_new: Assertion `*slot == NULL' failed").
fn behind_two(vm: &Run, function: u64) -> u64 {
    let mut bytes = [0; 32];
    vm.read_linear(0, function, &mut bytes).unwrap();
    let mut decoder = Decoder::with_ip(64, &bytes, function, DecoderOptions::NONE);
    let _ = decoder.decode();
    decoder.decode().next_ip()
}

/// What gdb is to do; `{...}` is filled in.
const SCRIPT: &str = "
set pagination off
set confirm off
file {elf}
target remote {socket}
hbreak vfs_read
continue
monitor kaslr
delete
set record btrace bts buffer-size 1048576
set record btrace pt buffer-size 262144
set record instruction-history-size unlimited
set record function-call-history-size unlimited
hbreak *{stop}
{bts}
record goto end
record stop
{pt}
record stop
echo over\\n
kill
";

/// What is looked at in one format.
const HISTORY: &str = "record btrace {format}
continue
echo {format}-info\\n
monitor info
info record
echo {format}-instructions\\n
record instruction-history 1,+1000000
echo {format}-calls\\n
record function-call-history /ilc 1,+1000000
echo {format}-back\\n
reverse-stepi
p/x $pc
reverse-stepi
p/x $pc
record goto begin
p/x $pc
stepi
p/x $pc";

/// What stands between two lines.
fn between<'a>(text: &'a str, from: &str, to: &str) -> &'a str {
    let cut = |text: &'a str, at: &str| text.split_once(&format!("{at}\n"));
    let (_, rest) = cut(text, from).unwrap_or_else(|| panic!("{from:?} is not in {text}"));
    let (part, _) = cut(rest, to).unwrap_or_else(|| panic!("{to:?} is not in {rest}"));
    part
}

/// The hexadecimal number behind the first 0x.
fn address(line: &str) -> u64 {
    let digits = line.split_once("0x").unwrap_or_else(|| panic!("{line:?}")).1;
    let end = digits.find(|c: char| !c.is_ascii_hexdigit()).unwrap_or(digits.len());
    u64::from_str_radix(&digits[..end], 16).unwrap()
}

/// One of the two histories against the instructions that retired.
fn compare(said: &str, format: &str, retired: &[u64], steps: u64) {
    let part = |name: &str, next: &str| between(said, &format!("{format}-{name}"), next).to_string();
    let instructions_end = format!("{format}-calls");
    let info = part("info", &format!("{format}-instructions"));
    // What the monitor says comes beside the rest.
    assert!(said.contains(&format!("paused: {steps} steps")), "{steps}: {said}");
    let count = retired.len();
    assert!(
        info.contains(&format!("Recorded {count} instructions in ")) && info.contains("(0 gaps)"),
        "{count}: {info}"
    );
    let text = part("instructions", &instructions_end);
    let mut all: Vec<u64> = text.lines().map(address).collect();
    // The one that comes next is shown by blocks alone.
    all.truncate(count);
    if all != retired {
        let at = all
            .iter()
            .zip(retired)
            .position(|(a, b)| a != b)
            .unwrap_or(all.len().min(count));
        let window = at.saturating_sub(5)..(at + 5).min(all.len()).min(count);
        panic!(
            "{format}: instruction {at} of {count}: {:x?}, retired {:x?}",
            &all[window.clone()],
            &retired[window]
        );
    }
    // Functions follow each other without a hole.
    let calls = part("calls", &format!("{format}-back"));
    let mut next = 1;
    for line in calls.lines() {
        let (_, range) = line.split_once("\tinst ").unwrap_or_else(|| panic!("{line:?}"));
        let range = range.split(|c: char| c.is_whitespace()).next().unwrap();
        let (first, last) = range.split_once(',').unwrap();
        assert_eq!(first.parse(), Ok(next), "{line}");
        next = last.parse::<usize>().unwrap() + 1;
    }
    assert!(next > count, "{next} {count}");
    // Two back from the end, and one on from the beginning.
    let back = part("back", "Process record is stopped and all execution logs are deleted.");
    let seen: Vec<u64> = back.lines().filter(|line| line.starts_with('$')).map(address).collect();
    assert_eq!(
        seen,
        [retired[count - 1], retired[count - 2], retired[0], retired[1]],
        "{format}: {back}"
    );
}

// covers: btrace/gdb, gdb/kernel-symbols
#[test]
fn gdb_records_kernel_and_user_code_of_linux() {
    let (mut vm, mut console, symbols, id) = boot();
    let folder = Folder::new("gdb-btrace");
    let (elf, socket) = (folder.join("kernel.elf"), folder.join("gdb"));
    std::fs::write(&elf, write_elf(&symbols, id.as_deref()).unwrap()).unwrap();
    let mut command = in_minivmm(&linux().kernel);
    command
        .arg("--initrd")
        .arg(&linux().initrd)
        .args(["--cmdline", CMDLINE, "-m", "256M", "--paused"]);
    command.arg("--gdb").arg(format!("unix:{}", socket.display()));
    let running = start(&mut command, LIMIT);
    let limit = Instant::now() + LIMIT;
    while !socket.exists() {
        assert!(Instant::now() < limit, "no socket");
        std::thread::sleep(Duration::from_millis(10));
    }
    let syscall = symbols.address("do_syscall_64").unwrap();
    let stop = behind_two(&vm, syscall);
    let script = folder.join("script");
    let text = SCRIPT
        .replace("{bts}", &HISTORY.replace("{format}", "bts"))
        .replace("{pt}", &HISTORY.replace("{format}", "pt"))
        .replace("{stop}", &format!("{stop:#x}"))
        .replace("{elf}", elf.to_str().unwrap())
        .replace("{socket}", socket.to_str().unwrap());
    std::fs::write(&script, text).unwrap();
    let gdb = std::thread::spawn(move || run(Command::new("gdb").args(["-nx", "-batch", "-x"]).arg(script), LIMIT));

    // Meanwhile the same here, which knows what retires.
    let read = symbols.address("vfs_read").unwrap();
    run_to(&mut vm, &mut console, read);
    let state = vm.cpu_state(0).unwrap();
    let retired = Arc::<Mutex<Vec<u64>>>::default();
    let log = Arc::clone(&retired);
    let next = (state.steps - state.iterations, state.rip);
    let each = Each::new(Some(next), move |ip| log.lock().unwrap().push(ip));
    vm.machine().observe(0, Some(Box::new(each)));
    let mut stretches = Vec::new();
    for _ in 0..2 {
        run_to(&mut vm, &mut console, stop);
        let log = std::mem::take(&mut *retired.lock().unwrap());
        stretches.push((log, vm.steps()));
    }

    let outcome = gdb.join().unwrap();
    let said = outcome.console + &outcome.errors;
    running.finish();
    assert!(
        said.contains(&format!("Breakpoint 1, {read:#018x} in vfs_read ()")),
        "{said}"
    );
    assert!(said.contains("    add-symbol-file vmlinux -o 0x"), "{said}");
    for ((log, steps), format) in stretches.iter().zip(["bts", "pt"]) {
        let user = log.iter().filter(|ip| **ip < 1 << 47).count();
        assert!(user > 100 && log.len() - user > 1000, "{user} of {}", log.len());
        compare(&said, format, log, *steps);
    }
    let calls = between(&said, "bts-calls", "bts-back");
    assert!(
        calls.starts_with("1\t") && calls.lines().next().unwrap().contains("vfs_read"),
        "{calls}"
    );
    assert!(
        calls.contains("ksys_read\t") && calls.contains("syscall_exit_to_user_mode\t"),
        "{calls}"
    );
}

/// What gdb is to do with several CPUs.
const SEVERAL: &str = "
set record btrace bts buffer-size 1048576
set record btrace pt buffer-size 262144
set record instruction-history-size unlimited
hbreak *{from} thread 3
continue
delete
record btrace {format}
hbreak *{to}
continue
echo step\\n
monitor info
thread 1
echo one\\n
info record
record instruction-history 1,+100000
thread 2
echo two\\n
info record
record instruction-history 1,+100000
thread 3
echo three\\n
info record
record instruction-history 1,+100000
echo back\\n
reverse-stepi
print/x $pc
thread 2
print/x $pc
record goto begin
print/x $pc
echo over\\n
record stop
kill
";

// covers: btrace/smp
#[test]
fn each_cpu_has_a_history_of_its_own() {
    // gdb takes all code for 32-bit code on a part that has no other: so blocks can be taken apart.
    let options = [
        "--cpus",
        "3",
        "--cmdline",
        "3",
        "--memory",
        "64M",
        "--cpu-model",
        "p6",
        "--serial",
        "null",
    ];
    let config = MachineConfig {
        cpus: 3,
        cmdline: Some(b"3".to_vec()),
        model: minivmm::model::find("p6").unwrap(),
        memory: 64 << 20,
        serial: SerialTarget::Buffer,
        ..MachineConfig::new(SMP)
    };
    let machine = || {
        let vm = Run::new(&config).unwrap();
        let console = Console::open(&config.serial, &[], vm.line()).unwrap();
        (vm, console)
    };
    // An instruction that the third CPU executes once it is out of real mode, and one that comes a good deal later.
    let (mut vm, mut console) = machine();
    let steps = |vm: &Run, cpu| vm.cpu_state(cpu).unwrap().steps;
    while steps(&vm, 2) < 500 || vm.current_cpu() != 2 {
        assert!(vm.run_for(&mut console, 50).unwrap().is_none());
    }
    let from = vm.cpu_state(2).unwrap().rip;
    let (mut vm, mut console) = machine();
    vm.debugger().add_breakpoint(from);
    loop {
        match vm.run(&mut console).unwrap() {
            StopReason::Debugger(stop) if stop.cpu == 2 => break,
            StopReason::Debugger(_) => {}
            end => panic!("{end:?}"),
        }
    }
    vm.debugger().remove_breakpoint(from);
    let begin = [0, 1, 2].map(|cpu| steps(&vm, cpu));
    let retired = |vm: &Run| {
        [0, 1, 2].map(|cpu| {
            let state = vm.cpu_state(cpu).unwrap();
            state.steps - state.iterations
        })
    };
    let before = retired(&vm);
    let heard: Vec<_> = (0..3)
        .map(|cpu| {
            let state = vm.cpu_state(cpu).unwrap();
            let retired = Arc::<Mutex<Vec<u64>>>::default();
            let log = Arc::clone(&retired);
            let next = (state.steps - state.iterations, state.rip);
            let each = Each::new(Some(next), move |ip| log.lock().unwrap().push(ip));
            vm.machine().observe(cpu, Some(Box::new(each)));
            retired
        })
        .collect();
    let to = loop {
        assert!(vm.run_for(&mut console, 200).unwrap().is_none());
        let cpu = vm.current_cpu();
        let rip = vm.cpu_state(cpu).unwrap().rip;
        let busy = (0..3).all(|cpu| steps(&vm, cpu) > begin[cpu] + 300);
        let known = heard.iter().any(|heard| heard.lock().unwrap().contains(&rip));
        // Not where it waits.
        if busy && !known {
            break rip;
        }
    };
    let (total, after) = (vm.steps(), retired(&vm));
    // Of a CPU that waits for its turn the last one is heard of with the next.
    let logs: Vec<_> = heard.iter().map(|heard| heard.lock().unwrap().clone()).collect();
    let counts = [0, 1, 2].map(|cpu| (after[cpu] - before[cpu]) as usize);
    for (log, count) in logs.iter().zip(counts) {
        assert!((count - 1..=count).contains(&log.len()), "{} of {count}", log.len());
    }
    drop(vm);
    let loops = idle_loops(Path::new(SMP));
    for format in ["bts", "pt"] {
        let guest = Guest::start(Path::new(SMP), &[&options[..], &["--paused"]].concat());
        let script = SEVERAL
            .replace("{from}", &format!("{from:#x}"))
            .replace("{to}", &format!("{to:#x}"))
            .replace("{format}", format);
        let said = guest.gdb(&script);
        guest.finish();
        assert!(said.contains(&format!("paused: {total} steps")), "{total}: {said}");
        let mut last = 0;
        let parts = [("one", "two"), ("two", "three"), ("three", "back")];
        for ((log, count), (name, next)) in logs.iter().zip(counts).zip(parts) {
            let text = between(&said, name, next);
            // The one that comes next is marked, and no more of it.
            let lines = text
                .lines()
                .filter(|line| line.starts_with(|c: char| c.is_ascii_digit()));
            let mut all: Vec<u64> = lines.map(address).collect();
            let recorded = text.split_once("Recorded ").unwrap().1;
            let recorded: usize = recorded.split_once(' ').unwrap().0.parse().unwrap();
            let untold = if format == "pt" { &loops[..] } else { &[] };
            let reported = |ip: &u64| untold.iter().all(|range| !range.contains(ip));
            let mut ran = log.clone();
            ran.retain(reported);
            assert!(text.contains("(0 gaps)"), "{format}, {name}: {text}");
            assert!(
                recorded <= count && recorded + log.len() >= count + ran.len() && all.len() >= recorded,
                "{format}, {name}: {recorded} of {count}, {} shown",
                all.len()
            );
            last = all[recorded - 1];
            all.retain(reported);
            all.truncate(ran.len());
            assert!(all == ran, "{format}, {name}");
        }
        // The third is one back, and the second at its beginning.
        let back = between(&said, "back", "over");
        let seen: Vec<u64> = back.lines().filter(|line| line.starts_with('$')).map(address).collect();
        assert_eq!((seen[0], seen[2]), (last, logs[1][0]), "{back}");
    }
}
