use super::*;

#[test]
fn output_is_kept_in_memory_until_it_is_taken() {
    let mut line = SerialLine::default();
    let mut console = Console::open(&SerialTarget::Buffer, &[], line.clone()).unwrap();
    line.write_all(b"hello").unwrap();
    assert_eq!(console.take_output(), b"");
    console.flush().unwrap();
    console.flush().unwrap();
    assert_eq!(console.take_output(), b"hello");
    assert_eq!(console.take_output(), b"");
}

#[test]
fn input_waits_until_it_is_consumed() {
    let mut console = Console::open(&SerialTarget::Buffer, &[], SerialLine::default()).unwrap();
    assert!(!console.input_open(), "there is no standard input here");
    console.push_input(b"abc");
    assert_eq!(console.input(), b"abc");
    console.consume(2).unwrap();
    assert_eq!(console.input(), b"c");
    console.consume(5).unwrap();
    assert_eq!(console.input(), b"");
}

// covers: devices/stdin-events
#[test]
fn waiting_ends_when_the_time_is_up() {
    let mut console = Console::open(&SerialTarget::Buffer, &[], SerialLine::default()).unwrap();
    for millis in [0, 1, 20] {
        let start = std::time::Instant::now();
        console.wait(Some(Duration::from_millis(millis))).unwrap();
        assert!(start.elapsed() >= Duration::from_millis(millis), "{millis}");
    }
}

#[test]
fn an_output_file_is_not_one_of_the_machines_own() {
    let path = std::env::temp_dir().join(format!("minivmm-keep-{}", std::process::id()));
    std::fs::write(&path, "precious").unwrap();
    let error = Console::open(&SerialTarget::File(path.clone()), &[&path], SerialLine::default()).unwrap_err();
    assert!(error.to_string().contains("the same file"), "{error}");
    assert_eq!(std::fs::read(&path).unwrap(), b"precious");
    std::fs::remove_file(&path).unwrap();
}
