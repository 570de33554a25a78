//! The guide (`resources/guide`) and the README say what is so: what can be made from the code is made from it, what is named
//! exists, and command lines are such that minivmm takes them. `cargo xtask guide` writes what is made.

use std::{
    collections::{BTreeMap, BTreeSet},
    env,
    fmt::Write,
    fs,
    path::{Path, PathBuf},
};

use clap::{Arg, Command, CommandFactory};
use devices::platform::{ioapic, port_table};
use minivmm::{
    cli::Cli,
    front::monitor::COMMANDS,
    machine::{HARDWARE, pci, virtio},
    matrix::expected::Table,
};
use x86::model::{CpuModel, MODELS};
use x86::pmu::netburst::{self, Counts, Generation, Operation};
use x86::pmu::{Branches, Caches, Count, Fidelity, Levels};
use x86::rdt::RdtCaps;

/// The file in which the command line is described, all of it made.
const CLI: &str = "cli.md";
/// How what is made is made anew.
const UPDATE: &str = "run `cargo xtask guide`";

/// The longest that the README may be.
const README_LINES: usize = 200;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().into()
}

fn source() -> PathBuf {
    root().join("resources/guide/src")
}

/// The pages of the guide with their texts, by the names of their files.
fn pages() -> BTreeMap<String, String> {
    let files = fs::read_dir(source()).unwrap().map(|entry| entry.unwrap().path());
    let page = |file: PathBuf| {
        let name = file.file_name().unwrap().to_str().unwrap().to_string();
        (name, fs::read_to_string(file).unwrap())
    };
    files.map(page).collect()
}

/// The guide's pages and the README, each with its folder.
fn texts() -> Vec<(String, PathBuf, String)> {
    let page = |(name, text)| (name, source(), text);
    let readme = fs::read_to_string(root().join("README.md")).unwrap();
    let mut texts: Vec<_> = pages().into_iter().map(page).collect();
    texts.push(("README.md".into(), root(), readme));
    texts
}

/// A file's text is `should`, or becomes it where that is asked for.
fn compare(file: &Path, should: &str) {
    if env::var_os("UPDATE").is_some() {
        fs::write(file, should).unwrap();
        return;
    }
    let is = fs::read_to_string(file).unwrap_or_default();
    for (is, should) in is.lines().zip(should.lines()) {
        assert_eq!(is, should, "{}: {UPDATE}", file.display());
    }
    assert_eq!(is.len(), should.len(), "{}: {UPDATE}", file.display());
}

/// A cell's text: a bar or a line's end would end it.
fn cell(text: &str) -> String {
    text.replace('|', "\\|").replace('\n', " ")
}

/// An option's names and its value, or an argument's name.
fn names(argument: &Arg) -> String {
    let mut names: Vec<String> = argument
        .get_long()
        .map(|long| format!("--{long}"))
        .into_iter()
        .collect();
    let aliases = argument.get_visible_aliases().unwrap_or_default();
    names.extend(aliases.into_iter().map(|alias| format!("--{alias}")));
    names.extend(argument.get_short().map(|short| format!("-{short}")));
    let values: Vec<String> = argument
        .get_possible_values()
        .iter()
        .map(|value| value.get_name().to_string())
        .collect();
    let value = match argument.get_action().takes_values() {
        false => String::new(),
        true if !values.is_empty() => values.join("|"),
        true => argument.get_value_names().unwrap_or_default().join(" "),
    };
    let optional = argument.get_num_args().is_some_and(|count| count.min_values() == 0);
    match names.first_mut() {
        Some(name) if !value.is_empty() => {
            *name += &match (argument.is_require_equals_set(), optional) {
                (true, true) => format!("[={value}]"),
                (true, false) => format!("={value}"),
                _ => format!(" {value}"),
            };
        }
        Some(_) => {}
        None => names.push(value),
    }
    let names: Vec<String> = names.iter().map(|name| format!("`{}`", cell(name))).collect();
    names.join(", ")
}

