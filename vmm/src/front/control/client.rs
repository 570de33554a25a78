//! `minivmm ctl PATH COMMAND`: sends one command to a machine's control socket and prints the answer.

use std::{
    fs::{self, File},
    io::{self, BufRead, BufReader, ErrorKind, Write},
    os::{
        fd::AsRawFd,
        unix::{fs::OpenOptionsExt, net::UnixStream},
    },
    path::Path,
    time::Duration,
};

use serde_json::Value;
use vmm_sys_util::sock_ctrl_msg::ScmSocket;

use super::{file, reported};
use crate::{error::Error, front::clients::PATIENCE};

const OPTION: &str = "ctl";
/// The commands that write to a file.
const FILE_COMMANDS: [&str; 2] = ["dump", "snapshot"];
/// A dump takes as long as its disk does.
const DUMP_PATIENCE: Duration = Duration::from_secs(600);

/// Sends a command, a word or a whole JSON object, and gives the line that comes back. `monitor` and what follows it in the same
/// argument is a command of the monitor's, whose text comes back as it is. `dump` and `snapshot` take a file, which is made: the machine is
/// handed it open, since it may open none itself.
///
/// # Errors
/// One line: nobody listens there, the machine ended, the command was refused, the file exists or cannot be made.
pub fn send(path: &Path, command: &str, new: Option<&Path>) -> Result<String, Error> {
    let takes_file = FILE_COMMANDS.into_iter().find(|name| *name == command);
    match (takes_file, new) {
        (Some(name), Some(new)) => {
            let failed = |e: io::Error| match e.kind() {
                ErrorKind::AlreadyExists => file(name, new, "exists already: give a new file"),
                _ => reported(name, new, &e),
            };
            let mut options = File::options();
            // What it holds of the guest's memory is its owner's alone.
            let made = options
                .write(true)
                .create_new(true)
                .mode(0o600)
                .open(new)
                .map_err(failed)?;
            let text = exchange(path, command, Some(&made));
            if text.is_err() {
                // It was new, and holds nothing.
                let _ = fs::remove_file(new);
            }
            text
        }
        (Some(name), None) => Err(Error::Usage(format!(
            "ctl: {name} takes a file: minivmm ctl SOCKET {name} FILE"
        ))),
        (_, Some(extra)) => Err(file(
            OPTION,
            extra,
            "one argument too many: a command of several words is one argument",
        )),
        (_, None) => exchange(path, command, None),
    }
}

fn exchange(path: &Path, command: &str, with: Option<&File>) -> Result<String, Error> {
    let failed = |e: &io::Error| match e.kind() {
        ErrorKind::WouldBlock | ErrorKind::TimedOut => file(
            OPTION,
            path,
            "no answer yet: the machine may still be at an earlier command, such as run-to",
        ),
        ErrorKind::ConnectionRefused => file(OPTION, path, "nobody listens there any more"),
        _ => reported(OPTION, path, e),
    };
    let mut stream = UnixStream::connect(path).map_err(|e| failed(&e))?;
    let patience = if with.is_some() { DUMP_PATIENCE } else { PATIENCE };
    stream.set_read_timeout(Some(patience)).map_err(|e| failed(&e))?;
    stream.set_write_timeout(Some(PATIENCE)).map_err(|e| failed(&e))?;
    let monitor = command.strip_prefix("monitor ");
    let request = match (monitor, command.starts_with('{')) {
        (Some(line), _) => serde_json::json!({ "command": "monitor", "line": line }).to_string(),
        (None, true) => command.replace('\n', " "),
        (None, false) => serde_json::json!({ "command": command }).to_string(),
    };
    // A refusal may be there before all of the request is gone.
    let request = format!("{request}\n");
    let sent = match with {
        // It is short: all of it goes at once.
        Some(file) => stream
            .send_with_fd(request.as_bytes(), file.as_raw_fd())
            .map(drop)
            .map_err(io::Error::from),
        None => stream.write_all(request.as_bytes()),
    };
    let mut line = String::new();
    BufReader::new(&stream).read_line(&mut line).map_err(|e| failed(&e))?;
    if line.is_empty() {
        sent.map_err(|e| failed(&e))?;
        return Err(file(OPTION, path, "the machine ended without an answer"));
    }
    let answer: Value = serde_json::from_str(&line).map_err(|_| file(OPTION, path, "the answer is no JSON object"))?;
    match (&answer["ok"], &answer["error"]) {
        (Value::Bool(true), _) => match &answer["text"] {
            Value::String(text) if monitor.is_some() || with.is_some() => Ok(text.clone()),
            _ => Ok(line),
        },
        (_, Value::String(error)) => Err(file(OPTION, path, error)),
        _ => Err(file(OPTION, path, "the answer is none of minivmm's")),
    }
}
