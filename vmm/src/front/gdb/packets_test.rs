use super::*;

fn frames(bytes: &[u8]) -> Vec<Frame> {
    let mut framer = Framer::default();
    bytes.iter().filter_map(|byte| framer.push(*byte)).collect()
}

// covers: gdb/packets
#[test]
fn packets_come_out_of_whatever_is_around_them() {
    let packet = |body: &str| Frame::Packet(body.into());
    for (line, expected) in [
        ("+$?#3f", vec![packet("?")]),
        ("$?#3F+", vec![packet("?")]),
        ("$#00", vec![packet("")]),
        ("$?#3e$?#3f", vec![Frame::Damaged, packet("?")]),
        ("$?#xx", vec![Frame::Damaged]),
        ("-\x03+$m0,4#fd", vec![Frame::Nack, Frame::Interrupt, packet("m0,4")]),
        ("P", vec![Frame::Foreign]),
        ("$?#3f\n", vec![packet("?"), Frame::Foreign]),
        ("\0", vec![Frame::Foreign]),
        ("$qSup$?#3f", vec![packet("?")]),
        ("$a\x03b#c6", vec![packet("a\x03b")]),
        ("$?#3", vec![]),
    ] {
        assert_eq!(frames(line.as_bytes()), expected, "{line}");
    }
    let long = vec![b'x'; LONGEST + 1];
    assert_eq!(frames(&frame(&long)), [Frame::Oversized]);
    assert_eq!(frames(&frame(&long[1..])), [Frame::Packet(long[1..].to_vec())]);
}

// covers: gdb/packets
#[test]
fn what_a_packet_cannot_hold_is_escaped() {
    assert_eq!(frame(b"OK"), b"$OK#9a");
    assert_eq!(escape(b"a#b$c}d*"), b"a}\x03b}\x04c}\x5dd}\x0a");
    assert_eq!(
        (hex(&[0, 0xab]), error("no #")),
        ("00ab".into(), b"E.no }\x03".to_vec())
    );
}
