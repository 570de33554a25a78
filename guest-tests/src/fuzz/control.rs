//! Lines of a client of the control socket.

use std::cell::RefCell;

use minivmm::front::controls::Controls;
use minivmm::front::monitor;
use minivmm::front::requests::Command;
use minivmm::{MachineConfig, Run};
use x86::model::SAPPHIRERAPIDS;

/// Each line is a command's text, or else one of the monitor's, without files. What comes back is text of bounded length.
pub fn control(bytes: &[u8]) {
    thread_local! {
        static VM: RefCell<Run> = RefCell::new(machine());
    }
    VM.with_borrow_mut(|vm| {
        let mut controls = Controls::new(vm);
        for line in bytes.split(|byte| *byte == b'\n').take(64) {
            let (line, cpu) = match serde_json::from_slice(line) {
                Ok(Command::Monitor { line, cpu }) => (line, cpu),
                Ok(_) => {
                    controls.status();
                    continue;
                }
                Err(_) => (String::from_utf8_lossy(line).into_owned(), 0),
            };
            let text = monitor::run_without_files(&mut controls, cpu, &line);
            assert!(
                text.ends_with('\n') && text.len() < 1 << 20,
                "{line:?}: {} bytes",
                text.len()
            );
            let obeyed = text.chars().find(|c| c.is_control() && *c != '\n' && *c != '\t');
            assert!(obeyed.is_none(), "{line:?}: {obeyed:?} in {text:?}");
        }
        // Names that were given to states.
        let names: Vec<String> = controls.run.kept_states().map(|(name, _)| name.to_string()).collect();
        for name in names {
            controls.run.drop_state(&name);
        }
    });
}

fn machine() -> Run {
    let config = MachineConfig {
        memory: 4 << 20,
        cpus: 2,
        model: &SAPPHIRERAPIDS,
        ..MachineConfig::new(crate::HELLO)
    };
    Run::new(&config).expect("the machine is to be had")
}

/// Every command of the monitor, in words and as an object.
pub fn lines() -> Vec<Vec<u8>> {
    let arguments = [
        "",
        "3",
        "read IA32_APIC_BASE",
        "write 0x1d9 1",
        "1",
        "0xd 1",
        "0x100000",
        "14",
        "none",
        "save a",
        "load a",
        "drop a",
        "list",
        "start",
        "stop",
    ];
    let mut text = String::new();
    for command in monitor::COMMANDS {
        for argument in arguments {
            text += &format!("{} {argument}\n", command.name);
        }
    }
    let objects = [
        r#"{"command":"status"}"#,
        r#"{"command":"pause"}"#,
        r#"{"command":"dump"}"#,
        r#"{"command":"snapshot"}"#,
        r#"{"command":"monitor","line":"info","cpu":1}"#,
        r#"{"command":"monitor","line":"lbr 2","cpu":9}"#,
    ];
    // A line of each, so that what is cut or changed is near them.
    let mut seeds: Vec<Vec<u8>> = text
        .lines()
        .collect::<Vec<_>>()
        .chunks(48)
        .map(|lines| lines.join("\n").into_bytes())
        .collect();
    seeds.push(objects.join("\n").into_bytes());
    seeds
}
