//! Which thread of Linux each vCPU runs, and since when: record 8 of the sideband.

use std::collections::HashMap;

use super::image::{Next, Side};
use super::trace::Trace;
use crate::directory::format::{COMM, Record};
use crate::directory::packets::Damage;

/// Switches that are kept of a vCPU: what is behind them has no threads.
const MOST: usize = 1 << 25;
/// Threads that are kept.
const MOST_THREADS: usize = 1 << 20;

/// A thread under one of its names, as a number that stays the same as long as the [`ThreadSwitches`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ThreadId(u32);

/// A thread of Linux. One that gets another name counts as another.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Thread {
    /// Its number; 0 for those that are idle.
    pub tid: u32,
    /// Its process's number.
    pub tgid: u32,
    /// Its name, at most 15 bytes; what is no UTF-8 is replaced.
    pub comm: String,
}

/// When each vCPU went over to which thread.
#[derive(Debug, Default)]
pub struct ThreadSwitches {
    threads: Vec<Thread>,
    /// Of each vCPU: steps and threads, in their order.
    cpus: Vec<Vec<(u64, ThreadId)>>,
}

impl ThreadSwitches {
    /// A thread by its number.
    pub fn thread(&self, id: ThreadId) -> &Thread {
        &self.threads[id.0 as usize]
    }

    /// The thread that a vCPU runs, or is about to run, at a step of the machine; `None` before the first switch.
    pub fn at(&self, cpu: usize, step: u64) -> Option<ThreadId> {
        let switches = self.cpus.get(cpu)?;
        let after = switches.partition_point(|(at, _)| *at <= step);
        Some(switches.get(after.checked_sub(1)?)?.1)
    }

    /// The thread before the one that a vCPU goes over to at a step.
    pub fn before(&self, cpu: usize, step: u64) -> Option<ThreadId> {
        let switches = self.cpus.get(cpu)?;
        let after = switches.partition_point(|(at, _)| *at <= step);
        Some(switches.get(after.checked_sub(2)?)?.1)
    }

    /// Whether another vCPU went over to the thread behind step `from` and up to step `to`.
    pub fn ran_elsewhere(&self, tid: u32, cpu: usize, from: u64, to: u64) -> bool {
        self.cpus.iter().enumerate().any(|(other, switches)| {
            let first = switches.partition_point(|(at, _)| *at <= from);
            other != cpu
                && switches[first..]
                    .iter()
                    .take_while(|(at, _)| *at <= to)
                    .any(|(_, id)| self.thread(*id).tid == tid)
        })
    }
}

/// The name without what is behind it.
fn text(comm: &[u8; COMM]) -> String {
    let len = comm.iter().position(|byte| *byte == 0).unwrap_or(COMM - 1);
    String::from_utf8_lossy(&comm[..len]).into_owned()
}

impl Trace {
    /// Which threads the vCPUs ran, as far as the trace says.
    pub fn thread_switches(&self) -> ThreadSwitches {
        let mut all = ThreadSwitches::default();
        let mut known: HashMap<(u32, u32, [u8; COMM]), ThreadId> = HashMap::new();
        for cpu in 0..self.cpus() {
            let mut switches: Vec<(u64, ThreadId)> = Vec::new();
            let damage = Damage::default();
            let mut side = Side::new(self.folder(), cpu, self.segments(cpu));
            while let Some(next) = side.next(&damage) {
                let Next::Record(
                    Record::Thread {
                        step, tid, tgid, comm, ..
                    },
                    _,
                ) = next
                else {
                    continue;
                };
                if switches.len() == MOST || (known.len() == MOST_THREADS && !known.contains_key(&(tid, tgid, comm))) {
                    break;
                }
                let id = *known.entry((tid, tgid, comm)).or_insert_with(|| {
                    let comm = text(&comm);
                    all.threads.push(Thread { tid, tgid, comm });
                    ThreadId(all.threads.len() as u32 - 1)
                });
                // A clock does not go back; a directory may say that it does.
                if switches.last().is_none_or(|(last, _)| *last <= step) {
                    switches.push((step, id));
                }
            }
            all.cpus.push(switches);
        }
        all
    }
}
