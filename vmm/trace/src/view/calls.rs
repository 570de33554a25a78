//! From blocks to calls: whose code runs on whose behalf.
//!
//! # Theory
//!
//! A call pushes a frame and a return pops the one whose return address it goes to.
//!
//! # Practice
//!
//! Returns are used for other things too. A retpoline calls, puts another address on the stack, and returns to that: a return that fits no
//! frame takes one away and jumps. A function may jump to another instead of calling it (a tail call): the frame becomes the other's.
//! Interrupts push a frame that IRET pops. On the way back to user mode the kernel's frames end, whatever was thought of them.
//!
//! Where Linux goes over to another thread, the frames are put aside, and those of the other thread come back. The trace says which
//! thread that is; an older one does not, nor one whose Linux is not known: then a thread is taken that fits ([`super::threads`]). A new
//! thread begins in `ret_from_fork`, and in user mode with the frames that its parent had at `fork`; a thread of the same process has
//! another stack, and begins with the function that made it. A signal's handler is above what it interrupts, until the kernel goes on
//! there.
//!
//! A hypervisor's VM entry puts the frames of its guest above its own, and the VM exit takes them away ([`super::levels`]): each VMCS keeps
//! those of its guest.
//!
//! Frames that were there before the trace are not known; a return into one makes it known from there on.

mod guests;

use std::collections::HashMap;

use pt_flow::{Block, End, Event, EventKind};

use super::{
    frame::{Frame, FrameKind},
    levels::{Below, Frames, Left},
    names::{Function, Names, Owner, Process, ProcessCache},
    threads::{Parked, Threads},
    window::{Here, Viewer, loses},
};
use crate::reader::ThreadId;

/// Deeper stacks are begun anew: they are no stacks.
const DEEPEST: usize = 1024;
/// More threads than this that wait are forgotten.
const MOST_THREADS: usize = 1 << 16;
/// More threads than this that have not run yet are forgotten, the oldest first.
const MOST_BIRTHS: usize = 1 << 10;
/// SYSCALL, SYSENTER and INT n: what is behind one of them is where it is done again, less this.
const SYSTEM_CALL: u64 = 2;

/// Hears of calls. The frames are those of the vCPU, the last is the innermost.
pub trait Sink {
    /// The last frame was entered, or came back with its thread.
    fn enter(&mut self, names: &Names, here: &Here, owner: Owner, stack: &mut [Frame], back: bool);
    /// The last frame is left, or goes away with its thread.
    fn leave(&mut self, names: &Names, here: &Here, owner: Owner, stack: &mut [Frame], away: bool);
    /// The last frame runs.
    fn run(&mut self, names: &Names, here: &Here, stack: &mut [Frame], block: &Block, code: &[u8]);
    /// Something else happens.
    fn event(&mut self, names: &Names, here: &Here, stack: &[Frame], event: &Event);
    /// The code of blocks is wanted.
    const CODE: bool = false;
    /// At the end all frames are left.
    const LEAVES: bool = true;
}

/// How the last block ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum After {
    Nothing,
    Call {
        ret: u64,
    },
    Return {
        from: u64,
    },
    Far {
        from: u64,
        ret: u64,
    },
    /// A VM entry, of a guest that would go on there.
    Entry {
        resume: u64,
    },
    /// Tracing was off.
    Again,
    /// Instructions are missing.
    Lost,
}

/// A vCPU: what it runs.
#[derive(Debug)]
struct Cpu {
    owner: Owner,
    frames: Frames,
    /// The kernel's frames begin here.
    kernel: Option<usize>,
    after: After,
    /// The VMM, where a guest of it runs.
    below: Option<Below>,
}

impl Default for Cpu {
    fn default() -> Cpu {
        Cpu {
            owner: Owner::default(),
            frames: Frames::default(),
            kernel: None,
            after: After::Nothing,
            below: None,
        }
    }
}

/// A thread that was made and has not been in user mode yet.
#[derive(Debug)]
struct Birth {
    /// Its parent's process's number.
    tgid: Option<u32>,
    /// Where it goes on.
    ip: u64,
    /// The parent's frames of user mode.
    frames: Vec<Frame>,
}

