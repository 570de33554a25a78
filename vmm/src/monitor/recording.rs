//! The recording of `--trace`.

use super::{Answer, scene::Scene};

/// `trace`.
pub fn trace(scene: &mut Scene<'_>, arguments: &[&str]) -> Answer {
    let steps = scene.vm.steps();
    let Some(recorder) = scene.vm.recorder() else {
        return Err("nothing can be recorded: `--trace DIR` at the start makes it possible".into());
    };
    let folder = recorder.folder().display();
    let on = |on: bool| if on { "on" } else { "off" };
    let wanted = match arguments {
        [] => return Ok(format!("{folder}: recording is {}\n", on(recorder.is_on()))),
        ["start"] => true,
        ["stop"] => false,
        _ => return Err("trace, trace start or trace stop".into()),
    };
    if !recorder.switch(wanted) {
        return Err(format!("recording is {} already", on(wanted)));
    }
    Ok(format!("{folder}: recording is {} from step {steps}\n", on(wanted)))
}
