//! `minivmm trace symbols`.

use std::io::Write;

use crate::{error::Error, symbols::write_elf, trace::export::OutFile};

use super::{
    Symbols, names,
    output::{count, say},
};

pub fn run(options: &Symbols) -> Result<(), Error> {
    let (_, names) = names::open(&options.trace, options.symbols.as_deref(), &[])?;
    let symbols = names.symbols();
    if symbols.is_empty() {
        return Err(Error::Usage(format!(
            "{}: the trace has no symbols (no Linux was found in the guest): give some with --symbols",
            options.trace.display()
        )));
    }
    let mut file = OutFile::create("--elf", &options.elf, options.force)?;
    let elf = write_elf(symbols, names.linux().build_id.as_deref())
        .map_err(|error| Error::Usage(format!("--elf {}: {error}", options.elf.display())))?;
    file.write_all(&elf).map_err(|source| file.error(source))?;
    file.finish()?;
    say(&format!(
        "{}: {}",
        options.elf.display(),
        count(symbols.len() as u64, "symbol")
    ));
    Ok(())
}
