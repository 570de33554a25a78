//! What this host can give a guest, unit by unit: `minivmm probe`.
//!
//! What is looked at is plain data ([`Seen`]), so that the rules can be tested on hosts that nobody here has.

use std::fmt::{Display, Write};
use std::fs;

use serde::Serialize;

use crate::error::KvmError;
use crate::guest_debug::Kinds;
use crate::host::Host;
use crate::host_units::{self, Traits};
use crate::irqchip::{self, Choice};
use crate::kernel_irqchip;
use crate::trial::Defect;
use crate::units::{Backend, UNITS, Unit, UnitRow};

/// What was found on a host.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Seen {
    /// The processor's vendor and name, as /proc/cpuinfo has them.
    pub vendor: String,
    /// The processor's name.
    pub cpu: String,
    /// The host is a guest itself.
    pub nested: bool,
    /// The kernel's release.
    pub kernel: String,
    /// /dev/kvm, or why it cannot be used.
    pub kvm: Result<Kvm, KvmError>,
}

/// What was found of KVM.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Kvm {
    /// The modules that are loaded, and the built-in ones that have parameters.
    pub modules: Vec<String>,
    /// What decides about the host's Intel PT.
    pub pt: host_units::Pt,
    /// What decides about the host's counters, PEBS and last-branch records.
    pub pmu: host_units::Pmu,
    /// How fast it is, or that it interprets.
    pub speed: Result<String, KvmError>,
    /// The frequency of a guest's time-stamp counter.
    pub tsc_khz: u32,
    /// What KVM_SET_GUEST_DEBUG delivers to a debugger, tried with a small guest; or why that could not be tried.
    pub guest_debug: Result<Kinds, KvmError>,
    /// What it accepts and does not do, as a trial guest found it; or why that could not be tried.
    pub defects: Result<Vec<Defect>, KvmError>,
    /// What its own interrupt controllers lack to be taken, if they do.
    pub irqchip_lacks: Option<&'static str>,
    /// Capabilities that this program uses if they are there: name and KVM's answer.
    pub capabilities: Vec<(&'static str, i32)>,
}

/// Capabilities by name and number.
const CAPABILITIES: &[(&str, u32)] = &[
    ("KVM_CAP_EXIT_ON_EMULATION_FAILURE", 204),
    ("KVM_CAP_PMU_CAPABILITY", 212),
    ("KVM_CAP_SET_GUEST_DEBUG", 23),
    ("KVM_CAP_TSC_CONTROL", 60),
    ("KVM_CAP_X86_MSR_FILTER", 189),
    ("KVM_CAP_X86_USER_SPACE_MSR", 188),
    ("KVM_CAP_XSAVE2", 208),
];

impl Seen {
    /// Looks at this host.
    pub fn here() -> Self {
        let modules = ["kvm", "kvm_intel", "kvm_amd"];
        let there = |name: &&str| fs::metadata(format!("/sys/module/{name}")).is_ok();
        Seen {
            vendor: cpuinfo("vendor_id"),
            cpu: cpuinfo("model name"),
            nested: cpuinfo("flags").split(' ').any(|flag| flag == "hypervisor"),
            kernel: text_of("/proc/sys/kernel/osrelease").unwrap_or_default(),
            kvm: Host::open().map(|host| Kvm {
                modules: modules
                    .iter()
                    .filter(|name| there(name))
                    .map(|name| (*name).to_string())
                    .collect(),
                pt: host_units::Pt::here(is_intel(), || host.tries_pt().map(drop)),
                pmu: pmu_of(&host),
                speed: host.virtualizes(),
                tsc_khz: host.tsc_khz,
                guest_debug: host.guest_debug(),
                defects: host.defects().map(<[_]>::to_vec),
                irqchip_lacks: kernel_irqchip::lacks(&host),
                capabilities: CAPABILITIES
                    .iter()
                    .map(|&(name, number)| (name, host.capability(number)))
                    .collect(),
            }),
        }
    }
}

