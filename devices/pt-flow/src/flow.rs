//! The walk along the packets of one chunk.

mod walk;

use crate::chunk::Chunk;
use crate::event::{Event, EventKind, GapKind, Summary, Visitor};
use crate::graph::{Graph, NONE};
use crate::image::{Context, Image};
use crate::time::{PacketClock, Timing};
use pt_packet::{Decoder as Packets, ExecMode, ItemSize, Packet, find_psb};
use std::collections::VecDeque;
use walk::Returns;

/// So many packets of one kind wait for their instruction; more are reported without it.
const WAITING: usize = 1 << 12;

/// Decodes chunks of a trace, in their order. Code that was met is remembered from one chunk to the next.
#[derive(Debug)]
pub struct Decoder<I> {
    image: I,
    graph: Graph,
    clock: PacketClock,
    summary: Summary,
    /// Positions of changes of the code up to which the image is, as an offset for quick comparison.
    next_change: u64,
    place: Position,
    returns: Returns,
    pending: Pending,
    /// Code of the block that is reported.
    bytes: Vec<u8>,
}

/// Where execution is.
#[derive(Clone, Copy, Debug)]
struct Position {
    /// The next instruction, where `known`.
    ip: u64,
    /// Its node, if that is known already.
    node: u32,
    known: bool,
    /// Packets are generated.
    enabled: bool,
    mode: ExecMode,
    context: Context,
    /// The image's spaces of the lower and the upper half of the addresses.
    spaces: [u32; 2],
    /// The last packet of the flow was a TNT or a TIP behind one: a TIP now may be older than the TNT's last branches.
    deferrable: bool,
    /// Offset of the present packet.
    offset: u64,
    /// Offset of the packet since which execution is known.
    since: u64,
    /// The last TNT packet begins before this offset.
    behind_tnt: u64,
}

/// Packets that wait for what they belong to.
#[derive(Clone, Debug, Default)]
struct Pending {
    /// An event from outside at this instruction, whose TIP or TIP.PGD has not come yet.
    fup: Option<u64>,
    /// The FUP that comes tells where an overflow ended.
    overflow: bool,
    mode: Option<(ExecMode, bool)>,
    /// What waits for a FUP.
    transaction: Option<(bool, bool)>,
    writes_at: VecDeque<(u64, ItemSize)>,
    stopped: bool,
    block_end: bool,
    control: Option<(u8, u8)>,
    /// What waits for its instruction.
    writes: VecDeque<Write>,
    paging: VecDeque<Pip>,
    vmcs: Option<u64>,
}

/// A PTW packet without a FUP, which waits for its PTWRITE.
#[derive(Clone, Copy, Debug)]
struct Write {
    offset: u64,
    value: u64,
    size: ItemSize,
}

/// A PIP packet, which waits for its MOV CR3 or far transfer.
#[derive(Clone, Copy, Debug)]
struct Pip {
    offset: u64,
    cr3: u64,
    non_root: bool,
}

impl<I: Image> Decoder<I> {
    /// A decoder that has met no code.
    pub fn new(image: I, timing: Timing) -> Decoder<I> {
        Decoder {
            image,
            graph: Graph::default(),
            clock: PacketClock::new(timing),
            summary: Summary::default(),
            next_change: 0,
            place: Position {
                ip: 0,
                node: NONE,
                known: false,
                enabled: false,
                mode: ExecMode::Bits64,
                context: Context::default(),
                spaces: [0; 2],
                deferrable: false,
                offset: 0,
                since: 0,
                behind_tnt: 0,
            },
            returns: Returns::default(),
            pending: Pending::default(),
            bytes: Vec::new(),
        }
    }

    /// The image.
    pub fn image(&self) -> &I {
        &self.image
    }

    /// How many blocks of code are remembered.
    pub fn nodes(&self) -> usize {
        self.graph.nodes.len()
    }

    /// What was found in the last chunk.
    pub fn summary(&self) -> Summary {
        self.summary
    }

