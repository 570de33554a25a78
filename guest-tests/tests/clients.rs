//! Programs as people have them, in a guest with the host's files and network: a file system exerciser, rsync, git, curl and apt. What they
//! leave is judged on the host, and sessions of them are replayed and run backwards.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsStr;
use std::fs;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::{Read, Write};
use std::net::TcpListener;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::thread;
use std::time::Duration;

use guest_tests::{FSX, Folder, Outcome, full, linux, linux_in_minivmm, minivmm, run, skipped, start, target};

const LIMIT: Duration = Duration::from_secs(580);

/// Whether the host has a program that a guest is to run, or a test needs; it is said where not.
fn is_missing(test: &str, program: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let there = std::env::split_paths(&path).any(|folder| folder.join(program).is_file());
    if !there {
        skipped(test, &format!("there is no {program} here"));
    }
    !there
}

/// `minivmm run` of a shell's script in this folder.
fn shell(folder: &Path, script: &str) -> Output {
    let mut command = Command::new(minivmm());
    command
        .args(["run", "--kernel"])
        .arg(&linux().kernel)
        .args(["--", "sh", "-ec", script]);
    command.current_dir(folder).stdin(Stdio::null()).output().unwrap()
}

#[track_caller]
fn succeeds(output: &Output) -> String {
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{}: {errors}", output.status);
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// A Linux with busybox that runs this script with the modules of shared directories, in a folder of the test's.
fn guest(folder: &Folder, script: &str, options: &[&str]) -> Command {
    let inject = folder.join("inject");
    fs::create_dir_all(&inject).unwrap();
    let modules = ["fuse.ko", "virtiofs.ko", "overlay.ko"];
    for module in modules {
        fs::copy(target().join("guest/modules").join(module), inject.join(module)).unwrap();
    }
    let load: String = modules
        .iter()
        .map(|module| format!("insmod {module} || exit 1\n"))
        .collect();
    folder.script("inject/run", &format!("#!/bin/sh\nload-modules\n{load}{script}\n"));
    let mut command = linux_in_minivmm("console=ttyS0 panic=-1 quiet");
    command
        .args(["--inject", "inject"])
        .args(options)
        .current_dir(&**folder);
    command
}

/// The line of `--stats` with the machine's hash.
#[track_caller]
fn hash(outcome: &Outcome) -> String {
    let line = outcome.errors.lines().find(|line| line.starts_with("state hash:"));
    line.unwrap_or_else(|| panic!("{}", outcome.errors)).into()
}

fn fnv(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3)
    })
}

