//! What minivmm finds in the memory of a Linux guest, against what that Linux says of itself.

use guest_tests::{Folder, linux};
use minivmm::recording::GuestMemory;
use minivmm::{Console, MachineConfig, Run, SerialTarget};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::process::Command;
use trace::linux::{Kernel, Recorded, Recording, kallsyms_text};
use trace::symbols::{Origin, SymbolFile, write_elf};

/// It says what it is, and then keeps the CPU busy in user mode.
const RUN: &str = "#!/bin/sh
load-modules
sleep 1000 &
echo \"said: version $(cat /proc/version)\"
sed 's/^/said: module /' /proc/modules
ps -o pid,ppid,comm | sed 's/^ */said: process /'
mkdir /results
gzip -1 </proc/kallsyms >/results/kallsyms.gz
od -An -v -tx1 /sys/kernel/notes | tr -d ' \\n' | sed 's/^/said: notes /'
echo
collect /results
exec /inject/spinner
";
const SPINNER: &str = "#!/bin/sh
echo 'said: ready now'
while :; do :; done
";

struct Booted {
    vm: Run,
    console: Console,
    said: String,
    kallsyms: String,
}

impl Booted {
    /// What the guest said under a name.
    fn said(&self, name: &str) -> impl Iterator<Item = &str> {
        let prefix = format!("said: {name} ");
        self.said
            .lines()
            .filter_map(move |line| Some(line.trim_end().strip_prefix(&prefix)?.trim()))
    }
}

fn boot(folder: &Folder, cmdline: &str) -> Booted {
    folder.script("run", RUN);
    folder.script("spinner", SPINNER);
    let collected = folder.join("collected");
    std::fs::create_dir_all(&collected).unwrap();
    let config = MachineConfig {
        initrd: vec![linux().initrd.clone().into()],
        inject: Some(folder.to_path_buf()),
        collect: Some(collected.clone()),
        cmdline: Some(format!("console=ttyS0 panic=-1 {cmdline}").into()),
        memory: 256 << 20,
        model: minivmm::model::find("skylake-server").unwrap(),
        ..MachineConfig::new(&linux().kernel)
    };
    let mut vm = Run::new(&config).unwrap();
    let mut console = Console::open(&SerialTarget::Buffer, &[], vm.line()).unwrap();
    let mut said = String::new();
    while !said.contains("said: ready now") {
        let end = vm.run_for(&mut console, 20_000_000).unwrap();
        said += &String::from_utf8_lossy(&console.take_output());
        assert!(end.is_none() && vm.steps() < 20_000_000_000, "{end:?}\n{said}");
    }
    // The spinner is a process of its own since its exec; a moment later it is in user mode.
    while vm.cpu_state(0).unwrap().cpl != 3 {
        vm.run_for(&mut console, 100_003).unwrap();
    }
    let zipped = collected.join("kallsyms.gz");
    let unzipped = Command::new("gzip").arg("-dc").arg(&zipped).output().unwrap();
    let kallsyms = String::from_utf8(unzipped.stdout).unwrap();
    Booted {
        vm,
        console,
        said,
        kallsyms,
    }
}

/// Lines that both must have: without what the kernel makes up at run time, and with types of modules' symbols in lower case (upper
/// case tells the exported ones).
fn lines(kallsyms: &str) -> Vec<String> {
    let line = |line: &str| match line.split_once('\t') {
        Some((_, "[bpf]" | "[__builtin__ftrace]" | "[__builtin__kprobes]")) => None,
        Some((symbol, module)) => {
            let (address, rest) = symbol.split_at(18);
            Some(format!("{}{rest}\t{module}", address.to_ascii_lowercase()))
        }
        None => Some(line.to_string()),
    };
    kallsyms.lines().filter_map(line).collect()
}

fn read(dir: &Path) -> Recorded {
    Recorded::read(dir).unwrap().expect("a kernel was written")
}

