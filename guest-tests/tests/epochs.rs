//! Recorded sessions that are replayed in parts, side by side: the trace, the counts and what the guest has sent are those of a replay in
//! series.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use guest_tests::{
    Folder, LOOPS, Outcome, PATCHES, SMP, full, in_minivmm, linux_in_minivmm, minivmm, run, start_with_input,
};

const LIMIT: Duration = Duration::from_secs(900);

/// A session, and what a replay in series makes of it.
struct Session {
    folder: Folder,
    path: PathBuf,
    /// How a replay ends.
    status: i32,
}

impl Session {
    /// Records one, with a snapshot every so many steps.
    fn record(name: &str, mut command: Command, every: u64, status: i32, type_in: Option<&str>) -> Session {
        let folder = Folder::new(name);
        let path = folder.join("session");
        command.arg("--record").arg(&path);
        command.args(["--record-every", &every.to_string()]);
        match type_in {
            None => run(&mut command, LIMIT).must_end_with(status),
            Some(line) => {
                let mut running = start_with_input(&mut command, LIMIT);
                assert!(running.wait_for("guest#").is_some(), "no shell: {}", running.console());
                running.enter(line);
                running.finish().must_end_with(status)
            }
        };
        Session { folder, path, status }
    }

    fn epochs(&self) -> Vec<PathBuf> {
        let mut files: Vec<PathBuf> = match fs::read_dir(self.path.join("epochs")) {
            Ok(entries) => entries.map(|entry| entry.unwrap().path()).collect(),
            Err(_) => Vec::new(),
        };
        files.sort();
        files
    }

    fn replay(&self, arguments: &[&str]) -> Outcome {
        let mut replay = Command::new(minivmm());
        run(replay.arg("replay").arg(&self.path).args(arguments), LIMIT)
    }

    fn at(&self, name: &str) -> String {
        self.folder.join(name).to_str().unwrap().into()
    }
}

/// What there is to see of a trace, as text.
fn seen(folder: &Folder, trace: &str, whole: bool) -> Vec<String> {
    let of = |arguments: &[&str]| {
        let outcome = run(Command::new(minivmm()).arg("trace").args(arguments), LIMIT).must_end_with(0);
        outcome.console
    };
    let folded = folder.join("folded");
    of(&["export", trace, "--folded", folded.to_str().unwrap(), "--force"]);
    let mut seen = vec![fs::read_to_string(&folded).unwrap()];
    match whole {
        true => seen.extend([of(&["decode", trace]), of(&["decode", trace, "--calls"])]),
        // The first and last steps that are there, and a stretch in the middle.
        false => seen.push(of(&["decode", trace, "--from", "671000000", "--to", "671200000"])),
    }
    seen
}

/// Where two texts differ.
#[track_caller]
fn same(what: &str, serial: &str, joined: &str) {
    if serial != joined {
        let lines = serial.lines().zip(joined.lines());
        let at = lines.clone().take_while(|(a, b)| a == b).count();
        let (a, b): (Vec<_>, Vec<_>) = lines.skip(at.saturating_sub(2)).take(6).unzip();
        panic!("{what}, line {}:\n{}\n---\n{}", at + 1, a.join("\n"), b.join("\n"));
    }
}

/// Replays a session in series and in parts, and compares.
fn compare(session: &Session, whole: bool) {
    assert!(session.epochs().len() >= 2, "{:?}", session.epochs());
    let (serial, joined) = (session.at("serial"), session.at("joined"));
    let a = session.replay(&["--trace", &serial]);
    let b = session.replay(&["--trace", &joined, "--jobs", "2"]);
    assert_eq!((a.status, &a.errors), (Some(session.status), &b.errors), "{}", b.errors);
    assert_eq!(b.status, a.status);
    same("the console", &a.console, &b.console);
    let texts = seen(&session.folder, &serial, whole)
        .into_iter()
        .zip(seen(&session.folder, &joined, whole));
    for (n, (a, b)) in texts.enumerate() {
        assert!(!a.is_empty());
        same(&format!("what is seen, {n}"), &a, &b);
    }
    fs::remove_dir_all(&serial).unwrap();
    if whole || full() {
        compare_shards(session, whole, &b, &joined);
    }
    fs::remove_dir_all(&joined).unwrap();
}

