//! A VMM for tests: a VMCS whose guest has the VMM's own memory and tables, and one verb that enters the guest and comes back with a VM
//! exit. SDM Vol. 3C chapters 24 to 28.

use core::arch::{asm, global_asm};

use rt::cpu::{self, rdmsr, read};
use rt::exception::selector;
use rt::need::Need;
use rt::{attempt, call, label, paging};
use x86::cpuid::Feature;
use x86::msr::{IA32_FS_BASE, IA32_GS_BASE};
use x86::vmx::controls::{Entry, Exit, Pin, Primary, Secondary};
use x86::vmx::fields::Field;

global_asm!(
    r#"
    .text
    .globl  vmm_enter, vmm_exit
    # enter(VMLAUNCH, registers): 0 after a VM exit, else RFLAGS.CF and ZF
vmm_enter:
    push    rbx
    push    rbp
    push    r12
    push    r13
    push    r14
    push    r15
    push    rsi
    mov     eax, 0x6c14
    vmwrite rax, rsp
    test    edi, edi
    mov     rax, [rsi]
    mov     rcx, [rsi + 8]
    mov     rdx, [rsi + 16]
    mov     rbx, [rsi + 24]
    mov     rdi, [rsi + 48]
    mov     rsi, [rsi + 40]
    jnz     2f
    vmresume
    jmp     3f
2:  vmlaunch
3:  pushfq
    pop     rax
    and     eax, 0x41
    pop     rsi
    jmp     4f
vmm_exit:
    xchg    rsi, [rsp]
    mov     [rsi], rax
    mov     [rsi + 8], rcx
    mov     [rsi + 16], rdx
    mov     [rsi + 24], rbx
    mov     [rsi + 48], rdi
    pop     rax
    mov     [rsi + 40], rax
    xor     eax, eax
4:  pop     r15
    pop     r14
    pop     r13
    pop     r12
    pop     rbp
    pop     rbx
    cld
    ret
"#
);

/// VMX. Without it its instructions are undefined, and CR4.VMXE is reserved.
pub const VMX: Need = Need {
    reason: "no virtual-machine extensions (CPUID.1:ECX[5] is 0)",
    present: || cpu::has(Feature::Vmx),
    absent: || {
        assert!(!cpu::has(Feature::Vmx));
        assert_eq!(attempt!("vmxoff"), Some(rt::exception::Fault::UD), "VMXOFF");
        assert_eq!(
            cpu::set_cr4(cpu::cr4() | 1 << 13),
            Some(rt::exception::Fault::GP0),
            "CR4.VMXE"
        );
        cpu::no_msr(0x480);
    },
};

/// A secondary control that can be 1.
pub fn has(control: Secondary) -> bool {
    cpu::has(Feature::Vmx) && rdmsr(0x48B).is_ok_and(|value| value >> 32 & u64::from(control.0) != 0)
}

/// Extended page tables.
pub const EPT: Need = Need {
    reason: "no EPT (IA32_VMX_PROCBASED_CTLS2[33] is 0)",
    present: || has(Secondary::EPT),
    absent: || assert!(!has(Secondary::EPT)),
};

/// The VMX-preemption timer.
pub const TIMER: Need = Need {
    reason: "no VMX-preemption timer (IA32_VMX_PINBASED_CTLS[38] is 0)",
    present: || cpu::has(Feature::Vmx) && read(0x481) >> 32 & u64::from(Pin::PREEMPTION_TIMER.0) != 0,
    absent: || {},
};

/// The monitor trap flag.
pub const MONITOR_TRAP: Need = Need {
    reason: "no monitor trap flag (IA32_VMX_PROCBASED_CTLS[59] is 0)",
    present: || cpu::has(Feature::Vmx) && read(0x482) >> 32 & u64::from(Primary::MONITOR_TRAP.0) != 0,
    absent: || {},
};

/// What failed: VMfailInvalid, or VMfailValid with the VM-instruction error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fail {
    /// CF.
    Invalid,
    /// ZF: the VM-instruction error field.
    Error(u64),
}

