//! Files that are whole or not there.

use std::{
    collections::BTreeSet,
    fs::{self, File, OpenOptions},
    io::{self, BufWriter, Write},
    path::{Path, PathBuf},
    sync::{Mutex, MutexGuard, PoisonError},
};

use super::error::ExportError;

/// What is being written and has not got its name.
static UNFINISHED: Mutex<BTreeSet<PathBuf>> = Mutex::new(BTreeSet::new());

fn unfinished() -> MutexGuard<'static, BTreeSet<PathBuf>> {
    UNFINISHED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Removes what has not got its name, for a process that a signal ends: nothing is begun or finished any more by any thread.
pub fn abandon() {
    let parts = unfinished();
    for part in parts.iter() {
        // Another thread may be making files in a folder.
        for _ in 0..100 {
            let removed = if part.is_dir() {
                fs::remove_dir_all(part)
            } else {
                fs::remove_file(part)
            };
            match removed {
                Err(error) if error.kind() != io::ErrorKind::NotFound => {}
                _ => break,
            }
        }
    }
    std::mem::forget(parts);
}

/// A file that gets its name when it is finished. Until then, and if it never is, what was there stays.
#[derive(Debug)]
pub struct OutFile {
    path: PathBuf,
    /// Its name until then.
    part: Option<PathBuf>,
    writer: Option<BufWriter<File>>,
}

fn exists(path: &Path, replace: bool) -> Result<(), ExportError> {
    if !replace && path.symlink_metadata().is_ok() {
        return Err(ExportError::Exists(path.into()));
    }
    Ok(())
}

/// A name beside `path`, of this process alone.
fn beside(path: &Path) -> PathBuf {
    let mut name = path.file_name().unwrap_or_default().to_os_string();
    name.push(format!(".part-{}", std::process::id()));
    path.with_file_name(name)
}

impl OutFile {
    /// Begins a file.
    ///
    /// # Errors
    /// There is one already and it is not to be replaced, or none can be made.
    pub fn create(path: &Path, replace: bool) -> Result<OutFile, ExportError> {
        let fail = |source| ExportError::Write {
            path: path.into(),
            source,
        };
        // Pipes, terminals and the like are written to; there is nothing in them to be lost.
        let special = path.metadata().is_ok_and(|there| !there.is_file() && !there.is_dir());
        if special {
            let file = OpenOptions::new().write(true).open(path).map_err(fail)?;
            return Ok(OutFile {
                path: path.into(),
                part: None,
                writer: Some(BufWriter::with_capacity(1 << 16, file)),
            });
        }
        exists(path, replace)?;
        if path.is_dir() {
            return Err(fail(io::ErrorKind::IsADirectory.into()));
        }
        let part = beside(path);
        let mut parts = unfinished();
        let file = OpenOptions::new()
            .write(true)
            .create_new(true)
            .open(&part)
            .map_err(fail)?;
        parts.insert(part.clone());
        Ok(OutFile {
            path: path.into(),
            part: Some(part),
            writer: Some(BufWriter::with_capacity(1 << 16, file)),
        })
    }

    /// The name that it will have.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// What went wrong with the file.
    pub fn error(&self, source: io::Error) -> ExportError {
        ExportError::Write {
            path: self.path.clone(),
            source,
        }
    }

    /// Gives it its name.
    ///
    /// # Errors
    /// What was written last cannot be.
    pub fn finish(mut self) -> Result<(), ExportError> {
        let result = match self.writer.take() {
            Some(mut writer) => writer.flush().and_then(|()| match self.part.take() {
                Some(part) => {
                    let mut parts = unfinished();
                    match fs::rename(&part, &self.path) {
                        Ok(()) => drop(parts.remove(&part)),
                        Err(error) => {
                            self.part = Some(part);
                            return Err(error);
                        }
                    }
                    Ok(())
                }
                None => Ok(()),
            }),
            None => Ok(()),
        };
        result.map_err(|source| self.error(source))
    }
}

impl Write for OutFile {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.writer
            .as_mut()
            .map_or(Ok(bytes.len()), |writer| writer.write(bytes))
    }

    fn flush(&mut self) -> io::Result<()> {
        self.writer.as_mut().map_or(Ok(()), BufWriter::flush)
    }
}

impl Drop for OutFile {
    fn drop(&mut self) {
        // Nothing is left of a file that was not finished.
        drop(self.writer.take().map(BufWriter::into_parts));
        if let Some(part) = self.part.take() {
            let mut parts = unfinished();
            let _ = fs::remove_file(&part);
            parts.remove(&part);
        }
    }
}

/// A directory that gets its name when it is finished.
#[derive(Debug)]
pub struct Folder {
    path: PathBuf,
    part: PathBuf,
    marker: &'static str,
    finished: bool,
}

impl Folder {
    /// Begins a directory. With `replace` one that is there is replaced, if it is one of these: it has `marker` in it, or nothing.
    ///
    /// # Errors
    /// There is one already, or none can be made.
    pub fn create(path: &Path, replace: bool, marker: &'static str) -> Result<Folder, ExportError> {
        exists(path, replace)?;
        let fail = |source| ExportError::Write {
            path: path.into(),
            source,
        };
        if path.symlink_metadata().is_ok() {
            let ours =
                path.is_dir() && (path.join(marker).is_file() || fs::read_dir(path).map_err(fail)?.next().is_none());
            if !ours {
                return Err(ExportError::NotOurs(path.into()));
            }
        }
        let part = beside(path);
        let mut parts = unfinished();
        fs::create_dir(&part).map_err(fail)?;
        parts.insert(part.clone());
        drop(parts);
        Ok(Folder {
            path: path.into(),
            part,
            marker,
            finished: false,
        })
    }

    /// Where its files go until it is finished.
    pub fn work(&self) -> &Path {
        &self.part
    }

    /// What went wrong with it.
    pub fn error(&self, source: io::Error) -> ExportError {
        ExportError::Write {
            path: self.path.clone(),
            source,
        }
    }

    /// Gives it its name.
    ///
    /// # Errors
    /// The system refuses.
    pub fn finish(mut self) -> Result<(), ExportError> {
        let replace = || {
            if self.path.join(self.marker).is_file() {
                fs::remove_dir_all(&self.path)?;
            } else if self.path.is_dir() {
                fs::remove_dir(&self.path)?;
            }
            let mut parts = unfinished();
            fs::rename(&self.part, &self.path)?;
            parts.remove(&self.part);
            Ok(())
        };
        replace().map_err(|source| self.error(source))?;
        self.finished = true;
        Ok(())
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        if !self.finished {
            let mut parts = unfinished();
            let _ = fs::remove_dir_all(&self.part);
            parts.remove(&self.part);
        }
    }
}

#[cfg(test)]
#[path = "file_test.rs"]
mod tests;
