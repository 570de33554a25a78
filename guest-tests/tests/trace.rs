//! Traces of a booting Linux: what our decoder and Intel's libipt make of them is what retired, to the instruction.

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use guest_tests::linux;
use guest_tests::retired::{Heard, Lines, Retired, Stream};
use minivmm::trace::{Decode, Options, Trace, raw};
use minivmm::{Console, MachineConfig, Vm};
use pt_flow::{Block, Event, EventKind, Visitor};
use pt_oracle::libipt;

/// A folder of its own, removed with all that is in it.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Folder {
        let path = std::env::temp_dir().join(format!("minivmm-{name}-{}", std::process::id()));
        fs::create_dir(&path).expect("a folder for the test");
        Folder(path)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn full() -> bool {
    std::env::var_os("MINIVMM_FULL").is_some()
}

/// A boot of Linux that switches itself off at its end, or after so many steps.
fn config(model: &str, cpus: u8) -> MachineConfig {
    MachineConfig {
        initrd: Some(linux().initrd.clone()),
        cmdline: Some(b"console=ttyS0 panic=-1 minivmm.script=nothing".to_vec()),
        max_instructions: if full() { None } else { Some(15_000_000) },
        cpus,
        model: minivmm::model::find(model).expect("a model"),
        ..MachineConfig::new(&linux().kernel)
    }
}

/// Runs it; gives the digest of the machine at its end.
fn run(config: &MachineConfig, prepare: impl FnOnce(&mut Vm)) -> u64 {
    let mut vm = Vm::new(config).expect("a machine");
    prepare(&mut vm);
    let mut console = Console::open(&config.serial, &[], vm.line()).expect("a console");
    vm.run(&mut console).expect("a run");
    for cpu in 0..vm.cpu_count() {
        if config.trace.is_none() {
            vm.machine().observe(cpu, None);
        }
    }
    vm.end_trace("the test").expect("the trace is written");
    vm.digest()
}

/// What each CPU retires, by an observer that has nothing to do with traces; and the digest.
fn retired(config: &MachineConfig) -> (Vec<Stream>, u64) {
    let mut heard: Vec<Arc<Mutex<Heard>>> = Vec::new();
    let digest = run(config, |vm| {
        for cpu in 0..vm.cpu_count() {
            let (observer, ears) = Retired::new();
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
        let before = stream.count;
        let whole = lines.each(block.ip, bits, bytes, |ip| stream.push(ip));
        assert!(
            whole && stream.count - before == u64::from(block.count),
            "{block:x?} {bytes:02x?}"
        );
    }
    fn block(&mut self, _: &Block) {}
    fn event(&mut self, event: &Event) {
        if matches!(event.kind, EventKind::Gap(_)) {
            self.gaps.push(*event);
        }
    }
}

/// What our decoder finds on a CPU.
fn decoded(trace: &Trace, cpu: usize) -> Stream {
    let stream = Mutex::default();
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
fn by_libipt(raw: &Path, cpu: usize) -> Stream {
    let packets = fs::read(raw.join(format!("cpu{cpu}.pt"))).expect("packets");
    let map = fs::read_to_string(raw.join(format!("cpu{cpu}.map"))).expect("a map");
    let pages = raw.join(format!("cpu{cpu}.pages"));
    let number = |text: &str| match text.strip_prefix("0x") {
        Some(text) => u64::from_str_radix(text, 16).expect("a number"),
        None => text.parse().expect("a number"),
    };
    let mut image = libipt::Image::new([]);
    let mut stream = Stream::default();
    let mut span: Option<(usize, usize, Option<u64>)> = None;
    let mut decode = |span: Option<(usize, usize, Option<u64>)>, image: &libipt::Image| {
        let Some((begin, end, next)) = span else { return };
        let mut ips = Vec::new();
        if let Err(error) = libipt::instructions(&packets[begin..end], image, |ip| ips.push(ip)) {
            panic!("{error} in the span from {begin:#x} to {end:#x}");
        }
        // Without a packet libipt walks on; what is behind the change belongs to the next span.
        if let Some(next) = next {
            let at = ips.iter().rposition(|ip| *ip == next);
            ips.truncate(at.unwrap_or(ips.len()));
        }
        ips.into_iter().for_each(|ip| stream.push(ip));
    };
    let mut at: HashMap<(u64, u64), u64> = HashMap::new();
    for line in map.lines().filter(|line| !line.starts_with('#')) {
        let words: Vec<&str> = line.split(' ').collect();
        match words[..] {
            ["span", begin, end, next] => {
                decode(span, &image);
                let next = (next != "-").then(|| number(next));
                span = Some((number(begin) as usize, number(end) as usize, next));
            }
            [cr3, address, page] => {
                let cr3 = if cr3 == "-" { u64::MAX } else { number(cr3) };
                at.insert((cr3, number(address)), number(page));
                image.add_file(
                    &pages,
                    number(page) * 4096,
                    4096,
                    number(address),
                    (cr3 != u64::MAX).then_some(cr3),
                );
            }
            _ => panic!("{line}"),
        }
    }
    decode(span, &image);
    stream
}

/// Two streams of the same run, whose last instructions one of them may not have heard of.
fn same(found: &Stream, ran: &Stream, what: &str) {
    let windows = found.windows.len().min(ran.windows.len());
    assert!(
        windows > 0 && found.count.abs_diff(ran.count) < 1000,
        "{what}: {} and {} instructions",
        found.count,
        ran.count
    );
    let differ = (0..windows).find(|&n| found.windows[n] != ran.windows[n]);
    assert_eq!(differ, None, "{what}: of {windows} windows");
}

// covers: 5/trace-linux
// covers: 4/pt-oracle-linux
#[test]
fn traces_of_a_booting_linux_are_what_retired() {
    // Models with and without Intel PT. The oracle reads code as a supervisor does.
    let models: &[&str] = if full() {
        &["westmere", "skylake-server,-smap", "haswell", "icelake-server,-smap"]
    } else {
        &["westmere"]
    };
    for model in models {
        let folder = Folder::new("boot");
        let plain = config(model, 1);
        let at = folder.0.join("trace");
        let traced = MachineConfig {
            trace: Some(Options::new(&at)),
            ..plain.clone()
        };
        let digest = run(&traced, |_| {});
        let (streams, other) = retired(&plain);
        assert_eq!(digest, other, "{model}: the guest cannot tell");
        let trace = Trace::open(&at).expect("a trace");
        same(&decoded(&trace, 0), &streams[0], &format!("{model}, our decoder"));
        let out = folder.0.join("raw");
        raw::export(&trace, &out, &mut |_, _| {}).expect("raw files");
        same(&by_libipt(&out, 0), &streams[0], &format!("{model}, libipt"));
    }
}
