//! The guest's part of a trace that a processor of the host's makes of guest and host. SDM Vol. 3C 33.5 "Tracing in VMX
//! Operation".
//!
//! # Theory
//! With the VMCS controls clear, a VM exit is FUP with the guest's IP, PIP with NR clear, MODE.Exec where the size of code
//! changes, and TIP; a VM entry is PIP with NR set, MODE.Exec, and TIP with the guest's IP. What lies between is the host's. Time
//! goes on there: the guest's trace keeps the packets that say so. TSC packets hold what RDTSC reads where they are sent, so the
//! host's lack the guest's offset.
//!
//! # Practice
//! While the host's code runs the guest stands at a known instruction with no branch waiting. So the host's PSB makes one of the
//! guest's there, of the unit's own making and with the host's time; PSBs and IPs are the unit's own everywhere, since the host's
//! are compressed against addresses that are gone. A guest that goes on where it was, or behind the instruction that the host
//! has executed for it, needs no packet. One that goes on elsewhere was led there as if by an interrupt: FUP and TIP. Where it
//! is not known what was lost (overflows, bytes that mean nothing) it is OVF, and the trace goes on where the next packet says
//! that the guest is, with a PSB.
//!
//! # Left out
//! A branch that the host executes for the guest and that leads less than an instruction's length ahead looks as none.

use pt_packet::{Carry, Decoder, ErrorKind, ExecMode, Packet};
use x86::watch::{CodeSize, Context, Effects, Processor};

use super::output::Output;
use super::{Pt, Served, next_ip};

/// The longest instruction, in bytes.
const LONGEST: u64 = 15;
/// Bytes that are kept at most before they are put out.
const BURST: usize = 1 << 16;
/// CFE types of VM entry, VM exit, and VM exit in the delivery of an interrupt. SDM Vol. 3C 33.4.2.29 "Control Flow Event (CFE)
/// Packet".
const VMX_EVENTS: std::ops::RangeInclusive<u8> = 7..=9;
/// EVD types of a VM exit's qualification and reason.
const VMX_DATA: std::ops::RangeInclusive<u8> = 1..=2;
/// Bits of a TSC packet.
const TSC: u64 = 0xFF_FFFF_FFFF_FFFF;

/// Whose the packets are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Origin {
    /// Nobody knows.
    Unknown,
    /// The host's.
    Host,
    /// A VM entry has begun, whose TIP is awaited.
    Entry,
    /// The guest's.
    Guest,
}

/// The packets between PSB and PSBEND.
#[derive(Clone, Debug, Default)]
struct Group {
    time: Vec<Packet>,
    pip: Option<(u64, bool)>,
    mode: Option<(ExecMode, bool)>,
    in_transaction: bool,
    ip: Option<u64>,
}

/// Where in the host's trace one is.
#[derive(Clone, Debug)]
pub(super) struct Relay {
    carry: Carry,
    /// The beginning of a packet whose end has not come.
    rest: Vec<u8>,
    /// The bytes mean nothing until there is a PSB.
    searches: bool,
    place: Origin,
    /// The IP at which the guest stands while it does not run.
    stands: Option<u64>,
    /// It does not go on there: its transaction was aborted.
    jumps: bool,
    /// CR3 differs from what the guest's trace says.
    new_cr3: bool,
    /// A FUP of which it is not known whether a VM exit follows.
    fup: Option<u64>,
    /// The last packet says that a FUP of its own follows.
    bound: bool,
    /// The last packet is the abort of a transaction.
    abort: bool,
    /// Packets of the guest's are lost.
    lost: bool,
    /// Cycles that have not been reported.
    cycles: u64,
    group: Option<Group>,
    /// A PSB has been sent since the host took over.
    joined: bool,
    /// What the guest's time-stamp counter is ahead of the host's.
    tsc_offset: u64,
}

impl<O: Output> Pt<O> {
    /// From now on a processor of the host's may trace the guest, as far as this says.
    pub fn serve(&mut self, served: Option<Served>) {
        self.served = served;
    }

    /// Whether tracing is on and the host's tracer can do it.
    pub fn is_served(&self) -> bool {
        let takes = |served: &Served| served.takes(self.s.ctl, &self.caps);
        self.s.status.trigger_en() && self.served.as_ref().is_some_and(takes)
    }

    /// The first and last address of each range that is traced, if not all are.
    pub fn filter(&self) -> Vec<(u64, u64)> {
        self.ranges.filters().to_vec()
    }

