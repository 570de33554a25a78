//! Names of user code that nobody has told: of a position-independent program, its libraries and the vdso as the guest's own perf has
//! them, of two programs at the same addresses, and of a process that is recorded alone.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use guest_tests::{Folder, in_minivmm, linux, linux_in_minivmm, linux_kernels, output_of, run, target, trace_command};
use serde_json::Value;

const LIMIT: Duration = Duration::from_secs(600);

/// Instructions of `collatz` in user mode, as `cargo xtask demo` counts them by perf.
const COLLATZ: u64 = 115;

/// The lines of `trace decode --json`.
fn decoded(dir: &Path) -> Vec<Value> {
    let text = output_of(trace_command(&["decode", "--json"]).arg(dir));
    let line = |line: &str| serde_json::from_str(line).unwrap_or_else(|error| panic!("{error}: {line}"));
    text.lines().map(line).collect()
}

fn address(line: &Value) -> u64 {
    let text = line["ip"].as_str().unwrap_or_else(|| panic!("{line}"));
    u64::from_str_radix(text.trim_start_matches("0x"), 16).unwrap()
}

const LIBRARY: &str = r#"
__attribute__((noinline)) int own_work(int n) {
    volatile int sum = 0;
    for (int i = 0; i < n; i++)
        sum += i;
    return sum;
}
int own_entry(int n) { return own_work(n) + 1; }
"#;

const PROGRAM: &str = r#"
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

int own_entry(int);

static int compare(const void *a, const void *b) { return *(const int *)a - *(const int *)b; }

__attribute__((noinline)) int sorted(void) {
    int some[16];
    for (int i = 0; i < 16; i++)
        some[i] = (i * 7) % 16;
    qsort(some, 16, sizeof some[0], compare);
    return some[3];
}

int main(void) {
    struct timespec now;
    for (int i = 0; i < 3; i++)
        clock_gettime(CLOCK_MONOTONIC, &now);
    printf("pie: %d %d\n", sorted(), own_entry(20));
    return 0;
}
"#;

/// perf in the guest traces the program by Intel PT and says the name of each address that ran.
const BY_PERF: &str = "#!/bin/sh
export HOME=/root PERF_PAGER=cat LD_LIBRARY_PATH=/inject
cd /tmp
perf record -e intel_pt//u -o data /inject/pie >said 2>&1 || cat said
perf script -i data --itrace=i1i -F ip,sym,symoff,dso | sort -u | sed 's/^ */NAMED /'
";

fn compile(source: &str, out: &Path, options: &[&str]) {
    let file = out.with_extension("c");
    fs::write(&file, source).unwrap();
    output_of(Command::new("cc").args(["-O1", "-o"]).arg(out).arg(&file).args(options));
    fs::remove_file(file).unwrap();
}

