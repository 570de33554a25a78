//! The first process of a guest of `minivmm run`: it does what a list says, runs the command, and switches the machine off.
//!
//! # Theory
//! The kernel unpacks an archive with this program, the modules that it lacks, and `/plan`. What has to be mounted, where and in which
//! order is decided by the host, which knows the command line ([`minivmm::run::plan`]): the plan is a list of steps, each some words that end
//! with a NUL.
//!
//! # Practice
//! The command's standard output and error are files of a shared directory (`stdout`, `stderr`), and its exit status goes to another
//! (`status`). What it reads comes over a port of a virtio console, or over a serial port. The host sends as many bytes as were asked
//! for (`want`), since a serial port without flow control loses what nobody reads: 7DH begins an escape (`E` is the end of the input, 7DH
//! itself stands for one).
//!
//! # Why `unsafe` is allowed here
//! The program stands on the kernel alone, without the C library, so that it is built by any host's Rust without another target: system
//! calls are instructions, and what they take are pointers. It runs in the guest, and does not touch the host.
#![no_std]
#![no_main]
#![deny(unsafe_op_in_unsafe_fn)]

use core::{
    arch::{asm, global_asm},
    cell::UnsafeCell,
    panic::PanicInfo,
};

// System calls: Linux arch/x86/entry/syscalls/syscall_64.tbl.
const READ: usize = 0;
const WRITE: usize = 1;
const OPEN: usize = 2;
const CLOSE: usize = 3;
const POLL: usize = 7;
const IOCTL: usize = 16;
const NANOSLEEP: usize = 35;
const PIPE2: usize = 293;
const DUP2: usize = 33;
const SOCKET: usize = 41;
const FORK: usize = 57;
const EXECVE: usize = 59;
const EXIT: usize = 60;
const WAIT4: usize = 61;
const FCNTL: usize = 72;
const CHDIR: usize = 80;
const MKDIR: usize = 83;
const UNLINK: usize = 87;
const UMASK: usize = 95;
const SETUID: usize = 105;
const SETGID: usize = 106;
const SETSID: usize = 112;
const SETGROUPS: usize = 116;
const RT_SIGPROCMASK: usize = 14;
const CHROOT: usize = 161;
const SYNC: usize = 162;
const MOUNT: usize = 165;
const REBOOT: usize = 169;
const SETHOSTNAME: usize = 170;
const SIGNALFD4: usize = 289;
const FINIT_MODULE: usize = 313;

const O_RDONLY: usize = 0;
const O_WRONLY: usize = 1;
const O_RDWR: usize = 2;
const O_CREAT: usize = 0o100;
const O_NOCTTY: usize = 0o400;
const O_NONBLOCK: usize = 0o4000;
const O_CLOEXEC: usize = 0o2_000_000;
const MS_MOVE: usize = 8192;
const EEXIST: isize = 17;
const ENOENT: isize = 2;
const EACCES: isize = 13;
const ENOEXEC: isize = 8;
const EAGAIN: isize = 11;
const EINTR: isize = 4;

/// Makes a system call.
fn call(number: usize, arguments: [usize; 5]) -> isize {
    let result;
    // SAFETY: Every caller passes numbers, or addresses of memory that is as long as the call takes it for and lives as long as
    // the call. The kernel keeps all registers but these.
    unsafe {
        asm!("syscall", inlateout("rax") number as isize => result,
            in("rdi") arguments[0], in("rsi") arguments[1], in("rdx") arguments[2],
            in("r10") arguments[3], in("r8") arguments[4],
            lateout("rcx") _, lateout("r11") _);
    }
    result
}

global_asm!(
    ".globl _start",
    "_start:",
    "xor ebp, ebp",
    "and rsp, -16",
    "call {main}",
    "ud2",
    main = sym main,
);

