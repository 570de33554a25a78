//! Prints the Intel PT packets of a file, one line each: offset, bytes, name, payload.
//!
//! `ptdump [--from OFFSET] [--count NUMBER] [--no-pad] FILE`, where FILE may be `-` for the standard input. Bytes that are no packet are
//! reported on the standard error, and decoding goes on at the next PSB. The exit status is 0 when all bytes were packets,
//! 1 when some were not, and 2 when nothing could be done.

use pt_packet::{Decoder, Item, Packet};
use std::fmt::Write as _;
use std::io::{self, BufWriter, Read, Write};
use std::process::ExitCode;

const USAGE: &str = "usage: ptdump [--from OFFSET] [--count NUMBER] [--no-pad] FILE";

/// What the command line says.
struct Options {
    file: String,
    from: Option<usize>,
    count: usize,
    pad: bool,
}

fn main() -> ExitCode {
    let options = match options(std::env::args().skip(1)) {
        Ok(Some(options)) => options,
        Ok(None) => {
            println!("{USAGE}");
            return ExitCode::SUCCESS;
        }
        Err(message) => return fail(&message),
    };
    let bytes = match read(&options.file) {
        Ok(bytes) => bytes,
        Err(error) => return fail(&format!("cannot read {}: {error}", options.file)),
    };
    if let Some(from) = options.from
        && from > bytes.len()
    {
        let message = format!(
            "--from {from:#x} is behind the end of {}, {:#x}",
            options.file,
            bytes.len()
        );
        return fail(&message);
    }
    let mut out = BufWriter::new(io::stdout().lock());
    match dump(&bytes, &options, &mut out).and_then(|clean| out.flush().map(|()| clean)) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        // Whoever reads has seen enough.
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => ExitCode::SUCCESS,
        Err(error) => fail(&format!("cannot write: {error}")),
    }
}

fn fail(message: &str) -> ExitCode {
    eprintln!("ptdump: {message}");
    ExitCode::from(2)
}

fn number(word: &str) -> Option<usize> {
    match word.strip_prefix("0x") {
        Some(digits) => usize::from_str_radix(digits, 16).ok(),
        None => word.parse().ok(),
    }
}

fn options(mut words: impl Iterator<Item = String>) -> Result<Option<Options>, String> {
    let (mut file, mut from, mut count, mut pad) = (None, None, usize::MAX, true);
    let value = |name: &str, word: Option<String>| {
        word.as_deref()
            .and_then(number)
            .ok_or(format!("{name} wants a number, such as 4096 or 0x1000"))
    };
    while let Some(word) = words.next() {
        match word.as_str() {
            "--help" | "-h" => return Ok(None),
            "--from" => from = Some(value("--from", words.next())?),
            "--count" => count = value("--count", words.next())?,
            "--no-pad" => pad = false,
            _ if word.starts_with("--") => return Err(format!("unknown option {word}; {USAGE}")),
            _ if file.is_some() => return Err(format!("more than one file; {USAGE}")),
            _ => file = Some(word),
        }
    }
    let file = file.ok_or(format!("no file; {USAGE}"))?;
    Ok(Some(Options { file, from, count, pad }))
}

fn read(file: &str) -> io::Result<Vec<u8>> {
    if file != "-" {
        return std::fs::read(file);
    }
    let mut bytes = Vec::new();
    io::stdin().lock().read_to_end(&mut bytes).map(|_| bytes)
}

/// Prints the packets; false if there were bytes that are none.
fn dump(bytes: &[u8], options: &Options, out: &mut impl Write) -> io::Result<bool> {
    let mut decoder = Decoder::new(bytes);
    match options.from {
        Some(from) => decoder.seek(from),
        // A buffer that wrapped begins in the middle of a packet.
        None => skip(&mut decoder, bytes)?,
    }
    let (mut clean, mut printed) = (true, 0);
    while printed < options.count {
        match decoder.next_packet() {
            Some(Ok(item)) => {
                if options.pad || item.packet != Packet::Pad {
                    line(bytes, &item, out)?;
                    printed += 1;
                }
            }
            Some(Err(error)) => {
                clean = false;
                out.flush()?;
                eprintln!("ptdump: {error}");
                skip(&mut decoder, bytes)?;
            }
            None => break,
        }
    }
    Ok(clean)
}

