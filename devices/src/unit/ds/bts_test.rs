//! Branch trace store into a small paged memory.

use super::*;
use crate::unit::branch_test::{Random, at, branch, event, far};
use std::collections::BTreeMap;
use x86::fault::PageFaultCode;
use x86::watch::{BadPhys, Far};

const PAGE: u64 = 4096;
const AREA: u64 = 0x10_0000;
const BUFFER: u64 = 0x20_0000;
const TAKEN: Flow = Flow::Cond { taken: true };

/// Pages by number: their bytes, and whether they can be written.
#[derive(Clone, Debug, Default)]
struct Pages {
    pages: BTreeMap<u64, (Vec<u8>, bool)>,
    writes: u64,
}

impl Pages {
    /// The management area and so many pages of buffer.
    fn with_buffer(pages: u64) -> Self {
        let mut memory = Self::default();
        memory.map(AREA, true);
        (0..pages).for_each(|i| memory.map(BUFFER + i * PAGE, true));
        memory
    }

    fn map(&mut self, la: u64, writable: bool) {
        self.pages.insert(la / PAGE, (vec![0; PAGE as usize], writable));
    }

    fn fault(&self, la: u64, len: u64, write: bool) -> Option<PageFault> {
        let mut address = la;
        for _ in 0..=len / PAGE + 1 {
            match self.pages.get(&(address / PAGE)) {
                Some((_, true)) => {}
                Some((_, false)) if !write => {}
                page => {
                    let code = PageFaultCode::new().with_write(write).with_present(page.is_some());
                    return Some(PageFault { address, code });
                }
            }
            let next = (address / PAGE + 1).wrapping_mul(PAGE);
            if next.wrapping_sub(la) >= len {
                return None;
            }
            address = next;
        }
        None
    }

    fn bytes(&self, la: u64, len: usize) -> Vec<u8> {
        (la..la + len as u64)
            .map(|a| self.pages[&(a / PAGE)].0[(a % PAGE) as usize])
            .collect()
    }

    fn field(&self, layout: DsLayout, la: u64) -> u64 {
        let mut value = [0; 8];
        let len = layout.field() as usize;
        value[..len].copy_from_slice(&self.bytes(la, len));
        u64::from_le_bytes(value)
    }

    /// Base, index, maximum, threshold.
    fn set(&mut self, layout: DsLayout, fields: [u64; 4]) {
        let len = layout.field();
        for (i, value) in (0..).zip(fields) {
            self.write_linear(AREA + i * len, &value.to_le_bytes()[..len as usize])
                .unwrap();
        }
    }

    fn index(&self, layout: DsLayout) -> u64 {
        self.field(layout, AREA + layout.field())
    }

    fn record(&self, layout: DsLayout, at: u64) -> [u64; 3] {
        [0, 1, 2].map(|i| self.field(layout, at + i * layout.field()))
    }
}

impl TraceMem for Pages {
    fn read_linear(&mut self, la: u64, bytes: &mut [u8]) -> Result<(), PageFault> {
        if let Some(fault) = self.fault(la, bytes.len() as u64, false) {
            return Err(fault);
        }
        bytes.copy_from_slice(&self.bytes(la, bytes.len()));
        Ok(())
    }

    fn probe_linear(&mut self, la: u64, len: u64) -> Result<(), PageFault> {
        self.fault(la, len, true).map_or(Ok(()), Err)
    }

    fn write_linear(&mut self, la: u64, bytes: &[u8]) -> Result<(), PageFault> {
        if let Some(fault) = self.fault(la, bytes.len() as u64, true) {
            return Err(fault);
        }
        self.writes += 1;
        for (address, byte) in (la..).zip(bytes) {
            self.pages.get_mut(&(address / PAGE)).unwrap().0[(address % PAGE) as usize] = *byte;
        }
        Ok(())
    }

    fn read_phys(&mut self, pa: u64, _: &mut [u8]) -> Result<(), BadPhys> {
        Err(BadPhys { address: pa })
    }

    fn write_phys(&mut self, pa: u64, _: &[u8]) -> Result<(), BadPhys> {
        Err(BadPhys { address: pa })
    }
}

fn unit(layout: DsLayout) -> Bts {
    Bts::new(layout, true, if layout == DsLayout::Bits64 { 48 } else { 32 })
}

fn on() -> DebugCtl {
    DebugCtl::new().with_tr(true).with_bts(true)
}

