//! What an op does, as far as the translator knows it.

/// Where the operands of an arithmetic op are, destination first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Operands {
    RegReg,
    RegImm,
    RegMem,
    MemReg,
    MemImm,
}

/// How a near branch reaches its target.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reach {
    /// Within the page.
    Near,
    /// In another page, which the TLB must still lead to.
    Far,
}

/// The forms of ops that are translated; all others are called. Sizes are in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Form {
    /// Anything else.
    Other,
    Nop,
    /// An operation of [`crate::flags`] on operands of a size.
    Alu(Operands, u8, u8),
    Not(u8),
    /// A shift or rotation by an immediate, as ModR/M encodes the operation.
    ShiftImm(u8, u8),
    /// By CL.
    ShiftByCl(u8, u8),
    /// MUL and IMUL of the accumulator: signed or not.
    Multiply(bool, u8),
    /// IMUL with two and with three operands.
    Product(u8),
    ProductImm(u8),
    Mulx(u8),
    Rorx(u8),
    /// SARX, SHLX and SHRX.
    ShiftX(u8, u8),
    /// ADCX and ADOX.
    Adx(u8, u8),
    /// ANDN, BLSI, BLSMSK and BLSR, as [`crate::undefined::Bmi`] numbers them.
    Extract(u8, u8),
    /// TZCNT, and LZCNT (1).
    CountZeros(u8, u8),
    /// BSF, and BSR (1).
    Scan(u8, u8),
    CountOnes(u8),
    /// CBW, CWDE, CDQE.
    ExtendA(u8),
    /// CWD, CDQ, CQO.
    SignToD(u8),
    /// BT, BTS, BTR and BTC of a register, by a register or an immediate.
    Bit(u8, u8),
    BitImm(u8, u8),
    SwapBytes(u8),
    MoveReg(u8),
    MoveImm(u8),
    Load(u8),
    Store(u8),
    StoreImm(u8),
    /// From a size to a size.
    ZeroReg(u8, u8),
    ZeroLoad(u8, u8),
    SignReg(u8, u8),
    SignLoad(u8, u8),
    /// LEA with an address size and an operand size.
    Lea(u8, u8),
    PushReg(u8),
    PushImm(u8),
    PopReg(u8),
    /// Of a condition and a size.
    Cmov(u8, u8),
    Set(u8),
    Exchange(u8),
    /// The address sum in FS or GS, with an address size.
    EaBased(u8),
    /// In a flat segment, and in one with base, limit and rights.
    EaFlat(u8),
    EaChecked(u8),
    /// A vector instruction's thunk.
    Vector,
    MoveXmm,
    /// Sixteen bytes, aligned or not.
    LoadXmm(bool),
    StoreXmm(bool),
    LoadLow(u8),
    StoreLow(u8),
    XmmFromReg(u8),
    RegFromXmm(u8),
    MoveLowXmm,
    LogicXmm(u8),
    /// The same with VEX prefixes: 128-bit results clear the upper half of their register.
    Vex,
    MoveYmm(u8),
    LoadYmm(bool, u8),
    StoreYmm(bool, u8),
    LoadLowYmm(u8),
    StoreLowYmm(u8),
    YmmFromReg(u8),
    RegFromYmm(u8),
    LogicYmm(u8, u8),
    ZeroUpper,
    /// Bits 511:256 of a register become zero: behind a VEX instruction, on a model with AVX-512.
    ClearZmmUpper,
    LoadT0(u8),
    StoreT0(u8),
    /// An arithmetic op and the branch on a condition within the page.
    Fused(Operands, u8, u8, u8),
    Jcc(u8, Reach),
    Jump(Reach),
    /// What leads to the next block and is no instruction.
    Continue(Reach),
    JumpReg(u8),
    JumpMem(u8),
    Call(Reach, u8),
    CallReg(u8),
    CallMem(u8),
    Return(u8),
}

/// How a flow op of these parameters reaches its target.
pub(crate) const fn reach(how: u8) -> Reach {
    if how == 0 { Reach::Near } else { Reach::Far }
}
