use super::*;

// covers: cpu/rflags
#[test]
fn bits_stand_where_figure_3_8_has_them() {
    let flag = |set: fn(RFlags) -> RFlags| set(RFlags::new()).into_bits();
    for (bits, expected, name) in [
        (flag(|f| f.with_cf(true)), 1 << 0, "CF"),
        (flag(|f| f.with_pf(true)), 1 << 2, "PF"),
        (flag(|f| f.with_af(true)), 1 << 4, "AF"),
        (flag(|f| f.with_zf(true)), 1 << 6, "ZF"),
        (flag(|f| f.with_sf(true)), 1 << 7, "SF"),
        (flag(|f| f.with_tf(true)), 1 << 8, "TF"),
        (flag(|f| f.with_interrupt(true)), 1 << 9, "IF"),
        (flag(|f| f.with_df(true)), 1 << 10, "DF"),
        (flag(|f| f.with_of(true)), 1 << 11, "OF"),
        (flag(|f| f.with_iopl(3)), 3 << 12, "IOPL"),
        (flag(|f| f.with_nt(true)), 1 << 14, "NT"),
        (flag(|f| f.with_rf(true)), 1 << 16, "RF"),
        (flag(|f| f.with_vm(true)), 1 << 17, "VM"),
        (flag(|f| f.with_ac(true)), 1 << 18, "AC"),
        (flag(|f| f.with_vif(true)), 1 << 19, "VIF"),
        (flag(|f| f.with_vip(true)), 1 << 20, "VIP"),
        (flag(|f| f.with_id(true)), 1 << 21, "ID"),
    ] {
        assert_eq!(bits, expected, "{name}");
    }
    assert_eq!(RFlags::canonical(u64::MAX), 0x3F_7FD7);
    assert_eq!(RFlags::canonical(0), 0x2);
    let status = RFlags::new()
        .with_cf(true)
        .with_pf(true)
        .with_af(true)
        .with_zf(true)
        .with_sf(true)
        .with_of(true);
    assert_eq!(status.into_bits(), RFlags::STATUS);
}
