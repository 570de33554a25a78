//! The conversation with one client: frames in, answers out. It knows nothing of sockets.
//!
//! gdbstub understands most packets. In front of it we answer those that it has no place for: acknowledgments and repeats,
//! which belong to the line; why the machine stopped (`?`), which gdb cannot learn between two runs; qemu's physical
//! addresses; and whatever an [`Extra`] knows, as branch traces. gdbstub cannot be extended by those without changes to the crate,
//! since its set of commands is closed; so the answer to qSupported is extended on its way out. Whatever it fails at ends its
//! state, not the connection: it begins anew with what was agreed.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::convert::Infallible;
use std::rc::Rc;

use gdbstub::common::Signal;
use gdbstub::conn::Connection;
use gdbstub::stub::state_machine::GdbStubStateMachine;
use gdbstub::stub::{DisconnectReason, GdbStubBuilder, GdbStubError, MultiThreadStopReason};
use gdbstub::target::ext::base::reverse_exec::ReplayLogPosition;
use gdbstub::target::ext::breakpoints::WatchKind;
use x86::vmx::ExitReason;

use super::packets::{self, Frame, LONGEST};
use super::target::{Machine, Reverse, thread_of};
use crate::debug::{self, DebugStop, StopCause};
use crate::front::btrace::{self, Btrace};
use crate::front::controls::Controls;
use crate::vm::{End, Vm};

/// Why gdbstub does not answer.
#[derive(Debug, thiserror::Error)]
enum StubError {
    #[error("the debugger's side cannot be set up")]
    Begin,
    #[error(transparent)]
    Stub(#[from] GdbStubError<Infallible, Infallible>),
}

/// Packets that came while the guest ran: no client sends any.
const WAITING: usize = 16;
/// The longest piece of memory that is read at once.
const LONGEST_READ: usize = LONGEST / 2;

/// Packets that gdbstub does not know.
pub trait Extra {
    /// Features for the answer to qSupported, as `qXfer:btrace:read+`, with semicolons between.
    fn features(&self) -> &str;

    /// Answers a packet about the CPU that gdb looks at; `None`: it is somebody else's. Bytes that a packet cannot hold are to
    /// be [escaped](packets::escape).
    fn packet(&mut self, vm: &mut Vm, cpu: usize, packet: &[u8]) -> Option<Vec<u8>>;

    /// The client is gone.
    fn end(&mut self, _vm: &mut Vm) {}
}

impl Extra for Btrace {
    fn features(&self) -> &str {
        btrace::SUPPORTED
    }

    fn packet(&mut self, vm: &mut Vm, cpu: usize, packet: &[u8]) -> Option<Vec<u8>> {
        let packet = std::str::from_utf8(packet).ok()?;
        let answer = Btrace::packet(self, vm, cpu, packet)?;
        Some(packets::escape(answer.as_bytes()))
    }

    fn end(&mut self, vm: &mut Vm) {
        self.close(vm);
    }
}

/// What comes after an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    /// As before.
    Stay,
    /// The guest is to stop: the client has asked.
    Interrupt,
    /// The client lets the guest go on for good.
    Detached,
    /// The client ends the machine.
    Killed,
}

/// What gdbstub writes.
#[derive(Clone, Debug, Default)]
struct Out(Rc<RefCell<Vec<u8>>>);

impl Connection for Out {
    type Error = Infallible;

    fn write(&mut self, byte: u8) -> Result<(), Infallible> {
        self.0.borrow_mut().push(byte);
        Ok(())
    }

    fn flush(&mut self) -> Result<(), Infallible> {
        Ok(())
    }
}

type Stub<'v> = GdbStubStateMachine<'static, Machine<'v>, Out>;

