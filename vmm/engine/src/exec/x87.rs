//! The x87 instructions: checks, operands and pointers here, the work in [`crate::fpu`].

use iced_x86::{Code, Encoder, Instruction, Mnemonic as M, OpKind, Register};

use crate::cpu::{CS, Cpu, slot};
use crate::fpu::state::EnvironmentFormat;
use crate::fpu::x87::{X87Insn, X87Memory, execute};
use crate::lower::{End, Lower, body};
use crate::mmu::Access;
use crate::op::{Done, Handler, Op, chain};

/// In an op's `imm`, above the instruction: the address size of a store whose segment is still to be checked, else 0.
const STORE_ADDRESS: u32 = 56;

impl Cpu {
    /// EM or TS is #NM for every x87 instruction but WAIT. SDM Vol. 3A 2.5 "Control Registers".
    #[inline]
    fn x87_ready(&mut self) -> Done {
        if self.cr0.em() || self.cr0.ts() {
            return Err(self.fault(7, None));
        }
        Ok(())
    }

    /// An instruction that computes: see [`crate::fpu::x87`].
    #[inline(never)]
    fn x87(&mut self, o: &Op) -> Done {
        self.x87_ready()?;
        self.no_math_fault()?;
        let insn = X87Insn::from_bits(o.imm);
        let mut memory = [0; 16];
        let (size, linear) = (insn.memory.size(), self.ea(o));
        if insn.memory != X87Memory::None {
            if insn.writes_memory() {
                return self.x87_store(o, insn);
            }
            self.read_bytes(o, linear, &mut memory[..size])?;
            self.fpu.fdp = self.offset(o, linear);
            self.fpu.fds = self.seg[(o.seg as usize).min(5)].selector;
        }
        self.fpu.fip = self.ip(o);
        self.fpu.fcs = self.seg[CS].selector;
        self.fpu.fop = o.aux;
        let rflags = self.rflags();
        let effect = execute(&mut self.fpu, insn, &mut memory, rflags);
        if let Some(flags) = effect.flags {
            self.nf = crate::flags::from_rflags(flags as u64);
        }
        Ok(())
    }

    /// FST, FIST, FBSTP and their like. An unmasked exception that keeps the result from memory comes before what is wrong with
    /// the operand, whose segment and pages are not looked at then; without one a fault leaves everything as it was.
    fn x87_store(&mut self, o: &Op, insn: X87Insn) -> Done {
        let mut memory = [0; 16];
        let (size, at) = (insn.memory.size(), self.ea(o));
        let base = self.seg[(o.seg as usize).min(5)].base;
        let address = (o.imm >> STORE_ADDRESS) as u32;
        let (offset, linear) = if address == 0 {
            (self.offset(o, at), at)
        } else {
            let offset = at & u64::MAX >> (64 - 8 * address);
            (offset, base.wrapping_add(offset) & 0xffff_ffff)
        };
        // A page that is known to be writable cannot fault: then nothing has to be kept.
        let known = address == 0 && linear ^ self.tlb.entry(linear).write <= 0x1000 - size as u64;
        let before = (!known).then(|| self.fpu.clone());
        self.fpu.fdp = offset;
        self.fpu.fds = self.seg[(o.seg as usize).min(5)].selector;
        self.fpu.fip = self.ip(o);
        self.fpu.fcs = self.seg[CS].selector;
        self.fpu.fop = o.aux;
        if !execute(&mut self.fpu, insn, &mut memory, 0).store {
            return Ok(());
        }
        // FSTP of 80 bits and FBSTP are two stores, the first of which stays when the second faults.
        let parts = size.min(8);
        let written = memory[..size].chunks(parts).enumerate().try_for_each(|(i, part)| {
            let skip = (i * parts) as u64;
            let place = if address == 0 {
                linear.wrapping_add(skip)
            } else {
                let at = offset.wrapping_add(skip) & u64::MAX >> (64 - 8 * address);
                self.segmented(o.seg as usize, at, part.len() as u64, true)?
            };
            self.write_bytes(o, place, part)
        });
        if let (Err(_), Some(before)) = (&written, before) {
            self.fpu = before;
        }
        written
    }

    /// The offset in its segment of an operand's linear address.
    fn offset(&self, o: &Op, linear: u64) -> u64 {
        let base = self.seg[(o.seg as usize).min(5)].base;
        match (self.is64(), o.seg >= 4) {
            (true, false) => linear,
            (true, true) => linear.wrapping_sub(base),
            (false, _) => linear.wrapping_sub(base) & 0xffff_ffff,
        }
    }

