//! Every packet through the encoder and back, beside the bytes that the manual's tables give it.

use pt_packet::{
    BadPayload, DecodeError, Decoder, ErrorKind, ExecMode, IpBytes, IpKind, Item, ItemSize, LastIp, MAX_LEN, PSB,
    Packet, Tnt, encode, encode_tip, find_psb,
};

/// Bits with their stop bit.
fn tnt(bits: u64) -> Tnt {
    Tnt::from_bits(bits).unwrap()
}

fn bytes_of(packet: &Packet, last: &mut LastIp) -> Vec<u8> {
    let mut out = [0xee; MAX_LEN];
    let len = encode(packet, last, &mut out);
    out[..len].to_vec()
}

/// Packets that stand alone, with their bytes. SDM Vol. 3C 33.4.2 "Packet Definitions".
fn table() -> Vec<(Packet, Vec<u8>)> {
    use Packet::*;
    let (four, eight) = (ItemSize::Four, ItemSize::Eight);
    let rows: Vec<(Packet, &[u8])> = vec![
        (Pad, &[0]),
        (ShortTnt(tnt(0b10)), &[0x04]),
        (ShortTnt(tnt(0b11)), &[0x06]),
        (ShortTnt(tnt(0b110_1001)), &[0xd2]),
        (LongTnt(tnt(0b11)), &[0x02, 0xa3, 3, 0, 0, 0, 0, 0]),
        (LongTnt(tnt(1 << 47 | 5)), &[0x02, 0xa3, 0x05, 0, 0, 0, 0, 0x80]),
        (Tip(None), &[0x0d]),
        (TipPge(None), &[0x11]),
        (TipPgd(None), &[0x01]),
        (Fup(None), &[0x1d]),
        (Tip(Some(0x1234)), &[0x2d, 0x34, 0x12]),
        (TipPge(Some(0x1234_5678)), &[0x51, 0x78, 0x56, 0x34, 0x12]),
        (
            TipPgd(Some(0x7fff_1234_5678)),
            &[0x61, 0x78, 0x56, 0x34, 0x12, 0xff, 0x7f],
        ),
        (Fup(Some(0xffff_ffff_8100_0000)), &[0x7d, 0, 0, 0, 0x81, 0xff, 0xff]),
        (
            // Bits 63:48 are as in the last IP, but 48 bits and their sign do not give them.
            Tip(Some(0x0000_8000_0000_0001)),
            &[0x8d, 1, 0, 0, 0, 0, 0x80],
        ),
        (Tip(Some(0x00ff_8000_0000_0001)), &[0xcd, 1, 0, 0, 0, 0, 0x80, 0xff, 0]),
        (
            Pip {
                cr3: 0x000f_ffff_ffff_ffe0,
                non_root: false,
            },
            &[0x02, 0x43, 0xfe, 0xff, 0xff, 0xff, 0xff, 0xff],
        ),
        (
            Pip {
                cr3: 0x1234_5000,
                non_root: true,
            },
            &[0x02, 0x43, 0x01, 0x45, 0x23, 0x01, 0, 0],
        ),
        (
            ModeExec {
                mode: ExecMode::Bits16,
                interrupts: false,
            },
            &[0x99, 0x00],
        ),
        (
            ModeExec {
                mode: ExecMode::Bits64,
                interrupts: false,
            },
            &[0x99, 0x01],
        ),
        (
            ModeExec {
                mode: ExecMode::Bits32,
                interrupts: true,
            },
            &[0x99, 0x06],
        ),
        (
            ModeTsx {
                in_tx: false,
                abort: false,
            },
            &[0x99, 0x20],
        ),
        (
            ModeTsx {
                in_tx: true,
                abort: false,
            },
            &[0x99, 0x21],
        ),
        (
            ModeTsx {
                in_tx: false,
                abort: true,
            },
            &[0x99, 0x22],
        ),
        (TraceStop, &[0x02, 0x83]),
        (Cbr(0x20), &[0x02, 0x03, 0x20, 0]),
        (
            Tsc(0x00fe_dcba_9876_5432),
            &[0x19, 0x32, 0x54, 0x76, 0x98, 0xba, 0xdc, 0xfe],
        ),
        (Mtc(0xa5), &[0x59, 0xa5]),
        (
            Tma {
                ctc: 0x1234,
                fast: 0x1a5,
            },
            &[0x02, 0x73, 0x34, 0x12, 0, 0xa5, 0x01],
        ),
        (Cyc(0), &[0x03]),
        (Cyc(0x1f), &[0xfb]),
        (Cyc(0x20), &[0x07, 0x02]),
        (Cyc(0xfff), &[0xff, 0xfe]),
        (Cyc(0x1000), &[0x07, 0x01, 0x02]),
        (
            Cyc(u64::MAX),
            &[0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x0e],
        ),
        (
            Vmcs(0x000f_edcb_a987_6000 & !0xfff),
            &[0x02, 0xc8, 0x76, 0x98, 0xba, 0xdc, 0xfe],
        ),
        (Ovf, &[0x02, 0xf3]),
        (Psb, &PSB),
        (PsbEnd, &[0x02, 0x23]),
        (
            Mnt(0x0123_4567_89ab_cdef),
            &[0x02, 0xc3, 0x88, 0xef, 0xcd, 0xab, 0x89, 0x67, 0x45, 0x23, 0x01],
        ),
        (
            Ptw {
                value: 0x89ab_cdef,
                size: four,
                ip: false,
            },
            &[0x02, 0x12, 0xef, 0xcd, 0xab, 0x89],
        ),
        (
            Ptw {
                value: 0x0123_4567_89ab_cdef,
                size: eight,
                ip: true,
            },
            &[0x02, 0xb2, 0xef, 0xcd, 0xab, 0x89, 0x67, 0x45, 0x23, 0x01],
        ),
        (
            Ptw {
                value: 1,
                size: four,
                ip: true,
            },
            &[0x02, 0x92, 1, 0, 0, 0],
        ),
        (
            Ptw {
                value: 1,
                size: eight,
                ip: false,
            },
            &[0x02, 0x32, 1, 0, 0, 0, 0, 0, 0, 0],
        ),
        (ExStop { ip: false }, &[0x02, 0x62]),
        (ExStop { ip: true }, &[0x02, 0xe2]),
        (
            Mwait {
                hints: 0x20,
                extensions: 1,
            },
            &[0x02, 0xc2, 0x20, 0, 0, 0, 1, 0, 0, 0],
        ),
        (
            Pwre {
                hardware: true,
                state: 2,
                sub_state: 1,
            },
            &[0x02, 0x22, 0x80, 0x21],
        ),
        (
            Pwrx {
                last: 3,
                deepest: 6,
                reason: 1,
            },
            &[0x02, 0xa2, 0x36, 0x01, 0, 0, 0],
        ),
        (Bbp { size: four, kind: 4 }, &[0x02, 0x63, 0x84]),
        (Bbp { size: eight, kind: 1 }, &[0x02, 0x63, 0x01]),
        (Bep { ip: false }, &[0x02, 0x33]),
        (Bep { ip: true }, &[0x02, 0xb3]),
        (
            Cfe {
                kind: 1,
                vector: 0xec,
                ip: true,
            },
            &[0x02, 0x13, 0x81, 0xec],
        ),
        (
            Evd {
                kind: 2,
                value: 0x0123_4567_89ab_cdef,
            },
            &[0x02, 0x53, 2, 0xef, 0xcd, 0xab, 0x89, 0x67, 0x45, 0x23, 0x01],
        ),
    ];
    rows.into_iter()
        .map(|(packet, bytes)| (packet, bytes.to_vec()))
        .collect()
}

