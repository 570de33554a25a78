//! The stream of packets: what is pending in it, its timing, and how packets become bytes.
//!
//! # Theory
//! Taken/not-taken bits wait until a packet of another kind is due or no more fit into a long TNT packet. IPs are sent as
//! what differs from the last one. A return that leads to where its call would have returned to is one taken bit: calls since
//! the last PSB stand on a stack of 64. A return that leads elsewhere empties the stack, and so does anything after which a
//! decoder may not have followed every call, so that what stands on it is always the top of what a decoder has.
//!
//! # Practice
//! A step of the machine's clock is one cycle and one tick of the TSC. The core crystal clock's counter is the step count
//! times the ratio of CPUID leaf 15H; it stands behind MTC and TMA, and a write to the TSC does not move it. Clocks stop while
//! a processor sleeps and while others run for long, and wall time may move the TSC by more than the steps: then TSC, TMA and CBR
//! say what time it is.

use pt_packet::{
    IpKind, LastIp, MAX_LEN, Packet, Tnt, encode, encode_cyc, encode_long_tnt, encode_short_tnt, encode_tip,
};
use serde::{Deserialize, Serialize};
use serde_big_array::BigArray;
use x86::pt::{PtCaps, RtitCtl};
use x86::watch::BranchRecord;

/// Calls that can wait for their returns. SDM Vol. 3C 33.4.2.2, "Indirect Transfer Compression for Returns (RET)".
const CALLS: usize = 64;

/// MTC packets that are sent for one gap between branches at most: with more their eight bits would be ambiguous.
const MTC_BURST: u64 = 255;

/// Ticks by which the TSC may run ahead of the step clock before a packet says so: ports take their time in less.
const JUMP: u64 = 1 << 16;

/// Bytes that wait to be put out.
#[derive(Clone, Debug, Default)]
pub struct Buffer {
    bytes: Vec<u8>,
    used: usize,
}

impl Buffer {
    /// What waits.
    pub fn filled(&self) -> &[u8] {
        &self.bytes[..self.used]
    }

    /// Whether nothing waits.
    pub fn is_empty(&self) -> bool {
        self.used == 0
    }

    /// All has been put out.
    pub fn clear(&mut self) {
        self.used = 0;
    }

    #[cold]
    fn grow(&mut self) {
        let len = self.bytes.len().max(2048) * 2;
        self.bytes.resize(len, 0);
    }

    #[inline(always)]
    fn slot(&mut self) -> &mut [u8; MAX_LEN] {
        if self.bytes.len() - self.used < MAX_LEN {
            self.grow();
        }
        let tail = &mut self.bytes[self.used..];
        tail.first_chunk_mut().expect("grown to have room")
    }
}

/// Return addresses of calls, a ring that forgets the oldest.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Returns {
    #[serde(with = "BigArray")]
    addresses: [u64; CALLS],
    top: u8,
    depth: u8,
}

impl Default for Returns {
    fn default() -> Self {
        Self {
            addresses: [0; CALLS],
            top: 0,
            depth: 0,
        }
    }
}

impl Returns {
    #[inline(always)]
    fn push(&mut self, address: u64) {
        self.top = (self.top + 1) % CALLS as u8;
        self.addresses[usize::from(self.top) % CALLS] = address;
        self.depth = (self.depth + 1).min(CALLS as u8);
    }

    /// Takes the newest if it is `target`; else forgets all.
    #[inline(always)]
    fn matches(&mut self, target: u64) -> bool {
        let top = usize::from(self.top) % CALLS;
        if self.depth != 0 && self.addresses[top] == target {
            self.depth -= 1;
            self.top = (self.top + CALLS as u8 - 1) % CALLS as u8;
            return true;
        }
        self.depth = 0;
        false
    }

    fn clear(&mut self) {
        *self = Self::default();
    }
}

