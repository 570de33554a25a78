use super::*;

/// A file with a name of its own, removed at the end.
struct Image(PathBuf);

impl Image {
    fn new(bytes: &[u8]) -> Self {
        let name = format!("minivmm-disk-{}-{}", std::process::id(), unique());
        let path = std::env::temp_dir().join(name);
        std::fs::write(&path, bytes).unwrap();
        Image(path)
    }

    fn open(&self, mode: DiskMode) -> Result<Disk, String> {
        Disk::open(&self.0, mode, None).map_err(|e| e.to_string())
    }

    fn bytes(&self) -> Vec<u8> {
        std::fs::read(&self.0).unwrap()
    }
}

impl Drop for Image {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

fn sectors(count: usize) -> Vec<u8> {
    (0..count * 512).map(|i| (i / 512 + i) as u8).collect()
}

// covers: devices/virtio-blk
#[test]
fn what_is_written_is_in_the_file() {
    let image = Image::new(&sectors(64));
    let mut disk = image.open(DiskMode::ReadWrite).unwrap();
    assert_eq!((disk.size(), disk.readonly()), (64 * 512, false));
    disk.write(1024, &[9; 1024]).unwrap();
    disk.zero(4096, 8192).unwrap();
    disk.flush().unwrap();
    let mut expected = sectors(64);
    expected[1024..2048].fill(9);
    expected[4096..12288].fill(0);
    assert_eq!(image.bytes(), expected);
    let mut bytes = vec![1; 16384];
    disk.read(512, &mut bytes).unwrap();
    assert_eq!(bytes, expected[512..512 + 16384]);
}

// covers: devices/virtio-blk-overlay-readonly
#[test]
fn an_overlay_behaves_as_the_file_would_and_leaves_it_alone() {
    // 62 sectors and a half: the last one is a partial one.
    let image = Image::new(&sectors(64)[..32_000]);
    let mut model = sectors(64)[..32_000].to_vec();
    model.resize(32_256, 0);
    let mut disk = image.open(DiskMode::Overlay).unwrap();
    assert_eq!((disk.size(), disk.readonly()), (32_256, false));
    let mut state = 1u64;
    let mut random = |below: u64| {
        state = state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
        (state >> 33) % below
    };
    for round in 0..500 {
        let first = random(63);
        let count = 1 + random(63 - first);
        let (at, len) = (first * 512, (count * 512) as usize);
        match random(3) {
            0 => {
                let bytes = vec![round as u8; len];
                disk.write(at, &bytes).unwrap();
                model[at as usize..][..len].copy_from_slice(&bytes);
            }
            1 if round % 10 == 0 => {
                disk.zero(at, len as u64).unwrap();
                model[at as usize..][..len].fill(0);
            }
            _ => {
                let mut bytes = vec![0xee; len];
                disk.read(at, &mut bytes).unwrap();
                assert_eq!(bytes, model[at as usize..][..len], "round {round}");
            }
        }
    }
    disk.flush().unwrap();
    drop(disk);
    assert_eq!(image.bytes(), &sectors(64)[..32_000]);
}

// covers: reverse/disks
#[test]
fn an_overlay_goes_back_to_what_it_held_and_forgets_what_nobody_keeps() {
    let image = Image::new(&sectors(64));
    let mut disk = image.open(DiskMode::Overlay).unwrap();
    let overlay = disk.overlay().unwrap();
    let contents = |disk: &mut Disk| {
        let mut bytes = vec![0; 64 * 512];
        disk.read(0, &mut bytes).unwrap();
        bytes
    };
    let mut kept = vec![(overlay.save(), contents(&mut disk))];
    for round in 1..50 {
        disk.write(round % 7 * 512, &[round as u8; 2048]).unwrap();
        disk.write(8192, &[round as u8; 4096]).unwrap();
        kept.push((overlay.save(), contents(&mut disk)));
    }
    let places = overlay.lock().places;
    for (state, bytes) in kept.iter().rev().chain(&kept) {
        overlay.restore(state);
        assert!(contents(&mut disk) == *bytes);
    }
    assert_eq!(kept[0].1, sectors(64));
    // Another way from the third state on: its own writes, and the kept ones are as they were.
    overlay.restore(&kept[3].0);
    disk.write(8192, &[0xee; 4096]).unwrap();
    overlay.restore(&kept[4].0);
    assert!(contents(&mut disk) == kept[4].1);
    // Their places are free once they are gone, so the file grows no more.
    kept.truncate(1);
    overlay.restore(&kept[0].0);
    for round in 0..places {
        disk.write(round % 8 * 4096, &[7; 4096]).unwrap();
    }
    assert!(
        overlay.lock().places <= places + 1,
        "{} {places}",
        overlay.lock().places
    );
    drop(disk);
    assert_eq!(image.bytes(), sectors(64));
    assert!(image.open(DiskMode::ReadOnly).unwrap().overlay().is_none());
}

// covers: devices/virtio-blk-overlay-readonly
#[test]
fn a_readonly_disk_is_opened_for_reading_only() {
    let image = Image::new(b"a tar file, or whatever");
    let mut disk = image.open(DiskMode::ReadOnly).unwrap();
    assert_eq!((disk.size(), disk.readonly()), (512, true));
    let mut sector = [0xee; 512];
    disk.read(0, &mut sector).unwrap();
    assert_eq!(
        (&sector[..23], &sector[23..]),
        (&b"a tar file, or whatever"[..], &[0; 489][..])
    );
    disk.write(0, &sector).unwrap_err();
    disk.zero(0, 512).unwrap_err();
    disk.flush().unwrap();
    assert_eq!(image.bytes(), b"a tar file, or whatever");
}

// covers: bad-input/disk-in-use
#[test]
fn a_writer_has_a_file_alone_and_readers_share_it() {
    use DiskMode::{Overlay, ReadOnly, ReadWrite};
    let image = Image::new(&sectors(1));
    for (first, second, together) in [
        (ReadWrite, ReadWrite, false),
        (ReadWrite, ReadOnly, false),
        (ReadWrite, Overlay, false),
        (ReadOnly, ReadWrite, false),
        (Overlay, ReadWrite, false),
        (ReadOnly, Overlay, true),
        (Overlay, Overlay, true),
    ] {
        let held = image.open(first).unwrap();
        match image.open(second) {
            Ok(_) => assert!(together, "{first:?}, {second:?}"),
            Err(error) => assert!(!together && error.contains("in use"), "{first:?}, {second:?}: {error}"),
        }
        drop(held);
        image.open(second).unwrap();
    }
}

// covers: bad-input/disk-shrinks
#[test]
fn a_file_that_shrinks_is_an_error_and_does_not_grow_again() {
    let image = Image::new(&sectors(16));
    let mut disk = image.open(DiskMode::ReadWrite).unwrap();
    File::options()
        .write(true)
        .open(&image.0)
        .unwrap()
        .set_len(1000)
        .unwrap();
    let mut sector = [0; 512];
    disk.read(0, &mut sector).unwrap();
    assert_eq!(sector, sectors(1)[..]);
    for offset in [512, 1024, 7680] {
        let error = disk.read(offset, &mut sector).unwrap_err().to_string();
        assert!(error.contains("shrunk"), "{error}");
    }
    disk.write(7680, &sector).unwrap_err();
    disk.zero(0, 512).unwrap_err();
    assert_eq!(image.bytes().len(), 1000);
    let mut overlay = {
        drop(disk);
        image.open(DiskMode::Overlay).unwrap()
    };
    File::options().write(true).open(&image.0).unwrap().set_len(0).unwrap();
    overlay.read(0, &mut sector).unwrap_err();
    // A part of a cluster needs the rest of it from the file.
    overlay.write(0, &sector).unwrap_err();
}

/// Runs qemu-img: the images are those of another program.
fn qemu_img(args: &[&str]) {
    let output = std::process::Command::new("qemu-img").args(args).output();
    let output = output.expect("qemu-img (Debian: qemu-utils) makes the images");
    assert!(
        output.status.success(),
        "{args:?}: {}",
        String::from_utf8_lossy(&output.stderr)
    );
}

/// A file's name, for a file that somebody else makes.
fn unmade() -> Image {
    let image = Image::new(b"");
    std::fs::remove_file(&image.0).unwrap();
    image
}

fn name(image: &Image) -> &str {
    image.0.to_str().unwrap()
}

fn open_as(image: &Image, mode: DiskMode, format: DiskFormat) -> Result<Disk, String> {
    Disk::open(&image.0, mode, Some(format)).map_err(|e| e.to_string())
}

// covers: devices/disk-qcow2
#[test]
fn what_is_written_to_a_qcow2_image_is_what_qemu_reads() {
    let (raw, image, back) = (Image::new(&sectors(4096)), unmade(), unmade());
    qemu_img(&["convert", "-f", "raw", "-O", "qcow2", "-c", name(&raw), name(&image)]);
    let mut model = sectors(4096);
    let mut disk = open_as(&image, DiskMode::ReadWrite, DiskFormat::Qcow2).unwrap();
    assert_eq!((disk.size(), disk.readonly()), (4096 * 512, false));
    let mut bytes = vec![0; 100 * 512];
    disk.read(300 * 512, &mut bytes).unwrap();
    assert!(bytes == model[300 * 512..400 * 512], "compressed clusters");
    disk.write(700 * 512, &[7; 3 * 512]).unwrap();
    disk.zero(1000 * 512, 600 * 512).unwrap();
    disk.flush().unwrap();
    drop(disk);
    model[700 * 512..703 * 512].fill(7);
    model[1000 * 512..1600 * 512].fill(0);
    qemu_img(&["check", "-f", "qcow2", name(&image)]);
    qemu_img(&["convert", "-f", "qcow2", "-O", "raw", name(&image), name(&back)]);
    assert!(back.bytes() == model);
}

// covers: devices/disk-qcow2, devices/virtio-blk-overlay-readonly
#[test]
fn an_overlay_leaves_a_qcow2_image_and_what_it_is_based_on_alone() {
    let (base, image) = (Image::new(&sectors(256)), unmade());
    qemu_img(&["create", "-f", "qcow2", "-F", "raw", "-b", name(&base), name(&image)]);
    let before = (base.bytes(), image.bytes());
    let mut disk = open_as(&image, DiskMode::Overlay, DiskFormat::Qcow2).unwrap();
    disk.write(512, &[5; 512]).unwrap();
    let mut bytes = vec![0; 1536];
    disk.read(0, &mut bytes).unwrap();
    let mut model = sectors(3);
    model[512..1024].fill(5);
    assert!(bytes == model);
    drop(disk);
    assert!(before == (base.bytes(), image.bytes()));
    let mut disk = open_as(&image, DiskMode::ReadWrite, DiskFormat::Qcow2).unwrap();
    disk.write(512, &[5; 512]).unwrap();
    disk.flush().unwrap();
    disk.read(0, &mut bytes).unwrap();
    assert!(bytes == model);
    drop(disk);
    assert!(base.bytes() == before.0, "what it is based on is read alone");
    assert!(image.bytes() != before.1);
}

// covers: bad-input/disk-format
#[test]
fn a_format_is_never_guessed() {
    let image = unmade();
    qemu_img(&["create", "-f", "qcow2", name(&image), "1M"]);
    let before = image.bytes();
    for mode in [DiskMode::ReadWrite, DiskMode::ReadOnly, DiskMode::Overlay] {
        let error = image.open(mode).unwrap_err();
        assert!(error.contains("append ,format=qcow2, or ,format=raw"), "{error}");
    }
    let disk = open_as(&image, DiskMode::ReadOnly, DiskFormat::Raw).unwrap();
    assert_eq!(disk.size(), (before.len() as u64).next_multiple_of(512));
    let raw = Image::new(&sectors(8));
    let error = open_as(&raw, DiskMode::ReadWrite, DiskFormat::Qcow2).unwrap_err();
    assert!(error.contains("is no qcow2 image"), "{error}");
    assert!(image.bytes() == before && raw.bytes() == sectors(8));
}

// covers: bad-input/disk-qcow2
#[test]
fn a_damaged_qcow2_image_is_an_error_and_never_a_crash() {
    let (raw, image) = (Image::new(&sectors(512)), unmade());
    qemu_img(&["convert", "-f", "raw", "-O", "qcow2", name(&raw), name(&image)]);
    let whole = image.bytes();
    for len in [4, 40, 72, 104, 4096, 1 << 16, whole.len() / 2] {
        let cut = Image::new(&whole[..len]);
        // Where it can be opened, what is missing is an I/O error, or zeroes.
        if let Ok(mut disk) = open_as(&cut, DiskMode::Overlay, DiskFormat::Qcow2) {
            let _ = disk.read(0, &mut vec![0; 512 * 512]);
        }
    }
    // Each byte of the header, and of the table that leads to all others, is wrong in three ways.
    let table = u64::from_be_bytes(whole[40..48].try_into().unwrap()) as usize;
    for at in (0..112).chain(table..table + 8) {
        for value in [0, 0x7f, 0xff] {
            let mut bytes = whole.clone();
            bytes[at] = value;
            let damaged = Image::new(&bytes);
            if let Ok(mut disk) = open_as(&damaged, DiskMode::ReadWrite, DiskFormat::Qcow2) {
                let _ = disk.read(0, &mut vec![0; 4096]);
                let _ = disk.write(0, &[1; 4096]);
                let _ = disk.flush();
            }
        }
    }
    // Tables that lead to themselves: the first table to itself, and its first cluster's table to the header, the first table and itself. The
    // second word of a table is that of another cluster.
    let second = u64::from_be_bytes(whole[table..table + 8].try_into().unwrap()) & 0x00ff_ffff_ffff_fe00;
    let second = second as usize;
    for (at, leads_to) in [
        (table, table),
        (second, 0),
        (second, table),
        (second, second),
        (second + 8, second),
    ] {
        // Bit 63: it is used once, so that it is written in place.
        let entry = (leads_to as u64 | 1 << 63).to_be_bytes();
        let mut bytes = whole.clone();
        bytes[at..at + 8].copy_from_slice(&entry);
        for mode in [DiskMode::ReadOnly, DiskMode::Overlay, DiskMode::ReadWrite] {
            let damaged = Image::new(&bytes);
            if let Ok(mut disk) = open_as(&damaged, mode, DiskFormat::Qcow2) {
                let _ = disk.read(0, &mut vec![0; 512 * 512]);
                let _ = disk.write(0, &[0xff; 4096]);
                let _ = disk.write(1 << 16, &[0xff; 4096]);
                let _ = disk.read(0, &mut vec![0; 512 * 512]);
                let _ = disk.flush();
            }
            if mode != DiskMode::ReadWrite {
                assert!(damaged.bytes() == bytes);
            }
        }
    }
    let missing = unmade();
    qemu_img(&[
        "create",
        "-u",
        "-f",
        "qcow2",
        "-F",
        "raw",
        "-b",
        "/no/such/file",
        name(&missing),
        "1M",
    ]);
    let error = open_as(&missing, DiskMode::ReadOnly, DiskFormat::Qcow2).unwrap_err();
    assert!(
        error.contains("/no/such/file") && error.contains("no such file"),
        "{error}"
    );
    let (one, two) = (unmade(), unmade());
    for (image, base) in [(&one, &two), (&two, &one)] {
        qemu_img(&[
            "create",
            "-u",
            "-f",
            "qcow2",
            "-F",
            "qcow2",
            "-b",
            name(base),
            name(image),
            "1M",
        ]);
    }
    let error = open_as(&one, DiskMode::ReadOnly, DiskFormat::Qcow2).unwrap_err();
    assert!(error.contains("in a circle"), "{error}");
}
