use std::sync::{Arc, Mutex};

use super::*;

const IER: u8 = 1;
const LCR: u8 = 3;
const MCR: u8 = 4;
const LSR: u8 = 5;
const MSR: u8 = 6;
const SCR: u8 = 7;

/// A sink that somebody else can look into.
#[derive(Clone, Default)]
struct Shared(Arc<Mutex<Vec<u8>>>);

impl Write for Shared {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// A sink that has gone away.
struct Broken;

impl Write for Broken {
    fn write(&mut self, _: &[u8]) -> io::Result<usize> {
        Err(io::ErrorKind::BrokenPipe.into())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn serial() -> Serial {
    let mut serial = Serial::new(Box::new(io::sink()));
    serial.write(FCR, FCR_ENABLE);
    serial.write(MCR, MCR_OUT2);
    serial
}

// covers: devices/16550
#[test]
fn transmission() {
    let out = Shared::default();
    let mut serial = Serial::new(Box::new(out.clone()));
    for byte in b"hello\n" {
        assert_eq!(
            serial.read(LSR) & 0x60,
            0x60,
            "holding and shift register are always empty"
        );
        serial.write(DATA, *byte);
    }
    assert_eq!(*out.0.lock().unwrap(), b"hello\n");
    let mut serial = Serial::new(Box::new(Broken));
    serial.write(DATA, b'x');
    assert_eq!(serial.take_error().map(|e| e.kind()), Some(io::ErrorKind::BrokenPipe));
    assert!(serial.take_error().is_none());
}

// covers: devices/16550
#[test]
fn reception_interrupts_while_there_is_data() {
    let mut serial = serial();
    serial.write(IER, IER_DATA);
    assert!(!serial.irq());
    assert_eq!(serial.enqueue(b"ab"), 2);
    assert!(serial.irq());
    for (byte, more) in [(b'a', true), (b'b', false)] {
        assert_eq!(serial.read(IIR), IIR_FIFOS | IIR_DATA);
        assert_eq!(serial.read(LSR) & 1, 1, "data ready");
        assert!(serial.irq(), "reading IIR does not reset this source");
        assert_eq!(serial.read(DATA), byte);
        assert_eq!(serial.irq(), more);
    }
    assert_eq!((serial.read(IIR), serial.read(LSR) & 1), (IIR_FIFOS | IIR_NONE, 0));
}

// covers: devices/16550
#[test]
fn input_is_bounded() {
    let mut serial = serial();
    assert_eq!(serial.capacity(), FIFO);
    assert_eq!(serial.enqueue(&[7; 100]), FIFO, "says how much fitted");
    assert_eq!((serial.enqueue(b"x"), serial.capacity()), (0, 0));
    serial.read(DATA);
    assert_eq!(serial.enqueue(b"xy"), 1);
    serial.write(FCR, FCR_ENABLE | FCR_CLEAR_RX);
    assert_eq!(
        (serial.capacity(), serial.read(LSR) & 1),
        (FIFO, 0),
        "FCR bit 1 clears the receiver"
    );
    serial.write(MCR, MCR_LOOP);
    assert_eq!(
        (serial.enqueue(b"x"), serial.capacity()),
        (0, 0),
        "loopback disconnects the input"
    );
}

// covers: devices/16550
#[test]
fn transmitter_empty_interrupt() {
    let mut serial = serial();
    serial.write(IER, IER_THR_EMPTY);
    assert!(serial.irq(), "enabling it while the register is empty interrupts");
    assert_eq!(serial.read(IIR), IIR_FIFOS | IIR_THR_EMPTY);
    assert!(!serial.irq(), "reading IIR resets it");
    assert_eq!(serial.read(IIR), IIR_FIFOS | IIR_NONE);
    serial.write(DATA, b'x');
    assert!(serial.irq(), "sent, and empty again");
    serial.write(IER, 0);
    assert!(!serial.irq(), "disabled");
    serial.write(IER, IER_THR_EMPTY | IER_DATA);
    serial.enqueue(b"q");
    assert_eq!(serial.read(IIR), IIR_FIFOS | IIR_DATA, "received data comes first");
    serial.read(DATA);
    assert_eq!(
        serial.read(IIR),
        IIR_FIFOS | IIR_THR_EMPTY,
        "and has not reset the other"
    );
    serial.write(DATA, b'x');
    serial.write(MCR, 0);
    assert!(!serial.irq(), "OUT2 gates the line on a PC");
    serial.write(MCR, MCR_OUT2);
    assert!(serial.irq());
    serial.write(MCR, MCR_OUT2 | MCR_LOOP);
    assert!(!serial.irq(), "in loopback OUT2 is not at its pin");
}

// covers: devices/16550
#[test]
fn what_a_driver_probes() {
    let mut serial = Serial::new(Box::new(io::sink()));
    // Scratch; IER has four bits; no FIFO before FCR says so.
    serial.write(SCR, 0xa5);
    serial.write(IER, 0xff);
    assert_eq!((serial.read(SCR), serial.read(IER)), (0xa5, 0x0f));
    serial.write(IER, 0);
    assert_eq!(serial.read(IIR) & IIR_FIFOS, 0);
    serial.write(FCR, FCR_ENABLE);
    assert_eq!(serial.read(IIR) & IIR_FIFOS, IIR_FIFOS, "a 16550A");
    // Loopback: the modem outputs come back as inputs. DTR to DSR, RTS to CTS, OUT1 to RI, OUT2 to DCD.
    for (mcr, msr) in [(0x01, 0x20), (0x02, 0x10), (0x04, 0x40), (0x08, 0x80), (0x0a, 0x90)] {
        serial.write(MCR, MCR_LOOP | mcr);
        assert_eq!(serial.read(MSR) & 0xf0, msr);
    }
    serial.write(DATA, b'l');
    assert_eq!(serial.read(DATA), b'l', "and so does the data");
    // The divisor latch hides data and IER.
    serial.write(LCR, 0x83);
    serial.write(DATA, 0x01);
    serial.write(IER, 0x02);
    assert_eq!((serial.read(DATA), serial.read(IER)), (0x01, 0x02));
    serial.write(LCR, 0x03);
    assert_eq!(serial.read(IER), 0);
}

// covers: devices/16550
#[test]
fn state_keeps_the_input_and_the_sink() {
    let out = Shared::default();
    let mut serial = Serial::new(Box::new(out.clone()));
    serial.write(IER, IER_DATA);
    serial.write(MCR, MCR_OUT2);
    serial.enqueue(b"abc");
    let state = serial.state();
    serial.write(FCR, FCR_ENABLE | FCR_CLEAR_RX);
    serial.set_state(&state);
    assert_eq!(serial.state(), state);
    assert!(serial.irq());
    assert_eq!(serial.read(DATA), b'a');
    serial.write(DATA, b'z');
    assert_eq!(*out.0.lock().unwrap(), b"z");
    let mut crowded = state.clone();
    crowded.uart.in_buffer = vec![1; 1000];
    serial.set_state(&crowded);
    assert_eq!(serial.capacity(), 0, "more than fits is dropped");
}
