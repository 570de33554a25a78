//! The bytes of a trace directory.
//!
//! # The directory
//! `trace.json` says what was traced and how ([`Header`]). Of each vCPU N there are segments, numbered from 0 on:
//! `cpuN-000000.pt` has Intel PT packets, `cpuN-000000.side` what packets do not tell. A ring (`--trace-buffer`) has lost its
//! first segments. Each segment begins with a PSB and can be decoded without those before it.
//!
//! # Frames
//! Both kinds of file are frames, one after the other: [`FRAME`] bytes of header, little-endian, then the payload.
//!
//! | bytes | what |
//! |---|---|
//! | 0 to 3 | `mvPT` or `mvSB` |
//! | 4 to 7 | length of the payload |
//! | 8 to 15 | an offset in the vCPU's packets, which goes on over segments |
//! | 16 to 19 | CRC-32 (that of zlib) of the payload |
//! | 20 to 23 | CRC-32 of bytes 0 to 19 |
//!
//! The payload of `mvPT` is packets from the offset on. The payload of `mvSB` is records; the sideband is complete for all
//! packets before the offset. A sideband frame is written before the packets that it is about, so that a run that is killed
//! leaves a directory that decodes up to the last packets written.
//!
//! # Records
//! A record is a byte that says which, then numbers: unsigned LEB128, signed ones zigzag. An *offset* is in the vCPU's packets,
//! a *step* is the machine's count of instructions and REP iterations, a *tick* of virtual time is one of the model's TSC as it
//! would be if nobody wrote it. Offset, step and tick are the difference to the last of their kind in the frame.
//!
//! | record | numbers | what |
//! |---|---|---|
//! | 1 content | 4096 bytes | contents of a page; they count from 0 in each segment |
//! | 2 page | space, page, content | the page of 4 KiB at the linear address page << 12 has this content, and had no other in this segment |
//! | 3 change | offset, ip + 1 or 0, step, space, page, content | the same, but it had another content until here |
//! | 4 sync | offset, step, tick | a PSB begins here |
//! | 5 tsc | offset, step, value | from here on, the guest's TSC is so much (modulo 2^64) ahead of virtual ticks |
//! | 7 time | offset, step, tick | what the clocks show here, after they stood still |
//! | 8 thread | offset, step, tid, tgid, 16 bytes of name | the vCPU goes over to this thread: the entry of Linux's `__switch_to` |
//! | 9 file | length of path, length of build ID, path, build ID | a file of which a process maps code; they count from 0 in each segment |
//! | 10 mapping | offset, step, space, page, pages, page in file, file + 1 or 0 | from here on, addresses from page << 12 on are those pages of the file; 0: of none |
//! | 11 guest's mapping | offset, step, VMCS pointer >> 12, space, page, pages, page in file, file + 1 or 0 | the same of a process of the guest that this VMCS is of |
//! | 6 mark | which, offset, step, tick, ip + 1 or 0 | 0 segment begins, 1 tracing begins, 2 tracing stops, 3 INIT, 4 start-up IPI, 5 shutdown, 6 end of the recording |
//!
//! *Space* says whose address it is: 0 for addresses with bit 63 set, which belong to all; else CR3 >> 5, plus 1. A space that
//! was never reported has no code. A change stands at a PSB, in front of which the pending TNT bits were sent: its position has no
//! pending bits. `ip` is the instruction that is executed next, 0 where none is traced. A page has a new content when code of
//! it is executed that differs from the last content, not when it is written. A record 2 may stand behind the packets that
//! need it; it holds for the whole time from the last change of that page on, or from the beginning of the segment.
//!
//! A record 8 stands at a PSB, too, whose step it has: the thread's stack is another from the next return on. There are none before
//! the kernel was found, and none without `__switch_to` in its symbols. The name is that of `task_struct`, ended by zeros.
//!
//! Records 9 and 10 say what a process of Linux executes: the mapping (`vm_area_struct`) of a page of user code, where the page is executed for the
//! first time in the segment, or is another than it was. The path is that of `/proc/PID/maps`, `[vdso]` for the kernel's code in
//! user mode, and empty for memory without a file. A mapping holds until another one in its space has one of its addresses. A record 10 stands at
//! a PSB, as a record 11 does. The guests' own page tables lead from their linear addresses to their physical ones: CR3 tells a process of the guest,
//! and nothing without the guest.
//!
//! # Packets
//! TSC packets carry virtual ticks. IP packets are linear addresses in every mode. PIP packets tell CR3 whatever the filter is.
//! Everything else is as the SDM has it.
//!
//! # What packets do not tell
//! Direct jumps and calls have no packet. So a loop that has nothing else in it (a jump to itself, HLT and a jump back) has none
//! either, on hardware as here: only the event that ends it tells an address, and a decoder goes there the first time that the
//! address comes by. How often the loop went round is not in the trace. Steps and time go on by what it took, from the next
//! packet of time on: `trace info` shows fewer instructions than steps, and no gap. Likewise REP iterations are steps and one
//! instruction, and INT n is an event and no instruction.

