//! `minivmm trace`: a small guest's trace in every form, against what ran, and against the programs that read the forms.

use crate::common;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use common::*;
use iced_x86::code_asm::*;
use iced_x86::{Decoder, FlowControl};
use minivmm::{Console, MachineConfig, Run, SerialTarget, recording::RecordingOptions};
use serde_json::Value;

/// main calls outer three times, outer calls inner twice, and main ends with a jump to last.
fn program(a: &mut CodeAssembler) {
    let (mut top, mut outer, mut inner, mut last) =
        (a.create_label(), a.create_label(), a.create_label(), a.create_label());
    a.mov(ecx, 3).unwrap();
    a.set_label(&mut top).unwrap();
    a.call(outer).unwrap();
    a.dec(ecx).unwrap();
    a.jnz(top).unwrap();
    a.jmp(last).unwrap();
    a.set_label(&mut outer).unwrap();
    a.call(inner).unwrap();
    a.call(inner).unwrap();
    a.ret().unwrap();
    a.set_label(&mut inner).unwrap();
    a.push(eax).unwrap();
    a.pop(eax).unwrap();
    a.ret().unwrap();
    a.set_label(&mut last).unwrap();
    debug_exit(a, 1);
}

/// Instructions of each function, by hand: with the one that sets the stack up.
const OWN: [(&str, u64); 4] = [("main", 2 + 3 * 3 + 1), ("outer", 3 * 3), ("inner", 6 * 3), ("last", 3)];

struct Traced {
    folder: Folder,
    trace: PathBuf,
    map: PathBuf,
}

fn traced() -> Traced {
    let folder = Folder::new();
    let image = guest(program);
    let kernel = folder.file("guest", &image);
    let start = u64::from(BASE) + 32;
    let mut targets = Vec::new();
    for instruction in &mut Decoder::with_ip(32, &image[32..], start, 0) {
        if matches!(
            instruction.flow_control(),
            FlowControl::Call | FlowControl::UnconditionalBranch
        ) {
            targets.push(instruction.near_branch_target());
        }
    }
    // call outer, jmp last, call inner
    let map = format!(
        "{start:016x} T main\n{:016x} T outer\n{:016x} t inner\n{:016x} T last\n",
        targets[0], targets[2], targets[1]
    );
    let map = folder.file("System.map", map);
    let trace = folder.path().join("trace");
    let config = MachineConfig {
        memory: 4 << 20,
        trace: Some(RecordingOptions::new(&trace)),
        ..MachineConfig::new(kernel)
    };
    let mut vm = Run::new(&config).unwrap();
    let mut console = Console::open(&SerialTarget::Buffer, &[], vm.line()).unwrap();
    vm.run(&mut console).unwrap();
    vm.end_trace("the guest ended").unwrap();
    Traced { folder, trace, map }
}

impl Traced {
    fn command(&self, sub: &str, args: &[&str]) -> Output {
        let mut command = minivmm();
        command.args(["trace", sub]).arg(&self.trace);
        if sub != "info" {
            command.arg("--symbols").arg(&self.map);
        }
        command.args(args).output().unwrap()
    }

    fn says(&self, sub: &str, args: &[&str]) -> String {
        let output = self.command(sub, args);
        let errors = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(0), "{args:?}: {errors}");
        let text = String::from_utf8(output.stdout).unwrap() + &errors;
        text.replace(self.folder.path().to_str().unwrap(), "FOLDER")
    }

    fn out(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }
}

// covers: trace/info-symbols
#[test]
fn info_takes_a_file_of_symbols_as_all_views_do() {
    let traced = traced();
    let map = traced.map.to_str().unwrap().to_string();
    let says = traced.says("info", &["--symbols", &map]);
    assert!(says.contains("\nsymbols       4, of --symbols\n"), "{says}");
    let json = traced.says("info", &["--json", "--symbols", &map]);
    assert!(json.contains("\"symbols\":4"), "{json}");
}

