use super::forms::{FAMILIES, Implicit, VEX_FAMILIES, supported};
use super::*;
use iced_x86::{Code, Decoder, DecoderOptions, EncodingKind, Instruction, OpCodeOperandKind, OpKind, Register};

fn decode(hex: &str) -> Instruction {
    let bytes: Vec<u8> = hex
        .split_whitespace()
        .map(|byte| u8::from_str_radix(byte, 16).expect("two hex digits"))
        .collect();
    let insn = Decoder::with_ip(64, &bytes, 0, DecoderOptions::NONE).decode();
    assert!(!insn.is_invalid() && insn.len() == bytes.len(), "{hex}");
    insn
}

#[repr(align(64))]
struct Bounce([u8; 64]);

struct Machine {
    fpu: FpuState,
    gpr: [u64; 16],
    memory: Bounce,
}

impl Machine {
    fn new() -> Machine {
        let mut fpu = FpuState::new();
        fpu.fninit();
        Machine {
            fpu,
            gpr: [0; 16],
            memory: Bounce([0; 64]),
        }
    }

    fn run(&mut self, insn: &Instruction) -> Result<u32, SimdException> {
        let thunk = prepare(insn).expect("a vector instruction");
        // SAFETY: the three are live, and no operand is longer than the bounce buffer or wants more alignment.
        unsafe { thunk.run(&mut self.fpu, self.gpr.as_mut_ptr(), self.memory.0.as_mut_ptr()) }
    }
}

/// Every form with a thunk, with operands xmm5/xmm6/xmm7/xmm8, mm5/mm6, rbx and [rax].
fn all_forms() -> Vec<Instruction> {
    let mut forms = Vec::new();
    for code in Code::values() {
        let families = match code.encoding() {
            EncodingKind::VEX => VEX_FAMILIES,
            _ => FAMILIES,
        };
        if !code.cpuid_features().iter().all(|f| families.contains(f)) {
            continue;
        }
        let op_code = code.op_code();
        if !op_code.is_instruction() || !op_code.mode64() {
            continue;
        }
        for memory in [false, true] {
            let mut insn = Instruction::default();
            insn.set_code(code);
            let mut known = true;
            let mut has_memory = false;
            for (i, &kind) in op_code.op_kinds().iter().enumerate() {
                use OpCodeOperandKind::*;
                let i = i as u32;
                let mut register = |r| {
                    insn.set_op_kind(i, OpKind::Register);
                    insn.set_op_register(i, r);
                };
                match kind {
                    xmm_reg => register(Register::XMM5),
                    xmm_rm => register(Register::XMM6),
                    xmm_or_mem if !memory => register(Register::XMM6),
                    xmm_vvvv => register(Register::XMM7),
                    xmm_is4 => register(Register::XMM8),
                    ymm_reg => register(Register::YMM5),
                    ymm_or_mem if !memory => register(Register::YMM6),
                    ymm_rm => register(Register::YMM6),
                    ymm_vvvv => register(Register::YMM7),
                    ymm_is4 => register(Register::YMM8),
                    mm_reg => register(Register::MM5),
                    mm_rm => register(Register::MM6),
                    mm_or_mem if !memory => register(Register::MM6),
                    r32_reg | r32_rm => register(Register::EBX),
                    r64_reg | r64_rm => register(Register::RBX),
                    r32_or_mem if !memory => register(Register::EBX),
                    r64_or_mem if !memory => register(Register::RBX),
                    xmm_or_mem | ymm_or_mem | mm_or_mem | r32_or_mem | r64_or_mem | mem => {
                        has_memory = true;
                        insn.set_op_kind(i, OpKind::Memory);
                        insn.set_memory_base(Register::RAX);
                    }
                    imm8 => {
                        insn.set_op_kind(i, OpKind::Immediate8);
                        insn.set_immediate8(1);
                    }
                    _ => known = false,
                }
            }
            if known && has_memory == memory && supported(&insn) {
                forms.push(insn);
            }
        }
    }
    forms
}

