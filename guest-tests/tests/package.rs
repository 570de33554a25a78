//! What is given away: the crates, `cargo install`, and the Debian package, installed beside the system.

use guest_tests::{Folder, full, root, run, target};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

const LIMIT: Duration = Duration::from_secs(580);
/// The crates that are for tests and for building.
const OURS_ALONE: [&str; 6] = ["guest-tests", "guests", "rt", "pt-oracle", "ptdump", "xtask"];

fn cargo(arguments: &[&str]) -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command
        .current_dir(root())
        .env("CARGO_INCREMENTAL", "0")
        .args(arguments);
    command
}

/// `cargo metadata` of the workspace, without what is depended on.
fn workspace() -> Vec<serde_json::Value> {
    let arguments = ["metadata", "--no-deps", "--offline", "--format-version", "1"];
    let said = cargo(&arguments).output().unwrap();
    let all: serde_json::Value = serde_json::from_slice(&said.stdout).unwrap();
    all["packages"].as_array().unwrap().clone()
}

// covers: package/crates
#[test]
fn each_crate_that_is_published_says_what_it_is_and_needs_none_that_is_not() {
    let packages = workspace();
    let name = |package: &serde_json::Value| package["name"].as_str().unwrap().to_string();
    let published: Vec<String> = packages
        .iter()
        .filter(|package| package["publish"].is_null())
        .map(name)
        .collect();
    assert_eq!(published.len(), 9, "{published:?}");
    for package in &packages {
        let name = name(package);
        if !published.contains(&name) {
            assert!(OURS_ALONE.contains(&name.as_str()), "{name}");
            continue;
        }
        assert!(name.starts_with("minivmm"), "{name}");
        let folder = Path::new(package["manifest_path"].as_str().unwrap()).parent().unwrap();
        for key in ["description", "license", "readme", "rust_version"] {
            assert!(
                package[key].as_str().is_some_and(|text| !text.is_empty()),
                "{name}: {key}"
            );
        }
        let readme = fs::read_to_string(folder.join(package["readme"].as_str().unwrap())).unwrap();
        assert!(readme.starts_with(&format!("# {name}\n")), "{name}: {readme}");
        for dependency in package["dependencies"].as_array().unwrap() {
            // A dependency by a path needs a version, too, and has to be published; one of tests alone needs neither.
            if dependency["path"].is_null() || dependency["kind"] == "dev" {
                continue;
            }
            let other = dependency["name"].as_str().unwrap();
            assert!(published.contains(&other.to_string()), "{name} needs {other}");
            assert_eq!(dependency["req"], "^0.1.0", "{name} needs {other}");
        }
    }
}

// covers: package/install
#[test]
fn who_installs_the_program_builds_nothing_that_is_for_tests() {
    let said = cargo(&[
        "tree",
        "-p",
        "minivmm",
        "-e",
        "normal,build",
        "--prefix",
        "none",
        "--offline",
        "--locked",
    ]);
    let said = run(&mut { said }, LIMIT).must_end_with(0);
    let names: Vec<&str> = said.console.lines().filter_map(|line| line.split(' ').next()).collect();
    assert!(
        names.contains(&"minivmm-engine") && names.contains(&"iced-x86"),
        "{names:?}"
    );
    for name in OURS_ALONE
        .iter()
        .chain(&["yaml-rust2", "lz4_flex", "criterion", "proptest"])
    {
        assert!(!names.contains(name), "{name}");
    }
    if !full() {
        println!("left out: cargo install, which the long form does");
        return;
    }
    let folder = Folder::new("install");
    let mut install = cargo(&[
        "install",
        "--path",
        "vmm",
        "--locked",
        "--offline",
        "--debug",
        "--no-track",
        "--root",
    ]);
    run(install.arg(&*folder).arg("--target-dir").arg(target()), LIMIT).must_end_with(0);
    let said = run(Command::new(folder.join("bin/minivmm")).arg("--version"), LIMIT).must_end_with(0);
    assert_eq!(said.console, "minivmm 0.1.0\n");
}

