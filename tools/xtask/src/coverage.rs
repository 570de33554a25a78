//! `resources/coverage.md`: each item with the tests that prove it.
//!
//! The items are data (`resources/coverage-items.txt`). A test names the items it proves in a comment line above it or
//! above a table inside it: `// covers: cli/kernel, exit-status/0`. The scanner reads source text, so that it needs no build.
//!
//! An item whose description ends with words as `@lbr/registers` is proved by these guest tests: they must pass on some CPU model in
//! the expected table of the matrix, and the test that compares with it must hold.

use crate::tree;
use anyhow::{Context, Result, ensure};
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

/// The guest tests' sources: a file a guest.
const GUESTS: &str = "guest-tests/guests/";

const ITEMS: &str = "resources/coverage-items.txt";
const TABLE: &str = "resources/coverage.md";
/// What the guest tests come to, and the test that it is so.
const EXPECTED: &str = "resources/matrix-expected.txt";
const MATRIX_TEST: &str = "the_matrix_is_as_expected";

#[derive(clap::Args)]
pub struct CoverageOptions {
    /// Write nothing; fail where the table on disk differs
    #[arg(long)]
    check: bool,
}

/// One thing that a test must prove.
#[derive(Debug, PartialEq)]
struct Item {
    section: String,
    key: String,
    what: String,
    /// `guest/test`.
    guests: Vec<String>,
}

/// A test function and where it stands.
#[derive(Clone, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub struct Test {
    file: String,
    name: String,
}

/// The result of reading the tree: which tests prove which item, and what is wrong.
pub struct Survey {
    items: Vec<Item>,
    proofs: BTreeMap<String, BTreeSet<Test>>,
    /// Faults of the comments themselves: unknown keys, lines above no test.
    errors: Vec<String>,
}

/// `cargo xtask coverage`.
pub fn run(options: &CoverageOptions) -> Result<()> {
    let survey = survey(tree::root())?;
    if !options.check {
        fs::write(tree::root().join(TABLE), survey.render()).with_context(|| format!("cannot write {TABLE}"))?;
    }
    let faults = check(&survey, None)?;
    ensure!(faults.is_empty(), "{}", faults.join("\n"));
    Ok(())
}

/// Every reason for which the coverage is not complete. `ran` holds the names of the tests that ran and held, if known.
pub fn check(survey: &Survey, ran: Option<&BTreeSet<String>>) -> Result<Vec<String>> {
    let mut faults = survey.errors.clone();
    for item in survey
        .items
        .iter()
        .filter(|item| !survey.proofs.contains_key(&item.key))
    {
        faults.push(format!("{}: no test covers it: {}", item.key, item.what));
    }
    if let Some(ran) = ran {
        let last_words: BTreeSet<&str> = ran
            .iter()
            .map(|name| name.rsplit("::").next().unwrap_or(name))
            .collect();
        for test in survey.proofs.values().flatten().collect::<BTreeSet<_>>() {
            let name = if test.file.starts_with(GUESTS) {
                MATRIX_TEST
            } else {
                test.name.as_str()
            };
            if !last_words.contains(name) {
                faults.push(format!(
                    "{}: test {} is named as a proof but did not run and hold",
                    test.file, test.name
                ));
            }
        }
    }
    if fs::read_to_string(tree::root().join(TABLE)).unwrap_or_default() != survey.render() {
        faults.push(format!("{TABLE} is stale: run `cargo xtask coverage` and commit it"));
    }
    Ok(faults)
}

/// Reads the items and all Rust sources below `root`.
pub fn survey(root: &Path) -> Result<Survey> {
    let text = fs::read_to_string(root.join(ITEMS)).with_context(|| format!("cannot read {ITEMS}"))?;
    let items = parse_items(&text)?;
    let mut survey = Survey {
        items,
        proofs: BTreeMap::new(),
        errors: Vec::new(),
    };
    let mut files = Vec::new();
    sources(root, &mut files)?;
    files.sort();
    for path in files {
        let text = fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
        let name = path.strip_prefix(root).unwrap_or(&path).display().to_string();
        survey.read(&name, &text);
    }
    survey.guest_tests(&fs::read_to_string(root.join(EXPECTED)).unwrap_or_default());
    Ok(survey)
}

