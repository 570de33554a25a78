//! Exceptions and interrupts: the IDT, a handler for each vector, and faults that come back as values. SDM Vol. 3A chapter 6
//! "Interrupt and Exception Handling".

use core::arch::{asm, global_asm};
use core::fmt;

use crate::ap::{self, MAX_CPUS};
use crate::apic;

/// What a handler finds on its stack, and what goes back when it returns.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct Frame {
    /// R15 down to R8.
    pub r15: u64,
    /// R14.
    pub r14: u64,
    /// R13.
    pub r13: u64,
    /// R12.
    pub r12: u64,
    /// R11.
    pub r11: u64,
    /// R10.
    pub r10: u64,
    /// R9.
    pub r9: u64,
    /// R8.
    pub r8: u64,
    /// RDI.
    pub rdi: u64,
    /// RSI.
    pub rsi: u64,
    /// RBP.
    pub rbp: u64,
    /// RBX.
    pub rbx: u64,
    /// RDX.
    pub rdx: u64,
    /// RCX.
    pub rcx: u64,
    /// RAX.
    pub rax: u64,
    /// The vector.
    pub vector: u64,
    /// The error code, 0 where the vector has none.
    pub error: u64,
    /// The saved RIP.
    pub rip: u64,
    /// The saved CS.
    pub cs: u64,
    /// The saved RFLAGS.
    pub rflags: u64,
    /// The saved RSP.
    pub rsp: u64,
    /// The saved SS.
    pub ss: u64,
}

/// RFLAGS.TF.
pub const TF: u64 = 1 << 8;
/// RFLAGS.IF.
pub const IF: u64 = 1 << 9;
/// RFLAGS.RF.
pub const RF: u64 = 1 << 16;

/// #DB.
pub const DB: u8 = 1;
/// #BP.
pub const BP: u8 = 3;
/// #UD.
pub const UD: u8 = 6;
/// #GP.
pub const GP: u8 = 13;
/// #PF.
pub const PF: u8 = 14;

/// A fault that an instruction came back with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fault {
    /// The vector.
    pub vector: u8,
    /// The error code.
    pub error: u32,
}

impl Fault {
    /// #GP(0).
    pub const GP0: Self = Self { vector: GP, error: 0 };
    /// #UD.
    pub const UD: Self = Self { vector: UD, error: 0 };

    /// What the handler left in the register of `attempt!`.
    pub const fn decode(word: u64) -> Option<Self> {
        if word == 0 {
            return None;
        }
        Some(Self {
            vector: word as u8,
            error: (word >> 32) as u32,
        })
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let name = match self.vector {
            1 => "#DB",
            3 => "#BP",
            6 => "#UD",
            8 => "#DF",
            13 => "#GP",
            14 => "#PF",
            _ => return write!(f, "vector {} ({:X}H)", self.vector, self.error),
        };
        write!(f, "{name}({:X}H)", self.error)
    }
}

/// A handler; it may change the frame.
pub type Handler = fn(&mut Frame);

static mut HANDLERS: [Option<Handler>; 256] = [None; 256];

/// Sets the handler of a vector until the end of the test.
pub fn on(vector: u8, handler: Handler) {
    // SAFETY: one CPU sets handlers, while the others wait for work.
    unsafe { HANDLERS[usize::from(vector)] = Some(handler) };
}

/// Forgets all handlers.
pub(crate) fn forget() {
    // SAFETY: as above.
    unsafe { HANDLERS = [None; 256] };
}

/// Selectors of the GDT.
pub mod selector {
    /// 64-bit code of ring 0.
    pub const CODE: u16 = 0x08;
    /// Data of ring 0.
    pub const DATA: u16 = 0x10;
    /// 32-bit code of ring 0.
    pub const CODE32: u16 = 0x18;
    /// Data of ring 3.
    pub const USER_DATA: u16 = 0x20 | 3;
    /// 64-bit code of ring 3.
    pub const USER_CODE: u16 = 0x28 | 3;
    /// 32-bit code of ring 3.
    pub const USER_CODE32: u16 = 0x30 | 3;
    /// The CPU's TSS.
    pub const TSS: u16 = 0x40;
}

const STACK: usize = 16384;
const STACKS: usize = 6;

/// One CPU's tables and stacks.
#[repr(C, align(4096))]
struct PerCpu {
    stacks: [[u8; STACK]; STACKS],
    gdt: [u64; 10],
    tss: [u32; 26],
}

static mut PER_CPU: [PerCpu; MAX_CPUS] = [const {
    PerCpu {
        stacks: [[0; STACK]; STACKS],
        gdt: [0; 10],
        tss: [0; 26],
    }
}; MAX_CPUS];
static mut IDT: [[u64; 2]; 256] = [[0; 2]; 256];

/// The stack of the IST that a vector takes: other exceptions, interrupts, and one each for those that may come in a handler.
const fn stack_of(vector: usize) -> u64 {
    match vector {
        1 => 3,
        2 => 4,
        13 => 5,
        14 => 6,
        0..=31 => 1,
        _ => 2,
    }
}

/// Fills the IDT.
pub(crate) fn init() {
    let stubs = crate::label!(vector_stubs);
    // SAFETY: only the boot CPU fills it, before it is loaded.
    let table = unsafe { &mut *core::ptr::addr_of_mut!(IDT) };
    for (vector, gate) in table.iter_mut().enumerate() {
        let address = stubs + 16 * vector as u64;
        // Interrupt gates; ring 3 may come by 3, 4 and 80H on, to call back.
        let dpl = if matches!(vector, 3 | 4 | 0x80..=0x83) { 3 } else { 0 };
        let low = address & 0xFFFF
            | u64::from(selector::CODE) << 16
            | stack_of(vector) << 32
            | (0x8E | dpl << 5) << 40
            | (address >> 16 & 0xFFFF) << 48;
        *gate = [low, address >> 32];
    }
}

