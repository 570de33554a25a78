//! The panic of a Linux guest: how it is noticed, and what `--on-panic` does then.
//!
//! # Theory
//! `panic` (kernel/panic.c of Linux) first puts its CPU's number into `panic_cpu`, which is -1 until then, and prints its message
//! afterwards. The variable is found by the kernel's own symbols, in memory as it is: nothing in the guest has to help, and nothing in
//! it changes.
//!
//! # Practice
//! It is looked at when the guest resets itself or stands at the end of the run, which costs nothing before, and with `--on-panic` four
//! times a second, too, since a kernel without `panic=` never ends by itself. The message is given time to come out. To hold the guest,
//! or where a debugger is connected, a breakpoint at `panic` is set once the kernel is found, so that it stands at its first instruction.
//! Kernels without symbols of data (`CONFIG_KALLSYMS_ALL` is off, as in Debian's for 32-bit CPUs) have the breakpoint alone.

use std::{
    path::Path,
    time::{Duration, Instant},
};

use trace::{linux::Kernel, regular};

use crate::{config::OnPanic, recording::GuestMemory, timeline::run::Run, vm::End};

/// Between two looks.
pub const LOOK: Duration = Duration::from_millis(250);
/// How long the last look for the kernel takes at most, on a host that is busy.
const SEARCH: Duration = Duration::from_secs(20);
/// The message has that much time to come out, and at least this many steps.
const MESSAGE: Duration = Duration::from_millis(500);
const MESSAGE_STEPS: u64 = 20_000_000;
/// The headers of a bzImage end before here.
const HEADERS: u64 = 0x400;

/// What is known of a guest's panic.
#[derive(Debug)]
pub struct PanicWatch {
    action: OnPanic,
    kernel: Option<Kernel>,
    /// When the kernel is looked for next: the longer a look has taken, the later.
    search: Instant,
    /// When and at which step a panic was seen.
    seen: Option<(Instant, u64)>,
    /// Where the breakpoint is.
    breakpoint: Option<u64>,
}

/// What is to be done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Panicked {
    /// Nothing.
    No,
    /// The run ends.
    End,
}

impl PanicWatch {
    /// Nothing is known yet.
    pub fn new(action: OnPanic) -> PanicWatch {
        PanicWatch {
            action,
            kernel: None,
            search: Instant::now(),
            seen: None,
            breakpoint: None,
        }
    }

    /// Looks. `debugged`: somebody is there who can look at a guest that is held.
    pub fn look(&mut self, run: &mut Run, debugged: bool) -> Panicked {
        let now = Instant::now();
        if self.kernel.is_none() && now >= self.search {
            let memory = &mut GuestMemory::new(run.machine().memory());
            self.kernel = Kernel::find(memory);
            self.search = Instant::now() + LOOK.max(now.elapsed() * 8);
        }
        let Some(kernel) = &self.kernel else {
            return Panicked::No;
        };
        if debugged || self.action == OnPanic::Stop {
            if self.breakpoint.is_none()
                && let Some(at) = kernel.symbols().address("panic")
            {
                run.debugger().add_breakpoint(at);
                self.breakpoint = Some(at);
            }
            return Panicked::No;
        }
        let steps = run.steps();
        if self.seen.is_none()
            && kernel
                .panic_cpu(&mut GuestMemory::new(run.machine().memory()))
                .is_some()
        {
            self.seen = Some((now, steps));
        }
        match self.seen {
            Some((then, at)) if now - then >= MESSAGE && (run.is_hosted() || steps - at >= MESSAGE_STEPS) => {
                Panicked::End
            }
            _ => Panicked::No,
        }
    }

    /// Whether the guest stands where it panics.
    pub fn is_breakpoint(&self, address: u64) -> bool {
        self.breakpoint == Some(address)
    }
}

/// The CPU on which the guest's Linux has panicked, at the end of its run.
pub fn at_the_end(run: &mut Run, kernel: &Path, end: &End) -> Option<u32> {
    let may_be = matches!(
        end,
        End::Reset | End::Halted(_) | End::TripleFault(_) | End::Instructions(_) | End::Timeout(_)
    );
    if !may_be || !is_linux(kernel) {
        return None;
    }
    let mut memory = GuestMemory::new(run.machine().memory()).until(Some(Instant::now() + SEARCH));
    Kernel::find(&mut memory)?.panic_cpu(&mut memory)
}

/// Whether the file is a bzImage or an ELF64 file, as all that Linux is entered by.
fn is_linux(kernel: &Path) -> bool {
    let Ok(file) = regular::open(kernel) else { return false };
    let mut head = Vec::new();
    let read = std::io::Read::read_to_end(&mut std::io::Read::take(file, HEADERS), &mut head);
    read.is_ok() && (head.get(0x202..0x206) == Some(b"HdrS") || head.starts_with(b"\x7fELF\x02"))
}
