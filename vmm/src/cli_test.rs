use super::*;

fn run(args: &[&str]) -> Result<MachineConfig, String> {
    match parse(std::iter::once("minivmm").chain(args.iter().copied())) {
        Ok(Job::Run { config, .. }) => Ok(*config),
        Ok(Job::Print(text)) => Err(text),
        Ok(Job::Control { path, command, .. }) => Err(format!("{}: {command}", path.display())),
        Ok(Job::Trace { command, .. }) => Err(format!("{command:?}")),
        Ok(Job::Replay(options)) => Err(format!("{options:?}")),
        Ok(Job::Command(options)) => Err(format!("{options:?}")),
        Ok(Job::Query(options)) => Err(format!("{options:?}")),
        Ok(Job::QueryPart(options)) => Err(format!("{options:?}")),
        Ok(Job::Matrix(options)) => Err(format!("{options:?}")),
        Ok(Job::Man(dir)) => Err(format!("{dir:?}")),
        Err(error) => Err(error.to_string()),
    }
}

fn with(args: &[&str]) -> MachineConfig {
    run(&[&["--kernel", "k"], args].concat()).unwrap()
}

// covers: cli/kernel
// covers: cli/initrd
// covers: cli/cmdline
// covers: cli/memory
// covers: cli/cpu-model
// covers: pt/option
// covers: portable/option
// covers: cli/engine
// covers: cli/serial
// covers: cli/clock
// covers: cli/seed
// covers: cli/rtc-base
// covers: cli/max-instructions
// covers: cli/timeout
// covers: cli/stats
#[test]
fn options_and_their_aliases_reach_the_config() {
    assert_eq!(run(&["--kernel", "a/b"]).unwrap().kernel, PathBuf::from("a/b"));
    assert_eq!(with(&["--initrd", "i"]).initrd, ["i".into()]);
    assert_eq!(with(&[]).initrd, []);
    let module = InitrdFile {
        path: "vmlinuz".into(),
        words: b"console=hvc0 root=/dev/ram0".to_vec(),
    };
    let two = with(&["--initrd", "vmlinuz console=hvc0 root=/dev/ram0", "--initrd", "i"]);
    assert_eq!(two.initrd, [module, "i".into()]);
    for wrong in ["", " words"] {
        let error = run(&["--kernel", "k", "--initrd", wrong]).unwrap_err().to_string();
        assert!(error.contains("needs a file"), "{error}");
    }
    assert_eq!(with(&["--cmdline", "a b"]).cmdline, Some(b"a b".to_vec()));
    assert_eq!(with(&["--append", "-x"]).cmdline, Some(b"-x".to_vec()));
    assert_eq!(with(&[]).cmdline, None);
    assert_eq!(with(&["--memory", "1G"]).memory, 1 << 30);
    assert_eq!(with(&["-m", "0x4000000"]).memory, 64 << 20);
    assert_eq!(with(&[]).memory, 512 << 20);
    assert_eq!(with(&["--cpu-model", "westmere"]).model.name, "westmere");
    assert_eq!(with(&["--cpu", "westmere"]).model.name, "westmere");
    assert_eq!(with(&[]).model.name, "westmere");
    let chosen = with(&["--pt"]).model;
    assert_eq!(chosen.name, "alderlake");
    assert!(
        !chosen.part_features().avx512f(),
        "programs that choose code by family and model run"
    );
    assert_eq!(with(&["--pt", "--cpu-model", "broadwell"]).model.name, "broadwell");
    for (name, choice) in [
        ("auto", EngineChoice::Auto),
        ("soft", EngineChoice::Soft),
        ("kvm", EngineChoice::Kvm),
    ] {
        assert_eq!(with(&["--engine", name]).engine, choice);
    }
    for (how, after) in [("on", Some(200)), ("off", None), ("after=1", Some(1))] {
        assert_eq!(with(&["--translate", how]).translate_after, after);
    }
    assert_eq!(with(&[]).translate_after, with(&["--translate", "on"]).translate_after);
    for (how, vector) in [
        ("host", VectorChoice::Host),
        ("portable", VectorChoice::Portable),
        ("tables", VectorChoice::Tables),
    ] {
        assert_eq!(with(&["--vector", how]).vector, Some(vector));
    }
    assert_eq!(with(&[]).vector, None);
    assert_eq!(with(&[]).serial, SerialTarget::Stdio);
    assert_eq!(with(&["--serial", "null"]).serial, SerialTarget::Null);
    assert_eq!(with(&["--serial", "file:x:y"]).serial, SerialTarget::File("x:y".into()));
    assert_eq!(with(&["--clock", "paced"]).clock, ClockMode::Paced);
    assert_eq!(with(&["--clock", "virtual"]).clock, ClockMode::Virtual);
    assert_eq!(with(&["--seed", "0x10"]).seed, 16);
    assert_eq!(with(&[]).seed, 0);
    assert_ne!(with(&["--seed", "random"]).seed, with(&["--seed", "random"]).seed);
    assert_eq!(with(&["--clock", "virtual"]).rtc_base, VIRTUAL_RTC_BASE);
    assert_eq!(with(&["--rtc-base", "2024-01-01T00:00:00Z"]).rtc_base, VIRTUAL_RTC_BASE);
    let now = now();
    for args in [
        &["--clock", "paced"][..],
        &["--rtc-base", "now"],
        &["--rtc-base", "host"],
    ] {
        assert!((now..now + 60).contains(&with(args).rtc_base), "{args:?}");
    }
    assert_eq!(with(&["--max-instructions", "1000"]).max_instructions, Some(1000));
    assert_eq!(with(&["--timeout", "1.5"]).timeout, Some(Duration::from_millis(1500)));
    assert!(with(&["--stats"]).stats && !with(&[]).stats);
}

