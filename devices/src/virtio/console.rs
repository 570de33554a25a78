//! The console device (5.3 "Console Device"): hvc0, and further ports by their names.
//!
//! A driver that knows of several ports (VIRTIO_CONSOLE_F_MULTIPORT) hears of them through the control queues; one that does not has the
//! first port alone. What comes from outside for a port waits here until the guest has opened it, since a driver drops what comes
//! for a closed one.

use std::{collections::VecDeque, fmt, io::Write};

use serde::{Deserialize, Serialize};
use virtio_bindings::virtio_ids::VIRTIO_ID_CONSOLE;

use super::{Device, DeviceState, Nonsense, Readiness, Request, Taken};

/// Feature bits (5.3.3).
const F_SIZE: u64 = 1 << 0;
const F_MULTIPORT: u64 = 1 << 1;

/// Entries of each queue.
const QUEUE: u16 = 64;
/// The queues through which the device and the driver speak of ports; those of a port lie around them (5.3.2 "Virtqueues").
const CONTROL_RECEIVE: usize = 2;
const CONTROL_TRANSMIT: usize = 3;
/// The most ports.
pub const PORTS: usize = 15;
/// So many bytes wait for the guest at a port; the rest waits outside.
const WAITING: usize = 64 << 10;
/// What a port takes of the guest at once. What is longer is nonsense.
const LONGEST: u64 = 1 << 20;
/// Control messages that wait for buffers of the driver's: an orderly driver has several for each port.
const MESSAGES: usize = 8 * PORTS;

/// Control events (5.3.6.2 "Multiport Device Operation").
const DEVICE_READY: u16 = 0;
const DEVICE_ADD: u16 = 1;
const PORT_READY: u16 = 3;
const CONSOLE_PORT: u16 = 4;
const PORT_OPEN: u16 = 6;
const PORT_NAME: u16 = 7;
/// ID, event, value.
const CONTROL: u64 = 8;

/// What a port is for.
pub struct Port {
    /// The guest finds it as /dev/virtio-ports/NAME. Of the console, which is hvc0 there, the name does not matter.
    pub name: String,
    /// It is a console.
    pub console: bool,
    /// Where goes what the guest sends.
    pub out: Box<dyn Write + Send>,
}

impl fmt::Debug for Port {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "port {}", self.name)
    }
}

/// What a port remembers.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PortState {
    /// Bytes for the guest.
    pub waiting: VecDeque<u8>,
    /// Behind them nothing comes any more.
    pub ended: bool,
    /// The driver has been told so.
    pub told: bool,
    /// The guest has opened it.
    pub open: bool,
}

/// What the device remembers.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ConsoleState {
    /// The driver knows of several ports.
    pub multiport: bool,
    /// The ports, in order.
    pub ports: Vec<PortState>,
    /// Messages for the driver.
    pub messages: VecDeque<Vec<u8>>,
}

/// The device.
#[derive(Debug)]
pub struct Console {
    ports: Vec<Port>,
    queues: Vec<u16>,
    /// Columns and rows, if they are known.
    size: Option<(u16, u16)>,
    state: ConsoleState,
}

impl Console {
    /// A console device with these ports, at most [`PORTS`], the first of which is what a driver without F_MULTIPORT has. `size`: columns
    /// and rows of the first.
    pub fn new(mut ports: Vec<Port>, size: Option<(u16, u16)>) -> Self {
        ports.truncate(PORTS);
        let state = ConsoleState {
            ports: vec![PortState::default(); ports.len()],
            ..ConsoleState::default()
        };
        Console {
            // One port takes the control queues, too, if it has a name.
            queues: vec![QUEUE; 2 * (ports.len() + 1)],
            ports,
            size,
            state,
        }
    }

    fn send(&mut self, port: usize, event: u16, value: u16, text: &[u8]) {
        if self.state.messages.len() == MESSAGES {
            return;
        }
        let mut message = (port as u32).to_le_bytes().to_vec();
        message.extend(event.to_le_bytes());
        message.extend(value.to_le_bytes());
        message.extend(text);
        self.state.messages.push_back(message);
    }

    /// The driver has said something of a port.
    fn control(&mut self, port: usize, event: u16, value: u16) {
        match event {
            DEVICE_READY if value == 1 => {
                for port in 0..self.ports.len() {
                    self.send(port, DEVICE_ADD, 0, &[]);
                }
            }
            PORT_READY if value == 1 && port < self.ports.len() => {
                if self.ports[port].console {
                    self.send(port, CONSOLE_PORT, 1, &[]);
                }
                let name = self.ports[port].name.clone();
                self.send(port, PORT_NAME, 1, name.as_bytes());
                self.send(port, PORT_OPEN, 1, &[]);
            }
            PORT_OPEN => {
                if let Some(port) = self.state.ports.get_mut(port) {
                    port.open = value == 1;
                }
                self.tell_end(port);
            }
            _ => {}
        }
    }

