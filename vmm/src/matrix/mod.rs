//! `minivmm matrix`: guests on CPU models, each cell a run of this program in a process of its own, and one table of what came out.
//!
//! A crash of the program or of a guest fails its cell alone. An instruction limit ends guests that hang. What is expected may be in
//! a file ([`expected`]); without one, every cell has to pass or be skipped.

pub mod cell;
pub mod expected;
pub mod html;
pub mod junit;
pub mod plan;
mod report;
pub mod tap;
pub mod text;

use std::{
    collections::BTreeMap,
    ffi::OsString,
    io::{self, IsTerminal, Write},
    path::{Path, PathBuf},
    sync::{
        Mutex,
        atomic::{AtomicUsize, Ordering},
        mpsc,
    },
    thread,
    time::Duration,
};

use clap::{Args, Subcommand};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use trace::{
    export::{ExportError, OutFile},
    regular,
};
use x86::model::topology::Topology;

pub use self::report::Report;
use self::{
    cell::{Cell, PassBy, Plan, Verdict},
    expected::Table,
    plan::{Common, Guest, Shard},
};
use crate::{
    config::EngineChoice,
    error::{Error, Status},
    timeline::snapshot_file::SnapshotFile,
};

/// `minivmm matrix`.
#[derive(Clone, Debug, Args)]
#[command(args_conflicts_with_subcommands = true, subcommand_negates_reqs = true, after_help = AFTER)]
#[command(group = clap::ArgGroup::new("what").required(true).multiple(true).args(["guests", "kernel", "run", "from"]))]
pub struct MatrixOptions {
    #[command(subcommand)]
    command: Option<MatrixCommand>,
    /// Guests: every *.elf in DIR, and every *.toml there that names a kernel; NAME.toml beside NAME.elf has its settings
    #[arg(long, value_name = "DIR", conflicts_with = "kernel")]
    guests: Option<PathBuf>,
    /// One guest: a kernel, as `minivmm --kernel` takes it
    #[arg(long, value_name = "FILE")]
    kernel: Option<PathBuf>,
    /// Go on from a snapshot that `minivmm ctl SOCKET snapshot FILE` wrote, on the model that it is of; on others it is skipped
    #[arg(long, value_name = "FILE", conflicts_with_all = ["guests", "kernel", "run", "cpus", "memory"])]
    from: Option<PathBuf>,
    /// A file whose contents are typed into the console of each guest that goes on
    #[arg(long, value_name = "FILE", requires = "from")]
    input: Option<PathBuf>,
    /// A command instead of guests, after `--`: it passes where its exit status is 0, or by TAP. --kernel is then its kernel
    #[arg(long, requires = "options", conflicts_with_all = ["guests", "initrd", "cmdline", "max_instructions"])]
    run: bool,
    /// Its initial RAM disk
    #[arg(long, value_name = "FILE", requires = "kernel")]
    initrd: Option<PathBuf>,
    /// Its command line
    #[arg(
        long,
        visible_alias = "append",
        value_name = "STR",
        allow_hyphen_values = true,
        requires = "kernel"
    )]
    cmdline: Option<String>,
    /// CPU models, each as --cpu-model takes it; `all`: every one that `minivmm models` lists
    #[arg(long, value_name = "NAME", num_args = 1.., default_value = "all")]
    model: Vec<String>,
    /// What executes the guests (repeatable)
    #[arg(long, value_enum, default_value = "soft")]
    engine: Vec<EngineChoice>,
    /// The engine's name in reports, to tell hosts apart whose reports are put together
    #[arg(long, value_name = "NAME", value_parser = plan::parse_name)]
    report_as: Option<String>,
    /// Number of CPUs
    #[arg(long, visible_alias = "smp", value_name = "N[,sockets=N][,cores=N][,threads=N]", default_value = "1", value_parser = crate::parse::parse_cpus, allow_negative_numbers = true)]
    cpus: Topology,
    /// Guest memory
    #[arg(long, short = 'm', value_name = "SIZE", default_value = "512M", value_parser = crate::parse::parse_memory, allow_negative_numbers = true)]
    memory: u64,
    /// How a guest says that it holds
    #[arg(long, value_enum, default_value_t = PassBy::Auto)]
    pass: PassBy,
    /// A guest that executes more instructions hangs
    #[arg(long, value_name = "N", default_value = "20000000000", value_parser = crate::parse::parse_count, allow_negative_numbers = true)]
    max_instructions: u64,
    /// A guest that takes more wall time hangs
    #[arg(long, value_name = "SECONDS", default_value = "600", value_parser = crate::parse::parse_seconds, allow_negative_numbers = true)]
    timeout: Duration,
    /// Run the Kth of N parts only, as 2/5
    #[arg(long, value_name = "K/N", value_parser = plan::parse_shard)]
    shard: Option<Shard>,
    /// Runs at once [default: one for each CPU of the host]
    #[arg(long, short = 'j', value_name = "N")]
    jobs: Option<std::num::NonZero<usize>>,
    #[command(flatten)]
    outputs: Outputs,
    /// More options of minivmm, for every run: after `--`; with --run the command
    #[arg(last = true, value_name = "OPTION")]
    options: Vec<OsString>,
}

