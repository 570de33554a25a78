//! The host stops a processor for a look, and it goes on as if nothing had been.

use crate::{bench, rig};
use std::cell::RefCell;
use std::rc::Rc;

use bench::{Bench, handler};
use engine::Exit;
use engine::bus::{Processor, Watch};
use iced_x86::code_asm::*;
use rig::CODE;
use x86::model::HASWELL;
use x86::watch::{Access, Effects, EventRecord, Interest, Range};

const STOP: Exit = Exit::Stop { pause: false };
const DATA: u64 = 0x30_0000;

/// What a [`Host`] listens for.
#[derive(Default)]
struct Requested {
    boundaries: Vec<u64>,
    ranges: Vec<Range>,
    interest: Interest,
    /// Of `before`, besides the stop.
    debug: Option<u64>,
    generation: u64,
    heard: usize,
}

/// Answers each word with a stop.
#[derive(Clone, Default)]
struct Host(Rc<RefCell<Requested>>, Vec<u64>, Vec<Range>);

impl Host {
    fn stop(&self) -> Effects {
        let mut requested = self.0.borrow_mut();
        requested.heard += 1;
        Effects {
            stop: true,
            ..Effects::NONE
        }
    }
}

impl Watch for Host {
    fn interest(&mut self, _: &mut dyn Processor) -> Interest {
        let requested = self.0.borrow();
        (self.1, self.2) = (requested.boundaries.clone(), requested.ranges.clone());
        requested.interest
    }
    fn boundaries(&self) -> &[u64] {
        &self.1
    }
    fn ranges(&self) -> &[Range] {
        &self.2
    }
    fn generation(&self) -> u64 {
        self.0.borrow().generation
    }
    fn before(&mut self, _: u64, _: &mut dyn Processor) -> Effects {
        let debug = self.0.borrow().debug;
        Effects { debug, ..self.stop() }
    }
    fn access(&mut self, _: &Access, _: &mut dyn Processor) -> Effects {
        self.stop()
    }
    fn event(&mut self, _: &EventRecord, _: &mut dyn Processor) -> Effects {
        self.stop()
    }
}

fn host(b: &mut Bench, requested: Requested) -> Rc<RefCell<Requested>> {
    let host = Host::default();
    *host.0.borrow_mut() = Requested {
        generation: 1,
        ..requested
    };
    let requested = host.0.clone();
    b.world.watch = Some(Box::new(host));
    requested
}

// covers: debug/stop-before
#[test]
fn a_stop_is_before_the_instruction_and_comes_once() {
    for every_instruction in [false, true] {
        let mut b = Bench::long();
        host(
            &mut b,
            Requested {
                boundaries: if every_instruction {
                    vec![]
                } else {
                    vec![CODE + 5, CODE + 7]
                },
                interest: Interest {
                    every_instruction,
                    ..Interest::NOTHING
                },
                ..Requested::default()
            },
        );
        b.code(|a| {
            a.mov(eax, 1)?; // 0
            a.inc(eax)?; // 5
            a.inc(eax)?; // 7
            a.hlt() // 9
        });
        let mut stops = Vec::new();
        while b.run(100) == STOP {
            stops.push((b.cpu.rip() - CODE, b.cpu.state().gpr[0], b.cpu.steps()));
        }
        let all = [(0, 0, 0), (5, 1, 1), (7, 2, 2), (9, 3, 3)];
        let expected = if every_instruction { &all[..] } else { &all[1..3] };
        assert_eq!(stops, expected);
        assert_eq!((b.cpu.state().gpr[0], b.cpu.steps()), (3, 4));
    }
}

// covers: debug/stop-guest-breakpoint
#[test]
fn the_guests_breakpoint_at_the_same_address_comes_first_and_rf_lets_only_the_hosts_through() {
    let mut b = Bench::long();
    let requested = host(
        &mut b,
        Requested {
            boundaries: vec![CODE + 5],
            debug: Some(1),
            ..Requested::default()
        },
    );
    b.code(|a| {
        a.mov(eax, 1)?;
        a.mov(eax, 2)?; // 5
        a.hlt()
    });
    b.at(handler(1), |a| {
        a.bts(qword_ptr(rsp + 16), 16)?;
        a.iretq()
    });
    assert_eq!(b.run(100), STOP);
    let state = b.cpu.state();
    assert_eq!(
        (state.rip, state.gpr[0]),
        (CODE + 5, 1),
        "after the handler, before the instruction"
    );
    assert_eq!((state.dr[6] & 0xf, requested.borrow().heard), (1, 2));
    assert_eq!(b.run(100), Exit::Halt);
    assert_eq!((b.cpu.state().gpr[0], requested.borrow().heard), (2, 2));
}

