//! A machine in 64-bit mode with identity paging and a HLT for each vector: enough for a program of a few instructions that
//! programs its own units, whose memory and registers a test looks at afterwards.

use engine::{Activity, CS, Cpu, CpuState, EngineOptions, Exit, Segment, Table};
use iced_x86::IcedError;
use iced_x86::code_asm::*;
use minivmm::machine::{Machine, memory::Memory};
use minivmm::{Console, MachineConfig, Run};
use x86::model::CpuModel;

/// Where the program is.
pub const CODE: u64 = 0x10_0000;
/// Memory for the program's own use, 1 MiB of it, zero at first.
pub const DATA: u64 = 0x20_0000;
/// Memory for a trace.
pub const TRACE: u64 = 0x40_0000;
/// Where the tables of the processor are.
const TABLES: u64 = 0x7000;
pub(crate) const GDT: u64 = 0x3000;
pub(crate) const IDT: u64 = 0x4000;
pub(crate) const TSS: u64 = 0x5000;
const HANDLERS: u64 = 0x1_0000;
const STACK: u64 = 0x3_0000;
/// Bytes from handler to handler.
const APART: u64 = 16;

/// An exception or interrupt that nobody handled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Arrived {
    /// The vector.
    pub vector: u8,
    /// The error code, of those that have one.
    pub error: Option<u64>,
    /// RIP in the frame.
    pub rip: u64,
}

/// Writes page tables that map the first GiB to itself, for all rings.
pub(crate) fn map(memory: &Memory) {
    let pages = (0..512u64).map(|page| (0x2000 + page * 8, page << 21 | 0x87));
    for (at, entry) in [(0, TABLES + 0x1007), (0x1000, TABLES + 0x2007)]
        .into_iter()
        .chain(pages)
    {
        memory.write(TABLES + at, &entry.to_le_bytes()).expect("RAM");
    }
}

/// A processor in ring 0 with flat segments, before the first instruction of [`CODE`]. CR4, IA32_EFER and the stack are the
/// caller's to choose.
pub(crate) fn long_mode(model: &'static CpuModel, gdt_limit: u16) -> CpuState {
    let mut state = CpuState::reset(model);
    (state.cr0, state.cr3) = (0x8001_0033.into(), TABLES);
    let segment = |selector, attributes| Segment {
        selector,
        base: 0,
        limit: u32::MAX,
        attributes,
    };
    state.segments.fill(segment(0x10, 0xC093));
    state.segments[CS] = segment(8, 0xA09B);
    state.gdtr = Table {
        base: GDT,
        limit: gdt_limit,
    };
    state.idtr = Table {
        base: IDT,
        limit: 0xFFF,
    };
    state.tr = Segment {
        selector: 0x30,
        base: TSS,
        limit: 0x67,
        attributes: 0x8B,
    };
    state.rip = CODE;
    state
}

/// Bytes of memory.
const MEMORY: u64 = 16 << 20;

/// Writes a program and the tables that it runs with; the program's bytes.
fn lay_out(memory: &Memory, f: impl FnOnce(&mut CodeAssembler) -> Result<(), IcedError>) -> Vec<u8> {
    let write = |at: u64, bytes: &[u8]| memory.write(at, bytes).expect("RAM");
    let mut a = CodeAssembler::new(64).expect("64 is a width");
    f(&mut a).expect("the program assembles");
    let code = a.assemble(CODE).expect("the program assembles");
    write(CODE, &code);
    map(memory);
    // Null, kernel code and data, user data and code.
    let descriptors = [
        0,
        0x00AF_9B00_0000_FFFF,
        0x00CF_9300_0000_FFFF,
        0x00CF_F300_0000_FFFF,
        0x00AF_FB00_0000_FFFFu64,
    ];
    for (n, descriptor) in descriptors.into_iter().enumerate() {
        write(GDT + 8 * n as u64, &descriptor.to_le_bytes());
    }
    for vector in 0..256u64 {
        let at = HANDLERS + vector * APART;
        write(at, &[0xF4]);
        // A 64-bit interrupt gate.
        let low = at & 0xFFFF | 8 << 16 | 0x8E00 << 32 | (at >> 16 & 0xFFFF) << 48;
        write(IDT + vector * 16, &low.to_le_bytes());
    }
    write(TSS + 4, &STACK.to_le_bytes());
    code
}

