//! The host executor on its own: results that any x86-64 gives, so that a mismatch elsewhere can be trusted to be the engine's.

use crate::arena::{AREAS, CODE, DATA, Memory, PAGE, READ_ONLY, STACK};
use crate::host::Host;
use crate::state::{Outcome, State, USER32_CS, flag};

use flag::{AF, CF, OF, PF, SF, STATUS, ZF};

/// Puts `code` into a code page full of INT3 and runs it.
fn run(host: &mut Host, code: &[u8], state: &State) -> Outcome {
    host.area_mut(0).fill(0xcc);
    host.poke(state.rip, code);
    host.run(state)
}

const RAX: usize = 0;
const RCX: usize = 1;
const RDX: usize = 2;
const RSP: usize = 4;

// covers: differential/host
#[test]
fn host_computes_known_results() {
    let mut host = Host::take();
    // Bytes, RAX, RCX, RDX, status flags before; RAX, status flags after.
    type Row = (&'static str, &'static [u8], [u64; 3], u64, u64, u64);
    let rows: &[Row] = &[
        ("add al, cl", &[0x00, 0xc8], [0x7f, 1, 0], 0, 0x80, AF | SF | OF),
        (
            "add eax, ecx",
            &[0x01, 0xc8],
            [0xffff_ffff_ffff_ffff, 1, 0],
            0,
            0,
            AF | ZF | PF | CF,
        ),
        (
            "adc rax, rcx",
            &[0x48, 0x11, 0xc8],
            [u64::MAX, 0, 0],
            CF,
            0,
            AF | ZF | PF | CF,
        ),
        (
            "sub ax, cx",
            &[0x66, 0x29, 0xc8],
            [0xabcd_0000, 1, 0],
            0,
            0xabcd_ffff,
            AF | SF | PF | CF,
        ),
        ("shl al, 1", &[0xd0, 0xe0], [0xc0, 0, 0], 0, 0x80, SF | CF),
        ("xchg al, ah", &[0x86, 0xe0], [0x1234, 0, 0], 0, 0x3412, 0),
        (
            "lahf",
            &[0x9f],
            [0, 0, 0],
            CF | PF | AF | ZF | SF,
            0xd700,
            CF | PF | AF | ZF | SF,
        ),
        ("div cl", &[0xf6, 0xf1], [1000, 7, 0], 0, 0x068e, 0),
    ];
    for (name, code, [rax, rcx, rdx], before, after, flags) in rows {
        let mut state = State::new(CODE);
        state.gpr[RAX] = *rax;
        state.gpr[RCX] = *rcx;
        state.gpr[RDX] = *rdx;
        state.rflags |= before;
        let outcome = run(&mut host, code, &state);
        assert_eq!(outcome.vector, 3, "{name}");
        assert_eq!(outcome.state.rip, CODE + code.len() as u64 + 1, "{name}");
        assert_eq!(outcome.state.gpr[RAX], *after, "{name}");
        if !name.starts_with("shl") && !name.starts_with("div") {
            assert_eq!(outcome.state.rflags & STATUS, *flags, "{name}");
        }
        let mut rest = outcome.state.clone();
        rest.gpr[RAX] = state.gpr[RAX];
        rest.rip = state.rip;
        rest.rflags = state.rflags;
        assert_eq!(rest, state, "{name}: nothing else changes");
    }
}

