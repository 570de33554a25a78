use super::*;

// covers: clock/unstable
#[test]
fn a_tsc_that_linux_gave_up_is_no_clocksource() {
    assert!(no_tsc_among("kvm-clock hpet acpi_pm\n"));
    assert!(no_tsc_among("tsc-early\n"));
    assert!(!no_tsc_among("tsc kvm-clock \n"));
}