/// Follows the calls of vCPUs.
#[derive(Debug)]
pub struct Calls<'a, S> {
    all_names: &'a Names,
    /// Those of the level that runs.
    names: &'a Names,
    /// Who hears of them.
    pub sink: S,
    /// The vCPU that runs.
    number: usize,
    cpu: Cpu,
    /// The others.
    others: HashMap<usize, Cpu>,
    /// Threads that wait, by their numbers, with the steps at which they began to.
    waiting: HashMap<(u32, usize), (Parked, u64)>,
    births: Vec<Birth>,
    /// Threads that wait of a trace that does not tell which are which.
    threads: Threads,
    /// Guests' processors that do not run, by their VMCSs.
    left: HashMap<u64, Left>,
    cache: ProcessCache,
    /// Functions of kernels that were asked for lately.
    known: Vec<Known>,
}

/// A function of a kernel that was asked for, by its address and whose kernel it is, and from where to where that holds.
#[derive(Clone, Copy, Debug)]
struct Known {
    key: (u64, u32),
    found: (Function, u64, u64),
}

/// How many functions of the kernel are remembered; a power of two.
const KNOWN: usize = 1 << 12;

impl<'a, S: Sink> Calls<'a, S> {
    /// At the beginning of a trace.
    pub fn new(names: &'a Names, sink: S) -> Calls<'a, S> {
        Calls {
            all_names: names,
            names,
            sink,
            number: 0,
            cpu: Cpu::default(),
            others: HashMap::new(),
            waiting: HashMap::new(),
            births: Vec::new(),
            threads: Threads::default(),
            left: HashMap::new(),
            cache: ProcessCache::default(),
            // No code is at the last address.
            known: vec![
                Known {
                    key: (u64::MAX, 0),
                    found: (Function::UNKNOWN, 0, 0),
                };
                KNOWN
            ],
        }
    }

    /// The function at an address, and from where to where that holds. Every call asks for one, and those of the kernel are the same for all
    /// processes at all times.
    fn function(&mut self, here: &Here, ip: u64) -> (Function, u64, u64) {
        if !self.names.upper(ip) {
            return self.names.function(ip, self.cpu.owner.process, here.step);
        }
        // Functions begin at multiples of 16.
        let key = (ip, self.names.first_number());
        let place = &mut self.known[(ip >> 4 ^ ip >> 16 ^ u64::from(key.1)) as usize % KNOWN];
        if place.key != key {
            let found = self.names.function(ip, None, None);
            *place = Known { key, found };
        }
        place.found
    }

    /// What follows is of this vCPU.
    fn go_to(&mut self, here: &Here) {
        if here.cpu != self.number {
            let other = self.others.remove(&here.cpu).unwrap_or_default();
            let before = std::mem::replace(&mut self.cpu, other);
            self.others.insert(self.number, before);
            self.number = here.cpu;
            self.names = match &self.cpu.below {
                Some(below) => self.all_names.guest(Some(below.vmcs), here.step),
                None => self.all_names,
            };
        }
    }

    /// What a thread of this vCPU waits under. Idle threads have the number 0, one for each vCPU: they stay where they are.
    fn key(&self, thread: ThreadId) -> (u32, usize) {
        match self.names.thread(thread).tid {
            0 => (0, self.number),
            tid => (tid, 0),
        }
    }

    /// The process whose addresses these are, unless the thread only borrows them.
    fn process(&mut self, here: &Here) -> Option<Process> {
        let process = self.process_of(here.state.cr3)?;
        let Some(thread) = self.cpu.owner.thread else {
            return Some(process);
        };
        let task = self.names.task(process, here.step);
        task.is_none_or(|task| task.tgid == self.names.thread(thread).tgid)
            .then_some(process)
    }

    fn push(&mut self, here: &Here, ip: u64, ret: u64, kind: FrameKind) {
        if self.cpu.frames.len() >= DEEPEST {
            self.clear(here);
        }
        self.label_process(here);
        let (function, start, end) = self.function(here, ip);
        let around = self
            .cpu
            .frames
            .last()
            .filter(|top| kind == FrameKind::Call && function.known() && ip != start && top.function == function);
        let (inner, tags) = around.map_or((false, [0; Frame::TAGS]), |top| (true, top.tags));
        self.cpu.frames.push(Frame {
            function,
            ip,
            ret,
            kind,
            since: here.instructions,
            since_ns: here.ns(),
            own: 0,
            below: 0,
            inner,
            tags,
            start,
            end,
        });
        if inner {
            return;
        }
        if self.names.makes_thread(function) {
            self.bear();
        }
        let (owner, frames) = (self.shown(), self.cpu.frames.whole());
        self.sink.enter(self.all_names, here, owner, frames, false);
    }

    fn pop(&mut self, here: &Here, away: bool) -> Option<Frame> {
        if !self.cpu.frames.last()?.inner {
            let (owner, frames) = (self.shown(), self.cpu.frames.whole());
            self.sink.leave(self.all_names, here, owner, frames, away);
        }
        let frame = self.cpu.frames.pop()?;
        self.cpu.frames.add_below(&frame);
        if !away {
            let len = self.cpu.frames.len();
            self.threads().popped(&frame, len);
        }
        if self.cpu.kernel.is_some_and(|kernel| kernel > self.cpu.frames.len()) {
            self.cpu.kernel = Some(self.cpu.frames.len());
        }
        Some(frame)
    }

    fn pop_to(&mut self, here: &Here, len: usize) {
        while self.cpu.frames.len() > len {
            self.pop(here, false);
        }
    }

    fn clear(&mut self, here: &Here) {
        self.pop_to(here, 0);
        self.cpu.kernel = None;
    }

    /// Linux is about to have a new thread run for the first time: where that will be in user mode, and in which frames.
    fn bear(&mut self) {
        // Which thread of a guest runs is not known.
        let Some(kernel) = self.cpu.kernel.filter(|_| self.cpu.below.is_none()) else {
            return;
        };
        let Some(entry) = self.cpu.frames.get(kernel) else {
            return;
        };
        if self.births.len() >= MOST_BIRTHS {
            self.births.remove(0);
        }
        self.births.push(Birth {
            tgid: self.cpu.owner.thread.map(|thread| self.names.thread(thread).tgid),
            ip: entry.ret,
            frames: self.cpu.frames[..kernel].to_vec(),
        });
    }

    /// A thread without frames of user mode goes there for the first time: with those of its parent, if it was seen to be made.
    fn born(&mut self, here: &Here, ip: u64) {
        let Some(thread) = self.cpu.owner.thread else { return };
        let Some(at) = self.births.iter().position(|birth| birth.ip == ip) else {
            return;
        };
        let birth = self.births.remove(at);
        let same_process = birth.tgid == Some(self.names.thread(thread).tgid);
        let from = if same_process {
            birth.frames.len().saturating_sub(1)
        } else {
            0
        };
        self.come_back(here, birth.frames[from..].to_vec());
    }

    /// Takes all frames away, innermost last.
    fn put_aside(&mut self, here: &Here) -> Vec<Frame> {
        let mut frames = Vec::with_capacity(self.cpu.frames.len());
        while let Some(frame) = self.pop(here, true) {
            frames.push(frame);
        }
        frames.reverse();
        frames
    }

    /// Puts the frames aside, with those that were left by mistake, and takes those of another thread, if there are some.
    fn change(&mut self, here: &Here, resume: u64, popped: Vec<Frame>, other: Option<Parked>) {
        let (process, kernel) = (self.cpu.owner.process, self.cpu.kernel);
        let mut frames = self.put_aside(here);
        frames.extend(popped.into_iter().rev());
        self.threads().park(Parked {
            process,
            frames,
            kernel,
            resume,
        });
        self.take(here, other);
    }

    /// Goes over to another thread, of which the trace says which it is, and to `ip` there. The one before will go on at `resume`.
    fn change_to(&mut self, here: &Here, next: ThreadId, step: u64, resume: u64, ip: u64) {
        let before = self
            .cpu
            .owner
            .thread
            .or_else(|| self.names.thread_before(here.cpu, step));
        let (process, kernel) = (self.cpu.owner.process, self.cpu.kernel);
        let frames = self.put_aside(here);
        if let Some(before) = before {
            if self.waiting.len() >= MOST_THREADS {
                self.waiting.clear();
            }
            let parked = Parked {
                process,
                frames,
                kernel,
                resume,
            };
            self.waiting.insert(self.key(before), (parked, step));
        }
        self.cpu.owner.thread = Some(next);
        let tid = self.names.thread(next).tid;
        let parked = self.waiting.remove(&self.key(next)).filter(|(parked, since)| {
            parked.resume == ip && (tid == 0 || !self.names.ran_elsewhere(tid, here.cpu, *since, step))
        });
        self.take(here, parked.map(|(parked, _)| parked));
        if self.cpu.frames.is_empty() {
            self.cpu.owner.process = None;
            self.cpu.kernel = Some(0);
            self.push(here, ip, 0, FrameKind::Root);
        }
    }

    fn come_back(&mut self, here: &Here, frames: Vec<Frame>) {
        if !frames.is_empty() {
            self.label_process(here);
        }
        for frame in frames {
            let around = self.cpu.frames.last().map(|top| top.tags);
            self.cpu.frames.push(Frame {
                since: here.instructions,
                since_ns: here.ns(),
                own: 0,
                below: 0,
                tags: around.filter(|_| frame.inner).unwrap_or(frame.tags),
                inner: frame.inner && around.is_some(),
                ..frame
            });
            if frame.inner && around.is_some() {
                continue;
            }
            let (owner, frames) = (self.shown(), self.cpu.frames.whole());
            self.sink.enter(self.all_names, here, owner, frames, true);
        }
    }

    fn take(&mut self, here: &Here, other: Option<Parked>) {
        let other = other.unwrap_or_default();
        self.cpu.owner.process = other.process;
        self.cpu.kernel = other.kernel;
        self.come_back(here, other.frames);
    }

    /// The next instruction is at `ip`.
    fn arrive(&mut self, here: &Here, ip: u64) {
        match std::mem::replace(&mut self.cpu.after, After::Nothing) {
            After::Nothing => self.jump(here, ip),
            // A call that asks for its own address.
            After::Call { ret } if ret == ip => self.jump(here, ip),
            After::Call { ret } => self.push(here, ip, ret, FrameKind::Call),
            After::Return { from } => self.ret(here, from, ip),
            After::Far { from, ret } => self.far(here, from, ret, ip),
            After::Entry { resume } if resume == ip || resume == 0 => self.jump(here, ip),
            After::Entry { resume } => self.far(here, resume, resume, ip),
            After::Again => {
                let upper = self.names.upper(ip);
                self.pop_to(here, self.cpu.kernel.unwrap_or(self.cpu.frames.len()));
                self.cpu.kernel = None;
                if upper {
                    if self.names.linux().banner.is_empty() {
                        self.clear(here);
                    }
                    self.enter_kernel(here, ip, 0, FrameKind::Root);
                } else {
                    self.user(here, ip);
                }
            }
            After::Lost => {
                self.clear(here);
                self.threads().forget();
                // Who else waits is known all the same: it waits where it did.
                self.cpu.owner = Owner {
                    process: None,
                    thread: self.names.thread_at(here.cpu, here.step),
                };
                self.jump(here, ip);
            }
        }
    }

    fn jump(&mut self, here: &Here, ip: u64) {
        let Some(top) = self.cpu.frames.last() else {
            self.cpu.owner.thread = self
                .cpu
                .owner
                .thread
                .or_else(|| self.names.thread_at(here.cpu, here.step));
            self.cpu.owner.process = self.process(here);
            if self.names.upper(ip) {
                self.cpu.kernel = Some(0);
            }
            return self.push(here, ip, 0, FrameKind::Root);
        };
        if (top.start..top.end).contains(&ip) {
            return;
        }
        let before = top.function;
        let (function, start, _) = self.function(here, ip);
        if function == before || self.names.is_part(function) {
            return;
        }
        // Into the middle of another function: as far as is known, part of this one.
        if function.known() && ip != start && before.known() {
            return;
        }
        // What it called of itself was no call.
        while self.cpu.frames.last().is_some_and(|top| top.inner) {
            self.pop(here, false);
        }
        self.replace(here, ip, FrameKind::Jump);
    }

    fn replace(&mut self, here: &Here, ip: u64, kind: FrameKind) {
        let kernel = self.cpu.kernel;
        let ret = self.pop(here, false).map_or(0, |frame| frame.ret);
        self.push(here, ip, ret, kind);
        self.cpu.kernel = kernel;
    }

    fn ret(&mut self, here: &Here, from: u64, ip: u64) {
        // Its return may be one of the thunks', which are part of it.
        let top = self.cpu.frames.last().map(|top| top.function);
        if self.names.switches(from) || top.is_some_and(|top| self.names.is_switch(top)) {
            let left = self.pop(here, false);
            // Where the other thread goes on is not where this one will, if the other is new.
            let resume = left.map_or(ip, |left| left.ret);
            if let Some(step) = here.step
                && let Some(next) = self.names.thread_at(here.cpu, Some(step))
            {
                return self.change_to(here, next, step, resume, ip);
            }
            let resume = if resume == 0 { ip } else { resume };
            let process = self.process_of(here.state.cr3);
            let left_process = self.cpu.owner.process;
            let other = self.threads().resume(ip, process, left_process);
            let fresh = other.is_none();
            self.change(here, resume, Vec::new(), other);
            let len = self.cpu.frames.len();
            self.threads().resumed(ip, len);
            if fresh {
                self.cpu.kernel = Some(0);
                self.push(here, ip, 0, FrameKind::Root);
            }
            return;
        }
        if self.cpu.frames.last().is_some_and(|top| top.ret == ip) {
            self.pop(here, false);
            return;
        }
        // Several at once, as by longjmp.
        let floor = self.cpu.kernel.unwrap_or(0);
        let deeper = self.cpu.frames.iter().rposition(|frame| frame.ret == ip);
        if let Some(deeper) = deeper.filter(|deeper| *deeper >= floor) {
            return self.pop_to(here, deeper);
        }
        // Another thread may have been taken for this one.
        if let Some((popped, resume)) = self.threads().mistaken() {
            let other = self.threads().instead(resume, &popped, ip);
            if let Some(other) = other {
                // What was popped belongs to the thread that did not run.
                self.change(here, resume, popped, Some(other));
                let len = self.cpu.frames.len();
                self.threads().resumed(resume, len);
                return;
            }
        }
        match self.cpu.frames.last() {
            None => self.jump(here, ip),
            Some(top) if top.ret == 0 => self.replace(here, ip, FrameKind::Root),
            // To the restorer, which asks the kernel to go on where the signal came.
            Some(top) if top.kind == FrameKind::Signal => self.replace(here, ip, FrameKind::Signal),
            Some(_) => {
                let kernel = self.cpu.kernel;
                self.pop(here, false);
                if self.cpu.frames.len() > floor {
                    self.replace(here, ip, FrameKind::Jump);
                } else {
                    self.push(here, ip, 0, FrameKind::Root);
                }
                self.cpu.kernel = kernel;
            }
        }
    }

    fn far(&mut self, here: &Here, from: u64, ret: u64, ip: u64) {
        match (self.names.upper(from), self.names.upper(ip)) {
            (false, true) => self.enter_kernel(here, ip, ret, FrameKind::Entry),
            (true, false) => self.user(here, ip),
            _ => {
                if let Some(deeper) = self.cpu.frames.iter().rposition(|frame| frame.ret == ip) {
                    return self.pop_to(here, deeper);
                }
                let (function, start, _) = self.function(here, ip);
                if function.known() && start == ip {
                    self.push(here, ip, ret, FrameKind::Interrupt);
                } else {
                    self.jump(here, ip);
                }
            }
        }
    }

    fn enter_kernel(&mut self, here: &Here, ip: u64, ret: u64, kind: FrameKind) {
        self.cpu.owner.process = self.process(here).or(self.cpu.owner.process);
        self.cpu.kernel.get_or_insert(self.cpu.frames.len());
        self.push(here, ip, ret, kind);
    }

    /// Back in user mode: whatever the kernel was doing for this thread is over.
    fn user(&mut self, here: &Here, ip: u64) {
        let process = self.process(here);
        if process.is_some() && self.cpu.owner.process != process {
            let known = self.cpu.owner.thread.is_some();
            match self.cpu.owner.process {
                // A new thread's.
                None if known => self.cpu.owner.process = process,
                // By exec.
                Some(_) if known => {
                    self.clear(here);
                    self.cpu.owner.process = process;
                }
                _ => {
                    let other = self.threads().of(process);
                    self.clear(here);
                    match other {
                        // A thread whose process was not known yet, or that has got other addresses by exec.
                        None => self.cpu.owner.process = process,
                        Some(other) => self.take(here, Some(other)),
                    }
                }
            }
        }
        let mut left = None;
        if let Some(kernel) = self.cpu.kernel.take() {
            left = self.cpu.frames.get(kernel).map(|entry| entry.ret);
            self.pop_to(here, kernel);
        }
        self.threads().confirm();
        if self.cpu.frames.is_empty() {
            self.born(here, ip);
        }
        // A handler is over, and its signal with it.
        let again = |frame: &Frame| {
            frame.kind == FrameKind::Signal && (frame.ret == ip || frame.ret == ip.wrapping_add(SYSTEM_CALL))
        };
        if let Some(handler) = self.cpu.frames.iter().rposition(again) {
            return self.pop_to(here, handler);
        }
        match (self.cpu.frames.is_empty(), left) {
            (true, _) => self.push(here, ip, 0, FrameKind::Root),
            // Elsewhere than it came from, and where a function begins.
            (false, Some(left))
                if left != 0 && left != ip && left != ip.wrapping_add(SYSTEM_CALL) && self.begins(here, ip) =>
            {
                self.push(here, ip, left, FrameKind::Signal);
            }
            (false, _) => self.jump(here, ip),
        }
    }

    /// A function that has a name begins there.
    fn begins(&mut self, here: &Here, ip: u64) -> bool {
        let (function, start, _) = self.function(here, ip);
        function.known() && start == ip
    }
}

impl<S: Sink> Viewer for Calls<'_, S> {
    const CODE: bool = S::CODE;

