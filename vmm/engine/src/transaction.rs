//! Restricted transactional memory (SDM Vol. 1 chapter 16 "Programming with Intel Transactional Synchronization Extensions").
//!
//! # Theory
//! A transaction is a stretch of a program whose effects appear at once or not at all. What it does is done where it always is
//! done, in the registers and in memory; what was there before is kept, and put back when the transaction aborts. Processors
//! take turns, so nobody looks in between: as soon as another processor runs, or anybody else writes memory, a transaction
//! that is open is undone, and its processor learns of it when it runs next.
//!
//! # Practice
//! Nothing is asked while no transaction runs. A transaction's blocks are those of a mode of their own
//! ([`mode::TRANSACTION`](crate::cpu::mode::TRANSACTION)), in which instructions that a transaction cannot hold are ops that
//! abort it; its TLB sets have no write tags, so that every store takes the slow path, which keeps the lines that it meets
//! first. Registers are kept whole by XBEGIN.
//!
//! Lines of 64 bytes are kept, as many as the part's first-level data cache holds in the sets that they belong to; the next
//! one is an abort for want of capacity. What a transaction reads is not followed: any write from outside is a conflict.
//!
//! Accessed and dirty bits stay set, and what the debug and trace units have written stays written (SDM Vol. 3C 33.2.8.1
//! "Intel Transactional Synchronization Extensions (Intel TSX)"). The steps of an aborted transaction have been made: time
//! does not go back.
//!
//! # Left out
//! Lock elision: its prefixes are ignored, as the manual allows.

use serde::{Deserialize, Serialize};
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;

use x86::model::CpuModel;
use x86::msr::IA32_DEBUGCTL;
use x86::smm::PhysicalRange;
use x86::watch::{Abort, Change};

use crate::cpu::{Cpu, slot};
use crate::fpu::FpuState;
use crate::mem::Bounce;
use crate::op::{Done, Reason, Stop};
use crate::shared::SharedState;
use crate::step::{DEBUG, Engine};

/// EAX bit 5 after an abort: transactions were nested (SDM Vol. 1 Table 16-1 "RTM Abort Status Definition").
const NESTED: u32 = 1 << 5;

/// XBEGINs that may be open at once (the manual leaves the number to the part; 7 is Haswell's).
pub(crate) const MAX_NESTING: u8 = 7;

/// An open transaction as plain data: what an abort puts back.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Transaction {
    /// General registers at XBEGIN.
    pub gpr: [u64; 16],
    /// RFLAGS at XBEGIN.
    pub rflags: u64,
    /// x87, SSE and AVX state at XBEGIN.
    pub fpu: FpuState,
    /// PKRU at XBEGIN.
    pub pkru: u32,
    /// CR2 at XBEGIN: faults of a transaction are not seen.
    pub cr2: u64,
    /// RIP of the outermost XBEGIN.
    pub begin: u64,
    /// RIP where execution goes on after an abort.
    pub fallback: u64,
    /// XBEGINs that are open.
    pub nesting: u8,
    /// The machine's step clock at XBEGIN.
    pub begun: u64,
    /// Lines that have been written, by guest-physical address, as they were.
    #[serde(with = "lines")]
    pub lines: BTreeMap<u64, [u8; 64]>,
    /// The abort that waits for the processor to run again; memory is as it was.
    pub doomed: Option<Abort>,
}

/// [`Transaction::lines`] as a list.
mod lines {
    use std::collections::BTreeMap;

    use serde::{Deserialize, Deserializer, Serializer, de::Error};

    type Lines = BTreeMap<u64, [u8; 64]>;

    pub fn serialize<S: Serializer>(lines: &Lines, to: S) -> Result<S::Ok, S::Error> {
        to.collect_seq(lines.iter().map(|(at, line)| (at, line.as_slice())))
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Lines, D::Error> {
        let list = Vec::<(u64, Vec<u8>)>::deserialize(from)?;
        let line = |(at, line): (u64, Vec<u8>)| Some((at, line.try_into().ok()?));
        let lines = list.into_iter().map(line).collect::<Option<_>>();
        lines.ok_or_else(|| D::Error::custom("a line is 64 bytes"))
    }
}

/// A transaction that the processor and the keeper of memory both hold.
pub(crate) type OpenTransaction = Rc<RefCell<Transaction>>;

/// What a transaction may write: lines in each set, and sets.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Capacity {
    ways: usize,
    sets: u64,
}

