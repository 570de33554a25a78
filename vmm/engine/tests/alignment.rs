//! Alignment checks: #AC (SDM Vol. 3A 7.15, "Interrupt 17—Alignment Check Exception (#AC)").

use crate::{bench, rig};
use bench::{Bench, UCODE32, UDATA, handler};
use engine::Exit;
use iced_x86::IcedError;
use iced_x86::code_asm::*;
use rig::{CODE, STACK, TABLES};

type Code = fn(&mut CodeAssembler) -> Result<(), IcedError>;
type Outcome = Result<(), (u8, Option<u32>)>;

const AC: u64 = 1 << 18;
const AM: u64 = 1 << 18;
const CHECK: Outcome = Err((17, Some(0)));

/// The memory operand: RBX, or ESI and EDI, point here and some bytes further.
const DATA: u64 = STACK + 0x200;

fn user(bits: u32, data: u64) -> Bench {
    let mut b = if bits == 64 { Bench::long() } else { Bench::protected() };
    b.user();
    b.write(DATA & !0xf, &[0; 0x100]);
    b.state(|s| {
        s.cr0 = (s.cr0.into_bits() | (AM | 2)).into();
        s.cr4 = (s.cr4.into_bits() | 0x600).into();
        s.rflags.set_ac(true);
        for i in [3, 6, 7] {
            s.gpr[i] = data;
        }
    });
    b
}

// covers: cpu/ac
#[test]
fn each_operand_has_its_alignment() {
    // Bits, code, the alignment that it asks for: an address that has it passes, half of it does not.
    let rows: &[(u32, &str, Code, u64)] = &[
        (64, "MOV AL", |a| a.mov(al, byte_ptr(rbx)), 1),
        (64, "MOV AX", |a| a.mov(ax, word_ptr(rbx)), 2),
        (64, "MOV EAX", |a| a.mov(eax, dword_ptr(rbx)), 4),
        (64, "MOV RAX", |a| a.mov(rax, qword_ptr(rbx)), 8),
        (64, "MOV m16", |a| a.mov(word_ptr(rbx), ax), 2),
        (64, "MOV m64", |a| a.mov(qword_ptr(rbx), rax), 8),
        (64, "ADD m32, r", |a| a.add(dword_ptr(rbx), eax), 4),
        (64, "NEG m64", |a| a.neg(qword_ptr(rbx)), 8),
        (64, "LOCK ADD m64, r", |a| a.lock().add(qword_ptr(rbx), rax), 8),
        (64, "XCHG m32, r", |a| a.xchg(dword_ptr(rbx), eax), 4),
        (64, "CMPXCHG8B", |a| a.cmpxchg8b(qword_ptr(rbx)), 8),
        (64, "MOVSXD", |a| a.movsxd(rax, dword_ptr(rbx)), 4),
        (64, "MOVZX r, m16", |a| a.movzx(eax, word_ptr(rbx)), 2),
        (64, "CALL m64", |a| a.call(qword_ptr(rbx)), 8),
        (64, "LODSQ", |a| a.lodsq(), 8),
        (64, "STOSD", |a| a.stosd(), 4),
        (64, "MOVSW", |a| a.movsw(), 2),
        (64, "CMPSQ", |a| a.cmpsq(), 8),
        (64, "REP STOSQ", |a| a.rep().stosq(), 8),
        (64, "BT m64", |a| a.bt(qword_ptr(rbx), rax), 8),
        (64, "MOVQ xmm", |a| a.movq(xmm0, qword_ptr(rbx)), 8),
        (64, "MOVSS", |a| a.movss(xmm0, dword_ptr(rbx)), 4),
        (64, "MOVSD m64", |a| a.movsd_2(qword_ptr(rbx), xmm0), 8),
        (64, "MOVHPS", |a| a.movhps(xmm0, qword_ptr(rbx)), 8),
        (64, "ADDSD", |a| a.addsd(xmm0, qword_ptr(rbx)), 8),
        (64, "PADDB mm", |a| a.paddb(mm0, qword_ptr(rbx)), 8),
        (64, "STMXCSR", |a| a.stmxcsr(dword_ptr(rbx)), 4),
        (64, "FLD m32", |a| a.fld(dword_ptr(rbx)), 4),
        (64, "FLD m64", |a| a.fld(qword_ptr(rbx)), 8),
        (64, "FLD m80", |a| a.fld(tbyte_ptr(rbx)), 8),
        (64, "FILD m16", |a| a.fild(word_ptr(rbx)), 2),
        (64, "FNSTCW", |a| a.fnstcw(word_ptr(rbx)), 2),
        (64, "FNSTENV", |a| a.fnstenv(ptr(rbx)), 4),
        (64, "FNSAVE", |a| a.fnsave(ptr(rbx)), 4),
        (64, "MOVUPS: the part's choice", |a| a.movups(xmm0, xmmword_ptr(rbx)), 1),
        (64, "PREFETCH", |a| a.prefetcht0(byte_ptr(rbx)), 1),
        (64, "LEA", |a| a.lea(rax, qword_ptr(rbx)), 1),
        (32, "BOUND, 16 bits", |a| a.bound(ax, dword_ptr(ebx)), 2),
        (32, "BOUND, 32 bits", |a| a.bound(eax, qword_ptr(ebx)), 4),
        (32, "MOV FS, m16", |a| a.mov(fs, word_ptr(ebx)), 2),
        (32, "LFS, 16:16", |a| a.lfs(ax, dword_ptr(ebx)), 2),
        (32, "LFS, 16:32", |a| a.lfs(eax, fword_ptr(ebx)), 4),
        (32, "VERR", |a| a.verr(word_ptr(ebx)), 2),
    ];
    for &(bits, name, code, align) in rows {
        for off in [0, 1, 2, 4] {
            let mut b = user(bits, DATA + off);
            if name.starts_with("CALL") {
                b.put(DATA, CODE);
                b.put(DATA + 8, CODE);
            }
            b.state(|s| s.gpr[1] = 3);
            let expected = if off % align == 0 { Ok(()) } else { CHECK };
            assert_eq!(b.one(code), expected, "{name} at {off}");
        }
    }
}

