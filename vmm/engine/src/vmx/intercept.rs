//! Instructions that cause VM exits in VMX non-root operation (SDM Vol. 3C 26.1 "Instructions That Cause VM Exits", 28.2.1 "Basic VM-Exit
//! Information", 28.2.5 "Information for VM Exits Due to Instruction Execution").
//!
//! The op of an instruction that can cause one has another one before it, in blocks that are decoded for non-root operation: it
//! looks at the controls. Faults that come before the VM exit (SDM Vol. 3C 26.1.1 "Relative Priority of Faults and VM Exits") are the
//! instruction's own: this op lets it run then.

use iced_x86::{Mnemonic as M, OpKind, Register};
use x86::vmx::ExitReason;
use x86::vmx::controls::{Primary, Secondary};
use x86::vmx::exits::{EventKind, Interruption};

use super::ExitInformation;
use crate::cpu::{Cpu, ES, slot};
use crate::exec::io;
use crate::exec::system::cold_bodies;
use crate::lower::Lower;
use crate::op::{Done, Op, chain};

cold_bodies! {
    /// Instructions without operands that count, and those with a register: exit reason in `aux`, instruction information in `disp`,
    /// qualification in `imm`; relative to RIP if `src` is 1.
    Plain = plain;
    /// INVLPG: its address.
    Invlpg = |c: &mut Cpu, o: &Op| {
        if c.cpl != 0 || !primary(c).contains(Primary::INVLPG) {
            return Ok(());
        }
        let mut linear = c.ea(o);
        if !c.is64() {
            linear &= 0xffff_ffff;
        }
        exit(c, o, ExitReason::Invlpg, linear)
    };
    /// MOV to and from control registers: qualification in `imm`, the general register in `src`.
    ControlRegister = control_register;
    /// IN, OUT, INS, OUTS: qualification in `imm`, of which DX gives the port if `aux` has bit 8; its low byte is the size. Address size in
    /// `dst`, 0 for IN and OUT, `scale` 1 with REP, instruction information in `disp`.
    Io = input_output;
    /// INT3, INTO, INT1: vector in `imm`, type in `aux`.
    Breakpoint = |c: &mut Cpu, o: &Op| {
        let vector = o.imm as u8;
        let caused = vector != 4 || c.nf & crate::flags::OF != 0;
        if !caused || c.guest().is_none_or(|guest| guest.exceptions >> vector & 1 == 0) {
            return Ok(());
        }
        c.drain_records_first()?;
        let kind = if o.aux == EventKind::PrivilegedSoftware as u16 {
            EventKind::PrivilegedSoftware
        } else {
            EventKind::SoftwareException
        };
        let mut exit = ExitInformation::new(ExitReason::ExceptionOrNmi);
        exit.interruption = Interruption::event(kind, vector, false);
        exit.length = o.len;
        Err(c.vm_exit(exit))
    };
}

fn primary(c: &Cpu) -> Primary {
    c.guest().map_or(Primary::NONE, |guest| guest.primary)
}

fn secondary(c: &Cpu) -> Secondary {
    c.guest().map_or(Secondary::NONE, |guest| guest.secondary)
}

/// Leaves for a VM exit of the instruction of `o`.
fn exit(c: &mut Cpu, o: &Op, reason: ExitReason, qualification: u64) -> Done {
    c.drain_records_first()?;
    let mut exit = ExitInformation::new(reason).qualified(qualification);
    exit.length = o.len;
    Err(c.vm_exit(exit))
}

