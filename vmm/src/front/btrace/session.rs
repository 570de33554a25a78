//! The histories of a machine's CPUs, switched on and read by gdb's packets.

use std::sync::{Arc, Mutex};

use machine::watchers::Seat;

use super::{
    blocks::Read,
    observer::{History, Listener, Trace},
    packets::Packets,
    types::{Annex, Format, Unread, lock},
};
use crate::{front::btrace::blocks::Blocks, vm::Vm};

/// Bytes of a record of the branch trace store in gdb's sizes.
const RECORD: u64 = 24;
/// The most bytes of a history; gdb's `unlimited`, 0, is this.
pub const LARGEST: u64 = 16 << 20;
/// The fewest: a PSB has to be in it.
pub const SMALLEST: u64 = 4 << 10;

/// A CPU's history.
#[derive(Debug)]
struct Session {
    format: Format,
    size: u64,
    history: Arc<Mutex<History>>,
}

/// The histories of a machine's CPUs.
#[derive(Debug)]
pub struct Btrace {
    sessions: Vec<Option<Session>>,
    /// Bytes of the next history: of blocks, of packets.
    sizes: [u64; 2],
    /// What `qXfer` is reading: which object of which CPU.
    reading: Option<(Object, usize, String)>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Object {
    Trace,
    Configuration,
}

impl Default for Btrace {
    fn default() -> Self {
        Btrace {
            sessions: Vec::new(),
            sizes: [64 << 10, 16 << 10],
            reading: None,
        }
    }
}

/// What an answer to `qSupported` says of this.
pub const SUPPORTED: &str = "Qbtrace:bts+;Qbtrace:pt+;Qbtrace:off+;Qbtrace-conf:bts:size+;Qbtrace-conf:pt:size+;\
qXfer:btrace:read+;qXfer:btrace-conf:read+";

impl Btrace {
    /// Without histories.
    pub fn new() -> Self {
        Btrace::default()
    }

    fn session(&self, cpu: usize) -> Option<&Session> {
        self.sessions.get(cpu)?.as_ref()
    }

    /// Begins a CPU's history at its next instruction; `false` if it has one, or there is no such CPU.
    pub fn enable(&mut self, vm: &mut Vm, cpu: usize, format: Format) -> bool {
        if cpu >= vm.cpu_count() || self.session(cpu).is_some() {
            return false;
        }
        let size = self.sizes[format as usize];
        let trace = match format {
            Format::Bts => Trace::Blocks(Blocks::new((size / RECORD) as usize)),
            Format::Pt => Trace::Packets(Box::new(Packets::new(vm.machine().model(), size as usize))),
        };
        let history = Arc::new(Mutex::new(History::new(trace, vm.machine().restorations())));
        vm.look(cpu, |processor| lock(&history).begin(processor));
        vm.machine()
            .seat(cpu, Seat::Branches, Some(Box::new(Listener(Arc::clone(&history)))));
        self.sessions.resize_with(vm.cpu_count(), || None);
        self.sessions[cpu] = Some(Session { format, size, history });
        true
    }

    /// Ends a CPU's history; `false` if it has none.
    pub fn disable(&mut self, vm: &mut Vm, cpu: usize) -> bool {
        let session = self.sessions.get_mut(cpu).and_then(Option::take);
        if session.is_some() {
            vm.machine().seat(cpu, Seat::Branches, None);
        }
        session.is_some()
    }

    /// Ends all histories: the client has gone.
    pub fn close(&mut self, vm: &mut Vm) {
        for cpu in 0..self.sessions.len() {
            self.disable(vm, cpu);
        }
        *self = Btrace::default();
    }

    /// Reads a CPU's history between two steps. Nothing in the guest changes by it.
    ///
    /// # Errors
    /// There is none, or not as it is wanted.
    pub fn read(&self, vm: &mut Vm, cpu: usize, annex: Annex) -> Result<Read, Unread> {
        let session = self.session(cpu).ok_or(Unread::Off)?;
        vm.look(cpu, |processor| lock(&session.history).read(annex, processor))
            .unwrap_or(Err(Unread::Off))
    }

    /// Answers a packet about the CPU that `Hg` has named; `None` if it is about something else.
    pub fn packet(&mut self, vm: &mut Vm, cpu: usize, packet: &str) -> Option<String> {
        if let Some(action) = packet.strip_prefix("Qbtrace:") {
            return Some(self.switch(vm, cpu, action));
        }
        if let Some(setting) = packet.strip_prefix("Qbtrace-conf:") {
            return Some(self.configure(setting));
        }
        if let Some(what) = packet.strip_prefix("qXfer:btrace:read:") {
            return Some(self.transfer(vm, cpu, Object::Trace, what));
        }
        let what = packet.strip_prefix("qXfer:btrace-conf:read:")?;
        Some(self.transfer(vm, cpu, Object::Configuration, what))
    }