    /// Decodes a chunk, which must lie behind those before it. Nothing is taken from them but the code.
    pub fn decode<V: Visitor>(&mut self, chunk: &Chunk, visitor: &mut V) {
        self.summary = Summary {
            bytes: chunk.len() as u64,
            ..Summary::default()
        };
        self.clock.reset();
        self.pending = Pending::default();
        self.returns.clear();
        self.place.known = false;
        self.place.enabled = false;
        self.place.offset = chunk.offset();
        if chunk.skipped() > 0 {
            let bytes = chunk.skipped();
            self.lose(GapKind::Skipped { bytes }, visitor);
        }
        if chunk.too_long() {
            self.lose(GapKind::TooLong, visitor);
        }
        self.change_up_to(chunk.offset());
        let bytes = chunk.bytes();
        let mut packets = Packets::new(bytes);
        loop {
            let at = packets.offset();
            if at >= chunk.len() {
                break;
            }
            self.place.offset = chunk.offset() + at as u64;
            match packets.next_packet() {
                None => break,
                Some(Ok(item)) => {
                    if let Err(gap) = self.packet(item.packet, &mut packets, chunk, visitor) {
                        self.lose(gap, visitor);
                    }
                }
                Some(Err(error)) => {
                    self.flush(visitor);
                    self.lose(GapKind::Packet(error.kind), visitor);
                    let next = find_psb(&bytes[..chunk.len()], at + 1).unwrap_or(chunk.len());
                    let bytes = (next - at) as u64;
                    self.event(EventKind::Gap(GapKind::Skipped { bytes }), visitor);
                    self.place.enabled = false;
                    packets.seek(next);
                }
            }
        }
        // What was executed up to the next chunk's PSB.
        if self.place.known && chunk.len() < bytes.len() {
            let mut ahead = Packets::new(bytes);
            ahead.seek(chunk.len());
            self.place.offset = chunk.offset() + chunk.len() as u64;
            if let (Some(ip), _) = psb_ip(&mut ahead)
                && let Err(gap) = self.walk_to(ip, visitor)
            {
                self.lose(gap, visitor);
            }
        }
        self.flush(visitor);
    }

    fn event<V: Visitor>(&mut self, kind: EventKind, visitor: &mut V) {
        match kind {
            EventKind::Gap(_) => self.summary.gaps += 1,
            EventKind::Overflow => self.summary.overflows += 1,
            _ => {}
        }
        let offset = self.place.offset;
        visitor.event(&Event { offset, kind });
    }

    fn time<V: Visitor>(&mut self, visitor: &mut V) {
        self.event(EventKind::Time(self.clock.now()), visitor);
    }

    /// Instructions are missing from here on.
    #[cold]
    fn lose<V: Visitor>(&mut self, gap: GapKind, visitor: &mut V) {
        self.place.known = false;
        self.place.node = NONE;
        self.returns.clear();
        self.pending.fup = None;
        self.event(EventKind::Gap(gap), visitor);
    }

    /// Execution goes on at `ip`, which was not known to follow.
    fn resume<V: Visitor>(&mut self, ip: u64, visitor: &mut V) {
        self.take_mode(visitor);
        self.take_paging(visitor);
        self.place.enabled = true;
        self.start(ip);
        self.event(EventKind::Resumed { ip }, visitor);
    }

    fn packet<V: Visitor>(
        &mut self,
        packet: Packet,
        packets: &mut Packets,
        chunk: &Chunk,
        visitor: &mut V,
    ) -> Result<(), GapKind> {
        match packet {
            Packet::ShortTnt(tnt) | Packet::LongTnt(tnt) => {
                self.pending.fup = None;
                self.place.deferrable = true;
                let walked = match (self.place.known, self.place.enabled) {
                    (true, _) => self.walk_tnt(tnt, packets, visitor),
                    (false, true) => Ok(()),
                    (false, false) => Err(GapKind::NoIp),
                };
                self.place.behind_tnt = self.place.offset + 1;
                walked
            }
            Packet::Tip(to) => self.tip(to, visitor),
            Packet::Pad => Ok(()),
            Packet::Tsc(_) | Packet::Tma { .. } | Packet::Mtc(_) | Packet::Cyc(_) | Packet::Cbr(_) => {
                self.tick(packet, visitor);
                Ok(())
            }
            Packet::Fup(ip) => self.fup(ip, visitor),
            Packet::TipPge(ip) => {
                self.place.deferrable = false;
                self.pending.overflow = false;
                self.take_mode(visitor);
                self.take_paging(visitor);
                self.place.enabled = true;
                match ip {
                    Some(ip) => self.start(ip),
                    None => self.place.known = false,
                }
                self.event(EventKind::Enabled { ip }, visitor);
                Ok(())
            }
            Packet::TipPgd(to) => self.disable(to, visitor),
            Packet::Psb => self.psb(packets, chunk, visitor),
            _ => self.other(packet, visitor),
        }
    }

