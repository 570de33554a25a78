//! Programs that save and restore their units by XSAVES and XRSTORS: Intel PT (component 8) and architectural last-branch
//! records (component 15). SDM Vol. 1 13.5.6 "PT State", 13.5.14 "LBR State".

use devices::unit::Units;
use guest_tests::flat::{Arrived, CODE, DATA, Flat, TRACE, wrmsr};
use iced_x86::code_asm::*;
use iced_x86::{Decoder, IcedError, Instruction, Mnemonic};
use pt_oracle::libipt;
use pt_packet::Packet;
use x86::model::{ALDERLAKE, CpuModel, ICELAKE_SERVER, SAPPHIRERAPIDS, SKYLAKE_SERVER, SNOWRIDGE};
use x86::msr::*;
use x86::pt::RtitCtl;

const OSXSAVE: u64 = 1 << 18;
const PT: u64 = 1 << 8;
const LBR: u64 = 1 << 15;
/// The compacted format.
const COMPACTED: u64 = 1 << 63;
/// Where XSTATE_BV is, XCOMP_BV, and the first component behind the header.
const BV: u64 = DATA + 512;
const XCOMP: u64 = DATA + 520;
const IMAGE: u64 = DATA + 576;

const TRACERS: [&CpuModel; 5] = [
    &SKYLAKE_SERVER,
    &ICELAKE_SERVER,
    &SNOWRIDGE,
    &SAPPHIRERAPIDS,
    &ALDERLAKE,
];

fn instructions(flat: &Flat) -> Vec<Instruction> {
    Decoder::with_ip(64, flat.code(), CODE, 0).iter().collect()
}

/// XSAVES or XRSTORS of these components at `DATA`.
fn mask(a: &mut CodeAssembler, components: u64) -> Result<(), IcedError> {
    a.mov(eax, components as u32)?;
    a.xor(edx, edx)?;
    a.mov(rbx, DATA)
}

/// A branch that a trace sees: an indirect jump to what comes next.
fn branch(a: &mut CodeAssembler) -> Result<(), IcedError> {
    let mut next = a.create_label();
    a.lea(rsi, ptr(next))?;
    a.jmp(rsi)?;
    a.set_label(&mut next)?;
    a.nop()
}

/// Into memory at `to`.
fn rdmsr(a: &mut CodeAssembler, msr: u32, to: u64) -> Result<(), IcedError> {
    a.mov(ecx, msr)?;
    a.rdmsr()?;
    a.mov(rdi, to)?;
    a.mov(dword_ptr(rdi), eax)?;
    a.mov(dword_ptr(rdi + 4), edx)
}

const CTL: RtitCtl = RtitCtl::new().with_trace_en(true).with_os(true).with_branch_en(true);

/// Output to a single range of 64 KiB, and tracing on.
fn start(a: &mut CodeAssembler) -> Result<(), IcedError> {
    wrmsr(a, IA32_RTIT_OUTPUT_BASE, TRACE)?;
    wrmsr(a, IA32_RTIT_OUTPUT_MASK_PTRS, 0xFFFF)?;
    wrmsr(a, IA32_RTIT_CTL, CTL.into_bits())
}

