//! What a guest makes of a shared folder whose files stay as they are: kept in memory, in a form that can be put back.
//!
//! A node is a file, folder or link. Those of the host become nodes as the guest comes upon them, by names that are listed when a folder
//! is used first. Nothing here depends on the host but by [`Lower`]'s answers, and times are the guest's own.

use std::{
    collections::BTreeMap,
    hash::{DefaultHasher, Hash, Hasher},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use devices::virtio::fs::file_system::{
    Attributes, Caller, Changes, Entry, Errno, FileSystem, Found, Handle, New, Node, Opened, ROOT, SetTime, Space,
    Time, kind,
};

use super::lower::{Answers, Lower, PIECE};
use crate::sparse::Sparse;

/// Bytes of a block of what is written.
const BLOCK: u64 = 4096;
/// What the guest may write in all: memory of this process.
const BYTES_MAX: u64 = 2 << 30;
/// The longest file.
const FILE_MAX: u64 = 1 << 46;
/// Nodes are so much memory, about.
const NODES_MAX: u64 = 4 << 20;
/// Inode numbers of what the guest makes begin here.
const MADE: u64 = 1 << 60;

/// A path of the host below the share.
type Path = Arc<[u8]>;

#[derive(Clone, Debug)]
struct Thing {
    attributes: Attributes,
    /// How often the guest has been told of it.
    lookups: u64,
    what: What,
}

#[derive(Clone, Debug)]
enum What {
    File {
        /// The host's file, and so many of its bytes.
        origin: Option<(Path, u64)>,
        blocks: Blocks,
    },
    Folder {
        origin: Option<Path>,
        /// Once they are needed.
        names: Option<Arc<Names>>,
    },
    Link {
        origin: Option<Path>,
        target: Arc<[u8]>,
    },
    /// FIFO or socket, which are the guest's own.
    Other,
}

#[derive(Clone, Default)]
struct Blocks(Sparse<[u8; BLOCK as usize]>);

impl std::fmt::Debug for Blocks {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} blocks", self.0.iter().count())
    }
}

/// The names of a folder, each with a number by which a listing goes on, whatever comes and goes meanwhile.
#[derive(Clone, Debug, Default)]
struct Names {
    by_name: BTreeMap<Box<[u8]>, u64>,
    by_number: BTreeMap<u64, (Box<[u8]>, Leads)>,
    next: u64,
}

#[derive(Clone, Copy, Debug)]
enum Leads {
    /// To a node.
    Node(Node),
    /// To what the host has there, with its inode number and type.
    Host(u64, u32),
}

impl Names {
    fn get(&self, name: &[u8]) -> Option<Leads> {
        Some(self.by_number.get(self.by_name.get(name)?)?.1)
    }

    fn put(&mut self, name: &[u8], leads: Leads) {
        if let Some(number) = self.by_name.get(name) {
            self.by_number.insert(*number, (name.into(), leads));
            return;
        }
        self.by_name.insert(name.into(), self.next);
        self.by_number.insert(self.next, (name.into(), leads));
        self.next += 1;
    }

    fn remove(&mut self, name: &[u8]) {
        if let Some(number) = self.by_name.remove(name) {
            self.by_number.remove(&number);
        }
    }
}

/// What a guest had made of a share at some time.
#[derive(Clone)]
pub struct Contents {
    things: Sparse<Thing>,
    next: Node,
    bytes: u64,
    /// A hash over all that was changed.
    changes: u64,
}

impl std::fmt::Debug for Contents {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} nodes, {} bytes written", self.next, self.bytes)
    }
}

/// What a guest makes of a share. Clones are of the same.
#[derive(Clone, Debug)]
pub struct Upper(Arc<Mutex<Contents>>, Answers);

impl Upper {
    fn lock(&self) -> MutexGuard<'_, Contents> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What it is now.
    pub fn save(&self) -> Contents {
        self.lock().clone()
    }

    /// Bytes that the answers take which the host has given about all shares.
    pub fn kept(&self) -> u64 {
        self.1.size()
    }

    /// It is again what it was then.
    pub fn restore(&self, contents: &Contents) {
        *self.lock() = contents.clone();
    }
}

