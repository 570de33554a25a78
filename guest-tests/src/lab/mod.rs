//! A host with a real KVM, inside an emulator: Debian's kernel with its kvm-amd module on QEMU's software CPU, which has SVM, or
//! with its kvm-intel module on Bochs, which has VMX, or on minivmm's own software CPU.
//!
//! The host's initramfs holds busybox, the modules, minivmm with the libraries it needs, and the files that it is to run. Each
//! run is a line of a script; its output and status come back over the host's serial port.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use minivmm::machine::newc::Archive;

use crate::{Folder, minivmm, start, target};

pub mod bochs;
mod judge;
mod own;
mod qemu;

pub use judge::{Guest, Known, Tally, chosen, handovers, job, judge, judge_all, share_in_engine, without_reason};

/// A run that takes longer hangs; the host under the host is slow.
const RUN_SECONDS: u64 = 300;

/// Whose KVM the lab has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Host {
    /// kvm-amd, in QEMU.
    Amd,
    /// kvm-intel, in Bochs.
    Intel,
    /// kvm-intel, in minivmm, whose processor is of this model.
    Own(&'static str),
}

impl Host {
    /// The model of minivmm's processor where nothing else is said: with XSAVE, which minivmm wants of a KVM, and the first one on
    /// which kvm_intel has last-branch records, PEBS and Intel PT alike.
    pub const OWN: Host = Host::Own("icelake-server");

    /// The name of the module, which is the host's name in tables, too.
    pub fn name(self) -> &'static str {
        match self {
            Host::Amd => "kvm-amd",
            Host::Intel => "kvm-intel",
            Host::Own(_) => "kvm-intel-minivmm",
        }
    }

    /// What tells it from other hosts in lists: the name, and the model of minivmm's processor.
    pub fn label(self) -> String {
        match self {
            Host::Own(model) => format!("{} ({model})", self.name()),
            _ => self.name().to_string(),
        }
    }

    /// The host of a name.
    pub fn named(name: &str) -> Option<Host> {
        [Host::Amd, Host::Intel, Host::OWN]
            .into_iter()
            .find(|host| host.name() == name)
    }

    /// KVM's modules in the order in which they load.
    fn modules(self) -> [&'static str; 3] {
        let own = match self {
            Host::Amd => "kvm-amd.ko",
            Host::Intel | Host::Own(_) => "kvm-intel.ko",
        };
        ["irqbypass.ko", "kvm.ko", own]
    }

    /// Wall time from the emulator's start to the first run, at most.
    fn boot_limit(self) -> Duration {
        Duration::from_secs(match self {
            Host::Amd => 60,
            Host::Own(_) => 120,
            Host::Intel => 240,
        })
    }
}

/// One run of minivmm, or of another program, in the lab.
#[derive(Clone, Debug)]
pub struct Job {
    /// The program, if it is not minivmm: one of the files.
    pub program: Option<String>,
    /// Its arguments, with files as the lab has them.
    pub arguments: Vec<String>,
    /// The files it needs, by their paths below /lab.
    pub files: BTreeMap<String, PathBuf>,
    /// Seconds of the lab's time after which it is ended.
    pub seconds: u64,
}

impl Job {
    /// minivmm with these arguments.
    pub fn new<S: Into<String>>(arguments: impl IntoIterator<Item = S>) -> Self {
        Job {
            program: None,
            arguments: arguments.into_iter().map(Into::into).collect(),
            files: BTreeMap::new(),
            seconds: RUN_SECONDS,
        }
    }

    /// Another program with this file.
    pub fn program(program: impl AsRef<Path>, file: impl AsRef<Path>) -> Self {
        let (program, file) = (program.as_ref(), file.as_ref());
        let name = |path: &Path| path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let mut job = Job::new([format!("/lab/{}", name(file))]);
        job.program = Some(name(program));
        job.files = [program, file].map(|path| (name(path), path.to_path_buf())).into();
        job
    }

    /// Another program with these arguments.
    pub fn other<S: Into<String>>(program: impl AsRef<Path>, arguments: impl IntoIterator<Item = S>) -> Self {
        let program = program.as_ref();
        let name = program.file_name().unwrap_or_default().to_string_lossy().into_owned();
        Job {
            program: Some(name.clone()),
            files: [(name, program.to_path_buf())].into(),
            ..Job::new(arguments)
        }
    }

    /// With `option FILE` as well.
    pub fn file(mut self, option: &str, path: impl AsRef<Path>) -> Self {
        let path = path.as_ref();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        self.arguments.extend([option.to_string(), format!("/lab/{name}")]);
        self.files.insert(name, path.to_path_buf());
        self
    }

    /// With `option FOLDER` as well, and these files in that folder.
    pub fn folder(mut self, option: &str, folder: &str, files: impl IntoIterator<Item = PathBuf>) -> Self {
        self.arguments.extend([option.to_string(), format!("/lab/{folder}")]);
        for file in files {
            let name = file.file_name().unwrap_or_default().to_string_lossy().into_owned();
            self.files.insert(format!("{folder}/{name}"), file);
        }
        self
    }

