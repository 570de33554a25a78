//! AES, carry-less multiplication, SHA and arithmetic in the field of 2^8 elements, each on 128 bits.
//!
//! SDM Vol. 1 chapter 12.13 "Intel Advanced Encryption Standard Instructions" and the pages of Vol. 2; FIPS 197 and FIPS 180-4.

use super::lanes::Block;

/// The product of two elements modulo x^8 + x^4 + x^3 + x + 1, the field of AES and of GF2P8MULB.
pub const fn field_product(a: u8, b: u8) -> u8 {
    let (mut a, mut b, mut product) = (a, b, 0);
    while b != 0 {
        if b & 1 != 0 {
            product ^= a;
        }
        a = a << 1 ^ if a & 0x80 != 0 { 0x1b } else { 0 };
        b >>= 1;
    }
    product
}

/// The multiplicative inverse: the 254th power, of zero zero.
const fn field_inverse(a: u8) -> u8 {
    let (mut power, mut square, mut n) = (1, a, 254);
    while n != 0 {
        if n & 1 != 0 {
            power = field_product(power, square);
        }
        square = field_product(square, square);
        n >>= 1;
    }
    power
}

static INVERSES: [u8; 256] = {
    let mut table = [0; 256];
    let mut i = 0;
    while i < 256 {
        table[i] = field_inverse(i as u8);
        i += 1;
    }
    table
};

/// AES's S-box: FIPS 197 section 5.1.1.
static SUBSTITUTES: [u8; 256] = {
    let mut table = [0; 256];
    let mut i = 0;
    while i < 256 {
        let b = INVERSES[i];
        table[i] = b ^ b.rotate_left(1) ^ b.rotate_left(2) ^ b.rotate_left(3) ^ b.rotate_left(4) ^ 0x63;
        i += 1;
    }
    table
};

/// The inverse S-box.
static ORIGINALS: [u8; 256] = {
    let mut table = [0; 256];
    let mut i = 0;
    while i < 256 {
        table[SUBSTITUTES[i] as usize] = i as u8;
        i += 1;
    }
    table
};

/// Each byte of a column times x.
fn doubled(column: u32) -> u32 {
    (column & 0x7f7f_7f7f) << 1 ^ (column >> 7 & 0x0101_0101) * 0x1b
}

/// MixColumns (`inverse`: InvMixColumns, which is MixColumns of another sum of each two bytes that are not neighbours).
pub fn mix_columns(state: Block, inverse: bool) -> Block {
    block(words(state).map(|column| {
        let column = if inverse {
            column ^ doubled(doubled(column ^ column.rotate_right(16)))
        } else {
            column
        };
        let next = column.rotate_right(8);
        doubled(column ^ next) ^ next ^ column.rotate_right(16) ^ column.rotate_right(24)
    }))
}

/// A round of AES, the last one without MixColumns.
pub fn aes_encrypt(state: Block, key: Block, last: bool) -> Block {
    let state: Block = std::array::from_fn(|i| SUBSTITUTES[usize::from(state[(i + 4 * (i % 4)) % 16])]);
    xor(if last { state } else { mix_columns(state, false) }, key)
}

/// A round of the equivalent inverse cipher.
pub fn aes_decrypt(state: Block, key: Block, last: bool) -> Block {
    let state: Block = std::array::from_fn(|i| ORIGINALS[usize::from(state[(i + 16 - 4 * (i % 4)) % 16])]);
    xor(if last { state } else { mix_columns(state, true) }, key)
}

/// AESKEYGENASSIST.
pub fn aes_key(source: Block, constant: u8) -> Block {
    let words = words(source);
    let substitute = |word: u32| u32::from_le_bytes(word.to_le_bytes().map(|b| SUBSTITUTES[usize::from(b)]));
    let (x1, x3) = (substitute(words[1]), substitute(words[3]));
    let constant = u32::from(constant);
    block([x1, x1.rotate_right(8) ^ constant, x3, x3.rotate_right(8) ^ constant])
}

fn xor(a: Block, b: Block) -> Block {
    std::array::from_fn(|i| a[i] ^ b[i])
}

/// The carry-less product.
pub fn carryless_product(a: u64, b: u64) -> u128 {
    (0..64)
        .filter(|k| b >> k & 1 != 0)
        .fold(0, |sum, k| sum ^ u128::from(a) << k)
}

