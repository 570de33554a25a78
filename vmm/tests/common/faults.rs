//! System calls of the program that fail, fall short, or are its last, at points that a test chooses.
//!
//! The program is the one that users run, and nothing in it knows of this: a filter of the kernel's (seccomp(2), SECCOMP_RET_USER_NOTIF)
//! has it wait at every call of the list until the test has decided. That covers the C library and every crate alike, files, sockets,
//! mappings and KVM; a layer inside the program would cover what goes through the layer. `LD_PRELOAD` would miss calls that go past
//! the C library (rustix's), and ptrace(2) stops twice at all calls, also those of no interest.
#![allow(unsafe_code)]

use std::{
    fs, io,
    os::fd::{AsRawFd, FromRawFd, OwnedFd},
    process::{Child, Command, Output, Stdio},
    sync::mpsc,
};

use super::Watched;

/// A system call that the program is about to make.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Made {
    pub number: i64,
    pub arguments: [u64; 6],
    /// By the process's first thread.
    pub first_thread: bool,
}

/// What becomes of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer {
    /// It is made.
    Goes,
    /// It fails with this error, and nothing is done.
    Fails(i32),
    /// Of a write: half of it is done, and that is what it says.
    HalfDone,
    /// The process is killed instead.
    Killed,
    /// Of a write: half of it is done, and the process is killed.
    HalfDoneAndKilled,
}

/// Calls at which the program waits: everything that takes a name, moves bytes, makes a descriptor or a mapping.
pub const CALLS: &[(i64, &str)] = &[
    (libc::SYS_openat, "openat"),
    (libc::SYS_read, "read"),
    (libc::SYS_readv, "readv"),
    (libc::SYS_pread64, "pread64"),
    (libc::SYS_preadv, "preadv"),
    (libc::SYS_write, "write"),
    (libc::SYS_writev, "writev"),
    (libc::SYS_pwrite64, "pwrite64"),
    (libc::SYS_pwritev, "pwritev"),
    (libc::SYS_lseek, "lseek"),
    (libc::SYS_ftruncate, "ftruncate"),
    (libc::SYS_fallocate, "fallocate"),
    (libc::SYS_fsync, "fsync"),
    (libc::SYS_fdatasync, "fdatasync"),
    (libc::SYS_fstat, "fstat"),
    (libc::SYS_newfstatat, "newfstatat"),
    (libc::SYS_statx, "statx"),
    (libc::SYS_fchmod, "fchmod"),
    (libc::SYS_utimensat, "utimensat"),
    (libc::SYS_flock, "flock"),
    (libc::SYS_rename, "rename"),
    (libc::SYS_unlink, "unlink"),
    (libc::SYS_unlinkat, "unlinkat"),
    (libc::SYS_rmdir, "rmdir"),
    (libc::SYS_mkdir, "mkdir"),
    (libc::SYS_link, "link"),
    (libc::SYS_linkat, "linkat"),
    (libc::SYS_getdents64, "getdents64"),
    (libc::SYS_getcwd, "getcwd"),
    (libc::SYS_readlink, "readlink"),
    (libc::SYS_fcntl, "fcntl"),
    (libc::SYS_dup, "dup"),
    (libc::SYS_ioctl, "ioctl"),
    (libc::SYS_mmap, "mmap"),
    (libc::SYS_mremap, "mremap"),
    (libc::SYS_mprotect, "mprotect"),
    (libc::SYS_madvise, "madvise"),
    (libc::SYS_memfd_create, "memfd_create"),
    (libc::SYS_socket, "socket"),
    (libc::SYS_bind, "bind"),
    (libc::SYS_listen, "listen"),
    (libc::SYS_accept4, "accept4"),
    (libc::SYS_recvfrom, "recvfrom"),
    (libc::SYS_sendto, "sendto"),
    (libc::SYS_setsockopt, "setsockopt"),
    (libc::SYS_epoll_create1, "epoll_create1"),
    (libc::SYS_epoll_ctl, "epoll_ctl"),
    (libc::SYS_eventfd2, "eventfd2"),
    (libc::SYS_timerfd_create, "timerfd_create"),
    (libc::SYS_timerfd_settime, "timerfd_settime"),
    (libc::SYS_rt_sigaction, "rt_sigaction"),
    (libc::SYS_seccomp, "seccomp"),
    (libc::SYS_landlock_create_ruleset, "landlock_create_ruleset"),
    (libc::SYS_landlock_restrict_self, "landlock_restrict_self"),
    (libc::SYS_capset, "capset"),
    (libc::SYS_sigaltstack, "sigaltstack"),
];

