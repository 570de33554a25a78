use super::*;
use x86::cpuid::Feature;
use x86::model::by_name;

// covers: bts/ds-area
#[test]
fn the_address_is_canonical_bit_by_bit() {
    for (name, bits) in [
        ("netburst", 32),
        ("core2", 47),
        ("skylake-server", 47),
        ("sapphirerapids", 56),
    ] {
        let model = by_name(name).unwrap();
        for bit in 0..64 {
            let mut area = DsArea::new(model.part_features(), model.linear_bits());
            let expected = if bit < bits {
                Ok(())
            } else {
                Err(MsrFault::GeneralProtection)
            };
            assert_eq!(area.write_msr(0x600, 1 << bit), expected, "{name} {bit}");
            assert_eq!(area.read_msr(0x600).unwrap() != 0, bit < bits, "{name} {bit}");
        }
    }
    let mut area = DsArea::new(Features::list(&[Feature::Ds]), 48);
    assert_eq!(area.write_msr(0x600, 0xFFFF_8000_0000_0000), Ok(()), "the upper half");
    let mut copy = DsArea::new(Features::list(&[Feature::Ds]), 48);
    copy.set_state(area.state());
    assert_eq!(copy.base(), 0xFFFF_8000_0000_0000);
    area.state_changed(Change::Init { at: 0 });
    assert_ne!(area.base(), 0);
    area.state_changed(Change::Reset);
    assert_eq!(area.base(), 0);
}

// covers: bts/ds-area
#[test]
fn without_ds_there_is_no_register() {
    let mut area = DsArea::new(by_name("p6").unwrap().part_features(), 32);
    assert_eq!(area.read_msr(0x600), Err(MsrFault::Unclaimed));
    assert_eq!(area.write_msr(0x600, 0), Err(MsrFault::Unclaimed));
    assert_eq!(area.read_msr(0x601), Err(MsrFault::Unclaimed));
}
