//! Debug exceptions for bus locks: IA32_DEBUGCTL.BUS_LOCK_DETECT. SDM Vol. 3B 18.3.1.6 "OS Bus-Lock Detection", Vol. 3A 9.1.2.3
//! "Features to Disable Bus Locks".

use guest_tests::flat::{Arrived, CODE, DATA, Flat, user, wrmsr};
use iced_x86::code_asm::*;
use iced_x86::{Decoder, IcedError, Mnemonic};
use x86::model::{MODELS, SAPPHIRERAPIDS};
use x86::msr::IA32_DEBUGCTL;

const DETECT: u64 = 1 << 2;
/// DR6 as after reset, and without BLD.
const QUIET: u64 = 0xFFFF_0FF0;
const LOCKED: u64 = QUIET & !(1 << 11);
/// The last bytes of a line, of a page, and where no memory is.
const LINE: u64 = DATA + 64;
const PAGE: u64 = DATA + 0x1000;
const DEVICE: u64 = 0x3000_0000;

type Body = fn(&mut CodeAssembler, u64) -> Result<(), IcedError>;

/// Runs an instruction on the address in RBX: whether a bus lock was found, right after it, and RFLAGS and memory then.
fn locks(control: u64, ring3: bool, at: u64, body: Body) -> (bool, Vec<u8>) {
    let mut flat = Flat::new(&SAPPHIRERAPIDS, 0x200, |a| {
        wrmsr(a, IA32_DEBUGCTL, control)?;
        if ring3 {
            user(a, 0)?;
        }
        a.mov(rbx, at)?;
        a.mov(eax, 0x11)?;
        a.mov(ecx, 0x22)?;
        a.stc()?;
        body(a, at)?;
        a.int3()?;
        a.nop()
    });
    // So that a compare finds what it expects.
    flat.write(DATA, &[0x11; 0x2000]);
    let arrived = flat.run().unwrap_err();
    let code: Vec<_> = Decoder::with_ip(64, flat.code(), CODE, 0).iter().collect();
    let int3 = code.iter().find(|i| i.mnemonic() == Mnemonic::Int3).unwrap();
    let status = flat.cpu.state().dr[6];
    let memory = flat.read(DATA, 0x2000);
    match arrived {
        // A trap: the frame holds the instruction after.
        Arrived { vector: 1, rip, .. } if rip == int3.ip() => {
            assert_eq!(status, LOCKED);
            (true, memory)
        }
        // INT3, whose gate is not for ring 3.
        Arrived { vector: 3, .. }
        | Arrived {
            vector: 13,
            error: Some(0x1A),
            ..
        } => {
            assert_eq!(status, QUIET);
            (false, memory)
        }
        other => panic!("{other:x?}"),
    }
}

const ROWS: [(&str, u64, Body); 13] = [
    ("ADD", 4, |a, _| a.lock().add(dword_ptr(rbx), ecx)),
    ("ADC", 8, |a, _| a.lock().adc(qword_ptr(rbx), 5)),
    ("INC", 2, |a, _| a.lock().inc(word_ptr(rbx))),
    ("NOT", 4, |a, _| a.lock().not(dword_ptr(rbx))),
    ("BTS", 4, |a, _| a.lock().bts(dword_ptr(rbx), 3)),
    ("XADD", 8, |a, _| a.lock().xadd(qword_ptr(rbx), rcx)),
    ("CMPXCHG", 4, |a, _| a.lock().cmpxchg(dword_ptr(rbx), ecx)),
    ("CMPXCHG8B", 8, |a, _| a.lock().cmpxchg8b(qword_ptr(rbx))),
    ("XCHG needs no prefix", 4, |a, _| a.xchg(dword_ptr(rbx), ecx)),
    ("ADD without one", 0, |a, _| a.add(dword_ptr(rbx), ecx)),
    ("XADD without one", 0, |a, _| a.xadd(dword_ptr(rbx), ecx)),
    ("CMPXCHG8B without one", 0, |a, _| a.cmpxchg8b(qword_ptr(rbx))),
    ("a load", 0, |a, _| a.mov(rcx, qword_ptr(rbx))),
];