    fn environment_format(&self, o: &Op) -> EnvironmentFormat {
        EnvironmentFormat {
            wide: o.aux & 1 != 0,
            real: !self.protected(),
        }
    }

    /// The first word of an image, the control word's, then its last byte: the order in which Intel's processors find faults.
    fn reach_ends(&mut self, o: &Op, linear: u64, len: usize, access: Access) -> Done {
        let word = if matches!(len, 14 | 94) { 2 } else { 4 };
        self.reach_first(o, linear, word, access)?;
        self.reach_last(o, linear, len, access)
    }

    #[inline(never)]
    fn fnstenv(&mut self, o: &Op) -> Done {
        self.x87_ready()?;
        let format = self.environment_format(o);
        let linear = self.ea(o);
        let mut after = self.fpu.clone();
        let image = after.fnstenv(format);
        self.reach_ends(o, linear, format.environment_len(), Access::Write)?;
        self.write_bytes(o, linear, &image[..format.environment_len()])?;
        self.fpu = after;
        Ok(())
    }

    #[inline(never)]
    fn fldenv(&mut self, o: &Op) -> Done {
        self.x87_ready()?;
        self.no_math_fault()?;
        let format = self.environment_format(o);
        let linear = self.ea(o);
        let mut image = [0; 28];
        self.reach_ends(o, linear, format.environment_len(), Access::Read)?;
        self.read_bytes(o, linear, &mut image[..format.environment_len()])?;
        self.fpu.fldenv(&image, format);
        Ok(())
    }

    #[inline(never)]
    fn fnsave(&mut self, o: &Op) -> Done {
        self.x87_ready()?;
        let format = self.environment_format(o);
        let linear = self.ea(o);
        let mut after = self.fpu.clone();
        let image = after.fnsave(format);
        self.reach_ends(o, linear, format.save_len(), Access::Write)?;
        self.write_bytes(o, linear, &image[..format.save_len()])?;
        self.fpu = after;
        Ok(())
    }

    #[inline(never)]
    fn frstor(&mut self, o: &Op) -> Done {
        self.x87_ready()?;
        self.no_math_fault()?;
        let format = self.environment_format(o);
        let linear = self.ea(o);
        let mut image = [0; 108];
        self.reach_ends(o, linear, format.save_len(), Access::Read)?;
        self.read_bytes(o, linear, &mut image[..format.save_len()])?;
        self.fpu.frstor(&image, format);
        Ok(())
    }
}

body! {
    /// The checks ahead of an operand's segment checks; `WAITS`: the pending #MF too.
    Ready<WAITS>(c, _o) {
        c.x87_ready()?;
        if WAITS != 0 {
            c.no_math_fault()?;
        }
        Ok(())
    }
    X87(c, o) {
        c.x87(o)
    }
    Fninit(c, _o) {
        c.x87_ready()?;
        c.fpu.fninit();
        Ok(())
    }
    Fnclex(c, _o) {
        c.x87_ready()?;
        c.fpu.fnclex();
        Ok(())
    }
    /// FNSETPM, FNENI, FNDISI: of the 8087 and 287; they do nothing.
    Ignored(c, _o) {
        c.x87_ready()
    }
    /// WAIT: #NM only with both MP and TS.
    Wait(c, _o) {
        if c.cr0.mp() && c.cr0.ts() {
            return Err(c.fault(7, None));
        }
        c.no_math_fault()
    }
    Fldcw(c, o) {
        c.x87_ready()?;
        c.no_math_fault()?;
        let linear = c.ea(o);
        let v = c.load::<2>(o, linear)?;
        c.fpu.fldcw(v as u16);
        Ok(())
    }
    Fnstcw(c, o) {
        c.x87_ready()?;
        let linear = c.ea(o);
        let v = c.fpu.cw as u64;
        c.store::<2>(o, linear, v)
    }
    Fnstsw(c, o) {
        c.x87_ready()?;
        let linear = c.ea(o);
        let v = c.fpu.sw as u64;
        c.store::<2>(o, linear, v)
    }
    FnstswAx(c, _o) {
        c.x87_ready()?;
        let v = c.fpu.sw as u64;
        c.set::<2>(slot::RAX, v);
        Ok(())
    }
    Fnstenv(c, o) {
        c.fnstenv(o)
    }
    Fldenv(c, o) {
        c.fldenv(o)
    }
    Fnsave(c, o) {
        c.fnsave(o)
    }
    Frstor(c, o) {
        c.frstor(o)
    }
}

/// Whether the instruction belongs to this file.
pub(crate) fn handles(i: &Instruction) -> bool {
    is_control(i.mnemonic()) || X87Insn::decode(i).is_some()
}

