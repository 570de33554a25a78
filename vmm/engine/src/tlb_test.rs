use super::*;

// covers: engine/tlb
#[test]
fn an_empty_entry_matches_no_address_of_its_index() {
    let tlb = Tlb::new();
    for linear in [
        0u64,
        0x1000,
        0x3ff000,
        0x400000,
        1 << 63,
        u64::MAX,
        0xffff_8000_0000_0000,
        0x0000_8000_0000_0000,
    ] {
        let e = tlb.entry(linear);
        for tag in [e.read, e.write, e.exec] {
            assert!(linear ^ tag > 0xfff, "{linear:x}");
        }
    }
}

#[test]
fn sets_are_kept_by_address_space_and_privilege() {
    let mut tlb = Tlb::new();
    tlb.select(1, Privilege::User);
    tlb.fill(0x5000, 0x1234_5000, true, Grant::No, Grant::No);
    tlb.select(2, Privilege::User);
    assert_ne!(tlb.entry(0x5000).read, 0x5000);
    tlb.select(1, Privilege::Supervisor);
    assert_ne!(tlb.entry(0x5000).read, 0x5000);
    tlb.select(1, Privilege::User);
    assert_eq!(tlb.entry(0x5000).read, 0x5000);
    tlb.select(2, Privilege::User);
    tlb.flush_pcid(1);
    tlb.select(1, Privilege::User);
    assert_ne!(tlb.entry(0x5000).read, 0x5000);
}

/// Whether few entries were filled or many, and whatever became of them meanwhile.
// covers: engine/tlb
#[test]
fn nothing_is_left_of_a_set_that_is_cleared() {
    for pages in [1, 7, REMEMBERED as u64 - 1, REMEMBERED as u64, ENTRIES as u64] {
        let mut tlb = Tlb::new();
        let fill = |tlb: &mut Tlb| {
            for page in 1..=pages {
                tlb.fill(page << 12, page << 12, true, Grant::Yes, Grant::Yes);
            }
        };
        fill(&mut tlb);
        tlb.hold_all_back();
        tlb.hold_fetches_back();
        for page in 1..=pages {
            let e = tlb.entry(page << 12);
            assert!(
                e.write ^ page << 12 > 0xfff && e.stores_to(page << 12),
                "{page} of {pages}"
            );
            assert!(e.holds_fetches_back(page << 12), "{page} of {pages}");
        }
        for page in (1..=pages).step_by(2) {
            tlb.flush_page(page << 12);
        }
        fill(&mut tlb);
        tlb.flush_pcid(0);
        for page in 0..=ENTRIES as u64 {
            let e = tlb.entry(page << 12);
            for tag in [e.read, e.write, e.exec] {
                assert!(tag ^ page << 12 > 0xfff, "{page} of {pages}");
            }
            assert!(!e.stores_to(page << 12) && e.host == 0, "{page} of {pages}");
        }
    }
}

#[test]
fn what_is_held_back_matches_nothing_and_comes_back() {
    // The lowest pages, whose addresses have no other bits than their index, and others.
    for linear in [0, 0x1000, 0x2000, 0x3000, 0x3f_f000, 0x40_0000, 0xffff_8000_0000_3000] {
        let mut tlb = Tlb::new();
        tlb.fill(linear, 0x5000, true, Grant::Yes, Grant::Yes);
        tlb.hold_back(0x6000);
        assert_eq!(tlb.entry(linear).write, linear, "another page");
        tlb.hold_back(0x5000);
        tlb.hold_all_back();
        tlb.hold_fetches_back();
        let e = *tlb.entry(linear);
        assert!(e.write ^ linear > 0xfff && e.stores_to(linear) && e.read == linear);
        assert!(e.exec ^ linear > 0xfff && e.holds_fetches_back(linear));
        assert!(!tlb.entry(linear ^ 0x1000).stores_to(linear ^ 0x1000), "nothing there");
        let state = tlb.state(Some);
        let page = Translation {
            linear,
            physical: 0x5000,
            reads: true,
            writes: true,
            fetches: true,
            announced: false,
        };
        assert_eq!(state.spaces[0].pages, [page]);
        let mut other = Tlb::new();
        other.fill(0x9000, 0x9000, true, Grant::Yes, Grant::Yes);
        other.set_state(&state, Some);
        assert_eq!(other.state(Some), tlb.state(Some));
        other.let_stores(other.now, linear);
        assert_eq!((other.entry(linear).write, other.entry(linear).host), (linear, 0x5000));
        assert_eq!(other.state(Some), tlb.state(Some));
        other.let_fetches(linear);
        assert_eq!(other.entry(linear).exec, linear);
    }
}

const fn tag(vpid: u16, ept: u64) -> VmxTag {
    VmxTag { vpid, ept }
}

/// What a VM entry or exit forgets, and INVVPID and INVEPT. SDM Vol. 3C 29.4.3 "Invalidating Cached Translation Information".
// covers: vmx/tlb-tags
#[test]
fn translations_are_told_apart_by_vpid_and_ept() {
    const RIGHTS: u64 = 7;
    let holds = |tlb: &mut Tlb| {
        tlb.select(0, Privilege::Supervisor);
        tlb.entry(0x5000).read == 0x5000
    };
    let go = |tlb: &mut Tlb, to: VmxTag, rights| {
        tlb.leave(RIGHTS);
        tlb.enter(to, rights);
    };
    let (host, guest, other) = (tag(0, 0), tag(1, 0x1001e), tag(2, 0x2001e));
    let filled = || {
        let mut tlb = Tlb::new();
        for world in [guest, other, tag(1, 0x2001e), host] {
            go(&mut tlb, world, RIGHTS);
            tlb.select(0, Privilege::Supervisor);
            tlb.fill(0x5000, 0x5000, true, Grant::No, Grant::No);
        }
        tlb
    };
    // What is done in root operation; whether translations are still there of the host, of both guests, and of the first under the
    // other's EPT.
    type Row = (&'static str, fn(&mut Tlb), [bool; 4]);
    let rows: [Row; 9] = [
        ("nothing", |_| {}, [true; 4]),
        ("MOV CR4", Tlb::flush_present, [false, true, true, true]),
        ("MOV CR3", |tlb| tlb.flush_pcid(0), [false, true, true, true]),
        ("INVVPID 1", |tlb| tlb.flush_vpid(1), [true, false, true, false]),
        ("INVVPID 2", Tlb::flush_guests, [true, false, false, false]),
        (
            "INVEPT 1",
            |tlb| tlb.flush_ept(Some(0x1005e)),
            [true, false, true, true],
        ),
        ("INVEPT 2", |tlb| tlb.flush_ept(None), [true, false, false, false]),
        ("other memory", Tlb::flush_all, [false; 4]),
        (
            "entry without VPID",
            |tlb| {
                tlb.leave(RIGHTS);
                tlb.enter(tag(0, 0x1001e), RIGHTS);
            },
            [false, true, true, true],
        ),
    ];
    for (what, act, expected) in rows {
        let mut tlb = filled();
        act(&mut tlb);
        let left = [host, guest, other, tag(1, 0x2001e)].map(|world| {
            // As if that VPID were entered by a CPU which had not been in this one.
            tlb.tag = world;
            holds(&mut tlb)
        });
        assert_eq!(left, expected, "{what}");
    }
    // Entries hold rights: CR0.WP that has changed meanwhile counts.
    let mut tlb = filled();
    go(&mut tlb, guest, RIGHTS ^ 1);
    assert!(!holds(&mut tlb));
    tlb.leave(RIGHTS ^ 1);
    tlb.enter(host, RIGHTS);
    assert!(holds(&mut tlb));
}
