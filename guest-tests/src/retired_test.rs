use super::*;

#[test]
fn instructions_at_once_are_instructions_one_by_one() {
    let ips: Vec<u64> = (0..1000u64).map(|n| n * n * 0x1_0001).collect();
    let mut one = Stream::<100>::default();
    ips.iter().for_each(|ip| one.push(*ip));
    let mut other = Stream::<100>::default();
    for part in ips.chunks(7) {
        let mut sum = Sum::default();
        part.iter().for_each(|ip| sum.push(*ip));
        if !other.add(&sum) {
            part.iter().for_each(|ip| other.push(*ip));
        }
    }
    assert_eq!((one.compare(&other), &one.windows), (Ok(()), &other.windows));
    assert_eq!(one.windows.len(), 10);
    let mut swapped = Stream::<100>::default();
    ips.iter().rev().for_each(|ip| swapped.push(*ip));
    assert!(one.compare(&swapped).is_err());
}
