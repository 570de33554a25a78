//! A 16550A serial port: vm-superio's registers, and around them what its `Trigger` does not say: the level of the interrupt
//! line, the FIFO control register, and an interrupt identification that lasts as long as its cause.
//! National PC16550D data sheet.

use serde::{Deserialize, Serialize};
use std::cell::Cell;
use std::convert::Infallible;
use std::fmt;
use std::io::{self, Write};

use vm_superio::serial::{Error, NoEvents, SerialState as Uart};
use vm_superio::{Serial as VmSerial, Trigger};

/// Port of the first serial port's registers; there are eight.
pub const COM1: u16 = 0x3f8;
/// Port of the second serial port's registers.
pub const COM2: u16 = 0x2f8;

const IIR: u8 = 2;
const FCR: u8 = 2;
const DATA: u8 = 0;
const IER_DATA: u8 = 0x01;
const IER_THR_EMPTY: u8 = 0x02;
const IIR_NONE: u8 = 0x01;
const IIR_THR_EMPTY: u8 = 0x02;
const IIR_DATA: u8 = 0x04;
const IIR_FIFOS: u8 = 0xc0;
const FCR_ENABLE: u8 = 0x01;
const FCR_CLEAR_RX: u8 = 0x02;
const FCR_WRITABLE: u8 = 0xc9;
const MCR_OUT2: u8 = 0x08;
const MCR_LOOP: u8 = 0x10;

/// vm-superio raises an interrupt by calling this; here the line's level is worked out from the registers, so the call has
/// nothing left to say.
#[derive(Debug)]
struct NoTrigger;

impl Trigger for NoTrigger {
    type E = Infallible;

    fn trigger(&self) -> Result<(), Infallible> {
        Ok(())
    }
}

/// The sink, and the first error that it met. Lives inside vm-superio's device, which has no way to keep one.
struct Out {
    to: Box<dyn Write + Send>,
    error: Cell<Option<io::Error>>,
}

impl fmt::Debug for Out {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("Out")
    }
}

impl Write for Out {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.to.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.to.flush()
    }
}

/// vm-superio's registers, as they are stored.
#[derive(Serialize, Deserialize)]
#[serde(remote = "Uart")]
struct UartFields {
    baud_divisor_low: u8,
    baud_divisor_high: u8,
    interrupt_enable: u8,
    interrupt_identification: u8,
    line_control: u8,
    line_status: u8,
    modem_control: u8,
    modem_status: u8,
    scratch: u8,
    in_buffer: Vec<u8>,
}

/// The whole state of the port.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SerialState {
    /// vm-superio's registers and the received bytes.
    #[serde(with = "UartFields")]
    pub uart: Uart,
    /// FIFO control register.
    pub fifo_control: u8,
}

/// The port. Transmitted bytes go to a sink at once.
#[derive(Debug)]
pub struct Serial {
    uart: VmSerial<NoTrigger, NoEvents, Out>,
    fifo_control: u8,
}

impl Serial {
    /// A port at reset that sends to `out`.
    pub fn new(out: Box<dyn Write + Send>) -> Serial {
        Serial {
            uart: VmSerial::new(
                NoTrigger,
                Out {
                    to: out,
                    error: Cell::new(None),
                },
            ),
            fifo_control: 0,
        }
    }

    /// The level of the interrupt line, which a PC gates with OUT2 and which loopback disconnects.
    pub fn irq(&self) -> bool {
        let uart = self.uart.state();
        uart.modem_control & (MCR_OUT2 | MCR_LOOP) == MCR_OUT2 && identification(&uart) != IIR_NONE
    }

    /// Reads register `offset` (0 to 7).
    pub fn read(&mut self, offset: u8) -> u8 {
        if offset != IIR {
            return self.uart.read(offset);
        }
        let fifos = if self.fifo_control & FCR_ENABLE != 0 {
            IIR_FIFOS
        } else {
            0
        };
        let code = identification(&self.uart.state());
        if code == IIR_THR_EMPTY {
            // "Reading the IIR (if source of interrupt)" resets this one, and no other.
            self.uart.read(IIR);
        }
        code | fifos
    }

    /// Writes register `offset` (0 to 7).
    pub fn write(&mut self, offset: u8, value: u8) {
        if offset == FCR {
            let toggled = (self.fifo_control ^ value) & FCR_ENABLE != 0;
            if toggled || value & FCR_CLEAR_RX != 0 {
                self.clear_input();
            }
            self.fifo_control = if value & FCR_ENABLE != 0 {
                value & FCR_WRITABLE
            } else {
                0
            };
            return;
        }
        match self.uart.write(offset, value) {
            Ok(()) | Err(Error::FullFifo) => {}
            Err(Error::IOError(e)) => {
                let kept = self.uart.writer().error.take();
                self.uart.writer().error.set(kept.or(Some(e)));
            }
            Err(Error::Trigger(never)) => match never {},
        }
    }

    fn clear_input(&mut self) {
        let mut uart = self.uart.state();
        if uart.in_buffer.is_empty() {
            return;
        }
        // The data register is behind the divisor latch while that is open.
        let line_control = std::mem::take(&mut uart.line_control);
        let _ = self.uart.write(3, 0);
        for _ in 0..uart.in_buffer.len() {
            self.uart.read(DATA);
        }
        let _ = self.uart.write(3, line_control);
    }

    /// Hands over received bytes; how many fitted (the rest is for the next call). None fit in loopback mode, in which the input
    /// is disconnected.
    pub fn enqueue(&mut self, bytes: &[u8]) -> usize {
        self.uart.enqueue_raw_bytes(bytes).unwrap_or(0)
    }

    /// How many bytes would fit.
    pub fn capacity(&self) -> usize {
        if self.uart.state().modem_control & MCR_LOOP != 0 {
            0
        } else {
            self.uart.fifo_capacity()
        }
    }

    /// The first error that the sink has met since the last call. The bytes are lost; a UART does not know.
    pub fn take_error(&mut self) -> Option<io::Error> {
        self.uart.writer().error.take()
    }

    /// The whole state, without the sink.
    pub fn state(&self) -> SerialState {
        SerialState {
            uart: self.uart.state(),
            fifo_control: self.fifo_control,
        }
    }

    /// Takes a state back; the sink stays. More received bytes than the FIFO holds are dropped.
    pub fn set_state(&mut self, state: &SerialState) {
        let mut uart = state.uart.clone();
        uart.in_buffer.truncate(FIFO);
        let sink = Out {
            to: Box::new(io::sink()),
            error: Cell::new(None),
        };
        let out = std::mem::replace(self.uart.writer_mut(), sink);
        match VmSerial::from_state(&uart, NoTrigger, NoEvents, out) {
            Ok(restored) => self.uart = restored,
            // Neither the buffer, which is short enough, nor the trigger, which cannot fail.
            Err(Error::Trigger(never)) => match never {},
            Err(Error::FullFifo | Error::IOError(_)) => {}
        }
        self.fifo_control = state.fifo_control;
    }
}

/// What holds the interrupt line: the identification code, without the FIFO bits.
fn identification(uart: &Uart) -> u8 {
    if uart.interrupt_enable & IER_DATA != 0 && !uart.in_buffer.is_empty() {
        IIR_DATA
    } else if uart.interrupt_enable & IER_THR_EMPTY != 0 && uart.interrupt_identification & IIR_THR_EMPTY != 0 {
        IIR_THR_EMPTY
    } else {
        IIR_NONE
    }
}

/// vm-superio's receive buffer.
const FIFO: usize = 64;

#[cfg(test)]
mod tests {
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
}
