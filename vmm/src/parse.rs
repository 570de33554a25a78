//! What the options of a command line take: numbers, sizes, dates, addresses.

use std::{
    ffi::OsString,
    net::{IpAddr, Ipv4Addr},
    os::unix::ffi::{OsStrExt, OsStringExt},
    path::{Path, PathBuf},
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use devices::virtio::fs::TAG_MAX;
use machine::{
    disk::{DiskFormat, DiskMode},
    memory::MEMORY_MIN,
    share::ShareMode,
};

use x86::model::topology::{Topology, TopologyError};

use crate::{
    address::{self, AddressError, DebugAddress},
    config::{DiskConfig, Forward, InitrdFile, NetConfig, OnPanic, SerialTarget, ShareConfig, VIRTUAL_RTC_BASE},
    error::Error,
};

/// What is wrong with an option's value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ValueError {
    /// No way to translate.
    #[error("on, off, or after=N with N from 1 on")]
    Translate,
    /// Not what translations can have.
    #[error("not from 1M to 1G, or not a multiple of the page size, 4K")]
    TranslateMemory,
    /// No size.
    #[error("not a size: give bytes, or a number with K, M, G or T, as 512M")]
    Size,
    /// A size of more than 64 bits.
    #[error("more than 64 bits can count")]
    SizeRange,
    /// Nothing that can be done.
    #[error("not exit, stop or dump=FILE")]
    OnPanic,
    /// No frequency.
    #[error("not a number of kHz, as 2100000 for 2.1 GHz")]
    Khz,
    /// A frequency of more than 32 bits.
    #[error("more than 10000000, which is 10 GHz")]
    KhzRange,
    /// No offset.
    #[error("not a number from -2^63 to 2^64-1")]
    Offset,
    /// Less than a machine can have.
    #[error("a machine has 2M of memory at least{}", hint(*mebibytes))]
    LittleMemory {
        /// The number, if mebibytes of it may have been meant.
        mebibytes: Option<u64>,
    },
    /// Memory that ends within a page.
    #[error("not a multiple of the page size, 4K")]
    Pages,
    /// A file without a path.
    #[error("file: needs a path, as file:console.log")]
    SerialFile,
    /// None of the console's targets.
    #[error("not stdio, file:PATH or null")]
    Serial,
    /// A disk without a file.
    #[error("needs a file, as disk.img or disk.img,overlay")]
    Disk,
    /// Not a shared directory.
    #[error("not TAG=DIR, TAG=DIR,ro or TAG=DIR,overlay: the guest mounts it with `mount -t virtiofs TAG /mnt`")]
    Share,
    /// Not the tag of one.
    #[error("a tag is text of 1 to 36 bytes, as in TAG=DIR")]
    ShareTag,
    /// No network.
    #[error("not user, user,forward=HOST:GUEST or tap=NAME")]
    Net,
    /// No ports.
    #[error("a forward is two ports, as forward=2222:22 or forward=0.0.0.0:2222:22")]
    Forward,
    /// An archive without a file.
    #[error("needs a file")]
    Initrd,
    /// Words, and no file before them.
    #[error("needs a file before the words, as \"FILE WORDS\"")]
    InitrdWords,
    /// No seed.
    #[error("not a number of 64 bits, and not `random`")]
    Seed,
    /// No count.
    #[error("not a number of 64 bits")]
    Count,
    /// A count of nothing.
    #[error("has to be at least 1")]
    CountZero,
    /// No number of CPUs.
    #[error("not a number from 1 to 255")]
    Cpus,
    /// No part of an arrangement of CPUs.
    #[error("behind the number stands sockets=N, cores=N or threads=N")]
    Arrangement,
    /// CPUs that cannot be arranged so.
    #[error(transparent)]
    Topology(#[from] TopologyError),
    /// No number of seconds.
    #[error("not a number of seconds")]
    Seconds,
    /// Seconds that no clock counts.
    #[error("has to be more than 0 and not absurd")]
    SecondsRange,
    /// No date.
    #[error("not a date as 2024-01-01T00:00:00Z, not seconds since 1970, and not `now`")]
    Date,
    /// A date that the clock cannot show.
    #[error("the clock runs from 1970 to 9999")]
    DateRange,
}

fn hint(mebibytes: Option<u64>) -> String {
    mebibytes.map_or_else(String::new, |size| {
        format!(" (for mebibytes, write {}M)", size.max(MEMORY_MIN >> 20))
    })
}

/// Clap's report up to its first empty line (usage and tips follow), on one line.
pub(crate) fn one_line(report: &str) -> String {
    let head = report.strip_prefix("error: ").unwrap_or(report);
    let lines: Vec<&str> = head
        .lines()
        .take_while(|line| !line.trim().is_empty())
        .map(str::trim)
        .collect();
    lines.join(" ").replace(char::is_control, "?")
}

/// RDRAND's seed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Seed {
    Fixed(u64),
    Random,
}

