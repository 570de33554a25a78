//! Who may connect, and threads that make packets of what a client sends.
//!
//! A client's bytes are read and framed by a thread of its own, which alone suffers from what it does; the machine sees whole
//! packets. There is one client at a time: another one is told so and sent away.
//!
//! Whoever connects counts as a client with its first packet, for which it has a limited time, as have only so many at once. A byte that
//! no debugger sends between packets ends the connection before anything behind it is looked at: a web page can have a browser send an
//! HTTP request to any port of this host, with packets in its body.

use std::{
    fs,
    io::{self, Read, Write},
    net::{Shutdown, TcpListener, TcpStream},
    os::{
        fd::OwnedFd,
        unix::net::{UnixListener, UnixStream},
    },
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
        mpsc::{Receiver, SyncSender, sync_channel},
    },
    thread,
    time::{Duration, Instant},
};

use vmm_sys_util::eventfd::EventFd;

use super::packets::{Frame, Framer, error, frame};
use crate::{address::DebugAddress, error::Error, front::socket, jail, vm::Interrupt};
use machine::{plain, plain_of};

/// So many packets wait for the machine; a client's thread waits when there are more.
const QUEUE: usize = 64;
/// A client that does not read what it is sent is given up after so long.
const PATIENCE: Duration = Duration::from_secs(10);
/// So long the one before has to be gone.
const GOING: Duration = Duration::from_millis(500);
/// So long whoever connects has time for a first packet, all in all.
const GREETING: Duration = Duration::from_secs(5);
/// So many may be connected whose first packet has not come.
pub const MOST_WAITING: usize = 8;

/// A connection, of either kind.
#[derive(Debug)]
pub enum Stream {
    /// Over TCP.
    Tcp(TcpStream),
    /// Over a socket of this host.
    Unix(UnixStream),
}

impl Stream {
    fn twin(&self) -> io::Result<Stream> {
        Ok(match self {
            Stream::Tcp(stream) => Stream::Tcp(stream.try_clone()?),
            Stream::Unix(stream) => Stream::Unix(stream.try_clone()?),
        })
    }

    fn prepare(&self) -> io::Result<()> {
        match self {
            Stream::Tcp(stream) => {
                stream.set_nodelay(true)?;
                stream.set_write_timeout(Some(PATIENCE))
            }
            Stream::Unix(stream) => stream.set_write_timeout(Some(PATIENCE)),
        }
    }

    fn set_read_timeout(&self, time: Option<Duration>) -> io::Result<()> {
        match self {
            Stream::Tcp(stream) => stream.set_read_timeout(time),
            Stream::Unix(stream) => stream.set_read_timeout(time),
        }
    }

    /// Whether this host's file permissions say who may connect.
    pub fn is_private(&self) -> bool {
        matches!(self, Stream::Unix(_))
    }

    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        match self {
            Stream::Tcp(stream) => stream.read(bytes),
            Stream::Unix(stream) => stream.read(bytes),
        }
    }

    /// Sends all of it.
    ///
    /// # Errors
    /// The client is gone, or does not read.
    pub fn send(&mut self, bytes: &[u8]) -> io::Result<()> {
        match self {
            Stream::Tcp(stream) => stream.write_all(bytes),
            Stream::Unix(stream) => stream.write_all(bytes),
        }
    }

    /// Ends the connection, for whoever reads from it, too.
    pub fn close(&self) {
        let _ = match self {
            Stream::Tcp(stream) => stream.shutdown(Shutdown::Both),
            Stream::Unix(stream) => stream.shutdown(Shutdown::Both),
        };
    }
}

/// What a client does.
#[derive(Debug)]
pub enum Event {
    /// It has connected.
    Connected(Stream),
    /// Something has come.
    Frame(Frame),
    /// It is gone.
    Gone,
}

enum Listener {
    Tcp(TcpListener),
    Unix(UnixListener),
}

