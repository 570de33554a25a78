//! One program in the software engine, in KVM, and handed to and fro between them after every few instructions: it ends in the
//! same state. Where there is no KVM the tests say so and skip.

use crate::common;
use common::long::{COUNTS, Result, STACK, STRINGS, TABLES, VECTORS, guest, raise};
use common::{Folder, kvm_is_missing};
use iced_x86::code_asm::*;
use kvm::Limit;
use minivmm::StopReason;
use minivmm::config::{EngineChoice, KvmDefects};
use minivmm::{Console, CpuState, End, MachineConfig, Run, SerialTarget};
use x86::model::{CpuModel, HASWELL};

/// What is compared at the end.
const MEMORY: std::ops::Range<u64> = 0x20_0000..0x28_0000;
const ROUNDS: u32 = 4;

/// 64-bit code with something of everything that goes along in a handover.
fn program(a: &mut CodeAssembler) -> Result {
    a.mov(rbx, 0x1234_5678_9abc_def1u64)?;
    a.mov(ebp, ROUNDS)?;
    a.fninit()?;
    let mut again = a.create_label();
    a.set_label(&mut again)?;

    // Arithmetic whose flags are all defined, and what they were.
    a.imul_2(rbx, rbp)?;
    a.adc(rbx, r14)?;
    a.pushfq()?;
    a.pop(rax)?;
    a.and(eax, 0x8c5)?;
    a.xor(r14, rax)?;
    a.rol(rbx, 9)?;
    a.bswap(rbx)?;
    a.lea(r12, qword_ptr(rbx + rbp * 8 + 77))?;
    a.cmp(r12, rbx)?;
    a.cmovb(r12, r14)?;
    a.setg(byte_ptr(COUNTS + 0x800))?;
    a.mov(rax, r12)?;
    a.xor(edx, edx)?;
    a.lea(rcx, qword_ptr(rbp + 3))?;
    a.div(rcx)?;
    a.add(r14, rdx)?;
    a.lock().xadd(qword_ptr(COUNTS + 0x808), r12)?;
    a.mov(rax, qword_ptr(COUNTS + 0x808))?;
    a.lock().cmpxchg(qword_ptr(COUNTS + 0x810), rbx)?;

    // Strings, that are stopped in the middle.
    a.mov(edi, STRINGS)?;
    a.mov(rax, rbx)?;
    a.mov(ecx, 9)?;
    a.rep().stosq()?;
    a.mov(esi, STRINGS)?;
    a.mov(edi, STRINGS + 0x805)?;
    a.mov(ecx, 41)?;
    a.rep().movsb()?;
    a.mov(edi, STRINGS + 0x805)?;
    a.mov(ecx, 41)?;
    a.repne().scasb()?;
    a.add(r14, rcx)?;

    // Exceptions and INT n; the stack segment loaded in between, which holds off the next instruction's events.
    raise(a, |a| {
        a.xor(ecx, ecx)?;
        a.div(ecx)
    })?;
    raise(a, |a| a.ud2())?;
    raise(a, |a| a.int3())?;
    raise(a, |a| a.int(0x40))?;
    raise(a, |a| {
        a.mov(rax, 0x4000_0000u64 + 0x1230)?;
        a.mov(qword_ptr(rax + rbp), rbx)
    })?;
    raise(a, |a| {
        a.mov(ecx, 0x1234_5678)?;
        a.rdmsr()
    })?;
    a.mov(eax, 16)?;
    a.mov(ss, ax)?;
    a.mov(esp, STACK)?;
    a.sti()?;
    a.cli()?;

    // Registers of the system: written, and read back.
    for msr in [
        0x174u32,
        0x175,
        0x176,
        0xc000_0081,
        0xc000_0082,
        0xc000_0083,
        0xc000_0084,
        0xc000_0100,
        0xc000_0101,
        0xc000_0102,
    ] {
        a.mov(ecx, msr)?;
        a.lea(eax, dword_ptr(rbx + i64::from(msr & 0xff)))?;
        a.and(eax, 0x7fff_ffff)?;
        a.xor(edx, edx)?;
        a.wrmsr()?;
        a.rdmsr()?;
        a.add(r14, rax)?;
    }
    a.swapgs()?;
    a.mov(eax, ebx)?;
    a.mov(dr0, rax)?;
    a.mov(dr3, r12)?;
    a.mov(rax, dr3)?;
    a.add(r14, rax)?;
    a.mov(cr2, r14)?;
    a.mov(eax, ebp)?;
    a.and(eax, 7)?;
    a.mov(cr8, rax)?;

    // Vector registers and the x87 stack, which keep growing and shrinking.
    a.movq(xmm3, rbx)?;
    a.paddq(xmm4, xmm3)?;
    a.pshufd(xmm15, xmm4, 0x1b)?;
    a.movdqu(xmmword_ptr(STRINGS + 0x1000), xmm15)?;
    a.mov(dword_ptr(COUNTS + 0x820), ebp)?;
    a.fild(dword_ptr(COUNTS + 0x820))?;
    a.fld1()?;
    a.faddp(st1, st0)?;
    a.ldmxcsr(dword_ptr(COUNTS + 0x828))?;

    // An exit to the machine, and a subroutine.
    a.mov(eax, ebp)?;
    a.out(0x80, al)?;
    let (mut sub, mut over) = (a.create_label(), a.create_label());
    a.call(sub)?;
    a.jmp(over)?;
    a.set_label(&mut sub)?;
    a.push(r14)?;
    a.add(qword_ptr(rsp), rbx)?;
    a.pop(r11)?;
    a.ret()?;
    a.set_label(&mut over)?;
    a.dec(ebp)?;
    a.jne(again)?;
    a.mov(qword_ptr(COUNTS + 0x830), r14)?;
    // Not HLT, of which KVM's single steps may hear nothing.
    a.xor(eax, eax)?;
    a.out(0xf4, al)
}

