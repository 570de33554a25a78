//! Architectural last-branch records. SDM Vol. 3B ch. 19 "Last Branch Records".
//!
//! # Theory
//! The same idea as the stack of [`super::lbr`], with what had grown by itself put in order:
//!
//! - CPUID.1CH says what there is, instead of the model number.
//! - IA32_LBR_CTL is the enable and the filter in one; IA32_DEBUGCTL.LBR is gone (it reads 0). A filter bit lets a kind of
//!   branch *in*, where MSR_LBR_SELECT keeps it out. OS and USR ask where a branch ends; if it comes from a ring that is
//!   not let in, FROM is all ones, so no kernel address leaks into a user's profile (19.1.2 "Configuration").
//! - Entry 0 is the newest, entry 1 the one before: there is no pointer. Recording moves everything along.
//! - IA32_LBR_DEPTH says how many entries there are; a write to it, of whatever valid value, clears them all, which is the
//!   quick way to do that. Entries beyond the depth are #GP(0).
//! - INFO also says what kind of branch it was, and whether its cycles mean anything.
//! - In call-stack mode a near return takes entry 0 off and everything moves back; the place at the far end becomes 0.
//! - A debug exception clears LBREn (19.1.4 "Interaction with Other Processor Features"); a warm reset clears LBREn and
//!   leaves all else (a machine ends at a reset, so that no guest sees one); INIT, which is not a reset, leaves everything, as it
//!   leaves IA32_DEBUGCTL (Vol. 3A Table 10-1 "IA-32 and Intel 64 Processor States Following Power-up, Reset, or INIT");
//!   FREEZE_LBRS_ON_PMI sets IA32_PERF_GLOBAL_STATUS.LBR_FRZ, which stops recording.
//! - XSAVES component 15 holds all of it (Vol. 1 13.5.14 "LBR State"). Saving changes nothing: LBREn falls at a debug
//!   exception, an SMI and a warm reset only (19.1.4), and Linux reads the entries by XSAVES in its NMI handler without ever
//!   setting LBREn again. An image of another depth does not fit: XRSTORS takes its control and last-exception record and
//!   clears the entries.
//!
//! # Practice
//! [`ArchLbr`] is the registers over a [`BranchRing`], entry n being the one that is n older than the newest.

use serde::{Deserialize, Serialize};
use x86::lbr::{ArchLbrLeaf, LbrCtl, LbrInfo, MAX_DEPTH, image};
use x86::msr::{
    IA32_LBR_0_FROM_IP, IA32_LBR_0_INFO, IA32_LBR_0_TO_IP, IA32_LBR_CTL, IA32_LBR_DEPTH, IA32_LER_INFO,
    MSR_LER_FROM_LIP, MsrFault,
};
use x86::watch::{BranchRecord, Change, Context, EventRecord, Interest, Recorded};

use super::branch_ring::{Beside, BranchRing, Entry, Filter, LazyRing, Style, kinds};
use super::lbr::is_canonical;

/// IA32_LER_TO_IP follows IA32_LER_FROM_IP.
const LER_TO: u32 = MSR_LER_FROM_LIP + 1;
/// The bits of INFO that keep what is written; bits 55:16 are undefined, and a write of them does not fault.
const INFO: u64 = !0x00FF_FFFF_FFFF_0000;

/// The architectural last-branch registers of one logical processor.
#[derive(Clone, Debug)]
pub struct ArchLbr {
    leaf: ArchLbrLeaf,
    style: Style,
    linear_bits: u32,
    running: bool,
    control: LbrCtl,
    /// In system-management mode: LBREn as RSM brings it back.
    interrupted: bool,
    ring: LazyRing,
}

/// The whole state of [`ArchLbr`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ArchLbrState {
    /// IA32_LBR_CTL.
    pub control: u64,
    /// In system-management mode: LBREn as RSM brings it back.
    pub interrupted: bool,
    /// The ring; its depth is IA32_LBR_DEPTH.
    pub ring: BranchRing,
    /// Recording was on at the last word.
    pub running: bool,
}

