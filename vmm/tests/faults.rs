//! Every system call that the program makes for a feature fails once, falls short, or is its last. Whatever fails: the end is a clear
//! line and a status of the guide's, nothing half-written passes for whole, and what the guest was told is on the disk is there.
//!
//! In the short form a share of the points is tried, another one with each feature; `cargo xtask test --full` tries all.

use crate::common;
use std::{
    fs,
    io::{Read, Write},
    os::unix::net::UnixStream,
    path::Path,
    process::{Command, Output},
    sync::atomic::{AtomicBool, Ordering},
    time::Duration,
};

use common::{faults::*, *};
use iced_x86::code_asm::*;

/// Something that the program is used for.
struct Feature {
    name: &'static str,
    /// What is there before.
    prepare: fn(&Path),
    /// The command, in that folder.
    command: fn(&Path) -> Command,
    /// Talks to the process, until it is told that there is none any more.
    client: fn(&Path, &AtomicBool),
    /// What holds of what is left, and of what it said: with whether it ended as it does when nothing fails.
    check: fn(&Path, &Output, bool) -> Result<(), String>,
    /// The status when nothing fails.
    status: i32,
    /// Others that it may have, beside 2 and 6: of a matrix, that a cell fails.
    others: &'static [i32],
}

fn nobody(_: &Path, _: &AtomicBool) {}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// minivmm in a folder, with these words.
fn words(folder: &Path, words: &str) -> Command {
    let mut command = minivmm();
    command.current_dir(folder).args(words.split(' '));
    command
}

impl Feature {
    /// Runs it in a new folder; what is decided about its calls comes from `decide`.
    fn run(&self, decide: impl FnMut(&Made) -> Answer) -> (Folder, Output) {
        let folder = Folder::new();
        (self.prepare)(folder.path());
        let over = AtomicBool::new(false);
        let output = std::thread::scope(|scope| {
            scope.spawn(|| (self.client)(folder.path(), &over));
            let output = supervised(&mut (self.command)(folder.path()), decide);
            over.store(true, Ordering::SeqCst);
            output
        });
        (folder, output)
    }

    /// How many calls it makes, and that it works.
    fn count(&self) -> u64 {
        let mut count = 0;
        let (folder, output) = self.run(|_| {
            count += 1;
            Answer::Goes
        });
        let errors = text(&output.stderr);
        assert_eq!(output.status.code(), Some(self.status), "{}: {errors}", self.name);
        (self.check)(folder.path(), &output, true).unwrap_or_else(|why| panic!("{}: {why}", self.name));
        assert!(count > 20, "{}: {count} calls", self.name);
        count
    }

    /// What is wrong with how it ends when one call, counted from 0, gets this answer; `None` when there is no such call.
    fn at(&self, point: u64, answer: impl Fn(&Made) -> Answer) -> Option<Result<(), String>> {
        let (mut count, mut hit) = (0, None);
        let (folder, output) = self.run(|made| {
            let here = count == point;
            count += 1;
            if !here || is_harmless(made) {
                return Answer::Goes;
            }
            hit = Some((*made, answer(made)));
            answer(made)
        });
        if count <= point {
            return None;
        }
        let Some((made, answer)) = hit else { return Some(Ok(())) };
        let killed = matches!(answer, Answer::Killed | Answer::HalfDoneAndKilled);
        let whole = output.status.code() == Some(self.status);
        let said = if killed {
            Ok(())
        } else {
            is_clear(&output, self.status, self.others)
        };
        let checked = said.and_then(|()| (self.check)(folder.path(), &output, whole));
        Some(checked.map_err(|why| {
            let [a, b, c, d, ..] = made.arguments;
            format!(
                "{} {point}: {} ({a:x}, {b:x}, {c:x}, {d:x}) {answer:?}: {why}\n  {:?}: {}",
                self.name,
                made.name(),
                output.status,
                text(&output.stderr)
            )
        }))
    }

