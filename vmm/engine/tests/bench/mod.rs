//! A test machine with descriptor tables, a TSS and a HLT for each vector, so that a test can ask which exception came.
#![allow(dead_code)] // Not every test uses every verb.

use std::ops::{Deref, DerefMut};

use std::collections::BTreeMap;

use engine::bus::{Bus, MsrFault, Processor, Watch};
use engine::{CS, CpuState, DS, ES, Exit, SS, Segment, Table, Vectors};
use iced_x86::IcedError;
use iced_x86::code_asm::CodeAssembler;
use x86::model::{CpuModel, CpuidRow};

use crate::rig::{CODE, Rig, STACK};

pub const GDT: u64 = 0x3000;
pub const IDT: u64 = 0x4000;
pub const TSS: u64 = 0x5000;
pub const LDT: u64 = 0x5800;
pub const HANDLERS: u64 = 0x6000;
pub const KERNEL_STACK: u64 = 0x2f_0000;

// Selectors, in the order that SYSCALL and SYSENTER ask for.
pub const KCODE: u16 = 0x08;
pub const KDATA: u16 = 0x10;
pub const UCODE32: u16 = 0x18;
pub const UDATA: u16 = 0x20;
pub const UCODE: u16 = 0x28;
pub const KCODE32: u16 = 0x30;
pub const KCODE16: u16 = 0x38;
pub const KDATA16: u16 = 0x40;
pub const TR: u16 = 0x50;
pub const LDTR: u16 = 0x60;
/// First selector that tests may fill as they like.
pub const FREE: u16 = 0x80;

/// Where the handler of a vector begins.
pub fn handler(vector: u8) -> u64 {
    HANDLERS + vector as u64 * 32
}

/// A segment descriptor from base, limit and attributes (as in `Segment`, G applied by the caller).
pub fn descriptor(base: u32, limit: u32, attributes: u16) -> u64 {
    let raw = if attributes & 0x8000 != 0 { limit >> 12 } else { limit } as u64;
    let base = base as u64;
    raw & 0xffff
        | (base & 0xff_ffff) << 16
        | (attributes as u64 & 0xf0ff) << 40
        | (raw >> 16 & 0xf) << 48
        | (base >> 24) << 56
}

/// A gate descriptor's low eight bytes.
pub fn gate(selector: u16, offset: u64, kind: u8, dpl: u8, low: u8) -> u64 {
    offset & 0xffff
        | (selector as u64) << 16
        | (low as u64) << 32
        | (0x80 | (dpl as u64) << 5 | kind as u64) << 40
        | (offset >> 16 & 0xffff) << 48
}

/// What arrived at a handler.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Trap {
    pub vector: u8,
    pub error: Option<u32>,
    pub rip: u64,
    pub cs: u16,
    pub flags: u64,
    pub rsp: u64,
    pub ss: u16,
}

/// What the time-stamp counter starts at.
pub const TSC: u64 = 0x1_0000_0000;

/// What is around the processor: it remembers what reached it.
pub struct World {
    pub model: &'static CpuModel,
    /// Port writes, `(port, size, value)`.
    pub out: Vec<(u16, u8, u32)>,
    /// Port reads, `(port, size)`; each answers one more than the last.
    pub input: Vec<(u16, u8)>,
    pub msrs: BTreeMap<u32, u64>,
    pub cr8: u64,
    /// The units.
    pub watch: Option<Box<dyn Watch>>,
    /// Performance-monitoring interrupts that they asked for.
    pub pmis: u32,
    /// Ticks of the time-stamp counter that were no steps.
    pub skew: u64,

    /// Supervisor state components that units would hold: in use if they are here.
    pub components: BTreeMap<u32, Vec<u8>>,
}

