//! The order of changes of code and packets in a recording: code is replaced in front of any instruction of programs that have
//! every instruction a packet tells of, and what the trace says is what ran, with the bytes that it had then.

use std::path::Path;
use std::sync::{Arc, Mutex};

use guest_tests::flat::{self, CODE};
use guest_tests::raw::Raw;
use guest_tests::{Folder, flat::whole_of};
use iced_x86::code_asm::*;
use iced_x86::{Decoder, DecoderOptions, IcedError};
use minivmm::recording::{Filter, RecordingOptions};
use minivmm::{Console, End, Run, StopReason};
use pt_flow::{Block, Event, EventKind, Visitor};
use pt_oracle::libipt;
use trace::{Decode, Start, State, Trace, raw};
use x86::watch::{Effects, Interest, Processor, Watch};

/// An instruction that was executed: its address and address space, and bytes from there on.
type Ran = (u64, u64, Vec<u8>);

/// Takes down every instruction that retires.
struct Log {
    wanted: Wanted,
    ran: Arc<Mutex<Vec<Ran>>>,
    /// The one that is about to run, and how many have retired.
    next: Option<(u64, Ran)>,
}

impl Watch for Log {
    fn interest(&mut self, _: &mut dyn Processor) -> Interest {
        Interest {
            every_instruction: true,
            ..Interest::NOTHING
        }
    }

    fn before(&mut self, address: u64, cpu: &mut dyn Processor) -> Effects {
        let now = cpu.retired();
        if let Some((number, ran)) = self.next.take()
            && number != now
        {
            self.ran.lock().expect("nobody panicked with it").push(ran);
        }
        let mut bytes = vec![0; 15];
        cpu.read_linear(address, &mut bytes).expect("code is mapped");
        // Of INT n a decoder sees the event alone.
        if (self.wanted)(cpu, address) && bytes[0] != 0xcd {
            self.next = Some((now, (address, cpu.context().cr3, bytes)));
        }
        Effects::NONE
    }
}

/// Takes down every instruction that the decoder finds.
struct Found {
    state: State,
    ran: Vec<Ran>,
    gaps: Vec<Event>,
}

impl Visitor for Found {
    const CODE: bool = true;

    fn block(&mut self, _: &Block) {}
    fn code(&mut self, block: &Block, bytes: &[u8]) {
        let space = self.state.cr3.expect("every PSB is followed by a PIP");
        let mut decoder = Decoder::with_ip(block.mode.bits(), bytes, block.ip, DecoderOptions::NONE);
        while decoder.can_decode() {
            let at = decoder.position();
            let len = decoder.decode().len();
            self.ran
                .push((block.ip + at as u64, space, bytes[at..at + len].to_vec()));
        }
    }
    fn event(&mut self, event: &Event) {
        self.state.event(event);
        if matches!(event.kind, EventKind::Gap(_)) {
            self.gaps.push(*event);
        }
    }
}

/// Whether an instruction is to be recorded.
type Wanted = Arc<dyn Fn(&dyn Processor, u64) -> bool + Send + Sync>;

/// All are.
fn all() -> Wanted {
    Arc::new(|_, _| true)
}

/// A machine about to run, whoever watches it.
type Make<'a> = &'a dyn Fn() -> (Run, Console);

/// What replaces code: places and bytes.
type Patches = Vec<(u64, Vec<u8>)>;

/// Where code is replaced, in which way, and by what: at these steps, in turns by the one and the other.
struct Plan<'a> {
    make: Make<'a>,
    /// The step from which on it is recorded.
    from: u64,
    at: &'a [u64],
    patches: &'a [Patches; 2],
}

