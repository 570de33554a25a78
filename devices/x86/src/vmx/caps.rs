//! What a part can do in VMX operation, and the MSRs that say so. SDM Vol. 3D Appendix A "VMX Capability Reporting Facility".
//!
//! A part's capabilities are a row of its model. A guest sees those that the engine executes ([`ENGINE`]) and no other, as it is
//! with CPUID.

use alloc::vec::Vec;

use super::controls::{Entry, Exit, Pin, Primary, Secondary, default1};
use super::fields::{FIELDS, REGION};
use crate::cpuid::Features;
use crate::cr::Cr4;
use crate::model::MsrRow;

/// The VMCS revision identifier: ours, whatever the part. The layout of a region follows it.
pub const REVISION: u32 = 0x004d_0001;

/// Capabilities: the controls that can be 1, and what has no control.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VmxCaps {
    /// Pin-based controls.
    pub pin: Pin,
    /// Primary processor-based controls.
    pub primary: Primary,
    /// Secondary processor-based controls.
    pub secondary: Secondary,
    /// VM-exit controls.
    pub exit: Exit,
    /// VM-entry controls.
    pub entry: Entry,
    /// There are capability MSRs with "TRUE" in their names: some of the controls that default to 1 can be 0.
    pub true_controls: bool,
    /// VMWRITE writes VM-exit information, too: IA32_VMX_MISC\[29\].
    pub write_all_fields: bool,
    /// Software interrupts and exceptions of length 0 can be injected: IA32_VMX_MISC\[30\].
    pub zero_length: bool,
    /// Intel PT can be used in VMX operation: IA32_VMX_MISC\[14\].
    pub trace: bool,
    /// EPT: execute-only translations.
    pub execute_only: bool,
    /// EPT: 1-GByte pages.
    pub huge: bool,
    /// EPT: accessed and dirty flags.
    pub accessed_dirty: bool,
    /// VM functions that can be enabled.
    pub functions: u64,
}

/// What every part with VMX has. SDM Vol. 3D Appendix A.
const BASE: VmxCaps = VmxCaps {
    pin: Pin(Pin::EXTERNAL_INTERRUPTS.0 | Pin::NMIS.0),
    primary: Primary(
        Primary::INTERRUPT_WINDOW.0
            | Primary::TSC_OFFSETTING.0
            | Primary::HLT.0
            | Primary::INVLPG.0
            | Primary::MWAIT.0
            | Primary::RDPMC.0
            | Primary::RDTSC.0
            | Primary::CR3_LOAD.0
            | Primary::CR3_STORE.0
            | Primary::CR8_LOAD.0
            | Primary::CR8_STORE.0
            | Primary::MOV_DR.0
            | Primary::UNCONDITIONAL_IO.0
            | Primary::IO_BITMAPS.0
            | Primary::MSR_BITMAPS.0
            | Primary::MONITOR.0
            | Primary::PAUSE.0,
    ),
    secondary: Secondary::NONE,
    exit: Exit(Exit::SAVE_DEBUG.0 | Exit::HOST_64BIT.0 | Exit::ACKNOWLEDGE.0),
    entry: Entry(Entry::LOAD_DEBUG.0 | Entry::GUEST_64BIT.0),
    true_controls: false,
    write_all_fields: false,
    zero_length: false,
    trace: false,
    execute_only: false,
    huge: false,
    accessed_dirty: false,
    functions: 0,
};

/// Core 2: TPR shadow, virtual NMIs, APIC accesses and WBINVD exiting; no EPT.
pub const CORE2: VmxCaps = VmxCaps {
    pin: Pin(BASE.pin.0 | Pin::VIRTUAL_NMIS.0),
    primary: Primary(BASE.primary.0 | Primary::TPR_SHADOW.0 | Primary::NMI_WINDOW.0 | Primary::SECONDARY.0),
    secondary: Secondary(Secondary::APIC_ACCESSES.0 | Secondary::WBINVD.0),
    ..BASE
};

