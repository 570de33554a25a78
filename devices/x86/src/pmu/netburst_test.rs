use super::*;

// covers: pmu/netburst-wiring
#[test]
fn escrs_are_wired_as_the_manual_s_table_says() {
    // Performance Counter MSRs and Associated CCCR and ESCR MSRs: the first counter of each group, its ESCRs with their select numbers.
    for (counter, table) in [
        (
            0,
            &[
                (0x3A0, 7),
                (0x3A2, 6),
                (0x3AA, 2),
                (0x3AC, 4),
                (0x3B2, 0),
                (0x3B4, 1),
                (0x3B6, 3),
                (0x3C8, 5),
            ][..],
        ),
        (
            2,
            &[
                (0x3A1, 7),
                (0x3A3, 6),
                (0x3AB, 2),
                (0x3AD, 4),
                (0x3B3, 0),
                (0x3B5, 1),
                (0x3B7, 3),
                (0x3C9, 5),
            ],
        ),
        (4, &[(0x3C0, 0), (0x3C2, 2), (0x3C4, 1)]),
        (6, &[(0x3C1, 0), (0x3C3, 2), (0x3C5, 1)]),
        (8, &[(0x3A4, 1), (0x3A6, 0), (0x3A8, 5), (0x3AE, 2), (0x3B0, 3)]),
        (10, &[(0x3A5, 1), (0x3A7, 0), (0x3A9, 5), (0x3AF, 2), (0x3B1, 3)]),
        (
            12,
            &[
                (0x3B8, 4),
                (0x3CC, 5),
                (0x3E0, 6),
                (0x3BA, 0),
                (0x3BC, 2),
                (0x3BE, 3),
                (0x3CA, 1),
            ],
        ),
        (
            14,
            &[(0x3B9, 4), (0x3CD, 5), (0x3E1, 6), (0x3BB, 0), (0x3BD, 2), (0x3CB, 1)],
        ),
        (
            16,
            &[
                (0x3B8, 4),
                (0x3CC, 5),
                (0x3E0, 6),
                (0x3BA, 0),
                (0x3BC, 2),
                (0x3BE, 3),
                (0x3CA, 1),
            ],
        ),
        (
            17,
            &[(0x3B9, 4), (0x3CD, 5), (0x3E1, 6), (0x3BB, 0), (0x3BD, 2), (0x3CB, 1)],
        ),
    ] {
        // Both counters of a pair have the same.
        let pair = if counter < 16 {
            counter..=counter + 1
        } else {
            counter..=counter
        };
        for counter in pair {
            for select in 0..8 {
                let expected = table.iter().find(|(_, number)| *number == select).map(|(msr, _)| *msr);
                assert_eq!(
                    selected(counter, select).map(|(_, msr)| msr),
                    expected,
                    "{counter}, {select}"
                );
            }
        }
    }
}

// covers: pmu/netburst-events
#[test]
fn no_two_events_of_a_unit_have_a_code() {
    for (n, event) in EVENTS.iter().enumerate() {
        let same = |other: &&Event| (other.unit, other.event) == (event.unit, event.event);
        assert_eq!(EVENTS.iter().filter(same).count(), 1, "{n}: {}", event.name);
        assert!(ESCRS.iter().any(|pair| pair.unit == event.unit), "{}", event.name);
    }
}

// covers: pmu/netburst-registers
#[test]
fn fields_are_where_the_manual_s_figures_have_them() {
    // The steps of the manual's Example "Scenario for Extended Cascading".
    let escr = Escr::from_bits(0x0400_0603);
    assert_eq!(
        (escr.event(), escr.mask()),
        (2, 3),
        "instr_retired, NBOGNTAG and NBOGTAG"
    );
    assert!(escr.t1_os() && escr.t1_usr() && !escr.os(), "logical processor 1");
    let cccr = Cccr::from_bits(0x0403_8800);
    assert!(cccr.extended_cascade() && cccr.interrupt() && !cccr.enable() && !cccr.cascade());
    assert_eq!((cccr.select(), cccr.active_thread()), (4, 3));
    let cccr = Cccr::new()
        .with_compare(true)
        .with_complement(true)
        .with_threshold(15)
        .with_edge(true)
        .with_force_overflow(true);
    assert_eq!(cccr.into_bits(), 0x3FC_0000);
    assert_eq!(
        Cccr::new().with_cascade(true).with_overflow(true).into_bits(),
        0xC000_0000
    );
    assert_eq!(Escr::new().with_tag_enable(true).with_tag_value(0xF).into_bits(), 0x1F0);
}
