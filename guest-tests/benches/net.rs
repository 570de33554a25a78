//! The guest's network against QEMU's, both with passt and software CPUs: 64 MiB in each direction, and fifty connections of one small
//! request each. What goes out of the guest is fetched by the host, through a forwarded port.
//!
//! `cargo xtask bench --only net [--rounds N]`. Times are of the wall between the lines that the guest prints before and behind each part, or of the host's fetching: a
//! network waits for both of its ends. Beside them are the seconds of CPUs that the process with the guest has used meanwhile, which
//! tell on a busy host. There QEMU's timer comes too late for the kernel's check of it, which is left out. QEMU's CPU is `max`, ours the model `skylake-server`.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::net::UnixStream;
use std::process::{Child, Command, ExitCode, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use guest_tests::measure::{Taken, load, middle_taken, rounds};
use guest_tests::{Running, in_minivmm, in_qemu, linux, start};
use rustix::io::{FdFlags, fcntl_setfd};

const LIMIT: Duration = Duration::from_secs(600);
const LARGE: usize = 64 << 20;
const PARTS: [&str; 3] = ["down", "trips", "up"];

fn main() -> ExitCode {
    match rounds(5).and_then(measure) {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => {
            eprintln!("bench: {message}");
            ExitCode::FAILURE
        }
    }
}

/// A port of this host at which files are served.
fn serve() -> u16 {
    let files = TcpListener::bind("127.0.0.1:0").expect("a port");
    let port = files.local_addr().expect("its number").port();
    thread::spawn(move || {
        for stream in files.incoming() {
            let Ok(mut stream) = stream else { continue };
            let mut request = [0; 4096];
            let count = stream.read(&mut request).unwrap_or(0);
            let large = request[..count].starts_with(b"GET /large");
            let body = vec![0x5a; if large { LARGE } else { 100 }];
            let _ = write!(stream, "HTTP/1.0 200 OK\r\nContent-Length: {}\r\n\r\n", body.len());
            let _ = stream.write_all(&body);
        }
    });
    port
}

/// Fetches what the guest serves, through a port of this host.
fn fetch(port: u16) -> Result<(), String> {
    let mut fetched = Vec::new();
    let stream = TcpStream::connect(("127.0.0.1", port));
    let done = stream.and_then(|mut stream| {
        stream.set_read_timeout(Some(LIMIT))?;
        stream.write_all(b"GET /large HTTP/1.0\r\n\r\n")?;
        stream.read_to_end(&mut fetched)
    });
    match done {
        Ok(len) if len > LARGE => Ok(()),
        Ok(len) => Err(format!("the guest sends {len} bytes")),
        Err(error) => Err(format!("the guest's port: {error}")),
    }
}

/// A part that has begun.
struct Part {
    begun: Instant,
    used: f64,
}

impl Part {
    fn begin(running: &Running) -> Self {
        Part {
            begun: Instant::now(),
            used: running.cpu_seconds(),
        }
    }

    fn end(self, running: &Running) -> Taken {
        Taken {
            wall: self.begun.elapsed().as_secs_f64(),
            cpu: running.cpu_seconds() - self.used,
        }
    }
}

/// What each part takes; `forward` leads to the guest.
fn times(command: &mut Command, forward: u16) -> Result<Vec<Taken>, String> {
    let mut running = start(command, LIMIT);
    let mut times = Vec::new();
    for name in &PARTS[..2] {
        if running.wait_for(&format!("net: {name} begins")).is_some() {
            let part = Part::begin(&running);
            if running.wait_for(&format!("net: {name} ended")).is_some() {
                times.push(part.end(&running));
                continue;
            }
        }
        let outcome = running.finish();
        return Err(format!("no end of {name}:\n{}{}", outcome.console, outcome.errors));
    }
    if running.wait_for("net: serves").is_none() {
        return Err(format!("the guest serves nothing:\n{}", running.console()));
    }
    let part = Part::begin(&running);
    fetch(forward).map_err(|error| format!("{error}\n{}", running.console()))?;
    times.push(part.end(&running));
    running.kill();
    Ok(times)
}

/// A process that ends with this.
struct Server(Child);

impl Drop for Server {
    fn drop(&mut self) {
        // It may have ended with its only client.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Two ends of a cable, which programs inherit. passt gives up root before it makes a socket, and then cannot make one just anywhere.
fn cable() -> Result<(UnixStream, UnixStream), String> {
    let failed = |e: std::io::Error| format!("a pair of sockets: {e}");
    let (one, other) = UnixStream::pair().map_err(failed)?;
    for end in [&one, &other] {
        fcntl_setfd(end.as_fd(), FdFlags::empty()).map_err(|e| failed(e.into()))?;
    }
    Ok((one, other))
}

fn minivmm(cmdline: &str, forward: u16) -> Result<Vec<Taken>, String> {
    let net = format!("user,forward={forward}:8080");
    let mut command = in_minivmm(&linux().kernel);
    command.args(["--cpu-model", "skylake-server", "--bus", "pci", "--net", &net]);
    command.args(["--cmdline", cmdline, "--initrd"]).arg(&linux().initrd);
    times(&mut command, forward)
}

fn qemu(cmdline: &str, forward: u16) -> Result<Vec<Taken>, String> {
    let (ours, theirs) = cable()?;
    let mut passt = Command::new("passt");
    passt.args(["--foreground", "--quiet", "--ipv4-only", "--fd"]);
    passt.arg(theirs.as_raw_fd().to_string());
    passt.args([
        "--address",
        "10.0.2.15",
        "--netmask",
        "255.255.255.0",
        "--gateway",
        "10.0.2.2",
        "--udp-ports",
        "none",
        "--tcp-ports",
        &format!("127.0.0.1/{forward}:8080"),
    ]);
    let passt = passt.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    let _passt = Server(passt.spawn().map_err(|e| format!("passt: {e}"))?);
    drop(theirs);
    let mut command = in_qemu(&linux().kernel);
    let end = format!("stream,id=n,server=off,addr.type=fd,addr.str={}", ours.as_raw_fd());
    command.args([
        "-netdev",
        &end,
        "-device",
        "virtio-net-pci,netdev=n,host_mtu=65520,romfile=",
    ]);
    command.args(["-append", cmdline, "-initrd"]).arg(&linux().initrd);
    times(&mut command, forward)
}

fn measure(rounds: usize) -> Result<(), String> {
    let port = serve();
    let cmdline = format!("console=ttyS0 panic=-1 quiet no_timer_check minivmm.script=net minivmm.port={port}");
    let forward = TcpListener::bind("127.0.0.1:0")
        .and_then(|listener| listener.local_addr())
        .map_err(|e| format!("a port: {e}"))?
        .port();
    let (mut ours, mut theirs) = (Vec::new(), Vec::new());
    for round in 1..=rounds {
        eprintln!("round {round} of {rounds}");
        ours.push(minivmm(&cmdline, forward)?);
        theirs.push(qemu(&cmdline, forward)?);
    }
    println!("{rounds} rounds, load {:.1}", load());
    println!(
        "{:8} {:>10} {:>10} {:>7} {:>12} {:>10} {:>7}",
        "part", "minivmm", "QEMU", "ratio", "minivmm CPU", "QEMU CPU", "ratio"
    );
    for (index, part) in PARTS.iter().enumerate() {
        let of = |times: &[Vec<Taken>]| middle_taken(&times.iter().map(|times| times[index]).collect::<Vec<_>>());
        let (ours, theirs) = (of(&ours), of(&theirs));
        println!(
            "{part:8} {:9.3}s {:9.3}s {:7.2} {:11.2}s {:9.2}s {:7.2}",
            ours.wall,
            theirs.wall,
            ours.wall / theirs.wall,
            ours.cpu,
            theirs.cpu,
            ours.cpu / theirs.cpu
        );
    }
    Ok(())
}
