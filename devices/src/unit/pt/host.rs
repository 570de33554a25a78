//! What a host does with a unit of its own, which observes from outside: it programs it between two instructions, asks where
//! in the stream execution stands, and has the stream synchronized where it likes.

use pt_packet::Packet;
use x86::msr::MsrFault;
use x86::pt::RtitCtl;
use x86::watch::Processor;

use super::filter::context_en;
use super::output::Output;
use super::{Pt, next_ip};

/// Where the stream stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StreamPosition {
    /// Bytes since the beginning of the last PSB.
    pub since_psb: u32,
    /// The step at which the last PSB was sent.
    pub psb_step: u64,
    /// The TSC then, as its TSC packet tells it.
    pub psb_tsc: u64,
    /// Results of branches that wait for the next TNT packet.
    pub bits: u32,
    /// PacketEn: the next instruction is traced.
    pub packet_en: bool,
    /// After INIT: where execution starts is reported when it does, and no PSB may come before that.
    pub restarts: bool,
}

impl<O: Output> Pt<O> {
    /// PIP packets tell CR3 also where OS is clear: an observer's decoder needs to know whose code it is, and nobody has to be
    /// kept from learning it. TSC and TMA packets before them tell when it changed, for decoders that hear of it otherwise.
    pub fn tell_cr3(&mut self) {
        self.tells_cr3 = true;
    }

    /// Ranges hold for straight-line code, too: an observer wants the instructions of a range, however they were come to.
    pub fn follow_edges(&mut self) {
        self.follows_edges = true;
        self.set_boundaries();
    }

    /// Writes the control register between two instructions.
    ///
    /// # Errors
    /// As WRMSR.
    pub fn program(&mut self, ctl: RtitCtl, cpu: &mut dyn Processor) -> Result<(), MsrFault> {
        let ctl = RtitCtl::accept(ctl.into_bits(), &self.caps)?;
        let _ = self.write_ctl(ctl, 0, cpu)?;
        Ok(())
    }

    /// ContextEn, and whether an observer wants what runs.
    pub(super) fn context_en(&self) -> bool {
        self.admits && context_en(self.s.ctl, self.s.cr3_match, &self.s.context)
    }

    /// From the next instruction on, an observer wants what runs, or does not. It is as if ContextEn changed, at an instruction where no CPU has
    /// it change: where it falls, there are a FUP and a TIP.PGD as where TraceEn is cleared.
    pub fn admit(&mut self, admits: bool, cpu: &mut dyn Processor) {
        if std::mem::replace(&mut self.admits, admits) == admits || !self.s.status.trigger_en() {
            return;
        }
        let step = cpu.step();
        self.flush(cpu);
        self.set_context(cpu.context());
        let next = next_ip(cpu, &self.s.context);
        let context_en = self.context_en();
        self.s.status.set_context_en(context_en);
        if context_en {
            self.arrive(next, step);
        } else if self.s.packet_en {
            let ip = self.code.ip(next);
            self.send(Packet::Fup(Some(ip)), step);
            self.send(Packet::TipPgd(None), step);
            self.s.packet_en = false;
            self.s.ip = next;
        }
        let _ = self.put(cpu);
    }

    /// Where the stream stands.
    pub fn place(&self) -> StreamPosition {
        let (psb_step, psb_tsc) = self.s.stream.last_psb();
        StreamPosition {
            since_psb: self.s.stream.since_psb,
            psb_step,
            psb_tsc,
            bits: 63 - self.s.stream.pending().leading_zeros(),
            packet_en: self.s.packet_en,
            restarts: self.s.restarts,
        }
    }

    /// Sends the bits that wait.
    pub fn flush(&mut self, cpu: &mut dyn Processor) {
        if self.s.status.trigger_en() {
            let step = cpu.step();
            self.time(step);
            self.s.stream.flush_tnt(&mut self.out, step);
            let _ = self.put(cpu);
        }
    }

    /// The processor sleeps, in a state that this unit has not seen it come to: an observer that goes on for another one.
    pub fn sleeps(&mut self) {
        self.s.sleep = Some(1);
    }

    /// Sends a PSB and the whole state. Everything before the next instruction has been reported.
    pub fn synchronize(&mut self, cpu: &mut dyn Processor) {
        if self.s.status.trigger_en() {
            let step = cpu.step();
            // A PSB says the time anyway.
            let _ = self.s.stream.set_tsc(step, cpu.tsc());
            self.s.ip = next_ip(cpu, &self.s.context);
            self.send_psb(step);
            let _ = self.put(cpu);
        }
    }
}