// covers: pt/xsaves-engine
// covers: pt/xsaves-trace
#[test]
fn xsaves_stops_the_trace_and_xrstors_goes_on_with_it() {
    const AFTER: u64 = DATA + 0x1000;
    for model in TRACERS {
        let mut flat = Flat::new(model, OSXSAVE, |a| {
            wrmsr(a, IA32_XSS, PT)?;
            start(a)?;
            branch(a)?;
            mask(a, PT)?;
            a.xsaves64(ptr(rbx))?;
            rdmsr(a, IA32_RTIT_CTL, AFTER)?;
            rdmsr(a, IA32_RTIT_OUTPUT_MASK_PTRS, AFTER + 8)?;
            rdmsr(a, IA32_RTIT_STATUS, AFTER + 16)?;
            // Another's trace, whose registers are all different.
            branch(a)?;
            wrmsr(a, IA32_RTIT_OUTPUT_BASE, TRACE + 0x1_0000)?;
            wrmsr(a, IA32_RTIT_CR3_MATCH, 0x5000)?;
            branch(a)?;
            mask(a, PT)?;
            a.xrstors64(ptr(rbx))?;
            branch(a)?;
            wrmsr(a, IA32_RTIT_CTL, 0)?;
            a.hlt()
        });
        flat.run().unwrap();
        let name = model.name;
        assert_eq!((flat.word(BV), flat.word(XCOMP)), (PT, PT | COMPACTED), "{name}");
        let ctl = CTL.into_bits();
        assert_eq!(flat.word(IMAGE), ctl, "{name}: as it was");
        assert_eq!(flat.word(AFTER), ctl & !1, "{name}: TraceEn is clear");
        assert_eq!(flat.word(IMAGE + 8), TRACE, "{name}");
        // What was saved of the rest is what was there after the last packet.
        assert_eq!(flat.word(IMAGE + 16), flat.word(AFTER + 8), "{name}");
        assert_eq!(flat.word(IMAGE + 24), flat.word(AFTER + 16), "{name}");
        assert_eq!(flat.read(IMAGE + 32, 96), [0; 96], "{name}: and the reserved part");

        // One trace of both halves.
        let all = instructions(&flat);
        let at = |mnemonic, nth: usize| {
            let mut all = all.iter().enumerate().filter(|(_, i)| i.mnemonic() == mnemonic);
            all.nth(nth).unwrap().0
        };
        let (saves, restores) = (at(Mnemonic::Xsaves64, 0), at(Mnemonic::Xrstors64, 0));
        let halves = [at(Mnemonic::Wrmsr, 3) + 1..saves, restores + 1..at(Mnemonic::Wrmsr, 6)];
        let expected: Vec<u64> = halves.into_iter().flatten().map(|n| all[n].ip()).collect();
        let trace = flat.read(TRACE, 0x1000);
        let mut found = Vec::new();
        let image = libipt::Image::new([(CODE, flat.code())]);
        libipt::instructions(&trace, &image, |ip| found.push(ip)).unwrap();
        assert_eq!(found, expected, "{name}");
        // PacketEn falls at XSAVES and rises behind XRSTORS.
        let packets: Vec<Packet> = pt_packet::Decoder::new(&trace)
            .map_while(Result::ok)
            .map(|item| item.packet)
            .filter(|packet| *packet != Packet::Pad)
            .collect();
        let falls = packets.iter().position(|p| *p == Packet::TipPgd(None)).unwrap();
        assert_eq!(packets[falls - 1], Packet::Fup(Some(all[saves].ip())), "{name}");
        let rises = packets[falls..].iter().find(|p| matches!(p, Packet::TipPge(_)));
        assert_eq!(rises, Some(&Packet::TipPge(Some(all[restores].next_ip()))), "{name}");
        let psbs = packets.iter().filter(|p| **p == Packet::Psb).count();
        assert_eq!(psbs, 1, "{name}: PacketByteCnt was restored");
    }
}

