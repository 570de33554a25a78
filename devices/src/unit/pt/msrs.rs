//! The registers: RDMSR, WRMSR, XSAVES and XRSTORS, resets. SDM Vol. 3C 33.2.8 "Configuration MSRs".

use pt_packet::Packet;
use x86::msr::*;
use x86::pt::{RtitCtl, RtitMaskPtrs};
use x86::watch::{Effects, Processor};

use super::output::Output;
use super::{Inner, Pt, next_ip};

/// WRMSR's length in bytes, without prefixes, which it has no use for.
const WRMSR: u64 = 2;

/// Bytes of the XSAVE component: nine registers. SDM Vol. 1 13.5.6 "PT State".
const COMPONENT: usize = 72;

impl<O: Output> Pt<O> {
    /// RDMSR.
    ///
    /// # Errors
    /// [`MsrFault::Unclaimed`] for a register of another unit, #GP(0) for one that the model does not have.
    pub fn read_msr(&self, msr: u32) -> Result<u64, MsrFault> {
        self.exists(msr)?;
        let s = &self.s;
        Ok(match msr {
            IA32_RTIT_CTL => s.ctl.into_bits(),
            IA32_RTIT_STATUS => {
                let count = if self.caps.psb_cyc() {
                    s.stream.since_psb.min(0x1_FFFF)
                } else {
                    0
                };
                s.status.with_packet_byte_cnt(count).into_bits()
            }
            IA32_RTIT_OUTPUT_BASE => self.output.registers().0,
            IA32_RTIT_OUTPUT_MASK_PTRS => self.output.registers().1.into_bits(),
            IA32_RTIT_CR3_MATCH => s.cr3_match,
            // `exists` lets nothing else through.
            _ => s.addresses[(msr - IA32_RTIT_ADDR0_A) as usize & 7],
        })
    }

    fn exists(&self, msr: u32) -> Result<(), MsrFault> {
        let there = match msr {
            IA32_RTIT_CTL | IA32_RTIT_STATUS => true,
            IA32_RTIT_OUTPUT_BASE | IA32_RTIT_OUTPUT_MASK_PTRS => self.caps.topa() || self.caps.single_range(),
            IA32_RTIT_CR3_MATCH => self.caps.cr3_filter(),
            IA32_RTIT_ADDR0_A..=IA32_RTIT_ADDR3_B => ((msr - IA32_RTIT_ADDR0_A) / 2) < self.caps.ranges() as u32,
            _ => return Err(MsrFault::Unclaimed),
        };
        if there {
            Ok(())
        } else {
            Err(MsrFault::GeneralProtection)
        }
    }

    /// WRMSR. The processor's RIP is that of the next instruction.
    ///
    /// # Errors
    /// [`MsrFault::Unclaimed`] for a register of another unit; #GP(0) for one that the model does not have, a reserved bit or
    /// encoding, and any change while TraceEn is set but to clear it.
    pub fn write_msr(&mut self, msr: u32, value: u64, cpu: &mut dyn Processor) -> Result<Effects, MsrFault> {
        self.exists(msr)?;
        if msr == IA32_RTIT_CTL {
            let next = RtitCtl::accept(value, &self.caps)?;
            return self.write_ctl(next, WRMSR, cpu);
        }
        if self.s.ctl.trace_en() {
            return Err(MsrFault::GeneralProtection);
        }
        self.write_quiet(msr, value)?;
        Ok(Effects::NONE)
    }

    /// Any register but the control register, while TraceEn is clear.
    fn write_quiet(&mut self, msr: u32, value: u64) -> Result<(), MsrFault> {
        let refuse = |bad: bool| if bad { Err(MsrFault::GeneralProtection) } else { Ok(()) };
        match msr {
            IA32_RTIT_STATUS => {
                let status = self.s.status.accept(value, &self.caps)?;
                self.s.stream.since_psb = status.packet_byte_cnt();
                self.s.status = status.with_packet_byte_cnt(0);
            }
            IA32_RTIT_OUTPUT_BASE => {
                refuse(value & (0x7F | self.caps.beyond_physical()) != 0)?;
                let (_, ptrs) = self.output.registers();
                self.output.set_registers(value, ptrs);
            }
            IA32_RTIT_OUTPUT_MASK_PTRS => {
                let (base, _) = self.output.registers();
                let ptrs = RtitMaskPtrs::from_bits(value | RtitMaskPtrs::RESET.into_bits());
                self.output.set_registers(base, ptrs);
            }
            IA32_RTIT_CR3_MATCH => {
                refuse(value & 0x1F != 0)?;
                self.s.cr3_match = value;
            }
            _ => {
                refuse(!self.caps.canonical(value))?;
                self.s.addresses[(msr - IA32_RTIT_ADDR0_A) as usize & 7] = value;
            }
        }
        Ok(())
    }

