use super::*;

fn refused(spec: &str) -> String {
    find(spec).expect_err(spec).to_string()
}

// covers: cpu/model-toggles
#[test]
fn a_name_may_be_followed_by_toggles() {
    assert!(
        std::ptr::eq(find("haswell").unwrap(), &raw const *MODELS[5]) || find("haswell").unwrap().name == "haswell"
    );
    let model = find("haswell,-rdrand,+fsgsbase").unwrap();
    assert!(!model.features().rdrand() && model.features().fsgsbase());
    for (spec, expected) in [
        (
            "haswell,",
            "--cpu-model haswell,: `` is no toggle: write +feature or -feature",
        ),
        ("haswell,+sse5", "--cpu-model haswell,+sse5: unknown feature `sse5`"),
        (
            "haswell,+avx512f",
            "--cpu-model haswell,+avx512f: avx512f: haswell has no CPUID leaf DH to show it in",
        ),
        ("haswell,-sse2", "--cpu-model haswell,-sse2: lm needs sse2"),
    ] {
        assert_eq!(refused(spec), expected);
    }
    assert!(refused("z80,+sse").starts_with("--cpu-model z80: no such CPU model; known models: p6, netburst"));
    assert!(refused("Haswell").contains("no such CPU model"));
}

// covers: cpu/model-file
#[test]
fn a_file_changes_what_it_names() {
    let example = include_str!("../../resources/cpu-model.toml");
    let model = parse(example).unwrap_or_else(|why| panic!("{why}"));
    let base = find("haswell").unwrap();
    assert_eq!((model.name, model.tsc_khz), ("mine", 3_400_000));
    assert_eq!(model.cpuid(1, 0)[0], 0x306C4);
    assert_eq!(
        model.cpuid(1, 0)[1..3],
        base.cpuid(1, 0)[1..3],
        "what is left out stays"
    );
    assert_eq!(model.cpuid(4, 3)[2], 0x3FFF);
    assert_eq!(model.cpuid(4, 2), base.cpuid(4, 2));
    assert!(!model.features().invpcid() && model.features().rdrand());
    assert!(model.msr(0x34).is_none() && base.msr(0x34).is_some());
    assert_eq!(model.msr(0x1A0).map(|row| (row.reset, row.writable)), Some((0x1801, 9)));

    let text = "base = 'p6'\nname = 'x'\n[[msr]]\nnumber = '0x1234'\nname = 'WIDE'\nvalue = '0xFFFF_FFFF_FFFF_FFFF'\n";
    let row = *parse(text).unwrap().msr(0x1234).unwrap();
    let twice = "base = 'p6'\nname = 'x'\n[[cpuid]]\nleaf = 2\neax = 1\n[[cpuid]]\nleaf = 2\nebx = 2\n";
    assert_eq!(
        parse(twice).unwrap().cpuid(2, 0)[..2],
        [1, 2],
        "the second entry adds to the first"
    );
    assert_eq!((row.reset, row.writable, row.name), (u64::MAX, 0, "WIDE"));
}