/// What the control register and the model make of the stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Setup {
    cyc: bool,
    /// Cycles that a CYC packet tells at least.
    cyc_least: u64,
    mtc: bool,
    mtc_freq: u32,
    tsc: bool,
    no_tnt: bool,
    compress_returns: bool,
    /// Bytes from PSB to PSB.
    psb_period: u32,
    /// TSC ticks to crystal ticks.
    crystal: (u32, u32),
    ratio: u8,
}

impl Setup {
    fn new(ctl: RtitCtl, caps: &PtCaps) -> Self {
        Self {
            cyc: ctl.cyc_en(),
            cyc_least: match ctl.cyc_thresh() {
                0 => 1,
                n => 1 << (n - 1),
            },
            mtc: ctl.mtc_en(),
            mtc_freq: u32::from(ctl.mtc_freq()),
            tsc: ctl.tsc_en(),
            no_tnt: ctl.dis_tnt(),
            compress_returns: !ctl.dis_retc(),
            psb_period: 2048 << ctl.psb_freq(),
            crystal: caps.crystal,
            ratio: caps.ratio,
        }
    }

    /// The crystal clock's counter.
    fn ctc(&self, step: u64) -> u64 {
        let (numerator, denominator) = self.crystal;
        (u128::from(step) * u128::from(denominator) / u128::from(numerator)) as u64
    }

    /// Steps from MTC to MTC.
    fn mtc_steps(&self) -> u64 {
        let (numerator, denominator) = self.crystal;
        (u64::from(numerator) << self.mtc_freq) / u64::from(denominator)
    }

    /// The first step at which the counter stands at `ctc`.
    fn step_of(&self, ctc: u64) -> u64 {
        let (numerator, denominator) = self.crystal;
        let step = (u128::from(ctc) * u128::from(numerator)).div_ceil(u128::from(denominator));
        u64::try_from(step).unwrap_or(u64::MAX)
    }
}

/// Steps from MTC to MTC from which on the end of the records at each costs little.
const SPARSE: u64 = 4096;
/// Bytes that packets of time before the first record of many may take, at most: [`MTC_BURST`] MTCs, or TSC, TMA and CBR, and TNT.
const TIME_BYTES: u32 = 640;
/// Bytes that one record may come to: a long TNT, another one where its run does not fit, and a TIP.
const RECORD_BYTES: u32 = 8 + 8 + 9;
/// As few records as that are not worth it.
const FEW: u32 = 16;
/// Branches until runs may be allowed again.
const SINGLE: u32 = 128;

/// How conditional branches may come as bits of other records.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Runs {
    /// Bits of a record ([`x86::watch::Interest::run`]).
    pub bits: u8,
    /// Records at once.
    pub records: u32,
    /// Steps until records have to end.
    pub steps: u64,
}

/// The stream's own state.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stream {
    setup: Setup,
    last_ip: LastIp,
    /// The next IP is sent whole: what the decoder of this trace has for the last one is not known here.
    whole_ip: bool,
    /// Pending bits under their stop bit.
    tnt: u64,
    returns: Returns,
    /// Bytes since the last PSB, less than 2 to the power of 17 as long as PSBs are sent.
    pub since_psb: u32,
    /// TSC less the step clock.
    tsc_base: u64,
    /// Step and TSC at the last PSB.
    psb_at: (u64, u64),
    /// The step of the last CYC packet, from which the next counts.
    cyc_at: u64,
    /// The step of the next MTC packet.
    mtc_due: u64,
    /// The number of MTC periods at the last one.
    mtc_last: u64,
}

impl Stream {
    /// A stream that has not begun.
    pub fn new(caps: &PtCaps) -> Self {
        Self {
            setup: Setup::new(RtitCtl::new(), caps),
            last_ip: LastIp::new(),
            whole_ip: true,
            tnt: 1,
            returns: Returns::default(),
            since_psb: 0,
            tsc_base: 0,
            psb_at: (0, 0),
            cyc_at: 0,
            mtc_due: u64::MAX,
            mtc_last: 0,
        }
    }

