use super::*;

// covers: kvm/fails-mid-run
#[test]
fn what_kvm_fails_with_has_its_name() {
    for (reason, detail, says) in [
        (
            KVM_EXIT_FAIL_ENTRY,
            0x8000_0021,
            "KVM_EXIT_FAIL_ENTRY, the processor's reason 0x80000021",
        ),
        (KVM_EXIT_INTERNAL_ERROR, 3, "KVM_EXIT_INTERNAL_ERROR, suberror 3"),
        (KVM_EXIT_UNKNOWN, 0x31, "KVM_EXIT_UNKNOWN, the processor's reason 0x31"),
        (24, 0, "exit reason 24, which"),
    ] {
        assert!(failure(reason, detail).contains(says), "{}", failure(reason, detail));
    }
}
