//! The lab with kvm-intel: Debian's Bochs, an interpreter of about a hundred million instructions per second.
//!
//! It boots from disks alone, so the kernel and its initramfs go onto a CD with ISOLINUX. Its only display in Debian without a window
//! wants a terminal, which script(1) gives it; it starts in its debugger, which `-rc` tells to go on. Its clock is the count of
//! instructions and begins at a fixed time, so that the same files make the same run.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use super::system_file;
use crate::{linux, program, target};

/// What the host's clock shows at the start: 2000-01-01 00:00:00 UTC.
const TIME: u32 = 946_684_800;
/// Instructions to a second of the host's time: about what Bochs executes in one of ours.
const IPS: u32 = 100_000_000;
/// A part with EPT, unrestricted guests and VPID.
const MODEL: &str = "corei7_haswell_4770";

/// Debian's self-tests of its ciphers are three quarters of the boot's instructions.
const CMDLINE: &str = "console=ttyS0,115200 panic=-1 quiet mitigations=off cryptomgr.notests";

/// The command that boots the host, with its serial port on standard output. The CD and all else go into `scratch`.
///
/// # Errors
/// What is missing.
pub fn command(initrd: &Path, scratch: &Path, limit: Duration) -> Result<Command, String> {
    let cd = cd(initrd, scratch)?;
    let machine = Machine {
        version: Version::System,
        model: MODEL,
        ips: IPS,
        megabytes: 1024,
        disks: format!("ata0-master: type=cdrom, path={cd}, status=inserted\nboot: cdrom\n"),
    };
    start(&machine, scratch, limit)
}

/// Which Bochs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Version {
    /// The system's.
    System,
    /// One whose CPUs have AVX512_FP16, which `cargo xtask test` fetches where the system's have not.
    WithHalfPrecision,
}

impl Version {
    /// What a newer one has of its own, below its root.
    fn own(self, path: &str) -> Option<PathBuf> {
        let path = target().join("guest/bochs").join(path);
        (self == Version::WithHalfPrecision && path.is_file()).then_some(path)
    }
}

/// The command that boots a disk's image, with its serial port on standard output. At a million instructions to a second the port
/// takes a character in some ninety of them.
///
/// # Errors
/// What is missing.
pub fn disk(image: &Path, version: Version, model: &str, scratch: &Path, limit: Duration) -> Result<Command, String> {
    let machine = Machine {
        version,
        model,
        ips: 1_000_000,
        megabytes: 64,
        disks: format!(
            "ata0-master: type=disk, path={}, mode=flat, cylinders=20, heads=16, spt=63\nboot: disk\n",
            image.display()
        ),
    };
    start(&machine, scratch, limit)
}

/// What differs between the machines.
struct Machine<'a> {
    version: Version,
    model: &'a str,
    ips: u32,
    megabytes: u32,
    disks: String,
}

fn start(machine: &Machine, scratch: &Path, limit: Duration) -> Result<Command, String> {
    let write = |name: &str, text: String| {
        let path = scratch.join(name);
        fs::write(&path, text).map_err(|error| format!("{}: {error}", path.display()))?;
        Ok::<_, String>(path.display().to_string())
    };
    let settings = write("bochsrc", settings(machine, scratch)?)?;
    let go = write("go", "c\n".into())?;
    let bochs = match machine.version.own("bochs-bin") {
        Some(newer) => Command::new(newer),
        None => program("bochs-bin"),
    };
    let program = bochs.get_program().to_string_lossy();
    // script(1) hands its own standard output to nobody, so the serial port has a descriptor of its own. timeout(1) ends Bochs
    // should this process not live to do so.
    let inner = format!(
        "exec timeout -k 5 {} '{program}' -q -f '{settings}' -rc '{go}'",
        limit.as_secs() + 10
    );
    let inner = write("start", format!("#!/bin/sh\n{inner}\n"))?;
    // What Bochs shows goes to a terminal of its own making, whose name it tells, and it stands still once that is full. Who
    // reads it is no child of script(1), which waits for all of its own.
    let screen = scratch.join("screen").display().to_string();
    let outer = format!(
        "#!/bin/sh\n\
         mkfifo '{screen}' || exit 1\n\
         (while read -r line; do case $line in *'connected to screen \"'*)\n\
             name=${{line#*\\\"}}; cat \"${{name%%\\\"*}}\" & ;;\n\
         esac; done <'{screen}' >/dev/null 2>&1 &)\n\
         exec 3>&1\n\
         exec script -qec \"sh '{inner}'\" /dev/null >'{screen}'\n"
    );
    let outer = write("outer", outer)?;
    let mut command = Command::new("sh");
    command.arg(outer).env("TERM", "xterm");
    Ok(command)
}

