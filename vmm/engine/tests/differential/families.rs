//! Every family of instructions, form by form.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use engine::{EngineOptions, Vectors};
use iced_x86::{Decoder, DecoderOptions, Instruction};

use crate::arena::{AREAS, CODE, Memory, PAGE};
use crate::compare::{Undefined, differences, memory_differences, report, undefined};
use crate::forms::{Family, Form, forms};
use crate::generate::{Abilities, Case, Generator};
use crate::guest::{self, Guest};
use crate::host::Host;
use crate::rng::Rng;
use crate::skip::skipped;
use crate::state::Outcome;
use crate::vendor;

/// The two machines and what they have done.
pub struct Pair {
    /// The CPU under the test.
    pub host: Host,
    /// The engine.
    pub guest: Guest,
    /// Bytes of code that the last case put down, to be taken away again.
    code: Vec<(u64, usize)>,
    /// Both have AVX-512, and cases use it.
    wide: bool,
}

/// How a case went.
pub enum Verdict {
    /// Alike, and the instruction was executed rather than refused.
    Executed,
    /// Alike: a fault.
    Faulted,
    /// Not alike: the report.
    Differs(String),
}

impl Pair {
    /// Takes the host, and makes a guest like it.
    pub fn take(options: EngineOptions) -> Pair {
        Pair::with(options, guest::model(), false)
    }

    /// The same with AVX-512, where the host has it.
    pub fn take_wide(options: EngineOptions) -> Pair {
        Pair::with(options, guest::wide_model(), crate::forms::wide())
    }

    fn with(options: EngineOptions, model: &'static x86::model::CpuModel, wide: bool) -> Pair {
        let mut pair = Pair {
            host: Host::take(),
            guest: Guest::new(options, model),
            code: Vec::new(),
            wide,
        };
        pair.reset(0);
        pair
    }

    /// What this host has.
    pub fn abilities(&self) -> Abilities {
        Abilities {
            bases: self.host.bases,
            avx: self.host.avx,
            wide: self.wide,
        }
    }

    /// The same memory on both: INT3 for code, data from `seed`.
    pub fn reset(&mut self, seed: u64) {
        let mut rng = Rng::new(seed);
        for (index, area) in AREAS.iter().enumerate() {
            if area.executable {
                self.host.area_mut(index).fill(0xcc);
            } else {
                for chunk in self.host.area_mut(index).chunks_mut(64) {
                    rng.fill(chunk);
                }
            }
        }
        self.copy();
        self.code.clear();
    }

    /// Makes the guest's memory the host's.
    fn copy(&mut self) {
        for (index, area) in AREAS.iter().enumerate() {
            self.guest.area_mut(index).copy_from_slice(self.host.area(index));
            if area.executable {
                self.guest.written(area.start, area.len);
            }
        }
    }

    /// Puts the case into both memories.
    pub fn place(&mut self, pokes: &[(u64, Vec<u8>)]) {
        for (address, len) in std::mem::take(&mut self.code) {
            self.poke(address, &vec![0xcc; len]);
        }
        for (address, bytes) in pokes {
            self.poke(*address, bytes);
            if is_code(*address) {
                self.code.push((*address, bytes.len()));
            }
        }
    }

    fn poke(&mut self, address: u64, bytes: &[u8]) {
        self.host.poke(address, bytes);
        self.guest.poke(address, bytes);
        if is_code(address) {
            let len = (bytes.len() as u64).min(CODE + 2 * PAGE - address);
            self.guest.written(address, len);
        }
    }

    /// Runs a program on both and compares; where it faults, the flags may be between two definitions.
    pub fn compare_program(&mut self, case: &Case, open: &Undefined) -> (Verdict, Option<Outcome>) {
        let (verdict, host) = self.compare(case, open);
        if let (Verdict::Differs(_), Some(host)) = (&verdict, &host)
            && host.vector != 3
        {
            let open = Undefined {
                flags: crate::state::flag::STATUS,
                ..open.clone()
            };
            return self.compare(case, &open);
        }
        (verdict, host)
    }

    /// The instruction at which the host stopped, which in a program is not the first.
    fn last_instruction(&self, host: &Outcome) -> Option<Instruction> {
        let code = self.host.area(0);
        let at = usize::try_from(host.state.linear_rip().checked_sub(CODE)?).ok()?;
        let bytes = code.get(at..)?;
        Some(Decoder::with_ip(host.state.bits(), bytes, host.state.rip, DecoderOptions::NONE).decode())
    }