/// What an argument is for, its default, and what its values mean where that has not been `reported` before.
fn meaning(argument: &Arg, reported: &mut BTreeSet<String>) -> String {
    let mut text = argument.get_help().map(ToString::to_string).unwrap_or_default();
    let defaults: Vec<_> = argument
        .get_default_values()
        .iter()
        .map(|value| value.to_string_lossy())
        .collect();
    if !defaults.is_empty() && argument.get_action().takes_values() && !argument.is_hide_default_value_set() {
        write!(text, " [default: {}]", defaults.join(" ")).unwrap();
    }
    let values = argument.get_possible_values();
    let explained = values
        .iter()
        .filter_map(|value| value.get_help().map(|help| format!("`{}`: {help}", value.get_name())));
    let explained = explained.collect::<Vec<_>>().join("; ");
    if argument.get_action().takes_values() && !explained.is_empty() && reported.insert(explained.clone()) {
        write!(text, ". {explained}").unwrap();
    }
    cell(&text)
}

/// A command and those below it, each a section.
fn describe(command: &mut Command, name: &str, text: &mut String) {
    let about = command.get_about().map(ToString::to_string).unwrap_or_default();
    let usage = command.render_usage().to_string();
    let usage = usage.strip_prefix("Usage: ").unwrap_or(&usage);
    let usage: Vec<&str> = usage.lines().map(str::trim).collect();
    writeln!(text, "\n## {name}\n\n{about}.\n\n```text\n{}\n```", usage.join("\n")).unwrap();
    let shown: Vec<&Arg> = command
        .get_arguments()
        .filter(|argument| !matches!(argument.get_id().as_str(), "help" | "version") && !argument.is_hide_set())
        .collect();
    if !shown.is_empty() {
        text.push_str("\n| option | meaning |\n|---|---|\n");
    }
    let mut reported = BTreeSet::new();
    for argument in shown {
        writeln!(text, "| {} | {} |", names(argument), meaning(argument, &mut reported)).unwrap();
    }
    if let Some(after) = command.get_after_help() {
        writeln!(text, "\n```text\n{after}\n```").unwrap();
    }
    // What `help` says is what is here.
    for command in command
        .get_subcommands_mut()
        .filter(|command| command.get_name() != "help" && !command.is_hide_set())
    {
        let name = format!("{name} {}", command.get_name());
        describe(command, &name, text);
    }
}

/// The page about the command line.
fn command_line() -> String {
    let mut text = String::from(
        "# Command line\n\nMade from the program's own definitions. Every command has `--help`, and `--version` says which minivmm it is.\n",
    );
    let mut command = Cli::command();
    command.build();
    describe(&mut command, "minivmm", &mut text);
    text
}

/// The library's example, from the head of the crate, without the lines that its documentation hides.
fn example() -> String {
    let text = fs::read_to_string(root().join("vmm/src/lib.rs")).unwrap();
    let lines = text.lines().map_while(|line| line.strip_prefix("//!"));
    let lines: Vec<&str> = lines.map(|line| line.strip_prefix(' ').unwrap_or(line)).collect();
    let from = lines.iter().position(|line| *line == "```no_run").expect("an example");
    let code: Vec<&str> = lines[from + 1..]
        .iter()
        .copied()
        .take_while(|line| *line != "```")
        .collect();
    let shown = code.into_iter().filter(|line| !line.starts_with("# ") && *line != "#");
    format!("```rust,ignore\n{}\n```\n", shown.collect::<Vec<_>>().join("\n"))
}

fn machine() -> String {
    let mut table = String::from("| where | device |\n|---|---|\n");
    for (first, last, name) in port_table() {
        let ports = if first == last {
            format!("port {first:X}H")
        } else {
            format!("ports {first:X}H to {last:X}H")
        };
        writeln!(table, "| {ports} | {} |", cell(name)).unwrap();
    }
    let slots = virtio::SLOTS;
    let end = virtio::WINDOW + virtio::SLOT * slots as u64 - 1;
    for (first, last, name) in [
        (
            virtio::WINDOW,
            end,
            format!("virtio-mmio, {slots} places: entropy, then the disks"),
        ),
        (
            pci::MEMORY,
            pci::MEMORY_LAST,
            "memory of PCI functions, with `--bus pci`".to_string(),
        ),
        (
            pci::ECAM,
            pci::ECAM + pci::ECAM_LEN - 1,
            "PCI configuration space (ECAM)".to_string(),
        ),
        (ioapic::IOAPIC, ioapic::IOAPIC + 0xfff, "I/O APIC".to_string()),
        (
            u64::from(HARDWARE.lapic),
            u64::from(HARDWARE.lapic) + 0xfff,
            "each CPU's local APIC, with x2APIC where the model has it".to_string(),
        ),
    ] {
        writeln!(table, "| {first:X}H to {last:X}H | {name} |").unwrap();
    }
    table
}

