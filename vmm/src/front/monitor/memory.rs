//! Addresses and page tables. SDM Vol. 3A chapter 4 "Paging".

use std::fmt::Write;

use super::{
    arguments::{Answer, bits},
    error::MonitorError,
    scene::Scene,
};
use machine::walk;

fn address(scene: &mut Scene<'_, '_>, arguments: &[&str]) -> Result<u64, MonitorError> {
    match arguments {
        [word] => scene.address(word),
        _ => Err(MonitorError::Usage(
            "one address: a number, a symbol, or a symbol+NUMBER",
        )),
    }
}

/// `gva2gpa`.
pub fn gva2gpa(scene: &mut Scene<'_, '_>, arguments: &[&str]) -> Answer {
    let linear = address(scene, arguments)?;
    let state = scene.state.clone();
    let physical = walk::translate(scene.controls.run.machine().memory(), &state, linear);
    let name = scene.describe(linear);
    match physical {
        Some(physical) => Ok(format!("{name} is at physical {physical:#x}\n")),
        None => {
            let isolated = walk::with_kernel_tables(&state).filter(|_| linear >> 63 == 1);
            let memory = scene.controls.run.machine().memory();
            match isolated.and_then(|state| walk::translate(memory, &state, linear)) {
                Some(physical) => Err(MonitorError::Isolated(name, physical)),
                None => Err(MonitorError::NotMapped(name)),
            }
        }
    }
}

/// Bits of an EPT entry. SDM Vol. 3C Tables 29-1 to 29-6.
const EPT_FLAGS: [(u32, &str); 8] = [
    (0, "R"),
    (1, "W"),
    (2, "X"),
    (7, "PS"),
    (8, "A"),
    (9, "D"),
    (10, "XU"),
    (63, "SVE"),
];

/// `pagewalk`.
pub fn pagewalk(scene: &mut Scene<'_, '_>, arguments: &[&str]) -> Answer {
    const FLAGS: [(u32, &str); 10] = [
        (0, "P"),
        (1, "W"),
        (2, "U"),
        (3, "PWT"),
        (4, "PCD"),
        (5, "A"),
        (6, "D"),
        (7, "PS"),
        (8, "G"),
        (63, "XD"),
    ];
    let linear = address(scene, arguments)?;
    let state = scene.state.clone();
    let (steps, physical) = walk::steps(scene.controls.run.machine().memory(), &state, linear);
    let mut text = format!("{}, CR3 {:#x}\n", scene.describe(linear), state.cr3);
    if steps.is_empty() && physical.is_some() {
        text += "paging is off\n";
    }
    for step in &steps {
        let _ = write!(text, "{:5} {:#x}: ", step.table, step.at);
        match step.entry {
            // Bit 7 of a page-table entry is the PAT bit.
            Some(entry) => {
                let flags = entry & (0x1ff | 1 << 63);
                let flags = bits(flags, &FLAGS);
                let flags = if step.table == "PTE" {
                    flags.replace("PS", "PAT")
                } else {
                    flags
                };
                let _ = writeln!(text, "{entry:#x}, {:#x} {flags}", entry & walk::ADDRESS);
            }
            None => text += "no RAM\n",
        }
    }
    let Some(physical) = physical else {
        return Ok(text + "not mapped\n");
    };
    let memory = scene.controls.run.machine().memory();
    let Some((entries, host)) = walk::ept_steps(memory, &state, physical) else {
        let _ = writeln!(text, "physical {physical:#x}");
        return Ok(text);
    };
    let _ = writeln!(text, "guest-physical {physical:#x}");
    for ((at, entry), table) in entries
        .into_iter()
        .zip(["EPT PML4E", "EPT PDPTE", "EPT PDE", "EPT PTE"])
    {
        let flags = bits(entry & (0x787 | 1 << 63), &EPT_FLAGS);
        let _ = writeln!(
            text,
            "{table:9} {at:#x}: {entry:#x}, {:#x} {flags}",
            entry & walk::ADDRESS
        );
    }
    match host {
        Some(host) => {
            let _ = writeln!(text, "physical {host:#x}");
        }
        None => text += "not mapped by EPT\n",
    }
    Ok(text)
}
