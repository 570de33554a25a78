use super::*;

fn common() -> Common {
    Common {
        cpus: Topology::of(1),
        memory: 64 << 20,
        max_instructions: 1000,
        timeout: Duration::from_secs(9),
        pass: PassBy::Auto,
        all_models: false,
        report_as: None,
        options: vec!["--stats".into()],
    }
}

fn folder(name: &str, files: &[(&str, &str)]) -> PathBuf {
    let folder = std::env::temp_dir().join(format!("minivmm-matrix-{name}-{}", std::process::id()));
    fs::create_dir_all(&folder).unwrap();
    for (name, text) in files {
        fs::write(folder.join(name), text).unwrap();
    }
    folder
}

// covers: matrix/guests
#[test]
fn a_folder_s_guests_have_their_settings() {
    let files = [
        ("b.elf", ""),
        ("b.toml", "cpus = 4\ncmdline = \"x y\"\nmax-instructions = 7\n"),
        ("a.elf", ""),
        (
            "linux.toml",
            "kernel = \"vmlinuz\"\ninitrd = \"i.cpio\"\nmemory = \"1G\"\npass = \"tap\"\noptions = [\"--seed\", \"3\"]\n",
        ),
        ("notes.txt", ""),
    ];
    let folder = folder("settings", &files);
    let guests = guests(&folder).unwrap();
    let names: Vec<&str> = guests.iter().map(|guest| guest.name.as_str()).collect();
    assert_eq!(names, ["a", "b", "linux"]);
    let cells = cells(&guests, &["p6".into()], &[EngineChoice::Soft], &common(), None);
    let text = |n: usize| -> String {
        let words: Vec<_> = cells[n].arguments.iter().map(|word| word.to_string_lossy()).collect();
        words.join(" ").replace(&*folder.to_string_lossy(), "DIR")
    };
    assert_eq!(
        text(1),
        "--kernel DIR/b.elf --cmdline x y --cpu-model p6 --engine soft --cpus 4 --memory 67108864 --serial stdio \
             --clock virtual --max-instructions 7 --timeout 9 --stats"
    );
    assert_eq!(
        text(2),
        "--kernel DIR/vmlinuz --initrd DIR/i.cpio --cpu-model p6 --engine soft --cpus 1 --memory 1G --serial stdio \
             --clock virtual --max-instructions 1000 --timeout 9 --seed 3 --stats"
    );
    assert_eq!((cells[0].pass, cells[2].pass), (PassBy::Auto, PassBy::Tap));
    fs::remove_dir_all(folder).unwrap();
}

// covers: matrix/long-mode
#[test]
fn models_of_all_are_told_from_those_that_are_named() {
    let guest = [Guest::of_kernel(Path::new("/x/g"), None, None)];
    let common = Common {
        all_models: true,
        ..common()
    };
    let names = ["p6".into(), "haswell,-rdrand".into()];
    let cells = cells(&guest, &names, &[EngineChoice::Soft], &common, None);
    assert!(cells[0].one_of_all && !cells[1].one_of_all);
}

// covers: matrix/labs
#[test]
fn on_kvm_no_instructions_are_counted_and_a_host_can_have_a_name() {
    let guest = [Guest::of_kernel(Path::new("/x/g"), None, None)];
    let common = Common {
        report_as: Some("kvm-intel".into()),
        ..common()
    };
    let cells = cells(&guest, &["p6".into()], &[EngineChoice::Kvm], &common, None);
    let words: Vec<_> = cells[0].arguments.iter().map(|word| word.to_string_lossy()).collect();
    let text = words.join(" ");
    assert!(
        text.contains("--engine kvm") && !text.contains("--max-instructions"),
        "{text}"
    );
    assert_eq!(cells[0].engine, "kvm-intel");
    for (text, good) in [("kvm-intel", true), ("a]", false), ("a b", false), ("", false)] {
        assert_eq!(parse_name(text).is_ok(), good, "{text:?}");
    }
}

// covers: matrix/bad-input
#[test]
fn what_is_wrong_with_a_folder_is_said_in_one_line() {
    for (name, files, words) in [
        ("empty", &[("x.txt", "")][..], "no *.elf"),
        (
            "key",
            &[("g.elf", ""), ("g.toml", "cpus = 1\ncpu = 2\n")],
            "g.toml: line 2: unknown field `cpu`",
        ),
        ("lone", &[("g.toml", "cpus = 2\n")], "names no `kernel`"),
    ] {
        let folder = folder(name, files);
        let error = guests(&folder).unwrap_err().to_string();
        assert!(error.contains(words) && error.lines().count() == 1, "{error}");
        fs::remove_dir_all(folder).unwrap();
    }
    let error = guests(Path::new("/nowhere")).unwrap_err().to_string();
    assert_eq!(error, "--guests /nowhere: no such file or directory");
    let guest = Guest::of_kernel(Path::new("/dev/null"), None, None);
    let error = check(&guest, "--kernel").unwrap_err().to_string();
    assert!(
        error.starts_with("--kernel /dev/null: ") && error.lines().count() == 1,
        "{error}"
    );
}

// covers: matrix/shard
#[test]
fn shards_have_every_cell_once() {
    let guests: Vec<Guest> = ["a", "b c", "d"]
        .map(|name| Guest::of_kernel(&Path::new("/x").join(name), None, None))
        .to_vec();
    assert_eq!(guests[1].name, "b_c");
    let models = models(&["all".into(), "haswell,+rtm".into(), "p6".into()]).unwrap();
    assert_eq!(
        (models.len(), models.last().unwrap().as_str()),
        (MODELS.len() + 1, "haswell,+rtm")
    );
    let engines = [EngineChoice::Soft, EngineChoice::Kvm];
    let names = |shard| -> Vec<String> {
        let cells = cells(&guests, &models, &engines, &common(), shard);
        cells
            .iter()
            .map(|cell| format!("{} {} {}", cell.guest, cell.model, cell.engine))
            .collect()
    };
    let mut parts: Vec<String> = (1..=4)
        .flat_map(|index| names(Some(Shard { index, count: 4 })))
        .collect();
    let mut all = names(None);
    assert_eq!(all.len(), 3 * 2 * models.len());
    parts.sort();
    all.sort();
    assert_eq!(parts, all);
    for (text, shard) in [
        ("1/1", Some((1, 1))),
        ("3/5", Some((3, 5))),
        ("0/5", None),
        ("6/5", None),
        ("1", None),
        ("1/0", None),
        ("a/b", None),
    ] {
        let parsed = parse_shard(text).ok().map(|shard| (shard.index, shard.count));
        assert_eq!(parsed, shard, "{text}");
    }
    assert!(super::models(&["pentium".into()]).is_err());
}
