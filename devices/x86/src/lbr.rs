//! Last-branch records: where a model keeps them and how an entry is laid out. SDM Vol. 3B 18.4.8 "LBR Stack", 18.5 to 18.16
//! (one section a microarchitecture), and chapter 19 "Last Branch Records" for the architectural ones.

use bitfield_struct::bitfield;

use crate::msr::{
    IA32_LER_INFO, IA32_PERF_CAPABILITIES, MSR_LASTBRANCH_0_FROM_IP, MSR_LASTBRANCH_0_FROM_IP_CORE,
    MSR_LASTBRANCH_0_NETBURST, MSR_LASTBRANCH_0_TO_IP, MSR_LASTBRANCH_0_TO_IP_CORE, MSR_LASTBRANCH_TOS,
    MSR_LASTBRANCH_TOS_NETBURST, MSR_LBR_INFO_0, MSR_LER_FROM_LIP, MSR_LER_FROM_LIP_NETBURST,
};

/// The most entries that any model has.
pub const MAX_DEPTH: usize = 32;

/// How an entry is laid out: IA32_PERF_CAPABILITIES\[5:0\]. SDM Vol. 3B 18.4.8.1 "LBR Stack and Intel 64 Processors".
///
/// The names say what an address is (linear, or effective: an offset in the code segment) and what stands beside it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum LbrFormat {
    /// 32-bit offsets in the code segment.
    Offset32 = 0,
    /// Linear addresses.
    Linear = 1,
    /// Effective addresses.
    Effective = 2,
    /// Effective addresses, MISPRED in bit 63 of FROM.
    EffectiveFlags = 3,
    /// Effective addresses; MISPRED, IN_TSX and TSX_ABORT in bits 63:61 of FROM.
    EffectiveTsx = 4,
    /// Effective addresses; flags and cycles in an INFO register.
    EffectiveInfo = 5,
    /// Linear addresses, MISPRED in bit 63 of FROM, cycles in bits 63:48 of TO.
    LinearCycles = 6,
    /// Linear addresses; flags and cycles in an INFO register.
    LinearInfo = 7,
    /// Architectural last-branch records: CPUID.1CH says the rest.
    Architectural = 0x3F,
}

impl LbrFormat {
    /// Whether an address is linear; else it is an offset in the code segment. For architectural records CPUID.1CH:EAX\[31\]
    /// decides instead.
    pub const fn linear(self) -> bool {
        matches!(self, Self::Linear | Self::LinearCycles | Self::LinearInfo)
    }
}

/// Where the entries are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LbrLayout {
    /// One branch and one exception, two registers each. SDM Vol. 3B 18.16.2 "Last Branch and Last Exception MSRs".
    P6,
    /// Four registers, FROM in the low half and TO in the high half. SDM Vol. 3B 18.13.2 "LBR Stack for Processors Based on
    /// Intel NetBurst Microarchitecture".
    NetBurst,
    /// A ring of FROM, TO and perhaps INFO registers with a pointer to the newest.
    Ring {
        /// The pointer to the newest entry, MSR_LASTBRANCH_TOS.
        tos: u32,
        /// Whether software may write the pointer and the entries.
        writable: bool,
        /// The first FROM register.
        from: u32,
        /// The first TO register.
        to: u32,
        /// The first INFO register.
        info: Option<u32>,
    },
    /// Architectural: entry 0 is the newest. SDM Vol. 3B ch. 19 "Last Branch Records".
    Architectural,
}

/// What a model's last-branch records are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LbrCaps {
    /// Where the entries are.
    pub layout: LbrLayout,
    /// Entries: the most that IA32_LBR_DEPTH can be set to for architectural ones.
    pub depth: u8,
    /// How an entry is laid out.
    pub format: LbrFormat,
    /// The writable bits of MSR_LBR_SELECT; 0: there is no such register.
    pub select: u64,
    /// The first of the last-exception records, FROM and then TO.
    pub ler: Option<u32>,
    /// While Intel PT traces, nothing is recorded, and the registers read 0 and drop writes. SDM Vol. 3C 33.3.1.2 "Other
    /// Enabled Features" (LBR and PT exclude each other on early parts).
    pub excluded_by_pt: bool,
}