/// Goes to the next PSB and tells what is passed over.
fn skip(decoder: &mut Decoder, bytes: &[u8]) -> io::Result<()> {
    let from = decoder.offset();
    match decoder.sync_forward() {
        Some(at) if at > from => eprintln!("ptdump: {} bytes in front of the PSB at {at:#x} skipped", at - from),
        Some(_) => {}
        None if from < bytes.len() => eprintln!("ptdump: no PSB in the last {} bytes", bytes.len() - from),
        None => {}
    }
    Ok(())
}

fn line(bytes: &[u8], item: &Item, out: &mut impl Write) -> io::Result<()> {
    let mut hex = String::new();
    for byte in bytes[item.offset..].iter().take(item.len) {
        let _ = write!(hex, "{byte:02x}");
    }
    let text = payload(&item.packet);
    let name = item.packet.name();
    let line = format!("{:08x}  {hex:<32}  {name:<9}  {text}", item.offset);
    writeln!(out, "{}", line.trim_end())
}

/// A packet's fields, in the manual's order.
fn payload(packet: &Packet) -> String {
    let ip = |ip: Option<u64>| ip.map_or("no ip".to_string(), |ip| format!("{ip:#x}"));
    let flag = |set: bool, name: &str| if set { format!(" {name}") } else { String::new() };
    match *packet {
        Packet::Pad | Packet::Psb | Packet::PsbEnd | Packet::Ovf | Packet::TraceStop => String::new(),
        Packet::ShortTnt(tnt) | Packet::LongTnt(tnt) => tnt.to_string(),
        Packet::Tip(to) | Packet::TipPge(to) | Packet::TipPgd(to) | Packet::Fup(to) => ip(to),
        Packet::Pip { cr3, non_root } => format!("cr3 {cr3:#x}{}", flag(non_root, "non-root")),
        Packet::ModeExec { mode, interrupts } => {
            format!("{}-bit{}", mode.bits(), flag(interrupts, "IF"))
        }
        Packet::ModeTsx { in_tx, abort } => format!("{}{}", flag(in_tx, "InTX"), flag(abort, "TXAbort"))
            .trim_start()
            .to_string(),
        Packet::Cbr(ratio) => format!("{ratio}"),
        Packet::Tsc(tsc) => format!("{tsc:#x}"),
        Packet::Mtc(ctc) => format!("{ctc:#x}"),
        Packet::Tma { ctc, fast } => format!("ctc {ctc:#x} fast {fast:#x}"),
        Packet::Cyc(cycles) => format!("{cycles}"),
        Packet::Vmcs(pointer) => format!("{pointer:#x}"),
        Packet::Mnt(value) => format!("{value:#x}"),
        Packet::Ptw { value, size, ip } => format!("{} bytes {value:#x}{}", size.len(), flag(ip, "ip")),
        Packet::ExStop { ip } | Packet::Bep { ip } => flag(ip, "ip").trim_start().to_string(),
        Packet::Mwait { hints, extensions } => format!("hints {hints:#x} extensions {extensions:#x}"),
        Packet::Pwre {
            hardware,
            state,
            sub_state,
        } => format!("state {state} sub-state {sub_state}{}", flag(hardware, "hardware")),
        Packet::Pwrx { last, deepest, reason } => format!("last {last} deepest {deepest} reason {reason:#x}"),
        Packet::Bbp { size, kind } => format!("{} bytes type {kind}", size.len()),
        Packet::Bip { id, value, .. } => format!("id {id} {value:#x}"),
        Packet::Cfe { kind, vector, ip } => format!("type {kind} vector {vector}{}", flag(ip, "ip")),
        Packet::Evd { kind, value } => format!("type {kind} {value:#x}"),
    }
}
