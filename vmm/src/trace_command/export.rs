//! `minivmm trace export`.

use std::{io::Write, path::Path};

use trace::{
    Trace,
    export::{ExportError, OutFile, callgrind::Profile, folded::Stacks, perf, perfetto::Events},
    raw,
    view::{Calls, Names, Sink, Totals, Window, view},
};

use super::{
    arguments::Export,
    bound, names,
    output::{Bar, conclude, count, must_begin, say},
};
use crate::error::Error;

pub fn run(options: &Export) -> Result<(), Error> {
    let (trace, names) = names::open(&options.trace, options.part.symbols.as_deref(), &options.part.programs)?;
    let (window, cpus) = bound::resolve(&options.part, &trace, &names)?;
    let bar = Bar::new(true);
    let job = Job {
        trace: &trace,
        names: &names,
        window,
        cpus,
        bar: &bar,
    };
    let title = format!("minivmm: {}", trace.header().kernel);
    let mut totals = None;

    if options.folded.is_some() || options.flamegraph.is_some() {
        // What cannot be written is to be known before the work.
        let create = |option, path: &Option<_>| {
            path.as_deref()
                .map(|path| OutFile::create(path, options.force))
                .transpose()
                .map_err(of(option))
        };
        let folded = create("--folded", &options.folded)?;
        let flamegraph = create("--flamegraph", &options.flamegraph)?;
        let mut stacks = Stacks::default();
        totals = Some(job.calls("stacks", &mut stacks, |_, _| {})?);
        if let Some(mut file) = folded {
            stacks
                .write_folded(&names, &mut file)
                .map_err(|source| of("--folded")(file.error(source)))?;
            file.finish().map_err(of("--folded"))?;
        }
        if let Some(mut file) = flamegraph {
            stacks
                .write_flamegraph(&names, &title, &mut file)
                .map_err(|source| of("--flamegraph")(file.error(source)))?;
            file.finish().map_err(of("--flamegraph"))?;
        }
    }
    if let Some(path) = &options.callgrind {
        let mut file = OutFile::create(path, options.force).map_err(of("--callgrind"))?;
        let mut profile = Profile::default();
        totals = Some(job.calls("calls", &mut profile, |_, _| {})?);
        profile
            .write(&names, &trace.header().kernel, &mut file)
            .map_err(|source| of("--callgrind")(file.error(source)))?;
        file.finish().map_err(of("--callgrind"))?;
    }
    if let Some(path) = &options.perfetto {
        let mut file = OutFile::create(path, options.force).map_err(of("--perfetto"))?;
        let mut events = Events::new(&mut file, options.least);
        totals = Some(job.calls("events", &mut events, |events, cpu| match cpu {
            Some(cpu) => events.cpu(cpu),
            None => events.cpu_over(),
        })?);
        let (calls, left_out) = events
            .finish(&title)
            .map_err(|source| of("--perfetto")(file.error(source)))?;
        file.flush().map_err(|source| of("--perfetto")(file.error(source)))?;
        file.finish().map_err(of("--perfetto"))?;
        if left_out > 0 {
            say(&format!(
                "{}: {}, {left_out} shorter ones left out",
                path.display(),
                count(calls, "call")
            ));
        }
    }
    if let Some(path) = &options.perf {
        let written = perf::export(&job.perf(path, options.force), &mut |what, done, total| {
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

struct Job<'a> {
    trace: &'a Trace,
    names: &'a Names,
    window: Window,
    cpus: Vec<usize>,
    bar: &'a Bar,
}

impl Job<'_> {
    fn perf<'a>(&'a self, path: &'a Path, force: bool) -> perf::Job<'a> {
        perf::Job {
            trace: self.trace,
            names: self.names,
            window: self.window,
            cpus: &self.cpus,
            path,
            force,
        }
    }

    /// Shows the calls of all vCPUs, one after the other, to a sink, and tells it of each vCPU's beginning and end.
    fn calls<T>(&self, what: &str, state: &mut T, mut turn: impl FnMut(&mut T, Option<usize>)) -> Result<Totals, Error>
    where
        for<'t> &'t mut T: Sink,
    {
        let mut totals = Totals::default();
        for &cpu in &self.cpus {
            self.bar.say(format!("{what}, vCPU {cpu}"));
            turn(state, Some(cpu));
            let mut calls = Calls::new(self.names, &mut *state);
            let mut progress = |done, total| self.bar.at(done, total);
            totals.add(&view(self.trace, cpu, &self.window, &mut calls, &mut progress)?);
            turn(state, None);
        }
        Ok(totals)
    }
}