/// GF2P8AFFINEQB, and with `inverse` GF2P8AFFINEINVQB: each byte of `x` times the matrix at its place, plus the immediate.
pub fn affine(x: Block, matrices: Block, addend: u8, inverse: bool) -> Block {
    std::array::from_fn(|i| {
        let value = if inverse { INVERSES[usize::from(x[i])] } else { x[i] };
        let row = |bit: usize| matrices[(i & 8) + 7 - bit];
        (0..8).fold(addend, |sum, bit| {
            sum ^ (((row(bit) & value).count_ones() as u8 & 1) << bit)
        })
    })
}

fn words(block: Block) -> [u32; 4] {
    std::array::from_fn(|i| u32::from_le_bytes(std::array::from_fn(|k| block[4 * i + k])))
}

fn block(words: [u32; 4]) -> Block {
    std::array::from_fn(|i| words[i / 4].to_le_bytes()[i % 4])
}

/// SHA1RNDS4. The words of a block are named from the highest down, here as in the manual.
pub fn sha1_rounds(a: Block, b: Block, function: u8) -> Block {
    let ([mut d, mut c, mut bb, mut aa], w) = (words(a), words(b));
    let mut e = 0;
    for round in 0..4 {
        let (f, k): (u32, u32) = match function & 3 {
            0 => (bb & c ^ !bb & d, 0x5a82_7999),
            1 => (bb ^ c ^ d, 0x6ed9_eba1),
            2 => (bb & c ^ bb & d ^ c & d, 0x8f1b_bcdc),
            _ => (bb ^ c ^ d, 0xca62_c1d6),
        };
        // The first word has the fifth variable added in already: by SHA1NEXTE.
        let next = f
            .wrapping_add(aa.rotate_left(5))
            .wrapping_add(w[3 - round])
            .wrapping_add(e)
            .wrapping_add(k);
        (aa, bb, c, d, e) = (next, aa, bb.rotate_left(30), c, d);
    }
    block([d, c, bb, aa])
}

/// SHA1NEXTE.
pub fn sha1_next(a: Block, b: Block) -> Block {
    let mut sum = words(b);
    sum[3] = sum[3].wrapping_add(words(a)[3].rotate_left(30));
    block(sum)
}

/// SHA1MSG1.
pub fn sha1_message1(a: Block, b: Block) -> Block {
    let (a, b) = (words(a), words(b));
    block([b[2] ^ a[0], b[3] ^ a[1], a[0] ^ a[2], a[1] ^ a[3]])
}

/// SHA1MSG2.
pub fn sha1_message2(a: Block, b: Block) -> Block {
    let (a, b) = (words(a), words(b));
    let w16 = (a[3] ^ b[2]).rotate_left(1);
    let w17 = (a[2] ^ b[1]).rotate_left(1);
    let w18 = (a[1] ^ b[0]).rotate_left(1);
    block([(a[0] ^ w16).rotate_left(1), w18, w17, w16])
}

/// SHA256RNDS2.
pub fn sha256_rounds(a: Block, b: Block, keys: Block) -> Block {
    let ([mut h, mut g, mut d, mut c], [mut f, mut e, mut bb, mut aa]) = (words(a), words(b));
    for key in &words(keys)[..2] {
        let choice = e & f ^ !e & g;
        let majority = aa & bb ^ aa & c ^ bb & c;
        let s1 = e.rotate_right(6) ^ e.rotate_right(11) ^ e.rotate_right(25);
        let s0 = aa.rotate_right(2) ^ aa.rotate_right(13) ^ aa.rotate_right(22);
        let t = h.wrapping_add(s1).wrapping_add(choice).wrapping_add(*key);
        (h, g, f, e) = (g, f, e, d.wrapping_add(t));
        (d, c, bb, aa) = (c, bb, aa, t.wrapping_add(s0).wrapping_add(majority));
    }
    block([f, e, bb, aa])
}

/// SHA256MSG1.
pub fn sha256_message1(a: Block, b: Block) -> Block {
    let (a, b) = (words(a), words(b));
    let s0 = |w: u32| w.rotate_right(7) ^ w.rotate_right(18) ^ w >> 3;
    let next = [a[1], a[2], a[3], b[0]];
    block(std::array::from_fn(|i| a[i].wrapping_add(s0(next[i]))))
}

/// SHA256MSG2.
pub fn sha256_message2(a: Block, b: Block) -> Block {
    let (a, b) = (words(a), words(b));
    let s1 = |w: u32| w.rotate_right(17) ^ w.rotate_right(19) ^ w >> 10;
    let w16 = a[0].wrapping_add(s1(b[2]));
    let w17 = a[1].wrapping_add(s1(b[3]));
    block([w16, w17, a[2].wrapping_add(s1(w16)), a[3].wrapping_add(s1(w17))])
}

#[cfg(test)]
#[path = "crypto_test.rs"]
mod tests;
