//! The stream of retired instruction pointers of a booting Linux: what follows from branch records, events and the bytes of the
//! code is what is seen when every instruction is announced. Flow kinds are re-derived from the bytes.

use guest_tests::linux;
use guest_tests::retired::Each;
use iced_x86::{Decoder, DecoderOptions, FlowControl, Instruction};
use minivmm::Run;
use minivmm::config::MachineConfig;
use minivmm::front::console::Console;
use std::sync::{Arc, Mutex};
use x86::watch::{BranchRecord, Context, Effects, EventRecord, Far, Flow, Interest, Processor, Recorded, Watch};

/// What an observer has heard, with a hash for each window of so many instructions.
type Heard = guest_tests::retired::Heard<10_000>;
type Shared = Arc<Mutex<Heard>>;

/// Hears of branches, and walks the code between them.
struct Walker {
    heard: Shared,
    ip: Option<u64>,
    context: Context,
}

impl Walker {
    fn decode(&self, ip: u64, cpu: &mut dyn Processor) -> Instruction {
        let mut bytes = [0; 15];
        // The last instruction of a page that no other follows.
        let room = if cpu.read_linear(ip, &mut bytes).is_ok() {
            15
        } else {
            let room = (0x1000 - (ip & 0xFFF)).min(15) as usize;
            let _ = cpu.read_linear(ip, &mut bytes[..room]);
            room
        };
        Decoder::with_ip(self.context.code.bits(), &bytes[..room], ip, DecoderOptions::NONE).decode()
    }

    /// Straight on up to the transfer, then along it.
    fn transfer(&mut self, record: &BranchRecord, cpu: &mut dyn Processor) {
        let heard = self.heard.clone();
        let mut heard = heard.lock().unwrap();
        if heard.wrong.is_some() {
            return;
        }
        let mut ip = self.ip.unwrap_or(record.from);
        let mut left = 1_000_000;
        while ip != record.from {
            let i = self.decode(ip, cpu);
            let straight = matches!(i.flow_control(), FlowControl::Next | FlowControl::Exception);
            left -= 1;
            if !straight || left == 0 {
                heard.wrong = Some(format!("{ip:x}: {i} ({:?}) before {record:x?}", i.code()));
                return;
            }
            heard.stream.push(ip);
            ip = i.next_ip();
        }
        let flow = Flow::from_code(record.flow).unwrap();
        let retired = record.length != 0;
        if retired {
            let i = self.decode(record.from, cpu);
            let fits = match flow {
                Flow::Cond { .. } => i.flow_control() == FlowControl::ConditionalBranch,
                Flow::Jump => i.flow_control() == FlowControl::UnconditionalBranch,
                Flow::JumpInd => i.flow_control() == FlowControl::IndirectBranch,
                Flow::Call => i.flow_control() == FlowControl::Call,
                Flow::CallInd => i.flow_control() == FlowControl::IndirectCall,
                Flow::Ret => i.flow_control() == FlowControl::Return,
                Flow::Far(Far::Exception | Far::Interrupt) => false,
                Flow::Far(_) => i.flow_control() != FlowControl::Next,
            };
            if !fits || i.len() != usize::from(record.length) {
                heard.wrong = Some(format!("{i} ({:?}) is {record:x?}", i.code()));
                return;
            }
            heard.stream.push(record.from);
        }
        self.ip = Some(record.to);
    }
}

impl Watch for Walker {
    fn interest(&mut self, cpu: &mut dyn Processor) -> Interest {
        if self.ip.is_none() {
            self.context = cpu.context();
            self.ip = Some(cpu.rip().wrapping_add(self.context.cs_base));
        }
        Interest {
            branches: Recorded::All,
            // The code must still be what ran.
            branch_room: 64,
            ..Interest::NOTHING
        }
    }
    fn branches(&mut self, records: &[BranchRecord], cpu: &mut dyn Processor) -> Effects {
        for record in records {
            self.transfer(record, cpu);
        }
        self.context = cpu.context();
        Effects::NONE
    }
    fn event(&mut self, event: &EventRecord, cpu: &mut dyn Processor) -> Effects {
        self.transfer(&event.branch, cpu);
        self.context = cpu.context();
        Effects::NONE
    }
}

/// Boots for so many steps under an observer: what it has heard, and what the machine came to.
fn boot(steps: u64, observer: impl FnOnce(Shared) -> Box<dyn Watch + Send>) -> (Heard, u64) {
    let mut config = MachineConfig::new(&linux().kernel);
    config.initrd = vec![linux().initrd.clone().into()];
    config.cmdline = Some(b"console=ttyS0 panic=-1 minivmm.script=nothing".to_vec());
    config.max_instructions = Some(steps);
    let mut vm = Run::new(&config).unwrap();
    let shared = Shared::default();
    assert!(vm.machine().observe(0, Some(observer(shared.clone()))));
    let mut console = Console::open(&config.serial, &[], vm.line()).unwrap();
    vm.run(&mut console).unwrap();
    vm.machine().observe(0, None);
    let heard = std::mem::take(&mut *shared.lock().unwrap());
    (heard, vm.digest())
}

// covers: trace/oracle-stream
#[test]
fn the_stream_of_a_booting_linux_follows_from_its_branches() {
    // Most of the first steps are iterations of REP, which are no instructions of their own.
    let steps = 6_000_000;
    let (each, first) = boot(steps, |heard| {
        Box::new(Each::new(None, move |ip| heard.lock().unwrap().stream.push(ip)))
    });
    let (walked, second) = boot(steps, |heard| {
        Box::new(Walker {
            heard,
            ip: None,
            context: Context::default(),
        })
    });
    assert_eq!(walked.wrong, None);
    assert_eq!(first, second, "watching changes nothing");
    // The last window of either may not have been heard of whole.
    let windows = each.stream.windows.len().min(walked.stream.windows.len());
    assert!(windows >= 50, "{windows} windows");
    let differ = (0..windows).find(|&i| each.stream.windows[i] != walked.stream.windows[i]);
    assert_eq!(differ, None, "of {windows} windows");
}
