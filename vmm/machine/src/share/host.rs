//! A folder of the host as it is: what the guest writes is in its files at once.
//!
//! A node is remembered by the folder that it is in, its name and its identity on the host, and opened when it is needed: where
//! the host has put something else there, the guest's kernel is told that what it knows is stale, and looks again. A name that the guest
//! removes while it uses what it leads to is opened before, so that it can go on.

use std::{
    collections::HashMap,
    ffi::OsStr,
    fmt,
    fs::File,
    os::{
        fd::{AsRawFd, OwnedFd},
        unix::{ffi::OsStrExt, fs::FileExt},
    },
    path::{Path, PathBuf},
    sync::Arc,
};

use devices::virtio::fs::file_system::{
    Attributes, Caller, Changes, Entry, Errno, FileSystem, Found, Handle, New, Node, Opened, ROOT, SetTime, Space, kind,
};
use rustix::fs::{AtFlags, FallocateFlags, FileType, Mode, OFlags, RenameFlags, Statx, Timespec, Timestamps};

use super::{
    Identity, Listed, ShareMode, attributes, errno, identity, io_errno, is_kernels, is_shown, look, open_beneath,
};

/// For how many seconds the guest's kernel believes what it was told.
const VALID: u64 = 1;
/// Bits of a mode that the guest may set: set-ID bits would have programs of the guest's making run as this process's user.
const MODE: u32 = 0o1777;

/// What the guest knows of a file.
#[derive(Debug)]
struct Known {
    /// The folder that it is in, and its name there. The root has none.
    at: (Node, Box<[u8]>),
    identity: Identity,
    kind: u32,
    /// How often the guest has been told of it.
    lookups: u64,
    /// It has no name any more: what is open of it stays open.
    removed: bool,
    /// It is a folder of the kernel's making.
    is_kernels: Option<bool>,
    /// It as a place, opened when it was needed.
    place: Option<Arc<OwnedFd>>,
    /// It for reading, where files are not opened by the guest.
    reader: Option<Arc<File>>,
    /// When one of the two was needed last.
    used: u64,
}

/// What the guest has open.
#[derive(Debug)]
enum Open {
    File(Arc<File>),
    Folder(Arc<Vec<Listed>>),
}

/// A folder of the host.
pub struct Host {
    path: PathBuf,
    root: Arc<OwnedFd>,
    device: u64,
    writes: bool,
    write_back: bool,
    nodes: HashMap<Node, Known>,
    known: HashMap<Identity, Node>,
    next: Node,
    open: HashMap<Handle, Open>,
    next_handle: Handle,
    /// Files that nodes have open, and how many they may.
    cached: usize,
    cached_max: usize,
    clock: u64,
    /// This process's file mode creation mask, beside which the guest has its own.
    umask: u32,
}

impl fmt::Debug for Host {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Host {}", self.path.display())
    }
}

impl Host {
    /// Shares a folder.
    ///
    /// # Errors
    /// It cannot be opened, or is none.
    pub fn open(path: &Path, mode: ShareMode) -> std::io::Result<Self> {
        let root = Arc::new(super::open_root(path)?);
        let found = look(&root, b"").map_err(|Errno(errno)| std::io::Error::from_raw_os_error(errno))?;
        let mut host = Host {
            path: path.into(),
            root,
            device: identity(&found).0,
            writes: matches!(mode, ShareMode::ReadWrite | ShareMode::WriteBack),
            write_back: mode == ShareMode::WriteBack,
            nodes: HashMap::new(),
            known: HashMap::new(),
            next: ROOT + 1,
            open: HashMap::new(),
            next_handle: 1,
            cached: 0,
            // A half is for what the guest has open.
            cached_max: super::raise_open_files() / 4,
            clock: 0,
            umask: crate::collect::umask(),
        };
        host.reset();
        Ok(host)
    }

    fn known(&self, node: Node) -> Result<&Known, Errno> {
        self.nodes.get(&node).ok_or(Errno::STALE)
    }

