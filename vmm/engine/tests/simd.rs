//! Vector instructions through the engine: operands in memory, straddling pages, state images.

use crate::rig;
use engine::Exit;
use iced_x86::IcedError;
use iced_x86::code_asm::*;
use rig::{CODE, Rig};

const DATA: u64 = 0x30_0000;

fn assemble(f: impl FnOnce(&mut CodeAssembler) -> Result<(), IcedError>) -> Vec<u8> {
    let mut a = CodeAssembler::new(64).unwrap();
    f(&mut a).unwrap();
    a.assemble(CODE).unwrap()
}

/// Runs code of that many instructions.
fn run(rig: &mut Rig, steps: u64, f: impl FnOnce(&mut CodeAssembler) -> Result<(), IcedError>) {
    rig.write(CODE, &assemble(f));
    let mut s = rig.cpu.state();
    s.rip = CODE;
    rig.cpu.set_state(&s);
    assert_eq!(rig.run(steps), Exit::Budget);
}

// covers: cpu/sse, cpu/sse2
#[test]
fn moves_reach_memory_at_any_place() {
    let pattern: [u8; 32] = core::array::from_fn(|i| i as u8 * 7 + 1);
    // Within a page, at its end, and across the next one at every distance.
    for at in [DATA, DATA + 0xff0, DATA + 0xff1, DATA + 0xff8, DATA + 0xfff] {
        let mut rig = Rig::new();
        rig.write(at, &pattern);
        run(&mut rig, 12, |a| {
            a.mov(rbx, at)?;
            a.mov(rcx, at + 0x3000)?;
            a.movdqu(xmm1, xmmword_ptr(rbx))?;
            a.movups(xmmword_ptr(rcx), xmm1)?;
            a.movq(xmm2, qword_ptr(rbx))?;
            a.movd(xmm3, dword_ptr(rbx))?;
            a.movsd_2(qword_ptr(rcx + 16), xmm2)?;
            a.movss(dword_ptr(rcx + 24), xmm3)?;
            a.lddqu(xmm4, xmmword_ptr(rbx))?;
            a.movhps(qword_ptr(rcx + 32), xmm4)?;
            a.addsd(xmm5, qword_ptr(rbx))?;
            a.pcmpistri(xmm4, xmmword_ptr(rbx), 0)
        });
        let s = rig.cpu.state();
        let low = |n: usize| u128::from_le_bytes(core::array::from_fn(|i| if i < n { pattern[i] } else { 0 }));
        assert_eq!(s.fpu.xmm[1..5], [low(16), low(8), low(4), low(16)], "{at:x}");
        assert_eq!(s.fpu.xmm[5] as u64, low(8) as u64, "0 + x, {at:x}");
        let stored: [u8; 40] = rig.read(at + 0x3000);
        assert_eq!(
            (&stored[..16], &stored[16..24], &stored[24..28]),
            (&pattern[..16], &pattern[..8], &pattern[..4])
        );
        assert_eq!(stored[32..40], pattern[8..16]);
        assert_eq!(s.gpr[1], 0, "pcmpistri: the first byte is one of the set");
    }
}

// covers: cpu/sse2, cpu/sse41, cpu/mmx
#[test]
fn registers_of_all_kinds_mix() {
    let mut rig = Rig::new();
    let mut s = rig.cpu.state();
    s.gpr[8] = 0x1122_3344_5566_7788;
    s.fpu.fninit();
    rig.cpu.set_state(&s);
    run(&mut rig, 13, |a| {
        a.movq(xmm9, r8)?;
        a.movd(eax, xmm9)?;
        a.movq(xmm10, xmm9)?;
        a.punpcklqdq(xmm10, xmm9)?;
        a.pinsrd(xmm10, r8d, 3)?;
        a.pextrb(ecx, xmm10, 7)?;
        a.pmovmskb(edx, xmm10)?;
        a.pxor(xmm9, xmm10)?;
        a.movdq2q(mm3, xmm10)?;
        a.movd(ebx, mm3)?;
        a.cvtsi2sd(xmm1, eax)?;
        a.ucomisd(xmm1, xmm2)?;
        a.movnti(qword_ptr(DATA), r8)
    });
    let s = rig.cpu.state();
    let x: u128 = 0x5566_7788_5566_7788_1122_3344_5566_7788;
    assert_eq!(s.fpu.xmm[10], x);
    assert_eq!(s.fpu.xmm[9], x & !(u64::MAX as u128));
    assert_eq!(
        (s.gpr[0], s.gpr[1], s.gpr[2], s.gpr[3]),
        (0x5566_7788, 0x11, 0x1101, 0x5566_7788)
    );
    assert_eq!((s.fpu.r[3], s.fpu.tag), (0xffff_1122_3344_5566_7788, 0xff));
    assert_eq!(f64::from_bits(s.fpu.xmm[1] as u64), 0x5566_7788 as f64);
    assert_eq!(s.rflags.into_bits() & 0x8d5, 0, "greater");
    assert_eq!(rig.read::<8>(DATA), 0x1122_3344_5566_7788u64.to_le_bytes());
}