/// Which debug and trace units a model shows.
fn units(model: &CpuModel) -> [String; 6] {
    let (features, caps) = (model.features(), model.units);
    let or_none = |text: Option<String>| text.unwrap_or_else(|| "-".to_string());
    let lbr = if features.arch_lbr() {
        Some("architectural".to_string())
    } else {
        caps.lbr.map(|lbr| lbr.depth.to_string())
    };
    let ds = caps.ds.filter(|_| features.ds());
    let yes = |there: bool| there.then(|| "yes".to_string());
    [
        or_none(lbr),
        or_none(ds.and_then(|ds| yes(ds.bts))),
        or_none(
            ds.and_then(|ds| ds.pebs)
                .map(|pebs| format!("format {}", pebs.format as u8)),
        ),
        or_none(caps.pmu.map(|pmu| match pmu.netburst {
            Some(_) => "P4".to_string(),
            None => pmu.version.to_string(),
        })),
        or_none(yes(features.intel_pt())),
        or_none(RdtCaps::of(model).map(|caps| {
            let has = [
                ("CMT, MBM", caps.l3_monitor.is_some()),
                ("L3", caps.l3.is_some()),
                ("L2", caps.l2.is_some()),
                ("MBA", caps.bandwidth.is_some()),
            ];
            let has: Vec<&str> = has.iter().filter(|(_, there)| *there).map(|(name, _)| *name).collect();
            has.join(", ")
        })),
    ]
}

fn models() -> String {
    let mut table =
        String::from("| model | part | LBR | BTS | PEBS | PMU | PT | RDT |\n|---|---|---|---|---|---|---|---|\n");
    for model in MODELS {
        let units = units(model).join(" | ");
        writeln!(table, "| {} | {} | {units} |", model.name, cell(model.description)).unwrap();
    }
    table
}

/// Guests by models, with how many of the guest's tests pass.
fn matrix() -> String {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../resources/matrix-expected.txt");
    let expected = Table::parse(&fs::read_to_string(file).unwrap()).unwrap();
    let names: Vec<&str> = MODELS.iter().map(|model| model.name).collect();
    let labs = ["kvm-amd", "kvm-intel"];
    let mut table = format!(
        "| guest | {} | {} |\n|---|{}\n",
        names.join(" | "),
        labs.join(" | "),
        "---|".repeat(names.len() + labs.len())
    );
    for guest in expected.guests("soft") {
        let mut counts: Vec<String> = names
            .iter()
            .map(|model| {
                expected
                    .passes("soft", guest, model)
                    .map_or("·".into(), |count| count.to_string())
            })
            .collect();
        counts.extend(labs.map(|lab| match expected.sums(lab, guest) {
            [0, 0] => "·".into(),
            [passed, 0] => passed.to_string(),
            [passed, failed] => format!("{passed}, {failed} fail"),
        }));
        writeln!(table, "| {guest} | {} |", counts.join(" | ")).unwrap();
    }
    table
}

