use super::*;

const VALUES: &[u64] = &[
    0,
    1,
    2,
    0xf,
    0x10,
    0x7f,
    0x80,
    0xff,
    0x100,
    0x7fff,
    0x8000,
    0xffff,
    0x7fff_ffff,
    0x8000_0000,
    0xffff_ffff,
    0x7fff_ffff_ffff_ffff,
    0x8000_0000_0000_0000,
    u64::MAX,
    0x0123_4567_89ab_cdef,
    0xfedc_ba98_7654_3210,
];

fn compare<const O: u8, const S: u8>() {
    let mask = u64::MAX >> (64 - 8 * S as u32);
    for &a in VALUES {
        for &b in VALUES {
            for nf in [0, CF] {
                let (host, host_flags) = alu::<O, S>(a, b, nf);
                let (r, flags) = alu_portable::<O, S>(a, b, nf);
                if !matches!(O, CMP | TEST) {
                    assert_eq!(host & mask, r, "op {O} size {S} {a:x} {b:x} {nf:x}");
                }
                assert_eq!(host_flags & ALL, flags, "flags of op {O} size {S} {a:x} {b:x} {nf:x}");
            }
        }
    }
}

// covers: cpu/int-flags
#[test]
fn the_host_alu_and_the_portable_one_agree() {
    macro_rules! all { ($($o:ident)*) => { $( compare::<$o, 1>(); compare::<$o, 2>(); compare::<$o, 4>(); compare::<$o, 8>(); )* } }
    all!(ADD OR ADC SBB AND SUB XOR CMP TEST INC DEC NEG);
}

#[test]
fn conversion_to_rflags_and_back_keeps_every_arithmetic_bit() {
    for bits in 0..64u64 {
        let rflags = (0..6)
            .filter(|i| bits >> i & 1 != 0)
            .map(|i| [1u64, 4, 0x10, 0x40, 0x80, 0x800][i])
            .sum::<u64>();
        assert_eq!(to_rflags(from_rflags(rflags)), rflags);
    }
}
