//! gdb on a Linux guest from outside: beside the guest's own gdb, and from a kernel's panic back to the store that was the cause.

use guest_tests::gdb::{Guest, says};
use guest_tests::{CRASH, Folder, full, linux, target};
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

/// Python for gdb: where a symbol of the kernel's is, as the monitor finds it.
const AT: &str = "python
import re
def at(name):
\tsaid = gdb.execute('monitor gva2gpa ' + name, to_string=True)
\treturn int(re.search('ffffffff[0-9a-f]{8}', said).group(), 16)
end
";

/// A folder with a file in it that may be executed.
fn inject(folder: &Path, name: &str, contents: &[u8]) -> String {
    let inject = folder.join("inject");
    fs::create_dir(&inject).unwrap();
    fs::write(inject.join(name), contents).unwrap();
    fs::set_permissions(inject.join(name), fs::Permissions::from_mode(0o755)).unwrap();
    inject.to_str().unwrap().into()
}

/// What the guest's gdb does: with three watchpoints and a breakpoint it has all debug registers in use.
const INSIDE: &str = "#!/bin/sh
echo inside: begins
mkdir -p /tmp && cd /tmp
cat >commands <<G
starti
watch watched
watch copy
watch bytes[2]
hbreak read_it
continue
continue
continue
continue
continue
continue
continue
continue
continue
continue
continue
G
gdb -nx -batch -ex 'set confirm off' -x commands /usr/bin/watched >said 2>&1
grep -e '^Hardware' -e '^Breakpoint' -e '^New' -e exited said
";

/// What ours does meanwhile: the same variables, and three of the kernel's, which makes six.
const OUTSIDE: &str = "
python
hits = {}
ours = [gdb.Breakpoint(e, gdb.BP_WATCHPOINT) for e in
\t('watched', 'copy', 'bytes[2]',
\t '*(long *)%#x' % at('jiffies'), '*(int *)%#x' % at('panic_cpu'), '*(int *)%#x' % at('panic_on_oops'))]
def stopped(event):
\tfor b in getattr(event, 'breakpoints', []):
\t\thits[b.number] = hits.get(b.number, 0) + 1
\t\tif b.number == ours[3].number and hits[b.number] == 3:
\t\t\tb.enabled = False
gdb.events.stop.connect(stopped)
try:
\twhile gdb.selected_thread() is not None:
\t\tgdb.execute('continue')
except gdb.error as e:
\tprint('over:', e)
print('hits', [hits.get(b.number, 0) for b in ours])
end
";

// covers: gdb/linux-both
#[test]
fn the_guest_s_gdb_and_ours_both_have_their_watchpoints() {
    let folder = Folder::new("gdb-linux");
    let inject = inject(&folder, "run", INSIDE.as_bytes());
    let program = target().join("guest/programs/watched");
    let mut guest = Guest::start_in(
        folder,
        &linux().kernel,
        &[
            "--initrd",
            linux().tools.to_str().unwrap(),
            "--inject",
            &inject,
            "--cmdline",
            "console=ttyS0 quiet nokaslr panic=-1",
        ],
    );
    assert!(
        guest.running.wait_for("inside: begins").is_some(),
        "{}",
        guest.running.console()
    );
    let said = guest.gdb(&format!("symbol-file {}\n{AT}{OUTSIDE}", program.display()));
    let inside = guest.finish().must_end_with(0);
    // In their order: each round writes the one, reads it in a function, and writes the other; the second writes a byte.
    let mut expected = String::new();
    for round in 1..=3 {
        for (kind, value) in [
            ("Hardware watchpoint 1: watched", format!("New value = {}", round * 100)),
            ("Breakpoint 4, ", String::new()),
            ("Hardware watchpoint 2: copy", format!("New value = {}", round * 100)),
        ] {
            expected += &format!("{kind}|{value}|");
        }
        if round == 2 {
            expected += "Hardware watchpoint 3: bytes[2]|New value = 2|";
        }
    }
    let parts: Vec<&str> = expected.split('|').filter(|part| !part.is_empty()).collect();
    // What gdb says of setting them comes first.
    let hits = inside.console.split_once("Hardware watchpoint 3: bytes[2]\n");
    says(hits.unwrap_or_else(|| panic!("{}", inside.console)).1, &parts);
    assert!(inside.console.contains("exited normally"), "{}", inside.console);
    let hits = said.rsplit_once("hits [").unwrap_or_else(|| panic!("{said}")).1;
    let hits: Vec<u64> = hits[..hits.find(']').unwrap()]
        .split(", ")
        .map(|count| count.parse().unwrap())
        .collect();
    // Linux clears what of the page is not from the file: gdb sees that, too.
    assert!(
        hits[0] == 3 && (3..5).contains(&hits[1]) && (1..3).contains(&hits[2]),
        "{hits:?}"
    );
    assert_eq!(hits[3..], [3, 0, 0], "{said}");
    for value in [
        "New value = 100",
        "New value = 200",
        "New value = 300",
        "New value = 2 ",
    ] {
        assert!(said.contains(value), "{value}: {said}");
    }
}

