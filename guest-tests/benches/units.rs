//! What watching costs: the engine's time with a unit on over the same run with all off, on four loops and on the boot of
//! Debian's cloud kernel. Medians of alternated runs, in the processor time of the thread that runs the machine.
//!
//! The row without units is what all off costs: nothing, if it is 1.
//!
//! The units are an observer's ([`guest_tests::observer`]), programmed by MSR writes before the first instruction: a booting
//! Linux would reprogram the guest's own. They hear the same words and do the same work.
//!
//! `cargo xtask bench --only units`; the figures go to target/bench-units.json too.

use guest_tests::measure::{alternate, median, ratio};
use guest_tests::observer::{Observer, Unit};
use guest_tests::{LOOPS, linux, target};
use minivmm::{Console, MachineConfig, Run};
use std::path::Path;
use std::process::ExitCode;
use std::time::{Duration, Instant};
use x86::model::{CpuModel, SAPPHIRERAPIDS, SKYLAKE_SERVER};
use x86::watch::{Interest, Processor, Recorded, Watch};

/// Has branches recorded, and throws the records away.
struct Recorder;

impl Watch for Recorder {
    fn interest(&mut self, _: &mut dyn Processor) -> Interest {
        Interest {
            branches: Recorded::All,
            ..Interest::NOTHING
        }
    }
}

/// What is on; the target for the ratio, if it has one.
#[derive(Clone, Copy)]
enum Watched {
    /// The machine has no units at all.
    Absent,
    Nothing,
    Recording,
    Unit(Unit),
}

struct Subject {
    name: &'static str,
    model: &'static CpuModel,
    watched: Watched,
    target: Option<f64>,
}

const fn subject(name: &'static str, model: &'static CpuModel, watched: Watched, target: Option<f64>) -> Subject {
    Subject {
        name,
        model,
        watched,
        target,
    }
}

/// Each group begins with what its others are measured against.
static SUBJECTS: [&[Subject]; 2] = [
    &[
        subject("all off", &SKYLAKE_SERVER, Watched::Nothing, None),
        subject("no units at all", &SKYLAKE_SERVER, Watched::Absent, None),
        subject("branches recorded", &SKYLAKE_SERVER, Watched::Recording, Some(1.15)),
        subject("LBR", &SKYLAKE_SERVER, Watched::Unit(Unit::Lbr), Some(1.15)),
        subject("BTS", &SKYLAKE_SERVER, Watched::Unit(Unit::Bts), Some(3.0)),
        subject("PT", &SKYLAKE_SERVER, Watched::Unit(Unit::Pt), Some(1.5)),
        subject("counters", &SKYLAKE_SERVER, Watched::Unit(Unit::Counters), Some(1.1)),
        subject(
            "counters, one of branches",
            &SKYLAKE_SERVER,
            Watched::Unit(Unit::BranchCounter),
            None,
        ),
    ],
    &[
        subject("all off", &SAPPHIRERAPIDS, Watched::Nothing, None),
        subject(
            "architectural LBR",
            &SAPPHIRERAPIDS,
            Watched::Unit(Unit::Lbr),
            Some(1.15),
        ),
    ],
];

const LOOP_RUNS: [(&str, &str); 4] = [
    ("digest", "50000"),
    ("qsort", "400000"),
    ("sieve", "20"),
    ("hash", "2000000"),
];

fn main() -> ExitCode {
    let (mut rounds, mut steps, mut profiled) = (5, None, None);
    let mut words = std::env::args().skip(1);
    while let Some(word) = words.next() {
        let number = |words: &mut dyn Iterator<Item = String>| words.next()?.parse::<u64>().ok().filter(|&n| n > 0);
        match word.as_str() {
            "--bench" => {}
            "--rounds" => match number(&mut words) {
                Some(number) => rounds = number as usize,
                None => return wrong("--rounds wants a number above zero"),
            },
            // A shorter boot, for a quick look.
            "--steps" => match number(&mut words) {
                Some(number) => steps = Some(number),
                None => return wrong("--steps wants a number above zero"),
            },
            // One boot of one subject, for a profiler.
            "--profile" => match words.next().map(|name| find(&name)) {
                Some(Some(subject)) => profiled = Some(subject),
                _ => return wrong("--profile wants a subject's name, as the table has it"),
            },
            other => return wrong(&format!("unknown option {other}")),
        }
    }
    if let Some(subject) = profiled {
        return match once(&boot(subject.model, steps), subject) {
            Ok(time) => {
                println!("{}: {:.2} s", subject.name, time.as_secs_f64());
                ExitCode::SUCCESS
            }
            Err(error) => wrong(&error),
        };
    }
    match measure(rounds, steps) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => wrong(&error),
    }
}

fn find(name: &str) -> Option<&'static Subject> {
    SUBJECTS.into_iter().flatten().find(|subject| subject.name == name)
}

