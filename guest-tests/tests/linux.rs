//! The stock Linux guest: Debian's cloud kernel with busybox.

use guest_tests::{INIT_MARKER, linux, linux_in_minivmm, run};
use std::process::Command;
use std::time::Duration;

const LIMIT: Duration = Duration::from_secs(500);

/// The script's own lines are in guest-tests/linux/scripts/selftest.
// covers: 2/boot-debian, 2/loader-bzimage, 2/exit-0, 2/loader-acpi-power
#[test]
fn debian_boots_to_a_shell_runs_the_script_and_powers_off() {
    let guest = run(
        &mut linux_in_minivmm("console=ttyS0 panic=-1 minivmm.script=selftest"),
        LIMIT,
    )
    .must_end_with(0);
    let console = &guest.console;
    assert!(console.contains(INIT_MARKER), "{console}");
    let host = Command::new("md5sum").arg(&linux().sample).output().unwrap();
    let md5 = String::from_utf8(host.stdout).unwrap();
    let md5 = md5.split(' ').next().unwrap();
    assert_eq!(guest.fact("selftest: md5"), Some(md5), "{console}");
    for line in [
        "gzip round trip holds",
        "fork loop holds",
        "floating point holds",
        "the clock goes on",
        "all holds",
    ] {
        assert!(console.contains(&format!("selftest: {line}\n")), "{line}\n{console}");
    }
    assert!(
        console.contains("minivmm-guest: script selftest ended with status 0\n"),
        "{console}"
    );
    for word in ["Oops", "BUG:", "WARNING:", "Kernel panic", "Call Trace"] {
        assert!(!console.contains(word), "{word}\n{console}");
    }
}