impl Listener {
    /// The listener as a stream, whose [`Stream::close`] has whoever accepts come back.
    fn end(&self) -> io::Result<Stream> {
        Ok(match self {
            Listener::Tcp(listener) => Stream::Tcp(OwnedFd::from(listener.try_clone()?).into()),
            Listener::Unix(listener) => Stream::Unix(OwnedFd::from(listener.try_clone()?).into()),
        })
    }

    fn accept(&self) -> io::Result<Stream> {
        match self {
            Listener::Tcp(listener) => listener.accept().map(|(stream, _)| Stream::Tcp(stream)),
            Listener::Unix(listener) => listener.accept().map(|(stream, _)| Stream::Unix(stream)),
        }
    }
}

/// What the threads share.
#[derive(Debug)]
struct ListenerState {
    events: SyncSender<Event>,
    wake: EventFd,
    interrupt: Interrupt,
    /// There is a client.
    taken: AtomicBool,
    over: AtomicBool,
    /// Those whose first packet has not come.
    waiting: AtomicUsize,
}

impl ListenerState {
    /// Hands an event to the machine, and has it look.
    fn say(&self, event: Event) -> bool {
        let said = self.events.send(event).is_ok();
        self.interrupt.stop();
        let _ = self.wake.write(1);
        said
    }
}

/// A port or socket that one debugger at a time can connect to.
#[derive(Debug)]
pub struct GdbListener {
    address: DebugAddress,
    events: Receiver<Event>,
    shared: Arc<ListenerState>,
    /// The same listener, for its end.
    end: Stream,
}

impl GdbListener {
    /// Listens. What a client does has the run come back by `interrupt`.
    ///
    /// # Errors
    /// One line: the port is in use, something of the socket's name exists.
    pub fn open(address: &DebugAddress, interrupt: Interrupt) -> Result<Self, Error> {
        let failed = |reason: String| Error::Gdb {
            address: address.to_string(),
            reason,
        };
        let system = |e: io::Error| failed(plain(&e));
        let listener = match address {
            DebugAddress::Tcp(host, port) => {
                TcpListener::bind((*host, *port))
                    .map(Listener::Tcp)
                    .map_err(|e| match e.kind() {
                        io::ErrorKind::AddrInUse => failed("the port is in use; choose another one".into()),
                        _ => system(e),
                    })?
            }
            DebugAddress::Unix(path) => Listener::Unix(socket::listen(path).map_err(|e| failed(plain_of(&e, path)))?),
        };
        // The port that was found, where any would do.
        let address = match (&listener, address) {
            (Listener::Tcp(listener), DebugAddress::Tcp(host, 0)) => {
                DebugAddress::Tcp(*host, listener.local_addr().map_err(system)?.port())
            }
            _ => address.clone(),
        };
        let (send, events) = sync_channel(QUEUE);
        let wake = EventFd::new(libc::EFD_CLOEXEC | libc::EFD_NONBLOCK).map_err(|e| {
            if let DebugAddress::Unix(path) = &address {
                let _ = fs::remove_file(path);
            }
            system(e)
        })?;
        let shared = Arc::new(ListenerState {
            events: send,
            wake,
            interrupt,
            taken: AtomicBool::new(false),
            over: AtomicBool::new(false),
            waiting: AtomicUsize::new(0),
        });
        let own = Arc::clone(&shared);
        let end = listener.end().map_err(system)?;
        let gdb = GdbListener {
            address,
            events,
            shared,
            end,
        };
        // From here on dropping `gdb` removes the socket.
        jail::start_for_clients("gdb", move || accept(&listener, &own)).map_err(system)??;
        Ok(gdb)
    }

    /// Where it listens.
    pub fn address(&self) -> &DebugAddress {
        &self.address
    }

    /// What has been done next, if anything.
    pub fn next(&self) -> Option<Event> {
        self.events.try_recv().ok()
    }

    /// Readable once something has been done; whoever waits for it reads it.
    ///
    /// # Errors
    /// Out of descriptors.
    pub fn wake(&self) -> io::Result<EventFd> {
        self.shared.wake.try_clone()
    }
}

