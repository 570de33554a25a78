//! The ring that last-branch records are kept in, whatever registers show it.
//!
//! # Practice
//! Branches come in batches of thousands, and only the last `depth` that pass the filter survive. So a batch is counted
//! forward (the pointer to the newest moves by every record that passes, seen or not) and kept backward. Call-stack mode
//! alone has to look at every branch in order, since a return takes off what a call before it put on.
//!
//! Of a batch that fills the whole ring nothing is left but its end. [`LazyRing`] keeps that end as it came, with the interrupts
//! and short batches that follow it, and makes entries of them only when somebody looks, which is far less often than another
//! batch comes that fills the ring.

use serde::{Deserialize, Serialize};
use std::borrow::Cow;

use x86::lbr::{LbrInfo, MAX_DEPTH, branch_type};
use x86::watch::{BranchRecord, CodeSize, Context, Far, Flow, Recorded};

use super::predictor::{Predictor, WINDOW};

/// One entry, as its registers read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Entry {
    /// FROM.
    pub from: u64,
    /// TO.
    pub to: u64,
    /// INFO, where there is one.
    pub info: u64,
}

/// Which branches are recorded, and how.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Filter {
    /// Kinds that pass: bit n for [`Flow::code`] n.
    pub kinds: u32,
    /// Branches that end in ring 0 pass.
    pub kernel: bool,
    /// Branches that end in rings above 0 pass.
    pub user: bool,
    /// Returns take the newest entry off, and calls to the next instruction leave no entry.
    pub call_stack: bool,
    /// A branch that passes from a ring that is filtered out does not say where it came from.
    pub hide_source: bool,
}

/// Bits of [`Filter::kinds`].
pub mod kinds {
    use x86::watch::Flow;

    const fn bit(flow: Flow) -> u32 {
        1 << flow.code()
    }

    /// Conditional branches that jump.
    pub const COND: u32 = bit(Flow::Cond { taken: true });
    /// Direct near jumps.
    pub const JUMP: u32 = bit(Flow::Jump);
    /// Indirect near jumps.
    pub const JUMP_IND: u32 = bit(Flow::JumpInd);
    /// Direct near calls.
    pub const CALL: u32 = bit(Flow::Call);
    /// Indirect near calls.
    pub const CALL_IND: u32 = bit(Flow::CallInd);
    /// Near returns.
    pub const RET: u32 = bit(Flow::Ret);
    /// Far transfers, interrupts and exceptions.
    pub const FAR: u32 = !0 << Flow::ALL[7].code() & (1 << Flow::ALL.len()) - 1;
    /// Everything that goes anywhere.
    pub const ALL: u32 = COND | JUMP | JUMP_IND | CALL | CALL_IND | RET | FAR;
}

impl Filter {
    /// Everything passes.
    pub const OPEN: Self = Self {
        kinds: kinds::ALL,
        kernel: true,
        user: true,
        call_stack: false,
        hide_source: false,
    };

    /// The kinds that pass, by whether the branch ends in a ring above 0.
    fn masks(&self) -> [u32; 2] {
        [self.kernel, self.user].map(|ring| if ring { self.kinds } else { 0 })
    }

    fn source_hidden(&self, record: &BranchRecord) -> bool {
        let ring = if record.from_cpl == 0 { self.kernel } else { self.user };
        self.hide_source && !ring
    }
}

/// How many of some branches pass.
fn passing(records: &[BranchRecord], masks: [u32; 2]) -> usize {
    records.iter().map(|r| passes(r, masks)).sum::<u32>() as usize
}

/// Whether a branch passes, as 0 or 1: no branch of the host's own, which it would often mispredict.
#[inline(always)]
fn passes(record: &BranchRecord, masks: [u32; 2]) -> u32 {
    masks[usize::from(record.to_cpl != 0)] >> (record.flow & 31) & 1
}

/// The last branch of some that goes anywhere.
fn last_taken(records: &[BranchRecord]) -> Option<usize> {
    records.iter().rposition(|r| kinds::ALL >> (r.flow & 31) & 1 != 0)
}

/// The code that a branch leaves, and that which it reaches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Scene {
    source: Context,
    target: Context,
}

impl Scene {
    /// Of a batch between two words: only a far transfer changes the code segment, and it comes alone.
    fn of(records: &[BranchRecord], before: Context, after: Context) -> Self {
        Scene {
            source: if records.len() == 1 { before } else { after },
            target: after,
        }
    }
}

