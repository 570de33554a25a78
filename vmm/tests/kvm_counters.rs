//! Counters of ours while the guest is in KVM: RDPMC is caught, cycles go on counting, overflows interrupt. Where there is no KVM
//! the tests say so and skip.

use crate::common;
use common::long::{COUNTS, Result, STRINGS, guest, raise};
use common::{Folder, kvm_is_missing};
use iced_x86::code_asm::*;
use kvm::units::{Unit, UnitRequest, UnitRequests};
use minivmm::StopReason;
use minivmm::config::{EngineChoice, KvmDefects};
use minivmm::{Console, End, MachineConfig, Run, SerialTarget};
use x86::model::HASWELL;

const IA32_APIC_BASE: u32 = 0x1b;
const IA32_FIXED_CTR1: u32 = 0x30a;
const IA32_FIXED_CTR_CTRL: u32 = 0x38d;
const IA32_PERF_GLOBAL_STATUS: u32 = 0x38e;
const IA32_PERF_GLOBAL_CTRL: u32 = 0x38f;
const X2APIC_SVR: u32 = 0x80f;
const X2APIC_LVTPC: u32 = 0x834;
/// RDPMC's number of the counter of cycles.
const FIXED_CYCLES: u32 = 0x4000_0001;

fn write(a: &mut CodeAssembler, msr: u32, value: u64) -> Result {
    a.mov(ecx, msr)?;
    a.mov(eax, value as u32)?;
    a.mov(edx, (value >> 32) as u32)?;
    a.wrmsr()
}

/// RDX:RAX into RAX.
fn join(a: &mut CodeAssembler) -> Result {
    a.shl(rdx, 32)?;
    a.or(rax, rdx)
}

fn spin(a: &mut CodeAssembler, count: u32) -> Result {
    a.mov(edi, count)?;
    let mut again = a.create_label();
    a.set_label(&mut again)?;
    a.dec(edi)?;
    a.jnz(again)
}

/// Runs a program to its end; what it has stored by a word's number, and the machine.
fn run(program: impl FnOnce(&mut CodeAssembler) -> Result) -> (impl Fn(u32) -> u64, Run) {
    let folder = Folder::new();
    let image = guest(|a| {
        program(a)?;
        a.xor(eax, eax)?;
        a.out(0xf4, al)
    });
    let config = MachineConfig {
        memory: 8 << 20,
        model: &HASWELL,
        engine: EngineChoice::Kvm,
        kvm_defects: KvmDefects::Accept,
        units: UnitRequests::default().with(Unit::Pmu, Some(UnitRequest::Emulated)),
        ..MachineConfig::new(folder.file("program", image))
    };
    let mut vm = Run::new(&config).unwrap();
    let mut console = Console::open(&SerialTarget::Buffer, &[], vm.line()).unwrap();
    let end = vm.run(&mut console).unwrap();
    assert!(matches!(end, StopReason::Ended(End::DebugExit(0))), "{end:?}");
    let mut memory = vec![0; 0x4_0000];
    vm.read_physical(COUNTS.into(), &mut memory).unwrap();
    let word = move |at: u32| u64::from_le_bytes(memory[(at - COUNTS) as usize..][..8].try_into().unwrap());
    (word, vm)
}

/// Whether this test is to be skipped, as breakpoints of the host's do not come out of KVM here.
fn is_missing(test: &str) -> bool {
    if kvm_is_missing(test) {
        return true;
    }
    let kinds = kvm::Host::open().unwrap().guest_debug().unwrap();
    if !kinds.serves_breakpoints() {
        println!("SKIPPED {test}: this KVM delivers {kinds} to the host");
    }
    !kinds.serves_breakpoints()
}

