//! What a processor writes of a guest and its host together: the guest's packets with PIP.NR set, and a host's between a VM exit
//! and the next entry. SDM Vol. 3C 33.5 "Tracing in VMX Operation", with no VMCS control set.

use crate::Random;
use pt_packet::{ExecMode, ItemSize, LastIp, MAX_LEN, Packet, Tnt, encode};

/// CR3 of the host.
const CR3: u64 = 0x0123_4000;
/// Its VMCS.
const VMCS: u64 = 0x7_7000;
/// Where its code is, some of it where the guest has code, too.
const CODE: [u64; 3] = [0xffff_ffff_c000_0000, 0x0000_5555_0040_0000, 0xffff_ffff_8100_0000];

/// The trace of both.
#[derive(Debug)]
pub struct Host {
    /// The trace so far.
    pub out: Vec<u8>,
    last_ip: LastIp,
    random: Random,
    time: u64,
    timing: bool,
}

impl Host {
    /// The host is about to enter a guest for the first time, which has this CR3.
    pub fn new(seed: u64, cr3: u64, timing: bool) -> Host {
        let mut host = Host {
            out: Vec::new(),
            last_ip: LastIp::new(),
            random: Random(seed),
            time: 1 << 30,
            timing,
        };
        let ip = host.ip();
        host.psb(Some(ip), ExecMode::Bits64, CR3, false);
        host.put(Packet::TipPge(Some(ip)));
        host.works();
        host.put(Packet::Pip { cr3, non_root: true });
        host
    }

    /// A packet of whoever runs.
    pub fn put(&mut self, packet: Packet) {
        let mut bytes = [0; MAX_LEN];
        let len = encode(&packet, &mut self.last_ip, &mut bytes);
        self.out.extend(&bytes[..len]);
    }

    fn ip(&mut self) -> u64 {
        *self.random.of(&CODE) + (self.random.draw() & 0xff_ffff)
    }

    fn mode(&mut self, mode: ExecMode) {
        let interrupts = false;
        self.put(Packet::ModeExec { mode, interrupts });
    }

    /// PSB and the state of whoever runs.
    pub fn psb(&mut self, ip: Option<u64>, mode: ExecMode, cr3: u64, non_root: bool) {
        self.put(Packet::Psb);
        if self.timing {
            self.time += 1000;
            self.put(Packet::Tsc(self.time));
            self.put(Packet::Tma {
                ctc: self.time as u16,
                fast: 1,
            });
        }
        self.put(Packet::Cbr(30));
        self.put(Packet::Pip { cr3, non_root });
        self.put(Packet::Vmcs(VMCS));
        self.mode(mode);
        if ip.is_some() {
            self.put(Packet::Fup(ip));
        }
        self.put(Packet::PsbEnd);
    }

    /// An exit in front of the guest's instruction at `ip`, and the entry there. `None`: where no packets are generated.
    pub fn run(&mut self, ip: Option<u64>, mode: ExecMode, cr3: u64) {
        if ip.is_some() {
            self.put(Packet::Fup(ip));
        }
        let non_root = false;
        self.put(Packet::Pip { cr3: CR3, non_root });
        if mode != ExecMode::Bits64 {
            self.mode(ExecMode::Bits64);
        }
        let at = Some(self.ip());
        self.put(if ip.is_some() {
            Packet::Tip(at)
        } else {
            Packet::TipPge(at)
        });
        self.works();
        if self.random.one_in(4) {
            self.put(Packet::Vmcs(VMCS));
        }
        let non_root = true;
        self.put(Packet::Pip { cr3, non_root });
        if mode != ExecMode::Bits64 {
            self.mode(mode);
        }
        let nowhere = self.random.one_in(2).then_some(0x4444);
        self.put(match ip {
            Some(_) => Packet::Tip(ip),
            None => Packet::TipPgd(nowhere),
        });
    }

    /// What the host does between an exit and the next entry.
    fn works(&mut self) {
        for _ in 0..self.random.below(10) {
            let (bits, ip) = (self.random.draw(), Some(self.ip()));
            match self.random.below(12) {
                0 => self.put(Packet::ShortTnt(Tnt::from_bits(bits & 0x3f | 0x40).unwrap())),
                1 => self.put(Packet::LongTnt(Tnt::from_bits(bits & 0x7f_ffff | 0x80_0000).unwrap())),
                2 | 3 => self.put(Packet::Tip(ip)),
                4 => self.psb(ip, ExecMode::Bits64, CR3, false),
                5 => {
                    self.put(Packet::Fup(ip));
                    self.put(Packet::Tip(ip.map(|ip| ip + 0x1000)));
                }
                6 => {
                    // Its thread is put aside for another one.
                    self.put(Packet::Fup(ip));
                    self.put(Packet::TipPgd(None));
                    self.psb(None, ExecMode::Bits64, CR3, false);
                    self.put(Packet::TipPge(ip));
                }
                7 => self.put(Packet::Pip {
                    cr3: CR3 + 0x1000,
                    non_root: false,
                }),
                8 => {
                    let size = ItemSize::Eight;
                    self.put(Packet::Ptw {
                        value: bits,
                        size,
                        ip: true,
                    });
                    self.put(Packet::Fup(ip));
                }
                9 => self.put(Packet::Vmcs(VMCS + 0x1000)),
                10 if self.timing => self.put(Packet::Cyc(bits & 0xfff)),
                _ => self.put(Packet::Cbr(bits as u8 | 1)),
            }
        }
    }
}
