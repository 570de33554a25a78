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
pub struct FeatureBit {
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
    ($($leaf:literal, $subleaf:literal $register:ident $bit:literal $variant:ident $query:ident $name:literal $flag:literal $text:literal;)*) => {
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
            pub const fn place(self) -> FeatureBit {
                match self {
                    $(Feature::$variant => FeatureBit { leaf: $leaf, subleaf: $subleaf, register: Register::$register, bit: $bit },)*
                }
            }

            /// Its manual name.
            pub const fn name(self) -> &'static str {
                match self {
                    $(Feature::$variant => $name,)*
                }
            }

            /// Its name in /proc/cpuinfo, and the one that a toggle of `--cpu-model` takes. A feature that Linux has no flag
            /// for has the name that is usual elsewhere.
            pub const fn flag(self) -> &'static str {
                match self {
                    $(Feature::$variant => $flag,)*
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
pub struct Features([u64; WORDS]);

const WORDS: usize = 4;

impl Features {
    /// The empty set.
    pub const NONE: Self = Self([0; WORDS]);

    /// The set of these features.
    pub const fn list(features: &[Feature]) -> Self {
        let mut set = Self::NONE;
        let mut i = 0;
        while i < features.len() {
            set = set.with(features[i]);
            i += 1;
        }
        set
    }

    /// Every feature there is a name for, shown or not: for tests of what no model shows yet.
    pub const fn all() -> Self {
        let mut set = Self::NONE;
        let mut i = 0;
        while i < Feature::ALL.len() {
            set = set.with(Feature::ALL[i]);
            i += 1;
        }
        set
    }

    /// What these CPUID rows, ascending by leaf, show.
    pub const fn of(rows: &[CpuidRow]) -> Self {
        let mut set = Self::NONE;
        // Features ascend by leaf too, so that the rows below one's leaf are done with.
        let (mut f, mut first) = (0, 0);
        while f < Feature::ALL.len() {
            let place = Feature::ALL[f].place();
            while first < rows.len() && rows[first].leaf < place.leaf {
                first += 1;
            }
            let mut r = first;
            while r < rows.len() && rows[r].leaf == place.leaf {
                if rows[r].answers(place.subleaf) && rows[r].regs[place.register as usize] >> place.bit & 1 != 0 {
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
        self.0[feature as usize / 64] >> (feature as usize % 64) & 1 != 0
    }

    /// The set with `feature`.
    pub const fn with(mut self, feature: Feature) -> Self {
        self.0[feature as usize / 64] |= 1 << (feature as usize % 64);
        self
    }

    /// The set without `feature`.
    pub const fn without(mut self, feature: Feature) -> Self {
        self.0[feature as usize / 64] &= !(1 << (feature as usize % 64));
        self
    }

    /// The features that are in both sets.
    pub const fn and(mut self, other: Self) -> Self {
        let mut i = 0;
        while i < WORDS {
            self.0[i] &= other.0[i];
            i += 1;
        }
        self
    }

    /// The features that are in either set.
    pub const fn or(mut self, other: Self) -> Self {
        let mut i = 0;
        while i < WORDS {
            self.0[i] |= other.0[i];
            i += 1;
        }
        self
    }

    /// The features of this set that are not in `other`.
    pub const fn minus(mut self, other: Self) -> Self {
        let mut i = 0;
        while i < WORDS {
            self.0[i] &= !other.0[i];
            i += 1;
        }
        self
    }

    /// The features in the set, in the order of [`Feature::ALL`].
    pub fn iter(self) -> impl Iterator<Item = Feature> {
        Feature::ALL.iter().copied().filter(move |&feature| self.has(feature))
    }
}

features! {
    0x1, 0 Ecx 0 Sse3 sse3 "SSE3" "pni" "SSE3 instructions.";
    0x1, 0 Ecx 1 Pclmulqdq pclmulqdq "PCLMULQDQ" "pclmulqdq" "Carry-less multiplication.";
    0x1, 0 Ecx 2 Dtes64 dtes64 "DTES64" "dtes64" "64-bit debug-store area.";
    0x1, 0 Ecx 3 Monitor monitor "MONITOR" "monitor" "MONITOR and MWAIT.";
    0x1, 0 Ecx 4 DsCpl ds_cpl "DS-CPL" "ds_cpl" "CPL-qualified debug store.";
    0x1, 0 Ecx 5 Vmx vmx "VMX" "vmx" "Virtual-machine extensions.";
    0x1, 0 Ecx 6 Smx smx "SMX" "smx" "Safer-mode extensions.";
    0x1, 0 Ecx 7 Eist eist "EIST" "est" "Enhanced SpeedStep.";
    0x1, 0 Ecx 8 Tm2 tm2 "TM2" "tm2" "Thermal Monitor 2.";
    0x1, 0 Ecx 9 Ssse3 ssse3 "SSSE3" "ssse3" "SSSE3 instructions.";
    0x1, 0 Ecx 10 CnxtId cnxt_id "CNXT-ID" "cid" "The L1 data cache can be adaptive or shared.";
    0x1, 0 Ecx 11 Sdbg sdbg "SDBG" "sdbg" "IA32_DEBUG_INTERFACE.";
    0x1, 0 Ecx 12 Fma fma "FMA" "fma" "Fused multiply-add.";
    0x1, 0 Ecx 13 Cmpxchg16b cmpxchg16b "CMPXCHG16B" "cx16" "CMPXCHG16B.";
    0x1, 0 Ecx 14 XtprUpdate xtpr_update "xTPR Update Control" "xtpr" "xTPR update control.";
    0x1, 0 Ecx 15 Pdcm pdcm "PDCM" "pdcm" "IA32_PERF_CAPABILITIES.";
    0x1, 0 Ecx 17 Pcid pcid "PCID" "pcid" "Process-context identifiers.";
    0x1, 0 Ecx 18 Dca dca "DCA" "dca" "Direct cache access.";
    0x1, 0 Ecx 19 Sse41 sse41 "SSE4_1" "sse4_1" "SSE4.1 instructions.";
    0x1, 0 Ecx 20 Sse42 sse42 "SSE4_2" "sse4_2" "SSE4.2 instructions.";
    0x1, 0 Ecx 21 X2apic x2apic "x2APIC" "x2apic" "x2APIC mode.";
    0x1, 0 Ecx 22 Movbe movbe "MOVBE" "movbe" "MOVBE.";
    0x1, 0 Ecx 23 Popcnt popcnt "POPCNT" "popcnt" "POPCNT.";
    0x1, 0 Ecx 24 TscDeadline tsc_deadline "TSC-Deadline" "tsc_deadline_timer" "The APIC timer's deadline mode.";
    0x1, 0 Ecx 25 Aesni aesni "AESNI" "aes" "AES instructions.";
    0x1, 0 Ecx 26 Xsave xsave "XSAVE" "xsave" "XSAVE, XRSTOR, XSETBV, XGETBV.";
    0x1, 0 Ecx 28 Avx avx "AVX" "avx" "AVX instructions.";
    0x1, 0 Ecx 29 F16c f16c "F16C" "f16c" "16-bit floating-point conversion.";
    0x1, 0 Ecx 30 Rdrand rdrand "RDRAND" "rdrand" "RDRAND.";
    0x1, 0 Ecx 31 Hypervisor hypervisor "Hypervisor" "hypervisor" "Zero on a bare part; hypervisors set it by convention.";
    0x1, 0 Edx 0 Fpu fpu "FPU" "fpu" "x87.";
    0x1, 0 Edx 1 Vme vme "VME" "vme" "Virtual-8086 mode extensions.";
    0x1, 0 Edx 2 De de "DE" "de" "Debugging extensions.";
    0x1, 0 Edx 3 Pse pse "PSE" "pse" "4-MiB pages.";
    0x1, 0 Edx 4 Tsc tsc "TSC" "tsc" "RDTSC.";
    0x1, 0 Edx 5 Msr msr "MSR" "msr" "RDMSR and WRMSR.";
    0x1, 0 Edx 6 Pae pae "PAE" "pae" "Physical-address extension.";
    0x1, 0 Edx 7 Mce mce "MCE" "mce" "Machine-check exception.";
    0x1, 0 Edx 8 Cx8 cx8 "CX8" "cx8" "CMPXCHG8B.";
    0x1, 0 Edx 9 Apic apic "APIC" "apic" "A local APIC.";
    0x1, 0 Edx 11 Sep sep "SEP" "sep" "SYSENTER and SYSEXIT.";
    0x1, 0 Edx 12 Mtrr mtrr "MTRR" "mtrr" "Memory-type range registers.";
    0x1, 0 Edx 13 Pge pge "PGE" "pge" "Global pages.";
    0x1, 0 Edx 14 Mca mca "MCA" "mca" "Machine-check architecture.";
    0x1, 0 Edx 15 Cmov cmov "CMOV" "cmov" "CMOVcc and, with x87, FCMOVcc and FCOMI.";
    0x1, 0 Edx 16 Pat pat "PAT" "pat" "Page attribute table.";
    0x1, 0 Edx 17 Pse36 pse36 "PSE-36" "pse36" "4-MiB pages above 4 GiB.";
    0x1, 0 Edx 18 Psn psn "PSN" "pn" "Processor serial number.";
    0x1, 0 Edx 19 Clfsh clfsh "CLFSH" "clflush" "CLFLUSH.";
    0x1, 0 Edx 21 Ds ds "DS" "ds" "Debug store.";
    0x1, 0 Edx 22 Acpi acpi "ACPI" "acpi" "Thermal monitor and clock-modulation MSRs.";
    0x1, 0 Edx 23 Mmx mmx "MMX" "mmx" "MMX instructions.";
    0x1, 0 Edx 24 Fxsr fxsr "FXSR" "fxsr" "FXSAVE and FXRSTOR.";
    0x1, 0 Edx 25 Sse sse "SSE" "sse" "SSE instructions.";
    0x1, 0 Edx 26 Sse2 sse2 "SSE2" "sse2" "SSE2 instructions.";
    0x1, 0 Edx 27 Ss ss "SS" "ss" "Self snoop.";
    0x1, 0 Edx 28 Htt htt "HTT" "ht" "The number of addressable IDs in EBX is valid.";
    0x1, 0 Edx 29 Tm tm "TM" "tm" "Thermal monitor.";
    0x1, 0 Edx 31 Pbe pbe "PBE" "pbe" "Pending-break enable.";
    0x6, 0 Eax 0 Dts dts "Digital temperature sensor" "dtherm" "Digital temperature sensor.";
    0x6, 0 Eax 1 TurboBoost turbo_boost "Turbo Boost" "ida" "Turbo Boost.";
    0x6, 0 Eax 2 Arat arat "ARAT" "arat" "The APIC timer keeps running in every C-state.";
    0x6, 0 Eax 7 Hwp hwp "HWP" "hwp" "Hardware-controlled performance states.";
    0x6, 0 Ecx 0 HardwareCoordination hardware_coordination "Hardware coordination feedback" "aperfmperf" "IA32_MPERF and IA32_APERF.";
    0x6, 0 Ecx 3 EnergyBias energy_bias "Performance-energy bias" "epb" "IA32_ENERGY_PERF_BIAS.";
    0x7, 0 Ebx 0 Fsgsbase fsgsbase "FSGSBASE" "fsgsbase" "RDFSBASE and its kin.";
    0x7, 0 Ebx 1 TscAdjust tsc_adjust "IA32_TSC_ADJUST" "tsc_adjust" "IA32_TSC_ADJUST.";
    0x7, 0 Ebx 2 Sgx sgx "SGX" "sgx" "Software Guard Extensions.";
    0x7, 0 Ebx 3 Bmi1 bmi1 "BMI1" "bmi1" "BMI1 instructions.";
    0x7, 0 Ebx 4 Hle hle "HLE" "hle" "Hardware lock elision.";
    0x7, 0 Ebx 5 Avx2 avx2 "AVX2" "avx2" "AVX2 instructions.";
    0x7, 0 Ebx 6 FdpExceptionOnly fdp_exception_only "FDP_EXCPTN_ONLY" "fdp_excptn_only" "The x87 data pointer is written by exceptions only.";
    0x7, 0 Ebx 7 Smep smep "SMEP" "smep" "Supervisor-mode execution prevention.";
    0x7, 0 Ebx 8 Bmi2 bmi2 "BMI2" "bmi2" "BMI2 instructions.";
    0x7, 0 Ebx 9 Erms erms "ERMS" "erms" "Enhanced REP MOVSB and STOSB.";
    0x7, 0 Ebx 10 Invpcid invpcid "INVPCID" "invpcid" "INVPCID.";
    0x7, 0 Ebx 11 Rtm rtm "RTM" "rtm" "Restricted transactional memory.";
    0x7, 0 Ebx 12 RdtM rdt_m "RDT-M" "cqm" "Resource Director monitoring.";
    0x7, 0 Ebx 13 NoFcsFds no_fcs_fds "FCS and FDS deprecated" "zero_fcs_fds" "FCS and FDS read 0.";
    0x7, 0 Ebx 14 Mpx mpx "MPX" "mpx" "Memory protection extensions.";
    0x7, 0 Ebx 15 RdtA rdt_a "RDT-A" "rdt_a" "Resource Director allocation.";
    0x7, 0 Ebx 16 Avx512f avx512f "AVX512F" "avx512f" "AVX-512 foundation.";
    0x7, 0 Ebx 17 Avx512dq avx512dq "AVX512DQ" "avx512dq" "AVX-512 doublewords and quadwords.";
    0x7, 0 Ebx 18 Rdseed rdseed "RDSEED" "rdseed" "RDSEED.";
    0x7, 0 Ebx 19 Adx adx "ADX" "adx" "ADCX and ADOX.";
    0x7, 0 Ebx 20 Smap smap "SMAP" "smap" "Supervisor-mode access prevention, CLAC and STAC.";
    0x7, 0 Ebx 21 Avx512ifma avx512ifma "AVX512_IFMA" "avx512ifma" "AVX-512 integer fused multiply-add.";
    0x7, 0 Ebx 23 Clflushopt clflushopt "CLFLUSHOPT" "clflushopt" "CLFLUSHOPT.";
    0x7, 0 Ebx 24 Clwb clwb "CLWB" "clwb" "CLWB.";
    0x7, 0 Ebx 25 IntelPt intel_pt "Intel Processor Trace" "intel_pt" "Intel Processor Trace.";
    0x7, 0 Ebx 28 Avx512cd avx512cd "AVX512CD" "avx512cd" "AVX-512 conflict detection.";
    0x7, 0 Ebx 29 Sha sha "SHA" "sha_ni" "SHA instructions.";
    0x7, 0 Ebx 30 Avx512bw avx512bw "AVX512BW" "avx512bw" "AVX-512 bytes and words.";
    0x7, 0 Ebx 31 Avx512vl avx512vl "AVX512VL" "avx512vl" "AVX-512 on shorter vectors.";
    0x7, 0 Ecx 1 Avx512vbmi avx512vbmi "AVX512_VBMI" "avx512vbmi" "AVX-512 byte permutations.";
    0x7, 0 Ecx 2 Umip umip "UMIP" "umip" "User-mode instruction prevention.";
    0x7, 0 Ecx 3 Pku pku "PKU" "pku" "Protection keys for user pages.";
    0x7, 0 Ecx 5 Waitpkg waitpkg "WAITPKG" "waitpkg" "UMONITOR, UMWAIT and TPAUSE.";
    0x7, 0 Ecx 6 Avx512vbmi2 avx512vbmi2 "AVX512_VBMI2" "avx512_vbmi2" "AVX-512 byte compression and shifts.";
    0x7, 0 Ecx 7 CetSs cet_ss "CET_SS" "shstk" "Shadow stacks.";
    0x7, 0 Ecx 8 Gfni gfni "GFNI" "gfni" "Galois-field instructions.";
    0x7, 0 Ecx 9 Vaes vaes "VAES" "vaes" "AES on wider vectors.";
    0x7, 0 Ecx 10 Vpclmulqdq vpclmulqdq "VPCLMULQDQ" "vpclmulqdq" "Carry-less multiplication on wider vectors.";
    0x7, 0 Ecx 11 Avx512vnni avx512vnni "AVX512_VNNI" "avx512_vnni" "AVX-512 neural-network instructions.";
    0x7, 0 Ecx 12 Avx512bitalg avx512bitalg "AVX512_BITALG" "avx512_bitalg" "AVX-512 bit algorithms.";
    0x7, 0 Ecx 13 Tme tme "TME_EN" "tme" "Total memory encryption.";
    0x7, 0 Ecx 14 Avx512vpopcntdq avx512vpopcntdq "AVX512_VPOPCNTDQ" "avx512_vpopcntdq" "AVX-512 population counts.";
    0x7, 0 Ecx 16 La57 la57 "LA57" "la57" "57-bit linear addresses.";
    0x7, 0 Ecx 22 Rdpid rdpid "RDPID" "rdpid" "RDPID.";
    0x7, 0 Ecx 23 KeyLocker key_locker "KL" "aes_kl" "Key Locker.";
    0x7, 0 Ecx 24 BusLockDetect bus_lock_detect "BUS_LOCK_DETECT" "bus_lock_detect" "Bus locks can raise debug exceptions.";
    0x7, 0 Ecx 25 Cldemote cldemote "CLDEMOTE" "cldemote" "CLDEMOTE.";
    0x7, 0 Ecx 27 Movdiri movdiri "MOVDIRI" "movdiri" "MOVDIRI.";
    0x7, 0 Ecx 28 Movdir64b movdir64b "MOVDIR64B" "movdir64b" "MOVDIR64B.";
    0x7, 0 Ecx 29 Enqcmd enqcmd "ENQCMD" "enqcmd" "ENQCMD and ENQCMDS.";
    0x7, 0 Ecx 30 SgxLc sgx_lc "SGX_LC" "sgx_lc" "SGX launch configuration.";
    0x7, 0 Ecx 31 Pks pks "PKS" "pks" "Protection keys for supervisor pages.";
    0x7, 0 Edx 1 SgxKeys sgx_keys "SGX-KEYS" "sgx_keys" "SGX attestation services.";
    0x7, 0 Edx 4 Fsrm fsrm "Fast Short REP MOV" "fsrm" "Fast short REP MOVSB.";
    0x7, 0 Edx 5 Uintr uintr "UINTR" "uintr" "User interrupts.";
    0x7, 0 Edx 8 Avx512vp2intersect avx512vp2intersect "AVX512_VP2INTERSECT" "avx512_vp2intersect" "AVX-512 intersection.";
    0x7, 0 Edx 9 SrbdsCtrl srbds_ctrl "SRBDS_CTRL" "srbds_ctrl" "IA32_MCU_OPT_CTRL and its RNGDS bit.";
    0x7, 0 Edx 10 MdClear md_clear "MD_CLEAR" "md_clear" "VERW overwrites internal buffers.";
    0x7, 0 Edx 11 RtmAlwaysAbort rtm_always_abort "RTM_ALWAYS_ABORT" "rtm_always_abort" "XBEGIN aborts at once.";
    0x7, 0 Edx 13 TsxForceAbort tsx_force_abort "RTM_FORCE_ABORT" "tsx_force_abort" "IA32_TSX_FORCE_ABORT.";
    0x7, 0 Edx 14 Serialize serialize "SERIALIZE" "serialize" "SERIALIZE.";
    0x7, 0 Edx 15 Hybrid hybrid "Hybrid" "hybrid_cpu" "The package has cores of several kinds.";
    0x7, 0 Edx 16 Tsxldtrk tsxldtrk "TSXLDTRK" "tsxldtrk" "Suspending of load tracking in transactions.";
    0x7, 0 Edx 18 Pconfig pconfig "PCONFIG" "pconfig" "PCONFIG.";
    0x7, 0 Edx 19 ArchLbr arch_lbr "Architectural LBRs" "arch_lbr" "Architectural last-branch records.";
    0x7, 0 Edx 20 CetIbt cet_ibt "CET_IBT" "ibt" "Indirect-branch tracking.";
    0x7, 0 Edx 22 AmxBf16 amx_bf16 "AMX-BF16" "amx_bf16" "AMX on bfloat16.";
    0x7, 0 Edx 23 Avx512fp16 avx512fp16 "AVX512_FP16" "avx512_fp16" "AVX-512 half precision.";
    0x7, 0 Edx 24 AmxTile amx_tile "AMX-TILE" "amx_tile" "AMX tiles.";
    0x7, 0 Edx 25 AmxInt8 amx_int8 "AMX-INT8" "amx_int8" "AMX on bytes.";
    0x7, 0 Edx 26 SpecCtrl spec_ctrl "IBRS and IBPB" "spec_ctrl" "IA32_SPEC_CTRL.IBRS and IA32_PRED_CMD.";
    0x7, 0 Edx 27 Stibp stibp "STIBP" "stibp" "IA32_SPEC_CTRL.STIBP.";
    0x7, 0 Edx 28 L1dFlush l1d_flush "L1D_FLUSH" "flush_l1d" "IA32_FLUSH_CMD.";
    0x7, 0 Edx 29 ArchCapabilities arch_capabilities "IA32_ARCH_CAPABILITIES" "arch_capabilities" "IA32_ARCH_CAPABILITIES.";
    0x7, 0 Edx 30 CoreCapabilities core_capabilities "IA32_CORE_CAPABILITIES" "core_capability" "IA32_CORE_CAPABILITIES.";
    0x7, 0 Edx 31 Ssbd ssbd "SSBD" "ssbd" "IA32_SPEC_CTRL.SSBD.";
    0x7, 1 Eax 4 AvxVnni avx_vnni "AVX-VNNI" "avx_vnni" "Neural-network instructions in VEX encoding.";
    0x7, 1 Eax 5 Avx512bf16 avx512bf16 "AVX512_BF16" "avx512_bf16" "AVX-512 on bfloat16.";
    0x7, 1 Eax 10 Fzrm fzrm "Fast zero-length REP MOVSB" "fzrm" "Fast zero-length REP MOVSB.";
    0x7, 1 Eax 11 Fsrs fsrs "Fast short REP STOSB" "fsrs" "Fast short REP STOSB.";
    0x7, 1 Eax 12 Fsrc fsrc "Fast short REP CMPSB/SCASB" "fsrc" "Fast short REP CMPSB and SCASB.";
    0x7, 1 Eax 22 Hreset hreset "HRESET" "hreset" "HRESET.";
    0xD, 1 Eax 0 Xsaveopt xsaveopt "XSAVEOPT" "xsaveopt" "XSAVEOPT.";
    0xD, 1 Eax 1 Xsavec xsavec "XSAVEC" "xsavec" "XSAVEC and the compacted format.";
    0xD, 1 Eax 2 Xgetbv1 xgetbv1 "XGETBV with ECX = 1" "xgetbv1" "XGETBV with ECX = 1.";
    0xD, 1 Eax 3 Xsaves xsaves "XSAVES" "xsaves" "XSAVES, XRSTORS and IA32_XSS.";
    0xD, 1 Eax 4 Xfd xfd "XFD" "xfd" "IA32_XFD.";
    0x8000_0001, 0 Ecx 0 LahfSahf lahf_sahf "LAHF/SAHF" "lahf_lm" "LAHF and SAHF in 64-bit mode.";
    0x8000_0001, 0 Ecx 5 Lzcnt lzcnt "LZCNT" "abm" "LZCNT.";
    0x8000_0001, 0 Ecx 8 Prefetchw prefetchw "PREFETCHW" "3dnowprefetch" "PREFETCHW.";
    0x8000_0001, 0 Edx 11 Syscall syscall "SYSCALL/SYSRET" "syscall" "SYSCALL and SYSRET in 64-bit mode.";
    0x8000_0001, 0 Edx 20 Nx nx "Execute Disable Bit" "nx" "No-execute pages.";
    0x8000_0001, 0 Edx 26 Page1gb page1gb "1-GByte pages" "pdpe1gb" "1-GiB pages.";
    0x8000_0001, 0 Edx 27 Rdtscp rdtscp "RDTSCP" "rdtscp" "RDTSCP and IA32_TSC_AUX.";
    0x8000_0001, 0 Edx 29 Lm lm "Intel 64" "lm" "Intel 64 architecture.";
    0x8000_0007, 0 Edx 8 InvariantTsc invariant_tsc "Invariant TSC" "nonstop_tsc" "The TSC's rate never changes.";
    0x8000_0008, 0 Ebx 9 Wbnoinvd wbnoinvd "WBNOINVD" "wbnoinvd" "WBNOINVD.";
}

const _: () = assert!(
    Feature::ALL.len() <= 64 * WORDS && Feature::ALL.len() <= 256,
    "every feature has its bit"
);
