//! Architectural last-branch records. SDM Vol. 3B chapter 19 "Last Branch Records".

use alloc::vec::Vec;

use rt::cpu::{leaf, read, refuses, write};
use rt::{exception, need};
use x86::lbr::{LbrCtl, LbrInfo, branch_type};
use x86::msr::*;

use crate::pattern::{self, Kind};

const ON: LbrCtl = LbrCtl::new()
    .with_lbr_en(true)
    .with_os(true)
    .with_usr(true)
    .with_cond(true)
    .with_near_rel_jmp(true)
    .with_near_ind_jmp(true)
    .with_near_rel_call(true)
    .with_near_ind_call(true)
    .with_near_ret(true)
    .with_other_branch(true);

fn depth() -> u32 {
    read(IA32_LBR_DEPTH) as u32
}

/// FROM, TO and INFO, newest first: entry 0 is the newest.
fn records() -> Vec<(u64, u64, LbrInfo)> {
    (0..depth())
        .map(|n| {
            let info = LbrInfo::from_bits(read(IA32_LBR_0_INFO + n));
            (read(IA32_LBR_0_FROM_IP + n), read(IA32_LBR_0_TO_IP + n), info)
        })
        .collect()
}

/// Writing the depth clears the records.
fn clear() {
    write(IA32_LBR_CTL, 0u64);
    let all = 8 * (32 - (leaf(0x1C, 0)[0] & 0xFF).leading_zeros());
    write(IA32_LBR_DEPTH, all);
    assert!(records().iter().all(|r| (r.0, r.1) == (0, 0)));
}

/// IA32_LBR_DEPTH takes the depths of CPUID.1CH:EAX\[7:0\] and no other, and clears the records.
fn depths() {
    let depths = leaf(0x1C, 0)[0] & 0xFF;
    for n in 1..=8u32 {
        if depths >> (n - 1) & 1 != 0 {
            write(IA32_LBR_DEPTH, 8 * n);
            assert_eq!(depth(), 8 * n);
        } else {
            refuses(IA32_LBR_DEPTH, u64::from(8 * n));
        }
    }
    refuses(IA32_LBR_DEPTH, 4);
    clear();
}

/// Reserved bits of IA32_LBR_CTL.
fn reserved_bits() {
    refuses(IA32_LBR_CTL, 1 << 63);
    refuses(IA32_LBR_CTL, 1 << 4);
    write(IA32_LBR_CTL, ON.into_bits());
    assert_eq!(read(IA32_LBR_CTL), ON.into_bits());
}

/// IA32_DEBUGCTL.LBR is ignored: it reads 0 and switches nothing on.
fn debugctl_lbr_is_nothing() {
    clear();
    write(IA32_DEBUGCTL, 1u64);
    assert_eq!(read(IA32_DEBUGCTL), 0);
    pattern::run(IA32_DEBUGCTL, 1, 0);
    assert!(records().iter().all(|r| r.0 == 0));
}

/// Entry 0 is the newest; types and order are those of the branches.
fn branches_in_order() {
    clear();
    pattern::run(IA32_LBR_CTL, ON.into_bits(), 0);
    let seen = records();
    for (n, branch) in pattern::branches().iter().rev().enumerate() {
        assert_eq!((seen[n].0, seen[n].1), (branch.from, branch.to), "entry {n}");
        let kind = match branch.kind {
            Kind::Cond => branch_type::COND,
            Kind::JumpInd => branch_type::NEAR_IND_JMP,
            Kind::Jump => branch_type::NEAR_REL_JMP,
            Kind::CallInd => branch_type::NEAR_IND_CALL,
            Kind::Call => branch_type::NEAR_REL_CALL,
            Kind::Ret => branch_type::NEAR_RET,
        };
        if leaf(0x1C, 0)[2] & 4 != 0 {
            assert_eq!(seen[n].2.branch_type(), kind, "entry {n}");
        }
    }
    assert_eq!(seen[7].0, 0);
}

/// Without its bit a kind is not recorded.
fn filters_by_kind() {
    for (ctl, kind) in [
        (ON.with_cond(false), Kind::Cond),
        (ON.with_near_rel_jmp(false), Kind::Jump),
        (ON.with_near_ind_jmp(false), Kind::JumpInd),
        (ON.with_near_rel_call(false), Kind::Call),
        (ON.with_near_ind_call(false), Kind::CallInd),
        (ON.with_near_ret(false), Kind::Ret),
    ] {
        clear();
        pattern::run(IA32_LBR_CTL, ctl.into_bits(), 0);
        let seen: Vec<_> = records().into_iter().filter(|r| r.0 != 0).map(|r| r.0).collect();
        let rest = pattern::branches().into_iter().rev().filter(|b| b.kind != kind);
        assert_eq!(seen, rest.map(|b| b.from).collect::<Vec<_>>(), "without {kind:?}");
    }
}

/// OS and USR.
fn filters_by_ring() {
    clear();
    write(IA32_LBR_CTL, ON.with_os(false).with_other_branch(false).into_bits());
    pattern::user();
    write(IA32_LBR_CTL, 0u64);
    let seen: Vec<_> = records().into_iter().filter(|r| r.0 != 0).collect();
    assert_eq!(seen.len(), pattern::USER);
    assert!(seen.iter().all(|r| pattern::is_user(r.0) && pattern::is_user(r.1)));
}

/// 19.1.2: a #DB clears LBREn.
fn debug_exceptions_switch_them_off() {
    clear();
    exception::on(exception::DB, |_| {});
    // INT1 is one, whatever prefixes it has.
    let causes: [fn() -> u64; 3] = [
        || rt::call!(dr_icebp()),
        || rt::call!(dr_icebp_3e()),
        || rt::call!(dr_icebp_rex()),
    ];
    for cause in causes {
        write(IA32_LBR_CTL, ON.into_bits());
        cause();
        let after = read(IA32_LBR_CTL);
        write(IA32_LBR_CTL, 0u64);
        assert_eq!(after, ON.with_lbr_en(false).into_bits());
    }
}

rt::tests! {
    "tests_arch_lbr";
    depths: need::ARCH_LBR;
    reserved_bits: need::ARCH_LBR;
    debugctl_lbr_is_nothing: need::ARCH_LBR;
    branches_in_order: need::ARCH_LBR;
    filters_by_kind: need::ARCH_LBR;
    filters_by_ring: need::ARCH_LBR;
    debug_exceptions_switch_them_off: need::ARCH_LBR;
}
