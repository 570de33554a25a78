//! The run loop: finds or decodes the block at RIP, runs the chain that begins there, and sees to what ended it.
// The engine core is one of the rooms where `unsafe` is allowed: see `op`.
#![allow(unsafe_code)]

use core::ptr::NonNull;

use x86::model::CpuModel;

use crate::block::STALE;
use crate::bus::Bus;
use crate::core::{Core, RamRegion};
use crate::cpu::{Activity, CS, Cpu, Event, Source as EventSource};
use crate::decode::{self, MAX, Shown, Source, Trouble};
use crate::mmu::{self, Access};
use crate::op::{Done, Op, Reason, Stop, enter_chain};
use crate::{Exit, HostLacks, Options};

/// The software CPU: memory map, code cache, instruction set. Processors ([`Cpu`]) run on it in turn.
pub struct Engine {
    core: Box<Core>,
    shown: Shown,
    options: Options,
    /// Ops of the block being decoded, and of blocks that are run once.
    scratch: Vec<Op>,
}

/// Faults in a row without a step after which [`Engine::run`] returns.
const MAX_FAULTS: u32 = 1000;

/// How long the block at RIP may be.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Length {
    /// Whole, and kept.
    Whole,
    /// At most so many instructions, then pause; not kept.
    Cut(usize),
}

impl Engine {
    /// An engine for one machine.
    ///
    /// # Errors
    /// [`HostLacks`] when the model has instructions that run on the host's own vector unit and the host has not got them.
    ///
    /// # Safety
    /// Each region's `len` bytes at `host` must stay mapped, readable and writable, for as long as the engine lives, and
    /// `host` and `gpa` must be 4-KiB aligned. Nobody may hold Rust references into them while [`Engine::run`] runs.
    pub unsafe fn new(ram: Vec<RamRegion>, model: &'static CpuModel, options: Options) -> Result<Engine, HostLacks> {
        crate::host_can(model, options)?;
        Ok(Engine {
            core: Box::new(Core::new(&ram)),
            shown: Shown::new(model, options.undefined),
            options,
            scratch: Vec::new(),
        })
    }

    /// Somebody other than a processor of this engine wrote guest RAM: drops code decoded from it.
    pub fn written(&mut self, gpa: u64, len: u64) {
        self.core.written(gpa, len, STALE);
    }

    /// Runs a processor for at most `budget` steps (instructions and REP iterations).
    pub fn run(&mut self, cpu: &mut Cpu, bus: &mut dyn Bus, budget: u64) -> Exit {
        let budget = budget.min(i64::MAX as u64 / 2) as i64;
        cpu.undefined = self.options.undefined;
        cpu.attach(NonNull::from(&mut *self.core), bus);
        cpu.budget = budget;
        cpu.granted = budget;
        cpu.bus_used = false;
        self.catch_up(cpu);
        let exit = self.run_attached(cpu);
        let used = (cpu.granted - cpu.budget) as u64;
        cpu.budget = 0;
        cpu.granted = 0;
        cpu.steps += used;
        cpu.clock = cpu.clock.wrapping_add(used);
        cpu.detach();
        exit
    }

    /// Delivers an external interrupt; only while [`Cpu::interruptible`].
    pub fn interrupt(&mut self, cpu: &mut Cpu, bus: &mut dyn Bus, vector: u8) {
        self.inject(
            cpu,
            bus,
            Event {
                vector,
                error: None,
                source: EventSource::External,
            },
        );
    }

    /// Delivers a non-maskable interrupt; only while [`Cpu::nmi_deliverable`].
    pub fn nmi(&mut self, cpu: &mut Cpu, bus: &mut dyn Bus) {
        self.inject(
            cpu,
            bus,
            Event {
                vector: 2,
                error: None,
                source: EventSource::Nmi,
            },
        );
        cpu.nmi_blocked = true;
    }

