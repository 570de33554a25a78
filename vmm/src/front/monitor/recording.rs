//! Recordings: that of `--trace`, and those that are begun as the machine runs.

use super::{arguments::Answer, error::MonitorError, scene::Scene};
use crate::trace_options;

/// `trace`.
pub fn trace(scene: &mut Scene<'_, '_>, arguments: &[&str]) -> Answer {
    let steps = scene.controls.run.steps();
    if let ["start", folder, options @ ..] = arguments {
        if !scene.files {
            return Err(MonitorError::Files("trace start DIR"));
        }
        let options = trace_options::of_words(folder, options)?;
        scene.controls.run.begin_trace(&options)?;
        return Ok(format!("{folder}: recording from step {steps}\n"));
    }
    let late = scene.controls.run.recorder_is_late();
    let Some(recorder) = scene.controls.run.recorder() else {
        return match arguments {
            [] => Ok("nothing is recorded\n".into()),
            ["start" | "stop"] => Err(MonitorError::Impossible(
                "nothing is recorded: `trace start DIR` begins",
            )),
            _ => Err(MonitorError::Usage(USAGE)),
        };
    };
    let folder = recorder.folder().display().to_string();
    let on = |on: bool| if on { "on" } else { "off" };
    let wanted = match arguments {
        [] => return Ok(format!("{folder}: recording is {}\n", on(recorder.is_on()))),
        ["stop"] if late => {
            let ended = scene.controls.run.end_trace("the monitor stopped it");
            ended.map_err(MonitorError::Incomplete)?;
            return Ok(format!("{folder}: recorded up to step {steps}\n"));
        }
        ["start"] => true,
        ["stop"] => false,
        _ => return Err(MonitorError::Usage(USAGE)),
    };
    if !recorder.switch(wanted) {
        return Err(MonitorError::Already(on(wanted)));
    }
    Ok(format!("{folder}: recording is {} from step {steps}\n", on(wanted)))
}

const USAGE: &str = "trace, trace start DIR [OPTION...], trace start or trace stop";
