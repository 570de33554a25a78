//! String instructions and their repetition, against a loop that does what the manual says.

use crate::{bench, rig};
use bench::Bench;
use engine::bus::{Bus, MsrFault, Processor};
use engine::{CpuState, DS, ES, Exit, FS, SS, Segment};
use rig::{CODE, Rig, TABLES, code_segment};
use x86::model::WESTMERE;
use x86::rflags::flag::{RF, TF};

const DATA: u64 = 0x30_0000;
const LEN: usize = 0x4000;
const DF: u64 = 0x400;
const STATUS: u64 = 0x8d5;
const ZF: u64 = 0x40;
const RAX: usize = 0;
const RCX: usize = 1;
const RSI: usize = 6;
const RDI: usize = 7;

#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    Movs,
    Stos,
    Lods,
    Cmps,
    Scas,
}

use Kind::*;

/// The prefix: none, F3, F2.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Prefix {
    None,
    Rep,
    Repne,
}

fn encode(kind: Kind, size: usize, prefix: Prefix, short: bool) -> Vec<u8> {
    let mut code = Vec::new();
    if short {
        code.push(0x67);
    }
    if size == 2 {
        code.push(0x66);
    }
    match prefix {
        Prefix::None => {}
        Prefix::Rep => code.push(0xf3),
        Prefix::Repne => code.push(0xf2),
    }
    if size == 8 {
        code.push(0x48);
    }
    let opcode = match kind {
        Movs => 0xa4,
        Cmps => 0xa6,
        Stos => 0xaa,
        Lods => 0xac,
        Scas => 0xae,
    };
    code.push(opcode | (size != 1) as u8);
    code
}

/// What an instruction works on: registers as the address size sees them, and the bytes at `DATA`.
#[derive(Clone, Debug, PartialEq)]
struct World {
    rax: u64,
    rcx: u64,
    rsi: u64,
    rdi: u64,
    flags: u64,
    bytes: Vec<u8>,
}

fn get(bytes: &[u8], at: u64, size: usize) -> u64 {
    let at = (at - DATA) as usize;
    let mut v = [0; 8];
    v[..size].copy_from_slice(&bytes[at..at + size]);
    u64::from_le_bytes(v)
}

fn compare(a: u64, b: u64, size: usize) -> u64 {
    let bits = 8 * size as u32;
    let mask = u64::MAX >> (64 - bits);
    let (a, b) = (a & mask, b & mask);
    let r = a.wrapping_sub(b) & mask;
    let top = |v: u64| v >> (bits - 1) & 1;
    let mut flags = 0;
    flags |= (a < b) as u64;
    flags |= ((r as u8).count_ones().is_multiple_of(2) as u64) << 2;
    flags |= ((a & 15 < b & 15) as u64) << 4;
    flags |= ((r == 0) as u64) << 6;
    flags |= top(r) << 7;
    flags |= ((top(a) ^ top(b)) & (top(a) ^ top(r))) << 11;
    flags
}

/// One iteration.
fn iterate(w: &mut World, kind: Kind, size: usize) {
    let by = if w.flags & DF != 0 {
        (size as u64).wrapping_neg()
    } else {
        size as u64
    };
    let mask = u64::MAX >> (64 - 8 * size as u32);
    let source = matches!(kind, Movs | Lods | Cmps);
    let from = if source {
        get(&w.bytes, w.rsi, size)
    } else {
        w.rax & mask
    };
    match kind {
        Movs | Stos => {
            let at = (w.rdi - DATA) as usize;
            w.bytes[at..at + size].copy_from_slice(&from.to_le_bytes()[..size]);
        }
        // A 32-bit load clears the upper half.
        Lods if size == 4 => w.rax = from,
        Lods => w.rax = w.rax & !mask | from,
        Cmps | Scas => w.flags = w.flags & !STATUS | compare(from, get(&w.bytes, w.rdi, size), size),
    }
    if source {
        w.rsi = w.rsi.wrapping_add(by);
    }
    if kind != Lods {
        w.rdi = w.rdi.wrapping_add(by);
    }
}

