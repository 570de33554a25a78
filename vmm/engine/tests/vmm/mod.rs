//! A VMM of a few instructions that makes a VMCS by VMWRITE from a table, enters a guest, and reads by VMREAD what the VM exit left.
#![allow(dead_code)] // Not every test uses every verb.

use crate::rig::{CODE, Rig, STACK};
use engine::bus::{Bus, MsrFault, Processor};
use engine::{Activity, CpuState, Exit};
use iced_x86::IcedError;
use iced_x86::code_asm::*;
use x86::model::{CpuModel, WESTMERE};
use x86::vmx::fields::Field;
use x86::watch::{BranchRecord, Effects, Interest, Recorded, Watch};

pub const VMXON: u64 = 0x40_0000;
pub const VMCS: u64 = 0x40_1000;
/// Pointers to both, for the instructions' operands.
pub const POINTERS: u64 = 0x40_2000;
/// Encodings and values to write, up to all ones; encodings to read; what was read.
pub const WRITES: u64 = 0x41_0000;
pub const READS: u64 = 0x42_0000;
pub const OUT: u64 = 0x43_0000;
pub const IDT: u64 = 0x44_0000;
pub const GDT: u64 = 0x45_0000;
pub const EPT: u64 = 0x50_0000;
pub const BITMAPS: u64 = 0x51_0000;
pub const LIST: u64 = 0x52_0000;
/// The guest's code, its stack, and data of its own.
pub const GUEST: u64 = 0x30_0000;
pub const GUEST_STACK: u64 = 0x31_0000;
pub const DATA: u64 = 0x32_0000;
/// Where the guest's handlers stand, 16 bytes each.
pub const HANDLERS: u64 = 0x33_0000;
pub const HOST: u64 = CODE + 0x1000;
pub const END: u64 = u64::MAX;

pub const PIN: u64 = 0x16;
pub const PRIMARY: u64 = 0x0400_6172;
pub const EXIT: u64 = 0x0003_6fff;
pub const ENTRY: u64 = 0x13ff;
pub const SECONDARY: u64 = 1 << 31;

/// A unit that hears of every branch.
#[derive(Default)]
pub struct Heard(pub Vec<BranchRecord>);

impl Watch for Heard {
    fn interest(&mut self, _: &mut dyn Processor) -> Interest {
        Interest {
            branches: Recorded::All,
            ..Interest::NOTHING
        }
    }
    fn branches(&mut self, records: &[BranchRecord], _: &mut dyn Processor) -> Effects {
        self.0.extend_from_slice(records);
        Effects::NONE
    }
}

/// What exists of every part beside the core: IA32_FEATURE_CONTROL as firmware leaves it, the clock, an APIC's task priority.
pub struct Platform {
    model: &'static CpuModel,
    pub ports: Vec<(u16, u32)>,
    /// Writes of the processor's own to the EOI register.
    pub eois: u32,
    /// Who hears of branches, if somebody does.
    pub heard: Option<Heard>,
}

impl Bus for Platform {
    fn read(&mut self, _: u64, _: u8, _: u64) -> u64 {
        u64::MAX
    }
    fn write(&mut self, _: u64, _: u8, _: u64, _: u64) {}
    fn port_read(&mut self, _: u16, _: u8, _: u64) -> u32 {
        0x55
    }
    fn port_write(&mut self, port: u16, _: u8, value: u32, _: u64) {
        self.ports.push((port, value));
    }
    fn read_msr(&mut self, msr: u32, _: &mut dyn Processor) -> Result<u64, MsrFault> {
        match msr {
            0x3a => Ok(5),
            0x277 => Ok(0x0007_0406_0007_0406),
            _ => Err(MsrFault::Unclaimed),
        }
    }
    fn write_msr(&mut self, _: u32, _: u64, _: &mut dyn Processor) -> Result<(), MsrFault> {
        Err(MsrFault::Unclaimed)
    }
    fn cpuid(&mut self, leaf: u32, subleaf: u32) -> [u32; 4] {
        self.model.cpuid(leaf, subleaf)
    }
    fn tsc(&mut self, now: u64) -> u64 {
        now
    }
    fn cr8(&mut self) -> u64 {
        3
    }
    fn set_cr8(&mut self, _: u64) {}
    fn end_of_interrupt(&mut self) {
        self.eois += 1;
    }
    fn random(&mut self) -> u64 {
        4
    }
    fn watch(&mut self) -> Option<&mut dyn Watch> {
        self.heard.as_mut().map(|heard| heard as &mut dyn Watch)
    }
}

