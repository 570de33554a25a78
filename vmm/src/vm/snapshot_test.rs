use super::*;

#[test]
fn pages_are_shared_until_they_differ() {
    let (mut a, ones) = (Pages::default(), [1; PAGE]);
    a.set(0x1000, &ones);
    a.set(5 << 30, &ones);
    a.set(0x2000, &[0; PAGE]);
    assert_eq!(a.iter().map(|(gpa, _)| gpa).collect::<Vec<_>>(), [0x1000, 5 << 30]);
    let mut b = a.clone();
    assert_eq!(a.apart(&b).count(), 0);
    b.set(0x1000, &ones);
    assert_eq!(a.apart(&b).count(), 0, "the same contents");
    b.set(0x1000, &[2; PAGE]);
    b.set(0x3000, &ones);
    b.set(5 << 30, &[0; PAGE]);
    assert_eq!((b.get(5 << 30), b.get(0x3000)), (None, Some(&ones)));
    for (one, other) in [(&a, &b), (&b, &a)] {
        let mut apart: Vec<_> = one.apart(other).collect();
        apart.sort_unstable();
        assert_eq!(apart, [0x1000, 0x3000, 5 << 30]);
    }
    assert_ne!(a, b);
    b.set(0x1000, &ones);
    b.set(0x3000, &[0; PAGE]);
    b.set(5 << 30, &ones);
    assert_eq!(a, b, "an equal page is equal, shared or not");
    assert_eq!(format!("{a:?}"), "2 pages");
}
