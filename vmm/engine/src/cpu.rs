//! The architectural state of one logical processor, and the registers as handlers reach them.
// The engine core is one of the rooms where `unsafe` is allowed: the register file is addressed by byte offsets that the
// decoder computed, without a check per access.
#![allow(unsafe_code)]

use core::ops::{Deref, DerefMut};
use core::ptr::NonNull;
use serde::{Deserialize, Serialize};
use std::cell::RefCell;
use std::rc::Rc;

use x86::cpuid::Features;
use x86::cr::{Cr0, Cr4, Efer};
use x86::model::CpuModel;
use x86::rflags::{RFlags, flag as rf};
use x86::vmx::VmxCaps;
use x86::watch::Abort;

use crate::Undefined;
use crate::bus::Bus;
use crate::exec::xsave::Layout;
use crate::flags;
use crate::fpu::FpuState;
use crate::op::{Link, Op, Reason, Stop, Template};
use crate::shared::SharedState;
use crate::smm::{IoAccess, Smm};
use crate::state::Hot;
use crate::transaction::{Capacity, OpenTransaction, Transaction};
use crate::vmx::{ExitInformation, Vectoring, Vmx};
use crate::watch::Watched;

/// Segment register numbers as instructions encode them (SDM Vol. 2A 2.1.5 "Addressing-Mode Encoding of ModR/M and SIB Bytes").
pub const ES: usize = 0;
/// Code segment.
pub const CS: usize = 1;
/// Stack segment.
pub const SS: usize = 2;
/// Data segment.
pub const DS: usize = 3;
/// FS.
pub const FS: usize = 4;
/// GS.
pub const GS: usize = 5;

/// Byte offsets of the register file's slots: 16 GPRs, then the decoder's own.
pub(crate) mod slot {
    pub const RAX: u8 = 0;
    pub const RCX: u8 = 8;
    pub const RDX: u8 = 16;
    pub const RBX: u8 = 24;
    pub const RSP: u8 = 32;
    pub const RBP: u8 = 40;
    pub const RSI: u8 = 48;
    pub const RDI: u8 = 56;
    pub const R11: u8 = 88;
    /// Always 0: an absent base or index.
    pub const ZERO: u8 = 128;
    /// RIP of the running block's page, so that blocks hold page-relative addresses only and serve every mapping of the page.
    pub const PAGE: u8 = 136;
    /// A linear address computed by an op of the same instruction.
    pub const EA: u8 = 144;
    /// A memory operand loaded by an op of the same instruction.
    pub const T0: u8 = 152;
    /// The operand as it was loaded, for LOCK.
    pub const T1: u8 = 160;
    pub const COUNT: usize = 21;
}

/// A segment register with its hidden part (SDM Vol. 3A 3.4.3 "Segment Registers").
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Segment {
    /// The visible part.
    pub selector: u16,
    /// Linear base address.
    pub base: u64,
    /// Limit in bytes, granularity applied.
    pub limit: u32,
    /// Descriptor bits 40 to 55: type 3:0, S 4, DPL 6:5, P 7, AVL 12, L 13, D/B 14, G 15.
    pub attributes: u16,
}

impl Segment {
    /// A segment of real-address mode.
    pub const fn real(selector: u16) -> Segment {
        Segment {
            selector,
            base: (selector as u64) << 4,
            limit: 0xffff,
            attributes: 0x93,
        }
    }

    /// The type field, bits 3:0.
    pub const fn kind(&self) -> u8 {
        (self.attributes & 0xf) as u8
    }

    /// Descriptor privilege level.
    pub const fn dpl(&self) -> u8 {
        (self.attributes >> 5 & 3) as u8
    }

    /// A usable segment: the present bit.
    pub const fn present(&self) -> bool {
        self.attributes & 0x80 != 0
    }

    /// The L bit: 64-bit code.
    pub const fn long(&self) -> bool {
        self.attributes & 0x2000 != 0
    }

    /// The D/B bit: 32-bit default size.
    pub const fn big(&self) -> bool {
        self.attributes & 0x4000 != 0
    }

    /// Of the attributes what says that a segment is present, data, expands up, and can be written.
    pub(crate) const DATA_RIGHTS: u16 = 0x9e;
    /// That of one which has all of it.
    pub(crate) const WRITABLE_DATA: u16 = 0x92;

    /// Base 0, limit 4 GB, present, and both readable and writable data (or readable code): accesses need no check.
    pub(crate) const fn flat_data(&self) -> bool {
        self.base == 0 && self.limit == u32::MAX && self.attributes & Segment::DATA_RIGHTS == Segment::WRITABLE_DATA
    }
}

/// GDTR or IDTR.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Table {
    /// Linear base address.
    pub base: u64,
    /// Limit in bytes.
    pub limit: u16,
}

/// What the processor is doing (SDM Vol. 3C 25.4.2 "Guest Non-Register State", activity state).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Activity {
    /// Executing instructions.
    #[default]
    Running,
    /// After HLT, until an interrupt.
    Halted,
    /// After MWAIT, UMWAIT or TPAUSE, until an interrupt, a store to the monitored line, or a deadline.
    Waiting,
    /// After a triple fault.
    Shutdown,
    /// An application processor that waits for its start-up IPI.
    WaitForSipi,
}

/// What MONITOR and MWAIT have set up, or UMONITOR, UMWAIT and TPAUSE (SDM Vol. 2B "MONITOR", "MWAIT", "TPAUSE", "UMONITOR", "UMWAIT").
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Monitor {
    /// Guest-physical address of the armed line, a multiple of 64.
    pub line: Option<u64>,
    /// UMONITOR has armed it, for UMWAIT; else MONITOR, for MWAIT.
    pub user: bool,
    /// An interrupt ends the wait even while IF is clear: MWAIT's ECX bit 0, and always with UMWAIT and TPAUSE.
    pub masked: bool,
    /// UMWAIT or TPAUSE waits.
    pub timed: Option<TimedWait>,
}

