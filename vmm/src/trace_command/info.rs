//! `minivmm trace info`.

use pt_flow::{Block, End, Event, EventKind};

use trace::view::{Here, Totals, Viewer, Window, view};

use super::{
    arguments::Info,
    names,
    output::{Bar, Output, conclude, count, seconds},
};
use crate::error::{Error, Status};

/// What is counted.
#[derive(Default)]
struct Counts {
    conditional: u64,
    direct: u64,
    indirect: u64,
    returns: u64,
    far: u64,
    interrupts: u64,
    pagings: u64,
}

impl Viewer for Counts {
    fn block(&mut self, _: &Here, block: &Block, _: &[u8]) {
        match block.end {
            End::Conditional => self.conditional += 1,
            End::Jump | End::Call => self.direct += 1,
            End::IndirectJump | End::IndirectCall => self.indirect += 1,
            End::Return => self.returns += 1,
            End::Far => self.far += 1,
            _ => {}
        }
    }

    fn event(&mut self, _: &Here, event: &Event) {
        match event.kind {
            EventKind::Async { .. } => self.interrupts += 1,
            EventKind::Paging { .. } => self.pagings += 1,
            _ => {}
        }
    }
}

/// Says it, and with the status whether the trace is as it was written.
pub fn run(options: &Info) -> Result<Status, Error> {
    let (trace, names) = names::open(&options.trace, options.symbols.as_deref(), &[])?;
    let mut counts = Counts::default();
    let bar = Bar::new(true);
    let mut bytes = 0;
    for cpu in 0..trace.cpus() {
        let extent = trace.extent(cpu);
        bytes += extent.end - extent.start;
    }
    let cpus: Vec<usize> = (0..trace.cpus()).collect();
    bar.say("instructions".into());
    let mut totals = view(&trace, &cpus, &Window::default(), &mut counts, &mut |done, total| {
        bar.at(done, total);
    })?;
    drop(bar);
    let header = trace.header();
    // A recording that was ended goes up to its end.
    let complete = header.end.as_ref().is_some_and(|end| end.complete);
    for cpu in (0..trace.cpus()).filter(|_| complete) {
        let there = trace.extent(cpu).end;
        let damage = match trace.info(cpu).ended {
            None => format!("cpu{cpu}-*.side: the end is missing"),
            Some(end) if there < end => format!("cpu{cpu}-*.pt: the last {} bytes of packets are missing", end - there),
            Some(_) => continue,
        };
        totals.damage.push(damage);
    }
    let branches = counts.conditional + counts.direct + counts.indirect + counts.returns + counts.far;
    let mut out = Output::new();
    if options.json {
        let linux = names.linux();
        out.line(
            &serde_json::json!({
                "type": "info",
                "model": header.model,
                "vcpus": header.cpus,
                "kernel": header.kernel,
                "banner": linux.unknown.as_ref().unwrap_or(&linux.banner),
                "build_id": linux.build_id,
                "slide": format!("{:#x}", linux.slide),
                "filters": header.filters,
                "ended": header.end.as_ref().map(|end| &end.reason),
                "bytes": bytes,
                "branches": branches,
                "conditional": counts.conditional,
                "direct": counts.direct,
                "indirect": counts.indirect,
                "returns": counts.returns,
                "far": counts.far,
                "interrupts": counts.interrupts,
                "cr3_changes": counts.pagings,
                "symbols": names.symbols().len(),
                "vmcs": names.vmcs_count(),
                "guests": names.guests().map(|guest| &guest.linux().banner).collect::<Vec<_>>(),
                "summary": super::output::summary_json(&totals),
            })
            .to_string(),
        );
        out.flush();
        return Ok(status(&totals));
    }
    let mut line = |what: &str, text: String| out.line(&format!("{what:<13} {text}"));
    line(
        "machine",
        format!(
            "{}, {}, TSC {} kHz",
            header.model,
            count(header.cpus as u64, "vCPU"),
            header.tsc_khz
        ),
    );
    line("kernel", header.kernel.clone());
    let linux = names.linux();
    if let Some(banner) = &linux.unknown {
        line("Linux", banner.clone());
        let symbols = match names.symbols().len() {
            0 => {
                "none: its symbol table is of a newer kind than is known here, or left out; --symbols gives some".into()
            }
            given => format!("{given}, of --symbols"),
        };
        line("symbols", symbols);
    } else if !linux.banner.is_empty() {
        line("Linux", linux.banner.clone());
        line(
            "",
            format!("moved by {:#x}, physically at {:#x}", linux.slide, linux.physical_base),
        );
        let processes: std::collections::BTreeSet<&str> =
            linux.tasks.iter().map(|seen| seen.task.comm.as_str()).collect();
        line(
            "symbols",
            format!(
                "{}, {}, processes of {}",
                names.symbols().len(),
                count(linux.modules.len() as u64, "module"),
                count(processes.len() as u64, "name")
            ),
        );
    } else if !names.symbols().is_empty() {
        line("symbols", format!("{}, of --symbols", names.symbols().len()));
    }
    if names.vmcs_count() > 0 {
        line(
            "guests",
            format!("of a hypervisor, by {}", count(names.vmcs_count() as u64, "VMCS")),
        );
    }
    for guest in names.guests() {
        let linux = guest.linux();
        line("", linux.banner.clone());
        let processes: std::collections::BTreeSet<&str> =
            linux.tasks.iter().map(|seen| seen.task.comm.as_str()).collect();
        line(
            "",
            format!(
                "moved by {:#x}; symbols {}, {}, processes of {}",
                linux.slide,
                guest.symbols().len(),
                count(linux.modules.len() as u64, "module"),
                count(processes.len() as u64, "name")
            ),
        );
    }
    if !header.filters.is_empty() {
        line("filter", header.filters.join(" "));
    }
    line(
        "recording",
        match &header.end {
            Some(end) if end.complete => format!("ended: {}", end.reason),
            Some(end) => format!("ended: {}; not all could be written", end.reason),
            None => "was cut off: decoded as far as it goes".into(),
        },
    );
    if let (Some((from, to)), Some((begin, end))) = (totals.steps, totals.time) {
        line(
            "length",
            format!(
                "{} s ({} s to {} s), steps {from} to {to}",
                seconds(end - begin),
                seconds(begin),
                seconds(end)
            ),
        );
    }
    let per = if totals.instructions == 0 {
        0.0
    } else {
        bytes as f64 * 8.0 / totals.instructions as f64
    };
    line("packets", format!("{bytes} bytes, {per:.3} bits an instruction"));
    line("instructions", totals.instructions.to_string());
    line(
        "branches",
        format!(
            "{branches}: {} conditional, {} direct, {} indirect, {} returns, {} far",
            counts.conditional, counts.direct, counts.indirect, counts.returns, counts.far
        ),
    );
    line("interrupts", format!("{} and exceptions", counts.interrupts));
    line("CR3", count(counts.pagings, "change"));
    line(
        "missing",
        format!("{}, {}", count(totals.gaps, "gap"), count(totals.overflows, "overflow")),
    );
    out.flush();
    conclude(&totals);
    Ok(status(&totals))
}

fn status(totals: &Totals) -> Status {
    if totals.damage.is_empty() {
        Status::Done
    } else {
        Status::Differs
    }
}
