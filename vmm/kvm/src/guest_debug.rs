//! The processor's debug registers in the hands of whoever debugs the guest from outside: KVM_SET_GUEST_DEBUG.
//!
//! # Theory
//! With KVM_GUESTDBG_USE_HW_BP the processor holds the host's breakpoints while the guest runs. The guest's own are kept aside:
//! its MOV DR reads and writes those, and they do nothing. So there is one more use of DR7 for the host, GD: each MOV DR comes
//! out of KVM_RUN before it executes, and the host sees when the guest arms a breakpoint of its own. From there on the software
//! engine, where both have theirs, takes the guest.
//!
//! Whatever raises #DB comes out meanwhile. DR6 says whose it is: [`Hit`].
//!
//! # Practice
//! KVMs differ in what they deliver, and say that they can all of it: [`measure`] tries with a guest of three instructions.
//!
//! What is left out: a store that KVM itself makes for the guest (INS, an instruction that it emulates) meets no watchpoint.

use std::cell::Cell;
use std::{fmt, io};

use engine::{Event, Source};
use kvm_bindings::{KVM_GUESTDBG_SINGLESTEP, KVM_GUESTDBG_USE_HW_BP, KVM_GUESTDBG_USE_SW_BP, kvm_regs, kvm_segment};
use kvm_ioctls::{Kvm, VcpuFd};
use serde::Serialize;
use x86::debug::{Breakpoint, Dr6, Dr7, Watched};

use crate::sys::{self, Reason};
use machine::memory::Memory;

/// The debug registers that hold an address.
pub const ROOM: usize = 4;

/// What KVM_SET_GUEST_DEBUG makes come out of KVM_RUN here.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Kinds {
    /// An instruction's end: KVM_GUESTDBG_SINGLESTEP.
    pub single_step: bool,
    /// INT3: KVM_GUESTDBG_USE_SW_BP.
    pub software: bool,
    /// An execution breakpoint: KVM_GUESTDBG_USE_HW_BP.
    pub execution: bool,
    /// A data breakpoint: the same.
    pub data: bool,
    /// The guest's MOV DR, by DR7.GD: the same.
    pub register_access: bool,
    /// An execution breakpoint of the guest's own is delivered to the guest meanwhile, as by a KVM that interprets.
    pub beside: bool,
}

impl Kinds {
    /// The guest can run in KVM with execution breakpoints of the host's, and nothing of either's is lost.
    pub fn serves_breakpoints(self) -> bool {
        self.execution && (self.register_access || self.beside)
    }

    /// The same of watchpoints.
    pub fn serves_watchpoints(self) -> bool {
        self.data && self.register_access
    }
}

impl fmt::Display for Kinds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kinds = [
            (self.single_step, "single steps"),
            (self.software, "INT3"),
            (self.execution, "execution breakpoints"),
            (self.data, "watchpoints"),
            (self.register_access, "MOV DR"),
            (self.beside, "the guest's own breakpoints to the guest"),
        ];
        let there: Vec<&str> = kinds
            .into_iter()
            .filter_map(|(there, name)| there.then_some(name))
            .collect();
        match there.is_empty() {
            true => f.write_str("nothing"),
            false => f.write_str(&there.join(", ")),
        }
    }
}

/// Whose doing a debug exception was that came out of KVM_RUN.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Hit {
    /// Which of the host's breakpoints were met, a bit each.
    pub points: u8,
    /// The guest steps itself: RFLAGS.TF. The instruction has retired, and the guest's exception is still to be delivered.
    pub guest_steps: bool,
}

impl Hit {
    /// Reads it off DR6, where so many breakpoints are set. With none of either the instruction at RIP has not executed: MOV DR
    /// or INT1, whose exceptions are the guest's affair.
    pub fn of(dr6: u64, points: usize) -> Self {
        let dr6 = Dr6::from_bits(dr6);
        Hit {
            // The processor may set the bits of those that are not enabled. SDM Vol. 3B 18.2.3 "Debug Status Register (DR6)".
            points: dr6.breakpoints() & ((1u8 << points.min(ROOM)) - 1),
            guest_steps: dr6.single_step(),
        }
    }
}