use serde::{Deserialize, Serialize};

/// The version of the format that is written. Version 1, which had no records 8, version 2, which had no records 9 and 10, and version 3, which
/// had no records 11, are read too.
pub const VERSION: u32 = 4;

/// The oldest version that is read.
pub const OLDEST: u32 = 1;

/// Bytes of a thread's name, with the zeros behind it: `TASK_COMM_LEN` of include/linux/sched.h.
pub const COMM: usize = 16;

/// Bytes of a file's path: `PATH_MAX` of include/uapi/linux/limits.h.
pub const LONGEST_PATH: usize = 4096;
/// Bytes of a build ID; those of linkers have 16 or 20.
pub const LONGEST_BUILD_ID: usize = 64;
/// Bytes of a frame's header.
pub const FRAME: usize = 24;

/// The longest payload that is written or believed.
pub const MAX_PAYLOAD: usize = 1 << 20;

/// Size of a page of code.
pub const PAGE: usize = 4096;

/// The most vCPUs that a machine has.
pub const MOST_CPUS: usize = 255;

/// The file that says what the directory is.
pub const HEADER: &str = "trace.json";

/// Which of a segment's two files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Intel PT packets.
    Packets,
    /// Sideband.
    Side,
}

impl Kind {
    fn magic(self) -> [u8; 4] {
        match self {
            Kind::Packets => *b"mvPT",
            Kind::Side => *b"mvSB",
        }
    }

    /// The name of a segment's file.
    pub fn file(self, cpu: usize, segment: u32) -> String {
        let suffix = match self {
            Kind::Packets => "pt",
            Kind::Side => "side",
        };
        format!("cpu{cpu}-{segment:06}.{suffix}")
    }
}

/// A frame's header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FrameHeader {
    /// Length of the payload.
    pub len: u32,
    /// The offset that the frame carries.
    pub offset: u64,
    /// CRC-32 of the payload.
    pub crc: u32,
}

impl FrameHeader {
    /// The header of a payload.
    pub fn of(payload: &[u8], offset: u64) -> FrameHeader {
        FrameHeader {
            len: payload.len() as u32,
            offset,
            crc: crc32fast::hash(payload),
        }
    }

    /// Its bytes.
    pub fn bytes(&self, kind: Kind) -> [u8; FRAME] {
        let mut out = [0; FRAME];
        out[..4].copy_from_slice(&kind.magic());
        out[4..8].copy_from_slice(&self.len.to_le_bytes());
        out[8..16].copy_from_slice(&self.offset.to_le_bytes());
        out[16..20].copy_from_slice(&self.crc.to_le_bytes());
        let crc = crc32fast::hash(&out[..20]);
        out[20..].copy_from_slice(&crc.to_le_bytes());
        out
    }

    /// What the bytes say, if they are a header.
    pub fn parse(bytes: &[u8; FRAME], kind: Kind) -> Option<FrameHeader> {
        let word = |at: usize| u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
        let header = FrameHeader {
            len: word(4),
            offset: u64::from(word(8)) | u64::from(word(12)) << 32,
            crc: word(16),
        };
        let good = bytes[..4] == kind.magic()
            && word(20) == crc32fast::hash(&bytes[..20])
            && header.len as usize <= MAX_PAYLOAD;
        good.then_some(header)
    }
}

/// What a mark is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mark {
    /// A segment begins; all that was known of code is reported anew.
    Segment,
    /// Tracing begins.
    Start,
    /// Tracing stops.
    Stop,
    /// INIT.
    Init,
    /// A start-up IPI.
    StartUp,
    /// A triple fault.
    Shutdown,
    /// The recording ends.
    End,
}

