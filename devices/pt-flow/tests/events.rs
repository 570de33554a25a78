//! Traces written packet by packet, beside what they tell.

use pt_flow::{
    Block, Change, Chunk, Chunks, Context, Decoder, End, Event, EventKind, ExecMode, GapKind, Image, Position,
    Sections, Timing, Visitor,
};
use pt_packet::{ItemSize, LastIp, MAX_LEN, Packet, Tnt, encode};

/// What was found, in order: blocks as their address and number of instructions.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Found {
    Ran(u64, u16, End),
    Event(EventKind),
}

#[derive(Default)]
struct List(Vec<Found>);

impl Visitor for List {
    fn block(&mut self, block: &Block) {
        self.0.push(Found::Ran(block.ip, block.count, block.end));
    }
    fn event(&mut self, event: &Event) {
        self.0.push(Found::Event(event.kind));
    }
}

fn trace(packets: &[Packet]) -> Vec<u8> {
    let (mut last_ip, mut bytes) = (LastIp::new(), Vec::new());
    for packet in packets {
        let mut out = [0; MAX_LEN];
        let len = encode(packet, &mut last_ip, &mut out);
        bytes.extend(&out[..len]);
    }
    bytes
}

/// As many bytes as the packets have.
fn offset(packets: &[Packet]) -> u64 {
    trace(packets).len() as u64
}

fn tnt(text: &str) -> Packet {
    let mut bits = Tnt::EMPTY;
    text.bytes().for_each(|letter| bits.push(letter == b'T'));
    Packet::ShortTnt(bits)
}

fn mode(mode: ExecMode) -> Packet {
    let interrupts = false;
    Packet::ModeExec { mode, interrupts }
}

/// PSB and a state in 64-bit mode, running at `ip`.
fn psb(ip: Option<u64>) -> Vec<Packet> {
    let mut packets = vec![Packet::Psb, mode(ExecMode::Bits64)];
    packets.extend(ip.map(|ip| Packet::Fup(Some(ip))));
    packets.push(Packet::PsbEnd);
    packets
}

const BASE: u64 = 0x1000;

/// At 1000H: `nop; nop; jnz 1000H`, at 1004H: `ptwrite eax; mov cr3, rax; ret`, at 100cH: `call 1004H; jmp rax`, at 1013H: `int3`.
const CODE: [u8; 20] = [
    0x90, 0x90, 0x75, 0xfc, 0xf3, 0x0f, 0xae, 0xe0, 0x0f, 0x22, 0xd8, 0xc3, 0xe8, 0xf3, 0xff, 0xff, 0xff, 0xff, 0xe0,
    0xcc,
];

fn decode(packets: &[Packet]) -> Vec<Found> {
    let bytes = trace(packets);
    let mut image = Sections::new();
    image.add(BASE, &CODE);
    let mut list = List::default();
    let mut decoder = Decoder::new(image, Timing::default());
    decoder.decode(&Chunk::whole(&bytes), &mut list);
    let gaps = list
        .0
        .iter()
        .filter(|found| matches!(found, Found::Event(EventKind::Gap(_))));
    assert_eq!(gaps.count() as u64, decoder.summary().gaps);
    list.0
}

fn start(ip: u64) -> Vec<Found> {
    let (mode, interrupts) = (ExecMode::Bits64, false);
    vec![
        Found::Event(EventKind::Mode { mode, interrupts }),
        Found::Event(EventKind::Sync { ip }),
    ]
}

