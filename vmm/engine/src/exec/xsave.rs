//! XSAVE, XSAVEOPT, XSAVEC, XSAVES, XRSTOR, XRSTORS, XGETBV, XSETBV (SDM Vol. 1 chapter 13 "Managing State Using the XSAVE
//! Feature Set").
//!
//! # Theory
//! State comes in components, numbered as in XCR0 and IA32_XSS. Where a component lies in the standard format, how long it is
//! and whether the compacted format aligns it is the model's, in CPUID leaf 0DH ([`Layout`]); what is in it is here for the ones
//! that the core holds and behind [`crate::bus::Bus`] for those of the units.
//!
//! # Practice
//! An area is put together, or taken apart, in a buffer; what of memory is read or written is a list of runs, so nothing between
//! two components is touched. All of it is checked before anything is written or loaded, but for MXCSR in the compacted format.
//!
//! # Optimisations
//! The init optimisation is exact: a component is in use when its registers differ from their initial configuration, whatever
//! led there. The modified optimisation, which depends on what ran before, is not made: XSAVEOPT and XSAVES may always write what
//! has not changed (SDM Vol. 1 13.6 "Processor Tracking of XSAVE-Managed State"), and so a run repeats.

use iced_x86::Mnemonic as M;
use x86::model::CpuModel;

use crate::cpu::{Cpu, slot};
use crate::exec::system::{Go, cold_bodies, cold_flows};
use crate::fpu::state::{BadImage, fxsave_len, mxcsr, xstate};
use crate::lower::{End, Lower};
use crate::mmu::Access;
use crate::op::{Done, Handler, Op, chain, chain_flow};

/// The number of PKRU's component.
const PKRU: u32 = 9;
/// What the core has of the components of XCR0.
const USER: u64 = xstate::X87 | xstate::SSE | xstate::AVX | xstate::AVX512 | 1 << PKRU;
/// The numbers of the components of AVX-512.
const OPMASK: u32 = 5;
const ZMM_HI256: u32 = 6;
const HI16_ZMM: u32 = 7;
/// What units hold of those of IA32_XSS: processor trace and last-branch records.
const SUPERVISOR: u64 = 1 << 8 | 1 << 15;
/// The highest number of either, and one.
const NUMBERS: usize = 16;
/// The longest area: images are read and written up to a page at a time.
const AREA: usize = 4096;
const COMPACTED: u64 = 1 << 63;
const HEADER: usize = 512;
const EXTENDED: usize = xstate::LEGACY_AND_HEADER;

/// A component behind the header.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Component {
    size: usize,
    /// Where it is in the standard format; of components of IA32_XSS there are none in it.
    offset: usize,
    /// The compacted format puts it at a multiple of 64.
    aligned: bool,
}

/// The components that a model has, from CPUID leaf 0DH. SDM Vol. 1 13.2 "Enumeration of CPU Support for XSAVE Instructions and
/// XSAVE-Supported Features".
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Layout {
    /// What XCR0 takes.
    user: u64,
    /// What IA32_XSS takes.
    supervisor: u64,
    components: [Component; NUMBERS],
}

