//! Traces of a booting Linux: what our decoder and Intel's libipt make of them is what retired, to the instruction.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;
use std::sync::Mutex;

use guest_tests::bare::image;
use guest_tests::retired::{Retired, Stream, idle_loops};
use guest_tests::{Folder, JIT, PATCHES, SMP, linux};
use minivmm::recording::{Filter, RecordingOptions, When};
use minivmm::{Console, MachineConfig, Run, SerialTarget};
use pt_flow::{Block, Event, Visitor};
use recorded::{by_libipt, compare, compare_from, decoded, hold, record, run, same};
use trace::{Decode, Start, State, StepClock, Trace, raw};

mod recorded;
mod sweep;

/// A boot of Linux that switches itself off at its end, or after so many steps.
fn config(model: &str, cpus: u8) -> MachineConfig {
    MachineConfig {
        initrd: vec![linux().initrd.clone().into()],
        cmdline: Some(b"console=ttyS0 panic=-1 minivmm.script=nothing".to_vec()),
        max_instructions: if guest_tests::full() { None } else { Some(15_000_000) },
        cpus,
        model: minivmm::model::find(model).expect("a model"),
        ..MachineConfig::new(&linux().kernel)
    }
}

/// Several patches of a page where no packet tells which code ran before and which behind them.
// covers: trace/patches
#[test]
fn patches_between_two_packets_hold_from_their_instruction_on() {
    let recorded = compare("patches", &MachineConfig::new(Path::new(PATCHES)), &[]);
    let info = recorded.trace.info(0);
    // Two bytes here and two there come and go; pages that were reported before are not reported again.
    assert!(info.changes > 400 && info.contents < 100, "{info:?}");
}

/// Three vCPUs that start each other, from real mode on, and reset each other by INIT; each with code that the first has written.
// covers: trace/smp, trace/init
#[test]
fn several_cpus_and_resets_among_them_are_in_the_trace() {
    let plain = MachineConfig {
        cpus: 3,
        cmdline: Some(b"3".to_vec()),
        ..MachineConfig::new(Path::new(SMP))
    };
    let loops = idle_loops(Path::new(SMP));
    assert_ne!(loops, []);
    compare("smp", &plain, &loops);
}

/// A guest that programs its own unit in every way has the packets that it has without us.
// covers: trace/beside-pt
#[test]
fn a_guest_s_own_trace_goes_on_beside_ours() {
    for name in ["pt_packets", "pt_filters", "pt_topa"] {
        let plain = MachineConfig {
            model: minivmm::model::find("sapphirerapids").expect("a model"),
            max_instructions: Some(20_000_000),
            ..MachineConfig::new(image(name))
        };
        let recorded = record(name, &plain, 0);
        // When the interrupt of a full region comes depends on how often an observer takes branches: a fault of ours, which the
        // guest that asks for such interrupts sees.
        if name != "pt_topa" {
            assert_eq!(recorded.digest, run(&plain, 0, |_| {}), "{name}: the guest cannot tell");
        }
        let found = decoded(&recorded.trace, 0, &Stream::default());
        assert!(found.count > 10_000, "{name}: {} instructions", found.count);
        // For the same reason this observer is its own witness.
        same(&by_libipt(&recorded.raw, 0, &Stream::default()), &found, name);
    }
}

/// What is executed in ring 0 and what is in ring 3 make up the whole.
// covers: trace/filters
#[test]
fn filters_by_ring_part_what_a_guest_executes() {
    let folder = Folder::new("rings");
    let count = |name: &str, filters: &[Filter]| {
        let at = folder.join(name);
        let traced = MachineConfig {
            model: minivmm::model::find("sapphirerapids").expect("a model"),
            max_instructions: Some(20_000_000),
            trace: Some(RecordingOptions {
                filters: filters.to_vec(),
                ..RecordingOptions::new(&at)
            }),
            ..MachineConfig::new(image("pt_filters"))
        };
        run(&traced, 0, |_| {});
        decoded(&Trace::open(&at).expect("a trace"), 0, &Stream::default()).count
    };
    let (all, kernel, user) = (
        count("all", &[]),
        count("kernel", &[Filter::Kernel]),
        count("user", &[Filter::User]),
    );
    assert!(user >= 10, "{user} of {all}");
    assert_eq!(kernel + user, all, "{kernel} and {user}");
}

