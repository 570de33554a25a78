//! Joins the traces of a run's parts into one.
//!
//! # Theory
//! Each segment of a trace can be decoded without those before it. So the segments of a part go behind those of the part before, under the next
//! numbers, and its offsets go up by the packets that are before it. Nothing of the packets changes.
//!
//! # Practice
//! Files of a part are removed once they are copied, so that the disk never holds more than one file twice.

use std::{
    fs::{self, File},
    io::{self, BufReader, BufWriter, ErrorKind, Read, Write},
    path::{Path, PathBuf},
};

use crate::{
    directory::{
        folder::{self, LINUX},
        format::{Encoder, FRAME, FrameHeader, HEADER, Header, Kind, MAX_PAYLOAD, PAGE, Record, Records},
    },
    linux::join as join_linux,
    regular,
};

/// The longest `trace.json` that is read.
const LONGEST_HEADER: u64 = 1 << 20;

/// A part that is none.
#[derive(Debug, thiserror::Error)]
pub enum JoinError {
    /// Reading or writing fails.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What the system says.
        source: io::Error,
    },
    /// A file is no trace's, or damaged.
    #[error("{}: damaged, or not the trace of a part", .0.display())]
    Damaged(PathBuf),
    /// Parts that are of another recording than the first.
    #[error("{}: another recording than {}: its CPUs, model or filters are others", .0.display(), .1.display())]
    Another(PathBuf, PathBuf),
}

fn failed(path: &Path) -> impl Fn(io::Error) -> JoinError {
    move |source| JoinError::Io {
        path: path.into(),
        source,
    }
}

fn header_of(part: &Path) -> Result<Header, JoinError> {
    let path = part.join(HEADER);
    let file = regular::open_inside(&path).map_err(failed(&path))?;
    let text = regular::read(file, LONGEST_HEADER).map_err(failed(&path))?;
    Header::parse(&String::from_utf8_lossy(&text)).map_err(|_| JoinError::Damaged(path))
}

/// Joins parts, in order, into a directory that is new or empty (or, with `force`, a trace). The parts are taken apart.
///
/// # Errors
/// See [`JoinError`].
pub fn join(parts: &[PathBuf], into: &Path, force: bool) -> Result<(), JoinError> {
    let headers = parts
        .iter()
        .map(|part| header_of(part))
        .collect::<Result<Vec<_>, _>>()?;
    let Some(last) = headers.last() else { return Ok(()) };
    // All but how each has ended.
    let what = |header: &Header| Header {
        end: None,
        ..header.clone()
    };
    if let Some(other) = headers.iter().position(|header| what(header) != what(last)) {
        return Err(JoinError::Another(parts[other].clone(), parts[parts.len() - 1].clone()));
    }
    folder::prepare(into, force).map_err(failed(into))?;
    for cpu in 0..last.cpus {
        let (mut base, mut number, mut known) = (0, 0, false);
        for part in parts {
            let mut end = base;
            // The first switch in a part tells which thread ran before, too, as the first one of all does.
            let threads = first_threads(part, cpu)?;
            let mut skip = known && threads.is_some_and(|tells_both| tells_both);
            known |= threads.is_some();
            for segment in 0.. {
                let from = part.join(Kind::Packets.file(cpu, segment));
                if !from.is_file() {
                    break;
                }
                let side = part.join(Kind::Side.file(cpu, segment));
                let len = |path: &Path| fs::metadata(path).map_or(0, |file| file.len());
                // Of a CPU that has had nothing to do in this part there is a frame without records.
                if (len(&from), len(&side) <= FRAME as u64) == (0, true) {
                    continue;
                }
                let to = into.join(Kind::Packets.file(cpu, number));
                end = end.max(copy(&from, &to, Kind::Packets, base, &mut false)?);
                let to = into.join(Kind::Side.file(cpu, number));
                copy(&side, &to, Kind::Side, base, &mut skip)?;
                number += 1;
            }
            base = end;
        }
    }
    let folders: Vec<PathBuf> = parts.iter().map(|part| part.join(LINUX)).collect();
    let linux = into.join(LINUX);
    join_linux::join(&folders, &linux).map_err(failed(&linux))?;
    let complete = headers
        .iter()
        .all(|header| header.end.as_ref().is_some_and(|end| end.complete));
    let mut header = last.clone();
    if let Some(end) = &mut header.end {
        end.complete = complete;
    }
    folder::write_header(into, &header).map_err(failed(into))?;
    for part in parts {
        fs::remove_dir_all(part).map_err(failed(part))?;
    }
    Ok(())
}

