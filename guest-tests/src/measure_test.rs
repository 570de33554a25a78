use super::*;

fn millis(values: &[u64]) -> Vec<Duration> {
    values.iter().copied().map(Duration::from_millis).collect()
}

// covers: suite/bench
#[test]
fn the_median_is_the_middle_whatever_the_order() {
    for (times, middle) in [(&[5, 1, 100][..], 3 + 2), (&[4, 1, 100, 2], 3), (&[7], 7), (&[], 0)] {
        assert_eq!(median(&millis(times)), Duration::from_millis(middle), "{times:?}");
    }
    assert_eq!(ratio(Duration::from_secs(3), Duration::from_secs(2)), 1.5);
}

// covers: suite/bench
#[test]
fn subjects_take_turns() {
    let order = std::cell::RefCell::new(String::new());
    let subject = |name: char, millis: u64| {
        let order = &order;
        move || -> Result<Duration, ()> {
            order.borrow_mut().push(name);
            Ok(Duration::from_millis(millis))
        }
    };
    let (mut a, mut b) = (subject('a', 1), subject('b', 2));
    let times = alternate(3, &mut [&mut a, &mut b]).unwrap();
    assert_eq!(times, [millis(&[1, 1, 1]), millis(&[2, 2, 2])]);
    assert_eq!(order.into_inner(), "ababab");
    assert!(alternate(1, &mut [&mut || Err("no")]).is_err());
}
