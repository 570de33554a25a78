//! What `minivmm query` takes.

use std::{num::NonZero, path::PathBuf};

use crate::{
    front::query::Question,
    replay_options::{Part, parse_part},
};

/// What `minivmm query` takes.
#[derive(Clone, Debug, clap::Args)]
pub struct QueryOptions {
    /// The directory that `--record` made
    #[arg(value_name = "DIR")]
    pub(crate) folder: PathBuf,
    /// What the run's points may take of memory
    #[arg(long, value_name = "SIZE", default_value = "1G", value_parser = crate::parse::parse_size, allow_negative_numbers = true)]
    pub(crate) memory: u64,
    /// Parts of the session that are looked through at once [default: one for each CPU of the host]
    #[arg(long, short = 'j', value_name = "N")]
    pub(crate) jobs: Option<NonZero<usize>>,
    /// Look again, and neither take nor leave an answer in the session
    #[arg(long)]
    pub(crate) fresh: bool,
    /// Give up what the process does not need once the machine is built
    #[arg(long, value_enum, default_value_t = crate::jail::Sandbox::On)]
    pub(crate) sandbox: crate::jail::Sandbox,
    #[command(subcommand)]
    pub(crate) question: Question,
}

/// What `minivmm query-part` takes, which `minivmm query` runs.
#[derive(Clone, Debug, clap::Args)]
pub struct QueryPartOptions {
    /// The directory that `--record` made
    #[arg(value_name = "DIR")]
    pub(crate) folder: PathBuf,
    /// The part, in steps
    #[arg(value_name = "FROM-TO", value_parser = parse_part)]
    pub(crate) part: Part,
    /// What is asked, as JSON
    #[arg(value_name = "TASK")]
    pub(crate) task: String,
    /// What the run's points may take of memory
    #[arg(long, value_name = "SIZE", default_value = "1G", value_parser = crate::parse::parse_size)]
    pub(crate) memory: u64,
    /// Symbols of the guest's kernel
    #[arg(long, value_name = "FILE")]
    pub(crate) symbols: Option<PathBuf>,
    /// Give up what the process does not need once the machine is built
    #[arg(long, value_enum, default_value_t = crate::jail::Sandbox::On)]
    pub(crate) sandbox: crate::jail::Sandbox,
}
