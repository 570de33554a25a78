//! A KVM that is not there, may not be used, lacks something, or fails while the guest runs: a line that says so, the right
//! status, and whatever the guest has said before. System calls of the whole program are made to fail by a filter of the
//! kernel's (seccomp), so that nothing of the program is replaced. Where there is no KVM, what needs one is skipped.

use crate::common;
use common::{Call, Folder, assert_refused, denied, kvm_is_missing, minivmm, run};
use std::process::Output;

const KVM_GET_API_VERSION: u64 = 0xae00;
const KVM_CREATE_VM: u64 = 0xae01;
const KVM_CHECK_EXTENSION: u64 = 0xae03;
const KVM_GET_SUPPORTED_CPUID: u64 = 0xc008_ae05;
const KVM_CREATE_VCPU: u64 = 0xae41;
const KVM_SET_USER_MEMORY_REGION: u64 = 0x4020_ae46;
const KVM_SET_TSS_ADDR: u64 = 0xae47;
const KVM_SET_DEVICE_ATTR: u64 = 0x4018_aee1;
const KVM_RUN: u64 = 0xae80;
const KVM_GET_REGS: u64 = 0x8090_ae81;
const KVM_INTERRUPT: u64 = 0x4004_ae86;
const KVM_SET_MSRS: u64 = 0x4008_ae89;
const KVM_SET_CPUID2: u64 = 0x4008_ae90;
const KVM_GET_TSC_KHZ: u64 = 0xaea3;
const KVM_ENABLE_CAP: u64 = 0x4068_aea3;
const KVM_SET_XSAVE: u64 = 0x5000_aea5;
const KVM_X86_SET_MSR_FILTER: u64 = 0x4188_aec6;

fn run_denied(call: Call, errno: i32, image: &[u8], options: &[&str]) -> Output {
    let folder = Folder::new();
    let kernel = folder.file("kernel", image);
    denied(call, errno, || run(minivmm().arg("--kernel").arg(kernel).args(options)))
}

// covers: kvm/missing
#[test]
fn no_kvm_and_no_permission_are_told_and_auto_goes_without() {
    for (errno, says) in [
        (libc::ENOENT, "load kvm-intel or kvm-amd, or use --engine soft"),
        (libc::EACCES, "become a member of its group, or use --engine soft"),
        (libc::ENODEV, "/dev/kvm: "),
    ] {
        let refused = run_denied(
            Call::OpenReadWrite,
            errno,
            &common::hello(),
            &["--engine", "kvm", "--kvm-defects", "accept"],
        );
        assert_refused(&refused, 2, &["--engine kvm", "/dev/kvm", says]);
        let auto = run_denied(
            Call::OpenReadWrite,
            errno,
            &common::hello(),
            &["--engine", "auto", "-v"],
        );
        let errors = String::from_utf8_lossy(&auto.stderr).into_owned();
        assert_eq!(auto.status.code(), Some(0), "{errors}");
        assert_eq!(String::from_utf8_lossy(&auto.stdout), "hello\n");
        assert!(
            errors.contains("--engine auto: the software engine: ") && errors.contains("/dev/kvm"),
            "{errors}"
        );
        let probe = denied(Call::OpenReadWrite, errno, || run(minivmm().arg("probe")));
        let said = String::from_utf8_lossy(&probe.stdout).into_owned();
        assert_eq!(probe.status.code(), Some(0), "{said}");
        assert!(said.contains("KVM      none: ") && said.contains(says), "{said}");
    }
}

// covers: kvm/capabilities
#[test]
fn a_kvm_that_lacks_what_is_needed_is_refused_in_one_line() {
    if kvm_is_missing("a KVM that lacks something") {
        return;
    }
    let refused = |call, errno, says: &[&str]| {
        let ran = run_denied(
            call,
            errno,
            &common::hello(),
            &["--engine", "kvm", "--kvm-defects", "accept"],
        );
        assert_refused(&ran, 2, &[&["--engine kvm"], says].concat());
    };
    refused(Call::Ioctl(KVM_GET_API_VERSION), 0, &["API version 0, not 12"]);
    for (number, name) in [
        (3, "KVM_CAP_USER_MEMORY"),
        (136, "KVM_CAP_IMMEDIATE_EXIT"),
        (188, "KVM_CAP_X86_USER_SPACE_MSR"),
        (189, "KVM_CAP_X86_MSR_FILTER"),
        (41, "KVM_CAP_VCPU_EVENTS"),
        (74, "KVM_CAP_SYNC_REGS"),
        (50, "KVM_CAP_DEBUGREGS"),
        (55, "KVM_CAP_XSAVE"),
        (56, "KVM_CAP_XCRS"),
        (61, "KVM_CAP_GET_TSC_KHZ"),
    ] {
        refused(
            Call::IoctlOf(KVM_CHECK_EXTENSION, number),
            0,
            &[name, "use --engine soft"],
        );
    }
    for (request, name) in [
        (KVM_CREATE_VM, "KVM_CREATE_VM"),
        (KVM_GET_SUPPORTED_CPUID, "KVM_GET_SUPPORTED_CPUID"),
        (KVM_CREATE_VCPU, "KVM_CREATE_VCPU"),
        (KVM_GET_TSC_KHZ, "KVM_GET_TSC_KHZ"),
        (KVM_ENABLE_CAP, "KVM_CAP_X86_USER_SPACE_MSR"),
        (KVM_X86_SET_MSR_FILTER, "KVM_X86_SET_MSR_FILTER"),
        (KVM_SET_TSS_ADDR, "KVM_SET_TSS_ADDR"),
        (KVM_SET_USER_MEMORY_REGION, "KVM_SET_USER_MEMORY_REGION"),
        (KVM_SET_CPUID2, "KVM_SET_CPUID2"),
    ] {
        refused(Call::Ioctl(request), libc::ENOMEM, &[name, "memory"]);
    }
}

