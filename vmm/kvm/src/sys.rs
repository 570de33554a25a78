//! The calls into KVM that are `unsafe`, and what they share with the kernel.
//!
//! UNSAFETY: KVM is given memory (the guest's), a page is shared with it (`kvm_run`), three of its ioctls have no wrapper in
//! kvm-ioctls, and a thread is interrupted by a signal. Everything else of the driver goes through safe functions.
#![allow(unsafe_code)]

use std::io;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU8, Ordering};

use kvm_bindings::{
    KVM_EXIT_DEBUG, KVM_EXIT_FAIL_ENTRY, KVM_EXIT_HLT, KVM_EXIT_INTERNAL_ERROR, KVM_EXIT_INTR, KVM_EXIT_IO,
    KVM_EXIT_IO_OUT, KVM_EXIT_IRQ_WINDOW_OPEN, KVM_EXIT_MMIO, KVM_EXIT_SET_TPR, KVM_EXIT_SHUTDOWN, KVM_EXIT_UNKNOWN,
    KVM_EXIT_X86_RDMSR, KVM_EXIT_X86_WRMSR, KVM_GUESTDBG_ENABLE, KVM_GUESTDBG_SINGLESTEP, KVM_INTERNAL_ERROR_EMULATION,
    KVM_IRQCHIP_IOAPIC, KVM_IRQCHIP_PIC_MASTER, KVM_VCPU_TSC_CTRL, KVM_VCPU_TSC_OFFSET, kvm_device_attr,
    kvm_guest_debug, kvm_guest_debug_arch, kvm_interrupt, kvm_irqchip, kvm_reinject_control, kvm_run,
    kvm_userspace_memory_region, kvm_xsave,
};
use kvm_ioctls::{VcpuFd, VmFd};
use libc::{c_int, c_ulong, c_void, pthread_t, siginfo_t};
use vm_memory::{GuestMemoryBackend, GuestMemoryRegion};
use vmm_sys_util::ioctl::ioctl_with_ref;
use vmm_sys_util::signal::{SIGRTMIN, register_signal_handler};

use machine::memory::Memory;

/// _IOW(KVMIO, 86H, struct kvm_interrupt).
const KVM_INTERRUPT: c_ulong = 0x4004_ae86;
/// _IOW(KVMIO, E1H, struct kvm_device_attr), and with E2H and E3H.
const KVM_SET_DEVICE_ATTR: c_ulong = 0x4018_aee1;
/// _IO(KVMIO, 71H), which takes a structure all the same.
const KVM_REINJECT_CONTROL: c_ulong = 0xae71;

/// Gives KVM the guest's memory.
///
/// # Errors
/// KVM refuses.
pub fn lend(vm: &VmFd, memory: &Memory) -> io::Result<()> {
    for (slot, region) in memory.mmap().iter().enumerate() {
        let region = kvm_userspace_memory_region {
            slot: slot as u32,
            flags: 0,
            guest_phys_addr: region.start_addr().0,
            memory_size: region.len(),
            userspace_addr: region.get_mmap().as_ptr() as u64,
        };
        // SAFETY: The range is a mapping of guest memory, which nobody holds references into; it stays mapped as long as
        // the machine lives, and the guest runs only while its machine is borrowed.
        unsafe { vm.set_user_memory_region(region) }?;
    }
    Ok(())
}

/// The host's time-stamp counter.
pub fn host_tsc() -> u64 {
    // SAFETY: RDTSC reads a counter and touches nothing.
    unsafe { core::arch::x86_64::_rdtsc() }
}

/// Loads an XSAVE area without components that have to be asked for (AMX).
///
/// # Errors
/// KVM refuses: a reserved bit is set.
pub fn set_xsave(vcpu: &VcpuFd, xsave: &kvm_xsave) -> io::Result<()> {
    // SAFETY: KVM reads 4096 bytes unless a process has asked for larger components, which this one never does.
    unsafe { vcpu.set_xsave(xsave) }.map_err(io::Error::from)
}

