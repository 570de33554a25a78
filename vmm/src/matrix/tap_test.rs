use super::*;

fn points(text: &str) -> Vec<(String, Point)> {
    Report::read(text).unwrap().points
}

// covers: matrix/tap
#[test]
fn a_report_is_read_from_among_other_output() {
    let text = "SeaBIOS\nTAP version 14\n1..4\nok 1 - a\nnoise\nok 2 - b # SKIP no x (y)\n\
                    not ok 3 - c\n  ---\n  at: d:1\n  ...\nnot ok 4 - d # TODO one day\nok\n";
    let report = Report::read(text).unwrap();
    assert_eq!(report.failed(), ["c"]);
    assert_eq!(report.point("a"), Some(&Point::Passed));
    assert_eq!(report.point("b"), Some(&Point::Skipped("no x (y)".into())));
    assert_eq!(report.point("c"), Some(&Point::Failed("---\nat: d:1\n...".into())));
    assert_eq!(report.point("d"), Some(&Point::Skipped("to do: one day".into())));
    // The last `ok` is a test, too, and more than the plan has.
    assert_eq!(report.broken.as_deref(), Some("5 tests of 4 reported"));
    assert_eq!(Report::read("Linux version 6.1\nok 1 - a\n"), None);
}

#[test]
fn version_13_as_kselftest_prints_it() {
    let text = "TAP version 13\n1..3\n# selftests: x86: sigreturn\nok 1 selftests: x86: sigreturn_64\n\
                    ok 2 selftests: x86: iopl # skip no permission\nnot ok 3 selftests: x86: fsgsbase # exit=1\n# a line\n";
    let passed = Point::Passed;
    assert_eq!(
        points(text),
        [
            ("selftests: x86: sigreturn_64".into(), passed),
            ("selftests: x86: iopl".into(), Point::Skipped("no permission".into())),
            (
                "selftests: x86: fsgsbase # exit=1".into(),
                Point::Failed("# a line".into())
            ),
        ]
    );
    assert_eq!(Report::read(text).unwrap().broken, None);
}

#[test]
fn the_plan_may_come_last_names_may_lack_or_repeat() {
    let report = Report::read("TAP version 14\nok\nok - twice\nok 3 - twice\n1..3\n").unwrap();
    let names: Vec<&str> = report.points.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!((names, report.broken), (vec!["1", "twice", "twice (2)"], None));
    let none = Report::read("TAP version 14\n1..0 # SKIP no 64-bit mode\n").unwrap();
    assert_eq!(
        (none.points.len(), none.nothing.as_deref()),
        (0, Some("no 64-bit mode"))
    );
    assert_eq!(none.broken, None);
}

// covers: matrix/tap
#[test]
fn what_breaks_a_report_is_said_and_the_points_before_it_stay() {
    for (text, word, count) in [
        ("TAP version 14\nok 1 - a\n", "no plan", 1),
        ("TAP version 14\n1..2\nok 1 - a\n", "1 tests of 2", 1),
        ("TAP version 14\n1..1\nok 2 - a\n", "number 2", 1),
        (
            "TAP version 14\n1..3\nok 1 - a\nBail out! no\nok 2 - b\n",
            "Bail out! no",
            1,
        ),
        ("TAP version 14\n", "no plan", 0),
    ] {
        let report = Report::read(text).unwrap();
        assert!(
            report.broken.as_deref().is_some_and(|why| why.contains(word)),
            "{text:?}: {report:?}"
        );
        assert_eq!(report.points.len(), count, "{text:?}");
    }
}