    fn writes(&self) -> Result<(), Errno> {
        match self.writes {
            true => Ok(()),
            false => Err(Errno::READ_ONLY),
        }
    }

    /// Closes what was not needed for long, where too much is open.
    fn make_room(&mut self) {
        if self.cached < self.cached_max {
            return;
        }
        let mut used: Vec<u64> = self
            .nodes
            .values()
            .filter(|known| known.place.is_some() || known.reader.is_some())
            .map(|known| known.used)
            .collect();
        let middle = used.len() / 2;
        let (_, limit, _) = used.select_nth_unstable(middle);
        let limit = *limit;
        self.cached = 0;
        for (node, known) in &mut self.nodes {
            if known.used <= limit && !known.removed && *node != ROOT {
                (known.place, known.reader) = (None, None);
            }
            self.cached += usize::from(known.place.is_some()) + usize::from(known.reader.is_some());
        }
    }

    fn touch(&mut self, node: Node) {
        self.clock += 1;
        if let Some(known) = self.nodes.get_mut(&node) {
            known.used = self.clock;
        }
    }

    /// A node as an open place.
    fn place(&mut self, node: Node) -> Result<Arc<OwnedFd>, Errno> {
        // From here up to what is open.
        let (mut chain, mut at) = (Vec::new(), node);
        let mut place = loop {
            let known = self.known(at)?;
            if let Some(place) = &known.place {
                break Arc::clone(place);
            }
            if known.removed || chain.len() > 4096 {
                return Err(Errno::STALE);
            }
            chain.push(at);
            at = known.at.0;
        };
        for node in chain.into_iter().rev() {
            let known = self.known(node)?;
            let opened = open_beneath(&place, &known.at.1, OFlags::PATH, Mode::empty())?;
            if identity(&look(&opened, b"")?) != known.identity {
                return Err(Errno::STALE);
            }
            place = Arc::new(opened);
            self.make_room();
            self.cached += 1;
            if let Some(known) = self.nodes.get_mut(&node) {
                known.place = Some(Arc::clone(&place));
            }
            self.touch(node);
        }
        self.touch(node);
        Ok(place)
    }

    /// A node as an open folder to look names up in.
    fn folder(&mut self, node: Node) -> Result<Arc<OwnedFd>, Errno> {
        if self.known(node)?.kind != kind::FOLDER {
            return Err(Errno::NOT_A_FOLDER);
        }
        let place = self.place(node)?;
        match self.is_kernels(node, &place) {
            true => Err(Errno::NO_ENTRY),
            false => Ok(place),
        }
    }

    fn is_kernels(&mut self, node: Node, place: &OwnedFd) -> bool {
        match self.nodes.get_mut(&node) {
            // Where the device is the root's, so is the file system.
            Some(known) if known.identity.0 == self.device && node != ROOT => false,
            Some(known) => *known.is_kernels.get_or_insert_with(|| is_kernels(place)),
            None => false,
        }
    }

    /// What a node is now, by its name or by what is open of it.
    fn found(&mut self, node: Node) -> Result<Statx, Errno> {
        let known = self.known(node)?;
        let found = match &known.place {
            Some(place) => look(place, b"")?,
            None => {
                let (parent, name) = (known.at.0, known.at.1.clone());
                if known.removed {
                    return Err(Errno::STALE);
                }
                let parent = self.place(parent)?;
                look(&parent, &name)?
            }
        };
        match identity(&found) == self.known(node)?.identity {
            true => Ok(found),
            false => Err(Errno::STALE),
        }
    }

