//! Intel Processor Trace. SDM Vol. 3C ch. 33 "Intel Processor Trace".
//!
//! # Theory
//! Packets tell what the code does not: which way conditional branches went, where indirect ones led, what interrupted. They
//! are generated while PacketEn is set, which is TriggerEn (the guest wants a trace and it has not come to its end), ContextEn
//! (ring and CR3), FilterEn (address ranges) and BranchEn together; packets about other things need less.
//!
//! # Practice
//! `msrs` holds the registers and what WRMSR does, `callbacks` what the unit makes of each `Watch` callback, `flow` the loop over
//! near branches, `filter` what is traced, `packets` the stream with its compression and clocks, `output` where bytes go. Every
//! callback ends with the bytes put out, so that nothing waits but taken/not-taken bits. Where a processor of the host's runs the
//! guest and traces it, `relay` takes the guest's part of that trace instead of the callbacks, and `served` says of which settings.
//!
//! The unit serves twice: the guest's has [`output::GuestMemory`] behind it, an observer's a sink of the host's, which
//! programs the same registers.
//!
//! # Left out
//! Output to guest-physical addresses. Of a host's trace VMCS packets and the non-root bit are stripped. Nothing here is faster than the output, so an OVF packet only
//! tells that a host's sink was full. FabricEn is refused, as on every model: no part that is modelled enumerates it.

mod callbacks;
pub mod filter;
mod flow;
mod host;
mod msrs;
pub mod output;
pub mod packets;
mod relay;
mod served;
#[cfg(test)]
#[path = "pt_test.rs"]
mod tests;

use pt_packet::{ExecMode, Packet};
use serde::{Deserialize, Serialize};
use x86::pt::{PtCaps, RtitCtl, RtitStatus};
use x86::watch::{CodeSize, Context, Effects, Interest, Processor, Recorded};

use filter::{Addresses, Ranges};
use output::{GuestMemory, Outcome, Output};
use packets::{Buffer, Stream};
use relay::Relay;
pub use served::Served;

/// A logical processor's trace unit.
#[derive(Clone, Debug)]
pub struct Pt<O: Output = GuestMemory> {
    caps: PtCaps,
    s: Inner,
    output: O,
    out: Buffer,
    ranges: Ranges,
    code: Addresses,
    boundaries: Vec<u64>,
    generation: u64,
    /// For an observer's unit: what the last PIP reported, so that it is reported also where OS is clear.
    told_cr3: Option<(u64, bool)>,
    tells_cr3: bool,
    /// For an observer's unit: ranges are looked at in straight-line code, too.
    follows_edges: bool,
    /// An observer wants what runs.
    admits: bool,
    /// What a processor of the host's records for the guest, if it does.
    served: Option<Served>,
    /// While it does so.
    relay: Option<Box<Relay>>,
}

/// The whole state of a [`Pt`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PtState<S = GuestMemory> {
    inner: Inner,
    output: S,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Inner {
    ctl: RtitCtl,
    /// Without PacketByteCnt, which the stream counts.
    status: RtitStatus,
    cr3_match: u64,
    addresses: [u64; 8],
    /// Where the processor stood at the last callback.
    context: Context,
    /// Linear address of an instruction that is reached without any further packet.
    ip: u64,
    packet_en: bool,
    /// What the last MODE.Exec since the last PSB said.
    mode: Option<(ExecMode, bool)>,
    in_transaction: bool,
    /// After INIT: the trace goes on where the processor starts.
    restarts: bool,
    /// In system-management mode: TraceEn as RSM brings it back.
    interrupted: bool,
    /// The C-state of a sleep that power events tell of.
    sleep: Option<u8>,
    stream: Stream,
    /// A region's PMI, until it is taken.
    topa_pmi: bool,
    /// Bytes were lost: an OVF packet is due.
    lost: bool,
}

