//! Which engine runs the guest, and which CPU model and units it shows there.

use std::sync::Arc;

use ::engine::{HostLacks, Vectors};
use kvm::{
    Host, Hypervisor, KvmError, Passed,
    host_units::Traits,
    irqchip::{self, Irqchip},
    resolve,
    tracer::Traces,
    trial,
    units::{Backend, Backends, Unit, UnitRequest},
};
use log::{info, warn};
use machine::memory::Memory;
use x86::model::CpuModel;

use crate::{
    config::{EngineChoice, KvmDefects, MachineConfig, VectorChoice},
    error::Error,
};

/// The option that asks for KVM.
const KVM: &str = "--engine kvm";
/// The option that asks for KVM's interrupt controllers.
const IRQCHIP_KVM: &str = "--irqchip kvm";

/// The CPUs of a machine in KVM, of a model that [`model`] gave.
pub(super) fn hypervisor(
    config: &MachineConfig,
    host: &Host,
    irqchip: Irqchip,
    memory: &Memory,
) -> Result<Hypervisor, Error> {
    let units = units(config, host)?;
    let watches = units[Unit::Pt] == Backend::Host || units.each().any(|(_, backend)| backend == Backend::Emulated);
    let passed = Passed::of(&Traits::of(host).pmu, &units);
    let mut hypervisor = Hypervisor::new(host, config.model, memory, config.topology(), watches, irqchip, &passed)
        .map_err(Error::option(KVM))?;
    if let Some(traces) = traces(config, host, &units)? {
        hypervisor.trace_with(traces);
    }
    Ok(hypervisor)
}

/// Whether the software engine can have the interrupt controllers that are wanted.
pub(super) fn check_soft(config: &MachineConfig) -> Result<(), Error> {
    irqchip::check_soft(&asked(config)).map_err(Error::option(IRQCHIP_KVM))
}

/// Which backend provides each unit of a machine on KVM.
fn units(config: &MachineConfig, host: &Host) -> Result<Backends, Error> {
    let mut traits = Traits::of(host);
    if config.host_trace.is_some() {
        // Whose recording it is does not matter.
        (traits.pt.intel, traits.pt.kvm_intel, traits.pt.pt_mode, traits.pt.ept) = (true, true, None, None);
    }
    let units = resolve::on_kvm(&traits, &config.units)?;
    resolve::check_model(&traits.pmu, config.model, &units)?;
    Ok(units)
}

/// What records the guest for its Intel PT, if that is the host's.
fn traces(config: &MachineConfig, host: &Host, units: &Backends) -> Result<Option<Arc<dyn Traces>>, Error> {
    match (units[Unit::Pt], &config.host_trace) {
        (Backend::Host, Some(traces)) => Ok(Some(Arc::clone(traces))),
        (Backend::Host, None) => host.tries_pt().map(Some).map_err(Error::option("--pt=host")),
        _ => Ok(None),
    }
}

/// The configuration's model as the software engine has it: without the units that are not wanted.
pub(super) fn soft_model(config: &MachineConfig) -> Result<&'static CpuModel, Error> {
    let units = resolve::in_software(&config.units)?;
    if units.each().all(|(_, backend)| backend != Backend::Absent) {
        return Ok(config.model);
    }
    kvm::cpuid::narrow(config.model, None, &units, None, None).map_err(Error::option("--cpu-model"))
}

/// Whose interrupt controllers a machine on this host's KVM has.
pub(super) fn irqchip(config: &MachineConfig, host: &Host) -> Result<Irqchip, Error> {
    let choice = irqchip::choose(
        &asked(config),
        &units(config, host)?,
        kvm::kernel_irqchip::lacks(host),
        || host.virtualizes(),
    );
    let choice = choice.map_err(Error::option(IRQCHIP_KVM))?;
    info!("--irqchip {}: {}", choice.irqchip.name(), choice.why);
    Ok(choice.irqchip)
}

/// The configuration's model as a guest on this host's KVM sees it.
pub(super) fn model(config: &MachineConfig, host: &Host, irqchip: Irqchip) -> Result<&'static CpuModel, Error> {
    let units = units(config, host)?;
    let supported = host.rows(irqchip);
    for (feature, why) in kvm::cpuid::narrowings(config.model, Some(&supported), &units) {
        info!("{} has no {}: {why}", config.model.name, feature.name());
    }
    if host.tsc_khz != config.model.tsc_khz {
        info!(
            "the time-stamp counter runs at the host's {} kHz, not the model's {}",
            host.tsc_khz, config.model.tsc_khz
        );
    }
    let model = {
        let pmu = Traits::of(host).pmu;
        kvm::cpuid::narrow(config.model, Some(&supported), &units, Some(host.tsc_khz), Some(&pmu))
            .map_err(Error::option(KVM))?
    };
    if irqchip == Irqchip::Minivmm {
        return Ok(model);
    }
    Ok(model
        .with_apic_timer_khz(kvm::kernel_irqchip::APIC_TIMER_KHZ)
        .unwrap_or_else(|why| {
            info!("CPUID does not tell the clock of KVM's APIC timers: {why}");
            model
        }))
}

