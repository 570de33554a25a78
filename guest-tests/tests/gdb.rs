//! Debian's gdb debugs guests from outside, and they do not notice.

use guest_tests::bare::image;
use guest_tests::gdb::{Guest, LIMIT, program, says};
use guest_tests::{Folder, Outcome, SMP, in_minivmm, linux, run};
use minivmm::{Console, MachineConfig, Run};
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;

/// mov ecx, 4; again: inc edx; mov [200000H], edx; mov ebx, [200008H]; loop again; out F4H, al
const LOOP: [u8; 22] = [
    0xb9, 4, 0, 0, 0, 0x42, 0x89, 0x15, 0, 0, 0x20, 0, 0x8b, 0x1d, 8, 0, 0x20, 0, 0xe2, 0xf1, 0xe6, 0xf4,
];

// covers: gdb/attach, gdb/breakpoints, gdb/watchpoints, gdb/registers, gdb/memory, gdb/physical, gdb/monitor
#[test]
fn a_program_is_debugged_from_its_first_instruction_on() {
    let guest = Guest::code(&LOOP, &["--paused", "--serial", "null"]);
    let said = guest.gdb(
        "print/x $rip\nstepi\nprint $rcx\n\
         set $rdx = 0x41\n\
         hbreak *0x100025\ncontinue\nprint $rcx\n\
         break *0x10002c\ncontinue\nx/2xb 0x10002c\nprint $rdx\n\
         delete\nwatch *(int *)0x200000\ncontinue\nprint $rip\n\
         delete\nrwatch *(int *)0x200008\ncontinue\nprint/x $rip\ndelete\n\
         awatch *(char *)0x20000b\ncontinue\nprint/x $rip\ndelete\n\
         set {int}0x200008 = 0x1234\nset $rcx = 2\nstepi\nstepi\nstepi\nstepi\nprint/x $rbx\n\
         monitor info\n\
         python\ntry:\n  gdb.execute('x/4xb 0xffffffffff000000')\nexcept gdb.error as e:\n  print('refused:', e)\nend\n\
         maintenance packet Qqemu.PhyMemMode:1\nmaintenance packet qqemu.PhyMemMode\nx/2xb 0x100020\n\
         maintenance packet Qqemu.PhyMemMode:0\n\
         print $cr0\nprint $efer\nprint $st0\nprint $xmm3.uint128\nprint $cs\nprint $fs_base\nprint $dr7\n\
         info threads\ndetach\n",
    );
    says(
        &said,
        &[
            "$1 = 0x100020",
            "$2 = 4",
            "Breakpoint 1, 0x0000000000100025",
            "$3 = 3",
            "Breakpoint 2, 0x000000000010002c",
            "0x8b\t0x1d",
            "$4 = 67",
            "Hardware watchpoint 3: *(int *)0x200000",
            "Old value = 67",
            "New value = 68",
            "Hardware read watchpoint 4: *(int *)0x200008",
            "$6 = 0x100032",
            "Hardware access (read/write) watchpoint 5: *(char *)0x20000b",
            "$7 = 0x100032",
            "$8 = 0x1234",
            "refused: Cannot access memory",
            "received: \"1\"",
            "0xb9\t0x04",
            "= 17",
            "CPU 0 [running]",
            "detached",
        ],
    );
    says(&said, &["model westmere"]);
    assert_eq!(guest.finish().status, Some(5));
}

/// Figures of `--stats` that a run's repetition repeats.
fn figures(outcome: &Outcome) -> Vec<&str> {
    let lines = outcome.errors.lines();
    let same = |line: &&str| line.starts_with("steps") || line.starts_with("state hash");
    // How fast it was is its own.
    let upto = |line: &'_ str| line.find(')').map_or(line.len(), |end| end + 1);
    lines.filter(same).map(|line| &line[..upto(line)]).collect()
}

/// Instructions that a guest executes, and on which CPU.
fn places(config: &MachineConfig, every: u64) -> Vec<(usize, u64)> {
    let mut vm = Run::new(config).unwrap();
    let mut console = Console::open(&config.serial, &[], vm.line()).unwrap();
    let mut places = Vec::new();
    while vm.run_for(&mut console, every).unwrap().is_none() {
        let cpu = vm.current_cpu();
        places.push((cpu, vm.cpu_state(cpu).unwrap().rip));
    }
    places
}

