//! The stock Linux guest: Debian's cloud kernel with busybox.

use guest_tests::{
    INIT_MARKER, LOOPS, Outcome, in_minivmm, linux, linux_in_minivmm, on_host_cpu, run, start_with_input,
};
use std::process::Command;
use std::time::Duration;

const LIMIT: Duration = Duration::from_secs(300);

/// The script's own lines are in guest-tests/linux/scripts/selftest.
// covers: boot/debian, loader/bzimage, exit-status/0, loader/acpi-power
#[test]
fn debian_boots_to_a_shell_runs_the_script_and_powers_off() {
    let guest = run(
        &mut linux_in_minivmm("console=ttyS0 panic=-1 minivmm.script=selftest"),
        LIMIT,
    )
    .must_end_with(0);
    let console = &guest.console;
    assert!(console.contains(INIT_MARKER), "{console}");
    let host = Command::new("md5sum").arg(&linux().sample).output().unwrap();
    let md5 = String::from_utf8(host.stdout).unwrap();
    let md5 = md5.split(' ').next().unwrap();
    assert_eq!(guest.fact("selftest: md5"), Some(md5), "{console}");
    for line in [
        "gzip round trip holds",
        "fork loop holds",
        "floating point holds",
        "the clock goes on",
        "all holds",
    ] {
        assert!(console.contains(&format!("selftest: {line}\n")), "{line}\n{console}");
    }
    assert!(
        console.contains("minivmm-guest: script selftest ended with status 0\n"),
        "{console}"
    );
    for word in ["Oops", "BUG:", "WARNING:", "Kernel panic", "Call Trace"] {
        assert!(!console.contains(word), "{word}\n{console}");
    }
}

/// What `--stats` says of a run, by the name before the colon.
fn figure<'a>(errors: &'a str, name: &str) -> &'a str {
    let line = errors
        .lines()
        .find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
    line.unwrap_or_else(|| panic!("no {name} in {errors}")).trim()
}

/// The number of steps and the hash of memory and registers, word for word what `--stats` prints.
fn position(guest: &Outcome) -> (String, String) {
    let steps = figure(&guest.errors, "steps").split(' ').next().unwrap_or_default();
    (steps.to_string(), figure(&guest.errors, "state hash").to_string())
}

// covers: determinism/repeats
#[test]
fn two_boots_with_the_same_inputs_end_in_the_same_state() {
    let boot = || {
        let mut command = linux_in_minivmm("console=ttyS0 panic=-1 minivmm.script=demo");
        run(command.args(["--seed", "7", "--stats"]), LIMIT).must_end_with(0)
    };
    let (first, second) = (boot(), boot());
    assert!(
        first.console.contains("minivmm-guest: script demo ended with status 0"),
        "{}",
        first.console
    );
    assert_eq!(position(&first), position(&second));
    // Not only the ends are the same: every line and every time stamp that the kernel printed is.
    assert_eq!(first.console, second.console);
    assert!(
        position(&first).0.parse::<u64>().is_ok_and(|steps| steps > 500_000_000),
        "{:?}",
        position(&first)
    );
}

/// The kernel's decompression and its first steps, on this CPU and on two that QEMU emulates: what the vendors' parts do where
/// the manual leaves results undefined, and what QEMU does, reaches no guest.
// covers: determinism/vendor
#[test]
fn the_state_does_not_depend_on_the_vendor_of_the_host_cpu() {
    let mut boot = linux_in_minivmm("console=ttyS0");
    boot.args(["--max-instructions", "60000000", "--stats"]);
    let here = position(&run(&mut boot, LIMIT).must_end_with(8));
    assert_eq!(here.0, "60000000");
    for cpu in ["Skylake-Client", "EPYC"] {
        let there = position(&run(&mut on_host_cpu(cpu, &boot), LIMIT).must_end_with(8));
        assert_eq!(here, there, "{cpu}");
    }
}

// covers: determinism/repeats
#[test]
fn different_inputs_end_in_different_states() {
    let run_with = |line: &str| {
        let mut command = in_minivmm(LOOPS);
        position(&run(command.args(["--cmdline", line, "--stats"]), LIMIT).must_end_with(1))
    };
    let (same, again, other) = (run_with("hash 1000"), run_with("hash 1000"), run_with("hash 1001"));
    assert_eq!(same, again);
    assert_ne!(same.0, other.0, "steps");
    assert_ne!(same.1, other.1, "hash");
}

