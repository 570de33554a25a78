use super::*;

// covers: linux-guest/tools
#[test]
fn the_linker_s_list_is_read() {
    let text = "\tlinux-vdso.so.1 (0x00007ffd2b5f6000)\n\
                    \tlibm.so.6 => /x/lib/x86_64-linux-gnu/libm.so.6 (0x00007f1f3c7d0000)\n\
                    \tlibc.so.6 => /x/a folder (1)/libc.so.6 (0x00007f1f3c5ef000)\n\
                    \t/lib64/ld-linux-x86-64.so.2 => /x/lib/ld-linux-x86-64.so.2 (0x00007f1f3c8b7000)\n";
    let expected = ["/x/lib/x86_64-linux-gnu/libm.so.6", "/x/a folder (1)/libc.so.6"];
    assert_eq!(library_files(text), expected.map(PathBuf::from));
}

// covers: linux-guest/tools
#[test]
fn the_archive_has_tools_modules_and_programs_and_is_the_same_each_time() {
    let folder = std::env::temp_dir().join(format!("minivmm-xtask-tools-{}", std::process::id()));
    let (root, modules) = (folder.join("tools"), folder.join("modules"));
    for name in ["lib64", "usr/bin", "usr/sbin", "usr/lib/x86_64-linux-gnu/gconv"] {
        fs::create_dir_all(root.join(name)).unwrap();
    }
    fs::create_dir_all(&modules).unwrap();
    fs::write(root.join("usr/bin/perf"), "perf's bytes").unwrap();
    fs::write(root.join("usr/lib/x86_64-linux-gnu/libm.so.6"), "libm's bytes").unwrap();
    for (name, _) in TOOL_MODULES {
        fs::write(modules.join(name), "module").unwrap();
    }
    let program = folder.join("branches");
    fs::write(&program, "program").unwrap();
    let script = folder.join("perf-pt");
    fs::write(&script, "script").unwrap();
    let make = || {
        pack(
            &root,
            &modules,
            std::slice::from_ref(&program),
            std::slice::from_ref(&script),
        )
        .unwrap()
    };
    let (bytes, again) = (make(), make());
    fs::remove_dir_all(&folder).unwrap();
    assert_eq!(bytes, again);
    let has = |name: &str| bytes.windows(name.len()).any(|window| window == name.as_bytes());
    for name in [
        "usr/bin/perf\0",
        "perf's bytes",
        "usr/lib/x86_64-linux-gnu/libm.so.6\0",
        "modules/msr.ko\0",
        "usr/bin/branches\0",
        "scripts/perf-pt\0",
    ] {
        assert!(has(name), "{name}");
    }
}