/// An instruction of VMX with one operand in memory: how it ends.
macro_rules! with_pointer {
    ($($(#[$doc:meta])* $name:ident $instruction:literal;)*) => {$(
        $(#[$doc])*
        ///
        /// # Errors
        /// VMfail.
        pub fn $name(pointer: u64) -> Result<(), Fail> {
            let flags: u64;
            // SAFETY: the guest owns the machine.
            unsafe {
                asm!(
                    concat!($instruction, " [{at}]"),
                    "pushfq",
                    "pop {flags}",
                    at = in(reg) &pointer,
                    flags = lateout(reg) flags,
                );
            }
            outcome(flags)
        }
    )*};
}

with_pointer! {
    /// VMXON.
    vmxon "vmxon";
    /// VMCLEAR.
    vmclear "vmclear";
    /// VMPTRLD.
    vmptrld "vmptrld";
}

fn outcome(flags: u64) -> Result<(), Fail> {
    match flags & 0x41 {
        0 => Ok(()),
        1 => Err(Fail::Invalid),
        _ => Err(Fail::Error(vmread(Field::INSTRUCTION_ERROR.0.into()).unwrap_or(0))),
    }
}

/// VMCALL in root operation.
///
/// # Errors
/// VMfail, always.
pub fn vmcall() -> Result<(), Fail> {
    let flags: u64;
    // SAFETY: as above.
    unsafe { asm!("vmcall", "pushfq", "pop {}", out(reg) flags) };
    outcome(flags)
}

/// VMREAD.
///
/// # Errors
/// VMfail.
pub fn vmread(encoding: u64) -> Result<u64, Fail> {
    let (value, flags): (u64, u64);
    // SAFETY: as above.
    unsafe {
        asm!(
            "xor {value:e}, {value:e}",
            "vmread {value}, {encoding}",
            "pushfq",
            "pop {flags}",
            encoding = in(reg) encoding,
            value = out(reg) value,
            flags = out(reg) flags,
        );
    }
    // The error field itself can always be read.
    if flags & 0x41 == 0 {
        return Ok(value);
    }
    outcome(flags).map(|()| value)
}

/// VMWRITE.
///
/// # Errors
/// VMfail.
pub fn vmwrite(encoding: u64, value: u64) -> Result<(), Fail> {
    let flags: u64;
    // SAFETY: as above.
    unsafe {
        asm!(
            "vmwrite {encoding}, {value}",
            "pushfq",
            "pop {flags}",
            encoding = in(reg) encoding,
            value = in(reg) value,
            flags = out(reg) flags,
        );
    }
    outcome(flags)
}

/// Leaves VMX operation, if the CPU is in it.
pub fn vmxoff() {
    let _ = attempt!("vmxoff");
}

/// A region with the revision identifier of this CPU.
pub fn region() -> u64 {
    let at = paging::pages(1);
    paging::poke(at, read(0x480) & 0x7FFF_FFFF);
    at
}

/// RAX, RCX, RDX, RBX, RSP (not used), RSI and RDI of the guest at 0 to 6 (RBP is the VMM's own).
pub type Registers = [u64; 7];

/// A VMM with a guest.
pub struct Vmm {
    /// The VMXON region.
    pub vmxon: u64,
    /// The region of the current VMCS.
    pub vmcs: u64,
    launched: bool,
    /// The guest's registers.
    pub registers: Registers,
}

/// What a VM exit says first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Exited {
    /// The exit reason.
    pub reason: u64,
    /// The exit qualification.
    pub qualification: u64,
    /// The VM-exit instruction length.
    pub length: u64,
    /// The guest's RIP.
    pub rip: u64,
}

fn descriptor_table(instruction: impl FnOnce(*mut [u8; 10])) -> u64 {
    let mut image = [0u8; 10];
    instruction(&mut image);
    let mut base = [0; 8];
    base.copy_from_slice(&image[2..]);
    u64::from_le_bytes(base)
}

/// The TSS's base, from its descriptor.
fn tss(gdt: u64) -> u64 {
    let at = gdt + u64::from(selector::TSS);
    let (low, high) = (paging::peek(at), paging::peek(at + 8));
    low >> 16 & 0xFF_FFFF | low >> 56 << 24 | high << 32
}

impl Vmm {
    /// VMX operation with a VMCS whose guest is 64-bit code of ring 0 at `rip`, in the VMM's own memory.
    pub fn new(rip: u64) -> Vmm {
        vmxoff();
        assert_eq!(read(0x3A) & 5, 5, "IA32_FEATURE_CONTROL");
        assert_eq!(cpu::set_cr0(cpu::cr0() | 1 << 5), None);
        assert_eq!(cpu::set_cr4(cpu::cr4() | 1 << 13), None);
        let (on, vmcs) = (region(), region());
        assert_eq!(vmxon(on), Ok(()));
        assert_eq!(vmclear(vmcs), Ok(()));
        assert_eq!(vmptrld(vmcs), Ok(()));
        let mut vmm = Vmm {
            vmxon: on,
            vmcs,
            launched: false,
            registers: [0; 7],
        };
        vmm.fill(rip);
        vmm
    }

    fn fill(&mut self, rip: u64) {
        // SAFETY: SGDT and SIDT write ten bytes.
        let gdt = descriptor_table(|at| unsafe { asm!("sgdt [{}]", in(reg) at) });
        // SAFETY: as above.
        let idt = descriptor_table(|at| unsafe { asm!("sidt [{}]", in(reg) at) });
        let (tr, stack) = (tss(gdt), paging::pages(4) + 0x3F00);
        self.pin(Pin::NONE);
        self.primary(Primary::NONE);
        self.exits(Exit::HOST_64BIT);
        self.entries(Entry::GUEST_64BIT);
        self.set(Field::LINK_POINTER, u64::MAX);
        for (host, guest, value) in [
            (Field::HOST_CR0, Field::GUEST_CR0, cpu::cr0()),
            (Field::HOST_CR3, Field::GUEST_CR3, cpu::cr3()),
            (Field::HOST_CR4, Field::GUEST_CR4, cpu::cr4()),
            (Field::HOST_CS, Field::GUEST_CS, selector::CODE.into()),
            (Field::HOST_SS, Field::GUEST_SS, selector::DATA.into()),
            (Field::HOST_DS, Field::GUEST_DS, selector::DATA.into()),
            (Field::HOST_ES, Field::GUEST_ES, selector::DATA.into()),
            (Field::HOST_TR, Field::GUEST_TR, selector::TSS.into()),
            (Field::HOST_TR_BASE, Field::GUEST_TR_BASE, tr),
            (Field::HOST_GDTR_BASE, Field::GUEST_GDTR_BASE, gdt),
            (Field::HOST_IDTR_BASE, Field::GUEST_IDTR_BASE, idt),
            (Field::HOST_FS_BASE, Field::GUEST_FS_BASE, read(IA32_FS_BASE)),
            (Field::HOST_GS_BASE, Field::GUEST_GS_BASE, read(IA32_GS_BASE)),
            (Field::HOST_RIP, Field::GUEST_RIP, label!(vmm_exit)),
        ] {
            self.set(host, value);
            self.set(guest, value);
        }
        self.set(Field::GUEST_RIP, rip);
        self.set(Field::GUEST_RSP, stack);
        self.set(Field::GUEST_RFLAGS, 2);
        self.set(Field::GUEST_DR7, 0x400);
        self.set(Field::GUEST_GDTR_LIMIT, 79);
        self.set(Field::GUEST_IDTR_LIMIT, 4095);
        self.set(Field::GUEST_CS_RIGHTS, 0xA09B);
        self.set(Field::GUEST_TR_RIGHTS, 0x8B);
        self.set(Field::GUEST_TR_LIMIT, 0x67);
        self.set(Field::GUEST_LDTR_RIGHTS, 1 << 16);
        for n in 0..6 {
            self.set(Field(Field::GUEST_ES_LIMIT.0 + 2 * n), 0xFFFF_FFFF);
            if n != 1 {
                // FS and GS have null selectors: they are unusable.
                let rights = if n < 4 { 0xC093 } else { 1 << 16 };
                self.set(Field(Field::GUEST_ES_RIGHTS.0 + 2 * n), rights);
            }
        }
    }

    /// Sets a field that there is.
    #[track_caller]
    pub fn set(&mut self, field: Field, value: u64) {
        assert_eq!(vmwrite(field.0.into(), value), Ok(()), "VMWRITE {:X}H", field.0);
    }

    /// Reads a field that there is.
    #[track_caller]
    pub fn get(&self, field: Field) -> u64 {
        match vmread(field.0.into()) {
            Ok(value) => value,
            Err(fail) => panic!("VMREAD {:X}H: {fail:?}", field.0),
        }
    }

    /// These controls and those that have to be 1. SDM Vol. 3D Appendix A.2 "Reserved Controls and Default Settings".
    fn controls(&mut self, field: Field, msr: u32, exact: u32, wanted: u32) {
        let msr = if read(0x480) >> 55 & 1 != 0 { exact } else { msr };
        self.set(field, read(msr) & 0xFFFF_FFFF | u64::from(wanted));
    }

    /// Sets the pin-based controls.
    pub fn pin(&mut self, controls: Pin) {
        self.controls(Field::PIN_CONTROLS, 0x481, 0x48D, controls.0);
    }

    /// Sets the primary controls.
    pub fn primary(&mut self, controls: Primary) {
        self.controls(Field::PRIMARY_CONTROLS, 0x482, 0x48E, controls.0);
    }

    /// Sets the secondary controls, and activates them.
    pub fn secondary(&mut self, controls: Secondary) {
        let primary = self.get(Field::PRIMARY_CONTROLS);
        self.set(Field::PRIMARY_CONTROLS, primary | u64::from(Primary::SECONDARY.0));
        self.set(Field::SECONDARY_CONTROLS, controls.0.into());
    }

    /// Sets the VM-exit controls, to a 64-bit host.
    pub fn exits(&mut self, controls: Exit) {
        self.controls(Field::EXIT_CONTROLS, 0x483, 0x48F, controls.0 | Exit::HOST_64BIT.0);
    }

    /// Sets the VM-entry controls, to a 64-bit guest.
    pub fn entries(&mut self, controls: Entry) {
        self.controls(Field::ENTRY_CONTROLS, 0x484, 0x490, controls.0 | Entry::GUEST_64BIT.0);
    }

    /// Extended page tables that map 4 GiB one to one in pages of 2 MiB, and the first of `apart` in pages of 4 KiB with this entry
    /// for the page.
    pub fn ept(&mut self, apart: Option<(u64, u64)>) {
        let (top, second, directories) = (paging::pages(1), paging::pages(1), paging::pages(4));
        paging::poke(top, second | 7);
        for n in 0..4 {
            paging::poke(second + 8 * n, (directories + 4096 * n) | 7);
        }
        for n in 0..2048 {
            paging::poke(directories + 8 * n, n << 21 | 6 << 3 | 1 << 7 | 7);
        }
        if let Some((page, entry)) = apart {
            let table = paging::pages(1);
            for n in 0..512 {
                let gpa = page & !0x1F_FFFF | n << 12;
                let entry = if gpa == page { entry } else { gpa | 6 << 3 | 7 };
                paging::poke(table + 8 * n, entry);
            }
            paging::poke(directories + 8 * (page >> 21), table | 7);
        }
        self.secondary(Secondary::EPT);
        self.set(Field::EPT_POINTER, top | 3 << 3 | 6);
    }

    /// Where the EPT entry for the page of [`Vmm::ept`] is that it has apart.
    pub fn ept_entry(&self, page: u64) -> u64 {
        let below = |entry: u64| paging::peek(entry) & 0xF_FFFF_FFFF_F000;
        let second = below(self.get(Field::EPT_POINTER) & !0xFFF);
        let directory = below(second + 8 * (page >> 30));
        below(directory + 8 * (page >> 21 & 511)) + 8 * (page >> 12 & 511)
    }

    /// Enters the guest, to a VM exit.
    ///
    /// # Errors
    /// The instruction failed.
    pub fn try_enter(&mut self) -> Result<Exited, Fail> {
        let flags = call!(vmm_enter(!self.launched, &raw mut self.registers));
        outcome(flags)?;
        let reason = self.get(Field::EXIT_REASON);
        // A VM entry that fails late launches nothing.
        self.launched |= reason >> 31 == 0;
        Ok(Exited {
            reason,
            qualification: self.get(Field::EXIT_QUALIFICATION),
            length: self.get(Field::EXIT_INSTRUCTION_LENGTH),
            rip: self.get(Field::GUEST_RIP),
        })
    }

    /// The same where the entry has to succeed.
    #[track_caller]
    pub fn enter(&mut self) -> Exited {
        match self.try_enter() {
            Ok(exited) => exited,
            Err(fail) => panic!("VM entry: {fail:?}"),
        }
    }
}

impl Drop for Vmm {
    fn drop(&mut self) {
        vmxoff();
    }
}
