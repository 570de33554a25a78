//! Debug and trace units beside the guest's own, programmed by the host.
//!
//! They hear what the guest's units hear and are read and written by MSRs like them. What they write does not reach the guest:
//! at [`ROOM`] they find memory of the host's, for their debug-store area, buffers and tables, by linear and by physical
//! address alike, and nowhere else any.

use std::collections::BTreeMap;

use devices::unit::{Units, UnitsState};
use x86::debugctl::{DebugCtl, DebugCtlA, DebugCtlLayout};
use x86::ds::DsLayout;
use x86::fault::PageFaultCode;
use x86::model::CpuModel;
use x86::msr::*;
use x86::watch::{
    Access, BadPhys, BranchRecord, Change, Context, Effects, EventRecord, Interest, PageFault, Processor, Range,
    Recorded, TraceMem, Watch,
};

/// Where the host's memory is.
pub const ROOM: u64 = 0xF000_0000;
/// Bytes of it.
const ROOM_LEN: usize = 4 << 20;
const PAGE: usize = 4096;
/// The debug-store area, and its buffer of branches.
const AREA: u64 = ROOM;
const BRANCHES: u64 = ROOM + 0x1000;
/// Bytes of that buffer: no batch of records is longer.
const BRANCHES_LEN: u64 = 0x4_0000;
/// A table of output regions, and where they are, one behind the other.
const TOPA: u64 = ROOM + 0x8_0000;
const TRACE: u64 = ROOM + 0x20_0000;
/// Their sizes, as the table has them: 4 KiB << n.
const REGIONS: [u64; 4] = [8, 7, 6, 6];
/// On parts whose tables have one.
const ONE_REGION: [u64; 1] = [9];

/// What is switched on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unit {
    /// Last-branch records, whichever the model has, of all branches in all rings.
    Lbr,
    /// Branch trace store in all rings, in a ring buffer.
    Bts,
    /// The fixed counters of instructions and cycles, in all rings.
    Counters,
    /// And branches, in a general counter.
    BranchCounter,
    /// Processor trace of branches and time, in a ring of as many regions as the part can have.
    Pt,
}

/// The units.
pub struct Observer {
    /// The units themselves.
    pub units: Units,
    room: Vec<u8>,
    first: Vec<(u32, u64)>,
    store: DsLayout,
    regions: &'static [u64],
    /// Where in the regions the packets begin that were not taken.
    taken: u64,
}

/// The state of an observer.
#[derive(Clone, Debug, PartialEq)]
pub struct ObserverState {
    /// The units'.
    pub units: UnitsState,
    /// The pages of the host's memory that are not all zero, by number.
    pub pages: BTreeMap<usize, Vec<u8>>,
}

impl Observer {
    /// The units of a model, the debug store as the part has it, that begin with the guest's next instruction.
    pub fn new(model: &'static CpuModel, on: &[Unit]) -> Self {
        let mut observer = Observer {
            units: Units::new(model),
            room: vec![0; ROOM_LEN],
            first: Vec::new(),
            store: DsLayout::of(model.features()),
            regions: match model.units.pt {
                Some(pt) if pt.topa_multiple() => &REGIONS,
                _ => &ONE_REGION,
            },
            taken: 0,
        };
        let (record, field) = (observer.store.branch_record(), observer.store.field());
        let end = BRANCHES + BRANCHES_LEN / record * record;
        // The threshold is never reached.
        for (n, value) in (0..).zip([BRANCHES, BRANCHES, end, end + record]) {
            observer.set(AREA + n * field, value);
        }
        let (mut entry, mut at) = (TOPA, TRACE);
        for size in observer.regions {
            observer.set(entry, at | size << 6);
            (entry, at) = (entry + 8, at + (4096 << size));
        }
        observer.set(entry, TOPA | 1);
        for (msr, value) in on.iter().flat_map(|unit| registers(model, *unit)) {
            // A register may hold switches of two.
            match observer.first.iter_mut().find(|(number, _)| *number == msr) {
                Some((_, other)) => *other |= value,
                None => observer.first.push((msr, value)),
            }
        }
        observer
    }

