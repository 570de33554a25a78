//! Writes the archive that Linux unpacks as its initial root: cpio's "newc" format.
//! Source: Linux `Documentation/driver-api/early-userspace/buffer-format.rst` "initramfs buffer format".

/// An archive being built. Everything belongs to root and has the same time, so that the same contents give the same bytes.
#[derive(Debug, Default)]
pub struct Archive {
    bytes: Vec<u8>,
    entries: u32,
}

const FOLDER: u32 = 0o040_000;
const CHARACTER_DEVICE: u32 = 0o020_000;
const FILE: u32 = 0o100_000;
const LINK: u32 = 0o120_000;

impl Archive {
    /// A folder that everybody can read.
    pub fn folder(&mut self, path: impl AsRef<[u8]>) {
        self.folder_with(path, 0o755);
    }

    /// A folder with its permission bits.
    pub fn folder_with(&mut self, path: impl AsRef<[u8]>, permissions: u32) {
        self.entry(path.as_ref(), FOLDER | permissions, (0, 0), &[]);
    }

    /// A plain file with its permission bits.
    pub fn file(&mut self, path: impl AsRef<[u8]>, permissions: u32, contents: &[u8]) {
        self.entry(path.as_ref(), FILE | permissions, (0, 0), contents);
    }

    /// A symbolic link to `target`.
    pub fn link(&mut self, path: impl AsRef<[u8]>, target: impl AsRef<[u8]>) {
        self.entry(path.as_ref(), LINK | 0o777, (0, 0), target.as_ref());
    }

    /// A character device with its major and minor number.
    pub fn device(&mut self, path: impl AsRef<[u8]>, major: u32, minor: u32) {
        self.entry(path.as_ref(), CHARACTER_DEVICE | 0o600, (major, minor), &[]);
    }

    /// The finished archive.
    pub fn finish(mut self) -> Vec<u8> {
        // The trailer is an entry like any other, but for its inode number and mode.
        self.header(b"TRAILER!!!", 0, 0, (0, 0), 0);
        // Block devices and some boot loaders round up to a sector; zeros after the trailer are skipped.
        self.pad(512);
        self.bytes
    }

    fn entry(&mut self, path: &[u8], mode: u32, device: (u32, u32), contents: &[u8]) {
        self.entries += 1;
        let size = u32::try_from(contents.len()).expect("a file of an initramfs is smaller than 4 GiB");
        self.header(path, self.entries, mode, device, size);
        self.bytes.extend_from_slice(contents);
        self.pad(4);
    }

    fn header(&mut self, path: &[u8], inode: u32, mode: u32, device: (u32, u32), size: u32) {
        let links = if mode & FOLDER == FOLDER && mode & FILE == 0 {
            2
        } else {
            1
        };
        let name = path.len() as u32 + 1;
        // ino, mode, uid, gid, nlink, mtime, filesize, dev major and minor, rdev major and minor, namesize, check.
        let fields = [inode, mode, 0, 0, links, 0, size, 0, 0, device.0, device.1, name, 0];
        self.bytes.extend_from_slice(b"070701");
        for field in fields {
            self.bytes.extend_from_slice(format!("{field:08X}").as_bytes());
        }
        self.bytes.extend_from_slice(path);
        self.bytes.push(0);
        self.pad(4);
    }

    fn pad(&mut self, unit: usize) {
        self.bytes.resize(self.bytes.len().next_multiple_of(unit), 0);
    }
}

#[cfg(test)]
#[path = "newc_test.rs"]
mod tests;
