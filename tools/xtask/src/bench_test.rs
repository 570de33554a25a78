use super::*;

// covers: suite/bench
// covers: suite/units
// covers: decoder/bench
// covers: suite/kvm
// covers: suite/programs
#[test]
fn the_options_reach_what_measures() {
    let options = BenchOptions {
        rounds: 7,
        only: Some("loops".into()),
        no_install: true,
    };
    let command = speed(&options);
    let words: Vec<_> = command.get_args().map(|word| word.to_str().unwrap()).collect();
    let (decode, units) = (decode(&options), guests(&options, "units"));
    assert!(guests(&options, "kvm").get_args().any(|word| word == "kvm"));
    assert!(units.get_args().any(|word| word == "units") && units.get_args().any(|word| word == "7"));
    assert!(guests(&options, "work").get_args().any(|word| word == "work"));
    assert!(decode.get_args().any(|word| word == "7"));
    assert!(
        words.ends_with(&["--bench", "speed", "--", "--rounds", "7", "--only", "loops"]),
        "{words:?}"
    );
}