pub fn model() -> &'static CpuModel {
    &WESTMERE
}

pub type Code = fn(&mut CodeAssembler) -> Result<(), IcedError>;
/// An exit: its reason and qualification, the instruction's length, and how many bytes before it.
pub type ExitFields = (u64, u64, u64, u64);

pub fn assembled(bits: u32, at: u64, code: impl FnOnce(&mut CodeAssembler) -> Result<(), IcedError>) -> Vec<u8> {
    let mut a = CodeAssembler::new(bits).unwrap();
    code(&mut a).unwrap();
    a.assemble(at).unwrap()
}

/// A VMM and its guest.
pub struct Vmm {
    pub rig: Rig,
    pub platform: Platform,
    fields: Vec<(Field, u64)>,
}

impl Vmm {
    /// With a 64-bit guest in the VMM's own address space that runs this.
    pub fn new(guest: Code) -> Vmm {
        Vmm::on(model(), guest)
    }

    /// The same on another model than Westmere.
    pub fn on(model: &'static CpuModel, guest: Code) -> Vmm {
        let mut rig = Rig::with(model);
        rig.cpu.set_state(&CpuState {
            cr4: (rig.cpu.state().cr4.into_bits() | 1 << 13).into(),
            ..rig.cpu.state()
        });
        rig.write(GUEST, &assembled(64, GUEST, guest));
        for region in [VMXON, VMCS] {
            rig.write(region, &x86::vmx::caps::REVISION.to_le_bytes());
        }
        rig.write(POINTERS, &VMXON.to_le_bytes());
        rig.write(POINTERS + 8, &VMCS.to_le_bytes());
        rig.write(
            CODE,
            &assembled(64, CODE, |a| {
                let (mut next, mut enter, mut failed) = (a.create_label(), a.create_label(), a.create_label());
                a.mov(rbx, POINTERS)?;
                a.vmxon(qword_ptr(rbx))?;
                a.jbe(failed)?;
                a.vmclear(qword_ptr(rbx + 8))?;
                a.jbe(failed)?;
                a.vmptrld(qword_ptr(rbx + 8))?;
                a.jbe(failed)?;
                a.mov(rsi, WRITES)?;
                a.set_label(&mut next)?;
                a.mov(rax, qword_ptr(rsi))?;
                a.cmp(rax, -1)?;
                a.je(enter)?;
                a.vmwrite(rax, qword_ptr(rsi + 8))?;
                a.jbe(failed)?;
                a.add(rsi, 16)?;
                a.jmp(next)?;
                a.set_label(&mut enter)?;
                a.mov(rsi, 0x1111u64)?;
                a.vmlaunch()?;
                a.set_label(&mut failed)?;
                a.pushfq()?;
                a.pop(rdi)?;
                a.mov(ecx, 0x4400)?;
                a.vmread(rdx, rcx)?;
                a.hlt()
            }),
        );
        rig.write(
            HOST,
            &assembled(64, HOST, |a| {
                let (mut next, mut done) = (a.create_label(), a.create_label());
                a.mov(rsi, READS)?;
                a.mov(rdi, OUT)?;
                a.set_label(&mut next)?;
                a.mov(rcx, qword_ptr(rsi))?;
                a.cmp(rcx, -1)?;
                a.je(done)?;
                a.vmread(qword_ptr(rdi), rcx)?;
                a.add(rsi, 8)?;
                a.add(rdi, 8)?;
                a.jmp(next)?;
                a.set_label(&mut done)?;
                a.hlt()?;
                a.vmresume()?;
                a.hlt()
            }),
        );
        for (n, descriptor) in [0, 0x00af_9b00_0000_ffff, 0x00cf_9300_0000_ffff]
            .into_iter()
            .enumerate()
        {
            let descriptor: u64 = descriptor;
            rig.write(GDT + 8 * n as u64, &descriptor.to_le_bytes());
        }
        let mut vmm = Vmm {
            rig,
            platform: Platform {
                model,
                ports: Vec::new(),
                eois: 0,
                heard: None,
            },
            fields: Vec::new(),
        };
        let state = vmm.rig.cpu.state();
        vmm.set(&[
            (Field::PIN_CONTROLS, PIN),
            (Field::PRIMARY_CONTROLS, PRIMARY),
            (Field::EXIT_CONTROLS, EXIT),
            (Field::ENTRY_CONTROLS, ENTRY),
            (Field::LINK_POINTER, u64::MAX),
            (Field::HOST_CR0, state.cr0.into_bits()),
            (Field::HOST_CR3, state.cr3),
            (Field::HOST_CR4, state.cr4.into_bits()),
            (Field::HOST_CS, 8),
            (Field::HOST_SS, 16),
            (Field::HOST_TR, 0x18),
            (Field::HOST_RSP, STACK),
            (Field::HOST_RIP, HOST),
            (Field::HOST_FS_BASE, 0x1_0000),
            (Field::GUEST_CR0, state.cr0.into_bits()),
            (Field::GUEST_CR3, state.cr3),
            (Field::GUEST_CR4, state.cr4.into_bits()),
            (Field::GUEST_CS, 8),
            (Field::GUEST_CS_RIGHTS, 0xa09b),
            (Field::GUEST_CS_LIMIT, 0xffff_ffff),
            (Field::GUEST_TR_RIGHTS, 0x8b),
            (Field::GUEST_TR_LIMIT, 0x67),
            (Field::GUEST_LDTR_RIGHTS, 0x1_0000),
            (Field::GUEST_DR7, 0x400),
            (Field::GUEST_RFLAGS, 2),
            (Field::GUEST_RIP, GUEST),
            (Field::GUEST_RSP, GUEST_STACK),
            (Field::GUEST_GDTR_BASE, GDT),
            (Field::GUEST_GDTR_LIMIT, 0x17),
            (Field::GUEST_IDTR_BASE, IDT),
            (Field::GUEST_IDTR_LIMIT, 0xfff),
        ]);
        for n in [0, 2, 3, 4, 5] {
            vmm.set(&[
                (Field(Field::GUEST_ES.0 + 2 * n), 16),
                (Field(Field::GUEST_ES_RIGHTS.0 + 2 * n), 0xc093),
                (Field(Field::GUEST_ES_LIMIT.0 + 2 * n), 0xffff_ffff),
            ]);
        }
        vmm
    }

