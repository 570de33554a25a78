//! The developer loop, one word each: `cargo xtask demo | test | lab | matrix | bench | coverage | guest | guide | deb | fuzz | soak`.

use clap::Parser;
use std::process::ExitCode;

mod bench;
mod counts;
mod coverage;
mod deb;
mod demo;
mod fuzz;
mod guest;
mod guide;
mod lab;
mod matrix;
mod packages;
mod progress;
mod python;
mod soak;
mod table;
mod test;
mod tree;

#[derive(Parser)]
#[command(
    name = "cargo xtask",
    about = "The developer loop of minivmm",
    disable_help_subcommand = true
)]
enum Command {
    /// Boot Debian's Linux to a shell, with a trace made in it: fetches and builds what that takes
    Demo(demo::DemoOptions),
    /// Run the whole test suite: what CI runs
    Test(test::TestOptions),
    /// Run the guest tests on all CPU models and compare with resources/matrix-expected.txt; UPDATE=1 writes it
    Matrix(matrix::MatrixOptions),
    /// Measure the speed against QEMU and the host: medians of alternated runs, as ratios
    Bench(bench::BenchOptions),
    /// Write resources/coverage.md: each item of the plan with the tests that prove it
    Coverage(coverage::CoverageOptions),
    /// Make the Linux guest's kernel and initramfs below target/guest
    Guest(guest::GuestOptions),
    /// Write what of the guide is made from the code, and build the book where mdbook is installed
    Guide(guide::GuideOptions),
    /// Make the Debian package below target/deb
    Deb(deb::DebOptions),
    /// Run minivmm on a real KVM: guest tests, units by handover, and Linux, with kvm-amd inside QEMU or kvm-intel inside Bochs
    Lab(lab::LabOptions),
    /// Run the fuzz targets under libFuzzer, which learns from coverage
    Fuzz(fuzz::FuzzOptions),
    /// Run two equal Linux guests side by side for hours: perf, resctrl, modules, disks. Their states must stay the same, and nothing may grow
    Soak(soak::SoakOptions),
}

fn main() -> ExitCode {
    let result = match Command::parse() {
        Command::Demo(options) => demo::run(&options),
        Command::Test(options) => test::run(&options),
        Command::Matrix(options) => matrix::run(&options),
        Command::Bench(options) => bench::run(&options),
        Command::Coverage(options) => coverage::run(&options).map(|()| ExitCode::SUCCESS),
        Command::Guest(options) => guest::run(&options),
        Command::Deb(options) => deb::run(&options),
        Command::Guide(options) => guide::run(&options),
        Command::Lab(options) => lab::run(&options),
        Command::Fuzz(options) => fuzz::run(&options),
        Command::Soak(options) => soak::run(&options),
    };
    result.unwrap_or_else(|error| {
        eprintln!("xtask: {error:#}");
        ExitCode::FAILURE
    })
}