/// A wait of UMWAIT or TPAUSE.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TimedWait {
    /// It ends when this processor's time-stamp counter has this value.
    pub deadline: u64,
    /// That is the operating system's limit, IA32_UMWAIT_CONTROL, and not the instruction's own.
    pub limited: bool,
    /// A store to the monitored line ends it, too: UMWAIT.
    pub line: bool,
}

/// MSRs that the core holds itself.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[allow(missing_docs)] // They are the manual's names.
#[derive(Serialize, Deserialize)]
pub struct CoreMsrs {
    pub star: u64,
    pub lstar: u64,
    pub cstar: u64,
    pub fmask: u64,
    pub kernel_gs_base: u64,
    pub sysenter_cs: u64,
    pub sysenter_esp: u64,
    pub sysenter_eip: u64,
    pub tsc_aux: u64,
    pub pkrs: u64,
    pub xss: u64,
}

/// The whole state of a processor as plain data.
#[derive(Clone, Debug, Default, PartialEq)]
#[allow(missing_docs)] // They are the manual's names.
#[derive(Serialize, Deserialize)]
pub struct CpuState {
    /// RAX, RCX, RDX, RBX, RSP, RBP, RSI, RDI, R8 to R15.
    pub gpr: [u64; 16],
    pub rip: u64,
    pub rflags: RFlags,
    /// ES, CS, SS, DS, FS, GS.
    pub segments: [Segment; 6],
    pub ldtr: Segment,
    pub tr: Segment,
    pub gdtr: Table,
    pub idtr: Table,
    pub cr0: Cr0,
    pub cr2: u64,
    pub cr3: u64,
    pub cr4: Cr4,
    pub efer: Efer,
    pub dr: [u64; 8],
    pub xcr0: u64,
    /// PKRU: the XSAVE component 9.
    pub pkru: u32,
    pub msrs: CoreMsrs,
    pub activity: Activity,
    pub monitor: Monitor,
    /// The current privilege level.
    pub cpl: u8,
    /// NMIs are blocked until the next IRET.
    pub nmi_blocked: bool,
    /// The last instruction was STI or a load of SS: no interrupt before the next one.
    pub shadow: bool,
    /// It was a load of SS: no debug exception either.
    pub stack_shadow: bool,
    /// DR6 bits of the debug exceptions that were held off.
    pub pending_debug: u64,
    /// Linear address of the next instruction, if the units have been notified that it is about to run.
    pub observed: Option<u64>,
    pub fpu: FpuState,
    /// Instructions and REP iterations so far.
    pub steps: u64,
    /// REP iterations among them.
    pub iterations: u64,
    /// The transaction that is open. Memory holds what it has written; it was [`Transaction::lines`] before.
    pub transaction: Option<Box<Transaction>>,
    /// VMX operation; `None` outside it.
    pub vmx: Option<Box<Vmx>>,
    /// System-management mode.
    pub smm: Smm,
    /// An INIT waits: see [`Cpu::init_blocked`].
    pub init_pending: bool,
    /// The I/O instruction that has just retired.
    pub io: Option<IoAccess>,
}

/// An exception or interrupt to deliver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Event {
    /// The vector.
    pub vector: u8,
    /// The error code, for exceptions that push one.
    pub error: Option<u32>,
    /// Where it comes from.
    pub source: Source,
}

impl Event {
    /// A debug exception, INT1's included; INT 1 is a software interrupt like any other.
    pub(crate) fn debug(&self) -> bool {
        self.vector == 1 && matches!(self.source, Source::Exception | Source::PrivilegedSoftware)
    }
}

/// Where an event comes from: it decides which RIP is pushed, the EXT bit, and the privilege check of the gate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// A fault or trap of the processor's own.
    Exception,
    /// INT n, INT3, INTO: the gate's DPL is checked.
    Software,
    /// INT1.
    PrivilegedSoftware,
    /// From outside.
    External,
    /// Non-maskable.
    Nmi,
}

/// Mode bits that decide how bytes decode and which ops they become; blocks are keyed by them.
pub(crate) mod mode {
    pub const SIZE16: u32 = 0;
    pub const SIZE32: u32 = 1;
    pub const SIZE64: u32 = 2;
    pub const SIZE: u32 = 3;
    /// 32-bit stack pointer (SS.B).
    pub const STACK32: u32 = 4;
    /// DS, ES and SS are flat: their accesses need no segment arithmetic.
    pub const FLAT: u32 = 8;
    /// Near branches are recorded.
    pub const RECORD: u32 = 0x10;
    /// In a transaction: what it cannot hold aborts it.
    pub const TRANSACTION: u32 = 0x20;
    /// In VMX non-root operation: what may cause a VM exit is looked at.
    pub const NON_ROOT: u32 = 0x40;
    /// With [`RECORD`]: in runs, so that conditional branches are bits of the records after them.
    pub const RUNS: u32 = 0x80;
    /// With [`RECORD`]: taken branches only.
    pub const TAKEN: u32 = 0x100;
    /// With [`RECORD`]: not every branch has a record of its own.
    pub const SPARSE: u32 = RUNS | TAKEN;
    /// What watching asks for of these.
    pub const WATCHING: u32 = RECORD | SPARSE;
    /// First bit of the number that stands for a code segment's base and limit.
    pub const CODE_SHIFT: u32 = 9;
    /// First bit of the number that stands for a set of boundaries, before which blocks end.
    pub const BOUNDARY_SHIFT: u32 = 24;
    /// That a code segment's number takes.
    pub const CODE: u32 = 0xff_fe00;
}

/// One logical processor.
#[repr(C)]
pub struct Cpu {
    /// At its beginning: who has a pointer to the processor has one to these.
    pub(crate) hot: Hot,
    pub(crate) event: Option<Event>,
    /// Where a read-modify-write will go back to, unless `direct` says.
    pub(crate) bounce_to: crate::mem::Bounce,

