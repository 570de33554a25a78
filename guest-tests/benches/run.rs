//! `minivmm run` over QEMU's TCG: the same kernel, first process, root and current directory, of which QEMU's are served by virtiofsd.
//! Medians of alternated runs.
//!
//! `cargo xtask bench --only run`; the figures go to target/bench-run.json too. QEMU's machine is q35, so that its devices are on PCI.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use guest_tests::measure::{Taken, cpu_seconds_of_children, load, middle_taken, rounds, taken};
use guest_tests::{linux, minivmm, target};

/// Where Debian's packages have it.
const VIRTIOFSD: [&str; 2] = ["/usr/lib/qemu/virtiofsd", "/usr/libexec/virtiofsd"];
const CMDLINE: &str = "console=ttyS0 quiet panic=-1 cryptomgr.notests";
/// What is run, and what it is called.
const SUBJECTS: [(&str, &str); 3] = [
    ("true", "true"),
    ("read 100 MB", "cat big >/dev/null"),
    (
        "git status, 20000 files",
        "git -c safe.directory='*' status --short >/dev/null",
    ),
];
const FILES: usize = 20_000;

fn main() -> ExitCode {
    match rounds(5).and_then(measure) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("bench: {error}");
            ExitCode::FAILURE
        }
    }
}

/// A folder with something to read, removed at the end.
struct Folder(PathBuf);

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
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

fn failed<E: std::fmt::Display>(what: &str) -> impl Fn(E) -> String + '_ {
    move |error| format!("{what}: {error}")
}

fn git(work: &Path, arguments: &[&str]) -> Result<(), String> {
    let mut command = Command::new("git");
    command.args(["-c", "user.name=bench", "-c", "user.email=bench@example.org"]);
    let output = command
        .args(arguments)
        .current_dir(work)
        .output()
        .map_err(failed("git"))?;
    match output.status.success() {
        true => Ok(()),
        false => Err(format!("git: {}", String::from_utf8_lossy(&output.stderr))),
    }
}

/// The tree that the subjects read.
fn tree(work: &Path) -> Result<(), String> {
    let write = |path: PathBuf, bytes: &[u8]| fs::write(&path, bytes).map_err(failed("writing"));
    for number in 0..FILES {
        let folder = work.join(format!("folder{}", number / 100));
        fs::create_dir_all(&folder).map_err(failed("making a folder"))?;
        write(folder.join(format!("file{number}")), format!("{number}\n").as_bytes())?;
    }
    write(work.join(".gitignore"), b"big\n")?;
    git(work, &["init", "-q"])?;
    git(work, &["add", "."])?;
    git(work, &["commit", "-qm", "all"])?;
    write(work.join("big"), &vec![7; 100_000_000])
}

fn run(work: &Path, options: &[&str], script: &str) -> Result<Taken, String> {
    let mut command = Command::new(minivmm());
    command
        .args(["run", "--engine", "soft", "--kernel"])
        .arg(&linux().kernel);
    command.args(options).args(["--", "sh", "-c", script]).current_dir(work);
    taken(|| {
        let output = command.stdin(Stdio::null()).output().map_err(failed("minivmm"))?;
        match output.status.success() {
            true => Ok(()),
            false => Err(format!("minivmm: {}", String::from_utf8_lossy(&output.stderr))),
        }
    })
}

/// The same initial RAM disk. QEMU's machine has a serial port and no port of a console.
fn initrd(folder: &Path, work: &Path, script: &str) -> Result<PathBuf, String> {
    let session = folder.join("session");
    let text = session.display().to_string();
    run(work, &["--console", "serial", "--record", &text], script)?;
    let path = folder.join("initrd");
    fs::copy(session.join("initrd"), &path).map_err(failed("reading the session"))?;
    fs::remove_dir_all(&session).map_err(failed("removing the session"))?;
    Ok(path)
}