fn plain(c: &mut Cpu, o: &Op) -> Done {
    use ExitReason as R;
    let Some(reason) = R::of(o.aux) else { return Ok(()) };
    let (first, second) = (primary(c), secondary(c));
    // What the control registers or the privilege level forbid is a fault, which the instruction raises.
    let own_fault = match reason {
        R::Hlt | R::Invd | R::Wbinvd | R::Monitor | R::Mwait | R::Rdmsr | R::Wrmsr | R::Invpcid | R::MovDr => {
            c.cpl != 0
        }
        R::Xsaves | R::Xrstors => c.cpl != 0 || !c.cr4.osxsave(),
        R::Xsetbv => c.cpl != 0 || !c.cr4.osxsave(),
        R::Rdtsc | R::Rdtscp => c.cr4.tsd() && c.cpl != 0,
        R::Umwait | R::Tpause => c.cr4.tsd() && c.cpl != 0 || c.get::<4>(o.src) & !1 != 0,
        R::Rdpmc => !c.cr4.pce() && c.cpl != 0 && c.cr0.pe(),
        R::GdtrOrIdtr => c.cpl != 0 && (o.disp >> 29 & 1 != 0 || c.cr4.umip()),
        R::LdtrOrTr => !c.protected() || c.cpl != 0 && (o.disp >> 29 & 1 != 0 || c.cr4.umip()),
        _ => false,
    };
    let there = match reason {
        R::Rdtscp => second.contains(Secondary::RDTSCP),
        R::Invpcid => second.contains(Secondary::INVPCID),
        R::Xsaves | R::Xrstors => second.contains(Secondary::XSAVES),
        R::Umwait | R::Tpause => second.contains(Secondary::USER_WAIT),
        R::MovDr => !(c.cr4.de() && matches!(o.imm & 7, 4 | 5)),
        _ => true,
    };
    if !there {
        return Err(c.ud());
    }
    if own_fault {
        return Ok(());
    }
    let exits = match reason {
        R::Cpuid | R::Invd | R::Xsetbv => true,
        R::Hlt => first.contains(Primary::HLT),
        R::Rdpmc => first.contains(Primary::RDPMC),
        R::Rdtsc | R::Rdtscp | R::Umwait | R::Tpause => first.contains(Primary::RDTSC),
        R::Mwait => first.contains(Primary::MWAIT),
        R::Monitor => first.contains(Primary::MONITOR),
        R::Pause => {
            first.contains(Primary::PAUSE)
                || c.cpl == 0 && second.contains(Secondary::PAUSE_LOOP) && pause_loop_exits(c, o)
        }
        R::MovDr => first.contains(Primary::MOV_DR),
        R::Invpcid => first.contains(Primary::INVLPG),
        R::Wbinvd => second.contains(Secondary::WBINVD),
        R::Rdrand => second.contains(Secondary::RDRAND),
        R::Rdseed => second.contains(Secondary::RDSEED),
        R::GdtrOrIdtr | R::LdtrOrTr => second.contains(Secondary::DESCRIPTOR_TABLES),
        R::Rdmsr | R::Wrmsr => msr_exits(c, reason == R::Wrmsr),
        R::Xsaves | R::Xrstors => {
            let asked = c.get::<4>(slot::RAX) | c.get::<4>(slot::RDX) << 32;
            let bitmap = c.guest().map_or(0, |guest| guest.xss_exiting);
            asked & c.msrs.xss & bitmap != 0
        }
        _ => false,
    };
    if !exits {
        return Ok(());
    }
    c.drain_records_first()?;
    let relative = if o.src == 1 { c.page_ip() } else { 0 };
    let armed = u64::from(reason == R::Mwait && c.monitor.line.is_some());
    let mut exit = ExitInformation::new(reason).qualified(o.imm.wrapping_add(relative) | armed);
    (exit.instruction, exit.length) = (o.disp as u32, o.len);
    Err(c.vm_exit(exit))
}

/// PAUSE at ring 0 with PAUSE-loop exiting.
fn pause_loop_exits(c: &mut Cpu, o: &Op) -> bool {
    let now = c.now(o);
    let tsc = c.bus().tsc(now);
    c.guest_mut().is_some_and(|guest| guest.pause_loop.exits(tsc))
}

/// RDMSR and WRMSR with the register in ECX. SDM Vol. 3C 25.6.9 "MSR-Bitmap Address".
fn msr_exits(c: &mut Cpu, write: bool) -> bool {
    let msr = c.get::<4>(slot::RCX);
    let Some(guest) = c.guest() else { return false };
    if !guest.primary.contains(Primary::MSR_BITMAPS) {
        return true;
    }
    let bitmap = guest.msr_bitmap + if write { 0x800 } else { 0 };
    let at = match msr {
        0..=0x1fff => bitmap,
        0xc000_0000..=0xc000_1fff => bitmap + 0x400,
        _ => return true,
    };
    let bit = msr & 0x1fff;
    c.shared().ram.read_phys(at + bit / 8, 1) >> (bit & 7) & 1 != 0
}

