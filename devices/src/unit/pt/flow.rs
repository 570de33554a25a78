//! Near branches. SDM Vol. 3C 33.4.2.1 "Taken/Not-taken (TNT) Packet", 33.4.2.2 "Target IP (TIP) Packet", and the rows of
//! Table "Packet Generation under Different Enable Conditions" from 6a on.

use pt_packet::Packet;
use x86::watch::{BranchRecord, Flow};

use super::Pt;
use super::output::Output;
use super::packets::is_full;
use pt_packet::Tnt;

const NOT_TAKEN: u8 = Flow::Cond { taken: false }.code();
const TAKEN: u8 = Flow::Cond { taken: true }.code();
const JUMP: u8 = Flow::Jump.code();
const JUMP_IND: u8 = Flow::JumpInd.code();
const CALL: u8 = Flow::Call.code();
const CALL_IND: u8 = Flow::CallInd.code();
const RET: u8 = Flow::Ret.code();
const RUN: u8 = BranchRecord::RUN;

/// Near flows have the lowest codes.
#[inline(always)]
pub(super) const fn is_near(code: u8) -> bool {
    code <= RET || code == RUN
}

impl<O: Output> Pt<O> {
    /// Near branches, all in one context that may be traced.
    pub(super) fn near(&mut self, records: &[BranchRecord]) {
        let Some(last) = records.last() else { return };
        if self.ranges.is_empty() && !self.s.packet_en {
            self.s.ip = last.to;
            self.time(last.step);
            return;
        }
        for record in records {
            if !self.s.status.trigger_en() {
                return;
            }
            self.time(record.step);
            self.run(record);
            if record.flow != RUN {
                self.one(record);
            }
        }
    }

    /// MTC packets up to `step`.
    #[inline(always)]
    pub(super) fn time(&mut self, step: u64) {
        if step >= self.s.stream.due() {
            self.late(step);
        }
    }

    /// PSB is looked for wherever bytes have come about, so that it does not matter where a batch of records ends.
    #[cold]
    fn late(&mut self, step: u64) {
        self.s.stream.advance(&mut self.out, step);
        if self.psb_due() {
            self.send_psb(step);
        }
    }

    /// Near branches are what [`Pt::plain`] makes of them.
    pub(super) fn goes_plainly(&self) -> bool {
        self.s.status.context_en() && self.s.packet_en && self.ranges.is_empty() && self.s.stream.plain()
    }

    /// The loop that decides what tracing costs: PacketEn stays set, and a conditional branch is a bit. The bits, the place and
    /// what the clock waits for live in locals, and go home whenever something longer than a bit is to be sent. Ends ahead of the first
    /// far transfer, and gives the number of branches before it.
    pub(super) fn plain(&mut self, records: &[BranchRecord]) -> usize {
        let code = self.code;
        let mut bits = self.s.stream.pending();
        let mut due = self.s.stream.due();
        let mut ip = self.s.ip;
        let mut done = records.len();
        for (n, r) in records.iter().enumerate() {
            if !is_near(r.flow) {
                done = n;
                break;
            }
            if r.step >= due {
                self.s.stream.set_pending(bits);
                self.s.ip = ip;
                self.late(r.step);
                bits = self.s.stream.pending();
                due = self.s.stream.due();
            }
            let run = r.run();
            if run != 1 {
                bits = self.joined(bits, run, r);
            }
            if r.flow <= TAKEN {
                ip = r.to;
                bits = bits << 1 | u64::from(r.flow);
                if is_full(bits) {
                    self.s.stream.set_pending(bits);
                    self.s.stream.flush_tnt(&mut self.out, r.step);
                    bits = self.sent(r);
                }
                continue;
            }
            if r.flow == JUMP {
                // No packet tells of it, and it need not be recorded: a decoder that starts ahead of it comes to the same place.
                continue;
            }
            ip = r.to;
            if r.flow == RUN {
                continue;
            }
            let next = r.from.wrapping_add(u64::from(r.length));
            match r.flow {
                CALL => {
                    self.s.stream.call(next, r.to);
                    continue;
                }
                RET if self.s.stream.compresses(r.to) => bits = bits << 1 | 1,
                flow => {
                    debug_assert!(matches!(flow, JUMP_IND | CALL_IND | RET));
                    if flow == CALL_IND {
                        self.s.stream.call_indirect(next);
                    }
                    self.s.stream.set_pending(bits);
                    self.s.stream.tip(&mut self.out, code.ip(r.to), r.step);
                    bits = self.sent(r);
                    continue;
                }
            }
            if is_full(bits) {
                self.s.stream.set_pending(bits);
                self.s.stream.flush_tnt(&mut self.out, r.step);
                bits = self.sent(r);
            }
        }
        self.s.stream.set_pending(bits);
        self.s.ip = ip;
        done
    }

