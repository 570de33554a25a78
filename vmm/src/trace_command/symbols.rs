//! `minivmm trace symbols`.

use std::io::Write;

use trace::{export::OutFile, linux::NotFound, symbols::write_elf};

use super::{
    arguments::Symbols,
    names,
    output::{count, say},
};
use crate::error::Error;

pub fn run(options: &Symbols) -> Result<(), Error> {
    let (_, names) = names::open(&options.trace, options.symbols.as_deref(), &[])?;
    let symbols = names.symbols();
    if symbols.is_empty() {
        let why = match &names.linux().unknown {
            Some(banner) => NotFound::UnknownTable { banner: banner.clone() }.to_string(),
            None => "the trace has no symbols (no Linux was found in the guest): give some with --symbols".into(),
        };
        return Err(Error::Usage(format!("{}: {why}", options.trace.display())));
    }
    let failed = |source| Error::Export {
        option: "--elf",
        source,
    };
    let mut file = OutFile::create(&options.elf, options.force).map_err(failed)?;
    let elf = write_elf(symbols, names.linux().build_id.as_deref())
        .map_err(|error| Error::Usage(format!("--elf {}: {error}", options.elf.display())))?;
    file.write_all(&elf).map_err(|source| failed(file.error(source)))?;
    file.finish().map_err(failed)?;
    say(&format!(
        "{}: {}",
        options.elf.display(),
        count(symbols.len() as u64, "symbol")
    ));
    Ok(())
}
