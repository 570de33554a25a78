//! The local APIC, in xAPIC mode (a page of memory) and x2APIC mode (MSRs). SDM Vol. 3A chapter 11 "Advanced Programmable
//! Interrupt Controller (APIC)".
//!
//! # Theory
//! Interrupts arrive (from the bus, from a local source through its LVT entry, from the CPU itself) and set a bit in IRR. The
//! highest one whose class is above the processor priority (PPR: the higher of TPR and of what is in service) may be delivered;
//! the CPU's acknowledge moves it from IRR to ISR, and the EOI takes it out of there. NMI, SMI, INIT, start-up and ExtINT pass by
//! all that.
//!
//! # Practice
//! A write hands back what it asks of others ([`Action`]); a message hands back what it does to the CPU ([`Signal`]). Timers are
//! kept as the ns at which they started, and counts are worked out when somebody asks.
//!
//! # Left out
//! Focus processors, the APIC bus of P6 and Pentium (checksum and accept errors), and software changes of the APIC ID, which
//! "some processors permit" (11.4.6 "Local APIC ID").

use serde::{Deserialize, Serialize};
use x86::model::CpuModel;
use x86::msr::{IA32_APIC_BASE, IA32_MCG_CAP, IA32_TSC_DEADLINE, IA32_X2APIC_BASE, MsrFault};

use super::apic_message::{ApicMessage, Delivery, Destination};

/// The last MSR that is reserved for the x2APIC. Table 11-6 ends at 83FH; up to here there is nothing else.
pub const X2APIC_LAST: u32 = 0x8ff;
/// Where the page is after reset.
pub const DEFAULT_BASE: u64 = 0xfee0_0000;

const MCG_CMCI_P: u64 = 1 << 10;

/// IA32_APIC_BASE. SDM Vol. 3A 11.4.4 "Local APIC Status and Location", 11.12.1 "Detecting and Enabling x2APIC Mode".
const BSP: u64 = 1 << 8;
const EXTD: u64 = 1 << 10;
const EN: u64 = 1 << 11;

/// Register numbers: MMIO offset / 16, MSR - 800H. Table 11-1 "Local APIC Register Address Map", Table 11-6.
mod reg {
    pub const ID: u32 = 0x02;
    pub const VERSION: u32 = 0x03;
    pub const TPR: u32 = 0x08;
    pub const APR: u32 = 0x09;
    pub const PPR: u32 = 0x0a;
    pub const EOI: u32 = 0x0b;
    pub const RRD: u32 = 0x0c;
    pub const LDR: u32 = 0x0d;
    pub const DFR: u32 = 0x0e;
    pub const SVR: u32 = 0x0f;
    pub const ISR: u32 = 0x10;
    pub const TMR: u32 = 0x18;
    pub const IRR: u32 = 0x20;
    pub const ESR: u32 = 0x28;
    pub const LVT_CMCI: u32 = 0x2f;
    pub const ICR_LOW: u32 = 0x30;
    pub const ICR_HIGH: u32 = 0x31;
    pub const LVT_TIMER: u32 = 0x32;
    pub const LVT_ERROR: u32 = 0x37;
    pub const INITIAL_COUNT: u32 = 0x38;
    pub const CURRENT_COUNT: u32 = 0x39;
    pub const DIVIDE: u32 = 0x3e;
    pub const SELF_IPI: u32 = 0x3f;
}

/// Local vector table entries. SDM Vol. 3A 11.5.1 "Local Vector Table". The order is that of the registers from 320H, with CMCI
/// (2F0H) last.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lvt {
    /// The APIC timer.
    Timer,
    /// The thermal sensor.
    Thermal,
    /// Performance-monitoring counter overflow (LVTPC).
    Performance,
    /// Pin LINT0.
    Lint0,
    /// Pin LINT1.
    Lint1,
    /// An error that the APIC itself found.
    Error,
    /// Corrected machine-check error.
    Cmci,
}

const LVTS: usize = 7;

const LVT_DELIVERY_STATUS: u32 = 1 << 12;
const LVT_REMOTE_IRR: u32 = 1 << 14;
const LVT_LEVEL: u32 = 1 << 15;
const LVT_MASKED: u32 = 1 << 16;
const LVT_PERIODIC: u32 = 1 << 17;
const LVT_TSC_DEADLINE: u32 = 1 << 18;
const LVT_TIMER_MODE: u32 = LVT_PERIODIC | LVT_TSC_DEADLINE;

impl Lvt {
    fn from_register(register: u32) -> Option<Lvt> {
        Some(match register {
            reg::LVT_TIMER => Lvt::Timer,
            0x33 => Lvt::Thermal,
            0x34 => Lvt::Performance,
            0x35 => Lvt::Lint0,
            0x36 => Lvt::Lint1,
            reg::LVT_ERROR => Lvt::Error,
            reg::LVT_CMCI => Lvt::Cmci,
            _ => return None,
        })
    }

    /// Figure 11-8 "Local Vector Table (LVT)": the bits that software can write.
    fn writable(self, caps: &LapicCaps) -> u32 {
        match self {
            Lvt::Timer if caps.tsc_deadline => 0xff | LVT_MASKED | LVT_PERIODIC | LVT_TSC_DEADLINE,
            Lvt::Timer => 0xff | LVT_MASKED | LVT_PERIODIC,
            Lvt::Error => 0xff | LVT_MASKED,
            Lvt::Thermal | Lvt::Performance | Lvt::Cmci => 0x7ff | LVT_MASKED,
            Lvt::Lint0 | Lvt::Lint1 => 0xa7ff | LVT_MASKED,
        }
    }