fn jumps(count: u64) -> Vec<BranchRecord> {
    (1..=count).map(|i| branch(Flow::Jump, i, 0x1000 + i, 0)).collect()
}

// covers: bts/records
#[test]
fn records_in_both_layouts() {
    for (layout, size, predicted) in [
        (DsLayout::Bits64, 24, true),
        (DsLayout::Bits64, 24, false),
        (DsLayout::Bits32, 12, true),
    ] {
        let mut unit = unit(layout);
        unit.predicted = predicted;
        let mut memory = Pages::with_buffer(1);
        memory.set(layout, [BUFFER, BUFFER, BUFFER + 10 * size, BUFFER + 10 * size]);
        let high = if layout == DsLayout::Bits64 {
            0xFFFF_8000_0000_0000
        } else {
            0
        };
        let effects = unit.branches(
            &[
                branch(Flow::Jump, high | 0x10, high | 0x80, 0),
                branch(Flow::Cond { taken: false }, 0x80, 0x82, 0),
                branch(TAKEN, 0x90, 0xF0, 0),
            ],
            on(),
            AREA,
            &mut memory,
        );
        assert_eq!(effects, Effects::NONE);
        assert_eq!(
            memory.index(layout),
            BUFFER + 2 * size,
            "{layout:?}: not taken is no record"
        );
        let flags = if predicted { BRANCH_PREDICTED } else { 0 };
        assert_eq!(memory.record(layout, BUFFER), [high | 0x10, high | 0x80, flags]);
        // Forward and never seen: not predicted.
        assert_eq!(memory.record(layout, BUFFER + size), [0x90, 0xF0, 0]);
        assert_eq!(memory.bytes(BUFFER + 2 * size, 24), [0; 24], "nothing beyond");
    }
}

// covers: bts/control
#[test]
fn tr_bts_and_the_ring_filters_decide_what_is_stored() {
    let kernel = branch(Flow::Jump, 0x10, 0x20, 0);
    let user = branch(Flow::Jump, 0x30, 0x40, 3);
    let ring1 = branch(Flow::Jump, 0x50, 0x60, 1);
    let enter = far(Far::Syscall, 0x70, 0x80, 3, 0);
    let leave = far(Far::Sysret, 0x90, 0xA0, 0, 3);
    let all = [kernel, user, ring1, enter, leave];
    let c = DebugCtl::new;
    for (control, stored, why) in [
        (c().with_bts(true), &[][..], "TR clear: no messages"),
        (c().with_tr(true), &[], "BTS clear: messages, not stored"),
        (on(), &all[..], "everything"),
        (on().with_bts_off_os(true), &[user, ring1, enter], "CPL > 0"),
        (on().with_bts_off_usr(true), &[kernel, leave], "CPL = 0"),
        (on().with_bts_off_os(true).with_bts_off_usr(true), &[], "neither ring"),
        (on().with_lbr(true), &all, "LBR has no say"),
    ] {
        let mut unit = unit(DsLayout::Bits64);
        let mut memory = Pages::with_buffer(1);
        memory.set(DsLayout::Bits64, [BUFFER, BUFFER, BUFFER + 2400, BUFFER + 2400]);
        assert_eq!(
            unit.interest(control, AREA, &mut memory).branches.any(),
            !stored.is_empty(),
            "{why}"
        );
        let writes = memory.writes;
        for record in all {
            let _ = unit.branches(&[record], control, AREA, &mut memory);
        }
        let expected: Vec<_> = stored.iter().map(|r| r.from).collect();
        let got: Vec<_> = (0..stored.len() as u64)
            .map(|i| memory.record(DsLayout::Bits64, BUFFER + 24 * i)[0])
            .collect();
        assert_eq!(got, expected, "{why}");
        assert_eq!(
            memory.index(DsLayout::Bits64),
            BUFFER + 24 * stored.len() as u64,
            "{why}"
        );
        assert_eq!(memory.writes == writes, stored.is_empty(), "{why}: no other write");
    }
}

