//! Why KVM cannot be had, or what it refused.

use std::{io, sync::Arc};

use machine::plain;
use serde::{Serialize, Serializer};
use x86::model::ModelError;

/// Why a machine's CPUs cannot be on this host's KVM, or cannot go on there. Each is one line.
///
/// It is kept as a finding, too (`minivmm probe`): two are equal if they read the same, and are serialized as what they say.
#[derive(Clone, Debug, thiserror::Error)]
pub enum KvmError {
    /// No /dev/kvm.
    #[error("/dev/kvm is not there: load kvm-intel or kvm-amd, or use --engine soft")]
    Missing,
    /// /dev/kvm is not for this user.
    #[error("no permission for /dev/kvm: become a member of its group, or use --engine soft")]
    Permission,
    /// An API that is not the one of every Linux since 2.6.22.
    #[error("/dev/kvm has API version {0}, not 12")]
    ApiVersion(i32),
    /// An older kernel.
    #[error("this host's KVM has no {0} (Linux 5.10 has): use --engine soft")]
    Capability(&'static str),
    /// A call that KVM, or the system for it, refused.
    #[error("{what}: {}", plain(source))]
    Call {
        /// The call, or what is made of several.
        what: &'static str,
        /// What the system said.
        source: Arc<io::Error>,
    },
    /// KVM_GET_MSRS has no value for this one.
    #[error("KVM_GET_MSRS: KVM has no {0:#x}")]
    NoMsr(u32),
    /// KVM_SET_MSRS does not take a value.
    #[error("KVM_SET_MSRS: KVM does not take {value:#x} for {msr:#x}")]
    MsrValue {
        /// The register.
        msr: u32,
        /// The value.
        value: u64,
    },
    /// A list that is longer than KVM's.
    #[error("{0}: the list is too long")]
    List(&'static str),
    /// KVM_RUN ended with an exit that nothing can be made of.
    #[error("KVM_RUN: {0}")]
    Exit(String),
    /// No threads for the CPUs.
    #[error("starting a thread for each CPU: {0}")]
    Threads(Arc<rayon::ThreadPoolBuildError>),
    /// KVM is slower than the software engine.
    #[error("KVM interprets here, it executes {mips} million instructions per second")]
    Interprets {
        /// What was measured.
        mips: u64,
    },
    /// What is left of the model on this host is no processor.
    #[error(transparent)]
    Model(#[from] ModelError),
}

impl Eq for KvmError {}

impl PartialEq for KvmError {
    fn eq(&self, other: &Self) -> bool {
        self.to_string() == other.to_string()
    }
}

impl Serialize for KvmError {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// The error of this call.
pub(crate) fn refused<E: Into<io::Error>>(what: &'static str) -> impl Fn(E) -> KvmError {
    move |error| KvmError::Call {
        what,
        source: Arc::new(error.into()),
    }
}
