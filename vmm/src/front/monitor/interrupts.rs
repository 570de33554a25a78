//! Interrupt controllers.

use std::fmt::Write;

use devices::{
    platform::{ioapic, pic::Pic},
    unit::lapic::Lapic,
};

use super::{
    arguments::{Answer, none},
    error::MonitorError,
    scene::Scene,
};

/// Registers of the local APIC by their offsets. SDM Vol. 3A Table 11-1 "Local APIC Register Address Map".
mod offset {
    pub const LDR: u64 = 0xd0;
    pub const SVR: u64 = 0xf0;
    pub const ISR: u64 = 0x100;
    pub const TMR: u64 = 0x180;
    pub const IRR: u64 = 0x200;
    pub const ESR: u64 = 0x280;
    pub const TPR: u64 = 0x80;
    pub const CURRENT_COUNT: u64 = 0x390;
    pub const INITIAL_COUNT: u64 = 0x380;
    pub const LVTS: [(u64, &str); 7] = [
        (0x320, "timer"),
        (0x330, "thermal"),
        (0x340, "performance"),
        (0x350, "LINT0"),
        (0x360, "LINT1"),
        (0x370, "error"),
        (0x2f0, "CMCI"),
    ];
}

const DELIVERY: [&str; 8] = [
    "fixed",
    "lowest priority",
    "SMI",
    "reserved",
    "NMI",
    "INIT",
    "start-up",
    "ExtINT",
];

fn delivery(entry: u64) -> &'static str {
    DELIVERY[(entry >> 8 & 7) as usize]
}

/// `irq`.
pub fn irq(scene: &mut Scene<'_, '_>, arguments: &[&str]) -> Answer {
    none(arguments)?;
    if scene.controls.run.machine().platform().irqchip_is_external() {
        return Err(MonitorError::Impossible(
            "the interrupt controllers are KVM's: `--irqchip minivmm` has them shown",
        ));
    }
    let (cpu, now) = (scene.cpu, scene.controls.run.virtual_ns());
    let flags = scene.state.rflags;
    let mut text = format!(
        "CPU {cpu}: interrupts {}{}{}\n",
        if flags.interrupt() { "on" } else { "off" },
        if scene.state.shadow {
            ", held back until after the next instruction"
        } else {
            ""
        },
        if scene.state.nmi_blocked { ", NMIs blocked" } else { "" },
    );
    let platform = scene.controls.run.machine().platform();
    // Copies: some registers do something when they are read.
    let state = platform.state();
    if let Some(lapic) = platform.lapic(cpu).cloned() {
        text += &local(lapic, now);
    }
    text += &io(&state.ioapic);
    text += &pair(state.pic);
    Ok(text)
}

fn local(mut lapic: Lapic, now: u64) -> String {
    let mode = match (lapic.enabled(), lapic.x2apic()) {
        (false, _) => "disabled",
        (_, true) => "x2APIC",
        _ => "xAPIC",
    };
    let (id, ppr, nmi, ext) = (lapic.id(), lapic.ppr(), lapic.nmi_pending(), lapic.ext_int_pending());
    let mut read = |at: u64| lapic.read(at, 4, now);
    let svr = read(offset::SVR);
    let software = if svr & 1 << 8 != 0 { "" } else { ", software-disabled" };
    let mut text = format!(
        "local APIC {id}: {mode}{software}, LDR {:#x}, TPR {:#x}, PPR {ppr:#x}, spurious vector {:#x}, ESR {:#x}\n",
        read(offset::LDR),
        read(offset::TPR),
        svr & 0xff,
        read(offset::ESR)
    );
    for (at, name) in offset::LVTS {
        let entry = read(at);
        let masked = if entry & 1 << 16 != 0 { " masked" } else { "" };
        let mode = match (name, entry >> 17 & 3) {
            ("timer", 0) => " one-shot",
            ("timer", 1) => " periodic",
            ("timer", 2) => " TSC-deadline",
            _ => "",
        };
        let _ = writeln!(
            text,
            "  {name} {entry:#x}: vector {:#x} {}{mode}{masked}",
            entry & 0xff,
            delivery(entry)
        );
    }
    let (initial, current) = (read(offset::INITIAL_COUNT), read(offset::CURRENT_COUNT));
    let _ = writeln!(text, "  timer count {current:#x} of {initial:#x}");
    for (at, name) in [(offset::IRR, "IRR"), (offset::ISR, "ISR"), (offset::TMR, "TMR")] {
        let set: Vec<String> = (0..256u64)
            .filter(|vector| read(at + (vector >> 5) * 0x10) >> (vector & 31) & 1 != 0)
            .map(|vector| format!("{vector:#x}"))
            .collect();
        let set = if set.is_empty() { "-".into() } else { set.join(" ") };
        let _ = writeln!(text, "  {name} {set}");
    }
    if nmi {
        text += "  an NMI waits\n";
    }
    if ext {
        text += "  an interrupt of the 8259 pair waits\n";
    }
    text
}

fn io(ioapic: &ioapic::Ioapic) -> String {
    let mut text = String::from("I/O APIC:\n");
    let mut masked = 0;
    for pin in 0..ioapic::PINS {
        let entry = ioapic.entry(pin).unwrap_or(0);
        if entry & 1 << 16 != 0 {
            masked += 1;
            continue;
        }
        let logical = if entry & 1 << 11 != 0 { "logical " } else { "" };
        let trigger = if entry & 1 << 15 != 0 { "level" } else { "edge" };
        let low = if entry & 1 << 13 != 0 { " active-low" } else { "" };
        let taken = if entry & 1 << 14 != 0 { ", in service" } else { "" };
        let _ = writeln!(
            text,
            "  pin {pin}: vector {:#x} {} {trigger}{low} to {logical}{:#x}{taken}",
            entry & 0xff,
            delivery(entry),
            entry >> 56
        );
    }
    let _ = writeln!(text, "  {masked} pins masked");
    text
}

fn pair(mut pic: Pic) -> String {
    let mut text = String::new();
    let out = if pic.intr() { ", asks for an interrupt" } else { "" };
    for second in [false, true] {
        let mask = pic.read(second, true);
        // OCW3: the command port shows IRR, then ISR.
        pic.write(second, false, 0x0a);
        let requests = pic.read(second, false);
        pic.write(second, false, 0x0b);
        let service = pic.read(second, false);
        let which = if second { "second" } else { "first" };
        let _ = writeln!(
            text,
            "8259A, {which}: masked {mask:#010b}, requested {requests:#010b}, in service {service:#010b}, level {:#010b}{}",
            pic.read_elcr(second),
            if second { "" } else { out }
        );
    }
    text
}