impl Plan<'_> {
    /// Runs to the end; gives the number of steps.
    fn run(&self, prepare: impl FnOnce(&mut Run)) -> u64 {
        let (mut vm, mut console) = (self.make)();
        if self.from > 0 {
            assert!(vm.run_for(&mut console, self.from).expect("a run").is_none());
        }
        prepare(&mut vm);
        for (&step, patches) in self.at.iter().zip(self.patches.iter().cycle()) {
            if let Some(rest) = step.checked_sub(vm.steps()).filter(|rest| *rest > 0) {
                let end = vm.run_for(&mut console, rest).expect("a run");
                assert!(end.is_none(), "{end:?} before step {step}");
            }
            for (gpa, bytes) in patches {
                vm.write_physical(*gpa, bytes).expect("RAM");
            }
        }
        let end = vm.run(&mut console).expect("a run");
        assert!(matches!(end, StopReason::Ended(End::DebugExit(1))), "{end:?}");
        vm.end_trace("the test").expect("the trace is written");
        vm.steps()
    }

    /// What retires on each CPU.
    fn retired(&self, wanted: &Wanted) -> Vec<Vec<Ran>> {
        let mut logs = Vec::new();
        self.run(|vm| {
            for cpu in 0..vm.cpu_count() {
                let ran = Arc::<Mutex<Vec<Ran>>>::default();
                logs.push(ran.clone());
                let (wanted, next) = (wanted.clone(), None);
                vm.machine().observe(cpu, Some(Box::new(Log { wanted, ran, next })));
            }
        });
        let take = |log: &Arc<Mutex<Vec<Ran>>>| std::mem::take(&mut *log.lock().expect("nobody panicked with it"));
        logs.iter().map(take).collect()
    }

    /// What is recorded is what retires, for our decoder and, where nothing is left out, for libipt.
    fn check(&self, folder: &Folder, filters: &[Filter], wanted: &Wanted) {
        let at = folder.join("trace");
        let what = format!("{filters:?} from step {}, code replaced at {:?}", self.from, self.at);
        self.run(|vm| {
            let options = RecordingOptions {
                filters: filters.to_vec(),
                force: true,
                ..RecordingOptions::new(&at)
            };
            vm.begin_trace(&options).expect("a recording");
        });
        let trace = Trace::open(&at).expect("a trace");
        for (cpu, ran) in self.retired(wanted).iter().enumerate() {
            let mut found = Vec::new();
            let make = |start: &Start| Found {
                state: State::new(start),
                ran: Vec::new(),
                gaps: Vec::new(),
            };
            let summary = trace.decode(cpu, &Decode::default(), make, |part, _| {
                assert_eq!(part.gaps, [], "{what}: vCPU {cpu}");
                found.extend(part.ran);
            });
            let summary = summary.expect("the trace is read");
            assert_eq!((summary.lost, &summary.damage[..]), (0, &[][..]), "{what}");
            let least = if self.from == 0 { 20 } else { 0 };
            same(&format!("{what}: vCPU {cpu}"), &found, ran, least);
            if filters.is_empty() {
                let raw = folder.join("raw");
                raw::export(&trace, &raw, &mut |_, _| {}).expect("raw files");
                let theirs = by_libipt(&raw, cpu);
                std::fs::remove_dir_all(&raw).expect("it is there");
                let ours: Vec<u64> = found.iter().map(|(ip, ..)| *ip).collect();
                let same = theirs.iter().zip(&ours).take_while(|(a, b)| a == b).count();
                assert!(
                    same == theirs.len() && same + 8 > ours.len(),
                    "{what}: vCPU {cpu}: libipt differs at {same} of {}: {:x?}, {:x?}",
                    ours.len(),
                    theirs.get(same),
                    ours.get(same)
                );
            }
        }
    }
}

/// Two lists of instructions, of which one may lack the last; there are more than so many.
fn same(what: &str, found: &[Ran], ran: &[Ran], least: usize) {
    for (number, (found, ran)) in found.iter().zip(ran).enumerate() {
        let equal = (found.0, found.1 & !0x1f) == (ran.0, ran.1 & !0x1f) && ran.2.starts_with(&found.2);
        assert!(equal, "{what}: instruction {number} is {ran:x?}, found {found:x?}");
    }
    let (found, ran) = (found.len(), ran.len());
    let count = found.min(ran);
    assert!(
        count >= least && found.abs_diff(ran) < 8,
        "{what}: {found} and {ran} instructions"
    );
}

