use std::convert::Infallible;
use std::net::{IpAddr, Ipv4Addr};

use super::*;
use crate::{links::Links, vm::Inlet};

fn received(bytes: &[u8]) -> Vec<Vec<u8>> {
    let mut links = Links::new().unwrap();
    let sender = links.add(Inlet::Virtio { device: 1, port: 0 }, true).unwrap();
    receive_stream(bytes, &sender);
    let mut frames = Vec::new();
    let offered = links.offer(0, |_, frame| {
        frames.push(frame.to_vec());
        Ok::<_, Infallible>(Some(frame.len()))
    });
    offered.unwrap();
    frames
}

// covers: net/passt-protocol
#[test]
fn frames_come_behind_their_lengths() {
    let two = b"\0\0\0\x03abc\0\0\0\x01d";
    assert_eq!(received(two), [b"abc".to_vec(), b"d".to_vec()]);
    for cut in 0..two.len() {
        assert!(
            received(&two[..cut]).len() < 2,
            "{cut}: a frame that breaks off is none"
        );
    }
}

// covers: bad-input/net-frame-too-long
#[test]
fn a_length_that_no_frame_has_ends_the_stream() {
    assert_eq!(received(b"\0\0\0\x01a\xff\0\0\0bbbbbbb"), [b"a".to_vec()]);
}

// covers: net/forward
#[test]
fn forwards_are_told_as_passt_takes_them() {
    let forward = |host, guest| Forward {
        address: IpAddr::V4(Ipv4Addr::LOCALHOST),
        host,
        guest,
    };
    assert_eq!(ports(&[]), ["none"]);
    let two = ports(&[forward(2222, 22), forward(8080, 80)]);
    assert_eq!(two, ["127.0.0.1/2222:22", "127.0.0.1/8080:80"]);
}

// covers: bad-input/net-guest-floods
#[test]
fn what_a_back_end_does_not_take_is_lost_and_is_not_kept() {
    let (far, near) = sync_channel(WAITING);
    let (mut cable, plug) = Plug::new();
    plug.connect(far);
    // A DHCPDISCOVER is some 300 bytes long.
    for number in 0..100_000u32 {
        let frame = [&number.to_le_bytes()[..], &[0; 338]].concat();
        assert_eq!(cable.write(&frame).unwrap(), frame.len());
    }
    let kept: Vec<_> = near.try_iter().collect();
    assert_eq!(kept.len(), WAITING);
    assert_eq!(kept[WAITING - 1][..4], (WAITING as u32 - 1).to_le_bytes());
    // And what comes later finds room again.
    cable.write_all(b"later").unwrap();
    assert_eq!(near.try_iter().collect::<Vec<_>>(), [b"later".to_vec()]);
}

// covers: bad-input/net-port-taken
#[test]
fn a_port_that_is_taken_is_named() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let host = taken.local_addr().unwrap().port();
    let forward = Forward {
        address: IpAddr::V4(Ipv4Addr::LOCALHOST),
        host,
        guest: 22,
    };
    let mut links = Links::new().unwrap();
    let sender = links.add(Inlet::Virtio { device: 1, port: 0 }, true).unwrap();
    let config = NetConfig::User {
        forwards: vec![forward],
    };
    let error = connect(&config, sender).unwrap_err().to_string();
    assert!(
        error.contains(&format!("127.0.0.1:{host}")) && error.contains("in use"),
        "{error}"
    );
}

// covers: bad-input/net-no-tap
#[test]
fn an_interface_that_is_not_there_is_named() {
    let mut links = Links::new().unwrap();
    let sender = links.add(Inlet::Virtio { device: 1, port: 0 }, true).unwrap();
    let error = connect(&NetConfig::Tap("nosuchtap0".into()), sender)
        .unwrap_err()
        .to_string();
    assert!(
        error.starts_with("--net tap=nosuchtap0: there is no such interface"),
        "{error}"
    );
}