// covers: cpu/bus-lock-split
#[test]
fn a_locked_access_across_a_line_is_a_trap() {
    for (why, size, body) in ROWS {
        for end in [LINE, PAGE] {
            let split = locks(DETECT, true, end - 1, body);
            assert_eq!(split.0, size != 0, "{why}: split at {end:x}");
            // What it does is what it does without.
            assert_eq!(split.1, locks(0, true, end - 1, body).1, "{why}");
            if size != 0 {
                assert!(
                    !locks(DETECT, true, end - size, body).0,
                    "{why}: up to the end of the line"
                );
                assert!(
                    !locks(DETECT, true, end - size - 1, body).0,
                    "{why}: misaligned, within"
                );
            }
            assert!(!locks(DETECT, false, end - 1, body).0, "{why}: at CPL 0");
            assert!(!locks(0, true, end - 1, body).0, "{why}: BUS_LOCK_DETECT is clear");
        }
    }
}

// covers: cpu/bus-lock-device
#[test]
fn a_locked_access_to_a_device_is_one_too() {
    for (why, size, body) in ROWS {
        assert_eq!(locks(DETECT, true, DEVICE, body).0, size != 0, "{why}");
        assert!(!locks(DETECT, false, DEVICE, body).0, "{why}: at CPL 0");
    }
    let wide: Body = |a, _| a.lock().cmpxchg16b(xmmword_ptr(rbx));
    assert!(locks(DETECT, true, DEVICE, wide).0);
    assert!(!locks(DETECT, true, DATA + 48, wide).0, "it is aligned, so in one line");
}

// covers: cpu/bus-lock-trap
#[test]
fn what_the_exception_leaves() {
    // With TF: one exception with both conditions.
    let mut flat = Flat::new(&SAPPHIRERAPIDS, 0, |a| {
        wrmsr(a, IA32_DEBUGCTL, DETECT)?;
        a.mov(rbx, LINE - 1)?;
        user(a, 0)?;
        a.pushfq()?;
        a.or(dword_ptr(rsp), 0x100)?;
        a.popfq()?;
        a.lock().inc(dword_ptr(rbx))?;
        a.nop()
    });
    assert_eq!(flat.run().unwrap_err().vector, 1);
    assert_eq!(flat.cpu.state().dr[6], LOCKED | 1 << 14);
    // The handler sets BLD again, or the next one cannot be reported; IA32_DEBUGCTL keeps its bit.
    flat.state(|s| s.dr[6] = QUIET);
    flat.restart();
    assert_eq!(flat.run().unwrap_err().vector, 1);
    let debugctl = flat.machine.units(0).unwrap().state().debugctl.unwrap();
    assert_eq!(debugctl.value, DETECT);
    // A fault of the instruction comes instead.
    let mut flat = Flat::new(&SAPPHIRERAPIDS, 0, |a| {
        wrmsr(a, IA32_DEBUGCTL, DETECT)?;
        user(a, 0)?;
        a.mov(rbx, 0x4000_0000u64 - 1)?;
        a.lock().inc(dword_ptr(rbx))?;
        a.nop()
    });
    let fault = flat.run().unwrap_err();
    assert_eq!((fault.vector, fault.error), (14, Some(6)));
    assert_eq!(flat.cpu.state().dr[6], QUIET);
}

// covers: cpu/bus-lock-models
#[test]
fn which_models_have_it() {
    for &model in MODELS.iter().filter(|model| model.features().lm()) {
        let mut flat = Flat::new(model, 0, |a| {
            wrmsr(a, IA32_DEBUGCTL, DETECT)?;
            // BLD can be written where it is.
            a.xor(eax, eax)?;
            a.mov(dr6, rax)?;
            a.mov(rdx, dr6)?;
            a.hlt()
        });
        let there = model.name == "sapphirerapids";
        assert_eq!(model.cpuid(7, 0)[2] >> 24 & 1 != 0, there, "{}", model.name);
        assert_eq!(flat.run().is_ok(), there, "{}", model.name);
        if there {
            assert_eq!(flat.cpu.state().gpr[2], LOCKED & 0xFFFF_0FF0);
        }
    }
    let without = SAPPHIRERAPIDS.with_toggles("-bus_lock_detect").unwrap();
    let mut flat = Flat::new(without, 0, |a| wrmsr(a, IA32_DEBUGCTL, DETECT));
    assert_eq!(flat.run().unwrap_err().vector, 13);
}