    pub(crate) seg: [Segment; 6],
    pub(crate) ldtr: Segment,
    pub(crate) tr: Segment,
    pub(crate) gdtr: Table,
    pub(crate) idtr: Table,
    pub(crate) cr0: Cr0,
    pub(crate) cr2: u64,
    pub(crate) cr3: u64,
    pub(crate) cr4: Cr4,
    pub(crate) efer: Efer,
    pub(crate) dr: [u64; 8],
    pub(crate) xcr0: u64,
    /// Set by `set_pkru` alone: what the TLB grants depends on it.
    pub(crate) pkru: u32,
    pub(crate) msrs: CoreMsrs,
    pub(crate) activity: Activity,
    pub(crate) monitor: Monitor,
    /// Stores to the armed line when it was armed, as the core counts them; `None` while the core has not been asked.
    pub(crate) monitor_seen: Option<u64>,
    pub(crate) nmi_blocked: bool,
    /// Step count at which an STI or SS shadow holds.
    pub(crate) shadow_at: u64,
    /// Step count at which RFLAGS.RF is set: between the instruction that set it and the end of the next one.
    pub(crate) rf_at: u64,
    /// Steps before this run.
    pub(crate) steps: u64,
    pub(crate) iterations: u64,
    /// What this run was given.
    pub(crate) granted: i64,
    pub(crate) model: &'static CpuModel,
    /// What the model's CPUID shows, which takes a look at all of its rows.
    pub(crate) features: Features,
    pub(crate) undefined: Undefined,
    /// The second page of a straddling instruction was not where its block expects it.
    pub(crate) second_page_moved: bool,
    /// The instruction that just ran is not followed by a single-step trap.
    pub(crate) skip_step: bool,
    /// The instruction that just ran is followed by a single-step trap although TF was clear before it.
    pub(crate) trap_now: bool,
    /// `event` is a fault of the task that a task switch has just entered.
    pub(crate) late_fault: bool,
    /// A task switch has entered a task whose TSS asks for a debug trap.
    pub(crate) task_trap: bool,
    pub(crate) maxphyaddr: u32,
    /// The part's linear-address width: what registers that hold addresses take, whatever CR4.LA57 says.
    pub(crate) linear_bits: u32,
    /// How far this processor has read [`crate::ram::Ram::retired_writes`].
    pub(crate) code_seen: u64,
    /// Of [`crate::ram::Ram::dirty_asked`] likewise.
    pub(crate) dirty_asked: u64,
    /// PAUSE has retired, and `yield_on_pause` is set.
    pub(crate) paused: bool,
    /// The code cache's generation that `jumps` and `mode` belong to.
    pub(crate) generation: u64,
    pub(crate) huge_pages: bool,
    /// The model's state components.
    pub(crate) xsave: Layout,
    /// Steps at which a load of SS holds debug exceptions off.
    pub(crate) stack_shadow_at: u64,
    pub(crate) watched: Watched,
    pub(crate) transaction: Option<OpenTransaction>,
    /// Events that were delivered between instructions: with the steps, how the run loop knows that it gets on.
    pub(crate) deliveries: u64,
    /// Why the transaction aborts, where that ended the chain.
    pub(crate) abort_cause: Abort,
    /// CPUID says RTM_ALWAYS_ABORT.
    pub(crate) always_abort: bool,
    /// What a transaction may write.
    pub(crate) capacity: Capacity,
    /// The ops that a translation has called have all been carried out.
    pub(crate) came_through: bool,
    /// VMX operation; `None` outside it.
    pub(crate) vmx: Option<Box<Vmx>>,
    /// What the part can do of it, as shown; `None`: nothing.
    pub(crate) vmx_caps: Option<VmxCaps>,
    /// The VM exit that ended the chain, or the delivery of an event.
    pub(crate) exit: Option<Box<ExitInformation>>,
    /// VMLAUNCH (`true`) or VMRESUME has retired, and the VM entry is to be made.
    pub(crate) entry: Option<bool>,
    /// In non-root operation: the event whose delivery has just faulted.
    pub(crate) vectoring: Option<Vectoring>,
    /// The event that a VM entry injects, and the RIP that its delivery leaves behind where it fails.
    pub(crate) injecting: Option<(Vectoring, u64)>,
    /// CR2 and DR6 before the exception that was raised last, which a VM exit in its place leaves alone.
    pub(crate) cr2_before: u64,
    /// See above.
    pub(crate) dr6_before: u64,
    /// System-management mode.
    pub(crate) smm: Smm,
    /// An INIT waits.
    pub(crate) init_pending: bool,
    /// The last I/O instruction, and the step count behind it.
    pub(crate) io: IoAccess,
    /// See above.
    pub(crate) io_at: u64,
    /// RSM has retired, and the processor is to leave SMM.
    pub(crate) resumes: bool,
    /// `want_window` as it was when the run began; VMX operation may want to hear of it, too.
    pub(crate) asked_window: bool,
    /// The conditions of the last debug exception.
    pub(crate) debug_conditions: u64,
    shared: Option<NonNull<SharedState>>,
    bus: Option<NonNull<dyn Bus>>,

    /// The machine's step clock: instructions and REP iterations over all processors, in the order they ran.
    pub clock: u64,
    /// Leave with [`crate::Exit::Window`] as soon as external interrupts become deliverable.
    pub want_window: bool,
    /// Leave with [`crate::Exit::Bus`] after the IRET that ends the blocking of NMIs.
    pub want_nmi: bool,
    /// Leave with [`crate::Exit::Pause`] after PAUSE: somebody else may hold what this processor waits for.
    pub yield_on_pause: bool,
}

/// DR6.BLD, which is clear where a bus lock led to a debug exception.
pub(crate) const BUS_LOCK: u64 = 1 << 11;
/// DR6.B0 to B3.
const BREAKPOINTS: u64 = 0xf;

impl Deref for Cpu {
    type Target = Hot;

    #[inline(always)]
    fn deref(&self) -> &Hot {
        &self.hot
    }
}

impl DerefMut for Cpu {
    #[inline(always)]
    fn deref_mut(&mut self) -> &mut Hot {
        &mut self.hot
    }
}

