//! What an executor of instructions and the units that watch it say to each other.
//!
//! # Theory
//! Every debug or trace unit watches the stream of retired instructions. One record for each instruction could be
//! neither complete nor fast, so the executor says six things, each only when somebody listens: `before` a marked
//! address, an `access` to memory, a `branch`, an `event`, a change of `state`, and `code` that is met for the first time.
//!
//! # Practice
//! A branch is a [`BranchRecord`], appended to a buffer that the units drain when it is full, before any other callback, and
//! before a unit's register is read or written. The units say with an [`Interest`] what the executor may leave out, hear
//! the calls as [`Watch`], and reach the processor and memory through [`Processor`] and [`TraceMem`].

use crate::fault::PageFaultCode;
use serde::{Deserialize, Serialize};

/// How control was transferred, or that it might have been.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Flow {
    /// Jcc, JrCXZ, LOOPcc.
    Cond {
        /// Whether it jumped.
        taken: bool,
    },
    /// Direct near JMP.
    Jump,
    /// Indirect near JMP.
    JumpInd,
    /// Direct near CALL.
    Call,
    /// Indirect near CALL.
    CallInd,
    /// Near RET.
    Ret,
    /// Anything that goes through a segment, a gate, an MSR or the IDT.
    Far(Far),
}

/// The kinds of far transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Far {
    /// Far JMP.
    Jump,
    /// Far CALL.
    Call,
    /// Far RET.
    Ret,
    /// INT n, INT3, INTO, INT1.
    SoftwareInterrupt,
    /// A fault, trap or abort.
    Exception,
    /// An external interrupt or NMI.
    Interrupt,
    /// IRET.
    Iret,
    /// SYSCALL.
    Syscall,
    /// SYSRET.
    Sysret,
    /// SYSENTER.
    Sysenter,
    /// SYSEXIT.
    Sysexit,
    /// VMLAUNCH or VMRESUME, to the guest of a VMM.
    VmEntry,
    /// A VM exit: to the VMM, by no instruction of its own.
    VmExit,
    /// An SMI: to the handler in system-management mode.
    Smi,
    /// RSM, to what the SMI has interrupted.
    Rsm,
}

impl Flow {
    /// Every value, in the order of the codes.
    pub const ALL: [Flow; 22] = [
        Flow::Cond { taken: false },
        Flow::Cond { taken: true },
        Flow::Jump,
        Flow::JumpInd,
        Flow::Call,
        Flow::CallInd,
        Flow::Ret,
        Flow::Far(Far::Jump),
        Flow::Far(Far::Call),
        Flow::Far(Far::Ret),
        Flow::Far(Far::SoftwareInterrupt),
        Flow::Far(Far::Exception),
        Flow::Far(Far::Interrupt),
        Flow::Far(Far::Iret),
        Flow::Far(Far::Syscall),
        Flow::Far(Far::Sysret),
        Flow::Far(Far::Sysenter),
        Flow::Far(Far::Sysexit),
        Flow::Far(Far::VmEntry),
        Flow::Far(Far::VmExit),
        Flow::Far(Far::Smi),
        Flow::Far(Far::Rsm),
    ];

    /// The byte that stands for it in a [`BranchRecord`].
    pub const fn code(self) -> u8 {
        match self {
            Flow::Cond { taken } => taken as u8,
            Flow::Jump => 2,
            Flow::JumpInd => 3,
            Flow::Call => 4,
            Flow::CallInd => 5,
            Flow::Ret => 6,
            Flow::Far(far) => 7 + far as u8,
        }
    }

    /// What the byte stands for; `None` for one that [`Flow::code`] never gives.
    pub fn from_code(code: u8) -> Option<Self> {
        Self::ALL.get(usize::from(code)).copied()
    }

    /// Whether control went anywhere but to the next instruction.
    pub const fn taken(self) -> bool {
        !matches!(self, Flow::Cond { taken: false })
    }
}

