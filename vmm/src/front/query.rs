//! Questions about a run that keeps its past: who wrote a word last, who wrote it at all, who called a function.
//!
//! # Practice
//! A run is made again to its end, which leaves points on the way; then the debugger's watchpoints and breakpoints are met between
//! the points that matter. The last writer costs the stretch between two points in which it is found, so what was written late is
//! found at once; what never was costs the whole run once more.

use std::{
    collections::BTreeMap,
    fmt,
    io::{self, Write},
    ops::Range,
};

use super::{console::Console, names::GuestNames};
use crate::{
    debug::{StopCause, WatchKind, Watchpoint},
    error::Error,
    timeline::{back::Back, run::Run},
    vm::{End, StopReason},
};

/// What is asked. Addresses are numbers or kernel symbols, moments are steps or the last time that a function began.
#[derive(Clone, Debug, PartialEq, Eq, clap::Subcommand)]
pub enum Question {
    /// Who wrote to ADDRESS last, and what
    LastWriter {
        /// A linear address, or a kernel symbol
        address: String,
        /// Bytes from there on
        #[arg(long, value_name = "N", default_value = "8", value_parser = clap::value_parser!(u64).range(1..=4096))]
        len: u64,
        /// Before this step, or before this function was called last [default: the end]
        #[arg(long, value_name = "STEP|FUNCTION")]
        before: Option<String>,
    },
    /// Every write to ADDRESS, in order
    Writes {
        /// A linear address, or a kernel symbol
        address: String,
        /// Bytes from there on
        #[arg(long, value_name = "N", default_value = "8", value_parser = clap::value_parser!(u64).range(1..=4096))]
        len: u64,
        /// The part of the run that is looked at.
        #[command(flatten)]
        window: Window,
    },
    /// Every call of FUNCTION: who called it, and how many instructions it took; then how often each caller did
    Calls {
        /// A linear address, or a kernel symbol
        function: String,
        /// The part of the run that is looked at.
        #[command(flatten)]
        window: Window,
    },
}

/// A part of the run.
#[derive(Clone, Debug, PartialEq, Eq, clap::Args)]
pub struct Window {
    /// From this step on, or from where this function was called last [default: the beginning]
    #[arg(long, value_name = "STEP|FUNCTION")]
    pub from: Option<String>,
    /// Up to this step, or to where this function was called last [default: the end]
    #[arg(long, value_name = "STEP|FUNCTION")]
    pub to: Option<String>,
    /// Lines at most; what comes behind is counted, and not shown
    #[arg(long, value_name = "N", default_value = "1000")]
    pub limit: u64,
}

/// The bit of a code segment's attributes that says 64-bit mode (L).
const CODE_64: u16 = 1 << 13;

/// A question that has no answer.
#[derive(Debug, thiserror::Error)]
pub enum QueryError {
    /// Neither a number nor a name.
    #[error("{0:?} is neither a number nor a symbol of the guest's kernel at the end of the run")]
    Symbol(String),
    /// A function that did not run.
    #[error("{0} was not called in what is kept of the run")]
    NotCalled(String),
    /// A range that wraps.
    #[error("{0:#x} and what is behind it leave the address space")]
    Range(u64),
    /// Steps in the wrong order.
    #[error("the window ends at step {to}, before it begins at step {from}")]
    Window {
        /// Its beginning.
        from: u64,
        /// Its end.
        to: u64,
    },
    /// The run could not be made again.
    #[error("the run ended before it was asked to the end: {0}")]
    Run(String),
    /// The answer cannot be written.
    #[error("the answer: {}", machine::plain(.0))]
    Output(#[from] io::Error),
    /// The machine's own.
    #[error(transparent)]
    Machine(#[from] Error),
}

/// Where something was done.
struct Place {
    step: u64,
    ns: u64,
    cpu: usize,
    task: String,
    at: String,
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (seconds, ns) = (self.ns / 1_000_000_000, self.ns % 1_000_000_000);
        let Place {
            step, cpu, task, at, ..
        } = self;
        write!(f, "step {step}, {seconds}.{ns:09} s, CPU {cpu}{task}: {at}")
    }
}

/// Something ended the run that did not when it was recorded.
fn ended(end: &End) -> QueryError {
    QueryError::Run(end.reason())
}

/// A run that is asked.
pub struct Asked<'r> {
    run: &'r mut Run,
    console: &'r mut Console,
    names: GuestNames,
}