/// A file of what is installed below a folder.
fn installed(folder: &Path, name: &str) -> PathBuf {
    let file = folder.join(name);
    assert!(file.is_file(), "{name} is not in the package");
    file
}

// covers: package/deb
#[test]
fn the_debian_package_has_program_pages_completions_and_guide() {
    if !full() {
        println!("left out: the Debian package, which the long form builds");
        return;
    }
    let made = run(&mut cargo(&["xtask", "deb", "--profile", "dev"]), LIMIT).must_end_with(0);
    let package = made.console.trim();
    let says = |field: &str| run(Command::new("dpkg-deb").args(["-f", package, field]), LIMIT).console;
    assert_eq!(
        (says("Package").trim(), says("Architecture").trim()),
        ("minivmm", "amd64")
    );
    assert!(says("Depends").contains("libc6"), "{}", says("Depends"));
    let folder = Folder::new("dpkg");
    for part in ["info", "updates", "triggers"] {
        fs::create_dir_all(folder.join("var/lib/dpkg").join(part)).unwrap();
    }
    fs::write(folder.join("var/lib/dpkg/status"), "").unwrap();
    let dpkg = |arguments: &[&str]| {
        let mut command = Command::new("dpkg");
        // The C library is the system's, which this folder knows nothing of.
        command
            .arg(format!("--root={}", folder.display()))
            .args(["--force-depends", "--force-not-root"]);
        run(command.args(arguments), LIMIT).must_end_with(0)
    };
    dpkg(&["-i", package]);
    let program = installed(&folder, "usr/bin/minivmm");
    let said = run(Command::new(&program).arg("--version"), LIMIT).must_end_with(0);
    assert_eq!(said.console, "minivmm 0.1.0\n");
    for (page, has) in [
        ("minivmm", "--on-panic"),
        ("minivmm-run", "COMMAND"),
        ("minivmm-trace-decode", "--calls"),
        ("minivmm-matrix", "--model"),
    ] {
        let page = installed(&folder, &format!("usr/share/man/man1/{page}.1.gz"));
        let mut man = Command::new("man");
        man.args(["--warnings=all", "-E", "ascii", "-P", "cat", "-l"])
            .arg(&page)
            .env("MANWIDTH", "200");
        let shown = run(&mut man, LIMIT).must_end_with(0);
        assert_eq!(shown.errors, "", "{}", page.display());
        assert!(shown.console.contains(has), "{}: {}", page.display(), shown.console);
    }
    let completions = installed(&folder, "usr/share/bash-completion/completions/minivmm");
    let script =
        "source \"$0\"; COMP_WORDS=(minivmm tra); COMP_CWORD=1; _minivmm minivmm tra minivmm; echo \"${COMPREPLY[@]}\"";
    let completed = run(Command::new("bash").args(["-c", script]).arg(completions), LIMIT).must_end_with(0);
    assert_eq!(completed.console.trim(), "trace");
    for name in [
        "usr/share/zsh/vendor-completions/_minivmm",
        "usr/share/fish/vendor_completions.d/minivmm.fish",
        "usr/share/doc/minivmm/copyright",
        "usr/share/doc/minivmm/README.md",
        "usr/share/doc/minivmm/guide/run.md",
        "usr/share/doc/minivmm/examples/Containerfile",
    ] {
        let plain = folder.join(name).is_file();
        assert!(
            plain || folder.join(format!("{name}.gz")).is_file(),
            "{name} is not in the package"
        );
    }
    // The program as it is installed runs a guest.
    let guest = run(Command::new(&program).arg("--kernel").arg(guest_tests::HELLO), LIMIT);
    assert_eq!(guest.status, Some(0x15 << 1 | 1), "{}", guest.errors);
    dpkg(&["-r", "minivmm"]);
    assert!(!program.exists());
}
