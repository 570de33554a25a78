//! A Unix socket under a name: by the time there is the name, its owner alone may connect, and can.

use std::{
    fs, io,
    os::{
        fd::AsRawFd,
        unix::{
            fs::PermissionsExt,
            net::{SocketAddr, UnixListener},
        },
    },
    path::Path,
    sync::atomic::{AtomicU32, Ordering},
};

/// How many sockets this process has made: no two have one hidden name.
static NUMBER: AtomicU32 = AtomicU32::new(0);

/// Listens at `path`, whose mode is 0600.
///
/// The socket is bound under another name of its folder and gets this one when it is ready: `bind` makes the name before
/// anybody can be let in, and with the permissions of the umask.
///
/// # Errors
/// The path is too long for a socket, something of that name exists, the folder is missing or may not be written.
pub fn listen(path: &Path) -> io::Result<UnixListener> {
    SocketAddr::from_pathname(path)?;
    let (Some(parent), Some(name)) = (path.parent(), path.file_name()) else {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "names no file"));
    };
    let folder = fs::File::open(if parent.as_os_str().is_empty() {
        Path::new(".")
    } else {
        parent
    })?;
    // By the descriptor, since the other name may be too long where this one is not.
    let folder_path = format!("/proc/self/fd/{}", folder.as_raw_fd());
    let folder_path = Path::new(&folder_path);
    let number = NUMBER.fetch_add(1, Ordering::Relaxed);
    let hidden = folder_path.join(format!(".minivmm-{}-{number}", std::process::id()));
    let listener = UnixListener::bind(&hidden)?;
    let named = fs::set_permissions(&hidden, fs::Permissions::from_mode(0o600)).and_then(|()| {
        fs::hard_link(&hidden, folder_path.join(name)).map_err(|e| match e.kind() {
            io::ErrorKind::AlreadyExists => {
                io::Error::other("exists already; remove it, or choose another path for the socket")
            }
            _ => e,
        })
    });
    let removed = fs::remove_file(&hidden);
    named.and(removed)?;
    Ok(listener)
}

#[cfg(test)]
#[path = "socket_test.rs"]
mod tests;