impl Layout {
    pub fn of(model: &CpuModel) -> Layout {
        const LEAF: u32 = 0xd;
        let mut layout = Layout::default();
        if !model.features().xsave() {
            return layout;
        }
        let [low, .., high] = model.cpuid(LEAF, 0);
        layout.user = (low as u64 | (high as u64) << 32) & USER | xstate::X87;
        if model.features().xsaves() {
            let [_, _, low, high] = model.cpuid(LEAF, 1);
            layout.supervisor = (low as u64 | (high as u64) << 32) & SUPERVISOR;
        }
        let mut end = EXTENDED;
        for i in bits(layout.user | layout.supervisor).filter(|&i| i >= 2) {
            let [size, offset, flags, _] = model.cpuid(LEAF, i);
            let user = layout.user >> i & 1 != 0;
            let component = Component {
                size: size as usize,
                offset: if user { offset as usize } else { 0 },
                aligned: flags & 2 != 0,
            };
            let least = match i {
                2 => 256,
                OPMASK => 64,
                ZMM_HI256 => 512,
                HI16_ZMM => 1024,
                PKRU => 4,
                _ => 1,
            };
            // A model of the user's own may say anything; both formats must fit.
            let next = (end + 64).saturating_add(component.size);
            let sound = component.size >= least
                && next <= AREA
                && (!user || component.offset >= EXTENDED && component.offset.saturating_add(component.size) <= AREA);
            if sound {
                layout.components[i as usize] = component;
                end = next;
            } else {
                layout.user &= !(1 << i);
                layout.supervisor &= !(1 << i);
            }
        }
        if layout.user & xstate::AVX512 != xstate::AVX512 || layout.user & xstate::AVX == 0 {
            layout.user &= !xstate::AVX512;
        }
        layout
    }

    /// The size of an area in the standard format that holds `components`.
    pub fn standard_size(&self, components: u64) -> u32 {
        let end = |i: u32| self.components[i as usize].offset + self.components[i as usize].size;
        bits(components & self.user)
            .filter(|&i| i >= 2)
            .map(end)
            .fold(EXTENDED, usize::max) as u32
    }

    /// The size of one in the compacted format.
    pub fn compacted_size(&self, components: u64) -> u32 {
        self.places(components | COMPACTED).1 as u32
    }

    /// Where each component is in an area with this XCOMP_BV, and where the area ends. SDM Vol. 1 13.4.3 "Extended Region of an
    /// XSAVE Area".
    fn places(&self, xcomp_bv: u64) -> ([usize; NUMBERS], usize) {
        let mut places = [0; NUMBERS];
        if xcomp_bv & COMPACTED == 0 {
            for (place, component) in places.iter_mut().zip(&self.components) {
                *place = component.offset;
            }
            return (places, AREA);
        }
        let mut at = EXTENDED;
        for i in bits(xcomp_bv & (self.user | self.supervisor)).filter(|&i| i >= 2) {
            let component = self.components[i as usize];
            if component.aligned {
                at = at.next_multiple_of(64);
            }
            places[i as usize] = at;
            at += component.size;
        }
        (places, at)
    }
}

/// The numbers of the bits that are set, of those that there can be.
fn bits(set: u64) -> impl Iterator<Item = u32> {
    (0..NUMBERS as u32).filter(move |&i| set >> i & 1 != 0)
}

/// An area, and which parts of it memory has or gets.
struct Image {
    bytes: [u8; AREA],
    runs: [(u16, u16); NUMBERS + 4],
    len: usize,
}

impl Image {
    fn new() -> Image {
        Image {
            bytes: [0; AREA],
            runs: [(0, 0); NUMBERS + 4],
            len: 0,
        }
    }

    fn run(&mut self, at: usize, len: usize) {
        self.runs[self.len] = (at as u16, len as u16);
        self.len += 1;
    }

    fn put(&mut self, at: usize, bytes: &[u8]) {
        self.bytes[at..at + bytes.len()].copy_from_slice(bytes);
        self.run(at, bytes.len());
    }

    fn runs(&self) -> impl Iterator<Item = (usize, usize)> {
        self.runs[..self.len]
            .iter()
            .map(|&(at, len)| (at as usize, len as usize))
    }

    fn word(&self, at: usize) -> u64 {
        u64::from_le_bytes(core::array::from_fn(|i| self.bytes[at + i]))
    }

    /// Fills the runs from memory.
    fn read(&mut self, c: &mut Cpu, o: &Op) -> Done {
        for k in 0..self.len {
            let (at, len) = (self.runs[k].0 as usize, self.runs[k].1 as usize);
            let linear = c.part(o, at, len, false)?;
            c.read_bytes(o, linear, &mut self.bytes[at..at + len])?;
        }
        Ok(())
    }

