//! IA32_DEBUGCTL (1D9H): the switch of the units that watch branches. SDM Vol. 3B 18.4.1 "IA32_DEBUGCTL MSR".
//!
//! # Theory
//! One register says which of the branch facilities run: the last-branch stack (LBR), branch trace messages (TR) and their
//! storing in memory (BTS, BTINT, the two ring filters), single-stepping by branches (BTF), and what a
//! performance-monitoring interrupt stops. The processor writes it as well:
//!
//! - A debug exception clears LBR and BTF before its handler runs, so that the handler's own branches do not push out the
//!   ones it wants to read and the handler is not stepped. It does not clear TR. SDM Vol. 3B 18.4.2 "Monitoring Branches,
//!   Exceptions, and Interrupts", 18.4.3 "Single-Stepping on Branches".
//! - A PMI with FREEZE_LBRS_ON_PMI clears LBR on parts with the legacy freeze; on parts with the streamlined one it sets a
//!   status bit instead, and this register stays as it is. SDM Vol. 3B 18.4.7 "Freezing LBR and Performance Counters on
//!   PMI".
//! - An SMI with FREEZE_WHILE_SMM clears LBR, BTF, TR and BTS, and RSM brings them back. SDM Vol. 3B 18.4.1.
//!
//! # Practice
//! [`DebugCtlUnit`] holds the register as software wrote it and hands out what it means ([`DebugCtlUnit::control`]) in one
//! layout for all models. Which bits exist is a row of the model, less what belongs to a feature that is not shown.
//!
//! # Left out
//! The uncore raises no PMIs; ENABLE_UNCORE_PMI is storage. The pins of P6's PB0 to PB3 lead nowhere.

use serde::{Deserialize, Serialize};
use x86::cpuid::Features;
use x86::debugctl::{DebugCtl, DebugCtlCaps, Freeze};
use x86::msr::{IA32_DEBUGCTL, MsrFault};
use x86::watch::{Change, EventRecord};

/// The register.
#[derive(Clone, Debug)]
pub struct DebugCtlUnit {
    caps: DebugCtlCaps,
    writable: u64,
    state: DebugCtlState,
}

/// What the register holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DebugCtlState {
    /// The value as software reads it, in the model's own layout.
    pub value: u64,
    /// In system-management mode: the value that RSM brings back, with FREEZE_WHILE_SMM.
    pub frozen: Option<u64>,
}

/// What a PMI stops elsewhere.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Frozen {
    /// IA32_PERF_GLOBAL_STATUS.LBR_FRZ is to be set.
    pub lbr_status: bool,
    /// IA32_PERF_GLOBAL_STATUS.CTR_FRZ is to be set.
    pub counters_status: bool,
    /// IA32_PERF_GLOBAL_CTRL is to be cleared.
    pub counters_control: bool,
}

impl DebugCtlUnit {
    /// The register of a model with these capabilities, when these features are shown.
    pub fn new(caps: DebugCtlCaps, features: Features) -> Self {
        Self {
            caps,
            writable: caps.writable_with(features),
            state: DebugCtlState::default(),
        }
    }

    /// RDMSR.
    ///
    /// # Errors
    /// [`MsrFault::Unclaimed`] for any other register.
    pub fn read_msr(&self, msr: u32) -> Result<u64, MsrFault> {
        match msr {
            IA32_DEBUGCTL => Ok(self.state.value),
            _ => Err(MsrFault::Unclaimed),
        }
    }

    /// WRMSR.
    ///
    /// # Errors
    /// [`MsrFault::GeneralProtection`] for a reserved bit, [`MsrFault::Unclaimed`] for any other register.
    pub fn write_msr(&mut self, msr: u32, value: u64) -> Result<(), MsrFault> {
        if msr != IA32_DEBUGCTL {
            return Err(MsrFault::Unclaimed);
        }
        if value & !(self.writable | self.caps.ignored) != 0 {
            return Err(MsrFault::GeneralProtection);
        }
        self.state.value = value & self.writable;
        Ok(())
    }

    /// What the register says, in the layout of IA32_DEBUGCTL.
    pub fn control(&self) -> DebugCtl {
        self.caps.layout.decode(self.state.value)
    }

    /// Whether the last-branch stack of a part without a control of its own records: LBR, or TR where the part takes its
    /// branch trace messages from the stack.
    pub fn records_branches(&self) -> bool {
        let control = self.control();
        control.lbr() || self.caps.tr_records && control.tr()
    }

    /// Counters and branch facilities stand still in system-management mode.
    pub fn freezes_in_smm(&self) -> bool {
        self.control().freeze_while_smm()
    }

    /// A PMI is about to be requested: stops what the register says, and says what the counters' unit must stop.
    pub fn freeze_on_pmi(&mut self) -> Frozen {
        let control = self.control();
        match self.caps.freeze {
            Freeze::Absent => Frozen::default(),
            Freeze::Legacy => {
                if control.freeze_lbrs_on_pmi() {
                    self.clear(DebugCtl::new().with_lbr(true));
                }
                Frozen {
                    counters_control: control.freeze_perfmon_on_pmi(),
                    ..Frozen::default()
                }
            }
            Freeze::Streamlined => Frozen {
                lbr_status: control.freeze_lbrs_on_pmi(),
                counters_status: control.freeze_perfmon_on_pmi(),
                counters_control: false,
            },
        }
    }

    /// `Watch` callback: a debug exception clears LBR and BTF. To be reported before the units that record.
    pub fn event(&mut self, event: &EventRecord) {
        if event.debug {
            self.clear(DebugCtl::new().with_lbr(true).with_btf(true));
        }
    }

    /// A `Watch` callback. Power-up clears the register; INIT leaves it. SDM Vol. 3A Table 10-1 "IA-32 and Intel 64
    /// Processor States Following Power-up, Reset, or INIT" ("all other MSRs").
    pub fn state_changed(&mut self, change: Change) {
        match change {
            Change::Reset => self.state = DebugCtlState::default(),
            Change::Smi { .. } => {
                self.state.frozen = self.freezes_in_smm().then_some(self.state.value);
                if self.state.frozen.is_some() {
                    let stopped = DebugCtl::new()
                        .with_lbr(true)
                        .with_btf(true)
                        .with_tr(true)
                        .with_bts(true);
                    self.clear(stopped);
                }
            }
            Change::Rsm => self.state.value = self.state.frozen.take().unwrap_or(self.state.value),
            _ => {}
        }
    }

    /// The whole state.
    pub fn state(&self) -> DebugCtlState {
        self.state
    }

    /// Takes a whole state back; bits that this model does not have are dropped.
    pub fn set_state(&mut self, state: DebugCtlState) {
        self.state.value = state.value & self.writable;
        self.state.frozen = state.frozen.map(|value| value & self.writable);
    }

    /// Clears bits that stand at the same place in all layouts, LBR and BTF, or in that of IA32_DEBUGCTL, which alone has FREEZE_WHILE_SMM.
    fn clear(&mut self, bits: DebugCtl) {
        self.state.value &= !bits.into_bits();
    }
}

#[cfg(test)]
#[path = "debugctl_test.rs"]
mod tests;