/// Replays a session as two machines would, puts it together as a third, and compares with what jobs made of it.
fn compare_shards(session: &Session, whole: bool, b: &Outcome, joined: &str) {
    let parts = [session.at("parts1"), session.at("parts2")];
    for (n, parts) in parts.iter().enumerate() {
        let shard = format!("{}/2", n + 1);
        let outcome = session.replay(&["--trace", "unused", "--shard", &shard, "--parts", parts]);
        assert_eq!(
            (outcome.status, outcome.console.as_str()),
            (Some(0), ""),
            "{}",
            outcome.errors
        );
    }
    let merged = session.at("merged");
    let merge = |parts: &[String]| {
        let mut merge = Command::new(minivmm());
        run(
            merge.args(["replay", "merge"]).args(parts).args(["--trace", &merged]),
            LIMIT,
        )
    };
    let missing = merge(&parts[..1]);
    assert_eq!(missing.status, Some(2));
    assert!(
        missing.errors.contains(" is missing: the shard that has it"),
        "{}",
        missing.errors
    );
    let c = merge(&parts);
    assert_eq!((c.status, &c.errors), (b.status, &b.errors));
    same("the console of shards", &b.console, &c.console);
    for (n, (a, b)) in seen(&session.folder, joined, whole)
        .into_iter()
        .zip(seen(&session.folder, &merged, whole))
        .enumerate()
    {
        same(&format!("what is seen of shards, {n}"), &a, &b);
    }
    fs::remove_dir_all(&merged).unwrap();
}

/// Counts by several jobs and by one.
fn counts(session: &Session) {
    let counted = |jobs: &str| {
        let outcome = session.replay(&["--count", "--serial", "null", "--jobs", jobs]);
        assert_eq!(outcome.status, Some(session.status), "{}", outcome.errors);
        outcome.console
    };
    let by_two = counted("2");
    assert!(by_two.contains(" branches taken\n"), "{by_two}");
    // Without snapshots it is one part, which leaves some.
    fs::remove_dir_all(session.path.join("epochs")).unwrap();
    let outcome = session.replay(&["--count", "--serial", "null", "--jobs", "2"]);
    assert!(
        outcome
            .errors
            .contains("has no snapshots: it is replayed once in series, which leaves them"),
        "{}",
        outcome.errors
    );
    same("counts", &outcome.console, &by_two);
}

fn bare(image: &str, words: &str, cpus: &str) -> Command {
    let mut command = in_minivmm(image);
    command.args([
        "--cmdline",
        words,
        "--cpus",
        cpus,
        "--memory",
        "64M",
        "--cpu-model",
        "skylake-server",
    ]);
    command
}

// covers: epochs/jobs, epochs/shards, epochs/series
#[test]
fn a_guest_that_changes_its_own_code_is_the_same_in_parts() {
    let session = Session::record("epochs-patches", bare(PATCHES, "", "1"), 500, 43, None);
    compare(&session, true);
    counts(&session);
}

// covers: epochs/jobs
#[test]
fn cpus_that_talk_through_interrupts_are_the_same_in_parts() {
    let session = Session::record("epochs-smp", bare(SMP, "3", "3"), 40_000, 1, None);
    compare(&session, true);
    counts(&session);
}

// covers: epochs/jobs
#[test]
fn loops_are_the_same_in_parts() {
    let session = Session::record("epochs-loops", bare(LOOPS, "hash 3000", "1"), 30_000, 1, None);
    compare(&session, true);
    counts(&session);
}

// covers: epochs/linux
#[test]
fn a_linux_that_somebody_types_to_is_the_same_in_parts() {
    let mut command = linux_in_minivmm("console=ttyS0 quiet");
    command.args(["--memory", "256M", "--cpus", "2"]);
    let typed = "for n in 1 2 3; do ls -l /proc/self >/dev/null; done; echo done; poweroff -f";
    let session = Session::record("epochs-linux", command, 1 << 27, 0, Some(typed));
    compare(&session, false);
    if full() {
        counts(&session);
    }
}

// covers: epochs/disk
#[test]
fn a_linux_that_writes_to_its_disk_is_the_same_in_parts() {
    let folder = Folder::new("epochs-disk");
    let scripts = folder.join("scripts");
    fs::create_dir(&scripts).unwrap();
    folder.script(
        "scripts/run",
        "#!/bin/sh\nload-modules\ni=0\nwhile [ $i -lt 40 ]; do dd if=/dev/urandom of=/dev/vda bs=4k seek=$i count=9; \
         i=$((i + 1)); done\nsync\nmd5sum /dev/vda\n",
    );
    let disk = folder.join("disk");
    fs::write(&disk, vec![7; 1 << 20]).unwrap();
    let mut command = linux_in_minivmm("console=ttyS0 quiet panic=-1");
    command.args(["--memory", "256M", "--inject"]).arg(&scripts);
    command.arg("--disk").arg(&disk);
    let session = Session::record("epochs-disk", command, 1 << 26, 0, None);
    if full() {
        compare(&session, false);
    }
    counts(&session);

    // A file that has changed since.
    fs::write(&disk, vec![8; 1 << 20]).unwrap();
    let changed = session.replay(&["--jobs", "2", "--serial", "null"]);
    assert_eq!(changed.status, Some(2));
    assert!(
        changed.errors.contains("has changed since the session was recorded"),
        "{}",
        changed.errors
    );
}

