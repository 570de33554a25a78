//! Small programs on a whole machine, whose units are the guest's own: breakpoints by MOV to debug registers.

use engine::{CS, Cpu, CpuState, EngineOptions, Exit, Segment, Table};
use iced_x86::IcedError;
use iced_x86::code_asm::*;
use machine::{Machine, memory::Memory};
use x86::model::{CpuModel, SKYLAKE_SERVER, WESTMERE};
use x86::watch::{BranchRecord, Effects, Interest, Processor, Recorded, Watch};

const CODE: u64 = 0x1000;
const HANDLERS: u64 = 0x3000;
const DATA: u64 = 0x5000;

/// What arrived at a handler of a program in real-address mode.
#[derive(Debug, PartialEq, Eq)]
struct Arrived {
    vector: u64,
    ip: u64,
    dr6: u64,
    /// DR6.RTM is clear: it came in a transaction.
    transaction: bool,
    dr7: u64,
}

struct Guest {
    machine: Machine,
    cpu: Box<Cpu>,
    memory: Memory,
    model: &'static CpuModel,
}

impl Guest {
    /// A machine in real-address mode at `CODE`, with a HLT for each vector.
    fn new(model: &'static CpuModel, f: impl FnOnce(&mut CodeAssembler) -> Result<(), IcedError>) -> Guest {
        let memory = Memory::new(2 << 20).unwrap();
        let machine = Machine::new(model, 1, Memory::new(2 << 20).unwrap(), 0, 1, Box::new(std::io::sink()));
        for vector in 0..64u64 {
            memory
                .write(vector * 4, &((HANDLERS + vector * 4) as u32).to_le_bytes())
                .unwrap();
            memory.write(HANDLERS + vector * 4, &[0xF4]).unwrap();
        }
        let mut a = CodeAssembler::new(16).unwrap();
        f(&mut a).unwrap();
        memory.write(CODE, &a.assemble(CODE).unwrap()).unwrap();
        let mut cpu = Cpu::new(model);
        let mut s = CpuState::reset(model);
        s.segments = [Segment::real(0); 6];
        s.segments[CS].attributes = 0x9B;
        s.rip = CODE;
        s.gpr[4] = 0x8000;
        s.idtr = Table { base: 0, limit: 0x3FF };
        cpu.set_state(&s);
        Guest {
            machine,
            cpu,
            memory,
            model,
        }
    }

    /// Runs to a HLT: what arrived if it is a handler's, else the address of the program's own.
    fn run(mut self) -> Result<Arrived, u64> {
        let mut engine = self.memory.engine(self.model, EngineOptions::default()).unwrap();
        for _ in 0..1000 {
            match engine.get().run(&mut self.cpu, &mut self.machine.cpu(0), 10_000) {
                Exit::Halt => break,
                Exit::Bus | Exit::Budget => {}
                exit => panic!("{exit:?}: {:x?}", self.cpu.state()),
            }
        }
        let s = self.cpu.state();
        let at = s.rip - 1;
        if !(HANDLERS..HANDLERS + 256).contains(&at) {
            return Err(at);
        }
        let mut frame = [0; 2];
        self.memory.read(s.gpr[4] & 0xFFFF, &mut frame).unwrap();
        Ok(Arrived {
            vector: (at - HANDLERS) / 4,
            ip: u64::from(u16::from_le_bytes(frame)) - CODE,
            dr6: s.dr[6] & 0xF00F,
            transaction: s.dr[6] & 1 << 16 == 0,
            dr7: s.dr[7],
        })
    }
}

/// DR`n` and DR7, in so many bytes.
fn set(a: &mut CodeAssembler, n: u8, address: u64, control: u32) -> Result<(), IcedError> {
    let register = [dr0, dr1, dr2, dr3][usize::from(n)];
    a.mov(eax, address as u32)?; // 6
    a.mov(register, eax)?; // 3
    a.mov(eax, control)?; // 6
    a.mov(dr7, eax) // 3
}

/// Bytes that `set` takes.
const SET: u64 = 18;

type Body = fn(&mut CodeAssembler) -> Result<(), IcedError>;