// covers: pt/xsaves-gp
#[test]
fn xrstors_refuses_images_that_the_registers_would() {
    // (why, where in the image, value)
    let rows: [(&str, u64, u64); 6] = [
        ("reserved bits of IA32_RTIT_CTL", 0, 1 << 63),
        ("FabricEn", 0, 1 << 6),
        ("an output address that is not aligned", 8, 0x1001),
        ("reserved bits of IA32_RTIT_STATUS", 24, 1 << 50),
        ("low bits of IA32_RTIT_CR3_MATCH", 32, 1),
        ("an address that is not canonical", 40, 1 << 60),
    ];
    for model in TRACERS {
        for (why, at, value) in rows {
            let mut flat = Flat::new(model, OSXSAVE, |a| {
                wrmsr(a, IA32_XSS, PT)?;
                mask(a, PT)?;
                a.xrstors64(ptr(rbx))?;
                a.hlt()
            });
            flat.write(BV, &PT.to_le_bytes());
            flat.write(XCOMP, &(PT | COMPACTED).to_le_bytes());
            // All of it would be loaded but for this.
            flat.write(IMAGE + 16, &0x7Fu64.to_le_bytes());
            flat.write(IMAGE + 40, &0x1234u64.to_le_bytes());
            let what = format!("{}: {why}", model.name);
            flat.write(IMAGE + at, &value.to_le_bytes());
            let fault = flat.run().expect_err(&what);
            let rip = instructions(&flat).iter().rev().nth(1).unwrap().ip();
            let expected = Arrived {
                vector: 13,
                error: Some(0),
                rip,
            };
            assert_eq!(fault, expected, "{what}");
            let fresh = Units::new(model).state().pt;
            assert!(
                flat.machine.units(0).unwrap().state().pt == fresh,
                "{what}: something was loaded"
            );
        }
    }
}

// covers: pt/xsaves-gp
#[test]
fn xrstors_while_tracing_and_a_save_that_faults() {
    let read_ctl = [0xB9, 0x70, 0x05, 0, 0, 0x0F, 0x32, 0xF4];
    for model in TRACERS {
        for initial in [false, true] {
            let mut flat = Flat::new(model, OSXSAVE, |a| {
                wrmsr(a, IA32_XSS, PT)?;
                start(a)?;
                mask(a, PT)?;
                a.xrstors64(ptr(rbx))?;
                a.hlt()
            });
            flat.handle(13, &read_ctl);
            flat.write(XCOMP, &(PT | COMPACTED).to_le_bytes());
            if !initial {
                flat.write(BV, &PT.to_le_bytes());
                flat.write(IMAGE + 16, &0x7Fu64.to_le_bytes());
            }
            assert_eq!(flat.run().unwrap_err().vector, 13, "{}", model.name);
            assert_eq!(
                flat.cpu.state().gpr[0],
                CTL.into_bits(),
                "{}: tracing goes on",
                model.name
            );
        }
        // The legacy region and the header are there, the page after them is not.
        let last = 0x4000_0000u64 - 576;
        let mut flat = Flat::new(model, OSXSAVE, |a| {
            wrmsr(a, IA32_XSS, PT)?;
            start(a)?;
            mask(a, PT)?;
            a.mov(rbx, last)?;
            a.xsaves64(ptr(rbx))?;
            a.hlt()
        });
        flat.handle(14, &read_ctl);
        let fault = flat.run().unwrap_err();
        assert_eq!((fault.vector, fault.error), (14, Some(2)), "{}", model.name);
        // The last byte of the area is looked at first, as an Intel host does.
        assert_eq!(flat.cpu.state().cr2, 0x4000_0000 + 128 - 1);
        assert_eq!(
            flat.cpu.state().gpr[0],
            CTL.into_bits(),
            "{}: TraceEn as before",
            model.name
        );
    }
}

const LBR_CTL: u64 = 0x7F_0007;
const WITH_LBR: [&CpuModel; 2] = [&SAPPHIRERAPIDS, &ALDERLAKE];

