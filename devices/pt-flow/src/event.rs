use crate::time::Time;
use pt_packet::{ErrorKind, ExecMode, ItemSize};
use std::fmt;

/// How a block of straight-line code ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum End {
    /// Nowhere special: the next block goes on right behind it (the block is long, or reaches the end of its page).
    Continue,
    /// A conditional branch: Jcc, JCXZ, LOOP.
    Conditional,
    /// A direct jump.
    Jump,
    /// A direct call.
    Call,
    /// An indirect jump.
    IndirectJump,
    /// An indirect call.
    IndirectCall,
    /// A near return.
    Return,
    /// A far transfer: far jump, call or return, IRET, SYSCALL, SYSRET, SYSENTER, SYSEXIT, a software interrupt, VM entry.
    Far,
    /// MOV to CR3.
    MovCr3,
    /// PTWRITE.
    PtWrite,
    /// In front of an instruction at which something came from outside: an interrupt, a fault, the end of tracing, a change
    /// of the code, a PSB.
    Cut,
}

/// Instructions that were executed one after the other, without a branch between them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Block {
    /// Linear address of the first.
    pub ip: u64,
    /// Length in bytes.
    pub len: u32,
    /// How many instructions there are, at least one.
    pub count: u16,
    /// How the block ends.
    pub end: End,
    /// The mode that they are executed in.
    pub mode: ExecMode,
}

/// Something that is not an instruction, and where in the trace its packet stands.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Event {
    /// Byte offset in the trace.
    pub offset: u64,
    /// What it is.
    pub kind: EventKind,
}

/// What can happen between blocks.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum EventKind {
    /// Tracing was on already where decoding begins.
    Sync {
        /// The next instruction.
        ip: u64,
    },
    /// TIP.PGE: packets are generated from here on.
    Enabled {
        /// The next instruction, where the packet tells it.
        ip: Option<u64>,
    },
    /// TIP.PGD: packets are no longer generated.
    Disabled {
        /// The instruction at which that came from outside; `None` when the last instruction did it.
        at: Option<u64>,
        /// Where execution went, where the packet tells it.
        to: Option<u64>,
    },
    /// An interrupt, an exception, a VM exit or the like.
    Async {
        /// The instruction that was not executed, or not completed.
        from: u64,
        /// Where execution went.
        to: Option<u64>,
        /// It was a VM exit: to the VMM, as the PIP with it tells.
        vm_exit: bool,
    },
    /// MODE.Exec, where it takes effect.
    Mode {
        /// The new mode.
        mode: ExecMode,
        /// RFLAGS.IF, where events are traced.
        interrupts: bool,
    },
    /// MODE.TSX.
    Transaction {
        /// Where it takes effect, where that is reported.
        ip: Option<u64>,
        /// A transaction begins or goes on.
        in_tx: bool,
        /// It was aborted.
        abort: bool,
    },
    /// PIP, where it takes effect.
    Paging {
        /// CR3 without bits 4:0.
        cr3: u64,
        /// In VMX non-root operation.
        non_root: bool,
    },
    /// VMCS.
    Vmcs {
        /// The VMCS pointer.
        pointer: u64,
    },
    /// PTWRITE.
    PtWrite {
        /// The PTWRITE, where it is known.
        ip: Option<u64>,
        /// Its operand.
        value: u64,
        /// The operand's size.
        size: ItemSize,
    },
    /// Execution stopped (EXSTOP).
    Stopped {
        /// Where, if it is reported.
        ip: Option<u64>,
    },
    /// MWAIT.
    Mwait {
        /// EAX\[7:0\].
        hints: u32,
        /// ECX\[1:0\].
        extensions: u32,
    },
    /// A C-state was entered (PWRE).
    PowerEntry {
        /// The hardware's own doing.
        hardware: bool,
        /// Resolved thread C-state.
        state: u8,
        /// Resolved thread sub C-state.
        sub_state: u8,
    },
    /// Back in C0 (PWRX).
    PowerExit {
        /// Last core C-state.
        last: u8,
        /// Deepest core C-state.
        deepest: u8,
        /// Why, as the packet has it.
        reason: u8,
    },
    /// CFE: what kind of event the next [`EventKind::Async`] is, or that one is over.
    ControlFlow {
        /// Where, if it is reported.
        ip: Option<u64>,
        /// Type of the CFE packet.
        kind: u8,
        /// The vector, where the type has one.
        vector: u8,
    },
    /// EVD: data of the event that follows.
    EventData {
        /// Type of the EVD packet.
        kind: u8,
        /// The value.
        value: u64,
    },
    /// MNT: model-specific.
    Maintenance {
        /// The value.
        value: u64,
    },
    /// Time goes on: TSC, MTC, CYC or CBR.
    Time(Time),
    /// Execution entered a TraceStop region.
    TraceStop,
    /// OVF: the processor lost packets.
    Overflow,
    /// Execution is known again after an overflow or a gap.
    Resumed {
        /// The next instruction.
        ip: u64,
    },
    /// Something could not be decoded; instructions are missing until the next [`EventKind::Resumed`], [`EventKind::Sync`]
    /// or [`EventKind::Enabled`].
    Gap(GapKind),
}

