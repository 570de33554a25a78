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

use serde::{Deserialize, Serialize};

use super::{console::Console, names::GuestNames};
use crate::{
    debug::{StopCause, WatchKind, Watchpoint},
    error::Error,
    timeline::{back::Back, run::Run},
    vm::{End, StopReason},
};

/// What is asked. Addresses are numbers or kernel symbols, moments are steps or the last time that a function began.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, clap::Subcommand)]
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
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, clap::Args)]
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

/// That a word was not written.
pub fn nobody(word: &str, first: u64, before: u64) -> String {
    format!("nobody wrote to {word} from step {first} to step {before}\n")
}

/// The line behind a list of writes.
pub fn how_many(count: u64, limit: u64) -> String {
    match count.saturating_sub(limit) {
        0 => format!("{count} writes\n"),
        hidden => format!("{count} writes, of which the last {hidden} are not shown: --limit shows more\n"),
    }
}

/// The run is where it was to go: at the guest's end, the session's, or that of the part that is replayed.
fn is_its_end(end: &End) -> bool {
    end.is_the_guests() || matches!(end, End::Replayed { .. } | End::Instructions(_))
}

/// A run that is asked.
pub struct Asked<'r> {
    pub(super) run: &'r mut Run,
    console: &'r mut Console,
    pub(super) names: GuestNames,
    /// The step at which a Linux is looked for next, as long as none was found.
    look_at: u64,
}

impl<'r> Asked<'r> {
    /// Makes the run to its end. It has to keep its past.
    ///
    /// # Errors
    /// Something from outside ended it meanwhile, or it went another way than it was recorded.
    pub fn new(run: &'r mut Run, console: &'r mut Console) -> Result<Self, QueryError> {
        let mut asked = Asked::at_its_beginning(run, console);
        asked.run_to_end()?;
        asked.look();
        Ok(asked)
    }

    /// Asks a run where it is: what is asked has to be ahead.
    pub fn at_its_beginning(run: &'r mut Run, console: &'r mut Console) -> Self {
        let names = GuestNames::of(run.kernel(), run.symbols());
        Asked {
            run,
            console,
            names,
            look_at: 0,
        }
    }

    /// Makes the run to its end, or to that of the part that it is.
    pub(super) fn run_to_end(&mut self) -> Result<(), QueryError> {
        loop {
            match self.run.run(self.console)? {
                StopReason::Ended(end) if is_its_end(&end) => return Ok(()),
                StopReason::Ended(end) => return Err(ended(&end)),
                _ => {}
            }
        }
    }

    pub(super) fn look(&mut self) {
        let steps = self.run.steps();
        self.names.look(self.run.machine().memory(), steps);
    }

    pub(super) fn address(&mut self, word: &str) -> Result<u64, QueryError> {
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
        self.last_call(address)?
            .ok_or_else(|| QueryError::NotCalled(word.into()))
    }

    /// The step at which a function was called last before here, if it was in what is kept.
    pub(super) fn last_call(&mut self, address: u64) -> Result<Option<u64>, QueryError> {
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
        Ok(found.then_some(step))
    }

    pub(super) fn go_to(&mut self, step: u64) -> Result<(), QueryError> {
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
        if self.names.linux().is_none() && step >= self.look_at {
            self.look();
            self.look_at = step.saturating_mul(2);
        }
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

    pub(super) fn watch(&mut self, word: &str, len: u64) -> Result<Watchpoint, QueryError> {
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
                let (before, first) = (self.run.steps(), self.run.extent().map_or(0, |extent| extent.first));
                match self.last_writer(watchpoint)? {
                    Some(line) => out.write_all(line.as_bytes())?,
                    None => out.write_all(nobody(address, first, before).as_bytes())?,
                }
                Ok(())
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

    /// The last write before here, in a line, if there is one in what is kept.
    pub(super) fn last_writer(&mut self, watchpoint: Watchpoint) -> Result<Option<String>, QueryError> {
        self.run.debugger().add_watchpoint(watchpoint);
        let back = self.run.back(self.console);
        self.run.debugger().remove_watchpoint(&watchpoint);
        let stop = match back? {
            Back::Stopped(stop) => stop,
            Back::Beginning => return Ok(None),
            Back::Ended(end) => return Err(ended(&end)),
        };
        let ip = match stop.why {
            StopCause::Watch { ip, .. } => ip,
            _ => None,
        };
        self.write_here(stop.cpu, ip, watchpoint).map(Some)
    }

    /// The write that the next step makes, in a line.
    pub(super) fn write_here(
        &mut self,
        cpu: usize,
        ip: Option<u64>,
        watchpoint: Watchpoint,
    ) -> Result<String, QueryError> {
        let (address, len) = (watchpoint.first(), watchpoint.last() - watchpoint.first() + 1);
        let place = self.place(cpu, ip);
        let old = self.value(cpu, address, len);
        self.go_to(place.step + 1)?;
        let new = self.value(cpu, address, len);
        Ok(format!("{place}: {old} -> {new}\n"))
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
                Some(StopReason::Ended(end)) if is_its_end(&end) => return Ok(None),
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
        let count = self.every_write(watchpoint, steps, limit, out)?;
        out.write_all(how_many(count, limit).as_bytes())?;
        Ok(())
    }

    /// A line for each write, up to a limit; how many there are.
    pub(super) fn every_write(
        &mut self,
        watchpoint: Watchpoint,
        steps: Range<u64>,
        limit: u64,
        out: &mut dyn Write,
    ) -> Result<u64, QueryError> {
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
        Ok(count)
    }

    pub(super) fn calls(
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