    /// Forgets what the processor knows of blocks that are gone, and recomputes its mode if that is out of date.
    fn catch_up(&mut self, cpu: &mut Cpu) {
        if cpu.generation != self.core.generation {
            cpu.generation = self.core.generation;
            cpu.jumps.clear();
            cpu.mode = u32::MAX;
        }
        if cpu.mode == u32::MAX {
            cpu.refresh_mode();
        }
        cpu.revoke_new_code();
    }

    fn inject(&mut self, cpu: &mut Cpu, bus: &mut dyn Bus, event: Event) {
        cpu.attach(NonNull::from(&mut *self.core), bus);
        self.catch_up(cpu);
        cpu.activity = Activity::Running;
        self.deliver(cpu, event);
        cpu.detach();
    }

    /// Delivers an event and whatever exceptions its delivery raises, up to the triple fault
    /// (SDM Vol. 3A 7.15 "Exception and Interrupt Reference", "Interrupt 8—Double Fault Exception").
    fn deliver(&mut self, cpu: &mut Cpu, first: Event) {
        let mut event = first;
        loop {
            cpu.event = None;
            if cpu.deliver(event).is_ok() && !core::mem::take(&mut cpu.late_fault) {
                cpu.event = None;
                if !core::mem::take(&mut cpu.task_trap) {
                    return;
                }
                event = cpu.task_switch_trap();
                continue;
            }
            let Some(next) = cpu.event.take() else { return };
            if event.vector == 8 && event.source == EventSource::Exception {
                cpu.activity = Activity::Shutdown;
                return;
            }
            event = match (class(event), class(next)) {
                (Class::Contributory, Class::Contributory)
                | (Class::PageFault, Class::Contributory | Class::PageFault) => Event {
                    vector: 8,
                    error: Some(0),
                    source: EventSource::Exception,
                },
                _ => next,
            };
        }
    }

    fn run_attached(&mut self, cpu: &mut Cpu) -> Exit {
        // Budget at the last fault, and faults since a step was made: a guest whose exceptions never end makes no steps, and
        // must not keep the caller from looking at its own limits.
        let (mut faulted_at, mut faults) = (i64::MAX, 0);
        loop {
            match cpu.activity {
                Activity::Running => {}
                Activity::Halted | Activity::WaitForSipi => return Exit::Halt,
                Activity::Shutdown => return Exit::Shutdown,
            }
            if cpu.budget <= 0 {
                return Exit::Budget;
            }
            if cpu.want_window
                && cpu.rflags & (1 << 9) != 0
                && cpu.shadow_at != cpu.steps + (cpu.granted - cpu.budget) as u64
            {
                return Exit::Window;
            }
            let stepping = cpu.rflags & (1 << 8) != 0;
            // A shadow lasts one instruction; whoever waits for the window wants to hear right after it.
            let shadowed = cpu.want_window && cpu.rflags & (1 << 9) != 0;
            let length = if stepping || shadowed {
                Length::Cut(1)
            } else {
                Length::Whole
            };
            let mut reason = if cpu.virtual_interrupt_due() {
                let Stop = cpu.gp(0);
                Reason::Fault
            } else {
                self.chain(cpu, length)
            };
            if reason == Reason::Budget && length == Length::Whole {
                reason = self.chain(cpu, Length::Cut(cpu.budget.max(1) as usize));
            }
            if reason == Reason::Replay {
                if cpu.budget <= 0 {
                    return Exit::Budget;
                }
                reason = self.chain(cpu, Length::Cut(1));
            }
            match reason {
                Reason::Fault => {
                    let event = cpu.event.take().unwrap_or(Event {
                        vector: 6,
                        error: None,
                        source: EventSource::Exception,
                    });
                    self.deliver(cpu, event);
                    faults = if faulted_at == cpu.budget { faults + 1 } else { 0 };
                    faulted_at = cpu.budget;
                    if faults == MAX_FAULTS {
                        return Exit::Bus;
                    }
                }
                Reason::Replay => {
                    return Exit::Defect(format!(
                        "the instruction at {:#x} asks for a block of its own within one",
                        cpu.rip
                    ));
                }
                _ if core::mem::take(&mut cpu.task_trap) => {
                    let event = cpu.task_switch_trap();
                    self.deliver(cpu, event);
                }
                _ if stepping && !cpu.skip_step || cpu.trap_now => {
                    // Single-step trap, after the instruction (SDM Vol. 3B 19.3.1.4 "Single-Step Exception Condition").
                    cpu.dr[6] |= 1 << 14;
                    self.deliver(
                        cpu,
                        Event {
                            vector: 1,
                            error: None,
                            source: EventSource::Exception,
                        },
                    );
                }
                _ => {}
            }
            cpu.skip_step = false;
            cpu.trap_now = false;
            let paused = core::mem::take(&mut cpu.paused);
            if core::mem::take(&mut cpu.bus_used) {
                return Exit::Bus;
            }
            if paused {
                return Exit::Pause;
            }
        }
    }

