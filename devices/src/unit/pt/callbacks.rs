//! What the unit makes of each `Watch` callback. SDM Vol. 3C Tables "Packet Generation under Different Enable Conditions",
//! "PwrEvtEn and PTWEn Packet Generation under Different Enable Conditions" and "EventEn Packet Generation".
//!
//! What the manual leaves to a part: HLT and MWAIT with hint 0 are C1; a sleep ends by an interrupt after HLT and by a store to
//! the monitored line after MWAIT, and its deepest state is the one that was asked for.

use pt_packet::{ItemSize, Packet};
use x86::watch::{BranchRecord, Change, Effects, EventRecord, Far, Flow, Processor};

use super::flow::is_near;
use super::output::Output;
use super::{Pt, next_ip};
use crate::unit::ds::pebs_trace::TraceRecord;

/// Lengths of instructions that a change is about, without prefixes, which they have no use for.
const HLT: u64 = 1;
const MWAIT: u64 = 3;

/// CFE types. SDM Vol. 3C 33.4.2.29 "Control Flow Event (CFE) Packet".
mod cfe {
    pub const INTR: u8 = 1;
    pub const IRET: u8 = 2;
    pub const SMI: u8 = 3;
    pub const RSM: u8 = 4;
    pub const SIPI: u8 = 5;
    pub const INIT: u8 = 6;
    pub const SHUTDOWN: u8 = 10;
}

/// EVD type of a page fault's address. SDM Vol. 3C 33.4.2.30 "Event Data (EVD) Packet".
const EVD_CR2: u8 = 0;

/// PWRX: woken by an interrupt, or by a store to the monitored address.
const WAKE_INTERRUPT: u8 = 1;
const WAKE_STORE: u8 = 4;

impl<O: Output> Pt<O> {
    fn tracing(&self) -> bool {
        self.s.status.trigger_en()
    }

    /// What FUPs of instructions other than branches need.
    fn in_sight(&self) -> bool {
        self.s.status.context_en() && self.s.status.filter_en()
    }

    /// Says the time at `step` if the clock has been moved since it was last looked at.
    fn look_at_clock(&mut self, step: u64, cpu: &mut dyn Processor) {
        if self.s.stream.set_tsc(cpu.step(), cpu.tsc()) {
            self.s.stream.wake(&mut self.out, step);
        }
    }

    /// Branches have retired.
    pub fn branches(&mut self, mut records: &[BranchRecord], cpu: &mut dyn Processor) -> Effects {
        if !self.tracing() || records.is_empty() {
            return Effects::NONE;
        }
        self.look_at_clock(records[0].step, cpu);
        self.restart(cpu);
        let mut step = 0;
        while let Some(first) = records.first() {
            if !self.tracing() {
                break;
            }
            if is_near(first.flow) && self.goes_plainly() {
                let run = self.plain(records);
                step = records[run - 1].step;
                records = &records[run..];
            } else if is_near(first.flow) {
                let run = records.iter().take_while(|r| is_near(r.flow)).count();
                let (near, rest) = records.split_at(run);
                step = near.last().map_or(step, |r| r.step);
                if self.s.status.context_en() {
                    self.near(near);
                } else {
                    self.time(step);
                }
                records = rest;
            } else {
                step = first.step;
                self.time(step);
                self.run_before(first);
                if first.flow == Flow::Far(Far::Iret).code() && self.s.ctl.event_en() && self.s.status.context_en() {
                    self.control_flow_event(cfe::IRET, 0, Some(first.from), self.s.packet_en, step);
                    self.far(first, self.in_sight(), cpu);
                } else {
                    // A VM exit has no instruction of its own (SDM Vol. 3C 33.5.2.4 "Packet Generation"), and an SMI, which an observer
                    // traces, has none either.
                    let none = [Far::VmExit, Far::Smi].map(|far| Flow::Far(far).code());
                    self.far(first, none.contains(&first.flow), cpu);
                }
                // As at the end of a callback, which is where it is met alone.
                if self.tracing() && self.psb_due() {
                    self.send_psb(step);
                }
                records = &records[1..];
            }
        }
        self.finish(step, cpu)
    }

