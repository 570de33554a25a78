//! Tests of the machine and of the bus of its CPUs.

use super::*;
use engine::bus::Bus;
use x86::model::{HASWELL, ICELAKE_SERVER, SKYLAKE_SERVER, WESTMERE};
use x86::msr::{IA32_BIOS_SIGN_ID, IA32_TIME_STAMP_COUNTER, IA32_TSC_ADJUST};
use x86::msr::{IA32_L3_QOS_MASK_0, IA32_PQR_ASSOC, IA32_QM_CTR, IA32_QM_EVTSEL};
use x86::watch::{Access, AccessKind};

fn machine() -> Machine {
    Machine::new(
        &WESTMERE,
        1,
        Memory::new(2 << 20).unwrap(),
        0,
        7,
        Box::new(std::io::sink()),
    )
}

// covers: devices/unclaimed
#[test]
fn unclaimed_ports_and_addresses_read_all_ones() {
    let mut machine = machine();
    for (size, ones) in [(1, 0xff), (2, 0xffff), (4, 0xffff_ffff)] {
        assert_eq!(machine.cpu(0).port_read(0x2f8, size, 0), ones);
        assert_eq!(machine.cpu(0).read(0xd000_0000, size, 0), u64::from(ones));
    }
    assert_eq!(machine.cpu(0).read(0xd000_0000, 8, 0), u64::MAX);
    machine.cpu(0).write(0xd000_0000, 8, 1, 0);
    machine.cpu(0).port_write(0x2f8, 1, 1, 0);
    assert_eq!(
        machine.accesses(),
        Accesses {
            ports: 4,
            mmio: 5,
            msrs: 0
        }
    );
}

// covers: cpu/msr
#[test]
fn msrs_come_from_the_apic_the_model_or_fault() {
    const GP: MsrFault = MsrFault::GeneralProtection;
    let mut machine = machine();
    assert_eq!(
        machine.cpu(0).rdmsr(0x1b, 0).unwrap() & !0xfff,
        0xfee0_0000,
        "IA32_APIC_BASE"
    );
    for (index, row) in WESTMERE.msrs.iter().enumerate() {
        if row.msr != IA32_BIOS_SIGN_ID {
            assert_eq!(
                machine.cpu(0).rdmsr(row.msr, 0),
                Ok(row.reset),
                "{} ({index})",
                row.name
            );
        }
    }
    assert_eq!(machine.cpu(0).rdmsr(0x277, 0), Ok(0x0007_0406_0007_0406), "IA32_PAT");
    machine.cpu(0).wrmsr(0x277, 0x0606, 0).unwrap();
    assert_eq!(machine.cpu(0).rdmsr(0x277, 0), Ok(0x0606));
    assert_eq!(machine.cpu(0).wrmsr(0x277, 2, 0), Err(GP), "no such memory type");
    assert_eq!(machine.cpu(0).wrmsr(0xfe, 0, 0), Err(GP), "IA32_MTRRCAP is read-only");
    for absent in [0x3b, 0x48, 0x6e0, 0xc001_1029, 0xffff_ffff] {
        assert_eq!(machine.cpu(0).rdmsr(absent, 0), Err(GP), "{absent:#x}");
        assert_eq!(machine.cpu(0).wrmsr(absent, 0, 0), Err(GP), "{absent:#x}");
    }
}

// covers: cpu/msr
#[test]
fn the_tsc_counts_steps_from_where_it_was_set() {
    let mut machine = machine();
    assert_eq!(machine.cpu(0).tsc(1000), 1000);
    machine.cpu(0).wrmsr(IA32_TIME_STAMP_COUNTER, 5, 1000).unwrap();
    assert_eq!(machine.cpu(0).tsc(1000), 5);
    assert_eq!(machine.cpu(0).rdmsr(IA32_TIME_STAMP_COUNTER, 1010), Ok(15));
    machine.cpu(0).port_read(0x80, 1, 1010);
    let microsecond = u64::from(WESTMERE.tsc_khz).div_ceil(1000);
    assert_eq!(machine.cpu(0).tsc(1010), 15 + microsecond, "what a port access takes");
}

