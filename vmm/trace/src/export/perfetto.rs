//! Calls over time, as ui.perfetto.dev and `trace_processor` read them: protobuf, protos/perfetto/trace/trace.proto of Perfetto. Only the
//! messages and fields that are written are described here.

use std::{collections::HashMap, io::Write};

use prost::Message;
use pt_flow::{Block, Event};

use super::{
    calls::Export,
    error::ExportError,
    file::OutFile,
    slices::{Mark, Slices, Track, Writer, of_slices},
};
use crate::view::{Frame, Function, Here, Names, Owner};

/// The whole file, or what is compressed in one packet of it.
#[derive(Clone, PartialEq, Message)]
struct TraceMessage {
    #[prost(message, repeated, tag = "1")]
    packet: Vec<TracePacket>,
}

#[derive(Clone, PartialEq, Message)]
struct TracePacket {
    #[prost(uint64, optional, tag = "8")]
    timestamp: Option<u64>,
    #[prost(uint32, optional, tag = "10")]
    trusted_packet_sequence_id: Option<u32>,
    #[prost(message, optional, tag = "11")]
    track_event: Option<TrackEvent>,
    #[prost(message, optional, tag = "12")]
    interned_data: Option<InternedData>,
    #[prost(uint32, optional, tag = "13")]
    sequence_flags: Option<u32>,
    #[prost(bytes = "vec", optional, tag = "50")]
    compressed_packets: Option<Vec<u8>>,
    #[prost(message, optional, tag = "60")]
    track_descriptor: Option<TrackDescriptor>,
}

#[derive(Clone, PartialEq, Message)]
struct TrackEvent {
    /// [`SLICE_BEGIN`] and so on.
    #[prost(int32, optional, tag = "9")]
    r#type: Option<i32>,
    #[prost(uint64, optional, tag = "10")]
    name_iid: Option<u64>,
    #[prost(uint64, optional, tag = "11")]
    track_uuid: Option<u64>,
    #[prost(string, optional, tag = "23")]
    name: Option<String>,
}

#[derive(Clone, PartialEq, Message)]
struct InternedData {
    #[prost(message, repeated, tag = "2")]
    event_names: Vec<EventName>,
}

#[derive(Clone, PartialEq, Message)]
struct EventName {
    #[prost(uint64, optional, tag = "1")]
    iid: Option<u64>,
    #[prost(string, optional, tag = "2")]
    name: Option<String>,
}

#[derive(Clone, PartialEq, Message)]
struct TrackDescriptor {
    #[prost(uint64, optional, tag = "1")]
    uuid: Option<u64>,
    #[prost(string, optional, tag = "2")]
    name: Option<String>,
    #[prost(message, optional, tag = "3")]
    process: Option<ProcessDescriptor>,
    #[prost(message, optional, tag = "4")]
    thread: Option<ThreadDescriptor>,
    #[prost(uint64, optional, tag = "5")]
    parent_uuid: Option<u64>,
}

#[derive(Clone, PartialEq, Message)]
struct ProcessDescriptor {
    #[prost(int32, optional, tag = "1")]
    pid: Option<i32>,
    #[prost(string, optional, tag = "6")]
    process_name: Option<String>,
}

#[derive(Clone, PartialEq, Message)]
struct ThreadDescriptor {
    #[prost(int32, optional, tag = "1")]
    pid: Option<i32>,
    #[prost(int32, optional, tag = "2")]
    tid: Option<i32>,
    #[prost(string, optional, tag = "5")]
    thread_name: Option<String>,
}

const SLICE_BEGIN: i32 = 1;
const SLICE_END: i32 = 2;
const INSTANT: i32 = 3;

/// All packets are of one sequence.
const SEQUENCE: u32 = 1;
/// `SEQ_INCREMENTAL_STATE_CLEARED`: numbers of names begin here.
const CLEARED: u32 = 1;
/// `SEQ_NEEDS_INCREMENTAL_STATE`: the packet uses such a number.
const NEEDS: u32 = 2;

/// The track above those of vCPUs; the tracks have the numbers behind it.
const MACHINE: u64 = 1;

/// Packets that are compressed together, in bytes.
const BATCH: usize = 1 << 18;
/// Of `miniz_oxide`, from 0 to 10: fast rather than small.
const LEVEL: u8 = 2;

/// A file of Perfetto's.
#[derive(Debug)]
pub struct Perfetto {
    slices: Slices,
}