// covers: share/fsx, devices/disk-fsx
#[test]
fn random_operations_come_out_alike_in_memory_on_a_disk_and_on_shares() {
    let folder = Folder::new("fsx");
    let (seeds, operations) = if full() { (8, 20_000) } else { (2, 1_500) };
    fs::create_dir_all(folder.join("inject")).unwrap();
    fs::copy(FSX, folder.join("inject/fsx")).unwrap();
    for name in ["written", "kept"] {
        fs::create_dir(folder.join(name)).unwrap();
    }
    fs::write(folder.join("disk"), vec![0; 16 << 20]).unwrap();
    fs::write(folder.join("disk.raw"), vec![0; 16 << 20]).unwrap();
    let made = Command::new("qemu-img")
        .args(["convert", "-q", "-O", "qcow2", "disk.raw", "disk.qcow2"])
        .current_dir(&*folder)
        .status();
    assert!(made.expect("qemu-img (Debian: qemu-utils)").success());
    let script = format!(
        "set -e
        for tag in written kept; do mkdir /$tag; mount -t virtiofs $tag /$tag; done
        for disk in vda vdb; do mke2fs /dev/$disk >/dev/null; mkdir /$disk; mount /dev/$disk /$disk; done
        mkdir /memory; mount -t tmpfs memory /memory
        chmod +x fsx
        for seed in $(seq {seeds}); do
            for folder in memory vda vdb written kept; do
                echo \"$folder $seed $(./fsx /$folder/file$seed $seed {operations} || echo stopped)\"
            done
        done
        # What has been forgotten in memory is read again.
        for folder in vda vdb written kept; do
            umount /$folder
            case $folder in vd*) mount /dev/$folder /$folder;; *) mount -t virtiofs $folder /$folder;; esac
            for seed in $(seq {seeds}); do cmp /memory/file$seed /$folder/file$seed || echo FAILED $folder $seed; done
        done
        echo all is compared"
    );
    let options = [
        "--share",
        "written=written",
        "--share",
        "kept=kept,overlay",
        "--disk",
        "disk",
    ];
    let more = ["--disk", "disk.qcow2,format=qcow2"];
    let outcome = run(&mut guest(&folder, &script, &[&options[..], &more].concat()), LIMIT).must_end_with(0);
    let console = &outcome.console;
    assert!(
        console.contains("\nall is compared\n") && !console.contains("FAILED"),
        "{console}"
    );
    for seed in 1..=seeds {
        let said = |name: &str| {
            let key = format!("{name} {seed} fsx: {operations} operations, ");
            let line = console.lines().find_map(|line| line.strip_prefix(&key));
            line.unwrap_or_else(|| panic!("no {key}: {console}")).to_string()
        };
        let memory = said("memory");
        for name in ["vda", "vdb", "written", "kept"] {
            assert_eq!(said(name), memory, "{name}, seed {seed}");
        }
        let here = fs::read(folder.join("written").join(format!("file{seed}"))).unwrap();
        assert_eq!(
            format!("{} bytes, hash {:016x}", here.len(), fnv(&here)),
            memory,
            "seed {seed}, on the host"
        );
    }
    assert_eq!(
        fs::read_dir(folder.join("kept")).unwrap().count(),
        0,
        "the overlay is the guest's"
    );
    for disk in ["disk", "disk.qcow2"] {
        if disk.ends_with("qcow2") {
            let arguments = ["convert", "-f", "qcow2", "-O", "raw", "disk.qcow2", "disk"];
            assert!(
                Command::new("qemu-img")
                    .args(arguments)
                    .current_dir(&*folder)
                    .status()
                    .unwrap()
                    .success()
            );
        }
        let check = Command::new("e2fsck")
            .args(["-fn", "disk"])
            .current_dir(&*folder)
            .output()
            .unwrap();
        assert!(
            check.status.success(),
            "{disk}: {}",
            String::from_utf8_lossy(&check.stdout)
        );
    }
}

/// Of a file: kind and mode, size, time, and contents or where it leads.
type Inode = (u32, u64, (i64, i64), Vec<u8>);

fn digest(bytes: &[u8]) -> u64 {
    let mut hasher = DefaultHasher::new();
    bytes.hash(&mut hasher);
    hasher.finish()
}

/// Two trees are alike, or the first few paths are told in which they are not.
#[track_caller]
fn alike(one: &Path, other: &Path) {
    let (one, other) = (tree(one), tree(other));
    let paths: BTreeSet<&PathBuf> = one.keys().chain(other.keys()).collect();
    let of = |tree: &BTreeMap<PathBuf, Inode>, path| {
        let (mode, size, time, bytes) = tree.get(path)?;
        Some((*mode, *size, *time, bytes.len(), digest(bytes)))
    };
    let differ: Vec<String> = paths
        .into_iter()
        .filter(|path| one.get(*path) != other.get(*path))
        .map(|path| format!("{}: {:x?} and {:x?}", path.display(), of(&one, path), of(&other, path)))
        .collect();
    assert!(
        differ.is_empty(),
        "{} paths differ:\n{}",
        differ.len(),
        differ[..differ.len().min(10)].join("\n")
    );
}

/// What a tree is made of, by the path below it.
fn tree(folder: &Path) -> BTreeMap<PathBuf, Inode> {
    let (mut found, mut open) = (BTreeMap::new(), vec![folder.to_path_buf()]);
    while let Some(path) = open.pop() {
        let meta = path.symlink_metadata().unwrap();
        let time = (meta.mtime(), meta.mtime_nsec());
        let (size, bytes) = match (meta.is_dir(), meta.is_symlink()) {
            (true, _) => {
                open.extend(fs::read_dir(&path).unwrap().map(|entry| entry.unwrap().path()));
                (0, Vec::new())
            }
            (_, true) => (0, fs::read_link(&path).unwrap().as_os_str().as_bytes().to_vec()),
            _ => (meta.len(), fs::read(&path).unwrap()),
        };
        found.insert(
            path.strip_prefix(folder).unwrap().into(),
            (meta.mode(), size, time, bytes),
        );
    }
    found
}