// What the compiler makes of copies, comparisons and searches.
global_asm!(
    ".globl memcpy",
    "memcpy:",
    "mov rax, rdi",
    "mov rcx, rdx",
    "rep movsb",
    "ret",
    ".globl memmove",
    "memmove:",
    "mov rax, rdi",
    "mov rcx, rdx",
    "cmp rdi, rsi",
    "jbe 2f",
    "lea rdi, [rdi + rcx - 1]",
    "lea rsi, [rsi + rcx - 1]",
    "std",
    "rep movsb",
    "cld",
    "ret",
    "2:",
    "rep movsb",
    "ret",
    ".globl memset",
    "memset:",
    "mov r8, rdi",
    "mov eax, esi",
    "mov rcx, rdx",
    "rep stosb",
    "mov rax, r8",
    "ret",
    ".globl memcmp",
    ".globl bcmp",
    "memcmp:",
    "bcmp:",
    "xor eax, eax",
    "xor ecx, ecx",
    "2:",
    "cmp rcx, rdx",
    "je 3f",
    "movzx eax, byte ptr [rdi + rcx]",
    "movzx r8d, byte ptr [rsi + rcx]",
    "inc rcx",
    "sub eax, r8d",
    "je 2b",
    "3:",
    "ret",
    ".globl strlen",
    "strlen:",
    "xor eax, eax",
    "2:",
    "cmp byte ptr [rdi + rax], 0",
    "je 3f",
    "inc rax",
    "jmp 2b",
    "3:",
    "ret",
    // The core library's tables for unwinding name it; nothing unwinds here.
    ".globl rust_eh_personality",
    "rust_eh_personality:",
    "ud2",
);

/// Memory that this process, which has one thread, borrows once.
struct Memory<T>(UnsafeCell<T>);

// SAFETY: There is one thread.
unsafe impl<T> Sync for Memory<T> {}

/// Arguments and environment of execve(2) are at most a quarter of the stack's 8 MiB.
const PLAN_MAX: usize = 4 << 20;
const WORDS_MAX: usize = 64 << 10;
static PLAN: Memory<[u8; PLAN_MAX]> = Memory(UnsafeCell::new([0; PLAN_MAX]));
static ARGUMENTS: Memory<[usize; WORDS_MAX]> = Memory(UnsafeCell::new([0; WORDS_MAX]));
static ENVIRONMENT: Memory<[usize; WORDS_MAX]> = Memory(UnsafeCell::new([0; WORDS_MAX]));

#[panic_handler]
fn panic(_: &PanicInfo<'_>) -> ! {
    fail(&[b"minivmm's init: a fault of its own"])
}

/// The most that is asked for at once: of a serial port half of what the terminal layer keeps, of a console's port more.
const SERIAL_WINDOW: usize = 2048;
const PORT_WINDOW: usize = 32 << 10;

/// What the command line asked for, as the plan says it.
struct Init {
    stdout: isize,
    stderr: isize,
    status: isize,
    want: isize,
    failed: isize,
    /// Where the command's input comes from, and how many bytes are asked for at once.
    input: isize,
    window: usize,
    /// Which of the command's standard streams are a terminal, a bit for each.
    terminal: usize,
    rows: u16,
    columns: u16,
    uid: usize,
    gid: usize,
    groups: [u32; 64],
    group_count: usize,
    arguments: usize,
    environment: usize,
}

/// Words of the plan, one by one.
struct Words(&'static [u8]);

impl Words {
    /// The next word with its NUL.
    fn next(&mut self) -> Option<&'static [u8]> {
        let end = self.0.iter().position(|byte| *byte == 0)?;
        let (word, rest) = self.0.split_at(end + 1);
        self.0 = rest;
        Some(word)
    }

    fn word(&mut self) -> &'static [u8] {
        match self.next() {
            Some(word) => word,
            None => fail(&[b"minivmm's init: the plan ends in the middle of a step"]),
        }
    }

    fn number(&mut self) -> usize {
        number(text(self.word()))
    }
}

/// A word without its NUL.
fn text(word: &[u8]) -> &[u8] {
    word.strip_suffix(&[0]).unwrap_or(word)
}

fn number(digits: &[u8]) -> usize {
    digits.iter().fold(0usize, |value, digit| {
        value
            .wrapping_mul(10)
            .wrapping_add(usize::from(digit.wrapping_sub(b'0')))
    })
}

