//! The VMX instructions (SDM Vol. 3C chapter 31 "VMX Instruction Reference").

use iced_x86::Mnemonic as M;
use x86::msr::{IA32_FEATURE_CONTROL, IA32_RTIT_CTL};
use x86::vmx::caps::REVISION;
use x86::vmx::check::bad_ept_pointer;
use x86::vmx::controls::Secondary;
use x86::vmx::ept::EptPointer;
use x86::vmx::fields::{Launch, REGION, SHADOW, Width};
use x86::vmx::{ExitReason, FEATURE_CONTROL_LOCKED, FEATURE_CONTROL_VMX, Field, InstructionError};
use x86::watch::Change;

use super::{ExitInformation, Vmx, intercept};
use crate::cpu::{Cpu, slot};
use crate::exec::system::{Go, cold_bodies, cold_flows};
use crate::exec::trace;
use crate::flags;
use crate::lower::{End, Lower};
use crate::op::{Done, Op, chain, chain_flow};

/// In `aux`, beside the number of the exit reason: the operand is memory.
const MEMORY: u16 = 0x100;

cold_bodies! {
    /// Before the operands: the instruction exists, is executed by the supervisor, and by no guest. Exit reason in `aux`, instruction
    /// information in `disp`, displacement in `imm`, relative to RIP if `src` is 1.
    Check = check;
}

cold_flows! {
    /// The instruction, by its exit reason in `aux`.
    Execute = execute;
}

fn check(c: &mut Cpu, o: &Op) -> Done {
    let reason = ExitReason::of(o.aux).unwrap_or(ExitReason::Vmcall);
    let outside = c.vmx.is_none();
    if reason == ExitReason::Vmcall && outside {
        return Ok(());
    }
    if reason == ExitReason::Vmfunc && there(c, reason) {
        return vmfunc_check(c, o);
    }
    let compatibility = c.long_mode() && !c.is64();
    if !there(c, reason) || !c.protected() || compatibility {
        return Err(c.ud());
    }
    if c.non_root() && !shadowed(c, o, reason) {
        let relative = if o.src == 1 { c.page_ip() } else { 0 };
        let mut exit = ExitInformation::new(reason).qualified(o.imm.wrapping_add(relative));
        (exit.instruction, exit.length) = (o.disp as u32, o.len);
        return Err(c.vm_exit(exit));
    }
    c.supervisor_only()
}

/// The instruction exists where the processor is.
fn there(c: &Cpu, reason: ExitReason) -> bool {
    match reason {
        ExitReason::Vmxon => c.cr4.vmxe(),
        ExitReason::Vmfunc => c
            .guest()
            .is_some_and(|guest| guest.secondary.contains(Secondary::VM_FUNCTIONS)),
        _ => c.vmx.is_some(),
    }
}

/// VMREAD and VMWRITE that the guest executes on its shadow VMCS: its bitmap has a clear bit for the field. SDM Vol. 3C 25.6.15 "VMCS
/// Shadowing Bitmap Addresses".
fn shadowed(c: &mut Cpu, o: &Op, reason: ExitReason) -> bool {
    let Some(guest) = c.guest() else { return false };
    let bitmap = match reason {
        ExitReason::Vmread => guest.bitmaps.read,
        ExitReason::Vmwrite => guest.bitmaps.write,
        _ => return false,
    };
    if !guest.secondary.contains(Secondary::VMCS_SHADOWING) {
        return false;
    }
    // The second register of the instruction information has the encoding.
    let register = 8 * (o.disp as u32 >> 28) as u8;
    let encoding = c.get_sized(register, if c.is64() { 8 } else { 4 });
    encoding >> 15 == 0 && c.shared().ram.read_phys(bitmap + encoding / 8, 1) >> (encoding & 7) & 1 == 0
}

/// The EPT pointer that VMFUNC switches to; `None`: it causes a VM exit. SDM Vol. 3C 26.5.6.3 "EPTP Switching".
fn switched_pointer(c: &mut Cpu) -> Option<u64> {
    let (function, index) = (c.get::<4>(slot::RAX), c.get::<4>(slot::RCX));
    let guest = c.guest()?;
    if function != 0 || guest.functions & 1 == 0 || index >= 512 {
        return None;
    }
    let at = guest.eptp_list + 8 * index;
    let pointer = c.shared().ram.read_phys(at, 8);
    let bad = c.with_processor(|p| bad_ept_pointer(pointer, p)).unwrap_or(true);
    (!bad).then_some(pointer)
}

