use super::*;

/// A state in which every field differs from its neighbour and from its initial value.
fn busy() -> FpuState {
    let mut s = FpuState::new();
    for i in 0..16 {
        s.xmm[i] = 0x1111_2222_3333_4444_5555_6666_7777_0000 + i as u128;
        s.ymm_hi[i] = 0x9999_0000_0000_0000_0000_0000_0000_0100 + i as u128;
    }
    for i in 0..8 {
        s.r[i] = 0x4000_c000_0000_0000_0000 + i as u128;
    }
    s.r[3] = 0;
    s.r[4] = 0x7fff_8000_0000_0000_0000;
    s.fip = 0x1234_5678_9abc;
    s.fdp = 0x4321_8765_cba9;
    s.mxcsr = 0x7fa1;
    s.cw = 0x077f;
    s.sw = 0x2841;
    s.fop = 0x5ab;
    s.fcs = 0x33;
    s.fds = 0x2b;
    s.tag = 0b1011_1101;
    s
}

// covers: cpu/fxsave
#[test]
fn fxsave_and_fxrstor_are_inverse() {
    for (long, rex_w) in [(true, true), (true, false), (false, false)] {
        let s = busy();
        let image = s.fxsave(long, rex_w);
        let mut back = FpuState::new();
        back.ymm_hi = s.ymm_hi;
        back.fxrstor(&image, long, rex_w).unwrap();
        let mut expected = s.clone();
        if rex_w {
            (expected.fcs, expected.fds) = (0, 0);
        } else {
            expected.fip &= 0xffff_ffff;
            expected.fdp &= 0xffff_ffff;
        }
        if !long {
            expected.xmm[8..].fill(0);
        }
        assert_eq!(back, expected, "long {long} rex_w {rex_w}");
    }
}

// covers: cpu/fxsave
#[test]
fn fxsave_has_the_manuals_layout() {
    let s = busy();
    let image = s.fxsave(true, false);
    for (at, bytes, what) in [
        (0, &[0x7f, 0x07][..], "FCW"),
        (2, &[0x41, 0x28], "FSW"),
        (4, &[0b1011_1101, 0], "abridged FTW, reserved"),
        (6, &[0xab, 0x05], "FOP"),
        (8, &[0xbc, 0x9a, 0x78, 0x56], "FIP"),
        (12, &[0x33, 0, 0, 0], "FCS"),
        (16, &[0xa9, 0xcb, 0x65, 0x87], "FDP"),
        (20, &[0x2b, 0, 0, 0], "FDS"),
        (24, &[0xa1, 0x7f, 0, 0], "MXCSR"),
        (28, &[0xff, 0xff, 0, 0], "MXCSR_MASK"),
        (
            32,
            &[5, 0, 0, 0, 0, 0, 0, 0xc0, 0, 0x40, 0, 0, 0, 0, 0, 0],
            "ST0 is R5, TOP being 5",
        ),
        (176, &[1, 0, 0x77, 0x77], "XMM1"),
    ] {
        assert_eq!(&image[at..at + bytes.len()], bytes, "{what}");
    }
    let wide = s.fxsave(true, true);
    assert_eq!(
        wide[8..24],
        [
            0xbc, 0x9a, 0x78, 0x56, 0x34, 0x12, 0, 0, 0xa9, 0xcb, 0x65, 0x87, 0x21, 0x43, 0, 0
        ]
    );
}

// covers: cpu/fxsave
#[test]
fn fxrstor_refuses_reserved_mxcsr_bits_and_loads_nothing() {
    let mut image = busy().fxsave(true, true);
    image[26] = 1;
    let mut s = FpuState::new();
    assert_eq!(s.fxrstor(&image, true, true), Err(BadImage));
    assert_eq!(s, FpuState::new());
}

// covers: cpu/x87
#[test]
fn tags_follow_from_contents() {
    let mut s = busy();
    s.r[7] = 1;
    s.r[5] = 0x4000_4000_0000_0000_0000;
    // R7 denormal: special; R6 empty; R5 unnormal: special; R4 infinity: special; R3 zero; R2 valid; R1 empty; R0 valid.
    assert_eq!(s.full_tags(), 0b10_11_10_10_01_00_11_00);
}