// covers: cpu/sse2, cpu/mmx
#[test]
fn masked_stores_write_the_chosen_bytes() {
    let mut rig = Rig::new();
    rig.write(DATA + 0xff8, &[0xee; 16]);
    let mut s = rig.cpu.state();
    s.fpu.xmm[1] = u128::from_le_bytes(core::array::from_fn(|i| i as u8));
    s.fpu.xmm[2] = 0x80 << 120 | 0x80 << 56 | 0x80 << 64 | 0x80;
    s.gpr[7] = DATA + 0xff8;
    rig.cpu.set_state(&s);
    run(&mut rig, 1, |a| a.maskmovdqu(xmm1, xmm2));
    let mut expected = [0xee; 16];
    for i in [0, 7, 8, 15] {
        expected[i] = i as u8;
    }
    assert_eq!(rig.read::<16>(DATA + 0xff8), expected);
    // An empty mask writes nothing.
    let mut s = rig.cpu.state();
    s.fpu.xmm[1] = 0x5a;
    s.fpu.xmm[2] = 0;
    rig.cpu.set_state(&s);
    run(&mut rig, 1, |a| a.maskmovdqu(xmm1, xmm2));
    assert_eq!(rig.read::<16>(DATA + 0xff8), expected);
}

// covers: cpu/sse
#[test]
fn reciprocals_are_the_same_on_every_host() {
    let mut rig = Rig::new();
    let mut s = rig.cpu.state();
    s.fpu.xmm[2] = 0x4080_0000_3f80_0000_4080_0000_3f80_0000;
    s.fpu.xmm[3] = 0x77 << 32;
    rig.cpu.set_state(&s);
    run(&mut rig, 3, |a| {
        a.rcpps(xmm1, xmm2)?;
        a.rsqrtss(xmm3, xmm2)?;
        a.rsqrtps(xmm4, xmm2)
    });
    let s = rig.cpu.state();
    assert_eq!(s.fpu.xmm[1], 0x3e7f_f000_3f7f_f000_3e7f_f000_3f7f_f000);
    assert_eq!(s.fpu.xmm[3], 0x77_3f7f_f000);
    assert_eq!(s.fpu.xmm[4], 0x3eff_f000_3f7f_f000_3eff_f000_3f7f_f000);
}

// covers: cpu/fxsave, cpu/mxcsr
#[test]
fn the_state_goes_to_memory_and_back() {
    let mut rig = Rig::new();
    rig.write(DATA, &[0xee; 512]);
    rig.write(DATA + 0x800, &0xbf80u32.to_le_bytes());
    let mut s = rig.cpu.state();
    s.fpu.xmm = core::array::from_fn(|i| i as u128 * 0x1111);
    s.fpu.fninit();
    rig.cpu.set_state(&s);
    run(&mut rig, 6, |a| {
        a.mov(rbx, DATA)?;
        a.ldmxcsr(dword_ptr(rbx + 0x800))?;
        a.fxsave64(ptr(rbx))?;
        a.pxor(xmm7, xmm7)?;
        a.fxrstor64(ptr(rbx))?;
        a.stmxcsr(dword_ptr(rbx + 0x804))
    });
    let s = rig.cpu.state();
    assert_eq!((s.fpu.xmm[7], s.fpu.mxcsr), (0x7777, 0xbf80));
    let image: [u8; 512] = rig.read(DATA);
    assert_eq!((&image[..2], &image[24..28]), (&[0x7f, 3][..], &[0x80, 0xbf, 0, 0][..]));
    assert!(image[416..].iter().all(|&b| b == 0xee));
    assert_eq!(rig.read::<4>(DATA + 0x804), 0xbf80u32.to_le_bytes());
}

// covers: cpu/sse, cpu/dispatch-stack
#[test]
fn vector_handlers_do_not_grow_the_stack() {
    let code = assemble(|a| {
        let mut top = a.create_label();
        a.mov(rbx, DATA + 8)?;
        a.set_label(&mut top)?;
        a.movdqu(xmm1, xmmword_ptr(rbx))?;
        a.paddq(xmm1, xmm2)?;
        a.mulps(xmm3, xmm1)?;
        a.ucomiss(xmm3, xmm1)?;
        a.movups(xmmword_ptr(rbx), xmm1)?;
        a.rcpss(xmm4, dword_ptr(rbx))?;
        a.stmxcsr(dword_ptr(rbx + 64))?;
        a.jmp(top)
    });
    std::thread::Builder::new()
        .stack_size(256 << 10)
        .spawn(move || {
            let mut rig = Rig::new();
            rig.write(CODE, &code);
            let mut s = rig.cpu.state();
            s.fpu.xmm[2] = 1;
            rig.cpu.set_state(&s);
            assert_eq!(rig.run(1 + 8 * 500_000), Exit::Budget);
            assert_eq!(rig.read::<8>(DATA + 8), 500_000u64.to_le_bytes());
        })
        .unwrap()
        .join()
        .unwrap();
}