// covers: tsc/khz, tsc/offset
#[test]
fn the_time_stamp_counters_frequency_and_start() {
    let config = with(&[]);
    assert_eq!((config.model.tsc_khz, config.tsc_offset), (2_666_660, 0));
    assert_eq!(with(&["--tsc-khz", "3000000"]).model.tsc_khz, 3_000_000);
    let named = with(&["--cpu", "haswell,-rdrand", "--tsc-khz", "0x100000"]).model;
    assert_eq!((named.tsc_khz, named.features().rdrand()), (0x10_0000, false));
    for (text, offset) in [
        ("0", 0),
        ("1000", 1000),
        ("0xffffffffffffffff", u64::MAX),
        ("-1", u64::MAX),
        ("-0x8000000000000000", 1 << 63),
    ] {
        assert_eq!(with(&["--tsc-offset", text]).tsc_offset, offset, "{text}");
    }
    for (args, says) in [
        (&["--tsc-khz", "0"][..], "--tsc-khz 0: westmere takes 133333 "),
        (&["--tsc-khz", "133332"], "133333 (its APIC timer's clock) to 10000000"),
        (&["--tsc-khz", "10000001"], "to 10000000"),
        (&["--tsc-khz", "99999999999"], "more than 10000000, which is 10 GHz"),
        (&["--tsc-khz", "-1"], "not a number of kHz"),
        (&["--tsc-khz", "2.1G"], "not a number of kHz"),
        (
            &["--cpu", "icelake-server", "--tsc-khz", "2399999"],
            "give a multiple of 100, as 2400000",
        ),
        (&["--tsc-offset", "soon"], "-2^63 to 2^64-1"),
        (&["--tsc-offset", "-0x8000000000000001"], "-2^63"),
        (&["--tsc-offset", "0x10000000000000000"], "-2^63"),
        (&["--tsc-offset", "--1"], "--tsc-offset"),
    ] {
        let message = run(&[&["--kernel", "k"], args].concat()).unwrap_err();
        assert!(message.contains(says), "{args:?}: {message}");
        assert_eq!(message.lines().count(), 1, "{message}");
    }
}

// covers: smp/option
#[test]
fn one_to_255_cpus() {
    assert_eq!(
        (
            with(&[]).cpus,
            with(&["--cpus", "2"]).cpus,
            with(&["--smp", "0xff"]).cpus
        ),
        (1, 2, 255)
    );
    for text in [
        "0",
        "256",
        "1000",
        "-1",
        "",
        "two",
        "4294967297",
        "99999999999999999999",
    ] {
        let message = run(&["--kernel", "k", "--cpus", text]).unwrap_err();
        assert!(
            message.contains("--cpus") && message.contains("from 1 to 255"),
            "{text}: {message}"
        );
        assert_eq!(message.lines().count(), 1, "{text}: {message}");
    }
}