// covers: gdb/invisible
#[test]
fn a_guest_with_breakpoints_of_its_own_does_not_notice_gdb() {
    let kernel = image("dr");
    let options = ["--stats", "--serial", "stdio", "--memory", "64M"];
    let mut plain = in_minivmm(&kernel);
    let plain = run(plain.args(options), LIMIT).must_end_with(1);
    assert!(
        !plain.console.contains("\nnot ok") && figures(&plain).len() == 2,
        "{}",
        plain.console
    );
    let config = MachineConfig {
        memory: 64 << 20,
        ..MachineConfig::new(&kernel)
    };
    let places = places(&config, 997);
    let guest = Guest::start(&kernel, &[&options[..], &["--paused"]].concat());
    let mut script = String::new();
    for (_, place) in places.iter().step_by(places.len() / 8) {
        script += &format!("hbreak *{place:#x}\n");
    }
    // Its data, its page tables, its IDT and its stack, wherever they are: four more than it uses itself.
    for address in [0x10_f000, 0x11_0000, 0x11_2000, 0x11_4000] {
        script += &format!("awatch *(long *){address:#x}\n");
    }
    script += "set $n = 0\nwhile $n < 150\ncontinue\nset $n = $n + 1\nend\nstepi\nstepi\ndetach\n";
    let said = guest.gdb(&script);
    assert!(said.matches("Breakpoint ").count() > 20, "{said}");
    let debugged = guest.finish().must_end_with(1);
    assert_eq!(debugged.console, plain.console);
    assert_eq!(figures(&debugged), figures(&plain));
}

// covers: gdb/threads
#[test]
fn cpus_are_threads() {
    let options = ["--stats", "--cpus", "3", "--cmdline", "3", "--memory", "64M"];
    let mut plain = in_minivmm(SMP);
    let plain = run(plain.args(options), LIMIT).must_end_with(1);
    let config = MachineConfig {
        memory: 64 << 20,
        cpus: 3,
        cmdline: Some(b"3".to_vec()),
        ..MachineConfig::new(SMP)
    };
    let places = places(&config, 503);
    // It comes there more than once: in a loop.
    let again = |place: &&(usize, u64)| place.0 == 1 && places.iter().filter(|other| other == place).count() > 1;
    let (_, there) = places.iter().find(again).unwrap();
    let guest = Guest::start(Path::new(SMP), &[&options[..], &["--paused"]].concat());
    let said = guest.gdb(&format!(
        "info threads\nhbreak *{there:#x} thread 2\ncontinue\nprint $_thread\ninfo threads\nstepi\nprint $_thread\n\
         set scheduler-locking on\nstepi\nprint $_thread\nset scheduler-locking off\ncontinue\n\
         thread apply all print/x $cpl\ndetach\n"
    ));
    says(
        &said,
        &[
            "CPU 0 [running]",
            "CPU 1 [not started]",
            "Thread 2 hit",
            "$1 = 2",
            "CPU 2 [",
            "$2 = 2",
            "$3 = 2",
            "Thread 2 hit",
            "Thread 3",
            "= 0x0",
            "detached",
        ],
    );
    let debugged = guest.finish().must_end_with(1);
    assert_eq!(
        (&debugged.console, figures(&debugged)),
        (&plain.console, figures(&plain))
    );
}

// covers: gdb/interrupt, gdb/attach
#[test]
fn gdb_comes_and_goes_while_the_guest_runs() {
    // jmp $
    let guest = Guest::code(&[0xeb, 0xfe], &["--serial", "null"]);
    for _ in 0..2 {
        let said = guest.gdb("print/x $rip\nhbreak *0x100000\nmonitor info\ndetach\n");
        says(&said, &["$1 = 0x100020", "detached"]);
    }
    // Ctrl-C comes once and when the guest runs: gdb gives its script up for one that finds it at something else.
    let said = guest.gdb(
        "python import os, signal, threading\n\
         python interrupt = lambda _: threading.Timer(1, os.kill, (os.getpid(), signal.SIGINT)).start()\n\
         python gdb.events.cont.connect(interrupt)\n\
         continue\nprint/x $rip\nmonitor info\nkill\n",
    );
    says(&said, &["SIGINT", "$1 = 0x100020"]);
    assert_eq!(guest.finish().status, Some(0), "gdb's kill ends the machine");
}

