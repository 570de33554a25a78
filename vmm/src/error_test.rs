use super::*;

// covers: exit-status/status-codes
#[test]
fn statuses_are_the_documented_numbers() {
    for (status, code) in [
        (Status::Done, 0),
        (Status::DebugExit(0), 1),
        (Status::DebugExit(1), 3),
        (Status::DebugExit(0x10), 33),
        (Status::DebugExit(0x7f), 255),
        (Status::DebugExit(0x1_0080), 1),
        (Status::Usage, 2),
        (Status::Crash, 4),
        (Status::Internal, 6),
        (Status::Limit, 8),
        (Status::Differs, 1),
    ] {
        assert_eq!(status.code(), code, "{status:?}");
    }
}

#[test]
fn every_message_is_one_line() {
    let file = Error::File {
        option: "--kernel",
        path: "/nowhere".into(),
        source: io::ErrorKind::NotFound.into(),
    };
    let os = Error::File {
        option: "--kernel",
        path: "/x".into(),
        source: io::Error::from_raw_os_error(13),
    };
    for error in [
        file,
        os,
        Error::Memory {
            size: 1,
            reason: "too small".into(),
        },
    ] {
        assert_eq!(error.to_string().lines().count(), 1, "{error}");
    }
    let os = Error::File {
        option: "--kernel",
        path: "/x".into(),
        source: io::Error::from_raw_os_error(13),
    };
    assert_eq!(os.to_string(), "--kernel /x: permission denied");
}
