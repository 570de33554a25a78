//! RDMSR and WRMSR (SDM Vol. 2B, 2D). The core holds the registers that its own instructions read; all others are the bus's.

use core::ptr::NonNull;

use iced_x86::Mnemonic as M;
use x86::msr::*;

use crate::Engine;
use crate::bus::{Bus, MsrFault};
use crate::cpu::{Cpu, FS, GS, slot};
use crate::exec::system::{Go, cold_bodies, cold_flows};
use crate::lower::{End, Lower};
use crate::op::{Done, Op, chain, chain_flow};
use crate::watch::View;

cold_bodies! {
    Rdmsr = rdmsr;
}

cold_flows! {
    Wrmsr = wrmsr;
}

fn rdmsr(c: &mut Cpu, o: &Op) -> Done {
    c.supervisor_only()?;
    let msr = c.get::<4>(slot::RCX) as u32;
    if msr & !0xff == IA32_X2APIC_BASE
        && let Some(value) = c.read_virtual_msr(msr)
    {
        c.set::<4>(slot::RAX, value);
        c.set::<4>(slot::RDX, value >> 32);
        return Ok(());
    }
    let value = match c.held_msr(msr) {
        Some(value) => value,
        None => {
            c.drain_records_first()?;
            match c.with_view(o, |bus, view| bus.read_msr(msr, view)) {
                Ok(value) => value,
                Err(_) => return Err(c.gp(0)),
            }
        }
    };
    let value = if msr == IA32_TIME_STAMP_COUNTER {
        c.tsc_read(value)
    } else {
        value
    };
    c.set::<4>(slot::RAX, value);
    c.set::<4>(slot::RDX, value >> 32);
    Ok(())
}

impl Cpu {
    /// Whether the part has a register that its processor would hold: SDM Vol. 4 Table 2-2 "IA-32 Architectural MSRs" has the CPUID
    /// bits that it comes with.
    fn has_msr(&self, msr: u32) -> bool {
        let f = self.features;
        match msr {
            IA32_EFER => f.lm() || f.nx() || f.syscall(),
            IA32_STAR | IA32_LSTAR | IA32_CSTAR | IA32_FMASK | IA32_FS_BASE | IA32_GS_BASE | IA32_KERNEL_GS_BASE => {
                f.lm()
            }
            IA32_SYSENTER_CS | IA32_SYSENTER_ESP | IA32_SYSENTER_EIP => f.sep(),
            IA32_TSC_AUX => f.rdtscp() || f.rdpid(),
            IA32_XSS => f.xsaves(),
            IA32_PKRS => f.pks(),
            MSR_SMI_COUNT | IA32_SMRR_PHYSBASE | IA32_SMRR_PHYSMASK => self.model.msr(msr).is_some(),
            _ => false,
        }
    }

    /// The value of an MSR that the processor holds itself; `None` for those that the bus is asked for, which has none that the part
    /// has not.
    pub fn held_msr(&self, msr: u32) -> Option<u64> {
        if !self.has_msr(msr) {
            return None;
        }
        Some(match msr {
            IA32_EFER => self.efer.into_bits(),
            IA32_STAR => self.msrs.star,
            IA32_LSTAR => self.msrs.lstar,
            IA32_CSTAR => self.msrs.cstar,
            IA32_FMASK => self.msrs.fmask,
            IA32_FS_BASE => self.seg[FS].base,
            IA32_GS_BASE => self.seg[GS].base,
            IA32_KERNEL_GS_BASE => self.msrs.kernel_gs_base,
            IA32_SYSENTER_CS => self.msrs.sysenter_cs,
            IA32_SYSENTER_ESP => self.msrs.sysenter_esp,
            IA32_SYSENTER_EIP => self.msrs.sysenter_eip,
            IA32_TSC_AUX => self.msrs.tsc_aux,
            IA32_XSS => self.msrs.xss,
            IA32_PKRS => self.msrs.pkrs,
            MSR_SMI_COUNT => self.smm.count.into(),
            IA32_SMRR_PHYSBASE => self.smm.smrr.base,
            IA32_SMRR_PHYSMASK => self.smm.smrr.mask,
            _ => return None,
        })
    }

