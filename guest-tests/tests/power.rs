//! Power events of Intel PT on HLT and MWAIT, as a guest's own trace has them. SDM Vol. 3C 33.2.3 "Power Event Tracing".

use guest_tests::flat::{CODE, DATA, Flat, TRACE, wrmsr};
use iced_x86::code_asm::*;
use iced_x86::{Decoder, Mnemonic};
use pt_packet::Packet;
use x86::model::{CpuModel, MODELS};
use x86::msr::*;
use x86::pt::RtitCtl;

const VECTOR: u8 = 0x40;
/// C-state and sub-state of MWAIT's hint.
const HINT: u32 = 0x21;

/// Traces a HLT and a MWAIT, which an interrupt ends; what is reported of power, and where.
fn power(model: &'static CpuModel) -> (Flat, Vec<Packet>) {
    let ctl = RtitCtl::new()
        .with_trace_en(true)
        .with_os(true)
        .with_branch_en(true)
        .with_tsc_en(true)
        .with_pwr_evt_en(true);
    let mut flat = Flat::new(model, 0, |a| {
        wrmsr(a, IA32_RTIT_OUTPUT_BASE, TRACE)?;
        wrmsr(a, IA32_RTIT_OUTPUT_MASK_PTRS, 0xF_FFFF)?;
        wrmsr(a, IA32_RTIT_CTL, ctl.into_bits())?;
        a.sti()?;
        a.hlt()?;
        a.mov(rax, DATA)?;
        a.xor(ecx, ecx)?;
        a.xor(edx, edx)?;
        a.monitor()?;
        a.mov(eax, HINT)?;
        a.mwait()?;
        a.nop()?;
        wrmsr(a, IA32_RTIT_CTL, 0)?;
        a.hlt()
    });
    flat.handle(VECTOR, &[0x48, 0xCF]);
    flat.go(&[VECTOR, VECTOR]).unwrap();
    let trace = flat.read(TRACE, 0x4000);
    let packets = pt_packet::Decoder::new(&trace).map(|item| item.expect("packets").packet);
    let packets = packets.filter(|packet| !matches!(packet, Packet::Pad)).collect();
    (flat, packets)
}

// covers: pt/power-guest
#[test]
fn hlt_and_mwait_are_told_as_power_events() {
    let mut models = 0;
    for model in MODELS {
        if !model.units.pt.is_some_and(|pt| pt.power_events()) {
            continue;
        }
        models += 1;
        let (flat, packets) = power(model);
        let place = |mnemonic| {
            let code = Decoder::with_ip(64, flat.code(), CODE, 0);
            let at = code.into_iter().find(|i| i.mnemonic() == mnemonic);
            at.expect("it is there").ip()
        };
        let reported = |packet: &Packet| {
            matches!(
                packet,
                Packet::Pwre { .. } | Packet::ExStop { .. } | Packet::Pwrx { .. } | Packet::Mwait { .. }
            )
        };
        let mut expected = vec![
            Packet::Pwre {
                hardware: false,
                state: 1,
                sub_state: 0,
            },
            Packet::ExStop { ip: true },
        ];
        let found: Vec<Packet> = packets.iter().copied().filter(reported).collect();
        let woken = |state| Packet::Pwrx {
            last: state,
            deepest: state,
            reason: 1,
        };
        expected.push(woken(1));
        expected.extend([
            Packet::Mwait {
                hints: HINT,
                extensions: 0,
            },
            Packet::Pwre {
                hardware: false,
                state: 3,
                sub_state: 1,
            },
            Packet::ExStop { ip: true },
            woken(3),
        ]);
        assert_eq!(found, expected, "{}", model.name);
        // EXSTOP's FUP is where execution stopped: the instruction's own address.
        let stops: Vec<Packet> = packets
            .windows(2)
            .filter(|pair| matches!(pair[0], Packet::ExStop { .. }))
            .map(|pair| pair[1])
            .collect();
        let should = [Mnemonic::Hlt, Mnemonic::Mwait].map(|mnemonic| Packet::Fup(Some(place(mnemonic))));
        assert_eq!(stops, should, "{}", model.name);
    }
    assert!(models > 0);
}
