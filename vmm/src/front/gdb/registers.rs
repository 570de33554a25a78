//! A CPU's registers in gdb's order, and the target description that tells gdb of them.
//!
//! The features `org.gnu.gdb.i386.*` are gdb's own, with the names and the order that it asks for (Debugging with GDB, G.5.6
//! "i386 Features"). What else a CPU has is in a feature of ours. A model without long mode is an i386, any other one an
//! x86-64 in every mode: gdb takes the registers' widths once, when it connects.

use std::fmt::Write;

use engine::{CS, CpuState, DS, ES, FS, GS, SS};
use x86::model::CpuModel;

use super::control::{self, Refused};
use machine::memory::Memory;

/// A register's place in [`CpuState`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Field {
    Gpr(usize),
    Rip,
    Flags,
    Selector(usize),
    St(usize),
    ControlWord,
    StatusWord,
    Tags,
    CodeSegment,
    CodeOffset,
    DataSegment,
    DataOffset,
    Opcode,
    Xmm(usize),
    Mxcsr,
    YmmHigh(usize),
    /// k0 to k7.
    Opmask(usize),
    /// Bits 127:0 of ZMM16 to ZMM31.
    ZmmLow(usize),
    /// Bits 255:128 of those.
    ZmmMiddle(usize),
    /// Bits 511:256 of any ZMM register.
    ZmmHigh(usize),
    Base(usize),
    Cr0,
    Cr2,
    Cr3,
    Cr4,
    Efer,
    KernelGsBase,
    Xcr0,
    Dr(usize),
    TaskSelector,
    TaskBase,
    LocalSelector,
    LocalBase,
    GlobalBase,
    GlobalLimit,
    InterruptBase,
    InterruptLimit,
    Cpl,
}

/// A register as gdb knows it.
#[derive(Clone, Debug)]
struct Register {
    name: String,
    bits: usize,
    kind: &'static str,
    place: Field,
}

/// The registers of a model, in gdb's order.
#[derive(Clone, Debug)]
pub struct Registers {
    model: &'static CpuModel,
    list: Vec<Register>,
    xml: String,
}

/// gdb's order of the general registers, by their numbers in instructions.
const ORDER: [usize; 8] = [0, 3, 1, 2, 6, 7, 5, 4];
/// Bits of RFLAGS that a user may set: status, TF, IF, DF, IOPL, NT, RF, AC, ID.
const FLAGS: u64 = 0x0025_7fd5;

const TYPES: &str = r#"<flags id="i386_eflags" size="4"><field name="CF" start="0" end="0"/><field name="" start="1" end="1"/><field name="PF" start="2" end="2"/><field name="AF" start="4" end="4"/><field name="ZF" start="6" end="6"/><field name="SF" start="7" end="7"/><field name="TF" start="8" end="8"/><field name="IF" start="9" end="9"/><field name="DF" start="10" end="10"/><field name="OF" start="11" end="11"/><field name="NT" start="14" end="14"/><field name="RF" start="16" end="16"/><field name="VM" start="17" end="17"/><field name="AC" start="18" end="18"/><field name="VIF" start="19" end="19"/><field name="VIP" start="20" end="20"/><field name="ID" start="21" end="21"/></flags>"#;
const VECTOR: &str = r#"<vector id="v4f" type="ieee_single" count="4"/><vector id="v2d" type="ieee_double" count="2"/><vector id="v16i8" type="int8" count="16"/><vector id="v8i16" type="int16" count="8"/><vector id="v4i32" type="int32" count="4"/><vector id="v2i64" type="int64" count="2"/><union id="vec128"><field name="v4_float" type="v4f"/><field name="v2_double" type="v2d"/><field name="v16_int8" type="v16i8"/><field name="v8_int16" type="v8i16"/><field name="v4_int32" type="v4i32"/><field name="v2_int64" type="v2i64"/><field name="uint128" type="uint128"/></union><flags id="i386_mxcsr" size="4"><field name="IE" start="0" end="0"/><field name="DE" start="1" end="1"/><field name="ZE" start="2" end="2"/><field name="OE" start="3" end="3"/><field name="UE" start="4" end="4"/><field name="PE" start="5" end="5"/><field name="DAZ" start="6" end="6"/><field name="IM" start="7" end="7"/><field name="DM" start="8" end="8"/><field name="ZM" start="9" end="9"/><field name="OM" start="10" end="10"/><field name="UM" start="11" end="11"/><field name="PM" start="12" end="12"/><field name="FZ" start="15" end="15"/></flags>"#;

