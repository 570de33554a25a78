//! Host side of the guest tests: boots a guest in minivmm, or in QEMU for comparison, and hands back what it said.
//!
//! Guests run in a process of their own, as a user would run them. `MINIVMM` names the build of minivmm, or else it
//! is the one with which the tests are built. The Linux guest is what `cargo xtask guest` makes; it is made here where it is missing.

use std::fs;
use std::io::{Read, Write};
use std::ops::Deref;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

pub mod bare;
pub mod flat;
pub mod fuzz;
pub mod gdb;
pub mod lab;
pub mod lockstep;
pub mod measure;
pub mod observer;
pub mod points;
pub mod raw;
pub mod retired;
pub mod traced;
pub mod wide;

/// The multiboot guest that prints one line and ends with the value 15H on the debug-exit port.
pub const HELLO: &str = env!("GUEST_HELLO");
/// The multiboot guest that changes its own code between packets, a hundred times.
pub const PATCHES: &str = env!("GUEST_PATCHES");
/// The multiboot guest that prints what the boot loader handed over.
pub const INFO: &str = env!("GUEST_INFO");
/// The multiboot guest whose CPUs talk through interrupts; the command line is their number.
pub const SMP: &str = env!("GUEST_SMP");
/// The four loops as a multiboot guest; the command line names one and its repetitions.
pub const LOOPS: &str = env!("GUEST_LOOPS");
/// The same loops, from the same object file, as a program of the host.
pub const LOOPS_NATIVE: &str = env!("GUEST_LOOPS_NATIVE");
/// A VMM that makes as many VM exits as its command line says.
pub const VMX_LOOP: &str = env!("GUEST_VMX_LOOP");

/// A program of the host that runs programs under the host's debug registers, by ptrace; `guests/host_debug.c` says how.
pub const HOST_DEBUG: &str = env!("GUEST_HOST_DEBUG");

/// A program for a Linux guest, whose threads change memory in transactions; the argument is how often.
pub const TRANSACTIONS: &str = env!("GUEST_TRANSACTIONS");

/// The first process of a 32-bit Linux guest on a Pentium 4, whose counters Linux's driver programs for it; `guests/netburst_events.c` says
/// what for.
pub const NETBURST_EVENTS: &str = env!("GUEST_NETBURST_EVENTS");

/// A program for a Linux guest that puts a file system to the test, `guests/fsx.c`.
pub const FSX: &str = env!("GUEST_FSX");

/// The first process of a Linux guest that writes code and runs it, in several ways; `guests/jit.c` says which.
pub const JIT: &str = env!("GUEST_JIT");
/// The multiboot guest that gdb walks through, `guests/walk.c`.
pub const WALK: &str = env!("GUEST_WALK");
/// The same as a file of 64 bits with its symbols and lines, for gdb.
pub const WALK_SYMBOLS: &str = env!("GUEST_WALK_SYMBOLS");
/// A first process for a Linux guest that takes the kernel with it, `guests/crash.c`.
pub const CRASH: &str = env!("GUEST_CRASH");

/// What /init prints first.
pub const INIT_MARKER: &str = "minivmm-guest: init";

/// A folder of a test's own, which goes away with it.
#[derive(Debug)]
pub struct Folder(PathBuf);

impl Folder {
    /// An empty one among the system's temporary files, with this in its name.
    pub fn new(name: &str) -> Self {
        static COUNT: AtomicUsize = AtomicUsize::new(0);
        let (process, count) = (std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
        let path = std::env::temp_dir().join(format!("minivmm-{name}-{process}-{count}"));
        fs::create_dir(&path).expect("a folder for the test");
        Folder(path)
    }

    /// Makes an executable file of this name in it.
    pub fn script(&self, name: &str, text: &str) {
        let file = self.join(name);
        fs::write(&file, text).expect("a script in the test's folder");
        fs::set_permissions(file, fs::Permissions::from_mode(0o755)).expect("a script may be executed");
    }
}

impl Deref for Folder {
    type Target = Path;

