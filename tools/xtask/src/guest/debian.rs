//! Debian packages without installing them: which one, fetch it, unpack it.

use crate::packages::{as_root, find_program, on_debian};
use crate::progress::Stage;
use anyhow::{Context, Result, ensure};
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The package that depends on the newest cloud kernel.
const METAPACKAGE: &str = "linux-image-cloud-amd64";

/// The kernel's place in the order of versions, where `package` is a 6.1 cloud kernel: `linux-image-6.1.0-56-cloud-amd64`.
fn kernel_build(package: &str) -> Option<u32> {
    package
        .strip_prefix("linux-image-6.1.0-")?
        .strip_suffix("-cloud-amd64")?
        .parse()
        .ok()
}

/// The newest 6.1 cloud kernel among the words of apt-cache's answers.
fn newest_kernel(text: &str) -> Option<String> {
    text.split_whitespace()
        .filter_map(|word| Some((kernel_build(word)?, word)))
        .max()
        .map(|(_, word)| word.to_string())
}

/// Where fetched packages are kept: outside the working tree, so that a second clone needs no network.
fn cache() -> PathBuf {
    let own = |name: &str| {
        std::env::var_os(name)
            .filter(|value| !value.is_empty())
            .map(PathBuf::from)
    };
    match (own("XDG_CACHE_HOME"), own("HOME")) {
        (Some(cache), _) => cache.join("minivmm"),
        (None, Some(home)) => home.join(".cache/minivmm"),
        (None, None) => crate::tree::target().join("cache"),
    }
}

/// The architecture of what runs here, as Debian calls it.
const OWN: &str = "amd64";

/// The newest package file of `folder` whose name starts with `prefix`, of our own architecture.
fn newest_package_file(folder: &Path, prefix: &str) -> Option<PathBuf> {
    newest_package_file_for(folder, prefix, OWN)
}

/// The same of any architecture, or of all: `busybox-static_1%3a1.35.0-4_i386.deb`.
fn newest_package_file_for(folder: &Path, prefix: &str, architecture: &str) -> Option<PathBuf> {
    let ends = [architecture, "all"].map(|of| format!("_{of}.deb"));
    let files = fs::read_dir(folder).ok()?.filter_map(|entry| Some(entry.ok()?.path()));
    let ours = files.filter(|file| {
        let name = file.file_name().and_then(OsStr::to_str).unwrap_or_default();
        name.starts_with(prefix) && ends.iter().any(|end| name.ends_with(end))
    });
    ours.max_by_key(|file| {
        let name = file.file_name().and_then(OsStr::to_str).unwrap_or_default().to_string();
        (kernel_build(name.split('_').next().unwrap_or_default()), name)
    })
}

/// Runs apt-cache and gives what it prints.
fn apt_cache(arguments: &[&str]) -> String {
    apt_output("apt-cache", arguments)
}

/// The same of another of apt's programs.
pub fn apt_output(program: &str, arguments: &[&str]) -> String {
    output_of(Command::new(program).args(arguments))
}

fn output_of(command: &mut Command) -> String {
    let output = command.env("LC_ALL", "C").output();
    output
        .map(|output| String::from_utf8_lossy(&output.stdout).into_owned())
        .unwrap_or_default()
}

/// The name of the newest 6.1 cloud kernel that apt knows of.
fn resolve_kernel() -> Option<String> {
    // Where the metapackage has moved on to a later series, the older packages may still be there by name.
    newest_kernel(&apt_cache(&["depends", METAPACKAGE]))
        .or_else(|| newest_kernel(&apt_cache(&["pkgnames", "linux-image-6.1.0-"])))
}

/// The word with the highest number between a prefix and a suffix.
fn highest<'a>(words: impl Iterator<Item = &'a str>, prefix: &str, suffix: &str) -> Option<&'a str> {
    let number = |word: &str| -> Option<u32> { word.strip_prefix(prefix)?.strip_suffix(suffix)?.parse().ok() };
    let numbered = words.filter_map(|word| Some((number(word)?, word)));
    numbered.max().map(|(_, word)| word)
}