/// A processor that is about to run the program.
fn beginning(model: &'static CpuModel, control: u64) -> CpuState {
    let mut state = long_mode(model, 0x27);
    (state.cr4, state.efer, state.gpr[4]) = ((0x420 | control).into(), 0xD00.into(), STACK);
    state
}

/// Where the handler of a vector is, of 16 bytes.
pub fn handler(vector: u64) -> u64 {
    HANDLERS + vector * APART
}

/// What [`whole`] builds its machine from.
pub fn config(model: &'static CpuModel) -> MachineConfig {
    MachineConfig {
        memory: MEMORY,
        model,
        ..MachineConfig::new(crate::HELLO)
    }
}

/// The same program on a whole machine, with one CPU, in place of a kernel. A vector in `jumps` is handled by the program's
/// own code so many bytes behind its beginning.
///
/// # Panics
/// As [`Flat::new`].
pub fn whole(
    model: &'static CpuModel,
    control: u64,
    jumps: &[(u8, u32)],
    f: impl FnOnce(&mut CodeAssembler) -> Result<(), IcedError>,
) -> (Run, Console) {
    whole_of(&config(model), control, jumps, f)
}

/// [`whole`] on a machine of this configuration, which is [`config`]'s but for what the host makes of it.
///
/// # Panics
/// As [`Flat::new`].
pub fn whole_of(
    config: &MachineConfig,
    control: u64,
    jumps: &[(u8, u32)],
    f: impl FnOnce(&mut CodeAssembler) -> Result<(), IcedError>,
) -> (Run, Console) {
    let mut vm = Run::new(config).expect("the machine is to be had");
    let memory = vm.machine().memory();
    lay_out(memory, f);
    for &(vector, offset) in jumps {
        let at = HANDLERS + u64::from(vector) * APART;
        let mut jump = vec![0xE9];
        jump.extend((CODE as u32 + offset - at as u32 - 5).to_le_bytes());
        memory.write(at, &jump).expect("RAM");
    }
    let mut state = vm.save();
    state.soft.cpus[0] = beginning(config.model, control);
    vm.set_state(&state).expect("it is its own");
    let console = Console::open(&config.serial, &[], vm.line()).expect("a buffer");
    (vm, console)
}

/// The machine.
pub struct Flat {
    /// Devices and units.
    pub machine: Machine,
    /// The processor.
    pub cpu: Box<Cpu>,
    memory: Memory,
    model: &'static CpuModel,
    code: Vec<u8>,
}

impl Flat {
    /// A machine that is about to run this program at CPL 0, interrupts off. In CR4 `control` is set beside PAE and OSXMMEXCPT.
    ///
    /// # Panics
    /// When the program does not assemble: it is the test's own.
    pub fn new(
        model: &'static CpuModel,
        control: u64,
        f: impl FnOnce(&mut CodeAssembler) -> Result<(), IcedError>,
    ) -> Self {
        let memory = Memory::new(MEMORY).expect("16 MiB are to be had");
        let own = Memory::new(2 << 20).expect("2 MiB are to be had");
        let machine = Machine::new(model, 1, own, 0, 1, Box::new(std::io::sink()));
        let code = lay_out(&memory, f);
        let mut cpu = Cpu::new(model);
        cpu.set_state(&beginning(model, control));
        Flat {
            machine,
            cpu,
            memory,
            model,
            code,
        }
    }

    /// The program's bytes, which begin at [`CODE`].
    pub fn code(&self) -> &[u8] {
        &self.code
    }

    /// Changes the processor's state.
    pub fn state(&mut self, f: impl FnOnce(&mut CpuState)) {
        let mut state = self.cpu.state();
        f(&mut state);
        self.cpu.set_state(&state);
    }

    /// Goes back to the program's beginning.
    pub fn restart(&mut self) {
        self.state(|s| (s.rip, s.gpr[4], s.activity) = (CODE, STACK, Activity::Running));
    }

    /// Handles a vector by code of its own, at most 16 bytes.
    ///
    /// # Panics
    /// When it is longer.
    pub fn handle(&mut self, vector: u8, code: &[u8]) {
        assert!(code.len() <= APART as usize);
        self.write(HANDLERS + u64::from(vector) * APART, code);
    }