// covers: smp/topology
#[test]
fn cpus_are_arranged_as_it_is_said() {
    let text = |words: &str| with(&["--cpus", words]).topology().to_string();
    for (words, arranged) in [
        ("8,cores=4,threads=2,sockets=1", "8,cores=4,threads=2"),
        ("8,sockets=2", "8,cores=4,threads=1"),
        ("8,threads=2", "8,cores=4,threads=2"),
        ("8,cores=2", "8,cores=2,threads=1"),
        ("8,cores=8", "8"),
    ] {
        assert_eq!(text(words), arranged, "{words}");
        assert_eq!(text(arranged), arranged, "{words}");
    }
    for (words, why) in [
        ("8,core=4", "behind the number stands sockets=N, cores=N or threads=N"),
        ("8,cores", "behind the number stands"),
        ("8,cores=x", "behind the number stands"),
        ("8,", "behind the number stands"),
        ("8,cores=3", "2 packages of 3 cores of 1 threads are not 8 CPUs"),
        ("8,threads=3", "a core has 1 or 2 threads, not 3"),
        ("255,cores=4294967295", "are not 255 CPUs"),
    ] {
        let message = run(&["--kernel", "k", "--cpus", words]).unwrap_err();
        assert!(
            message.contains("--cpus") && message.contains(why),
            "{words}: {message}"
        );
        assert_eq!(message.lines().count(), 1, "{words}: {message}");
    }
}

// covers: cli/disk
// covers: cli/inject
// covers: cli/collect
#[test]
fn disks_and_folders_reach_the_config() {
    use machine::disk::DiskMode::{Overlay, ReadOnly, ReadWrite};
    for (text, path, mode) in [
        ("a.img", "a.img", ReadWrite),
        ("a.img,overlay", "a.img", Overlay),
        ("a.img,readonly", "a.img", ReadOnly),
        ("a.img,ro", "a.img", ReadOnly),
        ("odd,name", "odd,name", ReadWrite),
        ("odd,overlay,readonly", "odd,overlay", ReadOnly),
    ] {
        let disk = DiskConfig {
            path: path.into(),
            mode,
            format: None,
        };
        assert_eq!(with(&["--disk", text]).disks, [disk], "{text}");
    }
    let both = with(&["--disk", "b", "--disk", "a,overlay"]).disks;
    assert_eq!((both[0].path.to_str(), both[1].path.to_str()), (Some("b"), Some("a")));
    assert!(
        run(&["--kernel", "k", "--disk", ",overlay"])
            .unwrap_err()
            .contains("needs a file")
    );
    let config = with(&["--inject", "i", "--collect", "c"]);
    assert_eq!((config.inject, config.collect), (Some("i".into()), Some("c".into())));
    assert_eq!(
        (with(&[]).inject, with(&[]).collect, with(&[]).disks),
        (None, None, vec![])
    );
}

// covers: cli/verbose
#[test]
fn verbose_counts() {
    for (args, expected) in [(&["-v"][..], 1), (&["-vv"], 2), (&["--verbose"], 1), (&[], 0)] {
        let all = ["minivmm", "--kernel", "k"].iter().chain(args);
        assert!(matches!(parse(all), Ok(Job::Run { verbose, .. }) if verbose == expected));
    }
}

// covers: cli/models
#[test]
fn models_lists_every_model_on_a_line_of_its_own() {
    let text = run(&["models"]).unwrap_err();
    let hidden = text.lines().last().unwrap();
    for feature in ["AMX", "transactions"] {
        assert!(hidden.contains(feature), "{hidden}");
    }
    assert_eq!(text.lines().take_while(|line| !line.is_empty()).count(), MODELS.len());
    for (line, model) in text.lines().zip(MODELS) {
        assert!(
            line.starts_with(model.name) && line.ends_with(model.description),
            "{line}"
        );
    }
}

