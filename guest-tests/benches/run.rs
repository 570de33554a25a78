//! `minivmm run` over QEMU's TCG: the same kernel, first process, root and current directory, of which QEMU's are served by virtiofsd.
//! Medians of alternated runs.
//!
//! `cargo xtask bench --only run`; the figures go to target/bench-run.json too. QEMU's machine is q35, so that its devices are on PCI.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use guest_tests::measure::{Taken, cpu_seconds_of_children, load, middle_taken, rounds, taken};
use guest_tests::{linux, minivmm, program, target};

/// Where Debian's packages have it.
const VIRTIOFSD: [&str; 2] = ["/usr/lib/qemu/virtiofsd", "/usr/libexec/virtiofsd"];
/// The kernel is told of one CPU, see [`SMP`]. On a busy host QEMU's timer comes too late for the kernel's check of it ("IO-APIC + timer doesn't
/// work"), which is left out.
const CMDLINE: &str = "console=ttyS0 quiet panic=-1 cryptomgr.notests possible_cpus=1 no_timer_check";
/// One CPU, and room for a second one that never comes. QEMU up to 8.1 leaves the memory barriers of the guest out of its translations where there can
/// be one CPU alone (`tcg_gen_mb` without CF_PARALLEL, tcg/tcg-op.c), though virtiofsd reads the queues beside it: now and then each then waits for
/// the other's notification for ever, most often where many requests are under way.
const SMP: &str = "1,maxcpus=2";
/// What is run, and what it is called; the number of files is put in at `{}`. Whatever is said on standard error is a failure.
const SUBJECTS: [(&str, &str); 3] = [
    ("true", "true"),
    ("read 100 MB", "cat big >/dev/null"),
    (
        "git status, {} files",
        "git -c safe.directory='*' status --short >/dev/null",
    ),
];
/// Files of the tree, unless virtiofsd may have fewer open.
const FILES: usize = 20_000;
/// And so many fewer than that: folders, git's own files, and what virtiofsd has open besides.
const OTHERS: u64 = 1000;
/// Files of a folder.
const FOLDER: usize = 100;
/// A guest of QEMU's that takes longer hangs.
const QEMU_LIMIT: Duration = Duration::from_secs(600);
/// How long virtiofsd may take to make its socket.
const SOCKET_LIMIT: Duration = Duration::from_secs(20);

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

/// How many files the tree has. virtiofsd has a file open for each that the guest's kernel remembers: with more of them than it may open `git
/// status` is told of EMFILE and does less work.
fn files() -> usize {
    use rustix::process::Resource;
    use rustix::thread::CapabilitySet;
    let may_raise =
        rustix::thread::capabilities(None).is_ok_and(|own| own.effective.contains(CapabilitySet::SYS_RESOURCE));
    let limit = rustix::process::getrlimit(Resource::Nofile).maximum;
    match limit {
        Some(limit) if !may_raise => {
            let most = limit.saturating_sub(OTHERS) as usize / FOLDER * FOLDER;
            most.clamp(FOLDER, FILES)
        }
        _ => FILES,
    }
}

