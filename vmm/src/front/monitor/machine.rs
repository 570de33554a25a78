//! The machine as a whole, and the system in it.

use std::fmt::Write;

use engine::Activity;
use trace::linux::{Kernel, NotFound};

use super::{
    arguments::{Answer, none},
    scene::Scene,
};
use crate::recording::GuestMemory;

/// `info`.
pub fn info(scene: &mut Scene<'_, '_>, arguments: &[&str]) -> Answer {
    none(arguments)?;
    let status = scene.controls.status();
    let model = scene.model();
    let memory = scene.controls.run.machine().memory().size() >> 20;
    let mut text = format!(
        "{}: {} steps, {} instructions, {} ns\nmodel {}, {memory} MiB\n",
        status.state, status.steps, status.instructions, status.virtual_ns, model.name
    );
    if let Some(how) = scene.controls.run.how_points_are_served() {
        let _ = writeln!(text, "{how}");
    }
    let current = scene.controls.run.current_cpu();
    for cpu in 0..scene.controls.run.cpu_count() {
        let Some(state) = scene.controls.run.cpu_state(cpu) else {
            continue;
        };
        let place = scene.describe_place(&state);
        let activity = match state.activity {
            Activity::Running => "",
            Activity::Halted => ", halted",
            Activity::Waiting => ", waits (MWAIT)",
            Activity::WaitForSipi => ", waits for its start-up IPI",
            Activity::Shutdown => ", shut down",
        };
        let mark = if cpu == current { '*' } else { ' ' };
        let _ = write!(text, "{mark} CPU {cpu} at {place}, CPL {}{activity}", state.cpl);
        if let Some(task) = scene.task(cpu) {
            let _ = write!(text, ", {} {}", task.comm, task.pid);
        }
        text.push('\n');
    }
    Ok(text)
}

/// `hash`: the number that `--stats` prints at the end.
pub fn hash(scene: &mut Scene<'_, '_>, arguments: &[&str]) -> Answer {
    none(arguments)?;
    let steps = scene.controls.run.steps();
    Ok(format!("{:016x} at step {steps}\n", scene.controls.run.digest()))
}

/// `kaslr`.
pub fn kaslr(scene: &mut Scene<'_, '_>, arguments: &[&str]) -> Answer {
    none(arguments)?;
    if scene.names().linux().is_none() {
        let memory = &mut GuestMemory::new(scene.controls.run.machine().memory());
        return match Kernel::look_for(memory) {
            Err(why) => Err(why.into()),
            Ok(_) => Err(NotFound::Nothing.into()),
        };
    }
    let Some(kernel) = scene.names().linux() else {
        return Err(NotFound::Nothing.into());
    };
    let mut text = format!("{}\n", kernel.banner());
    if let Some(id) = kernel.build_id() {
        let _ = writeln!(text, "build ID {id}");
    }
    let slide = kernel.slide();
    let _ = write!(
        text,
        "slide {slide:#x}, loaded at physical {:#x}\nwith a vmlinux as it was linked:\n    add-symbol-file vmlinux -o {slide:#x}\n",
        kernel.physical_base()
    );
    text += "with a file of `minivmm trace symbols --elf` from a run with the same slide:\n    symbol-file FILE\n";
    Ok(text)
}
