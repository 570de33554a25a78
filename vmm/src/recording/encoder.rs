//! The encoder of a vCPU's recording: it makes packets and sideband of what the observer has heard.
//!
//! It needs nothing of the processor but where it stood at each callback ([`Standing`]), so it may do its work later than the guest
//! does, and on another thread ([`super::queue`]).

use std::io;
use std::sync::Arc;

use devices::unit::pt::Pt;
use trace::directory::sink::{PACKETS, Sink};
use trace::format::{COMM, Mark, Record};
use x86::model::CpuModel;
use x86::msr::IA32_RTIT_STATUS;
use x86::pt::RtitCtl;
use x86::watch::{BranchRecord, Change, EventRecord, Interest, Processor};

use super::code_map::Key;
use super::options::RecordingOptions;
use super::standing::Standing;
use super::state::{Content, RecordingState};
use super::unit;

/// A PSB at which code may change: nothing was executed since.
#[derive(Clone, Copy, Debug)]
struct Anchor {
    begin: u64,
    end: u64,
    ip: u64,
    /// The machine's step, which its time packets tell.
    step: u64,
}

/// What an encoder has to do, in the order in which it was heard.
#[derive(Debug)]
pub(super) enum Job {
    /// So many branches have retired.
    Branches(usize),
    /// An interrupt or exception has been delivered.
    Event(EventRecord),
    /// Something that packets need has changed.
    Change(Change),
    /// The instruction at a boundary is about to run.
    Before(u64),
    /// Some instructions have retired.
    Tick,
    /// Tracing begins; `first`: for the first time. `admits`: where processes are chosen, whether this one is recorded.
    Start { first: bool, admits: Option<bool> },
    /// Tracing goes on where another part of the recording has ended; `asleep`: the processor sleeps there.
    GoOn { asleep: bool, admits: Option<bool> },
    /// Tracing ends, if it is on, and this is said.
    Stop { mark: Mark, tracing: bool },
    /// What there is of this part is written; another one goes on.
    EndPart { tracing: bool },
    /// The next segment begins.
    Segment,
    /// A mark.
    Mark(Mark),
    /// What the clocks show after they stood still.
    Time,
    /// The guest's TSC is from here on so far ahead of virtual ticks.
    TscOffset(u64),
    /// A PSB in front of the next instruction, if there is none.
    Anchor,
    /// A page of code that is new at its address.
    Page { key: Key, content: Arc<Content> },
    /// A page of code has another content from here on.
    Changed { key: Key, content: Arc<Content> },
    /// The next file, of which processes map code.
    File { path: String, build_id: Vec<u8> },
    /// A process maps pages: see [`Record::Mapping`].
    Mapping {
        vmcs: Option<u64>,
        space: u64,
        page: u64,
        pages: u64,
        first: u64,
        file: Option<u64>,
    },
    /// The vCPU goes over to another thread of Linux.
    Thread {
        tid: u32,
        tgid: u32,
        comm: [u8; COMM],
        admits: Option<bool>,
    },
    /// Whether what runs is recorded.
    Admit(bool),
    /// What happened is complete: PSBs are reported, and what waits is written where it is much.
    Due,
    /// What waits is written.
    Write,
}

/// Makes a vCPU's packets and sideband, and writes them.
#[derive(Debug)]
pub(super) struct Encoder {
    pt: Pt<Vec<u8>>,
    ctl: RtitCtl,
    sink: Sink,
    anchor: Option<Anchor>,
    /// Where the last PSB was that is reported.
    psb: Option<u64>,
    tsc_offset: u64,
    tsc_moved: bool,
    /// What went wrong, until somebody has asked.
    error: Option<io::Error>,
}

impl Encoder {
    /// The encoder of a vCPU; its files are made.
    ///
    /// # Errors
    /// The files cannot be made.
    pub fn new(
        cpu: usize,
        options: &RecordingOptions,
        shared: &RecordingState,
        model: &CpuModel,
    ) -> io::Result<Encoder> {
        let (pt, ctl) = unit::with_filters(model, &options.filters);
        Ok(Encoder {
            pt,
            ctl,
            sink: Sink::new(&options.folder, cpu, options.buffer, shared.room.clone())?,
            anchor: None,
            psb: None,
            tsc_offset: 0,
            tsc_moved: true,
            error: None,
        })
    }