    /// Packets of time.
    #[inline]
    fn tick<V: Visitor>(&mut self, packet: Packet, visitor: &mut V) {
        match packet {
            Packet::Tsc(tsc) => self.clock.tsc(tsc),
            Packet::Tma { ctc, fast } => return self.clock.tma(ctc, fast),
            Packet::Mtc(ctc) => self.clock.mtc(ctc),
            Packet::Cyc(cycles) => self.clock.cyc(cycles),
            Packet::Cbr(ratio) => self.clock.cbr(ratio),
            _ => return,
        }
        self.time(visitor);
    }

    /// The packets that are rare.
    fn other<V: Visitor>(&mut self, packet: Packet, visitor: &mut V) -> Result<(), GapKind> {
        let kind = match packet {
            Packet::ModeExec { mode, interrupts } => {
                self.pending.mode = Some((mode, interrupts));
                return Ok(());
            }
            Packet::Pip { cr3, non_root } => {
                let offset = self.place.offset;
                self.pending.paging.push_back(Pip { offset, cr3, non_root });
                if !self.place.enabled || self.pending.paging.len() > WAITING {
                    self.take_paging(visitor);
                }
                return Ok(());
            }
            Packet::Vmcs(pointer) => {
                self.pending.vmcs = Some(pointer);
                if !self.place.enabled {
                    self.take_paging(visitor);
                }
                return Ok(());
            }
            Packet::ModeTsx { in_tx, abort } => {
                self.pending.transaction = Some((in_tx, abort));
                return Ok(());
            }
            Packet::Ptw { value, size, ip } => {
                let offset = self.place.offset;
                let waiting = if ip {
                    self.pending.writes_at.push_back((value, size));
                    self.pending.writes_at.len()
                } else {
                    self.pending.writes.push_back(Write { offset, value, size });
                    self.pending.writes.len()
                };
                if waiting > WAITING || !self.place.known && !ip {
                    self.flush_writes(visitor);
                }
                return Ok(());
            }
            Packet::ExStop { ip: true } => {
                self.pending.stopped = true;
                return Ok(());
            }
            Packet::Cfe { kind, vector, ip: true } => {
                self.pending.control = Some((kind, vector));
                return Ok(());
            }
            Packet::Bep { ip: true } => {
                self.pending.block_end = true;
                return Ok(());
            }
            Packet::Bbp { .. } | Packet::Bip { .. } | Packet::Bep { ip: false } => return Ok(()),
            Packet::Ovf => {
                let result = self.walk_waiting(visitor);
                self.flush(visitor);
                if let Err(gap) = result {
                    self.lose(gap, visitor);
                }
                self.place.known = false;
                self.place.enabled = false;
                self.returns.clear();
                self.pending = Pending {
                    overflow: true,
                    ..Pending::default()
                };
                EventKind::Overflow
            }
            Packet::TraceStop => {
                self.flush(visitor);
                self.place.known = false;
                self.place.enabled = false;
                EventKind::TraceStop
            }
            Packet::ExStop { ip: false } => EventKind::Stopped { ip: None },
            Packet::Cfe {
                kind,
                vector,
                ip: false,
            } => EventKind::ControlFlow { ip: None, kind, vector },
            Packet::Evd { kind, value } => EventKind::EventData { kind, value },
            Packet::Mnt(value) => EventKind::Maintenance { value },
            Packet::Mwait { hints, extensions } => EventKind::Mwait { hints, extensions },
            Packet::Pwre {
                hardware,
                state,
                sub_state,
            } => EventKind::PowerEntry {
                hardware,
                state,
                sub_state,
            },
            Packet::Pwrx { last, deepest, reason } => EventKind::PowerExit { last, deepest, reason },
            // A PSBEND without its PSB, and what is dealt with elsewhere.
            _ => return Ok(()),
        };
        self.event(kind, visitor);
        Ok(())
    }

    /// FUP: what it tells the place of stands before it, or is an event from outside whose target comes.
    fn fup<V: Visitor>(&mut self, ip: Option<u64>, visitor: &mut V) -> Result<(), GapKind> {
        self.place.deferrable = false;
        if self.pending.overflow || !self.place.enabled {
            self.pending.overflow = false;
            let ip = ip.ok_or(GapKind::NoIp)?;
            self.resume(ip, visitor);
            return Ok(());
        }
        if let Some(ip) = ip
            && self.place.known
        {
            self.walk_to(ip, visitor)?;
        }
        let waiting = &mut self.pending;
        let owned = waiting.transaction.is_some()
            || !waiting.writes_at.is_empty()
            || waiting.stopped
            || waiting.block_end
            || waiting.control.is_some()
            || waiting.mode.is_some();
        // Events that lead elsewhere by themselves: the TIP belongs to this FUP. IRET (2), RSM (4), VM entry (7) and UIRET (13) are
        // instructions.
        let leads = waiting.transaction.is_some_and(|(_, abort)| abort)
            || waiting.control.is_some_and(|(kind, _)| !matches!(kind, 2 | 4 | 7 | 13));
        if !owned || leads {
            waiting.fup = Some(ip.ok_or(GapKind::NoIp)?);
        }
        let write = !waiting.writes_at.is_empty();
        self.tell_owned(ip, visitor);
        // The packet of a PTWRITE says that it was executed.
        if write && self.place.known {
            self.walk_over_write(visitor)?;
        }
        Ok(())
    }