    /// Opens a regular file.
    fn file(&mut self, node: Node, flags: OFlags) -> Result<File, Errno> {
        let known = self.known(node)?;
        match known.kind {
            kind::FILE => {}
            kind::FOLDER => return Err(Errno::IS_A_FOLDER),
            _ => return Err(Errno::INVALID),
        }
        let (removed, at) = (known.removed, known.at.clone());
        let opened = match removed {
            true => {
                let place = self.place(node)?;
                let path = format!("/proc/self/fd/{}", place.as_raw_fd());
                rustix::fs::openat(
                    rustix::fs::CWD,
                    path,
                    flags | OFlags::CLOEXEC | OFlags::NONBLOCK,
                    Mode::empty(),
                )
                .map_err(errno)?
            }
            false => {
                let parent = self.place(at.0)?;
                // The time at which a file was read is not to change by a look at it, which only its owner can see to.
                let quiet = open_beneath(&parent, &at.1, flags | OFlags::NOATIME, Mode::empty());
                match quiet {
                    Err(Errno::NOT_PERMITTED) => open_beneath(&parent, &at.1, flags, Mode::empty())?,
                    result => result?,
                }
            }
        };
        let found = look(&opened, b"")?;
        if identity(&found) != self.known(node)?.identity {
            return Err(Errno::STALE);
        }
        match FileType::from_raw_mode(found.stx_mode.into()) {
            FileType::RegularFile => Ok(opened.into()),
            _ => Err(Errno::ACCESS),
        }
    }

    /// A file for reading: what the guest has open, or what is kept open here.
    fn reader(&mut self, node: Node, handle: Handle) -> Result<Arc<File>, Errno> {
        match self.open.get(&handle) {
            Some(Open::File(file)) => return Ok(Arc::clone(file)),
            Some(Open::Folder(_)) => return Err(Errno::IS_A_FOLDER),
            None if self.writes => return Err(Errno::BAD_HANDLE),
            None => {}
        }
        if let Some(reader) = &self.known(node)?.reader {
            let reader = Arc::clone(reader);
            self.touch(node);
            return Ok(reader);
        }
        let reader = Arc::new(self.file(node, OFlags::RDONLY)?);
        self.make_room();
        self.cached += 1;
        if let Some(known) = self.nodes.get_mut(&node) {
            known.reader = Some(Arc::clone(&reader));
        }
        self.touch(node);
        Ok(reader)
    }

    fn writer(&self, handle: Handle) -> Result<Arc<File>, Errno> {
        match self.open.get(&handle) {
            Some(Open::File(file)) => Ok(Arc::clone(file)),
            _ => Err(Errno::BAD_HANDLE),
        }
    }

    fn opened(&mut self, file: File) -> Result<Opened, Errno> {
        let handle = self.opens(Open::File(Arc::new(file)))?;
        Ok(Opened { handle, stream: false })
    }

    fn opens(&mut self, open: Open) -> Result<Handle, Errno> {
        if self.open.len() >= 4 * self.cached_max {
            return Err(Errno::TOO_MANY_OPEN);
        }
        let handle = self.next_handle;
        self.next_handle += 1;
        self.open.insert(handle, open);
        Ok(handle)
    }

    /// Tells the guest of what a name leads to.
    fn tell(&mut self, folder: Node, name: &[u8], found: &Statx) -> Result<Found, Errno> {
        let mode = u32::from(found.stx_mode);
        if !is_shown(mode) {
            return Err(Errno::NO_ENTRY);
        }
        let attributes = attributes(found, self.device);
        let identity = identity(found);
        let known = self.known.get(&identity).copied();
        if let Some(node) = known
            && let Some(known) = self.nodes.get_mut(&node)
            && known.kind == mode & kind::MASK
        {
            known.lookups += 1;
            if node != ROOT && !known.removed {
                known.at = (folder, name.into());
            }
            return Ok(Found { node, attributes });
        }
        let node = self.next;
        self.next += 1;
        self.known.insert(identity, node);
        self.nodes.insert(
            node,
            Known {
                at: (folder, name.into()),
                identity,
                kind: mode & kind::MASK,
                lookups: 1,
                removed: false,
                is_kernels: None,
                place: None,
                reader: None,
                used: self.clock,
            },
        );
        Ok(Found { node, attributes })
    }

    /// Keeps what a name leads to open, if the guest knows it and the name is about to go.
    fn keep(&mut self, folder: Node, name: &[u8]) -> Option<Node> {
        let place = self.folder(folder).ok()?;
        let found = look(&place, name).ok()?;
        let node = *self.known.get(&identity(&found))?;
        // It may have another name, by which it is known from now on; then nothing is lost if this fails.
        let _ = self.place(node);
        Some(node)
    }