/// The file of the package whose name has the highest number between a prefix and a suffix: one fetched before, or fetched now.
pub fn highest_package_file(stage: &Stage, prefix: &str, suffix: &str) -> Result<PathBuf> {
    let cache = cache();
    let files: Vec<PathBuf> = fs::read_dir(&cache)
        .map(|entries| entries.filter_map(|entry| Some(entry.ok()?.path())).collect())
        .unwrap_or_default();
    let names = files
        .iter()
        .filter_map(|file| file.file_name()?.to_str()?.split('_').next());
    if let Some(name) = highest(names, prefix, suffix)
        && let Some(file) = newest_package_file(&cache, &format!("{name}_"))
    {
        return Ok(file);
    }
    let what = format!("{prefix}*{suffix}");
    let names = fetch(stage, &what, || {
        let known = apt_cache(&["pkgnames", prefix]);
        Some(vec![highest(known.split_whitespace(), prefix, suffix)?.to_string()])
    })?;
    let name = names.first().context("nothing was downloaded")?;
    newest_package_file(&cache, &format!("{name}_")).with_context(|| format!("{what} was downloaded but is not there"))
}

/// apt with suites of its own beside the system's.
pub struct Apt {
    configuration: PathBuf,
}

impl Apt {
    /// With this list of sources. Its files are among the fetched packages.
    pub fn beside_the_system(sources: &str) -> Result<Apt> {
        let folder = cache().join("apt");
        for part in ["state/lists/partial", "cache/archives/partial"] {
            let part = folder.join(part);
            fs::create_dir_all(&part).with_context(|| format!("cannot make {}", part.display()))?;
        }
        let at = folder.display();
        let text = format!(
            "Dir::Etc::sourcelist \"{at}/sources.list\";\nDir::Etc::sourceparts \"-\";\nDir::State \"{at}/state\";\n\
             Dir::State::status \"{at}/status\";\nDir::Cache \"{at}/cache\";\nAcquire::Languages \"none\";\n\
             Acquire::IndexTargets::deb::DEP-11::DefaultEnabled \"false\";\nAPT::Architectures {{ \"amd64\"; \"i386\"; }};\n"
        );
        let configuration = folder.join("apt.conf");
        super::write_changed(&configuration, text.as_bytes())?;
        super::write_changed(&folder.join("sources.list"), sources.as_bytes())?;
        super::write_changed(&folder.join("status"), b"")?;
        Ok(Apt { configuration })
    }

    /// Fetches the lists that can be had.
    pub fn update(&self, stage: &Stage) -> Result<()> {
        let mut command = Command::new("apt-get");
        command
            .args(["-q", "update"])
            .env("LC_ALL", "C")
            .env("APT_CONFIG", &self.configuration);
        stage.run(&mut command, None, |_| {}).map(drop)
    }

    /// Runs apt-cache and gives what it prints.
    pub fn cache(&self, arguments: &[&str]) -> String {
        output_of(
            Command::new("apt-cache")
                .args(arguments)
                .env("APT_CONFIG", &self.configuration),
        )
    }

    /// The file of a package, which may be of another architecture, `busybox-static:i386`, or of one of the suites, `bochs/trixie`.
    pub fn package_file(&self, stage: &Stage, name: &str) -> Result<PathBuf> {
        let (package, architecture) = parts(name);
        let prefix = format!("{package}_");
        ensure!(
            download(stage, &[name.to_string()], Some(&self.configuration))?,
            "cannot download {name}: is there a network?"
        );
        newest_package_file_for(&cache(), &prefix, architecture)
            .with_context(|| format!("{name} was downloaded but is not there"))
    }
}

/// A package's own name and its architecture, as `apt-get download` takes them: `busybox-static:i386`, `bochs/trixie`.
fn parts(name: &str) -> (&str, &str) {
    let (name, _suite) = name.split_once('/').unwrap_or((name, ""));
    name.split_once(':').unwrap_or((name, OWN))
}

