//! The world outside the machine: standard input and output, the wall clock, signals.
//!
//! Input is read when the run loop asks, at its slice boundaries, and waits here until the UART takes it. What the UART sends
//! is collected here and written when the run loop asks, at its slice boundaries and before it waits.

pub mod escape;
mod output;

use std::{
    collections::VecDeque,
    fs::{File, OpenOptions},
    io::{self, ErrorKind, IsTerminal, Read, Write},
    os::{
        fd::{AsFd, AsRawFd, RawFd},
        unix::fs::OpenOptionsExt,
    },
    path::Path,
    sync::Arc,
    time::Duration,
};

use event_manager::{EventManager, EventOps, Events, MutEventSubscriber, SubscriberId, SubscriberOps};
use vmm_sys_util::{epoll::EventSet, eventfd::EventFd, timerfd::TimerFd};

use self::{
    escape::{Escape, Key},
    output::{Fault, Output},
};
use crate::{
    config::SerialTarget,
    error::Error,
    serial_line::SerialLine,
    signals,
    terminal::{self, RawMode},
    vm::{Leave, Outside},
};
use machine::{plain, share::channel::Report};

/// So many bytes of input wait here at most; the rest waits where it comes from.
const QUEUE: usize = 4096;

/// Of a command's kernel messages so many bytes are kept.
const MESSAGES: usize = 256 << 10;
/// Begins an escape in a command's input: `E` behind it is the end, itself stands for one.
const COMMAND_ESCAPE: u8 = 0x7d;

const HELP: &str = "\nminivmm: Ctrl-A x quits, Ctrl-A h shows this, Ctrl-A Ctrl-A sends Ctrl-A\n";

/// What comes from outside.
#[derive(Debug)]
struct Sources {
    /// Standard input, unbuffered; gone after its end.
    stdin: Option<File>,
    /// Standard input is among the events waited for. Regular files and the like cannot be, and are always ready.
    watched: bool,
    /// It can be.
    watchable: bool,
    /// Commands are looked for, as standard input is a terminal.
    escape: Option<Escape>,
    queue: VecDeque<u8>,
    /// What a command's guest has room for, where standard input is the command's.
    command: Option<Arc<Report>>,
    quit: bool,
    timer: TimerFd,
    wake: Option<RawFd>,
    /// Others who may end a wait.
    callers: Vec<EventFd>,
    /// The first error of the event machinery itself.
    error: Option<io::Error>,
}

impl Sources {
    fn room(&self) -> usize {
        // Ctrl-A and the byte after it may come out together.
        match self.command {
            // Each byte may take two, and the end takes two more.
            Some(_) => (QUEUE - 3).saturating_sub(self.queue.len()) / 2,
            None => (QUEUE - 1).saturating_sub(self.queue.len()),
        }
    }

    /// Reads once, as much as there is room for.
    fn read(&mut self) {
        let mut bytes = [0; QUEUE];
        let room = self.room();
        let Some(stdin) = self.stdin.as_mut().filter(|_| room > 0) else {
            return;
        };
        match stdin.read(&mut bytes[..room]) {
            Ok(0) => self.end(),
            Ok(n) => bytes[..n].iter().for_each(|byte| self.take(*byte)),
            Err(e) if matches!(e.kind(), ErrorKind::Interrupted | ErrorKind::WouldBlock) => {}
            // A terminal that has gone away, mostly: there is nothing more to come.
            Err(_) => self.end(),
        }
    }

    /// There is no more to come, which a command is told.
    fn end(&mut self) {
        self.stdin = None;
        if self.command.is_some() {
            self.queue.extend([COMMAND_ESCAPE, b'E']);
        }
    }

    fn put(&mut self, byte: u8) {
        if self.command.is_some() && byte == COMMAND_ESCAPE {
            self.queue.push_back(byte);
        }
        self.queue.push_back(byte);
    }

    fn take(&mut self, byte: u8) {
        match self.escape.as_mut().map_or(Key::Byte(byte), |escape| escape.key(byte)) {
            Key::None => {}
            Key::Byte(byte) => self.put(byte),
            Key::Both(byte) => {
                self.put(1);
                self.put(byte);
            }
            Key::Quit => self.quit = true,
            Key::Help => drop(io::stderr().write_all(HELP.as_bytes())),
        }
    }

