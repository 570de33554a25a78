//! What must agree, and how a disagreement is reported.

use std::fmt::Write as _;

use iced_x86::{Instruction, Mnemonic, OpKind, Register, RflagsBits};

use crate::arena::{AREAS, Memory};
use crate::generate::{Case, gpr_index, register_value};
use crate::state::{Fpu, Outcome, State, fields, flag};
use crate::vendor;

/// The parts of a result that the manuals leave undefined.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Undefined {
    /// RFLAGS bits.
    pub flags: u64,
    /// x87 status bits C0 to C3.
    pub fsw: u16,
    /// MXCSR bits.
    pub mxcsr: u32,
    /// Bits of general registers: index, mask.
    pub gpr: Option<(usize, u64)>,
    /// Vector or x87 results are approximations.
    pub approximate: bool,
    /// Memory: address, length.
    pub memory: Vec<(u64, u64)>,
    /// General registers, by their numbers, of which only the lower half counts.
    pub upper_gprs: u16,
}

/// What `instruction`, executed in `state`, may leave undefined on this host.
pub fn undefined(instruction: &Instruction, state: &State) -> Undefined {
    let mut open = manual(instruction, state);
    if vendor::intel() {
        vendor::pin(instruction, &mut open);
    }
    open
}

/// What the manual leaves undefined.
fn manual(instruction: &Instruction, state: &State) -> Undefined {
    use Mnemonic as M;
    let mut undefined = Undefined::default();
    let bits = instruction.rflags_undefined();
    for (theirs, ours) in [
        (RflagsBits::OF, flag::OF),
        (RflagsBits::SF, flag::SF),
        (RflagsBits::ZF, flag::ZF),
        (RflagsBits::AF, flag::AF),
        (RflagsBits::CF, flag::CF),
        (RflagsBits::PF, flag::PF),
    ] {
        if bits & theirs != 0 {
            undefined.flags |= ours;
        }
    }
    for (theirs, ours) in [
        (RflagsBits::C0, 1 << 8),
        (RflagsBits::C1, 1 << 9),
        (RflagsBits::C2, 1 << 10),
        (RflagsBits::C3, 1 << 14),
    ] {
        if bits & theirs != 0 {
            undefined.fsw |= ours;
        }
    }
    match instruction.mnemonic() {
        M::Shl | M::Sal | M::Shr | M::Sar | M::Rol | M::Ror | M::Rcl | M::Rcr | M::Shld | M::Shrd => {
            shift(instruction, state, &mut undefined);
        }
        M::Bsf | M::Bsr => undefined.gpr = destination(instruction, state, source_is_zero),
        M::Bswap if instruction.op0_register().size() == 2 => {
            undefined.gpr = destination(instruction, state, |_, _| true);
        }
        M::Fsin | M::Fcos | M::Fsincos | M::Fptan | M::Fpatan | M::F2xm1 | M::Fyl2x | M::Fyl2xp1 => {
            undefined.approximate = true;
            // C1, and PE where one of two approximations happens to be exact.
            undefined.fsw |= 1 << 9 | 1 << 5;
        }
        M::Rcpps | M::Rcpss | M::Rsqrtps | M::Rsqrtss => undefined.approximate = true,
        M::Vrcpps | M::Vrcpss | M::Vrsqrtps | M::Vrsqrtss => undefined.approximate = true,
        M::Xsave | M::Xsave64 | M::Xsaveopt | M::Xsaveopt64 | M::Xsavec | M::Xsavec64 => {
            // As FXSAVE's.
            let parts = [(5, 1), (6, 18), (28, 4), (416, 96)];
            memory(instruction, state, &parts, &mut undefined);
        }
        M::Fxsave | M::Fxsave64 => {
            // Reserved bytes, FOP, FIP, FDP, MXCSR_MASK, and the part that software may use.
            memory(
                instruction,
                state,
                &[(5, 1), (6, 18), (28, 4), (416, 96)],
                &mut undefined,
            );
        }
        M::Fnstenv | M::Fnsave => {
            let size = instruction.memory_size().size() as u64;
            let short = matches!(size, 14 | 94);
            // FIP, FCS, FOP, FDP, FDS, and the reserved halves between them.
            let parts: &[(u64, u64)] = if short { &[(6, 8)] } else { &[(2, 2), (6, 2), (10, 18)] };
            memory(instruction, state, parts, &mut undefined);
        }
        _ => {}
    }
    undefined
}

