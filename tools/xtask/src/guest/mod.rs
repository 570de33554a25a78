//! The Linux guest: Debian's own cloud kernel, and an initramfs of busybox with our `/init` and scripts; a second one has
//! perf, gdb and msr-tools, too.

use self::kernels::Which;
use crate::packages::{find_program, is_static_program};
use crate::progress::Stage;
use crate::tree;
use anyhow::{Context, Result, ensure};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

pub mod bochs;
mod debian;
mod debug;
pub mod kernels;
pub mod rr;
mod tools;
mod work;
pub mod xen;
// The same file as in the VMM's library, by its path: what fetches and starts everything is not to wait for the engine.
#[path = "../../../../vmm/machine/src/newc.rs"]
mod newc;

/// The script that a guest without a terminal runs in `cargo xtask demo`.
pub const DEMO_SCRIPT: &str = "demo";

/// `/init`, and what can be named by `minivmm.script=` on the kernel's command line.
const INIT: &str = include_str!("../../../../guest-tests/linux/init");
const SHELL_RC: &str = include_str!("../../../../guest-tests/linux/shrc");
/// Commands of ours.
const COMMANDS: [(&str, &str); 2] = [
    ("collect", include_str!("../../../../guest-tests/linux/collect")),
    (
        "load-modules",
        include_str!("../../../../guest-tests/linux/load-modules"),
    ),
];
const SCRIPTS: [(&str, &str); 6] = [
    (DEMO_SCRIPT, include_str!("../../../../guest-tests/linux/scripts/demo")),
    (
        "selftest",
        include_str!("../../../../guest-tests/linux/scripts/selftest"),
    ),
    ("smp", include_str!("../../../../guest-tests/linux/scripts/smp")),
    ("net", include_str!("../../../../guest-tests/linux/scripts/net")),
    ("nothing", include_str!("../../../../guest-tests/linux/scripts/nothing")),
    (
        "watchdog",
        include_str!("../../../../guest-tests/linux/scripts/watchdog"),
    ),
];

/// The kernel's modules that drive our devices, in the order in which they can be loaded, and where the kernel's package has
/// them below its folder of modules.
const MODULES: [(&str, &str); 12] = [
    ("virtio_ring.ko", "kernel/drivers/virtio/virtio_ring.ko"),
    ("virtio.ko", "kernel/drivers/virtio/virtio.ko"),
    ("virtio_mmio.ko", "kernel/drivers/virtio/virtio_mmio.ko"),
    (
        "virtio_pci_legacy_dev.ko",
        "kernel/drivers/virtio/virtio_pci_legacy_dev.ko",
    ),
    (
        "virtio_pci_modern_dev.ko",
        "kernel/drivers/virtio/virtio_pci_modern_dev.ko",
    ),
    ("virtio_pci.ko", "kernel/drivers/virtio/virtio_pci.ko"),
    ("failover.ko", "kernel/net/core/failover.ko"),
    ("net_failover.ko", "kernel/drivers/net/net_failover.ko"),
    ("virtio_net.ko", "kernel/drivers/net/virtio_net.ko"),
    ("virtio_console.ko", "kernel/drivers/char/virtio_console.ko"),
    ("virtio_blk.ko", "kernel/drivers/block/virtio_blk.ko"),
    ("virtio-rng.ko", "kernel/drivers/char/hw_random/virtio-rng.ko"),
];

/// Modules that the tools want: /dev/cpu/N/msr and /dev/cpu/N/cpuid.
const TOOL_MODULES: [(&str, &str); 2] = [
    ("msr.ko", "kernel/arch/x86/kernel/msr.ko"),
    ("cpuid.ko", "kernel/arch/x86/kernel/cpuid.ko"),
];

/// KVM's modules, for the hosts in the labs.
const KVM_MODULES: [(&str, &str); 4] = [
    ("irqbypass.ko", "kernel/virt/lib/irqbypass.ko"),
    ("kvm.ko", "kernel/arch/x86/kvm/kvm.ko"),
    ("kvm-amd.ko", "kernel/arch/x86/kvm/kvm-amd.ko"),
    ("kvm-intel.ko", "kernel/arch/x86/kvm/kvm-intel.ko"),
];

/// What a guest mounts shared directories with.
const SHARE_MODULES: [(&str, &str); 6] = [
    ("fuse.ko", "kernel/fs/fuse/fuse.ko"),
    ("virtiofs.ko", "kernel/fs/fuse/virtiofs.ko"),
    ("overlay.ko", "kernel/fs/overlayfs/overlay.ko"),
    // For QEMU, which the benchmark compares with.
    (
        "virtio_pci_modern_dev.ko",
        "kernel/drivers/virtio/virtio_pci_modern_dev.ko",
    ),
    (
        "virtio_pci_legacy_dev.ko",
        "kernel/drivers/virtio/virtio_pci_legacy_dev.ko",
    ),
    ("virtio_pci.ko", "kernel/drivers/virtio/virtio_pci.ko"),
];