// covers: cpu/sse, cpu/mmx, cpu/avx
#[test]
fn every_form_touches_its_operands_only() {
    let forms = all_forms();
    let vex = forms.iter().filter(|form| form.encoding() == EncodingKind::VEX).count();
    assert!(
        forms.len() - vex > 500 && vex > 800,
        "{} forms, {vex} in VEX",
        forms.len()
    );
    // The others have tables (`crate::fpu::portable`).
    let executed: Vec<_> = forms.iter().filter(|insn| host_executes(insn)).collect();
    assert!(executed.len() > 250, "MMX to SSE2 are everywhere: {}", executed.len());
    for insn in executed {
        let mut m = Machine::new();
        for i in 0..16 {
            m.fpu.ymm_hi[i] = 0x4000_0000_3f80_0000_4010_0000_4090_0000 + ((i as u128) << 50 | i as u128);
            m.fpu.xmm[i] = 0x3ff0_0000_3f80_0000_4010_0000_4090_0000 + ((i as u128) << 50 | i as u128);
            m.gpr[i] = 3 + i as u64;
        }
        for i in 0..8 {
            m.fpu.set_mm(i, 0x0102_0304_0506_0708 + i as u64);
        }
        m.memory.0 = std::array::from_fn(|i| i as u8 + 1);
        let before = m.fpu.clone();
        let gpr = m.gpr;
        let thunk = prepare(insn).unwrap_or_else(|e| panic!("{:?}: {e:?}", insn.code()));
        m.run(insn).unwrap_or_else(|_| panic!("{:?}", insn.code()));
        let implicit = Implicit::of(insn.mnemonic());
        for (i, &before_gpr) in gpr.iter().enumerate() {
            let may = matches!(i, 5..=7) || i == 0 && implicit.writes_xmm0;
            assert!(may || m.fpu.xmm[i] == before.xmm[i], "{:?}: xmm{i}", insn.code());
            let vex = insn.encoding() == EncodingKind::VEX;
            assert!(
                may && vex || m.fpu.ymm_hi[i] == before.ymm_hi[i],
                "{:?}: ymm{i}",
                insn.code()
            );
            let may = i == 3 || i == 1 && implicit.index;
            assert!(may || m.gpr[i] == before_gpr, "{:?}: gpr {i}", insn.code());
        }
        for i in 0..8 {
            assert!(
                i == 5 || i == 6 || m.fpu.r[i] == before.r[i],
                "{:?}: mm{i}",
                insn.code()
            );
        }
        assert_eq!(m.fpu.tag, if thunk.traits.mmx { 0xff } else { 0 }, "{:?}", insn.code());
        let written = match thunk.memory {
            Some(MemoryUse { write: true, size, .. }) => size as usize,
            _ => 0,
        };
        for (i, &byte) in m.memory.0.iter().enumerate().skip(written) {
            assert_eq!(byte, i as u8 + 1, "{:?}: memory {i}", insn.code());
        }
        if let Some(memory) = thunk.memory {
            assert!(memory.size > 0 && (memory.read || memory.write), "{:?}", insn.code());
        }
        if !thunk.traits.mxcsr {
            assert_eq!(m.fpu.mxcsr, before.mxcsr, "{:?}", insn.code());
        }
    }
}

// covers: cpu/sse
#[test]
fn thunks_are_shared_by_all_register_numbers() {
    let entry = |hex: &str| prepare(&decode(hex)).expect("a vector instruction").entry as usize;
    let paddb = entry("66 0f fc c1");
    assert_eq!(paddb, entry("66 45 0f fc f7"), "paddb xmm14,xmm15");
    assert_ne!(paddb, entry("66 0f fc 03"), "paddb xmm0,[rbx]");
    assert_eq!(
        entry("66 0f fc 03"),
        entry("66 42 0f fc 94 a7 00 00 00 01"),
        "paddb xmm2,[rdi+r12*4+1000000h]"
    );
    assert_eq!(
        entry("66 0f fc 03"),
        entry("64 67 66 0f fc 43 08"),
        "paddb xmm0,fs:[ebx+8]"
    );
}