    /// Runs a case on both and compares.
    pub fn compare(&mut self, case: &Case, open: &Undefined) -> (Verdict, Option<Outcome>) {
        self.place(&case.pokes);
        // The engine goes first: it has a budget, the host would loop for ever.
        let engine = match self.guest.run(&case.state) {
            Ok(outcome) => outcome,
            Err(error) => {
                let found = [format!("the engine does not end in an exception: {error}")];
                self.copy();
                return (Verdict::Differs(report(case, &found, None, Err(&error))), None);
            }
        };
        let host = self.host.run(&case.state);
        if host.vector == crate::host::ENDLESS {
            // Some kernels do not get a signal frame out of a 16-bit stack under 64-bit code; the engine has shown that the
            // case itself ends.
            self.copy();
            return (Verdict::Faulted, None);
        }
        if vendor::excuse(case, &host, &engine).is_some() {
            self.copy();
            return (Verdict::Faulted, Some(host));
        }
        if let Some(instruction) = self.last_instruction(&host)
            && vendor::excuse_fault(&instruction, &host).is_some()
        {
            self.copy();
            return (Verdict::Faulted, Some(host));
        }
        // What is left open in memory stays different, unless the one is copied over the other.
        let mut open = open.clone();
        vendor::open_memory(case, &host, &mut open);
        let mut found = differences(case, &open, &host, &engine);
        if let Some(memory) = memory_differences(case, &host, &open, &self.host, &self.guest) {
            found.push(memory);
        }
        if !open.memory.is_empty() || !found.is_empty() || host.vector != 3 {
            self.copy();
        }
        if !found.is_empty() {
            return (
                Verdict::Differs(report(case, &found, Some(&host), Ok(&engine))),
                Some(host),
            );
        }
        let fault_only = crate::forms::only_faults(case.instruction.code());
        let moved =
            host.state.rip != case.state.rip || host.vector == 3 || fault_only.is_some_and(|v| v == host.vector);
        (if moved { Verdict::Executed } else { Verdict::Faulted }, Some(host))
    }
}

fn is_code(address: u64) -> bool {
    (CODE..CODE + 2 * PAGE).contains(&address)
}

/// `DIFF_SEED`, or a fixed one.
pub fn seed() -> u64 {
    std::env::var("DIFF_SEED")
        .ok()
        .and_then(|text| text.parse().ok())
        .unwrap_or(1)
}

/// `DIFF_SECONDS`: how long each test goes on with new seeds; without it each test makes one round.
pub fn seconds() -> Option<Duration> {
    std::env::var("DIFF_SECONDS")
        .ok()
        .and_then(|text| text.parse().ok())
        .map(Duration::from_secs)
}

/// `DIFF_REPORTS`: how many mismatches are reported at length.
fn reports() -> usize {
    std::env::var("DIFF_REPORTS")
        .ok()
        .and_then(|text| text.parse().ok())
        .unwrap_or(10)
}

/// Mismatches by form, with the first report of each.
#[derive(Default)]
pub struct Findings {
    cases: u64,
    reports: BTreeMap<String, (u64, String)>,
}

impl Findings {
    /// Counts a case.
    pub fn case(&mut self) {
        self.cases += 1;
    }

    /// Notes a mismatch.
    pub fn add(&mut self, name: String, report: String) {
        self.reports.entry(name).or_insert((0, report)).0 += 1;
    }

    /// Fails if there was any.
    pub fn judge(self, what: &str) {
        if self.reports.is_empty() {
            println!("{what}: {} cases alike", self.cases);
            return;
        }
        let mut text = String::new();
        for (name, (count, report)) in self.reports.iter().take(reports()) {
            text += &format!("--- {name}: {count} times, first:\n{report}\n");
        }
        let names: Vec<String> = self
            .reports
            .iter()
            .map(|(name, (count, _))| format!("{name} ({count})"))
            .collect();
        panic!(
            "{what}: {} of {} forms or programs differ\n{text}\n{what}: {}",
            names.len(),
            self.cases,
            names.join(", ")
        );
    }
}

/// The name of a form's run, from which it can be repeated.
fn repeat(form: Form, seed: u64) -> String {
    format!("{:?}/{} DIFF_SEED={seed}", form.code, form.bits)
}

/// Runs a family: about 6000 cases, at least 40 a form. Whether this host has any of it.
fn run(family: Family, bits: u32, options: EngineOptions, findings: &mut Findings) -> bool {
    let pair = if family.wide() {
        Pair::take_wide(options)
    } else {
        Pair::take(options)
    };
    run_with(pair, family, bits, options, findings)
}

