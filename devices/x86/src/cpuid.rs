//! CPUID's feature bits under their manual names, and the set of them that a model shows.
//!
//! SDM Vol. 2A "CPUID—CPU Identification", table "Information Returned by CPUID Instruction".

use crate::model::CpuidRow;

/// A register of CPUID's answer; the value is its index in `[eax, ebx, ecx, edx]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Register {
    /// EAX.
    Eax,
    /// EBX.
    Ebx,
    /// ECX.
    Ecx,
    /// EDX.
    Edx,
}

/// Where a feature's bit stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// EAX on entry.
    pub leaf: u32,
    /// ECX on entry.
    pub subleaf: u32,
    /// The register on return.
    pub register: Register,
    /// The bit in it.
    pub bit: u32,
}

macro_rules! features {
    ($($leaf:literal, $subleaf:literal $register:ident $bit:literal $variant:ident $query:ident $name:literal $text:literal;)*) => {
        /// A feature that CPUID enumerates with one bit.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[repr(u8)]
        pub enum Feature {
            $(#[doc = $text] $variant,)*
        }

        impl Feature {
            /// Every feature, in the order of leaf, register and bit.
            pub const ALL: &[Feature] = &[$(Feature::$variant,)*];

            /// Where its bit stands.
            pub const fn place(self) -> Place {
                match self {
                    $(Feature::$variant => Place { leaf: $leaf, subleaf: $subleaf, register: Register::$register, bit: $bit },)*
                }
            }

            /// Its manual name.
            pub const fn name(self) -> &'static str {
                match self {
                    $(Feature::$variant => $name,)*
                }
            }
        }

        impl Features {
            $(#[doc = $text] pub const fn $query(self) -> bool { self.has(Feature::$variant) })*
        }
    };
}

/// The set of features that a CPU shows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Features(u128);

impl Features {
    /// Every feature there is a name for, shown or not: for tests of what no model shows yet.
    pub const fn all() -> Self {
        let mut set = Self(0);
        let mut i = 0;
        while i < Feature::ALL.len() {
            set = set.with(Feature::ALL[i]);
            i += 1;
        }
        set
    }

    /// What these CPUID rows show.
    pub const fn of(rows: &[CpuidRow]) -> Self {
        let mut set = Self(0);
        let mut f = 0;
        while f < Feature::ALL.len() {
            let place = Feature::ALL[f].place();
            let mut r = 0;
            while r < rows.len() {
                let subleaf = match rows[r].subleaf {
                    Some(subleaf) => subleaf,
                    None => place.subleaf,
                };
                let matches = rows[r].leaf == place.leaf && subleaf == place.subleaf;
                if matches && rows[r].regs[place.register as usize] >> place.bit & 1 != 0 {
                    set = set.with(Feature::ALL[f]);
                }
                r += 1;
            }
            f += 1;
        }
        set
    }

    /// Whether `feature` is in the set.
    pub const fn has(self, feature: Feature) -> bool {
        self.0 >> feature as u8 & 1 != 0
    }

    /// The set with `feature`.
    pub const fn with(self, feature: Feature) -> Self {
        Self(self.0 | 1 << feature as u8)
    }

    /// The set without `feature`.
    pub const fn without(self, feature: Feature) -> Self {
        Self(self.0 & !(1 << feature as u8))
    }
}

features! {
    0x1, 0 Ecx 0 Sse3 sse3 "SSE3" "SSE3 instructions.";
    0x1, 0 Ecx 1 Pclmulqdq pclmulqdq "PCLMULQDQ" "Carry-less multiplication.";
    0x1, 0 Ecx 2 Dtes64 dtes64 "DTES64" "64-bit debug-store area.";
    0x1, 0 Ecx 3 Monitor monitor "MONITOR" "MONITOR and MWAIT.";
    0x1, 0 Ecx 4 DsCpl ds_cpl "DS-CPL" "CPL-qualified debug store.";
    0x1, 0 Ecx 5 Vmx vmx "VMX" "Virtual-machine extensions.";
    0x1, 0 Ecx 6 Smx smx "SMX" "Safer-mode extensions.";
    0x1, 0 Ecx 7 Eist eist "EIST" "Enhanced SpeedStep.";
    0x1, 0 Ecx 8 Tm2 tm2 "TM2" "Thermal Monitor 2.";
    0x1, 0 Ecx 9 Ssse3 ssse3 "SSSE3" "SSSE3 instructions.";
    0x1, 0 Ecx 11 Sdbg sdbg "SDBG" "IA32_DEBUG_INTERFACE.";
    0x1, 0 Ecx 12 Fma fma "FMA" "Fused multiply-add.";
    0x1, 0 Ecx 13 Cmpxchg16b cmpxchg16b "CMPXCHG16B" "CMPXCHG16B.";
    0x1, 0 Ecx 14 XtprUpdate xtpr_update "xTPR Update Control" "xTPR update control.";
    0x1, 0 Ecx 15 Pdcm pdcm "PDCM" "IA32_PERF_CAPABILITIES.";
    0x1, 0 Ecx 17 Pcid pcid "PCID" "Process-context identifiers.";
    0x1, 0 Ecx 18 Dca dca "DCA" "Direct cache access.";
    0x1, 0 Ecx 19 Sse41 sse41 "SSE4_1" "SSE4.1 instructions.";
    0x1, 0 Ecx 20 Sse42 sse42 "SSE4_2" "SSE4.2 instructions.";
    0x1, 0 Ecx 21 X2apic x2apic "x2APIC" "x2APIC mode.";
    0x1, 0 Ecx 22 Movbe movbe "MOVBE" "MOVBE.";
    0x1, 0 Ecx 23 Popcnt popcnt "POPCNT" "POPCNT.";
    0x1, 0 Ecx 24 TscDeadline tsc_deadline "TSC-Deadline" "The APIC timer's deadline mode.";
    0x1, 0 Ecx 25 Aesni aesni "AESNI" "AES instructions.";
    0x1, 0 Ecx 26 Xsave xsave "XSAVE" "XSAVE, XRSTOR, XSETBV, XGETBV.";
    0x1, 0 Ecx 28 Avx avx "AVX" "AVX instructions.";
    0x1, 0 Ecx 29 F16c f16c "F16C" "16-bit floating-point conversion.";
    0x1, 0 Ecx 30 Rdrand rdrand "RDRAND" "RDRAND.";
    0x1, 0 Ecx 31 Hypervisor hypervisor "Hypervisor" "Zero on a bare part; hypervisors set it by convention.";
    0x1, 0 Edx 0 Fpu fpu "FPU" "x87.";
    0x1, 0 Edx 1 Vme vme "VME" "Virtual-8086 mode extensions.";
    0x1, 0 Edx 2 De de "DE" "Debugging extensions.";
    0x1, 0 Edx 3 Pse pse "PSE" "4-MiB pages.";
    0x1, 0 Edx 4 Tsc tsc "TSC" "RDTSC.";
    0x1, 0 Edx 5 Msr msr "MSR" "RDMSR and WRMSR.";
    0x1, 0 Edx 6 Pae pae "PAE" "Physical-address extension.";
    0x1, 0 Edx 7 Mce mce "MCE" "Machine-check exception.";
    0x1, 0 Edx 8 Cx8 cx8 "CX8" "CMPXCHG8B.";
    0x1, 0 Edx 9 Apic apic "APIC" "A local APIC.";
    0x1, 0 Edx 11 Sep sep "SEP" "SYSENTER and SYSEXIT.";
    0x1, 0 Edx 12 Mtrr mtrr "MTRR" "Memory-type range registers.";
    0x1, 0 Edx 13 Pge pge "PGE" "Global pages.";
    0x1, 0 Edx 14 Mca mca "MCA" "Machine-check architecture.";
    0x1, 0 Edx 15 Cmov cmov "CMOV" "CMOVcc and, with x87, FCMOVcc and FCOMI.";
    0x1, 0 Edx 16 Pat pat "PAT" "Page attribute table.";
    0x1, 0 Edx 17 Pse36 pse36 "PSE-36" "4-MiB pages above 4 GiB.";
    0x1, 0 Edx 18 Psn psn "PSN" "Processor serial number.";
    0x1, 0 Edx 19 Clfsh clfsh "CLFSH" "CLFLUSH.";
    0x1, 0 Edx 21 Ds ds "DS" "Debug store.";
    0x1, 0 Edx 22 Acpi acpi "ACPI" "Thermal monitor and clock-modulation MSRs.";
    0x1, 0 Edx 23 Mmx mmx "MMX" "MMX instructions.";
    0x1, 0 Edx 24 Fxsr fxsr "FXSR" "FXSAVE and FXRSTOR.";
    0x1, 0 Edx 25 Sse sse "SSE" "SSE instructions.";
    0x1, 0 Edx 26 Sse2 sse2 "SSE2" "SSE2 instructions.";
    0x1, 0 Edx 27 Ss ss "SS" "Self snoop.";
    0x1, 0 Edx 28 Htt htt "HTT" "The number of addressable IDs in EBX is valid.";
    0x1, 0 Edx 29 Tm tm "TM" "Thermal monitor.";
    0x1, 0 Edx 31 Pbe pbe "PBE" "Pending-break enable.";
    0x6, 0 Eax 0 Dts dts "Digital temperature sensor" "Digital temperature sensor.";
    0x6, 0 Eax 1 TurboBoost turbo_boost "Turbo Boost" "Turbo Boost.";
    0x6, 0 Eax 2 Arat arat "ARAT" "The APIC timer keeps running in every C-state.";
    0x6, 0 Ecx 0 HardwareCoordination hardware_coordination "Hardware coordination feedback" "IA32_MPERF and IA32_APERF.";
    0x6, 0 Ecx 3 EnergyBias energy_bias "Performance-energy bias" "IA32_ENERGY_PERF_BIAS.";
    0x7, 0 Ebx 0 Fsgsbase fsgsbase "FSGSBASE" "RDFSBASE and its kin.";
    0x7, 0 Ebx 1 TscAdjust tsc_adjust "IA32_TSC_ADJUST" "IA32_TSC_ADJUST.";
    0x7, 0 Ebx 3 Bmi1 bmi1 "BMI1" "BMI1 instructions.";
    0x7, 0 Ebx 5 Avx2 avx2 "AVX2" "AVX2 instructions.";
    0x7, 0 Ebx 7 Smep smep "SMEP" "Supervisor-mode execution prevention.";
    0x7, 0 Ebx 8 Bmi2 bmi2 "BMI2" "BMI2 instructions.";
    0x7, 0 Ebx 9 Erms erms "ERMS" "Enhanced REP MOVSB and STOSB.";
    0x7, 0 Ebx 10 Invpcid invpcid "INVPCID" "INVPCID.";
    0x7, 0 Ebx 18 Rdseed rdseed "RDSEED" "RDSEED.";
    0x7, 0 Ebx 19 Adx adx "ADX" "ADCX and ADOX.";
    0x7, 0 Ebx 20 Smap smap "SMAP" "Supervisor-mode access prevention, CLAC and STAC.";
    0x7, 0 Ebx 23 Clflushopt clflushopt "CLFLUSHOPT" "CLFLUSHOPT.";
    0x7, 0 Ebx 24 Clwb clwb "CLWB" "CLWB.";
    0x7, 0 Ebx 29 Sha sha "SHA" "SHA instructions.";
    0x7, 0 Ecx 2 Umip umip "UMIP" "User-mode instruction prevention.";
    0x7, 0 Ecx 3 Pku pku "PKU" "Protection keys for user pages.";
    0x7, 0 Ecx 16 La57 la57 "LA57" "57-bit linear addresses.";
    0x7, 0 Ecx 22 Rdpid rdpid "RDPID" "RDPID.";
    0xD, 1 Eax 0 Xsaveopt xsaveopt "XSAVEOPT" "XSAVEOPT.";
    0xD, 1 Eax 1 Xsavec xsavec "XSAVEC" "XSAVEC and the compacted format.";
    0xD, 1 Eax 2 Xgetbv1 xgetbv1 "XGETBV with ECX = 1" "XGETBV with ECX = 1.";
    0xD, 1 Eax 3 Xsaves xsaves "XSAVES" "XSAVES, XRSTORS and IA32_XSS.";
    0x8000_0001, 0 Ecx 0 LahfSahf lahf_sahf "LAHF/SAHF" "LAHF and SAHF in 64-bit mode.";
    0x8000_0001, 0 Ecx 5 Lzcnt lzcnt "LZCNT" "LZCNT.";
    0x8000_0001, 0 Ecx 8 Prefetchw prefetchw "PREFETCHW" "PREFETCHW.";
    0x8000_0001, 0 Edx 11 Syscall syscall "SYSCALL/SYSRET" "SYSCALL and SYSRET in 64-bit mode.";
    0x8000_0001, 0 Edx 20 Nx nx "Execute Disable Bit" "No-execute pages.";
    0x8000_0001, 0 Edx 26 Page1gb page1gb "1-GByte pages" "1-GiB pages.";
    0x8000_0001, 0 Edx 27 Rdtscp rdtscp "RDTSCP" "RDTSCP and IA32_TSC_AUX.";
    0x8000_0001, 0 Edx 29 Lm lm "Intel 64" "Intel 64 architecture.";
    0x8000_0007, 0 Edx 8 InvariantTsc invariant_tsc "Invariant TSC" "The TSC's rate never changes.";
}

const _: () = assert!(Feature::ALL.len() <= 128, "the set is a u128");
