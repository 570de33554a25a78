//! The guest's network, and its devices on the PCI bus. The guest is Linux with busybox; on the host's side are passt and servers that the
//! tests start on loopback, or in a network namespace that they make.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use guest_tests::{
    Folder, Running, full, in_minivmm, linux, linux_in_minivmm, minivmm, root, run, skipped, start, start_with_input,
    target,
};

const LIMIT: Duration = Duration::from_secs(300);

/// What every guest does first: udhcpc's script sets what DHCP says.
const UP: &str = r#"load-modules
ip link set lo up
ip link set eth0 up
cat >/tmp/lease <<'END'
#!/bin/sh
[ "$1" = bound ] || exit 0
ip addr add $ip/24 dev $interface
ip route add default via $router
echo "lease $ip router $router dns $dns"
END
chmod +x /tmp/lease
"#;

fn guest(folder: &Folder, script: &str, options: &[&str]) -> Command {
    std::fs::create_dir_all(folder.join("inject")).unwrap();
    folder.script("inject/run", &format!("#!/bin/sh\n{UP}{script}\n"));
    let mut command = linux_in_minivmm("console=ttyS0 panic=-1 quiet");
    command
        .arg("--inject")
        .arg(folder.join("inject"))
        .args(options)
        .current_dir(&**folder);
    command
}

fn is_missing(test: &str, program: &str) -> bool {
    let there = std::env::var_os("PATH")
        .is_some_and(|path| std::env::split_paths(&path).any(|folder| folder.join(program).is_file()));
    if !there {
        skipped(test, &format!("there is no {program} here"));
    }
    !there
}

/// A server on loopback that answers every connection with these bytes behind a line of HTTP; the answer is its port.
fn serve(bytes: Vec<u8>) -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            let mut request = [0; 1024];
            let _ = stream.read(&mut request);
            let _ = write!(stream, "HTTP/1.0 200 OK\r\nContent-Length: {}\r\n\r\n", bytes.len());
            let _ = stream.write_all(&bytes);
        }
    });
    port
}

/// A port of loopback that nobody has.
fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

/// What a server in the guest says; it may not be there yet.
fn ask(port: u16, running: &mut Running) -> String {
    let until = Instant::now() + Duration::from_secs(60);
    loop {
        let mut said = String::new();
        if let Ok(mut stream) = TcpStream::connect(("127.0.0.1", port)) {
            // passt of 2023 ends its handshake with the guest only once the host's side says something.
            let _ = stream.write_all(b"\n");
            let _ = stream.read_to_string(&mut said);
        }
        if !said.is_empty() {
            return said;
        }
        assert!(Instant::now() < until, "nobody answers: {}", running.console());
        thread::sleep(Duration::from_millis(50));
    }
}

/// Bytes that do not repeat.
fn pattern(len: usize) -> Vec<u8> {
    (0..len as u32)
        .map(|i| (i.wrapping_mul(2_654_435_761) >> 13) as u8)
        .collect()
}

fn qemu_img(folder: &Folder, args: &[&str]) {
    let mut command = Command::new("qemu-img");
    let output = command.args(args).current_dir(&**folder).output();
    let output = output.expect("qemu-img (Debian: qemu-utils)");
    assert!(
        output.status.success(),
        "{args:?}: {}",
        String::from_utf8_lossy(&output.stderr)
    );
}

// covers: net/user, net/pci-disk, devices/disk-qcow2, devices/virtio-net, devices/virtio-pci
#[test]
fn a_guest_has_an_address_and_goes_out_and_is_reached_on_both_buses() {
    if is_missing(
        "a_guest_has_an_address_and_goes_out_and_is_reached_on_both_buses",
        "passt",
    ) {
        return;
    }
    let bytes = pattern(3 << 20);
    let port = serve(bytes.clone());
    for bus in ["mmio", "pci"] {
        let folder = Folder::new("net");
        let forward = free_port();
        let script = format!(
            "udhcpc -i eth0 -s /tmp/lease -n -q
wget -q -O /tmp/got http://10.0.2.2:{port}/file
cat /tmp/got > /dev/vda
sync
grep -c virtio /proc/interrupts | sed 's/^/interrupts /'
echo all is up
echo \"this is the guest\" | nc -l -p 8022"
        );
        let net = format!("user,forward={forward}:8022");
        // A raw disk, and a qcow2 image, which qemu-img has to read afterwards.
        let disk = if bus == "mmio" {
            "disk"
        } else {
            "disk.qcow2,format=qcow2"
        };
        let options = ["--bus", bus, "--net", &net, "--disk", disk];
        std::fs::write(folder.join("disk"), vec![0; 4 << 20]).unwrap();
        qemu_img(&folder, &["create", "-q", "-f", "qcow2", "disk.qcow2", "4M"]);
        let mut running = start(&mut guest(&folder, &script, &options), LIMIT);
        assert!(running.wait_for("all is up").is_some(), "{bus}: {}", running.console());
        assert_eq!(ask(forward, &mut running), "this is the guest\n", "{bus}");
        let outcome = running.finish().must_end_with(0);
        let console = &outcome.console;
        assert!(
            console.contains("lease 10.0.2.15 router 10.0.2.2 dns 10.0.2.3"),
            "{bus}: {console}"
        );
        if bus == "pci" {
            qemu_img(&folder, &["check", "-q", "disk.qcow2"]);
            qemu_img(&folder, &["convert", "-O", "raw", "disk.qcow2", "disk"]);
        }
        let disk = std::fs::read(folder.join("disk")).unwrap();
        assert!(disk[..bytes.len()] == bytes, "{bus}: what came is not what was sent");
        for word in ["Fatal", "BUG:", "WARNING:", "Call Trace"] {
            assert!(!console.contains(word), "{bus}: {word}: {console}");
        }
    }
}

