use super::*;

fn read(blocks: &mut Blocks, annex: Annex, next: u64) -> Result<Option<Vec<(u64, u64)>>, Unread> {
    let pairs = |blocks: Vec<Block>| blocks.iter().map(|block| (block.begin, block.end)).collect();
    Ok(blocks.read(annex, next)?.map(pairs))
}

// covers: btrace/delta
#[test]
fn a_delta_goes_on_where_the_last_read_ended() {
    use Annex::*;
    let mut blocks = Blocks::new(4);
    blocks.start(0x10);
    assert_eq!(
        read(&mut blocks, All, 0x10),
        Ok(Some(vec![(0x10, 0x10)])),
        "never empty"
    );
    assert_eq!(read(&mut blocks, New, 0x10), Ok(None));
    assert_eq!(read(&mut blocks, Delta, 0x10), Ok(Some(vec![(0, 0x10)])), "no progress");
    // In the same block, and then by two branches.
    assert_eq!(read(&mut blocks, Delta, 0x14), Ok(Some(vec![(0, 0x14)])));
    blocks.branch(0x18, 0x40);
    blocks.branch(0x44, 0x10);
    assert_eq!(
        read(&mut blocks, Delta, 0x14),
        Ok(Some(vec![(0x10, 0x14), (0x40, 0x44), (0, 0x18)]))
    );
    assert_eq!(
        read(&mut blocks, All, 0x14),
        Ok(Some(vec![(0x10, 0x14), (0x40, 0x44), (0x10, 0x18)]))
    );
    // More than there is room for.
    for _ in 0..5 {
        blocks.branch(0x18, 0x10);
    }
    assert_eq!(read(&mut blocks, Delta, 0x10), Err(Unread::Gap));
    let all = read(&mut blocks, New, 0x10).unwrap().unwrap();
    assert_eq!(
        all,
        [(0x10, 0x10), (0x10, 0x18), (0x10, 0x18), (0x10, 0x18), (0x10, 0x18)]
    );
    assert_eq!(read(&mut blocks, Delta, 0x10), Ok(Some(vec![(0, 0x10)])));
}

// covers: btrace/events
#[test]
fn what_was_interrupted_has_not_run() {
    use Annex::*;
    let mut blocks = Blocks::new(8);
    blocks.start(0x10);
    // A fault at 0x18; its handler's first instruction faults, too.
    blocks.interrupted(Some(0x14), 0x100);
    blocks.interrupted(None, 0x200);
    assert_eq!(
        read(&mut blocks, Delta, 0x204),
        Ok(Some(vec![(0x200, 0x204), (0, 0x14)]))
    );
    // The instruction that was said to come next faults: gdb has it, and it did not run.
    blocks.interrupted(Some(0x200), 0x100);
    assert_eq!(read(&mut blocks, Delta, 0x100), Err(Unread::Gap));
    assert_eq!(
        read(&mut blocks, New, 0x100),
        Ok(Some(vec![(0x100, 0x100), (0x200, 0x200), (0x10, 0x14)]))
    );
    // The same with nothing before it in its block.
    blocks.interrupted(None, 0x300);
    assert_eq!(read(&mut blocks, Delta, 0x300), Err(Unread::Gap));
    // One that ran, and another one behind it that did not.
    read(&mut blocks, All, 0x300).unwrap();
    blocks.interrupted(Some(0x304), 0x100);
    assert_eq!(
        read(&mut blocks, Delta, 0x100),
        Ok(Some(vec![(0x100, 0x100), (0, 0x304)]))
    );
    // In another time nothing goes on.
    blocks.start(0x500);
    assert_eq!(read(&mut blocks, All, 0x504), Ok(Some(vec![(0x500, 0x504)])));
}
