//! The translator against the interpreter, side by side: the same state every million steps of whole boots, and the same bytes of traces.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use guest_tests::flat::{self, CODE, DATA};
use guest_tests::lockstep::Lockstep;
use guest_tests::{Folder, VMX_LOOP, bare, linux};
use iced_x86::IcedError;
use iced_x86::code_asm::*;
use minivmm::MachineConfig;
use minivmm::recording::RecordingOptions;
use x86::model::{CpuModel, HASWELL, MODELS, SKYLAKE_SERVER};

/// Steps between two comparisons.
const EVERY: u64 = 1_000_000;

/// The models that can run 64-bit code: today's alone by default, all of them in the full form.
fn models() -> Vec<&'static CpuModel> {
    let wide = MODELS.iter().copied().filter(|model| model.features().lm());
    let mut wide: Vec<_> = wide.collect();
    if !guest_tests::full() {
        let day = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .map_or(0, |now| now.as_secs())
            / 86_400;
        let today = day as usize % wide.len();
        wide = vec![wide[today]];
        println!("{} is today's; the full form runs all", wide[0].name);
    }
    wide
}

fn boot(model: &'static CpuModel) -> MachineConfig {
    MachineConfig {
        memory: 256 << 20,
        initrd: vec![linux().initrd.clone().into()],
        cmdline: Some(b"console=ttyS0 panic=-1 quiet minivmm.script=nothing".to_vec()),
        model,
        ..MachineConfig::new(&linux().kernel)
    }
}

/// All files of a trace's directory, by name.
fn files(folder: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let mut files = BTreeMap::new();
    let mut folders = vec![folder.to_path_buf()];
    while let Some(at) = folders.pop() {
        for entry in fs::read_dir(at).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
            } else {
                let bytes = fs::read(&path).unwrap();
                files.insert(path.strip_prefix(folder).unwrap().into(), bytes);
            }
        }
    }
    files
}

/// VM entries and VM exits, and the guest tests of VMX.
// covers: vmx/lockstep
#[test]
fn vmms_and_their_guests_are_in_the_same_state_every_few_thousand_steps() {
    let guests = [
        (MachineConfig::new(VMX_LOOP), &HASWELL, Some(b"20000".to_vec()), 10_000),
        (MachineConfig::new(bare::vmx()), &SKYLAKE_SERVER, None, 100_000),
    ];
    for (config, model, cmdline, every) in guests {
        let config = MachineConfig {
            memory: 64 << 20,
            model,
            cmdline,
            ..config
        };
        let equal = Lockstep::new(&config, engine::TRANSLATE_AFTER, every)
            .run(u64::MAX)
            .unwrap_or_else(|apart| panic!("{}: {apart}", config.kernel.display()));
        assert!(equal.compared > 5 && equal.blocks > 0, "{equal:?}");
    }
}

// covers: translate/lockstep
#[test]
fn boots_are_in_the_same_state_every_million_steps() {
    for model in models() {
        let mut pair = Lockstep::new(&boot(model), engine::TRANSLATE_AFTER, EVERY);
        let equal = pair
            .run(u64::MAX)
            .unwrap_or_else(|apart| panic!("{}: {apart}", model.name));
        let said = String::from_utf8_lossy(&equal.console).into_owned();
        assert!(
            said.contains("script nothing ended with status 0"),
            "{}: {said}",
            model.name
        );
        // A boot is more than a thousand million steps, and most of them are translated.
        assert!(equal.compared > 500 && equal.blocks > 1000, "{}: {equal:?}", model.name);
    }
}