// covers: decoder/events
#[test]
fn events_stand_where_they_happened() {
    use EventKind::*;
    use Found::{Event as E, Ran as R};
    let (size, off) = (ItemSize::Four, Packet::TipPgd(None));
    let rows: Vec<(&str, Vec<Packet>, Vec<Found>)> = vec![
        (
            "an interrupt in the middle of a block",
            vec![
                tnt("T"),
                Packet::Fup(Some(0x1001)),
                Packet::Tip(Some(0x1004)),
                Packet::Fup(Some(0x1004)),
                off,
            ],
            vec![
                R(0x1000, 3, End::Conditional),
                R(0x1000, 1, End::Cut),
                E(Async {
                    from: 0x1001,
                    to: Some(0x1004),
                    vm_exit: false,
                }),
                E(Disabled {
                    at: Some(0x1004),
                    to: None,
                }),
            ],
        ),
        (
            "PTWRITE without IP and MOV to CR3 wait for their instructions; a compressed return",
            vec![
                tnt("N"),
                Packet::Fup(Some(0x1004)),
                Packet::Tip(Some(0x100c)),
                Packet::Ptw {
                    value: 7,
                    size,
                    ip: false,
                },
                Packet::Pip {
                    cr3: 0x5000,
                    non_root: false,
                },
                tnt("T"),
                Packet::Tip(Some(0x1000)),
                Packet::Fup(Some(0x1000)),
                off,
            ],
            vec![
                R(0x1000, 3, End::Conditional),
                E(Async {
                    from: 0x1004,
                    to: Some(0x100c),
                    vm_exit: false,
                }),
                R(0x100c, 1, End::Call),
                R(0x1004, 1, End::PtWrite),
                E(PtWrite {
                    ip: Some(0x1004),
                    value: 7,
                    size,
                }),
                R(0x1008, 1, End::MovCr3),
                E(Paging {
                    cr3: 0x5000,
                    non_root: false,
                }),
                R(0x100b, 1, End::Return),
                R(0x1011, 1, End::IndirectJump),
                E(Disabled {
                    at: Some(0x1000),
                    to: None,
                }),
            ],
        ),
        (
            "the packet of a PTWRITE with IP says that it was executed",
            vec![
                tnt("N"),
                Packet::Ptw {
                    value: 9,
                    size,
                    ip: true,
                },
                Packet::Fup(Some(0x1004)),
                Packet::Ovf,
                Packet::Fup(Some(0x1000)),
                tnt("T"),
                Packet::Fup(Some(0x1000)),
                off,
            ],
            vec![
                R(0x1000, 3, End::Conditional),
                E(PtWrite {
                    ip: Some(0x1004),
                    value: 9,
                    size,
                }),
                R(0x1004, 1, End::PtWrite),
                E(Overflow),
                E(Resumed { ip: 0x1000 }),
                R(0x1000, 3, End::Conditional),
                E(Disabled {
                    at: Some(0x1000),
                    to: None,
                }),
            ],
        ),
        (
            "event trace: CFE and its data in front of the FUP that the interrupt has anyway; IF changes",
            vec![
                Packet::Evd { kind: 0, value: 0xcafe },
                Packet::Cfe {
                    kind: 1,
                    vector: 14,
                    ip: true,
                },
                Packet::Fup(Some(0x1002)),
                Packet::Tip(Some(0x1004)),
                Packet::ModeExec {
                    mode: ExecMode::Bits64,
                    interrupts: true,
                },
                Packet::Fup(Some(0x1008)),
                Packet::Cfe {
                    kind: 2,
                    vector: 0,
                    ip: false,
                },
                Packet::Tip(Some(0x1000)),
                off,
            ],
            vec![
                E(EventData { kind: 0, value: 0xcafe }),
                R(0x1000, 2, End::Cut),
                E(ControlFlow {
                    ip: Some(0x1002),
                    kind: 1,
                    vector: 14,
                }),
                E(Async {
                    from: 0x1002,
                    to: Some(0x1004),
                    vm_exit: false,
                }),
                R(0x1004, 1, End::PtWrite),
                E(Mode {
                    mode: ExecMode::Bits64,
                    interrupts: true,
                }),
                E(ControlFlow {
                    ip: None,
                    kind: 2,
                    vector: 0,
                }),
                R(0x1008, 1, End::MovCr3),
                R(0x100b, 1, End::Return),
                R(0x1000, 3, End::Conditional),
                E(Disabled { at: None, to: None }),
            ],
        ),
        (
            "power, and a transaction that is aborted",
            vec![
                Packet::Mwait {
                    hints: 0x20,
                    extensions: 1,
                },
                Packet::ExStop { ip: true },
                Packet::Fup(Some(0x1001)),
                Packet::Pwre {
                    hardware: false,
                    state: 2,
                    sub_state: 1,
                },
                Packet::Pwrx {
                    last: 2,
                    deepest: 3,
                    reason: 1,
                },
                Packet::ModeTsx {
                    in_tx: true,
                    abort: false,
                },
                Packet::Fup(Some(0x1001)),
                Packet::ModeTsx {
                    in_tx: false,
                    abort: true,
                },
                Packet::Fup(Some(0x1002)),
                Packet::Tip(Some(0x1000)),
                Packet::TipPgd(Some(0x1000)),
                Packet::TraceStop,
            ],
            vec![
                E(Mwait {
                    hints: 0x20,
                    extensions: 1,
                }),
                R(0x1000, 1, End::Cut),
                E(Stopped { ip: Some(0x1001) }),
                E(PowerEntry {
                    hardware: false,
                    state: 2,
                    sub_state: 1,
                }),
                E(PowerExit {
                    last: 2,
                    deepest: 3,
                    reason: 1,
                }),
                E(Transaction {
                    ip: Some(0x1001),
                    in_tx: true,
                    abort: false,
                }),
                R(0x1001, 1, End::Cut),
                E(Transaction {
                    ip: Some(0x1002),
                    in_tx: false,
                    abort: true,
                }),
                E(Async {
                    from: 0x1002,
                    to: Some(0x1000),
                    vm_exit: false,
                }),
                R(0x1000, 3, End::Conditional),
                E(Disabled {
                    at: None,
                    to: Some(0x1000),
                }),
                E(TraceStop),
            ],
        ),
        (
            "tracing is off and on again",
            vec![
                tnt("T"),
                Packet::TipPgd(Some(0x1000)),
                Packet::Pip {
                    cr3: 0x7000,
                    non_root: true,
                },
                Packet::Vmcs(0x9000),
                mode(ExecMode::Bits64),
                Packet::TipPge(Some(0x1011)),
                Packet::Tip(Some(0x1000)),
                Packet::Fup(Some(0x1000)),
                off,
            ],
            vec![
                R(0x1000, 3, End::Conditional),
                R(0x1000, 3, End::Conditional),
                E(Disabled {
                    at: None,
                    to: Some(0x1000),
                }),
                E(Paging {
                    cr3: 0x7000,
                    non_root: true,
                }),
                E(Vmcs { pointer: 0x9000 }),
                E(Mode {
                    mode: ExecMode::Bits64,
                    interrupts: false,
                }),
                E(Enabled { ip: Some(0x1011) }),
                R(0x1011, 1, End::IndirectJump),
                E(Disabled {
                    at: Some(0x1000),
                    to: None,
                }),
            ],
        ),
        (
            "an interrupt of a guest, and a VM exit",
            vec![
                tnt("T"),
                Packet::TipPgd(Some(0x1000)),
                Packet::Pip {
                    cr3: 0x7000,
                    non_root: true,
                },
                Packet::TipPge(Some(0x1011)),
                Packet::Fup(Some(0x1011)),
                Packet::Tip(Some(0x1004)),
                Packet::Fup(Some(0x1004)),
                Packet::Pip {
                    cr3: 0x8000,
                    non_root: false,
                },
                Packet::Tip(Some(0x1000)),
                Packet::Fup(Some(0x1000)),
                off,
            ],
            vec![
                R(0x1000, 3, End::Conditional),
                R(0x1000, 3, End::Conditional),
                E(Disabled {
                    at: None,
                    to: Some(0x1000),
                }),
                E(Paging {
                    cr3: 0x7000,
                    non_root: true,
                }),
                E(Enabled { ip: Some(0x1011) }),
                E(Async {
                    from: 0x1011,
                    to: Some(0x1004),
                    vm_exit: false,
                }),
                E(Async {
                    from: 0x1004,
                    to: Some(0x1000),
                    vm_exit: true,
                }),
                E(Paging {
                    cr3: 0x8000,
                    non_root: false,
                }),
                E(Disabled {
                    at: Some(0x1000),
                    to: None,
                }),
            ],
        ),
        (
            "a TIP.PGE whose IP is out of context",
            vec![
                off,
                Packet::TipPge(None),
                Packet::Fup(Some(0x1000)),
                Packet::Tip(Some(0x1011)),
                off,
            ],
            vec![
                R(0x1000, 3, End::Conditional),
                E(Disabled { at: None, to: None }),
                E(Enabled { ip: None }),
                E(Async {
                    from: 0x1000,
                    to: Some(0x1011),
                    vm_exit: false,
                }),
                E(Resumed { ip: 0x1011 }),
                R(0x1011, 1, End::IndirectJump),
                E(Disabled { at: None, to: None }),
            ],
        ),
        (
            "an overflow that ends behind a PSB",
            [
                vec![tnt("T"), Packet::Ovf],
                psb(None),
                vec![Packet::Fup(Some(0x1011)), Packet::Tip(Some(0x1000)), off],
            ]
            .concat(),
            vec![
                R(0x1000, 3, End::Conditional),
                E(Overflow),
                E(Resumed { ip: 0x1011 }),
                R(0x1011, 1, End::IndirectJump),
                R(0x1000, 3, End::Conditional),
                E(Disabled { at: None, to: None }),
            ],
        ),
    ];
    for (what, packets, found) in rows {
        let all = [psb(Some(0x1000)), packets].concat();
        let expected = [start(0x1000), found].concat();
        assert_eq!(decode(&all), expected, "{what}");
    }
}

