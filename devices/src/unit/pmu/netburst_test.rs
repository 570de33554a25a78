//! The Pentium 4's counters: what the manual's tables and procedures say, row by row. SDM Vol. 3B 21.6.3 "Performance Monitoring
//! (Processors Based on Intel NetBurst Microarchitecture)".

use super::*;
use x86::pmu::netburst::{Cccr, Escr, pebs_enable};

/// Counters by their names.
const BPU0: u32 = 0;
const BPU2: u32 = 2;
const MS0: u32 = 4;
const FLAME0: u32 = 8;
const IQ0: u32 = 12;
const IQ2: u32 = 14;
const IQ4: u32 = 16;
const IQ5: u32 = 17;

/// An event: its ESCR, ESCR select and event select.
#[derive(Clone, Copy)]
struct Event(u32, u8, u8);

const GLOBAL_POWER: Event = Event(0x3A2, 6, 0x13);
const INSTR_RETIRED: Event = Event(0x3B8, 4, 0x02);
const UOPS_RETIRED: Event = Event(0x3B8, 4, 0x01);
const MISPRED_BRANCH: Event = Event(0x3B8, 4, 0x03);
const BRANCH_RETIRED: Event = Event(0x3CC, 5, 0x06);
const BRANCH_TYPE: Event = Event(0x3C2, 2, 0x04);
const FRONT_END: Event = Event(0x3CC, 5, 0x08);
const EXECUTION: Event = Event(0x3CC, 5, 0x0C);
const REPLAY: Event = Event(0x3CC, 5, 0x09);
const PAGE_WALK: Event = Event(0x3AC, 4, 0x01);
const UOP_TYPE: Event = Event(0x3BC, 2, 0x02);
const PACKED_SP: Event = Event(0x3A4, 1, 0x08);

const PLAIN: Cccr = Cccr::new().with_enable(true).with_active_thread(3);

fn escr(event: Event, mask: u16) -> Escr {
    let escr = Escr::new().with_event(event.2).with_mask(mask);
    escr.with_os(true).with_usr(true)
}

/// Programs an event and its counter, whose CCCR comes last.
fn count(run: &mut Run, counter: u32, event: Event, mask: u16, preset: i64, cccr: Cccr) {
    run.write(event.0, escr(event, mask).into_bits());
    run.write(MSR_BPU_COUNTER0 + counter, preset as u64);
    run.write(MSR_BPU_CCCR0 + counter, cccr.with_select(event.1).into_bits());
}

fn value(run: &mut Run, counter: u32) -> u64 {
    run.read(MSR_BPU_COUNTER0 + counter)
}

fn cccr(run: &mut Run, counter: u32) -> Cccr {
    Cccr::from_bits(run.read(MSR_BPU_CCCR0 + counter))
}

/// A row: the event, its mask, the CCCR, what is counted, and why.
fn counted(stream: &[Do], rows: &[(Event, u32, u16, Cccr, u64, &str)]) {
    for &(event, counter, mask, cccr, expected, why) in rows {
        let mut run = Run::new(&NETBURST);
        count(&mut run, counter, event, mask, 0, cccr);
        run.run(stream);
        assert_eq!(value(&mut run, counter), expected, "{why}");
    }
}

// covers: pmu/netburst-registers
#[test]
fn the_registers_are_those_of_the_manual_s_table() {
    let mut run = Run::new(&NETBURST);
    let there = |msr: u32| match msr {
        0x300..=0x311 | 0x360..=0x371 => true,
        // Model 2 has 45: no second one of the SSU, and none from 3BFH, 3C6H, 3C7H, 3CEH to 3DFH.
        0x3BF | 0x3C6 | 0x3C7 | 0x3CE..=0x3DF => false,
        0x3A0..=0x3E1 | 0x3F0..=0x3F2 => true,
        _ => false,
    };
    for msr in 0x300..0x400 {
        let read = run.pmu.read_msr(msr, &mut run.core, &inputs());
        assert_eq!(
            read,
            if there(msr) { Ok(0) } else { Err(MsrFault::Unclaimed) },
            "{msr:#x}"
        );
    }
    assert_eq!((0x3A0..=0x3E1).filter(|msr| there(*msr)).count(), 45);
    for msr in [IA32_PMC0, IA32_PERFEVTSEL0, IA32_PERF_CAPABILITIES, MSR_OFFCORE_RSP_0] {
        assert_eq!(run.try_write(msr, 0), Err(MsrFault::Unclaimed), "{msr:#x}");
    }
    let writable = |msr: u32| match msr {
        // 40 bits, and negative numbers of 64 are cut.
        0x300..=0x311 => u64::MAX,
        // Bit 11 is there where extended cascading is: counters 12, 15, 16 and 17.
        0x36C | 0x36F | 0x370 | 0x371 => 0xCFFF_F800,
        0x360..=0x371 => 0xCFFF_F000,
        0x3F0 => 0xFFFF_FFFF,
        0x3F1 => 0x0701_9FFF,
        0x3F2 => 0x1FFF,
        _ => 0x7FFF_FFFF,
    };
    for msr in (0x300..0x400).filter(|msr| there(*msr)) {
        for bit in 0..64 {
            let written = run.try_write(msr, 1 << bit);
            let ok = writable(msr) >> bit & 1 != 0;
            assert_eq!(written, if ok { Ok(()) } else { Err(GP) }, "{msr:#x}, bit {bit}");
            if ok {
                let kept = if msr < 0x312 {
                    (1 << bit) & 0xFF_FFFF_FFFF
                } else {
                    1 << bit
                };
                assert_eq!(run.read(msr), kept, "{msr:#x}, bit {bit}");
            }
        }
        run.try_write(msr, 0).unwrap();
    }
}

