//! `--gdb`: gdb debugs the guest from outside, over its remote serial protocol.
//!
//! # Theory
//! A virtual CPU is a thread to gdb; all of them stop together. What stops them is the debugger's layer ([`crate::debug`]):
//! nothing of it is in the guest, whose own breakpoints work beside it. While a client looks, virtual time stands.
//!
//! # Practice
//! [`listen`] has the sockets and a thread for the client's bytes, [`packets`] their framing, [`talk`] the answers, with
//! gdbstub behind it and [`target`] and [`registers`] behind that. [`run`] takes the run loop's place around
//! [`Vm::run`]: packets are looked for where commands and input are.

mod control;
pub mod listen;
pub mod packets;
pub mod registers;
pub mod talk;
pub mod target;

pub use listen::{Address, Door};

use log::{debug, info};

use self::{
    listen::{Event, Stream},
    talk::{Next, Talk},
    target::Reverse,
};
use crate::{
    debug::{Stop, Why, btrace::Btrace},
    error::Error,
    front::console::Console,
    timeline::back::Back,
    vm::{End, Vm},
};

/// Runs a machine to its end, as [`Vm::run`], with a debugger whenever one is connected.
///
/// # Errors
/// As [`Vm::run`].
pub fn run(vm: &mut Vm, console: &mut Console, door: &Door) -> Result<End, Error> {
    let wake = door.wake().map_err(|source| Error::System {
        what: "listening for a debugger",
        source,
    })?;
    console.listen(wake)?;
    let mut session = Session {
        talk: Talk::new(vm, vec![Box::new(Btrace::new())]),
        client: None,
    };
    loop {
        // Whoever says something asks for a stop after it has said it: what was asked until here has been said.
        session.talk.machine.vm.debugger().take_asked();
        while let Some(event) = door.next() {
            if session.take(event) {
                return Ok(End::Quit);
            }
        }
        if let Some(reverse) = session.talk.take_reverse() {
            if let Some(end) = session.reverse(console, reverse)? {
                return Ok(end);
            }
            continue;
        }
        let held = session.client.is_some() && !session.talk.running();
        let vm = &mut *session.talk.machine.vm;
        vm.hold(held);
        let end = vm.run(console);
        vm.hold(false);
        match end {
            Ok(End::Stopped(Stop { why: Why::Asked, .. })) => {}
            // Nobody is there to look.
            Ok(End::Stopped(_)) if !session.talk.running() => {}
            Ok(End::Stopped(stop)) => {
                debug!("stopped: {stop:x?}");
                let said = session.talk.stopped(stop);
                session.send(&said);
            }
            // From there one can go back.
            Ok(end) if session.looks_on(&end) => {
                let said = session.talk.at_an_end(&end);
                session.send(&said);
            }
            end => {
                if let Ok(end) = &end {
                    let said = session.talk.ended(end);
                    session.send(&said);
                }
                session.close();
                return end;
            }
        }
    }
}

struct Session<'v> {
    talk: Talk<'v>,
    client: Option<Stream>,
}

impl Session<'_> {
    /// Whether the end of a run is none for the client, which can have it go back.
    fn looks_on(&self, end: &End) -> bool {
        let over = end.is_the_guests() || matches!(end, End::Replayed { .. });
        over && self.talk.running() && self.talk.machine.vm.extent().is_some()
    }

    /// Whether the client ends the machine.
    fn take(&mut self, event: Event) -> bool {
        match event {
            Event::Connected(stream) => {
                info!("a debugger has connected at step {}", self.talk.machine.vm.steps());
                self.talk.begin();
                self.client = Some(stream);
            }
            Event::Gone => self.close(),
            // Of a client that was sent away.
            Event::Frame(_) if self.client.is_none() => {}
            Event::Frame(frame) => {
                let (said, next) = self.talk.take(frame);
                self.send(&said);
                match next {
                    Next::Stay => {}
                    Next::Interrupt => {
                        let cpu = self.talk.machine.vm.current_cpu();
                        let said = self.talk.stopped(Stop { cpu, why: Why::Asked });
                        self.send(&said);
                    }
                    Next::Detached => {
                        self.talk.machine.vm.set_paused(false);
                        self.close();
                    }
                    Next::Killed => {
                        self.close();
                        return true;
                    }
                }
            }
        }
        false
    }

    /// Goes back in time. What ends the machine meanwhile is its end.
    fn reverse(&mut self, console: &mut Console, reverse: Reverse) -> Result<Option<End>, Error> {
        let vm = &mut *self.talk.machine.vm;
        let back = match reverse {
            Reverse::Continue => vm.back(console)?,
            Reverse::Step(cpu) => match vm.step_back(console, cpu)? {
                true => Back::Stopped(Stop { cpu, why: Why::Step }),
                false => Back::Beginning,
            },
        };
        if let Back::Stopped(Stop { why: Why::Asked, .. }) = back {
            // It is where it was. What was asked for is among the events; if it was not to stop, it goes back then.
            self.talk.machine.resume.reverse = Some(reverse);
            return Ok(None);
        }
        let said = match &back {
            Back::Stopped(stop) => self.talk.stopped(*stop),
            Back::Beginning => self.talk.at_the_beginning(),
            Back::Ended(end) => self.talk.ended(end),
        };
        self.send(&said);
        Ok(match back {
            Back::Ended(end) => {
                self.close();
                Some(end)
            }
            _ => None,
        })
    }

    fn send(&mut self, bytes: &[u8]) {
        let Some(client) = &mut self.client else { return };
        if !bytes.is_empty() && client.send(bytes).is_err() {
            self.close();
        }
    }

    /// The client is gone, or has to go. The guest goes on, unless it was paused and has stayed so.
    fn close(&mut self) {
        if let Some(client) = self.client.take() {
            info!("the debugger is gone at step {}", self.talk.machine.vm.steps());
            client.close();
            self.talk.end();
        }
    }
}
