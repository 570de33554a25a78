use super::*;

// covers: suite/demo
#[test]
fn the_highest_number_in_a_name_is_the_newest() {
    let text =
        "xen-hypervisor-4.9-amd64\nxen-hypervisor-4.17-amd64\nxen-hypervisor-4.17-arm64\nxen-hypervisor-common\n";
    let newest = |text: &'static str| highest(text.lines(), "xen-hypervisor-4.", "-amd64");
    assert_eq!(newest(text), Some("xen-hypervisor-4.17-amd64"));
    assert_eq!(newest("xen-hypervisor-common"), None);
}

#[test]
fn the_newest_cloud_kernel_is_chosen_by_number() {
    for (text, kernel) in [
        (
            "linux-image-cloud-amd64\n  Depends: linux-image-6.1.0-56-cloud-amd64\n",
            Some("linux-image-6.1.0-56-cloud-amd64"),
        ),
        (
            "linux-image-6.1.0-9-cloud-amd64 linux-image-6.1.0-32-cloud-amd64 linux-image-6.1.0-31-cloud-amd64",
            Some("linux-image-6.1.0-32-cloud-amd64"),
        ),
        (
            "linux-image-6.1.0-40-cloud-amd64-dbg linux-image-6.1.0-40-cloud-amd64-unsigned",
            None,
        ),
        ("  Depends: linux-image-6.12.9+deb13-cloud-amd64", None),
        ("linux-image-6.1.0-40-amd64", None),
        ("", None),
    ] {
        assert_eq!(newest_kernel(text).as_deref(), kernel, "{text}");
    }
}

// covers: linux-guest/tools
#[test]
fn a_program_s_libraries_are_followed_and_nothing_else() {
    let text = "linux-perf\n  Depends: libdw1\n  Depends: zlib1g\n  Depends: <perl:any>\n    perl\nperl\n  Depends: libdb5.3\n\
                    libdw1\n  Depends: libc6\n |Depends: libelf1\n  Depends: <libwhat>\nlibc6\n  Depends: libgcc-s1\n  PreDepends: debconf\n\
                    libgcc-s1\n  Depends: libc6\nlibelf1\nzlib1g\n  Depends: libc6\n";
    let names = libraries(&["linux-perf"], text).unwrap();
    assert_eq!(
        names,
        ["libc6", "libdw1", "libelf1", "libgcc-s1", "linux-perf", "zlib1g"]
    );
    // Without package lists apt-cache says nothing, and of a package that is gone neither.
    assert_eq!(libraries(&["linux-perf"], ""), None);
    assert_eq!(libraries(&["a"], "a\n  Depends: libgone\n"), None);
}

#[test]
fn a_fetched_package_is_found_by_name_and_the_newest_wins() {
    let folder = std::env::temp_dir().join(format!("minivmm-xtask-{}", std::process::id()));
    fs::create_dir_all(&folder).unwrap();
    for name in [
        "linux-image-6.1.0-9-cloud-amd64_6.1.27-1_amd64.deb",
        "linux-image-6.1.0-32-cloud-amd64_6.1.129-1_amd64.deb",
        "linux-image-6.1.0-40-cloud-amd64_6.1.140-1_amd64.part",
        "busybox-static_1%3a1.35.0-4+b1_amd64.deb",
        "busybox-static_1%3a1.35.0-4+b1_i386.deb",
        "vmlinuz-6.1.0-9-cloud-amd64",
        "vmlinuz-6.1.0-32-cloud-amd64",
        "vmlinuz-6.1.0-40-amd64",
    ] {
        fs::write(folder.join(name), "").unwrap();
    }
    let name = |file: Option<PathBuf>| file.map(|file| file.file_name().unwrap().to_str().unwrap().to_string());
    let kernel = name(newest_package_file(&folder, "linux-image-6.1.0-"));
    let busybox = name(newest_package_file(&folder, "busybox-static_"));
    let installed = name(boot_file(&folder));
    fs::remove_dir_all(&folder).unwrap();
    assert_eq!(
        kernel.as_deref(),
        Some("linux-image-6.1.0-32-cloud-amd64_6.1.129-1_amd64.deb")
    );
    assert_eq!(busybox.as_deref(), Some("busybox-static_1%3a1.35.0-4+b1_amd64.deb"));
    assert_eq!(installed.as_deref(), Some("vmlinuz-6.1.0-32-cloud-amd64"));
    assert_eq!(newest_package_file(&folder, "x"), None);
}

// covers: run/kernel
#[test]
fn a_kernel_and_its_modules_are_kept_where_an_installed_program_looks() {
    let folder = std::env::temp_dir().join(format!("xtask-keep-{}", std::process::id()));
    let (guest, cache) = (folder.join("guest"), folder.join("cache"));
    let module = "lib/modules/6.1.0-1-cloud-amd64/kernel/fs/fuse/fuse.ko";
    fs::create_dir_all(guest.join(module).parent().unwrap()).unwrap();
    fs::write(guest.join(module), "module").unwrap();
    for contents in ["kernel", "newer"] {
        fs::write(guest.join("vmlinuz"), contents).unwrap();
        keep_in(&cache, &guest.join("vmlinuz")).unwrap();
        assert_eq!(fs::read_to_string(cache.join("vmlinuz")).unwrap(), contents);
        assert_eq!(fs::read_to_string(cache.join(module)).unwrap(), "module");
    }
    fs::remove_dir_all(folder).unwrap();
}
