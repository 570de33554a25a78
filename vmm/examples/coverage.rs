//! Which code of a guest's program runs, as drcov and lcov have it, at these addresses: `... -- KERNEL PROGRAM FIRST END`.

use std::{collections::BTreeMap, error::Error, fs, ops::Range};

use minivmm::observe::{Observer, Place, Wanted};
use minivmm::{Console, MachineConfig, Run, coverage};
use x86::watch::BranchRecord;

/// Where the block began that each CPU is in, and how often blocks ran.
#[derive(Default)]
struct Blocks(BTreeMap<usize, u64>, BTreeMap<(u64, u64), u64>);

impl Observer for Blocks {
    fn wanted(&self) -> Wanted {
        Wanted::branches()
    }

    fn branch(&mut self, place: &Place, branch: &BranchRecord) {
        let end = branch.from + u64::from(branch.length);
        let begin = self.0.insert(place.cpu, branch.to).unwrap_or(end);
        *self.1.entry((begin, end)).or_default() += 1;
    }
}

/// Runs a guest to its end: a drcov and an lcov file of its program.
pub fn cover(config: &MachineConfig, program: &str, code: Range<u64>) -> Result<(Vec<u8>, String), Box<dyn Error>> {
    let mut run = Run::new(config)?;
    let observed = run.observe(Blocks::default());
    run.run(&mut Console::open(&config.serial, &[], run.line())?)?;
    let blocks = &observed.get().1;
    let mut counts = BTreeMap::new();
    for (address, line) in coverage::lines(program, code.clone())? {
        let ran = |((begin, end), count): (&(u64, u64), _)| (*begin..*end).contains(&address).then_some(count);
        let (count, most): (u64, &mut u64) = (blocks.iter().filter_map(ran).sum(), counts.entry(line).or_default());
        *most = count.max(*most);
    }
    let ranges = blocks.keys().map(|(begin, end)| *begin..*end);
    Ok((coverage::drcov(program, &code, ranges), coverage::lcov(&counts)))
}

fn main() -> Result<(), Box<dyn Error>> {
    let words: Vec<String> = std::env::args().collect();
    let code = words[3].parse()?..words[4].parse()?;
    let (drcov, lcov) = cover(&MachineConfig::new(&words[1]), &words[2], code)?;
    Ok(fs::write("coverage.drcov", drcov).and(fs::write("coverage.info", lcov))?)
}