    fn deref(&self) -> &Path {
        &self.0
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Whether tests are to run in their long form, which `cargo xtask test --full` asks for.
pub fn full() -> bool {
    std::env::var_os("MINIVMM_FULL").is_some()
}

/// Says that a test has nothing to run on, so that its reader and `cargo xtask test` know that it has done nothing.
pub fn skipped(test: &str, why: &str) {
    println!("SKIPPED {test}: {why}");
    if let Some(path) = std::env::var_os("MINIVMM_SKIPPED") {
        let file = fs::OpenOptions::new().create(true).append(true).open(path);
        // In one write, as tests run side by side.
        let written = file.and_then(|mut file| file.write_all(format!("{test}: {why}\n").as_bytes()));
        written.expect("the file that MINIVMM_SKIPPED names takes a line");
    }
}

/// Whether this host has no KVM, so that this test is to be skipped. It has been said then.
pub fn kvm_is_missing(test: &str) -> bool {
    let why = minivmm::kvm::Host::open().err();
    why.inspect(|why| skipped(test, &why.to_string())).is_some()
}

/// The workspace's root folder.
pub fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .parent()
        .expect("this crate lives one folder below the root")
}

/// Cargo's output folder.
pub fn target() -> PathBuf {
    match std::env::var_os("CARGO_TARGET_DIR") {
        Some(folder) => root().join(folder),
        None => root().join("target"),
    }
}

fn cargo(arguments: &[&str]) {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    let output = command
        .args(arguments)
        .current_dir(root())
        .stdin(Stdio::null())
        .output();
    let output = output.unwrap_or_else(|error| panic!("cannot run cargo: {error}"));
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(
        output.status.success(),
        "cargo {}: {}\n{errors}",
        arguments.join(" "),
        output.status
    );
}

/// The build of minivmm that boots the guests.
pub fn minivmm() -> &'static Path {
    static PROGRAM: OnceLock<PathBuf> = OnceLock::new();
    PROGRAM.get_or_init(|| {
        if let Some(program) = std::env::var_os("MINIVMM") {
            return PathBuf::from(program);
        }
        cargo(&["build", "-p", "minivmm"]);
        target().join("debug/minivmm")
    })
}

/// The files of the Linux guest.
pub struct Linux {
    /// Debian's cloud kernel.
    pub kernel: PathBuf,
    /// busybox, our /init and its scripts.
    pub initrd: PathBuf,
    /// The same with perf, gdb, msr-tools, small programs and the scripts that use them.
    pub tools: PathBuf,
    /// The file that is /sample in the guest.
    pub sample: PathBuf,
}

/// The Linux guest, made where it is missing.
pub fn linux() -> &'static Linux {
    static LINUX: OnceLock<Linux> = OnceLock::new();
    LINUX.get_or_init(|| {
        let file = |name: &str| target().join("guest").join(name);
        let linux = Linux {
            kernel: file("vmlinuz"),
            initrd: file("initramfs.cpio"),
            tools: file("initramfs-tools.cpio"),
            sample: file("sample"),
        };
        let there = [&linux.kernel, &linux.initrd, &linux.tools, &linux.sample]
            .iter()
            .all(|file| file.is_file());
        // `cargo xtask test` has just made them; otherwise the scripts may have changed since.
        if !there || std::env::var_os("MINIVMM").is_none() {
            cargo(&["xtask", "guest"]);
        }
        linux
    })
}

/// The initramfs with a C compiler, OpenSSL and stress-ng behind the tools, and the folder that they are taken from, where they run on the
/// host by that folder's own dynamic linker. Fetched and made for this.
pub fn linux_work() -> (PathBuf, PathBuf) {
    static MADE: OnceLock<()> = OnceLock::new();
    MADE.get_or_init(|| cargo(&["xtask", "guest", "--work"]));
    let folder = target().join("guest");
    (folder.join("initramfs-work.cpio"), folder.join("work/root"))
}

/// The Linux guest's kernel, and with it Debian's other kernels: the oldest and the newest, and in the tests' long form one of each
/// series. They are fetched where they are missing.
pub fn linux_kernels() -> Vec<PathBuf> {
    let folder = target().join("guest/kernels");
    let (list, option) = match full() {
        true => ("all", "--all-kernels"),
        false => ("ends", "--kernels"),
    };
    if !folder.join(list).is_file() {
        cargo(&["xtask", "guest", "--no-tools", option]);
    }
    let files = fs::read_dir(folder).into_iter().flatten().flatten();
    let files = files.map(|file| file.path());
    let is_kernel = |file: &PathBuf| {
        file.file_name()
            .is_some_and(|name| name.to_string_lossy().starts_with("vmlinuz-"))
    };
    let mut kernels: Vec<PathBuf> = files.filter(is_kernel).collect();
    kernels.sort();
    kernels.insert(0, linux().kernel.clone());
    kernels
}

/// A command that boots `kernel` in minivmm on the deterministic clock.
pub fn in_minivmm(kernel: impl AsRef<Path>) -> Command {
    let mut command = Command::new(minivmm());
    command
        .arg("--kernel")
        .arg(kernel.as_ref())
        .args(["--clock", "virtual"]);
    command
}

/// A command that boots `kernel` in minivmm on this host's KVM.
pub fn in_minivmm_on_kvm(kernel: impl AsRef<Path>) -> Command {
    let mut command = Command::new(minivmm());
    command
        .arg("--kernel")
        .arg(kernel.as_ref())
        .args(["--engine", "kvm", "--kvm-defects", "accept"]);
    command
}