impl Made {
    pub fn name(&self) -> &'static str {
        CALLS
            .iter()
            .find(|(number, _)| *number == self.number)
            .map_or("?", |(_, name)| name)
    }

    /// Whether it writes to a descriptor.
    pub fn writes(&self) -> bool {
        matches!(self.number, libc::SYS_write | libc::SYS_pwrite64)
    }

    /// An error that this call has in life.
    pub fn error(&self) -> i32 {
        match self.number {
            libc::SYS_openat if self.arguments[2] & libc::O_CREAT as u64 != 0 => libc::ENOSPC,
            libc::SYS_openat => libc::EMFILE,
            libc::SYS_write | libc::SYS_writev | libc::SYS_pwrite64 | libc::SYS_pwritev => libc::ENOSPC,
            libc::SYS_ftruncate | libc::SYS_fallocate | libc::SYS_rename | libc::SYS_mkdir => libc::ENOSPC,
            libc::SYS_mmap | libc::SYS_mremap | libc::SYS_mprotect | libc::SYS_madvise => libc::ENOMEM,
            libc::SYS_socket | libc::SYS_accept4 | libc::SYS_eventfd2 | libc::SYS_epoll_create1 => libc::EMFILE,
            libc::SYS_timerfd_create | libc::SYS_memfd_create | libc::SYS_dup | libc::SYS_fcntl => libc::EMFILE,
            libc::SYS_bind => libc::EADDRINUSE,
            libc::SYS_recvfrom | libc::SYS_sendto => libc::ECONNRESET,
            libc::SYS_fchmod | libc::SYS_utimensat | libc::SYS_unlink | libc::SYS_unlinkat => libc::EPERM,
            libc::SYS_link | libc::SYS_linkat | libc::SYS_seccomp | libc::SYS_capset => libc::EPERM,
            libc::SYS_landlock_restrict_self => libc::EPERM,
            libc::SYS_landlock_create_ruleset => libc::ENOMEM,
            libc::SYS_rt_sigaction | libc::SYS_listen | libc::SYS_setsockopt => libc::EINVAL,
            _ => libc::EIO,
        }
    }
}

/// _IOWR('!', 0, struct seccomp_notif) and _IOWR('!', 1, struct seccomp_notif_resp), of Linux `include/uapi/linux/seccomp.h`.
const RECEIVE: u64 = 0xc050_2100;
const SEND: u64 = 0xc018_2101;

/// Has the calling thread, and what it starts, wait at the calls: who answers has the descriptor.
fn wait_at_calls() -> OwnedFd {
    let code = |code: u32| code as u16;
    let statement = |code: u16, k: u32| libc::sock_filter { code, jt: 0, jf: 0, k };
    // The number is the first word of struct seccomp_data.
    let mut program = vec![statement(code(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS), 0)];
    for (n, (number, _)) in CALLS.iter().enumerate() {
        program.push(libc::sock_filter {
            code: code(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K),
            jt: (CALLS.len() - n) as u8,
            jf: 0,
            k: *number as u32,
        });
    }
    program.push(statement(code(libc::BPF_RET | libc::BPF_K), libc::SECCOMP_RET_ALLOW));
    program.push(statement(
        code(libc::BPF_RET | libc::BPF_K),
        libc::SECCOMP_RET_USER_NOTIF,
    ));
    let program = libc::sock_fprog {
        len: program.len() as u16,
        filter: program.as_mut_ptr(),
    };
    // SAFETY: The program lives until the call is over, and has as many statements as it says.
    let listener = unsafe {
        assert_eq!(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
        libc::syscall(
            libc::SYS_seccomp,
            libc::SECCOMP_SET_MODE_FILTER,
            libc::SECCOMP_FILTER_FLAG_NEW_LISTENER,
            &raw const program,
        )
    };
    assert!(listener >= 0, "{}", io::Error::last_os_error());
    // SAFETY: A new descriptor, that nobody else has.
    unsafe { OwnedFd::from_raw_fd(listener as i32) }
}

/// The process that a thread is of.
fn process_of(thread: u32) -> Option<u32> {
    let status = fs::read_to_string(format!("/proc/{thread}/status")).ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("Tgid:"))?;
    line.trim().parse().ok()
}

/// Writes the first half of what a write would, by its descriptor and with its memory.
fn write_half(process: u32, made: &Made) -> Option<usize> {
    let [fd, from, len, offset, ..] = made.arguments;
    let half = (len / 2) as usize;
    if half == 0 {
        // A byte is written or it is not, and a system never says that it has written nothing.
        return None;
    }
    let mut bytes = vec![0u8; half];
    let local = libc::iovec {
        iov_base: bytes.as_mut_ptr().cast(),
        iov_len: half,
    };
    let remote = libc::iovec {
        iov_base: from as *mut libc::c_void,
        iov_len: half,
    };
    // SAFETY: The local memory is as long as it says; the remote one is not ours to harm.
    let copied = unsafe { libc::process_vm_readv(process as i32, &raw const local, 1, &raw const remote, 1, 0) };
    if copied != half as isize {
        return None;
    }
    // SAFETY: Numbers; new descriptors, or none, come back.
    let file = unsafe {
        let process = libc::syscall(libc::SYS_pidfd_open, process, 0);
        if process < 0 {
            return None;
        }
        let process = OwnedFd::from_raw_fd(process as i32);
        let file = libc::syscall(libc::SYS_pidfd_getfd, process.as_raw_fd(), fd, 0);
        if file < 0 {
            return None;
        }
        OwnedFd::from_raw_fd(file as i32)
    };
    // SAFETY: As many bytes as there are.
    let done = unsafe {
        match made.number {
            libc::SYS_pwrite64 => libc::pwrite(file.as_raw_fd(), bytes.as_ptr().cast(), half, offset as i64),
            _ => libc::write(file.as_raw_fd(), bytes.as_ptr().cast(), half),
        }
    };
    usize::try_from(done).ok()
}

