use super::*;

#[test]
fn lines_of_both_streams_arrive_and_the_status_is_the_command_s() {
    let stage = Stage::start("test");
    let mut lines = Vec::new();
    let mut command = Command::new("sh");
    command.args(["-c", "echo one; echo two >&2; printf three; exit 7"]);
    let status = stage
        .run(&mut command, None, |line| lines.push(line.to_string()))
        .unwrap();
    lines.sort();
    assert_eq!((status.code(), lines.join(" ").as_str()), (Some(7), "one three two"));
    assert!(
        stage
            .must(Command::new("false").arg("x"))
            .unwrap_err()
            .to_string()
            .starts_with("false failed")
    );
}

#[test]
fn a_command_is_ended_at_the_deadline() {
    let stage = Stage::start("test");
    let start = Instant::now();
    let error = stage
        .run(Command::new("sleep").arg("60"), Some(start), |_| {})
        .unwrap_err();
    assert!(error.to_string().contains("time is up"));
    assert!(start.elapsed() < Duration::from_secs(30));
}
