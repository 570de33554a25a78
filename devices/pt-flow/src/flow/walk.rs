//! The walk along the code.

use super::{Decoder, Pip, Write};
use crate::event::{Block, End, EventKind, GapKind, Visitor};
use crate::graph::{NONE, Node, cut};
use crate::image::{Image, Position};
use pt_packet::{Decoder as Packets, ExecMode, Packet, Tnt};

/// So many blocks may follow each other without a branch that a packet tells of.
const ENDLESS: u32 = 1 << 16;

/// The last calls, for compressed returns. SDM Vol. 3C 33.4.2.2, "Indirect Transfer Compression for Returns (RET)".
#[derive(Clone, Debug)]
pub(super) struct Returns {
    /// Where each returns to, and the node of its call.
    entries: [(u64, u32); 64],
    top: usize,
    count: usize,
}

impl Default for Returns {
    fn default() -> Returns {
        Returns {
            entries: [(0, NONE); 64],
            top: 0,
            count: 0,
        }
    }
}

impl Returns {
    pub fn clear(&mut self) {
        self.count = 0;
    }

    #[inline]
    fn push(&mut self, ip: u64, node: u32) {
        self.top = (self.top + 1) % 64;
        self.entries[self.top] = (ip, node);
        self.count = (self.count + 1).min(64);
    }

    #[inline]
    fn pop(&mut self) -> Option<(u64, u32)> {
        self.count = self.count.checked_sub(1)?;
        let entry = self.entries[self.top];
        self.top = (self.top + 63) % 64;
        Some(entry)
    }

    /// The nodes are no longer those that the addresses mean.
    pub fn forget_nodes(&mut self) {
        self.entries.iter_mut().for_each(|entry| entry.1 = NONE);
    }
}

impl<I: Image> Decoder<I> {
    /// Execution is at `ip`, which was not known before.
    pub(super) fn start(&mut self, ip: u64) {
        self.place.since = self.place.offset;
        self.go(ip);
    }

    /// Execution is at `ip`.
    #[inline]
    pub(super) fn go(&mut self, ip: u64) {
        self.place.ip = ip;
        self.place.node = NONE;
        self.place.known = true;
    }

    #[inline]
    fn space(&self, ip: u64) -> u32 {
        self.place.spaces[(ip >> 63) as usize]
    }

    /// The present node, alive.
    #[inline]
    fn node(&mut self) -> Result<u32, GapKind> {
        let id = self.place.node;
        if id != NONE && self.graph.nodes[id as usize].live {
            return Ok(id);
        }
        self.find_node()
    }

    #[inline(never)]
    fn find_node(&mut self) -> Result<u32, GapKind> {
        let id = self.place.node;
        if id != NONE {
            self.graph.revive(&mut self.image, id)?;
            return Ok(id);
        }
        let (ip, mode) = (self.place.ip, self.place.mode);
        let space = self.space(ip);
        let id = self.graph.find(&mut self.image, space, mode, ip)?;
        self.place.node = id;
        Ok(id)
    }

    /// The address of the present place.
    fn here(&self) -> u64 {
        match self.place.node {
            NONE => self.place.ip,
            id => self.graph.nodes[id as usize].block.ip,
        }
    }

    /// The place stays, but the code there need not be what it was.
    pub(super) fn forget_node(&mut self) {
        self.place.ip = self.here();
        self.place.node = NONE;
    }

    #[inline]
    fn emit<V: Visitor>(&mut self, block: &Block, visitor: &mut V) {
        self.summary.blocks += 1;
        self.summary.instructions += block.count as u64;
        if V::CODE {
            self.tell_code(block, visitor);
        }
        visitor.block(block);
    }

    #[inline(never)]
    fn tell_code<V: Visitor>(&mut self, block: &Block, visitor: &mut V) {
        self.bytes.resize(block.len as usize, 0);
        let space = self.space(block.ip);
        let len = self.image.code(space, block.ip, &mut self.bytes).min(self.bytes.len());
        visitor.code(block, &self.bytes[..len]);
    }

