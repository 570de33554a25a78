//! What a jailed process cannot do, tried by one that is jailed, and that the program jails itself.
//!
//! `unsafe` is for system calls that are tried as they are.
#![allow(unsafe_code)]

use crate::common;
use std::{
    fs,
    os::unix::net::UnixStream,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use common::*;
use minivmm::jail::{self, Available, Files, calls::threads};

/// Calls that a program which owned the process would make first, with arguments that would do something.
const FORBIDDEN: &[(&str, i64, [i64; 6])] = &[
    ("execve", libc::SYS_execve, [0; 6]),
    ("execveat", libc::SYS_execveat, [0; 6]),
    ("fork", libc::SYS_fork, [0; 6]),
    ("vfork", libc::SYS_vfork, [0; 6]),
    (
        "clone of a process",
        libc::SYS_clone,
        [libc::SIGCHLD as i64, 0, 0, 0, 0, 0],
    ),
    ("ptrace", libc::SYS_ptrace, [libc::PTRACE_TRACEME as i64, 0, 0, 0, 0, 0]),
    ("process_vm_readv", libc::SYS_process_vm_readv, [1, 0, 0, 0, 0, 0]),
    ("process_vm_writev", libc::SYS_process_vm_writev, [1, 0, 0, 0, 0, 0]),
    ("pidfd_open", libc::SYS_pidfd_open, [1, 0, 0, 0, 0, 0]),
    ("pidfd_getfd", libc::SYS_pidfd_getfd, [0; 6]),
    ("kill", libc::SYS_kill, [1, 0, 0, 0, 0, 0]),
    ("tkill", libc::SYS_tkill, [1, 0, 0, 0, 0, 0]),
    (
        "socket",
        libc::SYS_socket,
        [libc::AF_INET as i64, libc::SOCK_STREAM as i64, 0, 0, 0, 0],
    ),
    ("socketpair", libc::SYS_socketpair, [0; 6]),
    ("connect", libc::SYS_connect, [0; 6]),
    ("bind", libc::SYS_bind, [0; 6]),
    ("listen", libc::SYS_listen, [0; 6]),
    ("mount", libc::SYS_mount, [0; 6]),
    ("umount2", libc::SYS_umount2, [0; 6]),
    ("pivot_root", libc::SYS_pivot_root, [0; 6]),
    ("chroot", libc::SYS_chroot, [0; 6]),
    ("chdir", libc::SYS_chdir, [0; 6]),
    (
        "unshare",
        libc::SYS_unshare,
        [libc::CLONE_NEWUSER as i64, 0, 0, 0, 0, 0],
    ),
    ("setns", libc::SYS_setns, [0; 6]),
    ("open_by_handle_at", libc::SYS_open_by_handle_at, [0; 6]),
    ("openat2", libc::SYS_openat2, [0; 6]),
    ("open", libc::SYS_open, [0; 6]),
    ("creat", libc::SYS_creat, [0; 6]),
    ("mknodat", libc::SYS_mknodat, [0; 6]),
    ("symlinkat", libc::SYS_symlinkat, [0; 6]),
    ("chmod", libc::SYS_chmod, [0; 6]),
    ("fchmodat", libc::SYS_fchmodat, [0; 6]),
    ("chown", libc::SYS_chown, [0; 6]),
    ("fchown", libc::SYS_fchown, [0; 6]),
    ("setxattr", libc::SYS_setxattr, [0; 6]),
    ("truncate", libc::SYS_truncate, [0; 6]),
    ("setuid", libc::SYS_setuid, [0; 6]),
    ("setresuid", libc::SYS_setresuid, [0; 6]),
    ("setgid", libc::SYS_setgid, [0; 6]),
    ("setgroups", libc::SYS_setgroups, [0; 6]),
    ("capset", libc::SYS_capset, [0; 6]),
    ("personality", libc::SYS_personality, [0; 6]),
    (
        "prctl PR_SET_DUMPABLE",
        libc::SYS_prctl,
        [libc::PR_SET_DUMPABLE as i64, 1, 0, 0, 0, 0],
    ),
    ("arch_prctl", libc::SYS_arch_prctl, [0; 6]),
    ("bpf", libc::SYS_bpf, [0; 6]),
    ("perf_event_open", libc::SYS_perf_event_open, [0; 6]),
    ("io_uring_setup", libc::SYS_io_uring_setup, [1, 0, 0, 0, 0, 0]),
    ("userfaultfd", libc::SYS_userfaultfd, [0; 6]),
    ("keyctl", libc::SYS_keyctl, [0; 6]),
    ("add_key", libc::SYS_add_key, [0; 6]),
    ("init_module", libc::SYS_init_module, [0; 6]),
    ("finit_module", libc::SYS_finit_module, [0; 6]),
    ("delete_module", libc::SYS_delete_module, [0; 6]),
    ("kexec_load", libc::SYS_kexec_load, [0; 6]),
    ("reboot", libc::SYS_reboot, [0; 6]),
    ("swapon", libc::SYS_swapon, [0; 6]),
    ("iopl", libc::SYS_iopl, [0; 6]),
    ("ioperm", libc::SYS_ioperm, [0; 6]),
    ("modify_ldt", libc::SYS_modify_ldt, [0; 6]),
    ("quotactl", libc::SYS_quotactl, [0; 6]),
    ("acct", libc::SYS_acct, [0; 6]),
    ("syslog", libc::SYS_syslog, [3, 0, 0, 0, 0, 0]),
    ("settimeofday", libc::SYS_settimeofday, [0; 6]),
    ("clock_settime", libc::SYS_clock_settime, [0; 6]),
    ("sethostname", libc::SYS_sethostname, [0; 6]),
    ("shmget", libc::SYS_shmget, [0, 4096, 0, 0, 0, 0]),
    ("msgget", libc::SYS_msgget, [0; 6]),
    ("inotify_init1", libc::SYS_inotify_init1, [0; 6]),
    ("fanotify_init", libc::SYS_fanotify_init, [0; 6]),
    ("ioctl TIOCSTI", libc::SYS_ioctl, [0, libc::TIOCSTI as i64, 0, 0, 0, 0]),
    ("ioctl TIOCLINUX", libc::SYS_ioctl, [0, 0x541c, 0, 0, 0, 0]),
];

/// A call as it is: its error, if it has one.
fn call(number: i64, arguments: [i64; 6]) -> Option<i32> {
    let [a, b, c, d, e, f] = arguments;
    // SAFETY: Every call of the list is refused before it looks at its arguments, which is what is tested; one that is not has null
    // pointers and numbers of nothing. The process is a child of the test's that exists for this.
    let result = unsafe { libc::syscall(number, a, b, c, d, e, f) };
    (result == -1).then(|| std::io::Error::last_os_error().raw_os_error().unwrap_or(0))
}

const CHILD: &str = "MINIVMM_JAIL_TEST";

/// Runs this test program again for one of its tests, as the child that is jailed.
fn child(test: &str, folder: &Path) -> std::process::Output {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command
        .args(["--exact", &format!("jail::{test}"), "--nocapture"])
        .env(CHILD, folder);
    run(&mut command)
}

/// The folder, in the child.
fn jailed() -> Option<PathBuf> {
    std::env::var_os(CHILD).map(PathBuf::from)
}

fn must_hold(output: &std::process::Output) {
    let (said, errors) = (
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr),
    );
    assert!(output.status.success(), "{said}\n{errors}");
    assert!(said.contains("all was refused"), "{said}\n{errors}");
}

