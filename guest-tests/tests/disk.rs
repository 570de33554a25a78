//! Disks, and files in and out, in a booted Linux. What the guest does is `run` in a folder that `--inject` gives it.

use guest_tests::{Outcome, linux, linux_in_minivmm, run, start};
use std::fs;
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

const LIMIT: Duration = Duration::from_secs(500);
const MIB: usize = 1 << 20;

/// A folder of a test's own, removed with all that is in it.
struct Folder(PathBuf);

impl Folder {
    fn new() -> Self {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let path = std::env::temp_dir().join(format!("minivmm-disk-test-{}-{count}", std::process::id()));
        fs::create_dir_all(path.join("inject")).unwrap();
        Folder(path)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    /// What the guest shall do.
    fn script(&self, name: &str, text: &str) {
        let path = self.path("inject").join(name);
        fs::write(&path, format!("#!/bin/sh\n{text}\n")).unwrap();
        fs::set_permissions(path, fs::Permissions::from_mode(0o755)).unwrap();
    }

    fn disk(&self, name: &str, bytes: &[u8]) {
        fs::write(self.path(name), bytes).unwrap();
    }

    fn read(&self, name: &str) -> Vec<u8> {
        fs::read(self.path(name)).unwrap()
    }

    /// minivmm, started in this folder.
    fn boot(&self, options: &[&str]) -> Command {
        let mut command = linux_in_minivmm("console=ttyS0 panic=-1 quiet");
        command.args(["--inject", "inject"]).args(options).current_dir(&self.0);
        command
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Bytes that do not repeat.
fn pattern(len: usize, seed: u64) -> Vec<u8> {
    let mut state = seed;
    let word = |_| {
        state = state
            .wrapping_mul(0x5851_f42d_4c95_7f2d)
            .wrapping_add(0x1405_7b7e_f767_814f);
        (state ^ state >> 29).to_le_bytes()
    };
    (0..len.div_ceil(8)).flat_map(word).take(len).collect()
}

#[track_caller]
fn holds(guest: &Outcome) {
    assert!(
        guest.console.contains("\nall holds\n"),
        "{}\n{}",
        guest.console,
        guest.errors
    );
    for word in ["I/O error", "Oops", "BUG:", "WARNING:", "Call Trace"] {
        assert!(!guest.console.contains(word), "{word}\n{}", guest.console);
    }
}

// covers: devices/virtio-blk, devices/virtio-blk-power-cut
#[test]
fn what_was_synced_outlives_a_power_cut() {
    let folder = Folder::new();
    folder.disk("fs", &vec![0; 8 * MIB]);
    folder.disk("raw", &pattern(2 * MIB, 1));
    let disks = ["--disk", "fs", "--disk", "raw"];
    folder.script(
        "run",
        r#"set -e
        mke2fs /dev/vda >/tmp/log
        mkdir /mnt
        mount /dev/vda /mnt
        mkdir /mnt/folder
        cp /sample /mnt/folder/sample
        # Overwritten in part, out of order.
        dd if=/dev/vdb of=/tmp/first bs=4k count=16
        dd if=/tmp/first of=/dev/vdb bs=512 seek=2001 conv=notrunc
        dd if=/sample of=/dev/vdb bs=4k count=1 seek=1 conv=notrunc
        sync
        echo "synced"
        # Not synced: nobody may count on it, and nothing else may suffer.
        while :; do echo more >>/mnt/more; done"#,
    );
    let mut running = start(&mut folder.boot(&disks), LIMIT);
    let synced = running.wait_for("\nsynced\n");
    std::thread::sleep(Duration::from_millis(200));
    // SIGKILL.
    running.kill();
    assert!(synced.is_some());

    let sample = fs::read(&linux().sample).unwrap();
    let mut expected = pattern(2 * MIB, 1);
    let first = expected[..64 << 10].to_vec();
    expected[2001 * 512..][..64 << 10].copy_from_slice(&first);
    expected[4096..8192].copy_from_slice(&sample[..4096]);
    assert!(folder.read("raw") == expected);

    folder.script(
        "run",
        "mkdir /mnt && mount -o ro /dev/vda /mnt && cmp /sample /mnt/folder/sample && echo && echo all holds",
    );
    holds(&run(&mut folder.boot(&disks), LIMIT).must_end_with(0));
    assert!(folder.read("raw") == expected, "and reading changes nothing");
}

// covers: devices/virtio-blk-overlay-readonly
#[test]
fn an_overlay_and_a_readonly_disk_leave_their_files_alone() {
    let folder = Folder::new();
    let (first, second) = (pattern(4 * MIB, 2), pattern(MIB + 100, 3));
    folder.disk("first", &first);
    folder.disk("second", &second);
    folder.script(
        "run",
        r#"fail() { echo "FAILED: $*"; exit 1; }
        [ "$(cat /sys/block/vda/ro /sys/block/vdb/ro | tr '\n' ' ')" = "0 1 " ] || fail "ro"
        [ "$(cat /sys/block/vda/size /sys/block/vdb/size | tr '\n' ' ')" = "8192 2049 " ] || fail "size"
        [ "$(cat /sys/block/vdb/serial)" = minivmm-1 ] || fail "serial"
        md5sum /dev/vdb
        mke2fs /dev/vda >/tmp/log && mkdir /mnt && mount /dev/vda /mnt || fail "mount"
        cp /sample /mnt && sync && umount /mnt && mount /dev/vda /mnt || fail "again"
        cmp /sample /mnt/sample || fail "differs"
        dd if=/sample of=/dev/vdb count=1 2>/tmp/log && fail "the second disk was written"
        echo; echo all holds"#,
    );
    let disks = ["--disk", "first,overlay", "--disk", "second,readonly"];
    let guest = run(&mut folder.boot(&disks), LIMIT).must_end_with(0);
    holds(&guest);
    assert!(folder.read("first") == first && folder.read("second") == second);
    // The last sector is a partial one in the file and a whole one in the guest.
    let mut whole = second.clone();
    whole.resize(2049 * 512, 0);
    folder.disk("whole", &whole);
    let sum = Command::new("md5sum").arg(folder.path("whole")).output().unwrap();
    let sum = String::from_utf8(sum.stdout).unwrap();
    assert!(
        guest.console.contains(sum.split(' ').next().unwrap()),
        "{}",
        guest.console
    );
}

// covers: bad-input/disk-io-error
#[test]
fn a_write_that_fails_is_an_error_in_the_guest() {
    let folder = Folder::new();
    // 128 MiB of zeroes that take no space, and one block with something in it.
    let file = fs::File::create_new(folder.path("disk")).unwrap();
    file.set_len(128 << 20).unwrap();
    file.write_all_at(&[7; MIB], 100 << 20).unwrap();
    folder.script(
        "run",
        r#"dd if=/sample of=/dev/vda bs=64k seek=16 count=1 conv=fsync && echo "below the limit: ok"
        dd if=/sample of=/dev/vda bs=64k seek=1600 count=1 conv=fsync || echo "above the limit: an error"
        echo 3 >/proc/sys/vm/drop_caches
        [ "$(dd if=/dev/vda bs=64k skip=1600 count=1 | tr -d '\007' | wc -c)" = 0 ] && echo "what was there is still there""#,
    );
    let vm = folder.boot(&["--disk", "disk"]);
    // The system refuses to write behind the first 96 MiB of a file.
    let mut limited = Command::new("bash");
    limited
        .args(["-c", "ulimit -f 98304 && exec \"$0\" \"$@\""])
        .arg(vm.get_program())
        .args(vm.get_args());
    let guest = run(limited.current_dir(&folder.0), LIMIT).must_end_with(0);
    for line in [
        "below the limit: ok",
        "above the limit: an error",
        "what was there is still there",
        "I/O error",
    ] {
        assert!(guest.console.contains(line), "{line}\n{}", guest.console);
    }
    assert_eq!(
        guest.errors,
        "minivmm: --disk disk: writing: file too large; the guest sees an I/O error\n"
    );
    let mut bytes = [0; 64 << 10];
    file_at(&folder, MIB as u64, &mut bytes);
    assert!(bytes[..] == fs::read(&linux().sample).unwrap()[..64 << 10]);
    file_at(&folder, 100 << 20, &mut bytes);
    assert!(bytes == [7; 64 << 10]);
}

/// Reads from the middle of a disk.
fn file_at(folder: &Folder, offset: u64, bytes: &mut [u8]) {
    let file = fs::File::open(folder.path("disk")).unwrap();
    file.read_exact_at(bytes, offset).unwrap();
}

/// All files below a folder with contents and permission bits, by name.
fn tree(root: &Path) -> Vec<(String, Vec<u8>, u32)> {
    fn walk(root: &Path, at: &Path, found: &mut Vec<(String, Vec<u8>, u32)>) {
        for entry in fs::read_dir(at).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                walk(root, &path, found);
                continue;
            }
            let name = path.strip_prefix(root).unwrap().display().to_string();
            let mode = fs::metadata(&path).unwrap().permissions().mode() & 0o777;
            found.push((name, fs::read(&path).unwrap(), mode));
        }
    }
    let mut found = Vec::new();
    walk(root, root, &mut found);
    found.sort();
    found
}

// covers: cli/inject-machine, cli/collect-machine
#[test]
fn a_tree_goes_in_and_comes_out() {
    let folder = Folder::new();
    let inject = folder.path("inject");
    fs::create_dir_all(inject.join("deep/er")).unwrap();
    fs::write(inject.join("deep/er/noise"), pattern(300_001, 4)).unwrap();
    fs::write(
        inject.join("deep/lines"),
        "\r\n\n\r\u{3}\u{4}\u{11}\u{13}\n".repeat(100),
    )
    .unwrap();
    fs::write(inject.join("all bytes"), (0..=255).collect::<Vec<u8>>()).unwrap();
    fs::write(inject.join("empty"), "").unwrap();
    // The first process is ours, and then the guest's own.
    folder.script("init", "echo \"hook: process $$\"\nexec /init");
    folder.script(
        "run",
        "collect /inject && echo && echo all holds\nmkdir -p /out/later && cp /sample /out/later && collect /out",
    );
    let guest = run(&mut folder.boot(&["--collect", "out"]), LIMIT).must_end_with(0);
    assert!(guest.console.contains("hook: process 1\n"), "{}", guest.console);
    holds(&guest);
    let later = fs::read(folder.path("out/later/sample")).unwrap();
    assert!(later == fs::read(&linux().sample).unwrap());
    fs::remove_dir_all(folder.path("out/later")).unwrap();
    let (sent, came) = (tree(&inject), tree(&folder.path("out")));
    let names = |tree: &[(String, Vec<u8>, u32)]| tree.iter().map(|(name, ..)| name.clone()).collect::<Vec<_>>();
    assert_eq!(names(&came), names(&sent));
    assert!(came == sent);
    assert_eq!(guest.errors, "", "nothing was refused");
}

// covers: devices/virtio-rng, devices/virtio-determinism
#[test]
fn entropy_and_disks_repeat_with_the_seed() {
    let folder = Folder::new();
    folder.disk("disk", &pattern(4 * MIB, 5));
    folder.script(
        "run",
        r#"echo "entropy: $(dd if=/dev/hwrng bs=64 count=1 2>/tmp/log | md5sum)"
        mke2fs /dev/vda >/tmp/log && mkdir /mnt && mount /dev/vda /mnt && cp /sample /mnt && sync
        echo "device: $(cat /sys/class/misc/hw_random/rng_current)"
        echo; echo all holds"#,
    );
    let boot = |seed: &str| {
        let options = ["--disk", "disk,overlay", "--seed", seed, "--stats"];
        let guest = run(&mut folder.boot(&options), LIMIT).must_end_with(0);
        holds(&guest);
        assert!(guest.console.contains("device: virtio_rng"), "{}", guest.console);
        let hash = guest
            .errors
            .lines()
            .find(|line| line.starts_with("state hash:"))
            .unwrap();
        (guest.fact("entropy:").unwrap().to_string(), hash.to_string())
    };
    let (first, second, other) = (boot("7"), boot("7"), boot("8"));
    assert_eq!(first, second);
    assert_ne!(first.0, other.0);
}