/// A share with what the guest writes above it.
#[derive(Debug)]
pub struct Overlay {
    lower: Lower,
    upper: Upper,
    /// The date at the beginning of the run, in seconds since 1970.
    base: i64,
    readonly: bool,
}

impl Overlay {
    /// Above the host's files; the guest's real-time clock begins at `base`, in seconds since 1970. `readonly`: nothing can be
    /// written.
    pub fn new(lower: Lower, base: i64, readonly: bool) -> Self {
        let root = Thing {
            attributes: Attributes {
                ino: ROOT,
                mode: kind::FOLDER | 0o755,
                links: 2,
                ..Attributes::default()
            },
            lookups: 1,
            what: What::Folder {
                origin: Some(Path::default()),
                names: None,
            },
        };
        let mut things = Sparse::default();
        things.set(ROOT, Some(Arc::new(root)));
        let contents = Contents {
            things,
            next: ROOT + 1,
            bytes: 0,
            changes: 0,
        };
        Overlay {
            upper: Upper(Arc::new(Mutex::new(contents)), lower.answers()),
            lower,
            base,
            readonly,
        }
    }

    /// What the guest makes of it.
    pub fn upper(&self) -> Upper {
        self.upper.clone()
    }

    fn writes(&self) -> Result<(), Errno> {
        match self.readonly {
            true => Err(Errno::READ_ONLY),
            false => Ok(()),
        }
    }

    fn time(&self, caller: &Caller) -> Time {
        const SECOND: u64 = 1_000_000_000;
        Time {
            seconds: self.base.saturating_add((caller.now / SECOND) as i64),
            nanoseconds: (caller.now % SECOND) as u32,
        }
    }

    /// With the state, and the files below it.
    fn with<T>(&mut self, act: impl FnOnce(&mut Contents, &mut Lower) -> Result<T, Errno>) -> Result<T, Errno> {
        let mut contents = self.upper.lock();
        act(&mut contents, &mut self.lower)
    }
}

impl Contents {
    fn thing(&self, node: Node) -> Result<&Arc<Thing>, Errno> {
        self.things.get(node).ok_or(Errno::STALE)
    }

    /// A node to be changed.
    fn own(&mut self, node: Node) -> Result<&mut Thing, Errno> {
        if self.things.own(node).is_none() {
            let copy = Thing::clone(self.thing(node)?);
            self.things.set(node, Some(Arc::new(copy)));
        }
        self.things.own(node).ok_or(Errno::STALE)
    }

    fn note(&mut self, what: impl Hash) {
        let mut hasher = DefaultHasher::new();
        (self.changes, what).hash(&mut hasher);
        self.changes = hasher.finish();
    }

    fn add(&mut self, thing: Thing) -> Result<Node, Errno> {
        if self.next > NODES_MAX {
            return Err(Errno::NO_SPACE);
        }
        let node = self.next;
        self.next += 1;
        self.things.set(node, Some(Arc::new(thing)));
        Ok(node)
    }

    /// The names of a folder, from the host where they have not been used before.
    fn names(&mut self, lower: &mut Lower, folder: Node) -> Result<Arc<Names>, Errno> {
        let origin = match &self.thing(folder)?.what {
            What::Folder { names: Some(names), .. } => return Ok(Arc::clone(names)),
            What::Folder { origin, .. } => origin.clone(),
            _ => return Err(Errno::NOT_A_FOLDER),
        };
        let mut names = Names::default();
        if let Some(origin) = origin {
            for listed in lower.names(&origin)? {
                names.put(&listed.name, Leads::Host(listed.ino, listed.kind));
            }
        }
        let names = Arc::new(names);
        if let What::Folder { names: place, .. } = &mut self.own(folder)?.what {
            *place = Some(Arc::clone(&names));
        }
        Ok(names)
    }

    fn change_names(
        &mut self,
        lower: &mut Lower,
        folder: Node,
        now: Time,
        change: impl FnOnce(&mut Names),
    ) -> Result<(), Errno> {
        self.names(lower, folder)?;
        let thing = self.own(folder)?;
        (thing.attributes.modified, thing.attributes.changed) = (now, now);
        if let What::Folder { names: Some(names), .. } = &mut thing.what {
            change(Arc::make_mut(names));
        }
        Ok(())
    }