// covers: cpu/ac
#[test]
fn stacks_are_data_too() {
    for (bits, name, code, align) in [
        (64u32, "PUSH", (|a| a.push(rax)) as Code, 8u64),
        (64, "PUSH, 16 bits", |a| a.push(ax), 2),
        (64, "POP", |a| a.pop(rax), 8),
        (64, "CALL", |a| a.call(CODE + 0x40), 8),
        (64, "PUSHFQ", |a| a.pushfq(), 8),
        (64, "ENTER", |a| a.enter(16, 0), 8),
        (32, "PUSHA", |a| a.pushad(), 4),
        (32, "POPA", |a| a.popad(), 4),
        (
            32,
            "far CALL",
            |a| a.db(&[0x9a, 0, 0, 0x10, 0, UCODE32 as u8 | 3, 0]),
            4,
        ),
    ] {
        for off in [0, 1, 2, 4] {
            let mut b = user(bits, DATA);
            b.state(|s| s.gpr[4] = STACK - 0x100 + off);
            let expected = if off % align == 0 { Ok(()) } else { CHECK };
            assert_eq!(b.one(code), expected, "{name}, stack at {off}");
        }
    }
    // SGDT wants the base aligned, not the limit.
    for off in 0..4 {
        let mut b = user(64, DATA + off);
        let expected = if off == 2 { Ok(()) } else { CHECK };
        assert_eq!(b.one(|a| a.sgdt(ptr(rbx))), expected, "SGDT at {off}");
    }
}

// covers: cpu/ac
#[test]
fn three_bits_must_agree_and_other_faults_go_first() {
    let load: Code = |a| a.mov(eax, dword_ptr(rbx));
    for (name, am, ac, cpl3, expected) in [
        ("AM, AC, CPL 3", true, true, true, CHECK),
        ("no AM", false, true, true, Ok(())),
        ("no AC", true, false, true, Ok(())),
        ("CPL 0", true, true, false, Ok(())),
    ] {
        let mut b = Bench::long();
        if cpl3 {
            b.user();
        }
        b.state(|s| {
            s.cr0.set_am(am);
            s.rflags.set_ac(ac);
            s.gpr[3] = DATA + 1;
        });
        assert_eq!(b.one(load), expected, "{name}");
    }
    // SDM Vol. 3A Table 7-2: general protection, page fault, alignment check.
    for (name, data, expected) in [
        ("not canonical", 0x8000_0000_0000_0001u64, Err((13, Some(0)))),
        ("not mapped", 0x7000_0001, Err((14, Some(4)))),
        ("the second page is not mapped", 0x3f_fffd, Err((14, Some(4)))),
        ("mapped", 0x3f_fff9, CHECK),
    ] {
        let mut b = user(64, data);
        // 4 MiB on is taken away.
        b.put(TABLES + 0x2000 + 16, 0);
        assert_eq!(b.one(load), expected, "{name}");
    }
    // Nothing is written, and nothing is remembered that would let the next one pass.
    let mut b = user(64, DATA + 1);
    b.code(|a| {
        a.mov(qword_ptr(rbx - 1), rax)?;
        a.mov(qword_ptr(rbx), rax)
    });
    b.state(|s| s.gpr[0] = u64::MAX);
    b.run(1);
    let t = b.trap();
    assert_eq!((t.vector, t.rip), (17, CODE + 4));
    assert_eq!(b.read::<9>(DATA), [255, 255, 255, 255, 255, 255, 255, 255, 0]);
}

// covers: cpu/ac
#[test]
fn popf_and_iret_turn_checks_on_and_off() {
    let mut b = user(64, DATA + 1);
    b.state(|s| s.rflags.set_ac(false));
    b.code(|a| {
        a.mov(eax, dword_ptr(rbx))?; // allowed, and remembered by the TLB
        a.push(AC as i32 | 2)?;
        a.popfq()?;
        a.mov(eax, dword_ptr(rbx)) // #AC
    });
    let t = b.trap();
    assert_eq!((t.vector, t.error, t.flags & AC), (17, Some(0), AC));
    assert_eq!((t.cs & 3, t.ss), (3, UDATA | 3));
    // The handler runs at CPL 0, where nothing is checked, and clears AC in the image.
    b.at(handler(17), |a| {
        a.mov(eax, dword_ptr(rbx))?;
        a.add(rsp, 8)?;
        a.and(qword_ptr(rsp + 16), !(AC as i32))?;
        a.iretq()
    });
    b.state(|s| {
        s.activity = engine::Activity::Running;
        s.rip = handler(17);
    });
    assert_eq!(b.run(5), Exit::Budget);
    let s = b.cpu.state();
    assert_eq!((s.rip, s.cpl, s.rflags.into_bits() & AC), (t.rip + 2, 3, 0));
}
