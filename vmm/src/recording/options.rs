//! What a recording is to have in it, and where it goes.

use std::path::{Path, PathBuf};

use trace::format::{GuestSources, Header};
use x86::model::CpuModel;

use super::filter::Filter;
use super::trigger::When;
use super::unit::CTL;

/// What happens when the directory cannot be written any more.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum OnError {
    /// The run ends.
    #[default]
    Stop,
    /// The guest goes on without being recorded.
    Continue,
}

/// A recording.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RecordingOptions {
    /// The directory, which is made.
    pub folder: PathBuf,
    /// A trace that is there already is replaced.
    pub force: bool,
    /// What is traced; everything without any.
    pub filters: Vec<Filter>,
    /// When it begins; at once without.
    pub start: Option<When>,
    /// When it stops.
    pub stop: Option<When>,
    /// Of each vCPU, so many bytes of packets are kept: the last.
    pub buffer: Option<u64>,
    /// All vCPUs together write so many bytes, code and sideband included; then it is as if there were no more room.
    pub limit: Option<u64>,
    /// What happens when the directory cannot be written any more.
    pub on_error: OnError,
    /// It is a part of a recording, to be joined with the others ([`trace::join`]).
    pub part: Part,
    /// Steps at which segments begin, ascending: there the recording could be cut into parts, to the same bytes.
    pub cuts: Vec<u64>,
    /// Packets are made on a thread of their own where that can be done, to the same bytes.
    pub threaded: bool,
}

/// Which part of a recording it is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Part {
    /// Another part is before it.
    pub continues: bool,
    /// Another part is behind it.
    pub goes_on: bool,
}

impl RecordingOptions {
    /// What the trace's header says before the recording ends.
    pub fn header(&self, model: &CpuModel, cpus: usize, kernel: &Path, files: &GuestSources) -> Header {
        Header {
            model: model.name.into(),
            tsc_khz: model.tsc_khz,
            cpus,
            kernel: kernel.display().to_string(),
            filters: self.filters.iter().map(ToString::to_string).collect(),
            start: self.start.as_ref().map(ToString::to_string),
            stop: self.stop.as_ref().map(ToString::to_string),
            buffer: self.buffer,
            files: files.clone(),
            rtit_ctl: CTL.into_bits(),
            end: None,
        }
    }

    /// A recording of everything.
    pub fn new(folder: impl Into<PathBuf>) -> RecordingOptions {
        RecordingOptions {
            folder: folder.into(),
            force: false,
            filters: Vec::new(),
            start: None,
            stop: None,
            buffer: None,
            limit: None,
            on_error: OnError::Stop,
            part: Part::default(),
            cuts: Vec::new(),
            threaded: std::thread::available_parallelism().is_ok_and(|cpus| cpus.get() > 1),
        }
    }
}
