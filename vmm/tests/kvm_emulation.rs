//! Instructions that this host's KVM cannot execute, which the software engine does: of a machine with one CPU while that stays in
//! KVM, of others by handover. Where there is no KVM the tests say so and skip.

use crate::common;
use common::{DATA, Folder, guest, kvm_is_missing, run_guest};
use iced_x86::code_asm::*;
use minivmm::StopReason;
use minivmm::config::{EngineChoice, KvmDefects};
use minivmm::{Console, CpuState, End, MachineConfig, Run, SerialTarget};

const ROUNDS: u32 = 300;
/// Where nothing is: it reads as ones.
const NOWHERE: u32 = 0xd000_0000;

/// CR4.OSFXSR, for SSE.
fn sse(a: &mut CodeAssembler) {
    a.mov(eax, cr4).unwrap();
    a.or(eax, 0x200).unwrap();
    a.mov(cr4, eax).unwrap();
}

/// Each round complements XMM0, for which the engine is needed, and folds it into memory and registers; every third has two in a row.
fn program(a: &mut CodeAssembler) {
    sse(a);
    a.mov(esi, DATA).unwrap();
    a.mov(ecx, ROUNDS).unwrap();
    let (mut again, mut one) = (a.create_label(), a.create_label());
    a.set_label(&mut again).unwrap();
    a.movd(xmm1, ecx).unwrap();
    a.paddd(xmm0, xmm1).unwrap();
    a.pxor(xmm0, xmmword_ptr(NOWHERE)).unwrap();
    a.mov(eax, ecx).unwrap();
    a.xor(edx, edx).unwrap();
    a.mov(ebx, 3).unwrap();
    a.div(ebx).unwrap();
    a.test(edx, edx).unwrap();
    a.jne(one).unwrap();
    a.pxor(xmm0, xmmword_ptr(NOWHERE)).unwrap();
    a.set_label(&mut one).unwrap();
    a.movdqu(xmmword_ptr(esi + 0x100), xmm0).unwrap();
    a.mov(edi, dword_ptr(esi + 0x100)).unwrap();
    a.adc(ebp, edi).unwrap();
    a.mov(dword_ptr(esi + ecx * 4 + 0x200), ebp).unwrap();
    a.dec(ecx).unwrap();
    a.jne(again).unwrap();
    a.mov(al, 7).unwrap();
    a.out(0xf4, al).unwrap();
}

/// The end state, without counts of steps, what the guest has written, and how often the engine was needed.
fn outcome(engine: EngineChoice, cpus: u8) -> (CpuState, Vec<u8>, Option<(u64, u64)>) {
    let folder = Folder::new();
    let config = MachineConfig {
        memory: 8 << 20,
        cpus,
        engine,
        kvm_defects: KvmDefects::Accept,
        ..MachineConfig::new(folder.file("program", guest(program)))
    };
    let mut vm = Run::new(&config).unwrap();
    let mut console = Console::open(&SerialTarget::Buffer, &[], vm.line()).unwrap();
    let end = vm.run(&mut console).unwrap();
    assert!(matches!(end, StopReason::Ended(End::DebugExit(7))), "{end:?}");
    let mut memory = vec![0; 0x1000];
    vm.read_physical(DATA.into(), &mut memory).unwrap();
    let mut state = vm.cpu_state(0).unwrap();
    (state.steps, state.iterations) = (0, 0);
    // The I/O instruction that has just retired, for an SMI that would come now: KVM does not tell it.
    state.io = None;
    state.tr = Default::default();
    let needed = vm.stats().native.map(|native| (native.emulated, native.watched));
    (state, memory, needed)
}

// covers: kvm/emulation
#[test]
fn what_kvm_cannot_execute_the_engine_does() {
    if kvm_is_missing("instructions that KVM cannot execute") {
        return;
    }
    let (state, memory, _) = outcome(EngineChoice::Soft, 1);
    for cpus in [1, 2] {
        let (on_kvm, in_kvm, needed) = outcome(EngineChoice::Kvm, cpus);
        assert_eq!((&on_kvm, &in_kvm), (&state, &memory), "{cpus} CPUs");
        // KVMs that interpret are in want of others, too.
        let (emulated, watched) = needed.unwrap();
        assert!(emulated >= u64::from(ROUNDS + ROUNDS / 3), "{emulated}");
        assert_eq!(watched, 0);
    }
}

// covers: kvm/emulation
#[test]
fn its_faults_and_endless_rows_are_told() {
    if kvm_is_missing("faults of instructions that KVM cannot execute") {
        return;
    }
    // Not aligned: #GP, and no IDT.
    let crash = guest(|a| {
        sse(a);
        a.pxor(xmm0, xmmword_ptr(NOWHERE + 8)).unwrap();
    });
    let crashed = run_guest(&crash, &["--engine", "kvm", "--kvm-defects", "accept"]);
    let errors = String::from_utf8_lossy(&crashed.stderr).into_owned();
    assert_eq!(crashed.status.code(), Some(4), "{errors}");
    assert!(
        errors.contains("triple fault") && errors.contains("[66] 0f ef"),
        "{errors}"
    );
    let endless = guest(|a| {
        sse(a);
        let mut again = a.create_label();
        a.set_label(&mut again).unwrap();
        a.pxor(xmm0, xmmword_ptr(NOWHERE)).unwrap();
        a.jmp(again).unwrap();
    });
    for cpus in ["1", "2"] {
        let ended = run_guest(
            &endless,
            &[
                "--engine",
                "kvm",
                "--kvm-defects",
                "accept",
                "--timeout",
                "0.5",
                "--cpus",
                cpus,
                "--stats",
            ],
        );
        let errors = String::from_utf8_lossy(&ended.stderr).into_owned();
        assert_eq!(ended.status.code(), Some(8), "{errors}");
        assert!(errors.contains("--timeout 0.5"), "{errors}");
    }
}
