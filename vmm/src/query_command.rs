//! `minivmm query DIR QUESTION`: a recorded session is asked.
//!
//! # Practice
//! The session is cut at its snapshots, as for `minivmm replay --jobs`, and each part is asked by a process of its own. What a word of the
//! question means is known at the end of the session, so the last part comes first; who looks for what was last goes on with those before
//! it, so many at once. A session without snapshots is one part.

use std::{
    ffi::OsString,
    io::{self, Write},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    thread,
};

use clap::Parser;
use trace::regular;

use crate::{
    config::SerialTarget,
    error::{Error, Status},
    front::{
        console::Console,
        query::{Asked, QueryError, Question, Window, how_many, nobody},
        query_part::{Reply, Task},
    },
    jail,
    matrix::cell::program,
    parts,
    query_cache::Cache,
    query_options::{QueryOptions, QueryPartOptions},
    replay_command,
    replay_options::{Part, ReplayOptions},
    timeline::{epochs, run::Run, session::Session},
};

/// `minivmm replay` of a folder, as its own options say it.
#[derive(Debug, Parser)]
struct Replay {
    #[command(flatten)]
    options: ReplayOptions,
}

/// A question that a part could not answer.
#[derive(Debug, thiserror::Error)]
enum AskError {
    /// In the words of the part's process.
    #[error("{0}")]
    Part(String),
    /// The process cannot be run, or says something else.
    #[error("the part {part}: {why}")]
    Process {
        /// The part.
        part: Part,
        /// Why.
        why: String,
    },
    /// What no part answers.
    #[error(transparent)]
    Query(#[from] QueryError),
}

/// Answers a question.
///
/// # Errors
/// One line: no session, another run than was recorded, a question about what is not there.
pub fn run(options: &QueryOptions) -> Result<Status, Error> {
    let folder = &options.folder;
    let failed = |source| Error::File {
        option: "query",
        path: folder.clone(),
        source,
    };
    let (_, _, head, _) = Session::open(folder)?;
    let cache = match options.fresh {
        true => None,
        false => Some(Cache::of(folder, &options.question).map_err(failed)?),
    };
    let answer = match cache.as_ref().and_then(Cache::answer) {
        Some(answer) => answer,
        None => {
            let cuts = epochs::list(folder).map_err(failed)?;
            let cuts: Vec<u64> = cuts.into_iter().filter(|steps| *steps < head.steps).collect();
            let mut session = Parts {
                options,
                // Each at its own snapshot: an answer may need few of them.
                parts: parts::cut(&cuts, usize::MAX, 1),
                symbols: None,
            };
            let answer = session.answer();
            if let Some(symbols) = &session.symbols {
                let _ = std::fs::remove_file(symbols);
            }
            let answer = answer.map_err(Error::option(format!("query {}", folder.display())))?;
            if let Some(cache) = cache {
                cache.keep(&answer);
            }
            answer
        }
    };
    match io::stdout().write_all(answer.as_bytes()) {
        Err(source) if source.kind() != io::ErrorKind::BrokenPipe => Err(Error::File {
            option: "query",
            path: "/dev/stdout".into(),
            source,
        }),
        _ => Ok(Status::Done),
    }
}

/// A session that is asked in parts.
struct Parts<'a> {
    options: &'a QueryOptions,
    parts: Vec<Part>,
    /// A file with the symbols that the guest's kernel has at the end, for parts in which it has none yet.
    symbols: Option<PathBuf>,
}

