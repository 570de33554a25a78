//! Vectors as lanes, and the shapes that rows of the tables are made of.

/// A vector register's worth of bytes, the lowest first; what an operand is shorter is zero.
#[repr(C, align(64))]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Vector(pub [u8; Vector::BYTES]);

impl Vector {
    /// The longest there is.
    pub const BYTES: usize = 64;
    /// All zeros.
    pub const ZERO: Vector = Vector([0; Vector::BYTES]);

    /// From its lowest 128 bits.
    pub fn from_u128(low: u128) -> Vector {
        let mut v = Vector::ZERO;
        v.set_block(0, low.to_le_bytes());
        v
    }

    /// From its lowest 64 bits.
    pub fn from_u64(low: u64) -> Vector {
        Vector::from_u128(low.into())
    }

    /// Lane `i`.
    #[inline(always)]
    pub fn get<T: Lane>(&self, i: usize) -> T {
        T::read(&self.0[i * T::BYTES..])
    }

    /// Replaces lane `i`.
    #[inline(always)]
    pub fn set<T: Lane>(&mut self, i: usize, value: T) {
        value.write(&mut self.0[i * T::BYTES..]);
    }

    /// Bits 128 i + 127 to 128 i.
    #[inline(always)]
    pub fn block(&self, i: usize) -> Block {
        std::array::from_fn(|k| self.0[16 * i + k])
    }

    /// Replaces them.
    #[inline(always)]
    pub fn set_block(&mut self, i: usize, block: Block) {
        self.0[16 * i..16 * i + 16].copy_from_slice(&block);
    }

    /// The same as a number.
    pub fn u128(&self, i: usize) -> u128 {
        u128::from_le_bytes(self.block(i))
    }

    /// The lanes of all `bytes`, from a function of their numbers.
    #[inline(always)]
    pub fn from_lanes<T: Lane>(bytes: usize, f: impl Fn(usize) -> T) -> Vector {
        let mut out = Vector::ZERO;
        for i in 0..bytes / T::BYTES {
            out.set(i, f(i));
        }
        out
    }
}

/// 128 bits, of which most instructions work on each alike.
pub type Block = [u8; 16];

/// An element of a vector.
pub trait Lane: Copy + Default + 'static {
    /// Its length.
    const BYTES: usize;
    /// A block of it.
    type Lanes: AsRef<[Self]> + AsMut<[Self]> + Copy;
    /// From the first bytes.
    fn read(bytes: &[u8]) -> Self;
    /// To the first bytes.
    fn write(self, bytes: &mut [u8]);
    /// A block as lanes.
    fn split(block: Block) -> Self::Lanes;
    /// Lanes as a block.
    fn join(lanes: Self::Lanes) -> Block;
}

macro_rules! lane {
    ($($t:ty)+) => { $(
        impl Lane for $t {
            const BYTES: usize = size_of::<$t>();
            type Lanes = [$t; 16 / size_of::<$t>()];

            #[inline(always)]
            fn read(bytes: &[u8]) -> $t {
                let mut own = [0; size_of::<$t>()];
                own.copy_from_slice(&bytes[..size_of::<$t>()]);
                <$t>::from_le_bytes(own)
            }

            #[inline(always)]
            fn write(self, bytes: &mut [u8]) {
                bytes[..size_of::<$t>()].copy_from_slice(&self.to_le_bytes());
            }

            #[inline(always)]
            fn split(block: Block) -> Self::Lanes {
                const BYTES: usize = size_of::<$t>();
                std::array::from_fn(|i| <$t>::from_le_bytes(std::array::from_fn(|k| block[i * BYTES + k])))
            }

            #[inline(always)]
            fn join(lanes: Self::Lanes) -> Block {
                let mut block = [0; 16];
                for (part, lane) in block.chunks_exact_mut(size_of::<$t>()).zip(lanes) {
                    part.copy_from_slice(&lane.to_le_bytes());
                }
                block
            }
        }
    )+ };
}

lane! { u8 i8 u16 i16 u32 i32 u64 i64 u128 }

/// What an instruction is given.
#[derive(Clone, Copy, Debug)]
pub struct Inputs<'a> {
    /// The first source: of legacy encodings the destination.
    pub a: &'a Vector,
    /// The last but for `c`.
    pub b: &'a Vector,
    /// The third source: the mask of a variable blend, the third factor or addend of FMA.
    pub c: &'a Vector,
    /// The immediate.
    pub imm: u8,
    /// Whether there is one.
    pub immediate: bool,
    /// The length of the vectors: 8 of MMX, else 16, 32 or 64.
    pub bytes: usize,
    /// The length of the last source, where it is memory or a general register.
    pub source: usize,
    /// The length of a destination that is a general register.
    pub destination: usize,
    /// The last source is memory.
    pub from_memory: bool,
    /// The destination is memory.
    pub to_memory: bool,
    /// The row's parameter.
    pub param: u8,
    /// The writemask: a bit for each lane of the result that is to be computed. Others raise no exception.
    pub mask: u64,
}

impl Inputs<'_> {
    /// Whether lane `k` of the result is to be computed.
    #[inline(always)]
    pub fn chosen(&self, k: usize) -> bool {
        self.mask >> (k & 63) & 1 != 0
    }

    /// How many bytes one part of the vector has on which the instruction works by itself: 128 bits, of MMX 64.
    pub fn part(&self) -> usize {
        self.bytes.min(16)
    }

    /// From a function of parts: those of `a` and `b`, and the one of the result.
    #[inline(always)]
    fn parts(&self, f: impl Fn(&[u8], &[u8], &mut [u8])) -> Vector {
        let (mut out, part) = (Vector::ZERO, self.part());
        for at in (0..self.bytes.min(Vector::BYTES)).step_by(part) {
            let range = at..at + part;
            f(&self.a.0[range.clone()], &self.b.0[range.clone()], &mut out.0[range]);
        }
        out
    }
}

