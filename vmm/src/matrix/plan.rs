//! Which cells there are: guests by models by engines, and a shard of them.

use std::{
    ffi::OsString,
    fs,
    path::{Path, PathBuf},
    time::Duration,
};

use serde::Deserialize;
use x86::model::{MODELS, topology::Topology};

use super::cell::{PassBy, Plan};
use crate::{config::EngineChoice, error::Error, model, timeline::snapshot_file::SnapshotFile};
use kvm::irqchip::Irqchip;
use machine::loader;
use trace::regular;

/// No kernel and no other file that is read here is longer.
pub const LONGEST: u64 = 1 << 30;

/// What a guest's own file of settings says: `NAME.toml` beside `NAME.elf`, or with a kernel of its own.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Settings {
    /// The kernel, from the file's folder on [default: `NAME.elf`].
    pub kernel: Option<PathBuf>,
    /// The initial RAM disk, likewise.
    pub initrd: Option<PathBuf>,
    /// The command line.
    pub cmdline: Option<String>,
    /// Number of CPUs.
    pub cpus: Option<u8>,
    /// Guest memory, as `--memory` takes it.
    pub memory: Option<String>,
    /// The limit of instructions.
    pub max_instructions: Option<u64>,
    /// How it says that it holds.
    pub pass: Option<PassBy>,
    /// More options of minivmm.
    #[serde(default)]
    pub options: Vec<String>,
}

/// A guest.
#[derive(Clone, Debug)]
pub struct Guest {
    /// Its name in tables.
    pub name: String,
    /// Its settings, with files that can be opened from here.
    pub settings: Settings,
}

impl Guest {
    /// The guest of `--kernel`.
    pub fn of_kernel(kernel: &Path, initrd: Option<&Path>, cmdline: Option<String>) -> Guest {
        let stem = kernel.file_stem().unwrap_or(kernel.as_os_str());
        let settings = Settings {
            kernel: Some(kernel.into()),
            initrd: initrd.map(Path::to_path_buf),
            cmdline,
            ..Settings::default()
        };
        Guest {
            name: name_of(&stem.to_string_lossy()),
            settings,
        }
    }

    fn kernel(&self) -> &Path {
        self.settings.kernel.as_deref().unwrap_or(Path::new(""))
    }
}

/// Names are words of the expected table's lines.
fn name_of(text: &str) -> String {
    text.split(|c: char| c.is_whitespace() || c.is_control() || c == '/')
        .collect::<Vec<_>>()
        .join("_")
}

/// The guests of a folder, by name: every `*.elf`, and every `*.toml` that names a kernel.
///
/// # Errors
/// The folder cannot be read or has none, a file of settings is wrong, a kernel is of no kind that can be loaded.
pub fn guests(folder: &Path) -> Result<Vec<Guest>, Error> {
    let wrong = |path: &Path, source| Error::File {
        option: "--guests",
        path: path.into(),
        source,
    };
    let mut guests: Vec<Guest> = Vec::new();
    for entry in fs::read_dir(folder).map_err(|source| wrong(folder, source))? {
        let path = entry.map_err(|source| wrong(folder, source))?.path();
        let extension = path.extension().and_then(|e| e.to_str()).unwrap_or_default();
        let beside = path.with_extension("toml");
        let file = match extension {
            "elf" if beside.is_file() => continue,
            "elf" => None,
            "toml" => Some(regular::text(&path, LONGEST).map_err(|source| wrong(&path, source))?),
            _ => continue,
        };
        let refuse = |why: String| Error::Usage(format!("--guests {}: {why}", path.display()));
        let mut settings = match file {
            None => Settings::default(),
            Some(text) => toml::from_str::<Settings>(&text).map_err(|error| {
                let line = error
                    .span()
                    .map_or(1, |span| text[..span.start].matches('\n').count() + 1);
                refuse(format!("line {line}: {}", error.message().replace('\n', " ")))
            })?,
        };
        let own = path.with_extension("elf");
        let kernel = match settings.kernel.take() {
            Some(kernel) => folder.join(kernel),
            None if own.is_file() => own,
            None => return Err(refuse("names no `kernel`, and there is none of its name".into())),
        };
        settings.kernel = Some(kernel);
        settings.initrd = settings.initrd.map(|initrd| folder.join(initrd));
        guests.push(Guest {
            name: name_of(&path.file_stem().unwrap_or_default().to_string_lossy()),
            settings,
        });
    }
    if guests.is_empty() {
        let folder = folder.display();
        return Err(Error::Usage(format!("--guests {folder}: no *.elf and no *.toml in it")));
    }
    guests.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(guests)
}

