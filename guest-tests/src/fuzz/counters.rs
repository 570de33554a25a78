//! The bytes as what a guest and its processor do to the counters: registers written with anything, a debug-store area of
//! anything, and `Watch` callbacks.

use devices::unit::cache::Hierarchy;
use devices::unit::pmu::{PebsInputs, Pmu};
use x86::fault::PageFaultCode;
use x86::model::MODELS;
use x86::msr::*;
use x86::watch::{
    Access, AccessKind, BadPhys, BranchRecord, Change, CodeSize, Context, Flow, PageFault, Processor, TraceMem,
};

/// Guest memory, from address 0.
const MEMORY: u64 = 0x4000;
/// The length of an operation: what it is, an argument, a value.
const OPERATION: usize = 10;

/// Every register that some model has, and some that none has.
const REGISTERS: &[u32] = &[
    IA32_PMC0,
    IA32_PMC0 + 1,
    IA32_PMC0 + 2,
    IA32_PMC0 + 3,
    IA32_PMC0 + 7,
    IA32_PMC0 + 8,
    IA32_PERFEVTSEL0,
    IA32_PERFEVTSEL0 + 1,
    IA32_PERFEVTSEL0 + 2,
    IA32_PERFEVTSEL0 + 3,
    IA32_PERFEVTSEL0 + 7,
    IA32_PERFEVTSEL0 + 8,
    MSR_OFFCORE_RSP_0,
    MSR_OFFCORE_RSP_1,
    IA32_FIXED_CTR0,
    IA32_FIXED_CTR0 + 1,
    IA32_FIXED_CTR0 + 2,
    IA32_FIXED_CTR0 + 3,
    IA32_FIXED_CTR0 + 4,
    MSR_PERF_METRICS,
    IA32_PERF_CAPABILITIES,
    IA32_FIXED_CTR_CTRL,
    IA32_PERF_GLOBAL_STATUS,
    IA32_PERF_GLOBAL_CTRL,
    IA32_PERF_GLOBAL_OVF_CTRL,
    IA32_PERF_GLOBAL_STATUS_SET,
    IA32_PERF_GLOBAL_INUSE,
    IA32_PEBS_ENABLE,
    MSR_PEBS_DATA_CFG,
    MSR_PEBS_LD_LAT,
    MSR_PEBS_FRONTEND,
    IA32_A_PMC0,
    IA32_A_PMC0 + 3,
    IA32_A_PMC0 + 8,
    // The Pentium 4's: counters 4, 12 and 16, their CCCRs, ESCRs that detect, sample and tag.
    MSR_BPU_COUNTER0 + 4,
    MSR_BPU_COUNTER0 + 12,
    MSR_BPU_COUNTER0 + 16,
    MSR_BPU_CCCR0 + 4,
    MSR_BPU_CCCR0 + 12,
    MSR_BPU_CCCR0 + 14,
    MSR_BPU_CCCR0 + 16,
    TBPU_ESCR0,
    CRU_ESCR0,
    CRU_ESCR2,
    RAT_ESCR0,
    FIRM_ESCR0,
    MSR_TC_PRECISE_EVENT,
];

const TBPU_ESCR0: u32 = MSR_BSU_ESCR0 + 0x22;
const CRU_ESCR0: u32 = MSR_BSU_ESCR0 + 0x18;
const CRU_ESCR2: u32 = MSR_BSU_ESCR0 + 0x2C;
const RAT_ESCR0: u32 = MSR_BSU_ESCR0 + 0x1C;
const FIRM_ESCR0: u32 = MSR_BSU_ESCR0 + 4;

struct Core {
    memory: Vec<u8>,
    area: u64,
    cpl: u8,
    retired: u64,
    step: u64,
    rip: u64,
}

impl Core {
    fn place(&self, la: u64, len: u64) -> Result<std::ops::Range<usize>, PageFault> {
        match la.checked_add(len) {
            Some(end) if end <= MEMORY => Ok(la as usize..end as usize),
            _ => Err(PageFault {
                address: la,
                code: PageFaultCode::new(),
            }),
        }
    }

    /// A field of the management area, if it is in memory.
    fn field(&self, number: u64) -> Option<u64> {
        let range = self.place(self.area.wrapping_add(8 * number), 8).ok()?;
        Some(u64::from_le_bytes(self.memory[range].try_into().ok()?))
    }
}