/// Calls with a word that ends with a NUL.
fn path_call(number: usize, path: &[u8], rest: [usize; 2]) -> isize {
    call(number, [path.as_ptr() as usize, rest[0], rest[1], 0, 0])
}

fn open(path: &[u8], flags: usize) -> isize {
    path_call(OPEN, path, [flags | O_CLOEXEC, 0])
}

fn close(fd: isize) {
    call(CLOSE, [fd as usize, 0, 0, 0, 0]);
}

/// Writes all of it, or as much as there is somebody for.
fn write_all(fd: isize, mut bytes: &[u8]) -> bool {
    while !bytes.is_empty() {
        match call(WRITE, [fd as usize, bytes.as_ptr() as usize, bytes.len(), 0, 0]) {
            count if count > 0 => bytes = &bytes[count as usize..],
            error if error == -EINTR => {}
            _ => return false,
        }
    }
    true
}

/// Why nothing can be done: to the console, which the host shows in this case.
fn fail(texts: &[&[u8]]) -> ! {
    // The kernel has opened the console for its first process.
    write_all(2, b"\nminivmm-init: ");
    for text in texts {
        write_all(2, text);
    }
    write_all(2, b"\n");
    power_off()
}

fn power_off() -> ! {
    call(SYNC, [0; 5]);
    loop {
        // Linux include/uapi/linux/reboot.h: the two magic numbers, LINUX_REBOOT_CMD_POWER_OFF, and _RESTART where that cannot be.
        call(REBOOT, [0xfee1_dead, 0x2812_1969, 0x4321_fedc, 0, 0]);
        call(REBOOT, [0xfee1_dead, 0x2812_1969, 0x0123_4567, 0, 0]);
    }
}

/// A number as decimal digits, at the end of the buffer.
fn decimal(mut value: usize, buffer: &mut [u8; 20]) -> &[u8] {
    let mut at = buffer.len();
    loop {
        at -= 1;
        buffer[at] = b'0' + (value % 10) as u8;
        value /= 10;
        if value == 0 || at == 0 {
            return &buffer[at..];
        }
    }
}

/// A step that has failed, with the system's number for why.
fn must(result: isize, what: &[u8], which: &[u8]) -> isize {
    if result < 0 {
        let mut digits = [0; 20];
        let errno = decimal(result.unsigned_abs(), &mut digits);
        fail(&[what, b" ", text(which), b": errno ", errno]);
    }
    result
}

/// Makes a folder and those that it is in.
fn make_folders(path: &'static [u8]) {
    let mut copy = [0u8; 4096];
    let len = text(path).len().min(copy.len() - 1);
    for end in 1..=len {
        if end == len || path[end] == b'/' {
            copy[..end].copy_from_slice(&path[..end]);
            copy[end] = 0;
            let made = path_call(MKDIR, &copy[..=end], [0o755, 0]);
            if made < 0 && made != -EEXIST && end == len {
                must(made, b"cannot make the folder", path);
            }
        }
    }
}

extern "C" fn main() -> ! {
    // SAFETY: The static is borrowed here alone.
    let plan: &'static mut [u8] = unsafe { &mut *PLAN.0.get() };
    let fd = must(open(b"/plan\0", O_RDONLY), b"cannot open", b"/plan\0");
    let mut len = 0;
    while len < plan.len() {
        let rest = &mut plan[len..];
        let count = must(
            call(READ, [fd as usize, rest.as_mut_ptr() as usize, rest.len(), 0, 0]),
            b"cannot read",
            b"/plan\0",
        );
        if count == 0 {
            break;
        }
        len += count as usize;
    }
    close(fd);
    let mut words = Words(&plan[..len]);
    let mut init = Init {
        stdout: -1,
        stderr: -1,
        status: -1,
        want: -1,
        failed: -1,
        input: -1,
        window: SERIAL_WINDOW,
        terminal: 0,
        rows: 0,
        columns: 0,
        uid: 0,
        gid: 0,
        groups: [0; 64],
        group_count: 0,
        arguments: 0,
        environment: 0,
    };
    while let Some(step) = words.next() {
        init.step(text(step), &mut words);
    }
    init.run()
}

