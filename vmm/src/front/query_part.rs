//! Questions to a part of a session, whose answers others put together.

use serde::{Deserialize, Serialize};

use super::{
    query::{Asked, QueryError, Question},
    query_pass::{Hit, Pass},
};
use crate::debug::{WatchKind, Watchpoint};

/// What is asked of a part of a session.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Task {
    /// Of the last part: what the words of a question are, and its answer, if that is in this part.
    First(Question),
    /// Who wrote to a range last, or if a function is given, last before its last call.
    Last {
        /// The range: its beginning, its length, and what it is called.
        written: Option<(u64, u64, String)>,
        /// The function.
        function: Option<u64>,
    },
    /// All writes to a range.
    Writes {
        /// Its beginning.
        address: u64,
        /// Its length.
        len: u64,
        /// From this step on.
        from: u64,
        /// Up to this one.
        to: u64,
        /// Lines at most.
        limit: u64,
    },
    /// All calls of a function.
    Calls {
        /// The function.
        function: u64,
        /// What it is called.
        word: String,
        /// From this step on.
        from: u64,
        /// Up to this one.
        to: u64,
        /// Lines at most.
        limit: u64,
    },
}

/// What a part says.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Reply {
    /// The step at its end.
    pub steps: u64,
    /// What the question's address or function is.
    pub address: Option<u64>,
    /// What the functions are that moments are called by, in the question's order.
    pub functions: Vec<Option<u64>>,
    /// The step before which the question looks.
    pub moment: Option<u64>,
    /// The answer, or the lines of one.
    pub text: Option<String>,
    /// How many writes there are.
    pub count: u64,
    /// The symbols of the guest's kernel and its modules, as `/proc/kallsyms` has them.
    pub symbols: Option<String>,
}

impl Asked<'_> {
    /// Answers a part's task. The run is at the part's beginning, and ends with it.
    ///
    /// # Errors
    /// See [`QueryError`].
    pub fn part(&mut self, task: &Task, from: u64) -> Result<Reply, QueryError> {
        let mut reply = Reply::default();
        match task {
            Task::First(question) => {
                self.run_to_end()?;
                self.look();
                reply.steps = self.run.steps();
                self.first(question, from, &mut reply)?;
            }
            Task::Last { written, function } => {
                let range = |(address, len, _): &(u64, u64, String)| {
                    Watchpoint::new(*address, *len, WatchKind::Write).ok_or(QueryError::Range(*address))
                };
                let watchpoint = written.as_ref().map(range).transpose()?;
                let pass = Pass::begin(self.run, watchpoint, *function);
                let ended = self.run_to_end();
                let last = pass.end(self.run);
                ended?;
                reply.steps = self.run.steps();
                reply.moment = last.call.map(|(step, _)| step);
                let write = match function {
                    Some(_) => last.call.and_then(|(_, write)| write),
                    None => last.write,
                };
                if let (Some(Hit { step, cpu, ip }), Some(watchpoint)) = (write, watchpoint) {
                    self.go_to(step)?;
                    reply.text = Some(self.write_here(cpu, Some(ip), watchpoint)?);
                }
            }
            Task::Writes {
                address,
                len,
                from,
                to,
                limit,
            } => {
                let watchpoint = Watchpoint::new(*address, *len, WatchKind::Write);
                let mut text = Vec::new();
                let watchpoint = watchpoint.ok_or(QueryError::Range(*address))?;
                reply.count = self.every_write(watchpoint, *from..*to, *limit, &mut text)?;
                reply.text = Some(String::from_utf8_lossy(&text).into_owned());
            }
            Task::Calls {
                function,
                word,
                from,
                to,
                limit,
            } => {
                let mut text = Vec::new();
                self.calls(*function, word, *from..*to, *limit, &mut text)?;
                reply.text = Some(String::from_utf8_lossy(&text).into_owned());
            }
        }
        Ok(reply)
    }

    /// At the end of the session: what the words of a question are, and its answer, if it is no further back than `from`.
    fn first(&mut self, question: &Question, from: u64, reply: &mut Reply) -> Result<(), QueryError> {
        let memory = self.run.machine().memory();
        reply.symbols = self.names.kallsyms(memory);
        let (word, moments) = match question {
            Question::LastWriter { address, before, .. } => (address, vec![before]),
            Question::Writes { address, window, .. } => (address, vec![&window.from, &window.to]),
            Question::Calls { function, window } => (function, vec![&window.from, &window.to]),
        };
        reply.address = Some(self.address(word)?);
        for moment in moments {
            let function = match moment {
                Some(word) if word.parse::<u64>().is_err() => Some(self.address(word)?),
                _ => None,
            };
            reply.functions.push(function);
        }
        let Question::LastWriter { address, len, before } = question else {
            return Ok(());
        };
        let watchpoint = self.watch(address, *len)?;
        reply.moment = match (before, reply.functions.first()) {
            (Some(_), Some(Some(function))) => match self.last_call(*function)? {
                None => return Ok(()),
                found => found,
            },
            (Some(word), _) => word.parse().ok(),
            (None, _) => None,
        };
        let step = reply.moment.unwrap_or(reply.steps).min(reply.steps);
        if step < from {
            return Ok(());
        }
        self.go_to(step)?;
        reply.text = self.last_writer(watchpoint)?;
        Ok(())
    }
}