// covers: linux-guest/kallsyms, linux-guest/slide, linux-guest/modules, linux-guest/tasks, linux-guest/current, linux-guest/recording, symbols/elf, symbols/own, monitor/kaslr, monitor/names, monitor/pagewalk, monitor/irq
#[test]
fn symbols_modules_and_processes_are_those_that_linux_tells() {
    let folder = Folder::new("introspection");
    let mut booted = boot(&folder, "");
    let state = booted.vm.cpu_state(0).unwrap();
    let steps = booted.vm.steps();
    let memory = &mut GuestMemory::new(booted.vm.machine().memory());
    let kernel = Kernel::find(memory).expect("a kernel is in memory");
    let modules = kernel.modules(memory);
    let tasks = kernel.tasks(memory);
    let current = kernel.current(memory, 0);
    let mut recording = Recording::default();
    assert!(recording.look(memory, steps));
    assert!(!recording.look(memory, steps + 1), "nothing is new");

    // Every symbol, in the kernel's order.
    let ours = lines(&kallsyms_text(kernel.symbols(), &modules));
    let theirs = lines(&booted.kallsyms);
    assert!(theirs.len() > 80_000, "{} symbols", theirs.len());
    if ours != theirs {
        let (ours, theirs): (BTreeSet<_>, BTreeSet<_>) = (ours.iter().collect(), theirs.iter().collect());
        let extra: Vec<_> = ours.difference(&theirs).take(20).collect();
        let missing: Vec<_> = theirs.difference(&ours).take(20).collect();
        panic!("only here: {extra:#?}\nonly there: {missing:#?}\nelse the order is another");
    }
    assert!(theirs.iter().any(|line| line.ends_with("\t[virtio_blk]")));

    // KASLR moved the kernel, and the slide undoes it.
    let text = theirs.iter().find_map(|line| line.strip_suffix(" T _text")).unwrap();
    let text = u64::from_str_radix(text, 16).unwrap();
    assert_ne!(kernel.slide(), 0);
    assert_eq!(kernel.slide(), text - 0xffff_ffff_8100_0000);
    let mut code = [[0; 64]; 2];
    assert!(trace::linux::Memory::read_physical(
        memory,
        kernel.physical_base(),
        &mut code[0]
    ));
    assert!(kernel.read(memory, text, &mut code[1]));
    assert_eq!(code[0], code[1]);
    assert_eq!(booted.said("version").next(), Some(kernel.banner()));
    let notes = booted.said("notes").next().unwrap();
    assert!(
        notes.contains(kernel.build_id().unwrap()),
        "{:?} in {notes}",
        kernel.build_id()
    );

    // Modules with their sizes and addresses.
    let theirs: BTreeMap<_, _> = booted
        .said("module")
        .map(|line| {
            let words: Vec<_> = line.split(' ').collect();
            let address = u64::from_str_radix(words[5].trim_start_matches("0x"), 16).unwrap();
            (words[0].to_string(), (words[1].parse::<u64>().unwrap(), address))
        })
        .collect();
    let ours = modules
        .iter()
        .map(|module| (module.name.clone(), (module.size + module.init_size, module.base)));
    assert_eq!(ours.collect::<BTreeMap<_, _>>(), theirs);
    assert!(theirs.contains_key("virtio_ring"));

    // Processes: all that ps saw and that cannot have ended, kernel threads without page tables.
    let seen: Vec<(u32, u32, String)> = booted
        .said("process")
        .filter_map(|line| {
            let words: Vec<_> = line.split_whitespace().collect();
            Some((words[0].parse().ok()?, words[1].parse().ok()?, words[2..].join(" ")))
        })
        .collect();
    assert!(seen.len() > 20, "{seen:?}");
    for (pid, parent, name) in &seen {
        // Those of the pipe have ended, and workers change their names with their work.
        if ["ps", "sed"].contains(&name.as_str()) || name.starts_with("kworker") {
            continue;
        }
        let task = tasks.iter().find(|task| task.pid == *pid);
        let task = task.unwrap_or_else(|| panic!("{pid} {name} is not among {tasks:?}"));
        // The script has become the spinner since.
        let expected = if name == "run" { "spinner" } else { name.as_str() };
        assert_eq!(task.comm, expected.chars().take(15).collect::<String>(), "{pid}");
        // The kernel's threads are kthreadd, 2, and its children.
        assert_eq!(task.page_table.is_none(), *pid == 2 || *parent == 2, "{task:?}");
    }
    let sleep = tasks
        .iter()
        .find(|task| task.comm == "sleep")
        .expect("a process that sleeps");
    let tables: BTreeSet<_> = tasks.iter().filter_map(|task| task.page_table).collect();
    assert_eq!(
        tables.len(),
        tasks.iter().filter(|task| task.page_table.is_some()).count(),
        "one each"
    );

    // The process in user mode is the spinner, and CR3 tells so.
    let current = current.expect("a process runs");
    assert_eq!((current.comm.as_str(), current.pid), ("spinner", current.tgid));
    let table = current.page_table.unwrap();
    assert!(
        table == state.cr3 & !0xfff || table == state.cr3 & !0x1fff,
        "{table:#x} {:#x}",
        state.cr3
    );

    // All of it comes back from a folder.
    recording.write(&folder.join("linux")).unwrap();
    let back = read(&folder.join("linux"));
    assert_eq!((back.banner.as_str(), back.slide), (kernel.banner(), kernel.slide()));
    assert_eq!(
        (back.build_id.as_deref(), back.physical_base),
        (kernel.build_id(), kernel.physical_base())
    );
    assert_eq!(back.task(state.cr3, steps), Some(&current));
    assert_eq!(back.task(sleep.page_table.unwrap() | 0x1801, 0), Some(sleep));
    assert_eq!(back.task(0x1000, steps), None);
    let virtio = &theirs["virtio_ring"];
    let place = back
        .symbols
        .lookup(back.symbols.address("virtqueue_add_sgs").unwrap())
        .unwrap();
    assert_eq!(place.to_string(), "virtqueue_add_sgs [virtio_ring]");
    assert!((virtio.1..virtio.1 + virtio.0).contains(&place.symbol.address));
    assert!(booted.console.take_output().is_empty());

    let elf = folder.join("symbols.elf");
    std::fs::write(&elf, write_elf(&back.symbols, back.build_id.as_deref()).unwrap()).unwrap();
    debuggers_read(&elf, &back);
    // It is a file of symbols as any other, and its build ID makes it this kernel's.
    let again = SymbolFile::read(&elf).unwrap();
    assert_eq!(again.build_id, back.build_id);
    let origin = Origin {
        build_id: back.build_id.as_deref(),
        slide: Some(back.slide),
        symbols: Some(&back.symbols),
    };
    let again = again.resolve(origin).unwrap();
    for name in ["start_kernel", "schedule", "virtqueue_add_sgs", "linux_banner"] {
        assert_eq!(again.address(name), back.symbols.address(name), "{name}");
    }
    the_monitor_tells_the_same(&mut booted, &back, text);
}

