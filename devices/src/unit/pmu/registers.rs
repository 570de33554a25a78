//! The registers by number.

use x86::msr::*;
use x86::pmu::{FixedControl, capabilities, status};
use x86::watch::Processor;

use super::{COUNTERS, FIXED, GENERAL, PebsInputs, Pmu, bit, netburst};

/// What a number stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Register {
    Capabilities,
    Counter(usize),
    /// A general counter that takes all its bits.
    FullWidth(usize),
    Select(usize),
    FixedControl,
    GlobalStatus,
    GlobalControl,
    /// IA32_PERF_GLOBAL_OVF_CTRL, IA32_PERF_GLOBAL_STATUS_RESET.
    StatusReset,
    StatusSet,
    InUse,
    Offcore(usize),
    Metrics,
    Pebs(u32),
    /// The Pentium 4's.
    Netburst(netburst::Register),
}

fn accept(value: u64, writable: u64) -> Result<u64, MsrFault> {
    if value & !writable == 0 {
        Ok(value)
    } else {
        Err(MsrFault::GeneralProtection)
    }
}

impl Pmu {
    fn register(&self, msr: u32) -> Option<Register> {
        if self.caps.netburst.is_some() {
            return self.netburst_register(msr).map(Register::Netburst);
        }
        let within = |first: u32, count: u8| {
            let index = msr.checked_sub(first)?;
            (index < u32::from(count)).then_some(index as usize)
        };
        let general = self.caps.general.min(GENERAL as u8);
        if let Some(index) = within(IA32_PMC0, general) {
            return Some(Register::Counter(index));
        }
        if let Some(index) = within(IA32_PERFEVTSEL0, general) {
            return Some(Register::Select(index));
        }
        if let Some(index) = within(IA32_A_PMC0, general).filter(|_| self.caps.capable(capabilities::FULL_WIDTH)) {
            return Some(Register::FullWidth(index));
        }
        if let Some(index) = within(IA32_FIXED_CTR0, self.caps.fixed.min(FIXED as u8)) {
            return Some(Register::Counter(GENERAL + index));
        }
        if let Some(index) = within(MSR_OFFCORE_RSP_0, 2).filter(|&index| self.caps.offcore[index] != 0) {
            return Some(Register::Offcore(index));
        }
        match (msr, self.caps.version) {
            (IA32_PERF_CAPABILITIES, _) if self.capabilities.is_some() => Some(Register::Capabilities),
            (IA32_FIXED_CTR_CTRL, 2..) => Some(Register::FixedControl),
            (IA32_PERF_GLOBAL_STATUS, 2..) => Some(Register::GlobalStatus),
            (IA32_PERF_GLOBAL_CTRL, 2..) => Some(Register::GlobalControl),
            (IA32_PERF_GLOBAL_OVF_CTRL, 2..) => Some(Register::StatusReset),
            (IA32_PERF_GLOBAL_STATUS_SET, 4..) => Some(Register::StatusSet),
            (IA32_PERF_GLOBAL_INUSE, 4..) => Some(Register::InUse),
            (MSR_PERF_METRICS, _) if self.has_metrics() => Some(Register::Metrics),
            _ if self.pebs.owns(msr) => Some(Register::Pebs(msr)),
            _ => None,
        }
    }

    /// Whether a register is of this unit, on this model.
    pub fn owns(&self, msr: u32) -> bool {
        self.register(msr).is_some()
    }

    /// RDMSR.
    ///
    /// # Errors
    /// [`MsrFault::Unclaimed`]: the register is not one of this model's.
    pub fn read_msr(&mut self, msr: u32, cpu: &mut dyn Processor, inputs: &PebsInputs<'_>) -> Result<u64, MsrFault> {
        let register = self.register(msr).ok_or(MsrFault::Unclaimed)?;
        self.count_to_now(cpu, inputs);
        let s = &self.s;
        Ok(match register {
            Register::Capabilities => self.capabilities.unwrap_or(0),
            Register::Counter(counter) => s.values[counter],
            Register::FullWidth(counter) => s.values[counter],
            Register::Select(counter) => s.selects[counter],
            Register::FixedControl => s.fixed_control,
            Register::GlobalStatus => s.status,
            Register::GlobalControl => s.global_control,
            // A register of commands reads as 0.
            Register::StatusReset | Register::StatusSet => 0,
            Register::InUse => self.in_use(),
            Register::Offcore(index) => s.offcore[index],
            Register::Metrics => self.metrics(),
            Register::Pebs(msr) => self.pebs.read_msr(&s.pebs, msr)?,
            Register::Netburst(register) => self.read_netburst(register),
        })
    }