// covers: tsc/low-half
#[test]
fn the_oldest_parts_write_half_of_the_tsc() {
    for (model, reads) in [
        (&x86::model::P6, 0x9ABC),
        (&x86::model::NETBURST, 0x9ABC),
        (&WESTMERE, 0x1234_0000_9ABC),
    ] {
        let memory = Memory::new(2 << 20).unwrap();
        let mut machine = Machine::new(model, 1, memory, 0, 1, Box::new(std::io::sink()));
        machine
            .cpu(0)
            .wrmsr(IA32_TIME_STAMP_COUNTER, 0x1234_0000_9ABC, 10)
            .unwrap();
        assert_eq!(machine.cpu(0).tsc(10), reads, "{}", model.name);
    }
}

// covers: tsc/offset
#[test]
fn an_offset_of_the_hosts_is_no_adjustment_of_the_guests() {
    let memory = Memory::new(2 << 20).unwrap();
    let mut machine = Machine::new(&HASWELL, 2, memory, 0, 1, Box::new(std::io::sink()));
    machine.set_tsc_offset(u64::MAX - 9);
    for cpu in 0..2 {
        let mut bus = machine.cpu(cpu);
        assert_eq!((bus.tsc(0), bus.tsc(10)), (u64::MAX - 9, 0), "it wraps");
        assert_eq!(bus.rdmsr(IA32_TSC_ADJUST, 10), Ok(0));
        // What the guest adds stands on top of it.
        bus.wrmsr(IA32_TSC_ADJUST, 5, 10).unwrap();
        assert_eq!(bus.tsc(10), 5);
        bus.wrmsr(IA32_TIME_STAMP_COUNTER, 100, 10).unwrap();
        assert_eq!(bus.rdmsr(IA32_TSC_ADJUST, 10), Ok(100));
        bus.wrmsr(IA32_TSC_ADJUST, 0, 10).unwrap();
        assert_eq!(bus.tsc(10), 0);
    }
}

// covers: cpu/cpuid
#[test]
fn cpuid_is_the_models_with_the_apics_state() {
    let mut machine = machine();
    for row in WESTMERE.cpuid.iter().filter(|row| row.leaf != 1) {
        assert_eq!(machine.cpu(0).cpuid(row.leaf, row.subleaf.unwrap_or(0)), row.regs);
    }
    assert_eq!(machine.cpu(0).cpuid(1, 0)[3] >> 9 & 1, 1);
    machine.cpu(0).wrmsr(IA32_BIOS_SIGN_ID, 0, 0).unwrap();
    machine.cpu(0).cpuid(1, 0);
    assert_eq!(
        machine.cpu(0).rdmsr(IA32_BIOS_SIGN_ID, 0),
        Ok(u64::from(WESTMERE.microcode) << 32)
    );
    // IA32_APIC_BASE.EN off.
    let base = machine.cpu(0).rdmsr(0x1b, 0).unwrap();
    machine.cpu(0).wrmsr(0x1b, base & !(1 << 11), 0).unwrap();
    assert_eq!(machine.cpu(0).cpuid(1, 0)[3] >> 9 & 1, 0);
}

#[test]
fn the_state_goes_out_and_comes_back() {
    let mut a = machine();
    a.cpu(0).wrmsr(IA32_TIME_STAMP_COUNTER, 1 << 40, 10).unwrap();
    a.cpu(0).wrmsr(0x277, 0x0606, 0).unwrap();
    a.cpu(0).port_write(0x43, 1, 0x36, 20);
    a.cpu(0).random();
    let mut b = Machine::new(
        &WESTMERE,
        1,
        Memory::new(2 << 20).unwrap(),
        99,
        1,
        Box::new(std::io::sink()),
    );
    b.set_state(&a.state()).unwrap();
    assert_eq!(a.state(), b.state());
    assert_eq!(
        (a.cpu(0).random(), a.cpu(0).tsc(50)),
        (b.cpu(0).random(), b.cpu(0).tsc(50))
    );
    let state = a.state();
    for cpus in [
        vec![],
        vec![state.cpus[0].clone(); 2],
        vec![PerCpu::new(&HASWELL, CpuPosition::ALONE)],
    ] {
        b.set_state(&MachineState { cpus, ..state.clone() }).unwrap_err();
    }
}

