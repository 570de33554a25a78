//! gdb walks through the source of a program, forwards and backwards: by lines, into functions and out of them, and to whoever
//! wrote what is wrong.

use guest_tests::gdb::{Guest, says};
use guest_tests::{WALK, WALK_SYMBOLS};
use std::path::Path;

fn session(options: &[&str], script: &str) -> String {
    let guest = Guest::start(Path::new(WALK), &[&["--paused", "--serial", "null"], options].concat());
    // Its line for the code that leads to `guest` is in another file.
    let said = guest.gdb(&format!("file {WALK_SYMBOLS}\nbreak guest\ncontinue\n{script}\nkill\n"));
    guest.finish().must_end_with(0);
    said
}

/// A line that loops is a single packet; a call is stepped over, into and out of.
// covers: gdb/range-step
#[test]
fn a_line_is_one_step_however_long_it_loops() {
    let said = session(
        &[],
        "next\nset debug remote on\nnext\nset debug remote off\nprint left\necho stepping\\n\n\
         step\nfinish\nnext\nprint first\nbreak leaf\nnext\nprint x\n",
    );
    says(
        &said,
        &[
            "Breakpoint 1, guest ()",
            "30\t    while (left) left--;",
            "31\t    word first = work(3);",
            "$1 = 0",
            "stepping",
            "work (n=3)",
            "Value returned is $2 = 9",
            "32\t    word second = work(100000);",
            "$3 = 9",
            "Breakpoint 2, leaf (x=0)",
            "$4 = 0",
        ],
    );
    // Two lines' steps, at most, each with a look at registers; not fifty thousand rounds.
    let packets = said.matches("Sending packet: $vCont;").count();
    let ranges = said.matches("Sending packet: $vCont;r").count();
    assert!((1..4).contains(&ranges) && packets < 8, "{ranges} of {packets}\n{said}");
}

// covers: gdb/reverse-lines
#[test]
fn lines_and_calls_are_undone() {
    let said = session(
        &["--reverse"],
        "break spoil\ncontinue\nreverse-finish\nprint first\nreverse-next\nreverse-next\nprint sum\nreverse-step\n\
         print total\necho stepping\\n\nreverse-step\ninfo locals\nbreak leaf if x == 2\nreverse-continue\nbacktrace\nreverse-finish\n\
         delete\necho onwards\\n\nfinish\nnext\nnext\nnext\nreverse-continue\n",
    );
    says(
        &said,
        &[
            "Breakpoint 2, spoil (at=1)",
            "33\t    spoil(first % 8);",
            "$1 = 9",
            "33\t    spoil(first % 8);",
            "32\t    word second = work(100000);",
            "$2 = 3",
            // Into the loop's last lines, from behind.
            "work (n=3)",
            "$3 = 9",
            "stepping",
            "total = 9",
            "Breakpoint 3, leaf (x=2)",
            "#1  0x",
            "in work (n=3)",
            "#2  0x",
            "in guest ()",
            "in work (n=3)",
            "onwards",
            "Value returned is $4 = 9",
            "32\t    word second = work(100000);",
            "33\t    spoil(first % 8);",
            "34\t    table[0] = second;",
            "No more reverse-execution history",
        ],
    );
}

/// From the end of the run to the store, and to where its address comes from.
// covers: gdb/reverse-lines, gdb/reverse
#[test]
fn whoever_wrote_it_is_found_from_the_end_of_the_run() {
    let said = session(
        &["--reverse"],
        "delete\ncontinue\nprint table[1]\nwatch table[1]\nreverse-continue\nprint at\nup\nprint first\ndelete\n\
         reverse-finish\nreverse-next\nreverse-next\nprint left\necho value\\n\nwatch sum\nreverse-continue\nprint x\nreverse-continue\n\
         print sum\n",
    );
    says(
        &said,
        &[
            "No more reverse-execution history",
            "= 77",
            "Hardware watchpoint 2: table[1]",
            "Old value = 77",
            "New value = 0",
            "entry[at] = 77;",
            "= 1",
            "in guest ()",
            "= 9",
            "33\t    spoil(first % 8);",
            "32\t    word second = work(100000);",
            "= 0",
            "value",
            "Hardware watchpoint 3: sum",
            "Old value = 3",
            "New value = 1",
            "= 2",
            "Old value = 1",
            "New value = 0",
        ],
    );
}