/// Fails in one line where a guest's kernel cannot be one.
///
/// # Errors
/// It cannot be read, or is of no kind that can be loaded.
pub fn check(guest: &Guest, option: &'static str) -> Result<(), Error> {
    let path = guest.kernel();
    let read = regular::open(path).and_then(|file| regular::read(file, LONGEST));
    let bytes = read.map_err(|source| Error::File {
        option,
        path: path.into(),
        source,
    })?;
    loader::check_kind(&bytes).map_err(|source| Error::Image {
        option,
        path: path.into(),
        source,
    })
}

/// The models of `--model`: each as `--cpu-model` takes it, `all` for all that there are.
///
/// # Errors
/// No such model.
pub fn models(wanted: &[String]) -> Result<Vec<String>, Error> {
    let mut models: Vec<String> = Vec::new();
    for word in wanted {
        let these = match word.as_str() {
            "all" => MODELS.iter().map(|model| model.name.to_string()).collect(),
            word => {
                model::find(word)?;
                vec![word.to_string()]
            }
        };
        for model in these {
            if !models.contains(&model) {
                models.push(model);
            }
        }
    }
    Ok(models)
}

/// A part of all cells: `K/N`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shard {
    /// Which, from 1 on.
    pub index: usize,
    /// Of how many.
    pub count: usize,
}

impl std::fmt::Display for Shard {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}/{}", self.index, self.count)
    }
}

/// What is wrong with an option of a matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PlanError {
    /// No shard.
    #[error("not K/N with K from 1 to N, as 2/5 for the second of five parts")]
    Shard,
    /// No name of a section.
    #[error("not a name of letters, digits, `-`, `_` and `.`, as kvm-intel")]
    Name,
}

/// Reads `K/N`.
pub fn parse_shard(text: &str) -> Result<Shard, PlanError> {
    let parts = text.split_once('/');
    let numbers = parts.and_then(|(k, n)| Some((k.parse().ok()?, n.parse().ok()?)));
    match numbers {
        Some((index, count)) if (1..=count).contains(&index) => Ok(Shard { index, count }),
        _ => Err(PlanError::Shard),
    }
}

/// What all cells have in common, unless a guest's settings say otherwise.
#[derive(Clone, Debug)]
pub struct Common {
    /// Number of CPUs.
    pub cpus: Topology,
    /// Memory in bytes.
    pub memory: u64,
    /// The limit of instructions.
    pub max_instructions: u64,
    /// The limit of wall time.
    pub timeout: Duration,
    /// How a guest says that it holds.
    pub pass: PassBy,
    /// All models are wanted: those that cannot run a guest are skipped.
    pub all_models: bool,
    /// The engine's name in reports, where it is not its own.
    pub report_as: Option<String>,
    /// More options of minivmm.
    pub options: Vec<OsString>,
}

/// Reads a name of the expected table's sections.
pub fn parse_name(text: &str) -> Result<String, PlanError> {
    let fits = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    match text.chars().all(fits) && !text.is_empty() {
        true => Ok(text.to_string()),
        false => Err(PlanError::Name),
    }
}

/// The cells of a shard. Cells of one guest follow each other, so that the parts of a slow one fall to different shards.
pub fn cells(
    guests: &[Guest],
    models: &[String],
    engines: &[EngineChoice],
    common: &Common,
    shard: Option<Shard>,
) -> Vec<Plan> {
    let mut all = Vec::new();
    for guest in guests {
        for engine in engines {
            for model in models {
                all.push(cell(guest, model, *engine, common));
            }
        }
    }
    let Some(Shard { index, count }) = shard else {
        return all;
    };
    let mine = all.into_iter().enumerate().filter(|(n, _)| n % count == index - 1);
    mine.map(|(_, plan)| plan).collect()
}

/// The engine's name on the command line.
pub fn engine_name(engine: EngineChoice) -> &'static str {
    match engine {
        EngineChoice::Auto => "auto",
        EngineChoice::Soft => "soft",
        EngineChoice::Kvm => "kvm",
    }
}

fn cell(guest: &Guest, model: &str, engine: EngineChoice, common: &Common) -> Plan {
    let settings = &guest.settings;
    let mut arguments: Vec<OsString> = Vec::new();
    let mut option = |name: &str, value: OsString| arguments.extend([name.into(), value]);
    option("--kernel", guest.kernel().into());
    if let Some(initrd) = &settings.initrd {
        option("--initrd", initrd.into());
    }
    if let Some(cmdline) = &settings.cmdline {
        option("--cmdline", cmdline.into());
    }
    option("--cpu-model", model.into());
    option("--engine", engine_name(engine).into());
    if engine == EngineChoice::Kvm {
        // A table compares units, whose machines have these where one of them is ours.
        option("--irqchip", Irqchip::Minivmm.name().into());
    }
    option(
        "--cpus",
        settings.cpus.map_or(common.cpus, Topology::from).to_string().into(),
    );
    let memory = settings.memory.clone().unwrap_or(common.memory.to_string());
    option("--memory", memory.into());
    option("--serial", "stdio".into());
    option("--clock", "virtual".into());
    // KVM counts none: there the time alone ends what hangs.
    if engine != EngineChoice::Kvm {
        let limit = settings.max_instructions.unwrap_or(common.max_instructions);
        option("--max-instructions", limit.to_string().into());
    }
    option("--timeout", common.timeout.as_secs_f64().to_string().into());
    arguments.extend(settings.options.iter().map(OsString::from));
    arguments.extend(common.options.iter().cloned());
    Plan {
        guest: guest.name.clone(),
        model: model.to_string(),
        engine: common.report_as.clone().unwrap_or(engine_name(engine).to_string()),
        arguments,
        pass: settings.pass.unwrap_or(common.pass),
        one_of_all: common.all_models && MODELS.iter().any(|known| known.name == model),
        timeout: common.timeout,
        command: false,
        input: None,
        skip: None,
    }
}

