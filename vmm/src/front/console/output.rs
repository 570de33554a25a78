//! Where the serial port's output goes, and the wait for a reader that does not read.

use std::{
    fs::File,
    io::{self, ErrorKind, Write},
    os::fd::AsRawFd,
};

use libc::c_int;
use vmm_sys_util::epoll::{ControlOperation, Epoll, EpollEvent, EventSet};

use crate::signals;

/// A pipe that is ready has room for at least this (pipe(7), PIPE_BUF), so a write of no more returns at once.
const PIECE: usize = 4096;

const OUTPUT: u64 = 0;
const WAKE: u64 = 1;

/// Why not everything could be written.
pub(super) enum Fault {
    /// This signal came while nobody read.
    Signal(c_int),
    Io(io::Error),
}

/// A file, pipe or terminal to write to.
#[derive(Debug)]
pub(super) struct Output {
    file: File,
    /// Tells when there is room, or a signal came; `None` for regular files and the like, which never wait.
    room: Option<Epoll>,
}

impl Output {
    pub(super) fn new(file: File) -> io::Result<Self> {
        let epoll = Epoll::new()?;
        let add = |fd, events, data| epoll.ctl(ControlOperation::Add, fd, EpollEvent::new(events, data));
        let room = match add(file.as_raw_fd(), EventSet::OUT, OUTPUT) {
            Ok(()) => {
                if let Some(wake) = signals::wake_fd() {
                    add(wake, EventSet::IN, WAKE)?;
                }
                Some(epoll)
            }
            // "The target file fd does not support epoll."
            Err(e) if e.raw_os_error() == Some(libc::EPERM) => None,
            Err(e) => return Err(e),
        };
        Ok(Output { file, room })
    }

    /// Like [`Write::write_all`], but a signal ends the wait for a reader that does not read. What can be written without a
    /// wait still is.
    pub(super) fn write_all(&mut self, mut bytes: &[u8]) -> Result<(), Fault> {
        while !bytes.is_empty() {
            let piece = match &self.room {
                Some(room) => {
                    wait(room)?;
                    &bytes[..bytes.len().min(PIECE)]
                }
                None => bytes,
            };
            match self.file.write(piece) {
                Ok(0) => return Err(Fault::Io(ErrorKind::WriteZero.into())),
                Ok(n) => bytes = &bytes[n..],
                // Another writer may have taken the room.
                Err(e) if matches!(e.kind(), ErrorKind::Interrupted | ErrorKind::WouldBlock) => {}
                Err(e) => return Err(Fault::Io(e)),
            }
        }
        Ok(())
    }
}

/// Waits until there is room. A signal that comes between the look at [`signals::pending`] and the wait is not missed: it has
/// made the wake descriptor readable.
fn wait(room: &Epoll) -> Result<(), Fault> {
    let mut events = [EpollEvent::default(); 2];
    loop {
        let signal = signals::pending();
        let count = match room.wait(if signal.is_some() { 0 } else { -1 }, &mut events) {
            Ok(count) => count,
            Err(e) if e.kind() == ErrorKind::Interrupted => 0,
            Err(e) => return Err(Fault::Io(e)),
        };
        if events[..count].iter().any(|event| event.data() == OUTPUT) {
            return Ok(());
        }
        if let Some(signal) = signal {
            return Err(Fault::Signal(signal));
        }
    }
}