/// Compares with the file below tests/snapshots; `UPDATE=1` writes it.
fn snapshot(name: &str, text: &str) {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/snapshots").join(name);
    if std::env::var_os("UPDATE").is_some() {
        fs::write(&file, text).unwrap();
    }
    let expected = fs::read_to_string(&file).unwrap_or_default();
    assert_eq!(text, expected, "{name}: UPDATE=1 writes it anew");
}

// covers: trace/decode-text, trace/decode-disasm, trace/decode-calls, trace/info, trace/decode-json
#[test]
fn text_and_json_are_what_they_were() {
    let traced = traced();
    for (name, sub, args) in [
        ("info.txt", "info", &[][..]),
        ("decode.txt", "decode", &[]),
        ("disasm.txt", "decode", &["--disasm", "--from", "last"]),
        ("calls.txt", "decode", &["--calls"]),
        ("decode.json", "decode", &["--json"]),
        ("calls.json", "decode", &["--json", "--calls", "--to", "last"]),
        ("code.json", "decode", &["--json", "--disasm", "--from", "last"]),
    ] {
        snapshot(name, &traced.says(sub, args));
    }
}

/// Lines of JSON.
fn json(text: &str) -> Vec<Value> {
    let line = |line: &str| serde_json::from_str(line).unwrap_or_else(|error| panic!("{error}: {line}"));
    text.lines()
        .filter(|line| !line.starts_with("minivmm: "))
        .map(line)
        .collect()
}

// covers: trace/decode-json, trace/window
#[test]
fn json_lines_add_up_and_windows_cut_exactly() {
    let traced = traced();
    let lines = json(&traced.says("decode", &["--json"]));
    let total: u64 = OWN.iter().map(|(_, own)| own).sum();
    let count = |lines: &[Value], symbol: Option<&str>| -> u64 {
        let blocks = lines.iter().filter(|line| line["type"] == "block");
        let of = blocks.filter(|line| symbol.is_none_or(|symbol| line["symbol"] == symbol));
        of.map(|line| line["instructions"].as_u64().unwrap()).sum()
    };
    for (symbol, own) in OWN {
        assert_eq!(count(&lines, Some(symbol)), own, "{symbol}");
    }
    let summary = lines.last().unwrap();
    assert_eq!(
        (summary["type"].as_str(), summary["instructions"].as_u64()),
        (Some("summary"), Some(total))
    );
    assert_eq!(
        (&summary["gaps"], &summary["overflows"]),
        (&Value::from(0), &Value::from(0))
    );
    // Every step of this guest is an instruction: the step of each block is what was counted before it.
    let mut at = None;
    for line in lines.iter().filter(|line| line["type"] == "block") {
        let step = line["step"].as_u64().unwrap();
        assert!(at.is_none_or(|at| at == step), "{line}");
        at = Some(step + line["instructions"].as_u64().unwrap());
    }
    // Windows that meet make up the whole.
    let middle = lines.iter().filter(|line| line["type"] == "block").nth(9).unwrap()["step"].to_string();
    let before = json(&traced.says("decode", &["--json", "--to", &middle]));
    let behind = json(&traced.says("decode", &["--json", "--from", &middle]));
    assert_eq!(count(&before, None) + count(&behind, None), total);
    assert_eq!(
        behind.iter().find(|line| line["type"] == "block").unwrap()["step"].to_string(),
        middle
    );
    let first = json(&traced.says("decode", &["--json", "--from", "outer", "--to", "inner"]));
    assert_eq!(count(&first, None), 1, "the call alone");
}

fn run_tool(command: &mut Command) -> String {
    let output = command.output().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    assert!(
        output.status.success(),
        "{command:?}: {}",
        String::from_utf8_lossy(&output.stderr)
    );
    String::from_utf8(output.stdout).unwrap()
}

