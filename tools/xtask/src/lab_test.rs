use super::*;

// covers: lab/intel
#[test]
fn guest_tests_are_known_by_name() {
    let names = guest_tests(&tree::root().join("guest-tests/guests")).unwrap();
    for name in ["dr", "tsc", "pt_packets", "smp"] {
        assert!(names.iter().any(|known| known == name), "{name}: {names:?}");
    }
    assert!(
        !names.iter().any(|name| name == "lib" || name == "pattern"),
        "{names:?}"
    );
    let packages: Vec<&str> = needs(Emulator::Bochs).iter().map(|need| need.package).collect();
    assert!(
        packages.contains(&"bochs") && !packages.contains(&QEMU.package),
        "{packages:?}"
    );
    let own: Vec<&str> = needs(Emulator::Own).iter().map(|need| need.package).collect();
    assert!(!own.contains(&"bochs") && !own.contains(&QEMU.package), "{own:?}");
}
