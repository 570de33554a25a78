use super::*;

// covers: lbr/tail
#[test]
fn a_ring_that_works_when_it_is_looked_at_is_the_same_ring() {
    let mut x = 7_u64;
    let mut below = move |n: u64| {
        x = x
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (x >> 33) % n
    };
    let segment = |number| Context {
        cs_base: number << 4,
        code: CodeSize::Bits64,
        ..Context::default()
    };
    for round in 0..600 {
        let style = Style {
            linear: below(2) == 0,
            beside: [Beside::Info, Beside::FlagsAndCycles][below(2) as usize],
        };
        let depth = [1, 4, 8, 16, 32][below(5) as usize];
        let (mut eager, mut lazy) = (BranchRing::new(depth), LazyRing::from(BranchRing::new(depth)));
        let filter = Filter {
            kinds: if below(2) == 0 {
                kinds::ALL
            } else {
                below(kinds::ALL.into()) as u32
            },
            kernel: below(4) != 0,
            user: below(4) != 0,
            call_stack: below(8) == 0,
            hide_source: below(2) == 0,
        };
        let (mut step, mut code) = (0, Context::default());
        for batch in 0..20 {
            let len = [1, 1, 40, 100, 600][below(5) as usize];
            let taken = below(2);
            let records: Vec<BranchRecord> = (0..1 + below(len))
                .map(|_| {
                    step += 1 + below(30);
                    BranchRecord {
                        from: 0x1000 + below(20) * 4,
                        to: 0x1000 + below(5) * 0x10,
                        step,
                        flow: (taken + below(7 - taken)) as u8,
                        length: 2,
                        to_cpl: if below(3) == 0 { 3 } else { 0 },
                        ..BranchRecord::default()
                    }
                })
                .collect();
            if below(3) == 0 {
                eager.note_exception();
                lazy.note_exception();
            }
            let here = if records.len() == 1 { segment(below(3)) } else { code };
            eager.record(&records, &filter, &style, here);
            lazy.comes(if taken == 1 { Recorded::Taken } else { Recorded::All });
            lazy.record(&records, &filter, &style, here);
            // Something that is no branch may change the code, too.
            code = if below(4) == 0 { segment(below(3)) } else { here };
            eager.now(code);
            lazy.now(code);
            if below(3) == 0 {
                assert_eq!(*lazy.with_records(), eager, "round {round}, batch {batch}");
            }
            if below(5) == 0 {
                assert_eq!(*lazy.get(), eager, "round {round}, batch {batch}");
            }
        }
        assert_eq!(*lazy.get(), eager, "round {round}");
    }
}