    /// Watches standard input exactly as long as there is some and there is room for it.
    fn watch(&mut self, ops: &mut EventOps) {
        const STDIN: RawFd = libc::STDIN_FILENO;
        let wanted = self.watchable && self.stdin.is_some() && self.room() > 0;
        if wanted == self.watched {
            return;
        }
        let events = Events::new_raw(STDIN, EventSet::IN);
        match if wanted { ops.add(events) } else { ops.remove(events) } {
            Ok(()) => self.watched = wanted,
            // Regular files and /dev/null: "The target file fd does not support epoll."
            Err(event_manager::Error::Epoll(e)) if wanted && e.errno() == libc::EPERM => self.watchable = false,
            Err(event_manager::Error::Epoll(e)) => self.fail(e.into()),
            Err(e) => self.fail(io::Error::other(format!("{e:?}"))),
        }
    }

    fn fail(&mut self, error: io::Error) {
        self.error.get_or_insert(error);
    }
}

impl MutEventSubscriber for Sources {
    fn process(&mut self, events: Events, ops: &mut EventOps) {
        if events.fd() == self.timer.as_raw_fd() {
            // It is readable, so this only takes the expiry back.
            if let Err(e) = self.timer.wait() {
                self.fail(e.into());
            }
        } else if let Some(caller) = self.callers.iter().find(|caller| caller.as_raw_fd() == events.fd()) {
            // Its owner looks for what it stands for after every wait.
            let _ = caller.read();
        } else if Some(events.fd()) != self.wake {
            self.read();
            self.watch(ops);
        }
    }

    fn init(&mut self, ops: &mut EventOps) {
        for fd in std::iter::once(self.timer.as_raw_fd()).chain(self.wake) {
            if let Err(e) = ops.add(Events::new_raw(fd, EventSet::IN)) {
                self.fail(io::Error::other(format!("{e:?}")));
            }
        }
        self.watch(ops);
    }
}

/// Where the serial port's output ends up.
#[derive(Debug)]
enum Sink {
    /// Standard output or a file, unbuffered.
    File { output: Output, stdout: bool },
    /// Nowhere.
    Null,
    /// In memory, until it is taken.
    Buffer(Vec<u8>),
    /// The last of it in memory, and all on standard error if so wanted.
    Messages { kept: VecDeque<u8>, live: bool },
}

/// The serial port's connection to the outside, and everything else that comes from there.
pub struct Console {
    events: EventManager<Sources>,
    sources: SubscriberId,
    sink: Sink,
    target: SerialTarget,
    sent: SerialLine,
    _raw: Option<RawMode>,
}

impl std::fmt::Debug for Console {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Console")
            .field("target", &self.target)
            .finish_non_exhaustive()
    }
}

fn system(what: &'static str) -> impl Fn(io::Error) -> Error {
    move |source| Error::System { what, source }
}

fn events_error(error: event_manager::Error) -> Error {
    let source = match error {
        event_manager::Error::Epoll(e) => e.into(),
        e => io::Error::other(format!("{e:?}")),
    };
    Error::System {
        what: "waiting for events",
        source,
    }
}

