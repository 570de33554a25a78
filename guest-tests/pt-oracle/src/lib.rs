//! What Intel PT decoding is judged by, for tests and benches alone.
//!
//! - [`libipt`]: Intel's own decoder (Debian's libipt-dev 2.0.5), with its errata off. It does not know CFE and EVD packets.
//! - [`program`]: random programs of real x86 code, and walks through them.
//! - [`tracer`]: a small, plain encoder, which writes what a processor would of such a walk.
//! - [`vmx`]: the same of a guest that walks and of its host.

pub mod libipt;
pub mod program;
pub mod tracer;
pub mod vmx;

/// Random numbers from a seed (SplitMix64).
#[derive(Clone, Debug)]
pub struct Random(pub u64);

impl Random {
    /// The next number.
    pub fn draw(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    }

    /// A number below `bound`, which is not 0.
    pub fn below(&mut self, bound: usize) -> usize {
        (self.draw() % bound as u64) as usize
    }

    /// True once in `times`.
    pub fn one_in(&mut self, times: usize) -> bool {
        self.below(times) == 0
    }

    /// One of them.
    pub fn of<'a, T>(&mut self, choices: &'a [T]) -> &'a T {
        &choices[self.below(choices.len())]
    }
}