/// What an event adds up, in a few words.
fn counted(count: Count) -> String {
    let branches = |kinds: Branches| {
        let names = [
            (Branches::ALL, "branches"),
            (Branches::ALL_TAKEN, "branches that are taken"),
            (Branches::NEAR_TAKEN, "near branches that are taken"),
            (Branches::CONDITIONAL, "conditional branches"),
            (Branches::TAKEN, "conditional branches that are taken"),
            (Branches::NOT_TAKEN, "conditional branches that are not taken"),
            (Branches::CALLS, "near calls"),
            (Branches::RETURNS, "near returns"),
            (Branches::INDIRECT, "indirect jumps and calls"),
            (
                Branches::INDIRECT.or(Branches::RETURNS),
                "indirect jumps, calls and returns",
            ),
            (Branches::FAR, "far branches"),
        ];
        let name = names.iter().find(|(all, _)| *all == kinds);
        name.unwrap_or_else(|| panic!("{kinds:?} has no name")).1
    };
    match count {
        Count::Instructions => "instructions".into(),
        Count::Cycles => "steps".into(),
        Count::Reference => "steps, at the bus or crystal clock's rate".into(),
        Count::Slots => "steps, times the issue slots".into(),
        Count::Branches(kinds) => branches(kinds).into(),
        Count::Mispredicted(kinds) => format!("mispredicted {}", branches(kinds)),
        Count::Loads(Levels::ALL) => "loads".into(),
        Count::Loads(levels) => {
            let places = [
                (Levels::L1, "L1"),
                (Levels::L2, "L2"),
                (Levels::L3, "L3"),
                (Levels::MEMORY, "memory"),
            ];
            let places = places
                .iter()
                .filter(|(level, _)| levels.meets(*level))
                .map(|(_, name)| *name);
            format!("loads served by {}", places.collect::<Vec<_>>().join(", "))
        }
        Count::Stores => "stores".into(),
        Count::LoadLatency => "loads slower than MSR_PEBS_LD_LAT".into(),
        Count::X87 => "x87 instructions".into(),
        Count::Simd => "MMX, SSE and AVX instructions".into(),
        Count::Transactions(_) => "transactions".into(),
        Count::Nothing => "nothing".into(),
        Count::Caches(what) => match what {
            Caches::Accesses => "loads and stores",
            Caches::References => "loads, stores and fetches that reach the last level",
            Caches::Misses => "loads, stores and fetches that memory serves",
            Caches::LoadReferences => "loads that reach the last level",
            Caches::LoadMisses => "loads that memory serves",
            Caches::StoreReferences => "stores that reach the last level",
            Caches::StoreMisses => "stores that memory serves",
            Caches::DataFills => "lines brought into L1",
            Caches::StoreFills => "lines that stores bring into L1",
            Caches::Fetches => "lines fetched",
            Caches::FetchMisses => "lines fetched that are not in L1I",
            Caches::LoadTlbMisses => "loads that miss the first-level TLB",
            Caches::LoadTlbSecond => "loads whose translation is in the second-level TLB",
            Caches::LoadWalks => "loads that walk the page tables",
            Caches::StoreTlbMisses => "stores that miss the first-level TLB",
            Caches::StoreTlbSecond => "stores whose translation is in the second-level TLB",
            Caches::StoreWalks => "stores that walk the page tables",
            Caches::FetchTlbMisses => "pages fetched from that miss the first-level TLB",
            Caches::FetchTlbSecond => "pages fetched from whose translation is in the second-level TLB",
            Caches::FetchWalks => "pages fetched from that are walked to",
            Caches::Offcore(0) => "requests to the last level that MSR_OFFCORE_RSP_0 chooses",
            Caches::Offcore(_) => "requests to the last level that MSR_OFFCORE_RSP_1 chooses",
        }
        .into(),
    }
}

/// What each model counts.
fn events() -> String {
    let mut text = String::new();
    for model in MODELS {
        let Some(pmu) = model.units.pmu else { continue };
        if let Some(generation) = pmu.netburst {
            text += &netburst_events(model.name, generation);
            continue;
        }
        writeln!(
            text,
            "\n## {}\n\n| event, unit mask | name | counts | |\n|---|---|---|---|",
            model.name
        )
        .unwrap();
        let mut rows: Vec<_> = pmu.all_events().collect();
        rows.sort_by_key(|row| (row.event, row.umask));
        rows.dedup();
        for row in rows {
            let fidelity = match row.fidelity() {
                Fidelity::Exact => "exact",
                Fidelity::Modelled => "modelled",
                Fidelity::Zero => "always 0",
            };
            let sampled = if row.precise { ", sampled by PEBS" } else { "" };
            writeln!(
                text,
                "| {:02X}H, {:02X}H | {} | {} | {fidelity}{sampled} |",
                row.event,
                row.umask,
                row.name,
                counted(row.count)
            )
            .unwrap();
        }
    }
    text
}

