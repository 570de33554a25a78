//! Whole boots against QEMU's software CPU: Debian's cloud kernel to its `/init` with nothing on and with `--trace`, Debian's kernel for
//! 32-bit CPUs on a Core 2 to the same, and a Debian with systemd from a disk to its login.
//!
//! `cargo xtask bench --only boots [--rounds N]`; the figures go to target/bench-boots.json too. Times are of CPUs, user and system
//! together, from the start of the process to the line. The disk image is made by debootstrap once; without it, or without the kernel, the
//! row says so and has no figure.

use std::fs;
use std::path::PathBuf;
use std::process::{Command, ExitCode};
use std::time::Duration;

use guest_tests::measure::{middle, rounds};
use guest_tests::{Folder, INIT_MARKER, in_minivmm, in_qemu, linux, root, start, target};

const LIMIT: Duration = Duration::from_secs(900);
const CMDLINE: &str = "console=ttyS0 panic=-1 minivmm.script=nothing";
const LOGIN: &str = "console=ttyS0 panic=-1 root=/dev/vda rw";

/// What is booted, in whom.
struct Boot {
    name: &'static str,
    until: &'static str,
    minivmm: Box<dyn Fn() -> Command>,
    qemu: Box<dyn Fn() -> Command>,
}

fn main() -> ExitCode {
    match rounds(5).and_then(measure) {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => {
            eprintln!("bench: {message}");
            ExitCode::FAILURE
        }
    }
}

/// Debian's cloud kernel in QEMU.
fn cloud_in_qemu() -> Command {
    let mut command = in_qemu(&linux().kernel);
    command.arg("-initrd").arg(&linux().initrd).args(["-append", CMDLINE]);
    command
}

/// The same here, with more options.
fn cloud(options: &[&str]) -> Command {
    let mut command = in_minivmm(&linux().kernel);
    command
        .args(["-m", "512M", "--cpu-model", "sapphirerapids", "--initrd"])
        .arg(&linux().initrd)
        .args(["--cmdline", CMDLINE])
        .args(options);
    command
}

/// The newest kernel for 32-bit CPUs that has been fetched, with its initial RAM disk: the usual one, and behind it a busybox for it.
fn pae() -> Result<(PathBuf, PathBuf), String> {
    let folder = target().join("guest/kernels");
    let files = fs::read_dir(&folder).into_iter().flatten().flatten();
    let mut kernels: Vec<PathBuf> = files
        .map(|file| file.path())
        .filter(|path| path.to_string_lossy().ends_with("-686-pae") && path.is_file())
        .collect();
    kernels.sort();
    let kernel = kernels
        .pop()
        .ok_or("no kernel for 32-bit CPUs: `cargo xtask guest --all-kernels`")?;
    let whole = target().join("bench-686-pae.cpio");
    let mut archive = fs::read(&linux().initrd).map_err(|error| error.to_string())?;
    archive.resize(archive.len().next_multiple_of(4), 0);
    archive.extend(fs::read(folder.join("busybox-i386.cpio")).map_err(|error| error.to_string())?);
    fs::write(&whole, archive).map_err(|error| error.to_string())?;
    Ok((kernel, whole))
}

/// A folder with a Debian's disk, kernel and initial RAM disk.
fn debian() -> Result<PathBuf, String> {
    let folder = target().join("bench-debian");
    if !folder.join("disk.qcow2").is_file() {
        fs::create_dir_all(&folder).map_err(|error| error.to_string())?;
        eprintln!("a Debian is installed in {}", folder.display());
        let script = root().join("guest-tests/linux/debian-image");
        let made = Command::new("sh").arg(script).current_dir(&folder).output();
        let made = made.map_err(|error| error.to_string())?;
        if !made.status.success() {
            let _ = fs::remove_dir_all(&folder);
            return Err(String::from_utf8_lossy(&made.stdout).trim().to_string());
        }
    }
    Ok(folder)
}