/// The same on machines that were made for it.
fn run_with(mut pair: Pair, family: Family, bits: u32, options: EngineOptions, findings: &mut Findings) -> bool {
    if bits == 16 && !pair.host.ldt {
        println!("{family:?}, 16-bit: this kernel has no modify_ldt; the tables cover 16-bit code alone");
        return false;
    }
    let (families, _) = forms(bits, pair.host.amd);
    let Some(forms) = families.get(&family) else {
        assert!(family >= Family::Bmi, "{family:?} has no form in {bits}-bit mode");
        return false;
    };
    let each = (6000 / forms.len() as u64).max(40);
    let only = std::env::var("DIFF_FORM").ok();
    let begin = Instant::now();
    let mut seed = seed();
    loop {
        for form in forms {
            if only.as_ref().is_some_and(|only| format!("{:?}", form.code) != *only) {
                continue;
            }
            let stream = seed.wrapping_mul(0x1_0000_0001).wrapping_add(form.code as u64) ^ u64::from(form.bits) << 32;
            let mut generator = Generator::new(stream, pair.abilities());
            pair.reset(stream);
            for _ in 0..each {
                let Some(case) = (0..20).find_map(|_| generator.case(*form)) else {
                    continue;
                };
                let open = match options.undefined {
                    engine::Undefined::Model => undefined(&case.instruction, &case.state),
                    engine::Undefined::Host => crate::compare::not_even_on_the_host(&case.instruction, &case.state),
                };
                findings.case();
                if let (Verdict::Differs(report), _) = pair.compare(&case, &open) {
                    findings.add(repeat(*form, seed), report);
                }
            }
        }
        seed = seed.wrapping_add(1);
        if seconds().is_none_or(|limit| begin.elapsed() >= limit) {
            return true;
        }
    }
}

/// A family in each of the modes.
fn family(family: Family, modes: &[u32]) {
    run_in(family, modes, EngineOptions::default(), &format!("{family:?}"));
}

/// A family in these modes. Where the host has none of it the test is skipped, which `cargo xtask test` counts.
fn run_in(family: Family, modes: &[u32], options: EngineOptions, name: &str) {
    let mut findings = Findings::default();
    let ran = modes
        .iter()
        .fold(false, |ran, &bits| run(family, bits, options, &mut findings) | ran);
    if !ran {
        let thread = std::thread::current();
        let test = thread.name().and_then(|name| name.rsplit("::").next()).unwrap_or(name);
        skipped(test, &format!("this host's CPU has no {family:?}"));
    }
    findings.judge(name);
}

/// The vector instructions of a family by the engine's tables instead of the host's own.
fn portable(of: Family, modes: &[u32]) {
    let options = EngineOptions {
        vectors: Vectors::Tables,
        ..EngineOptions::default()
    };
    run_in(of, modes, options, &format!("{of:?} by tables"));
}

/// AVX by SSE2 on its halves, and by tables what SSE2 cannot do.
// covers: portable/halves
#[test]
fn halves() {
    let options = EngineOptions {
        vectors: Vectors::Portable,
        ..EngineOptions::default()
    };
    for (family, modes) in [(Family::Avx, &[64, 32, 16][..]), (Family::Avx2, &[64])] {
        run_in(family, modes, options, &format!("{family:?} by halves"));
    }
}

/// A test for each family of vector instructions.
macro_rules! portable {
    ($($name:ident $family:ident)+) => { $(
        #[test]
        fn $name() {
            portable(Family::$family, &[64]);
        }
    )+ };
}

portable! {
    portable_mmx Mmx
    portable_sse Sse
    portable_sse2 Sse2
    portable_sse3 Sse3
    portable_ssse3 Ssse3
    portable_sse41 Sse41
    portable_sse42 Sse42
    portable_aes Aes
    portable_pclmul Pclmul
    portable_sha Sha
    portable_gfni Gfni
    portable_avx Avx
    portable_avx2 Avx2
    portable_fma Fma
    portable_f16c F16c
    portable_vaes Vaes
    portable_opmask Opmask
    portable_avx512f Avx512f
    portable_avx512bw Avx512bw
    portable_avx512dq Avx512dq
    portable_avx512_after_skylake Avx512more
    portable_avx512_half Avx512half
}

