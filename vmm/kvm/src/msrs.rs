//! Lists of MSRs, as KVM takes and gives them.

use kvm_bindings::{Msrs, kvm_msr_entry};
use kvm_ioctls::{Error, VcpuFd};

use crate::error::refused;

fn list(entries: impl Iterator<Item = (u32, u64)>) -> Result<Msrs, String> {
    let entry = |(index, data)| kvm_msr_entry {
        index,
        data,
        ..Default::default()
    };
    let entries: Vec<kvm_msr_entry> = entries.map(entry).collect();
    Msrs::from_entries(&entries).map_err(|error| format!("a list of MSRs: {error:?}"))
}

/// What `get` (KVM_GET_MSRS of a vCPU, or of KVM itself) says of these MSRs, up to the first that it does not have.
///
/// # Errors
/// One line: KVM refused.
pub fn read(get: impl FnOnce(&mut Msrs) -> Result<usize, Error>, msrs: &[u32]) -> Result<Vec<u64>, String> {
    let mut list = list(msrs.iter().map(|&msr| (msr, 0)))?;
    let there = get(&mut list).map_err(|error| refused("KVM_GET_MSRS")(error.into()))?;
    Ok(list.as_slice().iter().take(there).map(|entry| entry.data).collect())
}

/// Writes MSRs of a vCPU, in this order.
///
/// # Errors
/// One line: KVM refused, or does not take one of them; those before it are written.
pub fn write(vcpu: &VcpuFd, msrs: &[(u32, u64)]) -> Result<(), String> {
    let taken = vcpu.set_msrs(&list(msrs.iter().copied())?);
    let taken = taken.map_err(|error| refused("KVM_SET_MSRS")(error.into()))?;
    match msrs.get(taken) {
        None => Ok(()),
        Some((msr, value)) => Err(format!("KVM_SET_MSRS: KVM does not take {value:#x} for {msr:#x}")),
    }
}