impl LbrCaps {
    /// Every register of the stack, in the order of their numbers, without gaps where the part has them.
    pub fn owns(&self, msr: u32) -> bool {
        let within = |first: u32, count: u8| (first..first + u32::from(count)).contains(&msr);
        let ler = self.ler.is_some_and(|first| within(first, 2));
        let select = self.select != 0 && msr == crate::msr::MSR_LBR_SELECT;
        let stack = match self.layout {
            LbrLayout::P6 => within(MSR_LASTBRANCH_0_NETBURST, 2),
            LbrLayout::NetBurst => msr == MSR_LASTBRANCH_TOS_NETBURST || within(MSR_LASTBRANCH_0_NETBURST, 4),
            LbrLayout::Ring {
                tos, from, to, info, ..
            } => {
                msr == tos
                    || within(from, self.depth)
                    || within(to, self.depth)
                    || info.is_some_and(|first| within(first, self.depth))
            }
            LbrLayout::Architectural => {
                matches!(
                    msr,
                    crate::msr::IA32_LBR_CTL | crate::msr::IA32_LBR_DEPTH | IA32_LER_INFO
                ) || within(crate::msr::IA32_LBR_0_FROM_IP, self.depth)
                    || within(crate::msr::IA32_LBR_0_TO_IP, self.depth)
                    || within(crate::msr::IA32_LBR_0_INFO, self.depth)
            }
        };
        stack || select || ler
    }
}

/// Bits 5:0 of IA32_PERF_CAPABILITIES, which name the format; 0 for a part without records.
pub const fn perf_capabilities(caps: Option<LbrCaps>) -> u64 {
    const _: () = assert!(IA32_PERF_CAPABILITIES == 0x345, "the register this is about");
    match caps {
        Some(caps) => caps.format as u64,
        None => 0,
    }
}

/// MSR_LBR_SELECT: a set bit keeps branches *out*, but for the last. SDM Vol. 3B 18.9.2 "Filtering of Last Branch Records",
/// 18.11 "Last Branch, Call Stack, Interrupt, and Exception Recording for Processors Based on Haswell Microarchitecture".
#[bitfield(u64)]
#[derive(PartialEq, Eq)]
pub struct LbrSelect {
    /// Branches that end in ring 0.
    pub cpl_eq_0: bool,
    /// Branches that end in rings above 0.
    pub cpl_neq_0: bool,
    /// Conditional branches.
    pub jcc: bool,
    /// Near relative calls.
    pub near_rel_call: bool,
    /// Near indirect calls.
    pub near_ind_call: bool,
    /// Near returns.
    pub near_ret: bool,
    /// Near indirect jumps.
    pub near_ind_jmp: bool,
    /// Near relative jumps.
    pub near_rel_jmp: bool,
    /// Far branches: what goes through a gate, and interrupts and exceptions.
    pub far_branch: bool,
    /// Returns take the newest entry off instead of adding one.
    pub en_callstack: bool,
    #[bits(54)]
    __: u64,
}

/// IA32_LBR_CTL: a set bit lets branches *in*. SDM Vol. 3B 19.1.2 "Configuration"; Vol. 4 Table 2-2.
#[bitfield(u64)]
#[derive(PartialEq, Eq)]
pub struct LbrCtl {
    /// Record.
    pub lbr_en: bool,
    /// Branches that end in ring 0.
    pub os: bool,
    /// Branches that end in rings above 0.
    pub usr: bool,
    /// Returns take the newest entry off instead of adding one.
    pub call_stack: bool,
    #[bits(12)]
    __: u16,
    /// Conditional branches.
    pub cond: bool,
    /// Near relative jumps.
    pub near_rel_jmp: bool,
    /// Near indirect jumps.
    pub near_ind_jmp: bool,
    /// Near relative calls.
    pub near_rel_call: bool,
    /// Near indirect calls.
    pub near_ind_call: bool,
    /// Near returns.
    pub near_ret: bool,
    /// Everything else.
    pub other_branch: bool,
    #[bits(41)]
    __: u64,
}

/// MSR_LBR_INFO_x and IA32_LBR_x_INFO. SDM Vol. 3B 18.12.1 "MSR_LBR_INFO_x MSR", 19.1.3 "Record Data".
#[bitfield(u64)]
#[derive(PartialEq, Eq)]
pub struct LbrInfo {
    /// Core clocks since the last record, as many as fit.
    pub cycles: u16,
    #[bits(40)]
    __: u64,
    /// What kind of branch it was: architectural records only.
    #[bits(4)]
    pub branch_type: u8,
    /// `cycles` means something: architectural records only.
    pub cycles_valid: bool,
    /// The entry is the abort of a transaction.
    pub tsx_abort: bool,
    /// The branch was in a transaction.
    pub in_tsx: bool,
    /// The target or the direction was mispredicted.
    pub mispred: bool,
}

