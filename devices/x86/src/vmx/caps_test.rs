extern crate std;

use super::*;
use crate::model::{CpuModel, MODELS};

/// What IA32_VMX_BASIC and the controls' MSRs must be for Debian's kvm_intel to load: `setup_vmcs_config` and `KVM_REQUIRED_VMX_*` of
/// Linux 6.1, arch/x86/kvm/vmx/vmx.h.
// covers: vmx/capabilities
#[test]
fn what_linux_requires_of_vmx_is_there_on_every_part_with_ept() {
    for caps in [
        WESTMERE,
        HASWELL,
        BROADWELL,
        SKYLAKE_SERVER,
        ICELAKE_SERVER,
        ALDERLAKE,
        SAPPHIRERAPIDS,
    ] {
        let caps = caps.shown(Features::all());
        assert!(caps.pin.contains(Pin::EXTERNAL_INTERRUPTS | Pin::NMIS));
        let primary = Primary::HLT
            | Primary::CR3_LOAD
            | Primary::CR3_STORE
            | Primary::UNCONDITIONAL_IO
            | Primary::MOV_DR
            | Primary::TSC_OFFSETTING
            | Primary::MWAIT
            | Primary::MONITOR
            | Primary::INVLPG
            | Primary::RDPMC
            | Primary::INTERRUPT_WINDOW
            | Primary::CR8_LOAD
            | Primary::CR8_STORE;
        assert!(caps.primary.contains(primary));
        assert!(
            caps.exit
                .contains(Exit::SAVE_DEBUG | Exit::ACKNOWLEDGE | Exit::HOST_64BIT)
        );
        assert!(caps.entry.contains(Entry::LOAD_DEBUG | Entry::GUEST_64BIT));
        let basic = caps.basic();
        assert!(basic >> 32 & 0x1fff <= 4096 && basic >> 48 & 1 == 0 && basic >> 50 & 15 == 6);
    }
}

#[test]
fn a_control_that_must_be_1_can_be_1_and_models_deny_what_the_engine_lacks() {
    for model in MODELS {
        let Some(part) = model.vmx else { continue };
        let shown = part.shown(Features::all());
        for row in shown.msrs(Features::all()) {
            if matches!(row.msr, 0x481..=0x484 | 0x48b | 0x48d..=0x490) {
                let (must, can) = (row.reset as u32, (row.reset >> 32) as u32);
                assert_eq!(must & !can, 0, "{} {}", model.name, row.name);
            }
        }
        assert_eq!(shown.secondary.0 & !ENGINE.secondary.0, 0, "{}", model.name);
        assert_eq!(shown.pin.0 & !ENGINE.pin.0, 0, "{}", model.name);
    }
}

#[test]
fn parts_differ_as_their_generations_do() {
    for (caps, ept, unrestricted, accessed_dirty, scaling) in [
        (CORE2, false, false, false, false),
        (WESTMERE, true, true, false, false),
        (HASWELL, true, true, true, false),
        (SKYLAKE_SERVER, true, true, true, true),
    ] {
        let caps = caps.shown(Features::all());
        assert_eq!(caps.secondary.contains(Secondary::EPT), ept);
        assert_eq!(caps.secondary.contains(Secondary::UNRESTRICTED), unrestricted);
        assert_eq!(caps.ept_vpid() >> 21 & 1 != 0, accessed_dirty);
        assert_eq!(caps.secondary.contains(Secondary::TSC_SCALING), scaling);
    }
}

// covers: vmx/toggle
#[test]
fn a_part_shows_its_vmx_and_a_toggle_hides_it() {
    use crate::model::{HASWELL as PART, NETBURST};
    use crate::msr::IA32_FEATURE_CONTROL;
    let hidden = PART.with_toggles("-vmx").unwrap();
    assert!(!hidden.features().vmx() && (0x480..0x492).all(|msr| hidden.msr(msr).is_none()));
    assert_eq!(
        hidden.msr(IA32_FEATURE_CONTROL).unwrap().reset,
        1,
        "locked, with VMX off"
    );
    for model in MODELS.iter().filter(|model| model.vmx.is_some()) {
        assert_eq!(model.cpuid(1, 0)[2] >> 5 & 1, 1, "{}", model.name);
        let control = model.msr(IA32_FEATURE_CONTROL).unwrap();
        assert_eq!(control.reset, 5, "{}: locked, with VMX on", model.name);
        // What the tables have is what a model has that is built while the program runs.
        let built = model.with_toggles("+vmx").unwrap();
        for msr in 0x480..0x492 {
            let reset = |model: &CpuModel| model.msr(msr).map(|row| (row.reset, row.name));
            assert_eq!(reset(model), reset(built), "{} {msr:x}", model.name);
        }
    }
    let secondary = PART.msr(0x48b).unwrap().reset >> 32;
    assert_ne!(secondary & u64::from(Secondary::EPT.0), 0);
    assert_ne!(secondary & u64::from(Secondary::X2APIC.0), 0);
    assert_eq!(secondary & u64::from(Secondary::USER_WAIT.0), 0, "the part has none");
    let error = NETBURST.with_toggles("+vmx").unwrap_err();
    assert_eq!(
        std::string::ToString::to_string(&error),
        "vmx: netburst has no virtual-machine extensions; core2 and all later models have them"
    );
}
