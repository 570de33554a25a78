//! Files of the host's side that somebody else may have written: sessions, symbols, models of CPUs, a trace's header.

use std::ffi::OsString;
use std::fs;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};

use minivmm::cli;
use minivmm::config::RecordOptions;
use minivmm::model;
use minivmm::timeline::session::Session;
use minivmm::{Console, MachineConfig, Run, SerialTarget};
use serde_json::Value;
use trace::Header;
use trace::symbols::{ElfFile, Origin, SymbolFile, SymbolTable, SymbolsError, write_elf};

/// What is said of a file that is refused has to be one line. What a terminal would obey in it is replaced where it is shown.
fn line(error: impl std::fmt::Display) {
    let text = error.to_string();
    assert!(!text.is_empty() && text.lines().count() == 1, "{text:?}");
}

/// A folder of this process, with a number.
fn folder() -> PathBuf {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    let folder = std::env::temp_dir().join(format!("minivmm-fuzz-files-{}-{number}", std::process::id()));
    fs::create_dir(&folder).expect("a folder");
    folder
}

/// The files of a session: two bytes have the length of the first.
const SESSION_FILES: [&str; 2] = ["session.json", "log"];

/// A directory of `--record`, as whoever hands it over may have made it: it is refused, or what it says of a command line is read as one.
pub fn session(bytes: &[u8]) {
    let Some((len, rest)) = bytes.split_first_chunk() else {
        return;
    };
    let (first, second) = rest.split_at(usize::from(u16::from_le_bytes(*len)).min(rest.len()));
    let folder = folder();
    for (name, content) in SESSION_FILES.iter().zip([first, second]) {
        fs::write(folder.join(name), content).expect("a file");
    }
    match Session::open(&folder) {
        Ok((session, entries, end, _)) => {
            let words = std::iter::once(OsString::from("minivmm")).chain(session.arguments());
            if let Err(error) = cli::parse(words) {
                line(error);
            }
            session.directory();
            let inside = entries.windows(2).all(|pair| pair[0].at.steps <= pair[1].at.steps)
                && entries.last().is_none_or(|entry| entry.at.steps <= end.steps);
            assert!(inside, "what a log has comes in order, and before its end");
        }
        Err(error) => line(error),
    }
    fs::remove_dir_all(&folder).expect("it can be removed");
}

/// A session of a guest that ran to its end.
pub fn sessions() -> Vec<Vec<u8>> {
    let folder = folder();
    let record = folder.join("session");
    let words = ["--kernel", "k", "--cmdline", "a b"];
    let config = MachineConfig {
        memory: 4 << 20,
        max_instructions: Some(100_000),
        serial: SerialTarget::Buffer,
        record: Some(RecordOptions {
            folder: record.clone(),
            arguments: words.map(OsString::from).to_vec(),
        }),
        ..MachineConfig::new(crate::HELLO)
    };
    let mut vm = Run::new(&config).expect("a machine");
    let mut console = Console::open(&SerialTarget::Buffer, &[], vm.line()).expect("a console");
    vm.run(&mut console).expect("a run");
    drop(vm);
    let [first, second] = SESSION_FILES.map(|name| fs::read(record.join(name)).expect("a file of the session"));
    fs::remove_dir_all(&folder).expect("it can be removed");
    vec![[&(first.len() as u16).to_le_bytes()[..], &first, &second].concat()]
}

