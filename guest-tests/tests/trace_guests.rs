//! Traces of a hypervisor and its guests: whose code each instruction is, in text, JSON and stacks.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use guest_tests::lab::{Host, Job, jobs_on};
use guest_tests::{Folder, INIT_MARKER, VMX_LOOP, linux, minivmm, output_of, run, trace_command};
use serde_json::Value;

const LIMIT: Duration = Duration::from_secs(600);
/// VM exits by CPUID.
const EXITS: usize = 3;

/// What VMX_LOOP calls its functions and variables, as `nm` has it.
fn symbols(folder: &Folder) -> (PathBuf, u64) {
    let text = output_of(Command::new("nm").arg(VMX_LOOP));
    let of = |name: &str| {
        let line = text.lines().find(|line| line.ends_with(&format!(" {name}")));
        u64::from_str_radix(
            line.unwrap_or_else(|| panic!("no {name}")).split(' ').next().unwrap(),
            16,
        )
        .unwrap()
    };
    let file = folder.join("System.map");
    fs::write(&file, &text).unwrap();
    (file, of("vmcs"))
}

fn lines(command: &mut Command) -> Vec<Value> {
    let text = output_of(command);
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// A run of instructions up to a branch: where it begins, how many there are, how the branch goes; or an interruption, from and to where.
type Branch = (String, u64, String);

/// The branches that are in lines of a level; blocks that end at none are one with what follows.
fn branches<'a>(lines: impl Iterator<Item = &'a Value>, inside: impl Fn(u64) -> bool) -> Vec<Branch> {
    let text = |value: &Value| value.as_str().unwrap_or_default().to_string();
    let number = |text: &str| u64::from_str_radix(text.trim_start_matches("0x"), 16).unwrap_or(0);
    let (mut all, mut open) = (Vec::new(), None);
    for line in lines {
        if line["type"] == "event" {
            let (from, to) = (text(&line["from"]), text(&line["to"]));
            if line["event"] == "interrupt" && inside(number(&from)) {
                let before = open.take().map_or(0, |(_, count)| count);
                all.push((from, before, to));
            }
            continue;
        }
        let (ip, count, end) = (
            text(&line["ip"]),
            line["instructions"].as_u64().unwrap(),
            text(&line["end"]),
        );
        if line["type"] != "block" || !inside(number(&ip)) {
            continue;
        }
        let (first, before) = open.take().unwrap_or((ip, 0));
        match end.as_str() {
            "cut" | "continue" => open = Some((first, before + count)),
            _ => all.push((first, before + count, end)),
        }
    }
    all
}

/// The same code with the same data, in VMX root operation and as the VMM's guest: interrupts, exceptions, indirect and conditional branches.
// covers: trace/both-levels
#[test]
fn a_guest_takes_the_same_branches_at_the_second_level_as_at_the_first() {
    let folder = Folder::new("trace-levels");
    let symbol = |name: &str| {
        let text = output_of(Command::new("nm").arg(VMX_LOOP));
        let line = text
            .lines()
            .find(|line| line.ends_with(&format!(" {name}")))
            .map(str::to_string);
        let line = line.unwrap_or_else(|| panic!("no {name}"));
        u64::from_str_radix(line.split(' ').next().unwrap(), 16).unwrap()
    };
    let inside = symbol("__start_work_text")..symbol("__stop_work_text");
    for model in ["westmere", "sapphirerapids"] {
        let trace = folder.join(model);
        let mut command = Command::new(minivmm());
        command.args(["--cpu-model", model, "-m", "64M", "--cmdline", "work"]);
        command.args(["--kernel", VMX_LOOP, "--trace"]).arg(&trace);
        run(&mut command, LIMIT).must_end_with(1);
        let all = lines(trace_command(&["decode", "--json"]).arg(&trace));
        let level = |non_root: bool| {
            let lines = all.iter().filter(|line| (line["non_root"] == true) == non_root);
            branches(lines, |ip| inside.contains(&ip))
        };
        let (first, second) = (level(false), level(true));
        let interruptions = first.iter().filter(|branch| branch.2.starts_with("0x")).count();
        assert!(interruptions >= 5, "{model}: five UD2 at least, {interruptions}");
        assert!(first.len() > 2000, "{model}: {} branches", first.len());
        assert_eq!(first.len(), second.len(), "{model}");
        for (n, (first, second)) in first.iter().zip(&second).enumerate() {
            assert_eq!(first, second, "{model}: branch {n}");
        }
    }
}