/// Whether the first two records of threads of a CPU stand at one place; `None`: there are none.
fn first_threads(part: &Path, cpu: usize) -> Result<Option<bool>, JoinError> {
    let (mut first, mut payload) = (None, Vec::new());
    for segment in 0.. {
        let path = part.join(Kind::Side.file(cpu, segment));
        if !path.is_file() {
            break;
        }
        let file = regular::open_inside(&path).map_err(failed(&path))?;
        let mut source = BufReader::with_capacity(1 << 20, file);
        while let Some(header) = next(&mut source, Kind::Side, &mut payload).map_err(failed(&path))? {
            header.ok_or_else(|| JoinError::Damaged(path.clone()))?;
            for record in Records::new(&payload).map_while(Result::ok) {
                let Record::Thread { offset, .. } = record else {
                    continue;
                };
                match first {
                    Some(before) => return Ok(Some(before == offset)),
                    None => first = Some(offset),
                }
            }
        }
    }
    Ok(first.map(|_| false))
}

/// Copies a file with its offsets moved, and removes it; with `skip`, without the first record of a thread. Gives the offset behind the last packet, moved.
fn copy(from: &Path, to: &Path, kind: Kind, base: u64, skip: &mut bool) -> Result<u64, JoinError> {
    let damaged = || JoinError::Damaged(from.into());
    let file = regular::open_inside(from).map_err(failed(from))?;
    let mut source = BufReader::with_capacity(1 << 20, file);
    let mut out = BufWriter::with_capacity(1 << 20, regular::create_private(to).map_err(failed(to))?);
    let (mut payload, mut records, mut end) = (Vec::new(), Encoder::default(), base);
    while let Some(header) = next(&mut source, kind, &mut payload).map_err(failed(from))? {
        let header = header.ok_or_else(damaged)?;
        let offset = header.offset.checked_add(base).ok_or_else(damaged)?;
        let moved = match kind {
            Kind::Packets => &payload,
            Kind::Side => {
                records.clear();
                shift(&payload, base, skip, &mut records).ok_or_else(damaged)?;
                &records.bytes
            }
        };
        if moved.len() > MAX_PAYLOAD {
            return Err(damaged());
        }
        end = end.max(offset + payload.len() as u64);
        let mut write = |bytes: &[u8]| out.write_all(bytes).map_err(failed(to));
        write(&FrameHeader::of(moved, offset).bytes(kind))?;
        write(moved)?;
    }
    out.flush().map_err(failed(to))?;
    fs::remove_file(from).map_err(failed(from))?;
    Ok(end)
}

/// Reads a frame; `None` at the end of the file, `Some(None)` where there is none.
fn next(source: &mut BufReader<File>, kind: Kind, payload: &mut Vec<u8>) -> io::Result<Option<Option<FrameHeader>>> {
    let mut bytes = [0; FRAME];
    let mut read = 0;
    while read < FRAME {
        match source.read(&mut bytes[read..]) {
            Ok(0) if read == 0 => return Ok(None),
            Ok(0) => return Ok(Some(None)),
            Ok(count) => read += count,
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    let Some(header) = FrameHeader::parse(&bytes, kind) else {
        return Ok(Some(None));
    };
    payload.resize(header.len as usize, 0);
    match source.read_exact(payload) {
        Err(error) if error.kind() == ErrorKind::UnexpectedEof => return Ok(Some(None)),
        read => read?,
    }
    Ok(Some(
        (FrameHeader::of(payload, header.offset).crc == header.crc).then_some(header),
    ))
}

/// Writes records anew with offsets moved; `None`: they are none.
fn shift(payload: &[u8], base: u64, skip: &mut bool, out: &mut Encoder) -> Option<()> {
    for record in Records::new(payload) {
        let mut record = record.ok()?;
        match &mut record {
            Record::Content { at } => {
                out.content(payload.get(*at..*at + PAGE)?.try_into().ok()?);
                continue;
            }
            Record::File { at, path, build_id } => {
                let bytes = payload.get(*at..*at + *path + *build_id)?;
                let (path, build_id) = bytes.split_at_checked(*path)?;
                out.file(path, build_id);
                continue;
            }
            Record::Page { .. } => {}
            Record::Thread { .. } if std::mem::take(skip) => continue,
            Record::Change { offset, .. }
            | Record::Sync { offset, .. }
            | Record::Time { offset, .. }
            | Record::Tsc { offset, .. }
            | Record::Thread { offset, .. }
            | Record::Mapping { offset, .. }
            | Record::Mark { offset, .. } => *offset = offset.checked_add(base)?,
        }
        out.record(&record);
    }
    Some(())
}

#[cfg(test)]
#[path = "join_test.rs"]
mod tests;
