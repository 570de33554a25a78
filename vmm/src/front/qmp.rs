//! `--qmp unix:PATH`: the part of the QEMU Machine Protocol with which debuggers read a guest, drgn above all.
//!
//! # Protocol
//! As docs/interop/qmp-spec.rst of QEMU has it: a greeting, then commands and their answers as JSON objects, and nothing but
//! `qmp_capabilities` before that has come. There are no events.
//!
//! | command | what it does |
//! |---|---|
//! | `qmp_capabilities` | begins |
//! | `query-target`, `query-version`, `query-status`, `query-commands` | say so |
//! | `stop`, `cont`, `quit` | hold the guest stopped, let it go on, end the machine |
//! | `human-monitor-command` | `xp`, `info mtree -f`, `gpa2hva` ([`super::human_monitor`]) |
//! | `getfd`, `closefd` | keep a file whose descriptor comes with the command under a name, and close it |
//! | `dump-guest-memory` | writes an ELF core file ([`machine::vmcore`]) to such a file: `"protocol":"fd:NAME"`, `"begin"` and `"length"` |

use std::{
    collections::BTreeMap,
    fs::File,
    io::{self, Read, Write},
};

use serde::Deserialize;
use serde_json::{Value, json};

use super::{
    clients::{Connection, Protocol, Session},
    requests::{Command, Reply, Status},
};

/// The longest command in bytes.
const LONGEST: usize = 1 << 14;
/// So many files of a client's have names.
const MOST_FILES: usize = 16;

/// The language of the socket.
pub const PROTOCOL: Protocol = Protocol {
    option: "--qmp",
    threads: ("qmp", "qmp client"),
    serve,
    refusal: |why| line_of(&error("GenericError", why)),
};

/// The commands, for `query-commands`.
const COMMANDS: [&str; 12] = [
    "qmp_capabilities",
    "query-target",
    "query-version",
    "query-status",
    "query-commands",
    "stop",
    "cont",
    "quit",
    "human-monitor-command",
    "getfd",
    "closefd",
    "dump-guest-memory",
];

/// A command as a client sends it.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Sent {
    execute: String,
    #[serde(default)]
    arguments: serde_json::Map<String, Value>,
    id: Option<Value>,
}

fn error(class: &str, desc: &str) -> Value {
    json!({ "error": { "class": class, "desc": desc } })
}

fn done(value: Value) -> Value {
    json!({ "return": value })
}

fn line_of(answer: &Value) -> Vec<u8> {
    format!("{answer}\r\n").into_bytes()
}

/// The version that the greeting says: this program's own.
fn version() -> Value {
    let mut numbers = env!("CARGO_PKG_VERSION")
        .split('.')
        .map(|part| part.parse().unwrap_or(0));
    let mut next = || numbers.next().unwrap_or(0u32);
    json!({
        "qemu": { "major": next(), "minor": next(), "micro": next() },
        "package": concat!("minivmm ", env!("CARGO_PKG_VERSION")),
    })
}

