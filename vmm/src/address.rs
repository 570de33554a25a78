//! Where a machine can be reached: sockets of this host and TCP ports.

use std::net::{IpAddr, Ipv4Addr};
use std::path::PathBuf;

/// `unix:PATH`, as `--control` takes it.
///
/// # Errors
/// What is wrong with it.
pub fn unix(text: &[u8]) -> Result<PathBuf, String> {
    use std::os::unix::ffi::OsStringExt;
    match text.strip_prefix(b"unix:") {
        Some(b"") => Err("unix: needs a path, as unix:guest.sock".into()),
        Some(path) => Ok(std::ffi::OsString::from_vec(path.to_vec()).into()),
        None => Err("not unix:PATH".into()),
    }
}

/// Where a debugger connects.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DebugAddress {
    /// A TCP port of this host.
    Tcp(IpAddr, u16),
    /// A socket's path.
    Unix(PathBuf),
}

impl DebugAddress {
    /// Where `-s` listens.
    pub const USUAL: DebugAddress = DebugAddress::Tcp(IpAddr::V4(Ipv4Addr::LOCALHOST), 1234);

    /// `tcp:[HOST:]PORT` or `unix:PATH`, as `--gdb` takes it. A host is a number.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn parse(text: &[u8]) -> Result<Self, String> {
        if text.starts_with(b"unix:") {
            return unix(text).map(DebugAddress::Unix);
        }
        let tcp = text.strip_prefix(b"tcp:").ok_or("not tcp:[HOST:]PORT or unix:PATH")?;
        let tcp = std::str::from_utf8(tcp).map_err(|_| "not tcp:[HOST:]PORT")?;
        let (host, port) = tcp.rsplit_once(':').unwrap_or(("127.0.0.1", tcp));
        let port = port
            .parse()
            .map_err(|_| format!("{port:?} is no port: give 0 to 65535"))?;
        let host = match host.trim_start_matches('[').trim_end_matches(']') {
            "localhost" => IpAddr::V4(Ipv4Addr::LOCALHOST),
            host => host
                .parse()
                .map_err(|_| format!("{host:?} is no IP address: give one, as 127.0.0.1, or leave it out"))?,
        };
        Ok(DebugAddress::Tcp(host, port))
    }
}

impl std::fmt::Display for DebugAddress {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            DebugAddress::Tcp(host @ IpAddr::V6(_), port) => write!(f, "tcp:[{host}]:{port}"),
            DebugAddress::Tcp(host, port) => write!(f, "tcp:{host}:{port}"),
            DebugAddress::Unix(path) => write!(f, "unix:{}", path.display()),
        }
    }
}
