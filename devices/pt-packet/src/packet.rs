use crate::Tnt;
use serde::{Deserialize, Serialize};

/// Size of the code segment that MODE.Exec tells. SDM Vol. 3C 33.4.2.8 "MODE Packets".
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum ExecMode {
    /// CS.L and CS.D are clear.
    Bits16,
    /// CS.D is set.
    Bits32,
    /// CS.L is set and IA32_EFER.LMA is.
    #[default]
    Bits64,
}

impl ExecMode {
    /// 16, 32 or 64, as decoders of instructions take it.
    pub const fn bits(self) -> u32 {
        match self {
            ExecMode::Bits16 => 16,
            ExecMode::Bits32 => 32,
            ExecMode::Bits64 => 64,
        }
    }
}

/// How many bytes the payload of a PTW or BIP packet has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ItemSize {
    /// Four.
    Four,
    /// Eight.
    Eight,
}

impl ItemSize {
    /// In bytes.
    pub const fn len(self) -> usize {
        match self {
            ItemSize::Four => 4,
            ItemSize::Eight => 8,
        }
    }

    /// Never.
    pub const fn is_empty(self) -> bool {
        false
    }
}

/// One packet. SDM Vol. 3C 33.4.2 "Packet Definitions"; the subsection stands beside each.
///
/// Fields hold what the packet means, not its bits: an address, not its shifted payload. What does not fit into a packet's
/// field is cut off when it is encoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Packet {
    /// PAD, 33.4.2.20.
    Pad,
    /// TNT of up to 6 branches, 33.4.2.1.
    ShortTnt(Tnt),
    /// TNT of up to 47 branches, 33.4.2.1.
    LongTnt(Tnt),
    /// TIP, 33.4.2.2: the target, or `None` where it is out of context.
    Tip(Option<u64>),
    /// TIP.PGE, 33.4.2.4: packets are generated from this IP on.
    TipPge(Option<u64>),
    /// TIP.PGD, 33.4.2.5: packets are no longer generated; the target where it is in context.
    TipPgd(Option<u64>),
    /// FUP, 33.4.2.6: the source of what the packets around it tell.
    Fup(Option<u64>),
    /// PIP, 33.4.2.7: CR3 bits 51:5, and whether VMX non-root.
    Pip {
        /// CR3, of which bits 51:5 are sent.
        cr3: u64,
        /// In VMX non-root operation.
        non_root: bool,
    },
    /// MODE.Exec, 33.4.2.8.
    ModeExec {
        /// The code segment's size.
        mode: ExecMode,
        /// RFLAGS.IF, where events are traced; else false.
        interrupts: bool,
    },
    /// MODE.TSX, 33.4.2.8.
    ModeTsx {
        /// InTX: a transaction begins or goes on.
        in_tx: bool,
        /// TXAbort: it was aborted.
        abort: bool,
    },
    /// TraceStop, 33.4.2.9.
    TraceStop,
    /// CBR, 33.4.2.10: the core:bus ratio.
    Cbr(u8),
    /// TSC, 33.4.2.11: bits 55:0.
    Tsc(u64),
    /// MTC, 33.4.2.12: eight bits of the crystal clock's counter.
    Mtc(u8),
    /// TMA, 33.4.2.13.
    Tma {
        /// CTC\[15:0\]: the crystal clock's counter.
        ctc: u16,
        /// FastCounter\[8:0\]: TSC ticks since the last crystal clock tick.
        fast: u16,
    },
    /// CYC, 33.4.2.14: cycles since the last CYC packet.
    Cyc(u64),
    /// VMCS, 33.4.2.15: the VMCS pointer, of which bits 51:12 are sent.
    Vmcs(u64),
    /// OVF, 33.4.2.16. Resets the last IP.
    Ovf,
    /// PSB, 33.4.2.17. Resets the last IP.
    Psb,
    /// PSBEND, 33.4.2.18.
    PsbEnd,
    /// MNT, 33.4.2.19: model-specific.
    Mnt(u64),
    /// PTW, 33.4.2.21.
    Ptw {
        /// The operand of PTWRITE.
        value: u64,
        /// The operand's size.
        size: ItemSize,
        /// A FUP with the IP of the PTWRITE follows.
        ip: bool,
    },
    /// EXSTOP, 33.4.2.22: execution has stopped.
    ExStop {
        /// A FUP with the IP follows.
        ip: bool,
    },
    /// MWAIT, 33.4.2.23.
    Mwait {
        /// EAX\[7:0\].
        hints: u32,
        /// ECX\[1:0\].
        extensions: u32,
    },
    /// PWRE, 33.4.2.24: a C-state is entered.
    Pwre {
        /// The hardware's own doing.
        hardware: bool,
        /// Resolved thread C-state, 0 to 15.
        state: u8,
        /// Resolved thread sub C-state, 0 to 15.
        sub_state: u8,
    },
    /// PWRX, 33.4.2.25: back in C0.
    Pwrx {
        /// Last core C-state, 0 to 15.
        last: u8,
        /// Deepest core C-state, 0 to 15.
        deepest: u8,
        /// Wake reason: bit 0 interrupt, 2 store to the monitored address, 3 hardware autonomous.
        reason: u8,
    },
    /// BBP, 33.4.2.26: a block of BIP packets begins.
    Bbp {
        /// The payload size of the block's items.
        size: ItemSize,
        /// Type, 5 bits: 1 general-purpose registers, 4 PEBS basic, ...
        kind: u8,
    },
    /// BIP, 33.4.2.27. Its bytes are distinguished from TNT by the block they are in.
    Bip {
        /// ID, 5 bits.
        id: u8,
        /// As the block's BBP says.
        size: ItemSize,
        /// The item.
        value: u64,
    },
    /// BEP, 33.4.2.28: the block ends.
    Bep {
        /// A FUP with the IP follows.
        ip: bool,
    },
    /// CFE, 33.4.2.29: a control-flow event.
    Cfe {
        /// Type, 5 bits: 1 INTR, 2 IRET, 3 SMI, ...
        kind: u8,
        /// The vector, where the type has one.
        vector: u8,
        /// A FUP with the IP follows.
        ip: bool,
    },
    /// EVD, 33.4.2.30: data of the event whose CFE follows.
    Evd {
        /// Type, 6 bits: 0 CR2, 1 VM-exit qualification, 2 VM-exit reason.
        kind: u8,
        /// The value.
        value: u64,
    },
}

