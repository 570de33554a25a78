use super::*;
use x86::model::{MODELS, P6, SAPPHIRERAPIDS, WESTMERE};

impl Registers {
    fn number(&self, name: &str) -> usize {
        self.list.iter().position(|register| register.name == name).unwrap()
    }

    /// Writes one by its name.
    fn put(&self, state: &mut CpuState, memory: &Memory, name: &str, value: u64) -> Result<(), Refused> {
        let number = self.number(name);
        let bytes = &value.to_le_bytes()[..self.list[number].bits / 8];
        self.write(state, memory, number, bytes)
    }
}

// covers: gdb/registers
#[test]
fn registers_are_read_and_written_by_number() {
    let all = Registers::of(&SAPPHIRERAPIDS);
    let memory = Memory::new(2 << 20).unwrap();
    let number = |name: &str| all.number(name);
    // gdb's own numbers.
    for (name, expected) in [
        ("rax", 0),
        ("rsp", 7),
        ("r15", 15),
        ("rip", 16),
        ("eflags", 17),
        ("cs", 18),
        ("st0", 24),
    ] {
        assert_eq!(number(name), expected, "{name}");
    }
    let mut state = CpuState::reset(&SAPPHIRERAPIDS);
    for (name, bytes) in [
        ("rbx", vec![1, 2, 3, 4, 5, 6, 7, 8]),
        ("rip", vec![0xf0, 0xff, 0, 0, 0, 0, 0, 0]),
        ("st3", vec![0, 0, 0, 0, 0, 0, 0, 0x80, 0xff, 0x3f]),
        ("xmm15", (0..16).collect()),
        ("ymm1h", (16..32).collect()),
        ("k3", vec![7, 6, 5, 4, 3, 2, 1, 0]),
        ("xmm17", (32..48).collect()),
        ("ymm31h", (48..64).collect()),
        ("zmm2h", (64..96).collect()),
        ("zmm20h", (96..128).collect()),
        ("fs_base", vec![0, 0, 0, 0, 0, 0x80, 0xff, 0xff]),
        ("cr2", vec![9; 8]),
    ] {
        assert_eq!(all.write(&mut state, &memory, number(name), &bytes), Ok(()), "{name}");
        assert_eq!(all.read(&state, number(name)), Some(bytes), "{name}");
    }
    assert_eq!((state.gpr[3], state.fpu.ymm_hi[1] as u8), (0x0807_0605_0403_0201, 16));
    let before = state.clone();
    for (name, bytes) in [
        ("cr0", vec![0xff; 8]),
        ("cs", vec![8, 0, 1, 0]),
        ("cs_base", vec![8; 8]),
        ("rax", vec![1]),
        ("mxcsr", vec![0xff; 4]),
        ("gs_base", vec![0, 0, 0, 0, 0, 0, 0, 0x40]),
        ("cpl", vec![3]),
    ] {
        assert_eq!(
            all.write(&mut state, &memory, number(name), &bytes),
            Err(Refused),
            "{name}"
        );
    }
    assert_eq!(all.write(&mut state, &memory, 10_000, &[]), Err(Refused));
    assert_eq!((all.read(&state, 10_000), state.clone()), (None, before));
    // RFLAGS keeps what no user may set.
    all.write(&mut state, &memory, number("eflags"), &[0xff; 4]).unwrap();
    assert_eq!(state.rflags.into_bits(), FLAGS | 2);
}

// covers: gdb/avx512
#[test]
fn avx512_is_described_where_the_model_has_it() {
    for model in MODELS {
        let description = Registers::of(model).description().to_owned();
        let described = description.contains("org.gnu.gdb.i386.avx512");
        assert_eq!(described, model.features().avx512f(), "{}", model.name);
    }
    // gdb's own order: Debugging with GDB, G.5.6 "i386 Features".
    let all = Registers::of(&SAPPHIRERAPIDS);
    let first = all.number("xmm16");
    for (name, behind) in [("xmm31", 15), ("ymm16h", 16), ("k0", 32), ("zmm0h", 40), ("zmm31h", 71)] {
        assert_eq!(all.number(name), first + behind, "{name}");
    }
}