/// A file of symbols, of each kind that is known, for a kernel and for a program.
pub fn symbols(bytes: &[u8]) {
    let parsed = SymbolTable::parse(&String::from_utf8_lossy(bytes)).map(|symbols| SymbolFile {
        symbols,
        build_id: None,
    });
    let elf = ElfFile::parse(bytes).map(|ElfFile { symbols, build_id }| SymbolFile { symbols, build_id });
    let own = SymbolTable::parse("ffffffff81000000 T _text\nffffffff81000040 T start\n").expect("symbols");
    for file in [parsed, elf] {
        let file = match file {
            Ok(file) => file,
            Err(error) => {
                line(error);
                continue;
            }
        };
        look_up(&file.symbols);
        let id = file.build_id.clone();
        if let Ok(elf) = write_elf(&file.symbols, id.as_deref()) {
            // Without functions there is nothing to be read.
            match ElfFile::parse(&elf) {
                Ok(_) | Err(SymbolsError::Empty { .. }) => {}
                Err(error) => panic!("what we write we read: {error}"),
            }
        }
        let origin = Origin {
            slide: Some(0x1000_0000),
            build_id: None,
            symbols: Some(&own),
        };
        match file.resolve(origin) {
            Ok(table) => look_up(&table),
            Err(error) => line(error),
        }
    }
    for at in [None, Some(0x5555_5555_4000)] {
        match ElfFile::program(bytes, at, "program") {
            Ok(table) => look_up(&table),
            Err(error) => line(error),
        }
    }
}

fn look_up(table: &SymbolTable) {
    let table = table.clone().sorted();
    for symbol in table.iter().take(100) {
        table.address(symbol.name);
        assert!(!table.describe(symbol.address).is_empty());
        table.find(symbol.address.wrapping_sub(1));
    }
    for n in 0..table.functions().min(100) {
        let start = table.function(n).map(|symbol| symbol.address);
        assert!(
            start.is_some_and(|start| start <= table.end(n)),
            "a function ends before it begins"
        );
    }
    table.lookup(u64::MAX);
}

/// A System.map with a module in it, a program, and symbols as an ELF file.
pub fn symbol_files() -> Vec<Vec<u8>> {
    let map = "ffffffff81000000 T _text\nffffffff81000040 T start\nffffffff81000100 d data\nffffffffc0000000 t init [module]\n";
    let table = SymbolTable::parse(map).expect("symbols").sorted();
    vec![
        map.as_bytes().to_vec(),
        write_elf(&table, Some("0123456789abcdef0123456789abcdef01234567")).expect("an ELF file"),
        fs::read(crate::HELLO).expect("the guest is there"),
    ]
}

/// A file for `--cpu-model`. One that is taken makes a model whose CPUID and registers can be asked for.
pub fn model_file(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else {
        return;
    };
    match model::parse(text) {
        Ok(model) => {
            model.features();
            assert!(!model.name.is_empty() && !model.name.contains(char::is_control));
        }
        Err(error) => line(error),
    }
}

/// The example, and one that changes a row of each kind.
pub fn model_files() -> Vec<Vec<u8>> {
    let example = include_str!("../../../resources/cpu-model.toml");
    vec![
        example.as_bytes().to_vec(),
        b"base = \"haswell\"\nname = \"x\"\n".to_vec(),
    ]
}

/// The header in a trace's `trace.json`, with a checksum that is right: what it says is a header's, or refused.
pub fn trace_header(bytes: &[u8]) {
    let Ok(header) = serde_json::from_slice::<Value>(bytes) else {
        return;
    };
    let check = crc32fast::hash(header.to_string().as_bytes());
    let file = serde_json::json!({
        "format": "minivmm-trace",
        "version": trace::format::VERSION,
        "check": check,
        "header": header,
    });
    match Header::parse(&file.to_string()) {
        Ok(header) => assert_eq!(Header::parse(&header.text()).ok(), Some(header)),
        Err(error) => line(error),
    }
}

/// The header of a trace that was ended, and of one that was not.
pub fn trace_headers() -> Vec<Vec<u8>> {
    let header = |end: Value| {
        serde_json::json!({
            "model": "westmere", "tsc_khz": 2_666_660, "cpus": 2, "kernel": "vmlinuz", "filters": ["kernel"],
            "start": "start_kernel", "stop": null, "buffer": 65536, "rtit_ctl": 0x2105, "end": end,
        })
        .to_string()
        .into_bytes()
    };
    let end = serde_json::json!({"reason": "the guest powered off", "steps": 1000, "ticks": 2000, "complete": true});
    vec![header(end), header(Value::Null)]
}
