//! The entropy device (5.4 "Entropy Device"), fed from a seed: whoever knows the seed knows the bytes, and a run repeats.

use virtio_bindings::virtio_ids::VIRTIO_ID_RNG;

use super::{Device, DeviceState, Nonsense, Request};
use crate::random::Random;

/// A request gets at most so many bytes, which bounds what one notification costs. A driver asks again for more.
const MOST: u64 = 64 << 10;

/// The device.
#[derive(Debug)]
pub struct Rng {
    random: Random,
}

impl Rng {
    /// A source with the sequence of `random`.
    pub fn new(random: Random) -> Self {
        Rng { random }
    }
}

impl Device for Rng {
    fn id(&self) -> u32 {
        VIRTIO_ID_RNG
    }

    fn features(&self) -> u64 {
        0
    }

    fn queues(&self) -> &'static [u16] {
        &[64]
    }

    fn config(&self) -> Vec<u8> {
        Vec::new()
    }

    fn negotiated(&mut self, _: u64) {}

    fn request(&mut self, _: usize, request: &mut Request) -> Result<u32, Nonsense> {
        if request.readable() > 0 {
            return Err(Nonsense("a buffer to read in a request for entropy"));
        }
        let len = request.writable().min(MOST);
        let words = (0..len.div_ceil(8)).map(|_| self.random.draw().to_le_bytes());
        let bytes: Vec<u8> = words.flatten().take(len as usize).collect();
        request.write(0, &bytes)?;
        Ok(len as u32)
    }

    fn state(&self) -> DeviceState {
        DeviceState::Rng(self.random)
    }

    fn set_state(&mut self, state: &DeviceState) {
        if let DeviceState::Rng(random) = state {
            self.random = *random;
        }
    }
}
