//! Last-branch records of parts before the architectural ones: the stack, its filter, the last-exception record. SDM Vol. 3B
//! 18.4 "Last Branch, Interrupt, and Exception Recording Overview" and 18.5 to 18.16.
//!
//! # Theory
//! The processor keeps the last few branches it took in model-specific registers: a ring of FROM and TO (and INFO) with a
//! pointer to the newest, TOS. It is the cheapest of all traces, since nothing leaves the core, and the only one with which a
//! debugger can ask "how did I come here" after the fact. What makes it hard to virtualize is that every generation lays it
//! out in its own way and that the rules stand in a dozen sections. Here they are together.
//!
//! *What is recorded.* Every branch that is taken, every far transfer, every interrupt and exception, but never a debug
//! exception: its handler is the reader of the stack. Before that handler runs the processor clears IA32_DEBUGCTL.LBR, so that
//! the handler's own branches do not push out what it came for (18.4.2 "Monitoring Branches, Exceptions, and Interrupts").
//! A conditional branch that falls through is no branch here.
//!
//! *In which order.* TOS is moved first and then written, so it points *at* the newest record (18.4.8 "LBR Stack"). A branch
//! that is at once interrupted leaves two records, the branch and then the interrupt (18.13.2 "LBR Stack for Processors Based
//! on Intel NetBurst Microarchitecture").
//!
//! *What an address is.* IA32_PERF_CAPABILITIES\[5:0\] says it (18.4.8.1 "LBR Stack and Intel 64 Processors"): an offset in
//! the code segment or a linear address, which differ wherever CS has a base; outside of 64-bit mode the upper half is 0. The
//! branch's own flags take the top bits of FROM (MISPRED in 63, from Haswell on IN_TSX in 62 and TSX_ABORT in 61) until
//! Skylake gives them a register. Below the flags an address is sign-extended, so a reader has to shift it left and back.
//!
//! *What is let in.* MSR_LBR_SELECT names what is kept *out* (18.9.2 "Filtering of Last Branch Records"). Its two ring bits ask
//! where a branch *ends*: with CPL_EQ_0 set, a system call is out and the return to ring 3 is in, with a kernel address in
//! its FROM. Which is why profilers filter once more in software.
//!
//! *Call-stack mode* (18.11 "... for Processors Based on Haswell Microarchitecture"): a CALL that passes is recorded as ever, and
//! a RET that passes takes the newest record off, so the ring holds the frames that are still open, not the leaves that have
//! returned. The reader sets the filters so that calls and returns pass and nothing else does. CALL to the next instruction,
//! by which position-dependent code finds its address, has no RET and is left out, or it would shift every later frame.
//!
//! *The last-exception record*: when an interrupt or exception comes, the branch before it is copied, before the event itself
//! is recorded (18.16.2 "Last Branch and Last Exception MSRs", which the younger parts repeat). Filters have no say in it.
//!
//! *What stops it.* Clearing IA32_DEBUGCTL.LBR; a debug exception; a PMI with FREEZE_LBRS_ON_PMI, which clears LBR on the older
//! parts and sets IA32_PERF_GLOBAL_STATUS.LBR_FRZ on those with the streamlined freeze (18.4.7 "Freezing LBR and Performance
//! Counters on PMI"). None of them clears what was recorded. On the Core microarchitecture TR alone keeps the stack moving,
//! because branch trace messages are taken from there. On Broadwell Intel PT and the stack exclude each other: while PT
//! traces, the registers read 0 and drop writes, and when it stops tracing the stack is empty (Vol. 3C 33.3.1.2 "Model Specific
//! Capability Restrictions").
//!
//! *Who may write it.* An operating system that switches tasks saves and restores the stack, so from the Core
//! microarchitecture on FROM, TO, INFO and TOS can be written; the Pentium 4's and P6's cannot, and neither can the
//! last-exception record. What is written has to look like a record: an address that is not sign-extended is #GP(0). On a
//! part with Haswell's format but without transactions (by a microcode update, say) the two TSX bits belong to the sign, and
//! an operating system that restores a record with the bits that it would have elsewhere gets #GP(0).
//!
//! *Reset.* Power-up clears everything; INIT touches none of it (Vol. 3A Table 10-1, "all other MSRs").
//!
//! # Practice
//! [`Lbr`] is the registers; the ring behind them is [`BranchRing`], shared with the architectural records. Entries are kept as
//! they read, since how an address is to be shown depends on the code segment at the time. The caller says whether recording
//! is on ([`Gate`]), because that bit is IA32_DEBUGCTL's.
//!
//! # What is modelled, not measured
//! MISPRED comes from a small predictor ([`super::predictor`]) and cycles are steps of the machine's clock, so both are the
//! same in every run and neither says anything about real hardware.