    /// What a name leads to, as a node.
    fn find(&mut self, lower: &mut Lower, folder: Node, name: &[u8]) -> Result<Node, Errno> {
        let names = self.names(lower, folder)?;
        match names.get(name).ok_or(Errno::NO_ENTRY)? {
            Leads::Node(node) => Ok(node),
            Leads::Host(..) => {
                let What::Folder {
                    origin: Some(origin), ..
                } = &self.thing(folder)?.what
                else {
                    return Err(Errno::NO_ENTRY);
                };
                let path: Path = match origin.is_empty() {
                    true => name.into(),
                    false => [origin, &b"/"[..], name].concat().into(),
                };
                let attributes = lower.attributes(&path)?;
                let what = match attributes.mode & kind::MASK {
                    kind::FILE => What::File {
                        origin: Some((path, attributes.size)),
                        blocks: Blocks::default(),
                    },
                    kind::FOLDER => What::Folder {
                        origin: Some(path),
                        names: None,
                    },
                    kind::LINK => What::Link {
                        target: Arc::default(),
                        origin: Some(path),
                    },
                    _ => What::Other,
                };
                let node = self.add(Thing {
                    attributes,
                    lookups: 0,
                    what,
                })?;
                // The folder is as it was, but that a name leads to a node.
                if let What::Folder { names: Some(names), .. } = &mut self.own(folder)?.what {
                    Arc::make_mut(names).put(name, Leads::Node(node));
                }
                Ok(node)
            }
        }
    }

    fn tell(&mut self, node: Node) -> Result<Found, Errno> {
        let thing = self.own(node)?;
        thing.lookups += 1;
        Ok(Found {
            node,
            attributes: thing.attributes,
        })
    }

    /// A node that has lost a name.
    fn unlink(&mut self, node: Node, now: Time) -> Result<(), Errno> {
        let thing = self.own(node)?;
        thing.attributes.changed = now;
        thing.attributes.links = match thing.what {
            What::Folder { .. } => 0,
            _ => thing.attributes.links.saturating_sub(1),
        };
        self.drop_unused(node);
        Ok(())
    }

    fn drop_unused(&mut self, node: Node) {
        let Ok(thing) = self.thing(node) else { return };
        if thing.lookups > 0 || thing.attributes.links > 0 || node == ROOT {
            return;
        }
        if let What::File { blocks, .. } = &thing.what {
            self.bytes = self.bytes.saturating_sub(blocks.0.iter().count() as u64 * BLOCK);
        }
        self.things.set(node, None);
    }

    fn is_empty(&mut self, lower: &mut Lower, folder: Node) -> Result<bool, Errno> {
        Ok(self.names(lower, folder)?.by_name.is_empty())
    }

    fn is_folder(&self, node: Node) -> Result<bool, Errno> {
        Ok(matches!(self.thing(node)?.what, What::Folder { .. }))
    }

    /// The folder's count of folders in it changes by one.
    fn count_folder(&mut self, folder: Node, more: bool) -> Result<(), Errno> {
        let links = &mut self.own(folder)?.attributes.links;
        *links = match more {
            true => links.saturating_add(1),
            false => links.saturating_sub(1),
        };
        Ok(())
    }

    fn read(&self, lower: &mut Lower, node: Node, offset: u64, bytes: &mut [u8]) -> Result<usize, Errno> {
        let thing = Arc::clone(self.thing(node)?);
        let What::File { origin, blocks } = &thing.what else {
            return Err(Errno::INVALID);
        };
        let size = thing.attributes.size;
        let len = size.saturating_sub(offset).min(bytes.len() as u64) as usize;
        let mut done = 0;
        while done < len {
            let at = offset + done as u64;
            let (number, within) = (at / BLOCK, (at % BLOCK) as usize);
            let part = (len - done).min(BLOCK as usize - within);
            let to = &mut bytes[done..done + part];
            to.fill(0);
            if let Some(block) = blocks.0.get(number) {
                to.copy_from_slice(&block[within..within + part]);
            } else if let Some((path, visible)) = origin
                && at < *visible
            {
                let piece = lower.piece(path, at / PIECE)?;
                let from = (at % PIECE) as usize;
                let there = piece.len().saturating_sub(from).min(part).min((*visible - at) as usize);
                // The host may have cut the file short since the guest was told of its length: there is nothing there then.
                if let Some(bytes) = piece.get(from..from + there) {
                    to[..there].copy_from_slice(bytes);
                }
            }
            done += part;
        }
        Ok(len)
    }

