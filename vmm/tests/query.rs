//! `minivmm query` on a recorded session: the program's writes and calls are counted on paper.

use crate::common;
use std::{
    path::Path,
    process::{Output, Stdio},
};

use common::*;
use iced_x86::code_asm::*;

/// The function that is called three times: behind `mov esp` of five bytes and a jump of two.
const FUNCTION: u32 = BASE + 32 + 7;
/// Words: of the function, written once, never, in a loop of a thousand.
const CALLED: u32 = DATA;
const ONCE: u32 = DATA + 8;
const NEVER: u32 = DATA + 16;
const HOT: u32 = DATA + 24;

/// Instructions by their steps: 0 mov, 1 jmp, then 2 call, 3 inc, 4 ret, and twice more up to 10; 11 the write once, 12 mov ecx, then
/// inc, dec, jnz a thousand times from 13 on.
fn program() -> Vec<u8> {
    guest(|a| {
        let (mut function, mut main, mut again) = (a.create_label(), a.create_label(), a.create_label());
        a.jmp(main).unwrap();
        a.set_label(&mut function).unwrap();
        a.inc(dword_ptr(CALLED)).unwrap();
        a.ret().unwrap();
        a.set_label(&mut main).unwrap();
        for _ in 0..3 {
            a.call(function).unwrap();
        }
        a.mov(dword_ptr(ONCE), 5).unwrap();
        a.mov(ecx, 1000).unwrap();
        a.set_label(&mut again).unwrap();
        a.inc(dword_ptr(HOT)).unwrap();
        a.dec(ecx).unwrap();
        a.jne(again).unwrap();
        power_off(a);
    })
}

/// A folder with a session `s` of the program.
fn recorded() -> Folder {
    let folder = Folder::new();
    folder.file("kernel", program());
    let mut record = minivmm();
    record.current_dir(folder.path()).args([
        "--kernel", "kernel", "--memory", "4M", "--serial", "null", "--record", "s",
    ]);
    let output = run(record.stdin(Stdio::null()));
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    folder
}

fn ask(folder: &Path, words: &[&str]) -> Output {
    run(minivmm().current_dir(folder).args(["query", "s"]).args(words))
}

