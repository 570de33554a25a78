//! The machine as gdbstub sees it: CPUs as threads, their registers and memory, what stops them, how they go on.

use std::collections::BTreeSet;
use std::convert::Infallible;
use std::num::NonZeroUsize;

use engine::{Activity, CpuState};
use gdbstub::arch::{Arch, RegId};
use gdbstub::common::{Signal, Tid};
use gdbstub::target::ext::base::BaseOps;
use gdbstub::target::ext::base::multithread::{
    MultiThreadBase, MultiThreadRangeStepping, MultiThreadRangeSteppingOps, MultiThreadResume, MultiThreadResumeOps,
    MultiThreadSchedulerLocking, MultiThreadSchedulerLockingOps, MultiThreadSingleStep, MultiThreadSingleStepOps,
};
use gdbstub::target::ext::base::reverse_exec::{ReverseCont, ReverseContOps, ReverseStep, ReverseStepOps};
use gdbstub::target::ext::base::single_register_access::{SingleRegisterAccess, SingleRegisterAccessOps};
use gdbstub::target::ext::breakpoints::{
    Breakpoints, BreakpointsOps, HwBreakpoint, HwBreakpointOps, HwWatchpoint, HwWatchpointOps, SwBreakpoint,
    SwBreakpointOps, WatchKind,
};
use gdbstub::target::ext::monitor_cmd::{ConsoleOutput, MonitorCmd, MonitorCmdOps};
use gdbstub::target::ext::target_description_xml_override::{
    TargetDescriptionXmlOverride, TargetDescriptionXmlOverrideOps,
};
use gdbstub::target::ext::thread_extra_info::{ThreadExtraInfo, ThreadExtraInfoOps};
use gdbstub::target::{Target, TargetError, TargetResult};

use super::registers::Registers;
use crate::debug::{self, Watchpoint};
use crate::front::controls::Controls;
use crate::front::monitor;
use crate::timeline::run::Run;
use machine::walk;

/// "Bad address" and "invalid argument", as gdb knows the numbers.
const EFAULT: u8 = 14;
const EINVAL: u8 = 22;

/// x86, with registers that depend on the model.
#[derive(Debug)]
pub enum X86 {}

/// A register's number. Which there are depends on the model.
#[derive(Clone, Copy, Debug)]
pub struct Number(usize);

impl RegId for Number {
    fn from_raw_id(id: usize) -> Option<(Self, Option<NonZeroUsize>)> {
        Some((Number(id), None))
    }

    fn to_raw_id(&self) -> Option<usize> {
        Some(self.0)
    }
}

/// The bytes of all registers.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Image(Vec<u8>);

impl gdbstub::arch::Registers for Image {
    type ProgramCounter = u64;

    fn pc(&self) -> u64 {
        0
    }

    fn gdb_serialize(&self, mut write_byte: impl FnMut(Option<u8>)) {
        self.0.iter().for_each(|byte| write_byte(Some(*byte)));
    }

    fn gdb_deserialize(&mut self, bytes: &[u8]) -> Result<(), ()> {
        self.0 = bytes.to_vec();
        Ok(())
    }
}

impl Arch for X86 {
    type Usize = u64;
    type Registers = Image;
    type BreakpointKind = usize;
    type RegId = Number;
}

/// Back in time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reverse {
    /// One instruction of this CPU.
    Step(usize),
    /// To the last stop.
    Continue,
}

/// How the machine is to go on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Resume {
    /// The CPU that makes a step.
    pub step: Option<usize>,
    /// It makes more of them while it is between these addresses, the second not among them.
    pub range: Option<(u64, u64)>,
    /// A CPU that was named to go on.
    pub named: Option<usize>,
    /// CPUs that were not named stand still.
    pub lock: bool,
    /// It goes back instead.
    pub reverse: Option<Reverse>,
}

