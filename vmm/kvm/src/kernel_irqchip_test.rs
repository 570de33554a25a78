use super::*;

// covers: kvm/irqchip-kvm-lines
#[test]
fn every_line_has_its_pins_and_the_timer_is_on_pin_2() {
    let routes = routes();
    for row in [
        (0, KVM_IRQCHIP_PIC_MASTER, 0),
        (0, KVM_IRQCHIP_IOAPIC, 2),
        (4, KVM_IRQCHIP_PIC_MASTER, 4),
        (4, KVM_IRQCHIP_IOAPIC, 4),
        (8, KVM_IRQCHIP_PIC_SLAVE, 0),
        (16, KVM_IRQCHIP_IOAPIC, 16),
        (23, KVM_IRQCHIP_IOAPIC, 23),
    ] {
        assert_eq!(routes.iter().filter(|other| **other == row).count(), 1, "{row:?}");
    }
    assert_eq!(routes.len(), 2 * 15 + 8);
    assert!(routes.iter().all(|(gsi, _, pin)| *gsi != 2 && *pin < 24));
}

#[test]
fn registers_are_least_significant_byte_first() {
    let mut lapic = kvm_lapic_state::default();
    set_register(&mut lapic, SVR, 0x1234_56ff);
    assert_eq!(register(&lapic, SVR), 0x1234_56ff);
    assert_eq!((register(&lapic, SVR - 4), register(&lapic, SVR + 4)), (0, 0));
}
