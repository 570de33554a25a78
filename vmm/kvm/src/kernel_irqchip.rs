//! KVM's own interrupt controllers: the local APICs, the IOAPIC, the 8259 pair, and the 8254 timer that goes with them.
//!
//! # Theory
//! With KVM_CREATE_IRQCHIP all of them are in the kernel. Interrupts, IPIs, INIT and start-up IPIs, EOI, CR8, the APIC's timer and
//! HLT are KVM's then and take no exit to us; what we still do is drive the lines of our devices.
//!
//! # Practice
//! The whole chip and not the split one (KVM_CAP_SPLIT_IRQCHIP), which leaves IOAPIC, 8259s and 8254 to us: each EOI of a level and
//! each access to the timer would be an exit, and a Linux that calibrates by the timer makes 30 thousand of them.
//!
//! *Lines* are driven by KVM_IRQ_LINE, edges and levels alike. A line's level is known where a device is served, which is in an exit
//! of the guest's or in the thread that looks at the outside, under the machine's lock: one call either way. An eventfd
//! (KVM_IRQFD) costs the same call, has only pulses, and of a level it needs another one for the EOI (KVM_IRQFD_FLAG_RESAMPLE) with
//! somebody who waits for it, where our devices lower the line themselves in the very access that acknowledges it.
//!
//! *Queue notifications* of virtio devices come as exits. A write that an eventfd takes (KVM_IOEVENTFD) is cheaper: 34 microseconds
//! for 58 under kvm-amd in the lab, 1.0 for 11.4 on a KVM that interprets. But it is one of three exits of a request; the others
//! read and acknowledge the interrupt, which lowers a line. And our devices do all their work in that write, and the driver finds it
//! done; by an eventfd another thread has to be woken for it, to take the lock that the CPU's next exit waits for: with a thread that
//! does no more than hear of it the write takes 84 to 119 microseconds in the lab. It is for devices that work on threads of their
//! own, of which there is none.
//!
//! *Coalesced writes* (KVM_REGISTER_COALESCED_MMIO) cost as little, and are for registers that are written often and never answer. Of
//! ours only the port of diagnostic codes is one, and it is not registered. A character that waits in the ring until something else
//! happens would be late at the console, and its interrupt late in the guest.
//!
//! # While the engine executes
//! An instruction that KVM lacks runs in the engine with all CPUs out of KVM. Interrupts, NMIs and IPIs that come meanwhile, and those
//! that wait, stay in KVM and are delivered once the CPU is back there, at an instruction's end; an event that KVM was in the middle of
//! delivering is the engine's to deliver. The engine knows CR8 and hands it back; of TPR the four bits beyond it are lost.

use std::sync::Arc;

use devices::pci::Message;
use devices::platform::{GSI_PIT, Lines, ioapic};
use engine::Activity;
use kvm_bindings::{
    KVM_CAP_IRQ_ROUTING, KVM_CAP_IRQCHIP, KVM_CAP_MP_STATE, KVM_CAP_PIT_STATE2, KVM_CAP_PIT2, KVM_CAP_REINJECT_CONTROL,
    KVM_CAP_SET_IDENTITY_MAP_ADDR, KVM_CAP_TSC_DEADLINE_TIMER, KVM_CAP_USER_NMI, KVM_IRQ_ROUTING_IRQCHIP,
    KVM_IRQCHIP_IOAPIC, KVM_IRQCHIP_PIC_MASTER, KVM_IRQCHIP_PIC_SLAVE, KVM_MP_STATE_HALTED, KVM_MP_STATE_RUNNABLE,
    KVM_PIT_SPEAKER_DUMMY, KvmIrqRouting, kvm_irq_routing_entry, kvm_irq_routing_irqchip, kvm_lapic_state,
    kvm_mp_state, kvm_msi, kvm_pit_config,
};
use kvm_ioctls::{VcpuFd, VmFd};
use log::{debug, warn};

