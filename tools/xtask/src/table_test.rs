use super::*;

#[test]
fn columns_line_up_and_lines_have_no_trailing_blanks() {
    let head = [("stage", Align::Left), ("seconds", Align::Right), ("note", Align::Left)];
    let rows = [["format", "0.4", ""], ["tests", "112.0", "2 skipped"]].map(|row| row.map(String::from).to_vec());
    let expected = "stage   seconds  note\nformat      0.4\ntests     112.0  2 skipped\n";
    assert_eq!(render(&head, &rows), expected);
}

#[test]
fn a_row_shorter_than_the_head_is_laid_out_as_far_as_it_goes() {
    assert_eq!(
        render(&[("a", Align::Left), ("b", Align::Left)], &[vec!["xyz".into()]]),
        "a    b\nxyz\n"
    );
}
