//! What stops the guest for whoever debugs it.

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

/// `catch`.
pub fn catch(scene: &mut Scene<'_, '_>, arguments: &[&str]) -> Answer {
    if !scene.controls.run.is_debugged() {
        return Err(MonitorError::Impossible(
            "nobody could look at what is caught: `--gdb` at the start makes it possible",
        ));
    }
    let debugger = scene.controls.run.debugger();
    match arguments {
        [] => {
            let caught: Vec<String> = debugger.catches().into_iter().map(name).collect();
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
