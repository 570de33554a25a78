//! The guest's processor trace.

use std::fmt::Write;

use pt_packet::{Decoder, Packet, find_psb};
use x86::{
    msr::*,
    pt::{PtCaps, RangeUse, RtitCtl, RtitMaskPtrs, RtitStatus, TopaEntry},
};

use super::{
    arguments::{Answer, bits, count},
    error::MonitorError,
    scene::Scene,
};

/// Packets are looked for in so many bytes before the end.
const WINDOW: u64 = 1 << 18;
/// Table entries that are shown.
const MOST_ENTRIES: u64 = 64;

/// `pt`.
pub fn pt(scene: &mut Scene<'_, '_>, arguments: &[&str]) -> Answer {
    let most = count(arguments, 16)?;
    let model = scene.model();
    let Some(caps) = scene.units().pt.as_ref().map(|pt| *pt.caps()) else {
        return Err(MonitorError::Lacks(model.name, "Intel PT here"));
    };
    let ctl = RtitCtl::from_bits(scene.msr(IA32_RTIT_CTL).unwrap_or(0));
    let status = RtitStatus::from_bits(scene.msr(IA32_RTIT_STATUS).unwrap_or(0));
    let mut text = control(ctl) + &state(status);
    if ctl.cr3_filter() {
        let _ = writeln!(text, "CR3 filter {:#x}", scene.msr(IA32_RTIT_CR3_MATCH).unwrap_or(0));
    }
    for n in 0..caps.ranges() {
        let first = scene.msr(IA32_RTIT_ADDR0_A + 2 * n as u32).unwrap_or(0);
        let last = scene.msr(IA32_RTIT_ADDR0_B + 2 * n as u32).unwrap_or(0);
        let what = match ctl.range_use(n) {
            RangeUse::Unused => continue,
            RangeUse::Filter => "traced",
            RangeUse::TraceStop => "stops the trace",
        };
        let (first, last) = (scene.describe(first), scene.describe(last));
        let _ = writeln!(text, "range {n}, {what}: {first} to {last}");
    }
    let base = scene.msr(IA32_RTIT_OUTPUT_BASE).unwrap_or(0);
    let ptrs = RtitMaskPtrs::from_bits(scene.msr(IA32_RTIT_OUTPUT_MASK_PTRS).unwrap_or(0));
    let spans = if ctl.topa() {
        table(scene, base, ptrs, &caps, &mut text)
    } else {
        single(base, ptrs, &mut text)
    };
    let bytes = tail(scene, &spans);
    text += &packets(scene, &bytes, most);
    Ok(text)
}

fn control(ctl: RtitCtl) -> String {
    const CTL: [(u32, &str); 16] = [
        (0, "TraceEn"),
        (1, "CYCEn"),
        (2, "OS"),
        (3, "User"),
        (4, "PwrEvtEn"),
        (5, "FUPonPTW"),
        (6, "FabricEn"),
        (7, "CR3Filter"),
        (8, "ToPA"),
        (9, "MTCEn"),
        (10, "TSCEn"),
        (11, "DisRETC"),
        (12, "PTWEn"),
        (13, "BranchEn"),
        (31, "EventEn"),
        (55, "DisTNT"),
    ];
    let fields = RtitCtl::new()
        .with_mtc_freq(15)
        .with_cyc_thresh(15)
        .with_psb_freq(15)
        .with_addr_cfg(u16::MAX);
    let flags = bits(ctl.into_bits() & !fields.into_bits(), &CTL);
    let mut text = format!("IA32_RTIT_CTL {:#x}: {flags}", ctl.into_bits());
    if ctl.mtc_en() {
        let _ = write!(text, ", MTCFreq {}", ctl.mtc_freq());
    }
    if ctl.cyc_en() {
        let _ = write!(text, ", CycThresh {}", ctl.cyc_thresh());
    }
    let _ = writeln!(text, ", a PSB every {} bytes", 2048u64 << ctl.psb_freq());
    text
}

fn state(status: RtitStatus) -> String {
    const STATUS: [(u32, &str); 7] = [
        (0, "FilterEn"),
        (1, "ContextEn"),
        (2, "TriggerEn"),
        (4, "Error"),
        (5, "Stopped"),
        (6, "PendPSB"),
        (7, "PendTopaPMI"),
    ];
    let flags = bits(status.with_packet_byte_cnt(0).into_bits(), &STATUS);
    let since = status.packet_byte_cnt();
    format!(
        "IA32_RTIT_STATUS {:#x}: {flags}, {since} bytes since the last PSB\n",
        status.into_bits()
    )
}

/// A range of physical addresses.
type Span = std::ops::Range<u64>;