/// One branch, as the executor writes it: an interpreter from Rust, a translator from machine code, so the layout is fixed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct BranchRecord {
    /// Linear address of the branch instruction; for an exception or interrupt, of the instruction that did not retire.
    pub from: u64,
    /// Linear address where execution went on, which for a branch not taken is the next instruction.
    pub to: u64,
    /// The machine's step clock when it retired.
    pub step: u64,
    /// [`Flow::code`].
    pub flow: u8,
    /// Length of the instruction in bytes (0 where none retired): `from` + `length` is a call's return address.
    pub length: u8,
    /// CPL at the branch.
    pub from_cpl: u8,
    /// CPL at the target.
    pub to_cpl: u8,
    /// It is a task switch that loaded CR3, whether the value differs or not.
    pub loads_cr3: bool,
    /// Where [`Interest::run`] allows it: the conditional branches since the record before this one, which have none of their own,
    /// as a number with its lowest byte first: the newest in bit 0, 1 for taken, a stop bit above the oldest. Else, and where there
    /// were none, 0 or 1.
    pub run: [u8; 3],
}

impl BranchRecord {
    /// In [`BranchRecord::flow`]: no branch, but the end of a run of conditional ones. `to` and `step` are those of the last.
    pub const RUN: u8 = 31;
    /// Conditional branches that fit into one record.
    pub const RUN_BITS: u8 = 23;

    /// The conditional branches before it, under their stop bit; 1 for none.
    #[inline(always)]
    pub const fn run(&self) -> u32 {
        let [low, middle, high] = self.run;
        u32::from_le_bytes([low, middle, high, 0]) | (low == 0 && middle == 0 && high == 0) as u32
    }
}

const _: () = assert!(size_of::<BranchRecord>() == 32, "a record is half a cache line");

/// Which branches somebody wants to have recorded. Who wants some may be given more.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Recorded {
    /// None.
    #[default]
    None,
    /// Those that are taken.
    Taken,
    /// Those that are taken, and conditional ones that are not.
    All,
}

impl Recorded {
    /// That, or none.
    pub fn when(self, wanted: bool) -> Self {
        if wanted { self } else { Recorded::None }
    }

    /// Whether any are wanted.
    pub fn any(self) -> bool {
        self != Recorded::None
    }

    /// Whether a branch of this kind is wanted.
    pub fn includes(self, flow: Flow) -> bool {
        match self {
            Recorded::None => false,
            Recorded::Taken => flow.taken(),
            Recorded::All => true,
        }
    }
}

/// How closely the units need to watch: what the executor has to say, and when.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Interest {
    /// Which branches are to be recorded.
    pub branches: Recorded,
    /// How many branch records may wait at most before they are handed over; 1 for each at once. What must be exact to
    /// the branch (a threshold, an overflow, a buffer page that may fault) is made so by this number.
    pub branch_room: u32,
    /// 0: each branch is to have a record of its own. Else direct jumps within a page need none, and so many conditional branches in a
    /// row may be bits of the record after them ([`BranchRecord::run`]), but for the first that is handed over at a time, which has
    /// one: 1 to [`BranchRecord::RUN_BITS`].
    pub run: u8,
    /// Far transfers, events and changes are to be announced even if branches are not; who wants branches hears these too. Changes of
    /// RFLAGS.IF are asked for by themselves.
    pub transfers: bool,
    /// Changes of RFLAGS.IF are among the changes that are announced ([`Change::Interrupts`]). Kernels make so many that who does not
    /// need them should not ask.
    pub interrupts: bool,
    /// With RFLAGS.TF, the single-step trap comes after taken branches only (IA32_DEBUGCTL.BTF).
    pub step_on_branches: bool,
    /// An instruction that takes a bus lock above CPL 0 ends with a debug exception (IA32_DEBUGCTL.BUS_LOCK_DETECT).
    pub bus_locks: bool,
    /// How many steps may pass at most before [`Watch::tick`] is called: instructions, and each iteration of a repeated string
    /// instruction, which takes time as they do but retires nothing.
    pub instructions: u64,
    /// [`Watch::before`] is called for every instruction, not only at [`Watch::boundaries`].
    pub every_instruction: bool,
    /// Accesses to linear addresses and ports in [`Watch::ranges`] are to be announced.
    pub ranges: bool,
    /// Every load and store is to be announced.
    pub every_access: bool,
    /// Code is to be announced before it is executed ([`Watch::code`]). 0: it need not be. When the number moves, all code
    /// counts as new.
    pub code: u64,
}

impl Interest {
    /// Nobody watches.
    pub const NOTHING: Self = Self {
        branches: Recorded::None,
        branch_room: u32::MAX,
        run: 0,
        transfers: false,
        interrupts: false,
        step_on_branches: false,
        bus_locks: false,
        instructions: u64::MAX,
        every_instruction: false,
        ranges: false,
        every_access: false,
        code: 0,
    };

