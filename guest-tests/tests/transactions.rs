//! Transactions of a Linux guest, on several CPUs.

use guest_tests::{Folder, Outcome, TRANSACTIONS, linux_in_minivmm, run};
use std::fs;
use std::time::Duration;

const LIMIT: Duration = Duration::from_secs(300);

/// Boots with the program, which changes shared memory so often on each CPU.
fn boot(model: &str, cpus: u32, rounds: u64) -> Outcome {
    let folder = Folder::new(&format!("rtm-{model}"));
    fs::copy(TRANSACTIONS, folder.join("transactions")).unwrap();
    let script = format!(
        "#!/bin/sh\ngrep -m 1 -o -w rtm /proc/cpuinfo | sed 's/^/rtm: flag /'\n./transactions {rounds}\necho rtm: ended $?\n"
    );
    folder.script("run", &script);
    let mut command = linux_in_minivmm("console=ttyS0 panic=-1");
    command.args(["--cpu-model", model, "--cpus", &cpus.to_string(), "--inject"]);
    command.arg(&*folder);
    run(&mut command, LIMIT).must_end_with(0)
}

/// The program is guest-tests/guests/transactions.c.
// covers: rtm/linux
#[test]
fn linux_runs_transactions_on_two_cpus() {
    let full = guest_tests::full();
    for (model, cpus, short) in [
        ("skylake-server,+rtm", 2, true),
        ("haswell,+rtm", 2, false),
        ("icelake-server,+rtm", 4, false),
        ("sapphirerapids,+rtm", 2, false),
    ] {
        if !short && !full {
            continue;
        }
        let rounds = 20_000;
        let guest = boot(model, cpus, rounds);
        let console = &guest.console;
        let number = |name: &str| -> u64 {
            let text = guest.fact(&format!("rtm: {name}"));
            let text = text.unwrap_or_else(|| panic!("{model}: no {name}\n{console}"));
            text.parse()
                .unwrap_or_else(|_| panic!("{model}: {name} is {text}\n{console}"))
        };
        assert_eq!(guest.fact("rtm: flag"), Some("rtm"), "{model}\n{console}");
        assert_eq!(guest.fact("rtm: ended"), Some("0"), "{model}\n{console}");
        assert_eq!(number("cpus"), u64::from(cpus), "{model}");
        let whole = u64::from(cpus) * rounds;
        assert_eq!(
            (number("total"), number("sum"), number("torn")),
            (whole, whole, 0),
            "{model}\n{console}"
        );
        // About half gave up once; the turns of the CPUs ended some; nearly all were committed in the end.
        assert!(number("explicits") > whole / 3, "{model}\n{console}");
        assert!(number("conflicts") > 0, "{model}\n{console}");
        assert!(number("commits") > whole * 9 / 10, "{model}\n{console}");
        assert!(
            number("aborts") >= number("explicits") + number("conflicts"),
            "{model}\n{console}"
        );
        for word in ["Oops", "BUG:", "WARNING:", "Call Trace", "unchecked MSR access"] {
            assert!(!console.contains(word), "{model}: {word}\n{console}");
        }
    }
}

/// Where the instructions are there and every transaction aborts at once, the lock does all.
// covers: rtm/linux
#[test]
fn a_part_whose_transactions_always_abort_needs_the_lock() {
    let guest = boot("skylake-server,+rtm,+rtm_always_abort", 2, 2000);
    let console = &guest.console;
    for (name, expected) in [
        ("total", "4000"),
        ("sum", "4000"),
        ("torn", "0"),
        ("commits", "0"),
        ("conflicts", "0"),
    ] {
        assert_eq!(guest.fact(&format!("rtm: {name}")), Some(expected), "{console}");
    }
}