/// How a machine is driven: so far in KVM, then so many instructions in the engine, in turn.
#[derive(Clone, Copy, Debug)]
enum Drive {
    Engine,
    Kvm,
    Turns(Limit, u64),
}

/// What is left at the end.
#[derive(Debug, PartialEq)]
struct Left {
    state: CpuState,
    memory: Vec<u8>,
}

fn run(model: &'static CpuModel, drive: Drive) -> (Left, u64) {
    let folder = Folder::new();
    let config = MachineConfig {
        memory: 8 << 20,
        model,
        kvm_defects: KvmDefects::Accept,
        engine: match drive {
            Drive::Engine => EngineChoice::Soft,
            _ => EngineChoice::Kvm,
        },
        ..MachineConfig::new(folder.file("program", guest(program)))
    };
    let mut vm = Run::new(&config).unwrap();
    let mut console = Console::open(&SerialTarget::Buffer, &[], vm.line()).unwrap();
    let mut handovers = 0;
    let end = loop {
        let ended = match drive {
            Drive::Engine | Drive::Kvm => vm.run(&mut console).map(Some),
            Drive::Turns(limit, steps) => match vm.run_native(&mut console, limit).unwrap() {
                Some(end) => Ok(Some(end)),
                None => {
                    handovers += 1;
                    assert!(handovers < 10_000, "{drive:?}: lost at {:x?}", vm.cpu_state(0));
                    vm.run_for(&mut console, steps)
                }
            },
        };
        if let Some(end) = ended.unwrap() {
            break end;
        }
    };
    assert!(
        matches!(end, StopReason::Ended(End::DebugExit(0))),
        "{drive:?}: {end:?}"
    );
    let mut memory = vec![0; (MEMORY.end - MEMORY.start) as usize];
    vm.read_physical(MEMORY.start, &mut memory).unwrap();
    let mut state = vm.cpu_state(0).unwrap();
    // Counts and the x87 environment's selectors, which KVM does not keep, and a task register that was never loaded, which
    // KVM wants to be busy.
    (state.steps, state.iterations, state.observed) = (0, 0, None);
    (state.fpu.fcs, state.fpu.fds) = (0, 0);
    // The I/O instruction that has just retired, for an SMI that would come now: KVM does not tell it.
    state.io = None;
    // On AMD's processors FXSAVE and XSAVE leave out where the last x87 instruction was, unless an exception is pending
    // (APM Vol. 2, "FXSAVE and FXRSTOR Instructions"): a thread that the host has put aside in between has lost it.
    let cpuinfo = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    if cpuinfo.contains("AuthenticAMD") && state.fpu.sw & 0x80 == 0 {
        (state.fpu.fip, state.fpu.fdp, state.fpu.fop) = (0, 0, 0);
    }
    state.tr = Default::default();
    (Left { state, memory }, handovers)
}

fn alike(left: &Left, right: &Left, drive: Drive) {
    assert_eq!(left.state, right.state, "{drive:?}");
    let other = left.memory.iter().zip(&right.memory).position(|(a, b)| a != b);
    let at = other.map(|at| format!("{:#x}", MEMORY.start + at as u64));
    assert_eq!(at, None, "{drive:?}: memory differs there first");
}

// covers: kvm/handover-equivalence
#[test]
fn a_64_bit_program_ends_alike_wherever_it_is_handed_over() {
    if kvm_is_missing("handover equivalence, 64-bit") {
        return;
    }
    let (engine, _) = run(&HASWELL, Drive::Engine);
    let word = |at: u32| u64::from_le_bytes(engine.memory[(at - TABLES) as usize..][..8].try_into().unwrap());
    for (vector, _) in VECTORS {
        assert_eq!(word(COUNTS + vector * 8), u64::from(ROUNDS), "vector {vector}");
    }
    assert_ne!(word(COUNTS + 0x830), 0);
    let (kvm, _) = run(&HASWELL, Drive::Kvm);
    alike(&kvm, &engine, Drive::Kvm);
    let mut places = 0;
    for (limit, steps) in [
        (Limit::Steps(1), 1),
        (Limit::Steps(1), 2),
        (Limit::Steps(2), 1),
        (Limit::Steps(3), 2),
        (Limit::Steps(5), 1),
        (Limit::Steps(7), 6),
        (Limit::Steps(11), 1),
        (Limit::Steps(13), 100),
        (Limit::Steps(31), 3),
        (Limit::Steps(100), 1),
        (Limit::Exits(1), 1),
        (Limit::Exits(1), 7),
        (Limit::Exits(2), 3),
        (Limit::Exits(3), 50),
    ] {
        let drive = Drive::Turns(limit, steps);
        let (mixed, handovers) = run(&HASWELL, drive);
        alike(&mixed, &engine, drive);
        println!("{drive:?}: {handovers} handovers");
        assert!(handovers >= 2, "{drive:?}");
        places += handovers;
    }
    assert!(places > 1000, "{places}");
}