use serde::{Deserialize, Serialize};
use x86::cpuid::Features;
use x86::lbr::{LbrCaps, LbrFormat, LbrInfo, LbrLayout, LbrSelect};
use x86::msr::{MSR_LASTBRANCH_0_NETBURST, MSR_LASTBRANCH_TOS_NETBURST, MSR_LBR_SELECT, MsrFault};
use x86::watch::{BranchRecord, Change, Context, EventRecord, Interest, Recorded};

use super::branch_ring::{Beside, BranchRing, Entry, Filter, LazyRing, Style, kinds};

/// Whether the stack records, as the other units' registers say.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Gate {
    /// IA32_DEBUGCTL lets it ([`super::debugctl::DebugCtlUnit::records_branches`]).
    pub enabled: bool,
    /// IA32_PERF_GLOBAL_STATUS.LBR_FRZ holds it.
    pub frozen: bool,
    /// IA32_RTIT_CTL.TraceEn is set.
    pub tracing: bool,
}

/// The last-branch registers of one logical processor.
#[derive(Clone, Debug)]
pub struct Lbr {
    caps: LbrCaps,
    style: Style,
    linear_bits: u32,
    running: bool,
    select: LbrSelect,
    ring: LazyRing,
}

/// The whole state of [`Lbr`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LbrState {
    /// MSR_LBR_SELECT.
    pub select: u64,
    /// The ring.
    pub ring: BranchRing,
    /// Recording was on at the last word.
    pub running: bool,
}

impl Lbr {
    /// The registers of a part with these capabilities. `linear_bits` is the width of linear addresses.
    pub fn new(caps: LbrCaps, features: Features, linear_bits: u32) -> Self {
        let tsx = features.rtm() || features.hle();
        let beside = match caps.format {
            LbrFormat::Offset32 | LbrFormat::Linear | LbrFormat::Effective => Beside::Nothing,
            LbrFormat::EffectiveTsx if tsx => Beside::FlagsTsx,
            LbrFormat::EffectiveFlags | LbrFormat::EffectiveTsx => Beside::Flags,
            LbrFormat::LinearCycles => Beside::FlagsAndCycles,
            LbrFormat::EffectiveInfo | LbrFormat::LinearInfo | LbrFormat::Architectural => Beside::Info,
        };
        Self {
            style: Style {
                linear: caps.format.linear(),
                beside,
            },
            linear_bits,
            running: false,
            select: LbrSelect::new(),
            ring: BranchRing::new(caps.depth).into(),
            caps,
        }
    }

    /// RDMSR.
    ///
    /// # Errors
    /// [`MsrFault::Unclaimed`] for a register that this part's stack has not.
    pub fn read_msr(&self, msr: u32, gate: Gate) -> Result<u64, MsrFault> {
        let register = self.register(msr).ok_or(MsrFault::Unclaimed)?;
        if self.excluded(gate) {
            return Ok(0);
        }
        let ring = self.ring.with_records();
        let entries = &ring.entries;
        Ok(match register {
            Register::Select => self.select.into_bits(),
            Register::Tos => ring.top.into(),
            Register::From(i) => entries[i].from,
            Register::To(i) => entries[i].to,
            Register::Info(i) => entries[i].info,
            Register::Packed(i) => entries[i].from & 0xFFFF_FFFF | entries[i].to << 32,
            Register::ExceptionFrom => ring.last_exception.from,
            Register::ExceptionTo => ring.last_exception.to,
        })
    }

