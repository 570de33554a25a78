//! Segment registers, descriptor tables and far transfers of control.

use iced_x86::{Code, Mnemonic as M, OpKind, Register};
use x86::watch::Far;

use crate::cpu::{Cpu, DS, ES, FS, GS, SS, Segment, Table, slot};
use crate::exec::system::{Go, SupervisorOnly, cold_bodies, cold_flows};
use crate::flags;
use crate::lower::{End, Lower};
use crate::op::{Done, Op, chain, chain_flow};
use crate::segment::{GP, NP, named};

cold_bodies! {
    /// MOV from segment register `aux` to a register, `imm` bytes.
    ReadSelector = |c: &mut Cpu, o: &Op| {
        let v = c.seg[o.aux as usize].selector as u64;
        c.set_sized(o.dst, o.imm as u8, v);
        Ok(())
    };
    /// PUSH of segment register `aux`, `imm` bytes.
    PushSelector = |c: &mut Cpu, o: &Op| {
        let v = c.seg[o.aux as usize].selector as u64;
        match o.imm {
            2 => c.push::<2>(o, v),
            // Two bytes are written, and what was above them stays (`undefined::PINS`).
            4 => {
                let sp = c.get::<8>(slot::RSP).wrapping_sub(4) & c.stack_mask();
                let linear = c.segmented(SS, sp, 2, true)?;
                c.store::<2>(o, linear, v)?;
                c.set_sp(sp);
                Ok(())
            }
            _ => c.push::<8>(o, v),
        }
    };
    /// MOV to segment register `aux` from `src`, where no mode bit depends on it.
    LoadSelector = load;
    PopSelector = pop;
    LoadPointer = load_pointer;
    /// Before the operand of an instruction that does not exist outside protected mode.
    NeedProtected = |c: &mut Cpu, _: &Op| need_protected(c);
    /// Before the operand of an instruction that CR4.UMIP keeps for the kernel.
    NoUmip = |c: &mut Cpu, _: &Op| no_umip(c);
    /// SLDT, STR: register 0 or 1 in `aux`, `imm` bytes.
    StoreSystem = |c: &mut Cpu, o: &Op| {
        let v = if o.aux == 0 { c.ldtr.selector } else { c.tr.selector } as u64;
        c.set_sized(o.dst, o.imm as u8, v);
        Ok(())
    };
    Smsw = |c: &mut Cpu, o: &Op| {
        let v = c.cr0_read();
        c.set_sized(o.dst, o.imm as u8, v);
        Ok(())
    };
    /// SGDT, SIDT: table in `aux`.
    StoreTable = |c: &mut Cpu, o: &Op| {
        let t = if o.aux == 0 { c.gdtr } else { c.idtr };
        let mut bytes = [0; 10];
        bytes[..2].copy_from_slice(&t.limit.to_le_bytes());
        bytes[2..].copy_from_slice(&t.base.to_le_bytes());
        let (ea, n) = (c.ea(o), if c.is64() { 10 } else { 6 });
        // It is the base that is to be aligned (SDM Vol. 3A 3.5.1 "Segment Descriptor Tables").
        let align = (ea & 3 == 2) as u64;
        c.write_aligned(o, ea, &bytes[..n], align)
    };
    /// LGDT, LIDT: table in `aux`, operand size in `imm`.
    LoadTable = |c: &mut Cpu, o: &Op| {
        c.supervisor_only()?;
        let mut bytes = [0; 10];
        let (ea, n) = (c.ea(o), if c.is64() { 10 } else { 6 });
        c.read_bytes(o, ea, &mut bytes[..n])?;
        let [l0, l1, rest @ ..] = bytes;
        let mut base = u64::from_le_bytes(rest);
        if o.imm == 2 {
            // A 16-bit operand size loads 24 bits of the base (SDM Vol. 2A "LGDT/LIDT").
            base &= 0xff_ffff;
        }
        if c.is64() && !c.canonical_register(base) {
            return Err(c.gp(0));
        }
        let t = Table { base, limit: u16::from_le_bytes([l0, l1]) };
        if o.aux == 0 { c.gdtr = t } else { c.idtr = t }
        Ok(())
    };
    Lldt = lldt;
    Ltr = ltr;
    /// LAR (`aux` 0), LSL (1), VERR (2), VERW (3).
    Look = look;
    /// ARPL of memory, which is written only where it changes, and only then has to be writable. `imm` is the address size.
    ArplMemory = |c: &mut Cpu, o: &Op| {
        let offset = c.ea(o) & u64::MAX >> (64 - 8 * o.imm as u32);
        let linear = c.segmented(o.seg as usize, offset, 2, false)?;
        let (dst, src) = (c.load::<2>(o, linear)?, c.get::<2>(o.src));
        let lower = dst & 3 < src & 3;
        if lower {
            let linear = c.segmented(o.seg as usize, offset, 2, true)?;
            c.store::<2>(o, linear, dst & !3 | src & 3)?;
        }
        c.nf = c.nf & !flags::ZF | if lower { flags::ZF } else { 0 };
        Ok(())
    };
    Arpl = |c: &mut Cpu, o: &Op| {
        let (dst, src) = (c.get::<2>(o.dst), c.get::<2>(o.src));
        let lower = dst & 3 < src & 3;
        if lower {
            c.set::<2>(o.dst, dst & !3 | src & 3);
        }
        c.nf = c.nf & !flags::ZF | if lower { flags::ZF } else { 0 };
        Ok(())
    };
}

