//! A host with a real KVM, inside QEMU: Debian's kernel with its kvm-amd module on QEMU's software CPU, which has SVM.
//!
//! The host's initramfs holds busybox, the modules, minivmm with the libraries it needs, and the files that it is to run. Each
//! run is a line of a script; its output and status come back over the host's serial port.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use minivmm::newc::Archive;

use crate::{linux, minivmm, program, run, target};

/// KVM's modules in the order in which they load.
const MODULES: [&str; 3] = ["irqbypass.ko", "kvm.ko", "kvm-amd.ko"];
/// A run that takes longer hangs; the host under the host is slow.
const RUN_SECONDS: u32 = 300;

/// One run of minivmm in the lab.
#[derive(Clone, Debug, Default)]
pub struct Job {
    /// Its arguments, of which those that are `files`' paths are found in the lab.
    pub arguments: Vec<String>,
    /// The files it needs.
    pub files: Vec<PathBuf>,
}

impl Job {
    /// minivmm with these arguments.
    pub fn new<S: Into<String>>(arguments: impl IntoIterator<Item = S>) -> Self {
        Job {
            arguments: arguments.into_iter().map(Into::into).collect(),
            files: Vec::new(),
        }
    }

    /// With `option FILE` as well.
    pub fn file(mut self, option: &str, path: impl AsRef<Path>) -> Self {
        let path = path.as_ref().to_path_buf();
        self.arguments.extend([option.to_string(), in_lab(&path)]);
        self.files.push(path);
        self
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

fn in_lab(path: &Path) -> String {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    format!("/lab/{name}")
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

/// Runs the jobs one after the other.
///
/// # Errors
/// What the lab lacks, or where it stopped, with what it said.
pub fn jobs(jobs: &[Job]) -> Result<Vec<Ended>, String> {
    let read = |path: &Path| fs::read(path).map_err(|error| format!("{}: {error}", path.display()));
    let guest = target().join("guest");
    let mut archive = Archive::default();
    for folder in ["bin", "dev", "lab", "lib", "lib64", "mod", "proc", "sys", "tmp"] {
        archive.folder(folder);
    }
    archive.device("dev/console", 5, 1);
    archive.file("bin/busybox", 0o755, &read(&guest.join("busybox"))?);
    archive.link("bin/sh", "busybox");
    for module in MODULES {
        archive.file(
            format!("mod/{module}"),
            0o644,
            &read(&guest.join("modules").join(module))?,
        );
    }
    archive.file("lab/minivmm", 0o755, &read(minivmm())?);
    for library in libraries(minivmm()) {
        let name = library.file_name().unwrap_or_default().to_string_lossy().into_owned();
        archive.file(format!("lib64/{name}"), 0o755, &read(&library)?);
    }
    let files: BTreeSet<&PathBuf> = jobs.iter().flat_map(|job| &job.files).collect();
    for file in files {
        archive.file(in_lab(file).trim_start_matches('/'), 0o644, &read(file)?);
    }
    archive.file("init", 0o755, script(jobs).as_bytes());

    let initrd = std::env::temp_dir().join(format!("minivmm-lab-{}.cpio", std::process::id()));
    fs::write(&initrd, archive.finish()).map_err(|error| format!("{}: {error}", initrd.display()))?;
    let mut command = program("qemu-system-x86_64");
    command
        .args([
            "-accel",
            "tcg,thread=multi",
            "-cpu",
            "max,+svm",
            "-m",
            "1024",
            "-smp",
            "2",
        ])
        .args([
            "-display",
            "none",
            "-nodefaults",
            "-no-reboot",
            "-net",
            "none",
            "-serial",
            "stdio",
        ])
        .arg("-kernel")
        .arg(&linux().kernel)
        .arg("-initrd")
        .arg(&initrd)
        .args(["-append", "console=ttyS0 panic=-1 quiet"]);
    let limit = Duration::from_secs(60 + jobs.len() as u64 * u64::from(RUN_SECONDS));
    let host = run(&mut command, limit);
    let _ = fs::remove_file(&initrd);
    let ended = parts(&host.console);
    if ended.len() == jobs.len() {
        Ok(ended)
    } else {
        Err(format!(
            "{} of {} jobs came to an end\n{}\n{}",
            ended.len(),
            jobs.len(),
            host.console,
            host.errors
        ))
    }
}

/// The host's /init.
fn script(jobs: &[Job]) -> String {
    let mut text = String::from(
        "#!/bin/sh\n\
         /bin/busybox mount -t proc proc /proc\n\
         /bin/busybox mount -t sysfs sys /sys\n\
         /bin/busybox mount -t devtmpfs dev /dev\n\
         export LD_LIBRARY_PATH=/lib64\n",
    );
    for module in MODULES {
        let _ = writeln!(text, "/bin/busybox insmod /mod/{module}");
    }
    for (index, job) in jobs.iter().enumerate() {
        let quoted: Vec<String> = job.arguments.iter().map(|word| format!("'{word}'")).collect();
        let _ = writeln!(
            text,
            "echo '### begin {index}'\n\
             /bin/busybox timeout {RUN_SECONDS} /lab/minivmm {} </dev/null 2>&1\n\
             echo \"### end {index} $?\"",
            quoted.join(" ")
        );
    }
    text + "/bin/busybox poweroff -f\n"
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
mod tests {
    use super::*;

    // covers: 6/lab
    #[test]
    fn a_job_is_what_stands_between_its_marks() {
        let console = "boot\n### begin 0\nhello\nworld\n### end 0 43\n### begin 1\n### end 1 2\n### begin 2\nhangs";
        let ended = parts(console);
        assert_eq!(ended.len(), 2, "the third never ended");
        assert_eq!((ended[0].status, ended[0].said.as_str()), (43, "hello\nworld\n"));
        assert_eq!((ended[1].status, ended[1].said.as_str()), (2, ""));
    }

    // covers: 6/lab
    #[test]
    fn a_job_names_its_files_where_the_lab_has_them() {
        let job = Job::new(["--engine", "kvm"]).file("--kernel", "/some/where/dr.elf");
        let text = script(&[job]);
        assert!(
            text.contains("/lab/minivmm '--engine' 'kvm' '--kernel' '/lab/dr.elf' </dev/null"),
            "{text}"
        );
    }
}
