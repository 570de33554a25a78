//! Packets of the remote serial protocol as they are on the line: `$body#checksum`, acknowledgments, and the byte that
//! interrupts (Debugging with GDB, appendix E "GDB Remote Serial Protocol", "Overview").

/// The longest body that is taken in bytes. It is what the answer to qSupported says as PacketSize.
pub const LONGEST: usize = 1 << 16;

/// What has come over the line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Frame {
    /// A packet's body, still escaped.
    Packet(Vec<u8>),
    /// A packet whose checksum is wrong.
    Damaged,
    /// A packet of more than [`LONGEST`] bytes, which is gone.
    Oversized,
    /// `-`: the last packet did not arrive.
    Nack,
    /// 03H outside a packet: stop.
    Interrupt,
    /// What nobody sends between packets who speaks this protocol, as the first letter of an HTTP request.
    Foreign,
}

/// Where in a packet the next byte is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum ParserState {
    #[default]
    Between,
    Body,
    First,
    Second(u8),
}

/// Makes frames of bytes.
#[derive(Debug, Default)]
pub struct Framer {
    place: ParserState,
    body: Vec<u8>,
    sum: u8,
    oversized: bool,
}

/// A hexadecimal digit's value; anything else is no digit.
fn digit(byte: u8) -> Option<u8> {
    char::from(byte).to_digit(16).map(|digit| digit as u8)
}

impl Framer {
    /// Takes the next byte.
    pub fn push(&mut self, byte: u8) -> Option<Frame> {
        match (self.place, byte) {
            // One begins, and what there was of another is lost.
            (_, b'$') => {
                *self = Framer {
                    place: ParserState::Body,
                    ..Framer::default()
                };
                None
            }
            (ParserState::Between, 3) => Some(Frame::Interrupt),
            (ParserState::Between, b'-') => Some(Frame::Nack),
            (ParserState::Between, b'+') => None,
            (ParserState::Between, _) => Some(Frame::Foreign),
            (ParserState::Body, b'#') => {
                self.place = ParserState::First;
                None
            }
            (ParserState::Body, byte) => {
                self.sum = self.sum.wrapping_add(byte);
                if self.body.len() < LONGEST {
                    self.body.push(byte);
                } else {
                    self.oversized = true;
                }
                None
            }
            (ParserState::First, byte) => {
                self.place = ParserState::Second(byte);
                None
            }
            (ParserState::Second(first), second) => {
                self.place = ParserState::Between;
                let checksum = digit(first).zip(digit(second)).map(|(high, low)| high << 4 | low);
                Some(match (checksum == Some(self.sum), self.oversized) {
                    (false, _) => Frame::Damaged,
                    (true, true) => Frame::Oversized,
                    (true, false) => Frame::Packet(std::mem::take(&mut self.body)),
                })
            }
        }
    }
}

/// A packet with this body, which is escaped already.
pub fn frame(body: &[u8]) -> Vec<u8> {
    let sum = body.iter().fold(0u8, |sum, byte| sum.wrapping_add(*byte));
    [b"$", body, b"#", format!("{sum:02x}").as_bytes()].concat()
}

/// The bytes with those escaped that a packet cannot hold, or that would stand for something else.
pub fn escape(bytes: &[u8]) -> Vec<u8> {
    let mut escaped = Vec::with_capacity(bytes.len());
    for &byte in bytes {
        if matches!(byte, b'#' | b'$' | b'}' | b'*') {
            escaped.extend([b'}', byte ^ 0x20]);
        } else {
            escaped.push(byte);
        }
    }
    escaped
}

/// Two hexadecimal digits for each byte.
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// An error as gdb shows it to its user: text instead of a number.
pub fn error(text: &str) -> Vec<u8> {
    escape(format!("E.{text}").as_bytes())
}

#[cfg(test)]
#[path = "packets_test.rs"]
mod tests;
