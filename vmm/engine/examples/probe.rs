//! How fast four small programs run: arithmetic on registers, calls and comparisons, stores in a row, pointers.
//!
//! The programs are C, compiled by the host's `gcc` when the probe runs (without vector instructions) and placed in the memory
//! of a 64-bit machine with identity paging. Times are the thread's own, so that other work on the host counts little. Arguments are the numbers of the programs to run; none means all of them. The second figure is with every
//! branch recorded, for a watcher that throws the records away.
#![allow(missing_docs)] // The test machine is shared with the tests, which document what is not plain.

#[path = "../tests/rig/mod.rs"]
mod rig;

use std::process::Command;
use std::time::Instant;

use engine::Exit;
use engine::bus::{Bus, MsrFault, Processor, Watch};
use rig::{CODE, Nothing, Rig, STACK};
use x86::watch::{Interest, Recorded};

/// The rig's bus, and a watcher that has branches recorded and throws the records away if `self.0`.
struct Recording(bool);

impl Watch for Recording {
    fn interest(&mut self, _: &mut dyn Processor) -> Interest {
        Interest {
            branches: Recorded::All.when(self.0),
            ..Interest::NOTHING
        }
    }
}

impl Bus for Recording {
    fn read(&mut self, gpa: u64, size: u8, now: u64) -> u64 {
        Nothing.read(gpa, size, now)
    }
    fn write(&mut self, _: u64, _: u8, _: u64, _: u64) {}
    fn port_read(&mut self, port: u16, size: u8, now: u64) -> u32 {
        Nothing.port_read(port, size, now)
    }
    fn port_write(&mut self, _: u16, _: u8, _: u32, _: u64) {}
    fn read_msr(&mut self, msr: u32, cpu: &mut dyn Processor) -> Result<u64, MsrFault> {
        Nothing.read_msr(msr, cpu)
    }
    fn write_msr(&mut self, msr: u32, value: u64, cpu: &mut dyn Processor) -> Result<(), MsrFault> {
        Nothing.write_msr(msr, value, cpu)
    }
    fn cpuid(&mut self, leaf: u32, subleaf: u32) -> [u32; 4] {
        Nothing.cpuid(leaf, subleaf)
    }
    fn tsc(&mut self, now: u64) -> u64 {
        Nothing.tsc(now)
    }
    fn cr8(&mut self) -> u64 {
        0
    }
    fn set_cr8(&mut self, _: u64) {}
    fn random(&mut self) -> u64 {
        Nothing.random()
    }
    fn watch(&mut self) -> Option<&mut dyn Watch> {
        Some(self)
    }
}

/// Entered with the program's number and its repetitions as C arguments; the result comes back in RAX.
const SOURCE: &str = r#"
typedef unsigned char u8; typedef unsigned int u32; typedef unsigned long long u64;
#define HEAP 0x300000

static inline u32 turn(u32 x, int n) { return x >> n | x << (32 - n); }

/* A block cipher's kind of work: additions, rotations and exclusive-ors on eight words and a schedule. */
__attribute__((noinline)) static void mix(u32 *state, const u32 *input) {
    u32 w[64], s[8];
    for (int i = 0; i < 16; i++) w[i] = __builtin_bswap32(input[i]);
    for (int i = 16; i < 64; i++) {
        u32 p = w[i - 15], q = w[i - 2];
        w[i] = w[i - 16] + (turn(p, 7) ^ turn(p, 18) ^ p >> 3) + w[i - 7] + (turn(q, 17) ^ turn(q, 19) ^ q >> 10);
    }
    for (int i = 0; i < 8; i++) s[i] = state[i];
    for (int i = 0; i < 64; i++) {
        u32 e = s[4], a = s[0];
        u32 one = s[7] + (turn(e, 6) ^ turn(e, 11) ^ turn(e, 25)) + ((e & s[5]) ^ (~e & s[6])) + i * 0x9e3779b9u + w[i];
        u32 two = (turn(a, 2) ^ turn(a, 13) ^ turn(a, 22)) + ((a & s[1]) ^ (a & s[2]) ^ (s[1] & s[2]));
        s[7] = s[6]; s[6] = s[5]; s[5] = e; s[4] = s[3] + one;
        s[3] = s[2]; s[2] = s[1]; s[1] = a; s[0] = one + two;
    }
    for (int i = 0; i < 8; i++) state[i] += s[i];
}

__attribute__((noinline)) static int order(u32 a, u32 b) { return a < b ? -1 : a > b; }

__attribute__((noinline)) static void sort(u32 *v, long first, long last, int (*cmp)(u32, u32)) {
    while (first < last) {
        long i = first, j = last;
        u32 middle = v[(first + last) / 2];
        do {
            while (cmp(v[i], middle) < 0) i++;
            while (cmp(v[j], middle) > 0) j--;
            if (i <= j) { u32 t = v[i]; v[i++] = v[j]; v[j--] = t; }
        } while (i <= j);
        sort(v, first, j, cmp);
        first = i;
    }
}

struct entry { struct entry *next; u64 key, sum; };

static inline u64 place(u64 key) { return key * 0x9e3779b97f4a7c15ull >> 54; }

__attribute__((noinline)) static struct entry *look_up(struct entry **table, u64 key) {
    struct entry *e = table[place(key)];
    while (e && e->key != key) e = e->next;
    return e;
}

