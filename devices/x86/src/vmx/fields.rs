//! The fields of a VMCS. SDM Vol. 3D Appendix B "Field Encoding in VMCS"; Vol. 3C 25.11.2 "VMREAD, VMWRITE, and Encodings of VMCS
//! Fields".
//!
//! The data of a VMCS region is implementation-specific. Here every field has a slot of eight bytes, at a place that follows from
//! its encoding, so that the region in guest memory is the VMCS and nothing of it is kept elsewhere.

use super::caps::VmxCaps;
use super::controls::{Entry, Exit, Pin, Primary, Secondary};

/// The encoding of a field.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Field(pub u32);

/// How wide a field is: bits 14:13 of its encoding.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Width {
    /// 16 bits.
    Bits16,
    /// 64 bits; an encoding with bit 0 set is that of the upper half.
    Bits64,
    /// 32 bits.
    Bits32,
    /// 64 bits on a part with Intel 64 architecture, 32 elsewhere.
    Natural,
}

/// What makes a field exist: the control that it belongs to can be 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Needs {
    /// It exists on every part.
    Nothing,
    /// A pin-based control.
    Pin(Pin),
    /// A primary processor-based control.
    Primary(Primary),
    /// A secondary processor-based control.
    Secondary(Secondary),
    /// A VM-exit control.
    Exit(Exit),
    /// A VM-entry control.
    Entry(Entry),
    /// Either control.
    Either(Exit, Entry),
}

/// A row of the table.
#[derive(Clone, Copy, Debug)]
pub struct FieldRow {
    /// The encoding, that of the whole field.
    pub field: Field,
    /// The manual's name.
    pub name: &'static str,
    /// What makes it exist.
    pub needs: Needs,
}