impl Mark {
    const ALL: [Mark; 7] = [
        Mark::Segment,
        Mark::Start,
        Mark::Stop,
        Mark::Init,
        Mark::StartUp,
        Mark::Shutdown,
        Mark::End,
    ];
}

/// A record of the sideband.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Record {
    /// Contents of a page, which begin so many bytes after the payload's beginning.
    Content {
        /// Where.
        at: usize,
    },
    /// A page that was not known in this segment.
    Page {
        /// See the module.
        space: u64,
        /// Linear address >> 12.
        page: u64,
        /// Number of the content.
        content: u64,
    },
    /// A page has another content from here on.
    Change {
        /// Of the PSB.
        offset: u64,
        /// The next instruction.
        ip: Option<u64>,
        /// The machine's step.
        step: u64,
        /// See the module.
        space: u64,
        /// Linear address >> 12.
        page: u64,
        /// Number of the content.
        content: u64,
    },
    /// A PSB.
    Sync {
        /// Where it begins.
        offset: u64,
        /// The machine's step.
        step: u64,
        /// Virtual ticks.
        tick: u64,
    },
    /// What the clocks show after they stood still.
    Time {
        /// Where.
        offset: u64,
        /// The machine's step.
        step: u64,
        /// Virtual ticks.
        tick: u64,
    },
    /// The guest's TSC moved.
    Tsc {
        /// Where.
        offset: u64,
        /// The machine's step.
        step: u64,
        /// Guest's TSC less virtual ticks.
        value: u64,
    },
    /// The vCPU goes over to another thread of Linux.
    Thread {
        /// Of the PSB.
        offset: u64,
        /// The machine's step.
        step: u64,
        /// The thread's number; 0 for those that are idle.
        tid: u32,
        /// Its process's number.
        tgid: u32,
        /// Its name, with zeros behind it.
        comm: [u8; COMM],
    },
    /// A file of which a process maps code: its path begins so many bytes after the payload's beginning, and its build ID is behind that.
    File {
        /// Where.
        at: usize,
        /// Bytes of the path.
        path: usize,
        /// Bytes of the build ID; 0: it is not known.
        build_id: usize,
    },
    /// A process maps pages of a file, from here on.
    Mapping {
        /// Of the PSB.
        offset: u64,
        /// The machine's step.
        step: u64,
        /// The VMCS pointer of the guest of a hypervisor whose process it is; `None`: it is one of the machine's own Linux.
        vmcs: Option<u64>,
        /// See the module.
        space: u64,
        /// Linear address >> 12.
        page: u64,
        /// How many pages.
        pages: u64,
        /// The first page in the file.
        first: u64,
        /// Number of the file; `None`: memory without a file.
        file: Option<u64>,
    },
    /// Something about the recording or the vCPU.
    Mark {
        /// What.
        mark: Mark,
        /// Where.
        offset: u64,
        /// The machine's step.
        step: u64,
        /// Virtual ticks.
        tick: u64,
        /// The next instruction, where it is traced.
        ip: Option<u64>,
    },
}

/// The space of an address.
pub fn space(cr3: u64, linear: u64) -> u64 {
    if linear >> 63 != 0 {
        0
    } else {
        (cr3 >> 5 & 0x7fff_ffff_ffff) + 1
    }
}

/// What differences refer to.
#[derive(Clone, Copy, Debug, Default)]
struct Last {
    offset: u64,
    step: u64,
    tick: u64,
    page: u64,
}

/// Writes records into a payload.
#[derive(Debug, Default)]
pub struct Encoder {
    last: Last,
    /// The payload so far.
    pub bytes: Vec<u8>,
}

impl Encoder {
    /// Begins the next frame.
    pub fn clear(&mut self) {
        self.last = Last::default();
        self.bytes.clear();
    }

    fn number(&mut self, mut value: u64) {
        while value >= 0x80 {
            self.bytes.push(value as u8 | 0x80);
            value >>= 7;
        }
        self.bytes.push(value as u8);
    }

    fn signed(&mut self, value: i64) {
        self.number((value << 1 ^ value >> 63) as u64);
    }

    fn offset(&mut self, value: u64) {
        self.signed(value.wrapping_sub(self.last.offset) as i64);
        self.last.offset = value;
    }