/// The whole instruction; the steps it takes.
fn interpret(w: &mut World, kind: Kind, size: usize, prefix: Prefix) -> u64 {
    if prefix == Prefix::None {
        iterate(w, kind, size);
        return 1;
    }
    let mut n = 0;
    while w.rcx != 0 {
        iterate(w, kind, size);
        w.rcx -= 1;
        n += 1;
        if matches!(kind, Cmps | Scas) && (w.flags & ZF != 0) != (prefix == Prefix::Rep) {
            break;
        }
    }
    n.max(1)
}

/// Numbers without a pattern, the same each time (xorshift).
struct Numbers(u64);

impl Numbers {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }
    fn below(&mut self, n: u64) -> u64 {
        self.next() % n
    }
}

fn set(rig: &mut Rig, code: &[u8], w: &World) {
    rig.write(CODE, code);
    rig.write(DATA, &w.bytes);
    let mut s = rig.cpu.state();
    s.rip = CODE;
    (s.gpr[RAX], s.gpr[RCX], s.gpr[RSI], s.gpr[RDI]) = (w.rax, w.rcx, w.rsi, w.rdi);
    s.rflags = (2 | w.flags).into();
    rig.cpu.set_state(&s);
}

fn seen(rig: &Rig) -> World {
    let s = rig.cpu.state();
    World {
        rax: s.gpr[RAX],
        rcx: s.gpr[RCX],
        rsi: s.gpr[RSI],
        rdi: s.gpr[RDI],
        flags: s.rflags.into_bits() & (STATUS | DF),
        bytes: rig.read::<LEN>(DATA).to_vec(),
    }
}

/// A world that likes to overlap, to cross pages, and to be equal for a while.
fn arbitrary(r: &mut Numbers, size: usize) -> World {
    let span = |count: u64| (count + 1) * size as u64;
    let rcx = [0, 1, 2, 3, 17, 63, 300, 512][r.below(8) as usize];
    let down = r.below(3) == 0;
    let room = span(rcx);
    let place = |r: &mut Numbers| {
        let low = if down { DATA + room } else { DATA };
        let at = low + r.below(LEN as u64 - room - 16);
        if r.below(3) == 0 { at & !0xfff | 0xff8 } else { at }
            .max(low)
            .min(low + LEN as u64 - room - 16)
    };
    let rsi = place(r);
    let rdi = match r.below(3) {
        // A few bytes apart, either way.
        0 => (rsi + r.below(24)).saturating_sub(12),
        _ => place(r),
    };
    let (low, high) = if down {
        (DATA + room, DATA + LEN as u64 - 16)
    } else {
        (DATA, DATA + LEN as u64 - room - 16)
    };
    let mut bytes: Vec<u8> = (0..LEN).map(|_| r.next() as u8).collect();
    if r.below(2) == 0 {
        bytes.fill(0x5a);
        bytes[r.below(LEN as u64) as usize] = 1;
    }
    let rax = if r.below(2) == 0 {
        0x5a5a_5a5a_5a5a_5a5a
    } else {
        r.next()
    };
    World {
        rax,
        rcx,
        rsi,
        rdi: rdi.clamp(low, high),
        flags: r.next() & STATUS | if down { DF } else { 0 },
        bytes,
    }
}