impl Packet {
    /// The manual's name.
    pub const fn name(&self) -> &'static str {
        match self {
            Packet::Pad => "PAD",
            Packet::ShortTnt(_) | Packet::LongTnt(_) => "TNT",
            Packet::Tip(_) => "TIP",
            Packet::TipPge(_) => "TIP.PGE",
            Packet::TipPgd(_) => "TIP.PGD",
            Packet::Fup(_) => "FUP",
            Packet::Pip { .. } => "PIP",
            Packet::ModeExec { .. } => "MODE.Exec",
            Packet::ModeTsx { .. } => "MODE.TSX",
            Packet::TraceStop => "TraceStop",
            Packet::Cbr(_) => "CBR",
            Packet::Tsc(_) => "TSC",
            Packet::Mtc(_) => "MTC",
            Packet::Tma { .. } => "TMA",
            Packet::Cyc(_) => "CYC",
            Packet::Vmcs(_) => "VMCS",
            Packet::Ovf => "OVF",
            Packet::Psb => "PSB",
            Packet::PsbEnd => "PSBEND",
            Packet::Mnt(_) => "MNT",
            Packet::Ptw { .. } => "PTW",
            Packet::ExStop { .. } => "EXSTOP",
            Packet::Mwait { .. } => "MWAIT",
            Packet::Pwre { .. } => "PWRE",
            Packet::Pwrx { .. } => "PWRX",
            Packet::Bbp { .. } => "BBP",
            Packet::Bip { .. } => "BIP",
            Packet::Bep { .. } => "BEP",
            Packet::Cfe { .. } => "CFE",
            Packet::Evd { .. } => "EVD",
        }
    }
}