    /// Tells the driver that nothing comes any more, once the guest has all that came before.
    fn tell_end(&mut self, index: usize) {
        let multiport = self.state.multiport;
        let Some(port) = self.state.ports.get_mut(index) else {
            return;
        };
        if multiport && port.ended && port.open && port.waiting.is_empty() && !port.told {
            port.told = true;
            self.send(index, PORT_OPEN, 0, &[]);
        }
    }

    /// Bytes for the guest into its buffer.
    fn receive(&mut self, index: usize, request: &mut Request) -> Result<u32, Nonsense> {
        let port = &mut self.state.ports[index];
        let len = port
            .waiting
            .len()
            .min(usize::try_from(request.writable()).unwrap_or(usize::MAX));
        let bytes: Vec<u8> = port.waiting.drain(..len).collect();
        request.write(0, &bytes)?;
        self.tell_end(index);
        Ok(len as u32)
    }

    /// Bytes of the guest's go out. Whoever takes them says of an error once; the guest is not told.
    fn transmit(&mut self, index: usize, request: &mut Request) -> Result<u32, Nonsense> {
        if request.readable() > LONGEST {
            return Err(Nonsense("more than 1 MiB for a port at once"));
        }
        let mut bytes = vec![0; request.readable() as usize];
        request.read(0, &mut bytes)?;
        let _ = self.ports[index].out.write_all(&bytes);
        Ok(0)
    }
}

/// The port of a queue, and whether it is the one to receive.
fn port_of(queue: usize) -> (usize, bool) {
    let port = if queue < CONTROL_RECEIVE { 0 } else { queue / 2 - 1 };
    (port, queue.is_multiple_of(2))
}

impl Device for Console {
    fn id(&self) -> u32 {
        VIRTIO_ID_CONSOLE
    }

    fn features(&self) -> u64 {
        F_MULTIPORT | if self.size.is_some() { F_SIZE } else { 0 }
    }

    fn queues(&self) -> &[u16] {
        &self.queues
    }

    /// 5.3.4 "Device configuration layout": columns, rows, the number of ports, and a register for emergencies that is not offered.
    fn config(&self) -> Vec<u8> {
        let (columns, rows) = self.size.unwrap_or_default();
        let mut config = columns.to_le_bytes().to_vec();
        config.extend(rows.to_le_bytes());
        config.extend((self.ports.len() as u32).to_le_bytes());
        config.extend([0; 4]);
        config
    }

    fn negotiated(&mut self, features: u64) {
        self.state.multiport = features & F_MULTIPORT != 0;
    }

    fn readiness(&self, queue: usize) -> Readiness {
        let some = match queue {
            CONTROL_RECEIVE => !self.state.messages.is_empty(),
            CONTROL_TRANSMIT => return Readiness::OnRequest,
            _ => match port_of(queue) {
                (_, false) => return Readiness::OnRequest,
                (port, true) => {
                    let port = self.state.ports.get(port);
                    port.is_some_and(|port| !port.waiting.is_empty() && (port.open || !self.state.multiport))
                }
            },
        };
        match some {
            true => Readiness::Waiting,
            false => Readiness::Nothing,
        }
    }

    /// No bytes are the end of what comes for the port.
    fn input(&mut self, index: u32, bytes: &[u8], _live: bool) -> Taken {
        let index = index as usize;
        let Some(port) = self.state.ports.get_mut(index) else {
            return Taken::Dropped;
        };
        if bytes.is_empty() {
            port.ended = true;
            self.tell_end(index);
            return Taken::Bytes(0);
        }
        let taken = bytes.len().min(WAITING - port.waiting.len().min(WAITING));
        port.waiting.extend(&bytes[..taken]);
        Taken::Bytes(taken)
    }

    fn request(&mut self, queue: usize, request: &mut Request) -> Result<u32, Nonsense> {
        match queue {
            CONTROL_RECEIVE => {
                let message = self.state.messages.pop_front().unwrap_or_default();
                request.write(0, &message)?;
                Ok(message.len() as u32)
            }
            CONTROL_TRANSMIT => {
                let mut bytes = [0; CONTROL as usize];
                request.read(0, &mut bytes)?;
                let [a, b, c, d, e, f, g, h] = bytes;
                let port = u32::from_le_bytes([a, b, c, d]) as usize;
                self.control(port, u16::from_le_bytes([e, f]), u16::from_le_bytes([g, h]));
                Ok(0)
            }
            _ => match port_of(queue) {
                (port, true) => self.receive(port, request),
                (port, false) => self.transmit(port, request),
            },
        }
    }

    /// What has come for the guest stays: the next driver may want it.
    fn reset(&mut self) {
        self.state.multiport = false;
        self.state.messages.clear();
        for port in &mut self.state.ports {
            (port.open, port.told) = (false, false);
        }
    }

    fn state(&self) -> DeviceState {
        DeviceState::Console(self.state.clone())
    }

    fn set_state(&mut self, state: &DeviceState) {
        if let DeviceState::Console(state) = state
            && state.ports.len() == self.ports.len()
        {
            self.state = state.clone();
        }
    }
}

#[cfg(test)]
#[path = "console_test.rs"]
mod tests;