    fn write(&mut self, lower: &mut Lower, node: Node, offset: u64, bytes: &[u8], now: Time) -> Result<(), Errno> {
        let end = offset.checked_add(bytes.len() as u64).filter(|end| *end <= FILE_MAX);
        let end = end.ok_or(Errno::TOO_BIG)?;
        let mut done = 0;
        while done < bytes.len() {
            let at = offset + done as u64;
            let (number, within) = (at / BLOCK, (at % BLOCK) as usize);
            let part = (bytes.len() - done).min(BLOCK as usize - within);
            let mut block = [0; BLOCK as usize];
            if part < BLOCK as usize {
                self.read(lower, node, number * BLOCK, &mut block)?;
            }
            block[within..within + part].copy_from_slice(&bytes[done..done + part]);
            self.put_block(node, number, block)?;
            done += part;
        }
        let attributes = &mut self.own(node)?.attributes;
        attributes.size = attributes.size.max(end);
        (attributes.modified, attributes.changed) = (now, now);
        self.note((node, offset, bytes));
        Ok(())
    }

    fn put_block(&mut self, node: Node, number: u64, block: [u8; BLOCK as usize]) -> Result<(), Errno> {
        let full = self.bytes + BLOCK > BYTES_MAX;
        let thing = self.own(node)?;
        let What::File { blocks, .. } = &mut thing.what else {
            return Err(Errno::INVALID);
        };
        if let Some(there) = blocks.0.own(number) {
            *there = block;
            return Ok(());
        }
        let new = blocks.0.get(number).is_none();
        if new && full {
            return Err(Errno::NO_SPACE);
        }
        blocks.0.set(number, Some(Arc::new(block)));
        if new {
            thing.attributes.blocks += BLOCK / 512;
            self.bytes += BLOCK;
        }
        Ok(())
    }

    fn truncate(&mut self, lower: &mut Lower, node: Node, size: u64, now: Time) -> Result<(), Errno> {
        if size > FILE_MAX {
            return Err(Errno::TOO_BIG);
        }
        // Of the block in which the end comes to lie, the rest reads zeros if the file grows again.
        let within = (size % BLOCK) as usize;
        if within > 0 && size < self.thing(node)?.attributes.size {
            let mut block = [0; BLOCK as usize];
            self.read(lower, node, size - within as u64, &mut block[..within])?;
            self.put_block(node, size / BLOCK, block)?;
        }
        let thing = self.own(node)?;
        let What::File { origin, blocks } = &mut thing.what else {
            return Err(match thing.what {
                What::Folder { .. } => Errno::IS_A_FOLDER,
                _ => Errno::INVALID,
            });
        };
        if let Some((_, visible)) = origin {
            *visible = (*visible).min(size);
        }
        let gone: Vec<u64> = blocks.0.iter().map(|(number, _)| number).collect();
        let gone = gone.into_iter().filter(|number| number * BLOCK >= size);
        let mut freed = 0;
        for number in gone {
            blocks.0.set(number, None);
            freed += BLOCK;
        }
        thing.attributes.size = size;
        (thing.attributes.modified, thing.attributes.changed) = (now, now);
        self.bytes = self.bytes.saturating_sub(freed);
        self.note((node, size));
        Ok(())
    }
}

impl FileSystem for Overlay {
    /// Nobody but the guest changes anything.
    fn valid(&self) -> u64 {
        1 << 30
    }

    /// Nobody else sees it.
    fn write_back(&self) -> bool {
        !self.readonly
    }