/// The guest's own #DB, once DR6 says why.
pub const EXCEPTION: Event = Event {
    vector: 1,
    error: None,
    source: Source::Exception,
};

/// What the debug registers hold for these breakpoints, the first four of them. The last word is DR7.
fn registers(points: &[Breakpoint]) -> [u64; 8] {
    let mut registers = [0; 8];
    let (mut enables, mut conditions) = (0u8, 0u16);
    for (n, point) in points.iter().take(ROOM).enumerate() {
        let kind = match point.watched {
            Watched::Execute => 0,
            Watched::Write => 1,
            Watched::Port => 2,
            Watched::ReadWrite => 3,
        };
        let len = match point.len {
            2 => 1,
            8 => 2,
            4 => 3,
            _ => 0,
        };
        registers[n] = point.first;
        // G: a task switch clears L.
        enables |= 2 << (n * 2);
        conditions |= (kind | len << 2) << (n * 4);
    }
    let dr7 = Dr7::new()
        .with_enables(enables)
        .with_one(true)
        .with_general_detect(true)
        .with_conditions(conditions);
    registers[7] = dr7.into_bits();
    registers
}

/// Has a vCPU come out of KVM_RUN where it meets one of these breakpoints, four at most, or executes MOV DR; with none, no longer.
/// Whose they are is the caller's to know.
///
/// # Errors
/// KVM refuses.
pub fn arm(vcpu: &VcpuFd, points: &[Breakpoint]) -> io::Result<()> {
    match points {
        [] => sys::guest_debug(vcpu, 0, [0; 8]),
        points => sys::guest_debug(vcpu, KVM_GUESTDBG_USE_HW_BP, registers(points)),
    }
}

/// A breakpoint before the instruction at a linear address.
pub fn execution(address: u64) -> Breakpoint {
    Breakpoint {
        watched: Watched::Execute,
        first: address,
        len: 1,
        enabled: true,
    }
}

/// Where the guest of the measurement is.
const CODE: u64 = 0x1000;
/// `nop; mov [2000H], al; mov eax, dr7; hlt`, of 32-bit code.
const GUEST: [u8; 10] = [0x90, 0xa2, 0x00, 0x20, 0, 0, 0x0f, 0x21, 0xf8, 0xf4];
const STORE: u64 = CODE + 1;
const MOVE: u64 = CODE + 6;
const DATA: u64 = 0x2000;
const STACK: u64 = 0x1800;
const GDT: u64 = 0x3000;
const IDT: u64 = 0x3800;
/// Flat segments of code and data, behind the null one.
const DESCRIPTORS: [u64; 3] = [0, 0x00cf_9b00_0000_ffff, 0x00cf_9300_0000_ffff];
/// int3
const INT3: u64 = 0x1100;
/// DR7 with L0 and what is always 1.
const OWN: u64 = 0x401;
/// hlt
const HANDLER: u64 = 0x1200;

/// Has a vCPU begin at an address, in protected mode: a VMX that lacks unrestricted guests has KVM interpret real mode.
pub(crate) fn begin(vcpu: &VcpuFd, at: u64) -> io::Result<()> {
    let mut sregs = vcpu.get_sregs()?;
    sregs.cs = kvm_segment {
        base: 0,
        limit: u32::MAX,
        selector: 8,
        type_: 11,
        present: 1,
        db: 1,
        s: 1,
        g: 1,
        ..Default::default()
    };
    let data = kvm_segment {
        selector: 16,
        type_: 3,
        ..sregs.cs
    };
    (sregs.ds, sregs.es, sregs.fs, sregs.gs, sregs.ss) = (data, data, data, data, data);
    (sregs.gdt.base, sregs.gdt.limit) = (GDT, 0x17);
    (sregs.idt.base, sregs.idt.limit) = (IDT, 0x1f);
    sregs.cr0 |= 1;
    vcpu.set_sregs(&sregs)?;
    let regs = kvm_regs {
        rip: at,
        rsp: STACK,
        rflags: 2,
        ..Default::default()
    };
    Ok(vcpu.set_regs(&regs)?)
}

