//! Instructions of the operating system: control and debug registers, TLB and caches, SYSCALL and its like, CPUID, clocks,
//! random numbers, software interrupts.

use iced_x86::{Code, Mnemonic as M, Register};
use x86::cr::{Cr0, Cr3, Cr4};
use x86::debug::{Dr6, Dr7};
use x86::vmx::controls::Secondary;
use x86::watch::{Change, Far, Flow};

use crate::cpu::{Activity, CS, Cpu, DS, ES, Event, FS, GS, Source, TimedWait, mode, slot};
use crate::flags;
use crate::lower::{End, Lower, attempt};
use crate::op::{Done, Op, Reason, chain, chain_flow};
use crate::segment::rf;
use crate::watch::EventOrigin;

/// Where an instruction that ends its block goes on.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Go {
    /// At this address; nothing needs a look.
    To(u64),
    /// At this address, once the run loop has looked at what changed.
    Look(u64),
    /// At this address, with the exception in `Cpu::event`: a task switch has completed and the new task cannot go on.
    Raise(u64),
}

impl Go {
    /// The same with a look by the run loop, which has something to say.
    fn seen(self) -> Go {
        match self {
            Go::To(rip) => Go::Look(rip),
            go => go,
        }
    }
}

impl Cpu {
    /// Leaves a flow op by the way its instruction asks for.
    #[inline(always)]
    pub(crate) fn go(&mut self, o: &Op, to: Done<Go>) -> *const Op {
        match attempt!(self, o, to) {
            Go::To(rip) => self.jump(rip),
            Go::Look(rip) => self.end(rip, Reason::Look),
            Go::Raise(rip) => self.end(rip, Reason::Fault),
        }
    }

    /// A far transfer: the units hear of it, alone and with the processor already where it leads.
    pub(crate) fn far(&mut self, o: &Op, far: Far, f: impl FnOnce(&mut Cpu, &Op) -> Done<Go>) -> Done<Go> {
        if !self.watched.tell {
            return f(self, o);
        }
        self.drain_records_first()?;
        let (from, cpl) = (self.linear(self.ip(o)), self.cpl);
        let go = f(self, o)?.seen();
        let (Go::To(rip) | Go::Look(rip) | Go::Raise(rip)) = go;
        self.note_far(o, from, cpl, far, rip);
        Ok(go)
    }

    /// Whether an IRET that stays in its code is a record like that of a near branch: kernels make so many of these, to synchronize with
    /// code that was changed, that it should be no reason to leave. Not where somebody wants to hear what else it changes.
    #[inline]
    pub(crate) fn records_returns(&self) -> bool {
        let w = &self.watched;
        self.mode & mode::RECORD != 0
            && !w.tell_interrupts
            && !w.interest.step_on_branches
            && self.is64()
            && self.rflags & rf::NT == 0
            && self.transaction.is_none()
            && !self.non_root()
    }

    /// IRET of such a kind. Where it leaves its code after all, records are handed over before that, and it comes alone as any far transfer.
    pub(crate) fn recorded_return(&mut self, o: &Op) -> Done<Go> {
        let (from, cpl) = (self.linear(self.ip(o)), self.cpl);
        let mut left = false;
        let rip = self.interrupt_return_after(o, o.src as u64, |c| {
            left = true;
            c.drain_records_first()
        })?;
        let go = self.after_flags(rip);
        if left {
            self.note_far(o, from, cpl, Far::Iret, rip);
            return Ok(go.seen());
        }
        let rest = u64::from(Flow::Far(Far::Iret).code()) | u64::from(o.len) << 8;
        Ok(match self.record(from, rip, rest) {
            true => go.seen(),
            false => go,
        })
    }

    /// Privileged instructions are #GP(0) elsewhere.
    #[inline]
    pub(crate) fn supervisor_only(&mut self) -> Done {
        if self.cpl == 0 { Ok(()) } else { Err(self.gp(0)) }
    }

    /// Where control goes on after flags were loaded or a task was switched: a look is needed when a window opened or
    /// something is to be raised before the next instruction.
    pub(crate) fn after_flags(&mut self, rip: u64) -> Go {
        if core::mem::take(&mut self.late_fault) {
            return Go::Raise(rip);
        }
        let window = self.want_window && self.rflags & rf::IF != 0 || self.bus_used;
        if window || self.rflags & rf::TF != 0 || self.trap_now || self.task_trap || self.virtual_interrupt_due() {
            Go::Look(rip)
        } else {
            Go::To(rip)
        }
    }
}

