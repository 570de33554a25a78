//! IA32_DEBUGCTL and what came before it under the same number, 1D9H. SDM Vol. 3B 18.4.1 "IA32_DEBUGCTL MSR".
//!
//! Three layouts share the number: the P6 family's DebugCtlMSR, the Pentium 4's MSR_DEBUGCTLA and IA32_DEBUGCTL. What they
//! say is the same, so everybody but WRMSR works with [`DebugCtl`], the youngest layout, and [`DebugCtlLayout::decode`] turns
//! the others into it.

use bitfield_struct::bitfield;

use crate::cpuid::Features;

/// IA32_DEBUGCTL. SDM Vol. 3B 18.4.1 "IA32_DEBUGCTL MSR"; Vol. 4 Table 2-2 "IA-32 Architectural MSRs".
#[bitfield(u64)]
#[derive(PartialEq, Eq)]
pub struct DebugCtl {
    /// Record branches in the last-branch stack.
    pub lbr: bool,
    /// With RFLAGS.TF: single-step on branches, not on instructions.
    pub btf: bool,
    /// A bus lock is a #DB. Reserved where CPUID.07H:ECX[24] is clear.
    pub bus_lock_detect: bool,
    #[bits(3)]
    __: u8,
    /// Make branch trace messages.
    pub tr: bool,
    /// Store them in the debug-store area.
    pub bts: bool,
    /// Raise an interrupt when the buffer is nearly full; clear: the buffer is a ring.
    pub btint: bool,
    /// Store none of ring 0.
    pub bts_off_os: bool,
    /// Store none of rings above 0.
    pub bts_off_usr: bool,
    /// A PMI stops the recording of last branches.
    pub freeze_lbrs_on_pmi: bool,
    /// A PMI stops the performance counters.
    pub freeze_perfmon_on_pmi: bool,
    /// The uncore may raise PMIs.
    pub enable_uncore_pmi: bool,
    /// The counters stand still in system-management mode.
    pub freeze_while_smm: bool,
    /// With DR7.RTM: debug exceptions inside transactions.
    pub rtm: bool,
    #[bits(48)]
    __: u64,
}

/// MSR_DEBUGCTLA of the Pentium 4 and Intel Xeon. SDM Vol. 3B 18.13.1 "MSR_DEBUGCTLA MSR".
#[bitfield(u64)]
#[derive(PartialEq, Eq)]
pub struct DebugCtlA {
    /// Record branches in the last-branch stack.
    pub lbr: bool,
    /// With EFLAGS.TF: single-step on branches.
    pub btf: bool,
    /// Make branch trace messages.
    pub tr: bool,
    /// Store them in the debug-store area.
    pub bts: bool,
    /// Raise an interrupt when the buffer is nearly full.
    pub btint: bool,
    /// Store none of ring 0: with CPL-qualified debug store only.
    pub bts_off_os: bool,
    /// Store none of rings above 0: with CPL-qualified debug store only.
    pub bts_off_usr: bool,
    #[bits(57)]
    __: u64,
}

/// DebugCtlMSR of the P6 family. SDM Vol. 3B 18.16.1 "DEBUGCTLMSR Register".
#[bitfield(u64)]
#[derive(PartialEq, Eq)]
pub struct P6DebugCtl {
    /// Record the last branch and the last exception.
    pub lbr: bool,
    /// With EFLAGS.TF: single-step on branches.
    pub btf: bool,
    /// What the pins PB0 to PB3 show: a breakpoint's match, or performance events. There are no pins here, so the bits are
    /// storage.
    #[bits(4)]
    pub pins: u8,
    /// Make branch trace messages, which leave on the bus.
    pub tr: bool,
    #[bits(57)]
    __: u64,
}

/// Which of the three registers a model has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DebugCtlLayout {
    /// DebugCtlMSR.
    P6,
    /// MSR_DEBUGCTLA.
    NetBurst,
    /// IA32_DEBUGCTL.
    Ia32,
}

impl DebugCtlLayout {
    /// What a value of the register says, in the layout of IA32_DEBUGCTL.
    pub const fn decode(self, bits: u64) -> DebugCtl {
        match self {
            Self::Ia32 => DebugCtl::from_bits(bits),
            Self::NetBurst => {
                let a = DebugCtlA::from_bits(bits);
                DebugCtl::new()
                    .with_lbr(a.lbr())
                    .with_btf(a.btf())
                    .with_tr(a.tr())
                    .with_bts(a.bts())
                    .with_btint(a.btint())
                    .with_bts_off_os(a.bts_off_os())
                    .with_bts_off_usr(a.bts_off_usr())
            }
            Self::P6 => {
                let p6 = P6DebugCtl::from_bits(bits);
                DebugCtl::new().with_lbr(p6.lbr()).with_btf(p6.btf()).with_tr(p6.tr())
            }
        }
    }

