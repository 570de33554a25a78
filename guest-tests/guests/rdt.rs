//! Resource director. SDM Vol. 3B 18.18 "Intel Resource Director Technology (Intel RDT) Monitoring Features", 18.19
//! "... Allocation Features".

use core::sync::atomic::{AtomicU64, Ordering::Relaxed};

use rt::cpu::{self, leaf, rdmsr, read, refuses, write, wrmsr};
use rt::exception::Fault;
use rt::need::{self, Need};
use x86::msr::*;

/// A resource of CPUID.10H.0:EBX.
fn allocates(bit: u32) -> bool {
    cpu::has(x86::cpuid::Feature::RdtA) && leaf(0x10, 0)[1] >> bit & 1 != 0
}

const L3: Need = Need {
    reason: "no L3 masks (CPUID.10H.0:EBX[1] is 0)",
    present: || allocates(1),
    absent: || cpu::no_msr(IA32_L3_QOS_MASK_0),
};

const L2: Need = Need {
    reason: "no L2 masks (CPUID.10H.0:EBX[2] is 0)",
    present: || allocates(2),
    absent: || cpu::no_msr(IA32_L2_QOS_MASK_0),
};

const CDP: Need = Need {
    reason: "no code and data prioritisation of the L3 (CPUID.10H.1:ECX[2] is 0)",
    present: || allocates(1) && leaf(0x10, 1)[2] & 4 != 0,
    absent: || cpu::no_msr(IA32_L3_QOS_CFG),
};

const MBA: Need = Need {
    reason: "no bandwidth delays (CPUID.10H.0:EBX[3] is 0)",
    present: || allocates(3),
    absent: || cpu::no_msr(IA32_MBA_THRTL_0),
};

const L3_MONITOR: Need = Need {
    reason: "no monitoring of the L3 (CPUID.0FH.0:EDX[1] is 0)",
    present: || leaf(0xF, 0)[3] & 2 != 0,
    absent: || {},
};

/// Masks are contiguous, within the length and not empty; there is one for each class of service.
fn masks(first: u32, subleaf: u32) {
    let [eax, _, ecx, edx] = leaf(0x10, subleaf);
    let (length, last) = ((eax & 31) + 1, edx & 0xFFFF);
    let full = (1u64 << length) - 1;
    for n in 0..=last {
        assert_eq!(read(first + n), full, "at power-up");
        write(first + n, 3u64);
        assert_eq!(read(first + n), 3);
        refuses(first + n, 1 << length);
        refuses(first + n, 0);
        if ecx & 8 == 0 {
            refuses(first + n, 5);
        }
        write(first + n, full);
    }
    cpu::no_msr(first + last + 1);
}

fn l3_masks() {
    masks(IA32_L3_QOS_MASK_0, 1);
}

fn l2_masks() {
    masks(IA32_L2_QOS_MASK_0, 2);
}

/// With CDP a class has two masks, data even and code odd, and there are half as many classes.
fn code_and_data() {
    let last = leaf(0x10, 1)[3] & 0xFFFF;
    write(IA32_L3_QOS_CFG, 1u64);
    assert_eq!(read(IA32_L3_QOS_CFG), 1);
    refuses(IA32_L3_QOS_CFG, 2);
    write(IA32_L3_QOS_MASK_0, 3u64);
    write(IA32_L3_QOS_MASK_0 + 1, 6u64);
    assert_eq!((read(IA32_L3_QOS_MASK_0), read(IA32_L3_QOS_MASK_0 + 1)), (3, 6));
    let _ = wrmsr(IA32_L3_QOS_MASK_0, (1 << (leaf(0x10, 1)[0] & 31)) - 1);
    assert!(rdmsr(IA32_L3_QOS_MASK_0 + last).is_ok());
    write(IA32_L3_QOS_CFG, 0u64);
    let full = (2u64 << (leaf(0x10, 1)[0] & 31)) - 1;
    write(IA32_L3_QOS_MASK_0, full);
    write(IA32_L3_QOS_MASK_0 + 1, full);
}

core::arch::global_asm!(
    r#"
    .text
    # code(address, lines): jumps from the end of each line to the next one, and comes back
    .globl rd_code
rd_code:
    push    rbx
    jmp     rdi
"#
);

/// Writes code of so many lines: each jumps to the next one, and the last returns.
fn write_lines(code: u64, lines: u64) {
    for n in 0..lines {
        // JMP to the next line: E9H and a displacement. POP RBX; RET.
        let bytes: u64 = if n + 1 == lines { 0xC35B } else { 0xE9 | (64 - 5) << 8 };
        rt::paging::poke(code + 64 * n, bytes);
    }
}

