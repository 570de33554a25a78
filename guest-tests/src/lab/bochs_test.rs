use super::*;
use crate::Folder;

// covers: lab/intel
#[test]
fn what_bochs_said_last_is_shown() {
    let scratch = Folder::new("bochs");
    let lines: String = (0..30).map(|n| format!("line {n}\n")).collect();
    fs::write(scratch.join("log"), lines + ">>PANIC<< no\n").unwrap();
    let words = last_words(&scratch);
    assert!(
        words.contains("\nline 29\n>>PANIC<< no\n") && !words.contains("line 10\n"),
        "{words}"
    );
    assert_eq!(last_words(&Folder::new("bochs")), "\nBochs:\n\n");
}