// covers: decoder/gaps
#[test]
fn what_cannot_be_decoded_is_a_gap_at_its_place() {
    let rows: [(&str, Vec<Packet>, GapKind); 7] = [
        (
            "no code",
            vec![Packet::Fup(Some(0x1004)), Packet::Tip(Some(0x9000)), tnt("T")],
            GapKind::NoCode { ip: 0x9000 },
        ),
        (
            "a TIP where a branch needs a bit",
            vec![Packet::Tip(Some(0x1004))],
            GapKind::Mismatch { ip: 0x1000 },
        ),
        (
            "a return whose call was not seen",
            vec![Packet::Fup(Some(0x1000)), Packet::Tip(Some(0x100b)), tnt("T")],
            GapKind::NoCall { ip: 0x100b },
        ),
        (
            "a FUP off the way",
            vec![Packet::Fup(Some(0x100c))],
            GapKind::Unreached {
                from: 0x1000,
                to: 0x100c,
            },
        ),
        (
            "a FUP within an instruction",
            vec![tnt("N"), Packet::Fup(Some(0x1006))],
            GapKind::Unreached {
                from: 0x1004,
                to: 0x1006,
            },
        ),
        (
            "a TIP without IP",
            vec![Packet::Fup(Some(0x1000)), Packet::Tip(None)],
            GapKind::NoIp,
        ),
        (
            "no packet",
            vec![tnt("T"), Packet::Mnt(0)],
            GapKind::Packet(pt_packet::ErrorKind::UnknownOpcode {
                extended: false,
                byte: 0xd9,
            }),
        ),
    ];
    for (what, packets, gap) in rows {
        let mut bytes = trace(&[psb(Some(0x1000)), packets].concat());
        if let GapKind::Packet(_) = gap {
            bytes.push(0xd9);
        }
        // Behind it all is well again.
        let next = [
            psb(Some(0x1000)),
            vec![tnt("T"), Packet::Fup(Some(0x1000)), Packet::TipPgd(None)],
        ]
        .concat();
        bytes.extend(trace(&next));
        let mut image = Sections::new();
        image.add(BASE, &CODE);
        let mut list = List::default();
        let mut decoder = Decoder::new(image, Timing::default());
        decoder.decode(&Chunk::whole(&bytes), &mut list);
        assert!(
            list.0.contains(&Found::Event(EventKind::Gap(gap))),
            "{what}: {:?}",
            list.0
        );
        assert!(!gap.to_string().is_empty());
        let end = [
            Found::Event(EventKind::Resumed { ip: 0x1000 }),
            Found::Ran(0x1000, 3, End::Conditional),
            Found::Event(EventKind::Disabled {
                at: Some(0x1000),
                to: None,
            }),
        ];
        assert_eq!(list.0[list.0.len() - 3..], end, "{what}");
    }
    // Endless loops end.
    let mut image = Sections::new();
    image.add(BASE, &[0xeb, 0xfe]);
    let mut list = List::default();
    let bytes = trace(&[psb(Some(0x1000)), vec![tnt("T")]].concat());
    Decoder::new(image, Timing::default()).decode(&Chunk::whole(&bytes), &mut list);
    assert!(
        list.0
            .contains(&Found::Event(EventKind::Gap(GapKind::Endless { ip: 0x1000 })))
    );
}

