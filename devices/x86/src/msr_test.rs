use super::*;

#[test]
fn numbers_ascend_so_no_name_is_given_twice() {
    for pair in NAMES.windows(2) {
        assert!(pair[0].0 < pair[1].0, "{} before {}", pair[0].1, pair[1].1);
    }
}
