use super::arguments::{bits, number};
use super::*;

// covers: monitor/help
#[test]
fn commands_are_found_by_their_names_and_by_what_tells_them_apart() {
    for (word, found) in [
        ("lbr", Ok("lbr")),
        ("pt", Ok("pt")),
        ("page", Ok("pagewalk")),
        ("g", Ok("gva2gpa")),
        ("d", Err("\"d\" may be dr, debugctl")),
        ("pep", Err("\"pep\" is no monitor command: try `help`")),
    ] {
        let name = find(word).map(|command| command.name);
        assert_eq!(
            name.map_err(|why| why.to_string()),
            found.map_err(String::from),
            "{word}"
        );
    }
    let mut names: Vec<&str> = COMMANDS.iter().map(|command| command.name).collect();
    names.sort_unstable();
    names.dedup();
    assert_eq!(names.len(), COMMANDS.len(), "each name is there once");
    for unit in &UNITS {
        assert!(names.contains(&unit.name), "no command shows {}", unit.name);
    }
}

// covers: monitor/help
#[test]
fn numbers_and_bits() {
    for (word, value) in [
        ("10", Some(10)),
        ("0x10", Some(16)),
        ("0XfF", Some(255)),
        ("0xffffffffffffffff", Some(u64::MAX)),
        ("0x10000000000000000", None),
        ("", None),
        ("0x", None),
        ("+1", None),
        ("0x+1", None),
        ("-1", None),
        ("ten", None),
    ] {
        assert_eq!(number(word).ok(), value, "{word:?}");
    }
    let names = [(0, "A"), (2, "C")];
    for (value, text) in [(0, "-"), (5, "A C"), (2, "bit 1"), (1 << 63 | 1, "A bit 63")] {
        assert_eq!(bits(value, &names), text);
    }
}