    /// The control register.
    pub fn control(&self) -> x86::pt::RtitCtl {
        self.s.ctl
    }

    /// The host's tracer takes over: the next instruction is `back` bytes before where the processor says. The guest's time-stamp
    /// counter is so much ahead of the host's.
    pub fn host_begins(&mut self, back: u64, tsc_offset: u64, cpu: &mut dyn Processor) {
        let step = cpu.step();
        self.s.stream.flush_tnt(&mut self.out, step);
        self.set_context(cpu.context());
        self.s.ip = next_ip(cpu, &self.s.context).wrapping_sub(back);
        self.relay = Some(Box::new(Relay {
            carry: Carry::default(),
            rest: Vec::new(),
            searches: false,
            place: Origin::Host,
            stands: Some(self.code.ip(self.s.ip)),
            jumps: false,
            new_cr3: false,
            fup: None,
            bound: false,
            abort: false,
            lost: false,
            cycles: 0,
            group: None,
            joined: false,
            tsc_offset,
        }));
    }

    /// Whether the host's tracer has taken over.
    pub fn host_traces(&self) -> bool {
        self.relay.is_some()
    }

    /// What the host's tracer has written, in pieces of any size.
    pub fn host_bytes(&mut self, bytes: &[u8], cpu: &mut dyn Processor) -> Effects {
        let Some(mut relay) = self.relay.take() else {
            return Effects::NONE;
        };
        let effects = self.take_bytes(&mut relay, bytes, cpu);
        self.relay = Some(relay);
        effects
    }

    /// Bytes of the host's tracer are lost: only a PSB is clear again.
    pub fn host_lost(&mut self) {
        if let Some(relay) = &mut self.relay {
            relay.rest.clear();
            relay.lose();
            relay.searches = true;
        }
    }

    /// The host's tracer has stopped, and all that it wrote has been taken. The next instruction is `back` bytes before where the
    /// processor says.
    pub fn host_ends(&mut self, back: u64, cpu: &mut dyn Processor) -> Effects {
        let Some(mut relay) = self.relay.take() else {
            return Effects::NONE;
        };
        if !self.s.status.trigger_en() {
            return self.put(cpu);
        }
        let step = cpu.step();
        self.set_context(cpu.context());
        self.s.stream.resume(step);
        let at = next_ip(cpu, &self.s.context).wrapping_sub(back);
        let ip = self.code.ip(at);
        let admitted = self.s.ctl.branch_en() && self.ranges.admit(ip);
        // Nothing is traced any more: whoever has not come out of the guest has lost the exit.
        relay.lost |= relay.place != Origin::Host;
        match (relay.lost, self.s.packet_en) {
            (true, _) => self.find(&mut relay, admitted.then_some(ip), step),
            (false, true) if admitted => self.enter(&mut relay, ip, step),
            (false, true) => self.leave(&mut relay, step),
            (false, false) => self.arrive(at, step),
        }
        self.s.status.set_filter_en(self.ranges.admit(ip));
        self.s.ip = at;
        self.put(cpu)
    }

    fn take_bytes(&mut self, relay: &mut Relay, bytes: &[u8], cpu: &mut dyn Processor) -> Effects {
        let (mut effects, step) = (Effects::NONE, cpu.step());
        let mut data = std::mem::take(&mut relay.rest);
        data.extend_from_slice(bytes);
        let mut decoder = Decoder::resume(&data, relay.carry);
        let mut from = data.len();
        loop {
            if relay.searches {
                relay.searches = decoder.sync_forward().is_none();
                if relay.searches {
                    // The beginning of a PSB, perhaps.
                    from = data.len().saturating_sub(pt_packet::PSB.len() - 1);
                    break;
                }
            }
            match decoder.next_packet() {
                None => break,
                Some(Ok(item)) => self.host_packet(relay, item.packet, step),
                Some(Err(error)) if matches!(error.kind, ErrorKind::Truncated { .. }) => {
                    from = error.offset;
                    break;
                }
                Some(Err(_)) => {
                    relay.lose();
                    relay.searches = true;
                }
            }
            if self.out.filled().len() >= BURST {
                effects = effects.and(self.put(cpu));
            }
            if !self.s.status.trigger_en() {
                break;
            }
        }
        relay.carry = decoder.carry();
        relay.rest = data.split_off(from);
        effects.and(self.put(cpu))
    }

