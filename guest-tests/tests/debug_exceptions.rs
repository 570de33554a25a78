//! Debug exceptions that a guest of its own cannot survive, or cannot look at.

use engine::{Activity, Exit};
use guest_tests::flat::{DATA, Flat};
use iced_x86::code_asm::*;
use x86::model::WESTMERE;

/// Where [`Flat`] has the IDT.
const IDT: u64 = 0x4000;
/// And its TSS.
const TSS: u64 = 0x5000;

/// A breakpoint on what the delivery of #DB itself reads: each delivery meets it again, and no instruction ever runs, as Xen's
/// advisory 156 has it of the parts. Whoever runs the processor gets to look all the same, and once the breakpoint is gone
/// the handler runs.
// covers: experiments/dr-implicit
#[test]
fn a_breakpoint_on_the_gate_of_debug_exceptions_holds_the_processor_up() {
    let mut flat = Flat::new(&WESTMERE, 0, |a| {
        a.mov(rax, IDT + 16)?;
        a.mov(dr0, rax)?;
        // G0, reads and writes of 8 bytes.
        a.mov(eax, 0x000B_0402)?;
        a.mov(dr7, rax)?;
        a.sti()?;
        a.int1()?;
        a.hlt()
    });
    // A stack of the IST, or else each frame lies below the one before until there is no more stack.
    flat.write(IDT + 16 + 4, &[1]);
    flat.write(TSS + 0x24, &(DATA + 0x1000).to_le_bytes());
    assert_eq!(flat.run_for(20), Exit::Budget);
    let state = flat.cpu.state();
    assert_eq!((state.steps, state.activity), (6, Activity::Running));
    assert!(!flat.cpu.interruptible(), "not even interrupts break in");
    assert!(!flat.cpu.nmi_deliverable());
    // It is at the handler each time, so that is what the frame holds.
    assert_eq!(flat.word(DATA + 0x1000 - 40), state.rip);
    flat.state(|s| s.dr[7] = 0x400);
    let arrived = flat.run().unwrap_err();
    assert_eq!(arrived.vector, 1);
    assert_eq!(flat.cpu.state().steps, 7, "the handler's HLT");
    assert_eq!(flat.cpu.state().dr[6] & 0xF, 1);
}
