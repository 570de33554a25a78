//! `--control unix:PATH`: a running machine takes commands over a socket, as JSON lines.
//!
//! # Protocol
//! A client sends one object a line, such as `{"command":"status"}`, and gets one object a line back, in order. `"ok"` says
//! whether the command was carried out; if not, `"error"` says why, and the connection goes on unless the line was too long.
//!
//! | command | what it does | what comes back |
//! |---|---|---|
//! | `status` | nothing | see below |
//! | `pause` | the guest stops between two instructions; the clock stops with it | status |
//! | `resume` | the guest goes on | status |
//! | `quit` | the machine ends, with exit status 0 | status |
//! | `dump` | memory and registers are written as an ELF core file ([`machine::vmcore`]) to the file whose descriptor comes with the line (SCM_RIGHTS of unix(7)) | `"text"` |
//! | `snapshot` | the machine's state is written to a file in the same way ([`crate::timeline::snapshot_file`]) | `"text"` |
//! | `monitor` | what the `"line"` says ([`crate::front::monitor`]), on the CPU that `"cpu"` names or on 0 | `"text"` |
//!
//! Status is `"state"` (`"running"` or `"paused"`), `"steps"` and `"instructions"` so far, `"virtual_ns"`, and for each CPU in
//! `"cpus"` its `"rip"` (hexadecimal), `"activity"` and `"steps"`.

pub mod client;

use std::{
    io::{self, BufRead, BufReader, Read, Write},
    path::Path,
};

use serde::Serialize;

use super::{
    clients::{Connection, Protocol, Session},
    requests::{Command, Reply, Status},
};
use crate::error::Error;
use machine::plain;

/// The longest line in bytes, without its end.
pub const LONGEST: usize = 4096;

/// The language of the control socket.
pub const PROTOCOL: Protocol = Protocol {
    option: "--control",
    threads: ("control", "control client"),
    serve,
    refusal: refused,
};

/// An answer, as it goes over the line.
#[derive(Debug, Serialize)]
struct Answer<'a> {
    ok: bool,
    #[serde(flatten)]
    status: Option<&'a Status>,
    #[serde(skip_serializing_if = "Option::is_none")]
    text: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<&'a str>,
}

/// Answers a client's lines until it goes away.
fn serve(connection: Connection, session: &Session<'_>) -> io::Result<()> {
    let mut client = BufReader::new(connection);
    let mut line = Vec::new();
    loop {
        line.clear();
        let count = (&mut client).take(LONGEST as u64 + 1).read_until(b'\n', &mut line)?;
        let connection = client.get_mut();
        if count == 0 {
            return Ok(());
        }
        if line.last() != Some(&b'\n') && line.len() > LONGEST {
            return connection.write_all(&refused(&format!("a line of more than {LONGEST} bytes")));
        }
        if line.trim_ascii().is_empty() {
            continue;
        }
        match serde_json::from_slice::<Command>(&line) {
            Ok(command) => {
                let file = matches!(command, Command::Dump { .. } | Command::Snapshot)
                    .then(|| connection.take_file())
                    .flatten();
                if !session.ask(command, file, |reply| connection.write_all(&answer(reply)))? {
                    return Ok(());
                }
            }
            Err(error) => connection.write_all(&refused(&not_a_command(&line, &error)))?,
        }
    }
}

/// What is wrong with a line, and which commands there are.
fn not_a_command(line: &[u8], error: &serde_json::Error) -> String {
    const COMMANDS: &str = "there are status, pause, resume, quit, snapshot, dump, and monitor with a line";
    let object = serde_json::from_slice::<serde_json::Value>(line).ok();
    match object.as_ref().map(|object| &object["command"]) {
        Some(serde_json::Value::String(name)) if !COMMANDS.split([' ', ',']).any(|known| known == name) => {
            format!("no command {name:?}: {COMMANDS}")
        }
        Some(serde_json::Value::Null) => format!("an object without \"command\": {COMMANDS}"),
        _ => format!("not a command: {error}"),
    }
}

/// What came of a command, as a line.
fn answer(reply: Option<Reply>) -> Vec<u8> {
    let done = |status, text| {
        line_of(&Answer {
            ok: true,
            status,
            text,
            error: None,
        })
    };
    match reply {
        Some(Reply::Status(status)) => done(Some(&status), None),
        Some(Reply::Text(text)) => done(None, Some(&text)),
        Some(Reply::Refused(error)) => refused(&error),
        None => refused("the machine has ended"),
    }
}

fn refused(error: &str) -> Vec<u8> {
    line_of(&Answer {
        ok: false,
        status: None,
        text: None,
        error: Some(error),
    })
}

fn line_of(answer: &Answer<'_>) -> Vec<u8> {
    let mut line = serde_json::to_vec(answer).unwrap_or_default();
    line.push(b'\n');
    line
}

fn file(option: &'static str, path: &Path, text: &str) -> Error {
    Error::File {
        option,
        path: path.into(),
        source: io::Error::other(text),
    }
}

fn reported(option: &'static str, path: &Path, error: &io::Error) -> Error {
    file(option, path, &plain(error))
}
