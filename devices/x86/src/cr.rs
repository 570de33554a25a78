//! The control registers and IA32_EFER, with the manual's rules about what may be written to them.
//!
//! SDM Vol. 3A 2.5 "Control Registers", 2.2.1 "Extended Feature Enable Register"; SDM Vol. 2B "MOV—Move to/from Control
//! Registers". A rule that needs only the value is in `accept`; one that needs other registers is in `may_become`.

use crate::cpuid::Features;
use bitfield_struct::bitfield;
use serde::{Deserialize, Serialize};

/// The guest gets #GP(0).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GeneralProtection;

/// CR0.
#[bitfield(u64)]
#[derive(PartialEq, Eq, Serialize, Deserialize)]
pub struct Cr0 {
    /// Protection enable.
    pub pe: bool,
    /// Monitor coprocessor: WAIT obeys TS.
    pub mp: bool,
    /// Emulation: x87 instructions raise #NM, SSE instructions #UD.
    pub em: bool,
    /// Task switched: x87, MMX and SSE instructions raise #NM.
    pub ts: bool,
    /// Extension type: 1 on every part since the Pentium.
    pub et: bool,
    /// Numeric error: x87 errors raise #MF.
    pub ne: bool,
    #[bits(10)]
    __: u16,
    /// Write protect: supervisor writes obey read-only pages.
    pub wp: bool,
    __: bool,
    /// Alignment mask: RFLAGS.AC counts.
    pub am: bool,
    #[bits(10)]
    __: u16,
    /// Not write-through.
    pub nw: bool,
    /// Cache disable.
    pub cd: bool,
    /// Paging.
    pub pg: bool,
    __: u32,
}

impl Cr0 {
    /// After power-up or reset: 60000010H. SDM Vol. 3A Table 10-1.
    pub const RESET: Self = Self::from_bits(0x6000_0010);

    /// Bits that keep what is written; the other bits of 31:0 ignore writes.
    const IMPLEMENTED: u64 = 0xE005_003F;

    /// What MOV to CR0 of `value` would load, as far as the value alone decides.
    ///
    /// # Errors
    /// #GP(0) for a bit in 63:32, paging without protection, or NW without CD.
    pub const fn accept(value: u64) -> Result<Self, GeneralProtection> {
        let next = Self::from_bits(value & Self::IMPLEMENTED).with_et(true);
        if value >> 32 != 0 || next.pg() && !next.pe() || next.nw() && !next.cd() {
            return Err(GeneralProtection);
        }
        Ok(next)
    }

    /// Whether MOV to CR0 may go from `self` to `next` while CR4, IA32_EFER and CS.L are as given.
    ///
    /// Not checked here: loading the PDPTEs, which can fault too (SDM Vol. 3A 5.4.1 "PDPTE Registers").
    pub const fn may_become(self, next: Self, cr4: Cr4, efer: Efer, cs_l: bool) -> bool {
        if !self.pg() && next.pg() {
            // SDM Vol. 3A 10.8.5 "Initializing IA-32e Mode": needs PAE, and CS.L must be 0.
            !efer.lme() || cr4.pae() && !cs_l
        } else if self.pg() && !next.pg() {
            // Not from 64-bit mode, and not with PCIDs.
            !(cr4.pcide() || efer.lma() && cs_l)
        } else {
            // SDM Vol. 3A 2.5: CR0.WP must not be cleared while CR4.CET is 1.
            !(self.wp() && !next.wp() && cr4.cet())
        }
    }
}

/// CR3. What bits 11:0 mean depends on CR4.PCIDE and CR4.PAE.
#[bitfield(u64)]
#[derive(PartialEq, Eq)]
pub struct Cr3 {
    /// With CR4.PCIDE the PCID; else PWT (3) and PCD (4), and with PAE paging the low bits (11:5) of the table's address.
    #[bits(12)]
    pub low: u16,
    /// Page frame of the top table.
    #[bits(40)]
    pub frame: u64,
    #[bits(11)]
    __: u16,
    /// In a MOV with CR4.PCIDE: do not invalidate this PCID's translations. Never stored.
    pub no_invalidate: bool,
}