/// Answers a client until it goes away.
fn serve(mut client: Connection, session: &Session<'_>) -> io::Result<()> {
    client.write_all(&line_of(
        &json!({ "QMP": { "version": version(), "capabilities": [] } }),
    ))?;
    let mut talk = Talk {
        session,
        begun: false,
        files: BTreeMap::new(),
    };
    let mut bytes = Vec::new();
    loop {
        let mut objects = serde_json::Deserializer::from_slice(&bytes).into_iter::<Value>();
        let next = objects.next();
        let end = objects.byte_offset();
        match next {
            Some(Ok(object)) => {
                bytes.drain(..end);
                if !talk.answer(object, &mut client)? {
                    return Ok(());
                }
                continue;
            }
            Some(Err(wrong)) if !wrong.is_eof() => {
                // Where the next command begins nobody knows, but for the next line. What is before this one ended the one before.
                let blank = bytes.len() - bytes.trim_ascii_start().len();
                let line = bytes[blank..].iter().position(|byte| *byte == b'\n');
                bytes.drain(..line.map_or(bytes.len(), |at| blank + at + 1));
                let wrong = error("GenericError", &format!("JSON parse error, {wrong}"));
                client.write_all(&line_of(&wrong))?;
                continue;
            }
            _ => {}
        }
        if bytes.len() > LONGEST {
            let wrong = error("GenericError", &format!("a command of more than {LONGEST} bytes"));
            return client.write_all(&line_of(&wrong));
        }
        let mut part = [0; 4096];
        match client.read(&mut part) {
            Ok(0) => return Ok(()),
            Ok(count) => bytes.extend_from_slice(&part[..count]),
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
}

/// What is known of a client.
struct Talk<'a> {
    session: &'a Session<'a>,
    /// `qmp_capabilities` has come.
    begun: bool,
    files: BTreeMap<String, File>,
}

/// What a command comes to: an answer, or what the machine is to be asked and how its answer is told.
enum Next {
    Answer(Value),
    Ask(Command, Option<File>, fn(Reply) -> Value),
}

impl Talk<'_> {
    /// Answers a command. `false`: the client was sent away.
    fn answer(&mut self, object: Value, client: &mut Connection) -> io::Result<bool> {
        let sent: Result<Sent, _> = serde_json::from_value(object);
        let (next, id) = match sent {
            Ok(sent) => {
                let next = self.next(&sent, client);
                (next.unwrap_or_else(Next::Answer), sent.id)
            }
            Err(wrong) => (
                Next::Answer(error("GenericError", &format!("not a command: {wrong}"))),
                None,
            ),
        };
        let line = |mut answer: Value| {
            if let Some(id) = id {
                answer["id"] = id;
            }
            line_of(&answer)
        };
        match next {
            Next::Answer(answer) => client.write_all(&line(answer)).map(|()| true),
            Next::Ask(command, file, tell) => self.session.ask(command, file, |reply| {
                let answer = match reply {
                    Some(Reply::Refused(why)) => error("GenericError", &why),
                    Some(reply) => tell(reply),
                    None => error("GenericError", "the machine has ended"),
                };
                client.write_all(&line(answer))
            }),
        }
    }

    fn next(&mut self, sent: &Sent, client: &mut Connection) -> Result<Next, Value> {
        let name = sent.execute.as_str();
        if name == "qmp_capabilities" && !self.begun {
            self.begun = true;
            return Ok(Next::Answer(done(json!({}))));
        }
        let not_found = |why: &str| Err(error("CommandNotFound", why));
        if !self.begun {
            return not_found(&format!(
                "Expecting capabilities negotiation with 'qmp_capabilities' before command '{name}'"
            ));
        }
        let answer = |value| Ok(Next::Answer(done(value)));
        match name {
            "qmp_capabilities" => not_found("Capabilities negotiation is already complete, command ignored"),
            "query-target" => answer(json!({ "arch": "x86_64" })),
            "query-version" => answer(version()),
            "query-commands" => answer(COMMANDS.iter().map(|name| json!({ "name": name })).collect()),
            "query-status" => Ok(Next::Ask(Command::Status, None, |reply| {
                let running = matches!(&reply, Reply::Status(Status { state: "running", .. }));
                let status = if running { "running" } else { "paused" };
                done(json!({ "running": running, "singlestep": false, "status": status }))
            })),
            "stop" => Ok(Next::Ask(Command::Pause, None, |_| done(json!({})))),
            "cont" => Ok(Next::Ask(Command::Resume, None, |_| done(json!({})))),
            "quit" => Ok(Next::Ask(Command::Quit, None, |_| done(json!({})))),
            "human-monitor-command" => {
                let line = text(sent, "command-line")?.to_string();
                Ok(Next::Ask(Command::HumanMonitor { line }, None, |reply| match reply {
                    Reply::Text(text) => done(text.into()),
                    _ => done("".into()),
                }))
            }
            "getfd" => {
                let name = text(sent, "fdname")?;
                let file = client
                    .take_file()
                    .ok_or_else(|| error("GenericError", "No file descriptor supplied via SCM_RIGHTS"))?;
                if self.files.len() >= MOST_FILES && !self.files.contains_key(name) {
                    return Err(error(
                        "GenericError",
                        &format!("more than {MOST_FILES} files: closefd makes room"),
                    ));
                }
                self.files.insert(name.into(), file);
                answer(json!({}))
            }
            "closefd" => {
                self.file(text(sent, "fdname")?)?;
                answer(json!({}))
            }
            "dump-guest-memory" => self.dump(sent),
            _ => not_found(&format!("The command {name} has not been found")),
        }
    }

    /// Takes a file by its name.
    fn file(&mut self, name: &str) -> Result<File, Value> {
        let file = self.files.remove(name);
        file.ok_or_else(|| error("GenericError", &format!("File descriptor named '{name}' not found")))
    }

    fn dump(&mut self, sent: &Sent) -> Result<Next, Value> {
        let flag = |name| sent.arguments.get(name).and_then(Value::as_bool).unwrap_or(false);
        let wrong = |why: &str| Err(error("GenericError", why));
        if flag("paging") {
            return wrong("paging: a dump is of physical memory");
        }
        if flag("detach") {
            return wrong("detach: a dump is complete when it is answered");
        }
        if sent.arguments.get("format").is_some_and(|format| format != "elf") {
            return wrong("format: elf is the one there is");
        }
        let Some(name) = text(sent, "protocol")?.strip_prefix("fd:") else {
            return wrong("protocol: fd:NAME is the one there is, with a file that getfd has named");
        };
        let number = |name: &str| match sent.arguments.get(name) {
            None => Ok(None),
            Some(value) => value
                .as_u64()
                .map(Some)
                .ok_or_else(|| error("GenericError", &format!("{name}: not a number"))),
        };
        let part = match (number("begin")?, number("length")?) {
            (None, None) => None,
            (Some(begin), Some(length)) => Some(begin..begin.saturating_add(length)),
            _ => return wrong("begin and length go together"),
        };
        let file = self.file(name)?;
        Ok(Next::Ask(Command::Dump { part }, Some(file), |_| done(json!({}))))
    }
}

/// An argument that has to be there, as text.
fn text<'a>(sent: &'a Sent, name: &str) -> Result<&'a str, Value> {
    let value = sent.arguments.get(name).and_then(Value::as_str);
    value.ok_or_else(|| {
        error(
            "GenericError",
            &format!("Parameter '{name}' is missing, or is not text"),
        )
    })
}
