//! The kernel's modules that a guest needs before it has its root file system.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    io::{self, Read},
    path::{Path, PathBuf},
};

/// The largest module that is read, compressed or not: the largest of Debian's has 10 MiB.
const LARGEST: u64 = 64 << 20;
/// What follows a module that is signed: Linux include/linux/module_signature.h.
const SIGNED: &[u8] = b"~Module signature appended~\n";

/// Why a module cannot be had.
#[derive(Debug, thiserror::Error)]
pub enum ModuleError {
    /// Its file cannot be read.
    #[error("{}: {}", path.display(), machine::plain(source))]
    File {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The kernel has it neither built in nor as a module.
    #[error("{folder}: there is no module {name}, and none is built in: it takes a kernel with {config}", folder = folder.display())]
    Missing {
        /// Where modules were looked for.
        folder: PathBuf,
        /// Its name.
        name: &'static str,
        /// The option of the kernel's configuration.
        config: &'static str,
    },
    /// One that another one needs is not there.
    #[error("{}: needs the module {name}, which is not there", path.display())]
    Depends {
        /// The one that needs it.
        path: PathBuf,
        /// The one that is not there.
        name: String,
    },
}

/// A module to be loaded.
#[derive(Debug)]
pub struct Module {
    /// Its name.
    pub name: String,
    /// The ELF file, without its signature.
    pub bytes: Vec<u8>,
}

/// The modules of a kernel.
#[derive(Debug)]
pub struct Modules {
    folder: PathBuf,
    files: BTreeMap<String, PathBuf>,
    /// `None`: nobody says, as in a package of modules alone. Then what is no file may be built in.
    built_in: Option<BTreeSet<String>>,
}

/// A module's name by the name of its file: `virtio-rng.ko.xz` is `virtio_rng`.
fn name_of(file: &str) -> Option<String> {
    let (name, rest) = file.split_once(".ko")?;
    matches!(rest, "" | ".xz" | ".zst" | ".gz").then(|| name.replace('-', "_"))
}

impl Modules {
    /// Looks at a folder, `lib/modules/RELEASE`.
    ///
    /// # Errors
    /// It cannot be read.
    pub fn of(folder: &Path) -> io::Result<Self> {
        let mut files = BTreeMap::new();
        let mut folders = vec![(folder.join("kernel"), 0)];
        while let Some((at, depth)) = folders.pop() {
            for entry in fs::read_dir(&at)?.flatten() {
                let kind = entry.file_type()?;
                if kind.is_dir() && depth < 16 {
                    folders.push((entry.path(), depth + 1));
                } else if let Some(name) = entry.file_name().to_str().and_then(name_of) {
                    files.insert(name, entry.path());
                }
            }
        }
        let list = fs::read_to_string(folder.join("modules.builtin")).ok();
        let name = |line: &str| name_of(line.rsplit('/').next()?);
        let built_in = list.map(|list| list.lines().filter_map(name).collect());
        Ok(Modules {
            folder: folder.into(),
            files,
            built_in,
        })
    }

    /// The kernel has it, as a module or built in, as far as is known.
    pub fn has(&self, name: &str) -> bool {
        self.is_built_in(name) || self.files.contains_key(name)
    }

    fn is_built_in(&self, name: &str) -> bool {
        self.built_in.as_ref().is_some_and(|names| names.contains(name))
    }

    /// These modules and what they need, in the order in which they can be loaded. Each comes with the option that a kernel has it by.
    ///
    /// # Errors
    /// One is missing, or cannot be read.
    pub fn load(&self, names: &[(&'static str, &'static str)]) -> Result<Vec<Module>, ModuleError> {
        let (mut loaded, mut seen) = (Vec::new(), BTreeSet::new());
        for (name, config) in names {
            if self.is_built_in(name) {
                continue;
            }
            if !self.files.contains_key(*name) {
                if self.built_in.is_none() {
                    continue;
                }
                return Err(ModuleError::Missing {
                    folder: self.folder.clone(),
                    name,
                    config,
                });
            }
            self.add(name, &mut loaded, &mut seen)?;
        }
        Ok(loaded)
    }

