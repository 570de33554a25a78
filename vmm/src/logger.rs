//! `-v`: log lines on stderr.

use std::io::Write;

use log::{LevelFilter, Log, Metadata, Record};

struct Stderr;

impl Log for Stderr {
    /// What a guest does to its queues is no error of anybody here, and a guest may do it as often as it likes.
    fn enabled(&self, metadata: &Metadata) -> bool {
        !metadata.target().starts_with("virtio_queue") || log::max_level() >= LevelFilter::Debug
    }

    fn log(&self, record: &Record) {
        if !self.enabled(record.metadata()) {
            return;
        }
        // A closed stderr is no reason to stop.
        let _ = writeln!(std::io::stderr(), "minivmm: {}", record.args());
    }

    fn flush(&self) {}
}

/// Logs warnings, and more the more often `-v` was given.
pub fn init(verbose: u8) {
    let level = match verbose {
        0 => LevelFilter::Warn,
        1 => LevelFilter::Info,
        2 => LevelFilter::Debug,
        _ => LevelFilter::Trace,
    };
    if log::set_logger(&Stderr).is_ok() {
        log::set_max_level(level);
    }
}