/// Code that changes: versions of one page, each from a position on.
#[derive(Clone)]
struct Versions {
    versions: Vec<(Position, Vec<u8>)>,
    now: usize,
}

impl Image for Versions {
    fn space(&mut self, _: &Context, _: bool) -> u32 {
        3
    }
    fn code(&mut self, space: u32, ip: u64, out: &mut [u8]) -> usize {
        assert_eq!(space, 3);
        let code = &self.versions[self.now].1;
        let Some(rest) = ip.checked_sub(BASE).and_then(|at| code.get(at as usize..)) else {
            return 0;
        };
        let len = rest.len().min(out.len());
        out[..len].copy_from_slice(&rest[..len]);
        len
    }
    fn next_change(&mut self) -> Option<Position> {
        self.versions.get(self.now + 1).map(|version| version.0)
    }
    fn advance(&mut self, position: Position, changed: &mut dyn FnMut(Change)) {
        while self.next_change().is_some_and(|next| next <= position) {
            self.now += 1;
            changed(Change { space: 3, page: BASE });
        }
    }
}

// covers: decoder/changes
#[test]
fn code_changes_where_its_position_says() {
    use End::{Conditional, Cut};
    use Found::Ran as R;
    let head = [psb(None), vec![mode(ExecMode::Bits64), Packet::TipPge(Some(0x1000))]].concat();
    let one = vec![0x90, 0x90, 0x75, 0xfc];
    // The same branch with other instructions in front of it.
    let two = vec![0x66, 0x90, 0x75, 0xfc];
    let first = R(0x1000, 3, Conditional);
    let second = R(0x1000, 2, Conditional);
    let at = offset(&head);
    let place = |offset, bits, ip| Position { offset, bits, ip };
    let rows = [
        ("before the first branch", place(at, 0, Some(0x1000)), vec![second; 5]),
        ("without an address", place(at, 0, None), vec![second; 5]),
        (
            "behind two branches",
            place(at, 2, Some(0x1000)),
            vec![first, first, second, second, second],
        ),
        (
            "within a block",
            place(at, 1, Some(0x1002)),
            vec![
                first,
                R(0x1000, 2, Cut),
                R(0x1002, 1, Conditional),
                second,
                second,
                second,
            ],
        ),
        (
            "behind the packet of the first branches",
            place(at + 1, 0, Some(0x1000)),
            vec![first, first, first, second, second],
        ),
        (
            "behind it and one more",
            place(at + 1, 1, Some(0x1000)),
            vec![first, first, first, first, second],
        ),
        (
            "behind a packet of time",
            place(at + 3, 0, Some(0x1000)),
            vec![first, first, first, second, second],
        ),
        ("at the end", place(at + 4, 0, Some(0x1000)), vec![first; 5]),
    ];
    let packets = [
        head,
        vec![
            tnt("TTT"),
            Packet::Mtc(3),
            tnt("TT"),
            Packet::Fup(Some(0x1000)),
            Packet::TipPgd(None),
        ],
    ]
    .concat();
    let bytes = trace(&packets);
    for (what, position, ran) in rows {
        let image = Versions {
            versions: vec![(Position::default(), one.clone()), (position, two.clone())],
            now: 0,
        };
        let mut list = List::default();
        let mut decoder = Decoder::new(image, Timing::default());
        decoder.decode(&Chunk::whole(&bytes), &mut list);
        let found: Vec<Found> = list.0.iter().copied().filter(|found| matches!(found, R(..))).collect();
        assert_eq!(found, ran, "{what}");
        assert_eq!(decoder.summary().gaps, 0, "{what}: {:?}", list.0);
        assert_eq!(decoder.image().now, 1, "{what}");
    }
    // Back and forth, with the nodes made anew each time, and a position that is never reached.
    let image = Versions {
        versions: vec![
            (Position::default(), one.clone()),
            (place(at, 1, Some(0x1000)), two.clone()),
            (place(at, 2, Some(0x1000)), one.clone()),
            (place(at + 1, 0, Some(0x1004)), two),
        ],
        now: 0,
    };
    let mut list = List::default();
    let mut decoder = Decoder::new(image, Timing::default());
    decoder.decode(&Chunk::whole(&bytes), &mut list);
    let found: Vec<Found> = list.0.iter().copied().filter(|found| matches!(found, R(..))).collect();
    assert_eq!(found, [first, second, first, second, second]);
    let gap = Found::Event(EventKind::Gap(GapKind::ChangeUnreached { ip: 0x1004 }));
    assert!(list.0.contains(&gap), "{:?}", list.0);
}

