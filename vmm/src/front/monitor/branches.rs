//! Branch records: last-branch records and branch trace store.

use std::fmt::Write;

use x86::{
    ds::{BRANCH_PREDICTED, DsLayout, management},
    lbr::{LbrCaps, LbrCtl, LbrLayout},
    msr::*,
};

use super::{
    arguments::{Answer, bits, count},
    error::MonitorError,
    scene::Scene,
};
use crate::vm::{BranchKind, LastBranch};

/// What stands beside the addresses of a record.
fn beside(branch: &LastBranch) -> String {
    let mut text = String::new();
    for (set, name) in [
        (branch.mispredicted, " mispredicted"),
        (branch.in_transaction, " in-tsx"),
        (branch.aborted, " abort"),
    ] {
        text += if set == Some(true) { name } else { "" };
    }
    text += match branch.kind {
        None => "",
        Some(BranchKind::Conditional) => " conditional",
        Some(BranchKind::IndirectJump) => " jmp-indirect",
        Some(BranchKind::Jump) => " jmp",
        Some(BranchKind::IndirectCall) => " call-indirect",
        Some(BranchKind::Call) => " call",
        Some(BranchKind::Return) => " ret",
        Some(BranchKind::Other) => " other",
    };
    if let Some(cycles) = branch.cycles {
        let _ = write!(text, " {cycles} cycles");
    }
    text
}

/// The control registers of the stack, in words.
fn control(scene: &mut Scene<'_, '_>, caps: LbrCaps) -> String {
    let mut text = String::new();
    if caps.layout == LbrLayout::Architectural {
        const CTL: [(u32, &str); 11] = [
            (0, "LBREn"),
            (1, "OS"),
            (2, "USR"),
            (3, "CALL_STACK"),
            (16, "COND"),
            (17, "NEAR_REL_JMP"),
            (18, "NEAR_IND_JMP"),
            (19, "NEAR_REL_CALL"),
            (20, "NEAR_IND_CALL"),
            (21, "NEAR_RET"),
            (22, "OTHER_BRANCH"),
        ];
        let value = scene.msr(IA32_LBR_CTL).unwrap_or(0);
        let depth = scene.msr(IA32_LBR_DEPTH).unwrap_or(0);
        let on = if LbrCtl::from_bits(value).lbr_en() { "on" } else { "off" };
        let _ = writeln!(
            text,
            "{on}; IA32_LBR_CTL {value:#x}: {}; depth {depth}",
            bits(value, &CTL)
        );
        return text;
    }
    let debugctl = scene.msr(IA32_DEBUGCTL).unwrap_or(0);
    let on = if debugctl & 1 != 0 { "on" } else { "off" };
    let _ = write!(text, "{on} (IA32_DEBUGCTL.LBR)");
    if caps.select != 0 {
        const SELECT: [(u32, &str); 10] = [
            (0, "no-CPL-0"),
            (1, "no-CPL-above-0"),
            (2, "no-JCC"),
            (3, "no-NEAR_REL_CALL"),
            (4, "no-NEAR_IND_CALL"),
            (5, "no-NEAR_RET"),
            (6, "no-NEAR_IND_JMP"),
            (7, "no-NEAR_REL_JMP"),
            (8, "no-FAR_BRANCH"),
            (9, "EN_CALLSTACK"),
        ];
        let select = scene.msr(MSR_LBR_SELECT).unwrap_or(0);
        let _ = write!(text, "; MSR_LBR_SELECT {select:#x}: {}", bits(select, &SELECT));
    }
    if let LbrLayout::Ring { tos, .. } = caps.layout {
        let _ = write!(text, "; TOS {}", scene.msr(tos).unwrap_or(0));
    }
    text.push('\n');
    text
}

