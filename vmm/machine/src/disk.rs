//! `--disk`: the files behind the block devices.
//!
//! A disk is a raw image, a block device, or a qcow2 image, which is so because the user says so: what a file looks like may be what a
//! guest wrote to it. Who writes it has it alone, who only reads it shares it with other readers; that
//! is agreed among minivmm's processes by flock(2). An overlay keeps what the guest writes in an unnamed temporary file and
//! never touches the user's.

use std::{
    fmt,
    fs::{File, OpenOptions, TryLockError},
    io::{self, Seek, SeekFrom},
    os::unix::fs::{FileExt, FileTypeExt, OpenOptionsExt},
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard},
};

use devices::virtio::block::{Medium, SECTOR};
use imago::{FormatAccess, FormatDriverBuilder, file::File as ImageFile, qcow2::Qcow2};
use log::warn;
use vmm_sys_util::fallocate::{FallocateMode, fallocate};

use crate::{error::plain, images::Images, sparse::Sparse};

/// What a guest's writes do to a disk's file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DiskMode {
    /// They go to the file, and a flush by the guest is an fsync.
    ReadWrite,
    /// The guest cannot write.
    ReadOnly,
    /// They are kept for as long as the machine runs, and the file stays as it is.
    Overlay,
}

/// What is in a disk's file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DiskFormat {
    /// The disk's sectors, one after the other.
    Raw,
    /// QEMU's format, version 2 or 3.
    Qcow2,
}

/// The first bytes of a qcow2 file.
const QCOW_MAGIC: [u8; 4] = *b"QFI\xfb";

/// Overlays know of blocks of this size whether they are the guest's or the file's.
const CLUSTER: u64 = 4096;
/// The same, for whoever keeps them elsewhere.
pub const BLOCK: u64 = CLUSTER;
/// Zeroes are written in pieces of this size where no hole can be made.
static ZEROES: [u8; 64 << 10] = [0; 64 << 10];

/// A file as a disk.
pub struct Disk {
    path: PathBuf,
    file: File,
    /// What finds a sector in the file, unless it is raw.
    image: Option<FormatAccess<ImageFile>>,
    /// The length of what is in the file; the disk's is this rounded up to sectors.
    len: u64,
    regular: bool,
    storage: Storage,
    /// Something has failed, and was reported.
    reported: bool,
}

/// Where writes go.
enum Storage {
    File,
    Nowhere,
    Overlay(Overlay),
}

impl fmt::Debug for Disk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Disk {}", self.path.display())
    }
}

fn refused(text: impl Into<String>) -> io::Error {
    io::Error::other(text.into())
}

