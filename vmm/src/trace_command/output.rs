//! Standard output, progress, and the line at the end.

use std::{
    borrow::Cow,
    cell::{Cell, RefCell},
    fmt::Write as _,
    io::{self, BufWriter, ErrorKind, IsTerminal, StdoutLock, Write},
    process::exit,
    time::{Duration, Instant},
};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use trace::view::Totals;

use crate::error::{Error, Status};

/// Standard output. When nobody reads it any more, there is nothing left to do.
#[derive(Debug)]
pub struct Output(BufWriter<StdoutLock<'static>>);

impl Output {
    /// Begins.
    pub fn new() -> Output {
        Output(BufWriter::with_capacity(1 << 16, io::stdout().lock()))
    }

    fn check(result: io::Result<()>) {
        if let Err(error) = result {
            if error.kind() != ErrorKind::BrokenPipe {
                let _ = writeln!(io::stderr(), "minivmm: standard output: {}", machine::plain(&error));
                exit(Status::Usage.code());
            }
            exit(Status::Done.code());
        }
    }

    /// Writes a line. What would control a terminal is escaped, but for tabs: names come from the guest, or with the trace.
    pub fn line(&mut self, text: &str) {
        let text = printable(text);
        Output::check(self.0.write_all(text.as_bytes()).and_then(|()| self.0.write_all(b"\n")));
    }

    /// Writes what waits.
    pub fn flush(&mut self) {
        Output::check(self.0.flush());
    }
}

/// How often what is done is said where no terminal shows a bar.
const SAID_EVERY: Duration = Duration::from_secs(10);

/// A bar on standard error, if that is a terminal and nothing else is written to it; if it is none, a line now and then.
#[derive(Debug)]
pub struct Bar {
    bar: ProgressBar,
    /// When a line was written last; `None`: there are none.
    said: Cell<Option<Instant>>,
    what: RefCell<String>,
}

impl Bar {
    /// A bar that is not shown when lines go to the terminal.
    pub fn beside_output() -> Bar {
        Bar::new(!io::stdout().is_terminal())
    }

    /// A bar where standard output is not used.
    pub fn new(shown: bool) -> Bar {
        let target = if shown {
            ProgressDrawTarget::stderr()
        } else {
            ProgressDrawTarget::hidden()
        };
        let style = ProgressStyle::with_template("{msg} [{bar:40}] {bytes}/{total_bytes} {elapsed} (eta {eta})");
        let lines = shown && !io::stderr().is_terminal();
        let bar = ProgressBar::with_draw_target(None, target);
        bar.set_style(
            style
                .unwrap_or_else(|_| ProgressStyle::default_bar())
                .progress_chars("=> "),
        );
        Bar {
            bar,
            said: Cell::new(lines.then(Instant::now)),
            what: RefCell::default(),
        }
    }

    /// What is being done.
    pub fn say(&self, what: String) {
        self.bar.set_message(what.clone());
        *self.what.borrow_mut() = what;
    }

    /// So many of so many bytes.
    pub fn at(&self, done: u64, total: u64) {
        self.bar.set_length(total);
        self.bar.set_position(done);
        if let Some(line) = self.due(done, total) {
            say(&line);
        }
    }

    /// The line that is due, if one is.
    fn due(&self, done: u64, total: u64) -> Option<String> {
        if self.said.get()?.elapsed() < SAID_EVERY {
            return None;
        }
        self.said.set(Some(Instant::now()));
        let percent = (done as f64 * 100.0 / total.max(1) as f64).min(100.0);
        Some(format!("{}: {percent:.0}% of {total} bytes", self.what.borrow()))
    }
}

impl Drop for Bar {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}

/// The text with control characters written as JSON may have them.
pub fn printable(text: &str) -> Cow<'_, str> {
    let controls = |c: char| c.is_control() && c != '\t';
    if !text.contains(controls) {
        return text.into();
    }
    let mut escaped = String::with_capacity(text.len() + 8);
    for c in text.chars() {
        if controls(c) {
            let _ = write!(escaped, "\\u{:04x}", u32::from(c));
        } else {
            escaped.push(c);
        }
    }
    escaped.into()
}

/// `1 gap`, `2 gaps`.
pub fn count(n: u64, what: &str) -> String {
    format!("{n} {what}{}", if n == 1 { "" } else { "s" })
}

/// Seconds with all digits of a nanosecond.
pub fn seconds(ns: u64) -> String {
    format!("{}.{:09}", ns / 1_000_000_000, ns % 1_000_000_000)
}

/// The line at the end.
pub fn summary(totals: &Totals) -> String {
    let mut text = format!(
        "{}, {}",
        count(totals.instructions, "instruction"),
        count(totals.blocks, "block")
    );
    if let Some((from, to)) = totals.steps {
        text += &format!(", steps {from} to {to}");
    }
    if let Some((from, to)) = totals.time {
        text += &format!(", {} s to {} s", seconds(from), seconds(to));
    }
    text += &format!(
        ", {}, {}",
        count(totals.gaps, "gap"),
        count(totals.overflows, "overflow")
    );
    if totals.lost > 0 {
        text += &format!(", {} of packets lost", count(totals.lost, "byte"));
    }
    text
}

/// Says what is damaged, and the summary.
pub fn conclude(totals: &Totals) {
    for line in &totals.damage {
        say(&line.replace(char::is_control, "?"));
    }
    say(&summary(totals));
}

/// A line for the user beside the output.
pub fn say(text: &str) {
    let _ = writeln!(io::stderr(), "minivmm: {text}");
}

/// A summary as a JSON object.
pub fn summary_json(totals: &Totals) -> serde_json::Value {
    serde_json::json!({
        "type": "summary",
        "instructions": totals.instructions,
        "blocks": totals.blocks,
        "steps": totals.steps.map(|(from, to)| [from, to]),
        "ns": totals.time.map(|(from, to)| [from, to]),
        "gaps": totals.gaps,
        "overflows": totals.overflows,
        "lost_bytes": totals.lost,
        "damage": totals.damage,
    })
}

/// Nothing was found where something was asked for.
pub fn must_begin(totals: &Totals, from: Option<&str>) -> Result<(), Error> {
    match from {
        Some(from) if totals.blocks == 0 => Err(Error::Usage(format!("--from {from}: the trace does not come there"))),
        _ => Ok(()),
    }
}

#[cfg(test)]
#[path = "output_test.rs"]
mod tests;
