//! `minivmm query DIR QUESTION`: a recorded session is replayed, and asked.

use std::io::{self, Write};

use clap::Parser;

use crate::{
    config::SerialTarget,
    error::{Error, Status},
    front::{console::Console, query::Asked},
    jail,
    query_options::QueryOptions,
    replay_command,
    replay_options::ReplayOptions,
    timeline::run::Run,
};

/// `minivmm replay` of a folder, as its own options say it.
#[derive(Debug, Parser)]
struct Replay {
    #[command(flatten)]
    options: ReplayOptions,
}

/// Replays and answers.
///
/// # Errors
/// One line: no session, another run than was recorded, a question about what is not there.
pub fn run(options: &QueryOptions) -> Result<Status, Error> {
    let words = [
        "replay".into(),
        options.folder.clone().into_os_string(),
        "--reverse".into(),
    ];
    let mut replay = Replay::try_parse_from(words)
        .map_err(|error| Error::Usage(error.to_string()))?
        .options;
    replay.serial = SerialTarget::Null;
    replay.reverse_memory = options.memory;
    replay.sandbox = options.sandbox;
    let asked = format!("query {}", options.folder.display());
    let config = replay_command::prepare(&replay)?;
    if config.sandbox {
        jail::want();
    }
    let mut run = Run::new(&config)?;
    let mut console = Console::open(&config.serial, &[], run.line())?;
    if config.sandbox {
        let files = jail::Files {
            read: vec![config.kernel.clone(), "/proc/self".into()],
            ..jail::Files::default()
        };
        run.jail(true, |_| jail::enter(jail::calls::threads::MACHINE, &files))?;
    }
    let mut out = io::BufWriter::new(io::stdout().lock());
    let answered = Asked::new(&mut run, &mut console).and_then(|mut run| run.answer(&options.question, &mut out));
    answered.map_err(Error::option(asked))?;
    out.flush().map_err(|source| Error::File {
        option: "query",
        path: "/dev/stdout".into(),
        source,
    })?;
    Ok(Status::Done)
}