    /// Tries points: all of them, or so many, spread.
    fn try_points(&self, tried: u64, answer: impl Fn(&Made) -> Answer) {
        let count = self.count();
        let full = std::env::var_os("MINIVMM_FULL").is_some();
        let step = if full { 1 } else { count.div_ceil(tried) };
        // Another point of each step in each feature.
        let first = self.name.len() as u64 % step;
        let points = (0..).map(|n| first + n * step);
        let results: Vec<Result<(), String>> = points.map_while(|point| self.at(point, &answer)).collect();
        println!("{}: {} of {count} calls", self.name, results.len());
        let wrong: Vec<String> = results.into_iter().filter_map(Result::err).collect();
        assert!(wrong.is_empty(), "{} of {count}:\n{}", wrong.len(), wrong.join("\n"));
    }

    /// Every call fails.
    fn fails(&self) {
        self.try_points(25, |made| Answer::Fails(made.error()));
    }

    /// Every call that may wait is interrupted by a signal once.
    fn is_interrupted(&self) {
        self.try_points(12, |made| match made.number {
            libc::SYS_openat | libc::SYS_read | libc::SYS_write | libc::SYS_readv | libc::SYS_writev => INTERRUPTED,
            libc::SYS_pread64 | libc::SYS_pwrite64 | libc::SYS_preadv | libc::SYS_pwritev => INTERRUPTED,
            libc::SYS_fallocate | libc::SYS_ftruncate | libc::SYS_fsync | libc::SYS_fdatasync => INTERRUPTED,
            libc::SYS_flock | libc::SYS_accept4 | libc::SYS_recvfrom | libc::SYS_sendto => INTERRUPTED,
            // KVM_RUN.
            libc::SYS_ioctl if made.arguments[1] == 0xae80 => INTERRUPTED,
            _ => Answer::Goes,
        });
    }

    /// The process is killed at every call, and in the middle of every write.
    fn is_killed(&self) {
        self.try_points(8, |_| Answer::Killed);
        self.try_points(8, |made| match made.writes() {
            true => Answer::HalfDoneAndKilled,
            false => Answer::Killed,
        });
    }

    /// Every write is half done.
    fn falls_short(&self) {
        self.try_points(12, |made| match made.writes() {
            // Of an event's eight bytes there is no half.
            true if made.arguments[2] != 8 => Answer::HalfDone,
            _ => Answer::Goes,
        });
    }
}

const INTERRUPTED: Answer = Answer::Fails(libc::EINTR);

/// Calls that cannot fail where they are made: F_GETFD of a descriptor that is open, which the runtime's own checks ask for.
fn is_harmless(made: &Made) -> bool {
    made.number == libc::SYS_fcntl && made.arguments[1] == libc::F_GETFD as u64
}

/// A status of the guide's, and one line of the program's where it is not the guest's.
fn is_clear(output: &Output, usual: i32, others: &[i32]) -> Result<(), String> {
    let errors = text(&output.stderr);
    let code = output.status.code().ok_or("ended by a signal")?;
    if errors.contains("panicked") {
        return Err("a panic".into());
    }
    if code == usual {
        return Ok(());
    }
    if ![2, 6].contains(&code) && !others.contains(&code) {
        return Err(format!("status {code}"));
    }
    let own: Vec<&str> = errors.lines().filter(|line| line.starts_with("minivmm: ")).collect();
    match own[..] {
        [] => Err("no line that says why".into()),
        _ if own.iter().any(|line| line.len() > 400) => Err("a line without end".into()),
        _ => Ok(()),
    }
}

fn prepare_hello(folder: &Path) {
    fs::write(folder.join("kernel"), hello()).unwrap();
}

/// Everything that the guest says, or the beginning of it.
fn says(output: &Output, all: &str, whole: bool) -> Result<(), String> {
    let said = text(&output.stdout);
    match all.starts_with(&said) && (!whole || said == all) {
        true => Ok(()),
        false => Err(format!("it said {said:?}")),
    }
}

const BOOT: Feature = Feature {
    name: "boot",
    prepare: prepare_hello,
    command: |folder| words(folder, "-m 4M --kernel kernel"),
    client: nobody,
    check: |_, output, whole| says(output, "hello\n", whole),
    status: 0,
    others: &[],
};

/// A guest with some blocks to trace.
fn looping() -> Vec<u8> {
    guest(|a| {
        let mut again = a.create_label();
        a.mov(ecx, 500).unwrap();
        a.set_label(&mut again).unwrap();
        a.dec(ecx).unwrap();
        a.jnz(again).unwrap();
        print(a, "hello\n");
        power_off(a);
    })
}

