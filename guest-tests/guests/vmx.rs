//! VMX: instructions, checks of VM entry, VM exits, and the debug and trace features across both. SDM Vol. 3C chapters 24 to 31.

use alloc::vec::Vec;
use core::sync::atomic::{AtomicU64, Ordering::SeqCst};

use pt_packet::Packet;
use rt::cpu::{self, dr, read, set_dr, write};
use rt::debug::BS;
use rt::need::{self, LbrStack};
use rt::{Cpus, apic, exception, label, paging};
use x86::cpuid::Feature;
use x86::debugctl::DebugCtl;
use x86::msr::*;
use x86::pt::TopaEntry;
use x86::vmx::controls::{Entry, Exit, Pin, Primary, Secondary};
use x86::vmx::exits::activity;
use x86::vmx::fields::Field;

use crate::trace::{self, ON, Output, Step};
use crate::vmm::{self, Exited, Fail, Vmm, vmcall, vmclear, vmptrld, vmread, vmwrite, vmxon};

core::arch::global_asm!(
    r#"
    .text
    .globl vx_call, vx_cpuid, vx_hlt, vx_rdtsc, vx_invlpg, vx_cr3, vx_rdmsr, vx_out, vx_read, vx_loop, vx_branches, vx_b1, vx_b1_to
    .globl vx_b2, vx_b2_to, vx_end, vx_step, vx_step_2, vx_ud, vx_dr7, vx_dr7_end
vx_call:
    vmcall
vx_cpuid:
    cpuid
vx_hlt:
    hlt
vx_rdtsc:
    rdtsc
vx_invlpg:
    invlpg  [rdi + 0x40]
vx_cr3:
    mov     cr3, rbx
vx_rdmsr:
    rdmsr
vx_out:
    out     0x80, al
vx_read:
    mov     rax, [rdi]
    vmcall
vx_ud:
    ud2
vx_loop:
    rdtsc
    shl     rdx, 32
    or      rax, rdx
    mov     rbx, rax
2:  rdtsc
    shl     rdx, 32
    or      rax, rdx
    jmp     2b

    # two taken branches, then VMCALL
vx_branches:
    nop
vx_b1:
    jmp     vx_b1_to
    nop
vx_b1_to:
    xor     eax, eax
vx_b2:
    jz      vx_b2_to
    nop
vx_b2_to:
    nop
vx_end:
    vmcall

vx_step:
    nop
vx_step_2:
    jmp     vx_end

    # what the guest has of DR7, IA32_DEBUGCTL
vx_dr7:
    mov     rbx, dr7
    mov     ecx, 0x1d9
    rdmsr
    mov     esi, eax
    mov     eax, 0x155
    mov     dr7, rax
vx_dr7_end:
    vmcall
"#
);

/// A guest at a label that leaves at its first instruction.
fn leaves(rip: u64, reason: u64, qualification: u64, length: u64) -> Exited {
    Exited {
        reason,
        qualification,
        length,
        rip,
    }
}

/// 31.3, 31.4: what instructions of root operation fail with.
fn instructions_fail_by_number() {
    let vmm = Vmm::new(label!(vx_call));
    let other = vmm::region();
    paging::poke(other, 0x7FFF_FFFF);
    for (why, found, error) in [
        ("VMXON in root operation", vmxon(vmm.vmxon), 15),
        ("VMCALL in root operation", vmcall(), 1),
        ("VMCLEAR of a misaligned address", vmclear(vmm.vmcs + 1), 2),
        ("VMCLEAR of the VMXON pointer", vmclear(vmm.vmxon), 3),
        ("VMPTRLD beyond physical addresses", vmptrld(1 << 62), 9),
        ("VMPTRLD of the VMXON pointer", vmptrld(vmm.vmxon), 10),
        ("VMPTRLD of another revision", vmptrld(other), 11),
        ("VMREAD of no field", vmread(0x6FFE).map(|_| ()), 12),
        ("VMREAD of an encoding beyond 32 bits", vmread(1 << 40).map(|_| ()), 12),
        ("VMWRITE of no field", vmwrite(0x6FFE, 0), 12),
    ] {
        assert_eq!(found, Err(Fail::Error(error)), "{why}");
    }
    let writes = vmwrite(Field::EXIT_REASON.0.into(), 0);
    let expected = if read(0x485) >> 29 & 1 != 0 {
        Ok(())
    } else {
        Err(Fail::Error(13))
    };
    assert_eq!(writes, expected, "VMWRITE of VM-exit information, by IA32_VMX_MISC[29]");
    assert_eq!(vmclear(vmm.vmcs), Ok(()));
    assert_eq!(vmread(Field::GUEST_RIP.0.into()), Err(Fail::Invalid), "no current VMCS");
}

/// 27.2: checks that fail as instructions, a row a rule.
fn checks_of_controls_and_host_state() {
    const NOT_CANONICAL: u64 = 1 << 62;
    for (rule, field, value, error) in [
        ("27.2.1.1 pin-based controls", Field::PIN_CONTROLS, 0, 7),
        ("27.2.1.1 primary controls", Field::PRIMARY_CONTROLS, 0, 7),
        ("27.2.1.1 CR3-target count", Field::CR3_TARGET_COUNT, 5, 7),
        ("27.2.1.2 VM-exit controls", Field::EXIT_CONTROLS, 0, 7),
        ("27.2.1.2 MSR-store address", Field::EXIT_MSR_STORE_COUNT, 1, 7),
        ("27.2.1.3 VM-entry controls", Field::ENTRY_CONTROLS, 0, 7),
        ("27.2.1.3 reserved type", Field::ENTRY_INTERRUPTION, 0x8000_0100, 7),
        (
            "27.2.1.3 NMI of another vector",
            Field::ENTRY_INTERRUPTION,
            0x8000_0203,
            7,
        ),
        ("27.2.1.3 exception above 31", Field::ENTRY_INTERRUPTION, 0x8000_0320, 7),
        (
            "27.2.1.3 #GP without its code",
            Field::ENTRY_INTERRUPTION,
            0x8000_030D,
            7,
        ),
        ("27.2.1.3 #UD with a code", Field::ENTRY_INTERRUPTION, 0x8000_0B06, 7),
        ("27.2.1.3 reserved bits", Field::ENTRY_INTERRUPTION, 0x8000_1020, 7),
        ("27.2.2 CR0: fixed bits", Field::HOST_CR0, 0x11, 8),
        ("27.2.2 CR4: fixed bits", Field::HOST_CR4, 0x620, 8),
        ("27.2.2 CR3: width", Field::HOST_CR3, 1 << 62, 8),
        (
            "27.2.2 SYSENTER_ESP: canonical",
            Field::HOST_SYSENTER_ESP,
            NOT_CANONICAL,
            8,
        ),
        ("27.2.3 selectors: RPL", Field::HOST_DS, 0x13, 8),
        ("27.2.3 CS: not null", Field::HOST_CS, 0, 8),
        ("27.2.3 TR: not null", Field::HOST_TR, 0, 8),
        ("27.2.3 bases: canonical", Field::HOST_GDTR_BASE, NOT_CANONICAL, 8),
        ("27.2.4 RIP: canonical", Field::HOST_RIP, NOT_CANONICAL, 8),
    ] {
        let mut vmm = Vmm::new(label!(vx_call));
        if field == Field::EXIT_MSR_STORE_COUNT {
            vmm.set(Field::EXIT_MSR_STORE, 8);
        }
        vmm.set(field, value);
        assert_eq!(vmm.try_enter(), Err(Fail::Error(error)), "{rule}");
    }
}