// covers: kvm/rdpmc-caught
#[test]
fn rdpmc_reads_what_counts_in_kvm_and_real_faults_stay_the_guests() {
    if is_missing("RDPMC in KVM") {
        return;
    }
    const ROUNDS: u32 = 40;
    let (word, mut vm) = run(|a| {
        write(a, IA32_FIXED_CTR_CTRL, 0x30)?;
        write(a, IA32_PERF_GLOBAL_CTRL, 1 << 33)?;
        a.xor(r12d, r12d)?;
        a.mov(ebp, ROUNDS)?;
        let mut again = a.create_label();
        a.set_label(&mut again)?;
        spin(a, 100)?;
        a.mov(rbx, 0x1234_5678_9abc_def0u64)?;
        a.mov(rsi, rsp)?;
        a.mov(ecx, FIXED_CYCLES)?;
        a.stc()?;
        a.rdpmc()?;
        // The stack and the flags are as they were.
        a.setc(byte_ptr(STRINGS + 0x40))?;
        a.sub(rsi, rsp)?;
        a.add(qword_ptr(STRINGS + 0x48), rsi)?;
        join(a)?;
        a.cmp(rax, r12)?;
        a.mov(r12, rax)?;
        a.seta(al)?;
        a.movzx(eax, al)?;
        a.add(qword_ptr(STRINGS), rax)?;
        a.dec(ebp)?;
        a.jnz(again)?;
        a.mov(qword_ptr(STRINGS + 8), r12)?;
        // The register says no less, and RDPMC no less than that.
        a.mov(ecx, IA32_FIXED_CTR1)?;
        a.rdmsr()?;
        join(a)?;
        a.mov(qword_ptr(STRINGS + 0x10), rax)?;
        a.mov(ecx, FIXED_CYCLES)?;
        a.rdpmc()?;
        join(a)?;
        a.mov(qword_ptr(STRINGS + 0x18), rax)?;
        raise(a, |a| {
            a.mov(ecx, 0x55)?;
            a.rdpmc()
        })?;
        raise(a, |a| {
            a.mov(ecx, 0x1234_5678)?;
            a.rdmsr()
        })?;
        a.mov(qword_ptr(STRINGS + 0x20), rbx)
    });
    assert_eq!(word(STRINGS), u64::from(ROUNDS), "each time it has gone on");
    assert_eq!((word(STRINGS + 0x40) & 0xff, word(STRINGS + 0x48)), (1, 0));
    let [rdpmc, rdmsr, again] = [8, 0x10, 0x18].map(|at| word(STRINGS + at));
    assert!(0 < rdpmc && rdpmc < rdmsr && rdmsr < again, "{rdpmc} {rdmsr} {again}");
    assert_eq!(
        word(COUNTS + 13 * 8),
        2,
        "a counter that is not there, and a register that is not"
    );
    assert_eq!(word(STRINGS + 0x20), 0x1234_5678_9abc_def0);
    let native = vm.stats().native.unwrap();
    assert_eq!(native.watched, 0, "it has counted in KVM");
    assert!(native.emulated > u64::from(ROUNDS), "{}", native.emulated);
}

// covers: kvm/native-counters
#[test]
fn an_overflow_in_kvm_interrupts_and_the_engine_takes_it_from_there() {
    if is_missing("an overflow in KVM") {
        return;
    }
    /// Two milliseconds or so.
    const CYCLES: u64 = 5_000_000;
    let (word, mut vm) = run(|a| {
        write(a, IA32_APIC_BASE, 0xfee0_0d00)?;
        write(a, X2APIC_SVR, 0x1ff)?;
        write(a, X2APIC_LVTPC, 0x40)?;
        write(a, IA32_FIXED_CTR1, (1 << 48) - CYCLES)?;
        write(a, IA32_FIXED_CTR_CTRL, 0xb0)?;
        a.rdtsc()?;
        join(a)?;
        a.mov(rbp, rax)?;
        // What is halted does not count.
        write(a, IA32_PERF_GLOBAL_CTRL, 1 << 33)?;
        let (mut again, mut behind) = (a.create_label(), a.create_label());
        a.lea(r15, ptr(behind))?;
        a.sti()?;
        a.set_label(&mut again)?;
        a.inc(qword_ptr(STRINGS))?;
        a.jmp(again)?;
        a.set_label(&mut behind)?;
        a.cli()?;
        a.rdtsc()?;
        join(a)?;
        a.sub(rax, rbp)?;
        a.mov(qword_ptr(STRINGS + 8), rax)?;
        a.mov(ecx, IA32_PERF_GLOBAL_STATUS)?;
        a.rdmsr()?;
        join(a)?;
        a.mov(qword_ptr(STRINGS + 0x10), rax)
    });
    assert_eq!(word(COUNTS + 0x40 * 8), 1);
    assert_eq!(word(STRINGS + 0x10), 1 << 33);
    let ticks = word(STRINGS + 8);
    assert!(
        ticks >= CYCLES,
        "{ticks} ticks: it cannot come before its cycles have passed"
    );
    assert!(word(STRINGS) > 100, "the loop ran {} times", word(STRINGS));
    let native = vm.stats().native.unwrap();
    assert_eq!(native.watched, 1, "for the interrupt, and not before");
}