cold_flows! {
    /// The same loads where the mode depends on the segment.
    LoadSelectorFlow = |c: &mut Cpu, o: &Op| {
        load(c, o)?;
        c.refresh_mode();
        Ok(Go::To(c.next_ip(o)))
    };
    PopSelectorFlow = |c: &mut Cpu, o: &Op| {
        pop(c, o)?;
        c.refresh_mode();
        Ok(Go::To(c.next_ip(o)))
    };
    LoadPointerFlow = |c: &mut Cpu, o: &Op| {
        load_pointer(c, o)?;
        c.refresh_mode();
        Ok(Go::To(c.next_ip(o)))
    };
    /// Far JMP (`dst` 0) or CALL (1) to selector `aux`, offset `imm`; `src` is the operand size.
    FarDirect = |c: &mut Cpu, o: &Op| {
        let far = if o.dst != 0 { Far::Call } else { Far::Jump };
        c.far(o, far, |c, o| {
            let rip = c.far_transfer(o, o.aux, o.imm, o.src as u64, o.dst != 0)?;
            Ok(c.after_flags(rip))
        })
    };
    /// The same with the pointer in memory.
    FarIndirect = |c: &mut Cpu, o: &Op| {
        let (offset, selector) = far_pointer(c, o)?;
        let far = if o.dst != 0 { Far::Call } else { Far::Jump };
        c.far(o, far, |c, o| {
            let rip = c.far_transfer(o, selector, offset, o.src as u64, o.dst != 0)?;
            Ok(c.after_flags(rip))
        })
    };
    /// Far RET: operand size `src`, parameter bytes `imm`.
    FarRet = |c: &mut Cpu, o: &Op| {
        c.far(o, Far::Ret, |c, o| c.far_return(o, o.src as u64, o.imm).map(Go::To))
    };
    /// IRET: operand size `src`.
    Iret = |c: &mut Cpu, o: &Op| {
        if c.records_returns() {
            return c.recorded_return(o);
        }
        c.far(o, Far::Iret, |c, o| {
            let rip = c.interrupt_return(o, o.src as u64)?;
            Ok(c.after_flags(rip))
        })
    };
}

fn load(c: &mut Cpu, o: &Op) -> Done {
    let (seg, selector) = (o.aux as usize, c.get::<2>(o.src) as u16);
    c.load_segment(seg, selector)?;
    shadow(c, o, seg);
    Ok(())
}