// covers: cpu/sse, cpu/sse2, cpu/sse3, cpu/ssse3, cpu/sse41, cpu/sse42, cpu/aes, cpu/pclmul
#[test]
fn results_by_family() {
    // XMM1, XMM2 in; XMM1 out.
    for (hex, a, b, expected, why) in [
        ("0f 58 ca", 0x3f80_0000_u128, 0x4000_0000, 0x4040_0000, "addps: 1 + 2"),
        ("0f 57 ca", 0xff, 0x0f, 0xf0, "xorps"),
        (
            "f3 0f 59 ca",
            0xdead << 32 | 0x4040_0000,
            0x4000_0000,
            0xdead << 32 | 0x40c0_0000,
            "mulss: 3 * 2",
        ),
        ("f2 0f 5e ca", 0x4018 << 48, 0x4000 << 48, 0x4008 << 48, "divsd: 6 / 2"),
        ("66 0f fe ca", 0xffff_ffff, 1, 0, "paddd wraps"),
        (
            "66 0f 70 ca 1b",
            0,
            4 << 96 | 3 << 64 | 2 << 32 | 1,
            1 << 96 | 2 << 64 | 3 << 32 | 4,
            "pshufd",
        ),
        ("f2 0f 7c ca", 0x3f80_0000_3f80_0000, 0, 0x4000_0000, "haddps"),
        ("66 0f 38 1c ca", 0, 0xff80_7f01, 0x0180_7f01, "pabsb"),
        (
            "66 0f 38 00 ca",
            0x4433_2211,
            0x8000_0102,
            0x1111_1111_1111_1111_1111_1111_0011_2233,
            "pshufb",
        ),
        ("66 0f 38 40 ca", 0x1_0001, 0x1_0001, 0x2_0001, "pmulld"),
        ("66 0f 3a 0a ca 01", 0, 0xbfc0_0000, 0xc000_0000, "roundss down: -1.5"),
        (
            "66 0f 38 37 ca",
            1 << 64 | 5,
            4,
            u64::MAX as u128 | (u64::MAX as u128) << 64,
            "pcmpgtq",
        ),
        ("66 0f 3a 44 ca 00", 0b111, 0b101, 0b11011, "pclmulqdq"),
        ("66 0f 38 db ca", 0, 0x1, 0x0b0d_090e, "aesimc of one byte"),
    ] {
        let mut m = Machine::new();
        m.fpu.xmm[1] = a;
        m.fpu.xmm[2] = b;
        m.run(&decode(hex)).expect("all masked");
        assert_eq!(m.fpu.xmm[1], expected, "{why}: {:x}", m.fpu.xmm[1]);
        // The same with the second operand in memory.
        let mut in_memory: Vec<&str> = hex.split_whitespace().collect();
        let at = in_memory.iter().position(|&byte| byte == "ca").expect("a ModRM byte");
        in_memory[at] = "0b";
        let mut m = Machine::new();
        m.fpu.xmm[1] = a;
        m.memory.0[..16].copy_from_slice(&b.to_le_bytes());
        m.run(&decode(&in_memory.join(" "))).expect("all masked");
        assert_eq!(m.fpu.xmm[1], expected, "{why} from memory");
    }
}

// covers: cpu/mmx
#[test]
fn mmx_goes_through_the_x87_registers() {
    let mut m = Machine::new();
    m.fpu.sw = 5 << 11;
    m.fpu.r[1] = 0x3fff_0102_0304_0506_0708;
    m.fpu.r[2] = 0x3fff_ff02_0304_0506_0708;
    m.run(&decode("0f fc ca")).expect("no exception"); // paddb mm1,mm2
    assert_eq!(
        m.fpu.r[1], 0xffff_0004_0608_0a0c_0e10,
        "the exponent is all ones after a write"
    );
    assert_eq!(m.fpu.r[2], 0x3fff_ff02_0304_0506_0708, "a source stays as it is");
    assert_eq!((m.fpu.top(), m.fpu.tag), (0, 0xff));
    m.run(&decode("0f 6e da")).expect("no exception"); // movd mm3,edx
    assert_eq!(m.fpu.mm(3), 0);
    m.gpr[2] = 0xaaaa_bbbb_cccc_dddd;
    m.run(&decode("0f 6e da")).expect("no exception");
    assert_eq!(m.fpu.mm(3), 0xcccc_dddd);
    m.run(&decode("0f d7 c3")).expect("no exception"); // pmovmskb eax,mm3
    assert_eq!(m.gpr[0], 0x0f);
    assert!(!prepare(&decode("f3 0f e6 ca")).expect("cvtdq2pd").traits.mmx);
    assert!(!prepare(&decode("0f 2a 0b")).expect("cvtpi2ps xmm1,[rbx]").traits.mmx);
    assert!(!prepare(&decode("66 0f 2a 0b")).expect("cvtpi2pd xmm1,[rbx]").traits.mmx);
}

