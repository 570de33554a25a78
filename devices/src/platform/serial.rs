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
#[path = "serial_test.rs"]
mod tests;
