//! A traced boot of Linux in the forms of other programs: perf prints the instructions that our decoder finds, and every instruction
//! is in the other forms.

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use guest_tests::retired::Lines;
use guest_tests::{linux_in_minivmm, minivmm, run};
use minivmm::trace::{At, Decode, Start, State, Trace};
use pt_flow::{Block, Event, EventKind, Visitor};

/// Loads modules, and runs programs.
const RUN: &str = "#!/bin/sh
load-modules
md5sum /sample
ps >/dev/null
";

struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Folder {
        let path = std::env::temp_dir().join(format!("minivmm-{name}-{}", std::process::id()));
        fs::create_dir(&path).unwrap();
        Folder(path)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn output(command: &mut Command) -> String {
    let output = command.output().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{command:?}: {errors}");
    String::from_utf8_lossy(&output.stdout).into_owned()
}

fn trace(args: &[&str]) -> Command {
    let mut command = Command::new(minivmm());
    command.arg("trace").args(args);
    command
}

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
            assert!(self.lines.each(block.ip, block.mode.bits(), bytes, |ip| ips.push(ip)));
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

/// All instructions between the PSBs around two steps, which is what is exported.
fn decoded(trace: &Trace, from: u64, to: u64) -> Vec<u64> {
    let options = Decode {
        from: At::Step(from),
        to: At::Step(to),
        ..Decode::default()
    };
    let mut all = Vec::new();
    let make = |start: &Start| Ips::new(start, &[]);
    trace.decode(0, &options, make, |ips, _| all.extend(ips.ips)).unwrap();
    all
}

/// The steps near which functions are executed first, and how many instructions there are in all.
fn steps_of(trace: &Trace, functions: &[&str]) -> (Vec<u64>, u64) {
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
    let summary = trace.decode(0, &Decode::default(), make, |ips, _| {
        for (found, here) in found.iter_mut().zip(ips.found) {
            *found = found.or(here);
        }
    });
    let summary = summary.unwrap();
    assert_eq!((summary.flow.gaps, summary.lost, &summary.damage[..]), (0, 0, &[][..]));
    let clock = trace.clock(0);
    let steps = found.iter().zip(functions).map(|(ticks, function)| {
        let ticks = ticks.unwrap_or_else(|| panic!("{function} is not executed"));
        clock.step(ticks).unwrap()
    });
    (steps.collect(), summary.flow.instructions)
}

/// What perf prints with these options: addresses, and all else.
fn perf(dir: &Path, itrace: &str) -> (Vec<u64>, Vec<String>) {
    let mut child = Command::new("perf")
        .args(["script", itrace, "-F", "ip", "-i"])
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

/// Exports a window and compares what perf prints of it.
fn window(trace: &Trace, folder: &Path, name: &str, from: u64, steps: u64) {
    let (first, last) = (from.to_string(), (from + steps).to_string());
    let dir = folder.join(name);
    output(
        self::trace(&["export", "--from", &first, "--to", &last, "--perf"])
            .arg(&dir)
            .arg(trace.folder()),
    );
    let ours = decoded(trace, from, from + steps);
    let (theirs, others) = perf(&dir, "--itrace=i1ie");
    fs::remove_dir_all(&dir).unwrap();
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
    assert!(same as u64 > steps / 2, "{name}: {same} instructions in {steps} steps");
}

// covers: 5/export-perf, 5/export-perf-linux, 5/export-linux
#[test]
fn perf_prints_the_same_instructions_and_nothing_is_lost_in_other_forms() {
    let folder = Folder::new("export");
    let inject = folder.0.join("inject");
    fs::create_dir(&inject).unwrap();
    fs::write(inject.join("run"), RUN).unwrap();
    let dir = folder.0.join("trace");
    let mut boot = linux_in_minivmm("console=ttyS0 panic=-1 quiet");
    boot.args(["--cpu-model", "skylake-server", "-m", "256M", "--inject"])
        .arg(&inject)
        .arg("--trace")
        .arg(&dir);
    run(&mut boot, Duration::from_secs(300)).must_end_with(0);
    let trace = Trace::open(&dir).unwrap();
    let full = guest_tests::full();
    let functions = ["start_kernel", "do_init_module", "__x64_sys_brk"];
    let (steps, total) = steps_of(&trace, &functions);
    assert!(total > 500_000_000, "{total}");
    for (name, from) in ["early", "module", "user"].iter().zip(&steps) {
        window(&trace, &folder.0, name, *from, if full { 5_000_000 } else { 3_000_000 });
    }

    // The whole boot: all code, with every change in it, is there.
    let all = folder.0.join("all");
    output(self::trace(&["export", "--perf"]).arg(&all).arg(&dir));
    let (_, errors) = perf(&all, "--itrace=e");
    assert_eq!(errors, [] as [String; 0]);
    fs::remove_dir_all(&all).unwrap();

    // All instructions are in every form: of the whole boot, or from the first program on.
    let dir = dir.to_str().unwrap();
    let from = if full { 0 } else { steps[2] }.to_string();
    let file = |name: &str| folder.0.join(name).to_str().unwrap().to_string();
    let (folded, callgrind) = (file("folded"), file("callgrind"));
    let export = [
        "export",
        dir,
        "--from",
        &from,
        "--folded",
        &folded,
        "--callgrind",
        &callgrind,
    ];
    let exported = self::trace(&export).output().unwrap();
    let line = String::from_utf8(exported.stderr).unwrap();
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
    for stack in ["init;", "load-modules;[user];", "do_syscall_64;"] {
        assert!(stacks.contains(stack), "{stack}");
    }
    let text = output(Command::new("callgrind_annotate").arg(&callgrind));
    let line = text.lines().find(|line| line.contains("PROGRAM TOTALS")).unwrap();
    assert_eq!(line.split(' ').next().unwrap().replace(',', ""), counted.to_string());
}