    /// Writes the runs to memory, all of them or none.
    fn write(&self, c: &mut Cpu, o: &Op) -> Done {
        for (at, len) in self.runs() {
            let linear = c.part(o, at, len, true)?;
            c.probe_write(o, linear, len)?;
        }
        for (at, len) in self.runs() {
            let linear = c.part(o, at, len, true)?;
            c.write_bytes(o, linear, &self.bytes[at..at + len])?;
        }
        Ok(())
    }
}

/// Bits of the ops' `aux`.
mod aux {
    /// 64-bit mode: sixteen registers.
    pub const LONG: u16 = 1 << 0;
    /// REX.W: 64-bit pointers of the x87 unit.
    pub const REX_W: u16 = 1 << 1;
    /// Components in their initial configuration are not written.
    pub const OPTIMISE: u16 = 1 << 2;
    /// XSAVEC and XSAVES: the compacted format.
    pub const COMPACT: u16 = 1 << 3;
    /// XSAVES and XRSTORS: IA32_XSS counts too, and only ring 0 may.
    pub const SUPERVISOR: u16 = 1 << 4;
}

cold_bodies! {
    Xsave = save;
    Xrstor = restore;
    Xgetbv = |c: &mut Cpu, _: &Op| {
        if !c.cr4.osxsave() {
            return Err(c.ud());
        }
        let v = match c.get::<4>(slot::RCX) {
            0 => c.xcr0,
            1 if c.features.xgetbv1() => c.xcr0 & c.xinuse(),
            _ => return Err(c.gp(0)),
        };
        c.set::<4>(slot::RAX, v);
        c.set::<4>(slot::RDX, v >> 32);
        Ok(())
    };
}

cold_flows! {
    Xsetbv = xsetbv;
}

fn xsetbv(c: &mut Cpu, o: &Op) -> Done<Go> {
    if !c.cr4.osxsave() {
        return Err(c.ud());
    }
    c.supervisor_only()?;
    let value = c.get::<4>(slot::RAX) | c.get::<4>(slot::RDX) << 32;
    if c.get::<4>(slot::RCX) != 0 || !xcr0_is_sound(value) || value & !c.xsave.user != 0 {
        return Err(c.gp(0));
    }
    c.xcr0 = value;
    Ok(Go::Look(c.next_ip(o)))
}

/// x87 is always on; AVX needs SSE, and AVX-512, which is on or off as a whole, needs AVX. SDM Vol. 1 13.3 "Enabling the XSAVE
/// Feature Set and XSAVE-Enabled Features".
fn xcr0_is_sound(value: u64) -> bool {
    let needs = |what: u64, needed: u64| value & what == 0 || value & needed == needed;
    value & xstate::X87 != 0 && needs(xstate::AVX, xstate::SSE) && needs(xstate::AVX512, xstate::AVX | xstate::AVX512)
}

impl Cpu {
    /// What IA32_XSS takes.
    pub(crate) fn supervisor_components(&self) -> u64 {
        self.xsave.supervisor
    }

    /// CPUID leaf 0DH, where it follows from XCR0 and IA32_XSS: EBX of subleaf 0 and, with the compacted format, of subleaf 1.
    pub(crate) fn xsave_size(&self, subleaf: u32) -> Option<u32> {
        match subleaf {
            0 => Some(self.xsave.standard_size(self.xcr0)),
            1 if self.features.xsavec() => Some(self.xsave.compacted_size(self.xcr0 | self.msrs.xss)),
            _ => None,
        }
    }

    /// XINUSE of the components of XCR0: those that are not in their initial configuration.
    fn xinuse(&self) -> u64 {
        self.fpu.xinuse() | ((self.pkru != 0) as u64) << PKRU
    }

    /// The linear address of a part of the area; `imm` is the address size.
    fn part(&mut self, o: &Op, at: usize, len: usize, write: bool) -> Done<u64> {
        let offset = self.ea(o).wrapping_add(at as u64) & u64::MAX >> (64 - 8 * o.imm as u32);
        self.segmented(o.seg as usize, offset, len as u64, write)
    }

