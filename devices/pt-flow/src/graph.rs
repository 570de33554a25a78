//! The code as a graph: nodes are blocks, edges are where they lead.

use crate::event::{Block, End, GapKind};
use crate::image::{Change, Image};
use iced_x86::{Code, Decoder, DecoderOptions, FlowControl, Instruction, OpKind, Register};
use pt_packet::ExecMode;
use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

/// No node.
pub(crate) const NONE: u32 = u32::MAX;

/// So many nodes are kept; with the tables beside them that is less than 80 MiB.
const LIMIT: usize = if cfg!(test) { 40 } else { 1 << 19 };

/// Instructions of a block. A block also ends with its page.
const LONGEST: u16 = 64;

const PAGE: u64 = 4096;

/// A block, and what follows it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Node {
    pub block: Block,
    /// Where a direct branch leads, or where the last indirect one led.
    pub target: u64,
    /// The nodes right behind the block and at `target`.
    pub next: [u32; 2],
    pub space: u32,
    /// Whether the code is still what it was. A node that is not keeps its place, so that edges to it stay right.
    pub live: bool,
}

impl Node {
    /// The address right behind the block.
    pub fn end_ip(&self) -> u64 {
        self.block.ip.wrapping_add(self.block.len as u64)
    }
}

/// Keys are addresses, which are spread well enough by a multiplication.
#[derive(Clone, Copy, Default)]
pub(crate) struct Mix(u64);

impl Hasher for Mix {
    fn finish(&self) -> u64 {
        self.0
    }
    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|byte| self.write_u64(*byte as u64));
    }
    fn write_u32(&mut self, word: u32) {
        self.write_u64(word as u64);
    }
    fn write_u64(&mut self, word: u64) {
        let product = (self.0 ^ word) as u128 * 0x9e37_79b9_7f4a_7c15;
        self.0 = product as u64 ^ (product >> 64) as u64;
    }
}

type Map<K, V> = HashMap<K, V, BuildHasherDefault<Mix>>;

/// Where code is: its space with the mode in the low bits, and its address.
type Key = (u32, u64);

/// Nodes that were found lately, by a few bits of their key's hash: one look where the whole index takes several.
const RECENT: usize = 1 << 14;

/// All code that was met.
#[derive(Debug)]
pub(crate) struct Graph {
    pub nodes: Vec<Node>,
    index: Map<Key, u32>,
    recent: Vec<(Key, u32)>,
    /// The nodes that have bytes in a page.
    pages: Map<Key, Vec<u32>>,
}

fn key(space: u32, mode: ExecMode, ip: u64) -> Key {
    (space << 2 | mode as u32, ip)
}

impl Default for Graph {
    fn default() -> Graph {
        Graph {
            nodes: Vec::new(),
            index: Map::default(),
            recent: vec![((u32::MAX, 0), NONE); RECENT],
            pages: Map::default(),
        }
    }
}

impl Graph {
    /// Whether there is so much that it should be forgotten.
    pub fn is_full(&self) -> bool {
        self.nodes.len() >= LIMIT
    }

    /// Forgets everything. Numbers of nodes mean nothing any more.
    pub fn clear(&mut self) {
        *self = Graph::default();
    }

    /// The node at an address, made if there is none, and alive.
    pub fn find(&mut self, image: &mut impl Image, space: u32, mode: ExecMode, ip: u64) -> Result<u32, GapKind> {
        let key = key(space, mode, ip);
        let slot = (ip.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 50) as usize % RECENT;
        let (recent, id) = self.recent[slot];
        if recent == key && id != NONE && self.nodes[id as usize].live {
            return Ok(id);
        }
        if let Some(&id) = self.index.get(&key) {
            self.recent[slot] = (key, id);
            if !self.nodes[id as usize].live {
                self.revive(image, id)?;
            }
            return Ok(id);
        }
        let node = read(image, space, mode, ip)?;
        let id = self.nodes.len() as u32;
        self.nodes.push(node);
        self.index.insert(key, id);
        self.enter(id);
        Ok(id)
    }

    /// Reads a node's code again.
    pub fn revive(&mut self, image: &mut impl Image, id: u32) -> Result<(), GapKind> {
        let old = &self.nodes[id as usize];
        self.nodes[id as usize] = read(image, old.space, old.block.mode, old.block.ip)?;
        self.enter(id);
        Ok(())
    }

    fn enter(&mut self, id: u32) {
        let node = &self.nodes[id as usize];
        let (first, last) = (node.block.ip & !(PAGE - 1), node.end_ip().wrapping_sub(1) & !(PAGE - 1));
        let space = node.space;
        self.pages.entry((space, first)).or_default().push(id);
        if last != first {
            self.pages.entry((space, last)).or_default().push(id);
        }
    }

    /// A page's code is another.
    pub fn change(&mut self, change: Change) {
        for id in self
            .pages
            .remove(&(change.space, change.page & !(PAGE - 1)))
            .unwrap_or_default()
        {
            self.nodes[id as usize].live = false;
        }
    }
}

