//! Sampling against hand-made streams: the rule at the head of [`crate::unit::ds::pebs`], row by row.

use super::*;
use x86::ds::PRECISE_STORE;

const RECORD: u64 = 0xB0;
/// What counters go on from after a record: far from an overflow.
const RESET: u64 = (-1000_i64) as u64;

/// Counters preset, sampled as `enable` says, enabled by one WRMSR.
fn start(model: &'static CpuModel, counters: &[(u64, i64)], enable: u64, records: u64) -> Run {
    let mut run = Run::new(model);
    run.area(records * RECORD, records * RECORD, RESET);
    run.write(IA32_PERF_GLOBAL_CTRL, 0);
    for (n, &(select, preset)) in counters.iter().enumerate() {
        run.write(IA32_PERFEVTSEL0 + n as u32, select);
        run.write(IA32_PMC0 + n as u32, preset as u64);
    }
    run.write(IA32_PEBS_ENABLE, enable);
    run.core.rip = 0x100;
    // The WRMSR is at 100H, the stream begins at 101H.
    run.write(IA32_PERF_GLOBAL_CTRL, (1 << counters.len()) - 1);
    run
}

fn live(run: &mut Run) -> u64 {
    run.read(IA32_PERF_GLOBAL_STATUS)
}

const BUFFER_BIT: u64 = status::BUFFER;

// covers: pebs/timing
#[test]
fn overflow_arms_and_the_next_event_records() {
    for (preset, eax, ip, why) in [
        (-1, 1, 0x102, "the WRMSR overflows, the first MOV records"),
        (-3, 3, 0x104, "the third MOV, where hardware was seen to be late"),
    ] {
        let mut run = start(&WESTMERE, &[(INSTRUCTIONS | INT, preset)], 1, 4);
        run.run(&movs(10));
        assert_eq!(run.index(), RECORD, "{why}");
        let field = |offset: u64| run.core.word(BUFFER + offset);
        assert_eq!(field(0x00), 0x202, "flags");
        assert_eq!(field(0x08), ip, "{why}: the next instruction");
        assert_eq!(field(0x10), eax, "{why}: EAX after the instruction");
        for (offset, register) in [
            (0x18, 3),
            (0x20, 1),
            (0x28, 2),
            (0x30, 6),
            (0x38, 7),
            (0x40, 5),
            (0x48, 4),
        ] {
            assert_eq!(field(offset), 0x1111 * register, "{offset:#x}");
        }
        for register in 8..16 {
            assert_eq!(field(0x10 + 8 * register), 0x1111 * register, "R{register}");
        }
        assert_eq!(field(0x90), 1, "the bit stands in the record");
        assert_eq!((field(0x98), field(0xA0), field(0xA8)), (0, 0, 0), "no access");
        assert_eq!(live(&mut run), 0, "and is cleared");
        let since = 10 - eax;
        assert_eq!(
            run.read(IA32_PMC0),
            (-1000_i64 + since as i64) as u64 & 0xFFFF_FFFF_FFFF,
            "reset"
        );
        assert_eq!(run.pmis.len(), 1, "INT: one interrupt, with the record");
    }
}

// covers: pebs/timing
#[test]
fn without_int_only_the_threshold_interrupts() {
    let mut run = start(&WESTMERE, &[(INSTRUCTIONS, -1)], 1, 3);
    run.core.set_word(AREA + 0x40, -1_i64 as u64);
    let before = run.core.retired;
    run.run(&movs(5));
    // Reset to -1: an overflow at every second instruction, a record at every other.
    assert_eq!(run.index(), 3 * RECORD);
    assert_eq!(
        run.pmis.iter().map(|at| at - before).collect::<Vec<_>>(),
        [5],
        "the third record, at MOV 5"
    );
    assert_eq!(live(&mut run), BUFFER_BIT);
}

// covers: pebs/two-requests
#[test]
fn a_full_buffer_and_an_overflow_are_two_interrupts() {
    let mut run = start(&WESTMERE, &[(INSTRUCTIONS | INT, -1)], 1, 1);
    run.run(&[Do::Mov(1)]);
    assert_eq!((run.index(), run.pmis.len()), (RECORD, 1), "the first request");
    assert_eq!(live(&mut run), BUFFER_BIT, "both stand: the record, and OvfBuffer");
    assert!(
        run.pmu.unmasked().pmi,
        "the second came through when LVTPC was unmasked"
    );
    assert!(!run.pmu.unmasked().pmi, "once");

    let mut run = start(&WESTMERE, &[(INSTRUCTIONS | INT, -1)], 1, 1);
    run.run(&[Do::Mov(1)]);
    run.write(IA32_PERF_GLOBAL_OVF_CTRL, BUFFER_BIT);
    assert!(!run.pmu.unmasked().pmi, "acknowledged, it does not come");
    assert_eq!(live(&mut run), 0);
}