    /// WRMSR.
    ///
    /// # Errors
    /// [`MsrFault::GeneralProtection`] for a register that cannot be written, a reserved bit or an address that is not
    /// sign-extended; [`MsrFault::Unclaimed`] for a register that this part's stack has not.
    pub fn write_msr(&mut self, msr: u32, value: u64, gate: Gate) -> Result<(), MsrFault> {
        let register = self.register(msr).ok_or(MsrFault::Unclaimed)?;
        let allowed = match register {
            Register::Select => value & !self.caps.select == 0,
            Register::Tos => self.writable() && value < self.caps.depth.into(),
            Register::From(_) => self.writable() && self.is_source(value),
            Register::To(_) => self.writable() && self.is_target(value),
            Register::Info(_) => value & !info_bits(self.caps.format) == 0,
            Register::Packed(_) | Register::ExceptionFrom | Register::ExceptionTo => false,
        };
        if !allowed {
            return Err(MsrFault::GeneralProtection);
        }
        if self.excluded(gate) {
            return Ok(());
        }
        let ring = self.ring.get();
        let entries = &mut ring.entries;
        match register {
            Register::Select => self.select = LbrSelect::from_bits(value),
            Register::Tos => ring.top = value as u8,
            Register::From(i) => entries[i].from = value,
            Register::To(i) => entries[i].to = value,
            Register::Info(i) => entries[i].info = value,
            Register::Packed(_) | Register::ExceptionFrom | Register::ExceptionTo => {}
        }
        Ok(())
    }

    /// What the executor has to say. To be asked after every callback and every write of a register, with where the processor
    /// stands, which is looked at only where something is recorded: this is also how the stack learns that recording has begun.
    pub fn interest(&mut self, gate: Gate, code: impl FnOnce() -> Context) -> Interest {
        let records = self.records(gate);
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
    pub fn branches(&mut self, records: &[BranchRecord], gate: Gate, code: Context) {
        if self.records(gate) {
            self.ring.record(records, &self.filter(), &self.style, code);
        }
    }

    /// `Watch` callback: an interrupt or exception was delivered. The gate is that of before the delivery of a debug
    /// exception, or after it: it is not recorded anyway.
    pub fn event(&mut self, event: &EventRecord, gate: Gate, code: Context) {
        if self.records(gate) && !event.debug {
            self.ring.note_exception();
            self.ring.record(&[event.branch], &self.filter(), &self.style, code);
        }
        self.ring.now(code);
    }

    /// `Watch` callback: a transaction was aborted, which is an entry of its own. To be said before the change itself.
    pub fn transaction_aborted(&mut self, record: &BranchRecord, gate: Gate, code: Context) {
        if self.records(gate) {
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
                self.ring = BranchRing::new(self.caps.depth).into();
                self.select = LbrSelect::new();
                self.running = false;
            }
            _ => {}
        }
        self.ring.now(code);
    }

    /// The newest records first, as many as there are entries: FROM, TO and INFO in the layout of [`LbrInfo`], for a PEBS
    /// record's group of last branches.
    pub fn newest(&self) -> impl Iterator<Item = Entry> {
        let ring = self.ring.with_records();
        (0..ring.depth).map(move |age| *ring.by_age(age))
    }

    /// Makes what has been recorded ready to be read: not necessary, but each read of a register would do it for itself.
    pub fn apply_records(&mut self) {
        self.ring.get();
    }

    /// The whole state.
    pub fn state(&self) -> LbrState {
        LbrState {
            select: self.select.into_bits(),
            ring: self.ring.with_records().into_owned(),
            running: self.running,
        }
    }

    /// Takes a whole state back; what this part has not is dropped.
    pub fn set_state(&mut self, state: LbrState) {
        self.select = LbrSelect::from_bits(state.select & self.caps.select);
        self.running = state.running;
        let mut ring = state.ring;
        ring.depth = self.caps.depth;
        ring.top %= self.caps.depth.max(1);
        self.ring = ring.into();
    }

    /// Intel PT's TraceEn was cleared: where the two exclude each other the stack is empty then. SDM Vol. 3C 33.3.1.2 "Model Specific
    /// Capability Restrictions".
    pub fn trace_ended(&mut self) {
        if self.caps.excluded_by_pt {
            let ring = self.ring.get();
            let exception = ring.last_exception;
            ring.clear();
            ring.last_exception = exception;
        }
    }

    /// Whether Intel PT and branch recording exclude each other on this part.
    pub fn excluded_by_pt(&self) -> bool {
        self.caps.excluded_by_pt
    }