/// A block of items, which mean TNT elsewhere.
fn block(size: ItemSize) -> Vec<Packet> {
    let mut packets = vec![Packet::Bbp { size, kind: 1 }];
    packets.extend((0..32).map(|id| Packet::Bip {
        id,
        size,
        value: 0x1020_3040 + id as u64,
    }));
    packets.extend([Packet::Bep { ip: false }, Packet::ShortTnt(tnt(0b11_0010))]);
    packets
}

// covers: pt/packet-bytes
#[test]
fn every_packet_has_the_bytes_of_the_manual_and_comes_back() {
    for (packet, bytes) in table() {
        assert_eq!(bytes_of(&packet, &mut LastIp::new()), bytes, "{packet:?}");
        let mut decoder = Decoder::new(&bytes);
        let len = bytes.len();
        assert_eq!(decoder.next(), Some(Ok(Item { offset: 0, len, packet })));
        assert_eq!(decoder.next(), None);
    }
    for size in [ItemSize::Four, ItemSize::Eight] {
        let packets = block(size);
        let bytes: Vec<u8> = packets
            .iter()
            .flat_map(|packet| bytes_of(packet, &mut LastIp::new()))
            .collect();
        let back: Vec<Packet> = Decoder::new(&bytes).map(|item| item.unwrap().packet).collect();
        assert_eq!(back, packets);
    }
}

