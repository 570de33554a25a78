//! Core files of a Linux guest, and the debuggers that read them and the running guest: drgn and crash as they are distributed.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use guest_tests::{Folder, Running, full, in_minivmm, linux, minivmm, run, start, start_with_input, target};

const LIMIT: Duration = Duration::from_secs(300);

/// A Linux that has come to its shell, with sockets for commands and for QMP.
struct Guest {
    folder: Folder,
    running: Running,
}

impl Guest {
    fn start(options: &[&str]) -> Guest {
        let folder = Folder::new("dump");
        let at = |name: &str| format!("unix:{}", folder.join(name).display());
        let mut command = in_minivmm(&linux().kernel);
        command.arg("--initrd").arg(&linux().initrd).args([
            "--cmdline",
            "console=ttyS0 quiet",
            "--control",
            &at("control"),
            "--qmp",
            &at("qmp"),
        ]);
        let mut running = start(command.args(options), LIMIT);
        assert!(running.wait_for("guest#").is_some(), "no shell: {}", running.console());
        Guest { folder, running }
    }

    /// What a command on the control socket says.
    fn ctl(&self, words: &[&str]) -> String {
        let outcome = run(
            Command::new(minivmm())
                .arg("ctl")
                .arg(self.folder.join("control"))
                .args(words),
            LIMIT,
        );
        assert_eq!(outcome.errors, "", "{words:?}");
        outcome.console
    }

    /// Ends it, and gives the folder with its files.
    fn end(self) -> Folder {
        self.ctl(&["quit"]);
        let Guest { folder, running } = self;
        assert_eq!(running.finish().status, Some(0));
        folder
    }
}

/// The release that a bzImage says it is: Linux, Documentation/x86/boot.rst, kernel_version.
fn release() -> String {
    let kernel = fs::read(&linux().kernel).unwrap();
    let at = usize::from(u16::from_le_bytes([kernel[0x20e], kernel[0x20f]])) + 0x200;
    let text = kernel[at..].split(|byte| *byte == b' ').next().unwrap();
    String::from_utf8(text.to_vec()).unwrap()
}

fn word(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap())
}

/// The text of the note VMCOREINFO, and where the file has guest-physical memory from 0 on.
fn vmcoreinfo(core: &[u8]) -> (String, usize) {
    let header = |n: usize| 64 + n * 56;
    let notes = word(core, header(0) + 8) as usize;
    let notes = &core[notes..notes + word(core, header(0) + 32) as usize];
    let name = b"VMCOREINFO\0";
    let at = notes
        .windows(name.len())
        .position(|window| window == name)
        .expect("a note");
    let len = u32::from_le_bytes(notes[at - 8..at - 4].try_into().unwrap()) as usize;
    let text = at + name.len().next_multiple_of(4);
    let text = String::from_utf8(notes[text..text + len].to_vec()).unwrap();
    (text, word(core, header(1) + 8) as usize)
}

/// A number of the note, in whatever base the kernel writes it.
fn number(text: &str, key: &str, base: u32) -> u64 {
    let line = text.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix('='));
    let line = line.unwrap_or_else(|| panic!("no {key} in {text}"));
    u64::from_str_radix(line, base).unwrap()
}

/// A guest that goes on from a snapshot of another one.
fn goes_on(folder: &Folder, snapshot: &Path) {
    let control = format!("unix:{}", folder.join("again").display());
    let mut command = Command::new(minivmm());
    command.arg("--restore").arg(snapshot).args(["--control", &control]);
    let begun = std::time::Instant::now();
    let mut running = start_with_input(&mut command, LIMIT);
    running.enter("echo b$((1 + 1))ck; poweroff -f");
    assert!(running.wait_for("b2ck").is_some(), "no shell: {}", running.console());
    println!("restored, and its shell has answered after {:?}", begun.elapsed());
    assert_eq!(running.finish().status, Some(0));
}

