//! The table on the terminal, and what is to be said below it.

use std::collections::BTreeMap;
use std::fmt::Write;

use super::{
    Report,
    cell::{Cell, Verdict},
    tap::Point,
};

/// A terminal's width that tables keep to.
const WIDTH: usize = 100;

/// A table for each engine: guests by models.
pub fn tables(report: &Report) -> String {
    let mut text = String::new();
    for engine in report.engines() {
        // Of an engine that is not to be had, the reason says all.
        if report.absent(engine) {
            continue;
        }
        let models = report.models();
        let guests = report.guests();
        let first = guests
            .iter()
            .map(|guest| guest.chars().count())
            .max()
            .unwrap_or(0)
            .max(engine.chars().count());
        let body: Vec<Vec<String>> = guests
            .iter()
            .map(|guest| {
                models
                    .iter()
                    .map(|model| brief(report.cell(guest, model, engine)))
                    .collect()
            })
            .collect();
        // The models' names, or numbers where the names would not fit.
        let names: Vec<String> = models.iter().map(|model| (*model).to_string()).collect();
        let columns = |heads: &[String]| -> Vec<usize> {
            let cells = |n: usize| body.iter().map(move |row| row[n].chars().count()).max().unwrap_or(0);
            heads
                .iter()
                .enumerate()
                .map(|(n, head)| cells(n).max(head.chars().count()))
                .collect()
        };
        let fits = columns(&names).iter().map(|width| width + 2).sum::<usize>() + first <= WIDTH;
        let numbers: Vec<String> = (1..=names.len()).map(|n| n.to_string()).collect();
        let heads = if fits { &names } else { &numbers };
        let widths = columns(heads);
        let mut line = |name: &str, cells: &[String]| {
            let mut row = format!("{name:<first$}");
            for (cell, width) in cells.iter().zip(&widths) {
                let _ = write!(row, "  {cell:>width$}");
            }
            let _ = writeln!(text, "{}", row.trim_end());
        };
        line(engine, heads);
        for (guest, row) in guests.iter().zip(&body) {
            line(guest, row);
        }
        if !fits {
            let legend: Vec<String> = numbers
                .iter()
                .zip(&names)
                .map(|(n, name)| format!("{n} {name}"))
                .collect();
            let _ = writeln!(text, "{}", wrap(&legend));
        }
        text.push('\n');
    }
    if !text.is_empty() {
        text += "A number: tests that passed. ok: by exit status. -: nothing to run, or no such engine here.\n";
    }
    text
}

/// Words in lines that are not too long.
fn wrap(words: &[String]) -> String {
    let mut lines = vec![String::new()];
    for word in words {
        match lines.last_mut() {
            Some(line) if line.is_empty() => line.push_str(word),
            Some(line) if line.len() + 2 + word.len() <= WIDTH => {
                line.push_str(", ");
                line.push_str(word);
            }
            _ => lines.push(word.clone()),
        }
    }
    lines.join(",\n")
}

fn brief(cell: Option<&Cell>) -> String {
    let Some(cell) = cell else { return String::new() };
    match (&cell.verdict, cell.counts()) {
        (Verdict::Failed(_), _) => "FAIL".into(),
        (Verdict::Skipped(_) | Verdict::Absent(_), _) => "-".into(),
        (Verdict::Passed, [0, 0, 0]) => "ok".into(),
        (Verdict::Passed, [passed, ..]) => passed.to_string(),
    }
}

/// Each failed cell: why, its failed tests with what they said, the end of its console, registers.
pub fn failures(cells: &[&Cell]) -> String {
    let mut text = String::new();
    for cell in cells {
        let Verdict::Failed(why) = &cell.verdict else { continue };
        let _ = writeln!(text, "{}: {why}", cell.name());
        let mut any = false;
        for (name, point) in &cell.points {
            if let Point::Failed(diagnostic) = point {
                any = true;
                let _ = writeln!(text, "  {name}");
                for line in diagnostic.lines() {
                    let _ = writeln!(text, "    {line}");
                }
            }
        }
        // Where tests say what is wrong, the console says the same again; and minivmm's line is the headline's.
        let is_said = |line: &str| why.ends_with(line.strip_prefix("minivmm: ").unwrap_or(line)) && !line.is_empty();
        if !any {
            for line in cell.log.lines().filter(|line| !is_said(line)) {
                let _ = writeln!(text, "    {line}");
            }
        }
    }
    text
}

/// Why cells and tests were skipped, and how many by each reason.
pub fn skips(report: &Report) -> String {
    let mut reasons: BTreeMap<String, [usize; 2]> = BTreeMap::new();
    for cell in &report.cells {
        if let Verdict::Skipped(reason) | Verdict::Absent(reason) = &cell.verdict {
            reasons.entry(reason.clone()).or_default()[0] += 1;
        }
        // A cell of nothing but skips is counted as one.
        if matches!(cell.verdict, Verdict::Skipped(_)) {
            continue;
        }
        for (_, point) in &cell.points {
            if let Point::Skipped(reason) = point {
                reasons.entry(reason.clone()).or_default()[1] += 1;
            }
        }
    }
    let mut text = String::new();
    for (reason, [cells, tests]) in reasons {
        let parts = [(cells, "cell"), (tests, "test")];
        let parts: Vec<String> = parts
            .into_iter()
            .filter(|(n, _)| *n > 0)
            .map(|(n, what)| count(n, what))
            .collect();
        let _ = writeln!(text, "skip: {reason}: {}", parts.join(", "));
    }
    text
}

/// `1 cell`, `2 cells`.
pub fn count(n: usize, what: &str) -> String {
    format!("{n} {what}{}", if n == 1 { "" } else { "s" })
}

/// The line at the end.
pub fn summary(report: &Report) -> String {
    let [passed, failed, skipped] = report.counts();
    let tests = report.cells.iter().fold([0; 3], |sum, cell| {
        let counts = cell.counts();
        [sum[0] + counts[0], sum[1] + counts[1], sum[2] + counts[2]]
    });
    format!(
        "{}: {passed} passed, {failed} failed, {skipped} skipped; tests: {} passed, {} failed, {} skipped",
        count(report.cells.len(), "cell"),
        tests[0],
        tests[1],
        tests[2]
    )
}

#[cfg(test)]
#[path = "text_test.rs"]
mod tests;