/// What a unit would be, and why.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Row {
    /// The unit, as its option is called.
    pub unit: &'static str,
    /// Under KVM; `None` where there is none.
    pub kvm: Option<Backend>,
    /// Why.
    pub why: String,
}

impl Traits {
    /// Of this host, without trying what perf records.
    pub fn of(host: &Host) -> Self {
        Traits {
            pt: host_units::Pt::here(is_intel(), || Ok(())),
            pmu: pmu_of(host),
        }
    }
}

fn is_intel() -> bool {
    cpuinfo("vendor_id") == INTEL
}

fn pmu_of(host: &Host) -> host_units::Pmu {
    host_units::Pmu {
        intel: is_intel(),
        leaf: host.supported(0xa),
        capabilities: host.perf_capabilities(),
        signature: host.supported(1)[0],
        mediated: ["1", "Y"]
            .map(Some)
            .contains(&host_units::parameter("kvm", "enable_mediated_pmu").as_deref()),
    }
}

const INTEL: &str = "GenuineIntel";
/// A field of the first processor in /proc/cpuinfo.
fn cpuinfo(name: &str) -> String {
    let text = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let value = |line: &str| {
        let (key, value) = line.split_once(':')?;
        (key.trim() == name).then(|| value.trim().to_string())
    };
    text.lines().find_map(value).unwrap_or_default()
}

fn text_of(path: &str) -> Option<String> {
    fs::read_to_string(path).ok().map(|text| text.trim().to_string())
}

/// A row a unit, where nothing is asked for.
pub fn rows(seen: &Seen) -> Vec<Row> {
    let kvm = match &seen.kvm {
        Ok(kvm) => kvm,
        Err(why) => {
            let row = |unit: &UnitRow| Row {
                unit: unit.name,
                kvm: None,
                why: why.to_string(),
            };
            return UNITS.iter().map(row).collect();
        }
    };
    let host = Traits {
        pt: kvm.pt.clone(),
        pmu: kvm.pmu,
    };
    let row = |unit: &UnitRow| Row {
        unit: unit.name,
        kvm: Some(unit.on_kvm),
        why: why(unit, kvm, &host),
    };
    UNITS.iter().map(row).collect()
}

/// Why a unit has the backend that it has where nothing is asked for, and what can be asked for.
fn why(unit: &UnitRow, kvm: &Kvm, host: &Traits) -> String {
    let name = unit.name;
    let of_time = |defect: &&Defect| !matches!(defect, Defect::Cpuid { .. });
    if unit.unit == Unit::Tsc
        && let Some(defect) = kvm.defects.iter().flatten().find(of_time)
    {
        return defect.to_string();
    }
    match (unit.on_kvm, (unit.lacks_host)(host), unit.lacks_emulated) {
        (Backend::Host, ..) => match unit.interpreted {
            Some(lacks) if kvm.speed.is_err() => lacks.into(),
            _ => "KVM gives it to guests".into(),
        },
        (_, Some(lacks), None) => {
            let caught = kvm.guest_debug.as_ref().is_ok_and(|kinds| kinds.serves_breakpoints());
            let limit = unit.limits[usize::from(caught)];
            format!("{lacks}; --{name}=emulated is ours, with handovers{limit}")
        }
        (_, None, None) => {
            let with = unit.host_with;
            format!("--{name}=host is the host's, with {with}; --{name}=emulated is ours, with handovers")
        }
        (_, host, emulated) => {
            let both: Vec<String> = host.into_iter().chain(emulated.map(String::from)).collect();
            both.join("; ")
        }
    }
}