    /// With another limit, in seconds of the lab's time.
    pub fn within(self, seconds: u64) -> Self {
        Job { seconds, ..self }
    }
}

/// How a job ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ended {
    /// The exit status, as the lab's shell has it.
    pub status: i32,
    /// What it said, standard output and standard error together.
    pub said: String,
}

/// A file that a Debian package has, installed or unpacked beside the system.
fn system_file(path: &str) -> Result<PathBuf, String> {
    let beside = target().join("host/root").join(path.trim_start_matches('/'));
    [PathBuf::from(path), beside]
        .into_iter()
        .find(|file| file.is_file())
        .ok_or_else(|| format!("{path} is not here: run `cargo xtask lab --intel` once, which installs what has it"))
}

/// The shared libraries of a program, its loader among them; none of a static one.
fn libraries(program: &Path) -> Vec<PathBuf> {
    let output = Command::new("ldd").arg(program).output();
    let text = output.map_or(String::new(), |output| {
        String::from_utf8_lossy(&output.stdout).into_owned()
    });
    text.split_whitespace()
        .filter(|word| word.starts_with('/'))
        .map(PathBuf::from)
        .collect()
}

fn read(path: &Path) -> Result<Vec<u8>, String> {
    fs::read(path).map_err(|error| format!("{}: {error}", path.display()))
}

/// A program without what debuggers want, which is most of its size: every byte of it is read and unpacked in the lab.
fn stripped(program: &Path, scratch: &Path) -> Result<Vec<u8>, String> {
    let to = scratch.join("stripped");
    let mut strip = Command::new("strip");
    let output = strip.arg("-o").arg(&to).arg(program).output();
    match output {
        Ok(output) if output.status.success() => read(&to),
        Ok(output) => Err(format!("strip: {}", String::from_utf8_lossy(&output.stderr).trim())),
        Err(error) => Err(format!("strip (Debian package binutils): {error}")),
    }
}

/// The host's initramfs.
fn archive(host: Host, jobs: &[Job], scratch: &Path) -> Result<Vec<u8>, String> {
    let guest = target().join("guest");
    let mut archive = Archive::default();
    for folder in ["bin", "dev", "lab", "lib", "lib64", "mod", "proc", "sys", "tmp"] {
        archive.folder(folder);
    }
    archive.device("dev/console", 5, 1);
    archive.file("bin/busybox", 0o755, &read(&guest.join("busybox"))?);
    archive.link("bin/sh", "busybox");
    for module in host.modules() {
        let bytes = read(&guest.join("modules").join(module))?;
        archive.file(format!("mod/{module}"), 0o644, &bytes);
    }
    archive.file("lab/minivmm", 0o755, &stripped(minivmm(), scratch)?);
    let files: BTreeMap<&String, &PathBuf> = jobs.iter().flat_map(|job| &job.files).collect();
    let programs = jobs.iter().filter_map(|job| job.program.as_ref());
    let programs = programs.filter_map(|name| files.get(name).map(|path| path.as_path()));
    let libraries: BTreeMap<String, PathBuf> = std::iter::once(minivmm())
        .chain(programs)
        .flat_map(libraries)
        .map(|library| {
            let name = library.file_name().unwrap_or_default().to_string_lossy().into_owned();
            (name, library)
        })
        .collect();
    for (name, library) in libraries {
        archive.file(format!("lib64/{name}"), 0o755, &read(&library)?);
    }
    let mut folder_before = "";
    for (name, file) in files {
        let folder = name.split_once('/').map_or("", |(folder, _)| folder);
        if !folder.is_empty() && folder != folder_before {
            archive.folder(format!("lab/{folder}"));
            folder_before = folder;
        }
        match jobs.iter().any(|job| job.program.as_ref() == Some(name)) {
            true => archive.file(format!("lab/{name}"), 0o755, &stripped(file, scratch)?),
            false => archive.file(format!("lab/{name}"), 0o644, &read(file)?),
        }
    }
    archive.file("init", 0o755, script(host, jobs).as_bytes());
    Ok(archive.finish())
}

/// Runs the jobs one after the other, and says on standard error how far it is.
///
/// # Errors
/// What the lab lacks, or where it stopped, with what it said.
pub fn jobs(host: Host, jobs: &[Job]) -> Result<Vec<Ended>, String> {
    jobs_on(host, jobs, &[])
}

/// The same, on a host that is run with more arguments.
///
/// # Errors
/// As [`jobs`].
pub fn jobs_on(host: Host, jobs: &[Job], arguments: &[&str]) -> Result<Vec<Ended>, String> {
    timed_on(host, jobs, "### end ", arguments).map(|(ended, _)| ended)
}

/// [`jobs`], with the time from each job's beginning until it has said `text`.
///
/// # Errors
/// As [`jobs`], or a job that never says it.
pub fn timed(host: Host, jobs: &[Job], text: &str) -> Result<(Vec<Ended>, Vec<Duration>), String> {
    timed_on(host, jobs, text, &[])
}