impl Init {
    fn step(&mut self, step: &[u8], words: &mut Words) {
        match step {
            b"module" => {
                let path = words.word();
                let fd = must(open(path, O_RDONLY), b"cannot open the module", path);
                let loaded = call(FINIT_MODULE, [fd as usize, b"\0".as_ptr() as usize, 0, 0, 0]);
                if loaded != -EEXIST {
                    must(loaded, b"the kernel does not take the module", path);
                }
                close(fd);
            }
            b"folder" => make_folders(words.word()),
            // Type, source, target, flags, options; `try`: it may be missing.
            b"mount" | b"try" => {
                let (kind, source, target) = (words.word(), words.word(), words.word());
                let (flags, options) = (words.number(), words.word());
                let addresses = [source, target, kind].map(|word| word.as_ptr() as usize);
                let [source, to, of] = addresses;
                let mounted = call(MOUNT, [source, to, of, flags, options.as_ptr() as usize]);
                if step == b"mount" && mounted < 0 {
                    let mut digits = [0; 20];
                    let errno = decimal(mounted.unsigned_abs(), &mut digits);
                    fail(&[b"cannot mount ", text(kind), b" on ", text(target), b": errno ", errno]);
                }
            }
            b"root" => {
                let path = words.word();
                must(path_call(CHDIR, path, [0; 2]), b"cannot go to", path);
                let (here, root) = (b".\0".as_ptr() as usize, b"/\0".as_ptr() as usize);
                must(call(MOUNT, [here, root, 0, MS_MOVE, 0]), b"cannot move", path);
                must(path_call(CHROOT, b".\0", [0; 2]), b"cannot change the root to", path);
                must(path_call(CHDIR, b"/\0", [0; 2]), b"cannot go to", path);
            }
            b"channel" => {
                self.stdout = must(open(b"/channel/stdout\0", O_WRONLY), b"cannot open", b"stdout\0");
                self.stderr = must(open(b"/channel/stderr\0", O_WRONLY), b"cannot open", b"stderr\0");
                self.status = must(open(b"/channel/status\0", O_WRONLY), b"cannot open", b"status\0");
                self.want = must(open(b"/channel/want\0", O_WRONLY), b"cannot open", b"want\0");
                self.failed = must(open(b"/channel/failed\0", O_WRONLY), b"cannot open", b"failed\0");
            }
            b"serial" => {
                let path = words.word();
                self.input = must(open(path, O_RDWR | O_NOCTTY | O_NONBLOCK), b"cannot open", path);
                self.make_raw();
            }
            b"port" => {
                self.input = open_port();
                self.window = PORT_WINDOW;
            }
            b"hostname" => {
                let name = text(words.word());
                call(SETHOSTNAME, [name.as_ptr() as usize, name.len(), 0, 0, 0]);
            }
            b"loopback" => raise_loopback(),
            // Address, mask and gateway, which the kernel has for its first Ethernet device.
            b"network" => {
                let parts = [(); 3].map(|()| address(text(words.word())));
                raise_network(parts);
            }
            b"text" => {
                let (path, contents) = (words.word(), words.word());
                // What is there may be a link to what is nowhere in this guest.
                path_call(UNLINK, path, [0; 2]);
                let file = must(
                    path_call(OPEN, path, [O_WRONLY | O_CREAT | O_CLOEXEC, 0o644]),
                    b"cannot make",
                    path,
                );
                write_all(file, text(contents));
                close(file);
            }
            b"umask" => {
                call(UMASK, [words.number(), 0, 0, 0, 0]);
            }
            b"user" => (self.uid, self.gid) = (words.number(), words.number()),
            b"group" => {
                let group = words.number() as u32;
                if let Some(slot) = self.groups.get_mut(self.group_count) {
                    *slot = group;
                    self.group_count += 1;
                }
            }
            b"terminal" => {
                self.terminal = words.number();
                (self.rows, self.columns) = (words.number() as u16, words.number() as u16);
            }
            b"directory" => {
                let path = words.word();
                must(path_call(CHDIR, path, [0; 2]), b"cannot go to", path);
            }
            b"environment" => {
                add(&ENVIRONMENT, &mut self.environment, words.word());
            }
            b"argument" => {
                add(&ARGUMENTS, &mut self.arguments, words.word());
            }
            _ => fail(&[b"minivmm's init: a step that it does not know: ", step]),
        }
    }

