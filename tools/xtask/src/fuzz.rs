//! `cargo xtask fuzz`: the fuzz targets under libFuzzer, which learns from coverage, on the compiler that builds everything else.
//!
//! cargo-fuzz wants a nightly compiler for its sanitizers. Coverage alone is a pass of LLVM that every rustc has, and the crate
//! libfuzzer-sys builds libFuzzer itself. What a sanitizer would find in C is here a panic, guard pages around guest RAM, or an assertion.

use crate::progress::Stage;
use crate::table::{self, Align};
use crate::{packages, tree};
use anyhow::{Context, Result, bail, ensure};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

/// What instruments the code: an 8-bit counter for each edge, and the operands of comparisons.
const FLAGS: [&str; 6] = [
    "-Cpasses=sancov-module",
    "-Cllvm-args=-sanitizer-coverage-level=4",
    "-Cllvm-args=-sanitizer-coverage-inline-8bit-counters",
    "-Cllvm-args=-sanitizer-coverage-pc-table",
    "-Cllvm-args=-sanitizer-coverage-trace-compares",
    "--cfg=fuzzing",
];
/// Where it is built for: a target that is named keeps the flags from build scripts and macros.
const TRIPLE: &str = "x86_64-unknown-linux-gnu";
/// An input is no longer than this, unless a seed is.
const LONGEST_INPUT: u64 = 64 << 10;
/// Memory that one process may take, in MiB: what a target takes for itself, and some.
const MEMORY: u32 = 1024;
/// One input may take so many seconds.
const SECONDS_OF_ONE: u32 = 25;
/// Inputs of a target that `--keep` keeps, and how long each may be.
const KEPT: usize = 24;
const KEPT_LEN: u64 = 2 << 10;

#[derive(clap::Args)]
pub struct FuzzOptions {
    /// Targets by name [default: all]
    targets: Vec<String>,
    /// How long each target is run, in seconds
    #[arg(long, default_value_t = 60, value_parser = clap::value_parser!(u64).range(1..))]
    seconds: u64,
    /// Afterwards write the smallest inputs that together reach what was reached into resources/fuzz
    #[arg(long)]
    keep: bool,
    /// Install nothing: list what is missing and stop
    #[arg(long)]
    no_install: bool,
}

/// What came of a target.
#[derive(Debug, Default, PartialEq)]
pub struct Figures {
    name: String,
    executions: u64,
    seconds: u64,
    /// Edges that were reached.
    edges: u64,
    /// Edges and how often each, and comparisons: what libFuzzer calls features.
    features: u64,
    /// Inputs that reach something of their own.
    inputs: u64,
    /// Most memory that was resident, in MiB.
    peak: u64,
    /// The slowest input, in seconds.
    slowest: u64,
}

impl Figures {
    /// Takes what a line of libFuzzer says.
    fn read(&mut self, line: &str) {
        if let Some((name, value)) = line.strip_prefix("stat::").and_then(|line| line.split_once(':')) {
            let Ok(value) = value.trim().parse() else { return };
            match name {
                "number_of_executed_units" => self.executions = value,
                "slowest_unit_time_sec" => self.slowest = value,
                "peak_rss_mb" => self.peak = value,
                _ => {}
            }
        } else if line.starts_with('#') {
            let words: Vec<&str> = line.split_whitespace().collect();
            for pair in words.windows(2) {
                let number = pair[1].split('/').next().and_then(|word| word.parse().ok());
                match (pair[0], number) {
                    ("cov:", Some(number)) => self.edges = number,
                    ("ft:", Some(number)) => self.features = number,
                    ("corp:", Some(number)) => self.inputs = number,
                    _ => {}
                }
            }
        }
    }
}

/// The names of all targets, as guest-tests/src/fuzz.rs lists them.
pub fn targets() -> Result<Vec<String>> {
    let path = tree::root().join("guest-tests/src/fuzz.rs");
    let text = fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
    Ok(names(&text))
}

fn names(text: &str) -> Vec<String> {
    let rows = text.split("    Target {\n        name: \"").skip(1);
    rows.filter_map(|row| row.split('"').next())
        .map(str::to_string)
        .collect()
}

fn folder(parts: &[&str]) -> Result<PathBuf> {
    let path = parts
        .iter()
        .fold(tree::target().join("fuzz"), |path, part| path.join(part));
    fs::create_dir_all(&path).with_context(|| format!("cannot make {}", path.display()))?;
    Ok(path)
}

fn build(stage: &Stage) -> Result<PathBuf> {
    let target = tree::target().join("fuzz/build");
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command
        .current_dir(tree::root())
        .args(["build", "--release", "--target", TRIPLE]);
    command.args(["--manifest-path", "guest-tests/fuzz/Cargo.toml", "--target-dir"]);
    command.arg(&target).env("RUSTFLAGS", FLAGS.join(" "));
    stage.must(&mut command)?;
    Ok(target.join(TRIPLE).join("release/fuzz"))
}

