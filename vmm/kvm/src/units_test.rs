use super::*;

#[test]
fn a_row_stands_where_its_unit_is_looked_for() {
    for (n, row) in UNITS.iter().enumerate() {
        assert_eq!((row.unit as usize, row.unit.name()), (n, row.name));
        assert!(!row.option.is_empty() && !row.monitor.is_empty(), "{}", row.name);
        assert!(UNITS[..n].iter().all(|other| other.name != row.name), "{}", row.name);
    }
}

#[test]
fn one_of_two_units_is_enough_for_a_feature() {
    use Backend::{Absent, Emulated, Host};
    for (bts, pebs, shown) in [
        (Absent, Absent, Shown::Never),
        (Emulated, Absent, Shown::Always),
        (Absent, Emulated, Shown::Always),
        (Absent, Host, Shown::AsKvm),
    ] {
        let backends = Backends::default().with(Unit::Bts, bts).with(Unit::Pebs, pebs);
        assert_eq!(backends.shown(Ds), Some(shown), "{bts:?} {pebs:?}");
    }
    assert_eq!(Backends::default().shown(Avx2), None, "no unit's");
}