    /// Passes a packet on, with the cycles before it.
    fn pass(&mut self, relay: &mut Relay, packet: Packet) {
        let cycles = std::mem::take(&mut relay.cycles);
        if cycles != 0 && self.s.ctl.cyc_en() {
            self.s.stream.relay(&mut self.out, Packet::Cyc(cycles));
        }
        self.s.stream.relay(&mut self.out, packet);
    }

    fn host_packet(&mut self, relay: &mut Relay, packet: Packet, step: u64) {
        match packet {
            Packet::Pad | Packet::Vmcs(_) | Packet::Mnt(_) => return,
            Packet::Ovf => {
                relay.lose();
                return;
            }
            Packet::Psb => {
                self.own_fup(relay);
                relay.group = Some(Group::default());
                return;
            }
            _ => {}
        }
        if let Some(mut group) = relay.group.take() {
            if group.takes(packet) {
                relay.group = Some(group);
                return;
            }
            self.synchronized(relay, &group, step);
            if packet == Packet::PsbEnd {
                return;
            }
        }
        if self.time_passes(relay, packet) {
            return;
        }
        match relay.place {
            Origin::Unknown | Origin::Host => {
                if let Packet::Pip { cr3, non_root } = packet {
                    self.host_pip(relay, cr3, non_root);
                }
            }
            Origin::Entry => self.entry(relay, packet, step),
            Origin::Guest => self.guest_packet(relay, packet, step),
        }
    }

    /// Packets about time are for whoever runs.
    fn time_passes(&mut self, relay: &mut Relay, packet: Packet) -> bool {
        match packet {
            Packet::Cyc(cycles) => relay.cycles = relay.cycles.saturating_add(cycles),
            Packet::Tsc(_) if relay.place == Origin::Unknown => {}
            Packet::Tsc(tsc) => {
                let tsc = relay.guest_tsc(tsc, relay.place == Origin::Guest);
                self.pass(relay, tsc);
            }
            Packet::Tma { .. } | Packet::Mtc(_) | Packet::Cbr(_) => self.pass(relay, packet),
            _ => return false,
        }
        true
    }

    /// PIP while the host runs, or while nobody knows.
    fn host_pip(&mut self, relay: &mut Relay, cr3: u64, non_root: bool) {
        match (relay.place, non_root) {
            (Origin::Unknown, false) => relay.place = Origin::Host,
            (Origin::Unknown, true) => {
                relay.place = Origin::Guest;
                self.new_cr3(relay, cr3);
            }
            (_, false) => {}
            (_, true) => {
                relay.place = Origin::Entry;
                self.new_cr3(relay, cr3);
            }
        }
    }

    fn new_cr3(&mut self, relay: &mut Relay, cr3: u64) {
        relay.new_cr3 |= self.s.context.cr3 != cr3;
        let context = Context { cr3, ..self.s.context };
        self.set_context(context);
    }

    /// Between a VM entry's PIP and its TIP.
    fn entry(&mut self, relay: &mut Relay, packet: Packet, step: u64) {
        match packet {
            Packet::Tip(Some(ip)) | Packet::TipPge(Some(ip)) => self.enter(relay, ip, step),
            Packet::TipPgd(_) => self.leave(relay, step),
            Packet::Pip { cr3, non_root: true } => self.new_cr3(relay, cr3),
            // It has failed, or ended at once.
            Packet::Pip { .. } => relay.place = Origin::Host,
            Packet::ModeExec { mode, interrupts } => self.new_mode(mode, interrupts),
            Packet::ModeTsx { in_tx, .. } => self.s.in_transaction = in_tx,
            _ => {
                // Whoever goes on without a TIP is where no packets are generated.
                self.leave(relay, step);
                self.guest_packet(relay, packet, step);
            }
        }
    }

    fn new_mode(&mut self, mode: ExecMode, interrupts: bool) {
        let code = match mode {
            ExecMode::Bits16 => CodeSize::Bits16,
            ExecMode::Bits32 => CodeSize::Bits32,
            ExecMode::Bits64 => CodeSize::Bits64,
        };
        let context = Context {
            code,
            interrupts: if self.s.ctl.event_en() {
                interrupts
            } else {
                self.s.context.interrupts
            },
            ..self.s.context
        };
        self.set_context(context);
    }

