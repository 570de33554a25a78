//! What the parts without 64-bit mode have, and what 32-bit code sees on the others: the P6 family's and the Pentium 4's last
//! branches, 32-bit records of the branch trace store, P6's counters. SDM Vol. 3B 18.13 "(Pentium 4) Last Branch, Interrupt, and
//! Exception Recording", 18.16 "(P6 Family) Last Branch, Interrupt, and Exception Recording", 18.4.9.1 "64 Bit Format of the DS Save
//! Area".
//!
//! There is no test of 32-bit PEBS records (28H): no model has PEBS without DTES64.

use rt::at;
use rt::monitor::{Op, Register};

core::arch::global_asm!(
    r#"
    .text
    .code32
    .globl  lg_debugctl, lg_branches, lg_from_1, lg_to_1, lg_from_2, lg_to_2, lg_from_3, lg_to_3, lg_newest, lg_exception
    .globl  lg_before, lg_before_to, lg_ud, lg_count10, lg_count20, lg_area, lg_records, lg_step
    # IA32_DEBUGCTL as lg_debugctl says, three jumps, and off.
lg_branches:
    mov     ecx, 0x1d9
    mov     eax, [lg_debugctl]
    xor     edx, edx
    wrmsr
lg_from_1:
    jmp     lg_to_1
    nop
lg_to_1:
    xor     eax, eax
lg_from_2:
    jz      lg_to_2
    nop
lg_to_2:
    mov     eax, offset lg_to_3
lg_from_3:
    jmp     eax
    nop
lg_to_3:
    xor     eax, eax
    wrmsr
    ret

    # The newest of the Pentium 4's registers.
lg_newest:
    mov     ecx, 0x1da
    rdmsr
    and     eax, 3
    lea     ecx, [eax + 0x1db]
    rdmsr
    ret

    # A jump, then an exception.
lg_exception:
    mov     dword ptr [monitor_resume], offset lg_resume
    mov     ecx, 0x1d9
    mov     eax, 1
    xor     edx, edx
    wrmsr
lg_before:
    jmp     lg_before_to
    nop
lg_before_to:
    nop
lg_ud:
    ud2
lg_resume:
    mov     ecx, 0x1d9
    xor     eax, eax
    xor     edx, edx
    wrmsr
    ret

    # P6: instructions that retire between two writes of PerfEvtSel0, with ten and with twenty more.
lg_count10:
    call    lg_start
    .rept   10
    nop
    .endr
    jmp     lg_stop
lg_count20:
    call    lg_start
    .rept   20
    nop
    .endr
    jmp     lg_stop
lg_start:
    mov     ecx, 0xc1
    xor     eax, eax
    xor     edx, edx
    wrmsr
    mov     ecx, 0x186
    mov     eax, 0x4300c0
    wrmsr
    ret
lg_stop:
    mov     ecx, 0x186
    xor     eax, eax
    xor     edx, edx
    wrmsr
    mov     ecx, 0xc1
    rdmsr
    ret

    # BTF and TF: steps from branch to branch.
lg_step:
    mov     ecx, 0x1d9
    mov     eax, 2
    xor     edx, edx
    wrmsr
    pushfd
    or      dword ptr [esp], 0x100
    popfd
    nop
    nop
    jmp     2f
    nop
    .globl  lg_stepped
lg_stepped:
2:  nop
    ret

    .data
    .balign 8
lg_debugctl: .long 0
    .bss
    .balign 4096
lg_area:     .skip 4096
lg_records:  .skip 4096
    .text
    .code64
"#
);

const DEBUGCTL: u32 = 0x1D9;
const DS_AREA: u32 = 0x600;

/// Leaf 1 to R; the P6 family without debug store: Pentium Pro to III.
const P6: [Op; 4] = [
    Op::cpuid(1, Register::Eax),
    Op::needs(0xF00, 0x600, 0, c"not of the P6 family (CPUID.1:EAX[11:8] is not 6)"),
    Op::cpuid(1, Register::Edx),
    Op::needs(
        1 << 21,
        0,
        0,
        c"a later part of family 6 (CPUID.1:EDX[21], debug store, is 1)",
    ),
];
const NETBURST: [Op; 2] = [
    Op::cpuid(1, Register::Eax),
    Op::needs(0xF00, 0xF00, 0, c"not a Pentium 4 (CPUID.1:EAX[11:8] is not 15)"),
];
const DS: [Op; 2] = [
    Op::cpuid(1, Register::Edx),
    Op::needs(1 << 21, 1 << 21, DS_AREA, c"no debug store (CPUID.1:EDX[21] is 0)"),
];

