//! VM-execution controls that came after the first parts: timers, logs, functions, exceptions of their own. What is expected comes from SDM
//! Vol. 3C chapters 25 to 29.

use crate::{rig, vmm};
use iced_x86::code_asm::*;
use rig::TABLES;
use vmm::{BITMAPS, Code, DATA, EPT, EXIT, GUEST, GUEST_STACK, HANDLERS, Heard, LIST, PIN, VMXON, Vmm};
use x86::model::{BROADWELL, HASWELL, SKYLAKE_SERVER};
use x86::vmx::fields::Field;
use x86::watch::{Far, Flow};

/// Activate VMX-preemption timer.
const TIMER: u64 = 1 << 6;
/// Save VMX-preemption timer value.
const SAVE_TIMER: u64 = 1 << 22;
const MONITOR_TRAP: u64 = 1 << 27;
const VM_FUNCTIONS: u64 = 1 << 13;
const SHADOWING: u64 = 1 << 14;
const PAUSE_LOOP: u64 = 1 << 10;
const PML: u64 = 1 << 17;
const VIRTUALIZATION_EXCEPTION: u64 = 1 << 18;
const MODE_BASED: u64 = 1 << 22;
/// Accessed and dirty flags in the EPT pointer.
const FLAGS: u64 = 1 << 6;

/// RDTSC, then for ever.
const CLOCK: Code = |a| {
    let mut here = a.create_label();
    a.xor(ebx, ebx)?;
    a.rdtsc()?;
    a.mov(r15, rax)?;
    a.set_label(&mut here)?;
    a.inc(rbx)?;
    a.jmp(here)
};

// covers: vmx/preemption-timer
#[test]
fn the_preemption_timer_counts_changes_of_bit_5_of_the_clock() {
    for (value, saved) in [(0u64, true), (1, true), (100, false), (100, true)] {
        let mut vmm = Vmm::new(CLOCK);
        vmm.set(&[
            (Field::PIN_CONTROLS, PIN | TIMER),
            (Field::EXIT_CONTROLS, EXIT | if saved { SAVE_TIMER } else { 0 }),
            (Field::PREEMPTION_TIMER, value),
        ]);
        let v = vmm
            .run(&[
                Field::EXIT_REASON,
                Field::GUEST_RIP,
                Field::PREEMPTION_TIMER,
                Field::EXIT_INSTRUCTION_LENGTH,
            ])
            .unwrap();
        assert_eq!((v[0], v[3]), (52, 0), "{value}");
        assert_eq!(v[2], if saved { 0 } else { value }, "the value that is left");
        let state = vmm.rig.cpu.state();
        if value == 0 {
            assert_eq!(v[1], GUEST, "before the first instruction");
            continue;
        }
        // RDTSC read the clock one step after the entry at the latest. The guest's steps are two a round.
        let ends = ((state.gpr[15] >> 5) + value) << 5;
        let now = state.gpr[15] + 2 + 2 * state.gpr[3] - u64::from(v[1] == GUEST + 10);
        assert!(now.abs_diff(ends) <= 1, "{now} {ends}");
    }
    // Another exit saves what is left.
    let mut vmm = Vmm::new(|a| {
        a.nop()?;
        a.vmcall()
    });
    vmm.set(&[
        (Field::PIN_CONTROLS, PIN | TIMER),
        (Field::EXIT_CONTROLS, EXIT | SAVE_TIMER),
        (Field::PREEMPTION_TIMER, 1000),
    ]);
    let v = vmm.run(&[Field::EXIT_REASON, Field::PREEMPTION_TIMER]).unwrap();
    assert_eq!(v[0], 18);
    assert!((999..=1000).contains(&v[1]), "{}", v[1]);
}

