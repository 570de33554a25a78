//! Traces of Intel PT.

use pt_flow::{Block, Chunk, Chunks, Context, Decoder, Event, EventKind, Image, Timing, Visitor};
use pt_packet::{Decoder as Packets, ExecMode, ItemSize, LastIp, MAX_LEN, PSB, Packet, Tnt, encode};

/// Packets: each one has its place, and gives itself back when it is encoded.
pub fn packets(bytes: &[u8]) {
    let mut decoder = Packets::new(bytes);
    loop {
        let at = decoder.offset();
        let last = decoder.last_ip();
        match decoder.next_packet() {
            Some(Ok(item)) => {
                assert_eq!((item.offset, item.offset + item.len), (at, decoder.offset()));
                assert!((1..=MAX_LEN).contains(&item.len) && decoder.offset() <= bytes.len());
                check(&item.packet, last);
            }
            Some(Err(error)) => {
                assert_eq!(error.offset, at);
                assert!(!error.to_string().is_empty());
                assert_eq!(decoder.next_packet(), None);
                if let Some(psb) = decoder.sync_forward() {
                    assert!(psb > at && bytes[psb..].starts_with(&PSB));
                }
            }
            None => break,
        }
    }
    assert_eq!(decoder.offset(), bytes.len());
}

fn check(packet: &Packet, last: LastIp) {
    let (mut out, mut sent) = ([0; MAX_LEN], last);
    let len = encode(packet, &mut sent, &mut out);
    // An item is one only within its block.
    if let Packet::Bip { size, .. } = packet {
        return assert_eq!(len, 1 + size.len());
    }
    // The last IP is known to a decoder that has seen one.
    let mut before = [0; MAX_LEN];
    let prefix = encode(&Packet::Tip(Some(last.0)), &mut LastIp::new(), &mut before);
    let both = [&before[..prefix], &out[..len]].concat();
    let back = Packets::new(&both).nth(1).map(|item| item.map(|item| item.packet));
    assert_eq!(back, Some(Ok(*packet)));
}

/// Code of the same bytes at any address.
struct Anywhere<'a>(&'a [u8]);

impl Image for Anywhere<'_> {
    fn space(&mut self, context: &Context, upper: bool) -> u32 {
        context.cr3.map_or(0, |cr3| (cr3 >> 12) as u32 & 3) << 1 | upper as u32
    }
    fn code(&mut self, space: u32, ip: u64, out: &mut [u8]) -> usize {
        // Not all of it is there.
        if self.0.is_empty() || ip >> 12 & 7 == 7 {
            return 0;
        }
        for (at, byte) in out.iter_mut().enumerate() {
            *byte = self.0[(ip.wrapping_add(at as u64 + space as u64) % self.0.len() as u64) as usize];
        }
        out.len()
    }
}

#[derive(Default)]
struct Counts {
    blocks: u64,
    instructions: u64,
    gaps: u64,
}

impl Visitor for Counts {
    fn block(&mut self, block: &Block) {
        assert!(block.count > 0 && block.len >= block.count as u32);
        self.blocks += 1;
        self.instructions += block.count as u64;
    }
    fn event(&mut self, event: &Event) {
        if let EventKind::Gap(gap) = event.kind {
            assert!(!gap.to_string().is_empty());
            self.gaps += 1;
        }
    }
}

/// The flow of whatever code, as whatever packets tell it. The first bytes are the code.
pub fn flow(bytes: &[u8]) {
    let (code, trace) = bytes.split_at(bytes.len().min(64));
    let mut decoder = Decoder::new(Anywhere(code), Timing::default());
    let mut decode = |chunk: &Chunk| {
        let mut counts = Counts::default();
        decoder.decode(chunk, &mut counts);
        let summary = decoder.summary();
        let seen = (summary.blocks, summary.instructions, summary.gaps);
        assert_eq!((counts.blocks, counts.instructions, counts.gaps), seen);
    };
    decode(&Chunk::whole(trace));
    let mut total = 0;
    for chunk in Chunks::new(trace, 32, 1 << 10) {
        let chunk = chunk.expect("memory can be read");
        total += chunk.len() as u64 + chunk.skipped();
        decode(&chunk);
    }
    assert_eq!(total, trace.len() as u64);
}

/// Traces with all kinds of packets.
pub fn traces() -> Vec<Vec<u8>> {
    let four = ItemSize::Four;
    let mut long = Tnt::EMPTY;
    (0..40).for_each(|bit| long.push(bit % 3 == 0));
    let packets = [
        Packet::Psb,
        Packet::Tsc(1 << 40),
        Packet::Tma { ctc: 77, fast: 3 },
        Packet::Cbr(20),
        Packet::Pip {
            cr3: 0x1000,
            non_root: false,
        },
        Packet::ModeExec {
            mode: ExecMode::Bits64,
            interrupts: false,
        },
        Packet::Fup(Some(0x40_0000)),
        Packet::PsbEnd,
        Packet::LongTnt(long),
        Packet::ShortTnt(Tnt::from_bits(0b110_1011).expect("six bits")),
        Packet::Cyc(9),
        Packet::Tip(Some(0xffff_ffff_8100_0000)),
        Packet::Fup(Some(0xffff_ffff_8100_0010)),
        Packet::Tip(Some(0xffff_ffff_8100_2000)),
        Packet::Mtc(4),
        Packet::Ptw {
            value: 1,
            size: four,
            ip: true,
        },
        Packet::Fup(Some(0xffff_ffff_8100_2000)),
        Packet::Bbp { size: four, kind: 4 },
        Packet::Bip {
            id: 3,
            size: four,
            value: 9,
        },
        Packet::Bep { ip: true },
        Packet::Fup(None),
        Packet::Evd { kind: 0, value: 5 },
        Packet::Cfe {
            kind: 1,
            vector: 14,
            ip: true,
        },
        Packet::Fup(Some(0xffff_ffff_8100_2010)),
        Packet::Tip(Some(0x40_0020)),
        Packet::Ovf,
        Packet::Fup(Some(0x40_0100)),
        Packet::TipPgd(None),
        Packet::TraceStop,
        Packet::TipPge(Some(0x40_0000)),
        Packet::ModeTsx {
            in_tx: true,
            abort: false,
        },
        Packet::Fup(Some(0x40_0002)),
        Packet::ExStop { ip: true },
        Packet::Fup(Some(0x40_0003)),
        Packet::Vmcs(0x7000),
        Packet::TipPgd(Some(0x1234)),
    ];
    // NOPs with branches of all kinds between them.
    let mut code = [0x90; 64];
    for (at, bytes) in [
        (5, &[0x75, 0xfa][..]),
        (12, &[0xe8, 2, 0, 0, 0]),
        (20, &[0xff, 0xe0]),
        (25, &[0x0f, 0x22, 0xd8]),
        (33, &[0xc3]),
        (40, &[0xf3, 0x0f, 0xae, 0xe0]),
        (50, &[0x0f, 0x05]),
        (55, &[0xeb, 3]),
    ] {
        code[at..at + bytes.len()].copy_from_slice(bytes);
    }
    let mut trace = code.to_vec();
    let mut last = LastIp::new();
    for _ in 0..3 {
        for packet in &packets {
            let mut out = [0; MAX_LEN];
            let len = encode(packet, &mut last, &mut out);
            trace.extend(&out[..len]);
        }
    }
    vec![trace]
}
