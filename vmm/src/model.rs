//! `--cpu-model`: a model by its name or from a file, with features switched, and what `minivmm models NAME` says of it.
//!
//! # A model's file
//! TOML. It starts from a model of ours and changes what it names; numbers are decimal, `0x` hexadecimal, or a string of
//! either (TOML's own integers end at 63 bits). `resources/cpu-model.toml` is an example that names every key.
//!
//! The rows are the part's: what of them a guest sees is decided as for every model ([`x86::model::policy`]).

use std::{
    fmt::Write,
    io::{self, Read},
    path::Path,
};

use serde::{Deserialize, Deserializer, de};
use toml::Spanned;
use x86::{
    cpuid::{Feature, Features, Register},
    model::{CpuModel, CpuidRow, MODELS, ModelError, MsrRow, OwnedModel, policy},
};

use crate::error::Error;
use trace::regular;

/// The longest model file: a dump of every leaf and register there is takes a tenth of it.
const LONGEST: u64 = 1 << 20;

/// The model of a run that asks for none.
pub const DEFAULT: &str = "westmere";
/// The model of a run that asks for none, but for Intel PT: of those that have it and whose parts have no AVX-512, which is slow by
/// tables, the one whose other units are the newest.
pub const DEFAULT_WITH_PT: &str = "alderlake";

/// The model that `--cpu-model` and `--pt` ask for.
///
/// # Errors
/// As for [`find`]; and a model without Intel PT where `pt` is set.
pub fn choose(spec: Option<&str>, pt: bool) -> Result<&'static CpuModel, Error> {
    let model = find(spec.unwrap_or(if pt { DEFAULT_WITH_PT } else { DEFAULT }))?;
    if pt && !model.features().intel_pt() {
        let others = MODELS.iter().filter(|model| model.features().intel_pt());
        let names: Vec<_> = others.map(|model| model.name).collect();
        return Err(Error::Usage(format!(
            "--pt: the CPU model {} has no Intel PT: leave --cpu-model out for {DEFAULT_WITH_PT}, or choose among {}",
            printable(spec.unwrap_or(model.name)),
            names.join(", ")
        )));
    }
    Ok(model)
}

/// The model that `--cpu-model` asks for: a name or a file, and toggles after a comma. A model that is not one of ours lives
/// as long as the program.
///
/// # Errors
/// One line: no such model, a file that cannot be read or does not hold a model, a feature that cannot be switched.
pub fn find(spec: &str) -> Result<&'static CpuModel, Error> {
    let (name, toggles) = match spec.split_once(',') {
        Some((name, toggles)) => (name, Some(toggles)),
        None => (spec, None),
    };
    let ours = || MODELS.iter().find(|model| model.name == name);
    let model = match ours() {
        Some(model) => *model,
        None if name.ends_with(".toml") => from_file(Path::new(name))?,
        None => {
            return Err(Error::Model {
                name: printable(name),
                known: MODELS.iter().map(|m| m.name).collect::<Vec<_>>().join(", "),
            });
        }
    };
    match toggles {
        Some(toggles) => {
            let option = format!("--cpu-model {}", printable(spec));
            model.with_toggles(toggles).map_err(Error::option(option))
        }
        None => Ok(model),
    }
}

fn printable(text: &str) -> String {
    text.replace(char::is_control, "?")
}

fn from_file(path: &Path) -> Result<&'static CpuModel, Error> {
    let file = |source| Error::File {
        option: "--cpu-model",
        path: path.into(),
        source,
    };
    let mut bytes = Vec::new();
    let opened = regular::open(path).map_err(file)?;
    opened.take(LONGEST + 1).read_to_end(&mut bytes).map_err(file)?;
    if bytes.len() as u64 > LONGEST {
        return Err(file(io::Error::other("longer than 1 MiB, so not a CPU model")));
    }
    let text = String::from_utf8(bytes).map_err(|_| file(io::Error::other("not UTF-8, so not TOML")))?;
    let option = format!("--cpu-model {}", printable(&path.display().to_string()));
    parse(&text).map_err(Error::option(option))
}

/// What is wrong with a model's file: a line of it, and there a key.
#[derive(Debug, thiserror::Error)]
pub enum ModelFileError {
    /// Not TOML, or not the keys of a model.
    #[error("line {line}: {message}")]
    Toml {
        /// Counted from 1.
        line: usize,
        /// What the parser says.
        message: String,
    },
    /// `base` names no model.
    #[error("line {line}: base: no such CPU model: {name}")]
    Base {
        /// Counted from 1.
        line: usize,
        /// What it names.
        name: String,
    },
    /// `name` is none.
    #[error("line {line}: name: empty, or with a comma or control character")]
    Name {
        /// Counted from 1.
        line: usize,
    },
    /// A row of CPUID that no part has.
    #[error("line {line}: leaf: neither a basic nor an extended one")]
    Leaf {
        /// Counted from 1.
        line: usize,
    },
    /// A row of an MSR that says too much or too little.
    #[error("line {line}: {source}")]
    Msr {
        /// Counted from 1.
        line: usize,
        /// What is wrong with it.
        source: MsrError,
    },
    /// A value that the model refuses.
    #[error("line {line}: {key}: {source}")]
    Value {
        /// Counted from 1.
        line: usize,
        /// The key.
        key: &'static str,
        /// What is wrong with it.
        source: ModelError,
    },
    /// The whole is no model.
    #[error(transparent)]
    Model(#[from] ModelError),
}

/// What is wrong with a row of an MSR.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MsrError {
    /// A register that is taken away, and described.
    #[error("absent: the register has a name, a value or writable bits as well")]
    Absent,
    /// A register without a value.
    #[error("value: missing")]
    Value,
    /// A register that nobody knows by its number.
    #[error("name: missing, and the number is not a known one")]
    Name,
}

