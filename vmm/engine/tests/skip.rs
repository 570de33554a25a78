//! Tests that have nothing to run on.

/// A test is skipped for this reason, which `cargo xtask test` counts.
pub fn skipped(test: &str, why: &str) {
    println!("SKIPPED {test}: {why}");
    if let Some(path) = std::env::var_os("MINIVMM_SKIPPED") {
        let file = std::fs::OpenOptions::new().create(true).append(true).open(path);
        // In one write, as tests run side by side.
        std::io::Write::write_all(&mut file.unwrap(), format!("{test}: {why}\n").as_bytes()).unwrap();
    }
}
