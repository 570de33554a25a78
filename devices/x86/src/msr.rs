//! MSR numbers under their manual names (SDM Vol. 4 "Model-Specific Registers"), and what an access can come to.
//!
//! Only numbers live here. What a model answers at each of them is in [`crate::model`], except for the registers that a
//! part of the machine holds itself: the core (SYSENTER, EFER, SYSCALL, FS/GS bases), the clock (the TSC) and the local
//! APIC.

/// Why RDMSR or WRMSR did not go through.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MsrFault {
    /// Some other unit owns this number, or none does.
    Unclaimed,
    /// The guest gets #GP(0).
    GeneralProtection,
}

macro_rules! registers {
    ($($(#[$group:meta])* $number:literal $name:ident $text:literal;)*) => {
        $(#[doc = $text] pub const $name: u32 = $number;)*

        /// Every register named here, `(number, manual name)`, ascending.
        pub const NAMES: &[(u32, &str)] = &[$(($number, stringify!($name)),)*];
    };
}

registers! {
    0x0000_0000 IA32_P5_MC_ADDR "Pentium machine-check address; later parts keep the number.";
    0x0000_0001 IA32_P5_MC_TYPE "Pentium machine-check type; later parts keep the number.";
    0x0000_0006 IA32_MONITOR_FILTER_SIZE "MONITOR/MWAIT address-range filter size.";
    0x0000_0010 IA32_TIME_STAMP_COUNTER "The time-stamp counter.";
    0x0000_0017 IA32_PLATFORM_ID "Platform ID (52:50), which selects microcode updates.";
    0x0000_001B IA32_APIC_BASE "Local APIC: base address, enable, x2APIC mode, bootstrap processor.";
    0x0000_002A MSR_EBL_CR_POWERON "What the pins said at power-up: bus ratio, bus features.";
    0x0000_002B MSR_EBC_SOFT_POWERON "Pentium 4: bus features that software chose.";
    0x0000_002C MSR_EBC_FREQUENCY_ID "Pentium 4: bus clock and ratio.";
    0x0000_0033 MSR_TEST_CTRL "Test control; bit 29 makes split locks fault where IA32_CORE_CAPABILITIES says so.";
    0x0000_0034 MSR_SMI_COUNT "System-management interrupts since reset.";
    0x0000_0035 MSR_CORE_THREAD_COUNT "Cores (31:16) and threads (15:0) of the package.";
    0x0000_003A IA32_FEATURE_CONTROL "VMX and SMX locks.";
    0x0000_003B IA32_TSC_ADJUST "Offset that software added to the TSC.";
    0x0000_0040 MSR_LASTBRANCH_0_FROM_IP_CORE "Last-branch records of the Core microarchitecture: first source.";
    0x0000_0048 IA32_SPEC_CTRL "Speculation control.";
    0x0000_0049 IA32_PRED_CMD "Prediction command.";
    0x0000_004E MSR_PPIN_CTL "Protected processor inventory number: control.";
    0x0000_0060 MSR_LASTBRANCH_0_TO_IP_CORE "Last-branch records of the Core microarchitecture: first target.";
    0x0000_0079 IA32_BIOS_UPDT_TRIG "Microcode update trigger.";
    0x0000_008B IA32_BIOS_SIGN_ID "Microcode update signature (63:32), loaded by CPUID leaf 1.";
    0x0000_009B IA32_SMM_MONITOR_CTL "Dual-monitor treatment of SMM.";
    0x0000_00C1 IA32_PMC0 "First general-purpose performance counter.";
    0x0000_00CD MSR_FSB_FREQ "Core 2: bus clock.";
    0x0000_00CE MSR_PLATFORM_INFO "Ratios and what of them can be programmed.";
    0x0000_00CF IA32_CORE_CAPABILITIES "Enumeration of features of a core.";
    0x0000_00E1 IA32_UMWAIT_CONTROL "The longest wait of UMWAIT and TPAUSE (31:2), and whether C0.2 is not allowed (0).";
    0x0000_00E2 MSR_PKG_CST_CONFIG_CONTROL "C-state configuration.";
    0x0000_00E4 MSR_PMG_IO_CAPTURE_BASE "I/O address whose reads enter C-states.";
    0x0000_00E7 IA32_MPERF "Clocks at the maximum frequency.";
    0x0000_00E8 IA32_APERF "Clocks at the actual frequency.";
    0x0000_00FE IA32_MTRRCAP "What the memory-type range registers can do.";
    0x0000_010A IA32_ARCH_CAPABILITIES "Enumeration of architectural features.";
    0x0000_010B IA32_FLUSH_CMD "Cache flush command.";
    0x0000_0119 MSR_BBL_CR_CTL "Level-2 cache control; bit 21 of P6 disables the serial number.";
    0x0000_011E MSR_BBL_CR_CTL3 "Level-2 cache configuration.";
    0x0000_0122 IA32_TSX_CTRL "Transactional memory control.";
    0x0000_013C MSR_FEATURE_CONFIG "AES enable and lock.";
    0x0000_0140 MSR_MISC_FEATURE_ENABLES "CPUID faulting and ring-3 MWAIT.";
    0x0000_0174 IA32_SYSENTER_CS "SYSENTER: code segment.";
    0x0000_0175 IA32_SYSENTER_ESP "SYSENTER: stack pointer.";
    0x0000_0176 IA32_SYSENTER_EIP "SYSENTER: instruction pointer.";
    0x0000_0179 IA32_MCG_CAP "Machine check: number of banks and global capabilities.";
    0x0000_017A IA32_MCG_STATUS "Machine check: global status.";
    0x0000_017B IA32_MCG_CTL "Machine check: global control.";
    0x0000_0186 IA32_PERFEVTSEL0 "First performance event select.";
    0x0000_0198 IA32_PERF_STATUS "Current performance state.";
    0x0000_0199 IA32_PERF_CTL "Requested performance state.";
    0x0000_019A IA32_CLOCK_MODULATION "On-demand clock modulation.";
    0x0000_019B IA32_THERM_INTERRUPT "Thermal interrupt control.";
    0x0000_019C IA32_THERM_STATUS "Thermal status.";
    0x0000_01A0 IA32_MISC_ENABLE "Miscellaneous enables.";
    0x0000_01A2 MSR_TEMPERATURE_TARGET "Temperature at which PROCHOT# is asserted.";
    0x0000_01A4 MSR_MISC_FEATURE_CONTROL "Prefetcher control.";
    0x0000_01A6 MSR_OFFCORE_RSP_0 "Off-core response event 0.";
    0x0000_01A7 MSR_OFFCORE_RSP_1 "Off-core response event 1.";
    0x0000_01AA MSR_MISC_PWR_MGMT "Miscellaneous power management.";
    0x0000_01AC MSR_TURBO_POWER_CURRENT_LIMIT "Turbo power and current limits.";
    0x0000_01AD MSR_TURBO_RATIO_LIMIT "Highest turbo ratio by number of active cores.";
    0x0000_01AE MSR_TURBO_RATIO_LIMIT1 "More turbo ratios, or the numbers of cores that go with them.";
    0x0000_01AF MSR_TURBO_RATIO_LIMIT2 "More turbo ratios.";
    0x0000_01B0 IA32_ENERGY_PERF_BIAS "Performance and energy bias hint (3:0).";
    0x0000_01C8 MSR_LBR_SELECT "Last-branch records: filter.";
    0x0000_01C9 MSR_LASTBRANCH_TOS "Last-branch records: newest entry.";
    0x0000_01D7 MSR_LER_FROM_LIP_NETBURST "Pentium 4: last exception record, source; the target follows.";
    0x0000_01D9 IA32_DEBUGCTL "Debug control.";
    0x0000_01DA MSR_LASTBRANCH_TOS_NETBURST "Pentium 4: last-branch records, newest entry.";
    0x0000_01DB MSR_LASTBRANCH_0_NETBURST "Pentium 4: first packed last-branch record. P6: LastBranchFromIP and LastBranchToIP.";
    0x0000_01DD MSR_LER_FROM_LIP "Last exception record: source.";
    0x0000_01DE MSR_LER_TO_LIP "Last exception record: target.";
    0x0000_01E0 ROB_CR_BKUPTMPDR6 "P6: fast strings (2). Architectural last-branch records: IA32_LER_INFO.";
    0x0000_01F2 IA32_SMRR_PHYSBASE "System-management range: base.";
    0x0000_01F3 IA32_SMRR_PHYSMASK "System-management range: mask.";
    0x0000_01FC MSR_POWER_CTL "Power control.";
    0x0000_0200 IA32_MTRR_PHYSBASE0 "First variable-range MTRR: base and type. Base and mask alternate from here.";
    0x0000_0201 IA32_MTRR_PHYSMASK0 "First variable-range MTRR: mask and valid bit.";
    0x0000_0250 IA32_MTRR_FIX64K_00000 "Fixed-range MTRR, 64 KiB each.";
    0x0000_0258 IA32_MTRR_FIX16K_80000 "Fixed-range MTRR, 16 KiB each.";
    0x0000_0259 IA32_MTRR_FIX16K_A0000 "Fixed-range MTRR, 16 KiB each.";
    0x0000_0268 IA32_MTRR_FIX4K_C0000 "Fixed-range MTRR, 4 KiB each.";
    0x0000_0269 IA32_MTRR_FIX4K_C8000 "Fixed-range MTRR, 4 KiB each.";
    0x0000_026A IA32_MTRR_FIX4K_D0000 "Fixed-range MTRR, 4 KiB each.";
    0x0000_026B IA32_MTRR_FIX4K_D8000 "Fixed-range MTRR, 4 KiB each.";
    0x0000_026C IA32_MTRR_FIX4K_E0000 "Fixed-range MTRR, 4 KiB each.";
    0x0000_026D IA32_MTRR_FIX4K_E8000 "Fixed-range MTRR, 4 KiB each.";
    0x0000_026E IA32_MTRR_FIX4K_F0000 "Fixed-range MTRR, 4 KiB each.";
    0x0000_026F IA32_MTRR_FIX4K_F8000 "Fixed-range MTRR, 4 KiB each.";
    0x0000_0277 IA32_PAT "Page attribute table.";
    0x0000_0280 IA32_MC0_CTL2 "Machine-check bank 0: corrected-error interrupt.";
    0x0000_02FF IA32_MTRR_DEF_TYPE "Default memory type and MTRR enables.";
    0x0000_0300 MSR_BPU_COUNTER0 "Pentium 4: first performance counter.";
    0x0000_0309 IA32_FIXED_CTR0 "First fixed performance counter.";
    0x0000_0329 MSR_PERF_METRICS "Shares of the issue slots.";
    0x0000_0345 IA32_PERF_CAPABILITIES "Performance-monitoring capabilities.";
    0x0000_0360 MSR_BPU_CCCR0 "Pentium 4: configuration of the first performance counter.";
    0x0000_038D IA32_FIXED_CTR_CTRL "Fixed counter control.";
    0x0000_038E IA32_PERF_GLOBAL_STATUS "Counter overflow status.";
    0x0000_038F IA32_PERF_GLOBAL_CTRL "Counter enables.";
    0x0000_0390 IA32_PERF_GLOBAL_OVF_CTRL "Counter overflow clear; IA32_PERF_GLOBAL_STATUS_RESET since version 4.";
    0x0000_0391 IA32_PERF_GLOBAL_STATUS_SET "Counter overflow set.";
    0x0000_0392 IA32_PERF_GLOBAL_INUSE "Counters that somebody has programmed.";
    0x0000_03A0 MSR_BSU_ESCR0 "Pentium 4: first event select control.";
    0x0000_03F0 MSR_TC_PRECISE_EVENT "Pentium 4: trace cache events that the front end tags.";
    0x0000_03F1 IA32_PEBS_ENABLE "Precise event-based sampling enables.";
    0x0000_03F2 MSR_PEBS_DATA_CFG "Groups of adaptive PEBS records. Pentium 4: MSR_PEBS_MATRIX_VERT.";
    0x0000_03F6 MSR_PEBS_LD_LAT "Threshold of load latency.";
    0x0000_03F7 MSR_PEBS_FRONTEND "Front-end events.";
    0x0000_03F8 MSR_PKG_C3_RESIDENCY "Time of the package in C3.";
    0x0000_03F9 MSR_PKG_C6_RESIDENCY "Time of the package in C6.";
    0x0000_03FA MSR_PKG_C7_RESIDENCY "Time of the package in C7.";
    0x0000_03FC MSR_CORE_C3_RESIDENCY "Time of the core in C3.";
    0x0000_03FD MSR_CORE_C6_RESIDENCY "Time of the core in C6.";
    0x0000_03FE MSR_CORE_C7_RESIDENCY "Time of the core in C7.";
    0x0000_0400 IA32_MC0_CTL "Machine-check bank 0: control. Four registers a bank from here: CTL, STATUS, ADDR, MISC.";
    0x0000_0401 IA32_MC0_STATUS "Machine-check bank 0: status.";
    0x0000_0402 IA32_MC0_ADDR "Machine-check bank 0: address.";
    0x0000_0403 IA32_MC0_MISC "Machine-check bank 0: more information.";
    0x0000_0480 IA32_VMX_BASIC "VMX capabilities start here.";
    0x0000_04C1 IA32_A_PMC0 "First general-purpose performance counter, in full width.";
    0x0000_0560 IA32_RTIT_OUTPUT_BASE "Processor trace: output range or table.";
    0x0000_0561 IA32_RTIT_OUTPUT_MASK_PTRS "Processor trace: size of the range or place in the table, and offset.";
    0x0000_0570 IA32_RTIT_CTL "Processor trace: control.";
    0x0000_0571 IA32_RTIT_STATUS "Processor trace: status.";
    0x0000_0572 IA32_RTIT_CR3_MATCH "Processor trace: the CR3 to trace.";
    0x0000_0580 IA32_RTIT_ADDR0_A "Processor trace: first address of the first range.";
    0x0000_0581 IA32_RTIT_ADDR0_B "Processor trace: last address of the first range.";
    0x0000_0582 IA32_RTIT_ADDR1_A "Processor trace: first address of the second range.";
    0x0000_0583 IA32_RTIT_ADDR1_B "Processor trace: last address of the second range.";
    0x0000_0584 IA32_RTIT_ADDR2_A "Processor trace: first address of the third range.";
    0x0000_0585 IA32_RTIT_ADDR2_B "Processor trace: last address of the third range.";
    0x0000_0586 IA32_RTIT_ADDR3_A "Processor trace: first address of the fourth range.";
    0x0000_0587 IA32_RTIT_ADDR3_B "Processor trace: last address of the fourth range.";
    0x0000_0600 IA32_DS_AREA "Linear address of the debug-store area.";
    0x0000_0601 MSR_VR_CURRENT_CONFIG "Limit of the cores' current; MSR_PP0_CURRENT_CONFIG before Skylake.";
    0x0000_0606 MSR_RAPL_POWER_UNIT "Units of the energy counters.";
    0x0000_060A MSR_PKGC3_IRTL "Limit of the time in which an interrupt is answered out of the package's C3.";
    0x0000_060B MSR_PKGC6_IRTL "The same for C6.";
    0x0000_060C MSR_PKGC7_IRTL "The same for C7.";
    0x0000_060D MSR_PKG_C2_RESIDENCY "Time of the package in C2.";
    0x0000_0610 MSR_PKG_POWER_LIMIT "Limits of the package's power.";
    0x0000_0611 MSR_PKG_ENERGY_STATUS "Energy of the package.";
    0x0000_0613 MSR_PKG_PERF_STATUS "Time for which the package's limit held it back.";
    0x0000_0614 MSR_PKG_POWER_INFO "Range of the package's power.";
    0x0000_0618 MSR_DRAM_POWER_LIMIT "Limit of the memory's power.";
    0x0000_0619 MSR_DRAM_ENERGY_STATUS "Energy of the memory.";
    0x0000_061B MSR_DRAM_PERF_STATUS "Time for which the memory's limit held it back.";
    0x0000_061C MSR_DRAM_POWER_INFO "Range of the memory's power.";
    0x0000_0630 MSR_PKG_C8_RESIDENCY "Time of the package in C8.";
    0x0000_0631 MSR_PKG_C9_RESIDENCY "Time of the package in C9.";
    0x0000_0632 MSR_PKG_C10_RESIDENCY "Time of the package in C10.";
    0x0000_0633 MSR_PKGC8_IRTL "Limit of the time in which an interrupt is answered out of the package's C8.";
    0x0000_0634 MSR_PKGC9_IRTL "The same for C9.";
    0x0000_0635 MSR_PKGC10_IRTL "The same for C10.";
    0x0000_0638 MSR_PP0_POWER_LIMIT "Limit of the cores' power.";
    0x0000_0639 MSR_PP0_ENERGY_STATUS "Energy of the cores.";
    0x0000_063A MSR_PP0_POLICY "Share of the cores in the package's power.";
    0x0000_0640 MSR_PP1_POWER_LIMIT "Limit of the graphics' power.";
    0x0000_0641 MSR_PP1_ENERGY_STATUS "Energy of the graphics.";
    0x0000_0642 MSR_PP1_POLICY "Share of the graphics in the package's power.";
    0x0000_064E MSR_PPERF "Productive performance count.";
    0x0000_0658 MSR_WEIGHTED_CORE_C0 "Time of all cores in C0, added up.";
    0x0000_0659 MSR_ANY_CORE_C0 "Time of any core in C0.";
    0x0000_065A MSR_ANY_GFXE_C0 "Time of any graphics engine in C0.";
    0x0000_065B MSR_CORE_GFXE_OVERLAP_C0 "Time of a core and a graphics engine in C0 at once.";
    0x0000_0680 MSR_LASTBRANCH_0_FROM_IP "Last-branch records: first source.";
    0x0000_0690 MSR_CORE_PERF_LIMIT_REASONS "What holds the cores' frequency down, on parts whose last-branch records end below.";
    0x0000_06B0 MSR_GRAPHICS_PERF_LIMIT_REASONS "What holds the graphics' frequency down.";
    0x0000_06B1 MSR_RING_PERF_LIMIT_REASONS "What holds the ring's frequency down.";
    0x0000_06C0 MSR_LASTBRANCH_0_TO_IP "Last-branch records: first target.";
    0x0000_06E0 IA32_TSC_DEADLINE "Local APIC timer: deadline in TSC ticks.";
    0x0000_06E1 IA32_PKRS "Rights to supervisor pages by protection key: access disable and write disable, two bits a key.";
    0x0000_0800 IA32_X2APIC_BASE "The x2APIC's registers start here: 800H plus the xAPIC offset divided by 16.";
    0x0000_0C81 IA32_L3_QOS_CFG "L3 code and data prioritisation.";
    0x0000_0C82 IA32_L2_QOS_CFG "L2 code and data prioritisation.";
    0x0000_0C84 MBA_CFG "Which delay of its threads a core takes.";
    0x0000_0C8D IA32_QM_EVTSEL "Monitoring: event and RMID.";
    0x0000_0C8E IA32_QM_CTR "Monitoring: the counter.";
    0x0000_0C8F IA32_PQR_ASSOC "Resource association: RMID and COS.";
    0x0000_0C90 IA32_L3_QOS_MASK_0 "First of the L3's capacity masks.";
    0x0000_0D10 IA32_L2_QOS_MASK_0 "First of the L2's capacity masks.";
    0x0000_0D50 IA32_MBA_THRTL_0 "First of the memory bandwidth delays (IA32_L2_QoS_Ext_BW_Thrtl_0).";
    0x0000_0DA0 IA32_XSS "Extended supervisor state mask.";
    0x0000_0DC0 MSR_LBR_INFO_0 "Last-branch records: first INFO.";
    0x0000_1200 IA32_LBR_0_INFO "Architectural last-branch records: first INFO.";
    0x0000_1309 MSR_RELOAD_FIXED_CTR0 "What the first fixed counter goes on from after a PEBS record in the processor trace.";
    0x0000_14C1 MSR_RELOAD_PMC0 "What the first general counter goes on from after a PEBS record in the processor trace.";
    0x0000_14CE IA32_LBR_CTL "Architectural last-branch records: control.";
    0x0000_14CF IA32_LBR_DEPTH "Architectural last-branch records: entries in use.";
    0x0000_1500 IA32_LBR_0_FROM_IP "Architectural last-branch records: first source.";
    0x0000_1600 IA32_LBR_0_TO_IP "Architectural last-branch records: first target.";
    0xC000_0080 IA32_EFER "Extended feature enables.";
    0xC000_0081 IA32_STAR "SYSCALL: target and segment selectors.";
    0xC000_0082 IA32_LSTAR "SYSCALL: target in 64-bit mode.";
    0xC000_0083 IA32_CSTAR "SYSCALL: target in compatibility mode; Intel parts hold it and never use it.";
    0xC000_0084 IA32_FMASK "SYSCALL: RFLAGS bits to clear.";
    0xC000_0100 IA32_FS_BASE "Base of FS.";
    0xC000_0101 IA32_GS_BASE "Base of GS.";
    0xC000_0102 IA32_KERNEL_GS_BASE "What SWAPGS exchanges with the base of GS.";
    0xC000_0103 IA32_TSC_AUX "What RDTSCP and RDPID return.";
}

/// Pentium 4: which micro-operations replays are tagged of, where later parts have the groups of adaptive records.
pub const MSR_PEBS_MATRIX_VERT: u32 = MSR_PEBS_DATA_CFG;

/// Architectural last-branch records: INFO of the last exception record, where P6 has ROB_CR_BKUPTMPDR6.
pub const IA32_LER_INFO: u32 = ROB_CR_BKUPTMPDR6;

#[cfg(test)]
#[path = "msr_test.rs"]
mod tests;
