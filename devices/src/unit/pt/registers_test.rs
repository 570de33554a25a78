//! Each register bit by bit, on each model.

use x86::pt::RtitStatus;

use super::*;

/// Bits of IA32_RTIT_CTL that a model takes by themselves, TraceEn aside, by the manual's table of leaf 14H.
fn ctl_bits(model: &str) -> Vec<u32> {
    let bits: &[u32] = match model {
        // OS, User, CR3Filter, ToPA, TSCEn, DisRETC, BranchEn.
        "broadwell" => &[2, 3, 7, 8, 10, 11, 13],
        // CYCEn, MTCEn; of MTCFreq 1, 2, 4, 8 only 8 is enumerated by 0249H; CycThresh 1, 2, 4, 8 by 3FFFH or 1FFFH, PSBFreq 1, 2, 4
        // by 3FH; ADDRn_CFG 1 and 2 of two ranges.
        "skylake-server" | "icelake-server" => {
            &[1, 2, 3, 7, 8, 9, 10, 11, 13, 19, 20, 21, 22, 24, 25, 26, 32, 33, 36, 37]
        }
        // And FUPonPTW, PTWEn, InjectPsbPmiOnEnable; CycThresh by 3FH has no 8.
        "sapphirerapids" | "alderlake" => &[
            1, 2, 3, 5, 7, 8, 9, 10, 11, 12, 13, 19, 20, 21, 24, 25, 26, 32, 33, 36, 37, 56,
        ],
        // And PwrEvtEn.
        "snowridge" => &[
            1, 2, 3, 4, 5, 7, 8, 9, 10, 11, 12, 13, 19, 20, 21, 22, 24, 25, 26, 32, 33, 36, 37, 56,
        ],
        other => panic!("no row for {other}"),
    };
    bits.to_vec()
}

// covers: pt/msr-bits
#[test]
fn each_bit_of_ctl_by_model() {
    for model in MODELS {
        let allowed = ctl_bits(model.name);
        for bit in 1..64 {
            let mut bench = Bench::new(caps(model));
            let got = bench.pt.write_msr(IA32_RTIT_CTL, 1 << bit, &mut bench.guest);
            let name = model.name;
            if allowed.contains(&bit) {
                assert!(got.is_ok(), "{name}: bit {bit} is writable");
                assert_eq!(bench.rdmsr(IA32_RTIT_CTL), 1 << bit, "{name}: bit {bit}");
            } else {
                assert_eq!(got, Err(MsrFault::GeneralProtection), "{name}: bit {bit} is reserved");
                assert_eq!(bench.rdmsr(IA32_RTIT_CTL), 0, "{name}: bit {bit}");
            }
        }
    }
}

// covers: pt/msr-encodings
#[test]
fn each_encoding_of_the_frequencies_by_model() {
    // MTCFreq at 14, CycThresh at 19, PSBFreq at 24: the values that leaf 14H.1 lists.
    for (model, mtc, cyc, psb) in [
        (&SKYLAKE_SERVER, 0x0249u32, 0x3FFFu32, 0x3Fu32),
        (&ICELAKE_SERVER, 0x0249, 0x1FFF, 0x3F),
        (&SAPPHIRERAPIDS, 0x0249, 0x3F, 0x3F),
        (&ALDERLAKE, 0x0249, 0x3F, 0x3F),
        (&SNOWRIDGE, 0x0249, 0x3FFF, 0x3F),
        (&BROADWELL, 1, 1, 1),
    ] {
        for (shift, listed) in [(14, mtc), (19, cyc), (24, psb)] {
            for code in 0..16u64 {
                let mut bench = Bench::new(caps(model));
                let got = bench.pt.write_msr(IA32_RTIT_CTL, code << shift, &mut bench.guest);
                let expected = listed >> code & 1 != 0;
                assert_eq!(got.is_ok(), expected, "{}: {code} at {shift}", model.name);
            }
        }
        for config in 0..16u64 {
            for range in 0..4 {
                let mut bench = Bench::new(caps(model));
                let got = bench
                    .pt
                    .write_msr(IA32_RTIT_CTL, config << (32 + 4 * range), &mut bench.guest);
                let ranges = if model.name == "broadwell" { 0 } else { 2 };
                let expected = config == 0 || range < ranges && config <= 2;
                assert_eq!(got.is_ok(), expected, "{}: ADDR{range}_CFG {config}", model.name);
            }
        }
    }
}

