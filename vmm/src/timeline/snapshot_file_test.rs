use std::path::PathBuf;

use super::*;
use crate::config::RestoreOptions;

/// A guest that counts in memory for ever: a multiboot image, loaded at 1 MiB.
fn image() -> Vec<u8> {
    let flags = 1u32 << 16;
    let checksum = 0u32.wrapping_sub(0x1bad_b002).wrapping_sub(flags);
    let words = [0x1bad_b002, flags, checksum, 0x10_0000, 0x10_0000, 0, 0, 0x10_0020];
    let mut image: Vec<u8> = words.iter().flat_map(|word: &u32| word.to_le_bytes()).collect();
    // inc dword [0x300000]; add dword [0x301000], 3; jmp back to the first.
    image.extend([0xff, 0x05, 0x00, 0x00, 0x30, 0x00]);
    image.extend([0x83, 0x05, 0x00, 0x10, 0x30, 0x00, 0x03]);
    image.extend([0xeb, 0xf1]);
    image
}

/// A folder of a test's own.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("minivmm-snapshot-{name}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&path);
        std::fs::create_dir(&path).unwrap();
        std::fs::write(path.join("kernel"), image()).unwrap();
        Folder(path)
    }

    fn at(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    fn config(&self) -> MachineConfig {
        MachineConfig {
            memory: 8 << 20,
            cpus: 2,
            ..MachineConfig::new(self.at("kernel"))
        }
    }

    fn from(&self, file: &str) -> MachineConfig {
        MachineConfig {
            restore: Some(RestoreOptions {
                file: self.at(file),
                second_serial: false,
            }),
            ..self.config()
        }
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn go(run: &mut Run, steps: u64) {
    let mut console = crate::Console::open(&crate::SerialTarget::Buffer, &[], run.line()).unwrap();
    assert!(run.run_for(&mut console, steps).unwrap().is_none());
}

/// A machine that has run for a while, and what it wrote.
fn written(folder: &Folder, config: &MachineConfig) -> (Run, u64) {
    let mut run = Run::new(config).unwrap();
    go(&mut run, 100_003);
    let file = File::create_new(folder.at("file")).unwrap();
    let bytes = run.write_snapshot(&file).unwrap();
    assert_eq!(bytes, file.metadata().unwrap().len());
    (run, bytes)
}

// covers: snapshot/file
#[test]
fn a_machine_goes_on_from_a_file_as_it_would_have() {
    let folder = Folder::new("goes-on");
    for model in ["p6", "westmere", "sapphirerapids"] {
        let model = crate::model::find(model).unwrap();
        let config = MachineConfig {
            model,
            ..folder.config()
        };
        let (mut run, _) = written(&folder, &config);
        let mut again = Run::new(&MachineConfig {
            model,
            ..folder.from("file")
        })
        .unwrap();
        assert_eq!(
            (again.steps(), again.digest()),
            (run.steps(), run.digest()),
            "{}",
            model.name
        );
        for run in [&mut run, &mut again] {
            go(run, 200_001);
        }
        assert_eq!(
            (again.steps(), again.digest()),
            (run.steps(), run.digest()),
            "{}",
            model.name
        );
        // A snapshot of a machine that went on from one is like any other.
        let file = File::create_new(folder.at("second")).unwrap();
        again.write_snapshot(&file).unwrap();
        let third = Run::new(&MachineConfig {
            model,
            ..folder.from("second")
        })
        .unwrap();
        assert_eq!(third.digest(), run.digest());
        for name in ["file", "second"] {
            std::fs::remove_file(folder.at(name)).unwrap();
        }
    }
}

#[track_caller]
fn refused(config: &MachineConfig, says: &str) {
    let error = Run::new(config).expect_err(says).to_string();
    assert!(error.starts_with("--restore "), "{error}");
    assert!(
        error.contains(says) && error.lines().count() == 1,
        "{error}, not {says}"
    );
}

// covers: snapshot/bad-file
#[test]
fn each_flipped_bit_and_each_cut_is_found() {
    let folder = Folder::new("damaged");
    let (_, len) = written(&folder, &folder.config());
    let whole = std::fs::read(folder.at("file")).unwrap();
    let header = u32::from_le_bytes(whole[20..24].try_into().unwrap()) as usize;
    let places = (0..HEAD).chain((HEAD..HEAD + header).step_by(7));
    // Bytes between the numbers and the pages mean nothing.
    let rest = (HEAD + header..whole.len()).step_by(997);
    let state = u64::from_le_bytes(whole[24..32].try_into().unwrap()) as usize;
    let pages = u64::from_le_bytes(whole[32..40].try_into().unwrap()) as usize;
    let numbers_end = HEAD + header + state + 8 * pages;
    let padding = numbers_end..numbers_end.next_multiple_of(PAGE);
    for at in places.chain(rest).filter(|at| !padding.contains(at)) {
        let mut bytes = whole.clone();
        bytes[at] ^= 1 << (at % 8);
        std::fs::write(folder.at("bad"), bytes).unwrap();
        let error = Run::new(&folder.from("bad")).expect_err("a flipped bit").to_string();
        assert!(
            error.starts_with("--restore ") && error.lines().count() == 1,
            "{at}: {error}"
        );
    }
    for keep in [0, 1, HEAD - 1, HEAD, HEAD + 10, whole.len() / 2, whole.len() - 1] {
        std::fs::write(folder.at("bad"), &whole[..keep]).unwrap();
        let says = if keep < HEAD { "not a snapshot" } else { "cut short" };
        refused(&folder.from("bad"), says);
    }
    let longer = [&whole[..], &[0]].concat();
    std::fs::write(folder.at("bad"), longer).unwrap();
    refused(
        &folder.from("bad"),
        &format!("{} bytes where there should be {len}", len + 1),
    );
    std::fs::write(folder.at("bad"), image()).unwrap();
    refused(&folder.from("bad"), "not a snapshot of minivmm's");
    refused(&folder.from("missing"), "no such file");
    refused(&folder.from("."), "director");
    let mut other = whole.clone();
    other[16] = 99;
    std::fs::write(folder.at("bad"), other).unwrap();
    refused(&folder.from("bad"), "another version of minivmm (form 99)");
}

// covers: snapshot/bad-file
#[test]
fn another_machine_is_refused() {
    let folder = Folder::new("another");
    written(&folder, &folder.config());
    let from = || folder.from("file");
    let haswell = crate::model::find("haswell").unwrap();
    refused(
        &MachineConfig {
            model: haswell,
            ..from()
        },
        "of model westmere",
    );
    let toggled = crate::model::find("westmere,-popcnt").unwrap();
    refused(
        &MachineConfig {
            model: toggled,
            ..from()
        },
        "of model westmere",
    );
    refused(
        &MachineConfig {
            memory: 16 << 20,
            ..from()
        },
        "8388608 bytes of RAM",
    );
    refused(&MachineConfig { cpus: 1, ..from() }, "2 CPUs");
    let error = Run::new(&from())
        .unwrap()
        .write_snapshot(&File::open(folder.at("file")).unwrap());
    assert!(error.is_err(), "a file that is open for reading");
    assert!(Run::new(&from()).is_ok(), "and that is left as it was");
}

// covers: snapshot/disks
#[test]
fn overlays_come_with_it_and_a_disk_that_changed_or_is_written_is_refused() {
    use crate::config::DiskConfig;
    use machine::disk::DiskMode;
    let folder = Folder::new("disks");
    let disk = folder.at("disk");
    std::fs::write(&disk, vec![7; 64 << 10]).unwrap();
    let with = |config: MachineConfig, mode| MachineConfig {
        disks: vec![DiskConfig {
            path: disk.clone(),
            mode,
            format: None,
        }],
        ..config
    };
    let (run, _) = written(&folder, &with(folder.config(), DiskMode::Overlay));
    drop(run);
    drop(Run::new(&with(folder.from("file"), DiskMode::Overlay)).unwrap());
    std::fs::write(&disk, vec![8; 32 << 10]).unwrap();
    refused(
        &with(folder.from("file"), DiskMode::Overlay),
        "has changed since the snapshot was written",
    );
    let mut writes = Run::new(&with(folder.config(), DiskMode::ReadWrite)).unwrap();
    let file = File::create_new(folder.at("other")).unwrap();
    let error = writes.write_snapshot(&file).unwrap_err().to_string();
    assert!(error.contains("overlay"), "{error}");
}
