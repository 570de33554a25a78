//! Random programs that trace themselves by Intel PT, and what really ran.
//!
//! A program is 64-bit code in ring 0 and 3 with calls, returns of both kinds, indirect and conditional branches, loops,
//! software interrupts, faults and external interrupts; where the model shows RTM, with transactions that are committed or
//! aborted by all of these. It turns tracing on and off by WRMSR, as any guest does; the engine
//! says every instruction, and what did not retire is taken back: that is what a decoder must find in the packets.

use devices::unit::pt::Pt;
use engine::bus::{Bus, MsrFault, Processor, Watch};
use engine::{Cpu, EngineOptions, Exit};
use iced_x86::code_asm::*;
use minivmm::machine::Machine;
use minivmm::machine::memory::{Memory, SoftEngine};
use x86::model::CpuModel;
use x86::msr::*;
use x86::pt::RtitCtl;
use x86::watch::{BranchRecord, Change, Effects, EventRecord, Far, Flow, Interest};

pub use crate::flat::CODE;
use crate::flat::{GDT, IDT, TSS, long_mode, map};

/// The trace's region, in RAM.
pub const TRACE: u64 = 0x40_0000;
/// Bytes of it.
pub const TRACE_LEN: u64 = 0x40_0000;
const TOPA: u64 = 0xF000;
const STACK: u64 = 0x2_0000;
const KERNEL_STACK: u64 = 0x3_0000;

/// Numbers that look random and are the same in every run.
#[derive(Clone, Debug)]
pub struct Random(pub u64);

impl Random {
    /// The next number.
    pub fn draw(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0.wrapping_mul(0x2545_F491_4F6C_DD1D)
    }

    /// One below `bound`, which is not 0.
    pub fn below(&mut self, bound: u64) -> u64 {
        (self.draw() >> 16) % bound
    }
}

/// What a run left behind.
#[derive(Debug)]
pub struct Run {
    /// The code, which begins at [`CODE`].
    pub code: Vec<u8>,
    /// The packets.
    pub trace: Vec<u8>,
    /// Addresses of the instructions that retired while they were traced, in order; those of aborted transactions, too.
    pub retired: Vec<u64>,
    /// Of these the PTWRITEs: address, operand and its bytes.
    pub written: Vec<(u64, u64, u8)>,
    /// Transactions that were committed, and that were aborted, while they were traced.
    pub transactions: [u64; 2],
}

/// What to run and how to trace it.
#[derive(Clone, Copy, Debug)]
pub struct Plan {
    /// The model of the processor.
    pub model: &'static CpuModel,
    /// What the program is made of.
    pub seed: u64,
    /// Settings, to which ToPA and TraceEn are added.
    pub ctl: RtitCtl,
    /// Addresses, both inclusive, that alone are traced: the first range.
    pub range: Option<(u64, u64)>,
    /// Blocks that are run at most.
    pub blocks: u32,
    /// Steps between external interrupts; 0 for none.
    pub interrupts: u64,
}

/// The bus: nothing but the trace unit and a log.
struct World {
    model: &'static CpuModel,
    pt: Pt,
    retired: Vec<u64>,
    written: Vec<(u64, u64, u8)>,
    /// The count of retired instructions when the last one in `retired` began.
    begun: Option<u64>,
    tracing: bool,
    range: Option<(u64, u64)>,
    /// The last branch, event or start of the trace landed in the range. SDM Vol. 3C 33.2.5.3 "Filtering by IP".
    landed: bool,
    user: bool,
    os: bool,
    transactions: [u64; 2],
}

impl World {
    fn wanted(&self, cpl: u8) -> bool {
        self.tracing && self.landed && if cpl == 0 { self.os } else { self.user }
    }

    /// A taken branch or an event lands.
    fn land(&mut self, ip: u64) {
        self.landed = self.range.is_none_or(|(first, last)| (first..=last).contains(&ip));
    }
}

