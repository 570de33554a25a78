//! What an instruction starts from and what it leaves: one vocabulary for the host and the engine.

use std::fmt::Write as _;

use crate::arena::{CODE, DATA, PAGE, STACK};

/// Selector of 64-bit user code, as Linux has it; the engine's GDT is laid out the same way.
pub const USER64_CS: u16 = 0x33;
/// Selector of 32-bit user code.
pub const USER32_CS: u16 = 0x23;
/// Selector of user data and stack.
pub const USER_DS: u16 = 0x2b;

/// Selectors of the LDT that both machines have ([`LDT`]).
pub mod ldt {
    #![allow(missing_docs)]
    pub const CODE16: u16 = 0x07;
    pub const CODE32: u16 = 0x0f;
    pub const DATA32: u16 = 0x17;
    pub const READ_ONLY: u16 = 0x1f;
    pub const STACK16: u16 = 0x27;
    pub const EXPAND_DOWN: u16 = 0x2f;
    pub const NOT_PRESENT: u16 = 0x37;
    pub const STACK32: u16 = 0x3f;
}

/// One descriptor of the LDT.
#[derive(Clone, Copy, Debug)]
pub struct Descriptor {
    /// Linear base address.
    pub base: u32,
    /// Limit in bytes.
    pub limit: u16,
    /// D/B bit.
    pub big: bool,
    /// As `modify_ldt` has it: 0 data, 1 expand-down data, 2 code.
    pub contents: u32,
    /// Data that may not be written.
    pub read_only: bool,
    /// Not present.
    pub absent: bool,
}

impl Descriptor {
    const DATA: Descriptor = Descriptor {
        base: DATA as u32,
        limit: 2 * PAGE as u16 - 1,
        big: true,
        contents: 0,
        read_only: false,
        absent: false,
    };

    /// The eight bytes, ring 3, already accessed.
    pub fn bits(&self) -> u64 {
        let kind = 1 | if self.read_only { 0 } else { 2 } | u64::from(self.contents) << 2;
        let base = u64::from(self.base);
        let rights = kind | 0x70 | if self.absent { 0 } else { 0x80 };
        u64::from(self.limit) | (base & 0xff_ffff) << 16 | rights << 40 | u64::from(self.big) << 54 | (base >> 24) << 56
    }
}

/// Segments with bases, limits and 16-bit sizes, as the host's `modify_ldt` and the guest's LDT hold them.
pub const LDT: [Descriptor; 8] = [
    Descriptor {
        base: CODE as u32,
        big: false,
        contents: 2,
        ..Descriptor::DATA
    },
    Descriptor {
        base: CODE as u32,
        contents: 2,
        ..Descriptor::DATA
    },
    Descriptor::DATA,
    Descriptor {
        read_only: true,
        limit: 0xfff,
        ..Descriptor::DATA
    },
    Descriptor {
        base: STACK as u32,
        limit: 0xfff,
        big: false,
        ..Descriptor::DATA
    },
    Descriptor {
        contents: 1,
        limit: 0x7ff,
        ..Descriptor::DATA
    },
    Descriptor {
        absent: true,
        ..Descriptor::DATA
    },
    Descriptor {
        base: STACK as u32,
        limit: 0xfff,
        ..Descriptor::DATA
    },
];

/// The base that a selector's segment has outside 64-bit mode.
pub fn base_of(selector: u16) -> u64 {
    if selector & 4 == 0 {
        0
    } else {
        LDT.get(usize::from(selector >> 3)).map_or(0, |row| u64::from(row.base))
    }
}

/// RFLAGS bits by name.
pub mod flag {
    #![allow(missing_docs)]
    pub const CF: u64 = 1 << 0;
    pub const PF: u64 = 1 << 2;
    pub const AF: u64 = 1 << 4;
    pub const ZF: u64 = 1 << 6;
    pub const SF: u64 = 1 << 7;
    pub const TF: u64 = 1 << 8;
    pub const IF: u64 = 1 << 9;
    pub const DF: u64 = 1 << 10;
    pub const OF: u64 = 1 << 11;
    pub const NT: u64 = 1 << 14;
    pub const RF: u64 = 1 << 16;
    pub const AC: u64 = 1 << 18;
    pub const ID: u64 = 1 << 21;
    /// The six that arithmetic writes.
    pub const STATUS: u64 = CF | PF | AF | ZF | SF | OF;
}

/// x87, MMX, SSE, AVX and AVX-512 registers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fpu {
    /// Control word.
    pub fcw: u16,
    /// Status word, TOP included.
    pub fsw: u16,
    /// Abridged tags: a bit per physical register, 1 for in use.
    pub ftw: u8,
    /// SSE control and status.
    pub mxcsr: u32,
    /// ST(0) to ST(7), each 80 bits: significand, then sign and exponent.
    pub st: [(u64, u16); 8],
    /// XMM0 to XMM15.
    pub xmm: [u128; 16],
    /// The upper halves of YMM0 to YMM15, which no FXSAVE image has.
    pub ymm_hi: [u128; 16],
    /// The opmasks and the rest of the ZMM registers.
    pub wide: Wide,
}

