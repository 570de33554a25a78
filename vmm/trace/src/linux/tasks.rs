//! Processes: `struct task_struct`. include/linux/sched.h of Linux 6.1.

use super::{
    budget::{Budget, Look},
    kernel::Kernel,
    layouts::TaskLayout,
    memory::Memory,
};

/// More would be a list that does not close.
const MOST: usize = 1 << 18;
/// `TASK_COMM_LEN` of include/linux/sched.h.
const COMM: usize = 16;
/// A process, in steps: what is kept of it, about.
const STEPS: u64 = 256;
/// All processes, and what is read of page tables on the way to them.
const LIST: Budget = Budget {
    bytes: 256 << 20,
    steps: MOST as u64 * STEPS,
};
/// One of them.
const ONE: Budget = Budget {
    bytes: 64 << 10,
    steps: STEPS,
};

/// A process, or one of its threads.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Task {
    /// The thread's number.
    pub pid: u32,
    /// The process's number.
    pub tgid: u32,
    /// Its name, at most 15 bytes; what is no UTF-8 is replaced.
    pub comm: String,
    /// The physical address of its page tables: CR3 without its low 12 bits, in user mode with page-table isolation without bit 12, too. Kernel
    /// threads have none.
    pub page_table: Option<u64>,
}

impl Kernel {
    /// All processes but the idle one, in the order of `/proc` until numbers wrap.
    pub fn tasks(&self, memory: &mut dyn Memory) -> Vec<Task> {
        self.tasks_within(&mut Look::new(memory, LIST))
    }

    fn tasks_within(&self, memory: &mut Look<'_>) -> Vec<Task> {
        let mut found = Vec::new();
        let (Some(layout), Some(init)) = (&self.types.tasks, self.symbols.address("init_task")) else {
            return found;
        };
        let head = init.wrapping_add(layout.tasks);
        let mut at = self.image_word(memory, head);
        while let Some(link) = at.filter(|link| *link != head && found.len() < MOST) {
            let Some(task) = self.task(memory, layout, link.wrapping_sub(layout.tasks)) else {
                break;
            };
            found.push(task);
            at = self.word(memory, link);
        }
        found
    }

    /// The task that a CPU runs; CPUs by Linux's numbers.
    pub fn current(&self, memory: &mut dyn Memory, cpu: usize) -> Option<Task> {
        let memory = &mut Look::new(memory, ONE);
        let at = self.current_address(memory, cpu)?;
        self.task(memory, self.types.tasks.as_ref()?, at)
    }

    /// Where the `task_struct` of the task that a CPU runs is.
    pub(super) fn current_address(&self, memory: &mut Look<'_>, cpu: usize) -> Option<u64> {
        let (offsets, variable) = self.types.tasks.as_ref()?.current?;
        let offset = self.image_word(memory, offsets.wrapping_add(8 * cpu as u64))?;
        self.word(memory, variable.wrapping_add(offset))
    }

    /// The task whose `task_struct` is at a kernel's virtual address.
    pub fn task_at(&self, memory: &mut dyn Memory, at: u64) -> Option<Task> {
        let layout = self.types.tasks.as_ref()?;
        self.task(&mut Look::new(memory, ONE), layout, at)
    }

    fn task(&self, memory: &mut Look<'_>, layout: &TaskLayout, at: u64) -> Option<Task> {
        let mut comm = [0; COMM];
        if !memory.spend(STEPS) || !self.read_within(memory, at.wrapping_add(layout.comm), &mut comm) {
            return None;
        }
        let len = comm.iter().position(|byte| *byte == 0).unwrap_or(comm.len());
        let mm = self.word(memory, at.wrapping_add(layout.mm))?;
        let page_table = if mm == 0 {
            None
        } else {
            let pgd = self.word(memory, mm.wrapping_add(layout.pgd))?;
            self.paging.translate(memory, pgd).map(|(at, _)| at)
        };
        Some(Task {
            pid: self.half(memory, at.wrapping_add(layout.pid))?,
            tgid: self.half(memory, at.wrapping_add(layout.tgid))?,
            comm: String::from_utf8_lossy(&comm[..len.min(COMM - 1)]).into_owned(),
            page_table,
        })
    }
}
