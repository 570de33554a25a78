//! The ACPI tables (ACPI Specification 6.5): RSDP, XSDT, FADT, FACS, MADT, MCFG and DSDT.
//!
//! They lie in the BIOS area, where a scan for the root pointer finds them, too.

use acpi_tables::{
    Aml, AmlSink,
    aml::{
        AddressSpace as AmlSpace, AddressSpaceCacheable, Arg, Device, EISAName, Field, FieldAccessType, FieldEntry,
        FieldLockRule, FieldUpdateRule, IO, Interrupt, Memory32Fixed, Method, Name, OpRegion, OpRegionSpace, Package,
        Path, ResourceTemplate, Return, Scope, Store,
    },
    facs::FACS,
    fadt::{FADTBuilder, Flags, PmProfile},
    gas::{AccessSize, AddressSpace, GAS},
    madt::{EnabledStatus, IoApic, ProcessorLocalApic},
    mcfg::MCFG,
    rsdp::Rsdp,
    sdt::Sdt,
    xsdt::XSDT,
};

use super::{
    memory::{Memory, NotRam},
    pci, virtio,
};
use crate::loader::e820::BIOS_START;

/// Where the root pointer is.
pub const RSDP: u64 = BIOS_START;

const OEM: [u8; 6] = *b"MINVMM";
const OEM_TABLE: [u8; 8] = *b"MINIVMM ";
const OEM_REVISION: u32 = 1;

/// What the tables say about the machine. The numbers are those of the devices that answer there.
#[derive(Clone, Copy, Debug)]
pub struct Hardware {
    /// The local APICs' page.
    pub lapic: u32,
    /// The IOAPIC's registers.
    pub ioapic: u32,
    /// The IOAPIC's ID.
    pub ioapic_id: u8,
    /// The number of CPUs; their APIC IDs count from 0.
    pub cpus: u8,
    /// PM1a event block: status at +0, enable at +2.
    pub pm1a_event: u16,
    /// PM1a control register.
    pub pm1a_control: u16,
    /// The PM timer, of 32 bits.
    pub pm_timer: u16,
    /// The reset control register, and what to write to it.
    pub reset: (u16, u8),
    /// SLP_TYP of the soft-off state.
    pub soft_off: u8,
    /// The global system interrupt of the SCI.
    pub sci: u8,
    /// The port of the panic device.
    pub pvpanic: u16,
    /// There is a second serial port.
    pub com2: bool,
    /// How many virtio devices there are over MMIO; [`super::virtio`] says where.
    pub virtio: u8,
    /// How many there are on the PCI bus, as devices 1 and up.
    pub functions: u8,
}

/// Writes the tables and returns the root pointer's address.
pub fn write(memory: &Memory, hardware: &Hardware) -> Result<u64, NotRam> {
    for (address, bytes) in tables(hardware) {
        memory.write(address, &bytes)?;
    }
    Ok(RSDP)
}

/// The tables with their addresses, the root pointer first.
pub fn tables(hardware: &Hardware) -> Vec<(u64, Vec<u8>)> {
    let mut next = RSDP + 0x40;
    let mut tables = Vec::new();
    let mut place = |bytes: Vec<u8>| {
        let address = next;
        // A FACS has to be aligned to 64 bytes; the others do not mind.
        next = (next + bytes.len() as u64).next_multiple_of(64);
        tables.push((address, bytes));
        address
    };
    let facs = place(bytes(&FACS::new()));
    let dsdt = place(dsdt(hardware));
    let fadt = place(bytes(&fadt(hardware, facs, dsdt)));
    let madt = place(madt(hardware));
    let mut mcfg = MCFG::new(OEM, OEM_TABLE, OEM_REVISION);
    mcfg.add_ecam(pci::ECAM, 0, 0, 0);
    let mcfg = place(bytes(&mcfg));
    let mut xsdt = XSDT::new(OEM, OEM_TABLE, OEM_REVISION);
    xsdt.add_entry(fadt);
    xsdt.add_entry(madt);
    xsdt.add_entry(mcfg);
    let xsdt = place(bytes(&xsdt));
    tables.insert(0, (RSDP, bytes(&Rsdp::new(OEM, xsdt))));
    tables
}

