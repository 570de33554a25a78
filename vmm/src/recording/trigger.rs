//! When recording begins and stops: `--trace-start` and `--trace-stop`.

use std::fmt;

use x86::watch::{Access, AccessKind, Interest, Processor, Range};

/// What is waited for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum When {
    /// An instruction at this linear address is about to be executed.
    Address(u64),
    /// So many instructions have retired, over all CPUs; once.
    Instructions(u64),
    /// The hypercall ([`x86::watch::HYPERCALL`]): with EBX 1 it begins, with 0 it stops.
    Hypercall,
    /// A write to this port, of this value if there is one.
    Port(u16, Option<u32>),
}

impl fmt::Display for When {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            When::Address(address) => write!(f, "{address:#x}"),
            When::Instructions(count) => write!(f, "instructions={count}"),
            When::Hypercall => f.write_str("hypercall"),
            When::Port(port, None) => write!(f, "port={port:#x}"),
            When::Port(port, Some(value)) => write!(f, "port={port:#x}:{value:#x}"),
        }
    }
}

impl When {
    /// What the executor must announce for it; `retired` instructions are behind.
    pub fn interest(&self, retired: u64) -> Interest {
        let mut interest = Interest::NOTHING;
        match self {
            When::Address(_) => {}
            When::Instructions(count) => interest.instructions = count.saturating_sub(retired),
            When::Hypercall => interest.transfers = true,
            When::Port(..) => interest.ranges = true,
        }
        interest
    }

    /// The address before which it is to be asked.
    pub fn boundary(&self) -> Option<u64> {
        match self {
            When::Address(address) => Some(*address),
            _ => None,
        }
    }

    /// The port whose writes it is to be asked about.
    pub fn range(&self) -> Option<Range> {
        let When::Port(port, _) = *self else { return None };
        Some(Range {
            first: port.into(),
            last: port.into(),
            ports: true,
            reads: false,
            writes: true,
        })
    }

    /// Whether this access is what is waited for.
    pub fn is_access(&self, access: &Access, cpu: &dyn Processor) -> bool {
        let When::Port(port, wanted) = *self else { return false };
        let mask = match access.size {
            1 => 0xff,
            2 => 0xffff,
            _ => 0xffff_ffff,
        };
        access.kind == AccessKind::PortWrite
            && access.address == u64::from(port)
            && wanted.is_none_or(|wanted| u64::from(wanted) == cpu.gpr(0) & mask)
    }
}