    pub fn set(&mut self, fields: &[(Field, u64)]) -> &mut Vmm {
        self.fields.extend_from_slice(fields);
        self
    }

    /// An interrupt gate to 16 bytes of code.
    pub fn handler(&mut self, vector: u64, code: Code) -> &mut Vmm {
        let at = HANDLERS + 16 * vector;
        let bytes = assembled(64, at, code);
        assert!(bytes.len() <= 16);
        self.rig.write(at, &bytes);
        let low = at & 0xffff | 8 << 16 | 0x8e00 << 32 | (at >> 16 & 0xffff) << 48;
        self.rig.write(IDT + 16 * vector, &low.to_le_bytes());
        self.rig.write(IDT + 16 * vector + 8, &(at >> 32).to_le_bytes());
        self
    }

    /// EPT that maps the first 8 MBytes one to one, in pages of 4 KBytes, and what differs.
    pub fn ept(&mut self, differs: &[(u64, u64)]) -> &mut Vmm {
        self.rig.write(EPT, &(EPT + 0x1007).to_le_bytes());
        self.rig.write(EPT + 0x1000, &(EPT + 0x2007).to_le_bytes());
        for i in 0..4 {
            self.rig
                .write(EPT + 0x2000 + 8 * i, &(EPT + 0x3007 + 0x1000 * i).to_le_bytes());
        }
        for page in 0..0x800u64 {
            self.rig
                .write(EPT + 0x3000 + 8 * page, &(page << 12 | 6 << 3 | 7).to_le_bytes());
        }
        for &(gpa, entry) in differs {
            self.rig.write(EPT + 0x3000 + 8 * (gpa >> 12), &entry.to_le_bytes());
        }
        self.secondary(2);
        self.set(&[(Field::EPT_POINTER, EPT | 3 << 3 | 6)])
    }