/// The real-time clock's start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RtcBase {
    /// Seconds since 1970-01-01T00:00:00Z.
    At(i64),
    Now,
}

/// A size in bytes: decimal or 0x hexadecimal, with an optional suffix K, M, G or T (powers of 1024; `iB` and `B` may follow).
///
/// # Errors
/// No size, or a greater one.
pub fn parse_size(text: &str) -> Result<u64, ValueError> {
    let lower = text.trim().to_ascii_lowercase();
    let (body, shift) = match lower.strip_prefix("0x") {
        // A hexadecimal number has `b` as a digit, so only the letters that are none can be suffixes.
        Some(_) => split_suffix(&lower),
        None => split_suffix(lower.strip_suffix("ib").or(lower.strip_suffix('b')).unwrap_or(&lower)),
    };
    let number = parse_u64(body).ok_or(ValueError::Size)?;
    number.checked_mul(1 << shift).ok_or(ValueError::SizeRange)
}

fn split_suffix(text: &str) -> (&str, u32) {
    for (suffix, shift) in [('k', 10), ('m', 20), ('g', 30), ('t', 40)] {
        if let Some(body) = text.strip_suffix(suffix) {
            return (body, shift);
        }
    }
    (text, 0)
}

/// Decimal or 0x hexadecimal digits, and nothing else.
pub(crate) fn parse_u64(text: &str) -> Option<u64> {
    let (digits, radix) = match text.strip_prefix("0x").or(text.strip_prefix("0X")) {
        Some(hex) => (hex, 16),
        None => (text, 10),
    };
    // `from_str_radix` also takes a sign.
    if !digits.starts_with(|c: char| c.is_digit(radix)) {
        return None;
    }
    u64::from_str_radix(digits, radix).ok()
}

/// `--on-panic`.
pub(crate) fn parse_on_panic(text: OsString) -> Result<OnPanic, ValueError> {
    match text.as_bytes() {
        b"exit" => Ok(OnPanic::Exit),
        b"stop" => Ok(OnPanic::Stop),
        bytes => match bytes.strip_prefix(b"dump=") {
            Some(path) if !path.is_empty() => Ok(OnPanic::Dump(PathBuf::from(OsString::from_vec(path.to_vec())))),
            _ => Err(ValueError::OnPanic),
        },
    }
}

/// `--on-panic stop` is for somebody who looks: over `sockets`, the options that are there for that.
pub(crate) fn check_on_panic(action: Option<&OnPanic>, looked_at: bool, sockets: &str) -> Result<(), Error> {
    match action {
        Some(OnPanic::Stop) if !looked_at => Err(Error::Usage(format!(
            "--on-panic stop: nobody could look at the guest: give {sockets}, too"
        ))),
        _ => Ok(()),
    }
}

pub(crate) fn parse_khz(text: &str) -> Result<u32, ValueError> {
    let khz = parse_u64(text).ok_or(ValueError::Khz)?;
    u32::try_from(khz).map_err(|_| ValueError::KhzRange)
}

/// `--translate`: how often a block runs before it is translated; `None`: it never is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TranslateAfter(pub Option<u32>);

pub(crate) fn parse_translate(text: &str) -> Result<TranslateAfter, ValueError> {
    let after = match text {
        "on" => Some(engine::TRANSLATE_AFTER),
        "off" => None,
        _ => {
            let count = text.strip_prefix("after=").and_then(parse_u64);
            let count = count.and_then(|count| u32::try_from(count).ok());
            Some(count.filter(|&count| count > 0).ok_or(ValueError::Translate)?)
        }
    };
    Ok(TranslateAfter(after))
}