// covers: cpu/int-string
#[test]
fn strings_do_what_their_iterations_do() {
    let mut rig = Rig::new();
    let mut r = Numbers(0x9e37_79b9_7f4a_7c15);
    for kind in [Movs, Stos, Lods, Cmps, Scas] {
        for size in [1, 2, 4, 8] {
            for prefix in [Prefix::None, Prefix::Rep, Prefix::Repne] {
                for short in [false, true] {
                    for _ in 0..40 {
                        let code = encode(kind, size, prefix, short);
                        let mut w = arbitrary(&mut r, size);
                        set(&mut rig, &code, &w);
                        let before = rig.cpu.steps();
                        let what = format!(
                            "{kind:?} {size} {prefix:?} short {short} {:x} {:x} {:x}",
                            w.rcx, w.rsi, w.rdi
                        );
                        let steps = interpret(&mut w, kind, size, prefix);
                        assert_eq!(rig.run(steps), Exit::Budget, "{what}");
                        let after = seen(&rig);
                        assert_eq!(
                            (after.rax, after.rcx, after.rsi, after.rdi, after.flags),
                            (w.rax, w.rcx, w.rsi, w.rdi, w.flags),
                            "{what}"
                        );
                        assert!(after.bytes == w.bytes, "memory: {what}");
                        let s = rig.cpu.state();
                        assert_eq!(s.rip, CODE + code.len() as u64, "{what}: retired in {steps} steps");
                        assert_eq!(rig.cpu.steps(), before + steps);
                    }
                }
            }
        }
    }
}

// covers: cpu/int-string, cpu/step-budget
#[test]
fn a_repetition_may_be_cut_after_any_step() {
    let mut r = Numbers(7);
    let (mut whole, mut cut) = (Rig::new(), Rig::new());
    for kind in [Movs, Stos, Lods, Cmps, Scas] {
        for prefix in [Prefix::Rep, Prefix::Repne] {
            let code = encode(kind, 4, prefix, false);
            let mut w = arbitrary(&mut r, 4);
            w.rcx = 40;
            w.flags &= !DF;
            (w.rsi, w.rdi) = (DATA + 0xfa0, DATA + 0x1fc0);
            let total = interpret(&mut w.clone(), kind, 4, prefix);
            let start = cut.cpu.state();
            for n in 1..=total {
                for rig in [&mut whole, &mut cut] {
                    rig.cpu.set_state(&start);
                    set(rig, &code, &w);
                }
                let from = whole.cpu.steps();
                whole.run(n);
                for _ in 0..n {
                    assert_eq!(cut.run(1), Exit::Budget);
                }
                assert_eq!(whole.cpu.steps(), from + n);
                assert!(
                    whole.cpu.state() == cut.cpu.state(),
                    "{kind:?} {prefix:?} after {n} of {total}"
                );
                assert!(seen(&whole) == seen(&cut));
                // The instruction itself retires in its last step, and only then.
                let end = whole.cpu.state();
                assert_eq!(end.rip == CODE + code.len() as u64, n == total);
                assert_eq!(
                    whole.cpu.retired(),
                    start.steps - start.iterations + (n == total) as u64
                );
            }
        }
    }
}

// covers: cpu/int-string
#[test]
fn a_fault_leaves_the_iterations_before_it_done() {
    const END: u64 = 0x40_0000;
    for (kind, size, flags, rsi, rdi, done, why) in [
        (Movs, 1, 0, DATA, END - 12, 12, "the destination's page is missing"),
        (
            Movs,
            8,
            0,
            DATA,
            END - 20,
            2,
            "an element that straddles the edge is not begun",
        ),
        (Movs, 4, 0, END - 8, DATA, 2, "the source's page is missing"),
        (Stos, 2, 0, DATA, END - 6, 3, "STOS"),
        (Stos, 4, DF, DATA, END + 0x20_0008, 3, "downwards"),
        (Scas, 1, 0, DATA, END - 5, 5, "SCAS"),
        (Cmps, 1, 0, END - 3, DATA, 3, "CMPS, the first operand"),
        (Lods, 1, 0, END - 3, DATA, 3, "LODS"),
        (Movs, 1, 0, DATA, END, 0, "the first iteration"),
    ] {
        let mut rig = Rig::new();
        // 4 MB to 6 MB are not there.
        rig.write(TABLES + 0x2010, &0u64.to_le_bytes());
        let code = encode(kind, size, Prefix::Rep, false);
        rig.write(CODE, &code);
        let mut s = rig.cpu.state();
        (s.gpr[RAX], s.gpr[RCX], s.gpr[RSI], s.gpr[RDI]) = (0, 100, rsi, rdi);
        s.rflags = (2 | flags).into();
        rig.cpu.set_state(&s);
        // Without gates the fault ends in shutdown, with the registers as it found them.
        assert_eq!(rig.run(1000), Exit::Shutdown, "{why}");
        let s = rig.cpu.state();
        let by = if flags & DF != 0 {
            (size as u64).wrapping_neg()
        } else {
            size as u64
        };
        assert_eq!((s.rip, s.gpr[RCX]), (CODE, 100 - done), "{why}");
        let moved = by.wrapping_mul(done);
        let source = matches!(kind, Movs | Cmps | Lods);
        assert_eq!(s.gpr[RSI], if source { rsi.wrapping_add(moved) } else { rsi }, "{why}");
        assert_eq!(
            s.gpr[RDI],
            if kind != Lods { rdi.wrapping_add(moved) } else { rdi },
            "{why}"
        );
        assert!((END..END + 0x20_0000).contains(&s.cr2), "{why}: CR2 {:x}", s.cr2);
        assert_eq!((s.steps, s.iterations), (done, done), "{why}");
    }
}