    /// The instruction may run on the area that is there.
    fn xsave_ready(&mut self, o: &Op, write: bool) -> Done {
        if !self.cr4.osxsave() {
            return Err(self.ud());
        }
        if o.aux & aux::SUPERVISOR != 0 {
            self.supervisor_only()?;
        }
        if self.cr0.ts() {
            return Err(self.fault(7, None));
        }
        // Alignment comes after the limit for the first bytes, and before that for the rest.
        self.part(o, 0, 4, write)?;
        let at = self.ea(o) & u64::MAX >> (64 - 8 * o.imm as u32);
        let segmented = !self.is64() || o.seg >= 4;
        let base = if segmented { self.seg[o.seg as usize].base } else { 0 };
        self.reach_canonical(o, base.wrapping_add(at), EXTENDED)?;
        self.aligned(base.wrapping_add(at), 64)?;
        self.part(o, 0, EXTENDED, write).map(|_| ())
    }

    /// Checks the area that `rfbm` asks for, whether or not all of it is used, in the order in which Intel's processors find
    /// faults: its last byte first.
    fn reach_area(&mut self, o: &Op, rfbm: u64, xcomp_bv: u64, write: bool) -> Done {
        let len = if xcomp_bv & COMPACTED != 0 {
            let (places, _) = self.xsave.places(xcomp_bv);
            let end = |i: u32| places[i as usize] + self.xsave.components[i as usize].size;
            bits(rfbm & xcomp_bv)
                .filter(|&i| i >= 2)
                .map(end)
                .fold(EXTENDED, usize::max)
        } else {
            self.xsave.standard_size(rfbm) as usize
        };
        let linear = self.part(o, 0, len, write)?;
        let access = if write { Access::Write } else { Access::Read };
        self.reach_last(o, linear, len, access)?;
        // Of the legacy region MXCSR, with whatever it belongs to, comes before the rest.
        let (there, shared) = if xcomp_bv & COMPACTED != 0 {
            (rfbm & xcomp_bv, xstate::SSE)
        } else {
            (rfbm, xstate::SSE | xstate::AVX)
        };
        if there & shared != 0 {
            return self.reach_first(o, linear.wrapping_add(24), 4, access);
        }
        if there & xstate::X87 != 0 {
            return self.reach_first(o, linear, 4, access);
        }
        Ok(())
    }

    /// What the instruction may save or load.
    fn enabled(&self, o: &Op) -> u64 {
        if o.aux & aux::SUPERVISOR != 0 {
            self.xcr0 | self.msrs.xss
        } else {
            self.xcr0
        }
    }

    /// RFBM: EDX:EAX as far as the components are enabled.
    fn requested(&self, o: &Op) -> u64 {
        (self.get::<4>(slot::RDX) << 32 | self.get::<4>(slot::RAX)) & self.enabled(o)
    }
}

