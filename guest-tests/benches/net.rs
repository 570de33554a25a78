//! The guest's network against QEMU's, both with passt and software CPUs: 64 MiB in each direction, and fifty connections of one small
//! request each.
//!
//! `cargo xtask bench --only net [--rounds N]`. Times are of the wall between the lines that the guest prints before and behind each part: a
//! network waits for both of its ends. QEMU's CPU is `max`, ours the model `skylake-server`.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener};
use std::os::unix::fs::FileTypeExt;
use std::process::{Command, ExitCode, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use guest_tests::measure::{middle, rounds};
use guest_tests::{Folder, in_minivmm, in_qemu, linux, start};

const LIMIT: Duration = Duration::from_secs(600);
const LARGE: usize = 64 << 20;
const PARTS: [&str; 3] = ["down", "up", "trips"];

fn main() -> ExitCode {
    match rounds(5).and_then(measure) {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => {
            eprintln!("bench: {message}");
            ExitCode::FAILURE
        }
    }
}

/// Two ports, one behind the other: of files, and of what takes bytes and says how many they were.
fn serve() -> u16 {
    let (files, sink) = loop {
        let files = TcpListener::bind("127.0.0.1:0").expect("a port");
        let port = files.local_addr().expect("its number").port();
        if let Some(Ok(sink)) = port.checked_add(1).map(|port| TcpListener::bind(("127.0.0.1", port))) {
            break (files, sink);
        }
    };
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
    thread::spawn(move || {
        for stream in sink.incoming() {
            let Ok(mut stream) = stream else { continue };
            let (mut bytes, mut count) = (vec![0; 1 << 20], 0);
            // nc does not say where what it sends ends.
            while count < LARGE {
                match stream.read(&mut bytes) {
                    Ok(some @ 1..) => count += some,
                    _ => break,
                }
            }
            let _ = write!(stream, "{count}");
            let _ = stream.shutdown(Shutdown::Both);
        }
    });
    port
}

/// Seconds that each part takes.
fn seconds(command: &mut Command) -> Result<Vec<f64>, String> {
    let mut running = start(command, LIMIT);
    let mut times = Vec::new();
    for part in PARTS {
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
    running.kill();
    Ok(times)
}

fn measure(rounds: usize) -> Result<(), String> {
    let port = serve();
    let cmdline = format!("console=ttyS0 panic=-1 quiet minivmm.script=net minivmm.port={port}");
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
                "user",
                "--initrd",
            ])
            .arg(&linux().initrd)
            .args(["--cmdline", &cmdline]);
        ours.push(seconds(&mut command)?);
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
        let measured = seconds(&mut command);
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