/// What a kernel says that it panics with.
const PANIC_MODULES: [(&str, &str); 2] = [
    ("pvpanic.ko", "kernel/drivers/misc/pvpanic/pvpanic.ko"),
    ("pvpanic-mmio.ko", "kernel/drivers/misc/pvpanic/pvpanic-mmio.ko"),
];

/// All modules that are taken from the kernel's package.
fn all_modules() -> impl Iterator<Item = (&'static str, &'static str)> {
    MODULES
        .into_iter()
        .chain(TOOL_MODULES)
        .chain(KVM_MODULES)
        .chain(SHARE_MODULES)
        .chain(PANIC_MODULES)
}

/// The files a guest boots from.
pub struct Guest {
    /// A bzImage.
    pub kernel: PathBuf,
    /// A newc archive.
    pub initrd: PathBuf,
}

/// `cargo xtask guest`'s options.
#[derive(clap::Args)]
pub struct GuestOptions {
    /// Without perf, gdb and msr-tools
    #[arg(long)]
    no_tools: bool,
    /// With the programs of the workloads: fetches 60 MB
    #[arg(long)]
    work: bool,
    /// With Debian's vmlinux and the kernel's own scripts for gdb: fetches 440 MB
    #[arg(long)]
    debug: bool,
    /// With the oldest and the newest of Debian's kernels and one for 32-bit CPUs: fetches 150 MB
    #[arg(long)]
    kernels: bool,
    /// With a kernel of each series that Debian has, for 64-bit and 32-bit CPUs: fetches 500 MB and keeps 200 MB
    #[arg(long)]
    all_kernels: bool,
}

/// `cargo xtask guest`: makes the files and says where they are.
pub fn run(options: &GuestOptions) -> Result<ExitCode> {
    let stage = Stage::start("guest");
    let mut guest = prepare(&stage)?;
    let debug = if options.debug {
        Some(with_debug(&stage, &mut guest)?)
    } else {
        None
    };
    let tools = if options.no_tools {
        None
    } else {
        Some(with_tools(&stage, &guest)?)
    };
    if !options.no_tools {
        xen::prepare(&stage)?;
        rr::prepare(&stage)?;
    }
    let which = match options {
        GuestOptions { all_kernels: true, .. } => Some(Which::All),
        GuestOptions { kernels: true, .. } => Some(Which::Ends),
        _ => None,
    };
    let kernels = match which {
        Some(which) => with_kernels(&stage, which)?,
        None => Vec::new(),
    };
    let work = if options.work {
        Some(with_work(&stage, &guest)?)
    } else {
        None
    };
    stage.end("ok");
    println!("{}\n{}", guest.kernel.display(), guest.initrd.display());
    if let Some(tools) = tools {
        println!("{}", tools.initrd.display());
    }
    if let Some(work) = work {
        println!("{}", work.initrd.display());
    }
    if let Some(folder) = debug {
        println!("{}", folder.join("vmlinux").display());
        println!("{}", folder.join("vmlinux-gdb.py").display());
    }
    for kernel in kernels {
        println!("{}", kernel.display());
    }
    Ok(ExitCode::SUCCESS)
}

/// Everything that a kernel developer has beside the guest's kernel, and the folder of it. Where Debian has no debug symbols of that
/// kernel any more, its newest takes the kernel's place.
pub fn with_debug(stage: &Stage, guest: &mut Guest) -> Result<PathBuf> {
    if !debug::can_be_had(stage, &guest.kernel)? {
        stage.say("Debian has no debug symbols of this kernel any more: fetching its newest kernel");
        let folder = tree::target().join("guest");
        debian::newest_kernel_of_all(stage, &folder.join("vmlinuz"), &folder.join("modules"))?;
        *guest = prepare(stage)?;
    }
    debug::prepare(stage, &guest.kernel)
}

/// Kernels that are older and newer than the guest's.
pub fn with_kernels(stage: &Stage, which: Which) -> Result<Vec<PathBuf>> {
    kernels::prepare(stage, &tree::target().join("guest/kernels"), which)
}

/// The same guest with perf, gdb, msr-tools and small programs to trace, in an initramfs of its own.
pub fn with_tools(stage: &Stage, guest: &Guest) -> Result<Guest> {
    let folder = tree::target().join("guest");
    let archive = tools::archive(stage, &folder)?;
    let mut bytes = fs::read(&guest.initrd).with_context(|| format!("cannot read {}", guest.initrd.display()))?;
    // Linux unpacks one archive after the other into the same root.
    bytes.extend(archive);
    let initrd = folder.join("initramfs-tools.cpio");
    write_changed(&initrd, &bytes)?;
    Ok(Guest {
        kernel: guest.kernel.clone(),
        initrd,
    })
}