fn bytes(table: &dyn Aml) -> Vec<u8> {
    let mut bytes = Vec::new();
    table.to_aml_bytes(&mut bytes);
    bytes
}

/// ACPI 6.5, 5.2.9 "Fixed ACPI Description Table (FADT)".
fn fadt(hardware: &Hardware, facs: u64, dsdt: u64) -> acpi_tables::fadt::FADT {
    // 5.2.9.3 "IA-PC Boot Architecture Flags": legacy devices, and an 8042.
    const LEGACY_DEVICES: u16 = 1 << 0;
    const I8042: u16 = 1 << 1;
    const NO_VGA: u16 = 1 << 2;
    const NO_ASPM: u16 = 1 << 4;
    /// "The index into CMOS RAM of the century": 0 for none.
    const CENTURY: u8 = 0x32;
    let port = |address: u16, bits: u8, access| GAS::new(AddressSpace::SystemIo, bits, 0, access, address.into());

    let mut fadt = FADTBuilder::new(OEM, OEM_TABLE, OEM_REVISION)
        .flag(Flags::Wbinvd)
        .flag(Flags::ProcC1)
        .flag(Flags::PwrButton)
        .flag(Flags::SlpButton)
        .flag(Flags::FixRtc)
        .flag(Flags::TmrValExt)
        .flag(Flags::ResetRegSup)
        .preferred_pm_profile(PmProfile::Desktop);
    // All of this is below 1 MiB, so both the old and the new fields hold it.
    fadt.firmware_ctrl = (facs as u32).into();
    fadt.dsdt = (dsdt as u32).into();
    fadt.x_dsdt = dsdt.into();
    // There is no SMI command port, so ACPI mode is always on (5.2.9, SMI_CMD).
    fadt.sci_int = u16::from(hardware.sci).into();
    fadt.pm1a_evt_blk = u32::from(hardware.pm1a_event).into();
    fadt.pm1_evt_len = 4;
    fadt.pm1a_cnt_blk = u32::from(hardware.pm1a_control).into();
    fadt.pm1_cnt_len = 2;
    fadt.pm_tmr_blk = u32::from(hardware.pm_timer).into();
    fadt.pm_tmr_len = 4;
    fadt.x_pm1a_evt_blk = port(hardware.pm1a_event, 32, AccessSize::WordAccess);
    fadt.x_pm1a_cnt_blk = port(hardware.pm1a_control, 16, AccessSize::WordAccess);
    fadt.x_pm_tmr_blk = port(hardware.pm_timer, 32, AccessSize::DwordAccess);
    // More than 100 and 1000 microseconds: there is no C2 and no C3.
    fadt.p_lvl2_lat = 0xfff.into();
    fadt.p_lvl3_lat = 0xfff.into();
    fadt.century = CENTURY;
    fadt.iapc_boot_arch = (LEGACY_DEVICES | I8042 | NO_VGA | NO_ASPM).into();
    let (reset_port, reset_value) = hardware.reset;
    fadt.reset_reg = port(reset_port, 8, AccessSize::ByteAccess);
    fadt.reset_value = reset_value;
    fadt.finalize()
}

/// ACPI 6.5, 5.2.12 "Multiple APIC Description Table (MADT)". The crate's own builder cannot say that there are 8259s.
fn madt(hardware: &Hardware) -> Vec<u8> {
    const REVISION: u8 = 5;
    const PCAT_COMPAT: u32 = 1 << 0;
    /// MPS INTI flags: polarity in bits 1:0 (1 active high), trigger mode in 3:2 (3 level); 0 is what ISA has.
    const CONFORMS: [u8; 2] = [0, 0];
    const LEVEL_HIGH: [u8; 2] = [0b1101, 0];

    let mut madt = Sdt::new(*b"APIC", 44, REVISION, OEM, OEM_TABLE, OEM_REVISION);
    madt.write_u32(36, hardware.lapic);
    madt.write_u32(40, PCAT_COMPAT);
    for id in 0..hardware.cpus {
        madt.append_slice(&bytes(&ProcessorLocalApic::new(id, id, EnabledStatus::Enabled)));
    }
    madt.append_slice(&bytes(&IoApic::new(hardware.ioapic_id, hardware.ioapic, 0)));
    // 5.2.12.5 "Interrupt Source Override Structure": type, length, bus, source, GSI, flags.
    let overridden = |source: u8, gsi: u8, flags: [u8; 2]| [2, 10, 0, source, gsi, 0, 0, 0, flags[0], flags[1]];
    // The PIT's line goes to the IOAPIC's third pin, since the first is for the 8259s.
    madt.append_slice(&overridden(0, 2, CONFORMS));
    madt.append_slice(&overridden(hardware.sci, hardware.sci, LEVEL_HIGH));
    // 5.2.12.7 "Local APIC NMI Structure": LINT1 of all processors.
    madt.append_slice(&[4, 6, 0xff, 0, 0, 1]);
    madt.as_slice().to_vec()
}