/// Westmere: EPT, VPID, unrestricted guest, the preemption timer.
pub const WESTMERE: VmxCaps = VmxCaps {
    pin: Pin(CORE2.pin.0 | Pin::PREEMPTION_TIMER.0),
    primary: Primary(CORE2.primary.0 | Primary::MONITOR_TRAP.0),
    secondary: Secondary(
        CORE2.secondary.0
            | Secondary::EPT.0
            | Secondary::DESCRIPTOR_TABLES.0
            | Secondary::RDTSCP.0
            | Secondary::X2APIC.0
            | Secondary::VPID.0
            | Secondary::UNRESTRICTED.0
            | Secondary::PAUSE_LOOP.0,
    ),
    exit: Exit(
        CORE2.exit.0
            | Exit::LOAD_PERF_GLOBAL_CTRL.0
            | Exit::SAVE_PAT.0
            | Exit::LOAD_PAT.0
            | Exit::SAVE_EFER.0
            | Exit::LOAD_EFER.0
            | Exit::SAVE_PREEMPTION_TIMER.0,
    ),
    entry: Entry(CORE2.entry.0 | Entry::LOAD_PERF_GLOBAL_CTRL.0 | Entry::LOAD_PAT.0 | Entry::LOAD_EFER.0),
    true_controls: true,
    execute_only: true,
    huge: true,
    ..CORE2
};

/// Haswell: accessed and dirty flags, VM functions, VMCS shadowing, INVPCID and RDRAND.
pub const HASWELL: VmxCaps = VmxCaps {
    secondary: Secondary(
        WESTMERE.secondary.0
            | Secondary::RDRAND.0
            | Secondary::INVPCID.0
            | Secondary::VM_FUNCTIONS.0
            | Secondary::VMCS_SHADOWING.0,
    ),
    write_all_fields: true,
    accessed_dirty: true,
    functions: 1,
    ..WESTMERE
};

/// Broadwell servers: page-modification logging, #VE, RDSEED, virtual interrupts, Intel PT outside VMX operation alone.
///
/// Linux says `apicv` in /proc/cpuinfo where APIC-register virtualization, virtual-interrupt delivery and posted interrupts are there: on Xeon
/// E5 of the third generation and later, the Xeon W-2135 (as `skylake-server`) and the Core i5-12400 (as `alderlake`), but not on the Core
/// i5-4590, which is of the same stepping as `haswell`.
pub const BROADWELL: VmxCaps = VmxCaps {
    pin: Pin(HASWELL.pin.0 | Pin::POSTED_INTERRUPTS.0),
    secondary: Secondary(
        HASWELL.secondary.0
            | Secondary::RDSEED.0
            | Secondary::PML.0
            | Secondary::VIRTUALIZATION_EXCEPTION.0
            | Secondary::APIC_REGISTERS.0
            | Secondary::VIRTUAL_INTERRUPTS.0,
    ),
    ..HASWELL
};

/// Skylake servers: XSAVES, TSC scaling, mode-based execute control, Intel PT in VMX operation.
pub const SKYLAKE_SERVER: VmxCaps = VmxCaps {
    secondary: Secondary(
        BROADWELL.secondary.0
            | Secondary::XSAVES.0
            | Secondary::TSC_SCALING.0
            | Secondary::MODE_BASED_EXECUTE.0
            | Secondary::CONCEAL_FROM_PT.0,
    ),
    exit: Exit(BROADWELL.exit.0 | Exit::CONCEAL_FROM_PT.0),
    entry: Entry(BROADWELL.entry.0 | Entry::CONCEAL_FROM_PT.0),
    zero_length: true,
    trace: true,
    ..BROADWELL
};

