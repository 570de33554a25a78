//! PEBS records in the processor trace: the same program sends its records there and into the debug-store area, and finds
//! the same in both. SDM Vol. 3B 21.5.5.2 "PEBS Output to Intel Processor Trace".

use guest_tests::flat::{CODE, DATA, Flat, TRACE, wrmsr};
use iced_x86::Decoder as Code;
use iced_x86::IcedError;
use iced_x86::code_asm::*;
use pt_flow::{Block, Chunk, Decoder, Event, EventKind, Sections, Timing, Visitor};
use pt_packet::Packet;
use x86::model::{MODELS, SNOWRIDGE};
use x86::msr::*;
use x86::pt::RtitCtl;

const AREA: u64 = DATA;
const BUFFER: u64 = DATA + 0x1000;
const OSFXSR: u64 = 1 << 9;
const OUTPUT_TRACE: u64 = 1 << 61;
const PMI_EACH: u64 = 1 << 60;
/// All groups, twelve last-branch records: two blocks of them.
const ALL_GROUPS: u64 = 0xF | 11 << 24;
/// Instructions retired, all rings; adaptive.
const SELECT: u64 = 1 << 34 | 1 << 22 | 3 << 16 | 0xC0;
const CTL: RtitCtl = RtitCtl::new().with_trace_en(true).with_os(true).with_branch_en(true);
/// Records that the program makes.
const RECORDS: usize = 6;

/// Every third instruction of a run of moves and branches is sampled, by counter 0 or fixed counter 0.
fn program(a: &mut CodeAssembler, enable: u64, groups: u64, fixed: bool) -> Result<(), IcedError> {
    const PRESET: u64 = (1 << 48) - 2;
    // At reset the general counters are on.
    wrmsr(a, IA32_PERF_GLOBAL_CTRL, 0)?;
    wrmsr(a, IA32_DS_AREA, AREA)?;
    wrmsr(a, MSR_PEBS_DATA_CFG, groups)?;
    wrmsr(a, MSR_LBR_SELECT, 0)?;
    wrmsr(a, IA32_DEBUGCTL, 1)?;
    wrmsr(a, IA32_RTIT_OUTPUT_BASE, TRACE)?;
    wrmsr(a, IA32_RTIT_OUTPUT_MASK_PTRS, 0xF_FFFF)?;
    wrmsr(a, IA32_RTIT_CTL, CTL.into_bits())?;
    let (counter, reload, number) = if fixed {
        (IA32_FIXED_CTR0, MSR_RELOAD_FIXED_CTR0, 32)
    } else {
        (IA32_A_PMC0, MSR_RELOAD_PMC0, 0)
    };
    wrmsr(a, counter, PRESET)?;
    wrmsr(a, reload, PRESET)?;
    if fixed {
        wrmsr(a, IA32_FIXED_CTR_CTRL, 1 << 32 | 3)?;
    } else {
        wrmsr(a, IA32_PERFEVTSEL0, SELECT)?;
    }
    wrmsr(a, IA32_PEBS_ENABLE, enable | 1 << number)?;
    wrmsr(a, IA32_PERF_GLOBAL_CTRL, 1 << number)?;
    for n in 1..=RECORDS as u32 {
        let mut next = a.create_label();
        a.mov(eax, n)?;
        a.cvtsi2sd(xmm3, eax)?;
        a.lea(rsi, ptr(next))?;
        a.jmp(rsi)?;
        a.set_label(&mut next)?;
        a.nop()?;
    }
    wrmsr(a, IA32_PERF_GLOBAL_CTRL, 0)?;
    wrmsr(a, IA32_RTIT_CTL, 0)?;
    a.hlt()
}

fn run(enable: u64, groups: u64, fixed: bool) -> Flat {
    let mut flat = Flat::new(&SNOWRIDGE, OSFXSR, |a| program(a, enable, groups, fixed));
    // The management area: base, index, maximum, threshold; then the resets of general and fixed counters.
    for (n, value) in [BUFFER, BUFFER, BUFFER + 0x8000, BUFFER + 0x8000]
        .into_iter()
        .enumerate()
    {
        flat.write(AREA + 0x20 + 8 * n as u64, &value.to_le_bytes());
    }
    for reset in [0, 8] {
        flat.write(AREA + 0x40 + 8 * reset, &((1u64 << 48) - 2).to_le_bytes());
    }
    flat.state(|s| s.fpu.xmm[5] = 0x0123_4567_89AB_CDEF_0011_2233_4455_6677);
    flat.run().unwrap();
    flat
}

fn words(flat: &Flat, at: u64, count: usize) -> Vec<u64> {
    (0..count as u64).map(|n| flat.word(at + 8 * n)).collect()
}

/// Records in the trace: type and values of each group; and where the FUP after each stands.
type Groups = Vec<(u8, Vec<u64>)>;
fn in_trace(flat: &Flat) -> Vec<(Groups, u64)> {
    let trace = flat.read(TRACE, 0x8000);
    let (mut records, mut groups, mut ended) = (Vec::new(), Groups::new(), false);
    for item in pt_packet::Decoder::new(&trace) {
        match item.expect("packets").packet {
            Packet::Bbp { kind, .. } => groups.push((kind, Vec::new())),
            Packet::Bip { id, value, .. } => {
                let (_, values) = groups.last_mut().expect("a block has begun");
                assert_eq!(usize::from(id), values.len(), "identifiers in order");
                values.push(value);
            }
            Packet::Bep { ip } => ended = ip,
            Packet::Fup(Some(ip)) if std::mem::take(&mut ended) => {
                records.push((std::mem::take(&mut groups), ip));
            }
            _ => {}
        }
    }
    records
}

