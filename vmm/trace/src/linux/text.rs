//! Text and notes in a kernel's memory.

/// The longest name of a symbol: `KSYM_NAME_LEN` of include/linux/kallsyms.h, since Linux 6.1.
pub const LONGEST_NAME: usize = 512;

/// A name before the first NUL: not longer than one can be, and of nothing that a line of a text file cannot hold.
pub fn name(bytes: &[u8]) -> Option<String> {
    let text = until_nul(&bytes[..bytes.len().min(LONGEST_NAME)])?;
    let fits = text.chars().all(|c| !c.is_control() && !c.is_whitespace());
    fits.then_some(text)
}

/// The text before the first NUL.
pub fn until_nul(bytes: &[u8]) -> Option<String> {
    let len = bytes.iter().position(|byte| *byte == 0)?;
    String::from_utf8(bytes[..len].to_vec()).ok()
}

/// The build ID among ELF notes: name size, descriptor size, type 3, `GNU`.
pub fn build_id(mut notes: &[u8]) -> Option<String> {
    loop {
        let word = |at: usize| Some(u32::from_le_bytes(notes.get(at..at + 4)?.try_into().ok()?) as usize);
        let (name, len, kind) = (word(0)?, word(4)?, word(8)?);
        let start = 12 + name.next_multiple_of(4);
        let value = notes.get(start..start.checked_add(len)?)?;
        if kind == 3 && notes[12..].starts_with(b"GNU\0") && !value.is_empty() {
            return Some(value.iter().map(|byte| format!("{byte:02x}")).collect());
        }
        if name == 0 && len == 0 {
            return None;
        }
        notes = notes.get(start + len.next_multiple_of(4)..)?;
    }
}