impl ArchLbr {
    /// The registers that CPUID.1CH describes. `linear_bits` is the width of linear addresses.
    pub fn new(leaf: ArchLbrLeaf, linear_bits: u32) -> Self {
        Self {
            leaf,
            style: Style {
                linear: leaf.linear(),
                beside: Beside::ArchitecturalInfo {
                    mispredict: leaf.mispredict(),
                    timed: leaf.timed(),
                    branch_type: leaf.branch_type(),
                },
            },
            linear_bits,
            running: false,
            control: LbrCtl::new(),
            interrupted: false,
            ring: BranchRing::new(leaf.max_depth()).into(),
        }
    }

    /// RDMSR.
    ///
    /// # Errors
    /// [`MsrFault::GeneralProtection`] for an entry beyond IA32_LBR_DEPTH, [`MsrFault::Unclaimed`] for a register that is not
    /// one of these.
    pub fn read_msr(&self, msr: u32) -> Result<u64, MsrFault> {
        Ok(match self.register(msr)? {
            Register::Control => self.control.into_bits(),
            Register::Depth => self.ring.depth().into(),
            Register::Exception(field) => field.of(&self.ring.with_records().last_exception),
            Register::Entry(age, field) => field.of(self.ring.with_records().by_age(age)),
        })
    }

    /// WRMSR.
    ///
    /// # Errors
    /// [`MsrFault::GeneralProtection`] for a reserved bit, a depth that CPUID does not name, an address that is not canonical or
    /// an entry beyond IA32_LBR_DEPTH; [`MsrFault::Unclaimed`] for a register that is not one of these.
    pub fn write_msr(&mut self, msr: u32, value: u64) -> Result<(), MsrFault> {
        match self.register(msr)? {
            Register::Control if value & !self.leaf.control() != 0 => return Err(MsrFault::GeneralProtection),
            Register::Control => self.control = LbrCtl::from_bits(value),
            Register::Depth if !self.leaf.has_depth(value) || value > MAX_DEPTH as u64 => {
                return Err(MsrFault::GeneralProtection);
            }
            Register::Depth => {
                let ring = self.ring.get();
                let exception = ring.last_exception;
                ring.clear();
                ring.last_exception = exception;
                ring.depth = value as u8;
            }
            Register::Exception(field) => {
                self.accepts(field, value)?;
                field.set(&mut self.ring.get().last_exception, value);
            }
            Register::Entry(age, field) => {
                self.accepts(field, value)?;
                field.set(self.ring.get().by_age_mut(age), value);
            }
        }
        Ok(())
    }

    /// What the executor has to say. To be asked after every callback and every write of a register, with where the processor
    /// stands, which is looked at only where something is recorded. `frozen` is IA32_PERF_GLOBAL_STATUS.LBR_FRZ.
    pub fn interest(&mut self, frozen: bool, code: impl FnOnce() -> Context) -> Interest {
        let records = self.records(frozen);
        if records && !self.running {
            self.ring.get().start();
        }
        self.running = records;
        if records {
            self.ring.now(code());
        }
        Interest {
            branches: Recorded::Taken.when(records),
            ..Interest::NOTHING
        }
    }

    /// Which branches are in the next batch.
    pub fn comes(&mut self, recorded: Recorded) {
        self.ring.comes(recorded);
    }

    /// `Watch` callback: branches have retired. `code` is where the processor stands now.
    pub fn branches(&mut self, records: &[BranchRecord], frozen: bool, code: Context) {
        if self.records(frozen) {
            self.ring.record(records, &self.filter(), &self.style, code);
        }
    }

    /// `Watch` callback: an interrupt or exception was delivered.
    pub fn event(&mut self, event: &EventRecord, frozen: bool, code: Context) {
        if event.debug {
            self.control.set_lbr_en(false);
        } else if self.records(frozen) {
            self.ring.note_exception();
            self.ring.record(&[event.branch], &self.filter(), &self.style, code);
        }
        self.ring.now(code);
    }

    /// `Watch` callback: a transaction was aborted, which is an entry of its own. To be said before the change itself.
    pub fn transaction_aborted(&mut self, record: &BranchRecord, frozen: bool, code: Context) {
        if self.records(frozen) {
            let filter = self.filter();
            self.ring.get().record_abort(record, &filter, &self.style, code);
        }
    }