    /// Goes along an edge of a node: to what is right behind it (0) or to its target (1).
    #[inline]
    fn follow(&mut self, id: u32, edge: usize) -> Result<(), GapKind> {
        let next = self.graph.nodes[id as usize].next[edge];
        if next != NONE {
            self.place.node = next;
            return Ok(());
        }
        self.link(id, edge)
    }

    #[inline(never)]
    fn link(&mut self, id: u32, edge: usize) -> Result<(), GapKind> {
        let node = self.graph.nodes[id as usize];
        let mut ip = if edge == 0 { node.end_ip() } else { node.target };
        if node.block.mode != ExecMode::Bits64 {
            ip &= 0xffff_ffff;
        }
        self.go(ip);
        // An edge stays within its space, and what cannot be decoded may never be executed.
        if node.space == self.space(ip)
            && node.block.mode == self.place.mode
            && let Ok(next) = self.find_node()
        {
            self.graph.nodes[id as usize].next[edge] = next;
        }
        Ok(())
    }

    /// Passes a node's end where no packet is needed for that: calls are remembered, packets that waited for the instruction
    /// are reported. False where a packet must tell what follows.
    #[inline]
    fn direct<V: Visitor>(&mut self, id: u32, end: End, visitor: &mut V) -> Result<bool, GapKind> {
        match end {
            End::Continue | End::Cut => self.follow(id, 0)?,
            End::Jump => self.follow(id, 1)?,
            End::Call => {
                let node = &self.graph.nodes[id as usize];
                let (after, target) = (node.end_ip(), node.target);
                // A call of the next instruction is for reading the IP and has no return.
                if after != target {
                    self.returns.push(after, id);
                }
                self.follow(id, 1)?;
            }
            End::MovCr3 => {
                self.follow(id, 0)?;
                if let Some(Pip { cr3, non_root, .. }) = self.pending.paging.pop_front() {
                    let ip = self.here();
                    self.set_paging(cr3, non_root, visitor);
                    self.go(ip);
                }
            }
            End::PtWrite => {
                if let Some(Write { value, size, .. }) = self.pending.writes.pop_front() {
                    let ip = self.last_ip_of(id);
                    self.event(EventKind::PtWrite { ip, value, size }, visitor);
                }
                self.follow(id, 0)?;
            }
            _ => return Ok(false),
        }
        Ok(true)
    }

    /// The address of a node's last instruction.
    fn last_ip_of(&mut self, id: u32) -> Option<u64> {
        let node = self.graph.nodes[id as usize];
        if node.block.count == 1 {
            return Some(node.block.ip);
        }
        // It is at most 15 bytes long, and the block can be cut in front of it.
        (1..=15).map(|back| node.end_ip().wrapping_sub(back)).find(|at| {
            inside(&node, *at)
                && cut(&mut self.image, &node, *at).is_some_and(|block| block.count + 1 == node.block.count)
        })
    }

    /// TNT: for each bit, the way to the branch and the branch.
    pub(super) fn walk_tnt<V: Visitor>(
        &mut self,
        tnt: Tnt,
        packets: &mut Packets,
        visitor: &mut V,
    ) -> Result<(), GapKind> {
        let changes = self.next_change <= self.place.offset;
        let bits = tnt.bits();
        for bit in (0..tnt.len()).rev() {
            let taken = (bits >> bit & 1) as usize;
            if changes {
                self.changes(tnt.len() - 1 - bit, visitor)?;
            }
            let mut hops = 0;
            loop {
                let id = self.node()?;
                let block = self.graph.nodes[id as usize].block;
                self.emit(&block, visitor);
                match block.end {
                    End::Conditional => {
                        self.follow(id, taken)?;
                        break;
                    }
                    End::Return => {
                        let Some((to, call)) = self.returns.pop() else {
                            return Err(GapKind::NoCall { ip: block.ip });
                        };
                        if taken == 0 {
                            return Err(GapKind::Mismatch { ip: block.ip });
                        }
                        self.go_back(to, call)?;
                        break;
                    }
                    end => {
                        if !self.direct(id, end, visitor)? {
                            // Its TIP was held back until the TNT was full: SDM Vol. 3C 33.4.2.3 "Deferred TIPs".
                            let to = self
                                .deferred(packets, visitor)
                                .ok_or(GapKind::Mismatch { ip: block.ip })?;
                            self.leave(id, to, visitor)?;
                        }
                    }
                }
                hops += 1;
                if hops > ENDLESS {
                    return Err(GapKind::Endless { ip: block.ip });
                }
            }
        }
        Ok(())
    }