    /// Bits that are there but read-only: writing them is no reserved-bit violation.
    fn read_only(self) -> u32 {
        match self {
            Lvt::Lint0 | Lvt::Lint1 => LVT_DELIVERY_STATUS | LVT_REMOTE_IRR,
            _ => LVT_DELIVERY_STATUS,
        }
    }
}

/// Spurious-interrupt vector register. SDM Vol. 3A 11.9 "Spurious Interrupt".
const SVR_ENABLE: u32 = 1 << 8;
const SVR_NO_EOI_BROADCAST: u32 = 1 << 12;

/// Error status register. SDM Vol. 3A 11.5.3 "Error Handling".
const ESR_REDIRECTIBLE_IPI: u32 = 1 << 4;
const ESR_SEND_ILLEGAL_VECTOR: u32 = 1 << 5;
const ESR_RECEIVE_ILLEGAL_VECTOR: u32 = 1 << 6;
const ESR_ILLEGAL_REGISTER: u32 = 1 << 7;

/// Interrupt command register. SDM Vol. 3A 11.6.1 "Interrupt Command Register (ICR)".
const ICR_LOGICAL: u64 = 1 << 11;
/// Delivery status: read-only, and messages here leave at once.
const ICR_BUSY: u64 = 1 << 12;
const ICR_ASSERT: u64 = 1 << 14;
const ICR_LEVEL: u64 = 1 << 15;
const ICR_WRITABLE: u64 = 0x000c_cfff;

/// What the CPU model says about its local APIC.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LapicCaps {
    /// The timer's input frequency in kHz, before the divider.
    pub timer_khz: u32,
    /// The time-stamp counter's frequency in kHz.
    pub tsc_khz: u32,
    /// x2APIC mode: CPUID.01H:ECX\[21\].
    pub x2apic: bool,
    /// The timer's TSC-deadline mode: CPUID.01H:ECX\[24\].
    pub tsc_deadline: bool,
    /// The CMCI entry of the LVT: IA32_MCG_CAP\[10\].
    pub cmci: bool,
    /// EOI broadcasts can be suppressed: bit 24 of the version register. Parts with x2APIC have it.
    pub suppress_eoi_broadcast: bool,
    /// Bits of a physical address: CPUID.80000008H:EAX\[7:0\], or 36.
    pub physical_bits: u32,
}

impl LapicCaps {
    /// Reads the capabilities off a model's CPUID and MSR rows.
    pub fn of(model: &CpuModel) -> LapicCaps {
        let features = model.features();
        LapicCaps {
            timer_khz: model.apic_timer_khz,
            tsc_khz: model.tsc_khz,
            x2apic: features.x2apic(),
            tsc_deadline: features.tsc_deadline(),
            cmci: model.msr(IA32_MCG_CAP).is_some_and(|row| row.reset & MCG_CMCI_P != 0),
            suppress_eoi_broadcast: features.x2apic(),
            physical_bits: model.physical_bits(),
        }
    }

    fn max_lvt(&self) -> u32 {
        if self.cmci { 6 } else { 5 }
    }
}

/// What a write asks of somebody else.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// Send this message to the destination in it.
    Send(ApicMessage),
    /// Send this message to every APIC but the sender.
    SendOthers(ApicMessage),
    /// Tell the IOAPICs that this vector is at an end.
    Eoi(u8),
}

/// What an interrupt does to the CPU at once, past IRR and priorities.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Signal {
    /// INIT; the APIC has reset itself.
    Init,
    /// Start-up IPI: execution starts at page `vector`, if the CPU waits for one.
    StartUp(u8),
    /// System-management interrupt.
    Smi,
}

/// What a read or write met.
enum Access {
    /// There is no such register.
    Reserved,
    /// A bit was written that must be 0; matters in x2APIC mode only.
    ReservedBit,
}

/// The counting timer, running: `first` ticks from `start`, and then, if periodic, again and again the initial count.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Countdown {
    start: u64,
    first: u32,
}

/// 256 bits, one for each vector.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
struct Vectors([u32; 8]);

impl Vectors {
    fn set(&mut self, vector: u8) {
        self.0[usize::from(vector >> 5)] |= 1 << (vector & 31);
    }

    fn clear(&mut self, vector: u8) {
        self.0[usize::from(vector >> 5)] &= !(1 << (vector & 31));
    }

    fn has(&self, vector: u8) -> bool {
        self.0[usize::from(vector >> 5)] & (1 << (vector & 31)) != 0
    }

    fn highest(&self) -> Option<u8> {
        let word = self.0.iter().rposition(|w| *w != 0)?;
        Some((word as u32 * 32 + 31 - self.0[word].leading_zeros()) as u8)
    }
}

/// The local APIC's registers: its whole state.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LapicState {
    id: u32,
    base: u64,
    tpr: u8,
    ldr: u32,
    dfr: u32,
    svr: u32,
    isr: Vectors,
    tmr: Vectors,
    irr: Vectors,
    /// What a read of ESR shows.
    esr: u32,
    /// Errors since the last write of ESR.
    errors: u32,
    icr: u64,
    lvt: [u32; LVTS],
    initial_count: u32,
    divide: u32,
    countdown: Option<Countdown>,
    /// IA32_TSC_DEADLINE; 0 is disarmed.
    deadline: u64,
    /// Guest TSC minus the ticks of virtual time.
    tsc_offset: u64,
    /// Pins LINT0 and LINT1.
    lint: [bool; 2],
    /// An NMI waits for the CPU.
    nmi: bool,
    /// An ExtINT message waits for the CPU.
    ext_int: bool,
    /// Signals for the CPU that nobody has fetched: from LVT entries. INIT, SMI.
    pending_init: bool,
    pending_smi: bool,
    now: u64,
}