fn control_register(c: &mut Cpu, o: &Op) -> Done {
    if c.cpl != 0 {
        return Ok(());
    }
    let value = if c.is64() { c.get::<8>(o.src) } else { c.get::<4>(o.src) };
    let Some(guest) = c.guest() else { return Ok(()) };
    let first = guest.primary;
    let (register, access) = (o.imm & 15, o.imm >> 4 & 3);
    let exits = match (register, access) {
        (0, 0) => (value ^ guest.cr0_shadow) & guest.cr0_mask != 0,
        (4, 0) => (value ^ guest.cr4_shadow) & guest.cr4_mask != 0,
        (3, 0) => first.contains(Primary::CR3_LOAD) && !guest.cr3_targets.contains(&value),
        (8, 0) => first.contains(Primary::CR8_LOAD),
        (3, 1) => first.contains(Primary::CR3_STORE),
        (8, 1) => first.contains(Primary::CR8_STORE),
        // CLTS.
        (0, 2) => guest.cr0_mask & guest.cr0_shadow & 8 != 0,
        _ => false,
    };
    if exits {
        exit(c, o, ExitReason::CrAccess, o.imm)
    } else {
        Ok(())
    }
}

/// LMSW with this operand: whether it causes a VM exit. SDM Vol. 3C 26.1.3, LMSW.
pub(crate) fn lmsw(c: &mut Cpu, o: &Op, value: u64) -> Done {
    let Some(guest) = c.guest() else { return Ok(()) };
    let (mask, shadow) = (guest.cr0_mask, guest.cr0_shadow);
    let sets_pe = mask & 1 != 0 && value & 1 != 0 && shadow & 1 == 0;
    if !sets_pe && (value ^ shadow) & mask & 0xe == 0 {
        return Ok(());
    }
    let memory = u64::from(o.aux != 0) << 6;
    exit(c, o, ExitReason::CrAccess, 3 << 4 | memory | (value & 0xffff) << 16)
}

fn input_output(c: &mut Cpu, o: &Op) -> Done {
    let size = (o.aux & 0xff) as u8;
    if o.scale != 0 && c.get_sized(slot::RCX, o.dst.max(1)) == 0 {
        return Ok(());
    }
    let port = if o.aux & 0x100 != 0 {
        c.get::<2>(slot::RDX)
    } else {
        o.imm >> 16 & 0xffff
    };
    io::may_access(c, port as u16, size)?;
    let Some(guest) = c.guest() else { return Ok(()) };
    let exits = if guest.primary.contains(Primary::IO_BITMAPS) {
        let bitmaps = guest.io_bitmaps;
        let last = port + u64::from(size) - 1;
        // An access that wraps around causes a VM exit.
        last > 0xffff
            || (port..=last).any(|port| {
                let at = bitmaps[(port >> 15) as usize] + (port & 0x7fff) / 8;
                c.shared().ram.read_phys(at, 1) >> (port & 7) & 1 != 0
            })
    } else {
        guest.primary.contains(Primary::UNCONDITIONAL_IO)
    };
    if !exits {
        return Ok(());
    }
    c.drain_records_first()?;
    let mut exit = ExitInformation::new(ExitReason::Io).qualified(o.imm & 0xffff | port << 16);
    exit.length = o.len;
    if o.dst != 0 {
        let input = o.imm & 8 != 0;
        let (segment, at) = if input {
            (ES, slot::RDI)
        } else {
            (o.seg as usize, slot::RSI)
        };
        let offset = c.get_sized(at, o.dst);
        let base = if c.is64() && segment < 4 {
            0
        } else {
            c.seg[segment].base
        };
        exit.linear = base.wrapping_add(offset) & if c.is64() { u64::MAX } else { 0xffff_ffff };
        exit.instruction = o.disp as u32;
    }
    Err(c.vm_exit(exit))
}

/// The number of a general register as exit information has it.
fn number(register: Register) -> u32 {
    register.full_register().number() as u32
}

fn address_size(bytes: u8) -> u32 {
    match bytes {
        2 => 0,
        4 => 1,
        _ => 2,
    }
}

