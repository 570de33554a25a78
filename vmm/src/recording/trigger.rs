//! When recording begins and stops: `--trace-start` and `--trace-stop`.

use std::fmt;
use std::path::Path;

use trace::symbols::SymbolFile;
use x86::seam::{Access, AccessKind, Appetite, Processor, Range};

use crate::parse::parse_u64;

/// What is waited for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum When {
    /// An instruction at this linear address is about to be executed.
    Address(u64),
    /// So many instructions have retired, over all CPUs; once.
    Instructions(u64),
    /// The hypercall ([`x86::seam::HYPERCALL`]): with EBX 1 it begins, with 0 it stops.
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
    /// Reads the option's value; names are looked up in `symbols`.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn parse(text: &str, symbols: Option<&Path>) -> Result<When, String> {
        if text == "hypercall" {
            return Ok(When::Hypercall);
        }
        if let Some(count) = text.strip_prefix("instructions=") {
            return match parse_u64(count) {
                Some(count @ 1..) => Ok(When::Instructions(count)),
                _ => Err(format!("{count} is not a number of instructions, from 1 on")),
            };
        }
        if let Some(port) = text.strip_prefix("port=") {
            let (port, value) = port
                .split_once(':')
                .map_or((port, None), |(port, value)| (port, Some(value)));
            let port = parse_u64(port).and_then(|port| u16::try_from(port).ok());
            let port = port.ok_or("port= needs a port from 0 to 0xffff, as port=0x80 or port=0x80:1")?;
            let value = match value {
                None => None,
                Some(value) => Some(
                    parse_u64(value)
                        .and_then(|value| u32::try_from(value).ok())
                        .ok_or("what is written to a port has at most 32 bits")?,
                ),
            };
            return Ok(When::Port(port, value));
        }
        if text.starts_with(|first: char| first.is_ascii_digit()) {
            return parse_u64(text)
                .map(When::Address)
                .ok_or_else(|| format!("{text} is not an address"));
        }
        let Some(file) = symbols else {
            return Err(format!(
                "{text} is not an address, instructions=N, hypercall or port=P[:VALUE]; for a symbol give --symbols FILE"
            ));
        };
        let symbols = SymbolFile::read(file).map_err(|error| format!("--symbols {}: {error}", file.display()))?;
        let address = symbols.symbols.address(text);
        address
            .map(When::Address)
            .ok_or_else(|| format!("there is no symbol {text} in {}", file.display()))
    }

    /// What the executor must announce for it; `retired` instructions are behind.
    pub fn appetite(&self, retired: u64) -> Appetite {
        let mut appetite = Appetite::NOTHING;
        match self {
            When::Address(_) => {}
            When::Instructions(count) => appetite.instructions = count.saturating_sub(retired),
            When::Hypercall => appetite.transfers = true,
            When::Port(..) => appetite.ranges = true,
        }
        appetite
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

#[cfg(test)]
mod tests {
    use super::*;

    // covers: trace/triggers
    #[test]
    fn what_is_waited_for_is_read_and_said_again() {
        for (text, when) in [
            ("0xffffffff81000000", When::Address(0xffff_ffff_8100_0000)),
            ("0x1000", When::Address(4096)),
            ("instructions=12", When::Instructions(12)),
            ("hypercall", When::Hypercall),
            ("port=0x80", When::Port(0x80, None)),
            ("port=0x80:0x1", When::Port(128, Some(1))),
        ] {
            assert_eq!(When::parse(text, None), Ok(when.clone()), "{text}");
            assert_eq!(when.to_string(), text);
        }
        for (text, says) in [
            ("start_kernel", "--symbols"),
            ("12x", "not an address"),
            ("instructions=0", "from 1 on"),
            ("instructions=", "from 1 on"),
            ("port=", "port=0x80"),
            ("port=0x10000", "0xffff"),
            ("port=1:0x100000000", "32 bits"),
            ("", "--symbols"),
        ] {
            let error = When::parse(text, None).unwrap_err();
            assert!(error.contains(says), "{text}: {error}");
        }
        let missing = When::parse("start_kernel", Some(Path::new("/no/such/vmlinux"))).unwrap_err();
        assert!(missing.contains("/no/such/vmlinux"), "{missing}");
    }
}
