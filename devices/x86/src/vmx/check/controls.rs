//! SDM Vol. 3C 27.2.1 "Checks on VMX Controls".

use super::{Processor, Rule, rules};
use crate::vmx::caps::CR3_TARGETS;
use crate::vmx::controls::{Entry, Exit, Pin, Primary, Secondary};
use crate::vmx::ept::EptPointer;
use crate::vmx::exits::{EventKind, Interruption};
use crate::vmx::fields::{Field, Vmcs};

fn injected(v: &Vmcs) -> Interruption {
    Interruption::from_bits(v.get32(Field::ENTRY_INTERRUPTION))
}

/// The guest begins in protected mode as far as error codes go: CR0.PE, which can be 0 in an unrestricted guest alone.
fn protected(v: &Vmcs) -> bool {
    !v.secondary().contains(Secondary::UNRESTRICTED) || v.get(Field::GUEST_CR0) & 1 != 0
}

/// Hardware exceptions with an error code.
fn has_error_code(vector: u8) -> bool {
    matches!(vector, 8 | 10..=14 | 17)
}

fn software(i: Interruption) -> bool {
    [
        EventKind::Software,
        EventKind::PrivilegedSoftware,
        EventKind::SoftwareException,
    ]
    .iter()
    .any(|&kind| i.kind() == kind as u8)
}

