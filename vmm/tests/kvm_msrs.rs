//! Who answers a guest's RDMSR and WRMSR on KVM: this program's units for the registers of each unit that is ours, with what
//! the software engine's guest reads there; nobody where the unit is absent; and KVM itself for the core's. Where there is no
//! KVM the tests say so and skip.

use crate::common;
use common::long::{COUNTS, STRINGS, guest, raise};
use common::{Folder, kvm_is_missing};
use iced_x86::code_asm::*;
use kvm::units::{Unit, UnitRequest, UnitRequests};
use minivmm::StopReason;
use minivmm::config::{EngineChoice, KvmDefects};
use minivmm::{Console, End, MachineConfig, Run, SerialTarget};
use x86::model::{CpuModel, HASWELL, SAPPHIRERAPIDS, SKYLAKE_SERVER};
use x86::msr::*;

/// Registers, and a value that none of their bits refuses and that turns nothing on.
type Registers = &'static [(u32, u64)];

/// #GP.
const GP: u32 = 13;

/// A guest that reads each register, writes it and reads it again. Of each there are four words in [`STRINGS`]: what was read
/// first and then, how many of the three were #GP, and zero.
fn image(registers: Registers) -> Vec<u8> {
    guest(|a| {
        for (at, &(msr, value)) in (STRINGS..).step_by(32).zip(registers) {
            for (write, slot) in [(false, 0), (true, 0), (false, 8)] {
                a.mov(ecx, msr)?;
                a.mov(eax, value as u32)?;
                a.mov(edx, (value >> 32) as u32)?;
                raise(a, |a| {
                    if write {
                        return a.wrmsr();
                    }
                    a.rdmsr()?;
                    a.mov(dword_ptr(at + slot), eax)?;
                    a.mov(dword_ptr(at + slot + 4), edx)
                })?;
            }
            a.xor(eax, eax)?;
            a.xchg(qword_ptr(COUNTS + GP * 8), rax)?;
            a.mov(qword_ptr(at + 16), rax)?;
        }
        a.cli()?;
        a.hlt()
    })
}

/// The words of each register; exits for accesses to the bus, and handovers for a unit, on KVM.
fn run(
    engine: EngineChoice,
    model: &'static CpuModel,
    units: UnitRequests,
    registers: Registers,
) -> (Vec<[u64; 3]>, u64, u64) {
    let folder = Folder::new();
    let config = MachineConfig {
        memory: 8 << 20,
        engine,
        kvm_defects: KvmDefects::Accept,
        model,
        units,
        ..MachineConfig::new(folder.file("program", image(registers)))
    };
    let mut vm = Run::new(&config).unwrap();
    let mut console = Console::open(&SerialTarget::Buffer, &[], vm.line()).unwrap();
    let end = vm.run(&mut console).unwrap();
    assert!(matches!(end, StopReason::Ended(End::Halted(_))), "{end:?}");
    let mut bytes = vec![0; 32 * registers.len()];
    vm.read_physical(STRINGS.into(), &mut bytes).unwrap();
    let word = |bytes: &[u8]| u64::from_le_bytes(bytes.try_into().unwrap());
    let words = bytes
        .chunks(32)
        .map(|row| [word(&row[..8]), word(&row[8..16]), word(&row[16..24])]);
    let native = vm.stats().native;
    let (exits, watched) = native.map_or((0, 0), |native| (native.exits.bus, native.watched));
    (words.collect(), exits, watched)
}

/// A request for one unit.
fn request(unit: Unit, request: UnitRequest) -> UnitRequests {
    UnitRequests::default().with(unit, Some(request))
}

/// The registers of each unit that can be ours on KVM.
const UNITS: &[(Unit, &CpuModel, Registers)] = &[
    (
        Unit::Lbr,
        &HASWELL,
        &[
            // Without counters there is no freeze on their interrupt, and each other bit turns something on.
            (IA32_DEBUGCTL, 0),
            (MSR_LBR_SELECT, 5),
            (MSR_LASTBRANCH_TOS, 3),
            (MSR_LASTBRANCH_0_FROM_IP, 0x1234),
            (MSR_LASTBRANCH_0_FROM_IP + 15, 0x77),
            (MSR_LASTBRANCH_0_TO_IP, 0x5678),
            (MSR_LASTBRANCH_0_TO_IP + 15, 0x99),
        ],
    ),
    (
        Unit::Lbr,
        &SAPPHIRERAPIDS,
        &[
            (IA32_LBR_CTL, 6),
            (IA32_LBR_DEPTH, 32),
            (IA32_LBR_0_FROM_IP, 0x1234),
            (IA32_LBR_0_FROM_IP + 31, 0x1234),
            (IA32_LBR_0_TO_IP, 0x5678),
            (IA32_LBR_0_INFO, 9),
        ],
    ),
    (
        Unit::Bts,
        &SKYLAKE_SERVER,
        &[(IA32_DEBUGCTL, 1 << 8), (IA32_DS_AREA, STRINGS as u64)],
    ),
    (
        Unit::Pt,
        &SAPPHIRERAPIDS,
        &[
            (IA32_RTIT_OUTPUT_BASE, 0x28_0000),
            (IA32_RTIT_OUTPUT_MASK_PTRS, 0xfff),
            (IA32_RTIT_CTL, 1 << 13),
            (IA32_RTIT_STATUS, 0),
            (IA32_RTIT_CR3_MATCH, 0x20_0000),
            (IA32_RTIT_ADDR0_A, 0x1000),
            (IA32_RTIT_ADDR0_A + 1, 0x2000),
        ],
    ),
    (
        Unit::Rdt,
        &SKYLAKE_SERVER,
        &[
            (IA32_L3_QOS_MASK_0, 7),
            (IA32_PQR_ASSOC, 1),
            (IA32_QM_CTR, 0),
            (IA32_QM_EVTSEL, 1 << 32 | 1),
        ],
    ),
];