/// The addresses that libipt finds.
fn by_libipt(folder: &Path, cpu: usize) -> Vec<u64> {
    let raw = Raw::read(folder, cpu);
    let mut image = libipt::Image::new([]);
    let mut ips = Vec::new();
    for span in &raw.spans {
        for &(space, address, page) in &span.pages {
            image.add_file(&raw.pages, page * 4096, 4096, address, space);
        }
        let found = libipt::instructions(&raw.packets[span.begin..span.end], &image, |ip| ips.push(ip));
        if let Err(error) = found {
            panic!("{error} in the span from {:#x} to {:#x}", span.begin, span.end);
        }
    }
    ips
}

/// NOPs in front of each instruction of a program, as it is assembled and as it is replaced; and the same in the copy that another
/// address space has. At each of their instructions the one can become the other.
const NOPS: [[u8; 4]; 2] = [[0x90, 0x90, 0x90, 0x90], [0x66, 0x66, 0x66, 0x90]];
const COPY: [[u8; 4]; 2] = [[0x66, 0x90, 0x66, 0x90], [0x90, 0x66, 0x66, 0x90]];

/// NOPs, and what follows them is the caller's to write.
fn nops(a: &mut CodeAssembler) -> Result<&mut CodeAssembler, IcedError> {
    a.db(&NOPS[0])?;
    Ok(a)
}

/// Where the NOPs of a code are.
fn places(code: &[u8]) -> Vec<usize> {
    let mut found: Vec<usize> = Vec::new();
    for (at, four) in code.windows(4).enumerate() {
        if four == NOPS[0] && found.last().is_none_or(|last| last + 4 <= at) {
            found.push(at);
        }
    }
    found
}

/// A copy of the code with other NOPs.
fn with(code: &[u8], places: &[usize], nops: [u8; 4]) -> Vec<u8> {
    let mut code = code.to_vec();
    for at in places {
        code[*at..at + 4].copy_from_slice(&nops);
    }
    code
}

/// Page tables of two address spaces; the second has a copy of the code at the code's addresses.
const CR3: [u64; 2] = [0x7000, 0xb000];
/// Where the copy is.
const COPY_AT: u64 = 0x60_0000;
/// At most so many bytes of code.
const LEN: u64 = 0x4000;
/// Descriptors, with code of 32 bits beside what is there.
const GDT: u64 = flat::DATA;
const IDT: u64 = 0x4000;
const DESCRIPTORS: [u64; 6] = [
    0,
    0x00AF_9B00_0000_FFFF,
    0x00CF_9300_0000_FFFF,
    0x00CF_F300_0000_FFFF,
    0x00AF_FB00_0000_FFFF,
    0x00CF_9B00_0000_FFFF,
];

/// MOV to CR3 of the address space whose turn it is.
fn turn(a: &mut CodeAssembler) -> Result<(), IcedError> {
    nops(a)?.mov(cr3, rbx)?;
    nops(a)?.xchg(rbx, rbp)
}

/// An interrupt for this CPU itself, by the x2APIC.
fn interrupt(a: &mut CodeAssembler) -> Result<(), IcedError> {
    flat::wrmsr(a, 0x83f, 0x40)
}

