//! Where the files of a guest's programs are on the host.

use std::{
    fs, io,
    path::{Component, Path, PathBuf},
};

use super::{archive::Archive, elf::ProgramFile};
use crate::{format::GuestSources, reader::MappedFile, regular};

/// The longest program that is read.
const LONGEST: u64 = 1 << 30;
/// The longest list of functions that a just-in-time compiler leaves.
const LONGEST_MAP: u64 = 256 << 20;

/// Where files are looked for, in this order.
#[derive(Debug, Default)]
pub struct GuestFiles {
    /// Copies of the guest's root directory.
    roots: Vec<PathBuf>,
    /// Initial RAM disks, which are read when they are asked for first.
    archives: Vec<(PathBuf, Option<Archive>)>,
    /// What is below `/inject` in the guest.
    inject: Option<PathBuf>,
    /// Directories that are shared with the guest, mounted anywhere.
    shares: Vec<PathBuf>,
    /// Directories of files by their build ID, in the forms of debuggers and of perf's cache.
    by_build_id: Vec<PathBuf>,
    /// What was found and is of no use, a line each.
    pub complaints: Vec<String>,
}

impl GuestFiles {
    /// Where a trace says that its guest's files are.
    pub fn of(sources: &GuestSources) -> GuestFiles {
        GuestFiles {
            archives: sources.initrd.iter().map(|path| (path.into(), None)).collect(),
            inject: sources.inject.as_ref().map(PathBuf::from),
            shares: sources.shares.iter().map(PathBuf::from).collect(),
            ..GuestFiles::default()
        }
    }

    /// Looks in a copy of the guest's root directory first.
    #[must_use]
    pub fn with_root(mut self, root: &Path) -> GuestFiles {
        self.roots.push(root.into());
        self
    }

    /// Looks in an initial RAM disk, too, before those that the trace names.
    #[must_use]
    pub fn with_initrd(mut self, path: &Path) -> GuestFiles {
        self.archives.insert(0, (path.into(), None));
        self
    }

    /// Looks for build IDs in a directory: `/usr/lib/debug`, `~/.debug`.
    #[must_use]
    pub fn with_build_ids(mut self, dir: &Path) -> GuestFiles {
        self.by_build_id.push(dir.into());
        self
    }

    /// The functions of a file that a process has mapped, which the first mapping begins in at `offset`; `None`: it is nowhere.
    pub fn program(&mut self, file: &MappedFile, offset: u64) -> Option<ProgramFile> {
        let name = short(&file.path).to_string();
        let id = Some(file.build_id.as_str()).filter(|id| !id.is_empty());
        let mut found = self.by_path(file, &name);
        let wants = found.as_ref().is_none_or(|program| !program.is_whole);
        let id = id.map(String::from).or_else(|| found.as_ref()?.build_id.clone());
        if wants && let Some(id) = id {
            match (self.by_id(&id, &name), found.take()) {
                (Some((_, other)), Some(program)) if other.is_whole => found = Some(program.with_symbols_of(&other)),
                (Some((true, other)), None) => found = Some(other),
                (Some((false, other)), None) => found = Some(other.with_code_at(offset)),
                (_, before) => found = before,
            }
        }
        found
    }

    /// A list of functions that a just-in-time compiler has written for perf: `/tmp/perf-PID.map`.
    pub fn jit_map(&mut self, pid: u32) -> Option<String> {
        let path = format!("/tmp/perf-{pid}.map");
        let file = self.places(&path).into_iter().find(|(path, _)| path.is_file())?.0;
        let text = regular::open(&file).and_then(|file| regular::read(file, LONGEST_MAP));
        match text {
            Ok(bytes) => Some(String::from_utf8_lossy(&bytes).into_owned()),
            Err(error) => {
                self.complain(&file, &error.to_string());
                None
            }
        }
    }

    fn complain(&mut self, path: &Path, why: &str) {
        const MOST: usize = 16;
        if self.complaints.len() < MOST {
            self.complaints.push(format!("{}: {why}", path.display()));
        }
    }

