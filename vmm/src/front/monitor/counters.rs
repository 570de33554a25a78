//! Performance counters and sampling with them.

use std::fmt::Write;

use x86::{
    ds::{DsLayout, PebsFormat},
    msr::*,
    pmu::{
        Count, EventSelect, FixedControl,
        netburst::{self, Cccr, Escr, Generation},
        status,
    },
};

use super::{
    arguments::{Answer, bits, count, none},
    branches::Buffer,
    error::MonitorError,
    scene::Scene,
};
use crate::vm::Unmapped;

/// The first of the management area's fields that are sampling's.
const PEBS_FIELDS: u64 = 4;

/// What an event is, in a word or two.
fn event(count: &Count) -> String {
    format!("{count:?}").to_lowercase()
}

/// `pmu`.
pub fn pmu(scene: &mut Scene<'_, '_>, arguments: &[&str]) -> Answer {
    none(arguments)?;
    let model = scene.model();
    let Some(pmu) = scene.units().pmu else {
        return Err(MonitorError::Lacks(model.name, "performance counters here"));
    };
    let caps = *pmu.caps();
    if let Some(generation) = caps.netburst {
        return Ok(pentium4(scene, generation));
    }
    let control = scene.msr(IA32_PERF_GLOBAL_CTRL);
    // Version 1 and P6 have no global control.
    let enabled = |bit: u32| {
        if control.is_none_or(|control| control >> bit & 1 != 0) {
            ""
        } else {
            " (off globally)"
        }
    };
    let mut text = format!("version {}\n", caps.version);
    for n in 0..u32::from(caps.general) {
        let (Some(value), Some(select)) = (scene.msr(IA32_PMC0 + n), scene.msr(IA32_PERFEVTSEL0 + n)) else {
            continue;
        };
        let s = EventSelect::from_bits(select);
        let _ = write!(text, "PMC{n} {value:#x}");
        if select == 0 {
            text += ": -\n";
            continue;
        }
        let what = match caps.event(s) {
            Some(row) => event(&row.count),
            None => "counts nothing on this model".into(),
        };
        let _ = write!(text, ": event {:#04x} umask {:#04x} ({what})", s.event(), s.umask());
        for (set, name) in [
            (s.usr(), " usr"),
            (s.os(), " os"),
            (s.edge(), " edge"),
            (s.int(), " int"),
            (s.any(), " any"),
            (s.invert(), " inv"),
            (s.in_tx(), " in-tx"),
            (s.in_tx_checkpointed(), " in-tx-checkpointed"),
            (s.adaptive(), " adaptive"),
            (!s.enable(), " disabled"),
        ] {
            text += if set { name } else { "" };
        }
        if s.counter_mask() != 0 {
            let _ = write!(text, " cmask {}", s.counter_mask());
        }
        let _ = writeln!(text, "{}", enabled(n));
    }
    let fixed_control = scene.msr(IA32_FIXED_CTR_CTRL).unwrap_or(0);
    for n in 0..u32::from(caps.fixed) {
        let Some(value) = scene.msr(IA32_FIXED_CTR0 + n) else {
            continue;
        };
        let what = ["instructions", "cycles", "reference cycles", "slots"].get(n as usize);
        let _ = write!(text, "FIXED{n} {value:#x}: {}", what.unwrap_or(&"?"));
        let c = FixedControl::of(fixed_control, n);
        for (set, name) in [
            (c.usr, " usr"),
            (c.os, " os"),
            (c.pmi, " int"),
            (c.adaptive, " adaptive"),
        ] {
            text += if set { name } else { "" };
        }
        text += if c.usr || c.os {
            enabled(status::FIXED + n)
        } else {
            " disabled"
        };
        text.push('\n');
    }
    const OTHERS: [(u32, &str); 8] = [
        (48, "METRICS"),
        (55, "TRACE_TOPA_PMI"),
        (58, "LBR_FRZ"),
        (59, "CTR_FRZ"),
        (60, "ASCI"),
        (61, "UNCORE"),
        (62, "OVF_BUFFER"),
        (63, "COND_CHGD"),
    ];
    let names: Vec<(u32, String)> = (0..u32::from(caps.general))
        .map(|n| (n, format!("PMC{n}")))
        .chain((0..u32::from(caps.fixed)).map(|n| (status::FIXED + n, format!("FIXED{n}"))))
        .collect();
    let names: Vec<(u32, &str)> = names
        .iter()
        .map(|(bit, name)| (*bit, name.as_str()))
        .chain(OTHERS)
        .collect();
    for (msr, name) in [
        (IA32_PERF_GLOBAL_CTRL, "IA32_PERF_GLOBAL_CTRL"),
        (IA32_PERF_GLOBAL_STATUS, "IA32_PERF_GLOBAL_STATUS"),
        (IA32_PERF_GLOBAL_INUSE, "IA32_PERF_GLOBAL_INUSE"),
    ] {
        if let Some(value) = scene.msr(msr) {
            let names: &[(u32, &str)] = if msr == IA32_PERF_GLOBAL_INUSE {
                &names[..names.len() - OTHERS.len()]
            } else {
                &names
            };
            let _ = writeln!(text, "{name} {value:#x}: {}", bits(value, names));
        }
    }
    Ok(text)
}