    /// An interrupt or exception has been delivered.
    pub fn event(&mut self, event: &EventRecord, cpu: &mut dyn Processor) -> Effects {
        if !self.tracing() {
            return Effects::NONE;
        }
        let r = &event.branch;
        self.look_at_clock(r.step, cpu);
        self.time(r.step);
        if self.s.ctl.event_en() && self.s.status.context_en() {
            if let Some(value) = event.address {
                self.send(Packet::Evd { kind: EVD_CR2, value }, r.step);
            }
            self.control_flow_event(cfe::INTR, event.vector, Some(r.from), self.s.packet_en, r.step);
        }
        self.far(r, true, cpu);
        self.finish(r.step, cpu)
    }

    /// CFE; its FUP too, unless one follows anyway.
    fn control_flow_event(&mut self, kind: u8, vector: u8, from: Option<u64>, fup_follows: bool, step: u64) {
        let ip = from.filter(|_| self.in_sight());
        self.send(
            Packet::Cfe {
                kind,
                vector,
                ip: ip.is_some(),
            },
            step,
        );
        if let (Some(from), false) = (ip, fup_follows) {
            let ip = self.code.ip(from);
            self.send(Packet::Fup(Some(ip)), step);
        }
    }

    /// A far transfer, with the processor already where it leads. `fup`: its source cannot be distinguished from the code.
    fn far(&mut self, r: &BranchRecord, fup: bool, cpu: &mut dyn Processor) {
        let step = r.step;
        let before = self.s.packet_en;
        // What is concealed from the guest's trace an observer's tells.
        let vmx = [Far::VmEntry, Far::VmExit].map(|far| Flow::Far(far).code());
        let pip = r.loads_cr3 || self.tells_cr3 && vmx.contains(&r.flow);
        if pip {
            self.stamp_cr3(step);
        }
        if before && fup {
            let ip = self.code.ip(r.from);
            self.send(Packet::Fup(Some(ip)), step);
        }
        self.set_context(cpu.context());
        self.s.ip = r.to;
        let ctl = self.s.ctl;
        let context_en = self.context_en();
        self.s.status.set_context_en(context_en);
        if !context_en {
            if before {
                self.send(Packet::TipPgd(None), step);
                self.s.packet_en = false;
            }
            return;
        }
        if pip {
            self.send_pip(step);
        }
        let ip = self.code.ip(r.to);
        let stop = self.ranges.stop(ip);
        let filter = self.ranges.admit(ip);
        self.s.status.set_filter_en(filter);
        match (before, filter && !stop && ctl.branch_en()) {
            (true, true) => {
                self.send_mode(step);
                self.send(Packet::Tip(Some(ip)), step);
            }
            (true, false) => {
                self.send(Packet::TipPgd(Some(ip)), step);
                self.s.packet_en = false;
            }
            (false, true) => self.rise(r.to, step),
            (false, false) => {}
        }
        if stop {
            self.trace_stop(step);
        }
    }

    /// PIP, where CR3 may be reported. SDM Vol. 3C 33.4.2.7 "Paging Information (PIP) Packet".
    pub(super) fn send_pip(&mut self, step: u64) {
        if self.s.ctl.os() || self.tells_cr3 {
            let (cr3, non_root) = (self.s.context.cr3, self.s.context.non_root);
            self.told_cr3 = Some((cr3, non_root));
            self.send(Packet::Pip { cr3, non_root }, step);
        }
    }

    /// For an observer: the time, so that it is known to the step when CR3 changed.
    pub(super) fn stamp_cr3(&mut self, step: u64) {
        if self.tells_cr3 {
            self.s.stream.stamp(&mut self.out, step);
        }
    }

    /// Execution is about to run the instruction at a boundary.
    pub fn before(&mut self, address: u64, cpu: &mut dyn Processor) -> Effects {
        // Others have boundaries, too.
        if !self.follows_edges || !self.tracing() || !self.s.status.context_en() || self.ranges.is_empty() {
            return Effects::NONE;
        }
        let step = cpu.step();
        self.time(step);
        self.arrive(address, step);
        self.finish(step, cpu)
    }

