//! The file with the header, the records and the packets: tools/perf/Documentation/perf.data-file-format.txt of Linux. What an
//! Intel PT event says of itself: tools/perf/util/intel-pt.h.

use std::{
    fs::File,
    io::{self, BufWriter, Read, Seek, SeekFrom, Write},
    ops::Range,
    path::Path,
};

use pt_packet::{LastIp, MAX_LEN, Packet, encode};

use crate::{
    Trace,
    directory::format::Kind,
    directory::frames::Frames,
    directory::packets::{Damage, Packets},
};

use super::record::*;

/// The type of the event: a PMU's number, which is any number that is not another's.
const PMU: u32 = 8;
/// PERF_SAMPLE_IP, TID, TIME, CPU, IDENTIFIER: perf shows no addresses without the first.
const SAMPLE: u64 = 1 | 1 << 1 | 1 << 2 | 1 << 7 | 1 << 16;
const ATTR: usize = 112;
const HEADER: u64 = 104;
/// sample_id_all.
const ID_ALL: u64 = 1 << 18;
/// The attribute's bits of the event that the rest comes with: mmap, comm, mmap2, sample_id_all, comm_exec, context_switch, text_poke.
const DUMMY_BITS: u64 = 1 << 8 | 1 << 9 | 1 << 13 | ID_ALL | 1 << 23 | 1 << 24 | 1 << 26 | 1 << 31;
/// exclude_hv, sample_id_all.
const PT_BITS: u64 = 1 | 1 << 6 | ID_ALL;
/// HEADER_ARCH, HEADER_NRCPUS, HEADER_DIR_FORMAT.
const FEATURE_ARCH: usize = 6;
const FEATURE_CPUS: usize = 7;
const FEATURE_DIR: usize = 24;

/// A vCPU's packets.
#[derive(Clone, Debug)]
pub struct Part {
    pub cpu: usize,
    pub range: Range<u64>,
    /// It begins when virtual time does.
    pub at_zero: bool,
}

/// Writes the file. `machines` are the guests of a hypervisor by their numbers, as the process that is the VMM of each.
///
/// # Errors
/// It cannot be written, or the trace not be read.
pub fn write(
    path: &Path,
    trace: &Trace,
    scale: Scale,
    (parts, machines): (&[Part], &[u32]),
    records: &[(u64, Vec<u8>)],
    progress: &mut dyn FnMut(u64, u64),
) -> io::Result<()> {
    let file = File::create_new(path)?;
    let mut out = BufWriter::with_capacity(1 << 18, file);
    let data = data_at(machines.len());
    out.write_all(&vec![0; data as usize])?;
    let mut len = 0u64;
    let mut put = |out: &mut BufWriter<File>, bytes: &[u8]| {
        len += bytes.len() as u64;
        out.write_all(bytes)
    };
    put(&mut out, &info(trace, scale))?;
    if !machines.is_empty() {
        put(&mut out, &id_index(machines))?;
    }
    for (_, record) in records.iter().take_while(|(time, _)| *time == 0) {
        put(&mut out, record)?;
    }
    let total: u64 = parts.iter().map(|part| part.range.end - part.range.start).sum();
    let mut done = 0;
    for Part { cpu, range, at_zero } in parts {
        let lead = if *at_zero { lead() } else { Vec::new() };
        let size = lead.len() as u64 + range.end - range.start;
        let mut aux = Rec::new(AUX, 0);
        for value in [0, size, 0] {
            aux.u64(value);
        }
        put(&mut out, &aux.id(0, 2, *cpu as u32, ID_PT))?;
        // The size is a multiple of eight bytes; PAD packets are zeroes.
        let padded = size.next_multiple_of(8);
        let mut rec = Rec::new(AUXTRACE, 0);
        for value in [padded, 0, 0x1000 + *cpu as u64] {
            rec.u64(value);
        }
        rec.u32(*cpu as u32);
        rec.u32(u32::MAX);
        rec.u32(*cpu as u32);
        rec.u32(0);
        put(&mut out, &rec.done())?;
        put(&mut out, &lead)?;
        let frames = Frames::new(trace.folder(), Kind::Packets, *cpu, trace.segments(*cpu));
        let mut packets = Packets::new(frames, range.start, range.end, Damage::default());
        let (mut buffer, mut copied) = (vec![0; 1 << 18], lead.len() as u64);
        loop {
            let read = packets.read(&mut buffer)?;
            if read == 0 {
                break;
            }
            put(&mut out, &buffer[..read])?;
            copied += read as u64;
            done += read as u64;
            progress(done, total);
        }
        put(&mut out, &vec![0; padded.saturating_sub(copied) as usize])?;
    }
    for (_, record) in records.iter().skip_while(|(time, _)| *time == 0) {
        put(&mut out, record)?;
    }
    put(&mut out, &Rec::new(FINISHED_ROUND, 0).done())?;
    features(&mut out, data + len, trace.cpus() as u32)?;
    header(&mut out, trace, machines.len(), len)
}

/// Where the data begin: behind the header, the IDs of all events, and the events.
fn data_at(machines: usize) -> u64 {
    attrs_at(machines) + events(machines) * (ATTR + 16) as u64
}

fn attrs_at(machines: usize) -> u64 {
    HEADER + 8 * (2 + machines as u64)
}

/// The packets, what they come with, and what those of guests come with.
fn events(machines: usize) -> u64 {
    2 + u64::from(machines > 0)
}