/// One CPU's local APIC.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Lapic {
    caps: LapicCaps,
    s: LapicState,
}

impl Lapic {
    /// An APIC after power-up: globally enabled in xAPIC mode, software-disabled, everything masked.
    pub fn new(caps: LapicCaps, id: u32, bsp: bool) -> Lapic {
        let caps = LapicCaps {
            timer_khz: caps.timer_khz.max(1),
            tsc_khz: caps.tsc_khz.max(1),
            ..caps
        };
        let s = LapicState {
            id,
            base: DEFAULT_BASE | EN | if bsp { BSP } else { 0 },
            tpr: 0,
            ldr: 0,
            dfr: u32::MAX,
            svr: 0xff,
            isr: Vectors::default(),
            tmr: Vectors::default(),
            irr: Vectors::default(),
            esr: 0,
            errors: 0,
            icr: 0,
            lvt: [LVT_MASKED; LVTS],
            initial_count: 0,
            divide: 0,
            countdown: None,
            deadline: 0,
            tsc_offset: 0,
            lint: [false; 2],
            nmi: false,
            ext_int: false,
            pending_init: false,
            pending_smi: false,
            now: 0,
        };
        Lapic { caps, s }
    }

    /// Its processor has taken an INIT.
    pub fn init(&mut self) {
        self.reset_registers();
    }

    /// Puts the registers back as INIT and a global disable do: all but ID and IA32_APIC_BASE.
    /// SDM Vol. 3A 11.4.7.3 "Local APIC State After an INIT Reset ('Wait-for-SIPI' State)".
    fn reset_registers(&mut self) {
        let fresh = Lapic::new(self.caps.clone(), self.s.id, false).s;
        self.s = LapicState {
            base: self.s.base,
            tsc_offset: self.s.tsc_offset,
            lint: self.s.lint,
            now: self.s.now,
            ..fresh
        };
    }

    /// Leaves the APIC as firmware hands it over on the boot CPU: software-enabled, 8259 interrupts through LINT0, NMI through
    /// LINT1. MultiProcessor Specification 3.6.2.2 "Virtual Wire Mode".
    pub fn set_virtual_wire(&mut self) {
        self.s.svr |= SVR_ENABLE;
        self.s.lvt[Lvt::Lint0 as usize] = 0x700;
        self.s.lvt[Lvt::Lint1 as usize] = 0x400;
    }

    /// The x2APIC ID.
    pub fn id(&self) -> u32 {
        self.s.id
    }

    /// IA32_APIC_BASE.EN; while it is 0, CPUID.01H:EDX\[9\] reads 0.
    pub fn enabled(&self) -> bool {
        self.s.base & EN != 0
    }

    /// x2APIC mode.
    pub fn x2apic(&self) -> bool {
        self.s.base & EXTD != 0
    }

    /// Physical address of the register page; `None` in x2APIC mode and while disabled.
    pub fn page(&self) -> Option<u64> {
        (self.s.base & (EN | EXTD) == EN).then_some(self.s.base & !0xfff)
    }

    fn software_enabled(&self) -> bool {
        self.enabled() && self.s.svr & SVR_ENABLE != 0
    }

    // ---- Priorities and the CPU's side -------------------------------------------------------------------------------

    /// Processor priority. SDM Vol. 3A 11.8.3.1 "Task and Processor Priorities".
    pub fn ppr(&self) -> u8 {
        let serving = self.s.isr.highest().unwrap_or(0);
        if self.s.tpr >> 4 >= serving >> 4 {
            self.s.tpr
        } else {
            serving & 0xf0
        }
    }

    /// Arbitration priority, as parts that had the register worked it out.
    fn apr(&self) -> u8 {
        let serving = self.s.isr.highest().unwrap_or(0) >> 4;
        let requested = self.s.irr.highest().unwrap_or(0) >> 4;
        let task = self.s.tpr >> 4;
        if task >= requested && task > serving {
            self.s.tpr
        } else {
            (task & serving).max(requested) << 4
        }
    }

    /// CR8: the task-priority class. SDM Vol. 3A 11.8.6.1 "Interaction of Task Priorities between CR8 and APIC".
    pub fn cr8(&self) -> u8 {
        self.s.tpr >> 4
    }

    /// MOV to CR8 (0 to 15).
    pub fn set_cr8(&mut self, class: u8) {
        self.s.tpr = class << 4;
    }

    /// The vector that the CPU would get now, if it let interrupts in: 8259 interrupts aside.
    pub fn pending_vector(&self) -> Option<u8> {
        if !self.enabled() {
            return None;
        }
        self.s.irr.highest().filter(|v| v >> 4 > self.ppr() >> 4)
    }

    /// Whether an ExtINT is due, whose vector the 8259 has: it bypasses priorities. With the APIC disabled LINT0 is INTR.
    pub fn ext_int_pending(&self) -> bool {
        if !self.enabled() {
            return self.s.lint[0];
        }
        let entry = self.s.lvt[Lvt::Lint0 as usize];
        let through_lint0 = self.s.lint[0] && entry & LVT_MASKED == 0 && (entry >> 8) & 7 == 7;
        through_lint0 || self.s.ext_int
    }

