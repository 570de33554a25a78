use super::*;
use x86::model::WESTMERE;

// covers: loader/bzimage
#[test]
fn linux_is_entered_in_64_bit_mode() {
    let entry = Entry::Linux64 {
        rip: 0x100_0200,
        boot_params: 0x7000,
        cr3: 0x9000,
        gdt: 0x500,
        gdt_limit: 31,
    };
    let state = state(&WESTMERE, &entry);
    assert_eq!((state.rip, state.gpr[RSI], state.cr3), (0x100_0200, 0x7000, 0x9000));
    assert!(!state.rflags.interrupt(), "interrupts are off");
    assert!(state.cr0.pg() && state.efer.lma());
    assert!(state.segments[CS].long() && state.segments[CS].selector == 0x10);
    for segment in [DS, ES, SS] {
        assert_eq!(
            (state.segments[segment].selector, state.segments[segment].base),
            (0x18, 0)
        );
    }
    assert_eq!(state.gdtr, Table { base: 0x500, limit: 31 });
}

// covers: loader/pvh, loader/bzimage-32
#[test]
fn pvh_and_32_bit_linux_kernels_are_entered_in_flat_32_bit_protected_mode() {
    let pvh = Entry::Pvh {
        eip: 0x100_0140,
        start_info: 0x6000,
    };
    let linux = Entry::Linux32 {
        eip: 0x10_0000,
        boot_params: 0x7000,
        gdt: 0x500,
        gdt_limit: 31,
    };
    for (entry, rip, rbx, rsi, cs, ds) in [
        (pvh, 0x100_0140, 0x6000, 0, 8, 0x10),
        (linux, 0x10_0000, 0, 0x7000, 0x10, 0x18),
    ] {
        let state = state(&WESTMERE, &entry);
        assert_eq!((state.rip, state.gpr[RBX], state.gpr[RSI]), (rip, rbx, rsi));
        assert_eq!((state.gpr[5], state.gpr[7]), (0, 0));
        assert_eq!((state.efer, state.cr4), (Efer::new(), Cr4::new()));
        assert!(state.cr0.pe() && !state.cr0.pg());
        assert!(!state.rflags.interrupt() && !state.rflags.vm());
        assert_eq!((state.segments[CS].selector, state.segments[DS].selector), (cs, ds));
        for segment in [CS, DS, ES, SS] {
            let segment = &state.segments[segment];
            assert_eq!((segment.base, segment.limit, segment.big()), (0, u32::MAX, true));
        }
    }
}

// covers: loader/multiboot
#[test]
fn multiboot_kernels_are_entered_in_flat_32_bit_protected_mode() {
    let state = state(
        &WESTMERE,
        &Entry::Multiboot {
            eip: 0x10_000c,
            info: 0x1_0000,
        },
    );
    assert_eq!(
        (state.gpr[RAX], state.gpr[RBX], state.rip),
        (0x2bad_b002, 0x1_0000, 0x10_000c)
    );
    assert!(state.cr0.pe() && !state.cr0.pg());
    assert!(!state.rflags.interrupt() && !state.rflags.vm());
    for (segment, kind) in [(CS, 0xb), (DS, 3), (ES, 3), (FS, 3), (GS, 3), (SS, 3)] {
        let segment = &state.segments[segment];
        assert_eq!((segment.base, segment.limit), (0, u32::MAX));
        assert!(segment.big() && segment.present() && segment.kind() == kind);
    }
}