    /// A compressed return to `to`, which is right behind the node `call`.
    #[inline]
    fn go_back(&mut self, to: u64, call: u32) -> Result<(), GapKind> {
        if call != NONE {
            let node = &self.graph.nodes[call as usize];
            if node.block.mode == self.place.mode && node.end_ip() == to {
                return self.follow(call, 0);
            }
        }
        // The stack holds as many bits as the mode of the return takes from it.
        self.go(match self.place.mode {
            ExecMode::Bits64 => to,
            _ => to & 0xffff_ffff,
        });
        Ok(())
    }

    /// The next TIP, where it comes next.
    fn deferred<V: Visitor>(&mut self, packets: &mut Packets, visitor: &mut V) -> Option<u64> {
        loop {
            let before = packets.clone();
            match packets.next_packet().and_then(Result::ok).map(|item| item.packet) {
                Some(Packet::Tip(to)) => return to,
                Some(Packet::Pad) => {}
                Some(
                    packet @ (Packet::Tsc(_) | Packet::Mtc(_) | Packet::Cyc(_) | Packet::Cbr(_) | Packet::Tma { .. }),
                ) => self.tick(packet, visitor),
                _ => {
                    *packets = before;
                    return None;
                }
            }
        }
    }

    /// Leaves a node whose end needs a packet, to where the packet says.
    #[inline]
    fn leave<V: Visitor>(&mut self, id: u32, to: u64, visitor: &mut V) -> Result<(), GapKind> {
        let node = &self.graph.nodes[id as usize];
        let (mode, space, after) = (node.block.mode, node.space, node.end_ip());
        let last = (node.target, node.next[1]);
        match node.block.end {
            End::IndirectCall => self.returns.push(after, id),
            End::Return => drop(self.returns.pop()),
            End::Far => self.take_paging(visitor),
            _ => {}
        }
        if self.pending.mode.is_some() {
            self.take_mode(visitor);
        }
        let known = mode == self.place.mode && space == self.space(to);
        // Where it led last time.
        if known && last.0 == to && last.1 != NONE {
            self.place.node = last.1;
            return Ok(());
        }
        self.go(to);
        if known && let Ok(next) = self.find_node() {
            let node = &mut self.graph.nodes[id as usize];
            node.target = to;
            node.next[1] = next;
        }
        Ok(())
    }

    /// TIP: the way to the branch that it is the target of.
    pub(super) fn walk_tip<V: Visitor>(&mut self, to: Option<u64>, visitor: &mut V) -> Result<(), GapKind> {
        if self.next_change <= self.place.offset {
            self.changes(u32::MAX, visitor)?;
        }
        for _ in 0..ENDLESS {
            let id = self.node()?;
            let block = self.graph.nodes[id as usize].block;
            if block.end == End::Conditional {
                return Err(GapKind::Mismatch { ip: block.ip });
            }
            self.emit(&block, visitor);
            if !self.direct(id, block.end, visitor)? {
                return self.leave(id, to.ok_or(GapKind::NoIp)?, visitor);
            }
        }
        Err(GapKind::Endless { ip: self.here() })
    }

    /// FUP: the way to the instruction at `to`, which is not executed yet.
    pub(super) fn walk_to<V: Visitor>(&mut self, to: u64, visitor: &mut V) -> Result<(), GapKind> {
        if self.next_change <= self.place.offset {
            self.changes(u32::MAX, visitor)?;
        }
        let due = self.due(to);
        self.walk_direct(to, due, visitor)
    }

    /// Up to which offset packets must have found their instructions where the way to `to` ends: all so far, if there is a way
    /// past all of their instructions.
    fn due(&mut self, to: u64) -> u64 {
        let due = self.place.offset;
        if self.waits(0, 0, due) && self.leads_to(to, due) {
            due
        } else {
            0
        }
    }