/// After a load of SS by MOV or POP no interrupt and no single-step trap comes before the next instruction
/// (SDM Vol. 3A 7.8.3 "Masking Exceptions and Interrupts When Switching Stacks").
fn shadow(c: &mut Cpu, o: &Op, seg: usize) {
    if seg == SS {
        c.shadow_at = c.steps_after(o);
        c.stack_shadow_at = c.shadow_at;
        c.skip_step = true;
    }
}

fn pop(c: &mut Cpu, o: &Op) -> Done {
    let (seg, size) = (o.aux as usize, o.imm);
    // Nothing but the selector is read: SDM Vol. 2B "POP" leaves the rest open, and Intel's processors do not look at it.
    let selector = c.stack_item(o, 0, 2)? as u16;
    // The stack moves by the size that SS had before.
    let (old, before) = (c.get::<8>(slot::RSP), c.stack_mask());
    c.load_segment(seg, selector)?;
    let sp = old & !before | old.wrapping_add(size) & before;
    c.set::<8>(slot::RSP, sp);
    shadow(c, o, seg);
    Ok(())
}

/// A far pointer in memory: offset of `src` bytes, then the selector. The offset is read first, with all its faults: where the
/// segment ends between the two, a page that the offset lacks is reported before that.
fn far_pointer(c: &mut Cpu, o: &Op) -> Done<(u64, u16)> {
    let (ea, size) = (c.ea(o), o.src as usize);
    let mut bytes = [0; 10];
    if c.later_part(o, ea, size as u64, 2).is_none() {
        c.read_aligned(o, ea, &mut bytes[..size], size as u64)?;
        return Err(c.segment_fault(o.seg as usize));
    }
    // 16:16 needs 2, 16:32 needs 4 (SDM Vol. 3A Table 7-7).
    c.read_aligned(o, ea, &mut bytes[..size + 2], size as u64)?;
    let mut offset = [0; 8];
    offset[..size].copy_from_slice(&bytes[..size]);
    Ok((
        u64::from_le_bytes(offset),
        u16::from_le_bytes([bytes[size], bytes[size + 1]]),
    ))
}

/// LDS, LES, LFS, LGS, LSS: segment `aux`, register `dst`, operand size `src`.
fn load_pointer(c: &mut Cpu, o: &Op) -> Done {
    let (offset, selector) = far_pointer(c, o)?;
    c.load_segment(o.aux as usize, selector)?;
    c.set_sized(o.dst, o.src, offset);
    Ok(())
}

/// These instructions do not exist in real-address and virtual-8086 mode.
fn need_protected(c: &mut Cpu) -> Done {
    if c.protected() { Ok(()) } else { Err(c.ud()) }
}

/// CR4.UMIP keeps user code from reading where the tables are (SDM Vol. 3A 2.5 "Control Registers").
fn no_umip(c: &mut Cpu) -> Done {
    if c.cr4.umip() && c.cpl != 0 {
        return Err(c.gp(0));
    }
    Ok(())
}

/// A descriptor for LDTR or TR, from the GDT: present, of an allowed type, with its base.
fn system_segment(c: &mut Cpu, selector: u16, kinds: &[u8]) -> Done<(crate::segment::Descriptor, Segment)> {
    let error = named(selector);
    if selector & 4 != 0 {
        return Err(c.gp(error));
    }
    let d = c.descriptor(selector, GP, 0)?;
    if !d.system() || !kinds.contains(&d.kind()) {
        return Err(c.gp(error));
    }
    let high = if c.is64() { c.descriptor_high(selector, d)? } else { 0 };
    if !d.present() {
        return Err(c.fault(NP, Some(error)));
    }
    let mut s = d.segment(selector);
    s.base |= high << 32;
    if c.is64() && !c.canonical_register(s.base) {
        return Err(c.gp(error));
    }
    Ok((d, s))
}

