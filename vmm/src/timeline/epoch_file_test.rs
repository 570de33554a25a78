use super::*;

fn folder() -> std::path::PathBuf {
    use std::sync::atomic::{AtomicUsize, Ordering};
    static COUNT: AtomicUsize = AtomicUsize::new(0);
    let count = COUNT.fetch_add(1, Ordering::Relaxed);
    let path = std::env::temp_dir().join(format!("minivmm-epoch-{}-{count}", std::process::id()));
    std::fs::create_dir(&path).unwrap();
    path
}

fn written(path: &Path) -> Vec<u8> {
    let header = Header {
        version: env!("CARGO_PKG_VERSION").into(),
        session: 7,
        steps: 64,
        previous: 0,
        logged: 3,
        hash: 9,
    };
    let pages = [(0x1000, None), (0x5000, None), (0x6000, None)].into();
    let fill = |gpa: u64, bytes: &mut [u8]| {
        bytes.fill(if gpa == 0x5000 { 0 } else { (gpa >> 12) as u8 });
        Ok(())
    };
    write(path, &header, b"state", &pages, fill).unwrap();
    std::fs::read(path).unwrap()
}

/// Reads everything that is in a file.
fn read(path: &Path) -> Result<Vec<(u64, u8)>, EpochError> {
    let file = EpochFile::open(path)?;
    let zero = hash_of(&[0; PAGE]);
    let mut read = Vec::new();
    let there: Vec<Page> = file.pages.iter().filter(|page| page.index.is_some()).copied().collect();
    let is_zero = |page: &&Page| page.index.is_none() && page.hash == zero;
    read.extend(file.pages.iter().filter(is_zero).map(|page| (page.gpa, 0)));
    file.read(&there, |page, bytes| {
        read.push((page.gpa, bytes[17]));
        Ok(())
    })?;
    Ok(read)
}

#[test]
fn what_was_written_is_read() {
    let folder = folder();
    let path = folder.join("1");
    written(&path);
    assert_eq!(read(&path).unwrap(), [(0x5000, 0), (0x1000, 1), (0x6000, 6)]);
    let file = EpochFile::open(&path).unwrap();
    assert_eq!(
        (file.header.steps, file.header.logged, &file.state[..]),
        (64, 3, &b"state"[..])
    );
    std::fs::remove_dir_all(folder).unwrap();
}

// covers: epochs/bad-file
#[test]
fn a_file_that_was_changed_anywhere_is_refused() {
    let folder = folder();
    let path = folder.join("1");
    let bytes = written(&path);
    // Padding is nobody's; everything else is hashed, or a length that has to fit.
    let padding = bytes.len() - 2 * PAGE;
    let used = bytes[..padding].iter().rposition(|byte| *byte != 0).unwrap() + 1;
    for at in (0..used).chain((padding..bytes.len()).step_by(97)) {
        let mut changed = bytes.clone();
        changed[at] ^= 0x10;
        std::fs::write(&path, changed).unwrap();
        assert!(read(&path).is_err(), "byte {at}");
    }
    for len in (0..bytes.len()).step_by(61) {
        std::fs::write(&path, &bytes[..len]).unwrap();
        assert!(read(&path).is_err(), "{len} bytes");
    }
    std::fs::remove_dir_all(folder).unwrap();
}