impl Parts<'_> {
    fn jobs(&self) -> usize {
        let cpus = || thread::available_parallelism().map_or(1, std::num::NonZero::get);
        self.options.jobs.map_or_else(cpus, std::num::NonZero::get)
    }

    /// Asks a part.
    fn ask(&self, part: Part, task: &Task) -> Result<Reply, AskError> {
        let failed = |why: String| AskError::Process { part, why };
        let task = serde_json::to_string(task).map_err(|error| failed(error.to_string()))?;
        let mut command = Command::new(program().map_err(|error| failed(error.to_string()))?);
        let memory = (self.options.memory / self.jobs() as u64).max(1);
        command.arg("query-part").arg(&self.options.folder);
        command.args([part.to_string(), task, "--memory".into(), memory.to_string()]);
        command.args(["--sandbox", self.options.sandbox.name()]);
        if let Some(symbols) = &self.symbols {
            command.arg("--symbols").arg(symbols);
        }
        let output = command.stdin(Stdio::null()).output();
        let output = output.map_err(|error| failed(error.to_string()))?;
        if output.status.success() {
            return serde_json::from_slice(&output.stdout).map_err(|error| failed(error.to_string()));
        }
        let errors = String::from_utf8_lossy(&output.stderr);
        let said = errors.lines().find_map(|line| line.strip_prefix("minivmm: "));
        match said.and_then(|said| said.strip_prefix("query: ")) {
            Some(why) => Err(AskError::Part(why.into())),
            None => Err(failed(said.unwrap_or("it said nothing").into())),
        }
    }

    /// Asks several parts at once, and gives their replies in their order.
    fn ask_all(&self, tasks: &[(Part, Task)]) -> Result<Vec<Reply>, AskError> {
        let mut replies = Vec::new();
        for batch in tasks.chunks(self.jobs()) {
            let asked: Vec<_> = thread::scope(|scope| {
                let ask = |(part, task): &'_ (Part, Task)| self.ask(*part, task);
                let threads: Vec<_> = batch
                    .iter()
                    .map(|one| {
                        thread::Builder::new()
                            .spawn_scoped(scope, move || ask(one))
                            .map_err(|_| one)
                    })
                    .collect();
                let join = |thread: Result<thread::ScopedJoinHandle<'_, _>, &(Part, Task)>| match thread {
                    Ok(thread) => thread.join().ok(),
                    // The system has no more threads.
                    Err(one) => Some(ask(one)),
                };
                threads.into_iter().map(join).collect()
            });
            for (reply, (part, _)) in asked.into_iter().zip(batch) {
                let gone = || AskError::Process {
                    part: *part,
                    why: "nobody has waited for it".into(),
                };
                replies.push(reply.unwrap_or_else(|| Err(gone()))?);
            }
        }
        Ok(replies)
    }

    /// Asks the parts before a step for the last of something, from the latest on, until one has it.
    fn last(
        &self,
        before: u64,
        task: &Task,
        is_it: impl Fn(&Reply) -> bool,
    ) -> Result<Option<(Part, Reply)>, AskError> {
        let earlier = self.parts.iter().filter(|part| part.from < before);
        let cut = earlier.map(|part| Part {
            from: part.from,
            to: match part.to {
                Some(to) => Some(to.min(before)),
                None if before == u64::MAX => None,
                None => Some(before),
            },
        });
        let tasks: Vec<(Part, Task)> = cut.rev().map(|part| (part, task.clone())).collect();
        for batch in tasks.chunks(self.jobs()) {
            let replies = self.ask_all(batch)?;
            let mut parts = batch.iter().map(|(part, _)| *part).zip(replies);
            if let Some(found) = parts.find(|(_, reply)| is_it(reply)) {
                return Ok(Some(found));
            }
        }
        Ok(None)
    }

    fn answer(&mut self) -> Result<String, AskError> {
        let question = self.options.question.clone();
        let Some(last) = self.parts.last().copied() else {
            return Ok(String::new());
        };
        let mut first = self.ask(last, &Task::First(question.clone()))?;
        if let (Question::LastWriter { .. }, Some(text)) = (&question, first.text.take()) {
            return Ok(text);
        }
        if let Some(symbols) = first.symbols.take() {
            let path = std::env::temp_dir().join(format!("minivmm-symbols-{}", std::process::id()));
            if regular::create_private(&path)
                .and_then(|mut file| file.write_all(symbols.as_bytes()))
                .is_ok()
            {
                self.symbols = Some(path);
            }
        }
        let address = first.address.unwrap_or(0);
        match question {
            Question::LastWriter {
                address: word,
                len,
                before,
            } => self.last_writer((address, len, word), before, &first, last),
            Question::Writes { len, window, .. } => {
                let (from, to) = self.window(&window, &first)?;
                self.writes(address, len, from, to, window.limit)
            }
            Question::Calls { function, window } => {
                let (from, to) = self.window(&window, &first)?;
                self.calls(address, function, from, to, window.limit)
            }
        }
    }

    fn last_writer(
        &self,
        written: (u64, u64, String),
        before: Option<String>,
        first: &Reply,
        last: Part,
    ) -> Result<String, AskError> {
        let mut end = last.from;
        let function = first.functions.first().copied().flatten();
        let mut moment = first.moment;
        if let (Some(function), None) = (function, first.moment) {
            let task = Task::Last {
                written: Some(written.clone()),
                function: Some(function),
            };
            let called = self.last(last.from, &task, |reply| reply.moment.is_some())?;
            let Some((part, reply)) = called else {
                return Err(QueryError::NotCalled(before.unwrap_or_default()).into());
            };
            if let Some(text) = reply.text {
                return Ok(text);
            }
            (end, moment) = (part.from, reply.moment);
        } else if let Some(moment) = moment.filter(|moment| *moment < end) {
            end = moment;
        }
        let word = written.2.clone();
        let task = Task::Last {
            written: Some(written),
            function: None,
        };
        let found = self.last(end, &task, |reply| reply.text.is_some())?;
        let text = found.and_then(|(_, reply)| reply.text);
        let steps = moment.unwrap_or(first.steps).min(first.steps);
        Ok(text.unwrap_or_else(|| nobody(&word, 0, steps)))
    }

    /// The step of a moment of a window: a number, or the last call of a function.
    fn moment(&self, word: Option<&String>, function: Option<u64>) -> Result<Option<u64>, AskError> {
        let (Some(word), Some(function)) = (word, function) else {
            return Ok(word.and_then(|word| word.parse().ok()));
        };
        let task = Task::Last {
            written: None,
            function: Some(function),
        };
        match self.last(u64::MAX, &task, |reply| reply.moment.is_some())? {
            Some((_, reply)) => Ok(reply.moment),
            None => Err(QueryError::NotCalled(word.clone()).into()),
        }
    }

    fn window(&self, window: &Window, first: &Reply) -> Result<(u64, u64), AskError> {
        let function = |n: usize| first.functions.get(n).copied().flatten();
        let from = self.moment(window.from.as_ref(), function(0))?.unwrap_or(0);
        let to = self.moment(window.to.as_ref(), function(1))?.unwrap_or(u64::MAX);
        match from <= to {
            true => Ok((from, to)),
            false => Err(QueryError::Window { from, to }.into()),
        }
    }

    fn writes(&self, address: u64, len: u64, from: u64, to: u64, limit: u64) -> Result<String, AskError> {
        let end = |part: &Part| part.to.unwrap_or(u64::MAX);
        let parts = self.parts.iter().filter(|part| part.from < to && end(part) > from);
        let task = |part: &Part| Task::Writes {
            address,
            len,
            from: from.max(part.from),
            to: to.min(end(part)),
            limit,
        };
        let tasks: Vec<(Part, Task)> = parts.map(|part| (*part, task(part))).collect();
        let (mut text, mut lines, mut count) = (String::new(), 0, 0);
        for reply in self.ask_all(&tasks)? {
            count += reply.count;
            for line in reply.text.iter().flat_map(|text| text.lines()) {
                if lines < limit {
                    text += line;
                    text.push('\n');
                }
                lines += 1;
            }
        }
        Ok(text + &how_many(count, limit))
    }

    /// Calls may return in a later part, so one process looks at all of the window.
    fn calls(&self, function: u64, word: String, from: u64, to: u64, limit: u64) -> Result<String, AskError> {
        let part = self.parts.iter().rfind(|part| part.from <= from);
        let whole = Part {
            from: part.map_or(0, |part| part.from),
            to: None,
        };
        let task = Task::Calls {
            function,
            word,
            from,
            to,
            limit,
        };
        Ok(self.ask(whole, &task)?.text.unwrap_or_default())
    }
}