/// Writes to what is no RAM, with their times.
#[derive(Default)]
struct Device {
    writes: Vec<(u64, u8, u64, u64)>,
    reads: Vec<(u64, u64)>,
}

impl Bus for Device {
    fn read(&mut self, gpa: u64, _: u8, now: u64) -> u64 {
        self.reads.push((gpa, now));
        gpa
    }
    fn write(&mut self, gpa: u64, size: u8, value: u64, now: u64) {
        self.writes.push((gpa, size, value, now));
    }
    fn port_read(&mut self, _: u16, _: u8, _: u64) -> u32 {
        u32::MAX
    }
    fn port_write(&mut self, _: u16, _: u8, _: u32, _: u64) {}
    fn read_msr(&mut self, _: u32, _: &mut dyn Processor) -> Result<u64, MsrFault> {
        Err(MsrFault::Unclaimed)
    }
    fn write_msr(&mut self, _: u32, _: u64, _: &mut dyn Processor) -> Result<(), MsrFault> {
        Err(MsrFault::Unclaimed)
    }
    fn cpuid(&mut self, leaf: u32, subleaf: u32) -> [u32; 4] {
        WESTMERE.cpuid(leaf, subleaf)
    }
    fn tsc(&mut self, now: u64) -> u64 {
        now
    }
    fn cr8(&mut self) -> u64 {
        0
    }
    fn set_cr8(&mut self, _: u64) {}
    fn random(&mut self) -> u64 {
        4
    }
}

// covers: cpu/int-string
#[test]
fn a_device_sees_every_iteration_once_and_in_time() {
    const END: u64 = rig::RAM as u64;
    let mut rig = Rig::new();
    let mut code = vec![0x90, 0x90];
    code.extend(encode(Stos, 4, Prefix::Rep, false));
    rig.write(CODE, &code);
    let mut s = rig.cpu.state();
    (s.gpr[RAX], s.gpr[RCX], s.gpr[RDI]) = (0xabcd_ef01, 5, END - 8);
    rig.cpu.set_state(&s);
    let mut device = Device::default();
    // Two NOPs, two iterations in RAM; then the run ends with each iteration that a device has seen.
    for left in [2, 1, 0] {
        assert_eq!(rig.engine.run(&mut rig.cpu, &mut device, 100), Exit::Bus);
        assert_eq!(rig.cpu.state().gpr[RCX], left);
    }
    let expected: Vec<_> = (0..3).map(|i| (END + 4 * i, 4, 0xabcd_ef01, 4 + i)).collect();
    assert_eq!(device.writes, expected);
    assert_eq!(rig.cpu.steps(), 2 + 5);
    assert_eq!(rig.cpu.state().rip, CODE + code.len() as u64);

    // A device as the source.
    let code = encode(Movs, 2, Prefix::Rep, false);
    rig.write(CODE, &code);
    let mut s = rig.cpu.state();
    (s.rip, s.gpr[RCX], s.gpr[RSI], s.gpr[RDI]) = (CODE, 2, END + 0x10, DATA);
    rig.cpu.set_state(&s);
    let mut device = Device::default();
    assert_eq!(rig.engine.run(&mut rig.cpu, &mut device, 1), Exit::Bus);
    assert_eq!(rig.engine.run(&mut rig.cpu, &mut device, 100), Exit::Bus);
    assert_eq!(device.reads, [(END + 0x10, 7), (END + 0x12, 8)]);
    assert_eq!(rig.read::<4>(DATA), [0x10, 0, 0x12, 0]);
}

