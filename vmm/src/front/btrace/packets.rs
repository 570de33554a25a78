//! A ring of packets, of a trace unit of the host's.

use std::collections::VecDeque;

use devices::unit::pt::Pt;
use x86::{
    model::CpuModel,
    pt::RtitCtl,
    watch::{Effects, Processor},
};

use crate::recording::unit::caps;

/// Both rings, branches, no time, and a PSB every 2 KiB: the ring is small, and begins to count with the first one.
const CTL: RtitCtl = RtitCtl::new().with_branch_en(true).with_os(true).with_user(true);

/// The last packets of a CPU.
#[derive(Debug)]
pub(super) struct Packets {
    model: &'static CpuModel,
    pub pt: Pt<Vec<u8>>,
    ring: VecDeque<u8>,
    room: usize,
    /// Bytes ever.
    total: u64,
    /// Bytes and steps of the CPU when it was read last.
    reported: Option<(u64, u64)>,
}

impl Packets {
    /// Room for so many bytes.
    pub fn new(model: &'static CpuModel, room: usize) -> Self {
        Packets {
            model,
            pt: Pt::with_output(caps(model), Vec::new()),
            ring: VecDeque::new(),
            room,
            total: 0,
            reported: None,
        }
    }

    /// Begins anew at the processor's next instruction.
    pub fn start(&mut self, cpu: &mut dyn Processor) {
        self.pt = Pt::with_output(caps(self.model), Vec::new());
        self.ring.clear();
        self.reported = None;
        // `caps` has all of it.
        let programmed = self.pt.program(CTL.with_trace_en(true), cpu);
        debug_assert!(programmed.is_ok());
        self.take_output();
    }

    /// Calls the unit.
    pub fn word(&mut self, cpu: &mut dyn Processor, say: impl FnOnce(&mut Pt<Vec<u8>>, &mut dyn Processor) -> Effects) {
        let _ = say(&mut self.pt, cpu);
        self.take_output();
    }

    fn take_output(&mut self) {
        let bytes = std::mem::take(self.pt.output());
        self.total += bytes.len() as u64;
        self.ring.extend(&bytes);
        let over = self.ring.len().saturating_sub(self.room);
        self.ring.drain(..over);
        // Its allocation serves again.
        *self.pt.output() = bytes;
        self.pt.output().clear();
    }

    /// All of the ring, and what a unit would send that was switched off here: the bits that wait, and where it was.
    pub fn read(&mut self, cpu: &mut dyn Processor) -> Vec<u8> {
        self.reported = Some((self.total, cpu.retired()));
        let mut end = self.pt.clone();
        let programmed = end.program(CTL, cpu);
        debug_assert!(programmed.is_ok());
        let (front, back) = self.ring.as_slices();
        [front, back, end.output()].concat()
    }

    /// Nothing has happened since it was read last.
    pub fn reported(&self, cpu: &dyn Processor) -> bool {
        self.reported == Some((self.total, cpu.retired()))
    }
}