/// A trace as text.
fn decoded(folder: &Path) -> Output {
    run(&mut words(folder, "trace decode trace"))
}

const TRACE: Feature = Feature {
    name: "trace",
    prepare: |folder| fs::write(folder.join("kernel"), looping()).unwrap(),
    command: |folder| words(folder, "-m 4M --engine soft --kernel kernel --trace trace"),
    client: nobody,
    check: |folder, output, whole| {
        says(output, "hello\n", whole)?;
        // The same without a fault, which is the same to the step.
        let other = Folder::new();
        fs::write(other.path().join("kernel"), looping()).unwrap();
        run(&mut (TRACE.command)(other.path()));
        let expected = text(&decoded(other.path()).stdout);
        let info = run(&mut words(folder, "trace info trace"));
        if info.status.code() != Some(1) {
            is_clear(&info, 0, &[])?;
        }
        let (said, got) = (text(&info.stdout), text(&decoded(folder).stdout));
        let is_whole = got == expected;
        if whole && !is_whole {
            return Err(format!("the run ended well, and its trace is another:\n{got}"));
        }
        let header = fs::read_to_string(folder.join("trace/trace.json")).unwrap_or_default();
        if header.contains("\"complete\":true") && !is_whole {
            return Err(format!("a part of the trace passes for the whole:\n{said}\n{got}"));
        }
        Ok(())
    },
    status: 0,
    others: &[],
};

const RECORD: Feature = Feature {
    name: "record",
    prepare: |folder| {
        prepare_hello(folder);
        fs::write(folder.join("disk"), [7; 4096]).unwrap();
    },
    command: |folder| {
        words(
            folder,
            "-m 4M --engine soft --kernel kernel --bus mmio --disk disk --record session --seed random",
        )
    },
    client: nobody,
    check: |folder, output, whole| {
        says(output, "hello\n", whole)?;
        if fs::read(folder.join("disk")).unwrap() != [7; 4096] {
            return Err("the disk is not what it was".into());
        }
        let replayed = run(&mut words(folder, "replay session"));
        is_clear(&replayed, 0, &[])?;
        says(&replayed, "hello\n", whole)?;
        if whole && replayed.status.code() != Some(0) {
            return Err(format!("the session does not replay: {}", text(&replayed.stderr)));
        }
        Ok(())
    },
    status: 0,
    others: &[],
};

const REPLAY: Feature = Feature {
    name: "replay",
    prepare: |folder| {
        (RECORD.prepare)(folder);
        let recorded = run(&mut (RECORD.command)(folder));
        assert_eq!(recorded.status.code(), Some(0), "{}", text(&recorded.stderr));
    },
    command: |folder| words(folder, "replay session"),
    client: nobody,
    check: |folder, output, whole| {
        says(output, "hello\n", whole)?;
        let again = run(&mut words(folder, "replay session"));
        match again.status.code() {
            Some(0) => Ok(()),
            _ => Err(format!("the session was harmed: {}", text(&again.stderr))),
        }
    },
    status: 0,
    others: &[],
};

/// Text of 3000 bytes.
fn letters() -> Vec<u8> {
    (0..3000u32).map(|n| b'a' + (n % 23) as u8).collect()
}

/// cpio's "newc": a header of a magic and 13 numbers, the name and the contents, both to a multiple of four.
fn archive(files: &[(&str, u32, &[u8])]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for (n, (name, mode, contents)) in files.iter().chain(&[("TRAILER!!!", 0, &[][..])]).enumerate() {
        let numbers = [
            n as u32 + 1,
            *mode,
            0,
            0,
            1,
            1_000_000,
            contents.len() as u32,
            0,
            0,
            0,
            0,
            name.len() as u32 + 1,
            0,
        ];
        bytes.extend_from_slice(b"070701");
        for number in numbers {
            bytes.extend(format!("{number:08x}").into_bytes());
        }
        for part in [format!("{name}\0").as_bytes(), contents] {
            bytes.extend_from_slice(part);
            bytes.resize(bytes.len().next_multiple_of(4), 0);
        }
    }
    bytes
}