// covers: rdt/occupancy
#[test]
fn the_caches_are_modelled_from_the_first_association_on() {
    let new = || {
        let memory = Memory::new(2 << 20).unwrap();
        Machine::new(&SKYLAKE_SERVER, 2, memory, 0, 1, Box::new(std::io::sink()))
    };
    let (mut a, mut b) = (new(), new());
    a.cpu(0).wrmsr(IA32_PQR_ASSOC, 0, 0).unwrap();
    a.cpu(0).wrmsr(IA32_QM_EVTSEL, 0, 0).unwrap();
    assert!(a.state().caches.is_none());
    a.cpu(1).wrmsr(IA32_QM_EVTSEL, 3 << 32 | 1, 0).unwrap();
    assert_eq!(a.cpu(1).rdmsr(IA32_QM_CTR, 0), Ok(0));
    a.cpu(1).wrmsr(IA32_PQR_ASSOC, 3, 0).unwrap();
    let access = |line: u64| Access {
        address: line * 64,
        size: 8,
        kind: AccessKind::Read,
        ip: 0,
    };
    for line in 0..0x18000 / 64 * 5 {
        a.watchers[1]
            .units
            .caches
            .as_mut()
            .unwrap()
            .access(&access(line), 0, Some);
    }
    assert_eq!(a.cpu(1).rdmsr(IA32_QM_CTR, 0), Ok(5));
    b.set_state(&a.state()).unwrap();
    assert_eq!(b.cpu(1).rdmsr(IA32_QM_CTR, 0), Ok(5));
    assert_eq!(a.state(), b.state());
    b.set_state(&new().state()).unwrap();
    assert_eq!(b.state(), new().state());
}

/// SDM Vol. 3B 18.19.3: the masks of a class of service, and what the monitoring counts, are a package's own.
// covers: smp/topology
#[test]
fn each_package_has_its_own_masks_and_counts() {
    let memory = Memory::new(2 << 20).unwrap();
    let topology = Topology::new(4, Some(2), None, None).unwrap();
    let mut machine = Machine::new(&ICELAKE_SERVER, topology, memory, 0, 1, Box::new(std::io::sink()));
    machine.cpu(1).wrmsr(IA32_L3_QOS_MASK_0, 0xf, 0).unwrap();
    machine.cpu(3).wrmsr(IA32_L3_QOS_MASK_0, 0x3, 0).unwrap();
    let masks = [0, 1, 2, 3].map(|cpu| machine.cpu(cpu).rdmsr(IA32_L3_QOS_MASK_0, 0).unwrap());
    assert_eq!(masks, [0xf, 0xf, 0x3, 0x3]);
    // One RMID in both: each package counts its own lines.
    for cpu in 0..4 {
        machine.cpu(cpu).wrmsr(IA32_QM_EVTSEL, 3 << 32 | 1, 0).unwrap();
        machine.cpu(cpu).wrmsr(IA32_PQR_ASSOC, 3, 0).unwrap();
    }
    for line in 0..0x20000 / 64 * 4 {
        let access = Access {
            address: line * 64,
            size: 8,
            kind: AccessKind::Read,
            ip: 0,
        };
        let caches = machine.watchers[1].units.caches.as_mut().unwrap();
        caches.access(&access, 0, Some);
    }
    let counts = [0, 1, 2, 3].map(|cpu| machine.cpu(cpu).rdmsr(IA32_QM_CTR, 0).unwrap());
    assert!(counts[0] > 0 && counts[0] == counts[1], "{counts:?}");
    assert_eq!(counts[2..], [0, 0]);
    // A state goes to a machine with as many packages alone.
    let state = machine.state();
    let mut other = Machine::new(
        &ICELAKE_SERVER,
        4,
        Memory::new(2 << 20).unwrap(),
        0,
        1,
        Box::new(std::io::sink()),
    );
    let error = other.set_state(&state).unwrap_err();
    assert_eq!(error.to_string(), "the state has 2 packages of CPUs, the machine has 1");
    machine.set_state(&state).unwrap();
    assert_eq!(machine.state(), state);
}

// covers: loader/acpi-power
#[test]
fn what_the_tables_say_powers_off_and_resets() {
    let mut machine = machine();
    let sleep = u32::from(HARDWARE.soft_off) << 10 | 1 << 13;
    machine.cpu(0).port_write(HARDWARE.pm1a_control, 2, sleep, 0);
    assert_eq!(machine.advance(0), [Effect::PowerOff]);
    let (port, value) = HARDWARE.reset;
    machine.cpu(0).port_write(port, 1, value.into(), 0);
    assert_eq!(machine.advance(0), [Effect::Reset]);
    let first = machine.cpu(0).port_read(HARDWARE.pm_timer, 4, 0);
    let later = machine
        .cpu(0)
        .port_read(HARDWARE.pm_timer, 4, u64::from(WESTMERE.tsc_khz) * 1000);
    assert!(
        (3_579_540..3_579_560).contains(&(later - first)),
        "3.579545 MHz: {}",
        later - first
    );
}
