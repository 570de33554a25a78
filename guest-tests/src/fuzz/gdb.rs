//! What a client of the debugger's side sends.

use std::cell::RefCell;

use minivmm::debug::{DebugStop, StopCause, WatchKind, Watchpoint};
use minivmm::front::gdb::packets::{Frame, Framer, frame};
use minivmm::front::gdb::talk::{Next, Talk};
use minivmm::front::{btrace::Btrace, controls::Controls};
use minivmm::{MachineConfig, Run};
use x86::model::HASWELL;

/// Sends bytes to a machine that stands. Whatever comes back is whole packets, acknowledgments aside, and short.
pub fn gdb(bytes: &[u8]) {
    thread_local! {
        static VM: RefCell<Run> = RefCell::new(machine());
    }
    VM.with_borrow_mut(|vm| {
        let mut talk = Talk::new(Controls::new(vm), vec![Box::new(Btrace::new())]);
        talk.begin();
        let mut framer = Framer::default();
        for (count, byte) in bytes.iter().enumerate() {
            let Some(came) = framer.push(*byte) else { continue };
            let (mut said, next) = talk.take(came);
            if talk.running() {
                said.extend(talk.stopped(reason(count)));
            }
            check(&said, bytes);
            if matches!(next, Next::Detached | Next::Killed) {
                talk.begin();
            }
        }
        talk.end();
    });
}

fn machine() -> Run {
    let config = MachineConfig {
        memory: 4 << 20,
        cpus: 2,
        model: &HASWELL,
        ..MachineConfig::new(crate::HELLO)
    };
    Run::new(&config).expect("the machine is to be had")
}

/// Some stop or other.
fn reason(count: usize) -> DebugStop {
    let watchpoint = Watchpoint::new(count as u64, 8, WatchKind::Access).expect("it does not wrap");
    let why = match count % 6 {
        0 => StopCause::Breakpoint(count as u64),
        1 => StopCause::Watch {
            watchpoint,
            address: count as u64,
            ip: None,
        },
        2 => StopCause::Exception {
            vector: count as u8,
            error: Some(1),
            address: Some(u64::MAX),
        },
        3 => StopCause::Step,
        4 => StopCause::TripleFault,
        _ => StopCause::Asked,
    };
    DebugStop { cpu: count % 2, why }
}

fn check(said: &[u8], bytes: &[u8]) {
    let what = || String::from_utf8_lossy(bytes).into_owned();
    assert!(said.len() < 1 << 20, "{} bytes of answer to {:?}", said.len(), what());
    let mut framer = Framer::default();
    let mut inside = false;
    for byte in said {
        inside |= *byte == b'$';
        if let Some(frame) = framer.push(*byte) {
            let whole = matches!(frame, Frame::Packet(_) | Frame::Oversized) || !inside && frame == Frame::Nack;
            assert!(whole, "{frame:?} in the answer to {:?}", what());
            inside = false;
        }
    }
    assert!(!inside, "half a packet in the answer to {:?}", what());
}

/// Conversations as gdb has them.
pub fn conversations() -> Vec<Vec<u8>> {
    let packets = |bodies: &[&str]| {
        bodies
            .iter()
            .flat_map(|body| frame(body.as_bytes()))
            .collect::<Vec<u8>>()
    };
    vec![
        packets(&[
            "qSupported:multiprocess+;swbreak+;hwbreak+;vContSupported+",
            "QStartNoAckMode",
            "vCont?",
            "Hgp0.0",
            "qXfer:features:read:target.xml:0,1000",
            "qXfer:features:read:target.xml:ffffffffffffffff,fff",
            "?",
            "qfThreadInfo",
            "qsThreadInfo",
            "qThreadExtraInfo,p1.2",
            "qAttached:1",
            "Tp1.1",
        ]),
        packets(&[
            "Hg1",
            "g",
            "p10",
            "P10=0011223300000000",
            "p3a",
            "m100000,40",
            "M100020,4:90909090",
            "m0,ffff",
            "mfffffffffffffffc,8",
            "X100030,2:ab",
            "Qqemu.PhyMemMode:1",
            "m1000,8",
            "qqemu.PhyMemMode",
        ]),
        packets(&[
            "Z0,100020,1",
            "Z1,ffffffffffffffff,1",
            "Z2,1000,8",
            "Z3,1000,ffff",
            "Z4,fffffffffffffff0,20",
            "z0,100020,1",
            "vCont;s:p1.1;c",
            "vCont;c:p1.2",
            "vCont;C0b:p1.1;c:p1.-1",
            "s",
            "c",
            "z1,0,1",
            "bs",
            "bc",
            "vKill;1",
        ]),
        packets(&[
            "qRcmd,696e666f",
            "qRcmd,647220",
            "qRcmd,67766132677061203078313030303030",
            "Qbtrace:bts",
            "qXfer:btrace:read:all:0,1000",
            "qXfer:btrace-conf:read::0,100",
            "Qbtrace:off",
            "Qbtrace-conf:pt:size=0x4000",
            "Qbtrace:pt",
            "qXfer:btrace:read:delta:0,1000",
            "D;1",
        ]),
        [&b"+++-\x03$?#3f-"[..], &packets(&["k"])].concat(),
    ]
}