macro_rules! fields {
    ($($encoding:literal $constant:ident $needs:expr, $name:literal;)*) => {
        impl Field {
            $(#[doc = $name] pub const $constant: Field = Field($encoding);)*
        }

        /// Every field, ascending by encoding.
        pub const FIELDS: &[FieldRow] = &[$(FieldRow { field: Field($encoding), name: $name, needs: $needs },)*];
    };
}

const ALWAYS: Needs = Needs::Nothing;
const fn secondary(control: Secondary) -> Needs {
    Needs::Secondary(control)
}

fields! {
    0x0000 VPID secondary(Secondary::VPID), "Virtual-processor identifier (VPID)";
    0x0002 POSTED_INTERRUPT_VECTOR Needs::Pin(Pin::POSTED_INTERRUPTS), "Posted-interrupt notification vector";
    0x0004 EPTP_INDEX secondary(Secondary::VIRTUALIZATION_EXCEPTION), "EPTP index";
    0x0800 GUEST_ES ALWAYS, "Guest ES selector";
    0x0802 GUEST_CS ALWAYS, "Guest CS selector";
    0x0804 GUEST_SS ALWAYS, "Guest SS selector";
    0x0806 GUEST_DS ALWAYS, "Guest DS selector";
    0x0808 GUEST_FS ALWAYS, "Guest FS selector";
    0x080A GUEST_GS ALWAYS, "Guest GS selector";
    0x080C GUEST_LDTR ALWAYS, "Guest LDTR selector";
    0x080E GUEST_TR ALWAYS, "Guest TR selector";
    0x0810 GUEST_INTERRUPT_STATUS secondary(Secondary::VIRTUAL_INTERRUPTS), "Guest interrupt status";
    0x0812 PML_INDEX secondary(Secondary::PML), "PML index";
    0x0C00 HOST_ES ALWAYS, "Host ES selector";
    0x0C02 HOST_CS ALWAYS, "Host CS selector";
    0x0C04 HOST_SS ALWAYS, "Host SS selector";
    0x0C06 HOST_DS ALWAYS, "Host DS selector";
    0x0C08 HOST_FS ALWAYS, "Host FS selector";
    0x0C0A HOST_GS ALWAYS, "Host GS selector";
    0x0C0C HOST_TR ALWAYS, "Host TR selector";
    0x2000 IO_BITMAP_A ALWAYS, "Address of I/O bitmap A";
    0x2002 IO_BITMAP_B ALWAYS, "Address of I/O bitmap B";
    0x2004 MSR_BITMAP Needs::Primary(Primary::MSR_BITMAPS), "Address of MSR bitmaps";
    0x2006 EXIT_MSR_STORE ALWAYS, "VM-exit MSR-store address";
    0x2008 EXIT_MSR_LOAD ALWAYS, "VM-exit MSR-load address";
    0x200A ENTRY_MSR_LOAD ALWAYS, "VM-entry MSR-load address";
    0x200C EXECUTIVE_VMCS ALWAYS, "Executive-VMCS pointer";
    0x200E PML_ADDRESS secondary(Secondary::PML), "PML address";
    0x2010 TSC_OFFSET ALWAYS, "TSC offset";
    0x2012 VIRTUAL_APIC Needs::Primary(Primary::TPR_SHADOW), "Virtual-APIC address";
    0x2014 APIC_ACCESS secondary(Secondary::APIC_ACCESSES), "APIC-access address";
    0x2016 POSTED_INTERRUPT_DESCRIPTOR Needs::Pin(Pin::POSTED_INTERRUPTS), "Posted-interrupt descriptor address";
    0x2018 VM_FUNCTIONS secondary(Secondary::VM_FUNCTIONS), "VM-function controls";
    0x201A EPT_POINTER secondary(Secondary::EPT), "EPT pointer";
    0x201C EOI_EXIT_0 secondary(Secondary::VIRTUAL_INTERRUPTS), "EOI-exit bitmap 0";
    0x201E EOI_EXIT_1 secondary(Secondary::VIRTUAL_INTERRUPTS), "EOI-exit bitmap 1";
    0x2020 EOI_EXIT_2 secondary(Secondary::VIRTUAL_INTERRUPTS), "EOI-exit bitmap 2";
    0x2022 EOI_EXIT_3 secondary(Secondary::VIRTUAL_INTERRUPTS), "EOI-exit bitmap 3";
    0x2024 EPTP_LIST secondary(Secondary::VM_FUNCTIONS), "EPTP-list address";
    0x2026 VMREAD_BITMAP secondary(Secondary::VMCS_SHADOWING), "VMREAD-bitmap address";
    0x2028 VMWRITE_BITMAP secondary(Secondary::VMCS_SHADOWING), "VMWRITE-bitmap address";
    0x202A VIRTUALIZATION_EXCEPTION_AREA secondary(Secondary::VIRTUALIZATION_EXCEPTION), "Virtualization-exception information address";
    0x202C XSS_EXITING secondary(Secondary::XSAVES), "XSS-exiting bitmap";
    0x2032 TSC_MULTIPLIER secondary(Secondary::TSC_SCALING), "TSC multiplier";
    0x2400 GUEST_PHYSICAL_ADDRESS secondary(Secondary::EPT), "Guest-physical address";
    0x2800 LINK_POINTER ALWAYS, "VMCS link pointer";
    0x2802 GUEST_DEBUGCTL ALWAYS, "Guest IA32_DEBUGCTL";
    0x2804 GUEST_PAT Needs::Either(Exit::SAVE_PAT, Entry::LOAD_PAT), "Guest IA32_PAT";
    0x2806 GUEST_EFER Needs::Either(Exit::SAVE_EFER, Entry::LOAD_EFER), "Guest IA32_EFER";
    0x2808 GUEST_PERF_GLOBAL_CTRL Needs::Entry(Entry::LOAD_PERF_GLOBAL_CTRL), "Guest IA32_PERF_GLOBAL_CTRL";
    0x280A GUEST_PDPTE0 secondary(Secondary::EPT), "Guest PDPTE0";
    0x280C GUEST_PDPTE1 secondary(Secondary::EPT), "Guest PDPTE1";
    0x280E GUEST_PDPTE2 secondary(Secondary::EPT), "Guest PDPTE2";
    0x2810 GUEST_PDPTE3 secondary(Secondary::EPT), "Guest PDPTE3";
    0x2814 GUEST_RTIT_CTL Needs::Either(Exit::CLEAR_RTIT_CTL, Entry::LOAD_RTIT_CTL), "Guest IA32_RTIT_CTL";
    0x2816 GUEST_LBR_CTL Needs::Either(Exit::CLEAR_LBR_CTL, Entry::LOAD_LBR_CTL), "Guest IA32_LBR_CTL";
    0x2818 GUEST_PKRS Needs::Entry(Entry::LOAD_PKRS), "Guest IA32_PKRS";
    0x2C00 HOST_PAT Needs::Exit(Exit::LOAD_PAT), "Host IA32_PAT";
    0x2C02 HOST_EFER Needs::Exit(Exit::LOAD_EFER), "Host IA32_EFER";
    0x2C04 HOST_PERF_GLOBAL_CTRL Needs::Exit(Exit::LOAD_PERF_GLOBAL_CTRL), "Host IA32_PERF_GLOBAL_CTRL";
    0x2C06 HOST_PKRS Needs::Exit(Exit::LOAD_PKRS), "Host IA32_PKRS";
    0x4000 PIN_CONTROLS ALWAYS, "Pin-based VM-execution controls";
    0x4002 PRIMARY_CONTROLS ALWAYS, "Primary processor-based VM-execution controls";
    0x4004 EXCEPTION_BITMAP ALWAYS, "Exception bitmap";
    0x4006 PAGE_FAULT_MASK ALWAYS, "Page-fault error-code mask";
    0x4008 PAGE_FAULT_MATCH ALWAYS, "Page-fault error-code match";
    0x400A CR3_TARGET_COUNT ALWAYS, "CR3-target count";
    0x400C EXIT_CONTROLS ALWAYS, "VM-exit controls";
    0x400E EXIT_MSR_STORE_COUNT ALWAYS, "VM-exit MSR-store count";
    0x4010 EXIT_MSR_LOAD_COUNT ALWAYS, "VM-exit MSR-load count";
    0x4012 ENTRY_CONTROLS ALWAYS, "VM-entry controls";
    0x4014 ENTRY_MSR_LOAD_COUNT ALWAYS, "VM-entry MSR-load count";
    0x4016 ENTRY_INTERRUPTION ALWAYS, "VM-entry interruption-information field";
    0x4018 ENTRY_ERROR_CODE ALWAYS, "VM-entry exception error code";
    0x401A ENTRY_INSTRUCTION_LENGTH ALWAYS, "VM-entry instruction length";
    0x401C TPR_THRESHOLD Needs::Primary(Primary::TPR_SHADOW), "TPR threshold";
    0x401E SECONDARY_CONTROLS Needs::Primary(Primary::SECONDARY), "Secondary processor-based VM-execution controls";
    0x4020 PLE_GAP secondary(Secondary::PAUSE_LOOP), "PLE_Gap";
    0x4022 PLE_WINDOW secondary(Secondary::PAUSE_LOOP), "PLE_Window";
    0x4400 INSTRUCTION_ERROR ALWAYS, "VM-instruction error";
    0x4402 EXIT_REASON ALWAYS, "Exit reason";
    0x4404 EXIT_INTERRUPTION ALWAYS, "VM-exit interruption information";
    0x4406 EXIT_ERROR_CODE ALWAYS, "VM-exit interruption error code";
    0x4408 IDT_VECTORING ALWAYS, "IDT-vectoring information field";
    0x440A IDT_VECTORING_ERROR_CODE ALWAYS, "IDT-vectoring error code";
    0x440C EXIT_INSTRUCTION_LENGTH ALWAYS, "VM-exit instruction length";
    0x440E EXIT_INSTRUCTION_INFORMATION ALWAYS, "VM-exit instruction information";
    0x4800 GUEST_ES_LIMIT ALWAYS, "Guest ES limit";
    0x4802 GUEST_CS_LIMIT ALWAYS, "Guest CS limit";
    0x4804 GUEST_SS_LIMIT ALWAYS, "Guest SS limit";
    0x4806 GUEST_DS_LIMIT ALWAYS, "Guest DS limit";
    0x4808 GUEST_FS_LIMIT ALWAYS, "Guest FS limit";
    0x480A GUEST_GS_LIMIT ALWAYS, "Guest GS limit";
    0x480C GUEST_LDTR_LIMIT ALWAYS, "Guest LDTR limit";
    0x480E GUEST_TR_LIMIT ALWAYS, "Guest TR limit";
    0x4810 GUEST_GDTR_LIMIT ALWAYS, "Guest GDTR limit";
    0x4812 GUEST_IDTR_LIMIT ALWAYS, "Guest IDTR limit";
    0x4814 GUEST_ES_RIGHTS ALWAYS, "Guest ES access rights";
    0x4816 GUEST_CS_RIGHTS ALWAYS, "Guest CS access rights";
    0x4818 GUEST_SS_RIGHTS ALWAYS, "Guest SS access rights";
    0x481A GUEST_DS_RIGHTS ALWAYS, "Guest DS access rights";
    0x481C GUEST_FS_RIGHTS ALWAYS, "Guest FS access rights";
    0x481E GUEST_GS_RIGHTS ALWAYS, "Guest GS access rights";
    0x4820 GUEST_LDTR_RIGHTS ALWAYS, "Guest LDTR access rights";
    0x4822 GUEST_TR_RIGHTS ALWAYS, "Guest TR access rights";
    0x4824 GUEST_INTERRUPTIBILITY ALWAYS, "Guest interruptibility state";
    0x4826 GUEST_ACTIVITY ALWAYS, "Guest activity state";
    0x4828 GUEST_SMBASE ALWAYS, "Guest SMBASE";
    0x482A GUEST_SYSENTER_CS ALWAYS, "Guest IA32_SYSENTER_CS";
    0x482E PREEMPTION_TIMER Needs::Pin(Pin::PREEMPTION_TIMER), "VMX-preemption timer value";
    0x4C00 HOST_SYSENTER_CS ALWAYS, "Host IA32_SYSENTER_CS";
    0x6000 CR0_MASK ALWAYS, "CR0 guest/host mask";
    0x6002 CR4_MASK ALWAYS, "CR4 guest/host mask";
    0x6004 CR0_SHADOW ALWAYS, "CR0 read shadow";
    0x6006 CR4_SHADOW ALWAYS, "CR4 read shadow";
    0x6008 CR3_TARGET_0 ALWAYS, "CR3-target value 0";
    0x600A CR3_TARGET_1 ALWAYS, "CR3-target value 1";
    0x600C CR3_TARGET_2 ALWAYS, "CR3-target value 2";
    0x600E CR3_TARGET_3 ALWAYS, "CR3-target value 3";
    0x6400 EXIT_QUALIFICATION ALWAYS, "Exit qualification";
    0x6402 IO_RCX ALWAYS, "I/O RCX";
    0x6404 IO_RSI ALWAYS, "I/O RSI";
    0x6406 IO_RDI ALWAYS, "I/O RDI";
    0x6408 IO_RIP ALWAYS, "I/O RIP";
    0x640A GUEST_LINEAR_ADDRESS ALWAYS, "Guest-linear address";
    0x6800 GUEST_CR0 ALWAYS, "Guest CR0";
    0x6802 GUEST_CR3 ALWAYS, "Guest CR3";
    0x6804 GUEST_CR4 ALWAYS, "Guest CR4";
    0x6806 GUEST_ES_BASE ALWAYS, "Guest ES base";
    0x6808 GUEST_CS_BASE ALWAYS, "Guest CS base";
    0x680A GUEST_SS_BASE ALWAYS, "Guest SS base";
    0x680C GUEST_DS_BASE ALWAYS, "Guest DS base";
    0x680E GUEST_FS_BASE ALWAYS, "Guest FS base";
    0x6810 GUEST_GS_BASE ALWAYS, "Guest GS base";
    0x6812 GUEST_LDTR_BASE ALWAYS, "Guest LDTR base";
    0x6814 GUEST_TR_BASE ALWAYS, "Guest TR base";
    0x6816 GUEST_GDTR_BASE ALWAYS, "Guest GDTR base";
    0x6818 GUEST_IDTR_BASE ALWAYS, "Guest IDTR base";
    0x681A GUEST_DR7 ALWAYS, "Guest DR7";
    0x681C GUEST_RSP ALWAYS, "Guest RSP";
    0x681E GUEST_RIP ALWAYS, "Guest RIP";
    0x6820 GUEST_RFLAGS ALWAYS, "Guest RFLAGS";
    0x6822 GUEST_PENDING_DEBUG ALWAYS, "Guest pending debug exceptions";
    0x6824 GUEST_SYSENTER_ESP ALWAYS, "Guest IA32_SYSENTER_ESP";
    0x6826 GUEST_SYSENTER_EIP ALWAYS, "Guest IA32_SYSENTER_EIP";
    0x6C00 HOST_CR0 ALWAYS, "Host CR0";
    0x6C02 HOST_CR3 ALWAYS, "Host CR3";
    0x6C04 HOST_CR4 ALWAYS, "Host CR4";
    0x6C06 HOST_FS_BASE ALWAYS, "Host FS base";
    0x6C08 HOST_GS_BASE ALWAYS, "Host GS base";
    0x6C0A HOST_TR_BASE ALWAYS, "Host TR base";
    0x6C0C HOST_GDTR_BASE ALWAYS, "Host GDTR base";
    0x6C0E HOST_IDTR_BASE ALWAYS, "Host IDTR base";
    0x6C10 HOST_SYSENTER_ESP ALWAYS, "Host IA32_SYSENTER_ESP";
    0x6C12 HOST_SYSENTER_EIP ALWAYS, "Host IA32_SYSENTER_EIP";
    0x6C14 HOST_RSP ALWAYS, "Host RSP";
    0x6C16 HOST_RIP ALWAYS, "Host RIP";
}

/// Slots of each kind of field, by width (16, 64, 32 bits, natural) and type (control, exit information, guest, host).
const ROOM: [[usize; 4]; 4] = [[8, 0, 16, 8], [48, 8, 16, 8], [24, 8, 24, 8], [16, 8, 24, 16]];
/// The first slot of each kind of field.
const FIRST: [[usize; 4]; 4] = {
    let (mut first, mut next) = ([[0; 4]; 4], HEAD);
    let mut kind = 0;
    while kind < 16 {
        first[kind / 4][kind % 4] = next;
        next += ROOM[kind / 4][kind % 4];
        kind += 1;
    }
    first
};
/// Slots ahead of the fields: revision identifier and abort indicator, launch state.
const HEAD: usize = 2;
/// Slots of a region.
pub const SLOTS: usize = 256;
/// Bytes of a VMCS region that are used; the region is 4-KByte aligned. IA32_VMX_BASIC reports this.
pub const REGION: usize = SLOTS * 8;

impl Field {
    /// The field of an encoding that VMREAD or VMWRITE was given, with whether it asks for the upper half of a 64-bit field; `None`:
    /// no such field.
    pub fn of_encoding(encoding: u64) -> Option<(&'static FieldRow, bool)> {
        let encoding = u32::try_from(encoding).ok()?;
        let high = encoding & 1 != 0;
        let row = FIELDS
            .binary_search_by_key(&Field(encoding & !1), |row| row.field)
            .ok()?;
        let row = &FIELDS[row];
        (!high || row.field.width() == Width::Bits64).then_some((row, high))
    }

    /// The width.
    pub const fn width(self) -> Width {
        match self.0 >> 13 & 3 {
            0 => Width::Bits16,
            1 => Width::Bits64,
            2 => Width::Bits32,
            _ => Width::Natural,
        }
    }

    /// VM-exit information: VMWRITE cannot write it unless IA32_VMX_MISC\[29\] says so.
    pub const fn read_only(self) -> bool {
        self.0 >> 10 & 3 == 1
    }

    /// Its place in the region, in units of eight bytes.
    #[inline]
    pub const fn slot(self) -> usize {
        FIRST[(self.0 >> 13 & 3) as usize][(self.0 >> 10 & 3) as usize] + (self.0 >> 1 & 0x1ff) as usize
    }

    /// The bits that it holds.
    const fn mask(self) -> u64 {
        match self.width() {
            Width::Bits16 => 0xffff,
            Width::Bits32 => 0xffff_ffff,
            Width::Bits64 | Width::Natural => u64::MAX,
        }
    }
}

impl FieldRow {
    /// The part has the field.
    pub const fn exists(&self, caps: &VmxCaps) -> bool {
        match self.needs {
            Needs::Nothing => true,
            Needs::Pin(control) => caps.pin.contains(control),
            Needs::Primary(control) => caps.primary.contains(control),
            Needs::Secondary(control) => caps.secondary.contains(control),
            Needs::Exit(control) => caps.exit.contains(control),
            Needs::Entry(control) => caps.entry.contains(control),
            Needs::Either(exit, entry) => caps.exit.contains(exit) || caps.entry.contains(entry),
        }
    }
}

/// Whether a VMCS has been launched. SDM Vol. 3C 25.1 "Overview", Figure 25-1 "States of VMCS X".
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Launch {
    /// Since VMCLEAR.
    Clear,
    /// Since VMLAUNCH.
    Launched,
}

/// The data of a VMCS region.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Vmcs(pub [u64; SLOTS]);

impl Default for Vmcs {
    fn default() -> Self {
        Vmcs([0; SLOTS])
    }
}

/// Bit 31 of a region's first word: it is a shadow VMCS.
pub const SHADOW: u32 = 1 << 31;
/// Offset of the VMX-abort indicator. SDM Vol. 3C 25.2 "Format of the VMCS Region".
pub const ABORT_INDICATOR: u64 = 4;
/// Offset of the launch state.
pub const LAUNCH_STATE: u64 = 8;

impl Vmcs {
    /// From the region's bytes.
    pub fn from_bytes(bytes: &[u8; REGION]) -> Vmcs {
        let mut vmcs = Vmcs::default();
        for (slot, bytes) in vmcs.0.iter_mut().zip(bytes.as_chunks::<8>().0) {
            *slot = u64::from_le_bytes(*bytes);
        }
        vmcs
    }

    /// The region's bytes.
    pub fn to_bytes(&self) -> [u8; REGION] {
        let mut bytes = [0; REGION];
        for (slot, bytes) in self.0.iter().zip(bytes.as_chunks_mut::<8>().0) {
            *bytes = slot.to_le_bytes();
        }
        bytes
    }

    /// The first word: VMCS revision identifier, and bit 31 for a shadow VMCS.
    pub fn identifier(&self) -> u32 {
        self.0[0] as u32
    }

    /// Whether it has been launched.
    pub fn launch(&self) -> Launch {
        if self.0[1] & 1 == 0 {
            Launch::Clear
        } else {
            Launch::Launched
        }
    }

    /// Sets whether it has been launched.
    pub fn set_launch(&mut self, launch: Launch) {
        self.0[1] = (launch == Launch::Launched).into();
    }

    /// The value of a field.
    #[inline]
    pub fn get(&self, field: Field) -> u64 {
        self.0[field.slot()] & field.mask()
    }

    /// Sets a field, cut to its width.
    #[inline]
    pub fn set(&mut self, field: Field, value: u64) {
        self.0[field.slot()] = value & field.mask();
    }

    /// A 32-bit field.
    #[inline]
    pub fn get32(&self, field: Field) -> u32 {
        self.get(field) as u32
    }
}

#[cfg(test)]
#[path = "fields_test.rs"]
mod tests;