// covers: cpu/int-string, cpu/self-modifying-code
#[test]
fn a_repetition_may_write_the_code_after_it() {
    let mut rig = Rig::new();
    // REP MOVSB; MOV EAX, 11111111; JMP back to the MOV
    let code = [0xf3, 0xa4, 0xb8, 0x11, 0x11, 0x11, 0x11, 0xeb, 0xf9];
    rig.write(CODE, &code);
    rig.write(DATA, &[0x22; 4]);
    let mut s = rig.cpu.state();
    s.rip = CODE + 2;
    rig.cpu.set_state(&s);
    rig.run(10);
    assert_eq!(rig.cpu.state().gpr[RAX], 0x1111_1111);
    let mut s = rig.cpu.state();
    (s.rip, s.gpr[RCX], s.gpr[RSI], s.gpr[RDI]) = (CODE, 4, DATA, CODE + 3);
    rig.cpu.set_state(&s);
    assert_eq!(rig.run(4), Exit::Budget);
    assert_eq!(rig.cpu.state().rip, CODE + 2);
    rig.run(3);
    assert_eq!(rig.cpu.state().gpr[RAX], 0x2222_2222);
    // And once more, now that the page is known as code again.
    rig.write(CODE, &[0xf3, 0xa4]);
    rig.write(DATA, &[0xb8, 0x33]);
    let mut s = rig.cpu.state();
    (s.rip, s.gpr[RCX], s.gpr[RSI], s.gpr[RDI]) = (CODE, 1, DATA + 1, CODE + 3);
    rig.cpu.set_state(&s);
    rig.run(2);
    assert_eq!(rig.cpu.state().gpr[RAX], 0x2222_2233);
}

fn flat(attributes: u16) -> Segment {
    Segment {
        selector: 16,
        base: 0,
        limit: u32::MAX,
        attributes,
    }
}

/// A 32-bit protected-mode state without paging.
fn protected(s: &mut CpuState) {
    (s.cr0, s.cr4, s.efer) = (0x33.into(), 0.into(), 0.into());
    s.segments[engine::CS] = code_segment(0xc09b);
    for i in [SS, DS, ES] {
        s.segments[i] = flat(0xc093);
    }
}

