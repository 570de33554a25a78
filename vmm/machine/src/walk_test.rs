use engine::{Guest, Vmx};
use x86::model::WESTMERE;
use x86::vmx::ept::EptPointer;

use super::*;

/// A guest in VMX non-root operation whose page tables are at guest-physical 1000H on, in 64-bit mode, and whose EPT maps guest-physical
/// pages 64 KBytes further up.
fn guest(memory: &Memory) -> CpuState {
    const EPT: u64 = 0x8_0000;
    const OFFSET: u64 = 0x1_0000;
    let write = |at: u64, entry: u64| memory.write(at, &entry.to_le_bytes()).unwrap();
    for (at, entry) in [(0, EPT + 0x1007), (0x1000, EPT + 0x2007), (0x2000, EPT + 0x3007)] {
        write(EPT + at, entry);
    }
    for page in 0..16 {
        write(EPT + 0x3000 + 8 * page, page << 12 | OFFSET | 6 << 3 | 7);
    }
    // Linear 0 to FFFH is at guest-physical 5000H, linear 1000H on at F0000H, which EPT does not map.
    for (at, entry) in [
        (0x1000, 0x2007),
        (0x2000, 0x3007),
        (0x3000, 0x4007),
        (0x4000, 0x5007),
        (0x4008, 0xf_0007),
    ] {
        write(at + OFFSET, entry);
    }
    let pointer = EptPointer::new().with_memory_type(6).with_walk(3).with_frame(EPT >> 12);
    CpuState {
        cr0: 0x8000_0011.into(),
        cr3: 0x1000,
        cr4: 0x20.into(),
        efer: 0x500.into(),
        vmx: Some(Box::new(Vmx {
            guest: Some(Guest {
                ept: Some(pointer),
                ..Guest::default()
            }),
            ..Vmx::default()
        })),
        ..CpuState::reset(&WESTMERE)
    }
}

// covers: monitor/pagewalk-ept
#[test]
fn addresses_of_a_guest_in_non_root_operation_go_through_ept() {
    let memory = Memory::new(2 << 20).unwrap();
    let cpu = guest(&memory);
    assert_eq!(translate(&memory, &cpu, 0x123), Some(0x1_5123));
    let (entries, physical) = steps(&memory, &cpu, 0x123);
    assert_eq!((entries.len(), physical), (4, Some(0x5123)), "guest-physical");
    let (entries, physical) = ept_steps(&memory, &cpu, 0x5123).unwrap();
    assert_eq!(physical, Some(0x1_5123));
    let addresses: Vec<u64> = entries.iter().map(|entry| entry.0).collect();
    assert_eq!(addresses, [0x8_0000, 0x8_1000, 0x8_2000, 0x8_3000 + 5 * 8]);
    // What EPT does not map is nowhere.
    assert_eq!(translate(&memory, &cpu, 0x1000), None);
    assert_eq!(steps(&memory, &cpu, 0x1000).1, Some(0xf_0000));
    // The VMM itself has none.
    let mut root = cpu;
    root.vmx = Some(Box::default());
    assert_eq!(ept_steps(&memory, &root, 0x5123), None);
    assert_eq!(host_physical(&memory, &root, 0x5123), Some(0x5123));
}