    /// Execution has come to an instruction without a branch, in a context that may be traced: behind MOV to CR3, at the start of the
    /// trace, and for an observer anywhere.
    pub(super) fn arrive(&mut self, at: u64, step: u64) {
        let ip = self.code.ip(at);
        let stop = self.ranges.stop(ip);
        let filter = self.ranges.admit(ip);
        self.s.status.set_filter_en(filter);
        match (self.s.packet_en, filter && !stop && self.s.ctl.branch_en()) {
            (true, false) => {
                self.send(Packet::TipPgd(Some(ip)), step);
                self.s.packet_en = false;
            }
            (false, true) => self.rise(at, step),
            _ => {}
        }
        self.s.ip = at;
        if stop {
            self.trace_stop(step);
        }
    }

    /// Something that packets or filters need has changed.
    pub fn change(&mut self, change: Change, cpu: &mut dyn Processor) -> Effects {
        if change == Change::Reset {
            self.reset();
            return Effects::NONE;
        }
        match change {
            Change::Smi { at } => return self.smi(at, cpu),
            Change::Rsm => return self.rsm(cpu),
            _ => {}
        }
        if !self.tracing() {
            // It may trace again before the transaction ends.
            self.s.in_transaction &= !matches!(
                change,
                Change::TransactionCommit { .. } | Change::TransactionAbort { .. }
            );
            return Effects::NONE;
        }
        let step = cpu.step();
        if matches!(change, Change::Wake { .. }) {
            // It says the time anyway.
            let _ = self.s.stream.set_tsc(step, cpu.tsc());
        } else {
            self.look_at_clock(step, cpu);
            self.time(step);
        }
        let next = next_ip(cpu, &cpu.context());
        match change {
            Change::Cr3 => self.mov_cr3(next, step, cpu),
            Change::Mode => self.set_context(cpu.context()),
            Change::VmcsPointer => {
                self.set_context(cpu.context());
                // SDM Vol. 3C 33.4.2.15 "VMCS Packet".
                if let Some(pointer) = self.s.context.vmcs.filter(|_| self.s.status.context_en()) {
                    self.send(Packet::Vmcs(pointer), step);
                }
            }
            Change::Interrupts => {
                self.set_context(cpu.context());
                if self.s.ctl.event_en() && self.in_sight() && self.s.mode != Some(self.mode()) {
                    self.send_mode(step);
                    let ip = self.code.ip(next);
                    self.send(Packet::Fup(Some(ip)), step);
                }
            }
            Change::PtWrite { value, size, at } => self.ptwrite(value, size, at, step),
            Change::Halt => self.sleep(None, 1, next.wrapping_sub(HLT), step),
            Change::Mwait { hints, extensions } => {
                // SDM Vol. 2B "MWAIT—Monitor Wait": bits 7:4 are the C-state less 1.
                let state = ((hints >> 4 & 15) + 1) as u8 & 15;
                let packet = Packet::Mwait {
                    hints: hints & 0xFF,
                    extensions: extensions & 3,
                };
                if state != 0 {
                    let mwait = Some((packet, hints as u8 & 15));
                    self.sleep(mwait, state, next.wrapping_sub(MWAIT), step);
                }
            }
            Change::Wake { store } => self.wake(store, step),
            Change::TransactionBegin { at } => self.transaction(true, at, step),
            Change::TransactionCommit { at, .. } => self.transaction(false, at, step),
            Change::TransactionAbort { from, .. } => {
                self.s.in_transaction = false;
                if self.s.packet_en {
                    let (in_tx, abort) = (false, true);
                    self.send(Packet::ModeTsx { in_tx, abort }, step);
                }
                // What it has done stays in the trace; where it has led to is an event's doing.
                let record = BranchRecord {
                    from,
                    to: next,
                    step,
                    ..BranchRecord::default()
                };
                self.far(&record, true, cpu);
            }
            Change::Init { at } => self.init(at, step, cpu),
            Change::StartUp(vector) => {
                if self.s.ctl.event_en() && self.s.status.context_en() {
                    self.control_flow_event(cfe::SIPI, vector, None, false, step);
                }
                self.start_up(step, cpu);
            }
            Change::Shutdown => {
                if self.s.ctl.event_en() && self.s.status.context_en() {
                    self.control_flow_event(cfe::SHUTDOWN, 0, Some(next), false, step);
                }
            }
            Change::Hypercall { .. } | Change::Vmx { .. } | Change::Reset | Change::Smi { .. } | Change::Rsm => {}
        }
        if matches!(
            change,
            Change::PtWrite { .. }
                | Change::Halt
                | Change::Mwait { .. }
                | Change::Interrupts
                | Change::TransactionBegin { .. }
                | Change::TransactionCommit { .. }
        ) {
            // A packet may have led a decoder up to the instruction: what comes next must not lead it back.
            self.s.ip = next;
        }
        self.finish(step, cpu)
    }