/// The conversation.
pub struct Talk<'v> {
    /// The machine.
    pub machine: Machine<'v>,
    stub: Option<Stub<'v>>,
    out: Out,
    extras: Vec<Box<dyn Extra>>,
    /// Packets are not acknowledged any more.
    quiet: bool,
    /// The client writes processes with its threads.
    processes: bool,
    /// What was sent last, for a client that it did not reach.
    last: Vec<u8>,
    running: bool,
    waiting: VecDeque<Vec<u8>>,
}

impl<'v> Talk<'v> {
    /// About a machine that stands.
    pub fn new(controls: Controls<'v>, extras: Vec<Box<dyn Extra>>) -> Self {
        Talk {
            machine: Machine::new(controls),
            stub: None,
            out: Out::default(),
            extras,
            quiet: false,
            processes: false,
            last: Vec::new(),
            running: false,
            waiting: VecDeque::new(),
        }
    }

    /// A client has come.
    pub fn begin(&mut self) {
        self.end();
        self.machine.cpu = self.machine.controls.run.current_cpu();
    }

    /// It is gone, and what it has set is gone with it.
    pub fn end(&mut self) {
        self.machine.forget();
        for extra in &mut self.extras {
            extra.end(self.machine.controls.run);
        }
        self.stub = None;
        (self.quiet, self.processes, self.running) = (false, false, false);
        self.last.clear();
        self.waiting.clear();
    }

    /// The client waits for the guest to stop.
    pub fn running(&self) -> bool {
        self.running
    }

    /// What a client is to be sent for what has come from it.
    pub fn take(&mut self, frame: Frame) -> (Vec<u8>, Next) {
        match frame {
            Frame::Interrupt if self.running => (Vec::new(), Next::Interrupt),
            // The connection ends with it.
            Frame::Foreign => (Vec::new(), Next::Stay),
            // A stop was on its way when it was sent.
            Frame::Interrupt => (Vec::new(), Next::Stay),
            // gdb sends one whenever it has waited long for an answer, acknowledgments or not; the answer has come meanwhile.
            Frame::Nack if self.quiet => (Vec::new(), Next::Stay),
            Frame::Nack => (self.last.clone(), Next::Stay),
            Frame::Damaged if !self.quiet => (b"-".to_vec(), Next::Stay),
            Frame::Damaged => (self.say(&packets::error("a packet with a wrong checksum")), Next::Stay),
            Frame::Oversized => {
                let mut answer = self.acknowledge();
                let error = packets::error(&format!("a packet of more than {LONGEST} bytes"));
                answer.extend(self.say(&error));
                (answer, Next::Stay)
            }
            Frame::Packet(body) => {
                let mut answer = self.acknowledge();
                if self.running {
                    // It is answered when the guest has stopped.
                    if self.waiting.len() < WAITING {
                        self.waiting.push_back(body);
                    }
                    return (answer, Next::Stay);
                }
                let (said, next) = self.packet(&body);
                answer.extend(said);
                (answer, next)
            }
        }
    }

    /// The guest has stopped: what the client is to be sent, which waits for it.
    pub fn stopped(&mut self, stop: DebugStop) -> Vec<u8> {
        self.rest();
        self.machine.cpu = stop.cpu;
        let mut said = Vec::new();
        if let Some(text) = remark(&stop) {
            said = packets::frame(format!("O{}", packets::hex(text.as_bytes())).as_bytes());
        }
        let reason = self.reason(&stop);
        said.extend(self.report(reason));
        said.extend(self.waited());
        said
    }

    /// The answers to what came while the guest ran.
    fn waited(&mut self) -> Vec<u8> {
        let mut said = Vec::new();
        while !self.running
            && let Some(body) = self.waiting.pop_front()
        {
            said.extend(self.packet(&body).0);
        }
        said
    }

    /// How the client wants the machine to go back, once.
    pub fn take_reverse(&mut self) -> Option<Reverse> {
        self.machine.resume.reverse.take().filter(|_| self.running)
    }

