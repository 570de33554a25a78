//! Reports as JUnit XML, which every CI shows, and back: that is how the shards of a matrix are put together.
//!
//! A cell is a suite, with its guest, model and engine as properties; a test of its TAP report is a case. What concerns the cell as
//! a whole is the case `run`.

use std::path::Path;

use quick_junit::{NonSuccessKind, Property, Report as Xml, TestCase, TestCaseStatus, TestSuite};
use x86::model::MODELS;

use super::{
    Report,
    cell::{Cell, Verdict},
    plan::{PlanError, Shard, parse_shard},
    tap::Point,
};
use crate::error::Error;
use trace::regular;

/// The case that stands for the cell as a whole.
const RUN: &str = "run";
const ENGINE: &str = "engine";

/// A report as XML.
///
/// # Errors
/// It cannot be written; what is in it is no reason.
pub fn write(report: &Report) -> Result<String, quick_junit::SerializeError> {
    let mut xml = Xml::new("minivmm matrix");
    xml.set_time(report.cells.iter().map(|cell| cell.time).sum());
    for cell in &report.cells {
        xml.add_test_suite(suite(cell, report.shard));
    }
    xml.to_string()
}

fn suite(cell: &Cell, shard: Option<Shard>) -> TestSuite {
    let mut suite = TestSuite::new(cell.name());
    suite.set_time(cell.time);
    for (name, value) in [("guest", &cell.guest), ("model", &cell.model), (ENGINE, &cell.engine)] {
        suite.add_property(Property::new(name, value.as_str()));
    }
    if let Some(shard) = shard {
        suite.add_property(Property::new("shard", shard.to_string()));
    }
    for (name, point) in &cell.points {
        let status = match point {
            Point::Passed => TestCaseStatus::success(),
            Point::Skipped(reason) => skipped(reason, "test"),
            Point::Failed(diagnostic) => {
                let mut status = TestCaseStatus::non_success(NonSuccessKind::Failure);
                status
                    .set_message(message(diagnostic))
                    .set_description(diagnostic.as_str());
                status
            }
        };
        suite.add_test_case(case(cell, name, status));
    }
    let whole = match &cell.verdict {
        Verdict::Passed => cell.points.is_empty().then(TestCaseStatus::success),
        Verdict::Skipped(reason) => Some(skipped(reason, "guest")),
        Verdict::Absent(reason) => Some(skipped(reason, ENGINE)),
        Verdict::Failed(why) => {
            let mut status = TestCaseStatus::non_success(NonSuccessKind::Error);
            status.set_message(why.as_str()).set_description(cell.log.as_str());
            Some(status)
        }
    };
    if let Some(status) = whole {
        suite.add_test_case(case(cell, RUN, status));
    }
    suite
}

fn case(cell: &Cell, name: &str, status: TestCaseStatus) -> TestCase {
    let mut case = TestCase::new(name, status);
    case.set_classname(format!("{}.{}.{}", cell.engine, cell.guest, cell.model));
    case
}

fn skipped(reason: &str, kind: &str) -> TestCaseStatus {
    let mut status = TestCaseStatus::skipped();
    status.set_message(reason).set_type(kind);
    status
}

/// The line of a diagnostic that says most: what follows `message:`, or the first one.
fn message(diagnostic: &str) -> &str {
    let mut lines = diagnostic.lines().map(str::trim);
    match lines.clone().find_map(|line| line.strip_prefix("message: ")) {
        Some("|") => lines.skip_while(|line| !line.starts_with("message:")).nth(1),
        Some(text) => Some(text),
        None => lines.find(|line| !matches!(*line, "---" | "...")),
    }
    .unwrap_or_default()
}

