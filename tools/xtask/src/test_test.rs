use super::*;

// covers: suite/test
#[test]
fn the_suite_holds_only_when_tests_ran_none_failed_and_in_time() {
    let second = Duration::from_secs(1);
    for (failed, passed, elapsed, holds) in [
        (0, 5, second, true),
        (1, 5, second, false),
        (0, 0, second, false),
        (0, 5, LIMIT + second, false),
    ] {
        assert_eq!(
            verdict(failed, passed, elapsed, LIMIT).is_ok(),
            holds,
            "{failed} {passed} {elapsed:?}"
        );
    }
}

#[test]
fn a_failed_stage_does_not_stop_the_next_and_fails_the_suite() {
    let mut suite = Suite {
        rows: Vec::new(),
        end: Instant::now() + LIMIT,
        full: false,
        nextest: false,
    };
    suite.stage("first", |_, _, _| bail!("no luck"));
    suite.stage("second", |_, _, counts| {
        counts.read(
            Runner::Cargo,
            "test result: ok. 2 passed; 0 failed; 1 ignored; 0 measured; 0 filtered out",
        );
        Ok(())
    });
    assert_eq!(suite.rows[0].fault.as_deref(), Some("no luck"));
    assert_eq!(
        suite.rows[1]
            .counts
            .as_ref()
            .map(|counts| (counts.passed, counts.skipped)),
        Some((2, 1))
    );
    let total = suite.rows[1].counts.clone().unwrap();
    assert!(!report(&suite.rows, &total, Duration::ZERO, LIMIT));
    assert!(report(&suite.rows[1..], &total, Duration::ZERO, LIMIT));
}
