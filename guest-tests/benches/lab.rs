//! Debian's way to its /init on a real kvm-amd, in the lab: minivmm with its own interrupt controllers and with KVM's, over QEMU's
//! microvm. Medians of alternated runs.
//!
//! `cargo xtask bench --only lab`; the figures go to target/bench-lab.json too. QEMU's program, libraries and firmware are this
//! system's.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use guest_tests::lab::{Host, Job, timed};
use guest_tests::measure::{median, ratio, rounds};
use guest_tests::{INIT_MARKER, linux, target};

const CMDLINE: &str = "console=ttyS0 quiet panic=-1 minivmm.script=nothing";
const QEMU: &str = "/usr/bin/qemu-system-x86_64";
/// What microvm boots Linux with, where Debian's packages have it.
const FIRMWARE: [&str; 4] = ["bios-microvm.bin", "linuxboot_dma.bin", "pvh.bin", "kvmvapic.bin"];
const FOLDERS: [&str; 2] = ["/usr/share/seabios", "/usr/share/qemu"];

fn main() -> ExitCode {
    match rounds(5).and_then(measure) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => wrong(&error),
    }
}

fn wrong(message: &str) -> ExitCode {
    eprintln!("bench: {message}");
    ExitCode::FAILURE
}

fn ours(irqchip: &str) -> Job {
    let options = format!("--engine kvm --irqchip {irqchip} -m 256M --cpu-model haswell --cmdline");
    Job::new(options.split(' ').map(str::to_string).chain([CMDLINE.to_string()]))
        .file("--kernel", &linux().kernel)
        .file("--initrd", &linux().initrd)
        .within(60)
}

fn qemu() -> Result<Job, String> {
    let firmware: Vec<PathBuf> = FIRMWARE
        .iter()
        .map(|name| {
            let mut places = FOLDERS.iter().map(|folder| Path::new(folder).join(name));
            places
                .find(|path| path.is_file())
                .ok_or(format!("no {name} in {FOLDERS:?}"))
        })
        .collect::<Result<_, _>>()?;
    let options = "-M microvm,accel=kvm -cpu host -m 256 -nodefaults -no-user-config -no-reboot -display none -serial stdio -append";
    Ok(Job::other(QEMU, options.split(' ').chain([CMDLINE]))
        .folder("-L", "qemu", firmware)
        .file("-kernel", &linux().kernel)
        .file("-initrd", &linux().initrd)
        .within(60))
}

fn measure(rounds: usize) -> Result<(), String> {
    let subjects = [
        ("qemu -M microvm,accel=kvm", qemu()?),
        ("minivmm --engine kvm", ours("minivmm")),
        ("minivmm --engine kvm --irqchip kvm", ours("kvm")),
    ];
    let all: Vec<Job> = (0..rounds)
        .flat_map(|_| subjects.iter().map(|(_, job)| job.clone()))
        .collect();
    let (_, times) = timed(Host::Amd, &all, INIT_MARKER)?;
    println!("Debian to its /init in the lab with kvm-amd, {rounds} rounds each\n");
    let mut json = Vec::new();
    let of = |index: usize| -> Vec<Duration> { times.iter().skip(index).step_by(subjects.len()).copied().collect() };
    let qemu = median(&of(0));
    for (index, (name, _)) in subjects.iter().enumerate() {
        let time = median(&of(index));
        let figure = ratio(time, qemu);
        let target = if index == 0 { "" } else { "1.1" };
        println!("{name:<44}{:>10.2} s{figure:>10.2}  {target}", time.as_secs_f64());
        json.push(format!(
            "\"{name}\": {{\"s\": {:.3}, \"ratio\": {figure:.3}}}",
            time.as_secs_f64()
        ));
    }
    let path = target().join("bench-lab.json");
    let text = format!("{{\n  \"rounds\": {rounds},\n  {}\n}}\n", json.join(",\n  "));
    std::fs::write(&path, text).map_err(|error| format!("cannot write {}: {error}", path.display()))?;
    println!("\nwritten to {}", path.display());
    Ok(())
}