impl Bus for World {
    fn read(&mut self, _: u64, _: u8, _: u64) -> u64 {
        u64::MAX
    }
    fn write(&mut self, _: u64, _: u8, _: u64, _: u64) {}
    fn port_read(&mut self, port: u16, size: u8, _: u64) -> u32 {
        self.input.push((port, size));
        0x4433_2210 + self.input.len() as u32
    }
    fn port_write(&mut self, port: u16, size: u8, value: u32, _: u64) {
        self.out.push((port, size, value));
    }
    fn read_msr(&mut self, msr: u32, _: &mut dyn Processor) -> Result<u64, MsrFault> {
        self.msrs.get(&msr).copied().ok_or(MsrFault::Unclaimed)
    }
    fn write_msr(&mut self, msr: u32, value: u64, _: &mut dyn Processor) -> Result<(), MsrFault> {
        match self.msrs.get_mut(&msr) {
            Some(_) if value == u64::MAX => Err(MsrFault::GeneralProtection),
            Some(v) => {
                *v = value;
                Ok(())
            }
            None => Err(MsrFault::Unclaimed),
        }
    }
    fn cpuid(&mut self, leaf: u32, subleaf: u32) -> [u32; 4] {
        self.model.cpuid(leaf, subleaf)
    }
    fn tsc(&mut self, now: u64) -> u64 {
        TSC + self.skew + now
    }
    fn cr8(&mut self) -> u64 {
        self.cr8
    }
    fn set_cr8(&mut self, value: u64) {
        self.cr8 = value;
    }
    fn user_wait_control(&mut self) -> u64 {
        self.msrs.get(&x86::msr::IA32_UMWAIT_CONTROL).copied().unwrap_or(0)
    }
    fn watch(&mut self) -> Option<&mut dyn Watch> {
        self.watch.as_mut().map(|watch| &mut **watch as &mut dyn Watch)
    }
    fn pmi(&mut self) {
        self.pmis += 1;
    }
    fn random(&mut self) -> u64 {
        0x0123_4567_89ab_cdef
    }
    fn save_component(&mut self, component: u32, image: &mut [u8], _: u8, _: &mut dyn Processor) -> bool {
        match self.components.get(&component) {
            Some(state) => {
                image[..state.len()].copy_from_slice(state);
                true
            }
            None => false,
        }
    }
    fn load_component(
        &mut self,
        component: u32,
        image: Option<&[u8]>,
        _: u8,
        _: &mut dyn Processor,
    ) -> Result<(), MsrFault> {
        match image {
            Some([0xff, ..]) => Err(MsrFault::GeneralProtection),
            Some(image) => {
                self.components.insert(component, image.to_vec());
                Ok(())
            }
            None => {
                self.components.remove(&component);
                Ok(())
            }
        }
    }
}

/// A processor that shows everything the engine can do, most of which no model shows yet.
pub static EVERYTHING: CpuModel = CpuModel {
    name: "everything",
    description: "every feature of the engine",
    tsc_khz: 1_000_000,
    apic_timer_khz: 1_000_000,
    microcode: 0,
    cpuid: &[
        row(0, None, [0xd, 0, 0, 0]),
        // All of leaf 1 but VMX, SMX, PDCM, FMA, AVX, F16C, DS and what goes with them.
        row(1, None, [0x306c3, 0, 0x4efa_220b, 0x0f8b_fbff]),
        // FSGSBASE, SMEP, INVPCID, SMAP, RDSEED, CLFLUSHOPT; UMIP, PKU, RDPID, PKS.
        row(7, Some(0), [0, 0x0094_0481, 0x8040_000c, 0]),
        row(0xd, Some(0), [7, 0, 0x340, 0]),
        row(0xd, Some(1), [0, 0, 0, 0]),
        row(0xd, Some(2), [0x100, 0x240, 0, 0]),
        row(0x8000_0000, None, [0x8000_0008, 0, 0, 0]),
        row(0x8000_0001, None, [0, 0, 0x21, 0x2c10_0800]),
        row(0x8000_0008, None, [0x3028, 0, 0, 0]),
    ],
    msrs: &[],
    ..x86::model::WESTMERE
};

