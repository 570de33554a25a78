//! Opens a trace directory and decodes it.

use std::fs;
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};

use pt_flow::{Chunks, Context, Image, Position, Timing, Visitor};

use super::image::{Next, Side, TraceImage};
use super::state::{Start, StepClock, Sync};
use crate::directory::folder::{LINUX, is_ours};
use crate::directory::format::{HEADER, Header, Kind, Record};
use crate::directory::frames::{Frames, Item};
use crate::directory::packets::{Damage, Packets};
use crate::regular;
use x86::pt::RtitCtl;

/// A trace that cannot be read: which, and why.
#[derive(Debug, thiserror::Error)]
#[error("{}: {reason}", folder.display())]
pub struct TraceError {
    /// The directory.
    pub folder: PathBuf,
    /// What is wrong, and what to do.
    pub reason: String,
}

/// A vCPU's segments: numbers, and the offset at which each begins.
#[derive(Clone, Debug, Default)]
struct Stream {
    segments: Vec<u32>,
    begins: Vec<u64>,
    /// Offset behind the last packet.
    end: u64,
}

/// A trace.
#[derive(Debug)]
pub struct Trace {
    folder: PathBuf,
    header: Header,
    streams: Vec<Stream>,
}

/// Where to begin or to end.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum At {
    /// Where the trace does.
    #[default]
    Whole,
    /// An offset in the packets of the vCPU.
    Offset(u64),
    /// A step of the machine.
    Step(u64),
    /// Virtual ticks.
    Ticks(u64),
}

/// How to decode.
#[derive(Clone, Copy, Debug)]
pub struct Decode {
    /// Threads that decode.
    pub threads: usize,
    /// What is before it is left out, as far as PSBs allow: never more than is asked for.
    pub from: At,
    /// What is behind it is left out, likewise.
    pub to: At,
    /// Packets in a chunk, and so for a visitor, in bytes. The default suits visitors that keep a little of each block.
    pub chunk: usize,
}

impl Default for Decode {
    fn default() -> Decode {
        Decode {
            threads: std::thread::available_parallelism().map_or(1, usize::from),
            from: At::Whole,
            to: At::Whole,
            chunk: 1 << 18,
        }
    }
}

/// How far decoding has come.
#[derive(Clone, Copy, Debug)]
pub struct Progress {
    /// What was found in the chunk that is delivered.
    pub summary: pt_flow::Summary,
    /// Bytes of packets that have been delivered, of `total`.
    pub done: u64,
    /// Bytes of packets in all.
    pub total: u64,
}

/// What was found, and what could not be.
#[derive(Clone, Debug, Default)]
pub struct Summary {
    /// What the decoder found; its gaps are counted here.
    pub flow: pt_flow::Summary,
    /// Bytes of packets that are missing, which gaps stand for.
    pub lost: u64,
    /// What is damaged, in words, one line each.
    pub damage: Vec<String>,
}

/// The longest stretch between two PSBs.
const LIMIT: usize = 64 << 20;

/// The longest `trace.json` that is read.
const LONGEST_HEADER: u64 = 1 << 20;

/// What is read behind the end, so that the last instructions are known to have been executed.
const BEHIND: u64 = 512;

impl Trace {
    /// What `trace.json` of a directory says, and nothing else of it is read.
    ///
    /// # Errors
    /// As [`Trace::open`].
    pub fn header_of(folder: &Path) -> Result<Header, TraceError> {
        let fail = |reason: String| TraceError {
            folder: folder.into(),
            reason,
        };
        let header = regular::open_inside(&folder.join(HEADER)).and_then(|file| regular::read(file, LONGEST_HEADER));
        let text = header.map_err(|error| {
            fail(match error.kind() {
                io::ErrorKind::NotFound if folder.is_dir() => format!("not a trace directory: it has no {HEADER}"),
                io::ErrorKind::NotFound => "there is no such directory".into(),
                io::ErrorKind::NotADirectory => "not a directory".into(),
                _ => format!("{HEADER}: {error}"),
            })
        })?;
        Header::parse(&String::from_utf8_lossy(&text)).map_err(|error| fail(error.to_string()))
    }