    /// The whole state. The units have to have begun.
    pub fn save(&self) -> ObserverState {
        let pages = (0..).zip(self.room.chunks(PAGE));
        let pages = pages.filter(|(_, page)| **page != [0; PAGE]);
        ObserverState {
            units: self.units.state(),
            pages: pages.map(|(number, page)| (number, page.to_vec())).collect(),
        }
    }

    /// Takes on a state that an observer of the same model gave.
    pub fn restore(&mut self, state: &ObserverState) {
        self.first.clear();
        self.units.set_state(&state.units);
        self.room.fill(0);
        for (number, page) in &state.pages {
            self.room[number * PAGE..][..PAGE].copy_from_slice(page);
        }
    }

    fn set(&mut self, at: u64, value: u64) {
        let at = (at - ROOM) as usize;
        self.room[at..at + 8].copy_from_slice(&value.to_le_bytes());
    }

    /// A field of the debug-store area or of a record.
    fn get(&self, at: u64) -> u64 {
        let (at, len) = ((at - ROOM) as usize, self.store.field() as usize);
        let mut bytes = [0; 8];
        bytes[..len].copy_from_slice(&self.room[at..at + len]);
        u64::from_le_bytes(bytes)
    }

    /// Has the trace unit trace these addresses alone, both inclusive, in straight-line code too. To be said before it begins.
    pub fn filter(&mut self, first: u64, last: u64) {
        self.units.pt.iter_mut().for_each(|pt| pt.follow_edges());
        for (_, ctl) in self.first.iter_mut().filter(|(msr, _)| *msr == IA32_RTIT_CTL) {
            *ctl = x86::pt::RtitCtl::from_bits(*ctl).with_addr_cfg(1).into_bits();
        }
        // TraceEn comes last.
        self.first.insert(0, (IA32_RTIT_ADDR0_A, first));
        self.first.insert(1, (IA32_RTIT_ADDR0_A + 1, last));
    }

    /// RDMSR of the units, the processor being where it is.
    ///
    /// # Errors
    /// The register is not there.
    pub fn read_msr(&mut self, msr: u32, cpu: &mut dyn Processor) -> Result<u64, MsrFault> {
        self.with(cpu, |units, cpu| units.read_msr(msr, cpu))
    }

    /// What branch trace store has stored since this was asked last: FROM and TO.
    pub fn take_branches(&mut self, take: impl FnMut([u64; 2])) {
        let field = self.store.field();
        let index = self.get(AREA + field);
        let records = (BRANCHES..index).step_by(self.store.branch_record() as usize);
        records.map(|at| [self.get(at), self.get(at + field)]).for_each(take);
        // As software does that has emptied the buffer. The units read it anew with the next batch.
        let at = (AREA + field - ROOM) as usize;
        self.room[at..at + field as usize].copy_from_slice(&BRANCHES.to_le_bytes()[..field as usize]);
    }

    /// Appends the packets that have been put out since this was asked last. There must not be more than the regions hold.
    pub fn take_packets(&mut self, cpu: &mut dyn Processor, packets: &mut Vec<u8>) {
        let Ok(pointers) = self.read_msr(IA32_RTIT_OUTPUT_MASK_PTRS, cpu) else {
            return;
        };
        let before = self.regions.iter().take((pointers as u32 >> 7) as usize);
        let to = before.map(|size| 4096 << size).sum::<u64>() + (pointers >> 32);
        let end = self.regions.iter().map(|size| 4096 << size).sum();
        let room = |from: u64, to: u64| {
            let at = (TRACE - ROOM) as usize;
            at + from as usize..at + to as usize
        };
        if to < self.taken {
            packets.extend_from_slice(&self.room[room(self.taken, end)]);
            self.taken = 0;
        }
        packets.extend_from_slice(&self.room[room(self.taken, to)]);
        self.taken = to;
    }

