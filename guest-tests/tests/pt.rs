//! Programs that trace themselves on the engine: what decoders make of the packets is what ran.

use guest_tests::flat::{DATA, Flat, wrmsr};
use guest_tests::traced::{CODE, Plan, Run, run};
use iced_x86::code_asm::*;
use pt_flow::{Block, Blocks, Chunk, Decoder, Event, EventKind, Sections, Timing, Visitor};
use pt_oracle::libipt;
use pt_packet::ItemSize;
use x86::model::{ALDERLAKE, BROADWELL, CpuModel, ICELAKE_SERVER, SAPPHIRERAPIDS, SKYLAKE_SERVER, SNOWRIDGE};
use x86::msr::*;
use x86::pt::{RtitCtl, RtitStatus};

const MODELS: [&CpuModel; 6] = [
    &BROADWELL,
    &SKYLAKE_SERVER,
    &ICELAKE_SERVER,
    &SAPPHIRERAPIDS,
    &ALDERLAKE,
    &SNOWRIDGE,
];

/// Settings that take turns: rings, timing, compression, transactions.
fn plan(model: &'static CpuModel, seed: u64) -> Plan {
    let configurable = model.name != "broadwell";
    let ctl = RtitCtl::new()
        .with_branch_en(true)
        .with_os(seed % 7 != 3)
        .with_user(seed % 7 != 5)
        .with_tsc_en(seed & 1 != 0)
        .with_dis_retc(seed % 5 == 4)
        .with_mtc_en(configurable && seed & 2 != 0)
        .with_mtc_freq(if configurable { 3 } else { 0 })
        .with_psb_freq(if configurable { (seed % 3) as u8 } else { 0 })
        .with_cyc_en(configurable && seed & 4 != 0);
    let ctl = if model.units.pt.is_some_and(|pt| pt.ptwrite()) {
        ctl.with_ptw_en(!seed.is_multiple_of(3)).with_fup_on_ptw(seed & 2 != 0)
    } else {
        ctl
    };
    let model = if seed % 4 >= 2 {
        model.with_toggles("+rtm").expect("the engine has it")
    } else {
        model
    };
    Plan {
        model,
        seed: seed * 7919,
        ctl,
        range: None,
        blocks: 3000,
        interrupts: if seed.is_multiple_of(2) { 0 } else { 37 },
    }
}

fn seeds() -> u64 {
    if guest_tests::full() { 200 } else { 8 }
}

fn same(found: &[u64], run: &Run, what: &str) {
    let at = found.iter().zip(&run.retired).take_while(|(a, b)| a == b).count();
    assert!(
        found.len() == run.retired.len() && at == found.len(),
        "{what}: instruction {at} of {} is {:x?}, decoded {:x?} of {}",
        run.retired.len(),
        run.retired.get(at),
        found.get(at),
        found.len()
    );
}

// covers: pt/oracle-libipt, rtm/trace
#[test]
fn libipt_finds_the_instructions_that_ran() {
    for model in MODELS {
        // Some programs end soon.
        let (mut instructions, mut bytes, mut transactions) = (0, 0, [0; 2]);
        for seed in 1..=seeds() {
            let plan = plan(model, seed);
            let run = run(&plan);
            instructions += run.retired.len() as u64;
            bytes += run.trace.len() as u64;
            for (sum, more) in transactions.iter_mut().zip(run.transactions) {
                *sum += more;
            }
            let image = libipt::Image::new([(CODE, &run.code[..])]);
            let mut found = Vec::new();
            let what = format!("{} {seed}", model.name);
            libipt::instructions(&run.trace, &image, |ip| found.push(ip))
                .unwrap_or_else(|error| panic!("{what}: {error:?}"));
            same(&found, &run, &what);
        }
        let enough = 1000 * seeds();
        assert!(
            instructions > enough && bytes > enough,
            "{}: {instructions} instructions, {bytes} bytes",
            model.name
        );
        assert!(
            transactions.iter().all(|&n| n > 10 * seeds()),
            "{}: {transactions:?} transactions committed and aborted",
            model.name
        );
    }
}

/// What a run's PTWRITEs look like in the trace.
fn written<'a>(run: &'a Run, plan: &Plan) -> &'a [(u64, u64, u8)] {
    if plan.ctl.ptw_en() { &run.written } else { &[] }
}

