//! Single ranges and tables: each row of the rules.

use super::super::output::{EARLY_PMI, GuestMemory, Outcome, Output};
use super::*;
use x86::pt::RtitMaskPtrs;

const TABLE: u64 = 0x8000;
const END: u64 = 1;
const INT: u64 = 4;
const STOP: u64 = 16;

/// A table at [`TABLE`] and what came of starting with it.
fn table(caps: &PtCaps, entries: &[u64], ptrs: u64) -> (GuestMemory, Guest, Outcome) {
    let mut guest = Guest::default();
    lay(&mut guest, TABLE, entries);
    let mut output = GuestMemory::default();
    output.set_registers(TABLE, RtitMaskPtrs::from_bits(ptrs | 0x7F));
    let outcome = output.start(true, false, caps, &mut guest);
    (output, guest, outcome)
}

fn lay(guest: &mut Guest, table: u64, entries: &[u64]) {
    for (n, entry) in entries.iter().enumerate() {
        guest.ram[table as usize + 8 * n..][..8].copy_from_slice(&entry.to_le_bytes());
    }
}

/// Bytes that tell their place.
fn pattern(len: usize) -> Vec<u8> {
    (0..len).map(|i| (i % 251) as u8 + 1).collect()
}

// covers: pt/output-single
#[test]
fn single_range_rows() {
    let caps = caps(&SKYLAKE_SERVER);
    for (base, ptrs, works, why) in [
        (0x4_0000u64, 0xFFFu64, true, "4 KiB"),
        (0x4_0000, 0x7F, true, "the smallest"),
        (0x4_0000, 0xFFF | 0xFFF << 32, true, "the last byte"),
        (0x4_0000, 0xFFF | 0x1000 << 32, false, "an offset behind the mask"),
        (0x4_0000, 0xF7F, false, "a mask with a hole"),
        (0x4_0800, 0xFFF, false, "base and mask overlap"),
        (0, 0xFFFF_FFFF, true, "the largest"),
    ] {
        let mut guest = Guest::default();
        let mut output = GuestMemory::default();
        output.set_registers(base, RtitMaskPtrs::from_bits(ptrs));
        let outcome = output.start(false, false, &caps, &mut guest);
        assert_eq!(outcome.error, !works, "{why}");
        let _ = output.put(&[0xEE], &caps, &mut guest);
        let at = (base + (ptrs >> 32)) as usize;
        assert_eq!(
            guest.ram[at] == 0xEE,
            works,
            "{why}: bytes go there, or nowhere after an error"
        );
    }
}

// covers: pt/output-single
#[test]
fn a_single_range_wraps() {
    let caps = caps(&SKYLAKE_SERVER);
    let mut guest = Guest::default();
    let mut output = GuestMemory::default();
    output.set_registers(0x4_0000, RtitMaskPtrs::from_bits(0xFF | 0xF0 << 32));
    assert_eq!(output.start(false, false, &caps, &mut guest), Outcome::default());
    let bytes = pattern(0x240);
    assert_eq!(output.put(&bytes, &caps, &mut guest), Outcome::default());
    assert_eq!(output.registers().1.output_offset(), 0x30);
    for at in 0..0x100usize {
        // The last time that the pattern came by here.
        let index = (0x240 - 1) - (0x2F_usize.wrapping_sub(at) & 0xFF);
        assert_eq!(guest.ram[0x4_0000 + at], bytes[index], "offset {at:#x}");
    }
    assert!(
        guest.ram[0x4_0100..].iter().all(|&byte| byte == 0),
        "nothing behind the range"
    );
}

