//! Runs instructions on the engine, in a guest that looks to them like the host process does.
//!
//! The guest is a minimal 64-bit system: the arena's pages at their linear addresses, a GDT with Linux's selectors, and an IDT
//! whose handlers halt. A run starts in ring 3 and ends in the handler of whatever exception stopped it; vector, error code and
//! registers are then what the delivery left on the ring-0 stack, so the delivery is compared as well.

// `Engine::new` takes raw memory; the guest's RAM is mapped here and outlives the engine.
#![allow(unsafe_code)]

use std::sync::OnceLock;

use engine::bus::{Bus, MsrFault, Processor};
use engine::{Cpu, CpuState, Engine, EngineOptions, Exit, RamRegion, Segment, Table};
use x86::model::{ALDERLAKE, CpuModel, SAPPHIRERAPIDS};

use crate::arena::{AREAS, BASE, Memory, PAGE};
use crate::state::{Fpu, LDT, Outcome, State, USER32_CS, USER64_CS, Wide, pushes_error};

/// Guest RAM.
const RAM: u64 = 0x20_0000;
/// Linear address of guest-physical 0 in the kernel's half.
const KERNEL: u64 = 0xffff_ffff_8000_0000;
const PML4: u64 = 0;
const PDPT_LOW: u64 = 0x1000;
const PD_LOW: u64 = 0x2000;
const PT_LOW: u64 = 0x3000;
const PDPT_HIGH: u64 = 0x4000;
const PD_HIGH: u64 = 0x5000;
const GDT: u64 = 0x6000;
const IDT: u64 = 0x7000;
const TSS: u64 = 0x8000;
const LDT_AT: u64 = 0xd000;
/// One HLT for each vector, 16 bytes apart.
const HANDLERS: u64 = 0x9000;
const STACK_TOP: u64 = 0xc000;
/// Guest-physical address of the arena's start.
const ARENA: u64 = 0x10_0000;
const KERNEL_CS: u16 = 0x10;
/// Steps after which a case is given up: an endless loop.
const BUDGET: u64 = 4_000_000;

/// Linux's GDT of a 64-bit process.
const DESCRIPTORS: [u64; 8] = [
    0,
    0x00cf_9b00_0000_ffff,
    0x00af_9b00_0000_ffff,
    0x00cf_9300_0000_ffff,
    0x00cf_fb00_0000_ffff,
    0x00cf_f300_0000_ffff,
    0x00af_fb00_0000_ffff,
    0,
];

/// The part with the most instructions that a host of today may have, without those that this one lacks.
pub fn model() -> &'static CpuModel {
    static MODEL: OnceLock<&CpuModel> = OnceLock::new();
    MODEL.get_or_init(|| {
        let missing: Vec<&str> = crate::forms::BORROWED
            .iter()
            .filter(|(_, present, _)| !present())
            .map(|(toggle, ..)| *toggle)
            .collect();
        if missing.is_empty() {
            return &ALDERLAKE;
        }
        ALDERLAKE
            .with_toggles(&missing.join(","))
            .expect("toggles of known features")
    })
}

/// The part with AVX-512, in the same way.
pub fn wide_model() -> &'static CpuModel {
    static MODEL: OnceLock<&CpuModel> = OnceLock::new();
    MODEL.get_or_init(|| {
        let missing: Vec<&str> = crate::forms::BORROWED
            .iter()
            .chain(crate::forms::WIDE)
            .filter(|(_, present, _)| !present())
            .map(|(toggle, ..)| *toggle)
            .collect();
        if missing.is_empty() {
            return &SAPPHIRERAPIDS;
        }
        SAPPHIRERAPIDS
            .with_toggles(&missing.join(","))
            .expect("toggles of known features")
    })
}

