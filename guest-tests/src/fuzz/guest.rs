//! Guests as programs: two CPUs that write whatever registers and execute whatever code, with all units on, interpreted and translated.

use engine::{Activity, CpuState};
use iced_x86::code_asm::*;
use minivmm::{Console, MachineConfig, Run, SerialTarget};
use x86::model::{CpuModel, MODELS};
use x86::msr::NAMES;

use crate::flat::{self, DATA};

/// The length of an operation: register, how far from it, value.
const OPERATION: usize = 10;
/// Where the second CPU begins.
const SECOND: u64 = DATA + 0x8_0000;
/// Steps that both CPUs may make.
const STEPS: u64 = 20_000;
/// How many are made at once.
const AT_ONCE: u64 = 1_700;

/// The first byte chooses the model, the second the number of registers that the first CPU writes; those, and then code: half of it is
/// the first CPU's, the other half the second's. Both runs end in the same state.
pub fn guest(bytes: &[u8]) {
    let Some((&[model, writes], rest)) = bytes.split_first_chunk() else {
        return;
    };
    let wide: Vec<&'static CpuModel> = MODELS.iter().copied().filter(|model| model.features().lm()).collect();
    let model = wide[usize::from(model) % wide.len()];
    let len = (usize::from(writes % 32) * OPERATION).min(rest.len());
    let (operations, code) = rest.split_at(len);
    let code = &code[..code.len().min(8192)];
    let halves = code.split_at(code.len() / 2);
    // The second one translates whatever has run once.
    let [interpreted, translated] = [None, Some(1)].map(|translate_after| {
        let config = MachineConfig {
            cpus: 2,
            serial: SerialTarget::Buffer,
            translate_after,
            translate_memory: 1 << 20,
            ..flat::config(model)
        };
        run(&config, operations, halves)
    });
    assert_eq!(
        interpreted, translated,
        "{}: two runs end in different states",
        model.name
    );
}

/// Runs it, and gives the hash of the machine and the steps that it made.
fn run(config: &MachineConfig, operations: &[u8], (first, second): (&[u8], &[u8])) -> (u64, u64) {
    let (mut vm, mut console): (Run, Console) = flat::whole_of(config, 0, &[], |a| {
        for operation in operations.chunks_exact(OPERATION) {
            let (name, offset) = (operation[0], operation[1]);
            let value = u64::from_le_bytes(operation[2..].try_into().expect("eight bytes"));
            let (msr, _) = NAMES[usize::from(name) % NAMES.len()];
            a.mov(ecx, msr + u32::from(offset & 0x1F))?;
            a.mov(eax, value as u32)?;
            a.mov(edx, (value >> 32) as u32)?;
            a.wrmsr()?;
        }
        a.db(first)?;
        a.hlt()
    });
    let memory = vm.machine().memory();
    memory.write(SECOND, second).expect("the code is in RAM");
    // An exception is one more branch, and the program goes on behind it where that can be: #GP of WRMSR, two bytes on.
    for (vector, handler) in [
        // ADD QWORD [RSP + 8], 2; ADD RSP, 8; IRETQ
        (
            13u64,
            &[0x48, 0x83, 0x44, 0x24, 8, 2, 0x48, 0x83, 0xC4, 8, 0x48, 0xCF][..],
        ),
        // ADD QWORD [RSP], 2; IRETQ
        (6, &[0x48, 0x83, 0x04, 0x24, 2, 0x48, 0xCF]),
    ] {
        memory.write(flat::handler(vector), handler).expect("RAM");
    }
    let mut state = vm.save();
    let beginning: CpuState = state.soft.cpus[0].clone();
    let other = &mut state.soft.cpus[1];
    *other = CpuState {
        rip: SECOND,
        ..beginning
    };
    other.gpr[4] = SECOND - 16;
    other.activity = Activity::Running;
    vm.set_state(&state).expect("it is its own");
    let mut made = 0;
    while made < STEPS {
        match vm.run_for(&mut console, AT_ONCE) {
            Ok(None) => {}
            Ok(Some(_)) => break,
            Err(error) => {
                // A line, as anybody would be shown it.
                let text = error.to_string();
                assert!(!text.contains('\n'), "{text}");
                break;
            }
        }
        // Both halted without anything to wake them.
        if vm.steps() == made {
            break;
        }
        made = vm.steps();
    }
    // Whatever happened, the state is one that can be handed out and taken back.
    let after = vm.save();
    let hash = vm.digest();
    vm.set_state(&after).expect("it is its own");
    assert_eq!(vm.digest(), hash);
    (hash, vm.steps())
}

/// Guests that trace, record, sample and count, and whose CPUs send each other interrupts.
pub fn guests() -> Vec<Vec<u8>> {
    let mut seeds = Vec::new();
    // mov eax, [DATA]; inc dword [DATA]; loop -10; cpuid; rdtsc; pause; xchg [DATA + 8], eax; call +0; pop rax; jmp -40
    let code = [
        0x8b, 0x04, 0x25, 0x00, 0x00, 0x20, 0x00, 0xff, 0x04, 0x25, 0x00, 0x00, 0x20, 0x00, 0xe2, 0xf0, 0x0f, 0xa2,
        0x0f, 0x31, 0xf3, 0x90, 0x87, 0x04, 0x25, 0x08, 0x00, 0x20, 0x00, 0xe8, 0, 0, 0, 0, 0x58, 0xeb, 0xdb,
    ];
    let operations: &[(u32, u64)] = &[
        (x86::msr::IA32_PERFEVTSEL0, 0x53_00C4),
        (x86::msr::IA32_PERF_GLOBAL_CTRL, 0xF),
        (x86::msr::IA32_PEBS_ENABLE, 1),
        (x86::msr::IA32_RTIT_OUTPUT_BASE, DATA + 0x1_0000),
        (x86::msr::IA32_RTIT_CTL, 0x2005),
        (x86::msr::IA32_DS_AREA, DATA + 0x2000),
        (x86::msr::IA32_DEBUGCTL, 0xC1),
    ];
    for model in 0..12u8 {
        let mut bytes = vec![model, operations.len() as u8];
        for (msr, value) in operations {
            let name = NAMES.iter().position(|(number, _)| number == msr).unwrap_or(0);
            bytes.extend([name as u8, 0]);
            bytes.extend(value.to_le_bytes());
        }
        bytes.extend(code);
        bytes.extend(code);
        seeds.push(bytes);
    }
    seeds
}
