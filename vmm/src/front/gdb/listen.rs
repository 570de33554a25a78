//! Who may connect, and threads that make packets of what a client sends.
//!
//! A client's bytes are read and framed by a thread of its own, which alone suffers from what it does; the machine sees whole
//! packets. There is one client at a time: another one is told so and sent away.

use std::{
    fs,
    io::{self, Read, Write},
    net::{IpAddr, Ipv4Addr, Shutdown, TcpListener, TcpStream},
    os::unix::net::{UnixListener, UnixStream},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
        mpsc::{Receiver, SyncSender, sync_channel},
    },
    thread,
    time::{Duration, Instant},
};

use vmm_sys_util::eventfd::EventFd;

use super::packets::{Frame, Framer, error, frame};
use crate::{address::DebugAddress, error::Error, front::socket, vm::Interrupt};
use machine::plain;

/// So many packets wait for the machine; a client's thread waits when there are more.
const QUEUE: usize = 64;
/// A client that does not read what it is sent is given up after so long.
const PATIENCE: Duration = Duration::from_secs(10);
/// So long the one before has to be gone.
const GOING: Duration = Duration::from_millis(500);
/// So long one that is sent away has time for its first packet.
const FAREWELL: Duration = Duration::from_secs(2);

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

    fn set_read_timeout(&self, time: Duration) -> io::Result<()> {
        match self {
            Stream::Tcp(stream) => stream.set_read_timeout(Some(time)),
            Stream::Unix(stream) => stream.set_read_timeout(Some(time)),
        }
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
            DebugAddress::Unix(path) => Listener::Unix(socket::listen(path).map_err(system)?),
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
        });
        let own = Arc::clone(&shared);
        let gdb = GdbListener {
            address,
            events,
            shared,
        };
        // From here on dropping `gdb` removes the socket.
        thread::Builder::new()
            .name("gdb".into())
            .spawn(move || accept(&listener, &own))
            .map_err(system)?;
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
        // The listener waits for somebody.
        match &self.address {
            DebugAddress::Tcp(host, port) => {
                let host = match host {
                    IpAddr::V4(host) if host.is_unspecified() => IpAddr::V4(Ipv4Addr::LOCALHOST),
                    IpAddr::V6(host) if host.is_unspecified() => IpAddr::V6(std::net::Ipv6Addr::LOCALHOST),
                    host => *host,
                };
                let _ = TcpStream::connect_timeout(&(host, *port).into(), Duration::from_secs(1));
            }
            DebugAddress::Unix(path) => {
                let _ = UnixStream::connect(path);
                let _ = fs::remove_file(path);
            }
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
        let own = Arc::clone(shared);
        let serve = move || {
            // One that has just gone is seen to go a moment later.
            let limit = Instant::now() + GOING;
            while own.taken.swap(true, Ordering::SeqCst) {
                if Instant::now() >= limit {
                    refuse(client);
                    return;
                }
                thread::sleep(Duration::from_millis(10));
            }
            serve(client, &own);
            own.taken.store(false, Ordering::SeqCst);
        };
        // Without a thread the client is sent away, as its stream is dropped.
        let _ = thread::Builder::new().name("gdb client".into()).spawn(serve);
    }
}

/// Answers the first packet of a client with why it cannot stay.
fn refuse(mut client: Stream) {
    let _ = client.prepare();
    let _ = client.set_read_timeout(FAREWELL);
    let (mut framer, mut bytes) = (Framer::default(), [0; 4096]);
    while let Ok(count @ 1..) = client.read(&mut bytes) {
        if bytes[..count]
            .iter()
            .any(|byte| matches!(framer.push(*byte), Some(Frame::Packet(_))))
        {
            let answer = frame(&error("another debugger is connected to this machine"));
            let _ = client.send(&[b"+", &answer[..]].concat());
            break;
        }
    }
    client.close();
}

/// Hands over what a client sends until it goes away.
fn serve(mut client: Stream, shared: &ListenerState) {
    let twin = client.prepare().and_then(|()| client.twin());
    let Ok(twin) = twin else { return };
    if !shared.say(Event::Connected(twin)) {
        return;
    }
    let (mut framer, mut bytes) = (Framer::default(), vec![0; 1 << 16]);
    while let Ok(count @ 1..) = client.read(&mut bytes) {
        for frame in bytes[..count].iter().filter_map(|byte| framer.push(*byte)) {
            if shared.over.load(Ordering::SeqCst) || !shared.say(Event::Frame(frame)) {
                return;
            }
        }
    }
    shared.say(Event::Gone);
}

#[cfg(test)]
#[path = "listen_test.rs"]
mod tests;