/// Where results go and what they are compared with.
#[derive(Clone, Debug, Args)]
struct Outputs {
    /// The expected table: what differs from it is shown and makes the exit status 1
    #[arg(long, value_name = "FILE")]
    expected: Option<PathBuf>,
    /// Write the expected table as it is now
    #[arg(long, requires = "expected")]
    accept: bool,
    /// Write a report as JUnit XML
    #[arg(long, value_name = "FILE")]
    junit: Option<PathBuf>,
    /// Write a report as one HTML file
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
}

const AFTER: &str = "A guest holds by the Test Anything Protocol if its console shows some (TAP version 13 or 14), else by exit status: a power-off,\n\
    a reset, or 0 written to port F4H; a Linux panic never holds. A settings file may have: kernel, initrd, cmdline, cpus,\n\
    memory, max-instructions, pass, options.\n\
    Exit status: 0 everything is as expected; 1 something is not; 2 wrong command line or file.";

/// What `minivmm matrix` does besides running.
#[derive(Clone, Debug, Subcommand)]
enum MatrixCommand {
    /// Put the JUnit reports of shards together: the table, the comparison, one report
    Merge {
        /// Reports that --junit wrote
        #[arg(required = true, value_name = "FILE")]
        reports: Vec<PathBuf>,
        #[command(flatten)]
        outputs: Outputs,
    },
}

/// Does what `minivmm matrix` asks for.
///
/// # Errors
/// The command line or a file that it names is wrong.
pub fn run(options: &MatrixOptions) -> Result<Status, Error> {
    if let Some(MatrixCommand::Merge { reports, outputs }) = &options.command {
        let expected = outputs.expected()?;
        let report = junit::merge(reports)?;
        return outputs.conclude(&report, expected, true);
    }
    // Clap asks for nothing that something else excludes.
    if options.input.is_some() && options.from.is_none() {
        return Err(Error::Usage("matrix: --input: needs --from".into()));
    }
    if options.run {
        return run_command(options);
    }
    if let Some(file) = &options.from {
        return run_restored(options, file);
    }
    let guests = match (&options.guests, &options.kernel) {
        (Some(folder), _) => plan::guests(folder)?,
        (None, Some(kernel)) => vec![Guest::of_kernel(
            kernel,
            options.initrd.as_deref(),
            options.cmdline.clone(),
        )],
        (None, None) => return Err(Error::Usage("matrix: --guests DIR or --kernel FILE is missing".into())),
    };
    let option = if options.guests.is_some() {
        "--guests"
    } else {
        "--kernel"
    };
    guests.iter().try_for_each(|guest| plan::check(guest, option))?;
    let models = plan::models(&options.model)?;
    let expected = options.outputs.expected()?;
    if options.report_as.is_some() && options.engine.len() != 1 {
        return Err(Error::Usage("--report-as: one --engine alone can have a name".into()));
    }
    let common = options.common();
    let plans = plan::cells(&guests, &models, &options.engine, &common, options.shard);
    let cells = run_all(&cell::program()?, &plans, options.jobs.map(std::num::NonZero::get));
    let report = Report {
        cells,
        shard: options.shard,
    };
    // What is gone is missed where everything there is was to run.
    let whole = options.shard.is_none() && options.model.iter().any(|model| model == "all");
    options.outputs.conclude(&report, expected, whole)
}

