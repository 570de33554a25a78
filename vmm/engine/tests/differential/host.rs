//! Runs instructions on the CPU that runs the test.
//!
//! # Theory
//! A signal handler sees the whole user state of the interrupted thread in its `ucontext` and may rewrite it; `rt_sigreturn`
//! loads what it finds there. So a test case is entered by one INT3 (the handler puts the case's registers into the frame)
//! and left by whatever exception its code ends in (the handler takes the registers out and puts the host's back). The kernel
//! saves and restores everything, RSP, flags, segments, x87 and SSE included, so the code under test may do anything to its registers, and
//! the vector, error code and CR2 of a fault come with the frame.
//!
//! # Practice
//! One host per process at a time ([`Host::take`] locks), since the handlers and the addresses are the process's. The handler
//! runs on its own stack with the *case's* FS base until it has put the host's back, so nothing in it may touch thread-local
//! storage: no `errno`, no allocation, no panic.
//!
//! # Left out
//! IF and IOPL are the kernel's; the x87 instruction and data pointers are dropped by some kernels and some CPUs. Fixed tables
//! cover those.

// The one place of the test that executes arbitrary bytes natively.
#![allow(unsafe_code)]

use std::arch::{asm, global_asm};
use std::sync::atomic::{AtomicPtr, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::arena::{AREAS, BASE, END, Memory, PAGE};
use crate::state::{Fpu, LDT, Outcome, State, Wide, flag, pushes_error};

/// Stack of the signal handler.
const HANDLER_STACK: usize = 256 << 10;
/// In `ucontext.uc_flags`: the frame has a valid SS, to be loaded as it stands.
const STRICT_SS: u64 = 2 | 4;
/// FXSAVE area offset and value of the kernel's mark that an XSAVE header follows.
const XSTATE_MAGIC_AT: usize = 464;
const XSTATE_MAGIC: u32 = 0x4650_5853;
/// XSTATE_BV in an XSAVE area: which components are not in their initial state.
const XSTATE_BV_AT: usize = 512;
/// Where the upper halves of the YMM registers are in it.
const AVX_AT: usize = 576;
/// RFLAGS bits that `rt_sigreturn` loads.
const LOADABLE: u64 = flag::STATUS | flag::DF | flag::TF | flag::AC | flag::RF;

/// What a case can end in, and the clock that ends those that do not.
const SIGNALS: [i32; 6] = [
    libc::SIGSEGV,
    libc::SIGBUS,
    libc::SIGFPE,
    libc::SIGILL,
    libc::SIGTRAP,
    libc::SIGALRM,
];

/// The outcome's vector for a case that was stopped by the clock.
pub const ENDLESS: u8 = 0xff;

/// Ticks after which a case is endless.
const TOO_MANY_TICKS: u32 = 5;

static LOCK: Mutex<()> = Mutex::new(());
static SLOT: AtomicPtr<Slot> = AtomicPtr::new(std::ptr::null_mut());

#[derive(Clone, Copy, PartialEq)]
enum Phase {
    Idle,
    Enter,
    Running,
}

/// What the handler and the caller share.
struct Slot {
    phase: Phase,
    stack: (usize, usize),
    case: State,
    outcome: Outcome,
    /// Timer ticks since the case began.
    ticks: u32,
    saved_gregs: [i64; 23],
    saved_fpu: [u8; 512],
    saved_upper: [u128; 16],
    saved_wide: Wide,
    saved_bases: [u64; 2],
    bases: bool,
    avx: bool,
    /// Where the components of AVX-512 are in the area.
    wide: Option<[usize; 3]>,
}

/// Bits of XSTATE_BV: opmask state, ZMM_Hi256 state, Hi16_ZMM state.
const WIDE: [u64; 3] = [1 << 5, 1 << 6, 1 << 7];

/// Where they are on this host, if it has them. SDM Vol. 1 13.2 "Enumeration of CPU Support for XSAVE Instructions and
/// XSAVE-Supported Features".
fn wide_components() -> Option<[usize; 3]> {
    let at = |component| std::arch::x86_64::__cpuid_count(0xd, component).ebx as usize;
    crate::forms::wide().then(|| [at(5), at(6), at(7)])
}

/// The host CPU as a machine that runs code in the arena.
pub struct Host {
    slot: *mut Slot,
    alias: *mut u8,
    timer: libc::timer_t,
    _stack: Vec<u8>,
    _lock: MutexGuard<'static, ()>,
    /// Whether FS.base and GS.base can be set to a case's (CR4.FSGSBASE on).
    pub bases: bool,
    /// Whether there are upper halves of YMM registers.
    pub avx: bool,
    /// The host's vendor, where results that the manuals leave open differ.
    pub amd: bool,
    /// Whether the LDT is there: 16-bit code, segments with limits.
    pub ldt: bool,
}

impl Host {
    /// Maps the arena and takes over the process's fault signals; waits for other users of the host in this process.
    pub fn take() -> Host {
        let lock = LOCK.lock().unwrap_or_else(PoisonError::into_inner);
        let alias = map_arena();
        let ldt = install_ldt();
        let mut stack = vec![0_u8; HANDLER_STACK];
        // SAFETY: AT_HWCAP2 is a plain query.
        let bases = unsafe { libc::getauxval(libc::AT_HWCAP2) } & 2 != 0;
        let slot = Box::into_raw(Box::new(Slot {
            phase: Phase::Idle,
            stack: (stack.as_ptr() as usize, stack.as_ptr() as usize + stack.len()),
            case: State::new(0),
            outcome: Outcome {
                vector: 0,
                error: 0,
                cr2: 0,
                state: State::new(0),
            },
            ticks: 0,
            saved_gregs: [0; 23],
            saved_fpu: [0; 512],
            saved_upper: [0; 16],
            saved_wide: Wide::INIT,
            saved_bases: [0; 2],
            bases,
            avx: std::is_x86_feature_detected!("avx"),
            wide: wide_components(),
        }));
        SLOT.store(slot, Ordering::SeqCst);
        // SAFETY: the stack outlives the registration (dropped only with the host, and `drop` disables it first).
        unsafe {
            let alternate = libc::stack_t {
                ss_sp: stack.as_mut_ptr().cast(),
                ss_flags: 0,
                ss_size: stack.len(),
            };
            assert_eq!(libc::sigaltstack(&alternate, std::ptr::null_mut()), 0, "sigaltstack");
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = on_signal_entry as *const () as usize;
            action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
            libc::sigfillset(&mut action.sa_mask);
            for signal in SIGNALS {
                assert_eq!(libc::sigaction(signal, &action, std::ptr::null_mut()), 0, "sigaction");
            }
        }
        let timer = start_clock();
        let cpuid = std::arch::x86_64::__cpuid(0);
        Host {
            slot,
            alias,
            timer,
            _stack: stack,
            _lock: lock,
            bases,
            avx: std::is_x86_feature_detected!("avx"),
            amd: cpuid.ebx == u32::from_le_bytes(*b"Auth"),
            ldt,
        }
    }

    /// Runs from `state` to the next exception.
    pub fn run(&mut self, state: &State) -> Outcome {
        let (es, ds): (u16, u16);
        // SAFETY: the handler is the only other user of the slot and runs inside the INT3 below, on this thread. What the
        // code under test may touch is limited by the generator (`arena::contained`). The data segments are reloaded
        // because 64-bit code does not depend on them.
        unsafe {
            let slot = &mut *self.slot;
            slot.case = state.clone();
            slot.ticks = 0;
            slot.phase = Phase::Enter;
            asm!("mov {0:x}, es", "mov {1:x}, ds", out(reg) es, out(reg) ds);
            asm!("int3");
            asm!("mov es, {0:x}", "mov ds, {1:x}", in(reg) es, in(reg) ds);
            assert!((*self.slot).phase == Phase::Idle, "the case did not come back");
            (*self.slot).outcome.clone()
        }
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        SLOT.store(std::ptr::null_mut(), Ordering::SeqCst);
        // SAFETY: back to the default actions and no alternate stack; the slot is ours alone again.
        unsafe {
            libc::timer_delete(self.timer);
            for signal in SIGNALS {
                libc::signal(signal, libc::SIG_DFL);
            }
            let none = libc::stack_t {
                ss_sp: std::ptr::null_mut(),
                ss_flags: libc::SS_DISABLE,
                ss_size: 0,
            };
            libc::sigaltstack(&none, std::ptr::null_mut());
            libc::munmap(BASE as *mut libc::c_void, (END - BASE) as usize);
            libc::munmap(self.alias.cast(), (END - BASE) as usize);
            drop(Box::from_raw(self.slot));
        }
    }
}

impl Memory for Host {
    fn area(&self, index: usize) -> &[u8] {
        let area = &AREAS[index];
        // SAFETY: inside the second mapping, which lives as long as the host; only `run` changes it, through `&mut self`.
        unsafe { std::slice::from_raw_parts(self.alias.add((area.start - BASE) as usize), area.len as usize) }
    }

    fn area_mut(&mut self, index: usize) -> &mut [u8] {
        let area = &AREAS[index];
        // SAFETY: as above.
        unsafe { std::slice::from_raw_parts_mut(self.alias.add((area.start - BASE) as usize), area.len as usize) }
    }
}

/// Reserves the range and maps the areas, with every page present: a write to a read-only page must find it there, or the
/// error code differs. The answer is a second mapping of the range, for the test itself, where everything is writable.
fn map_arena() -> *mut u8 {
    let len = (END - BASE) as usize;
    let write = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: MAP_FIXED_NOREPLACE takes no address that is in use; the protections are changed inside that range only, and
    // what is read and written was mapped here.
    unsafe {
        let file = libc::memfd_create(c"differential".as_ptr(), 0);
        assert!(file >= 0 && libc::ftruncate(file, len as i64) == 0, "memfd");
        let flags = libc::MAP_SHARED | libc::MAP_FIXED_NOREPLACE;
        let base = libc::mmap(BASE as *mut libc::c_void, len, libc::PROT_NONE, flags, file, 0);
        assert_eq!(base as u64, BASE, "the test's address range is taken");
        let alias = libc::mmap(std::ptr::null_mut(), len, write, libc::MAP_SHARED, file, 0);
        assert_ne!(alias, libc::MAP_FAILED, "second mapping");
        libc::close(file);
        for area in AREAS {
            let rights = match (area.writable, area.executable) {
                (true, true) => write | libc::PROT_EXEC,
                (true, false) => write,
                _ => libc::PROT_READ,
            };
            let start = area.start as *mut libc::c_void;
            assert_eq!(
                libc::mprotect(start, area.len as usize, rights),
                0,
                "rights of {}",
                area.name
            );
            for page in (area.start..area.start + area.len).step_by(PAGE as usize) {
                std::ptr::read_volatile(page as *const u8);
            }
        }
        alias.cast()
    }
}

/// A tick for this thread every 50 ms.
fn start_clock() -> libc::timer_t {
    // SAFETY: plain data for the kernel, and a timer that lives until the host is dropped.
    unsafe {
        let mut event: libc::sigevent = std::mem::zeroed();
        event.sigev_notify = libc::SIGEV_THREAD_ID;
        event.sigev_signo = libc::SIGALRM;
        event.sigev_notify_thread_id = libc::gettid();
        let mut timer: libc::timer_t = std::mem::zeroed();
        assert_eq!(
            libc::timer_create(libc::CLOCK_MONOTONIC, &mut event, &mut timer),
            0,
            "timer"
        );
        let tick = libc::timespec {
            tv_sec: 0,
            tv_nsec: 50_000_000,
        };
        let every = libc::itimerspec {
            it_interval: tick,
            it_value: tick,
        };
        assert_eq!(libc::timer_settime(timer, 0, &every, std::ptr::null_mut()), 0, "timer");
        timer
    }
}

/// Puts [`LDT`] into the process's descriptor table; false where the kernel does not do that.
fn install_ldt() -> bool {
    LDT.iter().enumerate().all(|(i, row)| {
        let flags = u32::from(row.big)
            | row.contents << 1
            | u32::from(row.read_only) << 3
            | u32::from(row.absent) << 5
            | 1 << 6;
        let description = [i as u32, row.base, u32::from(row.limit), flags];
        // SAFETY: `struct user_desc` is these four words; the descriptors are of ring 3 and concern nobody else.
        unsafe { libc::syscall(libc::SYS_modify_ldt, 0x11, description.as_ptr(), 16_usize) == 0 }
    })
}

/// Positions of the registers of [`State::gpr`] in `gregs`.
const GREGS: [i32; 16] = [
    libc::REG_RAX,
    libc::REG_RCX,
    libc::REG_RDX,
    libc::REG_RBX,
    libc::REG_RSP,
    libc::REG_RBP,
    libc::REG_RSI,
    libc::REG_RDI,
    libc::REG_R8,
    libc::REG_R9,
    libc::REG_R10,
    libc::REG_R11,
    libc::REG_R12,
    libc::REG_R13,
    libc::REG_R14,
    libc::REG_R15,
];

// The kernel leaves AC as the case had it, and the compiler's code is full of accesses that are not aligned. NT and ID are not
// loaded from the frame: `rt_sigreturn` keeps what it is called with, which is what the handler answers.
global_asm!(
    ".global differential_on_signal_entry",
    "differential_on_signal_entry:",
    "pushfq",
    "and qword ptr [rsp], {keep}",
    "popfq",
    "sub rsp, 8",
    "call {handler}",
    "pushfq",
    "or qword ptr [rsp], rax",
    "popfq",
    "lea rsp, [rsp + 8]",
    "ret",
    keep = const !((flag::AC | flag::NT | flag::ID) as i32),
    handler = sym on_signal,
);

unsafe extern "C" {
    #[link_name = "differential_on_signal_entry"]
    fn on_signal_entry(signal: i32, info: *mut libc::siginfo_t, context: *mut libc::c_void);
}

/// Enters or leaves a case. Anything else that lands here is a crash of the test itself and is left to the default action.
///
/// Answers the flags to go on with that only the handler can set.
extern "C" fn on_signal(signal: i32, _info: *mut libc::siginfo_t, context: *mut libc::c_void) -> u64 {
    let slot = SLOT.load(Ordering::SeqCst);
    // SAFETY: `slot` is null or the live slot; it is ours if the frame is on its stack, which no other thread uses. The
    // kernel's frame is valid until we return.
    unsafe {
        let ours = !slot.is_null() && ((*slot).stack.0..(*slot).stack.1).contains(&(context as usize));
        if ours && signal == libc::SIGALRM {
            (*slot).ticks += 1;
            if (*slot).phase != Phase::Running || (*slot).ticks < TOO_MANY_TICKS {
                let context = &*context.cast::<libc::ucontext_t>();
                return context.uc_mcontext.gregs[libc::REG_EFL as usize] as u64 & (flag::NT | flag::ID);
            }
        }
        if !ours || (*slot).phase == Phase::Idle {
            libc::signal(signal, libc::SIG_DFL);
            return 0;
        }
        let slot = &mut *slot;
        let context = &mut *context.cast::<libc::ucontext_t>();
        let image = context.uc_mcontext.fpregs.cast::<[u8; 512]>();
        match slot.phase {
            Phase::Enter => {
                enter(slot, context, image);
                slot.case.rflags & (flag::NT | flag::ID)
            }
            _ => {
                leave(slot, context, image);
                0
            }
        }
    }
}

/// # Safety
/// `image` is the frame's floating-point area.
unsafe fn enter(slot: &mut Slot, context: &mut libc::ucontext_t, image: *mut [u8; 512]) {
    let gregs = &mut context.uc_mcontext.gregs;
    slot.saved_gregs = *gregs;
    for (value, at) in slot.case.gpr.iter().zip(GREGS) {
        gregs[at as usize] = *value as i64;
    }
    gregs[libc::REG_RIP as usize] = slot.case.rip as i64;
    let efl = gregs[libc::REG_EFL as usize] as u64;
    gregs[libc::REG_EFL as usize] = (efl & !LOADABLE | slot.case.rflags & LOADABLE) as i64;
    let segments = gregs[libc::REG_CSGSFS as usize] as u64;
    gregs[libc::REG_CSGSFS as usize] =
        (segments & 0x0000_ffff_ffff_0000 | u64::from(slot.case.cs) | u64::from(slot.case.ss) << 48) as i64;
    context.uc_flags |= STRICT_SS as libc::c_ulong;
    // SAFETY: the caller's promise; the kernel's mark says whether an XSAVE header follows. The segment loads take the flat
    // user data segment, or the null selector, which 64-bit code may hold.
    unsafe {
        slot.saved_fpu = *image;
        slot.case.fpu.to_image(&mut *image);
        if let Some(present) = present_components(image) {
            if slot.avx {
                slot.saved_upper = upper_halves(image);
                image
                    .cast::<u8>()
                    .add(AVX_AT)
                    .cast::<[u128; 16]>()
                    .write_unaligned(slot.case.fpu.ymm_hi);
                // Some CPUs take the bit for what XSAVE has to save, others look at the registers.
                let used = slot.case.fpu.ymm_hi != [0; 16];
                *present = *present & !4 | u64::from(used) << 2;
            }
            if let Some(at) = slot.wide {
                slot.saved_wide = load_wide(image, at);
                store_wide(image, at, &slot.case.fpu.wide);
            }
            *present |= 3;
        }
        asm!("mov es, {0:x}", in(reg) slot.case.es_ds[0]);
        asm!("mov ds, {0:x}", in(reg) slot.case.es_ds[1]);
        if slot.bases {
            asm!("rdfsbase {}", out(reg) slot.saved_bases[0]);
            asm!("rdgsbase {}", out(reg) slot.saved_bases[1]);
            asm!("wrgsbase {}", in(reg) slot.case.gs_base);
            asm!("wrfsbase {}", in(reg) slot.case.fs_base);
        }
    }
    slot.phase = Phase::Running;
}

/// # Safety
/// `image` is the frame's floating-point area.
unsafe fn leave(slot: &mut Slot, context: &mut libc::ucontext_t, image: *mut [u8; 512]) {
    let gregs = &mut context.uc_mcontext.gregs;
    let state = &mut slot.outcome.state;
    // SAFETY: reading and writing the base registers is allowed where `bases` says so; the rest is the caller's promise.
    unsafe {
        if slot.bases {
            asm!("rdfsbase {}", out(reg) state.fs_base);
            asm!("rdgsbase {}", out(reg) state.gs_base);
            // Selectors first: some CPUs clear the base with a null selector.
            asm!("mov fs, {0:x}", "mov gs, {0:x}", in(reg) 0);
            asm!("wrfsbase {}", in(reg) slot.saved_bases[0]);
            asm!("wrgsbase {}", in(reg) slot.saved_bases[1]);
        } else {
            state.fs_base = slot.case.fs_base;
            state.gs_base = slot.case.gs_base;
        }
        asm!("mov {0:x}, es", out(reg) state.es_ds[0]);
        asm!("mov {0:x}, ds", out(reg) state.es_ds[1]);
        state.fpu = Fpu::from_image(&*image);
        // The kernel may have skipped components that are in their initial state.
        let present = present_components(image).map_or(3, |bits| *bits);
        if present & 1 == 0 {
            state.fpu = Fpu {
                mxcsr: state.fpu.mxcsr,
                xmm: state.fpu.xmm,
                ..Fpu::INIT
            };
        }
        if present & 2 == 0 {
            state.fpu.xmm = [0; 16];
        }
        if slot.avx {
            state.fpu.ymm_hi = upper_halves(image);
        }
        if let Some(at) = slot.wide {
            state.fpu.wide = load_wide(image, at);
        }
        (&mut *image)[..XSTATE_MAGIC_AT].copy_from_slice(&slot.saved_fpu[..XSTATE_MAGIC_AT]);
        if let Some(present) = present_components(image) {
            if slot.avx {
                image
                    .cast::<u8>()
                    .add(AVX_AT)
                    .cast::<[u128; 16]>()
                    .write_unaligned(slot.saved_upper);
                *present |= 4;
            }
            if let Some(at) = slot.wide {
                store_wide(image, at, &slot.saved_wide);
            }
            *present |= 3;
        }
    }
    for (value, at) in state.gpr.iter_mut().zip(GREGS) {
        *value = gregs[at as usize] as u64;
    }
    state.rip = gregs[libc::REG_RIP as usize] as u64;
    state.rflags = gregs[libc::REG_EFL as usize] as u64;
    let segments = gregs[libc::REG_CSGSFS as usize] as u64;
    state.cs = segments as u16;
    state.ss = (segments >> 48) as u16;
    let vector = if slot.ticks >= TOO_MANY_TICKS {
        ENDLESS
    } else {
        gregs[libc::REG_TRAPNO as usize] as u8
    };
    slot.outcome.vector = vector;
    slot.outcome.error = if pushes_error(vector) {
        gregs[libc::REG_ERR as usize] as u32
    } else {
        0
    };
    slot.outcome.cr2 = if vector == 14 {
        gregs[libc::REG_CR2 as usize] as u64
    } else {
        0
    };
    *gregs = slot.saved_gregs;
    context.uc_flags |= STRICT_SS as libc::c_ulong;
    slot.phase = Phase::Idle;
}

/// The upper halves of the YMM registers, which the kernel may have skipped if they are zero.
///
/// # Safety
/// `image` is the frame's floating-point area, on a host with AVX.
unsafe fn upper_halves(image: *mut [u8; 512]) -> [u128; 16] {
    // SAFETY: the kernel saves with XSAVE where there is AVX, in the standard format; a set bit says that the part is there.
    unsafe {
        match present_components(image) {
            Some(present) if *present & 4 != 0 => image.cast::<u8>().add(AVX_AT).cast::<[u128; 16]>().read_unaligned(),
            _ => [0; 16],
        }
    }
}

/// The components of AVX-512, which the kernel may have skipped if they are zero.
///
/// # Safety
/// `image` is the frame's floating-point area, on a host with AVX-512 whose components are at `at`.
unsafe fn load_wide(image: *mut [u8; 512], at: [usize; 3]) -> Wide {
    let mut wide = Wide::INIT;
    // SAFETY: as in `upper_halves`.
    unsafe {
        let present = present_components(image).map_or(0, |bits| *bits);
        let base = image.cast::<u8>();
        if present & WIDE[0] != 0 {
            wide.k = base.add(at[0]).cast::<[u64; 8]>().read_unaligned();
        }
        if present & WIDE[1] != 0 {
            wide.zmm_hi = base.add(at[1]).cast::<[[u128; 2]; 16]>().read_unaligned();
        }
        if present & WIDE[2] != 0 {
            wide.zmm = base.add(at[2]).cast::<[[u128; 4]; 16]>().read_unaligned();
        }
    }
    wide
}

/// Puts them there, each marked as used where it is.
///
/// # Safety
/// As for [`load_wide`].
unsafe fn store_wide(image: *mut [u8; 512], at: [usize; 3], wide: &Wide) {
    // SAFETY: as in `upper_halves`.
    unsafe {
        let base = image.cast::<u8>();
        base.add(at[0]).cast::<[u64; 8]>().write_unaligned(wide.k);
        base.add(at[1]).cast::<[[u128; 2]; 16]>().write_unaligned(wide.zmm_hi);
        base.add(at[2]).cast::<[[u128; 4]; 16]>().write_unaligned(wide.zmm);
        let used = [
            wide.k != Wide::INIT.k,
            wide.zmm_hi != Wide::INIT.zmm_hi,
            wide.zmm != Wide::INIT.zmm,
        ];
        if let Some(present) = present_components(image) {
            for (bit, used) in WIDE.into_iter().zip(used) {
                *present = *present & !bit | if used { bit } else { 0 };
            }
        }
    }
}

/// XSTATE_BV of the frame, where the kernel saved with XSAVE.
///
/// # Safety
/// `image` is the frame's floating-point area.
unsafe fn present_components<'a>(image: *mut [u8; 512]) -> Option<&'a mut u64> {
    let base = image.cast::<u8>();
    // SAFETY: the mark is inside the FXSAVE area; where it is set, the kernel promises a header behind the area.
    unsafe {
        let mark = base.add(XSTATE_MAGIC_AT).cast::<u32>().read_unaligned();
        (mark == XSTATE_MAGIC).then(|| &mut *base.add(XSTATE_BV_AT).cast::<u64>())
    }
}