/// 27.3.1, 27.8: checks that fail the entry, with exit reason 33 and their qualification.
fn checks_of_guest_state() {
    const NOT_CANONICAL: u64 = 1 << 62;
    for (rule, field, value, qualification) in [
        ("27.3.1.1 CR0: fixed bits", Field::GUEST_CR0, 0x11, 0),
        ("27.3.1.1 CR4: fixed bits", Field::GUEST_CR4, 0x620, 0),
        ("27.3.1.1 CR4.PAE of a 64-bit guest", Field::GUEST_CR4, 0x2600, 0),
        ("27.3.1.1 CR3: width", Field::GUEST_CR3, 1 << 62, 0),
        (
            "27.3.1.1 IA32_DEBUGCTL: reserved bits",
            Field::GUEST_DEBUGCTL,
            1 << 63,
            0,
        ),
        ("27.3.1.1 DR7: upper half", Field::GUEST_DR7, 1 << 32, 0),
        (
            "27.3.1.1 SYSENTER_EIP: canonical",
            Field::GUEST_SYSENTER_EIP,
            NOT_CANONICAL,
            0,
        ),
        ("27.3.1.2 TR: TI", Field::GUEST_TR, 0x44, 0),
        ("27.3.1.2 CS: code", Field::GUEST_CS_RIGHTS, 0xA093, 0),
        ("27.3.1.2 CS: D and L", Field::GUEST_CS_RIGHTS, 0xE09B, 0),
        ("27.3.1.2 SS: present", Field::GUEST_SS_RIGHTS, 0xC013, 0),
        ("27.3.1.2 TR: busy TSS", Field::GUEST_TR_RIGHTS, 0x89, 0),
        ("27.3.1.2 TR: limit and granularity", Field::GUEST_TR_RIGHTS, 0x808B, 0),
        ("27.3.1.3 GDTR: canonical", Field::GUEST_GDTR_BASE, NOT_CANONICAL, 0),
        ("27.3.1.3 IDTR: limit", Field::GUEST_IDTR_LIMIT, 0x1_0000, 0),
        ("27.3.1.4 RIP: canonical", Field::GUEST_RIP, NOT_CANONICAL, 0),
        ("27.3.1.4 RFLAGS: bit 1", Field::GUEST_RFLAGS, 0, 0),
        (
            "27.3.1.4 RFLAGS: VM in a 64-bit guest",
            Field::GUEST_RFLAGS,
            1 << 17 | 2,
            0,
        ),
        ("27.3.1.5 activity state", Field::GUEST_ACTIVITY, 4, 0),
        (
            "27.3.1.5 interruptibility: reserved bits",
            Field::GUEST_INTERRUPTIBILITY,
            1 << 5,
            0,
        ),
        (
            "27.3.1.5 interruptibility: STI and MOV SS",
            Field::GUEST_INTERRUPTIBILITY,
            3,
            0,
        ),
        (
            "27.3.1.5 interruptibility: STI without IF",
            Field::GUEST_INTERRUPTIBILITY,
            1,
            0,
        ),
        (
            "27.3.1.5 pending debug exceptions",
            Field::GUEST_PENDING_DEBUG,
            1 << 4,
            0,
        ),
        ("27.3.1.5 link pointer", Field::LINK_POINTER, 1, 4),
    ] {
        let mut vmm = Vmm::new(label!(vx_call));
        vmm.entries(Entry::LOAD_DEBUG);
        vmm.set(field, value);
        let exited = vmm.try_enter();
        let found = exited.map(|exited| (exited.reason, exited.qualification));
        assert_eq!(found, Ok((0x8000_0021, qualification)), "{rule}");
        // The VMCS is still clear: what is mended is launched.
        assert_eq!(vmread(Field::EXIT_REASON.0.into()), Ok(0x8000_0021), "{rule}");
    }
}

/// VMLAUNCH of a launched VMCS, VMRESUME of a clear one: errors 4 and 5.
fn launch_state() {
    let mut vmm = Vmm::new(label!(vx_call));
    assert_eq!(vmm.enter(), leaves(label!(vx_call), 18, 0, 3));
    assert_eq!(vmm.enter(), leaves(label!(vx_call), 18, 0, 3), "VMRESUME");
    assert_eq!(vmclear(vmm.vmcs), Ok(()));
    assert_eq!(vmptrld(vmm.vmcs), Ok(()));
    assert_eq!(vmm.try_enter(), Err(Fail::Error(5)), "VMRESUME of a clear VMCS");
}

/// 28.2: reason, qualification, length and RIP.
fn exits_by_instructions() {
    for (controls, label, reason, qualification, length) in [
        (Primary::NONE, label!(vx_call), 18, 0, 3),
        (Primary::NONE, label!(vx_cpuid), 10, 0, 2),
        (Primary::HLT, label!(vx_hlt), 12, 0, 1),
        (Primary::RDTSC, label!(vx_rdtsc), 16, 0, 2),
        (Primary::INVLPG, label!(vx_invlpg), 14, 0x1040, 4),
        (Primary::CR3_LOAD, label!(vx_cr3), 28, 0x303, 3),
        (Primary::NONE, label!(vx_rdmsr), 31, 0, 2),
        (Primary::UNCONDITIONAL_IO, label!(vx_out), 30, 0x80_0040, 2),
    ] {
        let mut vmm = Vmm::new(label);
        vmm.primary(controls);
        vmm.registers[6] = 0x1000;
        assert_eq!(vmm.enter(), leaves(label, reason, qualification, length));
    }
}