/// A program of the host. Where packages were in the way of its own, `cargo xtask test` has unpacked it beside the system.
pub fn program(name: &str) -> Command {
    let unpacked = target().join("host/bin").join(name);
    if unpacked.is_file() {
        Command::new(unpacked)
    } else {
        Command::new(name)
    }
}

/// The same command on another host CPU: under QEMU's user-mode emulation of the model `cpu`.
pub fn on_host_cpu(cpu: &str, command: &Command) -> Command {
    let mut emulated = program("qemu-x86_64");
    emulated
        .args(["-cpu", cpu])
        .arg(command.get_program())
        .args(command.get_args())
        // QEMU's user-mode emulation has no seccomp(2).
        .args(["--sandbox", "off"]);
    emulated
}

/// A command that boots `kernel` in QEMU's own software CPU, with the same serial port and debug-exit port.
pub fn in_qemu(kernel: impl AsRef<Path>) -> Command {
    let mut command = program("qemu-system-x86_64");
    command.args([
        "-accel",
        // CPUs in turn, so that one that waits for another does not depend on the host's load.
        "tcg,thread=single",
        "-cpu",
        "max",
        "-machine",
        "pc",
        "-m",
        "512",
        "-nodefaults",
    ]);
    command.args(["-display", "none", "-no-reboot", "-serial", "stdio"]);
    command.args(["-device", "isa-debug-exit,iobase=0xf4,iosize=4"]);
    command.arg("-kernel").arg(kernel.as_ref());
    command
}

/// A command for Linux with this kernel command line.
pub fn linux_in_minivmm(cmdline: &str) -> Command {
    let mut command = in_minivmm(&linux().kernel);
    command
        .arg("--initrd")
        .arg(&linux().initrd)
        .args(["--cmdline", cmdline]);
    command
}

/// A command for Linux with perf, gdb and msr-tools, which runs these scripts of guest-tests/linux/tools one after the other.
pub fn scripts_in_linux(scripts: &[&str]) -> Command {
    scripts_in_linux_with("", scripts)
}

/// The same with more words on the kernel's command line.
pub fn scripts_in_linux_with(words: &str, scripts: &[&str]) -> Command {
    scripts_in_linux_of(&linux().tools, words, scripts)
}

/// The same with another initramfs.
pub fn scripts_in_linux_of(initrd: &Path, words: &str, scripts: &[&str]) -> Command {
    let mut command = in_minivmm(&linux().kernel);
    command.arg("--initrd").arg(initrd).args([
        "--cmdline",
        &format!(
            "console=ttyS0 quiet panic=-1 {words} minivmm.script={}",
            scripts.join(",")
        ),
    ]);
    command
}

/// How a run ended and what it said.
#[derive(Debug)]
pub struct Outcome {
    /// The exit status; none where a signal ended the process.
    pub status: Option<i32>,
    /// Standard output: the guest's serial port, without carriage returns.
    pub console: String,
    /// Standard error.
    pub errors: String,
    /// From the start of the process to its end.
    pub time: Duration,
}

impl Outcome {
    /// The rest of the first console line that starts with `key`, without the blanks between.
    pub fn fact(&self, key: &str) -> Option<&str> {
        self.console
            .lines()
            .find_map(|line| Some(line.strip_prefix(key)?.strip_prefix(' ')?.trim()))
    }

    /// Fails the test, showing everything that was said, unless each of the scripts ended with status 0.
    #[track_caller]
    pub fn must_hold(&self, scripts: &[&str]) {
        for script in scripts {
            let end = format!("minivmm-guest: script {script} ended with status 0\n");
            assert!(self.console.contains(&end), "{script}:\n{}", self.console);
        }
    }

    /// Fails the test, showing everything that was said, unless the process ended with `status`.
    #[track_caller]
    pub fn must_end_with(self, status: i32) -> Self {
        assert_eq!(
            self.status,
            Some(status),
            "console:\n{}\nerrors:\n{}",
            self.console,
            self.errors
        );
        self
    }
}

/// A process whose console is read while it runs.
pub struct Running {
    child: Child,
    input: Option<ChildStdin>,
    start: Instant,
    end: Instant,
    console: String,
    output: Receiver<Vec<u8>>,
    errors: Receiver<Vec<u8>>,
}

/// Starts `command` with nothing on standard input. It is killed after `limit`.
#[track_caller]
pub fn start(command: &mut Command, limit: Duration) -> Running {
    command.stdin(Stdio::null());
    spawn(command, limit)
}

