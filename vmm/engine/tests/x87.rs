//! The x87 against the host's own: the same state, the same instruction, the whole FXSAVE image compared.
#![allow(unsafe_code)] // The host executes instructions from a page made for it.

use engine::fpu::FpuState;
use engine::fpu::state::sw;
use engine::fpu::x87::{X87Insn, X87Op, execute};
use iced_x86::{Decoder, DecoderOptions, Instruction};

#[repr(align(64))]
struct Image([u8; 512]);

/// A page of code: `fxrstor64 [rdi]; push rdx; popfq; INSN; pushfq; pop rax; fxsave64 [rdi]; fninit; ret`.
struct Host(*mut u8);

impl Host {
    fn new() -> Host {
        let protection = libc::PROT_READ | libc::PROT_WRITE | libc::PROT_EXEC;
        // SAFETY: A fresh anonymous mapping.
        let page = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                4096,
                protection,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
                -1,
                0,
            )
        };
        assert_ne!(page, libc::MAP_FAILED);
        Host(page.cast())
    }

    /// Runs an x87 instruction, whose memory operand if any is [rsi], on a state in which no exception is pending.
    fn run(&self, insn: &[u8], state: &mut FpuState, memory: &mut [u8; 16], rflags: u64) -> u64 {
        let mut code = vec![0x48, 0x0f, 0xae, 0x0f, 0x52, 0x9d];
        code.extend(insn);
        code.extend([0x9c, 0x58, 0x48, 0x0f, 0xae, 0x07, 0xdb, 0xe3, 0xc3]);
        let mut image = Image([0; 512]);
        image.0[..416].copy_from_slice(&state.fxsave(true, true));
        let flags;
        // SAFETY: The page is long enough; the code keeps to the C convention, and leaves x87 and MXCSR as it found them (MXCSR
        // is the reset value in every state used here).
        unsafe {
            std::ptr::copy_nonoverlapping(code.as_ptr(), self.0, code.len());
            std::arch::x86_64::__cpuid(0);
            let f: extern "sysv64" fn(*mut u8, *mut u8, u64) -> u64 = std::mem::transmute(self.0);
            flags = f(image.0.as_mut_ptr(), memory.as_mut_ptr(), rflags);
        }
        let mut head = [0; 416];
        head.copy_from_slice(&image.0[..416]);
        state.fxrstor(&head, true, true).expect("the host's own image");
        flags & 0x8d5
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        // SAFETY: Mapped in `new`.
        unsafe { libc::munmap(self.0.cast(), 4096) };
    }
}

