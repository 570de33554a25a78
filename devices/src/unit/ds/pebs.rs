//! Processor-event-based sampling: when a record is written, and what is in it. SDM Vol. 3B 21.6.2.4 "Processor Event Based
//! Sampling (PEBS)" and the sections of each microarchitecture.
//!
//! # Theory: the rule
//! The manual says that an overflow arms the facility and that the next event writes a record; the parts differ in how soon
//! they notice. Here nothing is late:
//!
//! 1. A counter counts an instruction's events as it retires. The WRMSR that enables a counter retires when it has done so:
//!    it is the first instruction that counts.
//! 2. An event that takes a counter from its highest value to 0 sets the counter's bit in IA32_PERF_GLOBAL_STATUS. If
//!    IA32_PEBS_ENABLE names the counter and its event can be sampled, that arms it; else, with INT, it asks for an interrupt.
//! 3. The next event of an armed counter writes the record, once its instruction has retired: the registers are those after
//!    it, IP is the next instruction (trap style), and the eventing IP is its own. The status in the record has the
//!    counter's bit; then the bit is cleared, the counter is loaded with its reset value, and it is no longer armed.
//! 4. Counters are served in order, general ones first, and one instruction writes one record at most. A counter's record
//!    waits while a lower counter is armed, or has overflowed with an interrupt that nobody has acknowledged in
//!    IA32_PERF_GLOBAL_OVF_CTRL yet; an overflow's interrupt waits while a lower counter is armed.
//! 5. A record asks for an interrupt if it takes the index to the threshold (which sets OvfBuffer), and, with INT, for one of
//!    its counter. Two kinds of interrupt, overflow and threshold, that one instruction asks for come one after the other:
//!    the second when LVTPC, which the first has masked, is unmasked, unless nothing in IA32_PERF_GLOBAL_STATUS asks for it
//!    any more. All overflows of an instruction are one interrupt.
//! 6. PEBS comes before BTS, and the interrupt after both.
//! 7. A record for which there is no room is not written, and nothing follows from it but that the counter is no longer
//!    armed and its bit is cleared: neither a reset value nor an interrupt. A record whose buffer or management area does not translate makes the
//!    instruction's end a #PF; the counter stays armed, so that its next event tries again.
//!
//! # Practice
//! The management area is read anew for each record: it is the guest's memory, and the guest may change it. Fields that make
//! no sense (an index outside base and maximum, a buffer that wraps) mean that there is no room.
//!
//! # Modelled, not measured
//! Every load whose latency exceeds the threshold is sampled, where a part picks some of them. Latency and source come from
//! [the model of the caches](crate::unit::cache). Data address, source and latency are 0 for events that are no accesses. A
//! transaction's cycles are its steps. A record that is due in a transaction aborts it and is written then, with the registers
//! after the abort, of which the manual says that they mean nothing.
//!
//! # Left out
//! The delay of hardware ("shadowing") between an overflow and its record: with a counter at -3 an experiment saw the record at the code
//! that stops counting, and here it is at the third instruction. Records in the processor trace are
//! [`pebs_trace`](super::pebs_trace)'s.

use serde::{Deserialize, Serialize};
use x86::ds::{DsLayout, PRECISE_STORE, PebsCaps, PebsFormat, data_cfg};
use x86::msr::{IA32_PEBS_ENABLE, MSR_PEBS_DATA_CFG, MSR_PEBS_FRONTEND, MSR_PEBS_LD_LAT, MsrFault};
use x86::watch::{PageFault, Processor};

use super::pebs_trace::{OUTPUT_TRACE, PMI_AFTER_EACH_RECORD, reload_register};
use crate::unit::cache::Memory;
use crate::unit::pmu::{FIXED, GENERAL, PebsInputs};

/// The registers, and which counters are armed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PebsState {
    /// IA32_PEBS_ENABLE.
    pub enable: u64,
    /// MSR_PEBS_DATA_CFG.
    pub data_cfg: u64,
    /// MSR_PEBS_LD_LAT.
    pub load_latency: u64,
    /// MSR_PEBS_FRONTEND.
    pub frontend: u64,
    /// MSR_RELOAD_PMCx and MSR_RELOAD_FIXED_CTRx.
    pub reload: [u64; GENERAL + FIXED],
    /// Counters whose next event writes a record, as bits of IA32_PERF_GLOBAL_STATUS.
    pub armed: u64,
}