// covers: pebs/order
#[test]
fn a_plain_counter_goes_before_a_sampling_one_above_it() {
    let both = [(INSTRUCTIONS | INT, -1), (INSTRUCTIONS | INT, -1)];
    let mut run = start(&WESTMERE, &both, 2, 4);
    assert_eq!(run.pmis.len(), 1, "PMC0's interrupt, at the WRMSR");
    assert_eq!(live(&mut run), 3, "both overflow bits");
    run.run(&movs(5));
    assert_eq!(run.index(), 0, "no record while the handler runs");
    run.write(IA32_PERF_GLOBAL_OVF_CTRL, 1);
    assert_eq!(
        run.index(),
        RECORD,
        "acknowledged: the very instruction that does it is the next event"
    );
}

// covers: pebs/order
#[test]
fn a_sampling_counter_goes_before_a_plain_one_above_it() {
    let both = [(INSTRUCTIONS | INT, -1), (INSTRUCTIONS | INT, -1)];
    let mut run = start(&WESTMERE, &both, 1, 4);
    assert!(run.pmis.is_empty(), "PMC1 waits for the record");
    run.run(&[Do::Mov(1)]);
    assert_eq!(run.index(), RECORD);
    assert_eq!(live(&mut run), 2);
    assert_eq!(run.pmis.len(), 1);
    assert!(!run.pmu.unmasked().pmi, "both are overflows: one interrupt");
}

// covers: pebs/order
#[test]
fn simultaneous_plain_overflows_are_one_interrupt() {
    let both = [(INSTRUCTIONS | INT, -2), (INSTRUCTIONS | INT, -2)];
    let mut run = start(&WESTMERE, &both, 0, 1);
    run.run(&movs(9));
    assert_eq!(run.pmis.len(), 1);
    assert_eq!(live(&mut run), 3);
    run.write(IA32_PERF_GLOBAL_OVF_CTRL, 1);
    assert!(!run.pmu.unmasked().pmi);
}

// covers: pebs/order
#[test]
fn two_sampling_counters_take_turns() {
    let both = [(INSTRUCTIONS, -1), (INSTRUCTIONS, -1)];
    let mut run = start(&WESTMERE, &both, 3, 8);
    run.run(&movs(4));
    assert_eq!(run.index(), 2 * RECORD);
    let record = |n: u64, offset: u64| run.core.word(BUFFER + n * RECORD + offset);
    assert_eq!(
        (record(0, 0x10), record(0, 0x90)),
        (1, 3),
        "PMC0 at the first MOV, both bits"
    );
    assert_eq!((record(1, 0x10), record(1, 0x90)), (2, 2), "PMC1 at the second");
}

// covers: pebs/branches
#[test]
fn the_tenth_jump_records_with_all_conditions() {
    // Counter at -10 on instructions, eleven jumps, a buffer of one record: the WRMSR and nine jumps overflow.
    let mut run = start(&WESTMERE, &[(INSTRUCTIONS | INT, -10)], 1, 1);
    let before = run.core.retired;
    run.run(&[JUMP; 11]);
    assert_eq!(run.pmis.iter().map(|at| at - before).collect::<Vec<_>>(), [10]);
    assert_eq!(
        run.core.word(BUFFER + 8),
        0x100 + 11,
        "the instruction after the tenth jump"
    );
    assert_eq!(live(&mut run), BUFFER_BIT);
    assert!(run.pmu.unmasked().pmi, "entered twice");

    // The same on branches, which the WRMSR is none of: the tenth overflows, the eleventh records.
    let mut run = start(&WESTMERE, &[(BRANCHES, -10)], 1, 1);
    run.run(&[JUMP; 10]);
    assert_eq!((run.index(), live(&mut run)), (0, 1));
    run.run(&[Do::Mov(0), JUMP]);
    assert_eq!((run.index(), live(&mut run)), (RECORD, BUFFER_BIT));
}

