//! What traces of a whole Linux boot cost: recording one, and decoding it against libipt's block decoder with a section cache.
//!
//! `cargo xtask bench --only traces [--rounds N]`; the figures go to target/bench-traces.json too. Times are of CPUs, user and system
//! together, since a machine that others use makes seconds lie; only two threads against one are in seconds.

use std::fs;
use std::hint::black_box;
use std::path::Path;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use guest_tests::measure::{cpu_seconds, cpu_seconds_of_children, middle, rounds};
use guest_tests::raw::Raw;
use guest_tests::{Folder, linux_in_minivmm, run, target};
use pt_flow::{Block, Visitor};
use pt_oracle::libipt;
use trace::{Decode, Trace, raw};

const LIMIT: Duration = Duration::from_secs(600);
const CMDLINE: &str = "console=ttyS0 panic=-1 quiet minivmm.script=nothing";

/// Sees all blocks and keeps a digest.
#[derive(Default)]
struct Digest {
    sum: u64,
    instructions: u64,
}

impl Digest {
    fn add(&mut self, ip: u64, instructions: u64) {
        self.sum = self.sum.rotate_left(1) ^ ip;
        self.instructions += instructions;
    }
}

impl Visitor for Digest {
    #[inline]
    fn block(&mut self, block: &Block) {
        self.add(block.ip, block.count.into());
    }
}

fn main() -> ExitCode {
    let folder = Folder::new("bench");
    match rounds(3).and_then(|rounds| measure(&folder, rounds)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => {
            eprintln!("bench: {message}");
            ExitCode::FAILURE
        }
    }
}

fn timed(children: bool, work: impl FnOnce() -> Result<(), String>) -> Result<f64, String> {
    let used = if children { cpu_seconds_of_children } else { cpu_seconds };
    let before = used();
    work()?;
    Ok(used() - before)
}

/// The most memory that this process had resident, in MiB.
fn peak() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    line.and_then(|line| line.trim().strip_suffix(" kB")?.parse::<u64>().ok())
        .unwrap_or(0)
        >> 10
}

fn measure(folder: &Path, rounds: usize) -> Result<(), String> {
    let at = folder.join("trace");
    let boot = |traced: bool| {
        let mut command = linux_in_minivmm(CMDLINE);
        if traced {
            command.arg("--force").arg("--trace").arg(&at);
        }
        let outcome = run(&mut command, LIMIT);
        (outcome.status == Some(0)).then_some(()).ok_or(outcome.errors)
    };
    let (mut plain, mut traced) = (Vec::new(), Vec::new());
    for _ in 0..rounds {
        plain.push(timed(true, || boot(false))?);
        traced.push(timed(true, || boot(true))?);
    }
    let (plain, traced) = (middle(plain), middle(traced));
    println!("boot of Debian's cloud kernel, medians of {rounds}, seconds of CPUs");
    println!(
        "  plain          {plain:>7.2}\n  --trace        {traced:>7.2}\n  ratio          {:>7.2}",
        traced / plain
    );

    let trace = Trace::open(&at).map_err(|error| error.to_string())?;
    let decode = |threads: usize| {
        let options = Decode {
            threads,
            ..Decode::default()
        };
        let mut instructions = 0;
        let make = |_: &_| Digest::default();
        let summary = trace.decode(0, &options, make, |digest, _| {
            black_box(digest.sum);
            instructions += digest.instructions;
        });
        let summary = summary.map_err(|error| error.to_string())?;
        match (summary.flow.gaps, summary.lost) {
            (0, 0) => Ok(instructions),
            gaps => Err(format!("the trace has gaps: {gaps:?}")),
        }
    };
    let instructions = decode(2)?;
    let memory = peak();
    raw::export(&trace, &folder.join("raw"), &mut |_, _| {}).map_err(|error| error.to_string())?;
    let raw = Raw::read(&folder.join("raw"), 0);
    let mut image = libipt::Image::new([]);
    // What libipt takes for a span; its image is made outside of that.
    let mut theirs = || -> Result<(f64, u64), String> {
        let (mut seconds, mut digest) = (0.0, Digest::default());
        for span in &raw.spans {
            for &(cr3, address, page) in &span.pages {
                image.add_file(&raw.pages, page * 4096, 4096, address, cr3);
            }
            let packets = &raw.packets[span.begin..span.end];
            // Hundredths of seconds are too coarse for short ones.
            let start = Instant::now();
            let before = cpu_seconds();
            libipt::blocks(packets, &image, |ip, count| digest.add(ip, count.into()))
                .map_err(|error| error.to_string())?;
            let (wall, cpu) = (start.elapsed().as_secs_f64(), cpu_seconds() - before);
            seconds += if wall < 0.1 { wall } else { cpu };
        }
        black_box(digest.sum);
        Ok((seconds, digest.instructions))
    };
    let (mut libipt_s, mut ours, mut one, mut two) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    for _ in 0..rounds {
        let (seconds, count) = theirs()?;
        libipt_s.push(seconds);
        // Where code changes it walks on a little, without a packet.
        if count.abs_diff(instructions) > instructions / 1000 {
            return Err(format!("we see {instructions} instructions, libipt sees {count}"));
        }
        let start = Instant::now();
        ours.push(timed(false, || decode(1).map(drop))?);
        one.push(start.elapsed().as_secs_f64());
        let start = Instant::now();
        decode(2)?;
        two.push(start.elapsed().as_secs_f64());
    }
    let [libipt_s, ours, one, two] = [libipt_s, ours, one, two].map(middle);
    let bytes = trace.extent(0).end;
    println!(
        "decoding its {:.1} MB of packets, {:.0} M instructions",
        bytes as f64 / 1e6,
        instructions as f64 / 1e6
    );
    println!(
        "  libipt blocks  {libipt_s:>7.2}\n  ours, 1 thread {ours:>7.2}\n  ratio          {:>7.2}",
        libipt_s / ours
    );
    println!("  1/2 threads    {:>7.2} (in seconds: {one:.2}, {two:.2})", one / two);
    println!("  peak memory    {memory:>7} MiB");
    let json = format!(
        "{{\"rounds\": {rounds}, \"boot_s\": {plain:.2}, \"traced_s\": {traced:.2}, \"trace_ratio\": {:.3}, \"bytes\": {bytes}, \"instructions\": {instructions}, \"libipt_s\": {libipt_s:.2}, \"ours_s\": {ours:.2}, \"ratio\": {:.3}, \"scaling\": {:.3}, \"peak_mib\": {memory}}}\n",
        traced / plain,
        libipt_s / ours,
        one / two,
    );
    let path = target().join("bench-traces.json");
    fs::write(&path, json).map_err(|error| format!("cannot write {}: {error}", path.display()))
}