// covers: pmu/netburst-events
#[test]
fn events_count_what_the_manual_says() {
    let stream = [
        Do::Mov(1),
        Do::Rep(100),
        JUMP,
        Do::Branch(Flow::Cond { taken: false }),
        Do::Branch(Flow::Cond { taken: false }),
        Do::Branch(Flow::Call),
        Do::Branch(Flow::CallInd),
        Do::Branch(Flow::Ret),
        Do::Branch(Flow::JumpInd),
    ];
    // The WRMSR that enables counts, as it does on other parts.
    counted(
        &stream,
        &[
            (INSTR_RETIRED, IQ0, 1, PLAIN, 10, "instructions without a tag: all"),
            (INSTR_RETIRED, IQ0, 3, PLAIN, 10, "both kinds"),
            (INSTR_RETIRED, IQ0, 2, PLAIN, 0, "none is tagged"),
            (INSTR_RETIRED, IQ0, 0xC, PLAIN, 0, "nothing that retires is bogus"),
            (INSTR_RETIRED, IQ4, 1, PLAIN, 10, "counter 16 has the same ESCR"),
            (UOPS_RETIRED, IQ0, 1, PLAIN, 10, "one each"),
            (GLOBAL_POWER, BPU0, 1, PLAIN, 109, "cycles: iterations are cycles"),
            (GLOBAL_POWER, BPU0, 0, PLAIN, 0, "not without RUNNING"),
            (BRANCH_RETIRED, IQ0, 0xF, PLAIN, 7, "every branch"),
            (BRANCH_RETIRED, IQ0, 0x3, PLAIN, 2, "not taken"),
            (BRANCH_RETIRED, IQ0, 0xC, PLAIN, 5, "taken"),
            (BRANCH_TYPE, MS0, 1 << 1, PLAIN, 2, "conditional"),
            (BRANCH_TYPE, MS0, 1 << 2, PLAIN, 2, "calls, direct and indirect"),
            (BRANCH_TYPE, MS0, 1 << 3, PLAIN, 1, "returns"),
            (
                BRANCH_TYPE,
                MS0,
                1 << 4,
                PLAIN,
                3,
                "returns, indirect calls, indirect jumps",
            ),
            (BRANCH_TYPE, MS0, 0x1E, PLAIN, 6, "a direct jump is none of them"),
            (Event(0x3C4, 1, 0x01), MS0, 0x7F, PLAIN, 0, "TC_deliver_mode"),
            (Event(0x3B8, 4, 0x3F), IQ0, 1, PLAIN, 0, "no such event"),
            (INSTR_RETIRED, IQ0, 1, PLAIN.with_enable(false), 0, "not enabled"),
            (
                INSTR_RETIRED,
                IQ0,
                1,
                PLAIN.with_active_thread(0),
                0,
                "while no thread is active",
            ),
            (INSTR_RETIRED, IQ0, 1, PLAIN.with_active_thread(1), 10, "while one is"),
            (INSTR_RETIRED, IQ0, 1, PLAIN.with_active_thread(2), 0, "while both are"),
        ],
    );
    let mispredicted = |event, mask| {
        let mut run = Run::new(&NETBURST);
        count(&mut run, IQ0, event, mask, 0, PLAIN);
        run.run(&stream);
        value(&mut run, IQ0)
    };
    let wrong = mispredicted(MISPRED_BRANCH, 1);
    assert!(wrong > 0, "nothing has been learnt yet");
    assert_eq!(
        mispredicted(BRANCH_RETIRED, 0xA),
        wrong,
        "MMNM and MMTM are the mispredicted ones"
    );
}

