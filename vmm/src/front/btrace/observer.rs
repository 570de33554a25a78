//! What listens to a CPU.

use std::sync::{
    Arc, Mutex,
    atomic::{AtomicU64, Ordering},
};

use iced_x86::{Decoder, DecoderOptions, Instruction};
use x86::watch::{BranchRecord, Change, CodeSize, Effects, EventRecord, Flow, Interest, Processor, Recorded, Watch};

use super::{
    blocks::{Blocks, Read},
    packets::Packets,
    types::{Annex, Unread, lock},
};

/// No block is longer in bytes: what is beyond is not looked at.
const LONGEST: u64 = 64 << 10;

/// One of the two formats.
#[derive(Debug)]
pub(super) enum Trace {
    Blocks(Blocks),
    Packets(Box<Packets>),
}

/// A CPU's history.
#[derive(Debug)]
pub(super) struct History {
    trace: Trace,
    /// The width of the code that ran last.
    code: CodeSize,
    /// How often the machine has been put into another state, and how often when this began.
    restorations: Arc<AtomicU64>,
    epoch: u64,
}

/// The linear address of the next instruction.
fn next_ip(cpu: &dyn Processor) -> u64 {
    let context = cpu.context();
    match context.code {
        CodeSize::Bits64 => cpu.rip(),
        CodeSize::Bits16 | CodeSize::Bits32 => cpu.rip().wrapping_add(context.cs_base) & 0xffff_ffff,
    }
}

/// The last instruction of the code from `begin` on that ends before `from`; `None` if there is none. Code that cannot be read, or
/// has changed, counts as far as it can be followed.
fn last_before(begin: u64, from: u64, code: CodeSize, cpu: &mut dyn Processor) -> Option<u64> {
    let len = from.wrapping_sub(begin);
    if len == 0 {
        return None;
    }
    let mut bytes = vec![0; len.min(LONGEST) as usize];
    let mut read = 0;
    for byte in &mut bytes {
        let physical = cpu.physical(begin.wrapping_add(read));
        let byte = std::slice::from_mut(byte);
        if physical.is_none_or(|physical| cpu.read_phys(physical, byte).is_err()) {
            break;
        }
        read += 1;
    }
    let mut decoder = Decoder::new(code.bits(), &bytes[..read as usize], DecoderOptions::NONE);
    let (mut last, mut instruction) = (0, Instruction::default());
    while decoder.can_decode() {
        let at = decoder.position();
        decoder.decode_out(&mut instruction);
        if instruction.is_invalid() {
            break;
        }
        last = at;
    }
    Some(begin.wrapping_add(last as u64))
}

impl History {
    pub fn new(trace: Trace, restorations: Arc<AtomicU64>) -> Self {
        History {
            trace,
            code: CodeSize::default(),
            epoch: restorations.load(Ordering::Relaxed),
            restorations,
        }
    }

    /// Begins anew where the processor is.
    pub fn begin(&mut self, cpu: &mut dyn Processor) {
        self.code = cpu.context().code;
        match &mut self.trace {
            Trace::Blocks(blocks) => blocks.start(next_ip(cpu)),
            Trace::Packets(packets) => packets.start(cpu),
        }
    }

    /// A machine in another state has another past.
    fn catch_up(&mut self, cpu: &mut dyn Processor) {
        let epoch = self.restorations.load(Ordering::Relaxed);
        if std::mem::replace(&mut self.epoch, epoch) != epoch {
            self.begin(cpu);
        }
    }

    /// What the executor has to say.
    fn interest(&mut self, cpu: &mut dyn Processor) -> Interest {
        self.catch_up(cpu);
        self.code = cpu.context().code;
        match &self.trace {
            Trace::Blocks(_) => Interest {
                branches: Recorded::All,
                ..Interest::NOTHING
            },
            Trace::Packets(packets) => packets.pt.interest(cpu.step()),
        }
    }

    fn branches(&mut self, records: &[BranchRecord], cpu: &mut dyn Processor) {
        match &mut self.trace {
            Trace::Packets(packets) => packets.word(cpu, |pt, cpu| pt.branches(records, cpu)),
            Trace::Blocks(_) => {
                for record in records {
                    if Flow::from_code(record.flow).is_some_and(Flow::taken) {
                        self.transfer(record, cpu);
                    }
                }
            }
        }
        self.code = cpu.context().code;
    }

    /// A branch, or whatever else led elsewhere, for the blocks.
    fn transfer(&mut self, record: &BranchRecord, cpu: &mut dyn Processor) {
        let code = self.code;
        let Trace::Blocks(blocks) = &mut self.trace else { return };
        if record.length > 0 {
            blocks.branch(record.from, record.to);
        } else {
            let last = last_before(blocks.begin(), record.from, code, cpu);
            blocks.interrupted(last, record.to);
        }
    }

    fn event(&mut self, event: &EventRecord, cpu: &mut dyn Processor) {
        if let Trace::Packets(packets) = &mut self.trace {
            packets.word(cpu, |pt, cpu| pt.event(event, cpu));
        } else {
            self.transfer(&event.branch, cpu);
        }
        self.code = cpu.context().code;
    }

    fn state(&mut self, change: Change, cpu: &mut dyn Processor) {
        if let Trace::Packets(packets) = &mut self.trace {
            packets.word(cpu, |pt, cpu| pt.change(change, cpu));
        } else {
            match change {
                Change::TransactionAbort { from, .. } => {
                    let record = BranchRecord {
                        from,
                        to: next_ip(cpu),
                        ..BranchRecord::default()
                    };
                    self.transfer(&record, cpu);
                }
                // Where it goes on is no branch's doing.
                Change::Reset | Change::Init { .. } | Change::StartUp(_) => self.begin(cpu),
                _ => {}
            }
        }
        self.code = cpu.context().code;
    }

    /// What a client reads.
    pub fn read(&mut self, annex: Annex, cpu: &mut dyn Processor) -> Result<Read, Unread> {
        self.catch_up(cpu);
        match &mut self.trace {
            Trace::Blocks(blocks) => {
                let read = blocks.read(annex, next_ip(cpu))?;
                Ok(read.map_or(Read::Nothing, Read::Blocks))
            }
            Trace::Packets(packets) => match annex {
                // A decoder cannot go on in the middle.
                Annex::Delta => Err(Unread::Gap),
                Annex::New if packets.reported(cpu) => Ok(Read::Nothing),
                Annex::All | Annex::New => Ok(Read::Packets(packets.read(cpu))),
            },
        }
    }
}

/// The CPU's watcher.
pub(super) struct Listener(pub Arc<Mutex<History>>);

impl Watch for Listener {
    fn interest(&mut self, cpu: &mut dyn Processor) -> Interest {
        lock(&self.0).interest(cpu)
    }

    fn branches(&mut self, records: &[BranchRecord], cpu: &mut dyn Processor) -> Effects {
        lock(&self.0).branches(records, cpu);
        Effects::NONE
    }

    fn event(&mut self, event: &EventRecord, cpu: &mut dyn Processor) -> Effects {
        lock(&self.0).event(event, cpu);
        Effects::NONE
    }

    fn state(&mut self, change: Change, cpu: &mut dyn Processor) -> Effects {
        lock(&self.0).state(change, cpu);
        Effects::NONE
    }

    fn tick(&mut self, cpu: &mut dyn Processor) -> Effects {
        if let Trace::Packets(packets) = &mut lock(&self.0).trace {
            packets.word(cpu, |pt, cpu| pt.tick(cpu));
        }
        Effects::NONE
    }
}
