//! The JSON lines of `minivmm trace decode --json`. The page "Traces" of the guide has the schema; what is
//! in it stays, and more may come.
//!
//! Addresses are strings of hexadecimal digits, as 64 bits are more than a JSON number holds everywhere; counts are numbers.

use pt_flow::{End, Event, EventKind};
use serde_json::{Map, Value, json};

use trace::view::{Frame, Here, Names, Owner, Process};

/// A hexadecimal number.
pub fn hex(value: u64) -> Value {
    Value::String(format!("{value:#x}"))
}

/// What every line has.
pub fn line(kind: &str, here: &Here) -> Map<String, Value> {
    let mut line = Map::new();
    line.insert("type".into(), kind.into());
    line.insert("vcpu".into(), here.cpu.into());
    line.insert("step".into(), here.step.into());
    line.insert("ns".into(), here.ns().into());
    if here.state.non_root {
        line.insert("non_root".into(), true.into());
        line.insert("vmcs".into(), here.state.vmcs.map_or(Value::Null, hex));
    }
    line
}

/// The program that is the VMM, where a second-level guest runs.
pub fn vmm(line: &mut Map<String, Value>, names: &Names, here: &Here) {
    if let Some(vmm) = names.vmm(here).filter(|_| here.state.non_root) {
        line.insert("vmm".into(), vmm.into());
    }
}

/// The innermost function of a stack, of the process that the VMM is where it is a second-level guest's.
pub fn frame(line: &mut Map<String, Value>, names: &Names, here: &Here, process: Option<Process>, stack: &[Frame]) {
    let Some(frame) = stack.last() else { return };
    let function = frame.function;
    if function.is_label() {
        line.insert("ip".into(), Value::Null);
        line.insert("label".into(), names.name(function).into());
    } else if stack.iter().any(|below| below.function.is_label()) {
        line.insert("ip".into(), hex(frame.ip));
        if !function.known() {
            return;
        }
        line.insert("symbol".into(), names.name(function).into());
        line.insert("offset".into(), frame.ip.wrapping_sub(frame.start()).into());
        if let Some(module) = names.module(function) {
            line.insert("module".into(), module.into());
        }
    } else {
        place(line, names, here, process, frame.ip);
    }
}

/// An address of a process, and what is there.
pub fn place(line: &mut Map<String, Value>, names: &Names, here: &Here, process: Option<Process>, ip: u64) {
    line.insert("ip".into(), hex(ip));
    if let Some(place) = names.place(ip, process, here.step) {
        line.insert("symbol".into(), place.symbol.name.into());
        line.insert("offset".into(), place.offset.into());
        if let Some(module) = place.symbol.module {
            line.insert("module".into(), module.into());
        }
    }
}

/// Whose it is.
pub fn process(line: &mut Map<String, Value>, names: &Names, here: &Here, process: Option<Process>) {
    if let Some(task) = process.and_then(|process| names.task(process, here.step)) {
        line.insert("process".into(), task.comm.clone().into());
        line.insert("pid".into(), task.tgid.into());
    }
}

/// Whose frames they are.
pub fn owner(line: &mut Map<String, Value>, names: &Names, here: &Here, owner: Owner) {
    let Some(thread) = owner.thread.map(|thread| names.thread(thread)) else {
        return process(line, names, here, owner.process);
    };
    line.insert("process".into(), names.owner_name(owner, here.step).into());
    line.insert("pid".into(), thread.tgid.into());
    line.insert("tid".into(), thread.tid.into());
}

/// How a block ends.
pub fn end(end: End) -> &'static str {
    match end {
        End::Continue => "continue",
        End::Conditional => "conditional",
        End::Jump => "jump",
        End::Call => "call",
        End::IndirectJump => "indirect-jump",
        End::IndirectCall => "indirect-call",
        End::Return => "return",
        End::Far => "far",
        End::MovCr3 => "mov-cr3",
        End::PtWrite => "ptwrite",
        End::Cut => "cut",
    }
}

/// An event, unless it tells nothing but the time.
pub fn event(names: &Names, here: &Here, event: &Event) -> Option<Map<String, Value>> {
    let gap = matches!(event.kind, EventKind::Gap(_));
    let mut object = line(if gap { "gap" } else { "event" }, here);
    vmm(&mut object, names, here);
    let (all, names) = (names, names.of(here));
    let mut put = |name: &str, value: Value| {
        object.insert(name.into(), value);
    };
    let name = match event.kind {
        EventKind::Time(_) | EventKind::Sync { .. } => return None,
        EventKind::Gap(kind) => {
            put("reason", kind.to_string().into());
            "gap"
        }
        EventKind::Enabled { ip } => {
            put("to", json!(ip.map(hex)));
            "enabled"
        }
        EventKind::Disabled { at, to } => {
            put("from", json!(at.map(hex)));
            put("to", json!(to.map(hex)));
            "disabled"
        }
        EventKind::Async { from, to, vm_exit } => {
            put("from", hex(from));
            put("to", json!(to.map(hex)));
            let process = names.process(here.state.cr3);
            let names = if vm_exit { all } else { names };
            if let Some(place) = to.and_then(|to| names.place(to, process, here.step)) {
                put("symbol", place.to_string().into());
            }
            if vm_exit { "vm-exit" } else { "interrupt" }
        }
        EventKind::Mode { mode, .. } => {
            put("bits", json!(mode.bits()));
            "mode"
        }
        EventKind::Transaction { in_tx, abort, .. } => {
            put("in_tx", in_tx.into());
            put("abort", abort.into());
            "transaction"
        }
        EventKind::Paging { cr3, .. } => {
            put("cr3", hex(cr3));
            if let Some(task) = names
                .process(Some(cr3))
                .and_then(|process| names.task(process, here.step))
            {
                put("process", task.comm.clone().into());
                put("pid", task.tgid.into());
            }
            "cr3"
        }
        EventKind::PtWrite { ip, value, .. } => {
            put("ip", json!(ip.map(hex)));
            put("value", hex(value));
            "ptwrite"
        }
        EventKind::Stopped { ip } => {
            put("ip", json!(ip.map(hex)));
            "stopped"
        }
        EventKind::Overflow => "overflow",
        EventKind::Resumed { ip } => {
            put("to", hex(ip));
            "resumed"
        }
        EventKind::TraceStop => "trace-stop",
        EventKind::Vmcs { pointer } => {
            put("pointer", hex(pointer));
            "vmcs"
        }
        other => {
            put("packet", format!("{other:?}").into());
            "other"
        }
    };
    put("event", name.into());
    Some(object)
}