impl Registers {
    /// Those of a model.
    pub fn of(model: &'static CpuModel) -> Self {
        let features = model.features();
        let long = features.lm();
        let mut all = Registers {
            model,
            list: Vec::new(),
            xml: String::new(),
        };
        let architecture = if long { "i386:x86-64" } else { "i386" };
        all.xml += r#"<?xml version="1.0"?><!DOCTYPE target SYSTEM "gdb-target.dtd"><target>"#;
        let _ = write!(all.xml, "<architecture>{architecture}</architecture>");
        all.feature("org.gnu.gdb.i386.core", TYPES, core(long));
        if features.sse() {
            all.feature("org.gnu.gdb.i386.sse", VECTOR, vectors(long));
        }
        if features.avx() {
            let high = (0..vector_count(long)).map(|n| register(format!("ymm{n}h"), 128, "uint128", Field::YmmHigh(n)));
            all.feature("org.gnu.gdb.i386.avx", "", high.collect());
        }
        if features.avx512f() {
            let types = r#"<vector id="v2ui128" type="uint128" count="2"/>"#;
            all.feature("org.gnu.gdb.i386.avx512", types, wide_vectors(long));
        }
        if long {
            let bases = [("fs_base", FS), ("gs_base", GS)];
            let bases = bases.map(|(name, segment)| register(name, 64, "int64", Field::Base(segment)));
            all.feature("org.gnu.gdb.i386.segments", "", bases.into());
        }
        all.feature("minivmm.i386.system", "", system(long));
        all.xml += "</target>";
        all
    }

