//! The local APIC of one CPU. SDM Vol. 3A chapter 11 "Advanced Programmable Interrupt Controller (APIC)".

use core::sync::atomic::{AtomicU64, Ordering::SeqCst};

use rt::apic::{self, EN, EXTD, reg};
use rt::cpu::{self, read, refuses, write};
use rt::exception::Fault;
use rt::{exception, need, time};
use x86::msr::{IA32_APIC_BASE, IA32_X2APIC_BASE};

static COUNT: AtomicU64 = AtomicU64::new(0);
static ORDER: AtomicU64 = AtomicU64::new(0);

fn take() {
    cpu::enable_interrupts();
    cpu::pause();
    cpu::pause();
    cpu::disable_interrupts();
}

/// 11.4.4: the boot CPU's APIC is enabled at its address; reserved bits are #GP.
fn base() {
    let base = read(IA32_APIC_BASE);
    assert_eq!(base & EN, EN);
    assert_eq!(base & 1 << 8, 1 << 8, "the boot CPU");
    assert_eq!(base & 0xF_FFFF_F000, 0xFEE0_0000);
    refuses(IA32_APIC_BASE, base | 1);
    assert_eq!(cpu::cpuid(1, 0)[1] >> 24, apic::id(), "CPUID.1:EBX[31:24]");
}

/// 11.4.8: an integrated APIC, with at least the LVT entries up to the error's.
fn version() {
    let version = apic::read(reg::VERSION);
    assert!((0x10..0x20).contains(&(version & 0xFF)), "{version:X}H");
    assert!(version >> 16 & 0xFF >= 3, "{version:X}H");
}

/// A self IPI waits for IF, is in service in its handler, and EOI ends it.
fn an_ipi_to_itself() {
    apic::enable();
    COUNT.store(0, SeqCst);
    exception::on(0x70, |_| {
        COUNT.fetch_add(1, SeqCst);
        assert!(apic::bit(reg::ISR, 0x70) && !apic::bit(reg::IRR, 0x70));
        assert_eq!(apic::read(reg::PPR) & 0xF0, 0x70);
        apic::eoi();
        assert!(!apic::bit(reg::ISR, 0x70));
    });
    apic::send(apic::ICR_SELF | 0x70, 0);
    assert!(apic::bit(reg::IRR, 0x70));
    assert_eq!(COUNT.load(SeqCst), 0);
    take();
    assert_eq!(COUNT.load(SeqCst), 1);
}

/// 11.8.3.1: of two, the higher vector comes first.
fn priorities() {
    apic::enable();
    ORDER.store(0, SeqCst);
    fn note(frame: &mut exception::Frame) {
        ORDER.store(ORDER.load(SeqCst) << 8 | frame.vector, SeqCst);
        apic::eoi();
    }
    for vector in [0x71, 0x82, 0x93] {
        exception::on(vector, note);
        apic::send(apic::ICR_SELF | u32::from(vector), 0);
    }
    take();
    assert_eq!(ORDER.load(SeqCst), 0x93_8271);
}

/// TPR, as CR8, holds off its class and those below.
fn task_priority() {
    apic::enable();
    COUNT.store(0, SeqCst);
    exception::on(0x75, |_| {
        COUNT.fetch_add(1, SeqCst);
        apic::eoi();
    });
    cpu::set_cr8(7);
    assert_eq!(apic::read(reg::TPR), 0x70);
    apic::send(apic::ICR_SELF | 0x75, 0);
    take();
    assert_eq!(COUNT.load(SeqCst), 0);
    cpu::set_cr8(6);
    take();
    assert_eq!(COUNT.load(SeqCst), 1);
    apic::write(reg::TPR, 0x20);
    assert_eq!((apic::read(reg::TPR), cpu::cr8()), (0x20, 2));
    cpu::set_cr8(0);
    assert_eq!(apic::read(reg::TPR), 0);
}

/// The bits of TPR that CR8 has not stay where they are until it is written.
fn task_priority_beyond_cr8() {
    apic::enable();
    apic::write(reg::TPR, 0x1F);
    assert_eq!((apic::read(reg::TPR), cpu::cr8()), (0x1F, 1));
    assert_eq!(apic::read(reg::TPR), 0x1F);
    cpu::set_cr8(0);
}