/// xorshift64*.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    fn below(&mut self, n: u64) -> u64 {
        (self.next() >> 11) % n
    }

    fn f80(&mut self) -> u128 {
        const INTERESTING: [u128; 22] = [
            0,
            1 << 79,
            0x3fff_8000_0000_0000_0000,
            0xbfff_8000_0000_0000_0000,
            0x3ffe_8000_0000_0000_0000,
            0x7fff_8000_0000_0000_0000,
            0xffff_8000_0000_0000_0000,
            0x7fff_c000_0000_0000_1234,
            0xffff_c000_0000_0000_0000,
            0x7fff_8000_0000_0000_0001,
            0xffff_a000_0000_0000_0001,
            0x0000_0000_0000_0000_0001,
            0x8000_7fff_ffff_ffff_ffff,
            0x0000_8000_0000_0000_0000,
            0x0001_8000_0000_0000_0000,
            0x7ffe_ffff_ffff_ffff_ffff,
            0x4000_4000_0000_0000_0000,
            0x7fff_0000_0000_0000_0001,
            0x4002_a000_0000_0000_0000,
            0x403e_8000_0000_0000_0000,
            0xc03e_8000_0000_0000_0000,
            0x3fff_ffff_ffff_ffff_ffff,
        ];
        let sign = (self.below(2) as u128) << 79;
        let significand = match self.below(3) {
            0 => self.next() | 1 << 63,
            1 => (self.next() | 1 << 63) & u64::MAX << self.below(64),
            _ => 1 << 63 | self.next() >> self.below(64),
        } as u128;
        match self.below(8) {
            0 | 1 => INTERESTING[self.below(INTERESTING.len() as u64) as usize],
            2 => sign | (self.below(0x8000) as u128) << 64 | significand,
            3 => sign | ((self.below(100)) as u128) << 64 | significand,
            4 => sign | (0x7fff - self.below(100) as u128) << 64 | significand,
            _ => sign | (0x3fff - 40 + self.below(110) as u128) << 64 | significand,
        }
    }

    fn memory(&mut self, insn: X87Insn) -> [u8; 16] {
        use engine::fpu::x87::X87Memory as M;
        let value = match insn.memory {
            M::F32 => match self.below(3) {
                0 => [
                    0,
                    1,
                    0x8000_0000,
                    0x7f80_0000,
                    0x7fc0_0001,
                    0xff80_0001,
                    0x3f80_0000,
                    0x7fffff,
                ][self.below(8) as usize],
                1 => (self.below(100) as u128 + 80) << 23 | self.next() as u128 & 0x807f_ffff,
                _ => self.next() as u32 as u128,
            },
            M::F64 => match self.below(3) {
                0 => [
                    0,
                    1,
                    1 << 63,
                    0x7ff << 52,
                    0x7ff8 << 48 | 1,
                    0xfff << 52 | 1,
                    0x3ff << 52,
                    0xf_ffff,
                ][self.below(8) as usize],
                1 => (self.below(100) as u128 + 980) << 52 | self.next() as u128 & 0x800f_ffff_ffff_ffff,
                _ => self.next() as u128,
            },
            M::F80 => self.f80(),
            M::Bcd => {
                let digits = (0..18).fold(0, |all, _| all << 4 | self.below(10) as u128);
                digits >> (4 * self.below(19)) | (self.below(2) as u128) << 79
            }
            _ => (self.next() >> self.below(64)) as u128,
        };
        value.to_le_bytes()
    }

    fn state(&mut self) -> FpuState {
        let mut s = FpuState::new();
        s.fninit();
        for r in &mut s.r {
            *r = self.f80();
        }
        s.tag = match self.below(3) {
            0 => self.next() as u8,
            _ => 0xff,
        };
        s.cw = 0x40 | (self.next() as u16 & 0xf00) | 0x3f;
        if self.below(3) == 0 {
            s.cw = s.cw & !0x3f | self.next() as u16 & 0x3f;
        }
        // Precision control 01 is reserved.
        if s.cw >> 8 & 3 == 1 {
            s.cw |= 0x300;
        }
        let quiet = self.next() as u16 & s.cw & 0x3f;
        s.sw = self.next() as u16 & (sw::TOP | sw::C0 | sw::C1 | sw::C2 | sw::C3) | quiet;
        // Room for pushes, more often than not.
        if self.below(4) != 0 {
            s.tag &= !(1 << ((s.top() + 7) & 7));
        }
        s
    }
}

fn decode(bytes: &[u8]) -> Option<(Instruction, X87Insn)> {
    let insn = Decoder::with_ip(64, bytes, 0, DecoderOptions::NONE).decode();
    if insn.is_invalid() || insn.len() != bytes.len() {
        return None;
    }
    X87Insn::decode(&insn).map(|x| (insn, x))
}

/// All non-control instructions: opcode and ModRM, memory at [rsi].
fn instructions() -> Vec<[u8; 2]> {
    (0xd8..=0xdfu8)
        .flat_map(|op| {
            (0..8)
                .map(move |reg| [op, reg << 3 | 6])
                .chain((0xc0..=0xff).map(move |modrm| [op, modrm]))
        })
        .filter(|bytes| decode(bytes).is_some())
        .collect()
}

fn transcendental(op: X87Op) -> bool {
    use X87Op::*;
    matches!(op, F2xm1 | Yl2x | Yl2xp1 | Ptan | Patan | Sin | Cos | Sincos)
}

/// Condition codes that the manual leaves undefined, or that vendors are known to treat differently.
fn undefined_codes(op: X87Op, after: &FpuState) -> u16 {
    use X87Op::*;
    let unmasked = after.pending();
    match op {
        // "C1: set to 0" in the SDM; unchanged elsewhere.
        Comi | Ucomi => sw::C1,
        Free => sw::C1,
        // An unmasked exception leaves the codes alone on Intel's processors; others report "unordered".
        Com | Ucom | Tst if unmasked => sw::C0 | sw::C2 | sw::C3,
        Prem | Prem1 if unmasked => sw::C0 | sw::C2 | sw::C3,
        _ => 0,
    }
}