// covers: cpu/int-string
#[test]
fn address_sizes_and_segments() {
    type Setup = fn(&mut CpuState);
    let real: Setup = |s| {
        (s.cr0, s.cr4, s.efer) = (0x10.into(), 0.into(), 0.into());
        s.segments = [Segment::real(0); 6];
        s.segments[ES] = Segment::real(0x3000);
        s.segments[FS] = Segment::real(0x2000);
    };
    for (setup, code, rcx, rsi, rdi, expected, why) in [
        (
            (|s| s.segments[FS].base = 0x20_0000) as Setup,
            &[0x64, 0xf3, 0xa4][..],
            3,
            0x1000,
            0x30_0000,
            (0, 0x1003, 0x30_0003, 0x20_1000, 0x30_0000),
            "64 bits: FS has a base, and only the source is overridden",
        ),
        (
            |_| (),
            &[0x26, 0xf3, 0xa4],
            3,
            0x20_1000,
            0x30_0000,
            (0, 0x20_1003, 0x30_0003, 0x20_1000, 0x30_0000),
            "64 bits: ES before the source means nothing",
        ),
        (
            |_| (),
            &[0x67, 0xf3, 0xa4],
            0xffff_ffff_0000_0003,
            0x1_0020_1000,
            0x5_0030_0000,
            (0, 0x20_1003, 0x30_0003, 0x20_1000, 0x30_0000),
            "64 bits, 32-bit addresses: what is written back clears the upper halves",
        ),
        (
            protected,
            &[0xf3, 0xa4],
            0x7_0000_0003,
            0x20_1000,
            0x30_0000,
            (0, 0x20_1003, 0x30_0003, 0x20_1000, 0x30_0000),
            "32 bits",
        ),
        (
            |s| {
                protected(s);
                s.segments[ES].base = 0x10_0000;
                s.segments[DS].base = 0x1000;
            },
            &[0xf3, 0xa4],
            3,
            0x20_0000,
            0x20_0000,
            (0, 0x20_0003, 0x20_0003, 0x20_1000, 0x30_0000),
            "32 bits with bases",
        ),
        (
            protected,
            &[0x67, 0xf3, 0xa4],
            0xaaaa_0003,
            0xaaaa_fff0,
            0xbbbb_0000,
            (0xaaaa_0000, 0xaaaa_fff3, 0xbbbb_0003, 0xfff0, 0),
            "32 bits, 16-bit addresses: the upper halves stay",
        ),
        (
            real,
            &[0x64, 0xf3, 0xa4],
            0xffff_0003,
            0x1000,
            0x0,
            (0xffff_0000, 0x1003, 3, 0x2_1000, 0x3_0000),
            "real mode, FS to ES",
        ),
        (
            real,
            &[0x64, 0xf3, 0xa4],
            3,
            0xfffe,
            0xffff,
            (0, 0x0001, 0x0002, 0x2_fffe, 0x3_ffff),
            "real mode: indices wrap at 64 KB",
        ),
    ] {
        let mut rig = Rig::new();
        let at = 0x8000;
        rig.write(at, code);
        rig.write(expected.3, &[1, 2, 3]);
        if why.contains("wrap") {
            // The third byte comes from the segment's beginning.
            rig.write(0x2_fffe, &[1, 2]);
            rig.write(0x2_0000, &[3]);
        }
        let mut s = rig.cpu.state();
        setup(&mut s);
        s.rip = at;
        (s.gpr[RCX], s.gpr[RSI], s.gpr[RDI]) = (rcx, rsi, rdi);
        rig.cpu.set_state(&s);
        assert_eq!(rig.run(3), Exit::Budget, "{why}");
        let s = rig.cpu.state();
        assert_eq!(
            (s.gpr[RCX], s.gpr[RSI], s.gpr[RDI]),
            (expected.0, expected.1, expected.2),
            "{why}"
        );
        assert_eq!(s.rip, at + code.len() as u64, "{why}");
        if why.contains("wrap") {
            assert_eq!(
                (rig.read::<1>(0x3_ffff), rig.read::<2>(0x3_0000)),
                ([1], [2, 3]),
                "{why}"
            );
        } else {
            assert_eq!(rig.read::<3>(expected.4), [1, 2, 3], "{why}");
        }
    }
}