/// The same of the Pentium 4: each counter that a CCCR has something for, with its ESCR and event.
fn pentium4(scene: &mut Scene<'_, '_>, generation: Generation) -> String {
    let mut text = format!("{} counters of {} bits\n", netburst::COUNTERS, netburst::WIDTH);
    for n in 0..netburst::COUNTERS {
        let (Some(value), Some(register)) = (
            scene.msr(MSR_BPU_COUNTER0 + n as u32),
            scene.msr(MSR_BPU_CCCR0 + n as u32),
        ) else {
            continue;
        };
        let cccr = Cccr::from_bits(register);
        if value == 0 && register == 0 {
            continue;
        }
        let _ = write!(text, "COUNTER{n} {value:#x}: ");
        match netburst::selected(n, cccr.select()).filter(|(_, msr)| generation.has_escr(*msr)) {
            Some((pair, msr)) => {
                let escr = Escr::from_bits(scene.msr(msr).unwrap_or(0));
                let name = pair.names[usize::from(msr == pair.msrs[1])];
                let what = match generation.detected(pair.unit, escr) {
                    Some(event) => event.name,
                    None => "no event",
                };
                let _ = write!(text, "{name} {what} mask {:#x}", escr.mask());
                for (set, name) in [(escr.usr(), " usr"), (escr.os(), " os"), (escr.tag_enable(), " tag")] {
                    text += if set { name } else { "" };
                }
            }
            None => text += "no ESCR",
        }
        for (set, name) in [
            (cccr.compare(), " compare"),
            (cccr.complement(), " complement"),
            (cccr.edge(), " edge"),
            (cccr.force_overflow(), " force-ovf"),
            (cccr.interrupt(), " int"),
            (cccr.cascade() || cccr.extended_cascade(), " cascade"),
            (cccr.overflow(), " overflowed"),
            (!cccr.enable(), " disabled"),
        ] {
            text += if set { name } else { "" };
        }
        if cccr.threshold() != 0 {
            let _ = write!(text, " threshold {}", cccr.threshold());
        }
        text.push('\n');
    }
    text
}