impl Inner {
    fn new(caps: &PtCaps) -> Self {
        Self {
            ctl: RtitCtl::new(),
            status: RtitStatus::new(),
            cr3_match: 0,
            addresses: [0; 8],
            context: Context::default(),
            ip: 0,
            packet_en: false,
            mode: None,
            in_transaction: false,
            restarts: false,
            interrupted: false,
            sleep: None,
            stream: Stream::new(caps),
            topa_pmi: false,
            lost: false,
        }
    }
}

/// The linear address of the next instruction.
fn next_ip(cpu: &dyn Processor, context: &Context) -> u64 {
    match context.code {
        CodeSize::Bits64 => cpu.rip(),
        CodeSize::Bits16 | CodeSize::Bits32 => cpu.rip().wrapping_add(context.cs_base) & 0xFFFF_FFFF,
    }
}

impl Pt {
    /// The guest's unit, as after power-up.
    pub fn new(caps: PtCaps) -> Self {
        Self::with_output(caps, GuestMemory::default())
    }
}

impl<O: Output> Pt<O> {
    /// A unit whose packets go to `output`.
    pub fn with_output(caps: PtCaps, output: O) -> Self {
        let s = Inner::new(&caps);
        let code = Addresses::new(&caps, &s.context);
        Self {
            caps,
            s,
            output,
            out: Buffer::default(),
            ranges: Ranges::default(),
            code,
            boundaries: Vec::new(),
            generation: 0,
            told_cr3: None,
            tells_cr3: false,
            follows_edges: false,
            admits: true,
            served: None,
            relay: None,
        }
    }

    /// What the model can do.
    pub fn caps(&self) -> &PtCaps {
        &self.caps
    }

    /// Where packets go.
    pub fn output(&mut self) -> &mut O {
        &mut self.output
    }

    /// Whether TraceEn is set.
    pub fn trace_en(&self) -> bool {
        self.s.ctl.trace_en()
    }

    /// Whether last-branch records pause: on parts where they and TraceEn exclude each other.
    pub fn pauses_lbr(&self) -> bool {
        self.caps.excludes_lbr && self.trace_en()
    }

    /// Whether a region has asked for a PMI since the last call: IA32_PERF_GLOBAL_STATUS.Trace_ToPA_PMI\[55\] is to be set. The
    /// interrupt itself was in the callback's effects.
    pub fn take_topa_pmi(&mut self) -> bool {
        std::mem::take(&mut self.s.topa_pmi)
    }

    /// The whole state.
    pub fn state(&self) -> PtState<O::State> {
        let mut inner = self.s.clone();
        // While nothing is traced this says where the processor stood when somebody asked last, which is no state of the guest's;
        // a trace that begins asks the processor.
        if !inner.status.trigger_en() {
            (inner.context, inner.ip) = (Context::default(), 0);
        }
        PtState {
            inner,
            output: self.output.state(),
        }
    }

    /// Takes a state back that a unit of the same model gave.
    pub fn set_state(&mut self, state: PtState<O::State>) {
        self.s = state.inner;
        self.output.set_state(state.output);
        self.out.clear();
        self.code = Addresses::new(&self.caps, &self.s.context);
        self.set_ranges();
    }

    /// What the executor must say from this step of its clock on.
    pub fn interest(&self, step: u64) -> Interest {
        if !self.s.status.trigger_en() {
            return Interest::NOTHING;
        }
        let context_en = self.s.status.context_en();
        let interest = Interest {
            transfers: true,
            // MODE.Exec tells of RFLAGS.IF with EventEn only.
            interrupts: self.s.ctl.event_en(),
            branches: Recorded::All.when(context_en && (self.s.ctl.branch_en() || !self.ranges.is_empty())),
            instructions: self.s.stream.tick(),
            ..Interest::NOTHING
        };
        match self
            .goes_plainly()
            .then(|| self.s.stream.runs(step, O::RECORDS))
            .flatten()
        {
            Some(runs) => Interest {
                run: runs.bits,
                branch_room: runs.records,
                instructions: interest.instructions.min(runs.steps),
                ..interest
            },
            None => interest,
        }
    }