// covers: share/rsync
#[test]
fn rsync_copies_a_tree_from_a_share_to_a_share() {
    const TEST: &str = "rsync_copies_a_tree_from_a_share_to_a_share";
    if is_missing(TEST, "rsync") {
        return;
    }
    let folder = Folder::new("rsync");
    let from = folder.join("from");
    fs::create_dir_all(folder.join("to")).unwrap();
    for number in 0..if full() { 4_000 } else { 200 } {
        let below = from.join(format!("d{}/e{}", number % 17, number % 5));
        fs::create_dir_all(&below).unwrap();
        let file = below.join(format!("file {number}"));
        fs::write(&file, format!("{number} ").repeat(number * 7 % 3000)).unwrap();
        fs::set_permissions(
            &file,
            fs::Permissions::from_mode([0o644, 0o600, 0o755, 0o444][number % 4]),
        )
        .unwrap();
    }
    fs::create_dir(from.join("empty")).unwrap();
    fs::write(from.join(OsStr::from_bytes(b"not \xff UTF-8\n")), "name").unwrap();
    symlink("d1/e1", from.join("to e1")).unwrap();
    symlink("/nowhere/at/all", from.join("dangling")).unwrap();
    fs::hard_link(from.join("d0/e0/file 0"), from.join("hard")).unwrap();
    let large: Vec<u8> = (0..2_000_000u32)
        .map(|i| (i.wrapping_mul(2_654_435_761) >> 11) as u8)
        .collect();
    fs::write(from.join("large"), &large).unwrap();
    let sparse = fs::File::create(from.join("sparse")).unwrap();
    sparse.set_len(50_000_000).unwrap();
    // --checksum: what is there is read, on both sides. Without --modify-window=-1 rsync compares whole seconds and leaves the time of a
    // directory or a link that is made in the second of its original.
    let script = format!(
        "rsync -aHSi --checksum --modify-window=-1 --delete '{}/' to/",
        from.display()
    );
    succeeds(&shell(&folder, &script));
    alike(&from, &folder.join("to"));
    let inode = |path: &str| fs::metadata(folder.join("to").join(path)).unwrap().ino();
    assert_eq!(inode("hard"), inode("d0/e0/file 0"));
    let blocks = fs::metadata(folder.join("to/sparse")).unwrap().blocks();
    assert!(blocks * 512 < 5_000_000, "{blocks} blocks of a file of holes");
    // What has changed, and nothing else.
    fs::write(from.join("d1/e1/file 1"), "changed").unwrap();
    fs::remove_file(from.join("d2/e2/file 2")).unwrap();
    let mut changed = large;
    changed[1_000_000] ^= 1;
    fs::write(from.join("large"), &changed).unwrap();
    let said = succeeds(&shell(&folder, &script));
    let files: Vec<&str> = said
        .lines()
        .filter(|line| line.starts_with(">f") || line.starts_with("*del"))
        .collect();
    let ends = ["file 1", "file 2", "large"];
    assert!(
        files.len() == 3 && ends.iter().all(|end| files.iter().any(|line| line.ends_with(end))),
        "{said}"
    );
    alike(&from, &folder.join("to"));
}

