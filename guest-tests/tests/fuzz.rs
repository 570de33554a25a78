//! Every parser of untrusted bytes with thousands of damaged inputs. `guest-tests/fuzz` lets a real fuzzer go on from there.

use guest_tests::fuzz::{TARGETS, mutate};
use std::path::Path;
use std::time::{Duration, Instant};

/// Inputs that libFuzzer found, as `cargo xtask fuzz --keep` has kept them.
fn kept(name: &str) -> Vec<Vec<u8>> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../resources/fuzz")
        .join(name);
    let Ok(entries) = std::fs::read_dir(folder) else {
        return Vec::new();
    };
    let mut paths: Vec<_> = entries.map(|entry| entry.unwrap().path()).collect();
    paths.sort();
    paths.iter().map(|path| std::fs::read(path).unwrap()).collect()
}

/// Runs one target with mutations of its seeds and of what is kept.
fn hammer(name: &str) {
    let target = TARGETS.iter().find(|target| target.name == name).unwrap();
    // Two runs of a machine of two CPUs, and a search through a guest's memory, take longer than the rest.
    let slower = match name {
        "guest" => 40,
        "linux" | "session" => 8,
        _ => 1,
    };
    let rounds = if guest_tests::full() { 20_000 } else { 4_000 } / slower;
    let mut state = 0x6d69_6e69_766d_6d21_u64;
    let mut random = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.wrapping_mul(0x2545_f491_4f6c_dd1d)
    };
    let mut seeds = (target.seeds)();
    for seed in &seeds {
        (target.run)(seed);
        // Every length that a file could have been cut to, up to the end of its headers.
        let lens = (0..seed.len().min(0x300)).step_by(slower);
        lens.for_each(|len| (target.run)(&seed[..len]));
    }
    let kept = kept(name);
    kept.iter().for_each(|input| (target.run)(input));
    seeds.extend(kept);
    for round in 0..rounds {
        let seed = &seeds[round % seeds.len()];
        let bytes = mutate(seed, &mut random);
        let start = Instant::now();
        (target.run)(&bytes);
        assert!(
            start.elapsed() < Duration::from_secs(10),
            "{name}: round {round} takes too long"
        );
    }
}

// covers: fuzz/bzimage
#[test]
fn no_bytes_upset_the_bzimage_loader() {
    hammer("bzimage");
}

// covers: fuzz/multiboot
#[test]
fn no_bytes_upset_the_multiboot_loader() {
    hammer("multiboot");
}

// covers: fuzz/initrd
#[test]
fn no_bytes_upset_the_initrd_check() {
    hammer("initrd");
}

// covers: fuzz/command-line
#[test]
fn no_words_upset_the_command_line() {
    hammer("command_line");
}

// covers: fuzz/guest-command-line
#[test]
fn no_bytes_upset_the_guest_s_command_line() {
    hammer("guest_command_line");
}

// covers: fuzz/decode, rtm/fuzz
#[test]
fn no_code_upsets_the_engine() {
    hammer("instructions");
}

// covers: fuzz/elf
#[test]
fn no_bytes_upset_the_elf_loader() {
    hammer("elf");
}

// covers: fuzz/virtqueue
#[test]
fn no_driver_upsets_the_virtio_devices() {
    hammer("virtqueue");
}

// covers: fuzz/collect
#[test]
fn no_stream_upsets_what_collects_files() {
    hammer("collect");
}

// covers: fuzz/counters
#[test]
fn no_registers_or_areas_upset_the_counters() {
    hammer("counters");
}

// covers: fuzz/pt-packets
#[test]
fn no_bytes_upset_the_packet_decoder() {
    hammer("pt_packets");
}

// covers: fuzz/host-trace
#[test]
fn no_trace_of_a_host_s_upsets_the_trace_unit() {
    hammer("host_trace");
}

// covers: fuzz/pt-flow
#[test]
fn no_trace_upsets_the_flow_decoder() {
    hammer("pt_flow");
}

// covers: fuzz/branches
#[test]
fn no_guest_upsets_the_units_that_watch_branches() {
    hammer("branches");
}

// covers: pt/fuzz
#[test]
fn no_guest_upsets_the_trace_unit() {
    hammer("trace");
}

// covers: fuzz/trace-folder
#[test]
fn no_files_upset_the_trace_reader() {
    hammer("trace_folder");
}

// covers: fuzz/registers
#[test]
fn no_registers_upset_the_machine() {
    hammer("registers");
}

// covers: fuzz/gdb
#[test]
fn no_client_upsets_the_debugger_s_side() {
    hammer("gdb");
}

// covers: fuzz/linux
#[test]
fn no_memory_upsets_the_look_for_a_linux() {
    hammer("linux");
}

// covers: fuzz/session
#[test]
fn no_session_upsets_a_replay() {
    hammer("session");
}

// covers: fuzz/symbols
#[test]
fn no_symbols_upset_their_reader() {
    hammer("symbols");
}

// covers: fuzz/model-file
#[test]
fn no_file_upsets_the_cpu_model() {
    hammer("model_file");
}

// covers: fuzz/trace-header
#[test]
fn no_header_upsets_the_trace_reader() {
    hammer("trace_header");
}

// covers: fuzz/control
#[test]
fn no_line_upsets_the_monitor() {
    hammer("control");
}

// covers: fuzz/guest
#[test]
fn no_guest_of_two_cpus_ends_differently_twice() {
    hammer("guest");
}

/// Each target has a test here.
// covers: fuzz/libfuzzer
#[test]
fn every_target_is_tried() {
    let source = std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fuzz.rs")).unwrap();
    for target in TARGETS {
        assert!(
            source.contains(&format!("hammer(\"{}\")", target.name)),
            "{}",
            target.name
        );
    }
}