    /// The CPU has taken the ExtINT.
    pub fn acknowledge_ext_int(&mut self) {
        self.s.ext_int = false;
    }

    /// The CPU takes an interrupt: the vector moves from IRR to ISR. If none is due any more, the spurious vector.
    pub fn acknowledge(&mut self) -> u8 {
        match self.pending_vector() {
            Some(vector) => {
                self.s.irr.clear(vector);
                self.s.isr.set(vector);
                vector
            }
            None => self.s.svr as u8,
        }
    }

    /// Whether an NMI waits.
    pub fn nmi_pending(&self) -> bool {
        self.s.nmi
    }

    /// The CPU takes the NMI.
    pub fn take_nmi(&mut self) -> bool {
        std::mem::take(&mut self.s.nmi)
    }

    /// INIT or SMI raised by a local source since the last call.
    pub fn take_signal(&mut self) -> Option<Signal> {
        if std::mem::take(&mut self.s.pending_init) {
            return Some(Signal::Init);
        }
        std::mem::take(&mut self.s.pending_smi).then_some(Signal::Smi)
    }

    // ---- Interrupts coming in ----------------------------------------------------------------------------------------

    /// Whether a message with this destination is for this APIC.
    pub fn addressed(&self, destination: Destination) -> bool {
        if !self.enabled() {
            return false;
        }
        match destination {
            Destination::All => true,
            Destination::Physical(id) if self.x2apic() => id == self.s.id,
            // The xAPIC ID is the low eight bits.
            Destination::Physical(id) => id == self.s.id & 0xff,
            Destination::Logical(mda) => self.logical_match(mda),
        }
    }

    /// SDM Vol. 3A 11.6.2.2 "Logical Destination Mode", 11.12.10.2 "Deriving Logical x2APIC ID from the Local x2APIC ID".
    fn logical_match(&self, mda: u32) -> bool {
        let ldr = self.read_ldr();
        if self.x2apic() {
            return mda >> 16 == ldr >> 16 && mda & ldr & 0xffff != 0;
        }
        let (mda, ldr) = (mda as u8, (ldr >> 24) as u8);
        match self.s.dfr >> 28 {
            0xf => mda & ldr != 0,
            // Cluster model: FH in the cluster field of a message addresses all of them.
            0x0 => (mda >> 4 == ldr >> 4 || mda >> 4 == 0xf) && mda & ldr & 0xf != 0,
            _ => false,
        }
    }

    /// Takes a message that is addressed to this APIC.
    pub fn receive(&mut self, message: ApicMessage) -> Option<Signal> {
        if !self.enabled() {
            return None;
        }
        match message.delivery {
            Delivery::Fixed | Delivery::LowestPriority => self.request(message.vector, message.level),
            Delivery::Nmi => self.s.nmi = true,
            Delivery::ExtInt => self.s.ext_int = true,
            Delivery::Smi => return Some(Signal::Smi),
            // The processor may hold it off: see `init`.
            Delivery::Init => return Some(Signal::Init),
            Delivery::StartUp => return Some(Signal::StartUp(message.vector)),
        }
        None
    }

    /// Sets a vector in IRR. A software-disabled APIC takes none: 11.4.7.2 "Local APIC State After It Has Been Software Disabled".
    fn request(&mut self, vector: u8, level: bool) {
        if !self.software_enabled() {
            return;
        }
        if vector < 16 {
            self.error(ESR_RECEIVE_ILLEGAL_VECTOR);
            return;
        }
        self.s.irr.set(vector);
        if level {
            self.s.tmr.set(vector);
        } else {
            self.s.tmr.clear(vector);
        }
    }

    /// Records an error; a new one goes through the error LVT entry.
    fn error(&mut self, bit: u32) {
        let new = self.s.errors & bit == 0;
        self.s.errors |= bit;
        if new {
            self.raise(Lvt::Error);
        }
    }

    /// A local source fires. Returns whether it got past the mask.
    pub fn raise(&mut self, source: Lvt) -> bool {
        let entry = self.s.lvt[source as usize];
        if !self.enabled() || entry & LVT_MASKED != 0 || (source == Lvt::Cmci && !self.caps.cmci) {
            return false;
        }
        if source == Lvt::Performance {
            // SDM Vol. 3B "Generating an Interrupt on Overflow": the APIC sets the mask, software clears it in its handler.
            self.s.lvt[source as usize] |= LVT_MASKED;
        }
        let level = source == Lvt::Lint0 && entry & LVT_LEVEL != 0;
        // Timer and error entries have no delivery mode and read 000: fixed.
        match Delivery::from_bits(entry >> 8) {
            Some(Delivery::Fixed) => {
                if level {
                    self.s.lvt[source as usize] |= LVT_REMOTE_IRR;
                }
                self.request(entry as u8, level);
            }
            Some(Delivery::Nmi) => self.s.nmi = true,
            Some(Delivery::Smi) => self.s.pending_smi = true,
            Some(Delivery::Init) => self.s.pending_init = true,
            // The line itself is looked at, and only LINT pins have one.
            Some(Delivery::ExtInt) => {}
            Some(Delivery::LowestPriority | Delivery::StartUp) | None => return false,
        }
        true
    }

    /// LVTPC is masked, by software or because an interrupt was delivered through it.
    pub fn performance_masked(&self) -> bool {
        self.s.lvt[Lvt::Performance as usize] & LVT_MASKED != 0
    }