/// What the kernel says it has found, by leaf 15H or against the PIT.
// covers: tsc/khz, tsc/offset
#[test]
fn the_kernel_calibrates_to_the_frequency_that_is_asked_for() {
    let detected = |model: &str, khz: u32, offset: &str| {
        let mut boot = linux_in_minivmm("console=ttyS0 earlyprintk=serial");
        boot.args([
            "--cpu-model",
            model,
            "--tsc-khz",
            &khz.to_string(),
            "--tsc-offset",
            offset,
        ]);
        let guest = run(boot.args(["--max-instructions", "200000000"]), LIMIT).must_end_with(8);
        assert!(
            !guest.console.contains("TSC ADJUST"),
            "a firmware bug: {}",
            guest.console
        );
        let line = |what: &str| {
            let mut lines = guest.console.lines();
            let line = lines.rfind(|line| line.contains("tsc: Detected ") && line.ends_with(what))?;
            let mhz = line.split("tsc: Detected ").nth(1)?.split(' ').next()?;
            mhz.parse::<f64>().ok()
        };
        let found = line(" MHz TSC").or_else(|| line(" MHz processor"));
        found.unwrap_or_else(|| panic!("{model}: {}", guest.console))
    };
    assert_eq!(detected("skylake-server", 2_750_500, "-4000000000"), 2750.5);
    assert_eq!(detected("sapphirerapids", 1_900_000, "123456789012"), 1900.0);
    let counted = detected("westmere", 3_100_000, "0xffffffff00000000");
    assert!((counted - 3100.0).abs() < 0.3, "{counted}");
}

/// Somebody at the console: what is typed reaches the shell, and its answers come back.
// covers: boot/debian
#[test]
fn the_shell_answers_what_is_typed() {
    let mut guest = start_with_input(&mut linux_in_minivmm("console=ttyS0 quiet panic=-1"), LIMIT);
    assert!(guest.wait_for("guest# ").is_some(), "{}", guest.console());
    guest.enter("echo $((6 * 7)) is the answer");
    assert!(guest.wait_for("\n42 is the answer\n").is_some(), "{}", guest.console());
    // Job control: the shell is on a terminal of its own.
    guest.enter("sleep 100 & jobs; kill %1; tty");
    assert!(guest.wait_for("/dev/ttyS0\n").is_some(), "{}", guest.console());
    assert!(guest.console().contains("[1]+  Running"), "{}", guest.console());
    guest.enter("poweroff");
    let end = guest.finish().must_end_with(0);
    assert!(end.console.contains("Power down"), "{}", end.console);
}

/// Boots a model to the end of the script, and says what /proc/cpuinfo has as flags.
fn flags_on(model: &str) -> String {
    let mut boot = linux_in_minivmm("console=ttyS0 panic=-1 minivmm.script=selftest");
    let guest = run(boot.args(["--cpu-model", model]), LIMIT).must_end_with(0);
    let console = guest.console;
    assert!(
        console.contains("minivmm-guest: script selftest ended with status 0\n"),
        "{model}\n{console}"
    );
    for word in ["Oops", "BUG:", "WARNING:", "Call Trace", "unchecked MSR access"] {
        assert!(!console.contains(word), "{model}: {word}\n{console}");
    }
    let flags = console.lines().find_map(|line| line.strip_prefix("selftest: flags "));
    format!(" {} ", flags.unwrap_or_else(|| panic!("{model}: no flags\n{console}")))
}

