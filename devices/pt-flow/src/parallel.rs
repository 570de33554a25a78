use crate::chunk::{Chunk, Chunks};
use crate::event::{Summary, Visitor};
use crate::flow::Decoder;
use crate::image::Image;
use crate::time::Timing;
use std::collections::BTreeMap;
use std::io::{self, Read};
use std::sync::{Condvar, Mutex, PoisonError};

/// What the threads share.
struct Work<R, V> {
    chunks: Mutex<(u64, Option<Chunks<R>>)>,
    done: Mutex<Done<V>>,
    /// A result was added, taken, or no more will come.
    changed: Condvar,
}

struct Done<V> {
    /// By number.
    results: BTreeMap<u64, io::Result<(V, Summary)>>,
    /// The next to be delivered.
    next: u64,
    running: usize,
    /// Somebody panicked: nobody waits any more.
    broken: bool,
}

/// Decodes a trace on several threads. Each chunk is given to a visitor of its own, which `visitor` makes, and `deliver` takes
/// the visitors in the order of the trace, with what was found in their chunks. No more than a few chunks for each thread are in memory.
///
/// Each thread has an image of its own, made by `image`. The call returns the sum of all that was found.
///
/// # Errors
///
/// The first error in reading; what was read before it has been delivered.
pub fn decode_parallel<R: Read + Send, I: Image, V: Visitor + Send>(
    chunks: Chunks<R>,
    threads: usize,
    timing: Timing,
    image: impl Fn() -> I + Sync,
    visitor: impl Fn(&Chunk) -> V + Sync,
    mut deliver: impl FnMut(V, Summary),
) -> io::Result<Summary> {
    let threads = threads.max(1);
    let window = 2 * threads as u64;
    let shared = Work {
        chunks: Mutex::new((0, Some(chunks))),
        done: Mutex::new(Done {
            results: BTreeMap::new(),
            next: 0,
            running: threads,
            broken: false,
        }),
        changed: Condvar::new(),
    };
    std::thread::scope(|scope| {
        let mut started = 0;
        for _ in 0..threads {
            let work = || {
                // However the thread ends, whoever waits for it learns that.
                let _end = End(&shared, 1);
                let mut decoder = Decoder::new(image(), timing);
                while let Some((number, chunk)) = shared.take(window) {
                    let result = chunk.map(|chunk| {
                        let mut visitor = visitor(&chunk);
                        decoder.decode(&chunk, &mut visitor);
                        (visitor, decoder.summary())
                    });
                    lock(&shared.done).results.insert(number, result);
                    shared.changed.notify_all();
                }
            };
            match std::thread::Builder::new().spawn_scoped(scope, work) {
                Ok(_) => started += 1,
                Err(error) if started == 0 => return Err(error),
                // Fewer do it as well.
                Err(_) => drop(End(&shared, 1)),
            }
        }
        let _end = End(&shared, 0);
        let mut sum = Summary::default();
        while let Some(result) = shared.result() {
            let (visitor, summary) = result?;
            sum += summary;
            deliver(visitor, summary);
        }
        Ok(sum)
    })
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl<R: Read, V> Work<R, V> {
    /// The next chunk and its number, when there is room for its result.
    fn take(&self, window: u64) -> Option<(u64, io::Result<Chunk>)> {
        let mut chunks = lock(&self.chunks);
        let number = chunks.0;
        let mut done = lock(&self.done);
        while number >= done.next + window && !done.broken {
            done = self.changed.wait(done).unwrap_or_else(PoisonError::into_inner);
        }
        if done.broken {
            return None;
        }
        drop(done);
        let chunk = chunks.1.as_mut()?.next();
        if !matches!(chunk, Some(Ok(_))) {
            chunks.1 = None;
        }
        chunks.0 += 1;
        Some((number, chunk?))
    }

    /// The next result in order; `None` when there are no more.
    fn result(&self) -> Option<io::Result<(V, Summary)>> {
        let mut done = lock(&self.done);
        loop {
            let next = done.next;
            if let Some(result) = done.results.remove(&next) {
                done.next += 1;
                self.changed.notify_all();
                return Some(result);
            }
            if done.running == 0 || done.broken {
                return None;
            }
            done = self.changed.wait(done).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

/// Tells the others that a thread has ended: one that decodes, or the one that delivers.
struct End<'a, R, V>(&'a Work<R, V>, usize);

impl<R, V> Drop for End<'_, R, V> {
    fn drop(&mut self) {
        let mut done = lock(&self.0.done);
        done.running -= self.1;
        done.broken |= std::thread::panicking();
        self.0.changed.notify_all();
    }
}