// covers: gdb/registers
#[test]
fn all_registers_go_out_and_come_back() {
    let memory = Memory::new(2 << 20).unwrap();
    for model in MODELS {
        let all = Registers::of(model);
        let mut state = CpuState::reset(model);
        let bytes = all.all(&state);
        let mut changed = bytes.clone();
        changed[0] = 0x55;
        all.set_all(&mut state, &memory, &changed).unwrap();
        assert_eq!((state.gpr[0], all.all(&state)), (0x55, changed), "{}", model.name);
        assert_eq!(all.set_all(&mut state, &memory, &bytes[1..]), Err(Refused));
        // One that is refused: nothing is changed.
        let before = state.clone();
        let mut bad = bytes.clone();
        *bad.last_mut().unwrap() = 3;
        assert_eq!((all.set_all(&mut state, &memory, &bad), state), (Err(Refused), before));
        let xml = all.description();
        assert_eq!(xml.matches("<reg ").count(), all.count());
        assert_eq!(xml.contains("org.gnu.gdb.i386.avx"), model.features().avx());
    }
    assert!(Registers::of(&P6).description().contains("<architecture>i386<"));
    assert!(
        Registers::of(&WESTMERE)
            .description()
            .contains("<architecture>i386:x86-64<")
    );
}

/// Code and data for 64 bits, for 32, for CPL 3, a TSS, code that is not present, and data that cannot be written.
const TABLE: [u64; 9] = [
    0,
    0x00af_9b00_0000_ffff,
    0x00cf_9300_0000_ffff,
    0x00cf_9b00_0000_ffff,
    0x00af_fb00_0000_ffff,
    0x00cf_f300_0000_ffff,
    0x0000_8900_0000_0067,
    0x00af_1b00_0000_ffff,
    0x12cf_9134_5678_ffff,
];

// covers: gdb/control-registers
#[test]
fn selectors_are_loaded_from_the_tables_or_refused() {
    let all = Registers::of(&SAPPHIRERAPIDS);
    let memory = Memory::new(2 << 20).unwrap();
    let mut state = CpuState::reset(&SAPPHIRERAPIDS);
    // Real mode: no table at all.
    all.put(&mut state, &memory, "ds", 0x1234).unwrap();
    assert_eq!((state.segments[DS].base, state.segments[DS].limit), (0x12340, 0xffff));
    for (entry, at) in TABLE.iter().zip((0x1000..).step_by(8)) {
        memory.write(at, &entry.to_le_bytes()).unwrap();
    }
    (state.gdtr.base, state.gdtr.limit) = (0x1000, 0x47);
    state.rip = 0x8000;
    all.put(&mut state, &memory, "cr0", 0x11).unwrap();
    for (name, selector, holds) in [
        ("cs", 0x18, true),
        ("ss", 0x10, true),
        ("ds", 0x40, true),
        ("es", 0x18, true),
        ("fs", 0x10, true),
        ("fs", 0, true),
        ("gs", 0x2b, true),
        ("cs", 0, false),
        ("cs", 0x10, false),
        ("cs", 0x20, false),
        ("cs", 0x1b, false),
        ("cs", 0x38, false),
        ("ss", 0, false),
        ("ss", 0x2b, false),
        ("ss", 0x40, false),
        ("ds", 0x30, false),
        ("ds", 0x48, false),
        ("ds", 0x14, false),
        ("ds", 0x43, false),
    ] {
        let before = state.clone();
        let put = all.put(&mut state, &memory, name, selector);
        assert_eq!(put.is_ok(), holds, "{name} {selector:#x}");
        assert!(holds || state == before, "{name} {selector:#x}");
    }
    let ds = state.segments[DS];
    assert_eq!((ds.selector, ds.base, ds.limit), (0x40, 0x1234_5678, u32::MAX));
    assert!(state.segments[CS].big() && state.segments[CS].selector == 0x18);
    assert!(!state.segments[FS].present());
    let mut entry = [0; 8];
    memory.read(0x1040, &mut entry).unwrap();
    assert_eq!(u64::from_le_bytes(entry), TABLE[8], "not so much as an accessed bit");
    // A table that is not there, and one that wraps.
    for base in [0xffff_f000, u64::MAX - 8] {
        state.gdtr.base = base;
        assert_eq!(all.put(&mut state, &memory, "es", 0x10), Err(Refused));
    }
}

