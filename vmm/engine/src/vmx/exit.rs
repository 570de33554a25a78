//! VM exits (SDM Vol. 3C chapter 28 "VM Exits").

use x86::vmx::controls::Exit;
use x86::vmx::exits::{ENTRY_FAILURE, EventKind, abort, apic_access};
use x86::vmx::fields::ABORT_INDICATOR;
use x86::vmx::{ExitReason, Field, Vmcs};
use x86::watch::{Change, Far};

use super::{ExitInformation, Vectoring};
use crate::Engine;
use crate::cpu::{Activity, Cpu, Event};

/// The length of VMLAUNCH and VMRESUME.
const LAUNCH_LENGTH: u8 = 3;

/// What came of an event.
pub(crate) enum Delivered {
    /// It, or an exception in its place, has been delivered.
    Event(Event),
    /// The processor has shut down.
    Shutdown,
    /// A VM exit came in its place.
    VmExit,
}

/// The exit qualification. An APIC access during event delivery has an access type of its own, which goes with IDT-vectoring information.
fn qualification(exit: &ExitInformation) -> u64 {
    if exit.reason != ExitReason::ApicAccess || exit.vectoring.is_none() {
        return exit.qualification;
    }
    let access = match exit.qualification >> apic_access::SHIFT {
        apic_access::PHYSICAL => apic_access::PHYSICAL_DELIVERY,
        _ => apic_access::DELIVERY,
    };
    exit.qualification & ((1 << apic_access::SHIFT) - 1) | access << apic_access::SHIFT
}

/// Length and information of an instruction are those of the instruction that caused the exit, or that delivered the event.
fn information(v: &mut Vmcs, exit: &ExitInformation) {
    v.set(Field::EXIT_REASON, (exit.reason as u16).into());
    v.set(Field::EXIT_QUALIFICATION, qualification(exit));
    v.set(Field::GUEST_LINEAR_ADDRESS, exit.linear);
    v.set(Field::GUEST_PHYSICAL_ADDRESS, exit.physical);
    v.set(Field::EXIT_INTERRUPTION, exit.interruption.into_bits().into());
    v.set(Field::EXIT_ERROR_CODE, exit.error.into());
    v.set(Field::EXIT_INSTRUCTION_INFORMATION, exit.instruction.into());
    let (vectoring, error, length) = match exit.vectoring {
        Some(Vectoring {
            information,
            error,
            length,
        }) => (information.into_bits(), error, length),
        None => (0, 0, 0),
    };
    v.set(Field::IDT_VECTORING, vectoring.into());
    v.set(Field::IDT_VECTORING_ERROR_CODE, error.into());
    v.set(Field::EXIT_INSTRUCTION_LENGTH, exit.length.max(length).into());
}

impl Engine {
    /// Makes a VM exit between two chains. RIP is where the guest stands.
    pub(crate) fn make_vm_exit(&mut self, cpu: &mut Cpu, exit: ExitInformation) {
        let Some(at) = cpu.vmx.as_ref().and_then(|vmx| vmx.current) else {
            return;
        };
        cpu.deliveries += 1;
        cpu.link = core::ptr::null_mut();
        let mut v = cpu.read_vmcs(at);
        information(&mut v, &exit);
        cpu.save_guest(&mut v);
        // What was to be injected has been, or is told of as IDT-vectoring information.
        let injected = v.get(Field::ENTRY_INTERRUPTION) & 0x7fff_ffff;
        v.set(Field::ENTRY_INTERRUPTION, injected);
        cpu.write_vmcs(at, &v);
        let nmi = exit.reason == ExitReason::ExceptionOrNmi && exit.interruption.kind() == EventKind::Nmi as u8;
        let stored = cpu.store_msrs(v.get(Field::EXIT_MSR_STORE), v.get(Field::EXIT_MSR_STORE_COUNT));
        if stored.is_err() {
            self.vmx_abort(cpu, at, abort::SAVE_MSRS);
            return;
        }
        let from = cpu.linear(cpu.rip);
        let cpl = cpu.cpl;
        self.load_host_state(cpu, at, &v);
        cpu.want_window = cpu.asked_window;
        cpu.nmi_blocked |= nmi;
        let told = !v.exit_controls().contains(Exit::CONCEAL_FROM_PT);
        self.transferred(cpu, from, cpl, told, Some(exit.reason));
    }

