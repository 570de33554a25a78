//! `trace export --raw`: a trace in the form that users of libipt take, packets and pages of code in files of their own.

use std::fs::{self, File};
use std::io::{self, BufWriter, Read, Seek, SeekFrom, Write};
use std::path::Path;

use pt_packet::{Decoder, Packet};

use crate::directory::format::{Kind, PAGE, Record};
use crate::directory::frames::Frames;
use crate::directory::packets::{Damage, Packets};
use crate::reader::image::{Next, Side};
use crate::reader::{Trace, TraceError};

/// What was written.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RawSummary {
    /// Bytes of packets.
    pub packets: u64,
    /// Pages of code.
    pub pages: u64,
    /// Stretches of packets between two changes of code.
    pub spans: u64,
    /// Bytes of packets that are missing, and stand as FFH.
    pub lost: u64,
    /// What is damaged, in words.
    pub damage: Vec<String>,
}

/// A PSB, each packet that may follow it up to its PSBEND, and some.
const PSB_ROOM: u64 = 256;

const README: &str = "\
A trace of minivmm, for libipt.

cpuN.pt     Intel PT packets of a vCPU. IPs are linear addresses. TSC packets carry the machine's virtual time.
cpuN.pages  Pages of code, 4096 bytes each.
cpuN.map    Which page is where, and when. A line `span BEGIN END NEXT` begins a stretch of cpuN.pt in which no code changes. It
            begins with a PSB, and ends behind the PSBEND of the next span's, so that a decoder goes on up to the change and
            stops there: these packets are in both. NEXT is the instruction that is executed next then, or `-`. The lines
            below it, `CR3 ADDRESS NUMBER`, are pages that were not there before or are others now: page NUMBER of cpuN.pages
            is at linear ADDRESS, where CR3 (without bits 4:0) is the address space, or `-` for all. Pages of earlier spans
            stay until a later line covers them. A line `forget` takes all of them away.
ptxed.sh    `sh ptxed.sh N SPAN [CR3]` prints the ptxed command for a span.

Decode a span from BEGIN to END with an image of the pages that hold then. Configure libipt with mtc_freq 15,
cpuid_0x15_eax and _ebx 1, and no errata.
";

const SCRIPT: &str = r##"#!/bin/sh
# The ptxed command for a span of a vCPU: sh ptxed.sh N SPAN [CR3]
awk -v cpu="cpu$1" -v wanted="$2" -v cr3="$3" '
    $1 == "#" { next }
    $1 == "forget" { split("", page); next }
    $1 == "span" { if (span++ > wanted) exit; if (span - 1 == wanted) { from = $2; to = $3 } next }
    $1 == "-" || $1 == cr3 { page[$2] = $3 }
    END {
        printf "ptxed --mtc-freq 15 --cpuid-0x15.eax 1 --cpuid-0x15.ebx 1"
        for (at in page) printf " --raw %s.pages:%.0f-%.0f:%s", cpu, page[at] * 4096, page[at] * 4096 + 4096, at
        printf " --pt %s.pt:%s-%s\n", cpu, from, to
    }' "cpu$1.map"
"##;

/// Writes a trace into a new directory. `progress` hears how many bytes of packets, of how many, are done.
///
/// # Errors
/// The directory is there already, or cannot be written; the trace cannot be read.
pub fn export(trace: &Trace, folder: &Path, progress: &mut dyn FnMut(u64, u64)) -> Result<RawSummary, TraceError> {
    write(trace, folder, progress).map_err(|error| TraceError {
        folder: folder.into(),
        reason: crate::error::plain(&error),
    })
}

fn write(trace: &Trace, folder: &Path, progress: &mut dyn FnMut(u64, u64)) -> io::Result<RawSummary> {
    fs::create_dir(folder)?;
    fs::write(folder.join("README"), README)?;
    fs::write(folder.join("ptxed.sh"), SCRIPT)?;
    let total = (0..trace.cpus())
        .map(|cpu| trace.extent(cpu).end - trace.extent(cpu).start)
        .sum();
    let mut summary = RawSummary::default();
    for cpu in 0..trace.cpus() {
        let damage = Damage::default();
        let extent = trace.extent(cpu);
        let create = |suffix: &str| File::create_new(folder.join(format!("cpu{cpu}.{suffix}")));
        let frames = Frames::new(trace.folder(), Kind::Packets, cpu, trace.segments(cpu));
        let mut packets = Packets::new(frames, extent.start, extent.end, damage.clone());
        let path = folder.join(format!("cpu{cpu}.pt"));
        let mut out = File::options().read(true).write(true).create_new(true).open(path)?;
        let mut buffer = vec![0; 1 << 18];
        loop {
            let len = packets.read(&mut buffer)?;
            if len == 0 {
                break;
            }
            out.write_all(&buffer[..len])?;
            summary.packets += len as u64;
            progress(summary.packets, total);
        }
        let (mut pages, mut map) = (BufWriter::new(create("pages")?), BufWriter::new(create("map")?));
        let written = Code {
            trace,
            cpu,
            damage: &damage,
            packets: &out,
            pages: &mut pages,
            map: &mut map,
        }
        .write()?;
        summary.pages += written.0;
        summary.spans += written.1;
        pages.flush()?;
        map.flush()?;
        if let Some(unread) = damage.unread() {
            return Err(io::Error::other(unread));
        }
        let (lost, says) = damage.take();
        summary.lost += lost;
        summary.damage.extend(says);
    }
    Ok(summary)
}