// covers: jail/calls
#[test]
fn forbidden_calls_are_refused_by_name() {
    if jailed().is_none() {
        let folder = Folder::new();
        return must_hold(&child("forbidden_calls_are_refused_by_name", folder.path()));
    }
    // A thread of its own for each kind, as both are of one process here.
    for who in [threads::MACHINE, threads::CLIENTS] {
        let tried = std::thread::spawn(move || {
            jail::enter(who, &Files::default()).unwrap();
            let mut wrong = Vec::new();
            for (name, number, arguments) in FORBIDDEN {
                let error = call(*number, *arguments);
                if error != Some(libc::EPERM) {
                    wrong.push(format!("{name}: {error:?}"));
                }
            }
            // What the C library asks for first, and then takes another way.
            if call(libc::SYS_clone3, [0; 6]) != Some(libc::ENOSYS) {
                wrong.push("clone3".into());
            }
            // What is allowed works: threads, memory, time.
            std::thread::Builder::new()
                .name("inner".into())
                .spawn(|| vec![0u8; 8 << 20].len())
                .unwrap()
                .join()
                .unwrap();
            wrong
        });
        assert_eq!(tried.join().unwrap(), Vec::<String>::new());
    }
    // Threads that serve clients open nothing, and need no name.
    let tried = std::thread::spawn(|| {
        jail::enter(threads::CLIENTS, &Files::default()).unwrap();
        [
            libc::SYS_openat,
            libc::SYS_unlink,
            libc::SYS_rename,
            libc::SYS_mkdir,
            libc::SYS_memfd_create,
        ]
        .map(|number| call(number, [0; 6]))
    });
    assert_eq!(tried.join().unwrap(), [Some(libc::EPERM); 5]);
    // Host Intel PT: the event is opened as the guest turns its tracing on. There is none at address 0.
    let tried = std::thread::spawn(|| {
        jail::enter(threads::MACHINE | threads::HOST_PT, &Files::default()).unwrap();
        (call(libc::SYS_perf_event_open, [0; 6]), call(libc::SYS_execve, [0; 6]))
    });
    assert_eq!(tried.join().unwrap(), (Some(libc::EFAULT), Some(libc::EPERM)));
    println!("all was refused");
}

