//! States of the machine that are kept under a name.

use std::fmt::Write;

use super::{arguments::Answer, error::MonitorError, scene::Scene};

/// The longest name in bytes.
const LONGEST: usize = 64;

/// `snapshot`.
pub fn snapshot(scene: &mut Scene<'_, '_>, arguments: &[&str]) -> Answer {
    let steps = scene.controls.run.steps();
    match arguments {
        ["save", name] if name.len() > LONGEST => Err(MonitorError::LongName(LONGEST)),
        ["save", name] => {
            scene.controls.run.keep_state(name)?;
            Ok(format!("{name}: step {steps}, in memory until minivmm ends\n"))
        }
        ["load", name] => {
            scene.controls.run.take_state(name)?;
            let now = scene.controls.run.steps();
            Ok(format!(
                "{name}: from step {steps} to step {now}; in gdb now `maintenance flush register-cache`\n"
            ))
        }
        ["drop", name] if scene.controls.run.drop_state(name) => Ok(format!("{name}: dropped\n")),
        ["drop", name] => Err(MonitorError::NoSnapshot((*name).into())),
        [] | ["list"] => {
            let mut text = String::new();
            for (name, step) in scene.controls.run.kept_states() {
                let _ = writeln!(text, "{name}: step {step}");
            }
            if text.is_empty() {
                text.push_str("there are none\n");
            }
            Ok(text)
        }
        _ => Err(MonitorError::Usage("snapshot save NAME, load NAME, drop NAME or list")),
    }
}