    /// There is nothing before this point: what the client is to be sent, which waits for it.
    pub fn at_the_beginning(&mut self) -> Vec<u8> {
        self.nothing_more(ReplayLogPosition::Begin)
    }

    /// The guest has ended its run, or a recorded session is at its end: the client may look, and turn round.
    pub fn at_an_end(&mut self, end: &End) -> Vec<u8> {
        let text = end
            .message()
            .unwrap_or_else(|| format!("the guest has ended its run: {end:?}"));
        let mut said = packets::frame(format!("O{}", packets::hex(format!("minivmm: {text}\n").as_bytes())).as_bytes());
        said.extend(self.nothing_more(ReplayLogPosition::End));
        said
    }

    fn nothing_more(&mut self, pos: ReplayLogPosition) -> Vec<u8> {
        self.rest();
        self.machine.cpu = self.machine.controls.run.current_cpu();
        let tid = Some(thread_of(self.machine.cpu));
        let mut said = self.report(MultiThreadStopReason::ReplayLog { tid, pos });
        said.extend(self.waited());
        said
    }

    /// The machine has ended, and the conversation with it.
    pub fn ended(&mut self, end: &End) -> Vec<u8> {
        self.rest();
        let status = end.status().code();
        self.report(MultiThreadStopReason::Exited(status as u8))
    }

    /// The guest stands.
    fn rest(&mut self) {
        self.running = false;
        self.machine.controls.run.debugger().step(None);
        self.machine.controls.run.run_only(None);
    }

    fn report(&mut self, reason: MultiThreadStopReason<u64>) -> Vec<u8> {
        let Some(GdbStubStateMachine::Running(stub)) = self.stub.take() else {
            return Vec::new();
        };
        self.stub = stub.report_stop(&mut self.machine, reason).ok();
        self.last = self.out.0.take();
        self.last.clone()
    }

    fn acknowledge(&self) -> Vec<u8> {
        if self.quiet { Vec::new() } else { b"+".to_vec() }
    }

    /// A packet of our own.
    fn say(&mut self, body: &[u8]) -> Vec<u8> {
        self.last = packets::frame(body);
        self.last.clone()
    }

    fn packet(&mut self, body: &[u8]) -> (Vec<u8>, Next) {
        let own = match body {
            b"QStartNoAckMode" => {
                self.quiet = true;
                b"OK".to_vec()
            }
            b"?" => format!("T05thread:{};", self.thread(self.machine.cpu)).into_bytes(),
            b"k" => return (Vec::new(), Next::Killed),
            [b'v', b'K', b'i', b'l', b'l', ..] => return (self.say(b"OK"), Next::Killed),
            b"qqemu.PhyMemMode" => vec![b'0' + u8::from(self.machine.physical)],
            b"Qqemu.PhyMemMode:0" | b"Qqemu.PhyMemMode:1" => {
                self.machine.physical = body.ends_with(b"1");
                b"OK".to_vec()
            }
            [b'm', read @ ..] if too_long(read) => packets::error("too much memory at once"),
            _ => match self.extra(body) {
                Some(answer) => answer,
                None => return self.stub(body),
            },
        };
        (self.say(&own), Next::Stay)
    }

    fn extra(&mut self, body: &[u8]) -> Option<Vec<u8>> {
        let (vm, cpu) = (&mut *self.machine.controls.run, self.machine.cpu);
        self.extras.iter_mut().find_map(|extra| extra.packet(vm, cpu, body))
    }

    /// A thread as packets name it.
    fn thread(&self, cpu: usize) -> String {
        let thread = thread_of(cpu);
        if self.processes {
            format!("p01.{thread:02x}")
        } else {
            format!("{thread:02x}")
        }
    }

