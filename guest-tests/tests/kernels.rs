//! Debian's kernels from the oldest to the newest: what minivmm finds in their memory, against what they say of themselves.

use guest_tests::{Folder, full, linux, linux_kernels};
use minivmm::recording::GuestMemory;
use minivmm::{Console, MachineConfig, Run, SerialTarget};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::process::Command;
use trace::linux::{Kernel, Recorded, Recording, kallsyms_text};
use trace::symbols::{Origin, SymbolFile, write_elf};

/// It loads what modules there are, says what it is, and then keeps the CPU busy in user mode.
const RUN: &str = "#!/bin/sh
for file in modules/*; do insmod $file || echo \"said: no module $file\"; done
sleep 1000 &
echo \"said: version $(cat /proc/version)\"
sed 's/^/said: module /' /proc/modules
ps -o pid,ppid,comm | sed 's/^ */said: process /'
mkdir /results
gzip -1 </proc/kallsyms >/results/kallsyms.gz
collect /results
exec ./spinner
";
const SPINNER: &str = "#!/bin/sh
echo 'said: ready now'
while :; do :; done
";

/// What the guest said.
struct Said {
    console: String,
    kallsyms: String,
}

impl Said {
    /// Under a name.
    fn lines(&self, name: &str) -> impl Iterator<Item = &str> {
        let prefix = format!("said: {name} ");
        let lines = self.console.lines();
        lines.filter_map(move |line| Some(line.trim_end().split_once(&prefix)?.1.trim()))
    }
}

fn boot(folder: &Folder, kernel: &Path) -> (Run, Said) {
    folder.script("run", RUN);
    folder.script("spinner", SPINNER);
    let (collected, modules) = (folder.join("collected"), folder.join("modules"));
    std::fs::create_dir_all(&collected).unwrap();
    std::fs::create_dir_all(&modules).unwrap();
    let own = kernel.to_string_lossy().replace("vmlinuz-", "modules-");
    for file in std::fs::read_dir(own).into_iter().flatten() {
        let file = file.unwrap();
        std::fs::copy(file.path(), modules.join(file.file_name())).unwrap();
    }
    let mut initrd = vec![linux().initrd.clone().into()];
    if is_32_bit(kernel) {
        initrd.push(kernel.with_file_name("busybox-i386.cpio").into());
    }
    let config = MachineConfig {
        initrd,
        inject: Some(folder.to_path_buf()),
        collect: Some(collected.clone()),
        cmdline: Some(b"console=ttyS0 panic=-1 quiet".to_vec()),
        memory: 384 << 20,
        model: minivmm::model::find("skylake-server").unwrap(),
        ..MachineConfig::new(kernel)
    };
    let mut run = Run::new(&config).unwrap();
    let mut console = Console::open(&SerialTarget::Buffer, &[], run.line()).unwrap();
    let mut said = String::new();
    while !said.contains("said: ready now") {
        let end = run.run_for(&mut console, 20_000_000).unwrap();
        said += &String::from_utf8_lossy(&console.take_output());
        assert!(
            end.is_none() && run.steps() < 20_000_000_000,
            "{}: {end:?}\n{said}",
            kernel.display()
        );
    }
    // The spinner is a process of its own since its exec; a moment later it is in user mode.
    while run.cpu_state(0).unwrap().cpl != 3 {
        run.run_for(&mut console, 100_003).unwrap();
    }
    let zipped = collected.join("kallsyms.gz");
    let unzipped = Command::new("gzip").arg("-dc").arg(&zipped).output().unwrap();
    let kallsyms = String::from_utf8(unzipped.stdout).unwrap();
    let console = said;
    (run, Said { console, kallsyms })
}

fn is_32_bit(kernel: &Path) -> bool {
    kernel.to_string_lossy().contains("-686")
}