    fn step(&mut self, value: u64) {
        self.signed(value.wrapping_sub(self.last.step) as i64);
        self.last.step = value;
    }

    fn tick(&mut self, value: u64) {
        self.signed(value.wrapping_sub(self.last.tick) as i64);
        self.last.tick = value;
    }

    fn place(&mut self, space: u64, page: u64, content: u64) {
        self.number(space);
        self.signed(page.wrapping_sub(self.last.page) as i64);
        self.last.page = page;
        self.number(content);
    }

    /// Appends a content.
    pub fn content(&mut self, bytes: &[u8; PAGE]) {
        self.bytes.push(1);
        self.bytes.extend_from_slice(bytes);
    }

    /// Appends a file. What is longer than [`LONGEST_PATH`] and [`LONGEST_BUILD_ID`] is cut.
    pub fn file(&mut self, path: impl AsRef<[u8]>, build_id: &[u8]) {
        let path = path.as_ref();
        let path = &path[..path.len().min(LONGEST_PATH)];
        let build_id = &build_id[..build_id.len().min(LONGEST_BUILD_ID)];
        self.bytes.push(9);
        self.number(path.len() as u64);
        self.number(build_id.len() as u64);
        self.bytes.extend_from_slice(path);
        self.bytes.extend_from_slice(build_id);
    }

    /// Appends any other record.
    pub fn record(&mut self, record: &Record) {
        match *record {
            Record::Content { .. } | Record::File { .. } => {}
            Record::Mapping {
                offset,
                step,
                vmcs,
                space,
                page,
                pages,
                first,
                file,
            } => {
                self.bytes.push(if vmcs.is_some() { 11 } else { 10 });
                self.offset(offset);
                self.step(step);
                if let Some(vmcs) = vmcs {
                    self.number(vmcs >> 12);
                }
                self.place(space, page, pages);
                self.number(first);
                // There are fewer files than that.
                self.number(file.map_or(0, |file| file.wrapping_add(1)));
            }
            Record::Page { space, page, content } => {
                self.bytes.push(2);
                self.place(space, page, content);
            }
            Record::Change {
                offset,
                ip,
                step,
                space,
                page,
                content,
            } => {
                self.bytes.push(3);
                self.offset(offset);
                // No instruction is at the last address: it would not have an end.
                self.number(ip.map_or(0, |ip| ip.wrapping_add(1)));
                self.step(step);
                self.place(space, page, content);
            }
            Record::Sync { offset, step, tick } => {
                self.bytes.push(4);
                self.offset(offset);
                self.step(step);
                self.tick(tick);
            }
            Record::Time { offset, step, tick } => {
                self.bytes.push(7);
                self.offset(offset);
                self.step(step);
                self.tick(tick);
            }
            Record::Tsc { offset, step, value } => {
                self.bytes.push(5);
                self.offset(offset);
                self.step(step);
                self.number(value);
            }
            Record::Thread {
                offset,
                step,
                tid,
                tgid,
                comm,
            } => {
                self.bytes.push(8);
                self.offset(offset);
                self.step(step);
                self.number(tid.into());
                self.number(tgid.into());
                self.bytes.extend_from_slice(&comm);
            }
            Record::Mark {
                mark,
                offset,
                step,
                tick,
                ip,
            } => {
                self.bytes.push(6);
                self.number(mark as u64);
                self.offset(offset);
                self.step(step);
                self.tick(tick);
                self.number(ip.map_or(0, |ip| ip.wrapping_add(1)));
            }
        }
    }
}

/// Reads the records of a payload.
#[derive(Debug)]
pub struct Records<'a> {
    bytes: &'a [u8],
    at: usize,
    last: Last,
}

