//! `--control unix:PATH`: a running machine takes commands over a socket, as JSON lines.
//!
//! # Protocol
//! A client sends one object a line, such as `{"command":"status"}`, and gets one object a line back, in order. `"ok"` says
//! whether the command was carried out; if not, `"error"` says why, and the connection goes on unless the line was too long.
//!
//! | command | what it does | what comes back |
//! |---|---|---|
//! | `status` | nothing | see below |
//! | `pause` | the guest stops between two instructions; the clock stops with it | status |
//! | `resume` | the guest goes on | status |
//! | `quit` | the machine ends, with exit status 0 | status |
//! | `monitor` | what the `"line"` says ([`crate::front::monitor`]), on the CPU that `"cpu"` names or on 0 | `"text"` |
//!
//! Status is `"state"` (`"running"` or `"paused"`), `"steps"` and `"instructions"` so far, `"virtual_ns"`, and for each CPU in
//! `"cpus"` its `"rip"` (hexadecimal), `"activity"` and `"steps"`.
//!
//! # Practice
//! Each client has a thread of its own, which alone suffers from what the client does: the run loop sees whole commands only,
//! looks for them where it looks for input, and answers a few at a time. There are [`MOST_CLIENTS`] at once: one more takes the place of
//! the one that has asked for nothing for the longest time. The socket's file is removed at the end.

pub mod client;

use std::{
    fs,
    io::{self, BufRead, BufReader, Read, Write},
    os::{
        fd::OwnedFd,
        unix::net::{UnixListener, UnixStream},
    },
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex, MutexGuard,
        atomic::{AtomicBool, AtomicUsize, Ordering},
        mpsc::{Receiver, SyncSender, sync_channel},
    },
    thread,
    time::{Duration, Instant},
};

use serde::{Deserialize, Serialize};
use vmm_sys_util::eventfd::EventFd;

use super::socket;
use crate::{error::Error, jail, vm::Interrupt};
use machine::plain;

/// The longest line in bytes, without its end.
pub const LONGEST: usize = 4096;
/// So many clients at once.
pub const MOST_CLIENTS: usize = 8;
/// So many commands wait for the run loop; a client's thread waits when there are more.
const QUEUE: usize = 16;
/// A client that does not read its answers is given up after so long.
const PATIENCE: Duration = Duration::from_secs(10);
/// So long the end of a machine waits for its last answers to go out.
const FAREWELL: Duration = Duration::from_secs(1);

/// What a client can ask for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "command", rename_all = "kebab-case", deny_unknown_fields)]
pub enum Command {
    /// Stop the guest.
    Pause,
    /// Let it go on.
    Resume,
    /// Say how it is.
    Status,
    /// End the machine.
    Quit,
    /// Carry out a command of the monitor's.
    Monitor {
        /// The command and what it takes.
        line: String,
        /// The CPU that it looks at.
        #[serde(default)]
        cpu: usize,
    },
}

/// What comes of a command.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reply {
    /// It was carried out, and this is how the machine is.
    Status(Status),
    /// It was carried out, and this is what it says.
    Text(String),
    /// It was not, for this reason.
    Refused(String),
}

/// What the machine says of itself.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Status {
    /// `running` or `paused`.
    pub state: &'static str,
    /// Instructions and REP iterations so far, over all CPUs.
    pub steps: u64,
    /// Instructions so far.
    pub instructions: u64,
    /// Virtual time in nanoseconds.
    pub virtual_ns: u64,
    /// The CPUs.
    pub cpus: Vec<CpuStatus>,
}

/// What the machine says of a CPU.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct CpuStatus {
    /// The instruction pointer, in hexadecimal.
    pub rip: String,
    /// `running`, `halted`, `waiting` (after MWAIT), `wait-for-sipi` (until another CPU starts it) or `shutdown`.
    pub activity: &'static str,
    /// Instructions and REP iterations so far.
    pub steps: u64,
}

/// An answer, as it goes over the line.
#[derive(Debug, Serialize)]
struct Answer<'a> {
    ok: bool,
    #[serde(flatten)]
    status: Option<&'a Status>,
    #[serde(skip_serializing_if = "Option::is_none")]
    text: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<&'a str>,
}

/// A command whose client waits.
#[derive(Debug)]
pub struct Request {
    /// The command.
    pub command: Command,
    answer: SyncSender<Reply>,
}

impl Request {
    /// Answers it. A client that has gone away does not mind.
    pub fn answer(self, reply: Reply) {
        let _ = self.answer.try_send(reply);
    }
}

