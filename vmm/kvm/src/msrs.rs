//! Lists of MSRs, as KVM takes and gives them.

use kvm_bindings::{Msrs, kvm_msr_entry};
use kvm_ioctls::{Error, VcpuFd};

use crate::error::{KvmError, refused};

fn list(entries: impl Iterator<Item = (u32, u64)>) -> Result<Msrs, KvmError> {
    let entry = |(index, data)| kvm_msr_entry {
        index,
        data,
        ..Default::default()
    };
    let entries: Vec<kvm_msr_entry> = entries.map(entry).collect();
    Msrs::from_entries(&entries).map_err(|_| KvmError::List("MSRs"))
}

/// What `get` (KVM_GET_MSRS of a vCPU, or of KVM itself) says of these MSRs, up to the first that it does not have.
///
/// # Errors
/// One line: KVM refused.
pub fn read(get: impl FnOnce(&mut Msrs) -> Result<usize, Error>, msrs: &[u32]) -> Result<Vec<u64>, KvmError> {
    let mut list = list(msrs.iter().map(|&msr| (msr, 0)))?;
    let there = get(&mut list).map_err(refused("KVM_GET_MSRS"))?;
    Ok(list.as_slice().iter().take(there).map(|entry| entry.data).collect())
}

/// Writes MSRs of a vCPU, in this order.
///
/// # Errors
/// One line: KVM refused, or does not take one of them; those before it are written.
pub fn write(vcpu: &VcpuFd, msrs: &[(u32, u64)]) -> Result<(), KvmError> {
    let taken = vcpu.set_msrs(&list(msrs.iter().copied())?);
    let taken = taken.map_err(refused("KVM_SET_MSRS"))?;
    match msrs.get(taken) {
        None => Ok(()),
        Some(&(msr, value)) => Err(KvmError::MsrValue { msr, value }),
    }
}
