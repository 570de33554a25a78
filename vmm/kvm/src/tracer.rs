//! A host's own Intel PT, for a guest that traces itself: what it can do, and how it is asked for.
//!
//! # Theory
//! Linux's perf traces a thread; under kvm_intel in its usual mode the trace of a vCPU's thread goes on in the guest, with
//! packets that tell the two apart. The guest's settings are the event's, since perf's bits are those of IA32_RTIT_CTL.
//!
//! # Practice
//! [`Traces`] is the interface: perf implements it on a host that has it, a recording in tests. What comes out goes to the guest's
//! unit, which takes the guest's part and puts it where the guest wants it (`devices::unit::pt`).
//!
//! # Left out
//! perf's `exclude_host` is set, but its Intel PT driver does not know it. The guest's sleeps: HLT and MWAIT leave the guest,
//! and power events are the host's.

use std::fmt::Debug;
use std::fs;
use std::io;
use std::path::Path;
use std::sync::Arc;

use devices::unit::pt::Served;
use serde::{Serialize, Serializer};
use x86::pt::{PtCaps, RtitCtl};

use crate::error::KvmError;

/// Where perf says what its Intel PT is.
pub const PMU: &str = "/sys/bus/event_source/devices/intel_pt";

/// What a tracer has handed out.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Taken {
    /// Behind these bytes some are lost.
    pub lost: bool,
}

/// Records what the thread executes that has started it, host and guest.
pub trait Tracer: Debug + Send {
    /// Appends what there is so far. Some may come only after [`Tracer::stop`].
    fn take(&mut self, into: &mut Vec<u8>) -> Taken;

    /// Records no more.
    ///
    /// # Errors
    /// The system's.
    fn stop(&mut self) -> io::Result<()>;
}

/// Where tracers come from.
pub trait Traces: Debug + Send + Sync {
    /// What they take of IA32_RTIT_CTL for a guest with these capabilities.
    fn served(&self, caps: &PtCaps) -> Served;

    /// One that records the calling thread from now on, as the control register says, in these ranges or everywhere. While it has
    /// something to be taken it may send the thread the signal that gets it out of the guest.
    ///
    /// # Errors
    /// The system's: somebody else traces the thread, or not so.
    fn start(&self, ctl: RtitCtl, filter: &[(u64, u64)]) -> io::Result<Box<dyn Tracer>>;
}

/// Bits of IA32_RTIT_CTL as perf calls them, and what of `caps` says that the processor has them.
const BITS: [(&str, u32, Option<&str>); 8] = [
    ("cyc", 1, Some("psb_cyc")),
    ("fup_on_ptw", 5, Some("ptwrite")),
    ("mtc", 9, Some("mtc")),
    ("tsc", 10, None),
    ("ptw", 12, Some("ptwrite")),
    ("branch", 13, None),
    ("event", 31, Some("event_trace")),
    ("notnt", 55, Some("tnt_disable")),
];
/// The event's bit that has BranchEn be as asked for, where TraceEn is in the register.
const PASS_THROUGH: u64 = 1;

/// Why perf's Intel PT cannot record a guest of KVM's. Each is one line.
#[derive(Clone, Debug, thiserror::Error)]
pub enum PtError {
    /// No such unit.
    #[error("perf has no intel_pt here: the processor or its hypervisor has no Intel PT for Linux")]
    Missing,
    /// An older kernel.
    #[error("perf's intel_pt is that of a kernel before 4.13")]
    Old,
    /// It stops at VM entries.
    #[error("the processor does not trace while it runs guests (IA32_VMX_MISC[14] is 0)")]
    NotInGuests,
    /// It is enabled, and no packet comes.
    #[error("perf's intel_pt records nothing")]
    Nothing,
    /// perf_event_paranoid.
    #[error(
        "perf does not let this user trace the kernel: set kernel.perf_event_paranoid to 1 or less, or give CAP_PERFMON"
    )]
    Permission,
    /// Debian's kernels have a level above Linux's own.
    #[error(
        "this kernel lets CAP_SYS_ADMIN alone use perf, and minivmm gives that away: set kernel.perf_event_paranoid to 2 or less"
    )]
    Paranoid,
    /// The two units exclude each other.
    #[error("somebody has the processor's last-branch records, which exclude its Intel PT")]
    LastBranches,
    /// perf refuses for another reason.
    #[error("perf's intel_pt: {}", machine::plain(.0))]
    Perf(Arc<io::Error>),
    /// KVM, in which it was tried, refuses.
    #[error(transparent)]
    Kvm(#[from] KvmError),
}