// covers: pt/topa-errors
#[test]
fn malformed_tables() {
    let many = caps(&SKYLAKE_SERVER);
    let one = caps(&BROADWELL);
    let rows: [(&PtCaps, &[u64], u64, bool, &str); 21] = [
        (&many, &[0x4_0000, TABLE | END], 0, true, "one region, circular"),
        (&many, &[0x4_0000], 0, true, "what follows is not looked at yet"),
        (
            &many,
            &[0x4_0000 | 1 << 6],
            0x1FFF << 32,
            true,
            "the last byte of 8 KiB",
        ),
        (
            &many,
            &[0x4_0000 | 1 << 6],
            0x2000 << 32,
            false,
            "an offset at the region's size",
        ),
        (&many, &[0x4_1000 | 1 << 6], 0, false, "8 KiB on a 4 KiB boundary"),
        (&many, &[0x4_0000 | 1 << 1], 0, false, "reserved bit 1"),
        (&many, &[0x4_0000 | 1 << 3], 0, false, "reserved bit 3"),
        (&many, &[0x4_0000 | 1 << 5], 0, false, "reserved bit 5"),
        (&many, &[0x4_0000 | 1 << 10], 0, false, "reserved bit 10"),
        (&many, &[0x4_0000 | 1 << 11], 0, false, "reserved bit 11"),
        (&many, &[0x4_0000 | 1 << 46], 0, false, "an address beyond MAXPHYADDR"),
        (&many, &[0x4_0000 | INT | STOP], 0, true, "INT and STOP"),
        (&many, &[TABLE | END], 0, false, "END in entry 0"),
        (&many, &[0x4_0000, 0x9000 | END | INT], 1 << 7, false, "END with INT"),
        (&many, &[0x4_0000, 0x9000 | END | STOP], 1 << 7, false, "END with STOP"),
        (&many, &[0x4_0000, TABLE | END], 1 << 7, true, "started at the END"),
        (
            &many,
            &[0x4_0000, 0x9000 | END],
            1 << 7,
            true,
            "END leads to a table whose first entry is zeros: 4 KiB at 0",
        ),
        (
            &one,
            &[0x4_0000, TABLE | END],
            0,
            true,
            "first generation: one region, circular",
        ),
        (&one, &[0x4_0000, 0x5_0000], 0, false, "first generation: two regions"),
        (
            &one,
            &[0x4_0000, 0x9000 | END],
            0,
            false,
            "first generation: END leads elsewhere",
        ),
        (
            &one,
            &[0x4_0000, 0x4_0000, TABLE | END],
            1 << 7,
            false,
            "first generation: entry 1 in use",
        ),
    ];
    for (caps, entries, ptrs, works, why) in rows {
        let (mut output, mut guest, outcome) = table(caps, entries, ptrs);
        assert_eq!(outcome.error, !works, "{why}");
        if !works {
            let before = guest.ram.clone();
            assert_eq!(output.put(&pattern(64), caps, &mut guest), Outcome::default());
            assert!(guest.ram == before, "{why}: nothing is written");
        }
    }
    let mut guest = Guest::default();
    let mut output = GuestMemory::default();
    for (base, why) in [(0x8080, "a table off its page"), (1 << 30, "a table without memory")] {
        output.set_registers(base, RtitMaskPtrs::RESET);
        assert!(output.start(true, false, &many, &mut guest).error, "{why}");
    }
}

// covers: pt/topa
#[test]
fn regions_fill_one_after_the_other() {
    let caps = caps(&SKYLAKE_SERVER);
    // 4 KiB, 8 KiB with INT, then a second table with 4 KiB and STOP.
    let (mut output, mut guest, outcome) = table(&caps, &[0x4_0000, 0x5_0000 | 1 << 6 | INT, 0x9000 | END], 0);
    assert_eq!(outcome, Outcome::default());
    lay(&mut guest, 0x9000, &[0x6_0000 | STOP, 0x9000 | END]);
    let bytes = pattern(0x4000);
    let mut events = Vec::new();
    for (n, chunk) in bytes.chunks(0x100).enumerate() {
        let outcome = output.put(chunk, &caps, &mut guest);
        if outcome != Outcome::default() {
            events.push((n, outcome.pmi, outcome.stopped, outcome.error));
        }
        if n == 0xF {
            let (base, ptrs) = output.registers();
            let place = (base, ptrs.mask_or_table_offset(), ptrs.output_offset());
            assert_eq!(
                place,
                (TABLE, 1, 0),
                "at the second region as soon as the first is full"
            );
        }
    }
    assert_eq!(events, [(0x2F, true, false, false), (0x3F, false, true, false)]);
    assert_eq!(guest.ram[0x4_0000..0x4_1000], bytes[..0x1000]);
    assert_eq!(guest.ram[0x5_0000..0x5_2000], bytes[0x1000..0x3000]);
    assert_eq!(guest.ram[0x6_0000..0x6_1000], bytes[0x3000..]);
    let (base, ptrs) = output.registers();
    let place = (base, ptrs.mask_or_table_offset(), ptrs.output_offset());
    assert_eq!(place, (0x9000, 0, 0x1000), "STOP: the offset is the region's size");
    assert_eq!(
        output.put(&bytes, &caps, &mut guest),
        Outcome::default(),
        "nothing more is taken"
    );
    assert_eq!(output.registers(), (base, ptrs));
    assert!(guest.ram[0x6_1000..].iter().all(|&byte| byte == 0));
}