/// What AVX-512 adds, as XSAVE has it: opmask state, ZMM_Hi256 state, Hi16_ZMM state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Wide {
    /// k0 to k7.
    pub k: [u64; 8],
    /// Bits 511:256 of ZMM0 to ZMM15.
    pub zmm_hi: [[u128; 2]; 16],
    /// ZMM16 to ZMM31.
    pub zmm: [[u128; 4]; 16],
}

impl Wide {
    /// All zero.
    pub const INIT: Wide = Wide {
        k: [0; 8],
        zmm_hi: [[0; 2]; 16],
        zmm: [[0; 4]; 16],
    };
}

impl Fpu {
    /// What FNINIT and a cleared MXCSR leave.
    pub const INIT: Fpu = Fpu {
        fcw: 0x37f,
        fsw: 0,
        ftw: 0,
        mxcsr: 0x1f80,
        st: [(0, 0); 8],
        xmm: [0; 16],
        ymm_hi: [0; 16],
        wide: Wide::INIT,
    };

    /// The four quarters of a ZMM register, the lowest first.
    pub fn register(&self, n: usize) -> [u128; 4] {
        match n {
            0..16 => {
                let [a, b] = self.wide.zmm_hi[n];
                [self.xmm[n], self.ymm_hi[n], a, b]
            }
            _ => self.wide.zmm[n - 16],
        }
    }

    /// Writes them.
    pub fn set_register(&mut self, n: usize, value: [u128; 4]) {
        if n < 16 {
            let [xmm, ymm_hi, a, b] = value;
            (self.xmm[n], self.ymm_hi[n], self.wide.zmm_hi[n]) = (xmm, ymm_hi, [a, b]);
        } else {
            self.wide.zmm[n - 16] = value;
        }
    }

    /// Reads an FXSAVE image. SDM Vol. 1 10.5.1 "FXSAVE Area".
    pub fn from_image(image: &[u8; 512]) -> Fpu {
        let u16_at = |at: usize| u16::from_le_bytes([image[at], image[at + 1]]);
        let mut fpu = Fpu {
            fcw: u16_at(0),
            fsw: u16_at(2),
            ftw: image[4],
            mxcsr: u32::from(u16_at(24)) | u32::from(u16_at(26)) << 16,
            ..Fpu::INIT
        };
        for (i, st) in fpu.st.iter_mut().enumerate() {
            let at = 32 + 16 * i;
            let mut bits = [0; 8];
            bits.copy_from_slice(&image[at..at + 8]);
            *st = (u64::from_le_bytes(bits), u16_at(at + 8));
        }
        for (i, xmm) in fpu.xmm.iter_mut().enumerate() {
            let at = 160 + 16 * i;
            let mut bits = [0; 16];
            bits.copy_from_slice(&image[at..at + 16]);
            *xmm = u128::from_le_bytes(bits);
        }
        fpu
    }

    /// Writes the registers into an FXSAVE image, instruction and data pointers zero.
    pub fn to_image(self, image: &mut [u8; 512]) {
        image[0..2].copy_from_slice(&self.fcw.to_le_bytes());
        image[2..4].copy_from_slice(&self.fsw.to_le_bytes());
        image[4] = self.ftw;
        image[5..24].fill(0);
        image[24..28].copy_from_slice(&self.mxcsr.to_le_bytes());
        for (i, (significand, top)) in self.st.iter().enumerate() {
            let at = 32 + 16 * i;
            image[at..at + 8].copy_from_slice(&significand.to_le_bytes());
            image[at + 8..at + 10].copy_from_slice(&top.to_le_bytes());
            image[at + 10..at + 16].fill(0);
        }
        for (i, xmm) in self.xmm.iter().enumerate() {
            image[160 + 16 * i..176 + 16 * i].copy_from_slice(&xmm.to_le_bytes());
        }
    }
}

/// Registers before and after a run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct State {
    /// RAX RCX RDX RBX RSP RBP RSI RDI R8 to R15.
    pub gpr: [u64; 16],
    /// Instruction pointer.
    pub rip: u64,
    /// RFLAGS; IF is set and IOPL is 0, as for any Linux process.
    pub rflags: u64,
    /// Code segment: [`USER64_CS`] or [`USER32_CS`].
    pub cs: u16,
    /// Stack segment.
    pub ss: u16,
    /// ES and DS, which 64-bit code can load and 32-bit code uses.
    pub es_ds: [u16; 2],
    /// FS.base.
    pub fs_base: u64,
    /// GS.base.
    pub gs_base: u64,
    /// x87, MMX, SSE.
    pub fpu: Fpu,
}

