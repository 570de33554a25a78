use pt_packet::find_psb;
use std::io::{self, Read};

/// The state behind a PSB is never longer.
const STATE: usize = 512;

/// Bytes are read in pieces of this size.
const READ: usize = 1 << 18;

/// A part of a trace that begins with a PSB and can be decoded by itself.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Chunk {
    offset: u64,
    bytes: Vec<u8>,
    len: usize,
    skipped: u64,
    too_long: bool,
}

impl Chunk {
    /// A whole trace at once. Bytes before the first PSB are skipped.
    pub fn whole(trace: &[u8]) -> Chunk {
        let start = find_psb(trace, 0).unwrap_or(trace.len());
        Chunk {
            offset: start as u64,
            bytes: trace[start..].to_vec(),
            len: trace.len() - start,
            skipped: start as u64,
            too_long: false,
        }
    }

    /// Where in the trace it begins.
    pub fn offset(&self) -> u64 {
        self.offset
    }

    /// How many bytes of the trace it has.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it has none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Its bytes, and behind them the PSB and the state with which the next one begins: the code in front of them is known to have
    /// been executed only when they are.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// Bytes in front of it that are in no chunk.
    pub fn skipped(&self) -> u64 {
        self.skipped
    }

    pub(crate) fn too_long(&self) -> bool {
        self.too_long
    }
}

/// Cuts a stream into chunks.
#[derive(Debug)]
pub struct Chunks<R> {
    reader: R,
    size: usize,
    limit: usize,
    /// Bytes that were read, from `offset` on.
    buffer: Vec<u8>,
    offset: u64,
    skipped: u64,
    too_long: bool,
    ended: bool,
    /// No chunk goes beyond this offset of the trace.
    stop: u64,
}

impl<R: Read> Chunks<R> {
    /// Chunks of at least `size` bytes, if the stream has as many. Where PSBs are so rare that a chunk would have more than
    /// `limit` bytes, it is cut there, and what follows up to the next PSB is skipped.
    pub fn new(reader: R, size: usize, limit: usize) -> Chunks<R> {
        Chunks {
            reader,
            size: size.max(1),
            limit: limit.max(size).max(1),
            buffer: Vec::new(),
            offset: 0,
            skipped: 0,
            too_long: false,
            ended: false,
            stop: u64::MAX,
        }
    }

    /// The first byte of the reader is this one of the trace.
    pub fn starting_at(self, offset: u64) -> Chunks<R> {
        Chunks { offset, ..self }
    }

    /// The last chunk ends here, where a PSB is; what is read behind it tells of what is before.
    pub fn ending_at(self, stop: u64) -> Chunks<R> {
        Chunks { stop, ..self }
    }

    /// Reads on until there are `len` bytes or no more.
    fn fill(&mut self, len: usize) -> io::Result<()> {
        while !self.ended && self.buffer.len() < len {
            let have = self.buffer.len();
            self.buffer.resize(have + READ.max(len - have), 0);
            let read = loop {
                match self.reader.read(&mut self.buffer[have..]) {
                    Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                    result => break result,
                }
            };
            self.buffer.truncate(have + *read.as_ref().unwrap_or(&0));
            self.ended = read? == 0;
        }
        Ok(())
    }

    fn drop_front(&mut self, len: usize) {
        self.buffer.drain(..len);
        self.offset += len as u64;
    }

    /// Goes to the first PSB.
    fn sync(&mut self) -> io::Result<bool> {
        loop {
            self.fill(READ)?;
            let found = find_psb(&self.buffer, 0);
            // The last bytes may be the beginning of one.
            let skip = match found {
                Some(at) => at,
                None if self.ended => self.buffer.len(),
                None => self.buffer.len().saturating_sub(15),
            };
            self.drop_front(skip);
            self.skipped += skip as u64;
            if found.is_some() || self.ended {
                return Ok(found.is_some());
            }
        }
    }

    fn next_chunk(&mut self) -> io::Result<Option<Chunk>> {
        if self.offset >= self.stop && self.skipped == 0 {
            return Ok(None);
        }
        if !self.sync()? || self.offset >= self.stop {
            if self.skipped == 0 {
                return Ok(None);
            }
            // What is left has no information, which is to be reported itself.
            return Ok(Some(Chunk {
                offset: self.offset,
                skipped: std::mem::take(&mut self.skipped),
                ..Chunk::default()
            }));
        }
        let mut from = self.size;
        let end = loop {
            self.fill(from + READ)?;
            if let Some(at) = find_psb(&self.buffer, from) {
                break at;
            }
            if self.ended {
                break self.buffer.len();
            }
            from = from.max(self.buffer.len().saturating_sub(15));
            if from > self.limit {
                break from;
            }
        };
        let end = end.min(usize::try_from(self.stop - self.offset).unwrap_or(usize::MAX));
        self.fill(end + STATE)?;
        let cut = end > self.limit && !self.buffer[end..].starts_with(&pt_packet::PSB);
        let ahead = if cut { end } else { self.buffer.len().min(end + STATE) };
        let chunk = Chunk {
            offset: self.offset,
            bytes: self.buffer[..ahead].to_vec(),
            len: end,
            skipped: std::mem::take(&mut self.skipped),
            too_long: std::mem::take(&mut self.too_long),
        };
        self.drop_front(end);
        self.too_long = cut;
        Ok(Some(chunk))
    }
}

impl<R: Read> Iterator for Chunks<R> {
    type Item = io::Result<Chunk>;

    fn next(&mut self) -> Option<Self::Item> {
        self.next_chunk().transpose()
    }
}