impl Drop for GdbListener {
    fn drop(&mut self) {
        self.shared.over.store(true, Ordering::SeqCst);
        // A client's thread may wait for room.
        self.events.try_iter().for_each(drop);
        self.end.close();
        if let DebugAddress::Unix(path) = &self.address {
            let _ = fs::remove_file(path);
        }
    }
}

fn accept(listener: &Listener, shared: &Arc<ListenerState>) {
    loop {
        let client = listener.accept();
        if shared.over.load(Ordering::SeqCst) {
            return;
        }
        let Ok(client) = client else {
            // Out of descriptors, most likely: others have to go first.
            thread::sleep(Duration::from_millis(100));
            continue;
        };
        // One too many is sent away as its stream is dropped, and so is one without a thread.
        if shared.waiting.fetch_add(1, Ordering::SeqCst) >= MOST_WAITING {
            shared.waiting.fetch_sub(1, Ordering::SeqCst);
            continue;
        }
        let own = Arc::clone(shared);
        let thread = thread::Builder::new().name("gdb client".into());
        if thread.spawn(move || admit(client, &own)).is_err() {
            shared.waiting.fetch_sub(1, Ordering::SeqCst);
        }
    }
}

/// Waits for a client's first packet, and serves it if there is no other.
fn admit(mut client: Stream, shared: &ListenerState) {
    let mut framer = Framer::default();
    let first = greeting(&mut client, &mut framer);
    shared.waiting.fetch_sub(1, Ordering::SeqCst);
    let Some(first) = first else {
        client.close();
        return;
    };
    // One that has just gone is seen to go a moment later.
    let limit = Instant::now() + GOING;
    while shared.taken.swap(true, Ordering::SeqCst) {
        if Instant::now() >= limit {
            let answer = frame(&error("another debugger is connected to this machine"));
            let _ = client.send(&[b"+", &answer[..]].concat());
            client.close();
            return;
        }
        thread::sleep(Duration::from_millis(10));
    }
    serve(&mut client, framer, first, shared);
    client.close();
    shared.taken.store(false, Ordering::SeqCst);
}

/// A client's first frames. `None`: it does not speak the protocol, says nothing, or is gone.
fn greeting(client: &mut Stream, framer: &mut Framer) -> Option<Vec<Frame>> {
    client.prepare().ok()?;
    let limit = Instant::now() + GREETING;
    let mut bytes = [0; 4096];
    loop {
        let left = limit.saturating_duration_since(Instant::now());
        // A timeout of 0 would be none.
        client
            .set_read_timeout(Some(left).filter(|left| !left.is_zero()))
            .ok()?;
        if left.is_zero() {
            return None;
        }
        let count = client.read(&mut bytes).ok().filter(|count| *count > 0)?;
        let frames: Vec<Frame> = bytes[..count].iter().filter_map(|byte| framer.push(*byte)).collect();
        if frames.contains(&Frame::Foreign) {
            return None;
        }
        if !frames.is_empty() {
            return client.set_read_timeout(None).ok().map(|()| frames);
        }
    }
}

/// Hands over what a client sends until it goes away, or sends what no debugger does.
fn serve(client: &mut Stream, mut framer: Framer, first: Vec<Frame>, shared: &ListenerState) {
    let Ok(twin) = client.twin() else { return };
    if !shared.say(Event::Connected(twin)) {
        return;
    }
    let hand_over = |frame: Frame| {
        let over = frame == Frame::Foreign || shared.over.load(Ordering::SeqCst);
        !over && shared.say(Event::Frame(frame))
    };
    if first.into_iter().all(hand_over) {
        let mut bytes = vec![0; 1 << 16];
        while let Ok(count @ 1..) = client.read(&mut bytes) {
            let mut frames = bytes[..count].iter().filter_map(|byte| framer.push(*byte));
            if !frames.all(hand_over) {
                break;
            }
        }
    }
    shared.say(Event::Gone);
}

#[cfg(test)]
#[path = "listen_test.rs"]
mod tests;