/// Where MISPRED, cycles and the rest of an entry stand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Beside {
    /// Nowhere.
    Nothing,
    /// MISPRED in FROM.
    Flags,
    /// MISPRED, IN_TSX and TSX_ABORT in FROM.
    FlagsTsx,
    /// MISPRED in FROM, cycles in the upper 16 bits of TO.
    FlagsAndCycles,
    /// Flags and cycles in INFO.
    Info,
    /// In INFO, as far as CPUID.1CH says, with the kind of branch.
    ArchitecturalInfo {
        /// MISPRED is there.
        mispredict: bool,
        /// CYC_CNT is there.
        timed: bool,
        /// BR_TYPE is there.
        branch_type: bool,
    },
}

/// How a branch becomes an entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Style {
    /// Addresses are linear; else offsets in the code segment.
    pub linear: bool,
    /// What stands beside them.
    pub beside: Beside,
}

/// The ring.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BranchRing {
    /// The entries; those from `depth` on are zero.
    pub entries: [Entry; MAX_DEPTH],
    /// Entries in use.
    pub depth: u8,
    /// The newest.
    pub top: u8,
    /// The last exception record: the branch before the last interrupt or exception.
    pub last_exception: Entry,
    /// The last branch, filtered or not, if there was one since recording began.
    pub last_branch: Option<Entry>,
    /// When the last record was made, if one was since recording began.
    pub clock: Option<u64>,
    /// The code that ran up to the last branch or change that the unit heard of. It is not stored: whoever takes on a state asks for
    /// the unit's interest, which brings it.
    #[serde(skip)]
    pub code: Context,
    /// In a transaction.
    pub transaction: bool,
    /// What has a say in MISPRED.
    pub predictor: Predictor,
}

impl BranchRing {
    /// An empty ring of so many entries, at most [`MAX_DEPTH`].
    pub fn new(depth: u8) -> Self {
        Self {
            entries: [Entry::default(); MAX_DEPTH],
            depth: depth.clamp(1, MAX_DEPTH as u8),
            top: 0,
            last_exception: Entry::default(),
            last_branch: None,
            clock: None,
            code: Context::default(),
            transaction: false,
            predictor: Predictor::default(),
        }
    }

    /// The entry that is `age` entries older than the newest.
    pub fn by_age(&self, age: u8) -> &Entry {
        &self.entries[self.slot(age)]
    }

    /// The same, to write.
    pub fn by_age_mut(&mut self, age: u8) -> &mut Entry {
        &mut self.entries[self.slot(age)]
    }

    fn slot(&self, age: u8) -> usize {
        let (top, depth, age) = (usize::from(self.top), usize::from(self.depth), usize::from(age));
        if top >= age {
            top - age
        } else {
            (top + depth).saturating_sub(age)
        }
    }

    /// Recording begins: what came before it has no part in cycles and predictions.
    pub fn start(&mut self) {
        self.clock = None;
        self.last_branch = None;
        self.predictor.reset();
    }

    /// Sets every entry to zero.
    pub fn clear(&mut self) {
        self.entries = [Entry::default(); MAX_DEPTH];
        self.top = 0;
        self.last_exception = Entry::default();
    }

    /// Where the processor stands, reported after every callback.
    pub fn now(&mut self, code: Context) {
        self.code = code;
    }

    /// Records what of a batch passes. All branches of a batch but a single far one stay in the code segment; for that one
    /// `code` is the target's.
    pub fn record(&mut self, records: &[BranchRecord], filter: &Filter, style: &Style, code: Context) {
        if filter.call_stack {
            self.record_call_stack(records, filter, style, code);
        } else {
            self.record_last(records, filter, style, code);
        }
        if let Some(index) = last_taken(records) {
            let scene = Scene::of(records, self.code, code);
            self.last_branch = Some(self.entry(records, index, None, false, style, scene));
        }
        self.predictor.advance(records);
        self.code = code;
    }