    /// Sends what the trace unit keeps back, calls `between`, and has it send a PSB with the whole state. Everything up to the next
    /// instruction must have been reported.
    pub fn synchronize(&mut self, cpu: &mut dyn Processor, between: impl FnOnce(&mut Self, &mut dyn Processor)) {
        self.with(cpu, |units, cpu| units.pt.iter_mut().for_each(|pt| pt.flush(cpu)));
        between(self, cpu);
        self.with(cpu, |units, cpu| units.pt.iter_mut().for_each(|pt| pt.synchronize(cpu)));
    }

    fn with<T>(&mut self, cpu: &mut dyn Processor, f: impl FnOnce(&mut Units, &mut dyn Processor) -> T) -> T {
        let room = &mut self.room;
        f(&mut self.units, &mut Lent { cpu, room })
    }
}

/// The registers that switch a unit on, in the order in which they are written.
fn registers(model: &CpuModel, unit: Unit) -> Vec<(u32, u64)> {
    match unit {
        Unit::Lbr if model.features().arch_lbr() => vec![(IA32_LBR_CTL, 0x7F_0007)],
        Unit::Lbr => vec![(IA32_DEBUGCTL, 1)],
        Unit::Bts => {
            let control = match model.units.debugctl.map(|caps| caps.layout) {
                Some(DebugCtlLayout::NetBurst) => DebugCtlA::new().with_tr(true).with_bts(true).into_bits(),
                _ => DebugCtl::new().with_tr(true).with_bts(true).into_bits(),
            };
            vec![(IA32_DS_AREA, AREA), (IA32_DEBUGCTL, control)]
        }
        Unit::Counters => vec![(IA32_FIXED_CTR_CTRL, 0x33), (IA32_PERF_GLOBAL_CTRL, 3 << 32)],
        // BR_INST_RETIRED, enabled in all rings.
        Unit::BranchCounter => vec![
            (IA32_PERFEVTSEL0, 0x43_00C4),
            (IA32_FIXED_CTR_CTRL, 0x33),
            (IA32_PERF_GLOBAL_CTRL, 3 << 32 | 1),
        ],
        Unit::Pt => {
            let psb = if model.units.pt.is_some_and(|pt| pt.psb_cyc()) {
                4
            } else {
                0
            };
            let ctl = x86::pt::RtitCtl::new()
                .with_branch_en(true)
                .with_tsc_en(true)
                .with_os(true)
                .with_user(true)
                .with_topa(true)
                .with_psb_freq(psb)
                .with_trace_en(true);
            vec![
                (IA32_RTIT_OUTPUT_BASE, TOPA),
                (IA32_RTIT_OUTPUT_MASK_PTRS, 0x7F),
                (IA32_RTIT_CTL, ctl.into_bits()),
            ]
        }
    }
}

impl Watch for Observer {
    fn interest(&mut self, cpu: &mut dyn Processor) -> Interest {
        for (msr, value) in std::mem::take(&mut self.first) {
            let written = self.with(cpu, |units, cpu| units.write_msr(msr, value, cpu));
            assert_eq!(written, Ok(()), "{msr:X}H takes {value:X}H");
        }
        self.with(cpu, |units, cpu| units.interest(cpu))
    }
    fn is_steady(&self) -> bool {
        self.units.is_steady()
    }
    fn boundaries(&self) -> &[u64] {
        Watch::boundaries(&self.units)
    }
    fn ranges(&self) -> &[Range] {
        Watch::ranges(&self.units)
    }
    fn generation(&self) -> u64 {
        Watch::generation(&self.units)
    }
    fn before(&mut self, address: u64, cpu: &mut dyn Processor) -> Effects {
        self.with(cpu, |units, cpu| units.before(address, cpu))
    }
    fn access(&mut self, access: &Access, cpu: &mut dyn Processor) -> Effects {
        self.with(cpu, |units, cpu| units.access(access, cpu))
    }
    fn branches(&mut self, records: &[BranchRecord], cpu: &mut dyn Processor) -> Effects {
        self.with(cpu, |units, cpu| units.branches(records, cpu))
    }
    fn event(&mut self, event: &EventRecord, cpu: &mut dyn Processor) -> Effects {
        self.with(cpu, |units, cpu| units.event(event, cpu))
    }
    fn state(&mut self, change: Change, cpu: &mut dyn Processor) -> Effects {
        self.with(cpu, |units, cpu| Watch::state(units, change, cpu))
    }
    fn tick(&mut self, cpu: &mut dyn Processor) -> Effects {
        self.with(cpu, |units, cpu| units.tick(cpu))
    }
}