impl Console {
    /// Connects the serial port. An output file is created, or emptied, and a terminal made raw: so this comes last, when
    /// nothing else about the machine can be wrong any more. `keep` are the files that the machine is made of, which an
    /// output file must not be; `sent` is the line from its UART.
    pub fn open(target: &SerialTarget, keep: &[&Path], sent: SerialLine) -> Result<Self, Error> {
        let serial = |reason: String| Error::Serial {
            target: target.to_string(),
            reason,
        };
        let mut stdin = None;
        let sink = match target {
            SerialTarget::Null => Sink::Null,
            SerialTarget::Buffer => Sink::Buffer(Vec::new()),
            SerialTarget::File(path) => {
                if let Some(other) = keep.iter().find(|other| same_file(path, other)) {
                    return Err(serial(format!(
                        "is the same file as {}, which would be lost",
                        other.display()
                    )));
                }
                // A FIFO that nobody reads is an error, not a wait without end.
                let mut options = OpenOptions::new();
                options
                    .write(true)
                    .create(true)
                    .truncate(true)
                    .custom_flags(libc::O_NONBLOCK);
                let file = options.open(path).map_err(|e| serial(plain(&e)))?;
                let output = Output::new(file).map_err(|e| serial(plain(&e)))?;
                Sink::File { output, stdout: false }
            }
            SerialTarget::Command { live, .. } => {
                if !terminal::stdin_was_closed() {
                    let input = io::stdin().as_fd().try_clone_to_owned();
                    stdin = Some(File::from(input.map_err(|e| serial(plain(&e)))?));
                }
                Sink::Messages {
                    kept: VecDeque::new(),
                    live: *live,
                }
            }
            SerialTarget::Stdio => {
                if terminal::stdin_was_closed() {
                    return Err(serial(
                        "standard input is closed; give it < /dev/null, or --serial null".into(),
                    ));
                }
                let input = io::stdin()
                    .as_fd()
                    .try_clone_to_owned()
                    .map_err(|e| serial(plain(&e)))?;
                stdin = Some(File::from(input));
                let output = io::stdout()
                    .as_fd()
                    .try_clone_to_owned()
                    .map_err(|e| serial(plain(&e)))?;
                let output = Output::new(File::from(output)).map_err(|e| serial(plain(&e)))?;
                Sink::File { output, stdout: true }
            }
        };
        let interactive = stdin.is_some() && io::stdin().is_terminal();
        let command = match target {
            SerialTarget::Command { report, .. } => Some(Arc::clone(report)),
            _ => None,
        };
        let no_input = stdin.is_none();
        let mut sources = Sources {
            stdin,
            watched: false,
            watchable: true,
            escape: interactive.then(Escape::default),
            queue: VecDeque::new(),
            command,
            quit: false,
            timer: TimerFd::new().map_err(|e| system("creating a timer")(e.into()))?,
            wake: signals::wake_fd(),
            callers: Vec::new(),
            error: None,
        };
        if no_input {
            sources.end();
        }
        let mut events = EventManager::new().map_err(events_error)?;
        let sources = events.add_subscriber(sources);
        let raw = if interactive {
            RawMode::enter().map_err(|e| serial(plain(&e)))?
        } else {
            None
        };
        Ok(Console {
            events,
            sources,
            sink,
            target: target.clone(),
            sent,
            _raw: raw,
        })
    }

    /// Has a wait end when this becomes readable, too.
    ///
    /// # Errors
    /// The system refuses to wait for it.
    pub fn listen(&mut self, caller: EventFd) -> Result<(), Error> {
        let failed = |e: event_manager::Error| events_error(e);
        let events = Events::new_raw(caller.as_raw_fd(), EventSet::IN);
        let mut ops = self.events.event_ops(self.sources).map_err(failed)?;
        ops.add(events).map_err(failed)?;
        self.events
            .subscriber_mut(self.sources)
            .map_err(failed)?
            .callers
            .push(caller);
        Ok(())
    }

    fn sources(&mut self) -> Result<&mut Sources, Leave> {
        self.events
            .subscriber_mut(self.sources)
            .map_err(|e| Leave::Failed(events_error(e)))
    }

    /// Takes in what has arrived, without waiting.
    pub fn poll(&mut self) -> Result<(), Leave> {
        self.turn(0)
    }

    /// Waits for input, a signal, or until the time is up; `None`: as long as it takes.
    pub fn wait(&mut self, time: Option<Duration>) -> Result<(), Leave> {
        let always_ready = {
            let sources = self.sources()?;
            match time {
                // A timer of zero would be disarmed.
                Some(Duration::ZERO) => {}
                Some(time) => sources.timer.reset(time, None).map_err(|e| timer_stop(e.into()))?,
                None => sources.timer.clear().map_err(|e| timer_stop(e.into()))?,
            }
            sources.stdin.is_some() && !sources.watchable && sources.room() > 0
        };
        self.turn(if always_ready || time == Some(Duration::ZERO) {
            0
        } else {
            -1
        })
    }

    fn turn(&mut self, milliseconds: i32) -> Result<(), Leave> {
        if let Some(signal) = signals::pending() {
            return Err(Leave::Signal(signal));
        }
        self.events
            .run_with_timeout(milliseconds)
            .map_err(|e| Leave::Failed(events_error(e)))?;
        let sources = self.sources()?;
        if !sources.watchable {
            sources.read();
        }
        if let Some(e) = sources.error.take() {
            return Err(Leave::Failed(system("waiting for events")(e)));
        }
        if sources.quit {
            return Err(Leave::Quit);
        }
        match signals::pending() {
            Some(signal) => Err(Leave::Signal(signal)),
            None => Ok(()),
        }
    }

    /// Input that waits for the UART. Call [`Console::consume`] for what it has taken.
    pub fn input(&mut self) -> &[u8] {
        match self.events.subscriber_mut(self.sources) {
            Ok(sources) => {
                let wanted = sources.command.as_ref().map_or(usize::MAX, |report| report.credit());
                let queue = sources.queue.make_contiguous();
                let count = queue.len().min(wanted);
                &queue[..count]
            }
            Err(_) => &[],
        }
    }

