use super::*;

// covers: suite/demo
#[test]
fn the_script_s_status_is_read_from_the_console() {
    for (line, status) in [
        ("minivmm-guest: script demo ended with status 0\r", Some(0)),
        ("[    1.5] minivmm-guest: script demo ended with status 127", Some(127)),
        ("minivmm-guest: script other ended with status 0", None),
        ("minivmm-guest: script demo ended with status", None),
        ("login:", None),
    ] {
        assert_eq!(script_status(line, "demo"), status, "{line}");
    }
}

// covers: suite/demo
#[test]
fn the_guest_is_booted_by_kernel_initrd_and_command_line() {
    let guest = Guest {
        kernel: "k".into(),
        initrd: "i".into(),
    };
    let command = boot(Path::new("minivmm"), &guest, CMDLINE);
    let words: Vec<_> = command.get_args().map(|word| word.to_str().unwrap()).collect();
    assert_eq!(
        words,
        ["--kernel", "k", "--initrd", "i", "--cmdline", "console=ttyS0", "--pt"]
    );
}