/// 28.2.2: exceptions by the bitmap.
fn exits_by_exceptions() {
    let mut vmm = Vmm::new(label!(vx_ud));
    vmm.set(Field::EXCEPTION_BITMAP, 1 << 6);
    assert_eq!(vmm.enter(), leaves(label!(vx_ud), 0, 0, 0));
    assert_eq!(vmm.get(Field::EXIT_INTERRUPTION), 0x8000_0306);
    let mut vmm = Vmm::new(label!(vx_read));
    vmm.set(Field::EXCEPTION_BITMAP, 1 << 14);
    vmm.registers[6] = paging::FREE + 0x1234_5000;
    let exited = vmm.enter();
    assert_eq!((exited.reason, exited.qualification), (0, vmm.registers[6]));
    assert_eq!(vmm.get(Field::EXIT_INTERRUPTION), 0x8000_0B0E);
    assert_eq!(vmm.get(Field::EXIT_ERROR_CODE), 0);
}

/// 27.6: an injected event is delivered through the guest's IDT before its first instruction.
fn events_are_injected() {
    static mut SEEN: u64 = 0;
    exception::on(0x30, |frame| {
        // SAFETY: one CPU runs tests.
        unsafe { SEEN = frame.rip };
    });
    let mut vmm = Vmm::new(label!(vx_call));
    vmm.set(Field::ENTRY_INTERRUPTION, 0x8000_0030);
    vmm.set(Field::GUEST_RFLAGS, 0x202);
    assert_eq!(vmm.enter(), leaves(label!(vx_call), 18, 0, 3));
    // SAFETY: as above.
    assert_eq!(unsafe { SEEN }, label!(vx_call));
    assert_eq!(vmm.get(Field::ENTRY_INTERRUPTION) >> 31, 0, "the valid bit is cleared");
}

/// 29.3.3.2: what an EPT violation says, and that the guest reads what EPT maps.
fn ept_violations() {
    let (page, other) = (paging::pages(1), paging::pages(1));
    paging::poke(other + 8, 0x1234);
    for (entry, reason, qualification) in [(other | 6 << 3 | 1, 18, 0), (0, 48, 0x181), (page | 2 << 3 | 7, 49, 0)] {
        let mut vmm = Vmm::new(label!(vx_read));
        vmm.ept(Some((page, entry)));
        vmm.registers[6] = page + 8;
        let exited = vmm.enter();
        assert_eq!((exited.reason, exited.qualification), (reason, qualification));
        match reason {
            18 => assert_eq!(vmm.registers[0], 0x1234),
            _ => assert_eq!(vmm.get(Field::GUEST_PHYSICAL_ADDRESS), page + 8),
        }
    }
}

/// 26.5.1: the timer counts down at the rate that IA32_VMX_MISC\[4:0\] says, and its rest is saved.
fn preemption_timer() {
    let rate = read(0x485) & 31;
    let mut vmm = Vmm::new(label!(vx_loop));
    vmm.pin(Pin::PREEMPTION_TIMER);
    vmm.exits(Exit::SAVE_PREEMPTION_TIMER);
    vmm.set(Field::PREEMPTION_TIMER, 1000);
    assert_eq!(vmm.enter().reason, 52);
    assert_eq!(vmm.get(Field::PREEMPTION_TIMER), 0);
    let taken = vmm.registers[0] - vmm.registers[3];
    assert!(
        (999 << rate..1001 << rate).contains(&(taken + (1 << rate) / 2)),
        "{taken} cycles"
    );
    let mut vmm = Vmm::new(label!(vx_call));
    vmm.pin(Pin::PREEMPTION_TIMER);
    vmm.exits(Exit::SAVE_PREEMPTION_TIMER);
    vmm.set(Field::PREEMPTION_TIMER, 1_000_000);
    assert_eq!(vmm.enter().reason, 18);
    let left = vmm.get(Field::PREEMPTION_TIMER);
    assert!((999_000..=1_000_000).contains(&left), "{left}");
}

/// The same: the timer "also operates in the shutdown and wait-for-SIPI states. If the timer counts down to zero in any state other than the
/// wait-for SIPI state, the logical processor transitions to the C0 C-state and causes a VM exit". 28.3.4: the activity state is saved.
fn preemption_timer_wakes() {
    let misc = read(0x485);
    let rate = misc & 31;
    for (enters, supported, at, rip, left) in [
        (activity::ACTIVE, true, label!(vx_hlt), label!(vx_rdtsc), activity::HLT),
        (
            activity::HLT,
            misc >> 6 & 1 != 0,
            label!(vx_call),
            label!(vx_call),
            activity::HLT,
        ),
        (
            activity::SHUTDOWN,
            misc >> 7 & 1 != 0,
            label!(vx_call),
            label!(vx_call),
            activity::SHUTDOWN,
        ),
    ] {
        if !supported {
            continue;
        }
        let mut vmm = Vmm::new(at);
        vmm.pin(Pin::PREEMPTION_TIMER);
        vmm.exits(Exit::SAVE_PREEMPTION_TIMER);
        vmm.set(Field::PREEMPTION_TIMER, 1000);
        vmm.set(Field::GUEST_ACTIVITY, enters.into());
        let before = cpu::tsc();
        let exited = vmm.enter();
        let taken = cpu::tsc() - before;
        assert_eq!((exited.reason, exited.rip), (52, rip), "{enters}");
        assert_eq!(vmm.get(Field::GUEST_ACTIVITY), left.into(), "{enters}");
        assert_eq!(vmm.get(Field::PREEMPTION_TIMER), 0);
        assert!(taken >= 999 << rate, "{taken} cycles");
    }
}

/// 26.5.2: a VM exit after each instruction.
fn monitor_trap_flag() {
    let mut vmm = Vmm::new(label!(vx_branches));
    vmm.primary(Primary::MONITOR_TRAP);
    let mut rips = Vec::new();
    loop {
        let exited = vmm.enter();
        if exited.reason != 37 {
            assert_eq!(exited.reason, 18);
            break;
        }
        rips.push(exited.rip);
    }
    let b1 = label!(vx_b1);
    let expected = [b1, label!(vx_b1_to), label!(vx_b2), label!(vx_b2_to), label!(vx_end)];
    assert_eq!(rips, expected);
}

