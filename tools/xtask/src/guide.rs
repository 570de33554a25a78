//! `cargo xtask guide`: writes what of the guide is made from the code, and builds the book where mdbook is installed.

use crate::progress::Stage;
use crate::tree;
use anyhow::Result;
use std::process::{Command, ExitCode};

/// The test that writes what is made, if it is told to.
const WRITES: &str = "what_is_made_from_the_code_is_what_the_code_says";
/// Where the book is.
const BOOK: &str = "resources/guide";

#[derive(clap::Args)]
pub struct GuideOptions {
    /// Write nothing into the tree; fail where the guide is not what the code says
    #[arg(long)]
    check: bool,
}

/// `cargo xtask guide`.
pub fn run(options: &GuideOptions) -> Result<ExitCode> {
    let stage = Stage::start("guide");
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command
        .current_dir(tree::root())
        .args(["test", "-p", "minivmm", "--test", "all"]);
    if !options.check {
        // What is written must hold, too: so the tests run afterwards, all of them.
        let mut writing = Command::new(command.get_program());
        writing.args(command.get_args()).current_dir(tree::root());
        writing.arg(WRITES);
        stage.must(writing.env("UPDATE", "1"))?;
    }
    stage.must(command.arg("guide::"))?;
    stage.end("ok");
    if Command::new("mdbook").arg("--version").output().is_err() {
        eprintln!("mdbook is not installed: `cargo install mdbook`; the pages are in {BOOK}/src");
        return Ok(ExitCode::SUCCESS);
    }
    let stage = Stage::start("book");
    let book = tree::target().join("guide");
    let mut command = Command::new("mdbook");
    command.current_dir(tree::root()).args(["build", BOOK, "--dest-dir"]);
    stage.must(command.arg(&book))?;
    stage.end("ok");
    eprintln!("{}", book.join("index.html").display());
    Ok(ExitCode::SUCCESS)
}
