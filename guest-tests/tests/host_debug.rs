//! Debug registers against those of the host's CPU: random programs under random breakpoints, single-stepped or not, by ptrace
//! there and on the engine here. What comes where, with which bits of DR6, is the same.

use std::fmt::Write as _;
use std::io::Write as _;
use std::process::{Command, Stdio};

use engine::{CS, SS, Segment};
use guest_tests::HOST_DEBUG;
use guest_tests::flat::{CODE, DATA, Flat};
use iced_x86::IcedError;
use iced_x86::code_asm::*;
use x86::model::SKYLAKE_SERVER;
use x86::rflags::flag::{RF, TF};

/// Programs, in the quick form.
const CASES: u64 = 400;
const INSTRUCTIONS: u64 = 24;
/// Bytes that programs reach from each of their pointers.
const REACH: u64 = 0x18;
const STACK: u64 = DATA + 0x2000;
const OSFXSR: u64 = 1 << 9;

/// SplitMix64.
struct Rng(u64);

impl Rng {
    fn below(&mut self, n: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ z >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ z >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
        (z ^ z >> 31) % n
    }
}

struct Case {
    step: bool,
    addresses: [u64; 4],
    control: u64,
    code: Vec<u8>,
}

/// One instruction, or a few that belong together.
fn instruction(a: &mut CodeAssembler, rng: &mut Rng) -> Result<(), IcedError> {
    let at = rng.below(REACH) as i32;
    let base = [rsi, rdi, r8][rng.below(3) as usize];
    let [mut over, mut callee] = [a.create_label(), a.create_label()];
    match rng.below(24) {
        0 => a.mov(byte_ptr(base + at), dl),
        1 => a.mov(word_ptr(base + at), dx),
        2 => a.mov(dword_ptr(base + at), edx),
        3 => a.mov(qword_ptr(base + at), rdx),
        4 => a.mov(cl, byte_ptr(base + at)),
        5 => a.mov(rax, qword_ptr(base + at)),
        6 => a.add(dword_ptr(base + at), ebx),
        7 => a.sub(qword_ptr(base + at), 1),
        8 => a.inc(byte_ptr(base + at)),
        9 => a.cmp(dword_ptr(base + at), ebx),
        10 => a.xchg(dword_ptr(base + at), ecx),
        11 => a.lock().xadd(qword_ptr(base + at), rcx),
        12 => a.movups(xmm0, xmmword_ptr(base + at)),
        13 => a.movups(xmmword_ptr(base + at), xmm0),
        14 => a.push(rcx),
        15 => a.pop(rdx),
        16 => a.stosb(),
        17 => a.movsd(),
        18 => a.lea(rbx, qword_ptr(rbx + at)),
        19 => a.test(qword_ptr(base + at), 1),
        20 => {
            a.test(ebx, 8)?;
            a.jne(over)?;
            a.add(ebx, 3)?;
            a.set_label(&mut over)?;
            a.nop()
        }
        21 => {
            a.call(callee)?;
            a.jmp(over)?;
            a.set_label(&mut callee)?;
            a.inc(edx)?;
            a.ret()?;
            a.set_label(&mut over)?;
            a.nop()
        }
        22 => {
            a.push(rsi)?;
            a.pop(r8)
        }
        _ => a.nop(),
    }
}