// covers: share/git
#[test]
fn git_keeps_a_big_tree_on_a_share() {
    const TEST: &str = "git_keeps_a_big_tree_on_a_share";
    if is_missing(TEST, "git") {
        return;
    }
    let folder = Folder::new("git");
    let tree = folder.join("tree");
    let count = if full() { 20_000 } else { 600 };
    for number in 0..count {
        let below = tree.join(format!("a{}/b{}", number % 31, number % 7));
        fs::create_dir_all(&below).unwrap();
        fs::write(
            below.join(format!("f{number}.c")),
            format!("int f{number}(void) {{ return {number}; }}\n"),
        )
        .unwrap();
    }
    let git = "export HOME=/tmp GIT_CONFIG_GLOBAL=/dev/null GIT_AUTHOR_NAME=a GIT_AUTHOR_EMAIL=a@b GIT_COMMITTER_NAME=a \
               GIT_COMMITTER_EMAIL=a@b GIT_PAGER=cat\n";
    // With so many files git would begin to collect garbage by itself, in the background, and refuse to do it again.
    let script = format!(
        "{git}git init -q -b main\ngit config gc.auto 0\ngit add -A\ngit commit -qm first\ngit status --porcelain\n\
         echo '/* changed */' >>a1/b1/f1.c\ngit mv a2/b2/f2.c moved.c\ngit status --porcelain\n\
         git commit -qam second\ngit checkout -q HEAD~1\ngit checkout -q main\ngit gc -q\ngit status --porcelain\ngit rev-parse HEAD"
    );
    let said = succeeds(&shell(&tree, &script));
    let lines: Vec<&str> = said.lines().collect();
    assert_eq!(lines[..2], [" M a1/b1/f1.c", "R  a2/b2/f2.c -> moved.c"], "{said}");
    assert_eq!(lines.len(), 3, "a clean tree is said to be changed: {said}");
    let here = |arguments: &[&str]| {
        let mut command = Command::new("git");
        command
            .arg("-C")
            .arg(&tree)
            .args(["-c", "safe.directory=*"])
            .args(arguments);
        succeeds(&command.env("GIT_CONFIG_GLOBAL", "/dev/null").output().unwrap())
    };
    assert_eq!(here(&["rev-parse", "HEAD"]).trim(), lines[2]);
    here(&["fsck", "--strict", "--full"]);
    assert_eq!(here(&["status", "--porcelain"]), "");
    assert_eq!(here(&["ls-files"]).lines().count(), count);
    // And on to what the host has changed.
    fs::write(tree.join("a3/b3/f3.c"), "void f3(void);\n").unwrap();
    fs::write(tree.join("new"), "new\n").unwrap();
    let said = succeeds(&shell(
        &tree,
        &format!("{git}git status --porcelain; git diff --stat | tail -n 1"),
    ));
    assert_eq!(
        said,
        " M a3/b3/f3.c\n?? new\n 1 file changed, 1 insertion(+), 1 deletion(-)\n"
    );
}

/// A web server on loopback that answers with the files of a folder; the answer is its port.
fn serve(folder: PathBuf) -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    thread::spawn(move || {
        for stream in listener.incoming() {
            let (mut stream, folder) = (stream.unwrap(), folder.clone());
            thread::spawn(move || {
                let mut request = Vec::new();
                let mut bytes = [0; 2048];
                while !request.windows(4).any(|end| end == b"\r\n\r\n") {
                    match stream.read(&mut bytes) {
                        Ok(read @ 1..) => request.extend_from_slice(&bytes[..read]),
                        _ => return,
                    }
                }
                let text = String::from_utf8_lossy(&request).into_owned();
                let path = text
                    .split(' ')
                    .nth(1)
                    .unwrap_or_default()
                    .trim_start_matches(['/', '.'])
                    .to_string();
                let (status, body) = match fs::read(folder.join(path)) {
                    Ok(body) => ("200 OK", body),
                    Err(_) => ("404 Not Found", Vec::new()),
                };
                let head = format!(
                    "HTTP/1.1 {status}\r\nContent-Length: {}\r\nConnection: close\r\n\r\n",
                    body.len()
                );
                let _ = stream.write_all(head.as_bytes());
                let _ = stream.write_all(&body);
            });
        }
    });
    port
}

/// The host's root directory below an overlay at /new, and the network: what follows runs there.
const ROOT: &str = r#"mkdir /low /up /new
mount -t virtiofs root /low && mount -t tmpfs up /up && mkdir /up/upper /up/work
mount -t overlay -o lowerdir=/low,upperdir=/up/upper,workdir=/up/work new /new || exit 1
mount -t proc proc /new/proc; mount -t devtmpfs dev /new/dev; mount -t tmpfs tmp /new/tmp
ip link set lo up; ip link set eth0 up
cat >/tmp/lease <<'END'
#!/bin/sh
[ "$1" = bound ] || exit 0
ip addr add $ip/24 dev $interface
ip route add default via $router
END
chmod +x /tmp/lease; udhcpc -i eth0 -s /tmp/lease -n -q
"#;