impl<'r> Asked<'r> {
    /// Makes the run to its end. It has to keep its past.
    ///
    /// # Errors
    /// Something from outside ended it meanwhile, or it went another way than it was recorded.
    pub fn new(run: &'r mut Run, console: &'r mut Console) -> Result<Self, QueryError> {
        let names = GuestNames::of(run.kernel(), run.symbols());
        loop {
            match run.run(console)? {
                StopReason::Ended(end) if end.is_the_guests() || matches!(end, End::Replayed { .. }) => break,
                StopReason::Ended(end) => return Err(ended(&end)),
                _ => {}
            }
        }
        let mut asked = Asked { run, console, names };
        asked.look();
        Ok(asked)
    }

    fn look(&mut self) {
        let steps = self.run.steps();
        self.names.look(self.run.machine().memory(), steps);
    }

    fn address(&mut self, word: &str) -> Result<u64, QueryError> {
        let number = match word.strip_prefix("0x") {
            Some(digits) => u64::from_str_radix(digits, 16).ok(),
            None => word.parse().ok(),
        };
        let steps = self.run.steps();
        let found = number.or_else(|| self.names.address(self.run.machine().memory(), steps, word));
        found.ok_or_else(|| QueryError::Symbol(word.into()))
    }

    /// The step of a moment.
    fn moment(&mut self, word: &str) -> Result<u64, QueryError> {
        if let Ok(step) = word.parse() {
            return Ok(step);
        }
        let address = self.address(word)?;
        let here = self.run.steps();
        self.run.debugger().add_breakpoint(address);
        let back = self.run.back(self.console);
        self.run.debugger().remove_breakpoint(address);
        let step = self.run.steps();
        let found = match back? {
            Back::Stopped(_) => true,
            Back::Beginning => false,
            Back::Ended(end) => return Err(ended(&end)),
        };
        self.go_to(here)?;
        match found {
            true => Ok(step),
            false => Err(QueryError::NotCalled(word.into())),
        }
    }

    fn go_to(&mut self, step: u64) -> Result<(), QueryError> {
        // An end that is met on the way is the run's own.
        self.run.seek(self.console, step)?;
        Ok(())
    }

    /// The window's steps, once all names in it are known.
    fn window(&mut self, window: &Window) -> Result<Range<u64>, QueryError> {
        let first = self.run.extent().map_or(0, |extent| extent.first);
        let from = match &window.from {
            Some(word) => self.moment(word)?.max(first),
            None => first,
        };
        let to = match &window.to {
            Some(word) => self.moment(word)?,
            None => u64::MAX,
        };
        match from <= to {
            true => Ok(from..to),
            false => Err(QueryError::Window { from, to }),
        }
    }

    /// Where a CPU is, or where it was at `ip`.
    fn place(&mut self, cpu: usize, ip: Option<u64>) -> Place {
        let step = self.run.steps();
        let rip = self.run.cpu_state(cpu).map_or(0, |state| state.linear_rip());
        let memory = self.run.machine().memory();
        let task = self.names.task(memory, cpu);
        let at = self.names.describe(memory, step, ip.unwrap_or(rip));
        Place {
            step,
            ns: self.run.virtual_ns(),
            cpu,
            task: task.map_or_else(String::new, |task| format!(", {} {}", task.comm, task.pid)),
            at,
        }
    }