// covers: pt/packet-truncated
#[test]
fn every_truncation_is_told_from_a_packet() {
    let mut rows = table();
    for size in [ItemSize::Four, ItemSize::Eight] {
        let bip = Packet::Bip { id: 3, size, value: 7 };
        rows.push((bip, bytes_of(&bip, &mut LastIp::new())));
    }
    for (packet, bytes) in rows {
        // What stands before the packet: a block's head where it needs one.
        let mut trace = match packet {
            Packet::Bip { size, .. } => bytes_of(&Packet::Bbp { size, kind: 1 }, &mut LastIp::new()),
            _ => Vec::new(),
        };
        let offset = trace.len();
        trace.extend(&bytes);
        for cut in 1..bytes.len() {
            let mut decoder = Decoder::new(&trace[..offset + cut]);
            if offset > 0 {
                decoder.next().unwrap().unwrap();
            }
            let error = decoder.next().unwrap().unwrap_err();
            let ErrorKind::Truncated { needed } = error.kind else {
                panic!("{packet:?} cut to {cut}: {error}");
            };
            assert_eq!(error.offset, offset);
            assert!(
                cut < needed && needed <= bytes.len(),
                "{packet:?} cut to {cut}: {needed}"
            );
            assert_eq!(decoder.next(), None, "an error ends the walk");
        }
    }
}

// covers: pt/packet-reserved
#[test]
fn reserved_encodings_are_rejected() {
    use BadPayload::*;
    let mut rows: Vec<(Vec<u8>, ErrorKind)> = vec![
        (vec![0x99, 0x03], ErrorKind::Bad(ExecMode)),
        (vec![0x99, 0x40], ErrorKind::Bad(ModeLeaf(2))),
        (vec![0x99, 0xe0], ErrorKind::Bad(ModeLeaf(7))),
        (vec![0x02, 0x52, 0, 0, 0, 0, 0, 0, 0, 0], ErrorKind::Bad(PtwSize(2))),
        (vec![0x02, 0xf2, 0, 0, 0, 0, 0, 0, 0, 0], ErrorKind::Bad(PtwSize(3))),
        (vec![0x02, 0xa3, 0, 0, 0, 0, 0, 0], ErrorKind::Bad(Tnt)),
        (vec![0x02, 0xa3, 1, 0, 0, 0, 0, 0], ErrorKind::Bad(Tnt)),
        (vec![0x02, 0x82, 0x02, 0x83], ErrorKind::Bad(Psb)),
        (
            vec![0x02, 0xc3, 0x89, 0, 0, 0, 0, 0, 0, 0, 0],
            ErrorKind::Bad(Mnt(0x89)),
        ),
        (vec![0xff; 16], ErrorKind::Bad(Cyc)),
        (
            vec![0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x10],
            ErrorKind::Bad(Cyc),
        ),
        (
            vec![0x02, 0x00],
            ErrorKind::UnknownOpcode {
                extended: true,
                byte: 0,
            },
        ),
        (
            vec![0xd9, 0, 0],
            ErrorKind::UnknownOpcode {
                extended: false,
                byte: 0xd9,
            },
        ),
        (
            vec![0x05],
            ErrorKind::UnknownOpcode {
                extended: false,
                byte: 0x05,
            },
        ),
    ];
    for kind in [0x0d, 0x11, 0x01, 0x1d] {
        for bits in [5, 7] {
            rows.push((vec![kind | bits << 5; 9], ErrorKind::Bad(IpBytes(bits))));
        }
    }
    for (bytes, kind) in rows {
        let mut decoder = Decoder::new(&bytes);
        let error = DecodeError { offset: 0, kind };
        assert_eq!(decoder.next(), Some(Err(error)), "{bytes:02x?}");
        assert!(error.to_string().starts_with("at offset 0x0: "), "{error}");
        assert_eq!(decoder.next(), None);
    }
    // Every first byte, and every byte behind 02H: a packet, or an error that names it.
    for byte in 0..=255u8 {
        for (bytes, extended) in [
            ([byte; 16], false),
            ([0x02, byte, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0], true),
        ] {
            match Decoder::new(&bytes).next().unwrap() {
                Ok(item) => {
                    let first = &bytes[..item.len];
                    let reserved_bits = [
                        "CBR",
                        "TMA",
                        "PWRE",
                        "PWRX",
                        "BBP",
                        "CFE",
                        "EVD",
                        "MODE.TSX",
                        "MODE.Exec",
                    ];
                    let shortest = matches!(item.packet, Packet::Cyc(_))
                        || item.packet.name().contains("IP")
                        || first[0] & 0x1f == 1
                        || first[0] & 0x1f == 0x1d;
                    if !reserved_bits.contains(&item.packet.name()) && !shortest {
                        assert_eq!(bytes_of(&item.packet, &mut LastIp::new()), first, "{:?}", item.packet);
                    }
                }
                Err(DecodeError {
                    kind:
                        ErrorKind::UnknownOpcode {
                            extended: of,
                            byte: named,
                        },
                    ..
                }) => assert_eq!(
                    (of, named),
                    (extended || byte == 2, if byte == 2 && !extended { 2 } else { byte })
                ),
                Err(_) => {}
            }
        }
    }
}