// covers: pt/msr-bits
#[test]
fn each_bit_of_status_by_model() {
    for model in MODELS {
        for bit in 0..64 {
            let mut bench = Bench::new(caps(model));
            let got = bench.pt.write_msr(IA32_RTIT_STATUS, 1 << bit, &mut bench.guest);
            let expected = match bit {
                // FilterEn, ContextEn, TriggerEn: writes are ignored.
                0..=2 => Ok(0),
                // Error, Stopped.
                4 | 5 => Ok(1u64 << bit),
                // PendPSB, PendTopaPMI.
                6 | 7 if matches!(model.name, "sapphirerapids" | "alderlake" | "snowridge") => Ok(1 << bit),
                // PacketByteCnt.
                32..=48 if model.name != "broadwell" => Ok(1 << bit),
                _ => Err(MsrFault::GeneralProtection),
            };
            let got = got.map(|_| bench.rdmsr(IA32_RTIT_STATUS));
            assert_eq!(got, expected, "{}: bit {bit}", model.name);
        }
    }
}

// covers: pt/msr-bits
#[test]
fn each_bit_of_the_other_registers_by_model() {
    for model in MODELS {
        let name = model.name;
        let physical = model.physical_bits();
        let (linear, ranges) = (model.linear_bits(), if name == "broadwell" { 0 } else { 2 });
        for bit in 0..64u32 {
            let mut bench = Bench::new(caps(model));
            let mut write = |msr| {
                let got = bench.pt.write_msr(msr, 1 << bit, &mut bench.guest);
                got.map(|_| bench.rdmsr(msr))
            };
            let unless = |bad: bool| {
                if bad {
                    Err(MsrFault::GeneralProtection)
                } else {
                    Ok(1u64 << bit)
                }
            };
            assert_eq!(
                write(IA32_RTIT_OUTPUT_BASE),
                unless(bit < 7 || bit >= physical),
                "{name}: {bit}"
            );
            assert_eq!(write(IA32_RTIT_CR3_MATCH), unless(bit < 5), "{name}: {bit}");
            // The lowest seven bits are forced to 1s.
            assert_eq!(write(IA32_RTIT_OUTPUT_MASK_PTRS), Ok(1 << bit | 0x7F), "{name}: {bit}");
            for n in 0..8 {
                // One bit alone is sign-extended only below the highest of a linear address.
                let expected = unless(n >= 2 * ranges || bit >= linear - 1);
                assert_eq!(
                    write(IA32_RTIT_ADDR0_A + n),
                    expected,
                    "{name}: ADDR register {n}, bit {bit}"
                );
            }
        }
        let mut bench = Bench::new(caps(model));
        if ranges != 0 {
            bench.wrmsr(IA32_RTIT_ADDR0_B, !0);
            assert_eq!(bench.rdmsr(IA32_RTIT_ADDR0_B), !0, "{name}: sign-extended");
        }
        assert_eq!(bench.rdmsr(IA32_RTIT_OUTPUT_MASK_PTRS), 0x7F, "{name}: after power-up");
        for msr in [0x55F, 0x562, 0x56F, 0x573, 0x57F, 0x588] {
            assert_eq!(bench.pt.read_msr(msr), Err(MsrFault::Unclaimed), "{name}: {msr:X}");
            let got = bench.pt.write_msr(msr, 0, &mut bench.guest);
            assert_eq!(got, Err(MsrFault::Unclaimed), "{name}: {msr:X}");
        }
    }
}

