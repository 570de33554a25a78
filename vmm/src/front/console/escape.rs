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
#[path = "escape_test.rs"]
mod tests;
