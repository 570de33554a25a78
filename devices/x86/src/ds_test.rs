use super::*;

// covers: pebs/formats
#[test]
fn record_sizes_are_the_manual_s() {
    for (format, size) in [
        (PebsFormat::Core, 0x90),
        (PebsFormat::Nehalem, 0xB0),
        (PebsFormat::Haswell, 0xC0),
        (PebsFormat::Skylake, 0xC8),
        (PebsFormat::Adaptive, 0x20),
    ] {
        assert_eq!(format.size(), size, "{format:?}");
    }
    for (groups, size) in [
        (0, 0x20),
        (data_cfg::MEMORY, 0x40),
        (data_cfg::GPRS, 0x20 + 0x90),
        (data_cfg::XMMS, 0x20 + 0x100),
        (data_cfg::LBRS, 0x20 + 24),
        (data_cfg::LBRS | 31 << data_cfg::LBR_ENTRIES, 0x20 + 32 * 24),
        (0xF | 31 << data_cfg::LBR_ENTRIES, 0x40 + 0x90 + 0x100 + 0x300),
    ] {
        assert_eq!(data_cfg::size(groups), size, "{groups:#x}");
    }
}