/// Sends bytes by a port.
fn send(a: &mut CodeAssembler, port: u32, bytes: &[u8]) {
    let mut behind = a.create_label();
    a.call(behind).unwrap();
    a.db(bytes).unwrap();
    a.set_label(&mut behind).unwrap();
    // The address behind the call, which is the first byte's.
    a.pop(esi).unwrap();
    a.mov(ecx, bytes.len() as u32).unwrap();
    a.mov(dx, port).unwrap();
    a.cld().unwrap();
    a.rep().outsb().unwrap();
}

const COLLECT: Feature = Feature {
    name: "collect",
    prepare: |folder| {
        let letters = letters();
        let files = [
            ("folder", 0o40755, &[][..]),
            ("folder/one", 0o100644, &letters),
            ("two", 0o100600, &letters[..100]),
        ];
        let image = guest(|a| {
            send(a, 0x2f8, &archive(&files));
            print(a, "sent\n");
            power_off(a);
        });
        fs::write(folder.join("kernel"), image).unwrap();
    },
    command: |folder| words(folder, "-m 4M --engine soft --kernel kernel --collect out"),
    client: nobody,
    check: |folder, output, whole| {
        says(output, "sent\n", whole)?;
        let letters = letters();
        // A guest's run goes on where a file of its cannot be written; then there is a line.
        let told = text(&output.stderr).contains("--collect");
        for (name, contents) in [("folder/one", &letters[..]), ("two", &letters[..100])] {
            match fs::read(folder.join("out").join(name)) {
                Ok(bytes) if bytes == contents => {}
                Ok(bytes) => return Err(format!("{name} has {} bytes of {}", bytes.len(), contents.len())),
                Err(_) if whole && !told => return Err(format!("{name} is missing, and nothing says so")),
                Err(_) => {}
            }
        }
        Ok(())
    },
    status: 0,
    others: &[],
};

/// Rounds of the guest that writes to its disk.
const ROUNDS: u32 = 4;

/// Writes sectors by virtio-mmio, flushes, and says so, in rounds: sector N has N + 1 in all its bytes. Says what failed, too, and ends.
/// virtio 1.2, 5.2.6 "Device Operation".
fn writing() -> Vec<u8> {
    const SECTOR: u32 = 0x20_4000;
    guest(|a| {
        // A write has all three; a flush begins with the fourth, and has no data.
        let descriptors = [
            (REQUEST, 16, NEXT, 1),
            (SECTOR, 512, NEXT, 2),
            (STATUS, 1, WRITE, 0),
            (REQUEST, 16, NEXT, 2),
        ];
        // VIRTIO_BLK_F_FLUSH.
        start_disk(a, &descriptors, 1 << 9);
        let (mut failed, mut request, mut wait) = (a.create_label(), a.create_label(), a.create_label());
        for round in 0..ROUNDS {
            for sector in [round * 2, round * 2 + 1] {
                a.mov(edi, SECTOR).unwrap();
                a.mov(eax, (sector + 1) * 0x0101_0101).unwrap();
                a.mov(ecx, 128).unwrap();
                a.rep().stosd().unwrap();
                a.mov(dword_ptr(REQUEST), 1).unwrap();
                a.mov(dword_ptr(SECTOR_NUMBER), sector).unwrap();
                a.xor(ebx, ebx).unwrap();
                a.call(request).unwrap();
            }
            a.mov(dword_ptr(REQUEST), 4).unwrap();
            a.mov(dword_ptr(SECTOR_NUMBER), 0).unwrap();
            a.mov(ebx, 3).unwrap();
            a.call(request).unwrap();
            print(a, &format!("{round}\n"));
        }
        power_off(a);
        // One request: EBX is its first descriptor.
        a.set_label(&mut request).unwrap();
        a.mov(byte_ptr(STATUS), 0xff).unwrap();
        a.movzx(eax, word_ptr(AVAILABLE + 2)).unwrap();
        a.and(eax, 7).unwrap();
        a.mov(word_ptr(eax * 2 + (AVAILABLE + 4)), bx).unwrap();
        a.inc(word_ptr(AVAILABLE + 2)).unwrap();
        a.mov(dword_ptr(common::DISK + 0x50), 0).unwrap();
        a.set_label(&mut wait).unwrap();
        a.mov(ax, word_ptr(AVAILABLE + 2)).unwrap();
        a.cmp(ax, word_ptr(USED + 2)).unwrap();
        a.jne(wait).unwrap();
        a.cmp(byte_ptr(STATUS), 0).unwrap();
        a.jne(failed).unwrap();
        a.ret().unwrap();
        a.set_label(&mut failed).unwrap();
        print(a, "failed\n");
        power_off(a);
    })
}

