use super::*;

// covers: trace/export-never-overwrites
#[test]
fn what_is_there_stays_until_the_new_one_is_whole() {
    let dir = std::env::temp_dir().join(format!("minivmm-out-{}", std::process::id()));
    fs::create_dir(&dir).unwrap();
    let path = dir.join("out");
    let mut file = OutFile::create(&path, false).unwrap();
    file.write_all(b"one").unwrap();
    assert!(!path.exists());
    file.finish().unwrap();
    assert_eq!(fs::read(&path).unwrap(), b"one");
    let refused = OutFile::create(&path, false).unwrap_err().to_string();
    assert_eq!(refused, format!("{}: exists already", path.display()));
    let mut file = OutFile::create(&path, true).unwrap();
    file.write_all(b"two").unwrap();
    drop(file);
    assert_eq!(fs::read(&path).unwrap(), b"one", "not finished");
    assert_eq!(fs::read_dir(&dir).unwrap().count(), 1);

    let folder = dir.join("folder");
    let new = Folder::create(&folder, false, "data").unwrap();
    fs::write(new.work().join("data"), b"1").unwrap();
    new.finish().unwrap();
    Folder::create(&folder, false, "data").unwrap_err();
    let new = Folder::create(&folder, true, "data").unwrap();
    new.finish().unwrap();
    assert!(!folder.join("data").exists());
    let users = dir.join("users");
    fs::create_dir(&users).unwrap();
    fs::write(users.join("thesis"), b"x").unwrap();
    let refused = Folder::create(&users, true, "data").unwrap_err().to_string();
    assert!(refused.contains("is not replaced"), "{refused}");
    assert!(users.join("thesis").is_file());
    fs::remove_dir_all(&dir).unwrap();
}
