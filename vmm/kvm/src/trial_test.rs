use super::*;
use crate::Host;

fn exact() -> Seen {
    Seen {
        cpuid: SHOWN.map(|row| row.1),
        tsc: AHEAD + 150,
        host: (100, 200),
        took_offset: true,
    }
}

// covers: kvm/trial
#[test]
fn a_kvm_that_does_what_it_takes_has_no_defect() {
    assert_eq!(judge(&exact()), []);
    // The guest's first instant and its last are within the run.
    for tsc in [AHEAD + 100, AHEAD + 200] {
        assert_eq!(judge(&Seen { tsc, ..exact() }), []);
    }
}

// covers: kvm/trial
#[test]
fn bits_that_follow_other_registers_may_differ() {
    let mut seen = exact();
    seen.cpuid[1][3] = 1 << 9;
    seen.cpuid[1][2] = 1 << 27 | 1 << 3;
    seen.cpuid[3][2] = 1 << 4;
    assert_eq!(judge(&seen), []);
}

// covers: kvm/trial
#[test]
fn what_is_shown_otherwise_is_named() {
    let said = |seen: &Seen| judge(seen).iter().map(ToString::to_string).collect::<Vec<_>>();
    let own = Seen { tsc: 150, ..exact() };
    assert_eq!(
        said(&own),
        ["a guest's RDTSC shows the host's time-stamp counter, whatever the offset"]
    );
    for tsc in [AHEAD + 99, AHEAD + 201, 0] {
        assert_eq!(judge(&Seen { tsc, ..exact() }), [Defect::TscOffset]);
    }
    let old = Seen {
        tsc: 150,
        took_offset: false,
        ..exact()
    };
    assert_eq!(judge(&old), [Defect::NoTscOffset]);
    let mut features = exact();
    features.cpuid[3][3] = 1 << 29;
    assert_eq!(
        said(&features),
        ["a guest's CPUID.07H:EDX shows 20000000H where 00000000H was set"]
    );
}

/// The guest is one: on a KVM that does all, whatever is changed of what it is asked for shows as a defect.
// covers: kvm/trial
#[test]
fn the_guest_sees_what_this_kvm_shows() {
    let Ok(host) = Host::open() else {
        return;
    };
    let seen = look(&host.kvm).unwrap();
    // Whatever is filtered, the vendor's name and the brand come from what was set or from the processor: never zeros.
    assert!(seen.cpuid[0][1] != 0 && seen.cpuid[7] != [0; 4], "{seen:x?}");
    assert_ne!(seen.tsc, 0);
    println!("{:?}", judge(&seen));
}