/// Ice Lake servers: Intel PT with guest-physical output.
pub const ICELAKE_SERVER: VmxCaps = VmxCaps {
    secondary: Secondary(SKYLAKE_SERVER.secondary.0 | Secondary::PT_GUEST_PHYSICAL.0),
    exit: Exit(SKYLAKE_SERVER.exit.0 | Exit::CLEAR_RTIT_CTL.0),
    entry: Entry(SKYLAKE_SERVER.entry.0 | Entry::LOAD_RTIT_CTL.0),
    ..SKYLAKE_SERVER
};

/// Alder Lake: user wait, architectural last-branch records.
pub const ALDERLAKE: VmxCaps = VmxCaps {
    secondary: Secondary(ICELAKE_SERVER.secondary.0 | Secondary::USER_WAIT.0),
    exit: Exit(ICELAKE_SERVER.exit.0 | Exit::CLEAR_LBR_CTL.0),
    entry: Entry(ICELAKE_SERVER.entry.0 | Entry::LOAD_LBR_CTL.0),
    ..ICELAKE_SERVER
};

/// Sapphire Rapids: protection keys for supervisor pages as well, and bus-lock detection.
pub const SAPPHIRERAPIDS: VmxCaps = VmxCaps {
    secondary: Secondary(ALDERLAKE.secondary.0 | Secondary::BUS_LOCK.0),
    exit: Exit(ALDERLAKE.exit.0 | Exit::LOAD_PKRS.0),
    entry: Entry(ALDERLAKE.entry.0 | Entry::LOAD_PKRS.0),
    ..ALDERLAKE
};

/// What the engine executes. What of a part's capabilities is not here its capability MSRs deny.
pub const ENGINE: VmxCaps = VmxCaps {
    pin: Pin(Pin::EXTERNAL_INTERRUPTS.0
        | Pin::NMIS.0
        | Pin::VIRTUAL_NMIS.0
        | Pin::PREEMPTION_TIMER.0
        | Pin::POSTED_INTERRUPTS.0),
    primary: Primary(
        BASE.primary.0 | Primary::NMI_WINDOW.0 | Primary::TPR_SHADOW.0 | Primary::MONITOR_TRAP.0 | Primary::SECONDARY.0,
    ),
    secondary: Secondary(
        Secondary::APIC_ACCESSES.0
            | Secondary::X2APIC.0
            | Secondary::APIC_REGISTERS.0
            | Secondary::VIRTUAL_INTERRUPTS.0
            | Secondary::EPT.0
            | Secondary::DESCRIPTOR_TABLES.0
            | Secondary::RDTSCP.0
            | Secondary::VPID.0
            | Secondary::WBINVD.0
            | Secondary::UNRESTRICTED.0
            | Secondary::RDRAND.0
            | Secondary::INVPCID.0
            | Secondary::RDSEED.0
            | Secondary::XSAVES.0
            | Secondary::TSC_SCALING.0
            | Secondary::PAUSE_LOOP.0
            | Secondary::VM_FUNCTIONS.0
            | Secondary::VMCS_SHADOWING.0
            | Secondary::PML.0
            | Secondary::VIRTUALIZATION_EXCEPTION.0
            | Secondary::MODE_BASED_EXECUTE.0
            | Secondary::CONCEAL_FROM_PT.0
            | Secondary::PT_GUEST_PHYSICAL.0
            | Secondary::USER_WAIT.0,
    ),
    exit: Exit(
        BASE.exit.0
            | Exit::SAVE_PREEMPTION_TIMER.0
            | Exit::LOAD_PERF_GLOBAL_CTRL.0
            | Exit::SAVE_PAT.0
            | Exit::LOAD_PAT.0
            | Exit::SAVE_EFER.0
            | Exit::LOAD_EFER.0
            | Exit::CONCEAL_FROM_PT.0
            | Exit::CLEAR_RTIT_CTL.0
            | Exit::CLEAR_LBR_CTL.0
            | Exit::LOAD_PKRS.0,
    ),
    entry: Entry(
        BASE.entry.0
            | Entry::LOAD_PERF_GLOBAL_CTRL.0
            | Entry::LOAD_PAT.0
            | Entry::LOAD_EFER.0
            | Entry::CONCEAL_FROM_PT.0
            | Entry::LOAD_RTIT_CTL.0
            | Entry::LOAD_LBR_CTL.0
            | Entry::LOAD_PKRS.0,
    ),
    true_controls: true,
    write_all_fields: true,
    zero_length: true,
    trace: true,
    execute_only: true,
    huge: true,
    accessed_dirty: true,
    functions: 1,
};

