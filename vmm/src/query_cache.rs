//! Answers that a session keeps: a question that was asked before costs no replay.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use machine::memory::Digest;
use serde::{Deserialize, Serialize};
use trace::regular;

use crate::front::query::Question;

/// The directory in a session's.
const FOLDER: &str = "answers";
/// The longest file of a session's that is read.
const LONGEST: u64 = 1 << 30;
/// The longest answer that is kept.
const LONGEST_ANSWER: usize = 1 << 20;

/// A file of the directory.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Kept {
    /// The program's version, whose words the answer is in.
    version: String,
    /// A hash of what the session starts from, and of what came from outside.
    session: u64,
    question: Question,
    answer: String,
}

/// Where a session's answer to a question is, or would be.
#[derive(Debug)]
pub struct Cache {
    path: PathBuf,
    session: u64,
    question: Question,
}

impl Cache {
    /// Of a session and a question.
    ///
    /// # Errors
    /// The session cannot be read.
    pub fn of(session: &Path, question: &Question) -> io::Result<Cache> {
        let mut digest = Digest::default();
        for name in ["session.json", "log"] {
            let file = regular::open_inside(&session.join(name))?;
            let bytes = regular::read(file, LONGEST)?;
            digest.add(&(bytes.len() as u64).to_le_bytes());
            digest.add(&bytes);
        }
        let hash = digest.value();
        digest.add(&serde_json::to_vec(question)?);
        Ok(Cache {
            path: session.join(FOLDER).join(format!("{:016x}", digest.value())),
            session: hash,
            question: question.clone(),
        })
    }

    /// The answer, if it was given before.
    pub fn answer(&self) -> Option<String> {
        let file = regular::open_inside(&self.path).ok()?;
        let bytes = regular::read(file, 2 * LONGEST_ANSWER as u64).ok()?;
        let kept: Kept = serde_json::from_slice(&bytes).ok()?;
        let same =
            kept.version == env!("CARGO_PKG_VERSION") && kept.session == self.session && kept.question == self.question;
        same.then_some(kept.answer)
    }

    /// Keeps an answer. Where that cannot be, the question is answered anew the next time.
    pub fn keep(&self, answer: &str) {
        if answer.len() > LONGEST_ANSWER {
            return;
        }
        let kept = Kept {
            version: env!("CARGO_PKG_VERSION").into(),
            session: self.session,
            question: self.question.clone(),
            answer: answer.into(),
        };
        let (Ok(text), Some(folder)) = (serde_json::to_vec(&kept), self.path.parent()) else {
            return;
        };
        // It has its name once it is whole, whoever else asks the same.
        let new = self.path.with_extension(format!("{}", std::process::id()));
        let _ = regular::create_private_dir(folder);
        if regular::write_private(&new, &text)
            .and_then(|()| fs::rename(&new, &self.path))
            .is_err()
        {
            let _ = fs::remove_file(&new);
        }
    }
}