// covers: gdb/triple-fault
#[test]
fn a_triple_fault_is_shown_before_it_ends_the_machine() {
    // mov eax, 7; ud2
    let guest = Guest::code(&[0xb8, 7, 0, 0, 0, 0x0f, 0x0b], &["--paused", "--serial", "null"]);
    let said = guest.gdb("continue\nprint/x $rip\nprint $rax\ncontinue\n");
    says(&said, &["SIGABRT", "0x100025", "= 7", "exited with code 04"]);
    says(&said, &["triple fault on CPU 0"]);
    guest.finish().must_end_with(4);
}

/// Before paging is the kernel's own, in its code, and where it was linked.
// covers: gdb/linux
#[test]
fn a_linux_kernel_is_debugged() {
    let cmdline = "console=ttyS0 quiet nokaslr panic=-1";
    let guest = Guest::start(
        &linux().kernel,
        &[
            "--initrd",
            linux().initrd.to_str().unwrap(),
            "--cmdline",
            cmdline,
            "--paused",
        ],
    );
    // The kernel's 64-bit entry, where it was loaded; then functions, as the monitor finds them by their symbols.
    let said = guest.gdb(
        "hbreak *0x1000000\ncontinue\nprint/x $rip\nprint/x $efer & 0x400\ndelete\nmonitor kaslr\n\
         python\nimport re\n\
         def at(name):\n\
         \tsaid = gdb.execute('monitor gva2gpa ' + name, to_string=True)\n\
         \treturn int(re.search('ffffffff[0-9a-f]{8}', said).group(), 16)\n\
         gdb.execute('hbreak *%#x' % at('start_kernel'))\n\
         gdb.execute('continue')\n\
         gdb.execute('watch *(unsigned long *)%#x' % at('jiffies'))\n\
         gdb.execute('continue')\n\
         end\n\
         monitor info\ndetach\n",
    );
    says(
        &said,
        &[
            "Breakpoint 1, 0x0000000001000000",
            "$2 = 0x400",
            "Breakpoint 2, 0xffffffff8",
            "Hardware watchpoint 3",
            "New value",
            "detached",
        ],
    );
    says(&said, &["Linux version", "slide 0x0", "do_timer"]);
    guest.running.kill();
}

/// Packets as they are on the line, without gdb.
fn packet(body: &str) -> Vec<u8> {
    minivmm::front::gdb::packets::frame(body.as_bytes())
}

/// Sends bytes and reads until an answer holds this.
fn ask(client: &mut UnixStream, bytes: &[u8], expected: &str) -> String {
    client.write_all(bytes).unwrap();
    let (mut said, mut part) = (Vec::new(), [0; 4096]);
    while !String::from_utf8_lossy(&said).contains(expected) {
        match client.read(&mut part) {
            Ok(count @ 1..) => said.extend(&part[..count]),
            other => panic!("{other:?} after {:?}", String::from_utf8_lossy(&said)),
        }
    }
    String::from_utf8_lossy(&said).into_owned()
}

