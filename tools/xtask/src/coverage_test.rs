use super::*;

const LIST: &str = "# about\n\n# First\ncli/a   The a\ncli/b-1 The b\n";

fn survey_of(sources: &[(&str, &str)]) -> Survey {
    let mut survey = Survey {
        items: parse_items(LIST).unwrap(),
        proofs: BTreeMap::new(),
        errors: Vec::new(),
    };
    sources.iter().for_each(|(file, text)| survey.read(file, text));
    survey
}

#[test]
fn items_have_a_section_a_key_and_a_description() {
    let items = parse_items(LIST).unwrap();
    assert_eq!(items.len(), 2);
    let expected = Item {
        section: "First".into(),
        key: "cli/b-1".into(),
        what: "The b".into(),
        guests: Vec::new(),
    };
    assert_eq!(items[1], expected);
    for (text, why) in [
        ("cli-kernel boots", "not a key"),
        ("cli/Cli boots", "not a key"),
        ("cli/cli", "no description"),
        ("cli/a x\ncli/a y", "twice"),
    ] {
        assert!(parse_items(text).unwrap_err().to_string().contains(why), "{text}");
    }
}

#[test]
fn guest_tests_that_an_item_names_must_pass_somewhere() {
    let mut survey = survey_of(&[]);
    survey.items = parse_items("pt/x The x @lbr/a @lbr/b @lbr/c\n").unwrap();
    assert_eq!(survey.items[0].what, "The x");
    survey.guest_tests("[soft]\nlbr    pass p6 core2\nlbr/a  pass\nlbr/b  skip p6; FAIL core2\n");
    let proofs: Vec<&str> = survey.proofs["pt/x"].iter().map(|test| test.name.as_str()).collect();
    assert_eq!((proofs, survey.errors.len()), (vec!["a"], 2), "{:?}", survey.errors);
    let ran = |name: &str| BTreeSet::from([name.to_string()]);
    let unproved = |name| {
        check(&survey, Some(&ran(name)))
            .unwrap()
            .iter()
            .any(|fault| fault.contains("did not run"))
    };
    assert!(unproved("another_test") && !unproved(MATRIX_TEST));
}

// The comment marker is put together here, so that the scanner does not take these rows for its own.
#[test]
fn a_claim_belongs_to_the_test_below_or_around_it() {
    let slow = "the test it belongs to is ignored";
    let plain = "the function it belongs to is not a #[test]";
    for (text, test) in [
        ("@ cli/a\n#[test]\nfn one() {\n}\n", Ok("one")),
        (
            "    @ cli/a\n    // Why.\n    #[test]\n    #[cfg(unix)]\n    pub fn one() {\n    }\n",
            Ok("one"),
        ),
        (
            "@ cli/a\nconst ROWS: &[(u8, fn(u8) -> u8)] = &[\n    (1, id),\n];\n\n#[test]\nfn rows() {\n}\n",
            Ok("rows"),
        ),
        (
            "#[test]\nfn around() {\n    @ cli/a\n    for row in [\n    ] {\n    }\n}\n\nfn helper() {\n}\n",
            Ok("around"),
        ),
        (
            "#[test]\nfn before() {\n    let x = 1;\n}\n\n@ cli/a\n#[test]\nfn after() {\n}\n",
            Ok("after"),
        ),
        (
            "mod tests {\n    #[test]\n    fn a() {\n    }\n\n    @ cli/a\n    #[test]\n    fn b() {\n    }\n}\n",
            Ok("b"),
        ),
        ("@ cli/a\n#[test]\n#[ignore = \"slow\"]\nfn one() {\n}\n", Err(slow)),
        ("@ cli/a\nfn one() {\n}\n", Err(plain)),
        ("@ cli/a\nfn helper() {\n}\n#[test]\nfn one() {\n}\n", Err(plain)),
        (
            "mod a {\n    @ cli/a\n}\n#[test]\nfn one() {\n}\n",
            Err("no function follows it"),
        ),
    ] {
        let text = text.replace('@', concat!("// ", "covers:"));
        let found = claims(&text);
        assert_eq!(found.len(), 1, "{text}");
        assert_eq!(found[0].keys, ["cli/a"], "{text}");
        assert_eq!(found[0].test.as_deref(), test.as_ref().copied(), "{text}");
    }
}

#[test]
fn an_unknown_key_an_uncovered_item_and_a_test_that_did_not_run_are_faults() {
    let marker = concat!("// ", "covers:");
    let survey = survey_of(&[("x.rs", &format!("{marker} cli/a, cli/zz\n#[test]\nfn one() {{\n}}\n"))]);
    assert_eq!(survey.totals(), (2, 1));
    let faults = |ran: &[&str]| {
        let ran = ran.iter().map(|name| name.to_string()).collect();
        check(&survey, Some(&ran)).unwrap().join("\n")
    };
    assert!(faults(&["tests::one"]).contains("x.rs:1: unknown key cli/zz"));
    assert!(faults(&["tests::one"]).contains("cli/b-1: no test covers it"));
    assert!(!faults(&["tests::one"]).contains("did not run"));
    assert!(faults(&["tests::other_one"]).contains("x.rs: test one is named as a proof but did not run"));
}

#[test]
fn the_table_names_each_test_and_says_where_there_is_none() {
    let marker = concat!("// ", "covers:");
    let source = format!("{marker} cli/a\n#[test]\nfn one() {{\n}}\n");
    let table = survey_of(&[("x.rs", &source), ("y.rs", &source)]).render();
    assert!(table.contains("## First\n\n| item | what | tests |\n|---|---|---|\n"));
    assert!(table.contains("| `cli/a` | The a | `x.rs::one`<br>`y.rs::one` |\n"));
    assert!(table.contains("| `cli/b-1` | The b | **none** |\n"));
    assert!(!table.contains("## about"));
}

// covers: suite/generated
#[test]
fn the_table_in_the_tree_is_complete_and_up_to_date() {
    let faults = check(&survey(tree::root()).unwrap(), None).unwrap();
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}