    /// What satisfies both.
    pub fn and(self, other: Self) -> Self {
        Self {
            branches: self.branches.max(other.branches),
            branch_room: self.branch_room.min(other.branch_room),
            run: match (self.branches, other.branches) {
                (Recorded::None, _) => other.run,
                (_, Recorded::None) => self.run,
                _ => self.run.min(other.run),
            },
            transfers: self.transfers | other.transfers,
            interrupts: self.interrupts | other.interrupts,
            step_on_branches: self.step_on_branches | other.step_on_branches,
            bus_locks: self.bus_locks | other.bus_locks,
            instructions: self.instructions.min(other.instructions),
            every_instruction: self.every_instruction | other.every_instruction,
            ranges: self.ranges | other.ranges,
            every_access: self.every_access | other.every_access,
            code: self.code.max(other.code),
        }
    }
}

impl Default for Interest {
    fn default() -> Self {
        Self::NOTHING
    }
}

/// What the units ask of the machine after a callback.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[must_use]
pub struct Effects {
    /// A #DB with these bits to be set in DR6: a fault where the callback was [`Watch::before`], else a trap.
    pub debug: Option<u64>,
    /// A #PF that a write to the debug-store area met.
    pub fault: Option<PageFault>,
    /// A performance-monitoring interrupt, which the LVT entry turns into a vector, an NMI or nothing.
    pub pmi: bool,
    /// The transaction that is open cannot go on.
    pub abort: bool,
    /// The host wants to look: the executor leaves with nothing changed for the guest, an open transaction included. Where the
    /// callback was [`Watch::before`] it leaves before that instruction, and says no `before` of it again when it goes on; where it
    /// was [`Watch::access`], once the instruction (of a REP, the iteration) has retired; where it was [`Watch::event`], once
    /// the event has been delivered. Units of the guest never set it.
    pub stop: bool,
}

impl Effects {
    /// Nothing.
    pub const NONE: Self = Self {
        debug: None,
        fault: None,
        pmi: false,
        abort: false,
        stop: false,
    };

    /// Both; of two page faults the first.
    pub fn and(self, other: Self) -> Self {
        Self {
            debug: match (self.debug, other.debug) {
                (Some(a), Some(b)) => Some(a | b),
                (a, b) => a.or(b),
            },
            fault: self.fault.or(other.fault),
            pmi: self.pmi | other.pmi,
            abort: self.abort | other.abort,
            stop: self.stop | other.stop,
        }
    }
}

/// The width of code, as packets and records name it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum CodeSize {
    /// CS.D clear, outside 64-bit mode.
    #[default]
    Bits16,
    /// CS.D set, outside 64-bit mode.
    Bits32,
    /// 64-bit mode.
    Bits64,
}

impl CodeSize {
    /// 16, 32 or 64, as decoders of instructions take it.
    pub const fn bits(self) -> u32 {
        match self {
            CodeSize::Bits16 => 16,
            CodeSize::Bits32 => 32,
            CodeSize::Bits64 => 64,
        }
    }
}

/// Where a processor stands: all that filters ask about.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Context {
    /// Privilege level: 0 in real-address mode, 3 in virtual-8086 mode.
    pub cpl: u8,
    /// Of the code segment.
    pub code: CodeSize,
    /// IA32_EFER.LMA.
    pub long_mode: bool,
    /// CR0.PG.
    pub paging: bool,
    /// CR3.
    pub cr3: u64,
    /// RFLAGS.IF.
    pub interrupts: bool,
    /// Base of the code segment: linear address less RIP.
    pub cs_base: u64,
    /// In VMX non-root operation.
    pub non_root: bool,
    /// The current-VMCS pointer, where there is one.
    pub vmcs: Option<u64>,
    /// The guest's Intel PT is to tell nothing of VMX operation: "conceal VMX from PT". SDM Vol. 3C 33.5 "Tracing and VMX Operation".
    #[serde(skip)]
    pub concealed: bool,
}