// covers: net/replay
#[test]
fn a_session_with_a_network_replays_without_one() {
    if is_missing("a_session_with_a_network_replays_without_one", "passt") {
        return;
    }
    let port = serve(pattern(200_000));
    let folder = Folder::new("net-replay");
    let script = format!(
        "udhcpc -i eth0 -s /tmp/lease -n -q
wget -q -O - http://10.0.2.2:{port}/file | md5sum
cat /proc/uptime
sleep 1
cat /proc/uptime /proc/interrupts"
    );
    let session = folder.join("session");
    let mut command = guest(&folder, &script, &["--net", "user", "--record"]);
    let recorded = run(command.arg(&session), LIMIT).must_end_with(0);
    assert!(recorded.console.contains("lease 10.0.2.15"), "{}", recorded.console);
    let log = std::fs::read_to_string(session.join("log")).unwrap();
    assert!(
        log.lines().filter(|line| line.contains("\"virtio\"")).count() > 10,
        "frames are in the log"
    );
    // Nothing is at the other end now, and no passt is there to be started.
    for _ in 0..2 {
        let mut replay = Command::new(minivmm());
        replay.arg("replay").arg(&session).env("PATH", "/nonexistent");
        let again = run(&mut replay, LIMIT).must_end_with(0);
        assert_eq!(again.console, recorded.console);
    }
}

// covers: net/tap
#[test]
fn a_tap_interface_leads_to_the_host() {
    const TEST: &str = "a_tap_interface_leads_to_the_host";
    // A namespace of the test's own, in which it may make an interface.
    let make = "ip link set lo up && ip tuntap add dev vmtap0 mode tap && ip addr add 192.0.2.1/24 dev vmtap0 && ip link set vmtap0 up";
    let alone = |script: &str| {
        let mut command = Command::new("unshare");
        command.args(["--map-root-user", "--net", "sh", "-c", script]);
        command
    };
    if !alone(make).output().is_ok_and(|output| output.status.success()) {
        return skipped(TEST, "no network namespace with a tap interface can be made here");
    }
    let folder = Folder::new("tap");
    let inner = guest(
        &folder,
        "ip addr add 192.0.2.2/24 dev eth0
ping -c 3 -W 5 192.0.2.1",
        &["--net", "tap=vmtap0"],
    );
    let words = std::iter::once(inner.get_program()).chain(inner.get_args());
    let quoted: Vec<String> = words.map(|word| format!("'{}'", word.to_str().unwrap())).collect();
    let script = format!("{make} && exec {}", quoted.join(" "));
    let outcome = run(alone(&script).current_dir(Path::new(&*folder)), LIMIT).must_end_with(0);
    assert!(
        outcome.console.contains("3 packets transmitted, 3 packets received"),
        "{}",
        outcome.console
    );
}

// covers: bad-input/net-guest-floods
#[test]
fn a_flood_of_dhcp_leaves_the_network_as_it_was() {
    if is_missing("a_flood_of_dhcp_leaves_the_network_as_it_was", "passt") {
        return;
    }
    let folder = Folder::new("net-flood");
    let bytes = pattern(100_000);
    let port = serve(bytes);
    let clients = if full() { 300 } else { 30 };
    // They ask without a pause between their requests, and for addresses of their own.
    let script = format!(
        "i=0
while [ $i -lt {clients} ]; do
    udhcpc -i eth0 -s /bin/true -n -q -t 20 -T 0 -r 10.0.2.$((i % 250)) >/dev/null 2>&1 &
    i=$((i + 1))
done
wait
udhcpc -i eth0 -s /tmp/lease -n -q
wget -q -O /tmp/got http://10.0.2.2:{port}/file && wc -c /tmp/got"
    );
    let outcome = run(&mut guest(&folder, &script, &["--net", "user"]), LIMIT).must_end_with(0);
    assert!(
        outcome.console.contains("lease 10.0.2.15 router 10.0.2.2"),
        "{}",
        outcome.console
    );
    assert!(outcome.console.contains("100000 /tmp/got"), "{}", outcome.console);
}