/// Starts `command` with a standard input that [`Running::enter`] writes to. It is killed after `limit`.
#[track_caller]
pub fn start_with_input(command: &mut Command, limit: Duration) -> Running {
    command.stdin(Stdio::piped());
    spawn(command, limit)
}

#[track_caller]
fn spawn(command: &mut Command, limit: Duration) -> Running {
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    let start = Instant::now();
    let mut child = command
        .spawn()
        .unwrap_or_else(|error| panic!("cannot run {command:?}: {error}"));
    let input = child.stdin.take();
    let output = forward(child.stdout.take().expect("the output is piped"));
    let errors = forward(child.stderr.take().expect("the errors are piped"));
    let (end, console) = (start + limit, String::new());
    Running {
        child,
        input,
        start,
        end,
        console,
        output,
        errors,
    }
}

/// A command that has `minivmm trace` do something.
pub fn trace_command(args: &[&str]) -> Command {
    let mut command = Command::new(minivmm());
    command.arg("trace").args(args);
    command
}

/// What a program of the host prints, which ends well.
///
/// # Panics
/// It cannot be run, or does not end with 0.
#[track_caller]
pub fn output_of(command: &mut Command) -> String {
    let output = command.output().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{command:?}: {errors}");
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// Runs `command` to its end, at most for `limit`.
#[track_caller]
pub fn run(command: &mut Command, limit: Duration) -> Outcome {
    start(command, limit).finish()
}

fn forward(mut source: impl Read + Send + 'static) -> Receiver<Vec<u8>> {
    let (sender, receiver) = channel();
    std::thread::spawn(move || {
        let mut buffer = [0; 4096];
        while let Ok(count @ 1..) = source.read(&mut buffer) {
            if sender.send(buffer[..count].to_vec()).is_err() {
                break;
            }
        }
    });
    receiver
}

impl Running {
    /// Waits until the console holds `text` and gives the time since the start of the process, or nothing where the process
    /// ended or the limit passed before.
    pub fn wait_for(&mut self, text: &str) -> Option<Duration> {
        self.wait_until(|console| console.contains(text))
    }

    /// The same until the console is as `is_there` wants it.
    pub fn wait_until(&mut self, is_there: impl Fn(&str) -> bool) -> Option<Duration> {
        loop {
            if is_there(&self.console) {
                return Some(self.start.elapsed());
            }
            if !self.read() {
                return None;
            }
        }
    }

    /// Writes a line to the process's standard input.
    #[track_caller]
    pub fn enter(&mut self, line: &str) {
        let input = self.input.as_mut().expect("the process was started with an input");
        writeln!(input, "{line}").unwrap_or_else(|error| panic!("cannot write to the process: {error}"));
    }

    /// What the console has shown so far.
    pub fn console(&self) -> &str {
        &self.console
    }

    /// Reads what comes next; false at the end of the output or at the limit.
    fn read(&mut self) -> bool {
        let left = self.end.saturating_duration_since(Instant::now());
        match self.output.recv_timeout(left) {
            Ok(bytes) => {
                self.console
                    .push_str(&String::from_utf8_lossy(&bytes).replace('\r', ""));
                true
            }
            Err(RecvTimeoutError::Disconnected) => false,
            Err(RecvTimeoutError::Timeout) => {
                // The process may be gone already; either way it ends here.
                let _ = self.child.kill();
                false
            }
        }
    }

    /// Reads to the end and waits for the process.
    #[track_caller]
    pub fn finish(mut self) -> Outcome {
        drop(self.input.take());
        while self.read() {}
        let status = self
            .child
            .wait()
            .unwrap_or_else(|error| panic!("cannot wait for the process: {error}"));
        let errors: Vec<u8> = self.errors.iter().flatten().collect();
        Outcome {
            status: status.code(),
            console: std::mem::take(&mut self.console),
            errors: String::from_utf8_lossy(&errors).into_owned(),
            time: self.start.elapsed(),
        }
    }

    /// The process's number.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// The most memory that the process has had resident so far, in bytes.
    pub fn peak_memory(&self) -> Option<u64> {
        let status = fs::read_to_string(format!("/proc/{}/status", self.child.id())).ok()?;
        let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
        Some(line.trim().strip_suffix(" kB")?.parse::<u64>().ok()? << 10)
    }

    /// Seconds of CPUs that the process has used so far, 0 if it is gone.
    pub fn cpu_seconds(&self) -> f64 {
        measure::cpu_seconds_of(self.child.id())
    }

    /// Ends the process without waiting for the guest.
    pub fn kill(self) {
        drop(self);
    }
}

/// A test that fails leaves no guest behind.
impl Drop for Running {
    fn drop(&mut self) {
        // Of a process that has been waited for nothing is left to kill.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[cfg(test)]
#[path = "lib_test.rs"]
mod tests;
