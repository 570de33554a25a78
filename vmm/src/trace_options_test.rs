//! Options of recordings.

use super::*;

fn options(text: &[&str]) -> Result<Option<RecordingOptions>, String> {
    let line = MonitorLine::try_parse_from(text).map_err(|error| error.to_string())?;
    line.arguments.options().map_err(|error| error.to_string())
}

// covers: trace/options
#[test]
fn options_reach_the_recorder_and_bad_ones_are_told() {
    assert_eq!(options(&[]), Ok(None));
    assert_eq!(options(&["--trace", "d"]), Ok(Some(RecordingOptions::new("d"))));
    let all = [
        "--trace",
        "d",
        "--trace-filter",
        "kernel",
        "--trace-filter",
        "cr3=0x1000",
        "--trace-filter",
        "ip=0x10-0x20",
        "--trace-filter",
        "comm=a b",
        "--trace-filter",
        "pid=17",
        "--trace-start",
        "0x1234",
        "--trace-stop",
        "hypercall",
        "--trace-buffer",
        "1M",
        "--trace-on-error",
        "continue",
        "--force",
    ];
    let expected = RecordingOptions {
        force: true,
        filters: vec![
            Filter::Kernel,
            Filter::Cr3(0x1000),
            Filter::Ip(16, 32),
            Filter::Comm("a b".into()),
            Filter::Pid(17),
        ],
        start: Some(When::Address(0x1234)),
        stop: Some(When::Hypercall),
        buffer: Some(1 << 20),
        on_error: OnError::Continue,
        ..RecordingOptions::new("d")
    };
    assert_eq!(options(&all), Ok(Some(expected)));
    let ip = ["--trace-filter", "ip=1-2"];
    for (text, says) in [
        (&["--trace-filter", "kernel"][..], "--trace <DIR>"),
        (&["--force"], "--trace <DIR>"),
        (&["--trace", "d", "--trace-filter", "rust"], "cr3=X"),
        (&["--trace", "d", "--trace-filter", "ip=2-1"], "ends before"),
        (&["--trace", "d", "--trace-filter", "ip=2"], "ip=A-B"),
        (&["--trace", "d", "--trace-filter", "cr3=x"], "not a number"),
        (&["--trace", "d", "--trace-filter", "comm="], "1 to 15 bytes"),
        (
            &["--trace", "d", "--trace-filter", "comm=sixteen-letters."],
            "1 to 15 bytes",
        ),
        (
            &["--trace", "d", "--trace-filter", "pid=0"],
            "not the number of a process",
        ),
        (
            &["--trace", "d", "--trace-filter", "pid=4294967296"],
            "not the number of a process",
        ),
        (
            &["--trace", "d", "--trace-filter", "cr3=1", "--trace-filter", "cr3=2"],
            "only one",
        ),
        (&[&["--trace", "d"], &ip[..], &ip, &ip, &ip, &ip].concat(), "only 4"),
        (&["--trace", "d", "--trace-buffer", "1K"], "less than 512K"),
        (&["--trace", "d", "--trace-buffer", "x"], "not a size"),
        (&["--trace", "d", "--trace-start", "main"], "--symbols"),
        (&["--trace", "d", "--trace-on-error", "ignore"], "--trace-on-error"),
    ] {
        let error = options(text).unwrap_err();
        assert!(error.contains(says), "{text:?}: {error}");
    }
}

// covers: trace/triggers
#[test]
fn what_is_waited_for_is_read_and_said_again() {
    for (text, when) in [
        ("0xffffffff81000000", When::Address(0xffff_ffff_8100_0000)),
        ("0x1000", When::Address(4096)),
        ("instructions=12", When::Instructions(12)),
        ("hypercall", When::Hypercall),
        ("port=0x80", When::Port(0x80, None)),
        ("port=0x80:0x1", When::Port(128, Some(1))),
    ] {
        assert_eq!(parse_when(text, None).unwrap(), when, "{text}");
        assert_eq!(when.to_string(), text);
    }
    for (text, says) in [
        ("start_kernel", "--symbols"),
        ("12x", "not an address"),
        ("instructions=0", "from 1 on"),
        ("instructions=", "from 1 on"),
        ("port=", "port=0x80"),
        ("port=0x10000", "0xffff"),
        ("port=1:0x100000000", "32 bits"),
        ("", "--symbols"),
    ] {
        let error = parse_when(text, None).unwrap_err().to_string();
        assert!(error.contains(says), "{text}: {error}");
    }
    let missing = parse_when("start_kernel", Some(Path::new("/no/such/vmlinux")))
        .unwrap_err()
        .to_string();
    assert!(missing.contains("/no/such/vmlinux"), "{missing}");
}