fn flip(path: &Path, at: impl Fn(usize) -> usize) {
    let mut bytes = fs::read(path).unwrap();
    let at = at(bytes.len());
    bytes[at] ^= 0x40;
    fs::write(path, bytes).unwrap();
}

// covers: epochs/hostile
#[test]
fn what_is_not_the_session_is_a_line() {
    let record = |name: &str| Session::record(name, bare(LOOPS, "hash 3000", "1"), 30_000, 1, None);
    let fails = |session: &Session, why: &str| {
        let outcome = session.replay(&["--jobs", "2", "--serial", "null"]);
        assert_eq!(outcome.status, Some(2), "{}", outcome.errors);
        assert_eq!(outcome.errors.lines().count(), 1, "{}", outcome.errors);
        assert!(outcome.errors.contains(why), "{}: {why}", outcome.errors);
    };
    // A page, the state, the version.
    let session = record("epochs-hostile");
    let files = session.epochs();
    let first = files[0].clone();
    let good = fs::read(&first).unwrap();
    flip(&first, |len| len - 5);
    fails(&session, "damaged: its contents are not what was written");
    fs::write(&first, &good).unwrap();
    flip(&first, |_| 300);
    fails(&session, "damaged: its contents are not what was written");
    let mut other = good.clone();
    other[16] = 9;
    fs::write(&first, &other).unwrap();
    fails(&session, "written by another version of minivmm (form 9)");
    fs::write(&first, &good[..good.len() / 2]).unwrap();
    fails(&session, "damaged");
    fs::write(&first, &good).unwrap();
    assert_eq!(session.replay(&["--jobs", "2", "--serial", "null"]).status, Some(1));
    // One of another session, and one that is gone: the pages of the others are missing then.
    let another = Session::record("epochs-another", bare(LOOPS, "hash 3001", "1"), 30_000, 1, None);
    fs::copy(&another.epochs()[0], &first).unwrap();
    fails(&session, "of another session");
    fs::remove_file(&first).unwrap();
    fails(&session, "it builds on the one at step 30000, which is missing");
    // The kernel has changed since.
    let copy = another.folder.join("kernel");
    fs::copy(LOOPS, &copy).unwrap();
    let session = Session::record(
        "epochs-kernel",
        bare(copy.to_str().unwrap(), "hash 3000", "1"),
        30_000,
        1,
        None,
    );
    flip(&copy, |_| 0x1000 + 0x200);
    let outcome = session.replay(&["--jobs", "2", "--serial", "null"]);
    assert_eq!(outcome.status, Some(2), "{}", outcome.errors);
    // What goes together with one machine alone.
    for arguments in [
        &["--jobs", "2", "--gdb", "tcp:1"][..],
        &["--shard", "1/2"],
        &["--shard", "3/2", "--parts", "p"],
    ] {
        assert_eq!(session.replay(arguments).status, Some(2), "{arguments:?}");
    }
}

// covers: epochs/limit
#[test]
fn snapshots_stay_within_their_limit() {
    let sized = |limit: &str| {
        let mut command = bare(LOOPS, "hash 3000", "1");
        command.args(["--record-snapshots", limit]);
        let session = Session::record("epochs-limit", command, 5_000, 1, None);
        let sizes = session
            .epochs()
            .iter()
            .map(|path| fs::metadata(path).unwrap().len())
            .sum::<u64>();
        (session, sizes)
    };
    let (all, whole) = sized("1G");
    let count = all.epochs().len();
    let (some, size) = sized(&(whole / 3).to_string());
    let left = some.epochs().len();
    assert!(
        size <= whole / 3 && (2..count).contains(&left),
        "{size} of {whole}, {left} of {count}"
    );
    let replayed = some.replay(&["--jobs", "2", "--serial", "null"]);
    assert_eq!(replayed.status, Some(1), "{}", replayed.errors);
    // One that holds none, and none at all.
    for limit in ["4K", "0"] {
        let (none, size) = sized(limit);
        assert_eq!((none.epochs().len(), size), (0, 0));
    }
}