    /// Adds the bits of a run to those that wait, and gives what waits then.
    #[inline(always)]
    fn joined(&mut self, mut bits: u64, run: u32, r: &BranchRecord) -> u64 {
        let len = 31 - run.leading_zeros();
        let fit = Tnt::LONG - (63 - bits.leading_zeros());
        let run = u64::from(run);
        if len < fit {
            return bits << len | run & !(1 << len);
        }
        let rest = len - fit;
        bits = bits << fit | (run >> rest) & !(1 << fit);
        self.s.stream.set_pending(bits);
        self.s.stream.flush_tnt(&mut self.out, r.step);
        // Runs are not allowed where a PSB may become due in one, but for those of one branch ([`Stream::runs`]).
        bits = self.sent(r);
        bits << rest | run & ((1 << rest) - 1)
    }

    /// The conditional branches that the record of a far transfer counts: they come where each is a bit, and nowhere else.
    pub(super) fn run_before(&mut self, r: &BranchRecord) {
        let run = r.run();
        if run != 1 && self.goes_plainly() {
            let bits = self.joined(self.s.stream.pending(), run, r);
            self.s.stream.set_pending(bits);
        }
    }

    /// The conditional branches that a record counts, where each may be more than a bit.
    fn run(&mut self, r: &BranchRecord) {
        let run = r.run();
        for n in (0..31 - run.leading_zeros()).rev() {
            let flow = Flow::Cond {
                taken: run >> n & 1 != 0,
            };
            self.one(&BranchRecord {
                flow: flow.code(),
                ..*r
            });
        }
    }

    /// Looks for a PSB after bytes have been sent, and gives the bits that wait: none.
    #[inline(always)]
    fn sent(&mut self, r: &BranchRecord) -> u64 {
        if self.s.stream.psb_due() {
            self.s.ip = r.to;
            self.send_psb(r.step);
        }
        self.s.stream.pending()
    }

    /// One branch, with all that may happen at one.
    fn one(&mut self, r: &BranchRecord) {
        let ip = self.code.ip(r.to);
        if r.flow == NOT_TAKEN && !self.follows_edges {
            // It lands nowhere.
            if self.s.packet_en {
                self.inside(r, ip);
            }
            self.s.ip = r.to;
            if self.s.stream.psb_due() {
                self.send_psb(r.step);
            }
            return;
        }
        let filter = self.ranges.admit(ip);
        let stop = self.ranges.stop(ip);
        self.s.status.set_filter_en(filter);
        let after = filter && !stop && self.s.ctl.branch_en();
        match (self.s.packet_en, after) {
            (true, true) => self.inside(r, ip),
            (true, false) => {
                // A TNT bit for the branch itself would say nothing more.
                self.send(Packet::TipPgd(Some(ip)), r.step);
                self.s.packet_en = false;
            }
            (false, true) => self.rise(r.to, r.step),
            (false, false) => {}
        }
        self.s.ip = r.to;
        if stop {
            self.trace_stop(r.step);
        } else if self.s.stream.psb_due() {
            self.send_psb(r.step);
        }
    }

    /// PacketEn before and after.
    fn inside(&mut self, r: &BranchRecord, ip: u64) {
        let stream = &mut self.s.stream;
        let out = &mut self.out;
        match r.flow {
            NOT_TAKEN | TAKEN => stream.conditional_timed(out, r.flow != 0, r.step),
            JUMP => {}
            CALL => stream.call(r.from.wrapping_add(u64::from(r.length)), r.to),
            RET if stream.compresses(r.to) => stream.conditional_timed(out, true, r.step),
            flow => {
                if flow == CALL_IND {
                    stream.call_indirect(r.from.wrapping_add(u64::from(r.length)));
                }
                stream.tip(out, ip, r.step);
            }
        }
    }
}