/// An exit may load IA32_PERF_GLOBAL_CTRL: what the guest has done before it counts for the guest.
// covers: vmx/preemption-timer
#[test]
fn units_hear_of_branches_before_the_timers_exit() {
    let mut vmm = Vmm::new(CLOCK);
    vmm.platform.heard = Some(Heard::default());
    vmm.set(&[(Field::PIN_CONTROLS, PIN | TIMER), (Field::PREEMPTION_TIMER, 100)]);
    assert_eq!(vmm.run(&[Field::EXIT_REASON]), Ok(vec![52]));
    let heard = vmm.platform.heard.take().unwrap().0;
    let at = |far| {
        heard
            .iter()
            .position(|branch| branch.flow == Flow::Far(far).code())
            .unwrap()
    };
    let guest = at(Far::VmEntry)..at(Far::VmExit);
    let jumps = heard
        .iter()
        .enumerate()
        .filter(|(_, branch)| (GUEST..GUEST + 0x100).contains(&branch.from));
    let jumps: Vec<usize> = jumps
        .filter(|(_, branch)| branch.flow == Flow::Jump.code())
        .map(|(n, _)| n)
        .collect();
    let rounds = vmm.rig.cpu.state().gpr[3];
    assert!(
        rounds > 1000 && (jumps.len() as u64).abs_diff(rounds) <= 1,
        "{} {rounds}",
        jumps.len()
    );
    assert!(jumps.iter().all(|n| guest.contains(n)));
    assert!(heard.is_sorted_by_key(|branch| branch.step));
}

// covers: vmx/monitor-trap
#[test]
fn the_monitor_trap_flag_exits_after_an_instruction_or_an_event() {
    // Controls of the entry; what is injected; where the guest stands then.
    let plain: Code = |a| {
        a.nop()?;
        a.nop()
    };
    for (injected, flags, stands, pending, why) in [
        (0, 2, GUEST + 1, 0, "an instruction"),
        (0, 0x102, GUEST + 1, 1 << 14, "a single step is pending behind it"),
        (0x8000_0020, 0x202, HANDLERS + 16 * 0x20, 0, "an injected interrupt"),
    ] {
        let mut vmm = Vmm::new(plain);
        vmm.handler(0x20, |a| a.hlt());
        vmm.primary(MONITOR_TRAP);
        vmm.set(&[(Field::ENTRY_INTERRUPTION, injected), (Field::GUEST_RFLAGS, flags)]);
        let v = vmm
            .run(&[Field::EXIT_REASON, Field::GUEST_RIP, Field::GUEST_PENDING_DEBUG])
            .unwrap();
        assert_eq!(v, [37, stands, pending], "{why}");
    }
    // A fault's delivery counts, and without the flag a pending exit can be injected.
    let mut vmm = Vmm::new(|a| a.ud2());
    vmm.handler(6, |a| a.nop());
    vmm.primary(MONITOR_TRAP);
    let v = vmm.run(&[Field::EXIT_REASON, Field::GUEST_RIP]).unwrap();
    assert_eq!(v, [37, HANDLERS + 16 * 6]);
    let mut vmm = Vmm::new(plain);
    vmm.set(&[(Field::ENTRY_INTERRUPTION, 0x8000_0700)]);
    let v = vmm.run(&[Field::EXIT_REASON, Field::GUEST_RIP]).unwrap();
    assert_eq!(v, [37, GUEST]);
}

// covers: vmx/pause-loop
#[test]
fn pauses_that_follow_each_other_closely_for_too_long_exit() {
    let guest: Code = |a| {
        let mut here = a.create_label();
        a.mov(ecx, 1000)?;
        a.xor(ebx, ebx)?;
        a.set_label(&mut here)?;
        a.inc(rbx)?;
        a.pause()?;
        a.dec(ecx)?;
        a.jnz(here)?;
        a.vmcall()
    };
    // Rounds of four steps. Gap, window; reason, and how often PAUSE was reached.
    for (gap, window, reason, rounds) in [(10, 100, 40, 27), (3, 100, 18, 1000), (10, 100_000, 18, 1000)] {
        let mut vmm = Vmm::new(guest);
        vmm.secondary(PAUSE_LOOP);
        vmm.set(&[(Field::PLE_GAP, gap), (Field::PLE_WINDOW, window)]);
        assert_eq!(vmm.exit().0, reason);
        assert_eq!(vmm.rig.cpu.state().gpr[3], rounds, "gap {gap}, window {window}");
    }
}

