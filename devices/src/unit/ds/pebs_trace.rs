//! PEBS records that go into the processor trace. SDM Vol. 3B 21.5.5.2 "PEBS Output to Intel Processor Trace", Vol. 3C 33.4.2.26
//! "Block Begin Packet (BBP)" to 33.4.2.28 "Block End Packet (BEP)".
//!
//! # Theory
//! With IA32_PEBS_ENABLE.PEBS_OUTPUT set to 1 there is no debug-store area: a record becomes a run of packets, one item for
//! each value, and the counter goes on from MSR_RELOAD_PMCx or MSR_RELOAD_FIXED_CTRx. There is no threshold either;
//! PMI_AFTER_EACH_RECORD asks for an interrupt with every record.
//!
//! # Practice
//! Groups come in the order of an adaptive record, the basic one first. Packets have room for the 30 newest last-branch records:
//! ten in each of three blocks. A counter whose records do not have the groups of MSR_PEBS_DATA_CFG sends the basic one alone.
//!
//! # Modelled, not measured
//! A record that the trace does not take (it is off, or out of its filters) is lost; the counter is loaded all the same, and an
//! interrupt comes. With PMI_AFTER_EACH_RECORD the counter's bit in IA32_PERF_GLOBAL_STATUS stays, so that the handler can tell
//! whose record it was.

use x86::ds::data_cfg;
use x86::msr::{MSR_RELOAD_FIXED_CTR0, MSR_RELOAD_PMC0};
use x86::watch::Processor;

use super::pebs::{Pebs, PebsState, Sample};
use crate::unit::pmu::{FIXED, GENERAL, PebsInputs};

/// IA32_PEBS_ENABLE.PMI_AFTER_EACH_RECORD.
pub const PMI_AFTER_EACH_RECORD: u64 = 1 << 60;
/// IA32_PEBS_ENABLE.PEBS_OUTPUT\[62:61\]: 0 the debug-store area, 1 the processor trace; 2 and 3 are reserved.
pub const OUTPUT_TRACE: u64 = 1 << 61;

/// BBP's types. SDM Vol. 3C 33.4.2.26 "Block Begin Packet (BBP)".
mod kind {
    pub const GPRS: u8 = 1;
    pub const BASIC: u8 = 4;
    pub const MEMORY: u8 = 5;
    /// The first of three.
    pub const LBRS: u8 = 8;
    pub const XMMS: u8 = 16;
}

/// Last-branch records in a block, and in all of them.
const ENTRIES: u8 = 10;
const MOST_ENTRIES: u8 = 3 * ENTRIES;

/// A record for the trace: groups of values, whose places are their identifiers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TraceRecord {
    /// BBP's type, and the values from identifier 0 on.
    pub groups: Vec<(u8, Vec<u64>)>,
}

/// The number of a reload register among [`PebsState::reload`].
pub(super) fn reload_register(msr: u32) -> Option<usize> {
    let within = |first: u32, count: usize| {
        let index = msr.checked_sub(first)? as usize;
        (index < count).then_some(index)
    };
    within(MSR_RELOAD_PMC0, GENERAL).or_else(|| within(MSR_RELOAD_FIXED_CTR0, FIXED).map(|index| GENERAL + index))
}

impl Pebs {
    /// Whether records go into the processor trace.
    pub(in crate::unit) fn traced(&self, s: &PebsState) -> bool {
        s.enable & OUTPUT_TRACE != 0
    }

    /// Whether every record asks for an interrupt.
    pub(in crate::unit) fn pmi_after_record(&self, s: &PebsState) -> bool {
        self.traced(s) && s.enable & PMI_AFTER_EACH_RECORD != 0
    }

    /// The record of an armed counter.
    pub(in crate::unit) fn trace_record(
        &self,
        s: &PebsState,
        sample: &Sample,
        cpu: &mut dyn Processor,
        inputs: &PebsInputs<'_>,
    ) -> TraceRecord {
        let ip = sample.ip.wrapping_sub(cpu.context().cs_base);
        let mut groups = vec![(kind::BASIC, vec![ip, sample.applicable, cpu.tsc()])];
        let wanted = if sample.adaptive { s.data_cfg } else { 0 };
        if wanted & data_cfg::MEMORY != 0 {
            let memory = sample.memory.unwrap_or_default();
            let values = vec![
                memory.address,
                memory.source().into(),
                memory.latencies(self.caps().is_some_and(|caps| caps.cache_latency)),
                sample.transaction,
            ];
            groups.push((kind::MEMORY, values));
        }
        if wanted & data_cfg::GPRS != 0 {
            let mut values = vec![cpu.rflags(), cpu.rip()];
            values.extend((0..16).map(|number| cpu.gpr(number)));
            groups.push((kind::GPRS, values));
        }
        if wanted & data_cfg::XMMS != 0 {
            let values = (0..16).flat_map(|number| {
                let value = cpu.xmm(number);
                [value as u64, (value >> 64) as u64]
            });
            groups.push((kind::XMMS, values.collect()));
        }
        if wanted & data_cfg::LBRS != 0 {
            let count = ((wanted >> data_cfg::LBR_ENTRIES) as u8)
                .saturating_add(1)
                .min(MOST_ENTRIES);
            for (block, first) in (0..count).step_by(ENTRIES.into()).enumerate() {
                let entries = first..count.min(first + ENTRIES);
                let values = entries.flat_map(|number| (inputs.last_branch)(number));
                groups.push((kind::LBRS + block as u8, values.collect()));
            }
        }
        TraceRecord { groups }
    }
}
