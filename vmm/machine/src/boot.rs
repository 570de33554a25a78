//! The state in which the boot CPU meets the kernel.

use engine::{CS, CpuState, DS, ES, FS, GS, SS, Segment, Table};
use x86::cr::{Cr0, Cr4, Efer};
use x86::model::CpuModel;

use crate::loader::{Entry, linux, multiboot};

/// Present, code or data, and the type with its accessed bit; then granularity and size.
const CODE_64: u16 = 0xa09b;
const CODE_32: u16 = 0xc09b;
const DATA: u16 = 0xc093;
/// A present TSS of 32 bits, busy.
const BUSY_TSS: u16 = 0x008b;

/// Protected mode without paging.
const PROTECTED: Cr0 = Cr0::new().with_pe(true).with_et(true);

/// Indices into [`CpuState::gpr`].
const RAX: usize = 0;
const RDX: usize = 2;
const RBX: usize = 3;
const RSI: usize = 6;

/// The state at an entry point: what its protocol says, and after reset what it does not.
pub fn state(model: &CpuModel, entry: &Entry) -> CpuState {
    let mut state = CpuState::reset(model);
    let flat = |selector, attributes| Segment {
        selector,
        base: 0,
        limit: u32::MAX,
        attributes,
    };
    let set = |state: &mut CpuState, code: Segment, data: Segment| {
        state.segments[CS] = code;
        for segment in [DS, ES, SS, FS, GS] {
            state.segments[segment] = data;
        }
    };
    state.gpr[RDX] = 0;
    match *entry {
        Entry::Linux64 {
            rip,
            boot_params,
            cr3,
            gdt,
            gdt_limit,
        } => {
            set(&mut state, flat(linux::BOOT_CS, CODE_64), flat(linux::BOOT_DS, DATA));
            state.gdtr = Table {
                base: gdt,
                limit: gdt_limit,
            };
            state.idtr = Table { base: 0, limit: 0 };
            state.cr0 = PROTECTED.with_pg(true);
            state.cr3 = cr3;
            state.cr4 = Cr4::new().with_pae(true);
            state.efer = Efer::new().with_lme(true).with_lma(true);
            state.gpr[RSI] = boot_params;
            state.rip = rip;
        }
        Entry::Linux32 {
            eip,
            boot_params,
            gdt,
            gdt_limit,
        } => {
            set(&mut state, flat(linux::BOOT_CS, CODE_32), flat(linux::BOOT_DS, DATA));
            state.gdtr = Table {
                base: gdt,
                limit: gdt_limit,
            };
            state.idtr = Table { base: 0, limit: 0 };
            state.cr0 = PROTECTED;
            // EBP, EDI and EBX have to be 0.
            state.gpr[RSI] = boot_params.into();
            state.rip = eip.into();
        }
        Entry::Pvh { eip, start_info } => {
            // The selectors' values and GDTR are unspecified; TR is a 32-bit TSS at 0 with a limit of 67H.
            set(&mut state, flat(0x08, CODE_32), flat(0x10, DATA));
            state.gdtr = Table { base: 0, limit: 0 };
            state.idtr = Table { base: 0, limit: 0 };
            state.tr = Segment {
                selector: 0x18,
                base: 0,
                limit: 0x67,
                attributes: BUSY_TSS,
            };
            state.cr0 = PROTECTED;
            state.gpr[RBX] = start_info.into();
            state.rip = eip.into();
        }
        Entry::Multiboot { eip, info } => {
            // 3.2: the selectors' exact values are undefined, and GDTR may be invalid.
            set(&mut state, flat(0x08, CODE_32), flat(0x10, DATA));
            state.gdtr = Table { base: 0, limit: 0 };
            state.idtr = Table { base: 0, limit: 0 };
            state.cr0 = PROTECTED;
            state.gpr[RAX] = multiboot::LOADER_MAGIC.into();
            state.gpr[RBX] = info.into();
            state.rip = eip.into();
        }
    }
    state
}

#[cfg(test)]
mod tests {
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
}