impl Disk {
    /// Opens and locks the file. Only [`DiskMode::ReadWrite`] opens it for writing. Without a format a file that looks like a qcow2 image is
    /// refused, and any other one is raw.
    ///
    /// # Errors
    /// One line: what is wrong with the file, and what to do.
    pub fn open(path: &Path, mode: DiskMode, format: Option<DiskFormat>) -> io::Result<Self> {
        let writes = mode == DiskMode::ReadWrite;
        // A FIFO would wait for a writer.
        let mut options = OpenOptions::new();
        options.read(true).custom_flags(libc::O_NONBLOCK);
        let kind = std::fs::metadata(path)?.file_type();
        if kind.is_dir() {
            return Err(refused("is a directory"));
        }
        if !kind.is_file() && !kind.is_block_device() {
            return Err(refused("is neither a regular file nor a block device"));
        }
        let mut file = options.write(writes).open(path).map_err(|e| match e.kind() {
            io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem if writes => refused(format!(
                "{}; to leave the file alone, append ,readonly or ,overlay",
                plain(&e)
            )),
            _ => e,
        })?;
        let locked = if writes {
            file.try_lock()
        } else {
            file.try_lock_shared()
        };
        match locked {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                return Err(refused(
                    "is in use: another minivmm has it open, or it is given twice; readers may share a file, a writer has it alone",
                ));
            }
            // File systems without locks.
            Err(TryLockError::Error(e)) if matches!(e.raw_os_error(), Some(libc::ENOLCK | libc::EOPNOTSUPP)) => {}
            Err(TryLockError::Error(e)) => return Err(e),
        }
        let mut len = file.seek(SeekFrom::End(0))?;
        let mut magic = [0; QCOW_MAGIC.len()];
        let is_qcow = len >= magic.len() as u64 && file.read_exact_at(&mut magic, 0).is_ok() && magic == QCOW_MAGIC;
        let image = match (format, is_qcow) {
            (None, true) => {
                return Err(refused(
                    "looks like a qcow2 image: append ,format=qcow2, or ,format=raw if the guest is to see the file as it is",
                ));
            }
            (Some(DiskFormat::Qcow2), false) => {
                return Err(refused("is no qcow2 image, as it does not begin like one"));
            }
            (Some(DiskFormat::Qcow2), true) => Some(open_image(path, writes)?),
            (None | Some(DiskFormat::Raw), _) => None,
        };
        if let Some(image) = &image {
            len = image.size();
        }
        if len == 0 {
            return Err(refused("is empty; give it a size, as with `truncate -s 1G`"));
        }
        if writes && !len.is_multiple_of(SECTOR) {
            return Err(refused(format!(
                "{len} bytes, which is not a multiple of {SECTOR}; round it up with `truncate -s %{SECTOR}`, or append ,readonly or ,overlay"
            )));
        }
        let storage = match mode {
            DiskMode::ReadWrite => Storage::File,
            DiskMode::ReadOnly => Storage::Nowhere,
            DiskMode::Overlay => Storage::Overlay(Overlay::new()?),
        };
        Ok(Disk {
            path: path.into(),
            file,
            image,
            len,
            regular: kind.is_file(),
            storage,
            reported: false,
        })
    }

    /// What keeps the guest's writes, where the file does not.
    pub fn overlay(&self) -> Option<Overlay> {
        match &self.storage {
            Storage::Overlay(overlay) => Some(overlay.clone()),
            Storage::File | Storage::Nowhere => None,
        }
    }

    /// Says the first error of a disk, and leaves the rest to the guest.
    fn report<T>(&mut self, what: &str, result: io::Result<T>) -> io::Result<T> {
        if let Err(error) = &result
            && !std::mem::replace(&mut self.reported, true)
        {
            let path = self.path.display();
            warn!("--disk {path}: {what}: {}; the guest sees an I/O error", plain(error));
        }
        result
    }

    /// A regular file must not have shrunk: a write behind its end would leave a hole where the guest's data were.
    fn check_len(&self) -> io::Result<()> {
        if self.regular && self.image.is_none() && self.file.metadata()?.len() < self.len {
            return Err(refused("the file has shrunk"));
        }
        Ok(())
    }

    fn read_file(&self, offset: u64, bytes: &mut [u8]) -> io::Result<()> {
        // The file's last sector may be a partial one, which zeroes complete.
        let have = self.len.saturating_sub(offset).min(bytes.len() as u64) as usize;
        bytes[have..].fill(0);
        if let Some(image) = &self.image {
            return image.read(&mut bytes[..have], offset);
        }
        self.file
            .read_exact_at(&mut bytes[..have], offset)
            .map_err(|e| match e.kind() {
                io::ErrorKind::UnexpectedEof => refused("the file has shrunk"),
                _ => e,
            })
    }

    fn read_any(&self, offset: u64, bytes: &mut [u8]) -> io::Result<()> {
        let Storage::Overlay(overlay) = &self.storage else {
            return self.read_file(offset, bytes);
        };
        for (at, range) in clusters(offset, bytes.len()) {
            let part = &mut bytes[range];
            if !overlay.lock().read(at, part)? {
                self.read_file(at, part)?;
            }
        }
        Ok(())
    }

    fn write_any(&mut self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        match &self.storage {
            Storage::Nowhere => return Err(io::ErrorKind::ReadOnlyFilesystem.into()),
            Storage::File => {
                self.check_len()?;
                return match &self.image {
                    Some(image) => image.write(bytes, offset),
                    None => self.file.write_all_at(bytes, offset),
                };
            }
            Storage::Overlay(_) => {}
        }
        for (at, range) in clusters(offset, bytes.len()) {
            let part = &bytes[range];
            let start = at / CLUSTER * CLUSTER;
            // What is not written of a cluster comes from the file.
            let mut cluster = [0; CLUSTER as usize];
            let whole = part.len() as u64 == CLUSTER;
            if !whole {
                self.read_any(start, &mut cluster)?;
            }
            cluster[(at - start) as usize..][..part.len()].copy_from_slice(part);
            if let Storage::Overlay(overlay) = &self.storage {
                overlay.lock().write(start / CLUSTER, &cluster)?;
            }
        }
        Ok(())
    }

    fn zero_any(&mut self, offset: u64, len: u64) -> io::Result<()> {
        if let Storage::File = self.storage {
            self.check_len()?;
            if let Some(image) = &self.image {
                return image.write_zeroes(offset, len);
            }
            if fallocate(&self.file, FallocateMode::PunchHole, true, offset, len).is_ok() {
                return Ok(());
            }
        }
        let mut done = 0;
        while done < len {
            let part = (len - done).min(ZEROES.len() as u64);
            self.write_any(offset + done, &ZEROES[..part as usize])?;
            done += part;
        }
        Ok(())
    }
}