    /// Whether packets in front of the offset `due` still wait for their MOV CR3 or PTWRITE when so many have found theirs.
    fn waits(&self, pips: usize, writes: usize, due: u64) -> bool {
        let pending = &self.pending;
        pending.paging.get(pips).is_some_and(|pip| pip.offset < due)
            || pending.writes.get(writes).is_some_and(|write| write.offset < due)
    }

    /// The way to `to`, past all instructions whose packets stand in front of the offset `due`: a loop may come by `to` before.
    fn walk_direct<V: Visitor>(&mut self, to: u64, due: u64, visitor: &mut V) -> Result<(), GapKind> {
        let from = self.here();
        for _ in 0..ENDLESS {
            let waits = self.waits(0, 0, due);
            // The code there need not be anything that can be decoded.
            if self.here() == to && !waits {
                return Ok(());
            }
            let id = self.node()?;
            let node = self.graph.nodes[id as usize];
            if inside(&node, to) && !waits {
                let block = cut(&mut self.image, &node, to).ok_or(GapKind::Unreached { from, to })?;
                self.emit(&block, visitor);
                self.go(to);
                return Ok(());
            }
            if needs_packet(node.block.end) {
                return Err(GapKind::Unreached { from, to });
            }
            self.emit(&node.block, visitor);
            self.direct(id, node.block.end, visitor)?;
        }
        Err(GapKind::Endless { ip: self.here() })
    }

    /// Over the PTWRITE that is next.
    pub(super) fn walk_over_write<V: Visitor>(&mut self, visitor: &mut V) -> Result<(), GapKind> {
        let id = self.node()?;
        let block = self.graph.nodes[id as usize].block;
        if block.end != End::PtWrite || block.count != 1 {
            return Err(GapKind::Mismatch { ip: block.ip });
        }
        self.emit(&block, visitor);
        self.follow(id, 0)
    }

    /// The way to the instructions that packets wait for, when no more packets will tell of it.
    pub(super) fn walk_waiting<V: Visitor>(&mut self, visitor: &mut V) -> Result<(), GapKind> {
        // Behind the packets that were lost the code need not lead to its next change.
        while self.place.known
            && self.waits(0, 0, self.place.offset)
            && let Some(position) = self.image.next_change()
            && position.offset <= self.place.offset
            && self.walk_to_change(position, visitor)?
        {
            self.advance(position);
        }
        for _ in 0..ENDLESS {
            if !self.place.known || self.pending.writes.is_empty() && self.pending.paging.is_empty() {
                return Ok(());
            }
            let id = self.node()?;
            let block = self.graph.nodes[id as usize].block;
            if needs_packet(block.end) {
                return Err(GapKind::Mismatch { ip: block.ip });
            }
            self.emit(&block, visitor);
            self.direct(id, block.end, visitor)?;
        }
        Err(GapKind::Endless { ip: self.here() })
    }

    /// TIP.PGD: the way to the instruction that ended tracing, and with it.
    pub(super) fn walk_out<V: Visitor>(&mut self, to: Option<u64>, visitor: &mut V) -> Result<(), GapKind> {
        if self.next_change <= self.place.offset {
            self.changes(u32::MAX, visitor)?;
        }
        for _ in 0..ENDLESS {
            let id = self.node()?;
            let node = self.graph.nodes[id as usize];
            // Straight-line code leaves a filtered region without a branch.
            if let Some(to) = to.filter(|to| inside(&node, *to)) {
                let due = self.due(to);
                return self.walk_direct(to, due, visitor);
            }
            let out = match (node.block.end, to) {
                // A direct branch leaves the filtered region where its target is reported.
                (End::Jump | End::Call, Some(to)) => node.target == to,
                (End::Conditional, Some(to)) if node.target != to && node.end_ip() != to => {
                    return Err(GapKind::Mismatch { ip: node.block.ip });
                }
                // One that is followed by its PIP did not end tracing.
                (End::MovCr3, None) => self.pending.paging.is_empty(),
                (end, _) => needs_packet(end),
            };
            self.emit(&node.block, visitor);
            if out {
                return Ok(());
            }
            self.direct(id, node.block.end, visitor)?;
            let straight = matches!(node.block.end, End::Continue | End::MovCr3 | End::PtWrite);
            if straight && Some(self.here()) == to {
                return Ok(());
            }
        }
        Err(GapKind::Endless { ip: self.here() })
    }

