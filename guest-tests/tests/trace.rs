//! Traces of a booting Linux: what our decoder and Intel's libipt make of them is what retired, to the instruction.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use guest_tests::bare::image;
use guest_tests::raw::Raw;
use guest_tests::retired::{Heard, Lines, Retired, Stream, idle_loops};
use guest_tests::{Folder, JIT, PATCHES, SMP, linux};
use minivmm::recording::{Filter, Options, When};
use minivmm::{Console, MachineConfig, Run, SerialTarget, front::monitor};
use pt_flow::{Block, Event, EventKind, Visitor};
use pt_oracle::libipt;
use trace::{Clock, Decode, Start, State, Trace, raw};

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

/// Runs it, prepared at a step; gives the digest of the machine at its end.
fn run(config: &MachineConfig, from: u64, prepare: impl FnOnce(&mut Run)) -> u64 {
    let mut vm = Run::new(config).expect("a machine");
    let mut console = Console::open(&config.serial, &[], vm.line()).expect("a console");
    if from > 0 {
        assert!(vm.run_for(&mut console, from).expect("a run").is_none());
    }
    prepare(&mut vm);
    vm.run(&mut console).expect("a run");
    vm.end_trace("the test").expect("the trace is written");
    for cpu in 0..vm.cpu_count() {
        vm.machine().observe(cpu, None);
    }
    vm.digest()
}

/// What each CPU retires from a step on, by an observer that has nothing to do with traces; and the digest.
fn retired(config: &MachineConfig, from: u64, empty: &Stream) -> (Vec<Stream>, u64) {
    let mut heard: Vec<Arc<Mutex<Heard>>> = Vec::new();
    let digest = run(config, from, |vm| {
        for cpu in 0..vm.cpu_count() {
            let (observer, ears) = Retired::new();
            ears.lock().expect("nobody panicked with it").stream = empty.clone();
            vm.machine().observe(cpu, Some(Box::new(observer)));
            heard.push(ears);
        }
    });
    let streams = heard.iter().map(|heard| {
        let heard = std::mem::take(&mut *heard.lock().expect("nobody panicked with it"));
        assert_eq!(heard.wrong, None);
        heard.stream
    });
    (streams.collect(), digest)
}

/// Takes every instruction in.
struct Each<'a> {
    stream: &'a Mutex<(Stream, Lines)>,
    gaps: Vec<Event>,
}

impl Visitor for Each<'_> {
    const CODE: bool = true;

    fn code(&mut self, block: &Block, bytes: &[u8]) {
        let bits = block.mode.bits();
        let mut both = self.stream.lock().expect("nobody panicked with it");
        let (stream, lines) = &mut *both;
        let mut count = 0;
        let whole = lines.each(block.ip, bits, bytes, &[], |ip| {
            count += 1;
            stream.push(ip);
        });
        assert!(whole && count == block.count, "{block:x?} {bytes:02x?}");
    }
    fn block(&mut self, _: &Block) {}
    fn event(&mut self, event: &Event) {
        if matches!(event.kind, EventKind::Gap(_)) {
            self.gaps.push(*event);
        }
    }
}

/// What our decoder finds on a CPU.
fn decoded(trace: &Trace, cpu: usize, empty: &Stream) -> Stream {
    let stream = Mutex::new((empty.clone(), Lines::default()));
    // The hash wants the instructions in their order.
    let options = Decode {
        threads: 1,
        ..Decode::default()
    };
    let each = |_: &_| Each {
        stream: &stream,
        gaps: Vec::new(),
    };
    let summary = trace
        .decode(cpu, &options, each, |each, _| assert_eq!(each.gaps, []))
        .expect("the trace is read");
    assert_eq!((summary.lost, &summary.damage[..]), (0, &[][..]));
    stream.into_inner().expect("nobody panicked with it").0
}

/// What libipt finds on a CPU, one image for each span between changes of the code.
fn by_libipt(folder: &Path, cpu: usize, empty: &Stream) -> Stream {
    let raw = Raw::read(folder, cpu);
    let mut image = libipt::Image::new([]);
    let mut stream = empty.clone();
    for span in &raw.spans {
        for &(cr3, address, page) in &span.pages {
            image.add_file(&raw.pages, page * 4096, 4096, address, cr3);
        }
        let found = libipt::instructions(&raw.packets[span.begin..span.end], &image, |ip| stream.push(ip));
        if let Err(error) = found {
            panic!("{error} in the span from {:#x} to {:#x}", span.begin, span.end);
        }
    }
    stream
}

