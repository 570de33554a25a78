//! How fast traces are decoded: our flow decoder on one core against libipt's block decoder with a section cache, and two cores
//! against one, on the trace of a walk through a random program about as large as what a kernel executes while it boots, or
//! on a trace and its code from files.
//!
//! `cargo xtask bench --only decode [--rounds N]`; the figures go to target/bench-decode.json too.
//! `cargo bench -p pt-oracle --bench decode -- --trace FILE --code ADDRESS=FILE...` measures another trace.

#[path = "../../src/measure.rs"]
#[allow(dead_code)]
mod measure;

use measure::{alternate, cpu_seconds, median, ratio};
use pt_flow::{Block, Chunks, Decoder, Sections, Summary, Timing, Visitor, decode_parallel};
use pt_oracle::program::{Plan, Program};
use pt_oracle::tracer::Style;
use pt_oracle::{Random, libipt};
use std::cell::Cell;
use std::hint::black_box;
use std::process::ExitCode;
use std::time::{Duration, Instant};

/// Sees all blocks and keeps a digest.
#[derive(Default)]
struct Digest {
    sum: u64,
    instructions: u64,
}

impl Visitor for Digest {
    #[inline]
    fn block(&mut self, block: &Block) {
        self.sum = self.sum.rotate_left(1) ^ block.ip;
        self.instructions += block.count as u64;
    }
}

/// A trace, and the code that it is of.
struct Subject {
    trace: Vec<u8>,
    code: Vec<(u64, Vec<u8>)>,
}

impl Subject {
    fn random() -> Subject {
        let mut random = Random(1);
        let program = Program::new(&mut random, 20_000);
        let plan = Plan {
            style: Style {
                compress_returns: true,
                long_tnt: false,
                defer: false,
                psb_period: 1 << 13,
                timing: false,
            },
            length: 20_000_000,
            events: Some(20),
            ptwrite_ip: true,
        };
        Subject {
            trace: program.walk(&mut random, &plan).trace,
            code: program.sections().map(|(ip, bytes)| (ip, bytes.to_vec())).collect(),
        }
    }

    fn sections(&self) -> Sections<'_> {
        let mut sections = Sections::new();
        self.code.iter().for_each(|(ip, bytes)| sections.add(*ip, bytes));
        sections
    }
}

fn main() -> ExitCode {
    match run(std::env::args().skip(1)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => {
            eprintln!("bench: {message}");
            ExitCode::FAILURE
        }
    }
}

fn run(mut words: impl Iterator<Item = String>) -> Result<(), String> {
    let mut rounds = 5;
    let mut trace = None;
    let mut code = Vec::new();
    let read = |file: &str| std::fs::read(file).map_err(|error| format!("cannot read {file}: {error}"));
    while let Some(word) = words.next() {
        let value = match word.as_str() {
            // What `cargo bench` adds by itself.
            "--bench" => continue,
            _ => words.next().ok_or(format!("{word} wants a value"))?,
        };
        match word.as_str() {
            "--rounds" => {
                rounds = value
                    .parse()
                    .ok()
                    .filter(|rounds| *rounds > 0)
                    .ok_or("--rounds wants a number above zero")?
            }
            "--trace" => trace = Some(read(&value)?),
            "--code" => {
                let (address, file) = value.split_once('=').ok_or("--code wants ADDRESS=FILE")?;
                let address = u64::from_str_radix(address.trim_start_matches("0x"), 16)
                    .map_err(|_| format!("{address} is no address"))?;
                code.push((address, read(file)?));
            }
            _ => return Err(format!("unknown option {word}")),
        }
    }
    let subject = match trace {
        Some(trace) => Subject { trace, code },
        None => Subject::random(),
    };
    measure(&subject, rounds)
}

/// Measures one subject, and adds to the time that it took of all CPUs together: on a machine that others use too, that says more.
fn timed<T>(cpu: &Cell<f64>, work: impl FnOnce() -> Result<T, String>) -> Result<Duration, String> {
    let (start, before) = (Instant::now(), cpu_seconds());
    black_box(work()?);
    cpu.set(cpu.get() + cpu_seconds() - before);
    Ok(start.elapsed())
}