impl Bus for World {
    fn read(&mut self, _: u64, _: u8, _: u64) -> u64 {
        u64::MAX
    }
    fn write(&mut self, _: u64, _: u8, _: u64, _: u64) {}
    fn port_read(&mut self, _: u16, _: u8, _: u64) -> u32 {
        u32::MAX
    }
    fn port_write(&mut self, _: u16, _: u8, _: u32, _: u64) {}
    fn read_msr(&mut self, msr: u32, _: &mut dyn Processor) -> Result<u64, MsrFault> {
        self.pt.read_msr(msr)
    }
    fn write_msr(&mut self, msr: u32, value: u64, cpu: &mut dyn Processor) -> Result<(), MsrFault> {
        let was = self.tracing;
        let _ = self.pt.write_msr(msr, value, cpu)?;
        self.tracing = self.pt.trace_en();
        if !was && self.tracing {
            self.land(cpu.rip());
        }
        if was && !self.tracing && self.os && self.landed {
            // The WRMSR that ends the trace is not part of it.
            self.retired.pop();
        }
        Ok(())
    }
    fn cpuid(&mut self, leaf: u32, subleaf: u32) -> [u32; 4] {
        self.model.cpuid(leaf, subleaf)
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
    fn watch(&mut self) -> Option<&mut dyn Watch> {
        Some(self)
    }
}

impl Watch for World {
    fn interest(&mut self, cpu: &mut dyn Processor) -> Interest {
        let log = Interest {
            every_instruction: self.tracing,
            ..Interest::NOTHING
        };
        self.pt.interest(cpu.step()).and(log)
    }
    fn boundaries(&self) -> &[u64] {
        self.pt.boundaries()
    }
    fn generation(&self) -> u64 {
        self.pt.generation()
    }
    fn before(&mut self, address: u64, cpu: &mut dyn Processor) -> Effects {
        // What was begun and has not retired since has faulted, or is a string operation that goes on.
        let now = cpu.retired();
        if self.begun == Some(now) {
            self.retired.pop();
        }
        self.begun = None;
        if self.wanted(cpu.context().cpl) {
            self.begun = Some(now);
            self.retired.push(address);
        }
        self.pt.before(address, cpu)
    }
    fn branches(&mut self, records: &[BranchRecord], cpu: &mut dyn Processor) -> Effects {
        for record in records {
            if Flow::from_code(record.flow) != Some(Flow::Cond { taken: false }) {
                self.land(record.to);
            }
        }
        self.pt.branches(records, cpu)
    }
    fn event(&mut self, event: &EventRecord, cpu: &mut dyn Processor) -> Effects {
        // Of a software interrupt a decoder sees the event alone.
        let software = Flow::from_code(event.branch.flow) == Some(Flow::Far(Far::SoftwareInterrupt));
        if software && self.wanted(event.branch.from_cpl) && self.retired.last() == Some(&event.branch.from) {
            self.retired.pop();
            self.begun = None;
        }
        self.land(event.branch.to);
        self.pt.event(event, cpu)
    }
    fn state(&mut self, change: Change, cpu: &mut dyn Processor) -> Effects {
        match change {
            Change::PtWrite { value, size, at } if self.wanted(cpu.context().cpl) => {
                self.written.push((at, value, size))
            }
            Change::TransactionCommit { .. } if self.wanted(cpu.context().cpl) => self.transactions[0] += 1,
            Change::TransactionAbort { .. } if self.wanted(cpu.context().cpl) => self.transactions[1] += 1,
            _ => {}
        }
        if let Change::TransactionAbort { .. } = change {
            self.land(cpu.rip());
        }
        self.pt.change(change, cpu)
    }
    fn tick(&mut self, cpu: &mut dyn Processor) -> Effects {
        self.pt.tick(cpu)
    }
}

fn wrmsr(a: &mut CodeAssembler, msr: u32, value: u64) -> Result<(), IcedError> {
    a.mov(ecx, msr)?;
    a.mov(eax, value as u32)?;
    a.mov(edx, (value >> 32) as u32)?;
    a.wrmsr()
}

use iced_x86::IcedError;

/// Registers: R15 blocks left, R14 calls to return from, R13 numbers, R12 scratch.
fn program(plan: &Plan) -> Result<(Vec<u8>, u64, u64), IcedError> {
    let mut random = Random(plan.seed | 1);
    let mut a = CodeAssembler::new(64)?;
    let mut done = a.create_label();
    let mut handler = a.create_label();
    let mut fault = a.create_label();
    let mut start = a.create_label();
    let count = 24usize;
    let mut blocks: Vec<CodeLabel> = (0..count).map(|_| a.create_label()).collect();
    let ctl = plan.ctl.with_topa(true).with_trace_en(true);
    let fillers = if plan.model.units.pt.is_some_and(|pt| pt.ptwrite()) {
        6
    } else {
        4
    };
    let transactional = plan.model.features().rtm();
    let mut fallbacks: Vec<(CodeLabel, CodeLabel)> = Vec::new();

    a.mov(r15d, plan.blocks)?;
    a.xor(r14d, r14d)?;
    a.mov(r13, plan.seed | 1)?;
    let traces = plan.model.units.pt.is_some();
    if traces {
        wrmsr(&mut a, IA32_RTIT_OUTPUT_BASE, TOPA)?;
        if let Some((first, last)) = plan.range {
            wrmsr(&mut a, IA32_RTIT_ADDR0_A, first)?;
            wrmsr(&mut a, IA32_RTIT_ADDR0_B, last)?;
        }
        wrmsr(&mut a, IA32_RTIT_CTL, ctl.into_bits())?;
    }
    // Into ring 3: SS, RSP, RFLAGS with IF, CS, RIP.
    a.push(0x23)?;
    a.push(STACK as i32)?;
    a.push(0x202)?;
    a.push(0x2B)?;
    a.lea(rax, ptr(start))?;
    a.push(rax)?;
    a.iretq()?;
    a.set_label(&mut start)?;

    for n in 0..count {
        // Labels do not stand on the same instruction.
        a.nop()?;
        a.set_label(&mut blocks[n])?;
        a.dec(r15)?;
        a.jz(done)?;
        if transactional {
            // Blocks are reached in a transaction and outside.
            if random.below(3) == 0 {
                let mut skip = a.create_label();
                a.xtest()?;
                a.jz(skip)?;
                match random.below(8) {
                    0 => a.xabort(0x42)?,
                    1 => a.cpuid()?,
                    2 => a.ud2()?,
                    3 => a.int(0x80)?,
                    _ => a.xend()?,
                }
                a.set_label(&mut skip)?;
                a.nop()?;
            }
            if random.below(3) == 0 {
                let fallback = a.create_label();
                a.xbegin(fallback)?;
                fallbacks.push((fallback, blocks[random.below(count as u64) as usize]));
            }
        }
        for _ in 0..random.below(4) {
            match random.below(fillers) {
                0 => a.add(rax, r13)?,
                1 => a.mov(qword_ptr(rsp - 64), rax)?,
                2 => a.nop()?,
                4 if random.below(2) == 0 => a.ptwrite(r13)?,
                4 => a.ptwrite(eax)?,
                5 if random.below(2) == 0 => a.ptwrite(qword_ptr(rsp - 64))?,
                5 => a.ptwrite(dword_ptr(rsp - 61))?,
                _ => a.lea(rbx, qword_ptr(rax + rbx * 4 + 0x1234_5678))?,
            }
        }
        // A number that decides.
        a.imul_3(r13, r13, 0x3C6E_F35F)?;
        a.add(r13, 0x5851)?;
        let target = blocks[random.below(count as u64) as usize];
        let other = blocks[random.below(count as u64) as usize];
        match random.below(10) {
            0 | 1 => {
                a.bt(r13, 17 + random.below(30) as u32)?;
                a.jc(target)?;
            }
            2 => {
                let mut again = a.create_label();
                a.mov(ecx, 1 + random.below(20) as u32)?;
                a.set_label(&mut again)?;
                a.add(rdx, rcx)?;
                a.loop_(again)?;
                a.jmp(target)?;
            }
            3 => a.jmp(target)?,
            4 => {
                a.lea(r12, ptr(target))?;
                a.lea(rbx, ptr(other))?;
                a.bt(r13, 23u32)?;
                a.cmovc(r12, rbx)?;
                a.jmp(r12)?;
            }
            5 | 6 => {
                // A call at most 80 deep.
                let mut skip = a.create_label();
                a.cmp(r14d, 80)?;
                a.jae(skip)?;
                a.inc(r14d)?;
                if random.below(2) == 0 {
                    a.call(target)?;
                } else {
                    a.lea(r12, ptr(target))?;
                    a.call(r12)?;
                }
                a.set_label(&mut skip)?;
            }
            7 => {
                let mut skip = a.create_label();
                a.test(r14d, r14d)?;
                a.jz(skip)?;
                a.dec(r14d)?;
                a.ret()?;
                a.set_label(&mut skip)?;
            }
            8 => match random.below(5) {
                // A return without its call, and a call that asks for its own address.
                0 => {
                    a.lea(r12, ptr(target))?;
                    a.push(r12)?;
                    a.ret()?;
                }
                1 => {
                    let mut here = a.create_label();
                    a.call(here)?;
                    a.set_label(&mut here)?;
                    a.pop(r12)?;
                }
                2 => a.int(0x80)?,
                // An indirect call of the next instruction, which a later return comes back to.
                3 => {
                    let (mut here, mut skip) = (a.create_label(), a.create_label());
                    a.cmp(r14d, 80)?;
                    a.jae(skip)?;
                    a.inc(r14d)?;
                    a.lea(r12, ptr(here))?;
                    a.call(r12)?;
                    a.set_label(&mut here)?;
                    a.nop()?;
                    a.set_label(&mut skip)?;
                    a.nop()?;
                }
                _ => a.ud2()?,
            },
            _ => {
                a.mov(ecx, 3 + random.below(9) as u32)?;
                a.lea(rsi, qword_ptr(rsp - 256))?;
                a.lea(rdi, qword_ptr(rsp - 512))?;
                a.rep().movsb()?;
            }
        }
    }
    a.nop()?;
    a.jmp(blocks[0])?;

    // Everything is as it was before XBEGIN, so another way has to be taken from here.
    for (mut fallback, target) in fallbacks {
        a.set_label(&mut fallback)?;
        a.add(r13, 0x1357)?;
        a.dec(r15)?;
        a.jz(done)?;
        a.jmp(target)?;
    }

    // Ends the program: a software interrupt of its own, whose handler stops the trace.
    a.set_label(&mut done)?;
    a.int(0x81)?;
    let mut stop = a.create_label();
    a.set_label(&mut stop)?;
    if traces {
        wrmsr(&mut a, IA32_RTIT_CTL, 0)?;
    }
    a.hlt()?;
    a.set_label(&mut handler)?;
    a.push(rax)?;
    a.bt(r13, 9u32)?;
    let mut out = a.create_label();
    a.jc(out)?;
    a.nop()?;
    a.set_label(&mut out)?;
    a.pop(rax)?;
    a.iretq()?;
    // Steps over UD2.
    a.set_label(&mut fault)?;
    a.add(qword_ptr(rsp), 2)?;
    a.iretq()?;

    let options = iced_x86::BlockEncoderOptions::RETURN_NEW_INSTRUCTION_OFFSETS;
    let assembled = a.assemble_options(CODE, options)?;
    let address = |label: &CodeLabel| assembled.label_ip(label);
    let (handler, fault, stop) = (address(&handler)?, address(&fault)?, address(&stop)?);
    let code = assembled.inner.code_buffer;
    let mut idt = vec![0u8; 0x1000];
    for vector in 0..256usize {
        let offset = match vector {
            6 => fault,
            0x81 => stop,
            _ => handler,
        };
        // A 64-bit interrupt gate for all rings.
        let low = offset & 0xFFFF | 8 << 16 | 0xEE00 << 32 | (offset >> 16 & 0xFFFF) << 48;
        idt[vector * 16..][..8].copy_from_slice(&low.to_le_bytes());
        idt[vector * 16 + 8..][..8].copy_from_slice(&(offset >> 32).to_le_bytes());
    }
    let mut image = code;
    let code_len = image.len() as u64;
    image.extend_from_slice(&idt);
    Ok((image, code_len, handler))
}

/// A program about to run.
struct Ready {
    code: Vec<u8>,
    /// The table of output regions.
    entries: [u64; 4],
    memory: Memory,
    cpu: Box<Cpu>,
}

fn prepare(plan: &Plan) -> Ready {
    let (image, code_len, _) = program(plan).expect("the program assembles");
    let (code, idt) = image.split_at(code_len as usize);
    let memory = Memory::new(16 << 20).expect("16 MiB are to be had");
    let write = |at: u64, bytes: &[u8]| memory.write(at, bytes).expect("RAM");
    write(CODE, code);
    write(IDT, idt);
    map(&memory);
    // Null, kernel code and data, (free), user data and code, and the TSS.
    let descriptors = [
        0,
        0x00AF_9B00_0000_FFFF,
        0x00CF_9300_0000_FFFF,
        0,
        0x00CF_F300_0000_FFFF,
        0x00AF_FB00_0000_FFFFu64,
    ];
    for (n, descriptor) in descriptors.into_iter().enumerate() {
        write(GDT + 8 * n as u64, &descriptor.to_le_bytes());
    }
    write(TSS + 4, &KERNEL_STACK.to_le_bytes());
    let entries = if plan.model.units.pt.is_some_and(|pt| pt.topa_multiple()) {
        // Regions of 4 KiB and of the rest in turns.
        [
            TRACE,
            (TRACE + 0x10_0000) | 8 << 6,
            (TRACE + 0x20_0000) | 9 << 6,
            TOPA | 1,
        ]
    } else {
        [TRACE | 10 << 6, TOPA | 1, 0, 0]
    };
    for (n, entry) in entries.into_iter().enumerate() {
        write(TOPA + 8 * n as u64, &entry.to_le_bytes());
    }

    let mut state = long_mode(plan.model, 0x2F);
    (state.cr4, state.efer, state.gpr[4]) = (0x6A0.into(), 0xD01.into(), KERNEL_STACK);
    let mut cpu = Cpu::new(plan.model);
    cpu.set_state(&state);
    Ready {
        code: code.to_vec(),
        entries,
        memory,
        cpu,
    }
}

/// Goes on to HLT, with external interrupts.
fn go(plan: &Plan, engine: &mut SoftEngine, cpu: &mut Cpu, bus: &mut dyn Bus) {
    let slice = if plan.interrupts == 0 {
        1_000_000
    } else {
        plan.interrupts
    };
    for _ in 0..1_000_000u32 {
        match engine.get().run(cpu, bus, slice) {
            Exit::Halt => return,
            Exit::Budget if plan.interrupts != 0 && cpu.state().rflags.interrupt() => {
                engine.get().interrupt(cpu, bus, 0x40);
            }
            Exit::Budget | Exit::Bus | Exit::Pause | Exit::Window => {}
            other => panic!("{other:?} at {:x}", cpu.state().rip),
        }
    }
    panic!("the program has come to its end: {:x?}", cpu.state());
}

/// Runs a program to its end on a machine of the model, whose own units it programs, with an observer beside them.
///
/// # Panics
/// When the machine does not get there: these programs are the test's own.
pub fn observe(plan: &Plan, observer: Box<dyn Watch + Send>) {
    let Ready { memory, mut cpu, .. } = prepare(plan);
    let mut soft = memory
        .engine(plan.model, EngineOptions::default())
        .expect("the host can run the model");
    let mut machine = Machine::new(plan.model, 1, memory, 0, 0, Box::new(std::io::sink()));
    machine.observe(0, Some(observer));
    go(plan, &mut soft, &mut cpu, &mut machine.cpu(0));
    machine.observe(0, None);
}

/// Runs a program to its end.
///
/// # Panics
/// When the machine does not get there: these programs are the test's own.
pub fn run(plan: &Plan) -> Run {
    let Ready {
        code,
        entries,
        memory,
        mut cpu,
    } = prepare(plan);
    let mut soft = memory
        .engine(plan.model, EngineOptions::default())
        .expect("the host can run the model");
    let mut world = World {
        model: plan.model,
        pt: Pt::new(plan.model.units.pt.expect("a model with processor trace")),
        retired: Vec::new(),
        written: Vec::new(),
        begun: None,
        tracing: false,
        range: plan.range,
        landed: false,
        user: plan.ctl.user(),
        os: plan.ctl.os(),
        transactions: [0; 2],
    };
    go(plan, &mut soft, &mut cpu, &mut world);
    assert!(
        !world.pt.trace_en(),
        "the program has come to its end: {:x?}",
        cpu.state()
    );
    let status = world.pt.read_msr(IA32_RTIT_STATUS).unwrap_or(0);
    assert_eq!(status & 0x30, 0, "neither Error nor Stopped");

    // The regions, as far as they were filled.
    let base = world.pt.read_msr(IA32_RTIT_OUTPUT_MASK_PTRS).unwrap_or(0);
    let (index, offset) = ((base as u32 >> 7) as usize, base >> 32);
    let mut trace = Vec::new();
    for (n, entry) in entries.into_iter().enumerate().take(index + 1) {
        let (at, size) = (entry & !0xFFF, 4096u64 << (entry >> 6 & 15));
        let len = if n == index { offset } else { size };
        let mut bytes = vec![0; len as usize];
        memory.read(at, &mut bytes).expect("RAM");
        trace.extend_from_slice(&bytes);
    }
    Run {
        code,
        trace,
        retired: world.retired,
        written: world.written,
        transactions: world.transactions,
    }
}