impl Medium for Disk {
    fn size(&self) -> u64 {
        self.len.next_multiple_of(SECTOR)
    }

    fn readonly(&self) -> bool {
        matches!(self.storage, Storage::Nowhere)
    }

    fn read(&mut self, offset: u64, bytes: &mut [u8]) -> io::Result<()> {
        let result = self.read_any(offset, bytes);
        self.report("reading", result)
    }

    fn write(&mut self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        let result = self.write_any(offset, bytes);
        self.report("writing", result)
    }

    fn zero(&mut self, offset: u64, len: u64) -> io::Result<()> {
        let result = self.zero_any(offset, len);
        self.report("writing", result)
    }

    fn flush(&mut self) -> io::Result<()> {
        match self.storage {
            Storage::File => {
                let result = match &self.image {
                    Some(image) => image.flush().and_then(|()| image.sync()),
                    None => self.file.sync_all(),
                };
                self.report("flushing", result)
            }
            // Nothing outlives the process, so there is nothing to keep.
            Storage::Nowhere | Storage::Overlay(_) => Ok(()),
        }
    }
}

/// Opens a qcow2 image with the files that it is based on.
fn open_image(path: &Path, writes: bool) -> io::Result<FormatAccess<ImageFile>> {
    let images = Images::default();
    let image = Qcow2::<ImageFile>::builder_path(path)
        .write(writes)
        .open(images)
        .map_err(|error| refused(format!("the qcow2 image cannot be used: {}", plain(&error))))?;
    Ok(FormatAccess::new(image))
}

/// What a guest has written to a disk. Clones are the same overlay.
#[derive(Clone, Debug)]
pub struct Overlay(Arc<Mutex<Written>>);

/// What a guest had written to a disk at some time. The places of the temporary file that it is in are kept for as long as it
/// lives.
#[derive(Clone, Default)]
pub struct Contents(Sparse<Cluster>);

impl fmt::Debug for Contents {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} clusters", self.0.iter().count())
    }
}

impl Overlay {
    fn new() -> io::Result<Self> {
        Ok(Overlay(Arc::new(Mutex::new(Written {
            file: temporary_file()?,
            clusters: Contents::default(),
            places: 0,
            free: Arc::default(),
        }))))
    }

    fn lock(&self) -> MutexGuard<'_, Written> {
        self.0.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// What has been written so far.
    pub fn save(&self) -> Contents {
        self.lock().clusters.clone()
    }

    /// Each block of [`BLOCK`] bytes that has been written, by its number on the disk, ascending.
    ///
    /// # Errors
    /// The temporary file cannot be read.
    pub fn blocks(&self) -> io::Result<Vec<(u64, Vec<u8>)>> {
        let written = self.lock();
        let blocks = written.clusters.0.iter().map(|(number, _)| {
            let mut bytes = vec![0; CLUSTER as usize];
            written.read(number * CLUSTER, &mut bytes)?;
            Ok((number, bytes))
        });
        blocks.collect()
    }

