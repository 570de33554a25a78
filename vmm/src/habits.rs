//! What people type who come from QEMU, or who leave a word out, and what it is called here.

use std::{
    ffi::{OsStr, OsString},
    os::unix::ffi::OsStrExt,
    path::Path,
};

use clap::{
    Command,
    error::{ContextKind, ContextValue, ErrorKind},
};

use crate::{error::Error, parse::one_line};

/// What an option of QEMU's is here.
enum Here {
    /// An option of ours with the same value.
    Option(&'static str),
    /// An option of ours, with what becomes of the value; `None`: there is no such thing here.
    Value(&'static str, fn(&str) -> Option<String>),
    /// These arguments, and no value.
    Switch(&'static [&'static str]),
    /// There is none, for this reason.
    Answer(&'static str),
    /// An option of ours of another form, where this program has it.
    Other(&'static str),
}

/// QEMU's options, by its manual ("Invocation"), that are likely to be typed.
const QEMU: [(&str, Here); 41] = [
    ("-kernel", Here::Option("--kernel")),
    ("-initrd", Here::Option("--initrd")),
    ("-append", Here::Option("--cmdline")),
    ("-smp", Here::Value("--cpus", cpus)),
    ("-cpu", Here::Value("--cpu-model", |name| Some(name.to_lowercase()))),
    ("-hda", Here::Option("--disk")),
    ("-hdb", Here::Option("--disk")),
    ("-hdc", Here::Option("--disk")),
    ("-hdd", Here::Option("--disk")),
    ("-serial", Here::Value("--serial", serial)),
    ("-gdb", Here::Option("--gdb")),
    ("-accel", Here::Value("--engine", accelerator)),
    ("-enable-kvm", Here::Switch(&["--engine", "kvm"])),
    // The console is this terminal, there is no display, and a reset ends the run.
    ("-nographic", Here::Switch(&[])),
    ("--nographic", Here::Switch(&[])),
    ("-no-reboot", Here::Switch(&[])),
    ("-nodefaults", Here::Switch(&[])),
    ("-help", Here::Switch(&["--help"])),
    ("-version", Here::Switch(&["--version"])),
    ("-drive", Here::Answer("a disk is --disk FILE[,overlay|readonly]")),
    (
        "-snapshot",
        Here::Answer("a disk that stays as it is is --disk FILE,overlay"),
    ),
    (
        "-cdrom",
        Here::Answer("there is no CD-ROM drive: --disk FILE,readonly shows the image as a disk"),
    ),
    (
        "-bios",
        Here::Answer("there is no firmware: --kernel FILE is entered directly"),
    ),
    ("-machine", Here::Answer("there is one machine: leave it out")),
    ("-M", Here::Answer("there is one machine: leave it out")),
    (
        "-device",
        Here::Answer("devices are not chosen one by one: --disk, --serial and the others of minivmm --help add them"),
    ),
    ("-display", Here::Answer("there is no display: leave it out")),
    ("-vga", Here::Answer("there is no display: leave it out")),
    (
        "-monitor",
        Here::Answer(
            "the monitor is reached by --control unix:PATH and `minivmm ctl PATH \"monitor LINE\"`, or from gdb",
        ),
    ),
    ("-qmp", Here::Option("--qmp")),
    ("-rtc", Here::Answer("the date of the clock is --rtc-base TIME")),
    (
        "-icount",
        Here::Answer("time that is counted in instructions is --clock virtual"),
    ),
    (
        "-d",
        Here::Answer("what the guest executes is recorded by --trace DIR, and printed by `minivmm trace decode DIR`"),
    ),
    ("-netdev", Here::Other("net")),
    ("-nic", Here::Other("net")),
    ("-net", Here::Other("net")),
    ("-virtfs", Here::Other("share")),
    ("-fsdev", Here::Other("share")),
    ("-name", Here::Answer("a machine has no name: leave it out")),
    (
        "-daemonize",
        Here::Answer("a machine stays in the foreground: start it with `&` and --serial file:PATH"),
    ),
    ("-pidfile", Here::Answer("a machine writes no such file: leave it out")),
];

/// `2`, `2,sockets=1`, `cpus=2,maxcpus=4`: what says how many there are and how they are arranged.
fn cpus(value: &str) -> Option<String> {
    let arranges = |word: &&str| {
        ["sockets=", "cores=", "threads="]
            .iter()
            .any(|name| word.starts_with(name))
    };
    let mut words = value.split(',');
    let first = words.next()?;
    let kept = std::iter::once(first.strip_prefix("cpus=").unwrap_or(first)).chain(words.filter(arranges));
    Some(kept.collect::<Vec<_>>().join(","))
}

/// `mon:stdio` is a console with a monitor, as there always is here.
fn serial(value: &str) -> Option<String> {
    match value.strip_prefix("mon:").unwrap_or(value) {
        "none" => Some("null".into()),
        value => Some(value.to_string()),
    }
}

fn accelerator(value: &str) -> Option<String> {
    match value.split(',').next()? {
        "kvm" => Some("kvm".into()),
        "tcg" => Some("soft".into()),
        _ => None,
    }
}

/// The arguments with QEMU's options called as they are here. What belongs to a subcommand stays.
///
/// # Errors
/// An option that there is not here, with what to write in its place.
pub(crate) fn translated(command: &Command, arguments: Vec<OsString>) -> Result<Vec<OsString>, Error> {
    let first = arguments.get(1).and_then(|first| first.to_str());
    if first.is_some_and(|first| first == "help" || command.find_subcommand(first).is_some()) {
        return Ok(arguments);
    }
    let mut all = Vec::with_capacity(arguments.len());
    let mut arguments = arguments.into_iter();
    while let Some(argument) = arguments.next() {
        if argument == "--" {
            all.push(argument);
            break;
        }
        let known = QEMU.iter().find(|(name, _)| argument == *name);
        match known.map(|(_, here)| here) {
            None => {
                let value = takes_value(command, &argument);
                all.push(argument);
                all.extend(value.then(|| arguments.next()).flatten());
            }
            Some(Here::Switch(ours)) => all.extend(ours.iter().map(OsString::from)),
            Some(Here::Option(ours)) => {
                all.push(ours.into());
                all.extend(arguments.next());
            }
            Some(Here::Value(ours, value)) => {
                all.push(ours.into());
                if let Some(text) = arguments.next() {
                    let wrong = || {
                        Error::Usage(format!(
                            "{} {}: not known here; see {ours}",
                            shown(&argument),
                            shown(&text)
                        ))
                    };
                    all.push(text.to_str().and_then(value).ok_or_else(wrong)?.into());
                }
            }
            Some(Here::Other(ours)) => {
                let text = match command.get_arguments().any(|known| known.get_long() == Some(ours)) {
                    true => format!("it is --{ours} here, of another form: see minivmm --help"),
                    false => "there is no such device here: leave it out".to_string(),
                };
                return Err(Error::Usage(format!("{}: {text}", shown(&argument))));
            }
            Some(Here::Answer(text)) => return Err(Error::Usage(format!("{}: {text}", shown(&argument)))),
        }
    }
    all.extend(arguments);
    Ok(all)
}

/// A word as a line of an error has it.
fn shown(word: &OsStr) -> String {
    word.to_string_lossy().replace(char::is_control, "?")
}

/// The argument is an option whose value is the next one.
fn takes_value(command: &Command, argument: &OsStr) -> bool {
    let Some(text) = argument.to_str() else { return false };
    command.get_arguments().any(|known| {
        let named = match text.strip_prefix("--") {
            Some(name) => {
                let aliases = known.get_all_aliases().unwrap_or_default();
                known.get_long() == Some(name) || aliases.contains(&name)
            }
            None => known.get_short().is_some_and(|short| text == format!("-{short}")),
        };
        named && known.get_action().takes_values() && !known.is_require_equals_set()
    })
}

/// What clap says, on one line, with what may have been meant.
pub(crate) fn explained(error: &clap::Error, alone: bool) -> Error {
    let kind = error.kind();
    if alone && kind == ErrorKind::MissingRequiredArgument {
        return Error::Usage(
            "no kernel is given: minivmm --kernel FILE [OPTIONS]; minivmm --help lists options and subcommands".into(),
        );
    }
    let report = error.to_string();
    let mut line = one_line(&report);
    let word = [ContextKind::InvalidSubcommand, ContextKind::InvalidArg]
        .into_iter()
        .find_map(|kind| match error.get(kind) {
            Some(ContextValue::String(word)) => Some(word),
            _ => None,
        });
    // Behind an option clap takes a word of its own for a subcommand that does not go with it.
    let behind = line
        .strip_prefix("the subcommand '")
        .and_then(|rest| rest.split_once('\''));
    let word = behind.map(|(word, _)| word.to_string()).or(word.cloned());
    let alone = matches!(
        kind,
        ErrorKind::InvalidSubcommand | ErrorKind::UnknownArgument | ErrorKind::ArgumentConflict
    );
    if let Some(word) = word.filter(|word| alone && is_kernel(word)) {
        let word = shown(OsStr::new(&word));
        line = format!("{word}: a kernel is given as --kernel {word}");
    } else {
        let tips = report.lines().filter_map(|line| line.trim().strip_prefix("tip: "));
        // How a word is given that begins with a dash is no answer to an option that there is not.
        for tip in tips.filter(|tip| !tip.contains("use '-- ")) {
            line += &format!(" ({tip})");
        }
    }
    Error::Usage(line)
}

/// It is a file, or called as kernels are.
fn is_kernel(word: &str) -> bool {
    let name = Path::new(word).file_name().unwrap_or_default().as_bytes();
    let called = ["vmlinu", "bzImage", "Image"]
        .iter()
        .any(|begin| name.starts_with(begin.as_bytes()));
    !word.starts_with('-') && (called || Path::new(word).is_file())
}

#[cfg(test)]
#[path = "habits_test.rs"]
mod tests;
