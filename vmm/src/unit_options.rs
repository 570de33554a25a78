//! The options of the debug and trace units, `--UNIT=host|emulated|off`: one for each row of the table of units.

use clap::{Arg, ArgMatches, Args, Command, FromArgMatches, error::Error, value_parser};
use kvm::units::{UNITS, UnitRequest, UnitRequests};

/// What is asked for each unit.
#[derive(Clone, Copy, Debug)]
pub struct UnitOptions(pub UnitRequests);

impl Args for UnitOptions {
    fn augment_args(command: Command) -> Command {
        command.args(UNITS.iter().map(|row| {
            Arg::new(row.name)
                .long(row.name)
                .value_name("HOW")
                .value_parser(value_parser!(UnitRequest))
                .require_equals(true)
                .num_args(0..=1)
                .default_missing_value(UnitRequest::Emulated.name())
                .help(row.option)
        }))
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

impl FromArgMatches for UnitOptions {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, Error> {
        let mut requests = UnitRequests::default();
        for row in &UNITS {
            requests[row.unit] = matches.get_one(row.name).copied();
        }
        Ok(UnitOptions(requests))
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}
