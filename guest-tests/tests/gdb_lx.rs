//! The kernel's own scripts for gdb on a running Linux guest, with Debian's vmlinux moved to where KASLR has put the kernel.

use std::path::PathBuf;

use guest_tests::gdb::{Guest, says};
use guest_tests::{full, linux, target};

const CMDLINE: &str = "console=ttyS0 quiet panic=-1";

/// The folder with vmlinux and the scripts of the guest's kernel, which has its release in its header.
fn debug() -> PathBuf {
    let folder = target().join("guest/debug");
    let kernel = std::fs::read(&linux().kernel).unwrap();
    let header = &kernel[..kernel.len().min(64 << 10)];
    let folders = std::fs::read_dir(&folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
    let is_of_it = |folder: &PathBuf| {
        let release = folder.file_name().unwrap().as_encoded_bytes();
        header.windows(release.len()).any(|word| word == release)
    };
    let found = folders.map(|entry| entry.unwrap().path()).find(is_of_it);
    found.unwrap_or_else(|| panic!("{}: nothing of {}", folder.display(), linux().kernel.display()))
}

/// What gdb says where the kernel is about to run /init, with a slide of KASLR's if it has one.
fn at_init(cmdline: &str, script: &str) -> String {
    let initrd = linux().initrd.to_str().unwrap();
    let options = ["--initrd", initrd, "--cmdline", cmdline, "--serial", "null", "--paused"];
    let guest = Guest::start(&linux().kernel, &options);
    let symbols = debug().join("vmlinux");
    // The monitor looks for the kernel at its linear addresses, where it is after a while.
    let said = guest.gdb(&format!(
        "set auto-load python-scripts off
python
import re
gdb.execute('monitor run-to 600000000')
said = gdb.execute('monitor kaslr', to_string=True)
slide = re.search(r'add-symbol-file vmlinux -o (0x[0-9a-f]+)', said).group(1)
gdb.execute('symbol-file {} -o ' + slide)
print('moved', int(slide, 16) != 0)
end
hbreak run_init_process
continue
{script}
kill
",
        symbols.display()
    ));
    guest.finish();
    said
}

// covers: gdb/lx
#[test]
fn the_kernel_s_own_scripts_read_a_guest() {
    if !full() {
        println!("left out: the kernel's scripts for gdb, which the full form fetches with Debian's vmlinux");
        return;
    }
    let scripts = format!("source {}\n", debug().join("vmlinux-gdb.py").display());
    let moved = at_init(
        CMDLINE,
        &(scripts.clone() + "lx-version\nlx-cmdline\nlx-ps\nlx-dmesg\nlx-mounts"),
    );
    says(
        &moved,
        &[
            "moved True",
            "run_init_process (init_filename=",
            "/init",
            "Linux version 6.1.",
            CMDLINE,
            "swapper/0",
            "kthreadd",
            "Command line: ",
            "rootfs / ",
        ],
    );
    // Those of variables of each CPU take the symbols' addresses for offsets, so they want a kernel that is where it was linked.
    let script = scripts + "p $lx_current().pid\np $lx_per_cpu(\"cpu_number\")\np $lx_per_cpu(\"runqueues\").curr->pid";
    let linked = at_init(&format!("{CMDLINE} nokaslr"), &script);
    says(&linked, &["moved False", "$1 = 1\n", "$2 = 0\n", "$3 = 1\n"]);
}