use crate::error::{KvmError, refused};
use crate::host::Host;
use crate::sys;

/// The clock of the APIC's timer in KVM. APIC_BUS_CYCLE_NS of arch/x86/kvm/lapic.h: one nanosecond.
pub const APIC_TIMER_KHZ: u32 = 1_000_000;

/// The page behind which KVM_SET_TSS_ADDR's three are: VMX without unrestricted guests has a page table there.
const IDENTITY_MAP: u64 = 0xfffb_c000;

/// What all of this needs.
const NEEDED: &[(u32, &str)] = &[
    (KVM_CAP_IRQCHIP, "KVM_CAP_IRQCHIP"),
    (KVM_CAP_PIT2, "KVM_CAP_PIT2"),
    (KVM_CAP_PIT_STATE2, "KVM_CAP_PIT_STATE2"),
    (KVM_CAP_REINJECT_CONTROL, "KVM_CAP_REINJECT_CONTROL"),
    (KVM_CAP_IRQ_ROUTING, "KVM_CAP_IRQ_ROUTING"),
    (KVM_CAP_MP_STATE, "KVM_CAP_MP_STATE"),
    (KVM_CAP_USER_NMI, "KVM_CAP_USER_NMI"),
    (KVM_CAP_SET_IDENTITY_MAP_ADDR, "KVM_CAP_SET_IDENTITY_MAP_ADDR"),
    (KVM_CAP_TSC_DEADLINE_TIMER, "KVM_CAP_TSC_DEADLINE_TIMER"),
];

/// Offsets of registers of a local APIC. SDM Vol. 3A Table 11-1 "Local APIC Register Address Map".
const SVR: usize = 0xf0;
const LINT0: usize = 0x350;
const LINT1: usize = 0x360;

/// The capability that a host lacks for this, if it lacks one.
pub fn lacks(host: &Host) -> Option<&'static str> {
    let missing = NEEDED.iter().find(|(number, _)| host.capability(*number) <= 0);
    missing.map(|(_, name)| *name)
}

/// Has a machine's interrupt controllers be KVM's. It has no CPUs yet.
///
/// # Errors
/// One line: what KVM refused.
pub fn create(vm: &VmFd) -> Result<(), KvmError> {
    vm.set_identity_map_address(IDENTITY_MAP)
        .map_err(refused("KVM_SET_IDENTITY_MAP_ADDR"))?;
    vm.create_irq_chip().map_err(refused("KVM_CREATE_IRQCHIP"))?;
    let pit = kvm_pit_config {
        // With port 61H, through which the third channel is gated and read.
        flags: KVM_PIT_SPEAKER_DUMMY,
        ..Default::default()
    };
    vm.create_pit2(pit).map_err(refused("KVM_CREATE_PIT2"))?;
    sys::lose_ticks(vm).map_err(refused("KVM_REINJECT_CONTROL"))?;
    let entries: Vec<kvm_irq_routing_entry> = routes()
        .into_iter()
        .map(|(gsi, irqchip, pin)| {
            let mut entry = kvm_irq_routing_entry {
                gsi,
                type_: KVM_IRQ_ROUTING_IRQCHIP,
                ..Default::default()
            };
            entry.u.irqchip = kvm_irq_routing_irqchip { irqchip, pin };
            entry
        })
        .collect();
    let routing = KvmIrqRouting::from_entries(&entries).map_err(|_| KvmError::List("KVM_SET_GSI_ROUTING"))?;
    vm.set_gsi_routing(&routing).map_err(refused("KVM_SET_GSI_ROUTING"))
}

