use super::*;

// covers: trace/export-perf-smp
#[test]
fn several_cpus_tell_of_one_memory() {
    let at = |cpu: usize, place: u64| (cpu, 0, place);
    let turn = |step, was, now| Turn {
        step,
        ticks: step * 2,
        was,
        now,
    };
    // CPU 1 notices at step 100 what CPU 0 hears at 120, and a third has never had anything else.
    let reported = Reported {
        content: Some(at(2, 2)),
        turns: vec![
            turn(50, at(0, 0), at(0, 1)),
            turn(120, at(0, 1), at(0, 2)),
            turn(100, at(1, 1), at(1, 2)),
        ],
    };
    let never = Reported {
        content: Some(at(1, 9)),
        turns: Vec::new(),
    };
    let of = |begin, pages: [Reported; 2]| {
        let pages = [(0, 1), (0, 2)].into_iter().zip(pages).collect();
        let (first, changes) = Code { pages, begin }.in_order();
        let changes: Vec<_> = changes.iter().map(|change| (change.ticks, change.now)).collect();
        (first[&(0, 1)], first[&(0, 2)], changes)
    };
    let copy = |reported: &Reported| Reported {
        content: reported.content,
        turns: reported.turns.clone(),
    };
    let both = [(200, at(1, 2)), (240, at(0, 2))];
    let all = [(100, at(0, 1)), both[0], both[1]];
    for (begin, expected, changes) in [
        (10, at(0, 0), &all[..]),
        (50, at(0, 1), &both),
        (99, at(0, 1), &both),
        (110, at(1, 2), &both[1..]),
        (120, at(0, 2), &[]),
    ] {
        let found = of(begin, [copy(&reported), copy(&never)]);
        assert_eq!(found, (expected, at(1, 9), changes.to_vec()), "{begin}");
    }
}

// covers: trace/export-perf
#[test]
fn changes_are_told_as_far_as_they_go() {
    let was = [0; PAGE];
    let mut now = was;
    (now[0], now[10], now[100], now[PAGE - 1]) = (1, 1, 1, 1);
    assert_eq!(differences(&was, &now), [0..11, 100..101, PAGE - 1..PAGE]);
    assert_eq!(differences(&was, &now), differences(&now, &was));
    assert_eq!(differences(&was, &was), []);
}

#[test]
fn pages_that_lie_together_are_a_run() {
    let at = (0, 0, 0);
    let pages = [0x1000, 0x2000, 0x4000].map(|page| (page, at));
    assert_eq!(runs(&pages, 0).iter().map(Vec::len).collect::<Vec<_>>(), [2, 1]);
    assert_eq!(runs(&pages, 0x1000).len(), 1);
}