impl Cr3 {
    /// Bits of a MOV to CR3 that are #GP(0) in IA-32e mode: 63:MAXPHYADDR, but bit 63 has its meaning with PCIDs.
    pub const fn reserved(physical_bits: u32, pcide: bool) -> u64 {
        let above = !0u64
            << if physical_bits < 12 {
                12
            } else if physical_bits > 52 {
                52
            } else {
                physical_bits
            };
        if pcide { above & !(1 << 63) } else { above }
    }

    /// Physical address of the top table with 32-bit, 4-level and 5-level paging.
    pub const fn base(self) -> u64 {
        self.frame() << 12
    }

    /// Physical address of the page-directory-pointer table with PAE paging, 32-byte aligned below 4 GiB.
    pub const fn pae_base(self) -> u64 {
        self.into_bits() & 0xFFFF_FFE0
    }
}

/// CR4.
#[bitfield(u64)]
#[derive(PartialEq, Eq, Serialize, Deserialize)]
pub struct Cr4 {
    /// Virtual-8086 mode extensions.
    pub vme: bool,
    /// Protected-mode virtual interrupts.
    pub pvi: bool,
    /// Time-stamp disable: RDTSC and RDTSCP need CPL 0.
    pub tsd: bool,
    /// Debugging extensions: I/O breakpoints; DR4 and DR5 are #UD.
    pub de: bool,
    /// Page-size extensions: 4-MiB pages with 32-bit paging.
    pub pse: bool,
    /// Physical-address extension.
    pub pae: bool,
    /// Machine-check enable.
    pub mce: bool,
    /// Page-global enable.
    pub pge: bool,
    /// RDPMC at any CPL.
    pub pce: bool,
    /// The system uses FXSAVE and FXRSTOR: SSE instructions work.
    pub osfxsr: bool,
    /// Unmasked SIMD exceptions raise #XM, not #UD.
    pub osxmmexcpt: bool,
    /// User-mode instruction prevention.
    pub umip: bool,
    /// 57-bit linear addresses.
    pub la57: bool,
    /// VMX enable.
    pub vmxe: bool,
    /// SMX enable.
    pub smxe: bool,
    __: bool,
    /// RDFSBASE and its kin.
    pub fsgsbase: bool,
    /// Process-context identifiers.
    pub pcide: bool,
    /// XSAVE and extended states.
    pub osxsave: bool,
    /// Key locker.
    pub kl: bool,
    /// Supervisor-mode execution prevention.
    pub smep: bool,
    /// Supervisor-mode access prevention.
    pub smap: bool,
    /// Protection keys for user pages.
    pub pke: bool,
    /// Control-flow enforcement.
    pub cet: bool,
    /// Protection keys for supervisor pages.
    pub pks: bool,
    /// User interrupts.
    pub uintr: bool,
    #[bits(38)]
    __: u64,
}

impl Cr4 {
    /// Bits that this CPU does not have; writing 1 to one of them is #GP(0).
    pub const fn reserved(features: Features) -> u64 {
        let implemented = Self::new()
            .with_vme(features.vme())
            .with_pvi(features.vme())
            .with_tsd(features.tsc())
            .with_de(features.de())
            .with_pse(features.pse())
            .with_pae(features.pae())
            .with_mce(features.mce())
            .with_pge(features.pge())
            // RDPMC came before CPUID had a word for it: every part with CMOV has it.
            .with_pce(features.cmov())
            .with_osfxsr(features.fxsr())
            .with_osxmmexcpt(features.sse())
            .with_umip(features.umip())
            .with_la57(features.la57())
            .with_vmxe(features.vmx())
            .with_smxe(features.smx())
            .with_fsgsbase(features.fsgsbase())
            .with_pcide(features.pcid())
            .with_osxsave(features.xsave())
            .with_smep(features.smep())
            .with_smap(features.smap())
            .with_pke(features.pku())
            .with_pks(features.pks());
        !implemented.into_bits()
    }

