//! Registers: breakpoints, debug control, the time-stamp counter, MSRs, CPUID.

use std::fmt::Write;

use x86::{
    debug::{Dr7, Watched},
    msr::*,
};

use super::{
    arguments::{Answer, bits, none, number},
    error::MonitorError,
    scene::Scene,
};

/// `dr`.
pub fn debug(scene: &mut Scene<'_, '_>, arguments: &[&str]) -> Answer {
    none(arguments)?;
    let dr = scene.state.dr;
    let (dr7, extensions) = (Dr7::from_bits(dr[7]), scene.state.cr4.de());
    let mut text = String::new();
    for n in 0..4u8 {
        let address = dr[usize::from(n)];
        let enables = dr7.enables() >> (2 * n) & 3;
        let on = ["off", "L", "G", "L G"][usize::from(enables)];
        let what = match dr7.breakpoint(n, address, extensions) {
            None => "undefined".into(),
            Some(watched) => match watched.watched {
                Watched::Execute => "execute".into(),
                Watched::Write => format!("write {}", watched.len),
                Watched::ReadWrite => format!("read or write {}", watched.len),
                Watched::Port => format!("port {}", watched.len),
            },
        };
        let place = scene.describe(address);
        let _ = writeln!(text, "DR{n} {place}: {what}, {on}");
    }
    const DR6: [(u32, &str); 8] = [
        (0, "B0"),
        (1, "B1"),
        (2, "B2"),
        (3, "B3"),
        (13, "BD"),
        (14, "BS"),
        (15, "BT"),
        (12, "bit 12"),
    ];
    // BLD and RTM are clear when it was that.
    let mut status = bits(dr[6] & 0xf00f, &DR6);
    for (bit, name) in [(11, "BLD clear"), (16, "RTM clear")] {
        if dr[6] >> bit & 1 == 0 {
            status = format!("{status} {name}");
        }
    }
    const DR7: [(u32, &str); 13] = [
        (0, "L0"),
        (1, "G0"),
        (2, "L1"),
        (3, "G1"),
        (4, "L2"),
        (5, "G2"),
        (6, "L3"),
        (7, "G3"),
        (8, "LE"),
        (9, "GE"),
        (11, "RTM"),
        (13, "GD"),
        (12, "bit 12"),
    ];
    let control = bits(dr[7] & 0xffff & !(1 << 10), &DR7);
    let _ = write!(text, "DR6 {:#x}: {status}\nDR7 {:#x}: {control}\n", dr[6], dr[7]);
    Ok(text)
}

/// `debugctl`.
pub fn debugctl(scene: &mut Scene<'_, '_>, arguments: &[&str]) -> Answer {
    none(arguments)?;
    let model = scene.model();
    let (Some(caps), Some(value)) = (model.units.debugctl, scene.msr(IA32_DEBUGCTL)) else {
        return Err(MonitorError::Lacks(model.name, "debug control register"));
    };
    const BITS: [(u32, &str); 13] = [
        (0, "LBR"),
        (1, "BTF"),
        (2, "BUS_LOCK_DETECT"),
        (6, "TR"),
        (7, "BTS"),
        (8, "BTINT"),
        (9, "BTS_OFF_OS"),
        (10, "BTS_OFF_USR"),
        (11, "FREEZE_LBRS_ON_PMI"),
        (12, "FREEZE_PERFMON_ON_PMI"),
        (13, "ENABLE_UNCORE_PMI"),
        (14, "FREEZE_WHILE_SMM"),
        (15, "RTM"),
    ];
    // The older layouts say the same with other bits.
    let says = bits(caps.layout.decode(value).into_bits(), &BITS);
    Ok(format!("IA32_DEBUGCTL {value:#x}: {says}\n"))
}