/// The timer: one shot, periodic, masked; the current count goes down.
fn the_timer() {
    // 5 to 20 ms by the bus: under a slow hypervisor an interrupt takes a tenth of one.
    const COUNTS: u32 = 2_000_000;
    apic::enable();
    COUNT.store(0, SeqCst);
    exception::on(0x76, |_| {
        COUNT.fetch_add(1, SeqCst);
        apic::eoi();
    });
    apic::write(reg::DIVIDE, 0xB);
    apic::write(reg::LVT_TIMER, 0x76);
    apic::write(reg::INITIAL_COUNT, COUNTS);
    let first = apic::read(reg::CURRENT_COUNT);
    assert!(first <= COUNTS && apic::read(reg::CURRENT_COUNT) <= first);
    cpu::halt();
    assert_eq!((COUNT.load(SeqCst), apic::read(reg::CURRENT_COUNT)), (1, 0));
    apic::write(reg::LVT_TIMER, 1 << 17 | 0x76);
    apic::write(reg::INITIAL_COUNT, COUNTS);
    for _ in 0..3 {
        cpu::halt();
    }
    assert!(COUNT.load(SeqCst) >= 4);
    apic::write(reg::INITIAL_COUNT, 0);
    take();
    apic::write(reg::LVT_TIMER, 0x76 | apic::MASKED);
    let before = COUNT.load(SeqCst);
    apic::write(reg::INITIAL_COUNT, 1000);
    time::wait(2000);
    take();
    assert_eq!(COUNT.load(SeqCst), before, "masked");
}

/// A self IPI as NMI needs no IF.
fn an_nmi_to_itself() {
    if apic::x2apic() {
        rt::report::skip("the APIC is in x2APIC mode");
    }
    COUNT.store(0, SeqCst);
    exception::on(2, |_| {
        COUNT.fetch_add(1, SeqCst);
    });
    apic::send(apic::NMI | 1 << 14, apic::id());
    cpu::pause();
    assert_eq!(COUNT.load(SeqCst), 1);
}

/// 11.12: x2APIC mode has the same registers as MSRs, a whole ICR and a self-IPI register; the page is gone.
fn x2apic_mode() {
    let base = read(IA32_APIC_BASE);
    let id = apic::id();
    apic::enable();
    write(IA32_APIC_BASE, base | EXTD);
    // From x2APIC mode to xAPIC mode leads no way but through off.
    assert!(cpu::wrmsr(IA32_APIC_BASE, base).is_err());
    assert_eq!(apic::read(reg::ID), id);
    COUNT.store(0, SeqCst);
    exception::on(0x77, |_| {
        COUNT.fetch_add(1, SeqCst);
        apic::eoi();
    });
    apic::write(reg::SELF_IPI, 0x77);
    take();
    apic::send(apic::ICR_SELF | 0x77, 0);
    take();
    assert_eq!(COUNT.load(SeqCst), 2);
    assert!(cpu::rdmsr(IA32_X2APIC_BASE + reg::ICR_HIGH).is_err(), "one ICR");
    // LDR follows from the ID.
    assert_eq!(apic::read(reg::LDR), (id >> 4) << 16 | 1 << (id & 15));
    write(IA32_APIC_BASE, base & !EN & !EXTD);
    write(IA32_APIC_BASE, base);
    apic::enable();
}

/// 11.12.1.2: EOI takes no value but 0.
fn x2apic_eoi_takes_0() {
    let base = read(IA32_APIC_BASE);
    write(IA32_APIC_BASE, base | EXTD);
    let answer = cpu::wrmsr(IA32_X2APIC_BASE + reg::EOI, 1);
    write(IA32_APIC_BASE, base & !EN & !EXTD);
    write(IA32_APIC_BASE, base);
    apic::enable();
    assert_eq!(answer, Err(Fault::GP0));
}

/// An interrupt that comes while an instruction ends in a fault waits: neither is lost.
fn an_interrupt_beside_a_fault() {
    const VECTOR: u8 = 0x73;
    apic::enable();
    COUNT.store(0, SeqCst);
    exception::on(VECTOR, |_| {
        COUNT.fetch_add(1, SeqCst);
        apic::eoi();
    });
    apic::write(reg::DIVIDE, 0xB);
    apic::write(reg::LVT_TIMER, VECTOR.into());
    for turn in 0..200 {
        apic::write(reg::INITIAL_COUNT, 1000 + turn * 997 % 40_000);
        let limit = time::Deadline::after(10_000_000);
        cpu::enable_interrupts();
        while COUNT.load(SeqCst) <= turn.into() {
            // No part has it.
            assert_eq!(cpu::rdmsr(0xDEAD_0000), Err(Fault::GP0));
            assert!(!limit.passed(), "interrupt {turn} is lost");
        }
        cpu::disable_interrupts();
        assert!(!apic::bit(reg::ISR, VECTOR));
    }
}

rt::tests! {
    "tests_apic";
    base;
    version;
    an_ipi_to_itself;
    priorities;
    task_priority;
    task_priority_beyond_cr8;
    the_timer;
    an_interrupt_beside_a_fault;
    an_nmi_to_itself;
    x2apic_eoi_takes_0: need::X2APIC;
    x2apic_mode: need::X2APIC;
}
