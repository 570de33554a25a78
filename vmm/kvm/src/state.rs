//! A CPU's state into KVM and out of it, in as few calls as that takes.
//!
//! # Theory
//! For each ioctl of a vCPU KVM puts it onto the processor and takes it off again, which costs a good part of what an exit does.
//! KVM_RUN carries three groups of registers in the page that it shares (KVM_CAP_SYNC_REGS): what is marked dirty goes in with
//! the next KVM_RUN, what is marked valid comes out of it. And nobody but the guest changes what KVM holds: what the engine has
//! left as KVM gave it is still there.
//!
//! # Practice
//! [`enter`] marks and [`leave`] reads; between the two there is at least one KVM_RUN, if only one that comes back at once
//! ([`want`]).

use engine::CpuState;
use kvm_ioctls::{SyncReg, VcpuFd};
use x86::model::CpuModel;

use crate::error::{KvmError, refused};
use crate::vcpu_state::{self, Vcpu};
use crate::{msrs, sys};

/// What comes with KVM_RUN.
const SYNCED: [SyncReg; 3] = [SyncReg::Register, SyncReg::SystemRegister, SyncReg::VcpuEvents];

/// What KVM held of a CPU when the CPU left it, and what was made of that.
pub struct Kept {
    held: Vcpu,
    given: CpuState,
}

impl std::fmt::Debug for Kept {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Kept")
            .field("given", &self.given)
            .finish_non_exhaustive()
    }
}

/// Puts a CPU in KVM into a state. `last`: what KVM held when the CPU left it last, if it has been there. `adjust` has the last
/// word on what KVM gets.
///
/// # Errors
/// One line: what KVM refused.
pub fn enter(
    vcpu: &mut VcpuFd,
    state: &CpuState,
    last: Option<Kept>,
    model: &CpuModel,
    adjust: impl FnOnce(&mut Vcpu),
) -> Result<(), KvmError> {
    let (mut held, given) = match last {
        Some(kept) => (kept.held, Some(kept.given)),
        None => {
            let mut held = read(vcpu, model)?;
            held.regs = vcpu.get_regs().map_err(refused("KVM_GET_REGS"))?;
            held.sregs = vcpu.get_sregs().map_err(refused("KVM_GET_SREGS"))?;
            held.events = vcpu.get_vcpu_events().map_err(refused("KVM_GET_VCPU_EVENTS"))?;
            (held, None)
        }
    };
    let old = held.msrs.clone();
    held.take(state, model);
    adjust(&mut held);
    let differs = |same: &dyn Fn(&CpuState) -> bool| !given.as_ref().is_some_and(same);
    if model.features().xsave() && differs(&|given| given.xcr0 == state.xcr0) {
        vcpu.set_xcrs(&held.xcrs).map_err(refused("KVM_SET_XCRS"))?;
    }
    if differs(&|given| (&given.fpu, given.pkru) == (&state.fpu, state.pkru)) {
        sys::set_xsave(vcpu, &held.xsave).map_err(refused("KVM_SET_XSAVE"))?;
    }
    if differs(&|given| given.dr == state.dr) {
        vcpu.set_debug_regs(&held.debug).map_err(refused("KVM_SET_DEBUGREGS"))?;
    }
    if given.is_none() || old != held.msrs {
        let values = held.msrs.iter().copied();
        let pairs: Vec<(u32, u64)> = vcpu_state::msrs(model).into_iter().zip(values).collect();
        msrs::write(vcpu, &pairs)?;
    }
    let page = vcpu.sync_regs_mut();
    (page.regs, page.sregs, page.events) = (held.regs, held.sregs, held.events);
    for group in SYNCED {
        vcpu.set_sync_dirty_reg(group);
    }
    Ok(())
}

/// Has the next KVM_RUNs bring what [`leave`] reads, or no longer.
pub fn want(vcpu: &mut VcpuFd, wanted: bool) {
    for group in SYNCED {
        match wanted {
            true => vcpu.set_sync_valid_reg(group),
            false => vcpu.clear_sync_valid_reg(group),
        }
    }
}

/// The state of a CPU in KVM, after a KVM_RUN that brought what [`want`] asked for. What KVM does not know of is as in `before`.
///
/// # Errors
/// One line: what KVM refused.
pub fn leave(vcpu: &VcpuFd, before: &CpuState, model: &CpuModel) -> Result<Left, KvmError> {
    let mut held = read(vcpu, model)?;
    let page = vcpu.sync_regs();
    (held.regs, held.sregs, held.events) = (page.regs, page.sregs, page.events);
    let state = held.give(before, model);
    Ok(Left {
        event: held.pending(),
        nmi: held.events.nmi.pending != 0,
        cr8: held.sregs.cr8 as u8,
        kept: Kept {
            held,
            given: state.clone(),
        },
        state,
    })
}

/// A CPU that has left KVM.
#[derive(Debug)]
pub struct Left {
    /// Its state.
    pub state: CpuState,
    /// The event that KVM was in the middle of delivering.
    pub event: Option<engine::Event>,
    /// KVM holds an NMI for it.
    pub nmi: bool,
    /// CR8.
    pub cr8: u8,
    /// For [`enter`].
    pub kept: Kept,
}

/// What does not come with KVM_RUN; the rest is empty.
fn read(vcpu: &VcpuFd, model: &CpuModel) -> Result<Vcpu, KvmError> {
    let list = vcpu_state::msrs(model);
    let values = msrs::read(|list| vcpu.get_msrs(list), &list)?;
    if let Some(missing) = list.get(values.len()) {
        return Err(KvmError::NoMsr(*missing));
    }
    Ok(Vcpu {
        debug: vcpu.get_debug_regs().map_err(refused("KVM_GET_DEBUGREGS"))?,
        xsave: vcpu.get_xsave().map_err(refused("KVM_GET_XSAVE"))?,
        xcrs: match model.features().xsave() {
            true => vcpu.get_xcrs().map_err(refused("KVM_GET_XCRS"))?,
            false => Default::default(),
        },
        msrs: values,
        ..Vcpu::default()
    })
}
