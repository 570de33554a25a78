//! Debug exceptions, as a log: a test sets breakpoints, runs a routine, and reads what was delivered where.

use crate::cpu::{dr, set_dr};
use crate::exception::{self, DB, Frame, RF};
use alloc::vec::Vec;

/// One #DB.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Hit {
    /// The saved RIP.
    pub rip: u64,
    /// DR6 at the handler's start.
    pub dr6: u64,
    /// The saved RFLAGS.
    pub rflags: u64,
    /// The saved CS.
    pub cs: u64,
    /// RCX.
    pub rcx: u64,
    /// RAX.
    pub rax: u64,
}

/// DR6 as the handler leaves it: all clear.
pub const CLEAR: u64 = 0xFFFF_0FF0;
/// DR6.BD.
pub const BD: u64 = 1 << 13;
/// DR6.BS.
pub const BS: u64 = 1 << 14;

/// DR7: what a breakpoint watches, in its R/W field.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum On {
    /// Instructions.
    Execute = 0,
    /// Writes.
    Write = 1,
    /// Ports, with CR4.DE.
    Port = 2,
    /// Reads and writes.
    ReadWrite = 3,
}

const MOST: usize = 256;
static mut HITS: [Hit; MOST] = [Hit {
    rip: 0,
    dr6: 0,
    rflags: 0,
    cs: 0,
    rcx: 0,
    rax: 0,
}; MOST];
static mut COUNT: usize = 0;

/// Sets breakpoint `n` at an address; `len` is 1, 2, 4 or 8.
pub fn set(n: usize, address: u64, on: On, len: u64) {
    let len_code = match len {
        1 => 0,
        2 => 1,
        8 => 2,
        _ => 3,
    };
    let field = on as u64 | len_code << 2;
    set_dr(n, address).expect("MOV to a debug register");
    let dr7 = dr(7).expect("MOV from DR7") & !(0xF << (16 + 4 * n));
    set_dr(7, dr7 | field << (16 + 4 * n) | 1 << (2 * n)).expect("MOV to DR7");
}

/// Switches all breakpoints off.
pub fn off() {
    set_dr(7, 0x400).expect("MOV to DR7");
}

/// Logs every #DB from here on. Where it is an instruction breakpoint, the handler sets RF so that the instruction runs.
pub fn watch() {
    // SAFETY: one CPU logs.
    unsafe { COUNT = 0 };
    set_dr(6, CLEAR).expect("MOV to DR6");
    exception::on(DB, log);
}

/// The handler of [`watch`].
pub fn log(frame: &mut Frame) {
    let dr6 = dr(6).expect("MOV from DR6");
    let hit = Hit {
        rip: frame.rip,
        dr6,
        rflags: frame.rflags,
        cs: frame.cs,
        rcx: frame.rcx,
        rax: frame.rax,
    };
    // SAFETY: the handler is not entered again while it runs.
    unsafe {
        assert!(
            COUNT < MOST,
            "more than {MOST} debug exceptions, the last at {:X}H, DR6 {dr6:X}H",
            frame.rip
        );
        HITS[COUNT] = hit;
        COUNT += 1;
    }
    set_dr(6, CLEAR).expect("MOV to DR6");
    let dr7 = dr(7).expect("MOV from DR7");
    for n in 0..4 {
        let executes = dr7 >> (16 + 4 * n) & 3 == 0 && dr7 >> (2 * n) & 3 != 0;
        if executes && dr6 >> n & 1 != 0 && dr(n) == Ok(frame.rip) {
            frame.rflags |= RF;
        }
    }
}

/// What was logged since [`watch`].
pub fn hits() -> Vec<Hit> {
    // SAFETY: nothing is logged while it is copied.
    unsafe { HITS[..COUNT].to_vec() }
}