/// Outside 64-bit mode: fewer registers, and operands in segments.
// covers: portable/differential
#[test]
fn portable_elsewhere() {
    for family in [Family::Mmx, Family::Sse2, Family::Sse42, Family::Avx, Family::F16c] {
        portable(family, &[32, 16]);
    }
}

// covers: differential/mov, cpu/int-move
#[test]
fn mov() {
    family(Family::Mov, &[64, 32, 16]);
}

// covers: differential/alu, cpu/int-arith, cpu/int-logic
#[test]
fn alu() {
    family(Family::Alu, &[64, 32, 16]);
}

// covers: differential/shift, cpu/int-shift
#[test]
fn shift() {
    family(Family::Shift, &[64, 32, 16]);
}

// covers: differential/muldiv, cpu/int-muldiv
#[test]
fn muldiv() {
    family(Family::MulDiv, &[64, 32, 16]);
}

// covers: differential/bit, cpu/int-logic, cpu/int-v2
#[test]
fn bit() {
    family(Family::Bit, &[64, 32, 16]);
}

// covers: differential/string, cpu/int-string
#[test]
fn string() {
    family(Family::String, &[64, 32, 16]);
}

// covers: differential/stack, cpu/int-stack
#[test]
fn stack() {
    family(Family::Stack, &[64, 32, 16]);
}

// covers: differential/flow, cpu/int-flow
#[test]
fn flow() {
    family(Family::Flow, &[64, 32, 16]);
}

// covers: differential/cond, cpu/int-move
#[test]
fn cond() {
    family(Family::Cond, &[64, 32, 16]);
}

// covers: differential/flags, cpu/int-flags
#[test]
fn flags() {
    family(Family::Flags, &[64, 32, 16]);
}

// covers: differential/xchg, cpu/int-atomic
#[test]
fn xchg() {
    family(Family::Xchg, &[64, 32, 16]);
}

// covers: differential/bcd, cpu/int-bcd
#[test]
fn bcd() {
    family(Family::Bcd, &[32, 16]);
}

// covers: differential/segment, cpu/int-move
#[test]
fn segment() {
    family(Family::Segment, &[64, 32, 16]);
}

// covers: differential/system, cpu/exceptions-privileged
#[test]
fn system() {
    family(Family::System, &[64, 32, 16]);
}

// covers: differential/nop, cpu/int-move
#[test]
fn nop() {
    family(Family::Nop, &[64, 32, 16]);
}

// covers: differential/x87, cpu/x87
#[test]
fn x87() {
    family(Family::X87, &[64, 32, 16]);
}

// covers: differential/mmx, cpu/mmx
#[test]
fn mmx() {
    family(Family::Mmx, &[64, 32, 16]);
}

// covers: differential/sse, cpu/sse
#[test]
fn sse() {
    family(Family::Sse, &[64, 32, 16]);
}

// covers: differential/sse2, cpu/sse2
#[test]
fn sse2() {
    family(Family::Sse2, &[64, 32, 16]);
}

// covers: differential/sse3, cpu/sse3
#[test]
fn sse3() {
    family(Family::Sse3, &[64, 32, 16]);
}

// covers: differential/ssse3, cpu/ssse3
#[test]
fn ssse3() {
    family(Family::Ssse3, &[64, 32, 16]);
}

// covers: differential/sse41, cpu/sse41
#[test]
fn sse41() {
    family(Family::Sse41, &[64, 32, 16]);
}

// covers: differential/sse42, cpu/sse42
#[test]
fn sse42() {
    family(Family::Sse42, &[64, 32, 16]);
}

// covers: differential/aes, cpu/aes
#[test]
fn aes() {
    family(Family::Aes, &[64, 32, 16]);
}

// covers: differential/pclmul, cpu/pclmul
#[test]
fn pclmul() {
    family(Family::Pclmul, &[64, 32, 16]);
}

// covers: differential/fxsave, cpu/fxsave
#[test]
fn fxsave() {
    family(Family::Xsave, &[64, 32, 16]);
}

// covers: differential/bmi, cpu/bmi, cpu/adx
#[test]
fn bmi() {
    family(Family::Bmi, &[64, 32, 16]);
}

// covers: differential/sha, cpu/sha
#[test]
fn sha() {
    family(Family::Sha, &[64, 32, 16]);
}

// covers: differential/gfni, cpu/gfni
#[test]
fn gfni() {
    family(Family::Gfni, &[64, 32, 16]);
}

// covers: differential/avx, cpu/avx
#[test]
fn avx() {
    family(Family::Avx, &[64, 32, 16]);
}