impl TraceMem for Core {
    fn read_linear(&mut self, la: u64, bytes: &mut [u8]) -> Result<(), PageFault> {
        bytes.copy_from_slice(&self.memory[self.place(la, bytes.len() as u64)?]);
        Ok(())
    }

    fn probe_linear(&mut self, la: u64, len: u64) -> Result<(), PageFault> {
        self.place(la, len).map(drop)
    }

    fn write_linear(&mut self, la: u64, bytes: &[u8]) -> Result<(), PageFault> {
        let range = self.place(la, bytes.len() as u64)?;
        // The index, or a record within the bounds that the area has.
        let index = la == self.area.wrapping_add(8 * 5) && bytes.len() == 8;
        let [base, maximum] = [4, 6].map(|number| self.field(number).expect("it has been read"));
        let record = base <= la && la + bytes.len() as u64 <= maximum;
        assert!(
            index || record,
            "{la:#x} + {:#x}, {base:#x} to {maximum:#x}",
            bytes.len()
        );
        self.memory[range].copy_from_slice(bytes);
        Ok(())
    }

    fn read_phys(&mut self, pa: u64, _: &mut [u8]) -> Result<(), BadPhys> {
        Err(BadPhys { address: pa })
    }

    fn write_phys(&mut self, pa: u64, _: &[u8]) -> Result<(), BadPhys> {
        Err(BadPhys { address: pa })
    }
}

impl Processor for Core {
    fn gpr(&self, number: u8) -> u64 {
        number.into()
    }

    fn xmm(&self, number: u8) -> u128 {
        number.into()
    }

    fn rip(&self) -> u64 {
        self.rip
    }

    fn rflags(&self) -> u64 {
        2
    }

    fn context(&self) -> Context {
        Context {
            cpl: self.cpl,
            code: CodeSize::Bits64,
            ..Context::default()
        }
    }

    fn retired(&self) -> u64 {
        self.retired
    }

    fn step(&self) -> u64 {
        self.step
    }

    fn tsc(&mut self) -> u64 {
        self.step
    }
}

/// A model and operations on its counters.
pub fn counters(bytes: &[u8]) {
    let [model, operations @ ..] = bytes else { return };
    let model = MODELS[usize::from(*model) % MODELS.len()];
    let Some(mut pmu) = Pmu::new(model) else { return };
    let mut caches = Hierarchy::of(model);
    let mut core = Core {
        memory: vec![0; MEMORY as usize],
        area: 0x100,
        cpl: 0,
        retired: 0,
        step: 0,
        rip: 0x1000,
    };
    for operation in operations.chunks_exact(OPERATION).take(500) {
        let (kind, argument) = (operation[0], operation[1]);
        let value = u64::from_le_bytes(operation[2..].try_into().expect("eight bytes"));
        let around = PebsInputs {
            ds_area: core.area,
            last_branch: &|number| [number.into(); 3],
        };
        let msr = REGISTERS[usize::from(argument) % REGISTERS.len()];
        let effects = match kind % 12 {
            0..=2 => {
                if pmu.write_msr(msr, value, &mut core, &around).is_ok() {
                    pmu.read_msr(msr, &mut core, &around)
                        .expect("what can be written can be read");
                }
                core.retired = core.retired.wrapping_add(1);
                core.step = core.step.wrapping_add(1);
                pmu.tick(&mut core, &around)
            }
            3 => {
                let read = pmu.read_msr(msr, &mut core, &around);
                assert_ne!(read, Err(MsrFault::GeneralProtection), "{msr:#x}");
                let _ = pmu.rdpmc(value as u32, &mut core, &around);
                continue;
            }
            4 | 5 => {
                // What REPs do: more steps than instructions.
                core.retired = core.retired.wrapping_add(argument.into());
                core.step = core.step.wrapping_add(u64::from(argument) + value % 100);
                core.rip = value;
                pmu.tick(&mut core, &around)
            }
            6 => {
                let records: Vec<BranchRecord> = (0..u64::from(argument % 8))
                    .map(|n| BranchRecord {
                        from: value.wrapping_add(n),
                        to: value.rotate_left(n as u32),
                        step: core.step.wrapping_add(n),
                        flow: (value >> n) as u8 % (Flow::ALL.len() as u8 + 2),
                        from_cpl: core.cpl,
                        ..BranchRecord::default()
                    })
                    .collect();
                core.retired = core.retired.wrapping_add(records.len() as u64);
                core.step = core.step.wrapping_add(records.len() as u64);
                let effects = pmu.branches(&records, &mut core, &around);
                let fetched = caches.branches(&records, Some);
                effects.and(pmu.fetched(&fetched, &mut core, &around))
            }
            7 => {
                core.retired = core.retired.wrapping_add(1);
                core.step = core.step.wrapping_add(1);
                let kind = [
                    AccessKind::Read,
                    AccessKind::Write,
                    AccessKind::ReadWrite,
                    AccessKind::PortRead,
                ];
                let access = Access {
                    address: value,
                    size: argument.into(),
                    kind: kind[usize::from(argument % 4)],
                    ip: core.rip,
                };
                let memory = caches.access(&access, Some);
                pmu.access(&access, memory, &mut core, &around)
            }
            8 => {
                let change = [
                    Change::Halt,
                    Change::Wake { store: false },
                    Change::Init { at: 0 },
                    Change::Cr3,
                    Change::Reset,
                ];
                core.cpl = (value % 4) as u8;
                pmu.state_change(change[usize::from(argument) % change.len()], &mut core, &around)
            }
            9 => {
                let at = u64::from(argument) * 8 % MEMORY;
                core.memory[at as usize..][..8].copy_from_slice(&value.to_le_bytes());
                continue;
            }
            10 => {
                core.area = if argument < 8 { value } else { value % MEMORY };
                pmu.before(value, &mut core, &around)
            }
            _ => {
                pmu.freeze();
                pmu.set_status(value & 1 << 58);
                pmu.unmasked()
            }
        };
        assert_eq!(effects.debug, None, "counters raise no #DB");
        let _ = pmu.interest(&mut core, &around);
    }
    let state = pmu.state();
    let width = pmu.caps().general_width.max(pmu.caps().fixed_width);
    assert!(state.values.iter().all(|value| value >> width == 0), "{state:?}");
    pmu.set_state(&state);
    assert_eq!(pmu.state(), state);
}