/// Shift counts decide which flags are defined. SDM Vol. 2B "SAL/SAR/SHL/SHR", "RCL/RCR/ROL/ROR", "SHLD".
fn shift(instruction: &Instruction, state: &State, undefined: &mut Undefined) {
    use Mnemonic as M;
    let mnemonic = instruction.mnemonic();
    let size = match instruction.op_kind(0) {
        OpKind::Register => instruction.op0_register().size(),
        _ => instruction.memory_size().size(),
    } as u64
        * 8;
    let last = instruction.op_count() - 1;
    let count = match instruction.op_kind(last) {
        OpKind::Register => state.gpr[1] & 0xff,
        _ => u64::from(instruction.immediate8()),
    };
    let count = count & if size == 64 { 0x3f } else { 0x1f };
    undefined.flags = 0;
    if count == 0 {
        return;
    }
    if count != 1 {
        undefined.flags |= flag::OF;
    }
    match mnemonic {
        M::Shl | M::Sal | M::Shr | M::Sar => {
            undefined.flags |= flag::AF;
            if count >= size && mnemonic != M::Sar {
                undefined.flags |= flag::CF;
            }
        }
        M::Shld | M::Shrd => {
            undefined.flags |= flag::AF;
            if count > size {
                undefined.flags |= flag::STATUS;
                if instruction.op0_kind() == OpKind::Register {
                    undefined.gpr = destination(instruction, state, |_, _| true);
                } else {
                    memory(instruction, state, &[(0, size / 8)], undefined);
                }
            }
        }
        _ => {}
    }
}

fn destination(
    instruction: &Instruction,
    state: &State,
    when: impl Fn(&Instruction, &State) -> bool,
) -> Option<(usize, u64)> {
    let register = instruction.op0_register();
    let mask = match register.size() {
        2 => 0xffff,
        // Whether a 32-bit register that is not written keeps its upper half is as open as the rest.
        _ => u64::MAX,
    };
    (register != Register::None && when(instruction, state)).then(|| (gpr_index(register), mask))
}

fn source_is_zero(instruction: &Instruction, state: &State) -> bool {
    match instruction.op1_kind() {
        OpKind::Register => register_value(state, instruction.op1_register()) == Some(0),
        // Memory is not looked at; ZF in the result says it, see `differences`.
        _ => true,
    }
}

/// Parts of the memory operand.
fn memory(instruction: &Instruction, state: &State, parts: &[(u64, u64)], undefined: &mut Undefined) {
    if let Some(mut address) = address(instruction, state) {
        if state.bits() != 64 {
            address &= 0xffff_ffff;
        }
        undefined
            .memory
            .extend(parts.iter().map(|(at, len)| (address.wrapping_add(*at), *len)));
    }
}

/// The linear address of an explicit memory operand.
pub fn address(instruction: &Instruction, state: &State) -> Option<u64> {
    let operand = (0..instruction.op_count()).find(|i| instruction.op_kind(*i) == OpKind::Memory)?;
    instruction.virtual_address(operand, 0, |register, _, _| register_value(state, register))
}

