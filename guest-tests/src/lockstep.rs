//! Two machines in lockstep, one that translates and one that interprets: at each of many steps they are in the same state. Where they
//! are not, the difference is narrowed to the block that made it.

use std::fmt::Write;

use engine::translate::Listing;
use iced_x86::{Decoder, DecoderOptions, Formatter, IntelFormatter};
use minivmm::{Console, MachineConfig, Pages, Run, Snapshot};

/// The longest block that is looked for, in steps.
const LONGEST: u64 = 256;

/// One of the two.
struct Way {
    vm: Run,
    console: Console,
    /// What RAM held when the two were compared last.
    pages: Pages,
    /// It has come to an end.
    ended: Option<String>,
}

impl Way {
    fn new(config: &MachineConfig) -> Way {
        let vm = Run::new(config).expect("the machine is to be had");
        let console = Console::open(&config.serial, &[], vm.line()).expect("a buffer");
        Way {
            vm,
            console,
            pages: Pages::default(),
            ended: None,
        }
    }

    fn go(&mut self, steps: u64) {
        let end = self.vm.run_for(&mut self.console, steps);
        self.ended = match end {
            Ok(end) => end.map(|end| format!("{end:?}")),
            Err(error) => Some(error.to_string()),
        };
    }
}

/// How far the two came together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Equal {
    /// Steps.
    pub steps: u64,
    /// How often they were compared.
    pub compared: u64,
    /// Blocks that the one has translated.
    pub blocks: u64,
    /// What the guest has said.
    pub console: Vec<u8>,
}

/// Two machines of one configuration but for translation.
pub struct Lockstep {
    translated: Way,
    interpreted: Way,
    every: u64,
    /// The last state that both were in.
    equal: Option<Snapshot>,
}

impl Lockstep {
    /// Both at their beginning; they will be compared every so many steps. What runs in the one is translated after so many times.
    ///
    /// # Panics
    /// When the machine is not to be had.
    pub fn new(config: &MachineConfig, after: u32, every: u64) -> Lockstep {
        Lockstep::of(config, config, after, every)
    }

    /// The same of two configurations that differ in what the guest cannot see.
    ///
    /// # Panics
    /// As [`Lockstep::new`].
    pub fn of(translated: &MachineConfig, interpreted: &MachineConfig, after: u32, every: u64) -> Lockstep {
        Lockstep {
            translated: Way::new(&MachineConfig {
                translate_after: Some(after),
                ..translated.clone()
            }),
            interpreted: Way::new(&MachineConfig {
                translate_after: None,
                ..interpreted.clone()
            }),
            every,
            equal: None,
        }
    }

    /// Does something to both machines: the one that translates comes first.
    pub fn both(&mut self, mut f: impl FnMut(&mut Run)) {
        f(&mut self.translated.vm);
        f(&mut self.interpreted.vm);
    }

    /// The one that translates.
    pub fn translated(&mut self) -> &mut Run {
        &mut self.translated.vm
    }

    /// Runs both to their end, or for at least so many steps.
    ///
    /// # Errors
    /// Where they part, as text of many lines: the block, its code on both sides, and what differs after it.
    pub fn run(&mut self, steps: u64) -> Result<Equal, String> {
        if self.equal.is_none() {
            self.equal = Some(self.compare()?);
        }
        let mut compared = 0;
        while self.interpreted.vm.steps() < steps && self.interpreted.ended.is_none() {
            self.translated.go(self.every);
            self.interpreted.go(self.every);
            match self.compare() {
                Ok(state) => self.equal = Some(state),
                Err(difference) => {
                    let from = self.equal.take().ok_or(difference.clone())?;
                    return Err(self.narrow(&from, difference));
                }
            }
            compared += 1;
        }
        Ok(Equal {
            steps: self.interpreted.vm.steps(),
            compared,
            blocks: self.translated.vm.stats().translated.map_or(0, |t| t.blocks),
            console: self.interpreted.console.take_output(),
        })
    }

    /// The state that both are in.
    fn compare(&mut self) -> Result<Snapshot, String> {
        if self.translated.ended != self.interpreted.ended {
            let [ours, theirs] = [&self.translated, &self.interpreted].map(|way| format!("{:?}", way.ended));
            return Err(format!("translated it ends as {ours}, interpreted as {theirs}"));
        }
        let ours = self.translated.vm.save();
        let theirs = self.interpreted.vm.save();
        let mut changed: Vec<u64> = ours.pages.apart(&self.translated.pages).collect();
        changed.extend(theirs.pages.apart(&self.interpreted.pages));
        for gpa in changed {
            if ours.pages.get(gpa) != theirs.pages.get(gpa) {
                return Err(memory(gpa, ours.pages.get(gpa), theirs.pages.get(gpa)));
            }
        }
        beside_memory(&ours, &theirs)?;
        (self.translated.pages, self.interpreted.pages) = (ours.pages, theirs.pages.clone());
        Ok(theirs)
    }

