//! The controls of a VMCS. SDM Vol. 3C 25.6 "VM-Execution Control Fields", 25.7 "VM-Exit Control Fields", 25.8 "VM-Entry Control
//! Fields".

macro_rules! controls {
    ($(#[$meta:meta])* $type:ident { $($bit:literal $name:ident $text:literal;)* }) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
        pub struct $type(pub u32);

        impl $type {
            /// No control.
            pub const NONE: Self = Self(0);
            $(#[doc = $text] pub const $name: Self = Self(1 << $bit);)*

            /// Every control that there is a name for, by its bit.
            pub const ALL: &[(u32, &str)] = &[$(($bit, $text),)*];

            /// Whether all of `other` are among these.
            pub const fn contains(self, other: Self) -> bool {
                self.0 & other.0 == other.0
            }

            /// Whether any of `other` is among these.
            pub const fn any(self, other: Self) -> bool {
                self.0 & other.0 != 0
            }

            /// These and `other`.
            pub const fn with(self, other: Self) -> Self {
                Self(self.0 | other.0)
            }

            /// Those of these that are among `other`.
            pub const fn and(self, other: Self) -> Self {
                Self(self.0 & other.0)
            }
        }

        impl core::ops::BitOr for $type {
            type Output = Self;
            fn bitor(self, other: Self) -> Self {
                self.with(other)
            }
        }
    };
}

controls! {
    /// Pin-based VM-execution controls. SDM Vol. 3C 25.6.1 "Pin-Based VM-Execution Controls".
    Pin {
        0 EXTERNAL_INTERRUPTS "External-interrupt exiting";
        3 NMIS "NMI exiting";
        5 VIRTUAL_NMIS "Virtual NMIs";
        6 PREEMPTION_TIMER "Activate VMX-preemption timer";
        7 POSTED_INTERRUPTS "Process posted interrupts";
    }
}

controls! {
    /// Primary processor-based VM-execution controls. SDM Vol. 3C 25.6.2 "Processor-Based VM-Execution Controls".
    Primary {
        2 INTERRUPT_WINDOW "Interrupt-window exiting";
        3 TSC_OFFSETTING "Use TSC offsetting";
        7 HLT "HLT exiting";
        9 INVLPG "INVLPG exiting";
        10 MWAIT "MWAIT exiting";
        11 RDPMC "RDPMC exiting";
        12 RDTSC "RDTSC exiting";
        15 CR3_LOAD "CR3-load exiting";
        16 CR3_STORE "CR3-store exiting";
        19 CR8_LOAD "CR8-load exiting";
        20 CR8_STORE "CR8-store exiting";
        21 TPR_SHADOW "Use TPR shadow";
        22 NMI_WINDOW "NMI-window exiting";
        23 MOV_DR "MOV-DR exiting";
        24 UNCONDITIONAL_IO "Unconditional I/O exiting";
        25 IO_BITMAPS "Use I/O bitmaps";
        27 MONITOR_TRAP "Monitor trap flag";
        28 MSR_BITMAPS "Use MSR bitmaps";
        29 MONITOR "MONITOR exiting";
        30 PAUSE "PAUSE exiting";
        31 SECONDARY "Activate secondary controls";
    }
}

controls! {
    /// Secondary processor-based VM-execution controls. SDM Vol. 3C 25.6.2, Table 25-7.
    Secondary {
        0 APIC_ACCESSES "Virtualize APIC accesses";
        1 EPT "Enable EPT";
        2 DESCRIPTOR_TABLES "Descriptor-table exiting";
        3 RDTSCP "Enable RDTSCP";
        4 X2APIC "Virtualize x2APIC mode";
        5 VPID "Enable VPID";
        6 WBINVD "WBINVD exiting";
        7 UNRESTRICTED "Unrestricted guest";
        8 APIC_REGISTERS "APIC-register virtualization";
        9 VIRTUAL_INTERRUPTS "Virtual-interrupt delivery";
        10 PAUSE_LOOP "PAUSE-loop exiting";
        11 RDRAND "RDRAND exiting";
        12 INVPCID "Enable INVPCID";
        13 VM_FUNCTIONS "Enable VM functions";
        14 VMCS_SHADOWING "VMCS shadowing";
        15 ENCLS "Enable ENCLS exiting";
        16 RDSEED "RDSEED exiting";
        17 PML "Enable PML";
        18 VIRTUALIZATION_EXCEPTION "EPT-violation #VE";
        19 CONCEAL_FROM_PT "Conceal VMX from PT";
        20 XSAVES "Enable XSAVES/XRSTORS";
        22 MODE_BASED_EXECUTE "Mode-based execute control for EPT";
        23 SUB_PAGE "Sub-page write permissions for EPT";
        24 PT_GUEST_PHYSICAL "Intel PT uses guest physical addresses";
        25 TSC_SCALING "Use TSC scaling";
        26 USER_WAIT "Enable user wait and pause";
        28 ENCLV "Enable ENCLV exiting";
        30 BUS_LOCK "VMM bus-lock detection";
        31 INSTRUCTION_TIMEOUT "Instruction timeout";
    }
}

controls! {
    /// VM-exit controls. SDM Vol. 3C 25.7.1 "VM-Exit Controls".
    Exit {
        2 SAVE_DEBUG "Save debug controls";
        9 HOST_64BIT "Host address-space size";
        12 LOAD_PERF_GLOBAL_CTRL "Load IA32_PERF_GLOBAL_CTRL";
        15 ACKNOWLEDGE "Acknowledge interrupt on exit";
        18 SAVE_PAT "Save IA32_PAT";
        19 LOAD_PAT "Load IA32_PAT";
        20 SAVE_EFER "Save IA32_EFER";
        21 LOAD_EFER "Load IA32_EFER";
        22 SAVE_PREEMPTION_TIMER "Save VMX-preemption timer value";
        24 CONCEAL_FROM_PT "Conceal VMX from PT";
        25 CLEAR_RTIT_CTL "Clear IA32_RTIT_CTL";
        26 CLEAR_LBR_CTL "Clear IA32_LBR_CTL";
        29 LOAD_PKRS "Load PKRS";
    }
}

controls! {
    /// VM-entry controls. SDM Vol. 3C 25.8.1 "VM-Entry Controls".
    Entry {
        2 LOAD_DEBUG "Load debug controls";
        9 GUEST_64BIT "IA-32e mode guest";
        10 TO_SMM "Entry to SMM";
        11 DEACTIVATE_DUAL_MONITOR "Deactivate dual-monitor treatment";
        13 LOAD_PERF_GLOBAL_CTRL "Load IA32_PERF_GLOBAL_CTRL";
        14 LOAD_PAT "Load IA32_PAT";
        15 LOAD_EFER "Load IA32_EFER";
        17 CONCEAL_FROM_PT "Conceal VMX from PT";
        18 LOAD_RTIT_CTL "Load IA32_RTIT_CTL";
        21 LOAD_LBR_CTL "Load guest IA32_LBR_CTL";
        22 LOAD_PKRS "Load PKRS";
    }
}

/// Controls that are 1 on every part unless the capability MSRs with "TRUE" in their names say otherwise. SDM Vol. 3D Appendix A.2
/// "Reserved Controls and Default Settings".
pub mod default1 {
    /// Pin-based: 1, 2 and 4.
    pub const PIN: u32 = 0x16;
    /// Primary processor-based: 1, 4 to 6, 8, 13 to 16, 26. CR3-load and CR3-store exiting are among them.
    pub const PRIMARY: u32 = 0x0401_e172;
    /// VM-exit: 0 to 8, 10, 11, 13, 14, 16, 17. Saving of debug controls is among them.
    pub const EXIT: u32 = 0x0003_6dff;
    /// VM-entry: 0 to 8, 12. Loading of debug controls is among them.
    pub const ENTRY: u32 = 0x11ff;
}
