//! Counters and transactions: what counts inside, what an abort takes back, and what a record says of it.

use super::*;

const IN_TX: u64 = 1 << 32;
const IN_TXCP: u64 = 1 << 33;
const ABORTED: u64 = EN | OS | USR | 0x04C9;

/// Counters from 0, enabled by the last WRMSR.
fn counting(model: &'static CpuModel, selects: &[u64]) -> Run {
    let mut run = Run::new(model);
    run.area(0x1000, 0x1000, -1000_i64 as u64);
    run.write(IA32_PERF_GLOBAL_CTRL, 0);
    for (n, &select) in selects.iter().enumerate() {
        run.write(IA32_PERFEVTSEL0 + n as u32, select);
    }
    run.core.rip = 0x100;
    run.write(IA32_PERF_GLOBAL_CTRL, (1 << selects.len()) - 1);
    run
}

fn counts<const N: usize>(run: &mut Run) -> [u64; N] {
    std::array::from_fn(|n| run.read(IA32_PMC0 + n as u32))
}

const TAKEN: Do = Do::Branch(Flow::Cond { taken: true });

// covers: pmu/in-tx
#[test]
fn in_tx_counts_inside_and_in_txcp_forgets_what_was_aborted() {
    let select = EN | OS | USR | 0xC4;
    for model in [&ICELAKE_SERVER, &SAPPHIRERAPIDS] {
        let mut run = counting(
            model,
            &[
                INSTRUCTIONS,
                INSTRUCTIONS | IN_TX,
                INSTRUCTIONS | IN_TXCP,
                select | IN_TX,
            ],
        );
        let [base, ..] = counts::<4>(&mut run);
        run.run(&[
            TAKEN,
            Do::Mov(1),
            Do::Begin,
            Do::Mov(2),
            TAKEN,
            Do::Mov(3),
            Do::Commit,
            TAKEN,
        ]);
        // XBEGIN is outside, XEND inside.
        assert_eq!(
            counts::<4>(&mut run),
            [base + 8, 4, base + 8, 1],
            "{}: committed",
            model.name
        );
        run.run(&[
            Do::Begin,
            TAKEN,
            TAKEN,
            Do::Mov(1),
            Do::Abort(Abort::Conflict),
            Do::Mov(4),
        ]);
        assert_eq!(
            counts::<4>(&mut run),
            [base + 13, 7, base + 10, 3],
            "{}: three instructions are not in counter 2",
            model.name
        );
        // Both: only what is in transactions that commit.
        run.write(IA32_PERF_GLOBAL_CTRL, 0);
        run.write(IA32_PERFEVTSEL0 + 2, INSTRUCTIONS | IN_TX | IN_TXCP);
        run.write(IA32_PMC0 + 2, 0);
        run.write(IA32_PERF_GLOBAL_CTRL, 4);
        run.run(&[
            Do::Begin,
            Do::Mov(1),
            Do::Abort(Abort::Capacity),
            Do::Mov(2),
            Do::Begin,
            Do::Mov(3),
            Do::Commit,
        ]);
        assert_eq!(run.read(IA32_PMC0 + 2), 2, "{}", model.name);
    }
}

// covers: pmu/transactions
#[test]
fn transactions_are_events() {
    let event = |event: u64, umask: u64| EN | OS | USR | event | umask << 8;
    for (umask, expected, what) in [
        (0x01, 8, "START"),
        (0x02, 1, "COMMIT"),
        (0x04, 7, "ABORTED"),
        (0x08, 2, "ABORTED_MEM"),
        (0x20, 1, "ABORTED_UNFRIENDLY"),
        (0x40, 1, "ABORTED_MEMTYPE"),
        (0x80, 3, "ABORTED_EVENTS"),
    ] {
        let mut run = counting(&ICELAKE_SERVER, &[event(0xC9, umask), event(0x54, 1), event(0x54, 2)]);
        for cause in [
            Abort::Conflict,
            Abort::Capacity,
            Abort::Instruction,
            Abort::MemoryType,
            Abort::Explicit(3),
            Abort::Exception,
            Abort::Event,
        ] {
            run.run(&[Do::Begin, Do::Mov(1), Do::Abort(cause)]);
        }
        run.run(&[Do::Begin, Do::Commit, Do::Mov(1)]);
        assert_eq!(counts::<3>(&mut run), [expected, 1, 1], "RTM_RETIRED.{what}");
    }
}