    fn tell_owned<V: Visitor>(&mut self, ip: Option<u64>, visitor: &mut V) {
        if let Some((in_tx, abort)) = self.pending.transaction.take() {
            self.event(EventKind::Transaction { ip, in_tx, abort }, visitor);
        }
        while let Some((value, size)) = self.pending.writes_at.pop_front() {
            self.event(EventKind::PtWrite { ip, value, size }, visitor);
        }
        if std::mem::take(&mut self.pending.stopped) {
            self.event(EventKind::Stopped { ip }, visitor);
        }
        self.pending.block_end = false;
        // With event trace a change of IF is reported by MODE.Exec and FUP; the mode itself changes with a TIP only.
        if ip.is_some()
            && let Some((mode, interrupts)) = self.pending.mode.take()
        {
            self.event(EventKind::Mode { mode, interrupts }, visitor);
        }
        if let Some((kind, vector)) = self.pending.control.take() {
            self.event(EventKind::ControlFlow { ip, kind, vector }, visitor);
        }
    }

    /// TIP.
    fn tip<V: Visitor>(&mut self, to: Option<u64>, visitor: &mut V) -> Result<(), GapKind> {
        if let Some(from) = self.pending.fup.take() {
            let to_root = self.pending.paging.iter().any(|pip| !pip.non_root);
            let vm_exit = self.place.context.non_root && to_root;
            self.event(EventKind::Async { from, to, vm_exit }, visitor);
            self.place.deferrable = false;
            let known = self.place.known;
            self.take_paging(visitor);
            self.take_mode(visitor);
            let to = to.ok_or(GapKind::NoIp)?;
            if known {
                self.go(to);
            } else {
                self.start(to);
                self.event(EventKind::Resumed { ip: to }, visitor);
            }
            return Ok(());
        }
        if self.place.known {
            return self.walk_tip(to, visitor);
        }
        if !self.place.enabled {
            self.place.enabled = true;
            self.event(EventKind::Gap(GapKind::NoIp), visitor);
        }
        match to {
            Some(ip) if !self.place.deferrable => self.resume(ip, visitor),
            _ => {}
        }
        Ok(())
    }

    /// TIP.PGD.
    fn disable<V: Visitor>(&mut self, to: Option<u64>, visitor: &mut V) -> Result<(), GapKind> {
        self.place.deferrable = false;
        let at = self.pending.fup.take();
        let result = if at.is_none() && self.place.known {
            self.walk_out(to, visitor)
        } else {
            Ok(())
        };
        if let Err(gap) = result {
            self.event(EventKind::Gap(gap), visitor);
        }
        self.flush(visitor);
        self.place.known = false;
        self.place.enabled = false;
        self.take_paging(visitor);
        self.pending.mode = None;
        self.event(EventKind::Disabled { at, to }, visitor);
        Ok(())
    }