    /// MOV to CR3: rows 5a to 5f.
    fn mov_cr3(&mut self, next: u64, step: u64, cpu: &mut dyn Processor) {
        self.set_context(cpu.context());
        let context_en = self.context_en();
        self.s.status.set_context_en(context_en);
        if context_en {
            self.stamp_cr3(step);
            self.send_pip(step);
            self.arrive(next, step);
        } else if self.s.packet_en {
            self.send(Packet::TipPgd(None), step);
            self.s.packet_en = false;
        }
    }

    /// SDM Vol. 3C 33.4.2.21 "PTWRITE (PTW) Packet".
    fn ptwrite(&mut self, value: u64, size: u8, at: u64, step: u64) {
        if !self.s.ctl.ptw_en() || !self.in_sight() {
            return;
        }
        let ip = self.s.ctl.fup_on_ptw();
        let size = if size == 4 { ItemSize::Four } else { ItemSize::Eight };
        self.send(Packet::Ptw { value, size, ip }, step);
        if ip {
            let at = self.code.ip(at);
            self.send(Packet::Fup(Some(at)), step);
        }
    }

    /// A sleep begins: PWRE and EXSTOP, after MWAIT its own packet too.
    fn sleep(&mut self, mwait: Option<(Packet, u8)>, state: u8, at: u64, step: u64) {
        self.s.sleep = Some(state);
        if !self.s.ctl.pwr_evt_en() {
            return;
        }
        let sub_state = mwait.map_or(0, |(_, sub)| sub);
        if let Some((packet, _)) = mwait.filter(|_| self.s.status.context_en()) {
            self.send(packet, step);
        }
        let pwre = Packet::Pwre {
            hardware: false,
            state,
            sub_state,
        };
        self.send(pwre, step);
        let ip = self.s.packet_en;
        self.send(Packet::ExStop { ip }, step);
        if ip {
            let at = self.code.ip(at);
            self.send(Packet::Fup(Some(at)), step);
        }
    }

    /// A sleep ends. The clocks stood still: row 33b.
    fn wake(&mut self, store: bool, step: u64) {
        let Some(state) = self.s.sleep.take() else { return };
        self.s.stream.wake(&mut self.out, step);
        if self.s.ctl.pwr_evt_en() {
            let packet = Packet::Pwrx {
                last: state,
                deepest: state,
                reason: if store { WAKE_STORE } else { WAKE_INTERRUPT },
            };
            self.send(packet, step);
        }
    }

    /// MODE.TSX and its FUP, where a transaction begins or is committed. SDM Vol. 3C 33.4.2.8 "MODE Packets".
    fn transaction(&mut self, in_tx: bool, at: u64, step: u64) {
        self.s.in_transaction = in_tx;
        if self.s.packet_en {
            self.send(Packet::ModeTsx { in_tx, abort: false }, step);
            let ip = self.code.ip(at);
            self.send(Packet::Fup(Some(ip)), step);
        }
    }