// covers: pmu/netburst-wiring
#[test]
fn an_escr_reaches_only_the_counters_that_it_is_wired_to() {
    // Performance Counter MSRs and Associated CCCR and ESCR MSRs: MSR_CRU_ESCR0 is for 12, 13 and 16, MSR_CRU_ESCR1 for 14, 15, 17.
    for (number, select, counters) in [(0x3B8, 4, [12, 13, 16]), (0x3B9, 4, [14, 15, 17])] {
        for counter in 0..18 {
            let mut run = Run::new(&NETBURST);
            count(&mut run, counter, Event(number, select, 2), 1, 0, PLAIN);
            run.run(&movs(3));
            let expected = if counters.contains(&counter) { 4 } else { 0 };
            assert_eq!(value(&mut run, counter), expected, "{number:#x}, counter {counter}");
        }
    }
    for (number, select, counters) in [(0x3A2, 6, [0, 1]), (0x3A3, 6, [2, 3])] {
        for counter in 0..18 {
            let mut run = Run::new(&NETBURST);
            count(&mut run, counter, Event(number, select, 0x13), 1, 0, PLAIN);
            run.run(&movs(3));
            let expected = if counters.contains(&counter) { 4 } else { 0 };
            assert_eq!(value(&mut run, counter), expected, "{number:#x}, counter {counter}");
        }
    }
}

// covers: pmu/netburst-filters
#[test]
fn thresholds_complements_and_edges_filter() {
    let compare = PLAIN.with_compare(true);
    // Two instructions in two cycles, then one with 9 cycles more; the WRMSR is the first.
    let stream = [Do::Mov(1), Do::Mov(2), Do::Rep(10)];
    counted(
        &stream,
        &[
            (INSTR_RETIRED, IQ0, 1, compare, 4, "cycles with more than 0"),
            (INSTR_RETIRED, IQ0, 1, compare.with_threshold(1), 0, "no cycle has two"),
            (
                INSTR_RETIRED,
                IQ0,
                1,
                compare.with_complement(true),
                9,
                "cycles with at most 0",
            ),
            (
                INSTR_RETIRED,
                IQ0,
                1,
                compare.with_complement(true).with_threshold(15),
                13,
                "at most 15: every cycle, which is how cycles are counted by any event",
            ),
            (
                EXECUTION,
                IQ0,
                0xFF,
                compare.with_complement(true).with_threshold(15),
                13,
                "as Linux counts cycles where counter 0 is taken",
            ),
            (
                INSTR_RETIRED,
                IQ0,
                1,
                PLAIN.with_complement(true).with_threshold(15),
                4,
                "nothing of it without the compare flag",
            ),
            (
                GLOBAL_POWER,
                BPU0,
                1,
                compare.with_edge(true),
                1,
                "running all along: once",
            ),
        ],
    );
}

// covers: pmu/netburst-filters
#[test]
fn a_threshold_that_every_cycle_meets_counts_them_all() {
    // Non-Sleep Clockticks: it overrides any qualification that the ESCR has; and Linux asks for it with an ESCR that has no event.
    let every = PLAIN.with_compare(true).with_complement(true).with_threshold(15);
    for (escr, select, why) in [
        (Escr::new().with_event(2).with_mask(1).with_usr(true), 4, "ring 3 alone"),
        (Escr::new(), 4, "no event"),
        (Escr::new(), 0, "of another ESCR"),
    ] {
        let mut run = Run::new(&NETBURST);
        run.write(0x3B8, escr.into_bits());
        run.write(MSR_BPU_CCCR0 + IQ0, every.with_select(select).into_bits());
        run.run(&[Do::Mov(1), Do::Rep(10), Do::Far(Far::Iret, 3), Do::Mov(2)]);
        assert_eq!(value(&mut run, IQ0), 14, "{why}");
    }
}

// covers: pmu/netburst-rings
#[test]
fn rings_are_the_escr_s_and_of_the_first_thread() {
    let stream = [
        Do::Mov(1),
        Do::Far(Far::Iret, 3),
        Do::Mov(2),
        Do::Mov(3),
        Do::Far(Far::SoftwareInterrupt, 0),
        Do::Mov(4),
    ];
    for (escr, expected, why) in [
        (Escr::new().with_os(true), 4, "MOV, IRET, MOV, and the WRMSR"),
        (
            Escr::new().with_usr(true),
            3,
            "two MOVs and INT, which begins in ring 3",
        ),
        (Escr::new().with_os(true).with_usr(true), 7, "all"),
        (Escr::new().with_t1_os(true).with_t1_usr(true), 0, "of the other thread"),
    ] {
        let mut run = Run::new(&NETBURST);
        run.write(0x3B8, escr.with_event(2).with_mask(1).into_bits());
        run.write(MSR_BPU_CCCR0 + IQ0, PLAIN.with_select(4).into_bits());
        run.run(&stream);
        assert_eq!(value(&mut run, IQ0), expected, "{why}");
    }
}

