//! Which MSRs stay in KVM, in the form that KVM_X86_SET_MSR_FILTER takes: at most 16 ranges, each with a bitmap of at most 600H bytes.
//! Documentation/virt/kvm/api.rst 4.97 "KVM_X86_SET_MSR_FILTER".

/// Registers that a range spans at most.
const SPAN: u32 = 0x600 * 8;

/// A range: its first register, and a bit for each from there on, set where the register stays in KVM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Allowed {
    pub base: u32,
    pub count: u32,
    pub bitmap: Vec<u8>,
}

/// As few ranges as these registers take, each given as the first and how many.
pub(crate) fn allowed(registers: impl IntoIterator<Item = (u32, u32)>) -> Vec<Allowed> {
    let mut registers: Vec<(u32, u32)> = registers.into_iter().collect();
    registers.sort_unstable();
    let mut ranges: Vec<Allowed> = Vec::new();
    for msr in registers
        .into_iter()
        .flat_map(|(first, count)| first..first.saturating_add(count))
    {
        if ranges.last().is_none_or(|range| msr - range.base >= SPAN) {
            ranges.push(Allowed {
                base: msr,
                count: 0,
                bitmap: Vec::new(),
            });
        }
        if let Some(range) = ranges.last_mut() {
            let bit = msr - range.base;
            range.count = range.count.max(bit + 1);
            // KVM reads whole words of 64 bits.
            range.bitmap.resize(range.count.div_ceil(64) as usize * 8, 0);
            range.bitmap[bit as usize / 8] |= 1 << (bit % 8);
        }
    }
    ranges
}

#[cfg(test)]
#[path = "msr_filter_test.rs"]
mod tests;