impl Cpu {
    /// A processor after power-up (SDM Vol. 3A 10.1.1 "Processor State After Reset").
    pub fn new(model: &'static CpuModel) -> Box<Cpu> {
        let features = model.features();
        let mut cpu = Box::new(Cpu {
            hot: Hot::new(),
            event: None,
            bounce_to: crate::mem::Bounce::default(),
            seg: [Segment::default(); 6],
            ldtr: Segment::default(),
            tr: Segment::default(),
            gdtr: Table::default(),
            idtr: Table::default(),
            cr0: Cr0::new(),
            cr2: 0,
            cr3: 0,
            cr4: Cr4::new(),
            efer: Efer::new(),
            dr: [0; 8],
            xcr0: 1,
            pkru: 0,
            msrs: CoreMsrs::default(),
            activity: Activity::Running,
            monitor: Monitor::default(),
            monitor_seen: None,
            nmi_blocked: false,
            shadow_at: u64::MAX,
            rf_at: u64::MAX,
            steps: 0,
            iterations: 0,
            granted: 0,
            model,
            features,
            undefined: Undefined::Model,
            second_page_moved: false,
            skip_step: false,
            trap_now: false,
            late_fault: false,
            task_trap: false,
            code_seen: 0,
            dirty_asked: 0,
            paused: false,
            generation: 0,
            maxphyaddr: model.physical_bits(),
            linear_bits: model.linear_bits().clamp(48, 64),
            huge_pages: features.page1gb(),
            xsave: Layout::of(model),
            stack_shadow_at: u64::MAX,
            watched: Watched::new(),
            transaction: None,
            deliveries: 0,
            abort_cause: Abort::Event,
            always_abort: features.rtm_always_abort(),
            capacity: Capacity::of(model),
            came_through: false,
            vmx: None,
            vmx_caps: model.shown_vmx(),
            exit: None,
            entry: None,
            vectoring: None,
            injecting: None,
            cr2_before: 0,
            dr6_before: 0,
            smm: Smm::default(),
            init_pending: false,
            io: IoAccess::default(),
            io_at: u64::MAX,
            resumes: false,
            asked_window: false,
            debug_conditions: 0,
            shared: None,
            bus: None,
            clock: 0,
            want_window: false,
            want_nmi: false,
            yield_on_pause: false,
        });
        cpu.reset_records();
        cpu.set_state(&CpuState::reset(model));
        cpu
    }

    /// The whole state.
    pub fn state(&self) -> CpuState {
        let mut gpr = [0; 16];
        gpr.copy_from_slice(&self.r[..16]);
        CpuState {
            gpr,
            rip: self.rip,
            rflags: RFlags::from_bits(self.rflags()).with_rf(self.rf_at == self.steps),
            segments: self.seg,
            ldtr: self.ldtr,
            tr: self.tr,
            gdtr: self.gdtr,
            idtr: self.idtr,
            cr0: self.cr0,
            cr2: self.cr2,
            cr3: self.cr3,
            cr4: self.cr4,
            efer: self.efer,
            dr: self.dr,
            xcr0: self.xcr0,
            pkru: self.pkru,
            msrs: self.msrs,
            activity: self.activity,
            monitor: self.monitor,
            cpl: self.cpl,
            nmi_blocked: self.nmi_blocked,
            shadow: self.shadow_at == self.steps,
            stack_shadow: self.stack_shadow_at == self.steps,
            pending_debug: self.watched.pending,
            observed: (self.watched.observed.0 == self.steps).then_some(self.watched.observed.1),
            fpu: self.fpu.clone(),
            steps: self.steps,
            iterations: self.iterations,
            transaction: self.transaction.as_ref().map(|open| Box::new(open.borrow().clone())),
            vmx: self.vmx.clone(),
            smm: self.smm.clone(),
            init_pending: self.init_pending,
            io: (self.io_at == self.steps).then_some(self.io),
        }
    }

    /// Takes on a state, whatever it was before. With a transaction open memory is as it was when the state was taken; this
    /// processor is then the next one to run, or the transaction has to be ended by [`crate::Engine::end_turn`].
    pub fn set_state(&mut self, s: &CpuState) {
        self.r[..16].copy_from_slice(&s.gpr);
        self.rip = s.rip;
        self.set_rflags(s.rflags.into_bits());
        self.seg = s.segments;
        self.ldtr = s.ldtr;
        self.tr = s.tr;
        self.gdtr = s.gdtr;
        self.idtr = s.idtr;
        self.cr0 = s.cr0;
        self.cr2 = s.cr2;
        self.cr3 = s.cr3;
        self.cr4 = s.cr4;
        self.efer = s.efer;
        self.dr = s.dr;
        self.xcr0 = s.xcr0;
        self.pkru = s.pkru;
        self.msrs = s.msrs;
        self.activity = s.activity;
        self.monitor = s.monitor;
        self.monitor_seen = None;
        self.cpl = s.cpl & 3;
        self.nmi_blocked = s.nmi_blocked;
        self.steps = s.steps;
        self.iterations = s.iterations;
        self.shadow_at = if s.shadow { s.steps } else { u64::MAX };
        self.rf_at = if s.rflags.rf() { s.steps } else { u64::MAX };
        self.stack_shadow_at = if s.stack_shadow { s.steps } else { u64::MAX };
        self.watched.observed = s.observed.map_or((u64::MAX, 0), |linear| (s.steps, linear));
        self.watched.pending = s.pending_debug;
        self.watched.stop = false;
        self.fpu = s.fpu.clone();
        if let Some(old) = self.transaction.take() {
            // What becomes of its memory is for whoever sets the state to say.
            old.borrow_mut().lines.clear();
        }
        self.transaction = s
            .transaction
            .as_ref()
            .map(|open| Rc::new(RefCell::new(Transaction::clone(open))));
        self.vmx = s.vmx.clone();
        self.smm = s.smm.clone();
        self.init_pending = s.init_pending;
        (self.io, self.io_at) = s.io.map_or((IoAccess::default(), u64::MAX), |io| (io, s.steps));
        self.resumes = false;
        (self.exit, self.entry, self.vectoring, self.injecting) = (None, None, None, None);
        self.event = None;
        let tag = self.vmx_tag();
        self.tlb.set_tag(tag);
        self.jumps.clear();
        self.mode = u32::MAX; // Recomputed, with what depends on it, when the processor runs next.
    }