/// The code of a vCPU, on its way out.
struct Code<'a, W> {
    trace: &'a Trace,
    cpu: usize,
    damage: &'a Damage,
    /// The packets, written.
    packets: &'a File,
    pages: &'a mut W,
    map: &'a mut W,
}

impl<W: Write> Code<'_, W> {
    /// How many pages and spans there were.
    fn write(self) -> io::Result<(u64, u64)> {
        let extent = self.trace.extent(self.cpu);
        let mut side = Side::new(self.trace.folder(), self.cpu, self.trace.segments(self.cpu));
        writeln!(self.map, "# span BEGIN END NEXT; CR3 ADDRESS PAGE: see README")?;
        let (mut pages, mut spans) = (0, 0);
        // Numbers of the segment's contents among all pages.
        let mut base = 0;
        let mut segment = None;
        let mut begin = extent.start;
        let mut lines = String::new();
        let mut end_span =
            |map: &mut W, lines: &mut String, begin: &mut u64, end: u64, next: Option<u64>| -> io::Result<()> {
                // Offsets in the file, which has nothing of what a ring has dropped.
                let (from, to) = (begin.saturating_sub(extent.start), end.saturating_sub(extent.start));
                if end > *begin {
                    let to = to + psb_len(self.packets, to)?;
                    let next = next.map_or("-".into(), |ip| format!("{ip:#x}"));
                    write!(map, "span {from:#x} {to:#x} {next}\n{lines}")?;
                    lines.clear();
                    spans += 1;
                    *begin = end;
                }
                Ok(())
            };
        while let Some(next) = side.next(self.damage) {
            match next {
                Next::Segment(number) => {
                    segment = Some(number);
                    base = pages;
                }
                Next::Damage | Next::File(_) => {}
                Next::Record(record, at) => match record {
                    Record::Content { .. } => {
                        let Some(segment) = segment else { continue };
                        let path = self.trace.folder().join(Kind::Side.file(self.cpu, segment));
                        let mut bytes = [0; PAGE];
                        std::os::unix::fs::FileExt::read_exact_at(
                            &crate::regular::open_inside(&path)?,
                            &mut bytes,
                            at,
                        )?;
                        self.pages.write_all(&bytes)?;
                        pages += 1;
                    }
                    Record::Page { space, page, content } => lines += &line(space, page, base + content),
                    Record::Change {
                        offset,
                        ip,
                        space,
                        page,
                        content,
                        ..
                    } => {
                        end_span(self.map, &mut lines, &mut begin, offset.min(extent.end), ip)?;
                        lines += &line(space, page, base + content);
                    }
                    Record::Mark {
                        mark: crate::directory::format::Mark::Segment,
                        offset,
                        ip,
                        ..
                    } if pages > 0 => {
                        end_span(self.map, &mut lines, &mut begin, offset.min(extent.end), ip)?;
                        lines += "forget\n";
                    }
                    _ => {}
                },
            }
        }
        end_span(self.map, &mut lines, &mut begin, extent.end, None)?;
        Ok((pages, spans))
    }
}

/// Bytes of the PSB and what belongs to it at an offset of the file; none where there is no whole one.
fn psb_len(packets: &File, offset: u64) -> io::Result<u64> {
    let mut bytes = Vec::new();
    let mut file = packets;
    file.seek(SeekFrom::Start(offset))?;
    file.take(PSB_ROOM).read_to_end(&mut bytes)?;
    let mut decoder = Decoder::new(&bytes);
    while let Some(Ok(item)) = decoder.next_packet() {
        if item.packet == Packet::PsbEnd {
            return Ok(decoder.offset() as u64);
        }
    }
    Ok(0)
}

fn line(space: u64, page: u64, number: u64) -> String {
    let linear = page << 12;
    match space.checked_sub(1) {
        None => format!("- {linear:#x} {number}\n"),
        Some(cr3) => format!("{:#x} {linear:#x} {number}\n", cr3 << 5),
    }
}
