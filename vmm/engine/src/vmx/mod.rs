//! VMX operation of a processor (SDM Vol. 3C chapters 24 to 31).
//!
//! # Theory
//! A processor is outside VMX operation, in VMX root operation, or in VMX non-root operation, where it runs a guest of the VMM that
//! the guest of this machine is. The current VMCS is its region in guest memory and nothing else; what the running guest's controls
//! say is copied at VM entry, as the manual lets a processor do.
//!
//! # Practice
//! Nobody pays for it who does not use it. In non-root operation blocks of code are those of a mode of their own
//! ([`mode::NON_ROOT`](crate::cpu::mode::NON_ROOT)): an instruction that may cause a VM exit has an op before it that looks at the controls
//! ([`intercept`]). Events are looked at where they are delivered, accesses where page tables are walked ([`nested`]). An exit is made by the
//! run loop, between two chains ([`exit`]), and so is an entry ([`entry`]).
//!
//! # Left out
//! Controls that [`x86::vmx::caps::ENGINE`] does not name cannot be set. There is no dual-monitor treatment of SMIs.

pub(crate) mod apic;
mod entry;
mod exit;
mod instructions;
pub(crate) mod intercept;
pub(crate) mod nested;
mod trace;
mod transfer;

use serde::{Deserialize, Serialize};
use x86::vmx::controls::{Entry, Exit, Pin, Primary, Secondary};
use x86::vmx::ept::EptPointer;
use x86::vmx::exits::{EventKind, Interruption};
use x86::vmx::fields::REGION;
use x86::vmx::{ExitReason, Field, Vmcs};

use crate::cpu::{Activity, Cpu, Event, Source};
use crate::op::{Reason, Stop};
use crate::tlb::VmxTag;
use x86::rflags::flag as rf;

pub use apic::{ApicExit, VirtualApic};
pub use trace::TraceFault;

pub(crate) use exit::Delivered;
pub(crate) use instructions::lower;

/// What a processor in VMX operation holds.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Vmx {
    /// The VMXON pointer.
    pub vmxon: u64,
    /// The current-VMCS pointer.
    pub current: Option<u64>,
    /// The guest that runs, in non-root operation.
    pub guest: Option<Guest>,
}

impl Vmx {
    /// A guest runs, and it is unrestricted.
    pub(crate) fn unrestricted(&self) -> bool {
        let guest = self.guest.as_ref();
        guest.is_some_and(|guest| guest.secondary.contains(Secondary::UNRESTRICTED))
    }

    /// Bits of CR0 that are 1 as things are. SDM Vol. 3C 24.8 "Restrictions on VMX Operation".
    pub(crate) fn cr0_fixed(&self) -> u64 {
        // PE and PG are an unrestricted guest's own.
        let own = if self.unrestricted() { 0x8000_0001 } else { 0 };
        x86::vmx::caps::CR0_FIXED0 & !own
    }
}

/// What the controls of the running guest say, as they were at VM entry.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[allow(missing_docs)] // They are the manual's names.
pub struct Guest {
    pub pin: Pin,
    pub primary: Primary,
    pub secondary: Secondary,
    pub exit: Exit,
    pub entry: Entry,
    pub exceptions: u32,
    pub page_fault_mask: u32,
    pub page_fault_match: u32,
    pub cr0_mask: u64,
    pub cr0_shadow: u64,
    pub cr4_mask: u64,
    pub cr4_shadow: u64,
    /// CR3-target values, as many as count.
    pub cr3_targets: Vec<u64>,
    pub io_bitmaps: [u64; 2],
    pub msr_bitmap: u64,
    pub tsc_offset: u64,
    /// With 48 fraction bits.
    pub tsc_multiplier: u64,
    pub ept: Option<EptPointer>,
    /// 0 without one.
    pub vpid: u16,
    pub apic: VirtualApic,
    pub xss_exiting: u64,
    /// The functions that VMFUNC may call.
    pub functions: u64,
    pub eptp_list: u64,
    /// The EPTP index, for virtualization exceptions.
    pub ept_index: u16,
    /// The physical address of the virtualization-exception information area.
    pub exception_area: u64,
    /// The physical address of the page-modification log.
    pub page_log: u64,
    pub link_pointer: u64,
    pub bitmaps: ShadowBitmaps,
    pub pause_loop: PauseLoop,
    /// The value of the time-stamp counter at which the VMX-preemption timer has counted down; `None`: it is not activated.
    pub timer: Option<u64>,
    /// A VM exit by the monitor trap flag is pending.
    pub monitor_trap: bool,
    /// Intel PT could not reach a page.
    pub trace_fault: Option<TraceFault>,
    /// Virtual NMIs are blocked.
    pub virtual_nmi_blocked: bool,
    /// The event that VM entry injects, before the first instruction: information, error code, instruction length.
    pub injected: Option<(u32, u32, u8)>,
}

