//! Sockets on which clients of a running machine ask for something: the control socket and QMP.
//!
//! Each client has a thread of its own, which alone suffers from what the client does: the run loop sees whole requests only,
//! looks for them where it looks for input, and answers a few at a time. There are [`MOST_CLIENTS`] at once: one more takes the place of
//! the one that has asked for nothing for the longest time. The socket's file is removed at the end. What a client says, and how it is
//! answered, is a [`Protocol`].

use std::{
    collections::VecDeque,
    fs::{self, File},
    io::{self, Read, Write},
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

use vmm_sys_util::{eventfd::EventFd, sock_ctrl_msg::ScmSocket};

use super::{
    requests::{Command, Reply, Request},
    socket,
};
use crate::{error::Error, jail, vm::Interrupt};

/// So many clients at once.
pub const MOST_CLIENTS: usize = 8;
/// So many commands wait for the run loop; a client's thread waits when there are more.
const QUEUE: usize = 16;
/// A client that does not read its answers is given up after so long.
pub const PATIENCE: Duration = Duration::from_secs(10);
/// So long the end of a machine waits for its last answers to go out.
const FAREWELL: Duration = Duration::from_secs(1);
/// So many files of a client's wait for the commands that they are for.
const MOST_FILES: usize = 8;

/// A language that clients speak.
#[derive(Debug)]
pub struct Protocol {
    /// The option that names the socket.
    pub option: &'static str,
    /// What the thread is called that listens, and those of clients.
    pub threads: (&'static str, &'static str),
    /// Answers a client until it goes away. What goes wrong is the connection's.
    pub serve: fn(Connection, &Session<'_>) -> io::Result<()>,
    /// A client's last answer, which says why it is sent away.
    pub refusal: fn(&str) -> Vec<u8>,
}

/// A client's connection. Files that come with what it sends are kept until somebody takes them.
#[derive(Debug)]
pub struct Connection {
    stream: UnixStream,
    files: VecDeque<File>,
}

impl Connection {
    /// The file that came first among those that are left.
    pub fn take_file(&mut self) -> Option<File> {
        self.files.pop_front()
    }
}

impl Read for Connection {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        let (count, file) = self.stream.recv_with_fd(bytes)?;
        if let Some(file) = file {
            // A client that sends more than it uses loses the oldest.
            if self.files.len() >= MOST_FILES {
                self.files.pop_front();
            }
            self.files.push_back(file);
        }
        Ok(count)
    }
}

impl Write for Connection {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.stream.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// A client's way to the machine.
#[derive(Debug)]
pub struct Session<'a> {
    number: u64,
    service: &'a Service,
}

impl Session<'_> {
    /// Hands a command to the run loop, and its answer to `tell`. `None`: the machine has ended. `false`: the client was sent away
    /// meanwhile, and is told nothing.
    ///
    /// # Errors
    /// What `tell` says.
    pub fn ask(
        &self,
        command: Command,
        file: Option<File>,
        tell: impl FnOnce(Option<Reply>) -> io::Result<()>,
    ) -> io::Result<bool> {
        let Session { number, service } = *self;
        if !service.idles(number, None) {
            return Ok(false);
        }
        service.busy.fetch_add(1, Ordering::SeqCst);
        let told = tell(service.ask(command, file));
        service.busy.fetch_sub(1, Ordering::SeqCst);
        told?;
        service.idles(number, Some(Instant::now()));
        Ok(true)
    }
}

/// What the threads share.
#[derive(Debug)]
struct Service {
    protocol: &'static Protocol,
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
        let refusal = (self.protocol.refusal)("there are other clients, and this one was idle for the longest time");
        let _ = client.stream.write_all(&refusal);
        let _ = client.stream.shutdown(std::net::Shutdown::Both);
        true
    }

    /// Hands a command to the run loop and waits for its answer.
    fn ask(&self, command: Command, file: Option<File>) -> Option<Reply> {
        let (request, reply) = Request::new(command, file);
        self.requests.send(request).ok()?;
        self.interrupt.request();
        let _ = self.wake.write(1);
        reply.recv().ok()
    }
}

/// A socket that takes commands for a machine.
#[derive(Debug)]
pub struct Listener {
    path: PathBuf,
    requests: Receiver<Request>,
    shared: Arc<Service>,
    /// The listener, for its end.
    end: UnixStream,
}

impl Listener {
    /// Makes the socket and listens. Only its owner may connect. A command has the run come back by `interrupt`.
    ///
    /// # Errors
    /// One line: something of that name exists, a folder that is missing, a path that is too long.
    pub fn open(protocol: &'static Protocol, path: &Path, interrupt: Interrupt) -> Result<Self, Error> {
        let failed = |source| Error::File {
            option: protocol.option,
            path: path.into(),
            source,
        };
        let listener = socket::listen(path).map_err(failed)?;
        let (send, requests) = sync_channel(QUEUE);
        let shared = match EventFd::new(libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) {
            Ok(wake) => Arc::new(Service {
                protocol,
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
        let this = Listener {
            path: path.into(),
            requests,
            end: OwnedFd::from(end).into(),
            shared: Arc::clone(&shared),
        };
        // From here on dropping it removes the socket.
        jail::start_for_clients(protocol.threads.0, move || accept(&listener, &shared)).map_err(failed)??;
        Ok(this)
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

impl Drop for Listener {
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
            let why = format!("there are {MOST_CLIENTS} clients, and all wait for answers");
            let _ = client.write_all(&(shared.protocol.refusal)(&why));
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
            let connection = Connection {
                stream: client,
                files: VecDeque::new(),
            };
            let session = Session { number, service: &own };
            let _ = (own.protocol.serve)(connection, &session);
            own.clients().retain(|other| other.number != number);
        };
        if thread::Builder::new()
            .name(shared.protocol.threads.1.into())
            .spawn(serve)
            .is_err()
        {
            shared.clients().retain(|other| other.number != number);
        }
    }
}