// covers: cpu/sse2, cpu/sse41
#[test]
fn general_registers_go_in_and_out() {
    let mut m = Machine::new();
    m.gpr = std::array::from_fn(|i| 0xffff_ffff_0000_0000 | i as u64);
    m.run(&decode("66 41 0f 6e cb")).expect("no exception"); // movd xmm1,r11d
    assert_eq!(m.fpu.xmm[1], 11);
    m.run(&decode("66 4d 0f 6e cb")).expect("no exception"); // movq xmm9,r11
    assert_eq!(m.fpu.xmm[9], 0xffff_ffff_0000_000b);
    m.run(&decode("66 45 0f 7e cc")).expect("no exception"); // movd r12d,xmm9
    assert_eq!(m.gpr[12], 11, "a 32-bit destination is zero-extended");
    m.run(&decode("66 4d 0f 7e cc")).expect("no exception"); // movq r12,xmm9
    assert_eq!(m.gpr[12], 0xffff_ffff_0000_000b);
    m.fpu.xmm[1] = 0xc008 << 48;
    m.run(&decode("f2 48 0f 2c e1")).expect("no exception"); // cvttsd2si rsp,xmm1
    assert_eq!(m.gpr[4] as i64, -3);
    m.run(&decode("66 0f 3a 20 cf 02")).expect("no exception"); // pinsrb xmm1,edi,2
    assert_eq!(m.fpu.xmm[1], 0xc008 << 48 | 7 << 16);
    m.run(&decode("66 0f c5 c1 03")).expect("no exception"); // pextrw eax,xmm1,3
    assert_eq!(m.gpr[0], 0xc008);
    m.run(&decode("66 0f 3a 17 0b 01")).expect("no exception"); // extractps [rbx],xmm1,1
    assert_eq!(m.memory.0[..6], [0, 0, 0x08, 0xc0, 0, 0]);
}

// covers: cpu/sse42
#[test]
fn string_compares_use_their_implicit_operands() {
    let load = |text: &[u8]| {
        let mut bytes = [0; 16];
        bytes[..text.len()].copy_from_slice(text);
        u128::from_le_bytes(bytes)
    };
    let mut m = Machine::new();
    m.fpu.xmm[1] = load(b"needle");
    m.fpu.xmm[2] = load(b"in a needlework");
    m.gpr[1] = !0;
    // pcmpistri xmm1,xmm2,0Ch: equal ordered, bytes.
    let flags = m.run(&decode("66 0f 3a 63 ca 0c")).expect("no exception");
    assert_eq!(m.gpr[1], 5);
    assert_eq!(flags, 1 | 1 << 6 | 1 << 7, "CF: found; ZF, SF: both strings end");
    // pcmpestri xmm1,xmm2,0Ch with explicit lengths 6 and 8: the needle is cut off but may continue.
    (m.gpr[0], m.gpr[2]) = (6, 4);
    let flags = m.run(&decode("66 0f 3a 61 ca 0c")).expect("no exception");
    assert_eq!((m.gpr[1], flags), (16, 1 << 6 | 1 << 7));
    assert_eq!((m.gpr[0], m.gpr[2]), (6, 4));
    // pcmpistrm xmm1,xmm2,40h: which bytes of xmm2 are any of xmm1's.
    m.run(&decode("66 0f 3a 62 ca 40")).expect("no exception");
    let mask = b"in a needlework".iter().rev().fold(0u128, |mask, c| {
        mask << 8 | if b"needle".contains(c) { 0xff } else { 0 }
    });
    assert_eq!(m.fpu.xmm[0], mask);
}