// covers: bad-input/nonsense-size
// covers: bad-input/unknown-model
// covers: pt/option
// covers: bad-input/unknown-engine
#[test]
fn what_does_not_parse_is_one_line_that_names_the_option() {
    for (args, names) in [
        (&[][..], "--kernel"),
        (&["--kernel"], "--kernel"),
        (&["--kernel", "k", "-m", "12Q"], "--memory"),
        (&["--kernel", "k", "-m", ""], "--memory"),
        (&["--kernel", "k", "-m", "0"], "--memory"),
        (&["--kernel", "k", "-m", "-1"], "--memory"),
        (&["--kernel", "k", "-m", "512"], "512M"),
        (&["--kernel", "k", "-m", "99999999999999999999"], "--memory"),
        (&["--kernel", "k", "-m", "99999999T"], "--memory"),
        (&["--kernel", "k", "-m", "4097K"], "--memory"),
        (&["--kernel", "k", "--cpu", "z80\nx"], "--cpu-model z80"),
        (&["--kernel", "k", "--cpu", "z80"], "westmere"),
        (&["--kernel", "k", "--pt", "--cpu", "z80"], "--cpu-model z80"),
        (
            &["--kernel", "k", "--pt", "--cpu", "westmere"],
            "--pt: the CPU model westmere",
        ),
        (
            &["--kernel", "k", "--pt", "--cpu", "broadwell,-intel_pt"],
            "--pt: the CPU model broadwell,-intel_pt",
        ),
        (&["--kernel", "k", "--engine", "tcg"], "--engine"),
        (&["--kernel", "k", "--serial", "tcp:1"], "--serial"),
        (&["--kernel", "k", "--serial", "file:"], "--serial"),
        (&["--kernel", "k", "--clock", "sundial"], "--clock"),
        (&["--kernel", "k", "--seed", "many"], "--seed"),
        (&["--kernel", "k", "--rtc-base", "2023-02-29"], "--rtc-base"),
        (&["--kernel", "k", "--max-instructions", "0"], "--max-instructions"),
        (&["--kernel", "k", "--timeout", "0"], "--timeout"),
        (&["--kernel", "k", "--timeout", "nan"], "--timeout"),
        (&["--kernel", "k", "--frobnicate"], "--frobnicate"),
        (&["--kernel", "k", "stray"], "stray"),
        (&["models", "stray"], "stray"),
    ] {
        let message = run(args).unwrap_err();
        assert!(message.contains(names), "{args:?}: {message}");
        assert_eq!(message.lines().count(), 1, "{args:?}: {message}");
    }
}

#[test]
fn help_and_version_go_to_standard_output() {
    assert!(run(&["--help"]).unwrap_err().contains("--max-instructions"));
    assert!(run(&["--version"]).unwrap_err().contains(env!("CARGO_PKG_VERSION")));
}

#[test]
fn sizes() {
    for (text, size) in [
        ("1", Ok(1)),
        ("512M", Ok(512 << 20)),
        ("512m", Ok(512 << 20)),
        ("512MiB", Ok(512 << 20)),
        ("1kb", Ok(1024)),
        ("0x10K", Ok(16384)),
        ("0xb", Ok(11)),
        ("3T", Ok(3 << 40)),
        ("16777216T", Err(())),
        ("+1", Err(())),
        ("1.5G", Err(())),
        ("", Err(())),
        ("K", Err(())),
        ("0x", Err(())),
        ("١M", Err(())),
    ] {
        assert_eq!(parse_size(text).map_err(|_| ()), size, "{text}");
    }
}