/// Tries what KVM delivers, with a guest in a machine of its own.
///
/// # Errors
/// KVM refuses or fails.
pub fn measure(kvm: &Kvm) -> io::Result<Kinds> {
    let memory = Memory::new(2 << 20).map_err(io::Error::other)?;
    let vm = kvm.create_vm()?;
    vm.set_tss_address(0xfffb_d000)?;
    sys::lend(&vm, &memory)?;
    let put = |at: u64, bytes: &[u8]| memory.write(at, bytes).map_err(io::Error::other);
    put(CODE, &GUEST)?;
    put(INT3, &[0xcc])?;
    put(HANDLER, &[0xf4])?;
    put(GDT, &DESCRIPTORS.map(u64::to_le_bytes).concat())?;
    // Whatever comes to the guest instead, #DB or #BP, ends at another HLT: an interrupt gate.
    let gate = HANDLER | 8 << 16 | 0x8e00 << 32;
    put(IDT, &[gate.to_le_bytes(); 4].concat())?;
    let mut vcpu = vm.create_vcpu(0)?;
    // An execution breakpoint of the guest's own.
    let own = Cell::new(None);
    // What comes out first, and where RIP is then.
    let mut comes = |kinds: u32, registers: [u64; 8], from: u64| -> io::Result<(Reason, u64)> {
        begin(&vcpu, from)?;
        if let Some(address) = own.get() {
            let mut debug = vcpu.get_debug_regs()?;
            (debug.db[0], debug.dr7) = (address, OWN);
            vcpu.set_debug_regs(&debug)?;
        }
        sys::guest_debug(&vcpu, kinds, registers)?;
        let reason = sys::run_unkicked(&mut vcpu);
        Ok((reason, vcpu.get_regs()?.rip))
    };
    let met = |came: (Reason, u64), at: u64, bits: u64| matches!(came, (Reason::Debug { vector: 1, dr6 }, rip) if rip == at && dr6 & bits == bits);
    let store = Breakpoint {
        watched: Watched::Write,
        first: DATA,
        len: 1,
        enabled: true,
    };
    const B0: u64 = 1;
    const BD: u64 = 1 << 13;
    const BS: u64 = 1 << 14;
    let elsewhere = registers(&[execution(INT3)]);
    let int3 = comes(KVM_GUESTDBG_USE_SW_BP, [0; 8], INT3)?;
    let executed = comes(KVM_GUESTDBG_USE_HW_BP, registers(&[execution(STORE)]), CODE)?;
    let stored = comes(KVM_GUESTDBG_USE_HW_BP, registers(&[store]), CODE)?;
    let moved = comes(KVM_GUESTDBG_USE_HW_BP, elsewhere, CODE)?;
    own.set(Some(MOVE));
    let beside = comes(KVM_GUESTDBG_USE_HW_BP, elsewhere, CODE)?;
    // At last: kvm-intel ends the first step of a vCPU that has not run before its instruction.
    let stepped = comes(KVM_GUESTDBG_SINGLESTEP, [0; 8], CODE)?;
    Ok(Kinds {
        single_step: met(stepped, STORE, BS),
        software: matches!(int3, (Reason::Debug { vector: 3, .. }, INT3)),
        execution: met(executed, STORE, B0),
        data: met(stored, MOVE, B0),
        register_access: met(moved, MOVE, BD),
        beside: matches!(beside, (Reason::Halt, rip) if rip == HANDLER + 1),
    })
}

#[cfg(test)]
#[path = "guest_debug_test.rs"]
mod tests;