impl<'a> Records<'a> {
    /// The records of these bytes.
    pub fn new(bytes: &'a [u8]) -> Records<'a> {
        Records {
            bytes,
            at: 0,
            last: Last::default(),
        }
    }

    fn number(&mut self) -> Option<u64> {
        let mut value = 0;
        for shift in (0..64).step_by(7) {
            let byte = *self.bytes.get(self.at)?;
            self.at += 1;
            value |= u64::from(byte & 0x7f) << shift;
            if byte & 0x80 == 0 {
                return Some(value);
            }
        }
        None
    }

    fn signed(&mut self) -> Option<i64> {
        let value = self.number()?;
        Some((value >> 1) as i64 ^ -((value & 1) as i64))
    }

    fn offset(&mut self) -> Option<u64> {
        self.last.offset = self.last.offset.wrapping_add(self.signed()? as u64);
        Some(self.last.offset)
    }

    fn step(&mut self) -> Option<u64> {
        self.last.step = self.last.step.wrapping_add(self.signed()? as u64);
        Some(self.last.step)
    }

    fn tick(&mut self) -> Option<u64> {
        self.last.tick = self.last.tick.wrapping_add(self.signed()? as u64);
        Some(self.last.tick)
    }

    fn place(&mut self) -> Option<(u64, u64, u64)> {
        let space = self.number()?;
        self.last.page = self.last.page.wrapping_add(self.signed()? as u64);
        Some((space, self.last.page, self.number()?))
    }

    fn record(&mut self, tag: u8) -> Option<Record> {
        Some(match tag {
            1 => {
                let at = self.at;
                self.at = at.checked_add(PAGE).filter(|end| *end <= self.bytes.len())?;
                Record::Content { at }
            }
            2 => {
                let (space, page, content) = self.place()?;
                Record::Page { space, page, content }
            }
            3 => {
                let offset = self.offset()?;
                let ip = self.number()?.checked_sub(1);
                let step = self.step()?;
                let (space, page, content) = self.place()?;
                Record::Change {
                    offset,
                    ip,
                    step,
                    space,
                    page,
                    content,
                }
            }
            4 => Record::Sync {
                offset: self.offset()?,
                step: self.step()?,
                tick: self.tick()?,
            },
            5 => Record::Tsc {
                offset: self.offset()?,
                step: self.step()?,
                value: self.number()?,
            },
            6 => Record::Mark {
                mark: *Mark::ALL.get(usize::try_from(self.number()?).ok()?)?,
                offset: self.offset()?,
                step: self.step()?,
                tick: self.tick()?,
                ip: self.number()?.checked_sub(1),
            },
            7 => Record::Time {
                offset: self.offset()?,
                step: self.step()?,
                tick: self.tick()?,
            },
            8 => Record::Thread {
                offset: self.offset()?,
                step: self.step()?,
                tid: self.number()?.try_into().ok()?,
                tgid: self.number()?.try_into().ok()?,
                comm: {
                    let name = self.bytes.get(self.at..)?.first_chunk()?;
                    self.at += COMM;
                    *name
                },
            },
            9 => {
                let mut len = |most: usize| usize::try_from(self.number()?).ok().filter(|len| *len <= most);
                let (path, build_id) = (len(LONGEST_PATH)?, len(LONGEST_BUILD_ID)?);
                let at = self.at;
                self.at = at.checked_add(path + build_id).filter(|end| *end <= self.bytes.len())?;
                Record::File { at, path, build_id }
            }
            10 | 11 => {
                let (offset, step) = (self.offset()?, self.step()?);
                let vmcs = match tag {
                    // A pointer has at most 52 bits.
                    11 => Some(self.number().filter(|number| *number < 1 << 40)? << 12),
                    _ => None,
                };
                let (space, page, pages) = self.place()?;
                Record::Mapping {
                    offset,
                    step,
                    vmcs,
                    space,
                    page,
                    pages,
                    first: self.number()?,
                    file: self.number()?.checked_sub(1),
                }
            }
            _ => return None,
        })
    }
}

/// The payload of a frame whose CRC is right is no sequence of records.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NoRecord;

impl Iterator for Records<'_> {
    type Item = Result<Record, NoRecord>;

    fn next(&mut self) -> Option<Self::Item> {
        let tag = *self.bytes.get(self.at)?;
        self.at += 1;
        let record = self.record(tag).ok_or(NoRecord);
        if record.is_err() {
            self.at = self.bytes.len();
        }
        Some(record)
    }
}

