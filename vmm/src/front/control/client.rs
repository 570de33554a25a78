//! `minivmm ctl PATH COMMAND`: sends one command to a machine's control socket and prints the answer.

use std::{
    io::{BufRead, BufReader, ErrorKind, Write},
    os::unix::net::UnixStream,
    path::Path,
};

use serde_json::Value;

use super::{PATIENCE, file, reported};
use crate::error::Error;

const OPTION: &str = "ctl";

/// Sends a command, a word or a whole JSON object, and gives the line that comes back. `monitor` and what follows it in the same
/// argument is a command of the monitor's, whose text comes back as it is.
///
/// # Errors
/// One line: nobody listens there, the machine ended, the command was refused.
pub fn send(path: &Path, command: &str) -> Result<String, Error> {
    let failed = |e: &std::io::Error| match e.kind() {
        ErrorKind::WouldBlock | ErrorKind::TimedOut => file(OPTION, path, "no answer"),
        ErrorKind::ConnectionRefused => file(OPTION, path, "nobody listens there any more"),
        _ => reported(OPTION, path, e),
    };
    let mut stream = UnixStream::connect(path).map_err(|e| failed(&e))?;
    for set in [UnixStream::set_read_timeout, UnixStream::set_write_timeout] {
        set(&stream, Some(PATIENCE)).map_err(|e| failed(&e))?;
    }
    let monitor = command.strip_prefix("monitor ");
    let request = match (monitor, command.starts_with('{')) {
        (Some(line), _) => serde_json::json!({ "command": "monitor", "line": line }).to_string(),
        (None, true) => command.replace('\n', " "),
        (None, false) => serde_json::json!({ "command": command }).to_string(),
    };
    // A refusal may be there before all of the request is gone.
    let sent = stream.write_all(format!("{request}\n").as_bytes());
    let mut line = String::new();
    BufReader::new(&stream).read_line(&mut line).map_err(|e| failed(&e))?;
    if line.is_empty() {
        sent.map_err(|e| failed(&e))?;
        return Err(file(OPTION, path, "the machine ended without an answer"));
    }
    let answer: Value = serde_json::from_str(&line).map_err(|_| file(OPTION, path, "the answer is no JSON object"))?;
    match (&answer["ok"], &answer["error"]) {
        (Value::Bool(true), _) => match &answer["text"] {
            Value::String(text) if monitor.is_some() => Ok(text.clone()),
            _ => Ok(line),
        },
        (_, Value::String(error)) => Err(file(OPTION, path, error)),
        _ => Err(file(OPTION, path, "the answer is none of minivmm's")),
    }
}
