//! PTWRITE (SDM Vol. 2B "PTWRITE—Write Data to a Processor Trace Packet"): what the trace unit hears, and where it is #UD.

use crate::{bench, rig};
use std::cell::RefCell;
use std::rc::Rc;

use bench::{Bench, handler};
use engine::Exit;
use engine::bus::{Processor, Watch};
use iced_x86::code_asm::*;
use rig::CODE;
use x86::model::{ALDERLAKE, CpuModel, MODELS, SAPPHIRERAPIDS, SKYLAKE_SERVER, SNOWRIDGE};
use x86::watch::{Change, Effects, Interest};

/// Hears changes, and where the processor is then.
#[derive(Clone, Default)]
struct Listener(Rc<RefCell<Vec<(Change, u64)>>>);

impl Watch for Listener {
    fn interest(&mut self, _: &mut dyn Processor) -> Interest {
        Interest {
            transfers: true,
            ..Interest::NOTHING
        }
    }
    fn state(&mut self, change: Change, cpu: &mut dyn Processor) -> Effects {
        self.0.borrow_mut().push((change, cpu.rip()));
        Effects::NONE
    }
}

/// Runs code to its HLT; what was heard, and the steps it took.
fn heard(b: &mut Bench, code: &[u8]) -> (Vec<(Change, u64)>, u64) {
    let listener = Listener::default();
    b.world.watch = Some(Box::new(listener.clone()));
    let s = b.cpu.state();
    b.write(s.segments[engine::CS].base + s.rip, code);
    assert_eq!(b.run(1000), Exit::Halt, "{:x?}", b.cpu.state());
    let heard = listener.0.take();
    (heard, b.cpu.state().steps - s.steps)
}

const DATA: u64 = 0x30_0000;
const VALUE: u64 = 0x1122_3344_5566_7788;

// covers: pt/ptwrite-engine
#[test]
fn the_unit_hears_operand_size_and_address() {
    for model in [&SNOWRIDGE, &SAPPHIRERAPIDS, &ALDERLAKE] {
        let mut b = Bench::long_with(model);
        b.put(DATA, VALUE);
        b.put(DATA + 8, !VALUE);
        b.state(|s| (s.gpr[3], s.gpr[13]) = (VALUE + 1, DATA + 4));
        let mut a = CodeAssembler::new(64).unwrap();
        a.nop().unwrap();
        a.ptwrite(rbx).unwrap();
        a.ptwrite(ebx).unwrap();
        a.ptwrite(qword_ptr(DATA)).unwrap();
        a.nop().unwrap();
        a.ptwrite(dword_ptr(r13)).unwrap();
        a.ptwrite(qword_ptr(r13)).unwrap();
        a.hlt().unwrap();
        let code = a.assemble(CODE).unwrap();
        let (words, steps) = heard(&mut b, &code);
        let write = |value, size, at, next| (Change::PtWrite { value, size, at }, next);
        let expected = [
            write(VALUE + 1, 8, CODE + 1, CODE + 6),
            write((VALUE + 1) & 0xffff_ffff, 4, CODE + 6, CODE + 10),
            write(VALUE, 8, CODE + 10, CODE + 20),
            write(VALUE >> 32, 4, CODE + 21, CODE + 27),
            write(VALUE >> 32 | !VALUE << 32, 8, CODE + 27, CODE + 33),
        ];
        assert_eq!(words[..5], expected, "{}", model.name);
        assert_eq!((words.len(), words[5].0, steps), (6, Change::Halt, 8));
        // Nothing else has changed.
        let s = b.cpu.state();
        assert_eq!((s.gpr[3], s.gpr[13]), (VALUE + 1, DATA + 4));
    }
}

// covers: pt/ptwrite-engine
#[test]
fn below_64_bits_the_operand_is_32_bits_and_the_address_is_linear() {
    let code = [0xf3, 0x0f, 0xae, 0xe3, 0xf4];
    for mut b in [
        Bench::protected_with(&SAPPHIRERAPIDS),
        Bench::real_with(&SAPPHIRERAPIDS),
    ] {
        b.state(|s| s.gpr[3] = VALUE);
        let s = b.cpu.state();
        let at = s.segments[engine::CS].base + s.rip;
        let (words, _) = heard(&mut b, &code);
        let value = VALUE & 0xffff_ffff;
        assert_eq!(words[0].0, Change::PtWrite { value, size: 4, at });
    }
}

// covers: pt/ptwrite-engine
#[test]
fn nobody_listens() {
    let mut b = Bench::long_with(&SAPPHIRERAPIDS);
    b.write(CODE, &[0xf3, 0x48, 0x0f, 0xae, 0xe3, 0xf3, 0x0f, 0xae, 0x23, 0xf4]);
    b.state(|s| s.gpr[3] = DATA);
    assert_eq!(b.run(1000), Exit::Halt);
    assert_eq!(b.cpu.rip(), CODE + 10);
}

// covers: pt/ptwrite-engine
#[test]
fn an_operand_that_faults_is_not_written() {
    let mut b = Bench::long_with(&SAPPHIRERAPIDS);
    let listener = Listener::default();
    b.world.watch = Some(Box::new(listener.clone()));
    // Beyond the tables.
    b.state(|s| s.gpr[3] = 1 << 40);
    b.write(CODE, &[0xf3, 0x0f, 0xae, 0x23]);
    assert_eq!(b.faults(), (14, Some(0)));
    assert!(
        !listener
            .0
            .borrow()
            .iter()
            .any(|(c, _)| matches!(c, Change::PtWrite { .. }))
    );
}

// covers: pt/ptwrite-ud
#[test]
fn what_is_no_ptwrite() {
    let ud = |model: &'static CpuModel, code: &[u8]| {
        let mut b = if model.features().lm() {
            Bench::long_with(model)
        } else {
            Bench::protected_with(model)
        };
        b.state(|s| s.gpr[3] = DATA);
        let (start, mut bytes) = (b.cpu.rip(), code.to_vec());
        bytes.push(0xf4);
        b.write(start, &bytes);
        assert_eq!(b.run(10), Exit::Halt);
        match b.cpu.rip() {
            at if at == start + bytes.len() as u64 => false,
            at => {
                assert_eq!(at, handler(6) + 1, "{} {code:x?}", model.name);
                true
            }
        }
    };
    for &model in MODELS {
        // CPUID.14H.0:EBX[4].
        let absent = model.cpuid(0x14, 0)[1] & 0x10 == 0;
        assert_eq!(ud(model, &[0xf3, 0x0f, 0xae, 0xe3]), absent, "{}", model.name);
        assert_eq!(ud(model, &[0xf3, 0x0f, 0xae, 0x23]), absent, "{}", model.name);
    }
    assert!(ud(&SKYLAKE_SERVER, &[0xf3, 0x48, 0x0f, 0xae, 0xe3]));
    for (code, why) in [
        (&[0xf0, 0xf3, 0x0f, 0xae, 0x23][..], "LOCK"),
        (&[0xf0, 0xf3, 0x0f, 0xae, 0xe3], "LOCK and a register"),
        (&[0x66, 0xf3, 0x0f, 0xae, 0xe3], "66H and a register"),
        (&[0xf3, 0x66, 0x0f, 0xae, 0xe3], "66H after F3H"),
        (&[0x66, 0xf3, 0x0f, 0xae, 0x23], "66H and memory"),
        (&[0x66, 0xf3, 0x48, 0x0f, 0xae, 0x23], "66H and REX.W"),
    ] {
        assert!(ud(&SAPPHIRERAPIDS, code), "{why}");
    }
}