/// No device at all.
struct NoBus(&'static CpuModel);

impl Bus for NoBus {
    fn read(&mut self, _gpa: u64, size: u8, _now: u64) -> u64 {
        u64::MAX >> (64 - 8 * u32::from(size))
    }
    fn write(&mut self, _gpa: u64, _size: u8, _value: u64, _now: u64) {}
    fn port_read(&mut self, _port: u16, _size: u8, _now: u64) -> u32 {
        u32::MAX
    }
    fn port_write(&mut self, _port: u16, _size: u8, _value: u32, _now: u64) {}
    fn read_msr(&mut self, _msr: u32, _: &mut dyn Processor) -> Result<u64, MsrFault> {
        Err(MsrFault::GeneralProtection)
    }
    fn write_msr(&mut self, _msr: u32, _value: u64, _: &mut dyn Processor) -> Result<(), MsrFault> {
        Err(MsrFault::GeneralProtection)
    }
    fn cpuid(&mut self, leaf: u32, subleaf: u32) -> [u32; 4] {
        self.0.cpuid(leaf, subleaf)
    }
    fn tsc(&mut self, now: u64) -> u64 {
        now
    }
    fn cr8(&mut self) -> u64 {
        0
    }
    fn set_cr8(&mut self, _value: u64) {}
    fn random(&mut self) -> u64 {
        0
    }
}

/// Guest RAM, mapped for as long as it lives.
struct Ram(*mut u8);

impl Ram {
    fn new() -> Ram {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        let rights = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a new mapping that nobody else knows.
        let base = unsafe { libc::mmap(std::ptr::null_mut(), RAM as usize, rights, flags, -1, 0) };
        assert_ne!(base, libc::MAP_FAILED, "guest RAM");
        Ram(base.cast())
    }

    fn bytes(&self, gpa: u64, len: u64) -> &[u8] {
        assert!(gpa + len <= RAM);
        // SAFETY: inside the mapping; the engine writes to it only while `Guest::run` borrows everything.
        unsafe { std::slice::from_raw_parts(self.0.add(gpa as usize), len as usize) }
    }

    fn bytes_mut(&mut self, gpa: u64, len: u64) -> &mut [u8] {
        assert!(gpa + len <= RAM);
        // SAFETY: as above.
        unsafe { std::slice::from_raw_parts_mut(self.0.add(gpa as usize), len as usize) }
    }

    fn put(&mut self, gpa: u64, value: u64) {
        self.bytes_mut(gpa, 8).copy_from_slice(&value.to_le_bytes());
    }

    fn get(&self, gpa: u64) -> u64 {
        let mut bytes = [0; 8];
        bytes.copy_from_slice(self.bytes(gpa, 8));
        u64::from_le_bytes(bytes)
    }
}

impl Drop for Ram {
    fn drop(&mut self) {
        // SAFETY: the engine that used it is dropped before (field order in `Guest`).
        unsafe { libc::munmap(self.0.cast(), RAM as usize) };
    }
}

/// The engine as a machine that runs code in the arena.
pub struct Guest {
    engine: Engine,
    cpu: Box<Cpu>,
    template: CpuState,
    ram: Ram,
    model: &'static CpuModel,
}

impl Guest {
    /// A guest whose undefined results and vector instructions are the engine's own or the host's.
    pub fn new(options: EngineOptions, model: &'static CpuModel) -> Guest {
        let mut ram = Ram::new();
        page_tables(&mut ram);
        let template = system(&mut ram, model);
        let region = RamRegion {
            gpa: 0,
            host: ram.0,
            len: RAM,
        };
        // SAFETY: the mapping lives until after the engine is dropped, and slices of it are only made between runs.
        let engine = unsafe {
            Engine::new(
                vec![region],
                model,
                EngineOptions {
                    // As in `rig`.
                    translate_after: (!cfg!(feature = "plain-loop")).then_some(1),
                    ..options
                },
            )
        };
        let engine = engine.expect("the host runs everything the model has");
        Guest {
            engine,
            cpu: Cpu::new(model),
            template,
            ram,
            model,
        }
    }

    /// Bytes of the arena were changed from outside.
    pub fn written(&mut self, address: u64, len: u64) {
        self.engine.written(address - BASE + ARENA, len);
    }

    /// Runs from `state` to the next exception.
    ///
    /// # Errors
    /// What the engine did instead of delivering an exception.
    pub fn run(&mut self, state: &State) -> Result<Outcome, String> {
        let mut cpu = self.template.clone();
        cpu.gpr = state.gpr;
        cpu.rip = state.rip;
        cpu.rflags = state.rflags.into();
        cpu.segments[engine::CS] = code_segment(state.cs);
        cpu.segments[engine::SS] = data_segment(state.ss);
        cpu.segments[engine::ES] = data_segment(state.es_ds[0]);
        cpu.segments[engine::DS] = data_segment(state.es_ds[1]);
        cpu.segments[engine::FS] = Segment {
            base: state.fs_base,
            ..Segment::default()
        };
        cpu.segments[engine::GS] = Segment {
            base: state.gs_base,
            ..Segment::default()
        };
        to_engine(&state.fpu, &mut cpu);
        self.cpu.set_state(&cpu);
        let exit = self.engine.run(&mut self.cpu, &mut NoBus(self.model), BUDGET);
        let after = self.cpu.state();
        if exit != Exit::Halt {
            return Err(format!(
                "{exit:?} at {:x}:{:#x}",
                after.segments[engine::CS].selector,
                after.rip
            ));
        }
        let at = after.rip.wrapping_sub(KERNEL + HANDLERS + 1);
        if !at.is_multiple_of(16) || at >= 16 * 256 || after.segments[engine::CS].selector != KERNEL_CS {
            return Err(format!("halted at {:#x}, which is no handler", after.rip));
        }
        let vector = (at / 16) as u8;
        let words = if pushes_error(vector) { 6 } else { 5 };
        if after.gpr[4] != KERNEL + STACK_TOP - 8 * words {
            return Err(format!("vector {vector} left RSP at {:#x}", after.gpr[4]));
        }
        let frame = |n: u64| self.ram.get(STACK_TOP - 8 * n);
        let mut state = State {
            gpr: after.gpr,
            rip: frame(5),
            rflags: frame(3),
            cs: frame(4) as u16,
            ss: frame(1) as u16,
            es_ds: [after.segments[engine::ES].selector, after.segments[engine::DS].selector],
            fs_base: after.segments[engine::FS].base,
            gs_base: after.segments[engine::GS].base,
            fpu: from_engine(&after),
        };
        state.gpr[4] = frame(2);
        let error = if words == 6 { frame(6) as u32 } else { 0 };
        Ok(Outcome {
            vector,
            error,
            cr2: if vector == 14 { after.cr2 } else { 0 },
            state,
        })
    }
}

impl Memory for Guest {
    fn area(&self, index: usize) -> &[u8] {
        let area = &AREAS[index];
        self.ram.bytes(area.start - BASE + ARENA, area.len)
    }

    fn area_mut(&mut self, index: usize) -> &mut [u8] {
        let area = &AREAS[index];
        self.ram.bytes_mut(area.start - BASE + ARENA, area.len)
    }
}

/// Maps the arena for ring 3 where the host has it, and the first 2 MiB for ring 0 in the kernel's half.
fn page_tables(ram: &mut Ram) {
    const P: u64 = 1;
    const W: u64 = 2;
    const U: u64 = 4;
    const PS: u64 = 1 << 7;
    const NX: u64 = 1 << 63;
    ram.put(PML4, PDPT_LOW | P | W | U);
    ram.put(PDPT_LOW, PD_LOW | P | W | U);
    ram.put(PD_LOW + 8 * (BASE >> 21), PT_LOW | P | W | U);
    for area in AREAS {
        for page in (area.start..area.start + area.len).step_by(PAGE as usize) {
            let mut entry = (page - BASE + ARENA) | P | U;
            if area.writable {
                entry |= W;
            }
            if !area.executable {
                entry |= NX;
            }
            ram.put(PT_LOW + 8 * (page >> 12 & 0x1ff), entry);
        }
    }
    ram.put(PML4 + 8 * 511, PDPT_HIGH | P | W);
    ram.put(PDPT_HIGH + 8 * 510, PD_HIGH | P | W);
    ram.put(PD_HIGH, P | W | PS);
}

/// Fills in GDT, IDT, TSS and handlers; answers the CPU state that goes with them, in ring 3.
fn system(ram: &mut Ram, model: &'static CpuModel) -> CpuState {
    for (i, descriptor) in DESCRIPTORS.iter().enumerate() {
        ram.put(GDT + 8 * i as u64, *descriptor);
    }
    let tss = KERNEL + TSS;
    ram.put(
        GDT + 0x40,
        0x0000_8b00_0000_0067 | (tss & 0xff_ffff) << 16 | (tss & 0xff00_0000) << 32,
    );
    ram.put(GDT + 0x48, tss >> 32);
    let table = KERNEL + LDT_AT;
    let limit = 8 * LDT.len() as u64 - 1;
    ram.put(
        GDT + 0x50,
        0x0000_8200_0000_0000 | limit | (table & 0xff_ffff) << 16 | (table & 0xff00_0000) << 32,
    );
    ram.put(GDT + 0x58, table >> 32);
    for (i, row) in LDT.iter().enumerate() {
        ram.put(LDT_AT + 8 * i as u64, row.bits());
    }
    ram.put(TSS + 4, KERNEL + STACK_TOP);
    // No I/O permission bitmap: its base is beyond the limit.
    ram.bytes_mut(TSS + 0x66, 2).copy_from_slice(&[0x68, 0]);
    for vector in 0..256 {
        let handler = KERNEL + HANDLERS + 16 * vector;
        // INT3 and INTO may be used in ring 3.
        let rights = if matches!(vector, 3 | 4) { 0xee00 } else { 0x8e00 };
        ram.put(
            IDT + 16 * vector,
            handler & 0xffff | u64::from(KERNEL_CS) << 16 | rights << 32 | (handler & 0xffff_0000) << 32,
        );
        ram.put(IDT + 16 * vector + 8, handler >> 32);
        // hlt; jmp $-1
        ram.bytes_mut(HANDLERS + 16 * vector, 3)
            .copy_from_slice(&[0xf4, 0xeb, 0xfd]);
    }
    let mut cpu = Cpu::new(model).state();
    // PE MP ET NE WP AM PG; PAE PGE OSFXSR OSXMMEXCPT; SCE LME LMA NXE.
    cpu.cr0 = 0x8005_0033.into();
    cpu.cr3 = PML4;
    cpu.cr4 = 0x06a0.into();
    if model.features().avx() {
        // OSXSAVE; x87, SSE and AVX.
        cpu.cr4.set_osxsave(true);
        cpu.xcr0 = 7;
    }
    if model.features().avx512f() {
        cpu.xcr0 |= 7 << 5;
    }
    cpu.efer = 0xd01.into();
    cpu.cpl = 3;
    cpu.gdtr = Table {
        base: KERNEL + GDT,
        limit: 0x7f,
    };
    cpu.idtr = Table {
        base: KERNEL + IDT,
        limit: 0xfff,
    };
    cpu.tr = Segment {
        selector: 0x40,
        base: tss,
        limit: 0x67,
        attributes: 0x008b,
    };
    cpu.ldtr = Segment {
        selector: 0x50,
        base: table,
        limit: limit as u32,
        attributes: 0x0082,
    };
    cpu
}

fn code_segment(selector: u16) -> Segment {
    let attributes = match selector {
        USER64_CS => 0xa0fb,
        USER32_CS => 0xc0fb,
        _ => return ldt_segment(selector),
    };
    Segment {
        selector,
        base: 0,
        limit: u32::MAX,
        attributes,
    }
}

fn data_segment(selector: u16) -> Segment {
    match selector {
        0..4 => Segment {
            selector,
            ..Segment::default()
        },
        _ if selector & 4 != 0 => ldt_segment(selector),
        _ => Segment {
            selector,
            base: 0,
            limit: u32::MAX,
            attributes: 0xc0f3,
        },
    }
}

fn ldt_segment(selector: u16) -> Segment {
    let row = &LDT[usize::from(selector >> 3)];
    let bits = row.bits();
    let attributes = (bits >> 40 & 0xff | (bits >> 52 & 0xf) << 12) as u16;
    Segment {
        selector,
        base: u64::from(row.base),
        limit: u32::from(row.limit),
        attributes,
    }
}

/// The engine keeps the x87 registers in physical order, FXSAVE in stack order.
fn to_engine(fpu: &Fpu, cpu: &mut CpuState) {
    let to = &mut cpu.fpu;
    to.cw = fpu.fcw;
    to.sw = fpu.fsw;
    to.tag = fpu.ftw;
    to.mxcsr = fpu.mxcsr;
    to.xmm = fpu.xmm;
    to.ymm_hi = fpu.ymm_hi;
    for n in 0..32 {
        to.set_zmm(n, fpu.register(n));
    }
    to.avx512.k = fpu.wide.k;
    let top = usize::from(fpu.fsw >> 11 & 7);
    for (i, (significand, high)) in fpu.st.iter().enumerate() {
        to.r[(top + i) & 7] = u128::from(*high) << 64 | u128::from(*significand);
    }
}

fn from_engine(cpu: &CpuState) -> Fpu {
    let from = &cpu.fpu;
    let top = usize::from(from.sw >> 11 & 7);
    let mut fpu = Fpu {
        fcw: from.cw,
        fsw: from.sw,
        ftw: from.tag,
        mxcsr: from.mxcsr,
        st: [(0, 0); 8],
        xmm: from.xmm,
        ymm_hi: from.ymm_hi,
        wide: Wide {
            k: from.avx512.k,
            ..Wide::INIT
        },
    };
    for n in 0..32 {
        fpu.set_register(n, from.zmm(n));
    }
    for (i, st) in fpu.st.iter_mut().enumerate() {
        let value = from.r[(top + i) & 7];
        *st = (value as u64, (value >> 64) as u16);
    }
    fpu
}