/// Name by name what is known otherwise, and the guest is as it was.
fn the_monitor_tells_the_same(booted: &mut Booted, known: &Recorded, text: u64) {
    let Booted { vm, console, .. } = booted;
    let run = |vm: &mut Run, line: &str| {
        minivmm::front::monitor::run(&mut minivmm::front::controls::Controls::new(vm), 0, line)
    };
    let kaslr = run(vm, "kaslr");
    let line = format!("    add-symbol-file vmlinux -o {:#x}\n", text - 0xffff_ffff_8100_0000);
    assert!(kaslr.starts_with(&known.banner) && kaslr.contains(&line), "{kaslr}");
    let info = run(vm, "info");
    assert!(
        info.contains("* CPU 0 at 0x") && info.contains(", CPL 3, spinner "),
        "{info}"
    );
    // Page tables of user mode have no more of the kernel than its entries.
    let read = known.symbols.address("vfs_read").unwrap();
    let hidden = run(vm, "gva2gpa vfs_read");
    let physical = read - text + known.physical_base;
    assert_eq!(
        hidden,
        format!(
            "{read:#x} vfs_read is not mapped in user mode (page-table isolation); by the kernel's page tables, CR3 without bit 12, it \
             is at physical {physical:#x}\n"
        )
    );
    while vm
        .cpu_state(0)
        .is_some_and(|state| state.cpl == 3 || state.cr3 & 0x1000 != 0)
    {
        assert!(vm.run_for(console, 101).unwrap().is_none());
    }
    let digest = vm.digest();
    assert_eq!(
        run(vm, "gva2gpa vfs_read+0x10"),
        format!(
            "{:#x} vfs_read+0x10 is at physical {:#x}\n",
            read + 0x10,
            physical + 0x10
        )
    );
    let walk = run(vm, "pagewalk vfs_read");
    assert!(
        walk.contains("PML4E") && walk.ends_with(&format!("physical {physical:#x}\n")),
        "{walk}"
    );
    let add = known.symbols.address("virtqueue_add_sgs").unwrap();
    let module = run(vm, "gva2gpa virtqueue_add_sgs");
    assert!(
        module.starts_with(&format!("{add:#x} virtqueue_add_sgs [virtio_ring] is at physical ")),
        "{module}"
    );
    let lapic = run(vm, "irq");
    assert!(
        lapic.contains("local APIC 0: xAPIC") && lapic.contains("TSC-deadline"),
        "{lapic}"
    );
    let entry = known.symbols.address("entry_SYSCALL_64").unwrap();
    assert_eq!(
        run(vm, "msr read IA32_LSTAR"),
        format!("0xc0000082 IA32_LSTAR {entry:#x}\n")
    );
    assert_eq!(vm.digest(), digest);
}

