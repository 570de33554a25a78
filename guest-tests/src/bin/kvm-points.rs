//! `kvm-points KERNEL`: a debugger's breakpoints and watchpoints on the KVM of the host that this runs on, which is a lab's. KERNEL
//! is any file that loads.

use std::env;
use std::process::ExitCode;

use guest_tests::points::Checks;

fn main() -> ExitCode {
    let Some(kernel) = env::args_os().nth(1) else {
        eprintln!("usage: kvm-points KERNEL");
        return ExitCode::from(2);
    };
    Checks::new(kernel).all();
    ExitCode::SUCCESS
}