    /// The changes of the code that lie on the way to the present packet, or to the branch in it that `bits` come before.
    #[cold]
    fn changes<V: Visitor>(&mut self, bits: u32, visitor: &mut V) -> Result<(), GapKind> {
        while let Some(position) = self.image.next_change() {
            // Bits that were pending are those of the first TNT behind the position.
            let of_this = position.offset >= self.place.behind_tnt;
            if position.offset > self.place.offset || of_this && position.bits > bits {
                break;
            }
            let walked = self.walk_to_change(position, visitor);
            if let (Ok(false), Some(ip)) = (walked, position.ip) {
                self.event(EventKind::Gap(GapKind::ChangeUnreached { ip }), visitor);
            }
            self.advance(position);
            walked?;
        }
        Ok(())
    }

    /// The way to a change of the code; `false`, and nothing done, where the code does not lead there without a packet.
    fn walk_to_change<V: Visitor>(&mut self, position: Position, visitor: &mut V) -> Result<bool, GapKind> {
        // Before execution was known here, nothing leads to the change.
        let Some(ip) = position.ip.filter(|_| position.offset > self.place.since) else {
            return Ok(true);
        };
        // Packets in front of the change are of instructions in front of it.
        let Some(due) = [position.offset, 0].into_iter().find(|due| self.leads_to(ip, *due)) else {
            return Ok(false);
        };
        self.walk_direct(ip, due, visitor)?;
        Ok(true)
    }

    /// Whether the code leads to an address without a packet that tells of a branch, as [`Self::walk_direct`] goes.
    fn leads_to(&mut self, to: u64, due: u64) -> bool {
        let mut ip = self.here();
        let (mut context, mut spaces) = (self.place.context, self.place.spaces);
        // Packets that have found their instructions.
        let (mut pips, mut writes) = (0, 0);
        for _ in 0..ENDLESS {
            let waits = self.waits(pips, writes, due);
            if ip == to && !waits {
                return true;
            }
            let space = spaces[(ip >> 63) as usize];
            let mode = self.place.mode;
            let Ok(id) = self.graph.find(&mut self.image, space, mode, ip) else {
                return false;
            };
            let node = self.graph.nodes[id as usize];
            if inside(&node, to) && !waits {
                return cut(&mut self.image, &node, to).is_some();
            }
            match node.block.end {
                End::MovCr3 => {
                    if let Some(pip) = self.pending.paging.get(pips) {
                        (context.cr3, context.non_root) = (Some(pip.cr3), pip.non_root);
                        spaces = [false, true].map(|upper| self.image.space(&context, upper));
                        pips += 1;
                    }
                }
                End::PtWrite => writes += 1,
                _ => {}
            }
            ip = match node.block.end {
                End::Jump | End::Call => node.target,
                end if needs_packet(end) => return false,
                _ => node.end_ip(),
            };
            if mode != ExecMode::Bits64 {
                ip &= 0xffff_ffff;
            }
        }
        false
    }

    fn advance(&mut self, position: Position) {
        let graph = &mut self.graph;
        self.image.advance(position, &mut |change| graph.change(change));
        self.next_change = self.image.next_change().map_or(u64::MAX, |position| position.offset);
    }

    /// Brings the image to the PSB at `offset`, in front of which all branches were sent.
    pub(super) fn change_up_to(&mut self, offset: u64) {
        self.next_change = self.image.next_change().map_or(u64::MAX, |position| position.offset);
        while let Some(position) = self.image.next_change().filter(|position| position.offset <= offset) {
            self.advance(position);
        }
    }
}

/// Whether an address lies within a node, behind its first byte.
fn inside(node: &Node, ip: u64) -> bool {
    ip.wrapping_sub(node.block.ip) < node.block.len as u64 && ip != node.block.ip
}

/// Whether a packet must tell what follows.
fn needs_packet(end: End) -> bool {
    matches!(
        end,
        End::Conditional | End::IndirectJump | End::IndirectCall | End::Return | End::Far
    )
}