// covers: bts/circular
#[test]
fn with_the_threshold_above_the_maximum_the_buffer_is_a_ring() {
    for (layout, batch) in in_batches([1, 3, 4, 7, 23]) {
        let size = layout.branch_record();
        let mut unit = unit(layout);
        let mut memory = Pages::with_buffer(1);
        memory.set(layout, [BUFFER, BUFFER, BUFFER + 4 * size, BUFFER + 5 * size]);
        for records in jumps(23).chunks(batch) {
            assert_eq!(unit.branches(records, on(), AREA, &mut memory), Effects::NONE);
        }
        let froms: Vec<_> = (0..4).map(|i| memory.record(layout, BUFFER + i * size)[0]).collect();
        assert_eq!(froms, [21, 22, 23, 20], "{layout:?} in batches of {batch}");
        assert_eq!(memory.index(layout), BUFFER + 3 * size);
        assert_eq!(
            memory.bytes(BUFFER + 4 * size, 64),
            [0; 64],
            "nothing beyond the maximum"
        );
    }
}

/// Layouts with sizes of batches.
fn in_batches(sizes: [usize; 5]) -> impl Iterator<Item = (DsLayout, usize)> {
    let layouts = [DsLayout::Bits32, DsLayout::Bits64].into_iter();
    layouts.flat_map(move |layout| sizes.map(|size| (layout, size)))
}

/// SDM Vol. 3B 18.4.9.3 "Setting Up the BTS Buffer", notes: it is not enough to clear BTINT.
// covers: bts/circular
#[test]
fn with_btint_clear_a_threshold_inside_asks_for_interrupts_all_the_same() {
    for layout in [DsLayout::Bits32, DsLayout::Bits64] {
        let size = layout.branch_record();
        let mut unit = unit(layout);
        let mut memory = Pages::with_buffer(1);
        memory.set(layout, [BUFFER, BUFFER, BUFFER + 4 * size, BUFFER + 3 * size]);
        let mut left = jumps(10);
        let mut asked = Vec::new();
        let mut stored = 0;
        while !left.is_empty() {
            let room = unit.interest(on(), AREA, &mut memory).branch_room as usize;
            let rest = left.split_off(room.min(left.len()));
            stored += left.len();
            if unit.branches(&left, on(), AREA, &mut memory).pmi {
                asked.push(stored);
            }
            left = rest;
        }
        // The third and fourth of each round of four.
        assert_eq!(asked, [3, 4, 7, 8], "{layout:?}");
    }
}

// covers: bts/threshold
#[test]
fn the_interrupt_comes_at_the_record_that_reaches_the_threshold() {
    for layout in [DsLayout::Bits32, DsLayout::Bits64] {
        let size = layout.branch_record();
        let control = on().with_btint(true);
        // Threshold after 3 records; and one between records, which the manual forbids, met by the next.
        for (threshold, at) in [(3 * size, 3), (2 * size + 1, 3), (0, 1), (4 * size, 4)] {
            let mut unit = unit(layout);
            let mut memory = Pages::with_buffer(1);
            memory.set(layout, [BUFFER, BUFFER, BUFFER + 20 * size, BUFFER + threshold]);
            let mut left = jumps(6);
            let mut requests = Vec::new();
            let mut retired = 0;
            while !left.is_empty() {
                let room = unit.interest(control, AREA, &mut memory).branch_room as usize;
                let batch: Vec<_> = left.drain(..room.min(left.len())).collect();
                retired += batch.len();
                if unit.branches(&batch, control, AREA, &mut memory).pmi {
                    requests.push(retired);
                }
            }
            let expected: Vec<_> = (at..=6).collect();
            assert_eq!(
                requests, expected,
                "{layout:?}: at the threshold, and again until the index is moved"
            );
        }
    }
}

// covers: bts/threshold
#[test]
fn a_handler_that_moves_the_index_starts_over_and_a_full_buffer_goes_on_at_the_base() {
    let layout = DsLayout::Bits64;
    let control = on().with_btint(true);
    let mut unit = unit(layout);
    let mut memory = Pages::with_buffer(1);
    memory.set(layout, [BUFFER, BUFFER, BUFFER + 96, BUFFER + 72]);
    assert_eq!(unit.room(AREA, &mut memory), 3);
    assert!(unit.branches(&jumps(3), control, AREA, &mut memory).pmi);
    memory.set(layout, [BUFFER, BUFFER, BUFFER + 96, BUFFER + 72]);
    assert_eq!(unit.room(AREA, &mut memory), 3);
    assert!(!unit.branches(&jumps(2), control, AREA, &mut memory).pmi);
    // Nobody moves it: the processor does not stop by itself.
    for i in 0..5 {
        assert_eq!(
            unit.branches(&jumps(1), control, AREA, &mut memory).pmi,
            i < 2 || i == 4,
            "{i}"
        );
    }
    assert_eq!(memory.index(layout), BUFFER + 72);
}