/// The machine.
pub struct Machine<'v> {
    /// It, with what front ends share.
    pub controls: Controls<'v>,
    /// Its registers.
    pub registers: Registers,
    /// The CPU that gdb looks at.
    pub cpu: usize,
    /// gdb's addresses are physical.
    pub physical: bool,
    /// gdb has said how it is to go on.
    pub resume: Resume,
    /// This client's `monitor` may name files that are written.
    pub files: bool,
    /// gdb's breakpoints, by the kind that it asked for; the debugger knows only one kind.
    software: BTreeSet<u64>,
    hardware: BTreeSet<u64>,
    watchpoints: Vec<Watchpoint>,
}

/// The CPU that a thread is.
pub fn cpu_of(tid: Tid) -> usize {
    tid.get() - 1
}

/// The thread that a CPU is.
pub fn thread_of(cpu: usize) -> Tid {
    NonZeroUsize::MIN.saturating_add(cpu)
}

fn watchpoint(addr: u64, len: u64, kind: WatchKind) -> Option<Watchpoint> {
    let kind = match kind {
        WatchKind::Write => debug::WatchKind::Write,
        WatchKind::Read => debug::WatchKind::Read,
        WatchKind::ReadWrite => debug::WatchKind::Access,
    };
    Watchpoint::new(addr, len, kind)
}

impl<'v> Machine<'v> {
    /// The machine, with nothing to stop for.
    pub fn new(controls: Controls<'v>) -> Self {
        let registers = Registers::of(controls.run.machine().model());
        Machine {
            controls,
            registers,
            cpu: 0,
            physical: false,
            resume: Resume::default(),
            files: false,
            software: BTreeSet::new(),
            hardware: BTreeSet::new(),
            watchpoints: Vec::new(),
        }
    }

    /// Takes away what gdb has set.
    pub fn forget(&mut self) {
        for address in std::mem::take(&mut self.software)
            .into_iter()
            .chain(std::mem::take(&mut self.hardware))
        {
            self.controls.run.debugger().remove_breakpoint(address);
        }
        for watchpoint in std::mem::take(&mut self.watchpoints) {
            self.controls.run.debugger().remove_watchpoint(&watchpoint);
        }
        self.controls.run.debugger().step(None);
        self.controls.run.run_only(None);
        self.physical = false;
    }

    /// Whether gdb's own breakpoint at an address is a hardware one; `None`: it has none there.
    pub fn is_hardware(&self, address: u64) -> Option<bool> {
        if self.hardware.contains(&address) {
            return Some(true);
        }
        self.software.contains(&address).then_some(false)
    }

    fn state(&self, tid: Tid) -> TargetResult<CpuState, Self> {
        self.controls
            .run
            .cpu_state(cpu_of(tid))
            .ok_or(TargetError::Errno(EINVAL))
    }

    fn set_state(&mut self, tid: Tid, state: &CpuState) -> TargetResult<(), Self> {
        let put = self.controls.run.set_cpu_state(cpu_of(tid), state);
        put.map_err(|_| TargetError::Errno(EINVAL))
    }

    /// What is behind an address of gdb's: a physical one.
    fn place(&mut self, state: &CpuState, address: u64) -> Option<u64> {
        if self.physical {
            return Some(address);
        }
        walk::translate(self.controls.run.machine().memory(), state, address)
    }

    /// Does something for each piece of memory that lies within a page, and says how many bytes were done before one failed.
    fn pieces(
        &mut self,
        tid: Tid,
        address: u64,
        len: usize,
        mut f: impl FnMut(&mut Run, u64, std::ops::Range<usize>) -> bool,
    ) -> TargetResult<usize, Self> {
        let state = self.state(tid)?;
        // The kernel's part of memory is shown in user mode, too, where page-table isolation hides it from the guest.
        let hidden = walk::with_kernel_tables(&state);
        let mut done = 0;
        while done < len {
            // Nothing is beyond the end of the address space.
            let Some(here) = address.checked_add(done as u64) else {
                break;
            };
            let part = (0x1000 - (here & 0xfff) as usize).min(len - done);
            let found = match (self.place(&state, here), &hidden) {
                (None, Some(hidden)) if here >> 63 == 1 => self.place(hidden, here),
                (found, _) => found,
            };
            let Some(gpa) = found else { break };
            if !f(self.controls.run, gpa, done..done + part) {
                break;
            }
            done += part;
        }
        Ok(done)
    }
}

