use super::*;

// covers: trace/export-perf
#[test]
fn time_scales_as_perf_has_it() {
    for khz in [2_100_000, 2_666_660, 733_000, 1_000_000] {
        let scale = Scale::new(khz);
        for ticks in [0, 1, 1000, u64::from(khz) * 1000, u64::from(khz) * 86_400_000] {
            let exact = u128::from(ticks) * 1_000_000 / u128::from(khz);
            let off = u128::from(scale.ns(ticks)).abs_diff(exact);
            assert!(
                off <= 1 + exact / 1_000_000_000,
                "{khz} kHz: {ticks} ticks: off by {off} ns"
            );
        }
    }
}
