//! General registers beyond x86-64-v2: BMI1, BMI2, ADX, direct stores, SERIALIZE.

use crate::bench;
use std::sync::OnceLock;

use bench::{Bench, EVERYTHING};
use iced_x86::IcedError;
use iced_x86::code_asm::*;
use x86::model::CpuModel;

const DATA: u64 = 0x30_0000;

type Code = fn(&mut CodeAssembler) -> Result<(), IcedError>;
const GP: (u8, Option<u32>) = (13, Some(0));

/// The processor of the other tests with them.
fn part() -> &'static CpuModel {
    static MODEL: OnceLock<CpuModel> = OnceLock::new();
    MODEL.get_or_init(|| {
        let mut rows = EVERYTHING.cpuid.to_vec();
        for row in rows.iter_mut().filter(|row| (row.leaf, row.subleaf) == (7, Some(0))) {
            // BMI1, BMI2, ADX; CLDEMOTE, MOVDIRI, MOVDIR64B; SERIALIZE.
            row.regs[1] |= 1 << 3 | 1 << 8 | 1 << 19;
            row.regs[2] |= 1 << 25 | 1 << 27 | 1 << 28;
            row.regs[3] |= 1 << 14;
        }
        CpuModel {
            cpuid: rows.leak(),
            ..EVERYTHING
        }
    })
}

/// 64-bit mode, RBX pointing at data.
fn machine() -> Bench {
    let mut b = Bench::long_with(part());
    b.state(|s| s.gpr[3] = DATA);
    b
}