// covers: translate/lockstep-trace
#[test]
fn traces_of_boots_are_the_same_to_the_byte() {
    for model in models() {
        let folder = Folder::new("lockstep");
        let [ours, theirs] = ["translated", "interpreted"].map(|name| folder.join(name));
        let [a, b] = [&ours, &theirs].map(|at| MachineConfig {
            trace: Some(RecordingOptions::new(at)),
            ..boot(model)
        });
        let mut pair = Lockstep::of(&a, &b, engine::TRANSLATE_AFTER, EVERY);
        // The kernel up to its first processes, or all of it in the full form.
        let steps = if guest_tests::full() { u64::MAX } else { 300_000_000 };
        let equal = pair
            .run(steps)
            .unwrap_or_else(|apart| panic!("{}: {apart}", model.name));
        assert!(equal.compared >= 300 && equal.blocks > 500, "{}: {equal:?}", model.name);
        pair.both(|vm| vm.end_trace("the test").unwrap());
        let (ours, theirs) = (files(&ours), files(&theirs));
        let names = ours.keys().collect::<Vec<_>>();
        assert_eq!(names, theirs.keys().collect::<Vec<_>>());
        assert!(ours.values().any(|bytes| bytes.len() > 1 << 20), "{names:?}");
        for (name, ours) in &ours {
            let theirs = &theirs[name];
            let at = ours.iter().zip(theirs).position(|(a, b)| a != b);
            let (len, other) = (ours.len(), theirs.len());
            assert_eq!((at, len), (None, other), "{} of {}", name.display(), model.name);
        }
    }
}

/// Sums in three blocks, a store in the second, for ever.
fn sums(a: &mut CodeAssembler) -> Result<(), IcedError> {
    let (mut again, mut second, mut third) = (a.create_label(), a.create_label(), a.create_label());
    a.mov(rdi, DATA)?;
    a.xor(eax, eax)?;
    a.set_label(&mut again)?;
    a.add(rax, 3)?;
    a.jmp(second)?;
    a.set_label(&mut second)?;
    a.mov(qword_ptr(rdi), rax)?;
    a.imul_2(rbx, rax)?;
    a.add(rbx, rax)?;
    a.jmp(third)?;
    a.set_label(&mut third)?;
    a.xor(rcx, rbx)?;
    a.jmp(again)
}

/// Both machines with that program.
fn small() -> Lockstep {
    let config = flat::config(&SKYLAKE_SERVER);
    let (mut vm, _) = flat::whole_of(&config, 0, &[], sums);
    let beginning = vm.save();
    let mut pair = Lockstep::new(&config, 50, 10_000);
    pair.both(|vm| vm.set_state(&beginning).unwrap());
    pair
}

/// Where the second block of [`sums`] begins.
fn second_block() -> u64 {
    let mut a = CodeAssembler::new(64).unwrap();
    sums(&mut a).unwrap();
    let code = a.assemble(CODE).unwrap();
    // MOV [RDI], RAX is 48 89 07.
    CODE + code.windows(3).position(|bytes| bytes == [0x48, 0x89, 0x07]).unwrap() as u64
}

/// What looks for differences finds one, and the block that makes it: a wrong translation is put in place of the second block's.
// covers: translate/narrowing
#[test]
fn a_wrong_translation_is_found_and_shown_with_its_code() {
    let equal = small().run(200_000).expect("they are the same without it");
    assert!(equal.blocks >= 3 && equal.compared == 20, "{equal:?}");
    let mut pair = small();
    let at = second_block();
    pair.translated().translate_wrongly(at);
    let told = pair.run(200_000).unwrap_err();
    for part in [
        // The translation is there by now, so that the first round is wrong: of two steps, two of the loop's first block, four of this.
        "after step 8:",
        &format!("the block of 4 steps at {at:#x}"),
        "guest code:",
        "mov [rdi],rax",
        "imul rbx,rax",
        "host code:",
        // What makes it wrong: RBX is where the guest's RAX is.
        "inc rbx",
    ] {
        assert!(told.contains(part), "{part:?} is missing: {told}");
    }
    assert!(!told.contains("xor rcx,rbx"), "another block is not shown: {told}");
}

/// A difference that no block makes is told, too: with what differs, and where it was first seen.
// covers: translate/narrowing
#[test]
fn a_difference_that_no_block_makes_is_told() {
    let mut pair = small();
    pair.run(20_000).expect("they are the same");
    // Somebody else writes into the memory of one of them.
    pair.translated().write_physical(DATA + 0x100, &[7]).unwrap();
    let told = pair.run(40_000).unwrap_err();
    assert!(told.contains(&format!("memory at {:#x}", DATA + 0x100)), "{told}");
    assert!(told.contains("the two do not part again"), "{told}");
}
