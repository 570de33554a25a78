use super::*;

// covers: symbols/lookup
#[test]
fn an_address_is_in_the_function_before_it() {
    let mut table = SymbolTable::new();
    for (address, kind, name, module) in [
        (0x2000, b't', "late", None),
        (0x1000, b'W', "weak", None),
        (0x1000, b'T', "__start", None),
        (0x1000, b'T', "start", None),
        (0x1000, b't', "local", None),
        (0x1800, b'D', "data", None),
        (0x9000, b't', "init", Some("mod")),
        (0, b'A', "absolute", None),
    ] {
        table.add(address, kind, name, module);
    }
    table.add_sized(0x3000, 8, b'T', "sized", None);
    table.set_module_end("mod", 0x9100);
    let table = table.sorted();
    for (address, expected) in [
        (0x10, None),
        (0xfff, None),
        (0x1000, Some("start")),
        (0x17ff, Some("start+0x7ff")),
        (0x1800, None),
        (0x2001, Some("late+0x1")),
        (0x3007, Some("sized+0x7")),
        (0x3008, None),
        (0x9001, Some("init+0x1 [mod]")),
        (0x9100, None),
        (u64::MAX, None),
    ] {
        assert_eq!(
            table.lookup(address).map(|place| place.to_string()).as_deref(),
            expected,
            "{address:#x}"
        );
    }
    assert_eq!(table.describe(0x2001), "0x2001 late+0x1");
    assert_eq!(table.describe(1), "0x1");
    assert_eq!((table.address("data"), table.address("none")), (Some(0x1800), None));
}