/// What a program of the host says.
fn output(command: &mut Command) -> String {
    let output = command.output().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    assert!(
        output.status.success(),
        "{command:?}: {}",
        String::from_utf8_lossy(&output.stderr)
    );
    String::from_utf8(output.stdout).unwrap()
}

/// gdb and readelf find the running kernel's symbols where they are.
fn debuggers_read(elf: &Path, kernel: &Recorded) {
    let text = output(Command::new("readelf").args(["-W", "-s", "-n"]).arg(elf));
    assert!(
        text.contains(&format!("Build ID: {}", kernel.build_id.as_deref().unwrap())),
        "{}",
        &text[..500]
    );
    let listed: BTreeSet<(u64, &str)> = text
        .lines()
        .filter_map(|line| {
            let words: Vec<_> = line.split_whitespace().collect();
            Some((u64::from_str_radix(words.get(1)?, 16).ok()?, *words.get(7)?))
        })
        .collect();
    for symbol in kernel.symbols.iter() {
        assert!(listed.contains(&(symbol.address, symbol.name)), "{symbol:?}");
    }
    let mut gdb = Command::new("gdb");
    gdb.args(["-nx", "-batch"]).arg(elf);
    let names = [
        "start_kernel",
        "schedule",
        "jiffies",
        "virtqueue_add_sgs",
        "do_syscall_64",
    ];
    for name in names {
        let at = kernel.symbols.address(name).unwrap();
        gdb.args(["-ex", &format!("info symbol {:#x}", at + 4)])
            .args(["-ex", &format!("info address {name}")]);
    }
    let said = output(&mut gdb);
    for name in names {
        let at = kernel.symbols.address(name).unwrap();
        let code = kernel.symbols.lookup(at).is_some();
        assert!(
            !code || said.contains(&format!("{name} + 4 in section")),
            "{name}\n{said}"
        );
        assert!(
            said.lines()
                .any(|line| line.starts_with(&format!("Symbol \"{name}\" is")) && line.contains(&format!("{at:#x}"))),
            "{name}\n{said}"
        );
    }
}