/// Fixed bits of CR0 in VMX operation: PE, NE and PG. SDM Vol. 3D Appendix A.7 "VMX-Fixed Bits in CR0".
pub const CR0_FIXED0: u64 = 0x8000_0021;
/// Every bit of CR0 can be 1.
pub const CR0_FIXED1: u64 = 0xffff_ffff;
/// Fixed bits of CR4: VMXE. SDM Vol. 3D Appendix A.8 "VMX-Fixed Bits in CR4".
pub const CR4_FIXED0: u64 = 1 << 13;
/// CR3-target values.
pub const CR3_TARGETS: u32 = 4;
/// Entries of an MSR list that software may rely on: 512 times (IA32_VMX_MISC\[27:25\] plus 1).
pub const MSR_LIST: u32 = 512;

/// The VMX-preemption timer counts down each time that this bit of the time-stamp counter changes: IA32_VMX_MISC\[4:0\].
pub const TIMER_RATE: u32 = 5;

/// Bits of CR4 that can be 1 in VMX operation.
pub const fn cr4_fixed1(features: Features) -> u64 {
    !Cr4::reserved(features)
}

/// A capability MSR of controls: the bits that must be 1 in the lower half, those that can be 1 in the upper.
const fn allowed(must: u32, can: u32) -> u64 {
    ((can | must) as u64) << 32 | must as u64
}

impl VmxCaps {
    /// What of a part's capabilities a guest sees: what the engine executes. A control that needs a feature that is hidden goes
    /// with it.
    pub const fn shown(self, features: Features) -> VmxCaps {
        let mut secondary = self.secondary.0 & ENGINE.secondary.0;
        let mut exit = self.exit.0 & ENGINE.exit.0;
        let mut entry = self.entry.0 & ENGINE.entry.0;
        if !features.x2apic() {
            secondary &= !Secondary::X2APIC.0;
        }
        if !features.rdtscp() {
            secondary &= !Secondary::RDTSCP.0;
        }
        if !features.invpcid() {
            secondary &= !Secondary::INVPCID.0;
        }
        if !features.rdrand() {
            secondary &= !Secondary::RDRAND.0;
        }
        if !features.rdseed() {
            secondary &= !Secondary::RDSEED.0;
        }
        if !features.xsaves() {
            secondary &= !Secondary::XSAVES.0;
        }
        if !features.intel_pt() {
            secondary &= !(Secondary::CONCEAL_FROM_PT.0 | Secondary::PT_GUEST_PHYSICAL.0);
            exit &= !(Exit::CONCEAL_FROM_PT.0 | Exit::CLEAR_RTIT_CTL.0);
            entry &= !(Entry::CONCEAL_FROM_PT.0 | Entry::LOAD_RTIT_CTL.0);
        }
        if !features.arch_lbr() {
            exit &= !Exit::CLEAR_LBR_CTL.0;
            entry &= !Entry::LOAD_LBR_CTL.0;
        }
        if !features.waitpkg() {
            secondary &= !Secondary::USER_WAIT.0;
        }
        if !features.pks() {
            exit &= !Exit::LOAD_PKRS.0;
            entry &= !Entry::LOAD_PKRS.0;
        }
        if !features.lm() {
            exit &= !(Exit::HOST_64BIT.0 | Exit::SAVE_EFER.0 | Exit::LOAD_EFER.0);
            entry &= !(Entry::GUEST_64BIT.0 | Entry::LOAD_EFER.0);
        }
        if !features.pdcm() {
            exit &= !Exit::LOAD_PERF_GLOBAL_CTRL.0;
            entry &= !Entry::LOAD_PERF_GLOBAL_CTRL.0;
        }
        VmxCaps {
            pin: self.pin.and(ENGINE.pin),
            primary: self.primary.and(ENGINE.primary),
            secondary: Secondary(secondary),
            exit: Exit(exit),
            entry: Entry(entry),
            true_controls: self.true_controls && ENGINE.true_controls,
            write_all_fields: self.write_all_fields && ENGINE.write_all_fields,
            zero_length: self.zero_length && ENGINE.zero_length,
            trace: self.trace && ENGINE.trace && features.intel_pt(),
            execute_only: self.execute_only && ENGINE.execute_only,
            huge: self.huge && ENGINE.huge,
            accessed_dirty: self.accessed_dirty && ENGINE.accessed_dirty,
            functions: self.functions & ENGINE.functions,
        }
    }