rt::tests32! {
    "tests32_legacy";

    // DebugCtlMSR: LBR, BTF, PB0 to PB3, TR; the rest is reserved.
    p6_debugctl {
        P6[0], P6[1], P6[2], P6[3],
        Op::wrmsr(DEBUGCTL, 0x7E),
        Op::is_fine(),
        Op::rdmsr(DEBUGCTL),
        Op::expect(!0, 0x7E),
        Op::wrmsr(DEBUGCTL, 0x80),
        Op::is_gp(),
        Op::wrmsr(DEBUGCTL, 1 << 32),
        Op::is_gp(),
    }

    // LastBranchFromIP and LastBranchToIP: the newest branch.
    p6_last_branch {
        P6[0], P6[1], P6[2], P6[3],
        Op::store(at!(lg_debugctl), 0, 1),
        Op::call(at!(lg_branches)),
        Op::rdmsr(0x1DB),
        Op::expect_at(at!(lg_from_3)),
        Op::rdmsr(0x1DC),
        Op::expect_at(at!(lg_to_3)),
        Op::rdmsr(0x680),
        Op::is_gp(),
        Op::rdmsr(0x1C9),
        Op::is_gp(),
    }

    // At an exception the branch pair goes to the exception pair, before the exception itself is the last branch.
    p6_last_exception {
        P6[0], P6[1], P6[2], P6[3],
        Op::call(at!(lg_exception)),
        Op::rdmsr(0x1DD),
        Op::expect_at(at!(lg_before)),
        Op::rdmsr(0x1DE),
        Op::expect_at(at!(lg_before_to)),
    }

    // PerfEvtSel0 and PerfCtr0: ten instructions more are ten more.
    p6_counts_instructions {
        P6[0], P6[1], P6[2], P6[3],
        Op::call(at!(lg_count10)),
        Op::expect(!0, 16),
        Op::call(at!(lg_count20)),
        Op::expect(!0, 26),
        Op::rdmsr(0x38F),
        Op::is_gp(),
        Op::rdmsr(0x309),
        Op::is_gp(),
    }

    // WRMSR of a counter sign-extends bit 31 to its 40 bits.
    p6_counters_are_sign_extended {
        P6[0], P6[1], P6[2], P6[3],
        Op::wrmsr(0xC1, 0x8000_0000),
        Op::is_fine(),
        Op::rdmsr(0xC1),
        Op::expect(!0, 0xFF_8000_0000),
        Op::wrmsr(0xC1, 0x7FFF_FFFF),
        Op::rdmsr(0xC1),
        Op::expect(!0, 0x7FFF_FFFF),
    }

    // WRMSR of the time-stamp counter reaches the low half, and clears the high one.
    the_tsc_is_written_in_its_low_half {
        Op::cpuid(0x8000_0001, Register::Edx),
        Op::needs(1 << 29, 0, 0, c"64-bit parts write all of it (CPUID.80000001H:EDX[29] is 1)"),
        Op::wrmsr(0x10, 0x1234_5678_0000_0000),
        Op::is_fine(),
        Op::rdmsr(0x10),
        Op::expect(0xFFFF_FFFF_0000_0000, 0),
    }

    // MSR_DEBUGCTLA: LBR, BTF, TR, BTS, BTINT.
    netburst_debugctl {
        NETBURST[0], NETBURST[1],
        Op::wrmsr(DEBUGCTL, 0x16),
        Op::is_fine(),
        Op::rdmsr(DEBUGCTL),
        Op::expect(!0, 0x16),
        Op::wrmsr(DEBUGCTL, 0x80),
        Op::is_gp(),
    }

    // Four registers from 1DBH on, FROM in the low half and TO in the high half, the newest at TOS.
    netburst_last_branches {
        NETBURST[0], NETBURST[1],
        Op::store(at!(lg_debugctl), 0, 1),
        Op::call(at!(lg_branches)),
        Op::call(at!(lg_newest)),
        Op::expect_at(at!(lg_from_3)),
        Op::swap(),
        Op::expect_at(at!(lg_to_3)),
        Op::rdmsr(0x1DF),
        Op::is_gp(),
    }

    // Its own performance counters are absent, which is a decision.
    netburst_has_no_counters {
        NETBURST[0], NETBURST[1],
        Op::rdmsr(0x300),
        Op::is_gp(),
        Op::rdmsr(0x186),
        Op::is_gp(),
    }

    // Records of 12 bytes and fields of 4 where DTES64 is clear.
    bts_records_of_32_bits {
        DS[0], DS[1],
        Op::cpuid(1, Register::Ecx),
        Op::needs(1 << 2, 0, 0, c"the 64-bit layout (CPUID.1:ECX.DTES64 is 1)"),
        Op::store_at(at!(lg_area), 0, at!(lg_records)),
        Op::store_at(at!(lg_area), 4, at!(lg_records)),
        Op::store(at!(lg_area), 8, 0x7FFF_FFFF),
        Op::store(at!(lg_area), 12, 0x7FFF_FFFF),
        Op::wrmsr_at(DS_AREA, at!(lg_area)),
        Op::is_fine(),
        Op::store(at!(lg_debugctl), 0, 0xC),
        Op::call(at!(lg_branches)),
        Op::load(at!(lg_records), 0),
        Op::expect_at(at!(lg_from_1)),
        Op::load(at!(lg_records), 4),
        Op::expect_at(at!(lg_to_1)),
        Op::load(at!(lg_records), 12),
        Op::expect_at(at!(lg_from_2)),
        Op::load(at!(lg_records), 24),
        Op::expect_at(at!(lg_from_3)),
        Op::load(at!(lg_records), 28),
        Op::expect_at(at!(lg_to_3)),
        // The fourth would be here.
        Op::load(at!(lg_records), 36),
        Op::expect(0xFFFF_FFFF, 0),
        Op::wrmsr(DS_AREA, 0),
    }

    // DTES64: the 64-bit layout in 32-bit code, too. DebugCtl's TR and BTS are bits 6 and 7.
    bts_records_of_64_bits_in_32_bit_code {
        DS[0], DS[1],
        Op::cpuid(1, Register::Ecx),
        Op::needs(1 << 2, 1 << 2, 0, c"the 32-bit layout (CPUID.1:ECX.DTES64 is 0)"),
        Op::store(at!(lg_records), 0, 0),
        Op::store_at(at!(lg_area), 0, at!(lg_records)),
        Op::store_at(at!(lg_area), 8, at!(lg_records)),
        Op::store(at!(lg_area), 16, 0x7FFF_FFFF),
        Op::store(at!(lg_area), 24, 0x7FFF_FFFF),
        Op::wrmsr_at(DS_AREA, at!(lg_area)),
        Op::is_fine(),
        Op::store(at!(lg_debugctl), 0, 0xC0),
        Op::call(at!(lg_branches)),
        Op::load(at!(lg_records), 0),
        Op::expect(0xFFFF_FFFF_0000_0000, 0),
        Op::expect_at(at!(lg_from_1)),
        Op::load(at!(lg_records), 8),
        Op::expect_at(at!(lg_to_1)),
        Op::load(at!(lg_records), 24),
        Op::expect_at(at!(lg_from_2)),
        Op::load(at!(lg_records), 48),
        Op::expect_at(at!(lg_from_3)),
        Op::load(at!(lg_records), 56),
        Op::expect_at(at!(lg_to_3)),
        Op::load(at!(lg_records), 72),
        Op::expect(!0, 0),
        Op::wrmsr(DS_AREA, 0),
    }

    // BTF with TF: the trap is behind the first branch that is taken, on every part.
    btf_steps_over_to_the_next_branch {
        Op::watch(),
        Op::call(at!(lg_step)),
        Op::hits(),
        Op::expect(!0, 1),
        Op::hit(0, rt::monitor::Field::Eip),
        Op::expect_at(at!(lg_stepped)),
        Op::hit(0, rt::monitor::Field::Dr6),
        Op::expect(0xE00F, 1 << 14),
        // The exception has cleared it.
        Op::rdmsr(DEBUGCTL),
        Op::expect(2, 0),
    }
}