u64 start(u64 which, u64 n) {
    u64 result = 0;
    if (which == 0) {
        u32 state[8], *input = (u32 *)HEAP;
        for (int i = 0; i < 8; i++) state[i] = i;
        for (int i = 0; i < 16; i++) input[i] = 0x01010101u * i;
        while (n--) mix(state, input);
        result = state[0];
    } else if (which == 1) {
        u32 *v = (u32 *)HEAP, x = 12345;
        for (u64 i = 0; i < n; i++) v[i] = x = x * 1103515245 + 12345;
        sort(v, 0, n - 1, order);
        for (u64 i = 1; i < n; i++) if (v[i - 1] > v[i]) return -1;
        result = v[n / 2];
    } else if (which == 2) {
        volatile u8 *sieve = (volatile u8 *)HEAP;
        const long limit = 1000000;
        while (n--) {
            result = 0;
            for (long i = 0; i < limit; i += 8) *(volatile u64 *)(sieve + i) = 0;
            for (long i = 2; i < limit; i++) {
                if (sieve[i]) continue;
                result++;
                for (long k = i * i; k < limit; k += i) sieve[k] = 1;
            }
        }
    } else {
        struct entry **table = (struct entry **)HEAP, *pool = (struct entry *)(HEAP + 0x10000), *e;
        u64 x = 1, used = 0;
        for (int i = 0; i < 1024; i++) table[i] = 0;
        for (u64 i = 0; i < n; i++) {
            x ^= x << 13; x ^= x >> 7; x ^= x << 17;
            u64 key = x & 8191;
            if (!(e = look_up(table, key))) {
                e = &pool[used++];
                e->key = key; e->sum = 0; e->next = table[place(key)];
                table[place(key)] = e;
            }
            e->sum += i;
            result += e->sum;
        }
    }
    return result;
}
"#;

const PROGRAMS: [(&str, u64); 4] = [("mix", 100_000), ("sort", 400_000), ("sieve", 60), ("hash", 3_000_000)];

/// Where the programs return to: a HLT.
const EXIT: u64 = 0x8000;

fn compile() -> std::io::Result<Vec<u8>> {
    let folder = std::env::temp_dir().join(format!("probe-{}", std::process::id()));
    std::fs::create_dir_all(&folder)?;
    let (source, image) = (folder.join("probe.c"), folder.join("probe.bin"));
    // `start` goes first, so that the image's first byte is its.
    let entry = "__asm__(\".section .text.0,\\\"ax\\\"; jmp start; .text\");";
    std::fs::write(&source, format!("{entry}\n{SOURCE}"))?;
    let script = folder.join("probe.ld");
    std::fs::write(
        &script,
        format!(
            "SECTIONS {{ . = {CODE:#x}; .all : {{ *(.text.0) *(.text*) *(.rodata*) *(.data*) }} /DISCARD/ : {{ *(.eh_frame) *(.note*) *(.comment) }} }}"
        ),
    )?;
    let status = Command::new("gcc")
        .args([
            "-O2",
            "-mgeneral-regs-only",
            "-ffreestanding",
            "-fno-pic",
            "-fno-stack-protector",
        ])
        .args([
            "-fcf-protection=none",
            "-nostdlib",
            "-static",
            "-Wl,--oformat=binary",
            "-Wl,--build-id=none",
        ])
        .arg(format!("-Wl,-T,{}", script.display()))
        .arg("-o")
        .args([&image, &source])
        .status()?;
    let code = std::fs::read(&image);
    std::fs::remove_dir_all(&folder)?;
    if !status.success() {
        return Err(std::io::Error::other("gcc failed"));
    }
    code
}

/// Seconds that this thread has run, or else the time of day.
fn seconds(start: Instant) -> f64 {
    std::fs::read_to_string("/proc/thread-self/schedstat")
        .ok()
        .and_then(|s| s.split(' ').next()?.parse::<f64>().ok())
        .map_or_else(|| start.elapsed().as_secs_f64(), |ns| ns * 1e-9)
}

fn main() -> std::io::Result<()> {
    let (code, start) = (compile()?, Instant::now());
    let chosen: Vec<usize> = std::env::args().skip(1).filter_map(|a| a.parse().ok()).collect();
    for (which, (name, n)) in PROGRAMS.iter().enumerate() {
        if !chosen.is_empty() && !chosen.contains(&which) {
            continue;
        }
        let (mut best, mut steps, mut result) = ([f64::MAX; 2], 0, 0);
        for round in 0..6 {
            let recorded = round % 2;
            let mut rig = Rig::new();
            rig.write(CODE, &code);
            rig.write(EXIT, &[0xf4]);
            rig.write(STACK - 8, &EXIT.to_le_bytes());
            let mut s = rig.cpu.state();
            (s.gpr[7], s.gpr[6], s.gpr[4]) = (which as u64, *n, STACK - 8);
            rig.cpu.set_state(&s);
            let began = seconds(start);
            let exit = rig.engine.run(&mut rig.cpu, &mut Recording(recorded == 1), 1 << 40);
            best[recorded] = best[recorded].min(seconds(start) - began);
            assert_eq!(exit, Exit::Halt, "{:x?}", rig.cpu.state());
            (steps, result) = (rig.cpu.steps(), rig.cpu.state().gpr[0]);
        }
        println!(
            "{name:6} {:.3} s, {steps} steps, {:4.0} MIPS, recorded {:.3} s ({:.2}), result {result:x}",
            best[0],
            steps as f64 / best[0] / 1e6,
            best[1],
            best[1] / best[0],
        );
    }
    Ok(())
}
