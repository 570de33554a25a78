//! What of a processor is touched at every instruction: registers, flags, the budget, and what leads to memory and to blocks.
//!
//! Host code that is made at run time reaches these fields by their offsets, which are therefore part of this file and asserted;
//! all else of a processor is in [`Cpu`](crate::Cpu).

use x86::watch::BranchRecord;

use crate::cpu::slot;
use crate::fpu::FpuState;
use crate::jumps::JumpCache;
use crate::op::{Op, Reason};
use crate::tlb::Tlb;

/// The part of a processor that every handler uses.
#[repr(C)]
pub struct Hot {
    /// The register file: see [`slot`].
    pub(crate) r: [u64; slot::COUNT],
    /// Arithmetic flags, in the form of [`crate::flags`].
    pub(crate) nf: u64,
    /// Steps left in this run, the running block already taken off.
    pub(crate) budget: i64,
    pub(crate) ip_mask: u64,
    pub(crate) cs_base: u64,
    pub(crate) mode: u32,
    pub(crate) stop: Reason,
    /// The running block holds one instruction, so that it may do what needs a look right after it.
    pub(crate) solo: bool,
    pub(crate) cpl: u8,
    /// An access to the bus with side effects was made.
    pub(crate) bus_used: bool,
    /// Where the next branch record goes, and where there is no room for it.
    pub(crate) record_at: *mut BranchRecord,
    pub(crate) record_end: *mut BranchRecord,
    /// What a record's last two words are made of: the machine's step clock at the end of what this chain was granted (less
    /// the budget, it is the present one), and the present privilege level as a record has it, at source and target.
    pub(crate) record_rest: [u64; 2],
    /// Instruction pointer: valid outside chains.
    pub(crate) rip: u64,
    /// RFLAGS without the arithmetic flags.
    pub(crate) rflags: u64,
    /// The link that the block which is looked up next should be entered in; null for none.
    pub(crate) link: *mut *const Op,
    /// Where a load that took the slow path has put its bytes.
    pub(crate) bounce: [u8; 8],
    /// Where a read-modify-write will go back to if it is plain RAM that the TLB leads to; else null, and `Cpu::bounce_to` says.
    pub(crate) direct: *mut u8,
    /// Where branches are recorded in runs ([`mode::RUNS`](crate::cpu::mode::RUNS)): the conditional branches that wait for a record,
    /// under their stop bit; 1 for none.
    pub(crate) run: u64,
    /// Where the last of them led, relative to the page of slot PAGE.
    pub(crate) run_to: u64,
    /// The least value of `run` that has to become a record now, and after that one.
    pub(crate) run_limit: u64,
    pub(crate) run_next: u64,
    pub(crate) jumps: JumpCache,
    /// Its first word leads to the entries in use.
    pub(crate) tlb: Tlb,
    pub(crate) fpu: FpuState,
}

/// Where fields are that translations reach.
pub(crate) mod offset {
    pub const NF: i32 = 168;
    pub const BUDGET: i32 = 176;
    pub const IP_MASK: i32 = 184;
    pub const STOP: i32 = 204;
    pub const RECORD_AT: i32 = 208;
    pub const RECORD_END: i32 = 216;
    pub const RECORD_REST: i32 = 224;
    pub const RIP: i32 = 240;
    pub const LINK: i32 = 256;
    pub const RUN: i32 = 280;
    pub const RUN_TO: i32 = 288;
    pub const RUN_LIMIT: i32 = 296;
    pub const RUN_NEXT: i32 = 304;
    pub const JUMPS: i32 = 312;
    /// The pointer to the entries in use.
    pub const TLB: i32 = 320;
}

/// Asserts where fields are.
macro_rules! offsets {
    ($($field:ident $at:expr;)+) => {
        $(const _: () = assert!(core::mem::offset_of!(Hot, $field) as i32 == $at, stringify!($field));)+
    };
}
offsets! {
    r 0;
    nf offset::NF;
    budget offset::BUDGET;
    ip_mask offset::IP_MASK;
    cs_base 192;
    mode 200;
    stop offset::STOP;
    solo 205;
    cpl 206;
    bus_used 207;
    record_at offset::RECORD_AT;
    record_end offset::RECORD_END;
    record_rest offset::RECORD_REST;
    rip offset::RIP;
    rflags 248;
    link offset::LINK;
    bounce 264;
    direct 272;
    run offset::RUN;
    run_to offset::RUN_TO;
    run_limit offset::RUN_LIMIT;
    run_next offset::RUN_NEXT;
    jumps offset::JUMPS;
    tlb offset::TLB;
}
const _: () = assert!(core::mem::offset_of!(Hot, fpu) % 64 == 0 && size_of::<JumpCache>() == size_of::<usize>());
const _: () = assert!(Tlb::CURRENT == 0);

impl Hot {
    pub(crate) fn new() -> Hot {
        Hot {
            r: [0; slot::COUNT],
            nf: 0,
            budget: 0,
            ip_mask: 0xffff,
            cs_base: 0,
            mode: 0,
            stop: Reason::Resolve,
            solo: false,
            cpl: 0,
            bus_used: false,
            record_at: core::ptr::null_mut(),
            record_end: core::ptr::null_mut(),
            record_rest: [0; 2],
            rip: 0,
            rflags: 2,
            link: core::ptr::null_mut(),
            bounce: [0; 8],
            direct: core::ptr::null_mut(),
            run: 1,
            run_to: 0,
            run_limit: 0,
            run_next: 0,
            jumps: JumpCache::new(),
            tlb: Tlb::new(),
            fpu: FpuState::default(),
        }
    }
}