/// The addresses of the bitmaps that say which fields the guest cannot read and write in its shadow VMCS.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ShadowBitmaps {
    /// VMREAD.
    pub read: u64,
    /// VMWRITE.
    pub write: u64,
}

/// How PAUSE-loop exiting finds a loop. SDM Vol. 3C 26.1.3 "Instructions That Cause VM Exits Conditionally", PAUSE.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct PauseLoop {
    /// Cycles between two executions of one loop at most.
    pub gap: u32,
    /// Cycles that a loop may take.
    pub window: u32,
    /// The time-stamp counter at the first execution of the loop.
    pub first: u64,
    /// The same at the last one.
    pub last: u64,
}

impl PauseLoop {
    /// PAUSE at ring 0: whether it causes a VM exit.
    fn exits(&mut self, now: u64) -> bool {
        if now.wrapping_sub(self.last) > self.gap.into() {
            self.first = now;
        }
        self.last = now;
        now.wrapping_sub(self.first) > self.window.into()
    }
}

/// What a VM exit leaves in the VM-exit information fields.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct ExitInformation {
    pub reason: ExitReason,
    pub qualification: u64,
    /// The length of the instruction that caused it; 0 where no instruction did.
    pub length: u8,
    pub instruction: u32,
    pub linear: u64,
    pub physical: u64,
    pub interruption: Interruption,
    pub error: u32,
    /// The event whose delivery met it.
    pub vectoring: Option<Vectoring>,
    /// It may become a virtualization exception.
    pub convertible: bool,
}

/// An event that is being delivered, as the IDT-vectoring information field has it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Vectoring {
    pub information: Interruption,
    pub error: u32,
    /// Of the instruction, for software interrupts and software exceptions.
    pub length: u8,
}

impl Vectoring {
    /// An event that is delivered between instructions.
    pub fn of(event: Event) -> Vectoring {
        Vectoring {
            information: Interruption::event(kind(event), event.vector, event.error.is_some()),
            error: event.error.unwrap_or(0),
            length: 0,
        }
    }

    /// INT n, or with `short` INT3 or INTO, or INT1.
    pub fn of_instruction(event: Event, short: bool, length: u8) -> Vectoring {
        let kind = match event.source {
            Source::Software if short => EventKind::SoftwareException,
            _ => kind(event),
        };
        Vectoring {
            information: Interruption::event(kind, event.vector, false),
            error: 0,
            length,
        }
    }
}

/// The type of an event in interruption information.
fn kind(event: Event) -> EventKind {
    match event.source {
        Source::External => EventKind::External,
        Source::Nmi => EventKind::Nmi,
        Source::Exception => EventKind::Hardware,
        Source::Software => EventKind::Software,
        Source::PrivilegedSoftware => EventKind::PrivilegedSoftware,
    }
}

impl ExitInformation {
    pub fn new(reason: ExitReason) -> ExitInformation {
        ExitInformation {
            reason,
            qualification: 0,
            length: 0,
            instruction: 0,
            linear: 0,
            physical: 0,
            interruption: Interruption::new(),
            error: 0,
            vectoring: None,
            convertible: false,
        }
    }

    pub fn qualified(self, qualification: u64) -> ExitInformation {
        ExitInformation { qualification, ..self }
    }
}

impl Guest {
    /// IF and the controls have it that an interrupt-window exit is due where interrupts could be delivered.
    fn interrupt_window(&self) -> bool {
        self.primary.contains(Primary::INTERRUPT_WINDOW)
    }

    /// CR0 as the guest reads it.
    fn cr0(&self, real: u64) -> u64 {
        real & !self.cr0_mask | self.cr0_shadow & self.cr0_mask
    }

    /// CR4 as the guest reads it.
    fn cr4(&self, real: u64) -> u64 {
        real & !self.cr4_mask | self.cr4_shadow & self.cr4_mask
    }

    fn scales_tsc(&self) -> bool {
        self.primary.contains(Primary::TSC_OFFSETTING) && self.secondary.contains(Secondary::TSC_SCALING)
    }