/// Landlock has EXDEV for a name in another folder that would widen what may be done with the file.
fn refused<T>(result: std::io::Result<T>) -> bool {
    result.is_err_and(|error| matches!(error.raw_os_error(), Some(libc::EACCES | libc::EPERM | libc::EXDEV)))
}

// covers: jail/files
#[test]
fn only_files_that_are_named_can_be_used() {
    let Some(folder) = jailed() else {
        let folder = Folder::new();
        for name in ["open", "closed"] {
            fs::create_dir(folder.path().join(name)).unwrap();
            folder.file(&format!("{name}/file"), "text");
        }
        folder.file("kernel", "text");
        std::os::unix::fs::symlink("../closed/file", folder.path().join("open/link")).unwrap();
        if Available::here().landlock == 0 {
            skipped("files of a jailed process", &"this kernel has no Landlock");
            return;
        }
        must_hold(&child("only_files_that_are_named_can_be_used", folder.path()));
        let read = |name: &str| fs::read_to_string(folder.path().join(name)).unwrap();
        assert_eq!(
            (read("closed/file").as_str(), read("open/new").as_str()),
            ("text", "new")
        );
        return;
    };
    let at = |name: &str| folder.join(name);
    let files = Files {
        read: vec![at("kernel")],
        write: vec![at("open")],
        share: Vec::new(),
        remove: Vec::new(),
    };
    let tried = std::thread::spawn({
        let folder = folder.clone();
        move || {
            jail::enter(threads::MACHINE, &files).unwrap();
            let at = |name: &str| folder.join(name);
            let append = |path: &Path| fs::OpenOptions::new().append(true).open(path);
            [
                ("reading another file", refused(fs::read(at("closed/file")))),
                ("writing another file", refused(append(&at("closed/file")))),
                ("truncating another file", refused(fs::write(at("closed/file"), ""))),
                ("making another file", refused(fs::write(at("closed/new"), ""))),
                ("removing another file", refused(fs::remove_file(at("closed/file")))),
                (
                    "moving a file out",
                    refused(fs::rename(at("open/file"), at("closed/moved"))),
                ),
                (
                    "linking a file in",
                    refused(fs::hard_link(at("closed/file"), at("open/hard"))),
                ),
                ("a link that leads out", refused(fs::read(at("open/link")))),
                ("listing another folder", refused(fs::read_dir(at("closed")))),
                ("writing what is to be read", refused(append(&at("kernel")))),
                ("/etc/passwd", refused(fs::read("/etc/passwd"))),
                ("/proc/1/environ", refused(fs::read("/proc/1/environ"))),
                ("/dev/kmsg", refused(append(Path::new("/dev/kmsg")))),
                ("/tmp", refused(fs::write("/tmp/minivmm-jail-test", ""))),
                ("a folder anywhere", refused(fs::create_dir("/tmp/minivmm-jail-test"))),
                ("what is named is read", fs::read(at("kernel")).is_ok()),
                ("what is named is written", fs::write(at("open/new"), "new").is_ok()),
            ]
        }
    });
    for (what, holds) in tried.join().unwrap() {
        assert!(holds, "{what}");
    }
    println!("all was refused");
}

/// Numbers of a thread's jail, from proc(5).
fn jail_of(task: &Path) -> (String, Vec<String>) {
    let status = fs::read_to_string(task.join("status")).unwrap();
    let value = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name));
        line.unwrap_or_default().trim().to_string()
    };
    (
        value("Name:"),
        ["NoNewPrivs:", "Seccomp:", "CapEff:", "CapPrm:"].map(value).to_vec(),
    )
}