    /// Runs the chain that begins at RIP, and says what ended it.
    fn chain(&mut self, cpu: &mut Cpu, length: Length) -> Reason {
        let link = core::mem::replace(&mut cpu.link, core::ptr::null_mut());
        let generation = self.core.generation;
        let (first, host) = match self.find(cpu, length) {
            Ok(found) => found,
            Err(Stop) => return Reason::Fault,
        };
        if !link.is_null() && length == Length::Whole && generation == self.core.generation {
            self.core.set_link(link, first, host);
        }
        // SAFETY: `find` returns the first op of a live block.
        let n = unsafe { (*first).rem } as i64;
        if n > cpu.budget {
            return Reason::Budget;
        }
        // What is cut short must not run on into blocks it jumps to: the rest of the budget is put aside.
        let rest = if length == Length::Whole { 0 } else { cpu.budget - n };
        cpu.granted -= rest;
        cpu.budget -= n + rest;
        cpu.solo = length == Length::Cut(1);
        cpu.stop = Reason::Resolve;
        cpu.second_page_moved = false;
        // SAFETY: As above.
        unsafe { enter_chain(cpu, first) };
        cpu.solo = false;
        cpu.granted += rest;
        cpu.budget += rest;
        if cpu.second_page_moved {
            let mut next = cpu.rip.wrapping_add(cpu.cs_base) & !0xfff;
            next = next.wrapping_add(0x1000);
            if !cpu.is64() {
                next &= 0xffff_ffff;
            }
            let Ok((_, now)) = self.fetch(cpu, next) else {
                return Reason::Fault;
            };
            // SAFETY: As above; a straddling block begins with the check that failed, and the check names the page.
            let moved = unsafe { (*first).imm } != now as u64;
            let linear = cpu.rip.wrapping_add(cpu.cs_base);
            if moved && let Ok((gpa, _)) = self.fetch(cpu, linear) {
                self.core.forget(gpa | linear & 0xfff, cpu.mode);
            }
        }
        cpu.stop
    }