    /// A name is gone by which a node may have been known.
    fn lost(&mut self, node: Option<Node>, folder: Node, name: &[u8]) {
        if let Some(node) = node
            && let Some(known) = self.nodes.get_mut(&node)
            && known.at.0 == folder
            && *known.at.1 == *name
        {
            known.removed = true;
        }
    }

    /// Has something that was made just now have the mode that it was to have, whatever this process's umask is.
    fn complete_mode(&mut self, folder: &OwnedFd, name: &[u8], mode: u32) -> Result<(), Errno> {
        if mode & self.umask == 0 {
            return Ok(());
        }
        let opened = open_beneath(folder, name, OFlags::PATH, Mode::empty())?;
        chmod(&opened, mode)
    }

    fn apply(&mut self, node: Node, handle: Option<Handle>, changes: &Changes) -> Result<(), Errno> {
        let open = match handle.and_then(|handle| self.open.get(&handle)) {
            Some(Open::File(file)) => Some(Arc::clone(file)),
            _ => None,
        };
        if let Some(size) = changes.size {
            let file = match &open {
                Some(file) => Arc::clone(file),
                None => Arc::new(self.file(node, OFlags::WRONLY)?),
            };
            file.set_len(size).map_err(|e| io_errno(&e))?;
        }
        if changes.uid.is_some() || changes.gid.is_some() {
            let found = self.found(node)?;
            let same = |wanted: Option<u32>, is| wanted.is_none_or(|wanted| wanted == is);
            // What this process makes is its user's, whoever asks in the guest.
            if !same(changes.uid, found.stx_uid) || !same(changes.gid, found.stx_gid) {
                return Err(Errno::NOT_PERMITTED);
            }
        }
        if let Some(mode) = changes.mode {
            let place = self.place(node)?;
            match self.known(node)?.kind {
                kind::LINK => return Err(Errno::NOT_SUPPORTED),
                _ => chmod(&place, mode)?,
            }
        }
        if changes.accessed.is_some() || changes.modified.is_some() {
            let time = |set: Option<SetTime>| match set {
                None => Timespec {
                    tv_sec: 0,
                    tv_nsec: rustix::fs::UTIME_OMIT,
                },
                Some(SetTime::Now) => Timespec {
                    tv_sec: 0,
                    tv_nsec: rustix::fs::UTIME_NOW,
                },
                Some(SetTime::At(time)) => Timespec {
                    tv_sec: time.seconds,
                    tv_nsec: time.nanoseconds.into(),
                },
            };
            let times = Timestamps {
                last_access: time(changes.accessed),
                last_modification: time(changes.modified),
            };
            match &open {
                Some(file) => rustix::fs::futimens(file, &times).map_err(errno)?,
                None => {
                    let at = self.known(node)?.at.clone();
                    if node == ROOT || self.known(node)?.removed {
                        let path = format!("/proc/self/fd/{}", self.place(node)?.as_raw_fd());
                        rustix::fs::utimensat(rustix::fs::CWD, path, &times, AtFlags::empty()).map_err(errno)?;
                    } else {
                        let parent = self.place(at.0)?;
                        rustix::fs::utimensat(&parent, &*at.1, &times, AtFlags::SYMLINK_NOFOLLOW).map_err(errno)?;
                    }
                }
            }
        }
        Ok(())
    }
}

/// Sets a mode by a place, which fchmod(2) does not take.
fn chmod(place: &OwnedFd, mode: u32) -> Result<(), Errno> {
    let path = format!("/proc/self/fd/{}", place.as_raw_fd());
    rustix::fs::chmod(path, Mode::from_raw_mode(mode & MODE)).map_err(errno)
}

impl FileSystem for Host {
    fn valid(&self) -> u64 {
        VALID
    }

    fn write_back(&self) -> bool {
        self.write_back
    }

