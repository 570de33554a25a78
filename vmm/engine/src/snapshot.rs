//! What a snapshot needs beside [`CpuState`]: pages that have been written, and what processors remember of
//! page tables.
//!
//! Decoded code and the links within it are not state: whatever of it there is, a guest sees the same.

use core::ptr::NonNull;

use crate::bus::Bus;
use crate::cpu::{Cpu, CpuState};
use crate::step::Engine;
use crate::tlb::Translations;

impl Engine {
    /// Guest-physical addresses of the pages of RAM that processors, units and [`Engine::written`] may have written since this
    /// was last asked, ascending; the first time, since the engine was made.
    pub fn take_dirty(&mut self) -> Vec<u64> {
        self.shared.ram.take_dirty()
    }

    /// What a processor remembers of page tables.
    pub fn translations(&self, cpu: &Cpu) -> Translations {
        let watched = &cpu.watched;
        Translations {
            ranges: watched.interest.ranges.then(|| watched.ranges.clone()),
            every_access: watched.interest.every_access,
            code: watched.interest.code,
            ..cpu.tlb.state(|host| self.shared.ram.gpa(host))
        }
    }

    /// A processor's whole state, as [`Cpu::state`] but for a monitored line that has been stored to: the processor, which hears of it
    /// when it looks next, has it disarmed here. So runs that are the same have the same states, whenever their processors look.
    pub fn state_of(&self, cpu: &Cpu) -> CpuState {
        let mut state = cpu.state();
        if let (Some(line), Some(seen)) = (state.monitor.line, cpu.monitor_seen)
            && self.shared.lines.known(line) != Some(seen)
        {
            state.monitor.line = None;
        }
        state
    }

    /// Disarms a monitored line that has been stored to, of which the processor would hear when it looks next. Its state then
    /// says so.
    pub fn look_at_line(&mut self, cpu: &mut Cpu, bus: &mut dyn Bus) {
        cpu.attach(NonNull::from(&mut *self.shared), bus);
        cpu.look_at_line();
        cpu.detach();
    }

    /// After [`Cpu::set_state`]: the processor remembers page tables as another one did. A translation of what is no RAM here is
    /// left out.
    pub fn set_translations(&self, cpu: &mut Cpu, translations: &Translations) {
        cpu.tlb
            .set_state(translations, |gpa| self.shared.ram.place(gpa).map(|host| host as u64));
        // What the units want is compared with this when they are asked next.
        let watched = &mut cpu.watched;
        watched.generation = None;
        watched.interest.ranges = translations.ranges.is_some();
        watched.ranges.clear();
        watched.ranges.extend(translations.ranges.iter().flatten());
        watched.interest.every_access = translations.every_access;
        watched.interest.code = translations.code;
        cpu.mode = u32::MAX;
    }
}