    /// Tracing starts under this control register. It may go on with a trace that another processor, or a trace of another program's
    /// before this one, has left somewhere else, and a decoder keeps its last IP until there is a PSB. SDM Vol. 3C 33.4.2.2
    /// "Target IP (TIP) Packet", "IP Compression".
    pub fn start(&mut self, ctl: RtitCtl, caps: &PtCaps, step: u64, tsc: u64) {
        *self = Self {
            since_psb: self.since_psb,
            setup: Setup::new(ctl, caps),
            cyc_at: step,
            tsc_base: tsc.wrapping_sub(step),
            ..Self::new(caps)
        };
        self.set_mtc(step);
    }

    /// What RDTSC reads now, so that TSC packets follow a write to the TSC. Says whether it has gone far ahead of the step clock,
    /// as it does where wall time moves it: MTC packets, which count steps, do not tell.
    #[must_use]
    pub fn set_tsc(&mut self, step: u64, tsc: u64) -> bool {
        let base = tsc.wrapping_sub(step);
        let ahead = base.wrapping_sub(std::mem::replace(&mut self.tsc_base, base));
        self.setup.tsc && (JUMP..1 << 63).contains(&ahead)
    }

    fn set_mtc(&mut self, step: u64) {
        if self.setup.mtc {
            self.mtc_last = self.setup.ctc(step) >> self.setup.mtc_freq;
            self.mtc_due = self.setup.step_of(self.mtc_last.wrapping_add(1) << self.setup.mtc_freq);
        } else {
            self.mtc_due = u64::MAX;
        }
    }

    /// The step at which something about time is due.
    #[inline(always)]
    pub fn due(&self) -> u64 {
        self.mtc_due
    }

    /// Instructions after which time should be looked at, so that code without branches misses no MTC packet.
    pub fn tick(&self) -> u64 {
        if !self.setup.mtc {
            return u64::MAX;
        }
        (MTC_BURST / 4 * self.setup.mtc_steps()).max(256)
    }

    /// How conditional branches may come as bits of other records from this step on: not where a packet of time may be due between
    /// them, which is then the end of all records, and one by one where a PSB may. No more than `most` records come at once. `None`: where
    /// that is too often.
    pub fn runs(&self, step: u64, most: u32) -> Option<Runs> {
        if !self.plain() {
            return None;
        }
        let mut steps = u64::MAX;
        if self.setup.mtc {
            if self.setup.mtc_steps() < SPARSE {
                return None;
            }
            // Of what is due at the next step the first record tells, which has a step of its own.
            let next = step.saturating_add(1);
            let due = self
                .setup
                .step_of(((self.setup.ctc(next) >> self.setup.mtc_freq) + 1) << self.setup.mtc_freq);
            steps = due - next;
        }
        let left = self.setup.psb_period.saturating_sub(self.since_psb);
        let records = left.saturating_sub(TIME_BYTES) / RECORD_BYTES;
        let (bits, records) = if records < FEW {
            (1, SINGLE.min(most))
        } else {
            (BranchRecord::RUN_BITS, records.min(most))
        };
        Some(Runs { bits, records, steps })
    }

    /// Whether bytes enough for another PSB have been sent.
    #[inline(always)]
    pub fn psb_due(&self) -> bool {
        self.since_psb >= self.setup.psb_period
    }

    /// Whether near branches can take the short way: nothing is wanted of each that a long TNT packet does not tell.
    pub fn plain(&self) -> bool {
        !self.setup.cyc && !self.setup.no_tnt
    }

    /// Forgets calls: a decoder may not have followed them.
    pub fn forget_calls(&mut self) {
        self.returns.clear();
    }

    #[inline(always)]
    fn took(&mut self, out: &mut Buffer, len: usize) {
        out.used += len;
        self.since_psb += len as u32;
    }

