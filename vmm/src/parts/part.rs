//! A part of a session, from one snapshot to the next, replayed in a process of its own.

use std::{
    io::{self, Write},
    time::Instant,
};

use serde::{Deserialize, Serialize};

use super::count::Counts;
use crate::{
    error::{Error, Status},
    front::{console::Console, serve},
    jail,
    observe::Observed,
    recording, replay_command,
    replay_options::{Part, ReplayOptions},
    timeline::run::Run,
    vm::{End, StopReason},
};

/// What a part comes to.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Done {
    /// The hash of the machine at the session's start.
    pub session: u64,
    /// Which it is.
    pub part: Part,
    /// Steps of the machine at its end, since the session's beginning.
    pub steps: u64,
    /// Instructions, likewise.
    pub instructions: u64,
    /// Wall time in milliseconds.
    pub milliseconds: u64,
    /// What was counted, where that was asked for.
    pub counts: Option<Counts>,
    /// The exit status of the run, at the session's end.
    pub status: i32,
    /// What is to be said there.
    pub message: Option<String>,
}

/// Replays a part, and prints what it comes to as a line of JSON.
///
/// # Errors
/// As of any replay; it went another way than the session.
pub fn run(options: &ReplayOptions, part: Part) -> Result<Status, Error> {
    let started = Instant::now();
    let mut config = replay_command::prepare(options)?;
    config.epoch = (part.from > 0).then_some(part.from);
    config.part_end = part.to;
    config.epochs = options.keep.then(crate::config::EpochOptions::default);
    if let Some(trace) = &mut config.trace {
        // As in a replay in series, which is cut at every snapshot; its own ends are cuts already.
        trace
            .cuts
            .retain(|cut| *cut > part.from && part.to.is_none_or(|to| *cut < to));
        trace.part = recording::Part {
            continues: part.from > 0,
            goes_on: part.to.is_some(),
        };
    }
    if config.sandbox {
        jail::want();
    }
    let Some(session) = config.replay.clone() else {
        return Err(Error::Usage("--part: of a session alone".into()));
    };
    let mut run = Run::new(&config)?;
    let mut console = Console::open(&config.serial, &[], run.line())?;
    if config.sandbox {
        let mut files = serve::files(&config);
        files.read.push(session.clone());
        if options.keep {
            files.write.push(session.clone());
        }
        run.jail(false, |_| jail::enter(jail::calls::threads::MACHINE, &files))?;
    }
    let counted: Option<Observed<Counts>> = options.count.then(|| run.observe(Counts::default()));
    let mut end = loop {
        if let StopReason::Ended(end) = run.run(&mut console)? {
            break end;
        }
    };
    if let (Some(to), End::Instructions(_)) = (part.to, &end) {
        let there = run.is_at_epoch(&session, to);
        let option = format!("replay {}: its snapshot at step {to}", session.display());
        if !there.map_err(Error::option(option))? {
            end = End::Diverged(to);
        }
    }
    drop(console);
    run.end_trace(&end.reason())?;
    if options.keep {
        say_kept(&run);
    }
    let (steps, instructions) = (run.steps(), run.instructions());
    let (status, message) = match (part.to, &end) {
        (Some(_), End::Instructions(_)) => (0, None),
        _ => {
            let ended = serve::ended(&mut run, &config, end, Vec::new());
            (ended.status().code(), ended.message())
        }
    };
    let counts = counted.map(|counted| counted.get().clone());
    let done = Done {
        session: replay_command::start_of(&session)?,
        part,
        steps,
        instructions,
        milliseconds: started.elapsed().as_millis() as u64,
        counts,
        status,
        message,
    };
    let mut line = serde_json::to_string(&done).unwrap_or_default();
    line.push('\n');
    io::stdout()
        .write_all(line.as_bytes())
        .map(|()| Status::Done)
        .map_err(|source| Error::File {
            option: "replay",
            path: "/dev/stdout".into(),
            source,
        })
}

fn say_kept(run: &Run) {
    let said = match run.epochs_kept() {
        Some((count, bytes)) => {
            let size = machine::loader::size_text(bytes);
            writeln!(io::stderr(), "minivmm: {count} snapshots are kept now, {size}")
        }
        None => writeln!(io::stderr(), "minivmm: no snapshots could be kept (-v says why)"),
    };
    // A closed stderr is no reason to fail.
    drop(said);
}
