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
#[path = "boot_test.rs"]
mod tests;
