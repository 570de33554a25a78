use super::super::expected::tests::cell;
use std::fs;

use super::*;

fn report(shard: Option<Shard>) -> Report {
    let mut dead = cell(
        "pt",
        "p6",
        "soft",
        Verdict::Failed("guest crashed: <x> & \"y\"".into()),
        &["a", "-b"],
    );
    dead.log = "console <1>\nRIP 0000000000001000".into();
    Report {
        cells: vec![
            cell("lbr", "haswell,+rtm", "soft", Verdict::Passed, &["order", "?info"]),
            cell("lbr", "p6", "soft", Verdict::Skipped("no 64-bit mode".into()), &[]),
            cell("lbr", "p6", "kvm", Verdict::Absent("--engine kvm: no".into()), &[]),
            cell("status", "p6", "soft", Verdict::Passed, &[]),
            dead,
        ],
        shard,
    }
}

// covers: matrix/junit
#[test]
fn a_report_is_written_and_read() {
    let report = report(None);
    let text = write(&report).unwrap();
    let cells: Vec<Cell> = read(&text).unwrap().into_iter().map(|(cell, _)| cell).collect();
    assert_eq!(cells, report.cells, "{text}");
    for part in [
        r#"tests="8" skipped="3" failures="1" errors="1""#,
        r#"<property name="model" value="haswell,+rtm"/>"#,
        "guest crashed: &lt;x>",
    ] {
        assert!(
            text.contains(part) || text.contains(&part.replace(">", "&gt;")),
            "{part}\n{text}"
        );
    }
}

// covers: matrix/merge
#[test]
fn shards_are_put_together_and_a_missing_one_is_missed() {
    let folder = std::env::temp_dir().join(format!("minivmm-junit-{}", std::process::id()));
    fs::create_dir_all(&folder).unwrap();
    let whole = report(None);
    let paths: Vec<_> = (1..=2)
        .map(|index| {
            let part = Report {
                cells: whole.cells.iter().skip(index - 1).step_by(2).cloned().collect(),
                shard: Some(Shard { index, count: 2 }),
            };
            let path = folder.join(format!("{index}.xml"));
            fs::write(&path, write(&part).unwrap()).unwrap();
            path
        })
        .collect();
    assert_eq!(merge(&paths).unwrap().cells.len(), 5);
    for (paths, words) in [
        (vec![paths[1].clone()], "shard 1/2 is missing"),
        (vec![paths[0].clone(), paths[0].clone()], "is in a file before it, too"),
        (vec![folder.join("no.xml")], "no such file"),
    ] {
        let error = merge(&paths).unwrap_err();
        assert_eq!((error.status().code(), error.to_string().lines().count()), (2, 1));
        assert!(error.to_string().contains(words), "{error}");
    }
    fs::remove_dir_all(folder).unwrap();
}

// covers: matrix/bad-input
#[test]
fn what_is_no_report_is_said() {
    for (text, words) in [
        ("", "not JUnit XML"),
        ("<html></html>", "not JUnit XML"),
        (
            r#"<testsuites name="x" tests="0" failures="0" errors="0"><testsuite name="y" tests="0" failures="0" errors="0"/></testsuites>"#,
            "y has no property guest",
        ),
    ] {
        let error = read(text).unwrap_err().to_string();
        assert!(error.contains(words) && error.lines().count() == 1, "{error}");
    }
}

#[test]
fn the_message_is_the_line_that_says_most() {
    for (text, line) in [
        ("---\nat: dr:3\nmessage: |\n  left: 1\n  right: 2\n...", "left: 1"),
        ("---\nmessage: no\n...", "no"),
        ("# exit=1", "# exit=1"),
        ("", ""),
    ] {
        assert_eq!(message(text), line);
    }
}