/// `--translate-memory`.
pub(crate) fn parse_translate_memory(text: &str) -> Result<u64, ValueError> {
    let size = parse_size(text)?;
    let fits = (1 << 20..=1 << 30).contains(&size) && size % 4096 == 0;
    fits.then_some(size).ok_or(ValueError::TranslateMemory)
}

/// Modulo 2^64, so that a counter can start just below the end of its range.
pub(crate) fn parse_offset(text: &str) -> Result<u64, ValueError> {
    let number = match text.strip_prefix('-') {
        Some(below) => parse_u64(below)
            .filter(|&below| below <= 1 << 63)
            .map(u64::wrapping_neg),
        None => parse_u64(text),
    };
    number.ok_or(ValueError::Offset)
}

pub(crate) fn parse_memory(text: &str) -> Result<u64, ValueError> {
    let size = parse_size(text)?;
    if size < MEMORY_MIN {
        let mebibytes = (1..1 << 20).contains(&size).then_some(size);
        return Err(ValueError::LittleMemory { mebibytes });
    }
    if size % 4096 != 0 {
        return Err(ValueError::Pages);
    }
    Ok(size)
}

pub(crate) fn parse_control(text: OsString) -> Result<PathBuf, AddressError> {
    address::unix(text.as_bytes())
}

pub(crate) fn parse_gdb(text: OsString) -> Result<DebugAddress, AddressError> {
    DebugAddress::parse(text.as_bytes())
}

pub(crate) fn parse_serial(text: OsString) -> Result<SerialTarget, ValueError> {
    match text.as_bytes() {
        b"stdio" => Ok(SerialTarget::Stdio),
        b"null" | b"none" => Ok(SerialTarget::Null),
        b"file:" => Err(ValueError::SerialFile),
        bytes => match bytes.strip_prefix(b"file:") {
            Some(path) => Ok(SerialTarget::File(PathBuf::from(OsString::from_vec(path.to_vec())))),
            None => Err(ValueError::Serial),
        },
    }
}

/// A file name may hold commas: only the last ones count, and only before a mode or a format.
pub(crate) fn parse_disk(text: OsString) -> Result<DiskConfig, ValueError> {
    let mut path = text.as_bytes();
    let (mut mode, mut format) = (None, None);
    let modes = [
        (&b",overlay"[..], DiskMode::Overlay),
        (b",readonly", DiskMode::ReadOnly),
        (b",ro", DiskMode::ReadOnly),
    ];
    let formats = [
        (&b",format=raw"[..], DiskFormat::Raw),
        (b",format=qcow2", DiskFormat::Qcow2),
    ];
    loop {
        let found = modes
            .iter()
            .find_map(|(end, mode)| Some((path.strip_suffix(*end)?, *mode)));
        if let Some((rest, found)) = found.filter(|_| mode.is_none()) {
            (path, mode) = (rest, Some(found));
            continue;
        }
        let found = formats
            .iter()
            .find_map(|(end, format)| Some((path.strip_suffix(*end)?, *format)));
        match found.filter(|_| format.is_none()) {
            Some((rest, found)) => (path, format) = (rest, Some(found)),
            None => break,
        }
    }
    if path.is_empty() {
        return Err(ValueError::Disk);
    }
    Ok(DiskConfig {
        path: PathBuf::from(OsString::from_vec(path.to_vec())),
        mode: mode.unwrap_or(DiskMode::ReadWrite),
        format,
    })
}

pub(crate) fn parse_net(text: &str) -> Result<NetConfig, ValueError> {
    if let Some(name) = text.strip_prefix("tap=") {
        // A name of an interface: IFNAMSIZ, and what ends up in a path.
        let fits = (1..16).contains(&name.len()) && !name.contains(['/', ',']) && !name.starts_with('.');
        return match fits {
            true => Ok(NetConfig::Tap(name.into())),
            false => Err(ValueError::Net),
        };
    }
    let mut words = text.split(',');
    if words.next() != Some("user") {
        return Err(ValueError::Net);
    }
    let forwards = words.map(|word| parse_forward(word.strip_prefix("forward=").ok_or(ValueError::Net)?));
    Ok(NetConfig::User {
        forwards: forwards.collect::<Result<_, _>>()?,
    })
}