// covers: bts/room
#[test]
fn a_batch_ends_where_something_happens() {
    let layout = DsLayout::Bits64;
    let unit = unit(layout);
    for (fields, room, why) in [
        ([0, 0, 240, 264], 10, "the end of the buffer"),
        ([0, 0, 240, 120], 5, "the threshold"),
        ([0, 48, 240, 120], 3, "from the index on"),
        ([0, 120, 240, 120], 1, "at the threshold: each at once"),
        ([0, 240, 240, 999], 10, "full: from the base on"),
        ([0, 0, 250, 999], 10, "what does not fit does not count"),
        ([0, 0, 4 * PAGE, 5 * PAGE], 341, "two pages are mapped: 8192 / 24"),
        ([0, 0, 10, 5], BATCH as u32, "no room: all are dropped"),
    ] {
        let mut memory = Pages::with_buffer(2);
        memory.set(layout, fields.map(|offset| BUFFER + offset));
        assert_eq!(unit.room(AREA, &mut memory), room, "{why}");
    }
    let mut memory = Pages::default();
    assert_eq!(
        unit.room(AREA, &mut memory),
        1,
        "no management area: the #PF comes at once"
    );
    let mut memory = Pages::with_buffer(64);
    memory.set(layout, [BUFFER, BUFFER, BUFFER + 64 * PAGE, BUFFER + 65 * PAGE]);
    assert_eq!(unit.room(AREA, &mut memory), BATCH as u32, "never more than a batch");
}

// covers: bts/faults
#[test]
fn pages_that_are_missing_or_read_only_fault_and_leave_the_index() {
    let layout = DsLayout::Bits64;
    let fault = |address, code| Effects {
        fault: Some(PageFault { address, code }),
        ..Effects::NONE
    };
    let missing = PageFaultCode::new().with_write(true);
    let read_only = missing.with_present(true);

    // The second page is missing: 170 records fit before it, the 171st crosses into it.
    let mut unit = unit(layout);
    let mut memory = Pages::with_buffer(1);
    memory.set(layout, [BUFFER, BUFFER, BUFFER + 4 * PAGE, BUFFER + 4 * PAGE]);
    assert_eq!(unit.room(AREA, &mut memory), 170);
    assert_eq!(unit.branches(&jumps(170), on(), AREA, &mut memory), Effects::NONE);
    assert_eq!(unit.room(AREA, &mut memory), 1);
    let index = BUFFER + 170 * 24;
    for _ in 0..2 {
        let effects = unit.branches(&jumps(1), on(), AREA, &mut memory);
        assert_eq!(effects, fault(BUFFER + PAGE, missing));
        assert_eq!(memory.index(layout), index, "the index stays");
    }
    // Mapped, it goes on.
    memory.map(BUFFER + PAGE, true);
    assert_eq!(unit.branches(&jumps(1), on(), AREA, &mut memory), Effects::NONE);
    assert_eq!(memory.index(layout), index + 24);
    assert_eq!(memory.record(layout, index), [1, 0x1001, BRANCH_PREDICTED]);

    // Unmapped under a running trace: what fits is stored, the rest is lost.
    let mut memory = Pages::with_buffer(1);
    memory.set(layout, [BUFFER, BUFFER, BUFFER + 4 * PAGE, BUFFER + 4 * PAGE]);
    let effects = unit.branches(&jumps(300), on(), AREA, &mut memory);
    assert_eq!(effects, fault(BUFFER + PAGE, missing));
    assert_eq!(
        (memory.index(layout), memory.record(layout, index - 24)[0]),
        (index, 170)
    );

    // A read-only buffer.
    memory.map(BUFFER, false);
    memory.set(layout, [BUFFER, BUFFER, BUFFER + PAGE, BUFFER + PAGE]);
    assert_eq!(
        unit.branches(&jumps(1), on(), AREA, &mut memory),
        fault(BUFFER, read_only)
    );
    assert_eq!(memory.index(layout), BUFFER);

    // No management area, and one that cannot be written.
    let mut memory = Pages::default();
    let effects = unit.branches(&jumps(1), on(), AREA, &mut memory);
    assert_eq!(effects, fault(AREA, PageFaultCode::new()));
    let mut memory = Pages::with_buffer(1);
    memory.set(layout, [BUFFER, BUFFER, BUFFER + PAGE, BUFFER + PAGE]);
    memory.pages.get_mut(&(AREA / PAGE)).unwrap().1 = false;
    let effects = unit.branches(&jumps(1), on(), AREA, &mut memory);
    assert_eq!(effects, fault(AREA + 8, read_only));
}

