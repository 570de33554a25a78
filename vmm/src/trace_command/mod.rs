//! `minivmm trace`: what a recorded trace shows, on standard output or in files for other programs.

mod arguments;
mod bound;
mod calls;
mod decode;
mod disasm;
mod export;
mod info;
mod json;
mod lines;
mod names;
mod output;
mod symbols;

pub use arguments::{Decode, Export, Info, Part, Symbols, TraceCommand};

use std::process::exit;

use crate::{
    error::{Error, Status},
    signals,
};

/// Does it.
///
/// # Errors
/// The trace, the symbols or the output cannot be used.
pub fn run(command: &TraceCommand) -> Result<Status, Error> {
    if matches!(command, TraceCommand::Export(_) | TraceCommand::Symbols(_)) {
        let end = |signal| {
            trace::export::abandon();
            output::say(&format!("{}: nothing is written", signals::name(signal)));
            exit(Status::Usage.code());
        };
        signals::at_first(end).map_err(|source| Error::System {
            what: "taking over signals",
            source,
        })?;
    }
    match command {
        TraceCommand::Info(options) => return info::run(options),
        TraceCommand::Decode(options) => decode::run(options),
        TraceCommand::Export(options) => export::run(options),
        TraceCommand::Symbols(options) => symbols::run(options),
    }?;
    Ok(Status::Done)
}