impl State {
    /// A state with nothing in it, ready to run 64-bit code at `rip`.
    pub fn new(rip: u64) -> State {
        State {
            gpr: [0; 16],
            rip,
            rflags: flag::IF | 2,
            cs: USER64_CS,
            ss: USER_DS,
            es_ds: [USER_DS; 2],
            fs_base: 0,
            gs_base: 0,
            fpu: Fpu::INIT,
        }
    }
}

impl State {
    /// 16, 32 or 64: the mode of the code segment.
    pub fn bits(&self) -> u32 {
        match self.cs {
            USER64_CS => 64,
            ldt::CODE16 => 16,
            _ => 32,
        }
    }

    /// The linear address of RIP.
    pub fn linear_rip(&self) -> u64 {
        if self.bits() == 64 {
            self.rip
        } else {
            (base_of(self.cs) + self.rip) & 0xffff_ffff
        }
    }
}

/// How a run ended: each ends with an exception, INT3 being the ordinary one (all code around the instructions is INT3).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Outcome {
    /// Exception vector.
    pub vector: u8,
    /// Error code; 0 for the vectors that push none.
    pub error: u32,
    /// CR2 if this is a page fault, else 0.
    pub cr2: u64,
    /// Registers as the exception saved them.
    pub state: State,
}

/// Vectors that push an error code. SDM Vol. 3A 6.13 "Error Code".
pub fn pushes_error(vector: u8) -> bool {
    matches!(vector, 8 | 10..=14 | 17)
}

/// Names of the general registers in the order of [`State::gpr`].
pub const GPR_NAMES: [&str; 16] = [
    "rax", "rcx", "rdx", "rbx", "rsp", "rbp", "rsi", "rdi", "r8", "r9", "r10", "r11", "r12", "r13", "r14", "r15",
];

/// RFLAGS in words.
pub fn flags_text(rflags: u64) -> String {
    let mut text = format!("{rflags:#x}");
    for (bit, name) in [
        (flag::CF, "cf"),
        (flag::PF, "pf"),
        (flag::AF, "af"),
        (flag::ZF, "zf"),
        (flag::SF, "sf"),
        (flag::TF, "tf"),
        (flag::DF, "df"),
        (flag::OF, "of"),
        (flag::NT, "nt"),
        (flag::RF, "rf"),
        (flag::AC, "ac"),
        (flag::ID, "id"),
    ] {
        if rflags & bit != 0 {
            let _ = write!(text, " {name}");
        }
    }
    text
}

/// Every field of a state as (name, text), in a fixed order, for side-by-side reports.
pub fn fields(state: &State) -> Vec<(String, String)> {
    let mut rows = Vec::new();
    for (name, value) in GPR_NAMES.iter().zip(state.gpr) {
        rows.push((name.to_string(), format!("{value:#018x}")));
    }
    rows.push(("rip".into(), format!("{:#x}", state.rip)));
    rows.push(("rflags".into(), flags_text(state.rflags)));
    rows.push((
        "cs ss es ds".into(),
        format!(
            "{:x} {:x} {:x} {:x}",
            state.cs, state.ss, state.es_ds[0], state.es_ds[1]
        ),
    ));
    rows.push(("fs.base".into(), format!("{:#x}", state.fs_base)));
    rows.push(("gs.base".into(), format!("{:#x}", state.gs_base)));
    let fpu = &state.fpu;
    rows.push(("fcw".into(), format!("{:#06x}", fpu.fcw)));
    rows.push(("fsw".into(), format!("{:#06x} top {}", fpu.fsw, fpu.fsw >> 11 & 7)));
    rows.push(("ftw".into(), format!("{:#04x}", fpu.ftw)));
    rows.push(("mxcsr".into(), format!("{:#06x}", fpu.mxcsr)));
    for (i, (significand, top)) in fpu.st.iter().enumerate() {
        rows.push((format!("st{i}"), format!("{top:04x}:{significand:016x}")));
    }
    for (i, xmm) in fpu.xmm.iter().enumerate() {
        rows.push((format!("xmm{i}"), format!("{xmm:032x}")));
    }
    for (i, half) in fpu.ymm_hi.iter().enumerate() {
        rows.push((format!("ymm{i} high"), format!("{half:032x}")));
    }
    for (i, k) in fpu.wide.k.iter().enumerate() {
        rows.push((format!("k{i}"), format!("{k:016x}")));
    }
    for (i, [low, high]) in fpu.wide.zmm_hi.iter().enumerate() {
        rows.push((format!("zmm{i} high"), format!("{high:032x}_{low:032x}")));
    }
    for (i, [a, b, c, d]) in fpu.wide.zmm.iter().enumerate() {
        rows.push((format!("zmm{}", i + 16), format!("{d:032x}_{c:032x}_{b:032x}_{a:032x}")));
    }
    rows
}