    /// PSB+ has come to its end.
    fn synchronized(&mut self, relay: &mut Relay, group: &Group, step: u64) {
        let before = relay.place;
        let non_root = match (group.pip, before) {
            (Some((_, non_root)), _) => non_root,
            (None, Origin::Guest | Origin::Entry) => true,
            (None, Origin::Host) => false,
            (None, Origin::Unknown) => return,
        };
        let time: Vec<Packet> = group
            .time
            .iter()
            .map(|&packet| relay.guest_time(packet, non_root))
            .collect();
        if non_root {
            relay.lost |= before == Origin::Host;
            if let Some((cr3, _)) = group.pip {
                self.new_cr3(relay, cr3);
            }
            if let Some((mode, interrupts)) = group.mode {
                self.new_mode(mode, interrupts);
            }
            self.s.in_transaction = group.in_transaction;
            relay.fup = None;
            // What it is, the PSB tells.
            relay.new_cr3 = false;
            match (group.ip, before) {
                _ if relay.lost => self.find(relay, group.ip, step),
                (Some(ip), Origin::Entry) => self.enter(relay, ip, step),
                (Some(ip), _) if self.s.packet_en => self.s.ip = self.code.linear(ip),
                (None, _) if !self.s.packet_en => {}
                (ip, _) => self.find(relay, ip, step),
            }
            relay.place = Origin::Guest;
        } else {
            relay.lost |= before == Origin::Guest;
            relay.place = Origin::Host;
        }
        if !relay.lost && (!relay.joined || self.s.stream.psb_is_near()) {
            relay.joined = true;
            self.send_psb_at(Some(&time), step);
        } else {
            for packet in time {
                self.pass(relay, packet);
            }
        }
    }

    /// Packets were lost, and the guest is here, or somewhere without packets.
    fn find(&mut self, relay: &mut Relay, ip: Option<u64>, step: u64) {
        relay.lost = false;
        relay.place = Origin::Guest;
        (relay.fup, relay.jumps, relay.new_cr3) = (None, false, false);
        self.s.packet_en = ip.is_some() && self.s.ctl.branch_en();
        if let Some(ip) = ip {
            self.s.ip = self.code.linear(ip);
        }
        self.send_overflow(step);
        self.send_psb_at(Some(&[]), step);
    }

    /// The guest goes on here.
    fn enter(&mut self, relay: &mut Relay, ip: u64, step: u64) {
        relay.place = Origin::Guest;
        let jumps = std::mem::take(&mut relay.jumps);
        let new_cr3 = std::mem::take(&mut relay.new_cr3);
        let at = self.code.linear(ip);
        match relay.stands.take() {
            _ if relay.lost => return self.find(relay, Some(ip), step),
            _ if !self.s.ctl.branch_en() => {}
            _ if !self.s.packet_en => self.rise(at, step),
            None => return self.find(relay, Some(ip), step),
            Some(from) => {
                let ahead = ip.wrapping_sub(from);
                if jumps || ahead > LONGEST || self.s.mode.is_some_and(|mode| mode != self.mode()) {
                    self.pass(relay, Packet::Fup(Some(from)));
                    if new_cr3 {
                        self.send_pip(step);
                    }
                    self.send_mode(step);
                    self.pass(relay, Packet::Tip(Some(ip)));
                } else if new_cr3 && ahead != 0 {
                    // MOV to CR3, which the host has executed.
                    self.send_pip(step);
                }
            }
        }
        self.s.ip = at;
    }

    /// The guest goes on where no packets are generated.
    fn leave(&mut self, relay: &mut Relay, step: u64) {
        relay.place = Origin::Guest;
        if relay.lost {
            return self.find(relay, None, step);
        }
        if self.s.packet_en {
            match relay.stands.take() {
                Some(from) => {
                    self.pass(relay, Packet::Fup(Some(from)));
                    self.pass(relay, Packet::TipPgd(None));
                    self.s.packet_en = false;
                }
                None => self.find(relay, None, step),
            }
        }
    }

    /// A FUP that waited is none of a VM exit's.
    fn own_fup(&mut self, relay: &mut Relay) {
        if let Some(ip) = relay.fup.take()
            && !relay.lost
        {
            self.pass(relay, Packet::Fup(Some(ip)));
        }
    }

    /// A VM exit: the FUP before it says where.
    fn exit(&mut self, relay: &mut Relay) {
        relay.place = Origin::Host;
        relay.jumps = relay.abort;
        relay.stands = relay.fup.take();
        relay.bound = false;
        match relay.stands {
            Some(ip) => self.s.ip = self.code.linear(ip),
            None => relay.lost |= self.s.packet_en,
        }
    }