/// An interrupt line by its ISA number (ACPI 6.5, 6.4.2.1 "IRQ Descriptor"), which the crate lacks.
struct Irq(u8);

impl Aml for Irq {
    fn to_aml_bytes(&self, sink: &mut dyn AmlSink) {
        sink.byte(0x22);
        sink.word(1 << self.0);
    }
}

/// The devices that have no other way to be found, and the sleep type that powers off.
fn dsdt(hardware: &Hardware) -> Vec<u8> {
    const REVISION: u8 = 2;
    let mut dsdt = Sdt::new(*b"DSDT", 36, REVISION, OEM, OEM_TABLE, OEM_REVISION);
    let s5 = Package::new(vec![&hardware.soft_off, &0u8, &0u8, &0u8]);
    dsdt.append_slice(&bytes(&Name::new(Path::new("\\_S5_"), &s5)));

    let ports = |first: u16, count: u8| IO::new(first, first, 1, count);
    let mut code = Vec::new();
    // IDs as the list of Plug and Play device IDs has them.
    device(
        &mut code,
        "PIC_",
        "PNP0000",
        vec![&ports(0x20, 2), &ports(0xa0, 2), &Irq(2)],
    );
    device(&mut code, "TMR_", "PNP0100", vec![&ports(0x40, 4), &Irq(0)]);
    device(&mut code, "SPKR", "PNP0800", vec![&ports(0x61, 1)]);
    device(&mut code, "RTC_", "PNP0B00", vec![&ports(0x70, 2), &Irq(8)]);
    device(
        &mut code,
        "KBD_",
        "PNP0303",
        vec![&ports(0x60, 1), &ports(0x64, 1), &Irq(1)],
    );
    device(&mut code, "COM1", "PNP0501", vec![&ports(0x3f8, 8), &Irq(4)]);
    if hardware.com2 {
        device(&mut code, "COM2", "PNP0501", vec![&ports(0x2f8, 8), &Irq(3)]);
    }
    pvpanic_device(&mut code, hardware.pvpanic);
    for index in 0..hardware.virtio {
        virtio_device(&mut code, index);
    }
    host_bridge(&mut code, hardware.functions);
    dsdt.append_slice(&Scope::raw(Path::new("\\_SB_"), code));
    dsdt.as_slice().to_vec()
}

/// A device with a Plug and Play ID and its resources.
fn device(code: &mut Vec<u8>, name: &str, id: &str, resources: Vec<&dyn Aml>) {
    let id = EISAName::new(id);
    let hid = Name::new(Path::new("_HID"), &id);
    let resources = ResourceTemplate::new(resources);
    let crs = Name::new(Path::new("_CRS"), &resources);
    Device::new(Path::new(name), vec![&hid, &crs]).to_aml_bytes(code);
}

