//! Port and MMIO address map: which device answers an address, and in pieces of what size.

use std::fmt;

/// How wide an access a claim takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Width {
    /// An eight-bit device: a wider access arrives as single bytes at consecutive addresses, lowest first, as the ISA bridge
    /// splits it.
    Byte,
    /// The device takes the access as it is, as long as it lies inside the claim.
    Whole,
}

/// A claim that cannot be entered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MapError {
    /// The range is empty or leaves the address space.
    Range {
        /// The first address.
        first: u64,
        /// The length.
        len: u64,
    },
    /// Somebody else has part of the range.
    Overlap {
        /// The new claim's first and last address.
        new: (u64, u64),
        /// The other claim's.
        old: (u64, u64),
    },
}

impl fmt::Display for MapError {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        match *self {
            MapError::Range { first, len } => write!(f, "{len:#x} addresses from {first:#x} are not a range"),
            MapError::Overlap { new, old } => {
                write!(f, "{:#x}-{:#x} overlaps {:#x}-{:#x}", new.0, new.1, old.0, old.1)
            }
        }
    }
}

impl std::error::Error for MapError {}

#[derive(Clone, Debug)]
struct Claim<T> {
    first: u64,
    last: u64,
    width: Width,
    owner: T,
}

/// Part of an access that one device answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece<T> {
    /// Who answers, and at which offset into its claim; `None`: nobody.
    pub owner: Option<(T, u64)>,
    /// Bytes.
    pub size: u8,
    /// Where these bytes stand in the access, in bits.
    pub shift: u32,
}

/// Ranges of addresses with their owners.
#[derive(Clone, Debug)]
pub struct AddressMap<T> {
    /// In ascending order.
    claims: Vec<Claim<T>>,
    last: u64,
}

impl<T: Copy> AddressMap<T> {
    /// An empty map of the addresses from 0 to `last`.
    pub fn new(last: u64) -> AddressMap<T> {
        AddressMap {
            claims: Vec::new(),
            last,
        }
    }

    /// Enters a range.
    ///
    /// # Errors
    /// An empty range, one that leaves the address space, or one that another claim has part of.
    pub fn claim(&mut self, first: u64, len: u64, width: Width, owner: T) -> Result<(), MapError> {
        let last = match len.checked_sub(1).and_then(|more| first.checked_add(more)) {
            Some(last) if last <= self.last => last,
            _ => return Err(MapError::Range { first, len }),
        };
        let at = self.claims.partition_point(|c| c.last < first);
        if let Some(other) = self.claims.get(at)
            && other.first <= last
        {
            return Err(MapError::Overlap {
                new: (first, last),
                old: (other.first, other.last),
            });
        }
        self.claims.insert(
            at,
            Claim {
                first,
                last,
                width,
                owner,
            },
        );
        Ok(())
    }

    fn find(&self, address: u64) -> Option<&Claim<T>> {
        let at = self.claims.partition_point(|c| c.last < address);
        self.claims.get(at).filter(|c| c.first <= address)
    }

    /// Who answers this address, and at which offset into its claim.
    pub fn owner(&self, address: u64) -> Option<(T, u64)> {
        self.find(address).map(|c| (c.owner, address - c.first))
    }

    /// The pieces of an access of `size` (1 to 8) bytes, lowest address first. They do not borrow the map, so that whoever owns
    /// it can pass them on to his devices.
    pub fn pieces(&self, address: u64, size: u8) -> impl Iterator<Item = Piece<T>> + use<T> {
        let size = size.clamp(1, 8);
        let end = |claim: &Claim<T>| {
            address
                .checked_add(u64::from(size) - 1)
                .is_some_and(|last| last <= claim.last)
        };
        let whole = self
            .find(address)
            .is_some_and(|claim| claim.width == Width::Whole && end(claim));
        let step = if whole { size } else { 1 };
        let mut pieces = [None; 8];
        for i in (0..size).step_by(usize::from(step)) {
            // Past the end of the address space there is nobody.
            let owner = address
                .checked_add(u64::from(i))
                .filter(|a| *a <= self.last)
                .and_then(|a| self.owner(a));
            pieces[usize::from(i)] = Some(Piece {
                owner,
                size: step,
                shift: u32::from(i) * 8,
            });
        }
        pieces.into_iter().flatten()
    }
}

/// All ones in `size` (1 to 8) bytes: what an access reads that nobody answers.
pub fn all_ones(size: u8) -> u64 {
    match size {
        0 => 0,
        1..=7 => (1 << (u32::from(size) * 8)) - 1,
        _ => u64::MAX,
    }
}

#[cfg(test)]
#[path = "bus_test.rs"]
mod tests;
