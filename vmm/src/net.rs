//! `--net`: what the guest's network device is connected to.
//!
//! # Theory
//! *User mode* needs no privilege: passt speaks Ethernet with the guest and ordinary sockets with the host. It gives the guest an address
//! by DHCP, passes DNS on, and connects ports of the host to ports of the guest. The addresses are always the same, so that a guest
//! is set up once.
//!
//! *Tap*: a device of the host's that somebody with the privilege has made, and has given to this user.
//!
//! # Practice
//! passt gets one end of a pair of sockets (its option --fd) and ends when the other one is closed. Frames go through it in both directions
//! behind their length, 32 bits from the highest on. All is open before the process is jailed; the two threads are jailed as those are
//! that serve clients.

use std::{
    fs,
    io::{self, ErrorKind, Read, Write},
    net::{SocketAddr, TcpListener},
    os::{
        fd::{AsFd, AsRawFd},
        unix::net::UnixStream,
    },
    process::{Command, Stdio},
    sync::{
        Arc, Mutex, OnceLock,
        mpsc::{SyncSender, sync_channel},
    },
};

use devices::virtio::net::FRAME_MAX;
use log::{info, warn};
use machine::plain;
use rustix::io::{FdFlags, fcntl_setfd};
use tun_rs::{DeviceBuilder, Layer, SyncDevice};

use crate::{
    config::{Forward, NetConfig},
    error::Error,
    jail,
    links::Sender,
};

/// The guest's address, its network's mask, the gateway, which leads to the host's loopback, and the name server.
pub(crate) const ADDRESS: &str = "10.0.2.15";
pub(crate) const MASK: &str = "255.255.255.0";
pub(crate) const GATEWAY: &str = "10.0.2.2";
pub(crate) const NAMES: &str = "10.0.2.3";
/// The greatest packet in user mode: nothing is gained by small ones.
pub const USER_MTU: u16 = 65520;
/// Frames that wait for a back end that is slower than the guest. What is more is lost.
const WAITING: usize = 512;
/// The end of what passt says that is kept.
const WORDS: usize = 4096;

/// Takes frames for whatever is at the other end.
pub type Far = SyncSender<Vec<u8>>;

/// The guest's end of the cable: where its frames go. Nowhere, until the other end is plugged in.
#[derive(Debug)]
pub struct Cable(Arc<OnceLock<Far>>);

/// The other end.
#[derive(Debug)]
pub struct Plug(Arc<OnceLock<Far>>);

impl Plug {
    /// A cable with its other end.
    pub fn new() -> (Cable, Plug) {
        let far = Arc::default();
        (Cable(Arc::clone(&far)), Plug(far))
    }

    /// Plugs it in, once.
    pub fn connect(self, far: Far) {
        // It is empty: this is the only plug of its cable.
        let _ = self.0.set(far);
    }
}