    fn add(&self, name: &str, loaded: &mut Vec<Module>, seen: &mut BTreeSet<String>) -> Result<(), ModuleError> {
        if self.is_built_in(name) || !seen.insert(name.into()) {
            return Ok(());
        }
        let Some(path) = self.files.get(name) else {
            if self.built_in.is_none() {
                return Ok(());
            }
            return Err(ModuleError::Depends {
                path: self.folder.clone(),
                name: name.into(),
            });
        };
        let bytes = read(path).map_err(|source| ModuleError::File {
            path: path.clone(),
            source,
        })?;
        for needed in depends(&bytes) {
            self.add(&needed, loaded, seen).map_err(|error| match error {
                ModuleError::Depends { path: _, name } => ModuleError::Depends {
                    path: path.clone(),
                    name,
                },
                other => other,
            })?;
        }
        loaded.push(Module {
            name: name.into(),
            bytes,
        });
        Ok(())
    }
}

/// The modules that a module names in its section `.modinfo`, which consists of lines that end with a NUL.
fn depends(module: &[u8]) -> Vec<String> {
    const KEY: &[u8] = b"\0depends=";
    let Some(at) = module.windows(KEY.len()).position(|window| window == KEY) else {
        return Vec::new();
    };
    let value = &module[at + KEY.len()..];
    let end = value.iter().position(|byte| *byte == 0).unwrap_or(0);
    let text = String::from_utf8_lossy(&value[..end]);
    let names = text.split(',').filter(|name| !name.is_empty());
    names.map(|name| name.replace('-', "_")).collect()
}

/// Reads a module, decompressed, and without its signature: to check that takes the guest longer than everything else together, and
/// whoever runs the guest can change its memory anyway.
fn read(path: &Path) -> io::Result<Vec<u8>> {
    let mut packed = Vec::new();
    fs::File::open(path)?.take(LARGEST).read_to_end(&mut packed)?;
    let mut bytes = Vec::new();
    match path.extension().and_then(|extension| extension.to_str()) {
        Some("xz") => {
            let reader = lzma_rust2::XzReader::new(packed.as_slice(), true);
            reader.take(LARGEST).read_to_end(&mut bytes)?;
        }
        Some("zst") => {
            let reader = ruzstd::decoding::StreamingDecoder::new(packed.as_slice()).map_err(io::Error::other)?;
            reader.take(LARGEST).read_to_end(&mut bytes)?;
        }
        Some("gz") => bytes = gunzip(&packed).ok_or_else(|| io::Error::other("damaged"))?,
        _ => bytes = packed,
    }
    if let Some(rest) = bytes.strip_suffix(SIGNED)
        && let Some(length) = rest.last_chunk::<4>()
    {
        // struct module_signature: 12 bytes, of which the last four are the signature's length, big-endian.
        let signature = 12 + u32::from_be_bytes(*length) as usize;
        let keep = rest.len().checked_sub(signature);
        bytes.truncate(keep.ok_or_else(|| io::Error::other("damaged"))?);
    }
    Ok(bytes)
}

/// RFC 1952 with the one header that gzip(1) writes for a module: no extra field, perhaps a name.
fn gunzip(packed: &[u8]) -> Option<Vec<u8>> {
    let (header, mut rest) = packed.split_at_checked(10)?;
    if header[..3] != [0x1f, 0x8b, 8] || header[3] & !8 != 0 {
        return None;
    }
    if header[3] & 8 != 0 {
        let end = rest.iter().position(|byte| *byte == 0)?;
        rest = &rest[end + 1..];
    }
    miniz_oxide::inflate::decompress_to_vec_with_limit(rest, LARGEST as usize).ok()
}

#[cfg(test)]
#[path = "modules_test.rs"]
mod tests;
