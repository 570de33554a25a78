use super::*;

// covers: jail/replay
#[test]
fn a_replay_cannot_write_where_its_session_collected_files() {
    let recorded = MachineConfig {
        collect: Some("collected".into()),
        ..MachineConfig::new("kernel")
    };
    assert_eq!(files(&recorded).write, ["collected"].map(std::path::PathBuf::from));
    let replayed = MachineConfig {
        replay: Some("session".into()),
        ..recorded
    };
    assert!(files(&replayed).write.is_empty());
}
