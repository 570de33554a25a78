use super::*;

/// How many epochs each part has, of a session with a snapshot every 100 steps.
fn lengths(snapshots: u64, workers: usize, rounds: usize) -> Vec<u64> {
    let snapshots: Vec<u64> = (1..=snapshots).map(|number| number * 100).collect();
    let parts = cut(&snapshots, workers, rounds);
    assert_eq!(parts[0].from, 0);
    assert_eq!(parts[parts.len() - 1].to, None);
    assert!(parts.windows(2).all(|pair| pair[0].to == Some(pair[1].from)));
    let end = (snapshots.len() as u64 + 1) * 100;
    let length = |part: &Part| (part.to.unwrap_or(end) - part.from) / 100;
    parts.iter().map(length).collect()
}

#[test]
fn parts_follow_each_other_and_the_last_are_the_shortest() {
    assert_eq!(lengths(63, 2, 4), [16, 16, 8, 8, 4, 4, 4, 4]);
    for snapshots in 0..70 {
        for workers in 1..6 {
            for rounds in 1..6 {
                let lengths = lengths(snapshots, workers, rounds);
                assert!(lengths.len() <= workers * rounds);
                assert!(lengths.iter().all(|length| *length > 0));
                assert_eq!(lengths.iter().sum::<u64>(), snapshots + 1);
            }
        }
    }
}

#[test]
fn a_session_is_cut_at_its_own_snapshots() {
    let part = |from, to| Part { from, to };
    assert_eq!(cut(&[10, 25, 30], 2, 1), [part(0, Some(25)), part(25, None)]);
    assert_eq!(
        cut(&[10, 25], usize::MAX, 1),
        [part(0, Some(10)), part(10, Some(25)), part(25, None)]
    );
    assert_eq!(cut(&[], 8, 4), [part(0, None)]);
    assert_eq!(cut(&[7], 1, 2), [part(0, Some(7)), part(7, None)]);
}
