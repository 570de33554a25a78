//! `minivmm trace decode --calls`: an indented tree.

use pt_flow::{Block, Event};
use serde_json::Value;

use trace::view::{Frame, FrameKind, Here, Names, Owner, ProcessCache, Sink};

use super::{
    disasm, json,
    lines::{code_json, columns, disasm_text, show_event},
    output::{Output, count},
};

/// Deeper calls are no further to the right.
const DEEPEST: usize = 40;

/// Prints calls.
pub struct Tree<'a, const CODE: bool> {
    out: &'a mut Output,
    json: bool,
    /// A call that may turn out to make none itself: then it is one line.
    last: Option<String>,
    process: Option<String>,
    cache: ProcessCache,
}

impl<'a, const CODE: bool> Tree<'a, CODE> {
    /// On standard output.
    pub fn new(out: &'a mut Output, json: bool) -> Self {
        Tree {
            out,
            json,
            last: None,
            process: None,
            cache: ProcessCache::default(),
        }
    }

    fn open_pending(&mut self) {
        if let Some(line) = self.last.take() {
            self.out.line(&(line + " {"));
        }
    }

    /// The trace is over; what runs goes on running.
    pub fn end(&mut self, _: &Names) {
        self.open_pending();
    }
}

fn kind(kind: FrameKind) -> &'static str {
    match kind {
        FrameKind::Root => "root",
        FrameKind::Call => "call",
        FrameKind::Jump => "jump",
        FrameKind::Interrupt => "interrupt",
        FrameKind::Entry => "entry",
        FrameKind::Signal => "signal",
    }
}

/// Its name, or the address of what has none.
fn name(names: &Names, frame: &Frame) -> String {
    match names.module(frame.function) {
        Some(module) => format!("{} [{module}]", names.name(frame.function)),
        None if frame.function.known() || frame.function.is_label() => names.name(frame.function).into(),
        None => match names.file_of(frame.function) {
            Some(file) => format!("{:#x} {file}", frame.ip),
            None => format!("{:#x}", frame.ip),
        },
    }
}

/// `name (process)`, with the thread's number where it is another.
fn whose(names: &Names, here: &Here, owner: Owner) -> String {
    let name = names.owner_name(owner, here.step);
    let task = || names.task(owner.process?, here.step);
    match owner.thread.map(|thread| names.thread(thread)) {
        Some(thread) if thread.tid == thread.tgid => format!("{name} ({})", thread.tgid),
        Some(thread) => format!("{name} ({}/{})", thread.tgid, thread.tid),
        None => task().map_or("-".into(), |task| format!("{name} ({})", task.tgid)),
    }
}

fn indent(stack: &[Frame]) -> String {
    "  ".repeat(stack.len().saturating_sub(1).min(DEEPEST))
}

impl<const CODE: bool> Sink for Tree<'_, CODE> {
    const CODE: bool = CODE;
    const LEAVES: bool = false;

    fn enter(&mut self, names: &Names, here: &Here, owner: Owner, stack: &mut [Frame], back: bool) {
        let Some(top) = stack.last() else { return };
        if self.json {
            let mut line = json::line(if back { "back" } else { "call" }, here);
            json::frame(&mut line, names, here, owner.process, stack);
            json::vmm(&mut line, names, here);
            line.insert("depth".into(), (stack.len() - 1).into());
            line.insert("kind".into(), kind(top.kind).into());
            json::owner(&mut line, names, here, owner);
            return self.out.line(&Value::Object(line).to_string());
        }
        self.open_pending();
        let whose = whose(names, here, owner);
        if self.process.as_ref() != Some(&whose) {
            self.out.line(&format!("{} -- {whose}", columns(here)));
            self.process = Some(whose);
        }
        let how = match top.kind {
            _ if back => "... ",
            FrameKind::Root => "... ",
            FrameKind::Interrupt | FrameKind::Signal => "! ",
            FrameKind::Jump => "> ",
            FrameKind::Entry | FrameKind::Call => "",
        };
        self.last = Some(format!("{}  {}{how}{}", columns(here), indent(stack), name(names, top)));
    }

    fn leave(&mut self, names: &Names, here: &Here, owner: Owner, stack: &mut [Frame], away: bool) {
        let Some(top) = stack.last() else { return };
        let all = top.own + top.below;
        if self.json {
            let mut line = json::line(if away { "away" } else { "return" }, here);
            json::frame(&mut line, names, here, owner.process, stack);
            line.insert("depth".into(), (stack.len() - 1).into());
            line.insert("instructions".into(), all.into());
            line.insert("own".into(), top.own.into());
            return self.out.line(&Value::Object(line).to_string());
        }
        let cost = count(all, "instruction");
        match self.last.take() {
            Some(line) => self.out.line(&format!("{line}: {cost}")),
            None => {
                let how = if away { "} ..." } else { "}" };
                self.out.line(&format!(
                    "{}  {}{how} {}: {cost}",
                    columns(here),
                    indent(stack),
                    name(names, top)
                ));
            }
        }
    }

    fn run(&mut self, names: &Names, here: &Here, _: &mut [Frame], block: &Block, code: &[u8]) {
        if !CODE {
            return;
        }
        let (all, names) = (names, names.of(here));
        let process = match here.state.non_root {
            true => names.process(here.state.cr3),
            false => self.cache.get(names, here.state.cr3),
        };
        if self.json {
            let mut line = json::line("block", here);
            json::place(&mut line, names, here, process, block.ip);
            json::vmm(&mut line, all, here);
            line.insert("instructions".into(), block.count.into());
            line.insert("code".into(), code_json(names, here, process, block, code));
            return self.out.line(&Value::Object(line).to_string());
        }
        self.open_pending();
        for line in disasm::lines(names, here, process, block, code) {
            self.out.line(&disasm_text(&line));
        }
    }

    fn event(&mut self, names: &Names, here: &Here, _: &[Frame], event: &Event) {
        if !matches!(
            event.kind,
            pt_flow::EventKind::Time(_) | pt_flow::EventKind::Sync { .. } | pt_flow::EventKind::Paging { .. }
        ) {
            self.open_pending();
            show_event(self.out, self.json, names, here, event);
        }
    }
}