// covers: symbols/mapped, trace/mappings, trace/filter-process
#[test]
fn names_are_those_that_the_guest_s_own_perf_has() {
    let folder = Folder::new("names");
    let inject = folder.join("inject");
    fs::create_dir(&inject).unwrap();
    let library = inject.join("libown.so");
    compile(LIBRARY, &library, &["-shared", "-fPIC", "-Wl,-soname,libown.so"]);
    let program = inject.join("pie");
    compile(PROGRAM, &program, &["-fPIE", "-pie", library.to_str().unwrap()]);
    folder.script("inject/run", BY_PERF);
    let dir = folder.join("trace");
    let mut boot = in_minivmm(&linux().kernel);
    boot.arg("--initrd")
        .arg(&linux().tools)
        .args(["--cmdline", "console=ttyS0 quiet panic=-1", "--pt", "--inject"])
        .arg(&inject)
        .args(["--trace-filter", "comm=pie", "--trace"])
        .arg(&dir);
    let guest = run(&mut boot, LIMIT).must_end_with(0);
    // Each address with its name, and the file.
    let mut theirs: BTreeMap<u64, (String, String)> = BTreeMap::new();
    for line in guest.console.lines().filter_map(|line| line.strip_prefix("NAMED ")) {
        let (ip, rest) = line.split_once(' ').unwrap_or_else(|| panic!("{line}"));
        let (name, file) = rest.rsplit_once(" (").unwrap_or_else(|| panic!("{line}"));
        let file = file.trim_end_matches(')').rsplit('/').next().unwrap();
        let ip = u64::from_str_radix(ip, 16).unwrap_or_else(|error| panic!("{line}: {error}"));
        theirs.insert(ip, (name.trim().to_string(), file.trim_matches(['[', ']']).to_string()));
    }
    assert!(theirs.len() > 1000, "{} addresses\n{}", theirs.len(), guest.console);

    let (mut same, mut by_file, mut wrong) = (0, BTreeMap::<String, u64>::new(), Vec::new());
    let lines = decoded(&dir);
    for line in lines.iter().filter(|line| line["type"] == "block") {
        let ip = address(line);
        if ip >> 63 == 1 {
            continue;
        }
        assert_eq!(line["process"], "pie", "nothing else is recorded: {line}");
        let Some((name, file)) = theirs.get(&ip) else {
            continue;
        };
        let symbol = line["symbol"].as_str();
        let ours = symbol.map(|symbol| format!("{symbol}+{:#x}", line["offset"].as_u64().unwrap()));
        let ours = ours.unwrap_or("[unknown]".into());
        // perf 6.1 has no name for what an entry of the linkage table leads to that is an address, and takes the first entry for a part of the
        // function before. And the host may have symbols that the guest does not have, of a debug package.
        let entry = ours.contains("@plt+") && ["@plt+", "_init+"].iter().any(|begin| name.starts_with(begin));
        let alike = ours == *name || name == "[unknown]" || entry;
        let module = line["module"].as_str();
        if !alike || module.is_some_and(|module| module != file) {
            wrong.push(format!("{ip:#x}: {ours} {module:?} here, {name} {file} there"));
            continue;
        }
        same += 1;
        if symbol.is_some() && name != "[unknown]" {
            *by_file.entry(file.clone()).or_default() += 1;
        }
    }
    wrong.sort();
    wrong.dedup();
    assert!(wrong.is_empty(), "{same} are the same, and not:\n{}", wrong.join("\n"));
    eprintln!("{same} blocks have the same names: {by_file:?}");
    for file in ["pie", "libown.so", "libc.so.6", "ld-linux-x86-64.so.2", "vdso"] {
        assert!(by_file.get(file).is_some_and(|count| *count > 0), "{file}: {by_file:?}");
    }
    let named: BTreeSet<&str> = lines.iter().filter_map(|line| line["symbol"].as_str()).collect();
    for function in [
        "main",
        "sorted",
        "compare",
        "own_work",
        "own_entry",
        "qsort",
        "do_syscall_64",
    ] {
        assert!(named.contains(function), "{function}");
    }
}

/// Two static programs at the same addresses, one after the other.
// covers: symbols/mapped, trace/export-html
#[test]
fn two_programs_at_the_same_addresses_have_their_own_names() {
    let folder = Folder::new("two");
    let inject = folder.join("inject");
    fs::create_dir(&inject).unwrap();
    for name in ["collatz", "threads"] {
        fs::copy(target().join("guest/programs").join(name), inject.join(name)).unwrap();
    }
    folder.script(
        "inject/run",
        "#!/bin/sh\n/inject/collatz\n/inject/threads\n/inject/collatz\n",
    );
    let dir = folder.join("trace");
    let mut boot = linux_in_minivmm("console=ttyS0 panic=-1 quiet");
    boot.args(["--cpu-model", "skylake-server", "-m", "256M", "--inject"])
        .arg(&inject)
        .arg("--trace")
        .arg(&dir);
    run(&mut boot, LIMIT).must_end_with(0);
    let (folded, html) = (folder.join("folded"), folder.join("page.html"));
    let mut export = trace_command(&["export", "--folded"]);
    export.arg(&folded).arg("--html").arg(&html);
    output_of(export.arg(&dir));
    let text = fs::read_to_string(&folded).unwrap();
    let mut of_collatz = 0;
    for line in text.lines() {
        let (stack, count) = line.rsplit_once(' ').unwrap();
        let leaf = stack.rsplit(';').next().unwrap();
        for (name, other) in [("collatz", "threads"), ("threads", "collatz")] {
            if stack.starts_with(&format!("{name};")) {
                assert!(!stack.contains(&format!("[{other}]")), "{line}");
            }
        }
        if leaf.ends_with(" [collatz]") {
            of_collatz += count.parse::<u64>().unwrap();
        }
    }
    assert_eq!(of_collatz, 2 * COLLATZ);
    for stack in [
        "collatz;_start [collatz];main [collatz];steps [collatz];even [collatz] ",
        "threads;_start [threads];main [threads];main_turns [threads];leaf_of_main [threads];spin [threads] ",
        "load-modules;",
        "[busybox]",
        "do_syscall_64",
    ] {
        let found = text.contains(stack) || stack == "load-modules;";
        assert!(
            found,
            "{stack}\n{}",
            text.lines().take(40).collect::<Vec<_>>().join("\n")
        );
    }
    let total = page_of(&html, &text);
    if guest_tests::full() {
        in_chromium(&folder, &html, total);
    }
}