/// The same of the Pentium 4, whose events belong to ESCRs.
fn netburst_events(model: &str, generation: Generation) -> String {
    let mut text = format!("\n## {model}\n\n| ESCR, event select | name | counts | |\n|---|---|---|---|\n");
    for event in netburst::EVENTS.iter().filter(|event| generation.has(event)) {
        let pair = netburst::ESCRS.iter().find(|pair| pair.unit == event.unit).unwrap();
        let registers = match pair.names {
            [first, ""] => first.to_string(),
            [first, second] => format!("{first}, {}", &second[second.len() - 1..]),
        };
        let (counts, fidelity) = match event.counts {
            Counts::Cycles => ("steps (bit 0)".to_string(), "modelled"),
            Counts::Instructions => (
                "instructions without a tag of the front end (bit 0), with one (1)".into(),
                "exact",
            ),
            Counts::MicroOps => ("instructions (bit 0)".into(), "modelled"),
            Counts::Outcomes => (
                "branches: not taken and predicted (bit 0), not taken and mispredicted (1), taken and predicted (2), taken and \
                 mispredicted (3)"
                    .into(),
                "exact where both bits of a kind are set, else modelled",
            ),
            Counts::Types => (
                "branches: conditional (bit 1), calls (2), returns (3), indirect ones and returns (4)".into(),
                "exact",
            ),
            Counts::MispredictedTypes => ("mispredicted branches, by the same bits as `retired_branch_type`".into(), "modelled"),
            Counts::Mispredicted => ("mispredicted branches (bit 0)".into(), "modelled"),
            Counts::Operations(operation) => {
                let what = match operation {
                    Operation::PackedSingle => "packed operations of single precision",
                    Operation::PackedDouble => "packed operations of double precision",
                    Operation::ScalarSingle => "scalar operations of single precision",
                    Operation::ScalarDouble => "scalar operations of double precision",
                    Operation::Mmx => "integer operations in MMX registers",
                    Operation::Integer => "integer operations in XMM registers",
                    Operation::X87 => "x87 operations but for loads, stores and moves",
                    Operation::Move => "loads, stores and moves of x87, MMX and SSE",
                };
                (format!("{what} (bit 15)"), "exact")
            }
            Counts::Memory(kinds) => {
                let kinds = kinds.iter().map(|(bit, kind)| format!("{} (bit {bit})", kind.text()));
                (kinds.collect::<Vec<_>>().join(", "), "modelled")
            }
            Counts::Tags => ("tags loads (bit 1) and stores (2)".into(), "always 0"),
            Counts::FrontEnd => ("loads and stores so tagged (bit 0)".into(), "exact, sampled by PEBS"),
            Counts::Execution => (
                "instructions that an ESCR of FIRM has given one of the tags 0 to 3 (bits 0 to 3)".into(),
                "exact, sampled by PEBS",
            ),
            Counts::Replay => (
                "accesses and branches that were replayed, as IA32_PEBS_ENABLE and MSR_PEBS_MATRIX_VERT say (bit 0)".into(),
                "modelled, sampled by PEBS",
            ),
            Counts::Nothing => ("nothing".into(), "always 0"),
        };
        writeln!(
            text,
            "| {registers}, {:02X}H | {} | {counts} | {fidelity} |",
            event.event, event.name
        )
        .unwrap();
    }
    text
}

/// The monitor's commands.
fn monitor() -> String {
    let mut table = String::from("| command | what it does |\n|---|---|\n");
    for command in COMMANDS {
        let usage = format!("{} {}", command.name, command.arguments);
        writeln!(table, "| `{}` | {} |", cell(usage.trim_end()), cell(command.help)).unwrap();
    }
    table
}

// covers: guide/tables
#[test]
fn what_is_made_from_the_code_is_what_the_code_says() {
    compare(&source().join(CLI), &command_line());
    for (name, page, made) in [
        ("devices", "machine.md", machine()),
        ("monitor", "monitor.md", monitor()),
        ("models", "models.md", models()),
        ("matrix", "matrix.md", matrix()),
        ("events", "events.md", events()),
        ("example", "library.md", example()),
        ("surface", "security.md", surface()),
    ] {
        let file = source().join(page);
        let mut should = fs::read_to_string(&file).unwrap();
        let (head, tail) = (format!("<!-- {name} -->\n"), format!("<!-- end of {name} -->\n"));
        let start = should.find(&head).unwrap_or_else(|| panic!("{page} has no {head}")) + head.len();
        let end = should.find(&tail).unwrap_or_else(|| panic!("{page} has no {tail}"));
        should.replace_range(start..end, &made);
        compare(&file, &should);
    }
}

