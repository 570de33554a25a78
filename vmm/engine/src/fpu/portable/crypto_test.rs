use super::*;

fn hex(text: &str) -> Vec<u8> {
    let digits: Vec<u32> = text.chars().filter_map(|c| c.to_digit(16)).collect();
    digits.chunks(2).map(|pair| (pair[0] * 16 + pair[1]) as u8).collect()
}

fn bytes(text: &str) -> Block {
    hex(text).try_into().unwrap()
}

/// FIPS 197 appendix B "Cipher Example", with the key schedule of appendix A.1.
#[test]
fn aes_enciphers_and_deciphers_the_example_of_fips_197() {
    let mut keys = vec![bytes("2b7e151628aed2a6abf7158809cf4f3c")];
    for constant in [1, 2, 4, 8, 0x10, 0x20, 0x40, 0x80, 0x1b, 0x36] {
        let last = keys[keys.len() - 1];
        let assist = words(aes_key(last, constant))[3];
        let mut next = words(last);
        next[0] ^= assist;
        for i in 1..4 {
            next[i] ^= next[i - 1];
        }
        keys.push(block(next));
    }
    assert_eq!(keys[10], bytes("d014f9a8c9ee2589e13f0cc8b6630ca6"));
    let plain = bytes("3243f6a8885a308d313198a2e0370734");
    let mut state = xor(plain, keys[0]);
    for key in &keys[1..10] {
        state = aes_encrypt(state, *key, false);
    }
    state = aes_encrypt(state, keys[10], true);
    assert_eq!(state, bytes("3925841d02dc09fbdc118597196a0b32"));
    let mut state = xor(state, keys[10]);
    for key in keys[1..10].iter().rev() {
        state = aes_decrypt(state, mix_columns(*key, true), false);
    }
    assert_eq!(aes_decrypt(state, keys[0], true), plain);
}

/// The one block of "abc" in FIPS 180-4's padding, as words.
fn abc() -> [u32; 16] {
    let mut words = [0; 16];
    words[0] = 0x6162_6380;
    words[15] = 24;
    words
}

/// "abc" by the instructions as SDM Vol. 1 has them used: the words of a block from the highest down in SHA-1.
#[test]
fn sha1_of_abc() {
    let message = abc();
    let mut w: Vec<Block> = (0..4)
        .map(|i| block(std::array::from_fn(|k| message[4 * i + 3 - k])))
        .collect();
    for i in 4..20 {
        let first = sha1_message1(w[i - 4], w[i - 3]);
        w.push(sha1_message2(xor(first, w[i - 2]), w[i - 1]));
    }
    let initial = [0x6745_2301, 0xefcd_ab89, 0x98ba_dcfe, 0x1032_5476, 0xc3d2_e1f0u32];
    let mut state = block([initial[3], initial[2], initial[1], initial[0]]);
    // E enters the first words as it is, those that follow by SHA1NEXTE of the state before.
    let mut with_e = block({
        let mut first = words(w[0]);
        first[3] = first[3].wrapping_add(initial[4]);
        first
    });
    let mut last = state;
    for i in 0..20 {
        last = state;
        state = sha1_rounds(state, with_e, (i / 5) as u8);
        if i < 19 {
            with_e = sha1_next(last, w[i + 1]);
        }
    }
    let e = words(last)[3].rotate_left(30);
    let [d, c, b, a] = words(state);
    let digest: Vec<u32> = [a, b, c, d, e]
        .iter()
        .zip(initial)
        .map(|(x, y)| x.wrapping_add(y))
        .collect();
    assert_eq!(
        digest,
        [0xa999_3e36, 0x4706_816a, 0xba3e_2571, 0x7850_c26c, 0x9cd0_d89d]
    );
}

/// FIPS 180-4 4.2.2: the first 32 bits of the fractional parts of the cube roots of the first 64 primes.
fn sha256_constants() -> Vec<u32> {
    let prime = |n: &u64| (2..*n).all(|d| !n.is_multiple_of(d));
    let root = |n: u64| {
        let (mut low, mut high) = (0u128, 1u128 << 40);
        while low + 1 < high {
            let middle = (low + high) / 2;
            if middle * middle * middle <= u128::from(n) << 96 {
                low = middle;
            } else {
                high = middle;
            }
        }
        low as u32
    };
    (2..).filter(prime).take(64).map(root).collect()
}

#[test]
fn sha256_of_abc() {
    let message = abc();
    let mut w: Vec<Block> = (0..4)
        .map(|i| block(std::array::from_fn(|k| message[4 * i + k])))
        .collect();
    for i in 4..16 {
        let first = words(sha256_message1(w[i - 4], w[i - 3]));
        // Words 9 to 12 after the first: W[t - 7].
        let (late, latest) = (words(w[i - 2]), words(w[i - 1]));
        let seven = [late[1], late[2], late[3], latest[0]];
        let sum = block(std::array::from_fn(|k| first[k].wrapping_add(seven[k])));
        w.push(sha256_message2(sum, w[i - 1]));
    }
    let constants = sha256_constants();
    let initial = [
        0x6a09_e667,
        0xbb67_ae85,
        0x3c6e_f372,
        0xa54f_f53a,
        0x510e_527f,
        0x9b05_688c,
        0x1f83_d9ab,
        0x5be0_cd19u32,
    ];
    let [a, b, c, d, e, f, g, h] = initial;
    let (mut abef, mut cdgh) = (block([f, e, b, a]), block([h, g, d, c]));
    for i in 0..16 {
        let keys: [u32; 4] = std::array::from_fn(|k| words(w[i])[k].wrapping_add(constants[4 * i + k]));
        for half in 0..2 {
            let next = sha256_rounds(cdgh, abef, block([keys[2 * half], keys[2 * half + 1], 0, 0]));
            cdgh = abef;
            abef = next;
        }
    }
    let ([f, e, b, a], [h, g, d, c]) = (words(abef), words(cdgh));
    let digest: Vec<u32> = [a, b, c, d, e, f, g, h]
        .iter()
        .zip(initial)
        .map(|(x, y)| x.wrapping_add(y))
        .collect();
    assert_eq!(
        digest,
        [
            0xba78_16bf,
            0x8f01_cfea,
            0x4141_40de,
            0x5dae_2223,
            0xb003_61a3,
            0x9617_7a9c,
            0xb410_ff61,
            0xf200_15ad
        ]
    );
}

#[test]
fn field_arithmetic() {
    // FIPS 197 section 4.2: {57} times {83} is {c1}.
    assert_eq!(field_product(0x57, 0x83), 0xc1);
    for a in 1..=255 {
        assert_eq!(field_product(a, INVERSES[usize::from(a)]), 1);
    }
    // The identity matrix of GF2P8AFFINEQB has its rows from the highest byte down.
    let identity = 0x0102_0408_1020_4080_u64.to_le_bytes();
    let both: Block = std::array::from_fn(|i| identity[i % 8]);
    let x: Block = std::array::from_fn(|i| 17 * i as u8);
    assert_eq!(affine(x, both, 0, false), x);
    assert_eq!(affine(x, both, 0xff, false), x.map(|b| !b));
    assert_eq!(affine(x, both, 0, true), x.map(|b| INVERSES[usize::from(b)]));
    // 3 squared, without carries.
    assert_eq!(carryless_product(3, 3), 5);
    assert_eq!(carryless_product(u64::MAX, 1 << 63), u128::from(u64::MAX) << 63);
}