/// `pebs`.
pub fn pebs(scene: &mut Scene<'_, '_>, arguments: &[&str]) -> Answer {
    let most = count(arguments, 8)?;
    let model = scene.model();
    let units = scene.units();
    let Some(caps) = units.pmu.as_ref().and_then(|pmu| pmu.pebs().caps().copied()) else {
        return Err(MonitorError::Lacks(model.name, "event-based sampling here"));
    };
    let layout = DsLayout::of(scene.features());
    let area = scene.msr(IA32_DS_AREA).unwrap_or(0);
    let enable = scene.msr(IA32_PEBS_ENABLE).unwrap_or(0);
    let tagged = units.pmu.as_ref().is_some_and(|pmu| pmu.caps().netburst.is_some());
    let counters: Vec<(u32, String)> = (0..64)
        .map(|bit| match bit {
            24 if tagged => (bit, "UOP_TAG".into()),
            25 if tagged => (bit, "MY_THREAD".into()),
            26 if tagged => (bit, "OTHER_THREAD".into()),
            0..32 if tagged => (bit, format!("METRIC{bit}")),
            0..32 => (bit, format!("PMC{bit}")),
            61 => (bit, "OUTPUT_TO_TRACE".into()),
            63 => (bit, "PRECISE_STORE".into()),
            _ if caps.format == PebsFormat::Adaptive => (bit, format!("FIXED{}", bit - 32)),
            _ => (bit, format!("LOAD_LATENCY{}", bit - 32)),
        })
        .collect();
    let counters: Vec<(u32, &str)> = counters.iter().map(|(bit, name)| (*bit, name.as_str())).collect();
    let mut text = format!(
        "{:?} records; IA32_PEBS_ENABLE {enable:#x}: {}\nIA32_DS_AREA {area:#x}\n",
        caps.format,
        bits(enable, &counters)
    );
    for (msr, name) in [
        (MSR_PEBS_DATA_CFG, "MSR_PEBS_DATA_CFG"),
        (MSR_PEBS_LD_LAT, "MSR_PEBS_LD_LAT"),
        (MSR_PEBS_FRONTEND, "MSR_PEBS_FRONTEND"),
    ] {
        if let Some(value) = scene.msr(msr) {
            let _ = writeln!(text, "{name} {value:#x}");
        }
    }
    if area == 0 {
        return Ok(text);
    }
    let buffer = Buffer::read(scene, area, layout, PEBS_FIELDS)?;
    let size = match layout {
        DsLayout::Bits64 => caps.format.size(),
        // Ten doublewords. SDM Vol. 3B 18.4.9 "BTS and DS Save Area".
        DsLayout::Bits32 => 0x28,
    };
    let starts = records(scene, &buffer, size, caps.format)?;
    text += &buffer.text(starts.len() as u64);
    for (age, at) in starts.iter().rev().enumerate().take(most) {
        let _ = writeln!(text, "{age:2}  {}", record(scene, *at, layout, caps.format)?);
    }
    Ok(text)
}

/// Where the records of a buffer begin.
fn records(scene: &Scene<'_, '_>, buffer: &Buffer, size: u64, format: PebsFormat) -> Result<Vec<u64>, Unmapped> {
    /// More no guest of ours has room for.
    const MOST: usize = 1 << 16;
    let (mut starts, mut at) = (Vec::new(), buffer.base);
    while at < buffer.index && starts.len() < MOST {
        let len = match format {
            // The first word has it. SDM Vol. 3B 21.9.2.2 "Adaptive PEBS Record Format".
            PebsFormat::Adaptive => scene.word(at, 8)? >> 48,
            _ => size,
        };
        if len < 8 {
            break;
        }
        starts.push(at);
        at = at.wrapping_add(len);
    }
    Ok(starts)
}

/// A record in a line.
fn record(scene: &mut Scene<'_, '_>, at: u64, layout: DsLayout, format: PebsFormat) -> Answer {
    let wide = |offset: u64| scene.word(at.wrapping_add(offset), 8);
    if layout == DsLayout::Bits32 {
        let ip = scene.word(at.wrapping_add(4), 4)?;
        return Ok(scene.describe(ip));
    }
    let ip = wide(8)?;
    let mut text = String::new();
    if format == PebsFormat::Adaptive {
        let (groups, applicable, tsc) = (wide(0)?, wide(0x10)?, wide(0x18)?);
        let _ = write!(text, " counters {applicable:#x} tsc {tsc:#x}");
        if groups & x86::ds::data_cfg::MEMORY != 0 {
            let (address, latency) = (wide(0x20)?, wide(0x30)?);
            let _ = write!(text, " address {address:#x} latency {latency}");
        }
    }
    if (PebsFormat::Nehalem..PebsFormat::Adaptive).contains(&format) {
        let (status, address, latency) = (wide(0x90)?, wide(0x98)?, wide(0xa8)?);
        let _ = write!(text, " counters {status:#x} address {address:#x} latency {latency}");
    }
    if (PebsFormat::Skylake..PebsFormat::Adaptive).contains(&format) {
        let _ = write!(text, " tsc {:#x}", wide(0xc0)?);
    }
    let eventing = match format {
        PebsFormat::Haswell | PebsFormat::Skylake => Some(wide(0xb0)?),
        _ => None,
    };
    let place = scene.describe(ip);
    Ok(match eventing {
        Some(eventing) => format!("{} (then {place}){text}", scene.describe(eventing)),
        None => format!("{place}{text}"),
    })
}
