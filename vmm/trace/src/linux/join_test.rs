use super::*;

#[test]
fn symbols_modules_and_names_are_those_of_one_recording() {
    let folder = std::env::temp_dir().join(format!("minivmm-join-linux-{}", std::process::id()));
    fs::create_dir(&folder).unwrap();
    let part = |n: usize, files: &[(&str, &str)]| {
        let part = folder.join(n.to_string());
        fs::create_dir(&part).unwrap();
        for (name, text) in files {
            fs::write(part.join(name), text).unwrap();
        }
        part
    };
    let kernel = "banner Linux\nslide 0x0\n";
    let parts = [
        folder.join("none"),
        part(
            1,
            &[
                ("kernel", &format!("{kernel}cut\n")),
                ("kallsyms", "1 T a\n5 t init\t[m]\n6 t f\t[m]\n"),
                ("modules", "m 8 0 - Loading 0x5\n"),
                ("tasks", "10 0x1000 1 1 init\n20 0x2000 2 2 sh\n"),
                ("files", "x\ny\n"),
                ("vdso-0.so", "64\n64\n"),
            ],
        ),
        part(
            2,
            &[
                ("kernel", kernel),
                ("kallsyms", "1 T a\n6 t f\t[m]\n8 t g\t[n]\n"),
                ("modules", "m 4 0 - Live 0x5\nn 4 0 - Live 0x8\n"),
                ("tasks", "30 0x1000 1 1 init\n31 0x2000 2 2 ls -l\n40 0x1000 3 3 init\n"),
                ("files", "y\nz\n"),
                ("vdso-0.so", "32\n"),
                ("vdso-1.so", "64\n64\n"),
            ],
        ),
    ];
    let joined = folder.join("joined");
    join(&parts, &joined).unwrap();
    for (name, text) in [
        ("kernel", "banner Linux\nslide 0x0\ncut\n"),
        ("kallsyms", "1 T a\n5 t init\t[m]\n6 t f\t[m]\n8 t g\t[n]\n"),
        ("modules", "m 8 0 - Loading 0x5\nn 4 0 - Live 0x8\n"),
        (
            "tasks",
            "10 0x1000 1 1 init\n20 0x2000 2 2 sh\n31 0x2000 2 2 ls -l\n40 0x1000 3 3 init\n",
        ),
        ("files", "x\ny\nz\n"),
        ("vdso-0.so", "64\n64\n"),
        ("vdso-1.so", "32\n"),
    ] {
        assert_eq!(fs::read_to_string(joined.join(name)).unwrap(), text, "{name}");
    }
    assert!(!joined.join("vdso-2.so").exists());
    fs::remove_dir_all(folder).unwrap();
}
