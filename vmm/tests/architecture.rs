//! The walls of the house: which crate may name which, and no circle of imports between the files of a crate.
//!
//! What a file imports is read from its text: `use` lines, and paths that begin with `crate`, `self`, `super` or the name of a
//! module below it. A re-export (`pub use`) is no import: whoever names something through it depends on where it is defined.
//! Tests may name anything.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

/// The crates, from the ground up: where each is, and which of ours it may depend on.
const CRATES: &[(&str, &str, &[&str])] = &[
    ("x86", "devices/x86", &[]),
    ("pt-packet", "devices/pt-packet", &[]),
    ("pt-flow", "devices/pt-flow", &["pt-packet"]),
    ("devices", "devices", &["pt-packet", "x86"]),
    ("engine", "vmm/engine", &["x86"]),
    ("machine", "vmm/machine", &["devices", "engine", "x86"]),
    ("kvm", "vmm/kvm", &["devices", "engine", "machine", "x86"]),
    ("trace", "vmm/trace", &["pt-flow", "pt-packet", "x86"]),
    (
        "minivmm",
        "vmm",
        &[
            "devices",
            "engine",
            "kvm",
            "machine",
            "pt-flow",
            "pt-packet",
            "trace",
            "x86",
        ],
    ),
];

/// The crates in which no two files import each other, however long the way round.
const WITHOUT_CIRCLES: &[&str] = &["machine", "kvm", "trace", "minivmm"];

/// The engine's files that import each other, and why they do.
const ENGINE_CIRCLE: &[(&str, &[&str])] = &[
    (
        "a CPU keeps its decoded blocks, a block its ops, and an op the address of a function over a CPU: the type goes round",
        &["block", "cpu", "op", "shared", "state", "step"],
    ),
    (
        "bytes are decoded through the CPU's own translation, which may fault, and lowering names the function of each op",
        &["frontend", "jumps", "lower", "lower/control", "lower/memory"],
    ),
    (
        "an access belongs to the CPU that makes it: it fills its TLB, may abort its transaction, and tells its watchers",
        &["mem", "mmu", "ram", "segment", "tlb", "transaction", "watch"],
    ),
    (
        "a translation is made of a block's ops and calls their functions, and a block is entered by its translation",
        &["translate", "translate/emit"],
    ),
    (
        "system-management mode is state of a CPU, which saves all of it and takes it on again",
        &["smm"],
    ),
    (
        "VMX operation is state of a CPU, its instructions and VM exits are ops, and EPT and the virtual APIC are under the CPU's accesses",
        &[
            "vmx",
            "vmx/apic",
            "vmx/exit",
            "vmx/instructions",
            "vmx/intercept",
            "vmx/nested",
        ],
    ),
    (
        "the functions of the ops: each works on a CPU and ends by calling that of the next op",
        &[
            "exec",
            "exec/arith",
            "exec/avx",
            "exec/bcd",
            "exec/bit",
            "exec/bmi",
            "exec/cond",
            "exec/evex",
            "exec/exchange",
            "exec/flags",
            "exec/flow",
            "exec/fuse",
            "exec/io",
            "exec/mov",
            "exec/msr",
            "exec/muldiv",
            "exec/portable",
            "exec/segment",
            "exec/shift",
            "exec/simd",
            "exec/stack",
            "exec/string",
            "exec/system",
            "exec/trace",
            "exec/transaction",
            "exec/x87",
            "exec/xsave",
        ],
    ),
];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().into()
}

/// A module's path below its crate, without the crate: empty for the crate's root.
type Module = Vec<String>;

/// The files of a crate.
#[derive(Default)]
struct Crate {
    /// Their text without comments and tests, by module.
    texts: BTreeMap<Module, String>,
    /// What a module has under another name or from elsewhere: the path that it stands for.
    exports: BTreeMap<(Module, String), Vec<String>>,
}

fn rust_files(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            rust_files(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            found.push(path);
        }
    }
}

/// A file's text without what is behind `//`, and up to where its tests begin.
fn bare(text: &str) -> String {
    let begins = |(at, _): &(usize, &str)| text[*at..].lines().nth(1).is_some_and(|line| line.contains("mod "));
    let tests = text.match_indices("#[cfg(test)]").find(begins);
    let code = &text[..tests.map_or(text.len(), |(at, _)| at)];
    let lines = code.lines().map(|line| line.split("//").next().unwrap());
    lines.collect::<Vec<_>>().join("\n")
}