    fn feature(&mut self, name: &str, types: &str, registers: Vec<Register>) {
        let _ = write!(self.xml, r#"<feature name="{name}">{types}"#);
        for register in registers {
            let Register { name, bits, kind, .. } = &register;
            let number = self.list.len();
            let _ = write!(
                self.xml,
                r#"<reg name="{name}" bitsize="{bits}" type="{kind}" regnum="{number}"/>"#
            );
            self.list.push(register);
        }
        self.xml += "</feature>";
    }

    /// The target description, a document of XML.
    pub fn description(&self) -> &str {
        &self.xml
    }

    /// How many there are.
    pub fn count(&self) -> usize {
        self.list.len()
    }

    /// A register's bytes, least significant first; `None` if there is no such register.
    pub fn read(&self, state: &CpuState, number: usize) -> Option<Vec<u8>> {
        let register = self.list.get(number)?;
        let mut bytes = get(state, register.place).to_le_bytes().to_vec();
        if let Field::ZmmHigh(number) = register.place {
            bytes.extend(state.fpu.zmm(number)[3].to_le_bytes());
        }
        bytes.truncate(register.bits / 8);
        Some(bytes)
    }

    /// Changes a register, if it takes the value. Descriptors and tables are in `memory`.
    ///
    /// # Errors
    /// It does not, or has another size, or there is none. The state is as it was.
    pub fn write(&self, state: &mut CpuState, memory: &Memory, number: usize, bytes: &[u8]) -> Result<(), Refused> {
        let register = self.list.get(number).ok_or(Refused)?;
        if bytes.len() != register.bits / 8 {
            return Err(Refused);
        }
        if let Field::ZmmHigh(number) = register.place {
            let [low, middle, ..] = state.fpu.zmm(number);
            let half = |from: usize| u128::from_le_bytes(core::array::from_fn(|i| bytes[from + i]));
            state.fpu.set_zmm(number, [low, middle, half(0), half(16)]);
            return Ok(());
        }
        let mut value = [0; 16];
        value[..bytes.len()].copy_from_slice(bytes);
        let value = u128::from_le_bytes(value);
        if value == get(state, register.place) & mask(register.bits) {
            return Ok(());
        }
        match register.place {
            Field::Selector(segment) => {
                let selector = u16::try_from(value).map_err(|_| Refused)?;
                control::load_segment(state, memory, segment, selector)
            }
            Field::Cr0 => control::set_cr0(state, self.model, memory, value as u64),
            Field::Cr3 => control::set_cr3(state, self.model, memory, value as u64),
            Field::Cr4 => control::set_cr4(state, self.model, memory, value as u64),
            Field::Efer => control::set_efer(state, self.model, value as u64),
            Field::Xcr0 => control::set_xcr0(state, self.model, value as u64),
            Field::Dr(number @ 6..) => control::set_debug(state, self.model, number, value as u64),
            place => set(state, place, value),
        }
    }

    /// All registers' bytes, one after the other.
    pub fn all(&self, state: &CpuState) -> Vec<u8> {
        (0..self.count())
            .flat_map(|number| self.read(state, number).unwrap_or_default())
            .collect()
    }

    /// Changes all registers: those whose bytes are not what they were, in their order.
    ///
    /// # Errors
    /// So many bytes are not theirs, or one does not take its value. The state is as it was.
    pub fn set_all(&self, state: &mut CpuState, memory: &Memory, bytes: &[u8]) -> Result<(), Refused> {
        let whole: usize = self.list.iter().map(|register| register.bits / 8).sum();
        if bytes.len() != whole {
            return Err(Refused);
        }
        let (mut rest, mut changed) = (bytes, state.clone());
        for (number, register) in self.list.iter().enumerate() {
            let (own, after) = rest.split_at(register.bits / 8);
            // gdb sends back what it has read for those that its user did not touch. One that has changed with another is none.
            if self.read(state, number).as_deref() != Some(own) {
                self.write(&mut changed, memory, number, own)?;
            }
            rest = after;
        }
        *state = changed;
        Ok(())
    }
}

fn mask(bits: usize) -> u128 {
    u128::MAX >> (128 - bits)
}

fn register(name: impl Into<String>, bits: usize, kind: &'static str, place: Field) -> Register {
    Register {
        name: name.into(),
        bits,
        kind,
        place,
    }
}

fn vector_count(long: bool) -> usize {
    if long { 16 } else { 8 }
}

fn core(long: bool) -> Vec<Register> {
    const LONG: [&str; 8] = ["rax", "rbx", "rcx", "rdx", "rsi", "rdi", "rbp", "rsp"];
    const SHORT: [&str; 8] = ["eax", "ecx", "edx", "ebx", "esp", "ebp", "esi", "edi"];
    let (bits, integer) = if long { (64, "int64") } else { (32, "int32") };
    let mut list = Vec::new();
    for index in 0..8 {
        let (name, number) = if long {
            (LONG[index], ORDER[index])
        } else {
            (SHORT[index], index)
        };
        let kind = if matches!(number, 4 | 5) { "data_ptr" } else { integer };
        list.push(register(name, bits, kind, Field::Gpr(number)));
    }
    if long {
        list.extend((8..16).map(|number| register(format!("r{number}"), 64, integer, Field::Gpr(number))));
    }
    list.push(register(if long { "rip" } else { "eip" }, bits, "code_ptr", Field::Rip));
    list.push(register("eflags", 32, "i386_eflags", Field::Flags));
    for (name, segment) in [("cs", CS), ("ss", SS), ("ds", DS), ("es", ES), ("fs", FS), ("gs", GS)] {
        list.push(register(name, 32, "int32", Field::Selector(segment)));
    }
    list.extend((0..8).map(|n| register(format!("st{n}"), 80, "i387_ext", Field::St(n))));
    for (name, place) in [
        ("fctrl", Field::ControlWord),
        ("fstat", Field::StatusWord),
        ("ftag", Field::Tags),
        ("fiseg", Field::CodeSegment),
        ("fioff", Field::CodeOffset),
        ("foseg", Field::DataSegment),
        ("fooff", Field::DataOffset),
        ("fop", Field::Opcode),
    ] {
        list.push(register(name, 32, "int", place));
    }
    list
}

fn vectors(long: bool) -> Vec<Register> {
    let mut list: Vec<_> = (0..vector_count(long))
        .map(|n| register(format!("xmm{n}"), 128, "vec128", Field::Xmm(n)))
        .collect();
    list.push(register("mxcsr", 32, "i386_mxcsr", Field::Mxcsr));
    list
}

/// What AVX-512 adds: in 32-bit code there are eight ZMM registers.
fn wide_vectors(long: bool) -> Vec<Register> {
    let mut list = Vec::new();
    if long {
        list.extend((16..32).map(|n| register(format!("xmm{n}"), 128, "vec128", Field::ZmmLow(n))));
        list.extend((16..32).map(|n| register(format!("ymm{n}h"), 128, "uint128", Field::ZmmMiddle(n))));
    }
    list.extend((0..8).map(|n| register(format!("k{n}"), 64, "uint64", Field::Opmask(n))));
    let count = if long { 32 } else { 8 };
    list.extend((0..count).map(|n| register(format!("zmm{n}h"), 256, "v2ui128", Field::ZmmHigh(n))));
    list
}

fn system(long: bool) -> Vec<Register> {
    let word = if long { 64 } else { 32 };
    let kind = if long { "uint64" } else { "uint32" };
    let mut list = Vec::new();
    for (name, place) in [
        ("cr0", Field::Cr0),
        ("cr2", Field::Cr2),
        ("cr3", Field::Cr3),
        ("cr4", Field::Cr4),
    ] {
        list.push(register(name, word, kind, place));
    }
    for number in [0, 1, 2, 3, 6, 7] {
        list.push(register(format!("dr{number}"), word, kind, Field::Dr(number)));
    }
    if long {
        list.push(register("efer", 64, kind, Field::Efer));
        list.push(register("k_gs_base", 64, kind, Field::KernelGsBase));
    } else {
        list.push(register("fs_base", 32, kind, Field::Base(FS)));
        list.push(register("gs_base", 32, kind, Field::Base(GS)));
    }
    list.push(register("xcr0", 64, "uint64", Field::Xcr0));
    for (name, segment) in [("cs_base", CS), ("ss_base", SS), ("ds_base", DS), ("es_base", ES)] {
        list.push(register(name, word, kind, Field::Base(segment)));
    }
    for (name, bits, place) in [
        ("tr", 16, Field::TaskSelector),
        ("tr_base", word, Field::TaskBase),
        ("ldtr", 16, Field::LocalSelector),
        ("ldtr_base", word, Field::LocalBase),
        ("gdtr_base", word, Field::GlobalBase),
        ("gdtr_limit", 16, Field::GlobalLimit),
        ("idtr_base", word, Field::InterruptBase),
        ("idtr_limit", 16, Field::InterruptLimit),
        ("cpl", 8, Field::Cpl),
    ] {
        let kind = match bits {
            8 => "uint8",
            16 => "uint16",
            _ => kind,
        };
        list.push(register(name, bits, kind, place));
    }
    list
}

fn get(state: &CpuState, place: Field) -> u128 {
    let fpu = &state.fpu;
    let word: u64 = match place {
        Field::Gpr(number) => state.gpr[number],
        Field::Rip => state.rip,
        Field::Flags => state.rflags.into_bits(),
        Field::Selector(segment) => state.segments[segment].selector.into(),
        Field::St(number) => return fpu.st(number),
        Field::ControlWord => fpu.cw.into(),
        Field::StatusWord => fpu.sw.into(),
        Field::Tags => fpu.full_tags().into(),
        Field::CodeSegment => fpu.fcs.into(),
        Field::CodeOffset => fpu.fip,
        Field::DataSegment => fpu.fds.into(),
        Field::DataOffset => fpu.fdp,
        Field::Opcode => fpu.fop.into(),
        Field::Xmm(number) => return fpu.xmm[number],
        Field::Mxcsr => fpu.mxcsr.into(),
        Field::YmmHigh(number) => return fpu.ymm_hi[number],
        Field::Opmask(number) => fpu.avx512.k[number],
        Field::ZmmLow(number) => return fpu.zmm(number)[0],
        Field::ZmmMiddle(number) => return fpu.zmm(number)[1],
        // The lower half of it: it is the one register that is longer.
        Field::ZmmHigh(number) => return fpu.zmm(number)[2],
        Field::Base(segment) => state.segments[segment].base,
        Field::Cr0 => state.cr0.into_bits(),
        Field::Cr2 => state.cr2,
        Field::Cr3 => state.cr3,
        Field::Cr4 => state.cr4.into_bits(),
        Field::Efer => state.efer.into_bits(),
        Field::KernelGsBase => state.msrs.kernel_gs_base,
        Field::Xcr0 => state.xcr0,
        Field::Dr(number) => state.dr[number],
        Field::TaskSelector => state.tr.selector.into(),
        Field::TaskBase => state.tr.base,
        Field::LocalSelector => state.ldtr.selector.into(),
        Field::LocalBase => state.ldtr.base,
        Field::GlobalBase => state.gdtr.base,
        Field::GlobalLimit => state.gdtr.limit.into(),
        Field::InterruptBase => state.idtr.base,
        Field::InterruptLimit => state.idtr.limit.into(),
        Field::Cpl => state.cpl.into(),
    };
    word.into()
}

/// What a user may change as it is; [`control`] has what more hangs on. Segments' hidden parts, tables and the privilege level
/// are not to be changed alone: that would be no state of a processor.
fn set(state: &mut CpuState, place: Field, value: u128) -> Result<(), Refused> {
    let word = value as u64;
    let fpu = &mut state.fpu;
    match place {
        Field::Gpr(number) => state.gpr[number] = word,
        Field::Rip => state.rip = word,
        Field::Flags => state.rflags = (state.rflags.into_bits() & !FLAGS | word & FLAGS).into(),
        Field::St(number) => {
            fpu.set_st(number, value);
            fpu.tag |= 1 << ((fpu.top() + number) & 7);
        }
        Field::ControlWord => fpu.fldcw(word as u16),
        Field::StatusWord => {
            fpu.sw = word as u16;
            fpu.summarise();
        }
        Field::CodeSegment => fpu.fcs = word as u16,
        Field::CodeOffset => fpu.fip = word,
        Field::DataSegment => fpu.fds = word as u16,
        Field::DataOffset => fpu.fdp = word,
        Field::Opcode => fpu.fop = word as u16 & 0x7ff,
        Field::Xmm(number) => fpu.xmm[number] = value,
        Field::Mxcsr => fpu.ldmxcsr(word as u32).map_err(|_| Refused)?,
        Field::YmmHigh(number) => fpu.ymm_hi[number] = value,
        Field::Opmask(number) => fpu.avx512.k[number] = word,
        Field::ZmmLow(number) => {
            let [_, rest @ ..] = fpu.zmm(number);
            fpu.set_zmm(number, [value, rest[0], rest[1], rest[2]]);
        }
        Field::ZmmMiddle(number) => {
            let [low, _, rest @ ..] = fpu.zmm(number);
            fpu.set_zmm(number, [low, value, rest[0], rest[1]]);
        }
        // A processor takes canonical addresses only (with 57 bits at most).
        Field::Base(FS | GS) | Field::KernelGsBase if (word as i64) << 7 >> 7 != word as i64 => return Err(Refused),
        Field::Base(segment @ (FS | GS)) => state.segments[segment].base = word,
        Field::KernelGsBase => state.msrs.kernel_gs_base = word,
        Field::Cr2 => state.cr2 = word,
        Field::Dr(number @ 0..=3) => state.dr[number] = word,
        _ => return Err(Refused),
    }
    Ok(())
}

#[cfg(test)]
#[path = "registers_test.rs"]
mod tests;