// covers: decoder/changes
#[test]
fn a_context_has_its_own_code() {
    /// `jmp rax` behind as many NOPs as CR3's page number says.
    struct ByCr3;
    impl Image for ByCr3 {
        fn space(&mut self, context: &Context, upper: bool) -> u32 {
            assert!(!upper || context.vmcs.is_none());
            context.cr3.map_or(0, |cr3| (cr3 >> 12) as u32)
        }
        fn code(&mut self, space: u32, ip: u64, out: &mut [u8]) -> usize {
            let nops = space as u64;
            for (at, byte) in out.iter_mut().enumerate() {
                let at = ip - BASE + at as u64;
                *byte = match at {
                    at if at < nops => 0x90,
                    at if (at - nops).is_multiple_of(2) => 0xff,
                    _ => 0xe0,
                };
            }
            out.len()
        }
    }
    let pip = |page: u64| Packet::Pip {
        cr3: page << 12,
        non_root: false,
    };
    let mut packets = psb(Some(BASE));
    packets.insert(1, pip(1));
    packets.extend([
        Packet::Tip(Some(BASE)),
        Packet::Tip(Some(BASE)),
        Packet::Fup(Some(BASE)),
        pip(4),
        Packet::Tip(Some(BASE)),
        Packet::Tip(Some(BASE)),
        Packet::Fup(Some(BASE)),
        pip(1),
        Packet::Tip(Some(BASE)),
        Packet::Tip(Some(BASE)),
    ]);
    // A PSB's state tells what no packet before it did.
    packets.extend([
        Packet::Psb,
        pip(2),
        mode(ExecMode::Bits64),
        Packet::Fup(Some(BASE)),
        Packet::PsbEnd,
    ]);
    packets.extend([Packet::Tip(Some(BASE)), Packet::Fup(Some(BASE)), Packet::TipPgd(None)]);
    let mut list = List::default();
    Decoder::new(ByCr3, Timing::default()).decode(&Chunk::whole(&trace(&packets)), &mut list);
    let counts: Vec<u16> = list
        .0
        .iter()
        .filter_map(|found| match found {
            Found::Ran(BASE, count, End::IndirectJump) => Some(*count),
            _ => None,
        })
        .collect();
    assert_eq!(counts, [2, 2, 5, 2, 3]);
}