    /// An unrestricted guest in real-address mode, at 2000H:0010H; the stack and all data are in the first 64 KiB.
    pub fn real_mode(&mut self, code: &[u8]) -> &mut Vmm {
        self.rig.write(0x2_0010, code);
        self.ept(&[]);
        self.secondary(1 << 7);
        self.set(&[
            (Field::ENTRY_CONTROLS, ENTRY & !(1 << 9)),
            (Field::GUEST_CR0, 0x30),
            (Field::GUEST_CR4, 0x2000),
            (Field::GUEST_CS, 0x2000),
            (Field::GUEST_CS_BASE, 0x2_0000),
            (Field::GUEST_CS_LIMIT, 0xffff),
            (Field::GUEST_CS_RIGHTS, 0x9b),
            (Field::GUEST_RIP, 0x10),
        ]);
        for n in [0, 2, 3, 4, 5] {
            self.set(&[
                (Field(Field::GUEST_ES.0 + 2 * n), 0),
                (Field(Field::GUEST_ES_RIGHTS.0 + 2 * n), 0x93),
                (Field(Field::GUEST_ES_LIMIT.0 + 2 * n), 0xffff),
            ]);
        }
        self
    }

    pub fn secondary(&mut self, bits: u64) -> &mut Vmm {
        let before = self.value(Field::SECONDARY_CONTROLS);
        let primary = self.value(Field::PRIMARY_CONTROLS);
        self.set(&[
            (Field::PRIMARY_CONTROLS, primary | SECONDARY),
            (Field::SECONDARY_CONTROLS, before | bits),
        ])
    }

    pub fn primary(&mut self, bits: u64) -> &mut Vmm {
        let before = self.value(Field::PRIMARY_CONTROLS);
        self.set(&[(Field::PRIMARY_CONTROLS, before | bits)])
    }

    pub fn value(&self, field: Field) -> u64 {
        self.fields
            .iter()
            .rfind(|(other, _)| *other == field)
            .map_or(0, |row| row.1)
    }

    pub fn step(&mut self, budget: u64) -> Exit {
        self.rig.engine.run(&mut self.rig.cpu, &mut self.platform, budget)
    }

    pub fn table(&mut self, reads: &[Field]) {
        let mut at = WRITES;
        for (field, value) in self.fields.clone() {
            self.rig.write(at, &u64::from(field.0).to_le_bytes());
            self.rig.write(at + 8, &value.to_le_bytes());
            at += 16;
        }
        self.rig.write(at, &END.to_le_bytes());
        let mut at = READS;
        for field in reads {
            self.rig.write(at, &u64::from(field.0).to_le_bytes());
            at += 8;
        }
        self.rig.write(at, &END.to_le_bytes());
    }

    /// Runs until the processor halts; `Err` with flags and VM-instruction error when an instruction of the VMM fails.
    pub fn run(&mut self, reads: &[Field]) -> Result<Vec<u64>, (u64, u64)> {
        self.table(reads);
        self.go_on(reads.len())
    }

    pub fn go_on(&mut self, reads: usize) -> Result<Vec<u64>, (u64, u64)> {
        for _ in 0..1000 {
            match self.step(100_000) {
                Exit::Bus | Exit::Window | Exit::Budget => {}
                Exit::Halt => break,
                other => panic!("{other:?} at {:#x}", self.rig.cpu.rip()),
            }
        }
        let state = self.rig.cpu.state();
        assert_eq!(state.activity, Activity::Halted, "at {:#x}", state.rip);
        if (CODE..HOST).contains(&state.rip) {
            return Err((state.gpr[7] & 0x41, state.gpr[2]));
        }
        Ok((0..reads as u64)
            .map(|n| u64::from_le_bytes(self.rig.read::<8>(OUT + 8 * n)))
            .collect())
    }

    /// The exit: reason, qualification, instruction length, RIP less the guest's first address.
    pub fn exit(&mut self) -> (u64, u64, u64, u64) {
        let v = self
            .run(&[
                Field::EXIT_REASON,
                Field::EXIT_QUALIFICATION,
                Field::EXIT_INSTRUCTION_LENGTH,
                Field::GUEST_RIP,
            ])
            .unwrap();
        (v[0], v[1], v[2], v[3].wrapping_sub(GUEST))
    }
}
