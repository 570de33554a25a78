//! The files that a qcow2 image is made of: the one that is given, and those that it names.

use std::{
    fs, io,
    os::unix::fs::{FileTypeExt, MetadataExt},
    path::Path,
    sync::{Arc, Mutex, PoisonError},
};

use imago::{
    FormatAccess, FormatDriverBuilder, Storage, StorageOpenOptions, file::File as ImageFile,
    format::gate::ImplicitOpenGate,
};

use crate::error::plain;

/// So many files an image may be made of: nobody stacks more snapshots by hand.
const FILES: usize = 32;

/// Opens an image's files, each once. Clones are of the same one.
#[derive(Clone, Debug, Default)]
pub struct Images(Arc<Mutex<Vec<(u64, u64)>>>);

impl Images {
    /// Notes a file, unless it is part of the image already.
    fn add(&self, path: &Path) -> io::Result<()> {
        let named = |why: &str| io::Error::other(format!("{} {why}", path.display()));
        let metadata = fs::metadata(path).map_err(|e| named(&format!("cannot be opened: {}", plain(&e))))?;
        if !metadata.is_file() && !metadata.file_type().is_block_device() {
            return Err(named("is neither a regular file nor a block device"));
        }
        let mut files = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let file = (metadata.dev(), metadata.ino());
        if files.contains(&file) {
            return Err(named(
                "is part of it already: its files are based on each other in a circle",
            ));
        }
        if files.len() == FILES {
            return Err(named("is one file too many that it is based on"));
        }
        files.push(file);
        Ok(())
    }
}

impl ImplicitOpenGate<ImageFile> for Images {
    fn open_format<F: FormatDriverBuilder<ImageFile>>(&mut self, builder: F) -> io::Result<FormatAccess<ImageFile>> {
        Ok(FormatAccess::new(builder.open(self.clone())?))
    }

    fn open_storage(&mut self, options: StorageOpenOptions) -> io::Result<ImageFile> {
        if let Some(path) = options.get_filename() {
            self.add(path)?;
        }
        ImageFile::open(options)
    }
}