// covers: bts/events
#[test]
fn interrupts_and_exceptions_are_stored_and_never_fault() {
    let layout = DsLayout::Bits64;
    let mut unit = unit(layout);
    let mut memory = Pages::with_buffer(1);
    memory.set(layout, [BUFFER, BUFFER, BUFFER + PAGE, BUFFER + 48]);
    let control = on().with_btint(true);
    let page_fault = event(14, far(Far::Exception, 0x10, 0x8000, 3, 0));
    assert_eq!(unit.event(&page_fault, control, AREA, &mut memory), Effects::NONE);
    assert_eq!(memory.record(layout, BUFFER), [0x10, 0x8000, BRANCH_PREDICTED]);
    // A debug exception too, and an interrupt's record may reach the threshold.
    let debug = event(1, far(Far::Exception, 0x20, 0x9000, 0, 0));
    assert!(unit.event(&debug, control, AREA, &mut memory).pmi);
    assert_eq!(memory.record(layout, BUFFER + 24)[0], 0x20);
    // Where a branch would fault, a delivery is dropped.
    memory.pages.remove(&(BUFFER / PAGE));
    assert_eq!(unit.event(&page_fault, control, AREA, &mut memory), Effects::NONE);
    assert!(unit.branches(&jumps(1), control, AREA, &mut memory).fault.is_some());
}

// covers: bts/bounds
#[test]
fn nonsense_bounds_drop_records_and_touch_nothing_else() {
    for (layout, fields, stored, why) in [
        (DsLayout::Bits64, [BUFFER, BUFFER, BUFFER, 0], None, "no room at all"),
        (
            DsLayout::Bits64,
            [BUFFER, BUFFER, BUFFER + 23, 0],
            None,
            "room for no record",
        ),
        (
            DsLayout::Bits64,
            [BUFFER, BUFFER, 0, 0],
            None,
            "the end before the start",
        ),
        (
            DsLayout::Bits64,
            [BUFFER, BUFFER - 24, BUFFER + 48, 0],
            Some(BUFFER),
            "an index before the base",
        ),
        (
            DsLayout::Bits64,
            [BUFFER, BUFFER + 49, BUFFER + 48, 0],
            Some(BUFFER),
            "an index beyond the end",
        ),
        (
            DsLayout::Bits64,
            [BUFFER, !0, BUFFER + 48, 0],
            Some(BUFFER),
            "an index that would wrap",
        ),
        (
            DsLayout::Bits64,
            [BUFFER, BUFFER + 5, BUFFER + 48, 0],
            Some(BUFFER + 5),
            "no alignment is needed",
        ),
        (DsLayout::Bits64, [1 << 47, 1 << 47, 1 << 48, 0], None, "not canonical"),
        (
            DsLayout::Bits64,
            [BUFFER, BUFFER, 1 << 63, 0],
            None,
            "an end that is not canonical",
        ),
        (
            DsLayout::Bits64,
            [BUFFER, BUFFER, !0, 0],
            None,
            "a buffer across the hole",
        ),
        (DsLayout::Bits64, [!0, !0, !0, !0], None, "all ones"),
        (DsLayout::Bits64, [0; 4], None, "all zero"),
        (DsLayout::Bits32, [0xFFFF_FFFF; 4], None, "all ones"),
        (
            DsLayout::Bits32,
            [BUFFER, BUFFER, BUFFER + 11, 0],
            None,
            "room for no record",
        ),
        (
            DsLayout::Bits32,
            [BUFFER, BUFFER + 7, BUFFER + 24, 0],
            Some(BUFFER + 7),
            "no alignment is needed",
        ),
    ] {
        let mut unit = unit(layout);
        let mut memory = Pages::with_buffer(1);
        memory.map(BUFFER - PAGE, true);
        memory.set(layout, fields);
        let before = memory.clone();
        let effects = unit.branches(&jumps(1), on(), AREA, &mut memory);
        // What is stored is beyond a threshold of 0.
        let pmi = stored.is_some();
        assert_eq!(effects, Effects { pmi, ..Effects::NONE }, "{why}");
        match stored {
            Some(at) => {
                assert_eq!(memory.record(layout, at)[..2], [1, 0x1001], "{why}");
                assert_eq!(memory.index(layout), at + layout.branch_record(), "{why}");
            }
            None => assert_eq!(memory.pages, before.pages, "{why}"),
        }
    }
}