/// All `.rs` files below `folder`; build output and dot folders are left out.
fn sources(folder: &Path, files: &mut Vec<PathBuf>) -> Result<()> {
    for entry in fs::read_dir(folder).with_context(|| format!("cannot read {}", folder.display()))? {
        let entry = entry?;
        let path = entry.path();
        let name = entry.file_name();
        if entry.file_type()?.is_dir() {
            if name != "target" && !name.to_string_lossy().starts_with('.') {
                sources(&path, files)?;
            }
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            files.push(path);
        }
    }
    Ok(())
}

/// Reads the item list: `# section` lines, and lines of a key, blanks and a description.
fn parse_items(text: &str) -> Result<Vec<Item>> {
    let mut items: Vec<Item> = Vec::new();
    let mut section = String::new();
    let mut keys = BTreeSet::new();
    for (number, line) in text.lines().enumerate() {
        let line = line.trim_end();
        if let Some(title) = line.strip_prefix('#') {
            section = title.trim().to_string();
        } else if !line.is_empty() {
            let (key, what) = line.split_once(' ').unwrap_or((line, ""));
            let mut words: Vec<&str> = what.split_whitespace().collect();
            let named = words
                .iter()
                .position(|word| word.starts_with('@'))
                .unwrap_or(words.len());
            let guests: Vec<String> = words
                .split_off(named)
                .iter()
                .map(|word| word.trim_start_matches('@').into())
                .collect();
            let what = words.join(" ");
            let formed = key.split_once('/').is_some_and(|(topic, name)| {
                let plain = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
                let starts = topic.starts_with(|first: char| first.is_ascii_lowercase());
                starts && topic.bytes().all(plain) && !name.is_empty() && name.bytes().all(plain)
            });
            ensure!(
                formed,
                "{ITEMS}:{}: `{key}` is not a key such as cli/kernel",
                number + 1
            );
            ensure!(!what.is_empty(), "{ITEMS}:{}: {key} has no description", number + 1);
            ensure!(
                keys.insert(key.to_string()),
                "{ITEMS}:{}: {key} is there twice",
                number + 1
            );
            items.push(Item {
                section: section.clone(),
                key: key.to_string(),
                what,
                guests,
            });
        }
    }
    Ok(items)
}

/// One `covers:` comment: its line (from 0), its keys, and the test it belongs to or why there is none.
#[derive(Debug, PartialEq)]
struct Claim {
    line: usize,
    keys: Vec<String>,
    test: Result<String, &'static str>,
}

/// Finds the `covers:` comments of one source file.
fn claims(text: &str) -> Vec<Claim> {
    let lines: Vec<&str> = text.lines().collect();
    let mut claims = Vec::new();
    for (number, line) in lines.iter().enumerate() {
        let Some(keys) = line.trim_start().strip_prefix("// covers:") else {
            continue;
        };
        let keys = keys
            .split(',')
            .map(|key| key.trim().to_string())
            .filter(|key| !key.is_empty())
            .collect();
        let function = enclosing_function(&lines, number).or_else(|| next_function(&lines, number));
        let test = function.ok_or("no function follows it").and_then(|(at, name)| {
            let attributes = attributes(&lines, at);
            if !attributes.iter().any(|attribute| attribute.starts_with("#[test]")) {
                Err("the function it belongs to is not a #[test]")
            } else if attributes.iter().any(|attribute| attribute.starts_with("#[ignore")) {
                Err("the test it belongs to is ignored")
            } else {
                Ok(name)
            }
        });
        claims.push(Claim {
            line: number,
            keys,
            test,
        });
    }
    claims
}

/// The name that a line's `fn` gives, if the line holds one: not a function pointer's type, not a comment.
fn function_name(line: &str) -> Option<&str> {
    let line = line.trim_start();
    if line.starts_with("//") {
        return None;
    }
    let rest = match line.strip_prefix("fn ") {
        Some(rest) => rest,
        None => line.split_once(" fn ").map(|(_, rest)| rest)?,
    };
    let end = rest
        .find(|c: char| !c.is_alphanumeric() && c != '_')
        .unwrap_or(rest.len());
    let opens = rest[end..].starts_with(['(', '<']);
    (end > 0 && opens).then(|| &rest[..end])
}

fn indent(line: &str) -> usize {
    line.len() - line.trim_start().len()
}