impl Capacity {
    /// The first-level data cache of CPUID leaf 4, where the part has the leaf.
    pub fn of(model: &CpuModel) -> Capacity {
        let [eax, ebx, ecx, _] = model.cpuid(4, 0);
        if eax & 0x1f == 0 {
            return Capacity { ways: 8, sets: 64 };
        }
        Capacity {
            ways: (ebx >> 22) as usize + 1,
            sets: (ecx as u64 + 1).next_power_of_two(),
        }
    }

    fn set(&self, line: u64) -> u64 {
        line >> 6 & (self.sets - 1)
    }
}

impl Cpu {
    /// Whether a transaction is open.
    pub fn in_transaction(&self) -> bool {
        self.transaction.is_some()
    }

    /// Opens the outermost transaction, from XBEGIN at `begin`.
    pub(crate) fn begin_transaction(&mut self, begin: u64, fallback: u64, clock: u64) {
        let mut gpr = [0; 16];
        for (value, number) in gpr.iter_mut().zip(0u8..) {
            *value = self.get::<8>(number * 8);
        }
        let transaction = Rc::new(RefCell::new(Transaction {
            gpr,
            rflags: self.rflags(),
            fpu: self.fpu.clone(),
            pkru: self.pkru,
            cr2: self.cr2,
            begin,
            fallback,
            nesting: 1,
            begun: clock,
            lines: BTreeMap::new(),
            doomed: self.always_abort.then_some(Abort::Event),
        }));
        self.shared().transaction = Some(transaction.clone());
        self.transaction = Some(transaction);
        self.refresh_mode();
    }

    /// What was written stays. When the transaction began.
    pub(crate) fn commit_transaction(&mut self) -> u64 {
        let begun = self.transaction.take().map_or(0, |open| open.borrow().begun);
        self.shared().transaction = None;
        self.refresh_mode();
        begun
    }

    /// Ends the chain with an abort of the transaction: for instructions that it cannot hold.
    #[cold]
    pub(crate) fn abort(&mut self, cause: Abort) -> Stop {
        self.abort_cause = cause;
        self.stop = Reason::Abort;
        Stop
    }

    /// The abort that waits, if one does.
    pub(crate) fn doomed(&self) -> Option<Abort> {
        self.transaction.as_ref()?.borrow().doomed
    }

    /// Before a store: keeps the lines that it touches. Devices cannot be undone.
    #[cold]
    pub(crate) fn keep_lines(&mut self, span: &Bounce, len: usize) -> Done {
        let Some(transaction) = self.transaction.clone() else {
            return Ok(());
        };
        for (place, len) in span.parts(len) {
            let Some(host) = place.host else {
                return Err(self.abort(Abort::MemoryType));
            };
            // What the TLB led to at once has no physical address yet.
            let offset = place.gpa & 0xfff;
            let Some(page) = self.shared().ram.gpa(host as u64 - offset) else {
                return Err(self.abort(Abort::MemoryType));
            };
            let (first, last) = ((page + offset) & !63, (page + offset + len as u64 - 1) & !63);
            for line in (first..=last).step_by(64) {
                let mut t = transaction.borrow_mut();
                if t.lines.contains_key(&line) {
                    continue;
                }
                let set = self.capacity.set(line);
                if t.lines.keys().filter(|&&other| self.capacity.set(other) == set).count() >= self.capacity.ways {
                    return Err(self.abort(Abort::Capacity));
                }
                let mut bytes = [0; 64];
                if self.shared().ram.read(line, &mut bytes).is_err() {
                    return Err(self.abort(Abort::MemoryType));
                }
                t.lines.insert(line, bytes);
            }
        }
        Ok(())
    }
}

impl SharedState {
    /// Somebody without a part in the open transaction is about to run: it is undone, and its processor will hear of it.
    pub fn part(&mut self, own: Option<&OpenTransaction>) {
        match (&self.transaction, own) {
            (Some(open), own) if own.is_none_or(|own| !Rc::ptr_eq(open, own)) => {
                self.undo(Abort::Conflict, None);
            }
            (Some(_), _) => return,
            (None, _) => {}
        }
        // One that came with a state is not known here yet.
        if let Some(own) = own
            && own.borrow().doomed.is_none()
        {
            self.transaction = Some(own.clone());
        }
    }

    /// Puts memory back, but for a span that somebody else has written since. The transaction is doomed.
    pub fn undo(&mut self, cause: Abort, except: Option<(u64, u64)>) {
        let Some(transaction) = self.transaction.take() else {
            return;
        };
        let mut transaction = transaction.borrow_mut();
        transaction.doomed.get_or_insert(cause);
        // Its processor had reached the lines; another one's turn may have come.
        let hidden = self.ram.hide(PhysicalRange::NONE);
        for (line, mut old) in core::mem::take(&mut transaction.lines) {
            if let Some((gpa, len)) = except {
                let mut now = [0; 64];
                // The line was read when it was kept.
                let _ = self.ram.read(line, &mut now);
                for (old, (now, at)) in old.iter_mut().zip(now.into_iter().zip(line..)) {
                    if at.wrapping_sub(gpa) < len {
                        *old = now;
                    }
                }
            }
            let _ = self.write_ram(line, &old);
        }
        self.ram.hide(hidden);
    }

