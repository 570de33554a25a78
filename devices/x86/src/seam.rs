//! The words between whatever executes instructions and the units that watch them.
//!
//! # Theory
//! Every debug or trace unit watches the stream of retired instructions. One record for each instruction could be
//! neither complete nor fast, so the executor says five things, each only when somebody listens: `before` a marked
//! address, an `access` to memory, a `branch`, an `event`, a change of `state`.
//!
//! # Practice
//! A branch is a [`BranchRecord`], appended to a buffer that the units drain when it is full, before any event, and
//! before a unit's register is read or written. The units answer with an [`Appetite`], which tells the executor what it
//! may leave out, and reach memory through [`TraceMem`].
//!
//! # Left out
//! The wiring, and the words whose shape only the units can settle: `before`, `access`, `event`, `state`.

use crate::fault::PageFaultCode;

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
}

impl Flow {
    /// Every value, in the order of the codes.
    pub const ALL: [Flow; 18] = [
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
    /// Zero.
    pub reserved: u32,
}

const _: () = assert!(size_of::<BranchRecord>() == 32, "a record is half a cache line");

/// How closely the units need to watch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Appetite {
    /// Nobody watches.
    #[default]
    Nothing,
    /// Every branch is to be recorded.
    Branches,
    /// Every instruction is to be announced.
    EveryInstruction,
}

impl Appetite {
    /// What satisfies both.
    pub fn and(self, other: Self) -> Self {
        self.max(other)
    }
}

/// A translation that failed on behalf of a unit: the guest gets #PF.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
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

    /// Writes physical memory.
    ///
    /// # Errors
    /// The first address that is not memory.
    fn write_phys(&mut self, pa: u64, bytes: &[u8]) -> Result<(), BadPhys>;
}

#[cfg(test)]
mod tests {
    use super::*;

    // covers: 2/seam-vocabulary
    #[test]
    fn flow_codes_round_trip() {
        for (code, flow) in Flow::ALL.into_iter().enumerate() {
            assert_eq!(usize::from(flow.code()), code, "{flow:?}");
            assert_eq!(Flow::from_code(flow.code()), Some(flow));
            assert_eq!(flow.taken(), flow != Flow::Cond { taken: false });
        }
        for code in 18..=u8::MAX {
            assert_eq!(Flow::from_code(code), None);
        }
    }

    // covers: 2/seam-vocabulary
    #[test]
    fn a_record_has_the_layout_that_machine_code_writes() {
        use core::mem::offset_of;
        for (offset, expected, field) in [
            (offset_of!(BranchRecord, from), 0, "from"),
            (offset_of!(BranchRecord, to), 8, "to"),
            (offset_of!(BranchRecord, step), 16, "step"),
            (offset_of!(BranchRecord, flow), 24, "flow"),
            (offset_of!(BranchRecord, length), 25, "length"),
            (offset_of!(BranchRecord, from_cpl), 26, "from_cpl"),
            (offset_of!(BranchRecord, to_cpl), 27, "to_cpl"),
            (offset_of!(BranchRecord, reserved), 28, "reserved"),
        ] {
            assert_eq!(offset, expected, "{field}");
        }
    }

    // covers: 2/seam-vocabulary
    #[test]
    fn the_hungrier_appetite_wins() {
        use Appetite::*;
        for (a, b, expected) in [
            (Nothing, Nothing, Nothing),
            (Nothing, Branches, Branches),
            (EveryInstruction, Branches, EveryInstruction),
            (Branches, EveryInstruction, EveryInstruction),
        ] {
            assert_eq!(a.and(b), expected);
        }
    }
}