/// `lbr`.
pub fn lbr(scene: &mut Scene<'_, '_>, arguments: &[&str]) -> Answer {
    let most = count(arguments, usize::MAX)?;
    let model = scene.model();
    let (Some(caps), Some(branches)) = (model.units.lbr, scene.last_branches()) else {
        return Err(MonitorError::Lacks(model.name, "last-branch records here"));
    };
    let mut text = control(scene, caps);
    for (age, branch) in branches.iter().enumerate().take(most) {
        let from = scene.describe(branch.from);
        let to = scene.describe(branch.to);
        let _ = writeln!(text, "{age:2}  {from} -> {to}{}", beside(branch));
    }
    if branches.is_empty() {
        text += "no records\n";
    }
    if let Some(first) = caps.ler
        && let (Some(from), Some(to)) = (scene.msr(first), scene.msr(first + 1))
        && (from, to) != (0, 0)
    {
        let (from, to) = (
            LastBranch::address(from, caps.format),
            LastBranch::address(to, caps.format),
        );
        let (from, to) = (scene.describe(from), scene.describe(to));
        let _ = writeln!(text, "last exception  {from} -> {to}");
    }
    Ok(text)
}

/// A buffer of the debug-store area: base, index, maximum, threshold.
pub struct Buffer {
    /// The first record.
    pub base: u64,
    /// Where the next one goes.
    pub index: u64,
    /// Behind the last one.
    pub maximum: u64,
    /// Where an interrupt is asked for.
    pub threshold: u64,
}

impl Buffer {
    /// The buffer whose fields begin with this one.
    pub fn read(scene: &Scene<'_, '_>, area: u64, layout: DsLayout, first: u64) -> Result<Buffer, MonitorError> {
        let width = layout.field();
        let field = |n: u64| {
            let at = area.wrapping_add((first + n) * width);
            scene.word(at, width).map_err(|e| MonitorError::DebugStore(area, e))
        };
        Ok(Buffer {
            base: field(management::BTS_BASE)?,
            index: field(management::BTS_INDEX)?,
            maximum: field(management::BTS_MAXIMUM)?,
            threshold: field(management::BTS_THRESHOLD)?,
        })
    }

    /// In words, with how many records are in it.
    pub fn text(&self, records: u64) -> String {
        format!(
            "buffer {:#x} to {:#x}, index {:#x} ({records} records), threshold {:#x}\n",
            self.base, self.maximum, self.index, self.threshold
        )
    }
}

/// `bts`.
pub fn bts(scene: &mut Scene<'_, '_>, arguments: &[&str]) -> Answer {
    let most = count(arguments, 16)?;
    let model = scene.model();
    let features = scene.features();
    if scene.units().bts.is_none() {
        return Err(MonitorError::Lacks(model.name, "branch trace store here"));
    }
    let layout = DsLayout::of(features);
    let area = scene.msr(IA32_DS_AREA).unwrap_or(0);
    let value = scene.msr(IA32_DEBUGCTL).unwrap_or(0);
    let control = model.units.debugctl.map(|caps| caps.layout.decode(value));
    let on = control.is_some_and(|control| control.tr() && control.bts());
    let mut text = format!("{}; IA32_DS_AREA {area:#x}\n", if on { "on" } else { "off" });
    if area == 0 {
        return Ok(text);
    }
    let buffer = Buffer::read(scene, area, layout, 0)?;
    let (size, width) = (layout.branch_record(), layout.field());
    text += &buffer.text(buffer.index.saturating_sub(buffer.base) / size);
    let mut at = buffer.index;
    for age in 0..most {
        let Some(before) = at.checked_sub(size).filter(|before| *before >= buffer.base) else {
            break;
        };
        at = before;
        let field = |n: u64| scene.word(at.wrapping_add(n * width), width);
        let (from, to, flags) = (field(0)?, field(1)?, field(2)?);
        let predicted = if flags & BRANCH_PREDICTED != 0 {
            " predicted"
        } else {
            ""
        };
        let (from, to) = (scene.describe(from), scene.describe(to));
        let _ = writeln!(text, "{age:2}  {from} -> {to}{predicted}");
    }
    Ok(text)
}

#[cfg(test)]
#[path = "branches_test.rs"]
mod tests;
