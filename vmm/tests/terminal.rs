//! minivmm on a terminal: raw while the guest runs, and as it was afterwards, whatever the way out.
//!
//! `unsafe` is for the libc calls that make a terminal; the terminal's own file descriptors are used through `File`.
#![allow(unsafe_code)]

use crate::common;
use std::{
    fs::File,
    io::{Read, Write},
    os::{
        fd::{AsRawFd, FromRawFd, OwnedFd},
        unix::fs::OpenOptionsExt,
    },
    process::{ExitStatus, Stdio},
    time::Duration,
};

use common::*;
use iced_x86::code_asm::*;

/// A pseudo-terminal: what the user's side sees, and what minivmm gets.
struct Pty {
    user: File,
    program: OwnedFd,
}

impl Pty {
    fn new() -> Self {
        let (mut user, mut program) = (0, 0);
        // SAFETY: Both descriptors are written on success, and the null pointers ask for defaults.
        let result = unsafe {
            libc::openpty(
                &mut user,
                &mut program,
                std::ptr::null_mut(),
                std::ptr::null_mut(),
                std::ptr::null_mut(),
            )
        };
        assert_eq!(result, 0);
        for fd in [user, program] {
            // SAFETY: F_SETFD changes the descriptor's flag and nothing else.
            unsafe { libc::fcntl(fd, libc::F_SETFD, libc::FD_CLOEXEC) };
        }
        // SAFETY: openpty has made both, and nobody else has them.
        unsafe {
            Pty {
                user: File::from_raw_fd(user),
                program: OwnedFd::from_raw_fd(program),
            }
        }
    }

    /// Every setting of the terminal.
    fn settings(&self) -> (u32, u32, u32, u32, Vec<u8>) {
        let mut mode = std::mem::MaybeUninit::<libc::termios>::uninit();
        // SAFETY: tcgetattr writes a whole termios on success.
        let mode = unsafe {
            assert_eq!(libc::tcgetattr(self.program.as_raw_fd(), mode.as_mut_ptr()), 0);
            mode.assume_init()
        };
        (
            mode.c_iflag,
            mode.c_oflag,
            mode.c_cflag,
            mode.c_lflag,
            mode.c_cc.to_vec(),
        )
    }

    /// Makes the terminal unusual, so that "restored" and "reset to the usual" differ.
    fn make_unusual(&self) {
        let mut mode = std::mem::MaybeUninit::<libc::termios>::uninit();
        // SAFETY: tcgetattr writes a whole termios on success, and tcsetattr reads one.
        unsafe {
            assert_eq!(libc::tcgetattr(self.program.as_raw_fd(), mode.as_mut_ptr()), 0);
            let mut mode = mode.assume_init();
            mode.c_lflag &= !libc::ECHO;
            mode.c_iflag |= libc::IXANY;
            mode.c_cc[libc::VINTR] = 7;
            assert_eq!(libc::tcsetattr(self.program.as_raw_fd(), libc::TCSANOW, &mode), 0);
        }
    }

    fn start(&self, image: &[u8], options: &[&str], folder: &Folder) -> Watched {
        let end = || Stdio::from(self.program.try_clone().unwrap());
        let mut command = minivmm();
        command.arg("--kernel").arg(folder.file("kernel", image)).args(options);
        Watched::new(
            command
                .stdin(end())
                .stdout(end())
                .stderr(Stdio::piped())
                .spawn()
                .unwrap(),
        )
    }

    /// Reads until the guest's text has appeared.
    fn wait_for(&mut self, text: &str) -> String {
        let mut seen = Vec::new();
        while !String::from_utf8_lossy(&seen).contains(text) {
            let mut bytes = [0; 100];
            let n = self.user.read(&mut bytes).unwrap();
            seen.extend(&bytes[..n]);
        }
        String::from_utf8_lossy(&seen).into_owned()
    }

    fn type_in(&mut self, bytes: &[u8]) {
        self.user.write_all(bytes).unwrap();
    }
}

fn errors(child: Watched) -> (ExitStatus, String) {
    let result = child.output();
    (result.status, String::from_utf8_lossy(&result.stderr).into_owned())
}