/// Counters count in KVM where KVM delivers breakpoints, which a jailed process could no longer try.
// covers: jail/kvm-tried
#[test]
fn what_kvm_delivers_is_tried_before_the_jail_closes() {
    if kvm_is_missing("what KVM delivers is tried before the jail closes") {
        return;
    }
    let folder = Folder::new();
    let kernel = folder.file("kernel", spinner());
    let options = "--engine kvm --kvm-defects accept --cpu-model haswell --pmu=emulated --timeout 1 -v --kernel";
    let output = minivmm().args(options.split(' ')).arg(kernel).output().unwrap();
    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(errors.contains("--sandbox on: "), "{errors}");
    assert!(errors.contains("KVM_SET_GUEST_DEBUG: "), "{errors}");
    assert!(!errors.contains("no permission"), "{errors}");
}

// covers: jail/default
#[test]
fn every_thread_of_a_run_is_jailed_unless_told_otherwise() {
    let folder = Folder::new();
    let kernel = folder.file("kernel", spinner());
    let own = &["control", "control client", "gdb", "minivmm"][..];
    let with_cpus = &["control", "control client", "cpu0", "cpu1", "gdb", "minivmm"][..];
    // Packets are made on a thread where there is a CPU for it.
    let traced = match std::thread::available_parallelism() {
        Ok(cpus) if cpus.get() > 1 => &["control", "control client", "gdb", "minivmm", "trace"][..],
        _ => own,
    };
    let mut runs = vec![
        (&["--engine", "soft"][..], own, true),
        (
            &["--engine", "soft", "--sandbox", "on", "--trace", "trace"],
            traced,
            true,
        ),
        (&["--engine", "soft", "--sandbox", "off"], own, false),
    ];
    if !kvm_is_missing("threads of CPUs in KVM are jailed") {
        // Whatever of time or CPUID this KVM does otherwise.
        let kvm = &["--engine", "kvm", "--cpus", "2", "--kvm-defects", "accept"];
        runs.push((kvm, with_cpus, true));
    }
    for (options, threads, on) in runs {
        let at = |name: &str| folder.path().join(name);
        let mut command = minivmm();
        command
            .arg("--kernel")
            .arg(&kernel)
            .args(options)
            .arg("-v")
            .current_dir(folder.path());
        command
            .arg("--control")
            .arg(format!("unix:{}", at("control").display()));
        command.arg("--gdb").arg(format!("unix:{}", at("gdb").display()));
        command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let mut process = Watched::new(command.spawn().unwrap());
        let mut said = [0; 8];
        std::io::Read::read_exact(process.child.stdout.as_mut().unwrap(), &mut said).unwrap();
        // A client's thread, too: it is there once it has answered.
        let mut client = UnixStream::connect(at("control")).unwrap();
        std::io::Write::write_all(&mut client, b"{\"command\":\"status\"}\n").unwrap();
        std::io::Read::read_exact(&mut client, &mut said).unwrap();
        let tasks = format!("/proc/{}/task", process.child.id());
        let begun = Instant::now();
        let names = loop {
            let mut names = Vec::new();
            for task in fs::read_dir(&tasks).unwrap() {
                let (name, jail) = jail_of(&task.unwrap().path());
                if name.starts_with("kvm-") {
                    // A thread of the kernel's for this machine, that runs no code of the process.
                    continue;
                }
                let none = "0000000000000000".to_string();
                if on {
                    assert_eq!(jail, ["1".into(), "2".into(), none.clone(), none], "{name}");
                } else {
                    assert_eq!(jail[..2], ["0", "0"], "{name}");
                }
                names.push(name);
            }
            names.sort();
            // One that makes packets begins with the first of them.
            if names == threads || begun.elapsed() > Duration::from_secs(20) {
                break names;
            }
            std::thread::sleep(Duration::from_millis(20));
        };
        assert_eq!(names, threads);
        let limits = fs::read_to_string(format!("/proc/{}/limits", process.child.id())).unwrap();
        let core = limits
            .lines()
            .find(|line| line.starts_with("Max core file size"))
            .unwrap();
        assert!(!on || core.split_whitespace().nth(4) == Some("0"), "{core}");
        kill(&process.child, "TERM");
        let errors = String::from_utf8_lossy(&process.output().stderr).into_owned();
        assert_eq!(errors.contains("--sandbox on: "), on, "{errors}");
        assert!(
            !at("control").exists() && !at("gdb").exists(),
            "the sockets are removed"
        );
    }
}