// covers: pt/topa
#[test]
fn one_write_can_fill_several_regions() {
    let caps = caps(&SKYLAKE_SERVER);
    let (mut output, mut guest, _) = table(&caps, &[0x4_0000 | INT, 0x5_0000, TABLE | END], 0);
    let bytes = pattern(0x4800);
    let outcome = output.put(&bytes, &caps, &mut guest);
    assert_eq!((outcome.pmi, outcome.stopped, outcome.error), (true, false, false));
    // Twice around, and half a region.
    assert_eq!(guest.ram[0x4_0000..0x4_0800], bytes[0x4000..0x4800]);
    assert_eq!(guest.ram[0x4_0800..0x4_1000], bytes[0x2800..0x3000]);
    assert_eq!(guest.ram[0x5_0000..0x5_1000], bytes[0x3000..0x4000]);
    assert_eq!(output.registers().1.output_offset(), 0x800);
}

// covers: pt/topa-errors
#[test]
fn an_entry_is_judged_when_it_is_reached() {
    let caps = caps(&SKYLAKE_SERVER);
    let (mut output, mut guest, outcome) = table(&caps, &[0x4_0000, 0x5_0000 | 1 << 3], 0);
    assert!(!outcome.error, "the second is not in use yet");
    let outcome = output.put(&pattern(0x1800), &caps, &mut guest);
    assert!(outcome.error);
    assert!(
        guest.ram[0x5_0000..0x5_1000].iter().all(|&byte| byte == 0),
        "bytes behind it are lost"
    );
    let (_, ptrs) = output.registers();
    assert_eq!(
        (ptrs.mask_or_table_offset(), ptrs.output_offset()),
        (1, 0),
        "it points at the entry"
    );
}

// covers: pt/topa-single-entry
#[test]
fn the_first_generation_asks_before_its_region_is_full() {
    let caps = caps(&BROADWELL);
    let (mut output, mut guest, _) = table(&caps, &[0x4_0000 | INT, TABLE | END], 0);
    let mut filled = 0;
    let mut asked = Vec::new();
    for chunk in pattern(0x2400).chunks(0x40) {
        filled += chunk.len();
        if output.put(chunk, &caps, &mut guest).pmi {
            asked.push(filled);
        }
    }
    let due = 0x1000 - EARLY_PMI as usize;
    assert_eq!(asked, [due, due + 0x1000], "once a round");
}

// covers: pt/output-nowhere
#[test]
fn data_for_addresses_without_memory_is_dropped() {
    let caps = caps(&SKYLAKE_SERVER);
    let (mut output, mut guest, outcome) = table(&caps, &[1 << 40, 0x4_0000, TABLE | END], 0);
    assert_eq!(outcome, Outcome::default());
    let before = guest.ram.clone();
    assert_eq!(output.put(&pattern(0x1000), &caps, &mut guest), Outcome::default());
    assert!(guest.ram == before);
    assert_eq!(output.put(&pattern(16), &caps, &mut guest), Outcome::default());
    assert_eq!(
        guest.ram[0x4_0000..0x4_0010],
        pattern(16)[..],
        "the next region takes what follows"
    );
}