// covers: bts/all
#[test]
fn the_buffer_is_the_branches_however_they_are_batched() {
    let mut random = Random(0xB75);
    for round in 0..40 {
        let layout = if round % 2 == 0 {
            DsLayout::Bits64
        } else {
            DsLayout::Bits32
        };
        let size = layout.branch_record();
        let (mut one, mut other) = (unit(layout), unit(layout));
        let mut memory = Pages::with_buffer(16);
        let offset = random.below(100);
        let start = BUFFER + offset;
        memory.set(layout, [start, start, BUFFER + 16 * PAGE, 0]);
        let mut same = memory.clone();
        let mut step = 0;
        let mut all = Vec::new();
        while all.len() < 1500 {
            let count = random.below(300) as usize;
            let batch = random.near(count, 0, &mut step);
            let _ = one.branches(&batch, on(), AREA, &mut memory);
            for record in &batch {
                let _ = other.branches(&[*record], on(), AREA, &mut same);
            }
            all.extend(batch.into_iter().filter(|r| Flow::from_code(r.flow).unwrap().taken()));
        }
        let stored: Vec<_> = (0..(memory.index(layout) - start) / size)
            .map(|i| memory.record(layout, start + i * size))
            .collect();
        assert_eq!(stored.len(), all.len());
        for (record, stored) in all.iter().zip(&stored) {
            assert_eq!(stored[..2], [record.from, record.to]);
        }
        assert!(stored.iter().any(|r| r[2] == 0) && stored.iter().any(|r| r[2] == BRANCH_PREDICTED));
        assert_eq!(memory.pages, same.pages, "in batches and one by one");
        assert_eq!(one.state(), other.state());
    }
}

// covers: bts/state
#[test]
fn state_goes_out_and_comes_back() {
    let layout = DsLayout::Bits64;
    let mut random = Random(9);
    let mut memory = Pages::with_buffer(16);
    memory.set(layout, [BUFFER, BUFFER, BUFFER + 16 * PAGE, 0]);
    let mut one = unit(layout);
    let _ = one.interest(on(), AREA, &mut memory);
    let mut step = 0;
    for _ in 0..20 {
        let mut two = unit(layout);
        two.set_state(one.state());
        let mut same = memory.clone();
        let batch = random.near(50, 0, &mut step);
        let _ = one.branches(&batch, on(), AREA, &mut memory);
        let _ = two.branches(&batch, on(), AREA, &mut same);
        assert_eq!((one.state(), &memory.pages), (two.state(), &same.pages));
    }
    assert_ne!(one.state(), BtsState::default());
    one.reset();
    assert_eq!(one.state(), BtsState::default());
}

// covers: bts/fuzz
#[test]
fn no_area_of_random_bytes_leads_outside_the_guest_s_pages() {
    let mut random = Random(0xD5);
    for round in 0..3000 {
        let layout = if round % 2 == 0 {
            DsLayout::Bits64
        } else {
            DsLayout::Bits32
        };
        let mut unit = unit(layout);
        let mut memory = Pages::with_buffer(2);
        // Addresses in, near and far from the buffer, at any alignment.
        let fields = [0; 4].map(|_: u64| match random.below(4) {
            0 => random.next(),
            1 => random.next() >> random.below(64),
            _ => BUFFER + random.below(3 * PAGE),
        });
        memory.set(layout, fields);
        let control = DebugCtl::from_bits(random.next() | 0xC0);
        let area = match random.below(8) {
            0 => random.next(),
            1 => AREA + PAGE - random.below(40),
            _ => AREA,
        };
        for _ in 0..4 {
            let room = unit.interest(control, area, &mut memory).branch_room;
            assert!(room >= 1);
            let batch: Vec<_> = (0..random.below(700))
                .map(|i| {
                    at(
                        i,
                        branch(Flow::ALL[random.below(18) as usize], random.next(), random.next(), 3),
                    )
                })
                .collect();
            let _ = unit.branches(&batch, control, area, &mut memory);
        }
        assert!(memory.pages.len() == 3 && memory.pages.values().all(|(bytes, _)| bytes.len() == PAGE as usize));
    }
}