/// 27.3.2.1, 28.3.1, 28.5.1: DR7 and IA32_DEBUGCTL are loaded at the entry, saved at the exit, and then 400H and 0; DR0 to DR3 and
/// DR6 stay.
fn debug_registers() {
    let mut vmm = Vmm::new(label!(vx_dr7));
    vmm.primary(Primary::MSR_BITMAPS);
    let bitmaps = paging::pages(1);
    vmm.set(Field::MSR_BITMAP, bitmaps);
    vmm.entries(Entry::LOAD_DEBUG);
    vmm.exits(Exit::SAVE_DEBUG);
    vmm.set(Field::GUEST_DR7, 0x0000_0501);
    vmm.set(Field::GUEST_DEBUGCTL, DebugCtl::new().with_btf(true).into_bits());
    assert_eq!(set_dr(0, 0x1234_5678), Ok(()));
    let dr6 = dr(6).expect("DR6");
    write(IA32_DEBUGCTL, DebugCtl::new().with_tr(true).into_bits());
    assert_eq!(vmm.enter().reason, 18);
    assert_eq!(
        (vmm.registers[3], vmm.registers[5]),
        (0x501, 1 << 1),
        "as the guest read them"
    );
    assert_eq!(
        (vmm.get(Field::GUEST_DR7), vmm.get(Field::GUEST_DEBUGCTL)),
        (0x555, 1 << 1)
    );
    assert_eq!((dr(7), read(IA32_DEBUGCTL)), (Ok(0x400), 0), "the host's");
    assert_eq!((dr(0), dr(6)), (Ok(0x1234_5678), Ok(dr6)));
}

/// A #DB that exits tells its condition by the qualification, and DR6 stays as it was. With BTF the step is that of a branch.
fn single_steps() {
    for (btf, stands) in [(false, label!(vx_step_2)), (true, label!(vx_end))] {
        let mut vmm = Vmm::new(label!(vx_step));
        vmm.entries(Entry::LOAD_DEBUG);
        vmm.set(Field::EXCEPTION_BITMAP, 1 << 1);
        vmm.set(Field::GUEST_RFLAGS, 0x102);
        vmm.set(Field::GUEST_DEBUGCTL, DebugCtl::new().with_btf(btf).into_bits());
        let dr6 = dr(6);
        assert_eq!(vmm.enter(), leaves(stands, 0, BS, 0), "BTF {btf}");
        assert_eq!(vmm.get(Field::EXIT_INTERRUPTION), 0x8000_0301);
        assert_eq!(dr(6), dr6);
    }
}

/// 27.7.3: pending debug exceptions of the VMCS are delivered after the entry.
fn pending_debug_exceptions() {
    let mut vmm = Vmm::new(label!(vx_step));
    vmm.set(Field::EXCEPTION_BITMAP, 1 << 1);
    vmm.set(Field::GUEST_RFLAGS, 0x102);
    vmm.set(Field::GUEST_PENDING_DEBUG, BS);
    assert_eq!(vmm.enter(), leaves(label!(vx_step), 0, BS, 0));
}

/// The guest's branches are recorded while its IA32_DEBUGCTL says so; the exit clears it, and the records stay.
fn last_branches() {
    let stack = LbrStack::here().expect("the table says LBR");
    let mut vmm = Vmm::new(label!(vx_branches));
    vmm.entries(Entry::LOAD_DEBUG);
    vmm.set(Field::GUEST_DEBUGCTL, DebugCtl::new().with_lbr(true).into_bits());
    assert_eq!(vmm.enter().reason, 18);
    assert_eq!(read(IA32_DEBUGCTL), 0);
    let top = read(MSR_LASTBRANCH_TOS) as u32;
    let address = |value: u64| value << 16 >> 16;
    let at = |n: u32| {
        let entry = (top + stack.depth - n) % stack.depth;
        (address(read(stack.from + entry)), address(read(stack.to + entry)))
    };
    assert_eq!(
        [at(1), at(0)],
        [(label!(vx_b1), label!(vx_b1_to)), (label!(vx_b2), label!(vx_b2_to)),]
    );
}

/// The branch trace store writes to the guest's linear addresses, up to the exit.
fn branch_trace_store() {
    let area = paging::pages(2);
    let buffer = area + 4096;
    for (n, value) in [buffer, buffer, buffer + 24 * 100, buffer + 24 * 200]
        .into_iter()
        .enumerate()
    {
        paging::poke(area + 8 * n as u64, value);
    }
    write(IA32_DS_AREA, area);
    let mut vmm = Vmm::new(label!(vx_branches));
    vmm.entries(Entry::LOAD_DEBUG);
    let on = DebugCtl::new().with_tr(true).with_bts(true);
    vmm.set(Field::GUEST_DEBUGCTL, on.into_bits());
    assert_eq!(vmm.enter().reason, 18);
    let written = (paging::peek(area + 8) - buffer) / 24;
    let records: Vec<(u64, u64)> = (0..written)
        .map(|n| (paging::peek(buffer + 24 * n), paging::peek(buffer + 24 * n + 8)))
        .filter(|&(from, _)| (label!(vx_branches)..=label!(vx_end)).contains(&from))
        .collect();
    assert_eq!(
        records,
        [(label!(vx_b1), label!(vx_b1_to)), (label!(vx_b2), label!(vx_b2_to)),]
    );
}

/// 27.3.2.1, 28.5.1: IA32_PERF_GLOBAL_CTRL is switched at the entry and at the exit, so that the guest alone is counted.
fn counters_of_the_guest_alone() {
    let mut vmm = Vmm::new(label!(vx_branches));
    vmm.entries(Entry::LOAD_PERF_GLOBAL_CTRL);
    vmm.exits(Exit::LOAD_PERF_GLOBAL_CTRL);
    vmm.set(Field::GUEST_PERF_GLOBAL_CTRL, 1);
    vmm.set(Field::HOST_PERF_GLOBAL_CTRL, 0);
    write(IA32_PERF_GLOBAL_CTRL, 0u64);
    // Instructions retired, in both rings.
    write(IA32_PERFEVTSEL0, 0x43_00C0u64);
    write(IA32_PMC0, 0u64);
    assert_eq!(vmm.enter().reason, 18);
    assert_eq!(read(IA32_PERF_GLOBAL_CTRL), 0);
    // NOP, JMP, XOR, JZ, NOP; VMCALL has not retired.
    assert_eq!(read(IA32_PMC0), 5);
}