fn is_control(mnemonic: M) -> bool {
    matches!(
        mnemonic,
        M::Finit
            | M::Fninit
            | M::Fclex
            | M::Fnclex
            | M::Fldcw
            | M::Fstcw
            | M::Fnstcw
            | M::Fstsw
            | M::Fnstsw
            | M::Fstenv
            | M::Fnstenv
            | M::Fldenv
            | M::Fsave
            | M::Fnsave
            | M::Frstor
            | M::Wait
            | M::Fsetpm
            | M::Fnsetpm
            | M::Feni
            | M::Fneni
            | M::Fdisi
            | M::Fndisi
    )
}

/// The 11 bits of FOP: the low three of the first opcode byte and the ModRM byte.
fn opcode(l: &Lower) -> u16 {
    let bits = if l.is64() { 64 } else { 32 };
    let mut encoder = Encoder::new(bits);
    let mut insn = *l.i;
    insn.set_segment_prefix(Register::None);
    // An address that only a 16-bit segment can express is encoded as one; anything unencodable has no such byte to report.
    if encoder.encode(&insn, 0).is_err() {
        return 0;
    }
    let bytes = encoder.take_buffer();
    let at = bytes.iter().position(|byte| matches!(byte, 0xd8..=0xdf)).unwrap_or(0);
    match bytes.get(at..at + 2) {
        Some(&[first, modrm]) => (first as u16 & 7) << 8 | modrm as u16,
        _ => 0,
    }
}

pub(crate) fn lower(l: &mut Lower) -> End {
    // Where an address can fault by its segment, #NM and #MF come first.
    if l.segment_checks() {
        let waits = !matches!(l.i.mnemonic(), M::Fnstcw | M::Fnstsw | M::Fnstenv | M::Fnsave);
        let f: Handler = if waits {
            chain::<Ready<1>>()
        } else {
            chain::<Ready<0>>()
        };
        l.emit(f, |_| ());
    }
    if let Some(insn) = X87Insn::decode(l.i) {
        let fop = opcode(l);
        if insn.memory == X87Memory::None {
            l.emit(chain::<X87>(), |o| (o.imm, o.aux) = (insn.to_bits(), fop));
        } else {
            let size = insn.memory.size() as u8;
            let (m, address) = if insn.writes_memory() {
                l.mem_checked_later(size)
            } else {
                (l.mem(size, false), 0)
            };
            let imm = insn.to_bits() | (address as u64) << STORE_ADDRESS;
            l.emit_mem(chain::<X87>(), m, |o| (o.imm, o.aux) = (imm, fop));
        }
        return End::Open;
    }
    let wide = |code: Code| {
        !matches!(
            code,
            Code::Fldenv_m14byte
                | Code::Fnstenv_m14byte
                | Code::Fstenv_m14byte
                | Code::Fnsave_m94byte
                | Code::Fsave_m94byte
                | Code::Frstor_m94byte
        )
    };
    let (environment, save): (u16, u16) = if wide(l.i.code()) { (28, 108) } else { (14, 94) };
    match l.i.mnemonic() {
        M::Fninit => l.emit(chain::<Fninit>(), |_| ()),
        M::Fnclex => l.emit(chain::<Fnclex>(), |_| ()),
        M::Fnsetpm | M::Fneni | M::Fndisi => l.emit(chain::<Ignored>(), |_| ()),
        M::Wait => l.emit(chain::<Wait>(), |_| ()),
        M::Fldcw => memory(l, chain::<Fldcw>(), 2, false),
        M::Fnstcw => memory(l, chain::<Fnstcw>(), 2, true),
        M::Fnstsw if l.i.op0_kind() == OpKind::Register => l.emit(chain::<FnstswAx>(), |_| ()),
        M::Fnstsw => memory(l, chain::<Fnstsw>(), 2, true),
        M::Fnstenv => memory(l, chain::<Fnstenv>(), environment, true),
        M::Fldenv => memory(l, chain::<Fldenv>(), environment, false),
        M::Fnsave => memory(l, chain::<Fnsave>(), save, true),
        M::Frstor => memory(l, chain::<Frstor>(), save, false),
        // With its WAIT in front the decoder sees two instructions; it makes the one-instruction forms for encoders only.
        _ => return l.ud(),
    }
    End::Open
}

fn memory(l: &mut Lower, f: Handler, size: u16, write: bool) {
    let wide = matches!(size, 28 | 108);
    let m = l.mem_span(size, write);
    l.emit_mem(f, m, |o| o.aux = wide as u16);
}
