//! Joins what the parts of a recording have gathered of the Linux in it, as [`Recording`](super::recording::Recording) would have in one.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    fs, io,
    path::{Path, PathBuf},
};

use super::{
    guests,
    recording::{MOST_VDSOS, vdso_file},
};
use crate::regular;

/// The longest file that is read.
const LONGEST: u64 = 1 << 30;

/// The lines of a file of each part that has it.
fn texts(parts: &[PathBuf], name: &str) -> io::Result<Vec<String>> {
    let mut texts = Vec::new();
    for part in parts {
        match regular::open_inside(&part.join(name)).and_then(|file| regular::read(file, LONGEST)) {
            Ok(bytes) => texts.push(String::from_utf8_lossy(&bytes).into_owned()),
            Err(error) if error.kind() == io::ErrorKind::NotFound => texts.push(String::new()),
            Err(error) => return Err(error),
        }
    }
    Ok(texts)
}

/// Joins the folders of parts, in order. Where none has one, none is made.
///
/// # Errors
/// The system's.
pub fn join(parts: &[PathBuf], into: &Path) -> io::Result<()> {
    let there: Vec<PathBuf> = parts.iter().filter(|part| part.is_dir()).cloned().collect();
    if there.is_empty() {
        return Ok(());
    }
    regular::create_private_dir(into)?;
    let mut names = BTreeSet::new();
    for part in &there {
        for entry in fs::read_dir(part)? {
            let entry = entry?;
            // Guests have folders.
            if entry.file_type()?.is_file() {
                names.extend(entry.file_name().into_string());
            }
        }
    }
    guests::join(&there, into, &join)?;
    names.remove(guests::GUESTS);
    // Those of vdsos are numbered in each part for itself.
    names.retain(|name| (0..MOST_VDSOS).all(|number| *name != vdso_file(number)));
    vdsos(&there, into)?;
    let (kallsyms, modules) = symbols(&texts(&there, "kallsyms")?, &texts(&there, "modules")?);
    for name in names {
        let text = match name.as_str() {
            "kallsyms" => kallsyms.clone(),
            "modules" => modules.clone(),
            "kernel" => facts(&texts(&there, &name)?),
            "tasks" => tasks(&texts(&there, &name)?),
            // A line for each fact, each of which is said once.
            _ => {
                let mut seen = BTreeSet::new();
                let texts = texts(&there, &name)?;
                let lines = texts.iter().flat_map(|text| text.lines());
                lines
                    .filter(|line| seen.insert(*line))
                    .map(|line| format!("{line}\n"))
                    .collect()
            }
        };
        regular::write_private(&into.join(name), text.as_bytes())?;
    }
    Ok(())
}

/// The facts of the kernel: those of a part that has found it, and whether any part had more than it kept.
fn facts(texts: &[String]) -> String {
    let found = |text: &&String| text.starts_with("banner ");
    let text = texts
        .iter()
        .rfind(found)
        .or(texts.iter().rfind(|text| !text.is_empty()));
    let mut facts: String = text.map_or_else(String::new, |text| {
        text.lines()
            .filter(|line| *line != "cut")
            .map(|line| format!("{line}\n"))
            .collect()
    });
    if texts.iter().any(|text| text.lines().any(|line| line == "cut")) {
        facts += "cut\n";
    }
    facts
}

/// The vdsos, each once, in the order in which they were executed first.
fn vdsos(parts: &[PathBuf], into: &Path) -> io::Result<()> {
    let mut all: Vec<Vec<u8>> = Vec::new();
    for part in parts {
        for number in 0..MOST_VDSOS {
            let bytes = match regular::open_inside(&part.join(vdso_file(number))) {
                Ok(file) => regular::read(file, LONGEST)?,
                Err(error) if error.kind() == io::ErrorKind::NotFound => break,
                Err(error) => return Err(error),
            };
            if all.len() < MOST_VDSOS && !all.contains(&bytes) {
                regular::write_private(&into.join(vdso_file(all.len())), &bytes)?;
                all.push(bytes);
            }
        }
    }
    Ok(())
}

/// The names of page tables, each when it was seen first.
fn tasks(texts: &[String]) -> String {
    let (mut joined, mut names) = (String::new(), HashMap::new());
    for line in texts.iter().flat_map(|text| text.lines()) {
        let mut words = line.splitn(5, ' ');
        let table = words.nth(1);
        let name = (words.nth(1), words.next());
        if names.insert(table, name) != Some(name) {
            joined += line;
            joined.push('\n');
        }
    }
    joined
}

/// The symbols of kernel and modules, and the modules: of each module what the part tells that knew most of its symbols, in the order
/// in which they were seen first.
fn symbols(kallsyms: &[String], modules: &[String]) -> (String, String) {
    let mut kernel = String::new();
    let mut order: Vec<(&str, &str)> = Vec::new();
    let mut known: HashMap<(&str, &str), (Vec<&str>, &str)> = HashMap::new();
    for (symbols, modules) in kallsyms.iter().zip(modules) {
        let mut of_module: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
        let mut own = String::new();
        for line in symbols.lines() {
            match line.rsplit_once('\t') {
                Some((_, module)) => of_module.entry(module).or_default().push(line),
                None => {
                    own += line;
                    own.push('\n');
                }
            }
        }
        if !own.is_empty() {
            kernel = own;
        }
        for line in modules.lines() {
            let mut words = line.split(' ');
            let Some(name) = words.next() else { continue };
            let key = (name, words.nth(4).unwrap_or_default());
            let lines = of_module.remove(format!("[{name}]").as_str()).unwrap_or_default();
            let count = lines.len();
            match known.get(&key) {
                Some((before, _)) if before.len() >= count => {}
                Some(_) => drop(known.insert(key, (lines, line))),
                None => {
                    order.push(key);
                    known.insert(key, (lines, line));
                }
            }
        }
    }
    let mut list = String::new();
    for (lines, module) in order.iter().filter_map(|key| known.get(key)) {
        for line in lines {
            kernel += line;
            kernel.push('\n');
        }
        list += module;
        list.push('\n');
    }
    (kernel, list)
}

#[cfg(test)]
#[path = "join_test.rs"]
mod tests;
