use std::convert::Infallible;
use std::thread;

use super::*;

const NET: Inlet = Inlet::Virtio { device: 1, port: 0 };

fn take_all(links: &mut Links, step: u64) -> Vec<Vec<u8>> {
    let mut taken = Vec::new();
    let result = links.offer(step, |_, bytes| {
        taken.push(bytes.to_vec());
        Ok::<_, Infallible>(Some(bytes.len()))
    });
    result.unwrap();
    taken
}

// covers: net/links
#[test]
fn what_is_sent_is_offered_in_order_until_it_is_taken() {
    let mut links = Links::new().unwrap();
    let sender = links.add(NET, true).unwrap();
    assert!(links.network() && !links.arrived(0));
    assert!(sender.send(b"one".to_vec()) && sender.send(b"two".to_vec()));
    assert!(links.arrived(7) && links.wake().unwrap().read().unwrap() > 0);
    let refuse = links.offer(7, |_, _| Ok::<_, Infallible>(Some(0)));
    refuse.unwrap();
    assert!(!links.arrived(7), "nothing is to be had of it at this step");
    assert!(take_all(&mut links, 7).is_empty());
    assert!(links.arrived(8));
    links
        .offer(8, |_, bytes| Ok::<_, Infallible>(Some(bytes.len().min(2))))
        .unwrap();
    assert!(!links.arrived(9));
    sender.send(b"three".to_vec());
    drop(sender);
    assert!(links.are_open(), "something waits");
    assert!(!links.network());
    assert_eq!(take_all(&mut links, 9), [b"three"]);
    assert!(!links.are_open());
}

// covers: bad-input/net-flood
#[test]
fn whoever_sends_too_much_waits_and_is_let_go() {
    let mut links = Links::new().unwrap();
    let sender = links.add(NET, true).unwrap();
    let thread = thread::spawn(move || {
        let mut sent = 0;
        while sender.send(vec![0; 1 << 16]) {
            sent += 1;
        }
        sent
    });
    while links.links[0].queue.bytes.load(Ordering::Relaxed) < WAITING {
        thread::yield_now();
    }
    assert!(take_all(&mut links, 1).len() >= WAITING >> 16);
    drop(links);
    assert!(thread.join().unwrap() >= WAITING >> 16);
}
