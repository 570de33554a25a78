use std::os::unix::{
    fs::{FileTypeExt, PermissionsExt},
    net::UnixStream,
};

use super::*;

fn folder(name: &str) -> std::path::PathBuf {
    let folder = std::env::temp_dir().join(format!("minivmm-socket-{name}-{}", std::process::id()));
    let _ = fs::remove_dir_all(&folder);
    fs::create_dir_all(&folder).unwrap();
    folder
}

// covers: gdb/socket
#[test]
fn whoever_sees_the_name_can_connect() {
    let folder = folder("race");
    for round in 0..200 {
        let path = folder.join(format!("{round}"));
        let seen = path.clone();
        let client = std::thread::spawn(move || {
            while !seen.exists() {
                std::hint::spin_loop();
            }
            UnixStream::connect(&seen).map(|_| ())
        });
        let listener = listen(&path).unwrap();
        client.join().unwrap().unwrap();
        listener.accept().unwrap();
    }
    let _ = fs::remove_dir_all(folder);
}

#[test]
fn the_socket_is_its_owners_and_nothing_else_is_left() {
    let folder = folder("mode");
    let path = folder.join("gdb");
    let _listener = listen(&path).unwrap();
    let metadata = fs::metadata(&path).unwrap();
    assert!(metadata.file_type().is_socket());
    assert_eq!(metadata.permissions().mode() & 0o777, 0o600);
    assert_eq!(fs::read_dir(&folder).unwrap().count(), 1);

    let again = listen(&path).unwrap_err();
    assert!(again.to_string().starts_with("exists already"), "{again}");
    assert_eq!(fs::read_dir(&folder).unwrap().count(), 1);
    assert!(UnixStream::connect(&path).is_ok(), "the first one is still there");
    let _ = fs::remove_dir_all(folder);
}

#[test]
fn a_name_of_the_greatest_length_will_do_and_a_longer_one_is_refused() {
    let folder = folder("long");
    // unix(7): sun_path has 108 bytes, the last of them 0.
    let rest = 107 - folder.as_os_str().len() - 1;
    listen(&folder.join("x".repeat(rest))).unwrap();
    assert_eq!(
        listen(&folder.join("x".repeat(rest + 1))).unwrap_err().kind(),
        io::ErrorKind::InvalidInput
    );
    assert_eq!(
        listen(&folder.join("missing/gdb")).unwrap_err().kind(),
        io::ErrorKind::NotFound
    );
    let _ = fs::remove_dir_all(folder);
}
