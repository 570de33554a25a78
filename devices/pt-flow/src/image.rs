/// Whose addresses the instruction pointers are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Context {
    /// CR3 without bits 4:0, as PIP packets tell it; `None` until one does.
    pub cr3: Option<u64>,
    /// In VMX non-root operation.
    pub non_root: bool,
    /// The VMCS pointer, as VMCS packets tell it.
    pub vmcs: Option<u64>,
}

/// A place in a trace: when `offset` bytes had been written, the results of `bits` branches were pending for the next TNT packet,
/// and `ip` was to be executed next for the first time since the last of them.
///
/// Between two packets or TNT bits no code comes by twice, so that this is exact.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Position {
    /// Bytes of the trace before it.
    pub offset: u64,
    /// Branches since then.
    pub bits: u32,
    /// The next instruction. Without it, the place is right behind the last packet or branch.
    pub ip: Option<u64>,
}

/// Code that is another from some position on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Change {
    /// In which space.
    pub space: u32,
    /// The first address, down to a page of 4 KiB.
    pub page: u64,
}

/// Where the decoder gets code from.
///
/// An image keeps a position in the trace, which only moves forward, and answers for it.
pub trait Image {
    /// A number for the code that `context` shows in the lower or upper half of the addresses (bit 63 of the IP). Contexts with
    /// the same code there, as all have for a kernel's half, get the same number, so that it is decoded once.
    fn space(&mut self, context: &Context, upper: bool) -> u32;

    /// Copies the code at `ip` into `out` and gives how many bytes there are: fewer than asked for where code ends, none where
    /// nothing is known.
    fn code(&mut self, space: u32, ip: u64, out: &mut [u8]) -> usize;

    /// The next position at which code changes. The decoder walks there and calls [`Image::advance`].
    fn next_change(&mut self) -> Option<Position> {
        None
    }

    /// Moves to `position`, or stays where that is behind, and tells `changed` of all pages whose code is not what it was.
    fn advance(&mut self, position: Position, changed: &mut dyn FnMut(Change)) {
        let _ = (position, changed);
    }
}

/// An image of sections that are the same for all contexts and never change. Later ones cover earlier ones.
#[derive(Clone, Debug, Default)]
pub struct Sections<'a> {
    sections: Vec<(u64, &'a [u8])>,
}

impl<'a> Sections<'a> {
    /// No code.
    pub fn new() -> Sections<'a> {
        Sections::default()
    }

    /// Adds the bytes at an address.
    pub fn add(&mut self, ip: u64, bytes: &'a [u8]) {
        self.sections.push((ip, bytes));
    }
}

impl Image for Sections<'_> {
    fn space(&mut self, _: &Context, _: bool) -> u32 {
        0
    }

    fn code(&mut self, _: u32, ip: u64, out: &mut [u8]) -> usize {
        let mut filled = 0;
        while filled < out.len() {
            let at = ip.wrapping_add(filled as u64);
            let Some((index, rest)) = self
                .sections
                .iter()
                .enumerate()
                .rev()
                .find_map(|(index, (base, bytes))| {
                    let offset = usize::try_from(at.checked_sub(*base)?).ok()?;
                    let rest = bytes.get(offset..).filter(|rest| !rest.is_empty())?;
                    Some((index, rest))
                })
            else {
                break;
            };
            // As far as no later section begins.
            let covered = self.sections[index + 1..]
                .iter()
                .filter_map(|(base, _)| base.checked_sub(at).filter(|ahead| *ahead > 0))
                .min()
                .unwrap_or(u64::MAX);
            let len = rest
                .len()
                .min(out.len() - filled)
                .min(usize::try_from(covered).unwrap_or(usize::MAX));
            out[filled..filled + len].copy_from_slice(&rest[..len]);
            filled += len;
        }
        filled
    }
}