    /// What went wrong since somebody asked last.
    pub fn take_error(&mut self) -> Option<io::Error> {
        self.error.take()
    }

    /// Bytes of packets of a whole segment.
    pub fn segment(&self) -> u64 {
        self.sink.limit()
    }

    /// Bytes of packets until the segment is full.
    pub fn left(&mut self) -> u64 {
        self.sink.left(self.pt.output().len())
    }

    /// What the unit wants announced, and the addresses before which it is to be asked.
    pub fn wants(&self, step: u64) -> (Interest, &[u64]) {
        (self.pt.interest(step), self.pt.boundaries())
    }

    /// Does a job, of branches with their records.
    pub fn run(&mut self, job: Job, records: &[BranchRecord], mut at: Standing) {
        match job {
            Job::Branches(_) => {
                let _ = self.pt.branches(records, &mut at);
                self.due(&at);
            }
            Job::Event(event) => {
                let _ = self.pt.event(&event, &mut at);
                self.due(&at);
            }
            Job::Change(change) => {
                let _ = self.pt.change(change, &mut at);
                self.due(&at);
            }
            Job::Before(address) => {
                let _ = self.pt.before(address, &mut at);
                self.due(&at);
            }
            Job::Tick => {
                let _ = self.pt.tick(&mut at);
                self.due(&at);
            }
            Job::Start { first, admits } => self.start(first, admits, &mut at),
            Job::GoOn { asleep, admits } => self.go_on(asleep, admits, &mut at),
            Job::Stop { mark, tracing } => {
                if tracing {
                    unit::program(&mut self.pt, self.ctl, &mut at);
                    self.due(&at);
                }
                self.mark(mark, &at);
                self.write();
            }
            Job::EndPart { tracing } => {
                if tracing {
                    self.pt.flush(&mut at);
                    self.due(&at);
                }
                self.write();
            }
            Job::Segment => self.next_segment(&mut at),
            Job::Mark(mark) => self.mark(mark, &at),
            Job::Time => {
                let (offset, step, tick) = (self.total(), at.step(), at.tick());
                self.sink.record(&Record::Time { offset, step, tick });
            }
            Job::TscOffset(offset) => {
                self.tsc_moved = true;
                self.tsc_offset = offset;
            }
            Job::Anchor => {
                self.anchor(&mut at);
            }
            Job::Page { key, content } => {
                let content = self.sink.content(content.hash, &content.bytes);
                let (space, page) = key;
                self.sink.record(&Record::Page { space, page, content });
            }
            Job::Changed { key, content } => {
                let anchor = self.anchor(&mut at);
                let content = self.sink.content(content.hash, &content.bytes);
                let ip = self.pt.place().packet_en.then_some(anchor.ip);
                self.sink.record(&Record::Change {
                    offset: anchor.begin,
                    ip,
                    step: at.step(),
                    space: key.0,
                    page: key.1,
                    content,
                });
            }
            Job::File { path, build_id } => self.sink.file(&path, &build_id),
            Job::Mapping {
                vmcs,
                space,
                page,
                pages,
                first,
                file,
            } => {
                let (offset, step) = (self.anchor(&mut at).begin, at.step());
                self.sink.record(&Record::Mapping {
                    offset,
                    step,
                    vmcs,
                    space,
                    page,
                    pages,
                    first,
                    file,
                });
            }
            Job::Thread {
                tid,
                tgid,
                comm,
                admits,
            } => {
                let (offset, step) = (self.anchor(&mut at).begin, at.step());
                self.sink.record(&Record::Thread {
                    offset,
                    step,
                    tid,
                    tgid,
                    comm,
                });
                self.admit(admits, &mut at);
                self.due(&at);
            }
            Job::Admit(admits) => self.pt.admit(admits, &mut at),
            Job::Due => self.due(&at),
            Job::Write => self.write(),
        }
    }