    /// A performance-monitoring interrupt: through LVTPC.
    pub fn pmi(&mut self) -> bool {
        self.raise(Lvt::Performance)
    }

    /// An NMI at the CPU's pin, past the APIC.
    pub fn inject_nmi(&mut self) {
        self.s.nmi = true;
    }

    /// Drives pin LINT0 or LINT1.
    pub fn set_lint(&mut self, pin: usize, high: bool) {
        let Some(line) = self.s.lint.get_mut(pin) else { return };
        let was = std::mem::replace(line, high);
        if !self.enabled() {
            // The pins are INTR and NMI.
            self.s.nmi |= pin == 1 && high && !was;
            return;
        }
        let source = if pin == 0 { Lvt::Lint0 } else { Lvt::Lint1 };
        let entry = self.s.lvt[source as usize];
        let level = source == Lvt::Lint0 && entry & LVT_LEVEL != 0 && (entry >> 8) & 7 == 0;
        if high && if level { entry & LVT_REMOTE_IRR == 0 } else { !was } {
            self.raise(source);
        }
    }

    /// A write to the EOI register. SDM Vol. 3A 11.8.5 "Signaling Interrupt Servicing Completion".
    pub fn end_of_interrupt(&mut self) -> Option<Action> {
        let vector = self.s.isr.highest()?;
        self.s.isr.clear(vector);
        let lint0 = self.s.lvt[Lvt::Lint0 as usize];
        if lint0 & LVT_REMOTE_IRR != 0 && lint0 as u8 == vector {
            self.s.lvt[Lvt::Lint0 as usize] &= !LVT_REMOTE_IRR;
            if self.s.lint[0] {
                self.set_lint(0, true);
            }
            return None;
        }
        let broadcast = self.s.tmr.has(vector) && self.s.svr & SVR_NO_EOI_BROADCAST == 0;
        broadcast.then_some(Action::Eoi(vector))
    }

    // ---- Time --------------------------------------------------------------------------------------------------------

    /// SDM Vol. 3A Figure 11-10 "Divide Configuration Register".
    fn divider(&self) -> u64 {
        match (self.s.divide & 3) | ((self.s.divide >> 1) & 4) {
            7 => 1,
            n => 2 << n,
        }
    }

    /// Timer ticks in `ns`.
    fn ticks(&self, ns: u64) -> u64 {
        (u128::from(ns) * u128::from(self.caps.timer_khz) / (1_000_000 * u128::from(self.divider()))) as u64
    }

    /// The first ns by which `ticks` timer ticks have passed.
    fn ns_of(&self, ticks: u64) -> u64 {
        let ns = (u128::from(ticks) * 1_000_000 * u128::from(self.divider())).div_ceil(u128::from(self.caps.timer_khz));
        ns.try_into().unwrap_or(u64::MAX)
    }

    fn timer_mode(&self) -> u32 {
        self.s.lvt[Lvt::Timer as usize] & LVT_TIMER_MODE
    }

    /// 10B is TSC-deadline; 11B is reserved and counts nothing either.
    fn deadline_mode(&self) -> bool {
        self.timer_mode() & LVT_TSC_DEADLINE != 0
    }

    /// How often the counter has reached zero by `now`.
    fn expirations(&self, countdown: Countdown, now: u64) -> u64 {
        let elapsed = self.ticks(now.saturating_sub(countdown.start));
        match elapsed.checked_sub(u64::from(countdown.first)) {
            None => 0,
            Some(past) if self.timer_mode() == LVT_PERIODIC => 1 + past / u64::from(self.s.initial_count.max(1)),
            Some(_) => 1,
        }
    }

    fn current_count(&self) -> u32 {
        let Some(countdown) = self.s.countdown else { return 0 };
        if self.deadline_mode() {
            return 0;
        }
        let elapsed = self.ticks(self.s.now.saturating_sub(countdown.start));
        match elapsed.checked_sub(u64::from(countdown.first)) {
            None => countdown.first - elapsed as u32,
            Some(past) if self.timer_mode() == LVT_PERIODIC => {
                let period = u64::from(self.s.initial_count.max(1));
                (period - past % period) as u32
            }
            Some(_) => 0,
        }
    }

    /// The guest's TSC at `now` ns, as far as whole ns can tell.
    fn tsc(&self, now: u64) -> u64 {
        self.tsc_ticks(now).wrapping_add(self.s.tsc_offset)
    }

    fn tsc_ticks(&self, now: u64) -> u64 {
        (u128::from(now) * u128::from(self.caps.tsc_khz) / 1_000_000) as u64
    }

    /// The difference between the guest's TSC (IA32_TSC, IA32_TSC_ADJUST) and the ticks of virtual time, modulo 2^64.
    pub fn set_tsc_offset(&mut self, offset: u64) {
        self.s.tsc_offset = offset;
    }

    /// Moves to `now` ns; a timer that has expired on the way fires, once.
    pub fn advance(&mut self, now: u64) {
        let from = self.s.now;
        if now < from {
            return;
        }
        self.s.now = now;
        if self.deadline_mode() {
            if self.s.deadline != 0 && self.timer_mode() == LVT_TSC_DEADLINE && self.tsc(now) >= self.s.deadline {
                self.s.deadline = 0;
                self.raise(Lvt::Timer);
            }
        } else if let Some(countdown) = self.s.countdown
            && self.expirations(countdown, now) > self.expirations(countdown, from)
        {
            if self.timer_mode() != LVT_PERIODIC {
                self.s.countdown = None;
            }
            self.raise(Lvt::Timer);
        }
    }

