use super::super::expected::tests::cell;
use super::*;
use quick_xml::{Reader, events::Event};
use std::collections::BTreeSet;

// covers: matrix/html
#[test]
fn the_report_is_well_formed_whole_in_itself_and_its_links_lead_somewhere() {
    let mut dead = cell(
        "pt",
        "p6",
        "soft",
        Verdict::Failed("crashed: <x> & \"y\"".into()),
        &["a", "-b<c>"],
    );
    dead.log = "\u{1b}[1mconsole <1> & more\u{1}\n".into();
    let report = Report {
        cells: vec![
            cell("lbr", "haswell,+rtm", "soft", Verdict::Passed, &["order", "?info"]),
            cell("lbr", "p6", "kvm", Verdict::Absent("--engine kvm: no".into()), &[]),
            dead,
        ],
        shard: None,
    };
    let html = write(&report, &["-[soft] a  pass <p6>".to_string()]);
    let mut reader = Reader::from_str(&html);
    reader.config_mut().check_end_names = true;
    let (mut ids, mut links, mut text, mut depth) = (BTreeSet::new(), BTreeSet::new(), String::new(), 0);
    loop {
        let event = reader.read_event().unwrap_or_else(|error| panic!("{error}\n{html}"));
        if let Event::Start(tag) | Event::Empty(tag) = &event {
            for attribute in tag.attributes() {
                let attribute = attribute.unwrap();
                let value = String::from_utf8(attribute.value.to_vec()).unwrap();
                match attribute.key.as_ref() {
                    b"id" => assert!(ids.insert(value), "an id twice"),
                    b"href" => drop(links.insert(value.trim_start_matches('#').to_string())),
                    b"src" => panic!("something from outside"),
                    _ => {}
                }
            }
        }
        match event {
            Event::Start(_) => depth += 1,
            Event::End(_) => depth -= 1,
            Event::Text(part) => text += &String::from_utf8_lossy(&part),
            Event::Eof => break,
            _ => {}
        }
    }
    assert_eq!((depth, links.len()), (0, 2));
    assert!(links.is_subset(&ids), "{links:?} {ids:?}");
    assert!(text.contains("haswell,+rtm") && text.contains("order"));
    assert!(!html.contains("http") && !html.contains("@import") && !html.contains("<script"));
    assert!(html.contains("width=device-width") && html.contains("Not as expected"));
    assert!(!html.contains(['\u{1b}', '\u{1}']));
}