    /// Records the abort of a transaction: filtered as a far branch is, and marked. SDM Vol. 3B 18.4.8.1 "LBR Stack and Intel
    /// 64 Processors".
    pub fn record_abort(&mut self, record: &BranchRecord, filter: &Filter, style: &Style, code: Context) {
        let kept = passes(record, filter.masks()) != 0;
        self.record(core::slice::from_ref(record), filter, style, code);
        if !kept {
            return;
        }
        let entry = self.by_age_mut(0);
        match style.beside {
            Beside::Nothing | Beside::Flags | Beside::FlagsAndCycles => {}
            Beside::FlagsTsx => entry.from |= 1 << 61,
            Beside::Info | Beside::ArchitecturalInfo { .. } => {
                entry.info = LbrInfo::from_bits(entry.info).with_tsx_abort(true).into_bits();
            }
        }
    }

    /// An interrupt or exception comes: the last branch before it becomes the last exception record.
    pub fn note_exception(&mut self) {
        if let Some(last) = self.last_branch {
            self.last_exception = last;
        }
    }

    fn record_last(&mut self, records: &[BranchRecord], filter: &Filter, style: &Style, code: Context) {
        let masks = filter.masks();
        let passed = passing(records, masks);
        if passed == 0 {
            return;
        }
        let depth = usize::from(self.depth);
        self.top = ((usize::from(self.top) + passed % depth) % depth) as u8;
        let scene = Scene::of(records, self.code, code);
        let mut kept = [0; MAX_DEPTH];
        let mut count = 0;
        // The record before the oldest one that is kept says when its cycles began.
        let mut before = self.clock;
        for (index, record) in records.iter().enumerate().rev() {
            if passes(record, masks) == 0 {
                continue;
            }
            if count == depth {
                before = Some(record.step);
                break;
            }
            kept[count] = index;
            count += 1;
        }
        for age in (0..count).rev() {
            let index = kept[age];
            let hidden = filter.source_hidden(&records[index]);
            let entry = self.entry(records, index, before, hidden, style, scene);
            *self.by_age_mut(age as u8) = entry;
            before = Some(records[index].step);
        }
        self.clock = before;
    }

    fn record_call_stack(&mut self, records: &[BranchRecord], filter: &Filter, style: &Style, code: Context) {
        const CALL: u8 = Flow::Call.code();
        const RET: u8 = Flow::Ret.code();
        let (masks, scene) = (filter.masks(), Scene::of(records, self.code, code));
        for (index, record) in records.iter().enumerate() {
            if passes(record, masks) == 0 {
                continue;
            }
            match record.flow {
                RET => {
                    *self.by_age_mut(0) = Entry::default();
                    self.top = (self.top + self.depth - 1) % self.depth;
                }
                // CALL to the next instruction is how code finds out where it is: no RET will match it.
                CALL if record.to == record.from.wrapping_add(record.length.into()) => {}
                _ => {
                    let hidden = filter.source_hidden(record);
                    let entry = self.entry(records, index, self.clock, hidden, style, scene);
                    self.top = (self.top + 1) % self.depth;
                    *self.by_age_mut(0) = entry;
                    self.clock = Some(record.step);
                }
            }
        }
    }

    fn entry(
        &self,
        records: &[BranchRecord],
        index: usize,
        before: Option<u64>,
        hidden: bool,
        style: &Style,
        scene: Scene,
    ) -> Entry {
        let record = &records[index];
        let mispredicted = !self.predictor.predicts(records, index);
        let cycles = before.map(|step| record.step.saturating_sub(step).min(0xFFFF));
        let from = if hidden {
            !0
        } else {
            address(record.from, scene.source, style)
        };
        let mut entry = Entry {
            from,
            to: address(record.to, scene.target, style),
            info: 0,
        };
        let flag = |set: bool, bit: u32| u64::from(set) << bit;
        match style.beside {
            Beside::Nothing => {}
            Beside::Flags => entry.from = entry.from & !(1 << 63) | flag(mispredicted, 63),
            Beside::FlagsTsx => {
                entry.from = entry.from & !(0b111 << 61) | flag(mispredicted, 63) | flag(self.transaction, 62);
            }
            Beside::FlagsAndCycles => {
                entry.from = entry.from & !(1 << 63) | flag(mispredicted, 63);
                entry.to = entry.to & 0xFFFF_FFFF_FFFF | cycles.unwrap_or(0) << 48;
            }
            Beside::Info => {
                entry.info = LbrInfo::new()
                    .with_cycles(cycles.unwrap_or(0) as u16)
                    .with_in_tsx(self.transaction)
                    .with_mispred(mispredicted)
                    .into_bits();
            }
            Beside::ArchitecturalInfo {
                mispredict,
                timed,
                branch_type,
            } => {
                entry.info = LbrInfo::new()
                    .with_cycles(if timed { cycles.unwrap_or(0) as u16 } else { 0 })
                    .with_cycles_valid(timed && cycles.is_some())
                    .with_branch_type(if branch_type { kind(record.flow) } else { 0 })
                    .with_in_tsx(self.transaction)
                    .with_mispred(mispredict && mispredicted)
                    .into_bits();
            }
        }
        entry
    }
}