/// A load that overflows the counter arms it, and the next load that is slow enough is recorded: with its address, its latency and where
/// its data was, by SDM Vol. 3B Table 21-27 "Data Source Encoding for Load Latency Record".
// covers: pebs/load-latency
#[test]
fn loads_slower_than_the_threshold_are_sampled() {
    // Where each load finds its data: a cold line, a warm one, and one that went from the first two levels and not from the last.
    const COLD: u64 = 0x10_9000;
    let warm = [Do::Load(COLD)];
    // 4 KiB and 32 KiB apart: the sets of Westmere's first and second level.
    let evict: Vec<Do> = (1..=16u64).map(|n| Do::Load(COLD + (n << 15))).collect();
    let recorded = |threshold, enable, before: &[Do]| {
        let mut run = start(&WESTMERE, &[(EN | OS | USR | 0x100B, -1)], enable, 8);
        run.write(MSR_PEBS_LD_LAT, threshold);
        // Without an overflow.
        run.write(IA32_PMC0, 0);
        run.run(before);
        run.write(IA32_PMC0, -1_i64 as u64 & 0xFFFF_FFFF);
        run.write(IA32_PERF_GLOBAL_CTRL, 1);
        run.run(&[Do::Load(0x77_0000), Do::Load(COLD)]);
        let field = |offset| run.core.word(BUFFER + offset);
        (run.index() > 0).then(|| (field(0x98), field(0xA8), field(0xA0)))
    };
    let on = 1 << 32 | 1;
    for (threshold, enable, before, expected, why) in [
        (3, on, &[][..], Some((COLD, 200, 0xA)), "from memory"),
        (3, on, &warm, Some((COLD, 4, 1)), "from the first level"),
        (
            3,
            on,
            &[&warm[..], &evict].concat(),
            Some((COLD, 40, 4)),
            "from the last level",
        ),
        (4, on, &warm, None, "as fast as the threshold"),
        (199, on, &[], Some((COLD, 200, 0xA)), "slower than the threshold"),
        (200, on, &[], None, "none takes longer"),
        (3, 1, &[], None, "LL_EN is off"),
    ] {
        assert_eq!(recorded(threshold, enable, before), expected, "{why}");
    }
}

/// Since Golden Cove the latency of the caches and that of the instruction stand apart, which the page walk is a part of.
// covers: pebs/cache-latency
#[test]
fn golden_cove_tells_the_caches_latency_apart() {
    for (model, latencies) in [
        (&ICELAKE_SERVER, [200, 4]),
        (&SAPPHIRERAPIDS, [230 | 200 << 32, 4 | 4 << 32]),
        (&ALDERLAKE, [230 | 200 << 32, 4 | 4 << 32]),
    ] {
        for (load, expected) in [(0x55_0000, latencies[0]), (0x77_0008, latencies[1])] {
            let select = EN | OS | USR | 0x01CD | 1 << 34;
            let mut run = start(model, &[(select, -1)], 1, 8);
            run.write(MSR_PEBS_DATA_CFG, 1);
            run.write(MSR_PEBS_LD_LAT, 3);
            run.run(&[Do::Load(0x77_0000), Do::Load(load)]);
            // Four words, then address, source and latency.
            assert_eq!(run.core.word(BUFFER + 32), load, "{}", model.name);
            assert_eq!(run.core.word(BUFFER + 48), expected, "{} {load:#x}", model.name);
        }
    }
}

// covers: pebs/load-latency
#[test]
fn an_overflow_arms_load_latency_too() {
    let mut run = start(&WESTMERE, &[(EN | OS | USR | 0x100B, -1)], 1 << 32 | 1, 8);
    run.write(MSR_PEBS_LD_LAT, 3);
    run.run(&[Do::Load(0x9000), Do::Mov(0), Do::Load(0xB000)]);
    assert_eq!(run.index(), RECORD, "the first overflows, the second records");
    assert_eq!(run.core.word(BUFFER + 0x98), 0xB000);
}