/// In `enum pt_packet_type`.
const FUP: i32 = 5;
const PTW: i32 = 26;

const WITH_PTWRITE: [&CpuModel; 3] = [&SAPPHIRERAPIDS, &ALDERLAKE, &SNOWRIDGE];

// covers: pt/ptwrite-oracle
#[test]
fn libipt_finds_what_ptwrite_wrote_and_where() {
    for model in WITH_PTWRITE {
        let (mut with_ip, mut without) = (0, 0);
        for seed in 1..=seeds() {
            let plan = plan(model, seed);
            let run = run(&plan);
            let what = format!("{} {seed}", model.name);
            let image = libipt::Image::new([(CODE, &run.code[..])]);
            let mut found = Vec::new();
            libipt::steps(&run.trace, &image, |step| {
                if let libipt::Step::Event(libipt::Event::PtWrite { ip, size, value }) = step {
                    // Where no FUP tells the address, it is that of the next PTWRITE in the code.
                    found.push((ip.expect("known either way"), value, size));
                }
            })
            .unwrap_or_else(|error| panic!("{what}: {error:?}"));
            let expected = written(&run, &plan);
            let at = found.iter().zip(expected).position(|(a, b)| a != b);
            assert!(
                at.is_none() && found.len() == expected.len(),
                "{what}: PTWRITE {at:?} of {} and {}",
                found.len(),
                expected.len()
            );
            let packets = libipt::packets(&run.trace).unwrap_or_else(|error| panic!("{what}: {error:?}"));
            // Its payload ends with the width and whether a FUP follows.
            for pair in packets.windows(2).filter(|pair| pair[0].kind == PTW) {
                let fup = pair[0].payload[1] >> 8 & 1 != 0;
                assert_eq!(fup, plan.ctl.fup_on_ptw(), "{what}");
                assert!(!fup || pair[1].kind == FUP, "{what}");
                *(if fup { &mut with_ip } else { &mut without }) += 1;
            }
        }
        assert!(with_ip > 100 && without > 100, "{}: {with_ip}, {without}", model.name);
    }
}

// covers: pt/ptwrite-oracle
#[test]
fn our_decoder_finds_what_ptwrite_wrote_and_where() {
    #[derive(Default)]
    struct Writes(Vec<(u64, u64, u8)>);
    impl Visitor for Writes {
        fn block(&mut self, _: &Block) {}
        fn event(&mut self, event: &Event) {
            if let EventKind::PtWrite { ip, value, size } = event.kind {
                let bytes = if size == ItemSize::Four { 4 } else { 8 };
                self.0.push((ip.expect("known either way"), value, bytes));
            }
        }
    }
    for model in WITH_PTWRITE {
        for seed in 1..=seeds() {
            let plan = plan(model, seed);
            let run = run(&plan);
            let mut image = Sections::new();
            image.add(CODE, &run.code);
            let mut writes = Writes::default();
            Decoder::new(image, Timing::default()).decode(&Chunk::whole(&run.trace), &mut writes);
            assert!(writes.0 == written(&run, &plan), "{} {seed}", model.name);
        }
    }
}

/// FilterEn changes where taken branches and events land, and nowhere else: what is traced is that, on programs with straight-line code
/// over the edges of every kind.
// covers: pt/filter-landing
#[test]
fn libipt_finds_what_ran_from_where_a_branch_landed_in_the_range() {
    let mut random = guest_tests::traced::Random(0x1A2B);
    for model in MODELS {
        let ranged = model.units.pt.is_some_and(|pt| pt.ranges() > 0);
        let (mut some, mut all) = (0, 0);
        for seed in (1..=seeds() * 2).filter(|_| ranged) {
            let mut plan = plan(model, seed);
            let first = CODE + random.below(0x700);
            plan.range = Some((first, first + random.below(0x300)));
            plan.ctl = plan.ctl.with_addr_cfg(1);
            let run = run(&plan);
            all += 1;
            some += u64::from(run.retired.len() > 100);
            let what = format!("{} {seed} {:x?}", model.name, plan.range);
            let image = libipt::Image::new([(CODE, &run.code[..])]);
            let mut found = Vec::new();
            libipt::instructions(&run.trace, &image, |ip| found.push(ip))
                .unwrap_or_else(|error| panic!("{what}: {error:?}"));
            same(&found, &run, &what);
        }
        assert!(some * 4 >= all, "{}: {some} of {all}", model.name);
    }
}