    /// A stub that knows what has been agreed.
    fn fresh(&mut self) -> Option<Stub<'v>> {
        let builder = GdbStubBuilder::new(self.out.clone()).packet_buffer_size(LONGEST + 4);
        let stub = builder.build().ok()?.run_state_machine(&mut self.machine).ok()?;
        let mut known = vec!["QStartNoAckMode".to_string()];
        if self.processes {
            known.push("qSupported:multiprocess+".into());
        }
        known.push(format!("Hg{}", self.thread(self.machine.cpu)));
        let mut stub = Some(stub);
        for body in known {
            stub = self.feed(stub?, body.as_bytes()).ok();
        }
        self.out.0.take();
        stub
    }

    fn feed(&mut self, mut stub: Stub<'v>, body: &[u8]) -> Result<Stub<'v>, StubError> {
        for byte in packets::frame(body) {
            stub = match stub {
                GdbStubStateMachine::Idle(stub) => stub.incoming_data(&mut self.machine, byte),
                GdbStubStateMachine::Running(stub) => stub.incoming_data(&mut self.machine, byte),
                GdbStubStateMachine::CtrlCInterrupt(stub) => {
                    stub.interrupt_handled(&mut self.machine, None::<MultiThreadStopReason<u64>>)
                }
                GdbStubStateMachine::Disconnected(stub) => Ok(stub.return_to_idle()),
            }?;
        }
        Ok(stub)
    }

    /// Has gdbstub answer.
    fn stub(&mut self, body: &[u8]) -> (Vec<u8>, Next) {
        self.note(body);
        self.machine.resume = Default::default();
        let stub = match self.stub.take() {
            Some(stub) => Some(stub),
            None => self.fresh(),
        };
        let fed = match stub {
            Some(stub) => self.feed(stub, body),
            None => Err(StubError::Begin),
        };
        let mut said = self.out.0.take();
        match fed {
            Ok(stub) => self.stub = Some(stub),
            // It is gone; a new one takes the next packet.
            Err(error) => return (self.say(&packets::error(&error.to_string())), Next::Stay),
        }
        let next = match &self.stub {
            Some(GdbStubStateMachine::Running(_)) => {
                self.go();
                Next::Stay
            }
            Some(GdbStubStateMachine::Disconnected(stub)) => match stub.get_reason() {
                DisconnectReason::Kill => Next::Killed,
                _ => Next::Detached,
            },
            _ => Next::Stay,
        };
        if body.starts_with(b"qSupported") {
            said = self.supported(&said);
        }
        self.last.clone_from(&said);
        (said, next)
    }

    /// What of a packet we have to know, too.
    fn note(&mut self, body: &[u8]) {
        if let Some(features) = body.strip_prefix(b"qSupported:") {
            self.processes = features
                .split(|byte| *byte == b';')
                .any(|word| word == b"multiprocess+");
        }
        let thread = body
            .strip_prefix(b"Hg")
            .and_then(|thread| std::str::from_utf8(thread).ok());
        let thread = thread.map(|thread| thread.rsplit_once('.').map_or(thread, |(_, thread)| thread));
        if let Some(Ok(number @ 1..)) = thread.map(|thread| usize::from_str_radix(thread, 16))
            && number <= self.machine.controls.run.cpu_count()
        {
            self.machine.cpu = number - 1;
        }
    }

    /// The answer to qSupported with what others can do.
    fn supported(&self, said: &[u8]) -> Vec<u8> {
        let Some(body) = said
            .strip_prefix(b"$")
            .and_then(|said| said.get(..said.len().checked_sub(3)?))
        else {
            return said.to_vec();
        };
        let mut body = body.to_vec();
        for extra in &self.extras {
            body.push(b';');
            body.extend(extra.features().as_bytes());
        }
        packets::frame(&body)
    }

    /// The guest goes on as the client has said.
    fn go(&mut self) {
        self.running = true;
        let resume = self.machine.resume;
        let controls = &mut self.machine.controls;
        controls.paused = false;
        let vm = &mut *controls.run;
        match (resume.step, resume.range) {
            (Some(cpu), Some((start, end))) => vm.debugger().step_out_of(cpu, start..end),
            (step, _) => vm.debugger().step(step),
        }
        // The CPU whose turn it is needs nobody to stand still for its step: so nothing changes for the others.
        let alone = resume
            .step
            .or(resume.named)
            .filter(|cpu| resume.lock && resume.step != Some(vm.current_cpu()) && *cpu < vm.cpu_count());
        vm.run_only(alone);
    }

    fn reason(&mut self, stop: &DebugStop) -> MultiThreadStopReason<u64> {
        let tid = thread_of(stop.cpu);
        let signal = |signal| MultiThreadStopReason::SignalWithThread { tid, signal };
        match stop.why {
            StopCause::Breakpoint(address) => {
                // gdb goes by RIP. Where the code segment has a base it would not know its breakpoint, and run on.
                let here = self
                    .machine
                    .controls
                    .run
                    .cpu_state(stop.cpu)
                    .is_some_and(|state| state.rip == address);
                match self.machine.is_hardware(address).filter(|_| here) {
                    Some(true) => MultiThreadStopReason::HwBreak(tid),
                    Some(false) => MultiThreadStopReason::SwBreak(tid),
                    None => signal(Signal::SIGTRAP),
                }
            }
            StopCause::Watch {
                watchpoint, address, ..
            } => MultiThreadStopReason::Watch {
                tid,
                kind: match watchpoint.kind() {
                    debug::WatchKind::Write => WatchKind::Write,
                    debug::WatchKind::Read => WatchKind::Read,
                    debug::WatchKind::Access => WatchKind::ReadWrite,
                },
                addr: address,
            },
            StopCause::Exception { vector, .. } => signal(signal_of(vector)),
            StopCause::VmExit { .. } => signal(Signal::SIGUSR1),
            StopCause::Step => signal(Signal::SIGTRAP),
            StopCause::TripleFault => signal(Signal::SIGABRT),
            StopCause::Asked => signal(Signal::SIGINT),
        }
    }
}