    /// Instructions and REP iterations so far.
    pub fn steps(&self) -> u64 {
        self.steps
    }

    /// Instructions retired so far: a REP counts once.
    pub fn retired(&self) -> u64 {
        self.steps - self.iterations
    }

    /// The present instruction pointer.
    pub fn rip(&self) -> u64 {
        self.rip
    }

    /// What the processor is doing.
    pub fn activity(&self) -> Activity {
        self.activity
    }

    /// An external interrupt would be taken now: IF is set and no shadow holds it off.
    pub fn interruptible(&self) -> bool {
        self.interrupts_enabled()
            && self.shadow_at != self.steps
            && self.activity_allows()
            && !self.debug_due()
            && !self.transition_due()
            // Which has the higher priority.
            && !self.takes_virtual_interrupt()
    }

    /// A non-maskable interrupt would be taken now.
    pub fn nmi_deliverable(&self) -> bool {
        !self.nmis_held_off()
            && self.shadow_at != self.steps
            && self.activity_allows()
            && !self.debug_due()
            && !self.transition_due()
    }

    /// A debug exception comes before the next instruction, and before any interrupt.
    pub(crate) fn debug_due(&self) -> bool {
        self.watched.pending & crate::watch::DUE != 0
    }

    /// The time-stamp counter at which a wait of UMWAIT or TPAUSE ends at the latest.
    pub fn waits_until(&self) -> Option<u64> {
        let wait = self.monitor.timed.filter(|_| self.activity == Activity::Waiting);
        wait.map(|wait| wait.deadline)
    }

    /// The time-stamp counter at which a processor that executes nothing goes on by itself: at the end of UMWAIT or TPAUSE, or for the VM exit
    /// by which the VMX-preemption timer wakes it.
    pub fn wakes_at(&self) -> Option<u64> {
        let timer = self.preemption_timer().filter(|_| self.timer_wakes());
        self.waits_until().into_iter().chain(timer).min()
    }

    /// NMIs are blocked until IRET.
    pub fn nmi_blocked(&self) -> bool {
        self.nmi_blocked
    }

    fn activity_allows(&self) -> bool {
        matches!(self.activity, Activity::Running | Activity::Halted | Activity::Waiting)
    }

    /// A pending external interrupt would be taken now, or end an MWAIT that asked to hear of interrupts that IF masks.
    pub fn interrupt_wakes(&self) -> bool {
        self.interruptible() || self.activity == Activity::Waiting && self.monitor.masked
    }

    /// INIT is held off: in SMM until RSM, in VMX root operation until VMXOFF or a VM entry, and in a guest that waits for a start-up IPI until
    /// a VM exit. SDM Vol. 3C 24.8 "Restrictions on VMX Operation", 26.2 "Other Causes of VM Exits", 32.3.1 "Entering SMM".
    pub fn init_blocked(&self) -> bool {
        let in_vmx = self.vmx.is_some() || self.smm.inside.as_ref().is_some_and(|inside| inside.vmx.is_some());
        self.in_smm() || in_vmx && (!self.non_root() || self.activity == Activity::WaitForSipi || self.transition_due())
    }

    /// An INIT waited, and nothing holds it off any more.
    pub fn init_due(&self) -> bool {
        self.init_pending && !self.init_blocked()
    }

    /// INIT: back to the reset vector's state but for what INIT keeps (SDM Vol. 3A Table 10-1 "IA-32 and Intel 64 Processor
    /// States Following Power-up, Reset, or INIT"), then waiting for a start-up IPI unless this is the bootstrap processor.
    pub fn init(&mut self, bootstrap: bool) {
        let old = self.state();
        let cr0 = Cr0::RESET.with_cd(old.cr0.cd()).with_nw(old.cr0.nw());
        self.set_state(&CpuState {
            cr0,
            xcr0: old.xcr0,
            pkru: old.pkru,
            msrs: old.msrs,
            fpu: old.fpu,
            // SMBASE is what it was.
            smm: Smm {
                inside: None,
                ..old.smm
            },
            steps: old.steps,
            iterations: old.iterations,
            activity: if bootstrap {
                Activity::Running
            } else {
                Activity::WaitForSipi
            },
            ..CpuState::reset(self.model)
        });
    }

    /// A start-up IPI: begins at `vector` times 4096 in real mode, if the processor waits for one
    /// (SDM Vol. 3A 9.4.3 "MP Initialization Protocol Algorithm for MP Systems").
    pub fn start(&mut self, vector: u8) {
        if self.activity != Activity::WaitForSipi {
            return;
        }
        let mut s = self.state();
        s.segments[CS] = Segment {
            selector: (vector as u16) << 8,
            base: (vector as u64) << 12,
            limit: 0xffff,
            attributes: 0x9b,
        };
        s.rip = 0;
        s.activity = Activity::Running;
        self.set_state(&s);
    }

    /// Undefined results as the model or as the host has them.
    pub fn set_undefined(&mut self, undefined: Undefined) {
        self.undefined = undefined;
    }

    /// RFLAGS, whole but for RF, which is clear while an instruction runs (see `rf_at`).
    pub(crate) fn rflags(&self) -> u64 {
        self.rflags | flags::to_rflags(self.nf)
    }

    /// Sets RFLAGS, whole but for RF; the caller has applied the rules of its instruction.
    pub(crate) fn set_rflags(&mut self, value: u64) {
        self.nf = flags::from_rflags(value);
        self.rflags = (value & !flags::RFLAGS_ARITH & 0x3f_7fff) | 2;
        self.rflags &= !0x1_8028;
    }

    /// Steps of the machine before the instruction of `o`.
    #[inline]
    pub(crate) fn now(&self, o: &Op) -> u64 {
        self.clock
            .wrapping_add((self.granted - self.budget - o.rem as i64) as u64)
    }

    /// Steps of this processor so far; outside chains, or once `leave` has given steps back.
    #[inline]
    pub(crate) fn steps_now(&self) -> u64 {
        self.steps.wrapping_add((self.granted - self.budget) as u64)
    }