    /// What memory holds there, as a CPU sees it: a number where it has the size of one.
    fn value(&self, cpu: usize, address: u64, len: u64) -> String {
        let mut bytes = vec![0; len as usize];
        match self.run.read_linear(cpu, address, &mut bytes) {
            Err(_) => "not mapped".into(),
            Ok(()) if matches!(len, 1 | 2 | 4 | 8) => {
                bytes.reverse();
                let digits: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
                format!("0x{digits}")
            }
            Ok(()) => bytes.iter().map(|byte| format!("{byte:02x}")).collect(),
        }
    }

    fn watch(&mut self, word: &str, len: u64) -> Result<Watchpoint, QueryError> {
        let address = self.address(word)?;
        Watchpoint::new(address, len, WatchKind::Write).ok_or(QueryError::Range(address))
    }

    /// Answers, in lines.
    ///
    /// # Errors
    /// See [`QueryError`].
    pub fn answer(&mut self, question: &Question, out: &mut dyn Write) -> Result<(), QueryError> {
        match question {
            Question::LastWriter { address, len, before } => {
                let watchpoint = self.watch(address, *len)?;
                if let Some(before) = before {
                    let step = self.moment(before)?;
                    self.go_to(step)?;
                }
                self.last_writer(watchpoint, address, out)
            }
            Question::Writes { address, len, window } => {
                let watchpoint = self.watch(address, *len)?;
                let steps = self.window(window)?;
                self.writes(watchpoint, steps, window.limit, out)
            }
            Question::Calls { function, window } => {
                let address = self.address(function)?;
                let steps = self.window(window)?;
                self.calls(address, function, steps, window.limit, out)
            }
        }
    }

    fn last_writer(&mut self, watchpoint: Watchpoint, word: &str, out: &mut dyn Write) -> Result<(), QueryError> {
        let before = self.run.steps();
        self.run.debugger().add_watchpoint(watchpoint);
        let back = self.run.back(self.console);
        self.run.debugger().remove_watchpoint(&watchpoint);
        let (address, len) = (watchpoint.first(), watchpoint.last() - watchpoint.first() + 1);
        let stop = match back? {
            Back::Stopped(stop) => Some(stop),
            Back::Beginning => None,
            Back::Ended(end) => return Err(ended(&end)),
        };
        let Some(stop) = stop else {
            let first = self.run.extent().map_or(0, |extent| extent.first);
            writeln!(out, "nobody wrote to {word} from step {first} to step {before}")?;
            return Ok(());
        };
        let ip = match stop.why {
            StopCause::Watch { ip, .. } => ip,
            _ => None,
        };
        let place = self.place(stop.cpu, ip);
        let old = self.value(stop.cpu, address, len);
        self.go_to(place.step + 1)?;
        let new = self.value(stop.cpu, address, len);
        writeln!(out, "{place}: {old} -> {new}")?;
        Ok(())
    }

    /// Runs to the next of the debugger's stops in a window; `None`: there is none any more.
    fn next_stop(&mut self, to: u64) -> Result<Option<(usize, StopCause)>, QueryError> {
        loop {
            let left = to.saturating_sub(self.run.steps());
            if left == 0 {
                return Ok(None);
            }
            match self.run.run_for(self.console, left)? {
                None => return Ok(None),
                Some(StopReason::Ended(end)) if end.is_the_guests() || matches!(end, End::Replayed { .. }) => {
                    return Ok(None);
                }
                Some(StopReason::Ended(end)) => return Err(ended(&end)),
                Some(StopReason::Debugger(stop)) if stop.why != StopCause::Asked => {
                    return Ok(Some((stop.cpu, stop.why)));
                }
                Some(_) => {}
            }
        }
    }

