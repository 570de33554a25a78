use core::fmt;

/// Taken/not-taken bits, as a TNT packet carries them. SDM Vol. 3C 33.4.2.1 "Taken/Not-taken (TNT) Packet".
///
/// The highest set bit is the stop bit; below it the oldest branch comes first and the youngest is bit 0.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Tnt(u64);

impl Tnt {
    /// No branch.
    pub const EMPTY: Tnt = Tnt(1);
    /// How many branches a short packet holds.
    pub const SHORT: u32 = 6;
    /// How many branches a long packet holds.
    pub const LONG: u32 = 47;

    /// From bits with their stop bit; `None` without one, or with more than a long packet holds.
    pub const fn from_bits(bits: u64) -> Option<Tnt> {
        if bits == 0 || bits >> (Tnt::LONG + 1) != 0 {
            None
        } else {
            Some(Tnt(bits))
        }
    }

    /// The bits below their stop bit.
    #[inline]
    pub const fn bits(self) -> u64 {
        self.0
    }

    /// How many branches there are.
    #[inline]
    pub const fn len(self) -> u32 {
        // A stop bit is always there: `| 1` only tells the compiler so.
        63 - (self.0 | 1).leading_zeros()
    }

    /// Whether there is none.
    #[inline]
    pub const fn is_empty(self) -> bool {
        self.0 == 1
    }

    /// Whether a short packet can hold no more.
    #[inline]
    pub const fn fills_short(self) -> bool {
        self.0 >= 1 << Tnt::SHORT
    }

    /// Whether a long packet can hold no more.
    #[inline]
    pub const fn fills_long(self) -> bool {
        self.0 >= 1 << Tnt::LONG
    }

    /// Appends a branch. What is full ([`Tnt::fills_short`], [`Tnt::fills_long`]) must be sent before the next one: from the
    /// 48th on the oldest are lost.
    #[inline]
    pub const fn push(&mut self, taken: bool) {
        let bits = self.0 << 1 | taken as u64;
        self.0 = if bits >> (Tnt::LONG + 1) == 0 {
            bits
        } else {
            bits & ((1 << Tnt::LONG) - 1) | 1 << Tnt::LONG
        };
    }

    /// The branches, oldest first.
    pub fn iter(self) -> impl ExactSizeIterator<Item = bool> {
        (0..self.len()).rev().map(move |bit| self.0 >> bit & 1 != 0)
    }
}

impl Default for Tnt {
    fn default() -> Tnt {
        Tnt::EMPTY
    }
}

impl fmt::Debug for Tnt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl fmt::Display for Tnt {
    /// `T` and `N`, oldest first.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.iter()
            .try_for_each(|taken| f.write_str(if taken { "T" } else { "N" }))
    }
}
