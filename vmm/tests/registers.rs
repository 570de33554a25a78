//! Debug registers, time-stamp counter and resource director bit by bit on every model, as a guest reaches them; and what INIT
//! leaves of all registers.

use engine::{CS, Cpu, CpuState, EngineOptions, Exit, Segment, Table};
use machine::memory::SoftEngine;
use machine::{Machine, memory::Memory};
use x86::model::{CpuModel, MODELS};
use x86::msr::*;

const CODE: u64 = 0x1000;
const HANDLERS: u64 = 0x3000;

/// What a piece of code ends in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    /// Its own HLT, with EDX:EAX.
    Value(u64),
    /// An exception.
    Vector(u64),
}
use End::{Value, Vector};

const GP: End = Vector(13);

/// One CPU in real-address mode.
struct Guest {
    machine: Machine,
    engine: SoftEngine,
    cpu: Box<Cpu>,
    start: CpuState,
    memory: Memory,
}

impl Guest {
    fn new(model: &'static CpuModel) -> Guest {
        let memory = Memory::new(2 << 20).unwrap();
        let machine = Machine::new(model, 1, Memory::new(2 << 20).unwrap(), 0, 1, Box::new(std::io::sink()));
        for vector in 0..32u64 {
            let at = HANDLERS + vector * 4;
            memory.write(vector * 4, &(at as u32).to_le_bytes()).unwrap();
            memory.write(at, &[0xF4]).unwrap();
        }
        let mut start = CpuState::reset(model);
        start.segments = [Segment::real(0); 6];
        start.segments[CS].attributes = 0x9B;
        start.idtr = Table { base: 0, limit: 0x3FF };
        start.gpr[4] = 0x8000;
        start.rip = CODE;
        let mut cpu = Cpu::new(model);
        cpu.set_state(&start);
        Guest {
            engine: memory.engine(model, EngineOptions::default()).unwrap(),
            machine,
            cpu,
            start,
            memory,
        }
    }

    /// Runs code up to a HLT, its own or a handler's. Registers that the units hold stay from run to run.
    fn run(&mut self, code: &[u8], ecx: u32, value: u64) -> End {
        self.memory.write(CODE, code).unwrap();
        self.engine.get().written(CODE, code.len() as u64);
        let mut state = self.start.clone();
        state.msrs = self.cpu.state().msrs;
        state.steps = self.cpu.steps();
        (state.gpr[0], state.gpr[1], state.gpr[2]) = (value & 0xFFFF_FFFF, ecx.into(), value >> 32);
        self.cpu.set_state(&state);
        for _ in 0..100 {
            match self.engine.get().run(&mut self.cpu, &mut self.machine.cpu(0), 1000) {
                Exit::Halt => break,
                Exit::Bus | Exit::Budget => {}
                exit => panic!("{exit:?}"),
            }
        }
        let s = self.cpu.state();
        match (s.rip - 1).checked_sub(HANDLERS) {
            Some(offset) => Vector(offset / 4),
            None => Value(s.gpr[2] << 32 | s.gpr[0] & 0xFFFF_FFFF),
        }
    }

    /// WRMSR, then RDMSR.
    fn write(&mut self, msr: u32, value: u64) -> End {
        self.run(&[0x0F, 0x30, 0x0F, 0x32, 0xF4], msr, value)
    }

    fn read(&mut self, msr: u32) -> End {
        self.run(&[0x0F, 0x32, 0xF4], msr, 0)
    }

    /// MOV to DR`n` from EAX, then back.
    fn move_dr(&mut self, n: u8, value: u32) -> End {
        let operands = 0xC0 | n << 3;
        self.run(&[0x0F, 0x23, operands, 0x0F, 0x21, operands, 0xF4], 0, value.into())
    }
}

