//! What the parts without 64-bit mode have, and what 32-bit code sees on the others: the P6 family's and the Pentium 4's last
//! branches, 32-bit records of the branch trace store, the counters of both, the Pentium 4's sampling. SDM Vol. 3B 18.13 "(Pentium 4) Last Branch, Interrupt, and
//! Exception Recording", 18.16 "(P6 Family) Last Branch, Interrupt, and Exception Recording", 18.4.9.1 "64 Bit Format of the DS Save
//! Area".
//!
//! No later model has PEBS without DTES64, nor is one a Pentium 4 with sixteen pairs of last branches. So the matrix has two columns more:
//! `core2,-lm,-dtes64`, which is what the Core Duo was, and `guests/prescott.toml`.

use rt::at;
use rt::monitor::{Op, Register};

core::arch::global_asm!(
    r#"
    .text
    .code32
    .globl  lg_debugctl, lg_branches, lg_from_1, lg_to_1, lg_from_2, lg_to_2, lg_from_3, lg_to_3, lg_newest, lg_exception
    .globl  lg_before, lg_before_to, lg_ud, lg_count10, lg_count20, lg_area, lg_records, lg_step
    .globl  lg_p4_count10, lg_p4_count20, lg_p4_branches, lg_p4_preset, lg_p4_setup, lg_p4_cccr, lg_p4_rdpmc, lg_p4_fast
    .globl  lg_p4_sample, lg_p4_sampled
    .globl  lg_pair, lg_back, lg_sample, lg_sampled, lg_samples, lg_sample_1, lg_samples_end
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

    # Of sixteen pairs the one so far behind the newest, FROM in EAX and TO in EDX.
lg_pair:
    mov     ecx, 0x1da
    rdmsr
    sub     eax, [lg_back]
    and     eax, 15
    mov     esi, eax
    lea     ecx, [esi + 0x6c0]
    rdmsr
    mov     edi, eax
    lea     ecx, [esi + 0x680]
    rdmsr
    mov     edx, edi
    ret

    # A number in each register, and counter 0, which samples, one instruction before its overflow: the WRMSR is the first.
lg_sample:
    mov     [lg_stack], esp
    mov     esp, offset lg_samples_end
    mov     ebx, 0x000b000b
    mov     esi, 0x00510051
    mov     edi, 0x00d100d1
    mov     ebp, 0x00b900b9
    mov     ecx, 0x38f
    mov     eax, 1
    xor     edx, edx
    wrmsr
    mov     eax, 0x000a000a
lg_sampled:
    nop
    nop
    xor     eax, eax
    wrmsr
    mov     esp, [lg_stack]
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

    # Pentium 4: instructions that retire between two writes of MSR_IQ_CCCR0, with ten and with twenty more, from lg_p4_preset on.
    # What the first write says is lg_p4_setup; the CCCR before the second goes to lg_p4_cccr.
lg_p4_count10:
    call    lg_p4_start
    .rept   10
    nop
    .endr
    jmp     lg_p4_stop
lg_p4_count20:
    call    lg_p4_start
    .rept   20
    nop
    .endr
    jmp     lg_p4_stop
    # Five branches that are taken and five that are not, beside RET, and JMP.
lg_p4_branches:
    call    lg_p4_start
    mov     ecx, 6
2:  dec     ecx
    jnz     2b
    .rept   4
    jnz     2b
    .endr
    jmp     lg_p4_stop
lg_p4_start:
    mov     ecx, 0x30c
    mov     eax, [lg_p4_preset]
    mov     edx, [lg_p4_preset + 4]
    wrmsr
    mov     ecx, 0x36c
    mov     eax, [lg_p4_setup]
    xor     edx, edx
    wrmsr
    ret
lg_p4_stop:
    mov     ecx, 0x36c
    rdmsr
    mov     [lg_p4_cccr], eax
    xor     eax, eax
    xor     edx, edx
    wrmsr
    mov     ecx, 0x30c
    rdmsr
    ret
lg_p4_rdpmc:
    mov     ecx, 12
    rdpmc
    ret
lg_p4_fast:
    mov     ecx, 0x8000000c
    rdpmc
    ret

    # A number in each register; the counter that samples is one load before its overflow, the first load makes it.
lg_p4_sample:
    mov     [lg_stack], esp
    mov     esp, offset lg_samples_end
    mov     esi, 0x00510051
    mov     edi, 0x00d100d1
    mov     ebp, 0x00b900b9
    mov     ecx, 0x370
    mov     eax, 0x3b000
    xor     edx, edx
    wrmsr
    mov     ebx, [lg_p4_setup]
    mov     eax, 0x000a000a
    nop
    mov     ebx, [lg_p4_word]
lg_p4_sampled:
    nop
    xor     eax, eax
    wrmsr
    mov     esp, [lg_stack]
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
lg_back:     .long 0
lg_stack:    .long 0
lg_p4_preset: .quad 0
lg_p4_setup: .long 0
lg_p4_cccr:  .long 0
lg_p4_word:  .long 0x000b000b
    .bss
    .balign 4096
lg_area:     .skip 4096
lg_records:  .skip 4096
lg_samples:  .skip 40
lg_sample_1: .skip 4096 - 40
lg_samples_end:
    .text
    .code64
"#
);

