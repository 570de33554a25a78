use super::*;

// covers: kvm/clock
#[test]
fn the_hosts_counter_moves_it_forward_only() {
    let mut clock = Clock::new(2_000_000);
    clock.follow(5000, 1000);
    assert_eq!(clock.ticks(1000), 5000);
    clock.port_access();
    assert_eq!(clock.ticks(1010), 5010, "steps count, port accesses do not");
    clock.follow(5005, 1010);
    assert_eq!(clock.ticks(1010), 5010, "it never goes back");
    clock.follow(9000, 1010);
    assert_eq!(clock.ticks(1010), 9000);
}

// covers: cli/clock, clock/exact
#[test]
fn conversions_are_exact_and_agree() {
    for khz in [1, 999_999, 1_000_000, 2_666_000, 3_000_001, u32::MAX] {
        let clock = Clock::new(khz);
        for ns in [0, 1, 2, 999, 1_000_000, 3_600_000_000_000, 1 << 55] {
            let tick = clock.tick_at(ns);
            if tick < u64::MAX {
                assert!(clock.ns_of(tick) >= ns, "{khz} kHz, {ns} ns");
                assert!(
                    tick == 0 || clock.ns_of(tick - 1) < ns,
                    "{khz} kHz, {ns} ns: the first such tick"
                );
            }
        }
    }
    assert_eq!(Clock::new(2_666_000).tick_at(1_000_000_000), 2_666_000_000);
    assert_eq!(Clock::new(1).ns_of(u64::MAX), u64::MAX, "no overflow");
}

#[test]
fn skew_adds_time_and_never_takes_any() {
    let mut clock = Clock::new(2_000_000);
    assert_eq!(clock.ns(1000), 500);
    clock.port_access();
    assert_eq!(clock.ns(1000), 1500);
    clock.skip_to(1_000_000, 1000);
    assert_eq!(clock.ns(1000), 1_000_000);
    clock.skip_to(5, 1000);
    assert_eq!(clock.ns(1000), 1_000_000);
    assert_eq!(clock.steps_until(1_000_001, 1000), 2);
    assert_eq!(clock.steps_until(7, 1000), 0);
}
