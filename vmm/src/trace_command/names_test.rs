use super::*;

// covers: symbols/user
#[test]
fn a_program_is_named_with_its_process_and_place() {
    for (text, path, comm, at) in [
        ("collatz", "collatz", "collatz", None),
        (
            "/usr/bin/a-program-of-a-long-name",
            "/usr/bin/a-program-of-a-long-name",
            "a-program-of-a-",
            None,
        ),
        ("a,b", "a,b", "a,b", None),
        ("a,name=x,at=0x1000", "a", "x", Some(0x1000)),
        ("a,at=4096,name=x y", "a", "x y", Some(4096)),
        ("a,b,at=1", "a,b", "a,b", Some(1)),
        (
            "\u{e9}".repeat(9).as_str(),
            "\u{e9}".repeat(9).as_str(),
            "\u{e9}".repeat(7).as_str(),
            None,
        ),
    ] {
        let expected = Wanted {
            path: path.into(),
            comm: comm.into(),
            at,
        };
        assert_eq!(Wanted::parse(text), Ok(expected), "{text}");
    }
    assert_eq!(Wanted::parse("a,at=here"), Err(WantedError::Address("here".into())));
    assert_eq!(Wanted::parse("..,at=1"), Err(WantedError::NoFile));
}