/// SDM Vol. 2A "LLDT".
fn lldt(c: &mut Cpu, o: &Op) -> Done {
    c.supervisor_only()?;
    let selector = c.get::<2>(o.src) as u16;
    if selector & 0xfffc == 0 {
        c.ldtr = Segment {
            selector,
            ..Segment::default()
        };
        return Ok(());
    }
    c.ldtr = system_segment(c, selector, &[2])?.1;
    Ok(())
}

/// SDM Vol. 2A "LTR".
fn ltr(c: &mut Cpu, o: &Op) -> Done {
    c.supervisor_only()?;
    let selector = c.get::<2>(o.src) as u16;
    if selector & 0xfffc == 0 {
        return Err(c.gp(0));
    }
    let kinds: &[u8] = if c.long_mode() { &[9] } else { &[1, 9] };
    let (d, mut s) = system_segment(c, selector, kinds)?;
    // The descriptor in memory becomes busy.
    c.write_system(d.at.wrapping_add(5), &[(d.bits >> 40) as u8 | 2])?;
    s.attributes |= 2;
    c.tr = s;
    Ok(())
}

/// LAR, LSL, VERR, VERW: what may be seen of a descriptor (SDM Vol. 2A "LAR", "LSL", Vol. 2D "VERR/VERW").
fn look(c: &mut Cpu, o: &Op) -> Done {
    let selector = c.get::<2>(o.src) as u16;
    let value = visible(c, selector, o.aux)?;
    c.nf = c.nf & !flags::ZF | if value.is_some() { flags::ZF } else { 0 };
    if let Some(value) = value
        && o.aux < 2
    {
        c.set_sized(o.dst, o.imm as u8, value);
    }
    Ok(())
}

fn visible(c: &mut Cpu, selector: u16, which: u16) -> Done<Option<u64>> {
    if selector & 0xfffc == 0 {
        return Ok(None);
    }
    let Some(d) = c.descriptor_or_none(selector)? else {
        return Ok(None);
    };
    let rpl = (selector & 3) as u8;
    let reachable = d.conforming() || c.cpl <= d.dpl() && rpl <= d.dpl();
    let kind_fits = match which {
        2 => d.readable(),
        3 => d.writable(),
        _ if !d.system() => true,
        // Tables 3-53 and 3-66: gates have rights but no limit.
        _ => match (d.kind(), c.long_mode()) {
            (2 | 9 | 0xb, _) => true,
            (1 | 3, false) => true,
            (4 | 5, false) => which == 0,
            (0xc, _) => which == 0,
            _ => false,
        },
    };
    if !reachable || !kind_fits {
        return Ok(None);
    }
    Ok(Some(match which {
        0 => d.bits >> 32 & 0x00f0_ff00,
        1 => d.limit() as u64,
        _ => 0,
    }))
}

/// The number of a segment register operand, if the instruction may load it.
fn loadable(r: Register) -> Option<usize> {
    match r {
        Register::ES => Some(ES),
        Register::SS => Some(SS),
        Register::DS => Some(DS),
        Register::FS => Some(FS),
        Register::GS => Some(GS),
        _ => None,
    }
}

/// Whether a block's mode bits depend on a segment register.
fn shapes_mode(l: &Lower, seg: usize) -> bool {
    !l.is64() && matches!(seg, ES | SS | DS)
}

/// MOV to and from segment registers.
pub(crate) fn lower_mov(l: &mut Lower) -> End {
    if l.is_reg(0) && l.i.op_register(0).is_segment_register() {
        let Some(seg) = loadable(l.i.op_register(0)) else {
            return l.ud();
        };
        let src = l.read(1, 2);
        if shapes_mode(l, seg) {
            return l.flow(chain_flow::<LoadSelectorFlow>(), |o| (o.src, o.aux) = (src, seg as u16));
        }
        l.emit(chain::<LoadSelector>(), |o| (o.src, o.aux) = (src, seg as u16));
        return End::Open;
    }
    let seg = l.i.op_register(1).number() as u16;
    if seg > 5 {
        return l.ud();
    }
    // Memory takes 16 bits, a register its operand size.
    let size = if l.is_mem(0) { 2 } else { l.size(0) };
    l.write(0, size, |l, dst| {
        l.emit(chain::<ReadSelector>(), |o| {
            (o.dst, o.aux, o.imm) = (dst, seg, size as u64)
        })
    });
    End::Open
}