/// Whether a packet `m` asks for more than an answer can hold.
fn too_long(read: &[u8]) -> bool {
    let len = read.split(|byte| *byte == b',').nth(1);
    let len = len.and_then(|len| std::str::from_utf8(len).ok());
    // What is no number is for gdbstub to refuse, but for one that it would take for a smaller one.
    len.is_some_and(|len| match usize::from_str_radix(len, 16) {
        Ok(len) => len > LONGEST_READ,
        Err(_) => !len.is_empty(),
    })
}

/// The signal that a program would get for an exception.
fn signal_of(vector: u8) -> Signal {
    match vector {
        0 | 16 | 19 => Signal::SIGFPE,
        1 | 3 => Signal::SIGTRAP,
        6 => Signal::SIGILL,
        17 => Signal::SIGBUS,
        4 | 5 | 10..=14 => Signal::SIGSEGV,
        8 => Signal::SIGABRT,
        _ => Signal::SIGUSR1,
    }
}

/// What is printed for gdb's user besides.
fn remark(stop: &DebugStop) -> Option<String> {
    let cpu = stop.cpu;
    match stop.why {
        StopCause::Exception { vector, error, address } => {
            let error = error.map_or(String::new(), |error| format!(", error code {error:#x}"));
            let address = address.map_or(String::new(), |address| format!(", CR2 {address:#x}"));
            Some(format!(
                "minivmm: vector {vector} on CPU {cpu}{error}{address}; at its handler\n"
            ))
        }
        StopCause::VmExit { reason } => {
            let text = ExitReason::of(reason).map_or("a reason without a name", ExitReason::text);
            Some(format!(
                "minivmm: VM exit on CPU {cpu}, reason {reason}: {text}; at the first instruction of the VMM\n"
            ))
        }
        StopCause::TripleFault => Some(format!(
            "minivmm: triple fault on CPU {cpu}; going on ends the machine\n"
        )),
        _ => None,
    }
}