/// Does what `minivmm matrix --run` asks for.
fn run_command(options: &MatrixOptions) -> Result<Status, Error> {
    let models = plan::models(&options.model)?;
    let expected = options.outputs.expected()?;
    let (command, kernel) = (&options.options, options.kernel.as_deref());
    let common = options.common();
    let plans = plan::commands(command, kernel, &models, &options.engine, &common, options.shard);
    let cells = run_all(&cell::program()?, &plans, options.jobs.map(std::num::NonZero::get));
    let report = Report {
        cells,
        shard: options.shard,
    };
    let whole = options.shard.is_none() && options.model.iter().any(|model| model == "all");
    options.outputs.conclude(&report, expected, whole)
}

/// Does what `minivmm matrix --from` asks for.
fn run_restored(options: &MatrixOptions, file: &Path) -> Result<Status, Error> {
    let snapshot = SnapshotFile::open(file).map_err(Error::option(format!("--from {}", file.display())))?;
    if let Some(input) = &options.input {
        regular::open(input).map_err(|source| Error::File {
            option: "--input",
            path: input.clone(),
            source,
        })?;
    }
    let models = plan::models(&options.model)?;
    let expected = options.outputs.expected()?;
    let (common, input) = (options.common(), options.input.as_deref());
    let plans = plan::restored(file, &snapshot, input, &models, &options.engine, &common, options.shard)?;
    drop(snapshot);
    let cells = run_all(&cell::program()?, &plans, options.jobs.map(std::num::NonZero::get));
    let report = Report {
        cells,
        shard: options.shard,
    };
    let whole = options.shard.is_none() && options.model.iter().any(|model| model == "all");
    options.outputs.conclude(&report, expected, whole)
}

impl MatrixOptions {
    /// What all cells have in common.
    fn common(&self) -> Common {
        Common {
            cpus: self.cpus,
            memory: self.memory,
            max_instructions: self.max_instructions,
            timeout: self.timeout,
            pass: self.pass,
            all_models: self.model.iter().any(|model| model == "all"),
            report_as: self.report_as.clone(),
            options: self.options.clone(),
        }
    }
}

/// Runs all cells, several at once, and gives them in the order of their plans.
fn run_all(program: &Path, plans: &[Plan], jobs: Option<usize>) -> Vec<Cell> {
    let jobs = jobs.unwrap_or_else(|| thread::available_parallelism().map_or(1, std::num::NonZero::get));
    let bar = bar(plans.len());
    let next = AtomicUsize::new(0);
    let running = Mutex::new(BTreeMap::new());
    let (sender, receiver) = mpsc::channel();
    let mut done: Vec<Option<Cell>> = vec![None; plans.len()];
    thread::scope(|scope| {
        for number in 0..jobs.min(plans.len()) {
            let (sender, next, running, bar) = (sender.clone(), &next, &running, &bar);
            let work = move || {
                while let Some((number, plan)) = take(next, plans) {
                    let show = |running: &BTreeMap<usize, String>| {
                        let names: Vec<&str> = running.values().map(String::as_str).collect();
                        bar.set_message(names.join(", "));
                    };
                    if let Ok(mut running) = running.lock() {
                        running.insert(number, format!("{} on {}", plan.guest, plan.model));
                        show(&running);
                    }
                    let cell = cell::run(program, plan);
                    if let Ok(mut running) = running.lock() {
                        running.remove(&number);
                        show(&running);
                    }
                    if let Verdict::Failed(why) = &cell.verdict {
                        bar.suspend(|| say(&format!("{}: {why}", cell.name())));
                    }
                    bar.inc(1);
                    // The receiver lives as long as this scope.
                    let _ = sender.send((number, cell));
                }
            };
            // Where the system has no more threads, fewer do it, or this one alone.
            match thread::Builder::new().spawn_scoped(scope, work.clone()) {
                Ok(_) => {}
                Err(_) if number == 0 => work(),
                Err(_) => break,
            }
        }
        drop(sender);
        for (number, cell) in receiver {
            done[number] = Some(cell);
        }
    });
    bar.finish_and_clear();
    done.into_iter().flatten().collect()
}

fn take<'a>(next: &AtomicUsize, plans: &'a [Plan]) -> Option<(usize, &'a Plan)> {
    let number = next.fetch_add(1, Ordering::Relaxed);
    Some((number, plans.get(number)?))
}

fn bar(cells: usize) -> ProgressBar {
    let target = if io::stderr().is_terminal() {
        ProgressDrawTarget::stderr()
    } else {
        ProgressDrawTarget::hidden()
    };
    let style = ProgressStyle::with_template("[{bar:40}] {pos}/{len} {elapsed} (eta {eta}) {wide_msg}");
    let style = style.unwrap_or_else(|_| ProgressStyle::default_bar());
    let bar = ProgressBar::with_draw_target(Some(cells as u64), target);
    bar.set_style(style.progress_chars("=> "));
    bar
}

