use super::*;
use trace::{linux::Recorded, symbols::SymbolTable};

// covers: trace/window
#[test]
fn moments_are_steps_times_addresses_and_functions() {
    let symbols = SymbolTable::parse("ffffffff81000000 T start\n").unwrap();
    let names = Names::new(symbols, Recorded::default());
    for (text, expected) in [
        ("0", Some(Bound::Step(0))),
        ("1000000", Some(Bound::Step(1_000_000))),
        ("1.5s", Some(Bound::Time(1_500_000_000))),
        ("20ms", Some(Bound::Time(20_000_000))),
        ("0.001us", Some(Bound::Time(1))),
        ("7ns", Some(Bound::Time(7))),
        ("0x10", Some(Bound::Address(0x10))),
        ("start", Some(Bound::Address(0xffff_ffff_8100_0000))),
        ("1.5", None),
        ("1.5ns", None),
        ("0.0001us", None),
        ("1e3s", None),
        ("12parsecs", None),
        ("99999999999s", None),
        ("0x", None),
        ("stop", None),
        ("", None),
    ] {
        assert_eq!(parse(text, &names).ok(), expected, "{text}");
    }
    let message = parse("main", &Names::default()).unwrap_err().to_string();
    assert!(message.contains("--symbols"), "{message}");
}
