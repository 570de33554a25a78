use super::*;
use x86::model::{CpuModel, SAPPHIRERAPIDS, SKYLAKE_SERVER};

/// A folder such as a Sapphire Rapids has, with changes.
fn folder(changes: &[(&str, &str)]) -> std::path::PathBuf {
    use std::sync::atomic::{AtomicU32, Ordering};
    static NUMBER: AtomicU32 = AtomicU32::new(0);
    let number = NUMBER.fetch_add(1, Ordering::Relaxed);
    let folder = std::env::temp_dir().join(format!("minivmm-intel-pt-{}-{number}", std::process::id()));
    let files = [
        ("type", "10"),
        ("tsc_art_ratio", "168:2"),
        ("format/pt", "config:0"),
        ("format/cyc", "config:1"),
        ("format/pwr_evt", "config:4"),
        ("format/fup_on_ptw", "config:5"),
        ("format/mtc", "config:9"),
        ("format/tsc", "config:10"),
        ("format/noretcomp", "config:11"),
        ("format/ptw", "config:12"),
        ("format/branch", "config:13"),
        ("format/mtc_period", "config:14-17"),
        ("caps/psb_cyc", "1"),
        ("caps/mtc", "1"),
        ("caps/ptwrite", "1"),
        ("caps/mtc_periods", "249"),
        ("caps/cycle_thresholds", "1fff"),
        ("caps/psb_periods", "3f"),
        ("caps/num_address_ranges", "2"),
        ("caps/payloads_lip", "0"),
    ];
    for (name, text) in files.iter().chain(changes) {
        let path = folder.join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, format!("{text}\n")).unwrap();
    }
    folder
}

fn read(changes: &[(&str, &str)]) -> Result<IntelPt, PtError> {
    let folder = folder(changes);
    let read = IntelPt::read(&folder);
    fs::remove_dir_all(folder).unwrap();
    read
}

fn caps(model: &CpuModel, crystal: (u32, u32)) -> PtCaps {
    PtCaps {
        crystal,
        ..model.units.pt.unwrap()
    }
}

fn both_rings() -> RtitCtl {
    RtitCtl::new().with_os(true).with_user(true).with_branch_en(true)
}

// covers: host-units/pt-perf
#[test]
fn what_perf_says_of_itself_decides_what_it_is_asked_for() {
    let pt = read(&[]).unwrap();
    assert_eq!(pt.kind, 10);
    let caps = caps(&SAPPHIRERAPIDS, (84, 1));
    let served = pt.served(&caps);
    let linux = both_rings()
        .with_topa(true)
        .with_tsc_en(true)
        .with_mtc_en(true)
        .with_mtc_freq(3)
        .with_psb_freq(3);
    assert!(served.takes(linux, &caps));
    assert!(!served.takes(linux.with_mtc_freq(4), &caps), "1001001001B has no bit 4");
    assert!(!served.takes(linux.with_event_en(true), &caps), "no such file");
    assert!(!served.takes(linux.with_pwr_evt_en(true), &caps), "the host's sleeps");
    // Bit 0, branches, no compression of returns, TSC, MTC with its period, PSB with its own.
    assert_eq!(
        pt.config(linux),
        1 | 1 << 13 | 1 << 11 | 1 << 10 | 1 << 9 | 3 << 14 | 3 << 24
    );
    assert_eq!(pt.config(both_rings().with_mtc_freq(3)), 1 | 1 << 13 | 1 << 11);

    let other = self::caps(&SAPPHIRERAPIDS, (80, 1));
    assert!(!pt.served(&other).takes(linux, &other), "another crystal clock");
    assert!(pt.served(&other).takes(linux.with_mtc_en(false), &other));
    let unknown = read(&[("tsc_art_ratio", "0:0")]).unwrap();
    assert!(!unknown.served(&caps).takes(linux, &caps));
    let no_ptw = read(&[("caps/ptwrite", "0")]).unwrap();
    assert!(!no_ptw.served(&caps).takes(both_rings().with_ptw_en(true), &caps));
    let linear = read(&[("caps/payloads_lip", "1")]).unwrap();
    let skylake = self::caps(&SKYLAKE_SERVER, (84, 1));
    assert!(!linear.served(&skylake).takes(both_rings(), &skylake));
    let moved = read(&[("format/tsc", "config:9")]).unwrap();
    assert!(!moved.served(&caps).takes(both_rings().with_tsc_en(true), &caps));
}

// covers: host-units/pt-perf
#[test]
fn a_perf_without_it_is_told() {
    let error = IntelPt::read(Path::new("/nonexistent")).unwrap_err().to_string();
    assert!(error.contains("no intel_pt"), "{error}");
    let error = read(&[("format/pt", "")]).unwrap_err().to_string();
    assert!(error.contains("before 4.13"), "{error}");
}

// covers: host-units/pt-perf
#[test]
fn ranges_are_filters() {
    let ranges = [(0x1000, 0x1fff), (0xffff_ffff_8100_0000, 0xffff_ffff_8100_0000)];
    assert_eq!(
        IntelPt::filters(&ranges),
        "filter 0x1000/0x1000,filter 0xffffffff81000000/0x1"
    );
    assert_eq!(IntelPt::filters(&[]), "");
}
