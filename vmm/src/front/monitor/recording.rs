//! Recordings: that of `--trace`, and those that are begun as the machine runs.

use super::{arguments::Answer, scene::Scene};
use crate::trace_options;

/// `trace`.
pub fn trace(scene: &mut Scene<'_, '_>, arguments: &[&str]) -> Answer {
    let steps = scene.controls.run.steps();
    if let ["start", folder, options @ ..] = arguments {
        let options = trace_options::of_words(folder, options)?;
        scene
            .controls
            .run
            .begin_trace(&options)
            .map_err(|error| error.to_string())?;
        return Ok(format!("{folder}: recording from step {steps}\n"));
    }
    let late = scene.controls.run.recorder_is_late();
    let Some(recorder) = scene.controls.run.recorder() else {
        return match arguments {
            [] => Ok("nothing is recorded\n".into()),
            ["start" | "stop"] => Err("nothing is recorded: `trace start DIR` begins".into()),
            _ => Err(USAGE.into()),
        };
    };
    let folder = recorder.folder().display().to_string();
    let on = |on: bool| if on { "on" } else { "off" };
    let wanted = match arguments {
        [] => return Ok(format!("{folder}: recording is {}\n", on(recorder.is_on()))),
        ["stop"] if late => {
            let ended = scene.controls.run.end_trace("the monitor stopped it");
            ended.map_err(|error| format!("{error}; the trace is not complete"))?;
            return Ok(format!("{folder}: recorded up to step {steps}\n"));
        }
        ["start"] => true,
        ["stop"] => false,
        _ => return Err(USAGE.into()),
    };
    if !recorder.switch(wanted) {
        return Err(format!("recording is {} already", on(wanted)));
    }
    Ok(format!("{folder}: recording is {} from step {steps}\n", on(wanted)))
}

const USAGE: &str = "trace, trace start DIR [OPTION...], trace start or trace stop";