    /// How many ticks of the real time-stamp counter so many of the guest's take.
    pub(crate) fn ticks(&self, guest: u64) -> u64 {
        let multiplier = u128::from(self.tsc_multiplier);
        if !self.scales_tsc() || multiplier == 0 {
            return guest;
        }
        u64::try_from((u128::from(guest) << 48) / multiplier).unwrap_or(u64::MAX)
    }

    /// The time-stamp counter as the guest reads it. SDM Vol. 3C 26.3 "Changes to Instruction Behavior in VMX Non-Root Operation".
    pub(crate) fn tsc(&self, real: u64) -> u64 {
        if !self.primary.contains(Primary::TSC_OFFSETTING) {
            return real;
        }
        let scaled = if self.scales_tsc() {
            (u128::from(real) * u128::from(self.tsc_multiplier) >> 48) as u64
        } else {
            real
        };
        scaled.wrapping_add(self.tsc_offset)
    }
}

impl Cpu {
    /// The guest that runs, in VMX non-root operation.
    pub(crate) fn guest(&self) -> Option<&Guest> {
        self.vmx.as_ref()?.guest.as_ref()
    }

    pub(crate) fn guest_mut(&mut self) -> Option<&mut Guest> {
        self.vmx.as_mut()?.guest.as_mut()
    }

    /// The processor is in VMX non-root operation.
    #[inline]
    pub(crate) fn non_root(&self) -> bool {
        self.guest().is_some()
    }

    /// Non-root operation is concealed from Intel PT. SDM Vol. 3C 25.6.2, Table 25-7, "Conceal VMX from PT".
    pub(crate) fn concealed(&self) -> bool {
        self.guest()
            .is_some_and(|guest| guest.secondary.contains(Secondary::CONCEAL_FROM_PT))
    }

    /// IA32_RTIT_CTL cannot be written: the part has no Intel PT in VMX operation. SDM Vol. 3C 33.2.8.2 "IA32_RTIT_CTL MSR".
    pub(crate) fn trace_locked(&self) -> bool {
        self.vmx.is_some() && self.vmx_caps.is_some_and(|caps| !caps.trace)
    }

    /// What tells the present translations apart.
    pub(crate) fn vmx_tag(&self) -> VmxTag {
        self.guest().map_or(VmxTag::default(), |guest| VmxTag {
            vpid: guest.vpid,
            ept: guest.ept.map_or(0, EptPointer::into_bits),
        })
    }

    /// The guest of the running VMCS has CR0 and CR4 shadowed: what it reads of them.
    pub(crate) fn cr0_read(&self) -> u64 {
        let real = self.cr0.into_bits();
        self.guest().map_or(real, |guest| guest.cr0(real))
    }

    /// See [`Cpu::cr0_read`].
    pub(crate) fn cr4_read(&self) -> u64 {
        let real = self.cr4.into_bits();
        self.guest().map_or(real, |guest| guest.cr4(real))
    }

    /// What a value that is moved to CR0 loads: bits that the VMM owns stay. SDM Vol. 3C 26.3.
    pub(crate) fn cr0_moved(&self, value: u64) -> u64 {
        let real = self.cr0.into_bits();
        self.guest()
            .map_or(value, |guest| value & !guest.cr0_mask | real & guest.cr0_mask)
    }

    /// See [`Cpu::cr0_moved`].
    pub(crate) fn cr4_moved(&self, value: u64) -> u64 {
        let real = self.cr4.into_bits();
        self.guest()
            .map_or(value, |guest| value & !guest.cr4_mask | real & guest.cr4_mask)
    }

    /// Whether VMX operation lets CR0 and CR4 have these values. SDM Vol. 3C 24.8 "Restrictions on VMX Operation".
    pub(crate) fn vmx_allows(&self, cr0: u64, cr4: u64) -> bool {
        let Some(vmx) = &self.vmx else { return true };
        let fixed = vmx.cr0_fixed();
        cr0 & fixed == fixed && cr4 & x86::vmx::caps::CR4_FIXED0 == x86::vmx::caps::CR4_FIXED0
    }

    /// The time-stamp counter as software reads it.
    pub(crate) fn tsc_read(&self, real: u64) -> u64 {
        self.guest().map_or(real, |guest| guest.tsc(real))
    }

    /// Leaves for a VM exit: `return Err(c.vm_exit(...))`. The instruction has not retired.
    #[cold]
    pub(crate) fn vm_exit(&mut self, exit: ExitInformation) -> Stop {
        self.exit = Some(Box::new(exit));
        self.stop = Reason::VmExit;
        Stop
    }

    /// External interrupts cause VM exits.
    fn interrupts_exit(&self) -> bool {
        self.guest()
            .is_some_and(|guest| guest.pin.contains(Pin::EXTERNAL_INTERRUPTS))
    }

