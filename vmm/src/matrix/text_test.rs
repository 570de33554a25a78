use super::super::expected::tests::cell;
use super::*;

// covers: matrix/table
#[test]
fn a_table_has_a_row_for_each_guest_and_a_column_for_each_model() {
    let report = Report {
        cells: vec![
            cell("lbr", "haswell", "soft", Verdict::Passed, &["a", "b", "?c"]),
            cell("lbr", "p6", "soft", Verdict::Skipped("no 64-bit mode".into()), &[]),
            cell("status", "haswell", "soft", Verdict::Passed, &[]),
            cell(
                "status",
                "p6",
                "soft",
                Verdict::Failed("hangs: CPU 0 at 0x1000 f+0x2".into()),
                &["-x"],
            ),
        ],
        shard: None,
    };
    let table = tables(&report);
    assert!(
        table.starts_with("soft    haswell    p6\nlbr           2     -\nstatus       ok  FAIL\n\n"),
        "{table}"
    );
    assert_eq!(
        skips(&report),
        "skip: lacks <it>: 1 test\nskip: no 64-bit mode: 1 cell\n"
    );
    let failed: Vec<&Cell> = report.cells.iter().collect();
    assert_eq!(
        failures(&failed),
        "status on p6 (soft): hangs: CPU 0 at 0x1000 f+0x2\n  x\n    at: x\n"
    );
    // What minivmm said is there once.
    let mut alone = cell(
        "status",
        "p6",
        "soft",
        Verdict::Failed("hangs: CPU 0 at 0x1000 f+0x2".into()),
        &[],
    );
    alone.log = "the guest's last line\n\nminivmm: CPU 0 at 0x1000 f+0x2\n".into();
    assert_eq!(
        failures(&[&alone]),
        "status on p6 (soft): hangs: CPU 0 at 0x1000 f+0x2\n    the guest's last line\n    \n"
    );
    assert_eq!(
        summary(&report),
        "4 cells: 2 passed, 1 failed, 1 skipped; tests: 2 passed, 1 failed, 1 skipped"
    );
}

#[test]
fn many_models_have_numbers() {
    let models: Vec<String> = (0..12).map(|n| format!("a-long-model-{n}")).collect();
    let cells = models
        .iter()
        .map(|model| cell("g", model, "soft", Verdict::Passed, &[]))
        .collect();
    let table = tables(&Report { cells, shard: None });
    assert!(table.lines().all(|line| line.len() <= WIDTH + 1), "{table}");
    assert!(table.contains("\n1 a-long-model-0, 2 a-long-model-1,"), "{table}");
}