// covers: dr/bits
#[test]
fn debug_registers_bit_by_bit() {
    for model in MODELS {
        let mut guest = Guest::new(model);
        let features = model.features();
        for bit in 0..32 {
            let value = 1u32 << bit;
            let name = format!("{} bit {bit}", model.name);
            for n in 0..4 {
                assert_eq!(guest.move_dr(n, value), Value(value.into()), "DR{n}, {name}");
            }
            // SDM Vol. 3B Figure 18-1 "Debug Registers": BLD and RTM are active low, and 1 where the part has them not.
            let active_low = u32::from(features.bus_lock_detect()) << 11 | u32::from(features.rtm()) << 16;
            let writable = 0xE00F | active_low;
            let fixed = 0xFFFF_0FF0 & !active_low;
            let expected = fixed | value & writable;
            for n in [4, 6] {
                assert_eq!(guest.move_dr(n, value), Value(expected.into()), "DR{n}, {name}");
            }
            let writable = 0xFFFF_23FF | u32::from(features.rtm()) << 11;
            for n in [5, 7] {
                let expected = match bit {
                    // General detect: reading it back is a #DB.
                    13 => Vector(1),
                    _ => Value((0x400 | value & writable).into()),
                };
                assert_eq!(guest.move_dr(n, value), expected, "DR{n}, {name}");
            }
        }
    }
}

// covers: tsc/bits
#[test]
fn registers_of_the_time_stamp_counter_bit_by_bit() {
    for model in MODELS {
        let mut guest = Guest::new(model);
        let features = model.features();
        // SDM Vol. 3B 18.17 "Time-Stamp Counter": the oldest parts clear the upper half.
        let whole = !matches!(model.name, "p6" | "netburst");
        let aux = features.rdtscp() || features.rdpid();
        for bit in 0..64 {
            let value = 1u64 << bit;
            let name = format!("{} bit {bit}", model.name);
            let expected = if whole { value } else { value & 0xFFFF_FFFF };
            match guest.write(IA32_TIME_STAMP_COUNTER, value) {
                Value(read) => assert!(read.wrapping_sub(expected) < 16, "TSC, {name}: {read:x}"),
                other => panic!("TSC, {name}: {other:?}"),
            }
            let expected = if features.tsc_adjust() { Value(value) } else { GP };
            assert_eq!(guest.write(IA32_TSC_ADJUST, value), expected, "TSC_ADJUST, {name}");
            // Outside TSC-deadline mode writes are ignored. SDM Vol. 3A 11.5.4.1 "TSC-Deadline Mode".
            let expected = if features.tsc_deadline() { Value(0) } else { GP };
            assert_eq!(guest.write(IA32_TSC_DEADLINE, value), expected, "TSC_DEADLINE, {name}");
            let expected = if aux && bit < 32 { Value(value) } else { GP };
            assert_eq!(guest.write(IA32_TSC_AUX, value), expected, "TSC_AUX, {name}");
        }
    }
}

