//! A small encoder: what a processor would write. Plain rather than fast, and written against the manual alone.

use crate::vmx::Host;
use pt_packet::{ExecMode, LastIp, MAX_LEN, Packet, Tnt, encode};

/// How it traces.
#[derive(Clone, Copy, Debug)]
pub struct Style {
    /// Returns to where their call says are sent as a TNT bit.
    pub compress_returns: bool,
    /// TNT packets of up to 47 branches.
    pub long_tnt: bool,
    /// TIPs wait until the TNT is full.
    pub defer: bool,
    /// A PSB after so many bytes.
    pub psb_period: usize,
    /// CYC, MTC and TSC packets.
    pub timing: bool,
}

/// The encoder.
#[derive(Debug)]
pub struct Tracer {
    /// The trace so far.
    pub out: Vec<u8>,
    /// How it traces.
    pub style: Style,
    last_ip: LastIp,
    tnt: Tnt,
    tips: Vec<u64>,
    calls: Vec<u64>,
    at_psb: usize,
    time: u64,
    /// What a processor would write of the same under VMX, the host's part and all.
    pub host: Option<Host>,
}

impl Tracer {
    /// Nothing traced yet.
    pub fn new(style: Style) -> Tracer {
        Tracer {
            out: Vec::new(),
            style,
            last_ip: LastIp::new(),
            tnt: Tnt::EMPTY,
            tips: Vec::new(),
            calls: Vec::new(),
            at_psb: 0,
            time: 1 << 20,
            host: None,
        }
    }

    fn put(&mut self, packet: Packet) {
        if let Some(host) = &mut self.host {
            host.put(match packet {
                Packet::Pip { cr3, .. } => Packet::Pip { cr3, non_root: true },
                other => other,
            });
        }
        let mut bytes = [0; MAX_LEN];
        let len = encode(&packet, &mut self.last_ip, &mut bytes);
        self.out.extend(&bytes[..len]);
    }

    /// How many branches wait to be sent.
    pub fn pending(&self) -> u32 {
        self.tnt.len()
    }

    /// Sends the branches that wait, and the TIPs behind them.
    pub fn flush(&mut self) {
        if !self.tnt.is_empty() {
            if self.style.timing {
                self.time += 7;
                self.put(Packet::Cyc(7));
            }
            let tnt = std::mem::take(&mut self.tnt);
            self.put(if self.style.long_tnt {
                Packet::LongTnt(tnt)
            } else {
                Packet::ShortTnt(tnt)
            });
        }
        for tip in std::mem::take(&mut self.tips) {
            self.put(Packet::Tip(Some(tip)));
        }
    }

    /// Sends a packet behind everything that waits.
    pub fn packet(&mut self, packet: Packet) {
        self.flush();
        self.put(packet);
    }

    /// Sends a packet that pending branches do not wait for.
    pub fn aside(&mut self, packet: Packet) {
        self.put(packet);
    }

    fn bit(&mut self, taken: bool) {
        self.tnt.push(taken);
        if self.style.long_tnt && self.tnt.fills_long() || !self.style.long_tnt && self.tnt.fills_short() {
            self.flush();
        }
    }

    /// A conditional branch.
    pub fn conditional(&mut self, taken: bool) {
        self.bit(taken);
    }

    /// A near call that returns to `after`.
    pub fn call(&mut self, after: u64) {
        self.calls.push(after);
        if self.calls.len() > 64 {
            self.calls.remove(0);
        }
    }

    /// A near return.
    pub fn ret(&mut self, to: u64) {
        let expected = self.calls.pop();
        if self.style.compress_returns && expected == Some(to) {
            return self.bit(true);
        }
        // The manual's decoder pops the entry, Intel's does not: an empty stack suits both.
        self.calls.clear();
        self.flush();
        self.put(Packet::Tip(Some(to)));
    }

    /// A near indirect jump or call.
    pub fn indirect(&mut self, to: u64) {
        if self.style.defer && !self.tnt.is_empty() && self.tips.len() < 8 {
            return self.tips.push(to);
        }
        self.packet(Packet::Tip(Some(to)));
    }

    /// A far transfer, with the mode that it leads to where that is another.
    pub fn far(&mut self, to: u64, mode: Option<ExecMode>) {
        self.flush();
        self.mode(mode);
        self.put(Packet::Tip(Some(to)));
    }

    fn mode(&mut self, mode: Option<ExecMode>) {
        if let Some(mode) = mode {
            let interrupts = false;
            self.put(Packet::ModeExec { mode, interrupts });
        }
    }

    /// An interrupt or an exception in front of the instruction at `from`.
    pub fn event(&mut self, from: u64, to: u64, mode: Option<ExecMode>) {
        self.packet(Packet::Fup(Some(from)));
        self.mode(mode);
        self.put(Packet::Tip(Some(to)));
    }

    /// Packets are generated from `ip` on.
    pub fn enable(&mut self, ip: u64, mode: ExecMode) {
        self.flush();
        self.mode(Some(mode));
        self.put(Packet::TipPge(Some(ip)));
        self.calls.clear();
    }

    /// Packets are no longer generated.
    pub fn disable(&mut self, to: Option<u64>) {
        self.packet(Packet::TipPgd(to));
        self.calls.clear();
    }

    /// A VM exit in front of the instruction at `ip`, whatever the host does then, and the entry at the same place. `None`: where
    /// no packets are generated.
    pub fn vm_exit(&mut self, ip: Option<u64>, mode: ExecMode, cr3: u64) {
        if self.host.is_some() {
            self.flush();
            // The host's PSBs and calls leave none of the guest's that a return could be compressed against.
            self.calls.clear();
        }
        if let Some(host) = &mut self.host {
            host.run(ip, mode, cr3);
        }
    }

    /// What follows an OVF packet, so that whoever strips the host's part knows whose the packets are.
    pub fn told_again(&mut self, ip: Option<u64>, mode: ExecMode, cr3: u64) {
        if let Some(host) = &mut self.host {
            host.psb(ip, mode, cr3, true);
        }
    }

    /// Packets are lost until `ip`.
    pub fn overflow(&mut self, ip: u64) {
        self.flush();
        self.put(Packet::Ovf);
        self.put(Packet::Fup(Some(ip)));
        self.calls.clear();
    }

    /// Whether a PSB is due.
    pub fn psb_is_due(&self) -> bool {
        self.out.is_empty() || self.out.len() >= self.at_psb + self.style.psb_period
    }

    /// PSB and the state: the next instruction if packets are generated, its mode, and CR3.
    pub fn psb(&mut self, ip: Option<u64>, mode: ExecMode, cr3: u64) {
        self.flush();
        self.at_psb = self.out.len();
        self.put(Packet::Psb);
        self.calls.clear();
        if self.style.timing {
            self.time += 100;
            self.put(Packet::Tsc(self.time));
            self.put(Packet::Tma {
                ctc: self.time as u16,
                fast: 0,
            });
            self.put(Packet::Cbr(20));
        }
        let non_root = false;
        self.put(Packet::Pip { cr3, non_root });
        self.mode(Some(mode));
        if ip.is_some() {
            self.put(Packet::Fup(ip));
        }
        self.put(Packet::PsbEnd);
    }
}
