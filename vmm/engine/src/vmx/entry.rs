//! VM entries (SDM Vol. 3C chapter 27 "VM Entries").

use x86::msr::IA32_RTIT_CTL;
use x86::vmx::caps::TIMER_RATE;
use x86::vmx::check::{self, Processor};
use x86::vmx::controls::{Entry, Pin, Secondary};
use x86::vmx::ept::EptPointer;
use x86::vmx::exits::{EventKind, Interruption};
use x86::vmx::fields::Launch;
use x86::vmx::{ExitReason, Field, InstructionError, Vmcs};

use super::{Guest, PauseLoop, ShadowBitmaps, Vectoring, VirtualApic};
use crate::Engine;
use crate::cpu::{Cpu, Event, Source};

impl Guest {
    fn of(v: &Vmcs) -> Guest {
        let secondary = v.secondary();
        Guest {
            pin: v.pin(),
            primary: v.primary(),
            secondary,
            exit: v.exit_controls(),
            entry: v.entry_controls(),
            exceptions: v.get32(Field::EXCEPTION_BITMAP),
            page_fault_mask: v.get32(Field::PAGE_FAULT_MASK),
            page_fault_match: v.get32(Field::PAGE_FAULT_MATCH),
            cr0_mask: v.get(Field::CR0_MASK),
            cr0_shadow: v.get(Field::CR0_SHADOW),
            cr4_mask: v.get(Field::CR4_MASK),
            cr4_shadow: v.get(Field::CR4_SHADOW),
            cr3_targets: (0..v.get32(Field::CR3_TARGET_COUNT))
                .map(|n| v.get(Field(Field::CR3_TARGET_0.0 + 2 * n)))
                .collect(),
            io_bitmaps: [v.get(Field::IO_BITMAP_A), v.get(Field::IO_BITMAP_B)],
            msr_bitmap: v.get(Field::MSR_BITMAP),
            tsc_offset: v.get(Field::TSC_OFFSET),
            tsc_multiplier: v.get(Field::TSC_MULTIPLIER),
            ept: secondary
                .contains(Secondary::EPT)
                .then(|| EptPointer::from_bits(v.get(Field::EPT_POINTER))),
            vpid: if secondary.contains(Secondary::VPID) {
                v.get(Field::VPID) as u16
            } else {
                0
            },
            apic: VirtualApic::of(v),
            xss_exiting: v.get(Field::XSS_EXITING),
            functions: v.get(Field::VM_FUNCTIONS),
            eptp_list: v.get(Field::EPTP_LIST),
            ept_index: v.get(Field::EPTP_INDEX) as u16,
            exception_area: v.get(Field::VIRTUALIZATION_EXCEPTION_AREA),
            page_log: v.get(Field::PML_ADDRESS),
            link_pointer: v.get(Field::LINK_POINTER),
            bitmaps: ShadowBitmaps {
                read: v.get(Field::VMREAD_BITMAP),
                write: v.get(Field::VMWRITE_BITMAP),
            },
            pause_loop: PauseLoop {
                gap: v.get32(Field::PLE_GAP),
                window: v.get32(Field::PLE_WINDOW),
                ..PauseLoop::default()
            },
            timer: None,
            monitor_trap: false,
            trace_fault: None,
            virtual_nmi_blocked: false,
            injected: None,
        }
    }
}