// covers: rdt/bits
#[test]
fn registers_of_the_resource_director_bit_by_bit() {
    for model in MODELS {
        let mut guest = Guest::new(model);
        let features = model.features();
        let (monitors, allocates) = (features.rdt_m(), features.rdt_a());
        let (rmids, resources) = (model.cpuid(0xF, 0)[1], model.cpuid(0x10, 0)[1]);
        let part = |resource: u32| (allocates && resources >> resource & 1 != 0).then(|| model.cpuid(0x10, resource));
        let (l3, l2, memory) = (part(1), part(2), part(3));
        let classes = [l3, l2, memory]
            .into_iter()
            .flatten()
            .map(|leaf| leaf[3] & 0xFFFF)
            .max();
        for bit in 0..64u32 {
            let value = 1u64 << bit;
            let name = format!("{} bit {bit}", model.name);
            let allowed = |allowed: bool| if allowed { Value(value) } else { GP };
            let rmid = |from: u32| monitors && bit >= from && bit < from + 10 && value >> from <= u64::from(rmids);
            let class = classes.is_some_and(|highest| bit >= 32 && value >> 32 <= u64::from(highest));
            assert_eq!(
                guest.write(IA32_PQR_ASSOC, value),
                allowed(rmid(0) || class),
                "PQR_ASSOC, {name}"
            );
            let event = monitors && bit < 8;
            assert_eq!(
                guest.write(IA32_QM_EVTSEL, value),
                allowed(event || rmid(32)),
                "QM_EVTSEL, {name}"
            );
            assert_eq!(guest.write(IA32_QM_CTR, value), GP, "QM_CTR, {name}");
            for (msr, leaf) in [(IA32_L3_QOS_CFG, l3), (IA32_L2_QOS_CFG, l2)] {
                let prioritises = leaf.is_some_and(|leaf| leaf[2] & 4 != 0);
                assert_eq!(
                    guest.write(msr, value),
                    allowed(prioritises && bit == 0),
                    "{msr:x}, {name}"
                );
                if prioritises {
                    assert_eq!(guest.write(msr, 0), Value(0));
                }
            }
            for (first, leaf) in [(IA32_L3_QOS_MASK_0, l3), (IA32_L2_QOS_MASK_0, l2)] {
                let highest = leaf.map_or(0, |leaf| leaf[3] & 0xFFFF);
                for class in [0, highest, highest + 1] {
                    let fits = leaf.is_some_and(|leaf| bit <= leaf[0] & 0x1F) && class <= highest;
                    let msr = first + class;
                    assert_eq!(guest.write(msr, value), allowed(fits), "{msr:x}, {name}");
                }
            }
            // Linear delays are rounded down to the part's precision. SDM Vol. 3B 18.19.7.3 "Memory Bandwidth Allocation
            // Configuration".
            let delay = match memory {
                Some(leaf) if value <= u64::from(leaf[0] & 0xFFF) + 1 => {
                    let precision = if leaf[2] & 4 != 0 { 99 - (leaf[0] & 0xFFF) } else { 1 };
                    Value(value - value % u64::from(precision))
                }
                _ => GP,
            };
            assert_eq!(guest.write(IA32_MBA_THRTL_0, value), delay, "MBA, {name}");
        }
        let expected = if monitors { None } else { Some(GP) };
        let read = guest.read(IA32_QM_CTR);
        assert!(expected.is_none_or(|expected| read == expected) && (read != GP || !monitors));
    }
}

/// SDM Vol. 4 Table 2-2 "IA-32 Architectural MSRs", IA32_MISC_ENABLE[18].
// covers: monitor/fsm
#[test]
fn monitor_and_mwait_can_be_switched_off() {
    const UD: End = Vector(6);
    for model in MODELS {
        let mut guest = Guest::new(model);
        let monitor = |guest: &mut Guest| {
            // MOV EAX, 1; CPUID; MOV EAX, ECX; XOR EDX, EDX; HLT
            let code = [
                0x66, 0xB8, 1, 0, 0, 0, 0x0F, 0xA2, 0x66, 0x89, 0xC8, 0x66, 0x31, 0xD2, 0xF4,
            ];
            let Value(features) = guest.run(&code, 0, 0) else {
                panic!("CPUID")
            };
            let executes = guest.run(&[0x0F, 0x01, 0xC8, 0xF4], 0, 0x7000) != UD;
            // MWAIT without an armed line does not wait.
            assert_eq!(
                guest.run(&[0x0F, 0x01, 0xC9, 0xF4], 0, 0) != UD,
                executes,
                "{}",
                model.name
            );
            (features >> 3 & 1 != 0, executes)
        };
        let shown = model.features().monitor();
        assert_eq!(monitor(&mut guest), (shown, shown), "{}", model.name);
        let Value(enables) = guest.read(IA32_MISC_ENABLE) else {
            assert_eq!(model.name, "p6");
            continue;
        };
        let expected = if shown { Value(enables & !(1 << 18)) } else { GP };
        if !shown && enables >> 18 & 1 == 0 {
            continue;
        }
        assert_eq!(
            guest.write(IA32_MISC_ENABLE, enables & !(1 << 18)),
            expected,
            "{}",
            model.name
        );
        assert_eq!(monitor(&mut guest), (false, false), "{}", model.name);
        assert_eq!(guest.write(IA32_MISC_ENABLE, enables), Value(enables));
        assert_eq!(monitor(&mut guest), (shown, shown), "{}", model.name);
    }
}