/// The VMM's guest executes CPUID, which never retires, and the jump back to it.
// covers: trace/guests
#[test]
fn code_of_a_vmms_guest_is_told_from_the_vmms() {
    let folder = Folder::new("trace-guests");
    let (map, vmcs) = symbols(&folder);
    let trace = folder.join("trace");
    let mut command = Command::new(minivmm());
    command.args(["--cpu-model", "haswell", "-m", "64M", "--cmdline", &EXITS.to_string()]);
    command.args(["--kernel", VMX_LOOP, "--trace"]).arg(&trace);
    run(&mut command, LIMIT).must_end_with(1);
    let with_symbols = |command: &mut Command, guest: &str| {
        command.arg(&trace).arg("--symbols").arg(&map);
        command.arg("--symbols-guest").arg(folder.join(guest));
    };

    let mut command = trace_command(&["decode", "--json"]);
    with_symbols(&mut command, "System.map");
    let all = lines(&mut command);
    let of = |kind: &str| all.iter().filter(|line| line["type"] == kind).collect::<Vec<_>>();
    let (non_root, root): (Vec<&Value>, Vec<&Value>) = of("block").iter().partition(|line| line["non_root"] == true);
    let guests: u64 = non_root.iter().map(|line| line["instructions"].as_u64().unwrap()).sum();
    assert_eq!(guests, EXITS as u64 - 1, "one jump between two exits");
    for line in &non_root {
        assert_eq!(line["symbol"], "guest_code", "{line}");
        assert_eq!(line["vmcs"], format!("{vmcs:#x}"), "{line}");
    }
    assert!(root.iter().all(|line| line["vmcs"].is_null()));
    let exits: Vec<_> = of("event")
        .into_iter()
        .filter(|line| line["event"] == "vm-exit")
        .collect();
    assert_eq!(exits.len(), EXITS);
    for exit in exits {
        assert_eq!(exit["symbol"], "on_exit", "{exit}");
        assert_eq!(exit["vmcs"], format!("{vmcs:#x}"), "{exit}");
    }

    // Without symbols of its own a guest has none, though the VMM's are at its addresses.
    let folded = folder.join("folded");
    let mut command = trace_command(&["export"]);
    output_of(
        command
            .arg(&trace)
            .arg("--symbols")
            .arg(&map)
            .arg("--folded")
            .arg(&folded),
    );
    let stacks = fs::read_to_string(&folded).unwrap();
    assert!(!stacks.contains("guest_code"), "{stacks}");
    let label = format!("VMX non-root, VMCS {vmcs:#x}");
    assert!(stacks.contains(&format!(";{label};[unknown] 2\n")), "{stacks}");

    let (svg, callgrind) = (folder.join("svg"), folder.join("callgrind"));
    let mut command = trace_command(&["export", "--force"]);
    with_symbols(&mut command, "System.map");
    command.arg("--folded").arg(&folded).arg("--flamegraph").arg(&svg);
    output_of(command.arg("--callgrind").arg(&callgrind));
    let stacks = fs::read_to_string(&folded).unwrap();
    let guests: Vec<&str> = stacks.lines().filter(|line| line.contains(&label)).collect();
    assert!(
        guests
            .iter()
            .any(|line| line.ends_with(&format!(";{label};guest_code 2"))),
        "{stacks}"
    );
    // Nothing but the VMM is below the label, and nothing but the guest above.
    assert!(
        guests.iter().all(|line| line.matches("guest_code").count() <= 1),
        "{stacks}"
    );
    assert!(
        stacks
            .lines()
            .any(|line| line.contains("on_exit") && !line.contains(&label)),
        "{stacks}"
    );
    assert!(fs::read_to_string(&svg).unwrap().contains("VMX non-root, VMCS"));
    let profile = fs::read_to_string(&callgrind).unwrap();
    let of_guest = profile
        .split("ob=[guest kernel]\nfl=???\nfn=")
        .nth(1)
        .unwrap_or_default();
    assert!(
        of_guest.starts_with("(") && of_guest.lines().next().unwrap().ends_with("guest_code"),
        "{profile}"
    );

    let mut command = trace_command(&["decode"]);
    with_symbols(&mut command, "System.map");
    let text = output_of(&mut command);
    assert_eq!(
        text.matches(&format!("VM exit of [non-root VMCS {vmcs:#x}] at "))
            .count(),
        EXITS,
        "{text}"
    );
    assert!(text.contains(&format!("[non-root VMCS {vmcs:#x}] - ")), "{text}");
    let info = output_of(trace_command(&["info"]).arg(&trace));
    assert!(info.contains("of a hypervisor, by 1 VMCS\n"), "{info}");
}

fn stacks(trace: &Path, folded: &Path) -> String {
    output_of(
        trace_command(&["export", "--force"])
            .arg(trace)
            .arg("--folded")
            .arg(folded),
    );
    fs::read_to_string(folded).unwrap()
}

