use super::*;
use engine::CS;
use x86::model::WESTMERE;

#[test]
fn a_report_has_all_registers_and_the_code() {
    let memory = Memory::new(2 << 20).unwrap();
    memory.write(0x1000, &[0x90, 0x0f, 0x0b, 0xcc]).unwrap();
    let mut state = CpuState::reset(&WESTMERE);
    state.gpr[15] = 0xfeed_f00d;
    state.segments[CS].base = 0;
    state.rip = 0x1001;
    let text = report(&memory, &state);
    assert!(
        text.contains("R15 00000000feedf00d") && text.contains(" 90 [0f] 0b cc 00"),
        "{text}"
    );
    state.segments[CS].base = 0xffff_0000;
    assert!(report(&memory, &state).contains("[--]"), "code that is not in RAM");
}
