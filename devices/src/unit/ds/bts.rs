//! Branch trace store: every taken branch as a record in the guest's memory. SDM Vol. 3B 18.4.5 "Branch Trace Store (BTS)",
//! 18.4.9 "BTS and DS Save Area".
//!
//! # Theory
//! With TR set the processor makes a message of every taken branch, interrupt and exception; with BTS set it stores the
//! messages in a buffer instead of sending them out on the bus. Where the buffer is stands in memory too, in the management
//! area at IA32_DS_AREA: base, index (where the next record goes), absolute maximum (the byte after the buffer) and interrupt
//! threshold. All four are *linear* addresses, used with the rights of the supervisor through whatever page tables are
//! active. That is what makes it unlike every other trace: a store can page-fault, in code that stores nothing.
//!
//! A record is FROM, TO and flags, three doublewords or three quadwords (Figures 18-6 and 18-9 "Branch Trace Record Format").
//! A part that shows DTES64 uses quadwords in every mode. Bit 4 of the flags says that the branch was predicted; the Core and
//! Atom microarchitectures leave it 0.
//!
//! BTS_OFF_OS and BTS_OFF_USR keep rings out: a record "is skipped if CPL is 0", or is above 0 (18.4.1 "IA32_DEBUGCTL MSR",
//! Table 18-6 "CPL-Qualified Branch Trace Store Encodings"). That is the CPL at which the branch is executed or the event
//! comes, unlike with last-branch records, whose filter is said to look at where a branch *ends*. So with BTS_OFF_OS a system
//! call and a page fault of ring 3 are stored, with the kernel's entry as TO, which is what Linux has seen parts do (its driver
//! keeps the buffer from users for that), and SYSRET and IRET are not. TR with both, or without BTS, makes messages that nobody
//! stores.
//!
//! The record that takes the index to the threshold or beyond asks for a performance-monitoring interrupt, and so does every
//! record after it until the index is below: a request that a masked LVTPC swallowed is made again. The processor does not stop
//! at the end of the buffer by itself (unlike PEBS): it goes on at the base. BTINT has no say in either: software that wants a
//! ring without interrupts has to put the threshold above the absolute maximum, "It's not enough to clear the BTINT flag itself
//! only" (18.4.9.3 "Setting Up the BTS Buffer", notes). Linux's perf does both.
//!
//! # The rules here
//! *When the management area is read.* The manual tells software to switch BTS off before it touches the area (18.4.9.5
//! "Writing the DS Interrupt Service Routine") and does not say what of it a processor keeps. Here nothing is kept: the four
//! fields are read when a batch of branches is stored, and the index is written back with it. A batch ends before any access
//! to a register of these units, any interrupt and any exception, so software that follows the manual always sees a whole
//! buffer and an exact index; software that changes the fields under a running trace sees the change take effect at the next
//! batch, which is at most [`BATCH`] records away.
//!
//! *What is exact.* A batch ends at the branch whose record meets the threshold or the end of the buffer, or comes to a page
//! that would fault ([`Bts::room`]). So the interrupt and the #PF come at that branch.
//!
//! *What does harm to whom.* A record that does not fit between base and maximum goes to the base; if even the base has no room,
//! or an address is not canonical, it is dropped. A page that is missing or read-only makes the branch's end a #PF, with the
//! index as it was and that record lost: the manual makes the operating system keep these pages present, accessed and dirty.
//! A record of the delivery of an interrupt or exception is dropped instead, since a #PF there would be another delivery with
//! a record. Records need no alignment.
//!
//! *Debug exceptions* are stored like any other; a #DB does not clear TR.

use serde::{Deserialize, Serialize};
use x86::debugctl::DebugCtl;
use x86::ds::{BRANCH_PREDICTED, DsLayout, management};
use x86::watch::{BranchRecord, Effects, EventRecord, Flow, Interest, PageFault, Recorded, TraceMem};

use crate::unit::lbr::is_canonical;
use crate::unit::predictor::{Predictor, Stream};

/// The most records that wait to be stored.
pub const BATCH: u64 = 2048;

/// Bytes that are written at once.
const CHUNK: usize = 1536;

/// Branch trace store of one logical processor.
#[derive(Clone, Debug)]
pub struct Bts {
    layout: DsLayout,
    linear_bits: u32,
    /// Flags have bit 4.
    predicted: bool,
    running: bool,
    predictor: Predictor,
}

