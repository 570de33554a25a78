//! What the person at the terminal sees while something runs: a spinner with the last line of output on a terminal, plain
//! lines elsewhere.

use anyhow::{Context, Result, bail};
use indicatif::{ProgressBar, ProgressStyle};
use std::collections::VecDeque;
use std::io::{BufRead, BufReader, IsTerminal, Read};
use std::process::{Command, ExitStatus, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

/// Lines kept to be shown when a command fails behind a spinner.
const KEPT: usize = 400;

/// One piece of work with a name.
pub struct Stage {
    bar: Option<ProgressBar>,
    name: String,
    start: Instant,
}

impl Stage {
    /// Announces the work.
    pub fn start(name: &str) -> Stage {
        let bar = std::io::stderr().is_terminal().then(|| {
            let style = ProgressStyle::with_template("{spinner} {prefix:<14} {elapsed:>4} {wide_msg}");
            let bar = ProgressBar::new_spinner().with_prefix(name.to_string());
            bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_spinner()));
            bar.enable_steady_tick(Duration::from_millis(120));
            bar
        });
        if bar.is_none() {
            eprintln!("== {name}");
        }
        Stage {
            bar,
            name: name.to_string(),
            start: Instant::now(),
        }
    }

    /// Says what is being done right now.
    pub fn say(&self, text: &str) {
        match &self.bar {
            Some(bar) => bar.set_message(text.to_string()),
            None => eprintln!("   {text}"),
        }
    }

    /// Does something that talks to the terminal itself.
    pub fn aside<T>(&self, work: impl FnOnce() -> T) -> T {
        match &self.bar {
            Some(bar) => bar.suspend(work),
            None => work(),
        }
    }

    /// Ends the work with a line that stays, and gives the seconds it took.
    pub fn end(self, outcome: &str) -> f64 {
        let seconds = self.start.elapsed().as_secs_f64();
        let line = format!("{:<14} {seconds:>6.1} s  {outcome}", self.name);
        match &self.bar {
            Some(bar) => {
                bar.finish_and_clear();
                eprintln!("{line}");
            }
            None => eprintln!("== {line}"),
        }
        seconds
    }

    /// Runs `command` and hands each line of its output to `line`. It is ended when `deadline` passes.
    pub fn run(
        &self,
        command: &mut Command,
        deadline: Option<Instant>,
        mut line: impl FnMut(&str),
    ) -> Result<ExitStatus> {
        let program = command.get_program().to_string_lossy().into_owned();
        let words: Vec<_> = command.get_args().map(|word| word.to_string_lossy()).collect();
        self.say(&format!("{program} {}", words.join(" ")));
        command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let mut child = command.spawn().with_context(|| format!("cannot run {program}"))?;
        let (sender, receiver) = mpsc::channel();
        if let Some(stdout) = child.stdout.take() {
            forward(stdout, sender.clone());
        }
        if let Some(stderr) = child.stderr.take() {
            forward(stderr, sender.clone());
        }
        drop(sender);
        let mut kept = VecDeque::new();
        loop {
            match receiver.recv_timeout(Duration::from_millis(500)) {
                Ok(text) => {
                    line(&text);
                    match &self.bar {
                        Some(bar) => {
                            if !text.trim().is_empty() {
                                bar.set_message(text.trim().to_string());
                            }
                            kept.push_back(text);
                            if kept.len() > KEPT {
                                kept.pop_front();
                            }
                        }
                        None => eprintln!("{text}"),
                    }
                }
                Err(mpsc::RecvTimeoutError::Timeout) => {}
                Err(mpsc::RecvTimeoutError::Disconnected) => break,
            }
            if deadline.is_some_and(|deadline| Instant::now() > deadline) {
                child.kill().with_context(|| format!("cannot end {program}"))?;
                child.wait()?;
                bail!("{program} was ended: the time is up");
            }
        }
        let status = child.wait().with_context(|| format!("cannot wait for {program}"))?;
        if !status.success()
            && let Some(bar) = &self.bar
        {
            bar.suspend(|| kept.iter().for_each(|text| eprintln!("{text}")));
        }
        Ok(status)
    }

    /// Runs `command` and makes an error of any status but success.
    pub fn must(&self, command: &mut Command) -> Result<()> {
        let status = self.run(command, None, |_| {})?;
        if !status.success() {
            bail!("{} failed: {status}", command.get_program().to_string_lossy());
        }
        Ok(())
    }
}

/// Sends each line of `source` on, from a thread of its own. Bytes that are not UTF-8 are replaced.
fn forward(source: impl Read + Send + 'static, sender: mpsc::Sender<String>) {
    std::thread::spawn(move || {
        let mut reader = BufReader::new(source);
        let mut bytes = Vec::new();
        loop {
            bytes.clear();
            match reader.read_until(b'\n', &mut bytes) {
                Ok(0) | Err(_) => break,
                Ok(_) => {}
            }
            let text = String::from_utf8_lossy(&bytes)
                .trim_end_matches(['\n', '\r'])
                .to_string();
            if sender.send(text).is_err() {
                break;
            }
        }
    });
}

#[cfg(test)]
#[path = "progress_test.rs"]
mod tests;