    fn reset(&mut self) {
        // What the guest knew is not in use any more. What has no name goes with it.
        let mut contents = self.upper.lock();
        let known: Vec<Node> = contents
            .things
            .iter()
            .filter(|(_, thing)| thing.lookups > 0)
            .map(|(node, _)| node)
            .collect();
        for node in known {
            if let Ok(thing) = contents.own(node) {
                thing.lookups = 0;
            }
            contents.drop_unused(node);
        }
    }

    fn lookup(&mut self, folder: Node, name: &[u8]) -> Result<Found, Errno> {
        self.with(|contents, lower| {
            let node = contents.find(lower, folder, name)?;
            contents.tell(node)
        })
    }

    fn forget(&mut self, node: Node, times: u64) {
        let mut contents = self.upper.lock();
        if let Ok(thing) = contents.own(node) {
            thing.lookups = thing.lookups.saturating_sub(times);
        }
        contents.drop_unused(node);
    }

    fn attributes(&mut self, node: Node, _: Option<Handle>) -> Result<Attributes, Errno> {
        self.with(|contents, lower| {
            // The root is looked at when it is used first.
            if node == ROOT && contents.thing(ROOT)?.attributes.ino == ROOT {
                let found = lower.attributes(b"")?;
                contents.own(ROOT)?.attributes = found;
            }
            Ok(contents.thing(node)?.attributes)
        })
    }

    fn change(
        &mut self,
        caller: &Caller,
        node: Node,
        _: Option<Handle>,
        changes: &Changes,
    ) -> Result<Attributes, Errno> {
        self.writes()?;
        let now = self.time(caller);
        self.with(|contents, lower| {
            if let Some(size) = changes.size {
                contents.truncate(lower, node, size, now)?;
            }
            let attributes = &mut contents.own(node)?.attributes;
            if let Some(mode) = changes.mode {
                attributes.mode = attributes.mode & kind::MASK | mode;
            }
            attributes.uid = changes.uid.unwrap_or(attributes.uid);
            attributes.gid = changes.gid.unwrap_or(attributes.gid);
            match changes.modified {
                Some(SetTime::At(time)) => attributes.modified = time,
                Some(SetTime::Now) => attributes.modified = now,
                None => {}
            }
            attributes.changed = now;
            let found = *attributes;
            contents.note((node, found.mode, found.uid, found.gid, found.modified.seconds));
            Ok(found)
        })
    }

    fn target(&mut self, node: Node) -> Result<Vec<u8>, Errno> {
        self.with(|contents, lower| match &contents.thing(node)?.what {
            What::Link {
                origin: Some(origin), ..
            } => lower.target(origin),
            What::Link { target, .. } => Ok(target.to_vec()),
            _ => Err(Errno::INVALID),
        })
    }

    fn make(&mut self, caller: &Caller, folder: Node, name: &[u8], new: New<'_>) -> Result<Found, Errno> {
        self.writes()?;
        let now = self.time(caller);
        let caller = *caller;
        self.with(|contents, lower| {
            if contents.names(lower, folder)?.get(name).is_some() {
                return Err(Errno::EXISTS);
            }
            let (mode, size, what) = match new {
                New::File(mode) if mode & kind::MASK == kind::FILE || mode & kind::MASK == 0 => {
                    let what = What::File {
                        origin: None,
                        blocks: Blocks::default(),
                    };
                    (kind::FILE | mode & 0o7777, 0, what)
                }
                New::File(mode) => match mode & kind::MASK {
                    kind::FIFO | kind::SOCKET => (mode, 0, What::Other),
                    _ => return Err(Errno::NOT_PERMITTED),
                },
                New::Folder(mode) => {
                    let what = What::Folder {
                        origin: None,
                        names: None,
                    };
                    (kind::FOLDER | mode & 0o7777, 4096, what)
                }
                New::Link(target) => {
                    let what = What::Link {
                        origin: None,
                        target: target.into(),
                    };
                    (kind::LINK | 0o777, target.len() as u64, what)
                }
            };
            let is_folder = matches!(what, What::Folder { .. });
            let attributes = Attributes {
                ino: MADE + contents.next,
                size,
                blocks: 0,
                modified: now,
                changed: now,
                mode,
                links: if is_folder { 2 } else { 1 },
                uid: caller.uid,
                gid: caller.gid,
            };
            let node = contents.add(Thing {
                attributes,
                lookups: 0,
                what,
            })?;
            contents.change_names(lower, folder, now, |names| names.put(name, Leads::Node(node)))?;
            if is_folder {
                contents.count_folder(folder, true)?;
            }
            contents.note((folder, name, mode));
            contents.tell(node)
        })
    }