fn vmfunc_check(c: &mut Cpu, o: &Op) -> Done {
    if switched_pointer(c).is_some() {
        return Ok(());
    }
    let mut exit = ExitInformation::new(ExitReason::Vmfunc);
    exit.length = o.len;
    Err(c.vm_exit(exit))
}

/// VMFUNC leaf 0: what the guest has cached under other EPT pointers is kept.
fn vmfunc(c: &mut Cpu) {
    let Some(pointer) = switched_pointer(c) else { return };
    let index = c.get::<4>(slot::RCX);
    if let Some(guest) = c.guest_mut() {
        guest.ept = Some(EptPointer::from_bits(pointer));
        guest.ept_index = index as u16;
    }
    if let Some(at) = c.vmx.as_ref().and_then(|vmx| vmx.current) {
        c.write_vmcs_field(at, Field::EPT_POINTER, pointer);
        if c.vmx_caps
            .is_some_and(|caps| caps.secondary.contains(Secondary::VIRTUALIZATION_EXCEPTION))
        {
            c.write_vmcs_field(at, Field::EPTP_INDEX, index);
        }
    }
    let tag = c.vmx_tag();
    c.tlb.switch(tag);
    c.refresh_mode();
}

/// VMsucceed, or VMfail. SDM Vol. 3C 31.2 "Conventions".
enum Outcome {
    Succeed,
    FailInvalid,
    Fail(InstructionError),
}
use Outcome::{Fail, FailInvalid, Succeed};

impl Cpu {
    fn finish_vmx(&mut self, outcome: &Outcome) {
        let current = self.vmx.as_ref().and_then(|vmx| vmx.current);
        let set = match (outcome, current) {
            (Succeed, _) => 0,
            (Fail(error), Some(at)) => {
                self.write_vmcs_field(at, Field::INSTRUCTION_ERROR, *error as u64);
                ZF
            }
            (Fail(_) | FailInvalid, _) => CF,
        };
        self.nf = flags::from_rflags(set);
    }

    fn misplaced(&self, address: u64) -> bool {
        address & 0xfff != 0 || address >> self.maxphyaddr != 0
    }
}

const CF: u64 = 1;
const ZF: u64 = 1 << 6;

/// The instruction writes the region of a VMCS: it is alone in its block if code was decoded from there.
fn may_write(c: &mut Cpu, at: u64) -> Done {
    if c.shared().blocks.covers(at, REGION as u64) {
        c.need_solo()?;
    }
    Ok(())
}

fn quadword(c: &mut Cpu, o: &Op) -> Done<u64> {
    let ea = c.ea(o);
    let mut bytes = [0; 8];
    c.read_bytes(o, ea, &mut bytes)?;
    Ok(u64::from_le_bytes(bytes))
}

fn execute(c: &mut Cpu, o: &Op) -> Done<Go> {
    c.drain_records_first()?;
    let reason = ExitReason::of(o.aux & 0xff).unwrap_or(ExitReason::Vmcall);
    let next = c.next_ip(o);
    if reason == ExitReason::Vmcall && c.vmx.is_none() {
        return trace::vmcall(c, o);
    }
    if let Some(at) = c.vmx.as_ref().and_then(|vmx| vmx.current) {
        may_write(c, at)?;
    }
    if let Some(shadow) = c.guest().map(|guest| guest.link_pointer).filter(|&at| at != u64::MAX) {
        may_write(c, shadow)?;
    }
    let outcome = match reason {
        ExitReason::Vmfunc => {
            vmfunc(c);
            return Ok(Go::Look(next));
        }
        ExitReason::Vmxon => vmxon(c, o)?,
        ExitReason::Vmxoff => {
            c.vmx = None;
            c.bus_used |= c.init_pending;
            Succeed
        }
        ExitReason::Vmclear => vmclear(c, o)?,
        ExitReason::Vmptrld => vmptrld(c, o)?,
        ExitReason::Vmptrst => {
            let current = c.vmx.as_ref().and_then(|vmx| vmx.current).unwrap_or(u64::MAX);
            let ea = c.ea(o);
            c.write_bytes(o, ea, &current.to_le_bytes())?;
            Succeed
        }
        ExitReason::Vmread => vmread(c, o)?,
        ExitReason::Vmwrite => vmwrite(c, o)?,
        ExitReason::Invept => invept(c, o)?,
        ExitReason::Invvpid => invvpid(c, o)?,
        ExitReason::Vmlaunch => launch(c, o, true),
        ExitReason::Vmresume => launch(c, o, false),
        _ => Fail(InstructionError::VmcallInRoot),
    };
    c.finish_vmx(&outcome);
    Ok(Go::Look(next))
}