/// The instruction information of an instruction with a memory operand or a register, and a second register; its displacement, and
/// whether that is relative to the block's page. SDM Vol. 3C Tables 28-9 to 28-14.
pub(crate) fn operand_information(l: &Lower) -> (u32, u64, bool) {
    let mut information = 0;
    let (mut displacement, mut relative) = (0, false);
    let mut register2 = None;
    for n in 0..l.i.op_count() {
        match l.i.op_kind(n) {
            OpKind::Memory => {
                let (base, index) = (l.i.memory_base(), l.i.memory_index());
                relative = matches!(base, Register::RIP | Register::EIP);
                displacement = l.i.memory_displacement64();
                information |= l.i.memory_index_scale().trailing_zeros()
                    | address_size(l.address_size()) << 7
                    | (l.i.memory_segment().number() as u32) << 15;
                information |= match index {
                    Register::None => 1 << 22,
                    index => number(index) << 18,
                };
                information |= match base {
                    Register::None | Register::RIP | Register::EIP => 1 << 27,
                    base => number(base) << 23,
                };
            }
            OpKind::Register => register2 = Some((n, number(l.i.op_register(n)))),
            _ => {}
        }
    }
    let memory = (0..l.i.op_count()).any(|n| l.is_mem(n));
    match (l.i.mnemonic(), register2) {
        // Register 1 is the operand that could be memory, register 2 the encoding.
        (M::Vmread, Some((_, register))) => information |= register << 28,
        (M::Vmwrite | M::Invept | M::Invvpid | M::Invpcid, _) => information |= number(l.i.op_register(0)) << 28,
        _ => {}
    }
    if !memory {
        let operand = match l.i.mnemonic() {
            M::Vmwrite => 1,
            _ => 0,
        };
        if l.i.op_count() > operand && l.is_reg(operand) {
            information |= number(l.i.op_register(operand)) << 3 | 1 << 10;
        }
    }
    (information, displacement, relative)
}