/// A program of ring 0 and 3, of 64-bit and 32-bit code, which first goes through so many rounds of a loop.
fn everything(a: &mut CodeAssembler, rounds: u32) -> Result<(), IcedError> {
    let vectors = [6u64, 0x40, 0x80, 0x81];
    let mut handlers = vectors.map(|_| a.create_label());
    let [mut call, mut system, mut body, mut last] = [0; 4].map(|_| a.create_label());
    for (vector, handler) in vectors.iter().zip(&handlers) {
        let gate = IDT + vector * 16;
        a.lea(rax, ptr(*handler))?;
        a.mov(word_ptr(gate), ax)?;
        a.shr(rax, 16)?;
        a.mov(word_ptr(gate + 6), ax)?;
        // For ring 3, too.
        a.mov(byte_ptr(gate + 5), 0xee)?;
    }
    a.mov(word_ptr(GDT + 0x100), DESCRIPTORS.len() as u32 * 8 - 1)?;
    a.mov(dword_ptr(GDT + 0x102), GDT as u32)?;
    for (at, descriptor) in (GDT..).step_by(8).zip(DESCRIPTORS) {
        a.mov(rax, descriptor)?;
        a.mov(qword_ptr(at), rax)?;
    }
    a.lgdt(ptr(GDT + 0x100))?;
    // The APIC in x2APIC mode, enabled; SYSCALL.
    flat::wrmsr(a, 0x1b, 0xfee0_0d00)?;
    flat::wrmsr(a, 0x80f, 0x1ff)?;
    flat::wrmsr(a, 0xc000_0080, 0xd01)?;
    flat::wrmsr(a, 0xc000_0081, 0x13_0008 << 32)?;
    a.lea(rax, ptr(system))?;
    a.mov(ecx, 0xc000_0082u32)?;
    a.xor(edx, edx)?;
    a.wrmsr()?;
    a.mov(ebx, CR3[1] as u32)?;
    a.mov(ebp, CR3[0] as u32)?;
    a.mov(r15d, 2)?;
    if rounds > 0 {
        let mut again = a.create_label();
        a.mov(ecx, rounds)?;
        a.set_label(&mut again)?;
        a.loop_(again)?;
    }

    a.set_label(&mut body)?;
    turn(a)?;
    nops(a)?.nop()?;
    turn(a)?;
    turn(a)?;
    let mut behind = a.create_label();
    nops(a)?.cmp(eax, eax)?;
    nops(a)?.je(behind)?;
    a.nop()?;
    a.set_label(&mut behind)?;
    turn(a)?;
    nops(a)?.call(call)?;
    let mut there = a.create_label();
    nops(a)?.lea(rax, ptr(there))?;
    nops(a)?.jmp(rax)?;
    a.set_label(&mut there)?;
    nops(a)?.ptwrite(eax)?;
    turn(a)?;
    let mut fallback = a.create_label();
    nops(a)?.xbegin(fallback)?;
    nops(a)?.cmp(eax, eax)?;
    nops(a)?.xend()?;
    a.set_label(&mut fallback)?;
    turn(a)?;
    nops(a)?.int(0x80)?;
    nops(a)?.ud2()?;
    interrupt(a)?;
    turn(a)?;
    nops(a)?.sti()?;
    nops(a)?.cli()?;
    interrupt(a)?;
    nops(a)?.sti()?;
    a.hlt()?;
    turn(a)?;
    nops(a)?.cli()?;
    nops(a)?.mov(rax, cr0)?;
    nops(a)?.xor(eax, 8)?;
    nops(a)?.mov(cr0, rax)?;
    turn(a)?;
    nops(a)?.rdtsc()?;
    nops(a)?.mov(ecx, 0x10)?;
    nops(a)?.wrmsr()?;
    turn(a)?;
    nops(a)?.mov(r8, rbx)?;
    nops(a)?.cpuid()?;
    nops(a)?.mov(rbx, r8)?;
    nops(a)?.in_(al, 0x80)?;
    turn(a)?;
    nops(a)?.mov(esi, flat::DATA as u32 + 0x800)?;
    nops(a)?.mov(edi, flat::DATA as u32 + 0x900)?;
    nops(a)?.mov(ecx, 5)?;
    nops(a)?.rep().movsb()?;
    turn(a)?;

    // 32-bit code.
    let [mut narrow, mut wide] = [0; 2].map(|_| a.create_label());
    nops(a)?.lea(rsi, ptr(wide))?;
    nops(a)?.push(0x28)?;
    nops(a)?.lea(rax, ptr(narrow))?;
    nops(a)?.push(rax)?;
    nops(a)?.db(&[0x48, 0xcb])?;
    a.set_label(&mut narrow)?;
    for code in [
        // MOV CR3, EBX; XCHG EBX, EBP; CMP EAX, EAX; JE behind it; PUSH 8; PUSH ESI; RETF.
        &[0x0f, 0x22, 0xdb][..],
        &[0x87, 0xdd],
        &[0x39, 0xc0],
        &[0x74, 0x00],
        &[0x6a, 0x08],
        &[0x56],
        &[0xcb],
    ] {
        nops(a)?.db(code)?;
    }
    a.set_label(&mut wide)?;
    turn(a)?;

    // Ring 3.
    let mut user = a.create_label();
    for value in [0x1b, 0x2_8000, 0x202, 0x23] {
        nops(a)?.push(value)?;
    }
    nops(a)?.lea(rax, ptr(user))?;
    nops(a)?.push(rax)?;
    nops(a)?.iretq()?;
    a.set_label(&mut user)?;
    let mut behind = a.create_label();
    nops(a)?.cmp(eax, eax)?;
    nops(a)?.je(behind)?;
    a.nop()?;
    a.set_label(&mut behind)?;
    nops(a)?.syscall()?;
    nops(a)?.int(0x80)?;
    nops(a)?.ud2()?;
    nops(a)?.int(0x81)?;
    a.ud2()?;

    // From the last handler, in ring 0 again.
    a.set_label(&mut last)?;
    nops(a)?.dec(r15d)?;
    nops(a)?.jnz(body)?;
    a.mov(al, 1)?;
    a.out(0xf4, al)?;
    a.hlt()?;

    a.set_label(&mut call)?;
    turn(a)?;
    nops(a)?.ret()?;
    a.set_label(&mut system)?;
    turn(a)?;
    nops(a)?.sysretq()?;
    // #UD: on behind it.
    a.set_label(&mut handlers[0])?;
    turn(a)?;
    nops(a)?.add(qword_ptr(rsp), 2)?;
    nops(a)?.iretq()?;
    a.set_label(&mut handlers[1])?;
    flat::wrmsr(a, 0x80b, 0)?;
    turn(a)?;
    nops(a)?.iretq()?;
    a.set_label(&mut handlers[2])?;
    turn(a)?;
    nops(a)?.iretq()?;
    a.set_label(&mut handlers[3])?;
    nops(a)?.add(rsp, 40)?;
    // An interrupt from ring 3 has left none, which 32-bit code needs.
    nops(a)?.mov(eax, 0x10)?;
    nops(a)?.mov(ss, eax)?;
    nops(a)?.mov(ds, eax)?;
    turn(a)?;
    nops(a)?.jmp(last)
}

