use super::*;

// covers: gdb/option
#[test]
fn addresses_are_loopback_unless_a_host_is_named() {
    for (text, expected) in [
        ("tcp:1234", "tcp:127.0.0.1:1234"),
        ("tcp:0.0.0.0:7", "tcp:0.0.0.0:7"),
        ("tcp:localhost:7", "tcp:127.0.0.1:7"),
        ("tcp:[::1]:7", "tcp:[::1]:7"),
        ("unix:a b", "unix:a b"),
    ] {
        assert_eq!(DebugAddress::parse(text.as_bytes()).unwrap().to_string(), expected);
    }
    for (text, says) in [
        ("1234", "not tcp:[HOST:]PORT or unix:PATH"),
        ("tcp:", "no port"),
        ("tcp:65536", "no port"),
        ("tcp:host:1", "no IP address"),
        ("unix:", "needs a path"),
    ] {
        let error = DebugAddress::parse(text.as_bytes()).unwrap_err();
        assert!(error.to_string().contains(says), "{text}: {error}");
    }
    assert_eq!(DebugAddress::parse(b"tcp:1234"), Ok(DebugAddress::USUAL));
}