    /// The serial port passes bytes on as they are.
    fn make_raw(&self) {
        // struct termios of the kernel: four words of flags, the line discipline, 19 control characters.
        const TCGETS: usize = 0x5401;
        const TCSETS: usize = 0x5402;
        let mut termios = [0u32; 9];
        let address = termios.as_mut_ptr() as usize;
        must(
            call(IOCTL, [self.input as usize, TCGETS, address, 0, 0]),
            b"no serial port:",
            b"TCGETS\0",
        );
        // Of the control modes CS8, CREAD and CLOCAL, and the speed.
        termios[0] = 0;
        termios[1] = 0;
        termios[2] = termios[2] & 0o10017 | 0o60 | 0o200 | 0o4000;
        termios[3] = 0;
        // VMIN 1, VTIME 0: c_cc begins behind the line discipline, at byte 17; VTIME is its fifth, VMIN its sixth.
        termios[5] = termios[5] & 0xffff | 1 << 24;
        must(
            call(
                IOCTL,
                [
                    self.input as usize,
                    TCSETS,
                    core::hint::black_box(&termios).as_ptr() as usize,
                    0,
                    0,
                ],
            ),
            b"no serial port:",
            b"TCSETS\0",
        );
    }

    /// Runs the command, with its streams, until it ends.
    fn run(&self) -> ! {
        if self.arguments == 0 {
            fail(&[b"minivmm's init: the plan has no command"]);
        }
        let (mut master, mut slave) = (-1, -1);
        if self.terminal != 0 {
            (master, slave) = self.pseudo_terminal();
        }
        let mut pipe = [-1i32; 2];
        let stdin = match self.terminal & 1 {
            0 => {
                let made = call(PIPE2, [pipe.as_mut_ptr() as usize, O_CLOEXEC, 0, 0, 0]);
                must(made, b"cannot make", b"a pipe\0");
                pipe[0] as isize
            }
            _ => slave,
        };
        let stream = |bit: usize, file| if self.terminal & 1 << bit != 0 { slave } else { file };
        let streams = [stdin, stream(1, self.stdout), stream(2, self.stderr)];
        // SIGCHLD is taken by a descriptor, so that it is waited for with the rest.
        let signals: u64 = 1 << 16;
        let set = &raw const signals as usize;
        call(RT_SIGPROCMASK, [0, set, 0, 8, 0]);
        let ended = must(
            call(SIGNALFD4, [-1isize as usize, set, 8, O_NONBLOCK | O_CLOEXEC, 0]),
            b"cannot wait for",
            b"signals\0",
        );
        let child = must(call(FORK, [0; 5]), b"cannot start", b"a process\0");
        if child == 0 {
            call(RT_SIGPROCMASK, [1, set, 0, 8, 0]);
            self.become_command(streams);
        }
        let feeds = match self.terminal & 1 {
            0 => {
                close(stdin);
                pipe[1] as isize
            }
            _ => master,
        };
        close(slave);
        let status = self.serve(child, ended, feeds, master);
        let mut digits = [0; 20];
        write_all(self.status, decimal(status, &mut digits));
        power_off()
    }

    /// A pseudo-terminal of the size of the caller's.
    fn pseudo_terminal(&self) -> (isize, isize) {
        const TIOCSPTLCK: usize = 0x4004_5431;
        const TIOCGPTPEER: usize = 0x5441;
        const TIOCSWINSZ: usize = 0x5414;
        let master = must(open(b"/dev/ptmx\0", O_RDWR | O_NOCTTY), b"cannot open", b"/dev/ptmx\0");
        let fd = master as usize;
        let unlocked = 0i32;
        must(
            call(IOCTL, [fd, TIOCSPTLCK, &raw const unlocked as usize, 0, 0]),
            b"no terminal:",
            b"TIOCSPTLCK\0",
        );
        let size = [self.rows, self.columns, 0, 0];
        call(IOCTL, [fd, TIOCSWINSZ, size.as_ptr() as usize, 0, 0]);
        let slave = call(IOCTL, [fd, TIOCGPTPEER, O_RDWR | O_NOCTTY | O_CLOEXEC, 0, 0]);
        (master, must(slave, b"no terminal:", b"TIOCGPTPEER\0"))
    }