/// A browser without a network draws the page, and has all instructions in it.
fn in_chromium(folder: &Path, html: &Path, total: u64) {
    const TEST: &str = "two_programs_at_the_same_addresses_have_their_own_names";
    if Command::new("chromium").arg("--version").output().is_err() {
        return guest_tests::skipped(TEST, "no chromium: the page is not drawn");
    }
    let quiet = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-quic",
        "--no-first-run",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        "--virtual-time-budget=5000",
        "--dump-dom",
    ];
    for width in [1280, 390] {
        let mut chromium = Command::new("chromium");
        chromium
            .args(quiet)
            .arg(format!("--window-size={width},1500"))
            .arg(format!(
                "--user-data-dir={}",
                folder.join(format!("chromium-{width}")).display()
            ))
            .arg(format!("file://{}#steps", html.display()));
        let page = output_of(&mut chromium);
        let body = page.split_once("<body").unwrap().1.split_once('>').unwrap().0;
        assert!(body.contains(&format!("data-total=\"{total}\"")), "{width}: {body}");
        let found = page.split_once("<output").unwrap().1.split_once("</output>").unwrap().0;
        assert!(
            found.contains(" instructions (") && found.contains("steps"),
            "{width}: {found}"
        );
        assert!(
            page.contains("<button type=\"button\">steps [collatz]</button>"),
            "{width}"
        );
    }
}

/// The page's stacks are those of `--folded`, but for what is merged, and it is small enough to be handed on.
fn page_of(html: &Path, folded: &str) -> u64 {
    let page = fs::read_to_string(html).unwrap();
    assert!(page.len() < 20_000_000, "{} bytes", page.len());
    eprintln!("a page of {} bytes", page.len());
    let data = page
        .split_once("id=\"data\">")
        .unwrap()
        .1
        .split_once("</script>")
        .unwrap()
        .0;
    let data: Value = serde_json::from_str(data).unwrap();
    let of = |field: &str| -> Vec<u64> {
        let all = data["nodes"][field].as_array().unwrap();
        all.iter().map(|number| number.as_u64().unwrap()).collect()
    };
    let (parent, name, own) = (of("parent"), of("name"), of("own"));
    let mut ours: BTreeMap<&str, u64> = BTreeMap::new();
    for (n, count) in own.iter().enumerate().skip(1) {
        let mut top = n;
        while parent[top] != 0 {
            assert!(parent[top] < top as u64);
            top = parent[top] as usize;
        }
        let thread = data["names"][name[top] as usize].as_str().unwrap();
        *ours.entry(thread).or_default() += count;
    }
    let mut theirs: BTreeMap<&str, u64> = BTreeMap::new();
    for line in folded.lines() {
        let (stack, count) = line.rsplit_once(' ').unwrap();
        let thread = stack.split(';').next().unwrap();
        *theirs.entry(thread).or_default() += count.parse::<u64>().unwrap();
    }
    assert_eq!(ours, theirs);
    // The timeline has each instruction once, too.
    let cells = data["cells"].as_array().unwrap().iter();
    let in_time: u64 = cells
        .flat_map(|cell| {
            cell.as_array().unwrap()[2..]
                .chunks(2)
                .map(|pair| pair[1].as_u64().unwrap())
        })
        .sum();
    let total = theirs.values().sum();
    assert_eq!(in_time, total);
    total
}

