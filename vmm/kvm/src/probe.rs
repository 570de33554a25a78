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
use crate::units::{Backend, UNITS, UnitRow};

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

/// Whose interrupt controllers a machine on this KVM has, without wishes; `None` where there is no KVM.
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
            for (name, answer) in &kvm.capabilities {
                let _ = writeln!(out, "         {name}: {answer}");
            }
        }
    }
    let auto = match seen.kvm.as_ref().map(|kvm| kvm.speed.is_ok()) {
        Ok(true) => "kvm",
        _ => "soft",
    };
    let _ = writeln!(out, "\n--engine auto is {auto}");
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

/// The same as one JSON object on a line.
pub fn json(seen: &Seen) -> String {
    let value = serde_json::json!({ "host": seen, "irqchip": irqchip(seen), "units": rows(seen) });
    format!("{value}\n")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tracer::PtError;

    fn host(vendor: &str, module: &str, pt_mode: Option<&str>) -> Seen {
        Seen {
            vendor: vendor.into(),
            cpu: "a processor".into(),
            nested: false,
            kernel: "6.1.0".into(),
            kvm: Ok(Kvm {
                modules: vec!["kvm".into(), module.into()],
                pt: host_units::Pt {
                    intel: vendor == INTEL,
                    kvm_intel: module == "kvm_intel",
                    pt_mode: pt_mode.map(str::to_string),
                    ept: None,
                    perf: Err(PtError::Missing),
                },
                pmu: host_units::Pmu {
                    intel: vendor == INTEL,
                    ..Default::default()
                },
                speed: Ok("it executes 4000 million instructions per second".into()),
                tsc_khz: 2_000_000,
                guest_debug: Ok(Kinds::default()),
                irqchip_lacks: None,
                capabilities: vec![("KVM_CAP_XSAVE2", 4096)],
            }),
        }
    }

    /// A host whose perf and KVM have all.
    fn generous(capabilities: u64, mediated: bool) -> Seen {
        let mut seen = host("GenuineIntel", "kvm_intel", None);
        if let Ok(kvm) = &mut seen.kvm {
            kvm.pt.perf = Ok(());
            kvm.pmu = host_units::Pmu {
                intel: true,
                leaf: [0x0830_0402, 0, 0, 0x603],
                capabilities: Some(capabilities),
                signature: 0x0003_06f2,
                mediated,
            };
        }
        seen
    }

    // covers: host-units/pt-probe, host-units/pmu-probe
    #[test]
    fn a_host_that_has_them_offers_its_own() {
        let why = |seen: &Seen, unit: &str| row(&rows(seen), unit).why.clone();
        let all = generous(0x7c05, false);
        assert!(why(&all, "pt").contains("--pt=host is the host's, with --experimental"));
        for unit in ["pmu", "lbr", "pebs"] {
            let why = why(&all, unit);
            assert!(
                why.contains(&format!("--{unit}=host")) && why.contains("--irqchip kvm"),
                "{why}"
            );
            assert!(why.contains("handovers"), "{why}");
        }
        assert!(
            rows(&all)
                .iter()
                .all(|row| row.unit == "dr" || row.unit == "tsc" || row.kvm == Some(Backend::Absent))
        );
        let mediated = generous(0x2000, true);
        assert!(why(&mediated, "lbr").contains("mediated") && why(&mediated, "pmu").contains("--pmu=host"));
        let amd = host("AuthenticAMD", "kvm_amd", None);
        assert!(why(&amd, "pmu").contains("another vendor's") && why(&amd, "lbr").contains("another vendor's"));
        let mut nested = host("GenuineIntel", "kvm_intel", None);
        nested.nested = true;
        assert!(why(&nested, "pebs").contains("nested without them"));
        assert!(text(&nested).contains("itself a guest"));
    }

    fn row<'a>(rows: &'a [Row], unit: &str) -> &'a Row {
        rows.iter().find(|row| row.unit == unit).unwrap()
    }

    // covers: kvm/probe
    #[test]
    fn hosts_of_every_kind_get_their_reasons() {
        for (seen, why) in [
            (host("GenuineIntel", "kvm_intel", None), "no intel_pt"),
            (host("GenuineIntel", "kvm_intel", Some("0")), "no intel_pt"),
            (host("GenuineIntel", "kvm_intel", Some("1")), "pt_mode=0"),
            (host("GenuineIntel", "kvm_pvm", None), "under kvm_intel"),
            (host("AuthenticAMD", "kvm_amd", None), "not Intel's"),
        ] {
            let rows = rows(&seen);
            let pt = row(&rows, "pt");
            assert_eq!(pt.kvm, Some(Backend::Absent));
            assert!(pt.why.contains(why) && pt.why.contains("--pt=emulated"), "{}", pt.why);
            assert_eq!(row(&rows, "dr").kvm, Some(Backend::Host));
            assert!(row(&rows, "pmu").why.contains("RDPMC is #GP"));
            let text = text(&seen);
            assert!(
                text.contains("--engine auto is kvm") && text.contains(&seen.vendor),
                "{text}"
            );
            assert!(
                text.contains("--engine kvm has --irqchip minivmm: --irqchip kvm has"),
                "{text}"
            );
        }
    }

    // covers: kvm/probe
    #[test]
    fn a_kvm_that_is_none_or_interprets_leaves_auto_with_the_software_engine() {
        let mut seen = host("GenuineIntel", "kvm_pvm", None);
        seen.nested = true;
        if let Ok(kvm) = &mut seen.kvm {
            kvm.speed = Err(KvmError::Interprets { mips: 2 });
        }
        let said = text(&seen);
        assert!(
            said.contains("--engine auto is soft") && said.contains("2 million"),
            "{said}"
        );
        assert!(said.contains("itself a guest"));
        assert!(said.contains("--irqchip minivmm: KVM interprets here"), "{said}");
        assert!(row(&rows(&seen), "dr").why.contains("interprets"));
        for error in [KvmError::Missing, KvmError::Permission] {
            let why = error.to_string();
            seen.kvm = Err(error);
            let said = text(&seen);
            assert!(said.contains(&why) && said.contains("--engine auto is soft"), "{said}");
            assert!(rows(&seen).iter().all(|row| row.kvm.is_none() && row.why == why));
        }
    }

    // covers: linux-guest/debug-probe
    #[test]
    fn what_a_debugger_gets_is_told() {
        let intel = Kinds {
            single_step: true,
            execution: true,
            data: true,
            register_access: true,
            ..Kinds::default()
        };
        let interprets = Kinds {
            execution: true,
            beside: true,
            ..Kinds::default()
        };
        for (found, says) in [
            (
                Ok(intel),
                "watchpoints, MOV DR: four of gdb's breakpoints and watchpoints are the processor's",
            ),
            (
                Ok(interprets),
                "four of gdb's breakpoints are KVM's, watchpoints by handover",
            ),
            (
                Ok(Kinds::default()),
                "KVM delivers nothing: gdb's breakpoints and watchpoints by handover",
            ),
            (Err(KvmError::NoMsr(0x10)), "by handover: KVM_GET_MSRS: KVM has no 0x10"),
        ] {
            let mut seen = host("GenuineIntel", "kvm_intel", None);
            if let Ok(kvm) = &mut seen.kvm {
                kvm.guest_debug = found;
            }
            let said = text(&seen);
            let line = said.lines().find(|line| line.starts_with("debug ")).unwrap();
            assert!(line.contains(says), "{line}");
        }
        assert!(json(&host("GenuineIntel", "kvm_intel", None)).contains("\"guest_debug\":{\"Ok\":{"));
    }

    // covers: kvm/probe
    #[test]
    fn json_says_the_same() {
        let seen = host("AuthenticAMD", "kvm_amd", None);
        let value: serde_json::Value = serde_json::from_str(&json(&seen)).unwrap();
        assert_eq!(value["host"]["vendor"], "AuthenticAMD");
        assert_eq!(value["irqchip"]["irqchip"], "minivmm");
        assert_eq!(value["units"][5]["unit"], "pt");
        assert_eq!(value["units"][5]["kvm"], "absent");
    }
}