// covers: gdb/control-registers
#[test]
fn control_registers_take_what_the_guest_could_put_there() {
    let all = Registers::of(&SAPPHIRERAPIDS);
    let memory = Memory::new(2 << 20).unwrap();
    let mut state = CpuState::reset(&SAPPHIRERAPIDS);
    // Into IA-32e mode, in the order that the manual asks for.
    for (name, value, holds, reads) in [
        ("cr0", 0x8000_0000, false, 0x6000_0010),
        ("cr0", 0x2000_0011, false, 0x6000_0010),
        ("cr0", 1 << 32, false, 0x6000_0010),
        ("cr0", 1, true, 0x11),
        ("cr4", 1 << 63, false, 0),
        ("cr4", 0x20, true, 0x20),
        ("cr3", 1 << 62, false, 0),
        ("cr3", 0x5000, true, 0x5000),
        ("efer", 1 << 1, false, 0),
        ("efer", 0x100, true, 0x100),
        ("cr0", 0x8000_0011, true, 0x8000_0011),
        ("efer", 0, false, 0x500),
        ("efer", 0x900, true, 0xd00),
        ("cr4", 0, false, 0x20),
        ("xcr0", 3, false, 1),
        ("cr4", 0x4_0020, true, 0x4_0020),
        ("xcr0", 4, false, 1),
        ("xcr0", 5, false, 1),
        ("xcr0", 1 << 62 | 1, false, 1),
        ("xcr0", 7, true, 7),
        ("dr7", 0xffff_ffff_ffff, false, 0x400),
        ("dr7", 1, true, 0x401),
        ("dr6", 0, true, 0xfffe_0ff0),
        ("cr0", 0x11, true, 0x11),
    ] {
        let put = all.put(&mut state, &memory, name, value);
        assert_eq!(put.is_ok(), holds, "{name} {value:#x}");
        let number = all.number(name);
        let mut bytes = all.read(&state, number).unwrap();
        bytes.resize(8, 0);
        let now = u64::from_le_bytes(bytes.try_into().unwrap());
        if name != "dr6" {
            assert_eq!(now, reads, "{name} {value:#x}");
        }
    }
    assert_eq!(state.efer.into_bits(), 0x900, "no longer active");
    // PAE paging reads its first table.
    (state.efer, state.cr3) = (0.into(), 0x6000);
    memory.write(0x6008, &[0xff; 8]).unwrap();
    assert_eq!(all.put(&mut state, &memory, "cr0", 0x8000_0011), Err(Refused));
    state.cr3 = 0x7000;
    assert_eq!(all.put(&mut state, &memory, "cr0", 0x8000_0011), Ok(()));
    assert_eq!(all.put(&mut state, &memory, "cr3", 0x6000), Err(Refused));
}

/// Whatever is written, the state is one of a processor: nothing panics, and refusals change nothing.
// covers: gdb/control-registers
#[test]
fn no_value_is_too_wild() {
    let memory = Memory::new(2 << 20).unwrap();
    for (entry, at) in TABLE.iter().zip((0x1000..).step_by(8)) {
        memory.write(at, &entry.to_le_bytes()).unwrap();
    }
    let mut random = 0x2545_f491_4f6c_dd1d_u64;
    let mut next = move || {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        random
    };
    for model in MODELS {
        let all = Registers::of(model);
        let mut state = CpuState::reset(model);
        let mut taken = 0;
        for _ in 0..20_000 {
            let number = next() as usize % (all.count() + 1);
            let value = next() & next() >> (next() % 64);
            let mut bytes = value.to_le_bytes().repeat(2);
            bytes.truncate(all.list.get(number).map_or(4, |register| register.bits / 8));
            let before = state.clone();
            let put = all.write(&mut state, &memory, number, &bytes);
            assert!(put.is_ok() || state == before);
            taken += usize::from(put.is_ok());
            (state.gdtr.base, state.gdtr.limit) = (0x1000, 0x47);
            assert!(!state.cr0.pg() || state.cr0.pe());
        }
        assert!(taken > 5000, "{}: {taken}", model.name);
    }
}