// covers: pebs/other-events
#[test]
fn an_event_that_cannot_be_sampled_interrupts_plainly() {
    for (model, select, record, why) in [
        (&WESTMERE, CYCLES, false, "cycles"),
        (&WESTMERE, INSTRUCTIONS | 1 << 18, false, "EDGE"),
        (&WESTMERE, INSTRUCTIONS | 1 << 21, false, "ANY"),
        (
            &WESTMERE,
            INSTRUCTIONS | 16 << 24 | 1 << 23,
            true,
            "cycles by INV and CMASK, as Linux samples them",
        ),
        (&CORE2, INSTRUCTIONS | 16 << 24 | 1 << 23, false, "not on Core 2"),
        (&CORE2, INSTRUCTIONS, true, "instructions"),
        (&HASWELL, INSTRUCTIONS, false, "not precise there"),
        (&HASWELL, INSTRUCTIONS | 0x100, true, "INST_RETIRED.PREC_DIST"),
        (&ICELAKE_SERVER, CYCLES, true, "every event"),
        (
            &SANDYBRIDGE,
            EN | OS | USR | 0x02CD,
            false,
            "a precise store without PS_EN",
        ),
    ] {
        let mut run = start(model, &[(select | INT, -2)], 1, 1);
        run.area(0x200, 0x200, 0);
        run.run(&[
            Do::Mov(0),
            Do::Mov(0),
            Do::Store(0x8000),
            Do::Store(0x8000),
            Do::Mov(0),
            Do::Mov(0),
        ]);
        run.tick();
        assert_eq!(run.index() > 0, record, "{} {why}", model.name);
        if select & 1 << 18 == 0 {
            assert_eq!(run.pmis.len(), 1, "{} {why}", model.name);
        }
    }
    let mut run = Run::new(&SANDYBRIDGE);
    run.area(0x200, 0x200, 0);
    run.write(IA32_PEBS_ENABLE, PRECISE_STORE | 8);
    run.write(IA32_PERFEVTSEL0 + 3, EN | OS | USR | 0x02CD);
    run.write(IA32_PMC0 + 3, -1_i64 as u64);
    run.run(&[Do::Store(0x8000), Do::Load(0x8000), Do::Store(0x8008)]);
    assert_eq!(run.index(), RECORD);
    assert_eq!(
        (run.core.word(BUFFER + 0x98), run.core.word(BUFFER + 0xA0)),
        (0x8008, 1),
        "address, hit"
    );
}

// covers: pebs/formats
#[test]
fn records_of_every_format() {
    for (model, select, size) in [
        (&CORE2, INSTRUCTIONS, 0x90),
        (&WESTMERE, INSTRUCTIONS, 0xB0),
        (&SANDYBRIDGE, INSTRUCTIONS | 0x100, 0xB0),
        (&HASWELL, INSTRUCTIONS | 0x100, 0xC0),
        (&SKYLAKE_SERVER, INSTRUCTIONS | 0x100, 0xC8),
        (&SNOWRIDGE, INSTRUCTIONS, 0x20),
    ] {
        let mut run = start(model, &[(select, -1)], 1, 16);
        run.core.set_word(AREA + 0x40, 0);
        run.run(&movs(3));
        assert_eq!(run.index(), size, "{}", model.name);
        let field = |offset: u64| run.core.word(BUFFER + offset);
        if size >= 0xC0 {
            assert_eq!(
                (field(0xB0), field(0xB8)),
                (0x101, 0),
                "{}: the MOV's own address",
                model.name
            );
        }
        if size >= 0xC8 {
            assert_eq!(field(0xC0), 1_000_000 + run.core.step - 2, "{}: TSC", model.name);
        }
        if size == 0x20 {
            assert_eq!(field(0), 0x20 << 48, "the basic group alone");
            assert_eq!((field(8), field(0x10)), (0x101, 1), "eventing IP, the counter");
            assert_eq!(field(0x18), 1_000_000 + run.core.step - 2, "TSC");
        }
    }
}

// covers: pebs/adaptive
#[test]
fn adaptive_records_have_the_groups_that_are_asked_for() {
    const ADAPTIVE: u64 = 1 << 34;
    for (groups, size, memory, gprs, xmms, lbrs) in [
        (0x0, 0x20, None, None, None, None),
        (0x1, 0x40, Some(0x20), None, None, None),
        (0x2, 0xB0, None, Some(0x20), None, None),
        (0x4, 0x120, None, None, Some(0x20), None),
        (0x0200_0008, 0x20 + 72, None, None, None, Some(0x20)),
        (
            0x0100_000F,
            0x40 + 0x90 + 0x100 + 48,
            Some(0x20),
            Some(0x40),
            Some(0xD0),
            Some(0x1D0),
        ),
    ] {
        let mut run = start(&ICELAKE_SERVER, &[(EN | OS | USR | ADAPTIVE | 0x81D0, -1)], 1, 16);
        run.write(MSR_PEBS_DATA_CFG, groups);
        run.run(&[Do::Load(0x9000), Do::Load(0x9010)]);
        assert_eq!(run.index(), size, "{groups:#x}");
        let field = |offset: u64| run.core.word(BUFFER + offset);
        assert_eq!(field(0), groups | size << 48, "{groups:#x}");
        if let Some(at) = memory {
            assert_eq!([0, 8, 16, 24].map(|o| field(at + o)), [0x9010, 1, 4, 0], "{groups:#x}");
        }
        if let Some(at) = gprs {
            assert_eq!((field(at), field(at + 8)), (0x202, run.core.rip), "{groups:#x}");
            (0..16).for_each(|n| assert_eq!(field(at + 16 + 8 * n), 0x1111 * n, "{groups:#x}"));
        }
        if let Some(at) = xmms {
            (0..16).for_each(|n| assert_eq!(field(at + 16 * n + 8), n, "{groups:#x}"));
        }
        if let Some(at) = lbrs {
            for n in 0..=(groups >> 24) {
                assert_eq!(
                    [0, 8, 16].map(|o| field(at + 24 * n + o)),
                    [0x100 + n, 0x200, 0x300],
                    "{groups:#x}"
                );
            }
        }
    }
}