    /// Has the disk hold these blocks, each of [`BLOCK`] bytes, and otherwise what its file does.
    ///
    /// # Errors
    /// The temporary file cannot be written, or a block is of another length.
    pub fn set_blocks(&self, blocks: &[(u64, Vec<u8>)]) -> io::Result<()> {
        let mut written = self.lock();
        written.clusters = Contents::default();
        for (number, bytes) in blocks {
            let bytes = bytes.as_slice().try_into().map_err(io::Error::other)?;
            written.write(*number, bytes)?;
        }
        Ok(())
    }

    /// Has the disk hold again what it held then.
    pub fn restore(&self, contents: &Contents) {
        self.lock().clusters = contents.clone();
    }
}

/// The clusters that were written, and the file that they are in.
#[derive(Debug)]
struct Written {
    file: File,
    clusters: Contents,
    /// The file's length in clusters.
    places: u64,
    free: Arc<Mutex<Vec<u64>>>,
}

/// A cluster's place in the file, free for another one when nobody has it any more.
struct Cluster {
    number: u64,
    free: Arc<Mutex<Vec<u64>>>,
}

impl Drop for Cluster {
    fn drop(&mut self) {
        free_places(&self.free).push(self.number);
    }
}

fn free_places(free: &Mutex<Vec<u64>>) -> MutexGuard<'_, Vec<u64>> {
    free.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

impl Written {
    /// Reads within a cluster from an offset of the disk, if the cluster has been written.
    fn read(&self, offset: u64, bytes: &mut [u8]) -> io::Result<bool> {
        let Some(place) = self.clusters.0.get(offset / CLUSTER) else {
            return Ok(false);
        };
        self.file
            .read_exact_at(bytes, place.number * CLUSTER + offset % CLUSTER)?;
        Ok(true)
    }

    /// Writes a cluster: where it is, or elsewhere if somebody may go back to what it holds.
    fn write(&mut self, cluster: u64, bytes: &[u8; CLUSTER as usize]) -> io::Result<()> {
        if let Some(place) = self.clusters.0.own(cluster) {
            return self.file.write_all_at(bytes, place.number * CLUSTER);
        }
        let known = free_places(&self.free).pop();
        let number = known.unwrap_or(self.places);
        self.places = self.places.max(number + 1);
        let free = Arc::clone(&self.free);
        // It is free again if the write fails.
        let place = Cluster { number, free };
        self.file.write_all_at(bytes, number * CLUSTER)?;
        self.clusters.0.set(cluster, Some(Arc::new(place)));
        Ok(())
    }
}

/// Cuts a range at the borders of clusters: each part's offset on the disk, and its place in the buffer.
fn clusters(offset: u64, len: usize) -> impl Iterator<Item = (u64, std::ops::Range<usize>)> {
    let mut done = 0;
    std::iter::from_fn(move || {
        let at = offset + done as u64;
        let part = ((CLUSTER - at % CLUSTER) as usize).min(len - done);
        let range = done..done + part;
        done += part;
        (part > 0).then_some((at, range))
    })
}

/// A file without a name, which is gone with the process.
pub fn temporary_file() -> io::Result<File> {
    let folder = std::env::temp_dir();
    let open = || {
        let mut options = OpenOptions::new();
        options.read(true).write(true).custom_flags(libc::O_TMPFILE).mode(0o600);
        match options.open(&folder) {
            // File systems that cannot do that: make one and take the name away.
            Err(e) if matches!(e.raw_os_error(), Some(libc::EOPNOTSUPP | libc::EISDIR | libc::ENOENT)) => {
                let path = folder.join(format!("minivmm-overlay-{}-{:x}", std::process::id(), unique()));
                let file = OpenOptions::new()
                    .read(true)
                    .write(true)
                    .create_new(true)
                    .mode(0o600)
                    .open(&path)?;
                std::fs::remove_file(&path)?;
                Ok(file)
            }
            result => result,
        }
    };
    open().map_err(|e: io::Error| refused(format!("no temporary file in {}: {}", folder.display(), plain(&e))))
}

/// A number that this process has not used before.
fn unique() -> usize {
    use std::sync::atomic::{AtomicUsize, Ordering};
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

#[cfg(test)]
#[path = "disk_test.rs"]
mod tests;