/// Each lane of `b`.
#[inline(always)]
pub fn unary<T: Lane>(i: &Inputs, f: impl Fn(T) -> T) -> Vector {
    let mut out = Vector::ZERO;
    for block in 0..i.bytes.div_ceil(16) {
        let mut lanes = T::split(i.b.block(block));
        for lane in lanes.as_mut() {
            *lane = f(*lane);
        }
        out.set_block(block, T::join(lanes));
    }
    out
}

/// Each lane of `a` with its counterpart of `b`.
#[inline(always)]
pub fn binary<T: Lane>(i: &Inputs, f: impl Fn(T, T) -> T) -> Vector {
    let mut out = Vector::ZERO;
    for block in 0..i.bytes.div_ceil(16) {
        let (mut lanes, others) = (T::split(i.a.block(block)), T::split(i.b.block(block)));
        for (lane, &other) in lanes.as_mut().iter_mut().zip(others.as_ref()) {
            *lane = f(*lane, other);
        }
        out.set_block(block, T::join(lanes));
    }
    out
}

/// Each lane shifted by the same count: the immediate, or the low 64 bits of `b`. A count that is too large for the lane is its size.
#[inline(always)]
pub fn shift<T: Lane>(i: &Inputs, f: impl Fn(T, u32) -> T) -> Vector {
    let count = if i.immediate {
        u64::from(i.imm)
    } else {
        i.b.get::<u64>(0)
    };
    let count = count.min(8 * T::BYTES as u64) as u32;
    let inputs = Inputs { b: i.a, ..*i };
    unary::<T>(&inputs, |lane| f(lane, count))
}

/// Each lane by a count of its own.
#[inline(always)]
pub fn shift_each<T: Lane>(i: &Inputs, f: impl Fn(T, u32) -> T) -> Vector {
    Vector::from_lanes::<T>(i.bytes, |k| {
        let count = match T::BYTES {
            2 => i.b.get::<u16>(k).into(),
            4 => i.b.get::<u32>(k).into(),
            _ => i.b.get::<u64>(k),
        };
        f(i.a.get(k), count.min(8 * T::BYTES as u64) as u32)
    })
}

/// Two lanes next to each other become one of twice their width.
#[inline(always)]
pub fn pairs<S: Lane, R: Lane, D: Lane>(i: &Inputs, f: impl Fn([S; 2], [R; 2]) -> D) -> Vector {
    Vector::from_lanes::<D>(i.bytes, |k| {
        let (m, n) = (2 * k, 2 * k + 1);
        f([i.a.get(m), i.a.get(n)], [i.b.get(m), i.b.get(n)])
    })
}

/// Of each part the pairs of `a`, then those of `b`.
#[inline(always)]
pub fn horizontal<T: Lane>(i: &Inputs, mut f: impl FnMut(T, T) -> T) -> Vector {
    let (mut out, part) = (Vector::ZERO, i.part() / T::BYTES);
    for at in (0..i.bytes / T::BYTES).step_by(part) {
        for k in 0..part / 2 {
            let pair = |v: &Vector| (v.get::<T>(at + 2 * k), v.get::<T>(at + 2 * k + 1));
            let ((a, b), (c, d)) = (pair(i.a), pair(i.b));
            out.set(at + k, f(a, b));
            out.set(at + part / 2 + k, f(c, d));
        }
    }
    out
}

/// Lanes of `a`, then of `b`, made half as wide.
#[inline(always)]
pub fn pack<S: Lane, D: Lane>(i: &Inputs, f: impl Fn(S) -> D) -> Vector {
    i.parts(|a, b, out| {
        let half = a.len() / S::BYTES;
        for k in 0..half {
            f(S::read(&a[k * S::BYTES..])).write(&mut out[k * D::BYTES..]);
            f(S::read(&b[k * S::BYTES..])).write(&mut out[(half + k) * D::BYTES..]);
        }
    })
}

/// Lanes of the lower (`param` 0) or the upper halves of `a` and `b` in turn.
#[inline(always)]
pub fn interleave<T: Lane>(i: &Inputs) -> Vector {
    let upper = usize::from(i.param);
    i.parts(|a, b, out| {
        let half = a.len() / 2;
        for k in 0..half / T::BYTES {
            let at = upper * half + k * T::BYTES;
            T::read(&a[at..]).write(&mut out[2 * k * T::BYTES..]);
            T::read(&b[at..]).write(&mut out[(2 * k + 1) * T::BYTES..]);
        }
    })
}

/// The lanes of `b` as wider ones.
#[inline(always)]
pub fn widen<S: Lane, D: Lane>(i: &Inputs, f: impl Fn(S) -> D) -> Vector {
    Vector::from_lanes(i.bytes, |k| f(i.b.get(k)))
}

/// Each lane of `a`, or of `b` where a function of its number says so.
#[inline(always)]
pub fn choose<T: Lane>(i: &Inputs, second: impl Fn(usize) -> bool) -> Vector {
    Vector::from_lanes::<T>(i.bytes, |k| if second(k) { i.b.get(k) } else { i.a.get(k) })
}

/// Each part of `b` by offsets in it.
#[inline(always)]
pub fn rearrange<T: Lane>(i: &Inputs, from: impl Fn(usize) -> usize) -> Vector {
    let lanes = i.part() / T::BYTES;
    Vector::from_lanes::<T>(i.bytes, |k| i.b.get(k / lanes * lanes + from(k % lanes)))
}