/// SDM Vol. 3C 33.2.7.4 "Restricted Memory Access": packets for the local APIC's page are lost without an error, and so are those for any
/// other address without memory.
// covers: pt/output-nowhere
#[test]
fn packets_for_devices_go_nowhere() {
    const SEEN: u64 = DATA;
    for model in &MODELS[1..] {
        for base in [0xFEE0_0000u64, 0xFEC0_0000, 0xF000_0000] {
            let mut flat = Flat::new(model, 0, |a| {
                // The local APIC's registers from TPR to the spurious vector, before and after.
                let registers = |a: &mut CodeAssembler, to: u64| {
                    for (register, at) in (0xFEE0_0080u32..=0xFEE0_00F0).step_by(16).zip((to..).step_by(4)) {
                        a.mov(ebx, register)?;
                        a.mov(eax, dword_ptr(rbx))?;
                        a.mov(rdi, at)?;
                        a.mov(dword_ptr(rdi), eax)?;
                    }
                    Ok(())
                };
                // Of the APIC, which is not in the first GiB.
                registers(a, SEEN)?;
                wrmsr(a, IA32_RTIT_OUTPUT_BASE, base)?;
                wrmsr(a, IA32_RTIT_OUTPUT_MASK_PTRS, 0xFFF)?;
                let ctl = RtitCtl::new().with_trace_en(true).with_os(true).with_branch_en(true);
                wrmsr(a, IA32_RTIT_CTL, ctl.into_bits())?;
                let mut again = a.create_label();
                a.lea(rsi, ptr(again))?;
                a.mov(ecx, 200)?;
                a.set_label(&mut again)?;
                a.dec(ecx)?;
                let mut out = a.create_label();
                a.jz(out)?;
                a.jmp(rsi)?;
                a.set_label(&mut out)?;
                wrmsr(a, IA32_RTIT_CTL, 0)?;
                registers(a, SEEN + 64)?;
                for (msr, to) in [(IA32_RTIT_STATUS, SEEN + 128), (IA32_RTIT_OUTPUT_MASK_PTRS, SEEN + 136)] {
                    a.mov(ecx, msr)?;
                    a.rdmsr()?;
                    a.mov(rdi, to)?;
                    a.mov(dword_ptr(rdi), eax)?;
                    a.mov(dword_ptr(rdi + 4), edx)?;
                }
                a.hlt()
            });
            // The fourth GiB, to itself.
            flat.write(0x8018, &0xC000_0087u64.to_le_bytes());
            flat.run().unwrap();
            let what = format!("{} {base:x}", model.name);
            assert_eq!(flat.read(SEEN, 32), flat.read(SEEN + 64, 32), "{what}");
            let status = RtitStatus::from_bits(flat.word(SEEN + 128));
            assert!(!status.error() && !status.stopped(), "{what}: {status:?}");
            assert!(flat.word(SEEN + 136) >> 32 > 256, "{what}: the packets were put out");
        }
    }
}

// covers: pt/oracle-flow, rtm/trace
#[test]
fn our_decoder_finds_the_instructions_that_ran() {
    for model in MODELS {
        for seed in 1..=seeds() {
            let plan = plan(model, seed);
            let run = run(&plan);
            let what = format!("{} {seed}", model.name);
            let mut image = Sections::new();
            image.add(CODE, &run.code);
            let mut log = Blocks::default();
            let mut decoder = Decoder::new(image, Timing::default());
            decoder.decode(&Chunk::whole(&run.trace), &mut log);
            assert!(log.gaps.is_empty(), "{what}: {:?}", log.gaps[0]);
            // A block's first instruction is the next one, and as many as it has follow.
            let mut at = 0;
            for block in &log.blocks {
                let ips = run.retired.get(at..at + usize::from(block.count)).unwrap_or(&[]);
                let whole = ips.first() == Some(&block.ip)
                    && ips.iter().all(|ip| ip.wrapping_sub(block.ip) < u64::from(block.len));
                assert!(whole, "{what}: {block:x?} at instruction {at}, where {ips:x?} ran");
                at += usize::from(block.count);
            }
            assert_eq!(at, run.retired.len(), "{what}");
        }
    }
}
