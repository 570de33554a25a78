//! The trace unit of an observer: what it can do, and how it is set up.

use devices::unit::pt::Pt;
use x86::model::CpuModel;
use x86::msr::{IA32_RTIT_ADDR0_A, IA32_RTIT_CR3_MATCH};
use x86::pt::{PtCaps, RtitCtl};

use super::filter::Filter;
use super::standing::Standing;

/// PSBs by the unit itself every 64 MiB: in time to bound what a decoder has to go through there are the observer's own.
const PSB_FREQ: u8 = 15;
/// An MTC packet every 32768 steps.
const MTC_FREQ: u8 = 15;

/// What the observers' trace units can do, whatever the model: everything that a decoder is better off with.
pub fn caps(model: &CpuModel) -> PtCaps {
    PtCaps {
        // CR3 filter; PSBFreq and CYC; IP filters; MTC.
        ebx: 0xf,
        // Single range; linear addresses.
        ecx: 1 << 31 | 1 << 2,
        // Four ranges; all values of MTCFreq.
        encodings: 0xffff_0004,
        // All values of PSBFreq and CycThresh.
        frequencies: 0xffff_ffff,
        crystal: (1, 1),
        ratio: u8::try_from(model.tsc_khz / 100_000).unwrap_or(u8::MAX),
        physical_bits: 52,
        linear_bits: 64,
        excludes_lbr: false,
    }
}

/// The control register without filters and TraceEn.
pub const CTL: RtitCtl = RtitCtl::new()
    .with_branch_en(true)
    .with_tsc_en(true)
    .with_mtc_en(true)
    .with_mtc_freq(MTC_FREQ)
    .with_psb_freq(PSB_FREQ);

/// A trace unit with its filters, and the control register that goes with them.
pub(super) fn with_filters(model: &CpuModel, filters: &[Filter]) -> (Pt<Vec<u8>>, RtitCtl) {
    let mut pt = Pt::with_output(caps(model), Vec::new());
    pt.tell_cr3();
    pt.follow_edges();
    let mut ctl = CTL;
    let rings = |ring: Filter| filters.contains(&ring);
    let (os, user) = (rings(Filter::Kernel), rings(Filter::User));
    ctl.set_os(os || !user);
    ctl.set_user(user || !os);
    let mut range = 0;
    for filter in filters {
        let registers = match *filter {
            Filter::Kernel | Filter::User | Filter::Comm(_) | Filter::Pid(_) => continue,
            Filter::Cr3(cr3) => {
                ctl.set_cr3_filter(true);
                vec![(IA32_RTIT_CR3_MATCH, cr3 & !0x1f)]
            }
            Filter::Ip(first, last) => {
                let register = IA32_RTIT_ADDR0_A + 2 * range;
                ctl.set_addr_cfg(ctl.addr_cfg() | 1 << (4 * range));
                range += 1;
                vec![(register, first), (register + 1, last)]
            }
        };
        for (msr, value) in registers {
            // Options are checked before, so that the unit takes whatever comes here.
            let taken = pt.write_msr(msr, value, &mut Standing::default());
            debug_assert!(taken.is_ok(), "{msr:x} {value:x}");
        }
    }
    (pt, ctl)
}

/// Writes the control register of such a unit.
pub(super) fn program(pt: &mut Pt<Vec<u8>>, ctl: RtitCtl, at: &mut Standing) {
    // Whatever `CTL` and the filters are, `caps` has it.
    let programmed = pt.program(ctl, at);
    debug_assert!(programmed.is_ok(), "{ctl:?}");
}