// covers: trace/linux
// covers: pt/oracle-linux
#[test]
fn traces_of_a_booting_linux_are_what_retired() {
    compare("westmere", &config("westmere", 1), &[]);
}

/// Models whose guests have Intel PT, too. The oracle reads code as a supervisor does, so they come without SMAP.
fn on_a_model_with_intel_pt(model: &str) {
    if guest_tests::full() {
        compare(model, &config(model, 1), &[]);
    } else {
        println!("left out: the whole boot on {model}, which the full form runs");
    }
}

// covers: trace/linux
#[test]
fn traces_of_linux_on_skylake_server_are_what_retired() {
    on_a_model_with_intel_pt("skylake-server,-smap");
}

// covers: trace/linux
#[test]
fn traces_of_linux_on_sapphirerapids_are_what_retired() {
    on_a_model_with_intel_pt("sapphirerapids,-smap");
}

/// Linux on two vCPUs, of which each wakes, interrupts and patches the other.
// covers: trace/smp-linux
#[test]
fn traces_of_linux_on_two_cpus_are_what_retired() {
    if !guest_tests::full() {
        println!("left out: the second CPU starts late in a boot, which the full form runs");
        return;
    }
    compare("linux-smp", &config("westmere", 2), &[]);
}

/// What of a trace the program that compiles has to do with.
#[derive(Default)]
struct Compiled {
    /// The first step and address.
    first: Option<(u64, u64)>,
    /// The time of the last packet that has it.
    last: u64,
    /// Pieces of code at each of the program's addresses.
    pieces: BTreeMap<u64, BTreeSet<Vec<u8>>>,
    /// Rounds whose filter the kernel has compiled and executed.
    filters: BTreeSet<u32>,
}

impl Compiled {
    /// Rounds of each way, and what a filter looks for but for the round: as in jit.c.
    const ROUNDS: u32 = 40;
    const WANTED: u32 = 0x5eed_0000;

    fn code(&mut self, block: &Block, bytes: &[u8]) {
        // XOR EAX, EAX to JNE.
        if block.ip < 1 << 32
            && block.ip.is_multiple_of(4096)
            && bytes.starts_with(&[0x31, 0xc0])
            && bytes.ends_with(&[0x75, 1])
        {
            self.pieces.entry(block.ip).or_default().insert(bytes.to_vec());
        }
        if block.ip >> 63 != 0 {
            let numbers = bytes
                .windows(4)
                .map(|four| u32::from_le_bytes(four.try_into().expect("four")));
            let rounds = numbers.filter_map(|number| number.checked_sub(Self::WANTED));
            self.filters.extend(rounds.filter(|round| *round < Self::ROUNDS));
        }
    }
}

struct Look<'a> {
    found: &'a Mutex<Compiled>,
    state: State,
    clock: &'a StepClock,
}

impl Visitor for Look<'_> {
    const CODE: bool = true;

    fn code(&mut self, block: &Block, bytes: &[u8]) {
        let mut found = self.found.lock().expect("nobody panicked with it");
        // The packet of the time comes before the first address.
        found.last = self.state.ticks.expect("a trace begins with the time");
        if found.first.is_none() {
            found.first = Some((self.clock.step(found.last).expect("a step"), block.ip));
        }
        found.code(block, bytes);
    }
    fn block(&mut self, _: &Block) {}
    fn event(&mut self, event: &Event) {
        self.state.event(event);
    }
}