fn vmxon(c: &mut Cpu, o: &Op) -> Done<Outcome> {
    if c.vmx.is_some() {
        return Ok(Fail(InstructionError::VmxonInRoot));
    }
    let control = c
        .with_view(o, |bus, view| bus.read_msr(IA32_FEATURE_CONTROL, view))
        .unwrap_or(0);
    let enabled = FEATURE_CONTROL_LOCKED | FEATURE_CONTROL_VMX;
    let (cr0, cr4) = (c.cr0.into_bits(), c.cr4.into_bits());
    let fixed = cr0 & x86::vmx::caps::CR0_FIXED0 == x86::vmx::caps::CR0_FIXED0
        && cr4 & x86::vmx::caps::CR4_FIXED0 == x86::vmx::caps::CR4_FIXED0;
    if control & enabled != enabled || !fixed {
        return Err(c.gp(0));
    }
    let at = quadword(c, o)?;
    if c.misplaced(at) || c.shared().ram.read_phys(at, 4) as u32 != REVISION {
        return Ok(FailInvalid);
    }
    if c.vmx_caps.is_some_and(|caps| !caps.trace) && c.features.intel_pt() {
        // SDM Vol. 3C 31.3 "VMXON": tracing ends on a part that has none in VMX operation.
        let control = c
            .with_view(o, |bus, view| bus.read_msr(IA32_RTIT_CTL, view))
            .unwrap_or(0);
        if control & 1 != 0 {
            let _ = c.with_view(o, |bus, view| bus.write_msr(IA32_RTIT_CTL, control & !1, view));
            c.watched.ask = true;
        }
    }
    c.vmx = Some(Box::new(Vmx {
        vmxon: at,
        current: None,
        guest: None,
    }));
    Ok(Succeed)
}

fn vmclear(c: &mut Cpu, o: &Op) -> Done<Outcome> {
    let at = quadword(c, o)?;
    if c.misplaced(at) {
        return Ok(Fail(InstructionError::VmclearAddress));
    }
    if c.vmx.as_ref().is_some_and(|vmx| vmx.vmxon == at) {
        return Ok(Fail(InstructionError::VmclearVmxonPointer));
    }
    may_write(c, at)?;
    let mut v = c.read_vmcs(at);
    v.set_launch(Launch::Clear);
    let launch = v.0[1];
    let _ = c.shared().write_ram(at + 8, &launch.to_le_bytes());
    if let Some(vmx) = &mut c.vmx
        && vmx.current == Some(at)
    {
        vmx.current = None;
    }
    Ok(Succeed)
}

fn vmptrld(c: &mut Cpu, o: &Op) -> Done<Outcome> {
    let at = quadword(c, o)?;
    if c.misplaced(at) {
        return Ok(Fail(InstructionError::VmptrldAddress));
    }
    if c.vmx.as_ref().is_some_and(|vmx| vmx.vmxon == at) {
        return Ok(Fail(InstructionError::VmptrldVmxonPointer));
    }
    // All of it is RAM, or the identifier reads as all ones.
    let identifier = c.shared().ram.read_phys(at, 4) as u32;
    let shadow = c
        .vmx_caps
        .is_some_and(|caps| caps.secondary.contains(Secondary::VMCS_SHADOWING));
    if identifier != REVISION && !(shadow && identifier == REVISION | SHADOW) {
        return Ok(Fail(InstructionError::VmptrldRevision));
    }
    if let Some(vmx) = &mut c.vmx {
        vmx.current = Some(at);
    }
    c.change(Change::VmcsPointer);
    Ok(Succeed)
}