// covers: cpu/x87
#[test]
fn environments_have_four_layouts() {
    let word = |image: &[u8], i: usize, wide: bool| {
        if wide {
            u32::from_le_bytes([image[4 * i], image[4 * i + 1], image[4 * i + 2], image[4 * i + 3]])
        } else {
            u16::from_le_bytes([image[2 * i], image[2 * i + 1]]) as u32
        }
    };
    let tw = busy().full_tags() as u32;
    let (ip, dp) = (0x5678_9abcu32 + 0x330, 0x8765_cba9u32 + 0x2b0);
    for (wide, real, expected) in [
        (
            true,
            false,
            [
                0xffff_077f,
                0xffff_2841,
                0xffff_0000 | tw,
                0x5678_9abc,
                0x05ab_0033,
                0x8765_cba9,
                0xffff_002b,
            ],
        ),
        (false, false, [0x77f, 0x2841, tw, 0x9abc, 0x33, 0xcba9, 0x2b]),
        (
            true,
            true,
            [
                0xffff_077f,
                0xffff_2841,
                0xffff_0000 | tw,
                0xffff_0000 | ip,
                ip >> 16 << 12 | 0x5ab,
                0xffff_0000 | dp,
                dp >> 16 << 12,
            ],
        ),
        (
            false,
            true,
            [
                0x77f,
                0x2841,
                tw,
                ip & 0xffff,
                (ip >> 4 & 0xf000) | 0x5ab,
                dp & 0xffff,
                dp >> 4 & 0xf000,
            ],
        ),
    ] {
        let mut s = busy();
        let format = EnvironmentFormat { wide, real };
        let image = s.fnstenv(format);
        for (i, &value) in expected.iter().enumerate() {
            assert_eq!(word(&image, i, wide), value, "wide {wide} real {real} word {i}");
        }
        assert_eq!(s.cw, 0x77f, "FSTENV masks all exceptions");
        let mut back = FpuState::new();
        back.fldenv(&image, format);
        assert_eq!((back.cw, back.sw, back.tag), (0x77f, 0x2841, s.tag));
        let again = back.fnstenv(format);
        // Contents differ, so the tag word may; the rest is the same.
        for i in [0, 1, 3, 4, 5, 6] {
            assert_eq!(
                word(&again, i, wide),
                word(&image, i, wide),
                "wide {wide} real {real} reloaded word {i}"
            );
        }
    }
}

// covers: cpu/x87
#[test]
fn fnsave_initialises_and_frstor_restores() {
    for wide in [false, true] {
        let format = EnvironmentFormat { wide, real: false };
        let mut s = busy();
        let image = s.fnsave(format);
        assert_eq!((s.cw, s.sw, s.tag, s.fip, s.fop), (0x37f, 0, 0, 0, 0));
        let mut back = busy();
        back.r = [7; 8];
        back.tag = 0;
        back.frstor(&image, format);
        assert_eq!(back.r, busy().r);
        assert_eq!((back.cw, back.sw, back.tag), (0x77f, 0x2841, busy().tag));
    }
}

// covers: cpu/x87-exceptions
#[test]
fn summary_follows_flags_and_masks() {
    let mut s = FpuState::new();
    s.fninit();
    s.sw = sw::ZE;
    for (cw, pending, reads, why) in [
        (0x37f, false, 0x37f, "all masked"),
        (0x37b, true, 0x37b, "ZM clear with ZE flagged"),
        (0xffff, false, 0x1f7f, "reserved bits"),
        (0x0, true, 0x40, "bit 6 reads 1"),
    ] {
        s.fldcw(cw);
        assert_eq!((s.pending(), s.cw), (pending, reads), "{why}");
        assert_eq!(s.sw & sw::B != 0, pending, "{why}");
    }
    s.fnclex();
    assert!(!s.pending());
}