// covers: lbr/xsaves-engine
#[test]
fn last_branches_are_saved_and_come_back() {
    const AFTER: u64 = DATA + 0x1000;
    for model in WITH_LBR {
        let mut flat = Flat::new(model, OSXSAVE, |a| {
            wrmsr(a, IA32_XSS, LBR)?;
            wrmsr(a, IA32_LBR_DEPTH, 8)?;
            wrmsr(a, IA32_LBR_CTL, LBR_CTL)?;
            (0..3).try_for_each(|_| branch(a))?;
            mask(a, LBR)?;
            a.xsaves64(ptr(rbx))?;
            rdmsr(a, IA32_LBR_CTL, AFTER)?;
            // Another's.
            branch(a)?;
            wrmsr(a, IA32_LBR_DEPTH, 8)?;
            wrmsr(a, IA32_LBR_CTL, LBR_CTL & !2)?;
            branch(a)?;
            wrmsr(a, IA32_LBR_CTL, 0)?;
            rdmsr(a, IA32_LBR_0_FROM_IP, AFTER + 8)?;
            mask(a, LBR)?;
            a.xrstors64(ptr(rbx))?;
            branch(a)?;
            for entry in 0..5 {
                rdmsr(a, IA32_LBR_0_FROM_IP + entry, AFTER + 16 + 16 * u64::from(entry))?;
                rdmsr(a, IA32_LBR_0_TO_IP + entry, AFTER + 24 + 16 * u64::from(entry))?;
            }
            rdmsr(a, IA32_LBR_CTL, AFTER + 0x80)?;
            a.hlt()
        });
        flat.run().unwrap();
        let name = model.name;
        let all = instructions(&flat);
        let jumps: Vec<_> = all.iter().filter(|i| i.mnemonic() == Mnemonic::Jmp).collect();
        // From and to of the branches that were recorded, the newest first.
        let pair = |n: usize| [jumps[n].ip(), jumps[n].next_ip()];
        assert_eq!((flat.word(BV), flat.word(XCOMP)), (LBR, LBR | COMPACTED), "{name}");
        assert_eq!(
            [flat.word(IMAGE), flat.word(IMAGE + 8)],
            [LBR_CTL, 8],
            "{name}: control and depth"
        );
        for (age, n) in [2, 1, 0].into_iter().enumerate() {
            let entry = IMAGE + x86::lbr::image::ENTRIES as u64 + age as u64 * 24;
            assert_eq!([flat.word(entry), flat.word(entry + 8)], pair(n), "{name}: entry {age}");
        }
        assert_eq!(flat.word(AFTER), LBR_CTL, "{name}: saving leaves recording on");
        assert_eq!(flat.word(AFTER + 8), 0, "{name}: nothing was recorded in between");
        for (age, n) in [5, 2, 1, 0].into_iter().enumerate() {
            let at = AFTER + 16 + 16 * age as u64;
            assert_eq!(
                [flat.word(at), flat.word(at + 8)],
                pair(n),
                "{name}: entry {age} after XRSTORS"
            );
        }
        assert_eq!(flat.word(AFTER + 0x80), LBR_CTL, "{name}: recording goes on");
    }
}

// covers: lbr/xsaves-engine
#[test]
fn an_image_of_last_branches_that_is_refused_starts_no_trace() {
    for model in WITH_LBR {
        let mut flat = Flat::new(model, OSXSAVE, |a| {
            wrmsr(a, IA32_XSS, PT | LBR)?;
            mask(a, PT | LBR)?;
            a.xrstors64(ptr(rbx))?;
            a.hlt()
        });
        flat.write(BV, &(PT | LBR).to_le_bytes());
        flat.write(XCOMP, &(PT | LBR | COMPACTED).to_le_bytes());
        flat.write(IMAGE, &CTL.into_bits().to_le_bytes());
        flat.write(IMAGE + 8, &TRACE.to_le_bytes());
        flat.write(IMAGE + 16, &0xFFFFu64.to_le_bytes());
        let second = IMAGE + 128;
        flat.write(second, &(LBR_CTL | 1 << 60).to_le_bytes());
        assert_eq!(flat.run().unwrap_err().vector, 13, "{}", model.name);
        let (state, fresh) = (flat.machine.units(0).unwrap().state(), Units::new(model).state());
        assert!(state.pt == fresh.pt, "{}: something was loaded", model.name);
        assert_eq!(state.arch_lbr.unwrap().control, 0, "{}", model.name);
        assert_eq!(flat.read(TRACE, 64), [0; 64]);
        // Without the bad bit both are.
        flat.write(second, &LBR_CTL.to_le_bytes());
        flat.restart();
        flat.run().unwrap();
        assert_ne!(flat.read(TRACE, 64), [0; 64]);
    }
}
