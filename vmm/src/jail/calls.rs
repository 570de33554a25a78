//! The system calls that a thread may make once it is jailed, each with the reason. A feature that needs another one adds its row here.

use libc::*;

/// Threads that differ in what they need, as bits.
pub mod threads {
    /// The thread that runs the machine, or reads a trace, and those that it starts.
    pub const MACHINE: u8 = 1;
    /// Those that listen at gdb's port and at the control socket, and read what clients send.
    pub const CLIENTS: u8 = 2;
    /// In addition: the thread of a machine whose guest traces itself with the host's Intel PT.
    pub const HOST_PT: u8 = 4;
    /// In addition: those of a machine with shared directories.
    pub const SHARES: u8 = 8;
    /// The threads of every machine.
    pub const ALL: u8 = MACHINE | CLIENTS;
}
use threads::{ALL, CLIENTS, HOST_PT, MACHINE, SHARES};

/// Which of a call's arguments are let through.
#[derive(Clone, Copy, Debug)]
pub enum Only {
    /// All of them.
    Any,
    /// An argument, by its number, that has these bits.
    Bits(u8, u32),
    /// An argument that is one of these.
    OneOf(u8, &'static [u32]),
    /// An argument whose second byte, the kind of an ioctl, is this, or that is one of these.
    Kind(u8, u8, &'static [u32]),
}

/// A system call: who may make it, with which arguments, and why.
#[derive(Clone, Copy, Debug)]
pub struct Row {
    /// Its number.
    pub call: c_long,
    /// Threads, as bits.
    pub who: u8,
    /// Arguments.
    pub only: Only,
    /// Why.
    pub why: &'static str,
}

const fn row(call: c_long, who: u8, why: &'static str) -> Row {
    Row {
        call,
        who,
        only: Only::Any,
        why,
    }
}

const fn only(call: c_long, who: u8, only: Only, why: &'static str) -> Row {
    Row { call, who, only, why }
}

/// KVM's ioctls: Linux `include/uapi/linux/kvm.h`, KVMIO.
const KVMIO: u8 = 0xae;
/// perf's ioctls: Linux `include/uapi/linux/perf_event.h`.
const PERF: u8 = b'$';
/// `ioctl_fs`'s and the terminal's requests that are harmless: what a terminal is, its mode, non-blocking and close-on-exec flags. TIOCSTI,
/// which types into the user's shell, is not among them.
const TERMINAL: &[u32] = &[
    TCGETS as u32,
    0x802c_542a, // TCGETS2, as newer C libraries ask.
    TCSETS as u32,
    0x402c_542b, // TCSETS2
    TIOCGWINSZ as u32,
    FIONBIO as u32,
    FIOCLEX as u32,
    FIONREAD as u32,
];

/// The table.
pub const CALLS: &[Row] = &[
    // Descriptors that are open already.
    row(SYS_read, ALL, "input, disks, clients"),
    row(SYS_readv, ALL, "input"),
    row(SYS_write, ALL, "output, traces, answers, waking other threads"),
    row(SYS_writev, ALL, "output"),
    row(SYS_pread64, MACHINE, "disks, traces"),
    row(SYS_preadv, MACHINE, "disks"),
    row(SYS_pwrite64, MACHINE, "disks"),
    row(SYS_pwritev, MACHINE, "disks"),
    row(SYS_lseek, MACHINE, "disks, sessions, traces"),
    row(SYS_ftruncate, MACHINE, "memory for code, a log that is cut"),
    row(SYS_fallocate, MACHINE, "disks"),
    row(SYS_fsync, MACHINE, "a guest's flush"),
    row(SYS_fdatasync, MACHINE, "a guest's flush"),
    row(SYS_fstat, MACHINE, "what a file is"),
    row(SYS_fchmod, MACHINE, "the mode of a collected file"),
    row(SYS_utimensat, MACHINE, "the time of a collected file"),
    row(SYS_flock, MACHINE, "the lock of a disk"),
    row(SYS_copy_file_range, MACHINE, "copies between files of a trace"),
    row(SYS_sendfile, MACHINE, "the same where that cannot"),
    row(SYS_splice, MACHINE, "the same where that cannot"),
    row(SYS_close, ALL, "what is not needed any more"),
    row(SYS_fcntl, ALL, "flags of descriptors, copies of them"),
    row(SYS_dup, ALL, "copies of descriptors"),
    only(
        SYS_ioctl,
        MACHINE,
        Only::Kind(1, KVMIO, TERMINAL),
        "KVM, the terminal's mode",
    ),
    only(
        SYS_ioctl,
        CLIENTS,
        Only::OneOf(1, &[FIONBIO as u32]),
        "a client that is not waited for",
    ),
    row(
        SYS_perf_event_open,
        HOST_PT,
        "an event with the guest's filters, each time that the guest turns its tracing on",
    ),
    only(SYS_ioctl, HOST_PT, Only::Kind(1, PERF, &[]), "that event, on and off"),
    // Names: which ones is Landlock's to say.
    row(SYS_openat, MACHINE, "traces, collected files, /proc/self"),
    row(SYS_newfstatat, MACHINE, "what a name leads to"),
    row(SYS_statx, MACHINE, "what a name or a file is"),
    row(SYS_access, MACHINE, "whether there is a file"),
    row(SYS_readlink, MACHINE, "the C library, for /proc/self"),
    row(SYS_getdents64, MACHINE, "what is in a trace's directory"),
    row(SYS_mkdir, MACHINE, "folders of traces and of collected files"),
    row(SYS_rename, MACHINE, "files that get their names when they are whole"),
    row(SYS_unlink, MACHINE, "segments of a ring, sockets at the end"),
    row(SYS_unlinkat, MACHINE, "folders that are replaced"),
    row(SYS_rmdir, MACHINE, "folders that are replaced"),
    row(SYS_link, MACHINE, "hard links among collected files"),
    row(SYS_linkat, MACHINE, "hard links among collected files"),
    row(
        SYS_openat2,
        SHARES,
        "names in a shared directory, which lead nowhere else",
    ),
    row(
        SYS_fstatfs,
        SHARES,
        "how full a shared directory's file system is, and whose it is",
    ),
    row(SYS_readlinkat, SHARES, "links in a shared directory"),
    row(SYS_mkdirat, SHARES, "what a guest makes in a shared directory"),
    row(
        SYS_mknodat,
        SHARES,
        "FIFOs and sockets likewise; Landlock refuses device nodes",
    ),
    row(SYS_symlinkat, SHARES, "links likewise"),
    row(SYS_renameat2, SHARES, "names that a guest changes likewise"),
    row(SYS_chmod, SHARES, "modes likewise"),
    row(SYS_fchmodat, SHARES, "modes likewise"),
    row(SYS_getcwd, MACHINE, "names in what is printed"),
    // Memory.
    row(SYS_mmap, ALL, "memory, stacks of threads"),
    row(SYS_munmap, ALL, "memory that is given back"),
    row(SYS_mremap, ALL, "memory that grows"),
    row(SYS_mprotect, ALL, "guard pages, memory for code"),
    row(SYS_madvise, ALL, "memory that is given back"),
    row(SYS_brk, ALL, "memory"),
    row(SYS_memfd_create, MACHINE, "memory for code, mapped twice"),
    row(SYS_membarrier, MACHINE, "code that changes on several threads"),
    // Threads, time, signals.
    row(SYS_futex, ALL, "locks, threads that end"),
    only(
        SYS_clone,
        ALL,
        Only::Bits(0, CLONE_THREAD as u32),
        "threads, no processes",
    ),
    row(
        SYS_clone3,
        ALL,
        "answered with ENOSYS, since its flags cannot be looked at: the C library takes clone then",
    ),
    row(SYS_set_robust_list, ALL, "threads that begin"),
    row(SYS_rseq, ALL, "threads that begin"),
    only(
        SYS_prctl,
        ALL,
        Only::OneOf(0, &[PR_SET_NAME as u32]),
        "names of threads",
    ),
    row(SYS_sched_getaffinity, ALL, "how many threads are worth it"),
    row(SYS_sched_yield, ALL, "locks"),
    row(SYS_prlimit64, ALL, "sizes of stacks"),
    row(SYS_gettid, ALL, "who this thread is"),
    row(SYS_getpid, ALL, "who this process is"),
    row(SYS_tgkill, MACHINE, "vCPUs that are to come out of KVM, SIGABRT"),
    row(SYS_clock_gettime, ALL, "time, where the kernel's page has none"),
    row(SYS_clock_nanosleep, ALL, "waiting"),
    row(SYS_nanosleep, ALL, "waiting"),
    row(SYS_timerfd_create, MACHINE, "waiting"),
    row(SYS_timerfd_settime, MACHINE, "waiting"),
    row(SYS_getrandom, ALL, "keys of hash tables"),
    row(SYS_rt_sigaction, ALL, "handlers of signals"),
    row(SYS_rt_sigprocmask, ALL, "threads that begin"),
    row(SYS_rt_sigreturn, ALL, "the end of a handler"),
    row(SYS_sigaltstack, ALL, "threads that begin and end"),
    row(SYS_restart_syscall, ALL, "waiting that was interrupted"),
    row(SYS_exit, ALL, "threads that end"),
    row(SYS_exit_group, ALL, "the end"),
    // Waiting for what is open.
    row(SYS_poll, ALL, "whether there is room for a line"),
    row(SYS_ppoll, ALL, "the same"),
    row(SYS_epoll_create1, MACHINE, "input, signals, requests"),
    row(SYS_epoll_ctl, MACHINE, "input, signals, requests"),
    row(SYS_epoll_wait, MACHINE, "input, signals, requests"),
    row(SYS_epoll_pwait, MACHINE, "input, signals, requests"),
    row(SYS_eventfd2, MACHINE, "requests"),
    // Clients that have connected: no socket is made, and none connects.
    row(SYS_accept4, CLIENTS, "clients"),
    row(SYS_recvfrom, ALL, "what a client sends"),
    row(
        SYS_recvmsg,
        CLIENTS,
        "the same, with the file that a dump is written to",
    ),
    row(SYS_sendto, ALL, "answers"),
    row(SYS_sendmsg, ALL, "answers"),
    row(SYS_shutdown, ALL, "the end of a connection, and of listening"),
    row(SYS_setsockopt, ALL, "how long a client is waited for"),
    row(SYS_getsockopt, ALL, "errors of connections"),
];