impl PebsState {
    /// The latency that a load must exceed to count for this counter; `None` where load latency is off.
    pub(in crate::unit) fn load_latency_for(&self, counter: usize, pebs: &Pebs) -> Option<u16> {
        let caps = pebs.caps()?;
        // Adaptive parts have fixed counters where LL_EN was.
        let on = pebs.adaptive() || self.enable >> (32 + counter) & 1 != 0;
        (caps.load_latency && on).then_some(self.load_latency as u16)
    }
}

/// What a record is made of beside the processor's registers.
#[derive(Clone, Copy, Debug, Default)]
pub struct Sample {
    /// Linear address of the instruction that had the event.
    pub ip: u64,
    /// IA32_PERF_GLOBAL_STATUS, the counter's own bit set.
    pub status: u64,
    /// The counter's bit.
    pub applicable: u64,
    /// The counter's records have the groups of MSR_PEBS_DATA_CFG.
    pub adaptive: bool,
    /// The access, where the event is one.
    pub memory: Option<Memory>,
    /// The TX Abort Information: cycles of the last transaction, and why it was aborted, where that is the event.
    pub transaction: u64,
}

/// What came of a record.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Outcome {
    /// It is in the buffer.
    pub written: bool,
    /// The index has reached the threshold.
    pub buffer: bool,
}

/// The facility of a model.
#[derive(Clone, Copy, Debug)]
pub struct Pebs {
    caps: Option<PebsCaps>,
    layout: DsLayout,
    /// Records can go into the processor trace: IA32_PERF_CAPABILITIES.PEBS_OUTPUT_PT_AVAIL\[16\].
    trace: bool,
}

/// Fields of the management area, by number. SDM Vol. 3B Figures 19-5 "DS Save Area" and 19-8 "IA-32e Mode DS Save Area".
mod field {
    pub const BASE: u64 = 4;
    pub const INDEX: u64 = 5;
    pub const RESET: u64 = 8;
    /// Reset fields of general counters, behind which those of the fixed ones are.
    pub const GENERAL_RESETS: u64 = 8;
}

/// What a reload register takes: 48 bits.
const RELOAD: u64 = (1 << 48) - 1;

/// The most bytes of a record: all groups, 256 last-branch records.
const LONGEST: usize = 0x20 + 0x20 + 0x90 + 0x100 + 24 * 256;

impl Pebs {
    /// With these capabilities.
    pub fn new(caps: Option<PebsCaps>, layout: DsLayout, trace: bool) -> Self {
        Self { caps, layout, trace }
    }

    /// What the model samples; `None` if nothing.
    pub fn caps(&self) -> Option<&PebsCaps> {
        self.caps.as_ref()
    }

    /// Records have groups.
    pub fn adaptive(&self) -> bool {
        self.caps.is_some_and(|caps| caps.data_cfg != 0)
    }

    /// Whether the register is one of the facility's.
    pub fn owns(&self, msr: u32) -> bool {
        self.writable(msr).is_some()
    }

    fn writable(&self, msr: u32) -> Option<u64> {
        let caps = self.caps?;
        let bits = match msr {
            IA32_PEBS_ENABLE if self.trace => caps.enable | OUTPUT_TRACE | PMI_AFTER_EACH_RECORD,
            IA32_PEBS_ENABLE => caps.enable,
            MSR_PEBS_DATA_CFG => caps.data_cfg,
            MSR_PEBS_LD_LAT if caps.load_latency => 0xFFFF,
            MSR_PEBS_FRONTEND => caps.frontend,
            _ if self.trace => match reload_register(msr) {
                // A counter that samples has one.
                Some(counter @ 0..GENERAL) if caps.enable >> counter & 1 != 0 => RELOAD,
                Some(counter @ GENERAL..) if caps.enable >> (32 + counter - GENERAL) & 1 != 0 => RELOAD,
                _ => 0,
            },
            _ => 0,
        };
        (bits != 0).then_some(bits)
    }