// covers: pt/msr-trace-en
#[test]
fn output_schemes_and_branches_that_a_model_lacks_cannot_be_traced() {
    let en = RtitCtl::new().with_trace_en(true);
    for (model, ctl, taken, why) in [
        (&BROADWELL, en.with_branch_en(true), false, "no single range"),
        (&BROADWELL, en.with_topa(true), false, "no tracing without branches"),
        (&BROADWELL, en.with_topa(true).with_branch_en(true), true, "ToPA"),
        (&SKYLAKE_SERVER, en.with_branch_en(true), true, "single range"),
        (&SKYLAKE_SERVER, en, true, "no branches"),
        (
            &SKYLAKE_SERVER,
            en.with_fabric_en(true),
            false,
            "no transport subsystem",
        ),
    ] {
        let mut bench = Bench::new(caps(model));
        let got = bench.pt.write_msr(IA32_RTIT_CTL, ctl.into_bits(), &mut bench.guest);
        assert_eq!(got.is_ok(), taken, "{}: {why}", model.name);
    }
}

// covers: pt/msr-trace-en
#[test]
fn while_tracing_only_trace_en_can_be_cleared() {
    let ctl = all_rings().with_trace_en(true);
    for (msr, value, taken, why) in [
        (IA32_RTIT_CTL, ctl.into_bits(), true, "the same value"),
        (IA32_RTIT_CTL, ctl.with_tsc_en(true).into_bits(), false, "another value"),
        (
            IA32_RTIT_CTL,
            ctl.with_trace_en(false).with_tsc_en(true).into_bits(),
            true,
            "with TraceEn clear",
        ),
        (IA32_RTIT_CTL, 1 << 63, false, "a reserved bit, TraceEn clear or not"),
        (IA32_RTIT_STATUS, 0, false, "status"),
        (IA32_RTIT_OUTPUT_BASE, RANGE, false, "base, even with its own value"),
        (IA32_RTIT_OUTPUT_MASK_PTRS, MASK, false, "mask"),
        (IA32_RTIT_CR3_MATCH, 0, false, "CR3"),
        (IA32_RTIT_ADDR0_A, 0, false, "range"),
    ] {
        let mut bench = Bench::start(caps(&SKYLAKE_SERVER), all_rings());
        let before = bench.pt.state();
        let got = bench.pt.write_msr(msr, value, &mut bench.guest);
        assert_eq!(got.is_ok(), taken, "{why}");
        if !taken || value == ctl.into_bits() {
            assert!(bench.pt.state() == before, "{why}: nothing has changed");
        } else {
            assert_eq!(bench.rdmsr(IA32_RTIT_CTL), value, "{why}");
        }
    }
}

// covers: pt/status-enables
#[test]
fn status_shows_the_enables() {
    let enables = |bench: &Bench| {
        let status = RtitStatus::from_bits(bench.rdmsr(IA32_RTIT_STATUS));
        (status.trigger_en(), status.context_en(), status.filter_en())
    };
    let mut bench = Bench::start(caps(&SKYLAKE_SERVER), all_rings().with_user(false));
    assert_eq!(enables(&bench), (true, true, true), "ring 0 is traced");
    bench.guest.context.cpl = 3;
    bench.branch(Flow::Far(x86::watch::Far::Sysret), 0x1000, 0x40_0000);
    assert_eq!(
        enables(&bench),
        (true, false, true),
        "FilterEn keeps still out of context"
    );
    bench.stop();
    assert_eq!(
        enables(&bench),
        (false, false, true),
        "both keep still without TriggerEn"
    );
    for status in [RtitStatus::new().with_error(true), RtitStatus::new().with_stopped(true)] {
        let mut bench = Bench::new(caps(&SKYLAKE_SERVER));
        bench.wrmsr(IA32_RTIT_STATUS, status.into_bits());
        bench.begin(all_rings());
        assert_eq!(
            bench.rdmsr(IA32_RTIT_STATUS),
            status.into_bits(),
            "a trace that has ended does not begin"
        );
        assert_eq!(bench.offset(), 0);
        assert_eq!(bench.pt.interest(bench.guest.step), x86::watch::Interest::NOTHING);
    }
}

