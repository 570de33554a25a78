//! `--qmp` and `minivmm ctl SOCKET dump FILE` on running machines, asked as debuggers ask.

use crate::common;
use std::{
    fs::{self, File},
    io::{BufRead, BufReader, Write},
    os::{
        fd::AsRawFd,
        unix::{fs::FileExt, net::UnixStream},
    },
    path::PathBuf,
    process::Stdio,
    time::{Duration, Instant},
};

use common::*;
use object::{Object, ObjectSegment};
use serde_json::{Value, json};
use vmm_sys_util::sock_ctrl_msg::ScmSocket;

/// A guest with a socket for QMP and one for commands.
struct Guest {
    folder: Folder,
    process: Watched,
}

impl Guest {
    fn start(image: &[u8], options: &[&str]) -> Guest {
        let folder = Folder::new();
        folder.file("kernel", image);
        let mut command = minivmm();
        command.current_dir(folder.path()).args([
            "--kernel",
            "kernel",
            "--serial",
            "null",
            "--memory",
            "16M",
            "--qmp",
            "unix:qmp",
            "--control",
            "unix:control",
        ]);
        let child = command
            .args(options)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let process = Watched::new(child);
        let guest = Guest { folder, process };
        let limit = Instant::now() + Duration::from_secs(120);
        while UnixStream::connect(guest.at("qmp")).is_err() {
            assert!(Instant::now() < limit, "no socket");
            std::thread::sleep(Duration::from_millis(10));
        }
        guest
    }

    fn at(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// A client that has been greeted.
    fn greeted(&self) -> Client {
        let stream = UnixStream::connect(self.at("qmp")).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(120))).unwrap();
        let mut client = Client(BufReader::new(stream));
        let greeting = client.answer();
        assert!(greeting["QMP"]["version"]["qemu"]["major"].is_number(), "{greeting}");
        assert_eq!(greeting["QMP"]["capabilities"], json!([]));
        client
    }

    /// A client whose commands are taken.
    fn client(&self) -> Client {
        let mut client = self.greeted();
        assert_eq!(client.ask("qmp_capabilities", json!({})), json!({}));
        client
    }

    fn ctl(&self, words: &[&str]) -> std::process::Output {
        run(minivmm()
            .current_dir(self.folder.path())
            .args(["ctl", "control"])
            .args(words))
    }

    fn end(mut self) {
        self.ctl(&["quit"]);
        assert!(self.process.wait().success());
        assert!(
            !self.at("qmp").exists() && !self.at("control").exists(),
            "sockets are removed"
        );
    }
}

struct Client(BufReader<UnixStream>);

impl Client {
    fn send(&mut self, text: &str) {
        self.0.get_mut().write_all(text.as_bytes()).unwrap();
    }

    fn answer(&mut self) -> Value {
        let mut line = String::new();
        self.0.read_line(&mut line).unwrap();
        serde_json::from_str(&line).unwrap_or_else(|e| panic!("{e}: {line:?}"))
    }

    #[track_caller]
    fn ask(&mut self, command: &str, arguments: Value) -> Value {
        self.send(&format!(
            "{}\r\n",
            json!({ "execute": command, "arguments": arguments })
        ));
        let answer = self.answer();
        assert!(answer.get("return").is_some(), "{command}: {answer}");
        answer["return"].clone()
    }

    #[track_caller]
    fn refused(&mut self, sent: &str, class: &str, says: &str) {
        self.send(sent);
        let answer = self.answer();
        assert_eq!(answer["error"]["class"], class, "{answer}");
        let desc = answer["error"]["desc"].as_str().unwrap();
        assert!(desc.contains(says), "{desc}");
    }

    fn human(&mut self, line: &str) -> String {
        let said = self.ask("human-monitor-command", json!({ "command-line": line }));
        said.as_str().unwrap().to_string()
    }
}

fn execute(command: &str, arguments: Value) -> String {
    format!("{}\n", json!({ "execute": command, "arguments": arguments }))
}