// covers: cpu/sse41
#[test]
fn variable_blends_read_xmm0() {
    let mut m = Machine::new();
    m.fpu.xmm[0] = 0x80 << 120 | 0x7f;
    m.fpu.xmm[3] = 0x11 << 120 | 0x22;
    m.fpu.xmm[4] = 0x33 << 120 | 0x44;
    m.run(&decode("66 0f 38 10 dc")).expect("no exception"); // pblendvb xmm3,xmm4
    assert_eq!(m.fpu.xmm[3], 0x33 << 120 | 0x22);
    m.run(&decode("66 0f 38 10 c4")).expect("no exception"); // pblendvb xmm0,xmm4
    assert_eq!(m.fpu.xmm[0], 0x33 << 120 | 0x7f, "XMM0 as mask and destination");
}

// covers: cpu/sse, cpu/sse2, cpu/sse41
#[test]
fn compares_return_flags() {
    let (cf, pf, zf) = (1, 1 << 2, 1 << 6);
    for (hex, a, b, flags, why) in [
        ("0f 2f ca", 0x3f80_0000_u128, 0x4000_0000_u128, cf, "comiss less"),
        ("0f 2f ca", 0x4000_0000, 0x3f80_0000, 0, "comiss greater"),
        ("0f 2e ca", 0x8000_0000, 0, zf, "ucomiss -0 = +0"),
        ("66 0f 2e ca", 0x7ff8 << 48, 0, cf | pf | zf, "ucomisd unordered"),
        ("66 0f 38 17 ca", 1, 2, zf, "ptest: no common bit"),
        ("66 0f 38 17 ca", 3, 2, cf, "ptest: all of the second"),
    ] {
        let mut m = Machine::new();
        m.fpu.xmm[1] = a;
        m.fpu.xmm[2] = b;
        assert_eq!(m.run(&decode(hex)), Ok(flags), "{why}");
    }
}