const fn row(leaf: u32, subleaf: Option<u32>, regs: [u32; 4]) -> CpuidRow {
    CpuidRow { leaf, subleaf, regs }
}

pub struct Bench {
    rig: Rig,
    bits: u32,
    pub world: World,
}

fn world(model: &'static CpuModel) -> World {
    World {
        model,
        out: Vec::new(),
        input: Vec::new(),
        msrs: BTreeMap::new(),
        cr8: 0,
        watch: None,
        pmis: 0,
        skew: 0,

        components: BTreeMap::new(),
    }
}

impl Deref for Bench {
    type Target = Rig;
    fn deref(&self) -> &Rig {
        &self.rig
    }
}

impl DerefMut for Bench {
    fn deref_mut(&mut self) -> &mut Rig {
        &mut self.rig
    }
}

impl Bench {
    /// 64-bit mode at CPL 0.
    pub fn long() -> Bench {
        Bench::long_with(&EVERYTHING)
    }

    pub fn long_with(model: &'static CpuModel) -> Bench {
        Bench::long_by(model, Vectors::default())
    }

    /// The same with vector instructions executed in one of the ways.
    pub fn long_by(model: &'static CpuModel, vectors: Vectors) -> Bench {
        let mut b = Bench {
            rig: Rig::by(model, vectors),
            bits: 64,
            world: world(model),
        };
        b.tables();
        for v in 0..=255u8 {
            b.gate64(v, KCODE, handler(v), 14, 0, 0);
        }
        b.tss64();
        b
    }

    fn tss64(&mut self) {
        self.put(GDT + TR as u64, descriptor(TSS as u32, 0x67, 0x8b));
        self.put(TSS + 4, KERNEL_STACK);
        self.write(TSS + 0x66, &0x68u16.to_le_bytes());
        self.state(|s| {
            s.tr = Segment {
                selector: TR,
                base: TSS,
                limit: 0x67,
                attributes: 0x8b,
            }
        });
    }

    /// 32-bit protected mode at CPL 0, no paging.
    pub fn protected() -> Bench {
        Bench::protected_with(&EVERYTHING)
    }

    pub fn protected_with(model: &'static CpuModel) -> Bench {
        Bench::protected_by(model, Vectors::default())
    }

    /// The same with vector instructions executed in one of the ways.
    pub fn protected_by(model: &'static CpuModel, vectors: Vectors) -> Bench {
        let mut b = Bench {
            rig: Rig::by(model, vectors),
            bits: 32,
            world: world(model),
        };
        b.tables();
        for v in 0..=255u8 {
            b.put(IDT + v as u64 * 8, gate(KCODE32, handler(v), 14, 0, 0));
        }
        b.put(TSS + 4, KERNEL_STACK | (KDATA as u64) << 32);
        b.state(|s| {
            s.cr0 = 0x11.into();
            s.cr4 = 0.into();
            s.efer = 0.into();
            s.tr = Segment {
                selector: TR,
                base: TSS,
                limit: 0x67,
                attributes: 0x8b,
            };
            s.segments[CS] = Segment {
                selector: KCODE32,
                base: 0,
                limit: u32::MAX,
                attributes: 0xc09b,
            };
        });
        b
    }

    /// Real-address mode; code at `CODE & 0xffff` of segment `CODE >> 4`.
    pub fn real() -> Bench {
        Bench::real_with(&EVERYTHING)
    }

    pub fn real_with(model: &'static CpuModel) -> Bench {
        let mut b = Bench {
            rig: Rig::with(model),
            bits: 16,
            world: world(model),
        };
        for v in 0..=255u64 {
            b.write(v * 4, &((HANDLERS + v * 32) as u32).to_le_bytes());
            b.write(handler(v as u8), &[0xf4]);
        }
        let mut s = CpuState::reset(model);
        s.segments = [Segment::real(0); 6];
        s.segments[CS] = Segment {
            attributes: 0x9b,
            ..Segment::real(0x1000)
        };
        s.rip = 0;
        s.gpr[4] = 0x8000;
        s.idtr = Table { base: 0, limit: 0x3ff };
        b.cpu.set_state(&s);
        b
    }