// covers: pt/packet-ip-compression
#[test]
fn ips_are_sent_in_the_shortest_form() {
    const KERNEL: u64 = 0xffff_ffff_8100_0000;
    for (last, ip, form) in [
        (KERNEL, KERNEL, IpBytes::Update16),
        (KERNEL, KERNEL + 0xffff, IpBytes::Update16),
        (KERNEL, KERNEL + 0x1_0000, IpBytes::Update32),
        (KERNEL, KERNEL + 0x7eff_ffff, IpBytes::Update32),
        (KERNEL, 0xffff_fffe_8100_0000, IpBytes::Sext48),
        (KERNEL, 0x40_0000, IpBytes::Sext48),
        (0, 0x40_0000, IpBytes::Update32),
        (0, KERNEL, IpBytes::Sext48),
        (0x00ff_0000_0000_0000, 0x00ff_8000_0000_0000, IpBytes::Update48),
        (KERNEL, 0x00ff_8000_0000_0000, IpBytes::Full),
        (0x00ff_0000_0000_0000, 0, IpBytes::Sext48),
        (0x00ff_0000_0000_0000, 0x00ff_0000_0000_0001, IpBytes::Update16),
    ] {
        assert_eq!(LastIp(last).shortest(ip), form, "{last:x} {ip:x}");
        for (kind, header) in [
            (IpKind::Tip, 0x0d),
            (IpKind::TipPge, 0x11),
            (IpKind::TipPgd, 0x01),
            (IpKind::Fup, 0x1d),
        ] {
            let (mut out, mut sent) = ([0; MAX_LEN], LastIp(last));
            let len = encode_tip(kind, ip, &mut sent, &mut out);
            assert_eq!(len, 1 + form.len());
            assert_eq!(out[0], header | (form as u8) << 5);
            assert_eq!(sent, LastIp(ip));
        }
    }
    // No form that is shorter gives the IP back, and the one that is taken does.
    let mut random = 0x9e37_79b9_7f4a_7c15u64;
    let mut draw = || {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        random
    };
    for _ in 0..100_000 {
        let last = draw();
        let ip = (last & (u64::MAX << (draw() % 64))) ^ (draw() >> (draw() % 64));
        let form = LastIp(last).shortest(ip);
        assert_eq!(LastIp(last).expand(form, ip), Some(ip));
        for other in (1..=6)
            .filter_map(IpBytes::from_bits)
            .filter(|other| other.len() < form.len())
        {
            assert_ne!(LastIp(last).expand(other, ip), Some(ip), "{last:x} {ip:x} {other:?}");
        }
    }
}