/// PUSH and POP of segment registers.
pub(crate) fn lower_stack(l: &mut Lower) -> End {
    let size = super::mov::stack_size(l) as u64;
    let register = l.i.op_register(0);
    if l.i.mnemonic() == M::Push {
        let seg = register.number() as u16;
        l.emit(chain::<PushSelector>(), |o| {
            (o.aux, o.imm, o.seg) = (seg, size, SS as u8)
        });
        return End::Open;
    }
    let Some(seg) = loadable(register) else {
        return l.ud();
    };
    let set = |o: &mut Op| (o.aux, o.imm, o.seg) = (seg as u16, size, SS as u8);
    if shapes_mode(l, seg) {
        return l.flow(chain_flow::<PopSelectorFlow>(), set);
    }
    l.emit(chain::<PopSelector>(), set);
    End::Open
}

/// Whether PUSH or POP has a segment register as its operand.
pub(crate) fn is_stack(l: &Lower) -> bool {
    l.is_reg(0) && l.i.op_register(0).is_segment_register()
}

/// Whether JMP or CALL is far.
pub(crate) fn is_far(l: &Lower) -> bool {
    l.i.is_jmp_far() || l.i.is_call_far() || l.i.is_jmp_far_indirect() || l.i.is_call_far_indirect()
}

/// Far JMP and CALL.
pub(crate) fn lower_far(l: &mut Lower) -> End {
    let call = (l.i.mnemonic() == M::Call) as u8;
    let size = match l.i.code() {
        Code::Jmp_ptr1616 | Code::Call_ptr1616 | Code::Jmp_m1616 | Code::Call_m1616 => 2,
        Code::Jmp_m1664 | Code::Call_m1664 => 8,
        _ => 4,
    };
    if matches!(l.i.op_kind(0), OpKind::FarBranch16 | OpKind::FarBranch32) {
        let offset = if l.i.op_kind(0) == OpKind::FarBranch16 {
            l.i.far_branch16() as u64
        } else {
            l.i.far_branch32() as u64
        };
        let selector = l.i.far_branch_selector();
        return l.flow(chain_flow::<FarDirect>(), |o| {
            (o.aux, o.imm, o.src, o.dst, o.seg) = (selector, offset, size, call, SS as u8);
        });
    }
    let m = l.mem(size, false);
    l.flow_mem(chain_flow::<FarIndirect>(), m, |o| (o.src, o.dst) = (size, call))
}

