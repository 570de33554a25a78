use super::*;

#[test]
fn a_copy_shares_until_it_is_written() {
    let mut a = Sparse::default();
    assert_eq!(a.own(3), None);
    a.set(3, Some(Arc::new(30)));
    a.set(4, Some(Arc::new(40)));
    *a.own(3).unwrap() += 1;
    let mut b = a.clone();
    assert_eq!((a.own(3), b.own(4)), (None, None), "somebody else has them too");
    b.set(5000, Some(Arc::new(7)));
    b.set(4, None);
    assert_eq!(b.own(3), None, "the thing is shared, though its region is not");
    assert_eq!(b.own(5000), Some(&mut 7));
    for (one, other) in [(&a, &b), (&b, &a)] {
        let mut apart: Vec<_> = one.apart(other).collect();
        apart.sort_unstable();
        assert_eq!(apart, [4, 5000]);
    }
    drop(a);
    assert_eq!(b.own(3), Some(&mut 31));
    assert_eq!(b.iter().collect::<Vec<_>>(), [(3, &31), (5000, &7)]);
    b.set(3, None);
    b.set(5000, None);
    assert!(b == Sparse::default());
}
