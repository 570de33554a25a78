//! The program as a user calls it.

use pt_packet::{LastIp, MAX_LEN, PSB, Packet, Tnt, encode};
use std::io::Write;
use std::process::{Command, Stdio};

/// Standard output, standard error, status.
fn ptdump(words: &[&str], input: &[u8]) -> (String, String, i32) {
    let mut child = Command::new(env!("CARGO_BIN_EXE_ptdump"))
        .args(words)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    // It may end before it has read anything.
    let _ = child.stdin.take().unwrap().write_all(input);
    let output = child.wait_with_output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (text(output.stdout), text(output.stderr), output.status.code().unwrap())
}

fn trace() -> Vec<u8> {
    let (mut last, mut bytes) = (LastIp::new(), Vec::new());
    for packet in [
        Packet::Psb,
        Packet::PsbEnd,
        Packet::Pad,
        Packet::TipPge(Some(0xffff_ffff_8100_0000)),
        Packet::ShortTnt(Tnt::from_bits(0b1011).unwrap()),
        Packet::Tip(Some(0xffff_ffff_8100_1234)),
        Packet::TipPgd(None),
    ] {
        let mut out = [0; MAX_LEN];
        let len = encode(&packet, &mut last, &mut out);
        bytes.extend(&out[..len]);
    }
    bytes
}

const TEXT: &str = "\
00000000  02820282028202820282028202820282  PSB
00000010  0223                              PSBEND
00000012  00                                PAD
00000013  7100000081ffff                    TIP.PGE    0xffffffff81000000
0000001a  16                                TNT        NTT
0000001b  2d3412                            TIP        0xffffffff81001234
0000001e  01                                TIP.PGD    no ip
";

// covers: trace/ptdump
#[test]
fn packets_are_printed_one_a_line() {
    let text = TEXT.to_string();
    assert_eq!(ptdump(&["-"], &trace()), (text.clone(), String::new(), 0));
    let file = std::env::temp_dir().join(format!("ptdump-{}", std::process::id()));
    std::fs::write(&file, trace()).unwrap();
    assert_eq!(ptdump(&[file.to_str().unwrap()], &[]), (text.clone(), String::new(), 0));
    std::fs::remove_file(&file).unwrap();
    let part = |from: usize, to: usize| {
        let lines: Vec<&str> = text.lines().collect();
        lines[from..to]
            .iter()
            .map(|line| format!("{line}\n"))
            .collect::<String>()
    };
    assert_eq!(ptdump(&["--from", "0x10", "--count", "2", "-"], &trace()).0, part(1, 3));
    let without = ptdump(&["--no-pad", "-"], &trace()).0;
    assert_eq!(without, part(0, 2) + &part(3, 7));
}

// covers: trace/ptdump
#[test]
fn what_is_wrong_is_said() {
    let bytes = trace();
    let damaged = [&[7, 7, 7][..], &bytes, &[0xd9, 1, 2], &PSB].concat();
    let (out, errors, status) = ptdump(&["-"], &damaged);
    assert_eq!(status, 1);
    assert_eq!(out.lines().count(), 8);
    assert_eq!(
        errors,
        "ptdump: 3 bytes in front of the PSB at 0x3 skipped\n\
         ptdump: at offset 0x22: no packet begins with d9\n\
         ptdump: 3 bytes in front of the PSB at 0x25 skipped\n"
    );
    for (words, input, message) in [
        (&["/no/such/file"][..], &[][..], "cannot read /no/such/file"),
        (&["/"], &[], "cannot read /"),
        (&[], &[], "no file"),
        (&["--bad", "-"], &[], "unknown option --bad"),
        (&["a", "b"], &[], "more than one file"),
        (&["--count", "x", "-"], &[], "--count wants a number"),
        (&["--from"], &[], "--from wants a number"),
        (&["--from", "100", "-"], &[1], "--from 0x64 is behind the end of -, 0x1"),
    ] {
        let (out, errors, status) = ptdump(words, input);
        assert_eq!((out.as_str(), status), ("", 2), "{words:?}");
        assert!(errors.starts_with(&format!("ptdump: {message}")), "{words:?}: {errors}");
        assert_eq!(errors.lines().count(), 1);
    }
    // No PSB is no damage to a packet, but is said.
    let (out, errors, status) = ptdump(&["-"], &[1, 2, 3]);
    assert_eq!(
        (out.as_str(), errors.as_str(), status),
        ("", "ptdump: no PSB in the last 3 bytes\n", 0)
    );
    let (out, _, status) = ptdump(&["--help"], &[]);
    assert!(out.starts_with("usage: ptdump") && status == 0);
}