    /// In the new process.
    fn become_command(&self, streams: [isize; 3]) -> ! {
        const TIOCSCTTY: usize = 0x540e;
        call(SETSID, [0; 5]);
        let terminal = (0..3).find(|stream| self.terminal & 1 << stream != 0);
        if let Some(stream) = terminal {
            call(IOCTL, [streams[stream] as usize, TIOCSCTTY, 0, 0, 0]);
        }
        for (to, from) in streams.iter().enumerate() {
            must(
                call(DUP2, [*from as usize, to, 0, 0, 0]),
                b"cannot open",
                b"the command's streams\0",
            );
        }
        let groups = self.groups.as_ptr() as usize;
        call(SETGROUPS, [self.group_count, groups, 0, 0, 0]);
        call(SETGID, [self.gid, 0, 0, 0, 0]);
        call(SETUID, [self.uid, 0, 0, 0, 0]);
        // SAFETY: What the statics hold is read from here on.
        let (arguments, environment) = unsafe { (&*ARGUMENTS.0.get(), &*ENVIRONMENT.0.get()) };
        let error = self.execute(arguments, environment);
        let status = if error == -ENOENT { 127 } else { 126 };
        let mut digits = [0; 20];
        write_all(self.failed, decimal(error.unsigned_abs(), &mut digits));
        call(EXIT, [status, 0, 0, 0, 0]);
        loop {}
    }

    /// execve(2), for a name without a `/` in each folder of PATH; the answer is the error.
    fn execute(&self, arguments: &[usize], environment: &[usize]) -> isize {
        // SAFETY: The words of the plan end with a NUL, and it is not changed any more.
        let word = |address: usize| unsafe { core::ffi::CStr::from_ptr(address as *const _) }.to_bytes_with_nul();
        let name = word(arguments[0]);
        let try_one = |path: &[u8]| {
            let list = arguments.as_ptr() as usize;
            path_call(EXECVE, path, [list, environment.as_ptr() as usize])
        };
        if text(name).contains(&b'/') {
            return try_one(name);
        }
        let words = environment[..self.environment].iter().map(|address| word(*address));
        let folders = words.filter_map(|word| text(word).strip_prefix(b"PATH=")).next();
        let mut result = -ENOENT;
        let mut path = [0u8; 8192];
        for folder in folders
            .unwrap_or(b"/usr/local/bin:/usr/bin:/bin")
            .split(|byte| *byte == b':')
        {
            let len = folder.len() + 1 + name.len();
            if len > path.len() || name.len() < 2 {
                continue;
            }
            path[..folder.len()].copy_from_slice(folder);
            path[folder.len()] = b'/';
            path[folder.len() + 1..len].copy_from_slice(name);
            // An empty folder is the current one.
            let skip = usize::from(folder.is_empty());
            match try_one(&path[skip..len]) {
                error if error == -EACCES || error == -ENOEXEC => result = error,
                _ => {}
            }
        }
        result
    }