// covers: pt/packet-stream
#[test]
fn a_stream_of_random_packets_comes_back() {
    let mut random = 1u64;
    let mut draw = |below: u64| {
        random = random
            .wrapping_mul(6364136223846793005)
            .wrapping_add(1442695040888963407);
        (random >> 33) % below
    };
    let table = table();
    let mut last = LastIp::new();
    let (mut bytes, mut packets) = (Vec::new(), Vec::new());
    let mut push = |packet: Packet, packets: &mut Vec<Packet>| {
        bytes.extend(bytes_of(&packet, &mut last));
        packets.push(packet);
    };
    for _ in 0..20_000 {
        match draw(8) {
            0 => {
                let ip = 0xffff_ffff_8000_0000u64.wrapping_add(draw(1 << 31) << draw(20));
                push(
                    [Packet::Tip, Packet::TipPge, Packet::TipPgd, Packet::Fup][draw(4) as usize](Some(ip)),
                    &mut packets,
                );
            }
            1 => push(Packet::ShortTnt(tnt(2 + draw(126))), &mut packets),
            2 => push(Packet::LongTnt(tnt(2 + (draw(1 << 30) << 17))), &mut packets),
            3 => push(Packet::Cyc(draw(1 << 31) << draw(32)), &mut packets),
            4 => block(ItemSize::Eight)
                .into_iter()
                .for_each(|packet| push(packet, &mut packets)),
            _ => push(table[draw(table.len() as u64) as usize].0, &mut packets),
        }
        // What ends a block that a single BBP opened.
        if let Some(Packet::Bbp { .. }) = packets.last() {
            push(Packet::Bep { ip: true }, &mut packets);
        }
    }
    let mut offset = 0;
    let mut count = 0;
    for (item, packet) in Decoder::new(&bytes).zip(&packets) {
        let item = item.unwrap();
        assert_eq!((item.offset, &item.packet), (offset, packet));
        offset += item.len;
        count += 1;
    }
    assert_eq!((offset, count), (bytes.len(), packets.len()));
}

// covers: pt/packet-sync
#[test]
fn the_next_psb_is_found_wherever_it_stands() {
    for before in 0..40 {
        for after in 0..20 {
            for filler in [0x00, 0x82, 0x02, 0xff] {
                let mut bytes = vec![filler; before];
                bytes.extend(PSB);
                bytes.extend(vec![0xff; after]);
                assert_eq!(find_psb(&bytes, 0), Some(before), "{before} {after} {filler}");
                assert_eq!(find_psb(&bytes, before), Some(before));
                assert_eq!(find_psb(&bytes, before + 1), None);
                assert_eq!(find_psb(&bytes[..before + 15], 0), None);
            }
        }
        // Payload that looks like the beginning of one.
        let mut bytes = vec![0x11; before];
        bytes.extend([0x02, 0x82, 0x02, 0x82]);
        bytes.extend(PSB);
        assert_eq!(find_psb(&bytes, 0), Some(before + 4));
    }
    assert_eq!(find_psb(&PSB, 17), None);

    // An error, and on at the next PSB with the last IP forgotten.
    let mut last = LastIp::new();
    let mut bytes = PSB.to_vec();
    bytes.extend(bytes_of(&Packet::Tip(Some(0x1234_5678)), &mut last));
    bytes.push(0x05);
    bytes.extend(PSB);
    last.reset();
    bytes.extend(bytes_of(&Packet::Tip(Some(0x9abc)), &mut last));
    let mut decoder = Decoder::new(&bytes);
    assert_eq!(decoder.sync_forward(), Some(0));
    assert_eq!(decoder.by_ref().count(), 3);
    assert_eq!(decoder.sync_forward(), Some(22));
    let packets: Vec<Packet> = decoder.by_ref().map(|item| item.unwrap().packet).collect();
    assert_eq!(packets, [Packet::Psb, Packet::Tip(Some(0x9abc))]);
    assert_eq!(decoder.sync_forward(), None);
    assert_eq!(decoder.next(), None);
}

// covers: pt/packet-bytes
#[test]
fn branches_keep_their_order() {
    let mut bits = Tnt::EMPTY;
    assert!(bits.is_empty());
    for (count, taken) in [true, false, false, true, true, false].into_iter().enumerate() {
        assert!(!bits.fills_short());
        bits.push(taken);
        assert_eq!(bits.len() as usize, count + 1);
    }
    assert!(bits.fills_short());
    assert_eq!(bits.to_string(), "TNNTTN");
    assert_eq!(bytes_of(&Packet::ShortTnt(bits), &mut LastIp::new()), [0b1100_1100]);
    for _ in 6..47 {
        assert!(!bits.fills_long());
        bits.push(true);
    }
    assert!(bits.fills_long());
    bits.push(false);
    assert_eq!(bits.len(), 47, "the oldest is lost, not the stop bit");
    assert_eq!(Tnt::from_bits(0), None);
    assert_eq!(Tnt::from_bits(1 << 48), None);
}