fn boot(model: &'static CpuModel, steps: Option<u64>) -> MachineConfig {
    let guest = linux();
    MachineConfig {
        initrd: vec![guest.initrd.clone().into()],
        cmdline: Some(b"console=ttyS0 panic=-1 minivmm.script=nothing".to_vec()),
        max_instructions: steps,
        model,
        ..MachineConfig::new(&guest.kernel)
    }
}

fn wrong(message: &str) -> ExitCode {
    eprintln!("bench: {message}");
    ExitCode::FAILURE
}

fn measure(rounds: usize, steps: Option<u64>) -> Result<(), String> {
    println!("time with a unit on over the time with all off, {rounds} rounds each\n");
    let mut columns: Vec<(String, Vec<Vec<Duration>>)> = Vec::new();
    for (name, repetitions) in LOOP_RUNS {
        let line = format!("{name} {repetitions}");
        let config = |model| MachineConfig {
            cmdline: Some(line.clone().into_bytes()),
            model,
            ..MachineConfig::new(LOOPS)
        };
        columns.push((name.into(), times(rounds, &config)?));
    }
    columns.push(("boot".into(), times(rounds, &|model| boot(model, steps))?));

    print!("{:<28}", "");
    columns.iter().for_each(|(name, _)| print!("{name:>8}"));
    println!("  target");
    let mut json = Vec::new();
    let mut row = 0;
    for group in &SUBJECTS {
        let base = row;
        for subject in *group {
            let middle = |times: &Vec<Vec<Duration>>, row: usize| median(&times[row]);
            let cells: Vec<(Duration, f64)> = columns
                .iter()
                .map(|(_, times)| (middle(times, row), ratio(middle(times, row), middle(times, base))))
                .collect();
            let name = format!("{} ({})", subject.name, subject.model.name);
            if row == base {
                print!("{name:<28}");
                cells
                    .iter()
                    .for_each(|(time, _)| print!("{:>7.2}s", time.as_secs_f64()));
                println!();
            } else {
                print!("{:<28}", subject.name);
                cells.iter().for_each(|(_, ratio)| print!("{ratio:>8.2}"));
                println!(
                    "  {}",
                    subject.target.map_or(String::new(), |target| target.to_string())
                );
            }
            let figures = columns.iter().zip(&cells).map(|((column, _), (time, ratio))| {
                format!(
                    "\"{column}\": {{\"s\": {:.4}, \"ratio\": {ratio:.3}}}",
                    time.as_secs_f64()
                )
            });
            json.push(format!("\"{name}\": {{{}}}", figures.collect::<Vec<_>>().join(", ")));
            row += 1;
        }
    }
    let path = target().join("bench-units.json");
    let text = format!("{{\n  \"rounds\": {rounds},\n  {}\n}}\n", json.join(",\n  "));
    std::fs::write(&path, text).map_err(|error| format!("cannot write {}: {error}", path.display()))?;
    println!("\nwritten to {}", path.display());
    Ok(())
}

/// The times of every subject, in order.
fn times(rounds: usize, config: &dyn Fn(&'static CpuModel) -> MachineConfig) -> Result<Vec<Vec<Duration>>, String> {
    let all = SUBJECTS.iter().flat_map(|group| group.iter());
    let mut subjects: Vec<_> = all
        .map(|subject| move || once(&config(subject.model), subject))
        .collect();
    let mut subjects: Vec<&mut dyn FnMut() -> Result<Duration, String>> =
        subjects.iter_mut().map(|subject| subject as _).collect();
    alternate(rounds, &mut subjects)
}

fn once(config: &MachineConfig, subject: &Subject) -> Result<Duration, String> {
    let failed = |error: minivmm::Error| error.to_string();
    let mut vm = Run::new(config).map_err(failed)?;
    let observer: Option<Box<dyn Watch + Send>> = match subject.watched {
        Watched::Absent | Watched::Nothing => None,
        Watched::Recording => Some(Box::new(Recorder)),
        Watched::Unit(unit) => Some(Box::new(Observer::new(subject.model, &[unit]))),
    };
    if matches!(subject.watched, Watched::Absent) {
        vm.machine().leave_out_units();
    }
    vm.machine().observe(0, observer);
    let mut console = Console::open(&config.serial, &[], vm.line()).map_err(failed)?;
    let (clock, start) = (Instant::now(), processor_time());
    vm.run(&mut console).map_err(failed)?;
    let time = match (start, processor_time()) {
        (Some(start), Some(end)) => end - start,
        _ => clock.elapsed(),
    };
    Ok(time)
}

/// How long this thread has run on a processor, if the host says so.
fn processor_time() -> Option<Duration> {
    let text = std::fs::read_to_string(Path::new("/proc/thread-self/schedstat")).ok()?;
    text.split(' ').next()?.parse().ok().map(Duration::from_nanos)
}