// covers: differential/host
#[test]
fn host_reports_faults() {
    let mut host = Host::take();
    let hole = DATA + 2 * PAGE;
    let noncanonical = 0x4141_4141_4141_4141;
    // Bytes, RAX; vector, error code, CR2, bytes that RIP has moved.
    type Row = (&'static str, &'static [u8], u64, u8, u32, u64, u64);
    let rows: &[Row] = &[
        ("div by zero", &[0x31, 0xc9, 0xf7, 0xf1], 1, 0, 0, 0, 2),
        ("ud2", &[0x0f, 0x0b], 0, 6, 0, 0, 0),
        ("int3", &[0xcc], 0, 3, 0, 0, 1),
        ("hlt in ring 3", &[0xf4], 0, 13, 0, 0, 0),
        ("int 20h in ring 3", &[0xcd, 0x20], 0, 13, 0x102, 0, 0),
        ("load from nowhere", &[0x8b, 0x08], hole, 14, 4, hole, 0),
        ("store to nowhere", &[0x89, 0x08], hole, 14, 6, hole, 0),
        (
            "store to a read-only page",
            &[0x89, 0x08],
            READ_ONLY + 16,
            14,
            7,
            READ_ONLY + 16,
            0,
        ),
        ("store over the end of a page", &[0x89, 0x08], hole - 2, 14, 6, hole, 0),
        (
            "jump to nowhere",
            &[0xff, 0xe0],
            hole,
            14,
            0x14,
            hole,
            hole.wrapping_sub(CODE),
        ),
        (
            "jump to data",
            &[0xff, 0xe0],
            DATA,
            14,
            0x15,
            DATA,
            DATA.wrapping_sub(CODE),
        ),
        ("non-canonical load", &[0x8b, 0x08], noncanonical, 13, 0, 0, 0),
        (
            "non-canonical load with an ignored SS prefix",
            &[0x36, 0x8b, 0x08],
            noncanonical,
            13,
            0,
            0,
            0,
        ),
        (
            "sqrtsd with the exception unmasked",
            &[0xf2, 0x0f, 0x51, 0xc0],
            0,
            19,
            0,
            0,
            0,
        ),
    ];
    for (name, code, rax, vector, error, cr2, moved) in rows {
        let mut state = State::new(CODE);
        state.gpr[RAX] = *rax;
        state.fpu.mxcsr = 0x1f00;
        state.fpu.xmm[0] = u128::from((-1.0_f64).to_bits());
        let outcome = run(&mut host, code, &state);
        assert_eq!(
            (outcome.vector, outcome.error, outcome.cr2),
            (*vector, *error, *cr2),
            "{name}"
        );
        assert_eq!(outcome.state.rip.wrapping_sub(CODE), *moved, "{name}");
    }
}

// covers: differential/host
#[test]
fn host_loads_and_saves_every_register() {
    let mut host = Host::take();
    let mut state = State::new(CODE);
    for (i, value) in state.gpr.iter_mut().enumerate() {
        *value = 0x0123_4567_89ab_cdef_u64.rotate_left(4 * i as u32);
    }
    state.rflags |= STATUS | flag::DF | flag::NT | flag::ID | flag::AC;
    for (i, xmm) in state.fpu.xmm.iter_mut().enumerate() {
        *xmm = u128::MAX / (i as u128 + 3);
    }
    for (i, st) in state.fpu.st.iter_mut().enumerate() {
        *st = (0x8000_0000_0000_0000 | i as u64, 0x3fff + i as u16);
    }
    state.fpu.fcw = 0x0e7f;
    state.fpu.fsw = 3 << 11 | 0x4100;
    state.fpu.ftw = 0x5a;
    state.fpu.mxcsr = 0xffbf;
    if host.bases {
        state.fs_base = DATA;
        state.gs_base = STACK;
    }
    for code in [&[][..], &[0x90], &[0x48, 0x89, 0xe4]] {
        let outcome = run(&mut host, code, &state);
        let mut want = state.clone();
        want.rip = CODE + code.len() as u64 + 1;
        assert_eq!(
            outcome,
            Outcome {
                vector: 3,
                error: 0,
                cr2: 0,
                state: want
            }
        );
    }
    // A second take finds the process's own state as it was.
    drop(host);
    assert_eq!(Host::take().area(0).len(), AREAS[0].len as usize);
}

// covers: differential/host
#[test]
fn host_runs_32_bit_code() {
    let mut host = Host::take();
    let mut state = State::new(CODE);
    state.cs = USER32_CS;
    state.gpr[RSP] = STACK + 0x800;
    state.gpr[RAX] = 0x15;
    // add al, 27h; daa; pusha
    let outcome = run(&mut host, &[0x04, 0x27, 0x27, 0x60], &state);
    assert_eq!(outcome.vector, 3);
    assert_eq!(outcome.state.cs, USER32_CS);
    assert_eq!(outcome.state.gpr[RAX] as u32, 0x42);
    assert_eq!(outcome.state.gpr[RSP] as u32 as u64, STACK + 0x800 - 32);
    let mut pushed = [0; 4];
    host.peek(STACK + 0x800 - 4, &mut pushed);
    assert_eq!(u32::from_le_bytes(pushed), 0x42);
}

// covers: differential/host
#[test]
fn host_single_steps() {
    let mut host = Host::take();
    let mut state = State::new(CODE);
    state.rflags |= flag::TF;
    state.gpr[RDX] = 41;
    // inc edx
    let outcome = run(&mut host, &[0xff, 0xc2], &state);
    assert_eq!((outcome.vector, outcome.state.gpr[RDX]), (1, 42));
    assert_eq!(outcome.state.rip, CODE + 2);
    assert_eq!(outcome.state.gpr[RCX], 0);
}

// covers: differential/host
#[test]
fn host_stops_an_endless_loop() {
    let mut host = Host::take();
    // jmp $
    let outcome = run(&mut host, &[0xeb, 0xfe], &State::new(CODE));
    assert_eq!((outcome.vector, outcome.state.rip), (crate::host::ENDLESS, CODE));
}
