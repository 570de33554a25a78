//! The trace unit of an observer: what it can do, and how it is set up.

use x86::model::CpuModel;
use x86::pt::{PtCaps, RtitCtl};

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
