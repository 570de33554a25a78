use super::*;
use crate::directory::{
    format::{GuestSources, HeaderEnd, Mark},
    sink::{Room, Sink},
};

fn header(model: &str) -> Header {
    Header {
        model: model.into(),
        tsc_khz: 1000,
        cpus: 1,
        kernel: "k".into(),
        filters: Vec::new(),
        start: None,
        stop: None,
        buffer: None,
        files: GuestSources::default(),
        rtit_ctl: 0,
        end: Some(HeaderEnd {
            reason: "end".into(),
            steps: 9,
            ticks: 9,
            complete: true,
        }),
    }
}

fn mark(offset: u64) -> Record {
    Record::Mark {
        mark: Mark::Segment,
        offset,
        step: 1,
        tick: 2,
        ip: Some(3),
    }
}

fn mapping(offset: u64) -> Record {
    Record::Mapping {
        offset,
        step: 1,
        vmcs: None,
        space: 2,
        page: 3,
        pages: 4,
        first: 5,
        file: Some(0),
    }
}

/// A part of two segments, each of which begins with a mark.
fn part(folder: &Path, model: &str) {
    folder::prepare(folder, false).unwrap();
    let mut sink = Sink::new(folder, 0, None, Room::new(None)).unwrap();
    for segment in 0..2 {
        if segment > 0 {
            sink.next_segment().unwrap();
        }
        sink.record(&mark(sink.written()));
        sink.content(7, &[9; PAGE]);
        sink.file("/lib/x", &[1, 2, 3]);
        sink.record(&mapping(sink.written()));
        sink.write(&mut vec![segment; 100]).unwrap();
    }
    folder::write_header(folder, &header(model)).unwrap();
}

/// The frames of a file: offset and payload.
fn frames(path: &Path, kind: Kind) -> Vec<(u64, Vec<u8>)> {
    let mut source = BufReader::new(File::open(path).unwrap());
    let (mut frames, mut payload) = (Vec::new(), Vec::new());
    while let Some(header) = next(&mut source, kind, &mut payload).unwrap() {
        frames.push((header.unwrap().offset, payload.clone()));
    }
    frames
}

// covers: epochs/join
#[test]
fn segments_of_parts_follow_each_other() {
    let folder = std::env::temp_dir().join(format!("minivmm-join-{}", std::process::id()));
    fs::create_dir(&folder).unwrap();
    let at = |name: &str| folder.join(name);
    part(&at("a"), "m");
    part(&at("b"), "m");
    part(&at("c"), "other");
    let whole = at("whole");
    let another = join(&[at("a"), at("c")], &whole, false).unwrap_err().to_string();
    assert!(another.contains("another recording than"), "{another}");
    join(&[at("a"), at("b")], &whole, false).unwrap();
    assert!(!at("a").exists() && !at("b").exists());
    for segment in 0..4 {
        let packets = frames(&whole.join(Kind::Packets.file(0, segment)), Kind::Packets);
        let begin = 100 * u64::from(segment);
        assert_eq!(packets, [(begin, vec![segment as u8 % 2; 100])]);
        let side = frames(&whole.join(Kind::Side.file(0, segment)), Kind::Side);
        assert_eq!(side.len(), 1);
        assert_eq!(side[0].0, begin + 100);
        let records: Vec<Record> = Records::new(&side[0].1).map(Result::unwrap).collect();
        let [first, Record::Content { .. }, Record::File { at, path, build_id }, last] = records[..] else {
            panic!("{records:?}");
        };
        assert_eq!((first, last), (mark(begin), mapping(begin)));
        let text = &side[0].1[at..at + path + build_id];
        assert_eq!((text, path), (&b"/lib/x\x01\x02\x03"[..], 6));
    }
    assert!(!whole.join(Kind::Packets.file(0, 4)).exists());
    // A part that was cut, or changed, is no part.
    for (name, cut) in [("d", true), ("e", false)] {
        part(&at(name), "m");
        let file = at(name).join(Kind::Side.file(0, 1));
        let mut bytes = fs::read(&file).unwrap();
        match cut {
            true => bytes.truncate(bytes.len() - 1),
            false => bytes[60] ^= 1,
        }
        fs::write(&file, bytes).unwrap();
        let error = join(&[at(name)], &at(&format!("{name}.joined")), false).unwrap_err();
        assert!(
            error.to_string().contains("damaged, or not the trace of a part"),
            "{error}"
        );
    }
    fs::remove_dir_all(folder).unwrap();
}