/// The model that a file's text describes.
///
/// # Errors
/// See [`ModelFileError`].
pub fn parse(text: &str) -> Result<&'static CpuModel, ModelFileError> {
    let file: ModelFile = toml::from_str(text).map_err(|error| {
        let line = error.span().map_or(1, |span| line_of(text, span.start));
        let message = printable(&error.message().replace('\n', ", "));
        ModelFileError::Toml { line, message }
    })?;
    let line = |span: std::ops::Range<usize>| line_of(text, span.start);

    let base = file.base.get_ref();
    let Some(base) = MODELS.iter().find(|model| model.name == base) else {
        return Err(ModelFileError::Base {
            line: line(file.base.span()),
            name: printable(base),
        });
    };
    let mut own = OwnedModel::from(*base);
    if file.name.get_ref().is_empty() || file.name.get_ref().contains(|c: char| c.is_control() || c == ',') {
        return Err(ModelFileError::Name {
            line: line(file.name.span()),
        });
    }
    own.name = file.name.into_inner();
    if let Some(description) = file.description {
        own.description = printable(&description);
    }
    own.tsc_khz = file.tsc_khz.map_or(own.tsc_khz, |n| n.0);
    own.apic_timer_khz = file.apic_timer_khz.map_or(own.apic_timer_khz, |n| n.0);
    own.microcode = file.microcode.map_or(own.microcode, |n| n.0);
    for row in file.cpuid {
        let span = row.span();
        let row = row.into_inner();
        own.set_cpuid(row.apply(&own));
        if row.leaf.0 & 0x4000_0000 != 0 {
            return Err(ModelFileError::Leaf { line: line(span) });
        }
    }
    for row in file.msr {
        let line = line(row.span());
        let change = row.into_inner().row();
        match change.map_err(|source| ModelFileError::Msr { line, source })? {
            Change::Set(row) => own.set_msr(row).map_err(|source| ModelFileError::Value {
                line,
                key: "number",
                source,
            })?,
            Change::Remove(msr) => own.remove_msr(msr),
        }
    }
    if let Some(features) = file.features {
        let line = line(features.span());
        own.toggle(features.get_ref()).map_err(|source| ModelFileError::Value {
            line,
            key: "features",
            source,
        })?;
    }
    Ok(own.build()?)
}

/// The number, from 1, of the line that holds the byte at `offset`.
fn line_of(text: &str, offset: usize) -> usize {
    let end = offset.min(text.len());
    text.as_bytes()[..end].iter().filter(|&&byte| byte == b'\n').count() + 1
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct ModelFile {
    base: Spanned<String>,
    name: Spanned<String>,
    description: Option<String>,
    tsc_khz: Option<Number<u32>>,
    apic_timer_khz: Option<Number<u32>>,
    microcode: Option<Number<u32>>,
    features: Option<Spanned<String>>,
    #[serde(default)]
    cpuid: Vec<Spanned<CpuidEntry>>,
    #[serde(default)]
    msr: Vec<Spanned<MsrEntry>>,
}

#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct CpuidEntry {
    leaf: Number<u32>,
    subleaf: Option<Number<u32>>,
    eax: Option<Number<u32>>,
    ebx: Option<Number<u32>>,
    ecx: Option<Number<u32>>,
    edx: Option<Number<u32>>,
}