/// The whole state of [`Bts`]; all else is in IA32_DS_AREA, IA32_DEBUGCTL and the guest's memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct BtsState {
    /// Storing was on at the last word.
    pub running: bool,
    /// What has a say in bit 4 of the flags.
    pub predictor: Predictor,
}

/// The four fields of the management area.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Buffer {
    base: u64,
    index: u64,
    maximum: u64,
    threshold: u64,
}

impl Bts {
    /// For records of this layout; `predicted`: the part fills in bit 4 of the flags. `linear_bits` is the width of linear
    /// addresses.
    pub fn new(layout: DsLayout, predicted: bool, linear_bits: u32) -> Self {
        Self {
            layout,
            linear_bits,
            predicted,
            running: false,
            predictor: Predictor::default(),
        }
    }

    /// What the executor has to say: every branch, in batches that end where something happens. To be asked after every callback
    /// and every write of a register.
    pub fn interest(&mut self, control: DebugCtl, area: u64, mem: &mut dyn TraceMem) -> Interest {
        let stores = stores(control);
        if stores && !self.running {
            self.predictor.reset();
        }
        self.running = stores;
        if !stores {
            return Interest::NOTHING;
        }
        Interest {
            branches: Recorded::Taken,
            branch_room: self.room(area, mem),
            ..Interest::NOTHING
        }
    }

    /// How many branches can be stored until something happens that must be exact: at least 1.
    pub fn room(&self, area: u64, mem: &mut dyn TraceMem) -> u32 {
        let size = self.layout.branch_record();
        let Ok(buffer) = self.read(area, mem) else { return 1 };
        let Some(at) = self.slot(&buffer) else {
            return BATCH as u32;
        };
        let mut records = BATCH.min((buffer.maximum - at) / size);
        // The record that reaches the threshold is the last of its batch.
        records = records.min(buffer.threshold.saturating_sub(at).div_ceil(size));
        if let Err(fault) = mem.probe_linear(at, records * size) {
            records = fault.address.saturating_sub(at).min(records * size) / size;
        }
        records.max(1) as u32
    }

    /// `Watch` callback: branches have retired.
    pub fn branches(
        &mut self,
        records: &[BranchRecord],
        control: DebugCtl,
        area: u64,
        mem: &mut dyn TraceMem,
    ) -> Effects {
        if !stores(control) {
            return Effects::NONE;
        }
        let effects = self.store(records, control, area, mem);
        self.predictor.advance(records);
        effects
    }

    /// `Watch` callback: an interrupt or exception was delivered. Its record never makes a #PF.
    pub fn event(&mut self, event: &EventRecord, control: DebugCtl, area: u64, mem: &mut dyn TraceMem) -> Effects {
        Effects {
            fault: None,
            ..self.branches(&[event.branch], control, area, mem)
        }
    }

    /// Power-up.
    pub fn reset(&mut self) {
        self.set_state(BtsState::default());
    }

    /// The whole state.
    pub fn state(&self) -> BtsState {
        BtsState {
            running: self.running,
            predictor: self.predictor,
        }
    }

    /// Takes a whole state back.
    pub fn set_state(&mut self, state: BtsState) {
        self.running = state.running;
        self.predictor = state.predictor;
    }

    fn store(&self, records: &[BranchRecord], control: DebugCtl, area: u64, mem: &mut dyn TraceMem) -> Effects {
        let mut wanted = (0..records.len()).filter(|&i| passes(&records[i], control)).peekable();
        if wanted.peek().is_none() {
            return Effects::NONE;
        }
        let mut buffer = match self.read(area, mem) {
            Ok(buffer) => buffer,
            Err(fault) => return fault_of(fault),
        };
        let before = buffer.index;
        let size = self.layout.branch_record();
        let mut effects = Effects::NONE;
        let mut bytes = [0; CHUNK];
        let mut predictions = Stream::new(&self.predictor, records);
        while let Some(at) = self.slot(&buffer).filter(|_| wanted.peek().is_some()) {
            let fit = ((buffer.maximum - at) / size).min(CHUNK as u64 / size) as usize;
            let mut len = 0;
            for index in wanted.by_ref().take(fit) {
                let predicted = self.predicted && predictions.predicts(index);
                len += self.put(&mut bytes[len..], &records[index], predicted);
            }
            let stored = self.write(at, &bytes[..len], mem);
            buffer.index = at + stored.as_ref().map_or_else(|(done, _)| *done, |()| len as u64);
            if buffer.index > at && buffer.index >= buffer.threshold {
                effects.pmi = true;
            }
            if let Err((_, fault)) = stored {
                effects = effects.and(fault_of(fault));
                break;
            }
        }
        if buffer.index != before {
            let field = self.layout.field();
            let bytes = buffer.index.to_le_bytes();
            let at = area.wrapping_add(management::BTS_INDEX * field);
            if let Err(fault) = mem.write_linear(at, &bytes[..field as usize]) {
                effects = effects.and(fault_of(fault));
            }
        }
        effects
    }