    /// RDMSR.
    ///
    /// # Errors
    /// [`MsrFault::Unclaimed`]: the register is not one of this model's.
    pub fn read_msr(&self, s: &PebsState, msr: u32) -> Result<u64, MsrFault> {
        self.writable(msr).ok_or(MsrFault::Unclaimed)?;
        Ok(match msr {
            IA32_PEBS_ENABLE => s.enable,
            MSR_PEBS_DATA_CFG => s.data_cfg,
            MSR_PEBS_LD_LAT => s.load_latency,
            MSR_PEBS_FRONTEND => s.frontend,
            _ => reload_register(msr).map_or(0, |counter| s.reload[counter]),
        })
    }

    /// WRMSR. A counter that is no longer enabled is no longer armed.
    ///
    /// # Errors
    /// [`MsrFault::Unclaimed`]: the register is not one of this model's. [`MsrFault::GeneralProtection`]: a reserved bit.
    pub fn write_msr(&self, s: &mut PebsState, msr: u32, value: u64) -> Result<(), MsrFault> {
        let writable = self.writable(msr).ok_or(MsrFault::Unclaimed)?;
        if value & !writable != 0 {
            return Err(MsrFault::GeneralProtection);
        }
        match msr {
            IA32_PEBS_ENABLE => {
                s.enable = value;
                s.armed &= value;
            }
            MSR_PEBS_DATA_CFG => s.data_cfg = value,
            MSR_PEBS_LD_LAT => s.load_latency = value,
            MSR_PEBS_FRONTEND => s.frontend = value,
            _ => {
                if let Some(counter) = reload_register(msr) {
                    s.reload[counter] = value;
                }
            }
        }
        Ok(())
    }

    /// Whether a store can be sampled precisely: Sandy Bridge has a bit for it.
    pub(in crate::unit) fn precise_store(&self, s: &PebsState) -> bool {
        self.caps
            .is_some_and(|caps| caps.enable & PRECISE_STORE == 0 || s.enable & PRECISE_STORE != 0)
    }

    /// Writes a record for an armed counter. The second value is what the counter goes on from.
    ///
    /// # Errors
    /// The fault of a page of the area or the buffer; nothing has been written then, except perhaps the record, but not the
    /// index.
    pub(in crate::unit) fn record(
        &self,
        s: &PebsState,
        counter: usize,
        sample: &Sample,
        cpu: &mut dyn Processor,
        inputs: &PebsInputs<'_>,
    ) -> Result<(Outcome, Option<u64>), PageFault> {
        let Some(caps) = self.caps else {
            return Ok((Outcome::default(), None));
        };
        let width = self.layout.field();
        let at = |number: u64| inputs.ds_area.wrapping_add(number * width);

        let mut fields = [0; 32];
        let fields = &mut fields[..4 * width as usize];
        cpu.read_linear(at(field::BASE), fields)?;
        let value = |number: usize| {
            let mut bytes = [0; 8];
            bytes[..width as usize].copy_from_slice(&fields[number * width as usize..][..width as usize]);
            u64::from_le_bytes(bytes)
        };
        let [base, index, maximum, threshold] = [value(0), value(1), value(2), value(3)];

        let mut reset = [0; 8];
        let number = if counter < GENERAL {
            counter as u64
        } else {
            field::GENERAL_RESETS + (counter - GENERAL) as u64
        };
        // Reset fields are quadwords in both layouts.
        let reload = if number < u64::from(caps.resets) {
            cpu.read_linear(at(field::RESET).wrapping_add(number * 8), &mut reset)?;
            Some(u64::from_le_bytes(reset))
        } else {
            None
        };

        let mut bytes = [0; LONGEST];
        let len = self.compose(caps.format, s, sample, cpu, inputs, &mut bytes);
        let end = index.checked_add(len as u64);
        let Some(end) = end.filter(|&end| base <= index && end <= maximum) else {
            return Ok((Outcome::default(), None));
        };
        // The index is there to be written, too, before anything is.
        cpu.probe_linear(at(field::INDEX), width)?;
        cpu.write_linear(index, &bytes[..len])?;
        cpu.write_linear(at(field::INDEX), &end.to_le_bytes()[..width as usize])?;
        let buffer = end >= threshold;
        Ok((Outcome { written: true, buffer }, reload))
    }

