//! How often pages are written in a range of linear addresses: `cargo run --release --example written_pages -- KERNEL FIRST LAST`.

use std::{collections::BTreeMap, error::Error, ops::RangeInclusive};

use minivmm::observe::{Observer, Place, Wanted, Write};
use minivmm::{Console, MachineConfig, Run};

/// Writes to each page of a range.
struct Pages(RangeInclusive<u64>, BTreeMap<u64, u64>);

impl Observer for Pages {
    fn wanted(&self) -> Wanted {
        Wanted::writes([self.0.clone()])
    }

    fn write(&mut self, _: &Place, write: &Write) {
        *self.1.entry(write.address & !0xfff).or_default() += 1;
    }
}

/// The writes to each page until the guest has ended.
pub fn written(config: &MachineConfig, range: RangeInclusive<u64>) -> Result<BTreeMap<u64, u64>, Box<dyn Error>> {
    let mut run = Run::new(config)?;
    let observed = run.observe(Pages(range, BTreeMap::new()));
    run.run(&mut Console::open(&config.serial, &[], run.line())?)?;
    Ok(std::mem::take(&mut observed.get().1))
}

/// Pages, 64 to a line: a digit for each power of ten.
pub fn map(pages: &BTreeMap<u64, u64>, range: RangeInclusive<u64>) -> String {
    let heat = |page: &u64| {
        pages
            .get(page)
            .map_or('.', |count| char::from(b'0' + count.ilog10() as u8))
    };
    let all: Vec<u64> = range.step_by(1 << 12).collect();
    let line = |line: &[u64]| format!("{:#018x} {}\n", line[0], line.iter().map(heat).collect::<String>());
    all.chunks(64).map(line).collect()
}

fn main() -> Result<(), Box<dyn Error>> {
    let words: Vec<String> = std::env::args().collect();
    let range = words[2].parse()?..=words[3].parse()?;
    let pages = written(&MachineConfig::new(&words[1]), range.clone())?;
    print!("{}", map(&pages, range));
    Ok(())
}