    /// A `Watch` callback.
    pub fn state_changed(&mut self, change: Change, code: Context) {
        match change {
            Change::TransactionBegin { .. } => self.ring.get().transaction = true,
            Change::TransactionCommit { .. } | Change::TransactionAbort { .. } => self.ring.get().transaction = false,
            Change::Reset => {
                self.ring = BranchRing::new(self.leaf.max_depth()).into();
                self.control = LbrCtl::new();
                self.running = false;
                self.interrupted = false;
            }
            // SDM Vol. 3B 19.1.4 "Interaction with Other Processor Features": an SMI saves LBREn and clears it, RSM brings it back.
            Change::Smi { .. } => {
                self.interrupted = self.control.lbr_en();
                self.control.set_lbr_en(false);
            }
            Change::Rsm if std::mem::take(&mut self.interrupted) => self.control.set_lbr_en(true),
            _ => {}
        }
        self.ring.now(code);
    }

    /// A warm reset: recording is off, and all else is as it was. SDM Vol. 3B 19.1.4 "Interaction with Other Processor Features".
    pub fn warm_reset(&mut self) {
        self.control.set_lbr_en(false);
    }

    /// XSAVES of component 15: whether it is in its initial state, and then nothing is written.
    pub fn save(&self, area: &mut [u8]) -> bool {
        let ring = self.ring.with_records();
        let initial = self.control.into_bits() == 0
            && ring.last_exception == Entry::default()
            && ring.entries == [Entry::default(); MAX_DEPTH];
        if initial {
            return true;
        }
        let exception = ring.last_exception;
        put(area, image::CTL, self.control.into_bits());
        put(area, image::DEPTH, ring.depth.into());
        put(area, image::LER_FROM, exception.from);
        put(area, image::LER_TO, exception.to);
        put(area, image::LER_INFO, exception.info);
        for age in 0..MAX_DEPTH as u8 {
            let at = image::ENTRIES + usize::from(age) * image::ENTRY;
            let entry = if age < ring.depth {
                *ring.by_age(age)
            } else {
                Entry::default()
            };
            put(area, at, entry.from);
            put(area, at + 8, entry.to);
            put(area, at + 16, entry.info);
        }
        false
    }

    /// XRSTORS of component 15, from an image or to the initial state.
    ///
    /// # Errors
    /// [`MsrFault::GeneralProtection`] for an image that WRMSR would refuse, with nothing changed.
    pub fn restore(&mut self, area: Option<&[u8]>) -> Result<(), MsrFault> {
        let Some(area) = area else {
            self.control = LbrCtl::new();
            self.ring.get().clear();
            return Ok(());
        };
        let control = get(area, image::CTL);
        if control & !self.leaf.control() != 0 {
            return Err(MsrFault::GeneralProtection);
        }
        let triple = |at: usize| Entry {
            from: get(area, at),
            to: get(area, at + 8),
            info: get(area, at + 16) & INFO,
        };
        let exception = triple(image::LER_FROM);
        let mut entries = [Entry::default(); MAX_DEPTH];
        if get(area, image::DEPTH) == u64::from(self.ring.depth()) {
            for (age, entry) in entries.iter_mut().take(self.ring.depth().into()).enumerate() {
                *entry = triple(image::ENTRIES + age * image::ENTRY);
            }
        }
        let canonical = |entry: &Entry| {
            [entry.from, entry.to]
                .iter()
                .all(|&a| is_canonical(a, self.linear_bits))
        };
        if !entries.iter().chain([&exception]).all(canonical) {
            return Err(MsrFault::GeneralProtection);
        }
        self.control = LbrCtl::from_bits(control);
        let ring = self.ring.get();
        ring.clear();
        ring.last_exception = exception;
        for (age, entry) in entries.iter().take(ring.depth.into()).enumerate() {
            *ring.by_age_mut(age as u8) = *entry;
        }
        Ok(())
    }

    /// The newest records first, for a PEBS record's group of last branches.
    pub fn newest(&self) -> impl Iterator<Item = Entry> {
        let ring = self.ring.with_records();
        (0..ring.depth).map(move |age| *ring.by_age(age))
    }

    /// Makes what has been recorded ready to be read: not necessary, but each read of a register would do it for itself.
    pub fn apply_records(&mut self) {
        self.ring.get();
    }