    /// The bytes of a record, and how many there are.
    fn compose(
        &self,
        format: PebsFormat,
        s: &PebsState,
        sample: &Sample,
        cpu: &mut dyn Processor,
        inputs: &PebsInputs<'_>,
        bytes: &mut [u8; LONGEST],
    ) -> usize {
        let mut out = Out { bytes, len: 0 };
        let ip = sample.ip.wrapping_sub(cpu.context().cs_base);
        if format == PebsFormat::Adaptive {
            let groups = if sample.adaptive { s.data_cfg } else { 0 };
            self.compose_adaptive(groups, ip, sample, cpu, inputs, &mut out);
            return out.len;
        }
        // RAX, RBX, RCX, RDX, RSI, RDI, RBP, RSP, R8 to R15.
        const ORDER: [u8; 16] = [0, 3, 1, 2, 6, 7, 5, 4, 8, 9, 10, 11, 12, 13, 14, 15];
        if self.layout == DsLayout::Bits32 {
            // 40 bytes: SDM Vol. 3B Figure 19-7 "PEBS Record". The instruction pointer is a linear address.
            for word in [cpu.rflags(), cpu.context().cs_base.wrapping_add(cpu.rip())] {
                out.put(&(word as u32).to_le_bytes());
            }
            for number in &ORDER[..8] {
                out.put(&(cpu.gpr(*number) as u32).to_le_bytes());
            }
            return out.len;
        }
        out.words(&[cpu.rflags(), cpu.rip()]);
        for number in ORDER {
            out.words(&[cpu.gpr(number)]);
        }
        if format >= PebsFormat::Nehalem {
            let memory = sample.memory.unwrap_or_default();
            out.words(&[
                sample.status,
                memory.address,
                memory.source().into(),
                memory.latency.into(),
            ]);
        }
        if format >= PebsFormat::Haswell {
            out.words(&[ip, sample.transaction]);
        }
        if format >= PebsFormat::Skylake {
            out.words(&[cpu.tsc()]);
        }
        out.len
    }

    /// SDM Vol. 3B 21.9.2.2 "Adaptive PEBS Record Format".
    fn compose_adaptive(
        &self,
        groups: u64,
        ip: u64,
        sample: &Sample,
        cpu: &mut dyn Processor,
        inputs: &PebsInputs<'_>,
        out: &mut Out<'_>,
    ) {
        let size = data_cfg::size(groups);
        out.words(&[groups & 0xFFFF_FFFF_FFFF | size << 48, ip, sample.applicable, cpu.tsc()]);
        if groups & data_cfg::MEMORY != 0 {
            let memory = sample.memory.unwrap_or_default();
            out.words(&[
                memory.address,
                memory.source().into(),
                memory.latencies(self.caps().is_some_and(|caps| caps.cache_latency)),
                sample.transaction,
            ]);
        }
        if groups & data_cfg::GPRS != 0 {
            out.words(&[cpu.rflags(), cpu.rip()]);
            for number in 0..16 {
                out.words(&[cpu.gpr(number)]);
            }
        }
        if groups & data_cfg::XMMS != 0 {
            for number in 0..16 {
                out.put(&cpu.xmm(number).to_le_bytes());
            }
        }
        if groups & data_cfg::LBRS != 0 {
            for number in 0..=(groups >> data_cfg::LBR_ENTRIES) as u8 {
                out.words(&(inputs.last_branch)(number));
            }
        }
    }
}

struct Out<'a> {
    bytes: &'a mut [u8; LONGEST],
    len: usize,
}

impl Out<'_> {
    fn put(&mut self, bytes: &[u8]) {
        self.bytes[self.len..][..bytes.len()].copy_from_slice(bytes);
        self.len += bytes.len();
    }

    fn words(&mut self, words: &[u64]) {
        for word in words {
            self.put(&word.to_le_bytes());
        }
    }
}
