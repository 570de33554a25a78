//! Which code ran, in the forms of other programs: drcov, for Lighthouse and its like, and lcov's tracefiles, for genhtml.

use std::{
    collections::BTreeMap,
    fmt::Write as _,
    io::{self, Write as _},
    ops::Range,
    process::{Command, Stdio},
    thread,
};

/// Executed blocks in the form of DynamoRIO's drcov, version 2, with one module: a program that is at these addresses. Blocks that are
/// not all in it are left out.
pub fn drcov(path: &str, code: &Range<u64>, blocks: impl IntoIterator<Item = Range<u64>>) -> Vec<u8> {
    let inside = |block: &Range<u64>| code.start <= block.start && block.start < block.end && block.end <= code.end;
    let blocks: Vec<Range<u64>> = blocks.into_iter().filter(inside).collect();
    let path = path.replace(char::is_control, "?");
    let head = format!(
        "DRCOV VERSION: 2\nDRCOV FLAVOR: minivmm\nModule Table: version 2, count 1\nColumns: id, base, end, entry, checksum, \
         timestamp, path\n 0, {:#018x}, {:#018x}, 0x0000000000000000, 0x00000000, 0x00000000, {path}\nBB Table: {} bbs\n",
        code.start,
        code.end,
        blocks.len()
    );
    let mut bytes = head.into_bytes();
    for block in blocks {
        // Offset, length and the module's number. The form has 16 bits for a length; no block of straight code is longer than a page or two.
        let len = u16::try_from(block.end - block.start).unwrap_or(u16::MAX);
        bytes.extend(((block.start - code.start) as u32).to_le_bytes());
        bytes.extend(len.to_le_bytes());
        bytes.extend(0u16.to_le_bytes());
    }
    bytes
}

/// The lines of source that a program with debug information has at these addresses, as addr2line(1) says them.
///
/// # Errors
/// There is no addr2line, or it says nothing that is text.
pub fn lines(program: &str, code: Range<u64>) -> io::Result<BTreeMap<u64, (String, u32)>> {
    let mut command = Command::new("addr2line");
    command
        .args(["-e", program])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped());
    let mut child = command.spawn()?;
    let asked: String = code.clone().map(|address| format!("{address:#x}\n")).collect();
    let stdin = child.stdin.take();
    // It answers while it is asked.
    let writer = thread::spawn(move || stdin.map(|mut stdin| stdin.write_all(asked.as_bytes())));
    let output = child.wait_with_output()?;
    let _ = writer.join();
    let said = String::from_utf8(output.stdout).map_err(io::Error::other)?;
    let lines = code.zip(said.lines().map(line));
    Ok(lines.filter_map(|(address, line)| Some((address, line?))).collect())
}

/// A place as addr2line(1) says it: `FILE:LINE`, and what may stand behind it.
fn line(text: &str) -> Option<(String, u32)> {
    let (file, line) = text.split(" (").next()?.rsplit_once(':')?;
    Some((file.into(), line.parse().ok().filter(|line| *line > 0)?))
}

/// How often lines ran, by file and line, as a tracefile of lcov's: geninfo(1), "TRACEFILE FORMAT".
pub fn lcov(lines: &BTreeMap<(String, u32), u64>) -> String {
    let mut text = String::new();
    let mut lines = lines.iter().peekable();
    while let Some(((file, _), _)) = lines.peek() {
        let file = file.clone();
        let (mut found, mut hit) = (0, 0);
        let _ = writeln!(text, "TN:\nSF:{}", file.replace(char::is_control, "?"));
        while let Some(((_, line), count)) = lines.next_if(|((of, _), _)| *of == file) {
            let _ = writeln!(text, "DA:{line},{count}");
            found += 1;
            hit += u64::from(*count > 0);
        }
        let _ = writeln!(text, "LF:{found}\nLH:{hit}\nend_of_record");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_s_blocks_and_lines() {
        let bytes = drcov(
            "/bin/p",
            &(0x1000..0x2000),
            [0x1010..0x1018, 0x3000..0x3004, 0x1ffe..0x2002],
        );
        let table = bytes.len() - 8;
        let head = String::from_utf8(bytes[..table].to_vec()).unwrap();
        assert!(
            head.starts_with("DRCOV VERSION: 2\n") && head.ends_with(", /bin/p\nBB Table: 1 bbs\n"),
            "{head}"
        );
        assert_eq!(bytes[table..], [0x10, 0, 0, 0, 8, 0, 0, 0]);
        assert_eq!(line("/a b.c:12 (discriminator 3)"), Some(("/a b.c".into(), 12)));
        assert_eq!((line("??:0"), line("a.c:?")), (None, None));
        let lines = [("a.c", 3, 2), ("a.c", 4, 0), ("b.c", 1, 1)];
        let lines = lines
            .map(|(file, line, count)| ((file.to_string(), line), count))
            .into();
        assert_eq!(
            lcov(&lines),
            "TN:\nSF:a.c\nDA:3,2\nDA:4,0\nLF:2\nLH:1\nend_of_record\nTN:\nSF:b.c\nDA:1,1\nLF:1\nLH:1\nend_of_record\n"
        );
    }
}