/// The abort of a transaction as a record: it is no branch, but goes like an exception.
pub fn abort_record(from: u64, step: u64, rip: u64, code: Context) -> BranchRecord {
    BranchRecord {
        from,
        to: code.cs_base.wrapping_add(rip),
        step,
        flow: Flow::Far(Far::Exception).code(),
        length: 0,
        from_cpl: code.cpl,
        to_cpl: code.cpl,
        loads_cr3: false,
        run: [0; 3],
    }
}

/// Records of the end of a batch and of what came after it, of which no entries have been made yet.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Waiting {
    /// From [`WINDOW`] taken branches before the one that passes before the oldest that is kept, whose step begins its cycles.
    records: Vec<BranchRecord>,
    /// Where in them each batch ends, and where its branches were.
    batches: Vec<(usize, Scene)>,
    filter: Filter,
    style: Style,
    /// Where the processor stands now.
    code: Context,
    /// The newest entry's place.
    top: u8,
}

/// Records that wait at most: about what the executor hands over at once.
const MOST_WAITING: usize = 2048;

/// A [`BranchRing`] that works when it is looked at.
#[derive(Clone, Debug)]
pub struct LazyRing {
    ring: BranchRing,
    waiting: Option<Waiting>,
    /// The room of the last one.
    spare: (Vec<BranchRecord>, Vec<(usize, Scene)>),
    /// All branches of the next batch go somewhere.
    all_taken: bool,
}

impl From<BranchRing> for LazyRing {
    fn from(ring: BranchRing) -> Self {
        LazyRing {
            ring,
            waiting: None,
            spare: Default::default(),
            all_taken: false,
        }
    }
}

impl LazyRing {
    /// Which branches are in the next batch: none has to be counted where all of them pass.
    pub fn comes(&mut self, recorded: Recorded) {
        self.all_taken = recorded == Recorded::Taken;
    }

    /// Records what of a batch passes, as [`BranchRing::record`].
    pub fn record(&mut self, records: &[BranchRecord], filter: &Filter, style: &Style, code: Context) {
        if let Some((start, passed)) = self.end_of(records, filter) {
            let (top, spare) = match self.waiting.take() {
                Some(before) => (before.top, (before.records, before.batches)),
                None => (self.ring.top, std::mem::take(&mut self.spare)),
            };
            let mut waiting = Waiting {
                records: spare.0,
                batches: spare.1,
                filter: *filter,
                style: *style,
                code,
                top,
            };
            waiting.records.clear();
            waiting.batches.clear();
            waiting.add(&records[start..], passed, self.ring.depth, code);
            self.waiting = Some(waiting);
            return;
        }
        match &mut self.waiting {
            Some(waiting) if waiting.takes(records, filter, style) => {
                let passed = passing(records, filter.masks());
                waiting.add(records, passed, self.ring.depth, code);
            }
            _ => self.get().record(records, filter, style, code),
        }
    }

    /// Where the part of a batch begins that decides everything, and how many records of the batch pass: if there is more in
    /// the batch than the ring holds.
    fn end_of(&self, records: &[BranchRecord], filter: &Filter) -> Option<(usize, usize)> {
        let depth = usize::from(self.ring.depth);
        if filter.call_stack || records.len() < 2 * (depth + WINDOW) {
            return None;
        }
        let masks = filter.masks();
        let back = |end: usize, masks, count| {
            let (mut start, mut left) = (end, count);
            while left > 0 {
                start = usize::checked_sub(start, 1)?;
                left -= passes(&records[start], masks) as usize;
            }
            Some(start)
        };
        let start = back(records.len(), masks, depth + 1)?;
        // Before it are those that decide about its prediction, and about its like.
        let first = back(start, [kinds::ALL; 2], WINDOW)?;
        let rest = &records[..start];
        let open = masks == [kinds::ALL; 2];
        let passed = if open && self.all_taken {
            start
        } else if open {
            rest.iter().map(|r| usize::from(r.flow != 0)).sum::<usize>()
        } else {
            passing(rest, masks)
        };
        Some((first, passed + depth + 1))
    }

