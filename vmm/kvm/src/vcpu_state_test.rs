use super::*;
use engine::{CS, FS, SS};
use x86::model::{HASWELL, SAPPHIRERAPIDS, WESTMERE};

/// A state in 64-bit mode with something of its own in every field.
fn state(model: &CpuModel) -> CpuState {
    let mut state = CpuState::reset(model);
    for (i, gpr) in state.gpr.iter_mut().enumerate() {
        *gpr = 0x1111_0000_0000_0000 + i as u64;
    }
    (state.rip, state.rflags) = (0xffff_8000_0000_1234, 0x1_0ad7.into());
    state.segments[CS].attributes = 0xa09b;
    state.segments[SS].attributes = 0xc0f3;
    state.segments[FS] = Segment {
        base: 0x7fff_1234_5678,
        ..Segment::default()
    };
    state.cpl = 3;
    (state.gdtr.base, state.gdtr.limit, state.idtr.base) = (0x1000, 0x7f, 0x2000);
    (state.cr0, state.cr4, state.efer) = (0x8005_0033.into(), 0x620.into(), 0xd01.into());
    (state.cr2, state.cr3) = (0xdead, 0x5000);
    state.dr = [1, 2, 3, 4, 0, 0, 0xffff_0ff3, 0x455];
    for (i, (xmm, r)) in state.fpu.xmm.iter_mut().zip(1u128..).enumerate() {
        *xmm = r << 64 | i as u128;
    }
    (state.fpu.cw, state.fpu.sw, state.fpu.tag) = (0x27f, 5 << 11, 0x60);
    state.fpu.r[5] = 0x4000_8000_0000_0000_0000;
    state.fpu.mxcsr = 0x9f80;
    (state.fpu.fip, state.fpu.fdp) = (0xffff_8000_0000_0001, 0x7f00_0000_0000);
    if model.features().avx() {
        state.xcr0 = 7;
        state.fpu.ymm_hi[15] = 77;
    }
    if model.features().avx512f() {
        state.xcr0 |= 0xe0;
        for n in 0..32 {
            let [low, high, ..] = state.fpu.zmm(n);
            let n128 = n as u128;
            let low = if n < 16 { [low, high] } else { [n128, n128 << 8] };
            state.fpu.set_zmm(n, [low[0], low[1], 0x300 + n128, 0x400 + n128]);
        }
        state.fpu.avx512.k = core::array::from_fn(|n| 0x500 + n as u64);
    }
    state.msrs.lstar = 0xffff_ffff_8100_0000;
    state.msrs.kernel_gs_base = 0xffff_8880_0000_0000;
    state.msrs.sysenter_eip = 9;
    state.nmi_blocked = true;
    (state.steps, state.iterations) = (100, 7);
    state
}

// covers: kvm/handover-state
#[test]
fn a_state_goes_to_kvm_and_comes_back_whole() {
    for model in [&WESTMERE, &HASWELL, &SAPPHIRERAPIDS] {
        for (shadow, stack_shadow) in [(false, false), (true, false), (true, true)] {
            let state = CpuState {
                shadow,
                stack_shadow,
                ..state(model)
            };
            assert!(portable(&state));
            let mut vcpu = Vcpu::default();
            vcpu.take(&state, model);
            let before = CpuState {
                steps: 100,
                iterations: 7,
                ..CpuState::reset(model)
            };
            assert_eq!(vcpu.give(&before, model), state, "{}", model.name);
        }
    }
}

// covers: kvm/handover-state
#[test]
fn components_in_their_initial_configuration_have_no_bytes() {
    let mut vcpu = Vcpu::default();
    vcpu.take(&state(&HASWELL), &HASWELL);
    vcpu.xsave.region[XSTATE_BV / 4] = 0;
    let fpu = vcpu.give(&state(&HASWELL), &HASWELL).fpu;
    assert_eq!((fpu.cw, fpu.sw, fpu.tag, fpu.r), (0x37f, 0, 0, [0; 8]));
    assert_eq!((fpu.xmm, fpu.ymm_hi), ([0; 16], [0; 16]));
    assert_eq!(fpu.mxcsr, 0x9f80, "MXCSR is loaded all the same");
}

// covers: kvm/handover-events
#[test]
fn an_event_under_way_is_begun_anew_unless_an_instruction_does_so() {
    let event = |f: &dyn Fn(&mut kvm_vcpu_events)| {
        let mut vcpu = Vcpu::default();
        f(&mut vcpu.events);
        vcpu.pending()
    };
    assert_eq!(event(&|_| {}), None);
    let page_fault = event(&|e| {
        e.exception.injected = 1;
        e.exception.nr = 14;
        e.exception.has_error_code = 1;
        e.exception.error_code = 6;
    });
    let expected = Event {
        vector: 14,
        error: Some(6),
        source: Source::Exception,
    };
    assert_eq!(page_fault, Some(expected));
    let breakpoint = event(&|e| (e.exception.injected, e.exception.nr) = (1, 3));
    assert_eq!(breakpoint, None, "INT3 runs again");
    let soft = event(&|e| (e.interrupt.injected, e.interrupt.nr, e.interrupt.soft) = (1, 0x80, 1));
    assert_eq!(soft, None, "INT n runs again");
    let external = event(&|e| (e.interrupt.injected, e.interrupt.nr) = (1, 0x31));
    assert_eq!(external.map(|e| (e.vector, e.source)), Some((0x31, Source::External)));
    let nmi = event(&|e| e.nmi.injected = 1);
    assert_eq!(nmi.map(|e| (e.vector, e.source)), Some((2, Source::Nmi)));
}

// covers: kvm/nmi
#[test]
fn an_nmi_that_left_kvm_does_not_wait_there_as_well() {
    let mut vcpu = Vcpu::default();
    vcpu.events.nmi.pending = 1;
    vcpu.take(&state(&HASWELL), &HASWELL);
    let says = vcpu.events.flags & KVM_VCPUEVENT_VALID_NMI_PENDING != 0;
    assert_eq!((vcpu.events.nmi.pending, says), (0, true));
}

// covers: kvm/handover-state
#[test]
fn what_kvm_has_no_place_for_keeps_a_cpu_in_the_engine() {
    let mut state = state(&HASWELL);
    state.pending_debug = 1;
    assert!(!portable(&state));
    state.pending_debug = 0;
    state.activity = Activity::Waiting;
    assert!(!portable(&state));
}
