//! Builds the first process of a guest of `minivmm run` from its one file, which stands on the core library and the kernel alone.

use std::{env, path::PathBuf, process::Command};

fn main() {
    println!("cargo::rerun-if-changed=init/init.rs");
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo gives an output folder")).join("init");
    let rustc = env::var_os("RUSTC").expect("cargo names the compiler");
    let linker = [
        "-nostartfiles",
        "-nodefaultlibs",
        "-static",
        "-no-pie",
        "-Wl,--build-id=none,-z,noexecstack",
    ];
    let mut command = Command::new(rustc);
    command
        .args(["--edition", "2024", "--crate-type", "bin", "--crate-name", "init"])
        .args(["--target", "x86_64-unknown-linux-gnu"])
        .args([
            "-Cpanic=abort",
            "-Copt-level=s",
            "-Crelocation-model=static",
            "-Cstrip=symbols",
        ])
        .args(linker.map(|argument| format!("-Clink-arg={argument}")))
        .arg("-o")
        .arg(&out)
        .arg("init/init.rs");
    let status = command.status().expect("the compiler can be started");
    assert!(status.success(), "{command:?} has failed: {status}");
}
