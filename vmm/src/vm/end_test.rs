use super::*;
use crate::error::Error;
use std::io;

// covers: exit-status/6
// covers: exit-status/status-codes
#[test]
fn every_end_has_its_status() {
    let replayed = |reason: &str, broken| End::Replayed {
        steps: 5,
        reason: reason.into(),
        broken,
    };
    for (end, code, says) in [
        (End::PowerOff, 0, None),
        (End::Reset, 0, None),
        (End::Quit, 0, None),
        (End::DebugExit(5), 11, None),
        (End::Signal(libc::SIGTERM), 2, Some("SIGTERM")),
        (End::OutputClosed, 2, Some("standard output")),
        (End::TripleFault("RIP 1".into()), 4, Some("triple fault\nRIP 1")),
        (End::Halted("HLT".into()), 4, Some("HLT")),
        (End::Kvm("reason 9\nRIP 1".into()), 2, Some("--engine soft")),
        (
            End::Defect("block 7 has no end".into()),
            6,
            Some("internal error: block 7 has no end"),
        ),
        (End::Instructions(9), 8, Some("--max-instructions 9")),
        (End::Diverged(7), 2, Some("at step 7")),
        (replayed("SIGTERM", false), 0, Some("ends at step 5: SIGTERM")),
        (replayed("breaks off", true), 2, Some("breaks off")),
        (End::Timeout(Duration::from_millis(1500)), 8, Some("--timeout 1.5")),
    ] {
        assert_eq!(end.status().code(), code, "{end:?}");
        match (end.message(), says) {
            (Some(message), Some(says)) => assert!(message.contains(says), "{message}"),
            (message, says) => assert_eq!(message.as_deref(), says),
        }
    }
    let source = io::Error::from_raw_os_error(libc::EMFILE);
    assert_eq!(
        Error::System {
            what: "creating a timer",
            source
        }
        .status()
        .code(),
        6
    );
}