/// The leaves of a tree as `a::{b, c::d}`, each a path.
fn leaves(prefix: &[String], tree: &str, found: &mut Vec<Vec<String>>) {
    let tree = tree.trim();
    let (path, group) = match tree.split_once('{') {
        Some((path, rest)) => (path, rest.rfind('}').map(|end| &rest[..end])),
        None => (tree, None),
    };
    let mut whole = prefix.to_vec();
    let path = path.split(" as ").next().unwrap();
    whole.extend(
        path.split("::")
            .map(str::trim)
            .filter(|part| !part.is_empty())
            .map(String::from),
    );
    let Some(group) = group else {
        found.push(whole);
        return;
    };
    let (mut depth, mut begin) = (0, 0);
    for (at, c) in group.char_indices().chain([(group.len(), ',')]) {
        match c {
            '{' => depth += 1,
            '}' => depth -= 1,
            ',' if depth == 0 => {
                if !group[begin..at].trim().is_empty() {
                    leaves(&whole, &group[begin..at], found);
                }
                begin = at + 1;
            }
            _ => {}
        }
    }
}

/// A `use` item: whether it is a re-export, and its paths.
type Use = (bool, Vec<Vec<String>>);

/// The `use` items of a text, and the text without them.
fn uses(text: &str) -> (Vec<Use>, String) {
    let (mut items, mut rest, mut left) = (Vec::new(), String::new(), text);
    while let Some(at) = left.find("use ") {
        let before = &left[..at];
        let begins = before.is_empty() || before.ends_with(['\n', ' ', ')']);
        let line = before.rsplit('\n').next().unwrap().trim();
        if !begins || !(line.is_empty() || line.starts_with("pub")) {
            rest.push_str(&left[..at + 4]);
            left = &left[at + 4..];
            continue;
        }
        rest.push_str(before);
        let end = left[at..].find(';').map_or(left.len(), |end| at + end);
        let mut paths = Vec::new();
        leaves(&[], &left[at + 4..end], &mut paths);
        items.push((line.starts_with("pub"), paths));
        left = left.get(end + 1..).unwrap_or_default();
    }
    rest.push_str(left);
    (items, rest)
}

/// The paths in a text outside of `use`.
fn paths(text: &str) -> Vec<Vec<String>> {
    let mut found = Vec::new();
    let is_word = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == ':';
    for word in text.split(|c: char| !is_word(c)).filter(|word| word.contains("::")) {
        let parts = word.split("::").filter(|part| !part.is_empty());
        found.push(parts.map(String::from).collect());
    }
    found
}

impl Crate {
    fn read(folder: &Path) -> Crate {
        let source = folder.join("src");
        let mut files = Vec::new();
        rust_files(&source, &mut files);
        let mut this = Crate::default();
        for file in files {
            let relative = file.strip_prefix(&source).unwrap().with_extension("");
            let mut module: Module = relative.iter().map(|part| part.to_str().unwrap().to_string()).collect();
            let name = module.last().unwrap().clone();
            if name.ends_with("_test") || module.iter().any(|part| part == "tests") || module == ["main"] {
                continue;
            }
            if name == "mod" || name == "lib" {
                module.pop();
            }
            this.texts.insert(module, bare(&fs::read_to_string(&file).unwrap()));
        }
        let texts = this.texts.clone();
        for (module, text) in &texts {
            for (public, paths) in uses(text).0 {
                for path in paths.into_iter().filter(|_| public) {
                    let name = path.last().unwrap().clone();
                    if let Some(path) = this.absolute(module, &path) {
                        this.exports.insert((module.clone(), name), path);
                    }
                }
            }
        }
        this
    }

    /// A path from a crate's root; `None` for one that leads out of the crate.
    fn absolute(&self, module: &Module, path: &[String]) -> Option<Vec<String>> {
        let below = |name: &String| {
            let mut child = module.clone();
            child.push(name.clone());
            self.texts.contains_key(&child)
        };
        let (mut base, mut rest) = (module.clone(), path);
        match path.first()?.as_str() {
            "crate" => (base, rest) = (Module::new(), &path[1..]),
            "self" => rest = &path[1..],
            "super" => {
                while rest.first().is_some_and(|part| part == "super") {
                    base.pop();
                    rest = &rest[1..];
                }
            }
            _ if below(&path[0]) => {}
            _ => return None,
        }
        base.extend(rest.iter().filter(|part| *part != "self").cloned());
        Some(base)
    }

    /// The module in which something is defined that has this path.
    fn home(&self, path: &[String], depth: usize) -> Module {
        let mut module = Module::new();
        for (at, part) in path.iter().enumerate() {
            let mut child = module.clone();
            child.push(part.clone());
            if self.texts.contains_key(&child) {
                module = child;
                continue;
            }
            if let Some(target) = self.exports.get(&(module.clone(), part.clone()))
                && depth < 8
            {
                let mut whole = target.clone();
                whole.extend_from_slice(&path[at + 1..]);
                return self.home(&whole, depth + 1);
            }
            break;
        }
        module
    }