/// With CDP what a class reads stays in the ways of its even mask and what it executes in those of its odd one, so that neither drives
/// the other out; without, one mask is for both.
fn code_and_data_have_ways_of_their_own() {
    let [_, unit, _, _] = leaf(0xF, 1);
    let unit = u64::from(unit);
    let l3 = (0..8)
        .map(|n| leaf(4, n))
        .find(|leaf| leaf[0] >> 5 & 7 == 3)
        .expect("a last level");
    // A way of the model's: of 1 MiB at most.
    let way = (u64::from(l3[2]) + 1).min(1 << 14) * 64;
    // Written while nobody asks, so that nobody has its lines in the cache.
    write(IA32_PQR_ASSOC, 0u64);
    write(IA32_QM_EVTSEL, 0u64);
    let [code, memory] = [(); 2].map(|()| rt::paging::pages(2 * way as usize / 4096));
    let read_all = || (0..2 * way / 64).for_each(|n| _ = rt::paging::peek(memory + 64 * n));
    write_lines(code, 2 * way / 64);
    write(IA32_L3_QOS_CFG, 1u64);
    // Class 1: the lowest way for data, the second and third for code.
    write(IA32_L3_QOS_MASK_0 + 2, 1u64);
    write(IA32_L3_QOS_MASK_0 + 3, 6u64);
    write(IA32_PQR_ASSOC, 1 << 32 | 2u64);
    read_all();
    let data = counter(2, OCCUPANCY) * unit;
    assert!(
        data <= way && data + way / 8 + unit > way,
        "one way of data: {data} of {way}"
    );
    rt::call!(rd_code(code));
    let both = counter(2, OCCUPANCY) * unit;
    read_all();
    let again = counter(2, OCCUPANCY) * unit;
    write(IA32_PQR_ASSOC, 0u64);
    assert!(
        both <= 3 * way && both + way / 4 + unit > 3 * way,
        "and two of code: {both} of {way}"
    );
    assert!(
        again + way / 8 + unit > both,
        "which data leaves alone: {again} of {both}"
    );
    let full = (2u64 << (leaf(0x10, 1)[0] & 31)) - 1;
    write(IA32_L3_QOS_MASK_0 + 2, full);
    write(IA32_L3_QOS_MASK_0 + 3, full);
    write(IA32_L3_QOS_CFG, 0u64);
}

/// What a class reads again stays in the L2 as far as its mask leaves it ways. SDM Vol. 3B 18.19.4.3 "Cache Mask Programming".
fn l2_masks_limit_what_stays() {
    // MEM_LOAD_RETIRED.L2_HIT of all parts that have the masks.
    const L2_HIT: u64 = 0x43_02D1;
    let l2 = (0..8)
        .map(|n| leaf(4, n))
        .find(|leaf| leaf[0] >> 5 & 7 == 2)
        .expect("a second level");
    let (ways, sets) = (u64::from(l2[1] >> 22) + 1, u64::from(l2[2]) + 1);
    // Half of the cache.
    let lines = ways * sets / 2;
    let [memory, other] = [lines, 4 * lines].map(|lines| rt::paging::pages(lines as usize / 64 + 1));
    let touch = |from: u64, lines| (0..lines).for_each(|n| _ = rt::paging::peek(from + 64 * n));
    let read_all = || touch(memory, lines);
    let full = (2u64 << (leaf(0x10, 2)[0] & 31)) - 1;
    let found = [1, full].map(|mask| {
        write(IA32_L2_QOS_MASK_0 + 1, mask);
        write(IA32_PERF_GLOBAL_CTRL, 0u64);
        write(IA32_PERFEVTSEL0, L2_HIT);
        write(IA32_PERF_GLOBAL_CTRL, 1u64);
        // A mask limits where lines come to, not where they are found: first another class has something else in all ways.
        touch(other, 4 * lines);
        write(IA32_PQR_ASSOC, 1u64 << 32);
        read_all();
        write(IA32_PMC0, 0u64);
        read_all();
        let hits = read(IA32_PMC0);
        write(IA32_PERF_GLOBAL_CTRL, 0u64);
        write(IA32_PERFEVTSEL0, 0u64);
        write(IA32_PQR_ASSOC, 0u64);
        write(IA32_L2_QOS_MASK_0 + 1, full);
        hits
    });
    let [one, all] = found;
    assert!(one < lines / 8 && all > lines / 2, "{found:?} of {lines} lines");
}

