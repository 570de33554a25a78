//! What `minivmm trace export --raw` writes, read for whoever decodes it.

use std::fs;
use std::path::{Path, PathBuf};

/// A stretch of packets in which no code changes.
#[derive(Clone, Debug, Default)]
pub struct Span {
    /// Where it begins in the packets.
    pub begin: usize,
    /// Its end, behind the PSBEND of the next one.
    pub end: usize,
    /// The instruction that is executed next there.
    pub next: Option<u64>,
    /// Pages that are not what they were in the span before: CR3 (`None` for all), address, and number in the file of pages.
    pub pages: Vec<(Option<u64>, u64, u64)>,
}

/// A vCPU's packets, pages and spans.
#[derive(Clone, Debug)]
pub struct Raw {
    /// All packets.
    pub packets: Vec<u8>,
    /// The file of pages.
    pub pages: PathBuf,
    /// The spans in their order.
    pub spans: Vec<Span>,
}

fn number(text: &str) -> u64 {
    match text.strip_prefix("0x") {
        Some(text) => u64::from_str_radix(text, 16).expect("a number"),
        None => text.parse().expect("a number"),
    }
}

impl Raw {
    /// Reads a vCPU's files.
    ///
    /// # Panics
    /// They are not there, or not as they should be.
    pub fn read(folder: &Path, cpu: usize) -> Raw {
        let map = fs::read_to_string(folder.join(format!("cpu{cpu}.map"))).expect("a map");
        let mut spans: Vec<Span> = Vec::new();
        for line in map.lines().filter(|line| !line.starts_with('#')) {
            let words: Vec<&str> = line.split(' ').collect();
            match (&words[..], spans.last_mut()) {
                (["span", begin, end, next], _) => spans.push(Span {
                    begin: number(begin) as usize,
                    end: number(end) as usize,
                    next: (*next != "-").then(|| number(next)),
                    pages: Vec::new(),
                }),
                ([cr3, address, page], Some(span)) => {
                    let cr3 = (*cr3 != "-").then(|| number(cr3));
                    span.pages.push((cr3, number(address), number(page)));
                }
                _ => panic!("{line}"),
            }
        }
        Raw {
            packets: fs::read(folder.join(format!("cpu{cpu}.pt"))).expect("packets"),
            pages: folder.join(format!("cpu{cpu}.pages")),
            spans,
        }
    }
}
