use super::*;

// covers: matrix/labs
#[test]
fn a_report_is_found_among_what_a_run_said() {
    let said =
        "minivmm: dr on p6 (kvm-intel): x\n<?xml version=\"1.0\"?>\n<testsuites>\n</testsuites>\nkvm-intel  p6\n";
    assert_eq!(
        report(said),
        Some("<?xml version=\"1.0\"?>\n<testsuites>\n</testsuites>")
    );
    assert_eq!(report("minivmm: --guests: no\n"), None);
}

// covers: matrix/labs
#[test]
fn every_model_is_in_one_of_a_guest_s_parts() {
    let parts = parts(&["dr".to_string()]).unwrap();
    let jobs: Vec<Job> = parts.iter().map(|part| job(Host::Intel, part)).collect();
    for model in MODELS {
        let with = |job: &&Job| job.arguments.iter().any(|word| word == model.name);
        let [job] = jobs.iter().filter(with).collect::<Vec<_>>()[..] else {
            panic!("{}", model.name)
        };
        let pt = job.arguments.iter().any(|word| word == "--pt=emulated");
        assert_eq!(pt, model.units.pt.is_some(), "{}", model.name);
    }
    assert!(super::parts(&["no-such".to_string()]).is_err());
}