/// The program for a target, with its inputs: those that were found, those that are kept, and the seeds.
fn fuzzer(program: &Path, name: &str, flags: &[String], first: &Path) -> Result<Command> {
    let seeds = folder(&["seeds", name])?;
    let mut command = Command::new(program);
    command
        .current_dir(tree::root())
        .env("FUZZ_TARGET", name)
        .env("FUZZ_SEEDS", &seeds)
        .args(flags)
        .arg(first);
    let kept = tree::root().join("resources/fuzz").join(name);
    if kept.is_dir() {
        command.arg(kept);
    }
    command.arg(seeds);
    Ok(command)
}

/// Runs targets for some seconds each, and gives what came of them; the first that fails ends it.
pub fn run_targets(stage: &Stage, names: &[String], seconds: u64) -> Result<Vec<Figures>> {
    let program = build(stage)?;
    let mut all = Vec::new();
    for name in names {
        let corpus = folder(&["corpus", name])?;
        let artifacts = folder(&["artifacts"])?.join(format!("{name}-"));
        let flags = [
            format!("-max_total_time={seconds}"),
            format!("-rss_limit_mb={MEMORY}"),
            format!("-timeout={SECONDS_OF_ONE}"),
            format!("-max_len={LONGEST_INPUT}"),
            format!("-artifact_prefix={}", artifacts.display()),
            "-print_final_stats=1".to_string(),
            "-detect_leaks=0".to_string(),
        ];
        let mut figures = Figures {
            name: name.clone(),
            seconds,
            ..Figures::default()
        };
        let mut tail = Vec::new();
        let status = stage.run(&mut fuzzer(&program, name, &flags, &corpus)?, None, |line| {
            figures.read(line);
            tail.push(line.to_string());
            if tail.len() > 200 {
                tail.drain(..100);
            }
        })?;
        if !status.success() {
            bail!(
                "{name}: {status}; the input is {}*: run it again with FUZZ_TARGET={name} {} INPUT\n{}",
                artifacts.display(),
                program.display(),
                tail.join("\n")
            );
        }
        ensure!(
            figures.executions > 0 && figures.edges > 0,
            "{name}: nothing was executed, or it has no coverage"
        );
        all.push(figures);
    }
    Ok(all)
}

/// Writes the smallest inputs of a target that reach what all of them reach.
fn keep(stage: &Stage, program: &Path, name: &str) -> Result<()> {
    let merged = folder(&["merged", name])?;
    for entry in fs::read_dir(&merged)? {
        fs::remove_file(entry?.path())?;
    }
    let flags = ["-set_cover_merge=1", "-detect_leaks=0"].map(String::from);
    let mut command = fuzzer(program, name, &flags, &merged)?;
    command.arg(folder(&["corpus", name])?);
    stage.must(&mut command)?;
    let mut inputs = Vec::new();
    for entry in fs::read_dir(&merged)? {
        let entry = entry?;
        let len = entry.metadata()?.len();
        if (1..=KEPT_LEN).contains(&len) {
            inputs.push((len, entry.path()));
        }
    }
    // The longest of the short ones reach the most.
    inputs.sort();
    let kept = tree::root().join("resources/fuzz").join(name);
    fs::create_dir_all(&kept).with_context(|| format!("cannot make {}", kept.display()))?;
    for (_, path) in inputs.iter().rev().take(KEPT) {
        let file = path.file_name().unwrap_or_default();
        fs::copy(path, kept.join(file)).with_context(|| format!("cannot write to {}", kept.display()))?;
    }
    Ok(())
}

/// The figures as a table.
pub fn render(figures: &[Figures]) -> String {
    let head = [
        ("target", Align::Left),
        ("executions", Align::Right),
        ("seconds", Align::Right),
        ("edges", Align::Right),
        ("features", Align::Right),
        ("inputs", Align::Right),
        ("peak MiB", Align::Right),
        ("slowest s", Align::Right),
    ];
    let rows: Vec<Vec<String>> = figures
        .iter()
        .map(|of| {
            let numbers = [
                of.executions,
                of.seconds,
                of.edges,
                of.features,
                of.inputs,
                of.peak,
                of.slowest,
            ];
            std::iter::once(of.name.clone())
                .chain(numbers.map(|number| number.to_string()))
                .collect()
        })
        .collect();
    table::render(&head, &rows)
}

/// `cargo xtask fuzz`.
pub fn run(options: &FuzzOptions) -> Result<ExitCode> {
    let known = targets()?;
    for name in &options.targets {
        ensure!(
            known.contains(name),
            "{name} is none of the targets {}",
            known.join(", ")
        );
    }
    let chosen = if options.targets.is_empty() {
        &known
    } else {
        &options.targets
    };
    let stage = Stage::start("fuzz");
    packages::ensure_installed(&stage, &[packages::GCC, packages::GXX], !options.no_install)?;
    let figures = run_targets(&stage, chosen, options.seconds)?;
    if options.keep {
        let program = build(&stage)?;
        for name in chosen {
            keep(&stage, &program, name)?;
        }
    }
    stage.end("ok");
    println!("\n{}", render(&figures));
    Ok(ExitCode::SUCCESS)
}

#[cfg(test)]
#[path = "fuzz_test.rs"]
mod tests;