/// The guest with the tools and, behind them, the programs that the workloads run.
pub fn with_work(stage: &Stage, guest: &Guest) -> Result<Guest> {
    let folder = tree::target().join("guest");
    let tools = with_tools(stage, guest)?;
    let mut bytes = fs::read(&tools.initrd).with_context(|| format!("cannot read {}", tools.initrd.display()))?;
    bytes.extend(work::archive(stage, &folder)?);
    let initrd = folder.join("initramfs-work.cpio");
    write_changed(&initrd, &bytes)?;
    Ok(Guest {
        kernel: guest.kernel.clone(),
        initrd,
    })
}

/// Makes the guest's files, or finds them made. Works without a network once the packages have been fetched.
pub fn prepare(stage: &Stage) -> Result<Guest> {
    let folder = tree::target().join("guest");
    fs::create_dir_all(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
    let (kernel, modules) = (folder.join("vmlinuz"), folder.join("modules"));
    let complete = || all_modules().all(|(name, _)| modules.join(name).is_file());
    if !kernel.is_file() || !complete() {
        debian::kernel(stage, &kernel, &modules)?;
    }
    debian::keep_for_run(&kernel)?;
    let busybox = folder.join("busybox");
    if !busybox.is_file() {
        match find_program("busybox").filter(|file| is_static_program(file)) {
            Some(installed) => fs::copy(&installed, &busybox)
                .map(drop)
                .context("cannot copy busybox")?,
            None => debian::busybox(stage, &busybox)?,
        }
    }
    ensure!(
        is_static_program(&busybox),
        "{} is not a static program",
        busybox.display()
    );
    stage.say("packing the initramfs");
    let initrd = folder.join("initramfs.cpio");
    write_changed(&initrd, &initramfs(&busybox, &modules)?)?;
    write_changed(&folder.join("sample"), &sample())?;
    Ok(Guest { kernel, initrd })
}

/// Writes a file in one step, and only where it differs: tests in other processes may be reading it.
fn write_changed(path: &Path, bytes: &[u8]) -> Result<()> {
    if fs::read(path).is_ok_and(|there| there == bytes) {
        return Ok(());
    }
    let part = path.with_extension(format!("new-{}", std::process::id()));
    fs::write(&part, bytes).with_context(|| format!("cannot write {}", part.display()))?;
    fs::rename(&part, path).with_context(|| format!("cannot write {}", path.display()))
}

/// Packs the initramfs.
fn initramfs(busybox: &Path, modules: &Path) -> Result<Vec<u8>> {
    let program = fs::read(busybox).with_context(|| format!("cannot read {}", busybox.display()))?;
    let output = Command::new(busybox).arg("--list").output();
    let output = output.with_context(|| format!("cannot run {}", busybox.display()))?;
    let applets = String::from_utf8_lossy(&output.stdout).into_owned();
    ensure!(
        applets.lines().any(|name| name == "cttyhack"),
        "this busybox lacks cttyhack: use Debian's busybox-static"
    );
    let module = |name: &str| {
        let file = modules.join(name);
        fs::read(&file).with_context(|| format!("cannot read {}", file.display()))
    };
    let modules = MODULES.iter().map(|(name, _)| Ok((*name, module(name)?)));
    Ok(pack(&program, applets.lines(), &modules.collect::<Result<Vec<_>>>()?))
}

/// The archive: one program under all its names, our files, and the mount points.
fn pack<'a>(busybox: &[u8], applets: impl Iterator<Item = &'a str>, modules: &[(&str, Vec<u8>)]) -> Vec<u8> {
    let mut archive = newc::Archive::default();
    for folder in ["bin", "dev", "etc", "modules", "proc", "root", "scripts", "sys", "tmp"] {
        archive.folder(folder);
    }
    // The kernel opens /dev/console for /init before anything could have mounted /dev.
    archive.device("dev/console", 5, 1);
    archive.file("init", 0o755, INIT.as_bytes());
    archive.file("etc/shrc", 0o644, SHELL_RC.as_bytes());
    archive.file("sample", 0o644, &sample());
    for (name, text) in SCRIPTS {
        archive.file(format!("scripts/{name}"), 0o755, text.as_bytes());
    }
    for (name, text) in COMMANDS {
        archive.file(format!("bin/{name}"), 0o755, text.as_bytes());
    }
    for (name, module) in modules {
        archive.file(format!("modules/{name}"), 0o644, module);
    }
    let order: String = modules.iter().map(|(name, _)| format!("{name}\n")).collect();
    archive.file("modules/order", 0o644, order.as_bytes());
    archive.file("bin/busybox", 0o755, busybox);
    for name in applets.filter(|name| *name != "busybox") {
        archive.link(format!("bin/{name}"), "busybox");
    }
    archive.finish()
}

/// A file whose contents both sides know: half of it repeats, half does not, so that gzip has something of each to do.
fn sample() -> Vec<u8> {
    let mut state = 0x2545_f491_4f6c_dd1d_u64;
    let mut bytes = Vec::with_capacity(256 << 10);
    while bytes.len() < 256 << 10 {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        bytes.extend_from_slice(&state.to_le_bytes());
        bytes.extend_from_slice(b"minivmm\n");
    }
    bytes
}

#[cfg(test)]
#[path = "guest_test.rs"]
mod tests;
