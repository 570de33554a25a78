//! `minivmm matrix` as a user runs it: small guests, every way in which a cell can come out, shards and their merging.

use crate::common;
use std::{path::Path, process::Output};

use common::{Folder, debug_exit, forever, guest, hello, minivmm, print};
use iced_x86::code_asm::*;

fn matrix(arguments: &[&str], files: &[(&str, &Path)]) -> (Option<i32>, String, String) {
    let mut command = minivmm();
    command.arg("matrix").args(arguments);
    for (option, path) in files {
        command.arg(option).arg(path);
    }
    let Output { status, stdout, stderr } = command.output().unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    (status.code(), text(stdout), text(stderr))
}

/// A guest that reports these lines and ends with `value`.
fn reporter(lines: &str, value: u8) -> Vec<u8> {
    guest(|a| {
        print(a, lines);
        debug_exit(a, value);
    })
}

/// One guest for each way to come out.
fn zoo() -> Folder {
    let folder = Folder::new();
    folder.file("hello.elf", hello());
    folder.file(
        "holds.elf",
        reporter("TAP version 14\n1..2\nok 1 - a\nok 2 - b # SKIP no b\n", 0),
    );
    folder.file(
        "fails.elf",
        reporter(
            "TAP version 14\n1..2\nok 1 - a\nnot ok 2 - b\n  ---\n  at: b.rs:7\n  ...\n",
            1,
        ),
    );
    folder.file("hangs.elf", guest(forever));
    folder.file("hangs.toml", "max-instructions = 100000\n");
    // No IDT: the first exception is the last.
    let dies = guest(|a| {
        a.mov(ebx, 0x1234_5678).unwrap();
        a.ud2().unwrap();
    });
    folder.file("dies.elf", dies);
    folder.file(
        "nothing.elf",
        reporter("TAP version 14\n1..0 # SKIP no such thing\n", 0),
    );
    folder
}

// covers: matrix/cells
// covers: matrix/hang
// covers: matrix/crash
// covers: matrix/table
#[test]
fn every_cell_comes_out_by_itself() {
    let folder = zoo();
    let (status, output, errors) = matrix(&["--model", "p6", "westmere"], &[("--guests", folder.path())]);
    assert_eq!(status, Some(1), "{output}{errors}");
    for part in [
        "soft       p6  westmere\n",
        "hello      ok        ok\n",
        "holds       1         1\n",
        "nothing     -         -\n",
        "skip: no such thing: 2 cells\n",
        "skip: no b: 2 tests\n",
        "fails on p6 (soft): 1 of 2 tests failed\n  b\n    ---\n    at: b.rs:7\n",
        "hangs on westmere (soft): hangs: --max-instructions 100000: reached, CPU 0 at 0x100025\n",
        "dies on westmere (soft): guest crashed: triple fault\n",
        "RBX 0000000012345678",
        "12 cells: 4 passed, 6 failed, 2 skipped; tests: 4 passed, 2 failed, 2 skipped\n",
    ] {
        assert!(output.contains(part), "{part}\n{output}");
    }
    // A cell that fails is said at once.
    assert_eq!(
        errors.lines().filter(|line| line.starts_with("minivmm: ")).count(),
        6,
        "{errors}"
    );
}