/// Runs a command; `decide` says what becomes of each of its calls, from the beginning of its own code on.
///
/// Of mappings, only those of the first thread are told: of another thread's stack, the runtime takes for granted that it can be had.
/// Writes to standard error are left alone, as that is where the program says what is wrong.
pub fn supervised(command: &mut Command, decide: impl FnMut(&Made) -> Answer) -> Output {
    let (send, receive) = mpsc::channel();
    command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    std::thread::scope(|scope| {
        // A thread of its own, which ends once it has started the program: then the filter is the program's alone.
        scope.spawn(|| {
            let listener = wait_at_calls();
            send.send(Start::Listener(listener)).unwrap();
            send.send(Start::Child(command.spawn().unwrap())).unwrap();
        });
        let Ok(Start::Listener(listener)) = receive.recv() else {
            unreachable!("the listener comes first");
        };
        let output = scope.spawn(move || match receive.recv() {
            Ok(Start::Child(child)) => Watched::new(child).output(),
            _ => unreachable!("the child comes second"),
        });
        answer(&listener, decide);
        output.join().unwrap()
    })
}

enum Start {
    Listener(OwnedFd),
    Child(Child),
}

/// Answers until nobody is left who could ask.
fn answer(listener: &OwnedFd, mut decide: impl FnMut(&Made) -> Answer) {
    let own = std::process::id();
    let mut running = false;
    loop {
        let mut poll = libc::pollfd {
            fd: listener.as_raw_fd(),
            events: libc::POLLIN,
            revents: 0,
        };
        // SAFETY: One structure.
        unsafe { libc::poll(&raw mut poll, 1, -1) };
        if poll.revents & libc::POLLIN == 0 {
            if poll.revents & libc::POLLHUP != 0 {
                return;
            }
            continue;
        }
        // SAFETY: A structure of numbers, all zero as the kernel wants it.
        let mut asked: libc::seccomp_notif = unsafe { std::mem::zeroed() };
        // SAFETY: The ioctl writes such a structure.
        if unsafe { libc::ioctl(listener.as_raw_fd(), RECEIVE, &raw mut asked) } != 0 {
            // Whoever asked is gone.
            continue;
        }
        let process = process_of(asked.pid);
        let made = Made {
            number: asked.data.nr.into(),
            arguments: asked.data.args,
            first_thread: process == Some(asked.pid),
        };
        let answer = match process {
            None => Answer::Goes,
            Some(process) if process == own => Answer::Goes,
            // The runtime has set up the signal stack: the program's own code is next.
            Some(_) if made.number == libc::SYS_sigaltstack => {
                running |= made.arguments[0] != 0;
                Answer::Goes
            }
            Some(_) if !running => Answer::Goes,
            Some(_) if made.number == libc::SYS_mmap && !made.first_thread => Answer::Goes,
            Some(_) if made.number == libc::SYS_mprotect && !made.first_thread => Answer::Goes,
            Some(_) if matches!(made.number, libc::SYS_write | libc::SYS_writev) && made.arguments[0] == 2 => {
                Answer::Goes
            }
            Some(_) => decide(&made),
        };
        // SAFETY: A structure of numbers.
        let mut answered: libc::seccomp_notif_resp = unsafe { std::mem::zeroed() };
        answered.id = asked.id;
        answered.flags = libc::SECCOMP_USER_NOTIF_FLAG_CONTINUE as u32;
        let process = process.unwrap_or(0);
        if matches!(answer, Answer::HalfDone | Answer::HalfDoneAndKilled)
            && made.writes()
            && let Some(done) = write_half(process, &made)
        {
            (answered.flags, answered.val) = (0, done as i64);
        }
        match answer {
            Answer::Goes | Answer::HalfDone => {}
            Answer::Fails(error) => (answered.flags, answered.error) = (0, -error),
            Answer::Killed | Answer::HalfDoneAndKilled => {
                // SAFETY: A process of the test's own, which waits for the answer.
                unsafe { libc::kill(process as i32, libc::SIGKILL) };
                continue;
            }
        }
        // SAFETY: The ioctl reads such a structure. It fails when whoever asked is gone.
        unsafe { libc::ioctl(listener.as_raw_fd(), SEND, &raw mut answered) };
    }
}