// covers: differential/avx2, cpu/avx2
#[test]
fn avx2() {
    family(Family::Avx2, &[64, 32, 16]);
}

// covers: differential/fma, cpu/fma
#[test]
fn fma() {
    family(Family::Fma, &[64, 32, 16]);
}

// covers: differential/f16c, cpu/f16c
#[test]
fn f16c() {
    family(Family::F16c, &[64, 32, 16]);
}

// covers: differential/vaes, cpu/vaes
#[test]
fn vaes() {
    family(Family::Vaes, &[64, 32, 16]);
}

// covers: differential/xsave, cpu/xsave-machine
#[test]
fn xstate() {
    family(Family::Xstate, &[64, 32, 16]);
}

// covers: differential/opmask, cpu/avx512-opmask
#[test]
fn opmask() {
    family(Family::Opmask, &[64, 32, 16]);
}

// covers: differential/avx512f, cpu/avx512
#[test]
fn avx512f() {
    family(Family::Avx512f, &[64, 32]);
}

// covers: differential/avx512bw, cpu/avx512
#[test]
fn avx512bw() {
    family(Family::Avx512bw, &[64, 32]);
}

// covers: differential/avx512dq, cpu/avx512
#[test]
fn avx512dq() {
    family(Family::Avx512dq, &[64, 32]);
}

// covers: differential/avx512-more, cpu/avx512
#[test]
fn avx512_after_skylake() {
    family(Family::Avx512more, &[64, 32]);
}

// covers: differential/avx512-half, cpu/avx512
#[test]
fn avx512_half() {
    family(Family::Avx512half, &[64, 32]);
}

// covers: differential/vex-zmm, cpu/avx512
#[test]
fn vex_clears_up_to_bit_511() {
    let mut findings = Findings::default();
    for family in [Family::Avx, Family::Avx2, Family::Fma, Family::F16c, Family::Sse2] {
        let pair = Pair::take_wide(EngineOptions::default());
        run_with(pair, family, 64, EngineOptions::default(), &mut findings);
    }
    findings.judge("VEX on a CPU with ZMM registers");
}

// covers: differential/undefined-host
#[test]
fn undefined_results_can_be_the_hosts() {
    // Not the decimal adjustments: a 64-bit host has none to ask.
    let mut findings = Findings::default();
    let options = EngineOptions {
        undefined: engine::Undefined::Host,
        ..EngineOptions::default()
    };
    for family in [Family::Alu, Family::Shift, Family::MulDiv, Family::Bit, Family::Bmi] {
        for bits in [64, 32, 16] {
            run(family, bits, options, &mut findings);
        }
    }
    findings.judge("undefined results of the host");
}

// covers: differential/forms, translate/every-op
#[test]
fn every_form_is_executed() {
    let mut pair = Pair::take(EngineOptions::default());
    for bits in [64, 32, 16] {
        if bits == 16 && !pair.host.ldt {
            continue;
        }
        let (families, left_out) = forms(bits, pair.host.amd);
        let mut executed = 0;
        let mut missing = Vec::new();
        for (family, forms) in &families {
            if family.wide() != pair.wide {
                drop(pair);
                pair = if family.wide() {
                    Pair::take_wide(EngineOptions::default())
                } else {
                    Pair::take(EngineOptions::default())
                };
            }
            for form in forms {
                let mut generator = Generator::new(seed() ^ form.code as u64, pair.abilities());
                pair.reset(form.code as u64);
                let done = (0..400).any(|_| {
                    let Some(case) = generator.case(*form) else {
                        return false;
                    };
                    let open = undefined(&case.instruction, &case.state);
                    matches!(pair.compare(&case, &open), (Verdict::Executed, _))
                });
                if done {
                    executed += 1;
                } else {
                    missing.push(format!("{:?} ({family:?})", form.code));
                }
            }
        }
        println!("{bits}-bit: {executed} forms executed, {} left out:", left_out.len());
        let mut reasons: BTreeMap<&str, Vec<String>> = BTreeMap::new();
        for (form, reason) in left_out {
            reasons.entry(reason).or_default().push(format!("{:?}", form.code));
        }
        for (reason, codes) in reasons {
            println!("  {reason}: {}", codes.join(" "));
        }
        assert!(
            missing.is_empty(),
            "{bits}-bit forms never executed alike: {}",
            missing.join(", ")
        );
        assert!(executed > 1000, "only {executed} forms in {bits}-bit mode");
    }
}