// covers: run/network
#[test]
fn a_command_reaches_the_host() {
    if is_missing("a_command_reaches_the_host", "passt") {
        return;
    }
    let folder = Folder::new("run-net");
    let bytes = pattern(1 << 20);
    let port = serve(bytes.clone());
    let busybox = target().join("guest/busybox").display().to_string();
    let script = format!(
        "cat /etc/resolv.conf; {busybox} ip addr show eth0 | grep -w inet; {busybox} wget -q -O got http://10.0.2.2:{port}/file"
    );
    let mut command = Command::new(minivmm());
    command.args(["run", "--net", "user", "--kernel"]).arg(&linux().kernel);
    command.args(["--", "sh", "-ec", &script]).current_dir(&*folder);
    let outcome = run(&mut command, LIMIT).must_end_with(0);
    assert!(outcome.console.contains("nameserver 10.0.2.3\n"), "{}", outcome.console);
    assert!(outcome.console.contains("inet 10.0.2.15/24"), "{}", outcome.console);
    assert!(std::fs::read(folder.join("got")).unwrap() == bytes);
}

// covers: devices/virtio-console
#[test]
fn the_console_is_hvc0() {
    let folder = Folder::new("hvc");
    // Open throughout: whoever closes a terminal last throws away what was typed meanwhile.
    let script = "sleep 1; exec 3<>/dev/hvc0; echo 'what is your name?' >&3; read name <&3; echo \"hello $name\" >&3";
    for bus in ["mmio", "pci"] {
        let mut command = guest(&folder, script, &["--console", "hvc", "--bus", bus]);
        let mut running = start_with_input(&mut command, LIMIT);
        assert!(
            running.wait_for("what is your name?").is_some(),
            "{bus}: {}",
            running.console()
        );
        running.enter("nobody");
        let outcome = running.finish().must_end_with(0);
        assert!(outcome.console.contains("hello nobody"), "{bus}: {}", outcome.console);
    }
}

// covers: devices/virtio-console-ports
#[test]
fn files_come_out_through_a_port() {
    let folder = Folder::new("port");
    let script = "sleep 1
for port in /sys/class/virtio-ports/*; do
    [ \"$(cat $port/name)\" = collect ] && to=/dev/${port##*/}
done
mkdir /tmp/out && cd /tmp/out && echo 'from the guest' >file && echo file | cpio -o -H newc >$to";
    let options = ["--console", "hvc", "--bus", "pci", "--collect", "collected"];
    run(&mut guest(&folder, script, &options), LIMIT).must_end_with(0);
    let collected = std::fs::read_to_string(folder.join("collected/file")).unwrap();
    assert_eq!(collected, "from the guest\n");
}

// covers: net/debian-disk
#[test]
fn a_debian_disk_image_boots_with_its_own_kernel_and_takes_ssh() {
    const TEST: &str = "a_debian_disk_image_boots_with_its_own_kernel_and_takes_ssh";
    if !full() {
        return;
    }
    if ["passt", "debootstrap", "ssh", "ssh-keygen"]
        .iter()
        .any(|program| is_missing(TEST, program))
    {
        return;
    }
    let folder = Folder::new("debian");
    let script = root().join("guest-tests/linux/debian-image");
    let made = Command::new("sh").arg(script).current_dir(&*folder).output().unwrap();
    if made.status.code() == Some(77) {
        return skipped(TEST, String::from_utf8_lossy(&made.stdout).trim());
    }
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    let port = free_port();
    let net = format!("user,forward={port}:22");
    let mut command = in_minivmm("vmlinuz");
    command
        .args([
            "--initrd",
            "initrd",
            "--cmdline",
            "console=ttyS0 panic=-1 root=/dev/vda rw",
        ])
        .args(["-m", "1G", "--disk", "disk.qcow2,format=qcow2", "--net", &net])
        .current_dir(&*folder);
    let mut running = start(&mut command, Duration::from_secs(900));
    assert!(running.wait_for("debian login:").is_some(), "{}", running.console());
    let ssh = |words: &str| {
        let mut ssh = Command::new("ssh");
        for option in [
            "BatchMode=yes",
            "StrictHostKeyChecking=no",
            "UserKnownHostsFile=/dev/null",
            "ConnectTimeout=60",
        ] {
            ssh.args(["-o", option]);
        }
        ssh.args(["-i", "key", "-p", &port.to_string(), "root@127.0.0.1", words]);
        ssh.current_dir(&*folder).output().unwrap()
    };
    let said = ssh("uname -a; cat /sys/bus/pci/devices/0000:00:02.0/vendor; ls -d /sys/bus/acpi/devices/LNRO0005:*");
    let said = String::from_utf8_lossy(&said.stdout).into_owned();
    assert!(said.contains("Linux debian") && said.contains("0x1af4"), "{said}");
    assert!(!said.contains("LNRO0005"), "nothing over MMIO: {said}");
    ssh("poweroff");
    running.finish().must_end_with(0);
}
