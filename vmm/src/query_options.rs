//! What `minivmm query` takes.

use std::path::PathBuf;

use crate::front::query::Question;

/// What `minivmm query` takes.
#[derive(Clone, Debug, clap::Args)]
pub struct QueryOptions {
    /// The directory that `--record` made
    #[arg(value_name = "DIR")]
    pub(crate) folder: PathBuf,
    /// What the run's points may take of memory
    #[arg(long, value_name = "SIZE", default_value = "1G", value_parser = crate::parse::parse_size, allow_negative_numbers = true)]
    pub(crate) memory: u64,
    /// Give up what the process does not need once the machine is built
    #[arg(long, value_enum, default_value_t = crate::jail::Sandbox::On)]
    pub(crate) sandbox: crate::jail::Sandbox,
    #[command(subcommand)]
    pub(crate) question: Question,
}