    /// Writes whole records; on a fault, as many as can be, and says how many bytes that were.
    fn write(&self, at: u64, bytes: &[u8], mem: &mut dyn TraceMem) -> Result<(), (u64, PageFault)> {
        if mem.write_linear(at, bytes).is_ok() {
            return Ok(());
        }
        let mut done = 0;
        for record in bytes.chunks(self.layout.branch_record() as usize) {
            mem.write_linear(at + done, record).map_err(|fault| (done, fault))?;
            done += record.len() as u64;
        }
        Ok(())
    }

    /// Makes a record at the start of `bytes` and says how long it is.
    #[inline(always)]
    fn put(&self, bytes: &mut [u8], record: &BranchRecord, predicted: bool) -> usize {
        let flags = if predicted { BRANCH_PREDICTED } else { 0 };
        let field = self.layout.field() as usize;
        if let (8, Some(slots)) = (field, bytes.first_chunk_mut::<24>()) {
            let (from, to) = (record.from.to_le_bytes(), record.to.to_le_bytes());
            slots[..8].copy_from_slice(&from);
            slots[8..16].copy_from_slice(&to);
            slots[16..].copy_from_slice(&flags.to_le_bytes());
            return 24;
        }
        for (slot, value) in bytes.chunks_mut(field).zip([record.from, record.to, flags]) {
            slot.copy_from_slice(&value.to_le_bytes()[..slot.len().min(field)]);
        }
        3 * field
    }

    /// Where the next record goes; `None` if there is no place for it.
    fn slot(&self, buffer: &Buffer) -> Option<u64> {
        let size = self.layout.branch_record();
        let fits = |at: u64| at >= buffer.base && at.checked_add(size).is_some_and(|end| end <= buffer.maximum);
        let at = if fits(buffer.index) { buffer.index } else { buffer.base };
        // The buffer's end may be the end of the address space, its last byte may not be beyond.
        let last = buffer.maximum.wrapping_sub(1);
        let canonical = is_canonical(at, self.linear_bits) && is_canonical(last, self.linear_bits);
        (fits(at) && canonical && same_half(at, last, self.linear_bits)).then_some(at)
    }

    fn read(&self, area: u64, mem: &mut dyn TraceMem) -> Result<Buffer, PageFault> {
        let field = self.layout.field() as usize;
        let mut bytes = [0; 32];
        let bytes = &mut bytes[..4 * field];
        mem.read_linear(area, bytes)?;
        let get = |n: u64| {
            let at = n as usize * field;
            let mut value = [0; 8];
            value[..field].copy_from_slice(&bytes[at..at + field]);
            u64::from_le_bytes(value)
        };
        Ok(Buffer {
            base: get(management::BTS_BASE),
            index: get(management::BTS_INDEX),
            maximum: get(management::BTS_MAXIMUM),
            threshold: get(management::BTS_THRESHOLD),
        })
    }
}

/// Whether anything is stored at all.
fn stores(control: DebugCtl) -> bool {
    control.tr() && control.bts() && !(control.bts_off_os() && control.bts_off_usr())
}

/// Whether this branch is.
fn passes(record: &BranchRecord, control: DebugCtl) -> bool {
    let off = if record.from_cpl == 0 {
        control.bts_off_os()
    } else {
        control.bts_off_usr()
    };
    !off && Flow::from_code(record.flow).is_some_and(Flow::taken)
}

/// Whether two canonical addresses are on the same side of the hole.
const fn same_half(a: u64, b: u64, bits: u32) -> bool {
    bits >= 64 || bits <= 32 || a >> (bits - 1) == b >> (bits - 1)
}

fn fault_of(fault: PageFault) -> Effects {
    Effects {
        fault: Some(fault),
        ..Effects::NONE
    }
}

#[cfg(test)]
#[path = "bts_test.rs"]
mod tests;
