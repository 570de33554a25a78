//! What is traced: CPL, CR3 and address ranges. SDM Vol. 3C 33.2.5 "Trace Filtering".
//!
//! # Theory
//! Privilege and CR3 make ContextEn, address ranges FilterEn. Both are functions of where the processor stands, so they are
//! worked out where that changes: at far transfers and changes of state for the context, at taken branches, events, MOV to CR3 and
//! the start of the trace for the ranges. What code walks into without any of these changes nothing: 33.2.5.3 "Filtering by IP",
//! "TraceStop", and the generation scenarios of TIP.PGE and TIP.PGD.
//!
//! # Practice
//! An observer of the host's wants the instructions of a range, however they were come to: its unit looks at straight-line code,
//! too. An instruction has at most fifteen bytes, so the first one beyond an edge starts at one of fifteen addresses: these are the
//! boundaries that the executor announces. Ranges hold what IP packets hold: effective addresses, or linear ones where CPUID says so.

use x86::pt::{PtCaps, RangeUse, RtitCtl};
use x86::watch::{CodeSize, Context};

/// The longest instruction, in bytes.
const LONGEST: u64 = 15;

/// The ranges in use, first and last address inclusive, and how linear addresses become those that packets and ranges hold.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Ranges {
    filters: Vec<(u64, u64)>,
    stops: Vec<(u64, u64)>,
}

fn within(ranges: &[(u64, u64)], ip: u64) -> bool {
    ranges.iter().any(|&(first, last)| (first..=last).contains(&ip))
}

impl Ranges {
    /// What the control register makes of the address registers.
    pub fn new(ctl: RtitCtl, addresses: &[u64; 8]) -> Self {
        let mut ranges = Self::default();
        for n in 0..4 {
            let range = (addresses[2 * n], addresses[2 * n + 1]);
            match ctl.range_use(n) {
                RangeUse::Unused => {}
                RangeUse::Filter => ranges.filters.push(range),
                RangeUse::TraceStop => ranges.stops.push(range),
            }
        }
        ranges
    }

    /// Whether there is none, so that no address needs to be looked at.
    pub fn is_empty(&self) -> bool {
        self.filters.is_empty() && self.stops.is_empty()
    }

    /// The filter ranges.
    pub fn filters(&self) -> &[(u64, u64)] {
        &self.filters
    }

    /// FilterEn at this IP. Without a filter range it is set everywhere.
    pub fn admit(&self, ip: u64) -> bool {
        self.filters.is_empty() || within(&self.filters, ip)
    }

    /// Whether this IP is in a TraceStop range.
    pub fn stop(&self, ip: u64) -> bool {
        within(&self.stops, ip)
    }

    /// The linear addresses of instructions that may be the first beyond an edge, ascending.
    pub fn boundaries(&self, addresses: Addresses) -> Vec<u64> {
        let mut edges = Vec::new();
        for &(first, last) in self.filters.iter().chain(&self.stops) {
            if first <= last {
                edges.push(first);
                edges.push(last.wrapping_add(1));
            }
        }
        let mut all: Vec<u64> = edges
            .into_iter()
            .flat_map(|edge| (0..LONGEST).map(move |i| addresses.linear(edge.wrapping_add(i))))
            .collect();
        all.sort_unstable();
        all.dedup();
        all
    }
}

/// How linear addresses become those of packets: less the base of the code segment where IPs are effective, and within 32
/// bits outside 64-bit mode. SDM Vol. 3C 33.3.1.1 "Packet Decoding of RIP versus LIP".
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Addresses {
    base: u64,
    mask: u64,
}

impl Addresses {
    /// As they are in a context.
    pub fn new(caps: &PtCaps, context: &Context) -> Self {
        match context.code {
            CodeSize::Bits64 => Self { base: 0, mask: !0 },
            CodeSize::Bits16 | CodeSize::Bits32 => Self {
                base: if caps.lip() { 0 } else { context.cs_base },
                mask: 0xFFFF_FFFF,
            },
        }
    }

    /// What a packet says of a linear address.
    #[inline(always)]
    pub fn ip(self, linear: u64) -> u64 {
        linear.wrapping_sub(self.base) & self.mask
    }

    /// The linear address of what a packet says.
    pub fn linear(self, ip: u64) -> u64 {
        ip.wrapping_add(self.base) & self.mask
    }
}

/// ContextEn, given TriggerEn: the ring and CR3. SDM Vol. 3C 33.2.6.3 "Context Enable (ContextEn)".
pub fn context_en(ctl: RtitCtl, cr3_match: u64, context: &Context) -> bool {
    let ring = if context.cpl == 0 { ctl.os() } else { ctl.user() };
    ring && (!ctl.cr3_filter() || cr3_matches(cr3_match, context))
}

/// Bits 63:5 of CR3 against the register; a PCID and the cache bits below them take part as far as they lie above bit 4.
/// Before paging, CR3 is compared all the same. SDM Vol. 3C 33.2.5.2 "Filtering by CR3".
fn cr3_matches(cr3_match: u64, context: &Context) -> bool {
    // With PAE paging bits 11:5 are part of the address of the page-directory-pointer table; in 4-level paging they are
    // ignored or the PCID.
    cr3_match == context.cr3 & !0x1F
}
