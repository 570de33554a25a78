use super::*;

fn all() -> Vec<Record> {
    vec![
        Record::Mark {
            mark: Mark::Segment,
            offset: 1 << 40,
            step: 5,
            tick: u64::MAX,
            ip: Some(7),
        },
        Record::Page {
            space: 0,
            page: u64::MAX >> 12,
            content: 0,
        },
        Record::Page {
            space: space(0x1234_5000, 0),
            page: 0,
            content: 300,
        },
        Record::Change {
            offset: 7,
            ip: Some(0),
            step: 0,
            space: u64::MAX,
            page: 3,
            content: u64::MAX,
        },
        Record::Change {
            offset: u64::MAX,
            ip: None,
            step: 1,
            space: 0,
            page: 0x80,
            content: 1,
        },
        Record::Sync {
            offset: 0x4000,
            step: 1 << 33,
            tick: 9,
        },
        Record::Tsc {
            offset: 0x4000,
            step: 1 << 33,
            value: u64::MAX,
        },
        Record::Time {
            offset: 1,
            step: 2,
            tick: 3,
        },
        Record::Thread {
            offset: 4,
            step: 1 << 34,
            tid: u32::MAX,
            tgid: 0,
            comm: *b"fifteen-letters\0",
        },
        Record::Mapping {
            offset: 5,
            step: 1 << 34,
            vmcs: None,
            space: space(0x1234_5000, 0),
            page: 0x7fff_ffff,
            pages: 1 << 20,
            first: 3,
            file: Some(0),
        },
        Record::Mapping {
            offset: 5,
            step: 1 << 34,
            vmcs: Some(0xf_ffff_ffff_f000),
            space: 1,
            page: 0,
            pages: 1,
            first: 0,
            file: None,
        },
    ]
}

// covers: trace/format
#[test]
fn records_go_out_and_come_back_and_break_off_anywhere() {
    let mut encoder = Encoder::default();
    let page = [0x90; PAGE];
    encoder.content(&page);
    encoder.file("/lib/x", &[1, 2, 3]);
    encoder.file("", &[]);
    for record in all() {
        encoder.record(&record);
    }
    let bytes = &encoder.bytes;
    let file = |at, path, build_id| Record::File { at, path, build_id };
    let at = 1 + PAGE + 3;
    let mut expected = vec![Record::Content { at: 1 }, file(at, 6, 3), file(at + 6 + 3 + 3, 0, 0)];
    expected.extend(all());
    let back: Result<Vec<Record>, NoRecord> = Records::new(bytes).collect();
    assert_eq!(back, Ok(expected.clone()));
    for len in (0..bytes.len()).filter(|len| *len < 3 || *len > PAGE - 3) {
        let found: Vec<_> = Records::new(&bytes[..len]).collect();
        let good = found.iter().take_while(|record| record.is_ok()).count();
        assert!(found.len() <= good + 1, "{len}: an error is the last");
        assert!(found.iter().flatten().eq(&expected[..good]), "{len}");
    }
    assert_eq!(Records::new(&[11]).next(), Some(Err(NoRecord)));
    assert_eq!(Records::new(&[9, 2, 0, b'x']).next(), Some(Err(NoRecord)));
    assert_eq!(Records::new(&[9, 0xff, 0xff, 0x7f, 0]).next(), Some(Err(NoRecord)));
    let long = "x".repeat(2 * LONGEST_PATH);
    let mut encoder = Encoder::default();
    encoder.file(&long, &[7; 2 * LONGEST_BUILD_ID]);
    let cut = Record::File {
        at: 4,
        path: LONGEST_PATH,
        build_id: LONGEST_BUILD_ID,
    };
    assert_eq!(Records::new(&encoder.bytes).next(), Some(Ok(cut)));
    assert_eq!(Records::new(&[2, 0xff, 0xff]).next(), Some(Err(NoRecord)));
    assert_eq!(Records::new(&[6, 7, 0, 0, 0]).next(), Some(Err(NoRecord)));
}

// covers: trace/format
#[test]
fn a_frame_header_with_any_flipped_bit_is_none() {
    let header = FrameHeader::of(b"packets", 0x1234_5678_9abc);
    let bytes = header.bytes(Kind::Packets);
    assert_eq!(FrameHeader::parse(&bytes, Kind::Packets), Some(header));
    assert_eq!(FrameHeader::parse(&bytes, Kind::Side), None);
    for bit in 0..FRAME * 8 {
        let mut bad = bytes;
        bad[bit / 8] ^= 1 << (bit % 8);
        assert_eq!(FrameHeader::parse(&bad, Kind::Packets), None, "bit {bit}");
    }
}

// covers: trace/bad-header
#[test]
fn a_header_says_what_is_wrong_with_it() {
    let header = Header {
        model: "westmere".into(),
        tsc_khz: 2_666_000,
        cpus: 2,
        kernel: "vmlinuz \"x\"".into(),
        filters: vec!["kernel".into()],
        start: None,
        stop: Some("0x1000".into()),
        buffer: Some(1 << 20),
        files: GuestSources::default(),
        rtit_ctl: 0x2000,
        end: Some(HeaderEnd {
            reason: "the guest switched itself off".into(),
            steps: 9,
            ticks: 10,
            complete: true,
        }),
    };
    let text = header.text();
    for cpus in [0, 256, usize::MAX] {
        let many = Header { cpus, ..header.clone() };
        let error = Header::parse(&many.text()).unwrap_err().to_string();
        assert!(error.contains(&format!("{cpus} vCPUs")), "{error}");
    }
    assert_eq!(Header::parse(&text).unwrap(), header);
    for older in ["1", "2", "3"] {
        let older = text.replace("\"version\": 4", &format!("\"version\": {older}"));
        assert_eq!(Header::parse(&older).unwrap(), header);
    }
    for (text, says) in [
        ("", "damaged"),
        ("{}", "not a trace"),
        ("[1]", "not a trace"),
        (&text.replace("minivmm-trace", "perf"), "not a trace"),
        (&text.replace("\"version\": 4", "\"version\": 5"), "version 5"),
        (&text.replace("\"version\": 4", "\"version\": 0"), "version 0"),
        (&text.replace("\"version\": 4", "\"version\": null"), "no version"),
        (&text.replace("westmere", "westmore"), "checksum"),
        (&text.replace("\"cpus\": 2", "\"cpus\": 3"), "checksum"),
        (&text[..text.len() / 2], "damaged"),
    ] {
        let error = Header::parse(text).unwrap_err().to_string();
        assert!(error.contains(says), "{error}");
    }
}
