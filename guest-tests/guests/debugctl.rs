//! IA32_DEBUGCTL and stepping by branches. SDM Vol. 3B 18.4.1 "IA32_DEBUGCTL MSR", 18.4.3 "Single-Stepping on Branches".

use alloc::vec::Vec;
use core::sync::atomic::{AtomicU64, Ordering::SeqCst};

use rt::cpu::{self, rdmsr, read, refuses, write, wrmsr};
use rt::debug::{BS, CLEAR, hits, watch};
use rt::exception::{self, Fault, GP};
use rt::need::{self, LbrStack};
use rt::{call, label, paging, user};
use x86::cpuid::Feature;
use x86::debugctl::DebugCtl;
use x86::msr::{IA32_DEBUGCTL, IA32_DS_AREA, MSR_LASTBRANCH_TOS};

use crate::pattern;

core::arch::global_asm!(
    r#"
    .text
    .globl ctl_user_read, ctl_user_write, ctl_btf, ctl_btf_1, ctl_btf_2, ctl_btf_3, ctl_btf_end
ctl_user_read:
    mov     ecx, 0x1d9
    rdmsr
    int     0x80
ctl_user_write:
    mov     ecx, 0x1d9
    xor     eax, eax
    xor     edx, edx
    wrmsr
    int     0x80

    # btf(IA32_DEBUGCTL): the first trap of TF with BTF
ctl_btf:
    mov     ecx, 0x1d9
    mov     eax, edi
    xor     edx, edx
    wrmsr
    pushfq
    or      qword ptr [rsp], 0x100
    popfq
    nop
    nop
    test    eax, eax
ctl_btf_1:
    jmp     ctl_btf_2
    nop
ctl_btf_2:
    nop
ctl_btf_3:
    pushfq
    and     qword ptr [rsp], -257
    popfq
ctl_btf_end:
    ret
"#
);

/// The bits that each part has, as software finds them: by features, and by what came with the debug store.
fn writable_bits() {
    let has = cpu::has;
    let pmu = need::pmu_version() >= 2;
    // TR, BTF everywhere; LBR is ignored where the records are architectural.
    let mut known = 1 << 1 | 1 << 6;
    let mut either = 1;
    if has(Feature::Ds) {
        known |= 1 << 7 | 1 << 8;
    } else {
        either |= 1 << 7 | 1 << 8;
    }
    if has(Feature::DsCpl) {
        known |= 3 << 9;
    }
    if pmu {
        known |= 3 << 11;
    }
    if has(Feature::BusLockDetect) {
        known |= 1 << 2;
    }
    // ENABLE_UNCORE_PMI is a model's own.
    either |= 1 << 13;
    for bit in 0..64 {
        let value = 1u64 << bit;
        let taken = wrmsr(IA32_DEBUGCTL, value);
        if known & value != 0 {
            assert_eq!(taken, Ok(()), "bit {bit}");
            assert_eq!(read(IA32_DEBUGCTL), value, "bit {bit}");
        } else if either & value == 0 {
            let smm = bit == 14 && need::perf_capabilities() >> 12 & 1 != 0;
            let rtm = bit == 15 && has(Feature::Rtm);
            if !smm && !rtm {
                assert_eq!(taken, Err(Fault::GP0), "bit {bit}");
            }
        }
        write(IA32_DEBUGCTL, 0u64);
    }
    refuses(IA32_DEBUGCTL, 1 << 3);
    refuses(IA32_DEBUGCTL, 1 << 63);
}

static AT: AtomicU64 = AtomicU64::new(0);

/// RDMSR and WRMSR outside ring 0 are #GP(0).
fn rings_above_0_are_refused() {
    exception::on(GP, |frame| {
        assert_eq!(frame.error, 0);
        AT.store(frame.rip, SeqCst);
        frame.rip += 2;
    });
    for routine in [label!(ctl_user_read), label!(ctl_user_write)] {
        AT.store(0, SeqCst);
        user::run(routine, 0, 0);
        assert!(
            (routine + 5..routine + 16).contains(&AT.load(SeqCst)),
            "{:X}H",
            AT.load(SeqCst)
        );
    }
}