// covers: pmu/netburst-overflow
#[test]
fn an_overflow_sets_its_flag_and_interrupts_with_the_next_event() {
    let asks = PLAIN.with_interrupt(true);
    // Generating an Interrupt on Overflow: for an interrupt after 100 events the counter is preset to -99.
    let mut run = Run::new(&NETBURST);
    count(&mut run, MS0, BRANCH_TYPE, 1 << 1, -99, asks);
    let branch = Do::Branch(Flow::Cond { taken: false });
    run.run(&[branch; 98]);
    assert!(!cccr(&mut run, MS0).overflow());
    run.run(&[branch]);
    assert!(cccr(&mut run, MS0).overflow(), "99 events overflow");
    assert_eq!((value(&mut run, MS0), run.pmis.len()), (0, 0));
    run.run(&[Do::Mov(1), branch]);
    assert_eq!(run.pmis, [run.core.retired], "the hundredth interrupts");
    assert!(cccr(&mut run, MS0).overflow(), "the flag is sticky");
    run.run(&[branch; 10]);
    assert_eq!((value(&mut run, MS0), run.pmis.len()), (11, 1), "it counts on");

    // Instructions, a batch at a time.
    let mut run = Run::new(&NETBURST);
    count(&mut run, IQ0, INSTR_RETIRED, 1, -99, asks);
    let before = run.core.retired;
    run.run(&movs(200));
    // The WRMSR was the first of them.
    assert_eq!(run.pmis, [before + 99]);

    for (cccr, why) in [
        (PLAIN, "without OVF_PMI"),
        (PLAIN.with_t1_interrupt(true), "for the other thread"),
    ] {
        let mut run = Run::new(&NETBURST);
        count(&mut run, IQ0, INSTR_RETIRED, 1, -5, cccr);
        run.run(&movs(20));
        assert!(run.pmis.is_empty(), "{why}");
    }

    // Software clears the flag before the next event: nothing is left to tell of.
    let mut run = Run::new(&NETBURST);
    count(&mut run, MS0, BRANCH_TYPE, 1 << 1, -1, asks);
    run.run(&[branch]);
    run.write(MSR_BPU_CCCR0 + MS0, asks.with_select(2).into_bits());
    run.run(&[branch; 3]);
    assert!(run.pmis.is_empty());
}

// covers: pmu/netburst-overflow
#[test]
fn force_ovf_makes_every_increment_an_overflow() {
    let branch = Do::Branch(Flow::Cond { taken: false });
    let mut run = Run::new(&NETBURST);
    let forced = PLAIN.with_force_overflow(true).with_interrupt(true);
    count(&mut run, MS0, BRANCH_TYPE, 1 << 1, 0, forced);
    run.run(&[branch, branch, Do::Mov(1), branch]);
    assert_eq!(value(&mut run, MS0), 3);
    assert_eq!(run.pmis.len(), 2, "from the second on");
    assert!(cccr(&mut run, MS0).overflow());
}