/// BR_TYPE of [`LbrInfo`]. SDM Vol. 3B 19.1.3.2 "Branch Types".
pub mod branch_type {
    /// Jcc and its kin.
    pub const COND: u8 = 0;
    /// Near indirect JMP.
    pub const NEAR_IND_JMP: u8 = 1;
    /// Near relative JMP.
    pub const NEAR_REL_JMP: u8 = 2;
    /// Near indirect CALL.
    pub const NEAR_IND_CALL: u8 = 3;
    /// Near relative CALL.
    pub const NEAR_REL_CALL: u8 = 4;
    /// Near RET.
    pub const NEAR_RET: u8 = 5;
    /// Anything else: 8 to 15 all mean this.
    pub const OTHER_BRANCH: u8 = 8;
}

/// What CPUID.1CH says of architectural records. SDM Vol. 2A "CPUID—CPU Identification", leaf 1CH.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ArchLbrLeaf {
    /// EAX, EBX, ECX, EDX.
    pub regs: [u32; 4],
}

impl ArchLbrLeaf {
    /// Whether IA32_LBR_DEPTH can be set to `depth`: bit n of EAX\[7:0\] stands for 8 (n + 1).
    pub const fn has_depth(self, depth: u64) -> bool {
        depth != 0 && depth & 7 == 0 && depth <= 64 && self.regs[0] >> (depth / 8 - 1) & 1 != 0
    }

    /// The greatest depth.
    pub const fn max_depth(self) -> u8 {
        let depths = self.regs[0] & 0xFF;
        8 * (32 - depths.leading_zeros()) as u8
    }

    /// Addresses are linear (EAX\[31\]); else offsets in the code segment.
    pub const fn linear(self) -> bool {
        self.regs[0] >> 31 != 0
    }

    /// The bits of IA32_LBR_CTL that are there: EBX says which filters are.
    pub const fn control(self) -> u64 {
        let mut bits = 1;
        if self.regs[1] & 1 != 0 {
            bits |= 0b110;
        }
        if self.regs[1] & 2 != 0 {
            bits |= 0x7F_0000;
        }
        if self.regs[1] & 4 != 0 {
            bits |= 0b1000;
        }
        bits
    }

    /// OS and USR are there.
    pub const fn cpl_filter(self) -> bool {
        self.regs[1] & 1 != 0
    }

    /// The seven branch filters are there.
    pub const fn branch_filter(self) -> bool {
        self.regs[1] & 2 != 0
    }

    /// INFO.MISPRED is there.
    pub const fn mispredict(self) -> bool {
        self.regs[2] & 1 != 0
    }

    /// INFO.CYC_CNT is there.
    pub const fn timed(self) -> bool {
        self.regs[2] & 2 != 0
    }

    /// INFO.BR_TYPE is there.
    pub const fn branch_type(self) -> bool {
        self.regs[2] & 4 != 0
    }
}

/// The P6 family.
pub const P6: LbrCaps = LbrCaps {
    layout: LbrLayout::P6,
    depth: 1,
    format: LbrFormat::Offset32,
    select: 0,
    ler: Some(MSR_LER_FROM_LIP),
    excluded_by_pt: false,
};

/// The Pentium 4 with this CPUID signature: four packed registers on models 0 to 2, 16 pairs from model 3 on. SDM Vol. 3B
/// 18.13.2 "LBR Stack for Processors Based on Intel NetBurst Microarchitecture".
pub const fn netburst(signature: u32) -> LbrCaps {
    let early = LbrCaps {
        layout: LbrLayout::NetBurst,
        depth: 4,
        format: LbrFormat::Linear,
        select: 0,
        ler: Some(MSR_LER_FROM_LIP_NETBURST),
        excluded_by_pt: false,
    };
    match signature >> 4 & 0xF {
        0..=2 => early,
        _ => LbrCaps {
            layout: LbrLayout::Ring {
                tos: MSR_LASTBRANCH_TOS_NETBURST,
                writable: false,
                from: MSR_LASTBRANCH_0_FROM_IP,
                to: MSR_LASTBRANCH_0_TO_IP,
                info: None,
            },
            depth: 16,
            ..early
        },
    }
}

impl LbrCaps {
    /// The same on a part with another CPUID signature, by which the Pentium 4's registers go.
    pub const fn with_signature(self, signature: u32) -> Self {
        match self.layout {
            LbrLayout::NetBurst => netburst(signature),
            _ => self,
        }
    }
}

