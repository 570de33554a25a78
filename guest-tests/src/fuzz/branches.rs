//! The bytes as what a guest and its processor do to the units that watch branches: registers written with anything, a
//! debug-store area of anything, XSAVE images of anything, and branches.

use devices::unit::arch_lbr::ArchLbr;
use devices::unit::debugctl::DebugCtlUnit;
use devices::unit::ds::area::DsArea;
use devices::unit::ds::bts::Bts;
use devices::unit::lbr::{Gate, Lbr};
use x86::ds::{DsLayout, management};
use x86::fault::PageFaultCode;
use x86::lbr::{ArchLbrLeaf, image};
use x86::model::MODELS;
use x86::msr::*;
use x86::watch::{BadPhys, BranchRecord, Change, CodeSize, Context, EventRecord, Flow, PageFault, TraceMem};

/// Guest memory, from address 0; the management area is at its start, the buffers are in what follows.
const MEMORY: u64 = 0x4000;
/// The length of an operation: what it is, an argument, a value.
const OPERATION: usize = 10;
/// The first of each group of registers that some model has.
const REGISTERS: [u32; 14] = [
    IA32_DEBUGCTL,
    MSR_LBR_SELECT,
    MSR_LASTBRANCH_TOS,
    MSR_LER_FROM_LIP_NETBURST,
    MSR_LASTBRANCH_0_FROM_IP_CORE,
    MSR_LASTBRANCH_0_TO_IP_CORE,
    MSR_LASTBRANCH_0_FROM_IP,
    MSR_LASTBRANCH_0_TO_IP,
    MSR_LBR_INFO_0,
    IA32_LBR_CTL,
    IA32_LBR_0_FROM_IP,
    IA32_LBR_0_TO_IP,
    IA32_LBR_0_INFO,
    IA32_DS_AREA,
];

/// Memory that knows where the unit may write: its index, and what its bounds allow.
struct Guarded {
    memory: Vec<u8>,
    layout: DsLayout,
    area: u64,
    /// Base and maximum when the unit last read them: its own records may be written over them.
    bounds: Option<(u64, u64)>,
}

impl Guarded {
    fn place(&self, la: u64, len: u64) -> Result<std::ops::Range<usize>, PageFault> {
        match la.checked_add(len) {
            Some(end) if end <= MEMORY => Ok(la as usize..end as usize),
            _ => Err(PageFault {
                address: la,
                code: PageFaultCode::new(),
            }),
        }
    }

    fn field(&self, number: u64) -> Option<u64> {
        let len = self.layout.field();
        let range = self.place(self.area.checked_add(number * len)?, len).ok()?;
        let mut bytes = [0; 8];
        bytes[..len as usize].copy_from_slice(&self.memory[range]);
        Some(u64::from_le_bytes(bytes))
    }
}

impl TraceMem for Guarded {
    fn read_linear(&mut self, la: u64, bytes: &mut [u8]) -> Result<(), PageFault> {
        bytes.copy_from_slice(&self.memory[self.place(la, bytes.len() as u64)?]);
        if la == self.area {
            self.bounds = self
                .field(management::BTS_BASE)
                .zip(self.field(management::BTS_MAXIMUM));
        }
        Ok(())
    }

    fn probe_linear(&mut self, la: u64, len: u64) -> Result<(), PageFault> {
        self.place(la, len).map(drop)
    }