    fn guest_packet(&mut self, relay: &mut Relay, packet: Packet, step: u64) {
        if let Packet::Pip { non_root: false, .. } = packet {
            return self.exit(relay);
        }
        let lost = relay.lost;
        self.own_fup(relay);
        let bound = std::mem::take(&mut relay.bound);
        if let Packet::Fup(Some(ip)) = packet
            && !bound
        {
            relay.fup = Some(ip);
            return;
        }
        relay.abort = false;
        match packet {
            Packet::Pip { cr3, .. } => {
                self.new_cr3(relay, cr3);
                relay.new_cr3 = false;
                if !lost {
                    self.pass(relay, Packet::Pip { cr3, non_root: false });
                }
            }
            Packet::ModeExec { mode, interrupts } => {
                self.new_mode(mode, interrupts);
                self.s.mode = Some(self.mode());
                if !lost {
                    self.pass(relay, packet);
                }
            }
            Packet::ModeTsx { in_tx, abort } => {
                self.s.in_transaction = in_tx;
                relay.abort = abort;
                if !lost {
                    self.pass(relay, packet);
                }
            }
            Packet::Tip(Some(ip)) | Packet::TipPge(Some(ip)) if lost => self.find(relay, Some(ip), step),
            Packet::TipPgd(_) if lost => self.find(relay, None, step),
            _ if lost => {}
            Packet::ShortTnt(_) | Packet::LongTnt(_) if !self.s.packet_en => {}
            Packet::TipPge(Some(ip)) if !self.s.packet_en => self.rise(self.code.linear(ip), step),
            // What led here is missing.
            Packet::Tip(Some(ip)) if !self.s.packet_en => self.find(relay, Some(ip), step),
            Packet::TipPge(Some(ip)) => self.find(relay, Some(ip), step),
            Packet::TipPgd(_) if !self.s.packet_en => {}
            Packet::TipPgd(_) => {
                self.pass(relay, packet);
                self.s.packet_en = false;
            }
            Packet::Tip(ip) => {
                self.pass(relay, packet);
                if let Some(ip) = ip {
                    self.s.ip = self.code.linear(ip);
                }
            }
            Packet::Cfe { kind, .. } if VMX_EVENTS.contains(&kind) => {}
            Packet::Evd { kind, .. } if VMX_DATA.contains(&kind) => {}
            Packet::Ptw { ip, .. } | Packet::ExStop { ip } | Packet::Bep { ip } | Packet::Cfe { ip, .. } => {
                relay.bound = ip;
                self.pass(relay, packet);
            }
            // Nobody has asked for a place to stop at, and a PSBEND without its PSB is none.
            Packet::TraceStop | Packet::PsbEnd | Packet::TipPge(None) => {}
            _ => self.pass(relay, packet),
        }
    }
}

impl Group {
    /// Whether a packet belongs to PSB+.
    fn takes(&mut self, packet: Packet) -> bool {
        match packet {
            Packet::Tsc(_) | Packet::Tma { .. } | Packet::Mtc(_) | Packet::Cbr(_) => self.time.push(packet),
            Packet::Cyc(_) => {}
            Packet::Pip { cr3, non_root } => self.pip = Some((cr3, non_root)),
            Packet::ModeExec { mode, interrupts } => self.mode = Some((mode, interrupts)),
            Packet::ModeTsx { in_tx, .. } => self.in_transaction = in_tx,
            Packet::Fup(ip) => self.ip = ip,
            _ => return false,
        }
        true
    }
}

impl Relay {
    /// Packets are lost, and with them whose the next ones are.
    fn lose(&mut self) {
        self.lost = true;
        self.place = Origin::Unknown;
        (self.fup, self.stands, self.group) = (None, None, None);
        (self.bound, self.abort, self.jumps) = (false, false, false);
    }

    fn guest_tsc(&self, tsc: u64, non_root: bool) -> Packet {
        let offset = if non_root { 0 } else { self.tsc_offset };
        Packet::Tsc(tsc.wrapping_add(offset) & TSC)
    }

    fn guest_time(&self, packet: Packet, non_root: bool) -> Packet {
        match packet {
            Packet::Tsc(tsc) => self.guest_tsc(tsc, non_root),
            other => other,
        }
    }
}