/// What the rooms of `unsafe` promise, by the beginnings of paths; the first that fits counts.
const ROOMS: [(&str, &str); 11] = [
    (
        "vmm/engine/src/ram.rs",
        "guest RAM: an address is checked against its region first",
    ),
    (
        "vmm/engine/src/mem.rs",
        "guest RAM: what the TLB holds was checked against its region",
    ),
    (
        "vmm/engine/src/tlb.rs",
        "guest RAM: what the TLB holds was checked against its region",
    ),
    (
        "vmm/engine/src/code_memory.rs",
        "code memory: one file mapped twice, written through one mapping, run through the other",
    ),
    (
        "vmm/engine/src/translate/",
        "translations: entered with the registers that they were made for",
    ),
    (
        "vmm/engine/src/exec/",
        "instructions that the host executes: it has them, which is looked up once",
    ),
    (
        "vmm/engine/src/fpu/",
        "instructions that the host executes: it has them, which is looked up once",
    ),
    (
        "vmm/engine/src/",
        "blocks of ops: operands are of the op that they were lowered to, and blocks live while they run",
    ),
    (
        "vmm/machine/src/memory.rs",
        "guest RAM: mapped between guards for as long as anybody has a pointer",
    ),
    (
        "vmm/kvm/src/",
        "calls into KVM and perf: structures of the size that the call takes, mappings of descriptors that are kept",
    ),
    ("vmm/src/", "calls of the C library: the allocator, the terminal"),
];

/// What a hostile guest has to do with: system calls after the start, and blocks of `unsafe` by what they promise.
fn surface() -> String {
    use minivmm::jail::calls::{CALLS, Only, threads};
    let mut text = String::from("| threads | system calls | of these with certain arguments alone |\n|---|---|---|\n");
    for (who, name) in [
        (threads::MACHINE, "those that run the machine"),
        (threads::CLIENTS, "those that listen and read from clients"),
    ] {
        let rows: Vec<_> = CALLS.iter().filter(|row| row.who & who != 0).collect();
        let calls: BTreeSet<_> = rows.iter().map(|row| row.call).collect();
        let some: BTreeSet<_> = rows
            .iter()
            .filter(|row| !matches!(row.only, Only::Any))
            .map(|row| row.call)
            .collect();
        writeln!(text, "| {name} | {} | {} |", calls.len(), some.len()).unwrap();
    }
    let mut promises: Vec<(&str, usize)> = Vec::new();
    let mut folders: Vec<PathBuf> = ["vmm", "devices"].map(|folder| root().join(folder)).to_vec();
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            let name = path.strip_prefix(root()).unwrap().to_str().unwrap().to_string();
            if path.is_dir() {
                folders.push(path);
            } else if name.ends_with(".rs") && !name.ends_with("_test.rs") && name.contains("/src/") {
                let source = fs::read_to_string(&path).unwrap();
                let lines = source.lines().filter(|line| !line.trim_start().starts_with("//"));
                let blocks: usize = lines.map(|line| line.matches("unsafe {").count()).sum();
                if blocks > 0 {
                    let (_, promise) = ROOMS
                        .iter()
                        .find(|(path, _)| name.starts_with(path))
                        .unwrap_or_else(|| panic!("{name}: `unsafe` outside of its rooms"));
                    match promises.iter_mut().find(|(known, _)| known == promise) {
                        Some((_, count)) => *count += blocks,
                        None => promises.push((promise, blocks)),
                    }
                }
            }
        }
    }
    promises.sort_by_key(|(promise, count)| (usize::MAX - count, *promise));
    text += "\n| what `unsafe` promises | blocks |\n|---|---|\n";
    for (promise, count) in promises {
        writeln!(text, "| {promise} | {count} |").unwrap();
    }
    text
}

// covers: guide/readme
#[test]
fn the_readme_is_short_and_names_both_commands() {
    let readme = fs::read_to_string(root().join("README.md")).unwrap();
    let count = readme.lines().count();
    assert!(count <= README_LINES, "{count} lines: what is more is for the guide");
    for command in ["cargo xtask demo", "cargo xtask test"] {
        assert!(readme.contains(command), "{command}");
    }
}

// covers: guide/links
#[test]
fn every_page_is_in_the_summary_once() {
    let pages = pages();
    let linked: Vec<String> = links(&pages["SUMMARY.md"])
        .into_iter()
        .map(|(target, _)| target)
        .collect();
    let mut there: Vec<&String> = pages.keys().filter(|name| *name != "SUMMARY.md").collect();
    let mut sorted: Vec<&String> = linked.iter().collect();
    there.sort();
    sorted.sort();
    assert_eq!(sorted, there);
}