/// Delays up to the maximum, in steps where they are linear.
fn bandwidth_delays() {
    let [eax, _, _, edx] = leaf(0x10, 3);
    let most = u64::from(eax & 0xFFF) + 1;
    write(IA32_MBA_THRTL_0, most);
    assert_eq!(read(IA32_MBA_THRTL_0), most);
    refuses(IA32_MBA_THRTL_0, most + 1);
    write(IA32_MBA_THRTL_0, 0u64);
    cpu::no_msr(IA32_MBA_THRTL_0 + (edx & 0xFFFF) + 1);
}

/// IA32_PQR_ASSOC: an RMID or a class above the CPUID maximum is #GP(0).
fn association() {
    let rmids = leaf(0xF, 0)[1];
    let classes = [1, 2, 3]
        .into_iter()
        .filter(|n| allocates(*n))
        .map(|n| leaf(0x10, n)[3] & 0xFFFF)
        .max();
    let class = u64::from(classes.unwrap_or(0));
    write(IA32_PQR_ASSOC, u64::from(rmids) | class << 32);
    assert_eq!(read(IA32_PQR_ASSOC), u64::from(rmids) | class << 32);
    refuses(IA32_PQR_ASSOC, u64::from(rmids) + 1);
    refuses(IA32_PQR_ASSOC, (class + 1) << 32);
    write(IA32_PQR_ASSOC, 0u64);
}

const ERROR: u64 = 1 << 63;
const OCCUPANCY: u64 = 1;

fn counter(rmid: u64, event: u64) -> u64 {
    write(IA32_QM_EVTSEL, rmid << 32 | event);
    read(IA32_QM_CTR)
}

/// An event or an RMID that is not monitored sets Error; the counter is read-only.
fn errors() {
    let [_, _, most, _] = leaf(0xF, 1);
    assert_eq!(counter(0, 7) & ERROR, ERROR, "an unknown event");
    if u64::from(leaf(0xF, 0)[1]) > u64::from(most) {
        assert_eq!(
            counter(u64::from(most) + 1, 1) & ERROR,
            ERROR,
            "an RMID that the L3 does not monitor"
        );
    }
    refuses(IA32_QM_EVTSEL, (u64::from(leaf(0xF, 0)[1]) + 1) << 32);
    assert_eq!(wrmsr(IA32_QM_CTR, 0), Err(Fault::GP0));
}

/// Reads a byte of each line of so many bytes from the start.
fn walk(bytes: usize) {
    static MEMORY: [AtomicU64; 1 << 18] = [const { AtomicU64::new(0) }; 1 << 18];
    MEMORY[..bytes / 8]
        .iter()
        .step_by(8)
        .for_each(|word| _ = word.load(Relaxed));
}

/// What an RMID has read is in the cache under its name, and has come from memory for it, once.
fn occupancy_and_bandwidth() {
    let [_, unit, _, events] = leaf(0xF, 1);
    let unit = u64::from(unit);
    write(IA32_PQR_ASSOC, 1u64);
    assert_eq!(counter(1, OCCUPANCY), 0, "nothing was read for it");
    walk(1 << 20);
    let half = counter(1, OCCUPANCY) * unit;
    walk(2 << 20);
    let all = counter(1, OCCUPANCY) * unit;
    // A little more is the stack's and the code's own data.
    for (measured, read) in [(half, 1 << 20), (all, 2u64 << 20)] {
        assert!(
            measured + unit > read && measured < read + (128 << 10),
            "{measured} of {read}"
        );
    }
    for event in (2..=3).filter(|event| events >> (event - 1) & 1 != 0) {
        let moved = counter(1, event) * unit;
        assert!(moved + unit > all && moved < all + (128 << 10), "{moved} of {all}");
    }
    // It stays another's when it is read on behalf of RMID 0, and what is new then is not RMID 1's.
    write(IA32_PQR_ASSOC, 0u64);
    walk(2 << 20);
    assert_eq!(counter(1, OCCUPANCY) * unit, all);
}

rt::tests! {
    "tests_rdt";
    occupancy_and_bandwidth: need::RDT_M, L3_MONITOR;
    association: need::RDT_M;
    errors: need::RDT_M, L3_MONITOR;
    l3_masks: need::RDT_A, L3;
    l2_masks: need::RDT_A, L2;
    l2_masks_limit_what_stays: need::RDT_A, L2, need::PMU2;
    code_and_data: need::RDT_A, CDP;
    code_and_data_have_ways_of_their_own: need::RDT_A, need::RDT_M, CDP, L3_MONITOR;
    bandwidth_delays: need::RDT_A, MBA;
}