/// What of a configuration needs the software engine alone: the option, and what it does there.
pub(super) fn needs_soft(config: &MachineConfig) -> Option<(&'static str, &'static str)> {
    const COUNTS: &str = "counts instructions, which KVM does not";
    match config {
        MachineConfig {
            max_instructions: Some(_),
            ..
        } => Some(("--max-instructions", COUNTS)),
        MachineConfig { trace: Some(_), .. } => Some(("--trace", COUNTS)),
        MachineConfig { reverse: Some(_), .. } => Some(("--reverse", COUNTS)),
        MachineConfig { record: Some(_), .. } => Some(("--record", COUNTS)),
        MachineConfig { replay: Some(_), .. } => Some(("replay", COUNTS)),
        MachineConfig { model, .. } if model.asked.vmx() => Some((
            "--cpu-model +vmx",
            "shows the guest VMX, which guests of KVM do not get here",
        )),
        _ => None,
    }
}

/// Why a configuration is better off in the software engine, where it has the choice.
pub(super) fn wants_ours(config: &MachineConfig) -> Option<&'static str> {
    let ours = Some(UnitRequest::Emulated);
    if config.units.each().any(|(_, request)| request == ours) {
        return Some("a unit of ours is wanted, and there it has all the others beside it");
    }
    let gdb = config.gdb.is_some();
    gdb.then_some("a debugger's guest stops and steps there, and its runs repeat")
}

/// What of a configuration decides whose interrupt controllers a machine on KVM has.
pub(super) fn asked(config: &MachineConfig) -> irqchip::Wanted {
    irqchip::Wanted {
        irqchip: config.irqchip,
        debugged: config.gdb.is_some(),
        monitored: config.control.is_some(),
    }
}

/// KVM, opened and tried.
fn open(defects: KvmDefects) -> Result<Host, Error> {
    let host = Host::open().map_err(Error::option(KVM))?;
    let found = match host.defects() {
        Ok(found) => found,
        // What fails here fails in the machine, too, which says where.
        Err(why) => {
            info!("{KVM}: {why}");
            &[]
        }
    };
    for defect in found {
        info!("{KVM}: {defect}");
    }
    if !found.is_empty() && defects == KvmDefects::Refuse {
        let found = trial::summary(found);
        return Err(Error::Engine {
            option: KVM.into(),
            reason: format!("{found}: use --engine soft, or say --kvm-defects accept"),
        });
    }
    Ok(host)
}

/// `--engine`: KVM, opened, or the software engine.
pub(super) fn choose(config: &MachineConfig) -> Result<Option<Host>, Error> {
    let only_soft = needs_soft(config);
    match (config.engine, only_soft) {
        (EngineChoice::Soft, _) => Ok(None),
        (EngineChoice::Kvm, Some((option, does))) => {
            let reason = format!("{option} {does}: leave it out, or use --engine soft");
            Err(Error::Engine {
                option: KVM.into(),
                reason,
            })
        }
        (EngineChoice::Kvm, None) => open(config.kvm_defects).map(Some),
        (EngineChoice::Auto, Some((option, does))) => {
            info!("--engine auto: the software engine, since {option} {does}");
            Ok(None)
        }
        (EngineChoice::Auto, None) => {
            let chosen = wants_ours(config).map_or_else(
                || {
                    let host = Host::open().map_err(|why| why.to_string())?;
                    let why = host.virtualizes().map_err(|why| why.to_string())?;
                    match host.defects().map_err(|why| why.to_string())? {
                        [] => Ok((host, why)),
                        found => Err(trial::summary(found)),
                    }
                },
                |why| Err(why.to_string()),
            );
            match chosen {
                Ok((host, why)) => {
                    info!("--engine auto: KVM: {why}");
                    Ok(Some(host))
                }
                Err(why) => {
                    info!("--engine auto: the software engine: {why}");
                    Ok(None)
                }
            }
        }
    }
}

/// How the software engine executes vector instructions: as it is told, else by the host's own where they can be. What is not to be the
/// host's own is computed by tables where there is no memory for host code.
pub(super) fn vectors(choice: Option<VectorChoice>, model: &CpuModel, host: Result<(), HostLacks>) -> Vectors {
    match (choice, host) {
        (None, Ok(())) => Vectors::Host,
        (None | Some(VectorChoice::Portable), Err(lacks)) => {
            info!(
                "--vector tables: {lacks}: vector instructions of the CPU model {} are computed by tables, with the same results and more \
                 slowly",
                model.name
            );
            Vectors::Tables
        }
        (Some(choice), _) => choice.into(),
    }
}

/// Says that KVM was asked for where it interprets. Once everything else is as it should be: what is refused is one line.
pub(super) fn warn_of_slowness(config: &MachineConfig, host: &Host) {
    if config.engine == EngineChoice::Kvm
        && let Err(why @ KvmError::Interprets { .. }) = host.virtualizes()
    {
        warn!("{KVM}: {why}");
    }
}