fn parse_forward(text: &str) -> Result<Forward, ValueError> {
    let port = |text: &str| {
        let number = text.parse::<u16>().ok().filter(|port| *port > 0);
        number.ok_or(ValueError::Forward)
    };
    let (host, guest) = text.rsplit_once(':').ok_or(ValueError::Forward)?;
    let (address, host) = match host.rsplit_once(':') {
        Some((address, host)) => (address.parse().map_err(|_| ValueError::Forward)?, host),
        None => (IpAddr::V4(Ipv4Addr::LOCALHOST), host),
    };
    Ok(Forward {
        address,
        host: port(host)?,
        guest: port(guest)?,
    })
}

/// A tag, and a directory whose name may hold commas: only the last one counts, and only before a mode.
pub(crate) fn parse_share(text: OsString) -> Result<ShareConfig, ValueError> {
    let bytes = text.as_bytes();
    let at = bytes.iter().position(|byte| *byte == b'=').ok_or(ValueError::Share)?;
    let (tag, place) = (&bytes[..at], &bytes[at + 1..]);
    let (path, mode) = [
        (&b",overlay"[..], ShareMode::Overlay),
        (b",readonly", ShareMode::ReadOnly),
        (b",ro", ShareMode::ReadOnly),
    ]
    .into_iter()
    .find_map(|(suffix, mode)| Some((place.strip_suffix(suffix)?, mode)))
    .unwrap_or((place, ShareMode::ReadWrite));
    let tag = std::str::from_utf8(tag).map_err(|_| ValueError::ShareTag)?;
    if tag.is_empty() || tag.len() > TAG_MAX || tag.contains(char::is_control) {
        return Err(ValueError::ShareTag);
    }
    if path.is_empty() {
        return Err(ValueError::Share);
    }
    Ok(ShareConfig {
        tag: tag.into(),
        path: PathBuf::from(OsString::from_vec(path.to_vec())),
        mode,
    })
}

/// A file, or a file and behind a space the words that go with it. A file whose name has spaces is one that exists.
pub(crate) fn parse_initrd(text: OsString) -> Result<InitrdFile, ValueError> {
    let bytes = text.as_bytes();
    let space = bytes.iter().position(|byte| *byte == b' ');
    let Some(space) = space.filter(|_| !Path::new(&text).exists()) else {
        return match bytes {
            [] => Err(ValueError::Initrd),
            _ => Ok(PathBuf::from(text).into()),
        };
    };
    if space == 0 {
        return Err(ValueError::InitrdWords);
    }
    Ok(InitrdFile {
        path: PathBuf::from(OsString::from_vec(bytes[..space].to_vec())),
        words: bytes[space + 1..].to_vec(),
    })
}

pub(crate) fn parse_seed(text: &str) -> Result<Seed, ValueError> {
    match text {
        "random" => Ok(Seed::Random),
        _ => parse_u64(text).map(Seed::Fixed).ok_or(ValueError::Seed),
    }
}

pub(crate) fn parse_count(text: &str) -> Result<u64, ValueError> {
    match parse_u64(text) {
        None => Err(ValueError::Count),
        Some(0) => Err(ValueError::CountZero),
        Some(count) => Ok(count),
    }
}

/// `N`, or `N,cores=N,threads=N,sockets=N` with some of these. The APICs have IDs of eight bits, of which FFH is for all of them.
pub(crate) fn parse_cpus(text: &str) -> Result<Topology, ValueError> {
    let mut words = text.split(',');
    let cpus = match parse_u64(words.next().unwrap_or_default()) {
        Some(count @ 1..=255) => count as u32,
        _ => return Err(ValueError::Cpus),
    };
    let (mut sockets, mut cores, mut threads) = (None, None, None);
    for word in words {
        let (name, number) = word.split_once('=').ok_or(ValueError::Arrangement)?;
        let part = match name {
            "sockets" => &mut sockets,
            "cores" => &mut cores,
            "threads" => &mut threads,
            _ => return Err(ValueError::Arrangement),
        };
        let number = parse_u64(number).and_then(|number| u32::try_from(number).ok());
        *part = Some(number.ok_or(ValueError::Arrangement)?);
    }
    if (sockets, cores, threads) == (None, None, None) {
        return Ok(Topology::of(cpus));
    }
    Ok(Topology::new(cpus, sockets, cores, threads)?)
}

/// How many there are, which [`parse_cpus`] has seen to fit.
pub(crate) fn cpus_of(topology: Topology) -> u8 {
    u8::try_from(topology.cpus()).unwrap_or(u8::MAX)
}

