use super::*;

fn sample(hash: &str, rounds: usize, resident: u64, descriptors: usize) -> Sample {
    Sample {
        hash: hash.into(),
        rounds,
        resident,
        descriptors,
        disk: 1024,
    }
}

/// Both machines alike.
fn twice(sample: Sample) -> [Sample; 2] {
    [sample.clone(), sample]
}

// covers: soak/verdict
#[test]
fn differing_states_and_growth_are_faults() {
    let steady: Vec<_> = (0..10).map(|n| twice(sample(&n.to_string(), n, 600_000, 20))).collect();
    assert_eq!(faults(&steady), Vec::<String>::new());

    let mut differ = steady.clone();
    differ[4][1].hash = "other".into();
    assert!(faults(&differ)[0].starts_with("comparison 4: the machines differ"));

    let grown: Vec<_> = (0..10)
        .map(|n| twice(sample("h", n, 600_000 + n as u64 * 20_000, 20)))
        .collect();
    assert_eq!(faults(&grown).len(), 2, "{:?}", faults(&grown));

    let leak: Vec<_> = (0..10).map(|n| twice(sample("h", n, 600_000, 20 + n))).collect();
    assert!(faults(&leak).iter().all(|fault| fault.contains("descriptors")));

    assert_eq!(faults(&[]), ["nothing was compared"]);
    assert_eq!(
        faults(&[twice(sample("h", 0, 1, 1))]),
        ["no round has ended: more time"]
    );
}

// covers: soak/verdict
#[test]
fn figures_are_read_from_what_the_programs_print() {
    assert_eq!(
        number_behind("{\"ok\":true,\"steps\":2144785043,\"x\":1}", "\"steps\":"),
        Some(2_144_785_043)
    );
    assert_eq!(
        number_behind("Name:\tminivmm\nVmRSS:\t  612345 kB\n", "VmRSS:"),
        Some(612_345)
    );
    assert_eq!(number_behind("nothing", "VmRSS:"), None);
    assert!(is_round("soak: round 12 ends, free 4711 KiB") && !is_round("soak: FAILED: disk in round 1"));
    assert_eq!(clock(Duration::from_secs(3 * 3600 + 62)), "3:01:02");
    assert!(hours("0.05").is_ok() && hours("0").is_err() && hours("x").is_err() && hours("NaN").is_err());
}