    /// Which modules each module imports.
    fn imports(&self) -> BTreeMap<Module, BTreeSet<Module>> {
        let mut imports: BTreeMap<Module, BTreeSet<Module>> = BTreeMap::new();
        for (module, text) in &self.texts {
            let (items, rest) = uses(text);
            let named = items
                .into_iter()
                .filter(|(public, _)| !public)
                .flat_map(|(_, paths)| paths);
            let all = named.chain(paths(&rest));
            let homes = all.filter_map(|path| Some(self.home(&self.absolute(module, &path)?, 0)));
            let others = homes.filter(|home| home != module);
            imports.entry(module.clone()).or_default().extend(others);
        }
        imports
    }
}

/// All nodes that a node leads to.
fn reached<N: Ord + Clone>(graph: &BTreeMap<N, BTreeSet<N>>, from: &N) -> BTreeSet<N> {
    let (mut found, mut open) = (BTreeSet::new(), vec![from.clone()]);
    while let Some(node) = open.pop() {
        for next in graph.get(&node).into_iter().flatten() {
            if found.insert(next.clone()) {
                open.push(next.clone());
            }
        }
    }
    found
}

/// The sets of nodes that all lead to each other.
fn circles<N: Ord + Clone>(graph: &BTreeMap<N, BTreeSet<N>>) -> BTreeSet<BTreeSet<N>> {
    let all: BTreeMap<&N, BTreeSet<N>> = graph.keys().map(|node| (node, reached(graph, node))).collect();
    let back = |node: &N, other: &N| all.get(other).is_some_and(|reached| reached.contains(node));
    let of = |node: &N| {
        all[node]
            .iter()
            .filter(|other| back(node, other))
            .cloned()
            .collect::<BTreeSet<N>>()
    };
    graph.keys().map(of).filter(|circle| !circle.is_empty()).collect()
}

// covers: architecture/no-circles
#[test]
fn no_files_import_each_other_in_a_circle() {
    let mut found = Vec::new();
    for (name, folder, _) in CRATES.iter().filter(|(name, ..)| WITHOUT_CIRCLES.contains(name)) {
        let imports = Crate::read(&root().join(folder)).imports();
        assert!(imports.len() > 10, "{name} has files");
        for circle in circles(&imports) {
            let files: Vec<String> = circle.iter().map(|module| module.join("/")).collect();
            found.push(format!("{name}: {}", files.join(", ")));
        }
    }
    assert!(found.is_empty(), "\n{}", found.join("\n"));
}

// covers: architecture/engine-circles
#[test]
fn the_engines_circles_are_the_argued_ones() {
    let imports = Crate::read(&root().join("vmm/engine")).imports();
    assert!(imports.len() > 10);
    let argued: BTreeSet<&str> = ENGINE_CIRCLE
        .iter()
        .flat_map(|(_, files)| files.iter().copied())
        .collect();
    let found: BTreeSet<String> = circles(&imports)
        .into_iter()
        .flatten()
        .map(|module| module.join("/"))
        .collect();
    let new: Vec<&String> = found.iter().filter(|file| !argued.contains(file.as_str())).collect();
    let gone: Vec<&&str> = argued.iter().filter(|file| !found.contains(**file)).collect();
    assert!(
        new.is_empty() && gone.is_empty(),
        "not argued: {new:?}; in no circle any more: {gone:?}"
    );
}

// covers: architecture/no-circles
#[test]
fn no_folders_import_each_other_in_a_circle() {
    let mut found = Vec::new();
    for (name, folder, _) in CRATES.iter().filter(|(name, ..)| WITHOUT_CIRCLES.contains(name)) {
        let mut folders: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
        for (module, imports) in Crate::read(&root().join(folder)).imports() {
            let of = |module: &Module| module.first().cloned().unwrap_or_default();
            // The crate's root declares them all.
            let others = imports.iter().filter(|other| !other.is_empty()).map(of);
            let own = of(&module);
            let others = others.filter(|other| *other != own);
            folders.entry(own.clone()).or_default().extend(others);
        }
        for circle in circles(&folders) {
            let folders: Vec<String> = circle.into_iter().collect();
            found.push(format!("{name}: {}", folders.join(", ")));
        }
    }
    assert!(found.is_empty(), "\n{}", found.join("\n"));
}

