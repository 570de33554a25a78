//! Where the run goes.

use super::{
    arguments::{Answer, number},
    error::MonitorError,
    scene::Scene,
};

/// `run-to`.
pub fn run_to(scene: &mut Scene<'_, '_>, arguments: &[&str]) -> Answer {
    let now = scene.controls.run.steps();
    match (arguments, scene.controls.run.extent()) {
        ([], None) => Ok(format!("step {now}; it cannot go back without `--reverse`\n")),
        ([], Some(extent)) => Ok(format!(
            "step {now} of {} to {}; {} snapshots, {} MiB\n",
            extent.first,
            extent.head,
            extent.points,
            extent.bytes >> 20
        )),
        ([word], extent) => {
            let step = number(word)?;
            if step < now {
                let first = extent.ok_or(MonitorError::Behind { step, now })?.first;
                if step < first {
                    return Err(MonitorError::Forgotten { step, first });
                }
            }
            if !scene.go_to(step) {
                return Err(MonitorError::Impossible(
                    "KVM counts no instructions: `--engine soft` does",
                ));
            }
            Ok(format!("from step {now} to step {step}, and there it stands\n"))
        }
        _ => Err(MonitorError::Usage("run-to takes one step")),
    }
}