fn timed_on(host: Host, jobs: &[Job], text: &str, arguments: &[&str]) -> Result<(Vec<Ended>, Vec<Duration>), String> {
    let scratch = Folder::new("lab");
    let initrd = scratch.join("initramfs.cpio");
    let bytes = archive(host, jobs, &scratch)?;
    fs::write(&initrd, bytes).map_err(|error| format!("{}: {error}", initrd.display()))?;
    let limit = host.boot_limit() + Duration::from_secs(jobs.iter().map(|job| job.seconds).sum());
    let mut command = match host {
        Host::Amd => qemu::command(&initrd),
        Host::Intel => bochs::command(&initrd, &scratch, limit)?,
        Host::Own(model) => own::command(&initrd, model),
    };
    let begun = Instant::now();
    let mut running = start(command.args(arguments), limit);
    let name = host.label();
    eprintln!("{name}: boots");
    let mut times = Vec::new();
    for (index, job) in jobs.iter().enumerate() {
        let begin = running.wait_for(&format!("### begin {index}"));
        let said = running.wait_until(|console| {
            let (_, said) = console.rsplit_once(&format!("### begin {index}")).unwrap_or_default();
            said.contains(text) || said.contains("### end ")
        });
        if let (Some(begin), Some(said)) = (begin, said) {
            times.push(said - begin);
        }
        // Of a lab that stops, everything that it said is shown below.
        if running.wait_for(&format!("### end {index} ")).is_none() {
            break;
        }
        let (number, seconds) = (index + 1, begun.elapsed().as_secs());
        eprintln!(
            "{name}: {number} of {} done, {seconds} s: {} {}",
            jobs.len(),
            job.program.as_deref().unwrap_or("minivmm"),
            job.arguments.join(" ")
        );
    }
    let console = running.finish();
    let ended = parts(&console.console);
    if judge::some_are_chosen() {
        ended.iter().for_each(|job| println!("{}", job.said));
    }
    if ended.len() == jobs.len() {
        return match ended.iter().find(|job| text != "### end " && !job.said.contains(text)) {
            Some(job) => Err(format!("a job never said '{text}': {}", job.said)),
            None => Ok((ended, times)),
        };
    }
    let more = match host {
        Host::Amd | Host::Own(_) => String::new(),
        Host::Intel => bochs::last_words(&scratch),
    };
    Err(format!(
        "{name}: {} of {} jobs came to an end within {} s\n{}\n{}{more}",
        ended.len(),
        jobs.len(),
        limit.as_secs(),
        console.console,
        console.errors
    ))
}

/// The host's /init.
fn script(host: Host, jobs: &[Job]) -> String {
    let mut text = String::from(
        "#!/bin/sh\n\
         /bin/busybox mount -t proc proc /proc\n\
         /bin/busybox mount -t sysfs sys /sys\n\
         /bin/busybox mount -t devtmpfs dev /dev\n\
         export LD_LIBRARY_PATH=/lib64\n",
    );
    for module in host.modules() {
        let _ = writeln!(text, "/bin/busybox insmod /mod/{module}");
    }
    if let Host::Own(_) = host {
        // Debian's own is 3, which keeps perf, and so the host's Intel PT, from all that have not CAP_SYS_ADMIN.
        text += "echo 1 >/proc/sys/kernel/perf_event_paranoid\n";
        // Until Linux has the time-stamp counter for a clock: idle time passes at once.
        text += "/bin/busybox sleep 2\n";
    }
    for (index, job) in jobs.iter().enumerate() {
        // Through a pipe: no progress is drawn, which the serial port would make slow.
        let quoted: Vec<String> = job.arguments.iter().map(|word| format!("'{word}'")).collect();
        let _ = writeln!(
            text,
            "echo '### begin {index}'\n\
             (/bin/busybox timeout {} /lab/{} {} </dev/null 2>&1; echo $? >/tmp/status) | /bin/busybox cat\n\
             echo \"### end {index} $(/bin/busybox cat /tmp/status)\"",
            job.seconds,
            job.program.as_deref().unwrap_or("minivmm"),
            quoted.join(" ")
        );
    }
    // stty waits until all has been sent; power off does not.
    text + "/bin/busybox stty sane </dev/console\n/bin/busybox poweroff -f\n"
}

/// What each job said, between its marks.
fn parts(console: &str) -> Vec<Ended> {
    let mut parts = Vec::new();
    for rest in console.split("### begin ").skip(1) {
        let Some((said, end)) = rest.split_once("### end ") else {
            break;
        };
        let status = end.split_whitespace().nth(1).and_then(|word| word.parse().ok());
        let Some(status) = status else { break };
        let said = said.split_once('\n').map_or("", |(_, said)| said).to_string();
        parts.push(Ended { status, said });
    }
    parts
}

#[cfg(test)]
#[path = "lab_test.rs"]
mod tests;