    /// An external interrupt that is delivered now causes a VM exit that leaves it pending.
    pub fn exits_unacknowledged(&self) -> bool {
        self.interrupts_exit()
            && self
                .guest()
                .is_some_and(|guest| !guest.exit.contains(Exit::ACKNOWLEDGE))
    }

    /// A VM entry has yet to inject its event.
    pub(crate) fn entry_under_way(&self) -> bool {
        self.guest().is_some_and(|guest| guest.injected.is_some())
    }

    /// IF lets an external interrupt in, or the VMM that gets it.
    pub(crate) fn interrupts_enabled(&self) -> bool {
        self.rflags & rf::IF != 0 || self.interrupts_exit()
    }

    /// NMIs are held off until IRET. With virtual NMIs it is those that are.
    pub(crate) fn nmis_held_off(&self) -> bool {
        let virtual_nmis = self.guest().is_some_and(|guest| guest.pin.contains(Pin::VIRTUAL_NMIS));
        self.nmi_blocked && !virtual_nmis
    }

    /// IRET: which NMIs it unblocks. SDM Vol. 3C 26.3, IRET.
    pub(crate) fn unblock_nmis(&mut self) {
        match self.guest_mut() {
            Some(guest) if guest.pin.contains(Pin::VIRTUAL_NMIS) => guest.virtual_nmi_blocked = false,
            Some(guest) if guest.pin.contains(Pin::NMIS) => {}
            _ => {
                self.bus_used |= self.want_nmi && self.nmi_blocked;
                self.nmi_blocked = false;
            }
        }
    }

    /// The run loop has to look as soon as IF is set: an interrupt-window exit or a virtual interrupt waits.
    pub(crate) fn window_wanted(&self) -> bool {
        self.guest()
            .is_some_and(|guest| guest.interrupt_window() || guest.apic.recognized)
    }

    /// The exit that is due before the next instruction: APIC virtualization, monitor trap flag, VMX-preemption timer, NMI window, interrupt
    /// window, in the order of their priorities. SDM Vol. 3C 26.2 "Other Causes of VM Exits", 26.5.1 "VMX-Preemption Timer", 26.5.2
    /// "Monitor Trap Flag".
    pub(crate) fn boundary_exit(&mut self) -> Option<ExitInformation> {
        let guest = self.guest()?;
        // SDM Vol. 3C 30.4.3.2: APIC-write emulation comes before SMIs, INIT signals, and whatever has less priority than they.
        match guest.apic.exit {
            None => {}
            Some(ApicExit::TprBelowThreshold) => return Some(ExitInformation::new(ExitReason::TprBelowThreshold)),
            Some(ApicExit::Eoi(vector)) => {
                return Some(ExitInformation::new(ExitReason::VirtualizedEoi).qualified(vector.into()));
            }
            Some(ApicExit::Write(offset)) => {
                return Some(ExitInformation::new(ExitReason::ApicWrite).qualified(offset.into()));
            }
        }
        if guest.trace_fault.is_some() {
            match self.trace_exit() {
                Some(exit) => return Some(exit),
                // What was missing has come, or what was misconfigured is not any more.
                None => self.guest_mut()?.trace_fault = None,
            }
        }
        let guest = self.guest()?;
        if guest.monitor_trap {
            return Some(ExitInformation::new(ExitReason::MonitorTrap));
        }
        // Debug exceptions come first.
        if self.debug_due() {
            return None;
        }
        if self.timer_left() == Some(0) && self.activity != Activity::WaitForSipi {
            return Some(ExitInformation::new(ExitReason::PreemptionTimer));
        }
        let guest = self.guest()?;
        let now = self.steps_now();
        let shadowed = self.shadow_at == now || self.stack_shadow_at == now;
        if shadowed {
            return None;
        }
        if guest.primary.contains(Primary::NMI_WINDOW) && !guest.virtual_nmi_blocked {
            return Some(ExitInformation::new(ExitReason::NmiWindow));
        }
        (guest.interrupt_window() && self.rflags & rf::IF != 0)
            .then(|| ExitInformation::new(ExitReason::InterruptWindow))
    }

    /// Steps until the VMX-preemption timer has counted down; `None` if it is not activated. The time-stamp counter counts steps while the
    /// processor runs.
    pub(crate) fn timer_left(&mut self) -> Option<u64> {
        let at = self.guest()?.timer?;
        let now = self.tsc_now();
        Some(at.saturating_sub(now))
    }