// covers: dump/linux, snapshot/linux
#[test]
fn a_core_file_of_linux_says_where_kaslr_has_put_it_and_a_snapshot_goes_on() {
    let guest = Guest::start(&[]);
    let core = guest.folder.join("core");
    let said = guest.ctl(&["dump", core.to_str().unwrap()]);
    let release = release();
    assert!(said.contains(&format!("with VMCOREINFO of Linux {release}")), "{said}");
    let bytes = fs::read(&core).unwrap();
    fs::remove_file(&core).unwrap();
    let (text, ram) = vmcoreinfo(&bytes);
    assert!(text.starts_with(&format!("OSRELEASE={release}\n")), "{text}");
    let slide = number(&text, "KERNELOFFSET", 16);
    assert_ne!(slide, 0, "no KASLR");
    let kaslr = guest.ctl(&["monitor kaslr"]);
    assert!(
        kaslr.contains(&format!("-o {slide:#x}")),
        "{slide:#x} is not in {kaslr}"
    );
    // The kernel's own name for itself, where the note leads: linear addresses of the image less 0xffffffff80000000, and phys_base.
    let linear = number(&text, "SYMBOL(init_uts_ns)", 16);
    let line = text.lines().find_map(|line| line.strip_prefix("NUMBER(phys_base)="));
    let base: i64 = line.unwrap().parse().unwrap();
    let physical = linear.wrapping_sub(0xffff_ffff_8000_0000).wrapping_add(base as u64) as usize;
    let names = &bytes[ram + physical..ram + physical + 400];
    assert!(
        names.windows(release.len()).any(|window| window == release.as_bytes()),
        "{physical:#x}"
    );
    let snapshot = guest.folder.join("snapshot");
    let said = guest.ctl(&["snapshot", snapshot.to_str().unwrap()]);
    assert!(said.contains("for `minivmm --restore`"), "{said}");
    let folder = guest.end();
    goes_on(&folder, &snapshot);
}

/// The folder with Debian's vmlinux, by the kernel's release.
fn vmlinux() -> PathBuf {
    target().join("guest/debug").join(release()).join("vmlinux")
}

/// What drgn prints of each task.
const TASKS: &str = "from drgn.helpers.linux.pid import for_each_task\n\
for task in for_each_task(prog): print(task.pid.value_(), task.comm.string_().decode())\n";

/// The tasks that stock drgn lists: of a guest by its socket, or of a core file. `as_user`: without the right to read the process's memory.
fn drgn(folder: &Path, from: &[&str], as_user: bool) -> Vec<String> {
    let script = folder.join("tasks.py");
    fs::write(&script, TASKS).unwrap();
    let program = target().join("host/drgn/bin/drgn");
    let mut command = if as_user {
        let mut command = Command::new("setpriv");
        command
            .args(["--bounding-set", "-sys_ptrace", "--inh-caps", "-sys_ptrace"])
            .arg(program);
        command
    } else {
        Command::new(program)
    };
    command
        .current_dir(folder)
        .args(from)
        .args(["--main-symbols", "-s"])
        .arg(vmlinux());
    let outcome = run(command.arg(script), LIMIT);
    assert_eq!(outcome.status, Some(0), "{}", outcome.errors);
    outcome.console.lines().map(String::from).collect()
}

// covers: qmp/drgn, dump/drgn, dump/crash
#[test]
fn drgn_and_crash_list_the_guests_tasks_with_nothing_configured() {
    if !full() {
        println!("left out: drgn and crash, which the full form fetches with Debian's vmlinux");
        return;
    }
    let guest = Guest::start(&["--reverse"]);
    let (folder, live) = (guest.folder.join(""), ["--qemu", "qmp"]);
    let has = |tasks: &[String], name: &str| tasks.iter().any(|task| task.ends_with(name));
    let running = drgn(&folder, &live, false);
    for (number, name) in [(1, "init"), (2, "kthreadd")] {
        assert!(running.contains(&format!("{number} {name}")), "{running:?}");
    }
    assert!(has(&running, " sh"), "{running:?}");
    guest.ctl(&["pause"]);
    let paused = drgn(&folder, &live, false);
    assert!(has(&paused, " sh"), "{paused:?}");
    assert_eq!(drgn(&folder, &live, true), paused, "by QMP alone");
    let core = guest.folder.join("core");
    guest.ctl(&["dump", core.to_str().unwrap()]);
    assert_eq!(drgn(&folder, &["-c", "core"], false), paused, "of a core file");
    // crash by the list of tasks: its `ps` goes by struct pid, whose form of 2026 Debian's crash of 2022 does not know.
    let script = guest.folder.join("crash.in");
    fs::write(
        &script,
        "sys\nlist -h init_task -o task_struct.tasks -s task_struct.pid,comm\nquit\n",
    )
    .unwrap();
    let script = format!("{} -s {} core < {}", "crash", vmlinux().display(), script.display());
    let crash = run(Command::new("sh").arg("-c").arg(script).current_dir(&folder), LIMIT);
    assert!(
        crash.console.contains(&format!("RELEASE: {}", release())),
        "{}{}",
        crash.console,
        crash.errors
    );
    for task in &paused {
        let (number, name) = task.split_once(' ').unwrap();
        let listed = format!("pid = {number},\n  comm = \"{name}\\000");
        let whole = format!("pid = {number},\n  comm = \"{name}\",");
        assert!(
            crash.console.contains(&listed) || crash.console.contains(&whole),
            "{task}: {}",
            crash.console
        );
    }
    // A past step, at which there is no shell yet.
    guest.ctl(&["monitor run-to 1000000000"]);
    let past = drgn(&folder, &live, false);
    assert!(has(&past, " kthreadd") && !has(&past, " sh"), "{past:?}");
    guest.end();
}