    /// The addresses before whose instructions `before` is to be called: none of the guest's unit.
    pub fn boundaries(&self) -> &[u64] {
        &self.boundaries
    }

    /// Moves with [`Pt::boundaries`].
    pub fn generation(&self) -> u64 {
        self.generation
    }

    /// Takes over the ranges, from the registers.
    fn set_ranges(&mut self) {
        self.ranges = if self.s.status.trigger_en() {
            Ranges::new(self.s.ctl, &self.s.addresses)
        } else {
            Ranges::default()
        };
        self.set_boundaries();
    }

    fn set_boundaries(&mut self) {
        let boundaries = match self.follows_edges {
            true => self.ranges.boundaries(self.code),
            false => Vec::new(),
        };
        if boundaries != self.boundaries {
            self.boundaries = boundaries;
            self.generation += 1;
        }
    }

    /// The processor stands somewhere else.
    fn set_context(&mut self, mut context: Context) {
        // What is concealed is not concealed from an observer.
        if context.concealed && !self.tells_cr3 {
            (context.non_root, context.vmcs) = (false, None);
        }
        // RFLAGS.IF is told with EventEn alone; else it is as it was at some moment that nobody can name.
        self.s.context = Context {
            concealed: false,
            interrupts: context.interrupts && self.s.ctl.event_en(),
            ..context
        };
        let code = Addresses::new(&self.caps, &context);
        if code != self.code {
            self.code = code;
            // What is called in one mode and returns in another is not for compression.
            self.s.stream.forget_calls();
            if !self.ranges.is_empty() {
                self.set_boundaries();
            }
        }
    }

    fn send(&mut self, packet: Packet, step: u64) {
        self.s.stream.send(&mut self.out, packet, step);
    }

    /// What MODE.Exec would say.
    fn mode(&self) -> (ExecMode, bool) {
        let context = &self.s.context;
        let mode = match context.code {
            CodeSize::Bits16 => ExecMode::Bits16,
            CodeSize::Bits32 => ExecMode::Bits32,
            CodeSize::Bits64 => ExecMode::Bits64,
        };
        (mode, self.s.ctl.event_en() && context.interrupts)
    }

    /// MODE.Exec, where it tells something new.
    fn send_mode(&mut self, step: u64) {
        let mode = self.mode();
        if self.s.mode != Some(mode) {
            self.s.mode = Some(mode);
            let (mode, interrupts) = mode;
            self.send(Packet::ModeExec { mode, interrupts }, step);
        }
    }

    /// Whether a PSB is due and may stand here: between the FUP of an INIT and the TIP of the start that follows it would be in the
    /// way of both.
    fn psb_due(&self) -> bool {
        self.s.stream.psb_due() && !self.s.restarts
    }

    /// PSB and what goes with it. SDM Vol. 3C 33.3.7 "PSB+".
    fn send_psb(&mut self, step: u64) {
        self.send_psb_at(None, step);
    }

    /// The same, with packets of somebody else's that say the time.
    fn send_psb_at(&mut self, time: Option<&[Packet]>, step: u64) {
        let s = &mut self.s;
        s.stream.psb(&mut self.out, step);
        s.mode = None;
        s.status.set_pend_psb(false);
        let (ctl, context_en) = (s.ctl, s.status.context_en());
        if context_en && (ctl.os() || self.tells_cr3) {
            let (cr3, non_root) = (s.context.cr3, s.context.non_root);
            self.told_cr3 = Some((cr3, non_root));
            self.send(Packet::Pip { cr3, non_root }, step);
        }
        if context_en && let Some(pointer) = self.s.context.vmcs {
            self.send(Packet::Vmcs(pointer), step);
        }
        match time {
            None => self.s.stream.time(&mut self.out, step),
            Some(packets) => packets
                .iter()
                .for_each(|&packet| self.s.stream.relay(&mut self.out, packet)),
        }
        if self.s.packet_en {
            self.send_mode(step);
        }
        if context_en && ctl.branch_en() {
            let in_tx = self.s.in_transaction;
            self.send(Packet::ModeTsx { in_tx, abort: false }, step);
        }
        if self.s.packet_en {
            let ip = self.code.ip(self.s.ip);
            self.send(Packet::Fup(Some(ip)), step);
        }
        self.send(Packet::PsbEnd, step);
    }

