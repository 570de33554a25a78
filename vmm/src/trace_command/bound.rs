//! `--from` and `--to`.

use trace::{
    Trace,
    view::{Bound, Names, Window},
};

use super::arguments::Part;
use crate::error::Error;

/// The window and the vCPUs that are wanted.
///
/// # Errors
/// Something is no moment, or there is no such function or vCPU.
pub fn resolve(part: &Part, trace: &Trace, names: &Names) -> Result<(Window, Vec<usize>), Error> {
    let bound = |option: &str, text: &Option<String>| match text {
        None => Ok(None),
        Some(text) => parse(text, names)
            .map(Some)
            .map_err(Error::option(format!("{option} {text}"))),
    };
    let window = Window {
        from: bound("--from", &part.from)?,
        to: bound("--to", &part.to)?,
        threads: part.threads,
    };
    let cpus = match part.vcpu {
        None => (0..trace.cpus()).collect(),
        Some(cpu) if cpu < trace.cpus() => vec![cpu],
        Some(cpu) => {
            let last = trace.cpus().saturating_sub(1);
            return Err(Error::Usage(format!("--vcpu {cpu}: the trace has vCPUs 0 to {last}")));
        }
    };
    Ok((window, cpus))
}

/// Why a window of a trace cannot begin or end there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
enum BoundError {
    #[error("not an address")]
    Address,
    #[error("not a step as 1000000, and not a time as 1.5s, 20ms, 300us or 7ns")]
    Moment,
    #[error("the trace has no symbols: give some with --symbols")]
    NoSymbols,
    #[error("no such function")]
    Function,
}

fn parse(text: &str, names: &Names) -> Result<Bound, BoundError> {
    if let Some(hex) = text.strip_prefix("0x") {
        return u64::from_str_radix(hex, 16)
            .map(Bound::Address)
            .map_err(|_| BoundError::Address);
    }
    if text.starts_with(|c: char| c.is_ascii_digit()) {
        return number(text).ok_or(BoundError::Moment);
    }
    match names.address(text) {
        Some(address) => Ok(Bound::Address(address)),
        None if names.symbols().is_empty() => Err(BoundError::NoSymbols),
        None => Err(BoundError::Function),
    }
}

/// Steps, or a decimal number of seconds or parts of them, exact to the nanosecond.
fn number(text: &str) -> Option<Bound> {
    if let Ok(step) = text.parse() {
        return Some(Bound::Step(step));
    }
    let (digits, scale) = [("ns", 0), ("us", 3), ("ms", 6), ("s", 9)]
        .into_iter()
        .find_map(|(unit, scale)| Some((text.strip_suffix(unit)?, scale)))?;
    let (whole, part) = digits.split_once('.').unwrap_or((digits, ""));
    let numeric = |text: &str| text.bytes().all(|byte| byte.is_ascii_digit());
    if whole.is_empty() || !numeric(whole) || !numeric(part) || part.len() > scale {
        return None;
    }
    let part = if scale == 0 {
        0
    } else {
        format!("{part:0<scale$}").parse::<u64>().ok()?
    };
    let whole = whole.parse::<u64>().ok()?.checked_mul(10u64.pow(scale as u32))?;
    Some(Bound::Time(whole.checked_add(part)?))
}

#[cfg(test)]
#[path = "bound_test.rs"]
mod tests;
