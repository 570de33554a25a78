use super::*;

#[test]
fn ctrl_a_starts_a_command() {
    for (typed, keys) in [
        (&b"a"[..], &[Key::Byte(b'a')][..]),
        (b"x", &[Key::Byte(b'x')]),
        (b"\x01x", &[Key::None, Key::Quit]),
        (b"\x01h", &[Key::None, Key::Help]),
        (b"\x01\x01x", &[Key::None, Key::Byte(1), Key::Byte(b'x')]),
        (b"\x01bx", &[Key::None, Key::Both(b'b'), Key::Byte(b'x')]),
        (b"\x03", &[Key::Byte(3)]),
    ] {
        let mut escape = Escape::default();
        let got: Vec<Key> = typed.iter().map(|byte| escape.key(*byte)).collect();
        assert_eq!(got, keys, "{typed:?}");
    }
}