/// XSAVE and its like. SDM Vol. 1 13.7 "Operation of XSAVE", 13.9 "Operation of XSAVEOPT", 13.10 "Operation of XSAVEC",
/// 13.11 "Operation of XSAVES".
fn save(c: &mut Cpu, o: &Op) -> Done {
    c.xsave_ready(o, true)?;
    let (long, compact) = (o.aux & aux::LONG != 0, o.aux & aux::COMPACT != 0);
    let rfbm = c.requested(o);
    let xcomp_bv = if compact { rfbm | COMPACTED } else { 0 };
    c.reach_area(o, rfbm, xcomp_bv, true)?;
    let (places, _) = c.xsave.places(xcomp_bv);
    let supervisor = rfbm & c.xsave.supervisor;
    if supervisor != 0 {
        c.units_change()?;
        // A save may switch off what it saves, so nothing may fault after it. "An execution of an instruction in the XSAVE
        // feature set may access any byte of any state component on which that execution operates" (SDM Vol. 1 13.13
        // "Memory Access by the XSAVE Feature Set").
        for i in bits(rfbm).filter(|&i| i >= 2) {
            let (at, size) = (places[i as usize], c.xsave.components[i as usize].size);
            let linear = c.part(o, at, size, true)?;
            c.probe_write(o, linear, size)?;
        }
    }
    let mut image = Image::new();
    let mut inuse = c.xinuse();
    for i in bits(supervisor) {
        let (at, size) = (places[i as usize], c.xsave.components[i as usize].size);
        let bytes = &mut image.bytes[at..at + size];
        let used = c.with_view(o, |bus, view| bus.save_component(i, bytes, o.len, view));
        inuse |= (used as u64) << i;
    }
    c.bus_used |= supervisor != 0;
    // In the compacted format MXCSR is a part of SSE state like the others.
    if compact && c.fpu.mxcsr != mxcsr::RESET {
        inuse |= xstate::SSE;
    }
    let written = if o.aux & aux::OPTIMISE != 0 { rfbm & inuse } else { rfbm };
    let legacy = c.fpu.fxsave(long, o.aux & aux::REX_W != 0);
    let registers = if long { 16 } else { 8 };
    if written & xstate::X87 != 0 {
        image.put(0, &legacy[..24]);
    }
    // In the standard one it belongs to SSE and AVX alike, and is always written.
    let shared = if compact {
        written & xstate::SSE
    } else {
        rfbm & (xstate::SSE | xstate::AVX)
    };
    if shared != 0 {
        image.put(24, &legacy[24..32]);
    }
    if written & xstate::X87 != 0 {
        image.put(32, &legacy[32..160]);
    }
    if written & xstate::SSE != 0 {
        image.put(160, &legacy[160..fxsave_len(long)]);
    }
    if compact {
        // The rest of the header stays as it is.
        image.bytes[HEADER..HEADER + 8].copy_from_slice(&(rfbm & inuse).to_le_bytes());
        image.bytes[HEADER + 8..HEADER + 16].copy_from_slice(&xcomp_bv.to_le_bytes());
        image.run(HEADER, 16);
    } else {
        let mut old = [0; 8];
        let linear = c.part(o, HEADER, old.len(), false)?;
        c.read_bytes(o, linear, &mut old)?;
        let bv = u64::from_le_bytes(old) & !rfbm | inuse & rfbm;
        image.put(HEADER, &bv.to_le_bytes());
    }
    for i in bits(written).filter(|&i| i >= 2) {
        let (at, size) = (places[i as usize], c.xsave.components[i as usize].size);
        match i {
            OPMASK => {
                for (n, k) in c.fpu.avx512.k.iter().enumerate() {
                    image.bytes[at + 8 * n..at + 8 * n + 8].copy_from_slice(&k.to_le_bytes());
                }
                image.run(at, size);
            }
            ZMM_HI256 => {
                for (n, quarter) in c.fpu.zmm_hi256(registers).flatten().enumerate() {
                    image.bytes[at + 16 * n..at + 16 * n + 16].copy_from_slice(&quarter.to_le_bytes());
                }
                image.run(at, 32 * registers);
            }
            HI16_ZMM if !long => {}
            HI16_ZMM => {
                for (n, quarter) in (16..32).flat_map(|n| c.fpu.zmm(n)).enumerate() {
                    image.bytes[at + 16 * n..at + 16 * n + 16].copy_from_slice(&quarter.to_le_bytes());
                }
                image.run(at, size);
            }
            2 => {
                for n in 0..registers {
                    image.bytes[at + 16 * n..at + 16 * n + 16].copy_from_slice(&c.fpu.ymm_hi[n].to_le_bytes());
                }
                image.run(at, 16 * registers);
            }
            PKRU => {
                image.bytes[at..at + 4].copy_from_slice(&c.pkru.to_le_bytes());
                image.run(at, size);
            }
            _ => image.run(at, size),
        }
    }
    image.write(c, o)
}

