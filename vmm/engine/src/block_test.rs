//! What is known of a block: its bytes, its instructions, and which op is what.

use x86::model::HASWELL;

use super::*;
use crate::EngineOptions;
use crate::cpu::mode;
use crate::exec::bcd;
use crate::frontend::{self, Decoded, MAX, Shown, Source};
use crate::lower::control::{CheckSecond, Stale};
use crate::op::chain_flow;

/// Bytes at an offset of a page, and of the page behind it, decoded and kept at physical address 5000H.
fn kept(bits: u32, offset: usize, code: &[u8], next: Option<&[u8]>) -> BlockCache {
    let mut page = vec![0x90; 0x1000];
    page[offset..][..code.len()].copy_from_slice(code);
    let source = Source {
        page: &page,
        next,
        next_host: 0x7000,
        offset,
        limit: u64::MAX,
        mode: bits | mode::FLAT,
        max: MAX,
        pause: false,
        boundaries: &[],
    };
    let mut lowered = Lowered::default();
    let decoded = frontend::decode(&Shown::new(&HASWELL, EngineOptions::default()), &source, &mut lowered);
    let Ok(Decoded {
        bytes,
        second,
        instructions,
    }) = decoded
    else {
        panic!("the bytes are code");
    };
    let mut cache = BlockCache::new(chain_flow::<Stale>().run, None);
    let key = Key {
        gpa: 0x5000 + offset as u64,
        mode: source.mode,
    };
    let second = next.map(|_| (0x9000, second));
    let first = cache.insert(key, &lowered, &instructions, bytes, second);
    assert_eq!(cache.find(key), Some(first));
    cache
}

/// PUSH BP; DAA; JMP $-5: three instructions of known lengths (SDM Vol. 2).
const THREE: [u8; 4] = [0x55, 0x27, 0xeb, 0xfb];

// covers: architecture/blocks
#[test]
fn ops_belong_to_instructions_and_are_what_was_lowered() {
    let cache = kept(mode::SIZE32, 0x123, &THREE, None);
    let block = cache.newest().expect("a block");
    let placed: Vec<(u16, u8)> = block.instructions.iter().map(|i| (i.offset, i.len)).collect();
    assert_eq!(placed, [(0x123, 1), (0x124, 1), (0x125, 2)]);
    assert_eq!((block.bytes, block.second), (4, None));
    let kind = |instruction: usize| block.kinds[block.ops_of(instruction).end - 1].expect("an op");
    assert!(kind(1).is::<bcd::Decimal>() && !kind(0).is::<bcd::Decimal>());
    assert!(kind(0).name().contains("Push"), "{:?}", kind(0));
    // Each op has one instruction: ranges lie behind one another, and the jump is the last.
    assert_eq!(block.ops_of(0).start, 0);
    assert!((0..2).all(|i| block.ops_of(i).end == block.ops_of(i + 1).start));
    assert!(
        block.kinds[block.ops_of(2).end..].iter().all(Option::is_none),
        "link and templates"
    );
}

#[test]
fn an_op_that_leads_on_belongs_to_no_instruction() {
    // No branch: the block ends with the page, and goes on in the next one.
    let cache = kept(mode::SIZE64, 0xffe, &[0x90, 0x90], None);
    let block = cache.newest().expect("a block");
    assert_eq!(block.instructions.len(), 2);
    let behind = block.ops_of(1).end;
    assert!(block.kinds[behind].is_some_and(control::leads_on), "{:?}", block.kinds);
}

#[test]
fn a_block_is_told_in_a_line() {
    // MOV EAX, 12345678H: three bytes in one page, two in the next.
    let cache = kept(mode::SIZE32, 0xffd, &[0xb8, 0x78, 0x56], Some(&[0x34, 0x12, 0x90]));
    let block = cache.newest().expect("a block");
    assert!(block.kinds[0].is_some_and(OpKind::is::<CheckSecond>));
    let reported = block.to_string();
    assert!(
        reported.starts_with("3 bytes at guest-physical 0x5ffd and 2 at 0x9000, mode 0x9; ffd: "),
        "{reported}"
    );
    assert!(
        reported.contains("CheckSecond(0x7000)") && reported.contains("(0x12345678)"),
        "{reported}"
    );
    assert!(!reported.contains('\n'));
}
