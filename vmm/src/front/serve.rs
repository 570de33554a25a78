//! Has a machine run to its end for whoever is there: the console's user, clients of the control socket, gdb.
//!
//! The machine runs until it has a reason to come back. What is done then is decided here: a request is answered, a stop is reported
//! to the debugger's client, a guest that is held stopped waits for the outside.

use std::{
    io::{self, Write},
    time::Instant,
};

use log::{debug, info};

use super::{
    clients::{Listener, Protocol},
    console::Console,
    control,
    controls::Controls,
    gdb::{self, GdbListener},
    guest_panic::{self, PanicWatch, Panicked},
    human_monitor, location, monitor, qmp,
    requests::{Command, Reply, Request},
};
use machine::share::ShareMode;

use crate::{
    address::DebugAddress,
    config::{MachineConfig, OnPanic},
    debug::{DebugStop, StopCause},
    dump,
    error::Error,
    jail,
    recording::OnError,
    timeline::run::Run,
    vm::{End, Ended, StopReason},
};
use trace::symbols::SymbolFile;

/// Requests that are answered before the guest goes on.
const REQUESTS: usize = 16;

/// Builds a machine and runs it to its end. Prints what `--stats` asks for on stderr once the terminal is as it was.
///
/// # Errors
/// The machine cannot be built, or what it is connected to fails.
pub fn run(config: &MachineConfig) -> Result<Ended, Error> {
    if let Some(path) = &config.symbols {
        SymbolFile::read(path).map_err(|source| Error::Symbols {
            path: path.clone(),
            source,
        })?;
    }
    if config.sandbox {
        jail::want();
    }
    let mut panics = config.on_panic.clone().map(PanicWatch::new).transpose()?;
    let mut run = Run::new(config)?;
    let mut keep = vec![config.kernel.as_path()];
    keep.extend(config.initrd.iter().map(|part| part.path.as_path()));
    keep.extend(config.disks.iter().map(|disk| disk.path.as_path()));
    let mut console = Console::open(&config.serial, &keep, run.line())?;
    let listening = |what| move |source| Error::System { what, source };
    if let Some(wake) = run.links_wake().map_err(listening("waiting for the network"))? {
        console.listen(wake)?;
    }
    let sockets: [(&'static Protocol, _); 2] = [(&control::PROTOCOL, &config.control), (&qmp::PROTOCOL, &config.qmp)];
    let mut clients = Vec::new();
    for (protocol, path) in sockets {
        let Some(path) = path else { continue };
        let listener = Listener::open(protocol, path, run.interrupt().clone())?;
        console.listen(listener.wake().map_err(listening("listening for commands"))?)?;
        clients.push(listener);
    }
    let listener = match &config.gdb {
        Some(address) => {
            let listener = GdbListener::open(address, run.interrupt().clone())?;
            console.listen(listener.wake().map_err(listening("listening for a debugger"))?)?;
            if config.paused {
                let _ = writeln!(
                    io::stderr(),
                    "minivmm: paused until gdb connects: target remote {}",
                    listener.address()
                );
            }
            Some(listener)
        }
        None => None,
    };
    if config.sandbox {
        use jail::calls::threads;
        let files = files(config);
        let jailed = run.jail(listener.is_some() || !clients.is_empty(), |traces| {
            let shares = if config.shares.is_empty() && config.command.is_none() {
                0
            } else {
                threads::SHARES
            };
            jail::enter(
                threads::MACHINE | shares | if traces { threads::HOST_PT } else { 0 },
                &files,
            )
        })?;
        info!("--sandbox on: {jailed}");
    }
    let mut end = to_the_end(
        &mut run,
        &mut console,
        &clients,
        listener.as_ref().map(|listener| (listener, config.gdb_allow_files)),
        config.paused,
        panics.as_mut(),
    );
    drop(listener);
    let recorded = run.end_recording(&end);
    if let (Some(options), Some(share)) = (&config.record, run.shares().first()) {
        let size = machine::loader::size_text(share.kept());
        info!(
            "--record {}: {size} of shared directories are kept",
            options.folder.display()
        );
    }
    drop(clients);
    let messages = match config.command {
        Some(_) => console.take_output(),
        None => Vec::new(),
    };
    drop(console);
    let reason = match &end {
        Ok(end) => end.reason(),
        Err(error) => error.to_string(),
    };
    let traced = run.end_trace(&reason);
    let goes_on = config
        .trace
        .as_ref()
        .is_some_and(|trace| trace.on_error == OnError::Continue);
    match (&end, traced) {
        // The guest was to go on, and how it ended is what counts.
        (Ok(_), Err(error)) if goes_on => {
            let _ = writeln!(io::stderr(), "minivmm: {error}; the trace is not complete");
        }
        (Ok(_), Err(error)) => end = Err(error),
        _ => {}
    }
    if let (Ok(_), Err(error)) = (&end, recorded) {
        end = Err(error);
    }
    if config.stats {
        // A closed stderr is no reason to fail.
        let _ = writeln!(io::stderr(), "{}", run.stats());
    }
    let ended = ended(&mut run, config, end?, messages);
    if let Some(panics) = panics {
        panics.end(&mut run, ended.panicked.is_some())?;
    }
    Ok(ended)
}

/// What there is to say of a run that has ended.
pub(crate) fn ended(run: &mut Run, config: &MachineConfig, end: End, messages: Vec<u8>) -> Ended {
    let place = match end {
        End::Instructions(_) | End::Timeout(_) | End::Halted(_) => Some(location::describe(run)),
        _ => None,
    };
    let panicked = guest_panic::at_the_end(run, &config.kernel, &end);
    Ended {
        end,
        place,
        panicked,
        messages,
    }
}

/// What the machine needs of files once it is built.
pub(crate) fn files(config: &MachineConfig) -> jail::Files {
    let folders = [
        config.trace.as_ref().map(|trace| &trace.folder),
        config.record.as_ref().map(|record| &record.folder),
        // A replay unpacks nothing again, and whoever recorded the session may have been a stranger.
        config.collect.as_ref().filter(|_| config.replay.is_none()),
    ];
    let dump = match &config.on_panic {
        Some(OnPanic::Dump(path)) => Some(path),
        _ => None,
    };
    let socket = match &config.gdb {
        Some(DebugAddress::Unix(path)) => Some(path),
        _ => None,
    };
    let sockets = [socket, config.control.as_ref(), config.qmp.as_ref()]
        .into_iter()
        .flatten();
    // Then the host's files stay as they are.
    let keeps = config.record.is_some() || config.reverse.is_some() || config.replay.is_some();
    let shares = |writes| {
        let shares = config.shares.iter();
        shares
            .filter(move |share| {
                (matches!(share.mode, ShareMode::ReadWrite | ShareMode::WriteBack) && !keeps) == writes
            })
            .map(|share| share.path.clone())
    };
    jail::Files {
        // Of the kernel, where the guest was at the end; of /proc, what memory was touched.
        read: [config.kernel.clone(), "/proc/self".into()]
            .into_iter()
            .chain(config.symbols.clone())
            .chain(shares(false))
            .collect(),
        share: shares(true).collect(),
        write: folders
            .into_iter()
            .flatten()
            .chain(&config.allow_write)
            .cloned()
            .collect(),
        remove: sockets.chain(dump).map(|path| jail::folder_of(path)).collect(),
    }
}

/// Runs a machine to its end, with a debugger's client whenever one is connected and with what its other clients ask for.
/// A listener comes with whether commands over TCP may write files. `panics`: the guest's panic is watched for. `paused`: the guest is held stopped until somebody resumes it.
///
/// # Errors
/// The console or the system fails.
pub fn to_the_end(
    run: &mut Run,
    console: &mut Console,
    clients: &[Listener],
    listener: Option<(&GdbListener, bool)>,
    paused: bool,
    mut panics: Option<&mut PanicWatch>,
) -> Result<End, Error> {
    let deadline = run.deadline();
    if listener.is_some() {
        // A triple fault is shown to whoever connects later, too.
        run.debugger();
    }
    let controls = Controls {
        paused,
        ..Controls::new(run)
    };
    let mut gdb = gdb::Session::new(controls, listener.is_some_and(|(_, allow_files)| allow_files));
    let listener = listener.map(|(listener, _)| listener);
    loop {
        // Whoever has a request says so before the run is asked to come back: what was asked until here is answered now.
        gdb.controls().run.interrupt().take();
        // Where one has the run go to another step, whatever comes behind it finds it there.
        while gdb.controls().go_to.is_none()
            && let Some(event) = listener.and_then(GdbListener::next)
        {
            if gdb.take(event) {
                return Ok(End::Quit);
            }
        }
        for _ in 0..REQUESTS {
            if gdb.controls().go_to.is_some() {
                break;
            }
            let Some(request) = clients.iter().find_map(Listener::next) else {
                break;
            };
            if answer(request, gdb.controls()) {
                return Ok(End::Quit);
            }
        }
        if let Some(steps) = gdb.controls().go_to.take() {
            let held = gdb.holds();
            if let Some(end) = go_to(gdb.controls(), console, steps, held)? {
                return gdb.end(Ok(end));
            }
            continue;
        }
        if let Some(reverse) = gdb.take_reverse() {
            if let Some(end) = gdb.reverse(console, reverse)? {
                return Ok(end);
            }
            continue;
        }
        let held = gdb.holds();
        let controls = gdb.controls();
        controls.held = held;
        if controls.paused || held {
            if controls.run.interrupt().is_set() {
                continue;
            }
            let left = deadline.map(|(deadline, _)| deadline.saturating_duration_since(Instant::now()));
            let waited = console.flush().and_then(|()| console.wait(left));
            if let Err(leave) = waited {
                return gdb.end(End::of(leave));
            }
            if let (Some(std::time::Duration::ZERO), Some((_, timeout))) = (left, deadline) {
                return gdb.end(Ok(End::Timeout(timeout)));
            }
            continue;
        }
        let slice = panics.is_some().then(|| Instant::now() + guest_panic::LOOK);
        let stopped = controls.run.run_until_deadline(console, deadline, slice);
        match stopped {
            Ok(StopReason::Outside | StopReason::Reached | StopReason::Deadline) => {
                let debugged = gdb.is_connected();
                if let Some(panics) = panics.as_deref_mut()
                    && panics.look(gdb.controls().run, debugged) == Panicked::End
                {
                    return gdb.end(Ok(End::Panicked));
                }
            }
            Ok(StopReason::Panicked) => {
                let debugged = gdb.is_connected();
                if panics
                    .as_deref_mut()
                    .is_some_and(|panics| panics.told(gdb.controls().run, debugged))
                {
                    hold_in_panic(&mut gdb);
                }
            }
            Ok(StopReason::Debugger(stop)) => {
                let panics = panics.as_ref().is_some_and(|panics| match stop.why {
                    StopCause::Breakpoint(address) => panics.is_breakpoint(address),
                    _ => false,
                });
                if panics {
                    let _ = writeln!(
                        io::stderr(),
                        "minivmm: the guest's Linux panics: it is held where `panic` begins"
                    );
                    gdb.controls().paused |= !gdb.is_connected();
                }
                gdb.stopped(stop);
            }
            Ok(StopReason::Ended(end)) if gdb.looks_on(&end) => gdb.at_an_end(&end),
            Ok(StopReason::Ended(end)) => return gdb.end(Ok(end)),
            Err(error) => return gdb.end(Err(error)),
        }
    }
}

/// Holds a guest that says that it has panicked, for whoever is there.
fn hold_in_panic(gdb: &mut gdb::Session<'_>) {
    // A closed stderr is no reason to fail.
    let _ = writeln!(
        io::stderr(),
        "minivmm: the guest's kernel says that it has panicked: it is held there"
    );
    let cpu = gdb.controls().run.current_cpu();
    match gdb.waits() {
        true => gdb.tell_stop(DebugStop {
            cpu,
            why: StopCause::Asked,
        }),
        false => gdb.controls().paused |= !gdb.is_connected(),
    }
}

/// Answers a request of a client's, and says whether it ends the machine.
fn answer(request: Request, controls: &mut Controls<'_>) -> bool {
    debug!("{:?} at step {}", request.command, controls.run.steps());
    let mut quit = false;
    let reply = match &request.command {
        Command::Monitor { line, cpu } => match monitor::answer(controls, *cpu, line) {
            Ok(text) => Reply::Text(text),
            Err(why) => Reply::Refused(why.to_string()),
        },
        Command::HumanMonitor { line } => Reply::Text(human_monitor::answer(controls.run.machine().memory(), line)),
        Command::Dump { part } => match &request.file {
            Some(file) => dump(controls, part.clone(), file),
            None => Reply::Refused("dump: no file came with it: `minivmm ctl SOCKET dump FILE` sends one".into()),
        },
        Command::Snapshot => match &request.file {
            Some(file) => snapshot(controls, file),
            None => {
                Reply::Refused("snapshot: no file came with it: `minivmm ctl SOCKET snapshot FILE` sends one".into())
            }
        },
        command => {
            match command {
                Command::Pause => controls.paused = true,
                Command::Resume => controls.paused = false,
                _ => {}
            }
            quit = *command == Command::Quit;
            Reply::Status(controls.status())
        }
    };
    request.answer(reply);
    quit
}

/// Writes a core file.
fn dump(controls: &mut Controls<'_>, part: Option<std::ops::Range<u64>>, file: &std::fs::File) -> Reply {
    let Controls { run, names, .. } = controls;
    let steps = run.steps();
    names.look(run.machine().memory(), steps);
    match dump::write(run, names.linux(), part, file) {
        Ok(dumped) => Reply::Text(format!("step {steps}: {dumped}\n")),
        Err(why) => Reply::Refused(format!("dump: {why}")),
    }
}

/// Writes the machine's state.
fn snapshot(controls: &mut Controls<'_>, file: &std::fs::File) -> Reply {
    let steps = controls.run.steps();
    match controls.run.write_snapshot(file) {
        Ok(bytes) => Reply::Text(format!("step {steps}: {bytes} bytes, for `minivmm --restore`\n")),
        Err(why) => Reply::Refused(format!("snapshot: {why}")),
    }
}

/// Goes to a step, and holds the guest stopped there, if it is not `held` already until its debugger lets it go on.
fn go_to(controls: &mut Controls<'_>, console: &mut Console, steps: u64, held: bool) -> Result<Option<End>, Error> {
    controls.paused |= !held;
    match controls.run.seek(console, steps)? {
        // From there one can go back.
        Some(end) if end.is_the_guests() && controls.run.extent().is_some() => Ok(None),
        end => Ok(end),
    }
}

impl gdb::Session<'_> {
    /// The guest has stopped for the debugger's client, if one waits for that.
    fn stopped(&mut self, stop: DebugStop) {
        if stop.why != StopCause::Asked && self.waits() {
            debug!("stopped: {stop:x?}");
            self.tell_stop(stop);
        }
    }
}

#[cfg(test)]
#[path = "serve_test.rs"]
mod tests;