    /// Opens a directory.
    ///
    /// # Errors
    /// It is none, or not a trace, or one of another version, or its header is damaged.
    pub fn open(folder: &Path) -> Result<Trace, TraceError> {
        let fail = |reason: String| TraceError {
            folder: folder.into(),
            reason,
        };
        let header = Trace::header_of(folder)?;
        let names: Vec<String> = fs::read_dir(folder)
            .and_then(|entries| {
                entries
                    .map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned()))
                    .collect()
            })
            .map_err(|error| fail(error.to_string()))?;
        let mut trace = Trace {
            folder: folder.into(),
            header,
            streams: Vec::new(),
        };
        // It may come from somebody else, and each file of it is opened where it is needed: all are looked at once, here.
        for name in &names {
            let found = fs::symlink_metadata(folder.join(name)).map_err(|error| fail(error.to_string()))?;
            if is_ours(name) && name != LINUX {
                regular::check(&found).map_err(|error| fail(format!("{name} {error}")))?;
            }
        }
        for cpu in 0..trace.header.cpus {
            let prefix = format!("cpu{cpu}-");
            let number = |name: &String| name.strip_prefix(&prefix)?.split_once('.')?.0.parse().ok();
            let mut segments: Vec<u32> = names.iter().filter_map(number).collect();
            segments.sort_unstable();
            segments.dedup();
            let stream = trace
                .measure(cpu, segments)
                .map_err(|error| trace.error(error.to_string()))?;
            trace.streams.push(stream);
        }
        Ok(trace)
    }

    pub(crate) fn error(&self, reason: String) -> TraceError {
        TraceError {
            folder: self.folder.clone(),
            reason,
        }
    }

    /// Where segments begin, and where the last ends.
    fn measure(&self, cpu: usize, segments: Vec<u32>) -> io::Result<Stream> {
        let mut stream = Stream {
            segments,
            ..Stream::default()
        };
        for &segment in &stream.segments {
            let mut frames = Frames::new(&self.folder, Kind::Packets, cpu, &[segment]);
            let begin = frames.find_map(|item| match item {
                Ok(Item::Frame { offset, .. }) => Some(Ok(offset)),
                Ok(_) => None,
                Err(error) => Some(Err(error)),
            });
            stream.begins.push(begin.transpose()?.unwrap_or(u64::MAX));
        }
        // A segment without packets begins where those before it end.
        for index in (0..stream.begins.len()).rev() {
            let next = stream.begins.get(index + 1).copied().unwrap_or(u64::MAX);
            stream.begins[index] = stream.begins[index].min(next);
        }
        if let Some(&last) = stream.segments.last() {
            let begin = stream.begins.iter().copied().filter(|begin| *begin != u64::MAX).max();
            let end = Frames::new(&self.folder, Kind::Packets, cpu, &[last]).end()?;
            stream.end = end.max(begin.unwrap_or(0));
        }
        Ok(stream)
    }

    /// What `trace.json` says.
    pub fn header(&self) -> &Header {
        &self.header
    }

    /// The directory.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// How many vCPUs were recorded.
    pub fn cpus(&self) -> usize {
        self.streams.len()
    }

    /// A vCPU's segments.
    pub(crate) fn segments(&self, cpu: usize) -> &[u32] {
        self.streams.get(cpu).map_or(&[], |stream| &stream.segments)
    }

    /// How packets tell time.
    pub fn timing(&self) -> Timing {
        Timing {
            tsc_per_crystal: (1, 1),
            mtc_shift: RtitCtl::from_bits(self.header.rtit_ctl).mtc_freq(),
            nominal_ratio: u8::try_from(self.header.tsc_khz / 100_000).unwrap_or(u8::MAX),
        }
    }

    /// The packets of a vCPU that are there, as offsets.
    pub fn extent(&self, cpu: usize) -> Range<u64> {
        let Some(stream) = self.streams.get(cpu) else {
            return 0..0;
        };
        let begin = stream.begins.first().copied().unwrap_or(0).min(stream.end);
        begin..stream.end
    }

    /// The moments of a vCPU's recording.
    pub fn clock(&self, cpu: usize) -> StepClock {
        self.clock_and(cpu, &Damage::default())
    }

    /// The same, and what is damaged.
    fn clock_and(&self, cpu: usize, damage: &Damage) -> StepClock {
        let mut syncs = Vec::new();
        let mut side = Side::new(&self.folder, cpu, self.segments(cpu));
        while let Some(next) = side.next(damage) {
            let (psb, offset, step, tick) = match next {
                Next::Record(Record::Sync { offset, step, tick }, _) => (true, offset, step, tick),
                Next::Record(Record::Time { offset, step, tick }, _) => (false, offset, step, tick),
                _ => continue,
            };
            StepClock::push(
                &mut syncs,
                Sync {
                    psb,
                    offset,
                    step,
                    tick,
                },
            );
        }
        StepClock::new(syncs)
    }

    /// The packets from a PSB before a moment to one behind another, and at most those that are there.
    pub(crate) fn range(&self, cpu: usize, from: At, to: At, clock: &StepClock) -> Range<u64> {
        let extent = self.extent(cpu);
        type Is = fn(&Sync, u64) -> bool;
        let is = |at: At| -> Option<(u64, Is)> {
            Some(match at {
                At::Whole => return None,
                At::Offset(offset) => (offset, |sync, value| sync.offset <= value),
                At::Step(step) => (step, |sync, value| sync.step <= value),
                At::Ticks(ticks) => (ticks, |sync, value| sync.tick <= value),
            })
        };
        let mut psbs = clock.syncs().iter().filter(|sync| sync.psb);
        let start = is(from).and_then(|(value, is)| psbs.clone().rfind(|sync| is(sync, value)));
        let end = is(to).and_then(|(value, is)| psbs.find(|sync| !is(sync, value)));
        let start = start.map_or(extent.start, |sync| sync.offset.max(extent.start));
        start..end.map_or(extent.end, |sync| sync.offset.min(extent.end)).max(start)
    }

    /// Decodes a vCPU on several threads. `make` makes a visitor for each chunk of the trace, `deliver` gets them back in order.
    /// Every chunk begins with a PSB and its state: the visitor hears the mode, the time and CR3 before the first block.
    ///
    /// # Errors
    /// There is no such vCPU, or the system does not let a file be read. What is damaged is no error: it is reported.
    pub fn decode<V: Visitor + Send>(
        &self,
        cpu: usize,
        options: &Decode,
        make: impl Fn(&Start) -> V + Sync_,
        mut deliver: impl FnMut(V, &Progress),
    ) -> Result<Summary, TraceError> {
        let Some(stream) = self.streams.get(cpu) else {
            return Err(self.error(format!("there is no vCPU {cpu}: there are {}", self.cpus())));
        };
        let damage = Damage::default();
        let clock = self.clock_and(cpu, &damage);
        let Range { start, end } = self.range(cpu, options.from, options.to, &clock);
        let total = end - start;
        // From the segment on that the beginning is in.
        let first = stream.begins.partition_point(|begin| *begin <= start).saturating_sub(1);
        let segments = &stream.segments[first.min(stream.segments.len())..];
        let frames = Frames::new(&self.folder, Kind::Packets, cpu, segments);
        let packets = Packets::new(frames, start, end.saturating_add(BEHIND), damage.clone());
        let chunks = Chunks::new(packets, options.chunk, LIMIT)
            .starting_at(start)
            .ending_at(end);
        let mut done = 0;
        let flow = pt_flow::decode_parallel(
            chunks,
            options.threads,
            self.timing(),
            || TraceImage::new(&self.folder, cpu, segments, damage.clone()),
            |chunk| {
                make(&Start {
                    cpu,
                    offset: chunk.offset(),
                    clock: clock.clone(),
                })
            },
            |visitor, summary| {
                done += summary.bytes;
                let progress = Progress { summary, done, total };
                deliver(visitor, &progress);
            },
        );
        let flow = flow.map_err(|error| self.error(error.to_string()))?;
        if let Some(unread) = damage.unread() {
            return Err(self.error(unread));
        }
        let (lost, damage) = damage.take();
        Ok(Summary { flow, lost, damage })
    }

    /// The code of a vCPU, for looking single things up.
    ///
    /// # Errors
    /// There is no such vCPU.
    pub fn code(&self, cpu: usize) -> Result<Code, TraceError> {
        let Some(stream) = self.streams.get(cpu) else {
            return Err(self.error(format!("there is no vCPU {cpu}: there are {}", self.cpus())));
        };
        Ok(Code {
            folder: self.folder.clone(),
            cpu,
            segments: stream.segments.clone(),
            at: 0,
            image: TraceImage::new(&self.folder, cpu, &stream.segments, Damage::default()),
        })
    }
}

