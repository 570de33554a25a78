use super::*;

// covers: trace/progress-lines
#[test]
fn without_a_terminal_a_line_is_due_every_ten_seconds() {
    let bar = Bar::new(false);
    assert_eq!(bar.due(50, 100), None, "one that is not shown says nothing");
    bar.say("calls, vCPU 0".into());
    let before = |seconds| Instant::now().checked_sub(Duration::from_secs(seconds));
    bar.said.set(before(3));
    assert_eq!(bar.due(50, 100), None);
    bar.said.set(before(11));
    assert_eq!(bar.due(50, 200).as_deref(), Some("calls, vCPU 0: 25% of 200 bytes"));
    assert_eq!(bar.due(60, 200), None, "not again at once");
    bar.said.set(before(11));
    assert_eq!(bar.due(7, 0).as_deref(), Some("calls, vCPU 0: 100% of 0 bytes"));
}
