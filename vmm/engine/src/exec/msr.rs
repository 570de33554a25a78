//! RDMSR and WRMSR (SDM Vol. 2B, 2D). The core holds the registers that its own instructions read; all others are the bus's.

use iced_x86::Mnemonic as M;
use x86::cr::{Cr0, Efer};
use x86::msr::*;

use crate::cpu::{Cpu, FS, GS, slot};
use crate::decode::{End, Lower};
use crate::exec::system::{Go, cold_bodies, cold_flows};
use crate::op::{Done, Op, chain, chain_flow};

cold_bodies! {
    Rdmsr = rdmsr;
}

cold_flows! {
    Wrmsr = wrmsr;
}

fn rdmsr(c: &mut Cpu, o: &Op) -> Done {
    c.supervisor_only()?;
    let msr = c.get::<4>(slot::RCX) as u32;
    let value = match msr {
        IA32_EFER => c.efer,
        IA32_STAR => c.msrs.star,
        IA32_LSTAR => c.msrs.lstar,
        IA32_CSTAR => c.msrs.cstar,
        IA32_FMASK => c.msrs.fmask,
        IA32_FS_BASE => c.seg[FS].base,
        IA32_GS_BASE => c.seg[GS].base,
        IA32_KERNEL_GS_BASE => c.msrs.kernel_gs_base,
        IA32_SYSENTER_CS => c.msrs.sysenter_cs,
        IA32_SYSENTER_ESP => c.msrs.sysenter_esp,
        IA32_SYSENTER_EIP => c.msrs.sysenter_eip,
        IA32_TSC_AUX if has_tsc_aux(c) => c.msrs.tsc_aux,
        IA32_XSS if c.model.features().xsaves() => c.msrs.xss,
        IA32_PKRS if c.model.features().pks() => c.msrs.pkrs,
        _ => {
            c.settle()?;
            match c.with_view(o, |bus, view| bus.read_msr(msr, view)) {
                Ok(value) => value,
                Err(_) => return Err(c.gp(0)),
            }
        }
    };
    c.set::<4>(slot::RAX, value);
    c.set::<4>(slot::RDX, value >> 32);
    Ok(())
}

fn has_tsc_aux(c: &Cpu) -> bool {
    let f = c.model.features();
    f.rdtscp() || f.rdpid()
}

fn wrmsr(c: &mut Cpu, o: &Op) -> Done<Go> {
    c.supervisor_only()?;
    let msr = c.get::<4>(slot::RCX) as u32;
    let value = c.get::<4>(slot::RAX) | c.get::<4>(slot::RDX) << 32;
    let next = c.next_ip(o);
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
    if address && !c.canonical_register(value) {
        return Err(c.gp(0));
    }
    match msr {
        IA32_EFER => {
            let old = Efer::from_bits(c.efer);
            let Ok(new) = old.write(value, c.model.features(), Cr0::from_bits(c.cr0)) else {
                return Err(c.gp(0));
            };
            c.efer = new.into_bits();
            if old.nxe() != new.nxe() {
                c.tlb.flush_all();
            }
        }
        IA32_XSS if c.model.features().xsaves() => {
            if value & !c.supervisor_components() != 0 {
                return Err(c.gp(0));
            }
            c.msrs.xss = value;
        }
        IA32_STAR => c.msrs.star = value,
        IA32_LSTAR => c.msrs.lstar = value,
        IA32_CSTAR => c.msrs.cstar = value,
        IA32_FMASK if value >> 32 != 0 => return Err(c.gp(0)),
        IA32_FMASK => c.msrs.fmask = value,
        IA32_FS_BASE => c.seg[FS].base = value,
        IA32_GS_BASE => c.seg[GS].base = value,
        IA32_KERNEL_GS_BASE => c.msrs.kernel_gs_base = value,
        IA32_SYSENTER_CS => c.msrs.sysenter_cs = value & 0xffff_ffff,
        IA32_SYSENTER_ESP => c.msrs.sysenter_esp = value,
        IA32_SYSENTER_EIP => c.msrs.sysenter_eip = value,
        IA32_TSC_AUX if has_tsc_aux(c) && value >> 32 != 0 => return Err(c.gp(0)),
        IA32_TSC_AUX if has_tsc_aux(c) => c.msrs.tsc_aux = value,
        IA32_PKRS if c.model.features().pks() => {
            if value >> 32 != 0 {
                return Err(c.gp(0));
            }
            c.set_pkrs(value as u32);
        }
        _ => {
            c.settle()?;
            if c.with_view(o, |bus, view| bus.write_msr(msr, value, view)).is_err() {
                return Err(c.gp(0));
            }
            c.bus_used = true;
            c.watched.ask = true;
            return Ok(Go::Look(next));
        }
    }
    Ok(Go::To(next))
}

pub(crate) fn lower(l: &mut Lower) -> End {
    if l.i.mnemonic() == M::Wrmsr {
        return l.flow(chain_flow::<Wrmsr>, |_| ());
    }
    l.emit(chain::<Rdmsr>, |_| ());
    End::Open
}