    /// A VM entry that fails once guest state is being loaded. SDM Vol. 3C 27.8 "VM-Entry Failures During or After Loading Guest
    /// State".
    pub(super) fn fail_entry(&mut self, cpu: &mut Cpu, at: u64, v: &mut Vmcs, reason: ExitReason, qualification: u64) {
        let from = cpu.linear(cpu.rip.wrapping_sub(3));
        v.set(Field::EXIT_REASON, u64::from(reason as u16) | u64::from(ENTRY_FAILURE));
        v.set(Field::EXIT_QUALIFICATION, qualification);
        cpu.write_vmcs(at, v);
        self.load_host_state(cpu, at, v);
        self.transferred(cpu, from, 0, false, None);
    }

    fn load_host_state(&mut self, cpu: &mut Cpu, at: u64, v: &Vmcs) {
        // The last packets of a guest's trace go where the guest's are.
        cpu.clear_units(v);
        // An entry that fails has left the host, and has not got as far as the guest.
        if cpu.tlb.tag() == cpu.vmx_tag() {
            cpu.leave_world();
        }
        if let Some(vmx) = &mut cpu.vmx {
            vmx.guest = None;
        }
        cpu.load_host(v);
        cpu.changed_world();
        if cpu.cr4.pae() && !cpu.efer.lma() && cpu.check_pdptes(cpu.cr3).is_err() {
            cpu.event = None;
            self.vmx_abort(cpu, at, abort::HOST_PDPTES);
            return;
        }
        let (list, count) = (v.get(Field::EXIT_MSR_LOAD), v.get(Field::EXIT_MSR_LOAD_COUNT));
        if cpu.load_msrs(list, count).is_err() {
            self.vmx_abort(cpu, at, abort::LOAD_MSRS);
        }
        cpu.refresh_mode();
    }

    /// SDM Vol. 3C 28.7 "VMX Aborts": the indicator says why, and the processor shuts down.
    fn vmx_abort(&mut self, cpu: &mut Cpu, at: u64, why: u32) {
        let _ = cpu.shared().write_ram(at + ABORT_INDICATOR, &why.to_le_bytes());
        if let Some(vmx) = &mut cpu.vmx {
            vmx.guest = None;
        }
        cpu.activity = Activity::Shutdown;
        cpu.changed_world();
    }

    /// The units hear of a VM entry, or of a VM exit with its reason, as of a far transfer; `cr3`: Intel PT tells that CR3 has changed.
    pub(super) fn transferred(&mut self, cpu: &mut Cpu, from: u64, from_cpl: u8, cr3: bool, exit: Option<ExitReason>) {
        let (far, length) = match exit {
            Some(_) => (Far::VmExit, 0),
            None => (Far::VmEntry, LAUNCH_LENGTH),
        };
        self.transition(cpu, from, from_cpl, far, length, cr3);
        cpu.change(Change::Vmx {
            exit: exit.map(|reason| reason as u16),
        });
    }

    /// An external interrupt causes a VM exit that leaves it pending; only while [`Cpu::interruptible`] and
    /// [`Cpu::exits_unacknowledged`].
    pub fn interrupt_exit(&mut self, cpu: &mut Cpu, bus: &mut dyn crate::bus::Bus) {
        self.raise(
            cpu,
            bus,
            Event {
                vector: 0,
                error: None,
                source: crate::cpu::Source::External,
            },
        );
    }
}