/// What Linux finds on each model: features that it has, and that it has not. The long form boots all, the short one those
/// with the most and the least.
// covers: cpu/models-boot
#[test]
fn debian_boots_on_every_model_with_long_mode() {
    let full = guest_tests::full();
    for (model, short, has, lacks) in [
        ("core2", true, "ssse3 monitor", "sse4_2 pcid xsave"),
        ("westmere", false, "sse4_2 aes pclmulqdq pcid", "xsave rdrand"),
        ("sandybridge", false, "avx xsave xsaveopt", "f16c avx2"),
        (
            "haswell",
            false,
            "avx2 fma bmi1 bmi2 movbe f16c smep",
            "adx rdseed smap",
        ),
        ("broadwell", false, "adx rdseed smap", "clflushopt xsavec"),
        (
            "skylake-server",
            false,
            "clflushopt clwb xsavec pku",
            "sha_ni umip amx_tile",
        ),
        (
            "icelake-server",
            false,
            "sha_ni umip la57 gfni vaes",
            "avx512_bf16 movdiri",
        ),
        ("snowridge", false, "sha_ni umip movdiri", "avx"),
        (
            "sapphirerapids",
            false,
            "la57 movdir64b avx_vnni serialize avx512_fp16",
            "amx_tile",
        ),
        ("alderlake", true, "umip avx_vnni gfni", "avx512f la57"),
    ] {
        if !(full || short) {
            continue;
        }
        let flags = flags_on(model);
        for flag in has.split(' ') {
            assert!(flags.contains(&format!(" {flag} ")), "{model} has no {flag}: {flags}");
        }
        for flag in lacks.split(' ') {
            assert!(!flags.contains(&format!(" {flag} ")), "{model} has {flag}: {flags}");
        }
    }
}

/// The vmlinux in Debian's bzImage: the payload is LZ4 in its legacy frame, a magic number and then blocks of at most 8 MiB
/// with their sizes (lz4's doc/lz4_Frame_format.md, "Legacy frame"; Linux's Documentation/arch/x86/boot.rst, payload_offset).
fn unpacked_kernel() -> Vec<u8> {
    let image = std::fs::read(&linux().kernel).unwrap();
    let word = |at: usize| u32::from_le_bytes(image[at..at + 4].try_into().unwrap()) as usize;
    let setup_sectors = usize::from(image[0x1f1]);
    let payload = (setup_sectors + 1) * 512 + word(0x248);
    // The last word is the size of what comes out.
    let end = payload + word(0x24c) - 4;
    assert_eq!(word(payload), 0x184c_2102, "not LZ4");
    let (mut at, mut kernel) = (payload + 4, Vec::new());
    while at < end {
        let block = &image[at + 4..][..word(at)];
        kernel.extend(lz4_flex::block::decompress(block, 8 << 20).unwrap());
        at += 4 + block.len();
    }
    assert_eq!(kernel.len(), word(end));
    kernel
}

/// Debian's kernel without its wrapping, by its PVH note, and by its 64-bit entry point when the note is no more.
// covers: loader/pvh, loader/elf64
#[test]
fn debians_vmlinux_boots_by_both_of_its_entry_points() {
    let mut kernel = unpacked_kernel();
    for way in ["PVH note", "64-bit entry point"] {
        let file = std::env::temp_dir().join(format!("minivmm-test-{}-vmlinux", std::process::id()));
        std::fs::write(&file, &kernel).unwrap();
        let mut boot = in_minivmm(&file);
        boot.arg("--initrd").arg(&linux().initrd);
        boot.args(["--cmdline", "console=ttyS0 panic=-1 minivmm.script=demo", "-v"]);
        let guest = run(&mut boot, LIMIT);
        std::fs::remove_file(&file).unwrap();
        let guest = guest.must_end_with(0);
        let entered = if way == "PVH note" { "Pvh" } else { "Linux64" };
        assert!(guest.errors.contains(entered), "{way}: {}", guest.errors);
        assert!(
            guest.console.contains("minivmm-guest: script demo ended with status 0"),
            "{way}: {}",
            guest.console
        );
        // XEN_ELFNOTE_PHYS32_ENTRY, 18, becomes a note that nobody knows.
        let note = [4, 0, 0, 0, 8, 0, 0, 0, 18, 0, 0, 0, b'X', b'e', b'n', 0];
        let other = [4, 0, 0, 0, 4, 0, 0, 0, 18, 0, 0, 0, b'X', b'e', b'n', 0];
        let found = |pattern: [u8; 16]| kernel.windows(16).position(|bytes| bytes == pattern);
        if let Some(at) = found(note).or_else(|| found(other)) {
            kernel[at + 8] = 0x7f;
        }
    }
}