// covers: pebs/fixed
#[test]
fn fixed_counters_sample_where_records_are_adaptive() {
    let mut run = Run::new(&ICELAKE_SERVER);
    run.area(0x400, 0x400, 0);
    run.core.set_word(AREA + 0x80, (-500_i64) as u64);
    run.write(IA32_PERF_GLOBAL_CTRL, 0);
    run.write(IA32_PEBS_ENABLE, 1 << 32);
    run.write(MSR_PEBS_DATA_CFG, 2);
    run.write(IA32_FIXED_CTR_CTRL, 1 << 32 | 3);
    run.write(IA32_FIXED_CTR0, (1 << 48) - 1);
    run.write(IA32_PERF_GLOBAL_CTRL, 1 << 32);
    run.run(&movs(3));
    assert_eq!(run.index(), 0xB0, "with the registers");
    assert_eq!(run.core.word(BUFFER + 0x10), 1 << 32, "fixed counter 0");
    assert_eq!(run.read(IA32_FIXED_CTR0), (1 << 48) - 500 + 2, "its own reset field");
    assert_eq!(run.core.word(BUFFER + 0x20 + 16), 1, "RAX after the first MOV");
}

// covers: pebs/bad-area
#[test]
fn a_bad_area_harms_the_guest_alone() {
    for (base, index, maximum, written, fault, why) in [
        (BUFFER, BUFFER, BUFFER + RECORD, true, false, "room for one"),
        (
            BUFFER,
            BUFFER + RECORD,
            BUFFER + RECORD,
            false,
            false,
            "index = maximum: silently nothing",
        ),
        (BUFFER, BUFFER + 1, BUFFER + RECORD, false, false, "a byte too few"),
        (BUFFER, BUFFER + 1, BUFFER + 2 * RECORD, true, false, "misaligned"),
        (BUFFER, BUFFER - 8, BUFFER + RECORD, false, false, "index below base"),
        (BUFFER, u64::MAX - 8, u64::MAX, false, false, "a record that wraps"),
        (BUFFER, BUFFER, 0, false, false, "maximum below base"),
        (
            END - 8,
            END - 8,
            END + 0x1000,
            false,
            true,
            "the record does not translate",
        ),
        (1 << 47, 1 << 47, u64::MAX, false, true, "not canonical"),
    ] {
        let mut run = start(&WESTMERE, &[(INSTRUCTIONS | INT, -1)], 1, 1);
        for (field, value) in [(4, base), (5, index), (6, maximum), (7, u64::MAX)] {
            run.core.set_word(AREA + 8 * field, value);
        }
        let before = run.core.memory.clone();
        let pmis = run.pmis.len();
        run.run(&[Do::Mov(1)]);
        assert_eq!(run.core.memory != before, written, "{why}");
        assert_eq!(!run.faults.is_empty(), fault, "{why}");
        assert_eq!(run.pmis.len() > pmis, written, "{why}");
        // After a fault the next event tries again; where there was no room the counter goes on counting.
        let armed = run.pmu.state().pebs.armed;
        assert_eq!(armed, u64::from(fault), "{why}");
    }
    // No area at all.
    let mut run = start(&WESTMERE, &[(INSTRUCTIONS, -1)], 1, 1);
    let nowhere = PebsInputs {
        ds_area: 0xFFFF_8000_0000_0000,
        ..PebsInputs::NONE
    };
    run.retire(1);
    let effects = run.pmu.tick(&mut run.core, &nowhere);
    assert_eq!(effects.fault.map(|fault| fault.address), Some(0xFFFF_8000_0000_0020));
}

// covers: pebs/rings
#[test]
fn the_event_that_records_is_of_the_counter_s_ring() {
    let mut run = start(&WESTMERE, &[(INSTRUCTIONS & !OS, -1)], 1, 4);
    run.run(&[
        Do::Mov(1),
        Do::Far(Far::Iret, 3),
        Do::Mov(2),
        Do::Far(Far::Exception, 0),
        Do::Mov(3),
    ]);
    assert_eq!(run.index(), 0, "the only instruction in ring 3 overflowed");
    run.run(&[Do::Far(Far::Iret, 3), Do::Mov(4)]);
    assert_eq!(run.core.word(BUFFER + 0x10), 4, "the next one records");
}