// covers: cpu/x87, cpu/x87-exceptions
#[test]
fn every_instruction_does_what_the_host_does() {
    let host = Host::new();
    let mut random = Random(0x1234_5678_9abc_def1);
    let all = instructions();
    assert!(all.len() > 400, "{} instructions", all.len());
    let rounds = std::env::var("X87_ROUNDS")
        .ok()
        .and_then(|n| n.parse().ok())
        .unwrap_or(400);
    let mut failures = std::collections::BTreeMap::<String, (usize, String)>::new();
    for bytes in all {
        let (insn, x87) = decode(&bytes).expect("filtered");
        if transcendental(x87.op) {
            continue;
        }
        for _ in 0..rounds {
            let state = random.state();
            let memory = random.memory(x87);
            let rflags = random.next() & 0x8d5 | 2;
            let (mut ours, mut theirs) = (state.clone(), state.clone());
            let mut host_memory = if x87.writes_memory() { [0xee; 16] } else { memory };
            let host_flags = host.run(&bytes, &mut theirs, &mut host_memory, rflags);
            let mut our_memory = memory;
            let effect = execute(&mut ours, x87, &mut our_memory, rflags);
            let mut our_flags = rflags & 0x8d5;
            if let Some(flags) = effect.flags {
                our_flags = flags as u64;
            }
            for s in [&mut ours, &mut theirs] {
                // The pointers are not this test's; the values of empty registers are.
                (s.fip, s.fdp, s.fop) = (0, 0, 0);
                s.sw &= !undefined_codes(x87.op, s);
            }
            let stored = if effect.store {
                &our_memory[..x87.memory.size()]
            } else {
                &[]
            };
            let same_memory = !x87.writes_memory()
                || stored
                    .iter()
                    .chain([0xee; 16].iter())
                    .zip(&host_memory)
                    .all(|(a, b)| a == b);
            if ours != theirs || our_flags != host_flags || !same_memory {
                let entry = failures.entry(format!("{:?}", insn.code())).or_default();
                entry.0 += 1;
                if entry.1.is_empty() {
                    let st = |s: &FpuState| {
                        (0..2)
                            .map(|i| format!("{:020x}", s.st(i)))
                            .collect::<Vec<_>>()
                            .join(" ")
                    };
                    entry.1 = format!(
                        "cw {:04x} sw {:04x} tag {:02x} st {} memory {:02x?} flags {rflags:x}\n ours sw {:04x} tag {:02x} st {} {:02x?} {:x}\n host sw {:04x} tag {:02x} st {} {:02x?} {:x}",
                        state.cw,
                        state.sw,
                        state.tag,
                        st(&state),
                        &memory[..10],
                        ours.sw,
                        ours.tag,
                        st(&ours),
                        stored,
                        our_flags,
                        theirs.sw,
                        theirs.tag,
                        st(&theirs),
                        &host_memory[..10],
                        host_flags,
                    );
                }
            }
        }
    }
    for (code, (count, first)) in &failures {
        println!("{code}: {count} of {rounds} differ\n {first}");
    }
    assert!(failures.is_empty(), "{} instructions differ", failures.len());
}

/// A state with ST0 and ST1, the rest empty.
fn two(x: u128, y: u128, cw: u16) -> FpuState {
    let mut s = FpuState::new();
    s.fninit();
    s.cw = cw;
    s.set_top(6);
    s.tag = 0xc0;
    s.r[6] = x;
    s.r[7] = y;
    s
}

fn named(name: &str) -> ([u8; 2], X87Insn) {
    let modrm = match name {
        "F2xm1" => 0xf0,
        "Yl2x" => 0xf1,
        "Ptan" => 0xf2,
        "Patan" => 0xf3,
        "Xtract" => 0xf4,
        "Yl2xp1" => 0xf9,
        "Sincos" => 0xfb,
        "Sin" => 0xfe,
        "Cos" => 0xff,
        _ => panic!("{name}"),
    };
    ([0xd9, modrm], decode(&[0xd9, modrm]).expect("an instruction").1)
}

// covers: cpu/x87-transcendental
#[test]
fn transcendental_results_are_rounded_correctly() {
    let mut rows = 0;
    for line in include_str!("data/x87-transcendental.txt")
        .lines()
        .filter(|line| !line.starts_with('#'))
    {
        let mut words = line.split(' ');
        let name = words.next().expect("a name");
        let values: Vec<u128> = words
            .map(|word| u128::from_str_radix(word, 16).expect("hexadecimal"))
            .collect();
        let (x, y) = (values[0], values[1]);
        let (_, insn) = named(name);
        for rc in 0..4u16 {
            let mut s = two(x, y, 0x37f | rc << 10);
            execute(&mut s, insn, &mut [0; 16], 0);
            let result = s.st(if name == "Ptan" { 1 } else { 0 });
            // The one exception: sine and tangent of less than 2^-68 are the operand, as on Intel's processors.
            let exponent = (x >> 64) as u16 & 0x7fff;
            if matches!(name, "Sin" | "Ptan") && (1..0x3fff - 68).contains(&exponent) {
                assert_eq!(
                    (result, s.sw & (sw::PE | sw::UE | sw::C1)),
                    (x, sw::PE),
                    "{line}: rc {rc}"
                );
                continue;
            }
            assert_eq!(result, values[2 + rc as usize], "{line}: rc {rc}, {result:020x}");
            let [nearest, down, up] = [values[2], values[3], values[4]];
            if down != up {
                assert!(s.sw & sw::PE != 0, "{line}: inexact");
                let away = result & !(1 << 79) == (down & !(1 << 79)).max(up & !(1 << 79));
                assert_eq!(s.sw & sw::C1 != 0, away, "{line}: rc {rc}, C1");
            } else {
                assert_eq!((result, s.sw & sw::PE), (nearest, 0), "{line}: exact");
            }
        }
        rows += 1;
    }
    assert!(rows > 300);
}