// covers: vmx/page-modification-log
#[test]
fn pages_that_become_dirty_are_logged_until_the_log_is_full() {
    let guest: Code = |a| {
        a.mov(ecx, DATA as u32 + 8)?;
        a.mov(qword_ptr(rcx), rax)?;
        a.mov(qword_ptr(rcx), rbx)?;
        a.add(ecx, 0x1000)?;
        a.mov(qword_ptr(rcx), rax)?;
        a.vmcall()
    };
    const LEAF: u64 = EPT + 0x3000 + 8 * (DATA >> 12);
    // The guest's own tables are dirty already, since they count as written to.
    for (index, reason, after) in [(511u64, 18, 509), (0, 62, 0xffff), (512, 62, 512)] {
        let mut vmm = Vmm::on(&BROADWELL, guest);
        vmm.ept(&[]);
        for page in 0..0x800u64 {
            let dirty = if page == DATA >> 12 || page == (DATA >> 12) + 1 {
                0
            } else {
                0x300
            };
            vmm.rig.write(
                EPT + 0x3000 + 8 * page,
                &(page << 12 | 6 << 3 | 7 | dirty).to_le_bytes(),
            );
        }
        vmm.secondary(PML);
        vmm.set(&[
            (Field::EPT_POINTER, EPT | FLAGS | 0x1e),
            (Field::PML_ADDRESS, BITMAPS),
            (Field::PML_INDEX, index),
        ]);
        let v = vmm
            .run(&[Field::EXIT_REASON, Field::PML_INDEX, Field::EXIT_QUALIFICATION])
            .unwrap();
        assert_eq!(v, [reason, after, 0], "index {index}");
        let logged = |at: u64| u64::from_le_bytes(vmm.rig.read::<8>(BITMAPS + 8 * at));
        let dirty = |page: u64| u64::from_le_bytes(vmm.rig.read::<8>(LEAF + 8 * page)) >> 9 & 1;
        match index {
            511 => assert_eq!(
                (logged(511), logged(510), dirty(0), dirty(1)),
                (DATA, DATA + 0x1000, 1, 1)
            ),
            0 => assert_eq!((logged(0), dirty(0), dirty(1)), (DATA, 1, 0)),
            _ => assert_eq!((dirty(0), dirty(1)), (0, 0), "the write has not been"),
        }
    }
}

/// A second EPT, in which the guest's data is elsewhere.
fn second_ept(vmm: &mut Vmm, eptp: u64) {
    const OTHER: u64 = EPT + 0x4_0000;
    vmm.rig.write(OTHER, &(OTHER + 0x1007).to_le_bytes());
    vmm.rig.write(OTHER + 0x1000, &(OTHER + 0x2007).to_le_bytes());
    for i in 0..4u64 {
        let at = u64::from_le_bytes(vmm.rig.read::<8>(EPT + 0x2000 + 8 * i));
        let at = if i == DATA >> 21 { OTHER + 0x3007 } else { at };
        vmm.rig.write(OTHER + 0x2000 + 8 * i, &at.to_le_bytes());
    }
    for n in 0..512u64 {
        let page = DATA >> 21 << 9 | n;
        let to = if page == DATA >> 12 { LIST } else { page << 12 };
        vmm.rig.write(OTHER + 0x3000 + 8 * n, &(to | 6 << 3 | 7).to_le_bytes());
    }
    vmm.rig.write(LIST, &0x2222u64.to_le_bytes());
    vmm.rig.write(DATA, &0x1111u64.to_le_bytes());
    vmm.rig.write(eptp, &(EPT | 0x1e).to_le_bytes());
    vmm.rig.write(eptp + 8, &(OTHER | 0x1e).to_le_bytes());
    vmm.rig.write(eptp + 16, &(OTHER | 0x1f).to_le_bytes());
}