/// A first process overwrites its own pointer, is killed for what it does with it, and the kernel has nothing left to run.
// covers: gdb/panic
#[test]
fn from_a_kernel_s_panic_to_the_store_that_caused_it() {
    let folder = Folder::new("gdb-linux");
    let inject = inject(&folder, "init", &fs::read(CRASH).unwrap());
    let mut options = vec!["--inject", &inject, "--reverse", "--paused"];
    options.extend(["--cmdline", "console=ttyS0 quiet nokaslr panic=-1"]);
    let guest = Guest::start_in(folder, &linux().kernel, &options);
    let said = guest.gdb(&format!(
        "hbreak *0x1000000\ncontinue\ndelete\n{AT}\
         python gdb.execute('hbreak *%#x' % at('panic'))\ncontinue\nx/s $rdi\nmonitor info\ndelete\n\
         file {CRASH}\nprint/x record\n\
         watch record.last\nreverse-continue\nbacktrace\ninfo locals\nprint record.last\n\
         stepi\nprint record.last\ndelete\nreverse-finish\n\
         watch record.values[3]\nreverse-continue\nbacktrace\nkill\n"
    ));
    let outcome = guest.finish();
    assert!(outcome.console.contains("crash: all is well"), "{}", outcome.console);
    // What the monitor says comes beside the rest.
    says(&said, &[" panic, CPL 0, init 1"]);
    says(
        &said,
        &[
            "Attempted to kill init!",
            "values = {0x1000, 0x1001, 0x1002, 0x1003}, last = 0x1004",
            "Hardware watchpoint 3: record.last",
            "Old value = (long *) 0x1004",
            "New value = (long *) 0x",
            "<record+24>",
            "at[i] = 0x1000 + i;",
            "#0  ",
            "fill (to=",
            "entry=5)",
            "#1  0x",
            "in work (count=",
            "#2  0x",
            "in _start ()",
            "i = 4",
            "<record+24>",
            "0x1004",
            "in work (count=",
            "fill(&record, count);",
            // What the pointer was good for: the time before it did no harm.
            "Hardware watchpoint 4: record.values[3]",
            "Old value = 1",
            "New value = 4099",
            "*record.last = 1;",
            "in work (count=count@entry=4)",
        ],
    );
}

/// The session in the guide, `resources/guide/src/debugging.md`, to the letter but for its addresses.
// covers: gdb/panic
#[test]
fn the_guide_s_session_goes_as_it_says() {
    if !full() {
        return;
    }
    let cmdline = "console=ttyS0 panic=-1";
    let folder = Folder::new("gdb-linux");
    let (trace, elf) = (folder.join("boot"), folder.join("kernel.elf"));
    let mut boot = guest_tests::in_minivmm(&linux().kernel);
    boot.args(["--cmdline", cmdline, "--serial", "null", "--trace"])
        .arg(&trace);
    guest_tests::run(&mut boot, guest_tests::gdb::LIMIT);
    let mut symbols = std::process::Command::new(guest_tests::minivmm());
    symbols.args(["trace", "symbols"]).arg(&trace).arg("--elf").arg(&elf);
    guest_tests::run(&mut symbols, guest_tests::gdb::LIMIT).must_end_with(0);
    let guest = Guest::start_in(
        folder,
        &linux().kernel,
        &["--cmdline", cmdline, "--reverse", "--paused"],
    );
    let said = guest.gdb(&format!(
        "file {}\nhbreak mount_block_root\ncontinue\nrecord btrace pt\ndelete\nhbreak panic\ncontinue\nx/s $rdi\n\
         record function-call-history /il\nrecord instruction-history -\nrecord stop\ndelete\n\
         watch *(int *)&panic_cpu\ncontinue\nreverse-continue\nx/i $pc\nhbreak mount_block_root\nreverse-continue\n\
         delete\nreverse-stepi\nmonitor run-to\nkill\n",
        elf.display()
    ));
    guest.finish();
    says(
        &said,
        &[
            "Breakpoint 1, 0x",
            "in mount_block_root ()",
            "Breakpoint 2, 0x",
            "in panic ()",
            "VFS: Unable to mount root fs on %s",
            "printk_all_partitions\tinst",
            "mount_block_root\tinst",
            "<panic>",
            "Hardware watchpoint 3: *(int *)&panic_cpu",
            "Old value = -1",
            "New value = 0",
            "Old value = 0",
            "New value = -1",
            "cmpxchg",
            "Breakpoint 4, 0x",
            "in mount_block_root ()",
            "in mount_root ()",
            "snapshots, ",
        ],
    );
}