pub(crate) fn parse_seconds(text: &str) -> Result<Duration, ValueError> {
    let seconds: f64 = text.parse().map_err(|_| ValueError::Seconds)?;
    match Duration::try_from_secs_f64(seconds) {
        Ok(duration) if !duration.is_zero() => Ok(duration),
        _ => Err(ValueError::SecondsRange),
    }
}

pub(crate) fn parse_rtc_base(text: &str) -> Result<RtcBase, ValueError> {
    if matches!(text, "now" | "host") {
        return Ok(RtcBase::Now);
    }
    let seconds = match text.parse::<i64>() {
        Ok(seconds) => seconds,
        Err(_) => parse_date_time(text).ok_or(ValueError::Date)?,
    };
    // A CMOS clock has two digits for the year and two for the century.
    match seconds {
        0..253_402_300_800 => Ok(RtcBase::At(seconds)),
        _ => Err(ValueError::DateRange),
    }
}

/// `2024-01-31`, `2024-01-31T12:34:56`, with a blank or `t` for the `T`, with fractions of a second (dropped), and with
/// `Z` or an offset as `+01:00` (RFC 3339); without an offset it is UTC. A leap second becomes the second after it.
fn parse_date_time(text: &str) -> Option<i64> {
    let field = |range: std::ops::Range<usize>| -> Option<i64> {
        let digits = text.get(range)?;
        digits
            .bytes()
            .all(|b| b.is_ascii_digit())
            .then(|| digits.parse().ok())?
    };
    let separator = |at: usize, allowed: &str| text.get(at..at + 1).is_some_and(|c| allowed.contains(c));
    let (year, month, day) = (field(0..4)?, field(5..7)?, field(8..10)?);
    if !separator(4, "-")
        || !separator(7, "-")
        || !(1..=12).contains(&month)
        || !(1..=days_in(year, month)).contains(&day)
    {
        return None;
    }
    let midnight = days_from_civil(year, month, day) * 86_400;
    if text.len() == 10 {
        return Some(midnight);
    }
    let (hour, minute, second) = (field(11..13)?, field(14..16)?, field(17..19)?);
    if !separator(10, "Tt ") || !separator(13, ":") || !separator(16, ":") || hour > 23 || minute > 59 || second > 60 {
        return None;
    }
    let mut rest = text.get(19..)?;
    if let Some(fraction) = rest.strip_prefix('.') {
        let end = fraction.find(|c: char| !c.is_ascii_digit()).unwrap_or(fraction.len());
        if end == 0 {
            return None;
        }
        rest = &fraction[end..];
    }
    let zone = text.len() - rest.len();
    let offset = match rest.as_bytes() {
        [] | [b'Z' | b'z'] => 0,
        [sign @ (b'+' | b'-'), _, _, b':', _, _] => {
            let (hours, minutes) = (field(zone + 1..zone + 3)?, field(zone + 4..zone + 6)?);
            if hours > 23 || minutes > 59 {
                return None;
            }
            (hours * 60 + minutes) * if *sign == b'+' { 60 } else { -60 }
        }
        _ => return None,
    };
    Some(midnight + hour * 3600 + minute * 60 + second - offset)
}

fn days_in(year: i64, month: i64) -> i64 {
    match month {
        2 if year % 4 == 0 && (year % 100 != 0 || year % 400 == 0) => 29,
        2 => 28,
        4 | 6 | 9 | 11 => 30,
        _ => 31,
    }
}

/// Days from 1970-01-01 to a date of the proleptic Gregorian calendar, by counting from a March so that leap days come last.
fn days_from_civil(year: i64, month: i64, day: i64) -> i64 {
    let (year, month) = if month > 2 {
        (year, month - 3)
    } else {
        (year - 1, month + 9)
    };
    let day_of_year = (153 * month + 2) / 5 + day - 1;
    year * 365 + year.div_euclid(4) - year.div_euclid(100) + year.div_euclid(400) + day_of_year - 719_468
}

pub(crate) fn now() -> i64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(VIRTUAL_RTC_BASE, |since| since.as_secs() as i64)
}

/// The standard library's hasher keys come from the system's random source.
pub(crate) fn random_seed() -> u64 {
    use std::hash::{BuildHasher, RandomState};
    RandomState::new().hash_one(std::process::id())
}