/// Makes a package of one program in a folder, and the list of it.
fn mirror(folder: &Path) {
    let root = folder.join("root");
    fs::create_dir_all(root.join("DEBIAN")).unwrap();
    fs::create_dir_all(root.join("usr/bin")).unwrap();
    let control =
        "Package: minivmm-probe\nVersion: 1.2\nArchitecture: all\nMaintainer: nobody\nDescription: a program\n";
    fs::write(root.join("DEBIAN/control"), control).unwrap();
    for (name, text) in [
        (
            "DEBIAN/postinst",
            "#!/bin/sh\necho configured >/var/lib/minivmm-probe\n",
        ),
        (
            "usr/bin/minivmm-probe",
            "#!/bin/sh\necho probe of $(cat /var/lib/minivmm-probe)\n",
        ),
    ] {
        fs::write(root.join(name), text).unwrap();
        fs::set_permissions(root.join(name), fs::Permissions::from_mode(0o755)).unwrap();
    }
    let at = |command: &mut Command| succeeds(&command.current_dir(folder).output().unwrap());
    at(Command::new("dpkg-deb").args(["--root-owner-group", "--build", "root", "minivmm-probe_1.2_all.deb"]));
    let list = at(Command::new("dpkg-scanpackages").arg("."));
    assert!(list.contains("Package: minivmm-probe"), "{list}");
    fs::write(folder.join("Packages"), list).unwrap();
    at(Command::new("gzip").args(["-k", "Packages"]));
}

// covers: net/apt, net/curl, net/replay-share
#[test]
fn apt_and_curl_fetch_from_the_host_and_the_session_replays_to_the_bit() {
    const TEST: &str = "apt_and_curl_fetch_from_the_host_and_the_session_replays_to_the_bit";
    let programs = ["passt", "apt-get", "dpkg-scanpackages", "curl"];
    if programs.iter().any(|program| is_missing(TEST, program)) {
        return;
    }
    let folder = Folder::new("apt");
    let www = folder.join("www");
    fs::create_dir(&www).unwrap();
    mirror(&www);
    let data: Vec<u8> = (0..1_000_000u32)
        .map(|i| (i.wrapping_mul(2_654_435_761) >> 13) as u8)
        .collect();
    fs::write(www.join("data"), &data).unwrap();
    fs::create_dir(folder.join("out")).unwrap();
    let port = serve(www);
    let script = format!(
        "{ROOT}
mkdir /new/tmp/out && mount -t virtiofs out /new/tmp/out
cat >/new/tmp/script <<'END'
export PATH=/usr/sbin:/usr/bin:/sbin:/bin DEBIAN_FRONTEND=noninteractive
curl -sS -o /tmp/out/data http://10.0.2.2:{port}/data && md5sum /tmp/out/data
echo 'deb [trusted=yes] http://10.0.2.2:{port}/ ./' >/tmp/list
apt='apt-get -q -o Dir::Etc::sourcelist=/tmp/list -o Dir::Etc::sourceparts=- -o APT::Sandbox::User=root -o Acquire::http::Proxy=DIRECT'
mkdir -p /tmp/lists/partial /tmp/cache/archives/partial
apt=\"$apt -o Dir::State::lists=/tmp/lists -o Dir::Cache=/tmp/cache\"
$apt update && $apt install -y minivmm-probe && minivmm-probe
dpkg-query -W minivmm-probe
END
chroot /new sh /tmp/script
echo all is done"
    );
    let options = [
        "-m",
        "1G",
        "--net",
        "user",
        "--share",
        "root=/,ro",
        "--share",
        "out=out",
    ];
    let options = [&options[..], &["--stats", "--record", "session"]].concat();
    let before = fs::read("/var/lib/dpkg/status").unwrap();
    let recorded = run(&mut guest(&folder, &script, &options), LIMIT).must_end_with(0);
    let console = &recorded.console;
    for has in ["\nprobe of configured\n", "minivmm-probe\t1.2\n", "\nall is done\n"] {
        assert!(console.contains(has), "{has}: {console}\n{}", recorded.errors);
    }
    let sum = succeeds(&Command::new("md5sum").arg(folder.join("www/data")).output().unwrap());
    assert!(console.contains(&format!("{}  /tmp/out/data", &sum[..32])), "{console}");
    for word in ["BUG:", "WARNING:", "Call Trace", "I/O error"] {
        assert!(!console.contains(word), "{word}: {console}");
    }
    assert!(
        fs::read("/var/lib/dpkg/status").unwrap() == before,
        "the host's packages are as they were"
    );
    assert!(
        !folder.join("out/data").exists(),
        "a recorded session leaves the share alone"
    );
    // Without passt, without the server's files, and with another directory in place of what was shared.
    fs::rename(folder.join("out"), folder.join("gone")).unwrap();
    fs::remove_dir_all(folder.join("www")).unwrap();
    let mut replay = Command::new(minivmm());
    replay
        .args(["replay", "session", "--stats"])
        .env("PATH", "/nonexistent")
        .current_dir(&*folder);
    let replayed = run(&mut replay, LIMIT).must_end_with(0);
    assert_eq!(replayed.console, recorded.console);
    assert_eq!(hash(&replayed), hash(&recorded));
}