    /// Bytes of packets so far.
    fn total(&mut self) -> u64 {
        self.sink.written() + self.pt.output().len() as u64
    }

    fn mark(&mut self, mark: Mark, at: &Standing) {
        let (offset, step, tick) = (self.total(), at.step(), at.tick());
        let ip = self.pt.place().packet_en.then(|| at.next_ip());
        self.sink.record(&Record::Mark {
            mark,
            offset,
            step,
            tick,
            ip,
        });
    }

    fn admit(&mut self, admits: Option<bool>, at: &mut Standing) {
        if let Some(admits) = admits {
            self.pt.admit(admits, at);
        }
    }

    fn start(&mut self, first: bool, admits: Option<bool>, at: &mut Standing) {
        self.anchor = None;
        if first {
            self.mark(Mark::Segment, at);
        }
        self.mark(Mark::Start, at);
        self.admit(admits, at);
        // A decoder begins anew, so there has to be a PSB: PacketByteCnt is 0.
        let cleared = self.pt.write_msr(IA32_RTIT_STATUS, 0, at);
        debug_assert!(cleared.is_ok());
        unit::program(&mut self.pt, self.ctl.with_trace_en(true), at);
        self.due(at);
    }

    /// As [`Encoder::next_segment`] within a recording: what is said where tracing begins has been said in the part before.
    fn go_on(&mut self, asleep: bool, admits: Option<bool>, at: &mut Standing) {
        self.anchor = None;
        self.admit(admits, at);
        unit::program(&mut self.pt, self.ctl.with_trace_en(true), at);
        self.pt.output().clear();
        if asleep {
            self.pt.sleeps();
        }
        self.mark(Mark::Segment, at);
        self.pt.synchronize(at);
        self.due(at);
    }

    /// Begins a segment with a PSB.
    fn next_segment(&mut self, at: &mut Standing) {
        self.pt.flush(at);
        self.write();
        let begun = self.sink.next_segment();
        self.note(begun);
        self.anchor = None;
        self.mark(Mark::Segment, at);
        self.tsc_moved = true;
        self.pt.synchronize(at);
        self.psb = None;
        self.due(at);
    }

    /// A PSB in front of the next instruction.
    fn anchor(&mut self, at: &mut Standing) -> Anchor {
        let (ip, step) = (at.next_ip(), at.step());
        let place = self.pt.place();
        let total = self.total();
        if let Some(anchor) = self.anchor
            && (anchor.end, anchor.step, place.bits) == (total, step, 0)
            && (anchor.ip == ip || !place.packet_en)
        {
            return anchor;
        }
        self.pt.flush(at);
        let begin = self.total();
        self.pt.synchronize(at);
        let anchor = Anchor {
            begin,
            end: self.total(),
            ip,
            step,
        };
        self.anchor = Some(anchor);
        anchor
    }

    /// Reports PSBs, and writes what waits when it is much.
    fn due(&mut self, at: &Standing) {
        let place = self.pt.place();
        let psb = self.total().checked_sub(u64::from(place.since_psb));
        if psb.is_some() && psb != self.psb {
            self.psb = psb;
            self.sink.record(&Record::Sync {
                offset: psb.unwrap_or(0),
                step: place.psb_step,
                tick: place.psb_tsc,
            });
        }
        if std::mem::take(&mut self.tsc_moved) {
            let offset = self.total();
            self.sink.record(&Record::Tsc {
                offset,
                step: at.step(),
                value: self.tsc_offset,
            });
        }
        if self.pt.output().len() >= PACKETS || self.sink.is_due() {
            self.write();
        }
    }

    fn write(&mut self) {
        let written = self.sink.write(self.pt.output());
        self.note(written);
    }

    fn note(&mut self, result: io::Result<()>) {
        if let Err(error) = result {
            self.error.get_or_insert(error);
        }
    }
}