/// Why instructions are missing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GapKind {
    /// Bytes before the first PSB, or, behind bytes that mean nothing, before the next.
    Skipped {
        /// How many.
        bytes: u64,
    },
    /// Bytes that are no packet.
    Packet(ErrorKind),
    /// The image has no code here.
    NoCode {
        /// Where.
        ip: u64,
    },
    /// The code is no instruction that is known.
    BadInstruction {
        /// Where.
        ip: u64,
    },
    /// The code needs another packet than the one that is there: trace and image do not belong together.
    Mismatch {
        /// The block whose last instruction it is.
        ip: u64,
    },
    /// The code does not lead to the address that a packet tells.
    Unreached {
        /// From where.
        from: u64,
        /// To where.
        to: u64,
    },
    /// A compressed return without its call.
    NoCall {
        /// The block that the return ends.
        ip: u64,
    },
    /// Direct jumps without end.
    Endless {
        /// One of them.
        ip: u64,
    },
    /// The IP is out of context where one is needed.
    NoIp,
    /// The stretch between two PSBs is larger than memory allows for.
    TooLong,
    /// The position of a change of the code is not on the way. The change was made where the way left it.
    ChangeUnreached {
        /// The instruction that was to be executed first.
        ip: u64,
    },
}

impl fmt::Display for GapKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            GapKind::Skipped { bytes } => write!(f, "{bytes} bytes without a PSB before them were skipped"),
            GapKind::Packet(kind) => write!(f, "{kind}"),
            GapKind::NoCode { ip } => write!(f, "the code at {ip:#x} is not there"),
            GapKind::BadInstruction { ip } => write!(f, "the code at {ip:#x} is no known instruction"),
            GapKind::Mismatch { ip } => write!(f, "the code at {ip:#x} does not go with the packets"),
            GapKind::Unreached { from, to } => write!(f, "the code at {from:#x} does not lead to {to:#x}"),
            GapKind::NoCall { ip } => write!(
                f,
                "the return of the code at {ip:#x} is compressed, but its call was not seen"
            ),
            GapKind::Endless { ip } => write!(f, "the code at {ip:#x} is an endless loop"),
            GapKind::NoIp => write!(f, "a packet lacks its IP"),
            GapKind::TooLong => write!(f, "no PSB for too long"),
            GapKind::ChangeUnreached { ip } => write!(f, "the code was to change at {ip:#x}, which was not reached"),
        }
    }
}

/// Takes what the decoder finds, in the order of the trace.
pub trait Visitor {
    /// Whether [`Visitor::code`] is wanted. What nobody wants costs nothing.
    const CODE: bool = false;

    /// Instructions were executed.
    fn block(&mut self, block: &Block);

    /// The bytes of the block that [`Visitor::block`] tells next, as they were when it was executed.
    fn code(&mut self, block: &Block, bytes: &[u8]) {
        let _ = (block, bytes);
    }

    /// Something else happened.
    #[inline]
    fn event(&mut self, event: &Event) {
        let _ = event;
    }
}

/// Keeps all blocks, and what was not clear.
#[derive(Clone, Debug, Default)]
pub struct Blocks {
    /// The blocks in the order of the trace.
    pub blocks: Vec<Block>,
    /// The events that are [gaps](EventKind::Gap).
    pub gaps: Vec<Event>,
}

impl Visitor for Blocks {
    fn block(&mut self, block: &Block) {
        self.blocks.push(*block);
    }

    fn event(&mut self, event: &Event) {
        if let EventKind::Gap(_) = event.kind {
            self.gaps.push(*event);
        }
    }
}

/// What was found, in numbers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Summary {
    /// Bytes of trace.
    pub bytes: u64,
    /// PSBs.
    pub psbs: u64,
    /// Blocks.
    pub blocks: u64,
    /// Instructions.
    pub instructions: u64,
    /// OVF packets.
    pub overflows: u64,
    /// Gaps.
    pub gaps: u64,
}

impl std::ops::AddAssign for Summary {
    fn add_assign(&mut self, other: Summary) {
        self.bytes += other.bytes;
        self.psbs += other.psbs;
        self.blocks += other.blocks;
        self.instructions += other.instructions;
        self.overflows += other.overflows;
        self.gaps += other.gaps;
    }
}