// covers: pt/topa-offset-wraps
#[test]
fn after_the_last_entry_a_table_begins_anew() {
    let caps = caps(&SKYLAKE_SERVER);
    // The last of 2 to the power of 25 entries, at byte 0FFFFFF8H of a table that begins below the end of RAM.
    let mut guest = Guest {
        ram: vec![0; 0x1000_9000],
        ..Guest::default()
    };
    lay(&mut guest, TABLE, &[0x5_0000]);
    lay(&mut guest, TABLE + 0x0FFF_FFF8, &[0x4_0000]);
    let mut output = GuestMemory::default();
    output.set_registers(TABLE, RtitMaskPtrs::from_bits(0xFFFF_FFFF));
    assert_eq!(output.start(true, false, &caps, &mut guest), Outcome::default());
    assert_eq!(output.put(&pattern(0x1001), &caps, &mut guest), Outcome::default());
    let (_, ptrs) = output.registers();
    assert_eq!((ptrs.mask_or_table_offset(), ptrs.output_offset()), (0, 1));
    assert_eq!(guest.ram[0x5_0000], pattern(0x1001)[0x1000]);
}

// covers: pt/topa-pmi
#[test]
fn the_pmi_of_a_region_is_an_effect_and_a_status_bit() {
    for (inject, model) in [(false, &SKYLAKE_SERVER), (true, &SAPPHIRERAPIDS)] {
        let mut bench = Bench::new(caps(model));
        lay(&mut bench.guest, TABLE, &[0x4_0000 | INT, 0x5_0000, TABLE | END]);
        bench.wrmsr(IA32_RTIT_OUTPUT_BASE, TABLE);
        let ctl = all_rings().with_topa(true).with_inject_psb_pmi_on_enable(inject);
        bench.wrmsr(IA32_RTIT_CTL, ctl.with_trace_en(true).into_bits());
        let mut pmis = 0;
        for n in 0..2000u64 {
            let record = bench.record(Flow::JumpInd, 0x1000, 0x1000 + (n % 7) * 0x1_0000);
            let effects = bench.pt.branches(&[record], &mut bench.guest);
            pmis += u32::from(effects.pmi);
            assert_eq!(
                bench.pt.take_topa_pmi(),
                effects.pmi,
                "the hook for IA32_PERF_GLOBAL_STATUS"
            );
        }
        assert_eq!(pmis, 1, "one region with INT has filled");
        bench.stop();
        assert_eq!(bench.rdmsr(IA32_RTIT_STATUS) >> 7 & 1, u64::from(inject), "PendTopaPMI");
        let again = bench
            .pt
            .write_msr(IA32_RTIT_CTL, ctl.with_trace_en(true).into_bits(), &mut bench.guest);
        assert_eq!(again.expect("no #GP").pmi, inject, "a pending one is injected");
    }
}

// covers: pt/topa-stop
#[test]
fn a_stop_region_ends_the_trace_without_a_packet() {
    let mut bench = Bench::new(caps(&SKYLAKE_SERVER));
    bench.guest.ram[0x4_0000..].fill(0xCC);
    lay(&mut bench.guest, TABLE, &[0x4_0000 | STOP]);
    bench.wrmsr(IA32_RTIT_OUTPUT_BASE, TABLE);
    bench.wrmsr(
        IA32_RTIT_CTL,
        all_rings().with_topa(true).with_trace_en(true).into_bits(),
    );
    for n in 0..4000u64 {
        bench.branch(Flow::JumpInd, 0x1000, 0x1000 + (n % 7) * 0x1_0000);
    }
    let status = x86::pt::RtitStatus::from_bits(bench.rdmsr(IA32_RTIT_STATUS));
    assert!(status.stopped() && !status.trigger_en() && !status.error());
    assert_eq!(bench.offset(), 0x1000);
    assert!(
        bench.guest.ram[0x4_0FF0..0x4_1000].iter().any(|&byte| byte != 0xCC),
        "filled to the end"
    );
    assert!(
        bench.guest.ram[0x4_1000..].iter().all(|&byte| byte == 0xCC),
        "and not beyond"
    );
    assert_eq!(bench.pt.interest(bench.guest.step), x86::watch::Interest::NOTHING);
    bench.stop();
    assert_eq!(bench.offset(), 0x1000, "no TIP.PGD");
}
