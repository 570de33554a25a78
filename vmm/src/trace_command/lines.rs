//! What is the same in every listing: the columns of a line, instructions, events.

use pt_flow::{Block, Event, EventKind};
use serde_json::Value;
use trace::view::{Here, Names, Process};

use super::{
    disasm, json,
    output::{Output, seconds},
};

/// The columns that every line begins with.
pub fn columns(here: &Here) -> String {
    let step = here.step.map_or("-".into(), |step| step.to_string());
    let time = here.ns().map_or("-".into(), seconds);
    format!("{step:>12} {time:>14}")
}

/// An instruction, indented below its block.
pub fn disasm_text(line: &disasm::DisasmLine) -> String {
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

/// Whose code runs, as a column: the process, and for a second-level guest its VMM and VMCS, too.
pub fn whose(names: &Names, here: &Here, process: Option<Process>) -> String {
    let code = names.of(here);
    let task = process.and_then(|process| code.task(process, here.step));
    let comm = task.map_or("-", |task| &task.comm);
    match here.state.non_root {
        true => format!("{} {comm}", guest(names, here)),
        false => format!("{comm:<15}"),
    }
}

/// A second-level guest: its VMM, where that is known, and its VMCS.
pub fn guest(names: &Names, here: &Here) -> String {
    let vmm = names.vmm(here).unwrap_or("non-root");
    let vmcs = here.state.vmcs.map_or("-".into(), |vmcs| format!("{vmcs:#x}"));
    format!("[{vmm} VMCS {vmcs}]")
}

/// A line for an event.
pub fn show_event(out: &mut Output, as_json: bool, names: &Names, here: &Here, event: &Event) {
    if as_json {
        if let Some(line) = json::event(names, here, event) {
            out.line(&Value::Object(line).to_string());
        }
        return;
    }
    let code = names.of(here);
    let named = |names: &Names, ip: u64| {
        let process = names.process(here.state.cr3);
        match names.place(ip, process, here.step) {
            Some(place) => format!("{ip:#x} {place}"),
            None => format!("{ip:#x}"),
        }
    };
    let describe = |ip: u64| named(code, ip);
    let or = |ip: Option<u64>| ip.map_or("?".into(), describe);
    let text = match event.kind {
        EventKind::Time(_) | EventKind::Sync { .. } => return,
        EventKind::Gap(gap) => format!("GAP: {gap}"),
        EventKind::Overflow => "OVERFLOW: the processor lost packets".into(),
        EventKind::Enabled { ip } => format!("tracing on at {}", or(ip)),
        EventKind::Disabled { at: Some(at), to } => format!("tracing off at {}, to {}", describe(at), or(to)),
        EventKind::Disabled { at: None, to } => format!("tracing off, to {}", or(to)),
        EventKind::Async {
            from,
            to,
            vm_exit: true,
        } => {
            let to = to.map_or("?".into(), |to| named(names, to));
            format!("VM exit of {} at {}, to {to}", guest(names, here), describe(from))
        }
        EventKind::Async { from, to, .. } => format!("interrupt at {}, to {}", describe(from), or(to)),
        EventKind::Mode { mode, .. } => format!("{}-bit code", mode.bits()),
        EventKind::Paging { cr3, non_root } => {
            let task = code
                .process(Some(cr3))
                .and_then(|process| code.task(process, here.step));
            let of = if non_root {
                format!("guest {}, ", guest(names, here))
            } else {
                String::new()
            };
            match task {
                Some(task) => format!("{of}CR3 {cr3:#x}: {} ({})", task.comm, task.tgid),
                None => format!("{of}CR3 {cr3:#x}"),
            }
        }
        EventKind::Vmcs { pointer } => format!("VMCS {pointer:#x}"),
        EventKind::Resumed { ip } => format!("goes on at {}", describe(ip)),
        EventKind::PtWrite { ip, value, .. } => format!("PTWRITE {value:#x} at {}", or(ip)),
        EventKind::Stopped { ip } => format!("execution stops at {}", or(ip)),
        EventKind::TraceStop => "trace stop".into(),
        other => format!("{other:?}"),
    };
    out.line(&format!("{} -- {text}", columns(here)));
}