    /// The whole state.
    pub fn state(&self) -> ArchLbrState {
        ArchLbrState {
            control: self.control.into_bits(),
            interrupted: self.interrupted,
            ring: self.ring.with_records().into_owned(),
            running: self.running,
        }
    }

    /// Takes a whole state back; what CPUID does not name is dropped.
    pub fn set_state(&mut self, state: ArchLbrState) {
        self.control = LbrCtl::from_bits(state.control & self.leaf.control());
        self.running = state.running;
        self.interrupted = state.interrupted;
        let mut ring = state.ring;
        if !self.leaf.has_depth(ring.depth.into()) || usize::from(ring.depth) > MAX_DEPTH {
            ring.depth = self.leaf.max_depth().clamp(1, MAX_DEPTH as u8);
        }
        ring.top %= ring.depth;
        self.ring = ring.into();
    }

    fn records(&self, frozen: bool) -> bool {
        self.control.lbr_en() && !frozen
    }

    fn filter(&self) -> Filter {
        let c = self.control;
        let mut passing = 0;
        for (set, kind) in [
            (c.cond(), kinds::COND),
            (c.near_rel_jmp(), kinds::JUMP),
            (c.near_ind_jmp(), kinds::JUMP_IND),
            (c.near_rel_call(), kinds::CALL),
            (c.near_ind_call(), kinds::CALL_IND),
            (c.near_ret(), kinds::RET),
            (c.other_branch(), kinds::FAR),
        ] {
            passing |= if set { kind } else { 0 };
        }
        Filter {
            kinds: if self.leaf.branch_filter() { passing } else { kinds::ALL },
            kernel: c.os() || !self.leaf.cpl_filter(),
            user: c.usr() || !self.leaf.cpl_filter(),
            call_stack: c.call_stack(),
            hide_source: true,
        }
    }

    fn accepts(&self, field: Field, value: u64) -> Result<(), MsrFault> {
        if field == Field::Info || is_canonical(value, self.linear_bits) {
            Ok(())
        } else {
            Err(MsrFault::GeneralProtection)
        }
    }

    fn register(&self, msr: u32) -> Result<Register, MsrFault> {
        match msr {
            IA32_LBR_CTL => return Ok(Register::Control),
            IA32_LBR_DEPTH => return Ok(Register::Depth),
            MSR_LER_FROM_LIP => return Ok(Register::Exception(Field::From)),
            LER_TO => return Ok(Register::Exception(Field::To)),
            IA32_LER_INFO => return Ok(Register::Exception(Field::Info)),
            _ => {}
        }
        for (first, field) in [
            (IA32_LBR_0_FROM_IP, Field::From),
            (IA32_LBR_0_TO_IP, Field::To),
            (IA32_LBR_0_INFO, Field::Info),
        ] {
            if (first..first + u32::from(self.leaf.max_depth())).contains(&msr) {
                let age = (msr - first) as u8;
                return if age < self.ring.depth() {
                    Ok(Register::Entry(age, field))
                } else {
                    Err(MsrFault::GeneralProtection)
                };
            }
        }
        Err(MsrFault::Unclaimed)
    }
}

/// What a number stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Register {
    Control,
    Depth,
    Exception(Field),
    Entry(u8, Field),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Field {
    From,
    To,
    Info,
}

impl Field {
    fn of(self, entry: &Entry) -> u64 {
        match self {
            Self::From => entry.from,
            Self::To => entry.to,
            Self::Info => entry.info,
        }
    }

    fn set(self, entry: &mut Entry, value: u64) {
        match self {
            Self::From => entry.from = value,
            Self::To => entry.to = value,
            Self::Info => entry.info = LbrInfo::from_bits(value & INFO).into_bits(),
        }
    }
}

fn put(area: &mut [u8], at: usize, value: u64) {
    if let Some(bytes) = area.get_mut(at..at + 8) {
        bytes.copy_from_slice(&value.to_le_bytes());
    }
}

fn get(area: &[u8], at: usize) -> u64 {
    area.get(at..at + 8)
        .and_then(|bytes| bytes.try_into().ok())
        .map_or(0, u64::from_le_bytes)
}

#[cfg(test)]
#[path = "arch_lbr_test.rs"]
mod tests;