/// `std`'s, beside the moment of the same name.
use std::marker::Sync as Sync_;

/// The code of a vCPU.
#[derive(Debug)]
pub struct Code {
    folder: PathBuf,
    cpu: usize,
    segments: Vec<u32>,
    at: u64,
    image: TraceImage,
}

impl Code {
    /// The bytes at an address as they were where so many bytes of packets had been written: how many there are. Going forward
    /// is quick, going back begins anew.
    pub fn read(&mut self, offset: u64, cr3: u64, ip: u64, out: &mut [u8]) -> usize {
        if offset < self.at {
            self.image = TraceImage::new(&self.folder, self.cpu, &self.segments, Damage::default());
        }
        self.at = offset;
        while let Some(position) = self.image.next_change().filter(|next| next.offset <= offset) {
            self.image.advance(position, &mut |_| {});
        }
        self.image.read(cr3, ip, out)
    }

    /// All pages that are known at an offset: their CR3 (`None` for addresses that belong to all), linear address and bytes.
    pub fn pages(&mut self, offset: u64, mut f: impl FnMut(Option<u64>, u64, &[u8; crate::directory::format::PAGE])) {
        self.read(offset, 0, 0, &mut []);
        self.image.each_page(|space, linear, bytes| {
            f(space.checked_sub(1).map(|cr3| cr3 << 5), linear, bytes);
        });
    }

    /// Where code changes next, behind the offset that was asked for last.
    pub fn next_change(&mut self) -> Option<Position> {
        self.image.next_change()
    }

    /// What a decoder calls the address space of this CR3.
    pub fn context(cr3: u64) -> Context {
        Context {
            cr3: Some(cr3 & !0x1f),
            ..Context::default()
        }
    }
}
