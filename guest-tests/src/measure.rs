//! Medians and ratios of alternated runs.

use std::time::Duration;

/// The middle of the sorted times, or the mean of the two in the middle; zero where there are none.
pub fn median(times: &[Duration]) -> Duration {
    let mut sorted = times.to_vec();
    sorted.sort();
    match (sorted.len(), sorted.len() / 2) {
        (0, _) => Duration::ZERO,
        (count, middle) if count % 2 == 1 => sorted[middle],
        (_, middle) => (sorted[middle - 1] + sorted[middle]) / 2,
    }
}

/// Runs each subject once per round, so that a slow moment of the machine hits all alike, and gives each one's times.
/// A subject is given by what measures it; its error ends the whole.
pub fn alternate<E>(
    rounds: usize,
    subjects: &mut [&mut dyn FnMut() -> Result<Duration, E>],
) -> Result<Vec<Vec<Duration>>, E> {
    let mut times = vec![Vec::with_capacity(rounds); subjects.len()];
    for _ in 0..rounds {
        for (subject, times) in subjects.iter_mut().zip(&mut times) {
            times.push(subject()?);
        }
    }
    Ok(times)
}

/// How many times longer `this` takes than `that`.
pub fn ratio(this: Duration, that: Duration) -> f64 {
    this.as_secs_f64() / that.as_secs_f64()
}

/// The middle of the sorted values, the upper one where there are two. There has to be one.
pub fn middle(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// Seconds of CPUs that this process has used so far.
pub fn cpu_seconds() -> f64 {
    // utime and stime.
    stat_seconds("self", 11)
}

/// The same of another process, 0 if there is none.
pub fn cpu_seconds_of(process: u32) -> f64 {
    stat_seconds(&process.to_string(), 11)
}

/// The same of the processes that it has waited for.
pub fn cpu_seconds_of_children() -> f64 {
    // cutime and cstime.
    stat_seconds("self", 13)
}

/// What something takes, in seconds.
#[derive(Clone, Copy, Debug)]
pub struct Taken {
    /// Of the wall.
    pub wall: f64,
    /// Of CPUs. On a busy host these tell more.
    pub cpu: f64,
}

/// Does something, with processes that it waits for, and says what it took.
///
/// # Errors
/// Those of `work`.
pub fn taken<E>(work: impl FnOnce() -> Result<(), E>) -> Result<Taken, E> {
    let (begun, used) = (std::time::Instant::now(), cpu_seconds_of_children());
    work()?;
    Ok(Taken {
        wall: begun.elapsed().as_secs_f64(),
        cpu: cpu_seconds_of_children() - used,
    })
}

/// The middles of both.
pub fn middle_taken(times: &[Taken]) -> Taken {
    Taken {
        wall: middle(times.iter().map(|taken| taken.wall).collect()),
        cpu: middle(times.iter().map(|taken| taken.cpu).collect()),
    }
}

/// How many processes want a CPU, over the last minute: with more than there are CPUs, times of the wall say little.
pub fn load() -> f64 {
    let text = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    let first = text.split_whitespace().next();
    first.and_then(|word| word.parse().ok()).unwrap_or(0.0)
}

/// Two times that proc(5) counts in hundredths of a second: so many fields behind the name, which ends with the last parenthesis.
fn stat_seconds(process: &str, field: usize) -> f64 {
    let text = std::fs::read_to_string(format!("/proc/{process}/stat")).unwrap_or_default();
    let behind = text.rsplit(')').next().unwrap_or_default();
    let words = behind.split_whitespace().skip(field).take(2);
    words.filter_map(|word| word.parse::<f64>().ok()).sum::<f64>() / 100.0
}

/// The rounds that `--rounds N` asks for, the only option of a benchmark; else so many.
///
/// # Errors
/// Another word is there, or no number above zero.
pub fn rounds(default: usize) -> Result<usize, String> {
    let words: Vec<String> = std::env::args().skip(1).filter(|word| word != "--bench").collect();
    let number = |text: &String| text.parse().ok().filter(|&number| number > 0);
    match &words[..] {
        [] => Some(default),
        [option, text] if option == "--rounds" => number(text),
        _ => None,
    }
    .ok_or_else(|| "--rounds wants a number above zero, and there is no other option".into())
}

#[cfg(test)]
#[path = "measure_test.rs"]
mod tests;