/// Reads reports and puts them together. All shards must be there, and no cell twice.
///
/// # Errors
/// In one line: a file that cannot be read or is no report of a matrix, a cell that two have, a shard that is missing.
pub fn merge(paths: &[impl AsRef<Path>]) -> Result<Report, Error> {
    let mut merged = Report::default();
    let mut shards: Vec<Shard> = Vec::new();
    for path in paths {
        let path = path.as_ref();
        let refuse = |why: String| Error::Usage(format!("matrix merge {}: {why}", path.display()));
        let text = regular::text(path, super::plan::LONGEST).map_err(|source| Error::File {
            option: "matrix merge",
            path: path.into(),
            source,
        })?;
        for (cell, shard) in read(&text).map_err(|why| refuse(why.to_string()))? {
            if let Some(other) = merged.cells.iter().find(|other| other.name() == cell.name()) {
                return Err(refuse(format!("{} is in a file before it, too", other.name())));
            }
            if let Some(shard) = shard
                && !shards.contains(&shard)
            {
                shards.push(shard);
            }
            merged.cells.push(cell);
        }
    }
    if let Some(Shard { count, .. }) = shards.first().copied() {
        let refuse = |why: String| Error::Usage(format!("matrix merge: {why}"));
        if let Some(other) = shards.iter().find(|shard| shard.count != count) {
            return Err(refuse(format!("shard {other} beside shards of {count}")));
        }
        let missing = (1..=count).find(|index| !shards.iter().any(|shard| shard.index == *index));
        if let Some(index) = missing {
            return Err(refuse(format!("shard {index}/{count} is missing")));
        }
    }
    // As one run of everything has them.
    let known = |model: &str| {
        MODELS
            .iter()
            .position(|known| known.name == model)
            .unwrap_or(usize::MAX)
    };
    merged.cells.sort_by_cached_key(|cell| {
        let engine = (cell.engine != "soft", cell.engine.clone());
        (cell.guest.clone(), engine, known(&cell.model), cell.model.clone())
    });
    Ok(merged)
}

/// Why a file is no report of a matrix.
#[derive(Debug, thiserror::Error)]
pub enum JunitError {
    /// Not XML, or not JUnit's.
    #[error("not JUnit XML: {}", .0.to_string().replace('\n', " "))]
    Xml(#[from] quick_junit::DeserializeError),
    /// A suite of somebody else's.
    #[error("not of minivmm matrix: {0} has no property {1}")]
    Property(String, String),
    /// A part of a matrix that is none.
    #[error(transparent)]
    Shard(#[from] PlanError),
}

/// The cells of a report, with the shard that each is of.
///
/// # Errors
/// It is not such a report.
pub fn read(text: &str) -> Result<Vec<(Cell, Option<Shard>)>, JunitError> {
    let xml = Xml::deserialize_from_str(text)?;
    xml.test_suites.iter().map(cell_of).collect()
}

fn cell_of(suite: &TestSuite) -> Result<(Cell, Option<Shard>), JunitError> {
    let property = |name: &str| {
        let found = suite.properties.iter().find(|property| property.name.as_str() == name);
        found.map(|property| property.value.as_str().to_string())
    };
    let must = |name: &str| {
        let suite = suite.name.as_str();
        property(name).ok_or_else(|| JunitError::Property(suite.into(), name.into()))
    };
    let mut cell = Cell {
        guest: must("guest")?,
        model: must("model")?,
        engine: must(ENGINE)?,
        verdict: Verdict::Passed,
        points: Vec::new(),
        time: suite.time.unwrap_or_default(),
        log: String::new(),
    };
    for case in &suite.test_cases {
        let text = |text: &Option<quick_junit::XmlString>| text.as_ref().map_or("", |text| text.as_str()).to_string();
        let name = case.name.as_str();
        match &case.status {
            TestCaseStatus::Success { .. } if name == RUN => {}
            TestCaseStatus::Success { .. } => cell.points.push((name.to_string(), Point::Passed)),
            TestCaseStatus::Skipped { message, ty, .. } => match text(ty).as_str() {
                "guest" => cell.verdict = Verdict::Skipped(text(message)),
                ENGINE => cell.verdict = Verdict::Absent(text(message)),
                _ => cell.points.push((name.to_string(), Point::Skipped(text(message)))),
            },
            TestCaseStatus::NonSuccess {
                kind,
                message,
                description,
                ..
            } => match kind {
                NonSuccessKind::Error => {
                    cell.verdict = Verdict::Failed(text(message));
                    cell.log = text(description);
                }
                NonSuccessKind::Failure => {
                    cell.points.push((name.to_string(), Point::Failed(text(description))));
                }
            },
        }
    }
    let shard = property("shard").map(|text| parse_shard(&text)).transpose()?;
    Ok((cell, shard))
}

#[cfg(test)]
#[path = "junit_test.rs"]
mod tests;