    /// TIP.PGE at a linear address: PacketEn rises.
    fn rise(&mut self, at: u64, step: u64) {
        let context = &self.s.context;
        if self.tells_cr3 && self.told_cr3 != Some((context.cr3, context.non_root)) {
            self.stamp_cr3(step);
            self.send_pip(step);
        }
        self.send_mode(step);
        self.s.stream.forget_calls();
        self.s.packet_en = true;
        self.s.ip = at;
        let ip = self.code.ip(at);
        self.send(Packet::TipPge(Some(ip)), step);
    }

    /// A TraceStop range is entered: the trace has come to its end, and FilterEn is clear. SDM Vol. 3C 33.2.5.3 "Filtering by IP",
    /// 33.4.2.9 "TraceStop Packet".
    fn trace_stop(&mut self, step: u64) {
        self.send(Packet::TraceStop, step);
        self.s.status.set_stopped(true);
        self.s.status.set_filter_en(false);
        self.end();
    }

    /// TriggerEn falls, and with it all else.
    fn end(&mut self) {
        self.s.status.set_trigger_en(false);
        self.s.packet_en = false;
        self.set_ranges();
    }

    /// What became of bytes.
    fn note_output(&mut self, outcome: Outcome) -> Effects {
        let s = &mut self.s;
        if outcome.pmi {
            s.topa_pmi = true;
            if s.ctl.inject_psb_pmi_on_enable() {
                s.status.set_pend_topa_pmi(true);
            }
        }
        s.lost |= outcome.lost;
        if outcome.error {
            s.status.set_error(true);
        }
        if outcome.stopped {
            s.status.set_stopped(true);
        }
        if (outcome.error || outcome.stopped) && s.status.trigger_en() {
            self.end();
        }
        Effects {
            pmi: outcome.pmi,
            ..Effects::NONE
        }
    }

    /// Ends a callback: PSB where it is due, then the bytes go out.
    fn finish(&mut self, step: u64, cpu: &mut dyn Processor) -> Effects {
        if self.s.status.trigger_en() {
            if self.s.lost {
                self.s.lost = false;
                self.send_overflow(step);
            }
            if self.psb_due() {
                self.send_psb(step);
            }
        }
        self.put(cpu)
    }

    fn put(&mut self, cpu: &mut dyn Processor) -> Effects {
        if self.out.is_empty() {
            return Effects::NONE;
        }
        let outcome = self.output.put(self.out.filled(), &self.caps, cpu);
        self.out.clear();
        self.note_output(outcome)
    }

    /// OVF, and where the trace goes on: FUP, unless PacketEn is clear; then TIP.PGE follows when it rises. SDM Vol. 3C 33.3.8
    /// "Internal Buffer Overflow".
    fn send_overflow(&mut self, step: u64) {
        self.s.stream.overflow(&mut self.out, step);
        self.s.mode = None;
        if self.s.packet_en {
            let ip = self.code.ip(self.s.ip);
            self.send(Packet::Fup(Some(ip)), step);
        }
    }

    /// Packets were lost on their way, says whoever takes them: OVF tells a decoder. The trace goes on at the next instruction.
    pub fn overflow(&mut self, cpu: &mut dyn Processor) -> Effects {
        if !self.s.status.trigger_en() {
            return Effects::NONE;
        }
        let step = cpu.step();
        self.s.ip = next_ip(cpu, &self.s.context);
        self.send_overflow(step);
        self.finish(step, cpu)
    }
}