    /// A CYC packet, where one is due before a packet that wants one.
    fn cyc(&mut self, out: &mut Buffer, step: u64) {
        let cycles = step.wrapping_sub(self.cyc_at);
        if self.setup.cyc && cycles >= self.setup.cyc_least && cycles >> 63 == 0 {
            let len = encode_cyc(cycles, out.slot());
            self.took(out, len);
            self.cyc_at = step;
        }
    }

    /// Sends pending bits.
    #[inline]
    pub fn flush_tnt(&mut self, out: &mut Buffer, step: u64) {
        let Some(tnt) = Tnt::from_bits(self.tnt).filter(|tnt| !tnt.is_empty()) else {
            return;
        };
        self.tnt = 1;
        if self.setup.cyc {
            self.cyc(out, step);
        }
        let len = if tnt.len() <= Tnt::SHORT {
            encode_short_tnt(tnt, out.slot())
        } else {
            encode_long_tnt(tnt, out.slot())
        };
        self.took(out, len);
    }

    /// Sends a packet, pending bits before it.
    pub fn send(&mut self, out: &mut Buffer, packet: Packet, step: u64) {
        self.flush_tnt(out, step);
        if self.setup.cyc && wants_cyc(&packet) {
            self.cyc(out, step);
        }
        self.put(out, packet);
    }

    fn put(&mut self, out: &mut Buffer, packet: Packet) {
        if self.whole_ip {
            match packet {
                Packet::Psb => self.whole_ip = false,
                Packet::Fup(Some(ip)) | Packet::Tip(Some(ip)) | Packet::TipPge(Some(ip)) | Packet::TipPgd(Some(ip)) => {
                    self.whole_ip = false;
                    // Nothing of it can be left out.
                    self.last_ip = LastIp(!ip);
                }
                _ => {}
            }
        }
        let len = encode(&packet, &mut self.last_ip, out.slot());
        self.took(out, len);
    }

    /// Sends a packet that somebody else has timed. No bits of ours wait.
    pub fn relay(&mut self, out: &mut Buffer, packet: Packet) {
        self.put(out, packet);
    }

    /// The clocks are ours again from this step on, after packets of somebody else's have reported the time.
    pub fn resume(&mut self, step: u64) {
        self.cyc_at = step;
        self.set_mtc(step);
    }

    /// Whether at least half of the bytes have been sent after which a PSB is due.
    pub fn psb_is_near(&self) -> bool {
        self.since_psb >= self.setup.psb_period / 2
    }

    /// The bits that wait, under their stop bit.
    #[inline(always)]
    pub fn pending(&self) -> u64 {
        self.tnt
    }

    /// Gives back what [`Stream::pending`] gave, with more bits.
    #[inline(always)]
    pub fn set_pending(&mut self, bits: u64) {
        self.tnt = bits;
    }

    /// A taken/not-taken bit where the stream is not plain: no bits at all, or short packets so that each has its time.
    pub fn conditional_timed(&mut self, out: &mut Buffer, taken: bool, step: u64) {
        if self.setup.no_tnt {
            return;
        }
        self.tnt = self.tnt << 1 | u64::from(taken);
        let full = if self.setup.cyc { Tnt::SHORT } else { Tnt::LONG };
        if self.tnt >> full != 0 {
            self.flush_tnt(out, step);
        }
    }

    /// A direct near call that will return to `next`. One that only asks for its own address, by a displacement of 0, has no
    /// return. SDM Vol. 3C 33.4.2.2, "Indirect Transfer Compression for Returns (RET)".
    #[inline(always)]
    pub fn call(&mut self, next: u64, to: u64) {
        if next != to {
            self.returns.push(next);
        }
    }

    /// An indirect one, which has a return wherever it leads.
    #[inline(always)]
    pub fn call_indirect(&mut self, next: u64) {
        self.returns.push(next);
    }

    /// Whether a return to `to` is one taken bit.
    #[inline(always)]
    pub fn compresses(&mut self, to: u64) -> bool {
        self.setup.compress_returns && self.returns.matches(to)
    }