/// Which IDs are those of guests: `struct perf_record_id_index` of tools/lib/perf/include/perf/event.h with the second half of its entries, which Linux
/// 6.0 brought. The VMM's thread is the guest's only virtual CPU, as processes have one thread here.
fn id_index(machines: &[u32]) -> Vec<u8> {
    let mut rec = Rec::new(ID_INDEX, 0);
    rec.u64(machines.len() as u64);
    for (number, pid) in machines.iter().enumerate() {
        // ID, index, any CPU, thread.
        for value in [ID_GUEST + number as u64, number as u64, u64::MAX, u64::from(*pid)] {
            rec.u64(value);
        }
    }
    for pid in machines {
        // The machine, the virtual CPU.
        for value in [u64::from(*pid), 0] {
            rec.u64(value);
        }
    }
    rec.done()
}

/// A PSB whose time is not zero, in front of one whose time is: perf 6.1 looks for a first time, takes zero for none, and reads
/// what is not there yet when it then comes to code.
fn lead() -> Vec<u8> {
    let (mut last, mut bytes) = (LastIp::new(), Vec::new());
    for packet in [Packet::Psb, Packet::Tsc(1), Packet::PsbEnd] {
        let mut out = [0; MAX_LEN];
        let len = encode(&packet, &mut last, &mut out);
        bytes.extend_from_slice(&out[..len]);
    }
    bytes
}

fn info(trace: &Trace, scale: Scale) -> Vec<u8> {
    let mut info = Rec::new(AUXTRACE_INFO, 0);
    info.u32(1);
    info.u32(0);
    // perf guesses the time of a return to user mode: two ticks for each instruction since the last packet of time, at the ratio of
    // this number and CBR's. It must not guess beyond the time, which goes on by a tick for each instruction or faster, or it
    // believes in the next process too early.
    let ratio = (trace.timing().nominal_ratio / 2).max(1);
    // As enum in intel-pt.h: PMU, time conversion, cap_user_time_zero, bits of the configuration, have_sched_switch (2: switches tell
    // the process that comes; with 1 and 3 perf waits for one wherever it sees `__switch_to`), snapshot mode, per-CPU maps, MTC,
    // crystal ratio, CYC, highest non-turbo ratio, filter.
    for value in [
        u64::from(PMU),
        scale.shift.into(),
        scale.mult,
        0,
        1,
        1 << 10,
        1 << 11,
        2,
        0,
        1,
        1 << 9,
        0x3_c000,
        1,
        1,
        2,
        ratio.into(),
        0,
        0,
    ] {
        info.u64(value);
    }
    info.done()
}

/// The architecture, the number of CPUs (which `perf script -C` asks for), and that this is a directory. Where these are is reported
/// right behind the data, in the order of their numbers.
fn features(out: &mut impl Write, behind: u64, cpus: u32) -> io::Result<()> {
    let mut arch = Rec(Vec::new());
    arch.u32(8);
    arch.0.extend_from_slice(b"x86_64\0\0");
    // Available and online.
    let mut count = Rec(Vec::new());
    count.u32(cpus);
    count.u32(cpus);
    let mut dir = Rec(Vec::new());
    dir.u64(0);
    let sections = [arch, count, dir];
    let mut table = Rec(Vec::new());
    let mut at = behind + 16 * sections.len() as u64;
    for section in &sections {
        table.u64(at);
        table.u64(section.0.len() as u64);
        at += section.0.len() as u64;
    }
    out.write_all(&table.0)?;
    sections.iter().try_for_each(|section| out.write_all(&section.0))
}

/// The header and the events, in front of all.
fn header(out: &mut BufWriter<File>, trace: &Trace, machines: usize, len: u64) -> io::Result<()> {
    let attr_len = (ATTR + 16) as u64;
    let mut head = Rec(b"PERFILE2".to_vec());
    let (attrs, data) = (attrs_at(machines), data_at(machines));
    for value in [HEADER, attr_len, attrs, events(machines) * attr_len, data, len, 0, 0] {
        head.u64(value);
    }
    let mut features = [0u8; 32];
    for feature in [FEATURE_ARCH, FEATURE_CPUS, FEATURE_DIR] {
        features[feature / 8] |= 1 << (feature % 8);
    }
    head.0.extend_from_slice(&features);
    head.u64(ID_PT);
    head.u64(ID_DUMMY);
    (0..machines as u64).for_each(|n| head.u64(ID_GUEST + n));
    // pt, TSC, MTC and its frequency, branches.
    let mtc = u64::from(trace.timing().mtc_shift);
    let config: u64 = 1 | 1 << 9 | 1 << 10 | mtc << 14 | 1 << 13;
    let all = [
        (PMU, config, PT_BITS, HEADER, 1),
        (1, 9, DUMMY_BITS, HEADER + 8, 1),
        (1, 9, DUMMY_BITS, HEADER + 16, machines as u64),
    ];
    for (kind, config, bits, ids, count) in all.into_iter().take(events(machines) as usize) {
        let from = head.0.len();
        head.u32(kind);
        head.u32(ATTR as u32);
        for value in [config, 1, SAMPLE, 4, bits] {
            head.u64(value);
        }
        head.0.resize(from + ATTR, 0);
        head.u64(ids);
        head.u64(8 * count);
    }
    out.seek(SeekFrom::Start(0))?;
    out.write_all(&head.0)?;
    out.flush()
}