    /// WRMSR.
    ///
    /// # Errors
    /// [`MsrFault::Unclaimed`]: the register is not one of this model's. [`MsrFault::GeneralProtection`]: it is read-only, or
    /// a reserved bit is set.
    pub fn write_msr(
        &mut self,
        msr: u32,
        value: u64,
        cpu: &mut dyn Processor,
        inputs: &PebsInputs<'_>,
    ) -> Result<(), MsrFault> {
        let register = self.register(msr).ok_or(MsrFault::Unclaimed)?;
        self.count_to_now(cpu, inputs);
        match register {
            Register::Capabilities | Register::GlobalStatus | Register::InUse => {
                return Err(MsrFault::GeneralProtection);
            }
            // Bits 31:0, sign-extended; the rest of the operand is ignored. SDM Vol. 3B 21.2.6 "Full-Width Writes to
            // Performance Counter Registers".
            Register::Counter(counter @ 0..GENERAL) => {
                self.s.values[counter] = value as u32 as i32 as i64 as u64 & self.mask(counter);
            }
            Register::Counter(counter) | Register::FullWidth(counter) => {
                self.s.values[counter] = accept(value, self.mask(counter))?;
            }
            Register::Select(counter) => {
                self.s.selects[counter] = accept(value, self.select_writable(counter))?;
                self.s.edges[counter] = 0;
            }
            Register::FixedControl => self.s.fixed_control = accept(value, self.fixed_writable())?,
            Register::GlobalControl => self.s.global_control = accept(value, self.control_writable())?,
            Register::StatusReset => {
                let value = accept(value, self.status_writable())?;
                self.s.status &= !value;
                self.s.waiting &= !value;
                self.s.pebs.armed &= !value;
                self.s.queued &= self.cause_stands();
            }
            Register::StatusSet => {
                let value = accept(value, self.status_writable() & !status::CHANGED)?;
                self.s.status |= value;
            }
            Register::Offcore(index) => self.s.offcore[index] = accept(value, self.caps.offcore[index])?,
            Register::Metrics => self.s.metrics = [value, 0, 0, 0],
            Register::Pebs(msr) => self.pebs.write_msr(&mut self.s.pebs, msr, value)?,
            Register::Netburst(register) => self.write_netburst(register, value)?,
        }
        self.replan();
        Ok(())
    }

    /// All counters' bits.
    fn counter_bits(&self) -> u64 {
        let general = (1 << self.caps.general) - 1;
        let fixed = ((1 << self.caps.fixed) - 1) << status::FIXED;
        general | fixed
    }

    fn control_writable(&self) -> u64 {
        let metrics = if self.has_metrics() { status::METRICS } else { 0 };
        self.counter_bits() | metrics
    }

    /// What IA32_PERF_GLOBAL_OVF_CTRL clears. SDM Vol. 4 Table 2-2.
    fn status_writable(&self) -> u64 {
        let buffer = if self.pebs.caps().is_some() { status::BUFFER } else { 0 };
        let trace = if self.features.intel_pt() {
            status::TRACE_TOPA
        } else {
            0
        };
        let later = match self.caps.version {
            0..=2 => 0,
            3 => status::UNCORE,
            _ => status::UNCORE | status::LBR_FROZEN | status::COUNTERS_FROZEN | status::ENCLAVE,
        };
        self.control_writable() | buffer | trace | later | status::CHANGED
    }

    fn fixed_writable(&self) -> u64 {
        let adaptive = self.pebs.adaptive();
        (0..u32::from(self.caps.fixed)).fold(0, |bits, index| {
            bits | FixedControl::writable(index, self.caps.any_thread, adaptive)
        })
    }

    /// Bit 34 goes with adaptive records; IN_TX and IN_TXCP with transactions, the latter in counter 2 alone (SDM Vol. 3B 21.3.6.5
    /// "Performance Monitoring and Intel TSX").
    fn select_writable(&self, counter: usize) -> u64 {
        let adaptive = if self.pebs.adaptive() { 1 << 34 } else { 0 };
        let transactions = if !self.features.rtm() && !self.features.hle() {
            0
        } else if counter == 2 {
            3 << 32
        } else {
            1 << 32
        };
        self.caps.select & !(7 << 32) | adaptive & self.caps.select | transactions
    }

    /// IA32_PERF_GLOBAL_INUSE: counters with an event (or rings, for fixed ones), and whether any asks for interrupts. SDM
    /// Vol. 3B 21.2.4.3 "IA32_PERF_GLOBAL_INUSE MSR".
    fn in_use(&self) -> u64 {
        let used = (0..COUNTERS).filter(|&counter| {
            if counter < GENERAL {
                self.s.selects[counter] & 0xFF != 0
            } else {
                let control = FixedControl::of(self.s.fixed_control, (counter - GENERAL) as u32);
                control.os || control.usr
            }
        });
        let counters = used.fold(0, |bits, counter| bits | bit(counter));
        let interrupts = (0..COUNTERS).any(|counter| self.interrupts(counter)) || self.s.pebs.enable != 0;
        counters | u64::from(interrupts) << 63
    }
}