/// Intel Core microarchitecture: four pairs at 40H and 60H. SDM Vol. 3B 18.5.1 "LBR Stack".
pub const CORE2: LbrCaps = LbrCaps {
    layout: LbrLayout::Ring {
        tos: MSR_LASTBRANCH_TOS,
        writable: true,
        from: MSR_LASTBRANCH_0_FROM_IP_CORE,
        to: MSR_LASTBRANCH_0_TO_IP_CORE,
        info: None,
    },
    depth: 4,
    format: LbrFormat::Linear,
    select: 0,
    ler: Some(MSR_LER_FROM_LIP),
    excluded_by_pt: false,
};

/// Nehalem to Ivy Bridge: 16 pairs at 680H and 6C0H, and MSR_LBR_SELECT. SDM Vol. 3B 18.9 "Last Branch, Interrupt, and
/// Exception Recording for Processors Based on Nehalem Microarchitecture".
pub const NEHALEM: LbrCaps = LbrCaps {
    layout: LbrLayout::Ring {
        tos: MSR_LASTBRANCH_TOS,
        writable: true,
        from: MSR_LASTBRANCH_0_FROM_IP,
        to: MSR_LASTBRANCH_0_TO_IP,
        info: None,
    },
    depth: 16,
    format: LbrFormat::EffectiveFlags,
    select: 0x1FF,
    ler: Some(MSR_LER_FROM_LIP),
    excluded_by_pt: false,
};

/// Haswell: transactions in the flags, and call-stack mode. SDM Vol. 3B 18.11 "Last Branch, Call Stack, Interrupt, and
/// Exception Recording for Processors Based on Haswell Microarchitecture".
pub const HASWELL: LbrCaps = LbrCaps {
    format: LbrFormat::EffectiveTsx,
    select: 0x3FF,
    ..NEHALEM
};

/// Broadwell: the same, and not beside Intel PT.
pub const BROADWELL: LbrCaps = LbrCaps {
    excluded_by_pt: true,
    ..HASWELL
};

/// Skylake to Ice Lake: 32 triples. SDM Vol. 3B 18.12 "Last Branch, Call Stack, Interrupt, and Exception Recording for
/// Processors Based on Skylake Microarchitecture".
pub const SKYLAKE: LbrCaps = LbrCaps {
    layout: LbrLayout::Ring {
        tos: MSR_LASTBRANCH_TOS,
        writable: true,
        from: MSR_LASTBRANCH_0_FROM_IP,
        to: MSR_LASTBRANCH_0_TO_IP,
        info: Some(MSR_LBR_INFO_0),
    },
    depth: 32,
    format: LbrFormat::EffectiveInfo,
    excluded_by_pt: false,
    ..HASWELL
};

/// Tremont: as Goldmont Plus, 32 triples with linear addresses. SDM Vol. 3B 18.8 "Last Branch, Interrupt, and Exception
/// Recording for Goldmont Plus".
pub const TREMONT: LbrCaps = LbrCaps {
    format: LbrFormat::LinearInfo,
    ..SKYLAKE
};

/// Architectural records. SDM Vol. 3B ch. 19 "Last Branch Records".
pub const ARCHITECTURAL: LbrCaps = LbrCaps {
    layout: LbrLayout::Architectural,
    depth: 32,
    format: LbrFormat::Architectural,
    select: 0,
    ler: Some(MSR_LER_FROM_LIP),
    excluded_by_pt: false,
};

/// The XSAVES image of architectural records, state component 15. SDM Vol. 1 13.5.14 "LBR State".
pub mod image {
    /// IA32_LBR_CTL.
    pub const CTL: usize = 0;
    /// IA32_LBR_DEPTH.
    pub const DEPTH: usize = 8;
    /// IA32_LER_FROM_IP.
    pub const LER_FROM: usize = 16;
    /// IA32_LER_TO_IP.
    pub const LER_TO: usize = 24;
    /// IA32_LER_INFO.
    pub const LER_INFO: usize = 32;
    /// The first entry: FROM, TO, INFO.
    pub const ENTRIES: usize = 40;
    /// One entry.
    pub const ENTRY: usize = 24;
    /// All of it: CPUID.(0DH, 15):EAX.
    pub const SIZE: usize = ENTRIES + super::MAX_DEPTH * ENTRY;
}

#[cfg(test)]
#[path = "lbr_test.rs"]
mod tests;