/// Loads this CPU's tables.
pub(crate) fn load(cpu: usize) {
    // SAFETY: each CPU writes its own tables once, before it uses them.
    unsafe {
        let this = &mut *core::ptr::addr_of_mut!(PER_CPU[cpu]);
        let tss = core::ptr::addr_of!(this.tss) as u64;
        this.gdt = [
            0,
            0x00AF_9B00_0000_FFFF,
            0x00CF_9300_0000_FFFF,
            0x00CF_9B00_0000_FFFF,
            0x00CF_F300_0000_FFFF,
            0x00AF_FB00_0000_FFFF,
            0x00CF_FB00_0000_FFFF,
            0,
            0x0000_8900_0000_0067 | (tss & 0xFF_FFFF) << 16 | (tss >> 24 & 0xFF) << 56,
            tss >> 32,
        ];
        let mut put = |index: usize, value: u64| {
            this.tss[index] = value as u32;
            this.tss[index + 1] = (value >> 32) as u32;
        };
        let top = |n: usize| core::ptr::addr_of!(this.stacks[n]) as u64 + STACK as u64;
        // RSP0 is never taken, since every gate has its stack of the IST; it is there for completeness.
        put(1, top(0));
        for n in 0..STACKS {
            put(9 + 2 * n, top(n));
        }
        this.tss[25] = 104 << 16;
        let gdtr = Pointer {
            limit: 79,
            base: core::ptr::addr_of!(this.gdt) as u64,
        };
        let idtr = Pointer {
            limit: 4095,
            base: core::ptr::addr_of!(IDT) as u64,
        };
        asm!(
            "lgdt [{gdtr}]",
            "lidt [{idtr}]",
            "push 8",
            "lea {scratch}, [rip + 2f]",
            "push {scratch}",
            "retfq",
            "2:",
            "mov {scratch:e}, 0x10",
            "mov ds, {scratch:e}",
            "mov es, {scratch:e}",
            "mov ss, {scratch:e}",
            "mov {scratch:e}, 0x40",
            "ltr {scratch:x}",
            gdtr = in(reg) &gdtr,
            idtr = in(reg) &idtr,
            scratch = out(reg) _,
        );
    }
}

#[repr(C, packed)]
struct Pointer {
    limit: u16,
    base: u64,
}

/// The address of a vector's first instruction.
pub fn entry(vector: u8) -> u64 {
    crate::label!(vector_stubs) + 16 * u64::from(vector)
}

global_asm!(
    r#"
    .text
    .balign 16
    .globl  vector_stubs
vector_stubs:
    .set    vector, 0
    .rept   256
    .balign 16
    .if     vector == 8 || (vector >= 10 && vector <= 14) || vector == 17 || vector == 21
    .else
    push    0
    .endif
    push    vector
    jmp     vector_common
    .set    vector, vector + 1
    .endr
vector_common:
    push    rax
    push    rcx
    push    rdx
    push    rbx
    push    rbp
    push    rsi
    push    rdi
    push    r8
    push    r9
    push    r10
    push    r11
    push    r12
    push    r13
    push    r14
    push    r15
    cld
    mov     rdi, rsp
    mov     rbp, rsp
    sub     rsp, 512
    and     rsp, -16
    fxsave  [rsp]
    call    exception
    fxrstor [rsp]
    mov     rsp, rbp
    pop     r15
    pop     r14
    pop     r13
    pop     r12
    pop     r11
    pop     r10
    pop     r9
    pop     r8
    pop     rdi
    pop     rsi
    pop     rbp
    pop     rbx
    pop     rdx
    pop     rcx
    pop     rax
    add     rsp, 16
    iretq
"#
);

/// Where everything arrives. The vector and the error code are pushed as one word each, so that the stub's push of a
/// vector above 127 must not be sign-extended into it.
#[unsafe(no_mangle)]
extern "C" fn exception(frame: &mut Frame) {
    frame.vector &= 0xFF;
    let vector = frame.vector as u8;
    if vector == ap::WAKE {
        return apic::eoi();
    }
    // SAFETY: handlers are set by the CPU that runs the test. A test that reads branch records wants few branches up to here.
    if let Some(handler) = unsafe { HANDLERS[usize::from(vector)] } {
        return handler(frame);
    }
    match fixup(frame.rip) {
        Some(fixup) if vector < 32 => {
            frame.r8 = frame.error << 32 | 1 << 8 | frame.vector;
            frame.rip = fixup;
        }
        _ if vector == crate::user::RETURN => crate::user::come_back(frame),
        _ => unexpected(frame),
    }
}

/// Where a fault at this address goes on.
fn fixup(rip: u64) -> Option<u64> {
    let (mut at, end) = (crate::label!(fixups_start), crate::label!(fixups_end));
    while at < end {
        // SAFETY: the linker script bounds the table by these two.
        let [from, to] = unsafe { *(at as *const [u64; 2]) };
        if from == rip {
            return Some(to);
        }
        at += 16;
    }
    None
}

fn unexpected(frame: &Frame) -> ! {
    let fault = Fault {
        vector: frame.vector as u8,
        error: frame.error as u32,
    };
    panic!(
        "{fault} at {:X}H, CS {:X}H, RFLAGS {:X}H, RSP {:X}H, CR2 {:X}H, DR6 {:X}H, RAX {:X}H, RCX {:X}H, RDX {:X}H",
        frame.rip,
        frame.cs,
        frame.rflags,
        frame.rsp,
        crate::cpu::cr2(),
        crate::cpu::dr(6).unwrap_or(0),
        frame.rax,
        frame.rcx,
        frame.rdx,
    );
}
