//! What the guest's first process has to do, and the archive that it is in.

use std::{env, ffi::OsStr, io::IsTerminal, os::unix::ffi::OsStrExt, path::PathBuf};

use machine::{newc::Archive, share::channel};

use super::{error::RunError, modules::Module, options::RunOptions};
use crate::{
    config::{ConsoleChoice, NetConfig, ShareConfig},
    net,
};
use machine::share::ShareMode;

// Linux include/uapi/linux/mount.h.
const READ_ONLY: u32 = 1;
const NO_SUID: u32 = 2;
const NO_DEVICES: u32 = 4;
const NO_EXECUTION: u32 = 8;

/// What a plan is made of.
pub(super) struct Plan<'a> {
    pub modules: &'a [Module],
    /// The first is the root.
    pub shares: &'a [ShareConfig],
    /// What input comes through.
    pub console: ConsoleChoice,
    pub options: &'a RunOptions,
}

/// Steps under way: words that each end with a NUL.
#[derive(Default)]
struct Steps(Vec<u8>);

impl Steps {
    fn add(&mut self, words: &[&[u8]]) {
        for word in words {
            // No argument, variable or path has one.
            self.0.extend(word.iter().filter(|byte| **byte != 0));
            self.0.push(0);
        }
    }

    fn mount(&mut self, kind: &str, source: &str, target: &[u8], flags: u32, options: &str) {
        let flags = flags.to_string();
        let words = [
            b"mount",
            kind.as_bytes(),
            source.as_bytes(),
            target,
            flags.as_bytes(),
            options.as_bytes(),
        ];
        self.add(&words);
    }

    fn folder(&mut self, path: &[u8]) {
        self.add(&[b"folder", path]);
    }
}