/// Queues an interrupt for the next entry.
///
/// # Errors
/// KVM has an APIC of its own.
pub fn interrupt(vcpu: &VcpuFd, vector: u8) -> io::Result<()> {
    let interrupt = kvm_interrupt { irq: vector.into() };
    // SAFETY: The argument is of the type that this ioctl reads.
    match unsafe { ioctl_with_ref(vcpu, KVM_INTERRUPT, &interrupt) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Sets what the guest's time-stamp counter is ahead of the host's, modulo 2^64.
///
/// # Errors
/// A KVM that has no such attribute (before Linux 5.16).
pub fn set_tsc_offset(vcpu: &VcpuFd, offset: u64) -> io::Result<()> {
    let attribute = kvm_device_attr {
        flags: 0,
        group: KVM_VCPU_TSC_CTRL,
        attr: KVM_VCPU_TSC_OFFSET.into(),
        addr: &raw const offset as u64,
    };
    // SAFETY: The argument is of the type that this ioctl reads, and it leads to the eight bytes that this attribute has.
    match unsafe { ioctl_with_ref(vcpu, KVM_SET_DEVICE_ATTR, &attribute) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Has the next entry end after an instruction, or no longer.
///
/// # Errors
/// KVM refuses.
pub fn debug(vcpu: &VcpuFd, steps: bool) -> io::Result<()> {
    let kinds = if steps { KVM_GUESTDBG_SINGLESTEP } else { 0 };
    guest_debug(vcpu, kinds, [0; 8])
}

/// KVM_SET_GUEST_DEBUG with these kinds, or with none, and what the host's debug registers hold instead of the guest's if
/// KVM_GUESTDBG_USE_HW_BP is among them.
///
/// # Errors
/// KVM refuses.
pub fn guest_debug(vcpu: &VcpuFd, kinds: u32, registers: [u64; 8]) -> io::Result<()> {
    let debug = kvm_guest_debug {
        control: if kinds == 0 { 0 } else { kinds | KVM_GUESTDBG_ENABLE },
        arch: kvm_guest_debug_arch { debugreg: registers },
        ..Default::default()
    };
    vcpu.set_guest_debug(&debug).map_err(io::Error::from)
}

/// Has KVM's interval timer lose the ticks that nobody takes, as a line of edges does, instead of giving them later.
///
/// # Errors
/// KVM refuses.
pub fn lose_ticks(vm: &VmFd) -> io::Result<()> {
    let control = kvm_reinject_control::default();
    // SAFETY: The argument is of the type that this ioctl reads.
    match unsafe { ioctl_with_ref(vm, KVM_REINJECT_CONTROL, &control) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// The kernel's CLOCK_MONOTONIC in nanoseconds, which KVM's interval timer counts by.
pub fn monotonic() -> i64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: The kernel writes the structure that the pointer leads to.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut time) };
    time.tv_sec * 1_000_000_000 + time.tv_nsec
}

/// What of KVM's interrupt controllers keeps the interval timer's interrupt to itself: the first 8259's mask register, and the
/// IOAPIC's entries.
///
/// # Errors
/// KVM refuses.
pub fn masks(vm: &VmFd) -> io::Result<(u8, [u64; 24])> {
    let chip = |chip_id: u32| {
        let mut chip = kvm_irqchip {
            chip_id,
            ..Default::default()
        };
        vm.get_irqchip(&mut chip).map(|()| chip.chip)
    };
    let (pic, ioapic) = (chip(KVM_IRQCHIP_PIC_MASTER)?, chip(KVM_IRQCHIP_IOAPIC)?);
    // SAFETY: The kernel has filled in the member that `chip_id` names; all of them are plain numbers.
    unsafe { Ok((pic.pic.imr, ioapic.ioapic.redirtbl.map(|entry| entry.bits))) }
}

/// Why KVM_RUN came back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reason {
    /// IN or OUT: `count` times `size` bytes, which [`port_data`] leads to.
    Port {
        /// The port.
        port: u16,
        /// Bytes an access.
        size: u8,
        /// OUT.
        write: bool,
    },
    /// An access to memory that is none: [`mmio_data`].
    Mmio {
        /// Guest-physical address.
        gpa: u64,
        /// Bytes: 1 to 8.
        len: u8,
        /// A store.
        write: bool,
    },
    /// RDMSR: [`set_msr`] answers it.
    ReadMsr(u32),
    /// WRMSR: [`set_msr`] answers it.
    WriteMsr(u32, u64),
    /// HLT.
    Halt,
    /// Interrupts have become deliverable.
    Window,
    /// Triple fault.
    Shutdown,
    /// A signal, or [`Kick::kick`].
    Kicked,
    /// A debug exception, or INT3, that was asked for with [`guest_debug`].
    Debug {
        /// 1 or 3.
        vector: u8,
        /// DR6, of a debug exception: its own bits, and those that are always 1.
        dr6: u64,
    },
    /// KVM cannot execute the instruction at RIP.
    Emulation,
    /// KVM_RUN itself fails, with this error number.
    Refused(i32),
    /// Something that no guest should cause: KVM's words for it.
    Failure {
        /// `exit_reason`.
        reason: u32,
        /// The suberror, or the hardware's reason.
        detail: u64,
    },
}

/// Enters the guest.
pub fn run(vcpu: &mut VcpuFd) -> Reason {
    let ran = vcpu.run().map(drop);
    if let Err(error) = ran {
        return match error.errno() {
            libc::EINTR | libc::EAGAIN => Reason::Kicked,
            errno => Reason::Refused(errno),
        };
    }
    let run = vcpu.get_kvm_run();
    let reason = run.exit_reason;
    // SAFETY: The kernel has filled in the member that `exit_reason` names; all of them are plain numbers.
    unsafe {
        match reason {
            KVM_EXIT_IO => {
                let io = run.__bindgen_anon_1.io;
                Reason::Port {
                    port: io.port,
                    size: io.size,
                    write: u32::from(io.direction) == KVM_EXIT_IO_OUT,
                }
            }
            KVM_EXIT_MMIO => {
                let mmio = run.__bindgen_anon_1.mmio;
                Reason::Mmio {
                    gpa: mmio.phys_addr,
                    len: mmio.len.min(8) as u8,
                    write: mmio.is_write != 0,
                }
            }
            KVM_EXIT_X86_RDMSR => Reason::ReadMsr(run.__bindgen_anon_1.msr.index),
            KVM_EXIT_X86_WRMSR => {
                let msr = run.__bindgen_anon_1.msr;
                Reason::WriteMsr(msr.index, msr.data)
            }
            KVM_EXIT_HLT => Reason::Halt,
            KVM_EXIT_IRQ_WINDOW_OPEN => Reason::Window,
            KVM_EXIT_SHUTDOWN => Reason::Shutdown,
            KVM_EXIT_DEBUG => {
                let debug = run.__bindgen_anon_1.debug.arch;
                Reason::Debug {
                    vector: debug.exception as u8,
                    dr6: debug.dr6,
                }
            }
            // MOV to CR8 has let interrupts in, or a signal came: there is something to look at.
            KVM_EXIT_SET_TPR | KVM_EXIT_INTR => Reason::Kicked,
            KVM_EXIT_INTERNAL_ERROR => match run.__bindgen_anon_1.internal.suberror {
                KVM_INTERNAL_ERROR_EMULATION => Reason::Emulation,
                suberror => Reason::Failure {
                    reason,
                    detail: suberror.into(),
                },
            },
            KVM_EXIT_FAIL_ENTRY => Reason::Failure {
                reason,
                detail: run.__bindgen_anon_1.fail_entry.hardware_entry_failure_reason,
            },
            KVM_EXIT_UNKNOWN => Reason::Failure {
                reason,
                detail: run.__bindgen_anon_1.hw.hardware_exit_reason,
            },
            _ => Reason::Failure { reason, detail: 0 },
        }
    }
}

/// The same of a vCPU that nobody means to kick: a signal of anybody else's is no reason to stop.
pub fn run_unkicked(vcpu: &mut VcpuFd) -> Reason {
    loop {
        match run(vcpu) {
            Reason::Kicked => {}
            reason => return reason,
        }
    }
}

/// A [`Reason::Failure`] as KVM's documentation calls it.
pub fn failure(reason: u32, detail: u64) -> String {
    match reason {
        KVM_EXIT_FAIL_ENTRY => format!("KVM_EXIT_FAIL_ENTRY, the processor's reason {detail:#x}"),
        KVM_EXIT_INTERNAL_ERROR => format!("KVM_EXIT_INTERNAL_ERROR, suberror {detail}"),
        KVM_EXIT_UNKNOWN => format!("KVM_EXIT_UNKNOWN, the processor's reason {detail:#x}"),
        reason => format!("exit reason {reason}, which nothing asked for"),
    }
}

/// The bytes of all repetitions of a [`Reason::Port`].
pub fn port_data(vcpu: &mut VcpuFd) -> &mut [u8] {
    let run = vcpu.get_kvm_run();
    // SAFETY: Only asked for after KVM_EXIT_IO, whose member this is: plain numbers.
    let io = unsafe { run.__bindgen_anon_1.io };
    let first = (run as *mut kvm_run).cast::<u8>();
    // SAFETY: The kernel puts the data of all repetitions at this offset into the mapping that `kvm_run` begins, and has it fit
    // there. The slice borrows the vCPU, whose mapping it is.
    unsafe {
        std::slice::from_raw_parts_mut(
            first.add(io.data_offset as usize),
            io.count as usize * usize::from(io.size),
        )
    }
}

/// The bytes of a [`Reason::Mmio`].
pub fn mmio_data(vcpu: &mut VcpuFd) -> &mut [u8; 8] {
    // SAFETY: Only asked for after KVM_EXIT_MMIO, whose member this is; any bytes are bytes.
    unsafe { &mut vcpu.get_kvm_run().__bindgen_anon_1.mmio.data }
}

/// Answers a [`Reason::ReadMsr`] or [`Reason::WriteMsr`]: what is read (0 where it is a write), or `None` for #GP(0).
pub fn set_msr(vcpu: &mut VcpuFd, answer: Option<u64>) {
    // SAFETY: Only called after the exits whose member this is, which is plain numbers.
    let msr = unsafe { &mut vcpu.get_kvm_run().__bindgen_anon_1.msr };
    msr.error = u8::from(answer.is_none());
    msr.data = answer.unwrap_or(msr.data);
}

/// Whoever wants a vCPU out of the guest: it sets `immediate_exit`, and a signal interrupts KVM_RUN.
#[derive(Debug)]
pub struct Kick {
    immediate_exit: AtomicPtr<u8>,
    /// The thread that runs the vCPU, while one does.
    thread: Mutex<Option<pthread_t>>,
    wanted: AtomicBool,
}

/// Only there to interrupt a system call.
extern "C" fn pass(_: c_int, _: *mut siginfo_t, _: *mut c_void) {}

/// Takes over the signal that kicks vCPUs.
///
/// # Errors
/// The system refuses.
pub fn take_signal() -> io::Result<()> {
    register_signal_handler(SIGRTMIN(), pass).map_err(io::Error::from)
}

fn own_thread() -> pthread_t {
    // SAFETY: It has no preconditions.
    unsafe { libc::pthread_self() }
}

impl Kick {
    /// For this vCPU, which has to live longer.
    pub fn new(vcpu: &mut VcpuFd) -> Self {
        Kick {
            immediate_exit: AtomicPtr::new(&raw mut vcpu.get_kvm_run().immediate_exit),
            thread: Mutex::new(None),
            wanted: AtomicBool::new(false),
        }
    }

    fn immediate_exit(&self) -> &AtomicU8 {
        // SAFETY: The byte is in the mapping that the vCPU shares with the kernel, which outlives this (both are members of one
        // structure, and the mapping does not move with it); everybody here writes it as an atomic, and the kernel reads it
        // once at each entry.
        unsafe { AtomicU8::from_ptr(self.immediate_exit.load(Ordering::Relaxed)) }
    }

    /// The calling thread runs the vCPU from here on, until it calls [`Kick::leave`].
    pub fn enter(&self) {
        *lock(&self.thread) = Some(own_thread());
    }

    /// No thread runs the vCPU any more.
    pub fn leave(&self) {
        *lock(&self.thread) = None;
        self.immediate_exit().store(0, Ordering::SeqCst);
    }

    /// Whether a kick has come since the last call. To be asked before each entry: a kick that comes later ends it.
    pub fn taken(&self) -> bool {
        self.immediate_exit().store(0, Ordering::SeqCst);
        self.wanted.swap(false, Ordering::SeqCst)
    }

    /// Has the next entry come back at once, for what is pending to be completed.
    pub fn complete_only(&self) {
        self.immediate_exit().store(1, Ordering::SeqCst);
    }

    /// Gets the vCPU out of the guest, or keeps it from going in.
    pub fn kick(&self) {
        self.wanted.store(true, Ordering::SeqCst);
        self.immediate_exit().store(1, Ordering::SeqCst);
        // Whoever kicks itself is not in the guest.
        if let Some(thread) = lock(&self.thread).filter(|thread| *thread != own_thread()) {
            // SAFETY: The thread is alive: it takes itself out before it ends, under this lock.
            unsafe { libc::pthread_kill(thread, SIGRTMIN()) };
        }
    }
}

/// A mutex whose other holder may have panicked: the panic itself ends the process.
pub fn lock<T: ?Sized>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

#[cfg(test)]
#[path = "sys_test.rs"]
mod tests;