impl Cpu {
    /// Does something with what the checks of VM entry depend on.
    pub(super) fn with_processor<T>(&mut self, f: impl FnOnce(&Processor<'_>) -> T) -> Option<T> {
        let caps = self.vmx_caps?;
        let model = self.model;
        let units = &model.units;
        let (features, long_mode) = (self.features, self.efer.lma());
        let (physical_bits, linear_bits) = (self.maxphyaddr, self.linear_bits);
        let debugctl = units
            .debugctl
            .map_or(0, |caps| caps.writable_with(features) | caps.ignored);
        // The counters, and EN_PERF_METRICS.
        let perf_global_ctrl = units.pmu.map_or(0, |caps| {
            let metrics = caps.capabilities.unwrap_or(0) & x86::pmu::capabilities::METRICS != 0;
            (1u64 << caps.general) - 1 | ((1u64 << caps.fixed) - 1) << 32 | u64::from(metrics) << 48
        });
        let tracing = features.intel_pt() && self.msr_now(IA32_RTIT_CTL).is_some_and(|control| control & 1 != 0);
        let shared = self.shared();
        Some(f(&Processor {
            caps: &caps,
            features,
            physical_bits,
            linear_bits,
            long_mode,
            debugctl,
            perf_global_ctrl,
            model,
            tracing,
            read: &|at| shared.ram.read_phys(at, 8),
        }))
    }

    /// The checks that make VMLAUNCH and VMRESUME fail as instructions.
    pub(super) fn may_enter(&mut self, v: &Vmcs, launch: bool) -> Result<(), InstructionError> {
        match (v.launch(), launch) {
            (Launch::Launched, true) => return Err(InstructionError::VmlaunchNotClear),
            (Launch::Clear, false) => return Err(InstructionError::VmresumeNotLaunched),
            _ => {}
        }
        let checked = self.with_processor(|p| check::instruction(v, p));
        match checked {
            Some(Err((error, _))) => Err(error),
            _ => Ok(()),
        }
    }
}

impl Engine {
    /// The second half of VMLAUNCH and VMRESUME, once the instruction has retired: guest state is checked and loaded.
    pub(crate) fn enter_guest(&mut self, cpu: &mut Cpu, launch: bool) {
        let Some(at) = cpu.vmx.as_ref().and_then(|vmx| vmx.current) else {
            return;
        };
        let mut v = cpu.read_vmcs(at);
        let wrong = cpu.with_processor(|p| check::guest_state(&v, p).err());
        if let Some(Some(rule)) = wrong {
            self.fail_entry(cpu, at, &mut v, ExitReason::GuestState, rule.qualification);
            return;
        }
        let from = cpu.linear(cpu.rip.wrapping_sub(3));
        let mut guest = Guest::of(&v);
        let information = v.get32(Field::ENTRY_INTERRUPTION);
        if Interruption::from_bits(information).valid() {
            let (error, length) = (
                v.get32(Field::ENTRY_ERROR_CODE),
                v.get(Field::ENTRY_INSTRUCTION_LENGTH) as u8,
            );
            guest.injected = Some((information, error, length));
        }
        cpu.leave_world();
        if let Some(vmx) = &mut cpu.vmx {
            vmx.guest = Some(guest);
        }
        cpu.load_guest(&v);
        cpu.load_guest_units(&v);
        let (list, count) = (v.get(Field::ENTRY_MSR_LOAD), v.get(Field::ENTRY_MSR_LOAD_COUNT));
        if let Err(entry) = cpu.load_msrs(list, count) {
            self.fail_entry(cpu, at, &mut v, ExitReason::MsrLoading, entry);
            return;
        }
        if launch {
            v.set_launch(Launch::Launched);
            cpu.write_vmcs(at, &v);
        }
        cpu.changed_world();
        cpu.start_timer(v.get32(Field::PREEMPTION_TIMER));
        cpu.want_window |= cpu.window_wanted();
        cpu.bus_used |= cpu.init_pending;
        cpu.enter_virtual_apic();
        let told = !v.entry_controls().contains(Entry::CONCEAL_FROM_PT);
        self.transferred(cpu, from, 0, told, None);
    }

    /// Injects the event of a VM entry, before the guest's first instruction. SDM Vol. 3C 27.6 "Event Injection".
    pub(crate) fn inject_entry_event(&mut self, cpu: &mut Cpu) {
        let Some((information, error, length)) = cpu.guest_mut().and_then(|guest| guest.injected.take()) else {
            return;
        };
        let information = Interruption::from_bits(information);
        if information.kind() == EventKind::Other as u8 {
            // SDM Vol. 3C 27.6.2 "Injection of Pending MTF VM Exits".
            if let Some(guest) = cpu.guest_mut() {
                guest.monitor_trap = true;
            }
            return;
        }
        let source = match information.kind() {
            0 => Source::External,
            2 => Source::Nmi,
            4 | 6 => Source::Software,
            5 => Source::PrivilegedSoftware,
            _ => Source::Exception,
        };
        let event = Event {
            vector: information.vector(),
            error: information.error_code().then_some(error),
            source,
        };
        let software = matches!(source, Source::Software | Source::PrivilegedSoftware);
        let length = if software { length } else { 0 };
        let stands = cpu.rip;
        cpu.injecting = Some((
            Vectoring {
                information,
                error,
                length,
            },
            stands,
        ));
        cpu.rip = stands.wrapping_add(length.into()) & cpu.ip_mask;
        if information.kind() == EventKind::Nmi as u8 {
            match cpu.guest_mut() {
                Some(guest) if guest.pin.contains(Pin::VIRTUAL_NMIS) => {
                    guest.virtual_nmi_blocked = true;
                }
                _ => cpu.nmi_blocked = true,
            }
        }
        self.deliver(cpu, event);
        cpu.injecting = None;
    }
}

impl Cpu {
    /// Starts the VMX-preemption timer, if it is activated. It counts down each time that bit [`TIMER_RATE`] of the time-stamp counter
    /// changes. SDM Vol. 3C 26.5.1 "VMX-Preemption Timer".
    fn start_timer(&mut self, value: u32) {
        let now = self.tsc_now() >> TIMER_RATE;
        if let Some(guest) = self.guest_mut()
            && guest.pin.contains(Pin::PREEMPTION_TIMER)
        {
            guest.timer = Some(now.saturating_add(value.into()) << TIMER_RATE);
        }
    }

    /// What the VMX-preemption timer has come to.
    pub(super) fn timer_value(&mut self) -> Option<u32> {
        let at = self.guest()?.timer? >> TIMER_RATE;
        let now = self.tsc_now() >> TIMER_RATE;
        Some(at.saturating_sub(now) as u32)
    }
}
