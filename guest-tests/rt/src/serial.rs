//! The first serial port, by polling.

use crate::cpu::{inb, outb};
use core::fmt::{self, Write};

const DATA: u16 = 0x3F8;
const LINE_STATUS: u16 = 0x3FD;

struct Port;

impl Write for Port {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        for byte in text.bytes() {
            while inb(LINE_STATUS) & 0x20 == 0 {}
            outb(DATA, byte);
        }
        Ok(())
    }
}

/// Writes formatted text.
pub fn print(text: fmt::Arguments) {
    // The port takes everything.
    let _ = Port.write_fmt(text);
}

/// Writes one line.
#[macro_export]
macro_rules! say {
    ($($part:tt)*) => {
        $crate::serial::print(format_args!("{}\n", format_args!($($part)*)))
    };
}
