use super::*;

fn branch(flow: Flow, from: u64, to: u64) -> BranchRecord {
    BranchRecord {
        from,
        to,
        flow: flow.code(),
        ..BranchRecord::default()
    }
}

const TAKEN: Flow = Flow::Cond { taken: true };
const NOT: Flow = Flow::Cond { taken: false };

// covers: lbr/mispredict
#[test]
fn what_is_predicted() {
    for (earlier, branch, predicted, why) in [
        (vec![], branch(TAKEN, 0x20, 0x10), true, "backward: taken"),
        (vec![], branch(TAKEN, 0x20, 0x30), false, "forward: not taken"),
        (
            vec![branch(TAKEN, 0x20, 0x30)],
            branch(TAKEN, 0x20, 0x30),
            true,
            "where it went when it was taken",
        ),
        (
            vec![branch(TAKEN, 0x20, 0x30)],
            branch(NOT, 0x20, 0x22),
            false,
            "it would have gone there",
        ),
        (vec![], branch(NOT, 0x20, 0x22), true, "not known: nothing to go by"),
        (
            vec![branch(TAKEN, 0x20, 0x30), branch(NOT, 0x20, 0x22)],
            branch(TAKEN, 0x20, 0x30),
            true,
            "what is not taken takes nothing out of the buffer",
        ),
        (
            vec![branch(NOT, 0x20, 0x22)],
            branch(TAKEN, 0x20, 0x30),
            false,
            "nor does it put something there",
        ),
        (
            core::iter::once(branch(TAKEN, 0x20, 0x30))
                .chain([branch(Flow::Jump, 0x40, 0x50); WINDOW - 1])
                .collect(),
            branch(TAKEN, 0x20, 0x30),
            true,
            "the oldest in the buffer",
        ),
        (
            core::iter::once(branch(TAKEN, 0x20, 0x30))
                .chain([branch(Flow::Jump, 0x40, 0x50); WINDOW])
                .collect(),
            branch(TAKEN, 0x20, 0x30),
            false,
            "no longer in the buffer",
        ),
        (vec![], branch(Flow::JumpInd, 0x20, 0x30), false, "a target never seen"),
        (
            vec![branch(Flow::CallInd, 0x20, 0x30)],
            branch(Flow::CallInd, 0x20, 0x30),
            true,
            "the same target",
        ),
        (
            vec![branch(Flow::CallInd, 0x20, 0x30)],
            branch(Flow::CallInd, 0x20, 0x40),
            false,
            "another target",
        ),
        (vec![], branch(Flow::Jump, 0x20, 0x90), true, "direct"),
        (vec![], branch(Flow::Call, 0x20, 0x90), true, "direct"),
        (vec![], branch(Flow::Ret, 0x20, 0x90), true, "the return stack"),
    ] {
        let mut records = earlier.clone();
        records.push(branch);
        let fresh = Predictor::default();
        assert_eq!(fresh.predicts(&records, earlier.len()), predicted, "{why}");
        // The same, had the earlier ones come in a batch of their own.
        let mut later = Predictor::default();
        later.advance(&earlier);
        assert_eq!(later.predicts(&[branch], 0), predicted, "{why}: in two batches");
    }
}

// covers: lbr/mispredict
#[test]
fn answers_do_not_depend_on_the_batches() {
    let mut x = 1u64;
    let records: Vec<_> = (0..500)
        .map(|_| {
            x = x.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            // Some share a place of the table.
            let from = 0x1000 + (x >> 60) % 8 * 4 + (x >> 63) * 0x4081;
            branch(Flow::ALL[(x >> 40) as usize % 6], from, 0x1000 + (x >> 50) % 3 * 8)
        })
        .collect();
    let whole: Vec<_> = (0..records.len())
        .map(|i| Predictor::default().predicts(&records, i))
        .collect();
    assert!(whole.iter().any(|&p| p) && whole.iter().any(|&p| !p));
    let fresh = Predictor::default();
    let mut stream = Stream::new(&fresh, &records);
    let streamed: Vec<_> = (0..records.len()).map(|i| stream.predicts(i)).collect();
    assert_eq!(streamed, whole);
    // Asked for some of them only.
    let mut stream = Stream::new(&fresh, &records);
    for i in (0..records.len()).step_by(7) {
        assert_eq!(stream.predicts(i), whole[i], "{i}");
    }
    for size in [1, 2, 7, 15, 16, 17, 100] {
        let mut predictor = Predictor::default();
        let mut answers = Vec::new();
        for batch in records.chunks(size) {
            let mut stream = Stream::new(&predictor, batch);
            for i in 0..batch.len() {
                assert_eq!(stream.predicts(i), predictor.predicts(batch, i));
                answers.push(predictor.predicts(batch, i));
            }
            predictor.advance(batch);
        }
        assert_eq!(answers, whole, "batches of {size}");
    }
    // Of the taken branches the answers are the same where no others are recorded.
    let answers = records.iter().copied().zip(whole);
    let (taken, expected): (Vec<_>, Vec<_>) = answers.filter(|(r, _)| r.flow != NOT_TAKEN).unzip();
    assert!(taken.len() < records.len());
    let alone: Vec<_> = (0..taken.len()).map(|i| fresh.predicts(&taken, i)).collect();
    assert_eq!(alone, expected);
}