    fn reset(&mut self) {
        self.nodes.clear();
        self.known.clear();
        self.open.clear();
        self.cached = 0;
        let identity = look(&self.root, b"").map_or((self.device, 0), |found| identity(&found));
        self.known.insert(identity, ROOT);
        self.nodes.insert(
            ROOT,
            Known {
                at: (ROOT, Box::default()),
                identity,
                kind: kind::FOLDER,
                lookups: 1,
                removed: false,
                is_kernels: None,
                place: Some(Arc::clone(&self.root)),
                reader: None,
                used: 0,
            },
        );
    }

    fn lookup(&mut self, folder: Node, name: &[u8]) -> Result<Found, Errno> {
        let place = self.folder(folder)?;
        let found = look(&place, name)?;
        self.tell(folder, name, &found)
    }

    fn forget(&mut self, node: Node, times: u64) {
        if node == ROOT {
            return;
        }
        let Some(known) = self.nodes.get_mut(&node) else {
            return;
        };
        known.lookups = known.lookups.saturating_sub(times);
        if known.lookups > 0 {
            return;
        }
        self.cached = self
            .cached
            .saturating_sub(usize::from(known.place.is_some()) + usize::from(known.reader.is_some()));
        if self.known.get(&known.identity) == Some(&node) {
            self.known.remove(&known.identity);
        }
        self.nodes.remove(&node);
    }

    fn attributes(&mut self, node: Node, handle: Option<Handle>) -> Result<Attributes, Errno> {
        let found = match handle.and_then(|handle| self.open.get(&handle)) {
            Some(Open::File(file)) => {
                let flags = AtFlags::EMPTY_PATH;
                rustix::fs::statx(&**file, c"", flags, rustix::fs::StatxFlags::BASIC_STATS).map_err(errno)?
            }
            _ => self.found(node)?,
        };
        Ok(attributes(&found, self.device))
    }

    fn change(
        &mut self,
        _: &Caller,
        node: Node,
        handle: Option<Handle>,
        changes: &Changes,
    ) -> Result<Attributes, Errno> {
        self.writes()?;
        self.apply(node, handle, changes)?;
        self.attributes(node, handle)
    }

    fn target(&mut self, node: Node) -> Result<Vec<u8>, Errno> {
        let place = self.place(node)?;
        // An empty name is the link itself (readlink(2)).
        let target = rustix::fs::readlinkat(&place, c"", Vec::new()).map_err(errno)?;
        Ok(target.into_bytes())
    }

    fn make(&mut self, _: &Caller, folder: Node, name: &[u8], new: New<'_>) -> Result<Found, Errno> {
        self.writes()?;
        let place = self.folder(folder)?;
        let bits = |mode: u32| Mode::from_raw_mode(mode & MODE);
        match new {
            New::File(mode) if mode & kind::MASK == kind::FILE || mode & kind::MASK == 0 => {
                let flags = OFlags::CREATE | OFlags::EXCL | OFlags::WRONLY;
                let file = open_beneath(&place, name, flags, bits(mode))?;
                if mode & self.umask != 0 {
                    rustix::fs::fchmod(&file, bits(mode)).map_err(errno)?;
                }
            }
            New::File(mode) => {
                let kind = match mode & kind::MASK {
                    kind::FIFO => FileType::Fifo,
                    kind::SOCKET => FileType::Socket,
                    _ => return Err(Errno::NOT_PERMITTED),
                };
                rustix::fs::mknodat(&place, name, kind, bits(mode), 0).map_err(errno)?;
                self.complete_mode(&place, name, mode)?;
            }
            New::Folder(mode) => {
                rustix::fs::mkdirat(&place, name, bits(mode)).map_err(errno)?;
                self.complete_mode(&place, name, mode)?;
            }
            New::Link(target) => rustix::fs::symlinkat(OsStr::from_bytes(target), &place, name).map_err(errno)?,
        }
        let found = look(&place, name)?;
        self.tell(folder, name, &found)
    }