/// The program with its two address spaces.
fn machine(rounds: u32) -> (Run, Console) {
    let model = minivmm::model::find("sapphirerapids,+rtm,-smap").expect("a model");
    let config = flat::config(model);
    let (mut vm, console) = whole_of(&config, 0, &[], |a| everything(a, rounds));
    let mut put = |at: u64, value: u64| vm.write_physical(at, &value.to_le_bytes()).expect("RAM");
    let [pml4, pdpt, directory, table] = [0, 1, 2, 3].map(|page| CR3[1] + page * 0x1000);
    put(pml4, pdpt | 7);
    put(pdpt, directory | 7);
    put(directory, table | 7);
    for page in 1..512 {
        put(directory + page * 8, page << 21 | 0x87);
    }
    for page in (0..512u64).map(|page| page << 12) {
        let copied = (CODE..CODE + LEN).contains(&page);
        let leads = if copied { page - CODE + COPY_AT } else { page };
        put(table + (page >> 9), leads | 7);
    }
    let (code, places) = assembled(&vm);
    vm.write_physical(COPY_AT, &with(&code, &places, COPY[0])).expect("RAM");
    (vm, console)
}

/// The code as it is, and its NOPs.
fn assembled(vm: &Run) -> (Vec<u8>, Vec<usize>) {
    let mut code = vec![0; LEN as usize];
    vm.read_physical(CODE, &mut code).expect("RAM");
    assert_eq!(code[LEN as usize - 1], 0, "the program is longer");
    let places = places(&code);
    (code, places)
}

/// What replaces the program's NOPs, and what replaces that again.
fn versions(make: Make) -> [Patches; 2] {
    let (code, places) = assembled(&make().0);
    assert!(places.len() > 100, "{}", places.len());
    [1, 0].map(|number| {
        let [own, copy] = [NOPS, COPY].map(|nops| with(&code, &places, nops[number]));
        vec![(CODE, own), (COPY_AT, copy)]
    })
}

/// Steps that the program makes when nothing is replaced.
fn steps(make: Make) -> u64 {
    let patches = &[vec![], vec![]];
    let (from, at) = (0, &[]);
    Plan {
        make,
        from,
        at,
        patches,
    }
    .run(|_| {})
}

