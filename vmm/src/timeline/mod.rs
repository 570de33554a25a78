//! A run that can be gone back in: `--reverse`, `--record` and `minivmm replay`.
//!
//! # Theory
//! On the virtual clock a machine is a function of its steps and of what comes from outside. So whoever keeps the state at some
//! steps, and what came from outside and when, has the state at every step: from the nearest kept one before it the run is made
//! again. Going back by one instruction is going to the step before.
//!
//! From outside come bytes for the first serial port, and nothing else: the date, the seed and the disks are the same at the
//! start, disks do their work at the instruction that asks for it, and the clock counts steps. What quits or pauses a machine
//! does not reach the guest.
//!
//! # Practice
//! - A *moment* ([`Moment`](crate::vm::outside::Moment)) is steps and ticks, since time passes without steps while all CPUs are halted. Where no more
//!   input may enter at a step because something has already been delivered there, it waits for the next.
//! - *Points* ([`points::Points`]) are kept every [`ReverseOptions::spacing`](crate::config::ReverseOptions::spacing) steps as the run goes on, and closer and closer to where
//!   one has gone back to, so that the next step back is near one. They are thinned by a limit of memory.
//! - Running on from the past makes the known way again, with the input that came then. What is typed meanwhile waits until
//!   the run has caught up: nothing is lost and nothing is typed twice. [`Run::forget_future`](run::Run::forget_future) has the
//!   run live from where it is instead. A debugger that writes to registers or memory in the past does the same.
//! - What the guest sends is let through once ([`output_gate`]). What it sends on another way than the first is new.
//! - Disks are overlays, which keep what points need; the user's file is never written.
//! - An observer (`--trace`) would hear the same instructions again, in a file that only grows: so the two are not had together.
//!   A session that was recorded can be traced while it is replayed.
//! - A session that is recorded has snapshots on disk, too ([`epochs`]): a replay of a part of it begins at one.
//! - `--collect` hears every byte once, too; what it has unpacked stays when the guest goes back.

pub mod back;
mod epoch_file;
mod epoch_run;
pub mod epochs;
pub mod log;
pub(crate) mod named;
pub(crate) mod origin;
pub mod output_gate;
pub mod past;
pub mod points;
pub mod run;
pub mod session;
pub mod snapshot_file;
pub(crate) mod state;

pub use epoch_file::EpochError;
pub use state::Timeline;