    /// Passes input and output on until the command has ended; the answer is its exit status.
    fn serve(&self, child: isize, ended: isize, mut feeds: isize, mut master: isize) -> usize {
        const POLLIN: u64 = 1;
        const POLLOUT: u64 = 4;
        const F_SETFL: usize = 4;
        let mut pending = [0u8; PORT_WINDOW];
        let (mut from, mut to) = (0, 0);
        let mut escaped = false;
        let mut open_input = true;
        call(FCNTL, [feeds as usize, F_SETFL, O_NONBLOCK, 0, 0]);
        if master >= 0 {
            call(FCNTL, [master as usize, F_SETFL, O_NONBLOCK, 0, 0]);
        }
        self.ask_for(self.window);
        // Bytes that were taken from the port since the host was last asked for more.
        let mut taken = 0;
        loop {
            let poll = |fd: isize, events: u64| fd as u32 as u64 | events << 32;
            let wants_more = from == to && open_input;
            let mut fds = [
                poll(ended, POLLIN),
                poll(if wants_more { self.input } else { -1 }, POLLIN),
                poll(if from < to { feeds } else { -1 }, POLLOUT),
                poll(master, POLLIN),
            ];
            call(POLL, [fds.as_mut_ptr() as usize, fds.len(), -1isize as usize, 0, 0]);
            let happened = |index: usize| fds[index] >> 48 != 0;
            if happened(3) {
                self.pass_output(&mut master);
            }
            if happened(1) {
                let mut bytes = [0u8; PORT_WINDOW];
                let count = call(READ, [self.input as usize, bytes.as_mut_ptr() as usize, self.window, 0, 0]);
                (from, to) = (0, 0);
                for byte in &bytes[..count.max(0) as usize] {
                    taken += 1;
                    match (escaped, *byte) {
                        (false, 0x7d) => escaped = true,
                        (true, b'E') => open_input = false,
                        (_, byte) => {
                            escaped = false;
                            pending[to] = byte;
                            to += 1;
                        }
                    }
                }
            }
            if from < to {
                let part = &pending[from..to];
                match call(WRITE, [feeds as usize, part.as_ptr() as usize, part.len(), 0, 0]) {
                    count if count >= 0 => from += count as usize,
                    error if error == -EAGAIN || error == -EINTR => {}
                    // Nobody reads any more.
                    _ => (from, to) = (0, 0),
                }
            }
            if from == to && taken > 0 && open_input {
                self.ask_for(taken);
                taken = 0;
            }
            if from == to && !open_input && feeds >= 0 && feeds != master {
                close(feeds);
                feeds = -1;
            }
            if happened(0) {
                let mut discarded = [0u8; 128];
                call(
                    READ,
                    [ended as usize, discarded.as_mut_ptr() as usize, discarded.len(), 0, 0],
                );
                if let Some(status) = reap(child) {
                    self.pass_output(&mut master);
                    return status;
                }
            }
        }
    }

    /// What the terminal shows goes to standard output.
    fn pass_output(&self, master: &mut isize) {
        let mut bytes = [0u8; 4096];
        while *master >= 0 {
            let count = call(READ, [*master as usize, bytes.as_mut_ptr() as usize, bytes.len(), 0, 0]);
            match count {
                count if count > 0 => {
                    write_all(self.stdout, &bytes[..count as usize]);
                }
                error if error == -EAGAIN || error == -EINTR => return,
                // All programs have closed it.
                _ => *master = -1,
            }
        }
    }

    fn ask_for(&self, bytes: usize) {
        write_all(self.want, &(bytes as u32).to_le_bytes());
    }
}

/// Opens the first port of the one virtio console, which the driver makes once the device has told it of the port. Its name has the
/// device's number among all virtio devices, which is the kernel's to give.
fn open_port() -> isize {
    const TRIES: usize = 5000;
    const DEVICES: u8 = 64;
    // A millisecond, as a struct timespec.
    let time = [0usize, 1_000_000];
    for _ in 0..TRIES {
        for device in 0..DEVICES {
            let mut path = *b"/dev/vport00p0\0";
            path[10] += device / 10;
            path[11] += device % 10;
            // Without a zero before it.
            if device < 10 {
                path.copy_within(11.., 10);
            }
            let opened = open(&path, O_RDONLY | O_NONBLOCK);
            if opened != -ENOENT {
                return must(opened, b"cannot open", &path);
            }
        }
        call(NANOSLEEP, [time.as_ptr() as usize, 0, 0, 0, 0]);
    }
    fail(&[b"the kernel makes no port: it takes one with CONFIG_VIRTIO_CONSOLE, or --console serial"])
}