// covers: pt/reset
#[test]
fn what_outlives_a_reset() {
    for model in MODELS {
        let mut bench = Bench::new(caps(model));
        bench.wrmsr(IA32_RTIT_OUTPUT_BASE, 0x8000);
        bench.wrmsr(IA32_RTIT_CR3_MATCH, 0x7000);
        bench.guest.ram[0x8000..0x8008].copy_from_slice(&0x4_0000u64.to_le_bytes());
        bench.guest.ram[0x8008..0x8010].copy_from_slice(&0x8001u64.to_le_bytes());
        let ctl = all_rings().with_topa(true);
        bench.wrmsr(IA32_RTIT_CTL, ctl.with_trace_en(true).into_bits());
        assert!(bench.offset() > 0, "{}: the trace has begun", model.name);
        let mut cold = bench.clone();
        let offset = bench.offset();
        bench.pt.warm_reset();
        let keeps = model.name != "broadwell";
        let registers =
            |bench: &Bench| [IA32_RTIT_CTL, IA32_RTIT_OUTPUT_BASE, IA32_RTIT_CR3_MATCH].map(|msr| bench.rdmsr(msr));
        if keeps {
            assert_eq!(
                registers(&bench),
                [ctl.into_bits(), 0x8000, 0x7000],
                "{}: warm",
                model.name
            );
            assert_eq!(bench.offset(), offset, "{}: warm", model.name);
        } else {
            assert_eq!(registers(&bench), [0, 0, 0], "{}: warm, not preserved", model.name);
        }
        let _ = cold.pt.change(x86::watch::Change::Reset, &mut cold.guest);
        assert_eq!(registers(&cold), [0, 0, 0], "{}: cold", model.name);
        assert!(
            cold.pt.state() == Bench::new(caps(model)).pt.state(),
            "{}: as new",
            model.name
        );
    }
}

// covers: pt/xsaves
#[test]
fn xsaves_takes_the_registers_and_stops_the_trace() {
    let mut bench = Bench::new(caps(&SKYLAKE_SERVER));
    let mut area = [0xAA; 128];
    assert!(
        bench.pt.save_component(&mut area, 4, &mut bench.guest).0,
        "in its initial state"
    );
    assert_eq!(area, [0xAA; 128], "nothing is written");

    bench.wrmsr(IA32_RTIT_ADDR0_B, 0xFFFF);
    bench.wrmsr(IA32_RTIT_CR3_MATCH, 0x5000);
    let ctl = all_rings().with_cr3_filter(true).with_trace_en(true);
    bench.begin(ctl);
    let (initial, _) = bench.pt.save_component(&mut area, 4, &mut bench.guest);
    assert!(!initial);
    assert!(!bench.pt.trace_en(), "TraceEn is clear");
    let word = |n: usize| u64::from_le_bytes(area[n * 8..][..8].try_into().unwrap());
    assert_eq!(word(0), ctl.into_bits(), "as it was before");
    for (n, msr) in [
        IA32_RTIT_OUTPUT_BASE,
        IA32_RTIT_OUTPUT_MASK_PTRS,
        IA32_RTIT_STATUS,
        IA32_RTIT_CR3_MATCH,
        IA32_RTIT_ADDR0_A,
        IA32_RTIT_ADDR0_B,
        IA32_RTIT_ADDR1_A,
        IA32_RTIT_ADDR1_B,
    ]
    .into_iter()
    .enumerate()
    {
        assert_eq!(word(n + 1), bench.rdmsr(msr), "register {msr:X}, after the flush");
    }
    assert!(area[72..].iter().all(|&byte| byte == 0xAA));

    let offset = bench.offset();
    let got = bench.pt.restore_component(None, 4, &mut bench.guest);
    assert!(got.is_ok());
    assert_eq!(
        (bench.rdmsr(IA32_RTIT_CR3_MATCH), bench.offset()),
        (0, 0),
        "the initial state"
    );
    let got = bench.pt.restore_component(Some(&area), 4, &mut bench.guest);
    assert!(got.is_ok() && bench.pt.trace_en(), "the trace goes on");
    assert!(bench.offset() > offset, "TIP.PGE at least");
    let again = bench.pt.restore_component(Some(&area), 4, &mut bench.guest);
    assert_eq!(again, Err(MsrFault::GeneralProtection), "while TraceEn is set");
    bench.stop();
    area[0x20] |= 1;
    let before = bench.pt.state();
    let got = bench.pt.restore_component(Some(&area), 4, &mut bench.guest);
    assert_eq!(
        got,
        Err(MsrFault::GeneralProtection),
        "a reserved bit of the CR3 register"
    );
    assert!(bench.pt.state() == before, "nothing has changed");
}