/// Which pins the global system interrupts lead to: interrupt, controller, pin. Unlike KVM's own table this one has the interval
/// timer on the IOAPIC's pin 2, as the machine's tables say.
fn routes() -> Vec<(u32, u32, u32)> {
    let isa = (0..16).filter(|irq| *irq != 2).flat_map(|irq| {
        let pic = match irq {
            0..8 => (irq, KVM_IRQCHIP_PIC_MASTER, irq),
            _ => (irq, KVM_IRQCHIP_PIC_SLAVE, irq - 8),
        };
        let pin = if irq == 0 { GSI_PIT.into() } else { irq };
        [pic, (irq, KVM_IRQCHIP_IOAPIC, pin)]
    });
    let others = (16..ioapic::PINS as u32).map(|gsi| (gsi, KVM_IRQCHIP_IOAPIC, gsi));
    isa.chain(others).collect()
}

/// Leaves the boot CPU's APIC as firmware hands it over, in virtual-wire mode.
///
/// # Errors
/// One line: what KVM refused.
pub fn set_virtual_wire(vcpu: &VcpuFd) -> Result<(), KvmError> {
    let mut lapic = vcpu.get_lapic().map_err(refused("KVM_GET_LAPIC"))?;
    let svr = register(&lapic, SVR);
    for (offset, value) in [(SVR, svr | 1 << 8), (LINT0, 0x700), (LINT1, 0x400)] {
        set_register(&mut lapic, offset, value);
    }
    vcpu.set_lapic(&lapic).map_err(refused("KVM_SET_LAPIC"))
}

pub(crate) fn register(lapic: &kvm_lapic_state, offset: usize) -> u32 {
    let bytes = &lapic.regs[offset..offset + 4];
    bytes
        .iter()
        .rev()
        .fold(0, |value, byte| value << 8 | u32::from(*byte as u8))
}

pub(crate) fn set_register(lapic: &mut kvm_lapic_state, offset: usize, value: u32) {
    for (byte, new) in lapic.regs[offset..].iter_mut().zip(value.to_le_bytes()) {
        *byte = new as _;
    }
}

/// What a CPU is doing, by KVM.
///
/// # Errors
/// One line: what KVM refused.
pub fn activity(vcpu: &VcpuFd) -> Result<Activity, KvmError> {
    let state = vcpu.get_mp_state().map_err(refused("KVM_GET_MP_STATE"))?;
    Ok(match state.mp_state {
        KVM_MP_STATE_RUNNABLE => Activity::Running,
        KVM_MP_STATE_HALTED => Activity::Halted,
        // Uninitialized, or INIT has come.
        _ => Activity::WaitForSipi,
    })
}

/// Has a CPU run or be halted. One that waits for its start-up IPI does that by itself.
///
/// # Errors
/// One line: what KVM refused.
pub fn set_activity(vcpu: &VcpuFd, activity: Activity) -> Result<(), KvmError> {
    let mp_state = match activity {
        Activity::Running => KVM_MP_STATE_RUNNABLE,
        Activity::Halted => KVM_MP_STATE_HALTED,
        _ => return Ok(()),
    };
    vcpu.set_mp_state(kvm_mp_state { mp_state })
        .map_err(refused("KVM_SET_MP_STATE"))
}

/// The devices' lines.
#[derive(Debug)]
pub struct KernelLines(pub Arc<VmFd>);

impl Lines for KernelLines {
    fn set(&self, gsi: u8, asserted: bool) {
        if let Err(error) = self.0.set_irq_line(gsi.into(), asserted) {
            warn!("KVM_IRQ_LINE of {gsi}: {}", machine::plain(&error.into()));
        }
    }

    fn message(&self, message: Message) {
        let msi = kvm_msi {
            address_lo: message.address as u32,
            address_hi: (message.address >> 32) as u32,
            data: message.data,
            ..Default::default()
        };
        // Nobody may have enabled the local APIC that it is for, which is no error.
        if let Err(error) = self.0.signal_msi(msi) {
            debug!("KVM_SIGNAL_MSI: {}", machine::plain(&error.into()));
        }
    }
}

#[cfg(test)]
#[path = "kernel_irqchip_test.rs"]
mod tests;