// covers: vmx/vm-functions
#[test]
fn vmfunc_switches_to_an_ept_of_the_list_and_exits_where_it_cannot() {
    // EAX, ECX, whether leaf 0 is enabled; reason.
    for (function, index, enabled, reason) in [
        (0u32, 1u32, 1u64, 18),
        (0, 1, 0, 59),
        (1, 1, 1, 59),
        (64, 0, 1, 59),
        (0, 512, 1, 59),
        (0, 2, 1, 59),
    ] {
        for vpid in [0, 5] {
            let mut vmm = Vmm::on(&BROADWELL, |a| {
                a.mov(r8, qword_ptr(DATA as u32))?;
                a.mov(eax, dword_ptr(DATA as u32 + 0x1000))?;
                a.mov(ecx, dword_ptr(DATA as u32 + 0x1004))?;
                a.vmfunc()?;
                a.mov(r9, qword_ptr(DATA as u32))?;
                a.xor(ecx, ecx)?;
                a.vmfunc()?;
                a.mov(r10, qword_ptr(DATA as u32))?;
                a.vmcall()
            });
            vmm.ept(&[]);
            second_ept(&mut vmm, BITMAPS);
            vmm.rig.write(DATA + 0x1000, &function.to_le_bytes());
            vmm.rig.write(DATA + 0x1004, &index.to_le_bytes());
            vmm.secondary(VM_FUNCTIONS | if vpid != 0 { 1 << 5 } else { 0 });
            vmm.set(&[(Field::VM_FUNCTIONS, enabled), (Field::EPTP_LIST, BITMAPS)]);
            if vpid != 0 {
                vmm.set(&[(Field::VPID, vpid)]);
            }
            let v = vmm
                .run(&[Field::EXIT_REASON, Field::EXIT_INSTRUCTION_LENGTH, Field::EPT_POINTER])
                .unwrap();
            assert_eq!(v, [reason, 3, EPT | 0x1e], "EAX {function}, ECX {index}");
            let gpr = vmm.rig.cpu.state().gpr;
            assert_eq!(gpr[8], 0x1111);
            if reason == 18 {
                assert_eq!((gpr[9], gpr[10]), (0x2222, 0x1111), "VPID {vpid}");
            }
        }
    }
    // Without the control the instruction is undefined.
    let mut vmm = Vmm::on(&HASWELL, |a| a.vmfunc());
    vmm.set(&[(Field::EXCEPTION_BITMAP, 1 << 6)]);
    assert_eq!(vmm.exit(), (0, 0, 0, 0));
}

// covers: vmx/virtualization-exceptions
#[test]
fn ept_violations_become_virtualization_exceptions_where_entry_and_area_let_them() {
    let read: Code = |a| {
        a.mov(ecx, DATA as u32 + 8)?;
        a.mov(rax, qword_ptr(rcx))?;
        a.vmcall()
    };
    // The entry; whether the area is busy; reason.
    for (entry, busy, reason, why) in [
        (0, 0u32, 18, "converted"),
        (1 << 63, 0, 48, "suppressed by the entry"),
        (0, 1, 48, "the area is in use"),
    ] {
        let mut vmm = Vmm::on(&BROADWELL, read);
        vmm.handler(20, |a| {
            a.mov(ebx, 0x14)?;
            a.vmcall()
        });
        vmm.ept(&[(DATA, entry)]);
        vmm.secondary(VIRTUALIZATION_EXCEPTION);
        vmm.rig.write(BITMAPS + 4, &busy.to_le_bytes());
        vmm.set(&[(Field::VIRTUALIZATION_EXCEPTION_AREA, BITMAPS), (Field::EPTP_INDEX, 7)]);
        let v = vmm.run(&[Field::EXIT_REASON, Field::GUEST_RSP]).unwrap();
        assert_eq!(v[0], reason, "{why}");
        if reason == 48 {
            continue;
        }
        assert_eq!(
            (vmm.rig.cpu.state().gpr[3], v[1]),
            (0x14, GUEST_STACK - 40),
            "no error code"
        );
        let rip = u64::from_le_bytes(vmm.rig.read::<8>(GUEST_STACK - 40));
        assert_eq!(rip, GUEST + 5, "a fault");
        let word = |at: u64| u64::from_le_bytes(vmm.rig.read::<8>(BITMAPS + at));
        assert_eq!(
            [word(0), word(8), word(16), word(24), word(32)],
            [0xffff_ffff_0000_0030, 0x181, DATA + 8, DATA + 8, 7]
        );
    }
    // Not while an event is delivered.
    let mut vmm = Vmm::on(&BROADWELL, |a| a.int(0x30));
    vmm.handler(0x30, |a| a.hlt());
    vmm.ept(&[(GUEST_STACK - 0x1000, 0)]);
    vmm.secondary(VIRTUALIZATION_EXCEPTION);
    vmm.set(&[(Field::VIRTUALIZATION_EXCEPTION_AREA, BITMAPS)]);
    let v = vmm.run(&[Field::EXIT_REASON, Field::IDT_VECTORING]).unwrap();
    assert_eq!(v, [48, 0x8000_0430]);
}

