//! What the engine does as a whole, in one program: what links it once is built once.

mod alignment;
mod avx;
mod avx512;
mod bench;
mod bmi;
#[path = "core.rs"]
mod core_ops;
mod delivery;
mod fpu;
mod gates;
mod hostile;
mod integer;
mod keys;
mod monitor;
mod paging;
mod priorities;
mod protection;
mod ptwrite;
mod rig;
mod segments;
mod simd;
mod smm;
mod stop;
mod stream;
mod string;
mod system;
mod tasks;
mod transactions;
mod translate;
mod vm86;
mod vmm;
mod vmx;
mod vmx_controls;
mod watch;
mod x87;
mod xsave;
