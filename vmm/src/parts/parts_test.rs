use super::*;

#[test]
fn parts_follow_each_other_and_differ_by_one_snapshot_at_most() {
    for snapshots in 0..40u64 {
        let snapshots: Vec<u64> = (1..=snapshots).map(|number| number * 100).collect();
        for most in 1..50 {
            let parts = cut(&snapshots, most);
            assert_eq!(parts.len(), most.min(snapshots.len() + 1));
            assert_eq!(parts[0].from, 0);
            assert_eq!(parts[parts.len() - 1].to, None);
            assert!(parts.windows(2).all(|pair| pair[0].to == Some(pair[1].from)));
            // The last epoch is as long as the others in this session.
            let end = (snapshots.len() as u64 + 1) * 100;
            let lengths: Vec<u64> = parts.iter().map(|part| part.to.unwrap_or(end) - part.from).collect();
            let (least, most) = (lengths.iter().min().unwrap(), lengths.iter().max().unwrap());
            assert!(most - least <= 100, "{lengths:?}");
        }
    }
}

#[test]
fn a_session_is_cut_at_its_own_snapshots() {
    let parts = cut(&[10, 25, 30], 2);
    let part = |from, to| Part { from, to };
    assert_eq!(parts, [part(0, Some(25)), part(25, None)]);
    assert_eq!(cut(&[], 8), [part(0, None)]);
    assert_eq!(cut(&[7], 0), [part(0, None)]);
}