// covers: jail/allow-write
#[test]
fn a_trace_that_begins_later_lies_below_allow_write() {
    let folder = Folder::new();
    let kernel = folder.file("kernel", spinner());
    let socket = folder.path().join("control");
    fs::create_dir(folder.path().join("allowed")).unwrap();
    let mut command = minivmm();
    command.current_dir(folder.path()).arg("--kernel").arg(&kernel);
    command.args([
        "--serial",
        "null",
        "--control",
        "unix:control",
        "--allow-write",
        "allowed",
    ]);
    let mut process = Watched::new(command.stderr(Stdio::piped()).spawn().unwrap());
    while UnixStream::connect(&socket).is_err() {
        assert!(process.child.try_wait().unwrap().is_none());
    }
    let monitor = |line: &str| {
        let output = run(minivmm().arg("ctl").arg(&socket).arg(format!("monitor {line}")));
        String::from_utf8(output.stdout).unwrap() + &String::from_utf8(output.stderr).unwrap()
    };
    if Available::here().landlock != 0 {
        let refused = monitor("trace start elsewhere");
        assert!(
            refused.contains("elsewhere") && refused.contains("permission denied"),
            "{refused}"
        );
        assert!(!folder.path().join("elsewhere").exists());
    }
    let started = monitor("trace start allowed/trace");
    assert!(started.contains("recording from step"), "{started}");
    let stopped = monitor("trace stop");
    assert!(stopped.contains("recorded up to"), "{stopped}");
    assert_eq!(
        run(minivmm().arg("ctl").arg(&socket).arg("quit")).status.code(),
        Some(0)
    );
    assert_eq!(process.wait().code(), Some(0));
    let read = run(minivmm()
        .args(["trace", "info"])
        .arg(folder.path().join("allowed/trace")));
    assert_eq!(read.status.code(), Some(0), "{}", String::from_utf8_lossy(&read.stderr));
}

/// The table has no call that others are refused by.
// covers: jail/calls
#[test]
fn no_row_of_the_table_lets_a_forbidden_call_through() {
    for row in jail::calls::CALLS {
        assert!(!row.why.is_empty());
        let forbidden = FORBIDDEN.iter().find(|(_, number, _)| *number == row.call);
        let whole = row.who & threads::ALL != 0 && matches!(row.only, jail::calls::Only::Any);
        assert!(forbidden.is_none() || !whole, "{forbidden:?}");
    }
}

// covers: jail/probe
#[test]
fn probe_says_what_this_kernel_has_of_the_jail() {
    // landlock_create_ruleset(2): its flag 1 asks for the version.
    // SAFETY: With this flag there is no ruleset to be read, and a number comes back.
    let version = unsafe { libc::syscall(libc::SYS_landlock_create_ruleset, 0, 0, 1) };
    let landlock = version.clamp(0, 6);
    let text = String::from_utf8(run(minivmm().arg("probe")).stdout).unwrap();
    let line = text.lines().find(|line| line.starts_with("--sandbox: ")).unwrap();
    match landlock {
        0 => assert!(line.contains("no Landlock"), "{line}"),
        version => assert!(line.contains(&format!("Landlock {version} ")), "{line}"),
    }
    let json = run(minivmm().args(["probe", "--json"])).stdout;
    let json: serde_json::Value = serde_json::from_slice(&json).unwrap();
    assert_eq!(
        json["sandbox"],
        serde_json::json!({ "seccomp": true, "landlock": landlock })
    );
}

/// Every other test runs the program as people do. User-mode emulation has no seccomp, and goes without.
// covers: jail/everywhere
#[test]
fn the_sandbox_is_off_in_no_other_test() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let mut without = Vec::new();
    let mut folders: Vec<PathBuf> = ["vmm", "guest-tests", "tools"].map(|folder| root.join(folder)).to_vec();
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() && !path.ends_with("target") {
                folders.push(path);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                let text: String = fs::read_to_string(&path).unwrap().split_whitespace().collect();
                let count = text.matches("\"--sandbox\",\"off\"").count();
                if count > 0 {
                    let name = path.strip_prefix(&root).unwrap().to_str().unwrap().to_string();
                    without.push((name, count));
                }
            }
        }
    }
    without.sort();
    // QMP's reads out of the process's memory are tried with the sandbox and without it.
    let expected = [
        ("guest-tests/src/lib.rs", 1),
        ("vmm/tests/jail.rs", 1),
        ("vmm/tests/qmp.rs", 1),
    ];
    let without: Vec<(&str, usize)> = without.iter().map(|(name, count)| (name.as_str(), *count)).collect();
    assert_eq!(without, expected);
}