    /// PSB and what belongs to it: the state as it is there. SDM Vol. 3C 33.3.7 "Decoder Synchronization".
    fn psb<V: Visitor>(&mut self, packets: &mut Packets, chunk: &Chunk, visitor: &mut V) -> Result<(), GapKind> {
        self.summary.psbs += 1;
        self.place.deferrable = false;
        self.pending.fup = None;
        // The way to the PSB comes first, in the context and the mode of before.
        let (ip, whole) = psb_ip(&mut packets.clone());
        let mut result = Ok(());
        if self.place.known {
            result = match ip {
                Some(ip) => self.walk_to(ip, visitor),
                None if whole => Err(GapKind::NoIp),
                None => Ok(()),
            };
        }
        if let Err(gap) = result {
            self.lose(gap, visitor);
        }
        if self.graph.is_full() {
            self.forget_node();
            self.graph.clear();
        }
        self.returns.clear();
        let begins = self.summary.psbs == 1;
        let known = self.place.known;
        loop {
            let at = packets.offset();
            if at >= chunk.bytes().len() {
                break;
            }
            let before = packets.clone();
            self.place.offset = chunk.offset() + at as u64;
            let Some(Ok(item)) = packets.next_packet() else {
                // The caller meets it again.
                *packets = before;
                break;
            };
            match item.packet {
                Packet::PsbEnd => break,
                Packet::Pad | Packet::Fup(_) => {}
                Packet::ModeExec { mode, interrupts } => {
                    if self.place.mode != mode || begins {
                        self.forget_node();
                        self.place.mode = mode;
                        self.event(EventKind::Mode { mode, interrupts }, visitor);
                    }
                }
                Packet::ModeTsx { in_tx, abort } => {
                    self.event(EventKind::Transaction { ip, in_tx, abort }, visitor);
                }
                Packet::Pip { cr3, non_root } => self.set_paging(cr3, non_root, visitor),
                Packet::Vmcs(pointer) => {
                    self.place.context.vmcs = Some(pointer);
                    self.set_context();
                    self.event(EventKind::Vmcs { pointer }, visitor);
                }
                Packet::Tsc(_) | Packet::Tma { .. } | Packet::Mtc(_) | Packet::Cyc(_) | Packet::Cbr(_) => {
                    self.tick(item.packet, visitor);
                }
                _ => {
                    // An OVF cuts the state short, and nothing else may stand there.
                    *packets = before;
                    break;
                }
            }
        }
        if begins && !known {
            self.set_context();
        }
        match ip {
            Some(ip) if !known => {
                self.place.enabled = true;
                self.start(ip);
                let kind = if begins {
                    EventKind::Sync { ip }
                } else {
                    EventKind::Resumed { ip }
                };
                self.event(kind, visitor);
            }
            Some(_) => {}
            None => self.place.known = false,
        }
        Ok(())
    }

    /// The mode that a packet reported takes effect.
    fn take_mode<V: Visitor>(&mut self, visitor: &mut V) {
        if let Some((mode, interrupts)) = self.pending.mode.take() {
            self.place.mode = mode;
            self.event(EventKind::Mode { mode, interrupts }, visitor);
        }
        if let Some((in_tx, abort)) = self.pending.transaction.take() {
            let ip = None;
            self.event(EventKind::Transaction { ip, in_tx, abort }, visitor);
        }
    }

    /// All address spaces that packets reported take effect.
    fn take_paging<V: Visitor>(&mut self, visitor: &mut V) {
        if let Some(pointer) = self.pending.vmcs.take() {
            self.place.context.vmcs = Some(pointer);
            self.set_context();
            self.event(EventKind::Vmcs { pointer }, visitor);
        }
        while let Some(Pip { cr3, non_root, .. }) = self.pending.paging.pop_front() {
            self.set_paging(cr3, non_root, visitor);
        }
    }

    fn set_paging<V: Visitor>(&mut self, cr3: u64, non_root: bool, visitor: &mut V) {
        self.place.context.cr3 = Some(cr3);
        self.place.context.non_root = non_root;
        self.set_context();
        self.event(EventKind::Paging { cr3, non_root }, visitor);
    }

    fn set_context(&mut self) {
        let spaces = [false, true].map(|upper| self.image.space(&self.place.context, upper));
        if spaces != self.place.spaces {
            self.forget_node();
            self.place.spaces = spaces;
            self.returns.forget_nodes();
        }
    }

    /// What still waits for an instruction will not get one.
    fn flush<V: Visitor>(&mut self, visitor: &mut V) {
        self.tell_owned(None, visitor);
        self.flush_writes(visitor);
        self.pending.fup = None;
    }

    fn flush_writes<V: Visitor>(&mut self, visitor: &mut V) {
        while let Some(Write { value, size, .. }) = self.pending.writes.pop_front() {
            let ip = None;
            self.event(EventKind::PtWrite { ip, value, size }, visitor);
        }
        while self.pending.writes_at.len() > WAITING {
            if let Some((value, size)) = self.pending.writes_at.pop_front() {
                let ip = None;
                self.event(EventKind::PtWrite { ip, value, size }, visitor);
            }
        }
    }
}

/// The IP in the state that a PSB is followed by, and whether that state is whole. `packets` stands at the PSB or behind it.
fn psb_ip(packets: &mut Packets) -> (Option<u64>, bool) {
    let mut ip = None;
    while let Some(Ok(item)) = packets.next_packet() {
        match item.packet {
            Packet::Fup(found) => ip = found.or(ip),
            Packet::PsbEnd => return (ip, true),
            Packet::Ovf => return (ip, false),
            _ => {}
        }
    }
    (ip, false)
}
