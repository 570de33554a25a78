//! From what is asked for each unit to the backend that provides it, or the reason why none can.

use x86::model::CpuModel;

use crate::host_units::{Pmu, Traits};
use crate::units::{Backend, Backends, Unit, UnitRequest, UnitRequests, UnitRow};

/// Why a request cannot be met.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum UnitError {
    /// That backend does not provide this unit here.
    #[error("--{unit}={}: {why}", request.name())]
    Unavailable {
        /// The unit.
        unit: &'static str,
        /// What was asked for.
        request: UnitRequest,
        /// Why not.
        why: String,
    },
    /// It needs performance counters of the same backend.
    #[error("--{unit}={0}: {why}, so --pmu={0} is needed too", request.name())]
    NeedsCounters {
        /// The unit.
        unit: &'static str,
        /// What was asked for.
        request: UnitRequest,
        /// Why.
        why: &'static str,
    },
    /// The host's counters exclude what needs this program's interrupt controllers.
    #[error(
        "--pmu=host and --{unit}={}: the interrupts of KVM's counters need KVM's own interrupt controllers, which do not come along \
         to the software engine: leave one of the two out",
        request.name()
    )]
    Controllers {
        /// The unit.
        unit: &'static str,
        /// What was asked for.
        request: UnitRequest,
    },
}

fn unavailable(row: &UnitRow, request: UnitRequest, why: impl Into<String>) -> UnitError {
    UnitError::Unavailable {
        unit: row.name,
        request,
        why: why.into(),
    }
}

/// Which backends provide the units of a guest on this KVM.
///
/// # Errors
/// A request that cannot be met.
pub fn on_kvm(host: &Traits, requests: &UnitRequests) -> Result<Backends, UnitError> {
    let mut requests = *requests;
    for (row, request) in requests.each() {
        for &(needs, why) in row.with_counters {
            if request == Some(needs) && *requests[Unit::Pmu].get_or_insert(needs) != needs {
                return Err(UnitError::NeedsCounters {
                    unit: row.name,
                    request: needs,
                    why,
                });
            }
        }
    }
    if requests[Unit::Pmu] == Some(UnitRequest::Host) && host.pmu.lacks().is_none() {
        // Our units need the software engine, and the host's trace has its interrupts from this program's controllers.
        let excluded = |row: &UnitRow, request| match request {
            UnitRequest::Emulated => true,
            UnitRequest::Host => row.unit == Unit::Pt,
            UnitRequest::Off => false,
        };
        for (row, request) in requests.each() {
            if let Some(request) = request.filter(|request| excluded(row, *request)) {
                return Err(UnitError::Controllers {
                    unit: row.name,
                    request,
                });
            }
        }
    }
    requests.try_map(|row, request| match request {
        None => Ok(row.on_kvm),
        Some(request) => {
            let (backend, lacks) = match request {
                UnitRequest::Host => (Backend::Host, (row.lacks_host)(host)),
                UnitRequest::Emulated => (Backend::Emulated, row.lacks_emulated.map(String::from)),
                UnitRequest::Off => (Backend::Absent, row.never_off.map(String::from)),
            };
            lacks.map_or(Ok(backend), |why| Err(unavailable(row, request, why)))
        }
    })
}

/// Whether a guest of this model can have those of the host's units that it is to have.
///
/// # Errors
/// KVM has one of them for other models alone.
pub fn check_model(pmu: &Pmu, model: &CpuModel, backends: &Backends) -> Result<(), UnitError> {
    for (row, backend) in backends.each() {
        if row.host_of_own_model
            && backend == Backend::Host
            && let Some(why) = pmu.differs(model)
        {
            return Err(unavailable(row, UnitRequest::Host, why));
        }
    }
    Ok(())
}

/// Which backends provide the units of a guest in the software engine.
///
/// # Errors
/// A request that cannot be met.
pub fn in_software(requests: &UnitRequests) -> Result<Backends, UnitError> {
    requests.try_map(|row, request| match (request, row.never_off) {
        (Some(UnitRequest::Host), _) => Err(unavailable(
            row,
            UnitRequest::Host,
            "the software engine has no unit of the host's: use --engine kvm",
        )),
        (Some(UnitRequest::Off), Some(why)) => Err(unavailable(row, UnitRequest::Off, why)),
        (Some(UnitRequest::Off), None) => Ok(Backend::Absent),
        (Some(UnitRequest::Emulated) | None, _) => Ok(Backend::Emulated),
    })
}

#[cfg(test)]
#[path = "resolve_test.rs"]
mod tests;
