//! `minivmm trace export`.

use std::path::Path;

use trace::{
    export::{
        self, Callgrind, Export, ExportError, FlameGraph, Folded, Html, Job, OutFile, Perfetto, TraceEvents, perf,
    },
    raw,
};

use super::{
    arguments, bound, names,
    output::{Bar, conclude, count, must_begin, say},
};
use crate::error::Error;

pub fn run(options: &arguments::Export) -> Result<(), Error> {
    let (trace, names) = names::open_with_programs(&options.trace, &options.part)?;
    let (window, cpus) = bound::resolve(&options.part, &trace, &names)?;
    let bar = Bar::new(true);
    let job = Job {
        trace: &trace,
        names: &names,
        window,
        cpus: &cpus,
    };
    let title = format!("minivmm: {}", trace.header().kernel);
    let mut totals = None;

    // What cannot be written is to be known before the work.
    let create = |option, path: &Path| OutFile::create(path, options.force).map_err(of(option));
    let (mut named, mut forms) = (Vec::new(), Vec::<Box<dyn Export>>::new());
    let mut add = |option, form| {
        named.push(option);
        forms.push(form);
    };
    if let Some(path) = &options.folded {
        let file = create("--folded", path)?;
        add("--folded", Box::new(Folded::new(file)));
    }
    if let Some(path) = &options.flamegraph {
        let file = create("--flamegraph", path)?;
        add("--flamegraph", Box::new(FlameGraph::new(file, &title)));
    }
    if let Some(path) = &options.html {
        let file = create("--html", path)?;
        let header = trace.header();
        let facts = format!("{}, {}", header.model, count(header.cpus as u64, "vCPU"));
        add("--html", Box::new(Html::new(file, &title, &facts, header)));
    }
    if let Some(path) = &options.callgrind {
        let file = create("--callgrind", path)?;
        let command = &trace.header().kernel;
        add("--callgrind", Box::new(Callgrind::new(file, command)));
    }
    if let Some(path) = &options.perfetto {
        let file = create("--perfetto", path)?;
        let form = Perfetto::new(file, &title, options.least).map_err(of("--perfetto"))?;
        add("--perfetto", Box::new(form));
    }
    if let Some(path) = &options.trace_events {
        let file = create("--trace-events", path)?;
        let form = TraceEvents::new(file, &title, options.least, options.trace_events_limit);
        add("--trace-events", Box::new(form.map_err(of("--trace-events"))?));
    }
    if !forms.is_empty() {
        bar.say("calls".into());
        let decoded = export::calls(&job, &mut forms, &mut |done, total| bar.at(done, total));
        totals = Some(decoded.map_err(Error::Trace)?);
    }
    for (option, form) in named.into_iter().zip(forms) {
        if let Some(said) = form.finish(&names).map_err(of(option))? {
            say(&said);
        }
    }
    if let Some(path) = &options.perf {
        let perf = perf::Job {
            trace: &trace,
            names: &names,
            window,
            cpus: &cpus,
            path,
            force: options.force,
            totals: totals.as_ref(),
        };
        let written = perf::export(&perf, &mut |what, done, total| {
            bar.say(what.into());
            bar.at(done, total);
        });
        totals = Some(written.map_err(of("--perf"))?);
    }
    if let Some(path) = &options.raw {
        bar.say("packets and pages".into());
        let summary = raw::export(&trace, path, &mut |done, total| bar.at(done, total)).map_err(Error::Trace)?;
        for damage in &summary.damage {
            say(damage);
        }
        say(&format!(
            "{}: {} bytes of packets, {}, {}{}",
            path.display(),
            summary.packets,
            count(summary.pages, "page"),
            count(summary.spans, "span"),
            if summary.lost > 0 {
                format!(", {} bytes lost", summary.lost)
            } else {
                String::new()
            },
        ));
    }
    drop(bar);
    if let Some(totals) = &totals {
        must_begin(totals, options.part.from.as_deref())?;
        conclude(totals);
    }
    Ok(())
}

/// What an option's export failed of; a trace that cannot be read is nobody's.
fn of(option: &'static str) -> impl Fn(ExportError) -> Error {
    move |source| match source {
        ExportError::Trace(error) => Error::Trace(error),
        source => Error::Export { option, source },
    }
}