    /// The controls that must be 1: pin-based, primary, VM-exit, VM-entry. Those of the default1 class that a capability MSR with
    /// "TRUE" in its name lets be 0 are CR3-load and CR3-store exiting and the handling of debug controls.
    pub const fn must_be_1(&self) -> (u32, u32, u32, u32) {
        if self.true_controls {
            (
                default1::PIN,
                default1::PRIMARY & !(Primary::CR3_LOAD.0 | Primary::CR3_STORE.0),
                default1::EXIT & !Exit::SAVE_DEBUG.0,
                default1::ENTRY & !Entry::LOAD_DEBUG.0,
            )
        } else {
            (default1::PIN, default1::PRIMARY, default1::EXIT, default1::ENTRY)
        }
    }

    /// IA32_VMX_BASIC: revision, size of a region, write-back (53:50), information for INS and OUTS (54), "TRUE" MSRs (55). No
    /// dual-monitor treatment (49). SDM Vol. 3D Appendix A.1.
    pub const fn basic(&self) -> u64 {
        REVISION as u64 | (REGION as u64) << 32 | 6 << 50 | 1 << 54 | (self.true_controls as u64) << 55
    }

    /// IA32_VMX_MISC: the rate of the VMX-preemption timer (4:0), VM exits store EFER.LMA (5), activity states HLT, shutdown and wait-for-SIPI (8:6), CR3-target values
    /// (24:16). SDM Vol. 3D Appendix A.6.
    pub const fn misc(&self) -> u64 {
        let rate = if self.pin.contains(Pin::PREEMPTION_TIMER) {
            TIMER_RATE as u64
        } else {
            0
        };
        rate | (self.secondary.contains(Secondary::UNRESTRICTED) as u64) << 5
            | 7 << 6
            | (self.trace as u64) << 14
            | (CR3_TARGETS as u64) << 16
            | (self.write_all_fields as u64) << 29
            | (self.zero_length as u64) << 30
    }

    /// IA32_VMX_EPT_VPID_CAP: page walks of four levels (6), uncacheable (8) and write-back (14) tables, 2-MByte (16) and 1-GByte
    /// (17) pages, INVEPT (20) of one (25) and of all contexts (26), INVVPID (32) of each type (43:40). SDM Vol. 3D Appendix A.10.
    pub const fn ept_vpid(&self) -> u64 {
        let ept = if self.secondary.contains(Secondary::EPT) {
            self.execute_only as u64
                | 1 << 6
                | 1 << 8
                | 1 << 14
                | 1 << 16
                | (self.huge as u64) << 17
                | 1 << 20
                | (self.accessed_dirty as u64) << 21
                | 1 << 25
                | 1 << 26
        } else {
            0
        };
        let vpid = if self.secondary.contains(Secondary::VPID) {
            1 << 32 | 0xf << 40
        } else {
            0
        };
        ept | vpid
    }

