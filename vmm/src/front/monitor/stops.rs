//! What stops the guest for whoever debugs it.

use std::fmt::Write;

use x86::vmx::ExitReason;

use super::{
    arguments::{Answer, number},
    error::MonitorError,
    scene::Scene,
};

/// Names of exceptions by their vectors, without the number sign. SDM Vol. 3A Table 6-1 "Protected-Mode Exceptions and
/// Interrupts".
const NAMES: [(u8, &str); 20] = [
    (0, "DE"),
    (1, "DB"),
    (2, "NMI"),
    (3, "BP"),
    (4, "OF"),
    (5, "BR"),
    (6, "UD"),
    (7, "NM"),
    (8, "DF"),
    (10, "TS"),
    (11, "NP"),
    (12, "SS"),
    (13, "GP"),
    (14, "PF"),
    (16, "MF"),
    (17, "AC"),
    (18, "MC"),
    (19, "XM"),
    (20, "VE"),
    (21, "CP"),
];

fn name(vector: u8) -> String {
    match NAMES.iter().find(|(number, _)| *number == vector) {
        Some((_, name)) => format!("{vector} (#{name})"),
        None => format!("{vector}"),
    }
}

fn exit_name(reason: u16) -> String {
    match ExitReason::of(reason) {
        Some(named) => format!("VM exit {reason} ({})", named.text()),
        None => format!("VM exit {reason}"),
    }
}

/// `catch vmexit`: by the number of the basic exit reason, or by a part of its name; without either, every one.
fn catch_exits(scene: &mut Scene<'_, '_>, arguments: &[&str]) -> Answer {
    if scene.controls.run.machine().model().shown_vmx().is_none() {
        return Err(MonitorError::Impossible(
            "this CPU model shows no VMX: core2 and all later models do, unless `-vmx` takes it away",
        ));
    }
    let debugger = scene.controls.run.debugger();
    if arguments.is_empty() {
        for (_, reason, _) in ExitReason::ALL {
            debugger.catch_exit(*reason, true);
        }
        return Ok("every VM exit is caught\n".into());
    }
    let wanted = arguments.join(" ");
    let reasons: Vec<u16> = match number(&wanted) {
        Ok(reason) => vec![u16::try_from(reason).map_err(|_| MonitorError::NoExitReason(wanted.clone()))?],
        Err(_) => {
            let lower = wanted.to_lowercase();
            let alike = |text: &str| text.to_lowercase().contains(&lower);
            let whole = ExitReason::ALL
                .iter()
                .find(|(_, _, text)| text.eq_ignore_ascii_case(&wanted));
            match whole {
                Some((_, reason, _)) => vec![*reason],
                None => ExitReason::ALL
                    .iter()
                    .filter(|(_, _, text)| alike(text))
                    .map(|(_, reason, _)| *reason)
                    .collect(),
            }
        }
    };
    if reasons.is_empty() || reasons.iter().any(|&reason| ExitReason::of(reason).is_none()) {
        return Err(MonitorError::NoExitReason(wanted));
    }
    let mut text = String::new();
    for reason in reasons {
        let new = if debugger.catch_exit(reason, true) {
            ""
        } else {
            " already"
        };
        let _ = writeln!(text, "{} is caught{new}", exit_name(reason));
    }
    Ok(text)
}

/// `catch`.
pub fn catch(scene: &mut Scene<'_, '_>, arguments: &[&str]) -> Answer {
    if !scene.controls.run.is_debugged() {
        return Err(MonitorError::Impossible(
            "nobody could look at what is caught: `--gdb` at the start makes it possible",
        ));
    }
    if let ["vmexit", rest @ ..] = arguments {
        return catch_exits(scene, rest);
    }
    let debugger = scene.controls.run.debugger();
    match arguments {
        [] => {
            let exits = debugger.exits().into_iter().map(exit_name);
            let caught: Vec<String> = debugger.catches().into_iter().map(name).chain(exits).collect();
            Ok(if caught.is_empty() {
                "nothing is caught\n".into()
            } else {
                format!("caught: {}\n", caught.join(", "))
            })
        }
        ["none"] => {
            for vector in debugger.catches() {
                debugger.catch(vector, false);
            }
            for reason in debugger.exits() {
                debugger.catch_exit(reason, false);
            }
            Ok("nothing is caught\n".into())
        }
        [word] => {
            let plain = word.strip_prefix('#').unwrap_or(word);
            let named = NAMES.iter().find(|(_, name)| name.eq_ignore_ascii_case(plain));
            let vector = match named {
                Some((vector, _)) => *vector,
                None => {
                    let vector = number(word).ok().and_then(|vector| u8::try_from(vector).ok());
                    let names = || NAMES.map(|(_, name)| name).join(", ");
                    vector.ok_or_else(|| MonitorError::NoException((*word).into(), names()))?
                }
            };
            let new = if debugger.catch(vector, true) { "" } else { " already" };
            Ok(format!("{} is caught{new}\n", name(vector)))
        }
        [_, second, ..] => Err(MonitorError::TooMany((*second).into())),
    }
}