/// Runs of the program in each of which code is replaced at one of these steps, and back again soon.
fn at_each(name: &str, rounds: u32, steps: impl Iterator<Item = u64>, filters: &[Filter], wanted: &Wanted) {
    let folder = Folder::new(name);
    let make: Make = &|| machine(rounds);
    let patches = &versions(make);
    for step in steps {
        let (from, at) = (0, &[step, step + 1, step + 3]);
        Plan {
            make,
            from,
            at,
            patches,
        }
        .check(&folder, filters, wanted);
        if guest_tests::full() {
            let at = &[step];
            Plan {
                make,
                from,
                at,
                patches,
            }
            .check(&folder, filters, wanted);
        }
    }
}

// covers: trace/order
#[test]
fn code_replaced_before_any_instruction_is_what_ran() {
    let steps = steps(&|| machine(0));
    // Code that comes by again has been decoded before.
    let first = if guest_tests::full() { steps } else { steps / 2 + 20 };
    at_each("order", 0, 0..first.min(steps - 4), &[], &all());
}

/// An MTC packet comes every 32768 steps.
// covers: trace/order
#[test]
fn code_replaced_beside_a_packet_of_time_is_what_ran() {
    const MTC: u64 = 1 << 15;
    let rounds = MTC as u32 - 300;
    at_each("order-mtc", rounds, MTC - 20..MTC + 40, &[], &all());
}

// covers: trace/order, trace/filters
#[test]
fn code_replaced_where_little_is_recorded_is_what_ran() {
    let make: Make = &|| machine(0);
    let steps = steps(make);
    // Every ninth step in the short form, at another place in each of them.
    let each = if guest_tests::full() { 1 } else { 9 };
    let run = |name, first: u64, filters: &[Filter], wanted: Wanted| {
        at_each(name, 0, (first..steps - 4).step_by(each), filters, &wanted);
    };
    let kernel = Arc::new(|cpu: &dyn Processor, _| cpu.context().cpl == 0);
    run("order-kernel", 0, &[Filter::Kernel], kernel);
    let user = Arc::new(|cpu: &dyn Processor, _| cpu.context().cpl == 3);
    run("order-user", 2, &[Filter::User], user);
    let other = Arc::new(|cpu: &dyn Processor, _| cpu.context().cr3 == CR3[1]);
    run("order-cr3", 4, &[Filter::Cr3(CR3[1])], other);
    // Each of these ranges begins at one of the program's instructions and ends in front of another, right behind a MOV to CR3.
    let (code, places) = assembled(&make().0);
    let behind = |place: &usize| code[place + 4..].starts_with(&[0x0f, 0x22, 0xdb]).then_some(place + 7);
    let ends: Vec<u64> = places.iter().filter_map(behind).map(|at| CODE + at as u64).collect();
    let ranges = [(CODE + places[3] as u64, ends[4] - 1), (ends[8], ends[14] - 1)];
    let filters = ranges.map(|(first, last)| Filter::Ip(first, last));
    let within =
        Arc::new(move |_: &dyn Processor, ip| ranges.iter().any(|(first, last)| (*first..=*last).contains(&ip)));
    run("order-ip", 6, &filters, within);
}

/// Where the second CPU starts, and a routine in the same page that the first one calls.
const START: u64 = 0x1_8000;
const ROUTINE: u64 = START + 0x800;
/// What the second one counts in.
const COUNTER: u64 = 0xf00;

/// Starts the second CPU twice by INIT and start-up IPI, and calls the routine in between, so that it is the first CPU that finds the
/// second one's code replaced.
fn starting(a: &mut CodeAssembler) -> Result<(), IcedError> {
    fn send(a: &mut CodeAssembler, icr: u64) -> Result<(), IcedError> {
        nops(a)?.mov(ecx, 0x830)?;
        a.mov(eax, icr as u32)?;
        a.mov(edx, 1)?;
        nops(a)?.wrmsr()
    }
    fn call(a: &mut CodeAssembler) -> Result<(), IcedError> {
        nops(a)?.mov(eax, ROUTINE as u32)?;
        nops(a)?.call(rax)
    }
    // SDM Vol. 3A 11.6.1 "Interrupt Command Register (ICR)": INIT, and start-up at START.
    let (init, start) = (0x4500, 0x4600 | START >> 12);
    flat::wrmsr(a, 0x1b, 0xfee0_0d00)?;
    a.mov(r15d, 2)?;
    let mut again = a.create_label();
    a.set_label(&mut again)?;
    call(a)?;
    send(a, init)?;
    call(a)?;
    send(a, start)?;
    call(a)?;
    send(a, start)?;
    let mut wait = a.create_label();
    a.set_label(&mut wait)?;
    a.cmp(word_ptr(COUNTER), 100)?;
    a.jb(wait)?;
    a.mov(word_ptr(COUNTER), 0)?;
    call(a)?;
    nops(a)?.dec(r15d)?;
    nops(a)?.jnz(again)?;
    call(a)?;
    a.mov(al, 1)?;
    a.out(0xf4, al)?;
    a.hlt()
}

