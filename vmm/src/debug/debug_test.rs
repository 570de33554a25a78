//! A machine that is stopped, looked at, and run on.

use super::*;
use crate::{Console, End, MachineConfig, Run, SerialTarget, StopReason};

/// Where the image is loaded.
const START: u64 = 0x10_0020;
const DATA: u64 = 0x20_0000;

/// A flat multiboot image of this code at [`START`], which is entered in 32-bit mode without paging.
fn vm(code: &[u8]) -> (Run, Console) {
    vm_for(code, Some(10_000_000))
}

/// The same with another limit, or none.
fn vm_for(code: &[u8], max_instructions: Option<u64>) -> (Run, Console) {
    let flags = 1u32 << 16;
    let checksum = 0u32.wrapping_sub(0x1bad_b002).wrapping_sub(flags);
    let words = [0x1bad_b002, flags, checksum, 0x10_0000, 0x10_0000, 0, 0, START as u32];
    let mut image: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
    image.extend(code);
    let name = format!("minivmm-debug-{}-{:?}", std::process::id(), std::thread::current().id());
    let path = std::env::temp_dir().join(name);
    std::fs::write(&path, image).unwrap();
    let config = MachineConfig {
        memory: 4 << 20,
        max_instructions,
        ..MachineConfig::new(&path)
    };
    let vm = Run::new(&config).unwrap();
    std::fs::remove_file(&path).unwrap();
    let console = Console::open(&SerialTarget::Buffer, &[], vm.line()).unwrap();
    (vm, console)
}

/// mov ecx, 1000; again: inc edx; mov [DATA], edx; loop again; out F4H, al
const LOOP: [u8; 16] = [
    0xb9, 0xe8, 3, 0, 0, 0x42, 0x89, 0x15, 0, 0, 0x20, 0, 0xe2, 0xf7, 0xe6, 0xf4,
];

fn stop(reason: StopReason) -> Option<StopCause> {
    match reason {
        StopReason::Debugger(stop) => {
            assert_eq!(stop.cpu, 0);
            Some(stop.why)
        }
        StopReason::Ended(End::DebugExit(_)) => None,
        reason => panic!("{reason:?}"),
    }
}

/// Runs to the end and says what it was stopped for.
fn stops(vm: &mut Run, console: &mut Console) -> Vec<StopCause> {
    std::iter::from_fn(|| stop(vm.run(console).unwrap())).collect()
}

fn plain(code: &[u8]) -> (u64, u64) {
    let (mut vm, mut console) = vm(code);
    assert_eq!(stops(&mut vm, &mut console), []);
    (vm.digest(), vm.steps())
}

// covers: debug/breakpoints
#[test]
fn breakpoints_have_no_limit_and_leave_no_trace() {
    let (mut vm, mut console) = vm(&LOOP);
    for address in START - 500..START + 500 {
        vm.debugger().add_breakpoint(address);
        vm.debugger().add_breakpoint(address);
    }
    // All but the middle of the loop are gone again; that one was wanted twice.
    for address in START - 500..START + 500 {
        assert!(vm.debugger().remove_breakpoint(address));
        assert!(address == START + 6 || vm.debugger().remove_breakpoint(address));
        assert_eq!(vm.debugger().has_breakpoint(address), address == START + 6);
    }
    assert!(!vm.debugger().remove_breakpoint(START));
    let start = vm.cpu_state(0).unwrap().gpr[2];
    for round in 1..=1000 {
        assert_eq!(
            stop(vm.run(&mut console).unwrap()),
            Some(StopCause::Breakpoint(START + 6))
        );
        let state = vm.cpu_state(0).unwrap();
        assert_eq!((state.gpr[2], vm.steps()), (start + round, round * 3 - 1));
        let mut code = [0; LOOP.len()];
        vm.read_linear(0, START, &mut code).unwrap();
        assert_eq!(code, LOOP, "memory is as the guest has it");
    }
    assert_eq!(stops(&mut vm, &mut console), []);
    assert_eq!((vm.digest(), vm.steps()), plain(&LOOP));
}

