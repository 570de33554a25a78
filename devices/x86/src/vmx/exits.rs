//! VM exits and VM-instruction errors as numbers. SDM Vol. 3D Appendix C "VMX Basic Exit Reasons"; Vol. 3C 31.4 "VM Instruction Error
//! Numbers", 25.9.2 "Information for VM Exits Due to Vectored Events".

macro_rules! numbers {
    ($(#[$meta:meta])* $type:ident { $($value:literal $name:ident $text:literal;)* }) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
        #[repr(u16)]
        pub enum $type {
            $(#[doc = $text] $name = $value,)*
        }

        impl $type {
            /// Each with its number and the manual's words.
            pub const ALL: &[($type, u16, &str)] = &[$(($type::$name, $value, $text),)*];

            /// The one of a number.
            pub fn of(number: u16) -> Option<Self> {
                match number {
                    $($value => Some($type::$name),)*
                    _ => None,
                }
            }

            /// The manual's words.
            pub fn text(self) -> &'static str {
                Self::ALL.iter().find(|row| row.0 == self).map_or("", |row| row.2)
            }
        }
    };
}

numbers! {
    /// Basic exit reasons: bits 15:0 of the exit reason.
    ExitReason {
        0 ExceptionOrNmi "Exception or non-maskable interrupt (NMI)";
        1 ExternalInterrupt "External interrupt";
        2 TripleFault "Triple fault";
        3 Init "INIT signal";
        4 StartUp "Start-up IPI (SIPI)";
        7 InterruptWindow "Interrupt window";
        8 NmiWindow "NMI window";
        9 TaskSwitch "Task switch";
        10 Cpuid "CPUID";
        11 Getsec "GETSEC";
        12 Hlt "HLT";
        13 Invd "INVD";
        14 Invlpg "INVLPG";
        15 Rdpmc "RDPMC";
        16 Rdtsc "RDTSC";
        17 Rsm "RSM";
        18 Vmcall "VMCALL";
        19 Vmclear "VMCLEAR";
        20 Vmlaunch "VMLAUNCH";
        21 Vmptrld "VMPTRLD";
        22 Vmptrst "VMPTRST";
        23 Vmread "VMREAD";
        24 Vmresume "VMRESUME";
        25 Vmwrite "VMWRITE";
        26 Vmxoff "VMXOFF";
        27 Vmxon "VMXON";
        28 CrAccess "Control-register accesses";
        29 MovDr "MOV DR";
        30 Io "I/O instruction";
        31 Rdmsr "RDMSR";
        32 Wrmsr "WRMSR";
        33 GuestState "VM-entry failure due to invalid guest state";
        34 MsrLoading "VM-entry failure due to MSR loading";
        36 Mwait "MWAIT";
        37 MonitorTrap "Monitor trap flag";
        39 Monitor "MONITOR";
        40 Pause "PAUSE";
        41 MachineCheckAtEntry "VM-entry failure due to machine-check event";
        43 TprBelowThreshold "TPR below threshold";
        44 ApicAccess "APIC access";
        45 VirtualizedEoi "Virtualized EOI";
        46 GdtrOrIdtr "Access to GDTR or IDTR";
        47 LdtrOrTr "Access to LDTR or TR";
        48 EptViolation "EPT violation";
        49 EptMisconfiguration "EPT misconfiguration";
        50 Invept "INVEPT";
        51 Rdtscp "RDTSCP";
        52 PreemptionTimer "VMX-preemption timer expired";
        53 Invvpid "INVVPID";
        54 Wbinvd "WBINVD or WBNOINVD";
        55 Xsetbv "XSETBV";
        56 ApicWrite "APIC write";
        57 Rdrand "RDRAND";
        58 Invpcid "INVPCID";
        59 Vmfunc "VMFUNC";
        60 Encls "ENCLS";
        61 Rdseed "RDSEED";
        62 PageModificationLogFull "Page-modification log full";
        63 Xsaves "XSAVES";
        64 Xrstors "XRSTORS";
        67 Umwait "UMWAIT";
        68 Tpause "TPAUSE";
    }
}

/// Bit 31 of the exit reason: the VM entry has failed, and the guest has not run.
pub const ENTRY_FAILURE: u32 = 1 << 31;

numbers! {
    /// What VMfail leaves in the VM-instruction error field.
    InstructionError {
        1 VmcallInRoot "VMCALL executed in VMX root operation";
        2 VmclearAddress "VMCLEAR with invalid physical address";
        3 VmclearVmxonPointer "VMCLEAR with VMXON pointer";
        4 VmlaunchNotClear "VMLAUNCH with non-clear VMCS";
        5 VmresumeNotLaunched "VMRESUME with non-launched VMCS";
        6 VmresumeAfterVmxoff "VMRESUME after VMXOFF";
        7 Controls "VM entry with invalid control field(s)";
        8 HostState "VM entry with invalid host-state field(s)";
        9 VmptrldAddress "VMPTRLD with invalid physical address";
        10 VmptrldVmxonPointer "VMPTRLD with VMXON pointer";
        11 VmptrldRevision "VMPTRLD with incorrect VMCS revision identifier";
        12 UnsupportedField "VMREAD/VMWRITE from/to unsupported VMCS component";
        13 ReadOnlyField "VMWRITE to read-only VMCS component";
        15 VmxonInRoot "VMXON executed in VMX root operation";
        26 EntryBlockedByMovSs "VM entry with events blocked by MOV SS";
        28 InvalidOperand "Invalid operand to INVEPT/INVVPID";
    }
}

/// The type of an event in interruption information: bits 10:8.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum EventKind {
    /// An external interrupt.
    External = 0,
    /// A non-maskable interrupt.
    Nmi = 2,
    /// A hardware exception.
    Hardware = 3,
    /// INT n.
    Software = 4,
    /// INT1.
    PrivilegedSoftware = 5,
    /// INT3 or INTO.
    SoftwareException = 6,
    /// At VM entry: a pending MTF VM exit.
    Other = 7,
}