/// Answers a part's task, as a line of JSON.
///
/// # Errors
/// One line: no session, another run than was recorded, a question about what is not there.
pub fn run_part(options: &QueryPartOptions) -> Result<Status, Error> {
    let usage = |error: String| Error::Usage(format!("query-part: {error}"));
    let task: Task = serde_json::from_str(&options.task).map_err(|error| usage(error.to_string()))?;
    let words: [OsString; 2] = ["replay".into(), options.folder.clone().into_os_string()];
    let parsed = Replay::try_parse_from(words).map_err(|error| usage(error.to_string()))?;
    let mut replay = parsed.options;
    replay.serial = SerialTarget::Null;
    // What is ahead needs no way back.
    replay.reverse = matches!(task, Task::First(_) | Task::Last { .. });
    replay.reverse_memory = options.memory;
    replay.sandbox = options.sandbox;
    let symbols = options.symbols.as_deref().map(absolute).transpose()?;
    let mut config = replay_command::prepare(&replay)?;
    config.epoch = (options.part.from > 0).then_some(options.part.from);
    config.part_end = options.part.to;
    config.symbols = config.symbols.or(symbols);
    if config.sandbox {
        jail::want();
    }
    let mut run = Run::new(&config)?;
    let mut console = Console::open(&config.serial, &[], run.line())?;
    if config.sandbox {
        let read = [config.kernel.clone(), "/proc/self".into()];
        let files = jail::Files {
            read: read.into_iter().chain(config.symbols.clone()).collect(),
            ..jail::Files::default()
        };
        run.jail(true, |_| jail::enter(jail::calls::threads::MACHINE, &files))?;
    }
    let reply = Asked::at_its_beginning(&mut run, &mut console).part(&task, options.part.from);
    let reply = reply.map_err(Error::option("query".to_string()))?;
    let mut line = serde_json::to_string(&reply).unwrap_or_default();
    line.push('\n');
    let written = io::stdout().write_all(line.as_bytes());
    written.map(|()| Status::Done).map_err(|source| Error::File {
        option: "query",
        path: "/dev/stdout".into(),
        source,
    })
}

fn absolute(path: &Path) -> Result<PathBuf, Error> {
    std::path::absolute(path).map_err(|source| Error::File {
        option: "--symbols",
        path: path.into(),
        source,
    })
}