/// Bodies that are too large, or too cold, to be handlers themselves: each calls its function.
macro_rules! cold_bodies {
    ($($(#[$meta:meta])* $name:ident = $f:expr;)+) => { $(
        $(#[$meta])*
        pub(crate) struct $name;
        impl $crate::op::Body for $name {
            #[inline(always)]
            fn run(c: &mut $crate::cpu::Cpu, o: &$crate::op::Op) -> $crate::op::Done {
                #[inline(never)]
                fn out(c: &mut $crate::cpu::Cpu, o: &$crate::op::Op) -> $crate::op::Done {
                    $f(c, o)
                }
                out(c, o)
            }
        }
    )+ };
}
pub(crate) use cold_bodies;

/// The same for instructions that end their block; the functions return `Done<Go>`.
macro_rules! cold_flows {
    ($($(#[$meta:meta])* $name:ident = $f:expr;)+) => { $(
        $(#[$meta])*
        pub(crate) struct $name;
        impl $crate::op::Flow for $name {
            #[inline(always)]
            fn run(c: &mut $crate::cpu::Cpu, o: &$crate::op::Op) -> *const $crate::op::Op {
                #[inline(never)]
                fn out(c: &mut $crate::cpu::Cpu, o: &$crate::op::Op) -> *const $crate::op::Op {
                    let to = $f(c, o);
                    c.go(o, to)
                }
                out(c, o)
            }
        }
    )+ };
}
pub(crate) use cold_flows;

cold_flows! {
    /// MOV to control register `aux` from `src`.
    WriteCr = write_cr;
    Clts = |c: &mut Cpu, o: &Op| {
        c.supervisor_only()?;
        let ts = c.cr0_moved(0) & 8 != 0;
        c.cr0.set_ts(ts);
        Ok(Go::To(c.next_ip(o)))
    };
    /// LMSW from `src`.
    Lmsw = lmsw;
    WriteDr = write_dr;
    Hlt = |c: &mut Cpu, o: &Op| {
        c.supervisor_only()?;
        c.drain_records_first()?;
        c.activity = Activity::Halted;
        c.change(Change::Halt);
        Ok(Go::Look(c.next_ip(o)))
    };
    Mwait = mwait;
    /// TPAUSE, or UMWAIT (`aux` is 1), with the state to wait in in `src`.
    UserWait = user_wait;
    /// SDM Vol. 2B "RSM": #UD outside system-management mode. The run loop leaves it once the instruction has retired.
    Rsm = |c: &mut Cpu, o: &Op| {
        if !c.in_smm() {
            return Err(c.ud());
        }
        c.drain_records_first()?;
        c.resumes = true;
        c.skip_step = true;
        Ok(Go::Look(c.next_ip(o)))
    };
    Syscall = |c: &mut Cpu, o: &Op| c.far(o, Far::Syscall, syscall);
    Sysret = |c: &mut Cpu, o: &Op| c.far(o, Far::Sysret, sysret);
    Sysenter = |c: &mut Cpu, o: &Op| c.far(o, Far::Sysenter, sysenter);
    Sysexit = |c: &mut Cpu, o: &Op| c.far(o, Far::Sysexit, sysexit);
    /// INT n, INT3, INTO, INT1: vector `imm`, `aux` 1 for INT1.
    Int = software_interrupt;
}

cold_bodies! {
    /// Before the memory operand of an instruction that only ring 0 has: the privilege is checked first.
    SupervisorOnly = |c: &mut Cpu, _: &Op| c.supervisor_only();
    ReadCr = read_cr;
    ReadDr = read_dr;
    Invlpg = invlpg;
    Invpcid = invpcid;
    /// WBINVD, INVD: there is no cache to write back.
    Privileged = |c: &mut Cpu, _: &Op| c.supervisor_only();
    /// CLFLUSH and its like: checks the address as a one-byte load does.
    Touch = |c: &mut Cpu, o: &Op| {
        let ea = c.ea(o);
        let mut byte = [0];
        c.read_bytes(o, ea, &mut byte)
    };
    /// MOVDIR64B: 64 bytes from memory to ES:`dst`, a register of `imm` bytes; the destination is aligned (SDM Vol. 2B
    /// "MOVDIR64B").
    Movdir64b = |c: &mut Cpu, o: &Op| {
        let ea = c.ea(o);
        let mut bytes = [0; 64];
        let offset = c.get_sized(o.dst, o.imm as u8);
        let to = c.segmented(ES, offset, 64, true)?;
        if to & 63 != 0 {
            return Err(c.gp(0));
        }
        c.read_bytes(o, ea, &mut bytes)?;
        c.write_bytes(o, to, &bytes)
    };
    Monitor = |c: &mut Cpu, o: &Op| {
        monitor_only(c)?;
        if c.get::<4>(slot::RCX) != 0 {
            return Err(c.gp(0));
        }
        monitor(c, o, false)
    };
    UserMonitor = |c: &mut Cpu, o: &Op| {
        user_wait_allowed(c)?;
        monitor(c, o, true)
    };
    Cpuid = cpuid;
    Rdtsc = rdtsc;
    Rdtscp = |c: &mut Cpu, o: &Op| {
        rdtsc(c, o)?;
        let aux = c.msrs.tsc_aux;
        c.set::<4>(slot::RCX, aux);
        Ok(())
    };
    Rdpid = |c: &mut Cpu, o: &Op| {
        let aux = c.msrs.tsc_aux & 0xffff_ffff;
        c.set::<8>(o.dst, aux);
        Ok(())
    };
    Rdpmc = rdpmc;
    /// RDRAND, RDSEED: `aux` bytes.
    Random = |c: &mut Cpu, o: &Op| {
        let v = c.bus().random();
        c.set_sized(o.dst, o.aux as u8, v);
        c.nf = flags::CF;
        Ok(())
    };
    Swapgs = |c: &mut Cpu, _: &Op| {
        c.supervisor_only()?;
        core::mem::swap(&mut c.seg[GS].base, &mut c.msrs.kernel_gs_base);
        Ok(())
    };
    /// RDFSBASE, RDGSBASE: segment `aux`, size `imm`.
    ReadBase = |c: &mut Cpu, o: &Op| {
        need_fsgsbase(c)?;
        let v = c.seg[o.aux as usize].base;
        c.set_sized(o.dst, o.imm as u8, v);
        Ok(())
    };
    WriteBase = |c: &mut Cpu, o: &Op| {
        need_fsgsbase(c)?;
        let v = c.get_sized(o.src, o.imm as u8);
        if !c.canonical_register(v) {
            return Err(c.gp(0));
        }
        c.seg[o.aux as usize].base = v;
        Ok(())
    };
    Rdpkru = |c: &mut Cpu, _: &Op| {
        need_keys(c)?;
        let v = c.pkru as u64;
        c.set::<4>(slot::RAX, v);
        c.set::<4>(slot::RDX, 0);
        Ok(())
    };
    Wrpkru = |c: &mut Cpu, _: &Op| {
        need_keys(c)?;
        if c.get::<4>(slot::RDX) != 0 {
            return Err(c.gp(0));
        }
        let v = c.get::<4>(slot::RAX) as u32;
        c.set_pkru(v);
        Ok(())
    };
    /// BOUND with operands of `imm` bytes. The upper bound is not read if the lower one fails, as on Intel's processors.
    Bound = |c: &mut Cpu, o: &Op| {
        let (ea, size) = (c.ea(o), o.imm as usize);
        let signed = |bits: u64| if size == 2 { i64::from(bits as i16) } else { i64::from(bits as i32) };
        let value = signed(c.get_sized(o.dst, size as u8));
        let mut bound = [0; 8];
        c.read_aligned(o, ea, &mut bound[..size], o.imm)?;
        if value < signed(u64::from_le_bytes(bound)) {
            return Err(c.fault(5, None));
        }
        let Some(upper) = c.later_part(o, ea, o.imm, o.imm) else {
            return Err(c.segment_fault(o.seg as usize));
        };
        c.read_aligned(o, upper, &mut bound[..size], o.imm)?;
        if value > signed(u64::from_le_bytes(bound)) { Err(c.fault(5, None)) } else { Ok(()) }
    };
}

/// SDM Vol. 2B "RDPKRU", Vol. 2D "WRPKRU": #UD without CR4.PKE, #GP for an index other than 0.
fn need_keys(c: &mut Cpu) -> Done {
    if !c.cr4.pke() {
        return Err(c.ud());
    }
    if c.get::<4>(slot::RCX) != 0 {
        return Err(c.gp(0));
    }
    Ok(())
}

fn need_fsgsbase(c: &mut Cpu) -> Done {
    if !c.cr4.fsgsbase() {
        return Err(c.ud());
    }
    Ok(())
}

impl Cpu {
    /// MONITOR and MWAIT are #UD above CPL 0 (SDM Vol. 2B "MONITOR").
    fn supervisor_only_or_ud(&mut self) -> Done {
        if self.cpl == 0 { Ok(()) } else { Err(self.ud()) }
    }

    /// Sets CR0, checked (SDM Vol. 2B "MOV—Move to/from Control Registers").
    fn set_cr0(&mut self, value: u64) -> Done {
        let old = self.cr0;
        let value = self.cr0_moved(value);
        let Ok(new) = Cr0::accept(value) else {
            return Err(self.gp(0));
        };
        if !self.vmx_allows(new.into_bits(), self.cr4.into_bits()) {
            return Err(self.gp(0));
        }
        let (cr4, efer) = (self.cr4, self.efer);
        if !old.may_become(new, cr4, efer, self.seg[CS].long()) {
            return Err(self.gp(0));
        }
        let entering_long = !old.pg() && new.pg() && efer.lme();
        // SDM Vol. 3A 10.8.5.3: not with a 16-bit TSS.
        if entering_long && self.tr.present() && self.tr.kind() & 8 == 0 {
            return Err(self.gp(0));
        }
        let changed = old.into_bits() ^ new.into_bits();
        const PG_CD_NW: u64 = 7 << 29;
        if new.pg() && cr4.pae() && !efer.lme() && changed & PG_CD_NW != 0 {
            self.check_pdptes(self.cr3)?;
        }
        self.cr0 = new;
        if old.pg() != new.pg() {
            self.efer.set_lma(entering_long);
        }
        const PG_WP_PE: u64 = 1 << 31 | 1 << 16 | 1;
        if changed & PG_WP_PE != 0 {
            self.tlb.flush_present();
        }
        self.refresh_mode();
        if old.pg() != new.pg() {
            self.change(Change::Mode);
        }
        Ok(())
    }

    /// The page-directory-pointer entries are checked when they would be loaded (SDM Vol. 3A 5.4.1 "PDPTE Registers"). The
    /// walk reads them from memory each time, which no guest that follows the manual can tell from loading them.
    pub(crate) fn check_pdptes(&mut self, cr3: u64) -> Done {
        let reserved = !0u64 << self.maxphyaddr | 0x1e6;
        for i in 0..4 {
            let entry = self.read_guest_physical((cr3 & 0xffff_ffe0) + i * 8)?;
            if entry & 1 != 0 && entry & reserved != 0 {
                return Err(self.gp(0));
            }
        }
        Ok(())
    }

    fn set_cr3(&mut self, value: u64) -> Done {
        let pcide = self.cr4.pcide();
        // Bits above 31 cannot be written outside 64-bit mode; bits 62:52 and those above the physical width are reserved.
        if value & Cr3::reserved(self.maxphyaddr, pcide) != 0 {
            return Err(self.gp(0));
        }
        if self.cr0.pg() && self.cr4.pae() && !self.efer.lma() {
            self.check_pdptes(value)?;
        }
        let keep = pcide && value >> 63 != 0;
        self.cr3 = value & !(1 << 63);
        if !keep {
            let pcid = if pcide { (value & 0xfff) as u16 } else { 0 };
            self.tlb.flush_pcid(pcid);
        }
        self.select_tlb();
        Ok(())
    }

    fn set_cr4(&mut self, value: u64) -> Done {
        let (old, features) = (self.cr4, self.features);
        let value = self.cr4_moved(value);
        let Ok(new) = Cr4::accept(value, features) else {
            return Err(self.gp(0));
        };
        // SDM Vol. 3C 32.14.3 "Protection of CR4.VMXE in SMM".
        if new.vmxe() && self.in_smm() {
            return Err(self.gp(0));
        }
        if !self.vmx_allows(self.cr0.into_bits(), new.into_bits()) {
            return Err(self.gp(0));
        }
        let (cr0, cr3, efer) = (self.cr0, Cr3::from_bits(self.cr3), self.efer);
        if !old.may_become(new, cr0, cr3, efer) {
            return Err(self.gp(0));
        }
        let changed = old.into_bits() ^ new.into_bits();
        // PSE, PAE, PGE, SMEP.
        const LOADS_PDPTES: u64 = 0x10_00b0;
        if cr0.pg() && new.pae() && !efer.lma() && changed & LOADS_PDPTES != 0 {
            self.check_pdptes(self.cr3)?;
        }
        self.cr4 = new;
        // What the TLB holds of rights depends on SMEP, SMAP and the keys too, so it goes when they change.
        const RIGHTS: u64 = 0x170_0000;
        if old.flushes_all(new) || changed & RIGHTS != 0 || old.pcide() != new.pcide() {
            self.tlb.flush_present();
        }
        self.select_tlb();
        Ok(())
    }
}

/// MONITOR and MWAIT are #UD above CPL 0, and where IA32_MISC_ENABLE\[18\] is clear (SDM Vol. 4 Table 2-2 "IA-32 Architectural
/// MSRs").
fn monitor_only(c: &mut Cpu) -> Done {
    c.supervisor_only_or_ud()?;
    if c.bus().monitor_enabled() { Ok(()) } else { Err(c.ud()) }
}

/// Arms the line at the address of `base`, of `aux` bytes, which is read like a byte.
fn monitor(c: &mut Cpu, o: &Op, user: bool) -> Done {
    let offset = c.ea(o) & (u64::MAX >> (64 - 8 * o.aux as u32));
    let linear = c.segmented(o.seg as usize, offset, 1, false)?;
    let mut byte = [0];
    c.read_bytes(o, linear, &mut byte)?;
    c.arm(linear, user)
}

/// UMONITOR, UMWAIT and TPAUSE are #UD in VMX non-root operation without "enable user wait and pause". SDM Vol. 3C 26.3 "Changes to
/// Instruction Behavior in VMX Non-Root Operation".
fn user_wait_allowed(c: &mut Cpu) -> Done {
    if c.guest()
        .is_some_and(|guest| !guest.secondary.contains(Secondary::USER_WAIT))
    {
        return Err(c.ud());
    }
    Ok(())
}

/// SDM Vol. 2B "TPAUSE—Timed PAUSE", "UMWAIT—User Level Monitor Wait". Both states, C0.1 and C0.2, are the same here: nothing runs until
/// the time-stamp counter has the value in EDX:EAX, the operating system's limit has passed, an interrupt comes, enabled or not, or, after
/// UMONITOR and with UMWAIT, somebody stores to the line.
fn user_wait(c: &mut Cpu, o: &Op) -> Done<Go> {
    user_wait_allowed(c)?;
    if c.cr4.tsd() && c.cpl != 0 || c.get::<4>(o.src) & !1 != 0 {
        return Err(c.gp(0));
    }
    c.drain_records_first()?;
    let line = o.aux == 1;
    let armed = if line {
        c.look_at_line();
        c.monitor.user && c.monitor.line.is_some()
    } else {
        true
    };
    let now = c.now(o);
    let (tsc, limit) = (c.bus().tsc(now), c.bus().user_wait_control() & 0xFFFF_FFFC);
    let own = c.get::<4>(slot::RAX) | c.get::<4>(slot::RDX) << 32;
    // What RDTSC gives is what EDX:EAX is compared with; of that difference or the limit a guest's scaling makes the delay (SDM Vol. 3C
    // 26.3).
    let delay = own.saturating_sub(c.guest().map_or(tsc, |guest| guest.tsc(tsc)));
    let limited = limit != 0 && limit < delay;
    let delay = if limited { limit } else { delay };
    let deadline = tsc.saturating_add(c.guest().map_or(delay, |guest| guest.ticks(delay)));
    // CF is set when the limit has passed; the others are 0.
    c.nf = 0;
    if armed && tsc < deadline {
        c.activity = Activity::Waiting;
        c.monitor.masked = true;
        c.monitor.timed = Some(TimedWait {
            deadline,
            limited,
            line,
        });
    } else if line {
        // UMWAIT wants a UMONITOR of its own.
        c.monitor.line = None;
    }
    Ok(Go::Look(c.next_ip(o)))
}

/// SDM Vol. 2B "MWAIT—Monitor Wait". Without an armed line, or with a store to it since, execution goes on at once.
fn mwait(c: &mut Cpu, o: &Op) -> Done<Go> {
    monitor_only(c)?;
    let (hints, extensions) = (c.get::<4>(slot::RAX) as u32, c.get::<4>(slot::RCX) as u32);
    // Leaf 5 says whether ECX bit 0 is there (SDM Vol. 2A "CPUID", leaf 05H).
    let known = (c.bus().cpuid(5, 0)[2] & 3 == 3) as u32;
    if extensions & !known != 0 {
        return Err(c.gp(0));
    }
    c.drain_records_first()?;
    c.look_at_line();
    let next = c.next_ip(o);
    if c.monitor.line.is_some() && !c.monitor.user {
        c.activity = Activity::Waiting;
        c.monitor.masked = extensions & 1 != 0;
        c.change(Change::Mwait { hints, extensions });
    }
    Ok(Go::Look(next))
}

fn write_cr(c: &mut Cpu, o: &Op) -> Done<Go> {
    c.supervisor_only()?;
    c.drain_records_first()?;
    let value = if c.is64() { c.get::<8>(o.src) } else { c.get::<4>(o.src) };
    match o.aux {
        0 => c.set_cr0(value)?,
        2 => c.cr2 = value,
        3 => c.set_cr3(value)?,
        4 => c.set_cr4(value)?,
        _ => {
            if value > 15 {
                return Err(c.gp(0));
            }
            if c.set_virtual_tpr(value as u8)? {
                return Ok(Go::Look(c.next_ip(o)));
            }
            c.bus().set_cr8(value);
            c.bus_used = true;
            return Ok(Go::Look(c.next_ip(o)));
        }
    }
    let next = c.next_ip(o);
    if o.aux == 3 {
        c.change(Change::Cr3);
    }
    // DR4 and DR5, and breakpoints on ports, depend on CR4.DE.
    c.watched.ask |= o.aux == 4;
    let look = o.aux == 0 || c.watched.ask || c.watched.speaks();
    Ok(if look { Go::Look(next) } else { Go::To(next) })
}

fn read_cr(c: &mut Cpu, o: &Op) -> Done {
    c.supervisor_only()?;
    let value = match o.aux {
        0 => c.cr0_read(),
        2 => c.cr2,
        3 => c.cr3,
        4 => c.cr4_read(),
        _ => match c.virtual_tpr() {
            Some(class) => class.into(),
            None => c.bus().cr8(),
        },
    };
    let size = if c.is64() { 8 } else { 4 };
    c.set_sized(o.dst, size, value);
    Ok(())
}

fn lmsw(c: &mut Cpu, o: &Op) -> Done<Go> {
    c.supervisor_only()?;
    c.drain_records_first()?;
    // PE can be set and not cleared (SDM Vol. 2A "LMSW").
    let value = c.get::<2>(o.src) & 0xf;
    crate::vmx::intercept::lmsw(c, o, c.get::<2>(o.src))?;
    let new = c.cr0.into_bits() & !0xe | value;
    c.set_cr0(new)?;
    Ok(Go::Look(c.next_ip(o)))
}

/// Debug registers: who may touch them, and the aliases of 4 and 5 (SDM Vol. 3B 19.2 "Debug Registers").
fn debug_register(c: &mut Cpu, o: &Op) -> Done<usize> {
    c.supervisor_only()?;
    let number = match o.aux as usize {
        4 | 5 if c.cr4.de() => return Err(c.ud()),
        number @ (4 | 5) => number + 2,
        number => number,
    };
    if c.dr[7] & 1 << 13 != 0 {
        c.set_debug_status(1 << 13);
        // A fault, unlike most #DBs: the frame has RF set.
        c.rf_at = c.steps_after(o).wrapping_sub(1);
        return Err(c.fault(1, None));
    }
    Ok(number)
}

fn write_dr(c: &mut Cpu, o: &Op) -> Done<Go> {
    c.drain_records_first()?;
    let number = debug_register(c, o)?;
    let value = if c.is64() { c.get::<8>(o.src) } else { c.get::<4>(o.src) };
    if number >= 6 && value >> 32 != 0 {
        return Err(c.gp(0));
    }
    c.dr[number] = match number {
        6 => Dr6::written(value, c.features),
        7 => Dr7::written(value, c.features),
        _ => value,
    };
    c.watched.ask = true;
    Ok(Go::Look(c.next_ip(o)))
}

fn read_dr(c: &mut Cpu, o: &Op) -> Done {
    let number = debug_register(c, o)?;
    let size = if c.is64() { 8 } else { 4 };
    let value = c.dr[number];
    c.set_sized(o.dst, size, value);
    Ok(())
}

fn invlpg(c: &mut Cpu, o: &Op) -> Done {
    c.supervisor_only()?;
    // The address is not checked: in 64-bit mode one that is not canonical does nothing (SDM Vol. 2A "INVLPG").
    let mut linear = c.ea(o);
    if !c.is64() {
        linear &= 0xffff_ffff;
    }
    c.tlb.flush_page(linear);
    Ok(())
}

/// INVPCID: type in `dst`, descriptor in memory (SDM Vol. 2A "INVPCID").
fn invpcid(c: &mut Cpu, o: &Op) -> Done {
    c.supervisor_only()?;
    let ea = c.ea(o);
    let mut descriptor = [0; 16];
    c.read_bytes(o, ea, &mut descriptor)?;
    let [pcid, linear] = [0, 8].map(|i| {
        let mut half = [0; 8];
        half.copy_from_slice(&descriptor[i..i + 8]);
        u64::from_le_bytes(half)
    });
    let kind = if c.is64() { c.get::<8>(o.dst) } else { c.get::<4>(o.dst) };
    if kind > 3 || pcid >> 12 != 0 || kind < 2 && pcid != 0 && !c.cr4.pcide() {
        return Err(c.gp(0));
    }
    match kind {
        0 if !c.canonical_register(linear) => return Err(c.gp(0)),
        0 => c.tlb.flush_page(linear),
        1 => c.tlb.flush_pcid(pcid as u16),
        // Type 3 spares global translations; forgetting more than asked is allowed.
        _ => c.tlb.flush_present(),
    }
    Ok(())
}

fn cpuid(c: &mut Cpu, _: &Op) -> Done {
    let (leaf, subleaf) = (c.get::<4>(slot::RAX) as u32, c.get::<4>(slot::RCX) as u32);
    let r = c.bus().cpuid(leaf, subleaf);
    let r = c.cpuid_now(leaf, subleaf, r);
    for (at, value) in [
        (slot::RAX, r[0]),
        (slot::RBX, r[1]),
        (slot::RCX, r[2]),
        (slot::RDX, r[3]),
    ] {
        c.set::<4>(at, value as u64);
    }
    Ok(())
}

impl Cpu {
    /// What CPUID shows where the bus answers this: some bits follow the processor's registers.
    pub fn cpuid_now(&self, leaf: u32, subleaf: u32, mut r: [u32; 4]) -> [u32; 4] {
        match leaf {
            1 => {
                // OSXSAVE shows CR4's bit.
                let on = self.cr4.osxsave();
                r[2] = r[2] & !(1 << 27) | (on as u32) << 27;
            }
            7 if subleaf == 0 && r[2] & 1 << 3 != 0 => {
                // OSPKE shows CR4.PKE.
                let on = self.cr4.pke();
                r[2] = r[2] & !(1 << 4) | (on as u32) << 4;
            }
            0xd if r != [0; 4] => {
                if let Some(size) = self.xsave_size(subleaf) {
                    r[1] = size;
                }
            }
            // SYSCALL shows in 64-bit mode only.
            0x8000_0001 if !self.efer.lma() || !self.seg[CS].long() => r[3] &= !(1 << 11),
            _ => {}
        }
        r
    }
}

fn rdtsc(c: &mut Cpu, o: &Op) -> Done {
    if c.cr4.tsd() && c.cpl != 0 {
        return Err(c.gp(0));
    }
    let now = c.now(o);
    let v = c.bus().tsc(now);
    let v = c.tsc_read(v);
    c.set::<4>(slot::RAX, v);
    c.set::<4>(slot::RDX, v >> 32);
    Ok(())
}

/// SDM Vol. 2B "RDPMC—Read Performance-Monitoring Counters".
fn rdpmc(c: &mut Cpu, o: &Op) -> Done {
    if !c.cr4.pce() && c.cpl != 0 && c.cr0.pe() {
        return Err(c.gp(0));
    }
    c.drain_records_first()?;
    let index = c.get::<4>(slot::RCX) as u32;
    let Ok(value) = c.with_view(o, |bus, view| bus.read_counter(index, view)) else {
        return Err(c.gp(0));
    };
    c.set::<4>(slot::RAX, value);
    c.set::<4>(slot::RDX, value >> 32);
    Ok(())
}

/// SDM Vol. 2B "SYSCALL—Fast System Call".
fn syscall(c: &mut Cpu, o: &Op) -> Done<Go> {
    if !c.is64() || !c.efer.sce() {
        return Err(c.ud());
    }
    let (next, old) = (c.next_ip(o), c.rflags());
    c.set::<8>(slot::RCX, next);
    c.set::<8>(slot::R11, old);
    let new = old & !c.msrs.fmask;
    c.set_rflags(new);
    if new & rf::TF == 0 {
        c.skip_step = true;
    }
    let code = (c.msrs.star >> 32) as u16 & 0xfffc;
    c.enter_flat(code, code.wrapping_add(8), 0, true);
    let rip = c.msrs.lstar;
    Ok(c.after_flags(rip))
}

/// SDM Vol. 2B "SYSRET—Return From Fast System Call"; `aux` is the operand size.
fn sysret(c: &mut Cpu, o: &Op) -> Done<Go> {
    if !c.is64() || !c.efer.sce() {
        return Err(c.ud());
    }
    c.supervisor_only()?;
    let wide = o.aux == 8;
    let rip = c.get_sized(slot::RCX, o.aux as u8);
    if wide && !c.canonical(rip) {
        // At CPL 0 still, unlike on AMD parts.
        return Err(c.gp(0));
    }
    let flags = c.get::<8>(slot::R11);
    c.set_rflags(flags & 0x3c_7fd7);
    // Unlike IRET, a TF that is loaded here traps right after this instruction.
    c.trap_now = flags & rf::TF != 0;
    let base = (c.msrs.star >> 48) as u16;
    let code = if wide { base.wrapping_add(16) } else { base } | 3;
    c.enter_flat(code, base.wrapping_add(8) | 3, 3, wide);
    Ok(c.after_flags(rip))
}

/// SDM Vol. 2B "SYSENTER—Fast System Call".
fn sysenter(c: &mut Cpu, _: &Op) -> Done<Go> {
    let code = c.msrs.sysenter_cs as u16 & 0xfffc;
    if !c.cr0.pe() || code == 0 {
        return Err(c.gp(0));
    }
    c.rflags &= !(rf::VM | rf::IF);
    let wide = c.long_mode();
    let (rip, rsp) = (c.msrs.sysenter_eip, c.msrs.sysenter_esp);
    c.enter_flat(code, code.wrapping_add(8), 0, wide);
    c.set_sized(slot::RSP, if wide { 8 } else { 4 }, rsp);
    Ok(c.after_flags(if wide { rip } else { rip & 0xffff_ffff }))
}

/// SDM Vol. 2B "SYSEXIT—Fast Return from Fast System Call"; `aux` is the operand size.
fn sysexit(c: &mut Cpu, o: &Op) -> Done<Go> {
    let base = c.msrs.sysenter_cs as u16 & 0xfffc;
    if !c.cr0.pe() || base == 0 || c.cpl != 0 {
        return Err(c.gp(0));
    }
    let wide = o.aux == 8;
    let (rip, rsp) = (c.get_sized(slot::RDX, o.aux as u8), c.get_sized(slot::RCX, o.aux as u8));
    if wide && !(c.canonical(rip) && c.canonical(rsp)) {
        return Err(c.gp(0));
    }
    let code = base.wrapping_add(if wide { 32 } else { 16 }) | 3;
    c.enter_flat(code, code.wrapping_add(8), 3, wide);
    c.set_sized(slot::RSP, o.aux as u8, rsp);
    Ok(c.after_flags(rip))
}

/// INT n, INT3, INTO, INT1 (SDM Vol. 2A "INT n/INTO/INT3/INT1—Call to Interrupt Procedure").
fn software_interrupt(c: &mut Cpu, o: &Op) -> Done<Go> {
    let next = c.next_ip(o);
    if o.imm == 4 && o.aux == 2 && c.nf & flags::OF == 0 {
        return Ok(Go::To(next));
    }
    c.drain_records_first()?;
    let origin = EventOrigin::of_instruction(c, o);
    let event = Event {
        vector: o.imm as u8,
        error: None,
        source: if o.aux == 1 {
            Source::PrivilegedSoftware
        } else {
            Source::Software
        },
    };
    let redirected = if c.virtual8086() && o.aux == 0 {
        c.redirect(o, o.imm as u8)?
    } else {
        None
    };
    let rip = match redirected {
        Some(rip) => rip,
        None => {
            // The frame holds the next instruction; if the gate fails, `abandon` goes back to this one.
            c.rip = next;
            c.rf_at = u64::MAX;
            if event.source == Source::PrivilegedSoftware {
                // A data breakpoint that a load of SS has held off is lost, as before a fault: the parts deliver one #DB, which
                // shows no condition.
                c.watched.pending = 0;
                c.set_debug_status(0);
            }
            if c.non_root() {
                c.vectoring = Some(crate::vmx::Vectoring::of_instruction(event, o.aux >= 2, o.len));
            }
            c.deliver(event)?;
            c.vectoring = None;
            c.rip
        }
    };
    // The handler begins with TF clear; what the interrupted code asked for it gets back with IRET.
    c.skip_step = true;
    let go = c.after_flags(rip);
    if !c.watched.tell {
        return Ok(go);
    }
    c.rip = rip;
    c.watched.event = Some(origin.record(c, event));
    Ok(go.seen())
}

/// How an instruction that only this family of files knows is lowered; `None` for the others.
pub(crate) fn lowering(l: &Lower) -> Option<fn(&mut Lower) -> End> {
    use super::{flags, io, msr, segment};
    Some(match l.i.mnemonic() {
        M::Mov if !super::mov::is_system_mov(l) => return None,
        M::Mov if (0..2).any(|n| l.i.op_register(n).is_segment_register()) => segment::lower_mov,
        M::Mov => lower_mov,
        M::Push | M::Pop if segment::is_stack(l) => segment::lower_stack,
        M::Jmp | M::Call if segment::is_far(l) => segment::lower_far,
        M::Pushf
        | M::Pushfd
        | M::Pushfq
        | M::Popf
        | M::Popfd
        | M::Popfq
        | M::Lahf
        | M::Sahf
        | M::Clc
        | M::Stc
        | M::Cmc
        | M::Cld
        | M::Std
        | M::Clac
        | M::Stac
        | M::Cli
        | M::Sti => flags::lower,
        M::In | M::Out | M::Insb | M::Insw | M::Insd | M::Outsb | M::Outsw | M::Outsd => io::lower,
        M::Rdmsr | M::Wrmsr => msr::lower,
        M::Retf
        | M::Iret
        | M::Iretd
        | M::Iretq
        | M::Lds
        | M::Les
        | M::Lss
        | M::Lfs
        | M::Lgs
        | M::Sldt
        | M::Str
        | M::Smsw
        | M::Sgdt
        | M::Sidt
        | M::Lgdt
        | M::Lidt
        | M::Lldt
        | M::Ltr
        | M::Lar
        | M::Lsl
        | M::Verr
        | M::Verw
        | M::Arpl => segment::lower,
        M::Clts
        | M::Hlt
        | M::Rsm
        | M::Lmsw
        | M::Syscall
        | M::Sysret
        | M::Sysretq
        | M::Sysenter
        | M::Sysexit
        | M::Sysexitq
        | M::Int
        | M::Int3
        | M::Into
        | M::Int1
        | M::Rdpkru
        | M::Wrpkru
        | M::Ud0
        | M::Ud1
        | M::Ud2
        | M::Invlpg
        | M::Invpcid
        | M::Clflush
        | M::Clflushopt
        | M::Clwb
        | M::Movdir64b
        | M::Serialize
        | M::Bound
        | M::Monitor
        | M::Mwait
        | M::Umonitor
        | M::Umwait
        | M::Tpause
        | M::Rdpid
        | M::Rdrand
        | M::Rdseed
        | M::Rdfsbase
        | M::Rdgsbase
        | M::Wrfsbase
        | M::Wrgsbase
        | M::Swapgs
        | M::Invd
        | M::Wbinvd
        | M::Wbnoinvd
        | M::Cpuid
        | M::Rdtsc
        | M::Rdtscp
        | M::Rdpmc
        | M::Lfence
        | M::Mfence
        | M::Sfence
        | M::Prefetch
        | M::Prefetchw
        | M::Prefetchwt1
        | M::Prefetchnta
        | M::Prefetcht0
        | M::Prefetcht1
        | M::Prefetcht2
        | M::Reservednop
        | M::Endbr32
        | M::Endbr64
        | M::Rdsspd
        | M::Rdsspq
        | M::Cldemote
        | M::Bndmk
        | M::Bndcl
        | M::Bndcu
        | M::Bndcn
        | M::Bndmov
        | M::Bndldx
        | M::Bndstx
        | M::Prefetchit0
        | M::Prefetchit1 => lower,
        _ => return None,
    })
}

/// MOV to and from control and debug registers.
pub(crate) fn lower_mov(l: &mut Lower) -> End {
    let special = if l.i.op_register(0).is_cr() || l.i.op_register(0).is_dr() {
        0
    } else {
        1
    };
    let register = l.i.op_register(special);
    let (number, other) = (register.number() as u16, l.reg(1 - special));
    match (register.is_cr(), special == 0) {
        (true, _) if !(matches!(number, 0 | 2 | 3 | 4) || number == 8 && l.is64()) => l.ud(),
        (true, true) => l.flow(chain_flow::<WriteCr>(), |o| (o.src, o.aux) = (other, number)),
        (true, false) => {
            l.emit(chain::<ReadCr>(), |o| (o.dst, o.aux) = (other, number));
            End::Open
        }
        _ if number > 7 => l.ud(),
        (false, true) => l.flow(chain_flow::<WriteDr>(), |o| (o.src, o.aux) = (other, number)),
        (false, false) => {
            l.emit(chain::<ReadDr>(), |o| (o.dst, o.aux) = (other, number));
            End::Open
        }
    }
}

pub(crate) fn lower(l: &mut Lower) -> End {
    let f = match l.i.mnemonic() {
        M::Clts => return l.flow(chain_flow::<Clts>(), |_| ()),
        M::Hlt => return l.flow(chain_flow::<Hlt>(), |_| ()),
        M::Mwait => return l.flow(chain_flow::<Mwait>(), |_| ()),
        M::Umwait | M::Tpause => {
            let (src, line) = (l.reg(0), l.i.mnemonic() == M::Umwait);
            return l.flow(chain_flow::<UserWait>(), |o| (o.src, o.aux) = (src, line.into()));
        }
        M::Rsm => return l.flow(chain_flow::<Rsm>(), |_| ()),
        M::Lmsw => {
            l.emit(chain::<SupervisorOnly>(), |_| ());
            let src = l.read(0, 2);
            let memory = l.is_mem(0);
            return l.flow(chain_flow::<Lmsw>(), |o| (o.src, o.aux) = (src, memory.into()));
        }
        M::Syscall => return l.flow(chain_flow::<Syscall>(), |_| ()),
        M::Sysret | M::Sysretq => {
            let size = if l.i.code() == Code::Sysretq { 8 } else { 4 };
            return l.flow(chain_flow::<Sysret>(), |o| o.aux = size);
        }
        M::Sysenter => return l.flow(chain_flow::<Sysenter>(), |_| ()),
        M::Sysexit | M::Sysexitq => {
            let size = if l.i.code() == Code::Sysexitq { 8 } else { 4 };
            return l.flow(chain_flow::<Sysexit>(), |o| o.aux = size);
        }
        M::Int | M::Int3 | M::Into | M::Int1 => {
            let (vector, aux) = match l.i.mnemonic() {
                M::Int => (l.imm(0) & 0xff, 0),
                M::Int3 => (3, 3),
                M::Into => (4, 2),
                _ => (1, 1),
            };
            return l.flow(chain_flow::<Int>(), |o| (o.imm, o.aux) = (vector, aux));
        }
        M::Ud0 | M::Ud1 | M::Ud2 => return l.ud(),
        M::Invlpg => {
            let m = l.unchecked();
            l.emit_mem(chain::<Invlpg>(), m, |_| ());
            return End::Open;
        }
        M::Invpcid => {
            let dst = l.reg(0);
            let m = l.mem(16, false);
            l.emit_mem(chain::<Invpcid>(), m, |o| o.dst = dst);
            return End::Open;
        }
        M::Clflush | M::Clflushopt | M::Clwb => {
            let m = l.mem(1, false);
            l.emit_mem(chain::<Touch>(), m, |_| ());
            return End::Open;
        }
        M::Movdir64b => {
            let (dst, size) = (l.reg(0), l.size(0));
            let m = l.mem(64, false);
            l.emit_mem(chain::<Movdir64b>(), m, |o| (o.dst, o.imm) = (dst, size as u64));
            return End::Open;
        }
        M::Bound => {
            let (dst, size) = (l.reg(0), l.size(0));
            let m = l.mem(size, false);
            l.emit_mem(chain::<Bound>(), m, |o| (o.dst, o.imm) = (dst, size as u64));
            return End::Open;
        }
        M::Monitor => {
            let size = match l.i.code() {
                Code::Monitorw => 2,
                Code::Monitord => 4,
                _ => 8,
            };
            let seg = match l.i.segment_prefix() {
                Register::None => DS,
                r => r.number(),
            };
            l.emit(chain::<Monitor>(), |o| {
                (o.base, o.aux, o.seg) = (slot::RAX, size, seg as u8)
            });
            return End::Open;
        }
        M::Umonitor => {
            // The operand is as wide as addresses are.
            let (base, size) = (l.reg(0), l.size(0) as u16);
            let seg = match l.i.segment_prefix() {
                Register::None => DS,
                r => r.number(),
            };
            l.emit(chain::<UserMonitor>(), |o| {
                (o.base, o.aux, o.seg) = (base, size, seg as u8)
            });
            return End::Open;
        }
        M::Rdpid => {
            let dst = l.reg(0);
            l.emit(chain::<Rdpid>(), |o| o.dst = dst);
            return End::Open;
        }
        M::Rdrand | M::Rdseed => {
            let (dst, size) = (l.reg(0), l.size(0));
            l.emit(chain::<Random>(), |o| (o.dst, o.aux) = (dst, size as u16));
            return End::Open;
        }
        M::Rdfsbase | M::Rdgsbase | M::Wrfsbase | M::Wrgsbase => {
            if !l.is64() {
                return l.ud();
            }
            let (reg, size) = (l.reg(0), l.size(0));
            let seg = if matches!(l.i.mnemonic(), M::Rdfsbase | M::Wrfsbase) {
                FS
            } else {
                GS
            };
            let write = matches!(l.i.mnemonic(), M::Wrfsbase | M::Wrgsbase);
            let f = if write {
                chain::<WriteBase>()
            } else {
                chain::<ReadBase>()
            };
            l.emit(f, |o| {
                (o.dst, o.src, o.aux, o.imm) = (reg, reg, seg as u16, size as u64)
            });
            return End::Open;
        }
        M::Swapgs if !l.is64() => return l.ud(),
        M::Swapgs => chain::<Swapgs>(),
        M::Invd | M::Wbinvd | M::Wbnoinvd => chain::<Privileged>(),
        M::Cpuid => chain::<Cpuid>(),
        M::Rdtsc => chain::<Rdtsc>(),
        M::Rdtscp => chain::<Rdtscp>(),
        M::Rdpmc => chain::<Rdpmc>(),
        M::Rdpkru => chain::<Rdpkru>(),
        M::Wrpkru => chain::<Wrpkru>(),
        // PAUSE, fences, SERIALIZE, prefetches and the reserved NOPs (ENDBR among them) change nothing.
        _ => chain::<super::mov::Nop>(),
    };
    l.emit(f, |_| ());
    End::Open
}