/// Checks on VM-execution, VM-exit and VM-entry control fields.
pub const CONTROLS: &[Rule] = rules! {
    // 27.2.1.1 "VM-Execution Control Fields".
    "27.2.1.1" "reserved bits of the pin-based controls" =>
        |v, p| Processor::reserved(v.pin().0, p.caps.must_be_1().0, p.caps.pin.0);
    "27.2.1.1" "reserved bits of the primary processor-based controls" =>
        |v, p| Processor::reserved(v.primary().0, p.caps.must_be_1().1, p.caps.primary.0);
    "27.2.1.1" "reserved bits of the secondary processor-based controls" =>
        |v, p| Processor::reserved(v.secondary().0, 0, p.caps.secondary.0);
    "27.2.1.1" "no more CR3-target values than there are" =>
        |v, _| v.get32(Field::CR3_TARGET_COUNT) > CR3_TARGETS;
    "27.2.1.1" "I/O bitmap addresses" =>
        |v, p| v.primary().contains(Primary::IO_BITMAPS)
            && [Field::IO_BITMAP_A, Field::IO_BITMAP_B].iter().any(|&at| p.misplaced(v.get(at), 4096));
    "27.2.1.1" "MSR-bitmap address" =>
        |v, p| v.primary().contains(Primary::MSR_BITMAPS) && p.misplaced(v.get(Field::MSR_BITMAP), 4096);
    "27.2.1.1" "virtual-APIC address" =>
        |v, p| v.primary().contains(Primary::TPR_SHADOW) && p.misplaced(v.get(Field::VIRTUAL_APIC), 4096);
    "27.2.1.1" "reserved bits of the TPR threshold" =>
        |v, _| v.primary().contains(Primary::TPR_SHADOW)
            && !v.secondary().contains(Secondary::VIRTUAL_INTERRUPTS)
            && v.get(Field::TPR_THRESHOLD) >> 4 != 0;
    "27.2.1.1" "TPR threshold no higher than the virtual TPR" =>
        |v, p| v.primary().contains(Primary::TPR_SHADOW)
            && !v.secondary().any(Secondary::APIC_ACCESSES | Secondary::VIRTUAL_INTERRUPTS)
            && v.get(Field::TPR_THRESHOLD) & 15 > (p.read)(v.get(Field::VIRTUAL_APIC).wrapping_add(0x80)) >> 4 & 15;
    "27.2.1.1" "virtual NMIs need NMI exiting" =>
        |v, _| !v.pin().contains(Pin::NMIS) && v.pin().contains(Pin::VIRTUAL_NMIS);
    "27.2.1.1" "NMI-window exiting needs virtual NMIs" =>
        |v, _| !v.pin().contains(Pin::VIRTUAL_NMIS) && v.primary().contains(Primary::NMI_WINDOW);
    "27.2.1.1" "APIC-access address" =>
        |v, p| v.secondary().contains(Secondary::APIC_ACCESSES) && p.misplaced(v.get(Field::APIC_ACCESS), 4096);
    "27.2.1.1" "APIC virtualization needs the TPR shadow" =>
        |v, _| !v.primary().contains(Primary::TPR_SHADOW)
            && v.secondary().any(Secondary::X2APIC | Secondary::APIC_REGISTERS | Secondary::VIRTUAL_INTERRUPTS);
    "27.2.1.1" "x2APIC mode and APIC accesses are not virtualized together" =>
        |v, _| v.secondary().contains(Secondary::X2APIC | Secondary::APIC_ACCESSES);
    "27.2.1.1" "virtual-interrupt delivery needs external-interrupt exiting" =>
        |v, _| v.secondary().contains(Secondary::VIRTUAL_INTERRUPTS) && !v.pin().contains(Pin::EXTERNAL_INTERRUPTS);
    "27.2.1.1" "posted interrupts need virtual-interrupt delivery, acknowledgement, a vector and a descriptor" =>
        |v, p| v.pin().contains(Pin::POSTED_INTERRUPTS)
            && (!v.secondary().contains(Secondary::VIRTUAL_INTERRUPTS)
                || !v.exit_controls().contains(Exit::ACKNOWLEDGE)
                || v.get(Field::POSTED_INTERRUPT_VECTOR) >> 8 != 0
                || p.misplaced(v.get(Field::POSTED_INTERRUPT_DESCRIPTOR), 64));
    "27.2.1.1" "VPID 0 is the host's" =>
        |v, _| v.secondary().contains(Secondary::VPID) && v.get(Field::VPID) == 0;
    "27.2.1.1" "EPT pointer" =>
        |v, p| v.secondary().contains(Secondary::EPT) && bad_ept_pointer(v.get(Field::EPT_POINTER), p);
    "27.2.1.1" "an unrestricted guest and mode-based execute control need EPT" =>
        |v, _| !v.secondary().contains(Secondary::EPT)
            && v.secondary().any(Secondary::UNRESTRICTED | Secondary::MODE_BASED_EXECUTE);
    "27.2.1.1" "page-modification logging needs EPT and an address" =>
        |v, p| v.secondary().contains(Secondary::PML)
            && (!v.secondary().contains(Secondary::EPT) || p.misplaced(v.get(Field::PML_ADDRESS), 4096));
    "27.2.1.1" "VM functions: reserved bits, and EPTP switching needs EPT and a list" =>
        |v, p| v.secondary().contains(Secondary::VM_FUNCTIONS)
            && (v.get(Field::VM_FUNCTIONS) & !p.caps.functions != 0
                || v.get(Field::VM_FUNCTIONS) & 1 != 0
                    && (!v.secondary().contains(Secondary::EPT) || p.misplaced(v.get(Field::EPTP_LIST), 4096)));
    "27.2.1.1" "VMREAD-bitmap and VMWRITE-bitmap addresses" =>
        |v, p| v.secondary().contains(Secondary::VMCS_SHADOWING)
            && [Field::VMREAD_BITMAP, Field::VMWRITE_BITMAP].iter().any(|&at| p.misplaced(v.get(at), 4096));
    "27.2.1.1" "virtualization-exception information address" =>
        |v, p| v.secondary().contains(Secondary::VIRTUALIZATION_EXCEPTION)
            && p.misplaced(v.get(Field::VIRTUALIZATION_EXCEPTION_AREA), 4096);
    "27.2.1.1" "TSC multiplier" =>
        |v, _| v.secondary().contains(Secondary::TSC_SCALING) && v.get(Field::TSC_MULTIPLIER) == 0;

    "27.2.1.1" "Intel PT with guest-physical addresses needs EPT, and IA32_RTIT_CTL loaded by VM entries and cleared by VM exits" =>
        |v, _| v.secondary().contains(Secondary::PT_GUEST_PHYSICAL)
            && !(v.secondary().contains(Secondary::EPT)
                && v.entry_controls().contains(Entry::LOAD_RTIT_CTL)
                && v.exit_controls().contains(Exit::CLEAR_RTIT_CTL));
    // 27.2.1.2 "VM-Exit Control Fields".
    "27.2.1.2" "reserved bits of the VM-exit controls" =>
        |v, p| Processor::reserved(v.exit_controls().0, p.caps.must_be_1().2, p.caps.exit.0);
    "27.2.1.2" "saving of the preemption timer needs the timer" =>
        |v, _| v.exit_controls().contains(Exit::SAVE_PREEMPTION_TIMER) && !v.pin().contains(Pin::PREEMPTION_TIMER);
    "27.2.1.2" "VM-exit MSR-store address" =>
        |v, p| p.list_misplaced(v.get(Field::EXIT_MSR_STORE), v.get(Field::EXIT_MSR_STORE_COUNT));
    "27.2.1.2" "VM-exit MSR-load address" =>
        |v, p| p.list_misplaced(v.get(Field::EXIT_MSR_LOAD), v.get(Field::EXIT_MSR_LOAD_COUNT));

    // 27.2.1.3 "VM-Entry Control Fields".
    "27.2.1.3" "reserved bits of the VM-entry controls" =>
        |v, p| Processor::reserved(v.entry_controls().0, p.caps.must_be_1().3, p.caps.entry.0);
    "27.2.1.3" "IA32_RTIT_CTL is not loaded while Intel PT is on" =>
        |v, p| p.tracing && v.entry_controls().contains(Entry::LOAD_RTIT_CTL);
    "27.2.1.3" "type of the injected event" =>
        |v, p| injected(v).valid()
            && (injected(v).kind() == 1
                || injected(v).kind() == EventKind::Other as u8 && !p.caps.primary.contains(Primary::MONITOR_TRAP));
    "27.2.1.3" "vector of the injected event" =>
        |v, _| {
            let i = injected(v);
            i.valid()
                && match i.kind() {
                    2 => i.vector() != 2,
                    3 => i.vector() > 31,
                    7 => i.vector() != 0,
                    _ => false,
                }
        };
    "27.2.1.3" "error code of the injected event, exactly where it has one" =>
        |v, _| {
            let i = injected(v);
            let has = protected(v) && i.kind() == EventKind::Hardware as u8 && has_error_code(i.vector());
            i.valid() && i.error_code() != has
        };
    "27.2.1.3" "reserved bits of the interruption information" =>
        |v, _| injected(v).valid() && (injected(v).reserved() != 0 || injected(v).nmi_unblocking());
    "27.2.1.3" "reserved bits of the exception error code" =>
        |v, _| injected(v).valid() && injected(v).error_code() && v.get(Field::ENTRY_ERROR_CODE) >> 16 != 0;
    "27.2.1.3" "length of the injected software event" =>
        |v, p| {
            let length = v.get(Field::ENTRY_INSTRUCTION_LENGTH);
            injected(v).valid() && software(injected(v)) && (length > 15 || length == 0 && !p.caps.zero_length)
        };
    "27.2.1.3" "VM-entry MSR-load address" =>
        |v, p| p.list_misplaced(v.get(Field::ENTRY_MSR_LOAD), v.get(Field::ENTRY_MSR_LOAD_COUNT));
    "27.2.1.3" "no entry to SMM, nor deactivation of the dual-monitor treatment, outside SMM" =>
        |v, _| v.entry_controls().any(Entry::TO_SMM | Entry::DEACTIVATE_DUAL_MONITOR);
};

/// SDM Vol. 3C 27.2.1.1: memory type uncacheable or write-back, a walk of four levels, no reserved bit.
pub fn bad_ept_pointer(value: u64, p: &Processor<'_>) -> bool {
    let pointer = EptPointer::from_bits(value);
    !matches!(pointer.memory_type(), 0 | 6)
        || pointer.walk() != 3
        || pointer.accessed_dirty() && !p.caps.accessed_dirty
        || pointer.reserved() != 0
        || p.beyond(value)
}
