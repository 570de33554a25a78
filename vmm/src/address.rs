//! Where a machine can be reached: sockets of this host and TCP ports.

use std::net::{IpAddr, Ipv4Addr};
use std::path::PathBuf;

/// What is wrong with an address.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AddressError {
    /// A socket without a path.
    #[error("unix: needs a path, as unix:guest.sock")]
    NoPath,
    /// Something else than a socket.
    #[error("not unix:PATH")]
    NotUnix,
    /// Neither a port nor a socket.
    #[error("not tcp:[HOST:]PORT or unix:PATH{}", meant(.0))]
    Neither(String),
    /// A port that is no text.
    #[error("not tcp:[HOST:]PORT")]
    NotTcp,
    /// No port.
    #[error("{0:?} is no port: give 0 to 65535")]
    Port(String),
    /// No host, or one by its name.
    #[error("{0:?} is no IP address: give one, as 127.0.0.1, or leave it out")]
    Host(String),
}

/// What may have been meant by text without a kind of address before it.
fn meant(text: &str) -> String {
    let port = text.rsplit_once(':').map_or(text, |(_, port)| port);
    match port.parse::<u16>() {
        Ok(_) => format!(" (for a TCP port, write tcp:{})", text.trim_start_matches(':')),
        Err(_) if text.contains('/') => format!(" (for a socket, write unix:{text})"),
        Err(_) => String::new(),
    }
}

/// `unix:PATH`, as `--control` takes it.
///
/// # Errors
/// What is wrong with it.
pub fn unix(text: &[u8]) -> Result<PathBuf, AddressError> {
    use std::os::unix::ffi::OsStringExt;
    match text.strip_prefix(b"unix:") {
        Some(b"") => Err(AddressError::NoPath),
        Some(path) => Ok(std::ffi::OsString::from_vec(path.to_vec()).into()),
        None => Err(AddressError::NotUnix),
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
    pub fn parse(text: &[u8]) -> Result<Self, AddressError> {
        if text.starts_with(b"unix:") {
            return unix(text).map(DebugAddress::Unix);
        }
        let tcp = text
            .strip_prefix(b"tcp:")
            .ok_or_else(|| AddressError::Neither(String::from_utf8_lossy(text).into_owned()))?;
        let tcp = std::str::from_utf8(tcp).map_err(|_| AddressError::NotTcp)?;
        let (host, port) = tcp.rsplit_once(':').unwrap_or(("127.0.0.1", tcp));
        let port = port.parse().map_err(|_| AddressError::Port(port.into()))?;
        let host = match host.trim_start_matches('[').trim_end_matches(']') {
            // `tcp::1234`, as QEMU has it.
            "" | "localhost" => IpAddr::V4(Ipv4Addr::LOCALHOST),
            host => host.parse().map_err(|_| AddressError::Host(host.into()))?,
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
