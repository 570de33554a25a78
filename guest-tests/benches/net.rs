//! The guest's network against QEMU's, both with passt and software CPUs: 64 MiB in each direction, and fifty connections of one small
//! request each. What goes out of the guest is fetched by the host, through a forwarded port.
//!
//! `cargo xtask bench --only net [--rounds N]`. Times are of the wall between the lines that the guest prints before and behind each part, or of the host's fetching: a
//! network waits for both of its ends. QEMU's CPU is `max`, ours the model `skylake-server`.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::FileTypeExt;
use std::process::{Command, ExitCode, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use guest_tests::measure::{middle, rounds};
use guest_tests::{Folder, in_minivmm, in_qemu, linux, start};

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
        stream.write_all(b"GET /large HTTP/1.0\r\n\r\n")?;
        stream.read_to_end(&mut fetched)
    });
    match done {
        Ok(len) if len > LARGE => Ok(()),
        Ok(len) => Err(format!("the guest sends {len} bytes")),
        Err(error) => Err(format!("the guest's port: {error}")),
    }
}

/// Seconds that each part takes; `forward` leads to the guest.
fn seconds(command: &mut Command, forward: u16) -> Result<Vec<f64>, String> {
    let mut running = start(command, LIMIT);
    let mut times = Vec::new();
    for part in &PARTS[..2] {
        let begun = running.wait_for(&format!("net: {part} begins")).map(|_| Instant::now());
        let ended = running.wait_for(&format!("net: {part} ended"));
        match (begun, ended) {
            (Some(begun), Some(_)) => times.push(begun.elapsed().as_secs_f64()),
            _ => {
                let outcome = running.finish();
                return Err(format!("no end of {part}:\n{}{}", outcome.console, outcome.errors));
            }
        }
    }
    if running.wait_for("net: serves").is_none() {
        return Err(format!("the guest serves nothing:\n{}", running.console()));
    }
    let begun = Instant::now();
    fetch(forward)?;
    times.push(begun.elapsed().as_secs_f64());
    running.kill();
    Ok(times)
}

fn measure(rounds: usize) -> Result<(), String> {
    let port = serve();
    let cmdline = format!("console=ttyS0 panic=-1 quiet minivmm.script=net minivmm.port={port}");
    let forward = TcpListener::bind("127.0.0.1:0")
        .and_then(|listener| listener.local_addr())
        .map_err(|e| format!("a port: {e}"))?
        .port();
    let net = format!("user,forward={forward}:8080");
    let (mut ours, mut theirs) = (Vec::new(), Vec::new());
    for round in 1..=rounds {
        eprintln!("round {round} of {rounds}");
        let mut command = in_minivmm(&linux().kernel);
        command
            .args([
                "--cpu-model",
                "skylake-server",
                "--bus",
                "pci",
                "--net",
                &net,
                "--initrd",
            ])
            .arg(&linux().initrd)
            .args(["--cmdline", &cmdline]);
        ours.push(seconds(&mut command, forward)?);
        let folder = Folder::new("bench-net");
        let socket = folder.join("passt");
        let mut passt = Command::new("passt")
            .args(["--foreground", "--quiet", "--one-off", "--ipv4-only", "--socket"])
            .arg(&socket)
            .args([
                "--address",
                "10.0.2.15",
                "--netmask",
                "255.255.255.0",
                "--gateway",
                "10.0.2.2",
            ])
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .map_err(|e| format!("passt: {e}"))?;
        while !socket.metadata().is_ok_and(|it| it.file_type().is_socket()) {
            thread::sleep(Duration::from_millis(10));
        }
        let mut command = in_qemu(&linux().kernel);
        let end = format!("stream,id=n,server=off,addr.type=unix,addr.path={}", socket.display());
        command
            .args([
                "-netdev",
                &end,
                "-device",
                "virtio-net-pci,netdev=n,host_mtu=65520",
                "-initrd",
            ])
            .arg(&linux().initrd)
            .args(["-append", &cmdline]);
        let measured = seconds(&mut command, forward);
        let _ = passt.kill();
        let _ = passt.wait();
        theirs.push(measured?);
    }
    println!("{:8} {:>10} {:>10} {:>7}", "part", "minivmm", "QEMU", "ratio");
    for (index, part) in PARTS.iter().enumerate() {
        let of = |times: &[Vec<f64>]| middle(times.iter().map(|times| times[index]).collect());
        let (ours, theirs) = (of(&ours), of(&theirs));
        println!("{part:8} {ours:9.3}s {theirs:9.3}s {:7.2}", ours / theirs);
    }
    Ok(())
}