    /// A TIP packet, pending bits before it.
    #[inline(always)]
    pub fn tip(&mut self, out: &mut Buffer, ip: u64, step: u64) {
        self.flush_tnt(out, step);
        if self.setup.cyc {
            self.cyc(out, step);
        }
        debug_assert!(!self.whole_ip, "PacketEn has risen with an IP");
        let len = encode_tip(IpKind::Tip, ip, &mut self.last_ip, out.slot());
        self.took(out, len);
    }

    /// PSB: calls and the last IP are forgotten.
    pub fn psb(&mut self, out: &mut Buffer, step: u64) {
        self.flush_tnt(out, step);
        self.since_psb = 0;
        self.psb_at = (step, self.tsc_base.wrapping_add(step));
        self.send(out, Packet::Psb, step);
        self.returns.clear();
    }

    /// Step and TSC at the last PSB.
    pub fn last_psb(&self) -> (u64, u64) {
        self.psb_at
    }

    /// OVF: what waited is lost, and calls are forgotten.
    pub fn overflow(&mut self, out: &mut Buffer, step: u64) {
        self.tnt = 1;
        self.send(out, Packet::Ovf, step);
        self.returns.clear();
    }

    /// TSC and TMA as enabled, and CBR: the time now, after clocks have stopped or may be unknown.
    pub fn time(&mut self, out: &mut Buffer, step: u64) {
        self.stamp(out, step);
        self.send(out, Packet::Cbr(self.setup.ratio), step);
    }

    /// TSC and TMA as enabled.
    pub fn stamp(&mut self, out: &mut Buffer, step: u64) {
        if !self.setup.tsc {
            return;
        }
        self.send(
            out,
            Packet::Tsc(self.tsc_base.wrapping_add(step) & 0xFF_FFFF_FFFF_FFFF),
            step,
        );
        if self.setup.mtc {
            let ctc = self.setup.ctc(step);
            let fast = step.saturating_sub(self.setup.step_of(ctc));
            let packet = Packet::Tma {
                ctc: ctc as u16,
                // What does not fit is said to be the most that does.
                fast: fast.min(0x1FF) as u16,
            };
            self.send(out, packet, step);
        }
    }

    /// The clocks were stopped until now. The bits that wait go first.
    pub fn wake(&mut self, out: &mut Buffer, step: u64) {
        self.flush_tnt(out, step);
        self.cyc_at = step;
        self.set_mtc(step);
        self.time(out, step);
    }

    /// Time has come to `step`, which is at least [`Stream::due`].
    #[cold]
    pub fn advance(&mut self, out: &mut Buffer, step: u64) {
        let now = self.setup.ctc(step) >> self.setup.mtc_freq;
        if now.saturating_sub(self.mtc_last) > MTC_BURST {
            self.wake(out, step);
            return;
        }
        while self.mtc_due <= step && self.mtc_due != u64::MAX {
            self.mtc_last = self.mtc_last.wrapping_add(1);
            let at = self.mtc_due;
            self.send(out, Packet::Mtc(self.mtc_last as u8), at);
            self.mtc_due = self.setup.step_of(self.mtc_last.wrapping_add(1) << self.setup.mtc_freq);
        }
    }
}

/// Whether no more bits fit into a TNT packet.
#[inline(always)]
pub fn is_full(bits: u64) -> bool {
    bits >> Tnt::LONG != 0
}

/// Whether a CYC packet goes before this one. SDM Vol. 3C 33.3.6 "Cycle-Accurate Mode".
fn wants_cyc(packet: &Packet) -> bool {
    !matches!(
        packet,
        Packet::Pad
            | Packet::Fup(_)
            | Packet::TraceStop
            | Packet::Cbr(_)
            | Packet::Tma { .. }
            | Packet::Cyc(_)
            | Packet::Psb
            | Packet::PsbEnd
            | Packet::Bip { .. }
            | Packet::Bep { .. }
    )
}