/// Intel PT in VMX operation: IA32_VMX_MISC\[14\].
const TRACE: need::Need = need::Need {
    reason: "no Intel PT in VMX operation (IA32_VMX_MISC[14] is 0)",
    present: || cpu::has(Feature::Vmx) && cpu::has(Feature::IntelPt) && read(0x485) >> 14 & 1 != 0,
    absent: || {
        if !cpu::has(Feature::Vmx) || !cpu::has(Feature::IntelPt) {
            return;
        }
        // 33.2.8.2: VMXON ends the trace, and it cannot be begun.
        let _out = Output::new(1, 4, TopaEntry::new());
        write(IA32_RTIT_CTL, ON.into_bits());
        let vmm = Vmm::new(label!(vx_call));
        assert_eq!(read(IA32_RTIT_CTL) & 1, 0, "TraceEn after VMXON");
        cpu::refuses(IA32_RTIT_CTL, ON.into_bits());
        drop(vmm);
        write(IA32_RTIT_CTL, 0u64);
    },
};

/// What a trace has of VM entries and VM exits.
fn transitions(packets: &[Packet]) -> Vec<Packet> {
    let end = packets.iter().rposition(|packet| *packet == Packet::PsbEnd);
    let rest = packets.split_at(end.map_or(0, |at| at + 1)).1;
    rest.iter()
        .filter(|packet| {
            matches!(
                packet,
                Packet::Pip { .. } | Packet::Vmcs(_) | Packet::Tip(_) | Packet::Fup(_)
            )
        })
        .copied()
        .collect()
}

/// 33.5.2: PIP with NR at the entry, a FUP of the guest's at the exit, VMCS at VMPTRLD; with the controls that conceal it, nothing of
/// that but where control goes.
fn traces_of_both() {
    let told = |concealed: bool| {
        let out = Output::new(1, 4, TopaEntry::new());
        let mut vmm = Vmm::new(label!(vx_branches));
        if concealed {
            vmm.secondary(Secondary::CONCEAL_FROM_PT);
            vmm.exits(Exit::CONCEAL_FROM_PT);
            vmm.entries(Entry::CONCEAL_FROM_PT);
        }
        write(IA32_RTIT_CTL, ON.into_bits());
        assert_eq!(vmptrld(vmm.vmcs), Ok(()));
        let exited = vmm.enter();
        write(IA32_RTIT_CTL, 0u64);
        assert_eq!(exited.reason, 18);
        (vmm.vmcs, transitions(&out.packets()))
    };
    let (entry, end, exit) = (label!(vx_branches), label!(vx_end), label!(vmm_exit));
    let pip = |non_root| Packet::Pip {
        cr3: cpu::cr3() & !0x1F,
        non_root,
    };
    let has = |packets: &[Packet], wanted: &[Packet]| packets.windows(wanted.len()).any(|some| some == wanted);
    let (vmcs, packets) = told(false);
    assert!(packets.contains(&Packet::Vmcs(vmcs)), "{packets:X?}");
    let entered = [pip(true), Packet::Tip(Some(entry))];
    let left = [Packet::Fup(Some(end)), pip(false), Packet::Tip(Some(exit))];
    assert!(has(&packets, &entered) && has(&packets, &left), "{packets:X?}");
    let (_, packets) = told(true);
    let left = [Packet::Fup(Some(end)), Packet::Tip(Some(exit))];
    assert!(has(&packets, &left), "{packets:X?}");
    assert!(!packets.contains(&pip(true)), "{packets:X?}");
}

/// Intel PT with guest-physical addresses: IA32_VMX_PROCBASED_CTLS2\[56\], with the controls that switch IA32_RTIT_CTL.
const GUEST_TRACE: need::Need = need::Need {
    reason: "no Intel PT with guest-physical addresses (IA32_VMX_PROCBASED_CTLS2[56] is 0)",
    present: || vmm::has(Secondary::PT_GUEST_PHYSICAL),
    absent: || {
        if vmm::has(Secondary::EPT) {
            let mut vmm = Vmm::new(label!(vx_call));
            vmm.ept(None);
            vmm.secondary(Secondary::EPT | Secondary::PT_GUEST_PHYSICAL);
            assert_eq!(vmm.try_enter(), Err(Fail::Error(7)));
        }
    },
};

/// 27.3.2.1, 28.3.1, 28.5.1: IA32_RTIT_CTL comes from the guest-state area, goes there, and is cleared; 26.5.4: the output goes where EPT has
/// it. A page that is not there yet is an EPT violation which no instruction caused (Table 28-7, bit 16), and nothing of the trace is lost.
fn trace_of_the_guest_alone() {
    for mapped in [true, false] {
        let out = Output::new(1, 0, TopaEntry::new());
        let (page, other) = (out.regions[0], paging::pages(1));
        let mut vmm = Vmm::new(label!(vx_branches));
        let entry = other | 6 << 3 | 7;
        vmm.ept(Some((page, if mapped { entry } else { 0 })));
        vmm.secondary(Secondary::EPT | Secondary::PT_GUEST_PHYSICAL);
        assert_eq!(vmm.try_enter(), Err(Fail::Error(7)), "without the other controls");
        vmm.exits(Exit::CLEAR_RTIT_CTL);
        vmm.entries(Entry::LOAD_RTIT_CTL);
        vmm.set(Field::GUEST_RTIT_CTL, ON.into_bits());
        write(IA32_RTIT_CTL, ON.into_bits());
        assert_eq!(vmm.try_enter(), Err(Fail::Error(7)), "while the host is traced");
        write(IA32_RTIT_CTL, 0u64);
        out.rewind();
        for n in 0..512 {
            paging::poke(page + 8 * n, 0);
        }
        if !mapped {
            let exited = vmm.enter();
            assert_eq!((exited.reason, exited.qualification), (48, 1 << 16 | 2));
            assert_eq!(vmm.get(Field::GUEST_PHYSICAL_ADDRESS) & !0xFFF, page);
            assert_eq!(read(IA32_RTIT_CTL), 0);
            paging::poke(vmm.ept_entry(page), entry);
        }
        assert_eq!(vmm.enter(), leaves(label!(vx_end), 18, 0, 3));
        assert_eq!(read(IA32_RTIT_CTL), 0);
        assert_eq!(vmm.get(Field::GUEST_RTIT_CTL), ON.into_bits());
        let bytes: Vec<u8> = (0..64)
            .flat_map(|n| paging::peek(other + 8 * n).to_le_bytes())
            .collect();
        let steps = trace::flow(&trace::packets(&bytes));
        assert!(
            (0..64).all(|n| paging::peek(page + 8 * n) == 0),
            "the page of that number"
        );
        // JZ is taken; the direct jump has no packet. What the unit had for the page that was not there comes first.
        let wanted = if mapped { 1 } else { 2 };
        let count = |step: Step| steps.iter().filter(|&&other| other == step).count();
        assert_eq!(count(Step::On(label!(vx_branches))), wanted, "{steps:X?}");
        assert_eq!((count(Step::Taken), count(Step::NotTaken)), (1, 0), "{steps:X?}");
        assert!(matches!(steps[..], [Step::On(_), .., Step::Off(_)]), "{steps:X?}");
    }
}

