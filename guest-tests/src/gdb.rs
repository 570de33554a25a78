//! Debian's gdb as the client of a guest that minivmm runs.

use std::io::ErrorKind;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use crate::{Folder, Outcome, Running, in_minivmm, run, start};

/// So long a session may take.
pub const LIMIT: Duration = Duration::from_secs(300);
/// Where [`Guest::code`] has its first instruction.
pub const START: u64 = 0x10_0020;

/// A guest that gdb can connect to.
pub struct Guest {
    /// Where its files are, the socket `gdb` and the script among them.
    pub folder: Folder,
    /// The process.
    pub running: Running,
}

/// A multiboot image of 32-bit code at [`START`], in a file.
pub fn program(folder: &Path, code: &[u8]) -> PathBuf {
    let flags = 1u32 << 16;
    let checksum = 0u32.wrapping_sub(0x1bad_b002).wrapping_sub(flags);
    let words = [0x1bad_b002, flags, checksum, 0x10_0000, 0x10_0000, 0, 0, START as u32];
    let mut image: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
    image.extend(code);
    let path = folder.join("kernel");
    std::fs::write(&path, image).unwrap();
    path
}

impl Guest {
    /// Waits until there is a socket.
    pub fn start(kernel: &Path, options: &[&str]) -> Guest {
        Guest::start_in(Folder::new("gdb"), kernel, options)
    }

    /// The same with a folder that has files in it.
    pub fn start_in(folder: Folder, kernel: &Path, options: &[&str]) -> Guest {
        let mut command = in_minivmm(kernel);
        command
            .arg("--gdb")
            .arg(format!("unix:{}", folder.join("gdb").display()))
            .arg("--allow-write")
            .arg(folder.join(""));
        let running = start(command.args(options), LIMIT);
        let guest = Guest { folder, running };
        let end = Instant::now() + LIMIT;
        while !guest.socket().exists() {
            assert!(Instant::now() < end, "no socket");
            std::thread::sleep(Duration::from_millis(5));
        }
        guest
    }

    /// One of 32-bit code at [`START`].
    pub fn code(code: &[u8], options: &[&str]) -> Guest {
        let folder = Folder::new("gdb");
        let kernel = program(&folder, code);
        Guest::start_in(folder, &kernel, options)
    }

    /// Where gdb connects.
    pub fn socket(&self) -> PathBuf {
        self.folder.join("gdb")
    }

    /// gdb with these commands once it is connected.
    pub fn command(&self, script: &str) -> Command {
        let mut gdb = Command::new("gdb");
        gdb.args([
            "-nx",
            "-batch",
            "-ex",
            "set pagination off",
            "-ex",
            "set confirm off",
            "-ex",
        ]);
        gdb.arg(format!("target remote {}", self.socket().display()));
        let file = self.folder.join("script");
        std::fs::write(&file, script).unwrap();
        gdb.arg("-x").arg(file);
        gdb
    }

    /// What gdb says.
    pub fn gdb(&self, script: &str) -> String {
        let outcome = run(&mut self.command(script), LIMIT);
        outcome.console + &outcome.errors
    }

    /// A client that is not gdb.
    pub fn client(&self) -> UnixStream {
        // Its name is there a moment before it is listened at.
        let limit = Instant::now() + LIMIT;
        let client = loop {
            match UnixStream::connect(self.socket()) {
                Err(error) if error.kind() == ErrorKind::ConnectionRefused && Instant::now() < limit => {
                    std::thread::sleep(Duration::from_millis(5));
                }
                client => break client.unwrap(),
            }
        };
        client.set_read_timeout(Some(LIMIT)).unwrap();
        client
    }

    /// Waits for the process.
    pub fn finish(self) -> Outcome {
        let outcome = self.running.finish();
        assert!(!self.folder.join("gdb").exists(), "the socket is removed");
        outcome
    }
}

/// Fails the test unless each of the parts is in what follows the one before.
#[track_caller]
pub fn says(text: &str, parts: &[&str]) {
    let mut rest = text;
    for part in parts {
        match rest.find(part) {
            Some(at) => rest = &rest[at + part.len()..],
            None => panic!("{part:?} is not in what follows:\n{rest}\nof\n{text}"),
        }
    }
}
