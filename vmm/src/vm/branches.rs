//! Last-branch records of a CPU, whatever form its model's registers give them.

use devices::unit::branch_ring::Entry;
use x86::lbr::{LbrFormat, LbrInfo, branch_type};

use super::parts::Vm;

/// A branch among the last of a CPU. What its model does not record is `None`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LastBranch {
    /// The branch: a linear address, or an offset in its code segment where the model records those.
    pub from: u64,
    /// Where it led.
    pub to: u64,
    /// It, or its target, was mispredicted.
    pub mispredicted: Option<bool>,
    /// It was in a transaction.
    pub in_transaction: Option<bool>,
    /// It is the abort of one.
    pub aborted: Option<bool>,
    /// Core clocks since the record before.
    pub cycles: Option<u16>,
    /// What kind of branch it was.
    pub kind: Option<BranchKind>,
}

/// What architectural records say of a branch. SDM Vol. 3B 19.1.3.2 "Branch Types".
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BranchKind {
    /// Jcc and its kin.
    Conditional,
    /// Near indirect JMP.
    IndirectJump,
    /// Near relative JMP.
    Jump,
    /// Near indirect CALL.
    IndirectCall,
    /// Near relative CALL.
    Call,
    /// Near RET.
    Return,
    /// Far branches and events.
    Other,
}

impl LastBranch {
    /// The record that stands in an entry's registers.
    pub fn of(entry: &Entry, format: LbrFormat) -> LastBranch {
        let flag = |bit: u32| Some(entry.from >> bit & 1 != 0);
        let plain = LastBranch {
            from: LastBranch::address(entry.from, format),
            to: LastBranch::address(entry.to, format),
            ..LastBranch::default()
        };
        match format {
            LbrFormat::Offset32 | LbrFormat::Linear | LbrFormat::Effective => plain,
            LbrFormat::EffectiveFlags => LastBranch {
                mispredicted: flag(63),
                ..plain
            },
            LbrFormat::EffectiveTsx => LastBranch {
                mispredicted: flag(63),
                in_transaction: flag(62),
                aborted: flag(61),
                ..plain
            },
            LbrFormat::LinearCycles => LastBranch {
                mispredicted: flag(63),
                cycles: Some((entry.to >> 48) as u16),
                ..plain
            },
            LbrFormat::EffectiveInfo | LbrFormat::LinearInfo | LbrFormat::Architectural => {
                let info = LbrInfo::from_bits(entry.info);
                let architectural = format == LbrFormat::Architectural;
                LastBranch {
                    mispredicted: Some(info.mispred()),
                    in_transaction: Some(info.in_tsx()),
                    aborted: Some(info.tsx_abort()),
                    cycles: (!architectural || info.cycles_valid()).then_some(info.cycles()),
                    kind: architectural.then(|| BranchKind::of(info.branch_type())),
                    ..plain
                }
            }
        }
    }

    /// An address of an entry, without the flags or cycles that some formats have in its high bits.
    pub fn address(value: u64, format: LbrFormat) -> u64 {
        let up = match format {
            LbrFormat::EffectiveFlags | LbrFormat::EffectiveTsx | LbrFormat::LinearCycles => 16,
            _ => 0,
        };
        ((value << up) as i64 >> up) as u64
    }
}

impl BranchKind {
    fn of(code: u8) -> BranchKind {
        match code {
            branch_type::COND => BranchKind::Conditional,
            branch_type::NEAR_IND_JMP => BranchKind::IndirectJump,
            branch_type::NEAR_REL_JMP => BranchKind::Jump,
            branch_type::NEAR_IND_CALL => BranchKind::IndirectCall,
            branch_type::NEAR_REL_CALL => BranchKind::Call,
            branch_type::NEAR_RET => BranchKind::Return,
            _ => BranchKind::Other,
        }
    }
}

impl Vm {
    /// The last branches that a CPU has recorded for its guest, the newest first; those that were never filled are left out. `None`: there
    /// is no such CPU, or its records are not this program's.
    pub fn last_branches(&self, cpu: usize) -> Option<Vec<LastBranch>> {
        let caps = self.machine.model().units.lbr?;
        let units = self.machine.units_of(cpu)?;
        let mut entries: Vec<Entry> = match (&units.lbr, &units.arch_lbr) {
            (Some(unit), _) => unit.newest().collect(),
            (_, Some(unit)) => unit.newest().collect(),
            _ => return None,
        };
        let used = entries.iter().rposition(|entry| *entry != Entry::default());
        entries.truncate(used.map_or(0, |last| last + 1));
        Some(entries.iter().map(|entry| LastBranch::of(entry, caps.format)).collect())
    }
}

#[cfg(test)]
#[path = "branches_test.rs"]
mod tests;