/// Two streams of the same run, whose last instructions one of them may not have heard of.
fn same(found: &Stream, ran: &Stream, what: &str) {
    assert_eq!(found.differs(ran), None, "{what}");
    let count = found.count.min(ran.count);
    let hashes = (found.hash_at(count), ran.hash_at(count));
    assert!(
        count > 0 && hashes.0.is_some() && hashes.0 == hashes.1,
        "{what}: {} and {} instructions, {hashes:x?}",
        found.count,
        ran.count
    );
}

/// A machine's trace, and its raw form.
struct Recorded {
    trace: Trace,
    raw: PathBuf,
    digest: u64,
    /// Removed last.
    _folder: Folder,
}

/// Records a machine, which cannot tell that it is recorded; from a step on, if that is not the first, as the monitor begins it.
fn record(name: &str, plain: &MachineConfig, from: u64) -> Recorded {
    let folder = Folder::new(name);
    let at = folder.join("trace");
    let traced = MachineConfig {
        trace: (from == 0).then(|| Options::new(&at)),
        ..plain.clone()
    };
    let digest = run(&traced, from, |vm| {
        if from > 0 {
            let line = format!("trace start {}", at.display());
            let told =
                monitor::answer(&mut minivmm::front::controls::Controls::new(vm), 0, &line).expect("a recording");
            assert!(told.ends_with(&format!("recording from step {from}\n")), "{told}");
        }
    });
    let trace = Trace::open(&at).expect("a trace");
    let raw = folder.join("raw");
    raw::export(&trace, &raw, &mut |_, _| {}).expect("raw files");
    Recorded {
        trace,
        raw,
        digest,
        _folder: folder,
    }
}

/// Records a machine and compares each vCPU's stream, as both decoders find it, with what an observer of its own says retired.
fn compare(name: &str, plain: &MachineConfig, skip: &[Range<u64>]) -> Recorded {
    compare_from(name, plain, 0, skip)
}

/// The same from a step on.
fn compare_from(name: &str, plain: &MachineConfig, from: u64, skip: &[Range<u64>]) -> Recorded {
    let recorded = record(name, plain, from);
    let mut empty = Stream::default();
    empty.skip = skip.to_vec();
    let (streams, digest) = retired(plain, from, &empty);
    assert_eq!(recorded.digest, digest, "{name}: the guest cannot tell");
    for (cpu, ran) in streams.iter().enumerate() {
        let again = |empty: &Stream| retired(plain, from, empty).0.swap_remove(cpu);
        let what = format!("{name}, our decoder, vCPU {cpu}");
        hold(&what, &empty, ran, again, |empty| decoded(&recorded.trace, cpu, empty));
        let what = format!("{name}, libipt, vCPU {cpu}");
        hold(&what, &empty, ran, again, |empty| by_libipt(&recorded.raw, cpu, empty));
    }
    recorded
}

/// What a decoder finds is what ran. Where it is not, both are looked at once more, to see what differs.
fn hold(
    what: &str,
    empty: &Stream,
    ran: &Stream,
    again: impl Fn(&Stream) -> Stream,
    decode: impl Fn(&Stream) -> Stream,
) {
    let found = decode(empty);
    let Some(window) = found.differs(ran) else {
        return same(&found, ran, what);
    };
    let mut keeping = empty.clone();
    keeping.keep = window;
    let (found, ran) = (decode(&keeping).kept, again(&keeping).kept);
    let at = found.iter().zip(&ran).position(|(a, b)| a != b).expect("a difference");
    let near = at.saturating_sub(12)..(at + 12).min(found.len()).min(ran.len());
    panic!(
        "{what}: they differ at instruction {}\nfound {:x?}\nran   {:x?}",
        keeping.keep.start + at as u64,
        &found[near.clone()],
        &ran[near]
    );
}

/// Several patches of a page where no packet tells which code ran before and which behind them.
// covers: trace/patches
#[test]
fn patches_between_two_packets_hold_from_their_instruction_on() {
    let recorded = compare("patches", &MachineConfig::new(Path::new(PATCHES)), &[]);
    let info = recorded.trace.info(0);
    // Two bytes here and two there come and go; pages that were told before are not told again.
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
            trace: Some(Options {
                filters: filters.to_vec(),
                ..Options::new(&at)
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
    clock: &'a Clock,
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
        trace: Some(Options {
            start: Some(When::Port(0x5e0, Some(1))),
            stop: Some(When::Port(0x5e0, Some(2))),
            ..Options::new(&at)
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