/// The controls that switch IA32_LBR_CTL: IA32_VMX_ENTRY_CTLS\[53\], IA32_VMX_EXIT_CTLS\[58\].
const LBR_SWITCH: need::Need = need::Need {
    reason: "no switching of IA32_LBR_CTL (IA32_VMX_ENTRY_CTLS[53] is 0)",
    present: || cpu::has(Feature::Vmx) && read(0x484) >> 53 & 1 != 0,
    absent: || {},
};

/// The same sections, of IA32_LBR_CTL: the guest's branches alone are recorded.
fn architectural_last_branches_of_the_guest_alone() {
    const CONTROL: u64 = 0x7F_0007;
    let mut vmm = Vmm::new(label!(vx_branches));
    vmm.entries(Entry::LOAD_LBR_CTL);
    vmm.exits(Exit::CLEAR_LBR_CTL);
    vmm.set(Field::GUEST_LBR_CTL, CONTROL);
    write(IA32_LBR_CTL, 0u64);
    assert_eq!(vmm.enter().reason, 18);
    assert_eq!((read(IA32_LBR_CTL), vmm.get(Field::GUEST_LBR_CTL)), (0, CONTROL));
    let at = |n: u32| (read(IA32_LBR_0_FROM_IP + n), read(IA32_LBR_0_TO_IP + n));
    assert_eq!(
        [at(1), at(0)],
        [(label!(vx_b1), label!(vx_b1_to)), (label!(vx_b2), label!(vx_b2_to))]
    );
}

/// User wait and pause in the guest.
const USER_WAIT: need::Need = need::Need {
    reason: "no user wait in guests (IA32_VMX_PROCBASED_CTLS2[58] is 0)",
    present: || vmm::has(Secondary::USER_WAIT),
    absent: || {},
};

/// 26.3, 26.1.3: without the control TPAUSE and UMONITOR are undefined; with RDTSC exiting TPAUSE exits; else it waits, by the guest's
/// time-stamp counter.
fn user_wait() {
    for label in [label!(vx_tpause), label!(vx_umonitor)] {
        let mut vmm = Vmm::new(label);
        vmm.set(Field::EXCEPTION_BITMAP, 1 << 6);
        assert_eq!(vmm.enter().reason, 0);
        assert_eq!(vmm.get(Field::EXIT_INTERRUPTION) & 0xFF, 6);
    }
    let mut vmm = Vmm::new(label!(vx_tpause));
    vmm.primary(Primary::RDTSC);
    vmm.secondary(Secondary::USER_WAIT);
    assert_eq!(vmm.enter(), leaves(label!(vx_tpause), 68, 0, 4));
    assert_eq!(vmm.get(Field::EXIT_INSTRUCTION_INFORMATION) >> 3 & 15, 1, "ECX");
    // The guest's counter is far ahead; it waits for a value a little ahead of that.
    const AHEAD: u64 = 1 << 50;
    const TICKS: u64 = 20_000;
    let mut vmm = Vmm::new(label!(vx_wait));
    vmm.primary(Primary::TSC_OFFSETTING);
    vmm.secondary(Secondary::USER_WAIT);
    vmm.set(Field::TSC_OFFSET, AHEAD);
    vmm.registers[3] = TICKS;
    write(IA32_UMWAIT_CONTROL, 0u64);
    let before = cpu::tsc();
    assert_eq!(vmm.enter().reason, 18);
    let taken = cpu::tsc() - before;
    assert!((TICKS..TICKS + 10_000).contains(&taken), "{taken} ticks");
    assert!(vmm.registers[0] > AHEAD);
}

core::arch::global_asm!(
    r#"
    .text
    .globl vx_tpause, vx_umonitor, vx_wait
vx_tpause:
    .byte   0x66, 0x0f, 0xae, 0xf1      # tpause ecx
    vmcall
vx_umonitor:
    .byte   0xf3, 0x0f, 0xae, 0xf7      # umonitor rdi
    vmcall
    # waits for RBX ticks, and leaves what it waited for in RAX
vx_wait:
    rdtsc
    shl     rdx, 32
    or      rax, rdx
    add     rax, rbx
    mov     rdx, rax
    shr     rdx, 32
    xor     ecx, ecx
    .byte   0x66, 0x0f, 0xae, 0xf1
    vmcall
"#
);

/// VM functions switch EPT pointers.
const VM_FUNCTIONS: need::Need = need::Need {
    reason: "no VM functions (IA32_VMX_PROCBASED_CTLS2[45] is 0)",
    present: || vmm::has(Secondary::VM_FUNCTIONS),
    absent: || {},
};

/// 26.5.6: without the control VMFUNC is undefined, and a function that is not enabled exits.
fn vm_functions() {
    let mut vmm = Vmm::new(label!(vx_func));
    vmm.set(Field::EXCEPTION_BITMAP, 1 << 6);
    assert_eq!(vmm.enter().reason, 0);
    let mut vmm = Vmm::new(label!(vx_func));
    vmm.ept(None);
    let list = paging::pages(1);
    paging::poke(list, vmm.get(Field::EPT_POINTER));
    vmm.secondary(Secondary::EPT | Secondary::VM_FUNCTIONS);
    vmm.set(Field::VM_FUNCTIONS, 1);
    vmm.set(Field::EPTP_LIST, list);
    vmm.registers[1] = 1;
    assert_eq!(vmm.enter(), leaves(label!(vx_func), 59, 0, 3), "an entry that is 0");
    vmm.registers[1] = 0;
    assert_eq!(vmm.enter(), leaves(label!(vx_func) + 3, 18, 0, 3));
}

core::arch::global_asm!(
    r#"
    .text
    .globl vx_func
vx_func:
    vmfunc
    vmcall
"#
);