    fn create(&mut self, _: &Caller, _: Node, _: &[u8], _: u32) -> Result<(Found, Opened), Errno> {
        Err(Errno::NOT_IMPLEMENTED)
    }

    fn remove(&mut self, caller: &Caller, folder: Node, name: &[u8], is_folder: bool) -> Result<(), Errno> {
        self.writes()?;
        let now = self.time(caller);
        self.with(|contents, lower| {
            let node = contents.find(lower, folder, name)?;
            match (contents.is_folder(node)?, is_folder) {
                (true, false) => return Err(Errno::IS_A_FOLDER),
                (false, true) => return Err(Errno::NOT_A_FOLDER),
                (true, true) if !contents.is_empty(lower, node)? => return Err(Errno::NOT_EMPTY),
                _ => {}
            }
            contents.change_names(lower, folder, now, |names| names.remove(name))?;
            if is_folder {
                contents.count_folder(folder, false)?;
            }
            contents.note((folder, name));
            contents.unlink(node, now)
        })
    }

    fn rename(&mut self, caller: &Caller, from: (Node, &[u8]), to: (Node, &[u8]), flags: u32) -> Result<(), Errno> {
        const NO_REPLACE: u32 = 1;
        const EXCHANGE: u32 = 2;
        self.writes()?;
        let now = self.time(caller);
        self.with(|contents, lower| {
            if flags & !(NO_REPLACE | EXCHANGE) != 0 {
                return Err(Errno::INVALID);
            }
            let moved = contents.find(lower, from.0, from.1)?;
            let replaced = match contents.find(lower, to.0, to.1) {
                Ok(_) if flags & NO_REPLACE != 0 => return Err(Errno::EXISTS),
                Ok(node) => Some(node),
                Err(Errno::NO_ENTRY) if flags & EXCHANGE == 0 => None,
                Err(error) => return Err(error),
            };
            if replaced == Some(moved) {
                return Ok(());
            }
            let is_folder = contents.is_folder(moved)?;
            let mut was_folder = false;
            if let Some(replaced) = replaced {
                was_folder = contents.is_folder(replaced)?;
                if flags & EXCHANGE == 0 {
                    match (is_folder, was_folder) {
                        (true, false) => return Err(Errno::NOT_A_FOLDER),
                        (false, true) => return Err(Errno::IS_A_FOLDER),
                        (true, true) if !contents.is_empty(lower, replaced)? => return Err(Errno::NOT_EMPTY),
                        _ => {}
                    }
                }
            }
            let exchanged = replaced.filter(|_| flags & EXCHANGE != 0);
            contents.change_names(lower, from.0, now, |names| match exchanged {
                Some(node) => names.put(from.1, Leads::Node(node)),
                None => names.remove(from.1),
            })?;
            contents.change_names(lower, to.0, now, |names| names.put(to.1, Leads::Node(moved)))?;
            if is_folder {
                contents.count_folder(from.0, false)?;
                contents.count_folder(to.0, true)?;
            }
            if was_folder {
                contents.count_folder(to.0, false)?;
                if exchanged.is_some() {
                    contents.count_folder(from.0, true)?;
                }
            }
            contents.own(moved)?.attributes.changed = now;
            contents.note((from, to, flags));
            match replaced {
                Some(replaced) if exchanged.is_none() => contents.unlink(replaced, now),
                _ => Ok(()),
            }
        })
    }

    fn link(&mut self, caller: &Caller, node: Node, folder: Node, name: &[u8]) -> Result<Found, Errno> {
        self.writes()?;
        let now = self.time(caller);
        self.with(|contents, lower| {
            if contents.is_folder(node)? {
                return Err(Errno::NOT_PERMITTED);
            }
            if contents.names(lower, folder)?.get(name).is_some() {
                return Err(Errno::EXISTS);
            }
            let thing = contents.own(node)?;
            thing.attributes.links = thing.attributes.links.checked_add(1).ok_or(Errno::TOO_MANY_LINKS)?;
            thing.attributes.changed = now;
            contents.change_names(lower, folder, now, |names| names.put(name, Leads::Node(node)))?;
            contents.note((node, folder, name));
            contents.tell(node)
        })
    }

