//! What an observer has heard, on its way to the [`Encoder`].
//!
//! # Theory
//! The guest runs on while another thread makes packets of what it did. Everything goes in order, so the bytes are the same as where the
//! encoder does its work at once. Whatever depends on what was written is decided where it would be decided then: a segment ends
//! only after the encoder has caught up, and an error is heard of when the batch that it was met in comes back, which is at a fixed batch.
//!
//! # Practice
//! Jobs wait in a batch; a full batch goes to the thread, and at most [`UNDER_WAY`] of them are there at a time: with more the guest
//! waits. One thread serves all vCPUs. It begins with the first batch and not before: what holds for the thread of the machine by then, as
//! `--sandbox` does, holds for it, too.
//!
//! # Left out
//! Filters, `--trace-limit`, small rings and parts of a recording have no thread: with a filter the engine is asked for what the encoder's unit wants
//! next, the others are decided by bytes, and parts have a thread each of their own.

use std::collections::VecDeque;
use std::io;
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, Mutex};
use std::thread;

use x86::watch::{BranchRecord, Interest};

use super::encoder::{Encoder, Job};
use super::standing::Standing;
use super::state::lock;

/// Branch records of a batch.
const RECORDS: usize = 1 << 13;
/// Jobs of a batch.
const JOBS: usize = 1 << 10;
/// Batches of a vCPU that are with the thread at most.
const UNDER_WAY: usize = 3;
/// Bytes of packets that a branch record may come to, and any job besides: packets of time and a PSB with them.
const RECORD_BYTES: u64 = 32;
const JOB_BYTES: u64 = 1 << 11;

/// What is encoded at once.
#[derive(Debug, Default)]
struct Batch {
    jobs: Vec<(Job, Standing)>,
    /// Those of [`Job::Branches`], one after the other.
    records: Vec<BranchRecord>,
    /// Bytes of packets that it comes to at most.
    at_most: u64,
}

impl Batch {
    /// Has it all done; it is empty then.
    fn encode(&mut self, encoder: &mut Encoder) {
        let mut records = &self.records[..];
        for (job, at) in self.jobs.drain(..) {
            let count = match job {
                Job::Branches(count) => count,
                _ => 0,
            };
            let (these, rest) = records.split_at(count);
            encoder.run(job, these, at);
            records = rest;
        }
        self.records.clear();
    }
}

/// A batch that goes to the thread.
struct Task {
    encoder: Arc<Mutex<Encoder>>,
    batch: Batch,
    done: Sender<Done>,
}

/// A batch that comes back, empty.
#[derive(Debug)]
struct Done {
    batch: Batch,
    /// Bytes of packets until the segment is full.
    left: u64,
    error: Option<io::Error>,
}

impl Task {
    fn run(mut self) {
        let done = {
            let mut encoder = lock(&self.encoder);
            self.batch.encode(&mut encoder);
            Done {
                batch: self.batch,
                left: encoder.left(),
                error: encoder.take_error(),
            }
        };
        // Whoever is gone does not wait.
        let _ = self.done.send(done);
    }
}

/// The thread of a recording, which begins when it is needed.
#[derive(Debug, Default)]
pub(super) struct EncodingThread(Mutex<Option<Sender<Task>>>);

impl EncodingThread {
    /// Has it encode a batch; where there is no thread to be had, that is done here and now.
    fn send(&self, task: Task) {
        let mut to = lock(&self.0);
        if to.is_none() {
            let (send, tasks) = mpsc::channel::<Task>();
            let encode = move || tasks.into_iter().for_each(Task::run);
            if thread::Builder::new().name("trace".into()).spawn(encode).is_ok() {
                *to = Some(send);
            }
        }
        let left = match &*to {
            Some(send) => send.send(task).err().map(|mpsc::SendError(task)| task),
            None => Some(task),
        };
        if let Some(task) = left {
            task.run();
        }
    }
}

