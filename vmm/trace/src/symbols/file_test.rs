use super::*;

const MAP: &str =
    "0000000000000000 D __per_cpu_start\nffffffff81000000 T _text\nffffffff81000100 T one\nffffffff81000200 t two\n";

// covers: symbols/system-map
#[test]
fn a_list_is_moved_by_the_slide_that_is_found() {
    let file = || SymbolFile {
        symbols: SymbolTable::parse(MAP).unwrap(),
        build_id: None,
    };
    let own = SymbolTable::parse(MAP).unwrap().moved(0x1200_0000);
    let origin = Origin {
        symbols: Some(&own),
        ..Origin::default()
    };
    let moved = file().resolve(origin).unwrap();
    assert_eq!(moved.lookup(0xffff_ffff_9300_0204).unwrap().to_string(), "two+0x4");
    assert_eq!(moved.address("__per_cpu_start"), Some(0));
    let reported = Origin {
        slide: Some(0x100_0000),
        ..Origin::default()
    };
    assert_eq!(
        file().resolve(reported).unwrap().address("one"),
        Some(0xffff_ffff_8200_0100)
    );
}

// covers: bad-input/symbols
#[test]
fn symbols_of_another_kernel_are_refused() {
    let own = SymbolTable::parse(&MAP.replace("one", "uno").replace("0200 t", "0280 t")).unwrap();
    let file = SymbolFile {
        symbols: SymbolTable::parse(MAP).unwrap(),
        build_id: None,
    };
    let message = file
        .resolve(Origin {
            symbols: Some(&own),
            ..Origin::default()
        })
        .unwrap_err()
        .to_string();
    assert!(
        message.starts_with("symbols of another kernel: 1 of its 3 functions"),
        "{message}"
    );
    let file = SymbolFile {
        symbols: SymbolTable::parse(MAP).unwrap(),
        build_id: Some("ab".into()),
    };
    let origin = Origin {
        build_id: Some("cd"),
        ..Origin::default()
    };
    let message = file.resolve(origin).unwrap_err().to_string();
    assert_eq!(
        message,
        "symbols of another kernel: build ID ab, but the trace is of build ID cd"
    );
}

// covers: bad-input/symbols
#[test]
fn what_is_no_list_is_refused_with_its_line() {
    for (text, expected) in [
        ("", "has no symbols"),
        ("00 T a\nhello\n", "line 2: hello"),
        ("00 T a b c\n0 xx y", "line 2: 0 xx y"),
        ("0000000000000000 T a\n0000000000000000 t b\n", "as root"),
    ] {
        let message = SymbolTable::parse(text).unwrap_err().to_string();
        assert!(message.contains(expected), "{text:?}: {message}");
    }
}
