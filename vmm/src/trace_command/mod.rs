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

use trace::Trace;

use crate::{
    error::{Error, Status},
    jail, signals,
};

/// What a command reads and where it writes.
fn files(command: &TraceCommand) -> jail::Files {
    let (trace, part, outputs) = match command {
        TraceCommand::Info(options) => (&options.trace, None, Vec::new()),
        TraceCommand::Decode(options) => (&options.trace, Some(&options.part), Vec::new()),
        TraceCommand::Symbols(options) => (&options.trace, None, vec![&options.elf]),
        TraceCommand::Export(options) => {
            let Export {
                perf,
                perfetto,
                trace_events,
                folded,
                flamegraph,
                html,
                callgrind,
                raw,
                ..
            } = options;
            let outputs = [perf, perfetto, trace_events, folded, flamegraph, html, callgrind, raw];
            (
                &options.trace,
                Some(&options.part),
                outputs.into_iter().flatten().collect(),
            )
        }
    };
    let symbols = match command {
        TraceCommand::Info(options) => options.symbols.as_ref(),
        TraceCommand::Symbols(options) => options.symbols.as_ref(),
        _ => part.and_then(|part| part.symbols.as_ref()),
    };
    let programs = part.into_iter().flat_map(|part| &part.programs);
    let programs = programs.filter_map(|program| names::path_of(program));
    // Where the guest's files are is in the trace's header alone, which the recorder wrote; what is wrong with it is told later.
    let header = part.and_then(|part| Some((part, Trace::header_of(trace).ok()?)));
    let places = header.map_or(Vec::new(), |(part, header)| names::places(&header.files, part));
    // A file gets its name beside where it is written; a terminal or a pipe is written to itself.
    let write = outputs
        .iter()
        .flat_map(|path| [jail::folder_of(path), path.to_path_buf()]);
    jail::Files {
        share: Vec::new(),
        read: [trace.clone(), "/proc/self".into()]
            .into_iter()
            .chain(symbols.cloned())
            .chain(part.and_then(|part| part.symbols_guest.clone()))
            .chain(programs)
            .chain(places)
            .collect(),
        write: write.collect(),
        remove: Vec::new(),
    }
}

/// Does it, jailed if `sandbox` says so: the trace may come from somebody else.
///
/// # Errors
/// The trace, the symbols or the output cannot be used.
pub fn run(command: &TraceCommand, sandbox: bool) -> Result<Status, Error> {
    // First, so that the thread that waits for signals is jailed, too.
    if sandbox {
        jail::enter(jail::calls::threads::MACHINE, &files(command))?;
    }
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