/// One line for the user, whatever a guest is called.
fn say(text: &str) {
    let _ = writeln!(io::stderr(), "minivmm: {}", text.replace(char::is_control, "?"));
}

impl Outputs {
    /// The expected table, if one is asked for. With `--accept` it need not be there yet.
    fn expected(&self) -> Result<Option<Table>, Error> {
        let Some(path) = &self.expected else { return Ok(None) };
        let text = match regular::text(path, plan::LONGEST) {
            Ok(text) => text,
            Err(error) if error.kind() == io::ErrorKind::NotFound && self.accept => String::new(),
            Err(source) => {
                return Err(Error::File {
                    option: "--expected",
                    path: path.clone(),
                    source,
                });
            }
        };
        let option = format!("--expected {}", path.display());
        Table::parse(&text).map(Some).map_err(Error::option(option))
    }

    /// Writes reports, compares, prints the table and says how it went. `whole`: cells that are not there are gone.
    fn conclude(&self, report: &Report, expected: Option<Table>, whole: bool) -> Result<Status, Error> {
        // What an engine comes to that the table knows nothing of depends on the host, as that of KVM does. `--accept` takes it on.
        let compared: Option<Vec<Cell>> = expected.as_ref().map(|table| {
            let known = |cell: &&Cell| self.accept || table.knows(&cell.engine);
            report.cells.iter().filter(known).cloned().collect()
        });
        let now = expected.as_ref().zip(compared.as_ref()).map(|(expected, cells)| {
            let mut now = expected.clone();
            now.put(cells);
            if whole {
                now.keep_only(cells);
            }
            now
        });
        let differences = match (&expected, &now) {
            (Some(expected), Some(now)) => expected.differences(now),
            _ => Vec::new(),
        };
        let write = |option: &'static str, path: &Option<PathBuf>, text: String| match path {
            None => Ok(()),
            // It has its name once it is whole.
            Some(path) => OutFile::create(path, true)
                .and_then(|mut file| match file.write_all(text.as_bytes()) {
                    Ok(()) => file.finish(),
                    Err(source) => Err(file.error(source)),
                })
                .map_err(|error| Error::File {
                    option,
                    path: path.clone(),
                    source: match error {
                        ExportError::Write { source, .. } => source,
                        error => io::Error::other(error),
                    },
                }),
        };
        if self.junit.is_some() {
            let text = junit::write(report).map_err(Error::option("--junit"))?;
            write("--junit", &self.junit, text)?;
        }
        write("--html", &self.html, html::write(report, &differences))?;
        let known = |cell: &Cell| expected.as_ref().is_some_and(|table| table.expects_failure(cell));
        let failed: Vec<&Cell> = report.cells.iter().filter(|cell| !known(cell)).collect();
        let mut text = format!("{}{}", text::tables(report), text::skips(report));
        text += &text::failures(&failed);
        let mut status = Status::Done;
        if let (Some(path), Some(now)) = (&self.expected, &now)
            && !differences.is_empty()
        {
            text += &format!("{}\n", differences.join("\n"));
            let path = path.display();
            if self.accept {
                write("--expected", &self.expected, now.text())?;
                text += &format!("{path}: written, {} lines changed\n", differences.len());
            } else {
                text += &format!("{path}: not as expected, see the lines above; --accept writes them\n");
                status = Status::Differs;
            }
        }
        let alone = |cell: &&Cell| {
            expected
                .as_ref()
                .is_none_or(|table| !self.accept && !table.knows(&cell.engine))
        };
        let failed = |cell: &Cell| matches!(cell.verdict, Verdict::Failed(_));
        if report.cells.iter().filter(alone).any(failed) {
            status = Status::Differs;
        }
        if let (Some(table), Some(path)) = (&expected, &self.expected) {
            for engine in report.engines() {
                if !self.accept && !table.knows(engine) && !report.absent(engine) {
                    text += &format!("{}: no section [{engine}]: it is not compared\n", path.display());
                }
            }
        }
        text += &format!("{}\n", text::summary(report));
        match io::stdout().write_all(text.as_bytes()) {
            Err(error) if error.kind() != io::ErrorKind::BrokenPipe => Err(Error::File {
                option: "minivmm",
                path: "/dev/stdout".into(),
                source: error,
            }),
            _ => Ok(status),
        }
    }
}