// covers: vmx/ept-mode-based
#[test]
fn fetches_from_user_pages_have_a_right_of_their_own() {
    // The guest's page for code, by its page tables a user page or not; rights of the EPT entry; reason, qualification.
    for (user, rights, reason, qualification) in [
        (false, 7, 18, 0),
        (false, 3 | 1 << 10, 48, 0x1dc),
        (true, 7, 48, 0x1bc),
        (true, 3 | 1 << 10, 18, 0),
    ] {
        let mut vmm = Vmm::on(&SKYLAKE_SERVER, |a| {
            a.mov(ecx, DATA as u32)?;
            a.jmp(rcx)
        });
        vmm.rig.write(DATA, &[0x0f, 0x01, 0xc1]);
        vmm.ept(&[]);
        for page in 0..0x800u64 {
            let rights = if page == DATA >> 12 { rights } else { 7 | 1 << 10 };
            vmm.rig
                .write(EPT + 0x3000 + 8 * page, &(page << 12 | 6 << 3 | rights).to_le_bytes());
        }
        for at in [
            EPT,
            EPT + 0x1000,
            EPT + 0x2000,
            EPT + 0x2008,
            EPT + 0x2010,
            EPT + 0x2018,
        ] {
            let entry = u64::from_le_bytes(vmm.rig.read::<8>(at)) | 1 << 10;
            vmm.rig.write(at, &entry.to_le_bytes());
        }
        // The rig maps everything by large pages of both rings.
        if !user {
            let at = TABLES + 0x2000 + 8 * (DATA >> 21);
            let entry = u64::from_le_bytes(vmm.rig.read::<8>(at)) & !4;
            vmm.rig.write(at, &entry.to_le_bytes());
        }
        vmm.secondary(MODE_BASED);
        let exit = vmm.exit();
        assert_eq!(
            (exit.0, exit.1),
            (reason, qualification),
            "user {user}, rights {rights:#x}"
        );
    }
}

// covers: vmx/vmcs-shadowing
#[test]
fn fields_with_a_clear_bit_are_those_of_the_shadow_vmcs() {
    const SHADOW: u64 = VMXON + 0x8000;
    let guest: Code = |a| {
        a.xor(ebx, ebx)?;
        a.mov(ecx, Field::GUEST_RIP.0)?;
        a.mov(eax, 0x1234)?;
        a.vmwrite(rcx, rax)?;
        a.mov(eax, 0)?;
        a.vmread(rbx, rcx)?;
        a.mov(ecx, Field::GUEST_RSP.0)?;
        a.vmread(rdx, rcx)?;
        a.vmcall()
    };
    for (link, reason) in [(SHADOW, 23), (u64::MAX, 23)] {
        let mut vmm = Vmm::on(&HASWELL, guest);
        vmm.rig
            .write(SHADOW, &(x86::vmx::caps::REVISION | 1 << 31).to_le_bytes());
        vmm.secondary(SHADOWING);
        for bitmap in [BITMAPS, BITMAPS + 0x1000] {
            vmm.rig.write(bitmap, &[0xff; 0x1000]);
            let field = u64::from(Field::GUEST_RIP.0);
            vmm.rig.write(bitmap + field / 8, &[!(1 << (field & 7))]);
        }
        vmm.set(&[
            (Field::VMREAD_BITMAP, BITMAPS),
            (Field::VMWRITE_BITMAP, BITMAPS + 0x1000),
            (Field::LINK_POINTER, link),
        ]);
        let v = vmm
            .run(&[Field::EXIT_REASON, Field::GUEST_RIP, Field::GUEST_RFLAGS])
            .unwrap();
        assert_eq!(v[0], reason, "the field whose bit is set");
        assert!(v[1] > GUEST + 20, "the guest's own RIP is in the VMM's VMCS");
        let (read, carry) = if link == SHADOW { (0x1234, 0) } else { (0, 1) };
        assert_eq!((vmm.rig.cpu.state().gpr[3], v[2] & 1), (read, carry), "link {link:#x}");
    }
}