// covers: cpu/x87-transcendental
#[test]
fn transcendental_results_are_close_to_the_hosts() {
    let host = Host::new();
    let mut random = Random(0xfeed_5678_9abc_def1);
    for name in ["F2xm1", "Yl2x", "Ptan", "Patan", "Yl2xp1", "Sincos", "Sin", "Cos"] {
        let (bytes, insn) = named(name);
        for _ in 0..2000 {
            let significand = |random: &mut Random| (random.next() | 1 << 63) as u128;
            // Within the first octant, where no reduction comes in.
            let x = ((0x3fff - 1 - random.below(30) as u128) << 64 | significand(&mut random)) & !(1 << 62);
            let y = (0x3fff - 20 + random.below(40) as u128) << 64 | significand(&mut random);
            let (mut ours, mut theirs) = (two(x, y, 0x37f), two(x, y, 0x37f));
            // FYL2XP1 is defined up to sqrt(2)/2 only.
            if name == "Yl2xp1" {
                (ours.r[6], theirs.r[6]) = (x - (1 << 64), x - (1 << 64));
            }
            execute(&mut ours, insn, &mut [0; 16], 0);
            host.run(&bytes, &mut theirs, &mut [0; 16], 2);
            assert_eq!(
                (ours.top(), ours.tag, ours.sw & !sw::C1),
                (theirs.top(), theirs.tag, theirs.sw & !sw::C1),
                "{name}"
            );
            for i in 0..2 {
                let (a, b) = (ours.st(i), theirs.st(i));
                assert!(
                    a.abs_diff(b) <= 1,
                    "{name} of {x:020x} {y:020x}: ST{i} {a:020x}, host {b:020x}"
                );
            }
        }
    }
}

