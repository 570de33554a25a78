extern crate std;

use std::collections::BTreeMap;

use super::*;

const TABLE: u64 = 0x1000;

fn pointer(accessed_dirty: bool) -> EptPointer {
    EptPointer::new()
        .with_memory_type(6)
        .with_walk(3)
        .with_accessed_dirty(accessed_dirty)
        .with_frame(TABLE >> 12)
}

/// Tables that map guest-physical 0x40_0000 on: a 4-KByte page at 0x20_0000 (through 0x4000), a 2-MByte page and a 1-GByte page.
fn tables(leaf: u64) -> BTreeMap<u64, u64> {
    BTreeMap::from([
        (TABLE, 0x2007),
        (0x2000, 0x3007),
        (0x2008, 0x4000_0000 | LARGE | 6 << 3 | 7),
        (0x3000 + 8, 0x4007),
        (0x3000 + 16, 0xa0_0000 | LARGE | 6 << 3 | 7),
        (0x4000, leaf),
    ])
}

fn paging(accessed_dirty: bool) -> EptPaging {
    EptPaging {
        pointer: pointer(accessed_dirty),
        execute_only: true,
        huge: true,
        mode_based: false,
        physical_bits: 39,
    }
}

fn go(memory: &mut BTreeMap<u64, u64>, flags: bool, gpa: u64, access: EptAccess) -> Result<EptPage, EptFault> {
    go_by(&paging(flags), memory, gpa, access)
}

fn go_by(
    paging: &EptPaging,
    memory: &mut BTreeMap<u64, u64>,
    gpa: u64,
    access: EptAccess,
) -> Result<EptPage, EptFault> {
    let before = memory.clone();
    let mut set = std::vec::Vec::new();
    let result = walk(
        paging,
        gpa,
        access,
        &mut |at| before.get(&at).copied().unwrap_or(0),
        &mut |at, bits| set.push((at, bits)),
    );
    for (at, bits) in set {
        *memory.entry(at).or_default() |= bits;
    }
    result
}

// covers: vmx/ept-walk
#[test]
fn pages_of_each_size_translate_and_flags_are_set_where_the_pointer_asks_for_them() {
    for (gpa, physical) in [(0x20_0123, 0x7000), (0x41_2345, 0xa1_2000), (0x4012_3456, 0x4012_3000)] {
        let mut memory = tables(0x7000 | 6 << 3 | 7);
        let page = go(&mut memory, false, gpa, EptAccess::Read).unwrap();
        assert_eq!(
            (page.physical, page.rights, page.dirty),
            (physical, 7, true),
            "{gpa:#x}"
        );
        assert_eq!(
            memory,
            tables(0x7000 | 6 << 3 | 7),
            "no flags without bit 6 of the pointer"
        );
    }
    let mut memory = tables(0x7000 | 6 << 3 | 7);
    let page = go(&mut memory, true, 0x20_0000, EptAccess::Read).unwrap();
    assert!(!page.dirty && page.last == 0x4000);
    for at in [TABLE, 0x2000, 0x3008, 0x4000] {
        assert_eq!(memory[&at] & (ACCESSED | DIRTY), ACCESSED);
    }
    assert!(go(&mut memory, true, 0x20_0000, EptAccess::Write).unwrap().dirty);
    assert_eq!(memory[&0x4000] & DIRTY, DIRTY);
    assert_eq!(memory[&0x3008] & DIRTY, 0);
}

// covers: vmx/ept-violations
#[test]
fn each_access_needs_its_right_and_the_violation_tells_which_there_are() {
    use EptAccess::*;
    for (rights, access, allowed) in [
        (1, Read, true),
        (1, Write, false),
        (1, Fetch, false),
        (3, Write, true),
        (4, Fetch, true),
        (4, Read, false),
        (5, Write, false),
        (0, Read, false),
    ] {
        let mut memory = tables(0x7000 | 6 << 3 | rights);
        match go(&mut memory, false, 0x20_0000, access) {
            Ok(_) => assert!(allowed, "{rights} {access:?}"),
            Err(fault) => {
                assert!(!allowed);
                assert_eq!(
                    fault,
                    EptFault::Violation {
                        rights,
                        convertible: true
                    }
                );
            }
        }
    }
    assert_eq!(
        go(&mut tables(0), false, 1 << 48, Read),
        Err(EptFault::Violation {
            rights: 0,
            convertible: false
        }),
        "beyond the four levels"
    );
}