/// The cells that go on from a snapshot: those of a shard. A model that the snapshot is not of is skipped, with the reason.
///
/// # Errors
/// No such model.
pub fn restored(
    file: &Path,
    snapshot: &SnapshotFile,
    input: Option<&Path>,
    models: &[String],
    engines: &[EngineChoice],
    common: &Common,
    shard: Option<Shard>,
) -> Result<Vec<Plan>, Error> {
    let name = name_of(&file.file_stem().unwrap_or(file.as_os_str()).to_string_lossy());
    let mut all = Vec::new();
    for engine in engines {
        for model in models {
            let mut arguments: Vec<OsString> = vec!["--restore".into(), file.into()];
            let mut option = |name: &str, value: OsString| arguments.extend([name.into(), value]);
            option("--engine", engine_name(*engine).into());
            option("--serial", "stdio".into());
            option("--clock", "virtual".into());
            // Of the whole run, which has begun before the snapshot.
            let limit = snapshot.steps().saturating_add(common.max_instructions);
            option("--max-instructions", limit.to_string().into());
            option("--timeout", common.timeout.as_secs_f64().to_string().into());
            arguments.extend(common.options.iter().cloned());
            let skip = match snapshot.is_of(model::find(model)?) {
                true => None,
                false => Some(format!("the snapshot is of a machine of model {}", snapshot.model())),
            };
            all.push(Plan {
                guest: name.clone(),
                model: model.clone(),
                engine: common.report_as.clone().unwrap_or(engine_name(*engine).to_string()),
                arguments,
                pass: common.pass,
                one_of_all: common.all_models && MODELS.iter().any(|known| known.name == model),
                timeout: common.timeout,
                command: false,
                input: input.map(Path::to_path_buf),
                skip,
            });
        }
    }
    let is_mine = |number: &usize| shard.is_none_or(|shard| number % shard.count == shard.index - 1);
    let mine = all.into_iter().enumerate().filter(|(number, _)| is_mine(number));
    Ok(mine.map(|(_, plan)| plan).collect())
}

/// The cells of a command, which `minivmm run` runs on each model: those of a shard.
pub fn commands(
    command: &[OsString],
    kernel: Option<&Path>,
    models: &[String],
    engines: &[EngineChoice],
    common: &Common,
    shard: Option<Shard>,
) -> Vec<Plan> {
    let name = command.first().map(|name| Path::new(name).file_name().unwrap_or(name));
    let name = name_of(&name.unwrap_or_default().to_string_lossy());
    let each = engines
        .iter()
        .flat_map(|engine| models.iter().map(move |model| (engine, model)));
    let all = each.map(|(engine, model)| {
        let mut arguments: Vec<OsString> = vec!["run".into()];
        let mut option = |name: &str, value: OsString| arguments.extend([name.into(), value]);
        if let Some(kernel) = kernel {
            option("--kernel", kernel.into());
        }
        option("--cpu-model", model.into());
        option("--engine", engine_name(*engine).into());
        option("--cpus", common.cpus.to_string().into());
        option("--memory", common.memory.to_string().into());
        option("--clock", "virtual".into());
        option("--timeout", common.timeout.as_secs_f64().to_string().into());
        arguments.push("--".into());
        arguments.extend(command.iter().cloned());
        Plan {
            guest: name.clone(),
            model: model.clone(),
            engine: common.report_as.clone().unwrap_or(engine_name(*engine).to_string()),
            arguments,
            pass: common.pass,
            one_of_all: common.all_models && MODELS.iter().any(|known| known.name == model),
            timeout: common.timeout,
            command: true,
            input: None,
            skip: None,
        }
    });
    let is_mine = |number: &usize| shard.is_none_or(|shard| number % shard.count == shard.index - 1);
    let mine = all.enumerate().filter(|(number, _)| is_mine(number));
    mine.map(|(_, plan)| plan).collect()
}

#[cfg(test)]
#[path = "plan_test.rs"]
mod tests;
