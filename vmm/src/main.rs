//! The command line: `minivmm --kernel FILE ...`.

use std::{
    io::{self, Write},
    process::exit,
};

use minivmm::{
    MachineConfig,
    allocation::OrExit,
    cli::{self, Job},
    error::{Error, Status},
    front::control::client,
    logger, matrix, query_command, replay_command, signals, terminal, trace_command,
};

#[global_allocator]
static MEMORY: OrExit = OrExit;

fn main() {
    let report = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        terminal::restore();
        report(panic);
        exit(Status::Internal.code());
    }));
    let status = match cli::parse(std::env::args_os()) {
        Ok(Job::Print(text)) => print(&text),
        Ok(Job::Control { path, command, file }) => {
            client::send(&path, &command, file.as_deref()).and_then(|line| print(&line))
        }
        Ok(Job::Trace { command, sandbox }) => trace_command::run(&command, sandbox),
        Ok(Job::Query(options)) => query_command::run(&options),
        Ok(Job::Matrix(options)) => matrix::run(&options),
        Ok(Job::Run { config, verbose }) => run(&config, verbose),
        Ok(Job::Replay(options)) => replay_command::prepare(&options).and_then(|config| run(&config, options.verbose)),
        Err(error) => Err(error),
    };
    let status = status.unwrap_or_else(|error| {
        // Whatever a file is called, it is one line.
        say(&error.to_string().replace(char::is_control, "?"));
        error.status()
    });
    exit(status.code());
}

/// Runs a machine to its end.
fn run(config: &MachineConfig, verbose: u8) -> Result<Status, Error> {
    logger::init(verbose);
    signals::install().map_err(|source| Error::System {
        what: "taking over signals",
        source,
    })?;
    let end = minivmm::front::serve::run(config)?;
    if let Some(message) = end.message() {
        say(&message);
    }
    Ok(end.end.status())
}

fn print(text: &str) -> Result<Status, Error> {
    match io::stdout().write_all(text.as_bytes()) {
        Ok(()) => Ok(Status::Done),
        Err(e) if e.kind() == io::ErrorKind::BrokenPipe => Ok(Status::Done),
        Err(source) => Err(Error::File {
            option: "minivmm",
            path: "/dev/stdout".into(),
            source,
        }),
    }
}

/// A closed stderr is no reason for another status.
fn say(text: &str) {
    let _ = writeln!(io::stderr(), "minivmm: {text}");
}