/// Guests that count and sample.
pub fn samplers() -> Vec<Vec<u8>> {
    let register = |msr: u32| REGISTERS.iter().position(|&r| r == msr).expect("it is listed") as u8;
    (0..MODELS.len() as u8)
        .map(|model| {
            let mut bytes = vec![model];
            let mut put = |kind: u8, argument: u8, value: u64| {
                bytes.extend([kind, argument]);
                bytes.extend(value.to_le_bytes());
            };
            for (field, value) in [(4, 0x1000), (5, 0x1000), (6, 0x3000), (7, 0x2000), (8, u64::MAX - 3)] {
                put(9, (0x100 / 8 + field) as u8, value);
            }
            for (msr, value) in [
                (IA32_PERFEVTSEL0, 0x0043_00C0),
                (IA32_PERFEVTSEL0 + 1, 0x0053_00C4),
                (IA32_PMC0, 0xFFFF_FFF0),
                (IA32_PMC0 + 1, 0xFFFF_FFFE),
                (IA32_PEBS_ENABLE, 1),
                (IA32_FIXED_CTR_CTRL, 0xBB),
                (IA32_PERF_GLOBAL_CTRL, 0x3_0000_0003),
                // instr_retired; retired_branch_type with OVF_PMI; front_end_event of loads, sampled; a cascade.
                (CRU_ESCR0, 2 << 25 | 1 << 9 | 0xC),
                (MSR_BPU_CCCR0 + 12, 0x3_9000),
                (TBPU_ESCR0, 4 << 25 | 0x1E << 9 | 0xC),
                (MSR_BPU_COUNTER0 + 4, u64::MAX),
                (MSR_BPU_CCCR0 + 4, 0x403_5000),
                (RAT_ESCR0, 2 << 25 | 6 << 9 | 0xC),
                (CRU_ESCR2, 8 << 25 | 1 << 9 | 0xC),
                (IA32_PEBS_ENABLE, 3 << 24),
                (MSR_BPU_COUNTER0 + 16, u64::MAX),
                (MSR_BPU_CCCR0 + 16, 0x3_B000),
                (MSR_BPU_CCCR0 + 14, 0x4003_8000),
            ] {
                put(0, register(msr), value);
            }
            put(4, 15, 0);
            put(4, 1, 0);
            put(6, 7, 0x0102_0304_0506_0708);
            put(7, 8, 0x2000);
            put(8, 0, 3);
            put(3, register(IA32_PERF_GLOBAL_STATUS), 0);
            put(0, register(IA32_PERF_GLOBAL_OVF_CTRL), 0x3);
            bytes
        })
        .collect()
}