// covers: debug/watchpoints
#[test]
fn watchpoints_stop_after_the_access_that_touches_them() {
    // mov edi, DATA; mov al, [edi+3]; mov [edi+3], al; inc dword [edi+4]; mov ecx, 8; rep stosb; out F4H, al
    let code = [
        0xbf, 0, 0, 0x20, 0, 0x8a, 0x47, 3, 0x88, 0x47, 3, 0xff, 0x47, 4, 0xb9, 8, 0, 0, 0, 0xf3, 0xaa, 0xe6, 0xf4,
    ];
    use WatchKind::{Access, Read, Write};
    // Where it is watched, how far, and the addresses and instructions that are found.
    for (first, len, kind, found) in [
        (3, 1, Write, &[(3, 8), (3, 19)][..]),
        (3, 1, Read, &[(3, 5)]),
        (3, 1, Access, &[(3, 5), (3, 8), (3, 19)]),
        (2, 3, Access, &[(3, 5), (3, 8), (4, 11), (2, 19), (3, 19), (4, 19)]),
        (6, 1, Read, &[(6, 11)]),
        (6, 100, Write, &[(6, 11), (6, 19), (7, 19)]),
        (8, 1 << 20, Access, &[]),
    ] {
        let (mut vm, mut console) = vm(&code);
        let watchpoint = Watchpoint::new(DATA + first, len, kind).unwrap();
        vm.debugger().add_watchpoint(watchpoint);
        let came = stops(&mut vm, &mut console);
        let expected: Vec<StopCause> = found
            .iter()
            .map(|&(address, ip)| StopCause::Watch {
                watchpoint,
                address: DATA + address,
                ip: Some(START + ip),
            })
            .collect();
        assert_eq!(came, expected, "{watchpoint:?}");
        assert_eq!((vm.digest(), vm.steps()), plain(&code));
        assert!(vm.debugger().remove_watchpoint(&watchpoint) && !vm.debugger().remove_watchpoint(&watchpoint));
    }
    for (first, len) in [(5, 0), (u64::MAX, 2), (2, u64::MAX)] {
        assert_eq!(Watchpoint::new(first, len, Access), None, "{first:x} {len:x}");
    }
    assert!(Watchpoint::new(u64::MAX, 1, Access).is_some() && Watchpoint::new(0, u64::MAX, Access).is_some());
}

// covers: debug/step
#[test]
fn a_step_is_an_instruction_an_iteration_or_an_event() {
    // mov ecx, 2; rep stosb; int 40H, which the empty IDT makes a triple fault
    let code = [0xb9, 2, 0, 0, 0, 0xf3, 0xaa, 0xcd, 0x40];
    let (mut vm, mut console) = vm(&code);
    vm.debugger().step(Some(0));
    for (rip, ecx) in [(5, 2), (5, 1), (7, 0)] {
        assert_eq!(stop(vm.run(&mut console).unwrap()), Some(StopCause::Step));
        let state = vm.cpu_state(0).unwrap();
        assert_eq!((state.rip, state.gpr[1]), (START + rip, ecx));
    }
    // Shown once, and the end when it is run on.
    assert_eq!(stop(vm.run(&mut console).unwrap()), Some(StopCause::TripleFault));
    assert!(matches!(
        vm.run(&mut console).unwrap(),
        StopReason::Ended(End::TripleFault(_))
    ));
}

// covers: debug/step
#[test]
fn steps_leave_no_trace() {
    let (mut vm, mut console) = vm(&LOOP);
    vm.debugger().step(Some(0));
    vm.debugger().add_breakpoint(START + 12);
    let mut breakpoints = 0;
    loop {
        let before = vm.steps();
        match stop(vm.run(&mut console).unwrap()) {
            Some(StopCause::Step) => assert_eq!(vm.steps(), before + 1),
            Some(StopCause::Breakpoint(_)) => {
                assert_eq!(vm.steps(), before);
                breakpoints += 1;
            }
            other => {
                assert_eq!(other, None);
                break;
            }
        }
    }
    assert_eq!(breakpoints, 1000);
    assert_eq!((vm.digest(), vm.steps()), plain(&LOOP));
}