    /// A new control register, set by an instruction of `length` bytes that has just retired.
    pub(super) fn write_ctl(
        &mut self,
        next: RtitCtl,
        length: u64,
        cpu: &mut dyn Processor,
    ) -> Result<Effects, MsrFault> {
        let mut effects = Effects::NONE;
        if self.s.ctl.trace_en() {
            if next == self.s.ctl {
                return Ok(effects);
            }
            if next.trace_en() {
                return Err(MsrFault::GeneralProtection);
            }
            effects = self.disable(length, cpu);
        }
        self.s.ctl = next;
        if next.trace_en() {
            effects = effects.and(self.enable(cpu));
        }
        Ok(effects)
    }

    /// TraceEn falls. SDM Vol. 3C Table "Packet Generation under Different Enable Conditions", 3a and 3b.
    pub(super) fn disable(&mut self, length: u64, cpu: &mut dyn Processor) -> Effects {
        let step = cpu.step();
        if self.s.status.trigger_en() {
            self.time(step);
            self.s.stream.flush_tnt(&mut self.out, step);
            if self.s.packet_en {
                let at = next_ip(cpu, &self.s.context).wrapping_sub(length);
                let ip = self.code.ip(at);
                self.send(Packet::Fup(Some(ip)), step);
                self.send(Packet::TipPgd(None), step);
            }
            if self.s.stream.psb_due() && self.s.ctl.inject_psb_pmi_on_enable() {
                self.s.status.set_pend_psb(true);
            }
        }
        let effects = self.put(cpu);
        self.s.ctl.set_trace_en(false);
        self.s.sleep = None;
        self.s.restarts = false;
        self.end();
        effects
    }

    /// TraceEn rises: the same table, 2a to 2e.
    pub(super) fn enable(&mut self, cpu: &mut dyn Processor) -> Effects {
        let (step, tsc) = (cpu.step(), cpu.tsc());
        let context = cpu.context();
        let s = &mut self.s;
        s.stream.start(s.ctl, &self.caps, step, tsc);
        s.mode = None;
        s.packet_en = false;
        s.lost = false;
        s.ip = next_ip(cpu, &context);
        self.set_context(context);
        if self.s.status.error() || self.s.status.stopped() {
            return Effects::NONE;
        }
        self.s.status.set_trigger_en(true);
        let (topa, fabric) = (self.s.ctl.topa(), self.s.ctl.fabric_en());
        let outcome = self.output.start(topa, fabric, &self.caps, cpu);
        let mut effects = self.note_output(outcome);
        if !self.s.status.trigger_en() {
            return effects;
        }
        let inject = self.s.ctl.inject_psb_pmi_on_enable();
        if inject && self.s.status.pend_topa_pmi() {
            self.s.topa_pmi = true;
            effects.pmi = true;
        }
        self.set_ranges();
        if self.ranges.filters().is_empty() {
            // SDM Vol. 3C 33.2.6.5 "Filter Enable (FilterEn)": at all times.
            self.s.status.set_filter_en(true);
        }
        let context_en = self.context_en();
        self.s.status.set_context_en(context_en);
        let fresh = !self.caps.psb_cyc() || self.s.stream.since_psb == 0;
        if fresh || inject && self.s.status.pend_psb() {
            self.send_psb(step);
        } else {
            self.s.stream.time(&mut self.out, step);
        }
        if context_en {
            let at = self.s.ip;
            self.arrive(at, step);
        }
        effects.and(self.finish(step, cpu))
    }