    fn switch(&mut self, vm: &mut Vm, cpu: usize, action: &str) -> String {
        let format = match action {
            "bts" => Format::Bts,
            "pt" => Format::Pt,
            "off" if self.disable(vm, cpu) => return "OK".into(),
            "off" => return error(&Unread::Off.to_string()),
            _ => return error("Branch tracing is bts, pt or off."),
        };
        if self.enable(vm, cpu, format) {
            "OK".into()
        } else if cpu < vm.cpu_count() {
            error("Branch tracing is on for this CPU already.")
        } else {
            error("There is no such CPU.")
        }
    }

    fn configure(&mut self, setting: &str) -> String {
        let (format, size) = match setting.split_once('=') {
            Some(("bts:size", size)) => (Format::Bts, size),
            Some(("pt:size", size)) => (Format::Pt, size),
            _ => return error("Settings are bts:size and pt:size."),
        };
        let Some(size) = number(size.strip_prefix("0x").unwrap_or(size)) else {
            return error("A size is a hexadecimal number.");
        };
        self.sizes[format as usize] = match size {
            0 => LARGEST,
            size => size.clamp(SMALLEST, LARGEST),
        };
        "OK".into()
    }

    /// A part of a document: `ANNEX:OFFSET,LENGTH`.
    fn transfer(&mut self, vm: &mut Vm, cpu: usize, object: Object, what: &str) -> String {
        let parsed = what.split_once(':').and_then(|(annex, part)| {
            let (offset, length) = part.split_once(',')?;
            Some((annex, number(offset)?, number(length)?))
        });
        let Some((annex, offset, length)) = parsed else {
            return error("That is not annex, offset and length.");
        };
        // The document is made when its beginning is asked for, and does not change until then.
        if offset == 0 {
            let made = match object {
                Object::Trace => self.trace(vm, cpu, annex),
                Object::Configuration => self.configuration(cpu, annex),
            };
            match made {
                Ok(document) => self.reading = Some((object, cpu, document)),
                Err(why) => {
                    self.reading = None;
                    return match why {
                        // gdb asks for something else then, and says nothing of it.
                        Unread::Gap => "E01".into(),
                        _ => error(&why.to_string()),
                    };
                }
            }
        }
        let document = match &self.reading {
            Some((read, of, document)) if (*read, *of) == (object, cpu) => document,
            _ => return error("Documents are read from their beginning."),
        };
        let from = usize::try_from(offset).unwrap_or(usize::MAX).min(document.len());
        let len = usize::try_from(length).unwrap_or(usize::MAX).min(document.len() - from);
        // Its text is ASCII.
        let part = document.get(from..from + len).unwrap_or("");
        if from + len < document.len() {
            return format!("m{part}");
        }
        let answer = format!("l{part}");
        self.reading = None;
        answer
    }

    fn trace(&self, vm: &mut Vm, cpu: usize, annex: &str) -> Result<String, Unread> {
        let annex = match annex {
            "all" => Annex::All,
            "new" => Annex::New,
            "delta" => Annex::Delta,
            _ => return Err(Unread::Annex),
        };
        self.read(vm, cpu, annex).map(|read| document(&read))
    }

    fn configuration(&self, cpu: usize, annex: &str) -> Result<String, Unread> {
        if !annex.is_empty() {
            return Err(Unread::Parts);
        }
        let session = self.session(cpu).ok_or(Unread::Off)?;
        let format = match session.format {
            Format::Bts => "bts",
            Format::Pt => "pt",
        };
        Ok(format!(
            "<!DOCTYPE btrace-conf SYSTEM \"btrace-conf.dtd\">\n<btrace-conf version=\"1.0\">\n<{format} size=\"{:#x}\"/>\n</btrace-conf>\n",
            session.size
        ))
    }
}

/// An error that says why.
fn error(text: &str) -> String {
    format!("E.{text}")
}

/// Hexadecimal digits, as the protocol has them.
fn number(digits: &str) -> Option<u64> {
    let all = !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_hexdigit());
    all.then(|| u64::from_str_radix(digits, 16).ok()).flatten()
}

/// The document of a history.
fn document(read: &Read) -> String {
    use std::fmt::Write;
    let mut text = String::from("<!DOCTYPE btrace SYSTEM \"btrace.dtd\">\n<btrace version=\"1.0\">\n");
    match read {
        Read::Nothing => {}
        Read::Blocks(blocks) => {
            for block in blocks {
                let _ = writeln!(text, "<block begin=\"{:#x}\" end=\"{:#x}\"/>", block.begin, block.end);
            }
        }
        Read::Packets(bytes) => {
            // Without a processor's name there are no errata to decode by, and there are none.
            text += "<pt>\n<pt-config>\n</pt-config>\n<raw>\n";
            text.reserve(2 * bytes.len() + 64);
            for byte in bytes {
                for digit in [byte >> 4, byte & 15] {
                    text.push(char::from(b"0123456789abcdef"[usize::from(digit)]));
                }
            }
            text += "\n</raw>\n</pt>\n";
        }
    }
    text += "</btrace>\n";
    text
}