#[track_caller]
fn says(folder: &Path, words: &[&str]) -> String {
    let output = ask(folder, words);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

// covers: query/last-writer
#[test]
fn the_last_writer_of_a_word_is_found() {
    let folder = recorded();
    let last = |word: u32, more: &[&str]| {
        let address = format!("{word:#x}");
        says(
            folder.path(),
            &[&["last-writer", &address, "--len", "4"], more].concat(),
        )
    };
    for (word, more, step, from, to) in [
        (ONCE, &[][..], 11, 0, 5),
        (HOT, &[], 13 + 3 * 999, 999, 1000),
        (CALLED, &[], 9, 2, 3),
        (CALLED, &["--before", "9"], 6, 1, 2),
        (HOT, &["--before", "14"], 13, 0, 1),
    ] {
        let said = last(word, more);
        assert!(said.starts_with(&format!("step {step}, ")), "{said}");
        assert!(said.ends_with(&format!(": {from:#010x} -> {to:#010x}\n")), "{said}");
        assert_eq!(said.lines().count(), 1);
    }
    for (word, more) in [
        (NEVER, &[][..]),
        (CALLED, &["--before", "3"]),
        (ONCE, &["--before", "11"]),
    ] {
        let said = last(word, more);
        assert!(said.starts_with("nobody wrote to 0x"), "{said}");
    }
    // Before the function was called last, by its address.
    let before = format!("{FUNCTION:#x}");
    assert!(last(CALLED, &["--before", &before]).starts_with("step 6, "));
}

// covers: query/writes
#[test]
fn every_write_in_a_window_is_listed() {
    let folder = recorded();
    let (called, hot) = (format!("{CALLED:#x}"), format!("{HOT:#x}"));
    let said = says(folder.path(), &["writes", &called, "--len", "4"]);
    let lines: Vec<&str> = said.lines().collect();
    assert_eq!(lines.len(), 4, "{said}");
    for (line, (step, value)) in lines.iter().zip([(3, 1), (6, 2), (9, 3)]) {
        assert!(
            line.starts_with(&format!("step {step}, ")) && line.ends_with(&format!(": {value:#010x}")),
            "{line}"
        );
    }
    assert_eq!(lines[3], "3 writes");
    let said = says(
        folder.path(),
        &["writes", &called, "--len", "4", "--from", "4", "--to", "9"],
    );
    assert!(said.starts_with("step 6, ") && said.ends_with("\n1 writes\n"), "{said}");
    let said = says(folder.path(), &["writes", &hot, "--len", "4", "--limit", "2"]);
    assert_eq!(said.lines().count(), 3, "{said}");
    assert!(
        said.ends_with("1000 writes, of which the last 998 are not shown: --limit shows more\n"),
        "{said}"
    );
}

// covers: query/calls
#[test]
fn calls_of_a_function_are_counted_by_caller() {
    let folder = recorded();
    let function = format!("{FUNCTION:#x}");
    let said = says(folder.path(), &["calls", &function]);
    let calls: Vec<&str> = said.lines().filter(|line| line.starts_with("step ")).collect();
    assert_eq!(calls.len(), 3, "{said}");
    for (line, step) in calls.iter().zip([3, 6, 9]) {
        assert!(
            line.starts_with(&format!("step {step}, ")) && line.ends_with(": 2 steps"),
            "{line}"
        );
    }
    assert!(said.contains(&format!("{function}: 3 calls\n")), "{said}");
}

// covers: query/refused
#[test]
fn what_is_not_there_is_a_line() {
    let folder = recorded();
    let at = folder.path();
    let none = ask(at, &["last-writer", "jiffies"]);
    assert_refused(&none, 2, &["query s: \"jiffies\" is neither a number nor a symbol"]);
    assert_refused(
        &ask(at, &["last-writer", "0xffffffffffffffff"]),
        2,
        &["leave the address space"],
    );
    let called = format!("{CALLED:#x}");
    let never = format!("{:#x}", FUNCTION + 1);
    let refused = ask(at, &["last-writer", &called, "--before", &never]);
    assert_refused(&refused, 2, &["was not called in what is kept of the run"]);
    let refused = ask(at, &["writes", &called, "--from", "9", "--to", "4"]);
    assert_refused(&refused, 2, &["ends at step 4, before it begins at step 9"]);
    assert_refused(
        &run(minivmm().current_dir(at).args(["query", "missing", "calls", "1"])),
        2,
        &["missing"],
    );
}

/// The session `s` in another folder, with a snapshot every so many steps.
fn recorded_in_parts(every: &str) -> Folder {
    let folder = Folder::new();
    folder.file("kernel", program());
    let mut record = minivmm();
    record.current_dir(folder.path()).args([
        "--kernel",
        "kernel",
        "--memory",
        "4M",
        "--serial",
        "null",
        "--record",
        "s",
        "--record-every",
        every,
    ]);
    let output = run(record.stdin(Stdio::null()));
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    folder
}

// covers: query/parts
#[test]
fn answers_do_not_depend_on_snapshots() {
    let whole = recorded();
    // Before a write of the loop, behind one, and behind the write that is made once.
    let all = ["148", "149", "500"];
    let some = if std::env::var_os("MINIVMM_FULL").is_some() {
        &all[..]
    } else {
        &all[1..2]
    };
    for every in some {
        let parts = recorded_in_parts(every);
        let epochs = std::fs::read_dir(parts.path().join("s/epochs")).unwrap().count();
        assert!(epochs >= 6, "{epochs}");
        let [called, once, never, hot] = [CALLED, ONCE, NEVER, HOT].map(|word| format!("{word:#x}"));
        let function = format!("{FUNCTION:#x}");
        for words in [
            &["last-writer", &once, "--len", "4"][..],
            &["last-writer", &hot, "--len", "4"],
            &["last-writer", &hot, "--len", "4", "--before", "14"],
            &["last-writer", &hot, "--len", "4", "--before", "2500"],
            &["last-writer", &called, "--len", "4"],
            &["last-writer", &called, "--len", "4", "--before", &function],
            &["last-writer", &once, "--len", "4", "--before", &function],
            &["last-writer", &never],
            &["writes", &called, "--len", "4"],
            &[
                "writes", &hot, "--len", "4", "--from", "100", "--to", "2000", "--limit", "7",
            ],
            &["writes", &called, "--len", "4", "--from", &function],
            &["calls", &function],
            &["calls", &function, "--from", "5"],
        ] {
            for jobs in ["1", "3"] {
                let words = &[words, &[]].concat()[..];
                let asked = |folder: &Path, jobs: &str| {
                    let mut query = minivmm();
                    let query = query
                        .current_dir(folder)
                        .args(["query", "s", "--fresh", "--jobs", jobs]);
                    let output = run(query.args(words));
                    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
                    String::from_utf8(output.stdout).unwrap()
                };
                let (a, b) = (asked(whole.path(), "1"), asked(parts.path(), jobs));
                assert_eq!(a, b, "{words:?}, every {every}, {jobs} jobs");
            }
        }
        let none = format!("{:#x}", FUNCTION + 1);
        let refused = ask(parts.path(), &["last-writer", &called, "--before", &none]);
        assert_refused(&refused, 2, &["was not called in what is kept of the run"]);
        let refused = ask(parts.path(), &["writes", &called, "--from", "9", "--to", "4"]);
        assert_refused(&refused, 2, &["ends at step 4, before it begins at step 9"]);
    }
}

// covers: query/cache
#[test]
fn an_answer_is_kept_as_long_as_the_session_is_the_same() {
    let folder = recorded();
    let at = folder.path();
    let once = format!("{ONCE:#x}");
    let question = ["last-writer", once.as_str(), "--len", "4"];
    let first = says(at, &question);
    let kept: Vec<_> = std::fs::read_dir(at.join("s/answers"))
        .unwrap()
        .map(Result::unwrap)
        .collect();
    assert_eq!(kept.len(), 1);
    // It comes from there: the file is asked, and no replay is made, which needs the kernel.
    std::fs::rename(at.join("kernel"), at.join("gone")).unwrap();
    assert_eq!(says(at, &question), first);
    assert_refused(&ask(at, &["last-writer", &once, "--len", "8"]), 2, &["kernel"]);
    let fresh = run(minivmm().current_dir(at).args(["query", "s", "--fresh"]).args(question));
    assert_refused(&fresh, 2, &["kernel"]);
    // Neither a damaged file nor one of another session is an answer.
    let file = kept[0].path();
    let text = std::fs::read_to_string(&file).unwrap();
    for damaged in [
        "",
        "{}",
        &text[..text.len() / 2],
        &text.replace("\"session\":", "\"session\":1"),
    ] {
        std::fs::write(&file, damaged).unwrap();
        assert_refused(&ask(at, &question), 2, &["kernel"]);
    }
    std::fs::write(&file, &text).unwrap();
    assert_eq!(says(at, &question), first);
    let log = at.join("s/log");
    let longer = std::fs::read_to_string(&log).unwrap() + "\n";
    std::fs::write(&log, longer).unwrap();
    assert_refused(&ask(at, &question), 2, &["kernel"]);
}