    /// The value of the time-stamp counter at which the VMX-preemption timer of the running guest has counted down.
    pub(crate) fn preemption_timer(&self) -> Option<u64> {
        self.guest()?.timer
    }

    /// The activity state is an inactive one in which the VMX-preemption timer causes a VM exit: any but wait-for-SIPI. SDM Vol. 3C 26.5.1
    /// "VMX-Preemption Timer".
    pub(crate) fn timer_wakes(&self) -> bool {
        matches!(self.activity, Activity::Halted | Activity::Waiting | Activity::Shutdown)
    }

    /// The guest has written the time-stamp counter, or what it is adjusted by: the VMX-preemption timer counts on from where it was.
    pub(crate) fn timer_moved(&mut self, before: u64, after: u64) {
        if let Some(timer) = self.guest_mut().and_then(|guest| guest.timer.as_mut()) {
            *timer = timer.wrapping_add(after.wrapping_sub(before));
        }
    }

    /// The monitor trap flag has the guest leave before the next instruction.
    pub(crate) fn trap_by_monitor(&mut self) {
        if let Some(guest) = self.guest_mut()
            && guest.primary.contains(Primary::MONITOR_TRAP)
        {
            guest.monitor_trap = true;
        }
    }

    /// Each instruction of the guest is followed by a VM exit.
    pub(crate) fn monitor_trap(&self) -> bool {
        self.guest()
            .is_some_and(|guest| guest.primary.contains(Primary::MONITOR_TRAP))
    }

    /// The VM exit that an event causes that is about to be delivered, if it causes one. SDM Vol. 3C 26.2.
    pub(crate) fn event_exit(&mut self, event: Event) -> Option<ExitInformation> {
        let guest = self.guest()?;
        let error = event.error.unwrap_or(0);
        let exits = match event.source {
            Source::External => guest.pin.contains(Pin::EXTERNAL_INTERRUPTS),
            Source::Nmi => guest.pin.contains(Pin::NMIS),
            // Those have been looked at where the instruction was.
            Source::Software => false,
            Source::Exception | Source::PrivilegedSoftware => {
                let bit = guest.exceptions >> event.vector & 1 != 0;
                if event.vector == 14 {
                    // SDM Vol. 3C 26.2, page faults: the bit decides where mask and match agree, and its opposite elsewhere.
                    bit == (error & guest.page_fault_mask == guest.page_fault_match)
                } else {
                    bit
                }
            }
        };
        if !exits {
            return None;
        }
        let reason = match event.source {
            Source::External => ExitReason::ExternalInterrupt,
            _ => ExitReason::ExceptionOrNmi,
        };
        let mut exit = ExitInformation::new(reason);
        exit.interruption = Interruption::event(kind(event), event.vector, event.error.is_some());
        exit.error = error;
        if event.source == Source::External && !self.guest()?.exit.contains(Exit::ACKNOWLEDGE) {
            exit.interruption = Interruption::new();
        }
        match (event.source, event.vector) {
            // The registers stay as they were. SDM Vol. 3C 28.1 "Architectural State Before a VM Exit".
            (Source::Exception, 14) => {
                exit.qualification = self.cr2;
                self.cr2 = self.cr2_before;
            }
            (Source::Exception | Source::PrivilegedSoftware, 1) => {
                // B0 to B3, BD and BS. SDM Vol. 3C Table 28-1 "Exit Qualification for Debug Exceptions".
                exit.qualification = self.debug_conditions & 0x600f;
                self.dr[6] = self.dr6_before;
            }
            _ => {}
        }
        Some(exit)
    }

    /// Reads the current VMCS.
    pub(crate) fn read_vmcs(&mut self, at: u64) -> Vmcs {
        let mut bytes = [0; REGION];
        // The region was RAM when the pointer was loaded, and memory does not go away.
        let _ = self.shared().ram.read(at, &mut bytes);
        Vmcs::from_bytes(&bytes)
    }

    /// Writes the region of a VMCS whole.
    pub(crate) fn write_vmcs(&mut self, at: u64, vmcs: &Vmcs) {
        let _ = self.shared().write_ram(at, &vmcs.to_bytes());
    }

    /// Sets one field of a VMCS.
    pub(crate) fn write_vmcs_field(&mut self, at: u64, field: Field, value: u64) {
        let mut slot = Vmcs::default();
        slot.set(field, value);
        let (offset, value) = (8 * field.slot() as u64, slot.get(field));
        let _ = self.shared().write_ram(at + offset, &value.to_le_bytes());
    }
}