/// What a debugger gets from KVM, and what from handovers.
fn guest_debug(found: &Result<Kinds, KvmError>) -> String {
    let kinds = match found {
        Ok(kinds) => kinds,
        Err(why) => return format!("gdb's breakpoints and watchpoints by handover: {why}"),
    };
    let served = match (kinds.serves_breakpoints(), kinds.serves_watchpoints()) {
        (true, true) => "four of gdb's breakpoints and watchpoints are the processor's",
        (true, false) => "four of gdb's breakpoints are KVM's, watchpoints by handover",
        (false, _) => "gdb's breakpoints and watchpoints by handover",
    };
    format!("KVM delivers {kinds}: {served}")
}

/// What a trial guest found, a line each.
fn trial(found: &Result<Vec<Defect>, KvmError>) -> Vec<String> {
    match found {
        Ok(found) if found.is_empty() => vec!["a guest's CPUID and time-stamp counter are what they are set to".into()],
        Ok(found) => found.iter().map(ToString::to_string).collect(),
        Err(why) => vec![why.to_string()],
    }
}

/// Whose interrupt controllers a machine on this KVM has, where nothing is asked for; `None` where there is no KVM.
pub fn irqchip(seen: &Seen) -> Option<Choice> {
    let kvm = seen.kvm.as_ref().ok()?;
    let (irqchip, why) = irqchip::of_host(kvm.irqchip_lacks, kvm.speed.clone());
    Some(Choice { irqchip, why })
}

/// What `minivmm probe` prints.
pub fn text(seen: &Seen) -> String {
    let mut out = String::new();
    let nested = if seen.nested { ", itself a guest" } else { "" };
    let _ = writeln!(out, "CPU      {} ({}){nested}", seen.cpu, seen.vendor);
    let _ = writeln!(out, "kernel   {}", seen.kernel);
    match &seen.kvm {
        Err(why) => {
            let _ = writeln!(out, "KVM      none: {why}");
        }
        Ok(kvm) => {
            let modules = match kvm.modules.is_empty() {
                true => "no module of a name that is known".into(),
                false => kvm.modules.join(", "),
            };
            let _ = writeln!(out, "KVM      {modules}");
            let speed: &dyn Display = kvm.speed.as_ref().map_or_else(|why| why as _, |found| found as _);
            let _ = writeln!(out, "speed    {speed}");
            let _ = writeln!(out, "TSC      {} kHz", kvm.tsc_khz);
            let _ = writeln!(out, "debug    {}", guest_debug(&kvm.guest_debug));
            for line in trial(&kvm.defects) {
                let _ = writeln!(out, "trial    {line}");
            }
            for (name, answer) in &kvm.capabilities {
                let _ = writeln!(out, "         {name}: {answer}");
            }
        }
    }
    let whole = |kvm: &Kvm| kvm.speed.is_ok() && kvm.defects.as_ref().is_ok_and(Vec::is_empty);
    let auto = match seen.kvm.as_ref().map(whole) {
        Ok(true) => "kvm",
        _ => "soft",
    };
    let _ = writeln!(out, "\n--engine auto is {auto}");
    if seen
        .kvm
        .as_ref()
        .is_ok_and(|kvm| kvm.defects.as_ref().is_ok_and(|found| !found.is_empty()))
    {
        let _ = writeln!(out, "--engine kvm is refused, unless with --kvm-defects accept");
    }
    if let Some(Choice { irqchip, why }) = irqchip(seen) {
        let _ = writeln!(out, "--engine kvm has --irqchip {}: {why}", irqchip.name());
    }
    let _ = writeln!(out, "\nunit  soft      kvm       why");
    for row in rows(seen) {
        let kvm = match row.kvm {
            Some(Backend::Host) => "host",
            Some(Backend::Emulated) => "emulated",
            Some(Backend::Absent) => "absent",
            None => "-",
        };
        let _ = writeln!(out, "{:4}  emulated  {kvm:8}  {}", row.unit, row.why);
    }
    out
}

/// The same as a JSON object.
pub fn json(seen: &Seen) -> serde_json::Value {
    serde_json::json!({ "host": seen, "irqchip": irqchip(seen), "units": rows(seen) })
}

#[cfg(test)]
#[path = "probe_test.rs"]
mod tests;
