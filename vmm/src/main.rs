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
    logger, matrix, parts, query_command, replay_command,
    replay_options::{ReplayCommand, ReplayOptions},
    run, signals, terminal, trace_command,
};

#[global_allocator]
static MEMORY: OrExit = OrExit;

fn main() {
    // What goes wrong before a command runs, or in place of it, is told apart from what it ends with (as `docker run` has it).
    let runs = std::env::args_os().nth(1).is_some_and(|word| word == "run");
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
        Ok(Job::QueryPart(options)) => query_command::run_part(&options),
        Ok(Job::Matrix(options)) => matrix::run(&options),
        Ok(Job::Man(dir)) => cli::write_manual(&dir).map(|()| Status::Done),
        Ok(Job::Command(options)) => run_command(&options),
        Ok(Job::Run { config, verbose }) => run_machine(&config, verbose),
        Ok(Job::Replay(options)) => replay(&options),
        Err(error) => Err(error),
    };
    let status = status.unwrap_or_else(|error| {
        // Whatever a file is called, it is one line.
        say(&error.to_string().replace(char::is_control, "?"));
        match runs {
            true => Status::Command(run::FAILED),
            false => error.status(),
        }
    });
    exit(status.code());
}

/// Runs a command in a guest.
fn run_command(options: &run::options::RunOptions) -> Result<Status, Error> {
    logger::init(options.verbose);
    signals::install().map_err(|source| Error::System {
        what: "taking over signals",
        source,
    })?;
    let (status, message) = run::command(options)?;
    if let Some(message) = message {
        say(&message);
    }
    Ok(Status::Command(status))
}

/// Replays a session, whole or in parts.
fn replay(options: &ReplayOptions) -> Result<Status, Error> {
    match (&options.command, options.part) {
        (Some(ReplayCommand::Merge(merge)), _) => parts::merge(merge),
        (None, Some(part)) => {
            logger::init(options.verbose);
            parts::part::run(options, part)
        }
        (None, None) if options.is_cut() => parts::run(options),
        (None, None) => replay_command::prepare(options).and_then(|config| run_machine(&config, options.verbose)),
    }
}

/// Runs a machine to its end.
fn run_machine(config: &MachineConfig, verbose: u8) -> Result<Status, Error> {
    logger::init(verbose);
    signals::install().map_err(|source| Error::System {
        what: "taking over signals",
        source,
    })?;
    let end = minivmm::front::serve::run(config)?;
    if let Some(message) = end.message() {
        say(&message);
    }
    Ok(end.status())
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