// covers: pebs/transactions
#[test]
fn a_record_in_a_transaction_comes_after_the_abort_that_it_makes() {
    // Format 2 and 3: 98H is the data address, B0H the eventing IP, B8H the TX Abort Information.
    for model in [&HASWELL, &SKYLAKE_SERVER] {
        let mut run = counting(model, &[INSTRUCTIONS | 0x100 | INT]);
        run.write(IA32_PEBS_ENABLE, 1);
        run.write(IA32_PMC0, -3_i64 as u64);
        run.core.rip = 0x100;
        // The WRMSR counts, too; the first MOV arms, the second would record.
        run.run(&[Do::Begin, Do::Mov(1), Do::Mov(2)]);
        let name = model.name;
        assert_eq!(run.core.rip, 0x500, "{name}: aborted when the record was due");
        assert_eq!(run.index(), if model.name == "haswell" { 0xC0 } else { 0xC8 }, "{name}");
        let field = |offset: u64| run.core.word(BUFFER + offset);
        assert_eq!(field(0x08), 0x500, "{name}: RIP is the fallback");
        let flags = field(0xB8) >> 32;
        assert_eq!(flags, 0b1010, "{name}: RTM, and no instruction of it");
        assert!(field(0xB8) as u32 > 0, "{name}: cycles");
        assert_eq!(run.pmis.len(), 1, "{name}");
    }
}

// covers: pebs/transactions
#[test]
fn an_abort_can_be_sampled_and_says_why() {
    for (cause, flags) in [
        (Abort::Explicit(9), 0b0000_0110),
        (Abort::Instruction, 0b0000_0110),
        (Abort::Conflict, 0b0011_1010),
        (Abort::Capacity, 0b0100_0110),
        (Abort::Event, 0b0000_1010),
    ] {
        let mut run = counting(&SKYLAKE_SERVER, &[ABORTED | INT]);
        run.write(IA32_PEBS_ENABLE, 1);
        run.write(IA32_PMC0, -1_i64 as u64);
        run.core.rip = 0x200;
        run.run(&[Do::Begin, Do::Mov(1), Do::Abort(cause)]);
        assert_eq!(run.index(), 0, "the first one arms");
        run.core.rip = 0x300;
        run.run(&[Do::Begin, Do::Mov(1), Do::Mov(2), Do::Abort(cause)]);
        assert_eq!(run.index(), 0xC8, "{cause:?}");
        let field = |offset: u64| run.core.word(BUFFER + offset);
        assert_eq!(
            (field(0x08), field(0xB0)),
            (0x500, 0x303),
            "{cause:?}: fallback and eventing IP"
        );
        assert_eq!(field(0x10), u64::from(cause.status()), "{cause:?}: EAX");
        assert_eq!(field(0xB8), flags << 32 | 3, "{cause:?}");
    }
}

// covers: pebs/transactions
#[test]
fn the_adaptive_memory_group_has_the_field_too() {
    let mut run = counting(&ICELAKE_SERVER, &[ABORTED | INT | 1 << 34]);
    run.write(IA32_PEBS_ENABLE, 1);
    run.write(MSR_PEBS_DATA_CFG, 1);
    run.write(IA32_PMC0, -1_i64 as u64);
    for _ in 0..2 {
        run.run(&[Do::Begin, Do::Mov(1), Do::Abort(Abort::Conflict)]);
    }
    assert_eq!(run.index(), 0x40);
    assert_eq!(run.core.word(BUFFER + 0x38), 0b0011_1010 << 32 | 2);
}
