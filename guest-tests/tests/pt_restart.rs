//! Programs that stop and restart their trace elsewhere: a decoder must not need to know where it was before.
//! SDM Vol. 3C 33.4.2.2 "Target IP (TIP) Packet", "IP Compression": PSB resets the last IP, and nothing says that TraceEn does.

use guest_tests::flat::{CODE, DATA, Flat, TRACE, wrmsr};
use iced_x86::code_asm::*;
use iced_x86::{Decoder, IcedError, Mnemonic, Register};
use pt_flow::{Blocks, Chunk, Sections, Timing};
use pt_oracle::libipt;
use x86::model::{ALDERLAKE, CpuModel, ICELAKE_SERVER, SAPPHIRERAPIDS, SKYLAKE_SERVER, SNOWRIDGE};
use x86::msr::*;
use x86::pt::RtitCtl;

/// The models that start without a PSB where bytes have been counted.
const TRACERS: [&CpuModel; 5] = [
    &SKYLAKE_SERVER,
    &ICELAKE_SERVER,
    &SNOWRIDGE,
    &SAPPHIRERAPIDS,
    &ALDERLAKE,
];
const CTL: RtitCtl = RtitCtl::new().with_trace_en(true).with_os(true).with_branch_en(true);
/// The top-level page table.
const PML4: u64 = 0x7000;
/// The first GiB is at these addresses, too: they differ in each of their upper parts.
const ALIASES: [u64; 4] = [0, 0xFFFF_8000_0000_0000, 0x0000_5580_0000_0000, 0xFFFF_FF80_0000_0000];
/// Another trace.
const OTHER: u64 = TRACE + 0x1_0000;
const OSXSAVE: u64 = 1 << 18;
const PT: u64 = 1 << 8;

/// Goes on at another address of the same code.
fn go(a: &mut CodeAssembler, alias: usize) -> Result<(), IcedError> {
    let mut next = a.create_label();
    a.lea(rax, ptr(next))?;
    a.mov(eax, eax)?;
    a.mov(rbx, ALIASES[alias])?;
    a.add(rax, rbx)?;
    a.jmp(rax)?;
    a.set_label(&mut next)?;
    a.nop()
}

/// Something to trace: a taken branch, and an indirect one to another address.
fn work(a: &mut CodeAssembler, alias: usize) -> Result<(), IcedError> {
    let mut next = a.create_label();
    a.cmp(eax, eax)?;
    a.je(next)?;
    a.set_label(&mut next)?;
    a.nop()?;
    go(a, alias)
}

/// Output to a range of 64 KiB, and tracing on.
fn start(a: &mut CodeAssembler, output: u64) -> Result<(), IcedError> {
    wrmsr(a, IA32_RTIT_OUTPUT_BASE, output)?;
    wrmsr(a, IA32_RTIT_OUTPUT_MASK_PTRS, 0xFFFF)?;
    wrmsr(a, IA32_RTIT_STATUS, 0)?;
    wrmsr(a, IA32_RTIT_CTL, CTL.into_bits())
}

fn machine(model: &'static CpuModel, f: impl FnOnce(&mut CodeAssembler) -> Result<(), IcedError>) -> Flat {
    let mut flat = Flat::new(model, OSXSAVE, f);
    let first = flat.read(PML4, 8);
    for alias in ALIASES {
        flat.write(PML4 + (alias >> 39 & 511) * 8, &first);
    }
    flat
}

/// Who the trace belongs to after an instruction that starts or stops one.
#[derive(Clone, Copy, PartialEq)]
enum Turn {
    First,
    Other,
    Nobody,
}

/// What ran in each of the two traces. Straight-line code but for its jumps, of which each leads to the next instruction at the next
/// of `aliases`; `turns` are said by WRMSR of IA32_RTIT_CTL, XSAVES and XRSTORS.
fn ran(flat: &Flat, aliases: &[usize], turns: &[Turn]) -> [Vec<u64>; 2] {
    let (mut aliases, mut turns) = (aliases.iter(), turns.iter());
    let (mut base, mut turn, mut msr) = (0, Turn::Nobody, 0);
    let mut traces = [Vec::new(), Vec::new()];
    for instruction in &mut Decoder::with_ip(64, flat.code(), CODE, 0) {
        let control = match instruction.mnemonic() {
            Mnemonic::Mov if instruction.op0_register() == Register::ECX => {
                msr = instruction.immediate32();
                false
            }
            Mnemonic::Wrmsr => msr == IA32_RTIT_CTL,
            Mnemonic::Xsaves64 | Mnemonic::Xrstors64 => true,
            _ => false,
        };
        // What stops a trace is not in it, and neither is what starts it.
        let was = turn;
        if control {
            turn = *turns.next().expect("as many as there are");
        }
        match was {
            Turn::First if !control => traces[0].push(base + instruction.ip()),
            Turn::Other if !control => traces[1].push(base + instruction.ip()),
            _ => {}
        }
        if instruction.mnemonic() == Mnemonic::Jmp {
            base = ALIASES[*aliases.next().expect("as many as there are")];
        }
    }
    assert!(aliases.next().is_none() && turns.next().is_none());
    traces
}