// covers: cpu/int-string, cpu/segmentation
#[test]
fn a_segment_limit_stops_a_repetition_where_it_lies() {
    for (limit, down, rdi, done, why) in [
        (0xfffu32, false, 0xff0, 16, "expand-up: offsets to the limit"),
        (0xfff, true, 0x1010, 0xffff_ffff, "expand-down: offsets above the limit"),
        (0x1fff, true, 0x1ff8, 0, "expand-down: the limit is outside"),
    ] {
        let mut rig = Rig::new();
        rig.write(CODE, &encode(Stos, 1, Prefix::Rep, false));
        let mut s = rig.cpu.state();
        protected(&mut s);
        s.segments[ES].limit = limit;
        if down {
            s.segments[ES].attributes = 0xc097;
        }
        (s.gpr[RCX], s.gpr[RDI]) = (100, rdi);
        rig.cpu.set_state(&s);
        let exit = rig.run(100);
        let s = rig.cpu.state();
        if done >= 100 {
            assert_eq!((exit, s.gpr[RCX]), (Exit::Budget, 0), "{why}");
        } else {
            assert_eq!(
                (exit, s.gpr[RCX], s.gpr[RDI]),
                (Exit::Shutdown, 100 - done, rdi + done),
                "{why}"
            );
        }
    }
}

// covers: cpu/int-string
#[test]
fn a_fault_in_an_iteration_is_that_of_the_instruction() {
    let mut b = Bench::long();
    b.write(TABLES + 0x2010, &0u64.to_le_bytes());
    b.write(CODE, &encode(Movs, 1, Prefix::Rep, false));
    b.state(|s| (s.gpr[RCX], s.gpr[RSI], s.gpr[RDI]) = (50, DATA, 0x3f_fff0));
    let t = b.trap();
    assert_eq!((t.vector, t.error, t.rip), (14, Some(2), CODE));
    let s = b.cpu.state();
    assert_eq!((s.gpr[RCX], s.gpr[RDI], s.cr2), (34, 0x40_0000, 0x40_0000));
    assert_eq!(t.flags & RF, RF, "a fault saves RF");
    // The handler brings the page in and returns; the rest follows.
    b.write(TABLES + 0x2010, &(0x40_0087u64).to_le_bytes());
    b.state(|s| (s.rip, s.gpr[4], s.activity) = (CODE, t.rsp, engine::Activity::Running));
    b.run(34);
    let s = b.cpu.state();
    assert_eq!((s.gpr[RCX], s.rip), (0, CODE + 2));
}

// covers: cpu/int-string
#[test]
fn a_trap_comes_after_every_iteration() {
    let mut b = Bench::long();
    let code = encode(Movs, 8, Prefix::Rep, false);
    b.write(CODE, &code);
    b.state(|s| (s.gpr[RCX], s.gpr[RSI], s.gpr[RDI], s.rflags) = (3, DATA, DATA + 0x100, (2 | TF).into()));
    for (left, rip, rf, why) in [
        (2, CODE, RF, "between iterations: at the instruction, RF set"),
        (1, CODE, RF, "again"),
        (0, CODE + code.len() as u64, 0, "the last one retires the instruction"),
    ] {
        let t = b.trap();
        assert_eq!((t.vector, t.rip, t.flags & RF), (1, rip, rf), "{why}");
        assert_eq!(b.cpu.state().gpr[RCX], left, "{why}");
        // As IRET would.
        b.state(|s| {
            (s.rip, s.gpr[4], s.rflags) = (t.rip, t.rsp, t.flags.into());
            s.activity = engine::Activity::Running;
        });
    }
}

// covers: cpu/int-string
#[test]
fn an_interrupt_between_iterations_saves_rf() {
    let mut b = Bench::long();
    b.write(CODE, &encode(Stos, 8, Prefix::Rep, false));
    for (steps, rip, rf) in [(5, CODE, RF), (10, CODE + 3, 0)] {
        b.state(|s| {
            (s.rip, s.gpr[4]) = (CODE, rig::STACK);
            (s.gpr[RCX], s.gpr[RDI], s.rflags) = (10, DATA, 0x202.into());
            s.activity = engine::Activity::Running;
        });
        assert_eq!(b.run(steps), Exit::Budget);
        b.interrupt(0x40);
        let t = b.trap();
        assert_eq!((t.vector, t.rip, t.flags & RF), (0x40, rip, rf));
        assert_eq!(b.cpu.state().gpr[RCX], 10 - steps);
    }
}