impl CpuidEntry {
    /// The row with what the entry leaves out taken from the model as it stands.
    fn apply(self, own: &OwnedModel) -> CpuidRow {
        let wanted = self.subleaf.map_or(0, |n| n.0);
        let present = own.part_row(self.leaf.0, wanted);
        let mut row = CpuidRow {
            leaf: self.leaf.0,
            // A leaf that has subleaves keeps them.
            subleaf: match (self.subleaf, present) {
                (Some(subleaf), _) => Some(subleaf.0),
                (None, Some(row)) => row.subleaf,
                (None, None) => None,
            },
            regs: present.map_or([0; 4], |row| row.regs),
        };
        for (register, value) in row.regs.iter_mut().zip([self.eax, self.ebx, self.ecx, self.edx]) {
            *register = value.map_or(*register, |n| n.0);
        }
        row
    }
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct MsrEntry {
    number: Number<u32>,
    name: Option<String>,
    value: Option<Number<u64>>,
    writable: Option<Number<u64>>,
    #[serde(default)]
    ignore_reserved: bool,
    #[serde(default)]
    absent: bool,
}

enum Change {
    Set(MsrRow),
    Remove(u32),
}

impl MsrEntry {
    fn row(self) -> Result<Change, MsrError> {
        let number = self.number.0;
        let says_more = self.name.is_some() || self.value.is_some() || self.writable.is_some() || self.ignore_reserved;
        if self.absent {
            return match says_more {
                true => Err(MsrError::Absent),
                false => Ok(Change::Remove(number)),
            };
        }
        let Some(value) = self.value else {
            return Err(MsrError::Value);
        };
        let name = match self.name {
            Some(name) => &*printable(&name).leak(),
            None => match x86::msr::NAMES.iter().find(|(known, _)| *known == number) {
                Some((_, name)) => name,
                None => return Err(MsrError::Name),
            },
        };
        let writable = self.writable.map_or(0, |n| n.0);
        Ok(Change::Set(match (writable, self.ignore_reserved) {
            (0, false) => MsrRow::read_only(number, name, value.0),
            _ => MsrRow {
                ignore_reserved: self.ignore_reserved,
                ..MsrRow::storage(number, name, value.0, writable)
            },
        }))
    }
}

/// A number: TOML's integer, or a string of decimal or `0x` hexadecimal digits.
#[derive(Clone, Copy, Debug)]
struct Number<T>(T);

impl<'de, T: TryFrom<u64>> Deserialize<'de> for Number<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Visitor;
        impl de::Visitor<'_> for Visitor {
            type Value = u64;
            fn expecting(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
                f.write_str("a number, or a string of decimal or 0x hexadecimal digits")
            }
            fn visit_u64<E: de::Error>(self, number: u64) -> Result<u64, E> {
                Ok(number)
            }
            fn visit_i64<E: de::Error>(self, number: i64) -> Result<u64, E> {
                u64::try_from(number).map_err(|_| E::custom("a negative number"))
            }
            fn visit_str<E: de::Error>(self, text: &str) -> Result<u64, E> {
                crate::parse::parse_u64(&text.replace('_', ""))
                    .ok_or_else(|| E::invalid_value(de::Unexpected::Str(text), &self))
            }
        }
        let number = deserializer.deserialize_any(Visitor)?;
        let bits = size_of::<T>() * 8;
        T::try_from(number)
            .map(Number)
            .map_err(|_| de::Error::custom(format!("{number:#x} has more than {bits} bits")))
    }
}

/// Whether the family and model of a row are those of a part with AVX-512, of which the row hides something: programs that choose
/// code by these two alone take what the model does not execute.
fn dispatched_by_family(model: &CpuModel) -> bool {
    model.part_features().and(engine::AVX512).minus(model.features()) != Features::NONE
}

/// What such programs meet.
const DISPATCH: &str = "this model shows the family and model of a part with AVX-512, but not all of it: programs that choose code by \
                        family and model alone (GCC's target_clones(\"arch=sapphirerapids\")) get #UD where they use what is hidden; \
                        those that ask CPUID for the feature run.";

/// What a model shows and hides, and why, for `minivmm models NAME`.
pub fn details(model: &CpuModel) -> String {
    let mut text = format!("{}  {}\n", model.name, model.description);
    let mut line = |head: &str, body: &str| _ = writeln!(text, "  {head}: {body}");
    line(
        "TSC",
        &format!("{} kHz, APIC timer {} kHz", model.tsc_khz, model.apic_timer_khz),
    );
    line("microcode", &format!("{:#x}", model.microcode));
    line(
        "addresses",
        &format!(
            "{} bits physical, {} linear",
            model.physical_bits(),
            model.linear_bits()
        ),
    );
    let names = |features: Features| features.iter().map(Feature::flag).collect::<Vec<_>>().join(" ");
    line("shows", &names(model.features()));
    let added = model.features().minus(model.part_features());
    if added != Features::NONE {
        line("of that, not the part's", &names(added));
    }
    // Hidden features by reason, in the order of the reasons' first features.
    let hidden = model.part_features().minus(model.features());
    let why = |feature: Feature| match model.removed.has(feature) {
        true => "switched off",
        false => policy::why_hidden(feature).unwrap_or("hidden"),
    };
    let mut reasons: Vec<&str> = Vec::new();
    for feature in hidden.iter() {
        if !reasons.contains(&why(feature)) {
            reasons.push(why(feature));
        }
    }
    for reason in reasons {
        let of_it = hidden
            .iter()
            .filter(|&f| why(f) == reason)
            .fold(Features::NONE, Features::with);
        line(&format!("hides ({reason})"), &names(of_it));
    }
    if dispatched_by_family(model) {
        line("dispatch", DISPATCH);
    }
    for d in model.differences().iter().filter(|d| d.feature.is_none()) {
        let register = match d.register {
            Register::Eax => "EAX",
            Register::Ebx => "EBX",
            Register::Ecx => "ECX",
            Register::Edx => "EDX",
        };
        let place = format!("CPUID.{:02X}H.{:X}:{register}", d.leaf, d.subleaf);
        line(&format!("{place} -{:08X}H +{:08X}H", d.clear, d.set), d.reason);
    }
    text
}

#[cfg(test)]
#[path = "model_test.rs"]
mod tests;