impl Eq for PtError {}

impl PartialEq for PtError {
    fn eq(&self, other: &Self) -> bool {
        self.to_string() == other.to_string()
    }
}

impl Serialize for PtError {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// perf's Intel PT, as it describes itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IntelPt {
    /// The event's type.
    pub kind: u32,
    served: Served,
    /// TSC ticks to ticks of the crystal clock, 0 over 0 where that is not known.
    crystal: (u64, u64),
}

impl IntelPt {
    /// Reads the description in this folder, [`PMU`] on a host.
    ///
    /// # Errors
    /// One line: what is missing.
    pub fn read(folder: &Path) -> Result<Self, PtError> {
        let text = |name: &str| {
            fs::read_to_string(folder.join(name))
                .ok()
                .map(|text| text.trim().to_string())
        };
        let cap = |name: &str| {
            let text = text(&format!("caps/{name}"))?;
            u32::from_str_radix(&text, 16).ok()
        };
        let kind = text("type").and_then(|text| text.parse().ok());
        let kind = kind.ok_or(PtError::Missing)?;
        if text("format/pt").as_deref() != Some("config:0") || text("format/noretcomp").as_deref() != Some("config:11")
        {
            return Err(PtError::Old);
        }
        let mut bits = 0u64;
        for (name, bit, needs) in BITS {
            let there = text(&format!("format/{name}")).as_deref() == Some(&format!("config:{bit}"));
            if there && needs.is_none_or(|needs| cap(needs).is_some_and(|cap| cap != 0)) {
                bits |= 1 << bit;
            }
        }
        let bitmap = |name: &str| cap(name).unwrap_or(0) as u16;
        let crystal = text("tsc_art_ratio").and_then(|text| {
            let (numerator, denominator) = text.split_once(':')?;
            Some((numerator.parse().ok()?, denominator.parse().ok()?))
        });
        Ok(IntelPt {
            kind,
            served: Served {
                bits: RtitCtl::from_bits(bits),
                mtc_frequencies: bitmap("mtc_periods"),
                cyc_thresholds: bitmap("cycle_thresholds"),
                psb_frequencies: bitmap("psb_periods"),
                ranges: cap("num_address_ranges").unwrap_or(0) as usize,
                lip: cap("payloads_lip").unwrap_or(0) != 0,
            },
            crystal: crystal.unwrap_or((0, 0)),
        })
    }

    /// What it takes for a guest with these capabilities: MTC and TMA packets count the crystal clock, whose ratio to the TSC the
    /// guest has from its own CPUID.
    pub fn served(&self, caps: &PtCaps) -> Served {
        let (numerator, denominator) = self.crystal;
        let same = numerator != 0 && numerator * u64::from(caps.crystal.1) == denominator * u64::from(caps.crystal.0);
        Served {
            bits: self.served.bits.with_mtc_en(self.served.bits.mtc_en() && same),
            ..self.served
        }
    }

    /// The event's `config` for this control register. Returns are never compressed: the host's calls would stand among the
    /// guest's.
    pub fn config(&self, ctl: RtitCtl) -> u64 {
        let fields = RtitCtl::new()
            .with_mtc_freq(if ctl.mtc_en() { ctl.mtc_freq() } else { 0 })
            .with_cyc_thresh(if ctl.cyc_en() { ctl.cyc_thresh() } else { 0 })
            .with_psb_freq(ctl.psb_freq())
            .with_dis_retc(true);
        ctl.into_bits() & self.served.bits.into_bits() | fields.into_bits() | PASS_THROUGH
    }

    /// perf's address filters for these ranges, first and last address.
    pub fn filters(ranges: &[(u64, u64)]) -> String {
        let one = |&(first, last): &(u64, u64)| {
            let size = last.wrapping_sub(first).saturating_add(1);
            format!("filter {first:#x}/{size:#x}")
        };
        ranges.iter().map(one).collect::<Vec<_>>().join(",")
    }
}

#[cfg(test)]
#[path = "tracer_test.rs"]
mod tests;
