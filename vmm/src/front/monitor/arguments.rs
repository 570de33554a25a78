//! What commands take and answer: numbers, counts, bits by name.

use super::error::MonitorError;

/// What a command answers: lines, or one that says why not.
pub(super) type Answer = Result<String, MonitorError>;

/// Nothing is taken.
pub(super) fn none(arguments: &[&str]) -> Result<(), MonitorError> {
    match arguments {
        [] => Ok(()),
        [first, ..] => Err(MonitorError::TooMany((*first).into())),
    }
}

/// At most a count is taken.
pub(super) fn count(arguments: &[&str], default: usize) -> Result<usize, MonitorError> {
    match arguments {
        [] => Ok(default),
        [word] => number(word).map(|count| usize::try_from(count).unwrap_or(usize::MAX)),
        [_, second, ..] => Err(MonitorError::TooMany((*second).into())),
    }
}

/// A number: decimal, or hexadecimal behind `0x`.
pub(super) fn number(word: &str) -> Result<u64, MonitorError> {
    let parsed = match word.strip_prefix("0x").or(word.strip_prefix("0X")) {
        Some(digits) if !digits.starts_with('+') => u64::from_str_radix(digits, 16).ok(),
        None if !word.starts_with('+') => word.parse().ok(),
        _ => None,
    };
    parsed.ok_or_else(|| MonitorError::Number(word.into()))
}

/// The names of the bits that are set; a set bit without a name is `bit N`, and no bit at all is `-`.
pub(super) fn bits(value: u64, names: &[(u32, &str)]) -> String {
    let mut words: Vec<String> = Vec::new();
    let set = (0..64).filter(|bit| value >> bit & 1 != 0);
    for bit in set {
        match names.iter().find(|(named, _)| *named == bit) {
            Some((_, name)) => words.push((*name).into()),
            None => words.push(format!("bit {bit}")),
        }
    }
    if words.is_empty() { "-".into() } else { words.join(" ") }
}