/// A text without its blocks of code.
fn prose(text: &str) -> String {
    let mut code = false;
    let mut prose = String::new();
    for line in text.lines() {
        if line.trim_start().starts_with("```") {
            code = !code;
        } else if !code {
            prose += line;
            prose.push('\n');
        }
    }
    prose
}

/// Links of a page: file and anchor, either of which may be empty.
fn links(text: &str) -> Vec<(String, String)> {
    let prose = prose(text);
    let targets = prose.split("](").skip(1).filter_map(|rest| rest.split_once(')'));
    targets
        .map(|(target, _)| target.split_once('#').unwrap_or((target, "")))
        .map(|(file, anchor)| (file.to_string(), anchor.to_string()))
        .collect()
}

/// What headings of a page are called in links, as mdBook has it.
fn anchors(text: &str) -> BTreeSet<String> {
    let prose = prose(text);
    let headings = prose.lines().filter(|line| line.starts_with('#'));
    let anchor = |heading: &str| -> String {
        let kept = heading.trim_start_matches('#').trim().chars().filter_map(|c| match c {
            c if c.is_alphanumeric() || c == '_' || c == '-' => Some(c.to_ascii_lowercase()),
            c if c.is_whitespace() => Some('-'),
            _ => None,
        });
        kept.collect()
    };
    headings.map(anchor).collect()
}

// covers: guide/links
#[test]
fn every_link_leads_somewhere() {
    let mut seen = 0;
    for (name, folder, text) in texts() {
        for (file, anchor) in links(&text) {
            if file.starts_with("https:") {
                continue;
            }
            let path = folder.join(&file);
            assert!(file.is_empty() || path.exists(), "{name}: there is no {file}");
            if !anchor.is_empty() {
                let there = match file.is_empty() {
                    true => anchors(&text),
                    false => anchors(&fs::read_to_string(&path).unwrap()),
                };
                assert!(there.contains(&anchor), "{name}: {file} has no #{anchor}: {there:?}");
            }
            seen += 1;
        }
    }
    assert!(seen > 50, "{seen} links");
}

/// Folders of the tree in which named files lie.
const FOLDERS: [&str; 6] = ["devices/", "vmm/", "tools/", "guest-tests/", "resources/", ".github/"];

// covers: guide/links
#[test]
fn every_file_that_is_named_exists() {
    let mut seen = 0;
    for (name, _, text) in texts() {
        let ends = |c: char| c.is_whitespace() || "`'\"(),;|".contains(c);
        for word in text.split(ends) {
            let word = word.trim_end_matches(['.', ':']);
            if FOLDERS.iter().any(|folder| word.starts_with(folder)) {
                assert!(root().join(word).exists(), "{name}: there is no {word}");
                seen += 1;
            }
        }
    }
    assert!(seen > 100, "{seen} files");
}

// covers: guide/walks
#[test]
fn the_walks_lead_through_functions_that_are_there() {
    let walks = fs::read_to_string(source().join("walks.md")).unwrap();
    let mut seen = 0;
    for row in walks.lines().filter(|line| line.starts_with("| ")) {
        let cells: Vec<&str> = row.split('|').map(str::trim).collect();
        let [_, number, file, functions, ..] = cells[..] else {
            panic!("{row}");
        };
        if number.parse::<u32>().is_err() {
            continue;
        }
        let file = file.trim_matches('`');
        let text = fs::read_to_string(root().join(file)).unwrap_or_else(|error| panic!("{file}: {error}"));
        let functions = functions.split(", ").map(|function| function.trim_matches('`'));
        for function in functions {
            let is = ["(", "<"]
                .iter()
                .any(|open| text.contains(&format!("fn {function}{open}")));
            assert!(is, "{file} has no function {function}");
            seen += 1;
        }
    }
    assert!(seen > 60, "{seen} functions");
    let headings = walks.lines().filter(|line| line.starts_with("## "));
    assert_eq!(headings.count(), 4, "four walks");
}

