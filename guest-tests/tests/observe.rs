//! The examples of observers, on Linux and on a bare guest, against what the guest, its kernel and a trace say.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use guest_tests::{Folder, LOOPS, SMP, WALK, WALK_SYMBOLS, in_minivmm, linux, minivmm, run};
use minivmm::debug::{WatchKind, Watchpoint};
use minivmm::observe::{Observer, Place, SystemCall, Wanted, Write};
use minivmm::recording::GuestMemory;
use minivmm::{Console, MachineConfig, Run, StopReason};
use trace::linux::{Kernel, Module, Task};
use x86::watch::{BranchRecord, EventRecord};

#[allow(dead_code, reason = "its main is the program")]
#[path = "../../vmm/examples/coverage.rs"]
mod coverage;
#[allow(dead_code, reason = "its main is the program")]
#[path = "../../vmm/examples/system_calls.rs"]
mod system_calls;
#[allow(dead_code, reason = "its main is the program")]
#[path = "../../vmm/examples/written_pages.rs"]
mod written_pages;

const LIMIT: Duration = Duration::from_secs(600);

/// A Linux that runs a script and powers off.
fn scripted(folder: &Folder, script: &str) -> MachineConfig {
    let scripts = folder.join("scripts");
    fs::create_dir(&scripts).unwrap();
    folder.script("scripts/run", script);
    MachineConfig {
        initrd: vec![linux().initrd.clone().into()],
        inject: Some(scripts),
        cmdline: Some(b"console=ttyS0 quiet panic=-1".to_vec()),
        memory: 256 << 20,
        ..MachineConfig::new(&linux().kernel)
    }
}

// covers: observe/system-calls
#[test]
fn the_tracer_sees_the_system_calls_that_a_program_makes() {
    let folder = Folder::new("observe-calls");
    let config = scripted(
        &folder,
        "#!/bin/sh\ndd if=/dev/zero of=/dev/null bs=3 count=1234 2>/dev/null\n",
    );
    let calls = system_calls::calls(&config).unwrap();
    // arch/x86/entry/syscalls/syscall_64.tbl: read is 0, write 1. The shell runs its own dd, in a process of the script's name.
    let of = |end: &str| {
        let is = |line: &&String| line.contains(" run ") && line.contains(&format!(": {end}"));
        let these = calls.iter().filter(is).filter(|line| line.ends_with(", 0x3)"));
        let process = |line: &String| line.split(' ').nth(2).map(str::to_string);
        let all: Vec<_> = these.map(process).collect();
        (all.len(), all.iter().collect::<BTreeSet<_>>().len())
    };
    assert_eq!((of("0(0x0, "), of("1(0x1, ")), ((1234, 1), (1234, 1)));
    // Steps only grow, and other processes are named as well: of the script, whose name came with its program, and the first.
    let steps: Vec<u64> = calls
        .iter()
        .map(|line| line.split(' ').next().unwrap().parse().unwrap())
        .collect();
    assert!(steps.is_sorted());
    assert!(calls.iter().any(|line| line.contains(" init 1: ")));
}

// covers: observe/written-pages
#[test]
fn the_map_counts_the_writes_to_a_page() {
    let folder = Folder::new("observe-pages");
    let config = scripted(&folder, "#!/bin/sh\nsleep 1\n");
    let mut run = Run::new(&config).unwrap();
    let mut console = Console::open(&config.serial, &[], run.line()).unwrap();
    assert!(matches!(run.run(&mut console).unwrap(), StopReason::Ended(_)));
    let memory = &mut GuestMemory::new(run.machine().memory());
    let kernel = Kernel::find(memory).unwrap();
    let jiffies = kernel.symbols().address("jiffies").unwrap();
    drop(run);
    // A debugger's watchpoint stops as often.
    let mut run = Run::new(&config).unwrap();
    let mut console = Console::open(&config.serial, &[], run.line()).unwrap();
    let watchpoint = Watchpoint::new(jiffies, 8, WatchKind::Write).unwrap();
    run.debugger().add_watchpoint(watchpoint);
    let mut stops = 0;
    while let StopReason::Debugger(_) = run.run(&mut console).unwrap() {
        stops += 1;
    }
    assert!(stops > 100, "{stops}");
    drop(run);
    let pages = written_pages::written(&config, jiffies..=jiffies + 7).unwrap();
    let page = jiffies & !0xfff;
    assert_eq!(pages.into_iter().collect::<Vec<_>>(), [(page, stops)]);
    let map = written_pages::map(&[(0x1000, 1), (0x3000, 1234)].into(), 0x1000..=0x40fff);
    assert_eq!(map, format!("{:#018x} 0.3{}\n", 0x1000, ".".repeat(61)));
}