    /// The ns at which the timer will next fire; `None` while that would be without effect.
    pub fn next_event(&self) -> Option<u64> {
        let entry = self.s.lvt[Lvt::Timer as usize];
        if !self.enabled() || entry & LVT_MASKED != 0 {
            return None;
        }
        let at = if self.deadline_mode() {
            if self.s.deadline == 0 || self.timer_mode() != LVT_TSC_DEADLINE {
                return None;
            }
            let left = self.s.deadline.saturating_sub(self.tsc(self.s.now));
            let ticks = u128::from(self.tsc_ticks(self.s.now)) + u128::from(left);
            (ticks * 1_000_000)
                .div_ceil(u128::from(self.caps.tsc_khz))
                .try_into()
                .unwrap_or(u64::MAX)
        } else {
            let countdown = self.s.countdown?;
            let past = self.expirations(countdown, self.s.now);
            let period = u64::from(self.s.initial_count);
            let ticks = u64::from(countdown.first).saturating_add(past.saturating_mul(period));
            countdown.start.saturating_add(self.ns_of(ticks))
        };
        Some(at.max(self.s.now.saturating_add(1)))
    }

    /// Goes on counting from the present count, after a change of divider or mode.
    fn restart_countdown(&mut self, count: u32) {
        self.s.countdown = (count != 0).then_some(Countdown {
            start: self.s.now,
            first: count,
        });
    }

    // ---- Registers ---------------------------------------------------------------------------------------------------

    fn read_ldr(&self) -> u32 {
        if self.x2apic() {
            (self.s.id >> 4) << 16 | 1 << (self.s.id & 0xf)
        } else {
            self.s.ldr
        }
    }

    fn version(&self) -> u32 {
        0x15 | self.caps.max_lvt() << 16 | u32::from(self.caps.suppress_eoi_broadcast) << 24
    }

    fn read_register(&self, register: u32) -> Result<u32, Access> {
        let word = |v: &Vectors| v.0[(register & 7) as usize];
        Ok(match register {
            reg::ID if self.x2apic() => self.s.id,
            reg::ID => self.s.id << 24,
            reg::VERSION => self.version(),
            reg::TPR => u32::from(self.s.tpr),
            reg::APR if !self.x2apic() => u32::from(self.apr()),
            reg::PPR => u32::from(self.ppr()),
            // Write-only.
            reg::EOI if !self.x2apic() => 0,
            reg::RRD if !self.x2apic() => 0,
            reg::LDR => self.read_ldr(),
            reg::DFR if !self.x2apic() => self.s.dfr,
            reg::SVR => self.s.svr,
            reg::ISR..=0x17 => word(&self.s.isr),
            reg::TMR..=0x1f => word(&self.s.tmr),
            reg::IRR..=0x27 => word(&self.s.irr),
            reg::ESR => self.s.esr,
            reg::LVT_CMCI if !self.caps.cmci => return Err(Access::Reserved),
            reg::ICR_LOW => self.s.icr as u32,
            reg::ICR_HIGH if !self.x2apic() => (self.s.icr >> 32) as u32,
            reg::INITIAL_COUNT => self.s.initial_count,
            reg::CURRENT_COUNT => self.current_count(),
            reg::DIVIDE => self.s.divide,
            _ => match Lvt::from_register(register) {
                Some(lvt) => self.s.lvt[lvt as usize],
                None => return Err(Access::Reserved),
            },
        })
    }

    /// Writes a 32-bit register. In x2APIC mode the caller has handled ICR.
    fn write_register(&mut self, register: u32, value: u32) -> Result<Option<Action>, Access> {
        // Reserved bits are dropped in xAPIC mode and faults in x2APIC mode.
        let checked = |allowed: u32, x2apic: bool| match value & !allowed {
            0 => Ok(value),
            _ if x2apic => Err(Access::ReservedBit),
            _ => Ok(value & allowed),
        };
        let x2apic = self.x2apic();
        match register {
            reg::TPR => self.s.tpr = checked(0xff, x2apic)? as u8,
            reg::EOI => {
                checked(if x2apic { 0 } else { u32::MAX }, x2apic)?;
                return Ok(self.end_of_interrupt());
            }
            reg::LDR if !x2apic => self.s.ldr = value & 0xff00_0000,
            reg::DFR if !x2apic => self.s.dfr = value | 0x0fff_ffff,
            reg::SVR => self.write_svr(checked(self.svr_writable(), x2apic)?),
            reg::ESR => {
                checked(if x2apic { 0 } else { u32::MAX }, x2apic)?;
                self.s.esr = std::mem::take(&mut self.s.errors);
            }
            reg::ICR_LOW if !x2apic => {
                self.s.icr = (self.s.icr & !0xffff_ffff) | (u64::from(value) & ICR_WRITABLE);
                return Ok(self.send());
            }
            reg::ICR_HIGH if !x2apic => {
                self.s.icr = (self.s.icr & 0xffff_ffff) | (u64::from(value & 0xff00_0000) << 32);
            }
            reg::INITIAL_COUNT => {
                // "A write of 0 stops the timer"; in TSC-deadline mode writes are ignored.
                if !self.deadline_mode() {
                    self.s.initial_count = value;
                    self.restart_countdown(value);
                }
            }
            reg::DIVIDE => {
                let value = checked(0xb, x2apic)?;
                let left = self.current_count();
                self.s.divide = value;
                if self.s.countdown.is_some() {
                    self.restart_countdown(left);
                }
            }
            reg::SELF_IPI if x2apic => {
                let vector = checked(0xff, x2apic)? as u8;
                if vector < 16 {
                    self.error(ESR_SEND_ILLEGAL_VECTOR);
                }
                self.request(vector, false);
            }
            // Read-only registers: no error in xAPIC mode, #GP in x2APIC mode.
            reg::ID | reg::VERSION | reg::APR | reg::PPR | reg::RRD | reg::CURRENT_COUNT | reg::ISR..=0x27
                if !x2apic => {}
            _ => match Lvt::from_register(register) {
                Some(Lvt::Cmci) if !self.caps.cmci => return Err(Access::Reserved),
                Some(lvt) => {
                    let writable = lvt.writable(&self.caps);
                    let value = checked(writable | lvt.read_only(), x2apic)? & writable;
                    self.write_lvt(lvt, value);
                }
                None => return Err(Access::Reserved),
            },
        }
        Ok(None)
    }

