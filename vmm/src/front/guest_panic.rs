//! The panic of a Linux guest: how it is noticed, and what `--on-panic` does then.
//!
//! # Theory
//! A kernel with the driver pvpanic says it itself, at a port ([`devices::platform::pvpanic`]): the run comes back at that very step. The
//! message is out by then, the other CPUs stand, and the CPU that panicked is still in `panic`: that is when a core file shows most.
//!
//! Without that driver `panic` (kernel/panic.c of Linux) first puts its CPU's number into `panic_cpu`, which is -1 until then, and prints its message
//! afterwards. The variable is found by the kernel's own symbols, in memory as it is: nothing in the guest has to help, and nothing in
//! it changes.
//!
//! # Practice
//! It is looked at when the guest resets itself or stands at the end of the run, which costs nothing before, and with `--on-panic` four
//! times a second, too, since a kernel without `panic=` never ends by itself. The message is given time to come out. To hold the guest,
//! or where a debugger is connected, a breakpoint at `panic` is set once the kernel is found, so that it stands at its first instruction.
//! Kernels without symbols of data (`CONFIG_KALLSYMS_ALL` is off, as in Debian's for 32-bit CPUs) have the breakpoint alone, and pvpanic.

use std::{
    path::Path,
    time::{Duration, Instant},
};

use trace::{linux::Kernel, regular};

use super::panic_dump::PanicDump;
use crate::{
    config::OnPanic,
    error::Error,
    recording::GuestMemory,
    timeline::run::Run,
    vm::{End, Panic},
};

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
    /// Where a core file goes.
    dump: Option<PanicDump>,
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
    /// Nothing is known yet. Makes the file of `--on-panic dump=FILE`.
    ///
    /// # Errors
    /// The file exists, or cannot be made.
    pub fn new(action: OnPanic) -> Result<PanicWatch, Error> {
        let dump = match &action {
            OnPanic::Dump(path) => Some(PanicDump::new(path)?),
            OnPanic::Exit | OnPanic::Stop => None,
        };
        Ok(PanicWatch {
            action,
            dump,
            kernel: None,
            search: Instant::now(),
            seen: None,
            breakpoint: None,
        })
    }

    /// Looks. `debugged`: somebody is there who can look at a guest that is held.
    pub fn look(&mut self, run: &mut Run, debugged: bool) -> Panicked {
        let now = Instant::now();
        let says_so = run.machine().has_panicked();
        let held = debugged || self.action == OnPanic::Stop;
        if says_so && !held {
            return self.panics(run, now);
        }
        if self.kernel.is_none() && now >= self.search {
            let memory = &mut GuestMemory::new(run.machine().memory());
            self.kernel = Kernel::find(memory);
            self.search = Instant::now() + LOOK.max(now.elapsed() * 8);
        }
        let Some(kernel) = &self.kernel else {
            return Panicked::No;
        };
        if held {
            if self.breakpoint.is_none()
                && let Some(at) = kernel.symbols().address("panic")
            {
                run.debugger().add_breakpoint(at);
                self.breakpoint = Some(at);
            }
            return Panicked::No;
        }
        let memory = &mut GuestMemory::new(run.machine().memory());
        match self.seen.is_some() || kernel.panic_cpu(memory).is_some() {
            true => self.panics(run, now),
            false => Panicked::No,
        }
    }

    /// The guest has panicked, as was seen now or before: its message has yet to come out.
    fn panics(&mut self, run: &Run, now: Instant) -> Panicked {
        let steps = run.steps();
        let (then, at) = *self.seen.get_or_insert((now, steps));
        // A debugger may have gone back behind where it was seen.
        match now - then >= MESSAGE && (run.is_hosted() || steps.saturating_sub(at) >= MESSAGE_STEPS) {
            true => Panicked::End,
            false => Panicked::No,
        }
    }

    /// The guest has said at this step that it has panicked. `true`: it is to be held there.
    pub fn told(&mut self, run: &mut Run, debugged: bool) -> bool {
        if let Some(dump) = &mut self.dump {
            dump.write(run, self.kernel.as_ref());
        }
        // Where `panic` begins it has been held before.
        (debugged || self.action == OnPanic::Stop) && self.breakpoint.is_none()
    }

    /// The run is over; `panicked`: in a panic.
    ///
    /// # Errors
    /// The core file cannot be written.
    pub fn end(self, run: &mut Run, panicked: bool) -> Result<(), Error> {
        let Some(mut dump) = self.dump else { return Ok(()) };
        if panicked {
            dump.write(run, self.kernel.as_ref());
        }
        dump.end()
    }

    /// Whether the guest stands where it panics.
    pub fn is_breakpoint(&self, address: u64) -> bool {
        self.breakpoint == Some(address)
    }
}

/// The panic of the guest at the end of its run, if it was in one.
pub fn at_the_end(run: &mut Run, kernel: &Path, end: &End) -> Option<Panic> {
    let may_be = matches!(
        end,
        End::Reset | End::Halted(_) | End::TripleFault(_) | End::Instructions(_) | End::Timeout(_) | End::Panicked
    );
    if !may_be {
        return None;
    }
    let cpu = panic_cpu(run, kernel);
    let panicked = cpu.is_some() || run.machine().has_panicked() || matches!(end, End::Panicked);
    panicked.then_some(Panic { cpu })
}

/// The CPU on which the guest's Linux has panicked, as far as its symbols tell.
fn panic_cpu(run: &mut Run, kernel: &Path) -> Option<u32> {
    if !is_linux(kernel) {
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