// covers: trace/export-folded, trace/export-flamegraph
#[test]
fn stacks_have_all_instructions() {
    let traced = traced();
    let (folded, svg) = (traced.out("folded"), traced.out("flame.svg"));
    traced.says(
        "export",
        &[
            "--folded",
            folded.to_str().unwrap(),
            "--flamegraph",
            svg.to_str().unwrap(),
        ],
    );
    let expected = "guest;last 3\nguest;main 12\nguest;main;outer 9\nguest;main;outer;inner 18\n";
    assert_eq!(fs::read_to_string(&folded).unwrap(), expected);
    let svg = fs::read_to_string(&svg).unwrap();
    for title in [
        "inner (18 instructions",
        "outer (27 instructions",
        "main (39 instructions",
        "all (42 instructions",
    ] {
        assert!(svg.contains(title), "{title}\n{svg}");
    }
    assert!(svg.trim_end().ends_with("</svg>"));
}

// covers: trace/export-callgrind
#[test]
fn callgrind_annotate_reads_functions_and_calls() {
    let traced = traced();
    let file = traced.out("callgrind.out");
    traced.says("export", &["--callgrind", file.to_str().unwrap()]);
    let of = |args: &[&str]| {
        let text = run_tool(Command::new("callgrind_annotate").args(args).arg(&file));
        let find = |name: &str| -> Option<u64> {
            let line = text.lines().find(|line| line.contains(name))?;
            line.split_whitespace().next()?.replace(',', "").parse().ok()
        };
        let total = find("PROGRAM TOTALS");
        let functions = OWN.map(|(name, _)| find(&format!("???:{name} ")));
        (total, functions, text)
    };
    let (total, own, text) = of(&["--threshold=100"]);
    assert_eq!((total, own), (Some(42), OWN.map(|(_, own)| Some(own))), "{text}");
    let (_, all, text) = of(&["--threshold=100", "--inclusive=yes"]);
    assert_eq!(all, [Some(39), Some(27), Some(18), Some(3)], "{text}");
    let tree = run_tool(
        Command::new("callgrind_annotate")
            .args(["--tree=calling", "--inclusive=yes"])
            .arg(&file),
    );
    assert!(
        tree.contains("???:outer (3x)") && tree.contains("???:inner (6x)"),
        "{tree}"
    );
}

/// The track of vCPU 0's calls.
const CALLS: u64 = 2;

/// Chrome's rules for duration events: on each thread ends match beginnings, the last first, and time does not go back. Gives the
/// calls, as depth and name.
fn nesting(trace: &Value) -> Vec<(usize, String)> {
    let mut open: std::collections::BTreeMap<u64, (Vec<String>, f64)> = std::collections::BTreeMap::new();
    let mut calls = Vec::new();
    for event in trace["traceEvents"].as_array().unwrap() {
        let tid = event["tid"].as_u64().unwrap();
        let (stack, last) = open.entry(tid).or_default();
        let phase = event["ph"].as_str().unwrap();
        if phase == "M" {
            continue;
        }
        let ts = event["ts"].as_f64().unwrap();
        assert!(ts >= *last, "{event} after {last}");
        *last = ts;
        match phase {
            "B" => {
                let name = event["name"].as_str().unwrap().to_string();
                // Beside the calls there is a track of whose they are.
                if tid == CALLS {
                    calls.push((stack.len(), name.clone()));
                }
                stack.push(name);
            }
            "E" => drop(stack.pop().unwrap_or_else(|| panic!("{event} ends nothing"))),
            "i" => {}
            _ => panic!("{event}"),
        }
    }
    assert!(open.values().all(|(stack, _)| stack.is_empty()), "{open:?}");
    calls
}