// covers: cpu/mxcsr-exceptions
#[test]
fn exceptions_are_sticky_or_stop_the_instruction() {
    use mxcsr::{DAZ, FTZ};
    const IE: u32 = 1;
    const DE: u32 = 2;
    const ZE: u32 = 4;
    const OE: u32 = 8;
    const UE: u32 = 16;
    const PE: u32 = 32;
    const MASKED: u32 = 0x1f80;
    let down = 1 << 13;
    let unmask = |flag: u32| MASKED & !(flag << 7);
    // XMM1, XMM2, MXCSR in; flags raised, low element of XMM1 out (`None`: #XM, destination unchanged).
    let (one, three, tiny, huge, denormal) = (0x3f80_0000u32, 0x4040_0000, 0x0080_0000, 0x7f00_0000, 1);
    for (hex, a, b, control, raised, low, why) in [
        ("0f 5e ca", [one; 4], [three; 4], MASKED, PE, Some(0x3eaa_aaab), "1/3"),
        (
            "0f 5e ca",
            [one; 4],
            [three; 4],
            MASKED | down,
            PE,
            Some(0x3eaa_aaaa),
            "1/3 rounded down",
        ),
        (
            "0f 5e ca",
            [one; 4],
            [three; 4],
            unmask(PE),
            PE,
            None,
            "inexact, unmasked",
        ),
        ("0f 5e ca", [one; 4], [0; 4], MASKED, ZE, Some(0x7f80_0000), "1/0"),
        ("0f 5e ca", [one; 4], [0; 4], unmask(ZE), ZE, None, "1/0 unmasked"),
        (
            "0f 5e ca",
            [one, one, 0, 0],
            [0, three, 0, 0],
            unmask(ZE),
            IE | ZE,
            None,
            "IE beside ZE, but no PE",
        ),
        (
            "0f 5e ca",
            [0; 4],
            [0; 4],
            MASKED,
            IE,
            Some(0xffc0_0000),
            "0/0 is the indefinite",
        ),
        ("0f 5e ca", [0; 4], [0; 4], unmask(IE), IE, None, "0/0 unmasked"),
        (
            "0f 59 ca",
            [huge; 4],
            [huge; 4],
            MASKED,
            OE | PE,
            Some(0x7f80_0000),
            "overflow",
        ),
        (
            "0f 59 ca",
            [huge; 4],
            [huge; 4],
            MASKED | down,
            OE | PE,
            Some(0x7f7f_ffff),
            "overflow rounded down",
        ),
        (
            "0f 59 ca",
            [huge; 4],
            [huge; 4],
            unmask(OE),
            OE | PE,
            None,
            "overflow unmasked",
        ),
        (
            "0f 59 ca",
            [tiny; 4],
            [0x3f00_0000; 4],
            MASKED,
            0,
            Some(0x0040_0000),
            "tiny but exact",
        ),
        (
            "0f 59 ca",
            [tiny; 4],
            [0x3f00_0000; 4],
            unmask(UE),
            UE | PE,
            None,
            "tiny but exact, unmasked",
        ),
        (
            "0f 59 ca",
            [tiny; 4],
            [0x3f00_0000; 4],
            MASKED | FTZ,
            UE | PE,
            Some(0),
            "flushed",
        ),
        (
            "0f 59 ca",
            [tiny; 4],
            [0x3f00_0000; 4],
            unmask(UE) | FTZ,
            UE | PE,
            None,
            "FTZ needs UE masked",
        ),
        ("0f 59 ca", [one; 4], [one; 4], unmask(UE), 0, Some(one), "nothing tiny"),
        (
            "0f 58 ca",
            [denormal; 4],
            [one; 4],
            MASKED,
            DE | PE,
            Some(one),
            "a denormal operand",
        ),
        (
            "0f 58 ca",
            [denormal; 4],
            [one; 4],
            MASKED | DAZ,
            0,
            Some(one),
            "denormals are zeros",
        ),
        (
            "0f 58 ca",
            [denormal; 4],
            [one; 4],
            unmask(DE),
            DE,
            None,
            "a denormal operand, unmasked",
        ),
        (
            "0f 58 ca",
            [0x7f80_0001; 4],
            [one; 4],
            MASKED,
            IE,
            Some(0x7fc0_0001),
            "SNaN is made quiet",
        ),
        (
            "0f 58 ca",
            [one; 4],
            [0x7fc0_0042; 4],
            MASKED,
            0,
            Some(0x7fc0_0042),
            "QNaN passes",
        ),
        (
            "0f 5d ca",
            [one; 4],
            [0x7fc0_0042; 4],
            MASKED,
            IE,
            Some(0x7fc0_0042),
            "minps returns its second operand",
        ),
        (
            "0f 54 ca",
            [0x7f80_0001; 4],
            [!0; 4],
            0,
            0,
            Some(0x7f80_0001),
            "andps is not arithmetic",
        ),
    ] {
        let pack = |v: [u32; 4]| v.iter().rev().fold(0u128, |all, &x| all << 32 | x as u128);
        let mut m = Machine::new();
        m.fpu.mxcsr = control;
        m.fpu.xmm[1] = pack(a);
        m.fpu.xmm[2] = pack(b);
        let outcome = m.run(&decode(hex));
        assert_eq!(m.fpu.mxcsr, control | raised, "{why}: MXCSR");
        match low {
            Some(low) => assert_eq!((outcome, m.fpu.xmm[1] as u32), (Ok(0), low), "{why}"),
            None => assert_eq!((outcome, m.fpu.xmm[1]), (Err(SimdException), pack(a)), "{why}"),
        }
    }
}

// covers: cpu/mxcsr-exceptions
#[test]
fn the_hosts_mxcsr_is_left_alone() {
    let mut m = Machine::new();
    m.fpu.mxcsr = 0x7fff & !mxcsr::MASKS | mxcsr::FTZ;
    m.fpu.mxcsr |= mxcsr::MASKS;
    m.fpu.xmm[1] = 0x3f80_0000;
    m.run(&decode("f3 0f 58 c9")).expect("masked");
    let mut now = 0u32;
    // SAFETY: stores four bytes to a local.
    unsafe { std::arch::asm!("stmxcsr [{}]", in(reg) &mut now, options(nostack)) };
    assert_eq!(now & !mxcsr::FLAGS, mxcsr::RESET);
}

