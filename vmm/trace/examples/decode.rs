//! Decodes a trace directory and says what is in it: `cargo run --release -p minivmm-trace --example decode -- DIR [THREADS]`.

use std::{error::Error, path::Path, time::Instant};

use pt_flow::{Block, Event, EventKind, Visitor};
use trace::{Decode, Trace};

#[derive(Default)]
struct Gaps(Vec<Event>);

impl Visitor for Gaps {
    fn block(&mut self, _: &Block) {}
    fn event(&mut self, event: &Event) {
        if matches!(event.kind, EventKind::Gap(_)) {
            self.0.push(*event);
        }
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let folder = std::env::args_os().nth(1).ok_or("which directory?")?;
    let mut options = Decode::default();
    if let Some(threads) = std::env::args().nth(2) {
        options.threads = threads.parse()?;
    }
    let trace = Trace::open(Path::new(&folder))?;
    for cpu in 0..trace.cpus() {
        let begun = Instant::now();
        let mut shown = 0;
        let summary = trace.decode(
            cpu,
            &options,
            |_| Gaps::default(),
            |gaps, _| {
                for event in gaps.0 {
                    shown += 1;
                    if shown <= 20 {
                        println!("{:#x}: {:?}", event.offset, event.kind);
                    }
                }
            },
        )?;
        println!("CPU {cpu}: {summary:?} in {:?}", begun.elapsed());
    }
    Ok(())
}
