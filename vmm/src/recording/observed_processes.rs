//! What an observer reports of the threads and processes that its vCPU runs, and which of them are recorded.

use trace::format::COMM;
use x86::watch::{CodeSize, Processor};

use super::encoder::Job;
use super::guest_memory::Physical;
use super::observer::{GuestTable, Observer};
use super::state::lock;

/// VMCSs of which it is remembered on which page tables their guests run.
const MOST_GUESTS: usize = 1 << 12;

impl Observer {
    /// A guest of a hypervisor in the machine runs, or goes to another page table: the one that it comes from has a name.
    pub(super) fn name_guest(&mut self, cpu: &mut dyn Processor) {
        let context = cpu.context();
        let Some(vmcs) = context.vmcs.filter(|_| context.non_root) else {
            return;
        };
        let step = cpu.step();
        let mut linux = lock(&self.shared.linux);
        linux.guests.entered(&mut Physical(cpu), vmcs, step);
        if self.guest_tables.len() >= MOST_GUESTS {
            self.guest_tables.clear();
        }
        let page_table = context.cr3 & !0x1fff;
        let nameless = true;
        let before = self.guest_tables.insert(vmcs, GuestTable { page_table, nameless });
        match before {
            Some(before) if before.page_table == page_table => drop(self.guest_tables.insert(vmcs, before)),
            Some(before) => linux.new |= linux.guests.switched(&mut Physical(cpu), vmcs, before.page_table, step),
            None => {}
        }
    }

    /// The same of a guest's process that begins to run a program, as [`Observer::name_program`] has it.
    fn name_guests_program(&mut self, vmcs: u64, cpu: &mut dyn Processor) {
        let Some(table) = self.guest_tables.get_mut(&vmcs).filter(|table| table.nameless) else {
            return;
        };
        table.nameless = false;
        let (page_table, step) = (table.page_table, cpu.step());
        let mut linux = lock(&self.shared.linux);
        linux.new |= linux.guests.switched(&mut Physical(cpu), vmcs, page_table, step);
    }

    /// A Linux guest goes to another page table: the one that it comes from has a name.
    pub(super) fn name_process(&mut self, cpu: &mut dyn Processor) {
        let context = cpu.context();
        if context.non_root {
            return self.name_guest(cpu);
        }
        // Of the two page tables of a process the kernel's is the first.
        let table = context.cr3 & !0x1fff;
        let before = std::mem::replace(&mut self.page_table, table);
        if before != table {
            self.names(before, cpu);
            self.nameless = true;
        }
    }

    /// The same of a process that begins to run a program: it may have ended, and its name with it, before it goes anywhere else.
    pub(super) fn name_program(&mut self, cpu: &mut dyn Processor) {
        if !self.nameless && self.guest_tables.is_empty() {
            return;
        }
        let context = cpu.context();
        if context.cpl != 3 {
            return;
        }
        if let Some(vmcs) = context.vmcs.filter(|_| context.non_root) {
            return self.name_guests_program(vmcs, cpu);
        }
        if self.nameless {
            self.nameless = false;
            self.names(self.page_table, cpu);
        }
    }

    /// Linux is about to go over to another thread. The `task_struct` of the one that ran is the first argument, that of the other the
    /// second: RDI and RSI, or EAX and EDX of 32-bit kernels (`-mregparm=3`).
    pub(super) fn name_thread(&mut self, cpu: &mut dyn Processor) {
        let (before, next) = match cpu.context().code {
            CodeSize::Bits64 => (cpu.gpr(7), cpu.gpr(6)),
            CodeSize::Bits16 | CodeSize::Bits32 => (cpu.gpr(0) & 0xffff_ffff, cpu.gpr(2) & 0xffff_ffff),
        };
        // Where recording has begun under way, nobody has said which thread ran.
        let first = !std::mem::replace(&mut self.thread_is_known, true);
        for at in first.then_some(before).into_iter().chain([next]) {
            self.tell_thread(at, cpu);
        }
    }

    fn tell_thread(&mut self, task_struct: u64, cpu: &mut dyn Processor) {
        let step = cpu.step();
        let task = {
            let mut linux = lock(&self.shared.linux);
            let Some((task, new)) = linux.recording.thread(&mut Physical(cpu), task_struct, step) else {
                return;
            };
            linux.new |= new;
            task
        };
        let admits = self.wanted.as_ref().map(|wanted| wanted.has(&task));
        let mut name = [0; COMM];
        let mut len = task.comm.len().min(COMM - 1);
        while !task.comm.is_char_boundary(len) {
            len -= 1;
        }
        name[..len].copy_from_slice(&task.comm.as_bytes()[..len]);
        let job = Job::Thread {
            tid: task.pid,
            tgid: task.tgid,
            comm: name,
            admits,
        };
        self.post(job, cpu);
    }

    /// Where processes are chosen: whether the one that runs is one of them.
    pub(super) fn admits_current(&mut self, cpu: &mut dyn Processor) -> Option<bool> {
        let wanted = self.wanted.as_ref()?;
        let task = {
            let linux = lock(&self.shared.linux);
            let kernel = linux.recording.kernel();
            kernel.and_then(|kernel| kernel.current(&mut Physical(cpu), self.cpu))
        };
        // Where nobody knows who runs, it is nobody who was asked for.
        Some(task.is_some_and(|task| wanted.has(&task)))
    }

    pub(super) fn names(&self, page_table: u64, cpu: &mut dyn Processor) {
        let steps = cpu.step();
        let mut linux = lock(&self.shared.linux);
        linux.new |= linux
            .recording
            .switched(&mut Physical(cpu), self.cpu, page_table, steps);
    }
}