impl Plan<'_> {
    /// The archive with the first process, modules and steps.
    ///
    /// # Errors
    /// The current directory has no name.
    pub(super) fn archive(&self, init: &[u8]) -> Result<Vec<u8>, RunError> {
        let steps = self.steps()?;
        let mut archive = Archive::default();
        for folder in ["dev", "channel", "lower", "upper", "new", "modules"] {
            archive.folder(folder);
        }
        // The kernel opens it for its first process before anything could have mounted /dev.
        archive.device("dev/console", 5, 1);
        archive.file("init", 0o755, init);
        for Module { name, bytes } in self.modules {
            archive.file(format!("modules/{name}.ko"), 0o644, bytes);
        }
        archive.file("plan", 0o644, &steps);
        Ok(archive.finish())
    }

    fn steps(&self) -> Result<Vec<u8>, RunError> {
        let mut steps = Steps::default();
        for module in self.modules {
            let path = format!("/modules/{}.ko", module.name);
            steps.add(&[b"module", path.as_bytes()]);
        }
        steps.mount("devtmpfs", "dev", b"/dev", NO_SUID, "");
        match self.console {
            ConsoleChoice::Serial => steps.add(&[b"serial", b"/dev/ttyS0"]),
            ConsoleChoice::Hvc => steps.add(&[b"port"]),
        }
        steps.mount("virtiofs", channel::TAG, b"/channel", NO_SUID | NO_DEVICES, "");
        steps.add(&[b"channel"]);
        let (root, others) = self
            .shares
            .split_first()
            .map_or((None, &[][..]), |(root, others)| (Some(root), others));
        if let Some(root) = root {
            steps.mount("virtiofs", &root.tag, b"/lower", READ_ONLY | NO_DEVICES, "");
        }
        steps.mount("tmpfs", "upper", b"/upper", 0, "mode=755");
        steps.folder(b"/upper/upper");
        steps.folder(b"/upper/work");
        let layers = "lowerdir=/lower,upperdir=/upper/upper,workdir=/upper/work";
        steps.mount("overlay", "root", b"/new", 0, layers);
        kernels_own(&mut steps);
        for share in others {
            let target = [b"/new", share.path.as_os_str().as_bytes()].concat();
            steps.folder(&target);
            let flags = match share.mode {
                ShareMode::ReadOnly => READ_ONLY | NO_DEVICES,
                ShareMode::ReadWrite | ShareMode::WriteBack | ShareMode::Overlay => NO_DEVICES,
            };
            steps.mount("virtiofs", &share.tag, &target, flags, "");
        }
        steps.add(&[b"root", b"/new"]);
        steps.add(&[b"hostname", b"minivmm"]);
        steps.add(&[b"loopback"]);
        if let Some(NetConfig::User { .. }) = self.options.net {
            let words = [net::ADDRESS, net::MASK, net::GATEWAY].map(str::as_bytes);
            steps.add(&[b"network", words[0], words[1], words[2]]);
            let text = format!("nameserver {}\n", net::NAMES);
            steps.add(&[b"text", b"/etc/resolv.conf", text.as_bytes()]);
        }
        self.caller(&mut steps)?;
        for word in &self.options.command {
            steps.add(&[b"argument", word.as_bytes()]);
        }
        Ok(steps.0)
    }

    /// Who runs the command, where and with what.
    fn caller(&self, steps: &mut Steps) -> Result<(), RunError> {
        let here = env::current_dir().and_then(|path| path.canonicalize());
        let here = here.map_err(|source| RunError::File {
            option: "run",
            path: PathBuf::from("."),
            source,
        })?;
        let number = |value: u32| value.to_string().into_bytes();
        steps.add(&[b"umask", &number(machine::collect::umask())]);
        let (user, group) = (rustix::process::getuid(), rustix::process::getgid());
        steps.add(&[b"user", &number(user.as_raw()), &number(group.as_raw())]);
        for group in rustix::process::getgroups().unwrap_or_default() {
            steps.add(&[b"group", &number(group.as_raw())]);
        }
        let streams = [
            std::io::stdin().is_terminal(),
            std::io::stdout().is_terminal(),
            std::io::stderr().is_terminal(),
        ];
        let bits = (0..).zip(streams).map(|(bit, is)| u32::from(is) << bit).sum();
        let size = [
            rustix::termios::tcgetwinsize(std::io::stdin()),
            rustix::termios::tcgetwinsize(std::io::stdout()),
            rustix::termios::tcgetwinsize(std::io::stderr()),
        ];
        let size = size.into_iter().flatten().next();
        let (rows, columns) = size.map_or((24, 80), |size| (size.ws_row.into(), size.ws_col.into()));
        steps.add(&[b"terminal", &number(bits), &number(rows), &number(columns)]);
        steps.add(&[b"directory", here.as_os_str().as_bytes()]);
        for (name, value) in env::vars_os() {
            let variable = [name.as_os_str(), OsStr::new("="), value.as_os_str()].map(OsStrExt::as_bytes);
            steps.add(&[b"environment", &variable.concat()]);
        }
        Ok(())
    }
}

/// What the kernel makes itself, and what is not to be the host's.
fn kernels_own(steps: &mut Steps) {
    for (kind, target, flags) in [
        ("proc", "/new/proc", NO_SUID | NO_DEVICES | NO_EXECUTION),
        ("sysfs", "/new/sys", NO_SUID | NO_DEVICES | NO_EXECUTION),
        ("devtmpfs", "/new/dev", NO_SUID),
    ] {
        steps.folder(target.as_bytes());
        steps.mount(kind, kind, target.as_bytes(), flags, "");
    }
    for (kind, target, flags, options) in [
        (
            "devpts",
            "/new/dev/pts",
            NO_SUID | NO_EXECUTION,
            "mode=620,ptmxmode=666",
        ),
        ("tmpfs", "/new/dev/shm", NO_SUID | NO_DEVICES, "mode=1777"),
        ("tmpfs", "/new/run", NO_SUID | NO_DEVICES, "mode=755"),
        (
            "tracefs",
            "/new/sys/kernel/tracing",
            NO_SUID | NO_DEVICES | NO_EXECUTION,
            "",
        ),
    ] {
        if kind != "tracefs" {
            steps.folder(target.as_bytes());
        }
        let flags = flags.to_string();
        steps.add(&[
            b"try",
            kind.as_bytes(),
            kind.as_bytes(),
            target.as_bytes(),
            flags.as_bytes(),
            options.as_bytes(),
        ]);
    }
}