/// The queue of a vCPU.
#[derive(Debug)]
pub(super) struct Queue {
    encoder: Arc<Mutex<Encoder>>,
    /// Without one everything is done at once.
    thread: Option<Arc<EncodingThread>>,
    batch: Batch,
    spare: Vec<Batch>,
    /// Where the batches come back that are with the thread, in order.
    under_way: VecDeque<Receiver<Done>>,
    /// Bytes of packets until the segment is full, as the thread has said last, and what has gone to it since comes to at most.
    left: u64,
    since: u64,
    /// What went wrong, until somebody has asked.
    error: Option<io::Error>,
}

impl Queue {
    pub fn new(mut encoder: Encoder, thread: Option<Arc<EncodingThread>>) -> Queue {
        Queue {
            left: encoder.left(),
            encoder: Arc::new(Mutex::new(encoder)),
            thread,
            batch: Batch::default(),
            spare: Vec::new(),
            under_way: VecDeque::new(),
            since: 0,
            error: None,
        }
    }

    /// Has a job done, of a processor that stands there.
    pub fn post(&mut self, job: Job, at: Standing) {
        self.add(job, &[], at);
    }

    /// The same of branches.
    pub fn branches(&mut self, records: &[BranchRecord], at: Standing) {
        self.add(Job::Branches(records.len()), records, at);
    }

    fn add(&mut self, job: Job, records: &[BranchRecord], at: Standing) {
        if self.thread.is_none() {
            let mut encoder = lock(&self.encoder);
            encoder.run(job, records, at);
            self.error = encoder.take_error();
            return;
        }
        self.batch.jobs.push((job, at));
        self.batch.records.extend_from_slice(records);
        let at_most = JOB_BYTES + RECORD_BYTES * records.len() as u64;
        self.batch.at_most += at_most;
        self.since += at_most;
        if self.batch.jobs.len() >= JOBS || self.batch.records.len() >= RECORDS {
            self.send();
        }
    }

    /// Sends what waits, behind the oldest batch where there are as many as may be.
    fn send(&mut self) {
        let Some(thread) = self.thread.clone() else { return };
        if self.under_way.len() == UNDER_WAY {
            self.take_back();
        }
        let next = self.spare.pop().unwrap_or_default();
        let (done, comes_back) = mpsc::channel();
        self.under_way.push_back(comes_back);
        thread.send(Task {
            encoder: self.encoder.clone(),
            batch: std::mem::replace(&mut self.batch, next),
            done,
        });
    }

    /// Waits for the oldest batch.
    fn take_back(&mut self) {
        let Some(comes_back) = self.under_way.pop_front() else {
            return;
        };
        let Ok(mut done) = comes_back.recv() else {
            self.error
                .get_or_insert_with(|| io::Error::other("the thread that encodes the trace has ended"));
            return;
        };
        self.left = done.left;
        self.since -= std::mem::take(&mut done.batch.at_most);
        self.spare.push(done.batch);
        if self.error.is_none() {
            self.error = done.error;
        }
    }

    /// Waits until everything has been done.
    pub fn settle(&mut self) {
        if !self.batch.jobs.is_empty() {
            self.send();
        }
        while !self.under_way.is_empty() {
            self.take_back();
        }
    }

    /// Whether the segment has as many packets as it should.
    pub fn is_full(&mut self) -> bool {
        if self.thread.is_none() {
            return lock(&self.encoder).left() == 0;
        }
        if self.since < self.left {
            return false;
        }
        self.settle();
        self.left == 0
    }

    /// What went wrong since somebody asked last.
    pub fn take_error(&mut self) -> Option<io::Error> {
        self.error.take()
    }

    /// What the encoder's unit wants announced, and before which addresses it is to be asked; everything has been done.
    pub fn wants(&mut self, step: u64) -> (Interest, Vec<u64>) {
        self.settle();
        let encoder = lock(&self.encoder);
        let (interest, boundaries) = encoder.wants(step);
        (interest, boundaries.to_vec())
    }
}
