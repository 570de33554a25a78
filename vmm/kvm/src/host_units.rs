//! Which of a host's own debug and trace units a guest can have, as perf and KVM say: plain data, and the rules about it.

use std::fs;

use serde::Serialize;
use x86::model::CpuModel;
use x86::pmu::capabilities;

use crate::tracer::PtError;

/// The format of PEBS records in IA32_PERF_CAPABILITIES.
const PEBS_FORMAT: u64 = 15 << capabilities::PEBS_FORMAT_SHIFT;

/// What decides which of the host's own units a guest can have.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Traits {
    /// What decides about the host's Intel PT.
    pub pt: Pt,
    /// What decides about the host's counters, PEBS and last-branch records.
    pub pmu: Pmu,
}

/// A module's parameter, if the module is there and has it.
pub fn parameter(module: &str, name: &str) -> Option<String> {
    let path = format!("/sys/module/{module}/parameters/{name}");
    fs::read_to_string(path).ok().map(|text| text.trim().to_string())
}

/// What decides about Intel PT.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Pt {
    /// The processor is Intel's.
    pub intel: bool,
    /// kvm_intel runs guests.
    pub kvm_intel: bool,
    /// Its `pt_mode`, where it has that parameter: 1 keeps the host's trace out of guests.
    pub pt_mode: Option<String>,
    /// Its `ept`.
    pub ept: Option<String>,
    /// perf records what a thread executes while KVM has a guest, or why not.
    pub perf: Result<(), PtError>,
}

impl Pt {
    /// Of this host. `intel`: its processor is Intel's; `tries`: whether perf records.
    pub fn here(intel: bool, tries: impl FnOnce() -> Result<(), PtError>) -> Self {
        Pt {
            intel,
            kvm_intel: fs::metadata("/sys/module/kvm_intel").is_ok(),
            pt_mode: parameter("kvm_intel", "pt_mode"),
            ept: parameter("kvm_intel", "ept"),
            perf: tries(),
        }
    }

    /// Why a guest cannot have it, if it cannot.
    pub fn lacks(&self) -> Option<String> {
        if !self.intel {
            return Some("the host's processor is not Intel's".into());
        }
        if !self.kvm_intel {
            return Some("the guest does not run under kvm_intel, whose VM entries its packets tell of".into());
        }
        if self.pt_mode.as_deref() == Some("1") {
            let why = "kvm_intel stops the host's trace at VM entries (pt_mode=1): load it with pt_mode=0";
            return Some(why.into());
        }
        if self.ept.as_deref() == Some("N") {
            return Some("kvm_intel has no EPT, and packets would tell of its shadow page tables".into());
        }
        self.perf.as_ref().err().map(ToString::to_string)
    }
}

/// What decides about counters, and about PEBS and last-branch records, which KVM gives with its counters alone.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Pmu {
    /// The processor is Intel's.
    pub intel: bool,
    /// CPUID leaf 0AH of what KVM supports.
    pub leaf: [u32; 4],
    /// IA32_PERF_CAPABILITIES of what it supports, if it has that register.
    pub capabilities: Option<u64>,
    /// CPUID.1:EAX of the processor.
    pub signature: u32,
    /// KVM has the guest's counters on the processor themselves instead of by the host's perf, and has neither PEBS nor
    /// last-branch records then.
    pub mediated: bool,
}

impl Pmu {
    /// Bits of IA32_PERF_CAPABILITIES that are about PEBS.
    const PEBS: u64 =
        capabilities::PEBS_TRAP | capabilities::PEBS_REGISTERS | PEBS_FORMAT | capabilities::PEBS_BASELINE;

    /// Architectural version.
    pub fn version(&self) -> u8 {
        self.leaf[0] as u8
    }

    /// Why a guest cannot have the counters, if it cannot.
    pub fn lacks(&self) -> Option<String> {
        match (self.intel, self.version()) {
            (false, _) => Some("KVM's counters here are another vendor's, and every model is Intel's".into()),
            (true, 0) => {
                Some("KVM has no counters here: none of the host's, nested without them, or kvm.enable_pmu=N".into())
            }
            (true, _) => None,
        }
    }

    fn capability(&self, bits: u64, what: &str) -> Option<String> {
        if let Some(why) = self.lacks() {
            return Some(why);
        }
        let there = self.capabilities.unwrap_or(0) & bits != 0;
        match (there, self.mediated) {
            (true, _) => None,
            (false, true) => Some(format!(
                "KVM's mediated counters come without {what} (kvm.enable_mediated_pmu=N)"
            )),
            (false, false) => Some(format!("KVM has no {what} on this processor (IA32_PERF_CAPABILITIES)")),
        }
    }

    /// Why a guest cannot have last-branch records, if it cannot.
    pub fn lacks_lbr(&self) -> Option<String> {
        self.capability(capabilities::LBR_FORMAT, "last-branch records")
    }

    /// Why a guest cannot have PEBS, if it cannot.
    pub fn lacks_pebs(&self) -> Option<String> {
        self.capability(PEBS_FORMAT, "PEBS")
    }

    /// Why this model cannot have last-branch records or PEBS of the host's, if it cannot: KVM takes them only of a guest whose
    /// family and model are the processor's.
    pub fn differs(&self, model: &CpuModel) -> Option<String> {
        let family_and_model = |signature: u32| signature & 0x0FFF_0FF0;
        let own = model.cpuid(1, 0)[0];
        (family_and_model(own) != family_and_model(self.signature)).then(|| {
            format!(
                "KVM has it for guests of the processor's own family and model, CPUID.1:EAX {:#x}, and {} is {own:#x}",
                self.signature, model.name
            )
        })
    }

    /// IA32_PERF_CAPABILITIES for a guest with or without these.
    pub fn guest_capabilities(&self, lbr: bool, pebs: bool) -> u64 {
        let mut bits = capabilities::FULL_WIDTH;
        if lbr {
            bits |= capabilities::LBR_FORMAT;
        }
        if pebs {
            bits |= Self::PEBS;
        }
        self.capabilities.unwrap_or(0) & bits
    }

    /// CPUID leaf 0AH of a model's as far as KVM has it. SDM Vol. 2A "CPUID—CPU Identification", "INPUT EAX = 0AH".
    pub fn narrow(&self, model: [u32; 4]) -> [u32; 4] {
        let [eax, ebx, ecx, edx] = model;
        let [own_eax, own_ebx, own_ecx, own_edx] = self.leaf;
        let field = |shift: u32, bits: u32, a: u32, b: u32| {
            let mask = (1 << bits) - 1;
            (a >> shift & mask).min(b >> shift & mask) << shift
        };
        let bytes = [0, 8, 16, 24].map(|shift| field(shift, 8, eax, own_eax));
        let count = bytes[3] >> 24;
        // An event beyond either's vector is not there; a bit says that one is not.
        let beyond = |regs: u32| !0u32.checked_shl(regs >> 24).map_or(!0, |ones| !ones);
        let missing = ebx | own_ebx | beyond(eax) | beyond(own_eax);
        let events = 1u32.checked_shl(count).map_or(!0, |bit| bit - 1);
        [
            bytes.iter().sum(),
            missing & events,
            ecx & own_ecx,
            field(0, 5, edx, own_edx) | field(5, 8, edx, own_edx) | own_edx & 1 << 15,
        ]
    }
}

#[cfg(test)]
#[path = "host_units_test.rs"]
mod tests;