    fn writes(
        &mut self,
        watchpoint: Watchpoint,
        steps: Range<u64>,
        limit: u64,
        out: &mut dyn Write,
    ) -> Result<(), QueryError> {
        self.go_to(steps.start)?;
        self.run.debugger().add_watchpoint(watchpoint);
        let (address, len) = (watchpoint.first(), watchpoint.last() - watchpoint.first() + 1);
        let mut count = 0u64;
        while let Some((cpu, why)) = self.next_stop(steps.end)? {
            count += 1;
            if count <= limit {
                let ip = match why {
                    StopCause::Watch { ip, .. } => ip,
                    _ => None,
                };
                let mut place = self.place(cpu, ip);
                // It stands behind the instruction.
                place.step = place.step.saturating_sub(1);
                writeln!(out, "{place}: {}", self.value(cpu, address, len))?;
            }
        }
        self.run.debugger().remove_watchpoint(&watchpoint);
        let hidden = count.saturating_sub(limit);
        match hidden {
            0 => writeln!(out, "{count} writes")?,
            _ => writeln!(
                out,
                "{count} writes, of which the last {hidden} are not shown: --limit shows more"
            )?,
        }
        Ok(())
    }

    fn calls(
        &mut self,
        function: u64,
        word: &str,
        steps: Range<u64>,
        limit: u64,
        out: &mut dyn Write,
    ) -> Result<(), QueryError> {
        self.go_to(steps.start)?;
        self.run.debugger().add_breakpoint(function);
        // Calls that have not returned: where each will, with which stack pointer, and the CPU's instructions at its beginning.
        let mut open: Vec<(u64, u64, u64, Place, String)> = Vec::new();
        let mut callers: BTreeMap<String, (u64, u64, u64)> = BTreeMap::new();
        let (mut count, mut shown) = (0u64, 0u64);
        while let Some((cpu, why)) = self.next_stop(steps.end)? {
            let StopCause::Breakpoint(address) = why else { continue };
            let Some(state) = self.run.cpu_state(cpu) else { continue };
            let (stack, now) = (state.gpr[4], self.run.steps());
            let returned = open
                .iter()
                .rposition(|(to, pointer, ..)| (*to, *pointer) == (address, stack));
            if let Some(index) = returned {
                let (to, _, begun, place, caller) = open.remove(index);
                self.run.debugger().remove_breakpoint(to);
                let taken = now - begun;
                let entry = callers.entry(caller.clone()).or_default();
                *entry = (entry.0, entry.1 + taken, entry.2 + 1);
                shown += 1;
                if shown <= limit {
                    writeln!(out, "{place} from {caller}: {taken} steps")?;
                }
            }
            if address != function {
                continue;
            }
            count += 1;
            // A near call pushes as many bytes as its operands have: SDM Vol. 1 6.4.1 "Near CALL and RET Operation".
            let wide = state.segments[engine::CS].attributes & CODE_64 != 0;
            let width = if wide { 8 } else { 4 };
            let mut word = [0; 8];
            let to = match self.run.read_linear(cpu, stack, &mut word[..width]) {
                Ok(()) => u64::from_le_bytes(word),
                Err(_) => 0,
            };
            let place = self.place(cpu, None);
            let memory = self.run.machine().memory();
            let caller = self.names.describe(memory, now, to);
            let caller = caller.split(' ').nth(1).map_or(caller.clone(), String::from);
            let caller = caller.split('+').next().unwrap_or(&caller).to_string();
            callers.entry(caller.clone()).or_default().0 += 1;
            self.run.debugger().add_breakpoint(to);
            open.push((to, stack.wrapping_add(width as u64), now, place, caller));
        }
        for (to, _, _, place, caller) in open {
            self.run.debugger().remove_breakpoint(to);
            shown += 1;
            if shown <= limit {
                writeln!(out, "{place} from {caller}: it has not returned")?;
            }
        }
        self.run.debugger().remove_breakpoint(function);
        let hidden = shown.saturating_sub(limit);
        if hidden > 0 {
            writeln!(out, "{hidden} calls are not shown: --limit shows more")?;
        }
        writeln!(out, "{word}: {count} calls")?;
        let mut callers: Vec<_> = callers.into_iter().collect();
        callers.sort_by_key(|(_, (calls, ..))| std::cmp::Reverse(*calls));
        for (caller, (calls, steps, returned)) in callers {
            let mean = steps.checked_div(returned).unwrap_or(0);
            writeln!(out, "{calls:>10} from {caller}: {steps} steps, {mean} a call")?;
        }
        Ok(())
    }
}