    fn create(&mut self, _: &Caller, folder: Node, name: &[u8], mode: u32) -> Result<(Found, Opened), Errno> {
        self.writes()?;
        let place = self.folder(folder)?;
        let flags = OFlags::CREATE | OFlags::EXCL | OFlags::RDWR;
        let file = open_beneath(&place, name, flags, Mode::from_raw_mode(mode & MODE))?;
        if mode & self.umask != 0 {
            rustix::fs::fchmod(&file, Mode::from_raw_mode(mode & MODE)).map_err(errno)?;
        }
        let found = look(&file, b"")?;
        let handle = self.opens(Open::File(Arc::new(file.into())))?;
        let found = self.tell(folder, name, &found)?;
        Ok((found, Opened { handle, stream: false }))
    }

    fn remove(&mut self, _: &Caller, folder: Node, name: &[u8], is_folder: bool) -> Result<(), Errno> {
        self.writes()?;
        let place = self.folder(folder)?;
        let node = self.keep(folder, name);
        let flags = match is_folder {
            true => AtFlags::REMOVEDIR,
            false => AtFlags::empty(),
        };
        rustix::fs::unlinkat(&place, name, flags).map_err(errno)?;
        self.lost(node, folder, name);
        Ok(())
    }

    fn rename(&mut self, _: &Caller, from: (Node, &[u8]), to: (Node, &[u8]), flags: u32) -> Result<(), Errno> {
        self.writes()?;
        let flags = RenameFlags::from_bits(flags)
            .filter(|flags| !flags.contains(RenameFlags::WHITEOUT))
            .ok_or(Errno::INVALID)?;
        let (old, new) = (self.folder(from.0)?, self.folder(to.0)?);
        let moved = self.keep(from.0, from.1);
        let replaced = self.keep(to.0, to.1);
        rustix::fs::renameat_with(&old, from.1, &new, to.1, flags).map_err(errno)?;
        // Two names of one file: nothing happens (rename(2)).
        if moved.is_some() && moved == replaced {
            return Ok(());
        }
        let mut put = |node: Option<Node>, at: (Node, &[u8])| {
            if let Some(known) = node.and_then(|node| self.nodes.get_mut(&node)) {
                (known.at, known.removed) = ((at.0, at.1.into()), false);
            }
        };
        match flags.contains(RenameFlags::EXCHANGE) {
            true => {
                put(replaced, from);
                put(moved, to);
            }
            false => {
                self.lost(replaced, to.0, to.1);
                if let Some(known) = moved.and_then(|node| self.nodes.get_mut(&node)) {
                    (known.at, known.removed) = ((to.0, to.1.into()), false);
                }
            }
        }
        Ok(())
    }

    fn link(&mut self, _: &Caller, node: Node, folder: Node, name: &[u8]) -> Result<Found, Errno> {
        self.writes()?;
        self.found(node)?;
        if self.known(node)?.removed || node == ROOT {
            return Err(Errno::NO_ENTRY);
        }
        let (parent, old) = self.known(node)?.at.clone();
        let (parent, place) = (self.place(parent)?, self.folder(folder)?);
        rustix::fs::linkat(&parent, &*old, &place, name, AtFlags::empty()).map_err(errno)?;
        let found = look(&place, name)?;
        self.tell(folder, name, &found)
    }

    fn open(&mut self, node: Node, flags: u32) -> Result<Opened, Errno> {
        if !self.writes {
            // Reading needs no opening: the guest's kernel has looked at the mode, and what cannot be read fails as it is read.
            return Err(Errno::NOT_IMPLEMENTED);
        }
        let access = match flags & 3 {
            0 => OFlags::RDONLY,
            // The guest's kernel reads what is around that which it writes.
            1 if self.write_back => match self.file(node, OFlags::RDWR) {
                Err(Errno::ACCESS) => OFlags::WRONLY,
                result => return self.opened(result?),
            },
            1 => OFlags::WRONLY,
            _ => OFlags::RDWR,
        };
        let file = self.file(node, access)?;
        self.opened(file)
    }