    /// Writes memory.
    ///
    /// # Panics
    /// Where there is none.
    pub fn write(&mut self, at: u64, bytes: &[u8]) {
        self.memory.write(at, bytes).expect("RAM");
    }

    /// Reads memory.
    ///
    /// # Panics
    /// Where there is none.
    pub fn read(&self, at: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.memory.read(at, &mut bytes).expect("RAM");
        bytes
    }

    /// Reads 8 bytes.
    ///
    /// # Panics
    /// Where there are none.
    pub fn word(&self, at: u64) -> u64 {
        let mut bytes = [0; 8];
        self.memory.read(at, &mut bytes).expect("RAM");
        u64::from_le_bytes(bytes)
    }

    /// Runs to a HLT. `Err`: a handler's.
    ///
    /// # Errors
    /// What arrived there.
    ///
    /// # Panics
    /// When there is no HLT within ten million steps, or the processor shuts down.
    pub fn run(&mut self) -> Result<(), Arrived> {
        self.go(&[])
    }

    /// Runs to a HLT, delivers an external interrupt there, and so on; then as [`Flat::run`].
    ///
    /// # Errors
    /// What arrived at a handler without code.
    ///
    /// # Panics
    /// As [`Flat::run`] does.
    pub fn go(&mut self, vectors: &[u8]) -> Result<(), Arrived> {
        let mut engine = self
            .memory
            .engine(self.model, EngineOptions::default())
            .expect("the host can run it");
        let mut vectors = vectors.iter();
        for _ in 0..1000 {
            match engine.get().run(&mut self.cpu, &mut self.machine.cpu(0), 10_000) {
                Exit::Halt => match vectors.next() {
                    Some(&vector) => engine.get().interrupt(&mut self.cpu, &mut self.machine.cpu(0), vector),
                    None => return self.arrived(),
                },
                Exit::Bus | Exit::Budget | Exit::Pause => {}
                exit => panic!("{exit:?}: {:x?}", self.cpu.state()),
            }
        }
        panic!("no HLT: {:x?}", self.cpu.state());
    }

    /// Runs for at most so many steps, whatever comes: why it stopped.
    ///
    /// # Panics
    /// When the host cannot run the model.
    pub fn run_for(&mut self, steps: u64) -> Exit {
        let mut engine = self
            .memory
            .engine(self.model, EngineOptions::default())
            .expect("the host can run it");
        let end = self.cpu.steps() + steps;
        // A guest whose exceptions never end makes no steps.
        for _ in 0..steps {
            let left = end.saturating_sub(self.cpu.steps());
            match engine.get().run(&mut self.cpu, &mut self.machine.cpu(0), left) {
                Exit::Bus | Exit::Budget | Exit::Pause if left > 0 => {}
                exit => return exit,
            }
        }
        Exit::Budget
    }

    fn arrived(&self) -> Result<(), Arrived> {
        let s = self.cpu.state();
        let Some(offset) = (s.rip - 1).checked_sub(HANDLERS).filter(|offset| *offset < 256 * APART) else {
            return Ok(());
        };
        let vector = (offset / APART) as u8;
        let error = matches!(vector, 8 | 10..=14 | 17).then(|| self.word(s.gpr[4]));
        let frame = s.gpr[4] + if error.is_some() { 8 } else { 0 };
        Err(Arrived {
            vector,
            error,
            rip: self.word(frame),
        })
    }
}

/// WRMSR of a constant.
///
/// # Errors
/// As the assembler's calls.
pub fn wrmsr(a: &mut CodeAssembler, msr: u32, value: u64) -> Result<(), IcedError> {
    a.mov(ecx, msr)?;
    a.mov(eax, value as u32)?;
    a.mov(edx, (value >> 32) as u32)?;
    a.wrmsr()
}

/// Goes on at CPL 3, with flags of 2 and more.
///
/// # Errors
/// As the assembler's calls.
pub fn user(a: &mut CodeAssembler, flags: u32) -> Result<(), IcedError> {
    let mut there = a.create_label();
    a.push(0x1B)?;
    a.push(STACK as i32 - 0x1000)?;
    a.push(flags as i32 | 2)?;
    a.push(0x23)?;
    a.lea(rax, ptr(there))?;
    a.push(rax)?;
    a.iretq()?;
    a.set_label(&mut there)?;
    a.nop()
}