/// Everything that differs where it must not.
pub fn differences(case: &Case, open: &Undefined, host: &Outcome, engine: &Outcome) -> Vec<String> {
    let mut found = Vec::new();
    if (host.vector, host.error, host.cr2) != (engine.vector, engine.error, engine.cr2) {
        found.push(format!(
            "exception: host {} ({:#x}) cr2 {:#x}, engine {} ({:#x}) cr2 {:#x}",
            host.vector, host.error, host.cr2, engine.vector, engine.error, engine.cr2
        ));
    }
    let faulted = host.state.rip == case.state.rip && host.vector != 3;
    let (h, e) = (&host.state, &engine.state);
    let mut open = open.clone();
    vendor::open_gprs(case, &mut open);
    // POPA may have loaded the registers that came before the fault: it can be restarted all the same.
    let partial = faulted && matches!(case.instruction.mnemonic(), Mnemonic::Popa | Mnemonic::Popad);
    // Outside 64-bit mode the upper halves are anybody's.
    let gpr_mask = if case.state.bits() == 64 && h.bits() == 64 {
        u64::MAX
    } else {
        0xffff_ffff
    };
    let gprs = if case.state.bits() == 64 { 16 } else { 8 };
    for i in 0..gprs {
        let mut mask = gpr_mask;
        if open.upper_gprs >> i & 1 != 0 {
            mask &= 0xffff_ffff;
        }
        if let Some((register, bits)) = open.gpr
            && register == i
            && !faulted
            && (!is_scan(case) || host.state.rflags & flag::ZF != 0)
        {
            mask &= !bits;
        }
        if (h.gpr[i] ^ e.gpr[i]) & mask != 0 && !partial {
            found.push(crate::state::GPR_NAMES[i].to_string());
        }
    }
    let division = matches!(case.instruction.mnemonic(), Mnemonic::Div | Mnemonic::Idiv);
    let open_flags = if faulted && !(division && host.vector == 0) {
        0
    } else {
        open.flags
    };
    let open_flags = open_flags | vendor::open_flags(case, host);
    if (h.rflags ^ e.rflags) & !open_flags != 0 {
        found.push("rflags".into());
    }
    for (name, differs) in [
        ("rip", h.rip != e.rip),
        (
            "cs ss es ds",
            (h.cs, h.ss, h.es_ds.map(null)) != (e.cs, e.ss, e.es_ds.map(null)),
        ),
        ("fs.base", h.fs_base != e.fs_base),
        ("gs.base", h.gs_base != e.gs_base),
    ] {
        if differs {
            found.push(name.into());
        }
    }
    vendor::open_fpu(case, host, &mut open);
    if faulted && case.instruction.is_vsib() && !vendor::intel() {
        let decisive = |fpu: &Fpu| vendor::decisive(&case.instruction, fpu);
        fpu_differences(&open, &decisive(&h.fpu), &decisive(&e.fpu), gprs, &mut found);
    } else {
        fpu_differences(&open, &h.fpu, &e.fpu, gprs, &mut found);
    }
    found
}

/// On its way back to ring 3 the host's kernel makes every null selector 0.
fn null(selector: u16) -> u16 {
    if selector < 4 { 0 } else { selector }
}

fn is_scan(case: &Case) -> bool {
    matches!(case.instruction.mnemonic(), Mnemonic::Bsf | Mnemonic::Bsr)
}

fn fpu_differences(open: &Undefined, host: &Fpu, engine: &Fpu, xmms: usize, found: &mut Vec<String>) {
    for (name, differs) in [
        ("fcw", host.fcw != engine.fcw),
        ("fsw", (host.fsw ^ engine.fsw) & !open.fsw != 0),
        ("ftw", host.ftw != engine.ftw),
        ("mxcsr", (host.mxcsr ^ engine.mxcsr) & !open.mxcsr != 0),
    ] {
        if differs {
            found.push(name.into());
        }
    }
    for (i, (h, e)) in host.st.iter().zip(&engine.st).enumerate() {
        if h != e && !(open.approximate && near80(*h, *e)) {
            found.push(format!("st{i}"));
        }
    }
    for (i, (h, e)) in host.xmm.iter().zip(&engine.xmm).take(xmms).enumerate() {
        let near = || (0..4).all(|lane| near32((h >> (32 * lane)) as u32, (e >> (32 * lane)) as u32));
        if h != e && !(open.approximate && near()) {
            found.push(format!("xmm{i}"));
        }
    }
    for (i, (h, e)) in host.ymm_hi.iter().zip(&engine.ymm_hi).take(xmms).enumerate() {
        let near = || (0..4).all(|lane| near32((h >> (32 * lane)) as u32, (e >> (32 * lane)) as u32));
        if h != e && !(open.approximate && near()) {
            found.push(format!("ymm{i} high"));
        }
    }
    for (i, (h, e)) in host.wide.k.iter().zip(&engine.wide.k).enumerate() {
        if h != e {
            found.push(format!("k{i}"));
        }
    }
    for (i, (h, e)) in host.wide.zmm_hi.iter().zip(&engine.wide.zmm_hi).take(xmms).enumerate() {
        if h != e {
            found.push(format!("zmm{i} high"));
        }
    }
    for (i, (h, e)) in host.wide.zmm.iter().zip(&engine.wide.zmm).enumerate() {
        if h != e && xmms == 16 {
            found.push(format!("zmm{}", i + 16));
        }
    }
}

/// Two results of a function that is exact to a unit in the last place: up to two apart.
fn near80(a: (u64, u16), b: (u64, u16)) -> bool {
    let wide =
        |(significand, top): (u64, u16)| (u128::from(top & 0x7fff) << 63) + u128::from(significand & u64::MAX >> 1);
    a.1 & 0x8000 == b.1 & 0x8000 && wide(a).abs_diff(wide(b)) <= 2
}