    /// The machine's step clock; outside chains, or once `leave` has given steps back.
    #[inline]
    pub(crate) fn clock_now(&self) -> u64 {
        self.clock.wrapping_add((self.granted - self.budget) as u64)
    }

    /// Steps of this processor once the instruction of `o` has retired.
    #[inline]
    pub(crate) fn steps_after(&self, o: &Op) -> u64 {
        self.steps
            .wrapping_add((self.granted - self.budget - o.rem as i64 + 1) as u64)
    }

    /// The instruction pointer of the instruction of `o`.
    #[inline(always)]
    pub(crate) fn ip(&self, o: &Op) -> u64 {
        self.r[slot::PAGE as usize / 8].wrapping_add(o.off as u64) & self.ip_mask
    }

    /// The instruction pointer after the instruction of `o`.
    #[inline(always)]
    pub(crate) fn next_ip(&self, o: &Op) -> u64 {
        self.r[slot::PAGE as usize / 8].wrapping_add(o.off as u64 + o.len as u64) & self.ip_mask
    }

    /// A register slot, `S` bytes of it, zero-extended. `at` is a byte offset from the decoder (odd: AH, CH, DH, BH).
    #[inline(always)]
    pub(crate) fn get<const S: u8>(&self, at: u8) -> u64 {
        debug_assert!((at as usize) < slot::COUNT * 8);
        let p = (&raw const self.r).cast::<u8>();
        // SAFETY: Offsets come from the decoder, which only makes those of `slot` (below 168) and S bytes from them stay in `r`.
        unsafe {
            let p = p.add(at as usize);
            match S {
                1 => *p as u64,
                2 => p.cast::<u16>().read_unaligned() as u64,
                4 => p.cast::<u32>().read_unaligned() as u64,
                _ => p.cast::<u64>().read_unaligned(),
            }
        }
    }

    /// Sets a register slot as an instruction of operand size `S` does: 32-bit results zero-extend, smaller ones merge.
    #[inline(always)]
    pub(crate) fn set<const S: u8>(&mut self, at: u8, value: u64) {
        debug_assert!((at as usize) < slot::COUNT * 8);
        let p = (&raw mut self.r).cast::<u8>();
        // SAFETY: As in `get`; for 4 and 8 bytes the offset is a multiple of 8.
        unsafe {
            let p = p.add(at as usize);
            match S {
                1 => *p = value as u8,
                2 => p.cast::<u16>().write_unaligned(value as u16),
                4 => p.cast::<u64>().write_unaligned(value as u32 as u64),
                _ => p.cast::<u64>().write_unaligned(value),
            }
        }
    }

    /// Notes the conditions of a debug exception in DR6. SDM Vol. 3B 18.2.3 "Debug Status Register (DR6)": "certain debug
    /// exceptions may clear bits 0-3". On Intel's parts each one does, INT1 too, so that B0 to B3 are those of the last debug
    /// exception, as KVM's `kvm_deliver_exception_payload` and Xen's `x86_merge_dr6` have them; the other bits stay.
    pub(crate) fn set_debug_status(&mut self, conditions: u64) {
        (self.dr6_before, self.debug_conditions) = (self.dr[6], conditions);
        self.dr[6] = self.dr[6] & !BREAKPOINTS | conditions & !BUS_LOCK;
        self.dr[6] &= !(conditions & BUS_LOCK);
    }

    /// A slot with its size given at run time (1, 2, 4 or 8 bytes).
    #[inline]
    pub(crate) fn get_sized(&self, at: u8, size: u8) -> u64 {
        match size {
            1 => self.get::<1>(at),
            2 => self.get::<2>(at),
            4 => self.get::<4>(at),
            _ => self.get::<8>(at),
        }
    }

    /// Sets a slot with its size given at run time (1, 2, 4 or 8 bytes).
    #[inline]
    pub(crate) fn set_sized(&mut self, at: u8, size: u8, value: u64) {
        match size {
            1 => self.set::<1>(at, value),
            2 => self.set::<2>(at, value),
            4 => self.set::<4>(at, value),
            _ => self.set::<8>(at, value),
        }
    }

    /// The 16 GPRs as an array.
    pub(crate) fn gprs(&mut self) -> *mut u64 {
        (&raw mut self.r).cast()
    }

    /// The sum of a memory operand's parts.
    #[inline(always)]
    pub(crate) fn ea(&self, o: &Op) -> u64 {
        self.get::<8>(o.base)
            .wrapping_add(self.get::<8>(o.idx).wrapping_shl(o.scale as u32))
            .wrapping_add(o.disp as i64 as u64)
    }

    /// The same for an op whose decoder knows whether there is an index: most have none (`X` 0), and for the commonest
    /// handlers that is worth its own.
    #[inline(always)]
    pub(crate) fn ea_with<const X: u8>(&self, o: &Op) -> u64 {
        if X != 0 {
            return self.ea(o);
        }
        self.get::<8>(o.base).wrapping_add(o.disp as i64 as u64)
    }

    /// Raises an exception: `return Err(c.fault(...))`.
    #[cold]
    pub(crate) fn fault(&mut self, vector: u8, error: Option<u32>) -> Stop {
        self.event = Some(Event {
            vector,
            error,
            source: Source::Exception,
        });
        self.stop = Reason::Fault;
        Stop
    }

    /// #GP(error).
    #[cold]
    pub(crate) fn gp(&mut self, error: u32) -> Stop {
        self.fault(13, Some(error))
    }

    /// #UD.
    #[cold]
    pub(crate) fn ud(&mut self) -> Stop {
        self.fault(6, None)
    }

    /// Ends the chain at `o`, which has not retired: its steps go back to the budget.
    #[cold]
    #[inline(never)]
    pub(crate) fn leave(&mut self, o: &Op) {
        self.rip = self.ip(o);
        self.budget += o.rem as i64;
    }

    /// Ends the chain after the instruction of the flow op `o` has retired, going on at `rip`: for `Flow` bodies to return.
    #[inline]
    pub(crate) fn end(&mut self, rip: u64, reason: Reason) -> *const Op {
        self.rip = rip & self.ip_mask;
        self.stop = reason;
        core::ptr::null()
    }

