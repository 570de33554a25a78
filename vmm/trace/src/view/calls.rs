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
//! Interrupts push a frame that IRET pops. On the way back to user mode the kernel's frames end, whatever was thought of them. Where
//! Linux switches threads, the frames are put aside ([`super::threads`]).
//!
//! Frames that were there before the trace are not known; a return into one makes it known from there on.

use pt_flow::{Block, End, Event, EventKind};

use super::{
    frame::{Frame, FrameKind},
    names::{Names, Process, ProcessCache},
    threads::{Parked, Threads},
    window::{Here, Viewer, loses},
};

/// Deeper stacks are begun anew: they are no stacks.
const DEEPEST: usize = 1024;

/// Hears of calls. The frames are those of the vCPU, the last is the innermost.
pub trait Sink {
    /// The last frame was entered, or came back with its thread.
    fn enter(&mut self, names: &Names, here: &Here, process: Option<Process>, stack: &mut [Frame], back: bool);
    /// The last frame is left, or goes away with its thread.
    fn leave(&mut self, names: &Names, here: &Here, process: Option<Process>, stack: &mut [Frame], away: bool);
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
    /// Tracing was off.
    Again,
    /// Instructions are missing.
    Lost,
}

/// Follows the calls of one vCPU.
#[derive(Debug)]
pub struct Calls<'a, S> {
    names: &'a Names,
    /// Who hears of them.
    pub sink: S,
    process: Option<Process>,
    frames: Vec<Frame>,
    /// The kernel's frames begin here.
    kernel: Option<usize>,
    threads: Threads,
    cache: ProcessCache,
    after: After,
}