/// The current VMCS and the field that an encoding names: `Err` with how the instruction fails.
fn field(c: &Cpu, encoding: u64) -> Result<(u64, Field, bool, bool), Outcome> {
    let vmcs = match c.guest() {
        // The guest's shadow VMCS.
        Some(guest) => Some(guest.link_pointer).filter(|&at| at != u64::MAX),
        None => c.vmx.as_ref().and_then(|vmx| vmx.current),
    };
    let Some(at) = vmcs else {
        return Err(FailInvalid);
    };
    let Some(caps) = c.vmx_caps else {
        return Err(FailInvalid);
    };
    match Field::of_encoding(encoding) {
        Some((row, high)) if row.exists(&caps) => {
            let writable = !row.field.read_only() || caps.write_all_fields;
            Ok((at, row.field, high, writable))
        }
        _ => Err(Fail(InstructionError::UnsupportedField)),
    }
}

fn vmread(c: &mut Cpu, o: &Op) -> Done<Outcome> {
    let size = if c.is64() { 8 } else { 4 };
    let encoding = c.get_sized(o.src, size);
    let (at, field, high, _) = match field(c, encoding) {
        Ok(found) => found,
        Err(outcome) => return Ok(outcome),
    };
    let slot = c.shared().ram.read_phys(at + 8 * field.slot() as u64, 8);
    let value = match (field.width(), high) {
        (Width::Bits16, _) => slot & 0xffff,
        (Width::Bits32, _) => slot & 0xffff_ffff,
        (_, true) => slot >> 32,
        _ => slot,
    };
    if o.aux & MEMORY != 0 {
        let ea = c.ea(o);
        c.write_bytes(o, ea, &value.to_le_bytes()[..size as usize])?;
    } else {
        c.set_sized(o.dst, size, value);
    }
    Ok(Succeed)
}

fn vmwrite(c: &mut Cpu, o: &Op) -> Done<Outcome> {
    let size = if c.is64() { 8 } else { 4 };
    let encoding = c.get_sized(o.dst, size);
    let value = if o.aux & MEMORY != 0 {
        let ea = c.ea(o);
        let mut bytes = [0; 8];
        c.read_bytes(o, ea, &mut bytes[..size as usize])?;
        u64::from_le_bytes(bytes)
    } else {
        c.get_sized(o.src, size)
    };
    let (at, field, high, writable) = match field(c, encoding) {
        Ok(found) => found,
        Err(outcome) => return Ok(outcome),
    };
    if !writable {
        return Ok(Fail(InstructionError::ReadOnlyField));
    }
    let value = if high {
        c.shared().ram.read_phys(at + 8 * field.slot() as u64, 8) & 0xffff_ffff | value << 32
    } else {
        value
    };
    c.write_vmcs_field(at, field, value);
    Ok(Succeed)
}

fn descriptor(c: &mut Cpu, o: &Op) -> Done<[u64; 2]> {
    let ea = c.ea(o);
    let mut bytes = [0; 16];
    c.read_bytes(o, ea, &mut bytes)?;
    Ok([0, 8].map(|at| {
        let mut half = [0; 8];
        half.copy_from_slice(&bytes[at..at + 8]);
        u64::from_le_bytes(half)
    }))
}

fn invept(c: &mut Cpu, o: &Op) -> Done<Outcome> {
    let kind = c.get_sized(o.dst, if c.is64() { 8 } else { 4 });
    let [pointer, reserved] = descriptor(c, o)?;
    let bad = c.with_processor(|p| bad_ept_pointer(pointer, p)).unwrap_or(true);
    let valid = match kind {
        1 => !bad && reserved == 0,
        2 => true,
        _ => false,
    };
    if !valid {
        return Ok(Fail(InstructionError::InvalidOperand));
    }
    c.tlb.flush_ept((kind == 1).then_some(pointer));
    Ok(Succeed)
}