// covers: debug/catch
#[test]
fn exceptions_are_caught_at_their_handlers() {
    const HANDLER: u32 = START as u32 + 0x40;
    let gate = |offset: u32| u64::from(offset & 0xffff) | 8 << 16 | 0x8e << 40 | u64::from(offset >> 16) << 48;
    let mut code = vec![0; 0x210];
    let mut put = |at: usize, bytes: &[u8]| code[at..at + bytes.len()].copy_from_slice(bytes);
    // mov esp, 300000H; lgdt [START + 200H]; lidt [START + 208H]; ud2
    put(0, &[0xbc, 0, 0, 0x30, 0, 0x0f, 0x01, 0x15]);
    put(8, &(START as u32 + 0x200).to_le_bytes());
    put(12, &[0x0f, 0x01, 0x1d]);
    put(15, &(START as u32 + 0x208).to_le_bytes());
    put(19, &[0x0f, 0x0b]);
    // add esp, 0CH; xor ebx, ebx; div ebx
    put(0x40, &[0x83, 0xc4, 0x0c, 0x31, 0xdb, 0xf7, 0xf3]);
    put(0x100, &gate(HANDLER).to_le_bytes());
    put(0x130, &gate(HANDLER).to_le_bytes());
    put(0x188, &0x00cf_9b00_0000_ffff_u64.to_le_bytes());
    put(0x200, &[0x0f, 0]);
    put(0x202, &(START as u32 + 0x180).to_le_bytes());
    put(0x208, &[0x37, 0]);
    put(0x20a, &(START as u32 + 0x100).to_le_bytes());
    let (mut vm, mut console) = vm(&code);
    assert!(vm.debugger().catch(6, true) && !vm.debugger().catch(6, true));
    assert_eq!(vm.debugger().catches(), [6]);
    let caught = |vector| {
        Some(StopCause::Exception {
            vector,
            error: None,
            address: None,
        })
    };
    assert_eq!(stop(vm.run(&mut console).unwrap()), caught(6));
    assert_eq!(vm.cpu_state(0).unwrap().rip, u64::from(HANDLER));
    assert!(vm.debugger().catch(6, false) && vm.debugger().catch(0, true));
    assert_eq!(stop(vm.run(&mut console).unwrap()), caught(0));
    vm.debugger().clear();
    assert!(vm.debugger().catches().is_empty());
}

// covers: debug/change
#[test]
fn registers_and_code_are_changed_under_way() {
    let (mut vm, mut console) = vm(&LOOP);
    vm.debugger().add_breakpoint(START + 5);
    assert_eq!(
        stop(vm.run(&mut console).unwrap()),
        Some(StopCause::Breakpoint(START + 5))
    );
    // Moved to where a breakpoint is, it stops there before anything runs.
    let mut state = vm.cpu_state(0).unwrap();
    (state.rip, state.gpr[1]) = (START + 12, 2);
    vm.set_cpu_state(0, &state).unwrap();
    assert_eq!(
        stop(vm.run(&mut console).unwrap()),
        Some(StopCause::Breakpoint(START + 5))
    );
    assert_eq!(vm.cpu_state(0).unwrap().gpr[1], 1);
    // The loop's code has been decoded: INC becomes DEC.
    let before = vm.cpu_state(0).unwrap().gpr[2];
    vm.write_linear(0, START + 5, &[0x4a]).unwrap();
    assert_eq!(stop(vm.run(&mut console).unwrap()), None);
    assert_eq!(
        vm.cpu_state(0).unwrap().gpr[2],
        u64::from((before as u32).wrapping_sub(1))
    );
    assert!(vm.write_linear(0, (4 << 20) - 1, &[1, 2]).is_err() && vm.write_linear(1, START, &[1]).is_err());
    assert!(vm.set_cpu_state(1, &state).is_err() && vm.write_physical(u64::MAX, &[1, 2]).is_err());
}

// covers: debug/ask
#[test]
fn a_machine_stops_when_it_is_asked_to() {
    // jmp $
    let (mut vm, mut console) = vm_for(&[0xeb, 0xfe], None);
    let interrupt = vm.interrupt().clone();
    let thread = std::thread::spawn(move || {
        std::thread::sleep(std::time::Duration::from_millis(20));
        interrupt.stop();
    });
    assert!(matches!(vm.run(&mut console), Ok(StopReason::Outside)));
    assert!(vm.interrupt().take() && !vm.interrupt().is_set());
    thread.join().unwrap();
    vm.end_debugging();
    assert!(matches!(vm.run_for(&mut console, 100), Ok(None)));
}