/// 18.4.3: with BTF the trap comes after the next taken branch, and BS is set.
fn btf_steps_branches() {
    watch();
    call!(ctl_btf(DebugCtl::new().with_btf(true).into_bits()));
    let all = hits();
    // The first is at the jump's target; its delivery cleared BTF, so that the rest are single steps.
    assert_eq!((all[0].rip, all[0].dr6), (label!(ctl_btf_2), CLEAR | BS));
    assert_eq!(all[1].rip, label!(ctl_btf_3));
    assert_eq!(read(IA32_DEBUGCTL), 0);
}

/// Set again by the handler, BTF skips all that is straight-line code.
fn btf_again() {
    watch();
    exception::on(exception::DB, |frame| {
        rt::debug::log(frame);
        write(IA32_DEBUGCTL, DebugCtl::new().with_btf(true).into_bits());
    });
    call!(ctl_btf(DebugCtl::new().with_btf(true).into_bits()));
    let rips: Vec<_> = hits().iter().map(|hit| hit.rip).collect();
    assert_eq!(rips, [label!(ctl_btf_2)]);
}

/// BTF without TF does nothing.
fn btf_without_tf() {
    watch();
    pattern::run(IA32_DEBUGCTL, DebugCtl::new().with_btf(true).into_bits(), 0);
    assert_eq!(hits(), []);
}

/// 18.4.2, 18.4.3: a #DB clears LBR and BTF, not TR.
fn debug_exceptions_clear_lbr_and_btf() {
    exception::on(exception::DB, |_| AT.store(read(IA32_DEBUGCTL), SeqCst));
    let all = DebugCtl::new().with_lbr(true).with_btf(true).with_tr(true);
    // INT1, with and without prefixes, is a debug exception; INT 1 is a software interrupt like any other.
    let causes: [(fn() -> u64, bool); 6] = [
        (|| call!(dr_icebp()), true),
        (|| call!(dr_icebp_66()), true),
        (|| call!(dr_icebp_3e()), true),
        (|| call!(dr_icebp_rex()), true),
        (|| call!(dr_icebp_all()), true),
        (|| call!(dr_int_1()), false),
    ];
    for (n, (cause, clears)) in causes.into_iter().enumerate() {
        write(IA32_DEBUGCTL, all);
        // Where last-branch records are architectural LBR reads 0.
        let before = read(IA32_DEBUGCTL);
        AT.store(0, SeqCst);
        cause();
        let after = if clears {
            DebugCtl::new().with_tr(true).into_bits()
        } else {
            before
        };
        assert_eq!(AT.load(SeqCst), after, "cause {n}");
    }
}

/// 18.4.4: messages of TR without BTS go nowhere in memory.
fn tr_alone_stores_nothing() {
    let area = paging::pages(2);
    for (field, value) in [
        (0, area + 4096),
        (1, area + 4096),
        (2, area + 4096 + 240),
        (3, area + 4096 + 240),
    ] {
        paging::poke(area + 8 * field, value);
    }
    write(IA32_DS_AREA, area);
    pattern::run(IA32_DEBUGCTL, DebugCtl::new().with_tr(true).into_bits(), 0);
    assert_eq!(paging::peek(area + 8), area + 4096);
    assert_eq!(paging::peek(area + 4096), 0);
}

/// On the Core microarchitecture TR alone keeps the stack of records moving; on later parts it does not. 18.4.4 "Branch
/// Trace Messages".
fn tr_alone_and_the_stack() {
    let stack = LbrStack::here().expect("the table says LBR");
    let before = read(MSR_LASTBRANCH_TOS);
    pattern::run(IA32_DEBUGCTL, DebugCtl::new().with_tr(true).into_bits(), 0);
    let after = read(MSR_LASTBRANCH_TOS);
    let moves = cpu::family_model() == (6, 0x0F);
    let expected = if moves {
        (before + 7) % u64::from(stack.depth)
    } else {
        before
    };
    assert_eq!(after, expected);
}

/// The register is there on every part since the P6 family.
fn it_is_there() {
    assert_eq!(rdmsr(IA32_DEBUGCTL), Ok(0));
}

rt::tests! {
    "tests_debugctl";
    it_is_there;
    writable_bits;
    rings_above_0_are_refused;
    btf_steps_branches;
    btf_again;
    btf_without_tf;
    debug_exceptions_clear_lbr_and_btf;
    tr_alone_stores_nothing: need::DS;
    tr_alone_and_the_stack: need::LBR;
}