// covers: qmp/negotiation, qmp/commands
#[test]
fn a_client_is_greeted_negotiates_and_asks() {
    let guest = Guest::start(&spinner(), &[]);
    let mut client = guest.greeted();
    client.refused(
        &execute("query-status", json!({})),
        "CommandNotFound",
        "qmp_capabilities",
    );
    client.ask("qmp_capabilities", json!({}));
    client.refused(
        &execute("qmp_capabilities", json!({})),
        "CommandNotFound",
        "already complete",
    );
    assert_eq!(client.ask("query-target", json!({})), json!({ "arch": "x86_64" }));
    assert_eq!(client.ask("query-status", json!({}))["running"], true);
    client.ask("stop", json!({}));
    assert_eq!(client.ask("query-status", json!({}))["status"], "paused");
    client.ask("cont", json!({}));
    assert_eq!(client.ask("query-status", json!({}))["running"], true);
    // Several in one piece, and one in pieces; an id comes back.
    client.send(r#"{"execute":"query-target","id":1}{"execute":"query-target","id":{"a":2}}"#);
    assert_eq!(client.answer()["id"], 1);
    assert_eq!(client.answer()["id"], json!({ "a": 2 }));
    client.send(r#"{"execute":"query-t"#);
    std::thread::sleep(Duration::from_millis(50));
    client.send("arget\"}");
    assert_eq!(client.answer()["return"]["arch"], "x86_64");
    for command in client.ask("query-commands", json!({})).as_array().unwrap() {
        assert!(command["name"].is_string());
    }
    assert_eq!(client.ask("quit", json!({})), json!({}));
    let mut process = guest.process;
    assert!(process.wait().success());
}

// covers: qmp/garbage
#[test]
fn what_is_no_command_is_answered_and_the_connection_goes_on() {
    let guest = Guest::start(&spinner(), &[]);
    let mut client = guest.client();
    client.refused("}{\n", "GenericError", "JSON parse error");
    client.refused("[1]\n", "GenericError", "not a command");
    client.refused(
        "{\"execute\":\"query-target\",\"more\":1}\n",
        "GenericError",
        "not a command",
    );
    client.refused(&execute("savevm", json!({})), "CommandNotFound", "savevm");
    client.refused(
        &execute("human-monitor-command", json!({})),
        "GenericError",
        "command-line",
    );
    client.refused(
        &execute("getfd", json!({ "fdname": "x" })),
        "GenericError",
        "SCM_RIGHTS",
    );
    client.refused(
        &execute("closefd", json!({ "fdname": "x" })),
        "GenericError",
        "'x' not found",
    );
    for (arguments, says) in [
        (json!({ "protocol": "file:/etc/passwd" }), "fd:NAME"),
        (json!({ "protocol": "fd:x", "paging": true }), "paging"),
        (
            json!({ "protocol": "fd:x", "begin": -1, "length": 1 }),
            "begin: not a number",
        ),
        (json!({ "protocol": "fd:x", "begin": 1 }), "go together"),
        (json!({ "protocol": "fd:x", "format": "kdump-zlib" }), "format"),
        (json!({ "protocol": "fd:x" }), "'x' not found"),
    ] {
        client.refused(&execute("dump-guest-memory", arguments), "GenericError", says);
    }
    client.refused(&"[".repeat(200), "GenericError", "recursion");
    client.send("\n");
    assert_eq!(client.ask("query-target", json!({}))["arch"], "x86_64");
    // A command that never ends is cut off, and others go on.
    let mut endless = guest.client();
    endless.refused(
        &format!("\"{}", "x".repeat(20_000)),
        "GenericError",
        "more than 16384 bytes",
    );
    assert_eq!(client.ask("query-target", json!({}))["arch"], "x86_64");
    guest.end();
}

/// What the image's first bytes are, where it was loaded.
fn loaded(image: &[u8]) -> Vec<u8> {
    image[..64].to_vec()
}

// covers: qmp/human-monitor, qmp/running
#[test]
fn memory_of_a_running_and_of_a_paused_guest_is_read_both_ways() {
    let image = spinner();
    for options in [&[][..], &["--paused"], &["--sandbox", "off"]] {
        let guest = Guest::start(&image, options);
        let mut client = guest.client();
        let said = client.human(&format!("xp /64xb {BASE:#x}"));
        let bytes: Vec<u8> = said
            .lines()
            .flat_map(|line| line.split_once(':').unwrap().1.split_whitespace())
            .map(|word| u8::from_str_radix(word.trim_start_matches("0x"), 16).unwrap())
            .collect();
        assert_eq!(bytes, loaded(&image), "{options:?}");
        let said = client.human(&format!("gpa2hva {BASE:#x}"));
        let host = said.trim_end().rsplit("is 0x").next().unwrap();
        let host = u64::from_str_radix(host, 16).unwrap();
        // As process_vm_readv does, by the same right.
        let memory = File::open(format!("/proc/{}/mem", guest.process.child.id())).unwrap();
        let mut bytes = [0; 64];
        memory.read_exact_at(&mut bytes, host).unwrap();
        assert_eq!(bytes[..], loaded(&image), "{options:?}");
        guest.end();
    }
}

/// The program's memory in a core file.
fn in_core(bytes: &[u8], gpa: u64) -> Option<Vec<u8>> {
    let core = object::File::parse(bytes).unwrap();
    assert_eq!(core.kind(), object::ObjectKind::Core);
    // All linear addresses are 0: what counts is the order.
    core.segments().find_map(|segment| {
        let data = segment.data().unwrap();
        data.get(gpa as usize..gpa as usize + 64).map(<[u8]>::to_vec)
    })
}

// covers: qmp/dump, control/dump
#[test]
fn a_core_file_is_written_to_a_descriptor_that_a_client_passes() {
    let image = spinner();
    let guest = Guest::start(&image, &["--cpus", "2"]);
    // As drgn does it: one byte of RAM, to a file that only the client knows.
    let mut client = guest.client();
    let file = guest.folder.file("small", "");
    let file = File::options().read(true).write(true).open(file).unwrap();
    let command = execute("getfd", json!({ "fdname": "dump" }));
    client
        .0
        .get_ref()
        .send_with_fd(command.as_bytes(), file.as_raw_fd())
        .unwrap();
    assert_eq!(client.answer()["return"], json!({}));
    let arguments = json!({ "paging": false, "protocol": "fd:dump", "begin": 0x10_0000, "length": 1 });
    client.ask("dump-guest-memory", arguments.clone());
    let small = fs::read(guest.at("small")).unwrap();
    let core = object::File::parse(&*small).unwrap();
    let lengths: Vec<u64> = core.segments().map(|segment| segment.size()).collect();
    assert_eq!(lengths, [1]);
    // The name is used up.
    client.refused(
        &execute("dump-guest-memory", arguments),
        "GenericError",
        "'dump' not found",
    );

    let output = guest.ctl(&["dump", "core"]);
    let said = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert!(
        said.starts_with("step ") && said.contains("without VMCOREINFO"),
        "{said}"
    );
    let whole = fs::read(guest.at("core")).unwrap();
    assert_eq!(in_core(&whole, BASE.into()), Some(loaded(&image)));
    // What is there already stays; what is no file is not made; a dump without one is refused.
    let refused = guest.ctl(&["dump", "core"]);
    assert_refused(&refused, 2, &["dump core: exists already"]);
    assert_eq!(fs::read(guest.at("core")).unwrap(), whole);
    assert_refused(
        &guest.ctl(&["dump", "missing/core"]),
        2,
        &["dump missing/core: no such file"],
    );
    assert_refused(&guest.ctl(&["dump"]), 2, &["minivmm ctl SOCKET dump FILE"]);
    assert_refused(&guest.ctl(&["{\"command\":\"dump\"}"]), 2, &["no file came with it"]);
    assert_refused(&guest.ctl(&["status", "core"]), 2, &["one argument too many"]);
    guest.end();
}

// covers: dump/full-disk
#[test]
fn a_dump_to_a_full_disk_leaves_no_file_and_the_guest_goes_on() {
    let guest = Guest::start(&spinner(), &[]);
    // A file system of one megabyte, if this user may have one.
    let disk = guest.at("disk");
    fs::create_dir(&disk).unwrap();
    let script = format!(
        "mount -t tmpfs -o size=16k none {0} && {1} ctl {2} dump {0}/core; echo status $?; ls {0} | wc -l",
        disk.display(),
        env!("CARGO_BIN_EXE_minivmm"),
        guest.at("control").display()
    );
    let output =
        run(std::process::Command::new("unshare").args(["--user", "--map-root-user", "--mount", "sh", "-c", &script]));
    let said = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
    if said.contains("unshare:") || said.contains("mount:") {
        skipped("a_dump_to_a_full_disk_leaves_no_file_and_the_guest_goes_on", &said);
        return;
    }
    assert!(said.contains("no space left on device"), "{said}");
    assert!(said.contains("status 2\n0\n"), "{said}");
    assert!(guest.ctl(&["status"]).status.success());
    guest.end();
}
