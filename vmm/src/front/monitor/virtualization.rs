//! VMX operation as the CPU is in it. SDM Vol. 3C chapters 24 and 25.

use std::fmt::Write;

use engine::Vmx;
use x86::vmx::fields::{FIELDS, Launch, REGION, Width};
use x86::vmx::{ExitReason, Field, Vmcs};

use super::{arguments::Answer, error::MonitorError, scene::Scene};

/// `vmcs`.
pub fn vmcs(scene: &mut Scene<'_, '_>, arguments: &[&str]) -> Answer {
    let model = scene.controls.run.machine().model();
    let Some(caps) = model.shown_vmx() else {
        return Err(MonitorError::Impossible(
            "this CPU model shows no VMX: core2 and all later models do, unless `-vmx` takes it away",
        ));
    };
    let wanted = arguments.join(" ").to_lowercase();
    let Some(vmx) = scene.state.vmx.clone() else {
        return Ok("outside VMX operation\n".into());
    };
    let mut text = place(&vmx);
    let Some(at) = vmx.current else {
        return Ok(text + "no current VMCS\n");
    };
    let mut bytes = [0; REGION];
    let read = scene.controls.run.machine().memory().read(at, &mut bytes);
    read.map_err(|_| MonitorError::Impossible("the region of the current VMCS is no RAM"))?;
    let vmcs = Vmcs::from_bytes(&bytes);
    let launched = match vmcs.launch() {
        Launch::Clear => "clear",
        Launch::Launched => "launched",
    };
    let _ = writeln!(text, "current VMCS at {at:#x}, {launched}");
    let before = text.len();
    for row in FIELDS.iter().filter(|row| row.exists(&caps)) {
        if !row.name.to_lowercase().contains(&wanted) {
            continue;
        }
        let digits = match row.field.width() {
            Width::Bits16 => 4,
            Width::Bits32 => 8,
            Width::Bits64 | Width::Natural => 16,
        };
        let value = vmcs.get(row.field);
        let _ = write!(text, "{:04X}H {:45} {value:0digits$x}", row.field.0, row.name);
        let said = said(row.field, value);
        let _ = writeln!(text, "{}{said}", if said.is_empty() { "" } else { "  " });
    }
    if text.len() == before {
        return Err(MonitorError::Usage(
            "no field of this model's VMCS has that in its name: `vmcs` alone lists all",
        ));
    }
    Ok(text)
}

fn place(vmx: &Vmx) -> String {
    match &vmx.guest {
        None => "VMX root operation\n".into(),
        Some(guest) => {
            let mut text = String::from("VMX non-root operation");
            if guest.vpid != 0 {
                let _ = write!(text, ", VPID {}", guest.vpid);
            }
            match guest.ept {
                Some(pointer) => {
                    let _ = writeln!(text, ", EPT pointer {:#x}", pointer.into_bits());
                }
                None => text += ", no EPT\n",
            }
            text + "the guest-state fields are those of its last VM exit, what it has now is in the registers\n"
        }
    }
}

/// What the bits of a field stand for.
fn said(field: Field, value: u64) -> String {
    use x86::vmx::controls::{Entry, Exit, Pin, Primary, Secondary};
    let names = match field {
        Field::PIN_CONTROLS => Pin::ALL,
        Field::PRIMARY_CONTROLS => Primary::ALL,
        Field::SECONDARY_CONTROLS => Secondary::ALL,
        Field::EXIT_CONTROLS => Exit::ALL,
        Field::ENTRY_CONTROLS => Entry::ALL,
        Field::EXIT_REASON => {
            let named = ExitReason::of(value as u16).map_or("", ExitReason::text);
            return named.into();
        }
        _ => return String::new(),
    };
    let known: Vec<&str> = names
        .iter()
        .filter(|(bit, _)| value >> bit & 1 != 0)
        .map(|(_, name)| *name)
        .collect();
    known.join(", ")
}
