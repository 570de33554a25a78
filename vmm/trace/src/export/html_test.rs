use super::*;

// covers: trace/export-html
#[test]
fn nothing_of_a_guest_can_end_the_data_or_be_html() {
    let hostile = [
        "</script><script>alert(1)</script>",
        "<!--<script>",
        "/*SCRIPT*/",
        "\"]}'\\",
        "\u{2028}\u{0}\n&lt;",
    ];
    let text = embedded(&json!({ "names": hostile }));
    assert!(!text.contains('<') && !text.contains('\n'), "{text}");
    let back: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(back["names"], json!(hostile));
}

// covers: trace/export-html
#[test]
fn the_page_takes_nothing_from_elsewhere_and_makes_no_html_of_text() {
    for part in [PAGE, STYLE, SCRIPT] {
        for word in [
            "http:",
            "https:",
            "//cdn",
            "@import",
            "url(",
            "src=",
            "innerHTML",
            "outerHTML",
            "insertAdjacent",
            "document.write",
            "eval(",
        ] {
            assert!(!part.contains(word), "{word}");
        }
    }
    for place in ["/*STYLE*/", "/*DATA*/", "/*SCRIPT*/"] {
        assert_eq!(PAGE.matches(place).count(), 1, "{place}");
    }
    assert!(!SCRIPT.contains("</"), "it would end the script");
    assert!(PAGE.contains("default-src 'none'"));
}

// covers: trace/export-html
#[test]
fn parts_of_time_become_longer_and_lose_no_instruction() {
    let mut cell = Cell::default();
    for bin in [0, 0, 1, 2, 3, 7, 8] {
        cell.add(bin, 10);
    }
    assert_eq!(cell.0, [(0, 20), (1, 10), (2, 10), (3, 10), (7, 10), (8, 10)]);
    cell.halve();
    assert_eq!(cell.0, [(0, 30), (1, 20), (3, 10), (4, 10)]);
    cell.halve();
    cell.halve();
    assert_eq!(cell.0, [(0, 60), (1, 10)]);
}
