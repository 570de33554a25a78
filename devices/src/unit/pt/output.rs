//! Where packets go: guest memory by single range or table, or a host's own sink.
//!
//! SDM Vol. 3C 33.2.7 "Packet Output to Trace Memory" is the guest's. A host that traces from outside gives an [`Output`] of
//! its own and has no addresses to set up.
//!
//! Data for addresses without memory behind them is dropped, as the bus drops it, and that is no error, by single range or by table;
//! devices do not see it, nor does the page of the local APIC, which 33.2.7.4 "Restricted Memory Access" forbids and for which it
//! signals no error. What SMRR restricts is to the processor an address without memory behind it. A table
//! without memory behind it reads as all ones, which is malformed. Table entries are read when tracing starts and when one is reached, so a table may be prepared while its
//! predecessors fill.
//!
//! In VMX non-root operation addresses may be guest-physical ones, which EPT may not translate yet ([`TraceMem::unmapped`]): what is to be
//! written there, or behind a table entry there, is held until it does, as in the processor's internal buffers.

use serde::{Deserialize, Serialize};
use std::io;

use x86::pt::{PtCaps, RtitMaskPtrs, TopaEntry};
use x86::watch::TraceMem;

/// What became of bytes that were put out, or of a start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[must_use]
pub struct Outcome {
    /// A region with INT is full, or nearly.
    pub pmi: bool,
    /// A region with STOP is full: IA32_RTIT_STATUS.Stopped. Bytes that did not fit are lost.
    pub stopped: bool,
    /// An operational error: IA32_RTIT_STATUS.Error. Bytes that were left are lost.
    pub error: bool,
    /// Bytes were lost because a host's sink was full: an OVF packet is due.
    pub lost: bool,
}

/// A sink of packets.
pub trait Output {
    /// The state that a snapshot keeps.
    type State: Clone + PartialEq + std::fmt::Debug;

    /// Branch records that may come at once where each may have many branches: more are less work, and what follows from the bytes
    /// comes later.
    const RECORDS: u32 = 2048;

    /// Tracing starts. `topa` is IA32_RTIT_CTL.ToPA, `fabric` FabricEn.
    fn start(&mut self, topa: bool, fabric: bool, caps: &PtCaps, mem: &mut dyn TraceMem) -> Outcome;

    /// Takes bytes.
    fn put(&mut self, bytes: &[u8], caps: &PtCaps, mem: &mut dyn TraceMem) -> Outcome;

    /// IA32_RTIT_OUTPUT_BASE and IA32_RTIT_OUTPUT_MASK_PTRS.
    fn registers(&self) -> (u64, RtitMaskPtrs) {
        (0, RtitMaskPtrs::RESET)
    }

    /// Sets both; tracing is off.
    fn set_registers(&mut self, _base: u64, _ptrs: RtitMaskPtrs) {}

    /// The whole state.
    fn state(&self) -> Self::State;

    /// Takes a state back.
    fn set_state(&mut self, state: Self::State);
}

/// A region in use: a table entry, as it was when it was reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Region {
    /// The first address.
    pub base: u64,
    /// Bytes.
    pub size: u32,
    /// A PMI when full.
    pub int: bool,
    /// The end of the trace when full.
    pub stop: bool,
}

/// What is in use while tracing is on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Scheme {
    /// Nothing: tracing is off, or has come to its end.
    #[default]
    None,
    /// The transport subsystem, which ends nowhere here.
    Fabric,
    /// One range of `mask` + 1 bytes, over and over.
    Single,
    /// A table.
    Topa(Region),
    /// A table whose current entry cannot be read yet.
    Unread,
}

/// Why the current entry of a table is none to go on with.
enum Missing {
    /// The table is malformed, or no memory.
    Malformed,
    /// It is not mapped yet.
    Unmapped,
}

/// Bytes that are held at most for addresses that are not mapped: then some are lost.
const HELD: usize = 64 << 10;

/// Guest memory: the two output registers and what is in use.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GuestMemory {
    base: u64,
    ptrs: RtitMaskPtrs,
    scheme: Scheme,
    /// What waits for an address to be mapped, and what the registers were then.
    held: Vec<u8>,
    held_at: (u64, RtitMaskPtrs),
}

impl Default for GuestMemory {
    fn default() -> Self {
        Self {
            base: 0,
            ptrs: RtitMaskPtrs::RESET,
            scheme: Scheme::None,
            held: Vec::new(),
            held_at: (0, RtitMaskPtrs::RESET),
        }
    }
}

/// How far before the end of its only region a part of the first generation asks for the PMI, so that the handler comes in
/// time: "ToPA PMIs will be delivered before the region is filled", by how much is left open. SDM Vol. 3C 33.2.7.2, "Single
/// Output Region ToPA Implementation".
pub const EARLY_PMI: u32 = 512;

const ERROR: Outcome = Outcome {
    pmi: false,
    stopped: false,
    error: true,
    lost: false,
};

