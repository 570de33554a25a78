use super::*;

const TEXT: &[u8] =
    b"OSRELEASE=6.1.0-test\nBUILD-ID=00\nPAGESIZE=4096\nSYMBOL(init_uts_ns)=ffffffff82a13f40\nKERNELOFFSET=1000000\n";

// covers: dump/vmcoreinfo
#[test]
fn the_page_is_found_by_its_text_alone() {
    let memory = Memory::new(8 << 20).unwrap();
    assert_eq!(by_its_text(&memory), None);
    // Somebody's copy that does not begin a page, and a page that only begins like it.
    memory.write(0x3010, TEXT).unwrap();
    memory.write(0x5000, b"OSRELEASE=6.1.0-test\nand nothing else").unwrap();
    assert_eq!(by_its_text(&memory), None);
    memory.write(0x40_0000, TEXT).unwrap();
    assert_eq!(by_its_text(&memory).as_deref(), Some(TEXT));
}

// covers: dump/vmcoreinfo
#[test]
fn a_page_without_an_end_is_as_long_as_a_page() {
    let mut page = TEXT.to_vec();
    page.resize(PAGE, b'x');
    assert_eq!(text_of(&page).map(|text| text.len()), Some(PAGE));
    assert_eq!(text_of(b"OSRELEASE="), None);
    assert_eq!(text_of(&[]), None);
}