    fn block(&mut self, here: &Here, block: &Block, code: &[u8]) {
        self.go_to(here);
        self.level(here);
        self.arrive(here, block.ip);
        if let Some(top) = self.cpu.frames.last_mut() {
            top.own += u64::from(block.count);
        }
        self.sink
            .run(self.all_names, here, self.cpu.frames.whole(), block, code);
        let ret = block.ip.wrapping_add(block.len.into());
        self.cpu.after = match block.end {
            End::Call | End::IndirectCall => After::Call { ret },
            End::Return => After::Return { from: block.ip },
            End::Far => After::Far { from: block.ip, ret },
            _ => After::Nothing,
        };
    }

    fn event(&mut self, here: &Here, event: &Event) {
        self.go_to(here);
        self.level(here);
        match event.kind {
            EventKind::Async { from, to, vm_exit } => {
                if !matches!(self.cpu.after, After::Nothing) {
                    self.arrive(here, from);
                }
                self.sink.event(self.all_names, here, self.cpu.frames.whole(), event);
                match to {
                    _ if vm_exit => self.vm_exit(here, Some(from)),
                    Some(to) if !self.names.upper(from) && self.names.upper(to) => {
                        self.enter_kernel(here, to, from, FrameKind::Interrupt);
                    }
                    Some(to) => self.push(here, to, from, FrameKind::Interrupt),
                    None => {}
                }
                return;
            }
            EventKind::Enabled { .. } => self.cpu.after = After::Again,
            _ if loses(event) => self.cpu.after = After::Lost,
            _ => {}
        }
        self.sink.event(self.all_names, here, self.cpu.frames.whole(), event);
    }

    fn end(&mut self, here: &Here) {
        self.go_to(here);
        if S::LEAVES {
            self.vm_exit(here, None);
            self.clear(here);
        }
    }
}