    /// XSAVES of component 8. Clears TraceEn after it has saved the control register and before the rest.
    /// SDM Vol. 1 13.5.6 "PT State". Whether the component is in its initial state: then nothing was written.
    ///
    /// `length` is the instruction's, which has retired.
    pub fn save_component(&mut self, area: &mut [u8], length: u64, cpu: &mut dyn Processor) -> (bool, Effects) {
        let ctl = self.s.ctl.into_bits();
        let mut effects = Effects::NONE;
        if self.s.ctl.trace_en() {
            effects = self.disable(length, cpu);
        }
        let (base, ptrs) = self.output.registers();
        let status = self.read_msr(IA32_RTIT_STATUS).unwrap_or(0);
        let s = &self.s;
        let registers = [ctl, base, ptrs.into_bits(), status, s.cr3_match];
        let registers = registers.into_iter().chain(s.addresses[..4].iter().copied());
        let initial = registers
            .clone()
            .eq([0, 0, RtitMaskPtrs::RESET.into_bits(), 0, 0, 0, 0, 0, 0]);
        if !initial {
            for (slot, value) in area.chunks_exact_mut(8).zip(registers) {
                slot.copy_from_slice(&value.to_le_bytes());
            }
        }
        (initial, effects)
    }

    /// XRSTORS of component 8 from its image, or to its initial state with `None`. The control register comes last.
    ///
    /// # Errors
    /// #GP(0) while TraceEn is set, and for an image that WRMSR would refuse; nothing is changed then.
    pub fn restore_component(
        &mut self,
        area: Option<&[u8]>,
        length: u64,
        cpu: &mut dyn Processor,
    ) -> Result<Effects, MsrFault> {
        let mut image = [0; COMPONENT];
        match area {
            Some(area) => {
                let len = area.len().min(COMPONENT);
                image[..len].copy_from_slice(&area[..len]);
            }
            None => image[16..24].copy_from_slice(&RtitMaskPtrs::RESET.into_bits().to_le_bytes()),
        }
        let mut words = image
            .chunks_exact(8)
            .map(|word| word.try_into().map_or(0, u64::from_le_bytes));
        let ctl = RtitCtl::accept(words.next().unwrap_or(0), &self.caps)?;
        let before = (self.s.clone(), self.output.state());
        if self.s.ctl.trace_en() {
            return Err(MsrFault::GeneralProtection);
        }
        let rest = [
            IA32_RTIT_OUTPUT_BASE,
            IA32_RTIT_OUTPUT_MASK_PTRS,
            IA32_RTIT_STATUS,
            IA32_RTIT_CR3_MATCH,
            IA32_RTIT_ADDR0_A,
            IA32_RTIT_ADDR0_A + 1,
            IA32_RTIT_ADDR0_A + 2,
            IA32_RTIT_ADDR0_A + 3,
        ];
        for (msr, value) in rest.into_iter().zip(words) {
            // What the model lacks is a reserved part of the image.
            let done = match self.exists(msr) {
                Err(_) if value == 0 => Ok(()),
                Err(fault) => Err(fault),
                Ok(()) => self.write_quiet(msr, value),
            };
            if let Err(fault) = done {
                self.s = before.0;
                self.output.set_state(before.1);
                return Err(fault);
            }
        }
        self.write_ctl(ctl, length, cpu)
    }

    /// Power-up reset: all registers are cleared.
    pub fn reset(&mut self) {
        self.s = Inner::new(&self.caps);
        self.output.set_registers(0, RtitMaskPtrs::RESET);
        self.out.clear();
        self.set_ranges();
    }

    /// A warm reset: TraceEn alone is cleared where CPUID says that the configuration outlives it, else everything. Packets that
    /// wait are lost. SDM Vol. 3C 33.2.8.1 "General Considerations".
    pub fn warm_reset(&mut self) {
        if !self.caps.ip_filter() {
            self.reset();
            return;
        }
        let (base, ptrs) = self.output.registers();
        self.output.set_registers(base, ptrs);
        self.out.clear();
        self.s.ctl.set_trace_en(false);
        self.s.sleep = None;
        self.s.restarts = false;
        self.end();
    }
}