// covers: bad-input/gdb
#[test]
fn what_a_client_does_wrong_is_its_own_trouble() {
    let guest = Guest::code(&[0xeb, 0xfe], &["--paused", "--serial", "null"]);
    let mut client = guest.client();
    ask(&mut client, &packet("qSupported:multiprocess+;swbreak+"), "PacketSize=");
    // Another one is told so.
    let mut second = guest.client();
    ask(&mut second, &packet("qSupported"), "E.another debugger is connected");
    assert_eq!(second.read(&mut [0; 16]).unwrap(), 0, "and sent away");
    for (bytes, expected) in [
        (&b"$?#00"[..], "-"),
        (b"\x03\x03+++$#00", "+$#00"),
        (&packet("vCont;t"), "$E."),
        (&packet("m10000000000000000,4"), "$E"),
        (&packet("m0,ffffffffffffffff"), "$E.too much memory"),
        (&packet("m0,fffffffffffffffffffffff"), "$E"),
        (&packet("mfffffffffffffffe,8"), "$E"),
        (&packet("Mffffffffffffffff,2:0000"), "$E"),
        (&packet("Z2,fffffffffffffffe,8"), "$E"),
        (&packet("Z2,1000,0"), "$E"),
        (&packet("p9999"), "$E"),
        (&packet("Hgp1.99"), "$OK"),
        (&packet("g"), "$E"),
        (&packet("Hg1"), "$OK"),
        (&packet("G00"), "$E"),
        (&packet("unheard-of"), "$#00"),
        (
            &packet(&"x".repeat(minivmm::front::gdb::packets::LONGEST + 1)),
            "$E.a packet of more than",
        ),
        (&packet("?"), "$T05thread:p01.01;"),
    ] {
        ask(&mut client, bytes, expected);
    }
    // Once nothing is acknowledged nothing is said twice: gdb complains whenever it has waited for two seconds.
    ask(&mut client, &packet("QStartNoAckMode"), "$OK#9a");
    let said = ask(&mut client, &[b"--", &packet("?")[..]].concat(), "$T05");
    assert!(said.starts_with("$T05thread"), "{said}");
    // Gone in the middle of a packet: the guest is paused as it was, and the next one finds it so.
    client.write_all(b"$m1000").unwrap();
    drop(client);
    let said = guest.gdb("print/x $rip\nmonitor info\nkill\n");
    says(&said, &["$1 = 0x100020", " 0 steps"]);
    assert_eq!(guest.finish().status, Some(0));
}

/// The text without the protocol's run-length encoding: a character, `*`, and 29 more than how often it comes again.
fn expanded(text: &str) -> String {
    let (mut all, mut chars) = (String::new(), text.chars());
    while let Some(c) = chars.next() {
        match (c, all.chars().next_back()) {
            ('*', Some(last)) => {
                let more = chars.next().map_or(0, |count| u32::from(count) - 29);
                all.extend(std::iter::repeat_n(last, more as usize));
            }
            _ => all.push(c),
        }
    }
    all
}

/// What follows a command that has the machine go elsewhere finds it there, however soon it comes: here with it.
// covers: gdb/reverse, reverse/run-to
#[test]
fn after_a_reverse_watchpoint_run_to_is_where_it_says() {
    // The loop of LOOP, 4096 times.
    let mut code = LOOP;
    code[1..5].copy_from_slice(&4096u32.to_le_bytes());
    let guest = Guest::code(&code, &["--paused", "--reverse", "--serial", "null"]);
    let mut client = guest.client();
    ask(
        &mut client,
        &packet("qSupported:multiprocess+;swbreak+;hwbreak+"),
        "PacketSize=",
    );
    ask(&mut client, &packet("QStartNoAckMode"), "$OK#9a");
    ask(&mut client, &monitor("run-to 15000"), "$OK#9a");
    ask(&mut client, &packet("Z2,200000,4"), "$OK#9a");
    let hex = |text: &str| minivmm::front::gdb::packets::hex(text.as_bytes());
    let mut state = 1u64;
    for round in 0..200 {
        state = state
            .wrapping_mul(0x5851_f42d_4c95_7f2d)
            .wrapping_add(0x1405_7b7e_f767_814f);
        let step = 100 + (state >> 33) % 15_000;
        ask(
            &mut client,
            &packet(if round % 3 == 2 { "vCont;c" } else { "bc" }),
            "$T05",
        );
        let both = [monitor(&format!("run-to {step}")), monitor("run-to"), monitor("info")].concat();
        client.write_all(&both).unwrap();
        let (mut said, mut part) = (String::new(), [0; 4096]);
        while said.matches("$OK#9a").count() < 3 {
            match client.read(&mut part) {
                Ok(count @ 1..) => said.push_str(&String::from_utf8_lossy(&part[..count])),
                other => panic!("{other:?} after {said}"),
            }
        }
        let said = expanded(&said);
        assert!(
            said.contains(&hex(&format!("to step {step}, and there it stands"))),
            "{said}"
        );
        assert!(
            said.contains(&hex(&format!("step {step} of 0 to "))),
            "round {round}, step {step}: {said}"
        );
        assert!(
            said.contains(&hex(&format!(" {step} steps"))),
            "round {round}, step {step}: {said}"
        );
    }
    client.write_all(&packet("k")).unwrap();
    guest.finish().must_end_with(0);
}

