//! The instructions of a block.

use iced_x86::{Decoder, DecoderOptions, Formatter, IntelFormatter};
use pt_flow::Block;

use trace::view::{Here, Names, Process};

/// An instruction.
#[derive(Debug)]
pub struct DisasmLine {
    /// Its address.
    pub ip: u64,
    /// Its bytes.
    pub bytes: Vec<u8>,
    /// As Intel writes it, with the name of a branch's target.
    pub text: String,
}

impl DisasmLine {
    /// The bytes as hexadecimal digits.
    pub fn hex(&self) -> String {
        let digits: Vec<String> = self.bytes.iter().map(|byte| format!("{byte:02x}")).collect();
        digits.join(" ")
    }
}

/// Decodes a block's bytes, as a process executed them.
pub fn lines(names: &Names, here: &Here, process: Option<Process>, block: &Block, code: &[u8]) -> Vec<DisasmLine> {
    let bits = block.mode.bits();
    let mut formatter = IntelFormatter::new();
    let options = formatter.options_mut();
    options.set_hex_prefix("0x");
    options.set_hex_suffix("");
    options.set_uppercase_hex(false);
    options.set_space_after_operand_separator(true);
    options.set_branch_leading_zeros(false);
    let mut decoder = Decoder::with_ip(bits, code, block.ip, DecoderOptions::NONE);
    let (mut lines, mut at) = (Vec::new(), 0);
    while decoder.can_decode() {
        let instruction = decoder.decode();
        let mut text = String::new();
        formatter.format(&instruction, &mut text);
        let target = instruction.near_branch_target();
        if let Some(place) = (target != 0).then(|| names.place(target, process, here.step)).flatten() {
            text += &format!("  ; {place}");
        }
        let len = instruction.len();
        let bytes = code[at..at + len].to_vec();
        lines.push(DisasmLine {
            ip: instruction.ip(),
            bytes,
            text,
        });
        at += len;
    }
    lines
}