/// The argument of [`Watch::event`]: an interrupt, exception or software interrupt has been delivered, or a processor was reset.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EventRecord {
    /// The transfer: for a fault, `from` is the instruction that did not retire; for a trap, interrupt or NMI, the
    /// instruction that would have been next; for INT n, INT3, INTO and INT1, the instruction itself.
    pub branch: BranchRecord,
    /// The vector.
    pub vector: u8,
    /// It is a debug exception (#DB), INT1 with whatever prefixes included; INT 1, which has the same vector, is none. SDM Vol. 3B
    /// 18.3.1 "Debug Exception (#DB)—Interrupt Vector 1".
    pub debug: bool,
    /// The error code, where one was pushed.
    pub error: Option<u32>,
    /// CR2, for a page fault.
    pub address: Option<u64>,
}

/// The argument of [`Watch::state`]: something that filters or packets need has changed. [`Processor::context`] is already the new one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// MOV to CR3, whether the value differs or not. A task switch says it by its branch: [`BranchRecord::loads_cr3`].
    Cr3,
    /// A VM entry, or a VM exit with its basic reason, is complete: its branch has said where it has led.
    Vmx {
        /// The basic exit reason, of a VM exit.
        exit: Option<u16>,
    },
    /// VMPTRLD retired: [`Context::vmcs`] is the pointer that it loaded.
    VmcsPointer,
    /// CR0, CR4 or EFER moved in a way that changes the context, without a far transfer.
    Mode,
    /// RFLAGS.IF changed (CLI, STI, POPF), where somebody asks for that ([`Interest::interrupts`]).
    Interrupts,
    /// PTWRITE retired with this operand.
    PtWrite {
        /// The operand.
        value: u64,
        /// 4 or 8 bytes.
        size: u8,
        /// Linear address of the instruction.
        at: u64,
    },
    /// VMCALL retired with [`HYPERCALL`] in EAX.
    Hypercall {
        /// EBX.
        function: u32,
    },
    /// HLT retired.
    Halt,
    /// MWAIT retired and waits.
    Mwait {
        /// EAX.
        hints: u32,
        /// ECX.
        extensions: u32,
    },
    /// HLT or MWAIT came to its end.
    Wake {
        /// By a store to the address that was monitored; else by an interrupt.
        store: bool,
    },
    /// XBEGIN began a transaction.
    TransactionBegin {
        /// Linear address of the instruction.
        at: u64,
    },
    /// XEND of the outermost transaction.
    TransactionCommit {
        /// Linear address of the instruction.
        at: u64,
        /// Steps since XBEGIN.
        steps: u64,
    },
    /// A transaction was rolled back; the processor is at the fallback address, or at XBEGIN for a debug exception.
    TransactionAbort {
        /// Linear address of the instruction that did not retire.
        from: u64,
        /// Why.
        cause: Abort,
        /// Steps since XBEGIN.
        steps: u64,
    },
    /// An SMI is about to be delivered: the processor is still as it was, and the transfer has not been said.
    Smi {
        /// Linear address of the instruction that would have come next.
        at: u64,
    },
    /// RSM is complete: its branch has said where it has led.
    Rsm,
    /// Power-up reset.
    Reset,
    /// INIT, which is not a reset: registers of the units stay as they are.
    Init {
        /// Linear address of the instruction that would have come next.
        at: u64,
    },
    /// A start-up IPI with this vector was accepted.
    StartUp(u8),
    /// Shutdown after a triple fault.
    Shutdown,
}

/// Why a transaction was aborted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Abort {
    /// XABORT with this operand.
    Explicit(u8),
    /// An instruction that a transaction cannot hold.
    Instruction,
    /// An access to a device, which cannot be undone.
    MemoryType,
    /// No room to keep what was written.
    Capacity,
    /// Somebody else touched memory.
    Conflict,
    /// A debug exception or breakpoint.
    Debug,
    /// Any other exception.
    Exception,
    /// An interrupt, or whatever else the program has no part in.
    Event,
}

impl Abort {
    /// EAX at the fallback address, but for bit 5, which says that transactions were nested. SDM Vol. 1 Table 16-1 "RTM Abort
    /// Status Definition".
    pub const fn status(self) -> u32 {
        match self {
            Abort::Explicit(operand) => 1 | (operand as u32) << 24,
            Abort::Conflict => 1 << 2 | 1 << 1,
            Abort::Capacity => 1 << 3,
            Abort::Debug => 1 << 4,
            Abort::Instruction | Abort::MemoryType | Abort::Exception | Abort::Event => 0,
        }
    }

    /// An instruction of the program was the cause, and no one else.
    pub const fn synchronous(self) -> bool {
        !matches!(self, Abort::Conflict | Abort::Event)
    }
}