    /// An SMI saves TraceEn and clears it: row 14b of the first table. SDM Vol. 3C 33.2.9.3 "System Management Mode (SMM)".
    fn smi(&mut self, at: u64, cpu: &mut dyn Processor) -> Effects {
        self.s.interrupted = self.s.ctl.trace_en();
        if !self.s.interrupted {
            return Effects::NONE;
        }
        if self.tracing() && self.s.ctl.event_en() && self.s.status.context_en() {
            let step = cpu.step();
            self.time(step);
            self.control_flow_event(cfe::SMI, 0, Some(at), self.s.packet_en, step);
        }
        self.disable(0, cpu)
    }

    /// RSM brings TraceEn back: row 15b.
    fn rsm(&mut self, cpu: &mut dyn Processor) -> Effects {
        if !std::mem::take(&mut self.s.interrupted) || self.s.ctl.trace_en() {
            return Effects::NONE;
        }
        self.s.ctl.set_trace_en(true);
        let effects = self.enable(cpu);
        if self.tracing() && self.s.ctl.event_en() && self.s.status.context_en() {
            let step = cpu.step();
            self.control_flow_event(cfe::RSM, 0, None, false, step);
        }
        effects
    }

    /// INIT: the source is reported now, the target when execution starts, at the reset vector or after a start-up IPI. Rows 30
    /// and 31.
    fn init(&mut self, from: u64, step: u64, cpu: &mut dyn Processor) {
        let before = self.s.packet_en;
        if self.s.ctl.event_en() && self.s.status.context_en() {
            self.control_flow_event(cfe::INIT, 0, Some(from), before, step);
        }
        if before {
            let ip = self.code.ip(from);
            self.send(Packet::Fup(Some(ip)), step);
        }
        self.set_context(cpu.context());
        if before {
            self.send_pip(step);
        }
        self.s.sleep = None;
        self.s.in_transaction = false;
        self.s.restarts = true;
    }

    /// The processor runs after INIT: rows 30 and 32. An observer that has not heard of the INIT tells here, too, where the
    /// processor waited.
    fn start_up(&mut self, step: u64, cpu: &mut dyn Processor) {
        let waited = !std::mem::take(&mut self.s.restarts);
        let context = cpu.context();
        let record = BranchRecord {
            from: self.s.ip,
            to: next_ip(cpu, &context),
            step,
            ..BranchRecord::default()
        };
        self.far(&record, waited, cpu);
    }

    /// A processor that INIT did not leave waiting for a start-up IPI has started where it stands now.
    fn restart(&mut self, cpu: &mut dyn Processor) {
        if self.s.restarts {
            let step = cpu.step();
            self.start_up(step, cpu);
        }
    }

    /// Some instructions have retired, or the run ends.
    pub fn tick(&mut self, cpu: &mut dyn Processor) -> Effects {
        if !self.tracing() {
            return Effects::NONE;
        }
        let step = cpu.step();
        if self.s.sleep.is_none() {
            self.time(step);
        }
        self.finish(step, cpu)
    }

    /// A PEBS record goes into the trace instead of the debug-store area: blocks of items, then where the processor stands,
    /// which is behind the instruction that the record is about. It is lost where the context is not traced. SDM Vol. 3C
    /// 33.4.2.26 "Block Begin Packet (BBP)" to 33.4.2.28 "Block End Packet (BEP)".
    pub fn pebs(&mut self, record: &TraceRecord, cpu: &mut dyn Processor) -> Effects {
        if !self.tracing() || !self.in_sight() {
            return Effects::NONE;
        }
        let step = cpu.step();
        self.time(step);
        for (kind, values) in &record.groups {
            let (kind, size) = (*kind, ItemSize::Eight);
            self.send(Packet::Bbp { size, kind }, step);
            for (id, &value) in (0..).zip(values) {
                self.send(Packet::Bip { id, size, value }, step);
            }
        }
        self.send(Packet::Bep { ip: true }, step);
        self.s.ip = next_ip(cpu, &self.s.context);
        let ip = self.code.ip(self.s.ip);
        self.send(Packet::Fup(Some(ip)), step);
        self.finish(step, cpu)
    }
}