/// What `trace.json` says. When it was recorded is not in it but the file's own time: two runs that are the same have traces that are
/// the same to the byte.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Header {
    /// The CPU model's name.
    pub model: String,
    /// Frequency of virtual ticks.
    pub tsc_khz: u32,
    /// How many vCPUs there are.
    pub cpus: usize,
    /// The kernel's file.
    pub kernel: String,
    /// `--trace-filter`, as given.
    pub filters: Vec<String>,
    /// `--trace-start`, as given.
    pub start: Option<String>,
    /// `--trace-stop`, as given.
    pub stop: Option<String>,
    /// `--trace-buffer`: bytes of packets that are kept of each vCPU.
    pub buffer: Option<u64>,
    /// Where files of the guest are on the host.
    #[serde(default, skip_serializing_if = "GuestSources::is_empty")]
    pub files: GuestSources,
    /// IA32_RTIT_CTL as the observer's units had it, without filters.
    pub rtit_ctl: u64,
    /// How the recording ended; nothing if it was not ended.
    pub end: Option<HeaderEnd>,
}

/// Where files of a guest are on the host, so that code of its programs can be named.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct GuestSources {
    /// The parts of its initial RAM disk.
    #[serde(default)]
    pub initrd: Vec<String>,
    /// What is below `/inject`.
    #[serde(default)]
    pub inject: Option<String>,
    /// Shared directories.
    #[serde(default)]
    pub shares: Vec<String>,
}

impl GuestSources {
    /// There are none.
    pub fn is_empty(&self) -> bool {
        *self == GuestSources::default()
    }
}

/// How a recording ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HeaderEnd {
    /// Why, in words.
    pub reason: String,
    /// The machine's steps then.
    pub steps: u64,
    /// Virtual ticks then.
    pub ticks: u64,
    /// Whether all was written that was to be.
    pub complete: bool,
}

#[derive(Serialize, Deserialize)]
struct HeaderFile {
    format: String,
    version: u32,
    /// CRC-32 of the header's compact JSON text.
    check: u32,
    header: serde_json::Value,
}

const FORMAT: &str = "minivmm-trace";

/// What is wrong with a trace's header.
#[derive(Debug, thiserror::Error)]
pub enum HeaderError {
    /// Not JSON, or not what a header has.
    #[error("{HEADER} is damaged: {0}")]
    Json(serde_json::Error),
    /// Of something else.
    #[error("not a trace of minivmm: {HEADER} does not say \"{FORMAT}\"")]
    Format,
    /// Without a version.
    #[error("{HEADER} is damaged: no version")]
    NoVersion,
    /// Of another version.
    #[error(
        "a trace of version {0}, and this minivmm reads versions {OLDEST} to {VERSION}: read it with the minivmm that wrote it"
    )]
    Version(u64),
    /// More vCPUs than a machine can have.
    #[error("{HEADER} is damaged: {0} vCPUs, and a machine has 1 to {MOST_CPUS}")]
    Cpus(usize),
    /// Changed since it was written.
    #[error("{HEADER} is damaged: its checksum is another")]
    Checksum,
}

impl Header {
    /// The text of the file.
    pub fn text(&self) -> String {
        let header = serde_json::to_value(self).unwrap_or_default();
        let file = HeaderFile {
            format: FORMAT.into(),
            version: VERSION,
            check: crc32fast::hash(header.to_string().as_bytes()),
            header,
        };
        serde_json::to_string_pretty(&file).unwrap_or_default() + "\n"
    }

    /// What the text says.
    ///
    /// # Errors
    /// What is wrong with it, and what to do.
    pub fn parse(text: &str) -> Result<Header, HeaderError> {
        let damaged = HeaderError::Json;
        let value: serde_json::Value = serde_json::from_str(text).map_err(damaged)?;
        if value.get("format").and_then(serde_json::Value::as_str) != Some(FORMAT) {
            return Err(HeaderError::Format);
        }
        match value.get("version").and_then(serde_json::Value::as_u64) {
            Some(version) if (u64::from(OLDEST)..=u64::from(VERSION)).contains(&version) => {}
            Some(version) => {
                return Err(HeaderError::Version(version));
            }
            None => return Err(HeaderError::NoVersion),
        }
        let file: HeaderFile = serde_json::from_value(value).map_err(damaged)?;
        if file.check != crc32fast::hash(file.header.to_string().as_bytes()) {
            return Err(HeaderError::Checksum);
        }
        let header: Header = serde_json::from_value(file.header).map_err(damaged)?;
        match header.cpus {
            1..=MOST_CPUS => Ok(header),
            cpus => Err(HeaderError::Cpus(cpus)),
        }
    }
}

#[cfg(test)]
#[path = "format_test.rs"]
mod tests;