    fn tables(&mut self) {
        for (selector, d) in [
            (KCODE, descriptor(0, u32::MAX, 0xa09b)),
            (KDATA, descriptor(0, u32::MAX, 0xc093)),
            (UCODE32, descriptor(0, u32::MAX, 0xc0fb)),
            (UDATA, descriptor(0, u32::MAX, 0xc0f3)),
            (UCODE, descriptor(0, u32::MAX, 0xa0fb)),
            (KCODE32, descriptor(0, u32::MAX, 0xc09b)),
            (KCODE16, descriptor(0, 0xffff, 0x009b)),
            (KDATA16, descriptor(0, 0xffff, 0x0093)),
        ] {
            self.put(GDT + selector as u64, d);
        }
        for v in 0..=255u8 {
            self.write(handler(v), &[0xf4]);
        }
        self.state(|s| {
            s.gdtr = Table {
                base: GDT,
                limit: 0x7ff,
            };
            s.idtr = Table {
                base: IDT,
                limit: 0xfff,
            };
            s.segments[CS].selector = KCODE;
            for i in [SS, DS, ES] {
                s.segments[i].selector = KDATA;
            }
        });
    }

    pub fn gate64(&mut self, vector: u8, selector: u16, offset: u64, kind: u8, dpl: u8, ist: u8) {
        self.put(IDT + vector as u64 * 16, gate(selector, offset, kind, dpl, ist));
        self.put(IDT + vector as u64 * 16 + 8, offset >> 32);
    }

    /// Changes the processor's state.
    pub fn state(&mut self, f: impl FnOnce(&mut CpuState)) {
        let mut s = self.cpu.state();
        f(&mut s);
        self.cpu.set_state(&s);
    }

    /// Goes on at CPL 3.
    pub fn user(&mut self) {
        let code = if self.bits == 64 {
            (UCODE, 0xa0fb)
        } else {
            (UCODE32, 0xc0fb)
        };
        self.state(|s| {
            s.cpl = 3;
            s.segments[CS].selector = code.0 | 3;
            s.segments[CS].attributes = code.1;
            for i in [SS, DS, ES] {
                s.segments[i].selector = UDATA | 3;
                s.segments[i].attributes = 0xc0f3;
            }
        });
    }

    /// Writes 8 bytes.
    pub fn put(&mut self, gpa: u64, value: u64) {
        self.write(gpa, &value.to_le_bytes());
    }

    /// Assembles code at an address for the machine's mode.
    pub fn at(&mut self, gpa: u64, f: impl FnOnce(&mut CodeAssembler) -> Result<(), IcedError>) {
        let mut a = CodeAssembler::new(self.bits).unwrap();
        f(&mut a).unwrap();
        let bytes = a.assemble(gpa).unwrap();
        self.write(gpa, &bytes);
    }

    /// Assembles code where RIP is.
    pub fn code(&mut self, f: impl FnOnce(&mut CodeAssembler) -> Result<(), IcedError>) {
        let s = self.cpu.state();
        self.at(s.segments[CS].base + s.rip, f);
    }

    /// Sets an MSR by the instruction, at CPL 0.
    pub fn msr(&mut self, msr: u32, value: u64) {
        let before = self.cpu.state();
        let at = CODE + 0xf00;
        self.write(at, &[0x0f, 0x30]);
        self.state(|s| {
            s.rip = at;
            (s.gpr[0], s.gpr[1], s.gpr[2]) = (value & 0xffff_ffff, msr as u64, value >> 32);
        });
        self.run(1);
        assert_eq!(self.cpu.rip(), at + 2, "WRMSR {msr:x} faulted");
        self.state(|s| {
            s.rip = before.rip;
            s.gpr = before.gpr;
        });
    }

