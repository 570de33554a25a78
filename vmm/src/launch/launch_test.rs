//! Tests of what a machine is refused for.

use super::*;
use x86::model::WESTMERE;

// covers: bad-input/host
#[test]
fn a_model_that_the_host_cannot_execute_is_refused_in_one_line() {
    let error = host_lacks(&WESTMERE, &HostLacks(vec!["SSE4.2", "AES"]));
    assert_eq!(error.status().code(), 2);
    let says = "--cpu-model westmere: this host lacks SSE4.2, AES, which the model needs; choose another model or host";
    assert_eq!(error.to_string(), says);
}
