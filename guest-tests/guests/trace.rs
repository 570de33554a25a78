//! What the Intel PT tests share: an output by table, and its packets.

use alloc::vec::Vec;

use pt_packet::{Decoder, Packet};
use rt::cpu::{leaf, read, write};
use rt::{need, paging};
use x86::msr::*;
use x86::pt::{RtitCtl, TopaEntry};

/// Traces branches of every ring into a table of regions.
pub const ON: RtitCtl = RtitCtl::new()
    .with_trace_en(true)
    .with_os(true)
    .with_user(true)
    .with_topa(true)
    .with_branch_en(true);

/// CPUID.14H.0, EBX.
pub fn ebx() -> u32 {
    leaf(0x14, 0)[1]
}

/// More than one region in a table: CPUID.14H.0:ECX\[1\].
pub const TABLES: need::Need = need::Need {
    reason: "one output region only (CPUID.14H.0:ECX[1] is 0)",
    present: || leaf(0x14, 0)[2] & 2 != 0,
    absent: || {},
};

/// Output to one range: CPUID.14H.0:ECX\[2\].
pub const RANGE: need::Need = need::Need {
    reason: "no single-range output (CPUID.14H.0:ECX[2] is 0)",
    present: || leaf(0x14, 0)[2] & 4 != 0,
    absent: || {
        if (need::PT.present)() {
            rt::cpu::refuses(IA32_RTIT_CTL, ON.with_topa(false).into_bits());
        }
    },
};

/// IP filters: CPUID.14H.0:EBX\[2\] and ranges in 14H.1:EAX\[2:0\].
pub const RANGES: need::Need = need::Need {
    reason: "no IP ranges (CPUID.14H.1:EAX[2:0] is 0)",
    present: || ebx() & 4 != 0 && leaf(0x14, 1)[0] & 7 != 0,
    absent: || rt::cpu::no_msr(IA32_RTIT_ADDR0_A),
};

/// CR3 filter: CPUID.14H.0:EBX\[0\].
pub const CR3_FILTER: need::Need = need::Need {
    reason: "no CR3 filter (CPUID.14H.0:EBX[0] is 0)",
    present: || ebx() & 1 != 0,
    absent: || {},
};

/// PTWRITE: CPUID.14H.0:EBX\[4\].
pub const PTWRITE: need::Need = need::Need {
    reason: "no PTWRITE (CPUID.14H.0:EBX[4] is 0)",
    present: || ebx() & 16 != 0,
    absent: || {
        // PTWRITE RAX
        let fault = rt::attempt!(".byte 0xf3, 0x48, 0x0f, 0xae, 0xe0", in("rax") 1u64);
        assert_eq!(fault, Some(rt::exception::Fault::UD), "PTWRITE");
        if (need::PT.present)() {
            rt::cpu::refuses(IA32_RTIT_CTL, 1 << 12);
        }
    },
};

/// PendPSB and PendTopaPMI, and that IA32_RTIT_CTL.InjectPsbPmiOnEnable has them act: CPUID.14H.0:EBX\[6\].
pub const INJECT: need::Need = need::Need {
    reason: "no preservation of PSBs and PMIs (CPUID.14H.0:EBX[6] is 0)",
    present: || ebx() & 64 != 0,
    absent: || {
        if (need::PT.present)() {
            rt::cpu::refuses(
                IA32_RTIT_CTL,
                RtitCtl::new().with_inject_psb_pmi_on_enable(true).into_bits(),
            );
            rt::cpu::refuses(IA32_RTIT_STATUS, 1 << 6);
            rt::cpu::refuses(IA32_RTIT_STATUS, 1 << 7);
        }
    },
};

/// An output of one table.
pub struct Output {
    /// The table.
    pub table: u64,
    /// The regions in order.
    pub regions: Vec<u64>,
    size: u64,
}

