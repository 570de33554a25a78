//! Which cells there are: guests by models by engines, and a shard of them.

use std::{
    ffi::OsString,
    fs,
    path::{Path, PathBuf},
    time::Duration,
};

use serde::Deserialize;
use x86::model::MODELS;

use super::cell::{PassBy, Plan};
use crate::{config::EngineChoice, error::Error, model};
use kvm::irqchip::Irqchip;
use machine::loader;

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
            "toml" => Some(fs::read_to_string(&path).map_err(|source| wrong(&path, source))?),
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
    let bytes = fs::read(path).map_err(|source| Error::File {
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
    pub cpus: u8,
    /// Memory in bytes.
    pub memory: u64,
    /// The limit of instructions.
    pub max_instructions: u64,
    /// The limit of wall time.
    pub timeout: Duration,
    /// How a guest says that it holds.
    pub pass: PassBy,
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
    option("--cpus", settings.cpus.unwrap_or(common.cpus).to_string().into());
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
        timeout: common.timeout,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn common() -> Common {
        Common {
            cpus: 1,
            memory: 64 << 20,
            max_instructions: 1000,
            timeout: Duration::from_secs(9),
            pass: PassBy::Auto,
            report_as: None,
            options: vec!["--stats".into()],
        }
    }

    fn folder(name: &str, files: &[(&str, &str)]) -> PathBuf {
        let folder = std::env::temp_dir().join(format!("minivmm-matrix-{name}-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        for (name, text) in files {
            fs::write(folder.join(name), text).unwrap();
        }
        folder
    }

    // covers: matrix/guests
    #[test]
    fn a_folder_s_guests_have_their_settings() {
        let files = [
            ("b.elf", ""),
            ("b.toml", "cpus = 4\ncmdline = \"x y\"\nmax-instructions = 7\n"),
            ("a.elf", ""),
            (
                "linux.toml",
                "kernel = \"vmlinuz\"\ninitrd = \"i.cpio\"\nmemory = \"1G\"\npass = \"tap\"\noptions = [\"--seed\", \"3\"]\n",
            ),
            ("notes.txt", ""),
        ];
        let folder = folder("settings", &files);
        let guests = guests(&folder).unwrap();
        let names: Vec<&str> = guests.iter().map(|guest| guest.name.as_str()).collect();
        assert_eq!(names, ["a", "b", "linux"]);
        let cells = cells(&guests, &["p6".into()], &[EngineChoice::Soft], &common(), None);
        let text = |n: usize| -> String {
            let words: Vec<_> = cells[n].arguments.iter().map(|word| word.to_string_lossy()).collect();
            words.join(" ").replace(&*folder.to_string_lossy(), "DIR")
        };
        assert_eq!(
            text(1),
            "--kernel DIR/b.elf --cmdline x y --cpu-model p6 --engine soft --cpus 4 --memory 67108864 --serial stdio \
             --clock virtual --max-instructions 7 --timeout 9 --stats"
        );
        assert_eq!(
            text(2),
            "--kernel DIR/vmlinuz --initrd DIR/i.cpio --cpu-model p6 --engine soft --cpus 1 --memory 1G --serial stdio \
             --clock virtual --max-instructions 1000 --timeout 9 --seed 3 --stats"
        );
        assert_eq!((cells[0].pass, cells[2].pass), (PassBy::Auto, PassBy::Tap));
        fs::remove_dir_all(folder).unwrap();
    }

    // covers: matrix/labs
    #[test]
    fn on_kvm_no_instructions_are_counted_and_a_host_can_have_a_name() {
        let guest = [Guest::of_kernel(Path::new("/x/g"), None, None)];
        let common = Common {
            report_as: Some("kvm-intel".into()),
            ..common()
        };
        let cells = cells(&guest, &["p6".into()], &[EngineChoice::Kvm], &common, None);
        let words: Vec<_> = cells[0].arguments.iter().map(|word| word.to_string_lossy()).collect();
        let text = words.join(" ");
        assert!(
            text.contains("--engine kvm") && !text.contains("--max-instructions"),
            "{text}"
        );
        assert_eq!(cells[0].engine, "kvm-intel");
        for (text, good) in [("kvm-intel", true), ("a]", false), ("a b", false), ("", false)] {
            assert_eq!(parse_name(text).is_ok(), good, "{text:?}");
        }
    }

    // covers: matrix/bad-input
    #[test]
    fn what_is_wrong_with_a_folder_is_said_in_one_line() {
        for (name, files, words) in [
            ("empty", &[("x.txt", "")][..], "no *.elf"),
            (
                "key",
                &[("g.elf", ""), ("g.toml", "cpus = 1\ncpu = 2\n")],
                "g.toml: line 2: unknown field `cpu`",
            ),
            ("lone", &[("g.toml", "cpus = 2\n")], "names no `kernel`"),
        ] {
            let folder = folder(name, files);
            let error = guests(&folder).unwrap_err().to_string();
            assert!(error.contains(words) && error.lines().count() == 1, "{error}");
            fs::remove_dir_all(folder).unwrap();
        }
        let error = guests(Path::new("/nowhere")).unwrap_err().to_string();
        assert_eq!(error, "--guests /nowhere: no such file or directory");
        let guest = Guest::of_kernel(Path::new("/dev/null"), None, None);
        let error = check(&guest, "--kernel").unwrap_err().to_string();
        assert!(
            error.starts_with("--kernel /dev/null: ") && error.lines().count() == 1,
            "{error}"
        );
    }

    // covers: matrix/shard
    #[test]
    fn shards_have_every_cell_once() {
        let guests: Vec<Guest> = ["a", "b c", "d"]
            .map(|name| Guest::of_kernel(&Path::new("/x").join(name), None, None))
            .to_vec();
        assert_eq!(guests[1].name, "b_c");
        let models = models(&["all".into(), "haswell,+rtm".into(), "p6".into()]).unwrap();
        assert_eq!(
            (models.len(), models.last().unwrap().as_str()),
            (MODELS.len() + 1, "haswell,+rtm")
        );
        let engines = [EngineChoice::Soft, EngineChoice::Kvm];
        let names = |shard| -> Vec<String> {
            let cells = cells(&guests, &models, &engines, &common(), shard);
            cells
                .iter()
                .map(|cell| format!("{} {} {}", cell.guest, cell.model, cell.engine))
                .collect()
        };
        let mut parts: Vec<String> = (1..=4)
            .flat_map(|index| names(Some(Shard { index, count: 4 })))
            .collect();
        let mut all = names(None);
        assert_eq!(all.len(), 3 * 2 * models.len());
        parts.sort();
        all.sort();
        assert_eq!(parts, all);
        for (text, shard) in [
            ("1/1", Some((1, 1))),
            ("3/5", Some((3, 5))),
            ("0/5", None),
            ("6/5", None),
            ("1", None),
            ("1/0", None),
            ("a/b", None),
        ] {
            let parsed = parse_shard(text).ok().map(|shard| (shard.index, shard.count));
            assert_eq!(parsed, shard, "{text}");
        }
        assert!(super::models(&["pentium".into()]).is_err());
    }
}