    /// For `Flow` bodies that could not retire: gives the steps back and ends the chain. Inlined, so that the handler knows the
    /// null and `leave` is a tail call.
    #[inline(always)]
    pub(crate) fn abandon(&mut self, o: &Op) -> *const Op {
        self.leave(o);
        core::ptr::null()
    }

    /// Goes to the block that begins with `t` if the budget covers it.
    #[inline(always)]
    pub(crate) fn enter(&mut self, t: *const Op) -> *const Op {
        // SAFETY: Links and the jump cache hold first ops of live blocks only.
        let n = unsafe { (*t).rem } as i64;
        self.budget -= n;
        if self.budget < 0 {
            // The null is written here and not handed through, so that the hot path does not test for it.
            self.out_of_budget(t);
            return core::ptr::null();
        }
        t
    }

    #[cold]
    #[inline(never)]
    pub(crate) fn out_of_budget(&mut self, t: *const Op) {
        // SAFETY: As in `enter`.
        let (n, off) = unsafe { ((*t).rem, (*t).off) };
        self.budget += n as i64;
        self.rip = self.r[slot::PAGE as usize / 8].wrapping_add(off as u64) & self.ip_mask;
        self.stop = Reason::Budget;
    }

    /// Follows a flow op's link within the page; `rel` is the target relative to the page.
    #[inline(always)]
    pub(crate) fn follow(&mut self, link: &Link, taken: bool, rel: u64) -> *const Op {
        let t = if taken {
            stay_a_branch::<1>();
            link.taken
        } else {
            stay_a_branch::<0>();
            link.next
        };
        if t.is_null() {
            self.unlinked(link, taken, rel);
            return core::ptr::null();
        }
        self.enter(t)
    }

    /// `follow` for a recorded branch, whose record is written between the choice and the step to the next block, so that
    /// there is one choice.
    #[inline(always)]
    pub(crate) fn follow_recorded(&mut self, o: &Op, taken: bool) -> *const Op {
        let link = o.link();
        let (template, t) = if taken {
            stay_a_branch::<1>();
            (o.template(true), link.taken)
        } else {
            stay_a_branch::<0>();
            (o.template(false), link.next)
        };
        if self.record_direct::<false>(template) {
            self.full_near(o, template);
            return core::ptr::null();
        }
        if t.is_null() {
            self.unlinked(link, taken, template.places[1]);
            return core::ptr::null();
        }
        self.enter(t)
    }

    #[cold]
    #[inline(never)]
    fn full_near(&mut self, o: &Op, template: &Template) {
        let rip = self.page_ip().wrapping_add(template.places[1]);
        crate::exec::flow::full(self, o, rip);
    }

    /// Follows a flow op's link that may leave the page: it holds while the target page is still mapped where it was. `R`: the
    /// branch has been recorded.
    #[inline(always)]
    pub(crate) fn follow_far<const R: u8>(&mut self, o: &Op, taken: bool, rel: u64) -> *const Op {
        let link = o.link();
        let (t, host) = if taken {
            stay_a_branch::<1>();
            (link.taken, link.taken_host)
        } else {
            stay_a_branch::<0>();
            (link.next, link.next_host)
        };
        let rip = self.r[slot::PAGE as usize / 8].wrapping_add(rel) & self.ip_mask;
        let page = rip & !0xfff;
        let e = self.tlb.entry(rip);
        if t.is_null() || e.exec != page || e.host != host {
            self.far_unlinked::<R>(o, taken, rel, rip);
            return core::ptr::null();
        }
        self.set_page(page);
        self.enter(t)
    }

    #[cold]
    #[inline(never)]
    fn far_unlinked<const R: u8>(&mut self, o: &Op, taken: bool, rel: u64, rip: u64) {
        if self.is64() && !self.canonical(rip) {
            if R != 0 {
                self.unrecord();
            }
            let Stop = self.gp(0);
            self.leave(o);
        } else {
            self.unlinked(o.link(), taken, rel);
        }
    }

    #[cold]
    #[inline(never)]
    fn unlinked(&mut self, link: &Link, taken: bool, rel: u64) {
        self.link = if taken {
            &raw const link.taken
        } else {
            &raw const link.next
        }
        .cast_mut();
        let rip = self.r[slot::PAGE as usize / 8].wrapping_add(rel);
        self.end(rip, Reason::Resolve);
    }

    /// Goes to an address that only now is known.
    #[inline(always)]
    pub(crate) fn jump(&mut self, rip: u64) -> *const Op {
        let t = self.lookup(rip);
        if t.is_null() {
            return self.end(rip, Reason::Resolve);
        }
        self.land(rip, t)
    }

    /// The block at an address, if it was met lately; null otherwise. An address that is found needs no further check: its
    /// page is in the TLB. The sum is not cut to 32 bits outside 64-bit mode, to keep the mask out of every return: one that
    /// wraps is beyond all that the cache holds, and the run loop, which cuts it, finds the block.
    #[inline(always)]
    pub(crate) fn lookup(&self, rip: u64) -> *const Op {
        let linear = rip.wrapping_add(self.cs_base);
        let j = self.jumps.entry(linear);
        let e = self.tlb.entry(linear);
        if j.linear == linear && j.mode == self.mode as u64 && e.exec == linear & !0xfff && e.host == j.host {
            return j.ops;
        }
        core::ptr::null()
    }

    /// Goes to the block that `lookup` found for an address.
    #[inline(always)]
    pub(crate) fn land(&mut self, rip: u64, t: *const Op) -> *const Op {
        let offset = rip.wrapping_add(self.cs_base) & 0xfff;
        self.set_page(rip.wrapping_sub(offset));
        self.enter(t)
    }

    /// The instruction pointer at the start of the running page.
    #[inline(always)]
    pub(crate) fn page_ip(&self) -> u64 {
        self.get::<8>(slot::PAGE)
    }