impl Output {
    /// So many regions of 4 KiB shifted left by `code`, then END back to the first; flags are added to each region's entry.
    pub fn new(count: usize, code: u8, flags: TopaEntry) -> Self {
        let table = paging::pages(1);
        let size = 4096u64 << code;
        let regions: Vec<u64> = (0..count).map(|_| paging::pages(1 << code)).collect();
        for (n, region) in regions.iter().enumerate() {
            let entry = TopaEntry::from_bits(flags.into_bits())
                .with_size_code(code)
                .with_page(region >> 12);
            paging::poke(table + 8 * n as u64, entry.into_bits());
        }
        let end = TopaEntry::new().with_end(true).with_page(table >> 12);
        paging::poke(table + 8 * count as u64, end.into_bits());
        let output = Self { table, regions, size };
        output.rewind();
        output
    }

    /// Begins at the first region, with a PSB to come.
    pub fn rewind(&self) {
        write(IA32_RTIT_CTL, 0u64);
        write(IA32_RTIT_STATUS, 0u64);
        write(IA32_RTIT_OUTPUT_BASE, self.table);
        write(IA32_RTIT_OUTPUT_MASK_PTRS, 0x7Fu64);
    }

    /// Everything that was written, as far as no region was reused.
    pub fn bytes(&self) -> Vec<u8> {
        let pointers = read(IA32_RTIT_OUTPUT_MASK_PTRS);
        let (region, offset) = (pointers >> 7 & 0x1FF_FFFF, pointers >> 32);
        let mut bytes = Vec::new();
        for n in 0..=region.min(self.regions.len() as u64 - 1) {
            let len = if n == region { offset } else { self.size };
            for at in 0..len {
                bytes.push(paging::peek(self.regions[n as usize] + at) as u8);
            }
        }
        bytes
    }

    /// The packets, without padding.
    pub fn packets(&self) -> Vec<Packet> {
        packets(&self.bytes())
    }
}

/// The packets of a trace that begins with a packet.
pub fn packets(bytes: &[u8]) -> Vec<Packet> {
    let mut decoder = Decoder::new(bytes);
    let mut all = Vec::new();
    while let Some(item) = decoder.next_packet() {
        match item {
            Ok(item) if item.packet == Packet::Pad => {}
            Ok(item) => all.push(item.packet),
            Err(error) => panic!("not a packet after {all:?}: {error:?}"),
        }
    }
    all
}

/// The packets about the flow: TNT as single letters, TIPs and FUPs with their addresses; clocks and PSB+ left out.
pub fn flow(packets: &[Packet]) -> Vec<Step> {
    let mut steps = Vec::new();
    let mut in_psb = false;
    for packet in packets {
        match *packet {
            Packet::Psb => in_psb = true,
            Packet::PsbEnd => in_psb = false,
            _ if in_psb => {}
            Packet::ShortTnt(tnt) | Packet::LongTnt(tnt) => {
                steps.extend(tnt.iter().map(|taken| if taken { Step::Taken } else { Step::NotTaken }));
            }
            Packet::Tip(Some(ip)) => steps.push(Step::Tip(ip)),
            Packet::TipPge(Some(ip)) => steps.push(Step::On(ip)),
            Packet::TipPgd(ip) => steps.push(Step::Off(ip)),
            Packet::Fup(Some(ip)) => steps.push(Step::Fup(ip)),
            Packet::TraceStop => steps.push(Step::Stop),
            Packet::Ptw { value, .. } => steps.push(Step::Ptw(value)),
            _ => {}
        }
    }
    steps
}

/// A step of the flow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// A TNT bit.
    Taken,
    /// A TNT bit.
    NotTaken,
    /// TIP.
    Tip(u64),
    /// TIP.PGE.
    On(u64),
    /// TIP.PGD.
    Off(Option<u64>),
    /// FUP.
    Fup(u64),
    /// TraceStop.
    Stop,
    /// PTW.
    Ptw(u64),
}