/// EAX of the one hypercall that there is: "mmvm", the first letter in the lowest byte. EBX 1 says that something worth
/// recording begins, 0 that it has ended. With any other EAX VMCALL is #UD.
pub const HYPERCALL: u32 = 0x6d76_6d6d;

/// What was done to a memory location or port.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum AccessKind {
    /// A load.
    Read,
    /// A store.
    Write,
    /// A locked or plain read-modify-write.
    ReadWrite,
    /// IN, INS.
    PortRead,
    /// OUT, OUTS.
    PortWrite,
}

/// The argument of [`Watch::access`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Access {
    /// Linear address, or port.
    pub address: u64,
    /// Bytes.
    pub size: u32,
    /// What was done.
    pub kind: AccessKind,
    /// Linear address of the instruction.
    pub ip: u64,
}

/// The argument of [`Watch::code`]: bytes that are about to be executed, all in one page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Code {
    /// Linear address.
    pub linear: u64,
    /// Physical address.
    pub physical: u64,
    /// Bytes that have been decoded; 0 where a translation of the page has been made for fetching, and what is there has
    /// been, or will be, decoded.
    pub len: u32,
}

/// A range of linear addresses or ports whose accesses are announced.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Range {
    /// The first.
    pub first: u64,
    /// The last, inclusive.
    pub last: u64,
    /// Ports instead of linear addresses.
    pub ports: bool,
    /// Loads (or IN) count.
    pub reads: bool,
    /// Stores (or OUT) count.
    pub writes: bool,
}

/// The processor that is watched, as the units see it at the moment of a callback: all instructions before it have retired.
pub trait Processor: TraceMem {
    /// RAX, RCX, RDX, RBX, RSP, RBP, RSI, RDI, R8 to R15, by number.
    fn gpr(&self, number: u8) -> u64;
    /// The low 128 bits of a vector register.
    fn xmm(&self, number: u8) -> u128;
    /// RIP of the next instruction: in an access to an MSR, of the one after RDMSR or WRMSR.
    fn rip(&self) -> u64;
    /// RFLAGS.
    fn rflags(&self) -> u64;
    /// Where it stands.
    fn context(&self) -> Context;
    /// DR0 to DR7. DR6 is the processor's: effects with [`Effects::debug`] set its bits.
    fn debug_register(&self, _number: u8) -> u64 {
        0
    }
    /// CR4.
    fn cr4(&self) -> u64 {
        0
    }
    /// The physical address behind a linear one, whatever rights the page gives and without a trace in the page tables; `None`
    /// where it is not mapped. One to one, unless the processor knows better.
    fn physical(&mut self, linear: u64) -> Option<u64> {
        Some(linear)
    }
    /// Instructions that this processor has retired, each REP once; in an access to an MSR, without that instruction.
    fn retired(&self) -> u64;
    /// The machine's step clock.
    fn step(&self) -> u64;
    /// What RDTSC would read.
    fn tsc(&mut self) -> u64;
    /// Which branches are among those that are handed over: no fewer than anybody wants.
    fn recorded(&self) -> Recorded {
        Recorded::All
    }
}

/// The callbacks of the units. The executor calls these on the units of the processor that it runs.
///
/// Order: records wait in the executor's buffer and are handed over in `branches` before any other callback, so the units hear
/// everything in the order of the program. A far transfer's record is never in a batch with others: it comes alone, with
/// the processor already in its new context, so within a batch the context is the same for all. An IRET that stays in 64-bit code of
/// the same privilege level changes nothing of the context but [`Context::interrupts`], and may be among others where nobody has asked
/// for [`Interest::interrupts`]. All have defaults that hear nothing.
pub trait Watch {
    /// What to announce. Asked at the start of every run, after every callback but those that [`Watch::is_steady`] excepts, and after an
    /// access to an MSR or debug register.
    fn interest(&mut self, _cpu: &mut dyn Processor) -> Interest {
        Interest::NOTHING
    }

    /// Whether branches change nothing of the interest that was told last: it need not be asked for after [`Watch::branches`] without
    /// effects.
    fn is_steady(&self) -> bool {
        false
    }

    /// Linear addresses before whose instructions [`Watch::before`] is called, in ascending order. Asked when
    /// [`Watch::generation`] has moved.
    fn boundaries(&self) -> &[u64] {
        &[]
    }