// covers: debug/stop-access
#[test]
fn a_stop_for_an_access_is_after_the_instruction_or_the_iteration() {
    let mut b = Bench::long();
    host(
        &mut b,
        Requested {
            ranges: vec![Range {
                first: DATA + 2,
                last: DATA + 3,
                ports: false,
                reads: false,
                writes: true,
            }],
            interest: Interest {
                ranges: true,
                ..Interest::NOTHING
            },
            ..Requested::default()
        },
    );
    b.code(|a| {
        a.mov(eax, dword_ptr(DATA))?; // 0: a read
        a.mov(dword_ptr(DATA), 7)?; // 9
        a.mov(edi, DATA as u32)?; // 14
        a.mov(ecx, 5)?; // 19
        a.rep().stosb()?; // 1e
        a.lock().inc(word_ptr(DATA + 1))?; // 20
        a.hlt()
    });
    let mut stops = Vec::new();
    while b.run(100) == STOP {
        stops.push((b.cpu.rip() - CODE, b.cpu.state().gpr[1]));
    }
    assert_eq!(stops, [(0x14, 0), (0x1e, 2), (0x1e, 1), (0x29, 0)]);
    assert_eq!(b.read::<4>(DATA), [0, 1, 0, 0]);
}

// covers: debug/stop-event
#[test]
fn a_stop_for_an_event_is_at_its_handler() {
    let mut b = Bench::long();
    host(
        &mut b,
        Requested {
            interest: Interest {
                transfers: true,
                ..Interest::NOTHING
            },
            ..Requested::default()
        },
    );
    b.code(|a| {
        a.ud2()?;
        a.nop()
    });
    b.at(handler(6), |a| a.int(0x40));
    assert_eq!((b.run(100), b.cpu.rip(), b.cpu.steps()), (STOP, handler(6), 0));
    assert_eq!((b.run(100), b.cpu.rip(), b.cpu.steps()), (STOP, handler(0x40), 1));
    // One that comes from outside between two runs.
    b.state(|s| (s.rip, s.rflags) = (CODE + 2, 0x202.into()));
    b.interrupt(0x41);
    assert_eq!((b.run(100), b.cpu.rip(), b.cpu.steps()), (STOP, handler(0x41), 1));
    assert_eq!(b.run(100), Exit::Halt);
}

// covers: debug/stop-transaction
#[test]
fn a_transaction_is_not_aborted_by_a_stop() {
    let mut b = Bench::long_with(HASWELL.with_toggles("+rtm").unwrap());
    host(
        &mut b,
        Requested {
            boundaries: vec![CODE + 14],
            ranges: vec![Range {
                first: DATA,
                last: DATA,
                ports: false,
                reads: true,
                writes: true,
            }],
            interest: Interest {
                ranges: true,
                ..Interest::NOTHING
            },
            ..Requested::default()
        },
    );
    b.code(|a| {
        let mut fallback = a.create_label();
        a.xbegin(fallback)?; // 0
        a.mov(byte_ptr(DATA), 9)?; // 6
        a.nop()?; // d
        a.nop()?; // e
        a.xend()?;
        a.mov(ebx, 1)?;
        a.set_label(&mut fallback)?;
        a.hlt()
    });
    for offset in [0xd, 0xe] {
        assert_eq!((b.run(100), b.cpu.rip()), (STOP, CODE + offset));
        assert!(b.cpu.state().transaction.is_some(), "it is open at {offset:x}");
    }
    assert_eq!(b.run(100), Exit::Halt);
    assert_eq!((b.cpu.state().gpr[3], b.read::<1>(DATA)), (1, [9]), "it was committed");
}

// covers: debug/stop-before
#[test]
fn with_a_stop_at_pause_the_turn_still_ends() {
    let mut b = Bench::long();
    host(
        &mut b,
        Requested {
            boundaries: vec![CODE + 2],
            ..Requested::default()
        },
    );
    b.cpu.yield_on_pause = true;
    b.code(|a| {
        a.pause()?; // 0
        a.hlt() // 2
    });
    assert_eq!(b.run(100), Exit::Pause);
    assert_eq!(b.run(100), STOP);
    assert_eq!(b.cpu.rip(), CODE + 2);
    assert_eq!(b.run(100), Exit::Halt);
}