// covers: decoder/stream
#[test]
fn a_stream_is_cut_at_its_psbs() {
    let mut bytes = vec![0; 5];
    let mut begins = Vec::new();
    for _ in 0..10 {
        begins.push(bytes.len() as u64);
        bytes.extend(trace(&[psb(Some(0x1000)), vec![tnt("TTT"); 20]].concat()));
    }
    for size in [1, 30, 100, 1000] {
        let chunks: Vec<Chunk> = Chunks::new(bytes.as_slice(), size, 1 << 20)
            .map(Result::unwrap)
            .collect();
        assert_eq!(chunks[0].skipped(), 5);
        let mut at = 5;
        for (number, chunk) in chunks.iter().enumerate() {
            assert_eq!(chunk.offset(), at);
            assert!(begins.contains(&at));
            assert!(!chunk.is_empty() && (chunk.len() >= size || number + 1 == chunks.len()));
            let from = at as usize;
            assert_eq!(chunk.bytes(), &bytes[from..from + chunk.bytes().len()]);
            at += chunk.len() as u64;
        }
        assert_eq!(at as usize, bytes.len());
    }
    // No PSB at all, and none for too long.
    let chunks: Vec<Chunk> = Chunks::new(&[0x11; 100][..], 10, 1 << 20).map(Result::unwrap).collect();
    assert_eq!((chunks.len(), chunks[0].skipped(), chunks[0].len()), (1, 100, 0));
    assert_eq!(Chunks::new(&[][..], 10, 1 << 20).count(), 0);
    let mut long = trace(&[psb(Some(0x1000)), vec![tnt("TTTTTT"); 2_000_000]].concat());
    long.extend(trace(
        &[
            psb(Some(0x1000)),
            vec![tnt("T"), Packet::Fup(Some(0x1000)), Packet::TipPgd(None)],
        ]
        .concat(),
    ));
    let mut image = Sections::new();
    image.add(BASE, &CODE);
    let mut decoder = Decoder::new(image, Timing::default());
    let (mut list, mut total) = (List::default(), 0);
    for chunk in Chunks::new(long.as_slice(), 1 << 16, 1 << 20) {
        let chunk = chunk.unwrap();
        assert!(chunk.bytes().len() < 2 << 20, "{}", chunk.bytes().len());
        total += chunk.len() as u64 + chunk.skipped();
        decoder.decode(&chunk, &mut list);
    }
    assert_eq!(total, long.len() as u64);
    assert!(list.0.contains(&Found::Event(EventKind::Gap(GapKind::TooLong))));
    assert!(
        list.0
            .iter()
            .any(|found| matches!(found, Found::Event(EventKind::Gap(GapKind::Skipped { .. }))))
    );
}