impl GuestMemory {
    fn entry(table: u64, index: u32, mem: &mut dyn TraceMem) -> Result<TopaEntry, Missing> {
        let mut bytes = [0; 8];
        match mem.read_phys(table.wrapping_add(u64::from(index) * 8), &mut bytes) {
            Ok(()) => Ok(TopaEntry::from_bits(u64::from_le_bytes(bytes))),
            Err(_) if mem.unmapped() => Err(Missing::Unmapped),
            Err(_) => Ok(TopaEntry::from_bits(!0)),
        }
    }

    /// Makes the current entry the region in use. Follows at most one END: a table that begins with one is malformed.
    /// SDM Vol. 3C 33.2.7.2, "ToPA Errors".
    fn load(&mut self, caps: &PtCaps, mem: &mut dyn TraceMem) -> Result<Region, Missing> {
        let mut index = self.ptrs.mask_or_table_offset();
        let mut entry = Self::entry(self.base, index, mem)?;
        if entry.end() {
            let backwards = caps.topa_multiple() || entry.base() == self.base;
            if entry.malformed(caps) || index == 0 || !backwards {
                return Err(Missing::Malformed);
            }
            self.base = entry.base();
            index = 0;
            self.ptrs.set_mask_or_table_offset(0);
            entry = Self::entry(self.base, 0, mem)?;
        }
        if entry.malformed(caps) || entry.end() || !caps.topa_multiple() && index != 0 {
            return Err(Missing::Malformed);
        }
        if !caps.topa_multiple() {
            let end = Self::entry(self.base, 1, mem)?;
            if !end.end() || end.malformed(caps) || end.base() != self.base {
                return Err(Missing::Malformed);
            }
        }
        Ok(Region {
            base: entry.base(),
            size: entry.size(),
            int: entry.int(),
            stop: entry.stop(),
        })
    }

    fn fail(&mut self) -> Outcome {
        self.scheme = Scheme::None;
        ERROR
    }

    /// Holds what cannot be written yet. The VM exit may turn tracing off, and the VMM may trace something else until the guest goes on: what is
    /// held then waits for the guest's registers.
    fn hold(&mut self, bytes: &[u8], mut outcome: Outcome) -> Outcome {
        if self.held_at != self.registers() {
            self.held.clear();
            self.held_at = self.registers();
        }
        let room = HELD.saturating_sub(self.held.len());
        outcome.lost |= bytes.len() > room;
        self.held.extend_from_slice(&bytes[..bytes.len().min(room)]);
        outcome
    }

    fn put_single(&mut self, mut bytes: &[u8], mem: &mut dyn TraceMem) -> Outcome {
        let mask = self.ptrs.mask();
        while !bytes.is_empty() {
            let offset = self.ptrs.output_offset();
            let room = u64::from(mask) - u64::from(offset) + 1;
            let (now, rest) = bytes.split_at(bytes.len().min(usize::try_from(room).unwrap_or(usize::MAX)));
            // Without memory behind it the data goes nowhere.
            if mem.write_phys(self.base + u64::from(offset), now).is_err() && mem.unmapped() {
                return self.hold(bytes, Outcome::default());
            }
            self.ptrs
                .set_output_offset(offset.wrapping_add(now.len() as u32) & mask);
            bytes = rest;
        }
        Outcome::default()
    }

    fn put_topa(&mut self, mut region: Region, mut bytes: &[u8], caps: &PtCaps, mem: &mut dyn TraceMem) -> Outcome {
        let mut outcome = Outcome::default();
        while !bytes.is_empty() {
            let offset = self.ptrs.output_offset();
            let room = (region.size - offset) as usize;
            let (now, rest) = bytes.split_at(bytes.len().min(room));
            if mem.write_phys(region.base + u64::from(offset), now).is_err() && mem.unmapped() {
                return self.hold(bytes, outcome);
            }
            let reached = offset + now.len() as u32;
            self.ptrs.set_output_offset(reached);
            bytes = rest;
            let early = if caps.topa_multiple() { 0 } else { EARLY_PMI };
            let due = region.size - early;
            outcome.pmi |= region.int && offset < due && reached >= due;
            if reached < region.size {
                continue;
            }
            if region.stop {
                // The offset stays at the region's size. SDM Vol. 3C 33.2.7.2, "ToPA STOP".
                self.scheme = Scheme::None;
                outcome.stopped = true;
                return outcome;
            }
            self.ptrs.set_output_offset(0);
            // After the last of its 2 to the power of 25 entries a table begins anew.
            let next = self.ptrs.mask_or_table_offset().wrapping_add(1) & 0x1FF_FFFF;
            self.ptrs.set_mask_or_table_offset(next);
            region = match self.load(caps, mem) {
                Ok(region) => region,
                Err(Missing::Unmapped) => {
                    self.scheme = Scheme::Unread;
                    return self.hold(bytes, outcome);
                }
                Err(Missing::Malformed) => {
                    outcome.error = true;
                    self.scheme = Scheme::None;
                    return outcome;
                }
            };
            self.scheme = Scheme::Topa(region);
        }
        outcome
    }