/// Two CPUs with that program.
fn two() -> (Run, Console) {
    let model = minivmm::model::find("westmere").expect("a model");
    let config = minivmm::MachineConfig {
        cpus: 2,
        ..flat::config(model)
    };
    let (mut vm, console) = whole_of(&config, 0, &[], starting);
    // In real mode; INC of a word, and JNZ back.
    let mut code = NOPS[0].to_vec();
    code.extend([0xff, 0x06]);
    code.extend((COUNTER as u16).to_le_bytes());
    code.extend(NOPS[0]);
    code.extend([0x75, 0u8.wrapping_sub(14)]);
    // JMP back.
    code.extend([0xeb, 0u8.wrapping_sub(16)]);
    vm.write_physical(START, &code).expect("RAM");
    // RET.
    vm.write_physical(ROUTINE, &[&NOPS[0][..], &[0xc3]].concat())
        .expect("RAM");
    (vm, console)
}

// covers: trace/order, trace/init
#[test]
fn code_replaced_while_a_cpu_waits_to_be_started_is_what_ran() {
    let make: Make = &two;
    let (from, none) = (0, [vec![], vec![]]);
    // What each CPU does at which step, but for the first one's waiting.
    let moments = Arc::<Mutex<Vec<u64>>>::default();
    let plan = Plan {
        make,
        from,
        at: &[],
        patches: &none,
    };
    let wait = {
        let (code, _) = assembled(&make().0);
        // CMP of a word in memory and an immediate.
        let at = code.windows(3).position(|code| code == [0x66, 0x83, 0x3c]);
        let at = CODE + at.expect("it is there") as u64;
        at..at + 12
    };
    let taken = moments.clone();
    plan.retired(
        &(Arc::new(move |cpu: &dyn Processor, ip| {
            let mut moments = taken.lock().expect("nobody panicked with it");
            let own = (CODE..CODE + LEN).contains(&ip) && !wait.contains(&ip);
            // Of the second CPU, where it begins.
            if own
                || ip == ROUTINE
                || ip >> 12 == START >> 12 && moments.last().is_some_and(|last| cpu.step() > last + 100)
            {
                moments.push(cpu.step());
            }
            true
        }) as Wanted),
    );
    let moments = moments.lock().expect("nobody panicked with it").clone();
    let each = if guest_tests::full() { 1 } else { 17 };
    let (code, places) = assembled(&make().0);
    let page = {
        let mut page = vec![0; 4096];
        make().0.read_physical(START, &mut page).expect("RAM");
        page
    };
    let routine = self::places(&page);
    assert_eq!(routine.len(), 3);
    let patches = [1, 0].map(|number| {
        let mut patches = vec![(CODE, with(&code, &places, NOPS[number]))];
        // Without the counter.
        patches.extend(routine.iter().map(|at| (START + *at as u64, NOPS[number].to_vec())));
        patches
    });
    let folder = Folder::new("order-init");
    // Before the guest ends, which other code puts off or brings forward by some steps.
    let end = plan.run(|_| ()) - 100;
    for &moment in moments.iter().filter(|moment| **moment < end).step_by(each) {
        let (patches, at) = (&patches, &[moment, moment + 2, moment + 9]);
        Plan {
            make,
            from,
            at,
            patches,
        }
        .check(&folder, &[], &all());
        // Recorded from there on, too.
        let from = moment;
        Plan {
            make,
            from,
            at,
            patches,
        }
        .check(&folder, &[], &all());
    }
}
