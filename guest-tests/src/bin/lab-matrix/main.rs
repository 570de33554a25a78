//! `lab-matrix HOST FOLDER [GUEST...]`: the guest tests on all models on a lab's KVM, a JUnit report a run in FOLDER.
//! `cargo xtask matrix` calls it and puts the reports together.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::{env, fs};

use guest_tests::bare;
use guest_tests::lab::{Ended, Host, Job, jobs};
use x86::model::MODELS;

/// Seconds of the lab's time for one guest on all models.
const GUEST_SECONDS: u64 = 1200;
/// And for each of its runs.
const RUN_SECONDS: &str = "60";

/// Where the report goes: standard output, which has no name in /dev where no udev has made one.
const REPORT: &str = "/proc/self/fd/1";

/// A run of `minivmm matrix`: a guest on models that all have Intel PT, or that all have not.
struct Part {
    guest: String,
    pt: bool,
}

/// Every image, on both kinds of models.
fn parts(wanted: &[String]) -> Result<Vec<Part>, String> {
    let folder = bare::folder();
    let entries = fs::read_dir(folder).map_err(|error| format!("{}: {error}", folder.display()))?;
    let images = entries.filter_map(|entry| {
        let path = entry.ok()?.path();
        let elf = path.extension().is_some_and(|extension| extension == "elf");
        elf.then(|| path.file_stem().unwrap_or_default().to_string_lossy().into_owned())
    });
    let mut guests: Vec<String> = images.collect();
    guests.sort();
    if let Some(unknown) = wanted.iter().find(|name| !guests.contains(name)) {
        return Err(format!("no guest {unknown}; there are: {}", guests.join(" ")));
    }
    guests.retain(|guest| wanted.is_empty() || wanted.contains(guest));
    let both = guests.into_iter().flat_map(|guest| {
        [false, true].map(|pt| Part {
            guest: guest.clone(),
            pt,
        })
    });
    Ok(both.collect())
}

/// The job of a part. Every unit that can be ours is.
fn job(host: Host, part: &Part) -> Job {
    let models = MODELS.iter().filter(|model| model.units.pt.is_some() == part.pt);
    // One at a time: the guests' timers are the wall's, and the host's processors take turns of a tenth of a second.
    let mut job = Job::new(["matrix", "--engine", "kvm", "--report-as", host.name(), "--jobs", "1"]);
    job = job.within(GUEST_SECONDS);
    let files: Vec<PathBuf> = ["elf", "toml"]
        .map(|kind| bare::folder().join(&part.guest).with_extension(kind))
        .into_iter()
        .filter(|file| file.is_file())
        .collect();
    job = job.folder("--guests", &part.guest, files);
    job.arguments
        .extend(["--timeout", RUN_SECONDS, "--junit", REPORT, "--model"].map(String::from));
    job.arguments.extend(models.map(|model| model.name.to_string()));
    let units = [
        "--",
        "--lbr=emulated",
        "--bts=emulated",
        "--rdt=emulated",
        "--pebs=emulated",
    ];
    job.arguments.extend(units.map(String::from));
    if part.pt {
        job.arguments.push("--pt=emulated".into());
    }
    job
}

/// The report among what a run said.
fn report(said: &str) -> Option<&str> {
    const END: &str = "</testsuites>";
    let from = said.find("<?xml")?;
    let to = said[from..].find(END)? + from + END.len();
    Some(&said[from..to])
}

fn run(host: Host, folder: &Path, guests: &[String]) -> Result<(), String> {
    let parts = parts(guests)?;
    let all: Vec<Job> = parts.iter().map(|part| job(host, part)).collect();
    fs::create_dir_all(folder).map_err(|error| format!("{}: {error}", folder.display()))?;
    let mut missing = String::new();
    for (part, Ended { status, said }) in parts.iter().zip(jobs(host, &all)?) {
        let kind = if part.pt { "pt" } else { "no-pt" };
        let path = folder.join(format!("{}-{}-{kind}.xml", host.name(), part.guest));
        match report(&said) {
            Some(text) => fs::write(&path, text).map_err(|error| format!("{}: {error}", path.display()))?,
            None => missing += &format!("{} left no report, status {status}\n{said}\n", part.guest),
        }
    }
    if missing.is_empty() { Ok(()) } else { Err(missing) }
}

fn main() -> ExitCode {
    let arguments: Vec<String> = env::args().skip(1).collect();
    let [host, folder, guests @ ..] = arguments.as_slice() else {
        eprintln!("usage: lab-matrix kvm-amd|kvm-intel|kvm-intel-minivmm FOLDER [GUEST...]");
        return ExitCode::from(2);
    };
    let Some(host) = Host::named(host) else {
        eprintln!("lab-matrix: no lab {host}: kvm-amd, kvm-intel or kvm-intel-minivmm");
        return ExitCode::from(2);
    };
    match run(host, Path::new(folder), guests) {
        Ok(()) => ExitCode::SUCCESS,
        Err(why) => {
            eprintln!("lab-matrix: {why}");
            ExitCode::FAILURE
        }
    }
}

#[cfg(test)]
#[path = "lab_matrix_test.rs"]
mod tests;
