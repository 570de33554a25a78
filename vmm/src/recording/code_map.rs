//! Which code a vCPU's sideband has already: what the addresses that it executed lead to.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

/// Keys are addresses, which are spread well enough by a multiplication; who chooses them badly slows down nobody else.
#[derive(Clone, Copy, Default)]
pub(super) struct Mix(u64);

impl Hasher for Mix {
    fn finish(&self) -> u64 {
        self.0
    }
    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|byte| self.write_u64(u64::from(*byte)));
    }
    fn write_u64(&mut self, word: u64) {
        let product = u128::from(self.0 ^ word) * 0x9e37_79b9_7f4a_7c15;
        self.0 = product as u64 ^ (product >> 64) as u64;
    }
}

pub(super) type Map<K, V> = HashMap<K, V, BuildHasherDefault<Mix>>;

/// A page at an address.
pub(super) type Key = (u64, u64);

/// What an address leads to.
#[derive(Clone, Copy, Debug)]
pub(super) struct CodeMapping {
    /// The physical page.
    pub gpa: u64,
    /// The content that was reported.
    pub hash: u128,
    /// Since which beginning that is certain.
    pub epoch: u32,
}

/// What was reported in this segment.
#[derive(Debug, Default)]
pub(super) struct CodeMap {
    /// By address.
    pub addresses: Map<Key, CodeMapping>,
    /// Which addresses lead to a physical page.
    pub of_page: Map<u64, Vec<Key>>,
}

impl CodeMap {
    /// Nothing is reported.
    pub fn clear(&mut self) {
        self.addresses.clear();
        self.of_page.clear();
    }

    /// Only the kernel's code is reported.
    pub fn forget_user_code(&mut self) {
        self.addresses.retain(|key, _| key.0 == 0);
        self.of_page.values_mut().for_each(|keys| keys.retain(|key| key.0 == 0));
    }

    /// The address leads to this page from here on; gives what it led to.
    pub fn insert(&mut self, key: Key, mapping: CodeMapping) -> Option<CodeMapping> {
        let before = self.addresses.insert(key, mapping);
        if before.is_some_and(|before| before.gpa == mapping.gpa) {
            return before;
        }
        self.of_page.entry(mapping.gpa).or_default().push(key);
        if let Some(before) = before
            && let Some(keys) = self.of_page.get_mut(&before.gpa)
        {
            keys.retain(|other| *other != key);
        }
        before
    }
}