fn case(seed: u64) -> Case {
    let mut rng = Rng(seed);
    let mut a = CodeAssembler::new(64).unwrap();
    a.pxor(xmm0, xmm0).unwrap();
    for _ in 0..INSTRUCTIONS {
        instruction(&mut a, &mut rng).unwrap();
    }
    a.int3().unwrap();
    let result = a
        .assemble_options(CODE, iced_x86::BlockEncoderOptions::RETURN_NEW_INSTRUCTION_OFFSETS)
        .unwrap();
    let code = result.inner.code_buffer.clone();
    // Where instructions begin, the last one aside.
    let starts = result.inner.new_instruction_offsets.clone();
    let (mut addresses, mut control) = ([0; 4], 0);
    for (n, address) in addresses.iter_mut().enumerate() {
        let kind = [0, 1, 3][rng.below(3) as usize];
        let (length, bytes) = [(0, 1), (1, 2), (3, 4), (2, 8)][rng.below(4) as usize];
        if rng.below(4) == 0 {
            continue;
        }
        let field = if kind == 0 {
            let start = starts[rng.below(starts.len() as u64 - 1) as usize];
            *address = CODE + u64::from(start);
            0
        } else {
            let near = [DATA, DATA + 0x20, DATA + 0x40, STACK - 0x10][rng.below(4) as usize];
            *address = (near + rng.below(REACH)) & !(bytes - 1);
            kind | length << 2
        };
        control |= 1 << (2 * n) | field << (16 + 4 * n);
    }
    Case {
        step: rng.below(3) == 0,
        addresses,
        control,
        code,
    }
}

/// Where a debug exception comes, with DR6's conditions.
type Event = (u64, u64);

/// What comes of a program: debug exceptions, then registers and a hash of memory.
#[derive(Debug, PartialEq)]
struct Run {
    events: Vec<Event>,
    end: String,
}

impl Run {
    /// A debugger that stops between two instructions cannot tell a trap of the one from a breakpoint on the next: the host's
    /// CPU has both in DR6 at once, where it may, and otherwise they come one after the other.
    fn push(&mut self, event: Event) {
        match self.events.last_mut() {
            Some(last) if last.0 == event.0 => last.1 |= event.1,
            _ => self.events.push(event),
        }
    }
}

fn on_engine(case: &Case) -> Run {
    let mut flat = Flat::new(&SKYLAKE_SERVER, OSFXSR, |a| a.db(&case.code));
    flat.state(|s| {
        let segment = |selector, attributes| Segment {
            selector,
            base: 0,
            limit: u32::MAX,
            attributes,
        };
        s.segments.fill(segment(0x1B, 0xC0F3));
        s.segments[CS] = segment(0x23, 0xA0FB);
        s.cpl = 3;
        assert_eq!(s.segments[SS].dpl(), 3);
        s.gpr = [
            0x1111_1111_1111_1111,
            3,
            0x1234_5678_9ABC_DEF0,
            0x80,
            STACK,
            0x7FFF,
            DATA + 0x20,
            DATA + 0x40,
            DATA,
            9,
            u64::MAX,
            1,
            0,
            13,
            14,
            15,
        ];
        s.dr[..4].copy_from_slice(&case.addresses);
        s.dr[7] = 0x400 | case.control;
        s.rflags = (0x202 | if case.step { TF } else { 0 }).into();
    });
    let mut run = Run {
        events: Vec::new(),
        end: String::new(),
    };
    loop {
        let arrived = flat.run().unwrap_err();
        let frame = flat.cpu.state().gpr[4];
        let (ip, stack, conditions) = (arrived.rip, flat.word(frame + 24), flat.cpu.state().dr[6] & 0x400F);
        // INT3, whose gate is not for ring 3.
        if (arrived.vector, arrived.error) == (13, Some(3 << 3 | 2)) {
            let s = flat.cpu.state();
            let stack = flat.word(frame + 32);
            let hash = flat
                .read(DATA, 0x4000)
                .iter()
                .fold(0xCBF2_9CE4_8422_2325u64, |hash, byte| {
                    (hash ^ u64::from(*byte)).wrapping_mul(0x100_0000_01B3)
                });
            run.end = "end".into();
            for value in s.gpr[..4].iter().chain([&stack]).chain(&s.gpr[5..8]).chain([&hash]) {
                let _ = write!(run.end, " {value:x}");
            }
            return run;
        }
        assert_eq!(arrived.vector, 1, "{arrived:x?}");
        run.push((ip, conditions));
        let executes = (0..4).any(|n| conditions >> n & 1 != 0 && case.control >> (16 + 4 * n) & 3 == 0);
        let (code, data) = (flat.word(frame + 8), flat.word(frame + 32));
        let flags = flat.word(frame + 16);
        flat.state(|s| {
            s.rip = ip;
            s.gpr[4] = stack;
            s.rflags = (flags | if executes { RF } else { 0 }).into();
            s.cpl = 3;
            (s.segments[CS].selector, s.segments[CS].attributes) = (code as u16, 0xA0FB);
            (s.segments[SS].selector, s.segments[SS].attributes) = (data as u16, 0xC0F3);
            s.dr[6] = 0xFFFF_0FF0;
            s.activity = engine::Activity::Running;
        });
    }
}