// covers: observe/coverage
#[test]
fn coverage_is_of_what_a_trace_has_and_of_the_lines_that_ran() {
    let code = 0x10_0000..0x10_4000;
    let config = MachineConfig::new(WALK);
    let (drcov, lcov) = coverage::cover(&config, WALK_SYMBOLS, code.clone()).unwrap();
    // The blocks, by the form's own table.
    let mark = b" bbs\n";
    let table = drcov.windows(mark.len()).position(|window| window == mark).unwrap() + mark.len();
    let entries = drcov[table..].chunks_exact(8).map(|entry| {
        let start = code.start + u64::from(u32::from_le_bytes(entry[..4].try_into().unwrap()));
        start..start + u64::from(u16::from_le_bytes(entry[4..6].try_into().unwrap()))
    });
    let ours: BTreeSet<u64> = entries.flatten().collect();
    // What a decoder of the packets makes of the same run.
    let folder = Folder::new("observe-coverage");
    let trace = folder.join("trace");
    let mut traced = in_minivmm(WALK);
    run(traced.arg("--trace").arg(&trace), LIMIT);
    let mut decode = Command::new(minivmm());
    let decoded = run(decode.args(["trace", "decode", "--json"]).arg(&trace), LIMIT).must_end_with(0);
    let mut theirs = BTreeSet::new();
    for line in decoded.console.lines() {
        let line: serde_json::Value = serde_json::from_str(line).unwrap();
        if line["type"] == "block" {
            let ip = line["ip"].as_str().unwrap().trim_start_matches("0x");
            let (ip, len) = (u64::from_str_radix(ip, 16).unwrap(), line["len"].as_u64().unwrap());
            theirs.extend((ip..ip + len).filter(|at| code.contains(at)));
        }
    }
    assert!(ours.len() > 200, "{}", ours.len());
    // What ran before the first branch and behind the last one is in no block.
    let apart: Vec<u64> = ours.symmetric_difference(&theirs).copied().collect();
    assert!(ours.is_subset(&theirs) && apart.len() < 100, "{apart:x?}");
    // walk.c, where each line stands.
    let source = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("guests/walk.c")).unwrap();
    let of_walk = lcov
        .split("end_of_record")
        .find(|part| part.contains("/walk.c\n"))
        .unwrap();
    let ran = |text: &str| {
        let line = source.lines().position(|line| line.contains(text)).unwrap() + 1;
        let count = of_walk
            .lines()
            .find_map(|said| said.strip_prefix(&format!("DA:{line},")));
        count
            .unwrap_or_else(|| panic!("{text}: {of_walk}"))
            .parse::<u64>()
            .unwrap()
    };
    // Calls of `leaf`: 3 and 100000.
    assert_eq!(ran("sum += x;"), 100_003);
    assert_eq!(ran("entry[at] = 77;"), 1);
    assert!(ran("while (left) left--;") >= 50_000);
}

/// Wants everything, and counts it.
#[derive(Default)]
struct All {
    heard: [u64; 6],
    modules: Vec<String>,
}

impl Observer for All {
    fn wanted(&self) -> Wanted {
        Wanted {
            branches: true,
            events: true,
            system_calls: true,
            process_switches: true,
            module_loads: true,
            writes: vec![0x10_0000..=0x20_0000],
        }
    }

    fn branch(&mut self, _: &Place, _: &BranchRecord) {
        self.heard[0] += 1;
    }

    fn write(&mut self, _: &Place, _: &Write) {
        self.heard[1] += 1;
    }

    fn event(&mut self, _: &Place, _: &EventRecord) {
        self.heard[2] += 1;
    }

    fn system_call(&mut self, _: &Place, _: &SystemCall) {
        self.heard[3] += 1;
    }

    fn process_switch(&mut self, _: &Place, _: Option<&Task>) {
        self.heard[4] += 1;
    }

    fn module_load(&mut self, _: &Place, module: &Module) {
        self.heard[5] += 1;
        self.modules.push(module.name.clone());
    }
}

fn digest(config: &MachineConfig, observed: bool) -> (u64, u64, Option<All>) {
    let mut run = Run::new(config).unwrap();
    let mut console = Console::open(&config.serial, &[], run.line()).unwrap();
    let all = observed.then(|| run.observe(All::default()));
    assert!(matches!(run.run(&mut console).unwrap(), StopReason::Ended(_)));
    let heard = all.map(|all| std::mem::take(&mut *all.get()));
    (run.steps(), run.digest(), heard)
}

// covers: observe/invisible, observe/modules
#[test]
fn a_guest_does_not_notice_that_it_is_observed() {
    let folder = Folder::new("observe-all");
    let linux = scripted(&folder, "#!/bin/sh\nload-modules\nlsmod\n");
    let loops = MachineConfig {
        cmdline: Some(b"hash 3000".to_vec()),
        ..MachineConfig::new(LOOPS)
    };
    let smp = MachineConfig {
        cpus: 3,
        memory: 16 << 20,
        cmdline: Some(b"3".to_vec()),
        ..MachineConfig::new(SMP)
    };
    for config in [loops, smp, linux] {
        let (steps, state, _) = digest(&config, false);
        let (others, other, heard) = digest(&config, true);
        assert_eq!((steps, state), (others, other));
        let heard = heard.unwrap();
        assert!(heard.heard[0] > 1000, "{:?}", heard.heard);
        if config.inject.is_some() {
            let others = heard.heard.iter().enumerate().filter(|(n, _)| *n != 1);
            assert!(others.into_iter().all(|(_, count)| *count > 0), "{:?}", heard.heard);
            assert!(
                heard.modules.iter().any(|name| name == "virtio_blk"),
                "{:?}",
                heard.modules
            );
        }
    }
}
