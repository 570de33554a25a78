//! The resource director.

use std::fmt::Write;

use x86::{msr::*, rdt::Event};

use super::{
    arguments::{Answer, none},
    error::MonitorError,
    scene::Scene,
};

/// `rdt`.
pub fn rdt(scene: &mut Scene<'_, '_>, arguments: &[&str]) -> Answer {
    none(arguments)?;
    let model = scene.model();
    let cpu = scene.cpu;
    let Some(caps) = scene
        .controls
        .run
        .machine()
        .rdt(cpu)
        .and_then(|package| package.caps().copied())
    else {
        return Err(MonitorError::Lacks(model.name, "resource director here"));
    };
    let association = scene.msr(IA32_PQR_ASSOC).unwrap_or(0);
    let (rmid, cos) = (association as u32, association >> 32);
    let mut text = format!("IA32_PQR_ASSOC {association:#x}: RMID {rmid}, class of service {cos}\n");
    let mut bank = |name: &str, first: u32, max_cos: u32, config: Option<u32>| {
        let cdp = config
            .and_then(|msr| scene.msr(msr))
            .map_or("", |value| match value & 1 {
                0 => ", one mask for code and data",
                _ => ", a mask each for data and code",
            });
        let _ = write!(text, "{name}{cdp}:");
        for n in 0..=max_cos {
            let Some(value) = scene.msr(first + n) else { break };
            let _ = write!(text, " {value:#x}");
        }
        text.push('\n');
    };
    if let Some(l3) = caps.l3 {
        bank(
            "L3 masks",
            IA32_L3_QOS_MASK_0,
            l3.max_cos,
            l3.cdp.then_some(IA32_L3_QOS_CFG),
        );
    }
    if let Some(l2) = caps.l2 {
        bank(
            "L2 masks",
            IA32_L2_QOS_MASK_0,
            l2.max_cos,
            l2.cdp.then_some(IA32_L2_QOS_CFG),
        );
    }
    if let Some(bandwidth) = caps.bandwidth {
        bank("bandwidth delays", IA32_MBA_THRTL_0, bandwidth.max_cos, None);
    }
    if let (Some(select), Some(counter)) = (scene.msr(IA32_QM_EVTSEL), scene.msr(IA32_QM_CTR)) {
        let what = match Event::from_id(select as u8) {
            Some(Event::Occupancy) => "L3 occupancy",
            Some(Event::TotalBandwidth) => "total bandwidth",
            Some(Event::LocalBandwidth) => "local bandwidth",
            None => "no event",
        };
        let _ = write!(
            text,
            "IA32_QM_EVTSEL {select:#x}: {what} of RMID {}\nIA32_QM_CTR {counter:#x}",
            select >> 32
        );
        // SDM Vol. 3B 18.18.5.3 "Monitoring Resource RMID and Event Selection".
        if counter >> 63 != 0 {
            text += ": error\n";
        } else if counter >> 62 != 0 {
            text += ": unavailable\n";
        } else {
            let unit = caps.l3_monitor.map_or(1, |monitor| u64::from(monitor.unit));
            let _ = writeln!(text, ": {} bytes", (counter & ((1 << 62) - 1)).saturating_mul(unit));
        }
    }
    Ok(text)
}