impl Target for Machine<'_> {
    type Arch = X86;
    type Error = Infallible;

    fn base_ops(&mut self) -> BaseOps<'_, X86, Infallible> {
        BaseOps::MultiThread(self)
    }

    fn use_fork_stop_reason(&self) -> bool {
        false
    }

    fn use_vfork_stop_reason(&self) -> bool {
        false
    }

    fn use_vforkdone_stop_reason(&self) -> bool {
        false
    }

    fn use_lldb_register_info(&self) -> bool {
        false
    }

    fn support_breakpoints(&mut self) -> Option<BreakpointsOps<'_, Self>> {
        Some(self)
    }

    fn support_monitor_cmd(&mut self) -> Option<MonitorCmdOps<'_, Self>> {
        Some(self)
    }

    fn support_target_description_xml_override(&mut self) -> Option<TargetDescriptionXmlOverrideOps<'_, Self>> {
        Some(self)
    }
}

impl TargetDescriptionXmlOverride for Machine<'_> {
    fn target_description_xml(
        &self,
        annex: &[u8],
        offset: u64,
        length: usize,
        buf: &mut [u8],
    ) -> TargetResult<usize, Self> {
        if annex != b"target.xml" {
            return Err(TargetError::Errno(EINVAL));
        }
        let xml = self.registers.description().as_bytes();
        let from = usize::try_from(offset).unwrap_or(usize::MAX).min(xml.len());
        let count = (xml.len() - from).min(length).min(buf.len());
        buf[..count].copy_from_slice(&xml[from..from + count]);
        Ok(count)
    }
}

impl MultiThreadBase for Machine<'_> {
    fn read_registers(&mut self, regs: &mut Image, tid: Tid) -> TargetResult<(), Self> {
        regs.0 = self.registers.all(&self.state(tid)?);
        Ok(())
    }

    fn write_registers(&mut self, regs: &Image, tid: Tid) -> TargetResult<(), Self> {
        let mut state = self.state(tid)?;
        let memory = self.controls.run.machine().memory();
        let set = self.registers.set_all(&mut state, memory, &regs.0);
        set.map_err(|_| TargetError::Errno(EINVAL))?;
        self.set_state(tid, &state)
    }

    fn support_single_register_access(&mut self) -> Option<SingleRegisterAccessOps<'_, Tid, Self>> {
        Some(self)
    }

    fn read_addrs(&mut self, start: u64, data: &mut [u8], tid: Tid) -> TargetResult<usize, Self> {
        let done = self.pieces(tid, start, data.len(), |vm, gpa, span| {
            vm.read_physical(gpa, &mut data[span]).is_ok()
        })?;
        match done {
            0 if !data.is_empty() => Err(TargetError::Errno(EFAULT)),
            done => Ok(done),
        }
    }

    fn write_addrs(&mut self, start: u64, data: &[u8], tid: Tid) -> TargetResult<(), Self> {
        // All of it or nothing.
        let all = self.pieces(tid, start, data.len(), |vm, gpa, span| {
            vm.read_physical(gpa, &mut vec![0; span.len()]).is_ok()
        })?;
        if all < data.len() {
            return Err(TargetError::Errno(EFAULT));
        }
        self.pieces(tid, start, data.len(), |vm, gpa, span| {
            vm.write_physical(gpa, &data[span]).is_ok()
        })?;
        Ok(())
    }

    fn list_active_threads(&mut self, thread_is_active: &mut dyn FnMut(Tid)) -> Result<(), Infallible> {
        (0..self.controls.run.cpu_count())
            .map(thread_of)
            .for_each(thread_is_active);
        Ok(())
    }

    fn support_resume(&mut self) -> Option<MultiThreadResumeOps<'_, Self>> {
        Some(self)
    }

    fn support_thread_extra_info(&mut self) -> Option<ThreadExtraInfoOps<'_, Self>> {
        Some(self)
    }
}