/// The function whose body holds the line `at`, going by the indentation that rustfmt gives.
fn enclosing_function(lines: &[&str], at: usize) -> Option<(usize, String)> {
    let mut depth = indent(lines[at]);
    for number in (0..at).rev() {
        let line = lines[number];
        if line.trim().is_empty() || indent(line) >= depth {
            continue;
        }
        depth = indent(line);
        if let Some(name) = function_name(line) {
            return Some((number, name.to_string()));
        }
        // A closing brace further left than the comment ends whatever stood above it.
        if line.trim_start().starts_with('}') || depth == 0 {
            return None;
        }
    }
    None
}

/// The first function after the line `at`, in the same block.
fn next_function(lines: &[&str], at: usize) -> Option<(usize, String)> {
    let depth = indent(lines[at]);
    for (number, line) in lines.iter().enumerate().skip(at + 1) {
        if !line.trim().is_empty() && indent(line) < depth {
            return None;
        }
        if indent(line) == depth
            && let Some(name) = function_name(line)
        {
            return Some((number, name.to_string()));
        }
    }
    None
}

/// The attributes right above the function at line `at`.
fn attributes<'a>(lines: &[&'a str], at: usize) -> Vec<&'a str> {
    let above = lines[..at].iter().rev().map(|line| line.trim());
    above
        .take_while(|line| line.starts_with("#[") || line.starts_with("//"))
        .filter(|l| l.starts_with("#["))
        .collect()
}

impl Survey {
    /// Takes one source file's comments in.
    fn read(&mut self, file: &str, text: &str) {
        for claim in claims(text) {
            let place = format!("{file}:{}", claim.line + 1);
            if claim.keys.is_empty() {
                self.errors.push(format!("{place}: a `covers:` line without a key"));
            }
            for key in claim.keys {
                if !self.items.iter().any(|item| item.key == key) {
                    self.errors
                        .push(format!("{place}: unknown key {key}: add it to {ITEMS}"));
                    continue;
                }
                match &claim.test {
                    Ok(name) => {
                        let test = Test {
                            file: file.to_string(),
                            name: name.clone(),
                        };
                        self.proofs.entry(key).or_default().insert(test);
                    }
                    Err(why) => self.errors.push(format!("{place}: {key}: {why}")),
                }
            }
        }
    }

    /// Takes in the guest tests that items name, as far as they pass somewhere in the expected table.
    fn guest_tests(&mut self, expected: &str) {
        let passes = |name: &str| {
            let mut lines = expected.lines().filter_map(|line| line.split_once("  "));
            lines.any(|(test, outcome)| test == name && outcome.contains("pass"))
        };
        for item in &self.items {
            for name in &item.guests {
                match name.split_once('/') {
                    Some((guest, test)) if passes(name) => {
                        let file = format!("{GUESTS}{guest}.rs");
                        let test = Test {
                            file,
                            name: test.to_string(),
                        };
                        self.proofs.entry(item.key.clone()).or_default().insert(test);
                    }
                    _ => self.errors.push(format!(
                        "{ITEMS}: {}: {name} passes on no model in {EXPECTED}",
                        item.key
                    )),
                }
            }
        }
    }

    /// How many items there are, and how many of them have a test.
    pub fn totals(&self) -> (usize, usize) {
        (
            self.items.len(),
            self.items
                .iter()
                .filter(|item| self.proofs.contains_key(&item.key))
                .count(),
        )
    }

    /// The table as Markdown.
    fn render(&self) -> String {
        let mut text = String::from("# Coverage\n\n");
        text += "Each item and the tests that prove it. Generated by `cargo xtask coverage` from\n";
        text += "`coverage-items.txt` and the `// covers:` lines above the tests; an item without a test fails `cargo xtask test`.\n";
        let mut section = "";
        for item in &self.items {
            if item.section != section {
                section = &item.section;
                text += &format!("\n## {section}\n\n| item | what | tests |\n|---|---|---|\n");
            }
            let tests = self.proofs.get(&item.key).map_or("**none**".to_string(), |tests| {
                let names: Vec<String> = tests
                    .iter()
                    .map(|test| format!("`{}::{}`", test.file, test.name))
                    .collect();
                names.join("<br>")
            });
            let what = item.what.replace('|', "\\|");
            text += &format!("| `{}` | {what} | {tests} |\n", item.key);
        }
        text
    }
}

#[cfg(test)]
#[path = "coverage_test.rs"]
mod tests;
