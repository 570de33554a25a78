use super::*;
use crate::undefined;

#[test]
fn the_parity_constant_agrees_with_the_table_of_pins() {
    for n in 0..64u32 {
        let flags = 0x9669_6996_6996_9669u64.rotate_right(n) << 10 & PF;
        assert_eq!(to_rflags(flags), undefined::bit_scan(Some(n)), "{n}");
    }
    assert_eq!(to_rflags(ZF | PF), undefined::bit_scan(None));
}