/// What a client is sent until its connection ends.
fn until_closed(client: &mut (impl Read + Write), bytes: &[u8]) -> String {
    // The connection may be closed before all of it is written.
    let _ = client.write_all(bytes);
    let mut said = Vec::new();
    let _ = client.read_to_end(&mut said);
    String::from_utf8_lossy(&said).into_owned()
}

/// Where a guest listens for gdb over TCP: it says so on its standard error.
fn tcp(folder: &Folder, options: &[&str]) -> (guest_tests::Running, u16) {
    let kernel = program(folder, &[0xeb, 0xfe]);
    // Any port that is free now.
    let port = std::net::TcpListener::bind("127.0.0.1:0")
        .unwrap()
        .local_addr()
        .unwrap()
        .port();
    let mut command = in_minivmm(&kernel);
    command.args(["--paused", "--serial", "null", "--gdb", &format!("tcp:{port}")]);
    command.arg("--allow-write").arg(folder.join(""));
    (guest_tests::start(command.args(options), LIMIT), port)
}

/// A client over TCP, once there is somebody who listens.
fn connect(port: u16) -> std::net::TcpStream {
    let limit = std::time::Instant::now() + LIMIT;
    loop {
        match std::net::TcpStream::connect(("127.0.0.1", port)) {
            Ok(client) => {
                client.set_read_timeout(Some(LIMIT)).unwrap();
                return client;
            }
            Err(error) => assert!(std::time::Instant::now() < limit, "{error}"),
        }
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
}

/// A command for the monitor as gdb sends it.
fn monitor(line: &str) -> Vec<u8> {
    packet(&format!("qRcmd,{}", minivmm::front::gdb::packets::hex(line.as_bytes())))
}

/// A web page can have a browser post to any port of this host, with any body.
// covers: gdb/strangers
#[test]
fn a_request_of_another_protocol_runs_nothing() {
    let folder = Folder::new("gdb");
    let (running, port) = tcp(&folder, &["--gdb-allow-files"]);
    let trace = folder.join("trace");
    let start = monitor(&format!("trace start {}", trace.display()));
    let request = |head: &str| [head.as_bytes(), &packet("?"), &start, &packet("k")].concat();
    for head in [
        "POST / HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: text/plain\r\n\r\n",
        "\r\n",
        "\0",
        "+GET /",
    ] {
        let mut client = connect(port);
        assert_eq!(until_closed(&mut client, &request(head)), "", "{head:?}");
        assert!(!trace.exists(), "{head:?}");
    }
    // In the middle of a conversation, too.
    let mut client = connect(port);
    client.write_all(&packet("?")).unwrap();
    let mut answer = [0; 5];
    client.read_exact(&mut answer).unwrap();
    assert_eq!(&answer, b"+$T05");
    let said = until_closed(&mut client, &[b"P", &start[..]].concat());
    assert!(!said.contains('+'), "no packet was taken: {said}");
    assert!(!trace.exists());
    // And it works for a debugger.
    let mut client = connect(port);
    let said = until_closed(&mut client, &[&start[..], &packet("k")].concat());
    assert!(said.contains("$OK") || said.contains("$O"), "{said}");
    running.finish().must_end_with(0);
    assert!(trace.join("trace.json").exists());
}

// covers: gdb/strangers
#[test]
fn commands_over_tcp_write_no_files_unless_they_may() {
    for (options, may) in [(&[][..], false), (&["--gdb-allow-files"], true)] {
        let folder = Folder::new("gdb");
        let (running, port) = tcp(&folder, options);
        let trace = folder.join("trace");
        let mut client = connect(port);
        let start = monitor(&format!("trace start {}", trace.display()));
        let said = until_closed(&mut client, &[&start[..], &monitor("info"), &packet("k")].concat());
        let refused = minivmm::front::gdb::packets::hex(b"--gdb-allow-files");
        let info = minivmm::front::gdb::packets::hex(b"model westmere");
        assert_eq!(said.contains(&refused), !may, "{said}");
        assert!(said.contains(&info), "{said}");
        running.finish().must_end_with(0);
        assert_eq!(trace.exists(), may);
    }
    // Over a socket, which has an owner.
    let guest = Guest::code(&[0xeb, 0xfe], &["--paused", "--serial", "null"]);
    let trace = guest.folder.join("trace");
    let start = monitor(&format!("trace start {}", trace.display()));
    ask(&mut guest.client(), &start, "$OK");
    assert!(trace.join("trace.json").exists());
}

/// Neither do those who connect and say nothing stop the guest or keep a debugger away, nor are there many of them.
// covers: gdb/strangers
#[test]
fn whoever_says_nothing_is_sent_away() {
    let guest = Guest::code(&[0xeb, 0xfe], &["--serial", "null"]);
    let silent = |_| guest.client();
    let mut few: Vec<UnixStream> = (0..4).map(silent).collect();
    few[0].write_all(b"$never finished").unwrap();
    // The guest runs, and somebody else is served.
    let mut client = guest.client();
    ask(&mut client, &packet("?"), "$T05");
    drop(client);
    let mut many: Vec<UnixStream> = (0..64).map(silent).collect();
    let threads = format!("/proc/{}/task", guest.running.id());
    let count = std::fs::read_dir(threads).unwrap().count();
    assert!(
        count <= minivmm::front::gdb::listen::MOST_WAITING + 8,
        "{count} threads"
    );
    for client in few.iter_mut().chain(&mut many) {
        assert_eq!(until_closed(client, b""), "");
    }
    let mut client = guest.client();
    ask(&mut client, &packet("?"), "$T05");
    let _ = client.write_all(&packet("k"));
    guest.finish().must_end_with(0);
}

// covers: bad-input/gdb
#[test]
fn a_debugger_that_cannot_be_waited_for_is_one_line() {
    let folder = Folder::new("gdb");
    let kernel = program(&folder, &[0xeb, 0xfe]);
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port();
    let there = folder.join("there");
    std::fs::write(&there, "precious").unwrap();
    let unix = format!("unix:{}", there.display());
    for (options, says) in [
        (vec!["--gdb", &format!("tcp:{port}")[..]], "the port is in use"),
        (vec!["--gdb", &unix], "exists already"),
        (vec!["--gdb", "unix:/nowhere/at/all"], "no such file"),
        (vec!["--gdb", "1234"], "not tcp:[HOST:]PORT or unix:PATH"),
        (vec!["--gdb", "tcp:1", "-s"], "cannot be used with"),
        (vec!["--gdb-allow-files"], "needs --gdb or -s"),
        (vec!["--paused"], "nobody could let the guest go on"),
    ] {
        let outcome = run(in_minivmm(&kernel).args(options).args(["--serial", "null"]), LIMIT).must_end_with(2);
        assert!(outcome.errors.contains(says), "{says}: {}", outcome.errors);
        assert_eq!(outcome.errors.trim_end().lines().count(), 1, "{}", outcome.errors);
    }
    assert_eq!(std::fs::read(&there).unwrap(), b"precious");
}

/// The library's side: a machine's end is reported to whoever waits for it.
// covers: gdb/attach
#[test]
fn the_end_of_the_machine_is_told() {
    let guest = Guest::code(&LOOP, &["--paused", "--serial", "null"]);
    let said = guest.gdb("continue\n");
    says(&said, &["exited with code 05"]);
    guest.finish().must_end_with(5);
}

// covers: gdb/reverse
#[test]
fn gdb_goes_back_in_time() {
    let guest = Guest::code(&LOOP, &["--paused", "--reverse", "--serial", "null"]);
    let said = guest.gdb(
        "hbreak *0x100034\ncontinue\nprint $rcx\ndelete\nreverse-stepi\nprint/x $rip\n\
         watch *(int *)0x200000\nreverse-continue\nprint/x $rip\nreverse-continue\nprint $rcx\ndelete\n\
         reverse-continue\nprint/x $rip\nhbreak *0x100034\ncontinue\nprint $rcx\ndelete\ndetach\n",
    );
    says(
        &said,
        &[
            "Breakpoint 1, 0x0000000000100034",
            "$1 = 0",
            "$2 = 0x100032",
            "Hardware watchpoint 2",
            "$3 = 0x100026",
            "Hardware watchpoint 2",
            "$4 = 2",
            "No more reverse-execution history",
            "$5 = 0x100020",
            "Breakpoint 3, 0x0000000000100034",
            "$6 = 0",
            "detached",
        ],
    );
    guest.finish().must_end_with(5);
}

/// mov ecx, 1000; again: inc dword [200000H]; cmp ecx, 77; jne fine; mov dword [200010H], DEAD0000H; fine: loop again;
/// mov eax, [200010H]; jmp eax
const CRASH: [u8; 35] = [
    0xb9, 0xe8, 3, 0, 0, 0xff, 0x05, 0, 0, 0x20, 0, 0x83, 0xf9, 77, 0x75, 10, 0xc7, 0x05, 0x10, 0, 0x20, 0, 0, 0, 0xad,
    0xde, 0xe2, 0xe9, 0xa1, 0x10, 0, 0x20, 0, 0xff, 0xe0,
];

// covers: gdb/reverse
#[test]
fn gdb_walks_back_from_a_crash_to_the_store_that_caused_it() {
    let guest = Guest::code(&CRASH, &["--reverse", "--paused", "--serial", "null"]);
    let said = guest.gdb(
        "continue\n\
         watch *(int *)0x200010\nreverse-continue\nprint/x $rip\nprint $rcx\n\
         reverse-stepi\nprint/x $rip\nstepi\nprint/x $rip\ndelete\n\
         break *0x100025\nreverse-continue\nprint $rcx\nreverse-continue\nprint $rcx\ncontinue\nprint $rcx\ndelete\n\
         reverse-continue\nprint/x $rip\nprint *(int *)0x200000\n\
         continue\nprint *(int *)0x200000\ncontinue\nreverse-stepi\nkill\n",
    );
    says(
        &said,
        &[
            "SIGABRT",
            "Hardware watchpoint 1: *(int *)0x200010",
            "Old value = -559087616",
            "New value = 0",
            "$1 = 0x100030",
            "$2 = 77",
            "$3 = 0x10002e",
            "$4 = 0x100030",
            "Breakpoint 2",
            "$5 = 77",
            "Breakpoint 2",
            "$6 = 78",
            "Breakpoint 2",
            "$7 = 77",
            "No more reverse-execution history",
            "$8 = 0x100020",
            "$9 = 0",
            "SIGABRT",
            "$10 = 1000",
            "No more reverse-execution history",
        ],
    );
    guest.finish().must_end_with(0);
}

// covers: gdb/reverse
#[test]
fn without_reverse_gdb_is_told_that_there_is_no_way_back() {
    let guest = Guest::code(&LOOP, &["--paused", "--serial", "null"]);
    let said = guest.gdb("stepi\nreverse-stepi\nkill\n");
    says(&said, &["Target remote does not support this command."]);
    guest.finish().must_end_with(5);
}

/// lgdt [100040H]; mov eax, 8; jmp to itself; at 100040H the table's place, behind it code and data of 32 bits and of CPL 3.
const TABLES: [u8; 72] = {
    let mut bytes = [0; 72];
    let code = [0x0f, 0x01, 0x15, 0x40, 0, 0x10, 0, 0xb8, 8, 0, 0, 0, 0xeb, 0xfe];
    let table: [u64; 4] = [0, 0x00cf_9b00_0000_ffff, 0x00cf_9312_3456_ffff, 0x00cf_f300_0000_ffff];
    let mut at = 0;
    while at < code.len() {
        bytes[at] = code[at];
        at += 1;
    }
    // Limit and base, at 100040H, then the table at 100048H.
    (bytes[0x20], bytes[0x22], bytes[0x24]) = (31, 0x48, 0x10);
    at = 0;
    while at < 32 {
        bytes[0x28 + at] = (table[at / 8] >> (at % 8 * 8)) as u8;
        at += 1;
    }
    bytes
};

/// As the guest's own instructions would, or not at all.
// covers: gdb/control-registers
#[test]
fn selectors_and_control_registers_are_loaded_or_refused() {
    let guest = Guest::code(&TABLES, &["--paused", "--serial", "null"]);
    let tried = |what: &str| {
        format!("python\ntry:\n  gdb.execute('{what}')\nexcept gdb.error as e:\n  print('refused:', e)\nend\n")
    };
    let script = [
        "stepi\nset $ds = 0\nset $ds = 0x10\nmaint flush register-cache\nprint/x $ds_base\n",
        &tried("set $ds = 0x20"),
        &tried("set $ss = 0x1b"),
        &tried("set $cs = 0x10"),
        "print/x $ds\nset $es = 0\nset $cr4 = 0x20\nset $cr3 = 0x5000\nset $efer = 0x100\n",
        &tried("set $cr4 = -1"),
        &tried("set $cr0 = 0x80000000"),
        &tried("set $efer = 2"),
        &tried("set $cpl = 3"),
        &tried("set $idtr_limit = 3"),
        "print/x $cr4\nprint/x $cr0\nset $cr0 = 0x11\nset $dr0 = 0x10002c\nset $dr7 = 1\nprint/x $dr7\n\
         stepi\nprint $rax\ncontinue\nkill\n",
    ]
    .concat();
    let said = guest.gdb(&script);
    says(
        &said,
        &[
            "$1 = 0x123456",
            "refused: ",
            "refused: ",
            "refused: ",
            "$2 = 0x10",
            "refused: ",
            "refused: ",
            "refused: ",
            "refused: ",
            "refused: ",
            "$3 = 0x20",
            "$4 = 0x11",
            "$5 = 0x401",
            // The guest's own breakpoint, which it has from us: #DB without a handler.
            "SIGABRT",
        ],
    );
    assert!(said.contains("triple fault"), "{said}");
    guest.finish().must_end_with(0);
}

/// Exceptions by name, at their handlers.
// covers: gdb/catch
#[test]
fn exceptions_are_caught() {
    let guest = Guest::start(&image("dr"), &["--paused", "--serial", "null", "--memory", "64M"]);
    let said = guest.gdb(
        "monitor catch DB\nmonitor catch 3\nmonitor catch\ncontinue\nprint $_siginfo\n\
         continue\nmonitor catch none\nmonitor catch 6\ncontinue\nmonitor catch none\ncontinue\n",
    );
    says(
        &said,
        &["vector 1 on CPU 0; at its handler", "vector 6 on CPU 0; at its handler"],
    );
    says(&said, &["SIGTRAP", "SIGTRAP", "SIGILL", "exited with code 01"]);
    says(&said, &["caught: 1 (#DB), 3 (#BP)"]);
    guest.finish().must_end_with(1);
}

/// A CPU begins in real mode: breakpoints are linear addresses there, and RIP is the offset.
// covers: gdb/real-mode
#[test]
fn code_of_16_bits_is_debugged() {
    // With a target of 64 bits gdb takes no other architecture; it shows the code as one of 32 either way.
    for (model, architecture) in [("p6", "i8086"), ("westmere", "auto")] {
        let options = [
            "--cpus",
            "2",
            "--cmdline",
            "2",
            "--memory",
            "64M",
            "--serial",
            "null",
            "--paused",
        ];
        let guest = Guest::start(Path::new(SMP), &[&options[..], &["--cpu-model", model]].concat());
        // 0: cli; 1: mov ax, cs; 3: mov ds, ax; 5: lgdt [..]; B: mov eax, cr0; E: or al, 1; 10: mov cr0, eax; 13: jmp 8:..
        let said = guest.gdb(&format!(
            "hbreak *0x8000\ncontinue\nset architecture {architecture}\nprint/x $cs\nprint/x $cs_base\nprint/x $pc\n\
             x/1xb $cs_base+$pc\nstepi\nstepi\nprint/x $ax\nstepi\nprint/x $ds_base\n\
             break *0x800b\ncontinue\nprint/x $pc\nprint $cr0 & 1\nset $ds = 0x1234\nmaint flush register-cache\nprint/x $ds_base\n\
             stepi\nstepi\nstepi\nprint $cr0 & 1\nprint/x $cs\nstepi\nprint/x $cs\nprint/x $cs_base\nkill\n"
        ));
        says(
            &said,
            &[
                "$1 = 0x800",
                "$2 = 0x8000",
                "$3 = 0x0",
                "0x8000:\t0xfa",
                "$4 = 0x800",
                "$5 = 0x8000",
                "$6 = 0xb",
                "$7 = 0",
                "$8 = 0x12340",
                "$9 = 1",
                "$10 = 0x800",
                "$11 = 0x8",
                "$12 = 0x0",
            ],
        );
        guest.finish().must_end_with(0);
    }
}