    /// An interrupt or exception comes, as [`BranchRing::note_exception`].
    pub fn note_exception(&mut self) {
        match &self.waiting {
            Some(waiting) => {
                if let Some(last) = waiting.last_branch(&self.ring) {
                    self.ring.last_exception = last;
                }
            }
            None => self.ring.note_exception(),
        }
    }

    /// The ring, with all entries made.
    pub fn get(&mut self) -> &mut BranchRing {
        if let Some(waiting) = self.waiting.take() {
            waiting.apply(&mut self.ring);
            self.spare = (waiting.records, waiting.batches);
        }
        &mut self.ring
    }

    /// The same, to look at.
    pub fn with_records(&self) -> Cow<'_, BranchRing> {
        let Some(waiting) = &self.waiting else {
            return Cow::Borrowed(&self.ring);
        };
        let mut ring = self.ring.clone();
        waiting.apply(&mut ring);
        Cow::Owned(ring)
    }

    /// Entries in use.
    pub fn depth(&self) -> u8 {
        self.ring.depth
    }

    /// Where the processor stands, reported after every callback.
    pub fn now(&mut self, code: Context) {
        match &mut self.waiting {
            Some(waiting) => waiting.code = code,
            None => self.ring.now(code),
        }
    }
}

impl Waiting {
    /// Whether more records can wait with those that do.
    fn takes(&self, records: &[BranchRecord], filter: &Filter, style: &Style) -> bool {
        (&self.filter, &self.style) == (filter, style) && self.records.len() + records.len() <= MOST_WAITING
    }

    /// Adds a batch, or the end of one, of which so many records pass.
    fn add(&mut self, records: &[BranchRecord], passed: usize, depth: u8, code: Context) {
        let scene = Scene::of(records, self.code, code);
        self.records.extend_from_slice(records);
        self.batches.push((self.records.len(), scene));
        let depth = usize::from(depth);
        self.top = ((usize::from(self.top) + passed % depth) % depth) as u8;
        self.code = code;
    }

    /// The last branch, as [`BranchRing::last_branch`]. Enough others come before it that the ring has no say in its prediction.
    fn last_branch(&self, ring: &BranchRing) -> Option<Entry> {
        let index = last_taken(&self.records)?;
        let (_, scene) = self.batches[self.batches.partition_point(|&(end, _)| end <= index)];
        Some(ring.entry(&self.records, index, None, false, &self.style, scene))
    }

    fn apply(&self, ring: &mut BranchRing) {
        let passed = passing(&self.records, self.filter.masks());
        let depth = usize::from(ring.depth);
        ring.top = ((usize::from(self.top) + depth - passed % depth) % depth) as u8;
        let mut start = 0;
        for &(end, scene) in &self.batches {
            ring.code = scene.source;
            ring.record(&self.records[start..end], &self.filter, &self.style, scene.target);
            start = end;
        }
        ring.code = self.code;
    }
}

/// An address as an entry has it: outside of 64-bit mode the upper half is 0. SDM Vol. 3B 18.4.8.1 "LBR Stack and Intel 64
/// Processors".
fn address(linear: u64, code: Context, style: &Style) -> u64 {
    let address = if style.linear {
        linear
    } else {
        linear.wrapping_sub(code.cs_base)
    };
    match code.code {
        CodeSize::Bits64 => address,
        _ => address & 0xFFFF_FFFF,
    }
}

/// BR_TYPE.
fn kind(flow: u8) -> u8 {
    match Flow::from_code(flow) {
        Some(Flow::Cond { .. }) => branch_type::COND,
        Some(Flow::Jump) => branch_type::NEAR_REL_JMP,
        Some(Flow::JumpInd) => branch_type::NEAR_IND_JMP,
        Some(Flow::Call) => branch_type::NEAR_REL_CALL,
        Some(Flow::CallInd) => branch_type::NEAR_IND_CALL,
        Some(Flow::Ret) => branch_type::NEAR_RET,
        Some(Flow::Far(_)) | None => branch_type::OTHER_BRANCH,
    }
}

#[cfg(test)]
#[path = "branch_ring_test.rs"]
mod tests;