// covers: cpu/msr-filter
#[test]
fn each_register_of_a_unit_of_ours_comes_to_it() {
    if kvm_is_missing("registers of our units on KVM") {
        return;
    }
    for &(unit, model, registers) in UNITS {
        let name = model.name;
        let ours = request(unit, UnitRequest::Emulated);
        let (there, exits, handovers) = run(EngineChoice::Kvm, model, ours, registers);
        let (expected, ..) = run(EngineChoice::Soft, model, UnitRequests::default(), registers);
        for ((&(msr, value), row), expected) in registers.iter().zip(&there).zip(&expected) {
            assert_eq!(row, expected, "{unit:?} of {name}: {msr:#x}");
            assert!(row[2] <= 1, "{unit:?} of {name}: {msr:#x} can be read");
            assert!(
                row[1] == value || row[2] == 1,
                "{unit:?} of {name}: {msr:#x} keeps {value:#x}: {row:x?}"
            );
        }
        // Nothing turns a unit on but asking the resource director for a count.
        assert_eq!(handovers, u64::from(unit == Unit::Rdt), "{unit:?} of {name}");
        if handovers == 0 {
            assert_eq!(exits, 3 * registers.len() as u64, "{unit:?} of {name}");
        }
        let (absent, exits, _) = run(EngineChoice::Kvm, model, request(unit, UnitRequest::Off), registers);
        let (expected, ..) = run(EngineChoice::Soft, model, request(unit, UnitRequest::Off), registers);
        assert_eq!(exits, 3 * registers.len() as u64, "{unit:?} of {name}");
        for ((&(msr, _), row), expected) in registers.iter().zip(&absent).zip(&expected) {
            let shared = msr == IA32_DEBUGCTL || msr == IA32_DS_AREA;
            assert!(
                row[2] == 3 || shared && row == expected,
                "{unit:?} of {name}, absent: {msr:#x} {row:x?}"
            );
        }
    }
}

// covers: cpu/msr-filter
#[test]
fn the_cores_registers_stay_in_kvm() {
    if kvm_is_missing("registers of the core on KVM") {
        return;
    }
    const CORE: Registers = &[
        (IA32_SYSENTER_CS, 0x10),
        (IA32_SYSENTER_ESP, 0x1234),
        (IA32_SYSENTER_EIP, 0x5678),
        (IA32_EFER, 0xd01),
        (IA32_STAR, 0x10_0000_0000),
        (IA32_LSTAR, 0xffff_ffff_8000_0000),
        (IA32_CSTAR, 0x77),
        (IA32_FMASK, 0x700),
        (IA32_FS_BASE, 0x1111),
        (IA32_GS_BASE, 0x2222),
        (IA32_KERNEL_GS_BASE, 0x3333),
    ];
    let (there, exits, handovers) = run(EngineChoice::Kvm, &HASWELL, UnitRequests::default(), CORE);
    for (&(msr, value), row) in CORE.iter().zip(&there) {
        assert_eq!(row[1..], [value, 0], "{msr:#x}");
    }
    assert_eq!((exits, handovers), (0, 0));
}

// covers: cpu/msr-filter
#[test]
fn registers_of_the_machine_are_ours_whatever_kvm_has() {
    if kvm_is_missing("registers of the machine on KVM") {
        return;
    }
    const MACHINE: Registers = &[
        (IA32_TSC_ADJUST, 0x1000),
        (IA32_MISC_ENABLE, 1),
        (IA32_PAT, 0x0007_0406_0007_0406),
        (IA32_MTRR_DEF_TYPE, 0xc06),
        (0x1234_5678, 0),
    ];
    let (there, exits, _) = run(EngineChoice::Kvm, &SKYLAKE_SERVER, UnitRequests::default(), MACHINE);
    assert_eq!(exits, 3 * MACHINE.len() as u64);
    assert_eq!(there[0][..], [0, 0x1000, 0]);
    assert_eq!(there[4][2], 3, "#GP for what there is not");
}
