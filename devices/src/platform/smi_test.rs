use super::*;

// covers: smm/port
#[test]
fn a_write_to_b2h_is_a_request_once_both_bits_enable_it() {
    for (enable, raises) in [(0, false), (1, false), (0x20, false), (0x21, true), (0x23, true)] {
        let mut smi = SmiControl::default();
        smi.write_enable(0, enable);
        assert_eq!(smi.write_apm(0, 0x42), raises, "{enable:#x}");
        assert!(!smi.write_apm(1, 0x17), "APM_STS is storage");
        assert_eq!((smi.read_apm(0), smi.read_apm(1)), (0x42, 0x17));
    }
}

// covers: smm/port
#[test]
fn what_is_not_implemented_of_smi_en_reads_zero() {
    let mut smi = SmiControl::default();
    for offset in 0..4 {
        smi.write_enable(offset, 0xff);
    }
    assert_eq!([0, 1, 2, 3].map(|offset| smi.read_enable(offset)), [0x23, 0, 0, 0]);
    let mut other = SmiControl::default();
    other.set_state(&smi.state());
    assert_eq!(other, smi);
}