// covers: cpu/sse
#[test]
fn alignment_is_demanded_of_sixteen_byte_operands() {
    for (hex, alignment, read, write, why) in [
        ("0f 28 03", 16, true, false, "movaps xmm0,[rbx]"),
        ("0f 29 03", 16, false, true, "movaps [rbx],xmm0"),
        ("0f 10 03", 1, true, false, "movups xmm0,[rbx]"),
        ("f3 0f 7f 03", 1, false, true, "movdqu [rbx],xmm0"),
        ("66 0f ef 03", 16, true, false, "pxor xmm0,[rbx]"),
        ("f2 0f f0 03", 1, true, false, "lddqu xmm0,[rbx]"),
        ("66 0f 3a 63 03 0c", 1, true, false, "pcmpistri xmm0,[rbx],0Ch"),
        ("f3 0f 58 03", 1, true, false, "addss xmm0,[rbx]"),
        ("0f 16 03", 1, true, false, "movhps xmm0,[rbx]"),
        ("66 0f 38 2a 03", 16, true, false, "movntdqa xmm0,[rbx]"),
    ] {
        let memory = prepare(&decode(hex)).expect(why).memory.expect(why);
        assert_eq!(
            (memory.alignment, memory.read, memory.write),
            (alignment, read, write),
            "{why}"
        );
    }
}

// covers: cpu/sse
#[test]
fn others_are_refused() {
    for (hex, why) in [
        ("0f ae 13", "ldmxcsr"),
        ("0f 53 c1", "rcpps"),
        ("66 0f f7 c1", "maskmovdqu"),
        ("c5 f8 ae 13", "vldmxcsr"),
        ("c5 f8 53 c1", "vrcpps"),
        ("c4 e2 79 2c 03", "vmaskmovps"),
        ("c4 e2 69 90 04 0b", "vpgatherdd"),
        ("c5 f8 77", "vzeroupper"),
        ("c4 e2 70 f2 c2", "andn"),
        ("d8 c1", "fadd"),
        ("db 0b", "fisttp"),
        ("0f 77", "emms"),
        ("0f c3 03", "movnti"),
        ("f2 0f 38 f1 c1", "crc32"),
    ] {
        assert_eq!(prepare(&decode(hex)).err(), Some(NoThunk::Unsupported), "{why}");
    }
}

// covers: cpu/avx, cpu/avx2
#[test]
fn what_vex_writes_it_writes_to_the_top() {
    let (low, high) = (0x0101_0101_0101_0101_0202_0202_0202_0202u128, 0x0303_0303u128);
    for (hex, expected, upper, why) in [
        ("c5 ed fc ca", 2 * low, 2 * high, "vpaddb ymm1,ymm2,ymm2"),
        ("c5 e9 fc ca", 2 * low, 0, "vpaddb xmm1,xmm2,xmm2"),
        ("66 0f 6f ca", low, 7, "movdqa xmm1,xmm2"),
        ("c4 e3 7d 19 d1 01", high, 0, "vextractf128 xmm1,ymm2,1"),
        ("c4 e3 6d 18 ca 01", low, low, "vinsertf128 ymm1,ymm2,xmm2,1"),
        (
            "c4 e2 7d 58 ca",
            0x02020202 * 0x1_0000_0001_0000_0001_0000_0001,
            0x02020202 * 0x1_0000_0001_0000_0001_0000_0001,
            "vpbroadcastd",
        ),
        ("c5 ea 10 ca", low, 0, "vmovss xmm1,xmm2,xmm2"),
    ] {
        let mut m = Machine::new();
        (m.fpu.xmm[2], m.fpu.ymm_hi[2]) = (low, high);
        m.fpu.ymm_hi[1] = 7;
        m.run(&decode(hex)).expect("not arithmetic");
        assert_eq!((m.fpu.xmm[1], m.fpu.ymm_hi[1]), (expected, upper), "{why}");
        assert_eq!((m.fpu.xmm[2], m.fpu.ymm_hi[2]), (low, high), "{why}: the source");
    }
}
