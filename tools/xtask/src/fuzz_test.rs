use super::*;

// covers: fuzz/libfuzzer
#[test]
fn figures_are_what_libfuzzer_says() {
    let mut figures = Figures::default();
    for line in [
        "INFO: Running with entropic power schedule (0xFF, 100).",
        "#2\tINITED cov: 340 ft: 341 corp: 1/1b exec/s: 0 rss: 40Mb",
        "#5120\tNEW    cov: 1234 ft: 5678 corp: 90/12Kb lim: 100 exec/s: 2560 rss: 60Mb L: 3/99 MS: 1 ChangeByte-",
        "#70001\tDONE   cov: 1300 ft: 6000 corp: 99/14Kb lim: 200 exec/s: 1166 rss: 61Mb",
        "stat::number_of_executed_units: 70001",
        "stat::slowest_unit_time_sec:    3",
        "stat::peak_rss_mb:              61",
    ] {
        figures.read(line);
    }
    assert_eq!(
        figures,
        Figures {
            executions: 70_001,
            edges: 1300,
            features: 6000,
            inputs: 99,
            peak: 61,
            slowest: 3,
            ..Figures::default()
        }
    );
}

/// The list of names is the one that the program has: a row that is written otherwise would be left out.
// covers: fuzz/libfuzzer
#[test]
fn all_targets_are_found() {
    let names = targets().unwrap();
    let text = fs::read_to_string(tree::root().join("guest-tests/src/fuzz.rs")).unwrap();
    assert_eq!(
        names.len(),
        text.matches("seeds: ").count() - text.matches("pub seeds: ").count()
    );
    for name in ["bzimage", "linux", "session", "guest", "trace_folder"] {
        assert!(names.iter().any(|known| known == name), "{name}: {names:?}");
    }
}