    /// The block at RIP, with its host page; decodes it if need be. `Err`: the fetch faults.
    fn find(&mut self, cpu: &mut Cpu, length: Length) -> Done<(*const Op, u64)> {
        let linear = cpu.rip.wrapping_add(cpu.cs_base);
        let linear = if cpu.is64() { linear } else { linear & 0xffff_ffff };
        let limit = if cpu.is64() {
            u64::MAX
        } else {
            (cpu.seg[CS].limit as u64 + 1).saturating_sub(cpu.rip)
        };
        // The limit is checked before the address is translated, here and for the second page.
        if limit == 0 {
            return Err(cpu.gp(0));
        }
        let (gpa, host) = self.fetch(cpu, linear)?;
        cpu.set_page(cpu.rip.wrapping_sub(linear & 0xfff));
        let at = gpa | linear & 0xfff;
        if length == Length::Whole
            && let Some(first) = self.core.block(at, cpu.mode)
        {
            cpu.jumps.set(linear, host as u64, first, cpu.mode);
            return Ok((first, host as u64));
        }
        if self.core.full() {
            self.core.flush();
            self.catch_up(cpu);
        }
        // SAFETY: `fetch` gave a page of guest RAM. Nothing writes it while this borrow lives: the processor is not running.
        let page = unsafe { core::slice::from_raw_parts(host.cast_const(), 0x1000) };
        let mut source = Source {
            page,
            next: None,
            next_host: 0,
            offset: (linear & 0xfff) as usize,
            limit,
            mode: cpu.mode,
            max: match length {
                Length::Whole => MAX,
                Length::Cut(n) => n.min(MAX),
            },
            pause: length != Length::Whole,
        };
        let mut second = None;
        let mut result = decode::decode(&self.shown, &source, &mut self.scratch);
        if matches!(result, Err(Trouble::NeedsSecondPage)) {
            if limit <= 0x1000 - (linear & 0xfff) {
                return Err(cpu.gp(0));
            }
            let mut next_linear = (linear & !0xfff).wrapping_add(0x1000);
            if !cpu.is64() {
                next_linear &= 0xffff_ffff;
            }
            let (gpa, host) = self.fetch(cpu, next_linear)?;
            // SAFETY: As for the first page.
            source.next = Some(unsafe { core::slice::from_raw_parts(host.cast_const(), 16) });
            source.next_host = host as u64;
            second = Some(gpa);
            result = decode::decode(&self.shown, &source, &mut self.scratch);
            // The first page must still be in the TLB beside it: they differ in their lowest page bit, so it is.
        }
        let decoded = match result {
            Ok(decoded) => decoded,
            Err(_) => return Err(cpu.gp(0)),
        };
        if length != Length::Whole {
            if length != Length::Cut(1) {
                self.core.mark_bytes(at, decoded.bytes);
                cpu.revoke_new_code();
            }
            return Ok((self.scratch.as_ptr(), host as u64));
        }
        let first = self.core.insert(
            at,
            cpu.mode,
            &self.scratch,
            decoded.bytes,
            second.map(|gpa| (gpa, decoded.second)),
        );
        cpu.revoke_new_code();
        cpu.jumps.set(linear, host as u64, first, cpu.mode);
        Ok((first, host as u64))
    }

    /// Translates a fetch: the page's guest-physical and host addresses.
    fn fetch(&mut self, cpu: &mut Cpu, linear: u64) -> Done<(u64, *mut u8)> {
        if cpu.is64() && !cpu.canonical(linear) {
            return Err(cpu.gp(0));
        }
        let e = cpu.tlb.entry(linear);
        if e.exec == linear & !0xfff
            && let Some(gpa) = self.core.gpa(e.host)
        {
            return Ok((gpa, e.host as *mut u8));
        }
        let paging = cpu.paging(cpu.cpl == 3);
        match mmu::walk(&mut self.core, &paging, linear, Access::Fetch) {
            Ok(page) => {
                // Code outside RAM: what is not there reads all ones, which is no instruction.
                let Some(host) = self.core.host(page.gpa) else {
                    return Err(cpu.ud());
                };
                let write = page.write && page.dirty && self.core.claim_write(page.gpa);
                cpu.tlb.fill(linear, host as u64, page.read, write, page.exec);
                cpu.tlb.note(linear, &page);
                Ok((page.gpa, host))
            }
            Err(code) => Err(cpu.page_fault(linear, code)),
        }
    }
}

#[derive(PartialEq, Eq)]
enum Class {
    Benign,
    Contributory,
    PageFault,
}

/// SDM Vol. 3A Table 7-4 "Interrupt and Exception Classes".
fn class(e: Event) -> Class {
    match (e.source, e.vector) {
        (EventSource::Exception, 0 | 10..=13) => Class::Contributory,
        (EventSource::Exception, 14) => Class::PageFault,
        _ => Class::Benign,
    }
}