const DISK: Feature = Feature {
    name: "disk",
    prepare: |folder| {
        fs::write(folder.join("kernel"), writing()).unwrap();
        fs::write(folder.join("disk"), [0; 8192]).unwrap();
    },
    command: |folder| words(folder, "-m 4M --engine soft --kernel kernel --bus mmio --disk disk"),
    client: nobody,
    check: |folder, output, whole| {
        let said = text(&output.stdout);
        let disk = fs::read(folder.join("disk")).unwrap();
        if disk.len() != 8192 {
            return Err(format!("the disk has {} bytes", disk.len()));
        }
        let flushed = (0..ROUNDS)
            .take_while(|round| said.contains(&format!("{round}\n")))
            .count();
        for (n, sector) in disk.chunks(512).take(flushed * 2).enumerate() {
            if sector.iter().any(|byte| usize::from(*byte) != n + 1) {
                return Err(format!("sector {n} was flushed, and is not on the disk"));
            }
        }
        if whole && flushed != ROUNDS as usize && !said.ends_with("failed\n") {
            return Err(format!("it said {said:?}"));
        }
        Ok(())
    },
    status: 0,
    others: &[],
};

/// Sends bytes to a socket once it is there, until the answer has these words, again and again: connections may fail.
fn insist(socket: &Path, over: &AtomicBool, question: &[u8], answer: &str) {
    while !over.load(Ordering::SeqCst) {
        let Ok(mut stream) = UnixStream::connect(socket) else {
            std::thread::sleep(Duration::from_millis(2));
            continue;
        };
        let _ = stream.set_read_timeout(Some(Duration::from_millis(500)));
        if stream.write_all(question).is_err() {
            continue;
        }
        let (mut said, mut some) = (Vec::new(), [0; 256]);
        while let Ok(count @ 1..) = stream.read(&mut some) {
            said.extend_from_slice(&some[..count]);
            if text(&said).contains(answer) {
                return;
            }
        }
    }
}

const CONTROL: Feature = Feature {
    name: "control",
    prepare: |folder| fs::write(folder.join("kernel"), spinner()).unwrap(),
    command: |folder| {
        words(
            folder,
            "-m 4M --engine soft --kernel kernel --control unix:socket --timeout 20",
        )
    },
    client: |folder, over| {
        let socket = folder.join("socket");
        insist(&socket, over, b"{\"command\":\"status\"}\n", "steps");
        insist(
            &socket,
            over,
            b"{\"command\":\"monitor\",\"line\":\"snapshot save a\"}\n",
            "{",
        );
        insist(
            &socket,
            over,
            b"{\"command\":\"monitor\",\"line\":\"snapshot load a\"}\n",
            "{",
        );
        while !over.load(Ordering::SeqCst) {
            insist(&socket, over, b"{\"command\":\"quit\"}\n", "{");
        }
    },
    check: |_, output, _| {
        // It goes back to wherever the snapshot was made, and says the rest again: once, or twice where the answer was lost.
        fn is_said(said: &str, word: &str, at: usize, from: usize, times: u32) -> bool {
            let back = |end: usize| {
                said.strip_prefix(&word[at..end])
                    .is_some_and(|rest| is_said(rest, word, from, from, times - 1))
            };
            word[at..].starts_with(said) || times > 0 && (at.max(from)..=word.len()).any(back)
        }
        let (said, word) = (text(&output.stdout), "spinning\n");
        match (0..=word.len()).any(|from| is_said(&said, word, 0, from, 2)) {
            true => Ok(()),
            false => Err(format!("it said {said:?}")),
        }
    },
    status: 0,
    others: &[],
};

