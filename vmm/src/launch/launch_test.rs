//! Tests of what a machine is refused for.

use super::*;
use crate::config::{EngineChoice, VectorChoice};
use ::engine::Vectors;
use x86::model::{HASWELL, WESTMERE};

// covers: bad-input/host
#[test]
fn a_model_that_the_host_cannot_execute_is_refused_in_one_line() {
    let error = host_lacks(&WESTMERE, &HostLacks(vec!["SSE4.2", "AES"]));
    assert_eq!(error.status().code(), 2);
    let says = "--cpu-model westmere: this host lacks SSE4.2, AES, which the model needs: leave out --vector host, or choose another \
                model or host";
    assert_eq!(error.to_string(), says);
}

// covers: portable/any-host
#[test]
fn a_model_is_not_refused_for_vector_instructions_that_the_host_lacks() {
    let without_avx = || Err(HostLacks(vec!["AVX", "AVX2", "FMA"]));
    for (choice, host, vectors) in [
        (None, Ok(()), Vectors::Host),
        (None, without_avx(), Vectors::Tables),
        (Some(VectorChoice::Portable), Ok(()), Vectors::Portable),
        (Some(VectorChoice::Portable), without_avx(), Vectors::Tables),
        (Some(VectorChoice::Tables), Ok(()), Vectors::Tables),
        // Said, it is refused.
        (Some(VectorChoice::Host), without_avx(), Vectors::Host),
    ] {
        let text = format!("{choice:?} on {host:?}");
        assert_eq!(engine::vectors(choice, &HASWELL, host), vectors, "{text}");
    }
}

// covers: vmx/kvm
#[test]
fn who_asks_for_vmx_gets_the_software_engine() {
    let config = |model, engine| MachineConfig {
        model,
        engine,
        ..MachineConfig::new("kernel")
    };
    let asked = HASWELL.with_toggles("+vmx").unwrap();
    assert!(engine::choose(&config(asked, EngineChoice::Auto)).unwrap().is_none());
    let error = engine::choose(&config(asked, EngineChoice::Kvm))
        .err()
        .map(|error| error.to_string());
    let says = "--engine kvm: --cpu-model +vmx shows the guest VMX, which guests of KVM do not get here: leave it out, or use --engine soft";
    assert_eq!(error.as_deref(), Some(says));
    // Who does not ask gets a guest of KVM without it.
    assert!(engine::needs_soft(&config(&HASWELL, EngineChoice::Kvm)).is_none());
}