impl<'a, S: Sink> Calls<'a, S> {
    /// At the beginning of a vCPU's trace.
    pub fn new(names: &'a Names, sink: S) -> Calls<'a, S> {
        Calls {
            names,
            sink,
            process: None,
            frames: Vec::new(),
            kernel: None,
            threads: Threads::default(),
            cache: ProcessCache::default(),
            after: After::Nothing,
        }
    }

    fn push(&mut self, here: &Here, ip: u64, ret: u64, kind: FrameKind) {
        if self.frames.len() >= DEEPEST {
            self.clear(here);
        }
        let (function, start, end) = self.names.function(ip, self.process, here.step);
        self.frames.push(Frame {
            function,
            ip,
            ret,
            kind,
            since: here.instructions,
            since_ns: here.ns(),
            own: 0,
            below: 0,
            tags: [0; Frame::TAGS],
            start,
            end,
        });
        self.sink.enter(self.names, here, self.process, &mut self.frames, false);
    }

    fn pop(&mut self, here: &Here, away: bool) -> Option<Frame> {
        self.frames.last()?;
        self.sink.leave(self.names, here, self.process, &mut self.frames, away);
        let frame = self.frames.pop()?;
        if let Some(below) = self.frames.last_mut() {
            below.below += frame.own + frame.below;
        }
        if !away {
            self.threads.popped(&frame, self.frames.len());
        }
        if self.kernel.is_some_and(|kernel| kernel > self.frames.len()) {
            self.kernel = Some(self.frames.len());
        }
        Some(frame)
    }

    fn pop_to(&mut self, here: &Here, len: usize) {
        while self.frames.len() > len {
            self.pop(here, false);
        }
    }

    fn clear(&mut self, here: &Here) {
        self.pop_to(here, 0);
        self.kernel = None;
    }

    /// Puts the frames aside, with those that were left by mistake, and takes those of another thread, if there are some.
    fn change(&mut self, here: &Here, resume: u64, popped: Vec<Frame>, other: Option<Parked>) {
        let mut frames = Vec::with_capacity(self.frames.len());
        let (process, kernel) = (self.process, self.kernel);
        while let Some(frame) = self.pop(here, true) {
            frames.push(frame);
        }
        frames.reverse();
        frames.extend(popped.into_iter().rev());
        self.threads.park(Parked {
            process,
            frames,
            kernel,
            resume,
        });
        self.take(here, other);
    }

    fn take(&mut self, here: &Here, other: Option<Parked>) {
        let other = other.unwrap_or_default();
        self.process = other.process;
        self.kernel = other.kernel;
        for frame in other.frames {
            self.frames.push(Frame {
                since: here.instructions,
                since_ns: here.ns(),
                own: 0,
                below: 0,
                ..frame
            });
            self.sink.enter(self.names, here, self.process, &mut self.frames, true);
        }
    }

    /// The next instruction is at `ip`.
    fn arrive(&mut self, here: &Here, ip: u64) {
        match std::mem::replace(&mut self.after, After::Nothing) {
            After::Nothing => self.jump(here, ip),
            // A call that asks for its own address.
            After::Call { ret } if ret == ip => self.jump(here, ip),
            After::Call { ret } => self.push(here, ip, ret, FrameKind::Call),
            After::Return { from } => self.ret(here, from, ip),
            After::Far { from, ret } => self.far(here, from, ret, ip),
            After::Again => {
                let upper = self.names.upper(ip);
                self.pop_to(here, self.kernel.unwrap_or(self.frames.len()));
                self.kernel = None;
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
                self.threads.forget();
                self.jump(here, ip);
            }
        }
    }

    fn jump(&mut self, here: &Here, ip: u64) {
        let Some(top) = self.frames.last() else {
            self.process = self.cache.get(self.names, here.state.cr3);
            if self.names.upper(ip) {
                self.kernel = Some(0);
            }
            return self.push(here, ip, 0, FrameKind::Root);
        };
        if (top.start..top.end).contains(&ip) {
            return;
        }
        let (function, start, _) = self.names.function(ip, self.process, here.step);
        if function == top.function || self.names.is_part(function) {
            return;
        }
        // Into the middle of another function: as far as is known, part of this one.
        if function.known() && ip != start && top.function.known() {
            return;
        }
        self.replace(here, ip, FrameKind::Jump);
    }

    fn replace(&mut self, here: &Here, ip: u64, kind: FrameKind) {
        let kernel = self.kernel;
        let ret = self.pop(here, false).map_or(0, |frame| frame.ret);
        self.push(here, ip, ret, kind);
        self.kernel = kernel;
    }

    fn ret(&mut self, here: &Here, from: u64, ip: u64) {
        if self.names.switches(from) {
            self.pop(here, false);
            let process = self.cache.get(self.names, here.state.cr3);
            let other = self.threads.resume(ip, process, self.process);
            let fresh = other.is_none();
            self.change(here, ip, Vec::new(), other);
            self.threads.resumed(ip, self.frames.len());
            if fresh {
                self.kernel = Some(0);
                self.push(here, ip, 0, FrameKind::Root);
            }
            return;
        }
        if self.frames.last().is_some_and(|top| top.ret == ip) {
            self.pop(here, false);
            return;
        }
        // Several at once, as by longjmp.
        let floor = self.kernel.unwrap_or(0);
        let deeper = self.frames.iter().rposition(|frame| frame.ret == ip);
        if let Some(deeper) = deeper.filter(|deeper| *deeper >= floor) {
            return self.pop_to(here, deeper);
        }
        // Another thread may have been taken for this one.
        if let Some((popped, resume)) = self.threads.mistaken() {
            let other = self.threads.instead(resume, &popped, ip);
            if let Some(other) = other {
                // What was popped belongs to the thread that did not run.
                self.change(here, resume, popped, Some(other));
                self.threads.resumed(resume, self.frames.len());
                return;
            }
        }
        match self.frames.last() {
            None => self.jump(here, ip),
            Some(top) if top.ret == 0 => self.replace(here, ip, FrameKind::Root),
            Some(_) => {
                let kernel = self.kernel;
                self.pop(here, false);
                if self.frames.len() > floor {
                    self.replace(here, ip, FrameKind::Jump);
                } else {
                    self.push(here, ip, 0, FrameKind::Root);
                }
                self.kernel = kernel;
            }
        }
    }

    fn far(&mut self, here: &Here, from: u64, ret: u64, ip: u64) {
        match (self.names.upper(from), self.names.upper(ip)) {
            (false, true) => self.enter_kernel(here, ip, ret, FrameKind::Entry),
            (true, false) => self.user(here, ip),
            _ => {
                if let Some(deeper) = self.frames.iter().rposition(|frame| frame.ret == ip) {
                    return self.pop_to(here, deeper);
                }
                let (function, start, _) = self.names.function(ip, self.process, here.step);
                if function.known() && start == ip {
                    self.push(here, ip, ret, FrameKind::Interrupt);
                } else {
                    self.jump(here, ip);
                }
            }
        }
    }

    fn enter_kernel(&mut self, here: &Here, ip: u64, ret: u64, kind: FrameKind) {
        self.process = self.cache.get(self.names, here.state.cr3).or(self.process);
        self.kernel.get_or_insert(self.frames.len());
        self.push(here, ip, ret, kind);
    }

    /// Back in user mode: whatever the kernel was doing for this thread is over.
    fn user(&mut self, here: &Here, ip: u64) {
        let process = self.cache.get(self.names, here.state.cr3);
        if process.is_some() && self.process != process {
            let other = self.threads.of(process);
            match (self.process, other) {
                // A thread whose process was not known yet, or that has got other addresses by exec.
                (_, None) => {
                    self.clear(here);
                    self.process = process;
                }
                (_, Some(other)) => {
                    self.clear(here);
                    self.take(here, Some(other));
                }
            }
        }
        if let Some(kernel) = self.kernel.take() {
            self.pop_to(here, kernel);
        }
        self.threads.confirm();
        match self.frames.last() {
            None => self.push(here, ip, 0, FrameKind::Root),
            Some(_) => self.jump(here, ip),
        }
    }
}

impl<S: Sink> Viewer for Calls<'_, S> {
    const CODE: bool = S::CODE;

    fn block(&mut self, here: &Here, block: &Block, code: &[u8]) {
        self.arrive(here, block.ip);
        if let Some(top) = self.frames.last_mut() {
            top.own += u64::from(block.count);
        }
        self.sink.run(self.names, here, &mut self.frames, block, code);
        let ret = block.ip.wrapping_add(block.len.into());
        self.after = match block.end {
            End::Call | End::IndirectCall => After::Call { ret },
            End::Return => After::Return { from: block.ip },
            End::Far => After::Far { from: block.ip, ret },
            _ => After::Nothing,
        };
    }

    fn event(&mut self, here: &Here, event: &Event) {
        match event.kind {
            EventKind::Async { from, to } => {
                if !matches!(self.after, After::Nothing) {
                    self.arrive(here, from);
                }
                self.sink.event(self.names, here, &self.frames, event);
                if let Some(to) = to {
                    if !self.names.upper(from) && self.names.upper(to) {
                        self.enter_kernel(here, to, from, FrameKind::Interrupt);
                    } else {
                        self.push(here, to, from, FrameKind::Interrupt);
                    }
                }
                return;
            }
            EventKind::Enabled { .. } => self.after = After::Again,
            _ if loses(event) => self.after = After::Lost,
            _ => {}
        }
        self.sink.event(self.names, here, &self.frames, event);
    }

    fn end(&mut self, here: &Here) {
        if S::LEAVES {
            self.clear(here);
        }
    }
}