const DEBUGCTL: u32 = 0x1D9;
const DS_AREA: u32 = 0x600;
const PEBS_ENABLE: u32 = 0x3F1;

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
/// instr_retired with NBOGUSNTAG, at CPL 0.
const INSTR_RETIRED: u64 = 2 << 25 | 1 << 9 | 8;
/// MSR_IQ_CCCR0 with MSR_CRU_ESCR0, and with MSR_CRU_ESCR2: enabled, active thread any.
const COUNT_ESCR0: u32 = 1 << 12 | 4 << 13 | 3 << 16;
const COUNT_ESCR2: u32 = 1 << 12 | 5 << 13 | 3 << 16;
/// Model 2 or another, by CPUID.1:EAX\[7:4\], which is in R.
const PACKED: Op = Op::needs(0xF0, 0x20, 0x1DB, c"a Pentium 4 of model 3 or later (CPUID.1:EAX[7:4])");
const PAIRS: Op = Op::needs(0xF0, 0x30, 0x680, c"a Pentium 4 before model 3 (CPUID.1:EAX[7:4])");
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

    // IA32_STAR to IA32_FMASK and the bases come with 64-bit mode. SDM Vol. 4 Table 2-2 "IA-32 Architectural MSRs".
    registers_of_64_bit_mode_come_with_it {
        Op::cpuid(0x8000_0001, Register::Edx),
        Op::needs(1 << 29, 0, 0, c"64-bit mode (CPUID.80000001H:EDX[29] is 1)"),
        Op::rdmsr(0xC000_0081),
        Op::is_gp(),
        Op::wrmsr(0xC000_0081, 0),
        Op::is_gp(),
        Op::rdmsr(0xC000_0082),
        Op::is_gp(),
        Op::wrmsr(0xC000_0082, 0),
        Op::is_gp(),
        Op::rdmsr(0xC000_0083),
        Op::is_gp(),
        Op::wrmsr(0xC000_0083, 0),
        Op::is_gp(),
        Op::rdmsr(0xC000_0084),
        Op::is_gp(),
        Op::wrmsr(0xC000_0084, 0),
        Op::is_gp(),
        Op::rdmsr(0xC000_0100),
        Op::is_gp(),
        Op::wrmsr(0xC000_0100, 0),
        Op::is_gp(),
        Op::rdmsr(0xC000_0101),
        Op::is_gp(),
        Op::wrmsr(0xC000_0101, 0),
        Op::is_gp(),
        Op::rdmsr(0xC000_0102),
        Op::is_gp(),
        Op::wrmsr(0xC000_0102, 0),
        Op::is_gp(),
    }

    // IA32_EFER comes with 64-bit mode, execute-disable or SYSCALL.
    efer_comes_with_its_bits {
        Op::cpuid(0x8000_0001, Register::Edx),
        Op::needs(
            1 << 29 | 1 << 20 | 1 << 11,
            0,
            0,
            c"64-bit mode, execute-disable or SYSCALL (CPUID.80000001H:EDX)",
        ),
        Op::rdmsr(0xC000_0080),
        Op::is_gp(),
        Op::wrmsr(0xC000_0080, 0),
        Op::is_gp(),
    }

    // MCi_CTL of the P6 family takes all ones or all zeros. SDM Vol. 3B 16.3.2.1 "IA32_MCi_CTL MSRs".
    p6_machine_check_controls {
        P6[0], P6[1], P6[2], P6[3],
        Op::wrmsr(0x404, !0),
        Op::is_fine(),
        Op::rdmsr(0x404),
        Op::expect(!0, !0),
        Op::wrmsr(0x404, 1),
        Op::is_gp(),
        Op::wrmsr(0x404, !1),
        Op::is_gp(),
        Op::wrmsr(0x404, 0),
        Op::is_fine(),
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

    // WRMSR of the time-stamp counter reaches the low half, and clears the high one. SDM Vol. 3B 18.17 "Time-Stamp Counter".
    the_tsc_is_written_in_its_low_half {
        P6[0], P6[1], P6[2], P6[3],
        Op::wrmsr(0x10, 0x1234_5678_0000_0000),
        Op::is_fine(),
        Op::rdmsr(0x10),
        Op::expect(0xFFFF_FFFF_0000_0000, 0),
    }

    // So it is on the Pentium 4, up to model 2.
    netburst_tsc_is_written_in_its_low_half {
        NETBURST[0], NETBURST[1], PACKED,
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
        NETBURST[0], NETBURST[1], PACKED,
        Op::store(at!(lg_debugctl), 0, 1),
        Op::call(at!(lg_branches)),
        Op::call(at!(lg_newest)),
        Op::expect_at(at!(lg_from_3)),
        Op::swap(),
        Op::expect_at(at!(lg_to_3)),
        Op::rdmsr(0x1DF),
        Op::is_gp(),
    }

    // From model 3 on sixteen pairs from 680H and 6C0H on, the newest at TOS, which software cannot write.
    netburst_last_branch_pairs {
        NETBURST[0], NETBURST[1], PAIRS,
        Op::store(at!(lg_debugctl), 0, 1),
        Op::call(at!(lg_branches)),
        Op::store(at!(lg_back), 0, 0),
        Op::call(at!(lg_pair)),
        Op::expect_at(at!(lg_from_3)),
        Op::swap(),
        Op::expect_at(at!(lg_to_3)),
        Op::store(at!(lg_back), 0, 2),
        Op::call(at!(lg_pair)),
        Op::expect_at(at!(lg_from_1)),
        Op::swap(),
        Op::expect_at(at!(lg_to_1)),
        Op::rdmsr(0x68F),
        Op::is_fine(),
        Op::rdmsr(0x6CF),
        Op::is_fine(),
        Op::rdmsr(0x690),
        Op::is_gp(),
        Op::wrmsr(0x1DA, 5),
        Op::is_gp(),
    }

    // instr_retired by MSR_CRU_ESCR0 on MSR_IQ_COUNTER0: ten instructions more are ten more. The WRMSR that enables counts, and RET, JMP,
    // MOV, RDMSR, MOV, XOR, XOR.
    netburst_counts_instructions {
        NETBURST[0], NETBURST[1],
        Op::rdmsr(0x1A0),
        Op::expect(1 << 7, 1 << 7),
        Op::wrmsr(0x3B8, INSTR_RETIRED),
        Op::is_fine(),
        Op::store(at!(lg_p4_setup), 0, COUNT_ESCR0),
        Op::call(at!(lg_p4_count10)),
        Op::expect(!0, 18),
        Op::call(at!(lg_p4_count20)),
        Op::expect(!0, 28),
        // Ring 3 alone.
        Op::wrmsr(0x3B8, INSTR_RETIRED & !8 | 4),
        Op::call(at!(lg_p4_count10)),
        Op::expect(!0, 0),
        // The other logical processor.
        Op::wrmsr(0x3B8, INSTR_RETIRED & !8 | 3),
        Op::call(at!(lg_p4_count10)),
        Op::expect(!0, 0),
        Op::wrmsr(0x3B8, 0),
        // None of the later parts' registers.
        Op::rdmsr(0x186),
        Op::is_gp(),
        Op::rdmsr(0x38F),
        Op::is_gp(),
        // Nor one behind the last counter.
        Op::rdmsr(0x312),
        Op::is_gp(),
        Op::rdmsr(0x372),
        Op::is_gp(),
    }

    // branch_retired: MMTP and MMTM are taken, MMNP and MMNM are not.
    netburst_counts_branches {
        NETBURST[0], NETBURST[1],
        Op::wrmsr(0x3CC, 6 << 25 | 0xC << 9 | 8),
        Op::store(at!(lg_p4_setup), 0, COUNT_ESCR2),
        Op::call(at!(lg_p4_branches)),
        // RET and JMP, too.
        Op::expect(!0, 7),
        Op::wrmsr(0x3CC, 6 << 25 | 0x3 << 9 | 8),
        Op::call(at!(lg_p4_branches)),
        Op::expect(!0, 5),
        Op::wrmsr(0x3CC, 0),
    }

    // OVF is set by an overflow, stays, and is cleared by software; FORCE_OVF makes any count one.
    netburst_overflow {
        NETBURST[0], NETBURST[1],
        Op::wrmsr(0x3B8, INSTR_RETIRED),
        Op::store(at!(lg_p4_setup), 0, COUNT_ESCR0),
        Op::call(at!(lg_p4_count10)),
        Op::load(at!(lg_p4_cccr), 0),
        Op::expect(0xFFFF_FFFF, COUNT_ESCR0 as u64),
        Op::store(at!(lg_p4_preset), 0, 0xFFFF_FFFB),
        Op::store(at!(lg_p4_preset), 4, 0xFF),
        Op::call(at!(lg_p4_count10)),
        Op::expect(!0, 13),
        Op::load(at!(lg_p4_cccr), 0),
        Op::expect(0xFFFF_FFFF, COUNT_ESCR0 as u64 | 1 << 31),
        Op::store(at!(lg_p4_preset), 0, 0),
        Op::store(at!(lg_p4_preset), 4, 0),
        Op::store(at!(lg_p4_setup), 0, COUNT_ESCR0 | 1 << 25),
        Op::call(at!(lg_p4_count10)),
        Op::expect(!0, 18),
        Op::load(at!(lg_p4_cccr), 0),
        Op::expect(1 << 31, 1 << 31),
        Op::wrmsr(0x3B8, 0),
    }

    // Compare, complement, threshold: cycles with at most 15 events are all cycles. SDM Vol. 3B 21.6.3.5.2 "Filtering Events".
    netburst_thresholds {
        NETBURST[0], NETBURST[1],
        Op::wrmsr(0x3B8, INSTR_RETIRED),
        Op::store(at!(lg_p4_setup), 0, COUNT_ESCR0 | 1 << 18 | 15 << 20),
        Op::call(at!(lg_p4_count10)),
        Op::expect(!0, 0),
        Op::store(at!(lg_p4_setup), 0, COUNT_ESCR0 | 1 << 18 | 1 << 19 | 15 << 20),
        Op::call(at!(lg_p4_count10)),
        // Cycles are the part's own.
        Op::expect(!0xFFFF_FFFF, 0),
        Op::wrmsr(0x3B8, 0),
    }

    // RDPMC reads 40 bits, or 32 with bit 31 of ECX.
    netburst_rdpmc {
        NETBURST[0], NETBURST[1],
        Op::wrmsr(0x30C, 0xAB_1234_5678),
        Op::is_fine(),
        Op::rdmsr(0x30C),
        Op::expect(!0, 0xAB_1234_5678),
        Op::call(at!(lg_p4_rdpmc)),
        Op::expect(!0, 0xAB_1234_5678),
        Op::call(at!(lg_p4_fast)),
        Op::expect(!0, 0x1234_5678),
        Op::wrmsr(0x30C, 0),
    }

    // front_end_event of loads on MSR_IQ_COUNTER4: a record of 28H bytes with the linear address behind the second one, then the reset
    // value. SDM Vol. 3B 21.6.3.8 "Processor Event-Based Sampling (PEBS)".
    netburst_samples_loads {
        NETBURST[0], NETBURST[1],
        Op::rdmsr(0x1A0),
        Op::expect(1 << 12, 0),
        Op::store_at(at!(lg_area), 0x10, at!(lg_samples)),
        Op::store_at(at!(lg_area), 0x14, at!(lg_samples)),
        Op::store_at(at!(lg_area), 0x18, at!(lg_samples_end)),
        Op::store_at(at!(lg_area), 0x1C, at!(lg_samples_end)),
        Op::store(at!(lg_area), 0x20, 0x1234_5678),
        Op::store(at!(lg_area), 0x24, 0x12),
        Op::wrmsr_at(DS_AREA, at!(lg_area)),
        Op::is_fine(),
        // uop_type, TAGLOADS; front_end_event, NBOGUS.
        Op::wrmsr(0x3BC, 2 << 25 | 2 << 9 | 8),
        Op::wrmsr(0x3CC, 8 << 25 | 1 << 9 | 8),
        Op::wrmsr(0x310, 0xFF_FFFF_FFFF),
        Op::wrmsr(PEBS_ENABLE, 3 << 24),
        Op::is_fine(),
        Op::call(at!(lg_p4_sample)),
        Op::load(at!(lg_samples), 4),
        Op::expect_at(at!(lg_p4_sampled)),
        Op::swap(),
        Op::expect(0xFFFF_FFFF, 0xA_000A),
        Op::load(at!(lg_samples), 0),
        Op::expect(0x202, 2),
        Op::load(at!(lg_samples), 0xC),
        Op::expect(!0, 0x370_000B_000B),
        Op::load(at!(lg_samples), 0x14),
        Op::expect(!0, 0x51_0051 << 32),
        Op::load(at!(lg_samples), 0x1C),
        Op::expect(!0, 0xB9_00B9_00D1_00D1),
        Op::load(at!(lg_samples), 0x24),
        Op::expect_at(at!(lg_samples_end)),
        // One, and the index behind it.
        Op::load(at!(lg_area), 0x14),
        Op::expect_at(at!(lg_sample_1)),
        Op::rdmsr(0x310),
        Op::expect(!0, 0x12_1234_5678),
        Op::wrmsr(PEBS_ENABLE, 0),
        Op::wrmsr(0x3BC, 0),
        Op::wrmsr(0x3CC, 0),
        Op::wrmsr(DS_AREA, 0),
    }

    // Records of 12 bytes and fields of 4 where DTES64 is clear. On the Pentium 4 TR and BTS are bits 2 and 3.
    bts_records_of_32_bits {
        NETBURST[0], NETBURST[1],
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

    // The same where TR and BTS are bits 6 and 7.
    core_bts_records_of_32_bits {
        DS[0], DS[1],
        Op::cpuid(1, Register::Eax),
        Op::needs(0xF00, 0x600, 0, c"a Pentium 4 (CPUID.1:EAX[11:8] is 15)"),
        Op::cpuid(1, Register::Ecx),
        Op::needs(1 << 2, 0, 0, c"the 64-bit layout (CPUID.1:ECX.DTES64 is 1)"),
        Op::store_at(at!(lg_area), 0, at!(lg_records)),
        Op::store_at(at!(lg_area), 4, at!(lg_records)),
        Op::store(at!(lg_area), 8, 0x7FFF_FFFF),
        Op::store(at!(lg_area), 12, 0x7FFF_FFFF),
        Op::wrmsr_at(DS_AREA, at!(lg_area)),
        Op::is_fine(),
        Op::store(at!(lg_debugctl), 0, 0xC0),
        Op::call(at!(lg_branches)),
        Op::load(at!(lg_records), 0),
        Op::expect_at(at!(lg_from_1)),
        Op::load(at!(lg_records), 28),
        Op::expect_at(at!(lg_to_3)),
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

    // Records of 28H bytes: flags, IP, EAX, EBX, ECX, EDX, ESI, EDI, EBP, ESP. SDM Vol. 3B 19.4.9.2 "Setting Up the DS Save Area",
    // Figure 18-5 "DS Save Area".
    pebs_records_of_32_bits {
        DS[0], DS[1],
        Op::cpuid(1, Register::Eax),
        Op::needs(0xF00, 0x600, 0, c"a Pentium 4 (CPUID.1:EAX[11:8] is 15)"),
        Op::cpuid(1, Register::Ecx),
        Op::needs(1 << 2, 0, 0, c"the 64-bit layout (CPUID.1:ECX.DTES64 is 1)"),
        Op::rdmsr(0x1A0),
        Op::needs(1 << 12, 0, PEBS_ENABLE, c"no PEBS (IA32_MISC_ENABLE[12] is 1)"),
        Op::store_at(at!(lg_area), 0x10, at!(lg_samples)),
        Op::store_at(at!(lg_area), 0x14, at!(lg_samples)),
        Op::store_at(at!(lg_area), 0x18, at!(lg_samples_end)),
        Op::store_at(at!(lg_area), 0x1C, at!(lg_samples_end)),
        // What the counter goes on from: no second record.
        Op::store(at!(lg_area), 0x20, 0),
        Op::store(at!(lg_area), 0x24, 0),
        Op::wrmsr_at(DS_AREA, at!(lg_area)),
        Op::wrmsr(0x38F, 0),
        Op::wrmsr(0xC1, 0xFFFF_FFFF),
        Op::wrmsr(0x186, 0x43_00C0),
        Op::wrmsr(PEBS_ENABLE, 1),
        Op::is_fine(),
        Op::call(at!(lg_sample)),
        // The instruction after the one that overflowed the counter, in trap style: EIP is behind it.
        Op::load(at!(lg_samples), 4),
        Op::expect_at(at!(lg_sampled)),
        Op::swap(),
        Op::expect(0xFFFF_FFFF, 0xA_000A),
        Op::load(at!(lg_samples), 0),
        Op::expect(0x202, 2),
        Op::load(at!(lg_samples), 0xC),
        Op::expect(!0, 0x38F_000B_000B),
        Op::load(at!(lg_samples), 0x14),
        Op::expect(!0, 0x51_0051 << 32),
        Op::load(at!(lg_samples), 0x1C),
        Op::expect(!0, 0xB9_00B9_00D1_00D1),
        Op::load(at!(lg_samples), 0x24),
        Op::expect_at(at!(lg_samples_end)),
        // One, and the index behind it.
        Op::load(at!(lg_area), 0x14),
        Op::expect_at(at!(lg_sample_1)),
        Op::load(at!(lg_sample_1), 0),
        Op::expect(!0, 0),
        Op::wrmsr(PEBS_ENABLE, 0),
        Op::wrmsr(0x186, 0),
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
