//! Runs of small guests, whole and step by step.

use super::*;
use crate::config::{MachineConfig, RecordOptions, SerialTarget};
use crate::front::console::Console;
use crate::vm::Unmapped;

/// A flat multiboot image of this code, loaded at 1 MiB.
fn image(code: &[u8]) -> Vec<u8> {
    let flags = 1u32 << 16;
    let checksum = 0u32.wrapping_sub(0x1bad_b002).wrapping_sub(flags);
    let words = [0x1bad_b002, flags, checksum, 0x10_0000, 0x10_0000, 0, 0, 0x10_0020];
    words
        .iter()
        .flat_map(|word| word.to_le_bytes())
        .chain(code.iter().copied())
        .collect()
}

fn vm(code: &[u8], config: impl FnOnce(&mut MachineConfig)) -> (Run, Console) {
    let name = format!("minivmm-run-{}-{:?}", std::process::id(), std::thread::current().id());
    let path = std::env::temp_dir().join(name);
    std::fs::write(&path, image(code)).unwrap();
    let mut machine = MachineConfig {
        memory: 4 << 20,
        ..MachineConfig::new(&path)
    };
    config(&mut machine);
    let vm = Run::new(&machine).unwrap();
    std::fs::remove_file(&path).unwrap();
    let console = Console::open(&SerialTarget::Buffer, &[], vm.line()).unwrap();
    (vm, console)
}

// covers: determinism/repeats
#[test]
fn a_run_repeats_and_may_be_stopped_in_between() {
    // mov eax, 1; again: lea ecx, [ecx + eax*2]; mov [ecx + 200000H], eax; jmp again
    let code = [
        0xb8, 1, 0, 0, 0, 0x8d, 0x0c, 0x41, 0x89, 0x81, 0, 0, 0x20, 0, 0xeb, 0xf5,
    ];
    let whole = {
        let (mut vm, mut console) = vm(&code, |c| c.max_instructions = Some(300_001));
        assert!(matches!(
            vm.run(&mut console),
            Ok(StopReason::Ended(End::Instructions(300_001)))
        ));
        assert_eq!(vm.stats().steps, 300_001);
        (vm.digest(), vm.cpu_state(0))
    };
    let (mut vm, mut console) = vm(&code, |c| c.max_instructions = Some(1));
    for limit in [1, 2, 777, 100_000, 300_001] {
        vm.set_max_instructions(Some(limit));
        assert!(matches!(
            vm.run(&mut console),
            Ok(StopReason::Ended(End::Instructions(_)))
        ));
        assert_eq!(vm.stats().steps, limit);
    }
    assert_eq!((vm.digest(), vm.cpu_state(0)), whole);
}

// covers: library/run-step-inspect
#[test]
fn a_machine_is_run_step_by_step_and_looked_at() {
    // mov eax, 1; again: inc eax; mov [200000H], eax; cmp eax, 5; jne again; mov al, 0; out F4H, al
    let code = [
        0xb8, 1, 0, 0, 0, 0x40, 0xa3, 0, 0, 0x20, 0, 0x83, 0xf8, 5, 0x75, 0xf5, 0xb0, 0, 0xe6, 0xf4,
    ];
    let (mut vm, mut console) = vm(&code, |_| {});
    let rip = |vm: &Run| vm.cpu_state(0).unwrap().rip;
    let start = rip(&vm);
    for (steps, offset, eax) in [(1, 5, 1), (2, 6, 2), (3, 11, 2), (4, 14, 2), (5, 5, 2), (6, 6, 3)] {
        assert!(vm.step(&mut console).unwrap().is_none());
        assert_eq!((vm.steps(), rip(&vm) - start), (steps, offset));
        assert_eq!(vm.cpu_state(0).unwrap().gpr[0], eax);
    }
    assert!(vm.run_for(&mut console, 3).unwrap().is_none());
    assert_eq!((vm.steps(), vm.current_cpu(), vm.cpu_count()), (9, 0, 1));
    let mut bytes = [0; 4];
    vm.read_physical(0x20_0000, &mut bytes).unwrap();
    assert_eq!(bytes, [3, 0, 0, 0]);
    vm.read_linear(0, start, &mut bytes).unwrap();
    assert_eq!(bytes, code[..4]);
    assert_eq!(vm.read_linear(0, (4 << 20) - 2, &mut bytes), Err(Unmapped(4 << 20)));
    assert_eq!(
        vm.read_linear(1, start, &mut bytes),
        Err(Unmapped(start)),
        "no such CPU"
    );
    assert!(vm.read_physical(u64::MAX, &mut bytes).is_err() && vm.cpu_state(1).is_none());
    assert!(vm.virtual_ns() > 0);
    // What ends the run comes out of either, and a limit of the configuration's is kept.
    assert!(matches!(
        vm.run_for(&mut console, 1000),
        Ok(Some(StopReason::Ended(End::DebugExit(0))))
    ));
    let (mut vm, mut console) = self::vm(&code, |c| c.max_instructions = Some(7));
    assert!(vm.run_for(&mut console, 6).unwrap().is_none());
    assert!(matches!(
        vm.run_for(&mut console, 6),
        Ok(Some(StopReason::Ended(End::Instructions(7))))
    ));
}

// covers: determinism/checks-beside-stops
#[test]
fn a_check_of_a_session_holds_where_a_breakpoint_stops() {
    // mov ecx, 7FFFFFH; again: dec ecx; jnz again; inc eax; inc eax; mov al, 0; out F4H, al
    let code = [
        0xb9, 0xff, 0xff, 0x7f, 0, 0x49, 0x75, 0xfd, 0x40, 0x40, 0xb0, 0, 0xe6, 0xf4,
    ];
    let session = std::env::temp_dir().join(format!("minivmm-checks-{}", std::process::id()));
    let (mut run, mut console) = vm(&code, |config| {
        config.record = Some(RecordOptions {
            folder: session.clone(),
            arguments: Vec::new(),
        });
    });
    let start = run.cpu_state(0).unwrap().rip;
    assert!(matches!(
        run.run(&mut console),
        Ok(StopReason::Ended(End::DebugExit(0)))
    ));
    run.end_recording(&Ok(End::DebugExit(0))).unwrap();
    drop(run);
    let (mut run, mut console) = vm(&code, |config| config.replay = Some(session.clone()));
    // The second INC is the instruction after 2^24 steps, where the session has a check.
    run.debugger().add_breakpoint(start + 9);
    let stopped = run.run(&mut console);
    assert!(matches!(stopped, Ok(StopReason::Debugger(_))), "{stopped:?}");
    assert_eq!(run.steps(), CHECK);
    let ended = run.run(&mut console);
    assert!(matches!(ended, Ok(StopReason::Ended(End::DebugExit(0)))), "{ended:?}");
    std::fs::remove_dir_all(&session).unwrap();
}