// covers: kvm/fails-mid-run
#[test]
fn a_kvm_that_fails_while_the_guest_runs_is_told_with_where_it_was() {
    if kvm_is_missing("a KVM that fails") {
        return;
    }
    // A guest that comes to its first interrupt, one that is handed to KVM, and one whose CPU cannot be run.
    for (request, says, first) in [
        (KVM_INTERRUPT, "KVM_INTERRUPT: input/output error", "ready\n"),
        (KVM_GET_REGS, "KVM_GET_REGS: input/output error", ""),
        (KVM_SET_MSRS, "KVM_SET_MSRS: input/output error", ""),
        (KVM_SET_XSAVE, "KVM_SET_XSAVE: input/output error", ""),
        (KVM_RUN, "KVM_RUN: input/output error", ""),
    ] {
        // The timer, once a millisecond, since there is no input.
        let image = common::interrupt_guest(
            0xfe,
            0x20,
            |a| {
                common::out(a, 0x43, 0x34);
                common::out(a, 0x40, 0xa9);
                common::out(a, 0x40, 0x04);
                common::print(a, "ready\n");
            },
            |_, _| {},
        );
        let failed = run_denied(
            Call::Ioctl(request),
            libc::EIO,
            &image,
            &["--engine", "kvm", "--kvm-defects", "accept", "--timeout", "20"],
        );
        let errors = String::from_utf8_lossy(&failed.stderr).into_owned();
        assert_eq!(failed.status.code(), Some(2), "{errors}");
        // Before it may be said that this KVM interprets.
        let line = errors
            .lines()
            .find(|line| !line.contains("KVM interprets here"))
            .unwrap();
        assert!(
            line.starts_with("minivmm: --engine kvm: the host's KVM failed") && line.contains("--engine soft"),
            "{errors}"
        );
        assert!(line.contains(says), "{errors}");
        assert!(errors.contains("RIP"), "registers: {errors}");
        assert_eq!(String::from_utf8_lossy(&failed.stdout), first, "{says}");
    }
}

/// Nothing is assumed of this host's KVM: what `probe` found decides what is to be refused.
// covers: kvm/trial
#[test]
fn a_kvm_that_does_not_do_what_it_accepts_is_refused_unless_that_is_accepted() {
    if kvm_is_missing("a KVM that does not do what it accepts") {
        return;
    }
    let probe = String::from_utf8(run(minivmm().arg("probe")).stdout).unwrap();
    let lines = probe.lines().filter_map(|line| line.strip_prefix("trial    "));
    let found: Vec<&str> = lines
        .filter(|line| !line.contains("are what they are set to"))
        .collect();
    let on_kvm = |options: &[&str]| common::run_guest(&common::hello(), &[&["--engine", "kvm"], options].concat());
    match found.first() {
        Some(first) => assert_refused(&on_kvm(&[]), 2, &["--engine kvm", first, "--kvm-defects accept"]),
        None => assert_eq!(on_kvm(&[]).status.code(), Some(0)),
    }
    let accepted = on_kvm(&["--kvm-defects", "accept", "-v"]);
    let errors = String::from_utf8_lossy(&accepted.stderr).into_owned();
    assert_eq!(accepted.status.code(), Some(0), "{errors}");
    assert!(found.iter().all(|line| errors.contains(line)), "{errors}");
    assert_eq!(probe.contains("--engine kvm is refused"), !found.is_empty(), "{probe}");

    // One that has no offsets at all, as before Linux 5.16.
    let old = run_denied(
        Call::Ioctl(KVM_SET_DEVICE_ATTR),
        libc::ENXIO,
        &common::hello(),
        &["--engine", "kvm"],
    );
    assert_refused(&old, 2, &["--engine kvm", "KVM_VCPU_TSC_OFFSET; Linux 5.16 has"]);
}
