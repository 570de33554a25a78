//! libFuzzer over the target that FUZZ_TARGET names. With FUZZ_SEEDS its seeds are written into that directory before anything runs.
#![no_main]

use std::{fs, path::Path, sync::OnceLock};

use guest_tests::fuzz::{TARGETS, Target};

fn target() -> &'static Target {
    static TARGET: OnceLock<&Target> = OnceLock::new();
    TARGET.get_or_init(|| {
        let name = std::env::var("FUZZ_TARGET").unwrap_or_default();
        let known = || TARGETS.iter().map(|target| target.name).collect::<Vec<_>>().join(", ");
        TARGETS
            .iter()
            .find(|target| target.name == name)
            .unwrap_or_else(|| panic!("FUZZ_TARGET names none of {}", known()))
    })
}

libfuzzer_sys::fuzz_target!(
    init: {
        if let Some(directory) = std::env::var_os("FUZZ_SEEDS") {
            for (number, seed) in (target().seeds)().iter().enumerate() {
                fs::write(Path::new(&directory).join(format!("seed-{number}")), seed).expect("a seed can be written");
            }
        }
    },
    |bytes: &[u8]| (target().run)(bytes)
);