    fn open(&mut self, _: Node, _: u32) -> Result<Opened, Errno> {
        Err(Errno::NOT_IMPLEMENTED)
    }

    fn read(&mut self, node: Node, _: Handle, offset: u64, bytes: &mut [u8]) -> Result<usize, Errno> {
        self.with(|contents, lower| contents.read(lower, node, offset, bytes))
    }

    fn write(&mut self, caller: &Caller, node: Node, _: Handle, offset: u64, bytes: &[u8]) -> Result<(), Errno> {
        self.writes()?;
        let now = self.time(caller);
        self.with(|contents, lower| contents.write(lower, node, offset, bytes, now))
    }

    fn allocate(
        &mut self,
        caller: &Caller,
        node: Node,
        _: Handle,
        mode: u32,
        (offset, len): (u64, u64),
    ) -> Result<(), Errno> {
        self.writes()?;
        let now = self.time(caller);
        // Blocks come as they are written: to reserve them is to make the file as long.
        if mode != 0 {
            return Err(Errno::NOT_SUPPORTED);
        }
        let end = offset.checked_add(len).ok_or(Errno::TOO_BIG)?;
        self.with(|contents, lower| match contents.thing(node)?.attributes.size < end {
            true => contents.truncate(lower, node, end, now),
            false => Ok(()),
        })
    }

    fn sync(&mut self, _: Node, _: Handle) -> Result<(), Errno> {
        Ok(())
    }

    fn close(&mut self, _: Handle) {}

    fn open_folder(&mut self, _: Node) -> Result<Handle, Errno> {
        Err(Errno::NOT_IMPLEMENTED)
    }

    fn list(
        &mut self,
        node: Node,
        _: Handle,
        offset: u64,
        take: &mut dyn FnMut(Entry<'_>) -> bool,
    ) -> Result<(), Errno> {
        let (own, names) = self.with(|contents, lower| {
            let names = contents.names(lower, node)?;
            Ok((contents.thing(node)?.attributes.ino, names))
        })?;
        let dots = [(1, b".".as_slice()), (2, b"..".as_slice())];
        for (next, name) in dots.into_iter().filter(|(next, _)| *next > offset) {
            let entry = Entry {
                name,
                ino: own,
                kind: kind::FOLDER,
                next,
            };
            if !take(entry) {
                return Ok(());
            }
        }
        // Name n stands at place n + 3, so that a listing goes on behind it.
        for (number, (name, leads)) in names.by_number.range(offset.saturating_sub(2)..) {
            let (ino, kind) = match *leads {
                Leads::Host(ino, kind) => (ino, kind),
                Leads::Node(node) => match self.upper.lock().thing(node) {
                    Ok(thing) => (thing.attributes.ino, thing.attributes.mode & kind::MASK),
                    Err(_) => continue,
                },
            };
            let next = number + 3;
            if !take(Entry { name, ino, kind, next }) {
                break;
            }
        }
        Ok(())
    }

    fn close_folder(&mut self, _: Handle) {}

    fn space(&mut self) -> Result<Space, Errno> {
        let contents = self.upper.lock();
        let free = (BYTES_MAX - contents.bytes.min(BYTES_MAX)) / BLOCK;
        Ok(Space {
            block: BLOCK as u32,
            blocks: BYTES_MAX / BLOCK,
            free,
            available: free,
            files: NODES_MAX,
            files_free: NODES_MAX.saturating_sub(contents.next),
        })
    }

    fn fingerprint(&self) -> u64 {
        let contents = self.upper.lock();
        let mut hasher = DefaultHasher::new();
        (contents.next, contents.bytes, contents.changes).hash(&mut hasher);
        hasher.finish()
    }
}

#[cfg(test)]
#[path = "overlay_test.rs"]
mod tests;