/// The tree that the subjects read.
fn tree(work: &Path, files: usize) -> Result<(), String> {
    let write = |path: PathBuf, bytes: &[u8]| fs::write(&path, bytes).map_err(failed("writing"));
    for number in 0..files {
        let folder = work.join(format!("folder{}", number / FOLDER));
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
        match output.status.success() && output.stderr.is_empty() {
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

/// QEMU's server of directories, wherever its package is.
fn virtiofsd() -> Result<Command, String> {
    let beside = target().join("host/root");
    let unpacked = VIRTIOFSD.map(|path| beside.join(path.trim_start_matches('/')));
    let mut all = VIRTIOFSD.iter().map(PathBuf::from).chain(unpacked);
    let found = all.find(|path| path.is_file());
    let found = found.ok_or("no virtiofsd: Debian's package qemu-system-common has it")?;
    let mut command = Command::new(&found);
    if found.starts_with(&beside) {
        let libraries = ["usr/lib", "lib"].map(|folder| beside.join(folder).join("x86_64-linux-gnu"));
        command.env(
            "LD_LIBRARY_PATH",
            std::env::join_paths(libraries).map_err(failed("a path"))?,
        );
    }
    Ok(command)
}

/// Serves a directory; the socket is there when this returns.
fn serve(folder: &Path, tag: &str, place: &Path) -> Result<Server, String> {
    let socket = folder.join(format!("{tag}.sock"));
    let _ = fs::remove_file(&socket);
    let messages = fs::File::create(folder.join(format!("{tag}.log"))).map_err(failed("a log of virtiofsd"))?;
    let mut server = virtiofsd()?;
    server.arg(format!("--socket-path={}", socket.display()));
    server.args(["-o", &format!("source={}", place.display()), "-o", "sandbox=chroot"]);
    let server = server.stdin(Stdio::null()).stdout(Stdio::null()).stderr(messages);
    let mut server = Server(server.spawn().map_err(failed("virtiofsd"))?);
    let start = Instant::now();
    while !socket.exists() {
        let ended = server.0.try_wait().map_err(failed("virtiofsd"))?;
        if start.elapsed() > SOCKET_LIMIT || ended.is_some() {
            return Err(format!("virtiofsd makes no socket for {tag}: {}", log(folder, tag)));
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    Ok(server)
}

/// The last that the server of a directory, or the guest, has said.
fn log(folder: &Path, name: &str) -> String {
    let bytes = fs::read(folder.join(format!("{name}.log"))).unwrap_or_default();
    let text = String::from_utf8_lossy(&bytes).into_owned();
    let last: Vec<&str> = text.lines().rev().take(3).map(str::trim).collect();
    match last.is_empty() {
        true => "it says nothing".into(),
        false => last.into_iter().rev().collect::<Vec<_>>().join(" | "),
    }
}

fn qemu(folder: &Path, work: &Path, initrd: &Path) -> Result<Taken, String> {
    let channel = folder.join("channel");
    fs::create_dir_all(&channel).map_err(failed("making a folder"))?;
    for file in ["stdout", "stderr", "status", "want", "failed"] {
        fs::write(channel.join(file), "").map_err(failed("writing"))?;
    }
    let used = cpu_seconds_of_children();
    let mut command = program("qemu-system-x86_64");
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
        .args(["-smp", SMP])
        .args(["-object", "memory-backend-memfd,id=mem,size=1G,share=on"])
        .args([
            "-nodefaults",
            "-no-user-config",
            "-no-reboot",
            "-display",
            "none",
            "-serial",
        ])
        .arg(format!("file:{}", folder.join("guest.log").display()))
        .arg("-kernel")
        .arg(&linux().kernel)
        .arg("-initrd")
        .arg(initrd)
        .args(["-append", CMDLINE]);
    let places = [
        ("minivmm-command", channel.as_path()),
        ("root", Path::new("/")),
        ("share0", work),
    ];
    let mut servers = Vec::new();
    for (tag, place) in places {
        servers.push(serve(folder, tag, place)?);
        let socket = folder.join(format!("{tag}.sock"));
        command.args(["-chardev", &format!("socket,id={tag},path={}", socket.display())]);
        command.args(["-device", &format!("vhost-user-fs-pci,chardev={tag},tag={tag}")]);
    }
    // What serves files is running already where a user has QEMU.
    let start = Instant::now();
    let mut machine = Server(
        command
            .stdin(Stdio::null())
            .spawn()
            .map_err(failed("qemu-system-x86_64"))?,
    );
    let status = loop {
        if let Some(status) = machine.0.try_wait().map_err(failed("qemu-system-x86_64"))? {
            break status;
        }
        if start.elapsed() > QEMU_LIMIT {
            return Err(hung(folder, &places.map(|(tag, _)| tag), &mut servers));
        }
        std::thread::sleep(Duration::from_millis(2));
    };
    let wall = start.elapsed().as_secs_f64();
    // What serves files counts once it has been waited for.
    drop(servers);
    let cpu = cpu_seconds_of_children() - used;
    let read = |file| fs::read_to_string(channel.join(file)).map_err(failed("reading"));
    let (said, errors) = (read("status")?, read("stderr")?);
    match status.success() && said == "0" && errors.is_empty() {
        true => Ok(Taken { wall, cpu }),
        false => Err(format!(
            "QEMU has ended with {status}, and the command with {said:?} and {:?}; the guest: {}",
            errors.lines().next().unwrap_or_default(),
            log(folder, "guest")
        )),
    }
}

/// Why a guest of QEMU's does not end, as far as it can be seen from outside.
fn hung(folder: &Path, tags: &[&str], servers: &mut [Server]) -> String {
    let mut text = format!(
        "QEMU's guest has not ended within {} s; the guest: {}",
        QEMU_LIMIT.as_secs(),
        log(folder, "guest")
    );
    for (tag, server) in tags.iter().zip(servers) {
        let state = match server.0.try_wait() {
            Ok(Some(status)) => format!("ended with {status}"),
            Ok(None) => "runs".into(),
            Err(error) => error.to_string(),
        };
        text += &format!("; virtiofsd of {tag} {state}: {}", log(folder, tag));
    }
    text
}

fn measure(rounds: usize) -> Result<(), String> {
    let folder = std::env::temp_dir().join(format!("minivmm-bench-run-{}", std::process::id()));
    let folder = Folder(folder);
    let work = folder.0.join("work");
    fs::create_dir_all(&work).map_err(failed("making a folder"))?;
    let files = files();
    tree(&work, files)?;
    if files < FILES {
        println!("{files} files instead of {FILES}: virtiofsd may not have more open (ulimit -Hn)\n");
    }
    println!("a command in a guest, {rounds} rounds each, load {:.1}\n", load());
    println!(
        "{:<28}{:>10} {:>11} {:>7} {:>10} {:>11} {:>7}",
        "", "qemu tcg", "minivmm run", "ratio", "qemu CPU", "minivmm CPU", "ratio"
    );
    let mut json = Vec::new();
    for (name, script) in SUBJECTS {
        let name = name.replace("{}", &files.to_string());
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
