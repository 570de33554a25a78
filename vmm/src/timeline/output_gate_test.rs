use super::*;
use crate::serial_line::SerialLine;

// covers: reverse/output
#[test]
fn what_was_sent_before_is_not_sent_twice() {
    let line = SerialLine::default();
    let (mut gate, flow) = OutputGate::new(Box::new(line.clone()));
    let seen = |gate: &mut OutputGate, bytes: &[u8]| {
        gate.write_all(bytes).unwrap();
        line.take()
    };
    assert_eq!(seen(&mut gate, b"hello"), b"hello");
    flow.go_to(2);
    assert_eq!(seen(&mut gate, b"ll"), b"");
    assert_eq!(seen(&mut gate, b"o, you"), b", you");
    assert_eq!(flow.sent(), 10);
    flow.go_to(4);
    flow.forget_future();
    assert_eq!(seen(&mut gate, b" no!"), b" no!");
    flow.go_to(0);
    assert_eq!(seen(&mut gate, b"hell no!?"), b"?");
}