    /// The files that may be it, and whether they are it only if their build ID says so.
    fn places(&self, path: &str) -> Vec<(PathBuf, bool)> {
        let Some(below) = below_root(path) else {
            return Vec::new();
        };
        let mut places: Vec<(PathBuf, bool)> = self.roots.iter().map(|root| (root.join(&below), false)).collect();
        if let Some(inject) = &self.inject
            && let Ok(rest) = below.strip_prefix("inject")
        {
            places.push((inject.join(rest), false));
        }
        for share in &self.shares {
            // The root of the guest; a directory that has the same name in it; mounted somewhere.
            places.push((share.join(&below), false));
            if Path::new(path).starts_with(share) {
                places.push((path.into(), false));
            }
            let parts: Vec<_> = below.components().collect();
            let inner = (1..parts.len()).map(|n| (share.join(parts[n..].iter().collect::<PathBuf>()), true));
            places.extend(inner);
        }
        places
    }

    fn by_path(&mut self, file: &MappedFile, name: &str) -> Option<ProgramFile> {
        for (path, surely) in self.places(&file.path) {
            let bytes = match regular::open(&path).and_then(|file| regular::read(file, LONGEST)) {
                Ok(bytes) => bytes,
                Err(error) => {
                    // A link of the guest's leads nowhere here, and most places are not there.
                    let absent = matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory);
                    if !absent && !surely {
                        self.complain(&path, &crate::error::plain(&error));
                    }
                    continue;
                }
            };
            if let Some(program) = self.checked(&path, &bytes, file, name, surely) {
                return Some(program);
            }
        }
        for n in 0..self.archives.len() {
            let (path, archive) = &mut self.archives[n];
            let path = path.clone();
            if archive.is_none() {
                let read = Archive::read(&path);
                let failed = read.as_ref().err().map(crate::error::plain);
                *archive = Some(read.unwrap_or_default());
                if let Some(why) = failed {
                    self.complain(&path, &why);
                }
            }
            let bytes = self.archives[n].1.as_ref().and_then(|archive| archive.get(&file.path));
            if let Some(bytes) = bytes.map(<[u8]>::to_vec)
                && let Some(program) = self.checked(&path.join(below_root(&file.path)?), &bytes, file, name, false)
            {
                return Some(program);
            }
        }
        None
    }

    /// The program, if the file is the one that the guest had.
    fn checked(
        &mut self,
        path: &Path,
        bytes: &[u8],
        file: &MappedFile,
        name: &str,
        surely: bool,
    ) -> Option<ProgramFile> {
        let program = match ProgramFile::parse(bytes, name) {
            Ok(program) => program,
            Err(error) => {
                self.complain(path, &error.to_string());
                return None;
            }
        };
        let same = program
            .build_id
            .as_ref()
            .filter(|_| !file.build_id.is_empty())
            .map(|id| *id == file.build_id);
        match same {
            Some(true) => Some(program),
            None if !surely => Some(program),
            Some(false) if !surely => {
                self.complain(
                    path,
                    &format!("another {name}: the guest's has the build ID {}", file.build_id),
                );
                None
            }
            _ => None,
        }
    }

    /// A file by its build ID, and whether it has the code, too.
    fn by_id(&mut self, id: &str, name: &str) -> Option<(bool, ProgramFile)> {
        // It is part of a path.
        if id.len() < 4 || !id.bytes().all(|byte| byte.is_ascii_hexdigit()) {
            return None;
        }
        let (first, rest) = id.split_at(2);
        for dir in &self.by_build_id {
            let dir = dir.join(".build-id").join(first);
            let places = [
                (dir.join(format!("{rest}.debug")), false),
                (dir.join(rest).join("debug"), false),
                (dir.join(rest).join("elf"), true),
                (dir.join(rest), true),
            ];
            for (path, code) in places {
                if !fs::metadata(&path).is_ok_and(|found| found.is_file()) {
                    continue;
                }
                let Ok(bytes) = regular::open(&path).and_then(|file| regular::read(file, LONGEST)) else {
                    continue;
                };
                let parsed = ProgramFile::parse(&bytes, name).ok();
                if let Some(program) = parsed.filter(|program| program.build_id.as_deref() == Some(id)) {
                    return Some((code, program));
                }
            }
        }
        None
    }
}

/// A path of the guest's below its root, if it leads nowhere else.
fn below_root(path: &str) -> Option<PathBuf> {
    let mut below = PathBuf::new();
    for part in Path::new(path.strip_prefix('/')?).components() {
        match part {
            Component::Normal(part) => below.push(part),
            Component::CurDir => {}
            _ => return None,
        }
    }
    (!below.as_os_str().is_empty()).then_some(below)
}

/// The name of a file without its folders.
pub fn short(path: &str) -> &str {
    path.rsplit('/').next().unwrap_or(path)
}

#[cfg(test)]
#[path = "guest_files_test.rs"]
mod tests;