/// The local APIC's page, as a guest sees it, leads to the virtual-APIC page or to VM exits.
const APIC_ACCESSES: need::Need = need::Need {
    reason: "no virtualization of APIC accesses (IA32_VMX_PROCBASED_CTLS2[32] is 0)",
    present: || vmm::has(Secondary::APIC_ACCESSES),
    absent: || {},
};

/// Virtual interrupts.
const VIRTUAL_INTERRUPTS: need::Need = need::Need {
    reason: "no virtual-interrupt delivery (IA32_VMX_PROCBASED_CTLS2[41] is 0)",
    present: || vmm::has(Secondary::VIRTUAL_INTERRUPTS),
    absent: || {},
};

/// Posted interrupts.
const POSTED_INTERRUPTS: need::Need = need::Need {
    reason: "no posted interrupts (IA32_VMX_PINBASED_CTLS[39] is 0)",
    present: || cpu::has(Feature::Vmx) && read(0x481) >> 32 & u64::from(Pin::POSTED_INTERRUPTS.0) != 0,
    absent: || {},
};

core::arch::global_asm!(
    r#"
    .text
    .globl vx_load, vx_store, vx_stored, vx_cr8, vx_cr8_end, vx_window, vx_window_open, vx_spin
vx_load:
    mov     eax, [rdi]
    vmcall
vx_store:
    mov     [rdi], eax
vx_stored:
    vmcall
vx_cr8:
    mov     cr8, rbx
vx_cr8_end:
    vmcall
vx_window:
    nop
    sti
    nop
vx_window_open:
    nop
    vmcall
    # until there is something other than 0
vx_spin:
    pause
    cmp     dword ptr [rdi], 0
    je      vx_spin
    vmcall
"#
);

/// The guest gets a virtual APIC by these controls: the virtual-APIC page and the APIC-access page.
fn virtual_apic(vmm: &mut Vmm, controls: Secondary) -> (u64, u64) {
    let (page, access) = (paging::pages(1), paging::pages(1));
    vmm.primary(Primary::TPR_SHADOW);
    vmm.secondary(controls);
    vmm.set(Field::VIRTUAL_APIC, page);
    if controls.contains(Secondary::APIC_ACCESSES) {
        vmm.set(Field::APIC_ACCESS, access);
    }
    (page, access)
}

/// 30.4: 32-bit accesses to offset 80H are virtualized; all others exit.
fn apic_accesses() {
    for (label, offset, reason, qualification) in [
        (label!(vx_load), 0x80, 18, 0),
        (label!(vx_load), 0x20, 44, 0x20),
        (label!(vx_load), 0x84, 44, 0x84),
        (label!(vx_read), 0x80, 44, 0x80),
        (label!(vx_store), 0x80, 18, 0),
        (label!(vx_store), 0xB0, 44, 0x10B0),
        (label!(vx_store), 0x300, 44, 0x1300),
    ] {
        let mut vmm = Vmm::new(label);
        let (page, access) = virtual_apic(&mut vmm, Secondary::APIC_ACCESSES);
        paging::poke(page + 0x80, 0x65);
        vmm.registers[0] = 0x34;
        vmm.registers[6] = access + offset;
        let exited = vmm.enter();
        assert_eq!(
            (exited.reason, exited.qualification),
            (reason, qualification),
            "{offset:X}H"
        );
        let stores = label == label!(vx_store);
        match (reason, stores) {
            (44, _) => assert_eq!(exited.rip, label, "the access has not been"),
            (_, false) => assert_eq!(vmm.registers[0], 0x65, "from the virtual-APIC page"),
            (_, true) => assert_eq!(paging::peek(page + 0x80), 0x34, "to the virtual-APIC page"),
        }
        assert_eq!(paging::peek(access + 0x80), 0, "nothing is on the APIC-access page");
    }
}

/// 30.1.2: a VM exit behind MOV to CR8 that takes the virtual TPR below the threshold.
fn tpr_threshold() {
    for (class, reason, stands) in [(2, 43, label!(vx_cr8_end)), (3, 18, label!(vx_cr8_end))] {
        let mut vmm = Vmm::new(label!(vx_cr8));
        let (page, _) = virtual_apic(&mut vmm, Secondary::NONE);
        paging::poke(page + 0x80, 0x70);
        vmm.set(Field::TPR_THRESHOLD, 3);
        vmm.registers[3] = class;
        let exited = vmm.enter();
        assert_eq!((exited.reason, exited.rip), (reason, stands), "class {class}");
        assert_eq!(paging::peek(page + 0x80), class << 4);
    }
}

/// Where the guest was interrupted, by the virtual interrupts' handler.
static INTERRUPTED: AtomicU64 = AtomicU64::new(0);
/// The same as a word that the guest looks at.
static SEEN: AtomicU64 = AtomicU64::new(0);

fn interrupted(vector: u8) {
    exception::on(vector, |frame| {
        INTERRUPTED.store(frame.rip, SeqCst);
        SEEN.store(1, SeqCst);
    });
    INTERRUPTED.store(0, SeqCst);
    SEEN.store(0, SeqCst);
}

/// 30.2: what RVI says is delivered behind the shadow of STI, unless the virtual TPR is as high.
fn virtual_interrupts() {
    for (tpr, rip, status) in [(0, label!(vx_window_open), 0x5100), (0x50, 0, 0x51)] {
        interrupted(0x51);
        let mut vmm = Vmm::new(label!(vx_window));
        vmm.pin(Pin::EXTERNAL_INTERRUPTS);
        let (page, _) = virtual_apic(&mut vmm, Secondary::VIRTUAL_INTERRUPTS);
        paging::poke(page + 0x80, tpr);
        paging::poke(page + 0x220, 1 << 0x11);
        vmm.set(Field::GUEST_INTERRUPT_STATUS, 0x51);
        assert_eq!(vmm.enter().reason, 18);
        assert_eq!(INTERRUPTED.load(SeqCst), rip, "TPR {tpr:X}H");
        assert_eq!(vmm.get(Field::GUEST_INTERRUPT_STATUS), status);
        let in_service = u64::from(rip != 0) << 0x11;
        assert_eq!(paging::peek(page + 0x120), in_service, "VISR");
        assert_eq!(paging::peek(page + 0x220), 1 << 0x11 & !in_service, "VIRR");
    }
}