// covers: trace/export-trace-events
#[test]
fn trace_events_nest() {
    let traced = traced();
    let file = traced.out("trace.json");
    traced.says("export", &["--trace-events", file.to_str().unwrap()]);
    let events: Value = serde_json::from_str(&fs::read_to_string(&file).unwrap()).unwrap();
    let one = [(1, "outer"), (2, "inner"), (2, "inner")];
    let expected: Vec<_> = [(0, "main")]
        .into_iter()
        .chain([one; 3].concat())
        .chain([(0, "last")])
        .collect();
    let calls = nesting(&events);
    assert_eq!(
        calls
            .iter()
            .map(|(depth, name)| (*depth, name.as_str()))
            .collect::<Vec<_>>(),
        expected
    );
    // Short calls can be left out, and are counted.
    let said = traced.says(
        "export",
        &["--trace-events", file.to_str().unwrap(), "--force", "--least", "9"],
    );
    assert!(said.contains("4 calls, 7 shorter ones left out"), "{said}");
    let events: Value = serde_json::from_str(&fs::read_to_string(&file).unwrap()).unwrap();
    assert!(nesting(&events).iter().all(|(_, name)| name != "inner"));
    // What would be larger than it may be is not there at all.
    let large = traced.out("large.json");
    let run = traced.command(
        "export",
        &["--trace-events", large.to_str().unwrap(), "--trace-events-limit", "500"],
    );
    let error = String::from_utf8_lossy(&run.stderr).into_owned();
    assert!(
        error.contains("would be larger than 500 bytes") && error.contains("--perfetto"),
        "{error}"
    );
    assert_eq!(run.status.code(), Some(2));
    assert!(!large.exists());
}

/// Names that a guest has made to be HTML.
const HOSTILE: [(&str, &str); 2] = [
    ("outer", "</script><script>document.body.dataset.owned=1</script>"),
    ("inner", "<img/src=x/onerror=document.body.dataset.owned=1>"),
];

// covers: trace/export-html
#[test]
fn the_page_has_the_stacks_of_folded_and_names_stay_text() {
    let traced = traced();
    let map = HOSTILE
        .iter()
        .fold(fs::read_to_string(&traced.map).unwrap(), |map, (name, hostile)| {
            map.replace(name, hostile)
        });
    fs::write(&traced.map, map).unwrap();
    let (html, folded) = (traced.out("page.html"), traced.out("folded"));
    traced.says(
        "export",
        &["--html", html.to_str().unwrap(), "--folded", folded.to_str().unwrap()],
    );
    let page = fs::read_to_string(&html).unwrap();
    assert_eq!(
        (page.matches("<script").count(), page.matches("</script").count()),
        (2, 2)
    );
    assert!(
        !page.contains("<img") && !page.contains("http:") && !page.contains("https:"),
        "nothing is from elsewhere"
    );
    let data = page
        .split_once("id=\"data\">")
        .unwrap()
        .1
        .split_once("</script>")
        .unwrap()
        .0;
    let data: Value = serde_json::from_str(data).unwrap();
    let numbers = |of: &Value| -> Vec<u64> { of.as_array().unwrap().iter().map(|n| n.as_u64().unwrap()).collect() };
    let of = |field: &str| numbers(&data["nodes"][field]);
    let (parent, name, own) = (of("parent"), of("name"), of("own"));
    let mut paths = vec![String::new()];
    let mut lines = Vec::new();
    for n in 1..own.len() {
        let above = &paths[parent[n] as usize];
        let name = data["names"][name[n] as usize].as_str().unwrap();
        let path = if above.is_empty() {
            name.to_string()
        } else {
            format!("{above};{name}")
        };
        if own[n] > 0 {
            lines.push(format!("{path} {}", own[n]));
        }
        paths.push(path);
    }
    let folded = fs::read_to_string(&folded).unwrap();
    assert_eq!(lines, folded.lines().collect::<Vec<_>>());
    for (_, hostile) in HOSTILE {
        assert!(folded.contains(hostile), "{folded}");
    }
    // One thread on one vCPU, with all instructions.
    let cells = data["cells"].as_array().unwrap();
    let cell = numbers(&cells[0]);
    let in_time: u64 = cell[2..].chunks(2).map(|pair| pair[1]).sum();
    let total: u64 = OWN.iter().map(|(_, own)| own).sum();
    assert_eq!((cells.len(), &cell[..2], in_time), (1, &[0, 0][..], total));
}

