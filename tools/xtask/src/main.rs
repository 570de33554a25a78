//! The developer loop, one word each: `cargo xtask demo | test | bench | coverage | guest`.

use clap::Parser;
use std::process::ExitCode;

mod counts;
mod coverage;
mod packages;
mod progress;
mod table;
mod test;
mod tree;

#[derive(Parser)]
#[command(
    name = "cargo xtask",
    about = "The developer loop of minivmm",
    disable_help_subcommand = true
)]
enum Command {
    /// Run the whole test suite: what CI runs
    Test(test::Options),
    /// Write resources/coverage.md: each item of the plan with the tests that prove it
    Coverage(coverage::Options),
}

fn main() -> ExitCode {
    let result = match Command::parse() {
        Command::Test(options) => test::run(&options),
        Command::Coverage(options) => coverage::run(&options).map(|()| ExitCode::SUCCESS),
    };
    result.unwrap_or_else(|error| {
        eprintln!("xtask: {error:#}");
        ExitCode::FAILURE
    })
}