    /// Runs for so many steps.
    pub fn run(&mut self, budget: u64) -> Exit {
        let Bench { rig, world, .. } = self;
        rig.engine.run(&mut rig.cpu, world, budget)
    }

    /// The rig and what is around its processor, each for itself.
    pub fn parts(&mut self) -> (&mut Rig, &mut World) {
        (&mut self.rig, &mut self.world)
    }

    /// Delivers an external interrupt.
    pub fn interrupt(&mut self, vector: u8) {
        let Bench { rig, world, .. } = self;
        rig.engine.interrupt(&mut rig.cpu, world, vector);
    }

    /// Delivers a non-maskable interrupt.
    pub fn nmi(&mut self) {
        let Bench { rig, world, .. } = self;
        rig.engine.nmi(&mut rig.cpu, world);
    }

    /// Runs one instruction from fresh code: whether it went through, and the exception if not.
    pub fn one(
        &mut self,
        f: impl FnOnce(&mut CodeAssembler) -> Result<(), IcedError>,
    ) -> Result<(), (u8, Option<u32>)> {
        self.state(|s| s.activity = engine::Activity::Running);
        self.code(f);
        let before = self.cpu.state();
        let exit = self.run(1);
        let after = self.cpu.state();
        let handlers = HANDLERS..HANDLERS + 256 * 32;
        if handlers.contains(&after.rip) && matches!(exit, Exit::Budget | Exit::Halt) && after.steps == before.steps + 1
        {
            // One step was left for the handler's HLT: the instruction itself did not retire.
            if exit == Exit::Halt {
                let t = self.arrived();
                assert_eq!(t.rip, before.rip, "the frame holds the faulting instruction: {t:x?}");
                return Err((t.vector, t.error));
            }
        }
        assert_eq!(after.activity, engine::Activity::Running, "{after:x?}");
        Ok(())
    }

    /// Puts state and memory that instructions changed back.
    pub fn again(&mut self, s: &CpuState) {
        self.cpu.set_state(s);
    }

    /// Runs until a handler's HLT and says what arrived there.
    pub fn trap(&mut self) -> Trap {
        let exit = self.run(10_000);
        assert_eq!(exit, Exit::Halt, "{:x?}", self.cpu.state());
        self.arrived()
    }

    /// What arrived at the handler whose HLT the processor is in.
    pub fn arrived(&self) -> Trap {
        let s = self.cpu.state();
        let at = s.rip - 1 - HANDLERS;
        assert!(at < 256 * 32 && at.is_multiple_of(32), "HLT at {:x}", s.rip - 1);
        let vector = (at / 32) as u8;
        let has_error = matches!(vector, 8 | 10..=14 | 17) && self.bits != 16;
        let sp = s.segments[SS].base
            + if self.bits == 64 {
                s.gpr[4]
            } else {
                s.gpr[4] & 0xffff_ffff
            };
        let size = self.bits as u64 / 8;
        let item = |n: u64| -> u64 {
            let bytes = self.read::<8>(sp + n * size);
            u64::from_le_bytes(bytes) & (u64::MAX >> (64 - self.bits))
        };
        let n = has_error as u64;
        let outer = self.bits == 64 || item(n + 1) as u8 & 3 > s.cpl;
        Trap {
            vector,
            error: has_error.then(|| item(0) as u32),
            rip: item(n),
            cs: item(n + 1) as u16,
            flags: item(n + 2),
            rsp: if outer { item(n + 3) } else { 0 },
            ss: if outer { item(n + 4) as u16 } else { 0 },
        }
    }

    /// Runs one instruction that must raise an exception: its vector and error code.
    pub fn faults(&mut self) -> (u8, Option<u32>) {
        let before = self.cpu.state();
        let t = self.trap();
        assert_eq!(t.rip, before.rip, "the frame holds the faulting instruction: {t:x?}");
        (t.vector, t.error)
    }
}

/// Stack and code of the rig under names that read well in tests.
pub const TOP: u64 = STACK;