    fn read(&mut self, node: Node, handle: Handle, offset: u64, bytes: &mut [u8]) -> Result<usize, Errno> {
        let file = self.reader(node, handle)?;
        let mut done = 0;
        while done < bytes.len() {
            match file.read_at(&mut bytes[done..], offset.saturating_add(done as u64)) {
                Ok(0) => break,
                Ok(count) => done += count,
                Err(e) if e.kind() == std::io::ErrorKind::Interrupted => {}
                Err(_) if done > 0 => break,
                Err(e) => return Err(io_errno(&e)),
            }
        }
        Ok(done)
    }

    fn write(&mut self, _: &Caller, _: Node, handle: Handle, offset: u64, bytes: &[u8]) -> Result<(), Errno> {
        self.writes()?;
        self.writer(handle)?
            .write_all_at(bytes, offset)
            .map_err(|e| io_errno(&e))
    }

    fn allocate(
        &mut self,
        _: &Caller,
        _: Node,
        handle: Handle,
        mode: u32,
        (offset, len): (u64, u64),
    ) -> Result<(), Errno> {
        self.writes()?;
        let mode = FallocateFlags::from_bits(mode).ok_or(Errno::NOT_SUPPORTED)?;
        rustix::fs::fallocate(&*self.writer(handle)?, mode, offset, len).map_err(errno)
    }

    fn sync(&mut self, _: Node, handle: Handle) -> Result<(), Errno> {
        match self.open.get(&handle) {
            Some(Open::File(file)) => file.sync_all().map_err(|e| io_errno(&e)),
            _ => Ok(()),
        }
    }

    fn close(&mut self, handle: Handle) {
        self.open.remove(&handle);
    }

    fn open_folder(&mut self, node: Node) -> Result<Handle, Errno> {
        let place = match self.folder(node) {
            // One of the kernel's.
            Err(Errno::NO_ENTRY) => return self.opens(Open::Folder(Arc::default())),
            result => result?,
        };
        let readable = open_beneath(&place, b".", OFlags::RDONLY | OFlags::DIRECTORY, Mode::empty())?;
        let names = super::read_names(readable)?;
        self.opens(Open::Folder(Arc::new(names)))
    }

    fn list(
        &mut self,
        node: Node,
        handle: Handle,
        offset: u64,
        take: &mut dyn FnMut(Entry<'_>) -> bool,
    ) -> Result<(), Errno> {
        let Some(Open::Folder(names)) = self.open.get(&handle) else {
            return Err(Errno::BAD_HANDLE);
        };
        let names = Arc::clone(names);
        let own = self
            .found(node)
            .map_or(node, |found| attributes(&found, self.device).ino);
        let dots = [b".".as_slice(), b"..".as_slice()].map(|name| (name, own, kind::FOLDER));
        let all = dots
            .into_iter()
            .chain(names.iter().map(|listed| (&*listed.name, listed.ino, listed.kind)));
        let skip = usize::try_from(offset).map_err(|_| Errno::INVALID)?;
        for (next, (name, ino, kind)) in (1..).zip(all).skip(skip) {
            if !take(Entry { name, ino, kind, next }) {
                break;
            }
        }
        Ok(())
    }

    fn close_folder(&mut self, handle: Handle) {
        self.open.remove(&handle);
    }

    fn space(&mut self) -> Result<Space, Errno> {
        if !self.writes {
            // Nothing can be written, and what others write to that file system is no reason for another run.
            return Ok(Space {
                block: 4096,
                ..Space::default()
            });
        }
        let found = rustix::fs::fstatvfs(&self.root).map_err(errno)?;
        Ok(Space {
            block: u32::try_from(found.f_frsize).unwrap_or(4096),
            blocks: found.f_blocks,
            free: found.f_bfree,
            available: found.f_bavail,
            files: found.f_files,
            files_free: found.f_ffree,
        })
    }

    fn fingerprint(&self) -> u64 {
        0
    }
}

#[cfg(test)]
#[path = "host_test.rs"]
mod tests;