// covers: cpu/model-file
#[test]
fn a_wrong_file_is_one_line_that_names_line_and_key() {
    const HEAD: &str = "base = 'haswell'\nname = 'x'\n";
    for (text, line, names) in [
        ("", 1, "base"),
        ("name = 'x'\n", 1, "base"),
        ("base = 'haswell'\n", 1, "name"),
        ("base = 'z80'\nname = 'x'", 1, "base: no such CPU model: z80"),
        ("base = 'haswell'\nname = ''", 2, "name: empty"),
        ("base = 'haswell'\nname = 'a,b'", 2, "name: empty, or with a comma"),
        ("base = 'haswell\n", 1, "string"),
        ("base = 7\nname = 'x'", 1, "string"),
        ("tsc = 1", 3, "tsc"),
        ("tsc_khz = -1", 3, "negative"),
        ("tsc_khz = 'fast'", 3, "fast"),
        ("tsc_khz = 0x1_0000_0000", 3, "0x100000000 has more than 32 bits"),
        ("features = '+sse5'", 3, "features: unknown feature `sse5`"),
        ("[[cpuid]]\neax = 1", 3, "leaf"),
        ("[[cpuid]]\nleaf = 1\nrax = 1", 5, "rax"),
        ("[[cpuid]]\nleaf = 0x40000000", 3, "leaf: neither"),
        ("[[msr]]\nvalue = 1", 3, "number"),
        ("[[msr]]\nnumber = 0x34", 3, "value: missing"),
        ("[[msr]]\nnumber = 0x1234\nvalue = 1", 3, "name: missing"),
        (
            "[[msr]]\nnumber = 0x10\nvalue = 1",
            3,
            "number: MSR 10H is not a plain one",
        ),
        (
            "[[msr]]\nnumber = 0x34\nabsent = true\nvalue = 1",
            3,
            "absent: the register has",
        ),
    ] {
        let whole = if line < 3 { text.into() } else { format!("{HEAD}{text}") };
        let why = parse(&whole).expect_err(text).to_string();
        assert!(
            why.starts_with(&format!("line {line}: ")) && why.contains(names),
            "{text:?}: {why}"
        );
        assert!(!why.contains(char::is_control), "{why:?}");
    }
    // What only shows in the whole model names the key.
    for (text, names) in [
        ("tsc_khz = 1", "tsc_khz is 1"),
        ("[[msr]]\nnumber = 0x179\nvalue = 40", "IA32_MCG_CAP counts 40 banks"),
        ("[[cpuid]]\nleaf = 0x99\neax = 1", "CPUID leaf 99H is above the highest"),
    ] {
        let why = parse(&format!("{HEAD}{text}")).expect_err(text).to_string();
        assert!(why.contains(names), "{text:?}: {why}");
    }
    let missing = refused("/nonexistent/model.toml");
    assert!(
        missing.starts_with("--cpu-model /nonexistent/model.toml: "),
        "{missing}"
    );
    assert!(refused("/dev/zero.toml").contains("/dev/zero.toml"));
}

// covers: cpu/avx512-host
#[test]
fn avx512_is_shown_on_every_host() {
    for (name, newest) in [
        ("skylake-server", "avx512vl"),
        ("icelake-server", "avx512_vpopcntdq"),
        ("sapphirerapids", "avx512_fp16"),
    ] {
        let text = details(find(name).unwrap());
        let shown = text.lines().find(|line| line.starts_with("  shows: ")).unwrap();
        for feature in ["avx512f", newest] {
            assert!(shown.split(' ').any(|word| word == feature), "{name}: {shown}");
        }
        assert!(!text.contains("on this host"), "{name}: {text}");
    }
}

// covers: cpu/models-details
#[test]
fn details_say_what_is_hidden_and_why() {
    let text = details(find("skylake-server,-rdrand,-pdcm").unwrap());
    for line in [
        "skylake-server  Intel Xeon Platinum 8160",
        "  TSC: 2100000 kHz, APIC timer 25000 kHz",
        "  addresses: 46 bits physical, 48 linear",
        "  of that, not the part's: hypervisor",
        "  hides (switched off): pdcm rdrand",
        "  CPUID.0AH.0:EAX -07300404H +00000000H: no performance counters without PDCM",
    ] {
        assert!(text.lines().any(|l| l.starts_with(line)), "{line}\n{text}");
    }
    for model in MODELS {
        let text = details(model);
        let hidden = model.part_features().minus(model.features());
        assert!(hidden.iter().all(|f| text.contains(f.flag())), "{}", model.name);
        assert!(!text.contains("dispatch: "), "{}", model.name);
        assert!(
            !text.contains("unexplained") && !text.contains("(hidden)"),
            "{}",
            model.name
        );
    }
    // Programs that choose code by family and model meet what was switched off.
    let text = details(find("sapphirerapids,-avx512_fp16").unwrap());
    let note = text.lines().find(|line| line.starts_with("  dispatch: "));
    assert!(note.is_some_and(|note| note.contains("#UD")), "{text}");
}