    /// From the state that both were in last to the block that parts them.
    fn narrow(&mut self, from: &Snapshot, first: String) -> String {
        let (begin, end) = (
            from.soft.steps,
            self.interpreted.vm.steps().max(self.translated.vm.steps()),
        );
        let mut text = format!("between steps {begin} and {end}: {first}\n");
        let mut parted = |steps: u64| {
            for way in [&mut self.translated, &mut self.interpreted] {
                way.vm.set_state(from).expect("it is its own");
                way.pages = from.pages.clone();
                way.go(steps);
            }
            self.compare().err()
        };
        let (mut same, mut apart) = (0, end - begin);
        let Some(mut difference) = parted(apart) else {
            return text + "from the state before, the two do not part again";
        };
        while apart - same > 1 {
            let middle = same + (apart - same) / 2;
            match parted(middle) {
                Some(found) => (apart, difference) = (middle, found),
                None => same = middle,
            }
        }
        let _ = writeln!(text, "after step {}: {difference}", begin + apart);
        // Where the budget does not cover a block it is interpreted: so the one that ends here is at fault.
        for steps in 1..=LONGEST.min(apart) {
            self.translated.vm.set_state(from).expect("it is its own");
            self.translated.go(apart - steps);
            let vm = &mut self.translated.vm;
            let cpu = vm.current_cpu();
            let Some(listing) = vm.translation(cpu).filter(|listing| listing.steps == steps) else {
                continue;
            };
            let state = vm.cpu_state(cpu).unwrap_or_default();
            // CS.L and CS.D. SDM Vol. 3A 3.4.5 "Segment Descriptors".
            let bits = match state.segments[engine::CS].attributes {
                attributes if attributes & 1 << 13 != 0 => 64,
                attributes if attributes & 1 << 14 != 0 => 32,
                _ => 16,
            };
            let _ = writeln!(text, "CPU {cpu}, the block of {steps} steps at {:#x}", state.rip);
            return text + &both_codes(&listing, bits, state.rip);
        }
        text + "no translated block ends there"
    }
}

/// CPUs and devices.
fn beside_memory(ours: &Snapshot, theirs: &Snapshot) -> Result<(), String> {
    if (ours.soft.steps, ours.soft.turn) != (theirs.soft.steps, theirs.soft.turn) {
        let [ours, theirs] = [ours, theirs].map(|state| (state.soft.steps, state.soft.turn));
        return Err(format!("translated it is at {ours:?}, interpreted at {theirs:?}"));
    }
    for (cpu, (a, b)) in ours.soft.cpus.iter().zip(&theirs.soft.cpus).enumerate() {
        if a != b {
            return Err(format!("CPU {cpu}:\n{}", lines_that_differ(a, b)));
        }
    }
    if ours.machine != theirs.machine {
        return Err(format!(
            "devices:\n{}",
            lines_that_differ(&ours.machine, &theirs.machine)
        ));
    }
    Ok(())
}

/// The lines of two values that differ: the first ones.
fn lines_that_differ<T: std::fmt::Debug>(ours: &T, theirs: &T) -> String {
    let (ours, theirs) = (format!("{ours:#x?}"), format!("{theirs:#x?}"));
    let pairs = ours.lines().zip(theirs.lines()).filter(|(a, b)| a != b).take(16);
    let texts = pairs.map(|(a, b)| format!("  translated {}  interpreted {}", a.trim(), b.trim()));
    texts.collect::<Vec<_>>().join("\n")
}

fn memory(gpa: u64, ours: Option<&[u8; 4096]>, theirs: Option<&[u8; 4096]>) -> String {
    let [ours, theirs] = [ours, theirs].map(|page| page.unwrap_or(&[0; 4096]));
    let at = ours.iter().zip(theirs).position(|(a, b)| a != b).unwrap_or(0) & !7;
    let [a, b] = [ours, theirs].map(|page| page[at..at + 8].to_vec());
    format!(
        "memory at {:#x}: translated {a:02x?}, interpreted {b:02x?}",
        gpa + at as u64
    )
}

fn both_codes(listing: &Listing, bits: u32, ip: u64) -> String {
    let guest = disassembled(bits, ip, &listing.code);
    let host = disassembled(64, listing.host_at, &listing.host);
    format!("{}\nguest code:\n{guest}host code:\n{host}", listing.block)
}

fn disassembled(bits: u32, ip: u64, code: &[u8]) -> String {
    let mut formatter = IntelFormatter::new();
    let mut text = String::new();
    for instruction in Decoder::with_ip(bits, code, ip, DecoderOptions::NONE) {
        let mut line = String::new();
        formatter.format(&instruction, &mut line);
        let _ = writeln!(text, "  {:x}  {line}", instruction.ip());
    }
    text
}
