//! The network device (5.1 "Network Device"): one pair of queues, Ethernet frames in and out.
//!
//! The driver may leave a frame's checksum to the device (VIRTIO_NET_F_CSUM), which fills it in before the frame goes out; and where the
//! back end vouches for what it sends, the driver is told that checksums are good (VIRTIO_NET_F_GUEST_CSUM), so that a guest on
//! a CPU in software does not add up every byte twice.

use std::{collections::VecDeque, fmt, io::Write};

use serde::{Deserialize, Serialize};
use virtio_bindings::virtio_ids::VIRTIO_ID_NET;

use super::{Device, DeviceState, Nonsense, Readiness, Request, Taken};

/// Feature bits (5.1.3).
const F_CSUM: u64 = 1 << 0;
const F_GUEST_CSUM: u64 = 1 << 1;
const F_MTU: u64 = 1 << 3;
const F_MAC: u64 = 1 << 5;
const F_STATUS: u64 = 1 << 16;

/// Entries of the two queues. A driver puts several pages behind each entry it receives into where frames are long.
const QUEUES: [u16; 2] = [64, 256];
const RECEIVE: usize = 0;
/// struct virtio_net_hdr (5.1.6 "Device Operation"): flags, GSO type, lengths, where the checksum is, and the number of buffers.
const HEADER: usize = 12;
/// VIRTIO_NET_HDR_F_NEEDS_CSUM and F_DATA_VALID.
const NEEDS_CSUM: u8 = 1;
const DATA_VALID: u8 = 2;
/// Destination, source, type.
pub const ETHERNET: usize = 14;
/// The longest frame either way, without the header.
pub const FRAME_MAX: usize = 65535 + ETHERNET + 4;
/// So many bytes of frames wait for buffers of the driver's; further ones wait outside.
const WAITING: usize = 1 << 20;
/// VIRTIO_NET_S_LINK_UP.
const LINK_UP: u16 = 1;

/// What remains of the device when its driver is reset, and what waits.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct NetState {
    /// Features that the driver has taken.
    pub features: u64,
    /// Frames for the guest.
    pub waiting: VecDeque<Vec<u8>>,
}

/// What a network device is made of.
pub struct Options {
    /// Its address.
    pub mac: [u8; 6],
    /// The greatest packet, if it is not Ethernet's 1500 bytes.
    pub mtu: Option<u16>,
    /// The back end's frames have good checksums.
    pub trusted: bool,
    /// Takes each frame that the guest sends as one write.
    pub out: Box<dyn Write + Send>,
}

/// The device.
pub struct Net {
    options: Options,
    state: NetState,
    /// The sum of the lengths of what waits.
    bytes: usize,
}

impl fmt::Debug for Net {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Net {:02x?}", self.options.mac)
    }
}

impl Net {
    /// A network device whose cable is plugged in.
    pub fn new(options: Options) -> Self {
        Net {
            options,
            state: NetState::default(),
            bytes: 0,
        }
    }

    fn receive(&mut self, request: &mut Request) -> Result<u32, Nonsense> {
        let Some(frame) = self.state.waiting.pop_front() else {
            return Ok(0);
        };
        self.bytes -= frame.len();
        let whole = HEADER + frame.len();
        if request.writable() < whole as u64 {
            // 5.1.6.3.1: the driver's buffers hold any frame; a smaller one loses it, as a card would.
            request.add_work(frame.len() as u64);
            return Ok(0);
        }
        let mut header = [0; HEADER];
        if self.options.trusted && self.state.features & F_GUEST_CSUM != 0 {
            header[0] = DATA_VALID;
        }
        header[10] = 1;
        request.write(0, &header)?;
        request.write(HEADER as u64, &frame)?;
        Ok(whole as u32)
    }

