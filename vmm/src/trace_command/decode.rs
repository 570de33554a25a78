//! `minivmm trace decode`.

use pt_flow::{Block, Event, EventKind};
use serde_json::Value;

use trace::{
    Trace,
    view::{Calls, Here, Names, Process, ProcessCache, Totals, Viewer, Window, view},
};

use super::{
    Decode, bound,
    calls::Tree,
    disasm, json, names,
    output::{Bar, Output, conclude, must_begin, seconds, summary_json},
};
use crate::error::Error;

pub fn run(options: &Decode) -> Result<(), Error> {
    let (trace, names) = names::open(&options.trace, options.part.symbols.as_deref(), &options.part.programs)?;
    let (window, cpus) = bound::resolve(&options.part, &trace, &names)?;
    let mut out = Output::new();
    let bar = Bar::beside_output();
    let mut totals = Totals::default();
    for &cpu in &cpus {
        bar.say(format!("vCPU {cpu}"));
        if cpus.len() > 1 && !options.json {
            out.line(&format!("vCPU {cpu}"));
        }
        let found = match (options.calls, options.disasm) {
            (true, false) => calls::<false>(&trace, cpu, &window, &names, &mut out, options.json, &bar),
            (true, true) => calls::<true>(&trace, cpu, &window, &names, &mut out, options.json, &bar),
            (false, false) => blocks::<false>(&trace, cpu, &window, &names, &mut out, options.json, &bar),
            (false, true) => blocks::<true>(&trace, cpu, &window, &names, &mut out, options.json, &bar),
        };
        totals.add(&found?);
    }
    if options.json {
        out.line(&summary_json(&totals).to_string());
    }
    out.flush();
    drop(bar);
    must_begin(&totals, options.part.from.as_deref())?;
    conclude(&totals);
    Ok(())
}

fn blocks<const CODE: bool>(
    trace: &Trace,
    cpu: usize,
    window: &Window,
    names: &Names,
    out: &mut Output,
    json: bool,
    bar: &Bar,
) -> Result<Totals, Error> {
    let mut lines = Lines::<CODE> {
        names,
        out,
        json,
        cache: ProcessCache::default(),
    };
    Ok(view(trace, cpu, window, &mut lines, &mut |done, total| {
        bar.at(done, total)
    })?)
}

fn calls<const CODE: bool>(
    trace: &Trace,
    cpu: usize,
    window: &Window,
    names: &Names,
    out: &mut Output,
    json: bool,
    bar: &Bar,
) -> Result<Totals, Error> {
    let mut calls = Calls::new(names, Tree::<CODE>::new(out, json));
    let totals = view(trace, cpu, window, &mut calls, &mut |done, total| bar.at(done, total))?;
    calls.sink.end(names);
    Ok(totals)
}

/// The columns that every line begins with.
pub fn columns(here: &Here) -> String {
    let step = here.step.map_or("-".into(), |step| step.to_string());
    let time = here.ns().map_or("-".into(), seconds);
    format!("{step:>12} {time:>14}")
}

/// A line for each block and each event.
struct Lines<'a, const CODE: bool> {
    names: &'a Names,
    out: &'a mut Output,
    json: bool,
    cache: ProcessCache,
}

impl<const CODE: bool> Viewer for Lines<'_, CODE> {
    const CODE: bool = CODE;

    fn block(&mut self, here: &Here, block: &Block, code: &[u8]) {
        let names = self.names;
        let process = self.cache.get(names, here.state.cr3);
        if self.json {
            let mut line = json::line("block", here);
            json::place(&mut line, names, here, process, block.ip);
            line.insert("len".into(), block.len.into());
            line.insert("instructions".into(), block.count.into());
            line.insert("end".into(), json::end(block.end).into());
            line.insert("bits".into(), block.mode.bits().into());
            line.insert("cr3".into(), here.state.cr3.map_or(Value::Null, json::hex));
            json::process(&mut line, names, here, process);
            if CODE {
                line.insert("code".into(), code_json(names, here, process, block, code));
            }
            return self.out.line(&Value::Object(line).to_string());
        }
        let task = process.and_then(|process| names.task(process, here.step));
        let place = names.place(block.ip, process, here.step).map(|place| place.to_string());
        self.out.line(
            format!(
                "{} {:<15} {:016x} {:>4} {:<13} {}",
                columns(here),
                task.map_or("-", |task| &task.comm),
                block.ip,
                block.count,
                json::end(block.end),
                place.as_deref().unwrap_or("")
            )
            .trim_end(),
        );
        if CODE {
            for line in disasm::lines(names, here, process, block, code) {
                self.out.line(&disasm_text(&line));
            }
        }
    }

    fn event(&mut self, here: &Here, event: &Event) {
        show_event(self.out, self.json, self.names, here, event);
    }
}

/// An instruction, indented below its block.
pub fn disasm_text(line: &disasm::Line) -> String {
    format!("{:27} {:016x}  {:<32} {}", "", line.ip, line.hex(), line.text)
}

/// Instructions as an array.
pub fn code_json(names: &Names, here: &Here, process: Option<Process>, block: &Block, code: &[u8]) -> Value {
    disasm::lines(names, here, process, block, code)
        .iter()
        .map(|line| {
            let bytes: String = line.bytes.iter().map(|byte| format!("{byte:02x}")).collect();
            serde_json::json!({"ip": json::hex(line.ip), "bytes": bytes, "text": line.text})
        })
        .collect()
}

/// A line for an event.
pub fn show_event(out: &mut Output, as_json: bool, names: &Names, here: &Here, event: &Event) {
    if as_json {
        if let Some(line) = json::event(names, here, event) {
            out.line(&Value::Object(line).to_string());
        }
        return;
    }
    let describe = |ip: u64| {
        let process = names.process(here.state.cr3);
        match names.place(ip, process, here.step) {
            Some(place) => format!("{ip:#x} {place}"),
            None => format!("{ip:#x}"),
        }
    };
    let or = |ip: Option<u64>| ip.map_or("?".into(), describe);
    let text = match event.kind {
        EventKind::Time(_) | EventKind::Sync { .. } => return,
        EventKind::Gap(gap) => format!("GAP: {gap}"),
        EventKind::Overflow => "OVERFLOW: the processor lost packets".into(),
        EventKind::Enabled { ip } => format!("tracing on at {}", or(ip)),
        EventKind::Disabled { at: Some(at), to } => format!("tracing off at {}, to {}", describe(at), or(to)),
        EventKind::Disabled { at: None, to } => format!("tracing off, to {}", or(to)),
        EventKind::Async { from, to } => format!("interrupt at {}, to {}", describe(from), or(to)),
        EventKind::Mode { mode, .. } => format!("{}-bit code", mode.bits()),
        EventKind::Paging { cr3, .. } => {
            let task = names
                .process(Some(cr3))
                .and_then(|process| names.task(process, here.step));
            match task {
                Some(task) => format!("CR3 {cr3:#x}: {} ({})", task.comm, task.tgid),
                None => format!("CR3 {cr3:#x}"),
            }
        }
        EventKind::Resumed { ip } => format!("goes on at {}", describe(ip)),
        EventKind::PtWrite { ip, value, .. } => format!("PTWRITE {value:#x} at {}", or(ip)),
        EventKind::Stopped { ip } => format!("execution stops at {}", or(ip)),
        EventKind::TraceStop => "trace stop".into(),
        other => format!("{other:?}"),
    };
    out.line(&format!("{} -- {text}", columns(here)));
}