    fn excluded(&self, gate: Gate) -> bool {
        self.caps.excluded_by_pt && gate.tracing
    }

    fn records(&self, gate: Gate) -> bool {
        gate.enabled && !gate.frozen && !self.excluded(gate)
    }

    fn filter(&self) -> Filter {
        let s = self.select;
        let mut out = 0;
        for (set, kind) in [
            (s.jcc(), kinds::COND),
            (s.near_rel_call(), kinds::CALL),
            (s.near_ind_call(), kinds::CALL_IND),
            (s.near_ret(), kinds::RET),
            (s.near_ind_jmp(), kinds::JUMP_IND),
            (s.near_rel_jmp(), kinds::JUMP),
            (s.far_branch(), kinds::FAR),
        ] {
            out |= if set { kind } else { 0 };
        }
        Filter {
            kinds: kinds::ALL & !out,
            kernel: !s.cpl_eq_0(),
            user: !s.cpl_neq_0(),
            call_stack: s.en_callstack(),
            hide_source: false,
        }
    }

    fn writable(&self) -> bool {
        matches!(self.caps.layout, LbrLayout::Ring { writable: true, .. })
    }

    /// Whether a value can stand in FROM: below the flags it is sign-extended.
    fn is_source(&self, value: u64) -> bool {
        let flags = match self.style.beside {
            Beside::Flags | Beside::FlagsAndCycles => 1,
            Beside::FlagsTsx => 3,
            Beside::Nothing | Beside::Info | Beside::ArchitecturalInfo { .. } => 0,
        };
        is_canonical(((value << flags) as i64 >> flags) as u64, self.linear_bits)
    }

    /// Whether a value can stand in TO.
    fn is_target(&self, value: u64) -> bool {
        self.style.beside == Beside::FlagsAndCycles || is_canonical(value, self.linear_bits)
    }

    fn register(&self, msr: u32) -> Option<Register> {
        if msr == MSR_LBR_SELECT && self.caps.select != 0 {
            return Some(Register::Select);
        }
        match self.caps.ler {
            Some(first) if msr == first => return Some(Register::ExceptionFrom),
            Some(first) if msr == first + 1 => return Some(Register::ExceptionTo),
            _ => {}
        }
        let depth = u32::from(self.caps.depth);
        let within = |first: u32| {
            let index = msr.checked_sub(first)?;
            (index < depth).then_some(index as usize)
        };
        match self.caps.layout {
            LbrLayout::P6 => match msr.checked_sub(MSR_LASTBRANCH_0_NETBURST)? {
                0 => Some(Register::From(0)),
                1 => Some(Register::To(0)),
                _ => None,
            },
            LbrLayout::NetBurst if msr == MSR_LASTBRANCH_TOS_NETBURST => Some(Register::Tos),
            LbrLayout::NetBurst => within(MSR_LASTBRANCH_0_NETBURST).map(Register::Packed),
            LbrLayout::Ring { tos, .. } if msr == tos => Some(Register::Tos),
            LbrLayout::Ring { from, to, info, .. } => within(from)
                .map(Register::From)
                .or_else(|| within(to).map(Register::To))
                .or_else(|| within(info?).map(Register::Info)),
            LbrLayout::Architectural => None,
        }
    }
}

/// What a number stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Register {
    Select,
    Tos,
    From(usize),
    To(usize),
    Info(usize),
    /// FROM in the low half, TO in the high half.
    Packed(usize),
    ExceptionFrom,
    ExceptionTo,
}

/// The bits of INFO that are there. Goldmont Plus and Tremont know no transactions.
const fn info_bits(format: LbrFormat) -> u64 {
    let common = LbrInfo::new().with_cycles(0xFFFF).with_mispred(true);
    match format {
        LbrFormat::LinearInfo => common.into_bits(),
        _ => common.with_in_tsx(true).with_tsx_abort(true).into_bits(),
    }
}

/// Whether an address of so many bits is sign-extended.
pub(super) const fn is_canonical(address: u64, bits: u32) -> bool {
    match bits {
        // A 32-bit part: the upper half is 0.
        0..=32 => address >> 32 == 0,
        33..=63 => ((address << (64 - bits)) as i64 >> (64 - bits)) as u64 == address,
        _ => true,
    }
}

#[cfg(test)]
#[path = "lbr_test.rs"]
mod tests;