    fn transmit(&mut self, request: &mut Request) -> Result<u32, Nonsense> {
        let Some(len) = request.readable().checked_sub(HEADER as u64) else {
            return Err(Nonsense("a frame without its header"));
        };
        if len > FRAME_MAX as u64 {
            return Err(Nonsense("a frame of more than 64 KiB"));
        }
        let mut header = [0; HEADER];
        request.read(0, &mut header)?;
        let mut frame = vec![0; len as usize];
        request.read(HEADER as u64, &mut frame)?;
        if header[0] & NEEDS_CSUM != 0 {
            let word = |at: usize| usize::from(u16::from_le_bytes([header[at], header[at + 1]]));
            if !fill_checksum(&mut frame, word(6), word(8)) {
                return Err(Nonsense("a checksum outside of its frame"));
            }
        }
        // Neither an empty frame nor one that the back end refuses is the guest's concern: a cable loses frames.
        if frame.len() >= ETHERNET {
            let _ = self.options.out.write_all(&frame);
        }
        Ok(0)
    }
}

/// The Internet checksum (RFC 1071) of what lies behind `start`, to `start + offset`. The driver has put the sum of the pseudo header there.
fn fill_checksum(frame: &mut [u8], start: usize, offset: usize) -> bool {
    let at = start + offset;
    if at + 2 > frame.len() {
        return false;
    }
    let words = frame[start..].chunks(2);
    let sum: u64 = words
        .map(|word| u64::from(u16::from_be_bytes([word[0], word.get(1).copied().unwrap_or(0)])))
        .sum();
    let sum = (sum & 0xffff) + (sum >> 16 & 0xffff) + (sum >> 32);
    let sum = (sum & 0xffff) + (sum >> 16);
    let sum = !((sum & 0xffff) + (sum >> 16)) as u16;
    // In UDP 0 means that there is none.
    let sum = if sum == 0 { 0xffff } else { sum };
    frame[at..at + 2].copy_from_slice(&sum.to_be_bytes());
    true
}

impl Device for Net {
    fn id(&self) -> u32 {
        VIRTIO_ID_NET
    }

    fn features(&self) -> u64 {
        let mtu = if self.options.mtu.is_some() { F_MTU } else { 0 };
        let trusted = if self.options.trusted { F_GUEST_CSUM } else { 0 };
        F_CSUM | F_MAC | F_STATUS | mtu | trusted
    }

    fn queues(&self) -> &[u16] {
        &QUEUES
    }

    /// 5.1.4 "Device configuration layout": address, status, pairs of queues (which are not offered), and the greatest packet.
    fn config(&self) -> Vec<u8> {
        let mut config = self.options.mac.to_vec();
        config.extend(LINK_UP.to_le_bytes());
        config.extend(1u16.to_le_bytes());
        config.extend(self.options.mtu.unwrap_or(1500).to_le_bytes());
        config
    }

    fn negotiated(&mut self, features: u64) {
        self.state.features = features;
    }

    fn readiness(&self, queue: usize) -> Readiness {
        match (queue, self.state.waiting.is_empty()) {
            (RECEIVE, true) => Readiness::Nothing,
            (RECEIVE, false) => Readiness::Waiting,
            _ => Readiness::OnRequest,
        }
    }

    fn input(&mut self, _: u32, frame: &[u8], live: bool) -> Taken {
        if !live || frame.len() < ETHERNET || frame.len() > FRAME_MAX {
            return Taken::Dropped;
        }
        if self.bytes + frame.len() > WAITING {
            return Taken::Bytes(0);
        }
        self.bytes += frame.len();
        self.state.waiting.push_back(frame.to_vec());
        Taken::Bytes(frame.len())
    }

    fn request(&mut self, queue: usize, request: &mut Request) -> Result<u32, Nonsense> {
        match queue {
            RECEIVE => self.receive(request),
            _ => self.transmit(request),
        }
    }

    fn reset(&mut self) {
        self.state = NetState::default();
        self.bytes = 0;
    }

    fn state(&self) -> DeviceState {
        DeviceState::Net(self.state.clone())
    }

    fn set_state(&mut self, state: &DeviceState) {
        if let DeviceState::Net(state) = state {
            self.bytes = state.waiting.iter().map(Vec::len).sum();
            self.state = state.clone();
        }
    }
}

#[cfg(test)]
#[path = "net_test.rs"]
mod tests;