    /// The bits of the register that need a feature: (without which, bits).
    const fn conditional(self, features: Features) -> u64 {
        let (store, by_cpl) = match self {
            Self::P6 => (0, 0),
            Self::NetBurst => (0x18, 0x60),
            Self::Ia32 => (0x180, 0x600),
        };
        let mut gone = 0;
        if !features.has(crate::cpuid::Feature::Ds) {
            gone |= store;
        }
        if !features.has(crate::cpuid::Feature::DsCpl) {
            gone |= by_cpl;
        }
        if matches!(self, Self::Ia32) {
            if !features.has(crate::cpuid::Feature::BusLockDetect) {
                gone |= BUS_LOCK_DETECT;
            }
            if !features.has(crate::cpuid::Feature::Rtm) {
                gone |= RTM;
            }
            // IA32_PERF_CAPABILITIES[12] says that it is there.
            if !features.has(crate::cpuid::Feature::Pdcm) {
                gone |= FREEZE_WHILE_SMM;
            }
        }
        gone
    }
}

const BUS_LOCK_DETECT: u64 = 1 << 2;
const FREEZE_WHILE_SMM: u64 = 1 << 14;
const RTM: u64 = 1 << 15;

/// What FREEZE_LBRS_ON_PMI and FREEZE_PERFMON_ON_PMI do. SDM Vol. 3B 18.4.7 "Freezing LBR and Performance Counters on PMI".
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Freeze {
    /// Neither bit is there.
    Absent,
    /// Legacy: the enables themselves are cleared, IA32_DEBUGCTL.LBR and IA32_PERF_GLOBAL_CTRL.
    Legacy,
    /// Streamlined, from version 4 of performance monitoring on: LBR_FRZ and CTR_FRZ of IA32_PERF_GLOBAL_STATUS are set,
    /// and recording and counting wait until software clears them.
    Streamlined,
}

/// Which bits of IA32_DEBUGCTL a model has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DebugCtlCaps {
    /// The register.
    pub layout: DebugCtlLayout,
    /// The bits that WRMSR accepts on the part; any other is #GP(0). A part has FREEZE_WHILE_SMM where IA32_PERF_CAPABILITIES\[12\] says
    /// so.
    pub writable: u64,
    /// Bits whose writes are dropped. A part with architectural last-branch records alone keeps LBR 0 that way.
    pub ignored: u64,
    /// The two freezes.
    pub freeze: Freeze,
    /// While TR is set the last-branch stack moves even with LBR clear, because the part takes its branch trace messages
    /// from there. SDM Vol. 3B 18.4.2 "Monitoring Branches, Exceptions, and Interrupts" ("some processors").
    pub tr_records: bool,
}

impl DebugCtlCaps {
    /// What is writable when these features are shown: BTS and BTINT need DS, BTS_OFF_OS and BTS_OFF_USR need DS-CPL,
    /// BUS_LOCK_DETECT and RTM the features of their names, FREEZE_WHILE_SMM needs PDCM.
    pub const fn writable_with(&self, features: Features) -> u64 {
        self.writable & !self.layout.conditional(features)
    }
}

/// The P6 family: LBR, BTF, PB0 to PB3, TR.
pub const P6: DebugCtlCaps = DebugCtlCaps {
    layout: DebugCtlLayout::P6,
    writable: 0x7F,
    ignored: 0,
    freeze: Freeze::Absent,
    tr_records: false,
};

/// NetBurst: LBR, BTF, TR, BTS, BTINT and, with DS-CPL, the two rings.
pub const NETBURST: DebugCtlCaps = DebugCtlCaps {
    layout: DebugCtlLayout::NetBurst,
    writable: 0x7F,
    ignored: 0,
    freeze: Freeze::Absent,
    tr_records: false,
};

/// Intel Core microarchitecture: SDM Vol. 3B Figure 18-3 "IA32_DEBUGCTL MSR for Processors Based on Intel Core
/// Microarchitecture".
pub const CORE2: DebugCtlCaps = DebugCtlCaps {
    layout: DebugCtlLayout::Ia32,
    writable: 0x1FC3 | FREEZE_WHILE_SMM,
    ignored: 0,
    freeze: Freeze::Legacy,
    tr_records: true,
};

/// Nehalem to Broadwell: with ENABLE_UNCORE_PMI. SDM Vol. 3B Figure 18-11 "IA32_DEBUGCTL MSR for Processors Based on Nehalem
/// Microarchitecture". RTM only where transactions are shown.
pub const NEHALEM: DebugCtlCaps = DebugCtlCaps {
    writable: 0x3FC3 | FREEZE_WHILE_SMM | RTM,
    tr_records: false,
    ..CORE2
};

/// Skylake and what followed, with streamlined freezes.
pub const SKYLAKE: DebugCtlCaps = DebugCtlCaps {
    freeze: Freeze::Streamlined,
    ..NEHALEM
};

/// Parts with architectural last-branch records: LBR reads 0 and cannot be set. Bus-lock detection where it is shown.
pub const ARCHITECTURAL: DebugCtlCaps = DebugCtlCaps {
    writable: SKYLAKE.writable & !1 | BUS_LOCK_DETECT,
    ignored: 1,
    ..SKYLAKE
};

#[cfg(test)]
#[path = "debugctl_test.rs"]
mod tests;
