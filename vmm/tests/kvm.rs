//! A machine on this host's KVM and in the software engine, turn and turn about. Where there is no KVM the tests say so and
//! skip.

use crate::common;
use common::{DATA, Folder, guest, kvm_is_missing};
use iced_x86::code_asm::*;
use minivmm::StopReason;
use minivmm::config::{EngineChoice, KvmDefects};
use minivmm::{Console, CpuState, End, MachineConfig, Run, SerialTarget};

/// A program that computes with registers, flags, memory, the stack and vector registers, and comes out of KVM once a round.
/// The last round halts for good.
fn program(a: &mut CodeAssembler) {
    const ROUNDS: u32 = 40;
    // CR4.OSFXSR, for SSE.
    a.mov(eax, cr4).unwrap();
    a.or(eax, 0x600).unwrap();
    a.mov(cr4, eax).unwrap();
    a.mov(esi, DATA).unwrap();
    a.mov(ecx, ROUNDS).unwrap();
    a.mov(ebx, 0x1234_5678).unwrap();
    a.xor(edx, edx).unwrap();
    a.movd(xmm1, ebx).unwrap();
    let (mut again, mut sub) = (a.create_label(), a.create_label());
    a.set_label(&mut again).unwrap();
    a.add(ebx, ecx).unwrap();
    a.adc(edx, ebx).unwrap();
    a.rol(ebx, 7).unwrap();
    a.mov(dword_ptr(esi + ecx * 4), ebx).unwrap();
    a.lock().add(dword_ptr(esi), edx).unwrap();
    a.push(ebx).unwrap();
    a.pushfd().unwrap();
    a.pop(edi).unwrap();
    a.and(edi, 0x8d5).unwrap();
    a.xor(dword_ptr(esi + 4), edi).unwrap();
    a.pop(ebp).unwrap();
    a.call(sub).unwrap();
    a.movd(xmm0, ebp).unwrap();
    a.paddd(xmm1, xmm0).unwrap();
    a.pshufd(xmm1, xmm1, 0x93).unwrap();
    a.movdqu(xmmword_ptr(esi + 0x200), xmm1).unwrap();
    // The run ends here, and goes on.
    a.mov(eax, ecx).unwrap();
    a.out(0xf4, al).unwrap();
    a.dec(ecx).unwrap();
    a.jne(again).unwrap();
    a.cli().unwrap();
    a.hlt().unwrap();
    a.set_label(&mut sub).unwrap();
    a.cmp(ebx, edx).unwrap();
    a.sbb(ebp, 0).unwrap();
    a.bswap(ebp).unwrap();
    a.ret().unwrap();
}

fn machine(engine: EngineChoice, folder: &Folder) -> (Run, Console) {
    let config = MachineConfig {
        memory: 8 << 20,
        engine,
        kvm_defects: KvmDefects::Accept,
        ..MachineConfig::new(folder.file("program", guest(program)))
    };
    let vm = Run::new(&config).unwrap();
    let console = Console::open(&SerialTarget::Buffer, &[], vm.line()).unwrap();
    (vm, console)
}

/// The end state, without counts of steps, and what the guest has written. `turns`: so many instructions in the engine after
/// each exit, in turn.
fn outcome(engine: EngineChoice, turns: &[u64]) -> (CpuState, Vec<u8>, usize) {
    let folder = Folder::new();
    let (mut vm, mut console) = machine(engine, &folder);
    let mut values = 0;
    let mut turns = turns.iter().cycle();
    let mut end = vm.run(&mut console).unwrap();
    loop {
        match end {
            StopReason::Ended(End::DebugExit(_)) => values += 1,
            StopReason::Ended(End::Halted(_)) => break,
            end => panic!("{end:?}"),
        }
        let steps = *turns.next().unwrap();
        end = match vm.run_for(&mut console, steps).unwrap() {
            Some(end) => end,
            None => vm.run(&mut console).unwrap(),
        };
    }
    let mut memory = vec![0; 0x300];
    vm.read_physical(DATA.into(), &mut memory).unwrap();
    let mut state = vm.cpu_state(0).unwrap();
    (state.steps, state.iterations) = (0, 0);
    // A busy task register that never was loaded, and descriptors' accessed bits, which KVM may set.
    state.tr = Default::default();
    (state, memory, values)
}

// covers: kvm/handover-equivalence
#[test]
fn a_program_ends_alike_in_kvm_in_the_engine_and_with_handovers() {
    if kvm_is_missing("handover equivalence") {
        return;
    }
    let soft = outcome(EngineChoice::Soft, &[1]);
    assert_eq!(soft.2, 40);
    for turns in [
        &[1][..],
        &[2],
        &[3],
        &[5],
        &[7],
        &[11],
        &[13],
        &[24],
        &[25],
        &[100],
        &[1, 2, 3, 5, 8, 13],
    ] {
        let mixed = outcome(EngineChoice::Kvm, turns);
        assert_eq!(mixed, soft, "{turns:?}");
    }
}

// covers: kvm/inspect
#[test]
fn a_machine_on_kvm_is_looked_at_and_stepped() {
    if kvm_is_missing("looking at a machine on KVM") {
        return;
    }
    let folder = Folder::new();
    let (mut vm, mut console) = machine(EngineChoice::Kvm, &folder);
    assert!(matches!(
        vm.run(&mut console).unwrap(),
        StopReason::Ended(End::DebugExit(40))
    ));
    let state = vm.cpu_state(0).unwrap();
    assert_eq!((state.gpr[0] as u32, state.gpr[1] as u32), (40, 40), "EAX and ECX");
    let mut code = [0; 1];
    vm.read_linear(0, state.rip, &mut code).unwrap();
    assert_eq!(code[0], 0x49, "DEC ECX is next: OUT has retired");
    assert!(vm.step(&mut console).unwrap().is_none());
    assert_eq!(vm.cpu_state(0).unwrap().gpr[1] as u32, 39);
    let stats = vm.stats();
    let native = stats.native.unwrap();
    assert!(
        native.exits.bus >= 1 && stats.to_string().contains("KVM exits:"),
        "{stats}"
    );
}

// covers: kvm/ends
#[test]
fn crashes_and_limits_on_kvm_are_told() {
    if kvm_is_missing("ends on KVM") {
        return;
    }
    // A triple fault: no IDT.
    let crash = guest(|a| {
        a.ud2().unwrap();
    });
    let crashed = common::run_guest(&crash, &["--engine", "kvm", "--kvm-defects", "accept"]);
    let errors = String::from_utf8_lossy(&crashed.stderr).into_owned();
    assert_eq!(crashed.status.code(), Some(4), "{errors}");
    assert!(
        errors.contains("triple fault") && errors.contains("[0f] 0b"),
        "{errors}"
    );
    let hang = guest(common::forever);
    let hung = common::run_guest(
        &hang,
        &["--engine", "kvm", "--kvm-defects", "accept", "--timeout", "0.5"],
    );
    let errors = String::from_utf8_lossy(&hung.stderr).into_owned();
    assert_eq!(hung.status.code(), Some(8), "{errors}");
    assert!(errors.contains("--timeout 0.5"), "{errors}");
    let halt = guest(|a| {
        a.cli().unwrap();
        a.hlt().unwrap();
    });
    let halted = common::run_guest(&halt, &["--engine", "kvm", "--kvm-defects", "accept"]);
    let errors = String::from_utf8_lossy(&halted.stderr).into_owned();
    assert_eq!(halted.status.code(), Some(4), "{errors}");
    assert!(errors.contains("interrupts disabled"), "{errors}");
}