/// 30.6: another CPU posts interrupts and notifies this one, which takes them without a VM exit, and dismisses the notification.
fn posted_interrupts() {
    const NOTIFICATION: u8 = 0xF2;
    static DESCRIPTOR: AtomicU64 = AtomicU64::new(0);
    static POSTED: AtomicU64 = AtomicU64::new(0);
    let cpus = Cpus::start();
    let descriptor = paging::pages(1);
    DESCRIPTOR.store(descriptor, SeqCst);
    let mut vmm = Vmm::new(label!(vx_spin));
    vmm.pin(Pin::EXTERNAL_INTERRUPTS | Pin::POSTED_INTERRUPTS);
    vmm.exits(Exit::ACKNOWLEDGE);
    virtual_apic(&mut vmm, Secondary::VIRTUAL_INTERRUPTS);
    vmm.set(Field::POSTED_INTERRUPT_VECTOR, NOTIFICATION.into());
    vmm.set(Field::POSTED_INTERRUPT_DESCRIPTOR, descriptor);
    vmm.set(Field::GUEST_RFLAGS, 0x202);
    // A notification that were not dismissed would hold the next one back.
    for vector in [0x51u8, 0x61] {
        interrupted(vector);
        POSTED.store(vector.into(), SeqCst);
        vmm.set(Field::GUEST_RIP, label!(vx_spin));
        vmm.set(Field::GUEST_INTERRUPT_STATUS, 0);
        cpus.begin(1, || {
            let (at, vector) = (DESCRIPTOR.load(SeqCst), POSTED.load(SeqCst));
            paging::poke(at + vector / 64 * 8, 1 << (vector & 63));
            paging::poke(at + 32, 1);
            apic::send(NOTIFICATION.into(), 0);
        });
        vmm.registers[6] = SEEN.as_ptr() as u64;
        let exited = vmm.enter();
        cpus.wait(1);
        assert_eq!(exited.reason, 18, "vector {vector:X}H");
        assert_eq!(vmm.get(Field::GUEST_INTERRUPT_STATUS), u64::from(vector) << 8);
        assert_ne!(INTERRUPTED.load(SeqCst), 0);
        for n in 0..5 {
            assert_eq!(paging::peek(descriptor + 8 * n), 0, "PIR and ON");
        }
    }
}

/// 24.8, 26.2: INIT is held off in VMX root operation and comes with VMXOFF; of a guest it causes a VM exit.
fn init_waits_in_root_operation() {
    static REGION: AtomicU64 = AtomicU64::new(0);
    /// 1: in VMX operation; 2: to leave it.
    static STATE: AtomicU64 = AtomicU64::new(0);
    static TURNS: AtomicU64 = AtomicU64::new(0);
    static AFTER: AtomicU64 = AtomicU64::new(0);
    fn until(what: impl Fn() -> bool) -> bool {
        (0..100_000).any(|_| {
            cpu::pause();
            what()
        })
    }
    let cpus = Cpus::start();
    REGION.store(vmm::region(), SeqCst);
    STATE.store(0, SeqCst);
    AFTER.store(0, SeqCst);
    cpus.begin(1, || {
        cpu::set_cr0(cpu::cr0() | 1 << 5);
        cpu::set_cr4(cpu::cr4() | 1 << 13);
        if vmxon(REGION.load(SeqCst)).is_ok() {
            STATE.store(1, SeqCst);
        }
        while STATE.load(SeqCst) == 1 {
            TURNS.fetch_add(1, SeqCst);
            cpu::pause();
        }
        vmm::vmxoff();
        AFTER.store(1, SeqCst);
    });
    assert!(until(|| STATE.load(SeqCst) == 1), "VMXON");
    apic::send(apic::ICR_INIT, cpus.id(1));
    let before = TURNS.load(SeqCst);
    assert!(until(|| TURNS.load(SeqCst) > before + 1000), "INIT in root operation");
    STATE.store(2, SeqCst);
    assert!(
        !until(|| AFTER.load(SeqCst) != 0),
        "no instruction is executed behind VMXOFF"
    );
    cpus.restart(1);
    cpus.run(1, || AFTER.store(2, SeqCst));
    assert_eq!(AFTER.load(SeqCst), 2);
    // The boot CPU's: it waits for the VM entry.
    let mut vmm = Vmm::new(label!(vx_loop));
    cpus.run(1, || apic::send(apic::ICR_INIT, 0));
    assert_eq!(vmm.enter().reason, 3);
}

const PERF_GLOBAL: need::Need = need::Need {
    reason: "no switching of IA32_PERF_GLOBAL_CTRL (IA32_VMX_ENTRY_CTLS[45] is 0)",
    present: || cpu::has(Feature::Vmx) && read(0x484) >> 45 & 1 != 0 && need::pmu_version() >= 2,
    absent: || {},
};

rt::tests! {
    "tests_vmx";
    instructions_fail_by_number: vmm::VMX;
    checks_of_controls_and_host_state: vmm::VMX;
    checks_of_guest_state: vmm::VMX;
    launch_state: vmm::VMX;
    exits_by_instructions: vmm::VMX;
    exits_by_exceptions: vmm::VMX;
    events_are_injected: vmm::VMX;
    ept_violations: vmm::VMX, vmm::EPT;
    preemption_timer: vmm::VMX, vmm::TIMER;
    preemption_timer_wakes: vmm::VMX, vmm::TIMER;
    monitor_trap_flag: vmm::VMX, vmm::MONITOR_TRAP;
    vm_functions: vmm::VMX, VM_FUNCTIONS;
    apic_accesses: vmm::VMX, APIC_ACCESSES;
    tpr_threshold: vmm::VMX;
    virtual_interrupts: vmm::VMX, VIRTUAL_INTERRUPTS;
    posted_interrupts: vmm::VMX, POSTED_INTERRUPTS, need::OTHER_CPUS;
    init_waits_in_root_operation: vmm::VMX, need::OTHER_CPUS;
    debug_registers: vmm::VMX;
    single_steps: vmm::VMX;
    pending_debug_exceptions: vmm::VMX;
    last_branches: vmm::VMX, need::LBR;
    branch_trace_store: vmm::VMX, need::BTS;
    counters_of_the_guest_alone: vmm::VMX, PERF_GLOBAL;
    traces_of_both: TRACE;
    trace_of_the_guest_alone: TRACE, GUEST_TRACE;
    architectural_last_branches_of_the_guest_alone: vmm::VMX, LBR_SWITCH;
    user_wait: vmm::VMX, USER_WAIT;
}
