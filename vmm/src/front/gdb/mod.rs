//! `--gdb`: gdb debugs the guest from outside, over its remote serial protocol.
//!
//! # Theory
//! A virtual CPU is a thread to gdb; all of them stop together. What stops them is the debugger's layer ([`crate::debug`]):
//! nothing of it is in the guest, whose own breakpoints work beside it. While a client looks, virtual time stands.
//!
//! # Practice
//! [`listen`] has the sockets and a thread for the client's bytes, [`packets`] their framing, [`talk`] the answers, with
//! gdbstub behind it and [`target`] and [`registers`] behind that. A [`Session`] is one client after
//! another; [`serve`](super::serve) has it answer packets whenever the run has come back.

mod control;
pub mod listen;
pub mod packets;
pub mod registers;
pub mod talk;
pub mod target;

pub use listen::GdbListener;

use log::info;

use self::{
    listen::{Event, Stream},
    talk::{Next, Talk},
    target::Reverse,
};
use crate::{
    debug::{DebugStop, StopCause},
    error::Error,
    front::{btrace::Btrace, controls::Controls},
    timeline::back::Back,
    vm::{End, Outside},
};

/// The conversation with whichever client is connected.
pub struct Session<'v> {
    talk: Talk<'v>,
    client: Option<Stream>,
    /// Commands of a client over TCP may write files, too.
    allow_files: bool,
}

impl<'v> Session<'v> {
    /// No client is connected yet. `allow_files`: commands of a client over TCP may write files, too.
    pub fn new(controls: Controls<'v>, allow_files: bool) -> Self {
        Session {
            talk: Talk::new(controls, vec![Box::new(Btrace::new())]),
            client: None,
            allow_files,
        }
    }

    /// What the front ends share.
    pub fn controls(&mut self) -> &mut Controls<'v> {
        &mut self.talk.machine.controls
    }

    /// Whether a client looks at the guest, which is stopped for as long.
    pub fn holds(&self) -> bool {
        self.client.is_some() && !self.talk.running()
    }

    /// Whether there is a client.
    pub fn is_connected(&self) -> bool {
        self.client.is_some()
    }

    /// Whether a client waits for the guest to stop.
    pub fn waits(&self) -> bool {
        self.talk.running()
    }

    /// How the client wants the machine to go back, once.
    pub fn take_reverse(&mut self) -> Option<Reverse> {
        self.talk.take_reverse()
    }

    /// Tells the client that the guest has stopped.
    pub fn tell_stop(&mut self, stop: DebugStop) {
        let said = self.talk.stopped(stop);
        self.send(&said);
    }

    /// Tells the client that the guest has ended its run, which it can have go back.
    pub fn at_an_end(&mut self, end: &End) {
        let said = self.talk.at_an_end(end);
        self.send(&said);
    }

    /// The machine has ended: tells the client, and passes the end on.
    ///
    /// # Errors
    /// The end was one.
    pub fn end(&mut self, end: Result<End, Error>) -> Result<End, Error> {
        if let Ok(end) = &end {
            let said = self.talk.ended(end);
            self.send(&said);
        }
        self.close();
        end
    }

    /// Whether the end of a run is none for the client, which can have it go back.
    pub fn looks_on(&self, end: &End) -> bool {
        let over = end.is_the_guests() || matches!(end, End::Replayed { .. });
        over && self.talk.running() && self.talk.machine.controls.run.extent().is_some()
    }

    /// Whether the client ends the machine.
    pub fn take(&mut self, event: Event) -> bool {
        match event {
            Event::Connected(stream) => {
                info!(
                    "a debugger has connected at step {}",
                    self.talk.machine.controls.run.steps()
                );
                self.talk.begin();
                self.talk.machine.files = self.allow_files || stream.is_private();
                self.client = Some(stream);
            }
            Event::Gone => self.close(),
            // Of a client that was sent away.
            Event::Frame(_) if self.client.is_none() => {}
            Event::Frame(frame) => {
                self.talk.machine.controls.held = self.holds();
                let (said, next) = self.talk.take(frame);
                self.send(&said);
                match next {
                    Next::Stay => {}
                    Next::Interrupt => {
                        let cpu = self.talk.machine.controls.run.current_cpu();
                        let said = self.talk.stopped(DebugStop {
                            cpu,
                            why: StopCause::Asked,
                        });
                        self.send(&said);
                    }
                    Next::Detached => {
                        self.talk.machine.controls.paused = false;
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
    pub fn reverse(&mut self, world: &mut dyn Outside, reverse: Reverse) -> Result<Option<End>, Error> {
        let run = &mut *self.talk.machine.controls.run;
        let back = match reverse {
            // The past is not kept any more: see `--reverse-memory`.
            _ if run.extent().is_none() => Back::Beginning,
            Reverse::Continue => run.back(world)?,
            Reverse::Step(cpu) => match run.step_back(world, cpu)? {
                true => Back::Stopped(DebugStop {
                    cpu,
                    why: StopCause::Step,
                }),
                false => Back::Beginning,
            },
        };
        if let Back::Stopped(DebugStop {
            why: StopCause::Asked, ..
        }) = back
        {
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
            info!(
                "the debugger is gone at step {}",
                self.talk.machine.controls.run.steps()
            );
            client.close();
            self.talk.end();
        }
    }
}