const GDB: Feature = Feature {
    name: "gdb",
    prepare: |folder| fs::write(folder.join("kernel"), spinner()).unwrap(),
    command: |folder| {
        words(
            folder,
            "-m 4M --engine soft --kernel kernel --gdb unix:socket --timeout 20",
        )
    },
    client: |folder, over| {
        let socket = folder.join("socket");
        // What has it stopped, its registers, and kill.
        insist(&socket, over, b"$?#3f", "$T05");
        insist(&socket, over, b"$?#3f$g#67", "#");
        while !over.load(Ordering::SeqCst) {
            insist(&socket, over, b"$k#6b", "nothing");
        }
    },
    check: CONTROL.check,
    status: 0,
    others: &[],
};

const MATRIX: Feature = Feature {
    name: "matrix",
    prepare: |folder| {
        fs::create_dir(folder.join("guests")).unwrap();
        fs::write(folder.join("guests/hello.elf"), hello()).unwrap();
    },
    command: |folder| {
        let line = "matrix --guests guests --model p6 westmere --engine soft --junit report.xml --html report.html";
        words(folder, line)
    },
    client: nobody,
    check: |folder, output, whole| {
        for (name, end) in [("report.xml", "</testsuites>"), ("report.html", "</html>")] {
            match fs::read_to_string(folder.join(name)) {
                Ok(report) if !report.trim_end().ends_with(end) => return Err(format!("half of {name}:\n{report}")),
                Err(_) if whole => return Err(format!("{name} is missing:\n{}", text(&output.stdout))),
                _ => {}
            }
        }
        Ok(())
    },
    status: 0,
    others: &[1],
};

const EXPORT: Feature = Feature {
    name: "export",
    prepare: |folder| {
        (TRACE.prepare)(folder);
        run(&mut (TRACE.command)(folder));
    },
    command: |folder| {
        words(
            folder,
            "trace export trace --callgrind callgrind --folded folded --perfetto perfetto --trace-events events",
        )
    },
    client: nobody,
    check: |folder, _, whole| {
        for name in ["callgrind", "folded", "perfetto", "events"] {
            let expected = {
                let other = Folder::new();
                (EXPORT.prepare)(other.path());
                run(&mut (EXPORT.command)(other.path()));
                fs::read(other.path().join(name)).unwrap()
            };
            match fs::read(folder.join(name)) {
                Ok(bytes) if bytes != expected => return Err(format!("{name} is not what it should be")),
                Err(_) if whole => return Err(format!("{name} is missing")),
                _ => {}
            }
        }
        Ok(())
    },
    status: 0,
    others: &[],
};

// covers: faults/calls
#[test]
fn boot_fails() {
    BOOT.fails();
}

// covers: faults/short-writes
#[test]
fn boot_falls_short() {
    BOOT.falls_short();
}

#[test]
fn boot_is_interrupted() {
    BOOT.is_interrupted();
}

// covers: faults/kills
#[test]
fn boot_is_killed() {
    BOOT.is_killed();
}

macro_rules! tried {
    ($($feature:ident: $fails:ident $short:ident $interrupted:ident $killed:ident,)*) => {
        $(
            #[test]
            fn $fails() {
                $feature.fails();
            }

            #[test]
            fn $short() {
                $feature.falls_short();
            }

            #[test]
            fn $interrupted() {
                $feature.is_interrupted();
            }

            #[test]
            fn $killed() {
                $feature.is_killed();
            }
        )*
    };
}

tried! {
    TRACE: trace_fails trace_falls_short trace_is_interrupted trace_is_killed,
    RECORD: record_fails record_falls_short record_is_interrupted record_is_killed,
    REPLAY: replay_fails replay_falls_short replay_is_interrupted replay_is_killed,
    COLLECT: collect_fails collect_falls_short collect_is_interrupted collect_is_killed,
    DISK: disk_fails disk_falls_short disk_is_interrupted disk_is_killed,
    CONTROL: control_fails control_falls_short control_is_interrupted control_is_killed,
    GDB: gdb_fails gdb_falls_short gdb_is_interrupted gdb_is_killed,
    MATRIX: matrix_fails matrix_falls_short matrix_is_interrupted matrix_is_killed,
    EXPORT: export_fails export_falls_short export_is_interrupted export_is_killed,
}