impl SingleRegisterAccess<Tid> for Machine<'_> {
    fn read_register(&mut self, tid: Tid, reg: Number, buf: &mut [u8]) -> TargetResult<usize, Self> {
        let state = self.state(tid)?;
        let bytes = self.registers.read(&state, reg.0).ok_or(TargetError::Errno(EINVAL))?;
        let buf = buf.get_mut(..bytes.len()).ok_or(TargetError::Errno(EINVAL))?;
        buf.copy_from_slice(&bytes);
        Ok(bytes.len())
    }

    fn write_register(&mut self, tid: Tid, reg: Number, value: &[u8]) -> TargetResult<(), Self> {
        let mut state = self.state(tid)?;
        let memory = self.controls.run.machine().memory();
        let set = self.registers.write(&mut state, memory, reg.0, value);
        set.map_err(|_| TargetError::Errno(EINVAL))?;
        self.set_state(tid, &state)
    }
}

impl ThreadExtraInfo for Machine<'_> {
    fn thread_extra_info(&self, tid: Tid, buf: &mut [u8]) -> Result<usize, Infallible> {
        let cpu = cpu_of(tid);
        let text = match self.controls.run.cpu_state(cpu).map(|state| state.activity) {
            None => "no such CPU".into(),
            Some(activity) => {
                let does = match activity {
                    Activity::Running => "running",
                    Activity::Halted => "halted",
                    Activity::Waiting => "in MWAIT",
                    Activity::Shutdown => "shut down",
                    Activity::WaitForSipi => "not started",
                };
                format!("CPU {cpu} [{does}]")
            }
        };
        let count = text.len().min(buf.len());
        buf[..count].copy_from_slice(&text.as_bytes()[..count]);
        Ok(count)
    }
}

impl MultiThreadResume for Machine<'_> {
    fn resume(&mut self) -> Result<(), Infallible> {
        Ok(())
    }

    fn clear_resume_actions(&mut self) -> Result<(), Infallible> {
        self.resume = Resume::default();
        Ok(())
    }

    fn set_resume_action_continue(&mut self, tid: Tid, _: Option<Signal>) -> Result<(), Infallible> {
        // A machine has no signals: one that gdb passes on is gone.
        self.resume.named = Some(cpu_of(tid));
        Ok(())
    }

    fn support_single_step(&mut self) -> Option<MultiThreadSingleStepOps<'_, Self>> {
        Some(self)
    }

    fn support_range_step(&mut self) -> Option<MultiThreadRangeSteppingOps<'_, Self>> {
        Some(self)
    }

    fn support_reverse_step(&mut self) -> Option<ReverseStepOps<'_, Tid, Self>> {
        if self.controls.run.extent().is_some() {
            Some(self)
        } else {
            None
        }
    }

    fn support_reverse_cont(&mut self) -> Option<ReverseContOps<'_, Tid, Self>> {
        if self.controls.run.extent().is_some() {
            Some(self)
        } else {
            None
        }
    }

    fn support_scheduler_locking(&mut self) -> Option<MultiThreadSchedulerLockingOps<'_, Self>> {
        Some(self)
    }
}

impl ReverseStep<Tid> for Machine<'_> {
    fn reverse_step(&mut self, tid: Tid) -> Result<(), Infallible> {
        self.resume.reverse = Some(Reverse::Step(cpu_of(tid)));
        Ok(())
    }
}

impl ReverseCont<Tid> for Machine<'_> {
    fn reverse_cont(&mut self) -> Result<(), Infallible> {
        self.resume.reverse = Some(Reverse::Continue);
        Ok(())
    }
}

