//! `resources/models.md`: every model's CPUID and MSRs, beside what the part's dump says, as a table to read and to compare.

extern crate std;

use alloc::format;
use alloc::string::String;
use std::{env, fs};

use super::{Check, CpuModel, CpuidRow, Difference, MODELS, MsrRow};
use crate::cpuid::Register;

const FILE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../resources/models.md");

const HEAD: &str = "\
# CPU models

What each model's CPUID answers and which plain MSRs it has. The left half of a CPUID row is the part's own answer, which a
test compares with the dump in `resources/cpuid`; the right half is the guest's where it differs, with the reasons below it.
An MSR row says the value at start and the bits that software may change: a write that differs elsewhere is #GP(0). Registers
of the units (local APIC, debug, trace, counters, resource director, time-stamp counter) are not storage and not listed.

Made by `UPDATE=1 cargo test -p minivmm-x86 models_md`; a test fails when it is out of date.
";

fn registers(regs: [u32; 4]) -> String {
    let [a, b, c, d] = regs;
    format!("{a:08X} {b:08X} {c:08X} {d:08X}")
}

fn cpuid_row(model: &CpuModel, row: &CpuidRow) -> String {
    let part = model
        .silicon
        .iter()
        .find(|part| (part.leaf, part.subleaf) == (row.leaf, row.subleaf));
    let leaf = match row.subleaf {
        Some(subleaf) => format!("{:X}H.{subleaf}", row.leaf),
        None => format!("{:X}H", row.leaf),
    };
    let (left, right) = match part {
        Some(part) if part.regs == row.regs => (registers(part.regs), String::new()),
        Some(part) => (registers(part.regs), registers(row.regs)),
        None => (String::new(), registers(row.regs)),
    };
    format!("| {leaf} | {left} | {right} |\n")
}

fn difference(d: &Difference) -> String {
    let register = match d.register {
        Register::Eax => "EAX",
        Register::Ebx => "EBX",
        Register::Ecx => "ECX",
        Register::Edx => "EDX",
    };
    let what = d.feature.map_or(String::new(), |f| format!(" {}", f.name()));
    let change = match (d.clear, d.set) {
        (clear, 0) => format!("-{clear:X}"),
        (0, set) => format!("+{set:X}"),
        (clear, set) => format!("-{clear:X} +{set:X}"),
    };
    format!(
        "- {:X}H.{} {register} {change}{what}: {}\n",
        d.leaf, d.subleaf, d.reason
    )
}

fn msr_row(row: &MsrRow) -> String {
    let rule = match row.check {
        Check::None if row.ignore_reserved => "others are ignored",
        Check::None => "",
        Check::ReadOnly => "read-only",
        Check::PatTypes => "PAT types",
        Check::MtrrTypes => "MTRR types",
        Check::MtrrType => "an MTRR type",
        Check::ZerosOrOnes => "all zeros or all ones",
        Check::Command => "write-only command",
    };
    let writable = match row.check {
        Check::ReadOnly => String::new(),
        _ => format!("{:X}", row.writable),
    };
    format!(
        "| {:X}H | {} | {:X} | {writable} | {rule} |\n",
        row.msr, row.name, row.reset
    )
}

fn table() -> String {
    let mut text = String::from(HEAD);
    for model in MODELS {
        text += &format!("\n## {}\n\n{}\n\n", model.name, model.description);
        text += "| CPUID | the part: EAX EBX ECX EDX | the guest, where it differs |\n|---|---|---|\n";
        for row in model.cpuid {
            text += &cpuid_row(model, row);
        }
        text += "\n";
        for d in model.differences() {
            text += &difference(&d);
        }
        text += "\n| MSR | name | at start | writable bits | rule |\n|---|---|---|---|---|\n";
        for row in model.msrs {
            text += &msr_row(row);
        }
    }
    text
}

// covers: cpu/models-table
#[test]
fn models_md_is_what_the_models_say() {
    let text = table();
    if env::var_os("UPDATE").is_some() {
        fs::write(FILE, &text).unwrap();
    }
    let there = fs::read_to_string(FILE).unwrap_or_default();
    for (line, (has, should)) in there.lines().zip(text.lines()).enumerate() {
        assert_eq!(
            has,
            should,
            "line {} of resources/models.md: run `UPDATE=1 cargo test -p minivmm-x86 models_md`",
            line + 1
        );
    }
    assert_eq!(
        there.lines().count(),
        text.lines().count(),
        "lines of resources/models.md"
    );
}
