//! Deterministic randomness with a taste for edges.

/// SplitMix64.
#[derive(Clone, Debug)]
pub struct Rng(u64);

impl Rng {
    /// The sequence that belongs to `seed`.
    pub fn new(seed: u64) -> Rng {
        Rng(seed)
    }

    /// Any 64 bits.
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// 0 to `n` - 1.
    pub fn below(&mut self, n: u64) -> u64 {
        self.next() % n
    }

    /// True `percent` times in a hundred.
    pub fn percent(&mut self, percent: u64) -> bool {
        self.below(100) < percent
    }

    /// One of them.
    pub fn pick<T: Copy>(&mut self, of: &[T]) -> T {
        of[self.below(of.len() as u64) as usize]
    }

    /// An integer that is an edge of some width as often as not.
    pub fn value(&mut self) -> u64 {
        let small = self.below(40).wrapping_sub(20);
        match self.below(12) {
            0 => self.pick(&[0, 1, u64::MAX, 2]),
            1 => small,
            2 => 1_u64 << self.below(64),
            3 => (1_u64 << self.below(64)).wrapping_sub(1),
            4 => !(1_u64 << self.below(64)),
            5 => self.pick(&[
                0x7f,
                0x80,
                0xff,
                0x7fff,
                0x8000,
                0xffff,
                0x7fff_ffff,
                0x8000_0000,
                0xffff_ffff,
            ]),
            6 => self.pick(&[
                i64::MIN as u64,
                i64::MAX as u64,
                i32::MIN as i64 as u64,
                i16::MIN as i64 as u64,
            ]),
            7 => u64::from(self.next() as u32),
            8 => u64::from(self.next() as u8) * 0x0101_0101_0101_0101,
            _ => self.next(),
        }
    }

    /// A single-precision pattern: zeros, denormals, ones, integers, infinities and NaNs as often as anything.
    pub fn f32(&mut self) -> u32 {
        let sign = (self.next() as u32) & 0x8000_0000;
        sign | match self.below(14) {
            0 => 0,
            1 => 0x3f80_0000,
            2 => 0x7f80_0000,
            3 => 0x7fc0_0000 | self.next() as u32 & 0x3f_ffff,
            4 => 0x7f80_0001 | self.next() as u32 & 0x3f_ffff,
            5 => self.next() as u32 & 0x7f_ffff,
            6 => self.pick(&[
                1,
                0x7f_ffff,
                0x80_0000,
                0x7f7f_ffff,
                0x3fff_ffff,
                0x4b00_0000,
                0x4f00_0000,
                0x5f00_0000,
            ]),
            7 | 8 => ((self.below(4000) as f32) / self.pick(&[1.0, 2.0, 4.0, 3.0])).to_bits(),
            9 => 0x3f00_0000 + (self.next() as u32 & 0x1ff_ffff),
            _ => self.next() as u32 & 0x7fff_ffff,
        }
    }

    /// A double-precision pattern.
    pub fn f64(&mut self) -> u64 {
        let sign = self.next() & 1 << 63;
        sign | match self.below(14) {
            0 => 0,
            1 => 1.0_f64.to_bits(),
            2 => f64::INFINITY.to_bits(),
            3 => 0x7ff8 << 48 | self.next() >> 13,
            4 => 0x7ff0 << 48 | self.next() >> 14 | 1,
            5 => self.next() >> 12,
            6 => self.pick(&[
                1,
                (1 << 52) - 1,
                1 << 52,
                f64::MAX.to_bits(),
                0x43e0 << 48,
                0x41e0 << 48,
                0x47ef_ffff_ffff_ffff,
            ]),
            7 | 8 => ((self.below(4000) as f64) / self.pick(&[1.0, 2.0, 4.0, 3.0])).to_bits(),
            9 => 0x3fe0_0000_0000_0000 + (self.next() >> 9),
            // PebsInputs the ends of what a single can hold.
            10 => (self.pick(&[0x380_u64, 0x369, 0x47e, 0x36a]) << 52) + (self.next() >> 11),
            _ => self.next() >> 1,
        }
    }

    /// A double-extended pattern: also unnormals, pseudo-denormals and pseudo-infinities.
    pub fn f80(&mut self) -> (u64, u16) {
        let sign = (self.next() as u16) & 0x8000;
        let integer = 1_u64 << 63;
        let (significand, exponent) = match self.below(18) {
            0 => (0, 0),
            1 => (integer, 0x3fff),
            2 => (integer, 0x7fff),
            3 => (integer | 1 << 62 | self.next() >> 2, 0x7fff),
            4 => (integer | self.next() >> 2 | 1, 0x7fff),
            5 => (self.next() >> 1, 0),
            6 => (self.next() | integer, 0),
            7 => (self.next() >> 1, self.next() as u16 & 0x7fff),
            8 => (self.next() >> 1, 0x7fff),
            9 => self.pick(&[
                (1, 0),
                (u64::MAX, 0x7ffe),
                (integer, 1),
                (u64::MAX, 0x3ffe),
                (integer, 0x403e),
                (integer, 0x401e),
            ]),
            10 | 11 => {
                // An integer, or an integer and a half.
                let n = self.below(70_000) + 1;
                let shift = n.leading_zeros();
                (n << shift, 0x3fff + 63 - shift as u16 - self.below(3) as u16)
            }
            12 => (self.next() | integer, 0x3ff8 + self.below(16) as u16),
            13 => (
                self.next() | integer,
                self.pick(&[0x3c01_u16, 0x43ff, 0x3f81, 0x407f, 0x3f6a, 0x3bcd]) + self.below(4) as u16,
            ),
            14 => (self.next() | integer, 0x3fff + self.below(70) as u16),
            _ => (self.next() | integer, self.next() as u16 & 0x7fff),
        };
        (significand, sign | exponent.min(0x7fff))
    }

    /// A vector register's worth of one kind of element.
    pub fn vector(&mut self) -> u128 {
        let mut bytes = [0; 16];
        self.fill(&mut bytes);
        u128::from_le_bytes(bytes)
    }

    /// Fills memory with elements of one kind.
    pub fn fill(&mut self, bytes: &mut [u8]) {
        let kind = self.below(9);
        let letters = self.next();
        for chunk in bytes.chunks_mut(8) {
            let word = match kind {
                0 | 1 => u64::from(self.f32()) | u64::from(self.f32()) << 32,
                2 | 3 => self.f64(),
                4 => self.value(),
                5 => self.value() as u32 as u64 | self.value() << 32,
                6 => {
                    // Text in an alphabet of four, for string compares.
                    let mut word = 0;
                    for i in 0..8 {
                        word |= u64::from((letters >> (8 * self.below(4))) as u8) << (8 * i);
                    }
                    if self.percent(30) {
                        word & !(0xff << (8 * self.below(8)))
                    } else {
                        word
                    }
                }
                7 => u64::from(letters as u8) * 0x0101_0101_0101_0101,
                _ => self.next(),
            };
            chunk.copy_from_slice(&word.to_le_bytes()[..chunk.len()]);
        }
    }
}
