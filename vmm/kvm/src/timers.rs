//! KVM's own timers: those of its local APICs, and its interval timer.
//!
//! They run by the kernel's clock, whether the CPUs run or not. While the machine stands still they have to stand, too: else what
//! comes due meanwhile comes at once when the guest goes on, early by its clock.

use devices::platform::GSI_PIT;
use kvm_bindings::{kvm_lapic_state, kvm_pit_channel_state, kvm_pit_state2};
use kvm_ioctls::{VcpuFd, VmFd};
use x86::msr::IA32_TSC_DEADLINE;

use crate::error::{KvmError, refused};
use crate::kernel_irqchip::{register, set_register};
use crate::{msrs, sys};

/// Registers of a local APIC. SDM Vol. 3A Table 11-1 "Local APIC Register Address Map".
const LVT_TIMER: usize = 0x320;
const INITIAL_COUNT: usize = 0x380;
const CURRENT_COUNT: usize = 0x390;
/// The mask of an entry of the local vector table, and of one of the IOAPIC's.
const MASKED: u32 = 1 << 16;
/// The interval timer's clock in Hz.
const PIT_HZ: i64 = 1_193_182;
/// What KVM has for a mode in a channel that none has been set for; the 8254's are 0 to 5.
const NO_MODE: u8 = 0xff;

/// What a CPU's timer has still to count.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Left {
    /// It is off, or has come to its end.
    Nothing,
    /// Its registers.
    Counts {
        /// The initial count.
        initial: u32,
        /// The current count.
        current: u32,
    },
    /// The time-stamp counter's value that it waits for.
    Deadline(u64),
}

/// The timers of a machine that stands still.
#[derive(Debug)]
pub struct Timers {
    cpus: Vec<Left>,
    /// The interval timer, where it was counting, and when that was.
    pit: Option<(kvm_pit_state2, i64)>,
}

/// Bits 18:17 of the timer's entry. SDM Vol. 3A Figure 11-8 "Local Vector Table (LVT)".
fn left(lapic: &kvm_lapic_state, deadline: u64) -> Left {
    let entry = register(lapic, LVT_TIMER);
    let (initial, current) = (register(lapic, INITIAL_COUNT), register(lapic, CURRENT_COUNT));
    match (entry >> 17 & 3, deadline) {
        (0, _) if current != 0 => Left::Counts { initial, current },
        (1, _) if initial != 0 => Left::Counts { initial, current },
        (0 | 1, _) | (_, 0) => Left::Nothing,
        (_, deadline) => Left::Deadline(deadline),
    }
}

fn lapic(vcpu: &VcpuFd) -> Result<kvm_lapic_state, KvmError> {
    vcpu.get_lapic().map_err(refused("KVM_GET_LAPIC"))
}

/// IA32_TSC_DEADLINE, which is 0 once the time has come.
fn deadline(vcpu: &VcpuFd) -> Result<u64, KvmError> {
    let values = msrs::read(|list| vcpu.get_msrs(list), &[IA32_TSC_DEADLINE])?;
    Ok(values.first().copied().unwrap_or(0))
}

fn set_deadline(vcpu: &VcpuFd, deadline: u64) -> Result<(), KvmError> {
    msrs::write(vcpu, &[(IA32_TSC_DEADLINE, deadline)])
}

/// Has a timer count from here; KVM begins with the current count that it is given.
fn set_counts(vcpu: &VcpuFd, initial: u32, current: u32) -> Result<(), KvmError> {
    let mut state = lapic(vcpu)?;
    set_register(&mut state, INITIAL_COUNT, initial);
    set_register(&mut state, CURRENT_COUNT, current);
    vcpu.set_lapic(&state).map_err(refused("KVM_SET_LAPIC"))
}

/// Whether a halted CPU's own timer will interrupt it.
///
/// # Errors
/// One line: what KVM refused.
pub fn is_armed(vcpu: &VcpuFd) -> Result<bool, KvmError> {
    let state = lapic(vcpu)?;
    Ok(register(&state, LVT_TIMER) & MASKED == 0 && left(&state, deadline(vcpu)?) != Left::Nothing)
}

/// Whether the first channel of an interval timer has something to come. `now`: the time that it counts by.
fn counts(channel: &kvm_pit_channel_state, now: i64) -> bool {
    let period = i64::from(channel.count) * 1_000_000_000 / PIT_HZ;
    match channel.mode {
        2 | 3 => true,
        0 | 1 | 4 => now.saturating_sub(channel.count_load_time) < period,
        _ => false,
    }
}

/// Whether KVM's interval timer may interrupt a CPU: it is counting, and a controller lets it through. What cannot be found out is
/// taken for yes.
pub fn interval_timer_wakes(vm: &VmFd) -> bool {
    let Ok(state) = vm.get_pit2() else { return true };
    let masked = |(pic, ioapic): (u8, [u64; 24])| pic & 1 != 0 && ioapic[usize::from(GSI_PIT)] & u64::from(MASKED) != 0;
    counts(&state.channels[0], sys::monotonic()) && !sys::masks(vm).is_ok_and(masked)
}

impl Timers {
    /// Has all of them stand.
    ///
    /// # Errors
    /// One line: what KVM refused.
    pub fn stop<'a>(vm: &VmFd, vcpus: impl Iterator<Item = &'a VcpuFd>) -> Result<Self, KvmError> {
        let stop = |vcpu: &VcpuFd| {
            let left = left(&lapic(vcpu)?, deadline(vcpu)?);
            match left {
                Left::Nothing => {}
                Left::Counts { .. } => set_counts(vcpu, 0, 0)?,
                Left::Deadline(_) => set_deadline(vcpu, 0)?,
            }
            Ok(left)
        };
        let cpus = vcpus.map(stop).collect::<Result<_, KvmError>>()?;
        let state = vm.get_pit2().map_err(refused("KVM_GET_PIT2"))?;
        let now = sys::monotonic();
        let pit = counts(&state.channels[0], now).then_some((state, now));
        if let Some((mut state, _)) = pit {
            state.channels[0].mode = NO_MODE;
            vm.set_pit2(&state).map_err(refused("KVM_SET_PIT2"))?;
        }
        Ok(Timers { cpus, pit })
    }

    /// Has a CPU's go on from where it stands. Its time-stamp counter is right again.
    ///
    /// # Errors
    /// One line: what KVM refused.
    pub fn go_on(&self, cpu: usize, vcpu: &VcpuFd) -> Result<(), KvmError> {
        match self.cpus[cpu] {
            Left::Nothing => Ok(()),
            Left::Counts { initial, current } => set_counts(vcpu, initial, current),
            Left::Deadline(deadline) => set_deadline(vcpu, deadline),
        }
    }

    /// The same of the interval timer, whose first channel begins a period.
    ///
    /// # Errors
    /// One line: what KVM refused.
    pub fn go_on_with_intervals(&self, vm: &VmFd) -> Result<(), KvmError> {
        let Some((mut state, then)) = self.pit else {
            return Ok(());
        };
        for channel in &mut state.channels {
            channel.count_load_time += sys::monotonic() - then;
        }
        vm.set_pit2(&state).map_err(refused("KVM_SET_PIT2"))
    }
}

#[cfg(test)]
#[path = "timers_test.rs"]
mod tests;