/// perf decodes both levels of some million instructions before the second level's last process begins, when nothing patches its kernel any more.
fn perf_decodes_both_levels(trace: &Path, folder: &Path) {
    let tasks = fs::read_to_string(trace.join("linux/guest-0/tasks")).unwrap();
    let last = tasks.lines().last().unwrap().split(' ').next().unwrap();
    let last: u64 = last.parse().unwrap();
    let mut command = trace_command(&["export"]);
    command.arg("--from").arg((last - 9_000_000).to_string());
    command.arg("--to").arg((last - 1_000_000).to_string());
    let perf = folder.join("perf");
    output_of(command.arg("--perf").arg(&perf).arg(trace));
    let mut script = Command::new("perf");
    script
        .args(["script", "--itrace=i1ie", "-F", "ip,sym,dso", "-i"])
        .arg(&perf);
    let said = output_of(script.env("PERF_PAGER", "cat"));
    let count = |of: &dyn Fn(&str) -> bool| said.lines().filter(|line| of(line)).count();
    let errors = count(&|line| line.contains("instruction trace error"));
    assert_eq!(errors, 0, "of {} instructions", said.lines().count());
    for (dso, least) in [
        ("([guest.kernel.kallsyms.", 1_000_000),
        ("([kernel.kallsyms])", 100_000),
        ("/minivmm)", 100_000),
    ] {
        let found = count(&|line| line.contains(dso));
        assert!(found > least, "{dso}: {found}");
    }
    // The host has a busybox, too: the guest's files are in a folder of their own.
    let busybox = count(&|line| line.contains("/busybox)") && line.contains("/code-"));
    assert!(busybox > 100_000, "{busybox}");
    let named = count(&|line| line.contains("do_syscall_64 ([guest.kernel.kallsyms."));
    assert!(named > 1000, "{named}");
}

/// Debian with its kvm_intel, and in it Debian: the second level's kernel, modules and processes are found through EPT.
// covers: trace/guests-linux, trace/export-perf-guests
#[test]
fn the_second_level_of_debian_in_debian_has_names() {
    if !guest_tests::full() {
        println!("left out: two levels of Debian, which are recorded under MINIVMM_FULL");
        return;
    }
    let folder = Folder::new("trace-two-levels");
    let trace = folder.join("trace");
    let cmdline = "console=ttyS0 quiet panic=-1 minivmm.script=nothing";
    let options = "--engine kvm -m 128M --cpu-model westmere --cmdline";
    let debian = Job::new(options.split(' ').chain([cmdline]))
        .file("--kernel", &linux().kernel)
        .file("--initrd", &linux().initrd);
    let ended = jobs_on(Host::OWN, &[debian], &["--trace", trace.to_str().unwrap()]);
    let ended = ended.unwrap_or_else(|why| panic!("{why}"));
    assert!(ended[0].said.contains(INIT_MARKER), "{}", ended[0].said);
    let info = output_of(trace_command(&["info"]).arg(&trace));
    assert_eq!(info.matches("Linux version 6.1").count(), 2, "{info}");
    assert!(info.contains("missing       0 gaps, 0 overflows"), "{info}");
    perf_decodes_both_levels(&trace, &folder);
    let stacks = stacks(&trace, &folder.join("folded"));
    let guests: Vec<&str> = stacks
        .lines()
        .filter(|line| line.contains(";VMX non-root, VMCS 0x"))
        .collect();
    let sum = |lines: &[&str], of: &dyn Fn(&str) -> bool| -> u64 {
        let of = lines.iter().filter(|line| of(line));
        of.map(|line| line.rsplit(' ').next().unwrap().parse::<u64>().unwrap())
            .sum()
    };
    let all = sum(&guests, &|_| true);
    let named = sum(&guests, &|line| !line.contains("[unknown]"));
    assert!(all > 500_000_000, "a boot: {all}");
    assert!(named * 100 > all * 99, "{named} of {all}");
    // Below stand the VMM's program and its way into the guest.
    let vmm = sum(&guests, &|line| {
        line.contains("vmx_vcpu_run") && line.contains("kvm_vcpu_ioctl")
    });
    assert!(vmm * 100 > all * 99, "{vmm} of {all}");
    for name in ["start_kernel", "kernel_init", ";init;"] {
        let above = |line: &str| line.split("VMCS 0x").nth(1).is_some_and(|above| above.contains(name));
        assert!(guests.iter().any(|line| above(line)), "{name}");
    }
    // The guest's only program, by what its processes have mapped.
    let of_file = |file: &str| {
        sum(&guests, &|line| {
            line.split("VMCS 0x").nth(1).is_some_and(|above| above.contains(file))
        })
    };
    let (known, unknown) = (of_file("[busybox]"), of_file("[user]"));
    assert!(known > 100_000 && unknown * 100 < known, "{known} and {unknown}");
    // The hypervisor's own code is not among the guest's.
    let above = |line: &&&str| {
        line.split("VMCS 0x")
            .nth(1)
            .is_some_and(|above| above.contains("[kvm_intel]"))
    };
    assert_eq!(guests.iter().filter(above).count(), 0);
}