fn invvpid(c: &mut Cpu, o: &Op) -> Done<Outcome> {
    let kind = c.get_sized(o.dst, if c.is64() { 8 } else { 4 });
    let [vpid, linear] = descriptor(c, o)?;
    let valid = vpid >> 16 == 0
        && match kind {
            0 => vpid != 0 && c.canonical_register(linear),
            1 | 3 => vpid != 0,
            2 => true,
            _ => false,
        };
    if !valid {
        return Ok(Fail(InstructionError::InvalidOperand));
    }
    match kind {
        0 => c.tlb.flush_page(linear),
        2 => c.tlb.flush_guests(),
        // Type 3 spares global translations; forgetting more than asked is allowed.
        _ => c.tlb.flush_vpid(vpid as u16),
    }
    Ok(Succeed)
}

/// VMLAUNCH, VMRESUME: what can fail as an instruction; the run loop makes the entry once it has retired.
fn launch(c: &mut Cpu, o: &Op, launch: bool) -> Outcome {
    let Some(at) = c.vmx.as_ref().and_then(|vmx| vmx.current) else {
        return FailInvalid;
    };
    if c.stack_shadow_at == c.steps_after(o).wrapping_sub(1) {
        return Fail(InstructionError::EntryBlockedByMovSs);
    }
    let v = c.read_vmcs(at);
    if v.identifier() & SHADOW != 0 {
        return FailInvalid;
    }
    match c.may_enter(&v, launch) {
        Ok(()) => {
            c.entry = Some(launch);
            c.skip_step = true;
            Succeed
        }
        Err(error) => Fail(error),
    }
}

fn reason(mnemonic: M) -> Option<ExitReason> {
    Some(match mnemonic {
        M::Vmcall => ExitReason::Vmcall,
        M::Vmclear => ExitReason::Vmclear,
        M::Vmlaunch => ExitReason::Vmlaunch,
        M::Vmptrld => ExitReason::Vmptrld,
        M::Vmptrst => ExitReason::Vmptrst,
        M::Vmread => ExitReason::Vmread,
        M::Vmresume => ExitReason::Vmresume,
        M::Vmwrite => ExitReason::Vmwrite,
        M::Vmxoff => ExitReason::Vmxoff,
        M::Vmxon => ExitReason::Vmxon,
        M::Invept => ExitReason::Invept,
        M::Invvpid => ExitReason::Invvpid,
        M::Vmfunc => ExitReason::Vmfunc,
        _ => return None,
    })
}

/// The ops of a VMX instruction; `None`: it is none, or the part has no VMX.
pub(crate) fn lower(l: &mut Lower) -> Option<End> {
    let reason = reason(l.i.mnemonic())?;
    if !l.features.vmx() {
        return None;
    }
    let (information, displacement, relative) = intercept::operand_information(l);
    l.emit(chain::<Check>(), |o| {
        (o.aux, o.disp, o.imm, o.src) = (reason as u16, information as i32, displacement, relative.into());
    });
    let size = if l.is64() { 8 } else { 4 };
    let execute = chain_flow::<Execute>();
    Some(match reason {
        ExitReason::Vmxon | ExitReason::Vmclear | ExitReason::Vmptrld | ExitReason::Vmptrst => {
            let m = l.mem(8, reason == ExitReason::Vmptrst);
            l.flow_mem(execute, m, |o| o.aux = reason as u16)
        }
        ExitReason::Vmread => {
            let src = l.reg(1);
            if l.is_reg(0) {
                let dst = l.reg(0);
                l.flow(execute, |o| (o.aux, o.dst, o.src) = (reason as u16, dst, src))
            } else {
                let m = l.mem(size, true);
                l.flow_mem(execute, m, |o| (o.aux, o.src) = (reason as u16 | MEMORY, src))
            }
        }
        ExitReason::Vmwrite => {
            let dst = l.reg(0);
            if l.is_reg(1) {
                let src = l.reg(1);
                l.flow(execute, |o| (o.aux, o.dst, o.src) = (reason as u16, dst, src))
            } else {
                let m = l.mem(size, false);
                l.flow_mem(execute, m, |o| (o.aux, o.dst) = (reason as u16 | MEMORY, dst))
            }
        }
        ExitReason::Invept | ExitReason::Invvpid => {
            let dst = l.reg(0);
            let m = l.mem(16, false);
            l.flow_mem(execute, m, |o| (o.aux, o.dst) = (reason as u16, dst))
        }
        _ => l.flow(execute, |o| o.aux = reason as u16),
    })
}