fn qemu(folder: &Path, work: &Path, initrd: &Path) -> Result<Taken, String> {
    let virtiofsd = VIRTIOFSD.iter().find(|path| Path::new(path).is_file());
    let virtiofsd = virtiofsd.ok_or("no virtiofsd: Debian's package qemu-system-common has it")?;
    let channel = folder.join("channel");
    fs::create_dir_all(&channel).map_err(failed("making a folder"))?;
    for file in ["stdout", "stderr", "status", "want", "failed"] {
        fs::write(channel.join(file), "").map_err(failed("writing"))?;
    }
    let (start, used) = (Instant::now(), cpu_seconds_of_children());
    let mut command = Command::new("qemu-system-x86_64");
    command
        .args([
            "-M",
            "q35,memory-backend=mem",
            "-accel",
            "tcg",
            "-cpu",
            "max",
            "-m",
            "1G",
        ])
        .args(["-object", "memory-backend-memfd,id=mem,size=1G,share=on"])
        .args([
            "-nodefaults",
            "-no-user-config",
            "-no-reboot",
            "-display",
            "none",
            "-serial",
            "null",
        ])
        .arg("-kernel")
        .arg(&linux().kernel)
        .arg("-initrd")
        .arg(initrd)
        .args(["-append", CMDLINE]);
    let mut servers = Vec::new();
    for (tag, place) in [
        ("minivmm-command", channel.as_path()),
        ("root", Path::new("/")),
        ("share0", work),
    ] {
        let socket = folder.join(format!("{tag}.sock"));
        let _ = fs::remove_file(&socket);
        let source = format!("source={}", place.display());
        let mut server = Command::new(virtiofsd);
        server.arg(format!("--socket-path={}", socket.display()));
        server.args(["-o", &source, "-o", "sandbox=chroot"]);
        let server = server
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn();
        servers.push(Server(server.map_err(failed("virtiofsd"))?));
        while !socket.exists() {
            if start.elapsed() > Duration::from_secs(20) {
                return Err("virtiofsd makes no socket".into());
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        command.args(["-chardev", &format!("socket,id={tag},path={}", socket.display())]);
        command.args(["-device", &format!("vhost-user-fs-pci,chardev={tag},tag={tag}")]);
    }
    // What serves files is running already where a user has QEMU.
    let start = Instant::now();
    let status = command
        .stdin(Stdio::null())
        .status()
        .map_err(failed("qemu-system-x86_64"))?;
    let wall = start.elapsed().as_secs_f64();
    // What serves files counts once it has been waited for.
    drop(servers);
    let cpu = cpu_seconds_of_children() - used;
    let said = fs::read_to_string(channel.join("status")).map_err(failed("reading"))?;
    match status.success() && said == "0" {
        true => Ok(Taken { wall, cpu }),
        false => Err(format!("QEMU has ended with {status}, and the command with {said:?}")),
    }
}

fn measure(rounds: usize) -> Result<(), String> {
    let folder = std::env::temp_dir().join(format!("minivmm-bench-run-{}", std::process::id()));
    let folder = Folder(folder);
    let work = folder.0.join("work");
    fs::create_dir_all(&work).map_err(failed("making a folder"))?;
    tree(&work)?;
    println!("a command in a guest, {rounds} rounds each, load {:.1}\n", load());
    println!(
        "{:<28}{:>10} {:>11} {:>7} {:>10} {:>11} {:>7}",
        "", "qemu tcg", "minivmm run", "ratio", "qemu CPU", "minivmm CPU", "ratio"
    );
    let mut json = Vec::new();
    for (name, script) in SUBJECTS {
        let initrd = initrd(&folder.0, &work, script)?;
        let (mut theirs, mut ours) = (Vec::new(), Vec::new());
        for _ in 0..rounds {
            theirs.push(qemu(&folder.0, &work, &initrd)?);
            ours.push(run(&work, &[], script)?);
        }
        let (theirs, ours) = (middle_taken(&theirs), middle_taken(&ours));
        let (wall, cpu) = (ours.wall / theirs.wall, ours.cpu / theirs.cpu);
        println!(
            "{name:<28}{:>9.2}s {:>10.2}s {wall:>7.2} {:>9.2}s {:>10.2}s {cpu:>7.2}",
            theirs.wall, ours.wall, theirs.cpu, ours.cpu
        );
        json.push(format!(
            "\"{name}\": {{\"qemu\": {:.3}, \"minivmm\": {:.3}, \"ratio\": {wall:.3}, \"qemu_cpu\": {:.3}, \"minivmm_cpu\": {:.3},              \"ratio_cpu\": {cpu:.3}}}",
            theirs.wall, ours.wall, theirs.cpu, ours.cpu
        ));
    }
    let path = target().join("bench-run.json");
    let text = format!("{{\n  \"rounds\": {rounds},\n  {}\n}}\n", json.join(",\n  "));
    fs::write(&path, text).map_err(|error| format!("cannot write {}: {error}", path.display()))?;
    println!("\nwritten to {}", path.display());
    Ok(())
}