/// XRSTOR and XRSTORS. SDM Vol. 1 13.8 "Operation of XRSTOR", 13.12 "Operation of XRSTORS".
fn restore(c: &mut Cpu, o: &Op) -> Done {
    c.xsave_ready(o, false)?;
    let (long, rex_w) = (o.aux & aux::LONG != 0, o.aux & aux::REX_W != 0);
    let (rfbm, enabled) = (c.requested(o), c.enabled(o));
    if rfbm & c.xsave.supervisor != 0 {
        c.units_change()?;
    }
    let mut image = Image::new();
    image.run(HEADER + 8, 8);
    image.read(c, o)?;
    c.reach_area(o, rfbm, image.word(HEADER + 8), false)?;
    image.len = 0;
    image.run(HEADER, 64);
    image.read(c, o)?;
    let (bv, xcomp_bv) = (image.word(HEADER), image.word(HEADER + 8));
    let compact = xcomp_bv & COMPACTED != 0;
    let zero = |from: usize, to: usize| image.bytes[HEADER + from..HEADER + to].iter().all(|&b| b == 0);
    let sound = if compact {
        c.features.xsavec()
            && xcomp_bv & !COMPACTED & !enabled == 0
            && bv & !(xcomp_bv & !COMPACTED) == 0
            && zero(16, 64)
    } else {
        o.aux & aux::SUPERVISOR == 0 && bv & !c.xcr0 == 0 && zero(8, 24)
    };
    if !sound {
        return Err(c.gp(0));
    }
    let (places, _) = c.xsave.places(xcomp_bv);
    let loaded = rfbm & bv;
    let registers = if long { 16 } else { 8 };
    image.len = 0;
    if loaded & xstate::X87 != 0 {
        image.run(0, 24);
    }
    // The standard format has MXCSR whenever SSE or AVX is asked for; the compacted one as a part of SSE state.
    let shared = if compact {
        loaded & xstate::SSE
    } else {
        rfbm & (xstate::SSE | xstate::AVX)
    };
    if shared != 0 {
        image.run(24, 8);
    }
    if loaded & xstate::X87 != 0 {
        image.run(32, 128);
    }
    if loaded & xstate::SSE != 0 {
        image.run(160, 16 * registers);
    }
    for i in bits(loaded).filter(|&i| i >= 2) {
        let size = match i {
            2 => 16 * registers,
            ZMM_HI256 => 32 * registers,
            HI16_ZMM if !long => continue,
            _ => c.xsave.components[i as usize].size,
        };
        image.run(places[i as usize], size);
    }
    image.read(c, o)?;

    // What can refuse its image comes first.
    let control = if shared != 0 {
        image.word(24) as u32
    } else if compact && rfbm & xstate::SSE != 0 {
        mxcsr::RESET
    } else {
        c.fpu.mxcsr
    };
    let refused = control & !c.fpu.mxcsr_mask != 0;
    if refused && !compact {
        return Err(c.gp(0));
    }
    let supervisor = rfbm & c.xsave.supervisor;
    if !refused && supervisor != 0 {
        // Processor trace, the lowest, comes last: what refuses its image does so before tracing begins (SDM Vol. 1 13.5.6
        // "PT State").
        for i in (0..NUMBERS as u32).rev().filter(|&i| supervisor >> i & 1 != 0) {
            let (at, size) = (places[i as usize], c.xsave.components[i as usize].size);
            let state = (bv >> i & 1 != 0).then(|| &image.bytes[at..at + size]);
            let loaded = c.with_view(o, |bus, view| bus.load_component(i, state, o.len, view));
            if loaded.is_err() {
                return Err(c.gp(0));
            }
        }
        c.bus_used = true;
    }
    // What is not in the area is set to its initial configuration first.
    let initial = rfbm & !bv;
    if initial & xstate::X87 != 0 {
        c.fpu.fninit();
        c.fpu.r = [0; 8];
    }
    if initial & xstate::SSE != 0 {
        c.fpu.xmm[..registers].fill(0);
    }
    if initial & xstate::AVX != 0 {
        c.fpu.ymm_hi[..registers].fill(0);
    }
    if initial >> PKRU & 1 != 0 {
        c.set_pkru(0);
    }
    if loaded & xstate::X87 != 0 {
        c.fpu.load_x87(&image.bytes, rex_w);
    }
    if loaded & xstate::SSE != 0 {
        c.fpu.load_xmm(&image.bytes, long);
    }
    // In the compacted format MXCSR is looked at only here, so that Intel's processors have loaded part of the area by then.
    if let Err(BadImage) = c.fpu.ldmxcsr(control) {
        return Err(c.gp(0));
    }
    if loaded & xstate::AVX != 0 {
        for n in 0..registers {
            let at = places[2] + 16 * n;
            c.fpu.ymm_hi[n] = u128::from_le_bytes(core::array::from_fn(|k| image.bytes[at + k]));
        }
    }
    // Outside 64-bit mode ZMM16 to ZMM31 are neither saved nor loaded nor initialised. SDM Vol. 1 13.5.4 "AVX-512 State".
    let component = |i: u32| (loaded >> i & 1 != 0).then(|| &image.bytes[places[i as usize]..]);
    if rfbm & xstate::OPMASK != 0 {
        c.fpu.load_opmasks(component(OPMASK));
    }
    if rfbm & xstate::ZMM_HI256 != 0 {
        c.fpu.load_zmm_hi256(component(ZMM_HI256), registers);
    }
    if rfbm & xstate::HI16_ZMM != 0 && long {
        c.fpu.load_hi16_zmm(component(HI16_ZMM));
    }
    if loaded >> PKRU & 1 != 0 {
        let value = image.word(places[PKRU as usize]) as u32;
        c.set_pkru(value);
    }
    Ok(())
}