/// VM-entry interruption information, VM-exit interruption information, IDT-vectoring information. SDM Vol. 3C Tables 25-16, 25-17,
/// 25-19.
#[bitfield_struct::bitfield(u32)]
#[derive(PartialEq, Eq)]
pub struct Interruption {
    /// The vector.
    pub vector: u8,
    /// The type: see [`EventKind`]; 1 is reserved.
    #[bits(3)]
    pub kind: u8,
    /// There is an error code: it is valid, or to be delivered.
    pub error_code: bool,
    /// In VM-exit interruption information: NMIs are unblocked due to IRET.
    pub nmi_unblocking: bool,
    #[bits(18)]
    pub reserved: u32,
    /// The field says something.
    pub valid: bool,
}

impl Interruption {
    /// An event.
    pub const fn event(kind: EventKind, vector: u8, error_code: bool) -> Self {
        Self::new()
            .with_vector(vector)
            .with_kind(kind as u8)
            .with_error_code(error_code)
            .with_valid(true)
    }
}

/// Guest interruptibility state. SDM Vol. 3C Table 25-3 "Format of Interruptibility State".
#[bitfield_struct::bitfield(u32)]
#[derive(PartialEq, Eq)]
pub struct Interruptibility {
    /// STI holds interrupts off.
    pub sti: bool,
    /// MOV SS or POP SS holds interrupts off.
    pub mov_ss: bool,
    /// In SMM.
    pub smi: bool,
    /// NMIs (with virtual NMIs: virtual ones) are blocked.
    pub nmi: bool,
    /// The VM exit came from enclave mode.
    pub enclave: bool,
    #[bits(27)]
    pub reserved: u32,
}

/// Guest activity states. SDM Vol. 3C 25.4.2 "Guest Non-Register State".
pub mod activity {
    /// Executing instructions.
    pub const ACTIVE: u32 = 0;
    /// After HLT.
    pub const HLT: u32 = 1;
    /// After a triple fault.
    pub const SHUTDOWN: u32 = 2;
    /// Waiting for a start-up IPI.
    pub const WAIT_FOR_SIPI: u32 = 3;
}

/// Exit qualifications of a VM-entry failure due to invalid guest state. SDM Vol. 3C 27.8 "VM-Entry Failures During or After
/// Loading Guest State".
pub mod failure {
    /// None of the others.
    pub const OTHER: u64 = 0;
    /// Loading the PDPTEs.
    pub const PDPTE: u64 = 2;
    /// Injection of an NMI while events are blocked by MOV SS. "not used" is 1.
    pub const NMI: u64 = 3;
    /// The VMCS link pointer.
    pub const LINK_POINTER: u64 = 4;
}

/// Offsets in the virtualization-exception information area. SDM Vol. 3C Table 26-1 "Format of the Virtualization-Exception
/// Information Area".
pub mod virtualization_exception {
    /// What the exit reason would have been, 32 bits.
    pub const REASON: u64 = 0;
    /// All ones once there is one; as long as it is not 0, EPT violations cause VM exits.
    pub const BUSY: u64 = 4;
    /// The exit qualification.
    pub const QUALIFICATION: u64 = 8;
    /// The guest-linear address.
    pub const LINEAR: u64 = 16;
    /// The guest-physical address.
    pub const PHYSICAL: u64 = 24;
    /// The EPTP index, 16 bits.
    pub const EPTP_INDEX: u64 = 32;
}

/// Access types in bits 15:12 of the exit qualification of an APIC-access VM exit. SDM Vol. 3C Table 28-6 "Exit Qualification for APIC-Access VM
/// Exits from Linear Accesses and Guest-Physical Accesses".
pub mod apic_access {
    /// The first bit of the access type; below it is the offset on the page.
    pub const SHIFT: u32 = 12;
    /// A linear access that reads data.
    pub const READ: u64 = 0;
    /// A linear access that writes data.
    pub const WRITE: u64 = 1;
    /// A linear access that fetches an instruction.
    pub const FETCH: u64 = 2;
    /// A linear access during event delivery.
    pub const DELIVERY: u64 = 3;
    /// A guest-physical access during event delivery.
    pub const PHYSICAL_DELIVERY: u64 = 10;
    /// A guest-physical access for a fetch or during the execution of an instruction.
    pub const PHYSICAL: u64 = 15;
}

/// What a VMX abort leaves in the abort indicator. SDM Vol. 3C 28.7 "VMX Aborts".
pub mod abort {
    /// Saving guest MSRs.
    pub const SAVE_MSRS: u32 = 1;
    /// Host PDPTEs.
    pub const HOST_PDPTES: u32 = 2;
    /// Loading host MSRs.
    pub const LOAD_MSRS: u32 = 4;
}