// covers: bad-input/trace-command, bad-input/symbols, trace/export-never-overwrites
#[test]
fn what_cannot_be_used_is_one_line_and_status_2() {
    let traced = traced();
    let there = traced.folder.file("there", "a thesis");
    let empty = traced.out("empty");
    fs::create_dir(&empty).unwrap();
    let junk = traced.folder.file("junk", "no symbols\n");
    let path = |path: &Path| path.to_str().unwrap().to_string();
    let placed = format!("{},at=0x1000", env!("CARGO_BIN_EXE_minivmm"));
    let (trace, there_, junk, empty) = (path(&traced.trace), path(&there), path(&junk), path(&empty));
    for (args, says) in [
        (
            vec!["info", "/nowhere/at/all"],
            &["/nowhere/at/all", "no such directory"][..],
        ),
        (vec!["decode", &empty], &["not a trace directory"]),
        (vec!["decode", &trace, "--vcpu", "1"], &["--vcpu 1", "0 to 0"]),
        (vec!["decode", &trace, "--from", "main"], &["--from main", "--symbols"]),
        (vec!["decode", &trace, "--from", "1x"], &["--from 1x", "not a step"]),
        (
            vec!["decode", &trace, "--from", "99s"],
            &["--from 99s", "does not come there"],
        ),
        (
            vec!["decode", &trace, "--symbols", &junk],
            &["--symbols", "line 1: no symbols"],
        ),
        (
            vec!["info", &trace, "--symbols", &junk],
            &["--symbols", "line 1: no symbols"],
        ),
        (
            vec!["decode", &trace, "--symbols", "/nowhere"],
            &["--symbols /nowhere", "no such file"],
        ),
        (
            vec!["decode", &trace, "--symfs", "/nowhere"],
            &["--symfs /nowhere", "no such file"],
        ),
        (
            vec!["export", &trace, "--html", "/dev/full"],
            &["--html /dev/full", "no space left"],
        ),
        (
            vec!["decode", &trace, "--symbols-user", &junk],
            &["--symbols-user", "no ELF file"],
        ),
        (
            vec!["decode", &trace, "--symbols-user", "/nowhere,name=x"],
            &["--symbols-user /nowhere: no such file"],
        ),
        (
            vec!["decode", &trace, "--symbols-user", "x,at=y"],
            &["--symbols-user x,at=y", "not an address"],
        ),
        (
            vec!["decode", &trace, "--symbols-user", env!("CARGO_BIN_EXE_minivmm")],
            &["--symbols-user", "position-independent", ",at=ADDRESS"],
        ),
        (
            vec!["export", &trace, "--folded", &there_, "--symbols-user", &placed],
            &["--symbols-user", "no names of processes"],
        ),
        (vec!["export", &trace], &["--perfetto"]),
        (
            vec!["export", &trace, "--folded", &there_],
            &["--folded", "exists already", "--force"],
        ),
        (
            vec!["export", &trace, "--folded", "/dev/full"],
            &["--folded /dev/full", "no space left"],
        ),
        (
            vec!["export", &trace, "--callgrind", "/dev/full"],
            &["--callgrind /dev/full", "no space left"],
        ),
        (
            vec!["export", &trace, "--perfetto", "/dev/full", "--force"],
            &["--perfetto /dev/full", "no space left"],
        ),
        (
            vec!["export", &trace, "--flamegraph", &empty, "--force"],
            &["--flamegraph", "directory"],
        ),
        (
            vec!["export", &trace, "--folded", "/nowhere/x"],
            &["--folded /nowhere/x", "no such file"],
        ),
        (
            vec!["symbols", &trace, "--elf", "/tmp/never-made"],
            &["no symbols", "--symbols"],
        ),
    ] {
        let output = minivmm().arg("trace").args(&args).output().unwrap();
        assert_refused(&output, 2, says);
    }
    assert_eq!(fs::read_to_string(there).unwrap(), "a thesis");
    assert!(!Path::new("/tmp/never-made").exists());
    assert!(fs::metadata("/dev/full").is_ok());
}

// covers: trace/sigpipe
#[test]
fn a_reader_that_goes_away_is_no_error() {
    let traced = traced();
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let output = minivmm()
        .args(["trace", "decode", "--json"])
        .arg(&traced.trace)
        .stdout(writer)
        .output()
        .unwrap();
    assert_eq!((output.status.code(), output.stderr.as_slice()), (Some(0), &b""[..]));
}