    /// The ranges whose accesses are announced. Asked when [`Watch::generation`] has moved.
    fn ranges(&self) -> &[Range] {
        &[]
    }

    /// Moves whenever `boundaries` or `ranges` change.
    fn generation(&self) -> u64 {
        0
    }

    /// Execution is about to run the instruction at this linear address. Effects with `debug` make it fault instead.
    fn before(&mut self, _address: u64, _cpu: &mut dyn Processor) -> Effects {
        Effects::NONE
    }

    /// Memory or a port was accessed by an instruction, which has retired when this is called; one call an access.
    fn access(&mut self, _access: &Access, _cpu: &mut dyn Processor) -> Effects {
        Effects::NONE
    }

    /// The processor accessed memory for itself: a descriptor table, a TSS, or the stack of a handler. Said of watched ranges
    /// alone, after the instruction or event that it belongs to.
    fn implicit_access(&mut self, _access: &Access, _cpu: &mut dyn Processor) -> Effects {
        Effects::NONE
    }

    /// Branches have retired.
    fn branches(&mut self, _records: &[BranchRecord], _cpu: &mut dyn Processor) -> Effects {
        Effects::NONE
    }

    /// An interrupt or exception has been delivered.
    fn event(&mut self, _event: &EventRecord, _cpu: &mut dyn Processor) -> Effects {
        Effects::NONE
    }

    /// Something that packets or filters need has changed.
    fn state(&mut self, _change: Change, _cpu: &mut dyn Processor) -> Effects {
        Effects::NONE
    }

    /// Whether [`Watch::code`] need not be said of this. Asked of each page that is translated for fetching and each block
    /// that is decoded, in whatever order with the other callbacks.
    fn knows(&mut self, _code: &Code, _cpu: &mut dyn Processor) -> bool {
        true
    }

    /// Code is executed that was not known, and the next instruction needs it. `true`: other translations of the page that
    /// the executor remembers are to be forgotten, so that they are announced when they are used.
    fn code(&mut self, _code: &Code, _cpu: &mut dyn Processor) -> bool {
        false
    }

    /// The TSC of this processor is from now on so much ahead of the machine's clock, modulo 2^64.
    fn tsc_offset(&mut self, _offset: u64) {}

    /// [`Interest::instructions`] steps have passed, or the run ends.
    fn tick(&mut self, _cpu: &mut dyn Processor) -> Effects {
        Effects::NONE
    }
}

/// A translation that failed on behalf of a unit: the guest gets #PF.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PageFault {
    /// The linear address, which goes to CR2.
    pub address: u64,
    /// The error code.
    pub code: PageFaultCode,
}

/// A physical address behind which there is no memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BadPhys {
    /// The first address that failed.
    pub address: u64,
}

/// What a unit asks of memory. Debug-store buffers are linear and may fault; processor-trace tables and outputs are
/// physical.
pub trait TraceMem {
    /// Reads at a linear address with the rights of the supervisor.
    ///
    /// # Errors
    /// The fault of the first page that does not translate.
    fn read_linear(&mut self, la: u64, bytes: &mut [u8]) -> Result<(), PageFault>;

    /// Whether a write of `len` bytes there would succeed now. Sets no accessed or dirty bits.
    ///
    /// # Errors
    /// The fault of the first page that does not translate.
    fn probe_linear(&mut self, la: u64, len: u64) -> Result<(), PageFault>;

    /// Writes `bytes` at a linear address with the rights of the supervisor. Nothing is written if any byte would fault.
    ///
    /// # Errors
    /// The fault of the first page that does not translate.
    fn write_linear(&mut self, la: u64, bytes: &[u8]) -> Result<(), PageFault>;

    /// Reads physical memory.
    ///
    /// # Errors
    /// The first address that is not memory.
    fn read_phys(&mut self, pa: u64, bytes: &mut [u8]) -> Result<(), BadPhys>;

    /// Writes physical memory. Nothing is written if any byte cannot be.
    ///
    /// # Errors
    /// The first address that is not memory.
    fn write_phys(&mut self, pa: u64, bytes: &[u8]) -> Result<(), BadPhys>;

    /// The access to physical memory that failed was to a guest-physical address that a VMM has yet to map: it is to be made again after the
    /// VM exit that tells the VMM.
    fn unmapped(&mut self) -> bool {
        false
    }
}

#[cfg(test)]
#[path = "watch_test.rs"]
mod tests;