/// Decodes the instructions from an address on, for as long as `more` says so; it is given each with its number.
fn instructions(
    image: &mut impl Image,
    space: u32,
    mode: ExecMode,
    ip: u64,
    mut more: impl FnMut(&Instruction, u16) -> bool,
) -> Result<(), GapKind> {
    const LONGEST_INSTRUCTION: usize = 15;
    let mut bytes = [0; 128];
    let (mut at, mut count) = (ip, 0);
    loop {
        let len = image.code(space, at, &mut bytes);
        let mut decoder = Decoder::with_ip(mode.bits(), &bytes[..len.min(bytes.len())], at, DecoderOptions::NONE);
        let mut instruction = Instruction::default();
        loop {
            let rest = len - decoder.position();
            if rest < LONGEST_INSTRUCTION && len == bytes.len() {
                break;
            }
            if rest == 0 {
                return Err(GapKind::NoCode { ip: at });
            }
            decoder.decode_out(&mut instruction);
            if instruction.is_invalid() {
                return Err(match decoder.last_error() {
                    iced_x86::DecoderError::NoMoreBytes => GapKind::NoCode { ip: at },
                    _ => GapKind::BadInstruction { ip: at },
                });
            }
            count += 1;
            at = instruction.next_ip();
            if !more(&instruction, count) {
                return Ok(());
            }
        }
    }
}

/// Reads a block.
fn read(image: &mut impl Image, space: u32, mode: ExecMode, ip: u64) -> Result<Node, GapKind> {
    let mut block = Block {
        ip,
        len: 0,
        count: 0,
        end: End::Continue,
        mode,
    };
    let mut target = 0;
    let result = instructions(image, space, mode, ip, |instruction, count| {
        block.count = count;
        block.len = instruction.next_ip().wrapping_sub(ip) as u32;
        if let Some(end) = ends(instruction) {
            block.end = end;
            if matches!(end, End::Conditional | End::Jump | End::Call) {
                target = near_target(instruction);
            }
            return false;
        }
        count < LONGEST && (instruction.next_ip() ^ ip) & !(PAGE - 1) == 0
    });
    match result {
        // What cannot be decoded may never be executed.
        Err(gap) if block.count == 0 => return Err(gap),
        _ => {}
    }
    Ok(Node {
        block,
        target,
        next: [NONE; 2],
        space,
        live: true,
    })
}

/// The part of a node in front of `ip`; `None` if no instruction begins there.
pub(crate) fn cut(image: &mut impl Image, node: &Node, ip: u64) -> Option<Block> {
    let mut block = Block {
        len: 0,
        count: 0,
        end: End::Cut,
        ..node.block
    };
    let result = instructions(image, node.space, block.mode, block.ip, |instruction, count| {
        block.count = count;
        block.len = instruction.next_ip().wrapping_sub(block.ip) as u32;
        block.count < node.block.count && block.ip.wrapping_add(block.len as u64) != ip
    });
    (result.is_ok() && block.ip.wrapping_add(block.len as u64) == ip).then_some(block)
}

/// Where a direct near branch leads. Addresses are linear, so that a code segment's base must not be cut off.
fn near_target(instruction: &Instruction) -> u64 {
    let next = instruction.next_ip();
    match instruction.op0_kind() {
        OpKind::NearBranch16 => {
            let displacement = instruction.near_branch16().wrapping_sub(next as u16) as i16;
            next.wrapping_add(displacement as u64) & 0xffff_ffff
        }
        OpKind::NearBranch32 => {
            let displacement = instruction.near_branch32().wrapping_sub(next as u32);
            next.wrapping_add(displacement as u64) & 0xffff_ffff
        }
        _ => instruction.near_branch64(),
    }
}

/// How an instruction ends its block, if it does.
fn ends(instruction: &Instruction) -> Option<End> {
    Some(match instruction.flow_control() {
        FlowControl::Next => match instruction.code() {
            Code::Mov_cr_r64 | Code::Mov_cr_r32 if instruction.op0_register() == Register::CR3 => End::MovCr3,
            Code::Ptwrite_rm32 | Code::Ptwrite_rm64 => End::PtWrite,
            _ => return None,
        },
        FlowControl::ConditionalBranch => End::Conditional,
        FlowControl::UnconditionalBranch if instruction.is_jmp_far() => End::Far,
        FlowControl::UnconditionalBranch => End::Jump,
        FlowControl::IndirectBranch if instruction.is_jmp_far_indirect() => End::Far,
        FlowControl::IndirectBranch => End::IndirectJump,
        FlowControl::Call if instruction.is_call_near() => End::Call,
        FlowControl::IndirectCall if instruction.is_call_near_indirect() => End::IndirectCall,
        FlowControl::Call | FlowControl::IndirectCall => End::Far,
        FlowControl::Return => match instruction.code() {
            Code::Retnw | Code::Retnd | Code::Retnq | Code::Retnw_imm16 | Code::Retnd_imm16 | Code::Retnq_imm16 => {
                End::Return
            }
            _ => End::Far,
        },
        // INTO goes on unless it overflows, which is reported like a fault.
        FlowControl::Interrupt if instruction.code() == Code::Into => return None,
        FlowControl::Interrupt => End::Far,
        // Aborts come from outside, faults too.
        FlowControl::XbeginXabortXend => return None,
        FlowControl::Exception => End::Continue,
    })
}

#[cfg(test)]
#[path = "graph_test.rs"]
mod tests;
