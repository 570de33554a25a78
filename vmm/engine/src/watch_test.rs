use super::*;

// covers: interest/records
#[test]
fn a_record_that_is_written_as_four_words_is_the_record_of_the_seam() {
    let words = [0x1111_2222_3333_4444u64, 0x5555_6666_7777_8888, 9, 0x0303_0501];
    // SAFETY: Same size, and the byte of the flag is 0.
    let record = unsafe { core::mem::transmute::<[u64; 4], BranchRecord>(words) };
    assert_eq!(
        record,
        BranchRecord {
            from: words[0],
            to: words[1],
            step: 9,
            flow: 1,
            length: 5,
            from_cpl: 3,
            to_cpl: 3,
            loads_cr3: false,
            run: [0; 3],
        }
    );
}
