use super::*;

#[test]
fn bytes_survive_as_text() {
    for bytes in [&b""[..], b"a", &[0, 255, 16, 1]] {
        assert_eq!(unhex(&hex(bytes)).as_deref(), Some(bytes));
    }
    for text in ["0", "0g", "+1", "é0", "0é1"] {
        assert_eq!(unhex(text), None, "{text}");
    }
}

// covers: reverse/replay-bad-input
#[test]
fn a_log_is_read_up_to_where_it_breaks_off_and_not_where_it_is_damaged() {
    let whole = "[1,1,\"input\",\"6162\"]\n[1,5,\"check\",\"00ff\"]\n[9,9,\"host\",\"SIGTERM\"]\n";
    let (entries, head, closed) = lines(whole).unwrap();
    assert_eq!(entries[0].what, What::Input(Inlet::Serial, b"ab".to_vec()));
    assert_eq!(entries[1].what, What::Check(255));
    assert_eq!((entries.len(), head), (2, Moment { steps: 9, ticks: 9 }));
    assert_eq!((closed.reason.as_deref(), closed.broken), (Some("SIGTERM"), false));
    for cut in 0..whole.len() {
        let (some, _, closed) = lines(&whole[..cut]).unwrap();
        assert!(closed.broken && entries.starts_with(&some), "{cut}");
    }
    let frame = Inlet::Virtio { device: 2, port: 0 };
    let (entries, ..) = lines("[1,1,\"virtio\",\"2 0 00ff\"]\n").unwrap();
    assert_eq!(entries[0].what, What::Input(frame, vec![0, 255]));
    let (_, _, closed) = lines("[1,1,\"guest\",\"\"]\n").unwrap();
    assert_eq!((closed.reason, closed.broken), (None, false));
    for (damaged, says) in [
        ("nonsense\n", "line 1: damaged"),
        ("[1,1,\"input\",\"61\"]\n\n[2,2,\"guest\",\"\"]\n", "line 2: damaged"),
        ("[1,1,\"input\",\"6\"]\n", "hexadecimal"),
        ("[1,1,\"input\"]\n", "damaged"),
        ("[1,1,\"virtio\",\"00ff\"]\n", "not a device"),
        ("[1,1,\"virtio\",\"999 0 00\"]\n", "not a device"),
        ("[-1,1,\"input\",\"61\"]\n", "damaged"),
        ("[1,1,\"output\",\"61\"]\n", "unknown kind"),
        ("[2,2,\"input\",\"61\"]\n[1,9,\"input\",\"61\"]\n", "line 2: earlier"),
    ] {
        let error = lines(damaged).unwrap_err().to_string();
        assert!(error.contains(says), "{damaged:?}: {error}");
    }
}