// covers: pmu/netburst-cascade
#[test]
fn a_cascaded_counter_counts_once_the_other_has_overflowed() {
    // Example: X counts 200 events of A, then Y counts 400 of B and interrupts.
    let branch = Do::Branch(Flow::Cond { taken: false });
    for (x, y) in [(IQ0, IQ2), (IQ2, IQ0)] {
        let (a, b) = if x == IQ0 { (0x3CC, 0x3B9) } else { (0x3CD, 0x3B8) };
        let mut run = Run::new(&NETBURST);
        count(
            &mut run,
            y,
            Event(b, 4, 2),
            1,
            -400,
            PLAIN.with_enable(false).with_cascade(true).with_interrupt(true),
        );
        count(&mut run, x, Event(a, 5, 6), 0xF, -200, PLAIN);
        run.run(&[branch; 200]);
        assert_eq!(value(&mut run, x), 0);
        assert!(cccr(&mut run, x).overflow());
        assert_eq!(
            value(&mut run, y),
            (-400_i64) as u64 & 0xFF_FFFF_FFFF,
            "it begins with the next"
        );
        let before = run.core.retired;
        run.run(&movs(500));
        assert_eq!(value(&mut run, y), 100);
        assert_eq!(run.pmis, [before + 401]);
        // To halt it, the OVF flag of the other is cleared.
        run.write(MSR_BPU_CCCR0 + x, PLAIN.with_select(5).into_bits());
        let stands = value(&mut run, y);
        run.run(&movs(5));
        assert_eq!(value(&mut run, y), stands);
    }
    // 12 starts 14; 14 starts 16, which 12 does not; 16 starts none by its flag.
    for (x, y, starts, why) in [
        (12, 14, true, "the other pair of the block"),
        (13, 15, true, "the same"),
        (13, 14, false, "not the one at the other place"),
        (14, 16, true, "16 only from 14"),
        (12, 16, false, "not from 12"),
        (16, 14, false, "nor from 16 to 14"),
        (15, 17, true, "17 only from 15"),
        (13, 17, false, "not from 13"),
        (0, 2, true, "in the BPU"),
        (0, 1, false, "not within a pair"),
    ] {
        let mut run = Run::new(&NETBURST);
        run.write(MSR_BPU_CCCR0 + x, Cccr::new().with_overflow(true).into_bits());
        let second = u32::from(matches!(y, 2 | 3 | 14 | 15 | 17));
        let event = if y < 4 {
            Event(0x3A2 + second, 6, 0x13)
        } else {
            Event(0x3B8 + second, 4, 2)
        };
        count(&mut run, y, event, 1, 0, PLAIN.with_enable(false).with_cascade(true));
        run.run(&movs(3));
        assert_eq!(value(&mut run, y) != 0, starts, "{x} and {y}: {why}");
    }
}

// covers: pmu/netburst-cascade
#[test]
fn counters_16_and_17_cascade_by_bit_11() {
    // CCR Names and Bit Positions: CASCNT4INTO0, CASCNT5INTO3, CASCNT5INTO4, CASCNT4INTO5.
    for (from, into) in [(IQ4, IQ0), (IQ5, 15), (IQ5, IQ4), (IQ4, IQ5)] {
        let mut run = Run::new(&NETBURST);
        run.write(MSR_BPU_CCCR0 + from, Cccr::new().with_overflow(true).into_bits());
        let second = u32::from(matches!(into, 15 | 17));
        let cccr = PLAIN.with_enable(false).with_extended_cascade(true);
        count(&mut run, into, Event(0x3B8 + second, 4, 2), 1, 0, cccr);
        run.run(&movs(3));
        assert_eq!(value(&mut run, into), 4, "{from} into {into}");
        run.write(MSR_BPU_CCCR0 + from, 0);
        let stands = value(&mut run, into);
        run.run(&movs(3));
        assert_eq!(value(&mut run, into), stands);
    }
}

// covers: pmu/netburst-rdpmc
#[test]
fn rdpmc_reads_40_bits_or_the_low_32() {
    let mut run = Run::new(&NETBURST);
    for counter in 0..18 {
        run.write(MSR_BPU_COUNTER0 + counter, 0xAB_1234_5678 + u64::from(counter));
    }
    let mut read = |index| run.pmu.rdpmc(index, &mut run.core, &inputs());
    for counter in 0..18 {
        assert_eq!(read(counter), Ok(0xAB_1234_5678 + u64::from(counter)));
        assert_eq!(read(1 << 31 | counter), Ok(0x1234_5678 + u64::from(counter)), "fast");
    }
    for index in [18, 1 << 30, 1 << 29, 1 << 31 | 18, u32::MAX] {
        assert_eq!(read(index), Err(GP), "{index:#x}");
    }
}