fn measure(subject: &Subject, rounds: usize) -> Result<(), String> {
    let image = libipt::Image::new(subject.code.iter().map(|(ip, bytes)| (*ip, bytes.as_slice())));
    let instructions = Cell::new([0u64; 2]);
    let cpu = [const { Cell::new(0.0) }; 4];
    let mut theirs = || {
        timed(&cpu[0], || {
            let (mut sum, mut count) = (0u64, 0);
            libipt::blocks(&subject.trace, &image, |ip, instructions| {
                sum = sum.rotate_left(1) ^ ip;
                count += instructions as u64;
            })
            .map_err(|error| error.to_string())?;
            instructions.set([instructions.get()[0], count]);
            Ok(sum)
        })
    };
    let chunks = || Chunks::new(subject.trace.as_slice(), 1 << 18, 1 << 27);
    let mut ours = || {
        timed(&cpu[1], || {
            let mut decoder = Decoder::new(subject.sections(), Timing::default());
            let (mut digest, mut sum) = (Digest::default(), Summary::default());
            for chunk in chunks() {
                decoder.decode(&chunk.map_err(|error| error.to_string())?, &mut digest);
                sum += decoder.summary();
            }
            if sum.gaps > 0 {
                return Err(format!("the trace has {} gaps", sum.gaps));
            }
            instructions.set([digest.instructions, instructions.get()[1]]);
            Ok(digest.sum)
        })
    };
    let on = |threads: usize| {
        let cpu = &cpu[1 + threads];
        move || {
            timed(cpu, || {
                let image = || subject.sections();
                decode_parallel(
                    chunks(),
                    threads,
                    Timing::default(),
                    image,
                    |_| Digest::default(),
                    |digest, _| {
                        black_box(digest.sum);
                    },
                )
                .map_err(|error| error.to_string())
            })
        }
    };
    let (mut one, mut two) = (on(1), on(2));
    let times = alternate(rounds, &mut [&mut theirs, &mut ours, &mut one, &mut two])?;
    let [theirs, ours, one, two] = [0, 1, 2, 3].map(|subject| median(&times[subject]));
    let [count, their_count] = instructions.get();
    if count != their_count {
        return Err(format!("we see {count} instructions, libipt sees {their_count}"));
    }
    let megabytes = subject.trace.len() as f64 / 1e6;
    println!(
        "decoding {megabytes:.1} MB of trace, {:.1} M instructions, medians of {rounds}",
        count as f64 / 1e6
    );
    let names = ["libipt blocks", "pt-flow", "1 thread", "2 threads"];
    for ((name, time), cpu) in names.into_iter().zip([theirs, ours, one, two]).zip(&cpu) {
        let seconds = time.as_secs_f64();
        println!(
            "  {name:<14} {seconds:>7.3} s {:>7.1} MB/s {:>5.0} M instructions/s {:>7.3} s of CPUs",
            megabytes / seconds,
            count as f64 / 1e6 / seconds,
            cpu.get() / rounds as f64
        );
    }
    println!("  libipt/pt-flow {:>7.2}", ratio(theirs, ours));
    println!("  1/2 threads    {:>7.2}", ratio(one, two));
    let json = format!(
        "{{\"rounds\": {rounds}, \"bytes\": {}, \"instructions\": {count}, \"libipt_s\": {:.4}, \"pt_flow_s\": {:.4}, \"one_s\": {:.4}, \"two_s\": {:.4}, \"ratio\": {:.3}, \"scaling\": {:.3}}}\n",
        subject.trace.len(),
        theirs.as_secs_f64(),
        ours.as_secs_f64(),
        one.as_secs_f64(),
        two.as_secs_f64(),
        ratio(theirs, ours),
        ratio(one, two)
    );
    let target =
        std::env::var("CARGO_TARGET_DIR").unwrap_or(concat!(env!("CARGO_MANIFEST_DIR"), "/../../target").into());
    let path = std::path::Path::new(&target).join("bench-decode.json");
    std::fs::write(&path, json).map_err(|error| format!("cannot write {}: {error}", path.display()))
}