/// The guest's processor with the host's memory.
struct Lent<'a> {
    cpu: &'a mut dyn Processor,
    room: &'a mut [u8],
}

impl Lent<'_> {
    fn at(&mut self, address: u64, len: u64) -> Option<&mut [u8]> {
        let start = address.checked_sub(ROOM)?;
        let end = start.checked_add(len)?;
        self.room.get_mut(start as usize..end as usize)
    }

    fn linear(&mut self, la: u64, len: u64) -> Result<&mut [u8], PageFault> {
        self.at(la, len).ok_or(PageFault {
            address: la,
            code: PageFaultCode::new(),
        })
    }
}

impl TraceMem for Lent<'_> {
    fn read_linear(&mut self, la: u64, bytes: &mut [u8]) -> Result<(), PageFault> {
        // Some events are distinguished by the bytes of the guest's code.
        match self.at(la, bytes.len() as u64) {
            Some(room) => bytes.copy_from_slice(room),
            None => return self.cpu.read_linear(la, bytes),
        }
        Ok(())
    }
    fn probe_linear(&mut self, la: u64, len: u64) -> Result<(), PageFault> {
        self.linear(la, len).map(drop)
    }
    fn write_linear(&mut self, la: u64, bytes: &[u8]) -> Result<(), PageFault> {
        self.linear(la, bytes.len() as u64)?.copy_from_slice(bytes);
        Ok(())
    }
    fn read_phys(&mut self, pa: u64, bytes: &mut [u8]) -> Result<(), BadPhys> {
        let room = self.at(pa, bytes.len() as u64).ok_or(BadPhys { address: pa })?;
        bytes.copy_from_slice(room);
        Ok(())
    }
    fn write_phys(&mut self, pa: u64, bytes: &[u8]) -> Result<(), BadPhys> {
        let room = self.at(pa, bytes.len() as u64).ok_or(BadPhys { address: pa })?;
        room.copy_from_slice(bytes);
        Ok(())
    }
}

impl Processor for Lent<'_> {
    fn gpr(&self, number: u8) -> u64 {
        self.cpu.gpr(number)
    }
    fn xmm(&self, number: u8) -> u128 {
        self.cpu.xmm(number)
    }
    fn rip(&self) -> u64 {
        self.cpu.rip()
    }
    fn rflags(&self) -> u64 {
        self.cpu.rflags()
    }
    fn context(&self) -> Context {
        self.cpu.context()
    }
    // The guest's breakpoints are its own units' affair.
    fn cr4(&self) -> u64 {
        self.cpu.cr4()
    }
    fn physical(&mut self, linear: u64) -> Option<u64> {
        match self.at(linear, 1) {
            Some(_) => Some(linear),
            None => self.cpu.physical(linear),
        }
    }
    fn retired(&self) -> u64 {
        self.cpu.retired()
    }
    fn step(&self) -> u64 {
        self.cpu.step()
    }
    fn tsc(&mut self) -> u64 {
        self.cpu.tsc()
    }
    fn recorded(&self) -> Recorded {
        self.cpu.recorded()
    }
}
