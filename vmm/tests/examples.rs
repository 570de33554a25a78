//! The examples in `resources/examples`: valid YAML of the form that their reader wants, and command lines that minivmm takes.

use std::{fs, path::Path};

use minivmm::cli::{self, Job};
use yaml_rust2::{Yaml, YamlLoader};

fn load(name: &str) -> Yaml {
    let path = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../resources/examples")
        .join(name);
    let text = fs::read_to_string(&path).unwrap();
    let mut documents = YamlLoader::load_from_str(&text).unwrap_or_else(|error| panic!("{name}: {error}"));
    assert_eq!(documents.len(), 1, "{name}");
    documents.remove(0)
}

fn text(yaml: &Yaml) -> &str {
    yaml.as_str().unwrap_or_else(|| panic!("no text: {yaml:?}"))
}

fn only(yaml: &Yaml, known: &[&str]) {
    for key in yaml.as_hash().unwrap_or_else(|| panic!("no mapping: {yaml:?}")).keys() {
        assert!(known.contains(&text(key)), "{key:?} is none of {known:?}");
    }
}

/// Every `minivmm matrix`, `replay` and `trace` in a script parses, with these words for what the shell or the CI puts in.
fn commands(script: &str, replacements: &[(&str, &str)]) -> usize {
    let mut count = 0;
    for line in script.replace("\\\n", " ").lines() {
        let words = ["minivmm matrix", "minivmm replay", "minivmm trace"];
        let Some(at) = words.iter().find_map(|words| line.find(words)) else {
            continue;
        };
        let mut line = line[at..].split(" || ").next().unwrap_or_default().to_string();
        for (from, to) in replacements {
            line = line.replace(from, to);
        }
        let mut words: Vec<String> = Vec::new();
        for (n, part) in line.split('"').enumerate() {
            match n % 2 {
                0 => words.extend(part.split_whitespace().map(str::to_string)),
                _ => words.push(part.to_string()),
            }
        }
        let job = cli::parse(&words).unwrap_or_else(|error| panic!("{line}: {error}"));
        assert!(
            matches!(job, Job::Matrix(_) | Job::Replay(_) | Job::Trace { .. }),
            "{line}"
        );
        count += 1;
    }
    count
}

// covers: matrix/examples
#[test]
fn the_github_workflow_is_one() {
    let workflow = load("github-matrix.yml");
    assert_eq!(workflow_of_shards(&workflow, "test"), 2);
}

// covers: epochs/examples
#[test]
fn the_github_workflow_of_a_replay_is_one() {
    let workflow = load("github-replay.yml");
    assert_eq!(workflow_of_shards(&workflow, "replay"), 3);
    // Each shard leaves parts, and all of them are merged.
    let merge = &workflow["jobs"]["trace"]["steps"][3]["run"];
    assert!(
        text(merge).contains(" parts-1 parts-2 parts-3 parts-4 --trace "),
        "{merge:?}"
    );
}

/// A workflow whose job of this name runs in four shards; how many command lines of minivmm it has.
fn workflow_of_shards(workflow: &Yaml, shards: &str) -> usize {
    // `on` is a word here, not a truth value: YAML 1.2.
    only(workflow, &["name", "on", "permissions", "jobs"]);
    let jobs = workflow["jobs"].as_hash().unwrap();
    let mut found = 0;
    for (name, job) in jobs {
        let known = ["runs-on", "timeout-minutes", "strategy", "needs", "if", "steps"];
        only(job, &known);
        text(&job["runs-on"]);
        if !job["needs"].is_badvalue() {
            assert!(
                jobs.contains_key(&job["needs"]),
                "{name:?} needs a job that is not there"
            );
        }
        for step in job["steps"].as_vec().unwrap() {
            only(step, &["name", "uses", "run", "with", "if"]);
            match (&step["uses"], &step["run"]) {
                (Yaml::String(action), Yaml::BadValue) => assert!(action.contains('@'), "{action} has no version"),
                (Yaml::BadValue, Yaml::String(script)) => {
                    found += commands(script, &[("${{ matrix.shard }}", "3"), ("matrix-*.xml", "a.xml b.xml")]);
                }
                _ => panic!("a step has one of `uses` and `run`: {step:?}"),
            }
        }
    }
    // As many shards as the command divides by.
    let job = &workflow["jobs"][shards];
    let numbers: Vec<i64> = job["strategy"]["matrix"]["shard"]
        .as_vec()
        .unwrap()
        .iter()
        .filter_map(Yaml::as_i64)
        .collect();
    assert_eq!(numbers, [1, 2, 3, 4]);
    let steps = job["steps"].as_vec().unwrap();
    assert!(
        steps
            .iter()
            .any(|step| step["run"].as_str().is_some_and(|run| run.contains("}}/4 ")))
    );
    found
}