    /// The UART has taken the first `count` bytes of the input.
    pub fn consume(&mut self, count: usize) -> Result<(), Leave> {
        let sources = self.sources()?;
        let count = count.min(sources.queue.len());
        sources.queue.drain(..count);
        if let Some(report) = &sources.command {
            report.spend(count);
        }
        if count == 0 || sources.watched || !sources.watchable {
            return Ok(());
        }
        // There is room again.
        let (stdin, room) = (sources.stdin.is_some(), sources.room() > 0);
        if stdin && room {
            let added = {
                let mut ops = self
                    .events
                    .event_ops(self.sources)
                    .map_err(|e| Leave::Failed(events_error(e)))?;
                ops.add(Events::new_raw(libc::STDIN_FILENO, EventSet::IN))
            };
            added.map_err(|e| Leave::Failed(events_error(e)))?;
            self.sources()?.watched = true;
        }
        Ok(())
    }

    /// Puts bytes into the input, as if they had come from outside.
    pub fn push_input(&mut self, bytes: &[u8]) {
        if let Ok(sources) = self.events.subscriber_mut(self.sources) {
            sources.queue.extend(bytes);
        }
    }

    /// True while input may still come from outside.
    pub fn input_open(&mut self) -> bool {
        self.events
            .subscriber_mut(self.sources)
            .is_ok_and(|sources| sources.stdin.is_some())
    }

    /// Writes out what the UART has sent.
    pub fn flush(&mut self) -> Result<(), Leave> {
        let mut sent = self.sent.bytes();
        if sent.is_empty() {
            return Ok(());
        }
        match &mut self.sink {
            Sink::Null => {}
            Sink::Buffer(buffer) => buffer.extend_from_slice(&sent),
            Sink::Messages { kept, live } => {
                if *live {
                    // A closed standard error is no reason to stop.
                    let _ = io::stderr().write_all(&sent);
                }
                kept.extend(sent.iter());
                let much = kept.len().saturating_sub(MESSAGES);
                kept.drain(..much);
            }
            Sink::File { output, stdout } => {
                let result = output.write_all(&sent);
                sent.clear();
                return match result {
                    Ok(()) => Ok(()),
                    Err(Fault::Signal(signal)) => Err(Leave::Signal(signal)),
                    Err(Fault::Io(e)) if *stdout && e.kind() == ErrorKind::BrokenPipe => Err(Leave::OutputClosed),
                    Err(Fault::Io(e)) => {
                        let (target, reason) = (self.target.to_string(), format!("cannot write: {}", plain(&e)));
                        Err(Leave::Failed(Error::Serial { target, reason }))
                    }
                };
            }
        }
        sent.clear();
        Ok(())
    }

    /// Takes the output that was collected in memory.
    pub fn take_output(&mut self) -> Vec<u8> {
        match &mut self.sink {
            Sink::Buffer(buffer) => std::mem::take(buffer),
            Sink::Messages { kept, .. } => std::mem::take(kept).into(),
            _ => Vec::new(),
        }
    }
}

fn timer_stop(error: io::Error) -> Leave {
    Leave::Failed(system("setting a timer")(error))
}

/// Two names for one file.
fn same_file(a: &Path, b: &Path) -> bool {
    use std::os::unix::fs::MetadataExt;
    match (std::fs::metadata(a), std::fs::metadata(b)) {
        (Ok(a), Ok(b)) => (a.dev(), a.ino()) == (b.dev(), b.ino()),
        _ => false,
    }
}

impl Outside for Console {
    fn flush(&mut self) -> Result<(), Leave> {
        self.flush()
    }

    fn poll(&mut self) -> Result<(), Leave> {
        self.poll()
    }

    fn wait(&mut self, at_most: Option<Duration>) -> Result<(), Leave> {
        self.wait(at_most)
    }

    fn listen(&mut self, wake: EventFd) -> Result<(), Error> {
        self.listen(wake)
    }

    fn input(&mut self) -> &[u8] {
        self.input()
    }

    fn consume(&mut self, count: usize) -> Result<(), Leave> {
        self.consume(count)
    }

    fn input_open(&mut self) -> bool {
        self.input_open()
    }
}

#[cfg(test)]
#[path = "console_test.rs"]
mod tests;