/// The command lines in blocks of code, without a prompt, each whole.
fn commands(text: &str) -> Vec<String> {
    let (mut code, mut commands, mut open) = (false, Vec::new(), false);
    for line in text.lines() {
        if line.starts_with("```") {
            code = !code;
            open = false;
        } else if code {
            let begins = line.strip_prefix("$ ").unwrap_or(line);
            let whole = begins.trim_end_matches('\\');
            if open {
                commands
                    .last_mut()
                    .map(|command: &mut String| *command += whole)
                    .unwrap();
            } else {
                commands.push(whole.to_string());
            }
            open = line.ends_with('\\');
        }
    }
    commands
}

/// The first command of a shell's line as words.
fn words(line: &str) -> Vec<String> {
    let line = line.replace("$(uname -r)", "6.1.0");
    let (mut words, mut word, mut quote) = (Vec::new(), None::<String>, None);
    for c in line.chars() {
        match (quote, c) {
            (Some(open), c) if c == open => quote = None,
            (None, '\'' | '"') => {
                quote = Some(c);
                word.get_or_insert_default();
            }
            (None, '&' | '|' | '<' | '>' | ';') => break,
            (None, c) if c.is_whitespace() => words.extend(word.take()),
            (_, c) => word.get_or_insert_default().push(c),
        }
    }
    words.extend(word);
    words
}

// covers: guide/commands
#[test]
fn every_command_line_is_one_that_minivmm_takes() {
    let mut seen = 0;
    for (name, _, text) in texts().into_iter().filter(|(name, ..)| name != CLI) {
        for line in commands(&text).iter().filter(|line| line.starts_with("minivmm ")) {
            let parsed = Cli::command().try_get_matches_from(words(line));
            assert!(parsed.is_ok(), "{name}: {line}\n{}", parsed.unwrap_err());
            seen += 1;
        }
    }
    assert!(seen > 30, "{seen} command lines");
}

// covers: guide/commands
#[test]
fn every_xtask_that_is_named_is_there() {
    let main = fs::read_to_string(root().join("tools/xtask/src/main.rs")).unwrap();
    let known = main.split("enum Command {").nth(1).unwrap().split('}').next().unwrap();
    let known: BTreeSet<String> = known
        .lines()
        .filter_map(|line| Some(line.trim().split_once('(')?.0.to_ascii_lowercase()))
        .collect();
    let mut named = BTreeSet::new();
    for (name, _, text) in texts() {
        for rest in text.split("cargo xtask ").skip(1) {
            let task: String = rest.chars().take_while(char::is_ascii_lowercase).collect();
            assert!(known.contains(&task), "{name}: cargo xtask {task}: {known:?}");
            named.insert(task);
        }
    }
    assert_eq!(named, known, "one is not in the guide");
}

/// What the page on units calls exact is proved by tests that are not a unit with a mock processor alone: a guest, the engine beside
/// the host's processor, libipt, or Linux.
// covers: guide/exact
#[test]
fn what_is_called_exact_is_proved_by_more_than_a_unit_test() {
    let page = fs::read_to_string(source().join("units.md")).unwrap();
    let coverage = fs::read_to_string(root().join("resources/coverage.md")).unwrap();
    let tests: BTreeMap<&str, &str> = coverage
        .lines()
        .filter_map(|line| {
            let mut cells = line.strip_prefix("| `")?.splitn(3, " | ");
            Some((cells.next()?.strip_suffix('`')?, cells.nth(1)?))
        })
        .collect();
    let mut lines = page.lines();
    let (mut tables, mut rows) = (0, 0);
    while let Some(line) = lines.next() {
        if line != "| exact | items |" {
            continue;
        }
        tables += 1;
        for row in lines.by_ref().skip(1).take_while(|row| row.starts_with('|')) {
            let cells: Vec<&str> = row.trim_matches('|').split(" | ").collect();
            let items: Vec<&str> = cells[1].split('`').skip(1).step_by(2).collect();
            assert!(!items.is_empty(), "{row}");
            let proofs: Vec<&str> = items
                .iter()
                .map(|item| *tests.get(item).unwrap_or_else(|| panic!("no item {item}: {row}")))
                .collect();
            let whole = |proof: &&str| proof.contains("guest-tests/") || proof.contains("/tests/");
            assert!(proofs.iter().any(whole), "only units' tables: {row}");
            rows += 1;
        }
    }
    assert_eq!(tables, 4, "debug registers, branches, Intel PT, counters");
    assert!(rows > 20, "{rows}");
    assert!(!page.contains("**Exact:**"), "a list without its items");
}
