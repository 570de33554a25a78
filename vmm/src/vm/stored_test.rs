//! What is written down is all of it, and the same for the same machine.

use super::*;
use crate::config::MachineConfig;

/// A flat multiboot image of `hlt`, loaded at 1 MiB (Multiboot Specification 0.6.96, 3.1 "OS image format").
fn image() -> Vec<u8> {
    let flags = 1u32 << 16;
    let checksum = 0u32.wrapping_sub(0x1bad_b002).wrapping_sub(flags);
    let words = [
        0x1bad_b002,
        flags,
        checksum,
        0x10_0000,
        0x10_0000,
        0,
        0,
        0x10_0020,
        0xf4,
    ];
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

fn stored(model: &str) -> Stored {
    let path = std::env::temp_dir().join(format!("minivmm-stored-{model}-{}", std::process::id()));
    std::fs::write(&path, image()).unwrap();
    let run = crate::Run::new(&MachineConfig {
        memory: 4 << 20,
        cpus: 2,
        model: crate::model::find(model).unwrap(),
        ..MachineConfig::new(&path)
    });
    std::fs::remove_file(&path).unwrap();
    run.unwrap().stored()
}

// covers: reverse/stored-state
#[test]
fn what_is_read_back_is_what_was_written() {
    for model in [
        "p6",
        "westmere",
        "broadwell",
        "snowridge",
        "sapphirerapids",
        "alderlake",
    ] {
        let stored = stored(model);
        assert_eq!(
            (stored.format, stored.model.as_str(), stored.cpus.len()),
            (FORMAT, model, 2)
        );
        let bytes = stored.bytes();
        let read: Stored = postcard::from_bytes(&bytes).unwrap();
        assert_eq!(read, stored, "{model}");
        assert!(
            postcard::from_bytes::<Stored>(&bytes[..bytes.len() - 1]).is_err(),
            "{model}: cut short"
        );
    }
}

// covers: reverse/stored-state
#[test]
fn units_and_devices_count_in_the_hash() {
    let mut state = stored("haswell");
    let mut seen = vec![state.hash().value()];
    assert_eq!(stored("haswell").hash().value(), seen[0], "the same machine");
    let changes: [fn(&mut Stored); 6] = [
        |s| s.cpus[1].cr2 = 1,
        |s| s.turn.1 += 1,
        |s| s.machine.units[1].ds_area = 0x1000,
        |s| s.machine.units[0].bts = None,
        |s| s.machine.platform.irqs[4] = true,
        |s| s.machine.cpus.swap(0, 1),
    ];
    for change in changes {
        change(&mut state);
        let hash = state.hash().value();
        assert!(!seen.contains(&hash) || state.machine.cpus[0] == state.machine.cpus[1]);
        seen.push(hash);
    }
}

/// A type that is stored has changed if this fails: [`FORMAT`] grows, unless no release has its number yet, since older files are
/// read by the program that wrote them.
// covers: reverse/stored-state
#[test]
fn the_form_has_not_changed_under_its_number() {
    let stored = stored("sapphirerapids");
    assert_eq!(
        (FORMAT, stored.bytes().len(), stored.hash().value()),
        (1, 3338, 0x8be3_cd87_377b_f205)
    );
}