    /// The highest index of a field, in bits 9:1. SDM Vol. 3D Appendix A.9.
    pub const fn vmcs_enum(&self) -> u64 {
        let (mut highest, mut n) = (0, 0);
        while n < FIELDS.len() {
            let index = FIELDS[n].field.0 & 0x3fe;
            if FIELDS[n].exists(self) && index > highest {
                highest = index;
            }
            n += 1;
        }
        highest as u64
    }

    /// The capability MSRs of a part with these features, ascending, and how many of the rows they are.
    pub const fn rows(&self, features: Features) -> ([MsrRow; 18], usize) {
        let (pin, primary, exit, entry) = self.must_be_1();
        let mut rows = [MsrRow::read_only(0x480, "IA32_VMX_BASIC", self.basic()); 18];
        let always = [
            MsrRow::read_only(0x481, "IA32_VMX_PINBASED_CTLS", allowed(default1::PIN, self.pin.0)),
            MsrRow::read_only(
                0x482,
                "IA32_VMX_PROCBASED_CTLS",
                allowed(default1::PRIMARY, self.primary.0),
            ),
            MsrRow::read_only(0x483, "IA32_VMX_EXIT_CTLS", allowed(default1::EXIT, self.exit.0)),
            MsrRow::read_only(0x484, "IA32_VMX_ENTRY_CTLS", allowed(default1::ENTRY, self.entry.0)),
            MsrRow::read_only(0x485, "IA32_VMX_MISC", self.misc()),
            MsrRow::read_only(0x486, "IA32_VMX_CR0_FIXED0", CR0_FIXED0),
            MsrRow::read_only(0x487, "IA32_VMX_CR0_FIXED1", CR0_FIXED1),
            MsrRow::read_only(0x488, "IA32_VMX_CR4_FIXED0", CR4_FIXED0),
            MsrRow::read_only(0x489, "IA32_VMX_CR4_FIXED1", cr4_fixed1(features)),
            MsrRow::read_only(0x48A, "IA32_VMX_VMCS_ENUM", self.vmcs_enum()),
        ];
        let mut n = 1;
        while n <= always.len() {
            rows[n] = always[n - 1];
            n += 1;
        }
        if self.primary.contains(Primary::SECONDARY) {
            rows[n] = MsrRow::read_only(0x48B, "IA32_VMX_PROCBASED_CTLS2", allowed(0, self.secondary.0));
            n += 1;
        }
        if self.secondary.any(Secondary::EPT.with(Secondary::VPID)) {
            rows[n] = MsrRow::read_only(0x48C, "IA32_VMX_EPT_VPID_CAP", self.ept_vpid());
            n += 1;
        }
        if self.true_controls {
            rows[n] = MsrRow::read_only(0x48D, "IA32_VMX_TRUE_PINBASED_CTLS", allowed(pin, self.pin.0));
            rows[n + 1] = MsrRow::read_only(0x48E, "IA32_VMX_TRUE_PROCBASED_CTLS", allowed(primary, self.primary.0));
            rows[n + 2] = MsrRow::read_only(0x48F, "IA32_VMX_TRUE_EXIT_CTLS", allowed(exit, self.exit.0));
            rows[n + 3] = MsrRow::read_only(0x490, "IA32_VMX_TRUE_ENTRY_CTLS", allowed(entry, self.entry.0));
            n += 4;
        }
        if self.secondary.contains(Secondary::VM_FUNCTIONS) {
            rows[n] = MsrRow::read_only(0x491, "IA32_VMX_VMFUNC", self.functions);
            n += 1;
        }
        (rows, n)
    }

    /// The same as a list.
    pub fn msrs(&self, features: Features) -> Vec<MsrRow> {
        let (rows, count) = self.rows(features);
        rows[..count].to_vec()
    }
}

#[cfg(test)]
#[path = "caps_test.rs"]
mod tests;