    /// Writes such an MSR; `None` for those that are the bus's.
    pub(crate) fn write_held_msr(&mut self, msr: u32, value: u64) -> Option<Result<(), MsrFault>> {
        const GP: Result<(), MsrFault> = Err(MsrFault::GeneralProtection);
        if !self.has_msr(msr) {
            return None;
        }
        // Registers that hold linear addresses take canonical ones only (SDM Vol. 2D "WRMSR").
        let address = matches!(
            msr,
            IA32_LSTAR
                | IA32_CSTAR
                | IA32_FS_BASE
                | IA32_GS_BASE
                | IA32_KERNEL_GS_BASE
                | IA32_SYSENTER_ESP
                | IA32_SYSENTER_EIP
        );
        if address && !self.canonical_register(value) {
            return Some(GP);
        }
        match msr {
            IA32_EFER => {
                let old = self.efer;
                let Ok(new) = old.write(value, self.features, self.cr0) else {
                    return Some(GP);
                };
                self.efer = new;
                if old.nxe() != new.nxe() {
                    self.tlb.flush_present();
                }
            }
            IA32_XSS => {
                if value & !self.supervisor_components() != 0 {
                    return Some(GP);
                }
                self.msrs.xss = value;
            }
            IA32_STAR => self.msrs.star = value,
            IA32_LSTAR => self.msrs.lstar = value,
            IA32_CSTAR => self.msrs.cstar = value,
            IA32_FMASK if value >> 32 != 0 => return Some(GP),
            IA32_FMASK => self.msrs.fmask = value,
            IA32_FS_BASE => self.seg[FS].base = value,
            IA32_GS_BASE => self.seg[GS].base = value,
            IA32_KERNEL_GS_BASE => self.msrs.kernel_gs_base = value,
            IA32_SYSENTER_CS => self.msrs.sysenter_cs = value & 0xffff_ffff,
            IA32_SYSENTER_ESP => self.msrs.sysenter_esp = value,
            IA32_SYSENTER_EIP => self.msrs.sysenter_eip = value,
            IA32_TSC_AUX if value >> 32 != 0 => return Some(GP),
            IA32_TSC_AUX => self.msrs.tsc_aux = value,
            IA32_PKRS => {
                if value >> 32 != 0 {
                    return Some(GP);
                }
                self.set_pkrs(value as u32);
            }
            IA32_SMRR_PHYSBASE | IA32_SMRR_PHYSMASK => return Some(self.write_smrr(msr, value)),
            _ => return None,
        }
        Some(Ok(()))
    }
}

fn wrmsr(c: &mut Cpu, o: &Op) -> Done<Go> {
    c.supervisor_only()?;
    let msr = c.get::<4>(slot::RCX) as u32;
    let value = c.get::<4>(slot::RAX) | c.get::<4>(slot::RDX) << 32;
    let next = c.next_ip(o);
    if msr & !0xff == IA32_X2APIC_BASE && c.non_root() {
        c.drain_records_first()?;
        if c.write_virtual_msr(msr, value)? {
            return Ok(Go::Look(next));
        }
    }
    match c.write_held_msr(msr, value) {
        Some(Ok(())) => Ok(Go::To(next)),
        Some(Err(_)) => Err(c.gp(0)),
        None => {
            if msr == IA32_RTIT_CTL && c.trace_locked() {
                return Err(c.gp(0));
            }
            c.drain_records_first()?;
            let clock = matches!(msr, IA32_TIME_STAMP_COUNTER | IA32_TSC_ADJUST) && c.non_root();
            let before = if clock { c.tsc_now() } else { 0 };
            if c.with_view(o, |bus, view| bus.write_msr(msr, value, view)).is_err() {
                return Err(c.gp(0));
            }
            if clock {
                let after = c.tsc_now();
                c.timer_moved(before, after);
            }
            c.bus_used = true;
            c.watched.ask = true;
            Ok(Go::Look(next))
        }
    }
}

impl Engine {
    /// Writes an MSR between two runs, as WRMSR would.
    ///
    /// # Errors
    /// The instruction would be #GP: nothing is written.
    pub fn write_msr(&mut self, cpu: &mut Cpu, bus: &mut dyn Bus, msr: u32, value: u64) -> Result<(), MsrFault> {
        if let Some(written) = cpu.write_held_msr(msr, value) {
            cpu.mode = u32::MAX;
            return written;
        }
        cpu.attach(NonNull::from(&mut *self.shared), bus);
        let tsc = bus.tsc(cpu.clock);
        let written = bus.write_msr(msr, value, &mut View::between(cpu, tsc));
        cpu.watched.ask = true;
        cpu.detach();
        written
    }
}

pub(crate) fn lower(l: &mut Lower) -> End {
    if l.i.mnemonic() == M::Wrmsr {
        return l.flow(chain_flow::<Wrmsr>(), |_| ());
    }
    l.emit(chain::<Rdmsr>(), |_| ());
    End::Open
}