    /// A unit has written: that stays, whatever becomes of the transaction.
    pub fn keep_written(&mut self, gpa: u64, bytes: &[u8]) {
        let Some(transaction) = &self.transaction else { return };
        let mut transaction = transaction.borrow_mut();
        let last = gpa.saturating_add(bytes.len() as u64);
        for (&line, old) in transaction.lines.range_mut(gpa & !63..last) {
            for (old, at) in old.iter_mut().zip(line..) {
                if let Some(&byte) = bytes.get(at.wrapping_sub(gpa) as usize) {
                    *old = byte;
                }
            }
        }
    }
}

impl Engine {
    /// Aborts the transaction of a processor (SDM Vol. 2D "XABORT", RTM_ABORT_PROCESSING), which stands at the instruction that
    /// did not retire; nothing waits to be said. `debug` has the DR6 bits of a debug exception or breakpoint, if that is the
    /// cause.
    pub(crate) fn abort(&mut self, cpu: &mut Cpu, cause: Abort, debug: Option<u64>) {
        let Some(transaction) = cpu.transaction.take() else {
            return;
        };
        if self
            .shared
            .transaction
            .as_ref()
            .is_some_and(|open| Rc::ptr_eq(open, &transaction))
        {
            self.shared.undo(cause, None);
        }
        let transaction = transaction.borrow();
        let from = cpu.linear(cpu.rip);
        let cause = transaction.doomed.unwrap_or(cause);
        let nested = if transaction.nesting > 1 { NESTED } else { 0 };
        let debug = debug.filter(|_| cause == Abort::Debug);
        let advanced = debug.is_some() && self.advanced_debugging(cpu);
        for (&value, number) in transaction.gpr.iter().zip(0u8..) {
            cpu.set::<8>(number * 8, value);
        }
        cpu.set_rflags(transaction.rflags);
        cpu.fpu = transaction.fpu.clone();
        cpu.set_pkru(transaction.pkru);
        cpu.cr2 = transaction.cr2;
        if advanced {
            cpu.rip = transaction.begin;
        } else {
            cpu.rip = transaction.fallback;
            cpu.set::<4>(slot::RAX, (cause.status() | nested) as u64);
        }
        // Where a link was asked for, and what waited for the next instruction, was the transaction's.
        cpu.link = core::ptr::null_mut();
        cpu.event = None;
        (cpu.skip_step, cpu.trap_now) = (false, false);
        (cpu.shadow_at, cpu.stack_shadow_at, cpu.rf_at) = (u64::MAX, u64::MAX, u64::MAX);
        cpu.watched.pending = 0;
        cpu.watched.observed = (u64::MAX, 0);
        cpu.mode = u32::MAX;
        self.catch_up(cpu);
        if cpu.watched.generation.is_some() {
            let steps = cpu.clock_now().wrapping_sub(transaction.begun);
            let change = Change::TransactionAbort { from, cause, steps };
            let effects = cpu.say(|watch, view| watch.state(change, view));
            self.follow(cpu, effects);
        }
        if advanced {
            cpu.set_debug_status(debug.unwrap_or(0));
            let _ = self.deliver_told(cpu, DEBUG);
            cpu.dr[6] &= !DR6_RTM;
        }
    }

    /// DR7.RTM and IA32_DEBUGCTL.RTM are both set (SDM Vol. 3B 19.3.3 "Debug Exceptions, Breakpoint Exceptions, and Restricted
    /// Transactional Memory (RTM)").
    fn advanced_debugging(&mut self, cpu: &mut Cpu) -> bool {
        const RTM: u64 = 1 << 15;
        if cpu.dr[7] & DR7_RTM == 0 {
            return false;
        }
        cpu.read_unit(IA32_DEBUGCTL).is_ok_and(|control| control & RTM != 0)
    }

    /// Undoes the open transaction of a processor that has nothing to say any more: it is reset.
    pub(crate) fn drop_transaction(&mut self, cpu: &mut Cpu) {
        if cpu.transaction.take().is_some() {
            self.shared.undo(Abort::Event, None);
        }
    }
}

/// DR6.RTM: clear after a debug exception of a transaction.
pub(crate) const DR6_RTM: u64 = 1 << 16;
const DR7_RTM: u64 = 1 << 11;