/// What the threads share.
#[derive(Debug)]
struct Service {
    requests: SyncSender<Request>,
    interrupt: Interrupt,
    wake: EventFd,
    over: AtomicBool,
    /// Clients that wait for an answer, or have one on its way to them.
    busy: AtomicUsize,
    clients: Mutex<Vec<Client>>,
}

/// Somebody who is connected.
#[derive(Debug)]
struct Client {
    number: u64,
    stream: UnixStream,
    /// When it was answered last, or connected. `None`: it waits for an answer.
    idle: Option<Instant>,
}

impl Service {
    fn clients(&self) -> MutexGuard<'_, Vec<Client>> {
        self.clients.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Takes note of whether a client waits for an answer. `false`: it was sent away meanwhile.
    fn idles(&self, number: u64, idle: Option<Instant>) -> bool {
        let mut clients = self.clients();
        let client = clients.iter_mut().find(|client| client.number == number);
        client.map(|client| client.idle = idle).is_some()
    }

    /// Makes room for another client, where all do not wait for answers. `false`: there is none.
    fn make_room(&self) -> bool {
        let mut clients = self.clients();
        if clients.len() < MOST_CLIENTS {
            return true;
        }
        let waits = clients.iter().enumerate();
        let longest = waits
            .filter_map(|(at, client)| client.idle.map(|idle| (idle, at)))
            .min();
        let Some((_, at)) = longest else { return false };
        let mut client = clients.swap_remove(at);
        drop(clients);
        // One that does not read is not waited for.
        let _ = client.stream.set_nonblocking(true);
        let _ = refuse(
            &mut client.stream,
            "there are other clients, and this one was idle for the longest time",
        );
        let _ = client.stream.shutdown(std::net::Shutdown::Both);
        true
    }
}

/// A socket that takes commands for a machine.
#[derive(Debug)]
pub struct Control {
    path: PathBuf,
    requests: Receiver<Request>,
    shared: Arc<Service>,
    /// The listener, for its end.
    end: UnixStream,
}

impl Control {
    /// Makes the socket and listens. Only its owner may connect. A command has the run come back by `interrupt`.
    ///
    /// # Errors
    /// One line: something of that name exists, a folder that is missing, a path that is too long.
    pub fn open(path: &Path, interrupt: Interrupt) -> Result<Self, Error> {
        let failed = |source| Error::File {
            option: "--control",
            path: path.into(),
            source,
        };
        let listener = socket::listen(path).map_err(failed)?;
        let (send, requests) = sync_channel(QUEUE);
        let shared = match EventFd::new(libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) {
            Ok(wake) => Arc::new(Service {
                requests: send,
                interrupt,
                wake,
                over: AtomicBool::new(false),
                busy: AtomicUsize::new(0),
                clients: Mutex::default(),
            }),
            Err(e) => {
                let _ = fs::remove_file(path);
                return Err(failed(e));
            }
        };
        let end = listener.try_clone().map_err(failed)?;
        let control = Control {
            path: path.into(),
            requests,
            end: OwnedFd::from(end).into(),
            shared: Arc::clone(&shared),
        };
        // From here on dropping `control` removes the socket.
        jail::start_for_clients("control", move || accept(&listener, &shared)).map_err(failed)??;
        Ok(control)
    }

    /// The next command, if one has come.
    pub fn next(&self) -> Option<Request> {
        self.requests.try_recv().ok()
    }

    /// Readable once a command has come; whoever waits for it reads it.
    pub fn wake(&self) -> io::Result<EventFd> {
        self.shared.wake.try_clone()
    }
}

impl Drop for Control {
    fn drop(&mut self) {
        self.shared.over.store(true, Ordering::SeqCst);
        // The last answer is on its way; whoever has not been heard is told so.
        let limit = Instant::now() + FAREWELL;
        while self.shared.busy.load(Ordering::SeqCst) > 0 && Instant::now() < limit {
            self.requests.try_iter().for_each(drop);
            thread::sleep(Duration::from_millis(1));
        }
        for client in self.shared.clients().iter() {
            let _ = client.stream.shutdown(std::net::Shutdown::Both);
        }
        // Whoever accepts comes back.
        let _ = self.end.shutdown(std::net::Shutdown::Both);
        let _ = fs::remove_file(&self.path);
    }
}

