//! A traced boot of Linux in the forms of other programs: perf prints the instructions that our decoder finds, and every instruction
//! is in the other forms.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use guest_tests::retired::Lines;
use guest_tests::{Folder, linux_in_minivmm, output_of, run, target, trace_command};
use pt_flow::{Block, Event, EventKind, Visitor};
use serde_json::Value;
use trace::symbols::SymbolFile;
use trace::{At, Decode, Start, State, Trace};

/// Loads modules, and runs programs; the last one goes from 6 to 1.
const RUN: &str = "#!/bin/sh
load-modules
md5sum /sample
ps >/dev/null
/inject/collatz
";

/// The functions of that program which are called from its table, as `cargo xtask demo` has them from perf, too; and the program's
/// instructions.
const STEPS: &str = "even odd even odd even even even even";
const COLLATZ: u64 = 115;

/// Takes down the address of each instruction, or finds where addresses are executed first, at which tick.
struct Ips<'a> {
    lines: Lines,
    ips: Vec<u64>,
    state: State,
    wanted: &'a [u64],
    found: Vec<Option<u64>>,
}

impl<'a> Ips<'a> {
    fn new(start: &Start, wanted: &'a [u64]) -> Ips<'a> {
        Ips {
            lines: Lines::default(),
            ips: Vec::new(),
            state: State::new(start),
            wanted,
            found: vec![None; wanted.len()],
        }
    }
}

impl Visitor for Ips<'_> {
    const CODE: bool = true;

    fn code(&mut self, block: &Block, bytes: &[u8]) {
        let ips = &mut self.ips;
        if self.wanted.is_empty() {
            assert!(
                self.lines
                    .each(block.ip, block.mode.bits(), bytes, &[], |ip| ips.push(ip))
            );
        } else if let Some(at) = self.wanted.iter().position(|wanted| *wanted == block.ip) {
            self.found[at] = self.found[at].or(self.state.ticks);
        }
    }
    fn block(&mut self, _: &Block) {}
    fn event(&mut self, event: &Event) {
        self.state.event(event);
        assert!(!matches!(event.kind, EventKind::Gap(_)), "{event:?}");
    }
}

/// All instructions of a vCPU between the PSBs around two steps, which is what is exported.
fn decoded(trace: &Trace, cpu: usize, from: u64, to: u64) -> Vec<u64> {
    let options = Decode {
        from: At::Step(from),
        to: At::Step(to),
        ..Decode::default()
    };
    let mut all = Vec::new();
    let make = |start: &Start| Ips::new(start, &[]);
    trace.decode(cpu, &options, make, |ips, _| all.extend(ips.ips)).unwrap();
    all
}

/// The steps near which a vCPU executes functions first, and how many instructions it executes in all.
fn steps_of(trace: &Trace, cpu: usize, functions: &[&str]) -> (Vec<u64>, u64) {
    let kallsyms = fs::read_to_string(trace.folder().join("linux/kallsyms")).unwrap();
    let address = |function: &&str| {
        let symbol = format!(" t {function}");
        let line = kallsyms.lines().find(|line| line.to_lowercase().ends_with(&symbol));
        let line = line.unwrap_or_else(|| panic!("there is no {function}"));
        u64::from_str_radix(&line[..16], 16).unwrap()
    };
    let addresses: Vec<u64> = functions.iter().map(address).collect();
    let mut found = vec![None; functions.len()];
    let make = |start: &Start| Ips::new(start, &addresses);
    let summary = trace.decode(cpu, &Decode::default(), make, |ips, _| {
        for (found, here) in found.iter_mut().zip(ips.found) {
            *found = found.or(here);
        }
    });
    let summary = summary.unwrap();
    assert_eq!((summary.flow.gaps, summary.lost, &summary.damage[..]), (0, 0, &[][..]));
    let clock = trace.clock(cpu);
    let steps = found.iter().zip(functions).map(|(ticks, function)| {
        let ticks = ticks.unwrap_or_else(|| panic!("{function} is not executed"));
        clock.step(ticks).unwrap()
    });
    (steps.collect(), summary.flow.instructions)
}