/// Whether the instruction belongs to this file.
pub(crate) fn handles(m: M) -> bool {
    matches!(
        m,
        M::Xsave
            | M::Xsave64
            | M::Xsaveopt
            | M::Xsaveopt64
            | M::Xsavec
            | M::Xsavec64
            | M::Xsaves
            | M::Xsaves64
            | M::Xrstor
            | M::Xrstor64
            | M::Xrstors
            | M::Xrstors64
            | M::Xgetbv
            | M::Xsetbv
    )
}

pub(crate) fn lower(l: &mut Lower) -> End {
    let (f, bits): (Handler, u16) = match l.i.mnemonic() {
        M::Xgetbv => {
            l.emit(chain::<Xgetbv>(), |_| ());
            return End::Open;
        }
        M::Xsetbv => return l.flow(chain_flow::<Xsetbv>(), |_| ()),
        M::Xsave | M::Xsave64 => (chain::<Xsave>(), 0),
        M::Xsaveopt | M::Xsaveopt64 => (chain::<Xsave>(), aux::OPTIMISE),
        M::Xsavec | M::Xsavec64 => (chain::<Xsave>(), aux::OPTIMISE | aux::COMPACT),
        M::Xsaves | M::Xsaves64 => (chain::<Xsave>(), aux::OPTIMISE | aux::COMPACT | aux::SUPERVISOR),
        M::Xrstor | M::Xrstor64 => (chain::<Xrstor>(), 0),
        _ => (chain::<Xrstor>(), aux::SUPERVISOR),
    };
    let rex_w = matches!(
        l.i.mnemonic(),
        M::Xsave64 | M::Xsaveopt64 | M::Xsavec64 | M::Xsaves64 | M::Xrstor64 | M::Xrstors64
    );
    let bits = bits | if l.is64() { aux::LONG } else { 0 } | if rex_w { aux::REX_W } else { 0 };
    // Parts of the area are found in the segment one by one.
    let (seg, size) = (l.segment(), l.address_size());
    let m = l.sum();
    l.emit_mem(f, m, |o| (o.seg, o.aux, o.imm) = (seg, bits, size as u64));
    End::Open
}