fn accept(listener: &UnixListener, shared: &Arc<Service>) {
    let mut number = 0;
    for client in listener.incoming() {
        if shared.over.load(Ordering::SeqCst) {
            return;
        }
        let Ok(mut client) = client else {
            // Out of descriptors, most likely: others have to go first.
            thread::sleep(Duration::from_millis(100));
            continue;
        };
        let _ = client.set_write_timeout(Some(PATIENCE));
        if !shared.make_room() {
            let _ = client.set_nonblocking(true);
            let _ = refuse(
                &mut client,
                &format!("there are {MOST_CLIENTS} clients, and all wait for answers"),
            );
            continue;
        }
        let Ok(twin) = client.try_clone() else { continue };
        number += 1;
        let (number, own) = (number, Arc::clone(shared));
        shared.clients().push(Client {
            number,
            stream: twin,
            idle: Some(Instant::now()),
        });
        let serve = move || {
            // Whatever went wrong, it was the client's connection.
            let _ = serve(client, number, &own);
            own.clients().retain(|other| other.number != number);
        };
        if thread::Builder::new()
            .name("control client".into())
            .spawn(serve)
            .is_err()
        {
            shared.clients().retain(|other| other.number != number);
        }
    }
}

/// Answers a client's lines until it goes away.
fn serve(mut client: UnixStream, number: u64, shared: &Service) -> io::Result<()> {
    let mut lines = BufReader::new(client.try_clone()?);
    let mut line = Vec::new();
    loop {
        line.clear();
        let count = (&mut lines).take(LONGEST as u64 + 1).read_until(b'\n', &mut line)?;
        if count == 0 {
            return Ok(());
        }
        if line.last() != Some(&b'\n') && line.len() > LONGEST {
            return refuse(&mut client, &format!("a line of more than {LONGEST} bytes"));
        }
        if line.trim_ascii().is_empty() {
            continue;
        }
        match serde_json::from_slice::<Command>(&line) {
            Ok(command) => {
                if !shared.idles(number, None) {
                    return Ok(());
                }
                shared.busy.fetch_add(1, Ordering::SeqCst);
                let answered = obey(command, &mut client, shared);
                shared.busy.fetch_sub(1, Ordering::SeqCst);
                answered?;
                shared.idles(number, Some(Instant::now()));
            }
            Err(error) => refuse(&mut client, &not_a_command(&line, &error))?,
        }
    }
}

/// What is wrong with a line, and which commands there are.
fn not_a_command(line: &[u8], error: &serde_json::Error) -> String {
    const COMMANDS: &str = "there are status, pause, resume, quit, and monitor with a line";
    let object = serde_json::from_slice::<serde_json::Value>(line).ok();
    match object.as_ref().map(|object| &object["command"]) {
        Some(serde_json::Value::String(name)) if !COMMANDS.split([' ', ',']).any(|known| known == name) => {
            format!("no command {name:?}: {COMMANDS}")
        }
        Some(serde_json::Value::Null) => format!("an object without \"command\": {COMMANDS}"),
        _ => format!("not a command: {error}"),
    }
}

/// Has a command carried out and says what came of it.
fn obey(command: Command, client: &mut UnixStream, shared: &Service) -> io::Result<()> {
    let done = |status, text| Answer {
        ok: true,
        status,
        text,
        error: None,
    };
    match ask(command, shared) {
        Some(Reply::Status(status)) => say(client, &done(Some(&status), None)),
        Some(Reply::Text(text)) => say(client, &done(None, Some(&text))),
        Some(Reply::Refused(error)) => refuse(client, &error),
        None => refuse(client, "the machine has ended"),
    }
}

/// Hands a command to the run loop and waits for its answer.
fn ask(command: Command, shared: &Service) -> Option<Reply> {
    let (answer, reply) = sync_channel(1);
    shared.requests.send(Request { command, answer }).ok()?;
    shared.interrupt.request();
    let _ = shared.wake.write(1);
    reply.recv().ok()
}

fn refuse(client: &mut UnixStream, error: &str) -> io::Result<()> {
    let answer = Answer {
        ok: false,
        status: None,
        text: None,
        error: Some(error),
    };
    say(client, &answer)
}

fn say(client: &mut UnixStream, answer: &Answer) -> io::Result<()> {
    let mut line = serde_json::to_vec(answer)?;
    line.push(b'\n');
    client.write_all(&line)
}

fn file(option: &'static str, path: &Path, text: &str) -> Error {
    Error::File {
        option,
        path: path.into(),
        source: io::Error::other(text),
    }
}

fn reported(option: &'static str, path: &Path, error: &io::Error) -> Error {
    file(option, path, &plain(error))
}