/// Fetches packages into the cache with `apt-get download`, all or none; false where apt could not.
fn download(stage: &Stage, names: &[String], configuration: Option<&Path>) -> Result<bool> {
    let cache = cache();
    // A folder of its own until the files are whole, so that a broken download is never taken for a package.
    let folder = cache.join(format!("part-{}", std::process::id()));
    fs::create_dir_all(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
    let mut command = Command::new("apt-get");
    command
        .args(["-q", "download"])
        .args(names)
        .current_dir(&folder)
        .env("LC_ALL", "C");
    if let Some(file) = configuration {
        command.env("APT_CONFIG", file);
    }
    let status = stage.run(&mut command, None, |_| {})?;
    let whole = status.success()
        && names.iter().all(|name| {
            let (package, architecture) = parts(name);
            newest_package_file_for(&folder, &format!("{package}_"), architecture).is_some()
        });
    if whole {
        for entry in fs::read_dir(&folder)? {
            let entry = entry?;
            fs::rename(entry.path(), cache.join(entry.file_name()))
                .context("cannot move the package into the cache")?;
        }
    }
    fs::remove_dir_all(&folder).with_context(|| format!("cannot remove {}", folder.display()))?;
    Ok(whole)
}

/// Fetches what `names` gives. A fresh machine has no package lists, an old one names files that are gone: the lists are
/// fetched only in those cases, and then `names` is asked once more.
fn fetch(stage: &Stage, what: &str, names: impl Fn() -> Option<Vec<String>>) -> Result<Vec<String>> {
    ensure!(
        on_debian(),
        "{what} is not here, and only Debian's own tools can fetch it"
    );
    if let Some(names) = names()
        && download(stage, &names, None)?
    {
        return Ok(names);
    }
    stage.must(&mut as_root(stage, "apt-get", &["-q", "update"])?)?;
    let names = names().with_context(|| format!("apt knows no package for {what}"))?;
    ensure!(
        download(stage, &names, None)?,
        "cannot download {what}: is there a network?"
    );
    Ok(names)
}

/// The file of a package: the one fetched before, or fetched now with `apt-get download`. `name` gives the package's name
/// once the lists are there; `prefix` is how its file's name starts.
pub fn package_file(stage: &Stage, prefix: &str, what: &str, name: impl Fn() -> Option<String>) -> Result<PathBuf> {
    let cache = cache();
    let elsewhere = Path::new("/var/cache/apt/archives");
    if let Some(file) = newest_package_file(&cache, prefix).or_else(|| newest_package_file(elsewhere, prefix)) {
        return Ok(file);
    }
    fetch(stage, what, || Some(vec![name()?]))?;
    newest_package_file(&cache, prefix).with_context(|| format!("{what} was downloaded but is not there"))
}

/// Whether a package was fetched before or apt knows one of this name, if need be once its lists are new.
pub fn can_be_had(stage: &Stage, name: &str) -> Result<bool> {
    let known = || apt_cache(&["pkgnames", name]).lines().any(|known| known == name);
    if newest_package_file(&cache(), &format!("{name}_")).is_some() || known() {
        return Ok(true);
    }
    if !on_debian() {
        return Ok(false);
    }
    stage.must(&mut as_root(stage, "apt-get", &["-q", "update"])?)?;
    Ok(known())
}

/// What apt-cache says of packages and all that they depend on, however far.
fn dependencies(roots: &[&str]) -> String {
    let soft =
        ["recommends", "suggests", "conflicts", "breaks", "replaces", "enhances"].map(|kind| format!("--no-{kind}"));
    let mut arguments = vec!["depends", "--recurse"];
    arguments.extend(soft.iter().map(String::as_str));
    arguments.extend(roots);
    apt_cache(&arguments)
}

/// The packages of `roots` and of the libraries that they need, in the order of names, from what [`dependencies`] gives:
/// a package's name, and below it, indented, what it depends on. Interpreters and data are left out: what a program loads
/// when it starts are libraries.
fn libraries(roots: &[&str], text: &str) -> Option<Vec<String>> {
    let mut needs: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    let mut package = "";
    for line in text.lines() {
        if !line.starts_with([' ', '|']) {
            package = line;
            needs.entry(package).or_default();
        } else if let Some((_, need)) = line.split_once("Depends: ") {
            needs.entry(package).or_default().push(need);
        }
    }
    let mut found = BTreeSet::new();
    let mut left = roots.to_vec();
    while let Some(package) = left.pop() {
        if found.insert(package.to_string()) {
            let library = |name: &&&str| name.starts_with("lib") || name.starts_with("zlib");
            left.extend(needs.get(package)?.iter().filter(library));
        }
    }
    Some(found.into_iter().collect())
}

/// The files of packages and of the libraries that they need, fetched where they are not in the cache.
pub fn with_libraries(stage: &Stage, roots: &[&str]) -> Result<Vec<PathBuf>> {
    let cache = cache();
    // Which packages those are is kept beside them, so that nothing has to be asked of apt a second time.
    let list = cache.join(format!("{}.list", roots.join("+")));
    let files = |names: &[String]| -> Option<Vec<PathBuf>> {
        let file = |name: &String| newest_package_file(&cache, &format!("{name}_"));
        names.iter().map(file).collect()
    };
    if let Ok(kept) = fs::read_to_string(&list)
        && let Some(files) = files(&kept.lines().map(str::to_string).collect::<Vec<_>>())
    {
        return Ok(files);
    }
    stage.say(&format!("fetching {} and their libraries", roots.join(", ")));
    let names = fetch(stage, &roots.join(", "), || libraries(roots, &dependencies(roots)))?;
    let files = files(&names).context("what was downloaded is not there")?;
    super::write_changed(&list, (names.join("\n") + "\n").as_bytes())?;
    Ok(files)
}

/// Unpacks packages into a new folder beside `near`, hands it to `take`, and removes it.
pub fn unpacked<T>(
    stage: &Stage,
    packages: &[PathBuf],
    near: &Path,
    take: impl FnOnce(&Path) -> Result<T>,
) -> Result<T> {
    ensure!(
        find_program("dpkg-deb").is_some(),
        "dpkg-deb is not here (Debian package dpkg)"
    );
    let folder = near.with_extension(format!("part-{}", std::process::id()));
    fs::create_dir_all(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
    let result = packages
        .iter()
        .try_for_each(|package| stage.must(Command::new("dpkg-deb").arg("-x").arg(package).arg(&folder)))
        .and_then(|()| take(&folder));
    fs::remove_dir_all(&folder).with_context(|| format!("cannot remove {}", folder.display()))?;
    result
}

/// The same with the files of one package that a pattern of tar's names: some packages are large.
pub fn unpacked_only<T>(
    stage: &Stage,
    package: &Path,
    pattern: &str,
    near: &Path,
    take: impl FnOnce(&Path) -> Result<T>,
) -> Result<T> {
    let folder = near.with_extension(format!("some-{}", std::process::id()));
    fs::create_dir_all(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
    let mut command = Command::new("sh");
    command
        .args([
            "-c",
            r#"dpkg-deb --fsys-tarfile "$1" | tar -x -C "$2" --wildcards "$3""#,
            "sh",
        ])
        .args([package, &folder])
        .arg(pattern);
    let result = stage.must(&mut command).and_then(|()| take(&folder));
    fs::remove_dir_all(&folder).with_context(|| format!("cannot remove {}", folder.display()))?;
    result
}

/// The same with those files of one package that `wanted` wants by their paths, as `./boot/vmlinuz-6.1.0`.
pub fn unpacked_some<T>(
    stage: &Stage,
    package: &Path,
    wanted: impl Fn(&str) -> bool,
    near: &Path,
    take: impl FnOnce(&Path) -> Result<T>,
) -> Result<T> {
    let list = output_of(Command::new("dpkg-deb").arg("-c").arg(package));
    let files = list.lines().filter(|line| line.starts_with('-'));
    let names: Vec<&str> = files
        .filter_map(|line| line.split_whitespace().nth(5))
        .filter(|name| wanted(name))
        .collect();
    let folder = near.with_extension(format!("some-{}", std::process::id()));
    fs::create_dir_all(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
    let unpack = || {
        if names.is_empty() {
            return Ok(());
        }
        let mut command = Command::new("sh");
        command.args([
            "-c",
            r#"package=$1 to=$2; shift 2; dpkg-deb --fsys-tarfile "$package" | tar -x -C "$to" "$@""#,
            "sh",
        ]);
        stage.must(command.args([package, &folder]).args(&names))
    };
    let result = unpack().and_then(|()| take(&folder));
    fs::remove_dir_all(&folder).with_context(|| format!("cannot remove {}", folder.display()))?;
    result
}

/// Copies `from` to `to` in one step that others see.
pub fn place(from: &Path, to: &Path) -> Result<()> {
    let part = to.with_extension(format!("new-{}", std::process::id()));
    fs::copy(from, &part).with_context(|| format!("cannot copy {}", from.display()))?;
    fs::rename(&part, to).with_context(|| format!("cannot write {}", to.display()))
}

/// The kernel's file below `boot`, newest first.
fn boot_file(boot: &Path) -> Option<PathBuf> {
    let files = fs::read_dir(boot).ok()?.filter_map(|entry| Some(entry.ok()?.path()));
    let build = |file: &PathBuf| {
        let name = file.file_name().and_then(OsStr::to_str)?;
        kernel_build(&name.replacen("vmlinuz", "linux-image", 1))
    };
    files.filter(|file| build(file).is_some()).max_by_key(build)
}

/// The folder of a kernel's modules; `boot` is the kernel's file, `root` what both are below.
fn module_folder(root: &Path, boot: &Path) -> Option<PathBuf> {
    let version = boot.file_name()?.to_str()?.strip_prefix("vmlinuz-")?;
    Some(root.join("lib/modules").join(version))
}

/// Copies the kernel to `to`, and its modules into the folder `modules` and to where `minivmm run` looks for them: beside the kernel, as in its
/// package.
fn place_kernel(root: &Path, boot: &Path, to: &Path, modules: &Path) -> Result<()> {
    let folder = module_folder(root, boot).with_context(|| format!("{} has no version", boot.display()))?;
    fs::create_dir_all(modules).with_context(|| format!("cannot make {}", modules.display()))?;
    for (name, path) in super::all_modules() {
        place(&folder.join(path), &modules.join(name))?;
        if let (Some(beside), Some(release)) = (to.parent(), folder.file_name()) {
            let same = beside.join("lib/modules").join(release).join(path);
            let parent = same.parent().unwrap_or(beside);
            fs::create_dir_all(parent).with_context(|| format!("cannot make {}", parent.display()))?;
            place(&folder.join(path), &same)?;
        }
    }
    place(boot, to)
}

/// Puts the kernel and its modules where an installed `minivmm run` looks for them, whatever becomes of this tree.
pub fn keep_for_run(kernel: &Path) -> Result<()> {
    keep_in(&cache(), kernel)
}

fn keep_in(cache: &Path, kernel: &Path) -> Result<()> {
    let mut folders = vec![PathBuf::from("lib/modules")];
    // A tree that was made before there were any beside the kernel goes without.
    folders.retain(|folder| kernel.with_file_name(folder).is_dir());
    while let Some(folder) = folders.pop() {
        let (from, to) = (kernel.with_file_name(&folder), cache.join(&folder));
        fs::create_dir_all(&to).with_context(|| format!("cannot make {}", to.display()))?;
        let entries = fs::read_dir(&from).with_context(|| format!("cannot read {}", from.display()))?;
        for entry in entries.flatten() {
            let path = folder.join(entry.file_name());
            match entry.path().is_dir() {
                true => folders.push(path),
                false => keep(&entry.path(), &cache.join(path))?,
            }
        }
    }
    // The kernel comes last: it is what is looked for.
    keep(kernel, &cache.join("vmlinuz"))
}

fn keep(from: &Path, to: &Path) -> Result<()> {
    let bytes = fs::read(from).with_context(|| format!("cannot read {}", from.display()))?;
    super::write_changed(to, &bytes)
}

/// Whether the kernel of this file is installed with the modules we need, for everybody to read.
fn is_installed(boot: &Path) -> bool {
    let modules = module_folder(Path::new("/"), boot);
    let readable = |file: &Path| fs::File::open(file).is_ok();
    readable(boot) && modules.is_some_and(|folder| super::all_modules().all(|(_, path)| readable(&folder.join(path))))
}

/// Puts Debian's 6.1 cloud kernel at `to` and the modules that we need into the folder `modules`: the installed ones, or else
/// those of the kernel's package, which is never installed.
pub fn kernel(stage: &Stage, to: &Path, modules: &Path) -> Result<()> {
    if let Some(file) = boot_file(Path::new("/boot")).filter(|file| is_installed(file)) {
        return place_kernel(Path::new("/"), &file, to, modules);
    }
    stage.say("fetching Debian's 6.1 cloud kernel");
    let package = package_file(stage, "linux-image-6.1.0-", "Debian's 6.1 cloud kernel", resolve_kernel)?;
    unpack_kernel(stage, &package, to, modules)
}

/// The same with the newest that Debian has, whatever was fetched before.
pub fn newest_kernel_of_all(stage: &Stage, to: &Path, modules: &Path) -> Result<()> {
    let names = fetch(stage, "Debian's 6.1 cloud kernel", || Some(vec![resolve_kernel()?]))?;
    let name = names.first().context("nothing was downloaded")?;
    let package = newest_package_file(&cache(), &format!("{name}_"));
    unpack_kernel(
        stage,
        &package.with_context(|| format!("{name} was downloaded but is not there"))?,
        to,
        modules,
    )
}

fn unpack_kernel(stage: &Stage, package: &Path, to: &Path, modules: &Path) -> Result<()> {
    unpacked(stage, &[package.to_path_buf()], to, |folder| {
        let file = boot_file(&folder.join("boot"));
        let file = file.with_context(|| format!("no kernel in {}", package.display()))?;
        place_kernel(folder, &file, to, modules)
    })
}

/// Puts a static busybox at `to`, from its package.
pub fn busybox(stage: &Stage, to: &Path) -> Result<()> {
    stage.say("fetching busybox-static");
    let package = package_file(stage, "busybox-static_", "busybox-static", || {
        Some("busybox-static".to_string())
    })?;
    unpacked(stage, std::slice::from_ref(&package), to, |folder| {
        // /bin is a link to usr/bin in later releases.
        let file = ["bin/busybox", "usr/bin/busybox"]
            .map(|path| folder.join(path))
            .into_iter()
            .find(|f| f.is_file());
        place(
            &file.with_context(|| format!("no busybox in {}", package.display()))?,
            to,
        )
    })
}

#[cfg(test)]
#[path = "debian_test.rs"]
mod tests;