/// Symbols as both must have them: without what the kernel makes up at run time, and with types of modules' symbols in lower case
/// (upper case tells the exported ones). Addresses are as long as the kernel writes them.
fn lines(kallsyms: &str) -> BTreeSet<String> {
    let line = |line: &str| {
        let (address, rest) = line.split_once(' ')?;
        let address = u64::from_str_radix(address, 16).unwrap();
        match rest.split_once('\t') {
            Some((_, "[bpf]" | "[__builtin__ftrace]" | "[__builtin__kprobes]")) => None,
            Some((symbol, module)) => {
                let (kind, name) = symbol.split_at(1);
                Some(format!("{address:x} {}{name}\t{module}", kind.to_ascii_lowercase()))
            }
            None => Some(format!("{address:x} {rest}")),
        }
    };
    kallsyms.lines().filter_map(line).collect()
}

/// A kernel tells the same as is found in its memory.
fn follow(kernel: &Path) {
    let name = kernel.file_name().unwrap().to_string_lossy().into_owned();
    let folder = Folder::new(&format!("kernels-{}", name.replace(['.', '+'], "-")));
    let (mut run, said) = boot(&folder, kernel);
    let state = run.cpu_state(0).unwrap();
    let steps = run.steps();
    let memory = &mut GuestMemory::new(run.machine().memory());
    let found = Kernel::look_for(memory).unwrap_or_else(|why| panic!("{name}: {why}"));
    assert_eq!(said.lines("version").next(), Some(found.banner()), "{name}");

    // Every symbol of the image and, where it is known where they are, of modules.
    let modules = found.modules(memory);
    let theirs: BTreeSet<String> = lines(&said.kallsyms)
        .into_iter()
        .filter(|line| !is_32_bit(kernel) || !line.contains('\t'))
        .collect();
    let ours = lines(&kallsyms_text(found.symbols(), &modules));
    let extra: Vec<_> = ours.difference(&theirs).take(10).collect();
    let missing: Vec<_> = theirs.difference(&ours).take(10).collect();
    assert!(
        theirs.len() > 40_000 && extra.is_empty() && missing.is_empty(),
        "{name}: {} symbols; only here: {extra:#?}\nonly there: {missing:#?}",
        theirs.len()
    );

    // KASLR's slide, by which the image is where the symbols say.
    let text = found.symbols().address("_text").unwrap();
    let linked = if is_32_bit(kernel) {
        0xc100_0000
    } else {
        0xffff_ffff_8100_0000
    };
    assert_eq!(found.slide(), text - linked, "{name}");
    let mut code = [[0; 64]; 2];
    assert!(trace::linux::Memory::read_physical(
        memory,
        found.physical_base(),
        &mut code[0]
    ));
    assert!(found.read(memory, text, &mut code[1]), "{name}");
    assert_eq!(code[0], code[1], "{name}");
    assert!(found.is_there(memory), "{name}");

    let mut recording = Recording::default();
    assert!(recording.look(memory, steps));
    recording.write(&folder.join("linux")).unwrap();
    let back = Recorded::read(&folder.join("linux")).unwrap().unwrap();
    assert_eq!((back.banner.as_str(), back.slide), (found.banner(), found.slide()));
    symbols_are_those_of_a_file(&folder, &said.kallsyms, &back, &name);
    if is_32_bit(kernel) {
        // Without BTF and without symbols of data there are neither modules nor processes.
        assert!(modules.is_empty() && found.tasks(memory).is_empty(), "{name}");
        return;
    }

    let theirs: BTreeMap<String, u64> = said
        .lines("module")
        .map(|line| {
            let words: Vec<_> = line.split(' ').collect();
            let address = u64::from_str_radix(words[5].trim_start_matches("0x"), 16).unwrap();
            (words[0].to_string(), address)
        })
        .collect();
    assert_eq!(said.lines("no module").next(), None, "{name}");
    let ours: BTreeMap<String, u64> = modules
        .iter()
        .map(|module| (module.name.clone(), module.base))
        .collect();
    assert_eq!(ours, theirs, "{name}");
    if own_modules(kernel) {
        assert!(
            theirs.contains_key("msr") && theirs.contains_key("cpuid"),
            "{name}: {theirs:?}"
        );
        let open = back.symbols.address("msr_open").unwrap();
        let place = back.symbols.lookup(open + 1).unwrap();
        assert_eq!(place.to_string(), "msr_open+0x1 [msr]", "{name}");
    }

    let tasks = found.tasks(memory);
    let seen: Vec<(u32, String)> = said
        .lines("process")
        .filter_map(|line| {
            let words: Vec<_> = line.split_whitespace().collect();
            Some((words[0].parse().ok()?, words[2..].join(" ")))
        })
        .collect();
    assert!(seen.len() > 20, "{name}: {seen:?}");
    for (pid, comm) in &seen {
        // Those of the pipe have ended, so do the kernel's own tests, and workers change their names with their work.
        if ["ps", "sed", "cryptomgr_test"].contains(&comm.as_str()) || comm.starts_with("kworker") {
            continue;
        }
        let task = tasks.iter().find(|task| task.pid == *pid);
        let task = task.unwrap_or_else(|| panic!("{name}: {pid} {comm} is not among {tasks:?}"));
        // The script has become the spinner since.
        let expected = if comm == "run" { "spinner" } else { comm.as_str() };
        assert_eq!(
            task.comm,
            expected.chars().take(15).collect::<String>(),
            "{name}: {pid}"
        );
    }
    let current = found
        .current(memory, 0)
        .unwrap_or_else(|| panic!("{name}: a process runs"));
    assert_eq!(
        (current.comm.as_str(), current.pid),
        ("spinner", current.tgid),
        "{name}"
    );
    let table = current.page_table.unwrap();
    assert!(table == state.cr3 & !0xfff || table == state.cr3 & !0x1fff, "{name}");
    let notes = back.build_id.as_deref().unwrap_or_default();
    assert_eq!(notes.len(), 40, "{name}: a build ID of 20 bytes");
}