/// The panic device: QEMU, docs/specs/pvpanic.rst "ACPI Interface". Drivers older than Linux 5.12 look at _STA, later ones at _CRS alone.
fn pvpanic_device(code: &mut Vec<u8>, port: u16) {
    // 6.3.7 "_STA (Device Status)": present, enabled and working, but nothing to show to people.
    const STATUS: u8 = 0b1011;
    let hid = Name::new(Path::new("_HID"), &"QEMU0001");
    let sta = Name::new(Path::new("_STA"), &STATUS);
    let ports = IO::new(port, port, 1, 1);
    let resources = ResourceTemplate::new(vec![&ports]);
    let crs = Name::new(Path::new("_CRS"), &resources);
    let region = OpRegion::new(Path::new("PEOR"), OpRegionSpace::SystemIO, &port, &1u8);
    let fields = vec![FieldEntry::Named(*b"PEPT", 8)];
    let field = Field::new(
        Path::new("PEOR"),
        FieldAccessType::Byte,
        FieldLockRule::NoLock,
        FieldUpdateRule::Preserve,
        fields,
    );
    let register = Path::new("PEPT");
    let value = Return::new(&register);
    let read = Method::new(Path::new("RDPT"), 0, false, vec![&value]);
    let store = Store::new(&register, &Arg(0));
    let write = Method::new(Path::new("WRPT"), 1, false, vec![&store]);
    Device::new(
        Path::new("PEVT"),
        vec![&hid, &sta, &crs, &region, &field, &read, &write],
    )
    .to_aml_bytes(code);
}

/// A virtio device over MMIO, by the ID that Linux's driver has for it.
fn virtio_device(code: &mut Vec<u8>, index: u8) {
    let hid = Name::new(Path::new("_HID"), &"LNRO0005");
    let uid = Name::new(Path::new("_UID"), &index);
    let base = virtio::address(index.into()) as u32;
    let registers = Memory32Fixed::new(true, base, virtio::SLOT as u32);
    // A level, active high, and shared where there are more devices than pins.
    let interrupt = Interrupt::new(true, false, false, true, virtio::gsi(index.into()).into());
    let resources = ResourceTemplate::new(vec![&registers, &interrupt]);
    let crs = Name::new(Path::new("_CRS"), &resources);
    Device::new(Path::new(&format!("VI{index:02X}")), vec![&hid, &uid, &crs]).to_aml_bytes(code);
}

/// The PCI bus: what it passes on, and which global system interrupts its devices' pins lead to (6.2.13 "_PRT (PCI Routing Table)").
/// Configuration space by memory is named as a motherboard resource, as the PCI Firmware Specification asks.
fn host_bridge(code: &mut Vec<u8>, functions: u8) {
    let (express, conventional) = (EISAName::new("PNP0A08"), EISAName::new("PNP0A03"));
    let hid = Name::new(Path::new("_HID"), &express);
    let cid = Name::new(Path::new("_CID"), &conventional);
    let seg = Name::new(Path::new("_SEG"), &0u8);
    let bbn = Name::new(Path::new("_BBN"), &0u8);
    let buses = AmlSpace::new_bus_number(0u16, 0u16);
    let ports = IO::new(0xcf8, 0xcf8, 1, 8);
    let memory = AmlSpace::new_memory(
        AddressSpaceCacheable::NotCacheable,
        true,
        pci::MEMORY as u32,
        pci::MEMORY_LAST as u32,
        None,
    );
    let resources = ResourceTemplate::new(vec![&buses, &ports, &memory]);
    let crs = Name::new(Path::new("_CRS"), &resources);
    let routes: Vec<_> = (0..functions)
        .map(|index| {
            // All functions of a device; pin A is 0; no link device, but the interrupt itself.
            let address = u32::from(index + 1) << 16 | 0xffff;
            (address, virtio::gsi(index.into()))
        })
        .collect();
    let rows: Vec<_> = routes
        .iter()
        .map(|(address, gsi)| Package::new(vec![address, &0u8, &0u8, gsi]))
        .collect();
    let prt = Package::new(rows.iter().map(|row| row as &dyn Aml).collect());
    let prt = Name::new(Path::new("_PRT"), &prt);
    Device::new(Path::new("PCI0"), vec![&hid, &cid, &seg, &bbn, &crs, &prt]).to_aml_bytes(code);
    let ecam = Memory32Fixed::new(true, pci::ECAM as u32, pci::ECAM_LEN as u32);
    device(code, "MCFG", "PNP0C02", vec![&ecam]);
}

#[cfg(test)]
#[path = "acpi_test.rs"]
mod tests;