    fn svr_writable(&self) -> u32 {
        // Bit 9 is focus-processor checking, which processors since the Pentium 4 do not have.
        0x1ff
            | if self.caps.suppress_eoi_broadcast {
                SVR_NO_EOI_BROADCAST
            } else {
                0
            }
    }

    fn write_svr(&mut self, value: u32) {
        self.s.svr = value;
        if value & SVR_ENABLE == 0 {
            // "The mask bits for all the LVT entries are set. Attempts to reset these bits will be ignored."
            for entry in &mut self.s.lvt {
                *entry |= LVT_MASKED;
            }
        }
    }

    fn write_lvt(&mut self, lvt: Lvt, value: u32) {
        let old = self.s.lvt[lvt as usize];
        let mut new = value | (old & lvt.read_only());
        if !self.software_enabled() {
            new |= LVT_MASKED;
        }
        if lvt == Lvt::Timer && (old ^ new) & LVT_TIMER_MODE != 0 {
            let left = self.current_count();
            self.s.lvt[lvt as usize] = new;
            if (old ^ new) & LVT_TSC_DEADLINE != 0 {
                // "Transitioning between TSC-deadline mode and other timer modes disarms the timer."
                self.s.countdown = None;
                self.s.deadline = 0;
            } else if self.s.countdown.is_some() {
                // 11.5.4.1 "TSC-Deadline Mode" says "disarms" of every change of mode. On the parts that holds for changes to and
                // from TSC-deadline; between one-shot and periodic the counter goes on from where it is, and one that has
                // reached zero stays there (kvm-unit-tests, apic.c, test_apic_change_mode).
                self.restart_countdown(left);
            }
            return;
        }
        if new & LVT_LEVEL == 0 {
            new &= !LVT_REMOTE_IRR;
        }
        self.s.lvt[lvt as usize] = new;
        if lvt == Lvt::Lint0 && self.s.lint[0] && new & (LVT_LEVEL | LVT_MASKED | LVT_REMOTE_IRR) == LVT_LEVEL {
            self.set_lint(0, true);
        }
    }

    /// The message that ICR now stands for.
    fn send(&mut self) -> Option<Action> {
        let icr = self.s.icr;
        let vector = icr as u8;
        let delivery = Delivery::from_bits((icr >> 8) as u32)?;
        let level = icr & ICR_LEVEL != 0;
        if delivery == Delivery::ExtInt {
            // 111 is reserved in ICR.
            return None;
        }
        if delivery == Delivery::Init && level && icr & ICR_ASSERT == 0 {
            // INIT level de-assert is "not supported in the Pentium 4 and Intel Xeon processors".
            return None;
        }
        if delivery == Delivery::LowestPriority && self.x2apic() {
            // 001 is reserved in x2APIC mode; whether an xAPIC sends such IPIs is "model specific", and this one does.
            self.error(ESR_REDIRECTIBLE_IPI);
            return None;
        }
        let vectored = matches!(delivery, Delivery::Fixed | Delivery::LowestPriority);
        if vectored && vector < 16 {
            self.error(ESR_SEND_ILLEGAL_VECTOR);
        }
        let logical = icr & ICR_LOGICAL != 0;
        let destination = if self.x2apic() {
            Destination::from_u32((icr >> 32) as u32, logical)
        } else {
            Destination::from_u8((icr >> 56) as u8, logical)
        };
        // IPIs are edges: "the local APIC ignores the trigger mode" of all but INIT de-assert.
        let message = ApicMessage {
            destination,
            delivery,
            vector,
            level: false,
        };
        // Table 11-3 "Valid Combinations": with "self" and "all including self" only fixed is valid (and lowest priority only
        // with a destination or "all excluding self").
        match (icr >> 18) & 3 {
            0 => Some(Action::Send(message)),
            1 if delivery == Delivery::Fixed => {
                self.request(vector, false);
                None
            }
            2 if delivery == Delivery::Fixed => Some(Action::Send(ApicMessage {
                destination: Destination::All,
                ..message
            })),
            3 => Some(Action::SendOthers(ApicMessage {
                destination: Destination::All,
                ..message
            })),
            _ => None,
        }
    }