/// The kernel has modules beside it.
fn own_modules(kernel: &Path) -> bool {
    Path::new(&kernel.to_string_lossy().replace("vmlinuz-", "modules-")).is_dir() && kernel != linux().kernel
}

/// A copy of /proc/kallsyms is a file of symbols, of this kernel and of no other; and so is what `trace symbols --elf` writes.
fn symbols_are_those_of_a_file(folder: &Folder, kallsyms: &str, back: &Recorded, name: &str) {
    let (copy, elf) = (folder.join("kallsyms.txt"), folder.join("symbols.elf"));
    std::fs::write(&copy, kallsyms).unwrap();
    std::fs::write(&elf, write_elf(&back.symbols, back.build_id.as_deref()).unwrap()).unwrap();
    for file in [&copy, &elf] {
        let origin = Origin {
            build_id: back.build_id.as_deref(),
            slide: Some(back.slide),
            symbols: Some(&back.symbols),
        };
        let symbols = SymbolFile::read(file).and_then(|file| file.resolve(origin));
        let symbols = symbols.unwrap_or_else(|why| panic!("{name}: {}: {why}", file.display()));
        for symbol in ["start_kernel", "schedule", "panic"] {
            assert_eq!(
                symbols.address(symbol),
                back.symbols.address(symbol),
                "{name}: {symbol}"
            );
        }
    }
}

/// The version's first two numbers: `vmlinuz-6.12.95+deb12-cloud-amd64`.
fn series(kernel: &Path) -> (u32, u32) {
    let name = kernel.file_name().unwrap().to_string_lossy().into_owned();
    let version = name.strip_prefix("vmlinuz-").unwrap_or("6.1.").to_string();
    let mut numbers = version.split('.').map(|word| word.parse().unwrap_or(0));
    (numbers.next().unwrap(), numbers.next().unwrap())
}

// covers: linux-guest/kernels
#[test]
fn the_oldest_and_the_newest_kernel_tell_what_is_found_in_them() {
    // The guest's own is followed by `introspection`.
    let kernels: Vec<_> = linux_kernels().into_iter().skip(1).collect();
    let (Some(oldest), Some(newest)) = (
        kernels.iter().map(|kernel| series(kernel)).min(),
        kernels.iter().map(|kernel| series(kernel)).max(),
    ) else {
        panic!("cargo xtask guest --kernels fetches them");
    };
    // The tables of symbols changed in 6.4.
    assert!(oldest < (6, 1) && newest > (6, 4), "{kernels:?}");
    for kernel in &kernels {
        let is_end = [oldest, newest].contains(&series(kernel)) && kernel.to_string_lossy().contains("-cloud-");
        if full() || is_end {
            println!("{}", kernel.display());
            follow(kernel);
        }
    }
}