    #[inline(always)]
    pub(crate) fn set_page(&mut self, page: u64) {
        // `run_to` is relative to it.
        self.run_to = self.run_to.wrapping_add(self.page_ip()).wrapping_sub(page);
        self.r[slot::PAGE as usize / 8] = page;
    }

    /// Lends the processor its surroundings for the length of a run.
    pub(crate) fn attach(&mut self, shared: NonNull<SharedState>, bus: &mut dyn Bus) {
        self.shared = Some(shared);
        self.hide_smram();
        // SAFETY: Only the lifetime is dropped; `detach` ends the borrow before `Engine::run` returns.
        self.bus = Some(unsafe {
            core::mem::transmute::<NonNull<dyn Bus + '_>, NonNull<dyn Bus + 'static>>(NonNull::from(bus))
        });
    }

    pub(crate) fn detach(&mut self) {
        self.shared = None;
        self.bus = None;
    }

    /// What the processors of the machine share.
    #[inline(always)]
    pub(crate) fn shared(&mut self) -> &mut SharedState {
        let mut p = self.shared.expect("the processor runs inside Engine::run");
        // SAFETY: `attach` took it from the engine's own box, which `Engine::run` borrows exclusively and does not touch itself
        // while handlers run; the borrow of `self` keeps a second one from being made.
        unsafe { p.as_mut() }
    }

    /// The outside world, for calls that need the processor, too.
    pub(crate) fn bus_pointer(&mut self) -> *mut dyn Bus {
        self.bus.expect("the processor runs inside Engine::run").as_ptr()
    }

    /// The outside world.
    #[inline(always)]
    pub(crate) fn bus(&mut self) -> &mut dyn Bus {
        let mut p = self.bus.expect("the processor runs inside Engine::run");
        // SAFETY: As in `core`: a unique borrow for the length of the run.
        unsafe { p.as_mut() }
    }

    /// Recomputes what depends on CS, SS, CR0, EFER and CPL: call after any of them changes.
    pub(crate) fn refresh_mode(&mut self) {
        let cs = self.seg[CS];
        let long_mode = self.efer.lma();
        let mode = if long_mode && cs.long() {
            self.cs_base = 0;
            self.ip_mask = u64::MAX;
            mode::SIZE64
        } else {
            self.cs_base = cs.base;
            self.ip_mask = 0xffff_ffff;
            let size = if cs.big() { mode::SIZE32 } else { mode::SIZE16 };
            let stack = if self.seg[SS].big() { mode::STACK32 } else { 0 };
            let flat = [DS, ES, SS].iter().all(|&s| self.seg[s].flat_data());
            let code = self.shared().keys.code(cs.base, cs.limit);
            size | stack | if flat { mode::FLAT } else { 0 } | code << mode::CODE_SHIFT
        };
        let transaction = if self.transaction.is_some() {
            mode::TRANSACTION
        } else {
            0
        };
        let non_root = if self.non_root() { mode::NON_ROOT } else { 0 };
        self.mode = mode | transaction | non_root | self.watched.mode;
        self.record_rest[1] = u64::from(self.cpl) * 0x0101_0000;
        self.select_tlb();
    }

    /// Sets PKRU, as WRPKRU and XRSTOR do.
    pub(crate) fn set_pkru(&mut self, value: u32) {
        let old = core::mem::replace(&mut self.pkru, value);
        self.tlb.rights_change(old, value);
    }

    /// Sets IA32_PKRS.
    pub(crate) fn set_pkrs(&mut self, value: u32) {
        let old = core::mem::replace(&mut self.msrs.pkrs, value as u64);
        self.tlb.rights_change(old as u32, value);
    }

    /// 64-bit mode.
    #[inline(always)]
    pub(crate) fn is64(&self) -> bool {
        self.mode & mode::SIZE == mode::SIZE64
    }

    /// Protected mode outside virtual-8086 mode.
    #[inline]
    pub(crate) fn protected(&self) -> bool {
        self.cr0.pe() && self.rflags & rf::VM == 0
    }
}

/// Marks one side of a choice, so that the compiler makes a branch of it and not a selection: after a selection the address of
/// the next op waits for the guest's data, and the host cannot run ahead of a loop. `N` keeps the sides from being merged.
#[inline(always)]
fn stay_a_branch<const N: u8>() {
    #[cfg(not(miri))]
    // SAFETY: No instruction, only a comment.
    unsafe {
        core::arch::asm!("/* {} */", const N, options(nomem, nostack, preserves_flags));
    }
}

impl CpuState {
    /// The linear address of the next instruction. Outside 64-bit mode it is the sum of CS base and EIP modulo 4 GiB
    /// (SDM Vol. 3A 3.4 "Logical and Linear Addresses"); in 64-bit mode CS has no base.
    pub fn linear_rip(&self) -> u64 {
        let cs = self.segments[CS];
        if self.efer.lma() && cs.long() {
            self.rip
        } else {
            self.rip.wrapping_add(cs.base) & 0xffff_ffff
        }
    }

    /// After power-up: real mode at the reset vector (SDM Vol. 3A 10.1.1 "Processor State After Reset").
    pub fn reset(model: &CpuModel) -> CpuState {
        let mut s = CpuState {
            rip: 0xfff0,
            rflags: RFlags::from_bits(RFlags::RESET),
            segments: [Segment::real(0); 6],
            cr0: Cr0::RESET,
            dr: [0, 0, 0, 0, 0, 0, 0xffff_0ff0, 0x400],
            xcr0: 1,
            idtr: Table { base: 0, limit: 0xffff },
            gdtr: Table { base: 0, limit: 0xffff },
            ldtr: Segment {
                limit: 0xffff,
                attributes: 0x82,
                ..Segment::default()
            },
            tr: Segment {
                limit: 0xffff,
                attributes: 0x8b,
                ..Segment::default()
            },
            ..CpuState::default()
        };
        s.segments[CS] = Segment {
            selector: 0xf000,
            base: 0xffff_0000,
            limit: 0xffff,
            attributes: 0x9b,
        };
        // EDX holds the processor's signature.
        s.gpr[2] = model.cpuid(1, 0)[0] as u64;
        s
    }
}