// covers: pmu/netburst-tags
#[test]
fn the_front_end_tags_loads_and_stores() {
    let stream = [Do::Load(0x100), Do::Store(0x200), Do::Load(0x300), Do::Mov(1)];
    for (tags, loads, stores, why) in [
        (1 << 1, 2, 0, "TAGLOADS"),
        (1 << 2, 0, 1, "TAGSTORES"),
        (3 << 1, 2, 1, "both"),
        (0, 0, 0, "neither"),
    ] {
        let with = |event, counter, mask| {
            let mut run = Run::new(&NETBURST);
            run.write(UOP_TYPE.0, escr(UOP_TYPE, tags).into_bits());
            count(&mut run, counter, event, mask, 0, PLAIN);
            run.run(&stream);
            value(&mut run, counter)
        };
        assert_eq!(with(FRONT_END, IQ0, 1), loads + stores, "{why}");
        assert_eq!(with(FRONT_END, IQ0, 2), 0, "none is bogus");
        assert_eq!(with(INSTR_RETIRED, IQ0, 2), loads + stores, "{why}: NBOGUSTAG");
        assert_eq!(with(INSTR_RETIRED, IQ0, 1), 5 - loads - stores, "{why}: NBOGUSNTAG");
        assert_eq!(with(INSTR_RETIRED, IQ0, 3), 5, "{why}: both");
    }
    // The rings of the ESCR that tags.
    let mut run = Run::new(&NETBURST);
    run.write(UOP_TYPE.0, escr(UOP_TYPE, 1 << 1).with_os(false).into_bits());
    count(&mut run, IQ0, FRONT_END, 1, 0, PLAIN);
    run.run(&[Do::Load(0x100), Do::Far(Far::Iret, 3), Do::Load(0x100)]);
    assert_eq!(value(&mut run, IQ0), 1, "ring 3 alone");
}

// covers: pmu/netburst-tags
#[test]
fn execution_units_tag_by_value() {
    // ADDPS at 7000H, MOV at 7003H.
    let ran = |tag: u8, enable: bool, mask: u16, event: Event, counter: u32| {
        let mut run = Run::new(&NETBURST);
        let upstream = escr(PACKED_SP, 1 << 15).with_tag_enable(enable).with_tag_value(tag);
        run.write(PACKED_SP.0, upstream.into_bits());
        if event.0 == PACKED_SP.0 {
            run.write(MSR_BPU_CCCR0 + counter, PLAIN.with_select(event.1).into_bits());
        } else {
            count(&mut run, counter, event, mask, 0, PLAIN);
        }
        run.core.memory[0x3000..0x3006].copy_from_slice(&[0x0F, 0x58, 0xC1, 0x90, 0x90, 0x90]);
        for at in [0x3000, 0x3003, 0x3000, 0x3004] {
            let effects = run.pmu.before(at, &mut run.core, &inputs());
            run.said(effects);
            run.run(&[Do::Mov(1)]);
        }
        value(&mut run, counter)
    };
    assert_eq!(
        ran(0, false, 0, PACKED_SP, FLAME0),
        2,
        "counted where they are executed"
    );
    for (tag, enable, mask, expected, why) in [
        (1, true, 1, 2, "NBOGUS0 goes with the lowest tag"),
        (2, true, 2, 2, "NBOGUS1 with the next"),
        (2, true, 1, 0, "another tag"),
        (3, true, 2, 2, "one of two"),
        (1, false, 1, 0, "the tag is not enabled"),
        (1, true, 0x10, 0, "BOGUS0"),
    ] {
        assert_eq!(ran(tag, enable, mask, EXECUTION, IQ0), expected, "{why}");
    }
}

// covers: pmu/netburst-tags
#[test]
fn replays_are_tagged_by_the_two_registers_for_it() {
    // Twice the same two lines: the second time they are in the first level, and their pages in the TLB.
    let stream = [
        Do::Load(0x1_0000),
        Do::Store(0x2_0000),
        Do::Load(0x1_0000),
        Do::Store(0x2_0000),
        // Split over two lines, which is a replay of its own.
        Do::Load(0x1_003C),
    ];
    let with = |enable: u64, vert: u64, saat: u16| {
        let mut run = Run::new(&NETBURST);
        run.write(IA32_PEBS_ENABLE, enable);
        run.write(MSR_PEBS_MATRIX_VERT, vert);
        if saat != 0 {
            run.write(0x3AE, escr(Event(0x3AE, 2, 4), saat).into_bits());
        }
        count(&mut run, IQ0, REPLAY, 1, 0, PLAIN);
        run.run(&stream);
        value(&mut run, IQ0)
    };
    const TAG: u64 = pebs_enable::TAG;
    // List of Metrics Available for Replay Tagging.
    for (enable, vert, saat, expected, why) in [
        (
            TAG | 1,
            1,
            0,
            2,
            "1stL_cache_load_miss_retired: the first load, and the second line of the split one",
        ),
        (1, 1, 0, 2, "with neither bit 24 nor bit 25"),
        (pebs_enable::MY_THREAD | 1, 1, 0, 0, "sampling without tags"),
        (TAG | 2, 1, 0, 2, "2ndL_cache_load_miss_retired"),
        (TAG | 4, 1, 0, 1, "DTLB_load_miss_retired"),
        (TAG | 4, 2, 0, 1, "DTLB_store_miss_retired"),
        (TAG | 4, 3, 0, 2, "DTLB_all_miss_retired"),
        (TAG | 1 << 10, 1, 2, 1, "split_load_retired"),
        (TAG | 1 << 10, 1, 0, 0, "which load_port_replay has to select"),
        (TAG | 1, 0, 0, 0, "of no micro-operations"),
        (TAG, 1, 0, 0, "no replay"),
    ] {
        assert_eq!(with(enable, vert, saat), expected, "{why}");
    }
    let mut run = Run::new(&NETBURST);
    run.write(IA32_PEBS_ENABLE, TAG | 0x1_8000);
    run.write(MSR_PEBS_MATRIX_VERT, 0x10);
    count(&mut run, IQ0, REPLAY, 1, 0, PLAIN);
    count(&mut run, IQ2, Event(0x3B9, 4, 3), 1, 0, PLAIN);
    run.run(&[Do::Branch(Flow::Cond { taken: true }), Do::Branch(Flow::Ret)]);
    assert!(value(&mut run, IQ2) > 0);
    assert_eq!(value(&mut run, IQ0), value(&mut run, IQ2), "tagged_mispred_branch");
}