// covers: reverse/share-net
#[test]
fn a_guest_with_share_and_network_goes_back_and_comes_again() {
    const TEST: &str = "a_guest_with_share_and_network_goes_back_and_comes_again";
    if is_missing(TEST, "passt") {
        return;
    }
    let folder = Folder::new("back");
    let www = folder.join("www");
    fs::create_dir(&www).unwrap();
    fs::create_dir(folder.join("shared")).unwrap();
    fs::write(folder.join("shared/seed"), "seed\n").unwrap();
    let data: Vec<u8> = (0..300_000u32)
        .map(|i| (i.wrapping_mul(2_654_435_761) >> 13) as u8)
        .collect();
    fs::write(www.join("data"), &data).unwrap();
    let port = serve(www);
    let script = format!(
        "mkdir /s && mount -t virtiofs s /s
echo mounted
{}
wget -q -O /s/data http://10.0.2.2:{port}/data && cat /s/seed >>/s/data && mv /s/data /s/whole
echo fetched
while [ ! -e /tmp/never ] && [ $((n = n + 1)) -lt 200 ]; do md5sum /s/whole >/tmp/sum; done
cat /tmp/sum; ls /s",
        &ROOT[ROOT.find("ip link set lo").unwrap()..]
    );
    let control = folder.join("control");
    let socket = format!("unix:{}", control.display());
    let options = [
        "--net",
        "user",
        "--share",
        "s=shared",
        "--reverse",
        "--control",
        &socket,
    ];
    let mut running = start(&mut guest(&folder, &script, &options), LIMIT);
    let ctl = |line: &str| {
        succeeds(
            &Command::new(minivmm())
                .arg("ctl")
                .arg(&control)
                .arg(line)
                .output()
                .unwrap(),
        )
    };
    assert!(running.wait_for("mounted").is_some(), "{}", running.console());
    let steps = || -> u64 {
        let status: serde_json::Value = serde_json::from_str(&ctl("status")).unwrap();
        status["steps"].as_u64().unwrap()
    };
    let early = steps();
    assert!(running.wait_for("fetched").is_some(), "{}", running.console());
    ctl("pause");
    let late = steps();
    let mut states = Vec::new();
    for _ in 0..3 {
        ctl(&format!("monitor run-to {early}"));
        let back = ctl("monitor hash");
        ctl(&format!("monitor run-to {late}"));
        assert_eq!(steps(), late);
        states.push((back, ctl("monitor hash")));
    }
    assert_ne!(states[0].0, states[0].1);
    assert!(states.iter().all(|state| *state == states[0]), "{states:?}");
    ctl("resume");
    let outcome = running.finish().must_end_with(0);
    let mut whole = data;
    whole.extend(b"seed\n");
    fs::write(folder.join("whole"), &whole).unwrap();
    let sum = succeeds(&Command::new("md5sum").arg(folder.join("whole")).output().unwrap());
    assert!(
        outcome.console.contains(&format!("{}  /s/whole", &sum[..32])),
        "{}",
        outcome.console
    );
    assert_eq!(
        outcome.console.matches("fetched").count(),
        1,
        "what was said once is said once: {}",
        outcome.console
    );
    assert!(
        !folder.join("shared/whole").exists(),
        "with --reverse a share is an overlay"
    );
}