/// RCPPS and RSQRTPS: relative error below 1.5 * 2^-12 (SDM Vol. 2B "RCPPS"), so two of them are within 2^-10.4.
fn near32(a: u32, b: u32) -> bool {
    let (x, y) = (f64::from(f32::from_bits(a)), f64::from(f32::from_bits(b)));
    a == b
        || (x.is_finite()
            && y.is_finite()
            && x.is_sign_positive() == y.is_sign_positive()
            && (x - y).abs() <= x.abs() / 1024.0)
}

/// The first bytes in which two memories differ, outside `open`; `None` if they agree.
///
/// An instruction that pushes several values may have pushed some of them when it faults.
pub fn memory_differences(
    case: &Case,
    outcome: &Outcome,
    open: &Undefined,
    host: &impl Memory,
    engine: &impl Memory,
) -> Option<String> {
    use Mnemonic as M;
    let pushes = matches!(case.instruction.mnemonic(), M::Enter | M::Pusha | M::Pushad | M::Call);
    let partial = pushes && outcome.vector != 3 && outcome.vector != 1;
    let mut text = String::new();
    let mut shown = 0;
    for (index, area) in AREAS.iter().enumerate() {
        let (h, e) = (host.area(index), engine.area(index));
        if h == e || partial && area.name == "stack" {
            continue;
        }
        for (at, (h, e)) in h.iter().zip(e).enumerate() {
            let address = area.start + at as u64;
            let is_open = open
                .memory
                .iter()
                .any(|(start, len)| address.wrapping_sub(*start) < *len);
            if h != e && !is_open {
                if shown < 32 {
                    let _ = write!(text, "\n    {address:#x} ({}): host {h:02x}, engine {e:02x}", area.name);
                }
                shown += 1;
            }
        }
    }
    (shown > 0).then(|| format!("memory ({shown} bytes):{text}"))
}

/// Everything that a person needs to see what went wrong.
pub fn report(case: &Case, found: &[String], host: Option<&Outcome>, engine: Result<&Outcome, &String>) -> String {
    let bytes: Vec<String> = case.bytes.iter().map(|byte| format!("{byte:02x}")).collect();
    let mut text = format!(
        "{:?} at {:x}:{:#x}: {}  [{}]\n  differs: {}\n",
        case.instruction.code(),
        case.state.cs,
        case.state.rip,
        case.instruction,
        bytes.join(" "),
        found.join(", "),
    );
    if let Some(address) = address(&case.instruction, &case.state) {
        let _ = writeln!(text, "  operand at {address:#x}");
        for (start, bytes) in &case.pokes {
            if (*start..*start + bytes.len() as u64).contains(&address) && *start != case.state.linear_rip() {
                let at = (address - start) as usize;
                let shown: Vec<String> = bytes[at..].iter().take(32).map(|byte| format!("{byte:02x}")).collect();
                let _ = writeln!(text, "  memory there: {}", shown.join(" "));
            }
        }
    }
    let outcome = |outcome: &Outcome| {
        format!(
            "vector {} error {:#x} cr2 {:#x}",
            outcome.vector, outcome.error, outcome.cr2
        )
    };
    if let Some(host) = host {
        let _ = writeln!(text, "  host:   {}", outcome(host));
    }
    match engine {
        Ok(engine) => {
            let _ = writeln!(text, "  engine: {}", outcome(engine));
        }
        Err(error) => {
            let _ = writeln!(text, "  engine: {error}");
        }
    }
    let before = fields(&case.state);
    let host = host.map(|outcome| fields(&outcome.state));
    let engine = engine.ok().map(|outcome| fields(&outcome.state));
    for (i, (name, value)) in before.iter().enumerate() {
        let h = host.as_ref().map_or("", |rows| &rows[i].1);
        let e = engine.as_ref().map_or("", |rows| &rows[i].1);
        let used = i < 16 && value != "0x0000000000000000";
        if h != e {
            let _ = writeln!(text, "* {name:12} {value}\n    host       {h}\n    engine     {e}");
        } else if h != value && !h.is_empty() {
            let _ = writeln!(text, "  {name:12} {value} -> {h}");
        } else if used || i == 17 {
            let _ = writeln!(text, "  {name:12} {value}");
        }
    }
    text
}

/// What differs from the host even where the engine takes undefined results from it.
pub fn not_even_on_the_host(instruction: &Instruction, state: &State) -> Undefined {
    let mut open = manual(instruction, state);
    open.flags = 0;
    open
}
