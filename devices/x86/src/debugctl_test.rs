use super::*;
use crate::cpuid::Feature;

// covers: debugctl/layouts
#[test]
fn the_three_layouts_say_the_same() {
    use DebugCtlLayout::*;
    let bits = DebugCtl::into_bits;
    for (layout, bit, meaning, name) in [
        (P6, 0, DebugCtl::new().with_lbr(true), "LBR"),
        (P6, 1, DebugCtl::new().with_btf(true), "BTF"),
        (P6, 2, DebugCtl::new(), "PB0"),
        (P6, 5, DebugCtl::new(), "PB3"),
        (P6, 6, DebugCtl::new().with_tr(true), "TR"),
        (NetBurst, 0, DebugCtl::new().with_lbr(true), "LBR"),
        (NetBurst, 1, DebugCtl::new().with_btf(true), "BTF"),
        (NetBurst, 2, DebugCtl::new().with_tr(true), "TR"),
        (NetBurst, 3, DebugCtl::new().with_bts(true), "BTS"),
        (NetBurst, 4, DebugCtl::new().with_btint(true), "BTINT"),
        (NetBurst, 5, DebugCtl::new().with_bts_off_os(true), "BTS_OFF_OS"),
        (NetBurst, 6, DebugCtl::new().with_bts_off_usr(true), "BTS_OFF_USR"),
        (Ia32, 0, DebugCtl::new().with_lbr(true), "LBR"),
        (Ia32, 1, DebugCtl::new().with_btf(true), "BTF"),
        (Ia32, 2, DebugCtl::new().with_bus_lock_detect(true), "BUS_LOCK_DETECT"),
        (Ia32, 6, DebugCtl::new().with_tr(true), "TR"),
        (Ia32, 7, DebugCtl::new().with_bts(true), "BTS"),
        (Ia32, 8, DebugCtl::new().with_btint(true), "BTINT"),
        (Ia32, 9, DebugCtl::new().with_bts_off_os(true), "BTS_OFF_OS"),
        (Ia32, 10, DebugCtl::new().with_bts_off_usr(true), "BTS_OFF_USR"),
        (
            Ia32,
            11,
            DebugCtl::new().with_freeze_lbrs_on_pmi(true),
            "FREEZE_LBRS_ON_PMI",
        ),
        (
            Ia32,
            12,
            DebugCtl::new().with_freeze_perfmon_on_pmi(true),
            "FREEZE_PERFMON_ON_PMI",
        ),
        (
            Ia32,
            13,
            DebugCtl::new().with_enable_uncore_pmi(true),
            "ENABLE_UNCORE_PMI",
        ),
        (
            Ia32,
            14,
            DebugCtl::new().with_freeze_while_smm(true),
            "FREEZE_WHILE_SMM",
        ),
        (Ia32, 15, DebugCtl::new().with_rtm(true), "RTM"),
    ] {
        assert_eq!(bits(layout.decode(1 << bit)), bits(meaning), "{layout:?} {name}");
    }
}

// covers: debugctl/features
#[test]
fn a_bit_whose_feature_is_hidden_is_reserved() {
    for (caps, feature, bits) in [
        (ARCHITECTURAL, Feature::Ds, 0x180),
        (ARCHITECTURAL, Feature::DsCpl, 0x600),
        (ARCHITECTURAL, Feature::BusLockDetect, 0x4),
        (ARCHITECTURAL, Feature::Rtm, 0x8000),
        (ARCHITECTURAL, Feature::Pdcm, 0x4000),
        (NETBURST, Feature::Ds, 0x18),
        (NETBURST, Feature::DsCpl, 0x60),
    ] {
        let all = [
            Feature::Ds,
            Feature::DsCpl,
            Feature::BusLockDetect,
            Feature::Rtm,
            Feature::Pdcm,
        ];
        let all = Features::list(&all);
        assert_eq!(caps.writable_with(all), caps.writable);
        let without = all.minus(Features::list(&[feature]));
        assert_eq!(caps.writable & !caps.writable_with(without), bits, "{feature:?}");
    }
}
