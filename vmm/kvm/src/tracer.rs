//! A host's own Intel PT, for a guest that traces itself: what it can do, and how it is asked for.
//!
//! # Theory
//! Linux's perf traces a thread; under kvm_intel in its usual mode the trace of a vCPU's thread goes on in the guest, with
//! packets that tell the two apart. The guest's settings are the event's, since perf's bits are those of IA32_RTIT_CTL.
//!
//! # Practice
//! [`Traces`] is the seam: perf is behind it on a host that has it, a recording in tests. What comes out goes to the guest's
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
mod tests {
    use super::*;
    use x86::model::{CpuModel, SAPPHIRERAPIDS, SKYLAKE_SERVER};

    /// A folder such as a Sapphire Rapids has, with changes.
    fn folder(changes: &[(&str, &str)]) -> std::path::PathBuf {
        use std::sync::atomic::{AtomicU32, Ordering};
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let folder = std::env::temp_dir().join(format!("minivmm-intel-pt-{}-{number}", std::process::id()));
        let files = [
            ("type", "10"),
            ("tsc_art_ratio", "168:2"),
            ("format/pt", "config:0"),
            ("format/cyc", "config:1"),
            ("format/pwr_evt", "config:4"),
            ("format/fup_on_ptw", "config:5"),
            ("format/mtc", "config:9"),
            ("format/tsc", "config:10"),
            ("format/noretcomp", "config:11"),
            ("format/ptw", "config:12"),
            ("format/branch", "config:13"),
            ("format/mtc_period", "config:14-17"),
            ("caps/psb_cyc", "1"),
            ("caps/mtc", "1"),
            ("caps/ptwrite", "1"),
            ("caps/mtc_periods", "249"),
            ("caps/cycle_thresholds", "1fff"),
            ("caps/psb_periods", "3f"),
            ("caps/num_address_ranges", "2"),
            ("caps/payloads_lip", "0"),
        ];
        for (name, text) in files.iter().chain(changes) {
            let path = folder.join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, format!("{text}\n")).unwrap();
        }
        folder
    }

    fn read(changes: &[(&str, &str)]) -> Result<IntelPt, PtError> {
        let folder = folder(changes);
        let read = IntelPt::read(&folder);
        fs::remove_dir_all(folder).unwrap();
        read
    }

    fn caps(model: &CpuModel, crystal: (u32, u32)) -> PtCaps {
        PtCaps {
            crystal,
            ..model.units.pt.unwrap()
        }
    }

    fn both_rings() -> RtitCtl {
        RtitCtl::new().with_os(true).with_user(true).with_branch_en(true)
    }

    // covers: host-units/pt-perf
    #[test]
    fn what_perf_says_of_itself_decides_what_it_is_asked_for() {
        let pt = read(&[]).unwrap();
        assert_eq!(pt.kind, 10);
        let caps = caps(&SAPPHIRERAPIDS, (84, 1));
        let served = pt.served(&caps);
        let linux = both_rings()
            .with_topa(true)
            .with_tsc_en(true)
            .with_mtc_en(true)
            .with_mtc_freq(3)
            .with_psb_freq(3);
        assert!(served.takes(linux, &caps));
        assert!(!served.takes(linux.with_mtc_freq(4), &caps), "1001001001B has no bit 4");
        assert!(!served.takes(linux.with_event_en(true), &caps), "no such file");
        assert!(!served.takes(linux.with_pwr_evt_en(true), &caps), "the host's sleeps");
        // Bit 0, branches, no compression of returns, TSC, MTC with its period, PSB with its own.
        assert_eq!(
            pt.config(linux),
            1 | 1 << 13 | 1 << 11 | 1 << 10 | 1 << 9 | 3 << 14 | 3 << 24
        );
        assert_eq!(pt.config(both_rings().with_mtc_freq(3)), 1 | 1 << 13 | 1 << 11);

        let other = self::caps(&SAPPHIRERAPIDS, (80, 1));
        assert!(!pt.served(&other).takes(linux, &other), "another crystal clock");
        assert!(pt.served(&other).takes(linux.with_mtc_en(false), &other));
        let unknown = read(&[("tsc_art_ratio", "0:0")]).unwrap();
        assert!(!unknown.served(&caps).takes(linux, &caps));
        let no_ptw = read(&[("caps/ptwrite", "0")]).unwrap();
        assert!(!no_ptw.served(&caps).takes(both_rings().with_ptw_en(true), &caps));
        let linear = read(&[("caps/payloads_lip", "1")]).unwrap();
        let skylake = self::caps(&SKYLAKE_SERVER, (84, 1));
        assert!(!linear.served(&skylake).takes(both_rings(), &skylake));
        let moved = read(&[("format/tsc", "config:9")]).unwrap();
        assert!(!moved.served(&caps).takes(both_rings().with_tsc_en(true), &caps));
    }

    // covers: host-units/pt-perf
    #[test]
    fn a_perf_without_it_is_told() {
        let error = IntelPt::read(Path::new("/nonexistent")).unwrap_err().to_string();
        assert!(error.contains("no intel_pt"), "{error}");
        let error = read(&[("format/pt", "")]).unwrap_err().to_string();
        assert!(error.contains("before 4.13"), "{error}");
    }

    // covers: host-units/pt-perf
    #[test]
    fn ranges_are_filters() {
        let ranges = [(0x1000, 0x1fff), (0xffff_ffff_8100_0000, 0xffff_ffff_8100_0000)];
        assert_eq!(
            IntelPt::filters(&ranges),
            "filter 0x1000/0x1000,filter 0xffffffff81000000/0x1"
        );
        assert_eq!(IntelPt::filters(&[]), "");
    }
}
