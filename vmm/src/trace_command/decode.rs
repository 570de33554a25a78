//! `minivmm trace decode`.

use pt_flow::{Block, Event};
use serde_json::Value;

use trace::{
    Trace,
    view::{Calls, Here, Names, ProcessCache, Totals, Viewer, Window, view},
};

use super::{
    arguments::Decode,
    bound,
    calls::Tree,
    disasm, json,
    lines::{code_json, columns, disasm_text, show_event, whose},
    names,
    output::{Bar, Output, conclude, must_begin, summary_json},
};
use crate::error::Error;

pub fn run(options: &Decode) -> Result<(), Error> {
    let (trace, names) = names::open_with_programs(&options.trace, &options.part)?;
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
    Ok(view(trace, &[cpu], window, &mut lines, &mut |done, total| {
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
    let totals = view(trace, &[cpu], window, &mut calls, &mut |done, total| {
        bar.at(done, total)
    })?;
    calls.sink.end(names);
    Ok(totals)
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
        let names = self.names.of(here);
        let process = match here.state.non_root {
            true => names.process(here.state.cr3),
            false => self.cache.get(names, here.state.cr3),
        };
        if self.json {
            let mut line = json::line("block", here);
            json::place(&mut line, names, here, process, block.ip);
            line.insert("len".into(), block.len.into());
            line.insert("instructions".into(), block.count.into());
            line.insert("end".into(), json::end(block.end).into());
            line.insert("bits".into(), block.mode.bits().into());
            line.insert("cr3".into(), here.state.cr3.map_or(Value::Null, json::hex));
            json::process(&mut line, names, here, process);
            json::vmm(&mut line, self.names, here);
            if CODE {
                line.insert("code".into(), code_json(names, here, process, block, code));
            }
            return self.out.line(&Value::Object(line).to_string());
        }
        let place = names.place(block.ip, process, here.step).map(|place| place.to_string());
        self.out.line(
            format!(
                "{} {} {:016x} {:>4} {:<13} {}",
                columns(here),
                whose(self.names, here, process),
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