/// A single range, the oldest bytes first.
fn single(base: u64, ptrs: RtitMaskPtrs, text: &mut String) -> Vec<Span> {
    let (mask, offset) = (u64::from(ptrs.mask()), u64::from(ptrs.output_offset()));
    let start = base & !mask;
    let at = start + (offset & mask);
    let _ = writeln!(text, "output to {start:#x}, {:#x} bytes, the next at {at:#x}", mask + 1);
    vec![at..start + mask + 1, start..at]
}

/// Output by a table; the regions up to the current byte, the oldest first.
fn table(scene: &mut Scene<'_, '_>, base: u64, ptrs: RtitMaskPtrs, caps: &PtCaps, text: &mut String) -> Vec<Span> {
    let current = u64::from(ptrs.mask_or_table_offset());
    let offset = u64::from(ptrs.output_offset());
    let _ = writeln!(text, "ToPA table at {base:#x}, entry {current}, offset {offset:#x}");
    let (mut before, mut after) = (Vec::new(), Vec::new());
    for n in 0.. {
        if n == MOST_ENTRIES {
            *text += "  ...\n";
            break;
        }
        let mut bytes = [0; 8];
        let at = base.saturating_add(n * 8);
        if scene.controls.run.read_physical(at, &mut bytes).is_err() {
            let _ = writeln!(text, "  {n}: {at:#x} is no RAM");
            break;
        }
        let entry = TopaEntry::from_bits(u64::from_le_bytes(bytes));
        let bad = if entry.malformed(caps) { " malformed" } else { "" };
        if entry.end() {
            let _ = writeln!(text, "  {n}: END, goes on with the table at {:#x}{bad}", entry.base());
            break;
        }
        let (start, size) = (entry.base(), u64::from(entry.size()));
        let int = if entry.int() { " INT" } else { "" };
        let stop = if entry.stop() { " STOP" } else { "" };
        let mark = if n == current { '*' } else { ' ' };
        let _ = writeln!(text, " {mark}{n}: {start:#x}, {size:#x} bytes{int}{stop}{bad}");
        let whole = start..start.saturating_add(size);
        match n.cmp(&current) {
            std::cmp::Ordering::Less => before.push(whole),
            std::cmp::Ordering::Equal => {
                let at = start.saturating_add(offset.min(size));
                after.push(at..whole.end);
                before.push(start..at);
            }
            std::cmp::Ordering::Greater => after.push(whole),
        }
        // What follows is no table.
        if !bad.is_empty() {
            break;
        }
    }
    // Regions behind the current one are older than all before it, if they have been written at all.
    let oldest = after.len().min(1);
    let (rest, later) = after.split_at(oldest);
    later.iter().chain(rest).cloned().chain(before).collect()
}

/// The last bytes of the spans; what is no RAM is left out.
fn tail(scene: &Scene<'_, '_>, spans: &[Span]) -> Vec<u8> {
    let (mut pieces, mut room) = (Vec::new(), WINDOW);
    for span in spans.iter().rev() {
        let len = (span.end - span.start).min(room);
        let mut bytes = vec![0; len as usize];
        if scene.controls.run.read_physical(span.end - len, &mut bytes).is_err() {
            break;
        }
        room -= len;
        pieces.push(bytes);
    }
    pieces.reverse();
    pieces.concat()
}

/// The last packets, with names.
fn packets(scene: &mut Scene<'_, '_>, bytes: &[u8], most: usize) -> String {
    // Old packets may be cut anywhere, and memory that was never written is PAD: what counts begins with a PSB, and with the
    // last one whose packets go on to the end.
    let mut psbs = Vec::new();
    let mut from = 0;
    while let Some(at) = find_psb(bytes, from) {
        psbs.push(at);
        from = at + 16;
    }
    let mut found: Vec<Packet> = Vec::new();
    for start in psbs.iter().rev() {
        let mut decoder = Decoder::new(bytes);
        decoder.seek(*start);
        let mut packets = Vec::new();
        let mut whole = true;
        while let Some(item) = decoder.next_packet() {
            match item {
                Ok(item) if item.packet != Packet::Pad => packets.push(item.packet),
                Ok(_) => {}
                // What stands at the very end may not be complete.
                Err(error) => whole &= error.offset + 16 >= bytes.len(),
            }
        }
        if !whole {
            break;
        }
        found = packets;
        if found.len() >= most {
            break;
        }
    }
    if found.is_empty() {
        return "no packets\n".into();
    }
    let mut text = String::new();
    for packet in &found[found.len().saturating_sub(most)..] {
        let (name, ip) = match packet {
            Packet::Tip(ip) => ("TIP", ip),
            Packet::TipPge(ip) => ("TIP.PGE", ip),
            Packet::TipPgd(ip) => ("TIP.PGD", ip),
            Packet::Fup(ip) => ("FUP", ip),
            other => {
                let _ = writeln!(text, "    {other:x?}");
                continue;
            }
        };
        let ip = ip.map_or("-".into(), |ip| scene.describe(ip));
        let _ = writeln!(text, "    {name} {ip}");
    }
    text
}