impl Write for Cable {
    /// One frame. What the other end has no room for is lost, as on any cable.
    fn write(&mut self, frame: &[u8]) -> io::Result<usize> {
        if let Some(far) = self.0.get() {
            let _ = far.try_send(frame.to_vec());
        }
        Ok(frame.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Connects a device: what comes goes to `sender`.
///
/// # Errors
/// One line: what is missing, or taken.
pub fn connect(config: &NetConfig, sender: Sender) -> Result<Far, Error> {
    match config {
        NetConfig::User { forwards } => user(forwards, sender),
        NetConfig::Tap(name) => tap(name, sender),
    }
}

fn failed(option: &str, why: impl Into<String>) -> Error {
    Error::Net {
        option: option.into(),
        reason: why.into(),
    }
}

/// Starts a thread that serves the cable.
fn start(option: &'static str, name: &str, serve: impl FnOnce() + Send + 'static) -> Result<(), Error> {
    let started = jail::start_for_clients(name, serve).map_err(|e| failed(option, plain(&e)))?;
    Ok(started?)
}

fn user(forwards: &[Forward], sender: Sender) -> Result<Far, Error> {
    const OPTION: &str = "user";
    for forward in forwards {
        let address = SocketAddr::new(forward.address, forward.host);
        // passt says of a taken port only that it could bind none.
        if let Err(error) = TcpListener::bind(address) {
            return Err(failed(
                OPTION,
                format!(
                    "forward={}:{}: port {address} of the host: {}",
                    forward.host,
                    forward.guest,
                    plain(&error)
                ),
            ));
        }
    }
    let (ours, theirs) = UnixStream::pair().map_err(|e| failed(OPTION, plain(&e)))?;
    // The one descriptor that passt inherits beside the standard ones.
    fcntl_setfd(theirs.as_fd(), FdFlags::empty()).map_err(|e| failed(OPTION, e.to_string()))?;
    let mut command = Command::new("passt");
    command
        .args(["--foreground", "--quiet", "--ipv4-only", "--fd"])
        .arg(theirs.as_raw_fd().to_string())
        .args(["--address", ADDRESS, "--netmask", MASK, "--gateway", GATEWAY])
        .args(["--dns", NAMES, "--dns-forward", NAMES, "--mtu", &USER_MTU.to_string()])
        .args(["--udp-ports", "none"])
        .args(ports(forwards).iter().flat_map(|ports| ["--tcp-ports", ports]))
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped());
    let mut child = command.spawn().map_err(|error| match error.kind() {
        ErrorKind::NotFound => failed(
            OPTION,
            "needs passt, which is not installed (Debian: apt install passt); --net tap=NAME goes without",
        ),
        _ => failed(OPTION, format!("passt cannot be started: {}", plain(&error))),
    })?;
    drop(theirs);
    let words = Arc::<Mutex<Vec<u8>>>::default();
    let heard = Arc::clone(&words);
    if let Some(stderr) = child.stderr.take() {
        // It says much to a system logger that may not be there, and would wait for a reader.
        start(OPTION, "passt's words", move || hear(stderr, &heard))?;
    }
    let read = ours.try_clone().map_err(|e| failed(OPTION, plain(&e)))?;
    start(OPTION, "network in", move || {
        receive_stream(read, &sender);
        let words = words.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        let said = String::from_utf8_lossy(&words);
        let last = said.lines().rfind(|line| !line.is_empty() && !line.contains("syslog"));
        warn!(
            "--net user: passt has ended, and so has the guest's network{}",
            last.map_or_else(String::new, |line| format!(": {line}"))
        );
    })?;
    let (far, frames) = sync_channel::<Vec<u8>>(WAITING);
    let mut write = ours;
    start(OPTION, "network out", move || {
        for frame in frames {
            let mut bytes = (frame.len() as u32).to_be_bytes().to_vec();
            bytes.extend(frame);
            if write.write_all(&bytes).is_err() {
                return;
            }
        }
    })?;
    // Nobody waits for the child: it ends with the socket, which is this process's end or soon before.
    info!("--net user: the guest is {ADDRESS}, the host {GATEWAY}, names at {NAMES}");
    Ok(far)
}

/// passt's --tcp-ports: one option for each, since an address is for all ports of its option.
fn ports(forwards: &[Forward]) -> Vec<String> {
    if forwards.is_empty() {
        return vec!["none".into()];
    }
    let each = forwards
        .iter()
        .map(|forward| format!("{}/{}:{}", forward.address, forward.host, forward.guest));
    each.collect()
}

/// Keeps the end of what is said.
fn hear(mut from: impl Read, words: &Mutex<Vec<u8>>) {
    let mut bytes = [0; 1024];
    while let Ok(count @ 1..) = from.read(&mut bytes) {
        let mut words = words.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        words.extend(&bytes[..count]);
        let more = words.len().saturating_sub(WORDS);
        words.drain(..more);
    }
}

/// Frames behind their lengths, until the stream ends or is none.
fn receive_stream(mut stream: impl Read, sender: &Sender) {
    let mut buffer = vec![0; 1 << 18];
    let mut have = 0;
    loop {
        match stream.read(&mut buffer[have..]) {
            Ok(0) => return,
            Ok(count) => have += count,
            Err(e) if e.kind() == ErrorKind::Interrupted => continue,
            Err(_) => return,
        }
        let mut at = 0;
        while let Some((head, rest)) = buffer[at..have].split_first_chunk::<4>() {
            let len = u32::from_be_bytes(*head) as usize;
            if len > FRAME_MAX {
                warn!("--net user: a frame of {len} bytes, so what comes is not passt's protocol");
                return;
            }
            let Some(frame) = rest.get(..len) else { break };
            if !sender.send(frame.to_vec()) {
                return;
            }
            at += 4 + len;
        }
        buffer.copy_within(at..have, 0);
        have -= at;
    }
}

fn tap(name: &str, sender: Sender) -> Result<Far, Error> {
    const OPTION: &str = "tap";
    let named = format!("tap={name}");
    // Of this process's own network namespace, which /sys need not show.
    let interfaces = fs::read_to_string("/proc/self/net/dev").map_err(|e| failed(&named, plain(&e)))?;
    let is_there = |line: &str| {
        line.trim_start()
            .strip_prefix(name)
            .is_some_and(|rest| rest.starts_with(':'))
    };
    // A name that nobody has would be made into an interface that goes away with this process.
    if !interfaces.lines().any(is_there) {
        return Err(failed(
            &named,
            format!("there is no such interface; make it with `ip tuntap add dev {name} mode tap user $USER`"),
        ));
    }
    let device = DeviceBuilder::new()
        .name(name)
        .layer(Layer::L2)
        .offload(false)
        .packet_information(false)
        .inherit_enable_state()
        .build_sync()
        .map_err(|e| failed(&named, plain(&e)))?;
    let device = Arc::new(device);
    let read = Arc::clone(&device);
    start(OPTION, "network in", move || receive_tap(&read, &sender))?;
    let (far, frames) = sync_channel::<Vec<u8>>(WAITING);
    start(OPTION, "network out", move || {
        for frame in frames {
            // What the interface refuses is lost, as on any cable.
            let _ = device.send(&frame);
        }
    })?;
    Ok(far)
}

fn receive_tap(device: &SyncDevice, sender: &Sender) {
    let mut frame = vec![0; FRAME_MAX];
    loop {
        match device.recv(&mut frame) {
            Ok(len) => {
                if !sender.send(frame[..len].to_vec()) {
                    return;
                }
            }
            Err(e) if matches!(e.kind(), ErrorKind::Interrupted | ErrorKind::WouldBlock) => {}
            Err(e) => {
                warn!("--net tap: {}; the guest's network has ended", plain(&e));
                return;
            }
        }
    }
}

#[cfg(test)]
#[path = "net_test.rs"]
mod tests;