// covers: pmu/netburst-events
#[test]
fn page_walks_are_those_of_data_and_of_code() {
    let stream = [Do::Load(0x1_0000), Do::Store(0x2_0000), Do::Load(0x1_0000), JUMP, JUMP];
    for (mask, expected, why) in [(1, 2, "DTMISS"), (2, 1, "ITMISS"), (3, 3, "both")] {
        let mut run = Run::new(&NETBURST);
        count(&mut run, BPU0, PAGE_WALK, mask, 0, PLAIN);
        run.run(&stream);
        run.tick();
        assert_eq!(value(&mut run, BPU0), expected, "{why}");
    }
}

/// A 32-bit debug-store area: room for records of 28H bytes, threshold after so many.
fn area(run: &mut Run, records: u64, threshold: u64, reset: u64) {
    let words = [BUFFER, BUFFER, BUFFER + 0x28 * records, BUFFER + 0x28 * threshold];
    for (field, value) in words.into_iter().enumerate() {
        let at = AREA as usize + 0x10 + 4 * field;
        run.core.memory[at..at + 4].copy_from_slice(&(value as u32).to_le_bytes());
    }
    run.core.set_word(AREA + 0x20, reset);
}

fn word(run: &Run, at: u64) -> u32 {
    run.core.word(at) as u32
}

// covers: pebs/netburst
#[test]
fn counter_16_samples_at_retirement() {
    let mut run = Run::new(&NETBURST);
    area(&mut run, 3, 2, (-2_i64) as u64);
    run.write(IA32_PEBS_ENABLE, pebs_enable::TAG | pebs_enable::MY_THREAD);
    run.write(UOP_TYPE.0, escr(UOP_TYPE, 1 << 1).into_bits());
    count(&mut run, IQ4, FRONT_END, 1, -1, PLAIN);
    run.core.rip = 0x100;
    run.run(&[
        Do::Load(0x100),
        Do::Mov(0x77),
        Do::Mov(0x78),
        Do::Load(0x108),
        Do::Mov(1),
    ]);
    // The first load overflows, the second is recorded.
    assert_eq!(word(&run, AREA + 0x14) - BUFFER as u32, 0x28, "the index");
    assert_eq!(word(&run, BUFFER), 0x202, "EFLAGS");
    assert_eq!(word(&run, BUFFER + 4), 0x104, "linear IP: behind the load");
    assert_eq!(word(&run, BUFFER + 8), 0x78, "EAX");
    // EBX, ECX, EDX, ESI, EDI, EBP, ESP.
    for (place, register) in [3, 1, 2, 6, 7, 5, 4].into_iter().enumerate() {
        let expected = 0x1111 * register as u32;
        assert_eq!(word(&run, BUFFER + 0xC + 4 * place as u64), expected, "{register}");
    }
    assert_eq!(
        value(&mut run, IQ4),
        (-2_i64) as u64 & 0xFF_FFFF_FFFF,
        "the reset value"
    );
    assert!(run.pmis.is_empty(), "the buffer has room up to the threshold");
    // Two more overflow, the third is recorded and reaches the threshold; the one after that has no room for its interrupt.
    run.run(&[Do::Load(0x100); 3]);
    assert_eq!(word(&run, AREA + 0x14) - BUFFER as u32, 0x50);
    assert_eq!(run.pmis, [run.core.retired]);
}

