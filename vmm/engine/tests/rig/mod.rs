//! A machine small enough for a test: RAM, one processor in 64-bit mode with identity paging, a bus that answers nothing.
#![allow(unsafe_code, dead_code)] // Handing RAM to the engine takes its promise; not every test uses every verb.

use engine::bus::{Bus, MsrFault, Processor};
use engine::{CS, Cpu, CpuState, DS, ES, Engine, EngineOptions, Exit, RamRegion, SS, Segment, Vectors};
use x86::model::{CpuModel, WESTMERE};

/// A bus with nothing on it.
pub struct Nothing;

impl Bus for Nothing {
    fn read(&mut self, _: u64, _: u8, _: u64) -> u64 {
        u64::MAX
    }
    fn write(&mut self, _: u64, _: u8, _: u64, _: u64) {}
    fn port_read(&mut self, _: u16, _: u8, _: u64) -> u32 {
        u32::MAX
    }
    fn port_write(&mut self, _: u16, _: u8, _: u32, _: u64) {}
    fn read_msr(&mut self, _: u32, _: &mut dyn Processor) -> Result<u64, MsrFault> {
        Err(MsrFault::Unclaimed)
    }
    fn write_msr(&mut self, _: u32, _: u64, _: &mut dyn Processor) -> Result<(), MsrFault> {
        Err(MsrFault::Unclaimed)
    }
    fn cpuid(&mut self, leaf: u32, subleaf: u32) -> [u32; 4] {
        WESTMERE.cpuid(leaf, subleaf)
    }
    fn tsc(&mut self, now: u64) -> u64 {
        now
    }
    fn cr8(&mut self) -> u64 {
        0
    }
    fn set_cr8(&mut self, _: u64) {}
    fn random(&mut self) -> u64 {
        4
    }
}

pub struct Rig {
    pub engine: Engine,
    pub cpu: Box<Cpu>,
    ram: *mut u8,
    len: usize,
}

pub const RAM: usize = 8 << 20;
/// Page tables stand here; the rest is the test's.
pub const TABLES: u64 = 0x7f_0000;
pub const CODE: u64 = 0x10_0000;
pub const STACK: u64 = 0x20_0000;

pub fn code_segment(attributes: u16) -> Segment {
    Segment {
        selector: 8,
        base: 0,
        limit: u32::MAX,
        attributes,
    }
}

/// Whatever runs is translated at once, where that can be; in the run of these tests with the plain loop nothing is.
pub fn translate_after() -> Option<u32> {
    (!cfg!(feature = "plain-loop")).then_some(1)
}

impl Rig {
    pub fn new() -> Rig {
        Rig::with(&WESTMERE)
    }

    pub fn with(model: &'static CpuModel) -> Rig {
        Rig::by(model, Vectors::default())
    }

    /// The same with vector instructions executed in one of the ways.
    pub fn by(model: &'static CpuModel, vectors: Vectors) -> Rig {
        Rig::with_options(
            model,
            EngineOptions {
                vectors,
                translate_after: translate_after(),
                ..EngineOptions::default()
            },
        )
    }

    pub fn with_options(model: &'static CpuModel, options: EngineOptions) -> Rig {
        let layout = std::alloc::Layout::from_size_align(RAM, 0x1000).unwrap();
        // SAFETY: The layout is not empty. The memory is given back in `drop`, after the engine's last run.
        let ram = unsafe { std::alloc::alloc_zeroed(layout) };
        let regions = vec![RamRegion {
            gpa: 0,
            host: ram,
            len: RAM as u64,
        }];
        // SAFETY: As above; the rig reads and writes RAM only between runs.
        let engine = unsafe { Engine::new(regions, model, options) }.unwrap();
        let mut rig = Rig {
            engine,
            cpu: Cpu::new(model),
            ram,
            len: RAM,
        };
        // One PML4 entry, one PDPT entry, a page directory of 2-MiB pages.
        rig.write(TABLES, &(TABLES + 0x1007).to_le_bytes());
        rig.write(TABLES + 0x1000, &(TABLES + 0x2007).to_le_bytes());
        for i in 0..512u64 {
            rig.write(TABLES + 0x2000 + i * 8, &(i << 21 | 0x87).to_le_bytes());
        }
        let mut s = CpuState::reset(model);
        s.cr0 = 0x8001_0033.into();
        s.cr3 = TABLES;
        s.cr4 = 0x6a0.into();
        s.efer = 0xd01.into();
        s.segments[CS] = code_segment(0xa09b);
        for i in [SS, DS, ES] {
            s.segments[i] = Segment {
                selector: 16,
                base: 0,
                limit: u32::MAX,
                attributes: 0xc093,
            };
        }
        s.rip = CODE;
        s.gpr[4] = STACK;
        rig.cpu.set_state(&s);
        rig
    }

    pub fn write(&mut self, gpa: u64, bytes: &[u8]) {
        assert!(gpa as usize + bytes.len() <= self.len);
        // SAFETY: In bounds; the engine is not running.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.ram.add(gpa as usize), bytes.len()) };
        self.engine.written(gpa, bytes.len() as u64);
    }

    pub fn read<const N: usize>(&self, gpa: u64) -> [u8; N] {
        assert!(gpa as usize + N <= self.len);
        let mut bytes = [0; N];
        // SAFETY: In bounds; the engine is not running.
        unsafe { std::ptr::copy_nonoverlapping(self.ram.add(gpa as usize), bytes.as_mut_ptr(), N) };
        bytes
    }

    pub fn interrupt(&mut self, vector: u8) {
        self.engine.interrupt(&mut self.cpu, &mut Nothing, vector);
    }

    pub fn run(&mut self, budget: u64) -> Exit {
        self.engine.run(&mut self.cpu, &mut Nothing, budget)
    }
}

impl Drop for Rig {
    fn drop(&mut self) {
        // SAFETY: Allocated in `with` with this layout.
        unsafe { std::alloc::dealloc(self.ram, std::alloc::Layout::from_size_align(self.len, 0x1000).unwrap()) };
    }
}