// covers: cpu/bmi, cpu/adx
#[test]
fn general_registers_of_bmi_and_adx() {
    let (cf, zf, sf, of) = (1u64, 1 << 6, 1 << 7, 1 << 11);
    type Row = (&'static str, Code, u64, u64, u64, u64, u64);
    let rows: [Row; 24] = [
        // RCX, RDX, flags before; RAX, flags after.
        ("andn", |a| a.andn(rax, rcx, rdx), 0xf0, 0xff, of | cf, 0x0f, 0),
        ("andn of nothing", |a| a.andn(eax, ecx, edx), 0xff, 0xff, 0, 0, zf),
        (
            "andn, the sign",
            |a| a.andn(eax, ecx, edx),
            0,
            0x8000_0000,
            0,
            0x8000_0000,
            sf,
        ),
        (
            "bextr",
            |a| a.bextr(rax, rcx, rdx),
            0x1234_5678,
            0x0c04,
            of | cf,
            0x567,
            0,
        ),
        ("bextr beyond the end", |a| a.bextr(eax, ecx, edx), !0, 0x0820, 0, 0, zf),
        ("blsi", |a| a.blsi(rax, rcx), 0b10100, 0, of, 0b100, cf),
        ("blsi of 0", |a| a.blsi(rax, rcx), 0, 0, 0, 0, zf),
        ("blsmsk", |a| a.blsmsk(rax, rcx), 0b10100, 0, cf, 0b111, 0),
        ("blsmsk of 0", |a| a.blsmsk(rax, rcx), 0, 0, 0, !0, cf | sf),
        ("blsr", |a| a.blsr(rax, rcx), 0b10100, 0, cf, 0b10000, 0),
        ("blsr of 0", |a| a.blsr(rax, rcx), 0, 0, 0, 0, cf | zf),
        ("bzhi", |a| a.bzhi(rax, rcx, rdx), !0, 0x108, of, 0xff, 0),
        (
            "bzhi of all",
            |a| a.bzhi(eax, ecx, edx),
            0x8000_0001,
            32,
            0,
            0x8000_0001,
            cf | sf,
        ),
        ("tzcnt of 0", |a| a.tzcnt(eax, ecx), 0, 0, zf, 32, cf),
        ("lzcnt", |a| a.lzcnt(eax, ecx), 0x8000_0000, 0, cf, 0, zf),
        (
            "pdep",
            |a| a.pdep(rax, rcx, rdx),
            0b1011,
            0b1111_0000_1000_1000,
            cf | of,
            0b10_0000_1000_1000 | 0,
            cf | of,
        ),
        (
            "pext",
            |a| a.pext(rax, rcx, rdx),
            0b1010_0000_1000_0000,
            0b1111_0000_1000_1000,
            cf,
            0b10_1010,
            cf,
        ),
        ("rorx", |a| a.rorx(rax, rcx, 4), 0x1f, 0, cf, 0xf000_0000_0000_0001, cf),
        (
            "sarx",
            |a| a.sarx(eax, ecx, edx),
            0x8000_0000,
            0x24,
            sf,
            0xf800_0000,
            sf,
        ),
        ("shlx", |a| a.shlx(rax, rcx, rdx), 3, 0x41, 0, 6, 0),
        ("shrx", |a| a.shrx(eax, ecx, edx), 0x8000_0000, 31, zf, 1, zf),
        ("adcx", |a| a.adcx(ecx, edx), 0xffff_ffff, 0, cf, 0, cf),
        ("adox leaves CF", |a| a.adox(rcx, rdx), !0, 1, cf | sf, 0, cf | sf | of),
        ("mulx", |a| a.mulx(rax, rcx, rcx), 1 << 63, 6, cf, 3, cf),
    ];
    for (why, code, first, second, before, result, after) in rows {
        let mut b = machine();
        b.state(|s| {
            (s.gpr[1], s.gpr[2]) = (first, second);
            s.rflags = (2 | before).into();
        });
        b.one(code).unwrap();
        let s = b.cpu.state();
        let at = if why.starts_with("ad") { 1 } else { 0 };
        assert_eq!(s.gpr[at], result, "{why}: {:x}", s.gpr[at]);
        assert_eq!(s.rflags.into_bits() & (cf | zf | sf | of), after, "{why}: flags");
    }
    // The halves of a product: one register for both gets the high one.
    let mut b = machine();
    b.state(|s| (s.gpr[2], s.gpr[1], s.gpr[6]) = (!0, !0, 0x55));
    b.one(|a| a.mulx(rsi, rdi, rcx)).unwrap();
    assert_eq!((b.cpu.state().gpr[6], b.cpu.state().gpr[7]), (!1, 1));
    // VEX instructions on general registers need no AVX state.
    assert_eq!((b.cpu.state().xcr0, b.cpu.state().cr4.into_bits() >> 18 & 1), (1, 0));
    b.one(|a| a.andn(eax, ecx, edx)).unwrap();
}

// covers: cpu/movdiri, cpu/serialize
#[test]
fn direct_stores_and_serialize() {
    let mut b = machine();
    b.state(|s| (s.gpr[1], s.gpr[0]) = (DATA + 0x1000, 0x1122_3344_5566_7788));
    b.write(DATA, &core::array::from_fn::<u8, 64, _>(|i| i as u8 ^ 0x5a));
    b.one(|a| a.movdiri(qword_ptr(rcx + 8), rax)).unwrap();
    assert_eq!(b.read::<8>(DATA + 0x1008), 0x1122_3344_5566_7788u64.to_le_bytes());
    b.one(|a| a.movdir64b(rcx, zmmword_ptr(rbx))).unwrap();
    assert_eq!(b.read::<64>(DATA + 0x1000), core::array::from_fn(|i| i as u8 ^ 0x5a));
    b.state(|s| s.gpr[1] += 32);
    assert_eq!(
        b.one(|a| a.movdir64b(rcx, zmmword_ptr(rbx))),
        Err(GP),
        "the destination is aligned"
    );
    b.state(|s| (s.gpr[1], s.gpr[3]) = (1 << 39, DATA + 1));
    assert_eq!(
        b.one(|a| a.movdir64b(rcx, zmmword_ptr(rbx))),
        Err((14, Some(2))),
        "the source need not be"
    );
    let before = b.cpu.state();
    b.one(|a| a.serialize()).unwrap();
    assert_eq!(b.cpu.state().gpr, before.gpr);
    b.one(|a| a.cldemote(byte_ptr(rbx))).unwrap();
}
