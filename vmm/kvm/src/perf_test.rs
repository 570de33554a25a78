use super::*;

// covers: host-units/pt-perf
#[test]
fn what_perf_refuses_for_has_its_line() {
    for (errno, says) in [
        (libc::EACCES, "perf_event_paranoid to 1"),
        (libc::EBUSY, "last-branch records"),
        (libc::EINVAL, "perf's intel_pt: "),
    ] {
        let why = why(io::Error::from_raw_os_error(errno)).to_string();
        assert!(why.contains(says) && why.lines().count() == 1, "{why}");
    }
}

/// Debian's third level takes CAP_SYS_ADMIN, which the jail gives away.
// covers: host-units/pt-perf
#[test]
fn levels_above_linuxs_own_are_told_apart() {
    for (level, paranoid) in [
        ("-1", false),
        ("0", false),
        ("2", false),
        ("3", true),
        ("4", true),
        ("", false),
    ] {
        assert_eq!(is_paranoid(level), paranoid, "{level}");
    }
}

// covers: host-units/pt-perf
#[test]
fn records_of_the_kernels_tell_what_is_lost() {
    let record = |kind: u32, flags: u64| {
        let mut bytes = kind.to_le_bytes().to_vec();
        bytes.extend([0, 0, 32, 0]);
        bytes.extend([0; 16]);
        bytes.extend(flags.to_le_bytes());
        bytes
    };
    let (aux, start) = (record(PERF_RECORD_AUX, 1), record(12, !0));
    assert_eq!(aux_flags(&[start.clone(), aux.clone()].concat()), 1);
    assert_eq!(aux_flags(&start), 0);
    // What breaks off, or has a size of 0, ends.
    assert_eq!(aux_flags(&aux[..20]), 0);
    assert_eq!(aux_flags(&[0; 7]), 0);
    assert_eq!(aux_flags(&[11, 0, 0, 0, 0, 0, 0, 0]), 0);
}

// covers: host-units/pt-perf
#[test]
fn bytes_that_go_round_the_end_of_a_mapping_come_in_order() {
    let file = vmm_sys_util::tempfile::TempFile::new().unwrap().into_file();
    file.set_len(PAGE as u64).unwrap();
    std::os::unix::fs::FileExt::write_at(&file, &[1; PAGE / 2], 0).unwrap();
    std::os::unix::fs::FileExt::write_at(&file, &[2; PAGE / 2], PAGE as u64 / 2).unwrap();
    let mapping = Mapping::new(&file, 0, PAGE).unwrap();
    let mut bytes = Vec::new();
    let size = PAGE as u64;
    mapping.copy(0, PAGE, 7 * size - 2, 7 * size + 3, &mut bytes);
    assert_eq!(bytes, [2, 2, 1, 1, 1]);
    bytes.clear();
    mapping.copy(0, PAGE, 3, 3 + size, &mut bytes);
    assert_eq!((bytes.len(), bytes[0], bytes[PAGE - 1]), (PAGE, 1, 1));
}

// covers: host-units/pt-perf
#[test]
fn a_host_without_intel_pt_says_so() {
    match Perf::here() {
        Err(why) => assert!(why.to_string().contains("intel_pt"), "{why}"),
        // With it: it records, or says why not.
        Ok(perf) => match perf.try_out() {
            Ok(()) => {}
            Err(why) => assert_eq!(why.to_string().lines().count(), 1, "{why}"),
        },
    }
}