/// Both decoders find what ran.
fn check(flat: &Flat, output: u64, ran: &[u64], what: &str) {
    let trace = flat.read(output, 0x1000);
    let code = flat.code();
    let mut found = Vec::new();
    let image = libipt::Image::new(ALIASES.map(|alias| (alias + CODE, code)));
    let end = libipt::instructions(&trace, &image, |ip| found.push(ip));
    assert!(
        end.is_ok() && found == ran,
        "{what}: {end:?}\nfound {found:x?}\nran   {ran:x?}"
    );
    let mut sections = Sections::new();
    for alias in ALIASES {
        sections.add(alias + CODE, code);
    }
    let mut blocks = Blocks::default();
    pt_flow::Decoder::new(sections, Timing::default()).decode(&Chunk::whole(&trace), &mut blocks);
    assert!(blocks.gaps.is_empty(), "{what}: {:?}", blocks.gaps);
    let count: usize = blocks.blocks.iter().map(|block| usize::from(block.count)).sum();
    let firsts = blocks.blocks.iter().all(|block| ran.contains(&block.ip));
    assert!(count == ran.len() && firsts, "{what}: {:x?}", blocks.blocks);
}

/// Two of the aliases, by number.
fn pairs() -> impl Iterator<Item = (usize, usize)> {
    let count = ALIASES.len();
    (0..count).flat_map(move |from| (0..count).map(move |to| (from, to)))
}

// covers: pt/restart, pt/ip-compression
#[test]
fn a_trace_that_stops_and_starts_elsewhere_decodes() {
    use Turn::{First, Nobody};
    for model in TRACERS {
        for (from, to) in pairs() {
            let mut flat = machine(model, |a| {
                go(a, from)?;
                start(a, TRACE)?;
                work(a, from)?;
                wrmsr(a, IA32_RTIT_CTL, 0)?;
                // It starts again at an address with other upper bytes, and once more at one with the same.
                go(a, to)?;
                wrmsr(a, IA32_RTIT_CTL, CTL.into_bits())?;
                work(a, to)?;
                wrmsr(a, IA32_RTIT_CTL, 0)?;
                wrmsr(a, IA32_RTIT_CTL, CTL.into_bits())?;
                work(a, from)?;
                wrmsr(a, IA32_RTIT_CTL, 0)?;
                a.hlt()
            });
            flat.run().unwrap();
            let turns = [First, Nobody, First, Nobody, First, Nobody];
            let [ran, _] = ran(&flat, &[from, from, to, to, from], &turns);
            assert!(ran.len() > 30);
            let what = format!("{}: {:x} to {:x}", model.name, ALIASES[from], ALIASES[to]);
            check(&flat, TRACE, &ran, &what);
            let psbs = flat
                .read(TRACE, 0x1000)
                .windows(16)
                .filter(|at| *at == [2, 0x82].repeat(8))
                .count();
            assert_eq!(psbs, 1, "{what}: bytes have been counted at the later starts");
        }
    }
}

/// The last IP is the processor's, the trace a program's: what another program traced in between does not count.
// covers: pt/restart
#[test]
fn a_trace_that_goes_on_after_another_one_decodes() {
    use Turn::{First, Nobody, Other};
    for model in TRACERS {
        for (from, other) in pairs() {
            let components = |a: &mut CodeAssembler| {
                a.mov(eax, PT as u32)?;
                a.xor(edx, edx)?;
                a.mov(rbx, DATA)
            };
            let mut flat = machine(model, |a| {
                wrmsr(a, IA32_XSS, PT)?;
                go(a, from)?;
                start(a, TRACE)?;
                work(a, from)?;
                components(a)?;
                a.xsaves64(ptr(rbx))?;
                go(a, other)?;
                start(a, OTHER)?;
                work(a, other)?;
                wrmsr(a, IA32_RTIT_CTL, 0)?;
                components(a)?;
                a.xrstors64(ptr(rbx))?;
                work(a, from)?;
                wrmsr(a, IA32_RTIT_CTL, 0)?;
                a.hlt()
            });
            flat.run().unwrap();
            let turns = [First, Nobody, Other, Nobody, First, Nobody];
            let [first, second] = ran(&flat, &[from, from, other, other, from], &turns);
            let what = format!("{}: {:x}, {:x} in between", model.name, ALIASES[from], ALIASES[other]);
            check(&flat, TRACE, &first, &what);
            check(&flat, OTHER, &second, &what);
        }
    }
}