// covers: pebs/netburst
#[test]
fn only_counter_16_and_three_events_sample() {
    for (counter, event, mask, enable, samples, why) in [
        (
            IQ4,
            FRONT_END,
            1,
            pebs_enable::TAG | pebs_enable::MY_THREAD,
            true,
            "front_end_event",
        ),
        (IQ4, FRONT_END, 1, pebs_enable::TAG, false, "bit 25 samples"),
        (
            IQ4,
            FRONT_END,
            1,
            pebs_enable::TAG | pebs_enable::OTHER_THREAD,
            false,
            "the other thread does",
        ),
        (
            IQ0,
            FRONT_END,
            1,
            pebs_enable::TAG | pebs_enable::MY_THREAD,
            false,
            "counter 12 cannot",
        ),
        (
            IQ4,
            INSTR_RETIRED,
            1,
            pebs_enable::TAG | pebs_enable::MY_THREAD,
            false,
            "instr_retired cannot",
        ),
    ] {
        let mut run = Run::new(&NETBURST);
        area(&mut run, 9, 9, (-100_i64) as u64);
        run.write(IA32_PEBS_ENABLE, enable);
        run.write(UOP_TYPE.0, escr(UOP_TYPE, 1 << 1).into_bits());
        count(&mut run, counter, event, mask, -1, PLAIN.with_interrupt(true));
        run.run(&[Do::Load(0x100); 3]);
        assert_eq!(word(&run, AREA + 0x14) != BUFFER as u32, samples, "{why}");
        assert_eq!(run.pmis.is_empty(), samples, "{why}: an interrupt instead");
    }
}

// covers: pmu/netburst-state
#[test]
fn the_state_goes_out_and_comes_back_at_every_instruction() {
    let branch = Do::Branch(Flow::Cond { taken: false });
    let stream = [
        Do::Load(0x100),
        branch,
        Do::Mov(1),
        branch,
        Do::Store(0x200),
        branch,
        Do::Load(0x108),
    ];
    let set_up = || {
        let mut run = Run::new(&NETBURST);
        area(&mut run, 3, 1, (-2_i64) as u64);
        run.write(IA32_PEBS_ENABLE, pebs_enable::TAG | pebs_enable::MY_THREAD);
        run.write(UOP_TYPE.0, escr(UOP_TYPE, 3 << 1).into_bits());
        count(&mut run, MS0, BRANCH_TYPE, 1 << 1, -1, PLAIN.with_interrupt(true));
        count(&mut run, BPU2, Event(0x3A3, 6, 0x13), 1, 0, PLAIN);
        count(&mut run, IQ4, FRONT_END, 1, -1, PLAIN);
        run
    };
    let mut whole = set_up();
    whole.run(&stream);
    for stop in 0..stream.len() {
        let mut run = set_up();
        run.run(&stream[..stop]);
        run.hand_over();
        let state = run.pmu.state();
        run.pmu = pmu(&NETBURST).unwrap();
        run.pmu.set_state(&state);
        assert_eq!(run.pmu.state(), state);
        run.ask();
        run.run(&stream[stop..]);
        run.tick();
        for counter in [MS0, BPU2, IQ4] {
            assert_eq!(
                value(&mut run, counter),
                value(&mut whole, counter),
                "{stop}: {counter}"
            );
        }
        assert_eq!(run.pmis, whole.pmis, "{stop}");
        assert_eq!(run.core.memory, whole.core.memory, "{stop}");
    }
    // A reset clears all but the counting itself.
    whole.change(Change::Reset);
    assert_eq!(whole.read(MSR_BPU_CCCR0 + MS0), 0);
    assert_eq!(whole.read(BRANCH_TYPE.0), 0);
}

// covers: pmu/netburst-events
#[test]
fn an_event_that_counts_nothing_is_told_of() {
    let mut run = Run::new(&NETBURST);
    let told = |run: &mut Run, event: Event, mask: u16, counter: u32, cccr: Cccr| {
        run.write(event.0, escr(event, mask).into_bits());
        let value = cccr.with_select(event.1).into_bits();
        run.pmu.counts_nothing(MSR_BPU_CCCR0 + counter, value)
    };
    assert_eq!(told(&mut run, INSTR_RETIRED, 1, IQ0, PLAIN), None);
    assert_eq!(
        told(&mut run, INSTR_RETIRED, 0xC, IQ0, PLAIN),
        Some((2, 0xC)),
        "bogus ones"
    );
    assert_eq!(
        told(&mut run, Event(0x3C4, 1, 0x06), 0x10, MS0, PLAIN),
        Some((6, 0x10)),
        "TC_misc"
    );
    assert_eq!(
        told(&mut run, Event(0x3C4, 1, 0x06), 0x10, MS0, PLAIN.with_enable(false)),
        None
    );
}
