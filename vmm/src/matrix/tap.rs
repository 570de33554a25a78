//! What a guest reports on its console in the Test Anything Protocol, versions 13 and 14 (testanything.org): our own guest tests,
//! Linux's kselftests, and what many test programs print when asked to.

/// How one test point came out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Point {
    /// `ok`.
    Passed,
    /// `# SKIP`, or `# TODO` of a test that is not expected to hold yet: the reason.
    Skipped(String),
    /// `not ok`, with the diagnostic below it, less its indentation.
    Failed(String),
}

/// A report, as far as it goes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// Each test by name, which is its number where it has none. No two have the same.
    pub points: Vec<(String, Point)>,
    /// The reason, where the plan was to run nothing.
    pub nothing: Option<String>,
    /// What is not as the protocol has it: no plan, another number of points than planned, `Bail out!`.
    pub broken: Option<String>,
}

impl Report {
    /// Reads a console's text, from the first version line on; nothing where there is none. Lines that are not of the protocol are
    /// the guest's other output.
    pub fn read(text: &str) -> Option<Report> {
        let mut lines = text
            .lines()
            .skip_while(|line| !matches!(*line, "TAP version 13" | "TAP version 14"))
            .peekable();
        lines.next()?;
        let mut report = Report::default();
        let mut planned = None;
        while let Some(line) = lines.next() {
            if let Some(reason) = line.strip_prefix("Bail out!") {
                report.broken = Some(format!("Bail out!{reason}"));
                return Some(report);
            }
            if let Some(plan) = line.strip_prefix("1..") {
                let (count, directive) = directive(plan);
                let Ok(count) = count.parse::<usize>() else { continue };
                if count == 0 {
                    report.nothing = Some(directive.map_or("no reason given", |(_, reason)| reason).to_string());
                }
                // The first one: a console may show several reports, and the later ones have to be in its plan.
                planned.get_or_insert(count);
                continue;
            }
            let (passed, rest) = match (point(line, "ok"), point(line, "not ok")) {
                (Some(rest), _) => (true, rest),
                (_, Some(rest)) => (false, rest),
                _ => continue,
            };
            let (description, directive) = directive(rest);
            let digits = description
                .find(|c: char| !c.is_ascii_digit())
                .unwrap_or(description.len());
            let (number, description) = description.split_at(digits);
            let next = report.points.len() + 1;
            if !number.is_empty() && number.parse() != Ok(next) && report.broken.is_none() {
                report.broken = Some(format!("number {number} where {next} follows: {line}"));
            }
            let description = description.trim();
            let description = description.strip_prefix("- ").unwrap_or(description);
            let mut diagnostic = Vec::new();
            while let Some(line) = lines.next_if(|line| line.starts_with("  ") || line.starts_with('#')) {
                diagnostic.push(line.strip_prefix("  ").unwrap_or(line).trim_end());
            }
            let point = match (directive, passed) {
                (Some((Directive::Skip, reason)), _) => Point::Skipped(reason.to_string()),
                (Some((Directive::Todo, reason)), false) => Point::Skipped(format!("to do: {reason}")),
                (_, true) => Point::Passed,
                (_, false) => Point::Failed(diagnostic.join("\n")),
            };
            let name = report.unused(description, next);
            report.points.push((name, point));
        }
        let ran = report.points.len();
        let fault = match planned {
            None => Some("the report has no plan".to_string()),
            Some(planned) if planned != ran => Some(format!("{ran} tests of {planned} reported")),
            Some(_) => None,
        };
        // What came first is the cause.
        report.broken = report.broken.or(fault);
        Some(report)
    }

    /// A name that no point has yet. The expected table has one line for each: no two blanks follow each other.
    fn unused(&self, description: &str, number: usize) -> String {
        let words: Vec<&str> = description.split_whitespace().collect();
        let base = match words.as_slice() {
            [] => number.to_string(),
            words => words.join(" "),
        };
        let taken = |name: &str| self.points.iter().any(|(other, _)| other == name);
        if !taken(&base) {
            return base;
        }
        let mut n = 2;
        while taken(&format!("{base} ({n})")) {
            n += 1;
        }
        format!("{base} ({n})")
    }

    /// The names of the tests that failed.
    pub fn failed(&self) -> Vec<&str> {
        let failed = self
            .points
            .iter()
            .filter(|(_, point)| matches!(point, Point::Failed(_)));
        failed.map(|(name, _)| name.as_str()).collect()
    }

    /// How a test came out.
    pub fn point(&self, name: &str) -> Option<&Point> {
        let named = self.points.iter().find(|(other, _)| other == name);
        named.map(|(_, point)| point)
    }
}

enum Directive {
    Skip,
    Todo,
}

/// What follows the word, if a line begins with it.
fn point<'a>(line: &'a str, word: &str) -> Option<&'a str> {
    let rest = line.strip_prefix(word)?;
    (rest.is_empty() || rest.starts_with(' ')).then(|| rest.trim_start())
}

/// A line without its directive, and the directive: ` # SKIP reason`, ` # TODO reason`, in letters of any size.
fn directive(text: &str) -> (&str, Option<(Directive, &str)>) {
    for (at, _) in text.match_indices('#') {
        if text[..at].ends_with('\\') {
            continue;
        }
        let rest = text[at + 1..].trim_start();
        let word = rest.get(..4).unwrap_or_default().to_ascii_lowercase();
        let kind = match word.as_str() {
            "skip" => Directive::Skip,
            "todo" => Directive::Todo,
            _ => continue,
        };
        // SKIPPED and the like are the same word.
        let reason = rest[4..].trim_start_matches(|c: char| c.is_ascii_alphabetic()).trim();
        return (text[..at].trim(), Some((kind, reason)));
    }
    (text.trim(), None)
}

#[cfg(test)]
#[path = "tap_test.rs"]
mod tests;