/// Makes the CD, and gives its path.
fn cd(initrd: &Path, scratch: &Path) -> Result<String, String> {
    let folder = scratch.join("cd");
    let failed = |path: &Path, error: std::io::Error| format!("{}: {error}", path.display());
    fs::create_dir_all(folder.join("isolinux")).map_err(|error| failed(&folder, error))?;
    let put = |from: &Path, to: &str| fs::copy(from, folder.join(to)).map_err(|error| failed(from, error));
    put(&linux().kernel, "vmlinuz")?;
    put(initrd, "initrd")?;
    put(&system_file("/usr/lib/ISOLINUX/isolinux.bin")?, "isolinux/isolinux.bin")?;
    put(
        &system_file("/usr/lib/syslinux/modules/bios/ldlinux.c32")?,
        "isolinux/ldlinux.c32",
    )?;
    let menu =
        format!("DEFAULT lab\nPROMPT 0\nTIMEOUT 1\nLABEL lab\n KERNEL /vmlinuz\n INITRD /initrd\n APPEND {CMDLINE}\n");
    let menu_file = folder.join("isolinux/isolinux.cfg");
    fs::write(&menu_file, menu).map_err(|error| failed(&menu_file, error))?;
    let cd = scratch.join("cd.iso");
    let mut make = program("xorriso");
    let options = "-b isolinux/isolinux.bin -c isolinux/boot.cat -no-emul-boot -boot-load-size 4 -boot-info-table";
    make.args(["-as", "mkisofs", "-quiet", "-o"])
        .arg(&cd)
        .args(options.split(' '))
        .arg(&folder);
    match make.output() {
        Ok(output) if output.status.success() => Ok(cd.display().to_string()),
        Ok(output) => Err(format!("xorriso: {}", String::from_utf8_lossy(&output.stderr).trim())),
        Err(error) => Err(format!("xorriso (Debian package of that name): {error}")),
    }
}

/// Bochs's file of settings.
fn settings(machine: &Machine, scratch: &Path) -> Result<String, String> {
    let Machine {
        version,
        model,
        ips,
        megabytes,
        disks,
    } = machine;
    const BIOS: &str = "usr/share/bochs/BIOS-bochs-latest";
    let bios = version.own(BIOS).map_or_else(|| system_file(&format!("/{BIOS}")), Ok)?;
    let video = system_file("/usr/share/vgabios/vgabios.bin")?;
    Ok(format!(
        "plugin_ctrl: unmapped=true, biosdev=true, speaker=false, extfpuirq=true, parallel=false, serial=true\n\
         config_interface: textconfig\n\
         display_library: term\n\
         memory: host={megabytes}, guest={megabytes}\n\
         romimage: file={}\n\
         vgaromimage: file={}\n\
         cpu: model={model}, count=1, ips={ips}, reset_on_triple_fault=0\n\
         clock: sync=none, time0={TIME}\n\
         ata0: enabled=1, ioaddr1=0x1f0, ioaddr2=0x3f0, irq=14\n\
         {disks}\
         com1: enabled=1, mode=file, dev=/dev/fd/3\n\
         pci: enabled=1, chipset=i440fx\n\
         log: {}\n\
         panic: action=fatal\n\
         error: action=ignore\n\
         info: action=report\n\
         debug: action=ignore\n",
        bios.display(),
        video.display(),
        scratch.join("log").display()
    ))
}

/// What Bochs logged last, where it stopped: its own panics stand there.
pub fn last_words(scratch: &Path) -> String {
    let log = fs::read(scratch.join("log")).unwrap_or_default();
    let text = String::from_utf8_lossy(&log);
    let lines: Vec<&str> = text.lines().collect();
    format!("\nBochs:\n{}\n", lines[lines.len().saturating_sub(20)..].join("\n"))
}

#[cfg(test)]
#[path = "bochs_test.rs"]
mod tests;
