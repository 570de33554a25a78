//! The VMM as a library. The program `minivmm` is a thin user of it: [`cli`] makes a [`MachineConfig`] of the command line, and
//! [`vm::run`] does the rest.
//!
//! A machine is described by a [`MachineConfig`], built by [`Vm::new`], and connected to the outside by a [`Console`]. Then it
//! runs to its [`End`], or for so many steps at a time; in between, its CPUs and its memory can be looked at. Nothing about it
//! depends on the time of day or on the host, unless the configuration says so: the same configuration gives the same run.
//! All of its state can be [taken out](Vm::save) between two steps and [put back](Vm::restore), here or into another machine.
//!
//! ```no_run
//! use minivmm::{Console, MachineConfig, SerialTarget, Vm};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let config = MachineConfig {
//!     initrd: Some("initramfs.cpio".into()),
//!     memory: 256 << 20,
//!     cpus: 2,
//!     model: minivmm::model::find("haswell,-rdrand")?,
//!     max_instructions: Some(10_000_000_000),
//!     ..MachineConfig::new("vmlinuz")
//! };
//! let mut vm = Vm::new(&config)?;
//! let mut console = Console::open(&SerialTarget::Buffer, &[], vm.line())?;
//! console.push_input(b"poweroff\n");
//!
//! // A million instructions, and a look at where they have led.
//! let mut end = vm.run_for(&mut console, 1_000_000)?;
//! let cpu = vm.cpu_state(0).ok_or("no CPU")?;
//! let mut code = [0; 16];
//! vm.read_linear(0, cpu.rip, &mut code)?;
//! println!("after {} steps at {:#x}: {code:02x?}", vm.steps(), cpu.rip);
//!
//! // One instruction at a time, and then the rest.
//! while end.is_none() && vm.cpu_state(0).is_some_and(|cpu| cpu.cpl == 0) {
//!     end = vm.step(&mut console)?;
//! }
//! let end = match end {
//!     Some(end) => end,
//!     None => vm.run(&mut console)?,
//! };
//! println!("{end:?} after {} ns of the guest's time", vm.virtual_ns());
//! print!("{}", String::from_utf8_lossy(&console.take_output()));
//! # Ok(())
//! # }
//! ```

pub mod cli;
pub mod config;
pub mod debug;
pub mod error;
pub mod front;
pub mod linux;
pub mod logger;
pub mod matrix;
pub mod model;
pub mod symbols;
pub mod timeline;
pub mod trace;
pub mod vm;

pub use config::{MachineConfig, SerialTarget};
pub use engine::CpuState;
pub use error::Error;
pub use front::console::Console;
pub use kvm;
pub use machine;
pub use timeline::{back::Back, past::Extent};
pub use vm::{End, Pages, Snapshot, Vm};
