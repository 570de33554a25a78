//! Which traces a host's tracer can make for the guest.

use x86::pt::{PtCaps, RangeUse, RtitCtl};

/// What a host's tracer takes of IA32_RTIT_CTL, so that the packets are what the guest's own processor would write. For
/// everything else the unit records.
///
/// Both rings at once and no CR3 filter are all that it can be asked for: PIP packets, which tell the guest from the host, are
/// sent while ring 0 is traced only, and every ring is traced in both. SDM Vol. 3C 33.4.2.7 "Paging Information (PIP) Packet".
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Served {
    /// The bits that may be set, but for TraceEn, OS, User, ToPA, DisRETC and the fields below.
    pub bits: RtitCtl,
    /// The values of MTCFreq that there are, one bit each; 0 too where the guest's crystal clock has another ratio to its TSC.
    pub mtc_frequencies: u16,
    /// The values of CycThresh.
    pub cyc_thresholds: u16,
    /// The values of PSBFreq.
    pub psb_frequencies: u16,
    /// How many address ranges.
    pub ranges: usize,
    /// IPs are linear addresses.
    pub lip: bool,
}

impl Served {
    /// Whether it can trace what this says for a processor of these capabilities.
    pub fn takes(&self, ctl: RtitCtl, caps: &PtCaps) -> bool {
        let own = RtitCtl::new()
            .with_trace_en(true)
            .with_os(true)
            .with_user(true)
            .with_topa(true)
            .with_dis_retc(true)
            .with_mtc_freq(15)
            .with_cyc_thresh(15)
            .with_psb_freq(15)
            .with_addr_cfg(!0)
            // It is about when the unit sends what it keeps.
            .with_inject_psb_pmi_on_enable(true);
        // Code 0 is there wherever the bit is that asks for it.
        let listed = |bitmap: u16, code: u8| code == 0 || bitmap >> code & 1 != 0;
        let used = (0..4).filter(|&n| ctl.range_use(n) != RangeUse::Unused);
        ctl.os()
            && ctl.user()
            && ctl.into_bits() & !(own.into_bits() | self.bits.into_bits()) == 0
            && (!ctl.mtc_en() || listed(self.mtc_frequencies, ctl.mtc_freq()))
            && (!ctl.cyc_en() || listed(self.cyc_thresholds, ctl.cyc_thresh()))
            && listed(self.psb_frequencies, ctl.psb_freq())
            // The host's own code may be where a guest's trace is to stop.
            && used.clone().all(|n| ctl.range_use(n) == RangeUse::Filter)
            && used.count() <= self.ranges
            && self.lip == caps.lip()
    }
}
