//! The keys that are for us and not for the guest.

/// Ctrl-A, which starts a command.
const CTRL_A: u8 = 1;

/// What a key came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Key {
    /// Nothing yet.
    None,
    /// The guest gets this byte.
    Byte(u8),
    /// The guest gets Ctrl-A and this byte, since it is no command.
    Both(u8),
    /// Ctrl-A x.
    Quit,
    /// Ctrl-A h or Ctrl-A ?.
    Help,
}

/// Finds commands in what is typed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Escape {
    started: bool,
}

impl Escape {
    /// Takes one byte.
    pub fn key(&mut self, byte: u8) -> Key {
        if !std::mem::take(&mut self.started) {
            self.started = byte == CTRL_A;
            return if self.started { Key::None } else { Key::Byte(byte) };
        }
        match byte {
            b'x' | b'X' => Key::Quit,
            b'h' | b'H' | b'?' => Key::Help,
            CTRL_A => Key::Byte(CTRL_A),
            _ => Key::Both(byte),
        }
    }
}

#[cfg(test)]
mod tests {
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
}