impl MultiThreadSingleStep for Machine<'_> {
    fn set_resume_action_step(&mut self, tid: Tid, _: Option<Signal>) -> Result<(), Infallible> {
        self.resume.step = Some(cpu_of(tid));
        Ok(())
    }
}

impl MultiThreadRangeStepping for Machine<'_> {
    fn set_resume_action_range_step(&mut self, tid: Tid, start: u64, end: u64) -> Result<(), Infallible> {
        self.resume.step = Some(cpu_of(tid));
        self.resume.range = Some((start, end));
        Ok(())
    }
}

impl MultiThreadSchedulerLocking for Machine<'_> {
    fn set_resume_action_scheduler_lock(&mut self) -> Result<(), Infallible> {
        self.resume.lock = true;
        Ok(())
    }
}

impl Breakpoints for Machine<'_> {
    fn support_sw_breakpoint(&mut self) -> Option<SwBreakpointOps<'_, Self>> {
        Some(self)
    }

    fn support_hw_breakpoint(&mut self) -> Option<HwBreakpointOps<'_, Self>> {
        Some(self)
    }

    fn support_hw_watchpoint(&mut self) -> Option<HwWatchpointOps<'_, Self>> {
        Some(self)
    }
}

impl SwBreakpoint for Machine<'_> {
    fn add_sw_breakpoint(&mut self, addr: u64, _: usize) -> TargetResult<bool, Self> {
        if self.software.insert(addr) {
            self.controls.run.debugger().add_breakpoint(addr);
        }
        Ok(true)
    }

    fn remove_sw_breakpoint(&mut self, addr: u64, _: usize) -> TargetResult<bool, Self> {
        if self.software.remove(&addr) {
            self.controls.run.debugger().remove_breakpoint(addr);
        }
        Ok(true)
    }
}

impl HwBreakpoint for Machine<'_> {
    fn add_hw_breakpoint(&mut self, addr: u64, _: usize) -> TargetResult<bool, Self> {
        if self.hardware.insert(addr) {
            self.controls.run.debugger().add_breakpoint(addr);
        }
        Ok(true)
    }

    fn remove_hw_breakpoint(&mut self, addr: u64, _: usize) -> TargetResult<bool, Self> {
        if self.hardware.remove(&addr) {
            self.controls.run.debugger().remove_breakpoint(addr);
        }
        Ok(true)
    }
}

impl HwWatchpoint for Machine<'_> {
    fn add_hw_watchpoint(&mut self, addr: u64, len: u64, kind: WatchKind) -> TargetResult<bool, Self> {
        let Some(watchpoint) = watchpoint(addr, len, kind) else {
            return Ok(false);
        };
        if !self.watchpoints.contains(&watchpoint) {
            self.watchpoints.push(watchpoint);
            self.controls.run.debugger().add_watchpoint(watchpoint);
        }
        Ok(true)
    }

    fn remove_hw_watchpoint(&mut self, addr: u64, len: u64, kind: WatchKind) -> TargetResult<bool, Self> {
        let Some(watchpoint) = watchpoint(addr, len, kind) else {
            return Ok(false);
        };
        if let Some(index) = self.watchpoints.iter().position(|known| *known == watchpoint) {
            self.watchpoints.remove(index);
            self.controls.run.debugger().remove_watchpoint(&watchpoint);
        }
        Ok(true)
    }
}

impl MonitorCmd for Machine<'_> {
    fn handle_monitor_cmd(&mut self, cmd: &[u8], mut out: ConsoleOutput<'_>) -> Result<(), Infallible> {
        let line = String::from_utf8_lossy(cmd);
        let run = if self.files {
            monitor::run
        } else {
            monitor::run_without_files
        };
        out.write_raw(run(&mut self.controls, self.cpu, line.trim()).as_bytes());
        Ok(())
    }
}