/// Emits the op before an instruction that may cause a VM exit.
pub(crate) fn lower(l: &mut Lower) {
    use ExitReason as R;
    let mnemonic = l.i.mnemonic();
    let operand = |l: &Lower, more: u32| {
        let (information, displacement, relative) = operand_information(l);
        (information | more, displacement, relative)
    };
    let size_bits = |l: &Lower| match l.size(0) {
        2 => 0,
        4 => 1 << 11,
        _ => 2 << 11,
    };
    let (reason, (information, qualification, relative)) = match mnemonic {
        M::Cpuid => (R::Cpuid, (0, 0, false)),
        M::Hlt => (R::Hlt, (0, 0, false)),
        M::Invd => (R::Invd, (0, 0, false)),
        M::Wbinvd | M::Wbnoinvd => (R::Wbinvd, (0, 0, false)),
        M::Rdpmc => (R::Rdpmc, (0, 0, false)),
        M::Rdtsc => (R::Rdtsc, (0, 0, false)),
        M::Rdtscp => (R::Rdtscp, (0, 0, false)),
        M::Mwait => (R::Mwait, (0, 0, false)),
        M::Monitor => (R::Monitor, (0, 0, false)),
        M::Pause => (R::Pause, (0, 0, false)),
        M::Rdmsr => (R::Rdmsr, (0, 0, false)),
        M::Wrmsr => (R::Wrmsr, (0, 0, false)),
        M::Xsetbv => (R::Xsetbv, (0, 0, false)),
        M::Rdrand | M::Rdseed => {
            let register = number(l.i.op_register(0)) << 3 | size_bits(l);
            (
                if mnemonic == M::Rdrand { R::Rdrand } else { R::Rdseed },
                (register, 0, false),
            )
        }
        M::Umwait | M::Tpause => {
            let reason = if mnemonic == M::Umwait { R::Umwait } else { R::Tpause };
            let information = number(l.i.op_register(0)) << 3 | 1 << 11;
            let src = l.reg(0);
            l.emit(chain::<Plain>(), |o| {
                (o.aux, o.src, o.disp) = (reason as u16, src, information as i32);
            });
            return;
        }
        M::Invpcid => (R::Invpcid, operand(l, 0)),
        M::Xsaves | M::Xsaves64 => (R::Xsaves, operand(l, 0)),
        M::Xrstors | M::Xrstors64 => (R::Xrstors, operand(l, 0)),
        M::Sgdt | M::Sidt | M::Lgdt | M::Lidt => {
            let which = match mnemonic {
                M::Sgdt => 0,
                M::Sidt => 1,
                M::Lgdt => 2,
                _ => 3,
            };
            let wide = if l.i.code().op_code().operand_size() == 16 {
                0
            } else {
                1 << 11
            };
            (R::GdtrOrIdtr, operand(l, which << 28 | wide))
        }
        M::Sldt | M::Str | M::Lldt | M::Ltr => {
            let which = match mnemonic {
                M::Sldt => 0,
                M::Str => 1,
                M::Lldt => 2,
                _ => 3,
            };
            (R::LdtrOrTr, operand(l, which << 28))
        }
        M::Mov if l.i.op_register(0).is_dr() || l.i.op_register(1).is_dr() => {
            let from = l.i.op_register(1).is_dr();
            let (debug, general) = if from { (1, 0) } else { (0, 1) };
            let register = l.i.op_register(debug).number() as u64;
            if register > 7 {
                return;
            }
            let qualification = register | u64::from(from) << 4 | u64::from(number(l.i.op_register(general))) << 8;
            (R::MovDr, (0, qualification, false))
        }
        M::Mov if l.i.op_register(0).is_cr() || l.i.op_register(1).is_cr() => {
            let from = l.i.op_register(1).is_cr();
            let (control, general) = if from { (1, 0) } else { (0, 1) };
            let register = l.i.op_register(control).number() as u64;
            let qualification = register | u64::from(from) << 4 | u64::from(number(l.i.op_register(general))) << 8;
            let src = l.reg(general);
            l.emit(chain::<ControlRegister>(), |o| (o.imm, o.src) = (qualification, src));
            return;
        }
        M::Clts => {
            l.emit(chain::<ControlRegister>(), |o| o.imm = 2 << 4);
            return;
        }
        M::Invlpg => {
            let m = l.unchecked();
            l.emit_mem(chain::<Invlpg>(), m, |_| ());
            return;
        }
        M::Int3 | M::Into | M::Int1 => {
            let (vector, kind) = match mnemonic {
                M::Int3 => (3, EventKind::SoftwareException),
                M::Into => (4, EventKind::SoftwareException),
                _ => (1, EventKind::PrivilegedSoftware),
            };
            l.emit(chain::<Breakpoint>(), |o| (o.imm, o.aux) = (vector, kind as u16));
            return;
        }
        M::In | M::Out | M::Insb | M::Insw | M::Insd | M::Outsb | M::Outsw | M::Outsd => {
            return lower_io(l);
        }
        _ => return,
    };
    l.emit(chain::<Plain>(), |o| {
        (o.aux, o.disp, o.imm, o.src) = (reason as u16, information as i32, qualification, relative.into());
    });
}

fn lower_io(l: &mut Lower) {
    let mnemonic = l.i.mnemonic();
    let string = !matches!(mnemonic, M::In | M::Out);
    let input = matches!(mnemonic, M::In | M::Insb | M::Insw | M::Insd);
    let (size, port) = match mnemonic {
        M::In => (l.size(0), 1),
        M::Out => (l.size(1), 0),
        M::Insb | M::Outsb => (1, 0),
        M::Insw | M::Outsw => (2, 0),
        _ => (4, 0),
    };
    let immediate = !string && l.i.op_kind(port) != OpKind::Register;
    let number = if immediate { l.imm(port) & 0xff } else { 0 };
    let rep = string && (l.i.has_rep_prefix() || l.i.has_repne_prefix());
    let qualification = u64::from(size) - 1
        | u64::from(input) << 3
        | u64::from(string) << 4
        | u64::from(rep) << 5
        | u64::from(immediate) << 6
        | number << 16;
    let address = if string { l.address_size() } else { 0 };
    let segment = match l.i.segment_prefix() {
        _ if input => ES,
        Register::None => crate::cpu::DS,
        prefix => prefix.number(),
    };
    let information = address_size(address) << 7 | (segment as u32) << 15;
    l.emit(chain::<Io>(), |o| {
        o.aux = u16::from(size) | if immediate { 0 } else { 0x100 };
        (o.imm, o.dst, o.scale, o.seg, o.disp) =
            (qualification, address, rep.into(), segment as u8, information as i32);
    });
}