// covers: architecture/no-arrow-up
#[test]
fn no_crate_depends_on_one_above_it() {
    let ours: Vec<&str> = CRATES.iter().map(|(name, ..)| *name).collect();
    for (at, (name, folder, allowed)) in CRATES.iter().enumerate() {
        let text = fs::read_to_string(root().join(folder).join("Cargo.toml")).unwrap();
        let manifest: toml::Table = text.parse().unwrap();
        let none = toml::Table::new();
        let depends = manifest
            .get("dependencies")
            .map_or(&none, |table| table.as_table().unwrap());
        for other in depends.keys().filter(|other| ours.contains(&other.as_str())) {
            assert!(allowed.contains(&other.as_str()), "{name} may not depend on {other}");
            assert!(ours[..at].contains(&other.as_str()), "{name} is listed below {other}");
        }
        for other in allowed.iter() {
            assert!(depends.contains_key(*other), "{name} does not need {other} any more");
        }
    }
}

/// Where an error is a plain text: `Result<…, String>`, whatever stands between.
fn errors_without_a_type(text: &str) -> Vec<String> {
    let squeezed = text.split_whitespace().collect::<Vec<_>>().join(" ");
    let mut found = Vec::new();
    for (at, _) in squeezed.match_indices("Result<") {
        let (mut depth, mut last) = (0, at);
        for (offset, c) in squeezed[at..].char_indices() {
            match c {
                '<' | '(' | '[' => depth += 1,
                ')' | ']' => depth -= 1,
                // Not the arrow of a function's type.
                '>' if !squeezed[..at + offset].ends_with('-') => depth -= 1,
                ',' if depth == 1 => last = at + offset + 1,
                _ => {}
            }
            if depth == 0 && c == '>' && offset > 7 {
                if squeezed[last..at + offset].trim() == "String" {
                    found.push(squeezed[at..=at + offset].to_string());
                }
                break;
            }
        }
    }
    found
}

// covers: architecture/typed-errors
#[test]
fn whoever_meets_an_error_can_tell_it_by_its_type() {
    assert_eq!(
        errors_without_a_type("fn a() -> Result<Vec<u8>, String> {} Result<String, Error> Result<(), Box<Error>>"),
        ["Result<Vec<u8>, String>"]
    );
    assert_eq!(
        errors_without_a_type("fn(impl Fn() -> u8) -> Result< String,\n String>").len(),
        1
    );
    let mut wrong = Vec::new();
    for (name, folder, _) in CRATES {
        let mut files = Vec::new();
        rust_files(&root().join(folder).join("src"), &mut files);
        files.retain(|file| {
            let name = file.file_name().unwrap().to_str().unwrap();
            !(name.ends_with("_test.rs")
                || name == "tests.rs"
                || file.components().any(|part| part.as_os_str() == "tests"))
        });
        assert!(!files.is_empty(), "{name}");
        for file in files {
            let text = bare(&fs::read_to_string(&file).unwrap());
            wrong.extend(
                errors_without_a_type(&text)
                    .into_iter()
                    .map(|what| format!("{}: {what}", file.display())),
            );
        }
    }
    assert!(wrong.is_empty(), "errors that are plain texts:\n{}", wrong.join("\n"));
}

// covers: architecture/no-circles
#[test]
fn the_walk_finds_circles_and_looks_through_re_exports() {
    let mut this = Crate::default();
    let module = |name: &str| {
        name.split('/')
            .filter(|part| !part.is_empty())
            .map(String::from)
            .collect::<Module>()
    };
    for (name, text) in [
        ("", "pub mod a;\npub mod b;\n"),
        ("a", "mod c;\npub use c::Thing;\n"),
        ("a/c", "use crate::b::Other;\n"),
        ("b", "use std::io;\nuse crate::{a::{Thing, self}, };\n"),
    ] {
        this.texts.insert(module(name), bare(text));
    }
    this.exports.insert((module("a"), "Thing".into()), module("a/c/Thing"));
    let imports = this.imports();
    assert_eq!(imports[&module("b")], [module("a"), module("a/c")].into());
    assert_eq!(imports[&module("a")], [].into());
    assert_eq!(circles(&imports), [[module("a/c"), module("b")].into()].into());
    assert!(circles(&BTreeMap::from([(1, BTreeSet::from([2])), (2, BTreeSet::new())])).is_empty());
}

// covers: suite/every-file
#[test]
fn every_file_of_tests_is_a_module_of_its_program() {
    for name in ["vmm", "vmm/engine", "guest-tests"] {
        let folder = root().join(name).join("tests");
        let text = fs::read_to_string(folder.join("main.rs")).unwrap();
        let mut files = 0;
        for entry in fs::read_dir(&folder).unwrap() {
            let path = entry.unwrap().path();
            let stem = path.file_stem().unwrap().to_str().unwrap();
            if path.extension().is_some_and(|extension| extension == "rs") && stem != "main" {
                files += 1;
                let own = format!("mod {stem};\n");
                let renamed = format!("#[path = \"{stem}.rs\"]\nmod ");
                assert!(text.contains(&own) || text.contains(&renamed), "{}", path.display());
            }
        }
        assert!(files > 10, "{name}: {files}");
    }
}
