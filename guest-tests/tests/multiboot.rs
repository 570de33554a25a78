//! Multiboot guests in minivmm, and the same images in QEMU for comparison.

use guest_tests::{HELLO, INFO, LOOPS, LOOPS_NATIVE, Outcome, in_minivmm, in_qemu, linux, run};
use std::process::Command;
use std::time::Duration;

const LIMIT: Duration = Duration::from_secs(120);

/// The guest's line, and its status by the debug-exit port: v = 15H gives (v << 1) | 1.
// covers: boot/multiboot, exit-status/debug
#[test]
fn hello_prints_and_ends_with_its_status_as_in_qemu() {
    let ours = run(&mut in_minivmm(HELLO), LIMIT).must_end_with(0x15 << 1 | 1);
    assert_eq!(ours.console, "Hello from a multiboot guest.\n");
    let theirs = run(&mut in_qemu(HELLO), LIMIT).must_end_with(0x15 << 1 | 1);
    assert_eq!(ours.console, theirs.console);
}

/// The facts that info.c prints, one by one.
// covers: loader/multiboot, loader/multiboot-info, loader/multiboot-cmdline, loader/multiboot-modules
// covers: loader/multiboot-bss, cli/memory, cli/initrd, cli/cmdline
#[test]
fn info_sees_the_same_machine_state_as_in_qemu() {
    let module = std::env::temp_dir().join(format!("minivmm-module-{}", std::process::id()));
    std::fs::write(&module, "a module of some bytes").unwrap();
    let ours = run(
        in_minivmm(INFO)
            .arg("--initrd")
            .arg(&module)
            .args(["--cmdline", "one  two", "-m", "512M"]),
        LIMIT,
    );
    let theirs = run(
        in_qemu(INFO).arg("-initrd").arg(&module).args(["-append", "one  two"]),
        LIMIT,
    );
    std::fs::remove_file(&module).unwrap();
    let (ours, theirs) = (ours.must_end_with(1), theirs.must_end_with(1));
    for (fact, value) in [
        ("magic", "000000002badb002"),
        ("bss", "0000000000000000"),
        ("cr0.pe", "0000000000000001"),
        ("cr0.pg", "0000000000000000"),
        ("if", "0000000000000000"),
        ("vm", "0000000000000000"),
        ("info.clear", "0000000000000001"),
        ("modules", "0000000000000001"),
        ("module.clear", "0000000000000001"),
        ("module.aligned", "0000000000000001"),
        ("module.size", "0000000000000016"),
        ("module.contents", "a module of some bytes"),
        ("mmap.ram.mib", "0000000000000200"),
    ] {
        let of = |outcome: &Outcome| outcome.fact(fact).map(str::to_string);
        assert_eq!(of(&ours).as_deref(), Some(value), "{fact}");
        // QEMU takes a little RAM off the end for its own tables.
        if fact != "mmap.ram.mib" {
            assert_eq!(of(&ours), of(&theirs), "{fact}");
        }
    }
    // The command line starts with the file's name, and the rest is as it was given.
    assert_eq!(ours.fact("cmdline"), theirs.fact("cmdline"));
    assert!(
        ours.fact("cmdline").unwrap().ends_with("info.elf one  two"),
        "{:?}",
        ours.fact("cmdline")
    );
    // mem_lower counts from 0, mem_upper from 1 MiB, both in KiB; their ends differ by what firmware keeps to itself.
    let kib = |name: &str| u64::from_str_radix(ours.fact(name).unwrap(), 16).unwrap();
    assert!((600..=640).contains(&kib("mem_lower")), "{}", kib("mem_lower"));
    assert!(
        (510 << 10..=511 << 10).contains(&kib("mem_upper")),
        "{}",
        kib("mem_upper")
    );
}

/// The loops of the benchmark compute the same in the guest as on the host: 64-bit code, some 10^7 instructions each.
// covers: cpu/modes-64
#[test]
fn loops_compute_what_the_host_computes() {
    for (name, reps) in [
        ("digest", "2000"),
        ("qsort", "40000"),
        ("sieve", "1"),
        ("hash", "200000"),
    ] {
        let host = run(Command::new(LOOPS_NATIVE).args([name, reps]), LIMIT).must_end_with(0);
        let guest = run(in_minivmm(LOOPS).args(["--cmdline", &format!("{name} {reps}")]), LIMIT).must_end_with(1);
        assert!(host.fact("end").is_some_and(|value| value.len() == 16), "{host:?}");
        assert_eq!(guest.fact("end"), host.fact("end"), "{name}");
    }
}

/// Xen, with Linux as its first domain: two modules, the first with words of its own. The domain's processes print, and its end
/// ends the machine.
// covers: loader/multiboot-modules, loader/bios-data, boot/xen
#[test]
fn xen_boots_linux_from_its_modules() {
    let linux = linux();
    let xen = linux.kernel.with_file_name("xen");
    let domain = linux.kernel.with_file_name("vmlinuz-dom0");
    let kernel = format!(
        "{} console=hvc0 panic=-1 quiet minivmm.script=nothing",
        domain.display()
    );
    let outcome = run(
        in_minivmm(xen)
            .args(["--cmdline", "console=com1 com1=115200,8n1 dom0_mem=256M"])
            .args(["--initrd", &kernel, "--initrd"])
            .arg(&linux.initrd)
            .args([
                "-m",
                "1G",
                "--cpu-model",
                "haswell",
                "--max-instructions",
                "40000000000",
            ]),
        LIMIT,
    );
    for line in [
        "(XEN) Multiboot-e820 RAM map:",
        "(XEN) Xen version 4.",
        "minivmm-guest: script nothing ended with status 0",
        "(XEN) Entering ACPI S5 state.",
    ] {
        assert!(outcome.console.contains(line), "no {line:?} in {}", outcome.console);
    }
}