fn boots(traces: &Folder) -> Vec<Result<Boot, (&'static str, String)>> {
    let trace = traces.join("trace");
    let traced = move || {
        let _ = fs::remove_dir_all(&trace);
        cloud(&["--trace", &trace.to_string_lossy()])
    };
    let mut boots = vec![
        Ok(Boot {
            name: "cloud",
            until: INIT_MARKER,
            minivmm: Box::new(|| cloud(&[])),
            qemu: Box::new(cloud_in_qemu),
        }),
        Ok(Boot {
            name: "cloud, --trace",
            until: INIT_MARKER,
            minivmm: Box::new(traced),
            qemu: Box::new(cloud_in_qemu),
        }),
    ];
    let name = "686-pae on core2";
    boots.push(pae().map_err(|why| (name, why)).map(|(kernel, initrd)| {
        let (ours, their_initrd) = (kernel.clone(), initrd.clone());
        Boot {
            name,
            until: INIT_MARKER,
            minivmm: Box::new(move || {
                let mut command = in_minivmm(&ours);
                command
                    .args(["-m", "512M", "--cpu-model", "core2", "--initrd"])
                    .arg(&initrd);
                command.args(["--cmdline", CMDLINE]);
                command
            }),
            qemu: Box::new(move || {
                let mut command = in_qemu(&kernel);
                command.arg("-initrd").arg(&their_initrd).args(["-append", CMDLINE]);
                command
            }),
        }
    }));
    let name = "systemd, disk";
    boots.push(debian().map_err(|why| (name, why)).map(|folder| {
        let here = folder.clone();
        Boot {
            name,
            until: "debian login:",
            minivmm: Box::new(move || {
                let mut command = in_minivmm("vmlinuz");
                command.args(["-m", "1G", "--cpu-model", "skylake-server", "--bus", "pci"]);
                command.args(["--initrd", "initrd", "--disk", "disk.qcow2,overlay,format=qcow2"]);
                command.args(["--cmdline", LOGIN]).current_dir(&folder);
                command
            }),
            qemu: Box::new(move || {
                let mut command = in_qemu("vmlinuz");
                command.args(["-m", "1024", "-initrd", "initrd", "-append", LOGIN]);
                command.args(["-drive", "file=disk.qcow2,format=qcow2,if=virtio,snapshot=on"]);
                command.current_dir(&here);
                command
            }),
        }
    }));
    boots
}

/// Seconds of CPUs until the line is there, and the most memory that the process had.
fn seconds(mut command: Command, until: &str) -> Result<(f64, u64), String> {
    let mut running = start(&mut command, LIMIT);
    if running.wait_for(until).is_none() {
        let outcome = running.finish();
        return Err(format!("no line \"{until}\":\n{}{}", outcome.console, outcome.errors));
    }
    let taken = (running.cpu_seconds(), running.peak_memory().unwrap_or(0));
    running.kill();
    Ok(taken)
}

fn measure(rounds: usize) -> Result<(), String> {
    let traces = Folder::new("bench-boots");
    println!("whole boots, medians of {rounds}, seconds of CPUs");
    println!(
        "  {:<16}  {:>8}  {:>8}  {:>5}  {:>8}",
        "", "minivmm", "QEMU TCG", "ratio", "peak MiB"
    );
    let mut json = Vec::new();
    for boot in boots(&traces) {
        let boot = match boot {
            Ok(boot) => boot,
            Err((name, why)) => {
                println!("  {name:<16}  not measured: {why}");
                continue;
            }
        };
        let (mut ours, mut theirs, mut peak) = (Vec::new(), Vec::new(), 0);
        for round in 1..=rounds {
            eprintln!("{}: round {round} of {rounds}", boot.name);
            let (time, memory) = seconds((boot.minivmm)(), boot.until)?;
            ours.push(time);
            peak = peak.max(memory >> 20);
            theirs.push(seconds((boot.qemu)(), boot.until)?.0);
        }
        let [ours, theirs] = [ours, theirs].map(middle);
        println!(
            "  {:<16}  {ours:>8.2}  {theirs:>8.2}  {:>5.2}  {peak:>8}",
            boot.name,
            ours / theirs
        );
        json.push(format!(
            "\"{}\": {{\"minivmm_s\": {ours:.2}, \"qemu_s\": {theirs:.2}, \"peak_mib\": {peak}}}",
            boot.name
        ));
    }
    let path = target().join("bench-boots.json");
    let json = format!("{{\"rounds\": {rounds}, {}}}\n", json.join(", "));
    fs::write(&path, json).map_err(|error| format!("cannot write {}: {error}", path.display()))
}