pub(crate) fn lower(l: &mut Lower) -> End {
    let mnemonic = l.i.mnemonic();
    if matches!(
        mnemonic,
        M::Sldt | M::Str | M::Lldt | M::Ltr | M::Lar | M::Lsl | M::Verr | M::Verw | M::Arpl
    ) {
        l.emit(chain::<NeedProtected>(), |_| ());
    }
    if l.features.umip() && matches!(mnemonic, M::Sldt | M::Str | M::Smsw | M::Sgdt | M::Sidt) {
        l.emit(chain::<NoUmip>(), |_| ());
    }
    match mnemonic {
        M::Retf => {
            let size = match l.i.code() {
                Code::Retfw | Code::Retfw_imm16 => 2,
                Code::Retfq | Code::Retfq_imm16 => 8,
                _ => 4,
            };
            let extra = if l.i.op_count() > 0 { l.imm(0) & 0xffff } else { 0 };
            l.flow(chain_flow::<FarRet>(), |o| {
                (o.src, o.imm, o.seg) = (size, extra, SS as u8)
            })
        }
        M::Iret | M::Iretd | M::Iretq => {
            let size = match mnemonic {
                M::Iret => 2,
                M::Iretd => 4,
                _ => 8,
            };
            l.flow(chain_flow::<Iret>(), |o| (o.src, o.seg) = (size, SS as u8))
        }
        M::Lds | M::Les | M::Lss | M::Lfs | M::Lgs => {
            let seg = match mnemonic {
                M::Lds => DS,
                M::Les => ES,
                M::Lss => SS,
                M::Lfs => FS,
                _ => GS,
            };
            let (dst, size) = (l.reg(0), l.size(0));
            let m = l.mem(size, false);
            let set = |o: &mut Op| (o.dst, o.src, o.aux) = (dst, size, seg as u16);
            if shapes_mode(l, seg) {
                return l.flow_mem(chain_flow::<LoadPointerFlow>(), m, set);
            }
            l.emit_mem(chain::<LoadPointer>(), m, set);
            End::Open
        }
        M::Sldt | M::Str | M::Smsw => {
            let size = if l.is_mem(0) { 2 } else { l.size(0) };
            let f = if mnemonic == M::Smsw {
                chain::<Smsw>()
            } else {
                chain::<StoreSystem>()
            };
            let which = (mnemonic == M::Str) as u16;
            l.write(0, size, |l, dst| {
                l.emit(f, |o| (o.dst, o.aux, o.imm) = (dst, which, size as u64))
            });
            End::Open
        }
        M::Sgdt | M::Sidt => {
            let size = if l.is64() { 10 } else { 6 };
            let m = l.mem(size, true);
            let which = (mnemonic == M::Sidt) as u16;
            l.emit_mem(chain::<StoreTable>(), m, |o| o.aux = which);
            End::Open
        }
        M::Lgdt | M::Lidt => {
            let size = if l.is64() { 10 } else { 6 };
            l.emit(chain::<SupervisorOnly>(), |_| ());
            let m = l.mem(size, false);
            let which = (mnemonic == M::Lidt) as u16;
            let operand = match l.i.code() {
                Code::Lgdt_m1632_16 | Code::Lidt_m1632_16 => 2,
                _ => 4,
            };
            l.emit_mem(chain::<LoadTable>(), m, |o| (o.aux, o.imm) = (which, operand));
            End::Open
        }
        M::Lldt | M::Ltr => {
            l.emit(chain::<SupervisorOnly>(), |_| ());
            let src = l.read(0, 2);
            let f = if mnemonic == M::Ltr {
                chain::<Ltr>()
            } else {
                chain::<Lldt>()
            };
            l.emit(f, |o| o.src = src);
            End::Open
        }
        M::Lar | M::Lsl => {
            let (dst, size) = (l.reg(0), l.size(0));
            let src = l.read(1, 2);
            let which = (mnemonic == M::Lsl) as u16;
            l.emit(chain::<Look>(), |o| {
                (o.dst, o.src, o.aux, o.imm) = (dst, src, which, size as u64)
            });
            End::Open
        }
        M::Verr | M::Verw => {
            let src = l.read(0, 2);
            let which = 2 + (mnemonic == M::Verw) as u16;
            l.emit(chain::<Look>(), |o| (o.src, o.aux) = (src, which));
            End::Open
        }
        _ => {
            let src = l.reg(1);
            if l.is_mem(0) {
                let (seg, size) = (l.segment(), l.address_size());
                let m = l.sum();
                l.emit_mem(chain::<ArplMemory>(), m, |o| {
                    (o.src, o.seg, o.imm) = (src, seg, size as u64);
                });
                return End::Open;
            }
            l.modify(0, 2, |l, dst| l.emit(chain::<Arpl>(), |o| (o.dst, o.src) = (dst, src)));
            End::Open
        }
    }
}
