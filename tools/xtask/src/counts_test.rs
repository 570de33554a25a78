use super::*;

use Runner::{Cargo, Nextest};

fn read(runner: Runner, text: &str) -> Counts {
    let mut counts = Counts::default();
    text.lines().for_each(|line| counts.read(runner, line));
    counts
}

// covers: suite/test
#[test]
fn both_runners_closing_lines_are_counted() {
    for (runner, line, passed, failed, skipped) in [
        (
            Cargo,
            "test result: ok. 5 passed; 0 failed; 1 ignored; 0 measured; 2 filtered out; finished in 0s",
            5,
            0,
            1,
        ),
        (
            Cargo,
            "test result: FAILED. 5 passed; 3 failed; 0 ignored; 0 measured; 0 filtered out",
            5,
            3,
            0,
        ),
        (
            Cargo,
            "test result: ok. 0 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out",
            0,
            0,
            0,
        ),
        (
            Cargo,
            "     Summary [   0.012s] 5 tests run: 5 passed, 1 skipped",
            0,
            0,
            0,
        ),
        (
            Nextest,
            "     Summary [   0.012s] 5 tests run: 5 passed, 1 skipped",
            5,
            0,
            1,
        ),
        (
            Nextest,
            "     Summary [   0.012s] 1 test run: 1 passed, 0 skipped",
            1,
            0,
            0,
        ),
        (
            Nextest,
            "Summary [ 12.5s] 9/12 tests run: 4 passed (1 slow), 3 failed, 2 timed out, 0 skipped",
            4,
            5,
            0,
        ),
        (
            Nextest,
            "Summary [ 12.5s] 2 tests run: 1 passed, 1 exec failed, 0 skipped",
            1,
            1,
            0,
        ),
        (
            Nextest,
            "    test result: FAILED. 0 passed; 1 failed; 0 ignored; 0 measured; 0 filtered out",
            0,
            0,
            0,
        ),
        (Nextest, "        PASS [   0.004s] xtask counts::tests::x", 0, 0, 0),
        (Cargo, "running 5 tests", 0, 0, 0),
    ] {
        let counts = read(runner, line);
        assert_eq!(
            (counts.passed, counts.failed, counts.skipped),
            (passed, failed, skipped),
            "{line}"
        );
        assert_eq!(counts.closing.is_empty(), passed + failed + skipped == 0, "{line}");
    }
}

#[test]
fn names_are_those_of_tests_that_held() {
    let cargo = "test mmu::tests::long_walk ... ok\ntest mmu::tests::ud ... FAILED\n\
                     test mmu::tests::later ... ignored\ntest bad - should panic ... ok\n";
    let nextest = "        PASS [   0.004s] (  3/117) engine mmu::tests::global_pages\n\
                       PASS [   0.004s] guest-tests::linux boots\n        FAIL [   0.004s] engine mmu::tests::nx\n";
    for (runner, text, names) in [
        (Cargo, cargo, ["bad", "mmu::tests::long_walk"]),
        (Nextest, nextest, ["boots", "mmu::tests::global_pages"]),
    ] {
        assert_eq!(
            read(runner, text).names.iter().map(String::as_str).collect::<Vec<_>>(),
            names
        );
    }
}

// covers: kvm/skip
#[test]
fn tests_without_anything_to_run_on_have_not_passed() {
    let mut counts = read(Nextest, "Summary [ 1s] 5 tests run: 5 passed, 1 skipped");
    counts.skip("guests on KVM: /dev/kvm is not there\nSMP on KVM: /dev/kvm is not there\n");
    assert_eq!((counts.passed, counts.skipped), (3, 3));
    counts.skip("");
    assert_eq!((counts.passed, counts.skipped), (3, 3));
}

#[test]
fn stages_add_up() {
    let mut sum = read(Nextest, "Summary [ 1s] 3 tests run: 2 passed, 1 failed, 4 skipped");
    sum += read(
        Cargo,
        "test result: ok. 7 passed; 0 failed; 1 ignored; 0 measured; 0 filtered out",
    );
    assert_eq!((sum.passed, sum.failed, sum.skipped, sum.closing.len()), (9, 1, 5, 2));
}
