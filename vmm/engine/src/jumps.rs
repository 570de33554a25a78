//! Where the targets of recent indirect branches were decoded: a processor's own cache in front of the blocks.

use crate::op::Op;

pub(crate) const ENTRIES: usize = 32768;

/// Where the blocks of recent indirect branches begin.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct Jump {
    pub linear: u64,
    /// The host page the block was decoded from: the entry holds while the TLB still leads there.
    pub host: u64,
    pub ops: *const Op,
    pub mode: u64,
}

#[repr(transparent)]
pub(crate) struct JumpCache(Box<[Jump; ENTRIES]>);

impl JumpCache {
    pub fn new() -> JumpCache {
        let none = Jump {
            linear: 0,
            host: 0,
            ops: core::ptr::null(),
            mode: u64::MAX,
        };
        JumpCache(
            vec![none; ENTRIES]
                .into_boxed_slice()
                .try_into()
                .ok()
                .expect("length is ENTRIES"),
        )
    }

    fn index(linear: u64) -> usize {
        (linear ^ linear >> 12) as usize & (ENTRIES - 1)
    }

    #[inline(always)]
    pub fn entry(&self, linear: u64) -> &Jump {
        &self.0[Self::index(linear)]
    }

    pub fn set(&mut self, linear: u64, host: u64, ops: *const Op, mode: u32) {
        self.0[Self::index(linear)] = Jump {
            linear,
            host,
            ops,
            mode: mode as u64,
        };
    }

    pub fn clear(&mut self) {
        for j in self.0.iter_mut() {
            j.mode = u64::MAX;
        }
    }
}