    /// Takes the current entry's region into use, or says what comes of it that it cannot be.
    fn enter_region(&mut self, caps: &PtCaps, mem: &mut dyn TraceMem) -> Option<Outcome> {
        match self.load(caps, mem) {
            Ok(region) if self.ptrs.output_offset() < region.size => {
                self.scheme = Scheme::Topa(region);
                None
            }
            Err(Missing::Unmapped) => {
                self.scheme = Scheme::Unread;
                Some(Outcome::default())
            }
            _ => Some(self.fail()),
        }
    }
}

impl Output for GuestMemory {
    type State = Self;

    /// A region's interrupt comes after the records that fill it.
    const RECORDS: u32 = 256;

    fn start(&mut self, topa: bool, fabric: bool, caps: &PtCaps, mem: &mut dyn TraceMem) -> Outcome {
        self.scheme = Scheme::None;
        if fabric {
            self.scheme = Scheme::Fabric;
            return Outcome::default();
        }
        if !topa {
            // SDM Vol. 3C 33.2.7.1 "Single Range Output", errors.
            let mask = self.ptrs.mask();
            let contiguous = mask & mask.wrapping_add(1) == 0;
            if !contiguous || self.base & u64::from(mask) != 0 || self.ptrs.output_offset() > mask {
                return self.fail();
            }
            self.scheme = Scheme::Single;
            return Outcome::default();
        }
        if self.base & 0xFFF != 0 {
            return self.fail();
        }
        self.enter_region(caps, mem).unwrap_or_default()
    }

    fn put(&mut self, bytes: &[u8], caps: &PtCaps, mem: &mut dyn TraceMem) -> Outcome {
        if self.scheme == Scheme::Unread
            && let Some(outcome) = self.enter_region(caps, mem)
        {
            return match self.scheme {
                Scheme::Unread => self.hold(bytes, outcome),
                _ => outcome,
            };
        }
        let all;
        let bytes = if self.held.is_empty() || self.held_at != self.registers() {
            bytes
        } else {
            all = [&std::mem::take(&mut self.held), bytes].concat();
            &all
        };
        match self.scheme {
            Scheme::None | Scheme::Fabric | Scheme::Unread => Outcome::default(),
            Scheme::Single => self.put_single(bytes, mem),
            Scheme::Topa(region) => self.put_topa(region, bytes, caps, mem),
        }
    }

    fn registers(&self) -> (u64, RtitMaskPtrs) {
        (self.base, self.ptrs)
    }

    fn set_registers(&mut self, base: u64, ptrs: RtitMaskPtrs) {
        self.base = base;
        self.ptrs = ptrs;
        self.scheme = Scheme::None;
    }

    fn state(&self) -> Self {
        self.clone()
    }

    fn set_state(&mut self, state: Self) {
        *self = state;
    }
}

/// Packets kept in the host's memory, which the host takes from it as it likes; a snapshot does not keep them.
impl Output for Vec<u8> {
    type State = ();

    fn start(&mut self, _topa: bool, _fabric: bool, _caps: &PtCaps, _mem: &mut dyn TraceMem) -> Outcome {
        Outcome::default()
    }

    fn put(&mut self, bytes: &[u8], _caps: &PtCaps, _mem: &mut dyn TraceMem) -> Outcome {
        self.extend_from_slice(bytes);
        Outcome::default()
    }

    fn state(&self) {}

    fn set_state(&mut self, (): ()) {}
}

/// Packets written to a host's file or pipe. The first error ends the trace and is kept.
#[derive(Debug)]
pub struct Writer<W> {
    inner: W,
    error: Option<io::Error>,
}

impl<W: io::Write> Writer<W> {
    /// Packets go to `inner`.
    pub fn new(inner: W) -> Self {
        Self { inner, error: None }
    }

    /// What went wrong with it, if anything has.
    pub fn take_error(&mut self) -> Option<io::Error> {
        self.error.take()
    }

    /// What the packets go to.
    pub fn get_mut(&mut self) -> &mut W {
        &mut self.inner
    }
}

impl<W: io::Write> Output for Writer<W> {
    type State = ();

    fn start(&mut self, _topa: bool, _fabric: bool, _caps: &PtCaps, _mem: &mut dyn TraceMem) -> Outcome {
        Outcome::default()
    }

    fn put(&mut self, bytes: &[u8], _caps: &PtCaps, _mem: &mut dyn TraceMem) -> Outcome {
        match self.inner.write_all(bytes) {
            Ok(()) => Outcome::default(),
            Err(error) => {
                self.error = Some(error);
                ERROR
            }
        }
    }

    fn state(&self) {}

    fn set_state(&mut self, (): ()) {}
}