impl Perfetto {
    /// To this file. Calls of fewer instructions than `least` are left out.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn new(file: OutFile, title: &str, least: u64) -> Result<Perfetto, ExportError> {
        let mut packets = Packets {
            file,
            batch: Vec::new(),
            functions: HashMap::new(),
            processes: HashMap::new(),
        };
        let machine = TrackDescriptor {
            uuid: Some(MACHINE),
            name: Some(title.into()),
            ..TrackDescriptor::default()
        };
        packets.put(TracePacket {
            sequence_flags: Some(CLEARED),
            track_descriptor: Some(machine),
            ..TracePacket::default()
        })?;
        Ok(Perfetto {
            slices: Slices::new(Box::new(packets), least),
        })
    }
}

impl Export for Perfetto {
    of_slices!();
}

#[derive(Debug)]
struct Packets {
    file: OutFile,
    /// Packets that are not written yet.
    batch: Vec<u8>,
    /// Numbers of names.
    functions: HashMap<Function, u64>,
    /// Numbers of processes' tracks.
    processes: HashMap<u32, u64>,
}

impl Packets {
    fn put(&mut self, mut packet: TracePacket) -> Result<(), ExportError> {
        packet.trusted_packet_sequence_id = Some(SEQUENCE);
        let trace = TraceMessage { packet: vec![packet] };
        self.batch.extend(trace.encode_to_vec());
        if self.batch.len() >= BATCH {
            self.flush()
        } else {
            Ok(())
        }
    }

    fn flush(&mut self) -> Result<(), ExportError> {
        let compressed = miniz_oxide::deflate::compress_to_vec_zlib(&self.batch, LEVEL);
        self.batch.clear();
        let packet = TracePacket {
            compressed_packets: Some(compressed),
            ..TracePacket::default()
        };
        let trace = TraceMessage { packet: vec![packet] };
        let written = self.file.write_all(&trace.encode_to_vec());
        written.map_err(|source| self.file.error(source))
    }

    fn describe(&mut self, track: TrackDescriptor) -> Result<(), ExportError> {
        self.put(TracePacket {
            track_descriptor: Some(track),
            ..TracePacket::default()
        })
    }
}

/// A track's number in the file; those of processes are odd.
fn uuid(track: u32) -> u64 {
    2 * (u64::from(track) + 1)
}

impl Writer for Packets {
    fn mark(&mut self, track: u32, ns: u64, mark: Mark<'_>) -> Result<(), ExportError> {
        let (mut event, mut interned) = (TrackEvent::default(), None);
        event.track_uuid = Some(uuid(track));
        match mark {
            Mark::Begin { name, function } => {
                event.r#type = Some(SLICE_BEGIN);
                match function {
                    Some((function, _)) => {
                        let fresh = self.functions.len() as u64 + 1;
                        let iid = *self.functions.entry(function).or_insert(fresh);
                        event.name_iid = Some(iid);
                        interned = (iid == fresh).then(|| InternedData {
                            event_names: vec![EventName {
                                iid: Some(iid),
                                name: Some(name.into()),
                            }],
                        });
                    }
                    None => event.name = Some(name.into()),
                }
            }
            Mark::End => event.r#type = Some(SLICE_END),
            Mark::Instant(name) => {
                event.r#type = Some(INSTANT);
                event.name = Some(name.into());
            }
        }
        self.put(TracePacket {
            timestamp: Some(ns),
            sequence_flags: event.name_iid.map(|_| NEEDS),
            track_event: Some(event),
            interned_data: interned,
            ..TracePacket::default()
        })
    }

    fn name(&mut self, track: u32, what: Track, name: &str) -> Result<(), ExportError> {
        let mut descriptor = TrackDescriptor {
            uuid: Some(uuid(track)),
            ..TrackDescriptor::default()
        };
        match what {
            Track::Thread { pid, tid } => {
                let fresh = 2 * self.processes.len() as u64 + 3;
                let process = *self.processes.entry(pid).or_insert(fresh);
                // A process has the name of its first thread.
                if process == fresh || pid == tid {
                    self.describe(TrackDescriptor {
                        uuid: Some(process),
                        process: Some(ProcessDescriptor {
                            pid: Some(pid as i32),
                            process_name: Some(name.into()),
                        }),
                        ..TrackDescriptor::default()
                    })?;
                }
                descriptor.parent_uuid = Some(process);
                descriptor.thread = Some(ThreadDescriptor {
                    pid: Some(pid as i32),
                    tid: Some(tid as i32),
                    thread_name: Some(name.into()),
                });
            }
            Track::Cpu(_) | Track::Idle(_) | Track::Calls(_) => {
                descriptor.parent_uuid = Some(MACHINE);
                descriptor.name = Some(name.into());
            }
        }
        self.describe(descriptor)
    }

    fn finish(mut self: Box<Self>) -> Result<OutFile, ExportError> {
        self.flush()?;
        Ok(self.file)
    }
}