    /// Reads `size` bytes at `offset` into the page, in xAPIC mode. Only the first four bytes of every sixteen are registers.
    pub fn read(&mut self, offset: u64, size: u8, now: u64) -> u64 {
        self.advance(now);
        let register = ((offset >> 4) & 0xff) as u32;
        let value = match self.read_register(register) {
            Ok(value) => u64::from(value),
            Err(_) => {
                self.error(ESR_ILLEGAL_REGISTER);
                0
            }
        };
        let byte = offset & 0xf;
        if byte >= 4 {
            0
        } else {
            (value >> (8 * byte)) & crate::bus::all_ones(size)
        }
    }

    /// Writes at `offset` into the page, in xAPIC mode. Accesses that are not 32 bits wide and aligned to 16 bytes are undefined
    /// (11.4.1 "The Local APIC Block Diagram"); here they do nothing, except that a 64-bit one writes its lower half.
    pub fn write(&mut self, offset: u64, size: u8, value: u64, now: u64) -> Option<Action> {
        self.advance(now);
        if offset & 0xf != 0 || size < 4 {
            return None;
        }
        match self.write_register(((offset >> 4) & 0xff) as u32, value as u32) {
            Ok(action) => action,
            Err(_) => {
                self.error(ESR_ILLEGAL_REGISTER);
                None
            }
        }
    }

    /// RDMSR of IA32_APIC_BASE, IA32_TSC_DEADLINE or 800H to 8FFH.
    ///
    /// # Errors
    /// #GP where the manual has it; unclaimed for any other register.
    pub fn read_msr(&mut self, msr: u32, now: u64) -> Result<u64, MsrFault> {
        self.advance(now);
        match msr {
            IA32_APIC_BASE => Ok(self.s.base),
            IA32_TSC_DEADLINE if self.caps.tsc_deadline => Ok(if self.deadline_mode() { self.s.deadline } else { 0 }),
            IA32_X2APIC_BASE..=X2APIC_LAST if self.x2apic() => match msr - IA32_X2APIC_BASE {
                reg::ICR_LOW => Ok(self.s.icr),
                register => self
                    .read_register(register)
                    .map(u64::from)
                    .map_err(|_| MsrFault::GeneralProtection),
            },
            // "Accessing MSR addresses in the range 800H to 8FFH while not in x2APIC mode causes #GP."
            IA32_X2APIC_BASE..=X2APIC_LAST => Err(MsrFault::GeneralProtection),
            _ => Err(MsrFault::Unclaimed),
        }
    }

    /// WRMSR of the same registers.
    ///
    /// # Errors
    /// #GP where the manual has it; unclaimed for any other register.
    pub fn write_msr(&mut self, msr: u32, value: u64, now: u64) -> Result<Option<Action>, MsrFault> {
        self.advance(now);
        match msr {
            IA32_APIC_BASE => self.write_base(value).map(|()| None),
            IA32_TSC_DEADLINE if self.caps.tsc_deadline => {
                // "In other timer modes the MSR reads zero and writes are ignored."
                if self.timer_mode() == LVT_TSC_DEADLINE {
                    self.s.deadline = value;
                    self.advance(now);
                }
                Ok(None)
            }
            IA32_X2APIC_BASE..=X2APIC_LAST if self.x2apic() => self.write_x2apic(msr - IA32_X2APIC_BASE, value),
            IA32_X2APIC_BASE..=X2APIC_LAST => Err(MsrFault::GeneralProtection),
            _ => Err(MsrFault::Unclaimed),
        }
    }

    fn write_x2apic(&mut self, register: u32, value: u64) -> Result<Option<Action>, MsrFault> {
        if register == reg::ICR_LOW {
            let low = value & 0xffff_ffff & !ICR_BUSY;
            if low & !ICR_WRITABLE != 0 {
                return Err(MsrFault::GeneralProtection);
            }
            self.s.icr = value & !ICR_BUSY;
            return Ok(self.send());
        }
        // Every other register has 32 bits. SDM Vol. 3A 11.12.1.3 "Reserved Bit Checking".
        let value = u32::try_from(value).map_err(|_| MsrFault::GeneralProtection)?;
        self.write_register(register, value)
            .map_err(|_| MsrFault::GeneralProtection)
    }

    /// SDM Vol. 3A 11.12.5 "x2APIC State Transitions", Figure 11-27.
    fn write_base(&mut self, value: u64) -> Result<(), MsrFault> {
        let address = ((1 << self.caps.physical_bits.clamp(32, 52)) - 1) & !0xfff;
        let allowed = address | BSP | EN | if self.caps.x2apic { EXTD } else { 0 };
        if value & !allowed != 0 {
            return Err(MsrFault::GeneralProtection);
        }
        let mode = EN | EXTD;
        match (self.s.base & mode, value & mode) {
            // The invalid state; x2APIC straight from disabled; back to xAPIC from x2APIC.
            (_, EXTD) | (0, 0xc00) | (0xc00, EN) => return Err(MsrFault::GeneralProtection),
            (EN | 0xc00, 0) => {
                self.s.base = value;
                self.reset_registers();
            }
            (EN, 0xc00) => {
                self.s.base = value;
                // The upper half of ICR is not preserved.
                self.s.icr &= 0xffff_ffff;
            }
            _ => self.s.base = value,
        }
        Ok(())
    }

    /// The whole state. What the CPU model says is not part of it.
    pub fn state(&self) -> LapicState {
        self.s.clone()
    }

    /// Takes a state back.
    pub fn set_state(&mut self, state: &LapicState) {
        self.s.clone_from(state);
    }
}

#[cfg(test)]
#[path = "lapic_test.rs"]
mod tests;