// covers: pebs/trace
#[test]
fn what_is_in_the_trace_is_what_would_be_in_the_buffer() {
    for fixed in [false, true] {
        for groups in [0, 1, 2, 4, 8 | 31 << 24, ALL_GROUPS] {
            let (stored, traced) = (run(0, groups, fixed), run(OUTPUT_TRACE, groups, fixed));
            let what = format!("groups {groups:x}, fixed {fixed}");
            let records = in_trace(&traced);
            let size = x86::ds::data_cfg::size(groups);
            let index = stored.word(AREA + 0x28);
            assert_eq!(index, BUFFER + size * records.len() as u64, "{what}: {records:x?}");
            assert!(records.len() >= RECORDS, "{what}: {}", records.len());
            assert_eq!(traced.word(AREA + 0x28), BUFFER, "{what}: nothing in the buffer");
            assert_eq!(in_trace(&stored), [], "{what}: nothing in the trace");
            for (n, (found, fup)) in records.iter().enumerate() {
                let at = BUFFER + size * n as u64;
                let mut expected = vec![(4u8, words(&stored, at + 8, 3))];
                let mut at = at + 32;
                for (group, kind, count) in [(1, 5, 4), (2, 1, 18), (4, 16, 32)] {
                    if groups & group != 0 {
                        expected.push((kind, words(&stored, at, count)));
                        at += 8 * count as u64;
                    }
                }
                if groups & 8 != 0 {
                    // As many as 30 go into the trace, ten in a block.
                    let count = ((groups >> 24) as usize + 1).min(30);
                    let entries = words(&stored, at, 3 * count);
                    expected.extend((8..).zip(entries.chunks(30).map(<[u64]>::to_vec)));
                }
                // The control registers differ, and so the register that held them; nothing else does.
                assert_eq!(found, &expected, "{what}: record {n}");
                let eventing = found[0].1[0];
                let next = Code::with_ip(64, &traced.code()[(eventing - CODE) as usize..], eventing, 0).decode();
                let jump = next.is_jmp_near_indirect();
                assert!(*fup == next.next_ip() || jump, "{what}: the FUP is behind {eventing:x}");
            }
        }
    }
}

// covers: pebs/trace
#[test]
fn our_flow_decoder_reads_past_the_blocks() {
    #[derive(Default)]
    struct Log(Vec<u64>, Vec<EventKind>);
    impl Visitor for Log {
        fn block(&mut self, block: &Block) {
            self.0.push(block.ip);
        }
        fn event(&mut self, event: &Event) {
            if let EventKind::Gap(_) = event.kind {
                self.1.push(event.kind);
            }
        }
    }
    let flat = run(OUTPUT_TRACE, ALL_GROUPS, false);
    let trace = flat.read(TRACE, 0x8000);
    let mut image = Sections::new();
    image.add(CODE, flat.code());
    let mut log = Log::default();
    Decoder::new(image, Timing::default()).decode(&Chunk::whole(&trace), &mut log);
    assert!(log.1.is_empty() && log.0.len() > RECORDS, "{:?}", log.1);
}

// covers: pebs/trace-pmi
#[test]
fn every_record_may_ask_for_an_interrupt() {
    // LVTPC is masked at reset, so what is asked for shows in the status alone, which keeps the counter's bit.
    for (enable, bit) in [(OUTPUT_TRACE, 0), (OUTPUT_TRACE | PMI_EACH, 1)] {
        let mut flat = run(enable, 0, false);
        let pmu = flat.machine.units(0).unwrap().state().pmu.unwrap();
        assert_eq!(pmu.status & 1, bit, "{enable:x}");
    }
}

// covers: pebs/trace-registers
#[test]
fn only_parts_that_can_have_the_registers() {
    let accepts = |model: &'static x86::model::CpuModel, msr, value| {
        let mut flat = Flat::new(model, 0, |a| {
            wrmsr(a, msr, value)?;
            a.hlt()
        });
        flat.run().is_ok()
    };
    for &model in MODELS.iter().filter(|model| model.features().lm()) {
        let there = model.name == "snowridge";
        for msr in [MSR_RELOAD_PMC0, MSR_RELOAD_PMC0 + 3, MSR_RELOAD_FIXED_CTR0 + 2] {
            assert_eq!(accepts(model, msr, (1 << 48) - 1), there, "{} {msr:x}", model.name);
            assert!(!accepts(model, msr, 1 << 48), "{} {msr:x}", model.name);
        }
        assert!(!accepts(model, MSR_RELOAD_PMC0 + 4, 0), "{}", model.name);
        assert!(!accepts(model, MSR_RELOAD_FIXED_CTR0 + 3, 0), "{}", model.name);
        for (value, why) in [
            (OUTPUT_TRACE, there),
            (PMI_EACH, there),
            (1 << 62, false),
            (3 << 61, false),
        ] {
            assert_eq!(accepts(model, IA32_PEBS_ENABLE, value), why, "{} {value:x}", model.name);
        }
    }
    // Without Intel PT there is no trace to send it to.
    let without = SNOWRIDGE.with_toggles("-intel_pt").unwrap();
    assert!(!accepts(without, IA32_PEBS_ENABLE, OUTPUT_TRACE) && !accepts(without, MSR_RELOAD_PMC0, 0));
}