/// A program that writes code, runs it and writes other code over it, in pages that are executable in turns, that are both at once,
/// that have two addresses, that are other pages each time; and the kernel's own compiler of socket filters. From the port write
/// before to the one behind, every instruction is in the trace with the code that it was then, for our decoder as for libipt.
// covers: trace/jit
#[test]
fn what_compilers_in_a_guest_write_is_in_the_trace() {
    let folder = Folder::new("jit");
    let inject = folder.join("inject");
    fs::create_dir(&inject).expect("a folder");
    fs::copy(JIT, inject.join("init")).expect("a copy");
    let plain = MachineConfig {
        initrd: vec![linux().initrd.clone().into()],
        inject: Some(inject),
        cmdline: Some(b"console=ttyS0 panic=-1 quiet".to_vec()),
        memory: 256 << 20,
        model: minivmm::model::find("westmere").expect("a model"),
        serial: SerialTarget::Buffer,
        ..MachineConfig::new(&linux().kernel)
    };
    let at = folder.join("trace");
    let traced = MachineConfig {
        trace: Some(RecordingOptions {
            start: Some(When::Port(0x5e0, Some(1))),
            stop: Some(When::Port(0x5e0, Some(2))),
            ..RecordingOptions::new(&at)
        }),
        ..plain.clone()
    };
    let mut vm = Run::new(&traced).expect("a machine");
    let mut console = Console::open(&traced.serial, &[], vm.line()).expect("a console");
    let end = vm.run(&mut console);
    let said = String::from_utf8_lossy(&console.take_output()).into_owned();
    assert!(said.contains("jit: all holds"), "{end:?}: {said}");
    vm.end_trace("the test").expect("the trace is written");

    let trace = Trace::open(&at).expect("a trace");
    let (clock, found) = (trace.clock(0), Mutex::new(Compiled::default()));
    let options = Decode {
        threads: 1,
        ..Decode::default()
    };
    let look = |start: &Start| Look {
        found: &found,
        state: State::new(start),
        clock: &clock,
    };
    trace.decode(0, &options, look, |_, _| {}).expect("the trace is read");
    let found = found.into_inner().expect("nobody panicked with it");
    let pieces: Vec<(u64, usize)> = found.pieces.iter().map(|(at, pieces)| (*at, pieces.len())).collect();
    let all = Compiled::ROUNDS as usize;
    let places = [0x1000_0000, 0x2000_0000, 0x3000_0000, 0x4000_0000];
    assert_eq!(pieces, places.map(|place| (place, all)), "pieces of code by address");
    assert_eq!(found.filters, (0..Compiled::ROUNDS).collect(), "filters");

    // Again without a trace, with an observer from the same instruction on.
    let (first, ip) = found.first.expect("something was executed");
    let last = clock.step(found.last).expect("a step");
    let ran = |empty: &Stream| {
        let mut vm = Run::new(&plain).expect("a machine");
        let mut console = Console::open(&plain.serial, &[], vm.line()).expect("a console");
        assert!(vm.run_for(&mut console, first - 8).expect("a run").is_none());
        while vm.cpu_state(0).expect("a CPU").rip != ip {
            assert!(vm.steps() < first + 8, "{ip:#x} is not executed at step {first}");
            assert!(vm.step(&mut console).expect("a step").is_none());
        }
        let (observer, ears) = Retired::new();
        ears.lock().expect("nobody panicked with it").stream = empty.clone();
        vm.machine().observe(0, Some(Box::new(observer)));
        assert!(vm.run_for(&mut console, last - vm.steps()).expect("a run").is_none());
        vm.machine().observe(0, None);
        let heard = std::mem::take(&mut *ears.lock().expect("nobody panicked with it"));
        assert_eq!(heard.wrong, None);
        heard.stream
    };
    let empty = Stream::default();
    let stream = ran(&empty);
    assert!(stream.count > 1_000_000, "{}", stream.count);
    hold("jit, our decoder", &empty, &stream, ran, |empty| {
        decoded(&trace, 0, empty)
    });
    let raw = folder.join("raw");
    raw::export(&trace, &raw, &mut |_, _| {}).expect("raw files");
    hold("jit, libipt", &empty, &stream, ran, |empty| by_libipt(&raw, 0, empty));
}

/// A recording that the monitor begins in a run that nobody has recorded so far: code that was decoded, and translations that were
/// made, long before are in it, too.
// covers: monitor/trace-late
#[test]
fn recordings_that_begin_under_way_are_what_retired() {
    let from = 3_000_000;
    let boot = MachineConfig {
        max_instructions: Some(8_000_000),
        ..config("skylake-server", 1)
    };
    compare_from("late", &boot, from, &[]);
    let several = MachineConfig {
        cmdline: Some(b"3".to_vec()),
        cpus: 3,
        memory: 64 << 20,
        ..MachineConfig::new(Path::new(SMP))
    };
    let whole = {
        let mut vm = Run::new(&several).expect("a machine");
        let mut console = Console::open(&several.serial, &[], vm.line()).expect("a console");
        vm.run(&mut console).expect("a run");
        vm.steps()
    };
    compare_from("late-smp", &several, whole / 2, &idle_loops(Path::new(SMP)));
}