/// With page-table isolation a process has two page tables, and is recorded with its system calls all the same. That is the guide's recipe for a
/// flame graph of one program by name, of which nobody has given symbols. perf has the names, too.
// covers: trace/filter-process, trace/export-perf-names, trace/recipe-flamegraph
#[test]
fn a_process_is_recorded_alone_with_what_the_kernel_does_for_it() {
    let folder = Folder::new("alone");
    let inject = folder.join("inject");
    fs::create_dir(&inject).unwrap();
    fs::copy(target().join("guest/programs/collatz"), inject.join("collatz")).unwrap();
    folder.script(
        "inject/run",
        "#!/bin/sh\nmd5sum /sample\n/inject/collatz\nps >/dev/null\n",
    );
    let dir = folder.join("trace");
    let mut boot = linux_in_minivmm("console=ttyS0 panic=-1 quiet");
    boot.args(["--cpu-model", "skylake-server", "-m", "256M", "--cpus", "2", "--inject"])
        .arg(&inject)
        .args(["--trace-filter", "comm=collatz", "--trace"])
        .arg(&dir);
    run(&mut boot, LIMIT).must_end_with(0);
    let lines = decoded(&dir);
    let summary = lines.last().unwrap();
    assert_eq!(
        (&summary["gaps"], &summary["overflows"]),
        (&Value::from(0), &Value::from(0)),
        "{summary}"
    );
    let (mut user, mut kernel, mut tables) = (BTreeMap::<String, u64>::new(), 0, BTreeSet::new());
    for line in lines.iter().filter(|line| line["type"] == "block") {
        let count = line["instructions"].as_u64().unwrap();
        if address(line) >> 63 == 0 {
            assert_eq!(line["module"], "collatz", "{line}");
            *user.entry(line["symbol"].as_str().unwrap().into()).or_default() += count;
            assert_eq!(line["process"], "collatz", "{line}");
        } else {
            kernel += count;
        }
        // Another's table is loaded just before its thread is gone over to.
        if line["process"] == "collatz" {
            tables.insert(line["cr3"].as_str().unwrap());
        }
    }
    assert_eq!(user.values().sum::<u64>(), COLLATZ, "{user:?}");
    assert!(kernel > 1000, "{kernel}");
    assert_eq!(tables.len(), 2, "the kernel's table and the user's: {tables:?}");
    let symbols: BTreeSet<&str> = lines.iter().filter_map(|line| line["symbol"].as_str()).collect();
    assert!(symbols.contains("do_syscall_64"));

    let flame = folder.join("flame.svg");
    output_of(trace_command(&["export", "--flamegraph"]).arg(&flame).arg(&dir));
    let flame = fs::read_to_string(&flame).unwrap();
    for title in ["main [collatz] (", "steps [collatz] (", "do_syscall_64 ("] {
        assert!(flame.contains(&format!("<title>{title}")), "{title}");
    }

    let perf = folder.join("perf");
    output_of(trace_command(&["export", "--perf"]).arg(&perf).arg(&dir));
    let mut script = Command::new("perf");
    script
        .args(["script", "--itrace=i1i", "-F", "ip,sym,dso", "-i"])
        .arg(&perf);
    let said = output_of(script.env("PERF_PAGER", "cat"));
    let mut theirs: BTreeMap<String, u64> = BTreeMap::new();
    for line in said.lines().filter(|line| line.contains("/collatz)")) {
        let mut words = line.split_ascii_whitespace();
        *theirs.entry(words.nth(1).unwrap().into()).or_default() += 1;
    }
    assert_eq!(theirs, user);
}

/// A kernel's series, by the name of its file.
fn series(kernel: &Path) -> (u32, u32) {
    let name = kernel.file_name().unwrap().to_string_lossy().into_owned();
    let mut numbers = name
        .trim_start_matches("vmlinuz-")
        .split('.')
        .map(|part| part.parse().unwrap_or(0));
    (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0))
}

/// Mappings are in red-black trees up to 6.0 and in maple trees since, and the structures around them have changed often.
// covers: trace/mappings, trace/filter-process
#[test]
fn every_linux_tells_what_a_program_has_mapped() {
    let mut kernels: Vec<_> = linux_kernels();
    kernels.retain(|kernel| kernel.to_string_lossy().ends_with("cloud-amd64"));
    let ends = [
        kernels.iter().map(|kernel| series(kernel)).min().expect("kernels"),
        kernels.iter().map(|kernel| series(kernel)).max().expect("kernels"),
    ];
    assert!(ends[0] < (6, 1) && ends[1] > (6, 4), "{kernels:?}");
    if !guest_tests::full() {
        kernels.retain(|kernel| ends.contains(&series(kernel)));
    }
    for kernel in kernels {
        let folder = Folder::new("kernel-names");
        let inject = folder.join("inject");
        fs::create_dir(&inject).unwrap();
        fs::copy(target().join("guest/programs/collatz"), inject.join("collatz")).unwrap();
        folder.script("inject/run", "#!/bin/sh\n/inject/collatz\n");
        let dir = folder.join("trace");
        let mut boot = in_minivmm(&kernel);
        boot.arg("--initrd")
            .arg(&linux().initrd)
            .args([
                "--cmdline",
                "console=ttyS0 panic=-1 quiet",
                "--cpu-model",
                "skylake-server",
                "--inject",
            ])
            .arg(&inject)
            .args(["--trace-filter", "comm=collatz", "--trace"])
            .arg(&dir);
        run(&mut boot, LIMIT).must_end_with(0);
        let mut user = 0;
        for line in decoded(&dir).iter().filter(|line| line["type"] == "block") {
            if address(line) >> 63 == 0 {
                assert_eq!(line["module"], "collatz", "{}: {line}", kernel.display());
                user += line["instructions"].as_u64().unwrap();
            }
        }
        assert_eq!(user, COLLATZ, "{}", kernel.display());
    }
}