const ICANON_ECHO_ISIG: u32 = libc::ICANON | libc::ECHO | libc::ISIG;

// covers: console/raw-restored
// covers: console/escape
#[test]
fn the_terminal_is_raw_while_the_guest_runs_and_restored_on_every_way_out() {
    enum Way {
        Type(&'static [u8]),
        Signal(&'static str),
        Wait,
    }
    use Way::*;
    for (what, image, options, marker, way, status) in [
        ("power-off", echo(), &[][..], "ready", Type(b"q"), 0),
        ("Ctrl-A x", echo(), &[], "ready", Type(b"\x01x"), 0),
        (
            "Ctrl-A x when the guest is busy",
            spinner(),
            &[],
            "spinning",
            Type(b"\x01x"),
            0,
        ),
        (
            "Ctrl-A x when the guest sleeps",
            interrupt_echo(),
            &[],
            "ready",
            Type(b"\x01x"),
            0,
        ),
        (
            "Ctrl-A x on the virtual clock",
            interrupt_echo(),
            &["--clock", "virtual"],
            "ready",
            Type(b"\x01x"),
            0,
        ),
        ("SIGINT", spinner(), &[], "spinning", Signal("INT"), 2),
        ("SIGTERM", interrupt_echo(), &[], "ready", Signal("TERM"), 2),
        ("SIGHUP", spinner(), &[], "spinning", Signal("HUP"), 2),
        ("time limit", spinner(), &["--timeout", "0.5"], "spinning", Wait, 8),
        ("triple fault", crasher(), &[], "crashing", Type(b"q"), 4),
        ("debug exit", exiter(), &[], "exiting", Type(b"q"), 11),
    ] {
        let folder = Folder::new();
        let mut pty = Pty::new();
        pty.make_unusual();
        let before = pty.settings();
        let child = pty.start(&image, options, &folder);
        pty.wait_for(marker);
        let raw = pty.settings();
        assert_eq!(raw.3 & ICANON_ECHO_ISIG, 0, "{what}: raw");
        assert_eq!(
            raw.0 & (libc::ICRNL | libc::IXON),
            0,
            "{what}: Enter and Ctrl-S are the guest's"
        );
        match way {
            Type(bytes) => pty.type_in(bytes),
            Signal(name) => kill(&child.child, name),
            Wait => {}
        }
        let (code, errors) = errors(child);
        assert_eq!(code.code(), Some(status), "{what}: {errors}");
        assert_eq!(pty.settings(), before, "{what}: as it was");
    }
}

/// What the main thread waits for in the kernel: the call's number and its first argument (proc(5), /proc/PID/syscall).
fn waits_in(child: &Watched, call: &str) -> bool {
    let path = format!("/proc/{}/syscall", child.child.id());
    std::fs::read_to_string(path).is_ok_and(|now| now.starts_with(call))
}

// covers: bad-input/second-signal
// covers: console/raw-restored
#[test]
fn a_second_signal_ends_a_program_that_does_not_get_to_its_end() {
    for (first, second) in [("TERM", "INT"), ("INT", "TERM"), ("TERM", "TERM"), ("HUP", "QUIT")] {
        let folder = Folder::new();
        let socket = folder.path().join("socket");
        let mut pty = Pty::new();
        pty.make_unusual();
        let before = pty.settings();
        let control = format!("unix:{}", socket.display());
        let mut child = pty.start(&spinner(), &["-vv", "--control", &control], &folder);
        pty.wait_for("spinning");
        assert_eq!(pty.settings().3 & ICANON_ECHO_ISIG, 0, "raw");
        // Nobody reads its errors, and the pipe is full: what it logs of a command waits for ever.
        let stderr = child.child.stderr.take().unwrap();
        let mut full = std::fs::OpenOptions::new();
        full.write(true).custom_flags(libc::O_NONBLOCK);
        let mut full = full.open(format!("/proc/self/fd/{}", stderr.as_raw_fd())).unwrap();
        for piece in [4096, 1] {
            while full.write(&vec![b'x'; piece]).is_ok() {}
        }
        let mut client = std::os::unix::net::UnixStream::connect(&socket).unwrap();
        client.write_all(b"{\"command\":\"status\"}\n").unwrap();
        let write_to_stderr = format!("{} 0x2 ", libc::SYS_write);
        let stuck = |child: &Watched| {
            while !waits_in(child, &write_to_stderr) {
                std::thread::sleep(Duration::from_millis(1));
            }
        };
        stuck(&child);
        kill(&child.child, first);
        // It was taken note of, and the program is where it was.
        let status = format!("/proc/{}/status", child.child.id());
        while !std::fs::read_to_string(&status)
            .unwrap()
            .contains("ShdPnd:\t0000000000000000")
        {}
        stuck(&child);
        assert_eq!(pty.settings().3 & ICANON_ECHO_ISIG, 0, "still raw");
        // timeout(1) sends the same signal twice at once, which counts as one.
        while child.child.try_wait().unwrap().is_none() {
            kill(&child.child, second);
            std::thread::sleep(Duration::from_millis(50));
        }
        assert_eq!(child.wait().code(), Some(2), "{first}, {second}");
        assert_eq!(pty.settings(), before, "{first}, {second}: as it was");
    }
}

// covers: kvm/terminal
#[test]
fn the_terminal_is_restored_after_a_run_on_kvm_that_hangs_crashes_or_fails() {
    if kvm_is_missing("the terminal after a run on KVM") {
        return;
    }
    const KVM_INTERRUPT: u64 = 0x4004_ae86;
    let options = ["--engine", "kvm", "--kvm-defects", "accept"];
    for (what, image, marker, typed, signal, status, says) in [
        ("Ctrl-A x", spinner(), "spinning", &b"\x01x"[..], None, 0, ""),
        ("SIGTERM", spinner(), "spinning", b"", Some("TERM"), 2, "SIGTERM"),
        ("triple fault", crasher(), "crashing", b"q", None, 4, "triple fault"),
        (
            "a KVM that fails",
            interrupt_echo(),
            "ready",
            b"k",
            None,
            2,
            "KVM_INTERRUPT",
        ),
    ] {
        let folder = Folder::new();
        let mut pty = Pty::new();
        pty.make_unusual();
        let before = pty.settings();
        let start = || pty.start(&image, &options, &folder);
        let child = match says {
            "KVM_INTERRUPT" => denied(Call::Ioctl(KVM_INTERRUPT), libc::EIO, start),
            _ => start(),
        };
        pty.wait_for(marker);
        assert_eq!(pty.settings().3 & ICANON_ECHO_ISIG, 0, "{what}: raw");
        pty.type_in(typed);
        if let Some(signal) = signal {
            kill(&child.child, signal);
        }
        let (code, errors) = errors(child);
        assert_eq!(code.code(), Some(status), "{what}: {errors}");
        assert!(errors.contains(says), "{what}: {errors}");
        assert_eq!(pty.settings(), before, "{what}: as it was");
    }
}

/// Waits for a key, then takes an exception without an IDT.
fn crasher() -> Vec<u8> {
    guest(|a| {
        print(a, "crashing\n");
        wait_for_key(a);
        a.ud2().unwrap();
    })
}

/// Waits for a key, then leaves with (5 << 1) | 1.
fn exiter() -> Vec<u8> {
    guest(|a| {
        print(a, "exiting\n");
        wait_for_key(a);
        debug_exit(a, 5);
    })
}

fn wait_for_key(a: &mut CodeAssembler) {
    let mut again = a.create_label();
    a.set_label(&mut again).unwrap();
    a.mov(dx, 0x3fd).unwrap();
    a.in_(al, dx).unwrap();
    a.test(al, 1).unwrap();
    a.je(again).unwrap();
}

// covers: console/raw-restored
#[test]
fn bad_input_leaves_the_terminal_alone() {
    for options in [
        &["--initrd", "/no/such/file"][..],
        &["--engine", "kvm", "--kvm-defects", "accept", "--max-instructions", "5"],
        &["--cpu", "z80"],
        &["-m", "lots"],
    ] {
        let folder = Folder::new();
        let pty = Pty::new();
        pty.make_unusual();
        let before = pty.settings();
        let (status, errors) = errors(pty.start(&echo(), options, &folder));
        assert_eq!(status.code(), Some(2), "{errors}");
        assert_eq!(errors.lines().count(), 1, "{errors}");
        assert_eq!(pty.settings(), before);
    }
}

// covers: console/escape
#[test]
fn keys_reach_the_guest_unchanged() {
    let folder = Folder::new();
    let mut pty = Pty::new();
    let child = pty.start(&echo(), &[], &folder);
    pty.wait_for("ready");
    // Ctrl-C, Ctrl-D, Ctrl-Z, Ctrl-S, Ctrl-Q, backslash, delete; Ctrl-A twice is one Ctrl-A; Ctrl-A b is both.
    pty.type_in(b"<\x03\x04\x1a\x13\x11\x1c\x7f\x01\x01\x01b>");
    let seen = pty.wait_for(">");
    assert!(seen.ends_with("<\x03\x04\x1a\x13\x11\x1c\x7f\x01\x01b>"), "{seen:?}");
    pty.type_in(b"\x01h");
    std::thread::sleep(Duration::from_millis(100));
    pty.type_in(b"q");
    let (status, errors) = errors(child);
    assert_eq!(status.code(), Some(0), "{errors}");
    assert!(errors.contains("Ctrl-A x quits"), "{errors}");
}

// covers: cli/clock
#[test]
fn a_terminal_means_wall_time_unless_told_otherwise() {
    let folder = Folder::new();
    for (options, paced) in [(&["--stats"][..], true), (&["--stats", "--clock", "virtual"], false)] {
        let mut pty = Pty::new();
        let child = pty.start(&interrupt_echo(), options, &folder);
        pty.wait_for("ready");
        std::thread::sleep(Duration::from_millis(300));
        pty.type_in(b"q");
        let (status, errors) = errors(child);
        assert_eq!(status.code(), Some(0), "{errors}");
        let seconds = |name: &str| -> f64 {
            let line = errors.lines().find(|line| line.starts_with(name)).unwrap();
            line.split_whitespace().nth(2).unwrap().parse().unwrap()
        };
        let (wall, virtual_time) = (seconds("wall time"), seconds("virtual time"));
        assert_eq!((wall - virtual_time).abs() < 0.2, paced, "{wall} {virtual_time}");
    }
}

/// Long work on a trace shows how far it is on a terminal, and cleans that up for its last line; elsewhere there is the line alone.
// covers: trace/progress
#[test]
fn work_on_a_trace_shows_a_bar_on_a_terminal() {
    let folder = Folder::new();
    let at = folder.path().join("trace");
    let image = guest(|a| {
        let mut again = a.create_label();
        a.mov(ecx, 100_000).unwrap();
        a.set_label(&mut again).unwrap();
        a.dec(ecx).unwrap();
        a.jnz(again).unwrap();
        debug_exit(a, 1);
    });
    let mut record = minivmm();
    record.args(["-m", "4M", "--kernel"]).arg(folder.file("guest", image));
    assert_eq!(run(record.arg("--trace").arg(&at)).status.code(), Some(3));
    let mut pty = Pty::new();
    for (terminal, name) in [(true, "one"), (false, "two")] {
        let mut export = minivmm();
        export.args(["trace", "export"]).arg(&at).arg("--folded");
        export.arg(folder.path().join(name));
        let text = if terminal {
            let end = Stdio::from(pty.program.try_clone().unwrap());
            let status = export.stderr(end).status().unwrap();
            assert!(status.success());
            pty.wait_for("overflows\r\n")
        } else {
            String::from_utf8(export.output().unwrap().stderr).unwrap()
        };
        assert_eq!(text.contains("calls ["), terminal, "{text:?}");
        assert_eq!(text.contains("(eta "), terminal, "{text:?}");
        let last = text
            .rsplit(['\r', '\x1b'])
            .find(|part| part.contains("minivmm: "))
            .unwrap();
        assert!(last.contains("0 gaps, 0 overflows"), "{text:?}");
    }
}