/// `tsc`.
pub fn tsc(scene: &mut Scene<'_, '_>, arguments: &[&str]) -> Answer {
    none(arguments)?;
    let model = scene.model();
    let ns = scene.controls.run.virtual_ns();
    let tsc = scene.msr(IA32_TIME_STAMP_COUNTER).unwrap_or(0);
    let offset = scene.controls.run.machine().tsc_offset(scene.cpu);
    let mut text = format!(
        "TSC {tsc:#x} ({tsc}) at {} kHz, virtual time {ns} ns\nahead of the machine's clock by {}\n",
        model.tsc_khz, offset as i64
    );
    if let Some(adjust) = scene.msr(IA32_TSC_ADJUST) {
        let _ = writeln!(text, "IA32_TSC_ADJUST {adjust:#x} ({})", adjust as i64);
    }
    if let Some(aux) = scene.msr(IA32_TSC_AUX) {
        let _ = writeln!(text, "IA32_TSC_AUX {aux:#x}");
    }
    match scene.msr(IA32_TSC_DEADLINE) {
        Some(0) => text += "IA32_TSC_DEADLINE 0: not armed\n",
        Some(deadline) => {
            let _ = writeln!(
                text,
                "IA32_TSC_DEADLINE {deadline:#x}: in {} ticks",
                deadline.wrapping_sub(tsc) as i64
            );
        }
        None => {}
    }
    Ok(text)
}

/// An MSR by its number or name.
fn register(scene: &mut Scene<'_, '_>, word: &str) -> Result<u32, MonitorError> {
    if word.starts_with(|c: char| c.is_ascii_digit()) {
        return u32::try_from(number(word)?)
            .map_err(|_| MonitorError::Range(word.into(), "an MSR has a number of 32 bits"));
    }
    let rows = scene.model().msrs.iter().map(|row| (row.msr, row.name));
    let mut all = rows.chain(NAMES.iter().copied());
    let found = all.find(|(_, name)| name.eq_ignore_ascii_case(word));
    found
        .map(|(msr, _)| msr)
        .ok_or_else(|| MonitorError::MsrName(word.into()))
}

/// `msr read` and `msr write`.
pub fn msr(scene: &mut Scene<'_, '_>, arguments: &[&str]) -> Answer {
    let name = |msr: u32| {
        NAMES
            .iter()
            .find(|(number, _)| *number == msr)
            .map_or("", |(_, name)| name)
    };
    match arguments {
        ["read", which] => {
            let msr = register(scene, which)?;
            match scene.msr(msr) {
                Some(value) => Ok(format!("{msr:#x} {} {value:#x}\n", name(msr)).replace("  ", " ")),
                None => Err(MonitorError::Rdmsr(msr)),
            }
        }
        ["write", which, value] => {
            let (msr, value) = (register(scene, which)?, number(value)?);
            scene
                .controls
                .run
                .write_msr(scene.cpu, msr, value)
                .map_err(|_| MonitorError::Wrmsr { msr, value })?;
            Ok(format!("{msr:#x} {} {value:#x} written\n", name(msr)).replace("  ", " "))
        }
        _ => Err(MonitorError::Usage("msr read MSR, or msr write MSR VALUE")),
    }
}

/// `cpuid`.
pub fn cpuid(scene: &mut Scene<'_, '_>, arguments: &[&str]) -> Answer {
    let word =
        |word: &str| u32::try_from(number(word)?).map_err(|_| MonitorError::Range(word.into(), "a leaf has 32 bits"));
    let (leaf, subleaf) = match arguments {
        [leaf] => (word(leaf)?, 0),
        [leaf, subleaf] => (word(leaf)?, word(subleaf)?),
        _ => return Err(MonitorError::Usage("cpuid LEAF [SUBLEAF]")),
    };
    let [eax, ebx, ecx, edx] = scene.controls.run.peek_cpuid(scene.cpu, leaf, subleaf);
    let mut text = format!("{leaf:#x}.{subleaf:#x}: EAX {eax:#010x} EBX {ebx:#010x} ECX {ecx:#010x} EDX {edx:#010x}\n");
    let brand: Vec<u8> = [eax, ebx, ecx, edx]
        .iter()
        .flat_map(|word| word.to_le_bytes())
        .collect();
    match leaf {
        0 => {
            let vendor: Vec<u8> = [ebx, edx, ecx].iter().flat_map(|word| word.to_le_bytes()).collect();
            let _ = writeln!(
                text,
                "vendor {}, leaves up to {eax:#x}",
                String::from_utf8_lossy(&vendor)
            );
        }
        0x8000_0002..=0x8000_0004 => {
            let brand = String::from_utf8_lossy(&brand).replace('\0', "");
            let _ = writeln!(text, "brand {brand:?}");
        }
        _ => {}
    }
    Ok(text)
}
