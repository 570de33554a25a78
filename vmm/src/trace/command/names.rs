//! The names that go with a trace: of its own, or of a file.

use std::path::Path;

use crate::{
    error::Error,
    linux::Recorded,
    symbols::{Origin, SymbolFile},
    trace::{Trace, view::Names},
};

/// The folder in the trace's directory.
pub const LINUX: &str = "linux";

/// Opens a trace with its names.
///
/// # Errors
/// The trace or the symbols cannot be used.
pub fn open(dir: &Path, symbols: Option<&Path>) -> Result<(Trace, Names), Error> {
    let trace = Trace::open(dir)?;
    let recorded = Recorded::read(&dir.join(LINUX)).map_err(|source| Error::File {
        option: "trace",
        path: dir.join(LINUX),
        source,
    })?;
    let mut recorded = recorded.unwrap_or_default();
    let own = std::mem::take(&mut recorded.symbols);
    let Some(path) = symbols else {
        return Ok((trace, Names::new(own, recorded)));
    };
    let linux = !recorded.banner.is_empty();
    let origin = Origin {
        build_id: recorded.build_id.as_deref(),
        slide: linux.then_some(recorded.slide),
        symbols: linux.then_some(&own),
    };
    let symbols = SymbolFile::read(path)
        .and_then(|file| file.resolve(origin))
        .map_err(|source| Error::Symbols {
            path: path.into(),
            source,
        })?;
    Ok((trace, Names::new(symbols, recorded)))
}
