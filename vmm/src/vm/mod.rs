//! A machine with its CPUs, and the one verb that has it run: [`Vm::advance`].
//!
//! What reaches it from outside comes through [`Outside`], and every reason to come back is a [`StopReason`]. Nothing here knows
//! of a past, of gdb, of the monitor or of a control socket.

mod advance;
mod branches;
mod end;
mod hosted;
mod hosted_state;
mod inspect;
pub mod outside;
mod pace;
mod parts;
mod points;
mod rdpmc;
mod recording;
mod report;
mod save;
mod saved;
mod snapshot;
pub mod soft;
mod software;
mod stats;
mod stop_reason;
mod stored;

pub use self::{
    branches::{BranchKind, LastBranch},
    end::{End, Ended, Panic},
    outside::{Enter, Inlet, Interrupt, Leave, Moment, Outside},
    parts::{NoCpu, Unmapped, Vm},
    save::SnapshotError,
    saved::SavedError,
    snapshot::{Pages, Snapshot},
    stats::{Native, Stats},
    stop_reason::{StopReason, Until},
};
pub(crate) use self::{hosted_state::Hosted, parts::Parts};