    /// What MOV to CR4 of `value` would load, as far as the value alone decides.
    ///
    /// # Errors
    /// #GP(0) for a reserved bit.
    pub const fn accept(value: u64, features: Features) -> Result<Self, GeneralProtection> {
        if value & Self::reserved(features) != 0 {
            Err(GeneralProtection)
        } else {
            Ok(Self::from_bits(value))
        }
    }

    /// Whether MOV to CR4 may go from `self` to `next` while the other registers are as given.
    pub const fn may_become(self, next: Self, cr0: Cr0, cr3: Cr3, efer: Efer) -> bool {
        let long = efer.lma();
        let drops_pae = long && self.pae() && !next.pae();
        let moves_la57 = long && self.la57() != next.la57();
        // SDM Vol. 3A 5.10.1 "Process-Context Identifiers (PCIDs)": only in IA-32e mode, only from PCID 0.
        let starts_pcids = !self.pcide() && next.pcide();
        let bad_pcids = starts_pcids && (!long || cr3.low() != 0);
        // CR4.CET needs CR0.WP.
        let bad_cet = next.cet() && !cr0.wp();
        !(drops_pae || moves_la57 || bad_pcids || bad_cet)
    }

    /// Whether going from `self` to `next` invalidates translations. SDM Vol. 3A 5.10.4.1 "Operations that Invalidate
    /// TLBs and Paging-Structure Caches" asks for all of them when PGE changes or PCIDE is cleared, and for those of the
    /// current PCID when PAE changes or SMEP is set; a CPU may always drop more, so the answer is one for all. PSE and
    /// LA57 change how entries are read.
    pub const fn flushes_all(self, next: Self) -> bool {
        let changed = self.into_bits() ^ next.into_bits();
        let paging = Self::new()
            .with_pge(true)
            .with_pae(true)
            .with_pse(true)
            .with_la57(true)
            .into_bits();
        changed & paging != 0 || self.pcide() && !next.pcide() || !self.smep() && next.smep()
    }
}

/// IA32_EFER.
#[bitfield(u64)]
#[derive(PartialEq, Eq, Serialize, Deserialize)]
pub struct Efer {
    /// SYSCALL and SYSRET.
    pub sce: bool,
    #[bits(7)]
    __: u8,
    /// IA-32e mode once paging is on.
    pub lme: bool,
    __: bool,
    /// IA-32e mode is active. Software cannot write it.
    pub lma: bool,
    /// Execute-disable bits in page tables.
    pub nxe: bool,
    #[bits(52)]
    __: u64,
}

impl Efer {
    /// Bits that this CPU does not have; writing 1 to one of them is #GP(0).
    pub const fn reserved(features: Features) -> u64 {
        let implemented = Self::new()
            .with_sce(features.syscall())
            .with_lme(features.lm())
            .with_lma(features.lm())
            .with_nxe(features.nx());
        !implemented.into_bits()
    }

    /// What WRMSR of `value` makes of `self`. LMA keeps its value, whatever is written.
    ///
    /// # Errors
    /// #GP(0) for a reserved bit, or for changing LME while paging is on. SDM Vol. 3A 10.8.5 "Initializing IA-32e Mode".
    pub const fn write(self, value: u64, features: Features, cr0: Cr0) -> Result<Self, GeneralProtection> {
        let next = Self::from_bits(value).with_lma(self.lma());
        if value & Self::reserved(features) != 0 || cr0.pg() && self.lme() != next.lme() {
            return Err(GeneralProtection);
        }
        Ok(next)
    }
}

#[cfg(test)]
#[path = "cr_test.rs"]
mod tests;
