//! The software x86-64 CPU, exact to the retired instruction.
//!
//! A processor ([`Cpu`]) runs on an [`Engine`], which holds the map of guest RAM and the cache of decoded blocks; everything
//! else it meets is behind [`bus::Bus`]. Instructions are decoded by iced-x86 into small ops ([`frontend`], [`lower`]) whose handlers call
//! one another in a chain ([`op`]); memory goes through a software TLB ([`tlb`], [`mem`], [`mmu`]).

mod block;
pub mod bus;
mod code_memory;
mod cpu;
mod event;
mod exec;
mod flags;
pub mod fpu;
mod frontend;
mod jumps;
mod key;
mod lines;
mod lower;
mod mem;
pub mod mmu;
mod op;
mod ram;
mod segment;
mod shared;
mod smm;
mod snapshot;
mod state;
mod step;
mod task;
mod tlb;
mod transaction;
pub mod translate;
pub mod undefined;
mod virtual8086;
mod vmx;
mod watch;

pub use crate::cpu::{
    Activity, CS, CoreMsrs, Cpu, CpuState, DS, ES, Event, FS, GS, Monitor, SS, Segment, Source, Table,
};
pub use crate::op::CHAINED;
pub use crate::ram::RamRegion;
pub use crate::smm::{Interrupted, IoAccess, Smm};
pub use crate::step::Engine;
pub use crate::tlb::{AddressSpace, Privilege, Translation, Translations, VmxTag};
pub use crate::transaction::Transaction;
pub use crate::undefined::Undefined;
pub use crate::vmx::{Guest, Vmx};

use x86::cpuid::{Feature, Features};
use x86::model::CpuModel;

/// How often a block runs before it becomes host code, if nothing else is asked for: what is translated for less takes longer to
/// translate than it saves.
pub const TRANSLATE_AFTER: u32 = 200;

/// Bytes of host code that are kept, if nothing else is asked for: those of some hundred thousand blocks.
pub const TRANSLATED_BYTES: usize = 64 << 20;

/// How vector instructions are executed. The results are the same.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Vectors {
    /// By the host's own instructions where it has them, else as [`Vectors::Portable`].
    #[default]
    Host,
    /// By the instructions that every x86-64 host has, those of AVX by SSE2 on their halves where that does; all others by tables.
    Portable,
    /// By tables alone, which ask nothing of the host.
    Tables,
}

/// How an engine behaves where the architecture leaves a choice.
#[derive(Clone, Copy, Debug)]
pub struct EngineOptions {
    /// Vector instructions.
    pub vectors: Vectors,
    /// Undefined results.
    pub undefined: Undefined,
    /// How often a block runs before it becomes host code; `None`: none does.
    pub translate_after: Option<u32>,
    /// Bytes of host code that are kept at most, a multiple of 4096 and below 2 GiB: with more, all is forgotten and begins anew.
    pub translated_bytes: usize,
}

impl Default for EngineOptions {
    fn default() -> EngineOptions {
        EngineOptions {
            vectors: Vectors::default(),
            undefined: Undefined::default(),
            translate_after: Some(TRANSLATE_AFTER),
            translated_bytes: TRANSLATED_BYTES,
        }
    }
}

/// The host lacks instructions that the model has, or memory to run them from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostLacks(pub Vec<&'static str>);

impl std::fmt::Display for HostLacks {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        write!(f, "this host lacks {}", self.0.join(", "))
    }
}

impl std::error::Error for HostLacks {}

/// Why [`Engine::run`] returned.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Exit {
    /// The budget is used up.
    Budget,
    /// An access to the bus that may have had side effects has retired.
    Bus,
    /// External interrupts are deliverable, and [`Cpu::want_window`] asked to hear of it.
    Window,
    /// PAUSE has retired, and [`Cpu::yield_on_pause`] asked to hear of it.
    Pause,
    /// The processor waits for an interrupt.
    Halt,
    /// Triple fault.
    Shutdown,
    /// Whoever watches wants to look ([`x86::watch::Effects::stop`]). Something of the above may be due besides, and shows when
    /// the processor runs on, but for one thing.
    Stop {
        /// PAUSE has retired, as with [`Exit::Pause`].
        pause: bool,
    },
    /// A fault of ours: what went wrong.
    Defect(String),
}

/// The features of AVX-512 that the engine executes.
pub const AVX512: Features = Features::list(&[
    Feature::Avx512f,
    Feature::Avx512dq,
    Feature::Avx512ifma,
    Feature::Avx512cd,
    Feature::Avx512bw,
    Feature::Avx512vl,
    Feature::Avx512vbmi,
    Feature::Avx512vbmi2,
    Feature::Avx512vnni,
    Feature::Avx512bitalg,
    Feature::Avx512vpopcntdq,
    Feature::Avx512bf16,
    Feature::Avx512fp16,
]);

/// Whether this host's own vector instructions can be used at all.
///
/// # Errors
/// What it has not got: the model then runs with [`Vectors::Tables`].
pub fn host_vectors(model: &CpuModel) -> Result<(), HostLacks> {
    refused(lacking([(
        model.features().mmx(),
        fpu::thunk::available(),
        "executable memory (16 MiB of it: see `ulimit -f`)",
    )]))
}

/// Of features that are needed, or not, those that are not there.
fn lacking<const N: usize>(rows: [(bool, bool, &'static str); N]) -> Vec<&'static str> {
    rows.into_iter()
        .filter_map(|(needed, present, name)| (needed && !present).then_some(name))
        .collect()
}

fn refused(lacks: Vec<&'static str>) -> Result<(), HostLacks> {
    if lacks.is_empty() {
        Ok(())
    } else {
        Err(HostLacks(lacks))
    }
}

/// What this host must have for a model to run: executable memory, where vector instructions are the host's, and the instructions
/// that are asked for undefined results.
fn host_can(model: &CpuModel, options: EngineOptions) -> Result<(), HostLacks> {
    use std::is_x86_feature_detected as host;
    let f = model.features();
    let asked = options.undefined == Undefined::Host;
    if options.vectors != Vectors::Tables {
        host_vectors(model)?;
    }
    refused(lacking([
        (f.bmi1() && asked, host!("bmi1"), "BMI1"),
        (f.lzcnt() && asked, host!("lzcnt"), "LZCNT"),
        (f.bmi2() && asked, host!("bmi2"), "BMI2"),
    ]))
}
