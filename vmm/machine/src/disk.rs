//! `--disk`: the files behind the block devices.
//!
//! A disk is a raw image, or a block device. Who writes it has it alone, who only reads it shares it with other readers; that
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
use log::warn;
use vmm_sys_util::fallocate::{FallocateMode, fallocate};

use crate::{error::plain, sparse::Sparse};

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

/// Overlays know of blocks of this size whether they are the guest's or the file's.
const CLUSTER: u64 = 4096;
/// Zeroes are written in pieces of this size where no hole can be made.
static ZEROES: [u8; 64 << 10] = [0; 64 << 10];

/// A file as a disk.
pub struct Disk {
    path: PathBuf,
    file: File,
    /// The file's length; the disk's is this rounded up to sectors.
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
    /// Opens and locks the file. Only [`DiskMode::ReadWrite`] opens it for writing.
    pub fn open(path: &Path, mode: DiskMode) -> io::Result<Self> {
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
        let len = file.seek(SeekFrom::End(0))?;
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
        if self.regular && self.file.metadata()?.len() < self.len {
            return Err(refused("the file has shrunk"));
        }
        Ok(())
    }

    fn read_file(&self, offset: u64, bytes: &mut [u8]) -> io::Result<()> {
        // The file's last sector may be a partial one, which zeroes complete.
        let have = self.len.saturating_sub(offset).min(bytes.len() as u64) as usize;
        bytes[have..].fill(0);
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
                return self.file.write_all_at(bytes, offset);
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
                let result = self.file.sync_all();
                self.report("flushing", result)
            }
            // Nothing outlives the process, so there is nothing to keep.
            Storage::Nowhere | Storage::Overlay(_) => Ok(()),
        }
    }
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
fn temporary_file() -> io::Result<File> {
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
mod tests {
    use super::*;

    /// A file with a name of its own, removed at the end.
    struct Image(PathBuf);

    impl Image {
        fn new(bytes: &[u8]) -> Self {
            let name = format!("minivmm-disk-{}-{}", std::process::id(), unique());
            let path = std::env::temp_dir().join(name);
            std::fs::write(&path, bytes).unwrap();
            Image(path)
        }

        fn open(&self, mode: DiskMode) -> Result<Disk, String> {
            Disk::open(&self.0, mode).map_err(|e| e.to_string())
        }

        fn bytes(&self) -> Vec<u8> {
            std::fs::read(&self.0).unwrap()
        }
    }

    impl Drop for Image {
        fn drop(&mut self) {
            let _ = std::fs::remove_file(&self.0);
        }
    }

    fn sectors(count: usize) -> Vec<u8> {
        (0..count * 512).map(|i| (i / 512 + i) as u8).collect()
    }

    // covers: devices/virtio-blk
    #[test]
    fn what_is_written_is_in_the_file() {
        let image = Image::new(&sectors(64));
        let mut disk = image.open(DiskMode::ReadWrite).unwrap();
        assert_eq!((disk.size(), disk.readonly()), (64 * 512, false));
        disk.write(1024, &[9; 1024]).unwrap();
        disk.zero(4096, 8192).unwrap();
        disk.flush().unwrap();
        let mut expected = sectors(64);
        expected[1024..2048].fill(9);
        expected[4096..12288].fill(0);
        assert_eq!(image.bytes(), expected);
        let mut bytes = vec![1; 16384];
        disk.read(512, &mut bytes).unwrap();
        assert_eq!(bytes, expected[512..512 + 16384]);
    }

    // covers: devices/virtio-blk-overlay-readonly
    #[test]
    fn an_overlay_behaves_as_the_file_would_and_leaves_it_alone() {
        // 62 sectors and a half: the last one is a partial one.
        let image = Image::new(&sectors(64)[..32_000]);
        let mut model = sectors(64)[..32_000].to_vec();
        model.resize(32_256, 0);
        let mut disk = image.open(DiskMode::Overlay).unwrap();
        assert_eq!((disk.size(), disk.readonly()), (32_256, false));
        let mut state = 1u64;
        let mut random = |below: u64| {
            state = state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
            (state >> 33) % below
        };
        for round in 0..500 {
            let first = random(63);
            let count = 1 + random(63 - first);
            let (at, len) = (first * 512, (count * 512) as usize);
            match random(3) {
                0 => {
                    let bytes = vec![round as u8; len];
                    disk.write(at, &bytes).unwrap();
                    model[at as usize..][..len].copy_from_slice(&bytes);
                }
                1 if round % 10 == 0 => {
                    disk.zero(at, len as u64).unwrap();
                    model[at as usize..][..len].fill(0);
                }
                _ => {
                    let mut bytes = vec![0xee; len];
                    disk.read(at, &mut bytes).unwrap();
                    assert_eq!(bytes, model[at as usize..][..len], "round {round}");
                }
            }
        }
        disk.flush().unwrap();
        drop(disk);
        assert_eq!(image.bytes(), &sectors(64)[..32_000]);
    }

    // covers: reverse/disks
    #[test]
    fn an_overlay_goes_back_to_what_it_held_and_forgets_what_nobody_keeps() {
        let image = Image::new(&sectors(64));
        let mut disk = image.open(DiskMode::Overlay).unwrap();
        let overlay = disk.overlay().unwrap();
        let contents = |disk: &mut Disk| {
            let mut bytes = vec![0; 64 * 512];
            disk.read(0, &mut bytes).unwrap();
            bytes
        };
        let mut kept = vec![(overlay.save(), contents(&mut disk))];
        for round in 1..50 {
            disk.write(round % 7 * 512, &[round as u8; 2048]).unwrap();
            disk.write(8192, &[round as u8; 4096]).unwrap();
            kept.push((overlay.save(), contents(&mut disk)));
        }
        let places = overlay.lock().places;
        for (state, bytes) in kept.iter().rev().chain(&kept) {
            overlay.restore(state);
            assert!(contents(&mut disk) == *bytes);
        }
        assert_eq!(kept[0].1, sectors(64));
        // Another way from the third state on: its own writes, and the kept ones are as they were.
        overlay.restore(&kept[3].0);
        disk.write(8192, &[0xee; 4096]).unwrap();
        overlay.restore(&kept[4].0);
        assert!(contents(&mut disk) == kept[4].1);
        // Their places are free once they are gone, so the file grows no more.
        kept.truncate(1);
        overlay.restore(&kept[0].0);
        for round in 0..places {
            disk.write(round % 8 * 4096, &[7; 4096]).unwrap();
        }
        assert!(
            overlay.lock().places <= places + 1,
            "{} {places}",
            overlay.lock().places
        );
        drop(disk);
        assert_eq!(image.bytes(), sectors(64));
        assert!(image.open(DiskMode::ReadOnly).unwrap().overlay().is_none());
    }

    // covers: devices/virtio-blk-overlay-readonly
    #[test]
    fn a_readonly_disk_is_opened_for_reading_only() {
        let image = Image::new(b"a tar file, or whatever");
        let mut disk = image.open(DiskMode::ReadOnly).unwrap();
        assert_eq!((disk.size(), disk.readonly()), (512, true));
        let mut sector = [0xee; 512];
        disk.read(0, &mut sector).unwrap();
        assert_eq!(
            (&sector[..23], &sector[23..]),
            (&b"a tar file, or whatever"[..], &[0; 489][..])
        );
        disk.write(0, &sector).unwrap_err();
        disk.zero(0, 512).unwrap_err();
        disk.flush().unwrap();
        assert_eq!(image.bytes(), b"a tar file, or whatever");
    }

    // covers: bad-input/disk-in-use
    #[test]
    fn a_writer_has_a_file_alone_and_readers_share_it() {
        use DiskMode::{Overlay, ReadOnly, ReadWrite};
        let image = Image::new(&sectors(1));
        for (first, second, together) in [
            (ReadWrite, ReadWrite, false),
            (ReadWrite, ReadOnly, false),
            (ReadWrite, Overlay, false),
            (ReadOnly, ReadWrite, false),
            (Overlay, ReadWrite, false),
            (ReadOnly, Overlay, true),
            (Overlay, Overlay, true),
        ] {
            let held = image.open(first).unwrap();
            match image.open(second) {
                Ok(_) => assert!(together, "{first:?}, {second:?}"),
                Err(error) => assert!(!together && error.contains("in use"), "{first:?}, {second:?}: {error}"),
            }
            drop(held);
            image.open(second).unwrap();
        }
    }

    // covers: bad-input/disk-shrinks
    #[test]
    fn a_file_that_shrinks_is_an_error_and_does_not_grow_again() {
        let image = Image::new(&sectors(16));
        let mut disk = image.open(DiskMode::ReadWrite).unwrap();
        File::options()
            .write(true)
            .open(&image.0)
            .unwrap()
            .set_len(1000)
            .unwrap();
        let mut sector = [0; 512];
        disk.read(0, &mut sector).unwrap();
        assert_eq!(sector, sectors(1)[..]);
        for offset in [512, 1024, 7680] {
            let error = disk.read(offset, &mut sector).unwrap_err().to_string();
            assert!(error.contains("shrunk"), "{error}");
        }
        disk.write(7680, &sector).unwrap_err();
        disk.zero(0, 512).unwrap_err();
        assert_eq!(image.bytes().len(), 1000);
        let mut overlay = {
            drop(disk);
            image.open(DiskMode::Overlay).unwrap()
        };
        File::options().write(true).open(&image.0).unwrap().set_len(0).unwrap();
        overlay.read(0, &mut sector).unwrap_err();
        // A part of a cluster needs the rest of it from the file.
        overlay.write(0, &sector).unwrap_err();
    }
}