/// Takes the processes that have ended; the command's exit status, if it is among them, as a shell has it.
fn reap(child: isize) -> Option<usize> {
    const WNOHANG: usize = 1;
    let mut found = None;
    loop {
        let mut status = 0i32;
        let pid = call(WAIT4, [-1isize as usize, &raw mut status as usize, WNOHANG, 0, 0]);
        if pid <= 0 {
            return found;
        }
        if pid == child {
            found = Some(match status & 0x7f {
                0 => (status >> 8 & 0xff) as usize,
                signal => 128 + signal as usize,
            });
        }
    }
}

/// Adds a word to a list whose end is a 0.
fn add(list: &Memory<[usize; WORDS_MAX]>, count: &mut usize, word: &'static [u8]) {
    // SAFETY: Nobody else has the list while a word is added.
    let list = unsafe { &mut *list.0.get() };
    if *count + 1 == list.len() {
        fail(&[b"minivmm's init: too many arguments or variables"]);
    }
    list[*count] = word.as_ptr() as usize;
    *count += 1;
}

/// The four bytes of `10.0.2.15`.
fn address(text: &[u8]) -> [u8; 4] {
    let mut bytes = [0; 4];
    for (byte, part) in bytes.iter_mut().zip(text.split(|byte| *byte == b'.')) {
        *byte = number(part) as u8;
    }
    bytes
}

/// A struct sockaddr_in, for what needs no port.
fn socket_address(address: [u8; 4]) -> [u8; 16] {
    let mut bytes = [0; 16];
    bytes[0] = AF_INET as u8;
    bytes[4..8].copy_from_slice(&address);
    bytes
}

/// Gives eth0 its address and the way out.
fn raise_network([address, mask, gateway]: [[u8; 4]; 3]) {
    const SIOCADDRT: usize = 0x890b;
    const SIOCSIFADDR: usize = 0x8916;
    const SIOCSIFNETMASK: usize = 0x891c;
    const RTF_UP_GATEWAY: u8 = 3;
    let device = b"eth0\0";
    let socket = call(SOCKET, [AF_INET, SOCK_DGRAM | O_CLOEXEC, 0, 0, 0]);
    must(socket, b"no network:", device);
    let socket = socket as usize;
    for (request, value) in [(SIOCSIFADDR, address), (SIOCSIFNETMASK, mask)] {
        // struct ifreq: the name, and what is asked for.
        let mut ifreq = [0u8; 40];
        ifreq[..device.len()].copy_from_slice(device);
        ifreq[16..32].copy_from_slice(&socket_address(value));
        must(
            call(IOCTL, [socket, request, ifreq.as_ptr() as usize, 0, 0]),
            b"cannot set the address of",
            device,
        );
    }
    raise(socket, device);
    // struct rtentry: a word, destination, gateway, mask, flags.
    let mut route = [0u8; 120];
    route[8..24].copy_from_slice(&socket_address([0; 4]));
    route[24..40].copy_from_slice(&socket_address(gateway));
    route[40..56].copy_from_slice(&socket_address([0; 4]));
    route[56] = RTF_UP_GATEWAY;
    must(
        call(IOCTL, [socket, SIOCADDRT, route.as_ptr() as usize, 0, 0]),
        b"cannot set a route through",
        device,
    );
    close(socket as isize);
}

/// Switches a network device on.
fn raise(socket: usize, device: &[u8]) {
    const SIOCSIFFLAGS: usize = 0x8914;
    const IFF_UP: u8 = 1;
    let mut ifreq = [0u8; 40];
    ifreq[..device.len()].copy_from_slice(device);
    ifreq[16] = IFF_UP;
    // A kernel without a network has none to raise.
    call(IOCTL, [socket, SIOCSIFFLAGS, ifreq.as_ptr() as usize, 0, 0]);
}

const AF_INET: usize = 2;
const SOCK_DGRAM: usize = 2;

/// Programs expect 127.0.0.1 to answer.
fn raise_loopback() {
    let socket = call(SOCKET, [AF_INET, SOCK_DGRAM | O_CLOEXEC, 0, 0, 0]);
    raise(socket as usize, b"lo\0");
    close(socket);
}
