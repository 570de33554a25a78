//! Another frequency of the time-stamp counter.
//!
//! # Theory
//! A guest learns the frequency from CPUID leaf 15H (crystal times EBX over EAX), rounded to MHz from leaf 16H, as a ratio to
//! the bus clock from MSR_PLATFORM_INFO, or by counting against a timer. SDM Vol. 3B 20.7.3 "Determining the Processor Base
//! Frequency". All of them have to give the same answer.
//!
//! # Practice
//! The crystal, which drives the APIC timer, stays as it is; the ratio to it changes. Systems multiply crystal and EBX in 32
//! bits of kHz (Linux's `native_calibrate_tsc`), so a frequency whose ratio needs more is refused: they would compute another.

use super::{CpuModel, ModelError, OwnedModel};
use crate::model::CpuidRow;
use crate::msr::MSR_PLATFORM_INFO;

/// The bus clock that leaf 16H names, in kHz.
const BUS_KHZ: u32 = 100_000;

impl OwnedModel {
    /// Has the time-stamp counter run at so many kHz, and says so wherever a guest may look.
    ///
    /// # Errors
    /// One line: slower than the APIC timer, faster than 10 GHz, or not to be said in leaf 15H.
    pub fn set_tsc_khz(&mut self, khz: u32) -> Result<(), ModelError> {
        let crystal = self.apic_timer_khz;
        if !(crystal..=10_000_000).contains(&khz) {
            return Err(ModelError::TscRange {
                model: self.name.clone(),
                least: crystal,
            });
        }
        let ratio = self.part_row(0x15, 0).copied().filter(|row| row.regs[1] != 0);
        if let Some(row) = ratio {
            let part = greatest_common_divisor(khz, crystal);
            let (numerator, denominator) = (khz / part, crystal / part);
            if crystal.checked_mul(numerator).is_none() {
                return Err(ModelError::TscRatio {
                    model: self.name.clone(),
                    crystal,
                    near: khz.next_multiple_of(100).min(10_000_000),
                });
            }
            // With the crystal's frequency in ECX nobody has to guess it from leaf 16H, which is rounded.
            let regs = [denominator, numerator, crystal * 1000, 0];
            self.set_cpuid(CpuidRow { regs, ..row });
        }
        if let Some(row) = self.part_row(0x16, 0).copied() {
            let [_, most, bus, edx] = row.regs;
            let base = (khz + 500) / 1000;
            self.set_cpuid(CpuidRow {
                regs: [base, most.max(base), bus, edx],
                ..row
            });
        }
        let bus = if ratio.is_some() { BUS_KHZ } else { crystal };
        for row in self.msrs.iter_mut().filter(|row| row.msr == MSR_PLATFORM_INFO) {
            // Maximum non-turbo ratio (15:8).
            let nearest = u64::from((khz + bus / 2) / bus).min(0xFF);
            row.reset = row.reset & !0xFF00 | nearest << 8;
        }
        if let Some(pmu) = &mut self.units.pmu {
            pmu.reference = ((khz + crystal / 2) / crystal).max(1);
        }
        self.tsc_khz = khz;
        Ok(())
    }

    /// Has the APIC timer run at so many kHz. Where leaf 15H has a crystal it is the one that drives that timer, so it says this one
    /// then, with the ratio of the time-stamp counter to it that is nearest of those that systems can compute with.
    ///
    /// # Errors
    /// One line: the time-stamp counter is slower, or the ratio would be off by more than 50 parts in a million.
    pub fn set_apic_timer_khz(&mut self, khz: u32) -> Result<(), ModelError> {
        let refused = |why| Err(ModelError::ApicTimer { khz, why });
        if khz > self.tsc_khz {
            return refused("the time-stamp counter is slower");
        }
        if let Some(row) = self.part_row(0x15, 0).copied().filter(|row| row.regs[1] != 0) {
            let (tsc, crystal) = (u64::from(self.tsc_khz), u64::from(khz));
            let ratios = (1..=1000u64).map(|denominator| ((tsc * denominator + crystal / 2) / crystal, denominator));
            let off = |(numerator, denominator): (u64, u64)| (crystal * numerator / denominator).abs_diff(tsc);
            let nearest = ratios
                .filter(|(numerator, _)| crystal * numerator <= u32::MAX.into())
                .min_by_key(|ratio| off(*ratio));
            let Some(ratio) = nearest.filter(|ratio| off(*ratio) * 20_000 <= tsc) else {
                return refused("no ratio to it is near enough");
            };
            let regs = [ratio.1 as u32, ratio.0 as u32, khz.saturating_mul(1000), 0];
            self.set_cpuid(CpuidRow { regs, ..row });
        }
        self.apic_timer_khz = khz;
        Ok(())
    }
}

impl CpuModel {
    /// This model with a time-stamp counter of so many kHz. The model lives as long as the program.
    ///
    /// # Errors
    /// One line that says why it cannot be.
    pub fn with_tsc_khz(&'static self, khz: u32) -> Result<&'static CpuModel, ModelError> {
        if khz == self.tsc_khz {
            return Ok(self);
        }
        let mut owned = OwnedModel::from(self);
        owned.set_tsc_khz(khz)?;
        owned.build()
    }

    /// This model with an APIC timer of so many kHz. The model lives as long as the program.
    ///
    /// # Errors
    /// One line that says why it cannot be.
    pub fn with_apic_timer_khz(&'static self, khz: u32) -> Result<&'static CpuModel, ModelError> {
        let mut owned = OwnedModel::from(self);
        owned.set_apic_timer_khz(khz)?;
        owned.build()
    }
}

fn greatest_common_divisor(a: u32, b: u32) -> u32 {
    if b == 0 { a } else { greatest_common_divisor(b, a % b) }
}
