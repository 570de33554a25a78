//! The README's tables of options, devices and CPU models are what the code says. `UPDATE=1 cargo test -p minivmm --test readme`
//! writes them.

use std::{env, fmt::Write, fs, path::Path};

use clap::CommandFactory;
use devices::platform::{ioapic, port_table};
use minivmm::{
    cli::Cli,
    front::monitor::COMMANDS,
    machine::{HARDWARE, virtio},
    matrix::expected::Table,
};
use x86::model::{CpuModel, MODELS};
use x86::rdt::RdtCaps;

/// A cell's text: a bar would end it.
fn cell(text: &str) -> String {
    text.replace('|', "\\|")
}

fn options() -> String {
    let mut table = String::from("| option | meaning |\n|---|---|\n");
    for argument in Cli::command().get_arguments() {
        let Some(long) = argument.get_long() else { continue };
        let mut names = vec![format!("--{long}")];
        names.extend(
            argument
                .get_visible_aliases()
                .into_iter()
                .flatten()
                .map(|alias| format!("--{alias}")),
        );
        names.extend(argument.get_short().map(|short| format!("-{short}")));
        let values: Vec<String> = argument
            .get_possible_values()
            .iter()
            .map(|value| value.get_name().to_string())
            .collect();
        if !argument.get_action().takes_values() {
            // A switch.
        } else if !values.is_empty() {
            names[0] += &format!(" {}", values.join("|"));
        } else {
            let value = argument.get_value_names().unwrap_or_default().join(" ");
            names[0] += &format!(" {value}");
        }
        let mut help = argument.get_help().map(ToString::to_string).unwrap_or_default();
        let defaults: Vec<_> = argument
            .get_default_values()
            .iter()
            .map(|value| value.to_string_lossy())
            .collect();
        if !defaults.is_empty() && argument.get_action().takes_values() {
            write!(help, " [default: {}]", defaults.join(" ")).unwrap();
        }
        let names: Vec<String> = names.iter().map(|name| format!("`{}`", cell(name))).collect();
        writeln!(table, "| {} | {} |", names.join(", "), cell(&help)).unwrap();
    }
    table
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
        or_none(caps.pmu.map(|pmu| pmu.version.to_string())),
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
fn the_readme_s_tables_are_what_the_code_says() {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../README.md");
    let readme = fs::read_to_string(&file).unwrap();
    let mut should = readme.clone();
    for (name, table) in [
        ("options", options()),
        ("devices", machine()),
        ("models", models()),
        ("matrix", matrix()),
        ("monitor", monitor()),
    ] {
        let (head, tail) = (format!("<!-- {name} -->\n"), format!("<!-- end of {name} -->\n"));
        let start = should.find(&head).unwrap_or_else(|| panic!("README.md has no {head}")) + head.len();
        let end = should.find(&tail).unwrap_or_else(|| panic!("README.md has no {tail}"));
        should.replace_range(start..end, &table);
    }
    if env::var_os("UPDATE").is_some() {
        fs::write(&file, &should).unwrap();
    } else {
        for (has, should) in readme.lines().zip(should.lines()) {
            assert_eq!(has, should, "run `UPDATE=1 cargo test -p minivmm --test readme`");
        }
        assert_eq!(
            readme.len(),
            should.len(),
            "run `UPDATE=1 cargo test -p minivmm --test readme`"
        );
    }
}
