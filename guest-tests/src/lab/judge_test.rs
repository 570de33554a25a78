use super::*;

const KNOWN: &[Known] = &[("dr", "b", "no"), ("dr", "a", "no")];

fn ended(said: &str) -> Ended {
    Ended {
        status: 3,
        said: said.into(),
    }
}

// covers: lab/guests
#[test]
fn what_is_not_known_to_fail_is_wrong_and_so_is_what_holds_against_expectation() {
    let run = ended("TAP version 14\n1..4\nok 1 - a\nnot ok 2 - b\nnot ok 3 - c\n  at: x\nok 4 - d # SKIP no\n");
    let mut tally = Tally::default();
    assert_eq!(judge("dr", &run, KNOWN, false, &mut tally), "dr: c\nat: x\n");
    let wrong = judge("dr", &run, KNOWN, true, &mut tally);
    assert!(wrong.contains("dr: a is known to fail, and holds"), "{wrong}");
    assert_eq!(
        tally.to_string(),
        "2 guest tests passed, 2 failed as known, 2 failed, 2 skipped"
    );
    let mut tally = Tally::default();
    for (said, word) in [
        ("", "no TAP, status 3"),
        ("TAP version 14\n1..2\nok 1 - a\n", "1 tests of 2"),
        ("TAP version 14\n1..1\nnot ok 1 - b\n", "nothing passed"),
    ] {
        let wrong = judge("dr", &ended(said), KNOWN, false, &mut tally);
        assert!(wrong.contains(word), "{wrong}");
    }
    assert_eq!((tally.failed, tally.known), (2, 1));
}

// covers: kvm/handover-unit
#[test]
fn handovers_are_counted_by_the_line_of_the_statistics() {
    let line = "x\nhandovers:    3 for an instruction, 12 for a unit; 0.000 s in the engine\n";
    assert_eq!(handovers(&ended(line)), Some(12));
    assert_eq!(handovers(&ended("x")), None);
}

// covers: lab/watchdog
#[test]
fn the_share_in_the_engine_is_that_of_the_wall_time() {
    let text = "handovers:    3 for an instruction, 12 for a unit or the debugger; 1.500 s in the engine\nwall time:    6.000 s\n";
    assert_eq!(share_in_engine(&ended(text)), Some(0.25));
    assert_eq!(share_in_engine(&ended("wall time:    6.000 s\n")), None);
    assert_eq!(share_in_engine(&ended(&text.replace("6.000", "0.000"))), None);
}