// covers: matrix/expected
// covers: matrix/shard
// covers: matrix/merge
// covers: matrix/junit
// covers: matrix/html
#[test]
fn shards_merge_to_the_same_table_and_a_change_fails() {
    let folder = zoo();
    // Fewer runs.
    for name in ["hangs.elf", "hangs.toml", "nothing.elf"] {
        std::fs::remove_file(folder.path().join(name)).unwrap();
    }
    let file = |name: &str| folder.path().join(name);
    let (expected, html) = (file("expected.txt"), file("matrix.html"));
    let files = [
        ("--guests", folder.path()),
        ("--expected", &expected),
        ("--html", &html),
    ];
    let (status, output, errors) = matrix(&["--model", "all", "--accept"], &files);
    assert_eq!(status, Some(0), "{output}{errors}");
    // What fails as expected is no failure.
    let (status, output, _) = matrix(&["--model", "all"], &files);
    assert_eq!(status, Some(0), "{output}");
    let page = std::fs::read_to_string(&html).unwrap();
    assert!(page.contains("dies on p6 (soft)") && !page.contains("Not as expected"));

    let parts: Vec<_> = (1..=3)
        .map(|n| {
            let path = file(&format!("{n}.xml"));
            let shard = format!("{n}/3");
            let files = [
                ("--guests", folder.path()),
                ("--expected", &expected),
                ("--junit", &path),
            ];
            let (status, output, _) = matrix(&["--shard", &shard], &files);
            assert_eq!(status, Some(0), "shard {shard}: {output}");
            path
        })
        .collect();
    let names: Vec<&str> = parts.iter().map(|path| path.to_str().unwrap()).collect();
    let merge = |names: &[&str]| matrix(&[&["merge"], names].concat(), &[("--expected", &expected)]);
    let (status, output, errors) = merge(&names);
    assert_eq!(status, Some(0), "{output}{errors}");
    let all = x86::model::MODELS.len();
    let sum = format!("{} cells: {} passed, {} failed, 0 skipped", 4 * all, 2 * all, 2 * all);
    assert!(output.contains(&sum), "{output}");
    let (status, _, errors) = merge(&names[..2]);
    assert_eq!(
        (status, errors.as_str()),
        (Some(2), "minivmm: matrix merge: shard 3/3 is missing\n")
    );

    // A test that holds no more, one that is gone with its guest, one that is new.
    folder.file(
        "holds.elf",
        reporter("TAP version 14\n1..2\nnot ok 1 - a\nok 2 - c\n", 1),
    );
    std::fs::remove_file(file("dies.elf")).unwrap();
    let (status, output, _) = matrix(&["--model", "all"], &files);
    assert_eq!(status, Some(1));
    for line in [
        "-[soft] dies  FAIL",
        "-[soft] holds/a  pass",
        "+[soft] holds/a  FAIL",
        "+[soft] holds/c  pass",
    ] {
        assert!(output.contains(line), "{line}\n{output}");
    }
    assert!(output.contains("holds on p6 (soft): 1 of 2 tests failed\n"), "{output}");
    assert!(
        !output.contains("fails on p6"),
        "what was expected is not reported again: {output}"
    );
    assert!(std::fs::read_to_string(&html).unwrap().contains("Not as expected"));
}

// covers: matrix/engines
#[test]
fn an_engine_that_is_not_to_be_had_is_a_skip_with_its_reason() {
    let folder = Folder::new();
    // No such host.
    folder.file("hello.elf", hello());
    folder.file("hello.toml", "options = [\"--trace\", \"/dev/null/x\"]\n");
    let (status, _, errors) = matrix(&["--model", "p6"], &[("--guests", folder.path())]);
    assert_eq!(status, Some(1), "an option that is refused is a failure: {errors}");
    folder.file("hello.toml", "");
    let arguments = ["--model", "p6", "--engine", "soft", "--engine", "kvm"];
    let (status, output, errors) = matrix(&arguments, &[("--guests", folder.path())]);
    assert_eq!(status, Some(0), "{output}{errors}");
    assert!(output.contains("2 cells: "), "{output}");
    // Where this host has it, the cell has run.
    let ran = output.contains("2 cells: 2 passed");
    assert!(ran || output.contains("skip: --engine kvm: "), "{output}");
}

// covers: matrix/bad-input
#[test]
fn what_is_wrong_is_one_line_and_status_2() {
    let folder = zoo();
    let kernel = folder.path().join("hello.elf");
    let junk = folder.file("junk", "no kernel at all");
    let (kernel, junk) = (kernel.to_str().unwrap(), junk.to_str().unwrap());
    for (arguments, words) in [
        (&[][..], "--guests"),
        (&["--guests", "/nowhere"], "--guests /nowhere: no such file"),
        (&["--kernel", junk], "junk"),
        (&["--kernel", kernel, "--model", "pentium"], "pentium"),
        (&["--kernel", kernel, "--shard", "5/4"], "5/4"),
        (&["--kernel", kernel, "--expected", "/nowhere"], "--expected /nowhere"),
        (&["--kernel", kernel, "--expected", junk], "junk: line 1"),
        (&["--kernel", kernel, "--accept"], "--expected"),
        (&["merge"], "FILE"),
        (&["merge", junk], "not JUnit XML"),
        (&["--kernel", kernel, "--guests", "/tmp"], "--guests"),
    ] {
        let (status, output, errors) = matrix(arguments, &[]);
        assert_eq!((status, output.as_str()), (Some(2), ""), "{arguments:?} {errors}");
        assert!(
            errors.contains(words) && errors.lines().count() == 1,
            "{arguments:?}: {errors}"
        );
    }
}