#[test]
fn dates() {
    for (text, seconds) in [
        ("0", Some(0)),
        ("1704067200", Some(VIRTUAL_RTC_BASE)),
        ("1970-01-01", Some(0)),
        ("1970-01-02T00:00:01", Some(86_401)),
        ("2000-02-29T12:00:00Z", Some(951_825_600)),
        ("2024-01-01t00:00:00.123z", Some(VIRTUAL_RTC_BASE)),
        ("2024-01-01 01:00:00+01:00", Some(VIRTUAL_RTC_BASE)),
        ("2023-12-31T22:30:00-01:30", Some(VIRTUAL_RTC_BASE)),
        ("2016-12-31T23:59:60Z", Some(1_483_228_800)),
        ("9999-12-31T23:59:59Z", Some(253_402_300_799)),
        ("10000-01-01T00:00:00Z", None),
        ("-1", None),
        ("1969-12-31", None),
        ("2024-13-01", None),
        ("2024-00-01", None),
        ("2024-04-31", None),
        ("2100-02-29", None),
        ("2024-01-01T24:00:00Z", None),
        ("2024-01-01T00:00", None),
        ("2024-01-01T00:00:00.Z", None),
        ("2024-01-01T00:00:00+1:00", None),
        ("2024-01-01T00:00:00+a1:00", None),
        ("2024-01-01X00:00:00", None),
        ("２０２４-01-01", None),
        ("tomorrow", None),
    ] {
        let parsed = match parse_rtc_base(text) {
            Ok(RtcBase::At(seconds)) => Some(seconds),
            _ => None,
        };
        assert_eq!(parsed, seconds, "{text}");
    }
}

// covers: translate/option
#[test]
fn a_way_to_translate_is_on_off_or_a_number_of_runs() {
    for wrong in ["", "yes", "after=", "after=0", "after=-1", "after=4294967296", "1"] {
        let said = parse_translate(wrong).unwrap_err().to_string();
        assert_eq!(said, "on, off, or after=N with N from 1 on", "{wrong}");
    }
    for (size, bytes) in [("1M", 1 << 20), ("1G", 1 << 30), ("2052K", 2052 << 10)] {
        assert_eq!(with(&["--translate-memory", size]).translate_memory, bytes);
    }
    for wrong in ["0", "1023K", "1025M", "2049K", "1048577"] {
        assert_eq!(
            parse_translate_memory(wrong),
            Err(ValueError::TranslateMemory),
            "{wrong}"
        );
    }
}

// covers: cli/disk-format
#[test]
fn a_disk_s_format_stands_beside_its_mode() {
    use machine::disk::{DiskFormat, DiskMode};
    for (text, path, mode, format) in [
        ("a,format=qcow2", "a", DiskMode::ReadWrite, DiskFormat::Qcow2),
        ("a,format=raw,overlay", "a", DiskMode::Overlay, DiskFormat::Raw),
        ("a,readonly,format=qcow2", "a", DiskMode::ReadOnly, DiskFormat::Qcow2),
        (
            "a,format=raw,format=qcow2",
            "a,format=raw",
            DiskMode::ReadWrite,
            DiskFormat::Qcow2,
        ),
    ] {
        let disk = DiskConfig {
            path: path.into(),
            mode,
            format: Some(format),
        };
        assert_eq!(with(&["--disk", text]).disks, [disk], "{text}");
    }
}

// covers: cli/net
#[test]
fn a_network_is_a_mode_with_its_ports_or_an_interface() {
    use crate::config::{Forward, NetConfig};
    use std::net::IpAddr;
    let forward = |address: &str, host, guest| Forward {
        address: address.parse::<IpAddr>().unwrap(),
        host,
        guest,
    };
    for (text, net) in [
        ("user", NetConfig::User { forwards: vec![] }),
        (
            "user,forward=2222:22,forward=0.0.0.0:80:8080",
            NetConfig::User {
                forwards: vec![forward("127.0.0.1", 2222, 22), forward("0.0.0.0", 80, 8080)],
            },
        ),
        ("tap=tap0", NetConfig::Tap("tap0".into())),
    ] {
        assert_eq!(with(&["--net", text]).net, Some(net), "{text}");
    }
    for (text, says) in [
        ("usr", "not user"),
        ("user,forward=22", "two ports"),
        ("user,forward=0:22", "two ports"),
        ("user,forward=70000:22", "two ports"),
        ("user,forward=here:1:22", "two ports"),
        ("user,2222:22", "not user"),
        ("tap=", "tap=NAME"),
        ("tap=../../etc", "tap=NAME"),
        ("tap=averyverylongname", "tap=NAME"),
    ] {
        let error = run(&["--kernel", "k", "--net", text]).unwrap_err();
        assert!(error.contains(says), "{text}: {error}");
    }
}