/// The same on the host; `None` with the reason where it does not let us.
fn on_host(cases: &[Case]) -> Result<Vec<Run>, String> {
    let mut child = Command::new(HOST_DEBUG)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut input = String::new();
    for case in cases {
        let _ = write!(input, "{} ", u8::from(case.step));
        for address in case.addresses {
            let _ = write!(input, "{address:x} ");
        }
        let bytes: String = case.code.iter().map(|byte| format!("{byte:02x}")).collect();
        let _ = writeln!(input, "{:x} {bytes}", case.control);
    }
    let mut stdin = child.stdin.take().unwrap();
    let writer = std::thread::spawn(move || stdin.write_all(input.as_bytes()));
    let output = child.wait_with_output().unwrap();
    let _ = writer.join().unwrap();
    let mut runs = Vec::new();
    let mut run = Run {
        events: Vec::new(),
        end: String::new(),
    };
    for line in String::from_utf8(output.stdout).unwrap().lines() {
        let word = |n| {
            line.split(' ')
                .nth(n)
                .map_or(0, |word| u64::from_str_radix(word, 16).unwrap())
        };
        match line.split(' ').next() {
            Some("at") => run.push((word(1), word(2))),
            Some("refused") => return Err(line.to_string()),
            _ => {
                run.end = line.to_string();
                let next = Run {
                    events: Vec::new(),
                    end: String::new(),
                };
                runs.push(std::mem::replace(&mut run, next));
            }
        }
    }
    Ok(runs)
}

// covers: dr/host
#[test]
fn breakpoints_come_as_on_the_hosts_cpu() {
    let full = guest_tests::full();
    let cases: Vec<Case> = (0..if full { 20 * CASES } else { CASES }).map(case).collect();
    if !std::fs::read_to_string("/proc/cpuinfo").is_ok_and(|text| text.contains("GenuineIntel")) {
        guest_tests::skipped(
            "breakpoints_come_as_on_the_hosts_cpu",
            "the host's CPU is none of Intel's",
        );
        return;
    }
    let host = match on_host(&cases) {
        Ok(host) => host,
        Err(why) => {
            guest_tests::skipped("breakpoints_come_as_on_the_hosts_cpu", &why);
            return;
        }
    };
    assert_eq!(host.len(), cases.len());
    let mut events = 0;
    for (seed, (case, host)) in cases.iter().zip(&host).enumerate() {
        assert!(host.end.starts_with("end"), "program {seed} on the host: {}", host.end);
        events += host.events.len();
        let ours = on_engine(case);
        // A host that is a guest itself loses bits of DR6 now and then: what it says once out of a few times counts.
        let again = (0..3)
            .filter(|_| ours != *host)
            .filter_map(|_| on_host(std::slice::from_ref(case)).ok());
        if again.flatten().any(|host| host == ours) {
            continue;
        }
        let first = ours.events.iter().zip(&host.events).take_while(|(a, b)| a == b).count();
        assert!(
            ours == *host,
            "program {seed} {:x?} DR {:x?} {:x}{}: event {first}: {:x?}, on the host {:x?}\n{}\n{}",
            case.code,
            case.addresses,
            case.control,
            if case.step { ", stepped" } else { "" },
            ours.events.get(first),
            host.events.get(first),
            ours.end,
            host.end
        );
    }
    assert!(events > cases.len(), "{events} events");
}