// covers: dr/guest
#[test]
fn a_guest_meets_its_own_breakpoints() {
    // (why, DRn, address, DR7, the rest of the program, vector, IP after the set-up, DR6)
    type Row = (&'static str, u8, u64, u32, Body, u64, u64, u64);
    let rows: [Row; 10] = [
        (
            "execute, L0",
            0,
            CODE + SET + 1,
            0x401,
            |a| {
                a.nop()?;
                a.nop()?;
                a.hlt()
            },
            1,
            1,
            1,
        ),
        (
            "execute, G3",
            3,
            CODE + SET + 1,
            0x480,
            |a| {
                a.nop()?;
                a.nop()?;
                a.hlt()
            },
            1,
            1,
            8,
        ),
        (
            "write of 2 bytes, DR1",
            1,
            DATA,
            0x0050_0404,
            |a| {
                a.mov(byte_ptr(DATA + 1), al)?;
                a.hlt()
            },
            1,
            3,
            2,
        ),
        (
            "read or write: a read",
            2,
            DATA,
            0x0F00_0410,
            |a| {
                a.mov(al, byte_ptr(DATA + 3))?;
                a.hlt()
            },
            1,
            3,
            4,
        ),
        (
            "a read-modify-write",
            0,
            DATA,
            0x0001_0401,
            |a| {
                a.inc(byte_ptr(DATA))?;
                a.hlt()
            },
            1,
            4,
            1,
        ),
        (
            "general detect",
            0,
            0,
            0x2400,
            |a| {
                a.mov(eax, dr0)?;
                a.hlt()
            },
            1,
            0,
            0x2000,
        ),
        (
            "INT1",
            0,
            0,
            0x400,
            |a| {
                a.int1()?;
                a.hlt()
            },
            1,
            1,
            0,
        ),
        (
            "INT3 is #BP",
            0,
            0,
            0x400,
            |a| {
                a.int3()?;
                a.hlt()
            },
            3,
            1,
            0,
        ),
        (
            "single-step, after the instruction that follows POPF",
            0,
            0,
            0x400,
            |a| {
                a.pushf()?;
                a.pop(ax)?;
                a.or(ah, 1)?;
                a.push(ax)?;
                a.popf()?;
                a.nop()?;
                a.hlt()
            },
            1,
            8,
            0x4000,
        ),
        (
            "I/O with CR4.DE",
            0,
            0x80,
            0x0002_0401,
            |a| {
                a.mov(eax, 8)?;
                a.mov(cr4, eax)?;
                a.out(0x80, al)?;
                a.hlt()
            },
            1,
            11,
            1,
        ),
    ];
    for (why, n, address, control, rest, vector, ip, status) in rows {
        let guest = Guest::new(&WESTMERE, |a| {
            set(a, n, address, control)?;
            rest(a)
        });
        let arrived = guest
            .run()
            .unwrap_or_else(|at| panic!("{why}: nothing came up to {at:x}"));
        assert_eq!(
            (arrived.vector, arrived.ip - SET, arrived.dr6),
            (vector, ip, status),
            "{why}"
        );
        let general_detect = 0x2000;
        assert_eq!(
            arrived.dr7,
            u64::from(control & !general_detect),
            "{why}: #DB clears GD"
        );
    }
}

// covers: dr/guest
#[test]
fn what_is_not_enabled_or_not_touched_does_nothing() {
    let rows: [(&str, u8, u64, u32, Body); 5] = [
        ("not enabled", 0, CODE + SET + 1, 0x400, |a| {
            a.nop()?;
            a.nop()?;
            a.hlt()
        }),
        ("the middle of an instruction", 0, CODE + SET + 1, 0x401, |a| {
            a.mov(ax, 1)?;
            a.hlt()
        }),
        ("a read of what is watched for writes", 0, DATA, 0x000D_0401, |a| {
            a.mov(al, byte_ptr(DATA))?;
            a.hlt()
        }),
        ("the byte after", 0, DATA, 0x000D_0401, |a| {
            a.mov(byte_ptr(DATA + 4), al)?;
            a.hlt()
        }),
        ("I/O without CR4.DE", 0, 0x80, 0x0002_0401, |a| {
            a.out(0x80, al)?;
            a.hlt()
        }),
    ];
    for (why, n, address, control, rest) in rows {
        let guest = Guest::new(&WESTMERE, |a| {
            set(a, n, address, control)?;
            rest(a)
        });
        if let Ok(arrived) = guest.run() {
            panic!("{why}: {arrived:x?}");
        }
    }
}

/// A program with IA32_DEBUGCTL and DR7 set, and a data breakpoint on DR1 that a transaction meets.
fn debugged_transaction(control: u32, enable: u32) -> Guest {
    let model = SKYLAKE_SERVER.with_toggles("+rtm").unwrap();
    Guest::new(model, |a| {
        let mut fallback = a.create_label();
        a.mov(ecx, 0x1D9)?; // 6
        a.mov(eax, control)?; // 6
        a.xor(edx, edx)?; // 3
        a.wrmsr()?; // 2
        set(a, 1, DATA, 0x0010_0404 | enable)?;
        a.xbegin(fallback)?;
        a.mov(byte_ptr(DATA), al)?;
        a.xend()?;
        a.hlt()?;
        a.set_label(&mut fallback)?;
        a.mov(dword_ptr(DATA + 8), eax)?;
        a.hlt()
    })
}

// covers: rtm/advanced-debug
#[test]
fn a_debugger_is_told_of_a_breakpoint_in_a_transaction() {
    const RTM_CONTROL: u32 = 1 << 15;
    const RTM_ENABLE: u32 = 1 << 11;
    let arrived = debugged_transaction(RTM_CONTROL, RTM_ENABLE).run().expect("a #DB");
    assert_eq!((arrived.vector, arrived.ip), (1, 17 + SET), "at XBEGIN: {arrived:x?}");
    assert!(arrived.transaction && arrived.dr6 == 2, "{arrived:x?}");
    for (control, enable) in [(0, RTM_ENABLE), (RTM_CONTROL, 0)] {
        let mut guest = debugged_transaction(control, enable);
        let mut engine = guest.memory.engine(guest.model, EngineOptions::default()).unwrap();
        while engine.get().run(&mut guest.cpu, &mut guest.machine.cpu(0), 10_000) != Exit::Halt {}
        let mut status = [0; 4];
        guest.memory.read(DATA + 8, &mut status).unwrap();
        let s = guest.cpu.state();
        assert_eq!(
            (u32::from_le_bytes(status), s.dr[6] & 0xF),
            (0x10, 0),
            "EAX at the fallback"
        );
        assert!(s.rip < HANDLERS, "no exception came");
    }
    // Outside of a transaction the same breakpoint says so.
    let guest = Guest::new(SKYLAKE_SERVER.with_toggles("+rtm").unwrap(), |a| {
        set(a, 1, DATA, 0x0010_0404 | RTM_ENABLE)?;
        a.mov(byte_ptr(DATA), al)?;
        a.hlt()
    });
    let arrived = guest.run().expect("a #DB");
    assert!(!arrived.transaction && arrived.dr6 == 2, "{arrived:x?}");
}

// covers: lbr/tsx-abort
#[test]
fn the_last_branch_stack_shows_a_transaction_and_its_abort() {
    for model in ["haswell", "skylake-server", "sapphirerapids"] {
        let model = x86::model::by_name(model).unwrap().with_toggles("+rtm").unwrap();
        let mut guest = Guest::new(model, |a| {
            let (mut fallback, mut next) = (a.create_label(), a.create_label());
            let (msr, on) = if model.features().arch_lbr() {
                (0x14CE, 0x7F_0007)
            } else {
                (0x1D9, 1)
            };
            a.mov(ecx, msr)?;
            a.mov(eax, on)?;
            a.xor(edx, edx)?;
            a.wrmsr()?;
            a.xbegin(fallback)?;
            a.jmp(next)?;
            a.set_label(&mut next)?;
            a.xabort(1)?;
            a.set_label(&mut fallback)?;
            a.hlt()
        });
        let mut engine = guest.memory.engine(guest.model, EngineOptions::default()).unwrap();
        while engine.get().run(&mut guest.cpu, &mut guest.machine.cpu(0), 10_000) != Exit::Halt {}
        let units = guest.machine.units(0).unwrap();
        let entries: Vec<_> = match (&units.lbr, &units.arch_lbr) {
            (Some(lbr), _) => lbr.newest().take(2).collect(),
            (_, Some(lbr)) => lbr.newest().take(2).collect(),
            _ => panic!("{} has a stack", model.name),
        };
        // Real mode: the addresses take 20 bits.
        let low = |address: u64| address & 0xF_FFFF;
        let bits = |n: usize| (entries[n].from | entries[n].info) >> 61 & 3;
        let (abort, jump) = (entries[0], entries[1]);
        assert_eq!((bits(0), bits(1)), (3, 2), "{}: {entries:x?}", model.name);
        assert_eq!(low(abort.from), low(jump.to), "{}: XABORT", model.name);
        assert_eq!(low(abort.to), low(jump.to) + 3, "{}: the fallback", model.name);
    }
}

/// Counts branches.
struct Count(std::sync::Arc<std::sync::atomic::AtomicUsize>);

impl Watch for Count {
    fn interest(&mut self, _: &mut dyn Processor) -> Interest {
        Interest {
            branches: Recorded::All,
            ..Interest::NOTHING
        }
    }
    fn branches(&mut self, records: &[BranchRecord], _: &mut dyn Processor) -> Effects {
        self.0.fetch_add(records.len(), std::sync::atomic::Ordering::Relaxed);
        // What an observer asks for has no effect on the guest.
        Effects {
            debug: Some(1),
            pmi: true,
            ..Effects::NONE
        }
    }
}

// covers: units/observer
#[test]
fn an_observer_hears_what_the_units_hear_and_changes_nothing() {
    let program: Body = |a| {
        let mut again = a.create_label();
        a.mov(cx, 100)?;
        a.set_label(&mut again)?;
        a.dec(cx)?;
        a.jnz(again)?;
        a.hlt()
    };
    let mut states = Vec::new();
    let heard = std::sync::Arc::new(std::sync::atomic::AtomicUsize::new(0));
    for observed in [false, true] {
        let mut guest = Guest::new(&SKYLAKE_SERVER, program);
        if observed {
            assert!(guest.machine.observe(0, Some(Box::new(Count(heard.clone())))));
            assert!(!guest.machine.observe(1, None), "there is one CPU");
        }
        let mut engine = guest.memory.engine(guest.model, EngineOptions::default()).unwrap();
        assert_eq!(
            engine.get().run(&mut guest.cpu, &mut guest.machine.cpu(0), 10_000),
            Exit::Halt
        );
        states.push(guest.cpu.state());
    }
    assert_eq!(states[0], states[1]);
    assert_eq!(heard.load(std::sync::atomic::Ordering::Relaxed), 100);
}