/// Registers with a value other than that of reset, where the model takes it.
const SET: [(u32, u64); 22] = [
    (IA32_TSC_AUX, 7),
    (IA32_DEBUGCTL, 3),
    (MSR_LBR_SELECT, 1),
    (MSR_LASTBRANCH_TOS, 3),
    (MSR_LASTBRANCH_0_FROM_IP, 0x1234),
    (IA32_LBR_DEPTH, 8),
    (IA32_LBR_0_FROM_IP, 0x1234),
    (IA32_LBR_CTL, 0x7F_0001),
    (IA32_PERFEVTSEL0, 0x41_00C0),
    (IA32_PERFEVTSEL0 + 1, 0x3_00C4),
    (IA32_FIXED_CTR_CTRL, 1),
    (IA32_PEBS_ENABLE, 1),
    (IA32_DS_AREA, 0x5000),
    (IA32_RTIT_OUTPUT_BASE, 0x10_0000),
    (IA32_RTIT_OUTPUT_MASK_PTRS, 0x7F),
    (IA32_RTIT_CR3_MATCH, 0x1000),
    (IA32_RTIT_ADDR0_A, 0x1234),
    (IA32_RTIT_CTL, 0x2005),
    (IA32_PQR_ASSOC, 1),
    (IA32_PQR_ASSOC, 1 << 32),
    (IA32_L3_QOS_MASK_0, 3),
    (IA32_L2_QOS_MASK_0, 3),
];

/// What INIT leaves of the registers, but for the local APIC's: all is as it was (SDM Vol. 3A Table 10-1 "IA-32 and Intel 64
/// Processor States Following Power-up, Reset, or INIT"). Intel PT traces on, and branches are recorded on.
// covers: cpu/registers
#[test]
fn init_leaves_the_registers_as_they_were() {
    for model in MODELS {
        let mut guest = Guest::new(model);
        let set = SET
            .iter()
            .filter(|(msr, value)| guest.write(*msr, *value) != GP)
            .count();
        assert!(set >= 2, "{}: {set}", model.name);
        let numbers = NAMES
            .iter()
            .map(|(msr, _)| *msr)
            .filter(|msr| !(IA32_X2APIC_BASE..=0x8FF).contains(msr) && *msr != IA32_TIME_STAMP_COUNTER);
        let all =
            |guest: &mut Guest| -> Vec<(u32, End)> { numbers.clone().map(|msr| (msr, guest.read(msr))).collect() };
        let before = all(&mut guest);
        let Value(time) = guest.read(IA32_TIME_STAMP_COUNTER) else {
            panic!("no TSC")
        };
        guest
            .engine
            .get()
            .init(&mut guest.cpu, &mut guest.machine.cpu(0), false);
        let s = guest.cpu.state();
        assert_eq!(
            (s.dr[6], s.dr[7], s.cr0.into_bits()),
            (0xFFFF_0FF0, 0x400, 0x6000_0010),
            "{}",
            model.name
        );
        guest.engine.get().start(&mut guest.cpu, &mut guest.machine.cpu(0), 1);
        for ((msr, before), (_, after)) in before.into_iter().zip(all(&mut guest)) {
            let expected = match (msr, before) {
                // What ran in between is what they have seen.
                (IA32_RTIT_STATUS | IA32_RTIT_OUTPUT_MASK_PTRS, _) => after,
                (MSR_LASTBRANCH_TOS | MSR_LASTBRANCH_0_FROM_IP | MSR_LASTBRANCH_0_TO_IP | MSR_LBR_INFO_0, _) => after,
                (MSR_LASTBRANCH_0_NETBURST..=MSR_LER_TO_LIP | MSR_LASTBRANCH_TOS_NETBURST, _) => after,
                (0xC1..=0xC8 | IA32_A_PMC0 | IA32_FIXED_CTR0, _) => after,
                _ => before,
            };
            assert_eq!(after, expected, "{} {msr:x}", model.name);
        }
        let Value(later) = guest.read(IA32_TIME_STAMP_COUNTER) else {
            panic!("no TSC")
        };
        assert!(later > time && later - time < 10_000, "{}: it goes on", model.name);
    }
}