/// What perf prints with these options of some CPUs: addresses, and all else.
fn perf(dir: &Path, itrace: &str, cpus: &str) -> (Vec<u64>, Vec<String>) {
    let mut child = Command::new("perf")
        .args(["script", itrace, "-C", cpus, "-F", "ip", "-i"])
        .arg(dir)
        // Its notes of damage that was noticed are the same lines again.
        .stderr(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .expect("perf of the package linux-perf");
    let (mut ips, mut others) = (Vec::new(), Vec::new());
    for line in BufReader::new(child.stdout.take().unwrap()).lines() {
        let line = line.unwrap();
        match u64::from_str_radix(line.trim(), 16) {
            Ok(ip) => ips.push(ip),
            Err(_) => others.push(line),
        }
    }
    let status = child.wait().unwrap();
    assert!(status.success(), "perf script {itrace}: {status}");
    (ips, others)
}

/// perf has the functions of the ELF file of the kernel's symbols.
fn listed_by_perf(folder: &Path, trace: &Trace) {
    let elf = folder.join("symbols.elf");
    output_of(trace_command(&["symbols", "--elf"]).arg(&elf).arg(trace.folder()));
    let said = output_of(Command::new("perf").args(["probe", "-F", "-k"]).arg(&elf));
    let listed: BTreeSet<&str> = said.lines().collect();
    let symbols = SymbolFile::read(&elf).unwrap().symbols;
    let known: BTreeSet<&str> = symbols.iter().map(|symbol| symbol.name).collect();
    assert!(listed.len() > 30_000 && listed.is_subset(&known), "{}", listed.len());
    for name in ["start_kernel", "schedule", "do_init_module", "do_syscall_64"] {
        assert!(listed.contains(name), "{name}");
    }
}

/// Exports a window and compares what perf prints of it.
fn window(trace: &Trace, folder: &Path, name: &str, from: u64, steps: u64) {
    let (first, last) = (from.to_string(), (from + steps).to_string());
    let dir = folder.join(name);
    output_of(
        trace_command(&["export", "--from", &first, "--to", &last, "--perf"])
            .arg(&dir)
            .arg(trace.folder()),
    );
    let mut least = steps / 2;
    for cpu in 0..trace.cpus() {
        let name = format!("{name}, vCPU {cpu}");
        let ours = decoded(trace, cpu, from, from + steps);
        let (theirs, others) = perf(&dir, "--itrace=i1ie", &cpu.to_string());
        assert_eq!(others, [] as [String; 0], "{name}");
        let same = ours.iter().zip(&theirs).take_while(|(a, b)| a == b).count();
        eprintln!("{name}: {} here, {} there, {same} the same", ours.len(), theirs.len());
        // Where the packets end perf does not know what was executed behind the last one; we read on to the next PSB.
        assert!(
            same == theirs.len() && ours.len() - same < 100_000,
            "{name}: {same} of {} here and {} there; then {:x?} here, {:x?} there",
            ours.len(),
            theirs.len(),
            &ours[same..ours.len().min(same + 5)],
            &theirs[same..theirs.len().min(same + 5)],
        );
        least = least.saturating_sub(same as u64);
    }
    fs::remove_dir_all(&dir).unwrap();
    assert!(least == 0, "{name}: {least} instructions too few in {steps} steps");
}

/// Holds a file against the rules of the Trace Event Format (Google, "Trace Event Format": JSON object format, duration, instant and
/// metadata events), which ui.perfetto.dev and Chrome read. Gives the calls on a thread by its name.
fn trace_events(path: &Path) -> BTreeMap<String, u64> {
    #[derive(Default)]
    struct Thread {
        name: Option<String>,
        open: u64,
        last: f64,
        begun: u64,
    }
    let text = fs::read_to_string(path).unwrap();
    let file: Value = serde_json::from_str(&text).unwrap();
    assert!(["ms", "ns"].contains(&file["displayTimeUnit"].as_str().unwrap()));
    let mut threads: BTreeMap<(u64, u64), Thread> = BTreeMap::new();
    for event in file["traceEvents"].as_array().unwrap() {
        let number = |of: &str| event[of].as_u64().unwrap_or_else(|| panic!("{event}"));
        let thread = threads.entry((number("pid"), number("tid"))).or_default();
        let phase = event["ph"].as_str().unwrap();
        if phase == "M" {
            let args = &event["args"];
            match event["name"].as_str().unwrap() {
                "process_name" => assert!(args["name"].is_string(), "{event}"),
                "thread_name" => thread.name = Some(args["name"].as_str().unwrap().into()),
                "thread_sort_index" => assert!(args["sort_index"].is_i64(), "{event}"),
                _ => panic!("{event}"),
            }
            continue;
        }
        // Microseconds; of a thread in their order.
        let time = event["ts"].as_f64().unwrap();
        assert!(time >= thread.last, "{event} behind {}", thread.last);
        thread.last = time;
        match phase {
            "B" => {
                assert!(event["name"].is_string(), "{event}");
                thread.open += 1;
                thread.begun += 1;
            }
            // Ends the one that was begun last.
            "E" => thread.open = thread.open.checked_sub(1).unwrap_or_else(|| panic!("{event}")),
            "i" => assert!(event["name"].is_string() && event["s"] == "t", "{event}"),
            _ => panic!("{event}"),
        }
    }
    let of = |thread: Thread| {
        assert_eq!(thread.open, 0, "{:?}", thread.name);
        Some((thread.name?, thread.begun))
    };
    threads.into_values().filter_map(of).collect()
}

// covers: trace/export-perf, trace/export-perf-linux, trace/export-linux, trace/export-trace-events, symbols/elf, symbols/user, trace/module-load
#[test]
fn perf_prints_the_same_instructions_and_nothing_is_lost_in_other_forms() {
    let folder = Folder::new("export");
    let inject = folder.join("inject");
    fs::create_dir(&inject).unwrap();
    fs::write(inject.join("run"), RUN).unwrap();
    let program = target().join("guest/programs/collatz");
    fs::copy(&program, inject.join("collatz")).unwrap();
    let dir = folder.join("trace");
    let mut boot = linux_in_minivmm("console=ttyS0 panic=-1 quiet");
    boot.args(["--cpu-model", "skylake-server", "-m", "256M", "--inject"])
        .arg(&inject)
        .arg("--trace")
        .arg(&dir);
    run(&mut boot, Duration::from_secs(300)).must_end_with(0);
    let trace = Trace::open(&dir).unwrap();
    let full = guest_tests::full();
    let functions = ["start_kernel", "do_init_module", "__x64_sys_brk"];
    let (steps, total) = steps_of(&trace, 0, &functions);
    assert!(total > 500_000_000, "{total}");
    for (name, from) in ["early", "module", "user"].iter().zip(&steps) {
        window(&trace, &folder, name, *from, if full { 5_000_000 } else { 3_000_000 });
    }

    listed_by_perf(&folder, &trace);

    // The whole boot: all code, with every change in it, is there.
    let all = folder.join("all");
    output_of(trace_command(&["export", "--perf"]).arg(&all).arg(&dir));
    let (_, errors) = perf(&all, "--itrace=e", "0");
    assert_eq!(errors, [] as [String; 0]);
    fs::remove_dir_all(&all).unwrap();

    // Calls over time: the second window, with a module that is loaded.
    let events = folder.join("events.json");
    let (first, last) = (steps[1].to_string(), (steps[1] + 3_000_000).to_string());
    let mut export = trace_command(&["export", "--from", &first, "--to", &last, "--trace-events"]);
    let said = export.arg(&events).arg(&dir).output().unwrap();
    let said = String::from_utf8(said.stderr).unwrap();
    let threads = trace_events(&events);
    let of_threads = threads.iter().filter(|(name, _)| !name.starts_with("vCPU"));
    let calls: u64 = of_threads.map(|(_, calls)| calls).sum();
    assert!(
        calls > 10_000 && said.contains(" 0 gaps, 0 overflows"),
        "{calls}: {said}"
    );
    assert!(threads["vCPU 0"] > 0, "{threads:?}");

    // All instructions are in every form: of the whole boot, or from the first program on.
    let dir = dir.to_str().unwrap();
    let from = if full { 0 } else { steps[2] }.to_string();
    let file = |name: &str| folder.join(name).to_str().unwrap().to_string();
    let (folded, callgrind, flamegraph) = (file("folded"), file("callgrind"), file("flame.svg"));
    let export = [
        "export",
        dir,
        "--from",
        &from,
        "--folded",
        &folded,
        "--callgrind",
        &callgrind,
        "--flamegraph",
        &flamegraph,
        "--symbols-user",
        program.to_str().unwrap(),
    ];
    let exported = trace_command(&export).output().unwrap();
    let said = String::from_utf8(exported.stderr).unwrap();
    // Where it takes long, lines of how far it is come before.
    let line = said.lines().last().unwrap_or_default();
    let counted: u64 = line
        .split(' ')
        .nth(1)
        .and_then(|count| count.parse().ok())
        .unwrap_or_else(|| panic!("{line}"));
    assert!(line.contains(" 0 gaps, 0 overflows") && counted > 10_000_000, "{line}");
    assert!(!full || counted == total, "{line} of {total}");
    let stacks = fs::read_to_string(&folded).unwrap();
    let sum: u64 = stacks
        .lines()
        .map(|line| line.rsplit_once(' ').unwrap().1.parse::<u64>().unwrap())
        .sum();
    assert_eq!(sum, counted);
    for stack in ["init;", "load-modules;[busybox];", "do_syscall_64;"] {
        assert!(stacks.contains(stack), "{stack}");
    }
    // The program's own instructions are those of its functions, and stand below each other.
    let of_program = |line: &&str| line.rsplit_once(' ').unwrap().0.ends_with(" [collatz]");
    let (mut instructions, mut stacks_of_even) = (0, 0);
    for line in stacks.lines().filter(of_program) {
        let (stack, count) = line.rsplit_once(' ').unwrap();
        instructions += count.parse::<u64>().unwrap();
        assert!(stack.starts_with("collatz;"), "{line}");
        stacks_of_even += u64::from(stack.ends_with(";main [collatz];steps [collatz];even [collatz]"));
    }
    assert_eq!((instructions, stacks_of_even > 0), (COLLATZ, true));
    calls_of_the_program(dir, &program);
    let picture = fs::read_to_string(&flamegraph).unwrap();
    let digits = picture
        .split_once("<title>all (")
        .unwrap()
        .1
        .split_once(" instructions")
        .unwrap()
        .0;
    assert_eq!(digits.replace(',', ""), counted.to_string());
    let text = output_of(Command::new("callgrind_annotate").arg(&callgrind));
    let line = text.lines().find(|line| line.contains("PROGRAM TOTALS")).unwrap();
    assert_eq!(line.split(' ').next().unwrap().replace(',', ""), counted.to_string());
}

/// A user's program with the file of its functions: they come by name, in their order.
fn calls_of_the_program(dir: &str, program: &Path) {
    let mut decode = trace_command(&["decode", dir, "--calls", "--from", "steps", "--symbols-user"]);
    let mut child = decode.arg(program).stdout(Stdio::piped()).spawn().unwrap();
    let lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let mut called = Vec::new();
    for line in lines.map(Result::unwrap) {
        let Some((before, _)) = line.split_once(" [collatz]") else {
            continue;
        };
        match before.rsplit(' ').next() {
            // A function that an interrupt came in ends on another line.
            Some(name @ ("even" | "odd")) if !before.contains('}') => called.push(name.to_string()),
            Some("steps") if before.contains('}') => break,
            _ => {}
        }
    }
    child.kill().unwrap();
    child.wait().unwrap();
    assert_eq!(called.join(" "), STEPS);
}

/// `--vcpu` shows one of two.
fn one_or_both(dir: &Path, from: u64) {
    let (from, to) = (from.to_string(), (from + 100_000).to_string());
    let mut found = Vec::new();
    for options in [&[][..], &["--vcpu", "0"], &["--vcpu", "1"]] {
        let mut decode = trace_command(&["decode", "--json", "--from", &from, "--to", &to]);
        let mut counts = [0; 2];
        for line in output_of(decode.args(options).arg(dir)).lines() {
            let line: Value = serde_json::from_str(line).unwrap();
            if let (Some(cpu), Some(count)) = (line["vcpu"].as_u64(), line["instructions"].as_u64()) {
                counts[cpu as usize] += count;
            }
        }
        found.push(counts);
    }
    let [both, first, second] = found[..] else {
        unreachable!()
    };
    assert!(both.iter().all(|count| *count > 1000), "{both:?}");
    assert_eq!((first, second), ([both[0], 0], [0, both[1]]));
}

/// Two vCPUs: perf has each one's instructions from where the second is in 64-bit mode on, which is what perf takes all code for.
// covers: trace/export-perf-smp, trace/smp-linux, trace/vcpu
#[test]
fn perf_prints_the_instructions_of_two_cpus() {
    let folder = Folder::new("export-smp");
    let dir = folder.join("trace");
    let full = guest_tests::full();
    let mut boot = linux_in_minivmm("console=ttyS0 panic=-1 quiet minivmm.script=nothing");
    boot.args(["--cpus", "2", "--cpu-model", "skylake-server", "-m", "256M", "--trace"])
        .arg(&dir);
    if !full {
        boot.args(["--max-instructions", "280000000"]);
    }
    run(&mut boot, Duration::from_secs(300)).must_end_with(if full { 0 } else { 8 });
    let trace = Trace::open(&dir).unwrap();
    let (steps, _) = steps_of(&trace, 1, &["cpu_startup_entry"]);
    window(&trace, &folder, "two", steps[0], 3_000_000);
    one_or_both(&dir, steps[0]);
    // From there on to the end.
    let all = folder.join("all");
    output_of(
        trace_command(&["export", "--from", &steps[0].to_string(), "--perf"])
            .arg(&all)
            .arg(&dir),
    );
    let (_, errors) = perf(&all, "--itrace=e", "0,1");
    assert_eq!(errors, [] as [String; 0]);
}

/// Lines of `--folded`, as stacks without the modules' names, and their instructions.
fn stacks(folded: &Path) -> Vec<(Vec<String>, u64)> {
    let name = |frame: &str| frame.split(" [").next().unwrap_or(frame).to_string();
    let line = |line: &str| {
        let (stack, count) = line.rsplit_once(' ').unwrap();
        (stack.split(';').map(name).collect(), count.parse().unwrap())
    };
    fs::read_to_string(folded).unwrap().lines().map(line).collect()
}

/// Reads a file by Perfetto's own schema, from its package: slices nest and time goes on on each track, all names are there. Gives how many
/// slices each track has, by process, thread and name.
const BY_SCHEMA: &str = r#"
import collections, sys, zlib
from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as schema

def packets(data):
    trace = schema.Trace()
    trace.ParseFromString(data)
    for packet in trace.packet:
        if packet.HasField("compressed_packets"):
            yield from packets(zlib.decompress(packet.compressed_packets))
        else:
            yield packet

names, tracks, last = {}, {}, {}
depth, begun = collections.Counter(), collections.Counter()
for packet in packets(open(sys.argv[1], "rb").read()):
    for name in packet.interned_data.event_names:
        names[name.iid] = name.name
    if packet.HasField("track_descriptor"):
        tracks[packet.track_descriptor.uuid] = packet.track_descriptor
    if packet.HasField("track_event"):
        event = packet.track_event
        assert event.track_uuid in tracks, event
        assert last.get(event.track_uuid, 0) <= packet.timestamp, packet
        last[event.track_uuid] = packet.timestamp
        if event.type == schema.TrackEvent.TYPE_SLICE_BEGIN:
            assert event.name or names[event.name_iid]
            depth[event.track_uuid] += 1
            begun[event.track_uuid] += 1
        elif event.type == schema.TrackEvent.TYPE_SLICE_END:
            assert depth[event.track_uuid] > 0, packet
            depth[event.track_uuid] -= 1
assert not any(depth.values()), depth
for uuid, track in tracks.items():
    if track.HasField("thread"):
        parent = tracks[track.parent_uuid]
        assert parent.process.pid == track.thread.pid
        print(track.thread.pid, track.thread.tid, begun[uuid], track.thread.thread_name, sep="\t")
    else:
        print(0, 0, begun[uuid], track.name or track.process.process_name, sep="\t")
"#;

/// What is known beforehand: `guest-tests/linux/programs/threads.c`.
// covers: trace/stacks-by-thread, trace/export-perfetto
#[test]
fn stacks_are_those_of_threads_forks_and_signals() {
    for cpus in if guest_tests::full() { &["2", "1"][..] } else { &["2"] } {
        let folder = Folder::new("threads");
        let inject = folder.join("inject");
        fs::create_dir(&inject).unwrap();
        fs::write(inject.join("run"), "#!/bin/sh\n/inject/threads\n").unwrap();
        let program = target().join("guest/programs/threads");
        fs::copy(&program, inject.join("threads")).unwrap();
        let dir = folder.join("trace");
        let mut boot = linux_in_minivmm("console=ttyS0 panic=-1 quiet");
        boot.args([
            "--cpu-model",
            "skylake-server",
            "-m",
            "256M",
            "--cpus",
            cpus,
            "--inject",
        ])
        .arg(&inject)
        .arg("--trace")
        .arg(&dir);
        run(&mut boot, Duration::from_secs(300)).must_end_with(0);
        let (folded, perfetto) = (folder.join("folded"), folder.join("perfetto"));
        let mut export = trace_command(&["export", "--symbols-user"]);
        // Short calls are not the point, and there are ten million of them.
        export
            .arg(&program)
            .arg("--folded")
            .arg(&folded)
            .args(["--least", "20"])
            .arg("--perfetto")
            .arg(&perfetto);
        output_of(export.arg(&dir));

        let stacks = stacks(&folded);
        let of_main = ["threads", "_start", "main"].as_slice();
        // How often each was called, and from where.
        let expected: [(&[&str], &str, u64); 5] = [
            (&[of_main, &["main_turns"]].concat(), "leaf_of_main", 50),
            (&[of_main, &["raise_signal"]].concat(), "leaf_of_main", 1),
            (&[of_main, &["raise_signal", "handler"]].concat(), "leaf_of_handler", 1),
            (&[of_main, &["child_runs"]].concat(), "leaf_of_child", 1),
            (&["threads", "spawn", "thread"], "leaf_of_thread", 50),
        ];
        let once = |path: &[&str], leaf: &str| {
            let path: Vec<&str> = [path, &[leaf, "spin"]].concat();
            let of = |(stack, count): &&(Vec<String>, u64)| stack.iter().eq(path.iter()).then_some(*count);
            stacks.iter().find_map(|line| of(&line)).unwrap_or(0)
        };
        let one = once(&[of_main, &["raise_signal"]].concat(), "leaf_of_main");
        assert!(one > 1000, "{one}");
        for (path, leaf, times) in expected {
            assert_eq!(once(path, leaf), times * one, "{cpus} CPUs: {path:?} {leaf}");
        }
        let wrong = stacks.iter().filter(|(stack, _)| {
            let leaf = stack.iter().position(|frame| frame.starts_with("leaf_of_"));
            leaf.is_some_and(|at| {
                !expected
                    .iter()
                    .any(|(path, leaf, _)| stack[..at].iter().eq(path.iter()) && stack[at] == *leaf)
            })
        });
        assert_eq!(wrong.collect::<Vec<_>>(), [] as [&(Vec<String>, u64); 0], "{cpus} CPUs");
        // Linux goes from one thread to another in one place, and no stack leads through it into another's.
        for (stack, _) in &stacks {
            let switches = stack.iter().filter(|frame| *frame == "__switch_to_asm").count();
            assert!(switches <= 1, "{stack:?}");
        }
        // Threads of the kernel begin where all new threads do.
        let mut daemons = stacks.iter().filter(|(stack, _)| stack[0].starts_with("ksoftirqd/"));
        assert!(daemons.clone().count() > 10);
        assert!(daemons.all(|(stack, _)| stack[1] == "ret_from_fork"));

        let python = target().join("host/perfetto/bin/python");
        let listed = output_of(Command::new(python).args(["-c", BY_SCHEMA]).arg(&perfetto));
        let tracks: Vec<Vec<&str>> = listed.lines().map(|line| line.split('\t').collect()).collect();
        let (mut ours, mut slices) = (Vec::new(), 0);
        for track in &tracks {
            let [pid, tid, count, name] = track[..] else {
                panic!("{track:?}")
            };
            slices += count.parse::<u64>().unwrap();
            if name == "threads" && pid != "0" {
                ours.push((pid == tid, count.parse::<u64>().unwrap()));
            }
        }
        // The program, its child, and its second thread.
        ours.sort_unstable();
        assert!(matches!(ours[..], [(false, _), (true, _), (true, _)]), "{ours:?}");
        assert!(ours.iter().all(|(_, calls)| *calls > 20), "{ours:?}");
        for cpu in 0..cpus.parse().unwrap() {
            assert!(
                tracks
                    .iter()
                    .any(|track| track[3] == format!("vCPU {cpu}") && track[2] != "0"),
                "{listed}"
            );
        }
        let bytes = fs::metadata(&perfetto).unwrap().len();
        assert!(bytes <= 20 * slices, "{bytes} bytes for {slices} slices");
    }
}