    fn write_linear(&mut self, la: u64, bytes: &[u8]) -> Result<(), PageFault> {
        let range = self.place(la, bytes.len() as u64)?;
        let len = bytes.len() as u64;
        let index = self.area.wrapping_add(management::BTS_INDEX * self.layout.field());
        let inside = self
            .bounds
            .is_some_and(|(base, maximum)| base <= la && la + len <= maximum);
        assert!(
            la == index || inside,
            "{la:#x} + {len:#x} at {:#x}, {:x?}",
            self.area,
            self.bounds
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

/// A model and operations on its units, which are those of the part: all features shown.
pub fn branches(bytes: &[u8]) {
    let [model, operations @ ..] = bytes else { return };
    let model = MODELS[usize::from(*model) % MODELS.len()];
    let (features, bits) = (model.part_features(), model.linear_bits());
    let Some((caps, debugctl)) = model.units.lbr.zip(model.units.debugctl) else {
        return;
    };
    let layout = DsLayout::of(features);
    let mut debugctl = DebugCtlUnit::new(debugctl, features);
    let mut lbr = Lbr::new(caps, features, bits);
    let leaf = model.silicon.iter().find(|row| row.leaf == 0x1C);
    let mut arch = leaf.map(|row| ArchLbr::new(ArchLbrLeaf { regs: row.regs }, bits));
    let mut area = DsArea::new(features, bits);
    let mut bts = Bts::new(layout, true, bits);
    let mut memory = Guarded {
        memory: vec![0; MEMORY as usize],
        layout,
        area: 0,
        bounds: None,
    };
    for operation in operations.chunks_exact(OPERATION).take(300) {
        let (kind, argument) = (operation[0], operation[1]);
        let value = u64::from_le_bytes(operation[2..].try_into().expect("eight bytes"));
        memory.area = area.base();
        let gate = Gate {
            enabled: debugctl.records_branches(),
            frozen: kind & 0x40 != 0,
            tracing: kind & 0x80 != 0,
        };
        let code = Context {
            cpl: argument & 3,
            code: if argument & 4 != 0 {
                CodeSize::Bits64
            } else {
                CodeSize::Bits32
            },
            cs_base: if argument & 4 != 0 { 0 } else { value },
            ..Context::default()
        };
        let control = debugctl.control();
        match kind % 8 {
            0..=2 => {
                let msr = REGISTERS[usize::from(argument) % REGISTERS.len()] + u32::from(argument) / 14;
                let _ = debugctl.write_msr(msr, value);
                let _ = area.write_msr(msr, value);
                if lbr.write_msr(msr, value, gate).is_ok() {
                    lbr.read_msr(msr, gate).expect("what can be written can be read");
                }
                if let Some(arch) = &mut arch
                    && arch.write_msr(msr, value).is_ok()
                {
                    arch.read_msr(msr).expect("what can be written can be read");
                }
            }
            3 => {
                // The guest writes its memory.
                let at = usize::from(argument) * 8 % (MEMORY as usize - 8);
                memory.memory[at..at + 8].copy_from_slice(&value.to_le_bytes());
            }
            4 | 5 => {
                let records: Vec<_> = (0..u64::from(argument))
                    .map(|n| BranchRecord {
                        from: value.wrapping_add(n % 7),
                        to: value.rotate_left(n as u32),
                        step: value.wrapping_add(n),
                        flow: (value >> (n % 60)) as u8 % (Flow::ALL.len() as u8 + 2),
                        length: argument,
                        from_cpl: argument & 3,
                        to_cpl: argument >> 2 & 3,
                        loads_cr3: false,
                        run: [0; 3],
                    })
                    .collect();
                assert!(bts.room(area.base(), &mut memory) >= 1);
                let _ = bts.interest(control, area.base(), &mut memory);
                lbr.branches(&records, gate, code);
                if let Some(arch) = &mut arch {
                    arch.branches(&records, gate.frozen, code);
                }
                let _ = bts.branches(&records, control, area.base(), &mut memory);
            }
            6 => {
                let event = EventRecord {
                    branch: BranchRecord {
                        from: value,
                        to: !value,
                        flow: argument % (Flow::ALL.len() as u8 + 2),
                        length: 1,
                        ..BranchRecord::default()
                    },
                    vector: argument,
                    debug: argument == 1,
                    error: None,
                    address: None,
                };
                debugctl.event(&event);
                lbr.event(&event, gate, code);
                if let Some(arch) = &mut arch {
                    arch.event(&event, gate.frozen, code);
                }
                let faulted = bts.event(&event, control, area.base(), &mut memory).fault;
                assert!(faulted.is_none(), "a delivery never faults");
            }
            _ => {
                if let Some(arch) = &mut arch {
                    let mut bytes = [argument; image::SIZE];
                    bytes[..8].copy_from_slice(&value.to_le_bytes());
                    let _ = arch.restore(Some(&bytes));
                    arch.save(&mut bytes);
                }
                let change = if argument & 1 == 0 {
                    Change::Init { at: 0 }
                } else {
                    Change::TransactionBegin { at: 0 }
                };
                debugctl.state_changed(change);
                lbr.state_changed(change, code);
                let _ = debugctl.freeze_on_pmi();
            }
        }
        // Whatever happened, the state is one that can be handed out and taken back.
        let (state, mut other) = (lbr.state(), lbr.clone());
        other.set_state(state.clone());
        assert_eq!(other.state(), state);
        let _ = lbr.interest(gate, || code);
    }
}

/// Inputs that record: every model's stack and store switched on, with a buffer, and branches.
pub(super) fn recorders() -> Vec<Vec<u8>> {
    let operation = |kind: u8, argument: u8, value: u64| {
        let mut bytes = vec![kind, argument];
        bytes.extend(value.to_le_bytes());
        bytes
    };
    (0..MODELS.len() as u8)
        .map(|model| {
            let mut bytes = vec![model];
            // Base, index, maximum, threshold of a 64-bit area at 0.
            for (field, value) in (0..).zip([0x1000, 0x1000, 0x1000 + 240, 0x1000 + 120]) {
                bytes.extend(operation(3, field, value));
            }
            bytes.extend(operation(0, 0, 0x9C1)); // IA32_DEBUGCTL
            bytes.extend(operation(0, 0, 0xD)); // MSR_DEBUGCTLA
            bytes.extend(operation(0, 9, 0x7F_0007)); // IA32_LBR_CTL
            for i in 0..4 {
                bytes.extend(operation(4, 20 + i, 0x1234_5678_9ABC_DEF0));
                bytes.extend(operation(6, 14, 0x8000 + u64::from(i)));
            }
            bytes.extend(operation(1, 1, 0x3C4)); // MSR_LBR_SELECT
            bytes.extend(operation(5, 90, 0x0FED_CBA9_8765_4321));
            bytes.extend(operation(7, 0, 0x7F_0007));
            bytes
        })
        .collect()
}
