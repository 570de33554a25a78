//! minivmm on a real kvm-intel, which runs on minivmm's own software CPU with VMX.

use guest_tests::lab::{Ended, Host, Job, jobs};
use guest_tests::{HELLO, INIT_MARKER, linux};

// covers: lab/own, lab/own-linux
#[test]
fn debian_boots_in_debians_kvm_on_our_own_vmx() {
    let hello = Job::new(["--engine", "kvm", "-m", "32M"]).file("--kernel", HELLO);
    let cmdline = "console=ttyS0 quiet panic=-1 minivmm.script=nothing";
    let options = "--engine kvm -m 128M --cpu-model westmere --cmdline";
    let debian = Job::new(options.split(' ').chain([cmdline]))
        .file("--kernel", &linux().kernel)
        .file("--initrd", &linux().initrd);
    let ended = jobs(Host::Own, &[hello, debian]).unwrap_or_else(|why| panic!("{why}"));
    let [hello, debian] = &ended[..] else {
        panic!("{} jobs", ended.len())
    };
    assert!(hello.said.contains("Hello from a multiboot guest."), "{}", hello.said);
    let Ended { status, said } = debian;
    assert_eq!(*status, 0, "{said}");
    for line in [INIT_MARKER, "minivmm-guest: script nothing ended with status 0"] {
        assert!(said.contains(line), "no '{line}': {said}");
    }
}