// covers: vmx/ept-misconfigurations
#[test]
fn reserved_settings_are_misconfigurations() {
    // Entry, level, whether it is one; SDM Vol. 3C 29.3.3.1 "EPT Misconfigurations".
    for (entry, level, wrong, why) in [
        (2, 1, true, "write-only"),
        (6, 1, true, "write and execute, no read"),
        (4, 1, false, "execute-only, which the part has"),
        (0xff8, 1, false, "not present: nothing else counts"),
        (7 | 2 << 3, 1, true, "memory type 2"),
        (7 | 3 << 3, 1, true, "memory type 3"),
        (7 | 7 << 3, 1, true, "memory type 7"),
        (7 | 4 << 3, 1, false, "write-through"),
        (7 | 1 << 39, 1, true, "an address beyond the width"),
        (7 | 1 << 3, 4, true, "bit 3 of a PML4 entry"),
        (7 | LARGE, 4, true, "bit 7 of a PML4 entry"),
        (7 | 1 << 6, 2, true, "bit 6 of an entry that leads to a table"),
        (
            7 | LARGE | 6 << 3 | 1 << 12,
            2,
            true,
            "an address within a 2-MByte page",
        ),
        (
            7 | LARGE | 6 << 3 | 1 << 29,
            3,
            true,
            "an address within a 1-GByte page",
        ),
        (7 | LARGE | 6 << 3 | 1 << 30, 3, false, "a 1-GByte page"),
    ] {
        assert_eq!(paging(false).misconfigured(entry, level), wrong, "{why}");
    }
    let lacks_execute_only = EptPaging {
        execute_only: false,
        ..paging(false)
    };
    assert!(
        lacks_execute_only.misconfigured(4, 1),
        "execute-only, which the part lacks"
    );
    let lacks_huge = EptPaging {
        huge: false,
        ..paging(false)
    };
    assert!(lacks_huge.misconfigured(7 | LARGE, 3), "1 GByte, which the part lacks");
}

// covers: vmx/ept-mode-based
#[test]
fn with_mode_based_execute_control_bit_10_is_the_right_of_user_fetches() {
    use EptAccess::{Fetch, Read, UserFetch};
    // Entry, access, with the control: rights that a violation tells (bit 3 is bit 10 of the entry), `None` where it is allowed.
    // SDM Vol. 3C 29.3.3.2 "EPT Violations".
    for (bits, access, control, violation) in [
        (7, UserFetch, false, None),
        (3 | 1 << 10, Fetch, false, Some(3)),
        (3 | 1 << 10, UserFetch, false, Some(3)),
        (7, Fetch, true, None),
        (7, UserFetch, true, Some(7)),
        (3 | 1 << 10, Fetch, true, Some(11)),
        (3 | 1 << 10, UserFetch, true, None),
        (1 << 10, Read, true, Some(8)),
        (1 << 10, UserFetch, true, None),
        (1 << 10, Read, false, Some(0)),
    ] {
        let by = EptPaging {
            mode_based: control,
            ..paging(false)
        };
        // The entries above give all four rights.
        let mut memory = tables(0x7000 | 6 << 3 | bits);
        for at in [TABLE, 0x2000, 0x3008] {
            *memory.entry(at).or_default() |= 1 << 10;
        }
        let expected = violation.map_or(Ok(0x7000), |rights| {
            Err(EptFault::Violation {
                rights,
                convertible: true,
            })
        });
        let found = go_by(&by, &mut memory, 0x20_0000, access).map(|page| page.physical);
        assert_eq!(found, expected, "{bits:#x} {access:?} {control}");
    }
}

// covers: vmx/virtualization-exceptions
#[test]
fn bit_63_of_the_entry_that_ends_the_walk_keeps_a_violation_from_being_converted() {
    for (leaf, convertible) in [
        (0, true),
        (SUPPRESS, false),
        (0x7000 | 6 << 3 | 4, true),
        (SUPPRESS | 0x7000 | 6 << 3 | 4, false),
    ] {
        let found = go(&mut tables(leaf), false, 0x20_0000, EptAccess::Read);
        let rights = leaf & 7;
        assert_eq!(found, Err(EptFault::Violation { rights, convertible }));
    }
}