// covers: cpu/x87-transcendental, cpu/x87-exceptions
#[test]
fn transcendental_special_cases_are_the_manuals() {
    const INF: u128 = 0x7fff_8000_0000_0000_0000;
    const NEG: u128 = 1 << 79;
    const ONE: u128 = 0x3fff_8000_0000_0000_0000;
    const IND: u128 = 0xffff_c000_0000_0000_0000;
    const TWO: u128 = 0x4000_8000_0000_0000_0000;
    const HALF: u128 = 0x3ffe_8000_0000_0000_0000;
    const PI: u128 = 0x4000_c90f_daa2_2168_c235;
    const HALF_PI: u128 = 0x3fff_c90f_daa2_2168_c235;
    const QUARTER_PI: u128 = 0x3ffe_c90f_daa2_2168_c235;
    const THREE_QUARTERS_PI: u128 = 0x4000_96cb_e3f9_990e_91a8;
    const BIG: u128 = 0x403e_8000_0000_0000_0000;
    let (ie, ze, pe, c2) = (sw::IE, sw::ZE, sw::PE, sw::C2);
    // Instruction, ST0, ST1, result, status.
    for (name, x, y, result, status) in [
        ("F2xm1", 0, 0, 0, 0),
        ("F2xm1", NEG, 0, NEG, 0),
        ("F2xm1", ONE, 0, ONE, 0),
        ("F2xm1", NEG | ONE, 0, NEG | HALF, 0),
        ("Yl2x", 0, 0, IND, ie),
        ("Yl2x", NEG, TWO, NEG | INF, ze),
        ("Yl2x", 0, NEG | TWO, INF, ze),
        // A zero divide comes before a denormal operand.
        ("Yl2x", 0, 0x1, NEG | INF, ze),
        ("Yl2x", 0, INF, NEG | INF, 0),
        ("Yl2x", 0, NEG | INF, INF, 0),
        ("Yl2x", NEG | ONE, ONE, IND, ie),
        ("Yl2x", NEG | INF, ONE, IND, ie),
        ("Yl2x", HALF, INF, NEG | INF, 0),
        ("Yl2x", HALF, 0, NEG, 0),
        ("Yl2x", HALF, TWO, NEG | TWO, 0),
        ("Yl2x", ONE, INF, IND, ie),
        ("Yl2x", ONE, NEG | TWO, NEG, 0),
        ("Yl2x", TWO, NEG | INF, NEG | INF, 0),
        ("Yl2x", TWO, NEG, NEG, 0),
        ("Yl2x", INF, 0, IND, ie),
        ("Yl2x", INF, NEG | TWO, NEG | INF, 0),
        ("Yl2x", BIG, HALF, 0x4003_fc00_0000_0000_0000, 0),
        ("Yl2xp1", 0, NEG | TWO, NEG, 0),
        ("Yl2xp1", 0, INF, IND, ie),
        ("Yl2xp1", 0x3ffd_8000_0000_0000_0000, NEG | INF, NEG | INF, 0),
        ("Yl2xp1", 0xbffd_8000_0000_0000_0000, INF, NEG | INF, 0),
        ("Patan", INF, INF, QUARTER_PI, pe),
        ("Patan", NEG | INF, INF, THREE_QUARTERS_PI, pe),
        ("Patan", NEG | INF, NEG | TWO, NEG | PI, pe),
        ("Patan", INF, NEG | TWO, NEG, 0),
        ("Patan", TWO, INF, HALF_PI, pe),
        ("Patan", 0, NEG | TWO, NEG | HALF_PI, pe),
        ("Patan", 0, 0, 0, 0),
        ("Patan", NEG, 0, PI, pe),
        ("Patan", NEG | TWO, NEG, NEG | PI, pe),
        ("Patan", TWO, NEG, NEG, 0),
        ("Patan", ONE, ONE, QUARTER_PI, pe),
        ("Sin", 0, 0, 0, 0),
        ("Sin", NEG, 0, NEG, 0),
        ("Sin", INF, 0, IND, ie),
        ("Sin", BIG, 0, BIG, c2),
        ("Cos", NEG, 0, ONE, 0),
        ("Cos", NEG | INF, 0, IND, ie),
        ("Cos", NEG | BIG, 0, NEG | BIG, c2),
        ("Sin", 0x7fff_8000_0000_0000_0001, 0, 0x7fff_c000_0000_0000_0001, ie),
        ("Sin", 0x7fff_c000_0000_0000_0001, 0, 0x7fff_c000_0000_0000_0001, 0),
        ("Cos", 0x4000_4000_0000_0000_0000, 0, IND, ie),
    ] {
        let mut s = two(x, y, 0x37f);
        execute(&mut s, named(name).1, &mut [0; 16], 0);
        assert_eq!(s.st(0), result, "{name} of {x:020x} {y:020x}: {:020x}", s.st(0));
        assert_eq!(s.sw & (sw::EXCEPTIONS | sw::C2), status, "{name} of {x:020x} {y:020x}");
        // Unmasked, invalid and zero divide leave everything as it was.
        if status & (ie | ze) != 0 {
            let before = two(x, y, 0x37f & !status);
            let mut s = before.clone();
            execute(&mut s, named(name).1, &mut [0; 16], 0);
            assert!(s.pending());
            assert_eq!(
                (s.r, s.tag, s.top()),
                (before.r, before.tag, before.top()),
                "{name} of {x:020x} {y:020x}"
            );
        }
    }
    // FPTAN and FSINCOS push, unless their operand is out of range or there is no room.
    for (name, below, top) in [("Ptan", 0, ONE), ("Sincos", 0, ONE)] {
        let mut s = two(0, 0, 0x37f);
        execute(&mut s, named(name).1, &mut [0; 16], 0);
        assert_eq!((s.st(0), s.st(1), s.top()), (top, below, 5), "{name}");
        let mut s = two(BIG, 0, 0x37f);
        execute(&mut s, named(name).1, &mut [0; 16], 0);
        assert_eq!((s.st(0), s.top(), s.sw & c2), (BIG, 6, c2), "{name}");
        let mut s = two(0, 0, 0x37f);
        s.tag = 0xff;
        execute(&mut s, named(name).1, &mut [0; 16], 0);
        assert_eq!((s.st(0), s.st(1), s.top()), (IND, IND, 5), "{name}");
        assert_eq!(
            s.sw & (ie | sw::SF | sw::C1),
            ie | sw::SF | sw::C1,
            "{name}: stack overflow"
        );
    }
}
