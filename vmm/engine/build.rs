//! Chooses the dispatch: sibling calls are only made from opt-level 2 on, Miri, fuzzers and coverage want frames,
//! and debug assertions take addresses of locals, which rules a sibling call out.
fn main() {
    // Else any file of the package, a test for one, would have it run again and the engine be built again.
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rustc-check-cfg=cfg(chained)");
    let optimised = matches!(std::env::var("OPT_LEVEL").as_deref(), Ok("2" | "3"));
    let plain = std::env::var_os("CARGO_FEATURE_PLAIN_LOOP").is_some();
    let flags = std::env::var("CARGO_ENCODED_RUSTFLAGS").unwrap_or_default();
    let watched =
        flags.contains("instrument-coverage") || flags.contains("sanitizer") || flags.contains("cfg\u{1f}fuzzing");
    let checked = std::env::var_os("CARGO_CFG_DEBUG_ASSERTIONS").is_some();
    if optimised && !checked && !plain && !watched && std::env::var_os("CARGO_CFG_MIRI").is_none() {
        println!("cargo::rustc-cfg=chained");
    }
}
