//! The VMM as a library. The program `minivmm` is a thin user of it: [`cli`] makes a [`MachineConfig`] of the command line, and
//! [`front::serve::run`] does the rest.
//!
//! A machine is described by a [`MachineConfig`], built by [`Run::new`], and connected to the outside by a [`Console`]. Then it
//! runs until there is a [`StopReason`], or for so many steps at a time; in between, its CPUs and its memory can be looked at.
//! Nothing about it depends on the time of day or on the host, unless the configuration says so: the same configuration gives the
//! same run. All of its state can be [taken out](Vm::save) between two steps and [put back](Vm::set_state), here or into another
//! machine.
//!
//! The crate is layered: [`vm`] is the machine with its CPUs and the one verb that has it run, [`timeline`] knows its past,
//! [`debug`] is what it stops for, [`front`] has the front ends (console, control socket, monitor, gdb), and nothing below
//! `front` knows of them.
//!
//! What is documented here is for programs that embed a machine. What the program of this name has for itself (its command line, the
//! matrix, its views of traces) is hidden, and may change with any version. The crates below are re-exported under the names that they
//! have here: [`x86`] with the CPU models, [`devices`] with the units, [`engine`], [`machine`], [`kvm`], and [`trace`], which reads what
//! is recorded.
//!
//! ```no_run
//! use minivmm::{Console, MachineConfig, Run, SerialTarget};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let config = MachineConfig {
//!     initrd: vec!["initramfs.cpio".into()],
//!     memory: 256 << 20,
//!     cpus: 2,
//!     model: minivmm::model::find("haswell,-rdrand")?,
//!     max_instructions: Some(10_000_000_000),
//!     ..MachineConfig::new("vmlinuz")
//! };
//! let mut run = Run::new(&config)?;
//! let mut console = Console::open(&SerialTarget::Buffer, &[], run.line())?;
//! console.push_input(b"poweroff\n");
//!
//! // A million instructions, and a look at where they have led.
//! let mut reason = run.run_for(&mut console, 1_000_000)?;
//! let cpu = run.cpu_state(0).ok_or("no CPU")?;
//! let mut code = [0; 16];
//! run.read_linear(0, cpu.rip, &mut code)?;
//! println!("after {} steps at {:#x}: {code:02x?}", run.steps(), cpu.rip);
//!
//! // One instruction at a time, and then the rest.
//! while reason.is_none() && run.cpu_state(0).is_some_and(|cpu| cpu.cpl == 0) {
//!     reason = run.step(&mut console)?;
//! }
//! let reason = match reason {
//!     Some(reason) => reason,
//!     None => run.run(&mut console)?,
//! };
//! println!("{reason:?} after {} ns of the guest's time", run.virtual_ns());
//! print!("{}", String::from_utf8_lossy(&console.take_output()));
//! # Ok(())
//! # }
//! ```

pub mod address;
#[doc(hidden)]
pub mod allocation;
#[doc(hidden)]
pub mod cli;
pub mod config;
pub mod coverage;
pub mod debug;
pub mod dump;
pub mod error;
pub mod front;
mod habits;
#[doc(hidden)]
pub mod jail;
mod launch;
#[doc(hidden)]
pub mod links;
#[doc(hidden)]
pub mod logger;
#[doc(hidden)]
pub mod matrix;
pub mod model;
mod net;
pub mod observe;
#[doc(hidden)]
pub mod parse;
#[doc(hidden)]
pub mod parts;
mod query_cache;
#[doc(hidden)]
pub mod query_command;
#[doc(hidden)]
pub mod query_options;
pub mod recording;
#[doc(hidden)]
pub mod replay_command;
#[doc(hidden)]
pub mod replay_options;
#[doc(hidden)]
pub mod run;
#[doc(hidden)]
pub mod serial_line;
#[doc(hidden)]
pub mod signals;
#[doc(hidden)]
pub mod terminal;
pub mod timeline;
#[doc(hidden)]
pub mod trace_command;
#[doc(hidden)]
pub mod trace_options;
mod unit_options;
pub mod vm;

pub use config::{MachineConfig, SerialTarget};
pub use devices;
pub use engine::{self, CpuState};
pub use error::Error;
pub use front::console::Console;
pub use kvm;
pub use machine;
pub use timeline::{back::Back, past::Extent, run::Run};
pub use trace;
pub use vm::{End, Interrupt, LastBranch, Outside, Pages, Snapshot, StopReason, Vm};
pub use x86;