// covers: matrix/examples
#[test]
fn the_github_action_is_one() {
    let action = load("action.yml");
    only(&action, &["name", "description", "inputs", "runs"]);
    assert_eq!(text(&action["runs"]["using"]), "composite");
    let (mut found, mut used) = (0, String::new());
    for step in action["runs"]["steps"].as_vec().unwrap() {
        // A step of a composite action says its shell.
        only(step, &["name", "shell", "env", "run"]);
        assert_eq!(text(&step["shell"]), "bash");
        found += commands(text(&step["run"]), &[("$MODELS", "haswell core2")]);
        for (name, value) in step["env"].as_hash().into_iter().flatten() {
            assert!(
                text(&step["run"]).contains(&format!("${}", text(name))),
                "{name:?} is not used"
            );
            used += text(value);
        }
    }
    assert_eq!(found, 1);
    for input in action["inputs"].as_hash().unwrap().keys() {
        assert!(
            used.contains(&format!("inputs.{} ", text(input))),
            "{input:?} is not used"
        );
    }
}

// covers: matrix/examples
#[test]
fn the_container_runs_what_is_installed_in_it() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../resources/examples/Containerfile");
    let text = fs::read_to_string(path).unwrap().replace("\\\n", " ");
    let line = |word: &str| {
        text.lines()
            .find(|line| line.starts_with(word))
            .unwrap_or_else(|| panic!("no {word}"))
    };
    assert!(line("RUN").contains("cargo install --locked --path vmm --root /opt/minivmm"));
    let folder = std::env::temp_dir().join("man1");
    let man = cli::parse(["minivmm".into(), "man".into(), folder.into_os_string()]).unwrap();
    assert!(line("RUN").contains("/opt/minivmm/bin/minivmm man ") && matches!(man, Job::Man(_)));
    assert_eq!(line("ENTRYPOINT"), "ENTRYPOINT [\"minivmm\"]");
    assert!(
        text.lines()
            .any(|line| line == "COPY --from=build /opt/minivmm /usr/local")
    );
}

// covers: matrix/examples
#[test]
fn the_kubernetes_job_is_one() {
    indexed_job("kubernetes-matrix.yaml");
}

// covers: epochs/examples
#[test]
fn the_kubernetes_job_of_a_replay_is_one() {
    indexed_job("kubernetes-replay.yaml");
}

fn indexed_job(name: &str) {
    let job = load(name);
    only(&job, &["apiVersion", "kind", "metadata", "spec"]);
    assert_eq!((text(&job["apiVersion"]), text(&job["kind"])), ("batch/v1", "Job"));
    let spec = &job["spec"];
    only(
        spec,
        &[
            "completionMode",
            "completions",
            "parallelism",
            "backoffLimit",
            "podFailurePolicy",
            "template",
        ],
    );
    assert_eq!(text(&spec["completionMode"]), "Indexed");
    let pod = &spec["template"]["spec"];
    // A pod failure policy wants it so.
    assert_eq!(text(&pod["restartPolicy"]), "Never");
    let container = &pod["containers"][0];
    let volumes: Vec<&str> = pod["volumes"]
        .as_vec()
        .unwrap()
        .iter()
        .map(|volume| text(&volume["name"]))
        .collect();
    for mount in container["volumeMounts"].as_vec().unwrap() {
        assert!(volumes.contains(&text(&mount["name"])), "{mount:?}");
    }
    assert_eq!(
        text(&spec["podFailurePolicy"]["rules"][0]["onExitCodes"]["containerName"]),
        text(&container["name"])
    );
    let script = text(&container["command"][2]);
    assert_eq!(
        commands(
            script,
            &[("$((JOB_COMPLETION_INDEX + 1))", "8"), ("$JOB_COMPLETION_INDEX", "7")]
        ),
        1
    );
    let completions = spec["completions"].as_i64().unwrap();
    assert!(script.contains(&format!("+ 1))/{completions} ")), "{script}");
}

/// Each job's steps are ones, and what they name is there.
// covers: suite/ci-workflow
#[test]
fn the_project_s_own_workflow_is_one() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let workflow = load("../../.github/workflows/ci.yml");
    let jobs = workflow["jobs"].as_hash().unwrap();
    let mut scripts = String::new();
    for job in jobs.values() {
        only(job, &["runs-on", "container", "timeout-minutes", "steps"]);
        for step in job["steps"].as_vec().unwrap() {
            only(step, &["uses", "run", "with", "env"]);
            match (&step["uses"], &step["run"]) {
                (Yaml::String(action), Yaml::BadValue) => {
                    assert!(action.contains('@'), "{action} has no version");
                    let arguments = step["with"]["arguments"].as_str().unwrap_or_default();
                    if let Some((_, file)) = arguments.split_once("--config ") {
                        assert!(root.join(file).is_file(), "{file}");
                    }
                }
                (Yaml::BadValue, Yaml::String(script)) => scripts += &format!("{script}\n"),
                _ => panic!("a step has one of `uses` and `run`: {step:?}"),
            }
        }
    }
    assert!(scripts.contains(".ci/run") && root.join(".ci/run").is_file());
    let crates: Vec<&str> = scripts
        .split(" -p ")
        .skip(1)
        .filter_map(|rest| rest.split_whitespace().next())
        .collect();
    assert!(!crates.is_empty());
    let manifest = fs::read_to_string(root.join("Cargo.toml")).unwrap();
    for name in crates {
        // Packages have the program's name in front of theirs.
        let name = name.strip_prefix("minivmm-").unwrap_or(name);
        assert!(
            manifest.lines().any(|line| line.starts_with(&format!("{name} = {{ "))),
            "{name} is no crate of ours"
        );
    }
}
