//! The commands of QEMU's human monitor that debuggers read a guest's memory with, over QMP's `human-monitor-command`.
//!
//! Debuggers take the answers apart, so their form is QEMU's.

use std::fmt::Write;

use machine::memory::Memory;
use vm_memory::{GuestAddress, GuestMemoryBackend};

/// Bytes that `xp` shows at most.
const MOST: u64 = 1 << 16;
/// Bytes in a line of `xp`'s.
const LINE: usize = 16;

/// Carries out a line, and gives what there is to say about it, in lines.
pub fn answer(memory: &Memory, line: &str) -> String {
    let mut words = line.split_ascii_whitespace();
    let name = words.next().unwrap_or_default();
    let words: Vec<&str> = words.collect();
    match (name, &words[..]) {
        ("xp", [format, address]) if format.starts_with('/') => xp(memory, format, address),
        ("xp", [address]) => xp(memory, "/1xw", address),
        ("gpa2hva", [address]) => gpa2hva(memory, address),
        ("info", ["mtree", "-f"]) => mtree(memory),
        ("help", _) => "xp /FORMAT ADDRESS\ngpa2hva ADDRESS\ninfo mtree -f\n".into(),
        ("xp" | "gpa2hva" | "info", _) => format!("{name}: not with these arguments: `help` lists what there is\n"),
        _ => format!("unknown command: '{}'\n", name.replace(char::is_control, "?")),
    }
}

fn number(word: &str) -> Option<u64> {
    match word.strip_prefix("0x") {
        Some(digits) => u64::from_str_radix(digits, 16).ok(),
        None => word.parse().ok(),
    }
}

/// `xp /COUNTxSIZE ADDRESS`: physical memory, as so many numbers in hexadecimal of 1, 2, 4 or 8 bytes (b, h, w, g).
fn xp(memory: &Memory, format: &str, address: &str) -> String {
    let digits: String = format[1..].chars().take_while(char::is_ascii_digit).collect();
    let letters = &format[1 + digits.len()..];
    let size = match letters.trim_start_matches('x') {
        "b" => 1,
        "h" => 2,
        "" | "w" => 4,
        "g" => 8,
        _ => return "xp: a format is /COUNT, x, and b, h, w or g\n".into(),
    };
    let count = if digits.is_empty() {
        Some(1)
    } else {
        digits.parse().ok()
    };
    let (Some(count), Some(start)) = (count, number(address)) else {
        return "xp: a count or an address that is no number\n".into();
    };
    if u64::checked_mul(count, size).is_none_or(|len| len > MOST) {
        return format!("xp: more than {MOST} bytes\n");
    }
    let mut text = String::new();
    let per_line = LINE as u64 / size;
    let mut shown = 0;
    while shown < count {
        let here = per_line.min(count - shown);
        let at = start.wrapping_add(shown * size);
        let mut bytes = [0; LINE];
        let bytes = &mut bytes[..(here * size) as usize];
        let _ = write!(text, "{at:016x}:");
        if memory.read(at, bytes).is_err() {
            text += " Cannot access memory\n";
            return text;
        }
        for unit in bytes.chunks_exact(size as usize) {
            text += " 0x";
            for byte in unit.iter().rev() {
                let _ = write!(text, "{byte:02x}");
            }
        }
        text.push('\n');
        shown += here;
    }
    text
}

/// Where guest-physical memory is in this process, which a debugger that may do so reads by process_vm_readv(2).
fn gpa2hva(memory: &Memory, address: &str) -> String {
    let Some(gpa) = number(address) else {
        return "gpa2hva: an address that is no number\n".into();
    };
    match memory.mmap().get_host_address(GuestAddress(gpa)) {
        Ok(host) => format!("Host virtual address for {gpa:#x} (ram) is {:#x}\n", host.addr()),
        Err(_) => format!("No memory is mapped at address {gpa:#x}\n"),
    }
}

/// Where RAM is, as a flat view of the address space.
fn mtree(memory: &Memory) -> String {
    let mut text = "FlatView #0\n AS \"memory\", root: system\n Root memory region: system\n".to_string();
    for range in std::iter::once(0..memory.low_end()).chain(memory.high()) {
        let (first, last) = (range.start, range.end - 1);
        let _ = writeln!(text, "  {first:016x}-{last:016x} (prio 0, ram): ram");
    }
    text
}

#[cfg(test)]
#[path = "human_monitor_test.rs"]
mod tests;
