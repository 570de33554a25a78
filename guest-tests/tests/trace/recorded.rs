//! What our decoder and Intel's libipt make of a recording, beside what retired.

use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use minivmm::recording::RecordingOptions;
use minivmm::{Console, MachineConfig, Run, front::monitor};
use pt_flow::{Block, Event, EventKind, Visitor};
use pt_oracle::libipt;
use trace::{Decode, Trace, raw};

use guest_tests::Folder;
use guest_tests::raw::Raw;
use guest_tests::retired::{Heard, Lines, Retired, Stream};

/// Runs it, prepared at a step; gives the digest of the machine at its end.
pub fn run(config: &MachineConfig, from: u64, prepare: impl FnOnce(&mut Run)) -> u64 {
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
pub fn retired(config: &MachineConfig, from: u64, empty: &Stream) -> (Vec<Stream>, u64) {
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
pub fn decoded(trace: &Trace, cpu: usize, empty: &Stream) -> Stream {
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
pub fn by_libipt(folder: &Path, cpu: usize, empty: &Stream) -> Stream {
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
pub fn same(found: &Stream, ran: &Stream, what: &str) {
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

/// Records a machine from a step on and compares each vCPU's stream, as our decoder finds it, with what retired.
pub fn follow(name: &str, plain: &MachineConfig, from: u64) {
    let folder = Folder::new("sweep");
    let at = folder.join("trace");
    let digest = run(plain, from, |vm| {
        vm.begin_trace(&RecordingOptions::new(&at)).expect("a recording");
    });
    let trace = Trace::open(&at).expect("a trace");
    let empty = Stream::default();
    let (streams, untraced) = retired(plain, from, &empty);
    assert_eq!(digest, untraced, "{name}: the guest cannot tell");
    for (cpu, ran) in streams.iter().enumerate() {
        let again = |empty: &Stream| retired(plain, from, empty).0.swap_remove(cpu);
        let what = format!("{name}, vCPU {cpu}");
        // A CPU that has not been started executes nothing.
        if ran.count > 0 {
            hold(&what, &empty, ran, again, |empty| decoded(&trace, cpu, empty));
        }
    }
}

/// A machine's trace, and its raw form.
pub struct Recorded {
    /// What was recorded.
    pub trace: Trace,
    /// Its raw form's folder.
    pub raw: PathBuf,
    /// Of the machine at its end.
    pub digest: u64,
    /// Removed last.
    _folder: Folder,
}

/// Records a machine, which cannot tell that it is recorded; from a step on, if that is not the first, as the monitor begins it.
pub fn record(name: &str, plain: &MachineConfig, from: u64) -> Recorded {
    let folder = Folder::new(name);
    let at = folder.join("trace");
    let traced = MachineConfig {
        trace: (from == 0).then(|| RecordingOptions::new(&at)),
        ..plain.clone()
    };
    let digest = run(&traced, from, |vm| {
        if from > 0 {
            let line = format!("trace start {}", at.display());
            let reported =
                monitor::answer(&mut minivmm::front::controls::Controls::new(vm), 0, &line).expect("a recording");
            assert!(
                reported.ends_with(&format!("recording from step {from}\n")),
                "{reported}"
            );
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
pub fn compare(name: &str, plain: &MachineConfig, skip: &[Range<u64>]) -> Recorded {
    compare_from(name, plain, 0, skip)
}

/// The same from a step on.
pub fn compare_from(name: &str, plain: &MachineConfig, from: u64, skip: &[Range<u64>]) -> Recorded {
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
pub fn hold(
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
